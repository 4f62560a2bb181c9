"""How many samples one pass over the data has, told or noticed: the head remembers as many.

At forgetting 1 a sample that is learned in each of k epochs counts as k samples, and the ridge loses its weight. With
λ = 1 - n/N in an update of n samples the head remembers about the N samples of one epoch, each of them once. Where N is
not told, the first samples are watched: it is noticed when all of them have come again.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from sepsa.heads.base.repeated_samples import hash_of, row_bytes
from sepsa.states import schema

if TYPE_CHECKING:
    from numpy.typing import NDArray

WATCHED = 16  # samples
COUNTED = 4  # repeats of all of them, after which the length is not estimated anew
LIMIT = 2**20  # samples, after which no epoch is expected
SHARE = 3.0  # of the weight of a batch, the least ridge of a default solver once samples come again
LEAST = 0.5  # the least forgetting, for batches that are half of the data or more


class Watched(NamedTuple):
    """One of the first samples."""

    key: float  # its value of the input `column`
    hash: int
    first: int  # how many samples came before it
    last: int  # how many came before its last repeat, or before itself
    repeats: int = 0


class Known(NamedTuple):
    """What an `Epoch` knows, for a checkpoint."""

    length: float | None = None  # samples; None: not known
    samples: int = 0  # offered to the head
    batch: int = 0  # the most samples of an update
    column: int = 0  # the input whose value tells most samples from the watched ones
    watched: tuple[Watched, ...] = ()
    followed: int = 0  # 1 after the ridge of the solver was raised for it


class Epoch:
    """The length of an epoch, told or noticed. `note` runs at every update, so that it does little in most of them."""

    __slots__ = ("batch", "column", "followed", "keys", "length", "samples", "told", "watched", "watches")

    def __init__(self, length: float | None = None) -> None:
        self.told = length is not None
        self.load(Known(length))

    def known(self) -> Known:
        """What is known now."""
        return Known(self.length, self.samples, self.batch, self.column, self.watched, self.followed)

    def load(self, known: Known) -> None:
        """Go on from what was known."""
        self.length, self.samples, self.batch, self.column, self.watched, self.followed = known
        self.keys = frozenset(sample.key for sample in self.watched)  # by which most others are told apart
        least = min((sample.repeats for sample in self.watched), default=0)
        self.watches = not self.told and (self.length is None or least < COUNTED)  # whether samples are compared

    def note(self, inputs: Tensor | None, targets: Tensor, n: int) -> None:
        """Take note of n rows of the head, from samples with these inputs (b, ...), b a divisor of n."""
        before = self.samples
        self.samples = before + n
        if n > self.batch:
            self.batch = n
        if inputs is None or not self.watches:
            return
        try:
            rows = inputs.numpy().reshape(len(inputs), -1)
        except (TypeError, RuntimeError, ValueError):  # not on the host, sparse, bfloat16, differentiated
            return
        if len(self.watched) == WATCHED and self.keys.isdisjoint(rows[:, self.column].tolist()):
            self.watches = self.samples < LIMIT
            return
        if rows.shape[1] and rows.dtype.kind in "fiu" and targets.numel() % len(rows) == 0:
            self._compare(rows, row_bytes(inputs, targets), before, n // len(rows))

    def _compare(self, rows: NDArray[Any], whole: list[tuple[Any, Any]], before: int, span: int) -> None:
        """Count repeats among samples of `span` rows each, and watch the first ones.

        The length is that after which the rarest of the watched samples comes again: some repeated rows in a stream are
        not an epoch.
        """
        if not self.watched:
            distinct = [len(set(part)) for part in rows[:WATCHED].T.tolist()]
            self.column = distinct.index(max(distinct))
        values, found = rows[:, self.column].tolist(), list(self.watched)
        for k, sample in enumerate(self.watched):
            for row, value in enumerate(values):
                if value == sample.key and hash_of(*whole[row]) == sample.hash:
                    found[k] = found[k]._replace(last=before + row * span, repeats=found[k].repeats + 1)
        for row in range(min(len(values), WATCHED - len(found))):
            key = float(values[row]) if math.isfinite(values[row]) else 0.0
            found.append(Watched(key, hash_of(*whole[row]), before + row * span, before + row * span))
        complete = len(found) == WATCHED and all(sample.repeats for sample in found)
        length = max((sample.last - sample.first) / sample.repeats for sample in found) if complete else None
        self.load(Known(length, self.samples, self.batch, self.column, tuple(found), self.followed))


def forgetting(length: float, n: int, features: int) -> float:
    """The λ of an update of n samples with which the head remembers an epoch of this length, or 8 samples a feature."""
    return max(1 - n / max(length, 8 * features), LEAST)


def ridge(batch: int) -> float:
    """The least ridge of a default solver once samples come again, for batches of this size."""
    return max(batch / SHARE, 1.0)


def written(known: Known) -> dict[str, Any]:
    """What was noticed, as a saved state has it."""
    return known._asdict() | {"length": known.length or 0.0, "watched": [list(sample) for sample in known.watched]}


def read(name: str, saved: object) -> Known:
    """What `written` wrote; a damaged one is refused."""
    entry = schema.read(name, saved, set(Known._fields))
    items = entry.items("watched")
    watched = [items.items(k, len(Watched._fields)) for k in range(len(items))]
    return Known(
        length=entry.number("length", low=0.0) or None,
        samples=entry.integer("samples"),
        batch=entry.integer("batch"),
        column=entry.integer("column"),
        watched=tuple(
            Watched(one.number(0), one.integer(1, low=-(2**63)), one.integer(2), one.integer(3), one.integer(4))
            for one in watched
        ),
        followed=entry.integer("followed", high=1),
    )
