"""A head with the observation in progress, shared by the hook on the head and the optimizer.

The observation in progress is kept here, where the hook on the head finds it, and not on the optimizer: wrappers copy
an optimizer (Lightning) or hide it (accelerate), and the head must learn there too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from threading import get_ident
from types import TracebackType
from typing import Any, overload

import torch
from torch import Tensor, nn

from sepsa import distributed
from sepsa.heads import HeadSolver
from sepsa.observe.hooks import (
    HeadHook,
    InputHook,
    OutputHook,
    OutputProbe,
    hook_of,
    hooks_of,
    observers_of,
    remove_hooks,
)
from sepsa.observe.observation import Collection, Observation, Observations
from sepsa.observe.ranks import SharedHead


@overload
def observe(model: nn.Module, targets: Tensor, sample_weight: Tensor | None = None) -> Observation: ...
@overload
def observe(
    model: nn.Module, targets: Collection, sample_weight: Tensor | Collection | None = None
) -> Observations: ...
def observe(model: nn.Module, targets: Any, sample_weight: Any = None) -> Observation | Observations:
    """Return a context in which the heads of a model learn in its forward pass, as `SepSA.observe` does.

    Choose it where the optimizer is not at hand, or is wrapped by a framework: the heads are found in the model.

    Args:
        model: The model of a SepSA, or a module around it.
        targets: As for `SepSA.observe`.
        sample_weight: As for `SepSA.observe`.

    Returns:
        A context manager for one forward pass through the model.

    Examples:
        >>> import sepsa, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = sepsa.SepSA(model, base=torch.optim.SGD)
        >>> with sepsa.observe(model, torch.ones(5, 1)):
        ...     outputs = model(torch.ones(5, 2))
        >>> optimizer.solver.samples
        5.0
    """
    observers = list(observers_of(model))
    if not observers:
        raise ValueError(
            f"no SepSA trains a head of this {type(model).__name__}: make SepSA(model, base) first, keep a reference "
            "to it, and pass that model or one around it"
        )
    if len(observers) == 1 and isinstance(targets, Tensor):
        return Observation(observers[0], targets, sample_weight)
    return Observations(observers, targets, sample_weight)


class HeadNotReached(RuntimeError):
    """The forward inside `observe` did not reach the head."""


class Observer(SharedHead):
    """One head, its solver and the observation in progress, shared by the hook on the head and the optimizer."""

    current: Observation | None = None

    def __init__(
        self, model: nn.Module, name: str, head: nn.Linear, solver: HeadSolver, process_group: Any = "auto"
    ) -> None:
        super().__init__(model, name, head, solver)
        self.process_group = process_group
        self.probe: OutputProbe | None = None if model is head else OutputProbe()
        self.attach()

    # ------------------------------------------------------------------ hooks

    def attach(self) -> None:
        """Put the hook on the head, in place of those of an earlier observer."""
        self.look()
        for kind, name in ((HeadHook, "in_eager"), (InputHook, "note")):
            if not hasattr(getattr(kind, name), "_torchdynamo_disable"):
                # Done here because it takes a second, which import would pay.
                setattr(kind, name, torch.compiler.disable(getattr(kind, name)))  # type: ignore[no-untyped-call]
        for module in self.model.modules():
            remove_hooks(module, None)  # of observers that are gone, or copied with the model
        for registered in list(self.head._forward_pre_hooks.values()):
            earlier = hook_of(registered)
            for module in self.model.modules() if earlier is not None else ():
                remove_hooks(module, earlier.observer())  # type: ignore[union-attr]
        self.hook = HeadHook(self)
        self.head.register_forward_pre_hook(self.hook.learn_first)

    def detach(self) -> None:
        for module in (self.head, self.model):
            remove_hooks(module, self)

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
        weight = self.head._parameters["weight"]  # four times as fast as `head.weight`
        if weight is not None and weight.shape != self.shape:
            raise ValueError(
                f"head {self.name!r} has a weight of shape {tuple(weight.shape)} and had {tuple(self.shape)} when this "
                "SepSA was made: make a new SepSA, with a new solver, after changing a head"
            )
        if not observation.captured:
            observation.ranks = distributed.is_initialized()
            observation.before = self.checkpoint(statistics)
        # Among ranks not yet: whether a DistributedDataParallel waits for the head's gradient is known in its forward.
        if not observation.ranks:
            for parameter in self.body:  # `any` of a generator takes four times as long
                if parameter.requires_grad:
                    observation.freeze(self.head)
                    self.hook.observed = True
                    break
        if self.holds_out and self.model is not self.head:
            self.model.register_forward_pre_hook(InputHook(self), with_kwargs=True)
        if self.probe is not None:
            for module in (self.head, self.model):
                module.register_forward_hook(OutputHook(self))
        self.current = observation

    def end(self, observation: Observation, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the observation in progress; raises an error where the pass did not reach the head."""
        missed = self._missed() if error is None and not observation.learned else error
        try:
            if observation.ranks and not observation.reached and isinstance(missed, Exception):
                self.report_failure(missed, None if isinstance(missed, HeadNotReached) else trace)
        finally:
            self.current = None
            self.hook.observed = False
            observation.thaw()
            if self.holds_out:
                remove_hooks(self.model, self, InputHook)
            if self.probe is not None:
                self.probe.stop()
                for module in (self.head, self.model):
                    remove_hooks(module, self, OutputHook)
        if error is None and missed is not None:
            raise missed

    def judge(self, observation: Observation) -> None:
        """Warn, after the first observation, of a model that does not return its head's output."""
        probe, self.probe = self.probe, None
        if probe is not None:
            probe.judge(self.name, observation.observed)

    def _missed(self) -> HeadNotReached:
        if not hooks_of(self.head, self):
            return HeadNotReached(
                f"this SepSA no longer trains the head {self.name!r}: a later SepSA took it over, or detach() was "
                "called; observe with the later one, or make another"
            )
        if all(module is not self.head for module in self.model.modules()):
            return HeadNotReached(
                f"the model no longer has the head {self.name!r} of this SepSA, which was replaced: nothing was "
                "learned; make a new SepSA after changing the model"
            )
        return HeadNotReached(
            f"the forward inside observe never reached the head {self.name!r}: nothing was learned; run the model "
            "of this SepSA (optimizer.model, not a later one or a copy) inside the context and in its thread, or name "
            "the right head in SepSA(model, base, head=...)"
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
            if observation.captured:
                excluded = self.learn_captured(observation, features)
            elif observation.ranks and self.process_group is not None and (group := self.group()) is not None:
                excluded = self.learn_together(group, observation, features)
            else:
                excluded = self.learn_alone(observation, features)
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
        try:
            self.learn(observation, features)
        finally:
            observation.frozen = frozen
        for copy, parameter in ((weight, self.head.weight), (bias, self.head.bias)):
            if copy is not None and copy.data_ptr() != parameter.data_ptr():
                copy.copy_(parameter.detach())
        return observation.excluded

    # ------------------------------------------------------------------ copies

    def __getstate__(self) -> dict[str, Any]:
        own = {"generator": self.generator.get_state(), "current": None, "sharded": None, "joined": None}
        group = {"process_group": self.process_group if self.process_group in ("auto", None) else "auto"}
        return self.__dict__ | own | group

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.generator = torch.Generator()
        self.generator.set_state(state["generator"])
        self.attach()
