"""What the commands that read tables write: predictions, the line of a running command, rows that were left out."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import cache
from operator import add, itemgetter
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from sepsa.shell.cells import TableError
from sepsa.shell.messages import INTERRUPTED, LEFT_OUT, TERMINATED, Misuse, check_stdout, duration, print_text, say
from sepsa.shell.model import BlockResult, Details, TableModel
from sepsa.shell.reading import quote
from sepsa.states.output import is_device

REFRESH = 0.5  # seconds between two running lines in a terminal
PROGRESS = 10.0  # and elsewhere
PRINTED = 6  # significant digits of a number in standard output
AS_TEXT: Any = {"encoding": "utf-8", "newline": "", "errors": "backslashreplace"}
MANY = 1 / 20  # the share of the rows beyond which a command has an exit code of its own
MOST_REASONS = 1000
SHOWN = 3  # rows left out that are shown in the terminal; the quarantine file has all


class Output:
    """A file, device or FIFO to which rows are appended. `recorded`, path and size at a checkpoint, truncates a file.

    The header of a `lazy` file is written with its first row.
    """

    def __init__(self, path: Path, header: str, recorded: Any, lazy: bool = False) -> None:
        self.path, self._header = path, header
        self._file: TextIO | None = None
        self.device = is_device(path)
        size = recorded[1] if recorded and recorded[0] == str(path) else 0
        if size and not self.device:
            self._resume(size)
        elif not lazy:
            self._begin()
        elif path.exists() and not self.device:
            with path.open("rb+") as file:
                if not header.encode().startswith(file.readline()):  # a killed run may leave a part of the header
                    raise Misuse(f"{path} is not a file of quarantined rows: choose another with --quarantine")
                file.truncate(0)  # it is of an earlier run

    def _resume(self, size: int) -> None:
        self._file = open(self.path, "r+", **AS_TEXT)  # noqa: SIM115
        there = self._file.seek(0, os.SEEK_END)
        self._file.seek(0)
        first = self._file.readline()
        if there < size or first != self._header:
            self._file.close()
            raise TableError(
                f"{self.path} has {there} bytes and the columns {first.strip()[:200]!r} where it had {size} and "
                f"{self._header.strip()!r} at the checkpoint: put it back, or name another file"
            )
        self._file.seek(size)
        self._file.truncate()

    def _begin(self) -> TextIO:
        self._file = open(self.path, "w", **AS_TEXT)  # noqa: SIM115
        self._file.write(self._header)
        return self._file

    def write(self, text: str) -> None:
        (self._file or self._begin()).write(text)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def sync(self) -> int:
        """Flush the file to the disk; returns its size, 0 for a device, which cannot be resumed."""
        self.flush()
        if self._file is None or self.device:
            return 0
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()


class Predictions(Output):
    """Where predictions go: a CSV file with the line of each row, or standard output with a line for each row."""

    def __init__(self, path: Path | None, header: str, digits: int | str | None, recorded: Any = None) -> None:
        self.printed, self.spell = path is None, speller(digits, path is None)
        super().__init__(path or Path(os.devnull), header, recorded)
        if self.printed:
            check_stdout("name a file by --predictions")

    def add(self, result: BlockResult) -> None:
        """Write the predictions of a block; a bad row is left out of a file, and an empty line of standard output."""
        rows = [*zip(result.lines.tolist(), cells(result, self.spell), strict=True)]
        if self.printed:
            rows += [(bad.line, "") for bad in result.bad]
            print_text("".join(f"{text}\n" for _, text in sorted(rows, key=itemgetter(0))))
        else:
            self.write("".join(["%d,%s\n" % row for row in rows]))  # noqa: UP031  # a third faster than format


def header_of(asked: Details | None) -> str:
    """The first line of a file of predictions with these details."""
    more = "" if asked is None else ",probabilities" if asked.probabilities else ",low,high"
    return f"line,prediction{more}\n"


def speller(digits: int | str | None, printed: bool) -> Callable[[float], str]:
    """How numbers are written: with this many significant digits or "all", but no fewer than before the decimal point.

    None: `PRINTED` digits where they are printed, all in a file.
    """
    if digits == "all" or (digits is None and not printed):
        return repr
    form = f"%.{digits or PRINTED}g"

    def spell(value: float) -> str:
        text = form % value
        return f"{value:.0f}" if "e+" in text and abs(value) < 1e15 else text

    return spell


def cells(result: BlockResult, spell: Callable[[float], str]) -> list[str]:
    """Predictions, and their details, as CSV cells."""
    values = result.predictions
    if values and isinstance(values[0], float):
        lines = list(map(spell, values))
        ends = [f",{spell(low)},{spell(high)}" if low == low else ",," for low, high in result.details]
    else:
        lines = list(map(cache(quote), values))
        rounded = ({name: float(spell(share)) for name, share in shares.items()} for shares in result.details)
        ends = ["," + quote(json.dumps(shares)) for shares in rounded]
    return list(map(add, lines, ends)) if ends else lines


class RunningLine:
    """Rows, share, time left, rows a second and recent error: the last line of a terminal, elsewhere a line."""

    def __init__(self, model: TableModel, share: Callable[[], float | None]) -> None:
        self.model, self.rows = model, model.trace.rows
        self.share, self.first = share, share() or 0.0  # of the table that was read, now and at the start
        self.terminal = sys.stderr.isatty()
        self.started = self.last = time.monotonic()
        self._rows = (0, 0)  # learned and quarantined, when the last line was shown

    def show(self) -> None:
        now, rows = time.monotonic(), (self.model.trace.rows, self.model.quarantined)
        if now - self.last < (REFRESH if self.terminal else PROGRESS) or (rows == self._rows and not self.terminal):
            return
        self.last, self._rows = now, rows
        rate = (rows[0] - self.rows) / (now - self.started)
        share, left = self.share(), ""
        if share is not None and share > self.first:
            seconds = (now - self.started) * (1 - share) / (share - self.first)
            left = f", {share:.0%}, {duration(seconds)} left"
        text = f"{rows[0]:,} rows{left}, {rate:,.0f} a second, {error_of(self.model, recent=True)}"
        text += f", {rows[1]:,} quarantined" if rows[1] else ""
        say(text, *(("\r\x1b[K", "") if self.terminal else ()))

    def end(self) -> None:
        if self.terminal:
            say("", "\r\x1b[K", "")

    def say(self, text: str) -> None:
        self.end()
        say(text)


def error_of(model: TableModel, recent: bool = False) -> str:
    """The accuracy or the mean absolute error, of all rows or of the recent ones."""
    value = model.trace.recent if recent else model.trace.mean
    if model.classify:
        return f"{'recent ' if recent else ''}accuracy {1 - value:.4f}"
    return f"{'recent' if recent else 'mean'} absolute error {value:.6g}"


class Signals:
    """A handler of SIGINT and SIGTERM that stops at once before the first block, and later between two blocks."""

    def __init__(self, held: contextlib.ExitStack) -> None:
        self.code = 0
        self.at_work = False
        with contextlib.suppress(ValueError):  # only the main thread may
            for number in (signal.SIGINT, signal.SIGTERM):
                held.callback(signal.signal, number, signal.signal(number, self._note))

    def _note(self, number: int, frame: FrameType | None) -> None:
        again = self.code
        self.code = INTERRUPTED if number == signal.SIGINT else TERMINATED
        if again or not self.at_work:  # a second signal stops at once
            raise SystemExit(self.code)


class LeftOut:
    """The number of rows that were used and left out, and the most frequent reason."""

    def __init__(self) -> None:
        self.used = self.lost = 0
        self._kinds: dict[str, list[Any]] = {}  # the number of rows by their cure, and the first of them

    def add(self, result: BlockResult, what: str, tell: Callable[[str], None] = say) -> None:
        """Count the rows of a block; the first ones that are left out are told by `what` became of them."""
        self.used += len(result.lines)
        for row in result.bad:
            if self.lost < SHOWN:
                tell(f"line {row.line} is {what}: {row.reason}")
            self.lost += 1
            kind = row.cure or row.reason.rpartition(": ")[2]
            if kind in self._kinds or len(self._kinds) < MOST_REASONS:
                self._kinds.setdefault(kind, [0, row])[0] += 1

    def exit_code(self, code: int) -> int:
        """The exit code of a command at its end, after its last line where it has left many rows out."""
        total = self.used + self.lost
        if self.lost <= MANY * total:
            return code
        count, row = max(self._kinds.values(), key=itemgetter(0))
        said = f"{row.reason}: {row.cure}" if row.cure else row.reason
        say(f"WARNING: {self.lost} of {total} rows were left out, {count} of them because {said}")
        return code or LEFT_OUT
