"""The ridge that forgetting has taken and the rule of `sepsa.restoration` gives back, as tensors; that of the bias."""

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


def bias_bounds(bias_ridge: BiasRidge, dtype: torch.dtype) -> tuple[float, float]:
    """The least and the most that the ridge of the bias may be, where it would be that of the weights."""
    if bias_ridge == "ridge":
        return 0.0, math.inf
    return (0.0, _BIAS_RIDGE[dtype]) if bias_ridge is None else (bias_ridge, bias_ridge)
