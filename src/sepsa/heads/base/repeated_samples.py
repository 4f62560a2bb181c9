"""Which samples of an update were learned before: of those, a tenth, selected by a hash, is held out for validation."""

from __future__ import annotations

import hashlib
import zlib
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sepsa.heads.math.candidates import RowMasks

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# One sample in this number is held out once samples repeat.
HELD_OUT = 10
# All samples are scored again after this number of new ones in a row among those that would be held out.
UNREPEATED = 50


def row_bytes(inputs: Tensor, targets: Tensor) -> list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
    """The bytes of every sample: its row of the inputs and its rows of the targets."""
    n = len(inputs)
    parts = [
        x.detach().cpu().reshape(n, -1).clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy()
        for x in (inputs, targets)
    ]
    return list(zip(*parts, strict=True))


def code_of(inputs: NDArray[np.uint8], outputs: NDArray[np.uint8], salt: int) -> int:
    """The code that decides whether a sample is held out when it repeats; another salt selects another tenth."""
    return zlib.crc32(outputs.data, zlib.crc32(inputs.data, salt))


def hash_of(inputs: NDArray[np.uint8], outputs: NDArray[np.uint8]) -> int:
    """The hash that identifies a sample."""
    row = inputs.tobytes() + outputs.tobytes()
    return int.from_bytes(hashlib.blake2b(row, digest_size=8).digest(), "little", signed=True)


class BatchSplit(NamedTuple):
    """Which rows of an update are scored and which are held out, as positions."""

    scored: list[int] | None  # None: all of them
    held_out: list[int]
    ages: list[int]  # updates since each held-out row was learned
    new_hashes: list[int]  # to remember
    first_code: int
    unrepeated: int

    def held_out_mask(self, n: int, device: torch.device) -> Tensor | None:
        """Which of n rows are held out, as booleans; None where none is."""
        return mask(self.held_out, n, device) if self.held_out else None

    def masks(self, n: int, device: torch.device) -> RowMasks:
        """The split of n rows as tensors."""
        rows = range(n) if self.scored is None else self.scored
        learns, scored = len(self.held_out) < n, mask(rows, n, device) if rows else None
        if not self.held_out:
            return RowMasks(learns, scored)
        positions, ages = torch.tensor([self.held_out, self.ages], device=device)
        return RowMasks(learns, scored, self.held_out_mask(n, device), positions, ages)


def mask(positions: list[int] | range, n: int, device: torch.device) -> Tensor:
    """These positions among n as booleans."""
    chosen = set(positions)
    return torch.tensor([row in chosen for row in range(n)], device=device)


def split_batch(
    seen: dict[int, int], steps: int, first: int, unrepeated: int, salt: int, identity: Tensor, targets: Tensor, n: int
) -> BatchSplit:
    """Split n samples by `seen`, the update that learned each hash, which is not changed.

    `first` is the code of the first sample of all, -1 before it, and `unrepeated` counts the new samples of the tenth
    since one of them repeated.
    """
    span = n // len(identity)
    fold: list[int] = []
    held_out: list[int] = []
    ages: list[int] = []
    new: list[int] = []
    for i, sample in enumerate(row_bytes(identity, targets)):
        code = code_of(*sample, salt)
        if first < 0:
            first = code  # the first sample of all is in the tenth, so that there is one
        if code % HELD_OUT and code != first:
            continue
        positions = range(i * span, (i + 1) * span)
        fold.extend(positions)
        name = hash_of(*sample)
        if (learned := seen.get(name)) is None:
            unrepeated += 1
            new.append(name)
        else:
            unrepeated = 0
            held_out.extend(positions)
            ages.extend([steps - learned] * span)
    return BatchSplit(None if unrepeated >= UNREPEATED else fold, held_out, ages, new, first, unrepeated)
