"""The choice among forecasts: stacks of heads and seasons, and naive forecasts.

Beside the mean of the heads, a stack combines it with what seasons predict: for each series and step a small head. The
last value and the last value of each season are naive forecasts, alone and with a drift; so is exponential smoothing
with a damped trend. The heads are used where their recent errors are significantly smaller than
those of the best naive forecast.
"""

from __future__ import annotations

import math

from sepsa.compiled.kernels import called
from sepsa.forecast.kernels.heads import RISE, dot, fill_gains, learn_error
from sepsa.forecast.kernels.parts import (
    CHANGE_SQUARE,
    CHOICE,
    ERROR_SQUARE,
    GAIN,
    GAIN_SQUARE,
    LEAD,
    LEAD_SQUARE,
    PRODUCT,
    SHARPNESS,
    STACK_FORGETTING,
    TREND_ROWS,
    fixed,
    row,
    shared,
    size,
    stack,
)
from sepsa.learner.arithmetic import candidates
from sepsa.learner.arithmetic.weigh import weigh

LEVEL, SLOPE = range(2)  # in TREND
SURE = 1.5  # standard errors from which heads, or another naive forecast, beat the naive forecast in use
GUARD = 3.0  # standard errors by which the latest absolute errors of heads may be larger
RECENT = 0.99  # discount of the errors by which forecasts are bounded and intervals scaled
# Of smoothing: the level is nearly the last value, and the slope half of its last change, damped over twenty rows.
TO_LEVEL, TO_SLOPE, DAMPING = 0.95, 0.5, 0.95
LARGEST = 10.0  # typical errors, to which those of candidates are bounded: an outlier decides no choice
QUICKEST = 0.15  # least rate of the means of a season's rows: the last ten or so count

exceeds = called(candidates.exceeds)


@called
def back(period, h):
    """How many rows before the row of step h + 1 the last known row at the same place of the season lies."""
    k = math.ceil((h + 1) / period - 1e-9)
    lag = math.floor(k * period + 0.5)
    return lag if lag >= h + 1 else math.floor((k + 1) * period + 0.5)


@called
def gather_stack(model, j, h, at, phase, now):
    """Fill the inputs X of the stack for step h + 1 of series j: a bias, the mean of the heads, four of each season.

    These are its last value and its mean at the row that is forecast, and how far the last value was from both a season
    ago. `at`, `phase` and `now` are of the row of the last value: in the rings, in the seasons and in the lags.
    """
    periods, lags = fixed.PERIODS(model), shared.LAGS(model)[j]
    last = lags[now]
    x, heads, profile, off = stack.views("X HEADS PROFILE OFF", model)
    x[0], x[1] = 1.0, heads[at, j, h] - last
    for i in range(periods.size):
        period = periods[i]
        x[2 + 4 * i] = lags[now + h + 1 - back(period, h)] - last
        x[3 + 4 * i] = profile[j, i, int((phase + h + 1) % period)] - last
        x[4 + 4 * i] = off[at, j, i]
        x[5 + 4 * i] = last - lags[now - math.floor(period + 0.5)]


@called
def last_value(model, j, h, base, t, now):
    """The last value, or that of a season as soon as there is one, before row t by h + 1 steps, and how old it is."""
    lag = back(fixed.PERIODS(model)[base - 1], h) if base > 0 else h + 1
    lag = lag if lag <= t else h + 1
    return shared.LAGS(model)[j, now - lag], lag


@called
def naive_forecasts(model, j, h, at, t, now):
    """Fill NAIVE with forecasts of row t by h + 1 steps: last values, these with a local drift, and the smoothed one.

    The drift is the mean change over the first season before the last value. Smoothed ones are at `at` of the ring.
    """
    lags, periods, out = shared.LAGS(model)[j], fixed.PERIODS(model), stack.NAIVE(model)
    span, bases, drift = math.floor(periods[0] + 0.5) if periods.size > 0 else TREND_ROWS, periods.size + 1, 0.0
    if t - h - 1 >= span:
        drift = (lags[now - h - 1] - lags[now - h - 1 - span]) / span
    for base in range(bases):
        value, rows = last_value(model, j, h, base, t, now)
        out[base], out[bases + base] = value, value + rows * drift
    out[2 * bases] = stack.SMOOTHED(model)[at, j, h]


