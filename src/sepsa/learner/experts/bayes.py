"""Naive Bayes for the first rows of classes: normal laws about a mean of each class, with common variances."""

from __future__ import annotations

import math

from sepsa.compiled.kernels import called, kernel
from sepsa.compiled.linear_algebra import scale
from sepsa.learner.experts.frame import Expert, given, row
from sepsa.learner.experts.logistic import softmax
from sepsa.learner.memory.parts import Part, Record
from sepsa.learner.memory.views import Group

CLASS_FORGETTING = 0.998
SHRINK = 0.5  # rows at zero that the mean of a class starts with

parts = Group(
    given,
    "naive Bayes",
    Part("CLASS_MEANS", float, ("outputs", "inputs")),
    Part("CLASS_COUNTS", float, ("outputs",)),
    Part("CLASS_SQUARES", float, ("inputs",)),
    Part("CLASSED", Record(rows=float)),  # the discounted number of rows of any class
)


@called
def posterior(means, counts, squares, rows, z, out):
    """out (m,): the probability of each class at z (d,), whose inputs are independent given the class.

    `counts` (m,) are the rows of each class, `rows` of all, means (m, d) the class means, squares (d,) the sums of
    squares about them; a variance starts as that of one row at 1.
    """
    for k in range(out.size):
        out[k] = math.log(counts[k] + SHRINK)
    for j in range(z.size):
        precision = 0.5 * (rows + 1.0) / (squares[j] + 1.0)
        for k in range(out.size):
            off = z[j] - means[k, j]
            out[k] -= precision * off * off
    softmax(out)


@called
def learn_class(means, counts, squares, label, z, omega):
    """Add a row z (d,) of this class and weight to discounted counts, means and sums of squares."""
    scale(counts, CLASS_FORGETTING)
    before = counts[label] + SHRINK
    counts[label] += omega
    mean, share = means[label], omega / (before + omega)
    for j in range(z.size):
        off = z[j] - mean[j]
        mean[j] += share * off
        squares[j] = CLASS_FORGETTING * squares[j] + share * before * off * off


@kernel
def answer(model, e):
    means, counts, squares = parts.views("CLASS_MEANS CLASS_COUNTS CLASS_SQUARES", model)
    posterior(means, counts, squares, parts.CLASSED(model).rows, row.Z(model), row.ANSWERS(model)[e])
    return 0


@kernel
def learn(model, e):
    facts, classed = row.FACTS(model), parts.CLASSED(model)
    classed.rows = CLASS_FORGETTING * classed.rows + facts.share
    means, counts, squares = parts.views("CLASS_MEANS CLASS_COUNTS CLASS_SQUARES", model)
    learn_class(means, counts, squares, facts.label, row.Z(model), facts.share)
    return 0


EXPERT = Expert(parts, answer, learn, for_classes=True)
