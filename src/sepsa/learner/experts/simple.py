"""Experts that are one line each: the last target, and the network's answer plus its last errors."""

from __future__ import annotations

from sepsa.compiled.kernels import kernel
from sepsa.compiled.linear_algebra import copy
from sepsa.learner.experts.frame import Expert, given, row
from sepsa.learner.experts.neighbours import window
from sepsa.learner.memory.parts import Part, Record, work
from sepsa.learner.memory.views import Group

SLOTS = 64  # of the keys whose last errors are kept

last = Group(given, "last target", Part("VALUE", float, ("outputs",)))
errors = Group(given, "last errors", Part("KEYED", float, (SLOTS, "outputs")), work("KEY", Record(slot=int)))


@kernel
def answer_last(model, e):
    copy(last.VALUE(model), row.ANSWERS(model)[e])
    return 0


@kernel
def learn_last(model, e):
    copy(row.SEEN(model), last.VALUE(model))
    return 0


@kernel
def answer_errors(model, e):
    """The network's answer and the running mean of its errors in rows of the same key.

    A key is given by inputs of two values, such as indicators; without any, all rows have the same key.
    """
    z, (low, high, binary) = row.Z(model), window.views("LOW HIGH BINARY", model)
    key = 0
    for j in range(z.size):
        if binary[j] == 1.0 and low[j] < high[j] and z[j] == high[j]:
            key = (31 * key + j + 1) % 65521
    errors.KEY(model).slot = key % SLOTS
    answers, off = row.ANSWERS(model), errors.KEYED(model)[key % SLOTS]
    for k in range(off.size):
        answers[e, k] = answers[0, k] + off[k]
    return 0


@kernel
def learn_errors(model, e):
    answers, y, off = row.ANSWERS(model), row.Y(model), errors.KEYED(model)[errors.KEY(model).slot]
    for k in range(off.size):
        off[k] += 0.5 * (y[k] - answers[0, k] - off[k])
    return 0


LAST_TARGET = Expert(last, answer_last, learn_last)
LAST_ERRORS = Expert(errors, answer_errors, learn_errors)