@called
def smooth(model, t):
    """Let smoothing of a level and a damped slope learn row t, and fill its forecasts, within the bounds of the heads.

    A missing value is the forecast of it: over a gap a trend alone would grow without bounds.
    """
    z, trend, extent, H = row.Z(model), stack.TREND(model), shared.EXTENT(model), size.horizon(model)
    smoothed = stack.SMOOTHED(model)[t % H]
    for j in range(z.size):
        if t == 0:
            trend[j, LEVEL] = z[j]
        trend[j, SLOPE] *= DAMPING
        trend[j, LEVEL] += trend[j, SLOPE]
        e = z[j] - trend[j, LEVEL]
        trend[j, LEVEL] += TO_LEVEL * e
        trend[j, SLOPE] += TO_LEVEL * TO_SLOPE * e
        low, high = 2.0 * extent[0, j] - extent[1, j], 2.0 * extent[1, j] - extent[0, j]
        slope, made = trend[j, SLOPE], trend[j, LEVEL]
        for h in range(H):
            slope *= DAMPING
            made += slope
            smoothed[j, h] = min(max(made, low), high)


@called
def learn_stack(model, j, h, at, now):
    """Let the stack of step h + 1 learn the value of series j, whose forecast is at `at` of the rings."""
    heads, W, x, gains, U, D, left, turn, unit = stack.views("HEADS W X GAINS U D LEFT TURN UNIT", model)
    if x.size > 0:
        gather_stack(model, j, h, at, shared.COUNTS(model).phase - h - 1, now - h - 1)
        e, ridge = row.Z(model)[j] - heads[at, j, h] - dot(W[j, h], x), fixed.STACK_RIDGE(model)
        first = fill_gains(U[j, h], D[j, h], left[j, h], ridge, turn[j, h], STACK_FORGETTING, x, gains, unit)
        learn_error(W[j, h], gains, first, e)


@called
def follow_candidates(model, j, h, at, t, now, e):
    """Count the errors of all candidates that have forecast the value of series j at row t, h + 1 rows before.

    `e` is that of the forecast.
    """
    naive, typical, missed, known, leaders, heads, stacked, mixed = stack.views(
        "NAIVE TYPICAL MISSED KNOWN LEADER HEADS STACKED MIXED", model
    )
    value, bases = row.Z(model)[j], size.seasons(model) + 1
    rate, soon = max(1.0 - CHOICE, min(RISE / (t - h), 1.0)), max(1.0 - RECENT, 1.0 / (t - h))
    naive_forecasts(model, j, h, at, t, now)
    off = value - naive[leaders[j, h]]
    typical[j, h] += soon * (off * off - typical[j, h])
    unit = math.sqrt(typical[j, h]) if typical[j, h] > 0.0 else 1.0
    others = (heads[at, j, h], stacked[at, j, h], value - e)
    for i in range(bases + 3):
        made = naive[i] if i < bases else others[i - bases]
        missed[i, j, h] += rate * (min(abs(value - made) / unit, LARGEST) - missed[i, j, h])
    leading = min(abs(off) / unit, LARGEST)
    for i in range(naive.size):
        error, change = (value - naive[i]) / unit, (mixed[at, j, h] - naive[i]) / unit
        error, change = min(max(error, -LARGEST), LARGEST), min(max(change, -LARGEST), LARGEST)
        follow_naive(known[j, h, i], error, change, leading, rate, soon)


@called
def follow_naive(known, error, change, leading, rate, soon):
    """Let what is known of a naive forecast learn its error, its distance from the heads, and the leader's error."""
    lead, gain = leading - abs(error), abs(error) - abs(error - change)
    found = (lead, lead * lead, gain, gain * gain, error * change, change * change, error * error)
    for i in range(len(found)):  # in the order of KNOWN
        known[i] += (soon if GAIN <= i <= GAIN_SQUARE else rate) * (found[i] - known[i])


@called
def share_of_rows(rate, first, rows, h):
    """The share that one error of h + 1 rows ahead has in a recent mean whose rate was `first` over the rows at first.

    Errors k rows apart overlap, so that they are correlated by 1 - k / (h + 1), and their sizes by about the square of
    that: the variance of the mean is larger by the sum of these squares.
    """
    steps = 1.0 + h
    overlap = (2.0 * steps * steps + 1.0) / (3.0 * steps)
    return max(rate / (2.0 - rate), first * first / (2.0 * first - 1.0) / max(rows, 1)) * overlap


