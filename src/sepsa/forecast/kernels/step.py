"""The step of a forecaster: accept a row, judge the forecasts of it, let all heads learn it, choose new forecasts."""

from __future__ import annotations

import math

from sepsa.compiled.kernels import called, kernel
from sepsa.forecast.kernels.choice import RECENT, choose, follow_candidates, follow_seasons, learn_stack, smooth
from sepsa.forecast.kernels.explain import (
    explain,
    follow_inputs,
    input_gains,
    learn_explained,
    learn_seasonal_changes,
    look,
)
from sepsa.forecast.kernels.heads import FIRST_ROWS, fill, forecast_by_heads, learn_inputs, learn_target
from sepsa.forecast.kernels.parts import LEVELS, MOVES, fixed, given, row, shared, size, stack

FAR_ERRORS = 30.0  # typical errors of step 1 beyond which a value is implausible
LEAST_ERROR = 0.01  # typical error that is presumed, in standard deviations
LARGEST_JUMP = 100.0  # standard deviations up to which a jump is learned, beyond which it is a new level
PATIENCE = 3  # implausible values in a row after which the level has changed
LARGEST_VALUE = 1e6  # to which standardized values of the first rows are bounded
OVERLAP = 12.0  # steps ahead from which the size of errors is remembered in proportion to the step
PHASE_RATE = 0.02  # of the sizes of errors by place in a season


@called
def phase_of(model, ahead):
    """The place in the first season of the row so many rows after this one; 0 without a season."""
    periods = fixed.PERIODS(model)
    return int((shared.COUNTS(model).phase + ahead) % periods[0]) if periods.size > 0 else 0


@called
def ratio(a, b):
    """a / b, or 0 where b is."""
    return a / b if b != 0.0 else 0.0


@called
def accept(model, i, t, now):
    """Standardize the values of row t; missing and implausible ones are replaced by the forecast, not learned.

    A value that agrees with an implausible one just before it is accepted, and so is the next after a few of them.
    Where it lies far outside of what was usual, the level has changed: then the mean moves, and the value after it is
    near. An event that comes again at its place of the first season, at half to twice the size, is no outlier. In a
    series whose implausible values were mostly confirmed by the next ones, the first is the last value at once, though
    no head learns it.
    """
    z, there = row.views("Z THERE", model)
    made, mean, scale, extent, reach, strange, odd, event, began = shared.views(
        "MADE MEAN SCALE EXTENT REACH STRANGE ODD EVENT BEGAN", model
    )
    slot, at = phase_of(model, 0), (t - 1) % size.horizon(model)
    y, counts = given.Y(model)[i], shared.COUNTS(model)
    in_a_row, confirmed = odd[0], odd[1]
    for j in range(y.size):
        guess = made[at, j, 0] + explain(model, j, 0, at, t, now)
        there[j], followed = not math.isnan(y[j]), False
        if there[j]:
            if began[j] >= 0 and extent[0, j] == 0.0 == extent[1, j] and y[j] != mean[j]:
                scale[j] = abs(y[j] - mean[j])  # the first value of a series that was constant
            z[j] = (y[j] - mean[j]) / scale[j]
            off, far = z[j] - guess, FAR_ERRORS * max(reach[j], LEAST_ERROR)
            near, agrees = abs(off) <= LARGEST_JUMP, in_a_row[j] > 0 and abs(z[j] - strange[j]) <= far
            if in_a_row[j] == 1:
                confirmed[j] = min(max(confirmed[j] + (1 if agrees else -1), -PATIENCE), PATIENCE)
            if t < FIRST_ROWS:
                z[j] = min(max(z[j], -LARGEST_VALUE), LARGEST_VALUE)
            elif reach[j] == 0.0 or abs(off) <= far:
                in_a_row[j] = 0
            elif near and 0.5 <= ratio(off, event[j, slot]) <= 2.0:
                in_a_row[j], far = 0, 0.0
                event[j, slot] = off
            else:
                counts.outliers += 1
                event[j, slot] = off
                in_a_row[j] += 1
                strange[j] = z[j]
                believed, sure = agrees or in_a_row[j] > PATIENCE, confirmed[j] > 0 and abs(off) <= LARGEST_VALUE
                there[j], followed = believed and near, sure and near
                if in_a_row[j] > 1 and not agrees:
                    reach[j] *= 3.0  # a second in a row: errors are larger than they were
                if (believed or sure) and not near:
                    mean[j] += off * scale[j]
                    in_a_row[j], strange[j] = 0 if believed else 1, guess
            if there[j] and far > 0.0:
                rate = max(1.0 - RECENT, 1.0 / (t + 1))
                reach[j] = math.sqrt(reach[j] ** 2 + rate * (off * off - reach[j] ** 2))
        if there[j]:
            began[j] = t if began[j] < 0 else began[j]
            extent[0, j], extent[1, j] = min(extent[0, j], z[j]), max(extent[1, j], z[j])
        elif not followed:
            z[j] = min(max(guess, extent[0, j]), extent[1, j])


@called
def follow_quantiles(quantiles, ends, share, e):
    """Move the quantiles of the errors of a step by the error e of a forecast, which had these ends beside it.

    A quantile moves as its level would by a fixed rate, if errors were normal: the farther out, the farther. Whatever
    comes, the share of errors above an end differs from its level by at most its range over its step times rows. Errors
    of far steps overlap, so that each of them moves `share` of it.
    """
    if ends[0] == ends[-1]:
        return
    for v in range(len(LEVELS)):
        quantiles[v] += MOVES[v] * share * (LEVELS[v] if e > ends[v] else LEVELS[v] - 1.0)
    for v in range(1, len(LEVELS)):
        quantiles[v] = max(quantiles[v], quantiles[v - 1])


