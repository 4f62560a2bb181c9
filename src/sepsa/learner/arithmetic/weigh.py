"""Weights of candidates by their recent losses, for heads, experts and forecasts.

Every learner of streams keeps a discounted loss L_c of each candidate c and weighs it relative to the least one,

    w_c ∝ (L_c/min L)^(-strength) · exp(-prior_c),

the posterior of candidates under normal errors of unknown variance, where `strength` is half of the rows that count.
`candidates` has this for one candidate, and `exceeds` for those who follow a single leader instead.
"""

from __future__ import annotations

from sepsa.compiled.kernels import called, inlined
from sepsa.learner.arithmetic import candidates

relative_weight = inlined(candidates.relative_weight)


@called
def weigh(losses, strength, floor, prior, weights):
    """Fill weights (c,), which sum to 1, by losses (c,); returns the place of the largest.

    `floor` is added to every loss. `prior` is the logarithm of the first candidate's weight before any row over that
    of each other one.
    """
    least = losses[0]
    for c in range(losses.size):
        least = min(least, losses[c])
    total, best = 0.0, 0
    for c in range(losses.size):
        weights[c] = relative_weight(losses[c], least, strength, floor, prior if c else 0.0)
        total += weights[c]
        if weights[c] > weights[best]:
            best = c
    for c in range(losses.size):
        weights[c] /= total
    return best
