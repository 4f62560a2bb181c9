"""Rows of blocks: which block and slot a row of a series belongs to, and the inputs by which a block is forecast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import tzinfo
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sepsa.forecast.grids import BUSINESS, DAY, MONTHS, Grid, day_of, month_of
from sepsa.forecast.model import Settings
from sepsa.forecast.times import local_seconds
from sepsa.learner.memory.parts import Floats

MONDAY = 4 * DAY  # seconds since 1970 of the first Monday, from which rows of dates are numbered
LAST = (1, 2, 3)  # blocks ago that are inputs, beside those of a season
INDICATORS = 31  # blocks of a season up to which each has an indicator; a longer one has a sine and a cosine
MOST_INPUTS = 2048  # of the learner
EARLY = 0.25  # of a step: a row that comes by less before its time is in time

Numbers: TypeAlias = NDArray[np.int64]


class Calendar(NamedTuple):
    """A grid, whether its times are dates, and their zone."""

    grid: Grid | None
    dated: bool = False
    zone: tzinfo | None = None

    def numbers(self, points: Any) -> Numbers:
        """The numbers of rows at these points, so that 0 is at midnight of a Monday, or begins a year.

        They go by local time: where daylight saving begins a number is left out, and where it ends one comes twice.
        Without a grid a row's number is its point; the numbers of times that are no dates start at time 0.
        """
        numbers, grid = np.asarray(points, np.int64), self.grid
        if grid is None:
            return numbers
        if grid.unit == MONTHS:
            return numbers + month_of(grid.origin) // int(grid.step)
        if grid.unit == BUSINESS:
            return numbers + int(np.busday_count(day_of(MONDAY), day_of(grid.origin)))
        walls = grid.origin + numbers * grid.step
        if self.zone is not None and grid.step < DAY:
            walls = np.array([local_seconds(at, self.zone) for at in walls.ravel().tolist()]).reshape(walls.shape)
        return np.floor((walls - MONDAY * self.dated) / grid.step + EARLY).astype(np.int64)


class BlockPlan(NamedTuple):
    """What the row of a block holds: values of earlier blocks, inputs of these and of the block itself, the season."""

    every: int  # rows of a block
    horizon: int  # rows that are forecast from a block's first on
    lags: tuple[int, ...]  # blocks ago whose values are inputs
    seasons: tuple[float, ...]  # in blocks
    ahead: bool  # whether the exogenous inputs of the rows to forecast are known

    @classmethod
    def of(cls, settings: Settings, seasons: Sequence[float]) -> BlockPlan:
        """The plan for these seasons in rows; by the lags of the settings for so many last rows.

        A season of some blocks must be a whole number of them; one of more than INDICATORS is rounded.
        """
        every, lags = settings.every, settings.lags
        whole = tuple(s / every for s in seasons if s > every and (s % every == 0 or s > INDICATORS * every))
        last = LAST if isinstance(lags, str) else range(1, math.ceil(lags / every) + 1)
        known = tuple(sorted({*last, *(round(s) for s in whole)}))
        return cls(every, settings.horizon, known, whole, settings.known_ahead)

    @property
    def reach(self) -> int:
        """The number of blocks that a forecast touches."""
        return -(-self.horizon // self.every)

    @property
    def kept(self) -> int:
        """The number of blocks that rows and targets are made of: those before, those to forecast, the open one."""
        return self.lags[-1] + self.reach + 1

    @property
    def input_lags(self) -> tuple[int, ...]:
        """Blocks ago whose exogenous inputs are inputs: the last one, and one of each season."""
        return tuple(sorted({1, *(round(s) for s in self.seasons)}))

    def level(self, values: Floats) -> Floats:
        """The mean (m,) of the blocks (n, every, m) of the last season, or of the last three; NaN without any value."""
        longest = max(LAST[-1], *(round(s) for s in self.seasons if s <= INDICATORS), 0)
        last = values[-longest:].reshape(-1, values.shape[2])
        there = ~np.isnan(last)
        total, count = np.where(there, last, 0.0).sum(0), there.sum(0)
        mean: Floats = np.where(count > 0, total / np.maximum(count, 1), np.nan)
        return mean

    def row(self, block: int, values: Floats, inputs: Floats, ahead: Floats, level: Floats) -> Floats:
        """The row of a block, from the blocks (n, every, m) and (n, every, q) before it, the latest last.

        `ahead` (horizon, q) are the exogenous inputs of the rows to forecast: they enter themselves and by their change
        since the blocks before. Values are less the `level` (m,), which ends the row, as are the targets: most of what
        changes a series slowly changes its level.
        """
        parts = [(values[-k] - level).ravel() for k in self.lags]
        if self.ahead:
            ago = [np.concatenate([*inputs[-k:], ahead])[: self.horizon] for k in self.input_lags]
            parts += [ahead.ravel(), *((ahead - before).ravel() for before in ago)]
        else:
            parts += [inputs[-k].ravel() for k in self.input_lags]
        return np.concatenate([*parts, *(phase(block, season) for season in self.seasons), level])

    def width(self, series: int, exogenous: int) -> int:
        """The number of inputs of a row."""
        shape = (self.lags[-1], self.every)
        none = np.zeros((self.horizon, exogenous))
        return len(self.row(0, np.zeros((*shape, series)), np.zeros((*shape, exogenous)), none, np.zeros(series)))


def phase(block: int, season: float) -> Floats:
    """Where in a season of so many blocks this one is: indicators, or a sine and a cosine of a long one."""
    if season <= INDICATORS:
        return np.array(np.arange(season) == block % season, np.float64)
    angle = 2 * np.pi * (block % season) / season
    return np.array([np.sin(angle), np.cos(angle)])


def between(targets: Floats) -> Floats:
    """Targets (horizon, m) with missing ones on the line between their neighbours; 0 for a series without any."""
    out, steps = targets.copy(), np.arange(len(targets))
    for column in out.T:
        there = ~np.isnan(column)
        column[~there] = np.interp(steps[~there], steps[there], column[there]) if there.any() else 0.0
    return out


def check_width(plan: BlockPlan, settings: Settings) -> None:
    """Raise a ValueError where the rows of a plan are wider than the learner takes."""
    width = plan.width(settings.series, settings.exogenous)
    if width > MOST_INPUTS:
        raise ValueError(
            f"every must be such that the last {len(plan.lags)} blocks of {settings.series} series and "
            f"{settings.exogenous} inputs make at most {MOST_INPUTS} inputs, got {plan.every}, which makes {width}: "
            "give fewer lags, or longer steps"
        )
