"""The texts of cells: how missing values, numbers and dates are spelled. No NumPy: options of commands need it."""

from __future__ import annotations

import math
import re
import shlex
from contextlib import suppress
from datetime import UTC, datetime

CATEGORIES = 256  # texts of a column that get an input each
# Spellings of a missing value; Arrow's own, and those of common tools.
MISSING = (
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "?", "N/A",
    "NA", "NULL", "NaN", "None", "n/a", "nan", "none", "null",
)  # fmt: skip
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
NOT_FINITE = re.compile(r"[+-]?(inf|infinity|nan(\(.*\))?)", re.IGNORECASE)
THOUSANDS = ",.' \u2019_"  # separators of thousands; a space is also one that does not break
# A number with separators of thousands, a sign of currency, a percent sign or other spaces.
DECORATED = re.compile(
    r"[\s€$£¥+\u2212-]*(\d+|\d{1,3}([., '\u2019\u00a0\u202f]\d{3})+)([.,]\d+)?([eE][+-]?\d+)?[\s€$£¥%]*"
)
OTHER_DATE = re.compile(
    r"(\d+)([./-])(\d\d?)\2(\d+)(?:(.)\d?\d(:\d\d)?(:\d\d)?(?:( ?)(?:[AP]M|[AP]\. ?M\.))?)?",
    re.ASCII | re.IGNORECASE,
)
DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[+-]\d\d:?\d\d)?)?", re.ASCII)


def read_cell(
    text: str, decimal: str = ".", date_format: str | None = None, thousands: str | None = None
) -> tuple[str, float]:
    """Kind and value of a cell: "missing", "number", "date" (seconds since 1970) or "text"."""
    if text in MISSING:
        return "missing", math.nan
    stripped = text.strip(" \t")
    joined = stripped if thousands is None else joined_thousands(stripped, decimal, thousands)
    plain = joined if decimal == "." else joined.replace(".", "\0").replace(decimal, ".")
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


def joined_thousands(text: str, decimal: str, thousands: str) -> str:
    """A number without its separators of thousands; another text as it is."""
    whole, mark, rest = text.partition(decimal)
    if thousands == " ":
        whole = re.sub("[\u00a0\u202f]", " ", whole)
    first, *middle = whole.split(thousands)
    grouped = re.fullmatch(r"[+-]?\d{1,3}", first) and re.fullmatch(r"(\d{2,3},)*\d{3}", ",".join(middle))
    return first + "".join(middle) + mark + rest if grouped else text


def number_cure(text: str, decimal: str = ".") -> str:
    """The options by which a text is a number, where `decimal` is the decimal mark; empty where there are none.

    "63,580" is one by a decimal comma and by a comma between thousands.
    """
    spaced = re.sub("[\u00a0\u202f]", " ", text)
    marks = [(d, t) for d in ".," for t in ("", *THOUSANDS) if t != d and t in spaced]
    found = [(d, t) for d, t in marks if read_cell(text, d, None, t or None)[0] == "number"]
    options = [
        " ".join([f"--decimal {d}"] * (d != decimal) + [f"--thousands {shlex.quote(mark)}" for mark in t])
        for d, t in found
        if d == decimal or (decimal, t) not in found
    ]
    return f"give {' or '.join(options)}" if options else ""


def read_time(text: str) -> float:
    """Seconds since 1970 of a date in ISO 8601, in UTC where it names no zone."""
    time = datetime.fromisoformat(text)
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def read_date(text: str, date_format: str) -> float:
    """Seconds since 1970 of a date in this format of `strptime`, in UTC where it names no zone; NaN for other texts."""
    if "%p" in date_format:
        text = re.sub(r"([ap])\.\s?m\.", r"\1m", text, flags=re.IGNORECASE)
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
    first, mark, _, last, gap, minutes, seconds, space = found.groups()
    year = "%Y" if len(last) == 4 else "%y"
    orders = [("%Y", "%m", "%d")] if len(first) == 4 else [("%d", "%m", year), ("%m", "%d", year)]
    hour = "%H" if space is None else "%I"
    clock = "" if gap is None else f"{gap}{hour}{':%M' * bool(minutes)}{':%S' * bool(seconds)}"
    clock += "" if space is None else f"{space}%p"
    formats = [mark.join(order) + clock for order in orders]
    return [form for form in formats if not math.isnan(read_date(text, form))]
