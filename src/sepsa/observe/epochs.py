"""How many samples one pass over the data has, told or noticed: the head remembers as many.

At forgetting 1 a sample that is learned in each of k epochs counts as k samples, and the ridge loses its weight. With
λ = 1 - n/N in an update of n samples the head remembers about the N samples of one epoch, each of them once. Where N is
not told, the first samples are watched: it is noticed when all of them have come again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sepsa.heads.base.repeated_samples import hash_of, row_bytes
from sepsa.states import schema

WATCHED = 16  # samples
COUNTED = 4  # repeats of all of them, after which the length is not estimated anew
LIMIT = 2**20  # samples, after which no epoch is expected
SHARE = 3.0  # of the weight of a batch, the least ridge of a default solver once samples come again
LEAST = 0.5  # the least forgetting, for batches that are half of the data or more


class Epoch(NamedTuple):
    """What is known about the length of an epoch; an update makes a new one."""

    length: float | None = None  # samples; None: not known
    told: bool = False
    samples: int = 0  # offered to the head
    batch: int = 0  # the most samples of an update
    keys: tuple[float, ...] = ()  # the sums of the watched samples' inputs, by which most others are told apart
    hashes: tuple[int, ...] = ()  # of the watched samples
    repeats: tuple[int, ...] = ()  # how often each of them has come again

    @property
    def watches(self) -> bool:
        """Whether samples are compared with the first ones."""
        return not self.told and self.samples < LIMIT and (self.length is None or min(self.repeats) < COUNTED)


def noted(epoch: Epoch, identity: Tensor | None, targets: Tensor, n: int) -> Epoch:
    """The knowledge after n rows of the head from samples with these inputs (b, ...), b a divisor of n."""
    epoch = epoch._replace(samples=epoch.samples + n, batch=max(epoch.batch, n))
    if not epoch.watches or identity is None or not is_watchable(identity) or targets.numel() % len(identity):
        return epoch
    sums = identity.detach().reshape(len(identity), -1).numpy().sum(1)
    keys, hashes, repeats = epoch.keys, epoch.hashes, list(epoch.repeats)
    if keys and bool((found := sums[:, None] == keys).any()):
        samples = row_bytes(identity, targets)
        for row, place in zip(*found.nonzero(), strict=True):
            repeats[place] += hash_of(*samples[row]) == hashes[place]
    if len(keys) < WATCHED:
        new = slice(0, WATCHED - len(keys))
        keys = (*keys, *(float(value) if np.isfinite(value) else 0.0 for value in sums[new]))
        hashes = (*hashes, *(hash_of(*sample) for sample in row_bytes(identity[new], targets[new])))
        repeats += [0] * (len(keys) - len(repeats))
    times = min(repeats) if len(keys) == WATCHED else 0
    length = epoch.samples / (1 + times) if times else None
    return epoch._replace(length=length, keys=keys, hashes=hashes, repeats=tuple(repeats))


def is_watchable(inputs: Tensor) -> bool:
    """Whether the host can read the rows of these inputs without waiting for a device or converting them."""
    plain = inputs.is_cpu and inputs.layout is torch.strided and not inputs.is_nested and not inputs.is_quantized
    return plain and not inputs.is_complex() and inputs.dtype != torch.bfloat16


def forgetting(length: float, n: int, features: int) -> float:
    """The λ of an update of n samples with which the head remembers an epoch of this length, or 8 samples a feature."""
    return max(1 - n / max(length, 8 * features), LEAST)


def ridge(batch: int) -> float:
    """The least ridge of a default solver once samples come again, for batches of this size."""
    return max(batch / SHARE, 1.0)


def written(epoch: Epoch) -> dict[str, Any]:
    """What was noticed, as a saved state has it."""
    return {
        "length": epoch.length or 0.0,
        "samples": epoch.samples,
        "batch": epoch.batch,
        "keys": list(epoch.keys),
        "hashes": list(epoch.hashes),
        "repeats": list(epoch.repeats),
    }


def read(name: str, saved: object) -> Epoch:
    """What `written` wrote; a damaged one is refused."""
    entry = schema.read(name, saved, {"length", "samples", "batch", "keys", "hashes", "repeats"})
    keys = entry.items("keys").numbers()
    hashes, repeats = (entry.items(key, len(keys)) for key in ("hashes", "repeats"))
    return Epoch(
        length=entry.number("length", low=0.0) or None,
        samples=entry.integer("samples"),
        batch=entry.integer("batch"),
        keys=tuple(keys),
        hashes=tuple(hashes.integer(i, low=-(2**63)) for i in range(len(keys))),
        repeats=tuple(repeats.integer(i) for i in range(len(keys))),
    )
