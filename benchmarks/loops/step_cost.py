"""What a SepSA step costs beside an Adam step on the same network, and a block update beside the paper's loop.

    python benchmarks/loops/step_cost.py              # writes step_cost.json
    python benchmarks/loops/step_cost.py told         # writes told_cost.json
    python benchmarks/loops/step_cost.py solvers      # writes solver_cost.json

`told`: steps of a perceptron 8-64-1 in batches of 32 with `samples_per_epoch` given, in later epochs, when the head
looks at its ridge again and again; and updates of a head for classes by evidence beside those with a fixed ridge.
`solvers`: the paper's networks with a head for classes, beside Adam on the cross-entropy; wanted <= 1.5 with a fixed
ridge.

The paper's own ratios (Table III, seconds): online FNN 1.17, mini-batch FNN 1.17, CNN 1.25. Seconds on a CPU are those
of the processor, in one thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.measure import alternate, median_and_quartiles, ratio, spread, training_step, write
from reproduction.networks import cnn, fnn, initialize
from sepsa import RLS, SepSA, SoftmaxNewton

SOLVERS: dict[str, Callable[[], Any]] = {
    "SepSA": lambda: RLS(ridge="evidence"),  # SepSA's default
    "SepSA, fixed ridge": RLS,
    "SepSA, fixed ridge, forgetting 0.999": lambda: RLS(forgetting=0.999),
}


def network(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = make()
    initialize(model)
    return model


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-5)


def sepsa(model: nn.Module, solver: Any) -> SepSA:
    return SepSA(model, torch.optim.Adam, solver=solver, lr=1e-3, weight_decay=1e-5)


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


def paper_networks() -> None:
    torch.manual_seed(0)
    cases: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, ...], int, int, float]] = {
        "online FNN, 8-50-2, batch 1": (lambda: fnn(8, 2), 1, (8,), 2, 101, 0.90),
        "mini-batch FNN, 8-50-2, batch 32": (lambda: fnn(8, 2), 32, (8,), 2, 101, 0.95),
        "mini-batch CNN, CIFAR-10, batch 64": (lambda: cnn(3, 32, 10), 64, (3, 32, 32), 10, 15, 1.00),
    }
    result = {}
    for name, (make, batch, shape, outputs, rounds, limit) in cases.items():
        # Many batches in rotation: one that is fitted exactly has gradients below what float32 computes quickly.
        batches = [(torch.randn(batch, *shape), torch.randn(batch, outputs)) for _ in range(64)]
        makers: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {"Adam": adam}
        makers |= {key: partial(sepsa, solver=solver()) for key, solver in SOLVERS.items()}
        contestants = {}
        for key, optimizer in makers.items():
            model = network(make)
            contestants[key] = in_rotation(partial(training_step, model, optimizer(model)), batches)
        times = alternate(contestants, rounds, clock=time.process_time)
        r = ratio(times, "SepSA", "Adam")
        e = ratio(times, "SepSA", "SepSA, fixed ridge")
        f = ratio(times, "SepSA, fixed ridge, forgetting 0.999", "SepSA, fixed ridge")
        seconds = {k: spread(v) for k, v in times.items()}
        result[name] = {"seconds": seconds, "ratio": r, "wanted": limit}
        result[name] |= {"evidence / fixed ridge": e, "forgetting 0.999 / 1": f}
        print(f"{name}: SepSA / Adam {median_and_quartiles(r)}, wanted <= {limit}")
        print(f"{name}: ridge by evidence / fixed {median_and_quartiles(e)}, wanted <= 1.02")
        print(f"{name}: forgetting 0.999 / 1 {median_and_quartiles(f)}, wanted <= 1.1")

    features, targets = torch.randn(64, 128), torch.randn(64, 10)
    solver, loop = RLS().bind(nn.Linear(128, 10)), paper_loop(129, 10)
    times = alternate(
        {"loop": lambda: loop(features, targets), "block": lambda: solver.update(features, targets)},
        51,
        clock=time.process_time,
    )
    r = ratio(times, "loop", "block")
    name = "head update, batch 64, p = 129"
    result[name] = {"seconds": {k: spread(v) for k, v in times.items()}, "ratio": r, "wanted": 10}
    print(f"{name}: the paper's loop / block {median_and_quartiles(r, '.1f')}, wanted >= 10")
    write(Path(__file__).with_name("step_cost"), {"cases": result})


def solvers() -> None:
    torch.manual_seed(0)
    cases: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, ...], int, int]] = {
        "online FNN, 8-50-2, batch 1": (lambda: fnn(8, 2), 1, (8,), 2, 101),
        "mini-batch FNN, 8-50-2, batch 32": (lambda: fnn(8, 2), 32, (8,), 2, 101),
        "mini-batch CNN, CIFAR-10, batch 64": (lambda: cnn(3, 32, 10), 64, (3, 32, 32), 10, 15),
    }
    heads = {"fixed ridge": SoftmaxNewton, "ridge by evidence": lambda: SoftmaxNewton(ridge="evidence")}
    result: dict[str, Any] = {}
    for name, (make, batch, shape, classes, rounds) in cases.items():
        batches = [(torch.randn(batch, *shape), torch.randint(classes, (batch,))) for _ in range(64)]
        model = network(make)
        steps: dict[str, Any] = {"Adam": partial(classification_step, model, adam(model))}
        steps |= {key: sepsa(network(make), solver()).learn for key, solver in heads.items()}
        times = alternate(
            {key: in_rotation(step, batches) for key, step in steps.items()}, rounds, clock=time.process_time
        )
        result[name] = {"seconds": {key: spread(values) for key, values in times.items()}}
        result[name] |= {key: ratio(times, key, "Adam") for key in heads}
        for key in heads:
            print(f"{name}: SoftmaxNewton, {key} / Adam {median_and_quartiles(result[name][key])}")
    write(Path(__file__).with_name("solver_cost"), {"cases": result})


def classification_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def in_rotation(step: Callable[[Tensor, Tensor], object], batches: list[tuple[Tensor, Tensor]]) -> Callable[[], object]:
    position = 0

    def run() -> object:
        nonlocal position
        position = (position + 1) % len(batches)
        return step(*batches[position])

    return run


def told() -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(32, 8), torch.randn(32, 1)) for _ in range(64)]
    contestants = {}
    cases: Any = (
        ("Adam", None, None),
        ("fixed ridge, 353 rows", 10.0, 353),
        ("353 rows", "evidence", 353),
        ("1,000 rows", "evidence", 1000),
        ("4,000 rows", "evidence", 4000),
    )
    for name, solver, rows in cases:
        model: nn.Module = network(lambda: nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)))
        optimizer: Any = adam(model)
        if solver is not None:
            optimizer = SepSA(model, torch.optim.Adam, solver=RLS(ridge=solver), samples_per_epoch=rows, lr=1e-3)
        contestants[name] = in_rotation(partial(training_step, model, optimizer), batches)
        for _ in range(300):  # beyond two epochs
            contestants[name]()
    times = alternate(contestants, 101, clock=time.process_time)
    result: dict[str, Any] = {"seconds": {name: spread(values) for name, values in times.items()}}
    result["ratios"] = {name: ratio(times, name, "Adam") for name in times if name != "Adam"}
    for n in (1, 32):
        labels = [(torch.randn(n, 64), torch.randint(10, (n,))) for _ in range(64)]
        for forgetting in (1.0, 0.95):
            solvers = {ridge: SoftmaxNewton(ridge=ridge, forgetting=forgetting) for ridge in (10.0, "evidence")}
            heads = {str(ridge): solver.bind(nn.Linear(64, 10)) for ridge, solver in solvers.items()}
            updates = {ridge: in_rotation(head.update, labels) for ridge, head in heads.items()}
            for run in updates.values():
                for _ in range(300):
                    run()
            times = alternate(updates, 51, clock=time.process_time)
            name = f"head for classes, batch {n}, forgetting {forgetting:g}, ridge by evidence / 10"
            result["ratios"][name] = ratio(times, "evidence", "10.0")
    for name, r in result["ratios"].items():
        print(f"{name}: {median_and_quartiles(r)}")
    write(Path(__file__).with_name("told_cost"), result)


if __name__ == "__main__":
    {"": paper_networks, "told": told, "solvers": solvers}["".join(sys.argv[1:])]()
