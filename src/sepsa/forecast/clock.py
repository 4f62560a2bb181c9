"""The clock of a forecaster: the grid of times on which its rows lie, found from the first of them.

Where dates have a zone, a grid of days or longer is one of local time, and a shorter one of UTC: both go on evenly when
daylight saving begins or ends.
"""

from __future__ import annotations

import warnings
from datetime import UTC, timedelta, timezone, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np

from sepsa.forecast.grids import (
    BUSINESS,
    DAY,
    MONTHS,
    SPARSE,
    Grid,
    check_step,
    day_of,
    find_grid,
    month_of,
    monthly,
)
from sepsa.forecast.times import EPOCH, Moments, integer_dates, local_seconds
from sepsa.learner.memory.parts import Floats
from sepsa.states import schema

SETTLED = 256  # times in which the grid is looked for
HISTORY = 2048  # rows that a forecaster keeps
LEAST_LEAP = 5000  # steps at once that are an error, or twice the rows so far where these are more
CONFUSED = 7  # rows, each SPARSE steps or more after the one before, that have no common step with those before
OFF = 0.4  # of a step: a time that is farther from its point contradicts a step found in a few times
MONDAY = 4 * DAY  # seconds since 1970 of the first Monday, from which rows of dates are numbered
EARLY = 0.25  # of a step: a row that comes by less before its time is in time


