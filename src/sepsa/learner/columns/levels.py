"""The levels of a text column with many: which were seen before, and the running mean of the target of each.

The value of a row is (Σy + `PRIOR`·ȳ)/(n + `PRIOR`) over the n rows of its level before it, ȳ being the mean over all
rows before it: the target of the row itself is never in it. A level has the slot of its hash, and one whose slot is
taken has no mean of its own: memory is bounded, and levels do not mix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sepsa.learner.arithmetic.robust import HUGE
from sepsa.learner.memory.parts import Floats
from sepsa.learner.scales import reciprocal

SLOTS = 1 << 14
PRIOR = 10.0  # rows


def keys_of(texts: Sequence[str]) -> list[int]:
    """A positive number for each text, the same in every process; modulo `SLOTS` it is the text's slot."""
    digests = (hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest() for text in texts)
    return [(int.from_bytes(digest, "little") >> 2) + 1 for digest in digests]


class LevelMeans:
    """Rows and sums of targets of each level of a column, for its first `outputs` targets.

    `start` is the row of the call with which the first of them comes.
    """

    def __init__(self, outputs: int, start: int = 0) -> None:
        self.start = start
        self.keys = np.zeros(SLOTS, np.int64)  # of the level that has the slot; 0: none
        self.counts, self.sums = np.zeros(SLOTS), np.zeros((SLOTS, outputs))
        self.rows, self.total = 0, np.zeros((2, outputs))  # of all levels: rows, sums of targets and of their squares

    def values(self, keys: NDArray[np.int64]) -> Floats:
        """The values (n, outputs) of levels by their keys."""
        slots = keys % SLOTS
        mine = self.keys[slots] == keys
        mean = self.total[0] / max(self.rows, 1)
        sums, counts = np.where(mine[:, None], self.sums[slots], 0.0), np.where(mine, self.counts[slots], 0.0)
        return (sums + PRIOR * mean) / (counts + PRIOR)[:, None]

    def scale(self) -> tuple[Floats, Floats]:
        """Mean and inverse deviation (outputs,) of all targets so far."""
        mean, square = self.total / max(self.rows, 1)
        return mean, reciprocal(np.sqrt(np.maximum(square - mean**2, 0.0)))

    def learn(self, keys: NDArray[np.int64], Y: Floats) -> Floats:
        """Add rows in order; returns the values (n, outputs) of each before it was added."""
        out, (sums, squares) = np.empty((len(keys), self.sums.shape[1])), self.total.tolist()
        targets = np.clip(Y[:, : out.shape[1]], -HUGE, HUGE).tolist()
        levels: dict[int, list[float]] = {}  # whether the level has its slot, its rows and its sums
        for i, (key, y) in enumerate(zip(keys.tolist(), targets, strict=True)):
            if key not in levels:
                slot = key % SLOTS
                self.keys[slot] = self.keys[slot] or key
                mine = float(self.keys[slot] == key)
                levels[key] = [mine, mine * float(self.counts[slot]), *(mine * self.sums[slot]).tolist()]
            level = levels[key]
            for k, value in enumerate(y):
                out[i, k] = (level[2 + k] + PRIOR * sums[k] / max(self.rows, 1)) / (level[1] + PRIOR)
                level[2 + k] += level[0] * value
                sums[k], squares[k] = sums[k] + value, squares[k] + value * value
            level[1] += level[0]
            self.rows += 1
        for key, (mine, n, *found) in levels.items():
            if mine:
                self.counts[key % SLOTS], self.sums[key % SLOTS] = n, found
        self.total = np.array([sums, squares])
        return out

    def state_dict(self) -> dict[str, Any]:
        slots = np.flatnonzero(self.keys)
        arrays = {"keys": self.keys[slots], "counts": self.counts[slots], "sums": self.sums[slots]}
        return arrays | {"rows": self.rows, "total": self.total}

    @classmethod
    def from_state(cls, outputs: int, state: dict[str, Any]) -> LevelMeans:
        """Levels that continue from the result of `state_dict`."""
        out, slots = cls(outputs), state["keys"] % SLOTS
        for name in ("keys", "counts", "sums"):
            vars(out)[name][slots] = state[name]
        out.rows, out.total = state["rows"], state["total"]
        return out
