"""Experts that are one line each: the last target, the mean of all, and the network's answer plus its last errors."""

from __future__ import annotations

from sepsa.stream.engine.kernels.compilation import kernel
from sepsa.stream.engine.kernels.views import Group, Views
from sepsa.stream.experts.expert import Expert, row
from sepsa.stream.experts.neighbours import window

SLOTS = 64  # of the keys whose last errors are kept
FOLLOW = 0.5  # share of the last error in the running mean of a key

LAST_PARTS = {"VALUE": (float, ("outputs",))}
LAST = Group("last target", LAST_PARTS, {}, {})
last = Views(LAST, "state", LAST_PARTS)

MEAN_PARTS = {"VALUE": (float, ("outputs",)), "ROWS": (float, (1,))}
MEAN = Group("mean", MEAN_PARTS, {}, {})
mean = Views(MEAN, "state", MEAN_PARTS)

ERRORS_PARTS = {"KEYED": (float, (SLOTS, "outputs"))}
ERRORS_WORK = {"KEY": (int, (1,))}
ERRORS = Group("last errors", ERRORS_PARTS, ERRORS_WORK, {})
errors, key_of = Views(ERRORS, "state", ERRORS_PARTS), Views(ERRORS, "workspace", ERRORS_WORK)


@kernel(cost=0.3)
def answer_last(model, e):
    value, out = last.VALUE(model), row.ANSWERS(model)[e]
    for k in range(out.size):
        out[k] = value[k]
    return 0


@kernel(cost=0.3)
def learn_last(model, e):
    value, y = last.VALUE(model), row.SEEN(model)
    for k in range(y.size):
        value[k] = y[k]
    return 0


@kernel(cost=0.3)
def answer_mean(model, e):
    value, out = mean.VALUE(model), row.ANSWERS(model)[e]
    for k in range(out.size):
        out[k] = value[k]
    return 0


@kernel(cost=0.3)
def learn_mean(model, e):
    value, rows, y = mean.VALUE(model), mean.ROWS(model), row.Y(model)
    rows[0] += 1.0
    for k in range(y.size):
        value[k] += (y[k] - value[k]) / rows[0]
    return 0


@kernel(cost=0.4)
def answer_errors(model, e):
    """The network's answer and the running mean of its errors in rows of the same key.

    A key is given by inputs of two values, such as indicators; without any, all rows have the same key.
    """
    z, low, high, binary = row.Z(model), window.LOW(model), window.HIGH(model), window.BINARY(model)
    key = 0
    for j in range(z.size):
        if binary[j] == 1.0 and low[j] < high[j] and z[j] == high[j]:
            key = (31 * key + j + 1) % 65521
    key_of.KEY(model)[0] = key % SLOTS
    answers, off = row.ANSWERS(model), errors.KEYED(model)[key % SLOTS]
    for k in range(off.size):
        answers[e, k] = answers[0, k] + off[k]
    return 0


@kernel(cost=0.3)
def learn_errors(model, e):
    answers, y, off = row.ANSWERS(model), row.Y(model), errors.KEYED(model)[key_of.KEY(model)[0]]
    for k in range(off.size):
        off[k] += FOLLOW * (y[k] - answers[0, k] - off[k])
    return 0


LAST_TARGET = Expert(LAST, answer_last, learn_last)
MEAN_TARGET = Expert(MEAN, answer_mean, learn_mean)
LAST_ERRORS = Expert(ERRORS, answer_errors, learn_errors)
