"""The compiled step of the network and its experts: one call learns rows, so that an interrupt finds all or nothing.

Experts see z, the standardized inputs of the network's first rows, clipped at ±`CLIP` and 0 where missing, and targets
in units of their deviation.
"""

from __future__ import annotations

import numpy as np

from sepsa.stream.engine import kernels
from sepsa.stream.engine.kernels.head import rank_one
from sepsa.stream.engine.kernels.robust import (
    ROUNDING,
    STEP,
    follow_quantile,
    plausible_error,
    plausible_weight,
)
from sepsa.stream.engine.kernels.step import calibrate
from sepsa.stream.engine.layout import TEMPERATURES
from sepsa.stream.experts import layout as lay
from sepsa.stream.experts.bayes import FORGETTING, learn_class, posterior
from sepsa.stream.experts.compilation import borrowed, called, compiled
from sepsa.stream.experts.logistic import learn_logistic, probabilities
from sepsa.stream.experts.neighbours import neighbours
from sepsa.stream.experts.products import expand
from sepsa.stream.experts.stack import DISCOUNT, EVERY, OFTEN, remember, solve, weigh
from sepsa.stream.experts.trees import BINS, LATE, LEAST, LEAVES, SPLITS, TREES, add_trees, grow

CLIP = 8.0
FAR = 1e6  # deviations, to which a target is clipped


@called
def numbers(E, M, part, count):
    """A part (count,) of float64."""
    return E[M[part] : M[part] + count]


