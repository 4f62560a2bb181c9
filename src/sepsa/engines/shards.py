"""Tables in shards: each worker converts what it learned to bytes, and one head merges the results exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from sepsa.heads import RLS, Delta

Batches: TypeAlias = Iterable[tuple[Any, Any]]  # features (n, d) and targets (n, m), arrays or tensors


def zero_head(features: int, outputs: int = 1, **settings: Any) -> RLS:
    """Return an `RLS` with zero weights in float64, so that every process starts from the same head.

    Args:
        features: Number of features.
        outputs: Number of targets.
        **settings: Arguments of `RLS`.

    Returns:
        The solver, bound to a new `nn.Linear`.
    """
    linear = nn.Linear(features, outputs, dtype=torch.float64)
    for parameter in linear.parameters():
        nn.init.zeros_(parameter)
    return RLS(**settings).bind(linear)


def learned(new_head: Callable[[], RLS], batches: Batches) -> bytes:
    """Return what a new head learns from batches, as bytes for `merged`.

    Args:
        new_head: A function that makes the head from which every worker starts.
        batches: Pairs of features (n, d) and targets (n, m), arrays or tensors.

    Returns:
        A few kilobytes, whatever the number of rows.
    """
    head = new_head()
    for features, targets in batches:
        if len(features):
            head.update(as_rows(features), as_rows(targets))
    return head.delta_since().to_bytes()


def merged(head: RLS, deltas: Iterable[bytes]) -> RLS:
    """Merge the results of workers into a head, which then equals one that has learned all their rows.

    Args:
        head: A head from which the workers started; it is changed.
        deltas: Results of `learned`.

    Returns:
        The head.

    Examples:
        >>> import numpy as np
        >>> from functools import partial
        >>> from sepsa.engines.shards import learned, merged, zero_head
        >>> new_head = partial(zero_head, 2, ridge=1e-6)
        >>> X = np.random.default_rng(0).normal(size=(100, 2))
        >>> y = X @ [[2.0], [-1.0]]
        >>> shards = [(X[:50], y[:50]), (X[50:], y[50:])]
        >>> deltas = [learned(new_head, [shard]) for shard in shards]
        >>> merged(new_head(), deltas).linear.weight.detach().round(decimals=3)
        tensor([[ 2., -1.]], dtype=torch.float64)
    """
    for data in deltas:
        head.merge(Delta.from_bytes(bytes(data)))
    return head


def as_rows(values: Any) -> torch.Tensor:
    """Return values as a float64 matrix, for `RLS.update`.

    Args:
        values: An array, frame or tensor (n, columns) or (n,).

    Returns:
        A tensor (n, columns); a vector has one column.
    """
    rows = torch.from_numpy(np.require(values, np.float64, ["C", "W"]))  # Spark's and Ray's arrays are read-only
    return rows[:, None] if rows.ndim == 1 else rows
