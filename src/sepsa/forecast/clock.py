"""The clock of a forecaster: the grid of times on which its rows lie, found from the first of them.

Where dates have a zone, a grid of days or longer is one of local time, and a shorter one of UTC: both go on evenly when
daylight saving begins or ends.
"""

from __future__ import annotations

import itertools
from datetime import UTC, timedelta, tzinfo
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np

from sepsa.forecast.grids import (
    BUSINESS,
    DAY,
    MONTHS,
    SECONDS,
    SPARSE,
    Grid,
    check_step,
    day_of,
    find_grid,
    month_of,
    monthly,
)
from sepsa.forecast.times import EPOCH, Moments, integer_dates, local_seconds, read_zone, seconds_east
from sepsa.learner.memory.parts import Floats
from sepsa.states import schema

SETTLED = 256  # times after which the grid is no longer corrected
HISTORY = 2048  # rows that a forecaster keeps, and can place anew
CONFIRMED = 2  # rows after the first one beyond a leap that confirm it
CONFUSED = 8  # rows beyond a leap that have no common step with those before
FEW = 5  # rows after which a step that was given is compared with their times
MONDAY = 4 * DAY  # seconds since 1970 of the first Monday, from which rows of dates are numbered
EARLY = 0.25  # of a step: a row that comes by less before its time is in time


class Place(NamedTuple):
    """What a row's time says: rows left out before it, and what becomes of rows that waited or were placed before.

    `gaps` are those of the waiting rows, if they are confirmed, and of the row itself; empty for a row that waits.
    `dropped` rows that waited were wrong. `points` are new points of all rows
    so far, where the grid has been corrected to `grid`.
    """

    gaps: tuple[int, ...]
    dropped: int = 0
    points: Any = None
    grid: Grid | None = None


def leap(rows: int) -> int:
    """The number of steps at once that a row waits for confirmation beyond, after this many rows."""
    return max(1000, 2 * rows)


