"""The compiled SepSA iteration for a multilayer perceptron: one pass over samples in one call, without allocation.

Symbols as in `sepsa.heads.rls`: φ (p,) the features the head sees, W (m, p) the head, B = A⁻¹ the inverse curvature, λ
the forgetting. B is held as UDUᵀ, U unit upper triangular with its columns one after the other in memory, D diagonal.
A sample costs one pass over U (Bierman), 3p²/2 multiply-adds, and leaves D positive by construction:

    f = Uᵀφ,  v = Df,  α_j = α_{j-1} + v_j f_j,  α_{-1} = 1
    D_j <- D_j α_{j-1}/α_j,   U_ij <- U_ij - (f_j/α_{j-1}) b_i,   b_i <- b_i + U_ij v_j  for i < j,   b_j = v_j
    W <- W + (y - Wφ) bᵀ/α_{p-1},   since b ends as Bφ and α as 1 + φᵀBφ                                   (17), (18)

All state of a learner is one float64 vector S, all sizes one integer vector L (see `engine.Layout`), so a call hands
over few arguments, a copy is one copy and nothing can grow.
"""

from __future__ import annotations

import math

from numba import njit

# The orders of sums may change, NaN and Inf keep their meaning: they are what tells a diverged body.
_FAST = {"reassoc", "contract", "nsz", "arcp"}

# A value this close to a constant, relatively, is that constant.
_ROUNDING = 1e-12

IDENTITY, RELU, TANH, SIGMOID, GELU = range(5)
SGD, RMSPROP, ADAM = range(3)

# Where L says what: sizes first, then the start of each part of S.
(
    L_DEPTH, L_INPUTS, L_OUTPUTS, L_FEATURES, L_BODY, L_ACTIVATION, L_OPTIMIZER, L_SKIP, L_STANDARDIZE, L_BATCH,
    L_THETA, L_FIRST, L_SECOND, L_U, L_D, L_W, L_PRIOR, L_ENERGY, L_RIDGE, L_MEAN, L_SCALE, L_GAIN, L_COUNTS, L_TRACE,
    L_SIZES,
) = range(25)  # fmt: skip

L_SETTINGS = [L_ACTIVATION, L_OPTIMIZER, L_STANDARDIZE, L_BATCH]  # the numbers that are no sizes

# Where the options O say what.
O_LR, O_DECAY, O_MOMENTUM, O_BETA2, O_EPS, O_NESTEROV, O_FORGETTING, O_RIDGE = range(8)

# Where the counts in S say what.
C_STEPS, C_MASS, C_CURSOR = range(3)
COUNTS = 3


@njit(cache=True, fastmath=_FAST, error_model="numpy", nogil=True)
def activate(kind, a, slope):
    """a <- σ(a) and slope <- σ'(a), in place."""
    if kind == RELU:
        for i in range(a.size):
            slope[i] = 1.0 if a[i] > 0.0 else 0.0
            a[i] = a[i] if not a[i] <= 0.0 else 0.0  # a NaN stays one
    elif kind == TANH:
        for i in range(a.size):
            a[i] = math.tanh(a[i])
            slope[i] = 1.0 - a[i] * a[i]
    elif kind == SIGMOID:
        for i in range(a.size):
            a[i] = 1.0 / (1.0 + math.exp(-a[i]))
            slope[i] = a[i] * (1.0 - a[i])
    elif kind == GELU:
        for i in range(a.size):
            x = a[i]
            below = 0.5 * (1.0 + math.erf(x * math.sqrt(0.5)))
            slope[i] = below + x * math.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
            a[i] = x * below
    else:
        for i in range(a.size):
            slope[i] = 1.0


