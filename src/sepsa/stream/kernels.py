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
import warnings
from typing import Any

from numba import njit

# The order of sums may change; NaN and Inf keep their meaning, for they tell of a diverged body.
_OPTIONS: Any = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}, "error_model": "numpy", "nogil": True}
_inner = njit(**_OPTIONS)


def _kernel(function):
    """Compile for calls from Python, cached on disk; without a cache where no folder can be written."""
    try:
        return njit(cache=True, **_OPTIONS)(function)
    except RuntimeError as error:
        warn_without_cache(str(error))
        return njit(**_OPTIONS)(function)


_warned: list[str] = []


def warn_without_cache(reason):
    """Say once that every process compiles anew, and the cure."""
    if not _warned:
        _warned.append(reason)
        warnings.warn(
            "sepsa: no folder for compiled code can be written, so each process compiles it anew, some seconds: "
            "set NUMBA_CACHE_DIR to a folder that can",
            RuntimeWarning,
            stacklevel=2,
        )


# A value this close to a constant, relatively, is that constant.
_ROUNDING = 1e-12

IDENTITY, RELU, TANH, SIGMOID, GELU = range(5)
SGD, RMSPROP, ADAM = range(3)

# Where L says what: sizes and settings, then where in S each part starts, then the width of each hidden layer.
(
    L_DEPTH, L_INPUTS, L_OUTPUTS, L_FEATURES, L_BODY, L_ACTIVATIONS, L_WIDEST, L_SKIP, L_ACTIVATION, L_OPTIMIZER,
    L_STANDARDIZE, L_BATCH, L_THETA, L_FIRST, L_SECOND, L_U, L_D, L_W, L_PRIOR, L_ENERGY, L_RIDGE, L_MEAN, L_SCALE,
    L_GAIN, L_COUNTS, L_SIZES,
) = range(26)  # fmt: skip
L_SETTINGS = [L_ACTIVATION, L_OPTIMIZER, L_STANDARDIZE, L_BATCH]

# Where the options say what.
O_LR, O_DECAY, O_MOMENTUM, O_BETA2, O_EPS, O_NESTEROV, O_FORGETTING, O_RIDGE = range(8)

# Where the counts in S say what.
C_STEPS, C_SAMPLES, C_CURSOR, C_BETA1_POWER, C_BETA2_POWER = range(5)  # the powers: β1^steps and β2^steps
COUNTS = 5


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
    elif code == GELU:
        for i in range(a.size):
            x = float(a[i])
            below = 0.5 * (1.0 + math.erf(x * math.sqrt(0.5)))
            slope[i] = below + x * math.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
            a[i] = x * below
    else:
        for i in range(a.size):
            slope[i] = one


@_inner
def forward(theta, sizes, code, skip, mean, scale, x, activation, slope, phi):
    """activation: the standardized input, then each layer's output, with their slopes; φ: what the head sees of it."""
    d = x.size
    for j in range(d):
        activation[j] = (x[j] - mean[j]) * scale[j]
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
    top = activation[below : below + width]
    for i in range(width):
        phi[i] = top[i]
    if skip and sizes.size:
        for j in range(d):
            phi[width + j] = activation[j]
    phi[phi.size - 1] = 1.0


@_inner
def matvec(W, phi, out):
    """out = Wφ."""
    for k in range(out.size):
        row = W[k]
        total = 0.0
        for j in range(phi.size):
            total += row[j] * phi[j]
        out[k] = total


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
    """Equations 17 and 18 on a row that stands for ω samples, with residuals e (m,)."""
    g = rank_one(U, D, phi, start, omega, b)
    for k in range(e.size):
        row, step = W[k], omega * e[k] / g
        for j in range(phi.size):
            row[j] += step * b[j]
        energy[k] += e[k] * step


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
def backward(theta, sizes, W, activation, slope, e, delta, gradient, first):
    """Add to the body's gradient what one sample gives: e (m,) is the loss's derivative by the outputs.

    The `first` sample of a batch overwrites it.
    """
    h = sizes[sizes.size - 1]
    for i in range(h):
        delta[i] = 0.0
    for k in range(e.size):
        head, de = W[k], e[k]
        for i in range(h):
            delta[i] += de * head[i]
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
                scale[j] = 1.0 / off
                rescaled = True
    for k in range(y.size):
        if gain[k] == 0.0 and y[k] != 0.0:
            gain[k] = 1.0 / (y[k] * y[k])
    return rescaled


@_inner
def view(S, start, length):
    return S[start : start + length]


