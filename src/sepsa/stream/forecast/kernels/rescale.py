"""A change of a series' scale by a power of two: all that is in its units changes with it, and no bit is lost.

It is rare, so that NumPy does it; the ridge that a change takes from a head is restored by a kernel.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sepsa.stream.engine.protocol import Floats
from sepsa.stream.forecast.kernels.arrays import CHANGE, SMALLEST, Family, Shared, Stack
from sepsa.stream.kernels.compilation import compiled
from sepsa.stream.kernels.head import rank_one


def follow_scales(own: Family, joint: Family, c: Stack, s: Shared, stack_ridge: Floats) -> None:
    """Change the scale of each series whose spread has left it."""
    for j, spread in enumerate(s.spread.tolist()):
        if spread <= 0.0 or 1.0 / CHANGE < spread < CHANGE:
            continue
        least = max(SMALLEST * abs(s.mean[j]), 1e-90) / s.scale[j]
        factor = 2.0 ** math.floor(math.log2(max(spread, least)))
        if factor < 0.5 or factor > 2.0:
            change_family(own, j, factor)
            change_family(joint, j, factor)
            change_stack(c, j, factor, stack_ridge)
            change_shared(s, j, factor)


@compiled
def restore(U, D, left, ridge, W):
    """Restore lost ridge in B = UDUᵀ and in all weights W (k, H, p)."""
    p = ridge.size
    r, unit = np.empty(p), np.zeros(p)
    for b in range(p):
        lacking = ridge[b] - left[b]
        if lacking > 0.0:
            left[b], unit[b] = ridge[b], 1.0
            total = rank_one(U, D, unit, b, lacking, r)
            unit[b] = 0.0
            for i in range(W.shape[0]):
                for h in range(W.shape[1]):
                    old = lacking / total * W[i, h, b]
                    for n in range(p):
                        W[i, h, n] -= r[n] * old


def change_covariance(U: Floats, D: Floats, left: Floats, ridge: Floats, by: Floats, W: Floats) -> None:
    """Let the inputs of a head become `by` (p,) times as large; lost ridge is restored in B and in all weights W."""
    column, row = np.tril_indices(len(by), -1)
    U *= by[column] / by[row]
    D /= by**2
    left *= by**2
    if (left < ridge).any():
        restore(U, D, left, ridge, W)


def change_family(f: Family, j: int, factor: float) -> None:
    """Divide the values of series j by `factor` in all heads of a family."""
    p, d = f.ridge.size, f.terms.shape[1]
    for g, terms in enumerate(f.terms):
        by = np.ones(p)
        by[:d][terms[:, 0] == j] = 1.0 / factor
        f.X[:, g] *= by
        f.K[:, :, g] /= by
        restored = (f.C[:, :, g, None] + np.arange(f.R.shape[3])) % p
        f.R[:, :, g] *= np.where(f.C[:, :, g, None] < 0, 1.0, by[restored])[..., None] / by
        one = np.where(f.series[g] == j, factor, 1.0)
        f.loss[:, g] /= one[:, None] ** 2
        f.W[:, g] /= one[:, None, None] * by
        for v in range(f.forgetting.size):
            change_covariance(f.U[v, g], f.D[v, g], f.left[v, g], f.ridge, by, f.W[v, g])


def change_stack(c: Stack, j: int, factor: float, ridge: Floats) -> None:
    """Divide the values of series j by `factor` in its stacks and candidates."""
    for ring in (c.heads, c.stacked, c.mixed, c.off):
        ring[:, j] /= factor
    c.profile[j] /= factor
    c.typical[j] /= factor * factor
    by = np.full(c.D.shape[2], 1.0 / factor)
    by[:1] = 1.0
    c.W[j] /= factor * by
    for h in range(c.D.shape[1]):
        change_covariance(c.U[j, h], c.D[j, h], c.left[j, h], ridge, by, c.W[j : j + 1, h : h + 1])


def change_shared(s: Shared, j: int, factor: float) -> None:
    """Divide the values of series j by `factor` in what all heads share."""
    s.scale[j] *= factor
    of_series: list[Any] = [s.level, s.spread, s.reach, s.strange, s.lags, s.size, s.XW]
    for array in of_series:
        array[j] /= factor
    for ring in (s.made, s.extent, s.base):
        ring[:, j] /= factor
    s.ends[:, :, j] /= factor
