"""The model of a forecaster, and its first rows: it learns them again while its scales and seasons are found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from sepsa.forecast.clock import HISTORY, SETTLED
from sepsa.forecast.grids import Grid
from sepsa.forecast.model import ForecastModel, Settings
from sepsa.forecast.seasons import check_seasons, find_seasons
from sepsa.learner.arithmetic.robust import HUGE
from sepsa.learner.memory.parts import Floats
from sepsa.states import schema

WARM_UP = 256  # rows after which scales follow the data by themselves
IMAGINED = 512  # rows of a gap that are forecast; over the others only the seasons go on
MOST_LAGS = 2000

Purpose: TypeAlias = Literal["forecasts", "learn", "fit"]  # of a call: forecasts after each row, or to learn them


class History:
    """A model of these settings, with the lags and seasons that were given or are found."""

    def __init__(self, settings: Settings, lags: int | str, seasons: Sequence[float] | str) -> None:
        self.settings, self.lags, self.seasons = settings, lags, seasons
        self.model: ForecastModel | None = None
        self.Y: Floats = np.empty((HISTORY, settings.series))
        self.E: Floats = np.empty((HISTORY, settings.exogenous))
        self.points: list[int] = []  # the first rows that had a time
        self.skipped: list[tuple[int, int]] = []  # rows before which the seasons went on, and by how many rows
        self.grid: Grid | None = None  # that of the clock at the last row
        self.point = -1  # and its point, which rows here are not numbered by

    @property
    def rows(self) -> int:
        """The number of rows so far, including rows in gaps."""
        return 0 if self.model is None else self.model.rows

    def begun(self, purpose: Purpose) -> History:
        """This object: rows are learned in order for any purpose."""
        return self

    def finish(self) -> list[tuple[int, int, str]]:
        """Nothing is left to learn, and nothing is strange."""
        return []

    def reach(self) -> int:
        """The number of rows that can be forecast."""
        return self.settings.horizon

    def check(self, grid: Grid | None, series: int, exogenous: int) -> None:
        """Any number of series and inputs can be learned."""

    def check_ahead(self, given: int) -> None:
        """Forecasts use the exogenous inputs of as many rows ahead as are given."""

    def learn(self, Y: Floats, E: Floats, intervals: bool = False, ahead: bool = False) -> tuple[Floats, Floats]:
        """Learn rows of the grid; in the warm-up all are learned again whenever their number is a power of two."""
        parts = []
        at = 0
        while at < len(Y) and self.rows < HISTORY:
            due = 1 << self.rows.bit_length()
            some = slice(at, at + due - self.rows)
            count = len(Y[some])
            self.Y[self.rows : self.rows + count], self.E[self.rows : self.rows + count] = Y[some], E[some]
            if self.model is None:
                self.model = self._new_model(count)
            parts.append(self.model.learn(Y[some], E[some], intervals, ahead))
            if self.rows >= due and (due <= WARM_UP or self._seasons(due) != self.model.settings.seasons):
                again = self._relearn(due, intervals)
                for part, learned in zip(parts[-1], again, strict=True):
                    part[-1:] = learned[-1:]
            at = some.stop
        if self.rows >= HISTORY and len(self.Y):
            self.Y, self.E, self.points, self.skipped = self.Y[:0].copy(), self.E[:0].copy(), [], []
        if at < len(Y):
            assert self.model is not None
            parts.append(self.model.learn(Y[at:], E[at:], intervals, ahead))
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    def learn_spaced(
        self, Y: Floats, E: Floats, gaps: list[int], intervals: bool, ahead: bool
    ) -> tuple[Floats, Floats]:
        """Learn rows with so many missing ones before each."""
        if gaps[0] > IMAGINED and self.model is not None:
            if self.rows < HISTORY:
                self.skipped.append((self.rows, gaps[0] - IMAGINED))
            self.model.skip(gaps[0] - IMAGINED)
        at = np.cumsum(np.minimum(gaps, IMAGINED) + 1) - 1
        if len(self.points) < SETTLED and self.rows < HISTORY:
            self.points += [self.rows + int(point) for point in at]
        if at[-1] >= len(Y):
            Y, E = spaced(Y, at), spaced(E, at)
        made, quantiles = self.learn(Y, E, intervals, ahead)
        return made[at], quantiles[at if intervals else []]

    def regrid(self, points: Any) -> None:
        """Put the rows so far on other points of the grid, and learn them again."""
        old = np.array(self.points, np.int64)
        Y, E = spaced(self.Y[old], points), spaced(self.E[old], points)
        self.points, self.skipped = points.tolist(), []
        self.Y[: len(Y)], self.E[: len(E)] = Y, E
        self._relearn(len(Y))

    def _relearn(self, rows: int, intervals: bool = False) -> tuple[Floats, Floats]:
        """Let a new model learn the first rows; returns what it forecasts after the last of them."""
        self.model = model = self._new_model(rows)
        Y, E = model.fit_scales(self.Y[:rows], self.E[:rows]), self.E[:rows]
        start = 0
        for stop, skip in self.skipped:
            if stop < rows:
                model.learn(Y[start:stop], E[start:stop])
                model.skip(skip)
                start = stop
        model.learn(Y[start:-1], E[start:-1])
        return model.learn(Y[-1:], E[-1:], intervals)

    def _seasons(self, rows: int) -> tuple[float, ...]:
        """The seasons to use from this number of rows on: a longer one as soon as there are two of it."""
        if not isinstance(self.seasons, str):
            return check_seasons(self.seasons)
        known = () if self.grid is None else self.grid.seasons()
        if known:
            return tuple(period for i, period in enumerate(known) if i == 0 or 2 * period <= rows)
        return find_seasons(self.Y[:rows])

    def _new_model(self, rows: int) -> ForecastModel:
        """A model for the first rows, at their scales."""
        seasons = self._seasons(rows)
        lags = int(min(max(24, 4 * min(seasons, default=12)), 96)) if isinstance(self.lags, str) else self.lags
        model = ForecastModel(self.settings._replace(lags=lags, seasons=seasons))
        model.fit_scales(self.Y[:rows], self.E[:rows])
        return model

    def state_dict(self, settled: bool) -> dict[str, Any]:
        """The state as plain data; `settled` leaves out the points, which a settled grid no longer needs."""
        model, first = self.model, min(self.rows, HISTORY) if len(self.Y) else 0
        return {
            "first": {
                "Y": self.Y[:first].copy(),
                "E": self.E[:first].copy(),
                "points": [] if settled else list(self.points),
            },
            "skipped": [list(pair) for pair in self.skipped],
            "lags": 0 if model is None else model.settings.lags,
            "seasons": [] if model is None else list(model.settings.seasons),
            "model": None if model is None else model.state_dict(),
        }

    def load(self, new: schema.Entries, points: int) -> None:
        """Load a state with so many points into this new history."""
        if new["model"] is not None:
            with schema.settings("state_dict['seasons']"):
                seasons = check_seasons(new.items("seasons").numbers())
            lags = new.integer("lags", 1, MOST_LAGS)
            self.model = ForecastModel(self.settings._replace(lags=lags, seasons=seasons))
            self.model.load_state_dict(new["model"], "state_dict['model']")
        m, q = self.Y.shape[1], self.E.shape[1]
        first = new.entries("first", {"Y", "E", "points"})
        Y, E = first.array("Y", (None, m), missing=True), first.array("E", (None, q), missing=True)
        for name, rows in (("Y", Y), ("E", E)):
            if (np.abs(rows) > HUGE).any():
                raise first.damaged(name, f"at most {HUGE:g}", "another")
        kept = self.rows if 0 < self.rows < HISTORY else 0
        if len(Y) != kept or len(E) != len(Y) or (m == 0) != (self.model is None):
            raise schema.damaged("state_dict['first']", f"{kept} rows", len(Y))
        if self.rows >= HISTORY:
            self.Y, self.E = self.Y[:0].copy(), self.E[:0].copy()
        self.Y[:kept], self.E[:kept] = Y, E
        entries = first.items("points")
        self.points = [entries.integer(i, 0, max(kept - 1, 0)) for i in range(len(entries))]
        if len(self.points) != points or np.diff(self.points).min(initial=1) < 1:
            raise first.damaged("points", f"those of {points} rows", len(self.points))
        skipped = new.items("skipped")
        for i in range(len(skipped)):
            pair = skipped.items(i, 2)
            self.skipped.append((pair.integer(0, 0, kept), pair.integer(1, 0, 2**48)))


def spaced(rows: Floats, at: Any) -> Floats:
    """The rows at these positions, and NaN between them."""
    out = np.full((int(at[-1]) + 1, rows.shape[1]), np.nan)
    out[at] = rows
    return out
