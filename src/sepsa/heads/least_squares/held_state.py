"""The state of an `RLS` head, in the backend that holds it, and in the memory of captured steps."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from sepsa.heads.base.checks import own_parameters
from sepsa.heads.base.parameters import follow
from sepsa.heads.least_squares.captured import CapturedState
from sepsa.heads.least_squares.eager import TorchBackend
from sepsa.heads.least_squares.math import PENDING, STEPS, LeastSquaresState
from sepsa.heads.run import choose
from sepsa.heads.run.choose import Backend, Counters, Problem, UpdateSize

_SIZES = 64  # numbers of rows for which the choice of a backend is remembered


class HeldState:
    """The state of one head; `choose` decides which backend holds it, by the device and the number of rows.

    Attributes:
        problem: The head, its prior and its ridges.
        backend: What holds the state now.
        captured: What recordings of captured steps write to, once there is one.
    """

    def __init__(self, problem: Problem, state: LeastSquaresState, counters: Counters) -> None:
        self.problem = problem
        self.captured: CapturedState | None = None
        self.backend: Any = TorchBackend(problem, state, counters)
        self.place: tuple[Any, ...] = ()  # where the head lay when the backend was chosen
        self._chosen: dict[int, str] = {}  # the backends of updates by their number of rows

    def lies(self) -> tuple[Any, ...]:
        """The addresses of the head's parameters, and the backend that is forced, by which one was chosen."""
        weight, bias = own_parameters(self.problem.linear)
        return weight.data_ptr(), None if bias is None else bias.data_ptr(), choose.forced.get()

    def backend_for(self, rows: int) -> Backend | None:
        """The present backend, if it is that of updates of this many rows of a head that lies where it does."""
        fits = self.lies() == self.place and self._chosen.get(rows) == self.backend.name
        return self.backend if fits else None

    def row(self, rows: int) -> choose.BackendRow:
        """The backend of an update of this many rows, in the table."""
        return choose.choose("least squares", UpdateSize.of(self.problem.linear, self.problem.prior, rows))

    def change_backend(self, rows: int, state: LeastSquaresState, counters: Counters) -> Backend:
        """Let the backend of an update of this many rows continue from this state."""
        place = self.lies()
        moved = place != self.place  # another device, dtype or memory of the head
        chosen = self.row(rows)
        if moved or self.backend.name != chosen.backend:
            self.backend = chosen.load()(self.problem, state, counters)
        known = {} if moved or len(self._chosen) >= _SIZES else self._chosen
        self._chosen = known | {rows: self.backend.name}
        self.place = place  # last: an interrupt before lets the next update begin again
        backend: Backend = self.backend
        return backend

    def eager(self) -> Backend:
        """A backend that learns outside of a graph, with the state as it is."""
        if self.captured is not None and self.backend is self.captured:
            state, counters = self.captured.read()
            self.backend, self.place = TorchBackend(self.problem, state.copy(), counters), ()
        backend: Backend = self.backend
        return backend

    def prepare_capture(self, state: LeastSquaresState, counters: Counters, forgetting: float) -> tuple[Hashable, ...]:
        """Copy the state to the memory that captured updates write, unless it is there. Returns what a recording of
        them depends on.
        """
        linear, captured = self.problem.linear, self.captured
        if captured is None or not captured.lies_in(linear):
            captured = CapturedState(self.problem, state)
        if self.backend is not captured:
            captured.load(state, counters)
        captured.W.copy_(follow(linear, captured.W))
        captured.updates = int(counters[STEPS])
        self.captured = self.backend = captured
        self.place = ()
        return *captured.place, *captured.forget(forgetting)


def without_pending(counters: Counters) -> Counters:
    """The counters of a state with nothing gathered in H."""
    return np.array([*counters[:PENDING], 0.0, 0.0])
