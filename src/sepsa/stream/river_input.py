"""Samples, frames, targets and weights that River passes, as arrays of numbers; the checks of what users give."""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from river.utils import dataframe

from sepsa.stream.engine.protocol import Floats
from sepsa.stream.growth import Names
from sepsa.stream.learner import StreamLearner

Frame = Any  # a frame or series of any library that River takes: pandas, polars, ...
Series = Any


def in_columns(names: Sequence[Hashable], X: Floats, features: Names) -> Floats:
    """The columns of X (n, len(names)) in the order of `features`, NaN where X has none."""
    table = np.full((len(X), len(features)), np.nan)
    for j, name in enumerate(names):
        if name in features:
            table[:, features[name]] = X[:, j]
    return table


def values_in_order(x: Any, names: Names, plus: Any = 0.0, learner: StreamLearner | None = None) -> list[Any] | None:
    """The values of x in the order of `names`, where x has exactly these names and finite numbers; else None.

    With a learner whose scales are fixed, missing values are NaN. `plus` must be finite too.
    """
    if type(x) is not dict:  # another mapping, as a defaultdict, may return values for keys it does not have
        return None
    try:
        if len(x) == len(names) and x:
            values = list(map(x.__getitem__, names))
            if math.isfinite(sum(values, plus)):
                return values
    except (KeyError, TypeError, OverflowError):
        pass
    try:
        if learner is not None and learner.warm and x.keys() <= names.keys():
            values = list(map(x.get, names))
            if math.isfinite(sum((value for value in values if value is not None and value == value), plus)):
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
    if value is None or value is getattr(sys.modules.get("pandas"), "NA", None):
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
    """Names and values (1, len(names)) of a sample."""
    if not isinstance(x, Mapping):
        raise TypeError(f"x must be a dict of features, got {type(x).__name__}")
    if set(map(type, x.values())) == {float}:
        row = np.array([list(x.values())])
        if not np.isinf(row).any():
            return list(x), row
    return list(x), np.array([[read_number(f"x[{name!r}]", value) for name, value in x.items()]])


def read_frame(X: Frame) -> tuple[list[Hashable], Floats]:
    """Names and values (n, len(names)) of a frame."""
    frame = dataframe.into_frame(X)
    columns = []
    for name, series in zip(frame.columns, frame.iter_columns(), strict=True):
        if series.dtype.is_float() or series.dtype.is_integer():
            column = np.asarray(series.to_numpy(), dtype=np.float64)
            if np.isinf(column).any():
                read_number(f"X[{name!r}]", column[np.isinf(column)][0])
        else:
            column = np.array([read_number(f"X[{name!r}]", value) for value in series.to_list()])
        columns.append(column)
    return list(frame.columns), np.stack(columns, 1) if columns else np.empty((len(frame), 0))
