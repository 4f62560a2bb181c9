"""One observation: the context in which the heads of a model learn during its forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from threading import get_ident
from types import TracebackType
from typing import Any, TypeAlias, cast, overload

import torch
from torch import Tensor, nn

from sepsa.distributed import is_initialized
from sepsa.heads import LearnsPartly
from sepsa.observe import ranks
from sepsa.observe.hooks import HeadHook
from sepsa.observe.observer import Observer
from sepsa.observe.rows import weight_rows

Collection: TypeAlias = Mapping[str, Tensor] | Sequence[Tensor]


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


def observers_of(model: nn.Module) -> Iterator[Observer]:
    """Yield the observers of the heads in `model`."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if type(hook) is HeadHook and (observer := hook.observer()) is not None:
                yield observer


class HeadNotReached(RuntimeError):
    """The forward inside `observe` did not reach the head."""


class Observation:
    """The context that `observe` returns, for one forward pass: the head learns before it computes its output."""

    # Not set in __init__, which runs at every step.
    learned = learning = reached = captured = ranks = False
    thread = 0  # that opened the context; a forward pass in another thread does not learn and is not counted
    observed: Tensor | None = None  # a mask (n,) of the rows that have a target; None: all have one
    finite: Tensor | None = None  # the flag that `update_captured` returned
    group: Any = None  # the process group of a captured step
    excluded: Tensor | None = None  # a mask (n,) of the rows from which the body must not learn
    rows: Tensor | None = None  # the rows of the data set in a captured step
    inputs: Sequence[Tensor] = ()  # the model's, where the solver identifies samples by them
    frozen: Sequence[nn.Parameter] = ()

    def __init__(self, observer: Observer, targets: Tensor, sample_weight: Tensor | None = None) -> None:
        if not isinstance(targets, Tensor):
            raise TypeError(f"targets must be a torch.Tensor, got {type(targets).__name__}")
        self.observer, self.targets, self.sample_weight = observer, targets, sample_weight

    def __enter__(self) -> Observation:
        observer = self.observer
        self.thread = get_ident()
        if observer.current is not None:
            if observer.current.thread != self.thread:
                raise RuntimeError(
                    f"observe or predict is active in another thread, and one thread at a time can use the head "
                    f"{observer.name!r}: hold a lock around observe, backward and step, or give each thread a model"
                )
            raise RuntimeError("observe is already active: use one observe for each forward pass")
        self.ranks = is_initialized() and not self.captured
        if not self.inputs and observer.epoch is not None and observer.epoch.watches and not self.captured:
            observer.hear_inputs()
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
        observer = self.observer
        missed = self._missed() if error is None and not self.learned else error
        try:
            if self.ranks and not self.reached and isinstance(missed, Exception):
                ranks.report_failure(observer, missed, None if isinstance(missed, HeadNotReached) else trace)
        finally:
            observer.current = None
            self.thaw()
            if observer.probe is not None:
                observer.probe.stop()
        if error is not None:
            return
        if missed is not None:
            raise missed
        if observer.probe is not None:
            observer.probe.judge(self)

    def _missed(self) -> HeadNotReached:
        name = self.observer.name
        if not self.observer.attached:
            return HeadNotReached(
                f"this SepSA no longer trains the head {name!r}: a later SepSA took it over, or detach() was called; "
                "observe with the later one, or make another"
            )
        return HeadNotReached(
            f"the forward inside observe never reached the head {name!r}: nothing was learned; run the model inside "
            "the context and in its thread, or name the right head in SepSA(model, base, head=...)"
        )

    def loss(self, outputs: Tensor) -> Tensor:
        """The solver's loss: the weighted mean over samples that have a target."""
        targets, weight, solver = self.targets, self.sample_weight, self.observer.solver
        if self.observed is not None:
            rows, n = self.observed, len(self.observed)
            outputs = outputs.reshape(n, -1)[rows]
            labels = targets.numel() == n and not targets.is_floating_point()
            targets = (targets.reshape(n) if labels else targets.reshape(n, -1))[rows]
            weight = None if weight is None else weight_rows(weight, n)[rows]
            if not len(outputs):
                return outputs.sum()  # 0, with a gradient of 0
        if weight is None:
            return solver.loss(outputs, targets)
        if self.observer.partial_targets:
            return cast(LearnsPartly, solver).loss(outputs, targets, weight)
        n = weight.numel()
        targets = targets.reshape(n, 1) if targets.shape == weight.shape else targets.reshape(n, 1, -1)
        each: Tensor = torch.func.vmap(solver.loss)(outputs.reshape(n, 1, -1), targets)  # of one sample each
        weight = weight.reshape(n).to(each.dtype)
        return (weight * each).sum() / weight.sum().clamp(min=torch.finfo(each.dtype).tiny)

    def identity(self, n: int) -> Tensor | None:
        """The input (b, ...) of the model by which a solver recognizes the samples of n rows, b a divisor of n."""
        for x in self.inputs:
            if n and x.ndim and len(x) and n % len(x) == 0:
                return x
        return None

    def freeze(self, head: nn.Linear) -> None:
        """Compute no gradient of the head until the context ends, because nothing uses it."""
        self.frozen = [p for p in head._parameters.values() if p is not None and p.requires_grad]
        for parameter in self.frozen:
            parameter.requires_grad_(False)

    def thaw(self) -> None:
        """Compute gradients of the head again."""
        for parameter in self.frozen:
            parameter.requires_grad_(True)
        self.frozen = ()


class Observations:
    """The context of one pass through a model with several heads, each with targets of its own."""

    def __init__(self, observers: Sequence[Observer], targets: Any, sample_weight: Any = None) -> None:
        names = [observer.name for observer in observers]
        self.targets = by_name("targets", targets, names)
        each = is_collection(sample_weight)
        weights = by_name("sample_weight", sample_weight, names) if each else dict.fromkeys(names, sample_weight)
        self.each = {
            observer.name: Observation(observer, self.targets[observer.name], weights.get(observer.name))
            for observer in observers
            if observer.name in self.targets
        }
        self._entered = contextlib.ExitStack()

    @property
    def learned(self) -> bool:
        """Whether a head has learned."""
        return any(observation.learned for observation in self.each.values())

    def __enter__(self) -> Observations:
        with contextlib.ExitStack() as entered:
            for observation in self.each.values():
                entered.enter_context(observation)
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)

    def loss(self, outputs: Any) -> Tensor:
        """The sum of the heads' losses; outputs are a dict by the heads' names, or a sequence in their order."""
        named = by_name("the model's outputs", outputs, list(self.each))
        return torch.stack([observation.loss(named[name]) for name, observation in self.each.items()]).sum()


def is_collection(value: Any) -> bool:
    return isinstance(value, (tuple, list, Mapping))


def by_name(what: str, values: Any, names: list[str]) -> dict[str, Any]:
    """Values by the heads' names, from a dict with some of the names or a sequence in their order."""
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
