"""An update of recursive least squares on a GPU as two CUDA graphs for each number of rows.

    look    Φ and Y are there; F = TΦᵀ, E = Y - ΦWᵀ, their norms and a bound of the new W go to the host
    finish  `least_squares.attempt`, or of a large head `large_block`, stored in the state and the head

The second is launched when the host knows from them that its numbers will be finite: the head minimizes
J(W) = λ(|W - W₀|²_A + energy) + |Y - ΦWᵀ|² + Σ q|W - prior|², and A is at least the ridge that is left, so
J(W) <= J(W₀) bounds the new weights by

    λ min ridge_left |W - W₀|² <= |E|² + max ridge (|prior| + |W₀|)².

Where that bound does not suffice, where T must absorb H and where digits would be lost, `TorchBackend` learns with the
same state, which the first half leaves as it is.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor, nn

from sepsa.heads.base.parameters import follow, store
from sepsa.heads.base.ridge import coordinates, due, next_cursor
from sepsa.heads.least_squares import math as least_squares
from sepsa.heads.least_squares.eager import TorchBackend
from sepsa.heads.least_squares.large_block import RidgeUpdate, beside, learn_block, learn_ridge, together
from sepsa.heads.least_squares.math import CURSOR, PENDING, LeastSquaresState
from sepsa.heads.run import choose
from sepsa.heads.run.record import Halves, Recorder, Recording, streams
from sepsa.interrupt import DeferredInterrupt

Work: TypeAlias = tuple[LeastSquaresState, Tensor, Tensor, RidgeUpdate | None]  # with the head's W, F, E


class GraphBackend(TorchBackend):
    """The state of a head, at fixed addresses once an update is recorded, and its recordings."""

    name = "graph"

    def __init__(self, linear: nn.Linear, state: LeastSquaresState) -> None:
        super().__init__(linear, state)
        self.recorder = Recorder(linear, answers=3)
        self._H: Tensor | None = None  # the memory of H, which is not always there

    def load(self, state: LeastSquaresState) -> None:
        """Continue from this state; memory that a recording knows stays."""
        if not self.in_place:
            self.state = state
            return
        mine = self.state
        for own, other in zip(mine[:6], state[:6], strict=True):
            own.copy_(other)
        self.state = mine._replace(H=self._in_fixed_memory(state.H), counters=state.counters)
        self.cursor.fill_(int(state.counters[CURSOR]))

    def learn(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None, forgetting: float) -> bool:
        """Learn samples by a recording where there is one."""
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
        with torch.cuda.device(state.T.device), DeferredInterrupt():
            learned = self._replay(recording, n, forgetting)
        return self.learn_rows(Phi, Y, float(n), forgetting) if learned is None else learned

    def _replay(self, recording: Recording, n: int, lam: float) -> bool | None:
        """Learn what the recording holds. False: not finite; None: another route must learn it."""
        self.recorder.look(recording)
        size, error, most = self.recorder.answers()
        if not math.isfinite(size * size + error * error):
            return False
        p, dtype = len(self.state.T), self.state.T.dtype
        counters = least_squares.advance(self.state.counters, p, n, float(n), lam, size * size)
        fits = size * size <= least_squares.limit_of(p, n, lam, dtype)
        # What the host has seen proves that the new weights are finite, because no factor fails: H, or I + FᵀF, lies
        # between λ^updates and what was added to it.
        pending, growth = counters[PENDING:].tolist()
        is_certain = (3.0 + growth + size * size) / lam**pending * p * torch.finfo(dtype).eps < 1e-2
        if not (fits and is_certain and most < torch.finfo(self.linear.weight.dtype).max / 16):
            return None
        self.recorder.finish(recording)
        self.state = self.state._replace(counters=counters)
        if least_squares.must_absorb(counters, p, lam, dtype):
            self.load(least_squares.fade(self.state, 1.0))
        return True

    def _halves(self, n: int, lam: float) -> Halves:
        """What is recorded of updates of n rows."""
        self._fix_addresses()
        state, linear, device = self.state, self.linear, self.state.T.device
        m, p = state.W.shape
        Phi, Y = state.T.new_ones(n, p), state.T.new_zeros(n, m)
        count, in_place, aside = due(p, lam), p > choose.RECORDED_COPIES, streams(device)[1]

        def look(state: LeastSquaresState) -> Work:
            state = state._replace(W=follow(linear, state.W))
            ridge = None
            if in_place and count:
                with beside(aside):
                    at = coordinates(p, count, self.cursor, device)
                    ridge = learn_ridge(state, lam, at)
            F, E = least_squares.whiten(state, Phi, Y)
            size, error, weight, prior = map(torch.linalg.vector_norm, (F, E, state.W, state.prior))
            pull = state.ridge.max() * (prior + weight) ** 2 if count else 0.0
            most = weight + ((error**2 + pull) / (lam * state.ridge_left.min())).sqrt()
            self.recorder.answer(torch.stack([size, error, most]))
            if ridge is not None:
                together(aside)
            return state, F, E, ridge

        def finish(_: LeastSquaresState, work: Work) -> LeastSquaresState:
            state, F, E, ridge = work
            if in_place:
                return learn_block(state, Phi, F, E, lam, ridge, aside)
            return least_squares.attempt(state, Phi, Y, F, E, lam, self.cursor)

        def store_all(new: LeastSquaresState) -> None:
            for mine, learned in zip(state[:-1], new[:-1], strict=True):
                if mine is not None and learned is not None and learned is not mine:
                    mine.copy_(learned)
            store(linear, state.W.to(linear.weight.dtype))
            if count % p:
                self.cursor.copy_(next_cursor(self.cursor, count, p))

        return Halves((Phi, Y), state, look, finish, store_all, lambda new: (new.H is None) == (state.H is None))

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