@njit(cache=True, fastmath=_FAST, error_model="numpy", nogil=True)
def forward(S, L, x, trace, slope):
    """trace: the standardized input, then each layer's output, then, where the head sees the input too, that; then 1.

    So its last p entries are φ.
    """
    d, at = L[L_INPUTS], L[L_THETA]
    mean, scale = S[L[L_MEAN] : L[L_MEAN] + d], S[L[L_SCALE] : L[L_SCALE] + d]
    for j in range(d):
        trace[j] = (x[j] - mean[j]) * scale[j]
    below, width = 0, d
    for layer in range(L[L_DEPTH]):
        h = L[L_SIZES + layer]
        start = below + width
        a = trace[start : start + h]
        bias = S[at + width * h : at + width * h + h]
        for i in range(h):
            a[i] = bias[i]
        for j in range(width):
            z, row = trace[below + j], S[at + j * h : at + j * h + h]
            for i in range(h):
                a[i] += z * row[i]
        activate(L[L_ACTIVATION], a, slope[start : start + h])
        at += (width + 1) * h
        below, width = start, h
    end = below + width
    if L[L_SKIP] and L[L_DEPTH]:
        for j in range(d):
            trace[end + j] = trace[j]
        end += d
    trace[end] = 1.0


@njit(cache=True, fastmath=_FAST, error_model="numpy", nogil=True)
def respond(S, L, phi, out):
    """out = Wφ."""
    p = phi.size
    for k in range(out.size):
        row = S[L[L_W] + k * p : L[L_W] + (k + 1) * p]
        total = 0.0
        for j in range(p):
            total += row[j] * phi[j]
        out[k] = total


