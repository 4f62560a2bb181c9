"""What a SepSA step costs beside an Adam step on the same network, with each head solver, and in two networks.

    python benchmarks/step_cost.py              # writes step_cost.json
    python benchmarks/step_cost.py solvers      # writes solver_cost.json
    python benchmarks/step_cost.py networks     # writes network_step.json; needs a CUDA device

Without a name: the paper's networks, and a block update of the head beside the paper's loop over samples. The paper's
own ratios (Table III, seconds): online FNN 1.17, mini-batch FNN 1.17, CNN 1.25.

`solvers`: the paper's network for the regressions, 8-50-2, online and in batches of 32, with Adam for the body; then
the head alone, 128 features and a bias, 10 outputs, batches of 64. Ratios are to Adam's step on the same network, or to
the update of RLS. The classifying heads get classes for targets. Seconds on a CPU are those of the processor, in one
thread.

`networks`: the ResNet-9 and the vision transformer of networks.py, batch 256, bf16, eager, on random images. Steps of
SepSA beside those of AdamW with cross-entropy.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from measure import alternate, alternate_on_gpu, median_and_quartiles, ratio, require_cuda, spread, training_step, write
from torch import Tensor, nn
from torch.nn import functional

from reproduction.networks import cnn, fnn, initialize
from reproduction.slimtik import SlimTik
from sepsa import RLS, OnlineLBFGS, SelfTuning, SepSA, SoftmaxNewton

SOLVERS: dict[str, Callable[[], Any]] = {
    "RLS": RLS,
    "RLS, ridge by evidence": lambda: RLS(ridge="evidence"),
    "RLS, forgetting 0.99": lambda: RLS(forgetting=0.99),
    "RLS, self-tuning": lambda: SelfTuning(),
    "SlimTik": SlimTik,
    "SoftmaxNewton": SoftmaxNewton,
    "OnlineLBFGS": OnlineLBFGS,
    "OnlineLBFGS, cross-entropy": lambda: OnlineLBFGS(loss="cross-entropy"),
}
PAPER_SOLVERS: dict[str, Callable[[], Any]] = {
    "SepSA": lambda: RLS(ridge="evidence"),  # SepSA's default
    "SepSA, fixed ridge": RLS,
    "SepSA, fixed ridge, forgetting 0.999": lambda: RLS(forgetting=0.999),
}
NETWORK_BATCH, NETWORK_STEPS, NETWORK_ROUNDS = 256, 50, 15
NETWORK_SETTINGS: dict[str, dict[str, Any]] = {
    "AdamW, cross-entropy": {"label_smoothing": 0.0},
    "SepSA": {"forgetting": 0.999},
    "SepSA, cross-entropy": {"ridge": 1000.0},
    "SepSA, cross-entropy, ridge auto": {"ridge": "auto"},
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
        makers |= {key: partial(sepsa, solver=solver()) for key, solver in PAPER_SOLVERS.items()}
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
    write("step_cost", {"cases": result})


def on_new_samples(step: Callable[[Tensor, Tensor], object], name: str, n: int, k: int, m: int) -> Callable[[], object]:
    """The step on 64 batches in rotation, so that a solver rarely meets a batch that it has just learned."""
    classify = name in ("SoftmaxNewton", "OnlineLBFGS, cross-entropy")
    batches = [
        (torch.randn(n, k), torch.eye(m)[torch.randint(m, (n,))] if classify else torch.randn(n, m)) for _ in range(64)
    ]
    return in_rotation(step, batches)


def in_rotation(step: Callable[[Tensor, Tensor], object], batches: list[tuple[Tensor, Tensor]]) -> Callable[[], object]:
    position = 0

    def run() -> object:
        nonlocal position
        position = (position + 1) % len(batches)
        return step(*batches[position])

    return run


def solvers() -> None:
    torch.manual_seed(0)
    result: dict[str, Any] = {}
    for case, n in (("online FNN, 8-50-2, batch 1", 1), ("mini-batch FNN, 8-50-2, batch 32", 32)):
        model = network(lambda: fnn(8, 2))
        step = partial(training_step, model, adam(model))
        contestants = {"Adam": on_new_samples(step, "Adam", n, 8, 2)}
        for name, make in SOLVERS.items():
            optimizer = sepsa(network(lambda: fnn(8, 2)), make())
            contestants[name] = on_new_samples(optimizer.learn, name, n, 8, 2)
        result[case] = compare(contestants, "Adam")
    contestants = {}
    for name, make in SOLVERS.items():
        contestants[name] = on_new_samples(make().bind(nn.Linear(128, 10)).update, name, 64, 128, 10)
    result["head alone, p = 129, 10 outputs, batch 64"] = compare(contestants, "RLS")
    for case, rows in result.items():
        print(case)
        for name, row in rows.items():
            words = median_and_quartiles(row["ratio"], ".2f")
            print(f"  {name:27s} {row['seconds']['median'] * 1e6:8.0f} µs, ratio {words}")
    write("solver_cost", {"cases": result})


def compare(contestants: dict[str, Callable[[], object]], to: str) -> dict[str, Any]:
    times = alternate(contestants, 51, clock=time.process_time)
    return {name: {"seconds": spread(times[name]), "ratio": ratio(times, name, to)} for name in contestants}


def network_step(network: str, method: str, x: Tensor, y: Tensor) -> Callable[[], None]:
    """A step of a method of networks.py, with one rate and its other settings."""
    import networks  # a benchmark with more packages than the other cases need

    torch.manual_seed(0)
    model = networks.NETWORKS[network]().to("cuda", memory_format=torch.channels_last)
    optimizer, loss_of = networks.learner(method, model, {"lr": 1e-3} | NETWORK_SETTINGS[method], fused=True)

    def step() -> None:
        observe = optimizer.observe(y) if isinstance(optimizer, SepSA) else nullcontext()
        with torch.autocast("cuda", dtype=torch.bfloat16), observe:
            loss = loss_of(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def network_costs() -> None:
    require_cuda()
    x = torch.randn(NETWORK_BATCH, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    y = functional.one_hot(torch.randint(10, (NETWORK_BATCH,), device="cuda"), 10).float()
    cases: dict[str, Any] = {}
    for network in ("ResNet-9", "vision transformer"):
        steps = {method: network_step(network, method, x, y) for method in NETWORK_SETTINGS}
        times = alternate_on_gpu(steps, NETWORK_ROUNDS, NETWORK_STEPS)
        base = next(iter(steps))
        ratios = {f"{name} / {base}": ratio(times, name, base) for name in steps if name != base}
        cases[network] = {"seconds": {name: spread(values) for name, values in times.items()}, "ratios": ratios}
        for name, r in ratios.items():
            print(f"{network}: {name} {median_and_quartiles(r)}, wanted <= 1.05")
    write("network_step", {"device": torch.cuda.get_device_name(), "cases": cases})


def main() -> None:
    cases = {"": paper_networks, "solvers": solvers, "networks": network_costs}
    name = "".join(sys.argv[1:])
    if name not in cases:
        sys.exit(f"the case must be solvers, networks or none, got {name!r}")
    cases[name]()


if __name__ == "__main__":
    main()
