"""What a SepSA step costs beside an Adam step on the same network, with each head solver, and in a ResNet-9.

    python benchmarks/step_cost.py              # writes step_cost.json
    python benchmarks/step_cost.py solvers      # writes solver_cost.json
    python benchmarks/step_cost.py resnet9      # writes resnet9_step.json; needs a CUDA device

Without a name: the paper's networks, and a block update of the head beside the paper's loop over samples. The paper's
own ratios (Table III, seconds): online FNN 1.17, mini-batch FNN 1.17, CNN 1.25.

`solvers`: the paper's network for the regressions, 8-50-2, online and in batches of 32, with Adam for the body; then
the head alone, 128 features and a bias, 10 outputs, batches of 64. Ratios are to Adam's step on the same network, or to
the update of RLS. The classifying heads get classes for targets.

`resnet9`: CIFAR-10's shapes, batch 256, bf16, eager. Steps of AdamW with cross-entropy and of SepSA with an AdamW body
and one-hot targets, at forgetting 1 and 0.999, on random images.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from measure import alternate, alternate_on_gpu, median_and_quartiles, ratio, require_cuda, spread, training_step, write
from torch import Tensor, nn
from torch.nn import functional

from sepsa import RLS, OnlineLBFGS, SelfTuning, SepSA, SoftmaxNewton
from sepsa.paper.networks import cnn, fnn, initialize
from sepsa.paper.slimtik import SlimTik

SOLVERS: dict[str, Callable[[], Any]] = {
    "RLS": RLS,
    "RLS, forgetting 0.99": lambda: RLS(forgetting=0.99),
    "RLS, self-tuning": lambda: SelfTuning(),
    "SlimTik": SlimTik,
    "SoftmaxNewton": SoftmaxNewton,
    "OnlineLBFGS": OnlineLBFGS,
    "OnlineLBFGS, cross-entropy": lambda: OnlineLBFGS(loss="cross-entropy"),
}
RESNET_BATCH, RESNET_STEPS, RESNET_ROUNDS = 256, 50, 15


def network(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = make()
    initialize(model)
    return model


def adam_step(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    return partial(training_step, model, torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-5), x, y)


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
        contestants = {"Adam": adam_step(network(make), x, y)}
        for key, forgetting in (("SepSA", 1.0), ("SepSA, forgetting 0.999", 0.999)):
            model = network(make)
            contestants[key] = partial(training_step, model, sepsa(model, RLS(forgetting=forgetting)), x, y)
        times = alternate({key: contestants[key] for key in ("SepSA", "Adam", "SepSA, forgetting 0.999")}, rounds)
        r, f = ratio(times, "SepSA", "Adam"), ratio(times, "SepSA, forgetting 0.999", "SepSA")
        seconds = {k: spread(v) for k, v in times.items()}
        result[name] = {"seconds": seconds, "ratio": r, "wanted": limit, "forgetting 0.999 / 1": f}
        print(f"{name}: SepSA / Adam {median_and_quartiles(r)}, wanted <= {limit}")
        print(f"{name}: forgetting 0.999 / 1 {median_and_quartiles(f)}, wanted <= 1.1")

    features, targets = torch.randn(64, 128), torch.randn(64, 10)
    solver, loop = RLS().bind(nn.Linear(128, 10)), paper_loop(129, 10)
    times = alternate({"loop": lambda: loop(features, targets), "block": lambda: solver.update(features, targets)}, 51)
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
        contestants = {"Adam": adam_step(network(lambda: fnn(8, 2)), torch.randn(n, 8), torch.randn(n, 2))}
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
    times = alternate(contestants, 51)
    return {name: {"seconds": spread(times[name]), "ratio": ratio(times, name, to)} for name in contestants}


def resnet9_step(forgetting: float | None, x: Tensor, y: Tensor) -> Callable[[], None]:
    """A step of SepSA, or of AdamW where `forgetting` is None."""
    from networks import resnet9  # a benchmark with more packages than the other cases need

    torch.manual_seed(0)
    model = resnet9().to("cuda", memory_format=torch.channels_last)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    targets, loss_fn = y, functional.cross_entropy
    if forgetting is not None:
        targets, loss_fn = functional.one_hot(y, 10).float(), functional.mse_loss
        optimizer = SepSA(model, torch.optim.AdamW, lr=1e-3, solver=RLS(forgetting=forgetting), fused=True)

    def step() -> None:
        observe = nullcontext() if forgetting is None else optimizer.observe(targets)
        with torch.autocast("cuda", dtype=torch.bfloat16), observe:
            loss = loss_fn(model(x), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def resnet9_cost() -> None:
    require_cuda()
    x = torch.randn(RESNET_BATCH, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    y = torch.randint(10, (RESNET_BATCH,), device="cuda")
    named = {"AdamW": None, "SepSA at forgetting 1.0": 1.0, "SepSA at forgetting 0.999": 0.999}
    steps = {name: resnet9_step(forgetting, x, y) for name, forgetting in named.items()}
    times = alternate_on_gpu(steps, RESNET_ROUNDS, RESNET_STEPS)
    ratios = {f"{name} / AdamW": ratio(times, name, "AdamW") for name in steps if name != "AdamW"}
    seconds = {name: spread(values) for name, values in times.items()}
    for name, values in seconds.items():
        print(f"{name}: {values['median'] * 1e3:.2f} ms")
    for name, r in ratios.items():
        print(f"{name} {median_and_quartiles(r)}")
    write("resnet9_step", {"device": torch.cuda.get_device_name(), "seconds": seconds, "ratios": ratios})


def main() -> None:
    cases = {"": paper_networks, "solvers": solvers, "resnet9": resnet9_cost}
    name = "".join(sys.argv[1:])
    if name not in cases:
        sys.exit(f"the case must be solvers, resnet9 or none, got {name!r}")
    cases[name]()


if __name__ == "__main__":
    main()
