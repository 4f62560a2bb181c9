"""How the table commands end: exit codes, signals, errors as messages of one line, and the rows that were left out."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from sepsa.stream.tables.cells import BadRow
from sepsa.stream.tables.formats import encoding_cure
from sepsa.stream.tables.output import Misuse, describe, say, silence

FINISHED, FAILED, MISUSED, PIPE_CLOSED, INTERRUPTED, TERMINATED = 0, 1, 2, 141, 130, 143
LEFT_OUT, NEWEST_FIRST = 3, 4
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


def exit_code(run: Callable[[], int]) -> int:
    """The exit code of a command; an error becomes a message of one line."""
    try:
        return run()
    except SystemExit as stopped:  # by a signal
        return int(stopped.code or 0)
    except Misuse as error:
        say(str(error))
        return error.code
    except BrokenPipeError:
        silence(sys.stdout)
        say("stopped: the reader of the predictions has closed the pipe")
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except (OSError, ValueError, MemoryError) as error:
        say(describe(error))
        return FAILED


class Signals:
    """A handler of SIGINT and SIGTERM that stops at once before the first block, and later between two blocks."""

    def __init__(self) -> None:
        self.code = 0
        self.at_work = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):  # only the main thread may
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        again = self.code
        self.code = INTERRUPTED if number == signal.SIGINT else TERMINATED
        if again or not self.at_work:  # a second signal stops at once
            raise SystemExit(self.code)

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


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

    def exit_code(self, code: int) -> int:
        """The exit code of a command at its end, after its last line where it has left many rows out."""
        total = self.used + self.lost
        if self.lost <= MANY * total:
            return code
        [(kind, count)] = self._counts.most_common(1)
        reason = self._examples[kind]
        cure = next((cure for words, cure in CURES.items() if words in reason), "see their reasons by --quarantine")
        said = reason if ": " in reason else f"{reason}: {cure}"
        say(f"WARNING: {self.lost} of {total} rows were left out, {count} of them because {said}")
        return code or LEFT_OUT
