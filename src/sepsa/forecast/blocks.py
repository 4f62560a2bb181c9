"""Forecasts in blocks: a row for each block, which the learner of `SepSARegressor` learns once the block is complete.

A series is cut into blocks of `every` rows. The row of a block holds the values of the last blocks and of those a
season ago, exogenous inputs, and the place of the block in its seasons; its targets are the values of the `horizon`
rows from its first on. What is missing in a row is missing to the learner. A missing target is the learner's own
forecast, or in `fit` lies between its neighbours, and a block counts by the share of targets that it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from statistics import NormalDist
from typing import Any

import numpy as np

from sepsa.forecast.block_rows import BlockPlan, between, check_width, row_numbers
from sepsa.forecast.clock import HISTORY, SETTLED, Clock
from sepsa.forecast.grids import Grid
from sepsa.forecast.history import IMAGINED, Purpose
from sepsa.forecast.model import KNOWN, LEVELS, Settings
from sepsa.forecast.rows import packed
from sepsa.forecast.seasons import check_seasons
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
ERRORS = 256  # of the last forecasts, whose quantiles are those of an interval
ASSUMED = 32  # normal errors after `fit`, which the first forecasts replace; in a mixed order
PLACE = {  # numbers of a saved state, and the least and largest
    "point": (-(2**48), 2**48),
    "rows": (1,),
    "blocks": (),
    "newest": (-(2**48), 2**48),
    "closed": (0, 1),
    "assumed": (0, ASSUMED),
}
SCORES: Floats = np.array([NormalDist().inv_cdf((13 * i % ASSUMED + 0.5) / ASSUMED) for i in range(ASSUMED)])


class BlockHistory:
    """The last blocks of series, and the learner that forecasts the next.

    It has the interface of `History`, and as `model` that of `ForecastModel`.
    """

    def __init__(
        self,
        settings: Settings,
        every: int,
        start: int,
        lags: int | str,
        seasons: Sequence[float] | str,
        seed: int,
        clock: Clock,
    ) -> None:
        self.settings, self.every, self.start = settings, every, start
        self.lags, self.seasons, self.ahead, self.seed = lags, seasons, settings.known_ahead, seed
        self.dated, self.zone = clock.dated, clock.zone
        self.grid: Grid | None = None  # that of the clock at the last row
        self.first: list[tuple[int, Floats]] = []  # points, values and inputs of rows that the clock may place anew
        self.found: list[tuple[int, int, str]] = []  # series, point of the last row, and what is strange there
        self._reset()

    def _reset(self) -> None:
        """Forget all rows but the first."""
        m, q, H = self.settings.series, self.settings.exogenous, self.settings.horizon
        self.purpose: Purpose = "learn"
        self.point = -1  # that of the last row on the grid
        self.rows = 0  # so far, including rows in gaps
        self.blocks = 0  # that were learned
        self.dropped = 0  # values that were implausible
        self.plan: BlockPlan | None = None
        self.newest, self.closed = 0, False  # the number of the last block kept, and whether it is complete
        self.kept: Floats = np.empty((0, self.every, 2 * m + q))  # of the last blocks
        self.seen: Floats = np.full(m, np.nan)  # the last value of each series
        self.residuals: Floats = np.empty((0, m, H))  # of the last forecasts, after those assumed by `fit`
        self.assumed = 0
        self.missed: Floats = np.zeros((0, 2, m, H))  # recent sums of errors and of their weights, by forecast
        self.learner: SepSARegressor | None = None
        self.table: list[tuple[Floats, Floats]] = []  # rows and targets that `fit` has collected

    @property
    def Y(self) -> Floats:
        """The values of the last blocks."""
        return self.kept[..., : self.settings.series]

    @property
    def count(self) -> Floats:
        """How many values each of these is the mean of; -1: it was dropped."""
        return self.kept[..., self.settings.series :][..., : self.settings.series]

    @property
    def E(self) -> Floats:
        """The exogenous inputs of the last blocks."""
        return self.kept[..., 2 * self.settings.series :]

    @property
    def model(self) -> BlockHistory | None:
        """This object, as soon as there is a row."""
        return self if self.rows else None

    @property
    def outliers(self) -> int:
        """The number of values that were dropped as implausible, and of blocks that the learner has bounded."""
        return self.dropped + (0 if self.learner is None else self.learner.outliers_)

    def begun(self, purpose: Purpose) -> BlockHistory:
        """A copy that learns rows for this purpose and collects what is strange in them; this object stays as it is."""
        other = copy(self)
        other.purpose, other.first, other.found = purpose, self.first.copy(), []
        other.kept, other.seen = self.kept.copy(), self.seen.copy()
        if self.learner is not None:
            other.learner = shared(self.learner)
        return other

    def finish(self) -> list[tuple[int, int, str]]:
        """Let the learner learn what `fit` has collected; returns what was strange."""
        if self.table:
            self._fit()
        self.purpose = "learn"
        return self.found

    # ------------------------------------------------------------------ rows

    def _numbers(self, points: Any) -> Any:
        """The numbers of rows; a multiple of `every` begins a block."""
        return row_numbers(self.grid, points, self.dated, self.zone) - self.start

    def learn(self, Y: Floats, E: Floats, intervals: bool = False, ahead: bool = False) -> tuple[Floats, Floats]:
        """Learn rows that follow the last one; returns what `learn_spaced` does."""
        return self.learn_spaced(Y, E, [0] * len(Y), intervals, ahead)

    def learn_spaced(
        self, Y: Floats, E: Floats, gaps: list[int], intervals: bool, ahead: bool
    ) -> tuple[Floats, Floats]:
        """Learn rows with so many missing ones before each.

        Returns the forecasts (n, m, H) after each row, as far as that of its block still reaches, and their quantiles
        (n, KNOWN, m, H). Where inputs are known ahead, those of later rows of the call are: without them it is NaN.
        """
        points = self.point + np.cumsum(np.array(gaps, np.int64) + 1)
        numbers, following = self._numbers(points), self._numbers(points + 1)
        if len(self.first) < SETTLED and self.rows < HISTORY:
            self.first += zip(points.tolist(), np.hstack([Y, E]), strict=True)
        m, H = self.settings.series, self.settings.horizon
        made = np.full((len(Y), m, H), np.nan)
        quantiles = np.full((len(Y) if intervals else 0, KNOWN, m, H), np.nan)
        told: tuple[int, Floats, Floats] | None = None
        at: int | None = None  # the block of the row before
        for i, number in enumerate(numbers.tolist()):
            if at != (at := number // self.every):
                self._open(at)
                follows = np.flatnonzero(self._follows_last_value(at))
            self._write(number, Y[i], E[i])
            self.point = int(points[i])
            if int(following[i]) // self.every > self.newest and not self.closed:
                self._close()
            self.rows += 1 + min(gaps[i], IMAGINED)
            if self.purpose == "forecasts":
                block, slots = self._slots_ahead(self.point)
                if told is None or told[0] != block or (len(follows) and not np.isnan(Y[i, follows]).all()):
                    told = (block, *self._forecast(block, numbers[i + 1 :], E[i + 1 :]))
                made[i, :, : len(slots)] = told[1][:, slots]
                if intervals:
                    quantiles[i, ..., : len(slots)] = told[2][..., slots]
        return made, quantiles

    def _follows_last_value(self, block: int) -> Any:
        """Which series (m,) are forecast in a block by their last value, so that it changes with every row.

        They are all before LEAST blocks, and later those without any value in the blocks before.
        """
        if self.plan is None or self.blocks < LEAST:
            return np.ones(self.settings.series, bool)
        return np.isnan(self._level(block))

    def _write(self, number: int, y: Floats, e: Floats) -> None:
        """Put a row into its slot; one that comes twice, as daylight saving ends, has the mean."""
        place = number // self.every - self.newest - 1, number % self.every
        values, inputs, count, there = self.Y[place], self.E[place], self.count[place], ~np.isnan(y)
        count += there
        before = np.where(count > 1, values, y)
        values[:] = np.where(there, before + (y - before) / np.maximum(count, 1), values)
        inputs[:] = np.where(np.isnan(e), inputs, e)
        self.seen = np.where(there, y, self.seen)

    def _open(self, block: int) -> None:
        """Let there be this block; those before it are complete.

        A block far before the newest is the next one of a grid that the clock has changed.
        """
        if not len(self.Y) or block <= self.newest - len(self.Y):
            self.newest, self.closed = block - 1, True
        while self.newest < block:
            if not self.closed:
                self._close()
            kept = len(self.Y) if self.plan is None else self.plan.kept - 1
            gone = block - self.newest > max(kept, 1)  # no block that is kept will be used
            self.newest, self.closed = block if gone else self.newest + 1, False
            n = len(self.kept)
            new = np.full((1, *self.kept.shape[1:]), np.nan)
            self.kept = np.concatenate([self.kept[n if gone else max(n - kept, 0) :], new])
            self.count[-1] = 0.0

    def _before(self, block: int, array: Floats) -> Floats:
        """The blocks of an array that a row of this block is made of, the latest last; NaN where there is none."""
        assert self.plan is not None
        n = self.plan.lags[-1]
        out = np.full((n, *array.shape[1:]), np.nan)
        at = np.arange(block - n, block) - self.newest + len(array) - 1
        there = (at >= 0) & (at < len(array))
        out[there] = array[at[there]]
        return out

    def _level(self, block: int) -> Floats:
        """The mean (m,) of the blocks before this one, from which its row and targets are counted."""
        assert self.plan is not None
        return self.plan.level(self._before(block, self.Y))

    def _row(self, block: int, ahead: Floats, level: Floats) -> Floats:
        """The row of a block with these inputs ahead (horizon, q)."""
        assert self.plan is not None
        return self.plan.row(block, self._before(block, self.Y), self._before(block, self.E), ahead, level)

    def _close(self) -> None:
        """Learn the block whose last targets have come with the newest one."""
        self.closed = True
        self._drop_implausible()
        if max(self.blocks, len(self.table)) >= LEAST:
            self._find_units()
        plan = self.plan or self._follow_plan(self._plan_of(self._seasons(self.grid)))
        block = self.newest - plan.reach + 1
        targets, ahead = (np.concatenate(a[-plan.reach :])[: plan.horizon] for a in (self.Y, self.E))
        level, known = self._level(block), ~np.isnan(targets)
        if len(self.Y) <= plan.reach or known.mean() < SHARE or (np.isnan(level) & known.any(0)).any():
            return
        row = self._row(block, ahead, np.nan_to_num(level))
        if self.purpose == "fit":
            self.table.append((row, targets))
        else:
            self._learn(row, targets, self._before(block, self.Y))

    def _drop_implausible(self) -> None:
        """Let values of the newest block be missing that are far outside all before; zeros alone say not how far.

        They are a new level where they are most of the block, or the block before had several of them too.
        """
        before, block = self.Y[:-1].reshape(-1, self.Y.shape[2]), self.Y[-1]
        for j in np.flatnonzero((~np.isnan(before)).sum(0) >= LEAST * self.every).tolist():
            level = np.nanmedian(before[:, j])
            errors = np.abs(self.residuals[self.assumed :, j]).max(initial=0.0)
            spread = max(np.nanmax(np.abs(before[:, j] - level)), errors) or abs(level)
            far = np.abs(block[:, j] - level) > IMPLAUSIBLE * spread
            count, several = int(far.sum()), min(SEVERAL, self.every)
            if spread == 0 or not count:
                continue
            most, again = 2 * count > (~np.isnan(block[:, j])).sum(), (self.count[-2, :, j] < 0).sum() >= several
            if count >= several and (most or again):
                what = f"{count} of {self.every} values are far outside all before, and learned as a new level"
                self.found.append((j, self.point, what))
            else:
                block[far, j] = np.nan
                self.count[-1, far, j] = -1
                self.dropped += count

    def _find_units(self) -> None:
        """Find series whose last two blocks are tiny beside all before; zeros, as of a closed shop, are left out.

        The block before the two may have values of both sizes.
        """
        there = np.where(self.Y == 0, np.nan, np.abs(self.Y))
        count = (~np.isnan(there)).sum(1)
        size = np.where(2 * count >= self.every, np.nansum(there, 1) / np.maximum(count, 1), np.inf)  # (blocks, m)
        least = size[:-3].min(0, initial=np.inf)
        tiny = (size[-2:].max(0) < TINY * least) & (size[-3:-2] >= TINY * least).all(0) & np.isfinite(least)
        for j in np.flatnonzero(tiny).tolist():
            before = size[:-3, j]
            share = size[-2:, j].mean() / before[np.isfinite(before)].mean()
            self.found.append((j, self.point, f"{2 * self.every} values are {share:.1g} of the size of those before"))

    def _seasons(self, grid: Grid | None) -> tuple[float, ...]:
        """The seasons in rows, given or those of a grid."""
        known = () if grid is None else grid.seasons()
        return known if isinstance(self.seasons, str) else check_seasons(self.seasons)

    def _plan_of(self, seasons: Sequence[float]) -> BlockPlan:
        return BlockPlan.of(self.every, self.settings.horizon, self.lags, seasons, self.ahead)

    def check(self, grid: Grid | None, series: int, exogenous: int) -> None:
        """Raise a ValueError where blocks of so many series and inputs on this grid are too wide."""
        check_width(self.plan or self._plan_of(self._seasons(grid)), series, exogenous)

    def _follow_plan(self, plan: BlockPlan) -> BlockPlan:
        """Make rows by this plan from now on."""
        m, H = self.settings.series, self.settings.horizon
        check_width(plan, m, self.settings.exogenous)
        self.plan, self.missed = plan, np.zeros((1 + len(plan.input_lags), 2, m, H))
        self.settings = self.settings._replace(seasons=tuple(s * self.every for s in plan.seasons))
        return plan

    # ------------------------------------------------------------------ learning

    def _learn(self, row: Floats, targets: Floats, before: Floats) -> None:
        """Let the learner learn a row of targets (H, m), and compare its forecast with the naive ones."""
        assert self.plan is not None
        known = ~np.isnan(targets)
        if self.learner is None:
            self.learner = SepSARegressor(random_state=self.seed)
            filled = between(targets)
        else:
            filled = targets if known.all() else np.where(known, targets, self._answer(row).T)
        level = row[-targets.shape[1] :]
        made = self.learner.prequential(row[None], (filled - level).reshape(1, -1), [known.mean()])
        if self.blocks >= LEAST:
            naive = [np.tile(before[-k], (self.plan.reach, 1))[: len(targets)] for k in self.plan.input_lags]
            errors = np.abs(np.stack([made.reshape(targets.shape) + level, *naive]) - targets).swapaxes(1, 2)
            there = ~np.isnan(errors)
            residual = (targets - made.reshape(targets.shape) - level).T
            last = self.residuals[-1] if len(self.residuals) else 0.0
            self._remember(np.where(np.isnan(residual), last, residual))
            self.missed = RECENT * self.missed + np.stack([np.where(there, errors, 0.0), there], 1)
        self.blocks += 1

    def _fit(self) -> None:
        """Let a new learner learn the collected rows together; few of them in order."""
        rows, targets = (np.array(part) for part in zip(*self.table, strict=True))
        self.table = []
        share = (~np.isnan(targets)).mean((1, 2))
        filled = np.array([between(each) for each in targets]) - rows[:, None, -targets.shape[2] :]
        self.learner = SepSARegressor(random_state=self.seed)
        learn = self.learner.partial_fit if len(rows) < FEW else self.learner.fit
        learn(rows, filled.reshape(len(rows), -1), share)
        self.blocks, self.assumed = len(rows), ASSUMED
        deviation = self.learner.predict(rows[-1:], return_std=True)[1].reshape(targets.shape[1:]).T
        self.residuals = SCORES[:, None, None] * deviation

    def _remember(self, residual: Floats) -> None:
        """Add the errors (m, H) of a forecast, in the place of assumed ones or of the oldest."""
        full = self.assumed > 0 or len(self.residuals) == ERRORS
        self.residuals = np.concatenate([self.residuals[int(full) :], residual[None]])
        self.assumed = max(self.assumed - 1, 0)

    def regrid(self, points: Any) -> None:
        """Put the rows so far on other points of the grid, and learn them again."""
        last, purpose, first, found = self.point, self.purpose, self.first, self.found.copy()
        self.first = []
        self._reset()
        self.purpose = "fit" if purpose == "fit" else "learn"
        at = last - int(points[-1]) + points
        self.point = int(at[0]) - 1
        Y, E = np.split(np.array([row for _, row in first]), [self.settings.series], 1)
        self.learn_spaced(Y, E, (np.diff(at, prepend=self.point) - 1).tolist(), False, False)
        self.purpose, self.found[:] = purpose, found

    # ------------------------------------------------------------------ forecasts

    def reach(self) -> int:
        """The number of rows after the last one that the forecast of their block reaches."""
        return len(self._slots_ahead(self.point)[1])

    def _slots_ahead(self, point: int) -> tuple[int, Any]:
        """The block of the row after this point, and the slots of the rows that its forecast still reaches."""
        following = self._numbers(point + 1 + np.arange(self.settings.horizon))
        block = int(following[0]) // self.every
        slots = following - block * self.every
        return block, slots[np.logical_and.accumulate(slots < self.settings.horizon)]

    def forecast(self, E: Floats) -> tuple[Floats, Floats]:
        """The forecasts (m, H) after the last row, and their quantiles (KNOWN, m, H); E (k, q) are the rows ahead.

        They are NaN from `reach()` on.
        """
        block, slots = self._slots_ahead(self.point)
        told, ends = self._forecast(block, slots[: len(E)] + block * self.every, E, whole=len(E) == len(slots))
        made, quantiles = np.full_like(told, np.nan), np.full_like(ends, np.nan)
        made[:, : len(slots)], quantiles[..., : len(slots)] = told[:, slots], ends[..., slots]
        return made, quantiles

    def check_ahead(self, given: int) -> None:
        """Raise a ValueError unless the exogenous inputs of the rows ahead are given where they are known."""
        left = self.reach()
        if not self.ahead and given:
            raise ValueError(
                f"X and xs must be None, got {given} rows of inputs: give known_ahead=True to SepSAForecaster, so that "
                "it learns with the inputs of the rows that it forecasts"
            )
        if self.ahead and self.settings.exogenous and given != left:
            raise ValueError(
                f"X or xs must hold the exogenous inputs of the {left} rows ahead, as known_ahead=True says, got "
                f"{given} rows: NaN is a missing one"
            )

    def _forecast(self, block: int, numbers: Any, E: Floats, whole: bool = False) -> tuple[Floats, Floats]:
        """The forecasts (m, H) of a block, and their quantiles; E are the inputs of rows of these numbers, and later.

        NaN where inputs that are known ahead have not come, unless these are all that are asked for: `whole`.
        """
        m, q, H = self.settings.series, self.settings.exogenous, self.settings.horizon
        made, quantiles = np.full((m, H), np.nan), np.full((KNOWN, m, H), np.nan)
        ahead = np.full((H, q), np.nan)
        if block == self.newest:
            ahead[: self.every] = self.E[-1][:H]
        slots = np.asarray(numbers, np.int64) - block * self.every
        ahead[slots[slots < H]] = E[slots < H]
        came = int(self._numbers(self.point)) - block * self.every  # the slot of the last row
        if self.ahead and q and not whole and max(came, slots.max(initial=-1)) < H - 1:
            return made, quantiles
        if self.plan is None or self.blocks < LEAST:
            made = self._last_values(block)
        else:
            level = self._level(block)
            made = self._answer(self._row(block, ahead, np.nan_to_num(np.where(np.isnan(level), self.seen, level))))
        made = np.where(np.isnan(self.seen)[:, None], np.nan, made)
        quantiles[:-1], quantiles[-1] = made, len(self.residuals)
        if len(self.residuals):
            ends = np.quantile(self.residuals, LEVELS, 0, method="weibull")
            sides = np.sign(LEVELS - 0.5)[:, None, None]  # an interval holds the forecast, whatever a few errors say
            quantiles[:-1] = np.clip(made + sides * np.maximum(sides * ends, 0), *self.settings.bounds)
        return np.clip(made, *self.settings.bounds), quantiles

    def _answer(self, row: Floats) -> Floats:
        """The learner's forecasts (m, H)."""
        assert self.learner is not None
        m, H = self.settings.series, self.settings.horizon
        made = np.asarray(self.learner.predict(row[None])).reshape(H, m)
        return made.T + row[-m:, None]

    def _last_values(self, block: int) -> Floats:
        """The last value (m, H) that each slot had in an earlier block, or that the series had."""
        made = np.repeat(self.seen[:, None], self.every, 1)
        for number, values in enumerate(self.Y, self.newest - len(self.Y) + 1):
            if number < block:
                made = np.where(np.isnan(values.T), made, values.T)
        return np.tile(made, -(-self.settings.horizon // self.every))[:, : self.settings.horizon]

    def errors(self) -> dict[str, Floats]:
        """The recent absolute errors (m, H) of the forecasts and of each naive forecast; NaN before there is one."""
        with np.errstate(invalid="ignore"):
            missed = [total / weight for total, weight in self.missed]
        lags = () if self.plan is None else self.plan.input_lags
        names = ["forecast", *(f"{k} block{'s' * (k > 1)} of {self.every} rows ago" for k in lags)]
        return dict(zip(names, missed, strict=False))

    def recent(self) -> Floats:
        """The last values (m, n) of the series, NaN where they are missing."""
        number = int(self._numbers(self.point)) - (self.newest - len(self.Y) + 1) * self.every
        values: Floats = self.Y.reshape(-1, self.Y.shape[2])[: number + 1].T
        return values[:, max(values.shape[1] - self.rows, 0) :]

    # ------------------------------------------------------------------ saving

    def state_dict(self, settled: bool) -> dict[str, Any]:
        """The state as plain data, with the entries of `History.state_dict`."""
        first = [] if settled else self.first
        width = self.settings.series + self.settings.exogenous
        model = {
            "place": [int(getattr(self, name)) for name in PLACE],
            "dropped": self.dropped,
            "start": self.start,
            **{name: packed(getattr(self, name)) for name in ("kept", "seen")},
            **{name: getattr(self, name).copy() for name in ("residuals", "missed")},
            "learner": None if self.learner is None else self.learner.state_dict(),
        }
        return {
            "first": {
                "rows": packed(np.array([row for _, row in first]).reshape(len(first), width)),
                "points": [point for point, _ in first],
            },
            "skipped": [],
            "lags": 0 if self.plan is None else self.plan.kept,
            "seasons": list(self.settings.seasons),
            "model": model if self.rows else None,
        }

    def load(self, new: schema.Entries, points: int) -> None:
        """Load a state with so many points into this new history."""
        if new["model"] is None:
            return
        m, q = self.settings.series, self.settings.exogenous
        if new.integer("lags"):
            with schema.settings("state_dict['seasons']"):
                plan = self._follow_plan(self._plan_of(check_seasons(new.items("seasons").numbers())))
            if plan.kept != new.integer("lags"):
                raise new.damaged("lags", f"{plan.kept} blocks", new["lags"])
        keys = {"place", "dropped", "start", "kept", "seen", "residuals", "missed", "learner"}
        model = schema.read(new.path("model"), new["model"], keys)
        self.dropped = model.integer("dropped")
        model.equal("start", self.start)
        place = model.items("place", len(PLACE))
        for i, (name, ends) in enumerate(PLACE.items()):
            setattr(self, name, place.integer(i, *ends))
        self.kept, self.seen = unpacked(model, "kept", (None, self.every, 2 * m + q)), unpacked(model, "seen", (m,))
        n, most = len(self.kept), None if self.plan is None else self.plan.kept
        if not 0 < n <= (most or n) or not (self.count >= -1).all():
            raise model.damaged("kept", f"1 to {most} blocks, and numbers of values", n)
        self.residuals = model.array("residuals", (None, m, self.settings.horizon))
        self.missed = model.array("missed", self.missed.shape, low=0.0)
        if not self.assumed <= len(self.residuals) <= ERRORS:
            raise model.damaged("residuals", f"{self.assumed} to {ERRORS} errors", len(self.residuals))
        if (model["learner"] is None) != (self.blocks == 0):
            raise model.damaged("learner", f"that of {self.blocks} blocks", model["learner"])
        if model["learner"] is not None:
            self.learner = self._loaded(model)
        self._load_first(new, points)

    def _loaded(self, model: schema.Entries) -> SepSARegressor:
        """The learner of a saved state, of the width of this plan."""
        assert self.plan is not None
        m, q, H = self.settings.series, self.settings.exogenous, self.settings.horizon
        learner = SepSARegressor(random_state=self.seed)
        learner.load_state_dict(model["learner"])
        width, targets = self.plan.width(m, q), learner._target_shape
        if learner.n_features_in_ != width or targets != (H * m,):
            raise model.damaged("learner", f"one of {width} inputs and {H * m} targets", learner.n_features_in_)
        return learner

    def _load_first(self, new: schema.Entries, points: int) -> None:
        """Load the first rows, which the clock may place anew."""
        first = new.entries("first", {"rows", "points"})
        at = first.items("points")
        known = [at.integer(i, -(2**48), 2**48) for i in range(len(at))]
        rows = unpacked(first, "rows", (len(known), self.settings.series + self.settings.exogenous))
        if len(known) != points or np.diff(known).min(initial=1) < 1:
            raise first.damaged("points", f"those of {points} rows", len(known))
        self.first = list(zip(known, rows, strict=True))


def shared(learner: SepSARegressor) -> SepSARegressor:
    """Another estimator with what this one has learned."""
    other = SepSARegressor.__new__(SepSARegressor)
    other.__dict__.update({name: value for name, value in vars(learner).items() if name != "_lock"})
    other._learner = learner._learner.copy()
    return other


def unpacked(new: schema.Entries, name: str, shape: tuple[int | None, ...]) -> Floats:
    """The values that `packed` has made such an entry of."""
    there, values = new.array(name, (2, *shape))
    if (np.abs(values) > HUGE).any() or not np.isin(there, (0.0, 1.0)).all():
        raise new.damaged(name, f"numbers up to {HUGE:g}, and whether they are there", "others")
    return np.where(there > 0, values, np.nan)
