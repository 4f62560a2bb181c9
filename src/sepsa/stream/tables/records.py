"""The records of a text file in batches, each with the position behind it, at which a later run can resume.

Records end with LF, CRLF or CR. In CSV a quote opens a quoted part only at the start of a field, and a doubled quote is
a literal one, as in Arrow's reader, which parses the cells. Lines without a quote, which most are, are only counted.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from sepsa.stream.tables.cells import BadRow, TableError
from sepsa.stream.tables.source import ByteSource

LONGEST = 8 << 20  # bytes of a record; a longer one is taken for a missing line break or quote
KEPT = 4096  # bytes at the beginning and before the position, whose hashes identify a table


class Records:
    """The records of a text file in batches, and the position after the last one that was read."""

    def __init__(self, source: ByteSource, separator: bytes | None = None) -> None:
        self.source, self.lexer = source, None if separator is None else CsvLexer(separator)
        self.offset, self.line = 0, 1  # of the next record
        self._first = self._last = b""  # the file's first bytes, and the last ones before the offset
        self._buffer = b""
        self._ended = False

    def position(self) -> dict[str, Any]:
        """Where the next record begins, and hashes that identify the table."""
        return {
            "offset": self.offset,
            "line": self.line,
            "head": [len(self._first), hashlib.sha256(self._first).hexdigest()],
            "tail": [len(self._last), hashlib.sha256(self._last).hexdigest()],
            "broken": bool(self._last) and self._last[-1:] not in (b"\r", b"\n"),
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

    def batches(self, most: int = 1 << 16) -> Iterator[list[Record] | None]:
        """At most `most` records at once, without blank ones; None while a pipe is idle."""
        while True:
            found, size, lines = self._complete(most)
            if size:
                self._pass(size, lines)
                if found:
                    yield found
            elif len(self._buffer) > LONGEST:
                yield from self._skip()
            elif self._ended:
                return
            elif not self._fill():
                yield None

    def _complete(self, most: int) -> tuple[list[Record], int, int]:
        """The complete records at the start of the buffer, and how many bytes and lines they take."""
        lines = self._buffer.splitlines(keepends=True)
        if lines and not self._ended and not lines[-1].endswith(b"\n"):
            lines.pop()  # the rest of the line may follow, or the LF of a CRLF
        found: list[Record] = []
        at = size = 0
        while at < len(lines) and len(found) < most:
            count, cells, reason = 1, 0, ""
            if self.lexer is not None:
                count, cells, reason = self.lexer.record(lines, at, self._ended)
            if not count:
                break
            data = lines[at] if count == 1 else b"".join(lines[at : at + count])
            text = data.rstrip(b"\r\n")
            if text:
                found.append(Record(self.line + at, text, cells, too_long() if len(text) >= LONGEST else reason))
            at, size = at + count, size + len(data)
        return found, size, at

    def _skip(self) -> Iterator[list[Record] | None]:
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
        yield [Record(line, start, 0, too_long())]


class Record(NamedTuple):
    """A record without its line break: its first line, its bytes, the number of its cells, and why it is refused."""

    line: int
    data: bytes
    cells: int
    reason: str

    def bad(self, reason: str) -> BadRow:
        """The record as a row that cannot be used."""
        return BadRow(self.line, self.reason or reason, self.text())

    def text(self) -> str:
        """The first 1000 bytes, for messages."""
        return self.data[:1000].decode(errors="replace")


class CsvLexer:
    """Finds where records of CSV end, and counts their cells."""

    def __init__(self, separator: bytes) -> None:
        mark = re.escape(separator)
        self.separator = separator
        self.quoted = re.compile(rb'(?:^|(?<=%s))"[^"]*(?:""[^"]*)*"(?!")' % mark)
        self.opened = re.compile(rb'(?:^|(?<=%s))"' % mark)

    def record(self, lines: list[bytes], at: int, at_end: bool) -> tuple[int, int, str]:
        """Number of lines and cells of the record that begins at a line, and why it is refused; 0 lines: incomplete.

        If a quote is not closed before the end or before `LONGEST` bytes, the first line is refused.
        """
        line = lines[at]
        if b"\0" in line:
            return 1, 0, "the line holds a NUL byte"
        if b'"' not in line:
            return 1, line.count(self.separator) + 1, ""
        separators, open_quote = self.scan(line, False)
        count, size = 1, len(line)
        while open_quote and at + count < len(lines) and size <= LONGEST:
            line = lines[at + count]
            if b'"' in line:
                more, open_quote = self.scan(line, True)
                separators += more
            count, size = count + 1, size + len(line)
        if not open_quote:
            return count, separators + 1, ""
        if at_end or size > LONGEST:
            return 1, 0, "the line has a quote that is not closed"
        return 0, 0, ""

    def scan(self, line: bytes, open_quote: bool) -> tuple[int, bool]:
        """The separators outside quoted parts, and whether a quoted part is open after the line."""
        bare = self.quoted.sub(b"", b'"' + line if open_quote else line)
        found = self.opened.search(bare)
        return bare.count(self.separator, 0, found.start() if found else len(bare)), found is not None


def too_long() -> str:
    """The reason to refuse a record."""
    return f"the line is longer than {LONGEST >> 20} MiB"
