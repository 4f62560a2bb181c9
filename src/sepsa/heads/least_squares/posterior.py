"""The posterior N(W, σ²B) of the weights of a least-squares head, from its state and counters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sepsa.heads.base.parameters import as_outputs, rows_to_predict
from sepsa.heads.least_squares.math import SAMPLES, LeastSquaresState, square_root
from sepsa.heads.protocols import Posterior
from sepsa.validation import in_range

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def predicted(linear: nn.Linear, state: LeastSquaresState, features: Tensor) -> Tensor:
    """The outputs (..., m) for features (..., in_features)."""
    Phi, W = rows_to_predict(linear, features, state.W)
    return as_outputs(linear, features, Phi @ W.T)


def with_deviation(
    linear: nn.Linear, state: LeastSquaresState, counters: NDArray[np.float64], features: Tensor, noise: float | None
) -> Posterior:
    """The outputs, and the deviation of targets from them: its square is σ²(1 + hᵀBh)."""
    Phi, W = rows_to_predict(linear, features, state.W)
    mean = as_outputs(linear, features, Phi @ W.T)
    T, variance = scaled("return_std", state, counters, noise)
    spread = 1 + (Phi @ T.T).square().sum(1, keepdim=True)
    return Posterior(mean, as_outputs(linear, features, (spread * variance).sqrt()))


def drawn(
    linear: nn.Linear,
    state: LeastSquaresState,
    counters: NDArray[np.float64],
    features: Tensor,
    noise: float | None,
    generator: torch.Generator | None,
) -> Tensor:
    """The outputs of weights drawn from N(W, σ²B)."""
    Phi, W = rows_to_predict(linear, features, state.W)
    T, variance = scaled("sample", state, counters, noise)
    normal = torch.randn(W.shape, dtype=W.dtype, device=W.device, generator=generator)
    weights = W + variance.sqrt()[:, None] * (normal @ T)  # rows of normal @ T have the covariance TᵀT
    return as_outputs(linear, features, Phi @ weights.T)


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
