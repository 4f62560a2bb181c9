"""How the update of a head grows with its number of features p: RLS, and OnlineLBFGS where RLS needs p² numbers.

    python benchmarks/heads/head_scaling.py            # writes head_scaling.json
    python benchmarks/heads/head_scaling.py lbfgs      # writes large_heads.json

Without a name: a block update of RLS, and how much of the machine's product rate it reaches. The operations counted are
those of the square-root block update for n < p/4 rows (src/sepsa/heads/least_squares/math.py), a multiplication and an
addition as two:
    [T; W]Φᵀ  2n(p+m)p     FᵀF  2n²p     Cholesky  n³/3     two triangular solves  2n²p + n²m     FᵀT  2np²
    [T; W] += KᵀFᵀT  2n(p+m)p
The rate is compared with a plain float64 product of a p x n by an n x p matrix into a p x p one, the same run.

`lbfgs`: time per step, and how near its loss comes to that of RLS. Time: batches of 32, 10 outputs, p = 1,024 ...
65,536, all sizes alternating, with RLS up to p = 4,096; at p = 65,536 the two p x p matrices of RLS, T and H, would
take 34 GB each. Quality: p = 1,024, 4,096 samples with noise, 20 passes in batches of 32; the loss over that of RLS
after the same 20 passes, on the samples themselves and on 4,096 held out. RLS at forgetting 1 is ridge regression on
all it has seen, in any order and batches, so here it takes the 20 passes as one with sample_weight 20. The problems:
features of equal variance; with variances 1/j and 1/j² (condition 10³ and 10⁶); and random ReLU features of 50 inputs,
whose targets are no linear function.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.measure import alternate, spread, write
from sepsa import RLS, OnlineLBFGS

ROWS, OUTPUTS = 256, 10
SIZES = (256, 512, 1024, 2048, 4096)
LBFGS_SIZES = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
RLS_SIZES = (1024, 2048, 4096)
BATCH, P, SAMPLES, PASSES, NOISE, SEEDS = 32, 1024, 4096, 20, 0.5, 3


def operations(p: int, n: int, m: int) -> float:
    if 4 * n >= p:  # `many_rows`: [T; W]Φᵀ, FFᵀ, Cholesky or LU, the rest with m columns
        return 2 * n * (p + m) * p + 2 * n * p**2 + 2 * p**3 / 3 + 2 * n * p * m + 4 * p**2 * m
    return 4 * n * (p + m) * p + 2 * n * p**2 + 2 * n**2 * p + n**3 / 3 + 2 * n**2 * p + 2 * n**2 * m


def rls() -> None:
    torch.manual_seed(0)
    rows, contestants = {}, {}
    for p in SIZES:
        solver = RLS().bind(nn.Linear(p, OUTPUTS, bias=False))
        features, targets = torch.randn(ROWS, p), torch.randn(ROWS, OUTPUTS)
        left, right = torch.randn(p, ROWS, dtype=torch.float64), torch.randn(ROWS, p, dtype=torch.float64)
        into = torch.zeros(p, p, dtype=torch.float64)
        contestants[f"update {p}"] = lambda s=solver, f=features, t=targets: s.update(f, t)
        contestants[f"product {p}"] = lambda i=into, a=left, b=right: i.addmm_(a, b)
    times = alternate(contestants, 9)
    for p in SIZES:
        seconds, product = spread(times[f"update {p}"]), spread(times[f"product {p}"])
        counted = operations(p, ROWS, OUTPUTS)
        in_product = 2 * ROWS * p**2
        rate, limit = counted / seconds["median"], in_product / product["median"]
        pairs = zip(times[f"update {p}"], times[f"product {p}"], strict=True)
        share = spread([counted / a / (in_product / b) for a, b in pairs])
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
    write(Path(__file__).with_name("head_scaling"), {"n": ROWS, "m": OUTPUTS, "rows": rows, "slope": slope})


def features_and_targets(problem: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Twice SAMPLES rows; the clean targets have variance 1."""
    if problem == "random ReLU features":
        inputs = torch.randn(2 * SAMPLES, 50, generator=generator)
        shift = 0.5 * torch.randn(P, generator=generator)
        x = torch.relu(inputs @ torch.randn(50, P, generator=generator) / math.sqrt(50) + shift)
        bends = torch.tanh(inputs @ torch.randn(50, 20, generator=generator) * 2 / math.sqrt(50))
        y = bends @ torch.randn(20, 1, generator=generator)
    else:
        variance = (
            torch.arange(1, P + 1) ** -{"equal variances": 0.0, "variances 1/j": 1.0, "variances 1/j²": 2.0}[problem]
        )
        x = torch.randn(2 * SAMPLES, P, generator=generator) * (variance * P / variance.sum()).sqrt()
        y = x @ torch.randn(P, 1, generator=generator)
    return x, y / y.std() + NOISE * torch.randn(2 * SAMPLES, 1, generator=generator)


