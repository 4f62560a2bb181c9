"""The compiled SepSA iteration for a multilayer perceptron: one pass over samples in one call, without allocation.

Symbols are those of `sepsa.heads.rls`: φ (p,) the features the head sees, W (m, p) the head, B = A⁻¹ the inverse
curvature, λ the forgetting. B is stored as UDUᵀ, U unit upper triangular with its columns one after the other, D
diagonal. A row that stands for ω samples costs one pass over U (Bierman), 3p²/2 multiply-adds, and leaves D positive:

    f = Uᵀφ,  v = Df,  α_j = α_{j-1} + ω v_j f_j,  α_{-1} = 1
    D_j <- D_j α_{j-1}/α_j,   U_ij <- U_ij - ω (f_j/α_{j-1}) b_i,   b_i <- b_i + U_ij v_j  for i < j,   b_j = v_j
    W <- W + ω (y - Wφ) bᵀ/α_{p-1},   since b ends as Bφ and α as 1 + ωφᵀBφ                               (17), (18)

The state of a learner is one float64 vector S, and its sizes are one integer vector L (`engine.layout`), so that a call
passes few arguments and a copy is one copy. The body may be float32: its parts of S are then read as float32, and
`body_dtype`, an array of no elements, says which.
"""

from __future__ import annotations

import math

from sepsa.stream.engine.kernels.body import backward, forward, optimizer_step
from sepsa.stream.engine.kernels.compilation import compiled, inlined
from sepsa.stream.engine.kernels.head import (
    answer,
    head_at,
    head_numbers,
    head_views,
    head_weights,
    learn_row,
    mix,
    restore,
    seen_by,
    weigh_heads,
)
from sepsa.stream.engine.kernels.robust import (
    HUGE,
    STEP,
    clip_to_range,
    follow_inputs,
    follow_quantile,
    huber_weight,
    plausible_error,
    plausible_weight,
    rescale_changed_inputs,
    scale_constant_inputs,
)
from sepsa.stream.engine.layout import (
    C_BEST,
    C_EVIDENCE,
    C_OUTLIERS,
    C_STEPS,
    C_WEIGHT,
    COUNTS,
    H_CURSOR,
    H_FORGETTING,
    H_LOSS,
    H_RIDGE,
    H_SAMPLES,
    H_WEIGHT,
    L_ACTIVATION,
    L_ACTIVATIONS,
    L_BATCH,
    L_BODY,
    L_CALIBRATION,
    L_CLASSES,
    L_COUNTS,
    L_DEPTH,
    L_ERROR,
    L_ERROR_RUN,
    L_FEATURES,
    L_FIRST,
    L_GAIN,
    L_HEADS,
    L_INPUTS,
    L_LATE,
    L_MEAN,
    L_OPTIMIZER,
    L_OUTPUTS,
    L_RANGE,
    L_ROBUST,
    L_SCALE,
    L_SECOND,
    L_SIZES,
    L_STANDARDIZE,
    L_THETA,
    L_TYPICAL,
    L_TYPICAL_RUN,
    L_USUAL,
    L_WIDEST,
    O_CALIBRATION,
    O_DISCOUNT,
    O_POWER,
    TEMPERATURES,
)


@inlined
def view(S, start, length):
    """A part of S."""
    return S[start : start + length]


