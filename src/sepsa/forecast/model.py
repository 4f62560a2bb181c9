"""The heads of a forecaster: which inputs they see, their memory, and the calls of the kernels."""

from __future__ import annotations

from functools import cache, lru_cache
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from sepsa.compiled import code
from sepsa.compiled.kernels import CALL, Function
from sepsa.forecast.kernels import parts, step
from sepsa.forecast.kernels.heads import FIRST_ROWS
from sepsa.forecast.kernels.parts import SCORES, TOLD
from sepsa.learner.memory.memory import Layout, Memory
from sepsa.learner.memory.parts import Floats
from sepsa.learner.scales import moments
from sepsa.states import schema

FIRST_QUANTILES: Floats = np.sqrt(np.pi / 2) * np.array(SCORES)  # in mean absolute errors
BIAS_RIDGE = 1e-3  # at most: a level is learned from the first rows
SAVED = ("heads", "stack", "exogenous", "shared")
function = cache(lambda kernel: CALL(code.address(kernel)))


class Settings(NamedTuple):
    """What determines the sizes and the learning of a model."""

    series: int
    exogenous: int
    horizon: int
    lags: Any  # "auto" and seasons too, until the model is made
    seasons: Any
    forgetting: tuple[float, ...]
    ridge: float
    known_ahead: bool = False  # whether errors are those of forecasts with the exogenous inputs of their rows
    bounds: tuple[float, float] = (-np.inf, np.inf)
    every: int = 1  # rows of a block, the first of these, and the seed of their learner
    start: int = 0
    seed: int = 0
    step: Any = None

    def angles(self) -> list[float]:
        """Radians a row of the sines and cosines: four pairs of a season."""
        return [2 * np.pi * k / period for period in self.seasons for k in range(1, 5)]

    def spans(self) -> list[int]:
        """The rows over which changes are inputs of heads: a few, and about a season."""
        season = round(self.seasons[0]) if self.seasons else 0
        about = (season - 1, season, season + 1) if season else ()
        return list(dict.fromkeys(k for k in (1, 2, 3, *about) if k < self.lags))

    def common(self) -> int:
        """The number of inputs that all heads have."""
        return 1 + 2 * len(self.angles()) + self.exogenous


class Rows(NamedTuple):
    """Rows to learn: values (n, m), exogenous inputs (n, q), and what gets the forecasts made after each.

    `told` (n, 0, m, H) gets nothing, (n, 1, m, H) the forecasts, and (n, TOLD, m, H) then the quantiles of LEVELS and
    the numbers of errors that they come from too. E may have more rows than Y, which forecasts with inputs known ahead
    use.
    """

    Y: Floats
    E: Floats
    told: Floats = np.empty((0, 0, 0, 0))

    def part(self, start: int, stop: int) -> Rows:
        """The rows from one on to before another."""
        return Rows._make(each[start:stop] for each in self)


@lru_cache(64)
def layout_of(settings: Settings) -> Layout:
    """Where models of these settings, which share it, store their parts."""
    longest, spans = int(max(settings.seasons, default=0)), len(settings.spans())
    features = settings.lags + spans * (settings.series - 1) + settings.common()
    features += 4 * (1 + spans) if settings.seasons else 0
    sizes = {name: getattr(settings, name) for name in ("series", "exogenous", "horizon", "lags")} | {
        "spans": spans,
        "forgettings": len(settings.forgetting),
        "seasons": len(settings.seasons),
        "longest": longest,
        "recent": max(settings.lags, (longest or parts.TREND_ROWS) + 2 + settings.horizon),
        "angles": len(settings.angles()),
        "features": features,
        "above": parts.triangle(features),
        "gains": max(parts.most_gains(features, forgetting) for forgetting in settings.forgetting),
    }
    return Layout(parts.given, parts.GROUPS, sizes)


