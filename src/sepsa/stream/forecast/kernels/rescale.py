"""A change of a series' scale by a power of two: all that is in its units changes with it, and no bit is lost."""

from __future__ import annotations

import numpy as np

from sepsa.stream.engine.kernels.compilation import compiled
from sepsa.stream.engine.kernels.head import rank_one
from sepsa.stream.forecast.kernels.arrays import callee, change_due


@compiled
def follow_scales(own, joint, c, s, stack_ridge):
    """Change the scale of each series whose spread has left it."""
    for j in range(s.scale.size):
        factor = change_due(s, j)
        if factor != 1.0:
            change_family(own, j, factor)
            change_family(joint, j, factor)
            change_stack(c, j, factor, stack_ridge)
            change_shared(s, j, factor)


@callee
def change_covariance(U, D, left, ridge, by, W):
    """Let the inputs of a head become `by` (p,) times as large; lost ridge is restored in B and in all weights W."""
    p = by.size
    for b in range(p):
        for a in range(b):
            U[b * (b - 1) // 2 + a] *= by[b] / by[a]
        D[b] /= by[b] ** 2
        left[b] *= by[b] ** 2
    r, unit = np.empty(p), np.zeros(p)
    for b in range(p):
        lacking = ridge[b] - left[b]
        if lacking > 0.0:
            left[b], unit[b] = ridge[b], 1.0
            total = rank_one(U, D, unit, b, lacking, r)
            unit[b] = 0.0
            for i in range(W.shape[0]):
                for h in range(W.shape[1]):
                    W[i, h] -= r * (lacking / total * W[i, h, b])


@callee
def change_family(f, j, factor):
    """Divide the values of series j by `factor` in all heads of a family."""
    p, d = f.ridge.size, f.terms.shape[1]
    by = np.ones(p)
    for g in range(f.series.shape[0]):
        for n in range(d):
            by[n] = 1.0 / factor if f.terms[g, n, 0] == j else 1.0
        f.X[:, g] *= by
        for v in range(f.forgetting.size):
            f.K[:, v, g] /= by
            for row in range(f.C.shape[0]):
                if f.C[row, v, g] >= 0:
                    for i in range(f.R.shape[3]):
                        f.R[row, v, g, i] *= by[(f.C[row, v, g] + i) % p] / by
            for i in range(f.series.shape[1]):
                one = factor if f.series[g, i] == j else 1.0
                f.loss[v, g, i] /= one * one
                for h in range(f.W.shape[3]):
                    f.W[v, g, i, h] /= one * by
            change_covariance(f.U[v, g], f.D[v, g], f.left[v, g], f.ridge, by, f.W[v, g])


@callee
def change_stack(c, j, factor, ridge):
    """Divide the values of series j by `factor` in its stacks and candidates."""
    for ring in (c.heads, c.stacked, c.mixed, c.naive):
        ring[:, j] /= factor
    c.profile[j] /= factor
    c.off[:, j] /= factor
    c.typical[j] /= factor * factor
    if c.D.shape[2] > 0:
        by = np.full(c.D.shape[2], 1.0 / factor)
        by[0] = 1.0
        for h in range(c.D.shape[1]):
            c.W[j, h] /= factor * by
            change_covariance(c.U[j, h], c.D[j, h], c.left[j, h], ridge, by, c.W[j : j + 1, h : h + 1])


@callee
def change_shared(s, j, factor):
    """Divide the values of series j by `factor` in what all heads share."""
    s.scale[j] *= factor
    for one in (s.level, s.spread, s.reach):
        one[j] /= factor
    s.made[:, j] /= factor
    s.ends[:, :, j] /= factor
    s.extent[:, j] /= factor
    s.base[:, j] /= factor
    s.lags[j] /= factor
    s.square[j] /= factor * factor
    s.XW[j] /= factor
