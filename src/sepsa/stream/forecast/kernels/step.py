"""The compiled kernel of the forecaster: heads that learn every step of a horizon when its value comes, and a choice.

At row s the inputs x of every head are known, and the target of step h only at row s + h. The covariance B = UDUᵀ of a
head depends on inputs alone, so that its gain k = Bx / (λ + xᵀBx) is computed once, at row s, and kept for H rows; the
weights of step h learn by w += k (y - wᵀx) when row s + h comes. Step h thus has the weights of recursive least squares
on all pairs known by now, for one covariance for all steps. Forgotten ridge is restored by the rule of
`heads.math.ridge`, by further gains that are kept beside the first.

Beside the mean of the heads, `stack` combines it with what seasons predict: for each series and step a small head.
The last value and the last value of each season are naive forecasts; the heads are used where their recent errors are
significantly smaller than those of the best naive forecast.
"""

from __future__ import annotations

import math

import numpy as np

from sepsa.stream.forecast.kernels.arrays import (
    C_OUTLIERS,
    C_PHASE,
    C_ROWS,
    C_SHIFTS,
    CHANGE,
    FIRST,
    dot,
    fill,
    gains,
    scratch,
)  # fmt: skip
from sepsa.stream.kernels.compilation import called, compiled
from sepsa.stream.kernels.robust import HUGE

FAR = 30.0  # typical errors of step 1 beyond which a value is implausible
LEAST = 0.01  # typical error that is presumed, in standard deviations
USUAL = 100.0  # standard deviations up to which a jump is learned, beyond which it is a new level
PATIENCE = 3  # implausible values in a row after which the level has changed
LARGEST = 1e6  # to which standardized values of the first rows are bounded
UNUSUAL = 8.0  # standard deviations to which exogenous inputs are bounded
RECENT = 0.99  # discount of the errors by which forecasts are bounded and intervals scaled
SLOW = 1.0 / 512  # rate of the level and the spread of a series
EXOGENOUS_RATE = 1.0 / 2048  # of the moments of exogenous inputs
STEP = 0.04  # of the quantiles of errors, in mean absolute errors
PROFILE = 0.15  # rate of the mean of each row of a season
O_DISCOUNT, O_SHARPNESS, O_EXOGENOUS, O_STACK, O_CHOICE, O_SURE, O_GUARD, O_LEAD, O_STRETCH = range(9)
K_LEAD, K_LEAD2, K_GAIN, K_GAIN2, K_PRODUCT, K_CHANGE2, K_ERROR2 = range(7)
LARGE = 10.0  # typical errors to which those of candidates are bounded


@called
def learn_error(w, k, R, c, e):
    """Let weights learn the error e by the gain k, then restore the ridge of the coordinates from c on by R."""
    for n in range(w.size):
        w[n] += k[n] * e
    if c >= 0:
        for i in range(R.shape[0]):
            old = w[(c + i) % w.size]
            for n in range(w.size):
                w[n] -= R[i, n] * old


@called
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
                    loss = f.loss[v, g, i, h]
                    square = e * e if loss == 0.0 or t < FIRST + h else min(e * e, 100.0 * loss)
                    f.loss[v, g, i, h] += rate * (square - loss)
                    learn_error(w, f.K[at, v, g], f.R[at, v, g], f.C[at, v, g], e)


@called
def learn_inputs(f, lags, now, common, there, t, H):
    """Gather the inputs of row t and compute the gains of every head; a group whose series are missing learns none."""
    at, d = t % H, f.terms.shape[1]
    unit = np.zeros(f.ridge.size)
    for g in range(f.series.shape[0]):
        x = f.X[at, g]
        for n in range(d):
            a, i, b, j, u = f.terms[g, n]
            x[n] = lags[a, now - i]
            if j >= 0:
                x[n] -= lags[b, now - j]
            if u >= 0:
                x[n] *= common[u]
        for n in range(common.size):
            x[d + n] = common[n]
        observed = False
        for i in range(f.series.shape[1]):
            observed |= there[f.series[g, i]]
        for v in range(f.forgetting.size):
            k, R = f.K[at, v, g], f.R[at, v, g]
            if observed:
                f.C[at, v, g] = gains(
                    f.U[v, g], f.D[v, g], f.left[v, g], f.ridge, f.turn[v, g], f.forgetting[v], x, k, R, unit
                )
            else:
                fill(k, 0.0)
                f.C[at, v, g] = -1


