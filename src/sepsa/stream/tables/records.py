"""The records of a text file in batches, each with the position behind it, at which a later run can resume."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sepsa.stream.tables import lexer
from sepsa.stream.tables.cells import BadRow, TableError
from sepsa.stream.tables.source import ByteSource

LONGEST = 8 << 20  # bytes of a record; a longer one is taken for a missing line break or quote
KEPT = 4096  # bytes at the beginning and before the position, whose hashes identify a table


class Records:
    """The records of a text file in batches, and the position after the last one that was read."""

    def __init__(self, source: ByteSource, separator: str = "") -> None:
        self.source, self.separator = source, separator
        self.offset, self.line = 0, 1  # of the next record
        self._first = self._last = b""  # the file's first bytes, and the last ones before the offset
        self._buffer = b""
        self._ended = False
        self._batch: RecordBatch | None = None  # the last one, and the last bytes before it
        self._before = b""

    def position(self, line: int | None = None) -> dict[str, Any]:
        """Where the next record begins, or that of a line in the last batch, and hashes that identify the table."""
        offset, last, batch = self.offset, self._last, self._batch
        if line is not None and batch is not None:
            size = int(np.append(0, batch.ends)[np.searchsorted(batch.lines, line)])
            offset, last = offset - len(batch.data) + size, (self._before + batch.data[:size])[-KEPT:]
        first = self._first[:offset]
        return {
            "offset": offset,
            "line": self.line if line is None else line,
            "head": [len(first), hashlib.sha256(first).hexdigest()],
            "tail": [len(last), hashlib.sha256(last).hexdigest()],
            "broken": bool(last) and last[-1:] not in (b"\r", b"\n"),
        }

    def resume(self, position: Mapping[str, Any]) -> bool:
        """Continue at a position; False, and nothing is read, where the table has other first bytes."""
        length, digest = position["head"]
        while len(self._first) + len(self._buffer) < length and not self._ended:
            self._fill()
        first = (self._first + self._buffer)[:length]
        if len(first) < length or hashlib.sha256(first).hexdigest() != digest:
            return False
        offset, (length, digest) = position["offset"], position["tail"]
        last, at = self._last, self.offset
        if self.source.seekable:
            last, at, self._buffer, self._ended = b"", offset - length, b"", False
            self.source.seek(at)
        while at < offset:
            if not self._buffer:
                self._fill()
            if self._ended and not self._buffer:
                raise self._changed(f"ends before line {position['line']}, where the checkpoint was")
            some, self._buffer = self._buffer[: offset - at], self._buffer[offset - at :]
            last, at = (last + some)[-KEPT:], at + len(some)
        if hashlib.sha256(last[len(last) - length :]).hexdigest() != digest:
            raise self._changed(f"has changed before line {position['line']}, where the checkpoint was")
        self._first, self._last, self.offset, self.line = first, last, offset, position["line"]
        if position["broken"]:
            self._end_line()
        return True

    def _end_line(self) -> None:
        """Pass the line break after the last line, which was missing when that line was read."""
        while len(self._buffer) < 2 and not self._ended:
            if not self._fill() and self._buffer:
                break
        breaks = 2 if self._buffer[:2] == b"\r\n" else 1 if self._buffer[:1] in (b"\r", b"\n") else 0
        if self._buffer and not breaks:
            raise self._changed(f"has another line {self.line - 1} than when the checkpoint was written")
        self._pass(breaks, 0)

    def _changed(self, how: str) -> TableError:
        return TableError(f"{self.source.name} {how}: restore the table, or use another --checkpoint")

    def _fill(self) -> bool:
        """Read a chunk; False while a pipe is idle."""
        data = self.source.read()
        if data == b"":
            self._ended = True
        elif data is not None:
            self._buffer += data
        return data is not None

    def _pass(self, size: int, lines: int) -> bytes:
        """Take `size` bytes, which hold this number of lines, from the buffer."""
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        if len(self._first) < KEPT:
            self._first += data[: KEPT - len(self._first)]
        self._last = (self._last + data[-KEPT:])[-KEPT:]
        self.offset += len(data)
        self.line += lines
        return data

    def batches(self, most: int = 1 << 16) -> Iterator[RecordBatch | BadRow | None]:
        """At most `most` records at once; None while a pipe is idle, a `BadRow` for a record that is too long."""
        while True:
            marks = lexer.lex(self._buffer, self.separator, self._ended, LONGEST, most)
            if len(marks.ends):
                at = self.line + np.append(0, marks.lines.cumsum())
                self._before = self._last
                taken = self._pass(int(marks.ends[-1]), int(at[-1] - self.line))
                self._batch = RecordBatch(taken, marks.ends, marks.fields, at[:-1], marks.flags)
                yield self._batch
            elif len(self._buffer) > LONGEST:
                yield from self._skip()
            elif self._ended:
                return
            elif not self._fill():
                yield None

    def _skip(self) -> Iterator[BadRow | None]:
        """Pass a record that is too long; only its beginning is kept."""
        line, start = self.line, self._buffer[:1000]
        while not (found := re.search(rb"[\r\n]", self._buffer)):
            self._pass(len(self._buffer), 0)
            if self._ended:
                break
            if not self._fill():
                yield None
        if found:
            if self._buffer[found.start() :] == b"\r" and not self._ended:
                self._fill()
            self._pass(found.end() + (self._buffer[found.start() : found.end() + 1] == b"\r\n"), 0)
        self.line += 1
        yield BadRow(line, too_long(), start.decode(errors="replace"))


class RecordBatch(NamedTuple):
    """Complete records: their bytes; the end, the number of cells, the line and the lexer's flags of each."""

    data: bytes
    ends: NDArray[np.int64]
    fields: NDArray[np.int64]
    lines: NDArray[np.int64]
    flags: NDArray[np.int64]

    def record(self, i: Any) -> bytes:
        """Record i without its line break."""
        return self.data[self.ends[i - 1] if i else 0 : self.ends[i]].rstrip(b"\r\n")

    def text(self, i: Any) -> str:
        """The first 1000 bytes of record i, for messages."""
        return self.record(i)[:1000].decode(errors="replace")


def too_long() -> str:
    """The reason to refuse a record."""
    return f"the line is longer than {LONGEST >> 20} MiB"
