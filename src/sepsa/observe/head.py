"""One head and its solver: how the head learns the rows of an observation, and how a failed step is undone.

Where samples come again in every epoch, a head at forgetting 1 counts a sample of k epochs as k samples, and the ridge
loses its weight. With `samples_per_epoch` N, an update of n rows forgets with λ = 1 - n/N from the second epoch on: the
head remembers about the N rows of one epoch, each of them once.

Before each update a solver that anneals is told how far the body's learning rate has fallen from its peak.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sepsa import distributed
from sepsa.distributed import Samples
from sepsa.heads import RLS, Anneals, Capturable, CapturableByRow, HeadSolver, HoldsOut, LearnsPartly, Revertible
from sepsa.heads.base.checks import check_rows, check_weight
from sepsa.heads.math.least_squares import copies
from sepsa.observe.observation import Observation
from sepsa.observe.rates import Rates, ratio_of, seen
from sepsa.observe.rows import are_labels, check_dense, may_be_missing, observed_rows, weight_rows

ROWS_PER_FEATURE = 8  # that a head remembers at least, where an epoch has fewer
LEAST_FORGETTING = 0.5  # for batches that are half of an epoch or more


class HeadCheckpoint(NamedTuple):
    """What `TrainedHead.rollback` restores."""

    state: Any  # the solver's checkpoint; of one that is not `Revertible`, its state and the head's parameters
    counters: tuple[Any, ...]
    forgetting: float | None  # where `samples_per_epoch` sets it
    generator: Tensor | None  # where rows are drawn
    statistics: list[tuple[Tensor, Tensor]]  # buffers of normalization layers, and copies of them


class TrainedHead:
    """One head of a model, its solver, and how many rows it has learned."""

    forget_per_step = False  # False: the solver forgets in every update
    forgot = False  # whether the solver has forgotten since the body's last step
    expects_missing = False  # whether the last batch had samples without a target
    samples_per_epoch: int | None = None  # None: the solver's own setting decides what it remembers
    samples = 0  # rows that were offered to the head, on all ranks
    since_forgetting = 0  # of these, since the solver forgot
    rows_per_sample = 1  # of the last captured step
    base: Optimizer | None = None  # of the body, whose rate the solver follows; None: it does not anneal
    rates = Rates()
    body_steps = 0
    observed = False  # whether the head has learned since the body's last step
    warned = False
    head_fraction = 1.0

    def __init__(self, model: nn.Module, name: str, head: nn.Linear, solver: HeadSolver) -> None:
        self.model, self.name, self.head, self.solver = model, name, head, solver
        self.shape = head.weight.shape
        self.generator = torch.Generator().manual_seed(torch.initial_seed())

    def look(self) -> None:
        """Look up what the solver can do and what the model has; again after a copy."""
        self.refuses_missing = type(self.solver) is RLS
        self.holds_out = isinstance(self.solver, HoldsOut) and getattr(self.solver, "holds_out", True)
        self.revertible, self.anneals = isinstance(self.solver, Revertible), isinstance(self.solver, Anneals)
        self.partial_targets = isinstance(self.solver, LearnsPartly) and self.solver.learns_partly
        self.normalizations = [module for module in self.model.modules() if hasattr(module, "track_running_stats")]
        head = {id(parameter) for parameter in self.head.parameters()}
        self.body = [parameter for parameter in self.model.parameters() if id(parameter) not in head]

    # ------------------------------------------------------------------ learning

    def learn_alone(self, observation: Observation, features: Tensor) -> Tensor | None:
        """Let the head learn this process's rows that have a target. Returns the mask `excluded_rows`."""
        targets, weight = observation.targets, observation.sample_weight
        try:
            # Reading targets on a GPU makes the host wait for the forward pass. So there the solver, which checks its
            # result, finds the first batch with missing targets, unless rows are drawn and it may not see them.
            # On a CPU only an `RLS` does, because others may learn from rows of which no output is observed.
            if self.refuses_missing or not targets.is_cpu:
                look = self.expects_missing or self.head_fraction < 1.0
            else:
                look = may_be_missing(targets)
            if look:
                observation.observed = observed_rows(features, targets, self.partial_targets)
                self.expects_missing = observation.observed is not None
            return self._learn_observed(observation, features)
        except Exception as error:
            check_dense("features", features)
            check_dense("targets", targets)
            if weight is not None:
                check_dense("sample_weight", weight)
            if observation.observed is not None or not isinstance(error, ValueError):
                raise
            observation.observed = observed_rows(features, targets, self.partial_targets)
            if observation.observed is None:
                raise
        self.expects_missing = True
        return self._learn_observed(observation, features)

    def _learn_observed(self, observation: Observation, features: Tensor) -> Tensor | None:
        """Let the head learn `head_fraction` of the observed rows. Returns the mask `excluded_rows`."""
        if observation.observed is None and self.head_fraction == 1.0:
            if not self.holds_out and self.samples_per_epoch is None and not self.forget_per_step:
                if self.base is not None:
                    self.follow_rate()
                self.solver.update(features, observation.targets, observation.sample_weight)
                return None
            n = features.numel() // features.shape[-1]
            identity = observation.identity(n) if self.holds_out else None
            self.update(features, observation.targets, observation.sample_weight, identity, n)
            return self.held_out
        n = features.numel() // features.shape[-1]
        self.check_samples(observation, features, per_output_weight=self.partial_targets)
        samples, rows = self.draw(observation, features)
        if not len(rows):
            return self.excluded_rows(observation, features, None)
        self.update(*samples, n)
        return self.excluded_rows(observation, features, self.held_out, rows)

    def learn_captured(self, observation: Observation, features: Tensor) -> Tensor | None:
        """Let the head learn inside a CUDA graph, without the host. Returns the mask `excluded_rows`."""
        rows = features.detach().reshape(-1, features.shape[-1])
        targets, n = observation.targets.reshape(len(rows), -1), len(rows)
        self.rows_per_sample = 1 if observation.rows is None else max(1, n // len(observation.rows))
        count = math.ceil(self.head_fraction * n)
        drawn = None
        if count < n:
            drawn = torch.rand(n, device=rows.device).topk(count).indices
            rows, targets = rows[drawn], targets[drawn]
        if observation.group is not None:
            rows, targets = (distributed.gather_equal(observation.group, part) for part in (rows, targets))
        if not self.holds_out or observation.rows is None:
            observation.finite = cast(Capturable, self.solver).update_captured(rows, targets)
            return None
        names = observation.rows
        if len(names) != n:
            raise ValueError(
                f"a captured solver that holds out samples needs one row of features for each, got {n} for "
                f"{len(names)} samples: use optimizer.learn without a graph"
            )
        names = names if drawn is None else names[drawn]
        observation.finite = cast(CapturableByRow, self.solver).update_captured(rows, targets, names)
        return self.excluded_rows(observation, features, self.held_out, drawn)

    def update(
        self, features: Tensor, targets: Tensor, weight: Tensor | None, identity: Tensor | None, offered: int
    ) -> None:
        """Let the solver learn these samples, drawn from as many `offered` rows of all ranks."""
        options = {"identity": identity} if self.holds_out else {}
        self.follow_rate()
        if self.samples_per_epoch is None and not self.forget_per_step:
            self.solver.update(features, targets, weight, **options)
            return
        solver: Any = self.solver
        self.remember_one_epoch(offered)
        try:
            if self.forget_per_step:
                solver.forgets = not self.forgot
            solver.update(features, targets, weight, **options)
        finally:
            if self.forget_per_step:
                solver.forgets = True
        self.count(offered)
        self.forgot = self.forget_per_step

    def remember_one_epoch(self, n: int) -> None:
        """From the second epoch on, set the forgetting of an update of n rows so that the head remembers one epoch."""
        length = self.samples_per_epoch
        if length is None or self.samples + n <= length or self.forgot:
            return
        if self.forget_per_step:
            n = max(n, self.since_forgetting)  # of the micro-batches of the last step
        cast(Any, self.solver).forgetting = max(1 - n / self.memory(length), LEAST_FORGETTING)

    def memory(self, length: int) -> int:
        """How many rows the head remembers where an epoch has this length."""
        return max(length, ROWS_PER_FEATURE * self.head.in_features)

    def follow_rate(self) -> None:
        """Tell a solver that anneals how far the body's rate has fallen from its peak."""
        if self.base is None or not self.anneals:
            return
        self.rates = seen(self.rates, self.base.param_groups)
        if self.rates.fell:
            length = self.samples_per_epoch
            cast(Anneals, self.solver).anneal(ratio_of(self.rates), None if length is None else self.memory(length))

    def count(self, n: int) -> None:
        """Count n rows that were offered to the head."""
        self.samples += n
        self.since_forgetting = n + self.since_forgetting * self.forgot

    def check_samples(self, observation: Observation, features: Tensor, per_output_weight: bool) -> None:
        """Raise an error for samples that cannot be indexed by rows; the solver checks integer targets."""
        targets = observation.targets
        integers = not targets.is_floating_point() and (self.partial_targets or are_labels(features, targets))
        check_rows(self.head, features, None if integers else targets)
        if not per_output_weight:
            check_weight(self.head, features, observation.sample_weight)

    def draw(self, observation: Observation, features: Tensor) -> tuple[Samples, Tensor]:
        """Draw `head_fraction` of the observed rows at random. Returns the samples and the indices of their rows."""
        targets, sample_weight = observation.targets, observation.sample_weight
        flat = features.reshape(-1, features.shape[-1])
        n = len(flat)
        if observation.observed is None:
            rows = torch.randperm(n, generator=self.generator)
        else:
            rows = observation.observed.nonzero()[:, 0].cpu()
            if self.head_fraction < 1.0:
                rows = rows[torch.randperm(len(rows), generator=self.generator)]
        rows = rows[: math.ceil(self.head_fraction * len(rows))].to(flat.device)
        weight = None if sample_weight is None else weight_rows(sample_weight, n)[rows]
        targets = targets.reshape(-1) if are_labels(features, targets) else targets.reshape(n, -1)
        identity = observation.identity(n) if self.holds_out else None
        if identity is not None:
            identity = identity[rows // (n // len(identity))]
        return Samples(flat[rows], targets[rows], weight, identity), rows

    @property
    def held_out(self) -> Tensor | None:
        """The solver's mask of the samples that it held out of the last update; None: no sample."""
        return cast(HoldsOut, self.solver).held_out if self.holds_out else None

    def excluded_rows(
        self, observation: Observation, features: Tensor, held: Tensor | None, rows: Tensor | None = None
    ) -> Tensor | None:
        """A mask (n,) of the rows from which the body must not learn: held out, or without a target. None: no row.

        `held` says for each of `rows`, or of all, whether the solver held it out.
        """
        if held is not None and rows is not None:
            held = held.new_zeros(features.numel() // features.shape[-1]).index_put((rows,), held)
        if observation.observed is None:
            return held
        return ~observation.observed if held is None else held | ~observation.observed

    def body_moved(self) -> None:
        """Count a step of the body; warn once if the head has a gradient but has not learned since the last step."""
        self.body_steps += 1
        if not self.observed and not self.warned:
            weight = self.head._parameters["weight"]
            if weight is not None and weight.grad is not None:
                self.warned = True
                warnings.warn(
                    f"the head {self.name!r} has learned nothing since the last step, so it did not change: run the "
                    "model inside `with optimizer.observe(targets):`, or inside `with sepsa.observe(model, targets):` "
                    "where the optimizer is wrapped",
                    stacklevel=3,
                )
        self.observed = self.forgot = False

    # ------------------------------------------------------------------ undoing a step

    def checkpoint(self, statistics: bool = True) -> HeadCheckpoint:
        """What a step may change before the body moves, for `rollback`; `statistics`: with those of normalizations."""
        if self.revertible:
            state = cast(Revertible, self.solver).checkpoint()
        else:
            state = self.solver.state_dict(), [parameter.detach().clone() for parameter in self.head.parameters()]
        return HeadCheckpoint(
            state,
            (
                self.body_steps,
                self.forgot,
                self.observed,
                self.expects_missing,
                self.samples,
                self.since_forgetting,
                self.rates,
            ),
            None if self.samples_per_epoch is None else cast(Any, self.solver).forgetting,
            None if self.head_fraction == 1.0 else self.generator.get_state(),
            self._statistics() if statistics and self.normalizations else [],
        )

    def _statistics(self) -> list[tuple[Tensor, Tensor]]:
        training = [module for module in self.normalizations if module.training]
        buffers = [buffer for module in training for buffer in module._buffers.values() if buffer is not None]
        return list(zip(buffers, copies(buffers), strict=True))

    def rollback(self, checkpoint: HeadCheckpoint, reached: bool) -> None:
        """Restore `checkpoint` after a step that failed, unless the body has moved; `reached`: with solver and head."""
        if self.body_steps != checkpoint.counters[0]:
            return
        if reached and self.revertible:
            cast(Revertible, self.solver).rollback(checkpoint.state)
        elif reached:
            state, parameters = checkpoint.state
            self.solver.load_state_dict(state)
            for parameter, before in zip(self.head.parameters(), parameters, strict=True):
                parameter.detach().copy_(before)
        _, self.forgot, self.observed, self.expects_missing, self.samples, *rest = checkpoint.counters
        self.since_forgetting, self.rates = rest
        if checkpoint.forgetting is not None:
            cast(Any, self.solver).forgetting = checkpoint.forgetting
        if checkpoint.generator is not None:
            self.generator.set_state(checkpoint.generator)
        for buffer, before in checkpoint.statistics:
            buffer.copy_(before)
