"""Readers of tables in blocks of rows: CSV, JSON lines, Parquet and Arrow, from files, pipes or files that grow.

What a row means depends on the row alone, never on the block it came in, so that a stream read in other chunks, or
resumed at any row, gives the same numbers. A row that cannot be read is passed on with its line and the reason; only
blank lines are dropped.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq

from sepsa.learner.columns.cells import MISSING
from sepsa.learner.columns.reader import Column, column_of_objects
from sepsa.shell.cells import Position, RowBlock, TableError, TableReader, fails
from sepsa.shell.messages import describe
from sepsa.shell.reading import Reading, drop_of
from sepsa.shell.records import KEPT, NOT_CLOSED, RecordBatch, TextReader
from sepsa.shell.source import BINARY, ByteSource, ChunkFile

ROWS = 8192  # of a block, where rows are counted
SEPARATORS = ",;\t|"  # the most frequent one of the header is taken, the first where there is none
READS = "sepsa reads CSV and JSON lines (plain, gzip or zstd), Parquet and Arrow"
# What other files begin with, and what they are.
KINDS = {
    b"PK\x03\x04": "a zip archive, such as a workbook or what torch.save writes",
    b"\xd0\xcf\x11\xe0": "a workbook of Excel",
    b"SQLite ": "a database of SQLite",
    b"BZh": "compressed by bzip2",
    b"\xfd7zXZ": "compressed by xz",
    **{bytes([0x80, version]): "a pickle" for version in range(2, 6)},
    b"\x89HDF": "an HDF5 file",
    b"\x93NUMPY": "a NumPy array",
}


class CsvReader(TextReader):
    """A CSV file whose first line names the columns."""

    names: list[str]

    def __init__(self, source: ByteSource, reading: Reading, resume: Position) -> None:
        start = source.peek()
        if start[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in start[:8]:
            cure = f"give --encoding utf-16 if it is a text in UTF-16. {READS}"
            raise TableError(f"{source.name} is not {source.encoding} text: {cure}")
        line = re.split(rb"[\r\n]", start.removeprefix(b"\xef\xbb\xbf").lstrip(b"\r\n"), maxsplit=1)[0]
        bare = re.sub(r'"[^"]*"', "", line.decode(errors="replace"))
        super().__init__(source, reading, reading.sep or max(SEPARATORS, key=bare.count))
        self.names = self._read_header()
        self.resumed = self.resume(resume)
        self._texts: set[str] = set()  # the columns with texts or dates in the previous block

    def _read_header(self) -> list[str]:
        name = self.source.name
        for batch in self.batches(most=1):
            if batch and (batch.cells[0] < 0 or b"\0" in batch.record(0)):
                raise TableError(f"{name} has a first line that cannot be read: it must name the columns")
            if batch and batch.record(0).removeprefix(b"\xef\xbb\xbf"):
                break
        else:
            raise TableError(f"{name} is empty: its first line must name the columns")
        try:
            text = batch.record(0).decode("utf-8-sig")
        except UnicodeDecodeError:
            raise TableError(f"{name} is not in {self.source.encoding}: {self.not_encoded[1]}") from None
        cells = next(csv.reader([text], delimiter=self.separator))
        return check_names([cell.strip() or f"column {i + 1}" for i, cell in enumerate(cells)], name)

    def _block(self, batch: RecordBatch) -> RowBlock:
        doubtful = batch.cells != len(self.names)
        if b"\0" in batch.data or fails(batch.data.decode):
            doubtful[:] = True
        reasons = [(i, reason) for i in np.flatnonzero(doubtful) if (reason := self._reason(batch, i)) is not None]
        bad = [batch.bad(i, *reason) for i, reason in reasons if reason]
        places = np.delete(np.arange(len(doubtful)), [i for i, _ in reasons])
        try:
            columns = self._columns(batch, places)
        except pa.ArrowInvalid:  # Arrow divides some record into others than the lexer
            read = np.array([not fails(self._columns, batch, [i]) for i in places])
            bad += [batch.bad(i, "the line cannot be read") for i in places[~read]]
            places = places[read]
            columns = self._columns(batch, places)
        lines = batch.lines[places]
        return RowBlock(columns, lines, lambda i: batch.text(places[i]), sorted(bad), self.position())

    def _reason(self, batch: RecordBatch, i: Any) -> tuple[str, ...] | None:
        """Why record i cannot be read, and the cure; empty for a blank line, None where it can be read."""
        record, cells = batch.record(i), batch.cells[i]
        if cells == NOT_CLOSED:
            cure = "close the quote, or double it if it is a character of the cell"
            return "the line has a quote that is not closed", cure
        if b"\0" in record:
            return "the line holds a NUL byte", "give --encoding utf-16 if the table is in UTF-16"
        if cells != len(self.names):
            cure = "give --sep if another character separates cells, or quote cells that contain it"
            return (f"the line has {cells} cells where the header has {len(self.names)}", cure) if cells else ()
        return self.not_encoded if fails(record.decode) else None

    def _columns(self, batch: RecordBatch, places: Any) -> dict[str, Column]:
        """The columns of the records with these numbers."""
        used = [name for name in self.names if self.reads(name)]
        if not used or not len(places):
            return {}
        whole = len(places) == len(batch.ends)
        data = batch.data if whole else b"".join(batch.record(i) + b"\n" for i in places)
        try:
            table = self._arrow(data, used, self._texts | self.categorical)
        except pa.ArrowInvalid:  # a text in a column of numbers
            table = self._arrow(data, used, set(used))
        if table.num_rows != len(places):
            raise pa.ArrowInvalid("other rows")
        columns = self._read(table.combine_chunks().to_batches()[0], used, self.categorical)
        self._texts = {name for name, column in columns.items() if column.codes is not None or column.times is not None}
        return columns

    def _arrow(self, data: bytes, used: list[str], texts: set[str] | frozenset[str]) -> Any:
        text, number = pa.dictionary(pa.int32(), pa.string()), pa.float64()
        return arrow_csv.read_csv(
            pa.BufferReader(data),
            arrow_csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=self.names),
            arrow_csv.ParseOptions(delimiter=self.separator, newlines_in_values=b'"' in data),
            arrow_csv.ConvertOptions(
                check_utf8=False,
                include_columns=used,
                null_values=MISSING,
                strings_can_be_null=True,
                column_types={name: text if name in texts else number for name in used},
                decimal_point=self.reading.decimal,
            ),
        )


class JsonLinesReader(TextReader):
    """One JSON object a line; each names its own columns."""

    batch = ROWS

    def __init__(self, source: ByteSource, reading: Reading, resume: Position) -> None:
        super().__init__(source, reading)
        if source.peek().lstrip().startswith(b"["):
            raise TableError(f"{source.name} is one JSON array: write one object a line, as jq -c '.[]' does")
        self.resumed = self.resume(resume)

    def _block(self, batch: RecordBatch) -> RowBlock:
        rows, places, bad = [], [], []
        for i in range(len(batch.ends)):
            record = batch.record(i)
            if not record.strip():
                continue
            try:
                rows.append(self._row(record))
                places.append(i)
            except UnicodeDecodeError:
                bad.append(batch.bad(i, *self.not_encoded))
            except ValueError as error:
                bad.append(batch.bad(i, str(error)))
        names = sorted({*chain(*rows)})  # sorted: the order must not depend on the block
        columns = {name: self._column(name, [row.get(name) for row in rows]) for name in names}
        lines = batch.lines[np.array(places, np.intp)]
        return RowBlock(columns, lines, lambda i: batch.text(places[i]), bad, self.position())

    def _row(self, record: bytes) -> dict[str, Any]:
        text = record.decode("utf-8-sig")
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError("the line is not JSON") from None
        if not isinstance(row, dict):
            raise ValueError("the line is not a JSON object")
        row = {name: value for name, value in row.items() if self.reads(name)}
        for name, value in row.items():
            if isinstance(value, (list, dict)):
                what = "which is not a number, a date or a text"
                raise ValueError(f"{name[:100]!r} is a {type(value).__name__}, {what}: {drop_of(name)}")
        return row

    def _column(self, name: str, values: list[Any]) -> Column:
        categorical = name in self.categorical
        if categorical:
            values = [v if v is None or isinstance(v, str) else json.dumps(v) for v in values]
        return column_of_objects(values, categorical, *self.reading.cells())


class ArrowReader(TableReader):
    """A Parquet file, or an Arrow file or stream."""

    def __init__(
        self, path: Path | None, source: ByteSource, held: ExitStack, reading: Reading, resume: Position
    ) -> None:
        super().__init__(reading)
        self.name = source.name
        try:
            if source.magic.startswith(b"PAR1"):
                if path is None:
                    raise TableError(
                        "Parquet cannot be read from standard input, its index is at its end: give the file"
                    )
                table = held.enter_context(pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 16))
                schema, self.size = table.schema_arrow, table.metadata.num_rows
                self._batches: Any = partial(table.iter_batches, ROWS, use_threads=False)
            else:
                file = io.BufferedReader(ChunkFile(iter(source.read, b"")))  # whose reads are not shorter than asked
                if source.magic.startswith(b"ARROW1"):
                    file.read(8)  # an Arrow file is a stream behind this mark
                stream = pa.ipc.open_stream(file)
                schema, self._batches = stream.schema, lambda columns: stream
        except (pa.ArrowException, OSError) as error:
            raise TableError(f"{self.name} cannot be read: {describe(error)}") from None
        self.names = check_names(list(schema.names), self.name)
        self._named = {each.name for each in schema if pa.types.is_dictionary(each.type)}  # whose values are names
        identity = hashlib.sha256(str(schema).encode())
        if path is not None:
            with open(path, "rb") as end:
                identity.update(str(end.seek(0, os.SEEK_END)).encode())
                end.seek(max(0, end.tell() - KEPT))
                identity.update(end.read())  # the index of a Parquet or Arrow file
        self._identity = identity.hexdigest()
        self.resumed = resume.get("table") == self._identity
        self.done = int(resume["row"]) if self.resumed else 0

    def _blocks(self) -> Iterator[RowBlock | None]:
        used = [name for name in self.names or () if self.reads(name)]
        skip = self.done  # to read these takes a hundredth of learning them
        try:
            for batch in self._batches(columns=used):
                first = min(skip, len(batch))
                skip -= first
                for start in range(first, len(batch), ROWS):
                    yield self._block(batch.slice(start, ROWS), used)
        except (pa.ArrowException, OSError) as error:
            raise TableError(f"{self.name} cannot be read behind row {self.done}: {describe(error)}") from None

    def _block(self, batch: Any, used: list[str]) -> RowBlock:
        def text(i: int) -> str:
            return json.dumps(batch.slice(i, 1).to_pylist()[0], default=str)[:1000]

        columns = self._read(batch, used, self.categorical | self._named)
        self.done += len(batch)
        lines = np.arange(self.done - len(batch), self.done) + 1
        return RowBlock(columns, lines, text, [], self.position())

    def position(self, line: int | None = None) -> Position:
        return {"table": self._identity, "row": self.done if line is None else line - 1}


def open_table(
    path: Path | None,
    held: ExitStack,
    reading: Reading,
    *,
    follow: bool = False,
    resume: Position | None = None,
) -> TableReader:
    """The table in a file, or in standard input where path is None; it continues at `resume` if that is its position.

    The file's first bytes tell the format; JSON lines begin with a brace. `held` closes the files that were opened.
    """
    source, place = ByteSource(path, held, follow, reading.encoding), resume or {}
    if source.magic.startswith(BINARY):
        if follow:
            raise TableError(f"--follow needs CSV or JSON lines, and {source.name} is neither")
        return ArrowReader(path, source, held, reading, place)
    kind = next((kind for first, kind in KINDS.items() if source.magic.startswith(first)), None)
    if kind:
        cure = "save the sheet as CSV" if "workbook" in kind else "convert or unpack it"
        raise TableError(f"{source.name} is {kind}: {cure}. {READS}")
    if source.peek().lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"[")):
        return JsonLinesReader(source, reading, place)
    return CsvReader(source, reading, place)


def check_names(names: list[str], table: str) -> list[str]:
    """The names of the columns, which must be distinct."""
    for name, count in Counter(names).items():
        if count > 1:
            raise TableError(f"{table} has two columns {name[:100]!r}: rename one of them")
    return names
