"""Checks of what users give and have installed. The error names the argument, what is valid and the value."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral, Real


class NotFinite(ValueError):
    """Values that a head cannot learn: NaN, Inf, or numbers too large for its arithmetic. Nothing was learned."""


def is_number(value: object) -> bool:
    """Whether this is a real number of Python or NumPy, not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def in_range(name: str, value: float, low: float, high: float) -> float:
    """A number in (low, high], or in (low, inf)."""
    words = f"({low:g}, inf)" if high == math.inf else f"({low:g}, {high:g}]"
    if not is_number(value):
        raise TypeError(f"{name} must be a number in {words}, got {value!r}")
    if not low < value <= high or value == math.inf:
        raise ValueError(f"{name} must be in {words}, got {value}")
    return float(value)


def at_least(name: str, value: object, low: int) -> int:
    """An integer that is not smaller than `low`."""
    if not is_number(value) or not isinstance(value, Integral) or int(value) < low:
        error: type[Exception] = ValueError if isinstance(value, Integral) else TypeError
        raise error(f"{name} must be an integer of at least {low}, got {value!r}")
    return int(value)


def not_negative(name: str, value: float) -> float:
    """A finite number that is not negative."""
    return 0.0 if value == 0 else in_range(name, value, 0.0, math.inf)


def beyond_floats(name: str, value: int) -> ValueError:
    """The error for an integer that no float holds."""
    return ValueError(
        f"{name} must hold numbers up to {sys.float_info.max:.2g}, got an integer of {int(math.log10(abs(value))) + 1} "
        "digits: rescale it, or convert an identifier to text"
    )


def printable(text: str) -> str:
    """The text with its control characters, which a terminal obeys, written as \\x1b; line breaks and tabs stay.

    Half a pair of surrogates, which no encoding can write, is written likewise.
    """
    return text.translate(_CONTROLS).encode("utf-8", "backslashreplace").decode("utf-8")


_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def one_of(name: str, value: str, valid: Iterable[str]) -> str:
    """One of these words."""
    if value not in tuple(valid):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, valid))}, got {value!r}")
    return value


@contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """Name the extra in the error for a package that is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "sepsa":
            raise
        raise ModuleNotFoundError(
            f"{what} needs {missing}, which is not installed: pip install 'sepsa[{extra}]'", name=missing
        ) from None
