"""Rows and masks: which rows of a batch have a target."""

from __future__ import annotations

import torch
from torch import Tensor

# The class index that torch's losses ignore by default.
IGNORE_INDEX = -100
_FLOATING = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_SIGNED = frozenset({torch.int8, torch.int16, torch.int32, torch.int64})


def may_be_missing(targets: Tensor) -> bool:
    """Whether targets on a CPU hold a NaN or a negative class index, by one cheap call: a NaN does not equal itself."""
    if targets.dtype in _FLOATING:
        return targets.layout is torch.strided and not torch.equal(targets, targets)
    return targets.dtype in _SIGNED and targets.numel() > 0 and targets.min().item() < 0


def observed_rows(features: Tensor, targets: Tensor, partial: bool = False) -> Tensor | None:
    """A mask (n,) of the rows that have a target: not NaN, and as a class index not -100. None where all rows have one.

    A row with some outputs observed and others not is refused, because one curvature serves all outputs of a head,
    unless the solver learns from `partial` targets.
    """
    if any(v.layout is not torch.strided or v.is_nested or v.is_quantized for v in (features, targets)):
        return None  # the solver raises an error
    n = features.numel() // max(1, features.shape[-1])
    if not targets.numel() or targets.numel() % max(n, 1):
        return None
    floating = targets.is_floating_point()
    if not (partial or floating or are_labels(features, targets)):
        return None
    each = targets.detach().reshape(n, -1)
    absent = each.isnan() if floating else each == IGNORE_INDEX
    missing = absent.all(1)
    if floating and not partial:
        some = absent.any(1) & ~missing
        if bool(some.any()):
            raise ValueError(
                f"targets must be finite, or NaN for all outputs of a sample, got {int(some.sum())} samples that are "
                "partly observed: this solver has one curvature for all outputs; for one each, take "
                "solver=PerOutput(RLS()), or LogisticNewton() for labels, or heads of their own, "
                "SepSA(model, base, head=[...])"
            )
    return ~missing if bool(missing.any()) else None


def are_labels(features: Tensor, targets: Tensor) -> bool:
    """Whether targets are class indices, one for each row of features."""
    return not targets.is_floating_point() and targets.shape == features.shape[:-1]


def weight_rows(weight: Tensor, n: int) -> Tensor:
    """Weights of n samples as (n,), or as (n, out_features) where each output has one."""
    return weight.reshape(n) if weight.numel() == n else weight.reshape(n, -1)
