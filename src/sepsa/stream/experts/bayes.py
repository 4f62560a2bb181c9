"""Naive Bayes for the first rows of classes: normal laws about a mean of each class, with common variances."""

from __future__ import annotations

import math

from sepsa.stream.experts.compilation import called
from sepsa.stream.experts.logistic import softmax

FORGETTING = 0.998
SHRINK = 0.5  # rows at zero that the mean of a class starts with


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
