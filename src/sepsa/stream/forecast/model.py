"""The heads of a forecaster as arrays: which inputs they see, their state, and the calls of the kernel."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sepsa.heads.math import ridge as ridge_rule
from sepsa.jit import announce_compilation
from sepsa.states import schema
from sepsa.stream.engine.protocol import Floats
from sepsa.stream.forecast.kernels import arrays, rescale
from sepsa.stream.forecast.kernels import step as kernel
from sepsa.stream.scales import moments, trimmed

LEVELS: Floats = np.array([0.005, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.975, 0.995])  # of errors
SCORES: Floats = np.array([NormalDist().inv_cdf(level) for level in LEVELS])  # of normal errors
KNOWN = len(LEVELS) + 1  # quantiles of errors, and the number of errors
HARMONICS = 4  # sine pairs of a season
FACTORS = 4  # sines and cosines of the first season by which the recent changes of a series are multiplied
DISCOUNT, SHARPNESS = 0.998, 20.0  # of the losses by which heads are weighed
BIAS_RIDGE = 1e-3
EXOGENOUS_FORGETTING = 0.9998
STACK_FORGETTING, STACK_RIDGE = 0.9995, 30.0
CHOICE = 0.999  # discount of the errors of candidates
STRETCH = 96.0  # steps ahead from which these are remembered in proportion to the step
SURE, LEAD = 2.0, 1.5  # standard errors from which heads beat a naive forecast, and another naive one the leader
GUARD = 3.0  # standard errors by which the latest absolute errors of heads may be larger


Term: TypeAlias = tuple[int, int, int, int, int]  # one of `arrays.Family.terms`


class Settings(NamedTuple):
    """What determines the sizes and the learning of a model."""

    series: int
    exogenous: int
    horizon: int
    lags: int
    seasons: tuple[float, ...]
    forgetting: tuple[float, ...]
    ridge: float
    bounds: tuple[float, float] = (-np.inf, np.inf)

    def size(self) -> int:
        """About how many bytes the arrays of such a model have."""
        m, q, H, S = self.series, self.exogenous, self.horizon, len(self.seasons)
        own = self.lags + 6 * m + 28 + 9 * S + q
        joint = 20 * m + 9 * S + q
        heads = sum(g * p * (p / 2 + H * (k + 3)) for g, p, k in ((m, own, 1), (1, joint, m)))
        stack = m * H * (2 + 4 * S) * (4 + 2 * S) + 6 * H * m * H
        return int(8 * (len(self.forgetting) * heads + stack + m * (2 + S) * sum(self.seasons) + q * q + m * H * q))


class ForecastModel:
    """Heads for every series and step, which learn rows; missing values are NaN."""

    def __init__(self, settings: Settings) -> None:
        schema.check_memory("the forecaster", settings.size())
        self.settings = settings
        m, q, H = settings.series, settings.exogenous, settings.horizon
        n = max(settings.lags, int(max(settings.seasons, default=0)) + 2 + H)
        angles = [2 * np.pi * k / period for period in settings.seasons for k in range(1, HARMONICS + 1)]
        season = round(settings.seasons[0]) if settings.seasons else 0
        self.own = self._family([own_terms(j, m, settings.lags, season) for j in range(m)], np.arange(m)[:, None])
        self.joint = self._family([joint_terms(m, settings.lags, season)], np.arange(m)[None])
        self.stack = self._stack()
        XR = settings.ridge
        self.shared = arrays.Shared(
            mean=np.zeros(m),
            scale=np.ones(m),
            level=np.zeros(m),
            spread=np.zeros(m),
            reach=np.zeros(m),
            limits=np.array(settings.bounds, np.float64),
            drift=np.zeros(q),
            spread2=np.zeros(q),
            angles=np.array(angles),
            options=np.array(
                [DISCOUNT, SHARPNESS, EXOGENOUS_FORGETTING, STACK_FORGETTING, CHOICE, SURE, GUARD, LEAD, STRETCH]
            ),
            counts=np.zeros(arrays.COUNTS, np.int64),
            lags=np.zeros((m, 2 * n)),
            base=np.zeros((H, m)),
            there=np.zeros((H, m), np.bool_),
            made=np.zeros((H, m, H)),
            ends=np.zeros((H, len(LEVELS), m, H)),
            judged=np.zeros((m, 1 + H), np.int64),
            size=np.zeros((m, H)),
            levels=LEVELS.copy(),
            quantiles=np.tile(np.sqrt(np.pi / 2) * SCORES[:, None, None], (1, m, H)),
            told=np.zeros((m, H)),
            told_ends=np.zeros((len(LEVELS), m, H)),
            extent=np.zeros((2, m)),
            odd=np.zeros((2, m), np.int64),
            strange=np.zeros(m),
            XU=np.zeros(q * (q - 1) // 2),
            XD=np.full(q, 1 / XR),
            XW=np.zeros((m, H, q)),
            XK=np.full((3, q), XR),
            XT=np.zeros(2, np.int64),
        )

    def _family(self, terms: list[list[Term]], series: NDArray[np.int64]) -> arrays.Family:
        s = self.settings
        L, G, H, k = len(s.forgetting), len(terms), s.horizon, series.shape[1]
        d = len(terms[0])
        p = d + 1 + 2 * HARMONICS * len(s.seasons) + s.exogenous
        restored = max(1, *(ridge_rule.due(p, forgetting) for forgetting in s.forgetting))
        ridge = np.full(p, s.ridge)
        ridge[d] = min(BIAS_RIDGE, s.ridge)
        return arrays.Family(
            terms=np.array(terms, np.int64),
            series=series.astype(np.int64),
            forgetting=np.array(s.forgetting),
            ridge=ridge,
            left=np.tile(ridge, (L, G, 1)),
            turn=np.zeros((L, G, 2), np.int64),
            U=np.zeros((L, G, p * (p - 1) // 2)),
            D=np.tile(1 / ridge, (L, G, 1)),
            W=np.zeros((L, G, k, H, p)),
            loss=np.zeros((L, G, k, H)),
            X=np.zeros((H, G, p)),
            K=np.zeros((H, L, G, p)),
            R=np.zeros((H, L, G, restored, p)),
            C=np.full((H, L, G), -1),
        )

    def _stack(self) -> arrays.Stack:
        m, H, S = self.settings.series, self.settings.horizon, len(self.settings.seasons)
        p = 2 + 4 * S if S else 0
        self.stack_ridge: Floats = np.full(p, STACK_RIDGE)
        return arrays.Stack(
            periods=np.array(self.settings.seasons, np.float64),
            profile=np.zeros((m, S, int(max(self.settings.seasons, default=0)) + 1)),
            off=np.zeros((H, m, S)),
            U=np.zeros((m, H, p * max(p - 1, 0) // 2)),
            D=np.full((m, H, p), 1 / STACK_RIDGE),
            W=np.zeros((m, H, p)),
            left=np.full((m, H, p), STACK_RIDGE),
            turn=np.zeros((m, H, 2), np.int64),
            heads=np.zeros((H, m, H)),
            stacked=np.zeros((H, m, H)),
            mixed=np.zeros((H, m, H)),
            typical=np.zeros((m, H)),
            missed=np.zeros((S + 4, m, H)),
            leader=np.zeros((m, H), np.int64),
            known=np.zeros((S + 1, m, H, 7)),
        )

    @property
    def rows(self) -> int:
        """The number of rows learned."""
        return int(self.shared.counts[arrays.C_ROWS])

    @property
    def outliers(self) -> int:
        """The number of values that were implausible."""
        return int(self.shared.counts[arrays.C_OUTLIERS])

    def fit_scales(self, Y: Floats, E: Floats) -> Floats:
        """Set the scales of series and exogenous inputs by these rows; returns Y without outliers in its first rows."""
        usual = trimmed(Y)
        self.shared.mean[:], variance = moments(usual, np.ones(len(Y)))
        deviation = np.sqrt(variance)
        self.shared.scale[:] = np.where(deviation > 0, deviation, 1.0)
        self.shared.drift[:], self.shared.spread2[:] = moments(trimmed(E), np.ones(len(E)))
        return np.where(np.arange(len(Y))[:, None] < arrays.FIRST, usual, Y)

    def learn(self, Y: Floats, E: Floats, intervals: bool = False, ahead: bool = False) -> tuple[Floats, Floats]:
        """Learn rows Y (n, m) with E (n, q); returns the forecasts (n, m, H) made after each, and their quantiles.

        The quantiles (n, KNOWN, m, H) are those of LEVELS, and the numbers of errors that they come from; they are
        empty unless `intervals`. `ahead` uses the exogenous inputs of later rows, as far as E has them.
        """
        announce_compilation(kernel.learn, "the forecaster", 20)
        m, H = self.shared.size.shape
        out = np.empty((len(Y), m, H))
        quantiles = np.empty((len(Y) if intervals else 0, KNOWN, m, H))
        heads = (self.own, self.joint)
        at = 0
        while at < len(Y):
            rest = quantiles[at:] if intervals else quantiles
            at += kernel.learn(heads, self.stack, self.shared, self.stack_ridge, Y[at:], E[at:], out[at:], rest, ahead)
            if self.rows > arrays.FIRST:
                rescale.follow_scales(*heads, self.stack, self.shared, self.stack_ridge)
        return out, quantiles

    def errors(self) -> dict[str, Floats]:
        """The recent absolute errors (m, H) of the forecasts and of each naive forecast."""
        seasons = [f"one season of {period:g} rows ago" for period in self.settings.seasons]
        missed = self.stack.missed * self.shared.scale[:, None] * np.sqrt(self.stack.typical)
        named = dict(zip(["last value", *seasons], missed, strict=False))
        return {"forecast": missed[len(seasons) + 3], **named}

    def forecast(self, E: Floats) -> tuple[Floats, Floats]:
        """The forecasts (m, H) after the last row, and their quantiles (KNOWN, m, H); E (k, q) are the rows ahead."""
        s = self.shared
        made, ends = s.told.copy(), s.told_ends.copy()
        if len(E):
            deviation = np.sqrt(np.where(s.spread2 > 0, s.spread2, np.inf))
            x = np.clip(np.nan_to_num((E - s.drift) / deviation), -kernel.UNUSUAL, kernel.UNUSUAL)
            more = s.scale[:, None] * np.einsum("jhq,hq->jh", s.XW[:, : len(E)], x)
            made[:, : len(E)] += more
            ends[..., : len(E)] += more
        made = np.where(s.judged[:, :1] > 0, made, np.nan)
        return np.clip(made, *s.limits), np.concatenate([np.clip(ends, *s.limits), s.judged[None, :, 1:]])

    def recent(self) -> Floats:
        """The last values (m, n) of the series, forecasts where they were missing."""
        s, n = self.shared, self.shared.lags.shape[1] // 2
        now = n + (self.rows - 1) % n
        values = s.lags[:, now + 1 - min(n, self.rows) : now + 1]
        return np.asarray(s.mean[:, None] + s.scale[:, None] * values)

    def skip(self, rows: int) -> None:
        """Let the seasons go on by this many rows, of which nothing is known."""
        self.shared.counts[arrays.C_PHASE] += rows

    def revise(self, series: int, age: int, value: float) -> float:
        """Replace the value of a series `age` rows ago, and correct by it what the steps have learned.

        Returns the value, bounded where it is implausible.
        """
        return float(kernel.revise(self.own, self.joint, self.shared, series, age, value))

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """The arrays that learning changes."""
        return {
            part: {name: getattr(self, part)._asdict()[name].copy() for name in names} for part, names in STATE.items()
        }

    def load_state_dict(self, state_dict: Any, entry: str) -> None:
        """Continue from the result of `state_dict`; a ValueError names the wrong entry and changes nothing."""
        new = schema.read(entry, state_dict, set(STATE))
        parts = {}
        for part, names in STATE.items():
            old, later = getattr(self, part), LATER & set(names)
            entries = schema.read(new.path(part), new[part], set(names) - later, optional=later)
            loaded = {}
            for name in names:
                array = getattr(old, name)
                if name in entries.values:
                    loaded[name] = entries.array(name, array.shape, array.dtype, low=LEAST.get(name, -np.inf))
                else:
                    rows = loaded["counts"][arrays.C_ROWS] - np.arange(array.shape[1])
                    loaded[name] = np.maximum(rows, 0) + 0 * array
            parts[part] = old._replace(**loaded)
        check_state(entry, parts)
        self.__dict__.update(parts)


FAMILY = ("left", "turn", "U", "D", "W", "loss", "X", "K", "R", "C")
STATE = {
    "own": FAMILY,
    "joint": FAMILY,
    "stack": (
        "profile", "off", "U", "D", "W", "left", "turn", "heads", "stacked", "mixed", "typical", "missed",
        "leader", "known",
    ),
    "shared": (
        "mean", "scale", "level", "spread", "reach", "drift", "spread2", "counts", "lags", "base", "there", "made",
        "ends", "judged", "size", "quantiles", "told", "told_ends", "extent", "odd", "strange", "XU", "XD", "XW",
        "XK", "XT",
    ),
}  # fmt: skip
LATER = {"judged"}  # not in states of earlier versions, which count every row
LEAST = dict.fromkeys(
    ("left", "loss", "size", "counts", "spread", "reach", "spread2", "turn", "typical", "missed", "leader", "judged"),
    0.0,
)
LEAST |= {"D": 1e-300, "XD": 1e-300, "scale": 1e-150, "C": -1.0}
MOST_ROWS = 2**48
MOST = 1e40  # of standardized numbers in a state; those in units of the series, and of the ridge, may be larger
MOST_OF = {"mean": 1e101, "scale": 1e101, "drift": 1e101, "spread2": 1e202, "told": 1e103, "told_ends": 1e110}
MOST_OF |= dict.fromkeys(("left", "XK"), 1e101) | {"strange": 1e210, "missed": 11.0, "known": 1e9}
OF_SERIES = {  # the axis of the series in standardized arrays, and by how much they may exceed the observed values
    "level": (0, 1e3), "spread": (0, 1e3), "reach": (0, 1e3), "lags": (0, 1e3), "base": (1, 1e3), "made": (1, 1e3),
    "size": (0, 1e3), "profile": (0, 1e3), "off": (1, 1e3), "heads": (1, 1e3), "stacked": (1, 1e3), "mixed": (1, 1e3),
    "ends": (2, 1e6), "XW": (0, 1e6),
}  # fmt: skip


def check_state(entry: str, parts: dict[str, Any]) -> None:
    """Raise a ValueError for arrays that no learning leaves behind: it names the first of them."""

    def wrong(part: str, name: str, expected: str) -> ValueError:
        return schema.damaged(f"{entry}[{part!r}][{name!r}]", expected, "another")

    for part, names in STATE.items():
        for name in names:
            array = getattr(parts[part], name)
            if array.size and np.abs(array).max() > MOST_OF.get(name, MOST):
                raise wrong(part, name, f"at most {MOST_OF.get(name, MOST):g}")
            if name in OF_SERIES and array.size:
                axis, factor = OF_SERIES[name]
                largest = np.abs(np.moveaxis(array, axis, 0)).reshape(array.shape[axis], -1).max(1)
                if (largest > factor * (1.0 + np.abs(parts["shared"].extent).max(0))).any():
                    raise wrong(part, name, "not so large beside the values observed")
    for part in ("own", "joint"):
        f = parts[part]
        if f.C.size and f.C.max() >= f.ridge.size:
            raise wrong(part, "C", "coordinates of a head")
        if f.turn[..., 0].max() >= f.ridge.size:
            raise wrong(part, "turn", "coordinates of a head")
    c, s = parts["stack"], parts["shared"]
    S = c.periods.size
    if c.known[..., [1, 3, 5, 6]].min() < 0:
        raise wrong("stack", "known", "squares")
    if c.leader.max() > S:
        raise wrong("stack", "leader", "naive forecasts")
    if c.D.shape[2] and c.turn[..., 0].max() >= c.D.shape[2]:
        raise wrong("stack", "turn", "coordinates of a head")
    if s.XT[0] > max(s.drift.size - 1, 0) or s.XT.min() < 0:
        raise wrong("shared", "XT", "a coordinate of a head")
    if (np.diff(s.quantiles, axis=0) < 0).any() or np.abs(s.quantiles).max() > 1e6:
        raise wrong("shared", "quantiles", "in order")
    if (s.extent[0] > s.extent[1]).any():
        raise wrong("shared", "extent", "in order")
    if (s.scale < arrays.SMALLEST / 4 * np.abs(s.mean)).any():
        raise wrong("shared", "scale", "not so small beside the mean")
    rows, outliers, phase, shifts = s.counts.tolist()
    if not 0 < rows <= phase <= MOST_ROWS or shifts > outliers or outliers > rows * s.scale.size:
        raise wrong("shared", "counts", f"numbers of rows up to {MOST_ROWS}")
    check_copies(s, wrong)


def check_copies(s: arrays.Shared, wrong: Any) -> None:
    """Raise the error `wrong` where numbers that a state has twice differ, or there are more errors than rows."""
    rows, (H, n) = int(s.counts[arrays.C_ROWS]), (s.made.shape[0], s.lags.shape[1] // 2)
    last = rows - 1 - np.arange(min(rows, H))
    if (s.lags[:, :n] != s.lags[:, n:]).any() or (s.lags[:, last % n] != s.base[last % H].T).any():
        raise wrong("shared", "lags", "the last values")
    made = s.made[(rows - 1) % H]
    slack = 1e-6 * (np.abs(s.mean) + s.scale * (1.0 + np.abs(made).max(1)))[:, None]
    for name, more in (("told", 0.0), ("told_ends", s.ends[(rows - 1) % H])):
        units = s.mean[:, None] + s.scale[:, None] * (made + more)
        room = slack * (1.0 + np.abs(more))
        if (np.abs(np.clip(units, *s.limits) - np.clip(getattr(s, name), *s.limits)) > room).any():
            raise wrong("shared", "scale", f"that of {name!r}")
    if (s.judged > np.minimum(s.judged[:, :1], np.maximum(rows - np.arange(H + 1), 0))).any():
        raise wrong("shared", "judged", "numbers of rows")


def own_terms(j: int, series: int, lags: int, season: int) -> list[Term]:
    """Inputs of series j's own heads: its value, its lags less the value, and the changes of the other series.

    In a season the value and its changes over a few rows, and over about a season, also count by the time of it.
    """
    about = (season - 1, season, season + 1) if season else ()
    changes = list(dict.fromkeys(k for k in (1, 2, 3, *about) if k < lags))
    terms: list[Term] = [(j, 0, 0, -1, -1), *((j, k, j, 0, -1) for k in range(1, lags))]
    terms += [(i, 0, i, k, -1) for k in changes for i in range(series) if i != j]
    return terms + [(j, 0, j, k, 1 + u) for k in (-1, *changes) for u in range(FACTORS if season else 0)]


def joint_terms(series: int, lags: int, season: int) -> list[Term]:
    """Inputs of the joint heads: the values of all series, and their changes over a few rows and about a season."""
    s = season or lags
    changes = [*range(1, 7), s // 2, 3 * s // 4, *range(s - 2, s + 2), 2 * s - 1, 2 * s, 3 * s, 4 * s - 1]
    kept = [-1, *dict.fromkeys(k for k in changes if 0 < k < lags)]
    return [(i, 0, i, k, -1) for k in kept for i in range(series)]


def interval(quantiles: Floats, coverage: float, bounds: tuple[float, float]) -> tuple[Floats, Floats]:
    """The two ends (...) of the interval of this coverage, from quantiles (KNOWN, ...) of LEVELS.

    Between levels, and beyond the outermost, quantiles are linear in those of the normal distribution. Of n errors the
    next is as likely the largest as any other, and no interval that is drawn from them has more than the share
    n / (n + 1): with fewer errors than that needs, the ends are those of `bounds`.
    """
    middle = quantiles[len(LEVELS) // 2]
    few = quantiles[-1] < (1 - 1e-9) * coverage / (1 - coverage)

    def end(level: float) -> Floats:
        score = NormalDist().inv_cdf(min(max(level, 1e-12), 1 - 1e-12))
        if abs(score) > SCORES[-1]:
            outer = quantiles[0 if score < 0 else len(LEVELS) - 1]
            return np.asarray(middle + (outer - middle) * abs(score) / SCORES[-1])
        at = int(np.clip(np.searchsorted(SCORES, score), 1, len(SCORES) - 1))
        part = (score - SCORES[at - 1]) / (SCORES[at] - SCORES[at - 1])
        return np.asarray(quantiles[at - 1] + part * (quantiles[at] - quantiles[at - 1]))

    return np.where(few, bounds[0], end((1 - coverage) / 2)), np.where(few, bounds[1], end((1 + coverage) / 2))
