"""One update of a cross-entropy head as one compiled call: `cross_entropy.math.learned` in loops, symbols as there.

A call reads one state and changes a copy of it in place, so that it learns everything or nothing. What a head has
several of, one for each output that learns separately, it learns one after the other.
"""

from __future__ import annotations

import math
import struct

import numpy as np

from sepsa.compiled.kernels import array_at, called, kernel
from sepsa.compiled.least_squares import (
    PRODUCT_LIMIT,
    fits,
    follow,
    matrices,
    read_features,
    restored_coordinate,
    restored_count,
)
from sepsa.compiled.linear_algebra import (
    add_product,
    add_scaled,
    add_solution,
    backward,
    backward_row,
    cholesky,
    copy,
    forward,
    forward_row,
    scale,
    sum_of_squares,
)

# What this form of the update shares with that in torch.
FADE = 7.0  # how many old samples a new one replaces in the curvature
TOLERANCE = 1e-3  # of the sum of a sample's class probabilities: float16 and bfloat16 round them
EPSILON, TINY = 2.0**-52, 2.0**-1022


@called
def residuals_of(W, Phi, labels, targets, omega, weights, smoothing, R, U):
    """R and U (K, n) of (1) at the head W; returns Σ m, which is NaN where targets or features are not valid.

    Without `labels` the `targets` are probabilities, and without `omega` all samples have the weight 1.
    """
    (n, p), K, C = Phi.shape, W.shape[0], weights.size
    samples, first = 0.0, C - K  # one output is the logit of class 1 against a 0 for class 0
    for i in range(n):
        m, total = 0.0, 0.0
        for c in range(C):
            if labels.size:
                t = 1.0 if labels[i] == c else 0.0
            elif first and c == 0:
                t = 1.0 - targets[i, 0]
            else:
                t = targets[i, c - first]
            if not t >= 0.0:
                return np.nan
            total += t
            t = ((1.0 - smoothing) * t + smoothing / C) * weights[c] * (omega[i] if omega.size else 1.0)
            m += t
            if c >= first:
                U[c - first, i] = t
        if not abs(total - 1.0) <= TOLERANCE:
            return np.nan
        samples += m
        largest = 0.0 if first else -np.inf
        for c in range(K):
            logit = 0.0
            for j in range(p):
                logit += W[c, j] * Phi[i, j]
            R[c, i] = logit
            largest = max(largest, logit)
        whole = math.exp(-largest) if first else 0.0
        for c in range(K):
            R[c, i] = math.exp(R[c, i] - largest)
            whole += R[c, i]
        for c in range(K):
            P = R[c, i] / whole
            R[c, i] = m * P - U[c, i]
            U[c, i] = (m * P * (1.0 - P) + R[c, i] ** 2 / max(m, TINY)) / 2.0
    return samples if sum_of_squares(Phi) < np.inf else np.nan


@called
def factor(A, inverse):
    """The lower triangle of A becomes the factor of I + A, as `least_squares.math.root` has it."""
    trace = np.trace(A)
    for i in range(A.shape[0]):
        A[i, i] += 1.0 + 4.0 * EPSILON * trace
    return cholesky(A, inverse)


@called
def absorb_rows(T, W, F, E, d, V, M, C, inverse):
    """The rows F (r, p) join T in place, and W takes the step of (2): r x r systems, V = FT and M = FFᵀ."""
    r, p = F.shape
    V[:] = 0.0
    M[:] = 0.0
    add_product(M, F, F, True)
    for i in range(r):
        for j in range(i + 1):
            C[i, j] = d[i] * M[i, j] * d[j]
        for j in range(p):
            add_scaled(T[j], F[i, j], V[i])
    if not factor(C, inverse) or not factor(M, inverse):
        return False
    for o in range(W.shape[0]):
        forward_row(C, E[o])
        backward_row(C, E[o])
        for i in range(r):
            add_scaled(V[i], -d[i] * E[o, i], W[o])
    forward(M, V)
    for i in range(r):
        M[i, i] += 1.0
    backward(M, V)
    for j in range(p):
        for i in range(r):
            add_scaled(V[i], -F[i, j], T[j])
    return True


@called
def absorb_columns(T, W, F, E, d, G, C, x, inverse):
    """The same by p x p systems, for p rows or more; G (p, r) and x are buffers."""
    r, p = F.shape
    for inflates in (True, False):
        for i in range(r):
            for j in range(p):
                G[j, i] = F[i, j] * (d[i] if inflates else 1.0)
        C[:] = 0.0
        add_product(C, G, G, True)
        if not factor(C, inverse):
            return False
        for o in range(W.shape[0] if inflates else 0):
            x[:] = 0.0
            for i in range(r):
                add_scaled(F[i], -d[i] * E[o, i], x)
            add_solution(C, x, T, W[o])
    forward(C, T)
    return True


@called
def blended(shares, U, samples, seen, p, forgetting, s):
    """λ and ρ of (2), after `seen` samples; Σ U of each class in place, and its factor s."""
    K, classes = shares.size, min(shares.size, 2)
    total = seen + (FADE + 1.0) * p
    lam = min(total / (total + FADE * samples), forgetting)
    whole, sums, most = 0.0, 0.0, 0.0
    for c in range(K):
        s[c] = U[c].sum()
        whole += s[c]
        shares[c] = lam * shares[c] + (1.0 - lam) + s[c]
        sums += shares[c]
    for c in range(K):
        mine, s[c] = s[c], classes * shares[c] / sums
        most = max(most, mine / s[c])
    return lam, max(1.0, most * classes / max(whole, TINY))


