"""Which of several heads predicts best: faded sums of their errors at samples before they learn them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sepsa.candidates import exceeds

# Each update multiplies the weight of all errors before it by this factor.
FADING = 0.98
# Mean errors that differ by at most this number of standard errors count as equal, and the longer memory wins.
CERTAINTY = 0.5
# An error is clipped at this multiple of the smallest mean error: how badly a head failed while the data changed says
# nothing about it afterwards.
OUTLIER = 4.0
# Errors below this share of the targets' mean square count as equal.
EXACT = 1e-6
LARGEST = 1e100  # the error of a head that is not finite


class Score(NamedTuple):
    """Faded sums over updates, for J heads."""

    updates: float
    sums: list[float]  # (J,): their errors
    products: list[list[float]]  # (J, J): products of the errors of two heads


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
        if not exceeds(mean, square, 1.0 / (n - 1), 1.0, CERTAINTY):
            equal.append(j)
    longest = max(memory[j] for j in equal)
    equal = [j for j in equal if memory[j] == longest]
    return min(equal, key=lambda j: (sums[j], j != active))


def squared_errors(weights: Sequence[Tensor], biases: Sequence[Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The mean squared errors (n, J) of heads, each (m, k) and (m,) or none, at rows x (n, k) with targets y (n, m)."""
    outputs = x @ torch.cat(list(weights)).T
    if biases:
        outputs += torch.cat(list(biases))
    errors = outputs.reshape(len(x), len(weights), -1) - y[:, None]
    return (errors * errors).mean(-1)
