"""How a file is read. A setting is declared here alone: it is an option of the commands, and saved with the model."""

from __future__ import annotations

import codecs
import csv
import shlex
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from sepsa.learner.columns.cells import (
    DECORATED,
    THOUSANDS,
    check_date_format,
    date_formats,
    number_cure,
    read_cell,
)

if TYPE_CHECKING:  # options of commands need no NumPy
    from sepsa.learner.columns.reader import Column

UTF_8 = "utf-8"


def option(default: Any, words: str, **more: Any) -> Any:
    """A setting with its default and its meaning.

    `read` reads its text in a command, and `names` are its names there.
    """
    return field(default=default, metadata={"help": words, **more})


def names(text: str) -> tuple[str, ...]:
    """Columns or texts with commas between."""
    try:
        return tuple(next(csv.reader([text]))) if text else ()
    except csv.Error:
        raise ArgumentTypeError(
            f"must be a list with commas between, with quotes around a name that has a line break, got {text!r}"
        ) from None


@dataclass
class Reading:
    """What a file needs to be read beside its bytes."""

    sep: str | None = option(None, "The separator of cells; else it is found: , ; | or a tab.")
    decimal: str = option(".", "The decimal mark, . or ,")
    thousands: str | None = option(None, "The mark between thousands, such as , of 63,580.00; else there is none.")
    encoding: str = option(UTF_8, "The encoding of a text file, such as cp1250, latin1 or utf-16.")
    na_values: tuple[str, ...] = option(
        (), "Further missing values, as -999,missing; empty, NA, N/A, NaN, null, None, ? are known.", read=names
    )
    date_format: str | None = option(None, "How texts write dates, such as %d.%m.%Y %H:%M; 2026-01-31 is known.")

    def __post_init__(self) -> None:
        sep = {"tab": "\t", "\\t": "\t"}.get(self.sep or "", self.sep) or None
        if sep is not None and (len(sep) > 1 or sep in ('"', "\r", "\n") or not sep.isascii()):
            raise ValueError(f"sep must be one character such as ';' or tab, got {sep!r}")
        if self.decimal not in (".", ",") or self.decimal == sep:
            raise ValueError(f"decimal must be . or , and not the separator, got {self.decimal!r}")
        thousands = {"space": " "}.get(self.thousands or "", self.thousands) or None
        if thousands is not None and (len(thousands) > 1 or thousands not in THOUSANDS or thousands == self.decimal):
            marks = "one of , . ' _ space"
            raise ValueError(f"thousands must be {marks} and not the decimal mark, got {thousands!r}")
        self.sep, self.thousands, self.encoding = sep, thousands, check_encoding(self.encoding)
        self.na_values, self.date_format = tuple(map(str, self.na_values)), check_date_format(self.date_format)

    @classmethod
    def take(cls, options: dict[str, Any]) -> Reading:
        """The settings among these options, from which they are removed."""
        return cls(**{name: options.pop(name) for name in SETTINGS if name in options})

    def cells(self) -> tuple[str, str | None, str | None]:
        """The arguments of `read_cell` behind the text."""
        return self.decimal, self.date_format, self.thousands

    def missing(self) -> Mapping[str, frozenset[Any]]:
        """The further missing values by kind of cell, "number", "date" or "text"; each is a text where it is one."""
        cells = [(*read_cell(text, *self.cells()), text) for text in self.na_values]
        found = {kind: frozenset(value for of, value, _ in cells if of == kind) for kind in ("number", "date")}
        return found | {"text": frozenset(text.strip() for _, _, text in cells)}


def cure_of(text: str, reading: Reading, kind: str = "number", otherwise: str = "") -> str:
    """What to do about a text where numbers or dates are expected."""
    if kind == "date" and (formats := date_formats(text)):
        return f"give --date-format {' or '.join(map(repr, formats))}"
    if kind == "number" and (cure := number_cure(text, reading.decimal)):
        return cure
    if kind == "number" and DECORATED.fullmatch(text):
        return "remove all but digits and the decimal mark"
    return otherwise or f"give --na-values {shlex.quote(text[:40])} if it is a missing value"


def wrong_cell(
    name: str, column: Column, reading: Reading, said: str = "which is not a number", **more: str
) -> Callable[[int], str]:
    """A function from the number of a row to why its cell cannot be used, with the cure, which takes `more`."""

    def reason(i: int) -> str:
        text = column.text(i)
        return f"{name!r} is {text[:40]!r}, {said}: {cure_of(text, reading, **more)}"

    return reason


def quote(text: str) -> str:
    """A text as a CSV cell."""
    return '"' + text.replace('"', '""') + '"' if any(mark in text for mark in ',"\r\n') else text


def drop_of(column: str) -> str:
    """How a column is left out."""
    return f"leave it out by --drop {shlex.quote(quote(column)[:100])}"


NOT_FINITE = "give --na-values if such a number is a missing value"
ABSENT = "name a column that has values, or remove these rows"


SETTINGS = [each.name for each in fields(Reading)]


def check_encoding(name: str) -> str:
    """The usual name of an encoding of characters."""
    try:
        found = codecs.lookup(name)
        "a".encode(name)  # refuses codecs that are not of characters, such as hex
        codecs.getincrementaldecoder(name)("replace").decode(b"a")
    except (LookupError, ValueError, TypeError):
        raise ValueError(
            f"encoding must be one that Python knows, such as utf-8, cp1250 or latin1, got {name!r}"
        ) from None
    return UTF_8 if found.name == "utf-8-sig" else found.name  # whose mark is known
