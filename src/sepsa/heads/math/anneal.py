"""How a head anneals while the body's learning rate falls to r times its peak; docs/algorithm.md derives the laws.

Features move at a speed proportional to the rate, so that a head on them may remember more, or step less, as it falls.
"""

from __future__ import annotations

FLOOR = 0.1  # of r, for schedules that end at 0: a ridge then grows 1000-fold at most, and a memory 100-fold
MEMORY, RIDGE, STEP = 2.0, 3.0, 1.0  # exponents of r
REPEATS = 1.0  # exponent of the times that a head remembers each sample, in the weight of its ridge


def annealed_forgetting(forgetting: float, ratio: float) -> float:
    """The forgetting of a head that remembers r^-2 times as many updates."""
    return forgetting if ratio == 1.0 else float(1.0 - (1.0 - forgetting) * ratio**MEMORY)


def ridge_weight(times: float) -> float:
    """By how much a ridge grows that stands beside samples which are remembered so many times."""
    return float(max(1.0, times) ** REPEATS)


def annealed_ridge(ridge: float, ratio: float) -> float:
    """The ridge of a head whose curvature does not remember as long as that: it takes smaller steps."""
    return float(ridge * ratio**-RIDGE)
