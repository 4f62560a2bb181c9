"""The state of recursive least squares inside a CUDA graph."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import torch
from torch import Tensor, nn

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


class CapturedState(CapturedHead):
    """The tensors that a recording writes to. Symbols as in `least_squares`; H is the identity."""

    name, solver = "captured", "least squares"
    rows, location = 0, ()  # no update outside of a graph finds its backend in this one

    def __init__(self, linear: nn.Linear, state: LeastSquaresState) -> None:
        super().__init__(linear, state.W)
        energy, left, prior, ridge = (torch.zeros_like(part) for part in state[2:6])
        # But for what the device counts:
        self.now = LeastSquaresState(self.T, self.W, energy, left, prior, ridge, None, np.zeros(5))
        self.tally = torch.zeros(3, dtype=torch.float64, device=state.W.device)  # updates, samples, cursor
        self.fading = torch.ones_like(self.tally[:2])  # λ and 1/√λ: the same graph serves any λ
        self.lam, self.count = 1.0, 0  # λ on the host, and the coordinates that get their ridge back in an update

    def read(self) -> LeastSquaresState:
        """The state, as the device has it."""
        self.finish()
        self.warn_of_refusals()
        steps, samples, cursor = self.tally.tolist()
        return self.now._replace(counters=np.array([steps, samples, cursor % len(self.T), 0.0, 0.0]))

    def load(self, state: LeastSquaresState) -> None:
        """Continue from this state, which may have something gathered in H, in place: recordings know all tensors."""
        for mine, other in zip(self.now[:6], fade(state, 1.0)[:6], strict=True):
            mine.copy_(other)
        self.tally.copy_(torch.as_tensor(state.counters[[STEPS, SAMPLES, CURSOR]]))

    def forget(self, lam: float) -> tuple[Hashable, ...]:
        """Set the forgetting of later updates. Returns what a recording of them depends on."""
        if lam != self.lam:
            self.lam, self.count = lam, due(len(self.T), lam)
            self.fading.copy_(torch.tensor([lam, lam**-0.5], dtype=torch.float64))
        return *self.place, self.count

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
        faded = fade(self.now, lam)
        F, E = whiten(faded, Phi, Y)
        new = learn_rows(faded, F, E, at)
        head, size = new.W.to(self.weight.dtype), F.square().sum()
        fits = size <= (CAPTURED_LIMIT if n > 1 else CAPTURED_ROW_LIMIT)
        finite = new.T.sum().isfinite() & head.isfinite().all() & fits
        self.too_large.add_(~fits & size.isfinite())
        self.keep(self.now[:4], new[:4], finite)
        self.tally[1].mul_(torch.where(finite, lam, 1.0))
        learned = finite.double()
        self.tally.add_(torch.stack([learned, learned * n, learned * count]))
        return finite