@called
def judge(model, j, h, at, first, t, now):
    """Learn the error of the forecast of series j at row t, h + 1 rows before, and what exogenous inputs explain of it.

    Its size and quantiles learn; not where the forecast was made before the first value of its series. Returns the
    error of what was told, with or without what the inputs explain.
    """
    made, ends, began, judged, typical, quantiles, by_phase = shared.views(
        "MADE ENDS BEGAN JUDGED SIZE QUANTILES BY_PHASE", model
    )
    e, kinds = row.Z(model)[j] - made[at, j, h], size.kinds(model)
    known, explained, slot = given.CALL(model).ahead > 0 and kinds > 1, e, phase_of(model, 0)
    if kinds > 1:
        explained -= explain(model, j, h, at, t, now)
        learn_explained(model, j, h, first, t, e)
    before = t - h - 1 < began[j]
    judged[j, h] += 0 if before else 1
    far, share = (1.0 - RECENT) / (1.0 + h / OVERLAP), 1.0 / math.sqrt(1.0 + h)
    for kind in range(0 if before else kinds):
        off = explained if kind else e
        follow_quantiles(quantiles[kind, :, j, h], ends[at, kind, :, j, h], share, off)
        if kind == known and size.seasons(model) > 0:
            size_here = ratio(abs(off), typical[kind, j, h])
            by_phase[j, slot] += PHASE_RATE / min(t, size.horizon(model)) * (size_here - by_phase[j, slot])
        typical[kind, j, h] += max(far, 1.0 / judged[j, h]) * (abs(off) - typical[kind, j, h])
    return explained if known else e


@called
def issue(model, t):
    """Store the quantiles of the errors of the forecasts that are made after row t."""
    quantiles, ends, typical, by_phase = shared.views("QUANTILES ENDS SIZE BY_PHASE", model)
    kinds, levels, series, H = quantiles.shape
    for j in range(series):
        for h in range(H):
            spread = min(max(by_phase[j, phase_of(model, h + 1)], 0.1), 10.0)
            for kind in range(kinds):
                for v in range(levels):
                    ends[t % H, kind, v, j, h] = quantiles[kind, v, j, h] * typical[kind, j, h] * spread


@called
def tell(model, i, t, now):
    """Fill the rows of OUT for row i with the forecasts made after row t, their quantiles and numbers of errors.

    They use what the inputs known ahead explain. A series of which no value is known has no forecast.
    """
    limits, call, out = fixed.LIMITS(model), given.CALL(model), given.OUT(model)
    began, judged, made, ends, mean, scale = shared.views("BEGAN JUDGED MADE ENDS MEAN SCALE", model)
    at, first = t % size.horizon(model), max(i, 0) * call.tell
    for h in range(size.horizon(model)):
        explained = i + 1 + h < call.ahead and size.kinds(model) > 1
        if explained:
            look(model, i, t, h + 1)
        for j in range(size.series(model)):
            center, kind = made[at, j, h], 0
            if explained:
                center, kind = center + explain(model, j, h, at, t + h + 1, now + h + 1), 1
            told = min(max(mean[j] + scale[j] * center, limits[0]), limits[1])
            out[first, j, h] = told if began[j] >= 0 else math.nan
            if call.tell > 1:
                for v in range(len(LEVELS)):
                    end = mean[j] + scale[j] * (center + ends[at, kind, v, j, h])
                    out[first + 1 + v, j, h] = min(max(end, limits[0]), limits[1])
                out[first + 1 + len(LEVELS), j, h] = judged[j, h]


@called
def remember(model, t, now):
    """Store the values of row t; before the first row all lags are those of the first."""
    z, profile, lags, n = row.Z(model), stack.PROFILE(model), shared.LAGS(model), size.recent(model)
    for j in range(z.size):
        if t == 0:
            fill(lags[j], z[j])
            for season in range(size.seasons(model)):
                fill(profile[j, season], z[j])
        lags[j, now] = lags[j, now - n] = z[j]


@kernel
def learn(model, rows):
    """Learn rows Y with exogenous inputs E in order; OUT gets what is told after each."""
    there, counts = row.THERE(model), shared.COUNTS(model)
    n, H = size.recent(model), size.horizon(model)
    for i in range(rows):
        t = counts.rows
        now = n + t % n
        look(model, i, t, 0)
        accept(model, i, t, now)
        first = input_gains(model)
        for h in range(min(t, H)):
            at = (t - h - 1) % H  # the forecasts of row t by h + 1 steps in the rings
            for j in range(there.size):
                if there[j]:
                    e = judge(model, j, h, at, first, t, now)
                    learn_target(model, j, h, at, t, now)
                    learn_stack(model, j, h, at, now)
                    follow_candidates(model, j, h, at, t, now, e)
        learn_seasonal_changes(model, first, t, now)
        remember(model, t, now)
        smooth(model, t)
        follow_seasons(model, t)
        learn_inputs(model, t, now)
        forecast_by_heads(model, t)
        choose(model, t, now)
        issue(model, t)
        if given.CALL(model).tell > 0:
            tell(model, i, t, now)
        follow_inputs(model, i, t)
        counts.rows += 1
        counts.phase += 1
    return rows


@kernel
def forecast(model, rows):
    """Fill OUT with what is told after the last row; E are the rows ahead."""
    n, t = size.recent(model), shared.COUNTS(model).rows - 1
    tell(model, -1, t, n + t % n)
    return rows