@called
def best_losses(f, best):
    """Lower `best` (m, H) to the least loss of a head of this family."""
    for v in range(f.W.shape[0]):
        for g in range(f.W.shape[1]):
            for i in range(f.series.shape[1]):
                for h in range(best.shape[1]):
                    best[f.series[g, i], h] = min(best[f.series[g, i], h], f.loss[v, g, i, h])


@called
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


@called
def accept(s, y, x, t, H, z, there):
    """Standardize the values y (m,) of row t; missing and implausible ones are replaced by the forecast, not learned.

    A value that agrees with an implausible one just before it is accepted, and so is the next after PATIENCE of them.
    Where it lies far outside of what was usual, the level has changed: then the mean moves, and the value after it is
    near. In a series whose implausible values were mostly confirmed by the next ones, the first is the last value at
    once, though no head learns it.
    """
    for j in range(y.size):
        guess = s.made[(t - 1) % H, j, 0] + dot(s.XW[j, 0], x) if t > 0 else 0.0
        there[j], followed = not math.isnan(y[j]), False
        if there[j]:
            z[j] = (y[j] - s.mean[j]) / s.scale[j]
            off, far = z[j] - guess, FAR * max(s.reach[j], LEAST)
            agrees = s.odd[0, j] > 0 and abs(z[j] - s.strange[j]) <= far
            if s.odd[0, j] == 1:
                s.odd[1, j] = min(max(s.odd[1, j] + (1 if agrees else -1), -PATIENCE), PATIENCE)
            if t < FIRST:
                z[j] = min(max(z[j], -LARGEST), LARGEST)
            elif s.reach[j] > 0.0 and abs(off) > far:
                s.counts[C_OUTLIERS] += 1
                s.odd[0, j] += 1
                s.strange[j] = z[j]
                believed, sure = agrees or s.odd[0, j] > PATIENCE, s.odd[1, j] > 0 and abs(off) <= LARGEST
                there[j], followed = believed and abs(off) <= USUAL, sure and abs(off) <= USUAL
                if s.odd[0, j] > 1 and not agrees:
                    s.reach[j] *= 3.0  # a second in a row: errors are larger than they were
                if (believed or sure) and abs(off) > USUAL:
                    s.mean[j] += off * s.scale[j]
                    s.counts[C_SHIFTS] += 1
                    s.odd[0, j], s.strange[j] = 0 if believed else 1, guess
            else:
                s.odd[0, j] = 0
            if there[j]:
                rate = max(1.0 - RECENT, 1.0 / (t + 1))
                s.reach[j] = math.sqrt(s.reach[j] ** 2 + rate * (off * off - s.reach[j] ** 2))
        if there[j]:
            s.extent[0, j] = min(s.extent[0, j], z[j])
            s.extent[1, j] = max(s.extent[1, j], z[j])
            rate = max(SLOW, 1.0 / (t + 1))
            s.spread[j] += rate * (abs(z[j] - s.level[j]) - s.spread[j])
            s.level[j] += rate * (z[j] - s.level[j])
        elif not followed:
            z[j] = min(max(guess, s.extent[0, j]), s.extent[1, j])


@called
def follow_quantiles(quantiles, ends, levels, e):
    """Move the quantiles of the errors of a step by the error e of a forecast, which had these ends.

    Whatever comes, the share of errors above an end differs from its level by at most its range over STEP times rows.
    """
    if ends[0] == ends[-1]:
        return
    for v in range(levels.size):
        quantiles[v] += STEP * (levels[v] if e > ends[v] else levels[v] - 1.0)
    for v in range(1, levels.size):
        quantiles[v] = max(quantiles[v], quantiles[v - 1])


