"""Rows for the forecaster: names, values and times from numbers, dicts, arrays and frames."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from datetime import date
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from sepsa.forecast.times import Moments, read_times
from sepsa.learner.arithmetic.robust import HUGE
from sepsa.learner.columns.cells import date_formats
from sepsa.learner.columns.frame import as_pandas
from sepsa.learner.columns.reader import column_of
from sepsa.learner.memory.parts import Floats

ONLY = "y"  # the name of the series where y is a number

Row: TypeAlias = float | Mapping[Any, float | None] | Sequence[float | None] | Floats | None
Ahead: TypeAlias = Sequence[Mapping[Any, float]]  # exogenous inputs of rows to forecast


class Table(NamedTuple):
    """Rows (n, columns) with names, whether they were one-dimensional, their times, and the frame they came from."""

    values: Floats
    names: list[Hashable]
    flat: bool = False
    times: Moments | None = None
    frame: str = ""  # "pandas" or "polars", or "" for anything else
    clock: str = ""  # the name of the column that had the times


def read_table(what: str, data: Any, times: Any = None) -> Table:
    """Rows from an array, a masked array, a Series or a frame of pandas, Polars or another library.

    `times` are times, or the name of the column that has them; None takes a DatetimeIndex or PeriodIndex.
    """
    polars = is_polars(data)
    data = data if polars else as_pandas(data)
    pandas = hasattr(data, "iloc")
    frame = "pandas" if pandas else "polars" if polars else ""
    column = times if isinstance(times, str) else ""
    if column:
        if column not in getattr(data, "columns", ()):
            raise ValueError(f"times must be a column of {what}, or times of its rows, got {column!r}")
        times = data[column]
        data = data.drop(columns=column) if pandas else data.drop(column)
    values = numbers(what, data)
    flat = values.ndim == 1
    if values.ndim not in (1, 2):
        raise ValueError(f"{what} must be rows (n, columns) or (n,), got an array of shape {values.shape}")
    rows = np.ascontiguousarray(values[:, None] if flat else values)
    name = getattr(data, "name", None) if what == "X" else ONLY
    names: list[Hashable] = list(range(rows.shape[1]))
    if hasattr(data, "columns"):
        names = list(data.columns)
    elif flat and name and isinstance(name, str):
        names = [name]
    moments = read_times(times) if times is not None else index_times(what, data.index) if pandas else None
    if moments is not None and len(moments.seconds) != len(rows):
        raise ValueError(f"times must be those of {len(rows)} rows, got {len(moments.seconds)}")
    return Table(rows, names, flat, moments, frame, column)


def is_polars(data: Any) -> bool:
    """Whether this is a frame or a Series of Polars."""
    return type(data).__module__.startswith("polars.")


def index_times(what: str, index: Any) -> Moments | None:
    """The times that an index of pandas has, None if it only counts the rows; an error for any other index of Y."""
    if hasattr(index, "tz") or hasattr(index, "asfreq"):  # of a DatetimeIndex or a PeriodIndex
        return read_times(index)
    if what == "X" or (getattr(index, "nlevels", 1) == 1 and index.dtype.kind in "iufb"):
        return None
    try:
        return read_times(list(index))
    except ValueError as error:
        cure = f"give times=, or {what}.reset_index(drop=True) for rows without times"
        raise ValueError(f"the index of {what} must have times, or count the rows: {error}: {cure}") from None


def numbers(what: str, data: Any) -> Floats:
    """An array of numbers, NaN where one is missing or masked; an error for infinite ones."""
    if isinstance(data, np.ma.MaskedArray):
        data = np.ma.filled(data.astype(np.float64), np.nan)
    elif hasattr(data, "columns"):
        columns = data.items() if hasattr(data, "iloc") else ((name, data[name]) for name in data.columns)
        parts = [numbers_of(what, name, column) for name, column in columns]
        data = np.stack(parts, 1) if parts else np.empty(data.shape)
    elif hasattr(data, "to_numpy") or getattr(getattr(data, "dtype", None), "kind", "") in ("m", "M"):
        data = numbers_of(what, getattr(data, "name", None), data)
    try:
        values = np.array(data, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} must be numbers, or NaN where they are missing: {error}") from None
    if (np.abs(values) > HUGE).any():
        raise ValueError(f"{what} must be numbers up to {HUGE:g}, or NaN where they are missing, got an infinite one")
    return values


def numbers_of(what: str, name: Any, series: Any) -> Floats:
    """The numbers of a column; an error names it where it has dates, and `times` for dates of Y, or texts."""
    where = f" in the column {name!r}" if name is not None else ""
    try:
        column = column_of(series)
    except TypeError as error:
        raise ValueError(f"{what} must be numbers, got {error}{where}: leave it out") from None
    if column.times is not None or (column.texts and date_formats(column.texts[0])):
        cure = f": give times={name!r}" if where and what != "X" else ": leave it out"
        raise ValueError(f"{what} must be numbers, got dates{where}{cure}")
    if column.texts:
        raise ValueError(f"{what} must be numbers, got {column.texts[0][:40]!r}{where}: leave it out")
    return column.numbers


def arranged(what: str, known: list[Hashable], table: Table) -> Floats:
    """The columns of a table in the order of the known names; an array without names has them in order."""
    if len(table.names) != len(known):
        raise ValueError(f"{what} must have the {len(known)} columns of the first row, got {len(table.names)}")
    if table.names == known or table.names == list(range(len(known))):
        return table.values
    in_order(what, known, dict.fromkeys(table.names))
    return np.ascontiguousarray(table.values[:, [table.names.index(name) for name in known]])


def read_values(y: Any) -> Mapping[Hashable, Any]:
    """The values of the series by their names."""
    if isinstance(y, (Sequence, np.ndarray)) and not isinstance(y, str) and np.ndim(y) == 1:
        return dict(enumerate(y))
    return y if isinstance(y, Mapping) else {ONLY: y}


def read_inputs(x: Mapping[Any, Any] | None) -> Mapping[Hashable, Any]:
    """Exogenous inputs by their names; dates, which River's data sets have among them, are left out."""
    return {name: value for name, value in (x or {}).items() if not isinstance(value, date)}


def in_order(what: str, known: list[Hashable] | None, given: Mapping[Hashable, Any]) -> Floats:
    """Values in the order of the known names; NaN where there is none."""
    known = list(given) if known is None else known
    if not known and what == "y":
        raise ValueError("y must have the value of at least one series, got an empty one")
    row = np.full(len(known), np.nan)
    for name, value in given.items():
        if name not in known:
            shown = ", ".join(map(repr, known[:10]))
            raise ValueError(f"{what} must have the names of the first row, {shown or 'none'}, got {name!r}")
        try:
            number = math.nan if value is None or value is np.ma.masked else float(value)
        except (TypeError, ValueError):
            raise ValueError(f"{what} must hold numbers, got {value!r} for {name!r}") from None
        if abs(number) > HUGE:
            raise ValueError(f"{what} must hold numbers up to {HUGE:g}, or NaN, got {value!r} for {name!r}")
        row[known.index(name)] = number
    return row
