"""The body's learning rate over its peak, by which the head anneals.

A schedule changes the rate in every step. Heads get the ratio rounded to `LEVELS` values a decade, so that what is
recorded or factorized for one ratio serves many steps; a constant rate, and any rate before its peak, has ratio 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

from torch import Tensor

from sepsa.heads.math.anneal import FLOOR
from sepsa.validation import is_number

LEVELS = 16
INFINITE = math.inf


class Rates(NamedTuple):
    """The body's rate, which is the largest of its groups, and what it was before."""

    now: float = 0.0
    peak: float = 0.0  # the largest that it ever was; 0 before the first
    fell: bool = False  # whether the ratio was ever below 1, so that a head has annealed


def seen(before: Rates, groups: Iterable[dict[str, Any]]) -> Rates:
    """The rates with those of these groups; NaN, infinite and negative ones are ignored. A rate on a GPU is read."""
    now = -1.0
    for group in groups:  # this runs in every step
        rate = group.get("lr")
        value = rate if type(rate) is float else number(rate)
        if now < value < INFINITE:
            now = value
    if now < 0 or now == before.now:
        return before
    rates = Rates(now, max(before.peak, now), before.fell)
    return rates if rates.fell or ratio_of(rates) == 1.0 else rates._replace(fell=True)


def number(rate: object) -> float:
    """A rate of any type as a float; NaN where it is none."""
    value = rate.item() if isinstance(rate, Tensor) and rate.numel() == 1 else rate
    return float(cast(float, value)) if is_number(value) else math.nan


def ratio_of(rates: Rates) -> float:
    """The rate over its peak, between `FLOOR` and 1, rounded to one of `LEVELS` values a decade."""
    now, peak, _ = rates
    if now >= peak:
        return 1.0
    if now <= FLOOR * peak:
        return FLOOR
    return float(10.0 ** (round(LEVELS * math.log10(now / peak)) / LEVELS))
