"""How candidates are compared by their recent losses, on numbers; heads compare by it, and kernels compile it."""

from __future__ import annotations

import math


def relative_weight(loss: float, least: float, strength: float, floor: float, prior: float) -> float:
    """The weight of a candidate by its loss over that of the candidate with the least, (loss/least)^-strength e^-prior.

    `floor` is added to both losses.
    """
    return math.exp(-strength * math.log((loss + floor) / (least + floor)) - prior)


def exceeds(mean: float, square: float, share: float, kept: float, certainty: float) -> bool:
    """Whether a recent mean of differences lies above zero by more than `certainty` of its standard errors.

    `square` is the mean of their squares, `share` that of one difference in the mean, and `kept` how much of the mean's
    square is no variance: 1, or less where few differences say little about their mean.
    """
    return mean > certainty * math.sqrt(share * max(square - kept * mean * mean, 0.0))
