"""The compiled kernel of the forecaster: recursive least squares for every step of a horizon whose targets come late.

At row s the inputs x of every head are known, and the target of step h only at row s + h. The covariance P of a head
depends on inputs alone, so that its gain k = P x / (λ + xᵀ P x) is computed once, at row s, and kept for H rows; the
weights of step h learn by w += k (y - wᵀx) when row s + h comes. Step h thus has the weights of recursive least squares
on all pairs known by now, for one covariance for all steps. Forgetting is given back as in `heads.math.ridge`, one
coordinate at a time, by a further gain that is kept beside the first.

A family holds heads of equal size. Its arrays: `terms` (G, d, 5), the inputs (z[a, now - i] - z[b, now - j]) u of
group g as (a, i, b, j, u), where j = -1 leaves out the second value and u = -1 the factor, a sine or cosine of a
season; `series` (G, k), the series that a group forecasts; `forgetting` (L,), `ridge` (p,), `left` (L, G, p), what
forgetting has left of it; `P` (L, G, p, p); `W` (L, G, k, H, p); `loss` (L, G, k, H), recent squared errors; and rings
of the last H rows: `X` (H, G, p), inputs, `K` and `R` (H, L, G, p), gains, `C` (H, L, G), the coordinate whose ridge
was given back, or -1.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from sepsa.stream.engine.kernels.compilation import compiled, inlined
from sepsa.stream.engine.kernels.robust import HUGE

FAR = 30.0  # root mean square errors of step 1 beyond which a value is implausible
PATIENCE = 3  # implausible values in a row after which the next is accepted
FIRST = 32  # rows before any value is implausible
LARGEST = 1e4  # standard deviations of the first rows to which values are bounded
RECENT = 0.99  # discount of the squared errors by which forecasts are bounded and intervals scaled
STEP = 0.02  # of the quantiles of errors, in root mean squares
C_ROWS, C_OUTLIERS = range(2)
COUNTS = 2


class Family(NamedTuple):
    """Heads of equal size; the arrays are those of the module's docstring."""

    terms: Any
    series: Any
    forgetting: Any
    ridge: Any
    left: Any
    P: Any
    W: Any
    loss: Any
    X: Any
    K: Any
    R: Any
    C: Any


class Shared(NamedTuple):
    """What all heads share.

    `mean`, `scale` (m,) of the series; `drift` and `spread` (q,) of the exogenous inputs; `angles` (a,) of the seasons,
    in radians a row; `options` (3,): discount and sharpness of the weights of heads, forgetting of exogenous inputs;
    `counts`; `lags` (m, 2n), values twice, so that the last n are contiguous; rings of the last H rows: `base` (H, m),
    values, `there` (H, m), whether they were observed, `made` (H, m, H), forecasts; `square` (m, H), recent squared
    errors; `levels` (v,) and `quantiles` (v, m, H) of errors in units of their root mean square; `extent` (2, m), the
    least and the largest value observed; `odd` (m,), how many values in a row were implausible; `XP` (q, q), `XW`
    (m, H, q) and `XK` (4, q), the head on the exogenous inputs of the row that is forecast: covariance, weights, and
    two gains, the ridge left and the ridge.
    """

    mean: Any
    scale: Any
    drift: Any
    spread: Any
    angles: Any
    options: Any
    counts: Any
    lags: Any
    base: Any
    there: Any
    made: Any
    square: Any
    levels: Any
    quantiles: Any
    extent: Any
    odd: Any
    XP: Any
    XW: Any
    XK: Any


@inlined
def dot(a, b):
    """aᵀb."""
    total = 0.0
    for i in range(a.size):
        total += a[i] * b[i]
    return total


@inlined
def subtract(P, k, factor, growth):
    """P ← (P - k kᵀ factor²) growth; k is left multiplied by factor, so that P stays symmetric to the last bit."""
    p = k.size
    for n in range(p):
        k[n] *= factor
    for n in range(p):
        row, kn = P[n], k[n]
        for c in range(p):
            row[c] = (row[c] - kn * k[c]) * growth