@_inner
def body_view(S, start, q, body_dtype):
    """One of theta, first and second, (q,) in the body's dtype."""
    return S[start : start + (q * body_dtype.itemsize + 7) // 8].view(body_dtype.dtype)[:q]


@_kernel
def learn(S, L, opt, body_dtype, X, Y, weights, out, workspace):
    """Learn the rows of X (n, d) and Y (n, m) in batches, in order; out (n, m) takes the predictions made before.

    Returns how many rows were learned: fewer than n where a prediction is not finite, and there nothing changes.
    `workspace` is zero where `unit` lies, and left so.
    """
    n, d, m, p, q = X.shape[0], L[L_INPUTS], L[L_OUTPUTS], L[L_FEATURES], L[L_BODY]
    batch, width_total, standardize, skip = L[L_BATCH], L[L_ACTIVATIONS], L[L_STANDARDIZE], L[L_SKIP]
    code, optimizer, sizes = L[L_ACTIVATION], L[L_OPTIMIZER], L[L_SIZES:]
    lam, ridge = opt[O_FORGETTING], opt[O_RIDGE]
    theta = body_view(S, L[L_THETA], q, body_dtype)
    first, second = body_view(S, L[L_FIRST], q, body_dtype), body_view(S, L[L_SECOND], q, body_dtype)
    U, D, ridge_left = view(S, L[L_U], p * (p - 1) // 2), view(S, L[L_D], p), view(S, L[L_RIDGE], p)
    W, prior = view(S, L[L_W], m * p).reshape(m, p), view(S, L[L_PRIOR], m * p).reshape(m, p)
    energy, gain, counts = view(S, L[L_ENERGY], m), view(S, L[L_GAIN], m), view(S, L[L_COUNTS], COUNTS)
    mean, scale = view(S, L[L_MEAN], d), view(S, L[L_SCALE], d)
    unit, b, e = workspace[:p], workspace[p : 2 * p], workspace[2 * p : 2 * p + m]
    phis = workspace[2 * p + m : 2 * p + m + batch * p].reshape(batch, p)
    low = workspace[2 * p + m + batch * p :].view(body_dtype.dtype)
    gradient, delta = low[:q], low[q : q + 2 * L[L_WIDEST]]
    low = low[q + 2 * L[L_WIDEST] :]
    activations, slopes = (
        low[: batch * width_total].reshape(batch, width_total),
        low[batch * width_total : 2 * batch * width_total].reshape(batch, width_total),
    )
    at = 0
    while at < n:
        size = min(batch, n - at)
        total, magnitude = 0.0, 0.0
        for i in range(size):
            phi, before = phis[i], out[at + i]
            forward(theta, sizes, code, skip, mean, scale, X[at + i], activations[i], slopes[i], phi)
            matvec(W, phi, before)
            for j in range(p):
                magnitude += phi[j] * phi[j]
            for k in range(m):
                magnitude += before[k] * before[k]
            total += weights[at + i]
        if not math.isfinite(magnitude):
            return at
        if total > 0.0:
            if standardize:
                rescaled = False
                for i in range(size):
                    if weights[at + i] > 0.0 and scale_constant_inputs(mean, scale, gain, X[at + i], Y[at + i]):
                        rescaled = True
                for i in range(size if rescaled else 0):
                    forward(theta, sizes, code, skip, mean, scale, X[at + i], activations[i], slopes[i], phis[i])
            if lam < 1.0:
                for j in range(p):
                    D[j] /= lam
                    ridge_left[j] *= lam
                for k in range(m):
                    energy[k] *= lam
                counts[C_SAMPLES] *= lam
            counts[C_STEPS] += 1.0
            counts[C_SAMPLES] += total
            for i in range(size):
                if weights[at + i] > 0.0:
                    matvec(W, phis[i], e)
                    for k in range(m):
                        e[k] = Y[at + i, k] - e[k]
                    learn_row(U, D, W, energy, phis[i], 0, e, weights[at + i], b)
            if lam < 1.0:  # RLS.restored_per_update
                count = min(p, max(4 * size - 3, math.ceil(-p * math.log2(lam))))
                cursor = int(counts[C_CURSOR])
                counts[C_CURSOR] = restore(U, D, W, energy, prior, ridge_left, ridge, cursor, count, unit, e, b)
            if q > 0:
                for i in range(size):
                    matvec(W, phis[i], e)
                    for k in range(m):
                        e[k] = 2.0 * weights[at + i] * gain[k] * (e[k] - Y[at + i, k]) / (size * m)
                    backward(theta, sizes, W, activations[i], slopes[i], e, delta, gradient, i == 0)
                optimizer_step(theta, first, second, gradient, optimizer, opt, counts)
        at += size
    return n


@_kernel
def predict(S, L, body_dtype, X, out, spread, workspace):
    """out (n, m) = Wφ for each row, and, where spread (n,) has width_total, φᵀBφ."""
    d, p, m, width_total = L[L_INPUTS], L[L_FEATURES], L[L_OUTPUTS], L[L_ACTIVATIONS]
    theta, W = body_view(S, L[L_THETA], L[L_BODY], body_dtype), view(S, L[L_W], m * p).reshape(m, p)
    U, D, mean, scale = (
        view(S, L[L_U], p * (p - 1) // 2),
        view(S, L[L_D], p),
        view(S, L[L_MEAN], d),
        view(S, L[L_SCALE], d),
    )
    phi = workspace[2 * p + m : 3 * p + m]
    low = workspace[3 * p + m :].view(body_dtype.dtype)
    activation, slope = low[:width_total], low[width_total : 2 * width_total]
    for i in range(X.shape[0]):
        forward(theta, L[L_SIZES:], L[L_ACTIVATION], L[L_SKIP], mean, scale, X[i], activation, slope, phi)
        matvec(W, phi, out[i])
        if spread.size:
            total = 0.0
            for j in range(p):
                column = U[j * (j - 1) // 2 : j * (j - 1) // 2 + j]
                f = phi[j]
                for k in range(j):
                    f += column[k] * phi[k]
                total += D[j] * f * f
            spread[i] = total
