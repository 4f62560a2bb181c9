"""Rows that a command leaves out: counted by their reason, and named in its last line where they are many."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from sepsa.stream.tables.cells import BadRow
from sepsa.stream.tables.formats import encoding_cure

MANY = 1 / 20  # the share of the rows beyond which a command has an exit code of its own
MOST_REASONS = 1000
CURES = {  # by words of the reason; some reasons name their cure
    "is not in UTF-8": encoding_cure("UTF-8"),
    "is not in": encoding_cure(""),
    "cells where the header has": "give --sep if another character separates cells, or quote cells that contain it",
    "is not closed": "close the quote, or double it if it is a character of the cell",
    "NUL byte": "give --encoding utf-16 if the table is in UTF-16",
    "must be a business day": "give --step day",
    "is not finite": "give --na-values if such a number is a missing value",
    "there is no": "name a column that has values, or remove these rows",
    "at this time": "give --same-time, as mean",
    "leaps ahead": "correct these times, or give --step",
    "time": "sort the table by time, oldest first",
}


class LeftOut:
    """The number of rows that were used and left out, and the most frequent reason."""

    def __init__(self) -> None:
        self.used = self.lost = 0
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def add(self, used: int, bad: Iterable[BadRow]) -> None:
        """Count further rows."""
        self.used += used
        for row in bad:
            self.lost += 1
            kind = re.sub(r"'.*'|\d[\d:. -]*", "", row.reason)
            if kind in self._counts or len(self._counts) < MOST_REASONS:
                self._counts[kind] += 1
                self._examples.setdefault(kind, row.reason)

    def last_line(self) -> str:
        """What the command says at its end; empty where few rows are left out."""
        total = self.used + self.lost
        if self.lost <= MANY * total:
            return ""
        [(kind, count)] = self._counts.most_common(1)
        reason = self._examples[kind]
        cure = next((cure for words, cure in CURES.items() if words in reason), "see their reasons by --quarantine")
        said = reason if ": " in reason else f"{reason}: {cure}"
        return f"WARNING: {self.lost} of {total} rows were left out, {count} of them because {said}"
