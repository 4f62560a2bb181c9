"""Columns of a table as inputs of a learner: numbers as they are, dates in parts, texts as indicators and target means.

An input enters at the row that first needs it. A text gets an indicator: one of the first `AT_ONCE` of a column with
its first row, a further one with its second, so that a column of identifiers costs no more than that. A column with
more than `categories` indicators gets the running mean of the target of each text (`columns.levels`) as well.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sepsa.learner.columns.cells import DECORATED, NUMBER, date_formats, number_cure
from sepsa.learner.columns.levels import SLOTS, LevelMeans, keys_of
from sepsa.learner.columns.reader import Column
from sepsa.learner.memory.parts import Floats
from sepsa.learner.stream_learner import NewInput
from sepsa.states import schema

if TYPE_CHECKING:
    from typing import Self

AT_ONCE = 32
IDENTIFIERS = 128  # rows that tell a column of identifiers; half of them where they come in one call
CLASS_MEANS = 4  # classes of which a column has means
MOST_INPUTS = 2000  # a learner's state grows as their square
MOST_TEXT_INPUTS = 1000
NOTHING = ""  # the only input, always 0, of a table whose first row has no value
DATE_PARTS = ("days", "month", "weekday", "hour")
CELLS = ("number", "date", "text")


class Candidate(NamedTuple):
    """A new input that enters unless there are too many; `text` is the text of `column` that it indicates."""

    row: int
    rank: int  # of its column, which orders inputs of one row
    name: str
    column: str
    mean: float = 0.0
    text: str | None = None


class Inputs:
    """The learner's inputs by name, and the columns and texts that they encode."""

    drop, numbers, dates = "--drop it", "{}", "give --date-format {}"  # in warnings
    mixed = "give --na-values {} if that is a missing value, or --categorical {} if all are names"
    tells_dates = True

    def __init__(self, categories: int, means: int = 1) -> None:
        self.categories, self.means = categories, means  # of how many targets a column has means
        self.names: dict[str, int] = {}
        self.cells: dict[str, list[str]] = {}  # for each column: the kinds of its cells in the order in which they came
        self.texts: dict[str, dict[str, int]] = {}  # for each column: text to its input, which is 0 or 1
        self.text_rows: dict[str, int] = {}  # for each column: the number of rows that had a text
        self.levels: dict[str, LevelMeans] = {}  # of columns with more than `AT_ONCE` texts
        self.warned: set[str] = set()
        self._warnings: list[tuple[int, str]] = []  # warnings of this call and their rows

    def state_dict(self) -> dict[str, Any]:
        return {
            "names": list(self.names),
            "cells": dict(sorted(self.cells.items())),
            "texts": {column: list(texts) for column, texts in self.texts.items()},
            "text_rows": dict(sorted(self.text_rows.items())),
            "warned": sorted(self.warned),
            "levels": {column: levels.state_dict() for column, levels in sorted(self.levels.items())},
        }

    @classmethod
    def from_state(cls, state: schema.Entries, *how: Any) -> Self:
        """Inputs, made with these arguments, that continue from the entry "inputs"."""
        out = cls(*how)
        out._load(state.entries("inputs", set(out.state_dict())))
        return out

    def _load(self, new: schema.Entries) -> None:
        self.names = {name: i for i, name in enumerate(new["names"])}
        self.cells, self.text_rows, self.warned = dict(new["cells"]), dict(new["text_rows"]), set(new["warned"])
        self.texts = {
            column: {text: self.names[f"{column}={text}"] for text in texts} for column, texts in new["texts"].items()
        }
        self.levels = {column: LevelMeans.from_state(self.means, state) for column, state in new["levels"].items()}

    def learn(
        self, columns: Mapping[str, Column], Y: Floats, shuffled: bool = False
    ) -> tuple[Floats, list[NewInput], list[str]]:
        """The rows (n, inputs) of columns with targets Y (n, outputs), the inputs that they need first, and warnings.

        `shuffled` takes the means of targets before each row in a random order, for a table whose order means nothing;
        the new inputs have then no scales.
        """
        new_inputs, warnings = self.add(columns)
        X = self.encode(columns, len(Y))
        if not (shuffled and self.levels):
            return X, self.learn_means(X, columns, Y, new_inputs), warnings
        order = np.random.default_rng(0).permutation(len(Y))
        turned = X[order]
        self.learn_means(turned, {name: column.rows(order) for name, column in columns.items()}, Y[order], ())
        X[order] = turned
        return X, new_inputs, warnings

    def add(self, columns: Mapping[str, Column]) -> tuple[list[NewInput], list[str]]:
        """Add inputs for values that these rows hold for the first time; returns them, in order, and warnings."""
        candidates: list[Candidate] = []
        self._warnings = []
        for rank, (name, column) in enumerate(columns.items()):
            for of, values in numbers_of(name, column).items():
                if of in self.names or not len(rows := np.flatnonzero(~np.isnan(values))):
                    continue
                candidates.append(Candidate(int(rows[0]), rank, of, name, float(values[rows[0]])))
                if self.tells_dates and of == date_names(name)[0]:
                    said = f"column {name!r} holds dates: they become {', '.join(DATE_PARTS)}"
                    self._warnings.append((int(rows[0]), said))
            if column.codes is not None:
                self._add_texts(name, rank, column, candidates)
            self._note_cells(name, column)
        if not self.names and not any(candidate.row == 0 for candidate in candidates):
            candidates.append(Candidate(0, -1, NOTHING, NOTHING))
        new = []
        texts = sum(map(len, self.texts.values()))
        for row, _, name, column_name, mean, text in sorted(candidates, key=lambda c: c[:2]):
            if name in self.names:
                continue
            if len(self.names) >= MOST_INPUTS or (text is not None and texts >= MOST_TEXT_INPUTS):
                said = f"there are too many inputs: {name!r} and all that are new are left out"
                self._warn("too many", row, said)
                continue
            self.names[name] = len(self.names)
            if text is not None:
                self.texts.setdefault(column_name, {})[text] = self.names[name]
                texts += 1
            new.append(NewInput(row, name, mean, float(text is not None or name == NOTHING)))
        return new, [text for _, text in sorted(self._warnings)]

    def mixed_columns(self) -> list[str]:
        """The columns that have held texts beside numbers or dates."""
        return [name for name, kinds in sorted(self.cells.items()) if "text" in kinds and len(kinds) > 1]

    def _note_cells(self, name: str, column: Column) -> None:
        """Note the kinds of cells that come for the first time; warn of texts beside numbers or dates."""
        known = self.cells.get(name, [])
        masks = (~np.isnan(column.numbers), column.is_time, column.is_text)
        new = [pair for pair in zip(CELLS, masks, strict=True) if pair[1].any() and pair[0] not in known]
        for row, kind in sorted((int(mask.argmax()), kind) for kind, mask in new):
            known = self.cells[name] = [*known, kind]
            if "text" not in known or len(known) == 1 or not self.mixed:
                continue
            text = next(iter(self.texts.get(name, ()))) if name in self.texts else column.text(row)
            if not (date_formats(text) or looks_like_number(text)):  # which has its own warning
                other = next(kind for kind in known if kind != "text")
                cure = self.mixed.format(shlex.quote(text[:40]), shlex.quote(name))
                said = f"column {name!r} holds {other}s and texts, as {text[:40]!r}: {cure}"
                self._warn(f"mixed {name}", row, said)

    def _add_texts(self, name: str, rank: int, column: Column, candidates: list[Candidate]) -> None:
        """Add to `candidates` the inputs that the new texts of a column need."""
        assert column.codes is not None
        known = self.texts.get(name, {})
        there = np.flatnonzero(column.codes >= 0)
        rows_before = self.text_rows.get(name, 0)
        self.text_rows[name] = rows_before + len(there)
        keys, room = keys_of(column.texts), self.categories - len(known)
        at_once = min(AT_ONCE, self.categories) - len(known)
        levels, owners = self.levels.get(name), dict[int, int]()  # of the slots that these rows take
        named = set(known)
        for row, code in zip(there.tolist(), column.codes[there].tolist(), strict=True):
            text, slot = column.texts[code], keys[code] % SLOTS
            owner = owners.get(slot, 0 if levels is None else int(levels.keys[slot]))
            if text not in named:
                if len(named) - len(known) < at_once or (owner == keys[code] and len(named) - len(known) < room):
                    named.add(text)
                    candidates.append(Candidate(row, rank, f"{name}={text}", name, text=text))
                    self._look_at(name, text, row)
                elif owner == keys[code]:
                    candidates += [Candidate(row, rank, of, name) for of in mean_names(name, self.means)]
                    said = f"column {name!r} has more than {self.categories} different texts: further ones share"
                    self._warn(f"texts {name}", row, f"{said} one input, the mean of their targets so far")
                    break
                else:
                    levels = self.levels.setdefault(name, LevelMeans(self.means, start=row))
            if levels is not None and not owner:
                owners[slot] = keys[code]
        distinct = len(np.unique(column.codes[there]))
        if rows_before:  # as far as it is known
            stored = {*owners} if levels is None else {*owners, *np.flatnonzero(levels.keys).tolist()}
            distinct = len(named) + len(stored - {key % SLOTS for key in keys_of(list(named))})
        if distinct >= 0.98 * self.text_rows[name] and max(2 * len(there), self.text_rows[name]) >= IDENTIFIERS:
            said = f"column {name!r} looks like an identifier, with another text in almost every row: {self.drop}?"
            self._warn(f"identifier {name}", int(there[-1]), said)

    def _look_at(self, name: str, text: str, row: int) -> None:
        """Warn of texts that were probably meant as dates or numbers."""
        if formats := date_formats(text):
            said = f"column {name!r} looks like dates, as {text!r}, and is read as texts"
            cure = f"{self.dates.format(' or '.join(map(repr, formats)))}, or {self.drop}"
            self._warn(f"date {name}", row, f"{said}: {cure}")
            self.warned |= {f"texts {name}", f"identifier {name}"}
        if looks_like_number(text):
            said = f"column {name!r} looks like a number, {text!r}, and is read as a text"
            cure = number_cure(text)
            cure = self.numbers.format(cure) if cure else "remove all but digits and the decimal mark"
            self._warn(f"decimal {name}", row, f"{said}: {cure}")

    def _warn(self, key: str, row: int, said: str) -> None:
        self._warnings += [(row, text) for text in self.said_once(key, said)]

    def said_once(self, key: str, said: str) -> list[str]:
        """This warning, where it has not been given yet."""
        if key in self.warned:
            return []
        self.warned.add(key)
        return [said]

    def learn_means(
        self, X: Floats, columns: Mapping[str, Column], Y: Floats, new_inputs: Sequence[NewInput]
    ) -> list[NewInput]:
        """Write the means of texts before each row into X, and add targets Y (n, outputs) to them.

        Returns the new inputs, of which those of means have the mean and the scale of the targets before their row.
        """
        new: dict[Any, NewInput] = {each.name: each for each in new_inputs}
        targets = np.pad(Y, ((0, 0), (0, max(0, self.means - Y.shape[1]))))
        for name, levels in self.levels.items():
            column = columns.get(name)
            if column is None or column.codes is None:
                continue
            names, keys = mean_names(name, self.means), keys_at(column)
            there = np.flatnonzero(keys)
            there, levels.start = there[there >= levels.start], 0
            entry = new[names[0]].row if names[0] in new else 0
            before, after = there[there < entry], there[there >= entry]
            parts = [levels.learn(keys[before], targets[before])]
            for of, mean, scale in zip(names, *levels.scale(), strict=True):
                if of in new:
                    new[of] = new[of]._replace(mean=float(mean), scale=float(scale))
            parts.append(levels.learn(keys[after], targets[after]))
            if names[0] in self.names:
                X[there[:, None], [self.names[of] for of in names]] = np.concatenate(parts)
        return list(new.values())

    def encode(self, columns: Mapping[str, Column], rows: int) -> Floats:
        """The inputs (rows, inputs) of these columns, NaN where a number is missing."""
        X = np.full((rows, len(self.names)), math.nan)
        if NOTHING in self.names:
            X[:, self.names[NOTHING]] = 0.0
        for known in self.texts.values():
            X[:, list(known.values())] = 0.0
        for name, column in columns.items():
            for of, values in numbers_of(name, column).items():
                if of in self.names:
                    X[:, self.names[of]] = values
            if column.codes is None:
                continue
            known = self.texts.get(name, {})
            at = np.array([*(known.get(text, -1) for text in column.texts), -1])[column.codes]
            there = np.flatnonzero(at >= 0)
            X[there, at[there]] = 1.0
            means = mean_names(name, self.means)
            if name in self.levels and means[0] in self.names:
                there = np.flatnonzero(column.codes >= 0)
                X[there[:, None], [self.names[of] for of in means]] = self.levels[name].values(keys_at(column)[there])
        return X


