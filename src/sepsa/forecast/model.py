"""The heads of a forecaster: which inputs they see, their memory, and the calls of the kernels."""

from __future__ import annotations

from functools import cache, lru_cache
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from sepsa.compiled import code
from sepsa.compiled.kernels import CALL, Function
from sepsa.forecast.kernels import parts, rescale, step
from sepsa.forecast.kernels.heads import FIRST_ROWS
from sepsa.learner.memory.memory import Layout, Memory
from sepsa.learner.memory.parts import Floats
from sepsa.learner.scales import moments, trimmed
from sepsa.states import schema

LEVELS: Floats = np.array([0.005, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.975, 0.995])  # of errors
SCORES: Floats = np.array([NormalDist().inv_cdf(level) for level in LEVELS])  # of normal errors
# An error moves a quantile as far as a rate of 0.02 moves its level, where errors are normal with mean size 1; those of
# the outermost levels, which few errors exceed, no farther than that of 0.05.
STEPS: Floats = (
    0.02 * np.sqrt(np.pi / 2) / np.array([NormalDist().pdf(min(abs(score), SCORES[-3])) for score in SCORES])
)
KNOWN = len(LEVELS) + 1  # quantiles of errors, and the number of errors
OPTIONS = np.array(tuple(field.start for field in parts.OPTIONS.fields.values()), parts.OPTIONS.dtype)
SAVED = ("heads", "stack", "exogenous", "shared")
function = cache(lambda kernel: CALL(code.address(kernel)))


class Term(NamedTuple):
    """An input: a value of a series some rows ago, less another one, times a sine or cosine of a season.

    A negative `less_ago` leaves out the second value, and a negative `factor` the sine or cosine.
    """

    series: int
    ago: int
    less: int = 0
    less_ago: int = -1
    factor: int = -1


class Settings(NamedTuple):
    """What determines the sizes and the learning of a model."""

    series: int
    exogenous: int
    horizon: int
    lags: int
    seasons: tuple[float, ...]
    forgetting: tuple[float, ...]
    ridge: float
    known_ahead: bool = False  # whether errors are those of forecasts with the exogenous inputs of their rows
    bounds: tuple[float, float] = (-np.inf, np.inf)

    def angles(self) -> list[float]:
        """Radians a row of the sines and cosines: four pairs of a season."""
        return [2 * np.pi * k / period for period in self.seasons for k in range(1, 5)]

    def terms(self) -> list[list[Term]]:
        """The terms of the heads of each series."""
        season = round(self.seasons[0]) if self.seasons else 0
        return [own_terms(j, self.series, self.lags, season) for j in range(self.series)]

    def layout(self, terms: int) -> Layout:
        """Where a model of these settings, whose heads have so many terms, stores its parts."""
        longest, angles = int(max(self.seasons, default=0)), len(self.angles())
        features = terms + 1 + 2 * angles + self.exogenous
        sizes = {
            "rows": 0,  # a call says how many
            "series": self.series,
            "exogenous": self.exogenous,
            "horizon": self.horizon,
            "forgettings": len(self.forgetting),
            "seasons": len(self.seasons),
            "longest": longest,
            "recent": max(self.lags, (longest or parts.TREND_ROWS) + 2 + self.horizon),
            "levels": len(LEVELS),
            "angles": angles,
            "terms": terms,
            "features": features,
            "above": parts.triangle(features),
            "restored": max(parts.restored_at_once(features, forgetting) for forgetting in self.forgetting),
        }
        return Layout(parts.given, parts.GROUPS, sizes)


@lru_cache(64)
def form(settings: Settings) -> tuple[Layout, list[list[Term]]]:
    """The layout and the terms of models of these settings, which share them."""
    terms = settings.terms()
    return settings.layout(len(terms[0])), terms


