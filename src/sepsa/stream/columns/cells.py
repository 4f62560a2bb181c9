"""The cells of a column: missing values, numbers, dates and texts."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the options of the commands are built from this, without the engine and NumPy
    import numpy as np
    from numpy.typing import NDArray

    from sepsa.stream.engine.protocol import Floats

CATEGORIES = 256  # texts of a column that get an input each
# Spellings of a missing value; Arrow's own, and those of common tools.
MISSING = (
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "?", "N/A",
    "NA", "NULL", "NaN", "None", "n/a", "nan", "none", "null",
)  # fmt: skip
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
NOT_FINITE = re.compile(r"[+-]?(inf|infinity|nan(\(.*\))?)", re.IGNORECASE)
DECIMAL_COMMA = re.compile(r"\s*[+-]?\d*,\d+([eE][+-]?\d+)?\s*", re.ASCII)
# A number with separators of thousands, a sign of currency, a percent sign or other spaces.
DECORATED = re.compile(
    r"[\s€$£¥+\u2212-]*(\d+|\d{1,3}([., '\u2019\u00a0\u202f]\d{3})+)([.,]\d+)?([eE][+-]?\d+)?[\s€$£¥%]*"
)
OTHER_DATE = re.compile(r"(\d+)([./-])(\d\d?)\2(\d+)(?:(.)\d?\d:\d\d(:\d\d)?)?", re.ASCII)
DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[+-]\d\d:?\d\d)?)?", re.ASCII)


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
    def _none(self) -> NDArray[np.bool_]:
        import numpy as np

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
        import numpy as np

        numbers = np.where(np.isin(self.numbers, [*number]), math.nan, self.numbers)
        times = None if self.times is None else np.where(np.isin(self.times, [*date]), math.nan, self.times)
        if self.codes is None:
            return Column(numbers, times=times)
        places = np.array([-1 if one.strip() in text else i for i, one in enumerate(self.texts)] + [-1], np.int32)
        codes = places[self.codes]
        return Column(numbers, codes if (codes >= 0).any() else None, self.texts, times)


def read_cell(text: str, decimal: str = ".", date_format: str | None = None) -> tuple[str, float]:
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
    time = math.nan if date_format is None else read_date(stripped, date_format)
    if math.isnan(time) and DATE.fullmatch(stripped):
        with suppress(ValueError, OverflowError):
            time = read_time(stripped)
    return "text" if math.isnan(time) else "date", time


def read_time(text: str) -> float:
    """Seconds since 1970 of a date in ISO 8601, in UTC where it names no zone."""
    time = datetime.fromisoformat(text)
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def read_date(text: str, date_format: str) -> float:
    """Seconds since 1970 of a date in this format of `strptime`, in UTC where it names no zone; NaN for other texts."""
    try:
        time = datetime.strptime(text.strip(), date_format)
    except ValueError:
        return math.nan
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def check_date_format(date_format: str | None) -> str | None:
    """A format of `strptime` with the year, or None."""
    if date_format is None:
        return None
    day = datetime(2001, 1, 1, tzinfo=UTC)
    try:
        time = read_date(day.strftime(date_format), date_format)
    except (ValueError, UnicodeError):
        time = math.nan
    if time != day.timestamp():
        named = "" if re.search("%[yYGcxs+]", date_format) or "%" not in date_format else " that names the year,"
        raise ValueError(f"date_format must be a format of strptime{named} such as %d.%m.%Y, got {date_format!r}")
    return date_format


def date_formats(text: str) -> list[str]:
    """The formats of `strptime` that a text which looks like a date may have; none for another text."""
    found = OTHER_DATE.fullmatch(text.strip())
    if found is None:
        return []
    first, mark, _, last, gap, seconds = found.groups()
    year = "%Y" if len(last) == 4 else "%y"
    orders = [("%Y", "%m", "%d")] if len(first) == 4 else [("%d", "%m", year), ("%m", "%d", year)]
    clock = "" if gap is None else f"{gap}%H:%M{':%S' * bool(seconds)}"
    formats = [mark.join(order) + clock for order in orders]
    return [form for form in formats if not math.isnan(read_date(text, form))]
