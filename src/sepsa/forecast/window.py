"""The first rows of series, which a model learns again while its scales and seasons are found, and that model."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np

from sepsa.forecast.block_rows import BlockPlan, Calendar, check_width
from sepsa.forecast.clock import HISTORY, SETTLED, Clock
from sepsa.forecast.model import KNOWN, ForecastModel, Settings
from sepsa.forecast.seasons import check_seasons, find_seasons
from sepsa.learner.arithmetic.robust import HUGE
from sepsa.learner.memory.parts import Floats
from sepsa.states import schema

WARM_UP = 256  # rows after which scales follow the data by themselves
IMAGINED = 512  # rows of a gap that are forecast; over the others only the seasons go on
MOST_LAGS = 2000
NOTHING, FORECASTS, QUANTILES = range(3)  # what a call wants to be told after each row, all before it included


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

    def check(self, clock: Clock, series: int, exogenous: int) -> None:
        """Raise a ValueError where so many series and inputs cannot be learned on the grid of this clock."""
        if self.settings.every > 1:
            settings = self.settings._replace(series=series, exogenous=exogenous)
            known = () if clock.grid is None else clock.grid.seasons()
            check_width(BlockPlan.of(settings, self.seasons or self._given(known)), settings)

    # ------------------------------------------------------------------ rows

    def learn(self, Y: Floats, E: Floats, tell: int, ahead: bool) -> tuple[Floats, Floats]:
        """Learn rows of the grid; in the warm-up all are learned again whenever their number is a power of two.

        Returns the forecasts (n, m, H) after each row, and their quantiles (n, KNOWN, m, H), as far as `tell` asks.
        """
        parts, at, shape = [], 0, (self.settings.series, self.settings.horizon)
        while at < len(Y):
            before = self.rows
            due = 1 << before.bit_length()
            stop = min(at + due - before, len(Y)) if before < HISTORY else len(Y)
            if before < HISTORY:
                self.Y, self.E = np.concatenate([self.Y, Y[at:stop]]), np.concatenate([self.E, E[at:stop]])
            if self.model is not None:
                parts.append(self.model.learn(Y[at:stop], E[at:], tell, ahead))
            else:
                parts.append((np.empty((1, *shape)), np.empty((int(tell == QUANTILES), KNOWN, *shape))))
            if self.model is None or (before < HISTORY and self.rows == due and self._due(due)):
                self._relearn(before + stop - at)
                for part, told in zip(parts[-1], self.model.forecast(E[stop:] if ahead else E[:0]), strict=True):
                    part[-1:] = told
            at = stop
        if self.rows >= HISTORY and len(self.Y):
            self.Y, self.E, self.timed, self.skipped = self.Y[:0], self.E[:0], self.timed[:0], ()
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    def learn_spaced(self, Y: Floats, E: Floats, gaps: list[int], tell: int, ahead: bool) -> tuple[Floats, Floats]:
        """Learn rows with so many missing ones before each."""
        if gaps[0] > IMAGINED and self.model is not None:
            if self.rows < HISTORY:
                self.skipped = (*self.skipped, (self.rows, gaps[0] - IMAGINED))
            self.model.skip(gaps[0] - IMAGINED)
        at = np.cumsum(np.minimum(gaps, IMAGINED) + 1) - 1
        if len(self.timed) < SETTLED and self.rows < HISTORY:
            self.timed = np.append(self.timed, self.rows + at)
        if at[-1] < len(Y):
            return self.learn(Y, E, tell, ahead)
        made, quantiles = self.learn(spaced(Y, at), spaced(E, at), tell, ahead)
        return made[at], quantiles[at if tell == QUANTILES else []]

    def regrid(self, points: Any, origin: int) -> None:
        """Put the rows so far on other points of the grid, counted from the first, and learn them again."""
        self.Y, self.E = spaced(self.Y[self.timed], points), spaced(self.E[self.timed], points)
        self.timed, self.skipped, self.origin = points, (), origin
        self._relearn(len(self.Y))

    def _due(self, rows: int) -> bool:
        """Whether all of so many rows are to be learned again."""
        return (rows <= WARM_UP and self.settings.every == 1) or self._found(rows) != self.seasons

    def _relearn(self, rows: int) -> None:
        """Let a new model learn the first rows."""
        self.seasons = self._found(rows)
        self.model = model = self._new_model()
        Y, start = model.fit_scales(self.Y[:rows], self.E[:rows]), 0
        for stop, skip in (*self.skipped, (rows, 0)):
            model.learn(Y[start:stop], self.E[start:stop], NOTHING, False)
            model.skip(skip)
            start = stop
        model.found = self.found

    def _given(self, known: tuple[float, ...]) -> tuple[float, ...]:
        """The seasons that were given, or else those known."""
        return known if isinstance(self.settings.seasons, str) else check_seasons(self.settings.seasons)

    def _found(self, rows: int) -> tuple[float, ...]:
        """The seasons to use from this number of rows on: of heads a longer one as soon as there are two of it."""
        known = () if self.calendar.grid is None else self.calendar.grid.seasons()
        if self.settings.every > 1 or not isinstance(self.settings.seasons, str):
            return self._given(known)
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
            "first": {"Y": self.Y, "E": self.E, "points": [] if settled else self.timed.tolist()},
            "skipped": [list(pair) for pair in self.skipped],
            "origin": self.origin,
            "seasons": list(self.seasons),
            "model": None if self.model is None else self.model.state_dict(),
        }

    def load(self, new: schema.Entries, points: int) -> None:
        """Load a state with so many points into this new window."""
        first = new.entries("first", {"Y", "E", "points"})
        m, q = self.settings.series, self.settings.exogenous
        self.Y, self.E = first.array("Y", (None, m), missing=True), first.array("E", (None, q), missing=True)
        self.origin = new.integer("origin", -(2**48), 2**48)
        if new["model"] is not None:
            with schema.settings("state_dict['seasons']"):
                self.seasons = check_seasons(new.items("seasons").numbers())
                self.model = self._new_model()
            self.model.load_state_dict(new["model"], new.path("model"))
        kept = self.rows if self.rows < HISTORY else 0
        if not len(self.Y) == len(self.E) == kept or (m == 0) != (self.model is None):
            raise schema.damaged(first.name, f"{kept} rows", len(self.Y))
        if max(np.abs(rows).max(initial=0.0, where=~np.isnan(rows)) for rows in (self.Y, self.E)) > HUGE:
            raise schema.damaged(first.name, f"numbers up to {HUGE:g}", "another")
        entries, skipped = first.items("points"), new.items("skipped")
        self.timed = np.array([entries.integer(i, 0, max(kept - 1, 0)) for i in range(len(entries))], np.int64)
        if len(self.timed) != points or np.diff(self.timed).min(initial=1) < 1:
            raise first.damaged("points", f"those of {points} rows", len(self.timed))
        pairs = [skipped.items(i, 2) for i in range(len(skipped))]
        self.skipped = tuple((pair.integer(0, 0, kept), pair.integer(1, 0, 2**48)) for pair in pairs)


def spaced(rows: Floats, at: Any) -> Floats:
    """The rows at these positions, and NaN between them."""
    out = np.full((int(at[-1]) + 1, rows.shape[1]), np.nan)
    out[at] = rows
    return out
