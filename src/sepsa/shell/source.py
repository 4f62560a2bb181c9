"""The bytes of a file or of standard input, decompressed as they are read."""

from __future__ import annotations

import codecs
import gzip
import io
import itertools
import os
import select
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from sepsa.shell.cells import TableError
from sepsa.shell.reading import UTF_8

CHUNK = 1 << 20  # bytes read at once
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"  # the first bytes of such a file
BINARY = (b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")  # of a Parquet or Arrow file, which has no encoding
REPLACED, BROKEN = "\ufffd".encode(), b"\xff"  # no UTF-8 text has the second
WAIT = 0.2  # seconds after which a read of an idle pipe returns None


class ByteSource:
    """The bytes of a file or of standard input, decompressed; None while a pipe is idle, b"" at the end."""

    def __init__(self, path: Path | None, held: ExitStack, follow: bool = False, encoding: str = UTF_8) -> None:
        self.name = name_of(path)
        if path is None and sys.stdin is None:
            raise TableError("standard input is closed: name a file, or pipe a table into the command")
        self._file: Any = sys.stdin.buffer if path is None else held.enter_context(path.open("rb"))
        self._descriptor = None  # of a pipe, which `select` polls
        if path is None or not self._file.seekable():
            with suppress(OSError, AttributeError):  # standard input may be replaced by an object without a descriptor
                self._descriptor = self._file.fileno()
        self._follow = follow
        start = b""
        for data in self._raw():
            start += data or b""
            if data == b"" or len(start) >= 8:
                break
        self.magic = start[:8]
        self._chunks: Iterator[bytes | None] = itertools.chain([start], self._raw())
        compressed = start.startswith((GZIP, ZSTD))
        if compressed:
            self._chunks = decompress(self._chunks, self.name, start.startswith(GZIP))
        if compressed and follow:
            raise TableError(f"--follow needs a plain file, and {self.name} is compressed")
        self.encoding, encoded = encoding, encoding != UTF_8 and not start.startswith(BINARY)
        self.is_utf8 = encoded and is_utf8(self.peek())  # though another encoding is given
        if encoded:
            self._chunks = recode(self._chunks, encoding, follow, self.name)
        plain = path is not None and not (follow or compressed or encoded)
        self.size = (plain and os.fstat(self._file.fileno()).st_size) or None  # bytes, where they can be known

    def _raw(self) -> Iterator[bytes | None]:
        """Chunks as they come, without end: None while a pipe is idle, b"" at the end of the file."""
        while True:
            if self._descriptor is None:
                yield self._file.read(CHUNK)
            elif select.select([self._descriptor], [], [], WAIT)[0]:
                yield os.read(self._descriptor, CHUNK)
            else:
                yield None

    def read(self) -> bytes | None:
        """The next chunk."""
        data = next(self._chunks, b"")
        if data == b"" and self._follow:
            select.select([], [], [], WAIT)
            return None
        return data

    def peek(self) -> bytes:
        """The next chunk, which `read` returns again; b"" at the end."""
        while (data := self.read()) is None:
            pass
        self._chunks = itertools.chain([data], self._chunks)
        return data


def is_utf8(data: bytes) -> bool:
    """Whether these bytes, which may end within a character, are UTF-8 and not ASCII alone."""
    try:
        return not data.isascii() and bool(codecs.getincrementaldecoder(UTF_8)().decode(data))
    except UnicodeDecodeError:
        return False


def name_of(source: Path | None) -> str:
    """The table in messages."""
    return "standard input" if source is None else str(source)


def recode(chunks: Iterator[bytes | None], encoding: str, follow: bool, name: str) -> Iterator[bytes | None]:
    """Chunks in UTF-8, with `BROKEN` in place of what cannot be decoded, so that its row is refused."""
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    for data in chunks:
        if data is None:
            yield None
            continue
        try:
            text = decoder.decode(data, final=not data and not follow)
        except UnicodeError:  # of an encoding that needs a mark at the beginning
            raise TableError(f"{name} is not in {encoding}: give its encoding, such as --encoding utf-8") from None
        if text:
            yield text.encode(UTF_8, "surrogatepass").replace(REPLACED, BROKEN)
        if not data:
            yield b""


def decompress(chunks: Iterator[bytes | None], name: str, zipped: bool) -> Iterator[bytes | None]:
    """Chunks of bounded size, decompressed from gzip or from zstd."""
    file = ChunkFile(chunks)  # Arrow's stream has gzip too, and loses up to a chunk of rows before the cut of a file
    read = gzip.GzipFile(fileobj=file).read1 if zipped else pa.CompressedInputStream(file, "zstd").read
    try:
        while data := read(CHUNK):
            yield data
    except (OSError, EOFError, zlib.error) as error:
        raise TableError(f"{name} is damaged or cut short and cannot be decompressed: {error}") from None


class ChunkFile(io.RawIOBase):
    """Chunks of bytes behind the interface of a file."""

    def __init__(self, chunks: Iterator[bytes | None]) -> None:
        self._chunks, self._unread = (data for data in chunks if data is not None), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._unread or next(self._chunks, b"")
        some, self._unread = data[: len(buffer)], data[len(buffer) :]
        buffer[: len(some)] = some
        return len(some)
