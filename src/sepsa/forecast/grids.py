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
            business_day = np.busday_offset(day_of(self.origin), index, roll="forward")
            return float(business_day.astype(np.int64)) * DAY + self.origin % DAY
        first = month_of(self.origin)
        month, day = int(first + index * self.step), math.floor(self.origin / DAY) - first_day(first)
        return float(first_day(month) + min(day, days_in(month) - 1)) * DAY + self.origin % DAY

    def seconds(self) -> float:
        """The mean seconds between two points."""
        return self.step * {SECONDS: 1.0, BUSINESS: WEEK / 5, MONTHS: YEAR / 12}[self.unit]

    def seasons(self) -> tuple[float, ...]:
        """The rows of a day, a week and a year, as far as they are seasons of such rows."""
        step = self.seconds()
        if step < 1.0 or not math.isfinite(step):
            return ()
        if self.unit == BUSINESS:
            return (5.0,)
        periods = (DAY, WEEK) if step < DAY else (WEEK, YEAR)
        rows = [round(period / step, 6) for period in periods if self.unit == SECONDS or period == YEAR]
        return tuple(float(n) for n in rows if 3 <= n <= LONGEST)

    def words(self) -> str:
        """The step in words."""
        return WORDS.get((self.unit, self.step)) or f"{self.step:g} {self.unit}"


def first_day(month: int) -> int:
    """Days since 1970 of the first of a month, whose number counts from January 1970."""
    return int(np.datetime64(month, "M").astype("datetime64[D]").astype(np.int64))


def days_in(month: int) -> int:
    """The number of days of a month."""
    return first_day(month + 1) - first_day(month)


def day_of(at: float) -> np.datetime64:
    return np.datetime64(math.floor(at / DAY), "D")


def month_of(at: float) -> int:
    return int(day_of(at).astype("datetime64[M]").astype(np.int64))


def find_grid(at: Floats, dated: bool) -> Grid:
    """The grid of these increasing times: on that of most gaps, if no two of them share a point, else on finer ones."""
    gaps = np.diff(at)
    if dated and gaps.min() > 27.5 * DAY and (grid := monthly(at)) is not None:
        return grid
    if dated and gaps.min() > 0.9 * DAY and (grid := business(at)) is not None:
        return grid
    ordered = np.sort(gaps)
    for share in (0.4, 0.2):
        found = even(at, float(ordered[round(share * (len(gaps) - 1))]), dated)
        if (np.diff(np.round((at - found.origin) / found.step)) > 0).all():
            return found
    return even(at, float(ordered[0]), dated)


ROUND = (WEEK, DAY, 3600.0, 900.0, 300.0, 60.0, 30.0, 10.0, 5.0, 1.0, 0.5, 0.1, 0.01, 0.001)  # steps that people choose


def even(at: Floats, step: float, dated: bool) -> Grid:
    """A grid of about this many seconds: the step of best fit, rounded as people do, and the median offset.

    Two dates have a jitter that does not show in the step of best fit.
    """
    for _ in range(3):
        points = np.concatenate([[0.0], np.cumsum(np.maximum(np.round(np.diff(at) / step), 1.0))])
        step = float((at[-1] - at[0]) / points[-1])
    jitter = float(np.median(np.abs(at - at[0] - points * step - np.median(at - at[0] - points * step))))
    slack = max(8.0 * jitter / points[-1], step * (UNSEEN / points[-1] if dated else 1e-9))
    for unit in ROUND:
        if step >= unit and abs(step - round(step / unit) * unit) <= slack:
            step = round(step / unit) * unit
            break
    return Grid(SECONDS, step, float(at[0] + np.median(at - at[0] - points * step)))


def monthly(at: Floats) -> Grid | None:
    """A grid of months, quarters or years, if all times lie at about the same day of different months."""
    days = np.floor(at / DAY).astype(np.int64).astype("datetime64[D]")
    months = days.astype("datetime64[M]")
    day = (days - months.astype("datetime64[D]")).astype(int)
    apart = np.diff(months.astype(np.int64))
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
    clock = at % DAY
    days = np.floor(at / DAY).astype(np.int64)
    weekday = (days + 3) % 7
    weekends = (days[-1] + 3) // 7 - (days[0] + 3) // 7
    if np.ptp(clock) > 0.25 * DAY or weekday.max() > 4 or weekends < 1:
        return None
    named = days.astype("datetime64[D]")
    apart = np.busday_count(named[:-1], named[1:])
    return Grid(BUSINESS, 1.0, float(days[0] * DAY + np.median(clock))) if np.median(apart) == 1 else None


def check_step(step: Any) -> tuple[str, float] | None:
    """Unit and number of units of a step that was given."""
    if step is None:
        return None
    if isinstance(step, str) and step in NAMED:
        return NAMED[step]
    if not is_number(step) or not 1e-9 <= step <= 1e15:
        raise ValueError(f"step must be seconds or one of {', '.join(NAMED)}, got {step!r}: seconds are at least 1e-9")
    return SECONDS, float(step)
