"""Grids of evenly spaced times, and how one is found in times.

A grid has a unit: seconds, business days or months; weeks are seconds, quarters and years are months. A time belongs to
the nearest point of the grid, so that jitter does not matter.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from sepsa.learner.memory.parts import Floats
from sepsa.validation import is_number

DAY, WEEK, YEAR = 86400.0, 7 * 86400.0, 365.25 * 86400.0  # seconds
SECONDS, BUSINESS, MONTHS = "seconds", "business days", "months"
NAMED = {
    "second": (SECONDS, 1.0), "minute": (SECONDS, 60.0), "hour": (SECONDS, 3600.0), "day": (SECONDS, DAY),
    "business day": (BUSINESS, 1.0), "week": (SECONDS, WEEK), "month": (MONTHS, 1.0), "quarter": (MONTHS, 3.0),
    "year": (MONTHS, 12.0),
}  # fmt: skip
WORDS = {units: word for word, units in NAMED.items()}
LONGEST = 4096  # rows of a season that a clock knows: a profile of more would hardly be filled
UNSEEN = 0.002  # of a step: the jitter that dates may have
SPARSE = 50  # grid points for each time, beyond which times have no common step


class Grid(NamedTuple):
    """Evenly spaced times: a unit, the number of units between two points, and point 0 in seconds."""

    unit: str
    step: float
    origin: float

    def nearest(self, at: float) -> int:
        """The point nearest to a time."""
        if self.unit == SECONDS:
            return round((at - self.origin) / self.step)
        if self.unit == BUSINESS:
            return int(np.busday_count(day_of(self.origin), day_of(at + 0.25 * DAY - self.origin % DAY)))
        guess = int((month_of(at) - month_of(self.origin)) // self.step)
        return min((guess - 1, guess, guess + 1), key=lambda i: abs(self.at(i) - at))

    def at(self, index: int) -> float:
        """The time of a point."""
        if self.unit == SECONDS:
            return self.origin + index * self.step
        if self.unit == BUSINESS:
            day = np.busday_offset(day_of(self.origin), index, roll="forward").astype(np.int64)
        else:
            first = month_of(self.origin)
            month, of_month = int(first + index * self.step), math.floor(self.origin / DAY) - first_day(first)
            day = first_day(month) + min(of_month, days_in(month) - 1)
        return float(day) * DAY + self.origin % DAY

    def seconds(self) -> float:
        """The mean seconds between two points."""
        return self.step * {SECONDS: 1.0, BUSINESS: WEEK / 5, MONTHS: YEAR / 12}[self.unit]

    def seasons(self) -> tuple[float, ...]:
        """The rows of a day, a week and a year, as far as they are seasons of such rows."""
        if self.unit == BUSINESS:
            return (5.0,)
        step = self.seconds()
        periods = (DAY, WEEK) if step < DAY else (WEEK, YEAR)
        rows = [round(period / step, 6) for period in periods if self.unit == SECONDS or period == YEAR]
        return tuple(n for n in rows if 3 <= n <= LONGEST)

    def words(self) -> str:
        """The step in words."""
        return WORDS.get((self.unit, self.step)) or f"{self.step:g} {self.unit}"


def first_day(month: int) -> int:
    """Days since 1970 of the first of a month, whose number counts from January 1970."""
    return int(np.datetime64(month, "M").astype("datetime64[D]").astype(np.int64))


def days_in(month: int) -> int:
    """The number of days of a month."""
    return first_day(month + 1) - first_day(month)


def day_of(at: Any) -> Any:
    """The day of a time, or of an array of them."""
    return np.floor(np.divide(at, DAY)).astype("datetime64[D]")


def month_of(at: float) -> int:
    return int(day_of(at).astype("datetime64[M]").astype(np.int64))


def find_grid(at: Floats, dated: bool) -> Grid:
    """The grid of these increasing times: on that of most gaps, if no two of them share a point, else on finer ones."""
    ordered = np.sort(np.diff(at))
    for days, grid_of in ((27.5, monthly), (0.9, business)):
        if dated and ordered[0] > days * DAY and (grid := grid_of(at)) is not None:
            return grid
    for share in (0.4, 0.2, 0.0):
        found = even(at, float(ordered[round(share * (len(ordered) - 1))]), dated)
        if (np.diff(np.round((at - found.origin) / found.step)) > 0).all():
            break
    return found


ROUND = (WEEK, DAY, 3600.0, 900.0, 300.0, 60.0, 30.0, 10.0, 5.0, 1.0, 0.5, 0.1, 0.01, 0.001)  # steps that people choose


def even(at: Floats, step: float, dated: bool) -> Grid:
    """A grid of about this many seconds: the step of best fit, rounded as people do, and the median offset.

    Two dates have a jitter that does not show in the step of best fit.
    """
    for _ in range(3):
        points = np.concatenate([[0.0], np.cumsum(np.maximum(np.round(np.diff(at) / step), 1.0))])
        step = float((at[-1] - at[0]) / points[-1])
    off = at - at[0] - points * step
    jitter = float(np.median(np.abs(off - np.median(off))))
    slack = max(8.0 * jitter / points[-1], step * (UNSEEN / points[-1] if dated else 1e-9))
    for unit in ROUND:
        if step >= unit and abs(step - round(step / unit) * unit) <= slack:
            step = round(step / unit) * unit
            break
    return Grid(SECONDS, step, float(at[0] + np.median(at - at[0] - points * step)))


def monthly(at: Floats) -> Grid | None:
    """A grid of months, quarters or years, if all times lie at about the same day of different months."""
    months = day_of(at).astype("datetime64[M]")
    day, apart = (day_of(at) - months).astype(int), np.diff(months).astype(int)
    if apart.min() < 1 or not (np.ptp(day) <= 3 or day.min() >= 25):
        return None
    origin, step = float(at[0]), int(np.gcd.reduce(apart))
    if np.ptp(day) > 0 and day.max() >= 27:  # the last day of each month: count from a month of 31 days
        origin = end_of_long_month(origin, step)
    return Grid(MONTHS, float(step), origin)


def end_of_long_month(at: float, step: int) -> float:
    """The last day of a month of 31 days, a multiple of `step` months before this time."""
    month = month_of(at)
    for back in range(0, 12 * step + 1, step):
        if days_in(month - back) == 31:
            return float(first_day(month - back) + 30) * DAY + at % DAY
    return at


def business(at: Floats) -> Grid | None:
    """A grid of business days, if all times are at about the same hour of days from Monday to Friday, with weekends."""
    days, clock = day_of(at), at % DAY
    apart = np.busday_count(days[:-1], days[1:])
    weekend = apart.sum() < (days[-1] - days[0]).astype(int)
    if np.ptp(clock) > 0.25 * DAY or not np.is_busday(days).all() or not weekend or np.median(apart) != 1:
        return None
    return Grid(BUSINESS, 1.0, float(days[0].astype(int) * DAY + np.median(clock)))


def check_step(step: Any) -> tuple[str, float] | None:
    """Unit and number of units of a step that was given."""
    if step is None:
        return None
    if isinstance(step, str) and step in NAMED:
        return NAMED[step]
    if not is_number(step) or not 1e-9 <= step <= 1e15:
        raise ValueError(f"step must be seconds or one of {', '.join(NAMED)}, got {step!r}: seconds are at least 1e-9")
    return SECONDS, float(step)
