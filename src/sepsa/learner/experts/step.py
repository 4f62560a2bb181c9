"""The step of the engine: standardize, ask all experts, mix their answers, bound the row, teach all experts.

One call learns all rows, so that an interrupt finds all of them learned or none. The network learns in batches; the
other experts answer and learn row by row.
"""

from __future__ import annotations

import math

import numpy as np

from sepsa.compiled.kernels import call, called, inlined, kernel
from sepsa.learner.arithmetic.robust import FAR, calibrate, first_scale, follow_errors, largest, plausible_error
from sepsa.learner.arithmetic.weigh import weigh
from sepsa.learner.experts import network
from sepsa.learner.experts.frame import clipped, given, row, size
from sepsa.learner.experts.network_parts import parts as of_network
from sepsa.learner.experts.stack import DISCOUNT, FLOOR, PRIOR, remember, solve, strength
from sepsa.learner.memory.parts import Field, Part, Record, work
from sepsa.learner.memory.views import Group

FARTHEST = 1e6  # deviations, to which a target and the answer of the network are clipped

COUNTS = Record(
    rows=int,
    evidence=float,  # the discounted number of rows
    first_weight=float,  # of the first row
    best=Field(int, bounds=(0, "experts")),  # the candidate with the largest weight, and the row since which it is
    since=int,
)
parts = Group(
    given,
    "mixture",
    Part("COUNTS", COUNTS),
    Part("SCALE", float, ("inputs",)),  # the network's, before changes of the inputs' scales
    Part("ERROR", float, ("outputs", 4)),
    Part("ERROR_RUN", float, ("outputs", 3)),
    Part("GRAM", float, ("stacked", "stacked")),
    Part("MOMENT", float, ("stacked",)),
    Part("STACK", float, ("stacked",)),
    Part("LOSS", float, ("candidates",)),
    Part("WEIGHT", float, ("candidates",), start=lambda sizes: np.arange(sizes["candidates"]) == 0),
    work("ASKED", Record(row=int)),  # the row before which the answers were given
    work("ASKED_X", float, ("inputs",)),
    work("FACTOR", float, ("stacked", "stacked")),
    work("INVERSE", float, ("stacked",)),
)
ANSWER, LEARN = range(2)  # in `CALLS`
strength_of = inlined(strength)
X_AT, Y_AT, WEIGHT_AT, OUT_AT, LEVERAGE_AT = (
    given.slots.index(name) for name in ("X", "Y", "WEIGHT", "OUT", "LEVERAGE")
)


@inlined
def standardize(model, i):
    """Fill Z by row i, and the units of the outputs; returns whether the answers to this row are there already."""
    x, (z, wide, unit) = given.X(model)[i], row.views("Z WIDE UNIT", model)
    (asked, scale), (mean, gain) = parts.views("ASKED_X SCALE", model), of_network.views("MEAN GAIN", model)
    rows = parts.COUNTS(model).rows + 1
    clip, widest = 8.0, 2.0**98  # of standardized inputs; the second for trees
    same = parts.ASKED(model).row == rows
    for k in range(unit.size):
        same = same and unit[k] == math.sqrt(gain[k])
        unit[k] = math.sqrt(gain[k])
    for j in range(x.size):
        same = same and asked[j] == x[j]
        off = (x[j] - mean[j]) * scale[j]
        z[j] = np.float32(clipped(off, clip)) if off == off else 0.0  # rounded as in the window
        wide[j] = clipped(off, widest) if off == off else math.nan
        asked[j] = x[j]
    parts.ASKED(model).row = rows
    return same


@called
def ask_all(model, i):
    """Fill the answers (experts, m) to row i in units of the outputs; the network's prediction is in out."""
    same = standardize(model, i)
    (answers, unit), out = row.views("ANSWERS UNIT", model), given.OUT(model)[i]
    for k in range(out.size):
        answers[0, k] = clipped(out[k] * unit[k], FARTHEST)
    calls = given.CALLS(model)
    for e in range(1, 1 if same else size.experts(model)):
        call(calls[e, ANSWER], model, e)


@called
def mix(model, i):
    """Replace the network's prediction in out by the mixture of the experts and of their stack."""
    out, (answers, unit) = given.OUT(model)[i], row.views("ANSWERS UNIT", model)
    experts, (stack, shares) = size.experts(model), parts.views("STACK WEIGHT", model)
    for k in range(out.size):
        first = answers[0, k]
        stacked = first
        for e in range(experts - 1):
            stacked += stack[e] * (answers[e + 1, k] - first)
        answers[experts, k] = stacked
        mixed = 0.0
        for e in range(experts + 1):
            mixed += shares[e] * answers[e, k]
        if unit[k] > 0.0:
            out[k] = mixed / unit[k]


