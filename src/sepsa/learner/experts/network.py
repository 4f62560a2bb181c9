"""The network: a multilayer perceptron with recursive-least-squares heads, the first expert.

It learns rows in batches and owns what all experts share: the scales of the inputs and outputs, the typical weight of a
row, and the losses by which scores become probabilities. The body is float32.
"""

from __future__ import annotations

import math

import numpy as np

from sepsa.compiled.kernels import called, inlined, kernel
from sepsa.compiled.linear_algebra import add_scaled, fill, multiply, scale
from sepsa.learner.arithmetic.body import adam_step, backward, forward
from sepsa.learner.arithmetic.head import learn_row, leverage
from sepsa.learner.arithmetic.robust import (
    FAR,
    FOLLOW_WEIGHT,
    HUGE,
    clip_to_range,
    follow_errors,
    follow_inputs,
    huber_weight,
    plausible_error,
    plausible_weight,
    scale_constant_inputs,
)
from sepsa.learner.arithmetic.weigh import weigh
from sepsa.learner.experts.frame import Expert, clipped, given, size
from sepsa.learner.experts.network_parts import HIDDEN, heads, parts
from sepsa.restoration import due

coordinates_due = inlined(due)  # how many coordinates get their ridge back, as in every head

# ---------------------------------------------------------------------- answers


@inlined
def seen_by(model, phi, h):
    """The part of φ that head h sees."""
    hidden, d = size.hidden(model), size.inputs(model)
    if heads.subset(model, h) == HIDDEN:
        return phi[hidden + d + 1 : 2 * hidden + d + 2]
    return phi[hidden - heads.units(model, h) : hidden + d + 1]


@called
def pass_forward(model, i):
    """Compute the units, slopes and φ of row i of the batch."""
    theta, widths, code = parts.THETA(model), given.WIDTHS(model), size.activation(model)
    (mean, scale, typical, excess), robust = parts.views("MEAN SCALE TYPICAL EXCESS", model), size.robust(model)
    units, slopes, phi = parts.UNITS(model)[i], parts.SLOPES(model)[i], parts.PHI(model)[i]
    forward(theta, widths, code, mean, scale, typical, excess, robust, given.X(model)[i], units, slopes, phi)
    return 0


@kernel
def ask_heads(model, i):
    """Predict row i of the batch by the mixture of the heads; returns whether all is finite."""
    pass_forward(model, i)
    phi, out, answers, weights = parts.PHI(model)[i], given.OUT(model)[i], parts.HEADS(model)[i], parts.WEIGHTS(model)
    for h in range(size.heads(model)):
        multiply(heads.W(model, h), seen_by(model, phi, h), answers[h])
    fill(out, 0.0)
    for h in range(size.heads(model)):
        add_scaled(answers[h], weights[h], out)
    magnitude = 0.0
    for j in range(size.features(model)):
        magnitude += phi[j] * phi[j]
    for k in range(out.size):
        magnitude += out[k] * out[k]
    if size.robust(model):
        clip_to_range(out, parts.RANGE(model))
    return 1 if math.isfinite(magnitude) else 0


# ---------------------------------------------------------------------- the weights of rows and the scales


@called
def weigh_rows(model, rows):
    """Fill the weights of the batch's rows; returns whether an input that was constant so far got a scale."""
    x, y, weights, rescaled = given.X(model), given.Y(model), given.WEIGHT(model), False
    mean, scale, centre, typical, typical_run = parts.views("MEAN SCALE CENTRE TYPICAL TYPICAL_RUN", model)
    excess, counts, omega, share, gain = parts.views("EXCESS COUNTS OMEGA SHARE GAIN", model)
    if size.standardize(model):
        for i in range(rows):
            if weights[i] > 0.0 and scale_constant_inputs(mean, scale, gain, x[i], y[i]):
                rescaled = True
        if rescaled:
            for i in range(rows):
                pass_forward(model, i)
    for i in range(rows):
        omega[i] = weights[i]
        if size.robust(model):
            omega[i] = plausible_weight(weights[i], counts.weight)
            if omega[i] > 0.0:
                omega[i] *= follow_inputs(x[i], mean, scale, centre, typical, typical_run, excess)
        share[i] = omega[i] / counts.weight if counts.weight > 0.0 else 1.0
    return rescaled


