"""OnlineLBFGS where RLS needs p² numbers: time per step against p, and how near its loss comes to that of RLS.

    python benchmarks/large_heads.py

Writes large_heads.json. Time: batches of 32, 10 outputs, p = 1,024 ... 65,536, the sizes taking turns, RLS beside it as
far as p = 4,096; at p = 65,536 the two p x p matrices of RLS, T and H, would take 34 GB each. Quality: p = 1,024, 4,096
samples with noise, 20 passes in batches of 32; the loss over that of RLS after the same 20 passes, on the samples
themselves and on 4,096 held out. RLS at forgetting 1 is ridge regression on all it has seen, in any order and batches,
so here it takes the 20 passes as one with sample_weight 20. The problems: features of equal variance; with variances
1/j and 1/j² (condition 10³ and 10⁶); and ReLU features at random of 50 inputs, whose targets are no linear function.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from measure import alternate, spread, write
from torch import Tensor, nn

from sepsa import RLS, OnlineLBFGS

SIZES = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
RLS_SIZES = (1024, 2048, 4096)
N, M = 32, 10
P, SAMPLES, PASSES, NOISE, SEEDS = 1024, 4096, 20, 0.5, 3


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
        for rows in torch.randperm(SAMPLES, generator=generator).split(N):
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


def main() -> None:
    torch.manual_seed(0)
    contestants = {}
    for kind, sizes in ((OnlineLBFGS, SIZES), (RLS, RLS_SIZES)):
        for p in sizes:
            solver = kind().bind(nn.Linear(p, M, bias=False))
            x, y = torch.randn(N, p), torch.randn(N, M)
            for _ in range(40):  # until the memory is full
                solver.update(x, y)
            contestants[f"{kind.__name__} {p}"] = lambda s=solver, x=x, y=y: s.update(x, y)
    times = {name: spread(values) for name, values in alternate(contestants, 15, 0.1).items()}
    for name, seconds in times.items():
        print(f"{name:20s} {seconds['median'] * 1e3:8.2f} ms")
    medians = np.log([times[f"OnlineLBFGS {p}"]["median"] for p in SIZES])
    slope = float(np.polyfit(np.log(SIZES), medians, 1)[0])
    last = float((medians[-1] - medians[-2]) / math.log(2))
    print(f"slope of log time over log p: {slope:.2f}, wanted <= 1.15 (from {SIZES[-2]} to {SIZES[-1]}: {last:.2f})")

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
    state = OnlineLBFGS().bind(nn.Linear(SIZES[-1], M, bias=False)).state_dict().values()
    kept = sum(value.numel() * value.element_size() for value in state if isinstance(value, Tensor))
    memory = {"OnlineLBFGS": kept, "RLS": 2 * 8 * SIZES[-1] ** 2}
    settings = {"batch": N, "outputs": M, "p": P, "samples": SAMPLES, "passes": PASSES, "noise": NOISE}
    result = {"seconds": times, "slope": slope, "slope_last": last, "bytes_at_65536": memory, "quality": problems}
    write(__file__, {"settings": settings} | result)


if __name__ == "__main__":
    main()
