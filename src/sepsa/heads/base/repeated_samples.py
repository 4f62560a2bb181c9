"""Which samples of an update were learned before: of those, a tenth, selected by a hash, is held out for validation.

A head's error at a sample that it has not learned is unbiased. From the second epoch on no sample is new: heads have
learned all of them, and so has the body that made the features, which favours heads that overfit. So a fixed tenth of
all samples, selected by a hash of the raw row, is learned the first time it comes and never again, neither by the heads
nor by the body, and only this tenth is scored while samples repeat.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sepsa.states.schema import Entries

# One sample in this number is held out once samples repeat.
HELD_OUT = 10
# All samples are scored again after this number of new ones in a row among those that would be held out.
UNREPEATED = 50
# How many hashes of held-out samples, a tenth of the data set, are remembered.
LIMIT = 2**17


def row_bytes(inputs: Tensor, targets: Tensor) -> list[tuple[bytes, bytes]]:
    """The bytes of every sample: its row of the inputs and its rows of the targets."""
    n, parts = inputs.shape[0], []
    for x in (inputs, targets):
        x = x.view(torch.int16) if x.dtype == torch.bfloat16 else x  # which NumPy has not
        whole = x.numpy(force=True).tobytes()
        size = len(whole) // n
        parts.append([whole[i : i + size] for i in range(0, n * size, size)])
    return list(zip(*parts, strict=True))


def code_of(inputs: bytes, outputs: bytes, salt: int) -> int:
    """The code that decides whether a sample is held out when it repeats; another salt selects another tenth."""
    return zlib.crc32(outputs, zlib.crc32(inputs, salt))


def hash_of(inputs: bytes, outputs: bytes) -> int:
    """The hash that identifies a sample."""
    return int.from_bytes(hashlib.blake2b(inputs + outputs, digest_size=8).digest(), "little", signed=True)


class BatchSplit(NamedTuple):
    """Which rows of an update are scored and which are held out, as positions, and what is known after it."""

    scored: list[int] | None  # None: all of them
    held_out: list[int]
    learned: list[int]  # the updates that learned those held out
    new_hashes: list[int]  # to remember
    first: int
    unrepeated: int


class SeenSamples:
    """The samples of the tenth that a head has learned."""

    def __init__(self, salt: int) -> None:
        self.salt = salt
        self.first = -1  # the code of the first sample of all, which is in the tenth, so that there is one
        self.unrepeated = UNREPEATED  # new samples of the tenth since one of them repeated
        self.hashes: dict[int, int] = {}  # the update that learned each, in the order in which they came

    def split(self, identity: Tensor, targets: Tensor, n: int) -> BatchSplit:
        """Split n rows of samples, each recognized by a row of `identity` (b, ...), b a divisor of n."""
        span, first = n // identity.shape[0], self.first
        fold: list[int] = []
        held_out: list[int] = []
        learned: list[int] = []
        new: list[int] = []
        samples = row_bytes(identity, targets)
        codes = [code_of(*sample, self.salt) for sample in samples]
        first = codes[0] if first < 0 else first
        for i, code in enumerate(codes):
            if code % HELD_OUT and code != first:
                continue
            positions = range(i * span, (i + 1) * span)
            fold.extend(positions)
            name = hash_of(*samples[i])
            if name in self.hashes:
                held_out.extend(positions)
                learned.extend([self.hashes[name]] * span)
            else:
                new.append(name)
        unrepeated = 0 if held_out else self.unrepeated + len(new)
        return BatchSplit(fold if unrepeated < UNREPEATED else None, held_out, learned, new, first, unrepeated)

    def accept(self, split: BatchSplit, step: int) -> None:
        """Remember the samples of the update with this number; safe to run twice."""
        self.first, self.unrepeated = split.first, split.unrepeated
        self.hashes.update(dict.fromkeys(split.new_hashes[: max(0, LIMIT - len(self.hashes))], step))

    def checkpoint(self) -> tuple[int, int, int]:
        """What `rollback` needs."""
        return self.first, self.unrepeated, len(self.hashes)

    def rollback(self, checkpoint: tuple[int, int, int]) -> None:
        """Forget the samples that came after a checkpoint."""
        self.first, self.unrepeated, count = checkpoint
        for name in list(self.hashes)[count:]:
            self.hashes.pop(name, None)

    def state_dict(self) -> dict[str, Any]:
        """What a saved state has."""
        hashes, learned = (torch.tensor(list(x), dtype=torch.int64) for x in (self.hashes, self.hashes.values()))
        numbers = {"salt": self.salt, "first": self.first, "unrepeated": self.unrepeated}
        return numbers | {"hashes": hashes, "learned": learned}


def read(saved: Entries) -> SeenSamples:
    """The samples that `SeenSamples.state_dict` saved."""
    seen = SeenSamples(saved.integer("salt", 0, 2**32 - 1))
    seen.first = saved.integer("first", -1, 2**32 - 1)
    seen.unrepeated = saved.integer("unrepeated", 0)
    hashes = saved.tensor("hashes", (None,), torch.int64)
    learned = saved.tensor("learned", (len(hashes),), torch.int64)
    seen.hashes = dict(zip(hashes.tolist(), learned.tolist(), strict=True))
    return seen


# ---------------------------------------------------------------------- inside a CUDA graph


class DatasetIndex:
    """What the host finds by hashing the rows of a data set, on the device, where samples are known by their rows."""

    def __init__(self, inputs: Tensor, targets: Tensor, seen: SeenSamples) -> None:
        device, self.key = inputs.device, key_of(inputs, targets)
        samples = row_bytes(inputs, targets)
        self.hashes = [hash_of(*sample) for sample in samples]
        self.rows: dict[int, int] = {}  # of each hash, the first
        for row, name in enumerate(self.hashes):
            self.rows.setdefault(name, row)
        self.codes = torch.tensor([code_of(*sample, seen.salt) for sample in samples]).to(device)
        self.first_rows = torch.tensor([self.rows[name] for name in self.hashes]).to(device)
        self.learned = torch.zeros_like(self.codes)  # the update that learned each; 0: none
        self.numbers = torch.zeros(2, dtype=torch.int64, device=device)  # `first` and `unrepeated` of `SeenSamples`

    def refill(self, inputs: Tensor, targets: Tensor, seen: SeenSamples) -> None:
        """Index other rows in the same memory."""
        other = DatasetIndex(inputs, targets, seen)
        self.key, self.hashes, self.rows = other.key, other.hashes, other.rows
        self.codes.copy_(other.codes)
        self.first_rows.copy_(other.first_rows)

    def load(self, seen: SeenSamples) -> None:
        """Copy from the host which samples were learned."""
        self.learned.copy_(torch.tensor([seen.hashes.get(name, 0) for name in self.hashes]))
        self.numbers.copy_(torch.tensor([seen.first, seen.unrepeated]))

    def read(self, seen: SeenSamples) -> None:
        """Copy to the host which samples were learned."""
        learned = self.learned.tolist()
        new = sorted((learned[row], name) for name, row in self.rows.items() if learned[row])
        seen.first, seen.unrepeated = self.numbers.tolist()
        for step, name in new:
            if len(seen.hashes) < LIMIT:
                seen.hashes.setdefault(name, step)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `split_rows` and `accept_rows` take."""
        return self.codes, self.first_rows, self.learned, self.numbers


