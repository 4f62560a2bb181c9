"""One head, its solver and the observation in progress, shared by the hook on the head and the optimizer.

The observation in progress is kept here, where the hook on the head finds it, and not on the optimizer: wrappers copy
an optimizer (Lightning) or hide it (accelerate), and the head must learn there too.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from sepsa import distributed
from sepsa.distributed import Samples
from sepsa.heads import Capturable, CapturableByRow, Forgets, HeadSolver, HoldsOut, LearnsPartly, Revertible
from sepsa.heads.base.checks import check_rows, check_weight
from sepsa.observe import epochs, ranks
from sepsa.observe.epochs import Epoch, Known
from sepsa.observe.hooks import HeadHook, InputHook, OutputHook, OutputProbe, hooks_of, remove_hooks
from sepsa.observe.rows import are_labels, check_dense, may_be_missing, observed_rows, weight_rows

if TYPE_CHECKING:
    from sepsa.observe.observation import Observation


class StepCheckpoint(NamedTuple):
    """What `Observer.rollback` restores."""

    state: Any  # the solver's
    statistics: list[tuple[Tensor, Tensor]]  # buffers of normalization layers, and copies of them
    body_steps: int
    forgot: bool
    epoch: Known | None


class Observer:
    """One head, its solver and the observation in progress, shared by the hook on the head and the optimizer."""

    forget_per_step = False  # False: the solver forgets in every update
    forgot = False  # whether the solver has forgotten since the body's last step
    expects_missing = False  # whether the last batch had samples without a target
    since_forgetting = 0  # samples that the solver has learned since it forgot

    def __init__(
        self,
        model: nn.Module,
        name: str,
        head: nn.Linear,
        solver: HeadSolver,
        process_group: Any = "auto",
        epoch: Epoch | None = None,
        is_default: bool = False,
    ) -> None:
        self.model, self.name, self.head, self.solver = model, name, head, solver
        self.process_group = process_group
        self.epoch = epoch  # None: the solver's own setting decides what it remembers
        self.is_default = is_default  # whether the solver is the default one, whose ridge follows the epoch too
        self.started_together = False  # whether all ranks have had one start
        self.joined: Any = None  # the DistributedDataParallel whose ranks may run out of batches
        self.head_fraction = 1.0
        self.generator = torch.Generator().manual_seed(torch.initial_seed())
        self.current: Observation | None = None
        self.body_steps = 0
        self.observed = False  # whether the head has learned since the body's last step
        self.warned = self.warned_alone = False
        self.probe: OutputProbe | None = OutputProbe()
        self.attach()

    def attach(self) -> None:
        """Put the hooks on head and model, in place of those of another observer."""
        self.holds_out = isinstance(self.solver, HoldsOut) and getattr(self.solver, "holds_out", True)
        self.sharded = distributed.sharded_group(self.model)
        self.revertible = isinstance(self.solver, Revertible)
        self.partial_targets = isinstance(self.solver, LearnsPartly) and self.solver.learns_partly
        self.normalizations = [module for module in self.model.modules() if hasattr(module, "track_running_stats")]
        for hook in list(self.head._forward_pre_hooks.values()):
            if isinstance(hook, HeadHook):  # of an earlier observer, or copied with the model
                for module in (self.head, self.model):
                    remove_hooks(module, hook.observer())
        for kind, name in ((HeadHook, "in_eager"), (InputHook, "note")):
            if not hasattr(
                getattr(kind, name), "_torchdynamo_disable"
            ):  # done here because it takes a second, which import would pay
                setattr(kind, name, torch.compiler.disable(getattr(kind, name)))  # type: ignore[no-untyped-call]
        head = {id(parameter) for parameter in self.head.parameters()}
        self.body = [parameter for parameter in self.model.parameters() if id(parameter) not in head]
        self.head.register_forward_pre_hook(HeadHook(self))
        if self.model is not self.head:
            if self.holds_out:
                self.hear_inputs()
            if self.probe is not None:
                self.head.register_forward_hook(OutputHook(self))
                self.model.register_forward_hook(OutputHook(self))

    def hear_inputs(self) -> None:
        """Put the hook for inputs on the model, unless it is there."""
        if not any(isinstance(hook, InputHook) for hook in hooks_of(self.model, self)):
            self.model.register_forward_pre_hook(InputHook(self), with_kwargs=True)

    def detach(self) -> None:
        for module in (self.head, self.model):
            remove_hooks(module, self)

    @property
    def attached(self) -> bool:
        """Whether the hook on the head is this observer's."""
        return bool(hooks_of(self.head, self))

    def observing(self) -> Observation | None:
        """The observation in progress to which a pass in this thread belongs, if any."""
        observation = self.current
        if observation is None or observation.learning or observation.thread != get_ident():
            return None
        return observation

    @contextlib.contextmanager
    def one_graph(self) -> Iterator[None]:
        """A context in which a compiled model is one graph even if the solver holds out samples.

        The solver then identifies samples by their rows in the data set, not by the model's inputs.
        """
        hooks = [hook for module in (self.head, self.model) for hook in hooks_of(module, self)]
        for hook in hooks:
            hook.in_graph = True
        try:
            yield
        finally:
            for hook in hooks:
                hook.in_graph = not hook.holds_out

    def learn(self, observation: Observation, features: Tensor) -> Tensor:
        """Let the head learn. Returns the features that the head is called with."""
        if observation.learned:
            raise RuntimeError(
                f"the forward inside observe reached the head {self.name!r} twice: "
                "use one observe for each pass through the model"
            )
        observation.reached = observation.learning = True  # so that the solver may call its head
        if self.epoch is not None:
            self.note_samples(observation, features.numel() // features.shape[-1])
        try:
            if observation.captured:
                excluded = self._learn_captured(observation, features)
            elif observation.ranks and self.process_group is not None and (group := ranks.group_of(self)) is not None:
                excluded = ranks.learn_together(self, group, observation, features)
            else:
                excluded = self._learn_alone(observation, features)
        finally:
            observation.learning = False
        observation.learned = self.observed = True
        observation.excluded = excluded
        if not features.requires_grad:
            observation.thaw()
        else:
            if excluded is not None:
                features = torch.where(excluded.view(*features.shape[:-1], 1), features.detach(), features)
            if not observation.frozen and not (observation.ranks and distributed.takes_gradients(self.head)):
                observation.freeze(self.head)
        return features

    def learn_compiled(self, features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Let the head learn in a compiled graph, which may hold copies of its parameters. Returns `excluded_rows`."""
        observation = self.observing()
        if observation is None:
            return None
        frozen, observation.frozen = observation.frozen, ()
        self.learn(observation, features)
        observation.frozen = frozen
        for copy, parameter in ((weight, self.head.weight), (bias, self.head.bias)):
            if copy is not None and copy.data_ptr() != parameter.data_ptr():
                copy.copy_(parameter.detach())
        return observation.excluded

    def _learn_alone(self, observation: Observation, features: Tensor) -> Tensor | None:
        """Let the head learn this process's rows that have a target. Returns the mask `excluded_rows`."""
        targets, weight = observation.targets, observation.sample_weight
        try:
            # Reading targets on a GPU makes the host wait for the forward pass. So there the solver, which checks its
            # result, finds the first batch with missing targets, unless rows are drawn and it may not see them.
            look = may_be_missing(targets) if targets.is_cpu else self.expects_missing or self.head_fraction < 1.0
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
            identity = observation.identity(features.numel() // features.shape[-1]) if self.holds_out else None
            self.update(features, observation.targets, observation.sample_weight, identity)
            return self.held_out if self.holds_out else None
        self.check_samples(observation, features, per_output_weight=self.partial_targets)
        samples, rows = self.draw(observation, features)
        if not len(rows):
            return self.excluded_rows(observation, features, None)
        self.update(*samples)
        return self.excluded_rows(observation, features, self.held_out, rows)

    def _learn_captured(self, observation: Observation, features: Tensor) -> Tensor | None:
        """Let the head learn inside a CUDA graph, without the host. Returns the mask `excluded_rows`."""
        rows = features.detach().reshape(-1, features.shape[-1])
        targets, n = observation.targets.reshape(len(rows), -1), len(rows)
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

    def update(self, features: Tensor, targets: Tensor, weight: Tensor | None, identity: Tensor | None) -> None:
        """Let the solver learn these samples; with `forget_per_step` it forgets once for each step of the body."""
        options = {"identity": identity} if self.holds_out else {}
        if not self.forget_per_step:
            self.solver.update(features, targets, weight, **options)
            return
        solver = cast(Forgets, self.solver)
        try:
            solver.forgets = not self.forgot
            self.solver.update(features, targets, weight, **options)
        finally:
            solver.forgets = True
        self.forgot = True

    def note_samples(self, observation: Observation, n: int) -> None:
        """Take note of n samples, and let the solver remember one epoch where its length is known."""
        assert self.epoch is not None
        if observation.ranks:
            if self.epoch.told:
                raise ValueError(
                    "epoch is for one process: among ranks use a solver with its own forgetting, as "
                    "RLS(forgetting=1 - batch / samples) with the samples of all ranks"
                )
            return
        if observation.captured:
            return  # `follow_epoch` was called before the graph
        watched = self.epoch.watches
        self.epoch.note(observation.identity(n) if watched else None, observation.targets, n)
        if watched and not self.epoch.watches and not self.holds_out:
            remove_hooks(self.model, self, InputHook)
        self.follow_epoch(n)

    def follow_epoch(self, n: int) -> None:
        """From the second epoch on, let the solver forget so much before it learns n samples that it remembers one."""
        since, self.since_forgetting = self.since_forgetting, n + self.since_forgetting * self.forgot
        epoch, solver = self.epoch, cast(Any, self.solver)
        if epoch is None or epoch.length is None or epoch.samples <= epoch.length or self.forgot:
            return
        n = max(n, since) if self.forget_per_step else n
        solver.forgetting = epochs.forgetting(epoch.length, n, self.head.in_features)
        if self.is_default and not epoch.followed and any(parameter.requires_grad for parameter in self.body):
            epoch.followed = 1
            solver.raise_ridge(max(epochs.ridge(max(n, epoch.batch)), solver.ridge))

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

    def checkpoint(self) -> StepCheckpoint:
        """The state that a forward pass in training mode changes, for `rollback`."""
        statistics = [
            (buffer, buffer.clone())
            for module in self.normalizations
            if module.training
            for buffer in module._buffers.values()
            if buffer is not None
        ]
        state = cast(Revertible, self.solver).checkpoint() if self.revertible else None
        epoch = None if self.epoch is None else self.epoch.known()
        return StepCheckpoint(state, statistics, self.body_steps, self.forgot, epoch)

    def rollback(self, checkpoint: StepCheckpoint, learned: bool) -> None:
        """Restore `checkpoint` after a step that failed before the body moved; `learned`: after the head's update."""
        if self.body_steps != checkpoint.body_steps:
            return
        if self.revertible and learned:
            cast(Revertible, self.solver).rollback(checkpoint.state)
            self.forgot = checkpoint.forgot
            if self.epoch is not None and checkpoint.epoch is not None:
                self.epoch.load(checkpoint.epoch)
        for buffer, before in checkpoint.statistics:
            buffer.copy_(before)

    def __getstate__(self) -> dict[str, Any]:
        own = {"generator": self.generator.get_state(), "current": None, "sharded": None, "joined": None}
        group = {"process_group": self.process_group if self.process_group in ("auto", None) else "auto"}
        return self.__dict__ | own | group

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.generator = torch.Generator()
        self.generator.set_state(state["generator"])
        self.attach()
