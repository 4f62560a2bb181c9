"""`SepSAForecaster`: names, times and gaps of series, their first rows, and the interfaces of River and of arrays."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from sepsa.forecast.clock import Clock
from sepsa.forecast.kernels.parts import TOLD
from sepsa.forecast.model import Rows, Settings, interval, quantile
from sepsa.forecast.rows import (
    ONLY,
    Ahead,
    Row,
    Table,
    arranged,
    in_order,
    read_inputs,
    read_table,
    read_values,
)
from sepsa.forecast.seasons import check_seasons
from sepsa.forecast.times import Time, Times, read_times
from sepsa.forecast.window import Window
from sepsa.interrupt import DeferredInterrupt, locked, new_lock
from sepsa.learner.arithmetic.robust import HUGE
from sepsa.learner.memory.parts import Floats
from sepsa.states import schema
from sepsa.states.objects import Saves, check_stamp, rebuilt_as, stamp
from sepsa.states.plain import pack_label, unpack_labels
from sepsa.states.sealed import sealed, unsealed
from sepsa.validation import at_least, in_range, is_number

if TYPE_CHECKING:
    from typing import Self

LEAST_RIDGE = 1e-31  # which a ridge must exceed
LARGEST = 2000  # rows of a horizon, of lags and of a block
NO_ROW = "the forecaster has learned no row yet: call fit, learn_one or prequential first"


@rebuilt_as("sepsa.SepSAForecaster")
class SepSAForecaster(Saves):
    """Forecast one or several series by linear heads that learn each step as soon as its value is known.

    Choose it where values come one after another and the model should learn from every one at once. The inputs of a
    head are the last values of the series, the recent changes of the other series, seasons, and exogenous inputs. There
    is a head for each forgetting factor; their mean, weighted by recent errors, is used as far as it has been better
    than the last value and the last value of each season. At forgetting 1 the weights of step h equal ridge regression
    on all pairs known so far.

    Args:
        horizon: Number of rows to forecast.
        lags: Number of last values that are inputs. "auto": four times the shortest season, between 24 and 96.
        seasons: Periods in rows. "auto": day, week and year where rows have times, as soon as there are two of them,
            otherwise found in the first 16, 32, ..., 2,048 rows.
        forgetting: Forgetting factors in (0.5, 1], one head for each.
        ridge: Ridge of the heads; 30 has the weight of thirty rows of unit inputs.
        step: Seconds between two rows, or "day", "business day", "week", "month", "quarter" or "year". None: found
            in the call that brings the second time.
        bounds: The least and the largest value that a series can have, None for no bound.
        every: Rows of a block. 1: forecasts are made after every row. 24: they are made every 24 rows, for the next
            `horizon` ones together, by the learner of `SepSARegressor` with a row for each block, which holds the last
            three blocks, those of a season ago, and inputs. `fit` is its `fit`, `update` its `partial_fit`.
        start: The row at which a block begins, counted from midnight, for rows of days from Monday, and for months from
            January; without times, the number of rows before the first block. Rows after the last whole block are
            learned when it is complete, and until then the forecast is the rest of that block. With `every` alone.
        known_ahead: Whether the exogenous inputs of a row are known before it is forecast. Forecasts of `prequential`
            and `errors_` then use them, and with `every` so does all that is learned.
        seed: Seed of the learner of blocks.

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
        forgetting: Sequence[float] = (0.9995, 1.0),
        ridge: float = 30.0,
        step: float | str | None = None,
        bounds: tuple[float | None, float | None] = (None, None),
        every: int = 1,
        start: int = 0,
        known_ahead: bool = False,
        seed: int = 0,
    ) -> None:
        self.horizon, self.lags, self.seasons = horizon, lags, seasons
        self.forgetting, self.ridge, self.step = forgetting, ridge, step
        self.bounds = bounds
        for name, value in (("horizon", horizon), ("lags", lags), ("every", every)):
            if (name, value) != ("lags", "auto") and at_least(name, value, 1) > LARGEST:
                raise ValueError(f"{name} must be at most {LARGEST} rows, got {value}")
        if seasons != "auto":
            check_seasons(seasons)
        if not 0 < len(forgetting) <= 16:
            raise ValueError(f"forgetting must hold 1 to 16 numbers in (0.5, 1], got {schema.brief(forgetting)}")
        for factor in forgetting:
            in_range("forgetting", factor, 0.5, 1.0)
        in_range("ridge", ridge, LEAST_RIDGE, HUGE)
        self.every, self.start, self.known_ahead, self.seed = every, start, known_ahead, seed
        self._limits = check_bounds(bounds)
        if at_least("start", start, 0) >= every:
            raise ValueError(f"start must be a row of a block, 0 to {every - 1} for every={every}, got {start}")
        at_least("seed", seed, 0)
        for name in ("forgetting", "ridge") if every > 1 else ():
            if (given := repr(getattr(self, name))) != repr(OPTIONS[name]):
                raise ValueError(
                    f"{name} must be left out for every={every}, whose learner finds it by itself, got {given}"
                )
        self._lock = new_lock()
        self._names: list[Hashable] = []  # of the series, as soon as there was a row
        self._inputs: list[Hashable] = []
        self._frame = ""  # "pandas" or "polars" where rows came in its frames
        self._column = ""  # the column of the first frame that had the times
        self._window = self._new_window(0, 0)

    def _new_window(self, series: int, inputs: int) -> Window:
        """A window for so many series and inputs."""
        forgetting = tuple(map(float, self.forgetting))
        options = self.get_params() | {"forgetting": forgetting, "bounds": self._limits}
        return Window(Settings(series, inputs, **options))

    @property
    def _flat(self) -> bool:
        """Whether there is one series without a name."""
        return self._names in ([], [ONLY])

    @property
    def _clock(self) -> Clock:
        return self._window.clock

    @property
    def _model(self) -> Any:
        return self._window.model

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the options by name, as scikit-learn's `clone` asks for them.

        Args:
            deep: Without effect: no option is an estimator.
        """
        return {name: getattr(self, name) for name in OPTIONS}

    def _become(self, other: Self) -> Self:
        """Take over the options and the state of another forecaster, which is not used any more."""
        with self._lock:
            vars(self).update(vars(other) | {"_lock": self._lock})
        return self

    def __repr__(self) -> str:
        options = {name: repr(value) for name, value in self.get_params().items()}
        given = ", ".join(f"{k}={v}" for k, v in options.items() if k == "horizon" or v != repr(OPTIONS[k]))
        name = type(self).__name__
        if self._model is None:
            return f"{name}({given})"
        every = f", every {self.step_}" if self.step_ else ""
        return f"{name}({given})  # {self.rows} rows{every}, seasons {[round(s, 2) for s in self.seasons_]}"

    @property
    def rows(self) -> int:
        """The number of rows so far, including rows in gaps."""
        return self._window.rows

    @property
    def outliers_(self) -> int:
        """The number of implausible values, which were treated as missing unless several came in a row."""
        return 0 if self._model is None else self._model.outliers

    @property
    def seasons_(self) -> tuple[float, ...]:
        """The periods in rows that are inputs, given or found."""
        return () if self._model is None else self._model.settings.seasons

    @property
    def step_(self) -> str | None:
        """The time between two rows in words, such as "business day" or "900 seconds"; None without times."""
        return None if self._clock.grid is None else self._clock.grid.words()

    @property
    def errors_(self) -> dict[str, Floats]:
        """Recent mean absolute errors (series, horizon): of the forecasts, of the last value and of each season's."""
        return {} if self._model is None else self._model.errors()

    @locked
    def clock(self) -> Clock:
        """Return a copy of the clock, which is at the last row."""
        return copy(self._clock)

    @locked
    def times(self, horizon: int | None = None) -> list[Time | None]:
        """Return the times of the next rows, as forecasts have them: dates or numbers; None without times.

        Args:
            horizon: Number of rows, at most that of the constructor; None for that.
        """
        return [self._clock.ahead(h) for h in range(1, self._check_horizon(horizon) + 1)]

    # ------------------------------------------------------------------ learning

    def learn_one(self, y: Row, x: Mapping[Any, float] | None = None, *, time: Time | None = None) -> None:
        """Learn the values of the next row.

        Args:
            y: A number, or a dict or sequence of numbers, one per series; None and NaN are missing.
            x: Exogenous inputs of the row by name; dates among them are ignored.
            time: Time of the row: seconds, a datetime or a datetime64. Rows left out since the last time are a gap,
                whose values are missing.

        Raises:
            ValueError: `time` is not later than the last one, or far beyond all others, or names differ from those of
                earlier rows; nothing changed.
        """
        y, x, moments = read_values(y), read_inputs(x), None if time is None else read_times([time])
        with self._lock, DeferredInterrupt():
            Y = Table(in_order("y", self._names or None, y)[None], list(y), times=moments)
            X = Table(in_order("x", self._inputs if self._names else None, x)[None], list(x))
            self._take(Y, X)

    def prequential(
        self,
        Y: ArrayLike,
        X: ArrayLike | None = None,
        *,
        horizon: int | None = None,
        times: Times | None = None,
        coverage: float | None = None,
    ) -> Any:
        """Learn rows in order and return the forecasts made after each of them.

        Args:
            Y: Values (n, series) or (n,), an array or a frame; NaN is missing.
            X: Exogenous inputs (n, inputs), or (n,) of one input.
            horizon: Number of rows to forecast, at most that of the constructor; None for that.
            times: Times of the rows, as for `learn_one`: an array, a Series, a DatetimeIndex, or the name of a column
                of the frame Y. None: the DatetimeIndex of a frame, if it has one.
            coverage: A share in (0, 1) to return intervals too; None for none.

        Returns:
            Forecasts (n, horizon, series), or (n, horizon) for Y (n,); with `coverage` a tuple of forecasts, lower ends
            and upper ends, infinite where there were too few errors. NaN before a series has its first value. In
            blocks, forecasts after a row inside a block are the rest of those made before the block, then NaN; so are
            those that need inputs of rows after the last.
        """
        steps = self._check_horizon(horizon, self.horizon)
        if coverage is not None:
            check_coverage(coverage)
        table, told = self._learn_table(Y, X, times, 1 if coverage is None else TOLD)
        ends = () if coverage is None else interval(told.swapaxes(0, 1), coverage, self._limits)
        parts = [part[..., :steps].transpose(0, 2, 1) for part in (told[:, 0].copy(), *ends)]
        parts = [part[..., 0] for part in parts] if table.flat else parts
        return parts[0] if coverage is None else tuple(parts)

    def _learn_table(
        self, Y: ArrayLike, X: ArrayLike | None, times: Times | None, tell: int = 0, fit: bool = False
    ) -> tuple[Table, Floats]:
        """Learn the rows of a table; returns it, and what `_take` does."""
        with self._lock, DeferredInterrupt():
            table, inputs = self._read(Y, X, times)
            return table, self._take(table, inputs, tell, fit)

    def _read(self, Y: ArrayLike, X: ArrayLike | None, times: Times | None) -> tuple[Table, Table]:
        """The rows of Y and X, in the order of the names so far."""
        table = read_table("Y", Y, times)
        if not table.values.size:
            raise ValueError(f"Y must be rows (n, series) or (n,), got an array of shape {np.shape(Y)}")
        inputs = read_table("X", np.empty((len(table.values), 0)) if X is None else X)
        if len(inputs.values) != len(table.values):
            raise ValueError(
                f"X must be rows ({len(table.values)}, inputs), got an array of shape {inputs.values.shape}"
            )
        if inputs.times is not None and table.times is not None:
            other = np.flatnonzero(inputs.times.seconds != table.times.seconds)
            if len(other):
                raise ValueError(
                    f"X must have the times of Y, got others in {len(other)} rows, first in row {other[0]}: give "
                    "X.loc[Y.index], or an array, which has no times"
                )
        if self._names:
            table = table._replace(values=arranged("Y", self._names, table))
            inputs = inputs._replace(values=arranged("X", self._inputs, inputs))
        return table, inputs

    def _take(self, table: Table, inputs: Table, tell: int = 0, fit: bool = False) -> Floats:
        """Learn rows; returns what is told (n, tell, m, H) after each. An error changes nothing."""
        n, series = table.values.shape
        rows = Rows(table.values, inputs.values, np.full((n, tell, series, self.horizon), np.nan))
        window = self._window_of(table, inputs).learned(rows, table.times, fit)
        if not self._names:
            self._names, self._inputs = table.names, inputs.names
            self._frame, self._column = table.frame, table.clock
        self._window = window
        return rows.told

    def _window_of(self, table: Table, inputs: Table) -> Window:
        """The window that learns a table."""
        return self._window if self._names else self._new_window(len(table.names), len(inputs.names))

    # ------------------------------------------------------------------ forecasts

    @locked
    def forecast(
        self, horizon: int | None = None, xs: Ahead | None = None
    ) -> list[float] | list[dict[Hashable, float]]:
        """Forecast the next rows, whose times `times()` returns.

        Args:
            horizon: Number of rows, at most that of the constructor; None for that.
            xs: Exogenous inputs of these rows, as far as they are known.

        Returns:
            A list of numbers, or of dicts by series where `y` had several; NaN for a series without any value so far.

        Raises:
            ValueError: There was no row yet.
        """
        return self._labelled(self._forecast(horizon, xs)[0].tolist())

    @locked
    def intervals(
        self,
        horizon: int | None = None,
        xs: Ahead | None = None,
        *,
        coverage: float = 0.9,
    ) -> list[tuple[float, float]] | list[dict[Hashable, tuple[float, float]]]:
        """Forecast an interval for each of the next rows.

        The ends are adapted to the errors of earlier forecasts of each step, so that in the long run the share
        `coverage` of the values lies between them, whatever their distribution. An interval of a step is infinite, or
        ends at the bounds, until that step has coverage / (1 - coverage) errors: 9 for 0.9.

        Args:
            horizon: Number of rows, at most that of the constructor; None for that.
            xs: Exogenous inputs of these rows, as far as they are known.
            coverage: A share in (0, 1).

        Returns:
            A list of pairs (low, high), or of dicts of pairs by series where `y` had several.
        """
        check_coverage(coverage)
        low, high = interval(self._forecast(horizon, xs), coverage, self._limits)
        return self._labelled([list(zip(*ends, strict=True)) for ends in zip(low.tolist(), high.tolist(), strict=True)])

    @locked
    def _forecast(self, horizon: int | None, xs: Ahead | None = None, X: ArrayLike | None = None) -> Floats:
        """What is told (TOLD, m, steps) of the next rows; inputs ahead are `xs` or X."""
        steps = self._check_horizon(horizon)
        if self._model is None:
            raise ValueError(NO_ROW)
        if not self._reach():
            raise ValueError(
                f"the {self.horizon} rows that are forecast every {self.every} rows have come: the next forecast "
                "is made when the block is complete"
            )
        rows = [in_order("xs", self._inputs, read_inputs(x)) for x in xs or ()]
        E = np.array(rows).reshape(len(rows), len(self._inputs)) if X is None else self._rows_ahead(X)
        self._model.check_ahead(len(E))
        told: Floats = self._model.forecast(E)
        return told[..., :steps]

    def _reach(self) -> int:
        """The number of rows that can be forecast: in blocks those left of what was forecast."""
        return self.horizon if self._model is None else int(self._model.reach())

    def _labelled(self, series: list[list[Any]]) -> list[Any]:
        """The numbers or pairs of each series and step as those of each step, or as dicts of them."""
        if self._flat:
            return series[0]
        return [dict(zip(self._names, step, strict=True)) for step in zip(*series, strict=True)]

    def _check_horizon(self, horizon: int | None, reach: int | None = None) -> int:
        """The number of rows to forecast, at most so many as the forecast reaches; None for all of them."""
        reach = self._reach() if reach is None else reach
        if horizon is None:
            return reach
        if at_least("horizon", horizon, 1) > self.horizon:
            raise ValueError(
                f"horizon must be at most {self.horizon}, which this forecaster learns, got {horizon}: "
                f"make one with SepSAForecaster(horizon={horizon})"
            )
        if 0 < reach < horizon:
            raise ValueError(
                f"horizon must be at most {reach}, the rows left of what was forecast every {self.every} rows, got "
                f"{horizon}: None forecasts these; with start={self._model.start_next()} a block begins at the next row"
            )
        return horizon

    # ------------------------------------------------------------------ the interface of arrays and frames

    def fit(self, y: ArrayLike, X: ArrayLike | None = None, *, times: Times | None = None) -> Self:
        """Forget all rows, then learn these, in order.

        Args:
            y: Values (n,) or (n, series): an array, or a Series or frame of pandas or Polars.
            X: Exogenous inputs (n, inputs), or (n,) of one input.
            times: As for `prequential`.

        Returns:
            The forecaster.
        """
        fresh = type(self)(**self.get_params())
        fresh._learn_table(y, X, times, fit=True)
        return self._become(fresh)

    def update(self, y: ArrayLike, X: ArrayLike | None = None, *, times: Times | None = None) -> Self:
        """Learn further rows.

        Args:
            y: Values (n,) or (n, series) of the rows after those learned.
            X: Exogenous inputs (n, inputs), or (n,) of one input.
            times: As for `prequential`.

        Returns:
            The forecaster.
        """
        self._learn_table(y, X, times)
        return self

    def _check(self, y: ArrayLike, X: ArrayLike | None = None, *, times: Times | None = None) -> None:
        """Raise the error that `update` raises for these rows; nothing changes."""
        table, inputs = self._read(y, X, times)
        self._window_of(table, inputs).placed(table.times, len(table.values))

    @locked
    def predict(
        self,
        horizon: int | None = None,
        X: ArrayLike | None = None,
        *,
        coverage: float | None = None,
        quantiles: Sequence[float] | None = None,
    ) -> Any:
        """Forecast the next rows as an array or, after frames of pandas or Polars, as a Series or frame with times.

        Args:
            horizon: Number of rows, at most that of the constructor; None for that.
            X: Exogenous inputs (k, inputs), or (k,) of one input, of these rows, as far as they are known.
            coverage: A share in (0, 1) to return the lower and the upper ends of an interval too.
            quantiles: Levels in (0, 1) to return these quantiles of the forecasts too.

        Returns:
            Forecasts (horizon,) or (horizon, series); with `coverage` a tuple of forecasts, lower ends and upper ends;
            with `quantiles` a tuple of forecasts and a dict of values by level. A frame of Polars has the times in the
            column whose name was given as `times`.
        """
        if coverage is not None and quantiles is not None:
            raise ValueError("coverage or quantiles must be given, got both: coverage 0.9 is quantiles=[0.05, 0.95]")
        if coverage is not None:
            check_coverage(coverage)
        levels = [check_coverage(level, "quantiles") for level in quantiles or ()]
        told = self._forecast(horizon, X=X)
        forecast = self._framed(told[0])
        if coverage is not None:
            return (forecast, *map(self._framed, interval(told, coverage, self._limits)))
        if quantiles is not None:
            return forecast, {level: self._framed(quantile(told, level, self._limits)) for level in levels}
        return forecast

    def _rows_ahead(self, X: ArrayLike) -> Floats:
        """The exogenous inputs of rows to forecast, in the order of their names; an error for other times."""
        table, clock = read_table("X", X), self._clock
        if table.times is not None and clock.grid is not None and clock.last is not None:
            for h, at in enumerate(table.times.seconds.tolist(), 1):
                if clock.index(at) != clock.last + h:
                    raise ValueError(
                        f"X must have the times of the rows ahead, {clock.ahead(h)} in row {h - 1}, got "
                        f"{clock.label(at)}: give these rows, or an array, which has no times"
                    )
        return arranged("X", self._inputs, table)

    def _framed(self, values: Floats) -> Any:
        """Values (m, H) in the shape of the rows that were learned."""
        out = values[0] if self._flat else values.T
        times = self.times(values.shape[1])
        if self._frame == "polars":
            pl = importlib.import_module("polars")
            if self._flat and not self._column:
                return pl.Series(ONLY, out)
            clock = {self._column: times} if self._column else {}
            return pl.DataFrame(clock | dict(zip(map(str, self._names), values, strict=True)))
        if self._frame != "pandas":
            return out
        import pandas as pd

        index = None if times[0] is None else pd.Index(times)
        return pd.Series(out, index) if self._flat else pd.DataFrame(out, index, columns=pd.Index(self._names))

    # ------------------------------------------------------------------ saving

    @locked
    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data; a forecaster with the same parameters that loads it continues with the same
        bits.
        """
        state = {
            "names": [pack_label(name) for name in self._names],
            "inputs": [pack_label(name) for name in self._inputs],
            "frame": self._frame,
            "column": self._column,
            **self._window.state_dict(),
        }
        return sealed(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state_dict: The result of `state_dict` of a forecaster with the same parameters.

        Raises:
            ValueError: An entry is missing or wrong; the message names it and nothing changed.
        """
        fresh = type(self)(**self.get_params())
        new = unsealed("state_dict", state_dict, set(fresh.state_dict()))
        fresh._names, fresh._inputs = (list(unpack_labels(new, name)) for name in ("names", "inputs"))
        fresh._frame, fresh._column = new["frame"], new["column"]
        fresh._window = fresh._new_window(len(fresh._names), len(fresh._inputs))
        fresh._window.load(new)
        self._become(fresh)

    def __getstate__(self) -> dict[str, Any]:
        return stamp({"parameters": self.get_params(), "state": self.state_dict()})

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = check_stamp(state)
        self.__init__(**state["parameters"])  # type: ignore[misc]
        self.load_state_dict(state["state"])


# The options and their defaults, as the constructor declares them.
OPTIONS = {name: one.default for name, one in inspect.signature(SepSAForecaster).parameters.items()}


def check_bounds(bounds: Any) -> tuple[float, float]:
    """The least and the largest value, infinite where there is no bound."""
    try:
        low, high = bounds
        ends = -np.inf if low is None else float(low), np.inf if high is None else float(high)
    except (TypeError, ValueError):
        raise ValueError(f"bounds must be two numbers or None, such as (0, None), got {bounds!r}") from None
    if not ends[0] < ends[1]:
        raise ValueError(f"bounds must be in order, the lower one first, got {bounds!r}")
    return ends


def check_coverage(coverage: float, name: str = "coverage") -> float:
    """A share in (0, 1)."""
    if not is_number(coverage) or not 0 < coverage < 1:
        raise ValueError(f"{name} must be a share in (0, 1), got {coverage!r}")
    return float(coverage)
