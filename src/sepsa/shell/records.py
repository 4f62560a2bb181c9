"""The records of a text file in batches, each with the position behind it, at which a later run can resume.

Records are divided here because Arrow's reader tells neither the byte at which one ends, where a run resumes, nor the
line of one that it cannot read. Where there are quotes, the reader of the standard library finds where records end. A
quote opens a quoted part only at the start of a cell, and a doubled quote is a literal one, as in Arrow's reader.
Records end with LF, CRLF or CR.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sepsa.shell.cells import OTHERWISE, BadRow, Position, RowBlock, TableError, TableReader
from sepsa.shell.reading import UTF_8, Reading
from sepsa.shell.source import ByteSource

LONGEST = 8 << 20  # bytes of a record, beyond which a line break or a quote must be missing
NOT_CLOSED = -1  # in place of the number of cells, for a record with an open quote
BEHIND = "behind the last line"
MANY_UNREAD = 20  # of the first records that are not in the encoding, from which on another one is meant
csv.field_size_limit((1 << 31) - 1)  # `LONGEST` is the limit
KEPT = 4096  # bytes at the beginning and before the position, whose hashes identify a table


class TextReader(TableReader):
    """A table of records that end with a line break; a subclass parses each batch of them."""

    batch = 1 << 16  # records at most

    def __init__(self, source: ByteSource, reading: Reading, separator: str = "") -> None:
        super().__init__(reading)
        self.source, self.separator, self.is_utf8 = source, separator, source.is_utf8
        self.size, self.line = source.size, 1  # the line of the next record
        self._first = self._last = b""  # the file's first bytes, and the last batch with some bytes before it
        self._buffer = b""
        self._ended = False
        self._batch: RecordBatch | None = None  # the last one

    @property
    def not_encoded(self) -> tuple[str, str]:
        """Why a record cannot be read that is not in the encoding, and the cure."""
        encoding = self.source.encoding
        other = "cp1250, or convert it, as iconv -f cp1250 -t utf-8 does" if encoding == UTF_8 else UTF_8
        return f"the line is not in {encoding}", f"give its encoding, such as --encoding {other}"

    def _blocks(self) -> Iterator[RowBlock | None]:
        for number, batch in enumerate(self.batches(self.batch)):
            block = batch and self._block(batch)
            if number == 0 and block is not None:
                self._check_encoding(block)
            yield block

    def _check_encoding(self, block: RowBlock) -> None:
        """Raise an error where many of the first records are not in the encoding."""
        reason, cure = self.not_encoded
        lines = [bad.line for bad in block.bad if bad.reason == reason]
        if len(lines) >= max(MANY_UNREAD, (len(block) + len(block.bad)) / 20):
            said = f"is not in {self.source.encoding}, as line {lines[0]} and {len(lines) - 1} others show"
            raise TableError(f"{self.source.name} {said}: {cure}")

    def _block(self, batch: RecordBatch) -> RowBlock:
        raise NotImplementedError

    def position(self, line: int | None = None) -> Position:
        """Where the next record begins, or that of a line in the last batch, and hashes that identify the table."""
        behind = 0  # bytes of the last batch from this line on
        if line is not None and self._batch is not None:
            ends = np.append(0, self._batch.ends)
            behind = int(ends[-1] - ends[np.searchsorted(self._batch.lines, line)])
        offset, last = self.done - behind, self._last[: len(self._last) - behind][-KEPT:]
        first = self._first[:offset]
        line = self.line if line is None else line
        return {"offset": offset, "line": line, "head": mark(first), "tail": mark(last)}

    def resume(self, position: Position) -> bool:
        """Continue at a position; False, and nothing is read, where it is none of this table, by its first bytes."""
        if "offset" not in position:
            return False
        length = position["head"][0]
        while len(self._first) + len(self._buffer) < length and not self._ended:
            self._fill()
        if mark((self._first + self._buffer)[:length]) != position["head"]:
            return False
        while (rest := position["offset"] - self.done) > 0:  # to read takes a hundredth of learning
            if not self._buffer and self._ended:
                raise self._changed(f"ends before line {position['line']}, where the checkpoint was")
            if not self._buffer:
                self._fill()
            self._pass(rest, 0)
        if mark(self._last[len(self._last) - position["tail"][0] :]) != position["tail"]:
            raise self._changed(f"has changed before line {position['line']}, where the checkpoint was")
        self.line = position["line"]
        if self._last[-1:] not in (b"", b"\r", b"\n"):
            self._end_line()
        return True

    def _end_line(self) -> None:
        """Count the line break after the last line, which was missing when that line was read, as a blank line."""
        while not self._buffer and not self._ended:
            self._fill()
        if self._buffer:
            self.line -= 1
            if self._buffer[:1] not in (b"\r", b"\n"):
                raise self._changed(f"has another line {self.line} than when the checkpoint was written")

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
        """Take `size` bytes, or all there are, from the buffer; they hold this number of lines."""
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        if len(self._first) < KEPT:
            self._first += data[: KEPT - len(self._first)]
        self._last = self._last[-KEPT:] + data
        self.done += len(data)
        self.line += lines
        return data

    def batches(self, most: int) -> Iterator[RecordBatch | None]:
        """At most `most` records at once; None while a pipe is idle."""
        while True:
            found = lex(self._buffer, self.separator, self._ended, most)
            if len(found.ends):
                lines = int(found.lines.sum())
                at = self.line + found.lines.cumsum() - found.lines
                self._batch = found._replace(data=self._pass(int(found.ends[-1]), lines), lines=at)
                yield self._batch
            elif len(self._buffer) > 2 * LONGEST:  # complete lines behind an open quote are fewer
                said = f"{self.source.name} has a line of more than {LONGEST >> 20} MiB behind line {self.line - 1}"
                raise TableError(f"{said}: divide or remove it")
            elif self._ended:
                return
            elif not self._fill():
                yield None


class RecordBatch(NamedTuple):
    """Complete records: their bytes; of each its end, behind its line break, its number of cells, and its line."""

    data: bytes
    ends: NDArray[np.int64]
    cells: NDArray[np.int64]  # 0 of a blank line
    lines: NDArray[np.int64]

    def record(self, i: Any) -> bytes:
        """Record i without its line break."""
        return self.data[self.ends[i - 1] if i else 0 : self.ends[i]].rstrip(b"\r\n")

    def text(self, i: Any) -> str:
        """The first 1000 bytes of record i, for messages."""
        return self.record(i)[:1000].decode(errors="replace")

    def bad(self, i: Any, reason: str, cure: str = OTHERWISE) -> BadRow:
        """Record i, which cannot be read."""
        return BadRow(int(self.lines[i]), reason, self.text(i), cure)


def mark(data: bytes) -> list[Any]:
    """What identifies bytes: how many they are, and their hash."""
    return [len(data), hashlib.sha256(data).hexdigest()]


def lex(data: bytes, separator: str, at_end: bool, most: int) -> RecordBatch:
    """The complete records, `most` at most, each with how many lines it has; without a separator each line is one.

    An incomplete record is left for the next call, unless the data are `at_end`.
    """
    lines = data.splitlines(keepends=True)
    if not at_end and not data.endswith(b"\n"):
        lines = lines[:-1]  # it may go on, or LF may follow CR
    if separator and b'"' in data:
        found = list(islice(quoted_records(lines, separator, at_end), most))
        counts, cells = np.array(found, np.int64).reshape(-1, 2).T
    else:
        lines, mark = lines[:most], separator.encode() or b"\n"
        counts = np.ones(len(lines), np.int64)
        cells = np.array([line.count(mark) + (line[0] not in b"\r\n") for line in lines], np.int64)
    ends = np.array(list(map(len, lines)), np.int64).cumsum()[counts.cumsum() - 1]
    return RecordBatch(data, ends, cells, counts)


def quoted_records(lines: Sequence[bytes], separator: str, at_end: bool) -> Iterator[tuple[int, int]]:
    """The number of lines and of cells of each complete record.

    Where a quote is open and these are all lines, or where a record of several lines is longer than `LONGEST`, its
    first line is a record of `NOT_CLOSED` cells.
    """
    at = 0
    while at < len(lines):
        texts = chain((line.decode("latin-1") for line in lines[at:]), [BEHIND])
        reader, first = csv.reader(texts, delimiter=separator), at
        for row in reader:
            if at == len(lines):
                return
            after = first + reader.line_num
            is_open = after > len(lines)
            if is_open or after > at + 1:
                is_long = sum(map(len, lines[at:after])) > LONGEST
                if is_open and not is_long and not at_end:
                    return
                if is_open or is_long:
                    yield 1, NOT_CLOSED
                    at += 1
                    break
            yield after - at, len(row)
            at = after
