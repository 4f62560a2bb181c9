"""A table in shards: each worker learns its part into a delta, as bytes, and one head merges the deltas exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from sepsa.heads import RLS, Delta

Batches: TypeAlias = Iterable[tuple[Any, Any]]  # features (n, d) and targets (n, m), arrays or tensors


def zero_head(features: int, outputs: int = 1, **settings: Any) -> RLS:
    """An `RLS` with these settings and zero weights in float64, so that it is the same in every process."""
    linear = nn.Linear(features, outputs, dtype=torch.float64)
    for parameter in linear.parameters():
        nn.init.zeros_(parameter)
    return RLS(**settings).bind(linear)


def learned(new_head: Callable[[], RLS], batches: Batches) -> bytes:
    """What the head that `new_head` makes learns from these batches, for `merged`."""
    head = new_head()
    for features, targets in batches:
        if len(features):
            head.update(as_rows(features), as_rows(targets))
    return head.delta_since().to_bytes()


def merged(head: RLS, deltas: Iterable[bytes]) -> RLS:
    """The head, after it has merged these deltas: the head of one process that learned all their rows."""
    for data in deltas:
        head.merge(Delta.from_bytes(bytes(data)))
    return head


def as_rows(values: Any) -> torch.Tensor:
    """A matrix (n, columns) of float64; a vector has one column."""
    rows = torch.from_numpy(np.require(values, np.float64, "CW"))  # Spark's and Ray's arrays are read-only
    return rows[:, None] if rows.ndim == 1 else rows
