"""What the state of a least-squares head tells: the posterior N(W, σ²B) of its weights, its size and its health."""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
from torch import Tensor

from sepsa.heads.backends.held_state import HeldByBackend
from sepsa.heads.base import health
from sepsa.heads.base.parameters import as_outputs, rows_to_predict
from sepsa.heads.math import least_squares
from sepsa.heads.math.least_squares import SAMPLES, STEPS
from sepsa.heads.protocols import Posterior
from sepsa.validation import in_range


class NormalPosterior(HeldByBackend):
    """`predict`, `sample`, `covariance` and `health` of `RLS`."""

    @property
    def steps(self) -> int:
        """The number of updates that the head has learned."""
        return int(self._read()[1][STEPS])

    @property
    def samples(self) -> float:
        """The number of samples that the head remembers: the sum of their weights times forgetting^age."""
        return float(self._read()[1][SAMPLES])

    @property
    def ridge_left(self) -> Tensor:
        """The ridge (p,) of each coordinate at present: between half of its setting and all of it."""
        return self._read()[0].ridge_left.clone()

    def objective(self) -> Tensor:
        """Return the minimum (m,) of the objective, which the head's weights attain, one number per output."""
        return self._read()[0].energy.clone()

    @torch.no_grad()
    def covariance(self) -> Tensor:
        """Return B (p, p), the inverse of the curvature A; a bias is the last coordinate."""
        T = least_squares.square_root(self._read()[0])
        B = T.T @ T
        return (B + B.T) / 2

    @torch.no_grad()
    def health(self) -> dict[str, float]:
        """Return numbers that show why a run goes wrong, to log about every hundred steps.

        They are `condition`, `smallest_eigenvalue`, `effective_samples` and `dead_features`; docs/how-to-choose.md
        explains each and what to do. The cost is a singular value decomposition of a p x p matrix.
        """
        state, counters = self._read()
        return health.report(least_squares.square_root(state), state.ridge_left, float(counters[SAMPLES]))

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
        linear = self._head()
        Phi, W = rows_to_predict(linear, features, self._read()[0].W)
        mean = as_outputs(linear, features, Phi @ W.T)
        if not return_std:
            return mean
        T, variance = self._scaled("return_std", noise)
        spread = 1 + (Phi @ T.T).square().sum(1, keepdim=True)
        return Posterior(mean, as_outputs(linear, features, (spread * variance).sqrt()))

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
        linear = self._head()
        Phi, W = rows_to_predict(linear, features, self._read()[0].W)
        T, variance = self._scaled("sample", noise)
        normal = torch.randn(W.shape, dtype=W.dtype, device=W.device, generator=generator)
        drawn = W + variance.sqrt()[:, None] * (normal @ T)  # rows of normal @ T have the covariance TᵀT
        return as_outputs(linear, features, Phi @ drawn.T)

    def _scaled(self, asked: str, noise: float | None) -> tuple[Tensor, Tensor]:
        """T, and σ² (m,)."""
        if noise is not None:
            in_range("noise", noise, 0.0, math.inf)
        state, counters = self._read()
        T, energy, samples = least_squares.square_root(state), state.energy, float(counters[SAMPLES])
        if noise is not None:
            return T, torch.full_like(energy, noise**2)
        if not samples:
            raise ValueError(f"{asked} needs at least one update, or noise=: before it the noise is unknown")
        return T, energy.clamp(min=0) / samples  # rounding can leave a perfect fit below zero
