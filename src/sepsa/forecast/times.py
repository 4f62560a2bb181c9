"""Times as users give them, read as seconds since 1970, and their zone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from typing import Any, NamedTuple, TypeAlias
from zoneinfo import ZoneInfo

import numpy as np
from numpy.typing import ArrayLike

from sepsa.learner.columns.cells import DATE, date_formats, read_date
from sepsa.learner.columns.cells import read_time as read_iso
from sepsa.learner.memory.parts import Floats
from sepsa.states import schema

EPOCH = datetime(1970, 1, 1)
# Ways to write dates as integers, and their digits.
DATE_INTEGERS = {"%Y%m": 6, "%Y%m%d": 8, "%Y%m%d%H": 10, "%Y%m%d%H%M": 12, "%Y%m%d%H%M%S": 14}

Time: TypeAlias = float | int | date | datetime | np.datetime64
Times: TypeAlias = ArrayLike | Sequence[Time]  # of rows; a text names the column that has them


class Moments(NamedTuple):
    """Times as seconds since 1970, whether they were dates, and their zone."""

    seconds: Floats
    dated: bool
    zone: tzinfo | None = None


def read_time(time: Any) -> tuple[float, bool, tzinfo | None]:
    """A time in seconds since 1970, whether it is a date, and its zone; without a zone it is taken for UTC.

    Texts are read as ISO 8601, such as 2026-01-31T12:00; an offset in them is no zone.
    """
    if isinstance(time, np.datetime64) or (hasattr(time, "dtype") and getattr(time.dtype, "kind", "") == "M"):
        if np.isnat(time):
            raise ValueError(f"time must be a number or a date, got {time!r}")
        return float(seconds_of(time)), True, None
    if isinstance(time, datetime):
        if time != time:
            raise ValueError(f"time must be a number or a date, got {time!r}")
        zone = time.tzinfo
        plain = time.replace(tzinfo=None) if zone is None else time.astimezone(UTC).replace(tzinfo=None)
        return (plain - EPOCH).total_seconds(), True, zone
    if isinstance(time, date):
        return (datetime(time.year, time.month, time.day) - EPOCH).total_seconds(), True, None
    if isinstance(time, str) and DATE.fullmatch(time):
        return read_iso(time), True, None
    if isinstance(time, (bool, np.bool_)) or not isinstance(time, (int, float, np.integer, np.floating)):
        formats = " or ".join(map(repr, date_formats(time))) if isinstance(time, str) else ""
        cure = f": convert texts by pandas.to_datetime(..., format=...) with {formats}" if formats else ""
        raise ValueError(f"time must be seconds, a datetime or a datetime64, got {time!r}{cure}")
    if not abs(float(time)) <= 1e15:
        raise ValueError(f"time must be seconds up to 1e15, a datetime or a datetime64, got {time!r}")
    return float(time), False, None


def read_times(times: Any) -> Moments:
    """Times of rows: a DatetimeIndex or PeriodIndex, a Series of pandas or Polars, an array, or a sequence of them."""
    if hasattr(times, "to_timestamp") and not hasattr(times, "tz_localize"):  # a PeriodIndex
        times = times.to_timestamp()
    zone = getattr(times, "tz", None) or getattr(getattr(times, "dt", None), "tz", None)
    zone = zone or getattr(getattr(times, "dtype", None), "time_zone", None)
    if isinstance(zone, str):
        zone = ZoneInfo(zone)
    if zone is not None and hasattr(times, "dt") and hasattr(times.dt, "tz_convert"):
        times = times.dt.tz_convert("UTC").dt.tz_localize(None)
    elif zone is not None and hasattr(times, "tz_convert"):
        times = times.tz_convert("UTC").tz_localize(None)
    values = times.to_numpy() if hasattr(times, "to_numpy") else times
    if isinstance(values, np.ndarray) and values.ndim != 1:
        raise ValueError(f"times must be one for each row, got an array of shape {values.shape}")
    if isinstance(values, np.ndarray) and values.dtype.kind == "M" and not np.isnat(values).any():
        return Moments(seconds_of(values), True, zone)
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise ValueError(f"times must be one for each row, got {values!r}")
    items: Iterable[Any] = values
    read = [read_time(time) for time in items]
    if len({dated for _, dated, _ in read}) > 1:
        raise ValueError("times must be all dates or all numbers, got both")
    zones = [one for *_, one in read if one is not None]
    return Moments(
        np.array([at for at, *_ in read]), any(dated for _, dated, _ in read), zone or next(iter(zones), None)
    )


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


def seconds_of(dates: Any) -> Any:
    """Seconds since 1970 of a datetime64, or of an array of them."""
    whole = dates.astype("datetime64[s]")
    return whole.astype(np.int64) + (dates - whole) / np.timedelta64(1, "s")


def local_seconds(at: float, zone: tzinfo) -> float:
    """Seconds since 1970 by the clocks of a zone, from those of UTC."""
    offset = (EPOCH + timedelta(seconds=at)).replace(tzinfo=UTC).astimezone(zone).utcoffset()
    return at + (offset or timedelta()).total_seconds()


def seconds_east(zone: tzinfo) -> float:
    """The offset of a zone without a name, in seconds."""
    return (zone.utcoffset(EPOCH) or timedelta()).total_seconds()


def read_zone(saved: Any) -> tzinfo | None:
    """A zone from its name or its offset in seconds."""
    if saved is None:
        return None
    try:
        return ZoneInfo(saved) if isinstance(saved, str) else timezone(timedelta(seconds=float(saved)))
    except (KeyError, ValueError, TypeError, OverflowError, OSError):
        raise schema.damaged("state_dict['clock']['zone']", "a zone or seconds", schema.brief(saved)) from None
