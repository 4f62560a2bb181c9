"""One solver for each output of a head, so that a sample may have targets for only some of the outputs."""

from __future__ import annotations

import copy
from typing import Any, ClassVar, Generic, Literal, TypeVar, overload

import torch
from torch import Tensor, nn

from sepsa.heads.base import partial_targets
from sepsa.heads.base.checks import check_outputs
from sepsa.heads.base.head import OwnsHead, head_of, shape_words
from sepsa.heads.base.parameters import commit, place_of
from sepsa.heads.protocols import HeadSolver, Posterior, Revertible
from sepsa.states import schema

S = TypeVar("S", bound=Any)  # a `HeadSolver`, of which some offer more


class PerOutput(OwnsHead, Generic[S]):
    """Train each output of a head by a solver of its own, so that samples may have targets for only some outputs.

    Choose it for several targets of which some are missing in a sample, and for bandits, where each arm is an output
    and a round shows the reward of one arm. It equals out_features heads with one output, each of which learns the
    samples that have its target, at out_features times the cost. A target of NaN, or a weight of 0, marks an output
    that was not observed in a sample: that output neither learns nor forgets.

    Args:
        solver: A solver that is not bound to a head, such as `RLS(forgetting=0.99)`; it is copied for each output.

    Attributes:
        solvers: The solvers, one per output, after `bind`.
        linear: The `nn.Linear` that the solver is bound to, or None.

    See also:
        `LogisticNewton` for binary outputs that are partly missing.

    Examples:
        >>> import torch
        >>> from sepsa import RLS, PerOutput
        >>> arms = PerOutput(RLS()).bind(torch.nn.Linear(3, 2))
        >>> rewards = torch.tensor([[1.0, torch.nan]])  # that of the first arm
        >>> arms.update(torch.ones(1, 3), rewards)
        >>> [solver.samples for solver in arms.solvers]
        [1.0, 0.0]
    """

    learns_partly = True
    _not_copied: ClassVar[tuple[str, ...]] = ("_place",)
    _place: tuple[int, int | None] | None = None  # of the head, when the rows that the solvers own were laid over it

    def __init__(self, solver: S) -> None:
        if not isinstance(solver, HeadSolver) or not isinstance(solver, Revertible):
            raise TypeError(
                f"solver must be a head solver with checkpoint() and rollback(), got {type(solver).__name__}: "
                "an update is taken back where one output refuses it"
            )
        if getattr(solver, "linear", None) is not None:
            raise ValueError(
                f"solver must be a new one that owns no head, got {solver!r}: it is copied for each output"
            )
        self.solver = solver
        self.solvers: list[S] = []

    # ------------------------------------------------------------------ state

    def _start(self, linear: nn.Linear) -> None:
        rows = [nn.Linear(linear.in_features, 1, linear.bias is not None, "meta") for _ in range(linear.out_features)]
        lay_over(rows, linear)
        self.solvers = [copy.deepcopy(self.solver).bind(row) for row in rows]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the outputs' solvers, in order."""
        self._ready()
        return {"outputs": [solver.state_dict() for solver in self.solvers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state, with its settings.

        Args:
            state_dict: The result of `state_dict` of a solver whose head has as many outputs.

        Raises:
            ValueError: An entry is missing or wrong; the message names it and nothing changed.
        """
        self._ready()
        states = schema.read("state_dict", state_dict, {"outputs"}, "PerOutput").items("outputs", len(self.solvers))
        fresh = copy.deepcopy(self.solvers)
        for solver, state in zip(fresh, states.values, strict=True):
            solver.load_state_dict(state)
        self.solvers, self._place = fresh, None  # whose heads are copies, until they are laid over the head again

    def checkpoint(self) -> Any:
        """Return what `rollback` restores."""
        self._ready()
        return list(enumerate(solver.checkpoint() for solver in self.solvers))

    def rollback(self, checkpoint: Any) -> None:
        """Restore the state and the head's weights as they were at a checkpoint.

        Args:
            checkpoint: The result of `checkpoint`.
        """
        self._ready()

        def write() -> None:
            for j, own in checkpoint:
                self.solvers[j].rollback(own)

        commit(write)

    @property
    def forgets(self) -> bool:
        """Whether the next update forgets; see `sepsa.heads.Forgets`."""
        return bool(self._all[0].forgets)

    @forgets.setter
    def forgets(self, value: bool) -> None:
        for solver in self._all:
            solver.forgets = value

    @property
    def forgetting(self) -> float:
        """The forgetting of the outputs' solvers, where they forget."""
        return float(self._all[0].forgetting)

    @forgetting.setter
    def forgetting(self, value: float) -> None:
        for solver in self._all:
            solver.forgetting = value

    @property
    def _all(self) -> list[S]:
        """The solvers, or before `bind` the one that is copied."""
        return self.solvers or [self.solver]

    @property
    def steps(self) -> int:
        """The number of updates learned by the output that has learned most."""
        self._ready()
        return max(int(getattr(solver, "steps", 0)) for solver in self.solvers)

    @property
    def samples(self) -> float:
        """The number of samples that an output remembers; a mean over the outputs."""
        self._ready()
        return sum(float(getattr(solver, "samples", 0.0)) for solver in self.solvers) / len(self.solvers)

    def covariance(self) -> Tensor:
        """Return B (out_features, p, p), the inverse curvature of each output."""
        self._ready()
        return torch.stack([solver.covariance() for solver in self.solvers])

    def health(self) -> dict[str, float]:
        """Return the numbers of the solvers' `health()`, each for the output where it is worst."""
        self._ready()
        return partial_targets.worst([solver.health() for solver in self.solvers])

    def __repr__(self) -> str:
        return f"PerOutput({self.solver!r}{shape_words(self.linear)})"

    def _ready(self) -> nn.Linear:
        """The head, with the rows that the solvers own laid over its memory."""
        linear = head_of(self)
        if (place := place_of(linear)) != self._place:  # set last, so that after an interrupt all are laid again
            lay_over([solver.linear for solver in self.solvers], linear)
            self._place = place
        return linear

    # ------------------------------------------------------------------ learning

    def loss(self, outputs: Tensor, targets: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        """Return the solver's loss as a weighted mean over the observed outputs, for the body to follow.

        Args:
            outputs: Outputs (..., out_features).
            targets: Targets of the same shape, NaN where not observed.
            sample_weight: Weights (...) or (..., out_features).

        Returns:
            A scalar.
        """
        self._ready()
        check_outputs(outputs, targets)
        observed = ~targets.isnan()
        one = (outputs.numel(), 1, 1)  # each output of each sample
        each = torch.func.vmap(self.solvers[0].loss)(outputs.reshape(one), targets.where(observed, 0).reshape(one))
        return partial_targets.mean_loss(each.reshape(outputs.shape), observed, sample_weight)

    @torch.no_grad()
    def update(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None = None) -> None:
        """Learn samples as one block; an output without any observation does not change.

        Args:
            features: Inputs of the head (..., in_features).
            targets: Targets (..., out_features), NaN where not observed.
            sample_weight: Weights (...) or (..., out_features); 0 marks what was not observed.

        Raises:
            ValueError: A shape is wrong or a value is not finite; nothing was learned.
        """
        linear = self._ready()
        x, y, weight, observed = partial_targets.rows_of(linear, features, targets, sample_weight)
        learning = range(len(self.solvers)) if observed is None else observed.any(0).nonzero()[:, 0].tolist()
        before = [(j, self.solvers[j].checkpoint()) for j in learning]
        try:
            linear.weight.detach()[:0].zero_()  # tells autograd that the weight changes, as a compiled update does not
            for j in learning:
                at = slice(None) if observed is None else observed[:, j].nonzero()[:, 0]
                self.solvers[j].update(x[at], y[at, j : j + 1], None if weight is None else weight[at, j])
        except BaseException:
            self.rollback(before)
            raise

    # ------------------------------------------------------------------ prediction

    @overload
    def predict(
        self, features: Tensor, return_std: Literal[False] = False, *, noise: float | None = None
    ) -> Tensor: ...
    @overload
    def predict(self, features: Tensor, return_std: Literal[True], *, noise: float | None = None) -> Posterior: ...
    def predict(self, features: Tensor, return_std: bool = False, *, noise: float | None = None) -> Tensor | Posterior:
        """Predict all outputs, on request with their standard deviations.

        Args:
            features: Inputs of the head (..., in_features).
            return_std: Whether to return standard deviations too, where the solver has them.
            noise: σ, as for `RLS.predict`.

        Returns:
            Predictions (..., out_features), or a `Posterior(mean, std)` of two such tensors.
        """
        self._ready()
        if not return_std:
            return torch.cat([solver.predict(features) for solver in self.solvers], -1)
        known = {} if noise is None else {"noise": noise}
        found = [solver.predict(features, return_std=True, **known) for solver in self.solvers]
        return Posterior(torch.cat([mean for mean, _ in found], -1), torch.cat([std for _, std in found], -1))

    def sample(
        self, features: Tensor, *, noise: float | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Predict with weights drawn from their posteriors, for Thompson sampling; the solver must be an `RLS`.

        Args:
            features: Inputs of the head (..., in_features). All of them see the same weights.
            noise: σ, as for `RLS.predict`.
            generator: Source of randomness; None for torch's default.

        Returns:
            Predictions (..., out_features).
        """
        self._ready()
        return torch.cat([solver.sample(features, noise=noise, generator=generator) for solver in self.solvers], -1)


def lay_over(rows: list[nn.Linear], linear: nn.Linear) -> None:
    """Lay the parameters of heads of one output over the memory of a head, of which each then is a row."""
    for j, row in enumerate(rows):
        for name, parameter in linear._parameters.items():
            if parameter is not None:
                row._parameters[name] = nn.Parameter(parameter.detach()[j : j + 1])