class Clock:
    """The grid, and the points on it of the first and of the last row.

    The grid is found once, in the times of the call that brings the second one. A time that contradicts it is an error,
    and so is one far beyond all others.
    """

    def __init__(self, step: float | str | None) -> None:
        self.told = check_step(step)
        self.grid: Grid | None = None
        self.start = 0
        self.last: int | None = None
        self.first: list[float] = []  # the time of the first row
        self.dated = False
        self.zone: tzinfo | None = None
        self.apart = 0  # the last rows that were each SPARSE steps or more after the one before

    def begin(self, moments: Moments) -> None:
        """Take over whether times are dates, and their zone, from the first of them."""
        if not self.first:
            self.dated, self.zone = moments.dated, moments.zone
        elif self.dated != moments.dated:
            kinds = ("numbers", "dates")
            raise ValueError(f"time must be {kinds[self.dated]} as before, got {kinds[moments.dated]}")

    def find(self, at: Floats) -> None:
        """Find the grid where there is at most one row so far, in its time and these, in any order.

        A ValueError says where they are dates written as numbers.
        """
        if self.last not in (None, self.start):
            return
        known = np.append(self.first, at)
        if not self.dated and (form := integer_dates(known[:100])):
            raise ValueError(
                f"times must be dates or seconds, got {known[0]:.0f}, a date without marks between its parts: convert "
                f"them by pandas.to_datetime(..., format={form!r}), or subtract the first one if they are seconds"
            )
        self.grid = self.found(np.unique(known)[:SETTLED])
        if self.last is not None and self.grid is not None:
            self.start = self.last = self.index(self.first[0])

    def proceed(self, rows: int) -> None:
        """Let rows without a time follow the last one."""
        if self.last is not None:
            self.last += rows

    def place(self, at: float, rows: int) -> int:
        """Move on to a row at this time, in UTC, after `rows` rows of the grid; returns the rows left out before it."""
        if rows if self.last is None else self.grid is None and self.last > self.start:
            raise ValueError(f"time must be given from the first row on or never, got {self.label(at)} after {rows}")
        if self.last is None:
            self.first = [at]
            self.start = self.last = 0 if self.grid is None else self.index(at)
            return 0
        steps = 0 if self.grid is None else self.index(at) - self.last
        if self.grid is None or steps == 0:
            step = "unknown" if self.grid is None else self.grid.words()
            raise ValueError(
                f"time must be at least half a step ({step}) after that of the last row, {self.latest()}, got "
                f"{self.label(at)}: aggregate the rows of one time, as pandas' groupby(...).mean() does, or give a "
                "shorter step"
            )
        if steps < 0:
            raise ValueError(
                f"time must be later than that of the last row, {self.latest()}, got {self.label(at)} (call "
                "fit again where an earlier value has changed): sort the table by time, oldest first"
            )
        if steps > max(LEAST_LEAP, 2 * rows):
            raise ValueError(
                f"time must not leap far beyond all others: with rows every {self.grid.words()}, {steps} rows after "
                f"that of the last row, {self.latest()}, got {self.label(at)}: leave this row out, call fit with the "
                "rows after the gap, or give step="
            )
        point = self.last + steps
        self._check_step(at, point, steps, rows)
        found_days = self.told is None and self.dated and self.grid.words() == "day"
        if found_days and steps == 3 and point - self.start <= 7 and self.numbers(point) % 7 == 0:
            business = 'give step="business day" if none comes on later ones either'
            warnings.warn(f"no row has come on the first weekend: {business}", stacklevel=2)
        self.last = point
        return steps - 1

    def _check_step(self, at: float, point: int, steps: int, rows: int) -> None:
        """Raise a ValueError for a row that contradicts the step: between two points, or as far out as those before."""
        assert self.grid is not None
        self.apart = self.apart + 1 if steps >= SPARSE else 0
        off = abs(self.grid.at(point) - self.local(at)) / self.grid.seconds()
        if self.apart >= CONFUSED:
            what = f"the last {CONFUSED} rows are each {SPARSE} or more steps after the one before"
        elif self.told is None and rows < SETTLED and off > OFF:
            what = f"this row is {off:.2g} of a step beside them"
        else:
            return
        raise ValueError(
            f"times must have a common step: with rows every {self.grid.words()}, {what}, up to {self.label(at)}: give "
            "step=, or aggregate the rows"
        )

    def local(self, at: float) -> float:
        """Seconds since 1970 in the time of the grid, from those of UTC."""
        assert self.grid is not None
        return at if self.zone is None or self.grid.seconds() < DAY else local_seconds(at, self.zone)

    def walls(self, at: Floats) -> Floats:
        """Seconds since 1970 by the clocks of the zone, from those of UTC."""
        return at if self.zone is None else np.array([local_seconds(one, self.zone) for one in at.tolist()])

    def found(self, at: Floats) -> Grid | None:
        """The grid of the first times, given in UTC: days and longer in local time; None for a single one."""
        wall = self.walls(at)
        if self.told is not None:
            grid = Grid(*self.told, 0.0)
            months = monthly(wall) if grid.unit == MONTHS and len(at) > 1 else None
            first = wall[0] if grid.seconds() >= DAY else at[0]
            return grid._replace(origin=float(first) if months is None else months.origin)
        if len(at) < 2:
            return None
        if self.zone is not None and np.diff(wall).min() > 0 and (grid := find_grid(wall, self.dated)).seconds() >= DAY:
            return grid
        return find_grid(at, self.dated)

    def index(self, at: float) -> int:
        """The point of a time in UTC."""
        assert self.grid is not None
        wall = self.local(at)
        if self.grid.unit == BUSINESS and not np.is_busday(day_of(wall + 0.25 * DAY - self.grid.origin % DAY)):
            raise ValueError(
                f"time must be a business day, as those of all rows so far, got {self.label(at)}: "
                'give step="day" for rows on every day of the week'
            )
        return self.grid.nearest(wall)

    def numbers(self, points: Any) -> Any:
        """The numbers of rows at these points of the grid, so that 0 is at midnight of a Monday, or begins a year.

        They go by local time: where daylight saving begins a number is left out, and where it ends one comes twice.
        Without a grid a row's number is its point; the numbers of times that are no dates start at time 0.
        """
        grid = self.grid
        if grid is None:
            return points
        if grid.unit == MONTHS:
            return points + month_of(grid.origin) // int(grid.step)
        if grid.unit == BUSINESS:
            return points + int(np.busday_count(day_of(MONDAY), day_of(grid.origin)))
        walls = grid.origin + points * grid.step
        if grid.step < DAY:
            walls = self.walls(walls)
        return np.floor((walls - MONDAY * self.dated) / grid.step + EARLY).astype(np.int64)

    def label(self, at: float) -> Any:
        """A time in UTC as it was given: a datetime or a number."""
        if not self.dated:
            return int(at) if float(at).is_integer() and abs(at) < 2**53 else at
        try:
            stamp = EPOCH + timedelta(seconds=round(at, 6))
        except OverflowError:
            return np.datetime64(round(at), "s")
        return stamp if self.zone is None else stamp.replace(tzinfo=UTC).astimezone(self.zone)

    def ahead(self, steps: int) -> Any:
        """The time of the row this many steps after the last one; None without times."""
        if self.grid is None or self.last is None:
            return None
        at = self.grid.at(self.last + steps)
        if self.zone is None or self.grid.seconds() < DAY:
            return self.label(at)
        return (EPOCH + timedelta(seconds=round(at, 6))).replace(tzinfo=self.zone)

    def latest(self) -> Any:
        """The time of the last row."""
        return self.label(self.first[-1]) if self.grid is None else self.ahead(0)

    def state_dict(self) -> dict[str, Any]:
        """The clock as plain data."""
        zone: Any = self.zone
        if zone is not None:  # its name, or the seconds by which one without a name is east
            zone = zone.key if isinstance(zone, ZoneInfo) else zone.utcoffset(EPOCH).total_seconds()
        return {
            "grid": None if self.grid is None else list(self.grid),
            "start": self.start,
            "last": self.last,
            "first": list(self.first),
            "apart": self.apart,
            "dated": self.dated,
            "zone": zone,
        }

    def load_state_dict(self, state: Any) -> None:
        """Continue from the result of `state_dict`, whose checksum is right."""
        new = schema.read("state_dict['clock']", state, set(self.state_dict()))
        vars(self).update(new.values)
        self.grid = None if new["grid"] is None else Grid(*new["grid"])
        if isinstance(zone := new["zone"], str):
            self.zone = ZoneInfo(zone)
        elif zone is not None:
            self.zone = timezone(timedelta(seconds=zone))
