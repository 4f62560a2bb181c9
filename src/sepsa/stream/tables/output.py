"""What the table commands write: files of predictions and quarantined rows, standard output, messages."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from sepsa.stream.tables.cells import TableError
from sepsa.stream.tables.model import BlockResult, TableModel

REFRESH = 0.5  # seconds between two running lines
AS_TEXT: Any = {"encoding": "utf-8", "newline": "", "errors": "backslashreplace"}


class Misuse(ValueError):
    """A command line with options that do not fit together, or do not fit the table."""


class Output:
    """A file to which rows are appended. `recorded`, its path and size at a checkpoint, truncates it to that size.

    A `lazy` file is created with its first row.
    """

    def __init__(self, path: Path, header: str, recorded: Any, lazy: bool = False) -> None:
        self.path, self._header = path, header
        self._file: TextIO | None = None
        size = recorded[1] if recorded and recorded[0] == str(path) else None
        if size is not None and size > 0:
            self._file = open(path, "r+", **AS_TEXT)  # noqa: SIM115
            self._file.seek(0, os.SEEK_END)
            there = self._file.tell()
            if there < size:
                self._file.close()
                raise TableError(
                    f"{path} has {there} bytes where it had {size} at the checkpoint: put it back, or name another file"
                )
            self._file.seek(size)
            self._file.truncate()
        elif not lazy:
            self._make()
        elif path.exists():
            with path.open("rb") as file:
                if not header.encode().startswith(file.readline()):  # a killed run may leave a part of the header
                    raise Misuse(f"{path} is no file of quarantined rows: name another by --quarantine")
            path.unlink()  # it is of an earlier run

    def _make(self) -> TextIO:
        self._file = open(self.path, "w", **AS_TEXT)  # noqa: SIM115
        self._file.write(self._header)
        return self._file

    def write(self, text: str) -> None:
        (self._file or self._make()).write(text)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def sync(self) -> int:
        """Flush the file to the disk; returns its size."""
        if self._file is None:
            return 0
        self._file.flush()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()


class RunningLine:
    """Rows, rows a second and the recent error, in the last line of a terminal, if standard error is one."""

    def __init__(self, model: TableModel, rows: int) -> None:
        self.model, self.rows = model, rows
        self.terminal = sys.stderr.isatty()
        self.started = self.last = time.monotonic()
        self._shown = False

    def show(self) -> None:
        now = time.monotonic()
        if not self.terminal or now - self.last < REFRESH:
            return
        self.last, self._shown = now, True
        rate = (self.model.trace.rows - self.rows) / (now - self.started)
        text = f"{self.model.trace.rows:,} rows, {rate:,.0f} a second, {error_of(self.model, recent=True)}"
        if self.model.quarantined:
            text += f", {self.model.quarantined:,} quarantined"
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()

    def end(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            self._shown = False

    def say(self, text: str) -> None:
        self.end()
        say(text)


def as_csv(result: BlockResult) -> str:
    """Lines of CSV: the line in the table, and the prediction."""
    pairs = zip(result.lines.tolist(), cells(result), strict=True)
    return "".join(["%d,%s\n" % pair for pair in pairs])  # noqa: UP031  # a third faster than format


def cells(result: BlockResult) -> list[str]:
    """Predictions as CSV cells."""
    values = result.predictions
    if values and isinstance(values[0], float):
        return list(map(repr, values))
    quoted = {v: '"' + v.replace('"', '""') + '"' if any(mark in v for mark in ',"\r\n') else v for v in set(values)}
    return [quoted[value] for value in values]


def write_stdout(result: BlockResult) -> None:
    """Print a line for each row, an empty one for a bad row, so that lines correspond to those of the table."""
    lines = cells(result)
    if result.bad:
        pairs = [*zip(result.lines.tolist(), lines, strict=True), *((bad.line, "") for bad in result.bad)]
        lines = [text for _, text in sorted(pairs, key=lambda pair: pair[0])]
    if lines:
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()


def silence_stdout() -> None:
    """Redirect standard output, whose reader has closed the pipe, so that Python reports no error at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def error_of(model: TableModel, recent: bool = False) -> str:
    """The accuracy or the mean absolute error, of all rows or of the recent ones."""
    value = model.trace.recent if recent else model.trace.mean
    if model.classify:
        return f"{'recent ' if recent else ''}accuracy {1 - value:.4f}"
    return f"{'recent' if recent else 'mean'} absolute error {value:.6g}"


def say(text: str) -> None:
    """Print a message to standard error."""
    print(text, file=sys.stderr, flush=True)


def describe(error: BaseException) -> str:
    """An error in one line; the cure is added to messages of the operating system."""
    if isinstance(error, MemoryError):
        return "there is not enough memory: leave out wide text columns by --drop, or lower --categories"
    text = " ".join(str(error).split())
    cures = {
        2: "check the path", 13: "check its permissions", 21: "give a file", 28: "make room",
        30: "give a folder that can be written",
    }  # fmt: skip
    if isinstance(error, OSError) and error.strerror:
        name = f"{error.filename}: " if error.filename else ""
        cure = cures.get(error.errno or 0)
        return f"{name}{error.strerror.lower()}{f': {cure}' if cure else ''}"
    return text or type(error).__name__
