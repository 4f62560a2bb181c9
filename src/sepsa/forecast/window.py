"""Rows on a grid of times: gaps, leaps, and the first ones, which are learned again while scales are found."""

from __future__ import annotations

from copy import copy
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from sepsa.forecast.clock import HISTORY, Clock
from sepsa.forecast.model import ForecastModel, Rows, Settings
from sepsa.forecast.seasons import check_seasons, find_seasons
from sepsa.forecast.times import Moments
from sepsa.learner.memory.parts import Floats
from sepsa.learner.scales import trimmed
from sepsa.states import schema

IMAGINED = 512  # rows of a gap that are forecast; over the others only the seasons go on
MOST_LAGS = 2000


class Plan(NamedTuple):
    """Rows of a call to learn in order, negative ones waited before, and the gap before each; and those that wait.

    After `late` rows there was no forecast, as they waited for others of the call.
    """

    order: list[int]
    gaps: list[int]
    waiting: list[int]
    late: list[int]


class Window:
    """The rows so far on the grid of a clock, and a model of them with the seasons that are given or found."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.clock = Clock(settings.step)
        self.model: Any = None  # a ForecastModel or a BlockModel as soon as there is a row
        self.seasons: tuple[float, ...] = ()  # that the model was made for
        self.first: Floats = np.empty((0, settings.series + settings.exogenous))  # values and inputs of the first rows
        self.skipped: tuple[tuple[int, int], ...] = ()  # rows before which the seasons went on, and by how many rows
        self.waiting = self.first  # values and inputs of rows after a leap in time
        self.refused = 0  # of them
        self.fit = False  # whether blocks are learned together at the end of a call,
        self.ahead = False  # and whether its forecasts use inputs of later rows

    @property
    def rows(self) -> int:
        """The number of rows so far, including rows in gaps."""
        return 0 if self.model is None else int(self.model.rows)

    def learned(self, rows: Rows, moments: Moments | None, fit: bool) -> tuple[Window, list[str]]:
        """A window that has learned further rows as well, and what is strange in them; this one stays as it is."""
        other, plan = self.placed(moments, len(rows.Y))
        other.fit, other.ahead = fit, rows.ahead
        # They share a model where one call of it, which cannot fail halfway, learns these rows.
        alone = len(plan.order) == len(rows.Y) and max(plan.gaps) <= IMAGINED
        count = len(plan.gaps) + sum(plan.gaps)
        alone = alone and (self.rows >= HISTORY or self.rows + count < 1 << self.rows.bit_length())
        if self.model is not None and not (alone and self.settings.every == 1):
            other.model = self.model.copy()
        if self.rows and other.clock.grid != self.clock.grid:
            other._relearn(self.rows)
        other.learn_placed(rows, plan)
        if self.settings.every > 1:
            other.model.finish()
        dropped = other.refused - self.refused
        said = [f"{dropped} row(s) with a time far ahead were left out, as the rows after them have earlier times"]
        weekend = 'no row has come on the first weekend: give step="business day" if none comes on later ones either'
        return other, said * (dropped > 0) + [weekend] * (other.clock.no_weekend and not self.clock.no_weekend)

    def placed(self, moments: Moments | None, count: int) -> tuple[Window, Plan]:
        """A copy whose clock is after rows of these times, and where they go; an error where they cannot be learned."""
        other = copy(self)
        clock = other.clock = copy(self.clock)
        if moments is None:
            clock.proceed(count)
            return other, Plan(list(range(count)), [0] * count, list(range(-len(self.waiting), 0)), [])
        clock.begin(moments)
        clock.check(moments.seconds)
        clock.find(moments.seconds)
        rows, plan = self.rows, Plan([], [], list(range(-len(self.waiting), 0)), [])
        for i, at in enumerate(moments.seconds.tolist()):
            gaps, dropped = clock.place(at, rows)
            other.refused += dropped
            del plan.waiting[:dropped]
            plan.waiting.append(i)
            if gaps:
                plan.late.extend(plan.waiting[:-1])
                plan.order.extend(plan.waiting)
                plan.gaps.extend(gaps)
                plan.waiting.clear()
            rows += sum(min(gap, IMAGINED) + 1 for gap in gaps)
        return other, plan

    def check(self, moments: Moments | None, count: int) -> None:
        """Raise a ValueError where so many rows of these times cannot be learned."""
        other, _ = self.placed(moments, count)
        if self.settings.every > 1 and self.model is None:
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
            self.first, self.skipped = self.first[:0], ()

    def learn_placed(self, rows: Rows, plan: Plan) -> None:
        """Learn rows at their places, with missing ones in the gaps before them."""
        if len(plan.order) == len(rows.Y) and not any(plan.gaps):
            self.waiting = self.waiting[plan.waiting]
            self.learn(rows)
            return
        values, order, gaps = np.vstack([np.hstack(rows[:2]), self.waiting]), np.array(plan.order), np.array(plan.gaps)
        for start, stop in pairwise(np.unique([0, *np.flatnonzero(gaps > IMAGINED), len(gaps)]).tolist()):
            if (skip := int(gaps[start]) - IMAGINED) > 0:
                self.skipped = (*self.skipped, (self.rows, skip)) if self.rows < HISTORY else ()
                self.model.skip(skip)
            own = order[start:stop]
            at = np.cumsum(np.minimum(gaps[start:stop], IMAGINED) + 1) - 1
            made, quantiles = (np.full((len(each) and at[-1] + 1, *each.shape[1:]), np.nan) for each in rows[2:4])
            spaced = np.full((int(at[-1]) + 1, values.shape[1]), np.nan)
            spaced[at] = values[own]
            self.learn(self._rows(spaced)._replace(made=made, quantiles=quantiles))
            for out, told in ((rows.made, made), (rows.quantiles, quantiles)):
                if len(out):
                    out[own[own >= 0]] = told[at[own >= 0]]
                    out[plan.late] = np.nan
        self.waiting = values[plan.waiting]

    def _rows(self, values: Floats) -> Rows:
        """Rows to learn without their forecasts, from values and inputs side by side."""
        Y, E = np.split(values, [self.settings.series], 1)
        return Rows(Y, E, ahead=self.ahead)

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
        known = () if self.clock.grid is None else self.clock.grid.seasons()
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

        return BlockModel(settings, self.clock.numbers, self.clock.start, self.fit)

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """The state as plain data."""
        return {
            "clock": self.clock.state_dict(),
            "waiting": self.waiting,
            "refused": self.refused,
            "first": self.first,
            "skipped": np.array(self.skipped, np.int64).reshape(-1, 2),
            "seasons": list(self.seasons),
            "model": None if self.model is None else self.model.state_dict(),
        }

    def load(self, new: schema.Entries) -> None:
        """Load a state into this new window."""
        clock, width = self.clock, self.first.shape[1]
        clock.load_state_dict(new["clock"])
        self.waiting = new.array("waiting", (len(clock.waiting), width), missing=True)
        self.refused = new.integer("refused")
        if new["model"] is not None:
            with schema.settings("state_dict['seasons']"):
                self.seasons = check_seasons(new.items("seasons").numbers())
                self.model = self._new_model()
            self.model.load_state_dict(new["model"], new.path("model"))
        kept = self.rows if self.rows < HISTORY else 0
        self.first = new.array("first", (kept, width), missing=True)
        self.skipped = tuple(map(tuple, new.array("skipped", (None, 2), np.int64, low=0).tolist()))