@njit(cache=True, fastmath=_FAST, error_model="numpy", nogil=True)
def rank_one(S, L, phi, start, weight, b):
    """B <- B - ωBφφᵀB/(1 + ωφᵀBφ), ω the weight, φ zero before `start`. Leaves b = Bφ; returns 1 + ωφᵀBφ."""
    p = phi.size
    U, D = S[L[L_U] : L[L_U] + p * (p - 1) // 2], S[L[L_D] : L[L_D] + p]
    alpha, inverse = 1.0, 1.0
    for j in range(start):
        b[j] = 0.0
    for j in range(start, p):
        row = U[j * (j - 1) // 2 : j * (j - 1) // 2 + j]
        f = phi[j]
        for i in range(start, j):
            f += row[i] * phi[i]
        v = D[j] * f
        s = -weight * f * inverse
        before = alpha
        alpha += weight * v * f
        inverse = 1.0 / alpha
        D[j] *= before * inverse
        b[j] = v
        for i in range(j):
            u = row[i]
            row[i] = u + s * b[i]
            b[i] += u * v
    return alpha


@njit(cache=True, fastmath=_FAST, error_model="numpy", nogil=True)
def learn_row(S, L, phi, start, e, weight, b):
    """Equations 17 and 18 on a row that stands for `weight` samples, with residuals e (m,)."""
    p = phi.size
    g = rank_one(S, L, phi, start, weight, b)
    for k in range(e.size):
        row, step = S[L[L_W] + k * p : L[L_W] + (k + 1) * p], weight * e[k] / g
        for j in range(p):
            row[j] += step * b[j]
        S[L[L_ENERGY] + k] += e[k] * step


@njit(cache=True, fastmath=_FAST, error_model="numpy", nogil=True)
def forget(S, L, O):
    """λ on all that is remembered; the ridge comes back in `restore`."""
    p, m = L[L_FEATURES], L[L_OUTPUTS]
    lam = O[O_FORGETTING]
    for j in range(p):
        S[L[L_D] + j] /= lam
        S[L[L_RIDGE] + j] *= lam
    for k in range(m):
        S[L[L_ENERGY] + k] *= lam
    S[L[L_COUNTS] + C_MASS] *= lam


@njit(cache=True, fastmath=_FAST, error_model="numpy", nogil=True)
def restore(S, L, O, count, unit, e, b):
    """The ridge back to `count` coordinates in rotation, each a row √r e_j that aims at the prior."""
    p, m = L[L_FEATURES], L[L_OUTPUTS]
    cursor = int(S[L[L_COUNTS] + C_CURSOR])
    for _ in range(count):
        r = O[O_RIDGE] - S[L[L_RIDGE] + cursor]
        if r > 0.0:
            unit[cursor] = 1.0
            for k in range(m):
                e[k] = S[L[L_PRIOR] + k * p + cursor] - S[L[L_W] + k * p + cursor]
            learn_row(S, L, unit, cursor, e, r, b)
            unit[cursor] = 0.0
        S[L[L_RIDGE] + cursor] = O[O_RIDGE]
        cursor = cursor + 1 if cursor + 1 < p else 0
    S[L[L_COUNTS] + C_CURSOR] = cursor


@njit(cache=True, fastmath=_FAST, error_model="numpy", nogil=True)
def backward(S, L, trace, slope, e, delta, gradient, fresh):
    """Add to the body's gradient what one sample gives: e (m,) is the loss's derivative by the outputs.

    `fresh` overwrites instead.
    """
    depth, p = L[L_DEPTH], L[L_FEATURES]
    h = L[L_SIZES + depth - 1]
    for i in range(h):
        delta[i] = 0.0
    for k in range(e.size):
        row = S[L[L_W] + k * p : L[L_W] + k * p + h]
        for i in range(h):
            delta[i] += e[k] * row[i]
    top, at = L[L_INPUTS], L[L_BODY]  # the ends of the layers in trace and in theta
    for layer in range(depth):
        top += L[L_SIZES + layer]
    for back in range(depth):
        layer = depth - 1 - back
        h = L[L_SIZES + layer]
        width = L[L_SIZES + layer - 1] if layer else L[L_INPUTS]
        top -= h
        at -= (width + 1) * h
        steep, a = slope[top : top + h], trace[top - width : top]
        for i in range(h):
            delta[i] *= steep[i]
        if fresh:
            for j in range(width):
                g = gradient[at + j * h : at + j * h + h]
                for i in range(h):
                    g[i] = a[j] * delta[i]
            g = gradient[at + width * h : at + width * h + h]
            for i in range(h):
                g[i] = delta[i]
        else:
            for j in range(width):
                g = gradient[at + j * h : at + j * h + h]
                for i in range(h):
                    g[i] += a[j] * delta[i]
            g = gradient[at + width * h : at + width * h + h]
            for i in range(h):
                g[i] += delta[i]
        if layer:
            below = delta[h : h + width]
            theta = S[L[L_THETA] + at : L[L_THETA] + at + width * h]
            for j in range(width):
                total = 0.0
                for i in range(h):
                    total += theta[j * h + i] * delta[i]
                below[j] = total
            for j in range(width):
                delta[j] = below[j]


@njit(cache=True, fastmath=_FAST, error_model="numpy", nogil=True)
def move(S, L, O, gradient):
    """One step of the body's optimizer, as `torch.optim` takes it."""
    q = L[L_BODY]
    theta, first, second = (
        S[L[L_THETA] : L[L_THETA] + q],
        S[L[L_FIRST] : L[L_FIRST] + q],
        S[L[L_SECOND] : L[L_SECOND] + q],
    )
    lr, decay, momentum, beta2, eps = O[O_LR], O[O_DECAY], O[O_MOMENTUM], O[O_BETA2], O[O_EPS]
    t = S[L[L_COUNTS] + C_STEPS]
    if L[L_OPTIMIZER] == ADAM:
        step = lr / (1.0 - momentum**t)
        shrink = 1.0 / math.sqrt(1.0 - beta2**t)
        for i in range(q):
            g = gradient[i] + decay * theta[i]
            first[i] += (1.0 - momentum) * (g - first[i])
            second[i] = beta2 * second[i] + (1.0 - beta2) * g * g
            theta[i] -= step * first[i] / (math.sqrt(second[i]) * shrink + eps)
    elif L[L_OPTIMIZER] == RMSPROP:
        for i in range(q):
            g = gradient[i] + decay * theta[i]
            second[i] = beta2 * second[i] + (1.0 - beta2) * g * g
            first[i] = momentum * first[i] + g / (math.sqrt(second[i]) + eps)
            theta[i] -= lr * first[i]
    else:
        nesterov = O[O_NESTEROV]
        for i in range(q):
            g = gradient[i] + decay * theta[i]
            first[i] = momentum * first[i] + g
            theta[i] -= lr * (first[i] + nesterov * (g + (momentum - 1.0) * first[i]))


@njit(cache=True, fastmath=_FAST, error_model="numpy", nogil=True)
def wake(S, L, x, y):
    """Give a scale to an input or a target that was constant and now is not; True where an input got one.

    All rows learned so far had the constant, which stands for zero, so what was learned from them stays exact.
    """
    woken = False
    for j in range(L[L_INPUTS]):
        if S[L[L_SCALE] + j] == 0.0:
            off = abs(x[j] - S[L[L_MEAN] + j])
            if off > _ROUNDING * abs(x[j]):
                S[L[L_SCALE] + j] = 1.0 / off
                woken = True
    for k in range(L[L_OUTPUTS]):
        if S[L[L_GAIN] + k] == 0.0 and y[k] != 0.0:
            S[L[L_GAIN] + k] = 1.0 / (y[k] * y[k])
    return woken


@njit(cache=True, fastmath=_FAST, error_model="numpy", nogil=True)
def learn(S, L, O, X, Y, weights, out, scratch):
    """Learn the rows of X (n, d) and Y (n, m) in batches, in order; out (n, m) takes the predictions made before.

    Returns how many rows were learned: fewer than n where a prediction is not finite, and there nothing changes.
    """
    n, d, m, p, q = X.shape[0], L[L_INPUTS], L[L_OUTPUTS], L[L_FEATURES], L[L_BODY]
    batch, depth = L[L_BATCH], L[L_DEPTH]
    room = L[L_TRACE]  # of one sample's trace
    traces, slopes = scratch[: batch * room], scratch[batch * room : 2 * batch * room]
    rest = scratch[2 * batch * room :]
    gradient, unit, b, e, delta = (
        rest[:q],
        rest[q : q + p],
        rest[q + p : q + 2 * p],
        rest[q + 2 * p : q + 2 * p + m],
        rest[q + 2 * p + m :],
    )
    lam = O[O_FORGETTING]
    at = 0
    while at < n:
        size = min(batch, n - at)
        total, size_of_all = 0.0, 0.0
        for i in range(size):
            trace = traces[i * room : (i + 1) * room]
            forward(S, L, X[at + i], trace, slopes[i * room : (i + 1) * room])
            phi = trace[room - p :]
            respond(S, L, phi, out[at + i])
            for j in range(p):
                size_of_all += phi[j] * phi[j]
            for k in range(m):
                size_of_all += out[at + i, k] * out[at + i, k]
            total += weights[at + i]
        if not math.isfinite(size_of_all):
            return at
        if L[L_STANDARDIZE]:
            for i in range(size):
                if weights[at + i] > 0.0 and wake(S, L, X[at + i], Y[at + i]):
                    forward(S, L, X[at + i], traces[i * room : (i + 1) * room], slopes[i * room : (i + 1) * room])
        if total > 0.0:
            S[L[L_COUNTS] + C_STEPS] += 1.0
            if lam < 1.0:
                forget(S, L, O)
            S[L[L_COUNTS] + C_MASS] += total
            for i in range(size):
                if weights[at + i] > 0.0:
                    phi = traces[(i + 1) * room - p : (i + 1) * room]
                    respond(S, L, phi, e)
                    for k in range(m):
                        e[k] = Y[at + i, k] - e[k]
                    learn_row(S, L, phi, 0, e, weights[at + i], b)
            if lam < 1.0:
                count = min(p, max(4 * size - 3, int(math.ceil(-p * math.log2(lam)))))
                restore(S, L, O, count, unit, e, b)
            if depth > 0:
                fresh = True
                for i in range(size):
                    trace = traces[i * room : (i + 1) * room]
                    respond(S, L, trace[room - p :], e)
                    for k in range(m):
                        e[k] = 2.0 * weights[at + i] * S[L[L_GAIN] + k] * (e[k] - Y[at + i, k]) / (size * m)
                    backward(S, L, trace, slopes[i * room : (i + 1) * room], e, delta, gradient, fresh)
                    fresh = False
                move(S, L, O, gradient)
        at += size
    return n


@njit(cache=True, fastmath=_FAST, error_model="numpy", nogil=True)
def predict(S, L, X, out, spread, scratch):
    """out (n, m) = Wφ for each row, and, where spread (n,) has room, φᵀBφ."""
    p, room = L[L_FEATURES], L[L_TRACE]
    trace, slope = scratch[:room], scratch[room : 2 * room]
    phi = trace[room - p :]
    for i in range(X.shape[0]):
        forward(S, L, X[i], trace, slope)
        respond(S, L, phi, out[i])
        if spread.size:
            total = 0.0
            for j in range(p):
                row = S[L[L_U] + j * (j - 1) // 2 : L[L_U] + j * (j - 1) // 2 + j]
                f = phi[j]
                for k in range(j):
                    f += row[k] * phi[k]
                total += S[L[L_D] + j] * f * f
            spread[i] = total
