"""The posterior N(W, σ²B) of a head's weights, given its data and its prior: predictions, deviations and samples."""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
from torch import Tensor

from sepsa.heads.base.head import OwnsHead
from sepsa.heads.base.parameters import rows_to_predict
from sepsa.heads.protocols import Posterior
from sepsa.validation import in_range


class NormalPosterior(OwnsHead):
    """`predict` and `sample` of heads that keep W (m, p) and B (p, p) of squared loss."""

    def _label(self) -> str:
        return "RLS"

    def _weights(self) -> Tensor:
        """W (m, p), as the last update left it."""
        raise NotImplementedError

    def _spread(self) -> tuple[Tensor, Tensor, float]:
        """T with TᵀT = B, the minimum (m,) of the objective, and how many samples it is of."""
        raise NotImplementedError

    @overload
    def predict(
        self, features: Tensor, return_std: Literal[False] = False, *, noise: float | None = None
    ) -> Tensor: ...
    @overload
    def predict(self, features: Tensor, return_std: Literal[True], *, noise: float | None = None) -> Posterior: ...
    @torch.no_grad()
    def predict(self, features: Tensor, return_std: bool = False, *, noise: float | None = None) -> Tensor | Posterior:
        """Predict targets, on request with their standard deviation.

        Args:
            features: Inputs of the head (..., in_features).
            return_std: Whether to return the predictive standard deviation too; its square is σ²(1 + hᵀBh), with h the
                features and B the `covariance`.
            noise: σ, the standard deviation of the targets' noise. None: estimated from the errors made while learning,
                which needs at least one update.

        Returns:
            Predictions (..., out_features), or a `Posterior(mean, std)` of two such tensors.
        """
        Phi, W = self._rows(features)
        shape, dtype = (*features.shape[:-1], len(W)), self._head().weight.dtype
        mean = (Phi @ W.T).reshape(shape).to(dtype)
        if not return_std:
            return mean
        T, variance = self._scaled("return_std", noise)
        spread = 1 + (Phi @ T.T).square().sum(1, keepdim=True)
        return Posterior(mean, (spread * variance).sqrt().reshape(shape).to(dtype))

    @torch.no_grad()
    def sample(
        self, features: Tensor, *, noise: float | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Predict with weights drawn from their posterior N(W, σ²B), for Thompson sampling.

        Args:
            features: Inputs of the head (..., in_features). All of them see the same weights.
            noise: σ as for `predict`. It scales the posterior and is not added to the result.
            generator: Source of randomness; None for torch's default.

        Returns:
            Predictions (..., out_features).
        """
        Phi, W = self._rows(features)
        T, variance = self._scaled("sample", noise)
        normal = torch.randn(W.shape, dtype=W.dtype, device=W.device, generator=generator)
        drawn = W + variance.sqrt()[:, None] * (normal @ T)  # rows of normal @ T have the covariance TᵀT
        linear = self._head()
        return (Phi @ drawn.T).reshape(*features.shape[:-1], len(W)).to(linear.weight.dtype)

    def _rows(self, features: Tensor) -> tuple[Tensor, Tensor]:
        W = self._weights()
        return rows_to_predict(self._head(), features, W)

    def _scaled(self, asked: str, noise: float | None) -> tuple[Tensor, Tensor]:
        """T, and σ² (m,)."""
        if noise is not None:
            in_range("noise", noise, 0.0, math.inf)
        T, energy, samples = self._spread()
        if noise is not None:
            return T, torch.full_like(energy, noise**2)
        if not samples:
            raise ValueError(f"{asked} needs at least one update, or noise=: before it the noise is unknown")
        return T, energy.clamp(min=0) / samples  # rounding can leave a perfect fit below zero
