"""Times as users give them, read as seconds since 1970, and their zone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import Any, NamedTuple, TypeAlias
from zoneinfo import ZoneInfo

import numpy as np
from numpy.typing import ArrayLike

from sepsa.learner.columns.cells import date_formats, read_date
from sepsa.learner.columns.reader import column_of, read_value
from sepsa.learner.memory.parts import Floats
from sepsa.states import schema

EPOCH = datetime(1970, 1, 1)
# Ways to write dates as integers, and their digits.
DATE_INTEGERS = {"%Y%m": 6, "%Y%m%d": 8, "%Y%m%d%H": 10, "%Y%m%d%H%M": 12, "%Y%m%d%H%M%S": 14}

TIMES = str, date, int, float, np.number, np.datetime64
NO_TIMES = bool, np.timedelta64  # which are numbers too

Time: TypeAlias = float | int | date | datetime | np.datetime64
Times: TypeAlias = ArrayLike | Sequence[Time]  # of rows; a text names the column that has them


class Moments(NamedTuple):
    """Times as seconds since 1970, whether they were dates, and their zone."""

    seconds: Floats
    dated: bool
    zone: tzinfo | None = None


def read_times(times: Any) -> Moments:
    """Times of rows: a DatetimeIndex or PeriodIndex, a Series of pandas or Polars, an array, or a sequence of them.

    Times without a zone are taken for UTC. Texts are read as ISO 8601, such as 2026-01-31T12:00; an offset in them is
    no zone.
    """
    times = getattr(times, "array", times)  # of an index or a Series of pandas
    if hasattr(times, "to_timestamp"):  # periods
        times = times.to_timestamp()
    zone = getattr(times, "tz", None)
    if zone is not None:
        times = times.tz_convert(None)
    zone = zone or getattr(getattr(times, "dtype", None), "time_zone", None)  # of Polars
    values: Any = times.to_numpy() if hasattr(times, "to_numpy") else times
    if not isinstance(values, Iterable) or isinstance(values, str) or getattr(values, "ndim", 1) != 1:
        raise ValueError(f"times must be one for each row, got {schema.brief(values)}")
    if isinstance(values, np.ndarray) and values.dtype.kind in "iufM":
        column = column_of(values)
        kinds, seconds = ({"number"}, column.numbers) if column.times is None else ({"date"}, column.times)
    else:
        values = list(values)
        read = [read_time(one) for one in values]
        kinds, seconds = {kind for kind, _ in read}, np.array([at for _, at in read])
        zone = zone or next((one.tzinfo for one in values if isinstance(one, datetime) and one.tzinfo), None)
    dated = "date" in kinds
    wrong = np.isnan(seconds) | (np.abs(seconds) > (np.inf if dated else 1e15))
    if wrong.any():
        time = values[int(wrong.argmax())]
        formats = " or ".join(map(repr, date_formats(time))) if isinstance(time, str) else ""
        cure = f": convert texts by pandas.to_datetime(..., format=...) with {formats}" if formats else ""
        raise ValueError(f"time must be seconds up to 1e15, a datetime or a datetime64, got {time!r}{cure}")
    if len(kinds) > 1:
        raise ValueError("times must be all dates or all numbers, got both")
    return Moments(seconds, dated, ZoneInfo(zone) if isinstance(zone, str) else zone)


def read_time(time: Any) -> tuple[str, float]:
    """What a time is, and its seconds, NaN where it is none, as a text that is a number: 1.5 is no date.

    Times are read one by one: the two hours with one name as daylight saving ends are equal.
    """
    kind, at = read_value(time if isinstance(time, TIMES) and not isinstance(time, NO_TIMES) else None)
    return (kind, at) if kind == "date" or not isinstance(time, str) else ("text", math.nan)


def integer_dates(numbers: Floats) -> str:
    """The format, from %Y%m to %Y%m%d%H%M%S, in which nine tenths of these numbers, two at least, spell dates; else "".

    A year is one from 1900 to 2099, which seconds of the years 1970 to 2029 never spell.
    """
    texts = {f"{number:.0f}" for number in numbers if number % 1 == 0}
    for date_format, length in DATE_INTEGERS.items():
        dates = [text for text in texts if len(text) == length and text[:2] in ("19", "20")]
        dates = [text for text in dates if not math.isnan(read_date(text, date_format))]
        if len(dates) >= max(2, 0.9 * len({*numbers})):
            return date_format
    return ""


def local_seconds(at: float, zone: tzinfo) -> float:
    """Seconds since 1970 by the clocks of a zone, from those of UTC."""
    offset = (EPOCH + timedelta(seconds=at)).replace(tzinfo=UTC).astimezone(zone).utcoffset()
    return at + (offset or timedelta()).total_seconds()
