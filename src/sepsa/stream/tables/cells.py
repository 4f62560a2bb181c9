"""The cells of a table: missing values, numbers, dates and texts, and columns of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Floats = NDArray[np.float64]
# Spellings of a missing value; Arrow's own, and those of common tools.
MISSING = (
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "?", "N/A",
    "NA", "NULL", "NaN", "None", "n/a", "nan", "none", "null",
)  # fmt: skip
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
NOT_FINITE = re.compile(r"[+-]?(inf|infinity|nan(\(.*\))?)", re.IGNORECASE)
DECIMAL_COMMA = re.compile(r"\s*[+-]?\d*,\d+([eE][+-]?\d+)?\s*", re.ASCII)
DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[+-]\d\d:?\d\d)?)?", re.ASCII)


class TableError(ValueError):
    """A table that cannot be read, or not from the position at which the checkpoint was written."""


class BadRow(NamedTuple):
    """A row that cannot be learned, which `sepsa stream` writes to the quarantine file."""

    line: int
    reason: str
    text: str


@dataclass
class Column:
    """Cells of one column, each a number, a time or a text: NaN in `numbers` and `times`, -1 in `codes`, for others."""

    numbers: Floats
    codes: NDArray[np.int32] | None = None  # into texts
    texts: list[str] = field(default_factory=list)
    times: Floats | None = None  # seconds since 1970

    def rows(self, chosen: Any) -> Column:
        """The column at some rows."""
        codes, times = (None if part is None else part[chosen] for part in (self.codes, self.times))
        return Column(self.numbers[chosen], codes, self.texts, times)


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


def read_cell(text: str, decimal: str = ".") -> tuple[str, float]:
    """Kind and value of a cell: "missing", "number", "date" (seconds since 1970) or "text"."""
    if text in MISSING:
        return "missing", math.nan
    stripped = text.strip(" \t")
    plain = stripped if decimal == "." else stripped.replace(".", "\0").replace(decimal, ".")
    if NUMBER.fullmatch(plain):
        return "number", float(plain)
    if NOT_FINITE.fullmatch(stripped):
        value = math.nan if "nan" in stripped.lower() else -math.inf if stripped[0] == "-" else math.inf
        return ("missing" if value != value else "number"), value
    if stripped in MISSING:
        return "missing", math.nan
    if DATE.fullmatch(stripped):
        try:
            return "date", read_time(stripped)
        except (ValueError, OverflowError):
            pass
    return "text", math.nan


def read_time(text: str) -> float:
    """Seconds since 1970 of a date in ISO 8601, in UTC where it names no zone."""
    if "." in text:  # Python 3.10 takes three digits or six
        start, digits, zone = re.fullmatch(r"(.*\.)(\d+)(.*)", text).groups()  # type: ignore[union-attr]
        text = start + digits.ljust(6, "0") + zone
    text = re.sub(r"([+-]\d\d)(\d\d)$", r"\1:\2", text.replace("Z", "+00:00")) if len(text) > 10 else text
    time = datetime.fromisoformat(text)
    return (time if time.tzinfo else time.replace(tzinfo=timezone.utc)).timestamp()


def column_of_texts(codes: NDArray[np.int32], texts: Sequence[str], decimal: str, categorical: bool) -> Column:
    """A column from its distinct texts and the index of each cell's text, -1 for a missing cell."""
    values, times = np.full(len(texts) + 1, math.nan), np.full(len(texts) + 1, math.nan)
    place = np.full(len(texts) + 1, -1, np.int32)
    kept: list[str] = []
    for i, text in enumerate(texts):
        kind, value = read_cell(text, decimal)
        if categorical and kind != "missing":
            kind = "text"
        if kind == "number":
            values[i] = value
        elif kind == "date":
            times[i] = value
        elif kind == "text":
            place[i] = len(kept)
            kept.append(text)
    cell_times = None if np.isnan(times).all() else times[codes]
    return Column(values[codes], place[codes] if kept else None, kept, cell_times)


def column_of_arrow(name: str, array: Any, categorical: bool, decimal: str = ".") -> Column:
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
        codes = pc.fill_null(encoded.indices.cast(pa.int32()), -1).to_numpy(zero_copy_only=False)
        texts = ["" if text is None else text for text in encoded.dictionary.to_pylist()]
        return column_of_texts(codes, texts, decimal, categorical)
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
    floats = array if pa.types.is_float64(array.type) else pc.cast(array, pa.float64(), safe=False)
    values: Floats = floats.to_numpy(zero_copy_only=False)
    return values
