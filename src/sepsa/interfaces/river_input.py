"""Samples, frames, targets and weights that River passes, as arrays of numbers; the checks of what users give."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from river.utils import dataframe

from sepsa.learner.columns.frame import as_pandas, read_series
from sepsa.learner.columns.inputs import date_names, date_parts, numbers_of
from sepsa.learner.columns.reader import read_value
from sepsa.learner.features import in_columns
from sepsa.learner.learner import Names
from sepsa.learner.memory.parts import Floats
from sepsa.learner.stream_learner import StreamLearner

DataFrame = Any  # a frame or series of any library that River takes: pandas, polars, ...
Series = Any


def values_in_order(x: Any, names: Names, learner: StreamLearner | None = None) -> list[Any] | None:
    """The values of x in the order of `names`, where x has exactly these names and finite numbers; else None.

    With a learner whose scales are fixed, missing values are NaN.
    """
    if type(x) is not dict:  # another mapping, as a defaultdict, may return values for keys it does not have
        return None
    values: list[Any] = list(map(x.get, names))
    try:
        if len(x) == len(names) and x and math.isfinite(sum(values, 0.0)):
            return values
    except (TypeError, OverflowError):
        pass
    try:
        if learner is None or not learner.fixed or not x.keys() <= names.keys():
            return None
        if math.isfinite(sum((value for value in values if value is not None and value == value), 0.0)):
            return [math.nan if value is None else value for value in values]
    except (TypeError, ValueError, OverflowError):
        pass
    return None


def read(what: str, value: Any, kinds: Sequence[str] = ("missing", "number", "date", "text")) -> tuple[str, float]:
    """Kind and value of what is one of these kinds; ±Inf and objects that are none raise an error."""
    try:
        kind, number = read_value(value)
    except TypeError:
        kind, number = "", math.nan
    if kind in kinds and not math.isinf(number):
        return kind, number
    value = number if math.isinf(number) else value
    raise ValueError(f"{what} must be a finite number, got {value!r}: encode it, or leave it out")


def read_target(what: str, value: Any) -> float:
    """A finite number."""
    kind, number = read(what, value, () if isinstance(value, str) else ("missing", "number"))
    if kind == "missing":
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
    pairs = [pair for name, value in x.items() for pair in read_feature(f"x[{name!r}]", name, value)]
    return [name for name, _ in pairs], np.array([[value for _, value in pairs]], np.float64)


def in_order(x: Any, names: Names) -> list[float]:
    """The values of a sample in the order of `names`, NaN where it has none."""
    values: list[float] = in_columns(*read_row(x), names)[0].tolist()
    return values


def read_feature(what: str, name: Hashable, value: Any) -> list[tuple[Hashable, float]]:
    """The inputs of a feature: a number itself, an indicator of a text, the parts of a date; none if it is missing."""
    if type(value) is float and math.isfinite(value):  # most are, and take two calls less
        return [(name, value)]
    kind, number = read(what, value)
    if kind == "text":
        return [(f"{name}={value}", 1.0)]
    if kind == "date":
        return list(zip(date_names(name), date_parts(np.array([number]))[0].tolist(), strict=True))
    return [(name, number)] if kind == "number" else []


def read_frame(X: DataFrame) -> tuple[list[Hashable], Floats]:
    """Names and values (n, len(names)) of a frame; those of texts and dates are the names of what encodes them."""
    frame = as_pandas(X)
    columns: dict[Hashable, Floats] = {}
    for name, series in frame.items():
        column = read_series(name, series)
        columns |= numbers_of(name, column)
        for code, text in enumerate(column.texts):
            columns[f"{name}={text}"] = np.where(column.codes == code, 1.0, math.nan)
    return list(columns), np.stack(list(columns.values()), 1) if columns else np.empty((len(frame), 0))


def frame_of(answers: Any, X: DataFrame, name: str | None = None) -> Any:
    """A frame like X with columns by name, or a series of answers."""
    frame = dataframe.into_frame(X)
    if isinstance(answers, dict):
        return dataframe.to_native_frame(answers, like=frame)
    return dataframe.to_native_series(answers, name=name, like=frame)
