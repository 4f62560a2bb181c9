"""The heads of a forecaster as arrays: which inputs they see, their state, and the calls of the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sepsa.jit import announce_compilation
from sepsa.states import schema
from sepsa.stream.engine.kernels.robust import HUGE
from sepsa.stream.engine.protocol import Floats
from sepsa.stream.forecast import kernel
from sepsa.stream.scales import moments, trimmed

LEVELS: Floats = np.array([0.05, 0.1, 0.25, 0.75, 0.9, 0.95])  # of the quantiles of errors
COVERAGES = {0.9: (0, 5), 0.8: (1, 4), 0.5: (2, 3)}  # each with its two quantiles
HARMONICS = 4  # sine pairs of a season
FACTORS = 4  # sines and cosines of the first season by which the recent changes of a series are multiplied
DISCOUNT, SHARPNESS = 0.998, 20.0  # of the losses by which heads are weighed
BIAS_RIDGE = 1e-3
EXOGENOUS_FORGETTING = 0.9998


Term: TypeAlias = tuple[int, int, int, int, int]  # one of `kernel.Family.terms`


class Settings(NamedTuple):
    """What determines the sizes and the learning of a model."""

    series: int
    exogenous: int
    horizon: int
    lags: int
    seasons: tuple[float, ...]
    forgetting: tuple[float, ...]
    ridge: float


class ForecastModel:
    """Heads for every series and step, which learn standardized rows; missing values are NaN."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        m, q, H, n = settings.series, settings.exogenous, settings.horizon, settings.lags
        angles = [2 * np.pi * k / period for period in settings.seasons for k in range(1, HARMONICS + 1)]
        season = round(settings.seasons[0]) if settings.seasons else 0
        self.own = self._family([own_terms(j, m, n, season) for j in range(m)], np.arange(m)[:, None])
        self.joint = self._family([joint_terms(m, n, season)], np.arange(m)[None])
        self.shared = kernel.Shared(
            mean=np.zeros(m),
            scale=np.ones(m),
            drift=np.zeros(q),
            spread=np.ones(q),
            angles=np.array(angles),
            options=np.array([DISCOUNT, SHARPNESS, EXOGENOUS_FORGETTING]),
            counts=np.zeros(kernel.COUNTS, np.int64),
            lags=np.zeros((m, 2 * n)),
            base=np.zeros((H, m)),
            there=np.zeros((H, m), np.bool_),
            made=np.zeros((H, m, H)),
            square=np.zeros((m, H)),
            levels=LEVELS.copy(),
            quantiles=np.zeros((len(LEVELS), m, H)),
            extent=np.zeros((2, m)),
            odd=np.zeros(m, np.int64),
            XP=np.eye(q) / settings.ridge,
            XW=np.zeros((m, H, q)),
            XK=np.full((4, q), settings.ridge),
        )

    def _family(self, terms: list[list[Term]], series: NDArray[np.int64]) -> kernel.Family:
        s = self.settings
        L, G, H, k = len(s.forgetting), len(terms), s.horizon, series.shape[1]
        d = len(terms[0])
        p = d + 1 + 2 * HARMONICS * len(s.seasons) + s.exogenous
        ridge = np.full(p, s.ridge)
        ridge[d] = min(BIAS_RIDGE, s.ridge)
        return kernel.Family(
            terms=np.array(terms, np.int64),
            series=series.astype(np.int64),
            forgetting=np.array(s.forgetting),
            ridge=ridge,
            left=np.tile(ridge, (L, G, 1)),
            P=np.tile(np.diag(1 / ridge), (L, G, 1, 1)),
            W=np.zeros((L, G, k, H, p)),
            loss=np.zeros((L, G, k, H)),
            X=np.zeros((H, G, p)),
            K=np.zeros((H, L, G, p)),
            R=np.zeros((H, L, G, p)),
            C=np.full((H, L, G), -1),
        )

    @property
    def rows(self) -> int:
        """The number of rows learned."""
        return int(self.shared.counts[kernel.C_ROWS])

    @property
    def outliers(self) -> int:
        """The number of values that have been bounded."""
        return int(self.shared.counts[kernel.C_OUTLIERS])

    def fit_scales(self, Y: Floats, E: Floats) -> None:
        """Set the scales of series and exogenous inputs by these rows."""
        for X, mean, scale in ((Y, self.shared.mean, self.shared.scale), (E, self.shared.drift, self.shared.spread)):
            mean[:], variance = moments(trimmed(X), np.ones(len(X)))
            deviation = np.sqrt(variance)
            scale[:] = np.where(deviation > 0, deviation, 1.0)
        self.shared.spread[:] = 1 / self.shared.spread

    def learn(self, Y: Floats, E: Floats, intervals: bool = False, ahead: bool = False) -> tuple[Floats, Floats]:
        """Learn rows Y (n, m) with E (n, q); returns the forecasts (n, m, H) made after each, and their quantiles.

        The quantiles (n, levels, m, H) are empty unless `intervals`. `ahead` uses the exogenous inputs of later rows,
        as far as E has them.
        """
        announce_compilation(kernel.learn, "the forecaster")
        m, H = self.shared.square.shape
        out = np.empty((len(Y), m, H))
        quantiles = np.empty((len(Y) if intervals else 0, len(LEVELS), m, H))
        kernel.learn(self.own, self.joint, self.shared, Y, E, out, quantiles, ahead)
        return self._in_units(out), self._in_units(out[:, None] + quantiles) if intervals else quantiles

    def _in_units(self, standardized: Floats) -> Floats:
        """Standardized values (..., m, H) in the units of the series."""
        values: Floats = self.shared.mean[:, None] + self.shared.scale[:, None] * standardized
        return values

    def forecast(self, E: Floats) -> tuple[Floats, Floats]:
        """The forecasts (m, H) after the last row, and their quantiles (levels, m, H); E (k, q) are the rows ahead."""
        s, H = self.shared, self.settings.horizon
        made = s.made[(s.counts[kernel.C_ROWS] - 1) % H].copy()
        x = np.clip(np.nan_to_num((E - s.drift) * s.spread), -kernel.LARGEST, kernel.LARGEST)
        made[:, : len(E)] += np.einsum("jhq,hq->jh", s.XW[:, : len(E)], x)
        return self._in_units(made), self._in_units(made + s.quantiles * np.sqrt(s.square))

    def revise(self, series: int, age: int, value: float) -> None:
        """Replace the value of a series `age` rows ago, and correct by it what the steps have learned."""
        kernel.revise(self.own, self.joint, self.shared, series, age, value)

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
            old, entries = getattr(self, part), new.entries(part, set(names))
            arrays = {}
            for name in names:
                array = getattr(old, name)
                low = 0.0 if name in ("left", "loss", "square", "counts", "odd") else -np.inf
                arrays[name] = entries.array(name, array.shape, array.dtype, low=low)
            parts[part] = old._replace(**arrays)
        for part in ("own", "joint"):
            C = parts[part].C
            if C.size and not -1 <= C.min() <= C.max() < parts[part].ridge.size:
                raise schema.damaged(f"{entry}[{part!r}]['C']", "coordinates of a head", int(C.max()))
        if (parts["shared"].scale <= 0).any():
            raise schema.damaged(f"{entry}['shared']['scale']", "positive", float(parts["shared"].scale.min()))
        self.__dict__.update(parts)


