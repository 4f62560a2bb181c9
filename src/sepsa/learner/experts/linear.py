"""A linear head on all inputs: its slopes are fitted to a table, and are zero in a stream, where it is the mean.

The ridge is that of the largest marginal likelihood, as in `RLS(ridge="evidence")`: the variance of the noise over that
of the slopes, each target in units of its deviation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from sepsa.compiled.kernels import kernel
from sepsa.compiled.linear_algebra import add_scaled, multiply
from sepsa.learner.experts.frame import Expert, given, row
from sepsa.learner.memory.parts import Floats, Part, Record, work
from sepsa.learner.memory.views import Group

ROUNDS = 100  # of choosing the ridge
LEAST, MOST = 1e-4, 1e6  # times the smallest and the largest variance of a direction: the bounds of the ridge
ROUNDING = 1e-12  # a variance below this share of the largest is rounding

parts = Group(
    given,
    "linear",
    Part("SLOPES", float, ("outputs", "inputs")),
    Part("VALUE", float, ("outputs",)),  # the mean of what the slopes leave
    Part("ROWS", Record(count=float)),
    work("SLOPED", float, ("outputs",)),
)


@kernel
def answer(model, e):
    out = row.ANSWERS(model)[e]
    multiply(parts.SLOPES(model), row.Z(model), out)
    add_scaled(parts.VALUE(model), 1.0, out)
    return 0


@kernel
def learn(model, e):
    (slopes, value, rows, sloped), y = parts.views("SLOPES VALUE ROWS SLOPED", model), row.Y(model)
    rows.count += 1.0
    multiply(slopes, row.Z(model), sloped)  # an input may have got its scale since the answer
    for k in range(y.size):
        value[k] += (y[k] - sloped[k] - value[k]) / rows.count
    return 0


EXPERT = Expert(parts, answer, learn)


def fitted(blocks: Iterable[tuple[Floats, Floats, Floats]]) -> tuple[Floats, Floats]:
    """The slopes (outputs, inputs) and the intercepts (outputs,) by evidence, from rows Z, targets and weights."""
    total: Any = 0.0
    squares: Any = 0.0
    sums: Any = 0.0
    products: Any = 0.0
    for Z, Y, weight in blocks:
        both = np.concatenate([Z, Y], 1)
        total, squares = total + weight.sum(), squares + weight @ weight
        sums, products = sums + weight @ both, products + (both.T * weight) @ both
    n, d, mean = total * total / squares, Z.shape[1], sums / total
    covariance = products / total - np.outer(mean, mean)
    variance = np.diag(covariance)[d:]
    varies = variance > ROUNDING * np.diag(products)[d:] / total
    unit = np.where(varies, 1 / np.sqrt(np.where(varies, variance, 1.0)), 0.0)
    eigenvalues, axes = np.linalg.eigh(covariance[:d, :d])
    along = axes.T @ covariance[:d, d:] * unit
    there = eigenvalues > ROUNDING * eigenvalues.max(initial=0.0)
    eigenvalues, along, axes = eigenvalues[there], along[there], axes[:, there]
    if not eigenvalues.size or not along.any():
        return np.zeros((len(variance), d)), mean[d:]
    ridge, explained = 10.0 / n, (along**2).sum(1) / varies.sum()
    for _ in range(ROUNDS):
        kept = eigenvalues + ridge
        determined = (eigenvalues / kept).sum()
        residual = max(1.0 - (explained * (eigenvalues + 2 * ridge) / kept**2).sum(), 0.0)
        freedom = max(n - determined - 1.0, 0.01 * n)
        best = determined * residual / (freedom * (explained / kept**2).sum())
        ridge = float(np.clip(best, LEAST * eigenvalues.min() / n, MOST * eigenvalues.max() / n))
    slopes = ((axes @ (along / (eigenvalues + ridge)[:, None])) / np.where(unit > 0, unit, np.inf)).T
    return slopes, mean[d:] - slopes @ mean[:d]
