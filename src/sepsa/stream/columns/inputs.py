"""Columns of a table as inputs of a learner: numbers as they are, dates in parts, texts as indicators or hashed.

An input enters at the row that first needs it. The first `categories` texts of a column get an indicator each; further
ones share `BUCKETS` indicators by their hash, so that a column of identifiers costs no more than that.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from sepsa.states import schema
from sepsa.stream.columns.cells import DECIMAL_COMMA, Column, date_formats
from sepsa.stream.engine.protocol import Floats
from sepsa.stream.growth import NewInput

BUCKETS = 16
MOST_INPUTS = 2000  # a learner's state grows as their square
MOST_TEXT_INPUTS = 500
NOTHING = ""  # the only input, always 0, of a table whose first row has no value
DATE_PARTS = ("days", "month", "weekday", "hour")
BUCKET = re.compile(r"#\d+$", re.ASCII)


class Candidate(NamedTuple):
    """A new input that enters unless there are too many; `text` is the text of `column` that it indicates."""

    row: int
    rank: int  # of its column, which orders inputs of one row
    name: str
    mean: float
    scale: float
    column: str | None = None
    text: str | None = None


class Inputs:
    """The learner's inputs by name, and the columns and texts that they encode."""

    drop, decimal, dates = "--drop it", "give --decimal ,", "give --date-format {}"  # in warnings
    tells_dates = True

    def __init__(self, categories: int) -> None:
        self.categories = categories
        self.names: dict[str, int] = {}
        self.indicators: set[str] = set()  # inputs that are 0 or 1
        self.texts: dict[str, dict[str, str]] = {}  # for each column: text to the name of its input
        self.text_rows: dict[str, int] = {}  # for each column: the number of rows that had a text
        self.warned: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        return {
            "names": list(self.names),
            "indicators": sorted(self.indicators),
            "texts": {column: dict(texts) for column, texts in self.texts.items()},
            "text_rows": dict(sorted(self.text_rows.items())),
            "warned": sorted(self.warned),
        }

    @classmethod
    def from_state(cls, categories: int, state: Any, entry: str = "state['inputs']") -> Inputs:
        """Inputs that continue from the result of `state_dict`; ValueError where that is damaged."""
        new = schema.read(entry, state, {"names", "indicators", "texts", "text_rows", "warned"})
        out = cls(categories)
        for part in ("names", "indicators", "warned"):
            names = new.items(part).values
            if not all(type(name) is str for name in names) or len(set(names)) != len(names):
                raise ValueError(f"{entry}[{part!r}] must hold distinct names")
        out.names, out.warned = {name: i for i, name in enumerate(new["names"])}, set(new["warned"])
        out.indicators = set(new["indicators"])
        if not isinstance(new["texts"], dict) or not isinstance(new["text_rows"], dict):
            raise ValueError(f"{entry}['texts'] and ['text_rows'] must be dicts")
        for column, texts in new["texts"].items():
            if not isinstance(texts, dict) or not all(type(t) is str for pair in texts.items() for t in pair):
                raise ValueError(f"{entry}['texts'][{column!r}] must be a dict of strings")
            if any(name != f"{column}={text}" for text, name in texts.items()) or len(texts) > categories:
                raise ValueError(f"{entry}['texts'][{column!r}] must name the inputs of at most {categories} texts")
        named = {name for texts in new["texts"].values() for name in texts.values()}
        others = {name for name in out.indicators - named if name != NOTHING and not BUCKET.search(name)}
        if others or not named <= out.indicators <= set(out.names):
            raise ValueError(f"{entry} must have an input for each text, and a text for each indicator")
        out.texts = {column: dict(texts) for column, texts in new["texts"].items()}
        text_rows = schema.Entries(new.path("text_rows"), new["text_rows"])
        out.text_rows = {column: text_rows.integer(column) for column in text_rows.values}
        return out

    def add(self, columns: Mapping[str, Column]) -> tuple[list[NewInput], list[str]]:
        """Add inputs for values that these rows hold for the first time; returns them, in order, and warnings."""
        candidates: list[Candidate] = []
        warnings: list[tuple[int, str]] = []
        for rank, (name, column) in enumerate(columns.items()):
            if name not in self.names:
                rows = np.flatnonzero(~np.isnan(column.numbers))
                if len(rows):
                    candidates.append(Candidate(int(rows[0]), rank, name, float(column.numbers[rows[0]]), 0.0))
            if column.times is not None and f"{name}:{DATE_PARTS[0]}" not in self.names:
                rows = np.flatnonzero(~np.isnan(column.times))
                if len(rows):
                    first = date_parts(column.times[rows[:1]])[0]
                    candidates += [
                        Candidate(int(rows[0]), rank, f"{name}:{part}", float(value), 0.0)
                        for part, value in zip(DATE_PARTS, first, strict=True)
                    ]
                    if self.tells_dates:
                        said = f"column {name!r} holds dates: they become {', '.join(DATE_PARTS)}"
                        warnings.append((int(rows[0]), said))
            if column.codes is not None:
                self._add_texts(name, rank, column, candidates, warnings)
        if not self.names and not any(candidate.row == 0 for candidate in candidates):
            candidates.append(Candidate(0, -1, NOTHING, 0.0, 1.0))
        new = []
        texts = sum(len(known) for known in self.texts.values())
        for row, _, name, mean, scale, column_name, text in sorted(candidates, key=lambda c: c[:2]):
            if name in self.names:
                continue
            if len(self.names) >= MOST_INPUTS or (scale == 1.0 and texts >= MOST_TEXT_INPUTS):
                if "too many" not in self.warned:
                    self.warned.add("too many")
                    warnings.append((row, f"there are too many inputs: {name!r} and all that are new are left out"))
                continue
            self.names[name] = len(self.names)
            if scale == 1.0:
                self.indicators.add(name)
            if column_name is not None and text is not None:
                self.texts.setdefault(column_name, {})[text] = name
                texts += 1
            new.append(NewInput(row, name, mean, scale))
        return new, [text for _, text in sorted(warnings)]

    def _add_texts(
        self, name: str, rank: int, column: Column, candidates: list[Candidate], warnings: list[tuple[int, str]]
    ) -> None:
        """Add to `candidates` and `warnings` what the new texts of a column call for."""
        assert column.codes is not None
        known = self.texts.get(name, {})
        present, first = np.unique(column.codes, return_index=True)
        order = np.argsort(first)
        rows_before = self.text_rows.get(name, 0)
        self.text_rows[name] = rows_before + int((column.codes >= 0).sum())
        room = self.categories - len(known)
        for code, row in zip(present[order].tolist(), first[order].tolist(), strict=True):
            if code < 0 or (text := column.texts[code]) in known:
                continue
            if f"date {name}" not in self.warned and (formats := date_formats(text)):
                self.warned |= {f"date {name}", f"texts {name}"}
                said = f"column {name!r} looks like dates, as {text!r}, and is read as texts"
                warnings.append((row, f"{said}: {self.dates.format(' or '.join(map(repr, formats)))}, or {self.drop}"))
            if DECIMAL_COMMA.fullmatch(text) and f"decimal {name}" not in self.warned:
                self.warned.add(f"decimal {name}")
                said = f"column {name!r} looks like a number with a decimal comma, {text!r}, and is read as a text"
                warnings.append((row, f"{said}: {self.decimal}"))
            if room > 0:
                room -= 1
                candidates.append(Candidate(row, rank, f"{name}={text}", 0.0, 1.0, name, text))
                continue
            candidates.append(Candidate(row, rank, bucket(name, text), 0.0, 1.0))
            if f"texts {name}" not in self.warned:
                self.warned.add(f"texts {name}")
                seen = rows_before + int((column.codes[: row + 1] >= 0).sum())
                if seen <= 2 * (self.categories + 1):
                    many = f"{self.categories + 1} different texts in {seen} rows"
                    said = f"looks like an identifier, {many}: {self.drop}?"
                else:
                    said = f"has more than {self.categories} different texts"
                warnings.append((row, f"column {name!r} {said} Further ones share {BUCKETS} inputs by their hash"))

    def encode(self, columns: Mapping[str, Column], rows: int) -> Floats:
        """The inputs (rows, inputs) of these columns, NaN where a number is missing."""
        X = np.full((rows, len(self.names)), math.nan)
        X[:, [self.names[name] for name in self.indicators]] = 0.0
        for name, column in columns.items():
            if name in self.names:
                X[:, self.names[name]] = column.numbers
            if column.times is not None and f"{name}:{DATE_PARTS[0]}" in self.names:
                parts = date_parts(column.times)
                for part, values in zip(DATE_PARTS, parts.T, strict=True):
                    if f"{name}:{part}" in self.names:
                        X[:, self.names[f"{name}:{part}"]] = values
            if column.codes is not None:
                known = self.texts.get(name, {})
                places = [self.names.get(known.get(text) or bucket(name, text), -1) for text in column.texts]
                at = np.array([*places, -1])[column.codes]
                there = np.flatnonzero(at >= 0)
                X[there, at[there]] = 1.0
        return X


def bucket(column: str, text: str) -> str:
    """The name of the input that a text shares with others of the same hash."""
    return f"{column}#{zlib.crc32(text.encode(errors='surrogatepass')) % BUCKETS}"


def date_parts(seconds: Floats) -> Floats:
    """Days since 1970, month, weekday and hour (n, 4) of each time, NaN for NaN."""
    out = np.full((len(seconds), 4), math.nan)
    there = np.flatnonzero(np.isfinite(seconds))
    times = seconds[there]
    days = np.floor(times / 86400)
    months = days.astype("datetime64[D]").astype("datetime64[M]").astype(np.int64) % 12 + 1
    out[there] = np.stack([times / 86400, months, (days + 3) % 7, (times - 86400 * days) / 3600], 1)
    return out
