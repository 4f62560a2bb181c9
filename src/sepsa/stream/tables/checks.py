"""Checks of what the table commands are given: files, names of columns, and what the first rows hold."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sepsa.stream.tables.cells import RowBlock, TableReader
from sepsa.stream.tables.inspection import column_names
from sepsa.stream.tables.model import Details, TableModel
from sepsa.stream.tables.output import Misuse, say
from sepsa.stream.tables.reading import cure_of

SHOWN_COLUMNS = 5  # unknown columns that are named


@contextlib.contextmanager
def wrong_options() -> Iterator[None]:
    """Convert the error for an argument into one that names the option."""
    try:
        yield
    except (TypeError, ValueError) as error:
        name, _, words = str(error).partition(" ")
        raise Misuse(f"--{name.replace('_', '-')} {words}") from None


def check_files(files: dict[str, Path | None]) -> None:
    """Raise an error if an output would overwrite the table or another output."""
    seen: dict[str, str] = {}
    for option, path in files.items():
        if path is None or (path.exists() and not path.is_file()):  # a device takes what several write
            continue
        if (other := seen.setdefault(os.path.realpath(path), option)) != option:
            raise Misuse(f"{option} must be another file than {other}, got {path} for both")


def check_details(intervals: float | None, wanted: bool, model: TableModel) -> Details | None:
    """What is computed beside each prediction; an error if it does not fit the model."""
    if intervals is not None and (model.classify or not 0 < intervals < 1):
        raise Misuse(
            f"--intervals must be a share in (0, 1) of the targets, which are numbers, got {intervals}"
            f"{': --probabilities is for classes' if model.classify else ''}"
        )
    if wanted and not model.classify:
        raise Misuse("--probabilities needs a target that is a class, and it is a number: use --intervals 0.9")
    return Details(intervals, wanted) if wanted or intervals is not None else None


def check_names(table: TableReader, given: Mapping[str, Sequence[str]]) -> None:
    """Raise an error for names of columns, by the option that gives them, that the table does not have."""
    if table.names is None:
        return
    shown = ", ".join(table.names[:20]) + (", ..." if len(table.names) > 20 else "")
    for option, names in given.items():
        for name in names:
            if name not in table.names:
                hint = (
                    ""
                    if len(table.names) > 1
                    else "; if they are not separated rightly, give --sep; the first line must name them"
                )
                raise Misuse(f"--{option} must be a column of the table, {shown}, got {name!r}{hint}")


def check_first_target(block: RowBlock, model: Any, name: str, otherwise: str) -> None:
    """Raise an error if the first target is not a number and the target is not a class.

    `otherwise` is the cure for a text that does not look like a number.
    """
    column = block.columns.get(name)
    if model.classify or column is None:
        return
    texts, dates = column.is_text, column.is_time
    there = np.flatnonzero(texts | dates | ~np.isnan(column.numbers))
    if not len(there) or not (texts | dates)[there[0]]:
        return
    i = int(there[0])
    value = "a date" if dates[i] else repr(column.text(i)[:40])
    cure = otherwise if dates[i] else cure_of(column.text(i), model.reading, otherwise=otherwise)
    said = f"line {block.lines[i]}: the target {name!r} is {value}, which is not a number"
    raise Misuse(f"{said}: {cure}, or leave the line out")


def check_kinds(block: RowBlock, model: TableModel) -> None:
    """Raise an error for a column all of whose cells are of another kind than those that the model has learned."""
    for name, column in block.columns.items():
        other, present = model.other_kind(name, column)
        if name not in (*model.drop, model.target) and other.any() and other[present].all():
            i = int(np.flatnonzero(other)[0])
            raise Misuse(f"line {block.lines[i]}: {model.why_other(name, column, i)}")


def warn_of_columns(
    names: Sequence[str], model: TableModel, known: set[str] | None = None, becomes: str = "ignored"
) -> None:
    """Print which columns of the model the table lacks, and which columns of the table the model does not know.

    `known` are columns that earlier rows had, where each row names its own.
    """
    own = column_names(model)
    missing = [name for name in own if name not in names]
    ignored = {*own, *model.drop, model.target, *(known or ())}
    unknown = [name for name in names if name not in ignored]
    for name in unknown[:SHOWN_COLUMNS]:
        near = difflib.get_close_matches(name, own, 1)
        say(f"column {name!r} is not one of the model's and is {becomes}" + (f": is it {near[0]!r}?" if near else ""))
    if len(unknown) > SHOWN_COLUMNS:
        say(f"{len(unknown) - SHOWN_COLUMNS} more columns are {becomes}")
    if missing and known is None:
        said = ", ".join(map(repr, missing[:20])) + (", ..." if len(missing) > 20 else "")
        say(f"{len(missing)} of the model's {len(own)} columns are absent, taken as missing values: {said}")
