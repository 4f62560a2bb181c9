"""How a head learns while the model runs: the hooks on the model, the rows drawn for the head, what is being observed.

What is being observed is kept in an `Observer`, where the hook on the head looks for it, and not on the optimizer:
wrappers copy an optimizer (Lightning) or hide it (accelerate), and the head learns all the same.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from sepsa.heads import Capturable, HeadSolver, HoldsOut
from sepsa.heads._checks import check_rows, check_weight


@runtime_checkable
class Revertible(Protocol):
    """A solver that can take its last updates back, for where the body could not follow them."""

    def checkpoint(self) -> Any:
        """The present state, to come back to by `rollback`. Called before every step: no copy, a reference."""
        ...

    def rollback(self, checkpoint: Any) -> None:
        """The state and the head's weights as they were at `checkpoint`."""
        ...


def observe(model: nn.Module, targets: Tensor, sample_weight: Tensor | None = None) -> Observation:
    """A context in which `model`'s forward teaches its head, as `SepSA.observe`.

    Choose it where the optimizer is not at hand, or is wrapped: the head is found in the model.
    """
    observers = list(observers_of(model))
    if not observers:
        raise ValueError(
            f"no SepSA teaches a head of this {type(model).__name__}: make SepSA(model, base) first and keep it alive, "
            "and pass that model or one around it"
        )
    if len(observers) > 1:
        names = [observer.name for observer in observers]
        raise ValueError(f"model holds several heads that are taught, {names}: pass the part that holds one")
    return Observation(observers[0], targets, sample_weight)


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


