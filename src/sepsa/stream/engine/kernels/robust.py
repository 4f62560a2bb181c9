"""Plausibility in the kernels: bounds on errors, inputs and weights, and the scales of inputs that change."""

from __future__ import annotations

import math

from sepsa.stream.engine.kernels.body import FAR
from sepsa.stream.engine.kernels.compilation import inlined
from sepsa.stream.engine.kernels.head import head_at, head_views, head_weights
from sepsa.stream.engine.layout import H_RIDGE, HIDDEN, L_HEADS, L_INPUTS, L_OUTPUTS, L_SCALE, L_TYPICAL

ROUNDING = 1e-12  # the relative distance from a constant within which a value equals it
STEP = 0.05  # of the logarithm of a quantile
IMPLAUSIBLE = 4.5  # in units of the median error: 3 standard deviations of a normal distribution
PATIENCE = 64.0  # rows with an input at 4 times its former typical distance, after which its scale is changed
HEAVY = 10.0  # in units of the typical weight
HUGE = 1e100  # so that squares, and their weighted sums, stay finite


@inlined
def scale_constant_inputs(mean, scale, gain, x, y):
    """Give a scale to an input or target that was constant so far; returns whether an input got one.

    All rows learned so far had the constant, which the network sees as zero, so that their updates stay exact.
    """
    rescaled = False
    for j in range(x.size):
        if scale[j] == 0.0:
            off = abs(x[j] - mean[j])
            if off > ROUNDING * abs(x[j]):
                scale[j] = 1.0 / min(max(off, 1.0 / HUGE), HUGE)
                rescaled = True
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
    if value > quantile:
        run, chance = max(run, 0.0) + 1.0, math.log(1.0 - tau)
        move = step * tau
    else:
        run, chance = min(run, 0.0) - 1.0, math.log(tau)
        move = -step * (1.0 - tau)
    unlikely = -abs(run) * chance - 4.16
    if unlikely > 0.0:
        move *= math.exp(min(unlikely / 3.0, 12.0))
    return min(max(quantile * math.exp(min(max(move, -5.0), 5.0)), 1e-300), HUGE), run


@inlined
def plausible_error(error, k):
    """The largest plausible error of output k, from the quantiles (m, 3) of |error|; infinite before any error.

    By the median alone, every error would be implausible where most targets are predicted exactly.
    """
    size = max(error[k, 0], 0.25 * error[k, 1])
    return IMPLAUSIBLE * size if size > 0.0 else math.inf


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
    weight = min(weight, HUGE)
    if usual == 0.0 or weight <= HEAVY * usual:
        return weight
    return max(usual, HEAVY * usual * (HEAVY * usual / weight))


@inlined
def follow_inputs(x, mean, scale, typical, typical_run):
    """Update the typical distance of each input from its mean by a row; returns the row's weight.

    That is 1, or (bound/distance)² for the input that lies farthest beyond the bound at which it is clipped.
    """
    weight = 1.0
    for j in range(x.size):
        if scale[j] > 0.0 and x[j] == x[j]:
            z = abs(x[j] - mean[j]) * scale[j]
            if z > 0.0:
                bound = max(6.0, FAR * typical[j])
                if z > bound:
                    weight = min(weight, (bound / z) ** 2)
                if typical[j] == 0.0:
                    typical[j] = min(z, 4.0)
                else:
                    typical[j], typical_run[j] = follow_quantile(z, typical[j], typical_run[j], 0.5, STEP)
    return weight


@inlined
def rescale_input(S, L, j, g):
    """Divide the scale of input j by g: φ_j <- φ_j/g, with W_j <- gW_j and B <- SBS, S = diag(1, .., g, .., 1).

    With B = UDUᵀ that is U <- SUS⁻¹ and D <- DS², so that the head stays exact. The body's weights do not change. An
    input that was too small to inform the head starts from the prior again.
    """
    d, m = L[L_INPUTS], L[L_OUTPUTS]
    S[L[L_SCALE] + j] /= g
    S[L[L_TYPICAL] + j] /= g
    for h in range(L[L_HEADS]):
        at = head_at(L, h)
        if L[at] == HIDDEN:
            continue
        p, ridge, W = L[at + 2], S[L[at + 3] + H_RIDGE], head_weights(S, L, h)
        U, D, ridge_left, prior, _ = head_views(S, L, h)
        r = p - 1 - d + j
        anew = g < 1.0 and D[r] * ridge_left[r] > 0.5
        for i in range(r):
            U[r * (r - 1) // 2 + i] = 0.0 if anew else U[r * (r - 1) // 2 + i] / g
        for c in range(r + 1, p):
            U[c * (c - 1) // 2 + r] = 0.0 if anew else U[c * (c - 1) // 2 + r] * g
        D[r] = 1.0 / ridge if anew else D[r] * g * g
        ridge_left[r] = ridge if anew else ridge_left[r] / (g * g)
        for k in range(m):
            W[k, r] = 0.0 if anew else W[k, r] * g
            prior[k, r] = 0.0 if anew else prior[k, r] * g


@inlined
def rescale_changed_inputs(S, L, typical, usual, late):
    """Rescale inputs whose typical distance has changed: after `PATIENCE` rows, or at once where it is extreme."""
    for j in range(typical.size):
        if typical[j] > 0.0:
            change = typical[j] / (usual[j] if usual[j] > 0.0 else 0.7)
            late[j] = late[j] + 1.0 if change > 4.0 or change < 0.25 else 0.0
            if late[j] > PATIENCE or (late[j] > 0.0 and (change > 12.0 or change < 1.0 / 64.0)):
                rescale_input(S, L, j, min(max(change, 1e-3), 1e3))
                late[j] = 0.0


@inlined
def clip_to_range(out, bounds):
    """Clip predictions at half the range of plausible targets, bounds (m, 2), outside it."""
    for k in range(out.size):
        low, high = bounds[k, 0], bounds[k, 1]
        if high >= low:
            margin = 0.5 * (high - low)
            out[k] = min(max(out[k], low - margin), high + margin)
