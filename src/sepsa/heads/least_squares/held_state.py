"""The state of an `RLS` head, in the backend that holds it, and in the memory of captured steps."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from sepsa.heads.base.parameters import follow, place_of
from sepsa.heads.least_squares.captured import CapturedState
from sepsa.heads.least_squares.eager import TorchBackend
from sepsa.heads.least_squares.math import PENDING, STEPS, LeastSquaresState
from sepsa.heads.run import choose
from sepsa.heads.run.choose import Counters, Problem, UpdateSize


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
        self.place: tuple[Any, ...] = ()  # where the head lay when the backend was chosen,
        self.rows = 0  # and for how many rows

    def lies(self) -> tuple[Any, ...]:
        """The addresses of the head's parameters, and the backend that is forced, by which one was chosen."""
        return *place_of(self.problem.linear), choose.forced.get()

    def backend_for(self, rows: int) -> TorchBackend | None:
        """The present backend, if it was chosen for updates of this many rows of a head that lies where it does."""
        return self.backend if rows == self.rows and self.lies() == self.place else None

    def row(self, rows: int) -> choose.BackendRow:
        """The backend of an update of this many rows, in the table."""
        return choose.choose("least squares", UpdateSize.of(self.problem.linear, self.problem.prior, rows))

    def change_backend(self, rows: int, state: LeastSquaresState, counters: Counters) -> TorchBackend:
        """Let the backend of an update of this many rows continue from this state."""
        place, chosen = self.lies(), self.row(rows)
        if place != self.place or self.backend.name != chosen.backend:  # in other memory, or of another size
            self.backend = chosen.load()(self.problem, state, counters)
        self.rows, self.place = rows, place  # last: an interrupt before lets the next update begin again
        backend: TorchBackend = self.backend
        return backend

    def eager(self) -> TorchBackend:
        """A backend that learns outside of a graph, with the state as it is."""
        if self.captured is not None and self.backend is self.captured:
            state, counters = self.captured.read()
            self.backend, self.place = TorchBackend(self.problem, state.copy(), counters), ()
        backend: TorchBackend = self.backend
        return backend

    def __reduce__(self) -> Any:
        return HeldState, (self.problem, *self.backend.read())

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
