"""The posterior N(W, σ²B) of the weights of a least-squares head, from its state and counters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sepsa.heads.least_squares.math import SAMPLES, LeastSquaresState, square_root
from sepsa.validation import in_range

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def scaled(
    asked: str, state: LeastSquaresState, counters: NDArray[np.float64], noise: float | None
) -> tuple[Tensor, Tensor]:
    """T, and σ² (m,): `noise` squared, or estimated from the errors made while learning."""
    if noise is not None:
        in_range("noise", noise, 0.0, math.inf)
    T, samples = square_root(state), float(counters[SAMPLES])
    if noise is not None:
        return T, torch.full_like(state.energy, noise**2)
    if not samples:
        raise ValueError(f"{asked} needs at least one update, or noise=: before it the noise is unknown")
    return T, state.energy.clamp(min=0) / samples  # rounding can leave a perfect fit below zero
