"""Seasons in rows: checked, or found in the data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sepsa.states import schema
from sepsa.stream.engine.protocol import Floats
from sepsa.stream.scales import moments

LONGEST = 100_000  # rows


def find_seasons(Y: Floats) -> tuple[float, ...]:
    """The periods in rows at which the series repeat, by the autocorrelation of their changes; empty if there is none.

    A period is found where at least three of it fit and the autocorrelation has a peak above 0.3; it is the shortest
    whose peak is nearly the highest, since multiples of a period have peaks too. A multiple of it is a second period
    where the autocorrelation there is clearly higher, as that of a week beside a day.
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
    highest = max((correlation[k] for k in peaks), default=0.0)
    first = next((k for k in peaks if correlation[k] >= 0.75 * highest), 0)
    if not first:
        return ()
    near = correlation[first]
    longer = [k for k in peaks if k > 1.5 * first and abs(k / first - round(k / first)) * first <= 1]
    second = next((k for k in longer if correlation[k] >= max(near + 0.25 * (1 - near), 0.98 * highest)), 0)
    return (float(first), float(second)) if second else (float(first),)


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
