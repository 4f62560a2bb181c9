"""The compiled SepSA iteration for a multilayer perceptron: one pass over samples in one call, without allocation.

Symbols as in `sepsa.heads.rls`: φ (p,) the features the head sees, W (m, p) the head, B = A⁻¹ the inverse curvature, λ
the forgetting. B is held as UDUᵀ, U unit upper triangular with its columns one after the other in memory, D diagonal.
A row that stands for ω samples costs one pass over U (Bierman), 3p²/2 multiply-adds, and leaves D positive:

    f = Uᵀφ,  v = Df,  α_j = α_{j-1} + ω v_j f_j,  α_{-1} = 1
    D_j <- D_j α_{j-1}/α_j,   U_ij <- U_ij - ω (f_j/α_{j-1}) b_i,   b_i <- b_i + U_ij v_j  for i < j,   b_j = v_j
    W <- W + ω (y - Wφ) bᵀ/α_{p-1},   since b ends as Bφ and α as 1 + ωφᵀBφ                               (17), (18)

All state of a learner is one float64 vector S and all sizes are one integer vector L (see `engine.Layout`), so a call
hands over few arguments, a copy is one copy and nothing can grow. The body may be float32: its parts of S are then
read as that, and `body_dtype`, an array of no elements, says which.
"""

from __future__ import annotations

import math
from typing import Any

from numba import njit

from sepsa.jit import cached

# The order of sums may change; NaN and Inf keep their meaning, for they tell of a diverged body.
_OPTIONS: Any = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}, "error_model": "numpy", "nogil": True}
_inner = njit(forceinline=True, **_OPTIONS)  # their calls would hand over seven numbers an array
_kernel = cached(**_OPTIONS)

# A value this close to a constant, relatively, is that constant.
_ROUNDING = 1e-12

IDENTITY, RELU, TANH, SIGMOID, GELU, FOURIER = range(6)
SGD, RMSPROP, ADAM = range(3)

# What a head sees of φ = [hidden units, inputs, 1]: its end, from some hidden unit on, or the hidden units and 1.
END, HIDDEN = range(2)

# Where L says what: sizes and settings, then where in S each part starts, then the width of each hidden layer, then
# for each head its subset of φ, how many hidden units it sees, its number p of features and where its parts start in S.
(
    L_DEPTH, L_INPUTS, L_OUTPUTS, L_HEADS, L_BODY, L_ACTIVATIONS, L_WIDEST, L_FEATURES, L_ACTIVATION, L_OPTIMIZER,
    L_STANDARDIZE, L_BATCH, L_ROBUST, L_CLASSES, L_THETA, L_FIRST, L_SECOND, L_MEAN, L_SCALE, L_TYPICAL, L_TYPICAL_RUN,
    L_USUAL, L_LATE, L_GAIN, L_ERROR, L_ERROR_RUN, L_RANGE, L_CALIBRATION, L_COUNTS, L_SIZES,
) = range(30)  # fmt: skip
L_SETTINGS = [L_ACTIVATION, L_OPTIMIZER, L_STANDARDIZE, L_BATCH, L_ROBUST, L_CLASSES]

# Where the options say what.
O_LR, O_DECAY, O_MOMENTUM, O_BETA2, O_EPS, O_NESTEROV, O_DISCOUNT, O_POWER, O_CALIBRATION = range(9)

# Where the counts in S say what; the powers are β1^steps and β2^steps.
C_STEPS, C_BETA1_POWER, C_BETA2_POWER, C_OUTLIERS, C_WEIGHT, C_EVIDENCE, C_BEST, C_SINCE = range(8)
COUNTS = 8

# Where a head's numbers say what: its forgetting and ridge, whose turn the ridge's restoration is, how many samples it
# remembers, its discounted loss and its weight in the mixture.
H_FORGETTING, H_RIDGE, H_CURSOR, H_SAMPLES, H_LOSS, H_WEIGHT = range(6)
NUMBERS = 6

# The quantiles of |error| that are followed: the middle and the fourth fifth for what is implausible, the ninth tenth
# for intervals.
QUANTILES = (0.5, 0.8, 0.9)
TEMPERATURES = 17  # inverse ones, from 1/2 in steps of √2; as in `calibration`

_STEP = 0.05  # of the logarithm of a quantile
_LONG = 6  # a run of misses on one side so long is no chance: the step grows
_IMPLAUSIBLE = 4.5  # in units of the median error: 3 standard deviations of a normal law
_FAR = 16.0  # in units of an input's typical distance from its centre
_PATIENCE = 64.0  # rows for which an input lies 4 times as far out as when its scale was found, before that is changed
_HEAVY = 10.0  # in units of the typical weight
_HUGE = 1e100  # so that squares, and their weighted sums, stay finite