class Observer:
    """One head, its solver and the observation in progress, shared by the hook on the head and the optimizer."""

    def __init__(self, model: nn.Module, name: str, head: nn.Linear, solver: HeadSolver) -> None:
        self.model, self.name, self.head, self.solver = model, name, head, solver
        self.head_fraction = 1.0
        self.generator = torch.Generator().manual_seed(torch.initial_seed())
        self.current: Observation | None = None
        self.body_steps = 0
        self.attach()

    def attach(self) -> None:
        """Put the hooks on head and model, in place of those of another observer."""
        self.holds_out = isinstance(self.solver, HoldsOut)
        self.revertible = isinstance(self.solver, Revertible)
        self.normalizations = [module for module in self.model.modules() if hasattr(module, "track_running_stats")]
        for module in (self.head, self.model):
            for key, hook in list(module._forward_pre_hooks.items()):
                if isinstance(hook, HeadHook):
                    del module._forward_pre_hooks[key]
                    module._forward_pre_hooks_with_kwargs.pop(key, None)
        for kind in (HeadHook, InputHook):
            if not hasattr(kind.__call__, "_torchdynamo_disable"):  # here, not at import, where it would cost a second
                kind.__call__ = torch.compiler.disable(kind.__call__)  # type: ignore
        self.head.register_forward_pre_hook(HeadHook(self))
        if self.holds_out and self.model is not self.head:
            self.model.register_forward_pre_hook(InputHook(self), with_kwargs=True)

    def learn(self, observation: Observation, features: Tensor) -> Tensor:
        """Let the head learn. Returns the features as the head is to see them."""
        if observation.learned:
            raise RuntimeError(
                f"the forward inside observe reached the head {self.name!r} twice: "
                "use one observe for each pass through the model"
            )
        check_dense("features", features)
        self.current = None  # so that the solver may call its head
        try:
            if observation.captured:
                self._update_captured(observation, features)
            elif self.holds_out:
                features = self._update_and_hold_out(observation, features)
            elif self.head_fraction < 1.0:
                rows, targets, weight, _ = self._draw(features, observation.targets, observation.sample_weight)
                self.solver.update(rows, targets, weight)
            else:
                self.solver.update(features, observation.targets, observation.sample_weight)
        finally:
            self.current = observation
        observation.learned = True
        if features.requires_grad:  # the head's own gradient would be computed for nobody
            observation.freeze(self.head)
        return features

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
        return Checkpoint(state, statistics, self.body_steps)

    def rollback(self, checkpoint: Checkpoint, observation: Observation) -> None:
        """Come back to `checkpoint` from a failed `observation`, unless the body has already followed it."""
        if self.body_steps != checkpoint.body_steps:
            return
        if self.revertible and observation.learned:
            cast(Revertible, self.solver).rollback(checkpoint.state)
        for buffer, before in checkpoint.statistics:
            buffer.copy_(before)

    def _update_and_hold_out(self, observation: Observation, features: Tensor) -> Tensor:
        """The same where the solver judges itself by samples it knows again: those must not teach the body either."""
        solver = cast(HoldsOut, self.solver)
        n = features.numel() // features.shape[-1]
        identity = next((x for x in observation.inputs if x.ndim and len(x) and n % len(x) == 0), None)
        if self.head_fraction < 1.0:
            rows, targets, weight, drawn = self._draw(features, observation.targets, observation.sample_weight)
            solver.update(
                rows, targets, weight, identity=None if identity is None else identity[drawn // (n // len(identity))]
            )
            held = solver.held_out
            if held is not None:
                held = torch.zeros(n, dtype=torch.bool, device=held.device).index_put((drawn[held],), held.new_ones(()))
        else:
            solver.update(features, observation.targets, observation.sample_weight, identity=identity)
            held = solver.held_out
        if held is None or not features.requires_grad:
            return features
        return torch.where(held.view(*features.shape[:-1], 1), features.detach(), features)

    def _update_captured(self, observation: Observation, features: Tensor) -> None:
        """The same inside a CUDA graph, where the host can neither draw rows nor look at numbers."""
        rows = features.detach().reshape(-1, features.shape[-1])
        targets = observation.targets.reshape(len(rows), -1)
        count = math.ceil(self.head_fraction * len(rows))
        if count < len(rows):
            drawn = torch.rand(len(rows), device=rows.device).topk(count).indices
            rows, targets = rows[drawn], targets[drawn]
        observation.finite = cast(Capturable, self.solver).update_captured(rows, targets)

    def _draw(
        self, features: Tensor, targets: Tensor, sample_weight: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """The rows drawn for the head, `head_fraction` of them, and which they are."""
        labels = not targets.is_floating_point() and targets.shape == features.shape[:-1]
        check_rows(self.head, features, None if labels else targets)
        check_weight(self.head, features, sample_weight)
        rows = features.reshape(-1, features.shape[-1])
        count = math.ceil(self.head_fraction * len(rows))
        drawn = torch.randperm(len(rows), generator=self.generator)[:count].to(rows.device)
        weight = None if sample_weight is None else sample_weight.reshape(-1)[drawn]
        flat = targets.reshape(-1) if labels else targets.reshape(len(rows), -1)
        return rows[drawn], flat[drawn], weight, drawn

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"generator": self.generator.get_state(), "current": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.generator = torch.Generator()
        self.generator.set_state(state["generator"])
        self.attach()


class Observation:
    """The context that `observe` returns: one pass through the model, from which the head learns first."""

    __slots__ = ("_frozen", "captured", "finite", "inputs", "learned", "observer", "sample_weight", "targets")

    def __init__(
        self, observer: Observer, targets: Tensor, sample_weight: Tensor | None = None, *, captured: bool = False
    ) -> None:
        check_dense("targets", targets)
        if sample_weight is not None:
            check_dense("sample_weight", sample_weight)
        self.observer, self.targets, self.sample_weight = observer, targets, sample_weight
        self.learned, self.captured = False, captured
        self.finite: Tensor | None = None  # what `update_captured` returned
        self.inputs: list[Tensor] = []  # the model's, where the solver asks for them
        self._frozen: list[nn.Parameter] = []

    def __enter__(self) -> Observation:
        if self.observer.current is not None:
            raise RuntimeError("observe is already active: one observe for each pass through the model")
        self.observer.current = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.observer.current = None
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        if kind is None and not self.learned:
            raise RuntimeError(
                f"the forward inside observe never reached the head {self.observer.name!r}: nothing was learned; "
                "run the model inside the context, or name the right head in SepSA(model, base, head=...)"
            )

    def freeze(self, head: nn.Linear) -> None:
        """No gradient for the head until the context ends."""
        for parameter in head._parameters.values():
            if parameter is not None and parameter.requires_grad:
                parameter.requires_grad_(False)
                self._frozen.append(parameter)


class HeadHook:
    """The forward pre-hook on the head, where a compiled model breaks its graph.

    It holds its observer weakly and is copied without it, so a copied or saved model is free of us.
    """

    def __init__(self, observer: Observer | None = None) -> None:
        self.observer = (lambda: None) if observer is None else weakref.ref(observer)

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
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
        observer = self.observer()
        if observer is not None and observer.current is not None:
            observer.current.inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]


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
