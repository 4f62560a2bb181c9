"""The first rows of series, which a model learns again while its scales and seasons are found, and that model."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np

from sepsa.forecast.calendar import Calendar
from sepsa.forecast.clock import HISTORY, SETTLED, Clock
from sepsa.forecast.model import ForecastModel, Settings
from sepsa.forecast.seasons import check_seasons, find_seasons
from sepsa.learner.memory.parts import Floats
from sepsa.states import schema

WARM_UP = 256  # rows after which scales follow the data by themselves
IMAGINED = 512  # rows of a gap that are forecast; over the others only the seasons go on
MOST_LAGS = 2000


class Window:
    """A model of these settings, with the lags and seasons that were given or are found, and the rows so far."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self.settings = settings
        self.model: Any = None  # a ForecastModel or a BlockModel as soon as there is a row
        self.seasons: tuple[float, ...] = ()  # that the model was made for
        self.calendar = Calendar(None, clock.dated, clock.zone)
        self.origin = 0  # the point of the first row on the grid
        self.Y: Floats = np.empty((0, settings.series))
        self.E: Floats = np.empty((0, settings.exogenous))
        self.timed: Any = np.empty(0, np.int64)  # which of the first rows had a time
        self.skipped: tuple[tuple[int, int], ...] = ()  # rows before which the seasons went on, and by how many rows
        self.fit = False  # whether blocks are learned together at the end of a call
        self.found: list[tuple[int, int, str]] = []  # series, point of the last row, and what is strange there

    @property
    def rows(self) -> int:
        """The number of rows so far, including rows in gaps."""
        return 0 if self.model is None else int(self.model.rows)

    def begun(self, fit: bool, rows: int | None) -> Window:
        """A copy that learns so many rows, None for rows in several steps; this window stays as it is.

        They share a model where one call of it, which cannot fail halfway, learns these rows.
        """
        other = copy(self)
        other.fit, other.found = fit, []
        alone = rows is not None and (self.rows >= HISTORY or self.rows + rows < 1 << self.rows.bit_length())
        if self.model is not None and not (alone and self.settings.every == 1):
            other.model = self.model.copy(other.found)
        return other

    def finish(self) -> list[tuple[int, int, str]]:
        """Let blocks that `fit` has collected be learned; returns what was strange."""
        if self.settings.every > 1:
            self.model.finish()
        return self.found

    def check(self, clock: Clock) -> None:
        """Raise a ValueError where the first rows cannot be learned on the grid of this clock."""
        if self.settings.every > 1 and self.model is None:
            self.calendar = Calendar(clock.grid, clock.dated, clock.zone)
            self.seasons = self._found(0)
            self._new_model()

    # ------------------------------------------------------------------ rows

    def learn(self, Y: Floats, E: Floats, made: Floats, quantiles: Floats, ahead: bool) -> None:
        """Learn rows of the grid; in the warm-up all are learned again whenever their number is a power of two.

        `made` (n, m, H) and `quantiles` (n, KNOWN, m, H) get the forecasts after each row, unless they are empty.
        """
        at = 0
        while at < len(Y):
            before = self.rows
            due = 1 << before.bit_length()
            stop = min(at + due - before, len(Y)) if before < HISTORY else len(Y)
            if before < HISTORY:
                self.Y, self.E = np.concatenate([self.Y, Y[at:stop]]), np.concatenate([self.E, E[at:stop]])
            if self.model is not None:
                self.model.learn(Y[at:stop], E[at:], made[at:stop], quantiles[at:stop], ahead)
            if self.model is None or (before < HISTORY and self.rows == due and self._due(due)):
                self._relearn(before + stop - at, made, quantiles)
                if len(made):
                    made[stop - 1], quantiles[stop - 1 : stop] = self.model.forecast(E[stop:] if ahead else E[:0])
            at = stop
        if self.rows >= HISTORY and len(self.Y):
            self.Y, self.E, self.timed, self.skipped = self.Y[:0], self.E[:0], self.timed[:0], ()

    def learn_spaced(self, Y: Floats, E: Floats, gaps: list[int], made: Floats, quantiles: Floats, ahead: bool) -> None:
        """Learn rows with so many missing ones before each, as `learn` does."""
        if gaps[0] > IMAGINED and self.model is not None:
            if self.rows < HISTORY:
                self.skipped = (*self.skipped, (self.rows, gaps[0] - IMAGINED))
            self.model.skip(gaps[0] - IMAGINED)
        at = np.cumsum(np.minimum(gaps, IMAGINED) + 1) - 1
        if len(self.timed) < SETTLED and self.rows < HISTORY:
            self.timed = np.append(self.timed, self.rows + at)
        if at[-1] < len(Y):
            self.learn(Y, E, made, quantiles, ahead)
            return
        known = [spaced(rows, at) if len(rows) else rows for rows in (Y, E, made, quantiles)]
        self.learn(known[0], known[1], known[2], known[3], ahead)
        for rows, told in zip((made, quantiles), known[2:], strict=True):
            rows[:] = told[at] if len(rows) else told

    def regrid(self, points: Any, origin: int) -> None:
        """Put the rows so far on other points of the grid, counted from the first, and learn them again."""
        self.Y, self.E = spaced(self.Y[self.timed], points), spaced(self.E[self.timed], points)
        self.timed, self.skipped, self.origin = points, (), origin
        H, m = self.settings.horizon, self.settings.series
        self._relearn(len(self.Y), np.empty((0, m, H)), np.empty((0, 0, m, H)))

    def _due(self, rows: int) -> bool:
        """Whether all of so many rows are to be learned again."""
        return (rows <= WARM_UP and self.settings.every == 1) or self._found(rows) != self.seasons

    def _relearn(self, rows: int, *told: Floats) -> None:
        """Let a new model learn the first rows."""
        self.seasons = self._found(rows)
        self.model = model = self._new_model()
        Y, start = model.fit_scales(self.Y[:rows], self.E[:rows]), 0
        for stop, skip in (*self.skipped, (rows, 0)):
            model.learn(Y[start:stop], self.E[start:stop], *(one[:0] for one in told), False)
            model.skip(skip)
            start = stop
        model.found = self.found

    def _found(self, rows: int) -> tuple[float, ...]:
        """The seasons to use from this number of rows on: of heads a longer one as soon as there are two of it."""
        known = () if self.calendar.grid is None else self.calendar.grid.seasons()
        if not isinstance(self.settings.seasons, str):
            return check_seasons(self.settings.seasons)
        if self.settings.every > 1:
            return known
        return tuple(k for i, k in enumerate(known) if i == 0 or 2 * k <= rows) or find_seasons(self.Y[:rows])

    def _new_model(self) -> Any:
        """A model for the seasons in use."""
        lags, settings = self.settings.lags, self.settings._replace(seasons=self.seasons)
        if self.settings.every == 1:
            auto = int(min(max(24, 4 * min(self.seasons, default=12)), 96))
            return ForecastModel(settings._replace(lags=auto if isinstance(lags, str) else lags))
        from sepsa.forecast.blocks import BlockModel  # needs scikit-learn

        return BlockModel(settings, self.calendar, self.origin, self.fit)

    # ------------------------------------------------------------------ saving

    def state_dict(self, settled: bool) -> dict[str, Any]:
        """The state as plain data; `settled` leaves out which rows had times, which a settled grid no longer needs."""
        return {
            "first": {
                "Y": self.Y,
                "E": self.E,
                "timed": self.timed[:0] if settled else self.timed,
                "skipped": np.array(self.skipped, np.int64).reshape(-1, 2),
            },
            "origin": self.origin,
            "seasons": list(self.seasons),
            "model": None if self.model is None else self.model.state_dict(),
        }

    def load(self, new: schema.Entries, points: int) -> None:
        """Load a state with so many times of first rows into this new window."""
        self.origin = new.integer("origin", -(2**48), 2**48)
        if new["model"] is not None:
            with schema.settings("state_dict['seasons']"):
                self.seasons = check_seasons(new.items("seasons").numbers())
                self.model = self._new_model()
            self.model.load_state_dict(new["model"], new.path("model"))
        kept = self.rows if self.rows < HISTORY else 0
        first = new.entries("first", {"Y", "E", "timed", "skipped"})
        self.Y = first.array("Y", (kept, self.settings.series), missing=True)
        self.E = first.array("E", (kept, self.settings.exogenous), missing=True)
        self.timed = first.array("timed", (points,), np.int64, low=0)
        skipped = first.array("skipped", (None, 2), np.int64, low=0)
        if (np.diff(np.append(self.timed, kept)) < 1).any() or (skipped[:, :1] > kept).any():
            raise first.damaged("timed", f"increasing numbers of {kept} rows", "others")
        self.skipped = tuple((int(at), int(rows)) for at, rows in skipped)


def spaced(rows: Floats, at: Any) -> Floats:
    """The rows at these positions, and NaN between them."""
    out = np.full((int(at[-1]) + 1, *rows.shape[1:]), np.nan)
    out[at] = rows
    return out
