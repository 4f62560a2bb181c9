"""Samples of which some outputs are observed and others not, for solvers with a curvature for each output."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from sepsa.heads.base.checks import check_rows, check_weight
from sepsa.heads.protocols import NotFinite


class ObservedRows(NamedTuple):
    """Samples as rows."""

    features: Tensor  # (n, in_features)
    targets: Tensor  # (n, out_features), 0 where not observed
    weight: Tensor | None  # (n, out_features); None: 1 everywhere
    observed: Tensor | None  # (n, out_features), as booleans; None: everything


def rows_of(linear: nn.Linear, features: Tensor, targets: Tensor, sample_weight: Tensor | None) -> ObservedRows:
    """The samples, checked. A target of NaN and a weight of 0 say that this output was not observed.

    `sample_weight` has one number a sample (...), or one for each output of it (..., out_features). A sample without
    any target is an error, as in every solver; SepSA leaves such samples out.
    """
    check_rows(linear, features, targets)
    per_output = sample_weight is not None and sample_weight.shape == targets.shape
    if not per_output:
        check_weight(linear, features, sample_weight)
    elif sample_weight is not None:
        check_weight(linear, features, sample_weight.amin(-1))  # a NaN is the least too
        check_weight(linear, features, sample_weight.amax(-1))
    m = linear.out_features
    x, y = features.detach().reshape(-1, linear.in_features), targets.detach().reshape(-1, m)
    missing = y.isnan()
    none, some = torch.stack([missing.all(1).any(), missing.any()]).tolist()
    if none:
        raise NotFinite(
            f"targets must be finite, or NaN for outputs that were not observed, got {int(missing.all(1).sum())} of "
            f"{len(y)} samples without any: nothing was learned; leave these samples out, as SepSA does"
        )
    if some:
        y = y.where(~missing, 0)
    if sample_weight is None:
        return ObservedRows(x, y, None, ~missing if some else None)
    weight = sample_weight.detach().reshape(len(x), -1).expand(-1, m)
    observed = ~missing & (weight > 0)
    return ObservedRows(x, y, weight.where(observed, 0), observed)


def mean_loss(each: Tensor, observed: Tensor, sample_weight: Tensor | None) -> Tensor:
    """The mean of `each` (..., out_features) over what was observed, by weights (...) or (..., out_features)."""
    weight = observed.to(each.dtype)
    if sample_weight is not None:
        per_output = sample_weight.shape == each.shape
        weight = weight * (sample_weight if per_output else sample_weight.unsqueeze(-1)).to(each.dtype)
    return weighted_mean(each, weight)


def weighted_mean(each: Tensor, weight: Tensor) -> Tensor:
    """The mean of `each` by weights of its shape and dtype; 0 where all of them are."""
    return (weight * each).sum() / weight.sum().clamp(min=torch.finfo(each.dtype).tiny)


def worst(reports: list[dict[str, float]]) -> dict[str, float]:
    """One `health()` for all outputs: the worst value of each number."""
    least = ("smallest_eigenvalue", "effective_samples")
    return {key: (min if key in least else max)(report[key] for report in reports) for key in reports[0]}
