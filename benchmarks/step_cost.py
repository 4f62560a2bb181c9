"""What a SepSA step costs beside an Adam step on the same network, and a block update beside the paper's loop.

    python benchmarks/step_cost.py

Writes step_cost.json. The paper's own ratios (Table III, seconds): online FNN 1.17, mini-batch FNN 1.17, CNN 1.25.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from measure import alternate, ratio, spread, write
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from sepsa import RLS, SepSA
from sepsa.paper.networks import cnn, fnn, initialize


def adam_step(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-5)

    def step() -> None:
        loss = mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def sepsa_step(model: nn.Module, x: Tensor, y: Tensor, forgetting: float = 1.0) -> Callable[[], None]:
    optimizer = SepSA(model, torch.optim.Adam, lr=1e-3, weight_decay=1e-5, solver=RLS(forgetting=forgetting))

    def step() -> None:
        with optimizer.observe(y):
            loss = mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def paper_loop(p: int, m: int) -> Callable[[Tensor, Tensor], None]:
    """Equations 17 and 18 sample by sample in torch, float32, as the paper's own code does for a mini-batch."""
    B, alpha = torch.eye(p), torch.zeros(p, m)

    def update(features: Tensor, targets: Tensor) -> None:
        nonlocal B, alpha
        for h, y in zip(features, targets, strict=True):
            h = torch.cat([h, torch.ones(1)]).unsqueeze(1)
            Bh = B @ h
            B = B - Bh @ Bh.T / (1 + h.T @ Bh)
            alpha = alpha - B @ h @ (h.T @ alpha - y)

    return update


def network(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = make()
    initialize(model)
    return model


def main() -> None:
    torch.manual_seed(0)
    cases = {
        "online FNN, 8-50-2, batch 1": (lambda: fnn(8, 2), torch.randn(1, 8), torch.randn(1, 2), 101, 0.90),
        "mini-batch FNN, 8-50-2, batch 32": (lambda: fnn(8, 2), torch.randn(32, 8), torch.randn(32, 2), 101, 1.00),
        "mini-batch CNN, CIFAR-10, batch 64": (
            lambda: cnn(3, 32, 10),
            torch.randn(64, 3, 32, 32),
            torch.eye(10)[torch.randint(10, (64,))],
            15,
            1.03,
        ),
    }
    result = {}
    for name, (make, x, y, rounds, limit) in cases.items():
        contestants = {
            "SepSA": sepsa_step(network(make), x, y),
            "Adam": adam_step(network(make), x, y),
            "SepSA, forgetting 0.999": sepsa_step(network(make), x, y, 0.999),
        }
        times = alternate(contestants, rounds)
        r, f = ratio(times, "SepSA", "Adam"), ratio(times, "SepSA, forgetting 0.999", "SepSA")
        seconds = {k: spread(v) for k, v in times.items()}
        result[name] = {"seconds": seconds, "ratio": r, "wanted": limit, "forgetting 0.999 / 1": f}
        print(f"{name}: SepSA / Adam {r['median']:.3f} [{r['q25']:.3f}, {r['q75']:.3f}], wanted <= {limit}")
        print(f"{name}: forgetting 0.999 / 1 {f['median']:.3f} [{f['q25']:.3f}, {f['q75']:.3f}], wanted <= 1.1")

    features, targets = torch.randn(64, 128), torch.randn(64, 10)
    solver, loop = RLS().bind(nn.Linear(128, 10)), paper_loop(129, 10)
    times = alternate({"loop": lambda: loop(features, targets), "block": lambda: solver.update(features, targets)}, 51)
    r = ratio(times, "loop", "block")
    name = "head update, batch 64, p = 129"
    result[name] = {"seconds": {k: spread(v) for k, v in times.items()}, "ratio": r, "wanted": 10}
    print(f"{name}: the paper's loop / block {r['median']:.1f} [{r['q25']:.1f}, {r['q75']:.1f}], wanted >= 10")
    write(__file__, {"cases": result})


if __name__ == "__main__":
    main()
