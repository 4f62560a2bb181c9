"""The body in the kernels: forward, backward and a step of its optimizer."""

from __future__ import annotations

import math

from sepsa.compiled.kernels import inlined
from sepsa.learner.arithmetic.bounds import clip_bound, distance

IDENTITY, RELU, GELU, FOURIER = range(4)
BETA2, EPS = 0.999, 1e-8  # Adam's, as in `torch.optim`


@inlined
def cosines(a, slope):
    """a <- √2 cos a and slope <- -√2 sin a, in place.

    With k the nearest integer to a/π and r = a - kπ, cos a = (-1)ᵏ cos r and sin a = (-1)ᵏ sin r; for |r| ≤ π/2 the
    series are exact to 1e-9, and unlike calls of the library they are vectorized.
    """
    real = a.dtype.type
    inverse, pi_high, pi_low, half, root = (
        real(1 / math.pi),
        real(3.140625),
        real(math.pi - 3.140625),
        real(0.5),
        real(math.sqrt(2.0)),
    )
    one, two = real(1.0), real(2.0)
    c2, c4, c6, c8 = real(-1 / 2), real(1 / 24), real(-1 / 720), real(1 / 40320)
    c10, c12 = real(-1 / 3628800), real(1 / 479001600)
    s3, s5, s7, s9, s11 = real(-1 / 6), real(1 / 120), real(-1 / 5040), real(1 / 362880), real(-1 / 39916800)
    for i in range(a.size):
        k = math.floor(a[i] * inverse + half)
        r = a[i] - k * pi_high - k * pi_low
        sign = root * (one - two * (k - two * math.floor(k * half)))
        q = r * r
        slope[i] = -sign * r * (one + q * (s3 + q * (s5 + q * (s7 + q * (s9 + q * s11)))))
        a[i] = sign * (one + q * (c2 + q * (c4 + q * (c6 + q * (c8 + q * (c10 + q * c12))))))


@inlined
def activate(code, a, slope):
    """a <- σ(a) and slope <- σ'(a), in place."""
    one = a.dtype.type(1.0)
    zero = a.dtype.type(0.0)
    if code == RELU:
        for i in range(a.size):
            slope[i] = one if a[i] > zero else zero
            a[i] = zero if a[i] <= zero else a[i]  # a NaN stays one
    elif code == GELU:
        # libm's erf and exp are not vectorized; these formulas, exact to float32's rounding, are.
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
    elif code == FOURIER:
        cosines(a, slope)
    else:
        for i in range(a.size):
            slope[i] = one


@inlined
def standardized(x, mean, scale, typical, excess, robust):
    """(x - mean) · scale, within `clip_bound` of zero where `robust`; 0 where x is missing."""
    if scale == 0.0 or x != x:
        return 0.0
    if not robust:
        return (x - mean) * scale
    bound = clip_bound(typical, excess)
    return min(max(distance(x, mean, scale), -bound), bound)


@inlined
def forward(theta, sizes, code, mean, scale, typical, excess, robust, x, activation, slope, phi):
    """activation: the standardized input, then each layer's output, with their slopes; φ = [last layer, inputs, 1].

    After φ come the last layer and 1 once more, for heads that do not see the inputs.
    """
    d = x.size
    for j in range(d):
        activation[j] = standardized(x[j], mean[j], scale[j], typical[j], excess[j], robust)
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


@inlined
def backward(theta, sizes, activation, slope, delta, gradient, first):
    """Add one sample's gradient to the body's: delta is the derivative of the loss by the last layer.

    The `first` sample of a batch overwrites it.
    """
    top, at = activation.size, theta.size  # the ends of the layers in activation and in theta
    inputs = activation.size
    for layer in range(sizes.size):
        inputs -= sizes[layer]
    for layer in range(sizes.size - 1, -1, -1):
        h = sizes[layer]
        width = sizes[layer - 1] if layer else inputs
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


@inlined
def adam_step(theta, first, second, gradient, options, counts):
    """One step of Adam, equal to that of `torch.optim`."""
    real = gradient.dtype.type
    decay, beta2, eps = real(options.decay), real(BETA2), real(EPS)
    new, new2 = real(1.0 - options.beta1), real(1.0 - BETA2)
    counts.beta1_power *= options.beta1
    counts.beta2_power *= BETA2
    step = real(options.lr / (1.0 - counts.beta1_power))
    correction = real(1.0 / math.sqrt(1.0 - counts.beta2_power))
    for i in range(theta.size):
        g = gradient[i] + decay * theta[i]
        first[i] += new * (g - first[i])
        second[i] = beta2 * second[i] + new2 * g * g
        theta[i] -= step * first[i] / (math.sqrt(second[i]) * correction + eps)