@called
def bound(model, i):
    """Fill the targets in units, within plausible errors of the prediction, the share of the row and its class."""
    x, target, out = given.X(model)[i], given.Y(model)[i], given.OUT(model)[i]
    z, wide, y, seen, unit, facts = row.views("Z WIDE Y SEEN UNIT FACTS", model)
    mean, (counts, scale, error, error_run) = of_network.MEAN(model), parts.views("COUNTS SCALE ERROR ERROR_RUN", model)
    # An error of 0.25 deviations is plausible even where most targets are predicted exactly; under heavy tails the last
    # target may lie beyond all plausible errors.
    usual, last_target = 0.25, 8.0
    heaviest = 10.0 if size.robust(model) else 1e6  # share of a row, in typical rows or in first rows
    for j in range(x.size):
        if scale[j] == 0.0:
            scale[j] = first_scale(x[j], mean[j])
            if scale[j] > 0.0:
                z[j] = wide[j] = 1.0 if x[j] > mean[j] else -1.0
    share, trust, weight = min(of_network.SHARE(model)[i], heaviest), 1.0, given.WEIGHT(model)[i]
    if not size.robust(model):
        if counts.first_weight == 0.0:
            counts.first_weight = weight
        share = min(weight / counts.first_weight, heaviest)
    for k in range(y.size):
        y[k] = clipped(target[k] * unit[k], FARTHEST)
        seen[k] = y[k]
        if size.robust(model) and not size.classes(model):
            predicted = clipped(out[k] * unit[k], FARTHEST)
            off, limit = y[k] - predicted, max(FAR * plausible_error(error, k), usual)
            follow_errors(error, error_run, k, abs(off), of_network.WIDEN(model)[i])
            seen[k] = predicted + clipped(off, max(limit, last_target))
            if abs(off) > limit:
                trust = min(trust, limit / abs(off))
                y[k] = predicted + clipped(off, limit)
    facts.share, facts.trust, facts.label = share, share * trust, largest(y)


@called
def score(model):
    """Add the row to the experts' losses, by which they are weighted, and to the normal equations of the stack."""
    answers, y, facts = row.views("ANSWERS Y FACTS", model)
    counts, losses, weights, gram, moment = parts.views("COUNTS LOSS WEIGHT GRAM MOMENT", model)
    share = facts.share
    counts.rows += 1
    counts.evidence = DISCOUNT * counts.evidence + share
    for e in range(losses.size):
        loss = 0.0
        for k in range(y.size):
            off = min(abs(answers[e, k] - y[k]), FARTHEST)
            loss += off * off
        losses[e] = DISCOUNT * losses[e] + share * loss
    best = weigh(losses, strength_of(counts.evidence), FLOOR, PRIOR, weights)
    if best != counts.best:
        counts.best, counts.since = best, counts.rows
    remember(gram, moment, answers, y, share)
    if counts.rows <= 256 or counts.rows % 4 == 0:  # later the weights of the stack change little in a row
        solve(gram, moment, *parts.views("FACTOR INVERSE STACK", model))


@inlined
def teach_all(model):
    """Let the experts other than the network learn the row."""
    calls = given.CALLS(model)
    for e in range(1, size.experts(model)):
        call(calls[e, LEARN], model, e)


@inlined
def advance(model, rows):
    """Go on by this many rows."""
    d, m = size.inputs(model), size.outputs(model)
    model[X_AT] += 8 * rows * d
    model[Y_AT] += 8 * rows * m
    model[OUT_AT] += 8 * rows * m
    model[WEIGHT_AT] += 8 * rows


@called
def answer_row(model, i):
    """Replace the network's prediction of row i, in out, by that of all experts."""
    ask_all(model, i)
    mix(model, i)


@called
def learn_row(model, i):
    """Let the experts other than the network learn row i, after `answer_row`."""
    bound(model, i)
    score(model)
    teach_all(model)


@called
def calibrate_row(model, i):
    """Add row i to the losses by which scores become probabilities."""
    (losses, p), discount = of_network.views("CALIBRATION P", model), given.OPTIONS(model).calibration
    calibrate(losses, given.OUT(model)[i], largest(given.Y(model)[i]), given.WEIGHT(model)[i], discount, p)


@kernel
def learn(model, n):
    """Learn n rows in batches, in order; out takes the predictions made before.

    Returns how many rows were learned: fewer than n where the network's prediction is not finite, and there nothing of
    the batch changes.
    """
    at, calls, several = 0, given.CALLS(model), size.experts(model) > 1
    while at < n:
        rows, total, weights = min(size.batch(model), n - at), 0.0, given.WEIGHT(model)
        for i in range(rows):
            if call(calls[0, ANSWER], model, i) == 0:
                return at
            total += weights[i]
        if total > 0.0:
            call(calls[0, LEARN], model, rows)
        for i in range(rows):
            if several:
                answer_row(model, i)
            if weights[i] > 0.0 and size.classes(model):
                calibrate_row(model, i)
            if weights[i] > 0.0 and several:
                learn_row(model, i)
        advance(model, rows)
        at += rows
    return n


@kernel
def predict(model, n):
    """Predict n rows; where the address for leverages is not 0, they are filled."""
    calls, several = given.CALLS(model), size.experts(model) > 1
    for _ in range(n):
        call(calls[0, ANSWER], model, 0)
        if model[LEVERAGE_AT] != 0:
            network.write_leverage(model, 0)
            model[LEVERAGE_AT] += 8
        if several:
            answer_row(model, 0)
        advance(model, 1)
    return n