@called
def judge(s, z, there, x, t, H, R, unit):
    """Learn the errors of the forecasts of row t: their size and quantiles, and what exogenous inputs x explain.

    A forecast that was made before the first value of its series has no error.
    """
    k, recent = s.XK[0], np.ones(z.size, np.int64)  # `recent`: how many values came after a forecast was made
    c = gains(s.XU, s.XD, s.XK[1], s.XK[2], s.XT, s.options[O_EXOGENOUS], x, k, R, unit) if x.size > 0 else -1
    for j in range(z.size):
        s.judged[j, 0] += there[j]
    for h in range(min(t, H)):
        at = (t - h - 1) % H
        for j in range(z.size):
            if not there[j]:
                continue
            w = s.XW[j, h]
            e = z[j] - s.made[at, j, h] - dot(w, x)
            learn_error(w, k, R, c, e)
            since, recent[j] = recent[j], recent[j] + s.there[at, j]
            if s.judged[j, 0] <= since:
                continue
            follow_quantiles(s.quantiles[:, j, h], s.ends[at, :, j, h], s.levels, e)
            s.judged[j, h + 1] += 1
            s.size[j, h] += max(1.0 - RECENT, 1.0 / s.judged[j, h + 1]) * (abs(e) - s.size[j, h])


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
def seasons_ago(periods, lags, h, i, t, now, last):
    """Naive forecast i of row t by h + 1 steps: the last value, or that of season i - 1, as soon as there is one."""
    lag = back(periods[i - 1], h) if i > 0 else 0
    return lags[now - lag] if 0 < lag <= t else last


@called
def learn_stack(c, s, z, there, t, H, now, ridge):
    """Let the stacks learn row t, and count the errors of all candidates that have forecast it."""
    S, p = c.periods.size, c.D.shape[2]
    x, k, R, unit = np.empty(p), np.empty(p), scratch(p, s.options[O_STACK]), np.zeros(p)
    missed, naive = np.empty(S + 4), np.empty(S + 1)
    phase = s.counts[C_PHASE]
    for h in range(min(t, H)):
        at = (t - h - 1) % H
        rate, soon = max(choice_rate(s.options, h), 1.0 / (t - h)), max(1.0 - RECENT, 1.0 / (t - h))
        for j in range(z.size):
            if not there[j]:
                continue
            last = s.base[at, j]
            if p > 0:
                x[1] = c.heads[at, j, h] - last
                before = now - h - 1
                seasonal(c.periods, c.profile[j], h, phase - h - 1, last, s.lags[j], before, now, c.off[at, j], x)
                e = z[j] - c.heads[at, j, h] - dot(c.W[j, h], x)
                first = gains(
                    c.U[j, h], c.D[j, h], c.left[j, h], ridge, c.turn[j, h], s.options[O_STACK], x, k, R, unit
                )
                learn_error(c.W[j, h], k, R, first, e)
            for i in range(S + 1):
                naive[i] = seasons_ago(c.periods, s.lags[j], h, i, t, now, last)
            off = z[j] - naive[c.leader[j, h]]
            c.typical[j, h] += soon * (off * off - c.typical[j, h])
            size = math.sqrt(c.typical[j, h]) if c.typical[j, h] > 0.0 else 1.0
            for i in range(S + 4):
                if i <= S:
                    made = naive[i]
                else:
                    made = c.heads[at, j, h] if i == S + 1 else c.stacked[at, j, h] if i == S + 2 else s.made[at, j, h]
                missed[i] = min(abs(z[j] - made) / size, LARGE)
                c.missed[i, j, h] += rate * (missed[i] - c.missed[i, j, h])
            mixed, leading = c.mixed[at, j, h], missed[c.leader[j, h]]
            for i in range(S + 1):
                follow_naive(c.known[i, j, h], (z[j] - naive[i]) / size, (mixed - naive[i]) / size, leading, rate, soon)


