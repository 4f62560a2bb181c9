"""`sepsa.observe`, and the context of one pass through a model with several heads: all of them learn, or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from sepsa.training.observation import Observation, close
from sepsa.training.observer import Observer, observers_of


class Observations:
    """The context of one pass through a model with several heads, each with targets of its own.

    An error inside it leaves all heads as before, those too that had learned.
    """

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

    def __enter__(self) -> Observations:
        begun: list[Observation] = []
        try:
            for observation in self.each.values():
                model = observation.observer.model
                observation.__enter__(all(one.observer.model is not model for one in begun))  # statistics once
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
        >>> with sepsa.observe(model, torch.randn(5, 1)):
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
