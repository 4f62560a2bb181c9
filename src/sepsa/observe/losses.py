"""Losses of the body that users write: those that broadcast outputs, or that are not the loss of the head."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sepsa.heads import HeadSolver

# Losses of classes, and the solver whose loss they are.
CLASSIFICATION = {
    "cross_entropy": "SoftmaxNewton",
    "log_softmax": "SoftmaxNewton",
    "binary_cross_entropy_with_logits": "LogisticNewton",
}


class LossProbe(TorchFunctionMode):
    """Refuses a function of outputs and targets that broadcasts them, and warns of cross-entropy on a squared head."""

    def __init__(self, targets: Tensor, squeezed: list[Tensor], labelled: list[Tensor]) -> None:
        super().__init__()
        self.targets, self.squeezed, self.labelled = targets, squeezed, labelled

    @classmethod
    def where_needed(cls, targets: Tensor, outputs: list[Tensor], solver: HeadSolver) -> LossProbe | None:
        """Enter a probe where the model's outputs or targets of 0 and 1 make a wrong loss possible, or return None."""
        if not targets.is_floating_point():
            return None
        squeezed = [output for output in outputs if widened(output, targets) is not None]
        labels = bool(((targets == 0) | (targets == 1)).all()) and is_squared(solver)
        if not squeezed and not labels:
            return None
        probe = cls(targets, squeezed, outputs if labels else [])
        probe.__enter__()  # type: ignore[no-untyped-call]
        return probe

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        given, name = [*args, *(kwargs or {}).values()], getattr(func, "__name__", "")
        if name in CLASSIFICATION and any(is_in(output, given) for output in self.labelled):
            self.labelled = []  # once
            warnings.warn(
                f"the loss calls {name} on the model's output, but the head learns by least squares to give targets of "
                f"0 and 1: "
                f"take SepSA(model, base, solver={CLASSIFICATION[name]}()), or mse_loss for the body too",
                stacklevel=4,
            )
        both = [output for output in self.squeezed if is_in(output, given)] if is_in(self.targets, given) else []
        result = None if both and name.endswith("_loss") else func(*args, **(kwargs or {}))
        for output in both:
            wide = widened(output, self.targets)
            if wide is not None and (result is None or (isinstance(result, Tensor) and result.shape == wide)):
                raise ValueError(
                    f"the model's output has shape {tuple(output.shape)} and the targets {tuple(self.targets.shape)}, "
                    f"and {name} broadcasts them to {wide}: let the model return what its head gives, or pass "
                    "the loss targets.view_as(outputs)"
                )
        return result


def is_squared(solver: HeadSolver) -> bool:
    """Whether the solver's loss is the mean squared error: that of 1 and 3 for targets of 0 and 1 is 5/2."""
    try:
        loss = solver.loss(torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 1.0]]))
    except (TypeError, ValueError, RuntimeError):
        return False
    return bool(torch.isclose(loss, torch.tensor(2.5)))


def widened(outputs: Tensor, targets: Tensor) -> tuple[int, ...] | None:
    """The shape to which as many outputs as targets broadcast, where it has more numbers than either."""
    if outputs.shape == targets.shape or outputs.numel() != targets.numel():
        return None
    try:
        wide = torch.broadcast_shapes(outputs.shape, targets.shape)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None
    return tuple(wide) if wide.numel() > targets.numel() else None


def is_in(tensor: Tensor, values: list[Any]) -> bool:
    return any(value is tensor for value in values)
