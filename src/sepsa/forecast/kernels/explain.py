"""What the exogenous inputs of a row explain of its value, beyond a forecast of it.

Let d be the changes of the inputs of row t over each season in standard deviations, or the inputs themselves where
there are no seasons, e the error of the forecast of row t that was made h + 1 rows before, and y' the last known value
of the first season. There are three ways to explain e: not at all; by a head of each step on d, bᵀd; and where there
are seasons by y' + cᵀd less the forecast, where c is the regression of the change of the series over the first season
on d. The mean of the ways, weighted by recent absolute errors, is used. The inputs of row t are the same for all steps,
so that d has one covariance.
"""

from __future__ import annotations

import math

from sepsa.compiled.kernels import called
from sepsa.forecast.kernels.choice import last_value
from sepsa.forecast.kernels.heads import RISE, dot, fill_gains, learn_error
from sepsa.forecast.kernels.parts import CHOICE, INPUTS_FORGETTING, exogenous, fixed, given, row, shared, size
from sepsa.learner.arithmetic.weigh import weigh

CLIPPED = 8.0  # standard deviations to which exogenous inputs are bounded
STRENGTH = 10.0  # the power of the errors by which ways are weighted


@called
def standardized(off, variance):
    """A deviation of an exogenous input in standard deviations; that of a missing one is zero."""
    value = off / math.sqrt(variance) if variance > 0.0 else 0.0
    return 0.0 if math.isnan(value) else min(max(value, -CLIPPED), CLIPPED)


@called
def slow_rate(t):
    """The rate at row t of the moments of exogenous inputs."""
    return max(1.0 / 2048, 1.0 / (t + 1.0))


@called
def look(model, i, t, ahead):
    """Fill the inputs of the row `ahead` rows after row t, and their changes; row t is row i of the call."""
    x, periods, E = row.INPUTS(model), fixed.PERIODS(model), given.E(model)
    mean, variance, ring, d, squares = exogenous.views("MEAN VARIANCE RING CHANGES SQUARES", model)
    for c in range(x.size):
        x[c] = standardized(E[i + ahead, c] - mean[c], variance[c])
        if periods.size == 0:
            d[c] = x[c]
    for n in range(0 if ahead > 0 else 1 if t > 0 else len(ring)):  # before the first row all were those of the first
        for c in range(x.size):
            ring[(t + n) % len(ring), c] = mean[c] if math.isnan(E[i, c]) else E[i, c]
    for s in range(periods.size):
        since = ahead - math.floor(periods[s] + 0.5)
        for c in range(x.size):
            before = E[i + since, c] if since > 0 else ring[(t + since) % len(ring), c]
            change, k = E[i + ahead, c] - before, s * x.size + c
            if ahead == 0 and not math.isnan(change):
                squares[k] += slow_rate(t) * (change * change - squares[k])
            d[k] = standardized(change, squares[k])


@called
def explain(model, j, h, at, t, now):
    """What the inputs explain of series j at row t, beyond its forecast h + 1 rows before.

    That is at `at` of the ring; `now` is the place of row t in the lags. WAYS gets what each way says.
    """
    ways, weights, losses, d, W = exogenous.views("WAYS WEIGHTS LOSS CHANGES W", model)
    if ways.size == 0:
        return 0.0
    ways[0], ways[1] = 0.0, dot(W[j, h], d)
    if ways.size > 2:
        value, _ = last_value(model, j, h, 1, t, now)
        ways[2] = value + dot(W[j, size.horizon(model)], d) - shared.MADE(model)[at, j, h]
    weigh(losses[j, h], STRENGTH, 1e-300, 0.0, weights)
    return dot(weights, ways)


@called
def input_gains(model):
    """Update the covariance by the changes of the inputs of a row; returns the first of the coordinates restored."""
    d, gains, U, D, left, turn, unit = exogenous.views("CHANGES GAINS U D LEFT TURN UNIT", model)
    if d.size == 0:
        return -1
    return fill_gains(U, D, left, fixed.CHANGES_RIDGE(model), turn, INPUTS_FORGETTING, d, gains, unit)


@called
def learn_explained(model, j, h, first, t, e):
    """Let each way learn the error e of a forecast of series j at row t, which `explain` has just explained."""
    ways, losses, gains, W = exogenous.views("WAYS LOSS GAINS W", model)
    rate = max(1.0 - CHOICE, min(RISE / (t - h), 1.0))
    for k in range(ways.size):
        losses[j, h, k] += rate * (abs(e - ways[k]) - losses[j, h, k])
    learn_error(W[j, h], gains, first, e - ways[1])


@called
def learn_seasonal_changes(model, first, t, now):
    """Let the regressions of the change of a series over the first season learn row t."""
    ways, d, gains, W = exogenous.views("WAYS CHANGES GAINS W", model)
    z, there = row.views("Z THERE", model)
    season = math.floor(fixed.PERIODS(model)[0] + 0.5) if ways.size > 2 else t + 1
    for j in range(z.size if t >= season else 0):
        if there[j]:
            w, change = W[j, size.horizon(model)], z[j] - shared.LAGS(model)[j, now - season]
            learn_error(w, gains, first, change - dot(w, d))


@called
def follow_inputs(model, i, t):
    """Let the moments of the exogenous inputs learn those of row t."""
    mean, variance = exogenous.views("MEAN VARIANCE", model)
    e = given.E(model)[i]
    rate = slow_rate(t)
    for c in range(e.size):
        if not math.isnan(e[c]):
            off = e[c] - mean[c]
            mean[c] += rate * off
            variance[c] += rate * ((1.0 - rate) * off * off - variance[c])