@inlined
def body_view(S, start, q, body_dtype):
    """One of theta, first and second, (q,) in the body's dtype."""
    return S[start : start + (q * body_dtype.itemsize + 7) // 8].view(body_dtype.dtype)[:q]


@inlined
def add_head_losses(S, L, opt, answers, Y, omegas, gain, error, counts):
    """Add to each head's discounted loss the errors of its answers (n, heads, m), made before the rows of Y (n, m)."""
    heads, m, robust = L[L_HEADS], L[L_OUTPUTS], L[L_ROBUST]
    for h in range(heads):
        S[L[head_at(L, h) + 3] + H_LOSS] *= opt[O_DISCOUNT]
    counts[C_EVIDENCE] *= opt[O_DISCOUNT]
    for i in range(Y.shape[0]):
        share = omegas[i] / counts[C_WEIGHT] if counts[C_WEIGHT] > 0.0 else 1.0
        counts[C_EVIDENCE] += share
        for h in range(heads):
            loss = 0.0
            for k in range(m):
                off = abs(answers[(i * heads + h) * m + k] - Y[i, k])
                if robust:
                    off = min(off, 2.0 * plausible_error(error, k), HUGE)
                loss += gain[k] * off * off
            S[L[head_at(L, h) + 3] + H_LOSS] += share * loss


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


@compiled
def learn(S, L, opt, body_dtype, X, Y, weights, out, workspace):
    """Learn the rows of X (n, d) and Y (n, m) in batches, in order; out (n, m) takes the predictions made before.

    Returns how many rows were learned: fewer than n where a prediction is not finite, and there nothing changes.
    The part `unit` of the workspace is zero before and after a call.
    """
    n, d, m, P, q, heads = X.shape[0], L[L_INPUTS], L[L_OUTPUTS], L[L_FEATURES], L[L_BODY], L[L_HEADS]
    batch, width, standardize, robust = L[L_BATCH], L[L_ACTIVATIONS], L[L_STANDARDIZE], L[L_ROBUST]
    code, optimizer, sizes = L[L_ACTIVATION], L[L_OPTIMIZER], L[L_SIZES : L_SIZES + L[L_DEPTH]]
    hidden = sizes[sizes.size - 1] if sizes.size else 0
    theta = body_view(S, L[L_THETA], q, body_dtype)
    first, second = body_view(S, L[L_FIRST], q, body_dtype), body_view(S, L[L_SECOND], q, body_dtype)
    gain, counts = view(S, L[L_GAIN], m), view(S, L[L_COUNTS], COUNTS)
    calibration = view(S, L[L_CALIBRATION], TEMPERATURES)
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
                            theta, sizes, code, mean, scale, typical, robust, X[at + i], activations[i], slopes[i],
                            phis[i],
                        )  # fmt: skip
            if robust:
                total = 0.0
                for i in range(size):
                    omegas[i] = plausible_weight(weights[at + i], counts[C_WEIGHT])
                    if omegas[i] > 0.0:
                        omegas[i] *= follow_inputs(X[at + i], mean, scale, typical, typical_run)
                    total += omegas[i]
            counts[C_STEPS] += 1.0
            if heads > 1:
                add_head_losses(S, L, opt, answers, Y[at : at + size], omegas, gain, error, counts)
                weigh_heads(S, L, opt[O_POWER], counts[C_EVIDENCE], counts)
            leverage = 0.0
            known = size == 1 and not rescaled  # whether `answers` holds the heads' outputs after their update
            for h in range(heads):
                if heads > 1:  # the views of a single head are made before the loop
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
                        else:  # the head has not changed since the prediction
                            for k in range(m):
                                e[k] = answers[h * m + k]
                        for k in range(m):
                            y = min(max(Y[at + i, k], -HUGE), HUGE) if robust else Y[at + i, k]
                            e[k] = y - e[k]
                        omega = omegas[i] * huber_weight(e, error) if robust else omegas[i]
                        if omega > 0.0:
                            alpha = learn_row(U, D, W, energy, seen, 0, e, omega, b[:p])
                            if h == counts[C_BEST]:
                                leverage = (alpha - 1.0) / omega
                            if size == 1:  # the head's output after the update, whose error is e/α
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
                            e[k] = min(max(Y[at + i, k], -HUGE), HUGE) - out[at + i, k]
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
                        off = min(max(Y[at + i, k], -HUGE), HUGE) - out[at + i, k]
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
                            step = 2.0 * STEP if t == 2 else STEP
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
                rescale_changed_inputs(S, L, typical, usual, late)
        at += size
    return n


@compiled
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
