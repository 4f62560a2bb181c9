"""What a reader of tables returns: blocks of rows, the rows that are refused, and columns; and columns of Arrow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from sepsa.learner.columns.reader import Column, column_of, column_of_values
from sepsa.shell.messages import Misuse
from sepsa.shell.reading import Reading, drop_of

OTHERWISE = "see their reasons by --quarantine"  # where no cure is known
TEXTS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)

Position = dict[str, Any]  # hashes that identify a table, and where in it to resume


class TableError(ValueError):
    """A table that cannot be read, or not from the position at which the checkpoint was written."""


class BadRow(NamedTuple):
    """A row that cannot be learned, which `sepsa stream` writes to the quarantine file.

    `cure` is empty where the reason ends with it: a cell is of a wrong kind.
    """

    line: int
    reason: str
    text: str
    cure: str = OTHERWISE


@dataclass
class RowBlock:
    """Rows of a table, and the position in the table after them."""

    columns: dict[str, Column]
    lines: NDArray[np.int64]  # of each row, from 1; for Parquet and Arrow the row's number
    raw: Callable[[int], str]  # the text of a row in the file
    bad: list[BadRow]
    position: Position

    def __post_init__(self) -> None:
        self.good = np.ones(len(self), bool)  # whether a row can be used

    def __len__(self) -> int:
        return len(self.lines)

    def column(self, name: str | None) -> Column:
        """A column; where there is none, one of missing values."""
        return self.columns.get(name or "") or Column(np.full(len(self), np.nan))

    def refuse(self, rows: Any, reason: str | Callable[[int], str], cure: str = OTHERWISE) -> None:
        """Leave out rows, by their numbers or a mask, unless they are already; `reason` may depend on the number."""
        for i in np.arange(len(self))[rows].tolist():
            if self.good[i]:
                said = reason if isinstance(reason, str) else reason(i)
                self.bad.append(BadRow(int(self.lines[i]), said, self.raw(i), cure))
                self.good[i] = False

    @property
    def rows(self) -> NDArray[np.intp]:
        """The numbers of the rows that can be used."""
        return np.flatnonzero(self.good)

    def check_first(self) -> None:
        """Raise an error if cells of a wrong kind come before any row that can be used, or leave none."""
        wrong = [bad for bad in self.bad if not bad.cure]
        if wrong and not (self.good.any() and self.lines[self.rows[0]] < min(wrong).line):
            raise Misuse(f"line {min(wrong).line}: {min(wrong).reason}, or leave the line out")


class TableReader:
    """A table as blocks of rows. `reads` and `categorical` are set before the first block is read."""

    names: list[str] | None = None  # of the columns; None where each row names its own
    resumed = False  # whether the blocks begin at the checkpoint's position
    is_utf8 = False  # whether it seems to be, though it is read in another encoding
    done = 0  # bytes or rows that were read,
    size: int | None = None  # and there are, where that is known

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.reads: Callable[[str], bool] = lambda name: True  # whether a column of this name is read
        self.categorical: frozenset[str] = frozenset()

    def blocks(self) -> Iterator[RowBlock | None]:
        """The rows, in blocks; None while a pipe is idle."""
        missing = self.reading.missing()
        for block in self._blocks():
            if block is not None and self.reading.na_values:
                block.columns = {name: column.without(**missing) for name, column in block.columns.items()}
            yield block

    def _blocks(self) -> Iterator[RowBlock | None]:
        """The rows before further missing values are removed."""
        raise NotImplementedError

    def _read(self, batch: Any, used: Iterable[str], categorical: Collection[str]) -> dict[str, Column]:
        """The columns of a batch of Arrow's that are used."""
        return {name: column_of_arrow(name, batch.column(name), name in categorical, self.reading) for name in used}

    def position(self, line: int | None = None) -> Position:
        """The position behind the last block, or before a row of it."""
        raise NotImplementedError

    def share(self) -> float | None:
        """The share of the table that was read; None where its size is not known."""
        return min(self.done / self.size, 1.0) if self.size else None


def column_of_arrow(name: str, array: Any, categorical: bool, reading: Reading) -> Column:
    """A column from an Arrow array."""
    kind, named = array.type, pa.types.is_dictionary(array.type)
    is_text = named or any(is_kind(kind) for is_kind in TEXTS)
    if categorical or is_text:
        encoded = array if named else pc.dictionary_encode(array if is_text else pc.cast(array, pa.string()))
        codes = filled(encoded.indices.cast(pa.int32()), np.int32(-1))
        values = encoded.dictionary.to_pylist()
        return column_of_values(codes, values, categorical, *reading.cells())
    with suppress(pa.ArrowException):  # no numbers
        return Column(filled(pc.cast(array, pa.float64(), safe=False), np.float64(np.nan)))
    try:
        return column_of(array.to_numpy(zero_copy_only=False))
    except TypeError:
        cure = f"which is not a number, a date or a text: {drop_of(name)}"
        raise TableError(f"column {name!r} is of type {kind}, {cure}") from None


def filled(array: Any, instead: Any) -> NDArray[Any]:
    """The values of an Arrow array with a number of NumPy for null; `to_numpy` and `pa.scalar` would import pandas."""
    null = pa.Array.from_buffers(array.type, 1, [None, pa.py_buffer(instead.tobytes())])[0]
    return np.from_dlpack(pc.fill_null(array, null))


def fails(read: Callable[..., Any], *given: Any) -> bool:
    """Whether what is given cannot be read so."""
    try:
        read(*given)
    except (UnicodeDecodeError, pa.ArrowInvalid):
        return True
    return False
