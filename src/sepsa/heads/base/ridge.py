"""The rows that restore forgotten ridge by the rule of `sepsa.restoration`, as tensors.

They are √q e_j with the prior as their target, where q is what coordinate j lacks; symbols as in `least_squares`.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from sepsa.restoration import due as due
from sepsa.restoration import next_cursor as next_cursor

# The ridge of the bias: a number, None for a very small default, or "ridge" for that of the weights.
# With less than the default a first block would lose digits, and 0 has no inverse.
BiasRidge: TypeAlias = float | Literal["ridge"] | None
_BIAS_RIDGE = {torch.float64: 1e-4, torch.float32: 1e-3}
# Coordinates that follow each other are a slice, which costs neither a copy nor a kernel launch.
Coordinates: TypeAlias = Tensor | slice


def coordinates(p: int, count: int, cursor: int | Tensor, device: torch.device) -> Coordinates:
    """The `count` coordinates from `cursor` on, which begin again at 0 after p - 1."""
    if isinstance(cursor, int) and cursor + count <= p:
        return slice(cursor, cursor + count)
    return (cursor + torch.arange(count, device=device)) % p


def count_of(at: Coordinates) -> int:
    """How many coordinates `at` has."""
    return at.stop - at.start if isinstance(at, slice) else len(at)


def lacking(ridge_left: Tensor, ridge: Tensor, at: Coordinates) -> Tensor:
    """q (c,): the ridge that the coordinates `at` lack."""
    return (ridge[at] - ridge_left[at]).clamp(min=0)


def ridge_rows(T: Tensor, W: Tensor, q: Tensor, at: Coordinates, prior: Tensor) -> tuple[Tensor, Tensor]:
    """F (p, c) and E (c, m) of the rows √q e_j with the prior as target, which restore the coordinates `at`."""
    scale = q.sqrt()
    return T[:, at] * scale, ((prior[:, at] - W[:, at]) * scale).T


def restored(ridge_left: Tensor, ridge: Tensor, at: Coordinates) -> Tensor:
    """The ridge (p,) of each coordinate once those `at` have had their turn."""
    ridge_left = ridge_left.clone()
    ridge_left[at] = ridge[at]
    return ridge_left


def bias_bounds(bias_ridge: BiasRidge, dtype: torch.dtype) -> tuple[float, float]:
    """The least and the most that the ridge of the bias may be, where it would be that of the weights."""
    if bias_ridge == "ridge":
        return 0.0, math.inf
    return (0.0, _BIAS_RIDGE[dtype]) if bias_ridge is None else (bias_ridge, bias_ridge)
