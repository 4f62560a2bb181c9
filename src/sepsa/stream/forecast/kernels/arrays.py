"""The arrays of a forecaster, and the update of a covariance B = UDUᵀ that all of its heads share.

A family holds heads of equal size. Its arrays: `terms` (G, d, 5), the inputs (z[a, now - i] - z[b, now - j]) u of
group g as (a, i, b, j, u), where j = -1 leaves out the second value and u = -1 the factor, a sine or cosine of a
season; `series` (G, k), the series that a group forecasts; `forgetting` (L,), `ridge` (p,), `left` (L, G, p), what
forgetting has left of it; `turn` (L, G, 2), the next coordinate to be restored and the number of updates; `U`
(L, G, p(p-1)/2) and `D` (L, G, p); `W` (L, G, k, H, p); `loss` (L, G, k, H), recent squared errors; and rings of the
last H rows: `X` (H, G, p), inputs, `K` (H, L, G, p), gains, `R` (H, L, G, c, p), the gains of restored coordinates,
`C` (H, L, G), the first of these coordinates, or -1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sepsa.heads.math import ridge as ridge_rule
from sepsa.stream.kernels.compilation import called
from sepsa.stream.kernels.head import rank_one

FIRST = 32  # rows before any value is implausible
C_ROWS, C_OUTLIERS, C_PHASE, C_SHIFTS = range(4)
COUNTS = 4
CHANGE = 16.0  # factor by which the spread of a series leaves its scale before the scale follows
SMALLEST = 1e-9  # scale of a series in units of its mean

due = called(ridge_rule.due)


class Family(NamedTuple):
    """Heads of equal size; the arrays are those of the module's docstring."""

    terms: Any
    series: Any
    forgetting: Any
    ridge: Any
    left: Any
    turn: Any
    U: Any
    D: Any
    W: Any
    loss: Any
    X: Any
    K: Any
    R: Any
    C: Any


class Stack(NamedTuple):
    """For each series and step a head on the mean of the heads and on seasons, and how the candidates have fared.

    `periods` (S,) in rows; `profile` (m, S, n), recent means of the rows of a season; `off` (H, m, S), how far values
    were from it; `U` (m, H, .), `D`, `W`, `left` (m, H, p) and `turn` (m, H, 2) as in a family; `heads`, `stacked` and
    `mixed` (H, m, H), rings of forecasts: the mean of the heads, the stack, the mean of both; `leader` (m, H), which
    naive forecast is used, and `typical` (m, H), its recent squared errors; `missed` (S + 4, m, H), recent absolute
    errors in units of the root of that: of the last value, the last of each season, heads, stack and the forecast;
    `known` (S + 1, m, H, 7), for each naive forecast: how much smaller its errors are than the leader's, and its
    square; how much smaller those of `mixed` are, and its square; the product of its error and its distance from
    `mixed`, and both squares.
    """

    periods: Any
    profile: Any
    off: Any
    U: Any
    D: Any
    W: Any
    left: Any
    turn: Any
    heads: Any
    stacked: Any
    mixed: Any
    typical: Any
    missed: Any
    leader: Any
    known: Any


class Shared(NamedTuple):
    """What all heads share.

    `mean`, `scale` (m,) of the series; `level`, `spread` and `reach` (m,), slow mean, mean distance from it, and the
    size of errors of step 1, all standardized; `limits` (2,), bounds of all series; `drift` and `spread2` (q,), moments
    of the exogenous inputs; `angles` (a,) of the seasons, in radians a row; `options`; `counts`; `lags` (m, 2n), values
    twice, so that the last n are contiguous; rings of the last H rows: `base` (H, m), values, `there` (H, m), whether
    they were observed, `made` (H, m, H), forecasts, `ends` (H, v, m, H), quantiles of their errors as they were issued;
    `judged` (m, 1 + H), the numbers of values observed, and of errors of each step; `size` (m, H), recent absolute
    errors; `levels` (v,) and `quantiles` (v, m, H) of errors in units of it; `told`
    (m, H) and `told_ends` (v, m, H), the last forecasts and their quantiles in units of the series; `extent` (2, m),
    the least and the largest value observed; `odd` (2, m), how many values in a row were implausible, and how much
    oftener the next value confirmed such a one than not; `strange` (m,), the last implausible value;
    `XU`, `XD`, `XW` (m, H, q), `XK` (3, q) and `XT` (2,), the head on the exogenous inputs of the row that is forecast:
    covariance, weights, gain, the ridge left and the ridge, and the turn.
    """

    mean: Any
    scale: Any
    level: Any
    spread: Any
    reach: Any
    limits: Any
    drift: Any
    spread2: Any
    angles: Any
    options: Any
    counts: Any
    lags: Any
    base: Any
    there: Any
    made: Any
    ends: Any
    judged: Any
    size: Any
    levels: Any
    quantiles: Any
    told: Any
    told_ends: Any
    extent: Any
    odd: Any
    strange: Any
    XU: Any
    XD: Any
    XW: Any
    XK: Any
    XT: Any


@called
def dot(a, b):
    """aᵀb."""
    total = 0.0
    for i in range(a.size):
        total += a[i] * b[i]
    return total


@called
def fill(row, value):
    """Set every number of a row; numba compiles a loop much faster than the assignment to a slice."""
    for i in range(row.size):
        row[i] = value


@called
def scratch(p, lam):
    """An array for the gains of the coordinates that are restored at once."""
    return np.zeros((max(1, due(max(p, 1), lam)), p))


@called
def gains(U, D, left, ridge, turn, lam, x, k, R, unit):
    """Update B = UDUᵀ by the inputs x of a row; k gets their gain, R those of the coordinates restored after it.

    Returns the first of these coordinates, or -1. None ever falls below half of its ridge.
    """
    p, first = x.size, turn[0]
    for n in range(p):
        D[n] /= lam
        left[n] *= lam
    count = due(p, lam, turn[1])
    turn[0], turn[1] = (first + count) % p, turn[1] + 1
    for i in range(-1, count):
        if i < 0:
            c, lacking, row, out = 0, 1.0, x, k
        else:
            c, row, out = (first + i) % p, unit, R[i]
            lacking = max(ridge[c] - left[c], 0.0)
            left[c] += lacking
            unit[c] = 1.0
        total = rank_one(U, D, row, c, lacking, out)
        for n in range(p):
            out[n] *= lacking / total
        unit[c] = 0.0
    return first if count > 0 else -1
