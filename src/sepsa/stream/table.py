"""Tables read in blocks of rows: CSV, JSON lines, Parquet and Arrow, whole files, pipes or files that grow.

What a row means depends on the row alone, never on the block it came in, so that a stream read in other portions, or
resumed at any row, gives the same numbers. A cell is missing, a number, a date or a text. Rows that cannot be read are
handed on with their line and the reason; nothing is dropped in silence but blank lines.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import math
import os
import re
import select
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from sepsa.stream import lexer

Floats = NDArray[np.float64]

CHUNK = 1 << 20  # bytes read at once
ROWS = 8192  # of a block, where rows are counted
LONGEST = 8 << 20  # bytes of a record; what is longer has lost its end
MOST_COLUMNS = 10_000
KEPT = 4096  # bytes at the beginning and before the position, by which a table is known again
WAIT = 0.2  # seconds for which a read waits before it says that nothing has come

# Spellings of a missing value; Arrow's own, and those of common tools.
MISSING = (
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "?", "N/A",
    "NA", "NULL", "NaN", "None", "n/a", "nan", "none", "null",
)  # fmt: skip
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
NOT_FINITE = re.compile(r"[+-]?(inf|infinity|nan(\(.*\))?)", re.IGNORECASE)
DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[+-]\d\d:?\d\d)?)?", re.ASCII)
SEPARATORS = ",;\t|"


class TableError(ValueError):
    """A table that cannot be read at all, or not from where it should go on."""


class Bad(NamedTuple):
    """A row that cannot be used."""

    line: int
    reason: str
    text: str


@dataclass
class Column:
    """Cells of one column: NaN in `numbers`, NaN in `times` and -1 in `codes` is a cell that is none of that kind."""

    numbers: Floats
    codes: NDArray[np.int32] | None = None  # into texts
    texts: list[str] = field(default_factory=list)
    times: Floats | None = None  # seconds since 1970

    def rows(self, chosen: Any) -> Column:
        """The column at some rows."""
        return Column(
            self.numbers[chosen],
            None if self.codes is None else self.codes[chosen],
            self.texts,
            None if self.times is None else self.times[chosen],
        )


@dataclass
class Block:
    """Rows of a table, and the position behind them."""

    columns: dict[str, Column]
    lines: NDArray[np.int64]  # of each row, from 1; for Parquet and Arrow the row's number
    raw: Callable[[int], str]  # a row as it was written
    bad: list[Bad]
    position: dict[str, Any]

    def __len__(self) -> int:
        return len(self.lines)


# ---------------------------------------------------------------------- cells


def read_cell(text: str, decimal: str = ".") -> tuple[str, float]:
    """Kind and value of a cell: "missing", "number", "date" (seconds since 1970) or "text"."""
    if text in MISSING:
        return "missing", math.nan
    stripped = text.strip(" \t")
    plain = stripped if decimal == "." else stripped.replace(".", "\0").replace(decimal, ".")
    if NUMBER.fullmatch(plain):
        return "number", float(plain)
    if NOT_FINITE.fullmatch(stripped):
        value = math.nan if "nan" in stripped.lower() else -math.inf if stripped[0] == "-" else math.inf
        return ("missing" if value != value else "number"), value
    if stripped in MISSING:
        return "missing", math.nan
    if DATE.fullmatch(stripped):
        try:
            return "date", read_time(stripped)
        except (ValueError, OverflowError):
            pass
    return "text", math.nan


def read_time(text: str) -> float:
    if "." in text:  # Python 3.10 takes three digits or six
        whole, digits, zone = re.fullmatch(r"(.*\.)(\d+)(.*)", text).groups()  # type: ignore[union-attr]
        text = whole + digits.ljust(6, "0") + zone
    text = re.sub(r"([+-]\d\d)(\d\d)$", r"\1:\2", text.replace("Z", "+00:00")) if len(text) > 10 else text
    time = datetime.fromisoformat(text)
    return (time if time.tzinfo else time.replace(tzinfo=timezone.utc)).timestamp()


def column_of_texts(codes: NDArray[np.int32], texts: Sequence[str], decimal: str, categorical: bool) -> Column:
    """A column from its distinct texts, with -1 where there is none."""
    values, times = np.full(len(texts) + 1, math.nan), np.full(len(texts) + 1, math.nan)
    place = np.full(len(texts) + 1, -1, np.int32)
    kept: list[str] = []
    for i, text in enumerate(texts):
        kind, value = read_cell(text, decimal)
        if categorical and kind != "missing":
            kind = "text"
        if kind == "number":
            values[i] = value
        elif kind == "date":
            times[i] = value
        elif kind == "text":
            place[i] = len(kept)
            kept.append(text)
    return Column(
        values[codes],
        place[codes] if kept else None,
        kept,
        times[codes] if not np.isnan(times).all() else None,
    )


def column_of_arrow(name: str, array: Any, categorical: bool, decimal: str = ".") -> Column:
    """A column from an Arrow array."""
    kind = array.type
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
        array = array.chunk(0) if isinstance(array, pa.ChunkedArray) else array
    if pa.types.is_dictionary(kind) and not is_text(kind.value_type):
        array = array.dictionary_decode()
        kind = array.type
    if categorical and not (pa.types.is_dictionary(kind) or is_text(kind)):
        array = pc.cast(array, pa.string())
        kind = array.type
    if is_text(kind) or pa.types.is_dictionary(kind):
        encoded = array if pa.types.is_dictionary(kind) else pc.dictionary_encode(array)
        codes = pc.fill_null(encoded.indices.cast(pa.int32()), -1).to_numpy(zero_copy_only=False)
        texts = encoded.dictionary.to_pylist()
        if None in texts:
            texts = ["" if text is None else text for text in texts]
        return column_of_texts(codes, texts, decimal, categorical)
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        micros = pc.cast(array, pa.timestamp("us", getattr(kind, "tz", None)), safe=False)
        seconds = pc.cast(micros, pa.int64())
        return Column(np.full(len(array), math.nan), times=to_floats(seconds) / 1e6)
    if pa.types.is_time(kind) or pa.types.is_duration(kind):
        array = pc.cast(array, pa.int32() if kind.bit_width == 32 else pa.int64())
        kind = array.type
    numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    if not (numeric or pa.types.is_decimal(kind) or pa.types.is_null(kind)):
        raise TableError(f"column {name!r} is of type {kind}, which is no number, date or text: leave it out by --drop")
    return Column(to_floats(array))


def is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view())


def to_floats(array: Any) -> Floats:
    floats = array if pa.types.is_float64(array.type) else pc.cast(array, pa.float64(), safe=False)
    values: Floats = floats.to_numpy(zero_copy_only=False)
    return values


# ---------------------------------------------------------------------- bytes


class Bytes:
    """The bytes of a file or of standard input, decompressed, from any offset on.

    `read` returns None where nothing has come yet, and b"" at the end.
    """

    def __init__(self, path: Path | None, held: ExitStack, follow: bool = False) -> None:
        self.name = "standard input" if path is None else str(path)
        self._file: Any = sys.stdin.buffer if path is None else held.enter_context(path.open("rb"))
        self._number = None  # of a pipe, which is asked whether there is anything
        if path is None or not self._file.seekable():
            try:
                self._number = self._file.fileno()
            except (OSError, AttributeError):  # no file of the operating system
                self._number = None
        self._follow = follow
        first = list(itertools.takewhile(lambda data: data != b"", self._until(8)))
        start = b"".join(data for data in first if data)
        self.magic = start[:8]
        self._portions: Iterator[bytes | None] = itertools.chain([start] if start else [], self._raw())
        self.compressed = True
        if start.startswith(b"\x1f\x8b"):
            self._portions = gunzip(self._portions, self.name)
        elif start.startswith(b"\x28\xb5\x2f\xfd"):
            self._portions = unzstd(self._portions, self.name)
        else:
            self.compressed = False
        if self.compressed and follow:
            raise TableError(f"--follow needs a plain file, and {self.name} is compressed")
        self._back: list[bytes] = []

    def _raw(self) -> Iterator[bytes | None]:
        """Portions as they come; b"" at the end, again and again."""
        while True:
            if self._number is None:
                yield self._file.read(CHUNK)
            elif select.select([self._number], [], [], WAIT)[0]:
                yield os.read(self._number, CHUNK)
            else:
                yield None

    def _until(self, size: int) -> Iterator[bytes | None]:
        got = 0
        for data in self._raw():
            yield data
            got += len(data or b"")
            if got >= size:
                return

    def read(self) -> bytes | None:
        data = self._back.pop() if self._back else next(self._portions, b"")
        if data == b"" and self._follow:
            select.select([], [], [], WAIT)
            return None
        return data

    def peek(self) -> bytes:
        """The first portion, which `read` returns again; b"" at the end."""
        while (data := self.read()) is None:
            pass
        if data:
            self._back.append(data)
        return data

    def portions(self) -> Iterator[bytes | None]:
        """All of them."""
        while (data := self.read()) != b"":
            yield data

    @property
    def jumps(self) -> bool:
        """Whether `seek` can be called."""
        return self._number is None and not self.compressed and bool(self._file.seekable())

    def seek(self, offset: int) -> None:
        """Let `read` go on at an offset."""
        self._file.seek(offset)
        self._portions, self._back = self._raw(), []


def gunzip(portions: Iterator[bytes | None], name: str) -> Iterator[bytes | None]:
    """Decompressed portions of bounded size."""
    inflate = zlib.decompressobj(47)
    for data in portions:
        if data is None:
            yield None
            continue
        if not data:
            if not inflate.eof:
                raise TableError(f"{name} ends in the middle of its compressed data: it is truncated")
            return
        while data:
            if inflate.eof:  # one member after another
                if not data.strip(b"\0"):
                    break  # padding
                inflate = zlib.decompressobj(47)
            try:
                out = inflate.decompress(data, CHUNK)
            except zlib.error as error:
                raise TableError(f"{name} is not to be decompressed: {error}") from None
            data = inflate.unconsumed_tail or inflate.unused_data
            if out:
                yield out
        while not inflate.eof and (out := inflate.decompress(b"", CHUNK)):
            yield out


def unzstd(portions: Iterator[bytes | None], name: str) -> Iterator[bytes | None]:
    stream = pa.CompressedInputStream(pa.PythonFile(Portions(portions), "r"), "zstd")
    while True:
        try:
            data = stream.read(CHUNK)
        except OSError as error:
            raise TableError(f"{name} is not to be decompressed: {error}") from None
        if not data:
            return
        yield data


class Portions(io.RawIOBase):
    """Portions of bytes as a file."""

    def __init__(self, portions: Iterator[bytes | None]) -> None:
        self._portions, self._left = portions, b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        while not self._left:
            data = next(self._portions, b"")
            if data == b"":
                return b""
            self._left = data or b""
        some, self._left = self._left[:size], self._left[size:]
        return some


# ---------------------------------------------------------------------- records


class Records:
    """The records of a text file, in blocks, and the position behind each block."""

    def __init__(self, source: Bytes, separator: int, quote: int) -> None:
        self.source, self.separator, self.quote = source, separator, quote
        self.offset, self.line = 0, 1  # of the next record
        self._first = self._last = b""  # the first bytes of all, and the last before the offset
        self._buffer = b""
        self._ended = False
        self._room = [np.empty(1 << 16, np.int64) for _ in range(4)]

    def position(self) -> dict[str, Any]:
        """Where the next record begins, and by what the table is known again."""
        return {
            "offset": self.offset,
            "line": self.line,
            "head": [len(self._first), hashlib.sha256(self._first).hexdigest()],
            "tail": [len(self._last), hashlib.sha256(self._last).hexdigest()],
            "broken": bool(self._last) and self._last[-1:] not in (b"\r", b"\n"),
        }

    def resume(self, position: Mapping[str, Any]) -> bool:
        """Go on at a position; False, and nothing is passed, where the table does not begin as that one."""
        length, told = position["head"]
        while len(self._first) + len(self._buffer) < length and not self._ended:
            self._fill()
        first = (self._first + self._buffer)[:length]
        if len(first) < length or hashlib.sha256(first).hexdigest() != told:
            return False
        offset, (length, told) = position["offset"], position["tail"]
        last, at = self._last, self.offset
        if self.source.jumps:
            last, at, self._buffer, self._ended = b"", offset - length, b"", False
            self.source.seek(at)
        while at < offset:
            if not self._buffer:
                self._fill()
            if self._ended and not self._buffer:
                raise TableError(
                    f"{self.source.name} ends before line {position['line']}, where the checkpoint was: "
                    "take the table as it was, or another --checkpoint"
                )
            some, self._buffer = self._buffer[: offset - at], self._buffer[offset - at :]
            last, at = (last + some)[-KEPT:], at + len(some)
        if hashlib.sha256(last[len(last) - length :]).hexdigest() != told:
            raise TableError(
                f"{self.source.name} has changed before line {position['line']}, where the checkpoint was: "
                "take the table as it was, or another --checkpoint"
            )
        self._first, self._last, self.offset, self.line = first, last, offset, position["line"]
        if position["broken"]:
            self._end_line()
        return True

    def _end_line(self) -> None:
        """Pass the line break that was not there yet when the last line was read."""
        while len(self._buffer) < 2 and not self._ended:
            if not self._fill() and self._buffer:
                break
        breaks = 2 if self._buffer[:2] == b"\r\n" else 1 if self._buffer[:1] in (b"\r", b"\n") else 0
        if self._buffer and not breaks:
            raise TableError(
                f"{self.source.name} has another line {self.line - 1} than when the checkpoint was written: "
                "take the table as it was, or another --checkpoint"
            )
        self._pass(breaks, 0)

    def _fill(self) -> bool:
        """Read what has come; False where nothing has."""
        data = self.source.read()
        if data == b"":
            self._ended = True
        elif data is not None:
            self._buffer += data
        return data is not None

    def _pass(self, size: int, lines: int) -> bytes:
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        if len(self._first) < KEPT:
            self._first += data[: KEPT - len(self._first)]
        self._last = (self._last + data[-KEPT:])[-KEPT:]
        self.offset += len(data)
        self.line += lines
        return data

    def blocks(self, most: int = 1 << 16) -> Iterator[Lexed | Bad | None]:
        """Records as they come; None where nothing has come yet, and a `Bad` for one that is too long to be kept."""
        ends, fields, lines, flags = (room[:most] for room in self._room)
        while True:
            data = np.frombuffer(self._buffer, np.uint8)
            count = lexer.lex(data, self.separator, self.quote, self._ended, LONGEST, ends, fields, lines, flags)
            if count:
                at = self.line + np.concatenate([[0], np.cumsum(lines[:count])])
                whole = self._pass(int(ends[count - 1]), int(at[-1] - self.line))
                yield Lexed(whole, ends[:count].copy(), fields[:count].copy(), at[:-1], flags[:count].copy())
            elif len(self._buffer) > LONGEST:
                yield from self._skip()
            elif self._ended:
                return
            elif not self._fill():
                yield None

    def _skip(self) -> Iterator[Bad | None]:
        """Pass a record that is too long, keeping nothing but its beginning."""
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
        yield Bad(line, too_long(), start.decode(errors="replace"))


class Lexed(NamedTuple):
    """Whole records: their bytes, where each ends, its cells, its line and its flags."""

    data: bytes
    ends: NDArray[np.int64]
    fields: NDArray[np.int64]
    lines: NDArray[np.int64]
    flags: NDArray[np.int64]

    def record(self, i: Any) -> bytes:
        return self.data[self.ends[i - 1] if i else 0 : self.ends[i]].rstrip(b"\r\n")

    def text(self, i: Any) -> str:
        return self.record(i)[:1000].decode(errors="replace")


def too_long() -> str:
    return f"the line is longer than {LONGEST >> 20} MiB"


# ---------------------------------------------------------------------- formats


class Table:
    """What the formats share. `drop` and `categorical` are set before the first block is read."""

    names: list[str] | None = None  # of the columns; None where each row names its own
    resumed = False  # whether the blocks begin where the checkpoint was

    def __init__(self) -> None:
        self.drop: frozenset[str] = frozenset()
        self.categorical: frozenset[str] = frozenset()

    def blocks(self) -> Iterator[Block | None]:
        """The rows, in blocks; None where nothing has come yet."""
        raise NotImplementedError


class Csv(Table):
    """A CSV file whose first line names the columns."""

    def __init__(self, source: Bytes, separator: str | None, decimal: str, resume: Mapping[str, Any] | None) -> None:
        super().__init__()
        self.source, self.decimal = source, decimal
        start = source.peek()
        if start[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in start[:8]:
            raise TableError(f"{source.name} is no text in UTF-8: convert it, as iconv -f utf-16 -t utf-8 does")
        bom = 3 if start.startswith(b"\xef\xbb\xbf") else 0
        line = re.split(rb"[\r\n]", start[bom:].lstrip(b"\r\n"), maxsplit=1)[0]
        self.separator = separator or find_separator(line.decode(errors="replace"))
        self.records = Records(source, ord(self.separator), ord('"'))
        self.names = self._read_header()
        self.resumed = resume is not None and self.records.resume(resume)
        self._texts: set[str] = set()  # the columns that had texts in the block before

    def _read_header(self) -> list[str]:
        name = self.source.name
        for lexed in self.records.blocks(most=1):
            if isinstance(lexed, Bad) or (lexed and lexed.flags[0] & ~lexer.BLANK):
                raise TableError(f"{name} has a first line that cannot be read: it must name the columns")
            if lexed and lexed.record(0).removeprefix(b"\xef\xbb\xbf"):
                break
        else:
            raise TableError(f"{name} is empty: its first line must name the columns")
        try:
            text = lexed.record(0).decode("utf-8-sig")
        except UnicodeDecodeError:
            raise TableError(f"{name} is not in UTF-8: convert it, as iconv -f latin1 -t utf-8 does") from None
        csv.field_size_limit(LONGEST + 1)
        cells = next(csv.reader([text], delimiter=self.separator))
        return unique([cell.strip() or f"column {i + 1}" for i, cell in enumerate(cells)], name)

    def blocks(self) -> Iterator[Block | None]:
        return parsed(self.records, self.records.blocks(), self._block)

    def _block(self, lexed: Lexed) -> Block:
        assert self.names is not None
        sizes = np.diff(lexed.ends, prepend=0)
        good = (lexed.flags == 0) & (lexed.fields == len(self.names)) & (sizes <= LONGEST)
        try:
            lexed.data.decode()
        except UnicodeDecodeError:
            good &= [is_utf8(lexed.record(i)) for i in range(len(good))]
        places = np.flatnonzero(good)
        data = lexed.data if good.all() else b"".join(lexed.record(i) + b"\n" for i in places)
        bad = [
            Bad(int(lexed.lines[i]), self._reason(lexed, i), lexed.text(i))
            for i in np.flatnonzero(~good & ((lexed.flags & lexer.BLANK) == 0))
        ]
        columns: dict[str, Column] = {}
        if len(places):
            try:
                columns = self._columns(data, len(places))
            except pa.ArrowInvalid:  # it sees other records than we do: one by one then
                kept, parts = [], []
                for i in places:
                    try:
                        parts.append(self._columns(lexed.record(i) + b"\n", 1))
                        kept.append(i)
                    except pa.ArrowInvalid:  # noqa: PERF203  # this is the slow way
                        bad.append(Bad(int(lexed.lines[i]), "the line cannot be read", lexed.text(i)))
                places, columns = np.array(kept, np.intp), joined(parts)
        position = self.records.position()
        return Block(columns, lexed.lines[places], lambda i: lexed.text(int(places[i])), sorted(bad), position)

    def _reason(self, lexed: Lexed, i: Any) -> str:
        assert self.names is not None
        if lexed.flags[i] & lexer.HAS_NUL:
            return "the line holds a NUL byte"
        if lexed.flags[i] & lexer.OPEN_QUOTE:
            return "the line has a quote that is not closed"
        if len(lexed.record(i)) >= LONGEST:
            return too_long()
        if lexed.fields[i] != len(self.names):
            return f"the line has {lexed.fields[i]} cells where the header has {len(self.names)}"
        return "the line is not in UTF-8"

    def _columns(self, data: bytes, rows: int) -> dict[str, Column]:
        assert self.names is not None
        used = [name for name in self.names if name not in self.drop]
        if not used:
            return {}
        try:
            table = self._arrow(data, used, self._texts | self.categorical)
        except pa.ArrowInvalid:  # a text where numbers were
            table = self._arrow(data, used, set(used))
        if table.num_rows != rows:
            raise pa.ArrowInvalid("other rows")
        columns = {name: column_of_arrow(name, table[name], name in self.categorical, self.decimal) for name in used}
        self._texts = {name for name, column in columns.items() if column.codes is not None or column.times is not None}
        return columns

    def _arrow(self, data: bytes, used: list[str], texts: set[str] | frozenset[str]) -> Any:
        text, number = pa.dictionary(pa.int32(), pa.string()), pa.float64()
        return arrow_csv.read_csv(
            pa.BufferReader(data),
            arrow_csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=self.names),
            arrow_csv.ParseOptions(delimiter=self.separator, newlines_in_values=b'"' in data),
            arrow_csv.ConvertOptions(
                check_utf8=False, include_columns=used, null_values=MISSING, strings_can_be_null=True,
                column_types={name: text if name in texts else number for name in used}, decimal_point=self.decimal,
            ),
        )  # fmt: skip


class JsonLines(Table):
    """One JSON object a line; each names its own columns."""

    def __init__(self, source: Bytes, decimal: str, resume: Mapping[str, Any] | None) -> None:
        super().__init__()
        self.source, self.decimal = source, decimal
        if source.peek().lstrip().startswith(b"["):
            raise TableError(f"{source.name} is one JSON array: write one object a line, as jq -c '.[]' does")
        self.records = Records(source, 256, 256)  # no byte: neither separates nor quotes
        self.resumed = resume is not None and self.records.resume(resume)

    def blocks(self) -> Iterator[Block | None]:
        return parsed(self.records, self.records.blocks(most=ROWS), self._block)

    def _block(self, lexed: Lexed) -> Block:
        rows, places, bad = [], [], []
        for i in range(len(lexed.ends)):
            record = lexed.record(i)
            if not record.strip():
                continue
            try:
                rows.append(self._row(record))
                places.append(i)
            except ValueError as error:
                bad.append(Bad(int(lexed.lines[i]), str(error), lexed.text(i)))
        names = sorted({name for row in rows for name in row})  # in an order that no block decides
        columns = {name: self._column(name, [row.get(name) for row in rows]) for name in names}
        lines = lexed.lines[np.array(places, np.intp)]
        return Block(columns, lines, lambda i: lexed.text(places[i]), bad, self.records.position())

    def _row(self, record: bytes) -> dict[str, Any]:
        if len(record) >= LONGEST:
            raise ValueError(too_long())
        try:
            row = json.loads(record)
        except (ValueError, RecursionError):
            raise ValueError("the line is no JSON") from None
        if not isinstance(row, dict):
            raise ValueError("the line is no JSON object")
        row = {name: value for name, value in row.items() if name not in self.drop}
        for name, value in row.items():
            if isinstance(value, (list, dict)):
                raise ValueError(f"{name[:100]!r} is a {type(value).__name__}, which is no number, date or text")
        if len(row) > MOST_COLUMNS:
            raise ValueError(f"the line has more than {MOST_COLUMNS} columns")
        return row

    def _column(self, name: str, values: list[Any]) -> Column:
        categorical = name in self.categorical
        if categorical:
            values = [None if v is None else v if isinstance(v, str) else json.dumps(v) for v in values]
        if not any(isinstance(value, str) for value in values):
            return Column(np.array([as_float(value) for value in values]))
        texts = {text: i for i, text in enumerate(dict.fromkeys(v for v in values if isinstance(v, str)))}
        codes = np.array([texts[v] if isinstance(v, str) else -1 for v in values], np.int32)
        column = column_of_texts(codes, list(texts), self.decimal, categorical)
        for i, value in enumerate(values):
            if not isinstance(value, str):
                column.numbers[i] = as_float(value)
        return column


class Arrow(Table):
    """A Parquet file, or an Arrow file or stream."""

    def __init__(self, path: Path | None, source: Bytes, held: ExitStack, resume: Mapping[str, Any] | None) -> None:
        super().__init__()
        self.name = source.name
        try:
            if source.magic.startswith(b"PAR1"):
                if path is None:
                    raise TableError(
                        "Parquet cannot be read from standard input, its index is at its end: give the file"
                    )
                self._file: Any = held.enter_context(pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 16))
                self._schema = self._file.schema_arrow
            elif source.magic.startswith(b"ARROW1") and path is not None:
                self._file = pa.ipc.open_file(held.enter_context(pa.memory_map(str(path))))
                self._schema = self._file.schema
            else:
                self._file = pa.ipc.open_stream(pa.PythonFile(Portions(source.portions()), "r"))
                self._schema = self._file.schema
        except (pa.ArrowException, OSError) as error:
            raise TableError(f"{self.name} cannot be read: {one_line(error)}") from None
        self.names = unique(list(self._schema.names), self.name)
        known = hashlib.sha256(str(self._schema).encode())
        if path is not None:
            with open(path, "rb") as file:
                known.update(str(file.seek(0, os.SEEK_END)).encode())
                file.seek(max(0, file.tell() - KEPT))
                known.update(file.read())  # a Parquet or Arrow file has its index there
        self._known = known.hexdigest()
        self.resumed = resume is not None and resume.get("table") == self._known
        self._row = int(resume["row"]) if resume is not None and self.resumed else 0

    def blocks(self) -> Iterator[Block | None]:
        used = [name for name in self.names or () if name not in self.drop]
        try:
            for batch in self._batches(used):
                columns = {n: column_of_arrow(n, batch.column(n), n in self.categorical) for n in used}
                lines = np.arange(self._row + 1, self._row + 1 + len(batch))
                self._row += len(batch)
                yield Block(columns, lines, raw_of(batch), [], {"table": self._known, "row": self._row})
        except (pa.ArrowException, OSError) as error:
            raise TableError(f"{self.name} cannot be read behind row {self._row}: {one_line(error)}") from None

    def _batches(self, used: list[str]) -> Iterator[Any]:
        """Record batches from the row on."""
        left = self._row
        if isinstance(self._file, pq.ParquetFile):
            groups: list[int] = []
            for group in range(self._file.num_row_groups):
                rows = self._file.metadata.row_group(group).num_rows
                if not groups and left >= rows:
                    left -= rows
                else:
                    groups.append(group)
            batches = self._file.iter_batches(ROWS, row_groups=groups, columns=used, use_threads=False)
        elif hasattr(self._file, "num_record_batches"):
            batches = map(self._file.get_batch, range(self._file.num_record_batches))
        else:
            batches = iter(self._file)
        for batch in batches:
            skipped = min(left, len(batch))
            left -= skipped
            for start in range(skipped, len(batch), ROWS):
                yield batch.slice(start, ROWS)


def raw_of(batch: Any) -> Callable[[int], str]:
    return lambda i: json.dumps(batch.slice(i, 1).to_pylist()[0], default=str)[:1000]


def open_table(
    path: Path | None,
    held: ExitStack,
    *,
    separator: str | None = None,
    decimal: str = ".",
    follow: bool = False,
    resume: Mapping[str, Any] | None = None,
) -> Table:
    """The table in a file, or in standard input where path is None, at the position of a checkpoint if it is that one.

    The format is known by the file's first bytes; JSON lines begin with a brace. `held` closes what was opened.
    """
    source = Bytes(path, held, follow)
    if source.magic.startswith((b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")):
        if follow:
            raise TableError(f"--follow needs CSV or JSON lines, and {source.name} is neither")
        return Arrow(path, source, held, resume if resume and "table" in resume else None)
    if resume and "offset" not in resume:
        resume = None
    if source.peek().lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"[")):
        return JsonLines(source, decimal, resume)
    return Csv(source, separator, decimal, resume)


def find_separator(header: str) -> str:
    """The separator that the header has most of; a comma where it has none."""
    bare = re.sub(r'"[^"]*"', "", header)
    return max(SEPARATORS, key=bare.count)


def unique(names: list[str], table: str) -> list[str]:
    if len(names) > MOST_COLUMNS:
        raise TableError(f"{table} has {len(names)} columns: more than {MOST_COLUMNS} are not taken")
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise TableError(f"{table} has two columns {name[:100]!r}: rename one of them")
        seen.add(name)
    return names


def joined(parts: list[dict[str, Column]]) -> dict[str, Column]:
    """Blocks of one row each as one."""
    out: dict[str, Column] = {}
    for name in parts[0] if parts else ():
        texts: dict[str, int] = {}
        codes = [
            -1 if c.codes is None or c.codes[0] < 0 else texts.setdefault(c.texts[c.codes[0]], len(texts))
            for c in (part[name] for part in parts)
        ]
        times = np.array([math.nan if part[name].times is None else part[name].times[0] for part in parts])  # type: ignore[index]
        out[name] = Column(
            np.concatenate([part[name].numbers for part in parts]),
            np.array(codes, np.int32) if texts else None,
            list(texts),
            None if np.isnan(times).all() else times,
        )
    return out


def parsed(
    records: Records, blocks: Iterable[Lexed | Bad | None], parse: Callable[[Lexed], Block]
) -> Iterator[Block | None]:
    """Blocks of records, read by `parse`; a record too broken to be one of many is a block of its own."""
    for lexed in blocks:
        if lexed is None:
            yield None
        elif isinstance(lexed, Bad):
            yield empty_block([lexed], records.position())
        else:
            yield parse(lexed)


def empty_block(bad: list[Bad], position: dict[str, Any]) -> Block:
    return Block({}, np.empty(0, np.int64), lambda i: "", bad, position)


def as_float(value: Any) -> float:
    """A JSON number; ±Inf for an integer too large."""
    try:
        return math.nan if value is None or isinstance(value, str) else float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