@called
def rescale_input(model, j, g):
    """Divide the scale of input j by g: φ_j <- φ_j/g, with W_j <- gW_j and B <- SBS, S = diag(1, .., g, .., 1).

    With B = UDUᵀ that is U <- SUS⁻¹ and D <- DS², so that the head stays exact. The body's weights do not change. An
    input that was too small to inform the head starts from the prior again.
    """
    parts.SCALE(model)[j] /= g
    parts.TYPICAL(model)[j] /= g
    for h in range(size.heads(model)):
        if heads.subset(model, h) == HIDDEN:
            continue
        p, ridge = heads.p(model, h), heads.NUMBERS(model, h).ridge
        W, U, D, ridge_left, prior = heads.views("W U D RIDGE PRIOR", model, h)
        r = p - 1 - size.inputs(model) + j
        anew = g < 1.0 and D[r] * ridge_left[r] > 0.5
        down, up = (0.0, 0.0) if anew else (1.0 / g, g)
        scale(U[r * (r - 1) // 2 : r * (r + 1) // 2], down)
        for c in range(r + 1, p):
            U[c * (c - 1) // 2 + r] *= up
        D[r] = 1.0 / ridge if anew else D[r] * g * g
        ridge_left[r] = ridge if anew else ridge_left[r] / (g * g)
        scale(W[:, r], up)
        scale(prior[:, r], up)


@inlined
def rescale_changed_inputs(model):
    """Rescale inputs whose typical distance has changed by a factor of 4 for 64 rows, or at once where it is extreme.

    An input that was constant in the first rows had a distance of 0.7, about that of a normal distribution.
    """
    typical, usual, late = parts.views("TYPICAL USUAL LATE", model)
    for j in range(typical.size):
        if typical[j] > 0.0:
            change = typical[j] / (usual[j] if usual[j] > 0.0 else 0.7)
            late[j] = late[j] + 1.0 if change > 4.0 or change < 0.25 else 0.0
            if late[j] > 64.0 or (late[j] > 0.0 and (change > 12.0 or change < 1.0 / 64.0)):
                rescale_input(model, j, min(max(change, 1e-3), 1e3))
                late[j] = 0.0


# ---------------------------------------------------------------------- learning


@called
def score_heads(model, rows):
    """Add the errors of the batch to each head's discounted loss, and weigh the heads by their losses."""
    options, y, count, robust = given.OPTIONS(model), given.Y(model), size.heads(model), size.robust(model)
    counts, answers, gain, error = parts.views("COUNTS HEADS GAIN ERROR", model)
    losses, weights, shares = parts.views("LOSSES WEIGHTS SHARE", model)
    counts.evidence *= options.discount
    scale(losses, options.discount)
    for i in range(rows):
        counts.evidence += shares[i]
        for h in range(count):
            loss = 0.0
            for k in range(gain.size):
                off = abs(answers[i, h, k] - y[i, k])
                if robust:
                    off = min(off, FAR * plausible_error(error, k), HUGE)
                loss += gain[k] * off * off
            losses[h] += shares[i] * loss
    best = weigh(losses, 0.5 * options.power * counts.evidence, 1e-300, 0.0, weights)
    if best != counts.best:
        counts.best, counts.since = best, counts.steps


@inlined
def target(model, i, k):
    """Target k of row i of the batch, within ±`HUGE` where the engine is robust."""
    y = given.Y(model)[i, k]
    return clipped(y, HUGE) if size.robust(model) else y


@inlined
def weight_of_error(model, i, answer, e):
    """Fill the error of an answer (m,) to row i of the batch; returns the row's weight by it."""
    for k in range(e.size):
        e[k] = target(model, i, k) - answer[k]
    return huber_weight(e, parts.ERROR(model)) if size.robust(model) else 1.0


@inlined
def absorb(model, h, rows, rescaled):
    """Let head h learn the batch; returns φᵀBφ of the last row."""
    W, U, D, energy = heads.views("W U D ENERGY", model, h)
    e, b, answers, omegas, phis = parts.views("E B HEADS OMEGA PHI", model)
    leverage = 0.0
    for i in range(rows):
        if omegas[i] > 0.0:
            seen = seen_by(model, phis[i], h)
            if i or rescaled:  # else the head has not changed since the prediction
                multiply(W, seen, answers[i, h])
            omega = omegas[i] * weight_of_error(model, i, answers[i, h], e)
            if omega > 0.0:
                alpha = learn_row(U, D, W, energy, seen, np.int64(0), e, omega, b[: D.size])
                leverage = (alpha - 1.0) / omega
    return leverage


@inlined
def restore_ridge(model, h, count):
    """Restore the ridge of `count` coordinates of head h, each by a row √r e_j with the prior as target."""
    numbers, energy, U, D, W, prior, ridge_left = heads.views("NUMBERS ENERGY U D W PRIOR RIDGE", model, h)
    (unit, e, b), p = parts.views("UNIT E B", model), D.size
    for _ in range(count):
        j = numbers.cursor
        r = max(0.0, numbers.ridge - ridge_left[j])
        if r > 0.0:
            unit[j] = 1.0
            for k in range(e.size):
                e[k] = prior[k, j] - W[k, j]
            learn_row(U, D, W, energy, unit[:p], j, e, r, b[:p])
            unit[j] = 0.0
        ridge_left[j] = numbers.ridge
        numbers.cursor = (j + 1) % p


@inlined
def learn_head(model, h, rows, total, rescaled):
    """Let head h forget, learn the batch and restore its ridge; returns φᵀBφ of the last row."""
    numbers, energy, D, ridge_left = heads.views("NUMBERS ENERGY D RIDGE", model, h)
    counts, lam, p = parts.COUNTS(model), numbers.forgetting, heads.p(model, h)
    if lam < 1.0:
        scale(D, 1.0 / lam)
        scale(ridge_left, lam)
        scale(energy, lam)
        numbers.samples *= lam
    numbers.samples += total
    leverage = absorb(model, h, rows, rescaled)
    # Of several heads each restores a coordinate only as often as it must, so that none loses more than half its ridge.
    count = coordinates_due(p, lam, 0 if size.heads(model) == 1 else counts.steps, 0)
    restore_ridge(model, h, count)
    return leverage


@inlined
def pull_of_heads(model, i, rows, trust, share, delta):
    """delta: the derivative of the loss of row i by the last layer, over the heads that see it."""
    y, (answers, gain, error, weights) = given.Y(model), parts.views("HEADS GAIN ERROR WEIGHTS", model)
    hidden, m, robust = size.hidden(model), size.outputs(model), size.robust(model)
    fill(delta[:hidden], 0.0)
    for h in range(size.heads(model)):
        units, part = heads.units(model, h), weights[h] / share if share > 0.0 else 1.0
        if units == 0 or part < 0.01:  # which would teach the body nothing
            continue
        W = heads.W(model, h)
        multiply(W, seen_by(model, parts.PHI(model)[i], h), answers[0, h])
        for k in range(m):
            off = answers[0, h, k] - y[i, k]
            if robust:
                limit = plausible_error(error, k)
                off = clipped(off, limit)
            pull = part * 2.0 * trust * gain[k] * off / (rows * m)
            add_scaled(W[k, :units], pull, delta[hidden - units : hidden])


@called
def learn_body(model, rows):
    """One step of the body's optimizer on the batch."""
    theta, gradient = parts.THETA(model), parts.GRADIENT(model)
    delta, omegas = parts.DELTA(model), parts.OMEGA(model)
    share = 0.0
    for h in range(size.heads(model)):
        if heads.units(model, h) > 0:
            share += parts.WEIGHTS(model)[h]
    for i in range(rows):
        trust = omegas[i] * weight_of_error(model, i, given.OUT(model)[i], parts.E(model))
        pull_of_heads(model, i, rows, trust, share, delta)
        units, slopes = parts.UNITS(model)[i], parts.SLOPES(model)[i]
        backward(theta, given.WIDTHS(model), units, slopes, delta, gradient, i == 0)
    first, second = parts.FIRST(model), parts.SECOND(model)
    adam_step(theta, first, second, gradient, given.OPTIONS(model), parts.COUNTS(model))
    return 0


@called
def follow_rows(model, rows, leverage):
    """Update the quantiles of errors, the range of plausible targets, the typical weight and the counts of rows."""
    out, weights = given.OUT(model), given.WEIGHT(model)
    omegas, counts, error, error_run, bounds = parts.views("OMEGA COUNTS ERROR ERROR_RUN RANGE", model)
    widen = math.sqrt(1.0 + size.inflation(model) * leverage)
    for i in range(rows):
        parts.WIDEN(model)[i] = widen
        if weights[i] <= 0.0:
            continue
        far = weights[i] > omegas[i]
        for k in range(0 if size.classes(model) else size.outputs(model)):  # indicators are bounded: no limit
            off = target(model, i, k) - out[i, k]
            limit = plausible_error(error, k)
            far = far or abs(off) > FAR * limit
            plausible = out[i, k] + clipped(off, limit)
            if bounds[k, 0] > bounds[k, 1]:
                bounds[k, 0], bounds[k, 1] = plausible, plausible
            bounds[k, 0], bounds[k, 1] = min(bounds[k, 0], plausible), max(bounds[k, 1], plausible)
            follow_errors(error, error_run, k, abs(off), widen)
        counts.rows += 1
        counts.outliers += 1 if far else 0
        counts.weight += (FOLLOW_WEIGHT if counts.weight > 0.0 else 1.0) * (omegas[i] - counts.weight)


@kernel
def learn_batch(model, rows):
    """Learn the rows of a batch, of which at least one has a weight, after `ask_heads`."""
    rescaled = weigh_rows(model, rows)
    omega, counts, count = parts.OMEGA(model), parts.COUNTS(model), size.heads(model)
    total = 0.0
    for i in range(rows):
        total += omega[i]
    counts.steps += 1
    if count > 1:
        score_heads(model, rows)
    leverage = 0.0
    for h in range(count):
        own = learn_head(model, h, rows, total, rescaled)
        leverage = own if h == counts.best else leverage
    if size.parameters(model) > 0:
        learn_body(model, rows)
    if size.robust(model):
        follow_rows(model, rows, leverage)
        rescale_changed_inputs(model)
    return 0


@called
def write_leverage(model, i):
    """Write φᵀBφ of the leading head for row i, after its answer."""
    best = parts.COUNTS(model).best
    seen = seen_by(model, parts.PHI(model)[i], best)
    given.LEVERAGE(model)[i] = leverage(heads.U(model, best), heads.D(model, best), seen)


# Its kernels get the number of a row of the batch, and of the rows of the batch, instead of an expert's place.
EXPERT = Expert(parts, ask_heads, learn_batch)
