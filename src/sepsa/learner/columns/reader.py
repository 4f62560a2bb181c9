"""The one reader of columns: what pandas, Polars, NumPy, Arrow, JSON lines and dicts hold, as numbers, dates and texts.

A text that spells a number, a date or a missing value is read as such. In a column of categories (dtype category of
pandas, Categorical and Enum of Polars, a dictionary of Arrow) each value is a name, "1" too, unless it spells a missing
value. A duration and a time of day are numbers of seconds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sepsa.learner.columns.cells import read_cell, read_time
from sepsa.learner.memory.parts import Floats

CATEGORIES = ("category", "Categorical", "Enum")  # how the names of such dtypes begin


@dataclass
class Column:
    """Cells of one column, each a number, a time or a text: NaN in `numbers` and `times`, -1 in `codes`, for others."""

    numbers: Floats
    codes: NDArray[np.int32] | None = None  # into texts
    texts: list[str] = field(default_factory=list)
    times: Floats | None = None  # seconds since 1970

    @property
    def is_text(self) -> NDArray[np.bool_]:
        """Which cells are texts."""
        return self._none if self.codes is None else self.codes >= 0

    @property
    def is_time(self) -> NDArray[np.bool_]:
        """Which cells are times."""
        return self._none if self.times is None else self.times == self.times

    @property
    def present(self) -> NDArray[np.bool_]:
        """Which cells are not missing."""
        return self.is_text | self.is_time | ~np.isnan(self.numbers)

    @property
    def _none(self) -> NDArray[np.bool_]:
        return np.zeros(len(self.numbers), bool)

    def rows(self, chosen: Any) -> Column:
        """The column at some rows."""
        codes, times = (None if part is None else part[chosen] for part in (self.codes, self.times))
        return Column(self.numbers[chosen], codes, self.texts, times)

    def text(self, i: int) -> str:
        """Cell i as a text, as it was written or nearly so."""
        if self.codes is not None and self.codes[i] >= 0:
            return str(self.texts[self.codes[i]])
        if self.times is not None and self.times[i] == self.times[i]:
            time = datetime(1970, 1, 1) + timedelta(seconds=float(self.times[i]))
            return str(time).removesuffix(" 00:00:00")
        return f"{self.numbers[i]:.15g}"

    def without(self, number: Collection[float], date: Collection[float], text: Collection[str]) -> Column:
        """The column with further missing values: these numbers, times and texts."""
        numbers = np.where(np.isin(self.numbers, [*number]), math.nan, self.numbers)
        times = None if self.times is None else np.where(np.isin(self.times, [*date]), math.nan, self.times)
        if self.codes is None:
            return Column(numbers, times=times)
        places = np.array([-1 if one.strip() in text else i for i, one in enumerate(self.texts)] + [-1], np.int32)
        codes = places[self.codes]
        return Column(numbers, codes if (codes >= 0).any() else None, self.texts, times)


def read_value(value: Any, *how: Any) -> tuple[str, float]:
    """Kind and value of a cell, a text read with the arguments of `read_cell`; TypeError for an object that is none."""
    if isinstance(value, str):
        return read_cell(value, *how)
    if value is None or type(value).__name__ == "NAType":  # of pandas
        return "missing", math.nan
    if isinstance(value, (date, np.datetime64)):
        if value != value:  # not a time
            return "missing", math.nan
        if isinstance(value, date):
            return "date", read_time(value.isoformat())
        return "date", float(seconds_of(value))
    if isinstance(value, time):
        value = datetime.combine(date.min, value.replace(tzinfo=None)) - datetime.min
    if isinstance(value, (bytes, bytearray)):
        raise TypeError(type(value).__name__)
    try:
        number = value.total_seconds() if isinstance(value, timedelta) else float(value)
    except OverflowError:  # of an integer
        number = math.inf if value > 0 else -math.inf
    except (TypeError, ValueError):
        raise TypeError(type(value).__name__) from None
    return ("number" if number == number else "missing"), number


def seconds_of(times: Any) -> Any:
    """Seconds of times or of differences of NumPy, also where microseconds overflow; NaN for those that are none."""
    whole = times.astype(f"{times.dtype.kind}8[s]")
    return whole.astype(np.int64) + (times - whole) / np.timedelta64(1, "s")


def column_of_values(codes: NDArray[Any], values: Iterable[Any], categorical: bool = False, *how: Any) -> Column:
    """A column from its distinct values, read by `read_value`, and the index of each cell's value, -1 for none."""
    values = list(values)
    numbers, times = np.full((2, len(values) + 1), math.nan)
    place = np.full(len(values) + 1, -1, np.int32)
    texts: list[str] = []
    for i, value in enumerate(values):
        kind, number = read_value(value, *how)
        if kind == "text" or (categorical and kind != "missing"):
            place[i] = len(texts)
            texts.append(str(value))
        elif kind == "date":
            times[i] = number
        else:
            numbers[i] = number
    return Column(
        numbers[codes], place[codes] if texts else None, texts, None if np.isnan(times).all() else times[codes]
    )


def column_of_objects(objects: Sequence[Any], categorical: bool = False, *how: Any) -> Column:
    """A column from its cells, read with the arguments of `column_of_values`; TypeError for objects that are none."""
    if {*map(type, objects)} <= {bool, float, int, NoneType} and not categorical:
        with suppress(OverflowError):
            return Column(np.array(objects, np.float64))
    distinct: dict[Any, int] = {}
    # The fold of a datetime tells the second 02:00 of a day from the first, which it equals.
    codes = [distinct.setdefault((value, getattr(value, "fold", 0)), len(distinct)) for value in objects]
    return column_of_values(np.array(codes, np.intp), [value for value, _ in distinct], categorical, *how)


def column_of(series: Any, categorical: bool | None = None) -> Column:
    """A column of pandas, Polars or NumPy; TypeError for objects that are not cells.

    `categorical` says whether its values are names; None: its dtype says so.
    """
    if categorical is None:
        categorical = str(series.dtype).startswith(CATEGORIES)
    if hasattr(series, "cat") and series.dtype == "category":
        return column_of_values(series.cat.codes.to_numpy(), series.cat.categories, categorical)
    array = as_array(series)
    if categorical or array.dtype.kind not in "biufmM":
        return column_of_objects(array.tolist(), categorical)
    if array.dtype.kind in "biuf":
        return Column(array.astype(np.float64, copy=False))
    seconds = seconds_of(array)
    return Column(seconds) if array.dtype.kind == "m" else Column(np.full(len(array), math.nan), times=seconds)


def as_array(series: Any) -> NDArray[Any]:
    """The values of a series, NaN and not-a-time where a number or a time of pandas is missing."""
    if isinstance(series, np.ndarray):
        return series
    kind = getattr(series.dtype, "kind", "")
    if kind and kind in "biuf":
        return series.to_numpy(np.float64, na_value=math.nan)
    return series.to_numpy(f"{kind}8[us]") if kind in ("m", "M") else series.to_numpy()