class ForecastModel:
    """Heads for every series and step, which learn rows; missing values are NaN."""

    first_rows = FIRST_ROWS  # which the window gives without outliers
    warm_up = 256  # rows until which all are learned again, after which scales follow the data by themselves

    def __init__(self, settings: Settings) -> None:
        layout = layout_of(settings)
        schema.check_memory("the forecaster", 8 * layout.size)
        self.settings, self.memory = settings, Memory(layout)
        self.part = self.memory.of("shared")
        self.memory.start()
        self._write_settings()
        self.part("QUANTILES")[:] = FIRST_QUANTILES[:, None, None]
        self._workspace, self._call = np.zeros(layout.workspace), np.zeros((), parts.CALL.dtype)
        self._given = (self._workspace, self.memory.vector, layout.numbers, self._call)
        self._slots = self._workspace[: len(parts.given.slots)].view(np.int64)
        self._slots[: len(self._given)] = [array.ctypes.data for array in self._given]
        # Views of a row's every call.
        self._rows, self._address = self.part("COUNTS")["rows"], self._workspace.ctypes.data

    def copy(self) -> ForecastModel:
        """Another model in the same state."""
        other = ForecastModel(self.settings)
        other.memory.vector[:] = self.memory.vector
        return other

    def _write_settings(self) -> None:
        """Write the parts that follow from the settings, and those that begin with the ridge."""
        memory, settings = self.memory, self.settings
        given = memory.of("fixed")
        given("FORGETTING")[:], given("LIMITS")[:] = settings.forgetting, settings.bounds
        given("ANGLES")[:], given("PERIODS")[:], given("SPANS")[:] = (
            settings.angles(),
            settings.seasons,
            settings.spans(),
        )
        given("RIDGE")[:] = given("CHANGES_RIDGE")[:] = settings.ridge
        given("RIDGE")[-settings.common()] = min(BIAS_RIDGE, settings.ridge)
        for group, ridge in (("heads", "RIDGE"), ("stack", "STACK_RIDGE"), ("exogenous", "CHANGES_RIDGE")):
            memory("LEFT", group)[:], memory("D", group)[:] = given(ridge), 1 / given(ridge)

    @property
    def rows(self) -> int:
        """The number of rows learned."""
        return int(self._rows)

    @property
    def outliers(self) -> int:
        """The number of values that were implausible."""
        return int(self.part("COUNTS")["outliers"])

    def fit_scales(self, Y: Floats, E: Floats) -> None:
        """Set the scales of series and exogenous inputs by these rows, which have no outliers."""
        self.part("MEAN")[:], variance = moments(Y, np.ones(len(Y)))
        deviation = np.sqrt(variance)
        self.part("SCALE")[:] = np.where(deviation > 0, deviation, 1.0)
        inputs = self.memory.of("exogenous")
        inputs("MEAN")[:], inputs("VARIANCE")[:] = moments(E, np.ones(len(E)))

    def learn(self, rows: Rows) -> None:
        """Learn rows; missing values are NaN."""
        self._run(step.learn, rows, self.settings.known_ahead)

    def _run(self, kernel: Function, rows: Rows, known_ahead: bool) -> None:
        """Call a kernel; with `known_ahead` forecasts and their errors use the inputs of later rows."""
        arrays = [np.ascontiguousarray(each, np.float64) for each in rows[:2]] + [rows.told]
        self._call[()] = (rows.told.shape[1], len(rows.E) * known_ahead)
        self._slots[len(self._given) :] = [array.ctypes.data for array in arrays]
        function(kernel)(self._address, len(rows.Y))

    def errors(self) -> dict[str, Floats]:
        """The recent absolute errors (m, H) of the forecasts and of each naive forecast."""
        seasons = [f"one season of {period:g} rows ago" for period in self.settings.seasons]
        stack = self.memory.of("stack")
        missed = stack("MISSED") * self.part("SCALE")[:, None] * np.sqrt(stack("TYPICAL"))
        named = dict(zip(["last value", *seasons], missed, strict=False))
        return {"forecast": missed[-1], **named}

    def forecast(self, E: Floats) -> Floats:
        """What is told (TOLD, m, H) after the last row; E (k, q) are the rows ahead."""
        told = np.empty((1, TOLD, self.settings.series, self.settings.horizon))
        self._run(step.forecast, Rows(E[:0], E, told), True)
        return told[0]

    def reach(self) -> int:
        """The number of rows after the last one that are forecast."""
        return self.settings.horizon

    def check_ahead(self, given: int) -> None:
        """Raise a ValueError where there are more rows of inputs ahead than are forecast."""
        if given > self.settings.horizon:
            raise ValueError(f"X and xs must have at most the {self.settings.horizon} rows of a forecast, got {given}")

    def skip(self, rows: int) -> None:
        """Let the seasons go on by this many rows, of which nothing is known."""
        self.part("COUNTS")["phase"] += rows

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """The parts that learning changes."""
        return {name: self.memory.save(name) for name in SAVED}

    def load_state_dict(self, state_dict: Any, entry: str) -> None:
        """Continue from the result of `state_dict`; a ValueError names the wrong entry and leaves a part of the state.

        Only a new model loads, which is dropped after an error.
        """
        new = schema.read(entry, state_dict, set(SAVED))
        for name in SAVED:
            self.memory.load(new[name], new.path(name), name)


def quantile(told: Floats, level: float, bounds: tuple[float, float]) -> Floats:
    """The quantile (...) of this level, from what is told (TOLD, ...) of forecasts.

    Between levels, and beyond the outermost, quantiles are linear in those of the normal distribution. Of n errors the
    next is as likely the largest as any other, and no interval that is drawn from them has more than the share
    n / (n + 1): with fewer errors than that needs, the quantile is that of `bounds`.
    """
    outside = 2 * min(level, 1 - level)  # of an interval that ends here
    few = told[-1] < (1 - 1e-9) * (1 - outside) / outside
    score = NormalDist().inv_cdf(level)
    beyond = max(1.0, abs(score) / SCORES[-1])
    shares = beyond * np.array([np.interp(score, SCORES, one) for one in np.eye(len(SCORES))])
    shares[len(SCORES) // 2] += 1.0 - beyond
    return np.where(few, bounds[int(level > 0.5)], np.tensordot(shares, told[1:-1], 1))


def interval(told: Floats, coverage: float, bounds: tuple[float, float]) -> tuple[Floats, Floats]:
    """The two ends (...) of the interval of this coverage, from what is told (TOLD, ...) of forecasts."""
    return quantile(told, (1 - coverage) / 2, bounds), quantile(told, (1 + coverage) / 2, bounds)
