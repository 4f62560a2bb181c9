"""What SepSA asks of a head solver, and what some solvers can do beyond it.

A solver is any object with the five methods of `HeadSolver`; it does not have to inherit from anything.
`sepsa.testing.check_solver` checks that it keeps the promises of the protocol.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

from sepsa.validation import NotFinite as NotFinite

Solver = TypeVar("Solver", bound="HeadSolver")


class PrecisionWarning(UserWarning):
    """A head lost digits because of the scale of its features, or left out rows for that reason in a captured step."""


class Posterior(NamedTuple):
    """A prediction with its standard deviation, which `predict(..., return_std=True)` returns.

    Attributes:
        mean: Predictions (..., out_features).
        std: Their standard deviations (..., out_features).
    """

    mean: Tensor
    std: Tensor


@runtime_checkable
class HeadSolver(Protocol):
    """A convex method that owns one `nn.Linear`: it keeps the curvature and sets the weights in place.

    Write your own to train a head by another method; `SepSA(model, base, solver=...)` takes it.
    """

    def bind(self: Solver, linear: nn.Linear) -> Solver:
        """Take ownership of a head. Its present weights are the start.

        Args:
            linear: The head. A solver owns one head; binding another one is an error.

        Returns:
            The solver.
        """
        ...

    def update(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None = None) -> None:
        """Learn samples completely, or raise an error and change nothing. It may call its head.

        Args:
            features: Inputs of the head (..., in_features).
            targets: Targets as `loss` takes them.
            sample_weight: Weights (...), or None.

        Raises:
            NotFinite: Values that cannot be learned.
            TypeError: A wrong dtype.
            ValueError: A wrong shape, device or range.
        """
        ...

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss that the head minimizes, a mean over samples, for the body to follow.

        Args:
            outputs: Outputs of the head (..., out_features).
            targets: Targets as for `update`.

        Returns:
            A scalar.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return everything except the head's weights, as copies: tensors, numbers, strings, and lists and dicts of
        them.
        """
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state with the same bits.

        Args:
            state_dict: The result of `state_dict`.

        Raises:
            ValueError: The state does not fit; nothing changed.
        """
        ...


@runtime_checkable
class Capturable(Protocol):
    """A solver whose update can be recorded in a CUDA graph, where the host can read no value."""

    def prepare_capture(self) -> Hashable:
        """Prepare the state on the head's device, outside of any graph, before each run of recorded steps.

        Returns:
            A value on which a recording depends, beside tensors written in place: a recording is valid while it is
            equal.
        """
        ...

    def update_captured(self, features: Tensor, targets: Tensor) -> Tensor:
        """Learn samples without synchronizing with the host; rows that are not finite change nothing.

        Args:
            features: Inputs of the head (n, in_features).
            targets: Targets (n, out_features).

        Returns:
            A boolean scalar on the device: whether all rows were finite.
        """
        ...

    def replays(self) -> int | None:
        """Return how many updates may run before `prepare_capture` is called again.

        Returns:
            The number of updates; None where any number may.
        """
        ...

    def finish_captured(self) -> None:
        """Do what the last `update_captured` left for later because no forward or backward pass waits for it."""
        ...


@runtime_checkable
class Forgets(Protocol):
    """A solver that forgets once per update, except in an update before which `forgets` was set to False.

    Attributes:
        forgets: Whether the next update forgets; True by default.
    """

    forgets: bool


@runtime_checkable
class Settles(Protocol):
    """A solver that can leave the result of an update on a GPU, so that the host need not wait in the forward pass.

    Attributes:
        later: Whether the next update may; False by default. Whatever reads the head's state settles it first.
    """

    later: bool

    def settle(self) -> None:
        """Wait for the last update, and learn it by a slower route if its own could not.

        Raises:
            NotFinite: Values that cannot be learned; nothing was learned.
        """
        ...


@runtime_checkable
class LearnsPartly(Protocol):
    """A solver with one curvature per output, which takes samples of which some outputs are not observed.

    Attributes:
        learns_partly: Whether this solver does.
    """

    learns_partly: bool

    def loss(self, outputs: Tensor, targets: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        """Return the weighted mean loss over the observed outputs.

        Args:
            outputs: Outputs of the head (..., out_features).
            targets: Targets, NaN where not observed.
            sample_weight: Weights (...) or (..., out_features), or None.

        Returns:
            A scalar.
        """
        ...


@runtime_checkable
class Revertible(Protocol):
    """A solver that can undo its last updates, for a step in which the body could not follow."""

    def checkpoint(self) -> Any:
        """Return the present state for `rollback`; it is called before every step and should not copy large tensors."""
        ...

    def rollback(self, checkpoint: Any) -> None:
        """Restore the state and the head's weights as they were at a checkpoint.

        Args:
            checkpoint: The result of `checkpoint`.
        """
        ...
