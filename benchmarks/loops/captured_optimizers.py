"""Which optimizers of torch.optim a captured step takes, with a constant rate and with one that changes at every step.

    python benchmarks/loops/captured_optimizers.py [--steps 60] [--workers 13]      # writes captured_optimizers.json

A perceptron 8-50-2 learns batches of 8 by SepSA on a GPU: eagerly, and as a captured step, uncompiled and compiled. For
each way: how many CUDA graphs are recorded, milliseconds of a step, the largest difference of a weight from the eager
one as a part of the largest weight, and for what is refused the sentence, after which random numbers still work. Both
rates go through one captured step, so that the numbers of graphs add up.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from torch import nn

from benchmarks.measure import require_cuda, write
from sepsa import RLS, SepSA, muon

RATES = {"Adadelta": 0.5, "SGD": 1e-2, "ASGD": 1e-2, "Rprop": 1e-3}  # others: 1e-3
LEFT_OUT = {"LBFGS", "Optimizer"}  # LBFGS is refused as a base, whether captured or not


def names() -> list[str]:
    found = vars(torch.optim).items()
    kinds = {name for name, kind in found if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)}
    return sorted(kinds - LEFT_OUT)


def built(name: str, rate: float) -> SepSA:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 50), nn.Tanh(), nn.Linear(50, 2)).cuda()
    if name == "Muon":
        return SepSA(model, muon(model, lr=rate), solver=RLS())
    if name == "SparseAdam":  # which trains sparse embeddings alone
        table = nn.Sequential(nn.EmbeddingBag(8, 50, sparse=True, mode="sum"), nn.Linear(50, 2)).cuda()
        return SepSA(table, torch.optim.SparseAdam, solver=RLS(), lr=rate)
    return SepSA(model, getattr(torch.optim, name), solver=RLS(), lr=rate)


def rate_at(rate: float, step: int, changes: bool) -> float:
    return rate / (1 + 0.05 * step) if changes else rate


def run(name: str, way: str, steps: int) -> dict[str, Any]:
    rate, result = RATES.get(name, 1e-3), {}
    x, y = (torch.randn(64, 8, k, generator=torch.Generator().manual_seed(k)).cuda() for k in (8, 2))
    if name == "SparseAdam":
        x = torch.randint(8, (64, 8, 3), generator=torch.Generator().manual_seed(0)).cuda()
    optimizer = built(name, rate)
    learn: Any = optimizer.learn
    if way != "eager":
        try:
            learn = optimizer.capture(x[0], y[0], compile=way == "compiled")
        except ValueError as refused:
            torch.randn(3, device="cuda").sum().item()
            return {"refused": str(refused)}
    for changes in (False, True):
        for step in range(steps):
            if step == steps // 2:
                torch.cuda.synchronize()
                start = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = rate_at(rate, step, changes)
            learn(x[step % 64], y[step % 64])
        torch.cuda.synchronize()
        result["schedule, ms" if changes else "constant, ms"] = (
            (time.perf_counter() - start) / (steps - steps // 2) * 1e3
        )
    weights = torch.cat([p.detach().double().flatten() for p in optimizer.model.parameters()])
    if way != "eager":
        result["graphs"] = sum(len(graphs.graphs) for graphs in learn._graphs.values())
    return result | {"weights": weights.cpu().tolist()}


def one(name: str, steps: int) -> dict[str, Any]:
    ways: dict[str, Any] = {}
    for way in ("eager", "captured", "compiled"):
        try:
            ways[way] = run(name, way, steps)
        except Exception as error:  # a benchmark tells what does not work
            ways[way] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    reference = torch.tensor(ways["eager"].pop("weights", []))
    for result in ways.values():
        if "weights" in result:
            weights = torch.tensor(result.pop("weights"))
            result["difference"] = float((weights - reference).abs().max() / reference.abs().max())
    return ways


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--workers", type=int, default=13)
    options = parser.parse_args()
    require_cuda()
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        waiting = {name: pool.submit(one, name, options.steps) for name in names()}
        results = {}
        for name, future in waiting.items():
            results[name] = future.result()
            print(name, results[name], flush=True)
            write(__file__, {"optimizers": results})


if __name__ == "__main__":
    main()
