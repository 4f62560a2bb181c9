"""Exponential smoothing: of a level and a slope at fixed rates, and with a season at rates that follow the data.

The state of the second, a level l, a slope b and the season's s, learns the error e of its forecast m by rates α, β, γ:

    m = l + φb + s,  e = y - m,  l <- l + φb + αe,  b <- φb + αβe,  s <- s + γ(1 - α)e

It is linear in past errors, so that its derivatives by the log-odds of the rates, three columns beside it, follow the
same recursion with -∂m for e, and e times the derivatives of α, αβ and γ(1 - α) is added. The log-odds minimise the
squares of e and a prior at the first rates by a Gauss-Newton step a row: recursive least squares on ∂m.
"""

from __future__ import annotations

import math

from sepsa.stream.forecast.kernels.parts import fixed, row, shared, size, stack
from sepsa.stream.kernels.compilation import called
from sepsa.stream.kernels.head import rank_one

LEVEL, SLOPE, INDEX = range(3)  # rows of the state; those from INDEX on are the season's
DAMPING = 0.98  # of the slope beside a season, a row


@called
def smooth(model, t, now):
    """Let exponential smoothing learn row t, and fill its forecasts, within the bounds of those of the heads.

    A missing value is the forecast of it: over a gap a trend alone would grow without bounds.
    """
    z, trend, extent, H = row.Z(model), stack.TREND(model), shared.EXTENT(model), size.horizon(model)
    smoothed = stack.SMOOTHED(model)[t % H]
    to_level, to_slope = 0.95, 0.2
    for j in range(z.size):
        if t == 0:
            trend[j, LEVEL] = z[j]
        trend[j, LEVEL] += trend[j, SLOPE]
        e = z[j] - trend[j, LEVEL]
        trend[j, LEVEL] += to_level * e
        trend[j, SLOPE] += to_level * to_slope * e
        for h in range(H):
            smoothed[j, h, 0] = trend[j, LEVEL] + (h + 1) * trend[j, SLOPE]
        if smoothed.shape[2] > 1:
            smooth_season(model, j, t, now)
        low, high = 2.0 * extent[0, j] - extent[1, j], 2.0 * extent[1, j] - extent[0, j]
        for h in range(H):
            for i in range(smoothed.shape[2]):
                smoothed[j, h, i] = min(max(smoothed[j, h, i], low), high)


@called
def smooth_season(model, j, t, now):
    """Let smoothing with a season learn row t of series j; before two seasons its forecast is the last value."""
    z, there = row.views("Z THERE", model)
    state, odds, smoothed = stack.views("SEASON ODDS SMOOTHED", model)
    state, phase, H = state[j], shared.COUNTS(model).phase, size.horizon(model)
    period = fixed.PERIODS(model)[0]
    span = math.floor(period + 0.5)
    if t < 2 * span:
        state[LEVEL, 0] = z[j]
    else:
        if t == 2 * span:
            start(state, stack.PROFILE(model)[j, 0], shared.LAGS(model)[j], now - span, period, phase - span)
        slot = INDEX + int(phase % period)
        e = learn(state, state[slot], odds[j], z[j], row.SLOPES(model))
        if there[j]:
            learn_rates(model, j, e, t - 2 * span)
    ahead, damped = 0.0, 1.0
    for h in range(H):
        damped *= DAMPING
        ahead += damped
        season = state[INDEX + int((phase + h + 1) % period), 0]
        smoothed[t % H, j, h, 1] = state[LEVEL, 0] + ahead * state[SLOPE, 0] + season


@called
def start(state, profile, lags, first, period, phase):
    """Begin with the trend and the season of two seasons: their mean by slots, and the rows of the second from `first`.

    `phase` is that of the first of these rows. The profile is the mean of both seasons, so that half of what the second
    one lies above it is half of a season's trend.
    """
    span = math.floor(period + 0.5)
    mean, rise = 0.0, 0.0
    for k in range(span):
        usual = profile[int((phase + k) % period)]
        mean += usual / span
        rise += 2.0 * (lags[first + k] - usual) / span
    for k in range(profile.size):
        state[INDEX + k, 0] = profile[k] - mean
    for k in range(span):
        state[INDEX + int((phase + k) % period), 0] -= rise / span * (k - 0.5 * (span - 1))
    state[LEVEL, 0], state[SLOPE, 0] = mean + rise * (1.0 - 0.5 / span), rise / span


@called
def learn(state, season, odds, value, slopes):
    """Let a state, and the row of it that is the season's of this value, learn the value; returns the error.

    Fills the derivatives of the forecast by the log-odds of the rates.
    """
    level, slope = state[LEVEL], state[SLOPE]
    a, b, c = rate(odds[0]), rate(odds[1]), rate(odds[2])
    error = value
    for i in range(4):
        slope[i] *= DAMPING
        level[i] += slope[i]
        forecast = level[i] + season[i]
        e = (value if i == 0 else 0.0) - forecast
        level[i] += a * e
        slope[i] += a * b * e
        season[i] += c * (1.0 - a) * e
        if i == 0:
            error = e
        else:
            slopes[i - 1] = forecast
    by_a = a * (1.0 - a) * error
    level[1] += by_a
    slope[1] += b * by_a
    slope[2] += a * b * (1.0 - b) * error
    season[1] -= c * by_a
    season[3] += c * (1.0 - c) * (1.0 - a) * error
    return error


@called
def rate(odds):
    """The rate of these log-odds."""
    return 1.0 / (1.0 + math.exp(-odds))


@called
def learn_rates(model, j, error, rows):
    """Let the rates of series j, which have learned so many rows, learn an error by the derivatives of its forecast."""
    slopes, gain = row.views("SLOPES ODDS_GAIN", model)
    odds, U, D, variance = stack.views("ODDS ODDS_U ODDS_D VARIANCE", model)
    most, farthest = 3.0, 7.0  # standard deviations of an error, and log-odds
    square, before = error * error, variance[j]
    if before > 0.0:
        square = before + max(0.02, 1.0 / (rows + 1)) * (min(square, most * most * before) - before)
    variance[j], deviation = square, math.sqrt(square)
    if deviation > 0.0:
        for i in range(slopes.size):
            slopes[i] /= deviation
        total = rank_one(U[j], D[j], slopes, 0, 1.0, gain)
        for i in range(slopes.size):
            odds[j, i] += gain[i] / total * min(max(error / deviation, -most), most)
            odds[j, i] = min(max(odds[j, i], -farthest), farthest)