class Clock:
    """The grid, and the point of the last row.

    The grid is found when there are 2, 4, 8, ..., 256 times, and where a time among these does not fit it. A leap far
    beyond the history waits until more rows follow it. Where these are leaps themselves, times have no common step.
    """

    def __init__(self, step: float | str | None) -> None:
        self.told = check_step(step)
        self.grid: Grid | None = None
        self.last: int | None = None
        self.dated = False
        self.zone: tzinfo | None = None
        self.first: list[float] = []  # the times of the first rows, until the grid is settled
        self.waiting: list[float] = []  # times after a leap

    def copy(self) -> Clock:
        """Another clock in the same state."""
        other = Clock(None)
        other.__dict__.update(self.__dict__, first=self.first.copy(), waiting=self.waiting.copy())
        return other

    def begin(self, moments: Moments) -> None:
        """Take over whether times are dates, and their zone, from the first of them."""
        if self.last is None and not self.first:
            self.dated, self.zone = moments.dated, moments.zone
        elif self.dated != moments.dated:
            kinds = ("numbers", "dates")
            raise ValueError(f"time must be {kinds[self.dated]} as before, got {kinds[moments.dated]}")

    def check(self, at: Floats) -> None:
        """Raise a ValueError where the first times are dates written as numbers, or times in UTC are newest first."""
        begins = not (self.dated or len(self.first) > 1 or self.last or self.waiting)
        if begins and (form := integer_dates(known := np.append(self.first, at)[:100])):
            raise ValueError(
                f"times must be dates or seconds, got {known[0]:.0f}, a date without marks between its parts: convert "
                f"them by pandas.to_datetime(..., format={form!r}), or subtract the first one if they are seconds"
            )
        if len(at) > 1 and (np.diff(at) <= 0).all() and at[-1] < at[0]:
            raise ValueError(
                f"times must be oldest first, got {len(at)} rows that are newest first, from "
                f"{self.label(float(at[0]))} back to {self.label(float(at[-1]))}: sort the rows by time"
            )

    def proceed(self, rows: int) -> None:
        """Let rows without a time follow the last one."""
        if self.last is not None:
            self.last += rows
            self.first = []

    def place(self, at: float, rows: int) -> Place:
        """Move on to a row at this time, in UTC, after `rows` rows of the grid."""
        if len(self.first) == SETTLED or rows >= HISTORY:
            self.first = []
        points = self._corrected(at, rows) if self.first else None
        gaps, dropped = self._moved(at, rows)
        return Place(gaps, dropped, points, self.grid)

    def _moved(self, at: float, rows: int) -> tuple[tuple[int, ...], int]:
        """Move on to a row; returns the gaps and the rows dropped of its place."""
        if self.last is None:
            if rows:
                raise ValueError(
                    f"time must be given from the first row on or never, got {self.label(at)} after {rows}"
                )
            self.first, self.last, self.grid = [at], 0, self.found(np.array([at]))
            return (0,), 0
        if self.grid is None and at == self.first[-1]:  # a second row at the first time, before there is a step
            raise self._not_later(at, self.latest())
        point = self.index(at) if self.grid is not None else -1
        steps = point - self.last
        dropped = 0
        if self.waiting:
            if steps > leap(rows) and at > self.waiting[-1]:
                return self._wait(at, rows), 0
            dropped, self.waiting = len(self.waiting), []
        if steps > leap(rows):
            self.waiting = [at]
            return (), dropped
        if steps < 0:
            raise ValueError(
                f"time must be later than that of the last row, {self.latest()}, got {self.label(at)} (call "
                "fit again where an earlier value has changed): sort the table by time, oldest first"
            )
        if steps == 0:
            raise self._not_later(at, self.latest())
        self.last = point
        if self.first:
            self.first.append(at)
            if self.told is not None and len(self.first) == FEW:
                self._check_apart(self.first, 2)
        return (steps - 1,), dropped

    def _not_later(self, at: float, last: Any) -> ValueError:
        """The error for a second row at the time of the last one."""
        step = "unknown" if self.grid is None else self.grid.words()
        return ValueError(
            f"time must be at least half a step ({step}) after that of the last row, {last}, got "
            f"{self.label(at)}: aggregate the rows of one time, as pandas' groupby(...).mean() does, or give a shorter "
            "step"
        )

    def _wait(self, at: float, rows: int) -> tuple[int, ...]:
        """Let a further row after a leap wait, until they confirm it; returns their gaps then."""
        known = [self.index(one) for one in (*self.waiting, at)]
        if known[-1] == known[-2]:
            raise self._not_later(at, self.label(self.waiting[-1]))
        self.waiting.append(at)
        apart = np.diff(known[-1 - CONFIRMED :])
        sparse = self.told is None and apart.min() >= SPARSE
        if len(known) <= CONFIRMED or apart.max() > leap(rows) or sparse:
            if len(known) == CONFUSED:
                self._check_apart(self.waiting, 1)
            return ()
        known = [self.last or 0, *known]
        self.first, self.last, self.waiting = [], known[-1], []
        return tuple(b - a - 1 for a, b in itertools.pairwise(known))

    def _check_apart(self, times: list[float], least: int) -> None:
        """Raise a ValueError for times that are all at least so many points apart."""
        assert self.grid is not None
        gaps = np.diff(times)
        if np.diff([self.index(one) for one in times]).min() >= least:
            raise ValueError(
                f"times must have a common step: with rows every {self.grid.words()}, {len(times)} rows from "
                f"{self.label(times[0])} on are {gaps.min():g} to {gaps.max():g} seconds apart: give step=, or "
                "aggregate the rows"
            )

    def _corrected(self, at: float, rows: int) -> Any:
        """Find the grid again with one more time, where that is due; returns the new points of all rows, or None."""
        known = np.array(self.first)
        count, steps, fits = len(known) + 1, 0, False
        if self.grid is not None and self.last is not None:
            wall = self.local(at)
            point = self.grid.nearest(wall)
            steps = point - self.last
            fits = steps > 0 and abs(self.grid.at(point) - wall) <= 0.3 * self.grid.seconds()
        if (self.told and self.told[0] != MONTHS) or at <= known[-1] or steps > leap(len(known)):
            return None
        if fits and rows + steps >= HISTORY and self.told is None and count > CONFIRMED + 1:
            self._check_apart([*self.first[-1 - CONFIRMED :], at], SPARSE)  # before the grid is settled
        if fits and count & (count - 1):
            return None
        try:
            grid = self.found(np.append(known, at))
        except ValueError:
            if fits or self.grid is None:
                raise
            return None
        assert grid is not None
        if not fits and self.grid is not None and (at - known[0]) / grid.seconds() > 3 * count:
            return None  # a single time between two points makes no finer grid
        same_step = self.grid is not None and (grid.unit, grid.step) == (self.grid.unit, self.grid.step)
        if same_step and (grid.unit != MONTHS or grid == self.grid):
            return None  # else months turn out to be counted from their ends
        other = self.copy()
        other.grid = grid
        points = np.array([other.index(one) for one in self.first])
        if points[-1] - points[0] >= HISTORY:
            return None
        self.grid, self.last = grid, int(points[-1])
        return points

    def local(self, at: float) -> float:
        """Seconds since 1970 in the time of the grid, from those of UTC."""
        if self.zone is None or (self.grid is not None and self.grid.seconds() < DAY):
            return at
        return local_seconds(at, self.zone)

    def found(self, at: Floats) -> Grid | None:
        """The grid of the first times, given in UTC: days and longer in local time; None for a single one."""
        other = self.copy()
        other.grid = None if self.told is None else Grid(*self.told, 0.0)
        wall = np.array([other.local(value) for value in at.tolist()])
        if other.grid is not None:
            months = monthly(wall) if other.grid.unit == MONTHS and len(at) > 1 else None
            return other.grid._replace(origin=float(wall[0]) if months is None else months.origin)
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

    def numbers(self, points: Any, grid: Grid | None) -> Any:
        """The numbers of rows at these points of a grid, so that 0 is at midnight of a Monday, or begins a year.

        They go by local time: where daylight saving begins a number is left out, and where it ends one comes twice.
        Without a grid a row's number is its point; the numbers of times that are no dates start at time 0.
        """
        if grid is None:
            return points
        if grid.unit == MONTHS:
            return points + month_of(grid.origin) // int(grid.step)
        if grid.unit == BUSINESS:
            return points + int(np.busday_count(day_of(MONDAY), day_of(grid.origin)))
        walls = grid.origin + points * grid.step
        if self.zone is not None and grid.step < DAY:
            walls = np.array([local_seconds(at, self.zone) for at in walls.tolist()])
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
        zone = self.zone
        return {
            "grid": None if self.grid is None else list(self.grid),
            "last": self.last,
            "first": list(self.first),
            "waiting": list(self.waiting),
            "dated": self.dated,
            "zone": zone.key if isinstance(zone, ZoneInfo) else None if zone is None else seconds_east(zone),
        }

    def load_state_dict(self, state: Any) -> None:
        """Continue from the result of `state_dict`; a ValueError names the wrong entry."""
        new = schema.read("state_dict['clock']", state, set(self.state_dict()))
        grid = None
        if new["grid"] is not None:
            items = new.items("grid", 3)
            if items[0] not in (SECONDS, BUSINESS, MONTHS):
                raise items.damaged(0, "a unit of time", items[0])
            grid = Grid(items[0], items.number(1, low=1e-9, high=1e15), items.number(2, low=-1e15, high=1e15))
            if grid.unit != SECONDS and not grid.step.is_integer():
                raise items.damaged(1, "an integer", grid.step)
        self.grid, self.last = grid, None if new["last"] is None else new.integer("last", -(2**48), 2**48)
        self.dated, self.zone = bool(new["dated"]), read_zone(new["zone"])
        self.first, self.waiting = new.items("first").numbers(), new.items("waiting").numbers()
        many = len(self.first) > SETTLED or len(self.waiting) >= CONFUSED
        far = np.abs([*self.first, *self.waiting]).max(initial=0.0) > 1e15
        if many or far or np.diff(self.first).min(initial=1.0) <= 0:
            raise new.damaged("first", "increasing seconds up to 1e15", len(self.first))
        with schema.settings(new.path("grid")):
            last = self.index(self.first[-1]) if self.first and grid is not None else self.last
            if last != self.last or abs((last or 0) * (1.0 if grid is None else grid.seconds())) > 1e15:
                raise ValueError(f"point {self.last} must be that of the last row")
