"""The state of recursive least squares inside a CUDA graph."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import torch
from torch import Tensor

from sepsa.heads.base.parameters import rows
from sepsa.heads.base.ridge import coordinates, due
from sepsa.heads.least_squares.math import (
    CAPTURED_LIMIT,
    CAPTURED_ROW_LIMIT,
    CURSOR,
    SAMPLES,
    STEPS,
    LeastSquaresState,
    fade,
    learn_rows,
    whiten,
)
from sepsa.heads.run.capture import CapturedHead
from sepsa.heads.run.choose import Counters, Problem


class CapturedState(CapturedHead):
    """The tensors that a recording writes to. Symbols as in `least_squares`; H is the identity."""

    name, solver = "captured", "least squares"

    def __init__(self, problem: Problem, state: LeastSquaresState) -> None:
        super().__init__(problem.linear, state.W)
        self.prior, self.ridge = problem.prior, problem.ridge
        self.energy, self.ridge_left = torch.zeros_like(state.energy), torch.zeros_like(state.ridge_left)
        self.tally = torch.zeros(3, dtype=torch.float64, device=state.W.device)  # updates, samples, cursor
        self.fading = torch.ones_like(self.tally[:2])  # λ and 1/√λ: the same graph serves any λ
        self.counters: Counters = np.zeros(5)  # as the host read them last
        self.lam, self.count = 1.0, 0  # λ on the host, and the coordinates that get their ridge back in an update

    @property
    def state(self) -> LeastSquaresState:
        """The tensors as a state, without waiting for the device."""
        return LeastSquaresState(self.T, self.W, None, self.energy, self.ridge_left)

    def read(self) -> tuple[LeastSquaresState, Counters]:
        """The state and its counters, as the device has them."""
        self.finish()
        self.warn_of_refusals()
        steps, samples, cursor = self.tally.tolist()
        return self.state, np.array([steps, samples, cursor % len(self.T), 0.0, 0.0])

    def load(self, state: LeastSquaresState, counters: Counters) -> None:
        """Continue from this state, which may have something gathered in H."""
        state = fade(state, 1.0)
        for name in ("T", "W", "energy", "ridge_left"):
            getattr(self, name).copy_(getattr(state, name))
        self.tally.copy_(torch.as_tensor(counters[[STEPS, SAMPLES, CURSOR]]))

    def penalize(self, prior: Tensor, ridge: Tensor) -> None:
        """Restore these ridges (p,) about this prior (m, p) from now on, in place: recordings know both."""
        self.prior.copy_(prior)
        self.ridge.copy_(ridge)

    def forget(self, lam: float) -> tuple[Hashable, ...]:
        """Set the forgetting of later updates. Returns what a recording of them depends on."""
        if lam != self.lam:
            self.lam, self.count = lam, due(len(self.T), lam)
            self.fading.copy_(torch.tensor([lam, lam**-0.5], dtype=torch.float64))
        return (self.count,)

    def update(self, features: Tensor, targets: Tensor) -> Tensor:
        """Learn rows; returns whether they were finite (0-d).

        The update of T may be left to `finish`.
        """
        self.finish()
        x, y = features.detach().reshape(-1, self.k), targets.detach().reshape(-1, len(self.W))
        n, p, count = len(x), len(self.T), self.count
        finite = self.by_kernels(x, count, y)
        if finite is not None:
            return finite
        Phi, Y = rows(self.linear, x, self.Z.dtype), y.to(self.Z.dtype)
        at = coordinates(p, count, self.tally[2].long(), x.device) if count else None
        lam = self.fading[0] if count else 1.0
        faded = fade(self.state, lam)
        F, E = whiten(faded, Phi, Y)
        new = learn_rows(faded, F, E, self.ridge, at, self.prior)
        head, size = new.W.to(self.weight.dtype), F.square().sum()
        fits = size <= (CAPTURED_LIMIT if n > 1 else CAPTURED_ROW_LIMIT)
        finite = new.T.sum().isfinite() & head.isfinite().all() & fits
        self.too_large.add_(~fits & size.isfinite())
        self.keep(self.state, new, finite)
        self.tally[1].mul_(torch.where(finite, lam, 1.0))
        learned = finite.double()
        self.tally.add_(torch.stack([learned, learned * n, learned * count]))
        return finite
