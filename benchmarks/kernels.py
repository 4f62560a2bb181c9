"""What the Triton kernels save: captured steps with them and with plain torch inside the same CUDA graph.

    python benchmarks/kernels.py [--rounds 15] [--out kernels.json]

The paper's CNN on MNIST-sized images, compiled and captured, by the solver and the size of a batch. Steps with Triton
and with torch alternate in one process. Writes kernels.json after every row; needs a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import machine, ratio, spread

from reproduction.networks import cnn, initialize
from sepsa import RLS, SepSA, SoftmaxNewton
from sepsa.heads.backends.choose import force

RESULTS = Path(__file__).with_suffix(".json")
SOLVERS: dict[str, Callable[[], Any]] = {
    "RLS": RLS,
    "RLS, forgetting 0.999": lambda: RLS(forgetting=0.999),
    "SoftmaxNewton": SoftmaxNewton,
    "SoftmaxNewton, forgetting 0.999": lambda: SoftmaxNewton(forgetting=0.999),
}
BATCHES, STEPS, IMAGES = (1, 64), 500, 6400


def measure(solver: str, batch: int, rounds: int) -> dict[str, Any]:
    """Seconds of a step by each backend, and the ratio of the time with torch to that with Triton."""
    g = torch.Generator(device="cuda").manual_seed(0)
    X = torch.randn(IMAGES, 1, 28, 28, device="cuda", generator=g)
    Y = torch.eye(10, device="cuda")[torch.randint(10, (IMAGES,), device="cuda", generator=g)]
    order = torch.randint(IMAGES, (STEPS, batch), device="cuda", generator=g)
    steps = {}
    for backend in ("triton", "torch"):
        torch.manual_seed(0)
        model = cnn(1, 28, 10)
        initialize(model)
        model.to("cuda")
        optimizer = SepSA(model, torch.optim.Adam, solver=SOLVERS[solver](), lr=1e-3, fused=True, capturable=True)
        with force(backend):
            steps[backend] = optimizer.capture(X[:batch], Y[:batch], compile=True)
            steps[backend].run(X, Y, order[:20])
    times: dict[str, list[float]] = {backend: [] for backend in steps}
    for _ in range(rounds):
        for backend, step in steps.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            with force(backend):
                step.run(X, Y, order)
            torch.cuda.synchronize()
            times[backend].append((time.perf_counter() - start) / STEPS)
    seconds = {backend: spread(values) for backend, values in times.items()}
    return {"seconds": seconds, "torch / triton": ratio(times, "torch", "triton")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    record: dict[str, Any] = {"machine": machine(), "rounds": options.rounds, "rows": {}}
    for batch in BATCHES:
        for solver in SOLVERS:
            row = record["rows"][f"{solver}, batch {batch}"] = measure(solver, batch, options.rounds)
            options.out.write_text(json.dumps(record, indent=1) + "\n")
            gain, medians = row["torch / triton"], {name: s["median"] * 1e6 for name, s in row["seconds"].items()}
            print(
                f"{solver}, batch {batch}: Triton {medians['triton']:.0f} us, torch {medians['torch']:.0f} us, "
                f"ratio {gain['median']:.3f} [{gain['q25']:.3f}, {gain['q75']:.3f}]",
                flush=True,
            )


if __name__ == "__main__":
    main()
