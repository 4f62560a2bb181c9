"""The rule by which forgotten ridge is restored, which every backend follows.

Forgetting scales the whole curvature by λ in each update, the ridge included. An update therefore restores the full
ridge of the next few coordinates, in rotation: as rows √q e_j with the prior as their target, where q is what
coordinate j lacks. So many coordinates are restored per update that none ever falls below half of its ridge.

Symbols are those of `least_squares`.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

# The ridge of the bias: a number, None for a very small default, or "ridge" for that of the weights.
# With less than the default a first block would lose digits, and 0 has no inverse.
BiasRidge: TypeAlias = float | Literal["ridge"] | None
_BIAS_RIDGE = {torch.float64: 1e-4, torch.float32: 1e-3}
# Coordinates that follow each other are a slice, which costs neither a copy nor a kernel launch.
Coordinates: TypeAlias = Tensor | slice


def due(p: int, forgetting: float, step: int = 0, at_least: int = 0) -> int:
    """How many of p coordinates update number `step` restores, so that none ever falls below half of its ridge.

    Forgetting halves a ridge in -1/log2(λ) updates, so in that many each coordinate must have its turn. Where that is
    less than one coordinate an update, one gets its turn every so many updates, and without a `step` in each of them.
    Kernels compile this function too.
    """
    count = 0
    if forgetting < 1.0:
        need = -p * math.log2(forgetting)
        count = math.ceil(need) if need >= 1.0 or step % math.floor(1.0 / need) == 0 else 0
    return min(p, max(count, at_least))


def coordinates(p: int, count: int, cursor: int | Tensor, device: torch.device) -> Coordinates:
    """The `count` coordinates from `cursor` on, which begin again at 0 after p - 1."""
    if isinstance(cursor, int) and cursor + count <= p:
        return slice(cursor, cursor + count)
    return (cursor + torch.arange(count, device=device)) % p


def next_cursor(cursor: Any, count: Any, p: int) -> Any:
    """The coordinate `count` after `cursor`, of p in rotation; numbers or tensors, and compiled in kernels."""
    return (cursor + count) % p


def count_of(at: Coordinates) -> int:
    """How many coordinates `at` has."""
    return at.stop - at.start if isinstance(at, slice) else len(at)


def lack(ridge: float, left: float) -> float:
    """The ridge that a coordinate lacks, of which so much is left. Kernels compile this function too."""
    return max(0.0, ridge - left)


def lacking(ridge_left: Tensor, ridge: Tensor, at: Coordinates) -> Tensor:
    """q (c,): the ridge that the coordinates `at` lack."""
    return (ridge[at] - ridge_left[at]).clamp(min=0)


def ridge_rows(T: Tensor, W: Tensor, q: Tensor, at: Coordinates, prior: Tensor) -> tuple[Tensor, Tensor]:
    """F (p, c) and E (c, m) of the rows √q e_j with the prior as target, which restore the coordinates `at`."""
    scale = q.sqrt()
    return T[:, at] * scale, ((prior[:, at] - W[:, at]) * scale).T


def restored(ridge_left: Tensor, ridge: Tensor, at: Coordinates) -> Tensor:
    """The ridge (p,) of each coordinate once those `at` have all of it."""
    ridge_left = ridge_left.clone()
    ridge_left[at] = ridge[at]
    return ridge_left


def bias_bounds(bias_ridge: BiasRidge, dtype: torch.dtype) -> tuple[float, float]:
    """The least and the most that the ridge of the bias may be, where it would be that of the weights."""
    if bias_ridge == "ridge":
        return 0.0, math.inf
    return (0.0, _BIAS_RIDGE[dtype]) if bias_ridge is None else (bias_ridge, bias_ridge)
