"""The lexer of CSV: it finds where records end, by the reader of the standard library where there are quotes.

A quote opens a quoted part only at the start of a cell, and a doubled quote is a literal one, as in Arrow's reader.
Records end with LF, CRLF or CR.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BLANK, HAS_NUL, OPEN_QUOTE = 1, 2, 4  # flags of a record
BEHIND = "behind the last line"
csv.field_size_limit((1 << 31) - 1)  # `limit` is the limit


class Marks(NamedTuple):
    """The end of each record, after its line break, and the number of its cells, its lines and its flags."""

    ends: NDArray[np.int64]
    fields: NDArray[np.int64]
    lines: NDArray[np.int64]
    flags: NDArray[np.int64]


def lex(data: bytes, separator: str, at_end: bool, limit: int, most: int) -> Marks:
    """The complete records, `most` at most; without a separator, as in JSON lines, each line is one.

    An incomplete record is left for the next call, unless the data are `at_end`.
    """
    lines = data.splitlines(keepends=True)
    if not at_end and not data.endswith(b"\n"):
        lines = lines[:-1]  # it may go on, or LF may follow CR
    if separator and b'"' in data:
        found = list(islice(quoted_records(lines, separator, at_end, limit), most))
        counts, fields, flags = np.array(found, np.int64).reshape(-1, 3).T
    else:
        lines, mark = lines[:most], separator.encode() or b"\n"
        counts, flags = np.ones(len(lines), np.int64), np.zeros(len(lines), np.int64)
        fields = np.array([line.count(mark) for line in lines], np.int64) + 1
    ends = np.array(list(map(len, lines)), np.int64).cumsum()[counts.cumsum() - 1]
    starts = np.append(0, ends[:-1])[: len(ends)]
    flags = flags | BLANK * np.isin(np.frombuffer(data, np.uint8)[starts], (10, 13))
    if b"\0" in data:
        has = [b"\0" in data[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
        flags |= HAS_NUL * (np.array(has, np.int64) & (flags != OPEN_QUOTE))
    return Marks(ends, fields, counts, flags)


def quoted_records(lines: Sequence[bytes], separator: str, at_end: bool, limit: int) -> Iterator[tuple[int, int, int]]:
    """The number of lines and cells and the flag of each complete record.

    Where a quote is open and these are all lines, or where a record of several lines is longer than `limit` bytes, the
    first of its lines is a record with the flag `OPEN_QUOTE`.
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
                too_long = sum(map(len, lines[at:after])) > limit
                if is_open and not too_long and not at_end:
                    return
                if is_open or too_long:
                    yield 1, 1, OPEN_QUOTE
                    at += 1
                    break
            yield after - at, len(row) or 1, 0
            at = after