@called
def follow_naive(known, error, change, leading, rate, soon):
    """Let what is known of a naive forecast learn its error, its distance from the heads, and the leader's error."""
    error, change = min(max(error, -LARGE), LARGE), min(max(change, -LARGE), LARGE)
    lead, gain = leading - abs(error), abs(error) - abs(error - change)
    known[K_LEAD] += rate * (lead - known[K_LEAD])
    known[K_LEAD2] += rate * (lead * lead - known[K_LEAD2])
    known[K_GAIN] += soon * (gain - known[K_GAIN])
    known[K_GAIN2] += soon * (gain * gain - known[K_GAIN2])
    known[K_PRODUCT] += rate * (error * change - known[K_PRODUCT])
    known[K_CHANGE2] += rate * (change * change - known[K_CHANGE2])
    known[K_ERROR2] += rate * (error * error - known[K_ERROR2])


@called
def choice_rate(options, h):
    """The rate of the errors by which the forecast of step h + 1 is chosen: far steps remember for longer."""
    return (1.0 - options[O_CHOICE]) / max(1.0, (1.0 + h) / options[O_STRETCH])


@called
def share_of_rows(rate, rows, h):
    """The share that one error of h + 1 rows ahead has in recent means: errors overlap, so that h + 1 count as one."""
    return max(rate / (2.0 - rate), 1.0 / max(rows, 1)) * (1.0 + h)


@called
def follow_leader(known, leader, share, least):
    """The naive forecast to use: another than `leader` where its errors were smaller by `least` standard errors."""
    best, found = 0.0, leader
    for i in range(len(known)):
        gain = known[i, K_LEAD]
        spread = max(known[i, K_LEAD2] - max(1.0 - share, 0.0) * gain * gain, 0.0)
        if gain > best and gain > least * math.sqrt(share * spread):
            best, found = gain, i
    if found != leader:
        square = known[found, K_LEAD2]
        for i in range(len(known)):
            known[i, K_LEAD] -= best
            known[i, K_LEAD2] += square
        known[found, K_LEAD2] = 0.0
    return found


@called
def trust(known, share, latest, least, guard):
    """How far a forecast goes from the naive one towards the mean of heads and stack, in [0, 1].

    As far as the regression of the naive errors on such changes says, and one standard error farther, where that is
    significant: from `least` standard errors on, fully from one more on. Not at all where the latest absolute errors
    are larger, by `guard` standard errors. A mean over rows counts one of them with `share`, that of the latest errors
    with `latest`.
    """
    together, change, error = known[K_PRODUCT], known[K_CHANGE2], known[K_ERROR2]
    if together <= 0.0 or change <= 0.0:
        return 0.0
    slope = together / change
    rest = max(error - slope * together, 1e-9 * error + 1e-300)
    sure = math.sqrt(slope * together / (rest * share)) - least
    worse = known[K_GAIN] / math.sqrt(known[K_GAIN2] * latest + 1e-300) + guard
    towards = min(slope + math.sqrt(rest * share / change), 1.0)
    return towards * min(max(sure, 0.0), 1.0) * min(max(worse, 0.0), 1.0)


@called
def choose(c, s, z, t, H, now):
    """The forecasts of row t: the mean of heads and stack, as far as it has been better than the best naive one."""
    S, p = c.periods.size, c.D.shape[2]
    at, phase, x = t % H, s.counts[C_PHASE], np.empty(c.D.shape[2])
    for j in range(z.size):
        low, high = s.extent[0, j], s.extent[1, j]
        width = high - low
        for h in range(H):
            made = min(max(c.heads[at, j, h], low - width), high + width)
            c.heads[at, j, h] = made
            c.stacked[at, j, h] = made
            if p > 0:
                x[1] = made - z[j]
                seasonal(c.periods, c.profile[j], h, phase, z[j], s.lags[j], now, now + h + 1, c.off[at, j], x)
                c.stacked[at, j, h] = min(max(made + dot(c.W[j, h], x), low - width), high + width)
            a, b = c.missed[S + 1, j, h], c.missed[S + 2, j, h]
            share = (
                0.5
                if a == b
                else 1.0 / (1.0 + min((b / a if a > 0.0 else HUGE), 1e3) ** (2.0 * s.options[O_SHARPNESS]))
            )
            mixed = made + share * (c.stacked[at, j, h] - made)
            share, known = share_of_rows(choice_rate(s.options, h), t - h, h), c.known[:, j, h]
            leader = follow_leader(known, c.leader[j, h], share, s.options[O_LEAD])
            naive = seasons_ago(c.periods, s.lags[j], h, leader, t + h + 1, now + h + 1, z[j])
            c.mixed[at, j, h], c.leader[j, h] = mixed, leader
            latest = share_of_rows(1.0 - RECENT, t - h, h)
            far = trust(known[leader], share, latest, s.options[O_SURE], s.options[O_GUARD])
            s.made[at, j, h] = naive + far * (mixed - naive)


