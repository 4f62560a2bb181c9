"""The levels of a text column with many: which were seen before, and the running mean of the target of each.

The value of a row is (Σy + `PRIOR`·ȳ)/(n + `PRIOR`) over the n rows of its level before it, ȳ being the mean over all
rows before it: the target of the row itself is never in it. Levels are found by a hash, so that memory is bounded.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sepsa.states import schema
from sepsa.stream.engine.kernels.robust import HUGE
from sepsa.stream.engine.protocol import Floats

SLOTS = 1 << 14
PRIOR = 10.0  # rows


def slots_of(texts: Sequence[str]) -> list[int]:
    """The slot of each text, the same in every process."""
    return [zlib.crc32(text.encode(errors="surrogatepass")) % SLOTS for text in texts]


class LevelMeans:
    """Rows and sums of targets of each level of a column, for its first `outputs` targets.

    `start` is the row of the call with which the first of them comes.
    """

    def __init__(self, outputs: int, start: int = 0) -> None:
        self.start = start
        self.counts, self.sums = np.zeros(SLOTS), np.zeros((SLOTS, outputs))
        self.total = np.zeros((2, outputs))  # sums of targets and of their squares

    def values(self, slots: NDArray[np.intp]) -> Floats:
        """The values (n, outputs) of levels by their slots."""
        mean = self.total[0] / max(self.counts.sum(), 1.0)
        values: Floats = (self.sums[slots] + PRIOR * mean) / (self.counts[slots, None] + PRIOR)
        return values

    def scale(self) -> tuple[Floats, Floats]:
        """Mean and deviation (outputs,) of all targets so far."""
        mean, square = self.total / max(self.counts.sum(), 1.0)
        return mean, np.sqrt(np.maximum(square - mean**2, 0.0))

    def learn(self, slots: NDArray[np.intp], Y: Floats) -> Floats:
        """Add rows in order; returns the values (n, outputs) of each before it was added."""
        out, (sums, squares) = np.empty((len(slots), self.sums.shape[1])), self.total.tolist()
        rows, targets = slots.tolist(), np.clip(Y[:, : out.shape[1]], -HUGE, HUGE).tolist()
        levels = {slot: [float(self.counts[slot]), *self.sums[slot].tolist()] for slot in rows}
        count = float(self.counts.sum())
        for i, (slot, y) in enumerate(zip(rows, targets, strict=True)):
            level = levels[slot]
            for k, value in enumerate(y):
                out[i, k] = (level[1 + k] + PRIOR * sums[k] / max(count, 1.0)) / (level[0] + PRIOR)
                level[1 + k] += value
                sums[k], squares[k] = sums[k] + value, squares[k] + value * value
            level[0], count = level[0] + 1.0, count + 1.0
        for slot, (n, *found) in levels.items():
            self.counts[slot], self.sums[slot] = n, found
        self.total = np.array([sums, squares])
        return out

    def state_dict(self) -> dict[str, Any]:
        slots = np.flatnonzero(self.counts)
        return {"slots": slots, "counts": self.counts[slots], "sums": self.sums[slots], "total": self.total.copy()}

    @classmethod
    def from_state(cls, new: schema.Entries) -> LevelMeans:
        """Levels that continue from the result of `state_dict`; ValueError where that is damaged."""
        total, slots = new.array("total", (2, None)), new.array("slots", (None,), np.int64)
        out = cls(total.shape[1])
        if len(slots) and (slots.min() < 0 or slots.max() >= SLOTS or len(np.unique(slots)) < len(slots)):
            raise new.damaged("slots", f"distinct numbers below {SLOTS}", slots.tolist()[:10])
        out.counts[slots] = new.array("counts", slots.shape, low=1.0)
        out.sums[slots] = new.array("sums", (len(slots), total.shape[1]))
        out.total = total
        return out
