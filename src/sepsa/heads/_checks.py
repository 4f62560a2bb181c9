"""What every head solver checks where data come in: once, before anything changes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sepsa.heads.solver import NotFinite


def in_range(name: str, value: float, low: float, high: float) -> float:
    """A number in (low, high], or in (low, inf)."""
    words = f"({low:g}, inf)" if high == math.inf else f"({low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number in {words}, got {value!r}")
    if not low < value <= high or value == math.inf:
        raise ValueError(f"{name} must be in {words}, got {value}")
    return float(value)


def at_least(name: str, value: object, low: int) -> int:
    """An integer that is not smaller than `low`."""
    integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not integer or value < low:  # type: ignore[operator]
        error: type[Exception] = ValueError if integer else TypeError
        raise error(f"{name} must be an integer of at least {low}, got {value!r}")
    return int(value)  # type: ignore[call-overload, no-any-return]


def affine_parameters(linear: object) -> None:
    """Refuse what is not a plain nn.Linear with parameters of its own."""
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"head must be an nn.Linear, got {type(linear).__name__}")
    if isinstance(linear.weight, nn.parameter.UninitializedParameter):
        raise ValueError("head is a LazyLinear without weights yet: run the model once on a batch first")
    if not isinstance(linear._parameters.get("weight"), nn.Parameter):
        raise ValueError(
            "head computes its weight from other parameters (weight_norm, parametrize): "
            "remove the parametrization from the head, the solver sets its weight directly"
        )
    if not linear.weight.is_floating_point():
        raise TypeError(f"head must have real floating weights, got {linear.weight.dtype}")


def is_new_head(name: str, owned: nn.Linear | None, linear: nn.Linear) -> bool:
    """Whether the solver `name`, which owns `owned` so far, is to start on `linear`; a second head is refused."""
    affine_parameters(linear)
    if owned is not None and owned is not linear:
        raise ValueError(
            f"this {name} is already bound to another nn.Linear: a solver owns one head, so make a second {name}"
        )
    return owned is None


def owned_head(name: str, owned: nn.Linear | None) -> nn.Linear:
    """The head of the solver `name`, which must have one by now."""
    if owned is None:
        raise RuntimeError(f"this {name} owns no head yet: call bind(linear) first, or hand it to SepSA")
    return owned


def check_keys(name: str, state_dict: dict[str, Any], keys: set[str]) -> None:
    """Refuse what is not a state of the solver `name`."""
    if set(state_dict) != keys:
        missing, extra = sorted(keys - set(state_dict)), sorted(set(state_dict) - keys)
        raise ValueError(f"state_dict is not one of {name}: missing {missing}, unexpected {extra}")


def check_state_tensor(key: str, value: object, shape: tuple[int, ...]) -> None:
    """Refuse a state's entry that is no finite tensor of this shape."""
    if not isinstance(value, Tensor) or value.shape != shape:
        came = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"state_dict[{key!r}] must be a tensor of shape {shape}, got {came}: "
            "the checkpoint belongs to a head of another size"
        )
    if not bool(torch.isfinite(value).all()):
        raise ValueError(f"state_dict[{key!r}] must be finite, got NaN or Inf: the checkpoint is damaged")


def check_rows(
    linear: nn.Linear, features: Tensor, targets: Tensor | None = None, sample_weight: Tensor | None = None
) -> None:
    """Shapes, dtypes and devices of what a head is asked to learn or predict."""
    weight = linear._parameters["weight"]  # a fifth of the price of linear.weight, once a step
    assert weight is not None
    device = weight.device
    k, m = linear.in_features, linear.out_features
    _check_tensor("features", features, device)
    shape = features.shape
    if not shape or shape[-1] != k:
        raise ValueError(f"features must have shape (..., {k}), the head's in_features, got {tuple(shape)}")
    if 0 in shape:
        raise ValueError(f"features must hold at least one sample, got shape {tuple(shape)}")
    if targets is None:
        return
    if isinstance(targets, Tensor) and not targets.is_floating_point() and targets.shape == shape[:-1]:
        raise TypeError(
            f"targets must be floating with shape {(*shape[:-1], m)}, got {targets.dtype} {tuple(targets.shape)}: "
            f"for class labels use torch.nn.functional.one_hot(targets, {m}).float()"
        )
    _check_tensor("targets", targets, device)
    if targets.shape[-1:] != (m,) or targets.shape[:-1] != shape[:-1]:
        cure = ": add the missing dimension with targets.unsqueeze(-1)" if targets.shape == shape[:-1] else ""
        raise ValueError(
            f"targets must have shape {(*shape[:-1], m)} for these features, got {tuple(targets.shape)}{cure}"
        )
    check_weight(linear, features, sample_weight)


def check_weight(linear: nn.Linear, features: Tensor, sample_weight: Tensor | None) -> None:
    """The weights of samples whose features are good."""
    if sample_weight is None:
        return
    shape = features.shape
    _check_tensor("sample_weight", sample_weight, linear.weight.device)
    if sample_weight.shape != shape[:-1]:
        raise ValueError(
            f"sample_weight must have shape {tuple(shape[:-1])}, one number a sample, got {tuple(sample_weight.shape)}"
        )
    if not bool(((sample_weight >= 0) & (sample_weight < math.inf)).all()):
        worst = sample_weight[~((sample_weight >= 0) & (sample_weight < math.inf))][0].item()
        raise ValueError(f"sample_weight must be finite and at least 0, got {worst:g}")


def _check_tensor(name: str, value: object, device: torch.device) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}: use torch.as_tensor({name})")
    if not value.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {value.dtype}: call {name}.float()")
    if value.device != device:
        raise ValueError(f"{name} must be on {device}, where the head is, got {value.device}")


def explain_nonfinite(features: Tensor, targets: Tensor | None, linear: nn.Linear) -> NotFinite:
    """The error for numbers a head cannot learn from; called only once something is known to be wrong."""
    head = (("the head's weight", linear.weight), ("the head's bias", linear.bias))
    for name, value in (("features", features), ("targets", targets), *head):
        if value is not None and not bool(torch.isfinite(value).all()):
            bad = value[~torch.isfinite(value)]
            return NotFinite(
                f"{name} must be finite, got {bad[0].item()} ({bad.numel()} of {value.numel()} values are NaN or Inf): "
                "nothing was learned; drop or repair these samples, or lower the body's learning rate if it diverged"
            )
    largest = max(float(v.abs().max()) for v in (features, targets) if v is not None)
    return NotFinite(
        f"features and targets must be small enough to square, got {largest:g}: nothing was learned; rescale them"
    )