class ForecastModel:
    """Heads for every series and step, which learn rows; missing values are NaN."""

    def __init__(self, settings: Settings) -> None:
        layout, terms = form(settings)
        schema.check_memory("the forecaster", 8 * layout.size)
        self.settings, self.memory = settings, Memory(layout)
        self.part = self.memory.of("shared")
        self.memory.start()
        self._write_settings(terms)
        self.part("QUANTILES")[:] = np.sqrt(np.pi / 2) * SCORES[:, None, None]
        self._workspace, self._call = np.zeros(layout.workspace), np.zeros((), parts.CALL.dtype)
        self._given = (self._workspace, self.memory.vector, layout.numbers, OPTIONS, self._call)
        self._slots = self._workspace[: len(parts.given.slots)].view(np.int64)
        self._slots[: len(self._given)] = [array.ctypes.data for array in self._given]
        # Views of a row's every call.
        self._rows, self._address = self.part("COUNTS")["rows"], self._workspace.ctypes.data

    def _write_settings(self, terms: list[list[Term]]) -> None:
        """Write the parts that follow from the settings, and those that begin with the ridge."""
        memory, settings = self.memory, self.settings
        given, bias_ridge = memory.of("fixed"), 1e-3
        for name, values in zip(parts.TERM, np.moveaxis(np.array(terms), 2, 0), strict=True):
            given(name)[:] = values
        given("FORGETTING")[:], given("LIMITS")[:] = settings.forgetting, settings.bounds
        given("ANGLES")[:], given("PERIODS")[:] = settings.angles(), settings.seasons
        given("LEVELS")[:], given("STEPS")[:] = LEVELS, STEPS
        given("RIDGE")[:] = given("CHANGES_RIDGE")[:] = settings.ridge
        given("RIDGE")[len(terms[0])] = min(bias_ridge, settings.ridge)
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

    def fit_scales(self, Y: Floats, E: Floats) -> Floats:
        """Set the scales of series and exogenous inputs by these rows; returns Y without outliers in its first rows."""
        usual = trimmed(Y)
        self.part("MEAN")[:], variance = moments(usual, np.ones(len(Y)))
        deviation = np.sqrt(variance)
        self.part("SCALE")[:] = np.where(deviation > 0, deviation, 1.0)
        inputs = self.memory.of("exogenous")
        inputs("MEAN")[:], inputs("VARIANCE")[:] = moments(trimmed(E), np.ones(len(E)))
        return np.where(np.arange(len(Y))[:, None] < FIRST_ROWS, usual, Y)

    def learn(self, Y: Floats, E: Floats, intervals: bool = False, ahead: bool = False) -> tuple[Floats, Floats]:
        """Learn rows Y (n, m) with E (n, q); returns the forecasts (n, m, H) made after each, and their quantiles.

        The quantiles (n, KNOWN, m, H) are those of LEVELS, and the numbers of errors that they come from; they are
        empty unless `intervals`. `ahead` uses the exogenous inputs of later rows, as far as E has them.
        """
        m, H = self.settings.series, self.settings.horizon
        Y, E = np.ascontiguousarray(Y, np.float64), np.ascontiguousarray(E, np.float64)
        out = np.empty((len(Y), m, H))
        quantiles = np.empty((len(Y) if intervals else 0, KNOWN, m, H))
        self._call["intervals"], self._call["ahead"], self._call["known"] = intervals, ahead, self.settings.known_ahead
        at = 0
        while at < len(Y):
            at += self._run(step.learn, len(Y) - at, Y[at:], E[at:], out[at:], quantiles[at:])
            if self.rows > FIRST_ROWS:
                rescale.follow_scales(self.memory)
        return out, quantiles

    def _run(self, kernel: Function, rows: int, *arrays: Floats) -> int:
        """Call a kernel for these rows, with the arrays of the call."""
        self._slots[len(self._given) :][: len(arrays)] = [array.ctypes.data for array in arrays]
        return int(function(kernel)(self._address, rows))

    def errors(self) -> dict[str, Floats]:
        """The recent absolute errors (m, H) of the forecasts and of each naive forecast."""
        seasons = [f"one season of {period:g} rows ago" for period in self.settings.seasons]
        stack = self.memory.of("stack")
        missed = stack("MISSED") * self.part("SCALE")[:, None] * np.sqrt(stack("TYPICAL"))
        named = dict(zip(["last value", *seasons], missed, strict=False))
        return {"forecast": missed[-1], **named}

    def forecast(self, E: Floats) -> tuple[Floats, Floats]:
        """The forecasts (m, H) after the last row, and their quantiles (KNOWN, m, H); E (k, q) are the rows ahead."""
        part = self.part
        made, ends = part("TOLD").copy(), part("TOLD_ENDS")[0].copy()
        if E.size:
            explained = np.empty((1, *made.shape))
            self._run(step.explain_ahead, len(E), E, np.ascontiguousarray(E, np.float64), explained)
            more = part("SCALE")[:, None] * explained[0, :, : len(E)]
            made[:, : len(E)] += more
            ends[..., : len(E)] = part("TOLD_ENDS")[1, ..., : len(E)] + more
        judged, limits = part("JUDGED"), self.settings.bounds
        made = np.where(judged[:, :1] > 0, made, np.nan)
        return np.clip(made, *limits), np.concatenate([np.clip(ends, *limits), judged[None, :, 1:]])

    def recent(self) -> Floats:
        """The last values (m, n) of the series, forecasts where they were missing."""
        n = self.memory.layout.sizes["recent"]
        now = n + (self.rows - 1) % n
        values = self.part("LAGS")[:, now + 1 - min(n, self.rows) : now + 1]
        return np.asarray(self.part("MEAN")[:, None] + self.part("SCALE")[:, None] * values)

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
            self.memory.load(new.entries(name, set(self.memory.names(name))), name)
        self._check(new)

    def _check(self, new: schema.Entries) -> None:
        """Raise a ValueError for numbers that no learning leaves behind beside those of other parts."""
        part, rows = self.part, self.rows
        observed = 1.0 + np.abs(part("EXTENT")).max(0)
        for name in SAVED:
            for each in self.memory.layout.groups[name].parts:
                if each.kept and each.unit == ("series", 1) and each.name not in ("STRANGE", "EVENT"):
                    array = np.moveaxis(self.memory(each.name, name), each.shape.index("series"), -1)
                    most = 1e6 if each.name in ("ENDS", "W") else 1e3
                    if (np.abs(array) > most * observed).any():
                        raise schema.damaged(
                            f"{new.path(name)}[{each.name!r}]", "not so large beside the values observed", "another"
                        )
        at, mean, scale = (rows - 1) % self.settings.horizon, part("MEAN")[:, None], part("SCALE")[:, None]
        made, ends, limits = part("MADE")[at], part("ENDS")[at], self.settings.bounds
        slack = 1e-6 * (np.abs(mean) + scale * (1.0 + np.abs(made).max(1, keepdims=True)))
        for name, more in (("TOLD", np.zeros(1)), ("TOLD_ENDS", ends)):
            off = np.clip(mean + scale * (made + more), *limits) - np.clip(part(name), *limits)
            if (np.abs(off) > slack * (1.0 + np.abs(more))).any():
                raise schema.damaged(f"{new.path('shared')}['SCALE']", f"that of {name!r}", "another")


