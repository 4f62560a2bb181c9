"""What a captured step saves on a GPU: the paper's CNN on MNIST-sized images, eager and as one CUDA graph.

    python benchmarks/captured_step.py

Writes captured_step.json. Needs a CUDA device.
"""

from __future__ import annotations

import sys
import time

import torch
from measure import ratio, spread, write
from torch.nn.functional import mse_loss

from sepsa import RLS, SepSA, SoftmaxNewton
from sepsa.capture import PlainStep, Step, capture, first_order_step
from sepsa.paper.networks import cnn, initialize

ROUNDS, STEPS = 15, {"eager": 100, "captured": 1000, "compiled": 1000}
SOLVERS = {
    "SepSA": RLS,
    "SepSA, forgetting 0.999": lambda: RLS(forgetting=0.999),
    "SepSA, SoftmaxNewton": SoftmaxNewton,
}
CONTESTANTS = [
    *(f"{way} {kind}" for way in ("eager", "captured") for kind in ("Adam", "SepSA")),
    "compiled Adam",
    *(f"compiled {name}" for name in SOLVERS),
]
RATIOS = [
    ("eager Adam", "captured SepSA"),
    ("captured SepSA", "captured Adam"),
    ("compiled SepSA", "compiled Adam"),
    ("compiled SepSA, forgetting 0.999", "compiled Adam"),
    ("compiled SepSA, SoftmaxNewton", "compiled SepSA"),
]


def build(way: str, kind: str, x: torch.Tensor, y: torch.Tensor) -> Step:
    torch.manual_seed(0)
    model = cnn(1, 28, 10)
    initialize(model)
    model.cuda()
    options = {"lr": 1e-3, "weight_decay": 1e-5} | ({} if way == "eager" else {"fused": True, "capturable": True})
    if kind == "Adam":
        adam = torch.optim.Adam(model.parameters(), **options)
        if way == "eager":
            return PlainStep(lambda a, b: first_order_step(model, adam, mse_loss, a, b))
        return capture(model, adam, x, y, mse_loss, compile=way == "compiled")
    optimizer = SepSA(model, torch.optim.Adam, solver=SOLVERS[kind](), **options)
    if way == "eager":
        return PlainStep(lambda a, b: optimizer.learn(a, b, mse_loss))
    return optimizer.capture(x, y, compile=way == "compiled")


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    X = torch.randn(60_000, 1, 28, 28, device="cuda")
    Y = torch.eye(10, device="cuda")[torch.randint(10, (60_000,), device="cuda")]
    result: dict[str, object] = {"device": torch.cuda.get_device_name()}
    for batch in (1, 64):
        steps = {name: build(*name.split(" ", 1), X[:batch], Y[:batch]) for name in CONTESTANTS}
        orders = {way: torch.randint(60_000, (count, batch), device="cuda") for way, count in STEPS.items()}
        times: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(ROUNDS + 1):
            for name, step in steps.items():
                order = orders[name.split()[0]]
                torch.cuda.synchronize()
                start = time.perf_counter()
                step.run(X, Y, order)
                torch.cuda.synchronize()
                if turn:  # the first compiles and records
                    times[name].append((time.perf_counter() - start) / len(order))
        rows = {name: spread(values) for name, values in times.items()}
        gains = {f"{one} / {other}": ratio(times, one, other) for one, other in RATIOS}
        result[f"batch {batch}"] = {"seconds": rows, "ratios": gains}
        for name, row in rows.items():
            print(f"batch {batch}: {name}: {row['median'] * 1e6:.0f} us")
        for name, row in gains.items():
            print(f"batch {batch}: {name} {row['median']:.3f} [{row['q25']:.3f}, {row['q75']:.3f}]")
    for way in ("captured", "compiled"):
        step = build(way, "SepSA", X[:1], Y[:1])
        step.run(X, Y, torch.randperm(60_000, device="cuda")[:10].unsqueeze(1))
        order = torch.randperm(60_000, device="cuda").unsqueeze(1)
        step.run(X, Y, order)  # a longer order is recorded anew
        torch.cuda.synchronize()
        start = time.perf_counter()
        step.run(X, Y, order)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        result[f"one pass of 60,000 single samples, {way}, seconds"] = seconds
        print(f"one pass of 60,000 single samples, {way}: {seconds:.1f} s")
    write(__file__, result)


if __name__ == "__main__":
    main()
