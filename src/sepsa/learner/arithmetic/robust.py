"""Plausibility in the kernels: bounds on errors, inputs and weights, and the scales of inputs that change."""

from __future__ import annotations

import math

from sepsa.compiled.kernels import inlined
from sepsa.learner.arithmetic.bounds import (
    GAP_E,
    GROWTH_E,
    GROWTH_X,
    clip_bound,
    distance,
    follow_excess,
    is_far,
    stretch,
)
from sepsa.learner.arithmetic.bounds import HUGE as HUGE

ROUNDING = 1e-12  # the relative distance from a constant within which a value equals it
STEP = 0.05  # of the logarithm of a quantile
FOLLOW_WEIGHT = 0.01  # share of a row in the typical weight
FAR = 2.0  # plausible errors, beyond which an error is an outlier's


@inlined
def first_scale(x, mean):
    """The scale of an input that was constant so far, by a value x; 0 where that equals the constant or is missing."""
    off = abs(x - mean)
    return 1.0 / min(max(off, 1.0 / HUGE), HUGE) if off > ROUNDING * abs(x) else 0.0


@inlined
def scale_constant_inputs(mean, scale, gain, x, y):
    """Give a scale to an input or target that was constant so far; returns whether an input got one.

    All rows learned so far had the constant, which the network sees as zero, so that their updates stay exact.
    """
    rescaled = False
    for j in range(x.size):
        if scale[j] == 0.0:
            scale[j] = first_scale(x[j], mean[j])
            rescaled = rescaled or scale[j] > 0.0
    for k in range(y.size):
        if gain[k] == 0.0 and y[k] != 0.0:
            gain[k] = 1.0 / min(max(y[k] * y[k], 1.0 / HUGE), HUGE)
    return rescaled


@inlined
def follow_quantile(value, quantile, run, tau, step):
    """The τ-quantile q of a stream of sizes, and the run of values on one side of it: above positive, below negative.

    log q moves by step · τ where the value lies above and by -step · (1 - τ) where not: without drift where a share
    1 - τ lies above. A run with a probability below 1/64 suggests that the distribution has changed: each further step
    is larger, by the cube root of the factor by which the run has become less likely.
    """
    if quantile == 0.0:
        return value, 0.0
    likely, fastest, largest_move, least = 4.16, 12.0, 5.0, 1e-300  # -log 1/64; logarithms; a quantile
    if value > quantile:
        run, chance = max(run, 0.0) + 1.0, math.log(1.0 - tau)
        move = step * tau
    else:
        run, chance = min(run, 0.0) - 1.0, math.log(tau)
        move = -step * (1.0 - tau)
    unlikely = -abs(run) * chance - likely
    if unlikely > 0.0:
        move *= math.exp(min(unlikely / 3.0, fastest))
    return min(max(quantile * math.exp(min(max(move, -largest_move), largest_move)), least), HUGE), run


@inlined
def plausible_error(error, k):
    """The largest plausible error of output k; infinite before any error.

    `error` (m, 4) has three quantiles of |error|, and the excess of errors beyond `FAR` times this one. By the median
    alone, every error would be implausible where most targets are predicted exactly.
    """
    size = max(error[k, 0], 0.25 * error[k, 1]) * stretch(error[k, 3], GROWTH_E)
    return 4.5 * size if size > 0.0 else math.inf  # 3 standard deviations of a normal distribution


@inlined
def huber_weight(e, error):
    """min(1, limit/|e|), the least over the outputs: the error counts as if it were the limit.

    Beyond four times the limit there is a further factor 4 limit/|e|.
    """
    weight = 1.0
    for k in range(e.size):
        size, limit = abs(e[k]), plausible_error(error, k)
        if size > limit:
            ratio = limit / size
            weight = min(weight, ratio * min(1.0, 4.0 * ratio))
    return weight


@inlined
def plausible_weight(weight, usual):
    """A sample's weight; above ten usual weights it falls with the weight given, down to the usual one."""
    weight, heavy = min(weight, HUGE), 10.0 * usual
    if usual == 0.0 or weight <= heavy:
        return weight
    return max(usual, heavy * (heavy / weight))


@inlined
def follow_inputs(x, mean, scale, centre, typical, typical_run, excess):
    """Update the typical distance of each input from its mean by a row, and its excess; returns the row's weight.

    That is 1, or (bound/distance)² for the input that lies farthest beyond the bound at which it is clipped. A value
    that equals the centre, as most values of a rare indicator do, does not say how far the others lie.
    """
    weight = 1.0
    for j in range(x.size):
        far = False
        if scale[j] > 0.0 and x[j] == x[j] and x[j] != centre[j]:
            z = abs(distance(x[j], mean[j], scale[j]))
            if z > 0.0:
                bound, far = clip_bound(typical[j], excess[j]), is_far(z, typical[j], excess[j])
                if z > bound:
                    weight = min(weight, (bound / z) ** 2)
                if typical[j] == 0.0:
                    typical[j] = min(z, 4.0)  # a first value may lie far away
                else:
                    typical[j], typical_run[j] = follow_quantile(z, typical[j], typical_run[j], 0.5, STEP)
        excess[j] = follow_excess(excess[j], far, GROWTH_X)
    return weight


@inlined
def clip_to_range(out, bounds):
    """Clip predictions at half the range of plausible targets, bounds (m, 2), outside it."""
    for k in range(out.size):
        low, high = bounds[k, 0], bounds[k, 1]
        if high >= low:
            margin = 0.5 * (high - low)
            out[k] = min(max(out[k], low - margin), high + margin)


@inlined
def follow_errors(error, error_run, k, size, widen):
    """Update quantiles and excess of |error| of output k by an error of this size, for intervals divided by `widen`.

    The weights of rows depend on the first two, the intervals on the last, which moves faster.
    """
    levels = (0.5, 0.8, 0.9)
    limit = FAR * plausible_error(error, k)
    error[k, 3] = follow_excess(error[k, 3], limit < size < GAP_E * limit, GROWTH_E)
    for t in range(3):
        shown = size / widen if t == 2 else size
        step = 2.0 * STEP if t == 2 else STEP
        error[k, t], error_run[k, t] = follow_quantile(shown, error[k, t], error_run[k, t], levels[t], step)


@inlined
def calibrate(losses, scores, label, weight, discount, p):
    """Add the log-loss of softmax(βp) at each inverse temperature, p the point of the simplex nearest to the scores.

    β doubles every second step, so two exponentials a class and their squares are enough.
    """
    n = scores.size
    for k in range(n):
        p[k] = scores[k]
    for i in range(1, n):  # in descending order, by insertion
        value, j = p[i], i
        while j > 0 and p[j - 1] < value:
            p[j] = p[j - 1]
            j -= 1
        p[j] = value
    tau, total = -math.inf, 0.0
    for k in range(n):
        total += p[k]
        tau = max(tau, (total - 1.0) / (k + 1))
    top = max(p[0] - tau, 0.0)
    for k in range(n):
        p[k] = max(scores[k] - tau, 0.0) - top
    mine = p[label]
    beta = 0.5
    for t in range(losses.size):
        total = 0.0
        for k in range(n):
            total += math.exp(beta * p[k])
        losses[t] = discount * losses[t] + weight * (math.log(total) - beta * mine)
        beta *= math.sqrt(2.0)


@inlined
def largest(values):
    """The place of the first largest value: the class of a row of indicators."""
    best = 0
    for k in range(values.size):
        if values[k] > values[best]:
            best = k
    return best
