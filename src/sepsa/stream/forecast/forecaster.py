"""`SepSAForecaster`: names, times and gaps of series, their first rows, and the interfaces of River and of arrays."""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Mapping, Sequence
from datetime import date, datetime, timezone
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from sepsa.interrupt import DeferredInterrupt
from sepsa.states import schema
from sepsa.states.objects import Saves, check_stamp, stamp
from sepsa.states.plain import pack_label, unpack_labels
from sepsa.stream.engine.kernels.robust import HUGE
from sepsa.stream.engine.protocol import Floats
from sepsa.stream.forecast.model import COVERAGES, ForecastModel, Settings, check_seasons, find_seasons
from sepsa.validation import at_least, in_range

WARM_UP = 256  # rows that determine scales and seasons
LONGEST_GAP = 1_000_000  # rows
DAY = 86400.0  # seconds
ONLY = "y"  # the name of the series where y is a number

Time = float | int | datetime | np.datetime64


class SepSAForecaster(Saves):
    """Forecast one or several series by linear heads that learn each step as soon as its value is known.

    Choose it where values come one after another and the model should learn from every one at once. The inputs of a
    head are the last values of the series, the recent changes of the other series, seasons, and exogenous inputs. There
    is a head for each forgetting factor; forecasts are their mean, weighted by recent errors. At forgetting 1 the
    weights of step h equal ridge regression on all pairs known so far.

    Args:
        horizon: Number of rows to forecast.
        lags: Number of last values that are inputs. "auto": four seasons, between 24 and 96.
        seasons: Periods in rows. "auto": a day where rows have times up to 8 hours apart, a week where they are a day
            apart, otherwise found in the first 256 rows.
        forgetting: Forgetting factors in (0.5, 1], one head for each.
        ridge: Ridge of the heads; 30 has the weight of thirty rows of unit inputs.
        step: Seconds between two rows. None: found from the times of the first rows.

    See also:
        `sepsa.river.SepSARegressor` for targets that are not a time series; `sepsa forecast` in the shell.

    Examples:
        >>> import math
        >>> from sepsa import SepSAForecaster
        >>> model = SepSAForecaster(horizon=3, seasons=[24])
        >>> load = [math.sin(2 * math.pi * hour / 24) for hour in range(503)]
        >>> for y in load[:500]:
        ...     model.learn_one(y)
        >>> max(abs(y - f) for y, f in zip(load[500:], model.forecast())) < 0.1
        True
    """

    def __init__(
        self,
        horizon: int = 24,
        *,
        lags: int | Literal["auto"] = "auto",
        seasons: Sequence[float] | Literal["auto"] = "auto",
        forgetting: Sequence[float] = (0.9995, 0.9998, 1.0),
        ridge: float = 30.0,
        step: float | None = None,
    ) -> None:
        self.horizon, self.lags, self.seasons = horizon, lags, seasons
        self.forgetting, self.ridge, self.step = forgetting, ridge, step
        at_least("horizon", horizon, 1)
        if lags != "auto":
            at_least("lags", lags, 1)
        if seasons != "auto":
            check_seasons(seasons)
        if not len(forgetting):
            raise ValueError(f"forgetting must hold at least one number in (0, 1], got {forgetting!r}")
        for value in forgetting:
            in_range("forgetting", value, 0.5, 1.0)
        in_range("ridge", ridge, 0.0, HUGE)
        if step is not None:
            in_range("step", step, 0.0, HUGE)
        self._lock = threading.RLock()
        self._names: list[Hashable] | None = None
        self._inputs: list[Hashable] = []
        self._model: ForecastModel | None = None
        self._Y: Floats = np.empty((0, 0))  # the first rows, until there are WARM_UP
        self._E: Floats = np.empty((0, 0))
        self._clock = Clock(step)

    def _get_params(self) -> dict[str, Any]:
        return {
            "horizon": self.horizon,
            "lags": self.lags,
            "seasons": self.seasons if self.seasons == "auto" else list(self.seasons),
            "forgetting": list(self.forgetting),
            "ridge": self.ridge,
            "step": self.step,
        }

    @property
    def rows(self) -> int:
        """The number of rows so far, including rows in gaps."""
        return 0 if self._model is None else self._model.rows

    @property
    def outliers_(self) -> int:
        """The number of implausible values, which were treated as missing unless several came in a row."""
        return 0 if self._model is None else self._model.outliers

    @property
    def seasons_(self) -> tuple[float, ...]:
        """The periods in rows that are inputs, given or found."""
        return () if self._model is None else self._model.settings.seasons

    def clock(self) -> Clock:
        """Return a copy of the clock, which is at the last row."""
        return self._clock.copy()

    # ------------------------------------------------------------------ learning

    def learn_one(self, y: Any, x: Mapping[Any, float] | None = None, *, time: Time | None = None) -> None:
        """Learn the values of the next row.

        Args:
            y: A number, or a dict or sequence of numbers, one per series; None and NaN are missing.
            x: Exogenous inputs of the row by name; dates among them are ignored.
            time: Time of the row: seconds, a datetime or a datetime64. Rows left out since the last time are a gap,
                whose values are missing.

        Raises:
            ValueError: `time` is not later than the last one, or names differ from those of earlier rows; nothing
                changed.
        """
        names, values = read_values(y)
        inputs, given = read_inputs(x)
        with self._lock, DeferredInterrupt():
            clock = self._clock.copy()
            missing = clock.advance(time, self.rows)
            Y = np.full((missing + 1, len(self._names or names)), np.nan)
            E = np.full((missing + 1, len(self._inputs if self._names else inputs)), np.nan)
            Y[-1] = in_order("y", self._names, names, values)
            E[-1] = in_order("x", self._inputs if self._names else None, inputs, given)
            self._learn(Y, E, names, inputs, step=clock.step)
            self._clock = clock

    def prequential(
        self,
        Y: ArrayLike,
        X: ArrayLike | None = None,
        *,
        horizon: int | None = None,
        times: Sequence[Time] | None = None,
        coverage: float | None = None,
        known_ahead: bool = False,
    ) -> Any:
        """Learn rows in order and return the forecasts made after each of them.

        Args:
            Y: Values (n, series) or (n,); NaN is missing.
            X: Exogenous inputs (n, inputs).
            horizon: Number of rows to forecast, at most that of the constructor; None for that.
            times: Times of the rows, as for `learn_one`.
            coverage: 0.5, 0.8 or 0.9 to return intervals too; None for none.
            known_ahead: Whether forecasts use the exogenous inputs of the rows that they forecast.

        Returns:
            Forecasts (n, horizon, series), or (n, horizon) for Y (n,); with `coverage` a tuple of forecasts, lower ends
            and upper ends.
        """
        values = np.asarray(Y, np.float64)
        if values.ndim not in (1, 2) or not values.size:
            raise ValueError(f"Y must be rows (n, series) or (n,), got an array of shape {values.shape}")
        if np.isinf(values).any() or (np.abs(values) > HUGE).any():
            raise ValueError(f"Y must be numbers up to {HUGE:g}, or NaN where they are missing, got an infinite one")
        rows = np.ascontiguousarray(values.reshape(len(values), -1))
        E = np.empty((len(rows), 0)) if X is None else np.ascontiguousarray(np.asarray(X, np.float64))
        if E.ndim != 2 or len(E) != len(rows):
            raise ValueError(f"X must be rows ({len(rows)}, inputs), got an array of shape {E.shape}")
        steps = self._check_horizon(horizon)
        ends = None if coverage is None else check_coverage(coverage)
        names: list[Hashable] = [ONLY] if values.ndim == 1 else list(range(rows.shape[1]))
        with self._lock, DeferredInterrupt():
            in_order("Y", self._names, names, [None] * len(names))
            if self._names is not None and E.shape[1] != len(self._inputs):
                raise ValueError(f"X must have {len(self._inputs)} inputs as before, got {E.shape[1]}")
            clock = self._clock.copy()
            if times is not None and len(times) != len(rows):
                raise ValueError(f"times must be those of {len(rows)} rows, got {len(times)}")
            gaps = [clock.advance(time, self.rows + i) for i, time in enumerate(times or [None] * len(rows))]
            at = np.cumsum(np.array(gaps) + 1) - 1
            if at[-1] >= len(rows):
                rows, E = spaced(rows, at), spaced(E, at)
            inputs: list[Hashable] = list(range(E.shape[1]))
            made, quantiles = self._learn(rows, E, names, inputs, ends is not None, known_ahead, clock.step)
            made, quantiles = made[at], quantiles[at if ends is not None else []]
            self._clock = clock

        def shaped(array: Floats) -> Floats:
            array = array[..., :steps]
            return array[:, 0] if values.ndim == 1 else array.transpose(0, 2, 1)

        return shaped(made) if ends is None else (shaped(made), *(shaped(quantiles[:, v]) for v in ends))

    def _learn(
        self,
        Y: Floats,
        E: Floats,
        names: list[Hashable],
        inputs: list[Hashable],
        intervals: bool = False,
        ahead: bool = False,
        step: float | None = None,
    ) -> tuple[Floats, Floats]:
        """Learn rows; in the warm-up all rows are learned again whenever their number is a power of two."""
        if self._names is None:
            self._names, self._inputs = names, inputs
            self._Y, self._E = np.empty((0, Y.shape[1])), np.empty((0, E.shape[1]))
        parts = []
        at = 0
        while at < len(Y) and self.rows < WARM_UP:
            due = 1 << self.rows.bit_length()
            some = slice(at, at + due - self.rows)
            self._Y, self._E = np.concatenate([self._Y, Y[some]]), np.concatenate([self._E, E[some]])
            if self._model is None:
                self._model = self._new_model(self._Y, self._E, step)
            parts.append(self._model.learn(Y[some], E[some], intervals, ahead))
            if self.rows >= due:
                model = self._new_model(self._Y, self._E, step)
                again = model.learn(self._Y, self._E, intervals)
                for part, learned in zip(parts[-1], again, strict=True):
                    part[-1:] = learned[-1:]
                self._model = model
            at = some.stop
        if self.rows >= WARM_UP:
            self._Y, self._E = self._Y[:0], self._E[:0]
        if at < len(Y):
            assert self._model is not None
            parts.append(self._model.learn(Y[at:], E[at:], intervals, ahead))
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    def _new_model(self, Y: Floats, E: Floats, step: float | None) -> ForecastModel:
        """A model for these rows, at their scales."""
        if self.seasons == "auto":
            seasons = calendar_season(step) or find_seasons(Y)
        else:
            seasons = check_seasons(self.seasons)
        lags = self.lags
        if lags == "auto":
            lags = int(min(max(24, 4 * max(seasons, default=12)), 96))
        model = ForecastModel(
            Settings(
                Y.shape[1], E.shape[1], self.horizon, lags, seasons, tuple(map(float, self.forgetting)), self.ridge
            )
        )
        model.fit_scales(Y, E)
        return model

    def revise(self, y: Any, *, rows_ago: int | None = None, time: Time | None = None) -> None:
        """Learn values of an earlier row that came late or were corrected.

        Other series of the row are unchanged. Lags use the new value from now on; steps that were learned with the old
        value, or would have been learned with the new one, are corrected by the gains of the last `horizon` rows.

        Args:
            y: As for `learn_one`; None and NaN leave a series unchanged.
            rows_ago: The row, counted back from the last one, which is 0.
            time: The row's time, instead of `rows_ago`.
        """
        names, values = read_values(y)
        with self._lock, DeferredInterrupt():
            model = self._fitted()
            assert self._names is not None
            if time is not None:
                rows_ago = self._clock.rows_since(time)
            ago = at_least("rows_ago", rows_ago, 0)
            if ago >= min(self.rows, self.horizon):
                raise ValueError(
                    f"rows_ago must be less than {min(self.rows, self.horizon)}, as gains of more rows are not kept, "
                    f"got {ago}"
                )
            row = in_order("y", self._names, names, values)
            for j in np.flatnonzero(~np.isnan(row)):
                model.revise(int(j), ago, float(row[j]))
                if len(self._Y):
                    self._Y[-1 - ago, j] = row[j]

    # ------------------------------------------------------------------ forecasts

    def forecast(self, horizon: int | None = None, xs: Sequence[Mapping[Any, float]] | None = None) -> list[Any]:
        """Forecast the next rows.

        Args:
            horizon: Number of rows, at most that of the constructor; None for that.
            xs: Exogenous inputs of these rows, as far as they are known.

        Returns:
            A list of numbers, or of dicts by series where `y` had several.
        """
        made, _ = self._forecast(horizon, xs)
        return self._labelled(made)

    def intervals(
        self,
        horizon: int | None = None,
        xs: Sequence[Mapping[Any, float]] | None = None,
        *,
        coverage: float = 0.9,
    ) -> list[Any]:
        """Forecast an interval for each of the next rows.

        The ends are adapted to the errors of earlier forecasts of each step, so that in the long run the share
        `coverage` of the values lies between them, whatever their distribution.

        Args:
            horizon: Number of rows, at most that of the constructor; None for that.
            xs: Exogenous inputs of these rows, as far as they are known.
            coverage: 0.5, 0.8 or 0.9.

        Returns:
            A list of pairs (low, high), or of dicts of pairs by series where `y` had several.
        """
        low, high = check_coverage(coverage)
        _, quantiles = self._forecast(horizon, xs)
        return self._labelled(np.stack([quantiles[low], quantiles[high]], -1))

    def _forecast(self, horizon: int | None, xs: Sequence[Mapping[Any, float]] | None) -> tuple[Floats, Floats]:
        steps = self._check_horizon(horizon)
        with self._lock:
            if self._model is None:
                return np.zeros((1, steps)), np.zeros((6, 1, steps))
            rows = [in_order("xs", self._inputs, *read_inputs(x)) for x in list(xs or ())[:steps]]
            made, quantiles = self._model.forecast(np.array(rows).reshape(len(rows), len(self._inputs)))
            return made[:, :steps], quantiles[..., :steps]

    def _labelled(self, values: Floats) -> list[Any]:
        """Values (m, H) or (m, H, 2) as a list of H numbers or pairs, or of dicts of them."""
        series: list[Any] = values.tolist()
        if values.ndim == 3:
            series = [[tuple(pair) for pair in steps] for steps in series]
        if self._names is None or self._names == [ONLY]:
            return list(series[0])
        return [dict(zip(self._names, step, strict=True)) for step in zip(*series, strict=True)]

    def _check_horizon(self, horizon: int | None) -> int:
        if horizon is None:
            return self.horizon
        if at_least("horizon", horizon, 1) > self.horizon:
            raise ValueError(
                f"horizon must be at most {self.horizon}, which this forecaster learns, got {horizon}: "
                f"make one with SepSAForecaster(horizon={horizon})"
            )
        return horizon

    def _fitted(self) -> ForecastModel:
        if self._model is None:
            raise ValueError("the forecaster has learned no row yet: call learn_one or prequential first")
        return self._model

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data; a forecaster with the same parameters that loads it continues with the same
        bits.
        """
        with self._lock:
            model = self._model
            return {
                "names": None if self._names is None else [pack_label(name) for name in self._names],
                "inputs": [pack_label(name) for name in self._inputs],
                "time": self._clock.last,
                "step": self._clock.step,
                "first": {"Y": self._Y.copy(), "E": self._E.copy()},
                "lags": 0 if model is None else model.settings.lags,
                "seasons": [] if model is None else list(model.settings.seasons),
                "model": None if model is None else model.state_dict(),
            }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state_dict: The result of `state_dict` of a forecaster with the same parameters.

        Raises:
            ValueError: An entry is missing or wrong; the message names it and nothing changed.
        """
        keys = {"names", "inputs", "time", "step", "first", "lags", "seasons", "model"}
        new = schema.read("state_dict", state_dict, keys)
        names = None if new["names"] is None else list(unpack_labels(new, "names"))
        inputs = list(unpack_labels(new, "inputs"))
        clock = Clock(None if new["step"] is None else new.number("step", low=1e-300))
        clock.last = None if new["time"] is None else new.number("time")
        m, q = len(names or ()), len(inputs)
        first = new.entries("first", {"Y", "E"})
        Y, E = first.array("Y", (None, m), missing=True), first.array("E", (None, q), missing=True)
        model = None
        if new["model"] is not None:
            with schema.settings("state_dict['seasons']"):
                seasons = check_seasons(new.items("seasons").numbers())
            forgetting = tuple(map(float, self.forgetting))
            settings = Settings(m, q, self.horizon, new.integer("lags", 1), seasons, forgetting, self.ridge)
            model = ForecastModel(settings)
            model.load_state_dict(new["model"], "state_dict['model']")
        rows = 0 if model is None else model.rows
        if len(Y) != (rows if rows < WARM_UP else 0) or len(E) != len(Y) or (names is None) != (model is None):
            raise schema.damaged("state_dict['first']", f"{rows} rows", len(Y))
        with self._lock:
            self.__dict__.update(_names=names, _inputs=inputs, _clock=clock, _Y=Y, _E=E, _model=model)

    def __getstate__(self) -> dict[str, Any]:
        return stamp({"parameters": self._get_params(), "state": self.state_dict()})

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = check_stamp(state)
        self.__init__(**state["parameters"])  # type: ignore[misc]
        self.load_state_dict(state["state"])


