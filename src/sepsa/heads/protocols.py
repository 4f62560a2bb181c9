"""What SepSA asks of a head solver, and what some solvers can do beyond it.

A solver is any object with the five methods of `HeadSolver`; nothing is to be inherited. `sepsa.testing.check_solver`
holds it to what they promise.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

Solver = TypeVar("Solver", bound="HeadSolver")


class PrecisionWarning(UserWarning):
    """A head lost digits to the scale of its features, or refused rows for that reason where it cannot raise."""


class NotFinite(ValueError):
    """Numbers that a head cannot learn from: NaN, Inf, or too large for its arithmetic. Nothing was learned."""


class Posterior(NamedTuple):
    """A prediction and its standard deviation, both (..., out_features)."""

    mean: Tensor
    std: Tensor


@runtime_checkable
class HeadSolver(Protocol):
    """A convex method that owns one `nn.Linear`: it keeps its curvature and sets its weights in place."""

    def bind(self: Solver, linear: nn.Linear) -> Solver:
        """Own `linear`, whose present weights are the start. Returns the solver; a second head is refused."""
        ...

    def update(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None = None) -> None:
        """Learn samples: features (..., in_features), targets as `loss` takes them, weights (...).

        Whole, or an error and nothing: `NotFinite` for numbers that cannot be learned, TypeError or another
        ValueError for what has the wrong shape, dtype, device or range. It may call its head.
        """
        ...

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss that the head minimizes, a mean over samples, for the body to follow."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything beside the head's own weights, as copies: tensors, numbers, strings, lists and dicts of them."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from such a state, bit for bit. Whole, or ValueError and nothing."""
        ...


@runtime_checkable
class Capturable(Protocol):
    """A solver whose update can be recorded in a CUDA graph, where the host can look at no number."""

    def prepare_capture(self) -> Hashable:
        """Get ready on the head's device, outside of any graph, before each run of recorded steps.

        Returns what a recording depends on beside tensors written in place: while it stays equal, a recording holds.
        """
        ...

    def update_captured(self, features: Tensor, targets: Tensor) -> Tensor:
        """`update` of rows (n, in_features) without a look from the host.

        Rows that are not finite change nothing. Returns a flag (0-d, bool) that says whether they were.
        """
        ...

    def finish_captured(self) -> None:
        """What the last `update_captured` left undone because neither forward nor backward pass waits for it."""
        ...


@runtime_checkable
class HoldsOut(Protocol):
    """A solver that judges itself by samples it holds out, from which the body must not learn either."""

    @property
    def held_out(self) -> Tensor | None:
        """Which rows (n,) of the last update were held out, as booleans; None where none was."""
        ...

    def update(
        self,
        features: Tensor,
        targets: Tensor,
        sample_weight: Tensor | None = None,
        *,
        identity: Tensor | None = None,
    ) -> None:
        """Learn samples like `HeadSolver.update`; inputs `identity` (b, ...), b a divisor of n, identify repeats."""
        ...


class CapturableByRow(Protocol):
    """What a solver is that is both `Capturable` and `HoldsOut`: in a graph it knows samples by their rows."""

    def prepare_capture(self, inputs: Tensor | None = None, targets: Tensor | None = None) -> Hashable:
        """Prepare a run over the rows of this data set on the device, like `Capturable.prepare_capture`."""
        ...

    def update_captured(self, features: Tensor, targets: Tensor, rows: Tensor | None = None) -> Tensor:
        """Learn these `rows` (n,) of the data set like `Capturable.update_captured`; `held_out` is then a mask.

        Without `rows`, outside of a graph, samples are known by their features.
        """
        ...


@runtime_checkable
class Forgets(Protocol):
    """A solver that forgets once in an update, unless `forgets`, True as a rule, was set to False before it."""

    forgets: bool


@runtime_checkable
class LearnsPartly(Protocol):
    """A solver with a curvature for each output, which takes samples of which some outputs are not observed."""

    learns_partly: bool

    def loss(self, outputs: Tensor, targets: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        """The mean loss over what was observed, by weights (...) or (..., out_features)."""
        ...


@runtime_checkable
class Revertible(Protocol):
    """A solver that can take its last updates back, for where the body could not follow them."""

    def checkpoint(self) -> Any:
        """The present state, to come back to by `rollback`. Called before every step: references, or small copies."""
        ...

    def rollback(self, checkpoint: Any) -> None:
        """The state and the head's weights as they were at `checkpoint`."""
        ...
