"""Rows on a grid of times: gaps, leaps, and the first ones, which are learned again while scales are found."""

from __future__ import annotations

from copy import copy
from itertools import pairwise
from typing import Any

import numpy as np

from sepsa.forecast.clock import HISTORY, Clock
from sepsa.forecast.model import ForecastModel, Rows, Settings
from sepsa.forecast.seasons import check_seasons, find_seasons
from sepsa.forecast.times import Moments
from sepsa.learner.memory.parts import Floats
from sepsa.learner.scales import trimmed
from sepsa.states import schema

IMAGINED = 512  # rows of a gap that are forecast; over the others only the seasons go on


class Window:
    """The rows so far on the grid of a clock, and a model of them with the seasons that are given or found."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.clock = Clock(settings.step)
        self.model: Any = None  # a ForecastModel or a BlockModel as soon as there is a row
        self.seasons: tuple[float, ...] = ()  # that the model was made for
        self.first: Floats = np.empty((0, settings.series + settings.exogenous))  # values and inputs of the first rows
        self.skipped: tuple[tuple[int, int], ...] = ()  # rows before which the seasons went on, and by how many rows
        self.fit = False  # whether blocks are learned together at the end of a call

    @property
    def rows(self) -> int:
        """The number of rows so far, including rows in gaps."""
        return 0 if self.model is None else int(self.model.rows)

    def learned(self, rows: Rows, moments: Moments | None, fit: bool) -> Window:
        """A window that has learned further rows as well; this one stays as it is."""
        other, gaps = self.placed(moments, len(rows.Y))
        other.fit = fit
        # They share a model where one call of it, which cannot fail halfway, learns these rows.
        after = self.rows + len(gaps) + sum(gaps)
        alone = max(gaps) <= IMAGINED and (self.rows >= HISTORY or after < 1 << self.rows.bit_length())
        if self.model is not None and not (alone and self.settings.every == 1):
            other.model = self.model.copy()
        if self.rows and other.clock.grid != self.clock.grid:
            other._relearn(self.rows)
        other.learn_placed(rows, np.array(gaps))
        if self.settings.every > 1:
            other.model.finish()
        return other

    def placed(self, moments: Moments | None, count: int) -> tuple[Window, list[int]]:
        """A copy whose clock is after rows of these times, and the gaps before them; an error where one cannot be."""
        other = copy(self)
        clock = other.clock = copy(self.clock)
        rows, gaps = self.rows, []
        if moments is None:
            clock.proceed(count)
            gaps = [0] * count
        else:
            clock.begin(moments)
            clock.find(moments.seconds)
            for at in moments.seconds.tolist():
                gaps.append(clock.place(at, rows))
                rows += min(gaps[-1], IMAGINED) + 1
        if self.settings.every > 1 and self.model is None:
            other.seasons = other._found(0)
            other._new_model()  # an error where blocks are too large
        return other, gaps

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
            again = before < HISTORY and self.rows == due
            if self.model is None or (again and (due <= self.model.warm_up or self._found(due) != self.seasons)):
                self._relearn(due)
                if part.told.size:
                    ahead = rows.E[stop if self.settings.known_ahead else len(rows.E) :]
                    part.told[-1] = self.model.forecast(ahead)[: part.told.shape[1]]
            at = stop
        if self.rows >= HISTORY:
            self.first, self.skipped = self.first[:0], ()

    def learn_placed(self, rows: Rows, gaps: Any) -> None:
        """Learn rows, with missing ones in the gaps before them."""
        if not gaps.any():
            self.learn(rows)
            return
        for start, stop in pairwise(np.unique([0, *np.flatnonzero(gaps > IMAGINED), len(gaps)]).tolist()):
            if (skip := int(gaps[start]) - IMAGINED) > 0:
                self.skipped = (*self.skipped, (self.rows, skip)) if self.rows < HISTORY else ()
                self.model.skip(skip)
            at = np.cumsum(np.minimum(gaps[start:stop], IMAGINED) + 1) - 1
            part = rows.part(start, stop)
            spaced = Rows(*(np.full((at[-1] + 1, *each.shape[1:]), np.nan) for each in part))
            spaced.Y[at], spaced.E[at] = part.Y, part.E
            self.learn(spaced)
            part.told[:] = spaced.told[at]

    def _relearn(self, rows: int) -> None:
        """Let a new model learn the first rows; the very first ones without their outliers."""
        self.seasons = self._found(rows)
        model, start = self._new_model(), 0
        known = Rows(*np.split(self.first[:rows].copy(), [self.settings.series], 1))
        usual = trimmed(known.Y)
        model.fit_scales(usual, trimmed(known.E))
        known.Y[: model.first_rows] = usual[: model.first_rows]
        for stop, skip in (*self.skipped, (rows, 0)):
            model.learn(known.part(start, stop))
            model.skip(skip)
            start = stop
        self.model = model

    def _found(self, rows: int) -> tuple[float, ...]:
        """The seasons to use from this number of rows on: of heads a longer one as soon as there are two of it."""
        known = () if self.clock.grid is None else self.clock.grid.seasons()
        if not isinstance(self.settings.seasons, str):
            return check_seasons(self.settings.seasons)
        if self.settings.every > 1:
            return known
        fitting = tuple(k for i, k in enumerate(known) if i == 0 or 2 * k <= rows)
        return fitting or find_seasons(self.first[:rows, : self.settings.series])

    def _new_model(self) -> Any:
        """A model for the seasons in use."""
        lags, settings = self.settings.lags, self.settings._replace(seasons=self.seasons)
        if self.settings.every == 1:
            auto = int(min(max(24, 4 * min(self.seasons, default=12)), 96))
            return ForecastModel(settings._replace(lags=auto if isinstance(lags, str) else lags))
        from sepsa.forecast.blocks import BlockModel  # needs scikit-learn

        return BlockModel(settings, self.clock, self.fit)

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """The state as plain data."""
        return {
            "clock": self.clock.state_dict(),
            "first": self.first,
            "skipped": np.array(self.skipped, np.int64).reshape(-1, 2),
            "seasons": list(self.seasons),
            "model": None if self.model is None else self.model.state_dict(),
        }

    def load(self, new: schema.Entries) -> None:
        """Load a state into this new window."""
        self.clock.load_state_dict(new["clock"])
        if new["model"] is not None:
            with schema.settings("state_dict['seasons']"):
                self.seasons = check_seasons(new["seasons"])
                self.model = self._new_model()
            self.model.load_state_dict(new["model"], new.path("model"))
        kept = self.rows if self.rows < HISTORY else 0
        self.first = new.array("first", (kept, self.first.shape[1]))
        self.skipped = tuple(map(tuple, new.array("skipped", (None, 2), np.int64).tolist()))