class Clock:
    """The time of the last row, in seconds, and the step between rows: `step`, or the difference of the first two."""

    def __init__(self, step: float | None) -> None:
        self.step = step
        self.last: float | None = None

    def copy(self) -> Clock:
        """Another clock in the same state."""
        other = Clock(self.step)
        other.last = self.last
        return other

    def advance(self, time: Time | None, rows: int) -> int:
        """Move on to the next row, at this time, after `rows` rows; returns how many are left out before it."""
        if time is None:
            if self.last is not None and self.step is not None:
                self.last += self.step
            return 0
        at = seconds(time)
        if self.last is None:
            if rows:
                raise ValueError(f"time must be given from the first row on or never, got {time!r} after {rows} rows")
            self.last = at
            return 0
        if at <= self.last:
            raise ValueError(
                f"time must be later than that of the last row, got {time!r}: revise() takes values of earlier rows"
            )
        step = self.step or at - self.last
        steps = round((at - self.last) / step)
        if steps < 1:
            raise ValueError(
                f"time must be at least half a step of {step:g} seconds after the last row, got {time!r}: "
                "aggregate such values, or give a shorter step"
            )
        if steps > LONGEST_GAP:
            raise ValueError(f"time must be at most {LONGEST_GAP} rows after the last one, got {time!r}, {steps} rows")
        self.step, self.last = step, self.last + steps * step
        return steps - 1

    def rows_since(self, time: Time) -> int:
        """How many rows before the last one the row of this time is."""
        if self.last is None or self.step is None:
            raise ValueError(f"time must be that of a row, got {time!r}, and rows had no times: give rows_ago")
        return round((self.last - seconds(time)) / self.step)


