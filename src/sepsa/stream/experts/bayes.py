"""Naive Bayes for the first rows of classes: normal laws about a mean of each class, with common variances."""

from __future__ import annotations

import math

from sepsa.stream.engine.kernels.compilation import called, kernel
from sepsa.stream.engine.kernels.views import Group, Views
from sepsa.stream.experts.expert import Expert, row
from sepsa.stream.experts.logistic import softmax

FORGETTING = 0.998
SHRINK = 0.5  # rows at zero that the mean of a class starts with

PARTS = {
    "CLASS_MEANS": (float, ("outputs", "inputs")),
    "CLASS_COUNTS": (float, ("outputs",)),
    "CLASS_SPREAD": (float, ("inputs",)),
    "CLASSED": (float, (1,)),  # the discounted number of rows of any class
}
GROUP = Group("naive Bayes", PARTS, {}, {})
parts = Views(GROUP, "state", PARTS)


@called
def posterior(means, counts, spread, rows, z, out):
    """out (m,): the probability of each class at z (d,), whose inputs are independent given the class.

    `counts` (m,) are the rows of each class, `rows` of all, means (m, d) the class means, spread (d,) the sums of
    squares about them; a variance starts as that of one row at 1.
    """
    for k in range(out.size):
        out[k] = math.log(counts[k] + SHRINK)
    for j in range(z.size):
        precision = 0.5 * (rows + 1.0) / (spread[j] + 1.0)
        for k in range(out.size):
            off = z[j] - means[k, j]
            out[k] -= precision * off * off
    softmax(out)


@called
def learn_class(means, counts, spread, label, z, omega):
    """Add a row z (d,) of this class and weight to discounted counts, means and sums of squares."""
    for k in range(counts.size):
        counts[k] *= FORGETTING
    before = counts[label] + SHRINK
    counts[label] += omega
    mean, share = means[label], omega / (before + omega)
    for j in range(z.size):
        off = z[j] - mean[j]
        mean[j] += share * off
        spread[j] = FORGETTING * spread[j] + share * before * off * off


@kernel(cost=0.8)
def answer(model, e):
    posterior(
        parts.CLASS_MEANS(model), parts.CLASS_COUNTS(model), parts.CLASS_SPREAD(model), parts.CLASSED(model)[0],
        row.Z(model), row.ANSWERS(model)[e],
    )  # fmt: skip
    return 0


@kernel(cost=0.7)
def learn(model, e):
    share = row.SHARE(model)[0]
    parts.CLASSED(model)[0] = FORGETTING * parts.CLASSED(model)[0] + share
    learn_class(
        parts.CLASS_MEANS(model), parts.CLASS_COUNTS(model), parts.CLASS_SPREAD(model), int(row.LABEL(model)[0]),
        row.Z(model), share,
    )  # fmt: skip
    return 0


EXPERT = Expert(GROUP, answer, learn, for_classes=True)
