"""How a head learns while the model runs: one observation, its rows and masks, the head, the ranks, the hooks."""

from __future__ import annotations

from typing import Any, overload

from torch import Tensor, nn

from sepsa.training.hooks import HeadHook, OutputHook, OutputProbe, observers_of
from sepsa.training.observation import Collection, Observation, Observations
from sepsa.training.observer import Observer

# Pickled models and optimizers name the hooks, the probe and the observer here.
__all__ = [
    "HeadHook",
    "Observation",
    "Observations",
    "Observer",
    "OutputHook",
    "OutputProbe",
    "observe",
    "observers_of",
]


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