@_inner
def cosines(a, slope):
    """a <- √2 cos a and slope <- -√2 sin a, in place.

    With k the nearest integer to a/π and r = a - kπ, cos a = (-1)ᵏ cos r and sin a = (-1)ᵏ sin r; for |r| ≤ π/2 the
    series are exact to 1e-9, and unlike calls of the library they run in vector registers.
    """
    if a.itemsize == 8:
        for i in range(a.size):
            slope[i] = -math.sqrt(2.0) * math.sin(a[i])
            a[i] = math.sqrt(2.0) * math.cos(a[i])
        return
    real = a.dtype.type
    inverse, pi_high, pi_low, half, root = (
        real(1 / math.pi),
        real(3.140625),
        real(math.pi - 3.140625),
        real(0.5),
        real(math.sqrt(2.0)),
    )
    one, two = real(1.0), real(2.0)
    c2, c4, c6, c8, c10, c12 = (
        real(-1 / 2), real(1 / 24), real(-1 / 720), real(1 / 40320), real(-1 / 3628800), real(1 / 479001600)
    )  # fmt: skip
    s3, s5, s7, s9, s11 = real(-1 / 6), real(1 / 120), real(-1 / 5040), real(1 / 362880), real(-1 / 39916800)
    for i in range(a.size):
        k = math.floor(a[i] * inverse + half)
        r = a[i] - k * pi_high - k * pi_low
        sign = root * (one - two * (k - two * math.floor(k * half)))
        q = r * r
        slope[i] = -sign * r * (one + q * (s3 + q * (s5 + q * (s7 + q * (s9 + q * s11)))))
        a[i] = sign * (one + q * (c2 + q * (c4 + q * (c6 + q * (c8 + q * (c10 + q * c12))))))


