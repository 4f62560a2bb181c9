"""A numerical check of Theorem 1 and of the O(1/k) rate, where the optimum and the true gradient are known.

The problem: y = η(x; α*, θ*) + noise with η(x; α, θ) = Σ_j α_j exp(-(x - θ_j)²/2) + α_0, a sum of bumps, linear in
their heights and nonlinear in their places. x is uniform over 256 points, so that expectations are finite sums:

    f(w) = ½ mean_x (η(x; w) - η(x; w*))² + ½ noise²

The method: the head by `RLS` at forgetting 1, whose step size is γ_k = 1/k, the body by SGD with β_k = d/(k₀ + k).

Near the optimum the errors of head and body follow, in the time ln k, a linear equation with the matrix

    [ I         H_αα⁻¹ H_αθ ]
    [ d H_θα    d H_θθ      ]

and f falls like k^-min(1, 2κ), κ its smallest eigenvalue. A larger d lifts κ no higher than the coupling of head and
body allows, because γ_k = 1/k has no constant to raise. So O(1/k) holds where the bumps are apart; the second problem,
with bumps that overlap, shows that it does not hold in general.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from reproduction import records, runner
from sepsa.heads import RLS
from sepsa.training.optimizer import SepSA

Floats = NDArray[np.float64]
Curves = tuple[list[float], list[float]]  # gradient norms and objective gaps, at the marks

APART, OVERLAPPING = 3.1, 1.8  # the distance from bump to bump, of width 1
BUMPS, POINTS, NOISE = 4, 256, 0.5
D, K0 = 16.0, 50.0
STEPS, SEEDS = 10_000, 16
QUICK_STEPS, QUICK_SEEDS = 2_000, 4
MARKS = 31  # values of k, equally spaced on a logarithmic scale, at which f is evaluated
TAIL = 30  # slopes are fitted to k >= steps/TAIL
RESAMPLES = 2_000  # of the seeds, for the intervals
HEAD_SIZES = (32, 64, 128, 256, 512, 1024)
BODY_INPUTS = (10, 100, 1_000, 10_000, 100_000)


class Bumps(nn.Module):
    """Gaussian bumps of width 1 around learned places: (n, 1) to (n, places)."""

    def __init__(self, places: Tensor) -> None:
        super().__init__()
        self.places = nn.Parameter(places)

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(-((x - self.places) ** 2) / 2)


class Realization(NamedTuple):
    """One run of the method, whose start and samples follow from the seed."""

    spacing: float
    steps: int
    seed: int


def optimum(spacing: float) -> tuple[Tensor, Bumps, nn.Linear]:
    """The possible inputs (POINTS, 1), and body and head with the optimal weights."""
    x = torch.linspace(0, BUMPS * spacing, POINTS, dtype=torch.float64)[:, None]
    head = nn.Linear(BUMPS, 1, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(2.0 * (-1.0) ** torch.arange(BUMPS))
        head.bias.fill_(0.5)
    return x, Bumps((torch.arange(BUMPS, dtype=torch.float64) + 0.5) * spacing), head


def marks(steps: int) -> list[int]:
    return sorted({round(steps ** (i / (MARKS - 1))) for i in range(MARKS)})


def away_from_optimum(spacing: float, seed: int, steps: int) -> tuple[Tensor, nn.Sequential, Tensor, Tensor, Tensor]:
    """The points, the model moved from its optimum, the targets without noise; the point and the noise of each step."""
    generator = torch.Generator().manual_seed(seed)
    x, body, head = optimum(spacing)
    model = nn.Sequential(body, head)
    clean = model(x).detach()
    with torch.no_grad():
        body.places.add_(0.3 * torch.randn(BUMPS, dtype=torch.float64, generator=generator))
        head.weight.zero_()
        head.bias.zero_()
    drawn = torch.randint(POINTS, (steps,), generator=generator)
    noise = NOISE * torch.randn(steps, 1, 1, dtype=torch.float64, generator=generator)
    return x, model, clean, drawn, noise


def follow(realization: Realization) -> Curves:
    """The norm of the true gradient of f, and f less its minimum, at each of the marks."""
    x, model, clean, drawn, noise = away_from_optimum(realization.spacing, realization.seed, realization.steps)
    optimizer = SepSA(model, torch.optim.SGD, solver=RLS(bias_ridge="ridge"), lr=1.0)
    evaluated, norms, gaps = set(marks(realization.steps)), [], []
    for k in range(1, realization.steps + 1):
        row = drawn[k - 1 : k]
        optimizer.param_groups[0]["lr"] = D / (K0 + k)
        optimizer.learn(x[row], clean[row] + noise[k - 1], half_square)
        if k in evaluated:
            gap = half_square(model(x), clean)
            gradient = torch.autograd.grad(gap, list(model.parameters()))
            norms.append(math.sqrt(sum(float(g.square().sum()) for g in gradient)))
            gaps.append(gap.item())
    return norms, gaps


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    """The paper's loss F, averaged over the rows."""
    return (outputs - targets).square().mean() / 2