def quality(problem: str, seed: int) -> dict[str, float]:
    """Losses of both heads on what they learned and on what they did not."""
    generator = torch.Generator().manual_seed(seed)
    x, y = features_and_targets(problem, generator)
    heads = {name: nn.Linear(P, 1) for name in ("OnlineLBFGS", "RLS")}
    for head in heads.values():
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
    online, exact = (make(bias_ridge="ridge").bind(heads[make.__name__]) for make in (OnlineLBFGS, RLS))
    for rows in torch.arange(SAMPLES).split(P):
        exact.update(x[rows], y[rows], torch.full((len(rows),), float(PASSES)))
    for _ in range(PASSES):
        for rows in torch.randperm(SAMPLES, generator=generator).split(BATCH):
            online.update(x[rows], y[rows])
    found = {}
    with torch.no_grad():
        for name, head in heads.items():
            errors = (head(x) - y).square()
            found[f"{name} learned"], found[f"{name} held out"] = (
                errors[:SAMPLES].mean().item(),
                errors[SAMPLES:].mean().item(),
            )
    return found


def lbfgs() -> None:
    torch.manual_seed(0)
    contestants = {}
    for kind, sizes in ((OnlineLBFGS, LBFGS_SIZES), (RLS, RLS_SIZES)):
        for p in sizes:
            solver = kind().bind(nn.Linear(p, OUTPUTS, bias=False))
            x, y = torch.randn(BATCH, p), torch.randn(BATCH, OUTPUTS)
            for _ in range(40):  # until the memory is full
                solver.update(x, y)
            contestants[f"{kind.__name__} {p}"] = lambda s=solver, x=x, y=y: s.update(x, y)
    times = {name: spread(values) for name, values in alternate(contestants, 15, 0.1).items()}
    for name, seconds in times.items():
        print(f"{name:20s} {seconds['median'] * 1e3:8.2f} ms")
    medians = np.log([times[f"OnlineLBFGS {p}"]["median"] for p in LBFGS_SIZES])
    slope = float(np.polyfit(np.log(LBFGS_SIZES), medians, 1)[0])
    last = float((medians[-1] - medians[-2]) / math.log(2))
    ends = f"from {LBFGS_SIZES[-2]} to {LBFGS_SIZES[-1]}: {last:.2f}"
    print(f"slope of log time over log p: {slope:.2f}, wanted <= 1.15 ({ends})")

    problems = {}
    for problem in ("equal variances", "variances 1/j", "random ReLU features", "variances 1/j²"):
        runs = [quality(problem, seed) for seed in range(SEEDS)]
        ratios = {
            where: spread([run[f"OnlineLBFGS {where}"] / run[f"RLS {where}"] for run in runs])
            for where in ("learned", "held out")
        }
        problems[problem] = {"runs": runs, "ratio": ratios}
        learned, held_out = (ratios[where]["median"] for where in ("learned", "held out"))
        print(f"{problem}: loss / RLS's {learned:.3f} on what was learned, {held_out:.3f} held out, wanted <= 1.05")
    state = OnlineLBFGS().bind(nn.Linear(LBFGS_SIZES[-1], OUTPUTS, bias=False)).state_dict().values()
    kept = sum(value.numel() * value.element_size() for value in state if isinstance(value, Tensor))
    memory = {"OnlineLBFGS": kept, "RLS": 2 * 8 * LBFGS_SIZES[-1] ** 2}
    settings = {"batch": BATCH, "outputs": OUTPUTS, "p": P, "samples": SAMPLES, "passes": PASSES, "noise": NOISE}
    result = {"seconds": times, "slope": slope, "slope_last": last, "bytes_at_65536": memory, "quality": problems}
    write(Path(__file__).with_name("large_heads"), {"settings": settings} | result)


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["lbfgs"]):
        sys.exit(f"the case must be lbfgs or none, got {' '.join(sys.argv[1:])!r}")
    lbfgs() if sys.argv[1:] else rls()
