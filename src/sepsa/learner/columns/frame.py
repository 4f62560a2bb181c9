"""The columns of a DataFrame as the inputs of a learner, encoded as `sepsa stream` encodes those of a table."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import date
from typing import Any

import numpy as np

from sepsa.learner.columns.cells import CATEGORIES
from sepsa.learner.columns.inputs import Inputs
from sepsa.learner.columns.reader import Column, column_of
from sepsa.states import schema
from sepsa.validation import beyond_floats

NUMBER, DATE, TEXT, CATEGORY = KINDS = ("numbers", "dates", "texts", "categories")
NAMES = {TEXT, CATEGORY}


class FrameEncoder(Inputs):
    """The columns of a DataFrame, what each holds, and the inputs that encode them, in the order of their `names`.

    There are `count` columns, called x0, x1, ... where `names` is None. `means` is the number of targets whose means
    are inputs for a column of many texts.
    """

    # What a user of pandas can do, in warnings.
    drop, numbers, dates = "drop it", "convert it to numbers", "convert it by pandas.to_datetime(..., format={})"
    mixed, tells_dates = "", False

    def __init__(self, names: Iterable[str] | None, count: int, means: int = 1) -> None:
        super().__init__(CATEGORIES, means)
        columns = [f"x{i}" for i in range(count)] if names is None else sorted(names)
        self.kinds: dict[str, str | None] = dict.fromkeys(columns)  # None: no value has come yet
        if len(self.kinds) < len(columns):
            twice = max(columns, key=columns.count)
            raise ValueError(f"X must have distinct columns, got two columns {twice!r}: rename one of them")

    def read(self, frame: Any, first: bool = False) -> dict[str, Column]:
        """The columns of a frame, those without names called by their numbers; `first` notes what they hold."""
        named, given = dict(frame.items()), zip(self.kinds.items(), frame.items(), strict=True)
        found = {name: read_column(name, named.get(name, series), kind) for (name, kind), (_, series) in given}
        if first:
            self.kinds = {name: self.kinds[name] or kind for name, (kind, _) in found.items()}
        return {name: column for name, (_, column) in found.items()}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"kinds": list(self.kinds.values())}

    def _load(self, new: schema.Entries) -> None:
        super()._load(new)
        self.kinds = dict(zip(self.kinds, new["kinds"], strict=True))


def is_frame(X: object) -> bool:
    """Whether this is a DataFrame of pandas, which is imported only where a user has done so."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(X, pandas.DataFrame)


def as_pandas(X: Any) -> Any:
    """A frame of Polars, Arrow or another library that converts itself to pandas; anything else as it is."""
    if is_frame(X):  # scikit-learn reads sparse columns where all are, of numbers, and the one that is not stored is 0
        sparse = {name: dtype for name, dtype in X.dtypes.items() if hasattr(dtype, "fill_value")}
        full = len(sparse) < X.shape[1] or any(one.fill_value != 0 or one.kind == "b" for one in sparse.values())
        return X.astype({name: dtype.subtype for name, dtype in sparse.items()}) if sparse and full else X
    if hasattr(type(X), "columns") and hasattr(X, "collect"):
        raise TypeError(f"X is a lazy frame, {type(X).__name__}: call its method collect first")
    return X.to_pandas() if hasattr(type(X), "columns") and hasattr(X, "to_pandas") else X


def all_numbers(frame: Any) -> bool:
    """Whether each column has a numeric or boolean dtype."""
    return all(dtype.kind in "biufc" for dtype in frame.dtypes)


def check_numbers(frame: Any) -> None:
    """Raise an error for a column that holds anything but numbers, for a model that has learned numbers alone."""
    if not all_numbers(frame):
        for name, series in frame.items():
            read_column(name, series, NUMBER)


def in_order(frame: Any, names: Any) -> Any:
    """The frame with its columns in this order, where it has exactly these; else as it is."""
    here = list(frame.columns)
    same = names is None or here == list(names) or len(here) != len(names) or set(here) != set(names)
    return frame if same else frame[list(names)]


def read_series(name: Any, series: Any, categorical: bool | None = None) -> Column:
    """A column of a frame, whose cells must be finite numbers, dates or texts."""
    try:
        column = column_of(series, categorical)
    except TypeError as error:
        raise ValueError(f"X[{name!r}] must hold numbers, dates or texts, got {error}: convert or drop it") from None
    for value in series[np.isinf(column.numbers)]:
        if isinstance(value, int):
            raise beyond_floats(f"X[{name!r}]", value)
        raise ValueError(f"X[{name!r}] must be a finite number, got {value}: leave it out")
    return column


def read_column(name: str, series: Any, known: str | None) -> tuple[str | None, Column]:
    """What a column holds, None if all is missing, and its cells; an error where it held something else before.

    A column that held texts or categories is read as it was first, whichever of both its dtype is now, and may have
    numbers among its objects.
    """
    categorical = series.dtype == "category"
    column = read_series(name, series, known == CATEGORY or (categorical and known is None))
    there, kinds = series[series.notna()], set()
    if len(there) and (categorical or series.dtype.kind in "biufmM"):
        kinds = {CATEGORY if categorical else DATE if series.dtype.kind == "M" else NUMBER}
    elif len(there):
        types = set(map(type, there))
        kinds = {TEXT if issubclass(of, str) else DATE if issubclass(of, date) else NUMBER for of in types}
        if TEXT in kinds or known in NAMES:
            kinds = {TEXT}
    kind = " and ".join(sorted(kinds)) or None
    if kind not in (None, known) and (known or kind not in KINDS) and not {kind, known} <= NAMES:
        wanted = f"{known}, as when it was first learned" if known else "numbers or dates"
        raise ValueError(
            f"X[{name!r}] must hold {wanted}, got {kind} of dtype {series.dtype}: convert it, for example by "
            f"X[{name!r}].astype"
        )
    return kind, column
