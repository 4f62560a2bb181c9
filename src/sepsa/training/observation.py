"""One observation: the context of a forward pass in which heads learn, all of them or none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from sepsa.heads import HeadSolver, LearnsPartly
from sepsa.heads.base.partial_targets import weighted_mean
from sepsa.training.rows import weight_rows

Collection: TypeAlias = Mapping[str, Tensor] | Sequence[Tensor]


class Observation:
    """The context that `observe` returns, for one forward pass: the head learns before it computes its output.

    An error inside it leaves the head, its solver, the counters and the statistics of normalization layers as before.
    """

    # Not set in __init__, which runs at every step.
    learned = learning = reached = captured = ranks = False
    idle = False  # whether the head is frozen and does not learn
    thread = 0  # that opened the context; a forward pass in another thread does not learn and is not counted
    observed: Tensor | None = None  # a mask (n,) of the rows that have a target; None: all have one
    finite: Tensor | None = None  # the flag that `update_captured` returned
    group: Any = None  # the process group of a captured step
    samples = 0  # of a captured step, each of which may have several rows of features
    frozen: Sequence[nn.Parameter] = ()
    before: Any = None  # the checkpoint of the head

    def __init__(self, observer: Any, targets: Tensor, sample_weight: Tensor | None = None) -> None:
        if not isinstance(targets, Tensor):
            raise TypeError(f"targets must be a torch.Tensor, got {type(targets).__name__}")
        self.observer = observer  # an `Observer`, whose file imports this one
        self.targets, self.sample_weight = targets, sample_weight

    def __enter__(self) -> Observation:
        self.observer.begin(self, True)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        close((self,), error, trace)

    def undo(self) -> None:
        """Restore what was there when the context began, unless the body has moved since."""
        if self.before is not None:
            self.observer.rollback(self.before, self.reached)
            self.before = None

    def loss(self, outputs: Tensor) -> Tensor:
        """The solver's loss: the weighted mean over samples that have a target."""
        targets, weight = self.targets, self.sample_weight
        solver: HeadSolver = self.observer.solver
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
        return weighted_mean(each, weight.reshape(n).to(each.dtype))

    def freeze(self, head: nn.Linear) -> None:
        """Compute no gradient of the head until the context ends, because nothing uses it."""
        self.frozen = [p for p in head._parameters.values() if p is not None and p.requires_grad]
        for parameter in self.frozen:
            parameter.requires_grad = False

    def thaw(self) -> None:
        """Compute gradients of the head again."""
        for parameter in self.frozen:
            parameter.requires_grad = True
        self.frozen = ()


class Observations:
    """The context of one pass through a model with several heads, each with targets of its own.

    An error inside it leaves all heads as before, those too that had learned.
    """

    def __init__(self, observers: Sequence[Any], targets: Any, sample_weight: Any = None) -> None:
        names = [observer.name for observer in observers]
        self.targets = by_name("targets", targets, names)
        each = is_collection(sample_weight)
        weights = by_name("sample_weight", sample_weight, names) if each else dict.fromkeys(names, sample_weight)
        self.each = {
            observer.name: Observation(observer, self.targets[observer.name], weights.get(observer.name))
            for observer in observers
            if observer.name in self.targets
        }

    def __enter__(self) -> Observations:
        begun: list[Observation] = []
        try:
            for observation in self.each.values():
                observer = observation.observer
                observer.begin(observation, all(one.observer.model is not observer.model for one in begun))
                begun.append(observation)
        except BaseException as error:
            close(begun, error, None)
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        close(tuple(self.each.values()), error, trace)

    def undo(self) -> None:
        """Restore what was there when the context began, unless the body has moved since."""
        for observation in self.each.values():
            observation.undo()

    def loss(self, outputs: Any) -> Tensor:
        """The sum of the heads' losses; outputs are a dict by the heads' names, or a sequence in their order."""
        named = by_name("the model's outputs", outputs, list(self.each))
        return torch.stack([observation.loss(named[name]) for name, observation in self.each.items()]).sum()


def close(observations: Iterable[Observation], error: BaseException | None, trace: TracebackType | None) -> None:
    """End observations, with the error that was raised inside them, if any. A failure of one undoes all."""
    failure = error
    for observation in observations:
        try:
            observation.observer.end(observation, error, trace)
        except BaseException as missed:  # the others must end, after KeyboardInterrupt too
            failure = missed if failure is None else failure
    if failure is None:
        try:
            for observation in observations:
                observation.observer.judge(observation)
            return
        except BaseException as refused:  # a warning that is an error
            failure = refused
    for observation in observations:
        observation.undo()
    if error is None:
        raise failure


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