@called
def window_views(E, M):
    """The window: inputs (d, window), targets and sums of trees (window, m), weights and nodes (window,)."""
    d, m, n = M[lay.X_INPUTS], M[lay.X_OUTPUTS], M[lay.X_WINDOW]
    X = E[M[lay.P_ROWS] : M[lay.P_ROWS] + (d * n + 1) // 2].view(np.float32)[: d * n].reshape(d, n)
    Y = E[M[lay.P_TARGETS] : M[lay.P_TARGETS] + (n * m + 1) // 2].view(np.float32)[: n * m].reshape(n, m)
    F = E[M[lay.P_SUMS] : M[lay.P_SUMS] + (n * m + 1) // 2].view(np.float32)[: n * m].reshape(n, m)
    weights = E[M[lay.P_WEIGHTS] : M[lay.P_WEIGHTS] + (n + 1) // 2].view(np.float32)[:n]
    nodes = E[M[lay.P_NODES] : M[lay.P_NODES] + (n + 7) // 8].view(np.uint8)[:n]
    return X, Y, F, weights, nodes


@called
def tree_views(E, M):
    """Inputs and thresholds of splits (trees + 1, SPLITS) and values of leaves (trees + 1, LEAVES, m)."""
    m, count = M[lay.X_OUTPUTS], (TREES + 1) * SPLITS
    inputs = E[M[lay.P_SPLIT_INPUTS] : M[lay.P_SPLIT_INPUTS] + (count + 1) // 2].view(np.uint32)
    thresholds = E[M[lay.P_SPLIT_THRESHOLDS] : M[lay.P_SPLIT_THRESHOLDS] + (count + 1) // 2].view(np.float32)
    values = numbers(E, M, lay.P_VALUES, (TREES + 1) * LEAVES * m).reshape(TREES + 1, LEAVES, m)
    return (
        inputs[:count].reshape(TREES + 1, SPLITS),
        thresholds[:count].reshape(TREES + 1, SPLITS),
        values,
    )


@called
def workspaces(M, work):
    """z and x (d,), φ and b of the products, answers (experts + 2, m), y (m,), the stack's factor, and the rest."""
    d, m, p, J = M[lay.X_INPUTS], M[lay.X_OUTPUTS], M[lay.X_FEATURES], M[lay.X_EXPERTS]
    at = 2 * d + 2 * p
    answers, at = work[at : at + (J + 2) * m].reshape(J + 2, m), at + (J + 2) * m
    y, at = work[at : at + m], at + m
    factor, at = work[at : at + J * J].reshape(J, J), at + J * J
    return (
        work[:d],
        work[d : 2 * d],
        work[2 * d : 2 * d + p],
        work[2 * d + p : 2 * d + 2 * p],
        answers,
        y,
        factor,
        work[at:],
    )


@called
def errors_of_key(E, M, z):
    """The running mean (m,) of the network's errors in rows whose inputs of two values were those of z.

    Such inputs are the indicators of a key; without any, all rows have the same errors.
    """
    d, m = M[lay.X_INPUTS], M[lay.X_OUTPUTS]
    low, high = numbers(E, M, lay.P_LOW, d), numbers(E, M, lay.P_HIGH, d)
    binary, key = numbers(E, M, lay.P_BINARY, d), 0
    for j in range(d):
        if binary[j] == 1.0 and low[j] < high[j] and z[j] == high[j]:
            key = (31 * key + j + 1) % 65521
    return numbers(E, M, lay.P_KEYED, lay.SLOTS * m).reshape(lay.SLOTS, m)[key % lay.SLOTS]


@called
def logistic_views(E, M, work):
    """φ and b (d + 1,) in the workspace, and W (m, d + 1), U and D of the logistic expert."""
    m, q = M[lay.X_OUTPUTS], M[lay.X_INPUTS] + 1
    at = work.size - 2 * q
    W, U = numbers(E, M, lay.P_LOGIT_W, m * q).reshape(m, q), numbers(E, M, lay.P_LOGIT_U, q * (q - 1) // 2)
    return work[at : at + q], work[at + q :], W, U, numbers(E, M, lay.P_LOGIT_D, q)


@called
def class_views(E, M):
    """Means (m, d), discounted counts (m,) and squares (d,) of the classes."""
    d, m = M[lay.X_INPUTS], M[lay.X_OUTPUTS]
    means = numbers(E, M, lay.P_CLASS_MEANS, m * d).reshape(m, d)
    return means, numbers(E, M, lay.P_CLASS_COUNTS, m), numbers(E, M, lay.P_CLASS_SPREAD, d)


@called
def look_up(E, M, x, work):
    """Fill z, and the answers of the neighbours and trees, in the workspace, unless they are those of this row."""
    d, n = M[lay.X_INPUTS], M[lay.X_WINDOW]
    z, last, _, _, answers, _, _, rest = workspaces(M, work)
    counts, centre = numbers(E, M, lay.P_COUNTS, 8), numbers(E, M, lay.P_CENTRE, d)
    same = rest[0] == counts[lay.C_ROWS] + 1.0
    for j in range(d):
        same = same and last[j] == x[j]
    if same:
        return
    scale = numbers(E, M, lay.P_SCALE, d)
    for j in range(d):
        # Rounded as in the window, so that a threshold of a tree divides rows alike.
        z[j] = np.float32(min(max((x[j] - centre[j]) * scale[j], -CLIP), CLIP)) if x[j] == x[j] else 0.0
    X, Y, _, weights, _ = window_views(E, M)
    near = rest[1 + TREES :].view(np.float32)
    neighbours(
        X, Y, weights, int(counts[lay.C_FILLED]), z, numbers(E, M, lay.P_LOW, d), numbers(E, M, lay.P_HIGH, d),
        near[:n], near[n:].view(np.int32), answers[lay.NEAR],
    )  # fmt: skip
    inputs, thresholds, values = tree_views(E, M)
    add_trees(inputs, thresholds, values, z, rest[1 : 1 + TREES].view(np.int64), answers[lay.TREE])
    for j in range(d):
        last[j] = x[j]
    rest[0] = counts[lay.C_ROWS] + 1.0


@called
def answer(E, M, x, network, extra, out, work):
    """Answers (experts + 1, m) for a row x (d,), in the workspace, and their weighted sum in out (m,).

    `network` (m,) is the network's answer, which may lie in out, and `extra` (more, m) are those of the user's experts.
    """
    m, p, J = M[lay.X_OUTPUTS], M[lay.X_FEATURES], M[lay.X_EXPERTS]
    look_up(E, M, x, work)
    z, _, products, _, answers, _, _, _ = workspaces(M, work)
    unit = numbers(E, M, lay.P_UNIT, m)
    expand(z, products)
    W = numbers(E, M, lay.P_W, m * p).reshape(m, p)
    simple, errors = numbers(E, M, lay.P_SIMPLE, 2 * m).reshape(2, m), errors_of_key(E, M, z)
    if M[lay.X_CLASSES]:
        phi, _, W_logit, _, _ = logistic_views(E, M, work)
        phi[0] = 1.0
        for j in range(z.size):
            phi[j + 1] = z[j]
        probabilities(W_logit, phi, answers[lay.LOGISTIC])
        means, of_class, spread = class_views(E, M)
        posterior(means, of_class, spread, numbers(E, M, lay.P_COUNTS, 8)[lay.C_CLASSED], z, answers[lay.BAYES])
    stack, shares = numbers(E, M, lay.P_STACK, J - 1), numbers(E, M, lay.P_WEIGHT, J + 1)
    for k in range(m):
        a = min(max(network[k] * unit[k], -FAR), FAR)
        total, row = 0.0, W[k]
        for j in range(p):
            total += row[j] * products[j]
        answers[lay.NETWORK, k], answers[lay.PRODUCTS, k] = a, min(max(total, -FAR), FAR)
        answers[lay.LAST, k], answers[lay.MEAN, k] = simple[0, k], simple[1, k]
        answers[lay.ERRORS, k] = a + errors[k]
        for e in range(extra.shape[0]):
            answers[J - extra.shape[0] + e, k] = min(max(extra[e, k] * unit[k], -FAR), FAR)
        stacked = a
        for e in range(J - 1):
            stacked += stack[e] * (answers[e + 1, k] - a)
        answers[J, k] = stacked
        mixed = 0.0
        for e in range(J + 1):
            mixed += shares[e] * answers[e, k]
        out[k] = mixed / unit[k] if unit[k] > 0.0 else network[k]


@called
def learn_row(E, M, x, target, weight, out, work):
    """Learn a row of a positive weight, whose answers lie in the workspace and whose prediction was out (m,)."""
    d, m, p, J = M[lay.X_INPUTS], M[lay.X_OUTPUTS], M[lay.X_FEATURES], M[lay.X_EXPERTS]
    z, _, phi, b, answers, y, factor, rest = workspaces(M, work)
    counts, unit = numbers(E, M, lay.P_COUNTS, 8), numbers(E, M, lay.P_UNIT, m)
    centre, scale = numbers(E, M, lay.P_CENTRE, d), numbers(E, M, lay.P_SCALE, d)
    error = numbers(E, M, lay.P_ERROR, 3 * m).reshape(m, 3)
    error_run = numbers(E, M, lay.P_ERROR_RUN, 3 * m).reshape(m, 3)
    robust, classes = M[lay.X_ROBUST], M[lay.X_CLASSES]
    for j in range(d):
        if scale[j] == 0.0 and x[j] == x[j] and abs(x[j] - centre[j]) > ROUNDING * abs(x[j]):
            scale[j] = 1.0 / min(max(abs(x[j] - centre[j]), 1e-100), 1e100)
            z[j] = 1.0 if x[j] > centre[j] else -1.0
    share = 1.0
    if robust:
        omega = plausible_weight(weight, counts[lay.C_WEIGHT])
        share = min(omega / counts[lay.C_WEIGHT], 10.0) if counts[lay.C_WEIGHT] > 0.0 else 1.0
        counts[lay.C_WEIGHT] += 0.01 * (omega - counts[lay.C_WEIGHT]) if counts[lay.C_WEIGHT] > 0.0 else omega
    else:
        counts[lay.C_WEIGHT] = counts[lay.C_WEIGHT] if counts[lay.C_WEIGHT] > 0.0 else weight
        share = min(weight / counts[lay.C_WEIGHT], 1e6)
    trust, label = 1.0, 0
    for k in range(m):
        if unit[k] == 0.0 and target[k] != 0.0:
            unit[k] = 1.0 / min(max(abs(target[k]), 1e-100), 1e100)
        y[k] = min(max(target[k] * unit[k], -FAR), FAR)
        if robust and not classes:
            predicted = min(max(out[k] * unit[k], -FAR), FAR)
            off, limit = y[k] - predicted, 2.0 * plausible_error(error, k)
            for t in range(3):
                error[k, t], error_run[k, t] = follow_quantile(
                    abs(off), error[k, t], error_run[k, t], (0.5, 0.8, 0.9)[t], 2.0 * STEP if t == 2 else STEP
                )
            if abs(off) > limit:
                trust = min(trust, limit / abs(off))
                y[k] = predicted + min(max(off, -limit), limit)
    if classes:
        for k in range(m):
            if y[k] > y[label]:
                label = k
        calibrate(numbers(E, M, lay.P_CALIBRATION, TEMPERATURES), out, label, share, 1.0, answers[J + 1])
    counts[lay.C_ROWS] += 1.0
    counts[lay.C_EVIDENCE] = DISCOUNT * counts[lay.C_EVIDENCE] + share
    losses, weights = numbers(E, M, lay.P_LOSS, J + 1), numbers(E, M, lay.P_WEIGHT, J + 1)
    for e in range(J + 1):
        loss = 0.0
        for k in range(m):
            off = min(abs(answers[e, k] - y[k]), FAR)
            loss += off * off
        losses[e] = DISCOUNT * losses[e] + share * loss
    best = weigh(losses, counts[lay.C_EVIDENCE], weights)
    if best != counts[lay.C_BEST]:
        counts[lay.C_BEST], counts[lay.C_SINCE] = best, counts[lay.C_ROWS]
    gram = numbers(E, M, lay.P_GRAM, (J - 1) * (J - 1)).reshape(J - 1, J - 1)
    moment, stack = numbers(E, M, lay.P_MOMENT, J - 1), numbers(E, M, lay.P_STACK, J - 1)
    remember(gram, moment, answers, y, share)
    if counts[lay.C_ROWS] <= OFTEN or counts[lay.C_ROWS] % EVERY == 0.0:
        solve(gram, moment, factor, stack)
    W, D = numbers(E, M, lay.P_W, m * p).reshape(m, p), numbers(E, M, lay.P_D, p)
    expand(z, phi)
    g = rank_one(numbers(E, M, lay.P_U, p * (p - 1) // 2), D, phi, 0, share * trust, b)
    simple, errors = numbers(E, M, lay.P_SIMPLE, 2 * m).reshape(2, m), errors_of_key(E, M, z)
    for k in range(m):
        row, step = W[k], share * trust * (y[k] - answers[lay.PRODUCTS, k]) / g
        for j in range(p):
            row[j] += step * b[j]
        off = y[k] - answers[lay.NETWORK, k]
        simple[0, k] = y[k]
        simple[1, k] += (y[k] - simple[1, k]) / counts[lay.C_ROWS]
        errors[k] += 0.5 * (off - errors[k])
    if classes:
        phi, b, W, U, D = logistic_views(E, M, work)
        learn_logistic(U, D, W, phi, answers[lay.LOGISTIC], y, share * trust, b)
        counts[lay.C_CLASSED] = FORGETTING * counts[lay.C_CLASSED] + share
        means, of_class, spread = class_views(E, M)
        learn_class(means, of_class, spread, label, z, share)
    enter(E, M, z, y, share, answers[lay.TREE], rest[1 : 1 + TREES].view(np.int64))


@called
def enter(E, M, z, y, share, sums, leaves):
    """Put a row into the window, in the place of the oldest once it is full, and go on with the tree in growth.

    `sums` (m,) and `leaves` (trees,) are what the trees told of it.
    """
    d, m, n, chosen = M[lay.X_INPUTS], M[lay.X_OUTPUTS], M[lay.X_WINDOW], M[lay.X_TREE_INPUTS]
    counts = numbers(E, M, lay.P_COUNTS, 8)
    low, high = numbers(E, M, lay.P_LOW, d), numbers(E, M, lay.P_HIGH, d)
    X, Y, F, weights, nodes = window_views(E, M)
    at = int(counts[lay.C_NEXT])
    binary, first = numbers(E, M, lay.P_BINARY, d), counts[lay.C_FILLED] == 0.0
    for j in range(d):
        X[j, at] = z[j]
        if low[j] < high[j] and z[j] != low[j] and z[j] != high[j]:
            binary[j] = 0.0
        low[j], high[j] = z[j] if first else min(low[j], z[j]), z[j] if first else max(high[j], z[j])
    for k in range(m):
        Y[at, k], F[at, k] = y[k], sums[k]
    leaf_of_row = E[M[lay.P_LEAF_OF_ROW] : M[lay.P_LEAF_OF_ROW] + (TREES * n + 7) // 8].view(np.uint8)
    for t in range(TREES):
        leaf_of_row[t * n + at] = leaves[t]
    weights[at], nodes[at] = share, LATE
    counts[lay.C_NEXT], counts[lay.C_FILLED] = (at + 1) % n, min(counts[lay.C_FILLED] + 1.0, n)
    if counts[lay.C_FILLED] >= 2.0 * LEAST:
        inputs, thresholds, values = tree_views(E, M)
        bins = E[M[lay.P_BINS] : M[lay.P_BINS] + (n * chosen + 7) // 8].view(np.uint8)[: n * chosen]
        edges = numbers(E, M, lay.P_EDGES, (chosen * (BINS - 1) + 1) // 2).view(np.float32)
        grow(
            X, Y, F, weights, int(counts[lay.C_FILLED]), numbers(E, M, lay.P_GROWTH, 6),
            numbers(E, M, lay.P_CHOSEN, chosen).view(np.int64),
            edges[: chosen * (BINS - 1)].reshape(chosen, BINS - 1),
            numbers(E, M, lay.P_DIRECTION, m), inputs, thresholds, values,
            numbers(E, M, lay.P_CUTS, (SPLITS + 7) // 8).view(np.uint8), numbers(E, M, lay.P_LEAF_COUNTS, LEAVES),
            numbers(E, M, lay.P_HISTOGRAMS, LEAVES // 2 * chosen * BINS).view(np.int64), nodes,
            leaf_of_row[: TREES * n].reshape(TREES, n), numbers(E, M, lay.P_PACKED, n).view(np.int64),
            bins.reshape(chosen, n),
        )  # fmt: skip


@compiled
def learn(S, L, opt, body_dtype, X, Y, weights, out, workspace, E, M, extra, work):
    """Learn rows as `kernels.learn` does, then the experts, row by row; `extra` (n, more, m) are the user's experts'.

    out (n, m) takes the mixtures' predictions made before. Returns how many rows were learned: fewer than n where the
    network's prediction is not finite.
    """
    S, L, X, Y, out, workspace = borrowed(S), borrowed(L), borrowed(X), borrowed(Y), borrowed(out), borrowed(workspace)
    E, M, extra, work = borrowed(E), borrowed(M), borrowed(extra), borrowed(work)
    done = kernels.learn(S, L, opt, body_dtype, X, Y, weights, out, workspace)
    if done < X.shape[0]:
        return done
    for i in range(X.shape[0]):
        answer(E, M, X[i], out[i], extra[i], out[i], work)
        if weights[i] > 0.0:
            learn_row(E, M, X[i], Y[i], weights[i], out[i], work)
    return done


@compiled
def predict(S, L, body_dtype, X, out, leverage, workspace, E, M, extra, work):
    """out (n, m): the mixtures' predictions; leverage (n,), if not empty: the network's φᵀBφ."""
    S, L, X, out, workspace = borrowed(S), borrowed(L), borrowed(X), borrowed(out), borrowed(workspace)
    E, M, extra, work = borrowed(E), borrowed(M), borrowed(extra), borrowed(work)
    kernels.predict(S, L, body_dtype, X, out, leverage, workspace)
    for i in range(X.shape[0]):
        answer(E, M, X[i], out[i], extra[i], out[i], work)
