"""The choice among forecasts: stacks of heads and seasons, and naive forecasts.

Beside the mean of the heads, a stack combines it with what seasons predict: for each series and step a small head. The
last value and the last value of each season are naive forecasts, alone and with a drift; so is exponential smoothing
with a damped trend. The heads are used where their recent errors are significantly smaller than
those of the best naive forecast.
"""

from __future__ import annotations

import math

from sepsa.compiled.kernels import called
from sepsa.forecast.kernels.heads import RISE, dot, gains, learn_error
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
from sepsa.learner.arithmetic.robust import HUGE

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
def seasonal(periods, profile, h, phase, last, lags, now, ahead, off, x):
    """The inputs of the stack for step h + 1 of a series, beside the mean of the heads x[1].

    For each season: its last value and its mean at the row that is forecast, and how far the last value was from both
    a season ago. `now` is the row of the last value, `ahead` that of the forecast, in the lags; both have `phase`
    counted at the last value.
    """
    x[0] = 1.0
    for i in range(periods.size):
        period = periods[i]
        x[2 + 4 * i] = lags[ahead - back(period, h)] - last
        x[3 + 4 * i] = profile[i, int((phase + h + 1) % period)] - last
        x[4 + 4 * i] = off[i]
        x[5 + 4 * i] = last - lags[now - math.floor(period + 0.5)]


@called
def last_value(periods, lags, h, base, t, now, last):
    """The last value, or that of a season as soon as there is one, before row t by h + 1 steps, and how old it is."""
    lag = back(periods[base - 1], h) if base > 0 else 0
    return (lags[now - lag], lag) if 0 < lag <= t else (last, h + 1)


@called
def local_drift(periods, lags, h, t, now, last):
    """The mean change over the first season before the last value, h + 1 rows before row t."""
    span = math.floor(periods[0] + 0.5) if periods.size > 0 else TREND_ROWS
    return (last - lags[now - h - 1 - span]) / span if t - h - 1 >= span else 0.0


@called
def naive_forecasts(periods, lags, smoothed, h, t, now, last, out):
    """All naive forecasts of row t by h + 1 steps: last values, these with a local drift, and the smoothed one."""
    bases, drift = periods.size + 1, local_drift(periods, lags, h, t, now, last)
    for base in range(bases):
        value, rows = last_value(periods, lags, h, base, t, now, last)
        out[base], out[bases + base] = value, value + rows * drift
    out[2 * bases] = smoothed


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
def learn_stack(model, t, now):
    """Let the stacks learn row t."""
    periods, ridge = fixed.views("PERIODS STACK_RIDGE", model)
    z, there = row.views("Z THERE", model)
    heads, off, W, x, profile, gain, restored, U, D, left, turn, unit = stack.views(
        "HEADS OFF W X PROFILE GAIN RESTORED U D LEFT TURN UNIT", model
    )
    base, lags = shared.views("BASE LAGS", model)
    H, phase = size.horizon(model), shared.COUNTS(model).phase
    for h in range(min(t, H) if x.size > 0 else 0):
        at = (t - h - 1) % H
        for j in range(z.size):
            if not there[j]:
                continue
            last = base[at, j]
            x[1] = heads[at, j, h] - last
            seasonal(periods, profile[j], h, phase - h - 1, last, lags[j], now - h - 1, now, off[at, j], x)
            e = z[j] - heads[at, j, h] - dot(W[j, h], x)
            first = gains(U[j, h], D[j, h], left[j, h], ridge, turn[j, h], STACK_FORGETTING, x, gain, restored, unit)
            learn_error(W[j, h], gain, restored, first, e)


@called
def follow_candidates(model, t, now):
    """Count the errors of all candidates that have forecast row t."""
    periods = fixed.PERIODS(model)
    z, there, missing = row.views("Z THERE OFF", model)
    naive, typical, missed, known, leaders, heads, stacked, mixed, smoothed = stack.views(
        "NAIVE TYPICAL MISSED KNOWN LEADER HEADS STACKED MIXED SMOOTHED", model
    )
    base, lags = shared.views("BASE LAGS", model)
    H, bases = size.horizon(model), periods.size + 1
    for h in range(min(t, H)):
        at = (t - h - 1) % H
        rate = max(1.0 - CHOICE, min(RISE / (t - h), 1.0))
        soon = max(1.0 - RECENT, 1.0 / (t - h))
        for j in range(z.size):
            if not there[j]:
                continue
            value = z[j]
            naive_forecasts(periods, lags[j], smoothed[at, j, h], h, t, now, base[at, j], naive)
            off = value - naive[leaders[j, h]]
            typical[j, h] += soon * (off * off - typical[j, h])
            unit = math.sqrt(typical[j, h]) if typical[j, h] > 0.0 else 1.0
            others = (heads[at, j, h], stacked[at, j, h], value - missing[j, h])
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
    known[LEAD] += rate * (lead - known[LEAD])
    known[LEAD_SQUARE] += rate * (lead * lead - known[LEAD_SQUARE])
    known[GAIN] += soon * (gain - known[GAIN])
    known[GAIN_SQUARE] += soon * (gain * gain - known[GAIN_SQUARE])
    known[PRODUCT] += rate * (error * change - known[PRODUCT])
    known[CHANGE_SQUARE] += rate * (change * change - known[CHANGE_SQUARE])
    known[ERROR_SQUARE] += rate * (error * error - known[ERROR_SQUARE])


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
    periods, limits = fixed.views("PERIODS LIMITS", model)
    z = row.Z(model)
    x, W, missed, leaders, heads, stacked, mixed, profile, off, known, smoothed, naive = stack.views(
        "X W MISSED LEADER HEADS STACKED MIXED PROFILE OFF KNOWN SMOOTHED NAIVE", model
    )
    extent, made, lags, means, scale = shared.views("EXTENT MADE LAGS MEAN SCALE", model)
    H, phase, bases = size.horizon(model), shared.COUNTS(model).phase, periods.size + 1
    at = t % H
    heads, stacked, mixed, made = heads[at], stacked[at], mixed[at], made[at]
    for j in range(z.size):
        low, high = extent[0, j], extent[1, j]
        width, least, most = high - low, (limits[0] - means[j]) / scale[j], (limits[1] - means[j]) / scale[j]
        for h in range(H):
            mean = min(max(heads[j, h], low - width), high + width)
            heads[j, h] = mean
            stacked[j, h] = mean
            if x.size > 0:
                x[1] = mean - z[j]
                seasonal(periods, profile[j], h, phase, z[j], lags[j], now, now + h + 1, off[at, j], x)
                stacked[j, h] = min(max(mean + dot(W[j, h], x), low - width), high + width)
            a, b = missed[bases, j, h], missed[bases + 1, j, h]
            share = 0.5 if a == b else 1.0 / (1.0 + min((b / a if a > 0.0 else HUGE), 1e3) ** (2.0 * SHARPNESS))
            mixed[j, h] = mean + share * (stacked[j, h] - mean)
            share, own = share_of_rows(1.0 - CHOICE, RISE, t - h, h), known[j, h]
            leader = follow_leader(own, leaders[j, h], leaders[j, h - 1] if h > 0 else -1, share, SURE)
            naive_forecasts(periods, lags[j], smoothed[at, j, h], h, t + h + 1, now + h + 1, z[j], naive)
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
