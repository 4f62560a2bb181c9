"""How one block update of the RLS head grows with p, and how much of the machine's product rate it reaches.

    python benchmarks/head_scaling.py

Writes head_scaling.json. The operations counted are those of the square-root block update for n < p/4 rows
(`few_rows` in src/sepsa/heads/rls.py), a multiplication and an addition as two:
    [T; W]Φᵀ  2n(p+m)p     FᵀF  2n²p     Cholesky  n³/3     two triangular solves  2n²p + n²m     FᵀT  2np²
    [T; W] += KᵀFᵀT  2n(p+m)p
The rate is compared with a plain float64 product of a p x n by an n x p matrix into a p x p one, the same run.
"""

from __future__ import annotations

import numpy as np
import torch
from measure import alternate, spread, write
from torch import nn

from sepsa import RLS

N, M = 256, 10
SIZES = (256, 512, 1024, 2048, 4096)


def operations(p: int, n: int, m: int) -> float:
    if 4 * n >= p:  # `many_rows`: [T; W]Φᵀ, FFᵀ, Cholesky or LU, the rest with m columns
        return 2 * n * (p + m) * p + 2 * n * p**2 + 2 * p**3 / 3 + 2 * n * p * m + 4 * p**2 * m
    return 4 * n * (p + m) * p + 2 * n * p**2 + 2 * n**2 * p + n**3 / 3 + 2 * n**2 * p + 2 * n**2 * m


def main() -> None:
    torch.manual_seed(0)
    rows, contestants = {}, {}
    for p in SIZES:
        solver = RLS().bind(nn.Linear(p, M, bias=False))
        features, targets = torch.randn(N, p), torch.randn(N, M)
        left, right = torch.randn(p, N, dtype=torch.float64), torch.randn(N, p, dtype=torch.float64)
        into = torch.zeros(p, p, dtype=torch.float64)
        contestants[f"update {p}"] = lambda s=solver, f=features, t=targets: s.update(f, t)
        contestants[f"product {p}"] = lambda i=into, a=left, b=right: i.addmm_(a, b)
    times = alternate(contestants, 9)
    for p in SIZES:
        seconds, product = spread(times[f"update {p}"]), spread(times[f"product {p}"])
        counted = operations(p, N, M)
        rate, limit = counted / seconds["median"], 2 * N * p**2 / product["median"]
        share = spread(
            [counted / a / (2 * N * p**2 / b) for a, b in zip(times[f"update {p}"], times[f"product {p}"], strict=True)]
        )
        rows[p] = {
            "seconds": seconds,
            "operations": counted,
            "gflops": rate / 1e9,
            "product_gflops": limit / 1e9,
            "share": share,
        }
        reached = f"{rate / 1e9:5.1f} of {limit / 1e9:5.1f} GFLOP/s: {share['median']:.0%}"
        print(f"p {p:5d}: {seconds['median'] * 1e3:8.2f} ms, {reached}")
    logs = np.log([[p, rows[p]["seconds"]["median"]] for p in SIZES])
    slope = float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0])
    print(f"slope of log time over log p: {slope:.2f}, wanted <= 2.2")
    print(f"share of the product rate at p = {SIZES[-1]}: {rows[SIZES[-1]]['share']['median']:.0%}, wanted >= 60%")
    write(__file__, {"n": N, "m": M, "rows": rows, "slope": slope})


if __name__ == "__main__":
    main()