def calendar_season(step: float | None) -> tuple[float, ...]:
    """The rows of a day, or of a week where a row is a day, from the seconds between rows; empty where neither fits."""
    if step is None or not 60.0 <= step <= DAY:
        return ()
    return (7.0,) if step == DAY else (DAY / step,) if step <= DAY / 3 else ()


def spaced(rows: Floats, at: Any) -> Floats:
    """The rows at these positions, and NaN between them."""
    out = np.full((int(at[-1]) + 1, rows.shape[1]), np.nan)
    out[at] = rows
    return out


def read_values(y: Any) -> tuple[list[Hashable], list[Any]]:
    """The names of the series and their values."""
    if isinstance(y, Mapping):
        return list(y), list(y.values())
    if isinstance(y, (Sequence, np.ndarray)) and not isinstance(y, str) and np.ndim(y) == 1:
        return list(range(len(y))), list(y)
    return [ONLY], [y]


def read_inputs(x: Mapping[Any, Any] | None) -> tuple[list[Hashable], list[Any]]:
    """The names and values of exogenous inputs; dates, which River's data sets have among them, are left out."""
    numbers = {name: value for name, value in (x or {}).items() if not isinstance(value, date)}
    return list(numbers), list(numbers.values())


def in_order(what: str, known: list[Hashable] | None, names: Sequence[Hashable], values: Sequence[Any]) -> Floats:
    """Values in the order of the known names; NaN where there is none."""
    known = list(names) if known is None else known
    if not known and what == "y":
        raise ValueError("y must have the value of at least one series, got an empty one")
    row = np.full(len(known), np.nan)
    for name, value in zip(names, values, strict=True):
        if name not in known:
            shown = ", ".join(map(repr, known[:10]))
            raise ValueError(f"{what} must have the names of the first row, {shown or 'none'}, got {name!r}")
        try:
            number = math.nan if value is None else float(value)
        except (TypeError, ValueError):
            raise ValueError(f"{what} must hold numbers, got {value!r} for {name!r}") from None
        if math.isinf(number) or abs(number) > HUGE:
            raise ValueError(f"{what} must hold numbers up to {HUGE:g}, or NaN, got {value!r} for {name!r}")
        row[known.index(name)] = number
    return row


def seconds(time: Time) -> float:
    """A time in seconds; a datetime without a time zone is taken for UTC."""
    if isinstance(time, datetime):
        return (time if time.tzinfo else time.replace(tzinfo=timezone.utc)).timestamp()
    if isinstance(time, np.datetime64):
        return float(time.astype("datetime64[ns]").astype(np.int64)) / 1e9
    if isinstance(time, bool) or not isinstance(time, (int, float)) or not math.isfinite(time):
        raise ValueError(f"time must be seconds, a datetime or a datetime64, got {time!r}")
    return float(time)


def check_coverage(coverage: float) -> tuple[int, int]:
    """The two quantiles between which this share of the values lies."""
    if coverage not in COVERAGES:
        raise ValueError(f"coverage must be one of {', '.join(map(str, sorted(COVERAGES)))}, got {coverage!r}")
    return COVERAGES[coverage]