@_inner
def activate(code, a, slope):
    """a <- σ(a) and slope <- σ'(a), in place."""
    one = a.dtype.type(1.0)
    zero = a.dtype.type(0.0)
    if code == RELU:
        for i in range(a.size):
            slope[i] = one if a[i] > zero else zero
            a[i] = zero if a[i] <= zero else a[i]  # a NaN stays one
    elif code == TANH:
        for i in range(a.size):
            a[i] = math.tanh(a[i])
            slope[i] = one - a[i] * a[i]
    elif code == SIGMOID:
        for i in range(a.size):
            a[i] = one / (one + math.exp(-a[i]))
            slope[i] = a[i] * (one - a[i])
    elif code == GELU and a.itemsize == 4:
        # libm's erf and exp are called one by one; these formulas, exact to float32's rounding, are vectorized.
        # exp(-v) = (Σ (v/64)^k/k!)^-64, and erf by Abramowitz and Stegun 7.1.26.
        for i in range(a.size):
            x = float(a[i])
            v = min(0.5 * x * x, 40.0) * 0.015625
            e = 1.0 + v * (1.0 + v * (0.5 + v * (1 / 6 + v * (1 / 24 + v * (1 / 120 + v * (1 / 720 + v / 5040))))))
            e *= e
            e *= e
            e *= e
            e *= e
            e *= e
            e = 1.0 / (e * e)
            t = 1.0 / (1.0 + 0.2316419 * abs(x))
            tail = t * (0.31938153 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
            tail *= 0.3989422804014327 * e
            below = 1.0 - tail if x > 0.0 else tail
            slope[i] = below + x * 0.3989422804014327 * e
            a[i] = x * below
    elif code == GELU:
        for i in range(a.size):
            x = float(a[i])
            below = 0.5 * (1.0 + math.erf(x * math.sqrt(0.5)))
            slope[i] = below + x * math.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
            a[i] = x * below
    elif code == FOURIER:
        cosines(a, slope)
    else:
        for i in range(a.size):
            slope[i] = one


@_inner
def standardized(x, mean, scale, typical, robust):
    """(x - mean) · scale, at most `_FAR` typical distances from zero where `robust`; 0 where x is missing."""
    if scale == 0.0 or x != x:
        return 0.0
    z = (x - mean) * scale
    if robust:
        bound = max(6.0, _FAR * typical)
        z = min(max(z, -bound), bound)
    return z


@_inner
def forward(theta, sizes, code, mean, scale, typical, robust, x, activation, slope, phi):
    """activation: the standardized input, then each layer's output, with their slopes; φ = [last layer, inputs, 1].

    After φ, for heads that do not see the inputs, lie the last layer and 1 once more.
    """
    d = x.size
    for j in range(d):
        activation[j] = standardized(x[j], mean[j], scale[j], typical[j], robust)
    at, below, width = 0, 0, d
    for layer in range(sizes.size):
        h = sizes[layer]
        start = below + width
        a, z = activation[start : start + h], activation[below:start]
        bias = theta[at + width * h : at + width * h + h]
        for i in range(h):
            a[i] = bias[i]
        j = 0
        while j + 4 <= width:  # four inputs at a time: a passes through the registers once for all four
            rows = theta[at + j * h : at + (j + 4) * h]
            row0, row1, row2, row3 = rows[:h], rows[h : 2 * h], rows[2 * h : 3 * h], rows[3 * h :]
            z0, z1, z2, z3 = z[j], z[j + 1], z[j + 2], z[j + 3]
            for i in range(h):
                a[i] += z0 * row0[i] + z1 * row1[i] + z2 * row2[i] + z3 * row3[i]
            j += 4
        while j < width:
            row0, z0 = theta[at + j * h : at + j * h + h], z[j]
            for i in range(h):
                a[i] += z0 * row0[i]
            j += 1
        activate(code, a, slope[start : start + h])
        at += (width + 1) * h
        below, width = start, h
    h = width if sizes.size else 0
    top, again = activation[below : below + h], phi[h + d + 1 : 2 * h + d + 1]
    for i in range(h):
        phi[i] = top[i]
        again[i] = top[i]
    inputs = phi[h : h + d]
    for j in range(d):
        inputs[j] = activation[j]
    phi[h + d] = 1.0
    phi[2 * h + d + 1] = 1.0


@_inner
def rank_one(U, D, phi, start, omega, b):
    """B <- B - ωBφφᵀB/(1 + ωφᵀBφ) for a φ that is zero before `start`. Leaves b = Bφ; returns 1 + ωφᵀBφ.

    Four columns at a time after the first few: b passes through the registers once for all four.
    """
    p = phi.size
    alpha, inverse = 1.0, 1.0
    for j in range(start):
        b[j] = 0.0
    j = start
    while j < p and (p - j) % 4:
        column = U[j * (j - 1) // 2 : j * (j - 1) // 2 + j]
        f = phi[j]
        for i in range(start, j):
            f += column[i] * phi[i]
        v = D[j] * f
        s = -omega * f * inverse
        before = alpha
        alpha += omega * v * f
        inverse = 1.0 / alpha
        D[j] *= before * inverse
        b[j] = v
        for i in range(j):
            u = column[i]
            column[i] = u + s * b[i]
            b[i] += u * v
        j += 1
    while j < p:
        at0 = j * (j - 1) // 2
        at1, at2, at3 = at0 + j, at0 + 2 * j + 1, at0 + 3 * j + 3
        column0, column1, column2, column3 = U[at0 : at0 + j], U[at1 : at1 + j], U[at2 : at2 + j], U[at3 : at3 + j]
        f0, f1, f2, f3 = 0.0, 0.0, 0.0, 0.0
        for i in range(start, j):
            f0 += column0[i] * phi[i]
            f1 += column1[i] * phi[i]
            f2 += column2[i] * phi[i]
            f3 += column3[i] * phi[i]
        # The corner where the four columns meet the diagonal.
        u10, u20, u21 = U[at1 + j], U[at2 + j], U[at2 + j + 1]
        u30, u31, u32 = U[at3 + j], U[at3 + j + 1], U[at3 + j + 2]
        f0 += phi[j]
        f1 += phi[j + 1] + u10 * phi[j]
        f2 += phi[j + 2] + u20 * phi[j] + u21 * phi[j + 1]
        f3 += phi[j + 3] + u30 * phi[j] + u31 * phi[j + 1] + u32 * phi[j + 2]
        v0, v1, v2, v3 = D[j] * f0, D[j + 1] * f1, D[j + 2] * f2, D[j + 3] * f3
        alpha0 = alpha + omega * v0 * f0
        alpha1 = alpha0 + omega * v1 * f1
        alpha2 = alpha1 + omega * v2 * f2
        alpha3 = alpha2 + omega * v3 * f3
        inverse0, inverse1, inverse2, inverse3 = 1.0 / alpha0, 1.0 / alpha1, 1.0 / alpha2, 1.0 / alpha3
        s0, s1, s2, s3 = -omega * f0 * inverse, -omega * f1 * inverse0, -omega * f2 * inverse1, -omega * f3 * inverse2
        D[j] *= alpha * inverse0
        D[j + 1] *= alpha0 * inverse1
        D[j + 2] *= alpha1 * inverse2
        D[j + 3] *= alpha2 * inverse3
        for i in range(j):
            u0, u1, u2, u3, c = column0[i], column1[i], column2[i], column3[i], b[i]
            column0[i] = u0 + s0 * c
            c += u0 * v0
            column1[i] = u1 + s1 * c
            c += u1 * v1
            column2[i] = u2 + s2 * c
            c += u2 * v2
            column3[i] = u3 + s3 * c
            b[i] = c + u3 * v3
        U[at1 + j] = u10 + s1 * v0
        c = v0 + u10 * v1
        U[at2 + j] = u20 + s2 * c
        c += u20 * v2
        U[at3 + j] = u30 + s3 * c
        b[j] = c + u30 * v3
        U[at2 + j + 1] = u21 + s2 * v1
        c = v1 + u21 * v2
        U[at3 + j + 1] = u31 + s3 * c
        b[j + 1] = c + u31 * v3
        U[at3 + j + 2] = u32 + s3 * v2
        b[j + 2] = v2 + u32 * v3
        b[j + 3] = v3
        alpha, inverse = alpha3, inverse3
        j += 4
    return alpha


@_inner
def learn_row(U, D, W, energy, phi, start, e, omega, b):
    """Equations 17 and 18 on a row that stands for ω samples, with residuals e (m,). Returns 1 + ωφᵀBφ."""
    g = rank_one(U, D, phi, start, omega, b)
    for k in range(e.size):
        row, step = W[k], omega * e[k] / g
        for j in range(phi.size):
            row[j] += step * b[j]
        energy[k] += e[k] * step
    return g


@_inner
def restore(U, D, W, energy, prior, ridge_left, ridge, cursor, count, unit, e, b):
    """The ridge back to `count` coordinates, each a row √r e_j that aims at the prior; returns whose turn is next."""
    for _ in range(count):
        r = ridge - ridge_left[cursor]
        if r > 0.0:
            unit[cursor] = 1.0
            for k in range(e.size):
                e[k] = prior[k, cursor] - W[k, cursor]
            learn_row(U, D, W, energy, unit, cursor, e, r, b)
            unit[cursor] = 0.0
        ridge_left[cursor] = ridge
        cursor = cursor + 1 if cursor + 1 < D.size else 0
    return cursor


@_inner
def backward(theta, sizes, activation, slope, delta, gradient, first):
    """Add to the body's gradient what one sample gives: delta is the loss's derivative by the last layer.

    The `first` sample of a batch overwrites it.
    """
    top, at = activation.size, theta.size  # the ends of the layers in activation and in theta
    for layer in range(sizes.size - 1, -1, -1):
        h = sizes[layer]
        width = sizes[layer - 1] if layer else activation.size - sizes.sum()
        top -= h
        at -= (width + 1) * h
        slopes_here, z = slope[top : top + h], activation[top - width : top]
        for i in range(h):
            delta[i] *= slopes_here[i]
        for j in range(width + 1):
            g, zj = gradient[at + j * h : at + j * h + h], z[j] if j < width else delta.dtype.type(1.0)
            if first:
                for i in range(h):
                    g[i] = zj * delta[i]
            else:
                for i in range(h):
                    g[i] += zj * delta[i]
        if layer:
            below = delta[h : h + width]
            for j in range(width):
                row = theta[at + j * h : at + j * h + h]
                total = delta.dtype.type(0.0)
                for i in range(h):
                    total += row[i] * delta[i]
                below[j] = total
            for j in range(width):
                delta[j] = below[j]


@_inner
def optimizer_step(theta, first, second, gradient, code, opt, counts):
    """One step of the body's optimizer, as `torch.optim` takes it."""
    real = gradient.dtype.type
    lr, decay, eps, nesterov = real(opt[O_LR]), real(opt[O_DECAY]), real(opt[O_EPS]), real(opt[O_NESTEROV])
    momentum, beta2 = real(opt[O_MOMENTUM]), real(opt[O_BETA2])
    new, new2 = real(1.0 - opt[O_MOMENTUM]), real(1.0 - opt[O_BETA2])
    if code == ADAM:
        counts[C_BETA1_POWER] *= opt[O_MOMENTUM]
        counts[C_BETA2_POWER] *= opt[O_BETA2]
        step = real(opt[O_LR] / (1.0 - counts[C_BETA1_POWER]))
        correction = real(1.0 / math.sqrt(1.0 - counts[C_BETA2_POWER]))
        for i in range(theta.size):
            g = gradient[i] + decay * theta[i]
            first[i] += new * (g - first[i])
            second[i] = beta2 * second[i] + new2 * g * g
            theta[i] -= step * first[i] / (math.sqrt(second[i]) * correction + eps)
    elif code == RMSPROP:
        for i in range(theta.size):
            g = gradient[i] + decay * theta[i]
            second[i] = beta2 * second[i] + new2 * g * g
            first[i] = momentum * first[i] + g / (math.sqrt(second[i]) + eps)
            theta[i] -= lr * first[i]
    else:
        for i in range(theta.size):
            g = gradient[i] + decay * theta[i]
            first[i] = momentum * first[i] + g
            theta[i] -= lr * (first[i] + nesterov * (g - new * first[i]))


@_inner
def scale_constant_inputs(mean, scale, gain, x, y):
    """Give a scale to an input or a target that was constant and now is not; True where an input got one.

    All rows learned so far had the constant, which stands for zero, so what was learned from them stays exact.
    """
    rescaled = False
    for j in range(x.size):
        if scale[j] == 0.0:
            off = abs(x[j] - mean[j])
            if off > _ROUNDING * abs(x[j]):
                scale[j] = 1.0 / min(max(off, 1.0 / _HUGE), _HUGE)
                rescaled = True
    for k in range(y.size):
        if gain[k] == 0.0 and y[k] != 0.0:
            gain[k] = 1.0 / min(max(y[k] * y[k], 1.0 / _HUGE), _HUGE)
    return rescaled


# ---------------------------------------------------------------------- what is plausible


@_inner
def follow_quantile(value, quantile, run, tau, step):
    """The τ-quantile q of a stream of sizes, and the run of values on one side of it: above positive, below negative.

    log q moves by step · τ where the value lies above and by -step · (1 - τ) where not, so that it stands still where
    a share 1 - τ lies above. From a run on whose chance is under 1/64 the law may have changed: each further step is
    larger, by the cube root of how much less likely the run has become.
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
    return min(max(quantile * math.exp(min(max(move, -5.0), 5.0)), 1e-300), _HUGE), run


@_inner
def plausible_error(error, k):
    """How large an error of output k may be and count fully: from its quantiles (m, 3). No limit before any is known.

    The middle one alone would take all that differs for implausible where most targets are predicted exactly.
    """
    size = max(error[k, 0], 0.25 * error[k, 1])
    return _IMPLAUSIBLE * size if size > 0.0 else math.inf


@_inner
def huber_weight(e, error):
    """min(1, limit/|e|), the least over the outputs: the error counts as if it were the limit.

    Beyond four times the limit it counts less and less, by 4 limit/|e|: it tells nothing.
    """
    weight = 1.0
    for k in range(e.size):
        size, limit = abs(e[k]), plausible_error(error, k)
        if size > limit:
            ratio = limit / size
            weight = min(weight, ratio * min(1.0, 4.0 * ratio))
    return weight


@_inner
def plausible_weight(weight, usual):
    """A sample's weight; beyond ten times the usual one it falls to that again, for it tells of an error."""
    weight = min(weight, _HUGE)
    if usual == 0.0 or weight <= _HEAVY * usual:
        return weight
    return max(usual, _HEAVY * usual * (_HEAVY * usual / weight))


@_inner
def follow_inputs(x, mean, scale, typical, typical_run):
    """Take a row into the typical distance of each input from its centre; the weight that the row deserves by them.

    That is 1, or (bound/distance)² for the input that lies farthest beyond where the network sees it.
    """
    weight = 1.0
    for j in range(x.size):
        if scale[j] > 0.0 and x[j] == x[j]:
            z = abs(x[j] - mean[j]) * scale[j]
            if z > 0.0:
                bound = max(6.0, _FAR * typical[j])
                if z > bound:
                    weight = min(weight, (bound / z) ** 2)
                if typical[j] == 0.0:
                    typical[j] = min(z, 4.0)
                else:
                    typical[j], typical_run[j] = follow_quantile(z, typical[j], typical_run[j], 0.5, _STEP)
    return weight


@_inner
def rescale_input(S, L, j, g):
    """Let input j be seen g times smaller: φ_j <- φ_j/g, with W_j <- gW_j and B <- SBS, S = diag(1, .., g, .., 1).

    With B = UDUᵀ that is U <- SUS⁻¹ and D <- DS², so what was learned stays exact. The body's weights stay, as if it
    had taken a step. An input that was too small to tell the head anything starts anew.
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


# ---------------------------------------------------------------------- heads


@_inner
def view(S, start, length):
    return S[start : start + length]


@_inner
def body_view(S, start, q, body_dtype):
    """One of theta, first and second, (q,) in the body's dtype."""
    return S[start : start + (q * body_dtype.itemsize + 7) // 8].view(body_dtype.dtype)[:q]


@_inner
def head_at(L, h):
    """Where the row of L about head h starts: its subset of φ, the hidden units it sees, p, where its parts start."""
    return L_SIZES + L[L_DEPTH] + 4 * h


@_inner
def head_weights(S, L, h):
    """W (m, p) of head h."""
    at, m = head_at(L, h), L[L_OUTPUTS]
    p = L[at + 2]
    start = L[at + 3] + NUMBERS
    return S[start : start + m * p].reshape(m, p)


@_inner
def head_numbers(S, L, h):
    """What a head has beside its matrices: see H_FORGETTING and the others."""
    start = L[head_at(L, h) + 3]
    return S[start : start + NUMBERS]


@_inner
def head_views(S, L, h):
    """The further parts of head h: U, D, what is left of the ridge, prior, energy."""
    at, m = head_at(L, h), L[L_OUTPUTS]
    p = L[at + 2]
    start, u = L[at + 3] + NUMBERS + m * p, p * (p - 1) // 2
    return (
        S[start : start + u],
        S[start + u : start + u + p],
        S[start + u + p : start + u + 2 * p],
        S[start + u + 2 * p : start + u + 2 * p + m * p].reshape(m, p),
        S[start + u + 2 * p + m * p : start + u + 2 * p + m * p + m],
    )


@_inner
def seen_by(phi, L, h, hidden, d):
    """What head h sees of φ."""
    at = head_at(L, h)
    if L[at] == HIDDEN:
        return phi[hidden + d + 1 : 2 * hidden + d + 2]
    return phi[hidden - L[at + 1] : hidden + d + 1]


@_inner
def answer(W, seen, out, at):
    """out[at :] <- Wφ of a head that sees so much of φ. In slices: an index that might be negative is no vector's."""
    for k in range(W.shape[0]):
        row, total = W[k], 0.0
        for j in range(seen.size):
            total += row[j] * seen[j]
        out[at + k] = total


@_inner
def mix(S, L, answers, at, out):
    """out (m,) = Σ_h π_h answers_h, for answers (heads, m) from `at` on."""
    m = out.size
    for k in range(m):
        out[k] = 0.0
    for h in range(L[L_HEADS]):
        weight = S[L[head_at(L, h) + 3] + H_WEIGHT]
        for k in range(m):
            out[k] += weight * answers[at + h * m + k]


@_inner
def weigh_heads(S, L, power, evidence, counts):
    """π_h ∝ (loss_h)^(-power · evidence/2): the posterior of heads under normal errors of unknown variance."""
    heads = L[L_HEADS]
    least = math.inf
    for h in range(heads):
        least = min(least, S[L[head_at(L, h) + 3] + H_LOSS])
    total, best, top = 0.0, 0, 0.0
    for h in range(heads):
        at = L[head_at(L, h) + 3]
        ratio = (S[at + H_LOSS] + 1e-300) / (least + 1e-300)
        weight = math.exp(-0.5 * power * evidence * math.log(ratio))
        S[at + H_WEIGHT] = weight
        total += weight
        if weight > top:
            best, top = h, weight
    for h in range(heads):
        S[L[head_at(L, h) + 3] + H_WEIGHT] /= total
    if best != counts[C_BEST]:
        counts[C_BEST], counts[C_SINCE] = best, counts[C_STEPS]


@_inner
def clip_to_range(out, bounds):
    """At most half the range of plausible targets beyond it: bounds (m, 2)."""
    for k in range(out.size):
        low, high = bounds[k, 0], bounds[k, 1]
        if high >= low:
            margin = 0.5 * (high - low)
            out[k] = min(max(out[k], low - margin), high + margin)


@_inner
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


# ---------------------------------------------------------------------- the two calls


@_kernel
def learn(S, L, opt, body_dtype, X, Y, weights, out, workspace):
    """Learn the rows of X (n, d) and Y (n, m) in batches, in order; out (n, m) takes the predictions made before.

    Returns how many rows were learned: fewer than n where a prediction is not finite, and there nothing changes.
    `workspace` is zero where `unit` lies, and left so.
    """
    n, d, m, P, q, heads = X.shape[0], L[L_INPUTS], L[L_OUTPUTS], L[L_FEATURES], L[L_BODY], L[L_HEADS]
    batch, width, standardize, robust = L[L_BATCH], L[L_ACTIVATIONS], L[L_STANDARDIZE], L[L_ROBUST]
    code, optimizer, sizes = L[L_ACTIVATION], L[L_OPTIMIZER], L[L_SIZES : L_SIZES + L[L_DEPTH]]
    hidden = sizes[sizes.size - 1] if sizes.size else 0
    theta = body_view(S, L[L_THETA], q, body_dtype)
    first, second = body_view(S, L[L_FIRST], q, body_dtype), body_view(S, L[L_SECOND], q, body_dtype)
    gain, counts, calibration = (
        view(S, L[L_GAIN], m),
        view(S, L[L_COUNTS], COUNTS),
        view(S, L[L_CALIBRATION], TEMPERATURES),
    )
    mean, scale = view(S, L[L_MEAN], d), view(S, L[L_SCALE], d)
    typical, typical_run = view(S, L[L_TYPICAL], d), view(S, L[L_TYPICAL_RUN], d)
    usual, late = view(S, L[L_USUAL], d), view(S, L[L_LATE], d)
    error, error_run = view(S, L[L_ERROR], 3 * m).reshape(m, 3), view(S, L[L_ERROR_RUN], 3 * m).reshape(m, 3)
    bounds = view(S, L[L_RANGE], 2 * m).reshape(m, 2)
    stride = P + hidden + 1
    unit, b = workspace[:P], workspace[P : 2 * P]
    at = 2 * P
    e, probabilities = workspace[at : at + m], workspace[at + m : at + 2 * m]
    at += 2 * m
    phis = workspace[at : at + batch * stride].reshape(batch, stride)
    at += batch * stride
    answers = workspace[at : at + batch * heads * m]
    at += batch * heads * m
    omegas = workspace[at : at + batch]
    low = workspace[at + batch :].view(body_dtype.dtype)
    gradient, delta = low[:q], low[q : q + 2 * L[L_WIDEST]]
    low = low[q + 2 * L[L_WIDEST] :]
    activations = low[: batch * width].reshape(batch, width)
    slopes = low[batch * width : 2 * batch * width].reshape(batch, width)
    W, numbers = head_weights(S, L, 0), head_numbers(S, L, 0)
    U, D, ridge_left, prior, energy = head_views(S, L, 0)
    at = 0
    while at < n:
        size = min(batch, n - at)
        total, magnitude = 0.0, 0.0
        for i in range(size):
            phi, before = phis[i], out[at + i]
            forward(theta, sizes, code, mean, scale, typical, robust, X[at + i], activations[i], slopes[i], phi)
            for h in range(heads):
                if heads > 1:
                    W = head_weights(S, L, h)
                answer(W, seen_by(phi, L, h, hidden, d), answers, (i * heads + h) * m)
            mix(S, L, answers, i * heads * m, before)
            for j in range(P):
                magnitude += phi[j] * phi[j]
            for k in range(m):
                magnitude += before[k] * before[k]
            if robust:
                clip_to_range(before, bounds)
            omegas[i] = weights[at + i]
            total += weights[at + i]
        if not math.isfinite(magnitude):
            return at
        if total > 0.0:
            rescaled = False
            if standardize:
                for i in range(size):
                    if weights[at + i] > 0.0 and scale_constant_inputs(mean, scale, gain, X[at + i], Y[at + i]):
                        rescaled = True
                if rescaled:
                    for i in range(size):
                        forward(
                            theta,
                            sizes,
                            code,
                            mean,
                            scale,
                            typical,
                            robust,
                            X[at + i],
                            activations[i],
                            slopes[i],
                            phis[i],
                        )
            if robust:
                total = 0.0
                for i in range(size):
                    omegas[i] = plausible_weight(weights[at + i], counts[C_WEIGHT])
                    if omegas[i] > 0.0:
                        omegas[i] *= follow_inputs(X[at + i], mean, scale, typical, typical_run)
                    total += omegas[i]
            counts[C_STEPS] += 1.0
            # The losses of heads, and their weights, by what they said before.
            if heads > 1:
                for h in range(heads):
                    S[L[head_at(L, h) + 3] + H_LOSS] *= opt[O_DISCOUNT]
                counts[C_EVIDENCE] *= opt[O_DISCOUNT]
                for i in range(size):
                    share = omegas[i] / counts[C_WEIGHT] if counts[C_WEIGHT] > 0.0 else 1.0
                    counts[C_EVIDENCE] += share
                    for h in range(heads):
                        loss = 0.0
                        for k in range(m):
                            off = abs(answers[(i * heads + h) * m + k] - Y[at + i, k])
                            if robust:
                                off = min(off, 2.0 * plausible_error(error, k), _HUGE)
                            loss += gain[k] * off * off
                        S[L[head_at(L, h) + 3] + H_LOSS] += share * loss
                weigh_heads(S, L, opt[O_POWER], counts[C_EVIDENCE], counts)
            leverage = 0.0
            known = size == 1 and not rescaled  # whether `answers` has what the heads say when they have learned
            for h in range(heads):
                if heads > 1:  # views of the only head are there already
                    W, numbers = head_weights(S, L, h), head_numbers(S, L, h)
                    U, D, ridge_left, prior, energy = head_views(S, L, h)
                p = D.size
                lam, ridge = numbers[H_FORGETTING], numbers[H_RIDGE]
                if lam < 1.0:
                    for j in range(p):
                        D[j] /= lam
                        ridge_left[j] *= lam
                    for k in range(m):
                        energy[k] *= lam
                    numbers[H_SAMPLES] *= lam
                numbers[H_SAMPLES] += total
                for i in range(size):
                    if omegas[i] > 0.0:
                        seen = seen_by(phis[i], L, h, hidden, d)
                        if i or rescaled:
                            answer(W, seen, e, 0)
                        else:  # nothing has changed since
                            for k in range(m):
                                e[k] = answers[h * m + k]
                        for k in range(m):
                            y = min(max(Y[at + i, k], -_HUGE), _HUGE) if robust else Y[at + i, k]
                            e[k] = y - e[k]
                        omega = omegas[i] * huber_weight(e, error) if robust else omegas[i]
                        if omega > 0.0:
                            alpha = learn_row(U, D, W, energy, seen, 0, e, omega, b[:p])
                            if h == counts[C_BEST]:
                                leverage = (alpha - 1.0) / omega
                            if size == 1:  # what the head says now: of its error 1/α is left
                                for k in range(m):
                                    answers[h * m + k] += e[k] - e[k] / alpha
                # RLS.restored_per_update; of several heads each restores a coordinate only as often as it must, so that
                # none loses more than half its ridge.
                need = -p * math.log2(lam) if lam < 1.0 else 0.0
                if lam < 1.0 and (heads == 1 or need >= 1.0 or counts[C_STEPS] % math.floor(1.0 / need) == 0.0):
                    count = p if size > 1 and 4 * size >= p else min(p, math.ceil(need))
                    known = False
                    cursor = int(numbers[H_CURSOR])
                    numbers[H_CURSOR] = restore(
                        U, D, W, energy, prior, ridge_left, ridge, cursor, count, unit[:p], e, b[:p]
                    )
            if q > 0:
                share = 0.0
                for h in range(heads):
                    row = head_at(L, h)
                    if L[row + 1] > 0:
                        share += S[L[row + 3] + H_WEIGHT]
                for i in range(size):
                    trust = omegas[i]
                    if robust:
                        for k in range(m):
                            e[k] = min(max(Y[at + i, k], -_HUGE), _HUGE) - out[at + i, k]
                        trust *= huber_weight(e, error)
                    for j in range(hidden):
                        delta[j] = 0.0
                    for h in range(heads):
                        row = head_at(L, h)
                        units, part = L[row + 1], S[L[row + 3] + H_WEIGHT] / share if share > 0.0 else 1.0
                        if units == 0 or part < 0.01:
                            continue
                        if heads > 1:
                            W = head_weights(S, L, h)
                        if not known:
                            answer(W, seen_by(phis[i], L, h, hidden, d), answers, h * m)
                        for k in range(m):
                            off = answers[h * m + k] - Y[at + i, k]
                            if robust:
                                limit = plausible_error(error, k)
                                off = min(max(off, -limit), limit)
                            pull = part * 2.0 * trust * gain[k] * off / (size * m)
                            weights_of_output, into = W[k], delta[hidden - units : hidden]
                            for j in range(units):
                                into[j] += pull * weights_of_output[j]
                    backward(theta, sizes, activations[i], slopes[i], delta, gradient, i == 0)
                optimizer_step(theta, first, second, gradient, optimizer, opt, counts)
            for i in range(size):
                if L[L_CLASSES] and omegas[i] > 0.0:
                    label = 0
                    for k in range(m):
                        if Y[at + i, k] > Y[at + i, label]:
                            label = k
                    calibrate(calibration, out[at + i], label, omegas[i], opt[O_CALIBRATION], probabilities)
                if robust and weights[at + i] > 0.0:
                    far = 1 if weights[at + i] > omegas[i] else 0
                    widen = math.sqrt(1.0 + leverage)
                    for k in range(0 if L[L_CLASSES] else m):  # indicators are bounded: error stays 0, without limit
                        off = min(max(Y[at + i, k], -_HUGE), _HUGE) - out[at + i, k]
                        limit = plausible_error(error, k)
                        if abs(off) > 2.0 * limit:
                            far += 1
                        plausible = out[at + i, k] + min(max(off, -limit), limit)
                        if bounds[k, 0] > bounds[k, 1]:
                            bounds[k, 0], bounds[k, 1] = plausible, plausible
                        bounds[k, 0], bounds[k, 1] = min(bounds[k, 0], plausible), max(bounds[k, 1], plausible)
                        for t in range(3):
                            tau = (0.5, 0.8, 0.9)[t]
                            shown = abs(off) / widen if t == 2 else abs(off)
                            step = 2.0 * _STEP if t == 2 else _STEP
                            error[k, t], error_run[k, t] = follow_quantile(
                                shown, error[k, t], error_run[k, t], tau, step
                            )
                    if far > 0:
                        counts[C_OUTLIERS] += 1.0
                    if counts[C_WEIGHT] > 0.0:
                        counts[C_WEIGHT] += 0.01 * (omegas[i] - counts[C_WEIGHT])
                    else:
                        counts[C_WEIGHT] = omegas[i]
            if robust:
                for j in range(d):
                    if typical[j] > 0.0:
                        change = typical[j] / (usual[j] if usual[j] > 0.0 else 0.7)
                        late[j] = late[j] + 1.0 if change > 4.0 or change < 0.25 else 0.0
                        if late[j] > _PATIENCE or (late[j] > 0.0 and (change > 12.0 or change < 1.0 / 64.0)):
                            rescale_input(S, L, j, min(max(change, 1e-3), 1e3))
                            late[j] = 0.0
        at += size
    return n


@_kernel
def predict(S, L, body_dtype, X, out, leverage, workspace):
    """out (n, m): the mixture of the heads' Wφ for each row; leverage (n,), if not empty: φᵀBφ of the leading one."""
    d, P, m, width, heads, robust = L[L_INPUTS], L[L_FEATURES], L[L_OUTPUTS], L[L_ACTIVATIONS], L[L_HEADS], L[L_ROBUST]
    sizes = L[L_SIZES : L_SIZES + L[L_DEPTH]]
    hidden = sizes[sizes.size - 1] if sizes.size else 0
    theta = body_view(S, L[L_THETA], L[L_BODY], body_dtype)
    mean, scale, typical = view(S, L[L_MEAN], d), view(S, L[L_SCALE], d), view(S, L[L_TYPICAL], d)
    bounds, counts = view(S, L[L_RANGE], 2 * m).reshape(m, 2), view(S, L[L_COUNTS], COUNTS)
    stride = P + hidden + 1
    phi, answers = workspace[:stride], workspace[stride : stride + heads * m]
    low = workspace[stride + heads * m :].view(body_dtype.dtype)
    activation, slope = low[:width], low[width : 2 * width]
    for i in range(X.shape[0]):
        forward(theta, sizes, L[L_ACTIVATION], mean, scale, typical, robust, X[i], activation, slope, phi)
        for h in range(heads):
            answer(head_weights(S, L, h), seen_by(phi, L, h, hidden, d), answers, h * m)
        mix(S, L, answers, 0, out[i])
        if robust:
            clip_to_range(out[i], bounds)
        if leverage.size:
            best = int(counts[C_BEST])
            U, D, _, _, _ = head_views(S, L, best)
            seen = seen_by(phi, L, best, hidden, d)
            total = 0.0
            for j in range(D.size):
                column = U[j * (j - 1) // 2 : j * (j - 1) // 2 + j]
                f = seen[j]
                for k in range(j):
                    f += column[k] * seen[k]
                total += D[j] * f * f
            leverage[i] = total
