"""Forecasts in blocks: a row for each block, which the learner of `SepSARegressor` learns once the block is complete.

A series is cut into blocks of `every` rows. The row of a block holds the values of the last blocks and of those a
season ago, exogenous inputs, and the place of the block in its seasons; its targets are the values of the `horizon`
rows from its first on. What is missing in a row is missing to the learner. A missing target is the learner's own
forecast, or in `fit` lies between its neighbours, and a block counts by the share of targets that it has.
"""

from __future__ import annotations

import math
from copy import copy
from typing import Any

import numpy as np

from sepsa.forecast.clock import Clock
from sepsa.forecast.kernels.parts import TOLD
from sepsa.forecast.kernels.step import follow_quantiles
from sepsa.forecast.model import FIRST_QUANTILES, Rows, Settings
from sepsa.interfaces.sklearn import SepSARegressor
from sepsa.interrupt import new_lock
from sepsa.learner.memory.parts import Floats
from sepsa.states import schema

LAST = (1, 2, 3)  # blocks ago that are inputs, beside those of a season
INDICATORS = 31  # blocks of a season up to which each has an indicator; a longer one has a sine and a cosine
MOST_INPUTS = 2048  # of the learner
LEAST = 3  # blocks learned before the learner forecasts; until then the last values of each slot are the forecast
FEW = 30  # blocks that `fit` learns in order, as `update` does: too few to leave some out
IMPLAUSIBLE = 30.0  # times the largest deviation so far, beyond which a value counts as missing
SEVERAL = 3  # such values of a block, which are a new level where the block before had as many
SHARE = 0.25  # of its targets without which a block is not learned
RECENT = 0.98  # by which earlier errors count less with each block
ASSUMED = 32  # normal errors after `fit`, by which the first intervals are drawn
COUNTS = ("point", "rows", "blocks", "newest", "dropped")
ARRAYS = ("kept", "seen", "quantiles", "far", "size", "judged", "missed")


