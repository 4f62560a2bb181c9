"""Recursive least squares by torch's operators: a backend for every head, and the base class of the faster ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sepsa.heads.base.checks import own_parameters
from sepsa.heads.base.parameters import commit, follow, join, samples, store
from sepsa.heads.least_squares import math as least_squares
from sepsa.heads.least_squares.math import LeastSquaresState
from sepsa.heads.run.choose import forced


def location(linear: nn.Linear) -> tuple[Any, ...]:
    """The addresses of the head's parameters, and the backend that is forced: what a backend is chosen for."""
    weight, bias = own_parameters(linear)
    return weight.data_ptr(), None if bias is None else bias.data_ptr(), forced.get()


class TorchBackend:
    """The state of a head as tensors, which each update replaces by new ones."""

    name = "torch"
    in_place = False  # whether an update writes into the tensors of the state
    rows = 0  # of the updates for which this backend was chosen,
    location: tuple[Any, ...] = ()  # and where the head lay then

    def __init__(self, linear: nn.Linear, state: LeastSquaresState) -> None:
        self.linear, self.state = linear, state

    def __reduce__(self) -> Any:
        return TorchBackend, (self.linear, self.read())

    def read(self) -> LeastSquaresState:
        """The state, whose tensors may be those that the next `learn` writes to."""
        return self.state

    def load(self, state: LeastSquaresState) -> None:
        """Continue from this state. Nothing is allocated that could fail where memory is fixed."""
        self.state = state

    def take(self, state: LeastSquaresState, head: Tensor) -> None:
        """Make this the state, and `head` (m, p) the weights of the head."""

        def write() -> None:
            self.load(state)
            store(self.linear, head)

        commit(write)

    def learn(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None, forgetting: float) -> bool:
        """Learn samples completely; False where a value is not finite."""
        rows = samples(self.linear, features, targets, sample_weight, self.state.T.dtype)
        return self.learn_rows(*rows, forgetting)

    def learn_rows(self, Phi: Tensor, Y: Tensor, total: float, forgetting: float) -> bool:
        """Learn the rows Φ (n, p) and Y (n, m), of weight `total`. False: they are not finite."""
        state = self.read()
        with torch.no_grad(), torch.autocast(state.T.device.type, enabled=False):
            state = state._replace(W=follow(self.linear, state.W))
            dtype = self.linear.weight.dtype
            new = least_squares.learn(state, Phi, Y, total, forgetting, dtype)
            if new is not None:
                self.take(new, new.W.to(dtype))
        return new is not None

    def checkpoint(self) -> Any:
        """What `undo` restores: the state and the head as they are now."""
        state = self.read()
        return state.copy() if self.in_place else state, join(self.linear)

    def undo(self, checkpoint: Any) -> None:
        """Restore the state and the head's weights as they were at `checkpoint`."""
        self.take(*checkpoint)
