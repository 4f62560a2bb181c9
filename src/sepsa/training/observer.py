"""One head with its solver and the observation in progress, shared by the hook on the head and the optimizer.

The observation in progress is kept here, where the hook on the head finds it, and not on the optimizer: wrappers copy
an optimizer (Lightning) or hide it (accelerate), and the head must learn there too.

Where samples come again in every epoch, a head at forgetting 1 counts a sample of k epochs as k samples, and the ridge
loses its weight. With `samples_per_epoch` N, an update of n rows forgets with λ = 1 - n/N from the second epoch on: the
head remembers about the N rows of one epoch, each of them once.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable
from operator import attrgetter
from threading import get_ident
from types import TracebackType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from sepsa.heads import RLS, Capturable, HeadSolver, LearnsPartly, Revertible
from sepsa.heads.base.checks import own_parameters
from sepsa.heads.least_squares.math import copies
from sepsa.ranks import exchange
from sepsa.training import ranked_rows
from sepsa.training.hooks import (
    HeadHook,
    HeadNotReached,
    OutputHook,
    OutputProbe,
    hook_of,
    not_reached,
    remove_hooks,
)
from sepsa.training.observation import Observation
from sepsa.training.rows import check_dense, check_samples, draw, may_be_missing, observed_rows

ROWS_PER_FEATURE = 8  # that a head remembers at least, where an epoch has fewer
LEAST_FORGETTING = 0.5  # for batches that are half of an epoch or more
# Attributes of an observer that a step changes.
_COUNTERS = ("body_steps", "forgot", "observed", "expects_missing", "samples", "since_forgetting")
_counters_of = attrgetter(*_COUNTERS)

# The hooks on tensors that autograd saves, which torch.utils.checkpoint sets, or None.
_saved_tensors_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda tracing: None)


class HeadCheckpoint(NamedTuple):
    """What `Observer.rollback` restores."""

    state: Any  # the solver's checkpoint; of one that is not `Revertible`, its state and the head's parameters
    counters: tuple[Any, ...]
    forgetting: float | None  # where `samples_per_epoch` sets it
    generator: Tensor | None  # where rows are drawn
    statistics: list[tuple[Tensor, Tensor]]  # buffers of normalization layers, and copies of them


class Observer:
    """One head, its solver, the observation in progress, and how many rows the head has learned, alone or in ranks."""

    current: Observation | None = None
    forget_per_step = False  # False: the solver forgets in every update
    forgot = False  # whether the solver has forgotten since the body's last step
    expects_missing = False  # whether the last batch had samples without a target
    samples_per_epoch: int | None = None  # None: the solver's own setting decides what it remembers
    samples = 0  # rows that were offered to the head, on all ranks
    since_forgetting = 0  # of these, since the solver forgot
    rows_per_sample = 1  # of the last captured step
    body_steps = 0
    observed = False  # whether the head has learned since the body's last step
    warned = False
    head_fraction = 1.0
    by_default = False  # whether the user named no solver, and no targets have come yet
    process_group: Any = "auto"
    sharded: Any = None  # the group of fully_shard, if the model is sharded
    ddp: Callable[[], Any] = staticmethod(lambda: None)  # a weak reference to the DistributedDataParallel, once known
    started_together = False  # whether all ranks have had one start
    warned_alone = False

    def __init__(
        self, model: nn.Module, name: str, head: nn.Linear, solver: HeadSolver, process_group: Any = "auto"
    ) -> None:
        self.model, self.name, self.head, self.solver = model, name, head, solver
        self.process_group = process_group
        self.shapes = shapes_of(head.weight, head.bias)
        self.generator = torch.Generator().manual_seed(torch.initial_seed())
        self.probe: OutputProbe | None = None if model is head else OutputProbe()
        self.attach()

    # ------------------------------------------------------------------ hooks

    def look(self) -> None:
        """Look up what the solver can do and what the model has; again after a copy."""
        self.refuses_missing = type(self.solver) is RLS
        self.revertible = isinstance(self.solver, Revertible)
        self.partial_targets = isinstance(self.solver, LearnsPartly) and self.solver.learns_partly
        self.normalizations = [module for module in self.model.modules() if hasattr(module, "track_running_stats")]
        head = {id(parameter) for parameter in self.head.parameters()}
        self.body = [parameter for parameter in self.model.parameters() if id(parameter) not in head]
        self.sharded = exchange.sharded_group(self.model)

    def attach(self) -> None:
        """Put the hook on the head, in place of those of an earlier observer."""
        self.look()
        if not hasattr(HeadHook.in_eager, "_torchdynamo_disable"):
            # Done here because it takes a second, which import would pay.
            HeadHook.in_eager = torch.compiler.disable(HeadHook.in_eager)  # type: ignore[method-assign,no-untyped-call]
        for module in self.model.modules():
            remove_hooks(module, None)  # of observers that are gone, or copied with the model
        for registered in list(self.head._forward_pre_hooks.values()):
            earlier = hook_of(registered)
            for module in self.model.modules() if earlier is not None else ():
                remove_hooks(module, earlier.observer())  # type: ignore[union-attr]
        self.hook = HeadHook(self)
        self.hook_id = self.head.register_forward_pre_hook(self.hook.learn_first).id

    def detach(self) -> None:
        for module in (self.head, self.model):
            remove_hooks(module, self)

    # ------------------------------------------------------------------ the observation in progress

    def begin(self, observation: Observation, statistics: bool) -> None:
        """Make this the observation in progress, with a checkpoint, that of the model's statistics on request."""
        observation.thread = get_ident()
        if self.current is not None:
            if self.current.thread != observation.thread:
                raise RuntimeError(
                    f"observe or predict is active in another thread, and one thread at a time can use the head "
                    f"{self.name!r}: hold a lock around observe, backward and step, or give each thread a model"
                )
            raise RuntimeError("observe is already active: use one observe for each forward pass")
        observation.idle = self.is_frozen()
        hooks = self.head._forward_pre_hooks
        if self.hook_id in hooks and next(reversed(hooks)) != self.hook_id:
            hooks[self.hook_id] = hooks.pop(self.hook_id)  # a later hook may change what the head is applied to
        if not observation.captured:
            observation.ranks = exchange.is_initialized()
            observation.before = self.checkpoint(statistics)
        # Among ranks not yet: whether a DistributedDataParallel waits for the head's gradient is known in its forward.
        if not observation.ranks:
            for parameter in self.body:  # `any` of a generator takes four times as long
                if parameter.requires_grad:
                    observation.freeze(self.head)
                    self.hook.observed = True
                    break
        if self.probe is not None:
            for module in (self.head, self.model):
                module.register_forward_hook(OutputHook(self))
        self.current = observation

    def is_frozen(self) -> bool:
        """Whether the user froze the head, which then does not learn; an error for a head that was changed."""
        weight, bias = own_parameters(self.head)
        shapes = shapes_of(weight, bias)
        if shapes != self.shapes:
            k = int(shapes[0] == self.shapes[0])
            has, had = (shape and tuple(shape) for shape in (shapes[k], self.shapes[k]))
            raise ValueError(
                f"head {self.name!r} has a {('weight', 'bias')[k]} of shape {has} and had {had} when this SepSA was "
                "made: make a new SepSA, with a new solver, after changing a head"
            )
        if bias is not None and bias.requires_grad is not weight.requires_grad:
            raise ValueError(
                f"head {self.name!r} has a frozen {'bias' if weight.requires_grad else 'weight'} alone, and its solver "
                "trains weight and bias together: call requires_grad_(False) on the whole head, or requires_grad_(True)"
            )
        return not weight.requires_grad

    def end(self, observation: Observation, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the observation in progress; raises an error where the pass did not reach the head."""
        missed = not_reached(self) if error is None and not observation.learned else error
        try:
            if observation.ranks and not (observation.reached or observation.idle) and isinstance(missed, Exception):
                ranked_rows.report_failure(self, missed, None if isinstance(missed, HeadNotReached) else trace)
        finally:
            self.current = None
            self.hook.observed = False
            observation.thaw()
            if self.probe is not None:
                for module in (self.head, self.model):
                    remove_hooks(module, self, OutputHook)
        if error is None and missed is not None:
            raise missed

    def judge(self, observation: Observation) -> None:
        """Warn, after the first observation, of a model that does not return its head's output, and of labels."""
        probe, self.probe = self.probe, None
        if probe is not None:
            probe.judge(self.name, observation.observed)
        if self.by_default and not observation.captured:
            self.by_default = False
            targets = observation.targets
            if targets.numel() > 1 and bool(((targets == 0) | (targets == 1)).all()):
                warnings.warn(
                    f"the first targets of the head {self.name!r} are all 0 or 1, and it learns them by least squares: "
                    'for labels take SepSA(..., solver="logistic"), or "cross-entropy" for classes that exclude each '
                    'other; solver="squared" keeps least squares',
                    stacklevel=5,
                )

    def observing(self) -> Observation | None:
        """The observation in progress to which a pass in this thread belongs, if any."""
        observation = self.current
        if observation is None or observation.learning or observation.thread != get_ident():
            return None
        return observation

    def learn(self, observation: Observation, features: Tensor) -> Tensor:
        """Let the head learn. Returns the features that the head is called with."""
        if observation.learned:
            raise RuntimeError(
                f"the forward inside observe reached the head {self.name!r} twice: "
                "use one observe for each pass through the model"
            )
        observation.reached = observation.learning = True  # so that the solver may call its head
        try:
            if observation.idle:
                self.skip(observation, features)
            elif observation.captured:
                self.learn_captured(observation, features)
            elif observation.ranks and self.process_group is not None and (group := self.group()) is not None:
                ranked_rows.learn(self, group, observation, features)
            else:
                self.learn_alone(observation, features)
        except ValueError as error:
            if not str(error).startswith("targets must have "):  # a shape
                raise
            raise ValueError(
                f"{error}; the head is {self.name!r}, {self.head}: to choose another nn.Linear of the model, "
                "SepSA(model, base, head=...)"
            ) from None
        finally:
            observation.learning = False
        observation.learned = self.observed = True
        # torch.utils.checkpoint computes the head again in the backward pass, when it is not frozen.
        if not features.requires_grad or _saved_tensors_hooks(True) is not None:
            observation.thaw()
        else:
            if observation.observed is not None:  # the body does not learn from rows without a target
                features = torch.where(observation.observed.view(*features.shape[:-1], 1), features, features.detach())
            if not observation.frozen and not (observation.ranks and exchange.takes_gradients(self.head)):
                observation.freeze(self.head)
        return features

    def learn_compiled(self, features: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Let the head learn in a compiled graph, which may hold copies of its parameters."""
        observation = self.observing()
        if observation is None:
            return
        frozen, observation.frozen = observation.frozen, ()
        try:
            self.learn(observation, features)
        finally:
            observation.frozen = frozen
        for copy, parameter in ((weight, self.head.weight), (bias, self.head.bias)):
            if copy is not None and copy.data_ptr() != parameter.data_ptr():
                copy.copy_(parameter.detach())

    # ------------------------------------------------------------------ rows, alone or in ranks

    def learn_alone(self, observation: Observation, features: Tensor) -> None:
        """Let the head learn this process's rows that have a target."""
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
            self._learn_observed(observation, features)
            return
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
        self._learn_observed(observation, features)

    def skip(self, observation: Observation, features: Tensor) -> None:
        """Leave a frozen head as it is."""
        if not observation.captured:
            check_samples(self, observation, features, per_output_weight=self.partial_targets)
            observation.observed = observed_rows(features, observation.targets, self.partial_targets)

    def _learn_observed(self, observation: Observation, features: Tensor) -> None:
        """Let the head learn `head_fraction` of the observed rows."""
        if observation.observed is None and self.head_fraction == 1.0:
            if self.samples_per_epoch is None and not self.forget_per_step:
                self.solver.update(features, observation.targets, observation.sample_weight)
            else:
                n = features.numel() // features.shape[-1]
                self.update(features, observation.targets, observation.sample_weight, n)
            return
        check_samples(self, observation, features, per_output_weight=self.partial_targets)
        samples = draw(self, observation, features)
        if len(samples.features):
            self.update(*samples, features.numel() // features.shape[-1])

    def learn_captured(self, observation: Observation, features: Tensor) -> None:
        """Let the head learn inside a CUDA graph, without the host."""
        rows = features.detach().reshape(-1, features.shape[-1])
        targets, n = observation.targets.reshape(len(rows), -1), len(rows)
        self.rows_per_sample = max(1, n // max(observation.samples, 1))
        count = math.ceil(self.head_fraction * n)
        if count < n:
            drawn = torch.rand(n, device=rows.device).topk(count).indices
            rows, targets = rows[drawn], targets[drawn]
        if observation.group is not None:
            rows, targets = (exchange.gather_equal(observation.group, part) for part in (rows, targets))
        observation.finite = cast(Capturable, self.solver).update_captured(rows, targets)

    def update(self, features: Tensor, targets: Tensor, weight: Tensor | None, offered: int) -> None:
        """Let the solver learn these samples, drawn from as many `offered` rows of all ranks."""
        if self.samples_per_epoch is None and not self.forget_per_step:
            self.solver.update(features, targets, weight)
            return
        solver: Any = self.solver
        self.remember_one_epoch(offered)
        try:
            if self.forget_per_step:
                solver.forgets = not self.forgot
            solver.update(features, targets, weight)
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
        memory = max(length, ROWS_PER_FEATURE * self.head.in_features)
        cast(Any, self.solver).forgetting = max(1 - n / memory, LEAST_FORGETTING)

    def count(self, n: int) -> None:
        """Count n rows that were offered to the head."""
        self.samples += n
        self.since_forgetting = n + self.since_forgetting * self.forgot

    def group(self) -> Any:
        """The process group to learn with; None, with one warning, where other ranks exist in no known group."""
        ddp = exchange.active_ddp()
        if ddp is not None and ddp is not self.ddp():
            self.ddp = weakref.ref(ddp)
        group = exchange.active_group(self.process_group, self.sharded, ddp)
        if group is None and not self.warned_alone and exchange.has_ranks(self.process_group):
            self.warned_alone = True
            exchange.warn_alone(self.name)
        return group

    def start_together(self, group: Any) -> bool:
        """Give all ranks the first one's head and solver, once. Returns whether this was the time."""
        if self.started_together:
            return False
        exchange.share_start(group, self.head, self.solver)
        self.started_together = True
        return True

    def body_moved(self) -> None:
        """Count a step of the body; warn once if the head has a gradient but has not learned since the last step."""
        self.body_steps += 1
        if not self.observed and not self.warned:
            weight = self.head._parameters.get("weight")
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
            _counters_of(self),
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
        for name, value in zip(_COUNTERS, checkpoint.counters, strict=True):
            setattr(self, name, value)
        if checkpoint.forgetting is not None:
            cast(Any, self.solver).forgetting = checkpoint.forgetting
        if checkpoint.generator is not None:
            self.generator.set_state(checkpoint.generator)
        for buffer, before in checkpoint.statistics:
            buffer.copy_(before)

    # ------------------------------------------------------------------ copies

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name != "ddp"}
        own = {"generator": self.generator.get_state(), "current": None, "sharded": None}
        group = {"process_group": self.process_group if self.process_group in ("auto", None) else "auto"}
        return state | own | group

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.generator = torch.Generator()
        self.generator.set_state(state["generator"])
        self.attach()


def shapes_of(weight: Tensor, bias: Tensor | None) -> tuple[torch.Size, torch.Size | None]:
    """The shapes of a head's parameters."""
    return weight.shape, None if bias is None else bias.shape
