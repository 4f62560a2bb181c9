"""Many time series in one long frame, as Nixtla's libraries take them: a forecaster for each series."""

from __future__ import annotations

import importlib
import os
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sepsa.forecast import SepSAForecaster
from sepsa.forecast.rows import is_polars, numbers
from sepsa.forecast.times import read_times
from sepsa.interfaces.keyed import KeyedLearner
from sepsa.learner.columns.frame import as_pandas, is_frame
from sepsa.learner.memory.parts import Floats

if TYPE_CHECKING:
    from typing import Self

NAME = "SepSA"  # of the column of forecasts


class Series(NamedTuple):
    """The rows of one series in the order of time: values, inputs (n, inputs) and times."""

    key: Hashable
    y: Floats
    X: Floats
    times: Any


class SepSAPanelForecaster:
    """Forecast the series of a long frame, each by a `SepSAForecaster` of its own that learns new rows without a refit.

    Choose it where a frame has a row for each series and time: the columns `unique_id`, `ds` and `y` of Nixtla's
    libraries, and inputs in all others. Rows may come in any order, and are learned in the order of `ds`. A `ds` that
    is left out is a gap, whose value is missing. A series that `update` brings first starts then, and one that it does
    not bring is forecast from its own last row. The forecasters that were used last are in memory, the others in a
    file. An interrupt inside a call may leave some series of that call learned; the last commit is unchanged.

    Args:
        start: A forecaster that has learned nothing, of which every series gets a copy. Its `step` is found for each
            series unless it is given: give it where a series may have a single row.
        path: The file of the forecasters, which `commit` writes; None for a temporary one.
        in_memory: Largest number of forecasters in memory.
        id_col: The column that names the series.
        time_col: The column of the times: dates, or numbers.
        target_col: The column of the values; NaN is missing.

    Attributes:
        series: The `KeyedLearner` of the forecasters: `panel.series["shop 1"]` is one of them.
        inputs: The names of the inputs; None before the first frame.

    See also:
        `SepSAForecaster`, which learns several series that depend on each other; `KeyedLearner`.

    Examples:
        >>> import pandas as pd
        >>> from sepsa import SepSAForecaster, SepSAPanelForecaster
        >>> days = pd.date_range("2026-01-01", periods=200)
        >>> y = [10.0 + day % 7 for day in range(200)]
        >>> shops = [pd.DataFrame({"unique_id": u, "ds": days, "y": y}) for u in "ab"]
        >>> df = pd.concat(shops)
        >>> panel = SepSAPanelForecaster(SepSAForecaster(7, step="day"))
        >>> panel = panel.fit(df[:350]).update(df[350:])
        >>> panel.predict(2, level=[90]).columns.tolist()
        ['unique_id', 'ds', 'SepSA', 'SepSA-lo-90', 'SepSA-hi-90']
    """

    def __init__(
        self,
        start: SepSAForecaster | None = None,
        path: str | os.PathLike[str] | None = None,
        *,
        in_memory: int = 1000,
        id_col: str = "unique_id",
        time_col: str = "ds",
        target_col: str = "y",
    ) -> None:
        start = SepSAForecaster() if start is None else start
        if not isinstance(start, SepSAForecaster) or start.rows:
            raise ValueError(f"start must be a SepSAForecaster that has learned no row, got {start!r}")
        self.id_col, self.time_col, self.target_col = id_col, time_col, target_col
        self.series = KeyedLearner(start, path, in_memory=in_memory)
        known = self.series.position or {}
        self.inputs: list[str] | None = known.get("inputs")
        self._polars: bool = known.get("polars", False)

    def fit(self, df: Any) -> Self:
        """Forget all series, then learn these.

        Args:
            df: A frame of pandas or Polars with a row for each series and time.

        Returns:
            The panel.

        Raises:
            ValueError: A column or a value is wrong, or a time comes twice; nothing changed.
        """
        return self._learn(df, again=True)

    def update(self, df: Any) -> Self:
        """Learn the rows that came since, in the time that these rows take.

        Args:
            df: A frame like the one of `fit`; its times are after those learned of each series.

        Returns:
            The panel.

        Raises:
            ValueError: As for `fit`, or a time is not after those learned of its series; nothing changed.
        """
        return self._learn(df, again=False)

    def _learn(self, df: Any, again: bool) -> Self:
        """Check all rows, then learn them; `again` forgets all others first."""
        polars, df = is_polars(df), as_pandas(df)
        own = [self.id_col, self.time_col, self.target_col]
        found = [name for name in getattr(df, "columns", ()) if name not in own]
        inputs = found if again or self.inputs is None else self.inputs
        if set(inputs) != set(found):
            raise ValueError(f"df must have the inputs {inputs} of the first frame, got {found}")
        parts = self._split("df", df, inputs, self.target_col)
        if again and not parts:
            raise ValueError("df must have rows to learn, got a frame without any")
        for part in parts:
            forecaster = None if again else self.series.get(part.key)
            try:
                (forecaster or self.series.start)._check(part.y, part.X, times=part.times)
            except ValueError as error:
                raise ValueError(f"series {part.key!r}: {error}") from None
        if again:
            self.series.clear()
        for part in parts:
            self.series[part.key].update(part.y, part.X, times=part.times)
        self.inputs, self._polars = inputs, polars
        return self

    def predict(self, h: int | None = None, X_df: Any = None, *, level: Sequence[float] = ()) -> Any:
        """Forecast the next rows of each series.

        Args:
            h: Number of rows, at most the horizon of `start`; None for that.
            X_df: The inputs of these rows, where they are known: a frame with the series, the times and the inputs.
            level: Coverages of intervals in percent, such as [90].

        Returns:
            A frame of the library of the last frame, with the columns of series and times, `SepSA` for the forecasts,
            and `SepSA-lo-90` and `SepSA-hi-90` for the ends of an interval; sorted by series.
        """
        for one in level:
            if not 0 < one < 100:
                raise ValueError(f"level must hold percents between 0 and 100, got {one!r}")
        if self.inputs is None:
            raise ValueError("the panel has learned no row yet: call fit first")
        known = {}
        if X_df is not None:
            if not self.inputs:
                raise ValueError("X_df must be None where the frames that were learned have no inputs, got a frame")
            known = {part.key: part for part in self._split("X_df", as_pandas(X_df), self.inputs)}
        ends = sorted(set(level))
        levels = {f"{NAME}-lo-{one:g}": (1 - one / 100) / 2 for one in reversed(ends)}
        levels |= {f"{NAME}-hi-{one:g}": (1 + one / 100) / 2 for one in ends}
        keys, times, values = [], [], []
        for key in sorted(self.series, key=lambda key: (type(key).__name__, key)):
            forecaster = self.series.get(key)
            try:
                ahead = forecaster.times(h)
                if ahead and ahead[0] is None:
                    raise ValueError(
                        "it has too few rows to tell the time between two of them: give "
                        'start=SepSAForecaster(step=...), such as "day"'
                    )
                X = None if X_df is None or not ahead else self._ahead(known.get(key), ahead)
                made, found = forecaster.predict(h, X, quantiles=list(levels.values()))
            except ValueError as error:
                raise ValueError(f"series {key!r}: {error}") from None
            values.append(np.stack([made, *found.values()]))
            keys += [key] * len(ahead)
            times += ahead
        columns = dict(zip([NAME, *levels], np.concatenate(values, 1), strict=True))
        library: Any = importlib.import_module("polars" if self._polars else "pandas")
        return library.DataFrame({self.id_col: keys, self.time_col: times, **columns})

    def _ahead(self, part: Series | None, times: list[Any]) -> Floats:
        """The inputs (h, inputs) of a series at these times."""
        given = [] if part is None else read_times(part.times).seconds.tolist()
        rows = []
        for time, at in zip(times, read_times(times).seconds.tolist(), strict=True):
            if (count := given.count(at)) != 1:
                raise ValueError(
                    f"X_df must have one row for each series and time to forecast, got {count or 'none'} at {time}"
                )
            rows.append(given.index(at))
        assert part is not None
        return part.X[rows]

    def _split(self, what: str, df: Any, inputs: list[str], target: str | None = None) -> list[Series]:
        """The rows of each series in the order of time; series in the order of their first rows."""
        if not is_frame(df):
            raise TypeError(f"{what} must be a frame of pandas or Polars, got {type(df).__name__}")
        needed = [self.id_col, self.time_col, *([] if target is None else [target]), *inputs]
        for name in needed:
            if name not in df.columns:
                raise ValueError(f"{what} must have the columns {needed}, got {list(df.columns)}")
        for name in needed[:2]:
            if (missing := df[name].isna().to_numpy()).any():
                raise ValueError(
                    f"{what}[{name!r}] must have no missing value, got one in row {int(missing.argmax())}: leave such "
                    "rows out"
                )
        codes, keys = df[self.id_col].factorize()
        moments = df.set_index(self.time_col).index
        order = np.lexsort((read_times(moments).seconds, codes))
        X = numbers(what, df[inputs]) if inputs else np.empty((len(df), 0))
        y = np.empty(len(df)) if target is None else numbers(f"{what}[{target!r}]", df[target])
        rows_of = np.split(order, np.cumsum(np.bincount(codes)))  # and none after the last series
        # 1.0 is 1, since pandas makes a column of integers floats where it has had a missing one.
        keys = [int(key) if isinstance(key, float) and key.is_integer() else key for key in keys.tolist()]
        return [Series(key, y[rows], X[rows], moments[rows]) for key, rows in zip(keys, rows_of, strict=False)]

    # ------------------------------------------------------------------ the file

    def commit(self) -> None:
        """Write all series to the file, completely or not at all."""
        self.series.commit({"inputs": self.inputs, "polars": self._polars})

    def close(self) -> None:
        """Close the file. What was learned since the last commit is lost."""
        self.series.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
