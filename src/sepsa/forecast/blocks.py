"""Forecasts in blocks: a row for each block, which the learner of `SepSARegressor` learns once the block is complete.

A series is cut into blocks of `every` rows. The row of a block holds the values of the last blocks and of those a
season ago, exogenous inputs, and the place of the block in its seasons; its targets are the values of the `horizon`
rows from its first on. What is missing in a row is missing to the learner. A missing target is the learner's own
forecast, or in `fit` lies between its neighbours, and a block counts by the share of targets that it has.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np

from sepsa.forecast.block_rows import BlockPlan, Calendar, between, check_width
from sepsa.forecast.kernels.step import follow_quantiles
from sepsa.forecast.model import FIRST_QUANTILES, KNOWN, LEVELS, STEPS, Settings
from sepsa.interfaces.sklearn import SepSARegressor
from sepsa.learner.arithmetic.robust import HUGE
from sepsa.learner.memory.parts import Floats
from sepsa.states import schema

LEAST = 3  # blocks learned before the learner forecasts; until then the last values of each slot are the forecast
FEW = 30  # blocks that `fit` learns in order, as `update` does: too few to leave some out
IMPLAUSIBLE = 30.0  # times the largest deviation so far, beyond which a value counts as missing
SEVERAL = 3  # such values of a block, which may be a new level
TINY = 0.05  # of the size of all blocks before, below which two blocks are in another unit
SHARE = 0.25  # of its targets without which a block is not learned
RECENT = 0.98  # by which earlier errors count less with each block
ASSUMED = 32  # normal errors after `fit`, by which the first intervals are drawn
FAR = 2**48
COUNTS = {"point": (-FAR, FAR), "rows": (1,), "blocks": (), "newest": (-FAR, FAR), "closed": (0, 1), "dropped": ()}


class BlockModel:
    """The last blocks of series, and the learner that forecasts the next; it has the interface of `ForecastModel`."""

    def __init__(self, settings: Settings, calendar: Calendar, origin: int, fit: bool) -> None:
        m, q, H = settings.series, settings.exogenous, settings.horizon
        self.plan = BlockPlan.of(settings, settings.seasons)
        check_width(self.plan, settings)
        self.settings = settings._replace(seasons=tuple(s * settings.every for s in self.plan.seasons))
        self.calendar = calendar
        self.point = origin - 1  # that of the last row on the grid
        self.rows = 0  # so far, including rows in gaps
        self.blocks = 0  # that were learned
        self.dropped = 0  # values that were implausible
        self.newest = int(self._numbers(origin)) // settings.every - 1  # the number of the last block kept,
        self.closed = 1  # and whether it is complete
        self.kept: Floats = np.empty((0, settings.every, m + q))  # values and inputs of the last blocks
        self.seen: Floats = np.full(m, np.nan)  # the last value of each series
        self.far: Any = np.zeros(m, np.int64)  # how many values of the block before were dropped
        self.quantiles: Floats = np.tile(FIRST_QUANTILES[:, None, None], (1, m, H))  # of errors, in units of their size
        self.size: Floats = np.zeros((m, H))  # recent mean absolute errors,
        self.judged: Any = np.zeros((m, H), np.int64)  # and their number
        self.missed: Floats = np.zeros((1 + len(self.plan.input_lags), 2, m, H))  # sums of errors and weights
        self.learner: SepSARegressor | None = None
        self.table: list[tuple[Floats, Floats]] | None = [] if fit else None  # rows and targets that `fit` collects
        self.found: list[tuple[int, int, str]] = []  # series, point of the last row, and what is strange there

    def copy(self, found: list[tuple[int, int, str]]) -> BlockModel:
        """Another model in the same state, which adds what is strange to a list."""
        other = copy(self)
        other.found, other.kept = found, self.kept.copy()
        other.quantiles, other.size = self.quantiles.copy(), self.size.copy()
        if self.learner is not None:
            other.learner = shared(self.learner)
        return other

    @property
    def Y(self) -> Floats:
        """The values of the last blocks."""
        return self.kept[..., : self.settings.series]

    @property
    def E(self) -> Floats:
        """The exogenous inputs of the last blocks."""
        return self.kept[..., self.settings.series :]

    @property
    def outliers(self) -> int:
        """The number of values that were dropped as implausible, and of blocks that the learner has bounded."""
        return self.dropped + (0 if self.learner is None else self.learner.outliers_)

    def fit_scales(self, Y: Floats, E: Floats) -> Floats:
        """The rows as they are: the learner scales them."""
        return Y

    def skip(self, rows: int) -> None:
        """Go on by this many rows, of which nothing is known."""
        self.point += rows

    # ------------------------------------------------------------------ rows

    def _numbers(self, points: Any) -> Any:
        """The numbers of rows; a multiple of `every` begins a block."""
        return self.calendar.numbers(points) - self.settings.start

    def learn(self, Y: Floats, E: Floats, tell: int, ahead: bool) -> tuple[Floats, Floats]:
        """Learn rows Y (n, m) with E (n, q); returns the forecasts (n, m, H) after each, and their quantiles.

        Forecasts are those of the block, as far as they still reach. Where inputs are known ahead, E has those of
        later rows, of which there may be more than in Y: without them it is NaN.
        """
        m, H, every = self.settings.series, self.settings.horizon, self.settings.every
        made = np.full((len(Y), m, H), np.nan)
        quantiles = np.full((len(Y) if tell > 1 else 0, KNOWN, m, H), np.nan)
        numbers = self._numbers(self.point + 1 + np.arange(len(E) + (H if tell else 1)))
        told: tuple[int, Floats] | None = None
        for i, row in enumerate(np.hstack([Y, E[: len(Y)]])):
            block, following = int(numbers[i]) // every, int(numbers[i + 1]) // every
            if block > self.newest:
                self._open(block)
            slot = self.kept[block - self.newest - 1, numbers[i] % every]
            twice = np.where(np.isnan(row), slot, (slot + row) / 2)  # as daylight saving ends
            slot[:] = np.where(np.isnan(slot), row, twice)
            self.seen = np.where(np.isnan(Y[i]), self.seen, Y[i])
            self.point, self.rows = self.point + 1, self.rows + 1
            if following > self.newest and not self.closed:
                self._close()
            if tell:
                if told is None or told[0] != following:
                    told = following, self._forecast(numbers[i + 1 :], E[i + 1 :])
                forecast, known = self._told(told[1], numbers[i + 1 :][:H])
                made[i] = forecast
                quantiles[i : i + 1] = known
        return made, quantiles

    def _open(self, block: int) -> None:
        """Let there be this block; those before it are complete."""
        if not self.closed:
            self._close()
        new = np.full((min(block - self.newest, self.plan.kept), *self.kept.shape[1:]), np.nan)
        self.kept = np.concatenate([self.kept, new])[-self.plan.kept :]
        self.newest, self.closed = block, 0

    def _before(self, block: int, array: Floats) -> Floats:
        """The blocks of an array that a row of this block is made of, the latest last; NaN where there is none."""
        n = self.plan.lags[-1]
        out = np.full((n, *array.shape[1:]), np.nan)
        at = np.arange(block - n, block) - self.newest + len(array) - 1
        there = (at >= 0) & (at < len(array))
        out[there] = array[at[there]]
        return out

    def _row(self, block: int, ahead: Floats) -> tuple[Floats, Floats]:
        """The row of a block with these inputs ahead (horizon, q), and its level (m,): NaN without any value."""
        before = self._before(block, self.kept)
        values, inputs = np.split(before, [self.settings.series], 2)
        level = self.plan.level(values)
        return self.plan.row(block, values, inputs, ahead, np.nan_to_num(level)), level

    def _close(self) -> None:
        """Learn the block whose last targets have come with the newest one."""
        self.closed = 1
        self._drop_implausible()
        if max(self.blocks, len(self.table or ())) >= LEAST:
            self._find_units()
        reach, m = self.plan.reach, self.settings.series
        targets, ahead = np.split(np.concatenate(self.kept[-reach:])[: self.settings.horizon], [m], 1)
        row, level = self._row(self.newest - reach + 1, ahead)
        known = ~np.isnan(targets)
        if len(self.kept) <= reach or known.mean() < SHARE or (np.isnan(level) & known.any(0)).any():
            return
        if self.table is not None:
            self.table.append((row, targets))
        else:
            self._learn(row, targets)

    def _drop_implausible(self) -> None:
        """Let values of the newest block be missing that are far outside all before; zeros alone say not how far.

        They are a new level where they are most of the block, or the block before had several of them too.
        """
        every = self.settings.every
        before, block, several = self.Y[:-1].reshape(-1, self.settings.series), self.Y[-1], min(SEVERAL, every)
        far_before, self.far = self.far, np.zeros_like(self.far)
        for j in np.flatnonzero((~np.isnan(before)).sum(0) >= LEAST * every).tolist():
            level = np.nanmedian(before[:, j])
            spread = max(np.nanmax(np.abs(before[:, j] - level)), self.size[j].max()) or abs(level)
            far = np.abs(block[:, j] - level) > IMPLAUSIBLE * spread
            count = int(far.sum())
            if spread == 0 or not count:
                continue
            if count >= several and (2 * count > (~np.isnan(block[:, j])).sum() or far_before[j] >= several):
                what = f"{count} of {every} values are far outside all before, and learned as a new level"
                self.found.append((j, self.point, what))
            else:
                block[far, j] = np.nan
                self.far[j] = count
                self.dropped += count

    def _find_units(self) -> None:
        """Find series whose last two blocks are tiny beside all before; zeros, as of a closed shop, are left out.

        The block before the two may have values of both sizes.
        """
        there = np.where(self.Y == 0, np.nan, np.abs(self.Y))
        count = (~np.isnan(there)).sum(1)
        size = np.where(2 * count >= self.settings.every, np.nansum(there, 1) / np.maximum(count, 1), np.inf)
        least = size[:-3].min(0, initial=np.inf)  # of (blocks, m)
        tiny = (size[-2:].max(0) < TINY * least) & (size[-3:-2] >= TINY * least).all(0) & np.isfinite(least)
        for j in np.flatnonzero(tiny).tolist():
            before = size[:-3, j]
            share = size[-2:, j].mean() / before[np.isfinite(before)].mean()
            what = f"{2 * self.settings.every} values are {share:.1g} of the size of those before"
            self.found.append((j, self.point, what))

    # ------------------------------------------------------------------ learning

    def _learn(self, row: Floats, targets: Floats) -> None:
        """Let the learner learn a row of targets (H, m), and compare its forecast with the naive ones."""
        known, level = ~np.isnan(targets), row[-targets.shape[1] :]
        if self.learner is None:
            self.learner, filled = SepSARegressor(random_state=self.settings.seed), between(targets)
        else:
            filled = targets if known.all() else np.where(known, targets, self._answer(row).T)
        made = self.learner.prequential(row[None], (filled - level).reshape(1, -1), [known.mean()])
        if self.blocks >= LEAST:
            forecast, before = (
                made.reshape(targets.shape) + level,
                self._before(self.newest - self.plan.reach + 1, self.Y),
            )
            naive = [np.resize(before[-k], targets.shape) for k in self.plan.input_lags]
            errors = np.abs(np.stack([forecast, *naive]) - targets).swapaxes(1, 2)
            there = ~np.isnan(errors)
            self.missed = RECENT * self.missed + np.stack([np.where(there, errors, 0.0), there], 1)
            self._judge((targets - forecast).T)
        self.blocks += 1

    def _judge(self, errors: Floats) -> None:
        """Let the quantiles of errors (m, H) and their size learn those of a forecast."""
        self.judged = self.judged + ~np.isnan(errors)
        for j, h in np.argwhere(~np.isnan(errors)).tolist():
            e, quantiles = errors[j, h], self.quantiles[:, j, h]
            follow_quantiles(quantiles, quantiles * self.size[j, h], LEVELS, STEPS, 1.0, e)
            self.size[j, h] += max(1.0 - RECENT, 1.0 / self.judged[j, h]) * (abs(e) - self.size[j, h])

    def finish(self) -> None:
        """Let a new learner learn the rows that `fit` has collected together; few of them in order."""
        table, self.table = self.table, None
        if not table:
            return
        rows, targets = (np.array(part) for part in zip(*table, strict=True))
        share = (~np.isnan(targets)).mean((1, 2))
        filled = np.array([between(each) for each in targets]) - rows[:, None, -targets.shape[2] :]
        self.learner = SepSARegressor(random_state=self.settings.seed)
        learn = self.learner.partial_fit if len(rows) < FEW else self.learner.fit
        learn(rows, filled.reshape(len(rows), -1), share)
        deviation = self.learner.predict(rows[-1:], return_std=True)[1].reshape(targets.shape[1:]).T
        self.blocks, self.size = len(rows), deviation * np.sqrt(2 / np.pi)
        self.judged = np.full_like(self.judged, ASSUMED)

    # ------------------------------------------------------------------ forecasts

    def _slots(self, following: Any) -> Any:
        """The slots of the rows of these numbers in the block of the first, as far as its forecast reaches them."""
        slots = following - following[0] // self.settings.every * self.settings.every
        return slots[np.logical_and.accumulate(slots < self.settings.horizon)]

    def reach(self) -> int:
        """The number of rows after the last one that the forecast of their block reaches."""
        return len(self._slots(self._numbers(self.point + 1 + np.arange(self.settings.horizon))))

    def forecast(self, E: Floats) -> tuple[Floats, Floats]:
        """The forecasts (m, H) after the last row, and their quantiles (KNOWN, m, H); E (k, q) are the rows ahead.

        They are NaN from `reach()` on.
        """
        following = self._numbers(self.point + 1 + np.arange(max(len(E), self.settings.horizon)))
        return self._told(self._forecast(following, E), following[: self.settings.horizon])

    def _forecast(self, following: Any, E: Floats) -> Floats:
        """The forecasts (m, H) of the block of the next row, NaN for a series without a value in the blocks before.

        `following` are the numbers of the next rows, and E the inputs of some of them. Where inputs are known ahead and
        have not come, it is infinite.
        """
        q, H, every = self.settings.exogenous, self.settings.horizon, self.settings.every
        block, ahead = int(following[0]) // every, np.full((H, q), np.nan)
        if block == self.newest:
            ahead[:every] = self.E[-1][:H]
        slots = following[: len(E)] - block * every
        ahead[slots[slots < H]] = E[slots < H]
        came = int(self._numbers(self.point)) - block * every  # the slot of the last row
        short = max(came, slots.max(initial=-1)) < H - 1 and len(E) < len(self._slots(following[:H]))
        if self.plan.ahead and q and short:
            return np.full((self.settings.series, H), np.inf)
        if self.blocks < LEAST:
            return self._last_values(block)
        row, level = self._row(block, ahead)
        return np.where(np.isnan(level)[:, None], np.nan, self._answer(row))

    def _told(self, forecast: Floats, following: Any) -> tuple[Floats, Floats]:
        """What there is of a block's forecast for the rows of these numbers, and its quantiles."""
        slots, limits = self._slots(following), self.settings.bounds
        made, quantiles = np.full_like(forecast, np.nan), np.full((KNOWN, *forecast.shape), np.nan)
        left = np.where(np.isnan(forecast), self.seen[:, None], forecast)[:, slots]
        left = np.where(np.isinf(left), np.nan, left)
        ends = (self.quantiles * self.size)[..., slots]
        made[:, : len(slots)], quantiles[:-1, :, : len(slots)] = np.clip(left, *limits), np.clip(left + ends, *limits)
        quantiles[-1, :, : len(slots)] = self.judged[:, slots]
        return made, quantiles

    def _answer(self, row: Floats) -> Floats:
        """The learner's forecasts (m, H)."""
        assert self.learner is not None
        m, H = self.settings.series, self.settings.horizon
        made = np.asarray(self.learner.predict(row[None])).reshape(H, m)
        return made.T + row[-m:, None]

    def _last_values(self, block: int) -> Floats:
        """The last value (m, H) that each slot had in an earlier block; NaN where there is none."""
        made = np.full((self.settings.every, self.settings.series), np.nan)
        for number, values in enumerate(self.Y, self.newest - len(self.Y) + 1):
            if number < block:
                made = np.where(np.isnan(values), made, values)
        return np.resize(made, (self.settings.horizon, self.settings.series)).T

    def errors(self) -> dict[str, Floats]:
        """The recent absolute errors (m, H) of the forecasts and of each naive forecast; NaN before there is one."""
        with np.errstate(invalid="ignore"):
            missed = [total / weight for total, weight in self.missed]
        ago = [f"{k} block{'s' * (k > 1)} of {self.settings.every} rows ago" for k in self.plan.input_lags]
        return dict(zip(["forecast", *ago], missed, strict=True))

    def recent(self) -> Floats:
        """The last values (m, n) of the series, NaN where they are missing."""
        number = int(self._numbers(self.point)) - (self.newest - len(self.Y) + 1) * self.settings.every
        values: Floats = self.Y.reshape(-1, self.Y.shape[2])[: number + 1].T
        return values[:, max(values.shape[1] - self.rows, 0) :]

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """The state as plain data."""
        return {
            "counts": [int(getattr(self, name)) for name in COUNTS],
            "start": self.settings.start,
            **{name: getattr(self, name).copy() for name in self._arrays()},
            "learner": None if self.learner is None else self.learner.state_dict(),
        }

    def _arrays(self) -> dict[str, Any]:
        """The arrays of a state, and their shapes."""
        m, H = self.settings.series, self.settings.horizon
        return {
            "kept": (None, *self.kept.shape[1:]),
            "seen": (m,),
            "far": (m,),
            "quantiles": (len(LEVELS), m, H),
            "size": (m, H),
            "judged": (m, H),
            "missed": self.missed.shape,
        }

    def load_state_dict(self, state_dict: Any, entry: str) -> None:
        """Continue from the result of `state_dict`; a ValueError names the wrong entry and leaves a part of the state.

        Only a new model loads, which is dropped after an error.
        """
        new = schema.read(entry, state_dict, {"counts", "start", "learner", *self._arrays()})
        new.equal("start", self.settings.start)
        counts = new.items("counts", len(COUNTS))
        for i, (name, ends) in enumerate(COUNTS.items()):
            setattr(self, name, counts.integer(i, *ends))
        for name, shape in self._arrays().items():
            dtype, data = getattr(self, name).dtype, name in ("kept", "seen")
            low = -np.inf if data or name == "quantiles" else 0.0
            array = new.array(name, shape, dtype, low=low, missing=data)
            if data and (np.abs(array) > HUGE).any():
                raise new.damaged(name, f"numbers up to {HUGE:g}", "others")
            setattr(self, name, array)
        if not 0 < len(self.kept) <= self.plan.kept:
            raise new.damaged("kept", f"1 to {self.plan.kept} blocks", len(self.kept))
        if (np.diff(self.quantiles, axis=0) < 0).any():
            raise new.damaged("quantiles", "in order", "others")
        if (new["learner"] is None) != (self.blocks == 0):
            raise new.damaged("learner", f"that of {self.blocks} blocks", new["learner"])
        if new["learner"] is not None:
            self.learner = self._loaded(new)

    def _loaded(self, new: schema.Entries) -> SepSARegressor:
        """The learner of a saved state, of the width of this plan."""
        m, H = self.settings.series, self.settings.horizon
        learner = SepSARegressor(random_state=self.settings.seed)
        learner.load_state_dict(new["learner"])
        width, targets = self.plan.width(m, self.settings.exogenous), learner._target_shape
        if learner.n_features_in_ != width or targets != (H * m,):
            raise new.damaged("learner", f"one of {width} inputs and {H * m} targets", learner.n_features_in_)
        return learner


def shared(learner: SepSARegressor) -> SepSARegressor:
    """Another estimator with what this one has learned."""
    other = SepSARegressor.__new__(SepSARegressor)
    other.__dict__.update({name: value for name, value in vars(learner).items() if name != "_lock"})
    other._learner = learner._learner.copy()
    return other
