"""Recursive least squares by torch's operators: a backend for every head, and the base class of the faster ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sepsa.heads.base.parameters import commit, follow, join, samples, store
from sepsa.heads.least_squares import math as least_squares
from sepsa.heads.least_squares.math import PENDING, LeastSquaresState
from sepsa.heads.run.choose import Counters, Problem


class TorchBackend:
    """The state of a head as tensors, which each update replaces by new ones."""

    name = "torch"
    in_place = False  # whether an update writes into the tensors of the state

    def __init__(self, problem: Problem, state: LeastSquaresState, counters: Counters) -> None:
        self.linear, self.prior, self.ridge = problem
        self.state, self.counters = state, counters

    def read(self) -> tuple[LeastSquaresState, Counters]:
        """The state and its counters. The tensors may be those that the next `learn` writes to."""
        state = self.state if self.counters[PENDING] else self.state._replace(H=None)
        return state, self.counters

    def load(self, state: LeastSquaresState, counters: Counters) -> None:
        """Continue from this state. Nothing is allocated that could fail where memory is fixed."""
        self.state, self.counters = state, counters

    def penalize(self, prior: Tensor, ridge: Tensor) -> None:
        """Restore these ridges (p,) about this prior (m, p) from now on, in place: recordings know both."""
        self.prior.copy_(prior)
        self.ridge.copy_(ridge)

    def learn(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None, forgetting: float) -> bool:
        """Learn samples completely; False where a value is not finite."""
        rows = samples(self.linear, features, targets, sample_weight, self.prior.dtype)
        return self.learn_rows(*rows, forgetting)

    def learn_rows(self, Phi: Tensor, Y: Tensor, total: float, forgetting: float) -> bool:
        """Learn the rows Φ (n, p) and Y (n, m), of weight `total`. False: they are not finite."""
        state, counters = self.read()
        with torch.no_grad(), torch.autocast(self.prior.device.type, enabled=False):
            state = state._replace(W=follow(self.linear, state.W))
            settings = forgetting, self.ridge, self.prior, self.linear.weight.dtype
            learned = least_squares.learn(state, counters.tolist(), Phi, Y, total, *settings)
            if learned is None:
                return False
            new, numbers, head = learned
            self.take(new, np.array(numbers), head)
        return True

    def take(self, state: LeastSquaresState, counters: Counters, head: Tensor) -> None:
        """Make this the state, and `head` (m, p) the weights of the head."""

        def write() -> None:
            self.load(state, counters)
            store(self.linear, head)

        commit(write)

    def checkpoint(self) -> Any:
        """The state, its counters and the head as they are now."""
        state, counters = self.read()
        if self.in_place:
            state = state.copy()
        return state, counters.copy(), join(self.linear)

    def undo(self, checkpoint: Any) -> None:
        """Restore the state and the head's weights as they were at `checkpoint`."""
        self.take(*checkpoint)