FAMILY = ("left", "P", "W", "loss", "X", "K", "R", "C")
STATE = {
    "own": FAMILY,
    "joint": FAMILY,
    "shared": (
        "mean", "scale", "drift", "spread", "counts", "lags", "base", "there", "made", "square", "quantiles", "extent",
        "odd", "XP", "XW", "XK",
    ),
}  # fmt: skip


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


def find_seasons(Y: Floats) -> tuple[float, ...]:
    """The period in rows at which the series repeat, by the autocorrelation of their changes; empty if there is none.

    A period is found where at least three of it fit and the autocorrelation has a peak above 0.3; of several, it is
    the shortest whose peak is nearly the highest, since multiples of a period have peaks too.
    """
    if len(Y) < 16:
        return ()
    changes = np.diff(np.where(np.isnan(Y), moments(Y, np.ones(len(Y)))[0], Y), axis=0)
    changes = (changes - changes.mean(0)) / np.maximum(changes.std(0), 1e-300)
    n = len(changes)
    spectrum = np.abs(np.fft.rfft(changes, 2 * n, axis=0)) ** 2
    correlation = np.fft.irfft(spectrum, axis=0)[:n].mean(1) / (n - np.arange(n))
    peaks = [k for k in range(3, n // 3) if correlation[k] >= max(0.3, *correlation[k - 1 : k + 2])]
    highest = max((correlation[k] for k in peaks), default=0.0)
    return tuple(float(k) for k in peaks if correlation[k] >= 0.9 * highest)[:1]


def check_seasons(seasons: Sequence[float]) -> tuple[float, ...]:
    """Periods in rows, each larger than 2."""
    periods = tuple(float(period) for period in seasons)
    if not all(2 < period < HUGE for period in periods):
        raise ValueError(f"seasons must be periods of more than 2 rows, got {seasons!r}")
    return periods
