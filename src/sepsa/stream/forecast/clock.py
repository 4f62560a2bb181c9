"""The clock of a forecaster: the grid of times on which its rows lie, found from the first of them.

A grid has a unit: seconds, business days or months; weeks are seconds, quarters and years are months. A time belongs to
the nearest point of the grid, so that jitter does not matter. Where dates have a zone, a grid of days or longer is one
of local time, and a shorter one of UTC: both go on evenly when daylight saving begins or ends.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from typing import Any, NamedTuple, TypeAlias
from zoneinfo import ZoneInfo

import numpy as np

from sepsa.states import schema
from sepsa.stream.columns.cells import DATE, date_formats
from sepsa.stream.columns.cells import read_time as read_iso
from sepsa.stream.engine.protocol import Floats

DAY, WEEK, YEAR = 86400.0, 7 * 86400.0, 365.25 * 86400.0  # seconds
SECONDS, BUSINESS, MONTHS = "seconds", "business days", "months"
NAMED = {
    "second": (SECONDS, 1.0), "minute": (SECONDS, 60.0), "hour": (SECONDS, 3600.0), "day": (SECONDS, DAY),
    "business day": (BUSINESS, 1.0), "week": (SECONDS, WEEK), "month": (MONTHS, 1.0), "quarter": (MONTHS, 3.0),
    "year": (MONTHS, 12.0),
}  # fmt: skip
ROUND = (WEEK, DAY, 3600.0, 900.0, 300.0, 60.0, 30.0, 10.0, 5.0, 1.0, 0.5, 0.1, 0.01, 0.001)  # steps that people choose
EPOCH = datetime(1970, 1, 1)
LONGEST_SEASON = 4096  # rows
SETTLED = 256  # times after which the grid is no longer corrected
HISTORY = 2048  # rows that a forecaster keeps, and can place anew
CONFIRMED = 2  # rows after the first one beyond a leap that confirm it, or another step than that of the first rows
CONFUSED = 8  # rows beyond a leap that confirm another step than that of a settled grid, or none
FEW = 5  # rows after which a step that was given is compared with their times
SPARSE = 50  # grid points for each time, beyond which times have no common step

Time: TypeAlias = float | int | date | datetime | np.datetime64


class Moments(NamedTuple):
    """Times as seconds since 1970, whether they were dates, and their zone."""

    seconds: Floats
    dated: bool
    zone: tzinfo | None = None


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
        start = np.datetime64(int(month_of(self.origin) + index * self.step), "M")
        length = days_in(start)
        day = int(
            (day_of(self.origin) - day_of(self.origin).astype("datetime64[M]").astype("datetime64[D]")).astype(int)
        )
        day = length - 1 if day == 30 else min(day, length - 1)
        return float(start.astype("datetime64[D]").astype(np.int64) + day) * DAY + self.origin % DAY

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
        return tuple(float(n) for n in rows if 3 <= n <= LONGEST_SEASON)

    def words(self) -> str:
        """The step in words."""
        named = {(unit, step): name for name, (unit, step) in NAMED.items()}
        return named.get((self.unit, self.step)) or f"{self.step:g} {self.unit}"

    def spelled(self) -> str:
        """The step as the argument `step` has it, or None where that has no word for it."""
        named = {(unit, step): repr(name) for name, (unit, step) in NAMED.items()}
        return named.get((self.unit, self.step)) or (f"{self.step:g}" if self.unit == SECONDS else "None")


def leap(rows: int) -> int:
    """The number of steps at once that a row waits for confirmation beyond, after this many rows."""
    return max(1000, 2 * rows)


def days_in(month: np.datetime64) -> int:
    """The number of days of a month."""
    following = month + np.timedelta64(1, "M")
    return int((following.astype("datetime64[D]") - month.astype("datetime64[D]")).astype(np.int64))


def day_of(at: float) -> np.datetime64:
    return np.datetime64(math.floor(at / DAY), "D")


def month_of(at: float) -> int:
    return int(day_of(at).astype("datetime64[M]").astype(np.int64))


def find_grid(at: Floats, dated: bool) -> Grid:
    """The grid of these increasing times; a ValueError where they have none."""
    gaps = np.diff(at)
    if dated and gaps.min() > 27.5 * DAY and (grid := monthly(at)) is not None:
        return grid
    if dated and gaps.min() > 0.9 * DAY and (grid := business(at)) is not None:
        return grid
    ordered = np.sort(gaps)
    for share in (0.4, 0.2, 0.0):
        grid = even(at, float(ordered[round(share * (len(gaps) - 1))]))
        points = np.round((at - grid.origin) / grid.step)
        if (np.diff(points) > 0).all():
            if points[-1] - points[0] > SPARSE * len(at) + 1000:
                break
            return grid
    raise ValueError(
        f"times have no common step: {len(at)} of them are {gaps.min():g} to {gaps.max():g} seconds apart: give step=, "
        "or aggregate the rows"
    )


def even(at: Floats, step: float) -> Grid:
    """A grid of about this many seconds: the step of best fit, rounded as people do, and the median offset."""
    for _ in range(3):
        points = np.concatenate([[0.0], np.cumsum(np.maximum(np.round(np.diff(at) / step), 1.0))])
        step = float((at[-1] - at[0]) / points[-1])
    jitter = float(np.median(np.abs(at - at[0] - points * step - np.median(at - at[0] - points * step))))
    slack = max(8.0 * jitter / points[-1], 1e-9 * step)
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
    origin = float(at[0])
    if np.ptp(day) > 0 and day.max() >= 27:  # the last day of each month: count from a month of 31 days
        origin += float(30 - day[0]) * DAY
        if month_of(origin) != month_of(float(at[0])):
            return Grid(MONTHS, float(np.gcd.reduce(apart)), end_of_long_month(float(at[0]), int(np.gcd.reduce(apart))))
    return Grid(MONTHS, float(np.gcd.reduce(apart)), origin)


def end_of_long_month(at: float, step: int) -> float:
    """The last day of a month of 31 days, a multiple of `step` months before this time."""
    month = month_of(at)
    for back in range(0, 12 * step + 1, step):
        start = np.datetime64(month - back, "M")
        if days_in(start) == 31:
            return float(start.astype("datetime64[D]").astype(np.int64) + 30) * DAY + at % DAY
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


class Place(NamedTuple):
    """What a row's time says: rows left out before it, and what becomes of rows that waited or were placed before.

    `gaps` are those of the waiting rows, if they are confirmed, and of the row itself; empty for a row that waits, or
    that is `same`, of the last row's point. `dropped` rows that waited were wrong. `points` are new points of all rows
    so far, where the grid has been corrected to `grid`. `says` is a warning.
    """

    gaps: tuple[int, ...]
    dropped: int = 0
    same: bool = False
    points: Any = None
    grid: Grid | None = None
    says: str = ""


class Clock:
    """The grid, and the point of the last row.

    The grid is found when there are 2, 4, 8, ..., 256 times, and where a time among these does not fit it. A leap far
    beyond the history waits until more rows follow it. Where these are leaps themselves, the step was wrong: the grid
    becomes theirs, and earlier rows that do not fit it are taken for rows one step apart.
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

    def check_order(self, at: Floats) -> None:
        """Raise a ValueError for times in UTC that are newest first."""
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
        if self.last is None:
            if rows:
                raise ValueError(
                    f"time must be given from the first row on or never, got {self.label(at)} after {rows}"
                )
            self.first, self.last, self.grid = [at], 0, self.found(np.array([at]))
            return Place((0,), grid=self.grid)
        points, says = None, ""
        if self.first and (len(self.first) == SETTLED or rows >= HISTORY):
            self.first = []
        if self.first:
            points, says = self._corrected(at, rows)
        if self.grid is None and at == self.first[-1]:  # a second row at the first time, before there is a step
            return Place((), same=True)
        point = self.index(at) if self.grid is not None else -1
        steps = point - self.last
        dropped = 0
        if self.waiting:
            if steps > leap(rows) and at > self.waiting[-1]:
                return self._wait(at, rows, points, says)
            dropped, self.waiting = len(self.waiting), []
        if steps > leap(rows):
            self.waiting = [at]
            return Place((), dropped, points=points, grid=self.grid, says=says)
        if steps < 0:
            raise ValueError(
                f"time must be later than that of the last row, {self.latest()}, got {self.label(at)}: revise() takes "
                "values of earlier rows, and a table that is newest first must be sorted by time"
            )
        self.last = point
        if self.first and steps:
            self.first.append(at)
            if self.told is not None and len(self.first) == FEW:
                says = self._sparse()
        return Place((steps - 1,) if steps else (), dropped, not steps, points, self.grid, says)

    def _wait(self, at: float, rows: int, points: Any, says: str) -> Place:
        """Let a further row after a leap wait, until they confirm it, or another step."""
        assert self.grid is not None
        known = [self.index(one) for one in (*self.waiting, at)]
        if known[-1] == known[-2]:
            raise ValueError(
                f"time must be at least half a step ({self.grid.words()}) after that of the row before, "
                f"{self.label(self.waiting[-1])}, got {self.label(at)}: aggregate such rows, or give a shorter step"
            )
        self.waiting.append(at)
        count, near = len(self.waiting), np.diff(known[-1 - CONFIRMED :]) <= leap(rows)
        grid = self._grid_of(self.waiting) if count > CONFIRMED else None
        coarse = grid is not None and grid.seconds() >= SPARSE * self.grid.seconds()
        if count > CONFIRMED and near.all() and (self.told is not None or not coarse):  # the grid goes on after a gap
            self.first = []
        elif grid is not None and coarse:
            if self.told is not None:
                raise ValueError(
                    f"step must be that of the rows, got {self.grid.words()!r}, and {count} of them are "
                    f"{np.diff(self.waiting).min():g} seconds apart or more: give step={grid.spelled()}, or None to "
                    "find it from the times"
                )
            points, says = self._restart(grid, self.waiting[0], self.waiting[0], points)
            known = [self.index(one) for one in self.waiting]
            self.first += self.waiting if self.first else []
        elif count < CONFUSED:
            return Place((), points=points, grid=self.grid, says=says)
        else:
            gaps = np.diff(self.waiting)
            raise ValueError(
                f"times must have a common step: after rows every {self.grid.words()}, {count} rows from "
                f"{self.label(self.waiting[0])} on are {gaps.min():g} to {gaps.max():g} seconds apart: give step=, or "
                "aggregate the rows"
            )
        known = [self.last or 0, *known]
        self.last, self.waiting = known[-1], []
        gaps_before = tuple(b - a - 1 for a, b in itertools.pairwise(known))
        return Place(gaps_before, points=points, grid=self.grid, says=says)

    def _sparse(self) -> str:
        """A warning where a step that was given leaves missing rows between any two of the first rows."""
        assert self.grid is not None
        apart = np.diff([self.index(one) for one in self.first])
        if apart.min() < 2:
            return ""
        grid = self._grid_of(self.first)
        cure = "None" if grid is None else grid.spelled()
        return (
            f"step is {self.grid.words()!r}, and the first {FEW} rows are {apart.min()} or more of it apart: rows "
            f"between them are taken for missing ones: give step={cure} unless they are"
        )

    def _grid_of(self, times: list[float]) -> Grid | None:
        """The grid of these times alone, if they lie on most of its points and are enough to tell."""
        if self.told is None and not self.first and len(times) < CONFUSED:
            return None
        other = Clock(None)
        other.dated, other.zone = self.dated, self.zone
        try:
            other.grid = other.found(np.array(times))
            apart = np.diff([other.index(one) for one in times])
        except ValueError:
            return None
        return other.grid if apart.min() > 0 and np.median(apart) == 1 else None

    def _restart(self, grid: Grid, since: float, start: float, points: Any = None) -> tuple[Any, str]:
        """Change to the grid of the times from `since` on.

        Returns the new points of the rows before `start`, None for a settled grid, and a warning. Earlier rows that do
        not fit become rows one step apart.
        """
        assert self.grid is not None
        assert self.last is not None
        words, last = self.grid.words(), self.grid.at(self.last)
        self.grid = grid
        stop = self.index(start)
        self.last = min(grid.nearest(last), stop - 1)
        if self.first:
            at = np.array([grid.nearest(self.local(one)) for one in self.first])
            before = np.arange(-len(at), 0)  # each at least one point before the next, and before `stop`
            at = np.minimum.accumulate((at - before)[::-1])[::-1]
            at = np.minimum(at, stop) + before
            if at[-1] - at[0] >= HISTORY:
                at = at[-1] + 1 + before
            points, self.last = at - at[0], int(at[-1])
            walls = [grid.at(int(one)) for one in at]
            self.first = [2 * wall - self.local(wall) for wall in walls]
        return points, (
            f"rows since {self.label(since)} are every {grid.words()}, and the first rows were every {words}: the step "
            f"is now {grid.words()}, and earlier rows are taken for rows one step apart: give step= if that is wrong"
        )

    def _corrected(self, at: float, rows: int) -> tuple[Any, str]:
        """Find the grid again with one more time, where that is due; returns the new points of all rows, or None.

        The text is a warning, if the step has changed so much that earlier rows do not fit it.
        """
        known = np.array(self.first)
        count = len(known) + 1
        fits = self.grid is not None and self._fits(at)
        steps = 0 if self.grid is None else self.grid.nearest(self.local(at)) - (self.last or 0)
        if self.told is not None or at <= known[-1] or steps > leap(len(known)):
            return None, ""
        tail = [*self.first[count // 2 :], at]
        if self.grid is not None and fits and rows + steps >= HISTORY:
            few = tail[-2 - CONFIRMED :]
            latest = self._grid_of(few) if len(few) > CONFIRMED else None
            if latest is not None and latest.seconds() >= SPARSE * self.grid.seconds():
                return self._restart(latest, few[0], at)
        if fits and count & (count - 1):
            return None, ""
        try:
            grid = self.found(np.append(known, at))
        except ValueError:
            latest = self._grid_of(tail) if fits else None
            if latest is not None:
                return self._restart(latest, tail[0], at)
            if fits or self.grid is None:
                raise
            return None, ""
        assert grid is not None
        if not fits and self.grid is not None and (at - known[0]) / grid.seconds() > 3 * count:
            return None, ""  # a single time between two points makes no finer grid
        if self.grid is not None and (grid.unit, grid.step) == (self.grid.unit, self.grid.step):
            off = abs(self.grid.at(self.last or 0) - self.local(float(known[-1])))
            if grid.unit != MONTHS or off < DAY / 2:  # else months turn out to be counted from their ends
                return None, ""
        other = self.copy()
        other.grid = grid
        points = np.array([other.index(one) for one in self.first])
        if points[-1] - points[0] >= HISTORY:
            return None, ""
        self.grid, self.last = grid, int(points[-1])
        return points - points[0], ""

    def _fits(self, at: float) -> bool:
        """Whether a time is later than the last row and near a point of the grid."""
        assert self.grid is not None
        assert self.last is not None
        wall = self.local(at)
        point = self.grid.nearest(wall)
        return point > self.last and abs(self.grid.at(point) - wall) <= 0.3 * self.grid.seconds()

    def local(self, at: float) -> float:
        """Seconds since 1970 in the time of the grid, from those of UTC."""
        if self.zone is None or (self.grid is not None and self.grid.seconds() < DAY):
            return at
        offset = (EPOCH + timedelta(seconds=at)).replace(tzinfo=UTC).astimezone(self.zone).utcoffset()
        return at + (offset or timedelta()).total_seconds()

    def found(self, at: Floats) -> Grid | None:
        """The grid of the first times, given in UTC: days and longer in local time; None for a single one."""
        if self.told is not None:
            return Grid(*self.told, self.local(float(at[0])))
        if len(at) < 2:
            return None
        other = self.copy()
        other.grid = None
        wall = np.array([other.local(value) for value in at.tolist()])
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
        new = schema.read("state_dict['clock']", state, {"grid", "last", "first", "waiting", "dated", "zone"})
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
        if np.abs([*self.first, *self.waiting]).max(initial=0.0) > 1e15:
            raise new.damaged("first", "seconds up to 1e15", "more")
        if len(self.first) > SETTLED or len(self.waiting) >= CONFUSED or np.diff(self.first).min(initial=1.0) <= 0:
            raise new.damaged("first", "increasing times", len(self.first))
        with schema.settings("state_dict['clock']['grid']"):
            self._check_place()

    def _check_place(self) -> None:
        """Raise a ValueError where the last row has an absurd time, or another point than its time says."""
        if self.last is None or self.grid is None:
            return
        if abs(self.last * self.grid.seconds()) > 1e15 or (self.first and self.index(self.first[-1]) != self.last):
            raise ValueError(f"point {self.last} must be that of the last row")


def seconds_east(zone: tzinfo) -> float:
    """The offset of a zone without a name, in seconds."""
    return (zone.utcoffset(EPOCH) or timedelta()).total_seconds()


def read_zone(saved: Any) -> tzinfo | None:
    """A zone from its name or its offset in seconds."""
    if saved is None:
        return None
    try:
        return ZoneInfo(saved) if isinstance(saved, str) else timezone(timedelta(seconds=float(saved)))
    except (KeyError, ValueError, TypeError, OSError):
        raise schema.damaged("state_dict['clock']['zone']", "a zone or seconds", schema.brief(saved)) from None


def check_step(step: float | str | None) -> tuple[str, float] | None:
    """Unit and number of units of a step that was given."""
    if step is None:
        return None
    if isinstance(step, str):
        if step not in NAMED:
            raise ValueError(f"step must be seconds or one of {', '.join(NAMED)}, got {step!r}")
        return NAMED[step]
    if isinstance(step, bool) or not isinstance(step, (int, float)) or not 1e-9 <= step <= 1e15:
        raise ValueError(f"step must be seconds, at least 1e-9, or one of {', '.join(NAMED)}, got {step!r}")
    return SECONDS, float(step)


def read_time(time: Any) -> tuple[float, bool, tzinfo | None]:
    """A time in seconds since 1970, whether it is a date, and its zone; without a zone it is taken for UTC.

    Texts are read as ISO 8601, such as 2026-01-31T12:00; an offset in them is no zone.
    """
    if isinstance(time, np.datetime64) or (hasattr(time, "dtype") and getattr(time.dtype, "kind", "") == "M"):
        if np.isnat(time):
            raise ValueError(f"time must be a number or a date, got {time!r}")
        whole = time.astype("datetime64[s]")
        return float(whole.astype(np.int64)) + float((time - whole) / np.timedelta64(1, "s")), True, None
    if isinstance(time, datetime):
        if time != time:
            raise ValueError(f"time must be a number or a date, got {time!r}")
        zone = time.tzinfo
        plain = time.replace(tzinfo=None) if zone is None else time.astimezone(UTC).replace(tzinfo=None)
        return (plain - EPOCH).total_seconds(), True, zone
    if isinstance(time, date):
        return (datetime(time.year, time.month, time.day) - EPOCH).total_seconds(), True, None
    if isinstance(time, str) and DATE.fullmatch(time):
        return read_iso(time), True, None
    if isinstance(time, (bool, np.bool_)) or not isinstance(time, (int, float, np.integer, np.floating)):
        formats = " or ".join(map(repr, date_formats(time))) if isinstance(time, str) else ""
        cure = f": convert texts by pandas.to_datetime(..., format=...) with {formats}" if formats else ""
        raise ValueError(f"time must be seconds, a datetime or a datetime64, got {time!r}{cure}")
    if not abs(float(time)) <= 1e15:
        raise ValueError(f"time must be seconds up to 1e15, a datetime or a datetime64, got {time!r}")
    return float(time), False, None


def read_times(times: Any) -> Moments:
    """Times of rows: a DatetimeIndex or PeriodIndex, a Series of pandas or Polars, an array, or a sequence of them."""
    if hasattr(times, "to_timestamp") and not hasattr(times, "tz_localize"):  # a PeriodIndex
        times = times.to_timestamp()
    zone = getattr(times, "tz", None) or getattr(getattr(times, "dt", None), "tz", None)
    zone = zone or getattr(getattr(times, "dtype", None), "time_zone", None)
    if isinstance(zone, str):
        zone = ZoneInfo(zone)
    if zone is not None and hasattr(times, "dt") and hasattr(times.dt, "tz_convert"):
        times = times.dt.tz_convert("UTC").dt.tz_localize(None)
    elif zone is not None and hasattr(times, "tz_convert"):
        times = times.tz_convert("UTC").tz_localize(None)
    values = times.to_numpy() if hasattr(times, "to_numpy") else times
    if isinstance(values, np.ndarray) and values.ndim != 1:
        raise ValueError(f"times must be one for each row, got an array of shape {values.shape}")
    if isinstance(values, np.ndarray) and values.dtype.kind == "M" and not np.isnat(values).any():
        whole = values.astype("datetime64[s]")
        parts = (values - whole) / np.timedelta64(1, "s")
        return Moments(whole.astype(np.int64) + parts.astype(float), True, zone)
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise ValueError(f"times must be one for each row, got {values!r}")
    items: Iterable[Any] = values
    read = [read_time(time) for time in items]
    if len({dated for _, dated, _ in read}) > 1:
        raise ValueError("times must be all dates or all numbers, got both")
    zones = [one for *_, one in read if one is not None]
    return Moments(
        np.array([at for at, *_ in read]), any(dated for _, dated, _ in read), zone or next(iter(zones), None)
    )
