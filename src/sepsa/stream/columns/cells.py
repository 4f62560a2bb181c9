"""The cells of a column: missing values, numbers, dates and texts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sepsa.stream.engine.protocol import Floats

# Spellings of a missing value; Arrow's own, and those of common tools.
MISSING = (
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "?", "N/A",
    "NA", "NULL", "NaN", "None", "n/a", "nan", "none", "null",
)  # fmt: skip
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
NOT_FINITE = re.compile(r"[+-]?(inf|infinity|nan(\(.*\))?)", re.IGNORECASE)
DECIMAL_COMMA = re.compile(r"\s*[+-]?\d*,\d+([eE][+-]?\d+)?\s*", re.ASCII)
DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[+-]\d\d:?\d\d)?)?", re.ASCII)


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
