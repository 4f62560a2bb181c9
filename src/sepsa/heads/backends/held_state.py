"""The state of an `RLS` head, the backend that holds it, its forgetting and ridge, and updates in captured steps."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from sepsa.heads.backends import choose
from sepsa.heads.backends.captured_least_squares import CapturedState
from sepsa.heads.backends.choose import Backend, Counters, Problem, UpdateSize
from sepsa.heads.backends.torch_least_squares import TorchBackend
from sepsa.heads.base.checks import own_parameters
from sepsa.heads.base.head import OwnsHead
from sepsa.heads.base.parameters import commit, follow, ridges, store
from sepsa.heads.math import evidence
from sepsa.heads.math.evidence import Choice
from sepsa.heads.math.least_squares import PENDING, SAMPLES, STEPS, LeastSquaresState
from sepsa.heads.math.ridge import BiasRidge

_SIZES = 64  # numbers of rows for which the choice of a backend is remembered


class HeldByBackend(OwnsHead):
    """A head whose state a backend holds: `choose` decides which, by the device and the number of rows."""

    _not_copied = ("_backend", "_captured", "_place", "_chosen")
    ridge: float | Literal["evidence"]
    bias_ridge: BiasRidge
    noise_factor: float
    forgetting: float
    forgets = True  # in the next update; see `sepsa.heads.Forgets`
    _problem: Problem
    _initial: Tensor  # (m, p): the head at `bind`
    _choice: Choice  # the ridge and the prior in use
    _looked = -1  # the number of updates when evidence last looked at the ridge

    def _problem_for(self, linear: nn.Linear, choice: Choice) -> Problem:
        """The prior and the ridges of a choice, in memory of their own."""
        initial = self._initial = self._initial.to(linear.weight.device)
        prior = evidence.about(initial, choice.scale, linear.bias is not None)
        return Problem(linear, prior, ridges(linear, choice.ridge, self.bias_ridge, initial))

    def _ready(self) -> nn.Linear:
        self._read()
        return self._problem.linear

    def _continue(self, problem: Problem, state: LeastSquaresState, counters: Counters) -> None:
        """Make this the state; the next update chooses its backend."""
        self._problem = problem
        self._captured: CapturedState | None = None  # what recordings of captured steps write to
        self._backend: Any = TorchBackend(problem, state, counters)
        self._place: tuple[Any, ...] = ()  # where the head lay when the backend was chosen
        self._chosen: dict[int, str] = {}  # the backends of updates by their number of rows

    @property
    def backend(self) -> str:
        """The backend that computes an update of one row: "numba" (compiled), "graph" (CUDA graphs) or "torch"."""
        self._read()
        return choose.choose("least squares", self._case(1)).backend

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | ({} if self.linear is None else {"_saved": self._read()})

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("_saved", None)
        vars(self).update(state)
        if saved is not None:
            self._continue(self._problem, *saved)

    def _read(self) -> tuple[LeastSquaresState, Counters]:
        """The state and its counters, on the device of the head."""
        device = self._head().weight.device
        state, counters = self._backend.read()
        if self._captured is not None and self._backend is self._captured and self.ridge == "evidence":
            known, steps = self._captured.known
            self._captured.counters, self._captured.known = counters, (float(counters[SAMPLES]), int(counters[STEPS]))
            self._choose_ridge(known, steps, self.forgetting)
            state, counters = self._backend.read()
        if self._problem.prior.device != device:
            state = state.map(lambda part: part.to(device))
            self._continue(self._problem_for(self._problem.linear, self._choice), state, counters)
        return state, counters

    def _case(self, rows: int) -> UpdateSize:
        weight, prior = self._head().weight, self._problem.prior
        kind = weight.device.type, prior.dtype, prior.shape[1], len(prior), rows
        return UpdateSize(*kind, head_dtype=weight.dtype, contiguous=weight.is_contiguous())

    def _lies(self) -> tuple[Any, ...]:
        """The addresses of the head's parameters, and the backend that is forced, by which one was chosen."""
        weight, bias = own_parameters(self._head())
        return weight.data_ptr(), None if bias is None else bias.data_ptr(), choose.forced()

    def _backend_for(self, rows: int) -> Backend:
        """The backend of an update of this many rows, which continues from the state of the one before."""
        place = self._lies()
        moved = place != self._place  # another device, dtype or memory of the head
        if moved or self._chosen.get(rows) != self._backend.name:
            state, counters = self._read()
            chosen = choose.choose("least squares", self._case(rows))
            if moved or self._backend.name != chosen.backend:
                self._backend = chosen.load()(self._problem, state, counters)
            known = {} if moved or len(self._chosen) >= _SIZES else self._chosen
            self._chosen = known | {rows: self._backend.name}
            self._place = place  # last: an interrupt before lets the next update begin again
        backend: Backend = self._backend
        return backend

    # ------------------------------------------------------------------ changes

    def _take(self, state: LeastSquaresState, counters: Counters, choice: Choice | None = None) -> None:
        """Make this the state, with a choice of the ridge where one is given, and its W the weights of the head."""
        backend, linear = self._backend, self._problem.linear
        head = state.W.to(linear.weight.dtype)
        chosen = None if choice is None else self._problem_for(linear, choice)

        def write() -> None:
            if choice is not None and chosen is not None:
                backend.penalize(chosen.prior, chosen.ridge)
                self._choice, self._looked = choice, int(counters[STEPS])
            backend.load(state, counters)
            store(linear, head)

        commit(write)

    def checkpoint(self) -> Any:
        """Return what `rollback` needs to undo the next update: references and small copies of the state."""
        # This runs at every step, and `_read` costs as much as the copies.
        if self._place != self._lies():
            self._read()
            if self._place:  # in other memory of the same device
                self._backend_for(1)
        return self._eager().checkpoint(), self._choice

    def rollback(self, checkpoint: Any) -> None:
        """Restore the state and the head's weights as they were at a checkpoint.

        Args:
            checkpoint: The result of `checkpoint`.
        """
        self._read()
        own, choice = checkpoint
        backend = self._eager()
        if choice != self._choice:
            _, prior, ridge = self._problem_for(self._head(), choice)
            backend.penalize(prior, ridge)
            self._choice = choice
        self._looked = -1
        backend.undo(own)

    def _eager(self) -> Backend:
        """A backend that learns outside of a graph, with the state as it is."""
        if self._captured is not None and self._backend is self._captured:
            state, counters = self._captured.read()
            self._backend, self._place = TorchBackend(self._problem, state.copy(), counters), ()
        backend: Backend = self._backend
        return backend

    # ------------------------------------------------------------------ forgetting and the ridge

    def _choose_ridge(self, known: float, earlier: int, lam: float) -> None:
        """Take the ridge and the prior of the largest evidence where that is due: after update number `earlier`, before
        which the head remembered `known` samples.
        """
        samples, steps = float(self._backend.counters[SAMPLES]), int(self._backend.counters[STEPS])
        if steps != self._looked and evidence.due(known, samples, steps, earlier, lam):
            self._take_best_ridge(samples)
            self._looked = steps

    @torch.no_grad()
    def _take_best_ridge(self, samples: float) -> None:
        """Take the ridge and the prior of the largest evidence; the head remembers this many samples."""
        (state, counters), (linear, prior, _) = self._backend.read(), self._problem
        choice, kappa = self._choice, self.noise_factor
        r = evidence.mean_weight(self.forgetting, int(counters[STEPS]))
        with torch.autocast(prior.device.type, enabled=False):
            for _ in range(evidence.ROUNDS):
                found = evidence.best_choice(state, self._initial, choice, samples, r, kappa, linear.bias is not None)
                if found == choice:
                    break
                _, new_prior, ridge = self._problem_for(linear, found)
                _, old_prior, _ = self._problem_for(linear, choice)
                state, choice = evidence.with_ridge(state, old_prior, ridge, new_prior), found
        if choice != self._choice and all(bool(part.isfinite().all()) for part in (state.T, state.W)):
            self._take(state, without_pending(counters), choice)

    # ------------------------------------------------------------------ learning inside a CUDA graph

    @torch.no_grad()
    def prepare_capture(self) -> Hashable:
        """Copy the state to the memory that captured updates write, if the head was changed elsewhere since.

        Returns:
            The addresses and settings on which a recording depends.
        """
        linear, (state, counters), captured = self._head(), self._read(), self._captured
        if captured is None or not captured.lies_in(linear):
            captured = CapturedState(self._problem, state)
        if self._backend is not captured:
            captured.load(state, counters)
        captured.W.copy_(follow(linear, captured.W))
        captured.known = float(counters[SAMPLES]), int(counters[STEPS])
        self._captured = self._backend = captured
        self._place = ()
        return *captured.place, *captured.forget(self.forgetting)

    @torch.no_grad()
    def update_captured(self, features: Tensor, targets: Tensor) -> Tensor:
        """Learn samples inside a CUDA graph, without synchronizing with the host.

        Args:
            features: Inputs of the head (..., in_features).
            targets: Targets (..., out_features).

        Returns:
            A boolean scalar on the device: False where a value was not finite, so that nothing was learned.
        """
        if self._captured is None or self._backend is not self._captured:
            raise RuntimeError("update_captured needs prepare_capture() first")
        return self._captured.update(features, targets)

    def replays(self, rows: int) -> int | None:
        """Return how many recorded updates of `rows` rows may run before `prepare_capture` chooses the ridge again.

        Args:
            rows: Number of rows of an update.

        Returns:
            The number of updates; None where a number fixes the ridge.
        """
        if self.ridge != "evidence" or self._captured is None:
            return None
        return evidence.updates_until(self._captured.known[0], rows, self.forgetting)

    @torch.no_grad()
    def finish_captured(self) -> None:
        """Compute the curvature after the last `update_captured`; no forward or backward pass reads it."""
        if self._captured is not None:
            self._captured.finish()


def without_pending(counters: Counters) -> Counters:
    """The counters of a state with nothing gathered in H."""
    return np.array([*counters[:PENDING], 0.0, 0.0])
