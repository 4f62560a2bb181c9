"""How a head learns while the model runs: the hooks on the model, the rows drawn for the head, what is being observed.

What is being observed is kept in an `Observer`, where the hook on the head looks for it, and not on the optimizer:
wrappers copy an optimizer (Lightning) or hide it (accelerate), and the head learns all the same.
"""

from __future__ import annotations

import contextlib
import math
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias, cast, overload

import torch
from torch import Tensor, nn

from sepsa import distributed, operator
from sepsa.distributed import is_initialized
from sepsa.heads import Capturable, CapturableByRow, Forgets, HeadSolver, HoldsOut, LearnsPartly, Revertible
from sepsa.heads.base.checks import check_rows, check_weight

Collection: TypeAlias = Mapping[str, Tensor] | Sequence[Tensor]
# The class index that torch's losses ignore unless told otherwise.
IGNORE_INDEX = -100


@overload
def observe(model: nn.Module, targets: Tensor, sample_weight: Tensor | None = None) -> Observation: ...
@overload
def observe(
    model: nn.Module, targets: Collection, sample_weight: Tensor | Collection | None = None
) -> Observations: ...
def observe(model: nn.Module, targets: Any, sample_weight: Any = None) -> Observation | Observations:
    """A context in which `model`'s forward teaches its head, as `SepSA.observe`.

    Choose it where the optimizer is not at hand, or is wrapped: the head is found in the model.
    """
    observers = list(observers_of(model))
    if not observers:
        raise ValueError(
            f"no SepSA teaches a head of this {type(model).__name__}: make SepSA(model, base) first and keep it alive, "
            "and pass that model or one around it"
        )
    if len(observers) == 1 and isinstance(targets, Tensor):
        return Observation(observers[0], targets, sample_weight)
    return Observations(observers, targets, sample_weight)


