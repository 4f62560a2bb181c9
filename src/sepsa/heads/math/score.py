"""Which of several heads predicts best: faded sums of their errors at samples before they learn them.

`add` and `best` compute with Python's numbers, `add_captured` and `best_captured` with tensors of which they read no
value, so that they run inside a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# Each update multiplies the weight of all errors before it by this factor.
FADING = 0.98
# Mean errors that differ by at most this number of standard errors count as equal, and the longer memory wins.
CERTAINTY = 0.5
# An error is clipped at this multiple of the smallest mean error: how badly a head failed while the data changed says
# nothing about it afterwards.
OUTLIER = 4.0
# Errors below this share of the targets' mean square count as equal.
EXACT = 1e-6
# The lower bound of 1 - λ^age φᵀBφ, which may be negative where the features have moved since; float32 errors divided
# by it still have three digits.
LEAST = 1e-4
LARGEST = 1e100  # the error of a head that is not finite


class Score(NamedTuple):
    """Faded sums over updates, for J heads: numbers and lists, or tensors."""

    count: Any  # the updates
    sums: Any  # (J,): their errors
    products: Any  # (J, J): products of the errors of two heads


def start(heads: int) -> Score:
    """The score before any update."""
    return Score(0.0, [0.0] * heads, [[0.0] * heads] * heads)


def add(score: Score, errors: Sequence[float], size: float = 0.0) -> Score:
    """The score after an update with these errors (J,), at targets whose mean square is `size`."""
    count, sums, products = score
    limit = min(OUTLIER * max(min(sums) / count, EXACT * size), LARGEST) if count else LARGEST
    clipped = [min(error, limit) if error < LARGEST else limit for error in errors]  # a NaN is not smaller
    return Score(
        FADING * count + 1.0,
        [FADING * total + error for total, error in zip(sums, clipped, strict=True)],
        [
            [FADING * product + own * error for product, error in zip(row, clipped, strict=True)]
            for row, own in zip(products, clipped, strict=True)
        ],
    )


def best(score: Score, memory: Sequence[float], active: int) -> int:
    """Of the heads whose errors exceed the smallest by no more than chance, the best of those that remember most.

    `memory` (J,) is how long each remembers, and `active` the head that was best before. The mean of the differences
    from the head with the smallest error is compared with its standard error.
    """
    n, sums, products = score
    if n <= 1:
        return active
    least = sums.index(min(sums))
    equal = []
    for j, (own, row) in enumerate(zip(sums, products, strict=True)):
        mean = (own - sums[least]) / n
        square = (row[j] + products[least][least] - 2 * row[least]) / n
        if mean <= CERTAINTY * math.sqrt(max(square - mean * mean, 0.0) / (n - 1)):
            equal.append(j)
    longest = max(memory[j] for j in equal)
    equal = [j for j in equal if memory[j] == longest]
    return min(equal, key=lambda j: (sums[j], j != active))


def add_captured(score: Score, errors: Tensor, size: Tensor) -> Score:
    """`add` on a device."""
    errors = errors.nan_to_num(nan=LARGEST, posinf=LARGEST)
    usual = torch.maximum(score.sums.min() / score.count.clamp(min=0.01), EXACT * size)
    errors = errors.minimum(torch.where(score.count > 0, (OUTLIER * usual).clamp(max=LARGEST), LARGEST))
    products = FADING * score.products + errors[:, None] * errors
    return Score(FADING * score.count + 1.0, FADING * score.sums + errors, products)


def best_captured(score: Score, memory: Tensor, active: Tensor) -> Tensor:
    """`best` on a device."""
    count, sums, products = score
    n, order = count.clamp(min=1.0), torch.arange(len(sums), device=sums.device)
    squares = products.flatten()[:: len(order) + 1]
    least = sums.argmin()[None]
    mean = (sums - sums.min()) / n
    square = (squares + squares.index_select(0, least) - 2 * products.index_select(0, least)[0]) / n
    deviation = (square - mean * mean).clamp(min=0.0) / (n - 1.0).clamp(min=1e-9)
    equal = mean <= CERTAINTY * deviation.sqrt()
    equal = equal & (memory == memory.where(equal, -1.0).max())
    losses = sums.where(equal, math.inf)
    ranks = torch.where(losses == losses.min(), order.where(order != active, -1), len(order))  # the active one first
    return torch.where(count.reshape(()) > 1.0, ranks.argmin(), active)


def squared_errors(weights: Sequence[Any], biases: Sequence[Any], x: Any, y: Any) -> Any:
    """The mean squared errors (n, J) of heads, each (m, k) and (m,) or none, at rows x (n, k) with targets y (n, m).

    Arrays of NumPy, which takes less time for small ones, or tensors.
    """
    xp: Any = torch if isinstance(x, Tensor) else np
    outputs = x @ xp.concatenate(weights).T
    if biases:
        outputs += xp.concatenate(biases)
    errors = outputs.reshape(len(x), len(weights), -1) - y[:, None]
    return (errors * errors).mean(-1)


def share_left(leverage: Any, forgetting: Any, age: Any, weight: Any = 1.0) -> Any:
    """What is left of the error at a sample after it was learned: 1 - ωλ^age φᵀBφ, at least `LEAST`.

    A head that learned a sample of weight ω `age` updates ago errs at it by this share of the error that it would make
    without it; `leverage` is φᵀBφ under its present covariance B.
    """
    return (1.0 - weight * forgetting**age * leverage).clip(min=LEAST)
