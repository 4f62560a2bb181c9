"""Samples, frames, targets and weights that River passes, as arrays of numbers; the checks of what users give."""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Mapping, Sequence
from datetime import date, datetime, timedelta
from typing import Any

import numpy as np
from river.utils import dataframe

from sepsa.stream.columns.cells import read_cell, read_time
from sepsa.stream.columns.inputs import DATE_PARTS, date_parts
from sepsa.stream.engine.protocol import Floats
from sepsa.stream.growth import Names
from sepsa.stream.learner import StreamLearner

Frame = Any  # a frame or series of any library that River takes: pandas, polars, ...
Series = Any


def in_columns(names: Sequence[Hashable], X: Floats, features: Names) -> Floats:
    """The columns of X (n, len(names)) in the order of `features`, NaN where X has none."""
    table = np.full((len(X), len(features)), np.nan)
    places = np.array([features.get(name, -1) for name in names], np.intp)
    known = np.flatnonzero(places >= 0)
    table[:, places[known]] = X[:, known]
    return table


def values_in_order(x: Any, names: Names, learner: StreamLearner | None = None) -> list[Any] | None:
    """The values of x in the order of `names`, where x has exactly these names and finite numbers; else None.

    With a learner whose scales are fixed, missing values are NaN.
    """
    if type(x) is not dict:  # another mapping, as a defaultdict, may return values for keys it does not have
        return None
    try:
        if len(x) == len(names) and x:
            values = list(map(x.__getitem__, names))
            if math.isfinite(sum(values, 0.0)):
                return values
    except (KeyError, TypeError, OverflowError):
        pass
    try:
        if learner is not None and learner.warm and x.keys() <= names.keys():
            values = list(map(x.get, names))
            if math.isfinite(sum((value for value in values if value is not None and value == value), 0.0)):
                return [math.nan if value is None else value for value in values]
    except (TypeError, ValueError, OverflowError):
        pass
    return None


def position(name: Any, names: Names) -> int | None:
    """The column number of a name; None where it is unknown."""
    try:
        return names.get(name)
    except TypeError:  # not hashable
        return None


def read_number(what: str, value: Any) -> float:
    """A number, NaN for a missing value; ±Inf and other types raise an error."""
    pandas = sys.modules.get("pandas")
    if value is None or (pandas is not None and (value is pandas.NA or value is pandas.NaT)):
        return math.nan
    try:
        number = math.inf if isinstance(value, (str, bytes, bytearray)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.inf
    if math.isinf(number):
        raise ValueError(f"{what} must be a finite number, got {value!r}: encode it, or leave it out")
    return number


def read_target(what: str, value: Any) -> float:
    """A finite number."""
    number = read_number(what, value)
    if math.isnan(number):
        raise ValueError(f"{what} must be a finite number, got {value!r}: leave the sample out")
    return number


def read_weight(w: Any) -> float:
    """A sample's weight."""
    weight = read_target("w", w)
    if weight < 0:
        raise ValueError(f"w must not be negative, got {w!r}")
    return weight


def read_weights(w: Series, n: int) -> Floats:
    """The weights (n,) of samples, from one for all or a series."""
    if np.isscalar(w):
        return np.full(n, read_weight(w))
    weights = np.array([read_weight(value) for value in dataframe.into_series(w).to_list()])
    if len(weights) != n:
        raise ValueError(f"w must have one weight for each of the {n} rows of X, got {len(weights)}")
    return weights


def read_row(x: Any) -> tuple[list[Hashable], Floats]:
    """Names and values (1, len(names)) of a sample; those of texts and dates are the names of what encodes them."""
    if not isinstance(x, Mapping):
        raise TypeError(f"x must be a dict of features, got {type(x).__name__}")
    if set(map(type, x.values())) == {float}:
        row = np.array([list(x.values())])
        if not np.isinf(row).any():
            return list(x), row
    pairs = [pair for name, value in x.items() for pair in read_feature(f"x[{name!r}]", name, value)]
    return [name for name, _ in pairs], np.array([[value for _, value in pairs]], np.float64)


def read_feature(what: str, name: Hashable, value: Any) -> list[tuple[Hashable, float]]:
    """The inputs of a feature: a number itself, an indicator of a text, the parts of a date; none of a missing text.

    Texts that spell numbers, dates or missing values are read as such.
    """
    if isinstance(value, str):
        kind, number = read_cell(value)
        if kind == "text":
            return [(f"{name}={value}", 1.0)]
        if kind == "missing":
            return []
        if kind == "number":
            return [(name, read_number(what, number))]
        return parts_of_date(name, number)
    if isinstance(value, date) and value == value:  # pandas' NaT is a date that differs from itself
        text = value.isoformat() if isinstance(value, datetime) else f"{value.isoformat()}T00:00"
        return parts_of_date(name, read_time(text))
    if isinstance(value, np.datetime64):
        return [] if np.isnat(value) else parts_of_date(name, float(value.astype("datetime64[us]").astype(int)) / 1e6)
    if isinstance(value, timedelta) and value == value:
        value = value.total_seconds()
    return [(name, read_number(what, value))]


def parts_of_date(name: Hashable, seconds: float) -> list[tuple[Hashable, float]]:
    values = date_parts(np.array([seconds]))[0].tolist()
    return [(f"{name}:{part}", value) for part, value in zip(DATE_PARTS, values, strict=True)]


def read_frame(X: Frame) -> tuple[list[Hashable], Floats]:
    """Names and values (n, len(names)) of a frame."""
    frame = dataframe.into_frame(X)
    n = len(frame)
    columns: dict[Hashable, Floats] = {}
    for name, series in zip(frame.columns, frame.iter_columns(), strict=True):
        if series.dtype.is_float() or series.dtype.is_integer():
            column = np.asarray(series.to_numpy(), dtype=np.float64)
            if np.isinf(column).any():
                read_number(f"X[{name!r}]", column[np.isinf(column)][0])
            columns[name] = column
        else:
            for i, value in enumerate(series.to_list()):
                for of, number in read_feature(f"X[{name!r}]", name, value):
                    columns.setdefault(of, np.full(n, math.nan))[i] = number
    return list(columns), np.stack(list(columns.values()), 1) if columns else np.empty((n, 0))
