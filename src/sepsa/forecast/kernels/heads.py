"""The heads of a forecaster, which learn every step of a horizon when its value comes.

At row s the inputs x of every head are known, and the target of step h only at row s + h. The covariance B = UDUᵀ of a
head depends on inputs alone, so that its gain k = Bx / (λ + xᵀBx) is computed once, at row s, and kept for H rows; the
weights of step h learn by w += k (y - wᵀx) when row s + h comes. Step h thus has the weights of recursive least squares
on all pairs known by now, for one covariance for all steps. Forgotten ridge is restored by the rule of
`sepsa.restoration`, by further gains that are kept beside the first.
"""

from __future__ import annotations

import math

from sepsa import restoration
from sepsa.compiled.kernels import called
from sepsa.forecast.kernels.parts import NEXT, SHARPNESS, UPDATES, fixed, heads, row, shared, size, stack
from sepsa.learner.arithmetic.head import rank_one
from sepsa.learner.arithmetic.weigh import weigh

# Over the number of rows so far, the rate of recent means while these are few: later rows count more than first ones.
RISE = 1.5
DISCOUNT = 0.998  # of the losses by which heads are weighed: the last 500 rows count
FIRST_ROWS = 32  # before any value is implausible, and any loss a measure of others

due = called(restoration.due)


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
def fill_gains(U, D, left, ridge, turn, forgetting, x, gains, unit):
    """Update B = UDUᵀ by the inputs x of a row, and fill their gain, then those of the coordinates restored after it.

    Returns the first of these coordinates, or -1. None ever falls below half of its ridge.
    """
    p, first = x.size, turn[NEXT]
    for n in range(p):
        D[n] /= forgetting
        left[n] *= forgetting
    count = due(p, forgetting, turn[UPDATES])
    turn[NEXT], turn[UPDATES] = (first + count) % p, turn[UPDATES] + 1
    for i in range(1 + count):
        c, lacking, phi, out = 0, 1.0, x, gains[i]
        if i > 0:
            c, phi = (first + i - 1) % p, unit
            lacking = max(ridge[c] - left[c], 0.0)
            left[c] += lacking
            unit[c] = 1.0
        total = rank_one(U, D, phi, c, lacking, out)
        for n in range(p):
            out[n] *= lacking / total
        unit[c] = 0.0
    return first if count > 0 else -1


@called
def learn_error(w, gains, first, error):
    """Let weights learn an error by the first gain, then restore the ridge of the coordinates from `first` on."""
    for n in range(w.size):
        w[n] += gains[0, n] * error
    if first >= 0:
        for i in range(1, gains.shape[0]):
            old = w[(first + i - 1) % w.size]
            for n in range(w.size):
                w[n] -= gains[i, n] * old


@called
def learn_target(model, j, h, at, t, now):
    """Let the heads of step h + 1 learn the value of series j at row t, by the inputs at `at` of the ring."""
    X, W, losses, gains, first = heads.views("X W LOSS GAINS FIRST", model)
    change = row.Z(model)[j] - shared.LAGS(model)[j, now - h - 1]
    rate = max(1.0 - DISCOUNT, min(RISE / (t - h), 1.0))
    for v in range(W.shape[0]):
        w, loss = W[v, j, h], losses[v, j, h]
        e = change - dot(w, X[at, j])
        square = e * e if loss == 0.0 or t < FIRST_ROWS + h else min(e * e, 100.0 * loss)
        losses[v, j, h] += rate * (square - loss)
        learn_error(w, gains[at, v, j], first[at, v, j], e)


@called
def fill_inputs(model, j, now, x):
    """Fill the inputs of the heads of series j: its value, its lags less the value, and changes of the other series.

    In a season the value and its changes over a few rows, and over about a season, also count by the time of it: times
    the first two sines and cosines. The inputs that all heads have come last: a bias, sines and cosines of the seasons,
    exogenous inputs.
    """
    lags, spans, angles, inputs = shared.LAGS(model), fixed.SPANS(model), fixed.ANGLES(model), row.INPUTS(model)
    own, waves, n, phase = lags[j], 4 if angles.size > 0 else 0, size.lags(model), shared.COUNTS(model).phase
    common = x[x.size - 1 - 2 * angles.size - inputs.size :]
    common[0] = 1.0
    for a in range(angles.size):
        common[1 + 2 * a], common[2 + 2 * a] = math.sin(angles[a] * phase), math.cos(angles[a] * phase)
    for a in range(inputs.size):
        common[1 + 2 * angles.size + a] = inputs[a]
    x[0] = own[now]
    for k in range(1, n):
        x[k] = own[now - k] - own[now]
    for k in spans:
        for i in range(len(lags)):
            if i != j:
                x[n] = lags[i, now] - lags[i, now - k]
                n += 1
    for s in range(-1, spans.size):
        for wave in range(waves):
            x[n] = (own[now] if s < 0 else own[now] - own[now - spans[s]]) * common[1 + wave]
            n += 1


@called
def learn_inputs(model, t, now):
    """Gather the inputs of row t and compute the gains of every head; those of a series that is missing learn none."""
    ridge, forgetting, there = fixed.RIDGE(model), fixed.FORGETTING(model), row.THERE(model)
    X, U, D, left, gains, first, turn, unit = heads.views("X U D LEFT GAINS FIRST TURN UNIT", model)
    at = t % size.horizon(model)
    for j in range(there.size):
        x = X[at, j]
        fill_inputs(model, j, now, x)
        for v in range(forgetting.size):
            out, first[at, v, j] = gains[at, v, j], -1
            if there[j]:
                first[at, v, j] = fill_gains(
                    U[v, j], D[v, j], left[v, j], ridge, turn[v, j], forgetting[v], x, out, unit
                )
            else:
                fill(out[0], 0.0)


@called
def forecast_by_heads(model, t):
    """Fill the mean of the forecasts of the heads of each series, with weights (least loss / loss)^sharpness."""
    z, forecasts = row.Z(model), stack.HEADS(model)[t % size.horizon(model)]
    X, W, losses, weights = heads.views("X W LOSS WEIGHTS", model)
    H = size.horizon(model)
    for j in range(z.size):
        x = X[t % H, j]
        for h in range(H):
            weigh(losses[:, j, h], SHARPNESS, 1e-300, 0.0, weights)
            forecasts[j, h] = z[j]
            for v in range(weights.size):
                forecasts[j, h] += weights[v] * dot(W[v, j, h], x)