def observers_of(model: nn.Module) -> Iterator[Observer]:
    """What teaches the heads in `model`."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if type(hook) is HeadHook and (observer := hook.observer()) is not None:
                yield observer


class Checkpoint(NamedTuple):
    """What `Observer.rollback` comes back to."""

    state: Any  # the solver's
    statistics: list[tuple[Tensor, Tensor]]  # buffers of normalization layers, and what they held
    body_steps: int
    forgot: bool


class Observer:
    """One head, its solver and the observation in progress, shared by the hook on the head and the optimizer."""

    forget_per_step = False  # else in every update
    forgot = False  # whether the head has, since the body's last step

    def __init__(
        self, model: nn.Module, name: str, head: nn.Linear, solver: HeadSolver, process_group: Any = "auto"
    ) -> None:
        self.model, self.name, self.head, self.solver = model, name, head, solver
        self.process_group = process_group
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
        self.holds_out = isinstance(self.solver, HoldsOut)
        self.sharded = distributed.sharded_group(self.model)
        self.revertible = isinstance(self.solver, Revertible)
        self.partly = isinstance(self.solver, LearnsPartly) and self.solver.learns_partly
        self.normalizations = [module for module in self.model.modules() if hasattr(module, "track_running_stats")]
        for hook in list(self.head._forward_pre_hooks.values()):
            if isinstance(hook, HeadHook):  # of an earlier one, or a copy's
                for module in (self.head, self.model):
                    remove_hooks(module, hook.observer())
        for kind, name in ((HeadHook, "in_eager"), (InputHook, "note")):
            if not hasattr(getattr(kind, name), "_torchdynamo_disable"):  # not at import, where it would cost a second
                setattr(kind, name, torch.compiler.disable(getattr(kind, name)))  # type: ignore[no-untyped-call]
        head = {id(parameter) for parameter in self.head.parameters()}
        self.body = [parameter for parameter in self.model.parameters() if id(parameter) not in head]
        self.head.register_forward_pre_hook(HeadHook(self))
        if self.model is not self.head:
            if self.holds_out:
                self.model.register_forward_pre_hook(InputHook(self), with_kwargs=True)
            if self.probe is not None:
                self.head.register_forward_hook(OutputHook(self))
                self.model.register_forward_hook(OutputHook(self))

    def detach(self) -> None:
        """Take the hooks off again."""
        for module in (self.head, self.model):
            remove_hooks(module, self)

    @property
    def attached(self) -> bool:
        """Whether the hook on the head is this observer's."""
        return any(of(hook, self) for hook in self.head._forward_pre_hooks.values())

    def learn(self, observation: Observation, features: Tensor) -> Tensor:
        """Let the head learn. Returns the features as the head is to see them."""
        if observation.learned:
            raise RuntimeError(
                f"the forward inside observe reached the head {self.name!r} twice: "
                "use one observe for each pass through the model"
            )
        ranks, hidden = observation.ranks, None
        self.current = None  # so that the solver may call its head
        try:
            if observation.captured:
                hidden = self._update_captured(observation, features)
            elif ranks and self.process_group is not None and (group := self._group()) is not None:
                hidden = self._update_together(group, observation, features)
            else:
                try:
                    if self.holds_out or self.head_fraction < 1.0:
                        hidden = self._update_rows(observation, features)
                    else:
                        self._teach(features, observation.targets, observation.sample_weight)
                except Exception as error:
                    hidden = self._update_observed(observation, features, error)
        finally:
            self.current = observation
        observation.learned = self.observed = True
        observation.hidden = hidden
        if not features.requires_grad:
            observation.thaw()
        else:
            if hidden is not None:
                features = torch.where(hidden.view(*features.shape[:-1], 1), features.detach(), features)
            if not observation.frozen and not (ranks and distributed.takes_gradients(self.head)):
                observation.freeze(self.head)
        return features

    def learn_compiled(self, features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """The same as an operator of a compiled graph, which may have copies of the head's parameters.

        Returns which rows (n,) were held out.
        """
        observation = self.current
        if observation is None:
            return None
        frozen, observation.frozen = observation.frozen, ()
        self.learn(observation, features)
        observation.frozen = frozen
        for copy, parameter in ((weight, self.head.weight), (bias, self.head.bias)):
            if copy is not None and copy.data_ptr() != parameter.data_ptr():
                copy.copy_(parameter.detach())
        return observation.hidden

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Within it a compiled model is one graph also where the solver holds out: it knows samples by their rows."""
        hooks = [
            hook
            for module in (self.head, self.model)
            for hook in module._forward_pre_hooks.values()
            if isinstance(hook, HeadHook) and of(hook, self)
        ]
        before = [hook.whole for hook in hooks]
        for hook in hooks:
            hook.whole = True
        try:
            yield
        finally:
            for hook, was in zip(hooks, before, strict=True):
                hook.whole = was

    def _group(self) -> Any:
        """The ranks to learn with; a warning, once, where there are others, and they cannot be told."""
        group = distributed.active_group(self.process_group, self.sharded, self.joined)
        if group is None and not self.warned_alone and distributed.has_ranks(self.process_group):
            self.warned_alone = True
            distributed.warn_alone(self.name)
        return group

    def _update_observed(self, observation: Observation, features: Tensor, error: Exception) -> Tensor | None:
        """What was refused, again without the samples that have no target, which are looked for only here.

        Returns which rows (n,) must not teach the body.
        """
        for name, value in (("features", features), ("targets", observation.targets)):
            check_dense(name, value)
        if observation.sample_weight is not None:
            check_dense("sample_weight", observation.sample_weight)
        if isinstance(error, ValueError):
            observation.observed = observed_rows(features, observation.targets, self.partly)
        if observation.observed is None:
            raise error
        held = self._update_rows(observation, features)
        return ~observation.observed if held is None else held | ~observation.observed

    def _teach(self, features: Tensor, targets: Tensor, weight: Tensor | None, **identity: Any) -> None:
        """Let the solver learn these samples, and forget or not."""
        if not self.forget_per_step:
            self.solver.update(features, targets, weight, **identity)
            return
        solver = cast(Forgets, self.solver)
        try:
            solver.forgets = not self.forgot
            self.solver.update(features, targets, weight, **identity)
        finally:
            solver.forgets = True
        self.forgot = True

    def _update_rows(self, observation: Observation, features: Tensor) -> Tensor | None:
        """Let the solver learn a share of the rows that are known to be observed. Returns which were held out."""
        if observation.observed is None and self.head_fraction == 1.0:
            targets, weight, rows = observation.targets, observation.sample_weight, None
            drawn = features
        else:
            drawn, targets, weight, rows = self._draw(observation, features)
            if not len(rows):
                return None
        if not self.holds_out:
            self._teach(drawn, targets, weight)
            return None
        solver = cast(HoldsOut, self.solver)
        n = features.numel() // features.shape[-1]
        identity = next((x for x in observation.inputs if x.ndim and len(x) and n % len(x) == 0), None)
        if identity is not None and rows is not None:
            identity = identity[rows // (n // len(identity))]
        self._teach(drawn, targets, weight, identity=identity)
        held = solver.held_out
        if held is None or rows is None:
            return held
        return torch.zeros(n, dtype=torch.bool, device=held.device).index_put((rows[held],), held.new_ones(()))

    def _update_together(self, group: Any, observation: Observation, features: Tensor) -> Tensor | None:
        """The same with the rows of all ranks, on every rank."""
        own, chosen, error = None, None, None
        try:
            own, chosen = self._own_rows(observation, features)
        except Exception as refused:  # raised once the other ranks, which wait, have been told
            error = refused
        mine = self._learn_from_all(group, own, error)
        hidden = None if observation.observed is None else ~observation.observed
        if mine is None or not self.holds_out or (held_out := cast(HoldsOut, self.solver).held_out) is None:
            return hidden
        held = held_out[mine]
        if chosen is not None:
            n = features.numel() // features.shape[-1]
            held = held.new_zeros(n).index_put((chosen[held],), held.new_ones(()))
        return held if hidden is None else held | hidden

    def _learn_from_all(self, group: Any, own: distributed.Rows | None, error: Exception | None) -> slice | None:
        """Let the solver learn the rows of all ranks. Returns where this rank's are among them; None: no rows."""
        moments = isinstance(self.solver, distributed.LearnsMoments) and self.solver.learns_moments
        rows, mine = distributed.gather(group, own, error, moments)
        self.start_together(group)
        if rows is None:
            return None
        if self.holds_out:
            self._teach(rows.features, rows.targets, rows.sample_weight, identity=rows.identity)
        else:
            self._teach(rows.features, rows.targets, rows.sample_weight)
        return mine

    def start_together(self, group: Any) -> None:
        """Give all ranks the first one's head and solver, once."""
        if not self.started_together:
            self.solver.load_state_dict(distributed.share_start(group, self.head, self.solver.state_dict()))
            self.started_together = True

    def learn_without_batch(self, ddp: Any) -> None:
        """What the other ranks' forward teaches the head, on a rank that has run out of batches."""
        group = distributed.active_group(self.process_group, ddp.process_group)
        if group is not None:
            weight = self.head.weight.detach()
            none = distributed.Rows(weight.new_zeros(0, weight.shape[1]), weight.new_zeros(0, len(weight)), None)
            self._learn_from_all(group, none, None)

    def _own_rows(self, observation: Observation, features: Tensor) -> tuple[distributed.Rows, Tensor | None]:
        """What this rank has to share, and which of its rows they are; None: all."""
        targets, weight, rows = observation.targets, observation.sample_weight, None
        flat = features.detach().reshape(-1, self.head.in_features)
        labels = not targets.is_floating_point() and targets.shape == features.shape[:-1]
        if len(flat):
            observation.observed = observed_rows(features, targets, self.partly)
            check_rows(self.head, features, None if labels or self._takes_integers(targets) else targets)
            check_weight(self.head, features, weight)
        n = len(flat)
        identity = None
        if self.holds_out:
            given = next((x for x in observation.inputs if x.ndim and len(x) and n % len(x) == 0), None)
            if given is not None and n:
                identity = given.detach().reshape(len(given), -1).repeat_interleave(n // len(given), 0)
        if len(flat) and (observation.observed is not None or self.head_fraction < 1.0):
            flat, targets, weight, rows = self._draw(observation, features)
            flat, identity = flat.detach(), None if identity is None else identity[rows]
        targets = targets.detach().reshape((len(flat),) if labels else (len(flat), targets.shape[-1]))
        return distributed.Rows(flat, targets, None if weight is None else weight.reshape(-1), identity), rows

    def _takes_integers(self, targets: Tensor) -> bool:
        """Whether these are labels of each output, which the solver looks at itself."""
        return self.partly and not targets.is_floating_point()

    def _draw(self, observation: Observation, features: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """What was observed, at `head_fraction` of the rows, drawn at random, and which rows they are."""
        targets, sample_weight = observation.targets, observation.sample_weight
        labels = not targets.is_floating_point() and targets.shape == features.shape[:-1]
        check_rows(self.head, features, None if labels or self._takes_integers(targets) else targets)
        if not self.partly:  # which may have a weight for each output, and looks itself
            check_weight(self.head, features, sample_weight)
        flat = features.reshape(-1, features.shape[-1])
        if observation.observed is None:
            rows = torch.randperm(len(flat), generator=self.generator)
        else:
            rows = observation.observed.nonzero()[:, 0].cpu()
            if self.head_fraction < 1.0:
                rows = rows[torch.randperm(len(rows), generator=self.generator)]
        rows = rows[: math.ceil(self.head_fraction * len(rows))].to(flat.device)
        weight = None if sample_weight is None else weight_rows(sample_weight, len(flat))[rows]
        targets = targets.reshape(-1) if labels else targets.reshape(len(flat), -1)
        return flat[rows], targets[rows], weight, rows

    def _update_captured(self, observation: Observation, features: Tensor) -> Tensor | None:
        """The same inside a CUDA graph, where the host can neither draw rows nor look at numbers.

        Returns which rows (n,) were held out.
        """
        rows = features.detach().reshape(-1, features.shape[-1])
        targets = observation.targets.reshape(len(rows), -1)
        count = math.ceil(self.head_fraction * len(rows))
        drawn = None
        if count < len(rows):
            drawn = torch.rand(len(rows), device=rows.device).topk(count).indices
            rows, targets = rows[drawn], targets[drawn]
        if observation.group is not None:
            rows, targets = (distributed.gather_equal(observation.group, part) for part in (rows, targets))
        if not self.holds_out or observation.rows is None:
            observation.finite = cast(Capturable, self.solver).update_captured(rows, targets)
            return None
        names, n = observation.rows, features.numel() // features.shape[-1]
        if len(names) != n:
            raise ValueError(
                f"a captured solver that holds out samples needs one row of features for each, got {n} for "
                f"{len(names)} samples: use optimizer.learn without a graph"
            )
        names = names if drawn is None else names[drawn]
        observation.finite = cast(CapturableByRow, self.solver).update_captured(rows, targets, names)
        held = cast(HoldsOut, self.solver).held_out
        if held is None or drawn is None:
            return held
        return held.new_zeros(n).index_put((drawn,), held)

    def body_moved(self) -> None:
        """Note a step of the body; warn, once, where a backward reached a head that had learned nothing."""
        self.body_steps += 1
        if not self.observed and not self.warned:
            weight = self.head._parameters["weight"]
            if weight is not None and weight.grad is not None:
                self.warned = True
                warnings.warn(
                    f"the head {self.name!r} has learned nothing since the last step, so it stays as it is: run the "
                    "model inside `with optimizer.observe(targets):`, or inside `with sepsa.observe(model, targets):` "
                    "where the optimizer is wrapped",
                    stacklevel=3,
                )
        self.observed = self.forgot = False

    def checkpoint(self) -> Checkpoint:
        """What a pass through the model in training changes, to come back to."""
        statistics = [
            (buffer, buffer.clone())
            for module in self.normalizations
            if module.training
            for buffer in module._buffers.values()
            if buffer is not None
        ]
        state = cast(Revertible, self.solver).checkpoint() if self.revertible else None
        return Checkpoint(state, statistics, self.body_steps, self.forgot)

    def rollback(self, checkpoint: Checkpoint, learned: bool) -> None:
        """Come back to `checkpoint` from a step that failed, after the head had `learned` or before the body."""
        if self.body_steps != checkpoint.body_steps:
            return
        if self.revertible and learned:
            cast(Revertible, self.solver).rollback(checkpoint.state)
            self.forgot = checkpoint.forgot
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


class Observation:
    """The context that `observe` returns: one pass through the model, from which the head learns first."""

    # Not set in __init__, which runs at every step.
    learned = captured = ranks = False
    observed: Tensor | None = None  # which rows (n,) were, where some were not
    finite: Tensor | None = None  # what `update_captured` returned
    group: Any = None  # the ranks whose rows it learned, where it was captured
    hidden: Tensor | None = None  # which rows (n,) must not teach the body
    rows: Tensor | None = None  # of a data set, which a captured step learns
    inputs: Sequence[Tensor] = ()  # the model's, where the solver asks for them
    frozen: Sequence[nn.Parameter] = ()

    def __init__(self, observer: Observer, targets: Tensor, sample_weight: Tensor | None = None) -> None:
        if not isinstance(targets, Tensor):
            raise TypeError(f"targets must be a torch.Tensor, got {type(targets).__name__}")
        self.observer, self.targets, self.sample_weight = observer, targets, sample_weight

    def __enter__(self) -> Observation:
        observer = self.observer
        if observer.current is not None:
            raise RuntimeError("observe is already active: one observe for each pass through the model")
        self.ranks = is_initialized() and not self.captured
        # Among ranks not yet: whether a DistributedDataParallel waits for the head's gradient is known in its forward.
        if not self.ranks:
            for parameter in observer.body:  # `any` of a generator takes four times as long
                if parameter.requires_grad:
                    self.freeze(observer.head)
                    break
        observer.current = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.observer.current = None
        self.thaw()
        if kind is not None:
            return
        if not self.learned:
            raise RuntimeError(unreached(self.observer))
        if self.observer.probe is not None:
            self.observer.probe.judge(self)

    def loss(self, outputs: Tensor) -> Tensor:
        """The solver's loss of what was observed: the mean over samples that have a target, by their weights."""
        targets, weight, solver = self.targets, self.sample_weight, self.observer.solver
        if weight is None and self.observed is None:
            return solver.loss(outputs, targets)
        if self.observed is not None:
            rows, n = self.observed, len(self.observed)
            outputs = outputs.reshape(n, -1)[rows]
            targets = (
                targets.reshape(n)
                if targets.numel() == n and not targets.is_floating_point()
                else targets.reshape(n, -1)
            )[rows]
            weight = None if weight is None else weight_rows(weight, n)[rows]
            if not len(outputs):
                return outputs.sum()  # 0, with a gradient of 0
            if weight is None:
                return solver.loss(outputs, targets)
        assert weight is not None
        if self.observer.partly:
            return cast(LearnsPartly, solver).loss(outputs, targets, weight)
        n = weight.numel()
        targets = targets.reshape(n, 1) if targets.shape == weight.shape else targets.reshape(n, 1, -1)
        each: Tensor = torch.func.vmap(solver.loss)(outputs.reshape(n, 1, -1), targets)  # of one sample each
        weight = weight.reshape(n).to(each.dtype)
        return (weight * each).sum() / weight.sum().clamp(min=torch.finfo(each.dtype).tiny)

    def freeze(self, head: nn.Linear) -> None:
        """No gradient for the head until the context ends: it would be computed for nobody."""
        self.frozen = [p for p in head._parameters.values() if p is not None and p.requires_grad]
        for parameter in self.frozen:
            parameter.requires_grad_(False)

    def thaw(self) -> None:
        """Let gradients reach the head again."""
        if self.frozen:
            for parameter in self.frozen:
                parameter.requires_grad_(True)
            self.frozen = ()


class Observations:
    """The same for several heads in one pass, each with targets of its own."""

    def __init__(self, observers: Sequence[Observer], targets: Any, sample_weight: Any = None) -> None:
        names = [observer.name for observer in observers]
        self.targets = by_name("targets", targets, names)
        weights = by_name("sample_weight", sample_weight, names) if is_collection(sample_weight) else {}
        one = None if is_collection(sample_weight) else sample_weight
        self.each = {
            observer.name: Observation(observer, self.targets[observer.name], weights.get(observer.name, one))
            for observer in observers
            if observer.name in self.targets
        }
        self._entered = contextlib.ExitStack()

    @property
    def learned(self) -> bool:
        """Whether some head has."""
        return any(observation.learned for observation in self.each.values())

    def __enter__(self) -> Observations:
        with contextlib.ExitStack() as entered:
            for observation in self.each.values():
                entered.enter_context(observation)
            self._entered = entered.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.__exit__(kind, error, trace)

    def loss(self, outputs: Any) -> Tensor:
        """The sum of the heads' losses; outputs as a dict by the heads' names, or in their order."""
        named = by_name("the model's outputs", outputs, list(self.each))
        return torch.stack([observation.loss(named[name]) for name, observation in self.each.items()]).sum()


def is_collection(value: Any) -> bool:
    return isinstance(value, (tuple, list, Mapping))


def by_name(what: str, values: Any, names: list[str]) -> dict[str, Any]:
    """Values by the heads' names, from a dict of some of them or a sequence in their order."""
    if isinstance(values, Mapping):
        unknown = [name for name in values if name not in names]
        if (unknown and what != "the model's outputs") or not any(name in values for name in names):
            raise ValueError(f"{what} must be a dict with names of heads, of {names}, got {list(values)}")
        return {name: values[name] for name in names if name in values}
    if not is_collection(values) or len(values) != len(names):
        came = f"{len(values)} of them" if is_collection(values) else type(values).__name__
        raise ValueError(
            f"{what} must be a dict or tuple with one tensor for each of several heads, {names}, got {came}"
        )
    return dict(zip(names, values, strict=True))


class Detached:
    """What `SepSA.detach` returns: a context after which the hooks are back."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = observers
        for observer in observers:
            observer.detach()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        for observer in self.observers:
            observer.attach()


class HeadHook:
    """The forward pre-hook on the head; in a compiled model, an operator of its graph.

    It holds its observer weakly and is copied without it, so a copied or saved model is free of us.
    """

    def __init__(self, observer: Observer | None = None) -> None:
        self.observer = (lambda: None) if observer is None else weakref.ref(observer)
        self.number = 0 if observer is None else operator.register(observer)  # by which the operator finds the observer
        self.hides = observer is not None and observer.holds_out
        # Whether a compiled model does not break its graph here: a solver that holds out must see the model's inputs.
        self.whole = not self.hides

    def __call__(self, module: nn.Linear, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if self.whole and torch.compiler.is_compiling():
            if (
                not self.number or module.weight.requires_grad
            ):  # an observation leaves it without, where the body learns
                return None
            if not self.hides:
                operator.learn_head(args[0], module.weight, module.bias, self.number)
                return None
            features = args[0].detach()
            hidden = operator.learn_and_hide(features, module.weight, module.bias, self.number)
            return torch.where(hidden, features, args[0]), *args[1:]
        return self.in_eager(args)

    def in_eager(self, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """What the hook does where a model is not compiled, or its graph breaks here."""
        observer = self.observer()
        if observer is None or (observation := observer.current) is None:
            return None
        if not args:
            raise TypeError(f"the head {observer.name!r} must get its features by position: call head(features)")
        features = observer.learn(observation, args[0])
        return None if features is args[0] else (features, *args[1:])

    def __reduce__(self) -> tuple[type[HeadHook], tuple[()]]:
        return type(self), ()


class InputHook(HeadHook):
    """The forward pre-hook on the model, for a solver that asks which samples these are."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # type: ignore[override]
        if not self.whole or not torch.compiler.is_compiling():
            self.note(args, kwargs)

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What the hook does where a model is not compiled, or its graph breaks here."""
        observer = self.observer()
        if observer is not None and observer.current is not None:
            observer.current.inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]


class OutputHook(HeadHook):
    """The forward hook on head and model until the first observation is over, for an `OutputProbe`."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:  # type: ignore[override]
        if torch.compiler.is_compiling():
            return
        observer = self.observer()
        if observer is not None and observer.current is not None and observer.probe is not None:
            if module is observer.head:
                observer.probe.head = output
            if module is observer.model:
                observer.probe.model = list(tensors_in(output))


class OutputProbe:
    """What head and model gave in the first observation, and whether the one is the other."""

    def __init__(self) -> None:
        self.head: Tensor | None = None
        self.model: list[Tensor] = []

    def judge(self, observation: Observation) -> None:
        """Warn where the model's output is not its head's; then there is no more to look at."""
        observer, observed = observation.observer, observation.observed
        observer.probe = None
        for module in (observer.head, observer.model):
            remove_hooks(module, observer, OutputHook)
        head = self.head
        if head is None or not self.model:
            return
        given = [head.reshape(-1)]
        if observed is not None:  # pooling that takes what was observed and nothing else
            given.append(head.reshape(len(observed), -1)[observed].reshape(-1))
        if not any(
            output.numel() == rows.numel() and torch.equal(output.reshape(-1), rows.to(output))
            for output in self.model
            for rows in given
        ):
            shapes = ", ".join(str(tuple(output.shape)) for output in self.model)
            warnings.warn(
                f"the model's output {shapes} is not what its head {observer.name!r} gives, {tuple(head.shape)}: "
                "something follows the head (a sigmoid, a scaling, pooling), or it is not the head. It learns to give "
                "the targets itself, so pass it targets for its own output, or name another nn.Linear by "
                "SepSA(model, base, head=...)",
                stacklevel=3,
            )

    def __reduce__(self) -> tuple[type[OutputProbe], tuple[()]]:
        return OutputProbe, ()


def tensors_in(output: Any) -> Iterator[Tensor]:
    """The tensors of what a model returned: one, or in tuples, lists, dicts and the dataclasses of transformers."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list, dict)):
        for value in output.values() if isinstance(output, dict) else output:
            yield from tensors_in(value)


def of(hook: object, observer: Observer) -> bool:
    return isinstance(hook, HeadHook) and hook.observer() is observer


def remove_hooks(module: nn.Module, observer: Observer | None, kind: type[HeadHook] | None = None) -> None:
    """Take off `module` the hooks of an observer, all or of one kind; those of None are copies that serve nobody."""
    for hooks, others in (
        (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
        (module._forward_hooks, (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)),
    ):
        for key, hook in list(hooks.items()):
            if isinstance(hook, kind or HeadHook) and hook.observer() is observer:
                del hooks[key]
                for other in others:
                    other.pop(key, None)


def unreached(observer: Observer) -> str:
    """Why a forward inside `observe` did not reach the head, as far as one can know."""
    if not observer.attached:
        return (
            f"this SepSA no longer teaches the head {observer.name!r}: a later SepSA took it over, or detach() was "
            "called; observe with the later one, or make another"
        )
    return (
        f"the forward inside observe never reached the head {observer.name!r}: nothing was learned; "
        "run the model inside the context, or name the right head in SepSA(model, base, head=...)"
    )


def weight_rows(weight: Tensor, n: int) -> Tensor:
    """Weights of n samples as (n,), or as (n, out_features) where each output has one."""
    return weight.reshape(n) if weight.numel() == n else weight.reshape(n, -1)


def observed_rows(features: Tensor, targets: Tensor, partly: bool = False) -> Tensor | None:
    """Which rows (n,) have a target: not NaN, and as a class index not -100. None where all have, or none can be told.

    A row of which some outputs are observed and others not is refused, as one curvature serves all outputs of a head,
    unless the solver learns `partly`.
    """
    n = features.numel() // max(1, features.shape[-1])
    if not targets.numel() or targets.numel() % max(n, 1):
        return None
    each = targets.detach().reshape(n, -1)
    if partly:
        missing = (each.isnan() if targets.is_floating_point() else each == IGNORE_INDEX).all(1)
    elif targets.is_floating_point():
        absent = each.isnan()
        some = absent.any(1) & ~absent.all(1)
        if bool(some.any()):
            raise ValueError(
                f"targets must be finite, or NaN for all outputs of a sample, got {int(some.sum())} samples that are "
                "partly observed: this solver has one curvature for all outputs; for one each, take "
                "solver=PerOutput(RLS()), or LogisticNewton() for labels, or heads of their own, "
                "SepSA(model, base, head=[...])"
            )
        missing = absent[:, 0]
    elif targets.shape != features.shape[:-1]:
        return None
    else:
        missing = each[:, 0] == IGNORE_INDEX
    return ~missing if bool(missing.any()) else None


def check_dense(name: str, value: Tensor) -> None:
    """Refuse what is no tensor, or one whose rows cannot be taken as they lie."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got a nested one: pad it, with sample_weight 0 for padding")
    if value.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got {value.layout}: call {name}.to_dense()")
    if value.is_quantized:
        raise TypeError(f"{name} must be a dense tensor, got {value.dtype}: call {name}.dequantize()")