def own_terms(j: int, series: int, lags: int, season: int) -> list[Term]:
    """Inputs of series j's own heads: its value, its lags less the value, and the changes of the other series.

    In a season the value and its changes over a few rows, and over about a season, also count by the time of it: times
    the first two sines and cosines.
    """
    about = (season - 1, season, season + 1) if season else ()
    changes = list(dict.fromkeys(k for k in (1, 2, 3, *about) if k < lags))
    terms = [Term(j, 0), *(Term(j, k, j, 0) for k in range(1, lags))]
    terms += [Term(i, 0, i, k) for k in changes for i in range(series) if i != j]
    return terms + [Term(j, 0, j, k, factor) for k in (-1, *changes) for factor in (range(1, 5) if season else ())]


def quantile(known: Floats, level: float, bounds: tuple[float, float]) -> Floats:
    """The quantile (...) of this level, from quantiles (KNOWN, ...) of LEVELS.

    Between levels, and beyond the outermost, quantiles are linear in those of the normal distribution. Of n errors the
    next is as likely the largest as any other, and no interval that is drawn from them has more than the share
    n / (n + 1): with fewer errors than that needs, the quantile is that of `bounds`.
    """
    middle, outside = known[len(LEVELS) // 2], 2 * min(level, 1 - level)  # of an interval that ends here
    few = known[-1] < (1 - 1e-9) * (1 - outside) / outside
    score = NormalDist().inv_cdf(min(max(level, 1e-12), 1 - 1e-12))
    if abs(score) > SCORES[-1]:
        outer = known[0 if score < 0 else len(LEVELS) - 1]
        end = middle + (outer - middle) * abs(score) / SCORES[-1]
    else:
        at = int(np.clip(np.searchsorted(SCORES, score), 1, len(SCORES) - 1))
        part = (score - SCORES[at - 1]) / (SCORES[at] - SCORES[at - 1])
        end = known[at - 1] + part * (known[at] - known[at - 1])
    return np.where(few, bounds[int(level > 0.5)], end)


def interval(known: Floats, coverage: float, bounds: tuple[float, float]) -> tuple[Floats, Floats]:
    """The two ends (...) of the interval of this coverage, from quantiles (KNOWN, ...) of LEVELS."""
    return quantile(known, (1 - coverage) / 2, bounds), quantile(known, (1 + coverage) / 2, bounds)
