"""Seasons in rows: checked, or found in the data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sepsa.learner.memory.parts import Floats
from sepsa.learner.scales import moments
from sepsa.states import schema

LONGEST = 100_000  # rows


DAYS = (24, 48, 96, 144, 288, 1440)  # rows of a day, of which seven are a week


def find_seasons(Y: Floats) -> tuple[float, ...]:
    """The periods in rows at which the series repeat, by the autocorrelation of their changes; empty if there is none.

    A period is found where at least three of it fit and the autocorrelation has a peak above 0.3; it is the shortest
    whose peak is nearly the highest, since multiples of a period have peaks too. Of it and its two neighbours the one
    counts whose multiples are correlated most, or one that is a day, where its multiples are nearly as much. With a day
    there is a week as soon as two fit, as where rows have times; no other period has a second one.
    """
    if len(Y) < 16:
        return ()
    changes = np.diff(np.where(np.isnan(Y), moments(Y, np.ones(len(Y)))[0], Y), axis=0)
    size = np.maximum(np.median(np.abs(changes), axis=0), 0.1 * np.abs(changes).mean(0))
    changes = np.clip(changes / np.maximum(size, 1e-300), -10.0, 10.0)
    changes = (changes - changes.mean(0)) / np.maximum(changes.std(0), 1e-300)
    n = len(changes)
    spectrum = np.abs(np.fft.rfft(changes, 2 * n, axis=0)) ** 2
    correlation = np.fft.irfft(spectrum, axis=0)[:n].mean(1) / (n - np.arange(n))
    peaks = [k for k in range(3, n // 3) if correlation[k] >= max(0.3, *correlation[k - 1 : k + 2])]
    if not peaks:
        return ()
    highest = correlation[peaks].max()
    first = next(k for k in peaks if correlation[k] >= 0.75 * highest)
    near = next((k for k in DAYS if abs(first - 7 * k) <= 1), first)  # a day in a week
    multiples = np.arange(1, 1 + max(1, min(6, n // 2 // (near + 1))))
    mean = {k: correlation[k * multiples].mean() for k in (near - 1, near, near + 1)}
    best = max(mean, key=lambda k: mean[k])
    first = next((k for k in mean if k in DAYS and (near != first or mean[k] >= 0.8 * mean[best])), best)
    return (float(first), 7.0 * first) if first in DAYS and 14 * first <= len(Y) else (float(first),)


def check_seasons(seasons: Sequence[float]) -> tuple[float, ...]:
    """Periods in rows, each larger than 2."""
    try:
        periods = tuple(float(period) for period in seasons)
    except (TypeError, ValueError):
        raise ValueError(f"seasons must be periods in rows, such as (24, 168), got {schema.brief(seasons)}") from None
    if not all(2 < period <= LONGEST for period in periods) or len(periods) > 8:
        raise ValueError(
            f"seasons must be at most 8 periods of more than 2 and up to {LONGEST} rows, got {schema.brief(seasons)}"
        )
    return tuple(dict.fromkeys(periods))