@called
def follow_leader(known, leader, near, share, least):
    """The naive forecast to use: another than `leader` where its errors were smaller by `least` standard errors.

    Half of these are enough for `near`, which the step before uses.
    """
    best, found = 0.0, leader
    for i in range(len(known)):
        gain, square = known[i, LEAD], known[i, LEAD_SQUARE]
        certainty = 0.5 * least if i == near else least
        if gain > best and exceeds(gain, square, share, max(1.0 - share, 0.0), certainty):
            best, found = gain, i
    if found != leader:
        square = known[found, LEAD_SQUARE]
        for i in range(len(known)):
            known[i, LEAD] -= best
            known[i, LEAD_SQUARE] += square
        known[found, LEAD_SQUARE] = 0.0
    return found


@called
def trust(known, share, latest):
    """How far a forecast goes from the naive one towards the mean of heads and stack, in [0, 1].

    As far as the regression of the naive errors on such changes says, and one standard error farther, where that is
    significant: from SURE standard errors on, fully from one more on. Not at all where the latest absolute errors
    are larger, by GUARD standard errors. A mean over rows counts one of them with `share`, that of the latest errors
    with `latest`.
    """
    together, change, error = known[PRODUCT], known[CHANGE_SQUARE], known[ERROR_SQUARE]
    if together <= 0.0 or change <= 0.0:
        return 0.0
    slope = together / change
    rest = max(error - slope * together, 1e-9 * error + 1e-300)
    sure = math.sqrt(slope * together / (rest * share)) - SURE
    worse = known[GAIN] / math.sqrt(known[GAIN_SQUARE] * latest + 1e-300) + GUARD
    towards = min(slope + math.sqrt(rest * share / change), 1.0)
    return towards * min(max(sure, 0.0), 1.0) * min(max(worse, 0.0), 1.0)


@called
def choose(model, t, now):
    """The forecasts of row t: the mean of heads and stack, as far as it has been better than the best naive one.

    They lie within the bounds of the series.
    """
    limits = fixed.LIMITS(model)
    x, W, missed, leaders, heads, stacked, mixed, known, naive, weights = stack.views(
        "X W MISSED LEADER HEADS STACKED MIXED KNOWN NAIVE WEIGHTS", model
    )
    extent, made, means, scale = shared.views("EXTENT MADE MEAN SCALE", model)
    H, phase, bases = size.horizon(model), shared.COUNTS(model).phase, size.seasons(model) + 1
    at = t % H
    heads, stacked, mixed, made = heads[at], stacked[at], mixed[at], made[at]
    for j in range(size.series(model)):
        low, high = extent[0, j], extent[1, j]
        width, least, most = high - low, (limits[0] - means[j]) / scale[j], (limits[1] - means[j]) / scale[j]
        for h in range(H):
            mean = min(max(heads[j, h], low - width), high + width)
            heads[j, h] = mean
            stacked[j, h] = mean
            if x.size > 0:
                gather_stack(model, j, h, at, phase, now)
                stacked[j, h] = min(max(mean + dot(W[j, h], x), low - width), high + width)
            weigh(missed[bases : bases + 2, j, h], 2.0 * SHARPNESS, 1e-300, 0.0, weights)
            mixed[j, h] = mean + weights[1] * (stacked[j, h] - mean)
            share, own = share_of_rows(1.0 - CHOICE, RISE, t - h, h), known[j, h]
            leader = follow_leader(own, leaders[j, h], leaders[j, h - 1] if h > 0 else -1, share, SURE)
            naive_forecasts(model, j, h, at, t + h + 1, now + h + 1)
            usual = naive[leader]
            leaders[j, h] = leader
            latest = share_of_rows(1.0 - RECENT, 1.0, t - h, h)
            far = trust(own[leader], share, latest)
            made[j, h] = min(max(usual + far * (mixed[j, h] - usual), least), most)


@called
def follow_seasons(model, t):
    """Let the means of the rows of each season learn row t."""
    periods = fixed.PERIODS(model)
    z, there = row.views("Z THERE", model)
    off, profile = stack.views("OFF PROFILE", model)
    phase = shared.COUNTS(model).phase
    off = off[t % size.horizon(model)]
    for j in range(z.size):
        for i in range(periods.size):
            slot = int(phase % periods[i])
            if t < periods[i]:
                profile[j, i, slot] = z[j]
            off[j, i] = z[j] - profile[j, i, slot]
            if there[j]:
                rate = max(QUICKEST, 1.0 / (1.0 + t // periods[i]))
                profile[j, i, slot] += rate * (z[j] - profile[j, i, slot])
