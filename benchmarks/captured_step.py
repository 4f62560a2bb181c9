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

from sepsa import SepSA
from sepsa.capture import PlainStep, Step, capture, first_order_step
from sepsa.paper.networks import cnn, initialize

ROUNDS, STEPS = 15, {"eager": 100, "captured": 1000}


def build(kind: str, captured: bool, x: torch.Tensor, y: torch.Tensor) -> Step:
    torch.manual_seed(0)
    model = cnn(1, 28, 10)
    initialize(model)
    model.cuda()
    options = {"lr": 1e-3, "weight_decay": 1e-5} | ({"fused": True, "capturable": True} if captured else {})
    if kind == "SepSA":
        optimizer = SepSA(model, torch.optim.Adam, **options)
        return optimizer.capture(x, y, mse_loss) if captured else PlainStep(optimizer.learn)
    adam = torch.optim.Adam(model.parameters(), **options)
    if captured:
        return capture(model, adam, x, y, mse_loss)
    return PlainStep(lambda inputs, targets: first_order_step(model, adam, mse_loss, inputs, targets))


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    X = torch.randn(60_000, 1, 28, 28, device="cuda")
    Y = torch.eye(10, device="cuda")[torch.randint(10, (60_000,), device="cuda")]
    result: dict[str, object] = {"device": torch.cuda.get_device_name()}
    for batch in (1, 64):
        steps = {
            f"{way} {kind}": build(kind, way == "captured", X[:batch], Y[:batch])
            for way in STEPS
            for kind in ("SepSA", "Adam")
        }
        orders = {way: torch.randint(60_000, (count, batch), device="cuda") for way, count in STEPS.items()}
        times: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(ROUNDS + 1):
            for name, step in steps.items():
                order = orders[name.split()[0]]
                torch.cuda.synchronize()
                start = time.perf_counter()
                step.run(X, Y, order)
                torch.cuda.synchronize()
                if turn:  # the first records the graph
                    times[name].append((time.perf_counter() - start) / len(order))
        rows = {name: spread(values) for name, values in times.items()}
        gains = {
            "eager Adam / captured SepSA": ratio(times, "eager Adam", "captured SepSA"),
            "captured SepSA / captured Adam": ratio(times, "captured SepSA", "captured Adam"),
        }
        result[f"batch {batch}"] = {"seconds": rows, "ratios": gains}
        for name, row in rows.items():
            print(f"batch {batch}: {name}: {row['median'] * 1e6:.0f} us")
        for name, row in gains.items():
            print(f"batch {batch}: {name} {row['median']:.2f} [{row['q25']:.2f}, {row['q75']:.2f}]")
    step = build("SepSA", True, X[:1], Y[:1])
    step.run(X, Y, torch.randperm(60_000, device="cuda")[:10].unsqueeze(1))
    torch.cuda.synchronize()
    start = time.perf_counter()
    step.run(X, Y, torch.randperm(60_000, device="cuda").unsqueeze(1))
    torch.cuda.synchronize()
    result["one pass of 60,000 single samples, seconds"] = time.perf_counter() - start
    print(f"one pass of 60,000 single samples: {time.perf_counter() - start:.1f} s")
    write(__file__, result)


if __name__ == "__main__":
    main()