def keys_at(column: Column) -> NDArray[np.int64]:
    """The key of each cell's text; 0 where there is none."""
    return np.array([*keys_of(column.texts), 0], np.int64)[column.codes]


def looks_like_number(text: str) -> bool:
    """Whether a text has digits and other marks as a number; "1" itself is a name, in a column of categories."""
    return not NUMBER.fullmatch(text.strip()) and bool(number_cure(text) or DECORATED.fullmatch(text))


def mean_names(column: str, means: int) -> list[str]:
    """The names of the inputs that hold the means of a column's texts."""
    return [f"{column}:mean"] if means == 1 else [f"{column}:mean {k}" for k in range(means)]


def numbers_of(name: Any, column: Column) -> dict[Any, Floats]:
    """The numbers of a column by the names of their inputs: its cells that are numbers, and the parts of its dates."""
    parts = [] if column.times is None else zip(date_names(name), date_parts(column.times).T, strict=True)
    return {name: column.numbers, **dict(parts)}


def date_names(name: Any) -> list[str]:
    """The names of the inputs that hold the parts of a date."""
    return [f"{name}:{part}" for part in DATE_PARTS]


def date_parts(seconds: Floats) -> Floats:
    """Days since 1970, month, weekday and hour (n, 4) of each time, NaN for NaN."""
    out = np.full((len(seconds), 4), math.nan)
    there = np.flatnonzero(np.isfinite(seconds))
    times = seconds[there]
    days = np.floor(times / 86400)
    months = days.astype("datetime64[D]").astype("datetime64[M]").astype(np.int64) % 12 + 1
    out[there] = np.stack([times / 86400, months, (days + 3) % 7, (times - 86400 * days) / 3600], 1)
    return out