def kappa(spacing: float) -> float:
    """The smallest eigenvalue κ of the matrix in the module's docstring."""
    x, body, head = optimum(spacing)
    with torch.no_grad():
        h = body(x)
        J = torch.cat([h, torch.ones_like(x), h * (x - body.places) * head.weight], 1)  # ∂η/∂w
        H = (J.T @ J / POINTS).numpy()
    p = BUMPS + 1
    H[:p] = np.linalg.solve(H[:p, :p].copy(), H[:p])
    H[p:] *= D
    return float(np.linalg.eigvals(H).real.min())


def slope(k: Floats, values: Floats) -> list[float | None]:
    """The slope of log mean against log k in the tail, and its 95 % interval over the seeds; values (seeds, k)."""
    tail = k >= k[-1] / TAIL
    generator = np.random.default_rng(0)

    def fit(rows: Floats) -> float:
        return float(np.polyfit(np.log(k[tail]), np.log(rows[:, tail].mean(0)), 1)[0])

    again = [fit(values[generator.integers(len(values), size=len(values))]) for _ in range(RESAMPLES)]
    low, high = np.quantile(again, [0.025, 0.975])
    return [records.significant(value) for value in (fit(values), float(low), float(high))]


def summary(spacing: float, k: list[int], norms: Floats, gaps: Floats) -> dict[str, Any]:
    """Means over the seeds with their 10 % and 90 % quantiles, and slopes with intervals; norms and gaps (seeds, k)."""

    def band(values: Floats) -> dict[str, list[float | None]]:
        rows = {"mean": values.mean(0), "low": np.quantile(values, 0.1, 0), "high": np.quantile(values, 0.9, 0)}
        return {name: [records.significant(float(value)) for value in row] for name, row in rows.items()}

    at = np.array(k, dtype=np.float64)
    return {
        "k": k,
        "gradient_norm": band(norms),
        "objective_gap": band(gaps),
        "slope": {"gradient": slope(at, norms), "objective": slope(at, gaps)},
        "kappa": records.significant(kappa(spacing)),
    }


def cost(seconds: float) -> dict[str, list[dict[str, float | None]]]:
    """Seconds of one iteration on one sample against p, the head's features, and against q, the body's parameters."""
    heads = [{"p": p, "seconds": iteration(8, p - 1, seconds)} for p in HEAD_SIZES]
    bodies = [{"q": (n + 1) * 49, "seconds": iteration(n, 49, seconds)} for n in BODY_INPUTS]
    return {"p": heads, "q": bodies}


def iteration(inputs: int, hidden: int, seconds: float) -> float | None:
    """The median time of one iteration of SepSA with SGD on a network with one hidden layer, measured for `seconds`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 1))
    optimizer = SepSA(model, torch.optim.SGD, solver=RLS(bias_ridge="ridge"), lr=1e-6)
    x, y = torch.randn(1, inputs), torch.randn(1, 1)
    times: list[float] = []
    for _ in range(5):  # warm up
        optimizer.learn(x, y)
    while sum(times) < seconds or len(times) < 5:
        start = time.perf_counter()
        optimizer.learn(x, y)
        times.append(time.perf_counter() - start)
    return records.significant(statistics.median(times))


def run(results: Path, jobs: int, quick: bool, console: Console) -> None:
    """Write results/convergence.json, unless it exists with these settings."""
    steps, seeds = (QUICK_STEPS, QUICK_SEEDS) if quick else (STEPS, SEEDS)
    settings = {"apart": APART, "overlapping": OVERLAPPING, "bumps": BUMPS, "noise": NOISE, "d": D, "k0": K0}
    settings |= {"steps": steps, "seeds": seeds}
    file = results / "convergence.json"
    if file.exists() and json.loads(file.read_text(encoding="utf-8")).get("settings") == settings:
        console.print(f"{file} is there already", highlight=False)
        return
    realizations = [Realization(spacing, steps, seed) for spacing in (APART, OVERLAPPING) for seed in range(seeds)]
    found: dict[Realization, Curves] = {}
    with closing(runner.each(follow, realizations, jobs)) as work:
        for i, curves, _ in track(work, "convergence", total=len(realizations), console=console):
            found[realizations[i]] = curves

    def summarized(spacing: float) -> dict[str, Any]:
        norms, gaps = (np.array([found[r][i] for r in realizations if r.spacing == spacing]) for i in (0, 1))
        return summary(spacing, marks(steps), norms, gaps)

    with runner.one_thread():
        costs = cost(0.05 if quick else 1.0)
    content = summarized(APART) | {
        "seeds": seeds,
        "cost": costs,
        "overlapping": summarized(OVERLAPPING),
        "settings": settings,
        "versions": records.versions(),
    }
    records.write_json(file, content)
    for name, at in (("apart", content), ("overlapping", content["overlapping"])):
        for what, (middle, low, high) in at["slope"].items():
            rate = f"k^{middle:.2f} ({low:.2f} to {high:.2f})"
            console.print(f"bumps {name}: the {what} falls like {rate}", highlight=False)
