"""Rows on a grid of times: gaps, leaps, and the first ones, which are learned again while scales are found."""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import Any

import numpy as np

from sepsa.forecast.clock import HISTORY, SETTLED, Clock, Place
from sepsa.forecast.grids import Grid
from sepsa.forecast.model import ForecastModel, Rows, Settings
from sepsa.forecast.seasons import check_seasons, find_seasons
from sepsa.forecast.times import Moments
from sepsa.learner.memory.parts import Floats
from sepsa.learner.scales import trimmed
from sepsa.states import schema

IMAGINED = 512  # rows of a gap that are forecast; over the others only the seasons go on
MOST_LAGS = 2000


class Window:
    """The rows so far on the grid of a clock, and a model of them with the seasons that are given or found."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.clock = Clock(settings.step)
        self.grid: Grid | None = None  # that of the rows so far
        self.model: Any = None  # a ForecastModel or a BlockModel as soon as there is a row
        self.seasons: tuple[float, ...] = ()  # that the model was made for
        self.origin = 0  # the point of the first row on the grid
        self.first: Floats = np.empty((0, settings.series + settings.exogenous))  # values and inputs of the first rows
        self.timed: Any = np.empty(0, np.int64)  # which of them had a time
        self.skipped: tuple[tuple[int, int], ...] = ()  # rows before which the seasons went on, and by how many rows
        self.waiting: list[Floats] = []  # values and inputs of rows after a leap in time
        self.refused = 0  # of them
        self.fit = False  # whether blocks are learned together at the end of a call

    @property
    def rows(self) -> int:
        """The number of rows so far, including rows in gaps."""
        return 0 if self.model is None else int(self.model.rows)

    def learned(self, rows: Rows, moments: Moments | None, fit: bool) -> tuple[Window, list[str]]:
        """A window that has learned further rows as well, and what is strange in them; this one stays as it is."""
        other, plan = self.placed(moments)
        other.fit = fit
        # They share a model where one call of it, which cannot fail halfway, learns these rows.
        alone = plan is None or all(map(plain, plan))
        count = len(rows.Y) if plan is None else sum(sum(place.gaps) + 1 for place in plan)
        alone = alone and (self.rows >= HISTORY or self.rows + count < 1 << self.rows.bit_length())
        if self.model is not None and not (alone and self.settings.every == 1):
            other.model = self.model.copy()
        if plan is None:
            other.clock.proceed(len(rows.Y))
            other.learn(rows)
        else:
            other._follow(plan, rows)
        if self.settings.every > 1:
            other.model.finish()
        if other.rows >= HISTORY:
            other.clock.first = []
        dropped = other.refused - self.refused
        said = f"{dropped} row(s) with a time far ahead were left out, as the rows after them have earlier times"
        return other, [said] * (dropped > 0)

    def placed(self, moments: Moments | None) -> tuple[Window, list[Place] | None]:
        """A copy whose clock is after rows of these times, and where they go; an error where they cannot be learned."""
        other = copy(self)
        clock = other.clock = self.clock.copy()
        if moments is None:
            return other, None
        clock.begin(moments)
        clock.check(moments.seconds)
        rows, plan = self.rows, []
        for at in moments.seconds.tolist():
            place = clock.place(at, rows)
            if place.points is not None:
                rows = int(np.ptp(place.points)) + 1
            rows += sum(min(gap, IMAGINED) + 1 for gap in place.gaps)
            plan.append(place)
        return other, plan

    def check(self, moments: Moments | None) -> None:
        """Raise a ValueError where rows of these times cannot be learned."""
        other, _ = self.placed(moments)
        if self.settings.every > 1 and self.model is None:
            other.grid = other.clock.grid
            other.seasons = other._found(0)
            other._new_model()

    # ------------------------------------------------------------------ rows

    def learn(self, rows: Rows) -> None:
        """Learn rows of the grid; in the warm-up all are learned again whenever their number is a power of two."""
        at = 0
        while at < len(rows.Y):
            before = self.rows
            due = 1 << before.bit_length()
            stop = min(at + due - before, len(rows.Y)) if before < HISTORY else len(rows.Y)
            part = rows.part(at, stop)
            if before < HISTORY:
                self.first = np.concatenate([self.first, np.hstack([part.Y, part.E])])
            if self.model is not None:
                self.model.learn(part._replace(E=rows.E[at:]))
            if self.model is None or (before < HISTORY and self.rows == due and self._due(due)):
                self._relearn(before + stop - at)
                if len(part.made):
                    part.made[-1], part.quantiles[-1:] = self.model.forecast(
                        rows.E[stop if rows.ahead else len(rows.E) :]
                    )
            at = stop
        if self.rows >= HISTORY:
            self.first, self.timed, self.skipped = self.first[:0], self.timed[:0], ()

    def _follow(self, plan: list[Place], rows: Rows) -> None:
        """Learn rows at their places."""
        i = 0
        while i < len(plan):
            place, end = plan[i], i + 1
            if place.dropped:
                self.refused += place.dropped
                self.waiting = []
            self.grid = place.grid
            if place.points is not None:
                self.regrid(place.points - place.points[0], int(place.points[0]))
            if not place.gaps:
                self.waiting = [*self.waiting, np.append(rows.Y[i], rows.E[i])]
            else:
                for row, gap in zip(self.waiting, place.gaps, strict=False):
                    self.learn_spaced(self._rows(row[None]), [gap])
                self.waiting = []
                while end < len(plan) and plain(plan[end]):
                    end += 1
                self.learn_spaced(rows.part(i, end), [one.gaps[-1] for one in plan[i:end]])
            i = end

    def learn_spaced(self, rows: Rows, gaps: list[int]) -> None:
        """Learn rows with so many missing ones before each."""
        if gaps[0] > IMAGINED and self.model is not None:
            if self.rows < HISTORY:
                self.skipped = (*self.skipped, (self.rows, gaps[0] - IMAGINED))
            self.model.skip(gaps[0] - IMAGINED)
        at = np.cumsum(np.minimum(gaps, IMAGINED) + 1) - 1
        if len(self.timed) < SETTLED and self.rows < HISTORY:
            self.timed = np.append(self.timed, self.rows + at)
        if at[-1] < len(rows.Y):
            self.learn(rows)
            return
        known = Rows._make([*(spaced(each, at) if len(each) else each for each in rows[:4]), rows.ahead])
        self.learn(known)
        for own, told in ((rows.made, known.made), (rows.quantiles, known.quantiles)):
            own[:] = told[at[: len(own)]]

    def regrid(self, points: Any, origin: int) -> None:
        """Put the rows so far on other points of the grid, counted from the first, and learn them again."""
        self.first = spaced(self.first[self.timed], points)
        self.timed, self.skipped, self.origin = points, (), origin
        self._relearn(len(self.first))

    def _rows(self, values: Floats) -> Rows:
        """Rows to learn without their forecasts, from values and inputs side by side."""
        Y, E = np.split(values, [self.settings.series], 1)
        return Rows(Y, E)

    def _due(self, rows: int) -> bool:
        """Whether all of so many rows are to be learned again."""
        return rows <= self.model.warm_up or self._found(rows) != self.seasons

    def _relearn(self, rows: int) -> None:
        """Let a new model learn the first rows; the very first ones without their outliers."""
        self.seasons = self._found(rows)
        model = self._new_model()
        known, start = self._rows(self.first[:rows]), 0
        usual = trimmed(known.Y)
        model.fit_scales(usual, trimmed(known.E))
        known = known._replace(Y=np.where(np.arange(rows)[:, None] < model.first_rows, usual, known.Y))
        for stop, skip in (*self.skipped, (rows, 0)):
            model.learn(known.part(start, stop))
            model.skip(skip)
            start = stop
        model.found = [] if self.model is None else self.model.found  # what the first rows have is known
        self.model = model

    def _found(self, rows: int) -> tuple[float, ...]:
        """The seasons to use from this number of rows on: of heads a longer one as soon as there are two of it."""
        known = () if self.grid is None else self.grid.seasons()
        if not isinstance(self.settings.seasons, str):
            return check_seasons(self.settings.seasons)
        if self.settings.every > 1:
            return known
        return tuple(k for i, k in enumerate(known) if i == 0 or 2 * k <= rows) or find_seasons(
            self._rows(self.first[:rows]).Y
        )

    def _new_model(self) -> Any:
        """A model for the seasons in use."""
        lags, settings = self.settings.lags, self.settings._replace(seasons=self.seasons)
        if self.settings.every == 1:
            auto = int(min(max(24, 4 * min(self.seasons, default=12)), 96))
            return ForecastModel(settings._replace(lags=auto if isinstance(lags, str) else lags))
        from sepsa.forecast.blocks import BlockModel  # needs scikit-learn

        return BlockModel(settings, partial(self.clock.numbers, grid=self.grid), self.origin, self.fit)

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """The state as plain data; a settled grid no longer needs which rows had times."""
        return {
            "clock": self.clock.state_dict(),
            "waiting": np.array(self.waiting).reshape(len(self.waiting), self.first.shape[1]),
            "refused": self.refused,
            "first": self.first,
            "timed": self.timed if self.clock.first else self.timed[:0],
            "skipped": np.array(self.skipped, np.int64).reshape(-1, 2),
            "origin": self.origin,
            "seasons": list(self.seasons),
            "model": None if self.model is None else self.model.state_dict(),
        }

    def load(self, new: schema.Entries) -> None:
        """Load a state into this new window."""
        clock, width = self.clock, self.first.shape[1]
        clock.load_state_dict(new["clock"])
        self.grid = clock.grid
        self.waiting = list(new.array("waiting", (len(clock.waiting), width), missing=True))
        self.refused, self.origin = new.integer("refused"), new.integer("origin", -(2**48), 2**48)
        if new["model"] is not None:
            with schema.settings("state_dict['seasons']"):
                self.seasons = check_seasons(new.items("seasons").numbers())
                self.model = self._new_model()
            self.model.load_state_dict(new["model"], new.path("model"))
        kept = self.rows if self.rows < HISTORY else 0
        self.first = new.array("first", (kept, width), missing=True)
        self.timed = new.array("timed", (len(clock.first),), np.int64, low=0)
        skipped = new.array("skipped", (None, 2), np.int64, low=0)
        if (np.diff(np.append(self.timed, kept)) < 1).any() or (skipped[:, :1] > kept).any():
            raise new.damaged("timed", f"increasing numbers of {kept} rows", "others")
        self.skipped = tuple(map(tuple, skipped.tolist()))


def plain(place: Place) -> bool:
    """Whether a row just follows the one before, perhaps after a short gap."""
    return len(place.gaps) == 1 and place.gaps[0] <= IMAGINED and not place.dropped and place.points is None


def spaced(rows: Floats, at: Any) -> Floats:
    """The rows at these positions, and NaN between them."""
    out = np.full((int(at[-1]) + 1, *rows.shape[1:]), np.nan)
    out[at] = rows
    return out
