"""The state of recursive least squares inside a CUDA graph: at fixed addresses, without synchronizing with the host."""

from __future__ import annotations

from collections.abc import Callable, Hashable

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
from sepsa.heads.run.choose import Counters, HoldsState, Problem, UpdateSize, choose
from sepsa.heads.run.memory import HeadMemory


class CapturedState(HeadMemory, HoldsState):
    """The tensors that a recording writes to. Symbols as in `least_squares`; H is the identity."""

    name = "captured"

    def __init__(self, problem: Problem, state: LeastSquaresState) -> None:
        (m, p), device = state.W.shape, state.W.device
        self.prior, self.ridge = problem.prior, problem.ridge
        self.Z = state.W.new_zeros(p + m, p)
        super().__init__(problem.linear, self.Z)
        self.T, self.W = self.Z[:p], self.Z[p:]
        self.energy, self.ridge_left = torch.zeros_like(state.energy), torch.zeros_like(state.ridge_left)
        self.tally = torch.zeros(3, dtype=torch.float64, device=device)  # updates, samples, cursor
        # Buffers of the Triton kernels, by the size of a block and whether it fades.
        self.blocks: dict[tuple[int, bool], tuple[Tensor, ...]] = {}
        self._increments: dict[tuple[int, int], Tensor] = {}
        self.fading = torch.ones(2, dtype=torch.float64, device=device)  # λ and 1/√λ: the same graph serves any λ
        self.updates = 0  # when the ridge was chosen last, or looked at
        self.counters: Counters = np.zeros(5)  # as the host read them last
        self.lam, self.count = 1.0, 0  # λ on the host, and the coordinates that get their ridge back in an update
        self._unfinished: Callable[[], None] | None = None  # updates T by a block of which only W has learned

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
        (m, p), n, count = self.W.shape, len(x), self.count
        case = UpdateSize(x.device.type, self.Z.dtype, p, m, n, count, contiguous=self.weight.is_contiguous())
        chosen = choose("captured least squares", case)
        finite: Tensor
        if chosen.backend == "triton":
            finite, self._unfinished = chosen.load().learn(self, x, y)
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
        self.keep(self.state, new, self.W, finite)
        self.tally[1].mul_(torch.where(finite, lam, 1.0))
        self.tally.add_(finite * self.increment(n, count))
        return finite

    def increment(self, n: int, count: int) -> Tensor:
        """What a finite update adds to the tally, made before a graph is captured, which may not make it."""
        if (n, count) not in self._increments:
            values = torch.tensor([1.0, n, count], dtype=torch.float64)
            self._increments[n, count] = values.to(self.tally.device)
        return self._increments[n, count]

    def finish(self) -> None:
        """Update T, which neither forward nor backward pass reads."""
        if self._unfinished is not None:
            self._unfinished()
        self._unfinished = None