class RowSplit(NamedTuple):
    """What is known of the rows (n,) of an update."""

    scored: Tensor  # whether each is scored
    held_out: Tensor  # whether it is held out
    learned: Tensor  # the update that learned it; 0: none
    names: Tensor  # the first row that is equal to it
    new: Tensor  # whether it is to be remembered
    numbers: Tensor  # (2,): those of the index after this update


def split_rows(rows: Tensor, codes: Tensor, first_rows: Tensor, learned: Tensor, numbers: Tensor) -> RowSplit:
    """Which of these rows (n,) of a data set are scored and which are held out."""
    code, names = codes[rows], first_rows[rows]
    before = learned[names]
    known = before > 0
    first = torch.where(numbers[0] < 0, code[0], numbers[0])
    fold = (code % HELD_OUT == 0) | (code == first)
    held_out, new = fold & known, fold & ~known
    unrepeated = torch.where(held_out.any(), 0, numbers[1] + new.sum())
    following = torch.stack([first, unrepeated])
    return RowSplit(fold | (unrepeated >= UNREPEATED), held_out, before, names, new, following)


def accept_rows(learned: Tensor, numbers: Tensor, split: RowSplit, valid: Tensor, step: Tensor) -> None:
    """Remember the rows of a split as learned by this update, where `valid` (0-d) says so."""
    learned.scatter_reduce_(0, split.names, torch.where(split.new & valid, step, 0), "amax")
    numbers.copy_(torch.where(valid, split.numbers, numbers))


def key_of(inputs: Tensor, targets: Tensor) -> tuple[Any, ...]:
    """A key that changes when a data set is at another address or was written to."""
    versions = (0 if x.is_inference() else x._version for x in (inputs, targets))
    return *place_of(inputs, targets), *versions


def place_of(inputs: Tensor, targets: Tensor) -> tuple[Any, ...]:
    """Where a data set lies."""
    return tuple((x.data_ptr(), tuple(x.shape), x.dtype) for x in (inputs, targets))
