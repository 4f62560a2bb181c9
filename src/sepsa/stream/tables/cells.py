"""Blocks of a table's rows, the rows that are refused, and columns of Arrow."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from sepsa.stream.columns.cells import Column, column_of_texts
from sepsa.stream.engine.protocol import Floats
from sepsa.stream.tables.reading import Reading


class TableError(ValueError):
    """A table that cannot be read, or not from the position at which the checkpoint was written."""


class BadRow(NamedTuple):
    """A row that cannot be learned, which `sepsa stream` writes to the quarantine file."""

    line: int
    reason: str
    text: str


@dataclass
class RowBlock:
    """Rows of a table, and the position in the table after them."""

    columns: dict[str, Column]
    lines: NDArray[np.int64]  # of each row, from 1; for Parquet and Arrow the row's number
    raw: Callable[[int], str]  # the text of a row in the file
    bad: list[BadRow]
    position: dict[str, Any]

    def __len__(self) -> int:
        return len(self.lines)

    def bad_row(self, i: int, reason: str) -> BadRow:
        """Row i as one that cannot be learned."""
        return BadRow(int(self.lines[i]), reason, self.raw(i))


def column_of_arrow(name: str, array: Any, categorical: bool, reading: Reading) -> Column:
    """A column from an Arrow array."""
    kind = array.type
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
        array = array.chunk(0) if isinstance(array, pa.ChunkedArray) else array
    if pa.types.is_dictionary(kind) and not is_text(kind.value_type):
        array = array.dictionary_decode()
        kind = array.type
    if categorical and not (pa.types.is_dictionary(kind) or is_text(kind)):
        array = pc.cast(array, pa.string())
        kind = array.type
    if is_text(kind) or pa.types.is_dictionary(kind):
        encoded = array if pa.types.is_dictionary(kind) else pc.dictionary_encode(array)
        codes = filled(encoded.indices.cast(pa.int32()), np.int32(-1))
        texts = ["" if text is None else text for text in encoded.dictionary.to_pylist()]
        return column_of_texts(codes, texts, reading.decimal, categorical, reading.date_format)
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        micros = pc.cast(array, pa.timestamp("us", getattr(kind, "tz", None)), safe=False)
        seconds = pc.cast(micros, pa.int64())
        return Column(np.full(len(array), math.nan), times=to_floats(seconds) / 1e6)
    if pa.types.is_time(kind) or pa.types.is_duration(kind):
        array = pc.cast(array, pa.int32() if kind.bit_width == 32 else pa.int64())
        kind = array.type
    numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    if not (numeric or pa.types.is_decimal(kind) or pa.types.is_null(kind)):
        raise TableError(
            f"column {name!r} is of type {kind}, which is not a number, a date or a text: leave it out by --drop"
        )
    return Column(to_floats(array))


def is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view())


def to_floats(array: Any) -> Floats:
    """The values of an Arrow array of numbers, NaN for null."""
    floats = array if pa.types.is_float64(array.type) else pc.cast(array, pa.float64(), safe=False)
    return filled(floats, np.float64(math.nan))


def filled(array: Any, instead: Any) -> NDArray[Any]:
    """The values of an Arrow array with a number of NumPy for null; `to_numpy` and `pa.scalar` would import pandas."""
    null = pa.Array.from_buffers(array.type, 1, [None, pa.py_buffer(instead.tobytes())])[0]
    values: NDArray[Any] = np.from_dlpack(pc.fill_null(array, null))
    return values
