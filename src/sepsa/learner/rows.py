"""Rows of dense arrays and of SciPy's sparse matrices, which become dense a few MiB at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from sepsa.learner.memory.parts import Floats

NUMBERS = 1 << 22  # in a dense part of a sparse matrix: 32 MiB


def dense(X: Any) -> Floats:
    """A dense array, or a sparse matrix as one."""
    return X if isinstance(X, np.ndarray) else X.toarray()


def row_parts(X: Any, multiple: int = 1) -> Iterator[tuple[slice, Floats]]:
    """Which rows of X, and these as a dense array: all at once, or of a sparse matrix a `multiple` of rows each."""
    n, d = X.shape
    if isinstance(X, np.ndarray):
        yield slice(0, n), X
        return
    count = max(1, NUMBERS // d // multiple) * multiple
    for start in range(0, n, count):
        yield slice(start, start + count), X[start : start + count].toarray()


def column_parts(X: Any) -> Iterator[Floats]:
    """The columns of X as dense arrays: all at once, or of a sparse matrix a few at a time."""
    if isinstance(X, np.ndarray):
        yield X
        return
    n, d = X.shape
    columns, count = X.tocsc(), max(1, NUMBERS // n)
    for start in range(0, d, count):
        yield columns[:, start : start + count].toarray()
