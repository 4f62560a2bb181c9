"""Which samples of an update were learned before: a fixed tenth of all is told apart by a hash of the raw row."""

from __future__ import annotations

import hashlib
import zlib
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# One sample in so many is held out once samples repeat.
HELD_OUT = 10
# Samples not held out are scored again after so many new ones among those that would be.
UNREPEATED = 50


def code_of(inputs: NDArray[np.uint8], outputs: NDArray[np.uint8], salt: int) -> int:
    """By which a sample, as bytes, is in the fold or not; another one with another salt."""
    return zlib.crc32(outputs.data, zlib.crc32(inputs.data, salt))


def name_of(inputs: NDArray[np.uint8], outputs: NDArray[np.uint8]) -> int:
    """By which a sample, as bytes, is known again."""
    row = inputs.tobytes() + outputs.tobytes()
    return int.from_bytes(hashlib.blake2b(row, digest_size=8).digest(), "little", signed=True)


class Lookup(NamedTuple):
    """What is known of the samples of one update: positions among its rows."""

    scored: list[int] | None  # None: all of them
    held: list[int]
    ages: list[int]  # updates since each held sample was learned
    first_seen: list[int]  # hashes to remember
    first_code: int
    unrepeated: int

    def mask(self, n: int, device: torch.device) -> Tensor | None:
        """Which of n rows are held out, as booleans; None where none is."""
        if not self.held:
            return None
        held = set(self.held)
        return torch.tensor([row in held for row in range(n)], device=device)


def look_up(
    seen: dict[int, int], steps: int, first: int, unrepeated: int, salt: int, identity: Tensor, targets: Tensor, n: int
) -> Lookup:
    """Which of n samples are in `seen`, by the update that learned them; nothing is remembered yet.

    `first` is the code of the first sample of all, -1 before it, and `unrepeated` counts those of the tenth that came
    new since one came again.
    """
    b, span = len(identity), n // len(identity)
    inputs, outputs = (
        x.detach().cpu().contiguous().reshape(b, -1).view(torch.uint8).numpy() for x in (identity, targets)
    )
    fold: list[int] = []
    held: list[int] = []
    ages: list[int] = []
    new: list[int] = []
    for i in range(b):
        code = code_of(inputs[i], outputs[i], salt)
        if first < 0:
            first = code  # the first sample of all is in the fold, so that there is one
        if code % HELD_OUT and code != first:
            continue
        positions = range(i * span, (i + 1) * span)
        fold.extend(positions)
        name = name_of(inputs[i], outputs[i])
        if (learned := seen.get(name)) is None:
            unrepeated += 1
            new.append(name)
        else:
            unrepeated = 0
            held.extend(positions)
            ages.extend([steps - learned] * span)
    return Lookup(None if unrepeated >= UNREPEATED else fold, held, ages, new, first, unrepeated)
