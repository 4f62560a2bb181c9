"""What an offset of the targets costs: the training error of a small network after five epochs.

    python benchmarks/target_offset.py

Writes target_offset.json: over 5 seeds the mean squared error on the 640 samples of a regression with noise 0.1, whose
targets are as they are, 1,000 higher and 100,000 higher, for heads that leave the bias next to free and for one whose
ridge holds it, as in the paper.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from measure import write
from torch import nn

from sepsa import RLS, OnlineLBFGS, SelfTuning, SepSA

SEEDS, EPOCHS, BATCH = 5, 5, 32
OFFSETS = (0, 1_000, 100_000)
SOLVERS: dict[str, Callable[[], Any]] = {
    "RLS": RLS,
    "RLS, self-tuning": lambda: SelfTuning(),
    "OnlineLBFGS": OnlineLBFGS,
    'RLS, bias_ridge="ridge"': lambda: RLS(bias_ridge="ridge"),
}


def error(make: Callable[[], Any], offset: float, seed: int) -> float:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    x = torch.randn(640, 8)
    y = torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3] + 0.1 * torch.randn(640, 1)
    optimizer = SepSA(model, torch.optim.Adam, lr=1e-3, solver=make())
    for _ in range(EPOCHS):
        for rows in torch.randperm(640).split(BATCH):
            optimizer.learn(x[rows], y[rows] + offset)
    with torch.no_grad():
        return float((model.double()(x.double()) - y - offset).square().mean())


def main() -> None:
    result: dict[str, Any] = {"seeds": SEEDS, "epochs": EPOCHS}
    for name, make in SOLVERS.items():
        for offset in OFFSETS:
            runs = [error(make, offset, seed) for seed in range(SEEDS)]
            result.setdefault(name, {})[f"offset {offset}"] = {"mean": statistics.mean(runs), "runs": runs}
            print(name, offset, f"{statistics.mean(runs):.4g}")
    write(__file__, result)


if __name__ == "__main__":
    main()