@called
def follow_seasons(c, s, z, there, t, H):
    """Let the means of the rows of each season learn row t."""
    at, phase = t % H, s.counts[C_PHASE]
    for j in range(z.size):
        for i in range(c.periods.size):
            slot = int(phase % c.periods[i])
            if t < c.periods[i]:
                c.profile[j, i, slot] = z[j]
            c.off[at, j, i] = z[j] - c.profile[j, i, slot]
            if there[j]:
                rate = max(PROFILE, 1.0 / (1.0 + t // c.periods[i]))
                c.profile[j, i, slot] += rate * (z[j] - c.profile[j, i, slot])


@called
def standardized(s, e, x):
    """Standardize the exogenous inputs e of a row into x; a missing one is at its mean."""
    for c in range(x.size):
        value = (e[c] - s.drift[c]) / math.sqrt(s.spread2[c]) if s.spread2[c] > 0.0 else 0.0
        x[c] = 0.0 if math.isnan(value) else min(max(value, -UNUSUAL), UNUSUAL)


@called
def follow_inputs(s, e, t):
    """Let the moments of the exogenous inputs learn those of row t."""
    rate = max(EXOGENOUS_RATE, 1.0 / (t + 1.0))
    for c in range(e.size):
        if not math.isnan(e[c]):
            off = e[c] - s.drift[c]
            s.drift[c] += rate * off
            s.spread2[c] += rate * ((1.0 - rate) * off * off - s.spread2[c])


@called
def in_units(s, j, value):
    """A standardized value of series j in its units, within the bounds."""
    return min(max(s.mean[j] + s.scale[j] * value, s.limits[0]), s.limits[1])


@called
def publish(s, E, i, ahead, x, out, quantiles):
    """Copy the forecasts of row i, with what exogenous inputs known ahead explain, and quantiles of their errors.

    The numbers of errors are beside the quantiles. A series of which no value is known has no forecast.
    """
    m, H = s.size.shape
    at = s.counts[C_ROWS] % H
    made = s.made[at]
    for h in range(H):
        explained = ahead and x.size > 0 and i + 1 + h < len(E)
        if explained:
            standardized(s, E[i + 1 + h], x)
        for j in range(m):
            low, high = (s.limits[0] - s.mean[j]) / s.scale[j], (s.limits[1] - s.mean[j]) / s.scale[j]
            made[j, h] = min(max(made[j, h], low), high)
            more = dot(s.XW[j, h], x) if explained else 0.0
            s.told[j, h] = in_units(s, j, made[j, h])
            out[i, j, h] = in_units(s, j, made[j, h] + more) if s.judged[j, 0] > 0 else math.nan
            for v in range(s.levels.size):
                s.ends[at, v, j, h] = s.quantiles[v, j, h] * s.size[j, h]
                s.told_ends[v, j, h] = in_units(s, j, made[j, h] + s.ends[at, v, j, h])
                if len(quantiles) > 0:
                    quantiles[i, v, j, h] = in_units(s, j, made[j, h] + s.ends[at, v, j, h] + more)
            if len(quantiles) > 0:
                quantiles[i, s.levels.size, j, h] = s.judged[j, h + 1]


@compiled
def learn(families, c, s, stack_ridge, Y, E, out, quantiles, ahead):
    """Learn rows Y (n, m) with exogenous inputs E (n, q) in order; out (n, m, H) gets the forecasts made after each.

    `quantiles` (n, v + 1, m, H) gets those of their errors, and how many there were, unless it is empty. `ahead` uses
    the exogenous inputs of the rows that are forecast, as far as E has them. Returns the number of rows learned: fewer
    than n where the scale of a series is due to change.
    """
    m, H = s.size.shape
    n, angles, q = s.lags.shape[1] // 2, s.angles.size, E.shape[1]
    z, there, x = np.empty(m), np.empty(m, np.bool_), np.empty(q)
    common = np.ones(1 + 2 * angles + q)
    best, weight, R, unit = np.empty((m, H)), np.empty((m, H)), scratch(q, s.options[O_EXOGENOUS]), np.zeros(q)
    for i in range(len(Y)):
        t, phase = s.counts[C_ROWS], s.counts[C_PHASE]
        standardized(s, E[i], x)
        accept(s, Y[i], x, t, H, z, there)
        judge(s, z, there, x, t, H, R, unit)
        for f in families:
            learn_targets(f, z, there, s.base, t, H, s.options[O_DISCOUNT])
        now = n + t % n
        for j in range(m):
            if t == 0:
                fill(s.lags[j], z[j])
                for season in range(c.periods.size):
                    fill(c.profile[j, season], z[j])
            s.lags[j, now] = s.lags[j, now - n] = z[j]
        learn_stack(c, s, z, there, t, H, now, stack_ridge)
        for j in range(m):
            s.base[t % H, j], s.there[t % H, j] = z[j], there[j]
        follow_seasons(c, s, z, there, t, H)
        for a in range(angles):
            common[1 + 2 * a], common[2 + 2 * a] = math.sin(s.angles[a] * phase), math.cos(s.angles[a] * phase)
        for a in range(q):
            common[1 + 2 * angles + a] = x[a]
        for j in range(m):
            fill(best[j], HUGE)
            fill(c.heads[t % H, j], 0.0)
            fill(weight[j], 0.0)
        for f in families:
            learn_inputs(f, s.lags, now, common, there, t, H)
            best_losses(f, best)
        heads = c.heads[t % H]
        for f in families:
            add_forecasts(f, t, H, best, s.options[O_SHARPNESS], heads, weight)
        for j in range(m):
            for h in range(H):
                heads[j, h] = z[j] + heads[j, h] / weight[j, h]
        choose(c, s, z, t, H, now)
        publish(s, E, i, ahead, x, out, quantiles)
        follow_inputs(s, E[i], t)
        s.counts[C_ROWS] = t + 1
        s.counts[C_PHASE] = phase + 1
        if t >= FIRST:
            for j in range(m):
                if 0.0 < s.spread[j] <= 1.0 / CHANGE or s.spread[j] >= CHANGE:
                    return i + 1
    return len(Y)


@called
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

    An implausible y is bounded as far as values may lie from a forecast. Steps whose gain is no longer kept, those of
    rows more than H before the last one, stay as they are.
    """
    H, n = s.size.shape[1], s.lags.shape[1] // 2
    t = s.counts[C_ROWS] - 1 - age
    at, new = t % H, (y - s.mean[j]) / s.scale[j]
    if t >= FIRST and s.reach[j] > 0.0:
        far = FAR * s.reach[j]
        new = min(max(new, s.base[at, j] - far), s.base[at, j] + far)
    new = min(max(new, -LARGEST), LARGEST)
    for h in range(min(t, H - 1 - age)):
        row = (t - h - 1) % H
        base = s.base[row, j]
        old = s.base[at, j] - base if s.there[at, j] else math.nan
        revise_step(own, j, h, row, old, new - base)
        revise_step(joint, j, h, row, old, new - base)
    if age == 0:
        change = new - s.base[at, j]
        for h in range(H):
            s.made[at, j, h] += change
            s.told[j, h] += s.scale[j] * change
            for v in range(s.levels.size):
                s.told_ends[v, j, h] += s.scale[j] * change
        s.judged[j, 0] += not s.there[at, j]
    s.base[at, j], s.there[at, j] = new, True
    if age < n:
        s.lags[j, t % n] = s.lags[j, n + t % n] = new
    return s.mean[j] + s.scale[j] * new