@called
def gather(T, W, prior, Phi, ridge, left, cursor, U, s, rho, faded, F, E, d):
    """The rows that A gains as T sees them, F, the residuals of (2), which E has as R, and the inflation D; `left` gets
    its ridge back.
    """
    (n, p), K = Phi.shape, W.shape[0]
    F[:] = 0.0
    add_product(F[:n], Phi, T, False)
    for i in range(n):
        d[i], by = math.sqrt(rho), math.sqrt(U[:, i].sum())
        scale(F[i], by * faded)
        for c in range(K):
            E[c, i] /= s[c] * max(by, TINY) * d[i]
    for i in range(n, F.shape[0]):
        at = restored_coordinate(cursor, i - n, p)
        d[i], by = 1.0, math.sqrt(max(0.0, ridge[at] - left[at]))
        left[at] = ridge[at]
        for j in range(p):
            F[i, j] = by * faded * T[j, at]
        for c in range(K):
            E[c, i] = by * (W[c, at] - prior[c, at])


@called
def learn(state, prior, labels, targets, omega, weights, ridge, settings, work):
    """Learn rows with one curvature, in place; W is that of the head. False: another route must learn them."""
    T, W, shares, left, counters = state
    F, V, M, C, E, U, scratch, Phi = work
    (r, p), K, n = F.shape, W.shape[0], Phi.shape[0]
    d, inverse, s, x = scratch[0, :r], scratch[1], scratch[2, :K], scratch[3, :p]
    samples = residuals_of(W, Phi, labels, targets, omega, weights, settings[1], E, U)
    if not samples < np.inf:
        return False
    lam, rho = blended(shares, U, samples, counters[1], p, settings[0], s)
    faded, cursor = 1.0 / math.sqrt(lam), int(counters[2])
    scale(left, lam)
    gather(T, W, prior, Phi, ridge, left, cursor, U, s, rho, faded, F, E, d)
    if not sum_of_squares(F) <= PRODUCT_LIMIT:
        return False
    for j in range(p):
        scale(T[j], faded)
    if r < p:
        learned = absorb_rows(T, W, F, E, d, V, M, C, inverse)
    else:
        learned = absorb_columns(T, W, F, E, d, V, C, x, inverse)
    counters[0] += 1.0
    counters[1] += samples
    counters[2] = restored_coordinate(cursor, r - n, p)
    return learned and sum_of_squares(T) + counters[1] + shares.sum() < np.inf


# What a call gets: the addresses of its own numbers; of the new T, shares, ridge_left, counters and W; of these as
# they are before, the prior, the class weights and the ridge; of the head's weight, and its bias or 0;
# of features, and whether they are in float32; of labels or probabilities, and the columns of these; of sample weights
# or 0, and of a buffer. Then how many curvatures there are, the outputs of each, the inputs of the head, whether its
# weights are in float32, and whether a curvature without samples stays; forgetting and smoothing.
CALL = struct.Struct("27q2d")


@called
def shapes_of_work(n: int, r: int, p: int, K: int) -> tuple[tuple[int, int], ...]:
    """The shapes of the matrices of an update's buffer: F, V or G, M, C, E, U, rows of scratch, and Φ."""
    q, most = min(r, p), max(r, p)
    return (r, p), (q, most), (q, q), (q, q), (K, r), (K, n), (4, max(most, K)), (n, p)


work_at = matrices(8)


@kernel
def update(model, n):
    """Let a head learn n rows. False: another route must learn them."""
    heads, K, k, single, keeps = model[22], model[23], model[24], model[25], model[26]
    settings = array_at(model[0] + 216, (2,), np.float64)
    m, p = heads * K, k + (1 if model[15] else 0)
    W, old_W = array_at(model[5], (m, p), np.float64), array_at(model[10], (m, p), np.float64)
    prior, weights = array_at(model[11], (m, p), np.float64), array_at(model[12], (heads, max(K, 2)), np.float64)
    ridge = array_at(model[13], (p,), np.float64)
    omega = array_at(model[20], (n if model[20] else 0, heads), np.float64)
    labels = array_at(model[18], (0 if model[19] else n,), np.int64)
    targets = array_at(model[18], (n, model[19]), np.float64)
    work = work_at(model[21], shapes_of_work(n, n + restored_count(p, settings[0], 0, n), p, K))
    read_features(model[16], model[17], k, work[7])
    follow(old_W, (model[14], model[15], single, k), W)
    for part, size in enumerate((heads * p * p, m, heads * p, heads * 3)):
        copy(array_at(model[6 + part], (size,), np.float64), array_at(model[1 + part], (size,), np.float64))
    for i in range(heads):
        mine, own = slice(i * K, i * K + K), omega[:, i]
        if keeps and omega.size and not own.any():
            continue
        state = (
            array_at(model[1] + 8 * i * p * p, (p, p), np.float64),
            W[mine],
            array_at(model[2] + 8 * i * K, (K,), np.float64),
            array_at(model[3] + 8 * i * p, (p,), np.float64),
            array_at(model[4] + 24 * i, (3,), np.float64),
        )
        if not learn(state, prior[mine], labels, targets[:, mine], own, weights[i], ridge, settings, work):
            return False
    return fits(W, single)