@inlined
def gains(P, left, ridge, lam, x, t, k, r):
    """Update P by the inputs x of row t; k gets the gain of x.

    So often that no coordinate falls below half of its ridge, the next one gets back what it lacks: r is the gain of
    that, and the coordinate is returned; -1 at other rows.
    """
    p = x.size
    s = lam
    for n in range(p):
        k[n] = dot(P[n], x)
        s += k[n] * x[n]
    root = 1.0 / math.sqrt(s)
    subtract(P, k, root, 1.0 / lam)
    for n in range(p):
        k[n] *= root
    if lam == 1.0:
        return -1
    for n in range(p):
        left[n] *= lam
    every = max(1, int(-1.0 / (p * math.log2(lam))))
    c = (t // every) % p
    lacking = ridge[c] - left[c]
    if t % every != 0 or lacking <= 0.0:
        return -1
    left[c] = ridge[c]
    root = math.sqrt(lacking / (1.0 + lacking * P[c, c]))
    for n in range(p):
        r[n] = P[n, c]
    subtract(P, r, root, 1.0)
    for n in range(p):
        r[n] *= root
    return c


@inlined
def learn_error(w, k, r, c, e):
    """Let weights learn the error e by the gain k, then give back the ridge of coordinate c by the gain r."""
    if c < 0:
        for n in range(w.size):
            w[n] += k[n] * e
    else:
        old = w[c] + k[c] * e
        for n in range(w.size):
            w[n] += k[n] * e - r[n] * old


@inlined
def learn_targets(f, z, there, base, t, H, discount):
    """Let every step learn the value z of row t, which it has forecast at row t - step."""
    for h in range(min(t, H)):
        at = (t - h - 1) % H
        rate = max(1.0 - discount, 1.0 / (t - h))
        for g in range(f.series.shape[0]):
            x = f.X[at, g]
            for i in range(f.series.shape[1]):
                j = f.series[g, i]
                if not there[j]:
                    continue
                for v in range(f.forgetting.size):
                    w = f.W[v, g, i, h]
                    e = z[j] - base[at, j] - dot(w, x)
                    f.loss[v, g, i, h] += rate * (e * e - f.loss[v, g, i, h])
                    learn_error(w, f.K[at, v, g], f.R[at, v, g], f.C[at, v, g], e)


@inlined
def learn_inputs(f, lags, now, common, there, t, H):
    """Gather the inputs of row t and compute the gains of every head; a group whose series are missing learns none."""
    at, d = t % H, f.terms.shape[1]
    for g in range(f.series.shape[0]):
        x = f.X[at, g]
        for n in range(d):
            a, i, b, j, u = f.terms[g, n]
            x[n] = lags[a, now - i]
            if j >= 0:
                x[n] -= lags[b, now - j]
            if u >= 0:
                x[n] *= common[u]
        x[d:] = common
        observed = False
        for i in range(f.series.shape[1]):
            observed |= there[f.series[g, i]]
        for v in range(f.forgetting.size):
            k, r = f.K[at, v, g], f.R[at, v, g]
            if observed:
                f.C[at, v, g] = gains(f.P[v, g], f.left[v, g], f.ridge, f.forgetting[v], x, t, k, r)
            else:
                k[:] = 0.0
                f.C[at, v, g] = -1


@inlined
def best_losses(f, best):
    """Lower `best` (m, H) to the least loss of a head of this family."""
    for v in range(f.W.shape[0]):
        for g in range(f.W.shape[1]):
            for i in range(f.series.shape[1]):
                for h in range(best.shape[1]):
                    best[f.series[g, i], h] = min(best[f.series[g, i], h], f.loss[v, g, i, h])


@inlined
def add_forecasts(f, t, H, best, sharpness, total, weight):
    """Add the forecasts of a family's heads to `total` (m, H), with weights (best loss / loss)^sharpness."""
    at = t % H
    for g in range(f.W.shape[1]):
        x = f.X[at, g]
        for i in range(f.series.shape[1]):
            j = f.series[g, i]
            for v in range(f.W.shape[0]):
                for h in range(H):
                    loss = f.loss[v, g, i, h]
                    share = (best[j, h] / loss) ** sharpness if loss > 0.0 else 1.0
                    total[j, h] += share * dot(f.W[v, g, i, h], x)
                    weight[j, h] += share


@inlined
def accept(s, y, x, t, H, z, there):
    """Standardize the values y (m,) of row t; missing and implausible ones are replaced by the forecast, not learned.

    An implausible value is accepted where as many as PATIENCE before it were implausible too: the level has changed.
    """
    for j in range(y.size):
        guess = s.made[(t - 1) % H, j, 0] + dot(s.XW[j, 0], x) if t > 0 else 0.0
        there[j] = not math.isnan(y[j])
        if there[j]:
            z[j] = min(max((y[j] - s.mean[j]) / s.scale[j], -LARGEST), LARGEST)
            size = max(math.sqrt(s.square[j, 0]), 0.01)
            if t >= FIRST and s.square[j, 0] > 0.0 and abs(z[j] - guess) > FAR * size:
                s.counts[C_OUTLIERS] += 1
                s.odd[j] += 1
                there[j] = s.odd[j] > PATIENCE
            else:
                s.odd[j] = 0
        if there[j]:
            s.extent[0, j] = min(s.extent[0, j], z[j])
            s.extent[1, j] = max(s.extent[1, j], z[j])
        else:
            z[j] = min(max(guess, s.extent[0, j]), s.extent[1, j])


@inlined
def judge(s, z, there, x, t, H):
    """Learn the errors of the forecasts of row t: their size and quantiles, and what exogenous inputs x explain."""
    k, r = s.XK[0], s.XK[1]
    c = gains(s.XP, s.XK[2], s.XK[3], s.options[2], x, t, k, r) if x.size > 0 else -1
    for h in range(min(t, H)):
        at = (t - h - 1) % H
        rate = max(1.0 - RECENT, 1.0 / (t - h))
        for j in range(z.size):
            if not there[j]:
                continue
            w = s.XW[j, h]
            e = z[j] - s.made[at, j, h] - dot(w, x)
            learn_error(w, k, r, c, e)
            size = math.sqrt(s.square[j, h])
            s.square[j, h] += rate * (e * e - s.square[j, h])
            if size > 0.0:
                step = max(STEP, 1.0 / (t - h))
                for v in range(s.levels.size):
                    above = e > s.quantiles[v, j, h] * size
                    s.quantiles[v, j, h] += step * (s.levels[v] if above else s.levels[v] - 1.0)
                for v in range(1, s.levels.size):
                    s.quantiles[v, j, h] = max(s.quantiles[v, j, h], s.quantiles[v - 1, j, h])


@inlined
def standardized(s, e, x):
    """Standardize the exogenous inputs e of a row into x; a missing one is at its mean."""
    for c in range(x.size):
        value = (e[c] - s.drift[c]) * s.spread[c]
        x[c] = 0.0 if math.isnan(value) else min(max(value, -LARGEST), LARGEST)


@compiled
def learn(own, joint, s, Y, E, out, quantiles, ahead):
    """Learn rows Y (n, m) with exogenous inputs E (n, q) in order; out (n, m, H) gets the forecasts made after each.

    They are standardized. `quantiles` (n, v, m, H) gets those of their errors, unless it is empty. `ahead` uses the
    exogenous inputs of the rows that are forecast, as far as E has them.
    """
    m, H = s.square.shape
    n, seasons, q = s.lags.shape[1] // 2, s.angles.size, E.shape[1]
    z, there, x = np.empty(m), np.empty(m, np.bool_), np.empty(q)
    common = np.ones(1 + 2 * seasons + q)
    best, weight = np.empty((m, H)), np.empty((m, H))
    for i in range(len(Y)):
        t = s.counts[C_ROWS]
        standardized(s, E[i], x)
        accept(s, Y[i], x, t, H, z, there)
        judge(s, z, there, x, t, H)
        learn_targets(own, z, there, s.base, t, H, s.options[0])
        learn_targets(joint, z, there, s.base, t, H, s.options[0])
        now = n + t % n
        for j in range(m):
            if t == 0:
                s.lags[j, :] = z[j]
            s.lags[j, now] = s.lags[j, now - n] = z[j]
            s.base[t % H, j], s.there[t % H, j] = z[j], there[j]
        for c in range(seasons):
            common[1 + 2 * c], common[2 + 2 * c] = math.sin(s.angles[c] * t), math.cos(s.angles[c] * t)
        common[1 + 2 * seasons :] = x
        learn_inputs(own, s.lags, now, common, there, t, H)
        learn_inputs(joint, s.lags, now, common, there, t, H)
        best[:] = HUGE
        best_losses(own, best)
        best_losses(joint, best)
        made = s.made[t % H]
        made[:] = 0.0
        weight[:] = 0.0
        add_forecasts(own, t, H, best, s.options[1], made, weight)
        add_forecasts(joint, t, H, best, s.options[1], made, weight)
        for h in range(H):
            explained = ahead and q > 0 and i + 1 + h < len(Y)
            if explained:
                standardized(s, E[i + 1 + h], x)
            for j in range(m):
                made[j, h] = z[j] + made[j, h] / weight[j, h]
                final = made[j, h] + (dot(s.XW[j, h], x) if explained else 0.0)
                out[i, j, h] = final
                if len(quantiles) > 0:
                    for v in range(s.levels.size):
                        quantiles[i, v, j, h] = s.quantiles[v, j, h] * math.sqrt(s.square[j, h])
        s.counts[C_ROWS] = t + 1


@inlined
def revise_step(f, j, h, row, old, new):
    """Let step h of series j learn the target `new` at the inputs of `row`, instead of `old`, or of none, a NaN."""
    for g in range(f.series.shape[0]):
        for i in range(f.series.shape[1]):
            if f.series[g, i] != j:
                continue
            for v in range(f.forgetting.size):
                w, k = f.W[v, g, i, h], f.K[row, v, g]
                e = new - (dot(w, f.X[row, g]) if math.isnan(old) else old)
                for n in range(w.size):
                    w[n] += k[n] * e


@compiled
def revise(own, joint, s, j, age, y):
    """Replace the value of series j, `age` rows before the last one, by y, in the lags and in what steps have learned.

    Steps whose gain is no longer kept, those of rows more than H before the last one, stay as they are.
    """
    H, n = s.square.shape[1], s.lags.shape[1] // 2
    t = s.counts[C_ROWS] - 1 - age
    new = (y - s.mean[j]) / s.scale[j]
    at = t % H
    for h in range(min(t, H - 1 - age)):
        row = (t - h - 1) % H
        base = s.base[row, j]
        old = s.base[at, j] - base if s.there[at, j] else math.nan
        revise_step(own, j, h, row, old, new - base)
        revise_step(joint, j, h, row, old, new - base)
    s.base[at, j], s.there[at, j] = new, True
    if age < n:
        s.lags[j, t % n] = s.lags[j, n + t % n] = new