class BlockModel:
    """The last blocks of series, and the learner that forecasts the next; it has the interface of `ForecastModel`."""

    def __init__(self, settings: Settings, clock: Clock, fit: bool) -> None:
        m, q, H, every = settings.series, settings.exogenous, settings.horizon, settings.every
        # Seasons in blocks, of which a season must be a whole number; one of more than INDICATORS is rounded.
        periods = [s / every for s in settings.seasons if s > every and (s % every == 0 or s > INDICATORS * every)]
        last = LAST if isinstance(settings.lags, str) else range(1, math.ceil(settings.lags / every) + 1)
        self.periods = periods
        self.lags = sorted({*last, *map(round, periods)})  # blocks ago whose values are inputs
        self.input_lags = sorted({1, *map(round, periods)})  # and those whose exogenous inputs are
        self.touched = -(-H // every)  # blocks that a forecast touches
        room = self.lags[-1] + self.touched + 1  # blocks that are kept
        self.settings = settings._replace(seasons=tuple(period * every for period in periods))
        self.clock = clock  # which has the numbers of rows at points of its grid
        self.point = clock.start - 1  # that of the last row
        self.first_rows = LEAST * every  # before any value is implausible, which the window gives without outliers
        self.warm_up = 2 * self.first_rows  # rows until which all are learned again
        self.rows = 0  # so far, including rows in gaps
        self.blocks = 0  # that were learned
        self.dropped = 0  # values that were implausible
        self.newest = self._ahead()[0] - 1  # the number of the last block kept
        self.kept: Floats = np.full((room, every, m + q), np.nan)  # values and inputs of the last blocks
        self.seen: Floats = np.full(m, np.nan)  # the last value of each series
        self.far: Any = np.zeros(m, np.int64)  # how many values of the block before were dropped
        self.quantiles: Floats = np.tile(FIRST_QUANTILES[:, None, None], (1, m, H))  # of errors, in units of their size
        self.size: Floats = np.zeros((m, H))  # recent mean absolute errors,
        self.judged: Any = np.zeros((m, H), np.int64)  # and their number
        self.missed: Floats = np.zeros((1 + len(self.input_lags), 2, m, H))  # sums of errors and weights
        self.learner = SepSARegressor(random_state=settings.seed)  # which has learned so many blocks
        self.answer: tuple[Floats, Floats] | None = None  # the last row that it was asked for, and the forecasts
        self.table: list[tuple[Floats, Floats]] | None = [] if fit else None  # rows and targets that `fit` collects
        self.width = len(self._row(self.newest + 1, np.zeros((H, q)))[0])
        if self.width > MOST_INPUTS:
            raise ValueError(
                f"every must be such that the last {len(self.lags)} blocks of {m} series and {q} inputs make at most "
                f"{MOST_INPUTS} inputs, got {every}, which makes {self.width}: give fewer lags, or longer steps"
            )

    def copy(self) -> BlockModel:
        """Another model in the same state."""
        other, known = copy(self), self.learner._learner
        vars(other).update({name: getattr(self, name).copy() for name in ARRAYS})
        other.learner = SepSARegressor()
        body = None if known.body is None else known.body.copy()
        other.learner.__dict__.update(vars(self.learner), _learner=known._replace(body=body), _lock=new_lock())
        return other

    @property
    def Y(self) -> Floats:
        """The values of the last blocks."""
        return self.kept[..., : self.settings.series]

    @property
    def outliers(self) -> int:
        """The number of values that were dropped as implausible, and of blocks that the learner has bounded."""
        return self.dropped + self.learner.outliers_

    def fit_scales(self, Y: Floats, E: Floats) -> None:
        """The learner scales the rows."""

    def skip(self, rows: int) -> None:
        """Go on by this many rows, of which nothing is known."""
        begun = self._ahead()[0] == self.newest
        self.point += rows
        if begun and self._ahead()[0] > self.newest:
            self._close()

    # ------------------------------------------------------------------ rows

    def _numbers(self, count: int) -> Any:
        """The numbers of so many rows after the last one; a multiple of `every` begins a block."""
        return self.clock.numbers(self.point + 1 + np.arange(count)) - self.settings.start

    def learn(self, rows: Rows) -> None:
        """Learn rows; forecasts are those of the block, as far as they still reach."""
        Y, E, H, every = rows.Y, rows.E, self.settings.horizon, self.settings.every
        numbers = self._numbers(len(Y) + 1)
        for i, row in enumerate(np.hstack([Y, E[: len(Y)]])):
            block, following = int(numbers[i]) // every, int(numbers[i + 1]) // every
            if block > self.newest:
                new = np.full((min(block - self.newest, len(self.kept)), *self.kept.shape[1:]), np.nan)
                self.kept, self.newest = np.concatenate([self.kept[len(new) :], new]), block
            slot = self.kept[block - self.newest - 1, numbers[i] % every]
            # An hour comes twice as daylight saving ends.
            slot[:] = row if np.isnan(slot).all() else mean_of_known(np.stack([slot, row]))
            self.seen = np.where(np.isnan(Y[i]), self.seen, Y[i])
            self.point, self.rows = self.point + 1, self.rows + 1
            if following > self.newest:
                self._close()
            if rows.told.size:
                rows.told[i] = self.forecast(E[i + 1 :][: H + every])[: rows.told.shape[1]]

    def _before(self, block: int) -> tuple[Floats, Floats]:
        """The values and the inputs of the blocks that the row of a block is made of, the latest last, or NaN."""
        end = len(self.kept) + block - self.newest - 1
        values, inputs = np.split(self.kept[end - self.lags[-1] : end], [self.settings.series], 2)
        return values, inputs

    def _row(self, block: int, ahead: Floats) -> tuple[Floats, Floats]:
        """The row of a block with these inputs ahead (horizon, q), and its level (m,): NaN without any value.

        Inputs ahead enter themselves and by their change since the blocks before. Values are less the level, the mean
        of the last season or of the last three blocks, which ends the row, as are the targets: most of what changes a
        series slowly changes its level.
        """
        values, inputs = self._before(block)
        longest = max(LAST[-1], *(round(period) for period in self.periods if period <= INDICATORS), 0)
        level = mean_of_known(values[-longest:].reshape(-1, values.shape[2]))
        about = np.nan_to_num(level)
        parts = [(values[-k] - about).ravel() for k in self.lags]
        if self.settings.known_ahead:
            ago = [np.concatenate([*inputs[-k:], ahead])[: len(ahead)] for k in self.input_lags]
            parts += [ahead.ravel(), *((ahead - before).ravel() for before in ago)]
        else:
            parts += [inputs[-k].ravel() for k in self.input_lags]
        return np.concatenate([*parts, *(phase(block, period) for period in self.periods), about]), level

    def _close(self) -> None:
        """Learn the block whose last targets have come with the newest one."""
        self._drop_implausible()
        touched, m = self.touched, self.settings.series
        targets, ahead = np.split(np.concatenate(self.kept[-touched:])[: self.settings.horizon], [m], 1)
        row, level = self._row(self.newest - touched + 1, ahead)
        known = ~np.isnan(targets)
        if known.mean() < SHARE or (np.isnan(level) & known.any(0)).any():
            return
        if self.table is not None:
            self.table.append((row, targets))
        else:
            self._learn(row, targets)

    def _drop_implausible(self) -> None:
        """Let values of the newest block be missing that are far outside all before; zeros alone say not how far.

        They are a new level where this block and the one before had several of them.
        """
        every, before, block = self.settings.every, self.Y[:-1].reshape(-1, self.settings.series), self.Y[-1]
        enough = (~np.isnan(before)).sum(0) >= LEAST * every
        before = np.where(enough, before, 0.0)
        level = np.nanmedian(before, 0)
        spread = np.maximum(np.nanmax(np.abs(before - level), 0), self.size.max(1))
        spread = np.where(spread == 0, np.abs(level), spread)
        far = (np.abs(block - level) > IMPLAUSIBLE * spread) & enough & (spread > 0)
        far &= np.minimum(far.sum(0), self.far) < min(SEVERAL, every)
        self.far = far.sum(0)
        self.dropped += int(self.far.sum())
        block[far] = np.nan

    # ------------------------------------------------------------------ learning

    def _learn(self, row: Floats, targets: Floats) -> None:
        """Let the learner learn a row of targets (H, m), and compare its forecast with the naive ones."""
        known, level = ~np.isnan(targets), row[-targets.shape[1] :]
        filled = targets
        if not known.all():
            filled = np.where(known, targets, self._answer(row).T) if self.blocks else between(targets)
        self.answer = None
        made = self.learner.prequential(row[None], (filled - level).reshape(1, -1), [known.mean()])
        if self.blocks >= LEAST:
            forecast, before = made.reshape(targets.shape) + level, self._before(self.newest - self.touched + 1)[0]
            naive = [np.resize(before[-k], targets.shape) for k in self.input_lags]
            errors = np.abs(np.stack([forecast, *naive]) - targets).swapaxes(1, 2)
            self.missed = RECENT * self.missed + np.stack([np.nan_to_num(errors), ~np.isnan(errors)], 1)
            self._judge((targets - forecast).T)
        self.blocks += 1

    def _judge(self, errors: Floats) -> None:
        """Let the quantiles of errors (m, H) and their size learn those of a forecast."""
        there = ~np.isnan(errors)
        self.judged = self.judged + there
        for j, h in np.argwhere(there).tolist():
            e, quantiles = errors[j, h], self.quantiles[:, j, h]
            follow_quantiles(quantiles, quantiles * self.size[j, h], 1.0, e)
            self.size[j, h] += max(1.0 - RECENT, 1.0 / self.judged[j, h]) * (abs(e) - self.size[j, h])

    def finish(self) -> None:
        """Let a new learner learn the rows that `fit` has collected together; few of them in order."""
        table, self.table = self.table, None
        if not table:
            return
        rows, targets = (np.array(part) for part in zip(*table, strict=True))
        share = (~np.isnan(targets)).mean((1, 2))
        filled = np.array([between(each) for each in targets]) - rows[:, None, -targets.shape[2] :]
        learn = self.learner.partial_fit if len(rows) < FEW else self.learner.fit
        learn(rows, filled.reshape(len(rows), -1), share)
        deviation = self.learner.predict(rows[-1:], return_std=True)[1].reshape(targets.shape[1:]).T
        self.blocks, self.size = len(rows), deviation * np.sqrt(2 / np.pi)
        self.judged = np.full_like(self.judged, ASSUMED)

    # ------------------------------------------------------------------ forecasts

    def _ahead(self, rows: int = 0) -> tuple[int, Any, int]:
        """The block of the next row, the slots in it of so many rows, and how many its forecast still reaches."""
        H, every = self.settings.horizon, self.settings.every
        following = self._numbers(max(rows, H))
        block = int(following[0]) // every
        slots = following - block * every
        return block, slots, int(np.logical_and.accumulate(slots[:H] < H).sum())

    def reach(self) -> int:
        """The number of rows after the last one that the forecast of their block reaches."""
        return self._ahead()[2]

    def check_ahead(self, given: int) -> None:
        """Raise a ValueError where forecasts do not get the exogenous inputs that the learner has learned with."""
        if not self.settings.known_ahead and given:
            raise ValueError(
                f"X and xs must be None, got {given} rows of inputs: give known_ahead=True to SepSAForecaster, so that "
                "it learns with the inputs of the rows that it forecasts"
            )
        if self.settings.known_ahead and self.settings.exogenous and given != self.reach():
            raise ValueError(
                f"X or xs must hold the exogenous inputs of the {self.reach()} rows ahead, as known_ahead=True says, "
                f"got {given} rows: NaN is a missing one"
            )

    def start_next(self) -> int:
        """The option `start` with which a block begins at the next row."""
        return int(self._ahead()[1][0] + self.settings.start) % self.settings.every

    def forecast(self, E: Floats) -> Floats:
        """What is told (TOLD, m, H) after the last row; E (k, q) are the rows ahead.

        Forecasts are NaN from `reach()` on, and where inputs that are known ahead have not come.
        """
        m, q, H, every = self.settings.series, self.settings.exogenous, self.settings.horizon, self.settings.every
        out, ahead = np.full((TOLD, m, H), np.nan), np.full((H, q), np.nan)
        block, slots, reach = self._ahead(len(E))
        if self.settings.known_ahead and q and len(E) < reach:
            return out
        given = slots[: len(E)]
        if block == self.newest:
            ahead[:every] = self.kept[-1, :H, m:]
        ahead[given[given < H]] = E[given < H]
        if self.blocks < LEAST:
            told = np.resize(self._before(block)[0][-1], (H, m)).T
        else:
            row, level = self._row(block, ahead)
            told = np.where(np.isnan(level)[:, None], np.nan, self._answer(row))
        told = np.where(np.isnan(told), self.seen[:, None], told)
        ends = np.clip([told, *(told + self.quantiles * self.size)], *self.settings.bounds)
        out[..., :reach] = np.array([*ends, self.judged])[..., slots[:reach]]
        return out

    def _answer(self, row: Floats) -> Floats:
        """The learner's forecasts (m, H)."""
        if self.answer is None or not np.array_equal(self.answer[0], row, equal_nan=True):
            m, H = self.settings.series, self.settings.horizon
            self.answer = row, self.learner.predict(row[None]).reshape(H, m).T + row[-m:, None]
        return self.answer[1]

    def errors(self) -> dict[str, Floats]:
        """The recent absolute errors (m, H) of the forecasts and of each naive forecast; NaN before there is one."""
        with np.errstate(invalid="ignore"):
            missed = [total / weight for total, weight in self.missed]
        ago = [f"{k} block{'s' * (k > 1)} of {self.settings.every} rows ago" for k in self.input_lags]
        return dict(zip(["forecast", *ago], missed, strict=True))

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """The state as plain data."""
        return {
            "counts": [int(getattr(self, name)) for name in COUNTS],
            "start": self.settings.start,
            "width": self.width,
            **{name: getattr(self, name).copy() for name in ARRAYS},
            "learner": self.learner.state_dict() if self.blocks else None,
        }

    def load_state_dict(self, state_dict: Any, entry: str) -> None:
        """Continue from the result of `state_dict`; a ValueError names the wrong entry and leaves a part of the state.

        Only a new model loads, which is dropped after an error.
        """
        new = schema.read(entry, state_dict, set(self.state_dict()))
        new.equal("start", self.settings.start)
        new.equal("width", self.width)
        vars(self).update(zip(COUNTS, new["counts"], strict=True))
        for name in ARRAYS:
            own = getattr(self, name)
            setattr(self, name, new.array(name, own.shape, own.dtype))
        if new["learner"] is not None:
            self.learner.load_state_dict(new["learner"])


def mean_of_known(values: Floats) -> Floats:
    """The mean of the numbers of each column (n, m); NaN for one without any."""
    count = (~np.isnan(values)).sum(0)
    return np.where(count > 0, np.nansum(values, 0) / np.maximum(count, 1), np.nan)


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
