"""An update of recursive least squares on a GPU as two CUDA graphs for each number of rows.

    look    Φ and Y are there; F = TΦᵀ, E = Y - ΦWᵀ, their norms, and whether the new numbers will be finite and exact
    finish  `least_squares.attempt`, stored in the state and the head where they will; or of a large head `large_block`

The head minimizes J(W) = λ(|W - W₀|²_A + energy) + |Y - ΦWᵀ|² + Σ q|W - prior|², and A is at least the ridge that is
left, so J(W) <= J(W₀) bounds the new weights by

    λ min ridge_left |W - W₀|² <= |E|² + max ridge (|prior| + |W₀|)².

Both run at once, and the host may read what they found later; where that is not good, the state is as it was, and
`TorchBackend` learns the same rows. A large head's second half, which changes T in place, waits for the host.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn

from sepsa.heads.base.checks import explain_nonfinite
from sepsa.heads.base.parameters import follow, store
from sepsa.heads.base.ridge import coordinates, due, next_cursor
from sepsa.heads.least_squares import math as least_squares
from sepsa.heads.least_squares.eager import TorchBackend
from sepsa.heads.least_squares.large_block import RidgeUpdate, beside, learn_block, learn_ridge, together
from sepsa.heads.least_squares.math import CURSOR, PENDING, LeastSquaresState
from sepsa.heads.run import choose
from sepsa.heads.run.record import Halves, Recorder, streams
from sepsa.interrupt import DeferredInterrupt

Work: TypeAlias = tuple[LeastSquaresState, Tensor, Tensor, RidgeUpdate | None, Tensor]  # with the head's W; F, E, good
Found: TypeAlias = tuple[LeastSquaresState, LeastSquaresState, Tensor]  # the new state, the old one, and which is good


class GraphBackend(TorchBackend):
    """The state of a head, at fixed addresses once an update is recorded, and its recordings."""

    name = "graph"

    def __init__(self, linear: nn.Linear, state: LeastSquaresState) -> None:
        super().__init__(linear, state)
        self.recorder = Recorder(linear, answers=3)
        self._H: Tensor | None = None  # the memory of H, which is not always there
        self._limit = torch.empty((), dtype=torch.float64).pin_memory()  # of |F|² in the next update

    def read(self) -> LeastSquaresState:
        """The state after all that was learned; an error if the last rows could not be."""
        self.settle()
        return self.state

    def load(self, state: LeastSquaresState) -> None:
        """Continue from this state, whatever waits; memory that a recording knows stays."""
        self.waiting = None
        if not self.in_place:
            self.state = state
            return
        mine = self.state
        for own, other in zip(mine[:6], state[:6], strict=True):
            own.copy_(other)
        self.state = mine._replace(H=self._in_fixed_memory(state.H), counters=state.counters)
        self.cursor.fill_(int(state.counters[CURSOR]))

    def learn(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None, forgetting: float) -> bool:
        """Learn samples; where there is a recording, `settle` tells whether it could."""
        k, state = self.linear.in_features, self.state
        n, recording = features.numel() // k, None
        if sample_weight is None and choose.records(state, n, forgetting):
            kind = n, forgetting, state.H is not None
            recording = self.recorder.find(kind, lambda: self._halves(n, forgetting))
        if recording is None:
            return super().learn(features, targets, sample_weight, forgetting)
        Phi, Y = recording.samples
        Phi[:, :k].copy_(features.detach().reshape(-1, k))
        Y.copy_(targets.detach().reshape(n, -1))
        p, dtype = len(state.T), state.T.dtype
        # No factor fails, as H, or I + FᵀF, lies between λ^updates and what was added to it.
        pending, growth = least_squares.advance(state.counters, p, n, float(n), forgetting, 0.0)[PENDING:].tolist()
        certain = (1e-2 * forgetting**pending / (p * torch.finfo(dtype).eps) - 3.0 - growth) / 2
        self._limit.fill_(min(certain, least_squares.limit_of(p, n, forgetting, dtype)))
        with torch.cuda.device(state.T.device), DeferredInterrupt():
            self.recorder.look(recording)
            if not self._is_large:
                self.recorder.finish(recording)
            self.waiting = recording, n, forgetting
        if self._is_large:
            self.settle()
        return True

    def settle(self) -> None:
        """Learn the rows of the last `learn` by another route if a recording could not; an error if none can."""
        if self.waiting is None:
            return
        recording, n, lam = self.waiting
        with torch.cuda.device(self.state.T.device), DeferredInterrupt():
            self.waiting = None
            finite, good, size = self.recorder.answers()
            if good:
                if self._is_large:
                    self.recorder.finish(recording)
                p, dtype = len(self.state.T), self.state.T.dtype
                counters = least_squares.advance(self.state.counters, p, n, float(n), lam, size)
                self.state = self.state._replace(counters=counters)
                if least_squares.must_absorb(counters, p, lam, dtype):
                    self.load(least_squares.fade(self.state, 1.0))
        Phi, Y = recording.samples
        if not (good or (finite and self.learn_rows(Phi, Y, float(n), lam))):
            raise explain_nonfinite(Phi[:, : self.linear.in_features], Y, self.linear)

    @property
    def _is_large(self) -> bool:
        """Whether recorded updates change T in place."""
        return len(self.state.T) > choose.RECORDED_COPIES

    def _halves(self, n: int, lam: float) -> Halves:
        """What is recorded of updates of n rows."""
        self._fix_addresses()
        state, linear, device = self.state, self.linear, self.state.T.device
        m, p = state.W.shape
        Phi, Y = state.T.new_ones(n, p), state.T.new_zeros(n, m)
        count, in_place, aside = due(p, lam), self._is_large, streams(device)[1]
        largest = torch.finfo(linear.weight.dtype).max / 16

        def look(state: LeastSquaresState) -> Work:
            state = state._replace(W=follow(linear, state.W))
            ridge = None
            if in_place and count:
                with beside(aside):
                    at = coordinates(p, count, self.cursor, device)
                    ridge = learn_ridge(state, lam, at)
            F, E = least_squares.whiten(state, Phi, Y)
            size, error, weight, prior = (torch.linalg.vector_norm(part) for part in (F, E, state.W, state.prior))
            size = size**2
            pull = state.ridge.max() * (prior + weight) ** 2 if count else 0.0
            most = weight + ((error**2 + pull) / (lam * state.ridge_left.min())).sqrt()
            limit = self._limit.to(device, non_blocking=True)
            finite = (size + error**2).isfinite()
            good = finite & (size <= limit) & (most < largest)
            self.recorder.answer(torch.stack([finite, good, size]))
            if ridge is not None:
                together(aside)
            return state, F, E, ridge, good

        def finish(_: LeastSquaresState, work: Work) -> Found:
            old, F, E, ridge, good = work
            if in_place:
                return learn_block(old, Phi, F, E, lam, ridge, aside), old, good
            return least_squares.attempt(old, Phi, Y, F, E, lam, self.cursor), old, good

        def store_all(found: Found) -> None:
            new, old, good = found
            for mine, learned, before in zip(state[:-1], new[:-1], old[:-1], strict=True):
                if not (mine is None or learned is None or before is None or learned is mine):
                    torch.where(good, learned, before, out=mine)
            store(linear, state.W.to(linear.weight.dtype))
            if count % p:
                self.cursor.copy_(torch.where(good, next_cursor(self.cursor, count, p), self.cursor))

        return Halves((Phi, Y), state, look, finish, store_all, lambda found: (found[0].H is None) == (state.H is None))

    def _fix_addresses(self) -> None:
        """Give the state the memory that all recordings share."""
        if self.in_place:
            return
        state = self.state.copy()
        self.state = state._replace(H=self._in_fixed_memory(state.H))
        self.cursor = torch.tensor(int(state.counters[CURSOR]), device=state.T.device)
        self.in_place = True

    def _in_fixed_memory(self, H: Tensor | None) -> Tensor | None:
        """A copy of H in the memory that recordings know."""
        if H is None:
            return None
        if self._H is None:
            self._H = torch.empty_like(H, memory_format=torch.contiguous_format)
        return self._H.copy_(H)
