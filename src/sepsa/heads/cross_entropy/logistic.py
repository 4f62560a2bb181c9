"""The head of independent logistic outputs: one online Newton method of `math.cross_entropy` per output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from sepsa.heads.base import partial_targets
from sepsa.heads.base.checks import check_labels, check_outputs, check_rows, is_integer
from sepsa.heads.base.head import head_of
from sepsa.heads.cross_entropy.eager import Rows
from sepsa.heads.cross_entropy.newton import NOISE_FACTOR, NewtonHead, factors, weights_setting

IGNORE_INDEX = -100


class LogisticNewton(NewtonHead):
    """Train independent binary outputs by an online Newton method on their binary cross-entropy.

    Choose it for labels that do not exclude each other (multi-label classification), or for one binary output. Each
    output equals a `SoftmaxNewton` with one output that gets weight 0 where this output was not observed. Each has a
    curvature of its own, so the state is out_features matrices of p x p.

    Targets (..., out_features) are 0 or 1 as numbers or booleans, or probabilities. NaN, or -100 among integers, or a
    weight of 0 marks an output that was not observed; an output without any observation in an update does not change. A
    head with one output also takes labels (...).

    Args:
        ridge: Strength of the pull towards the initial weights; 1 has the weight of a few samples of unit features.
            "evidence": chosen by the samples, one for all outputs, as by `SoftmaxNewton`.
        forgetting: Factor in (0, 1] on the curvature of earlier samples, once per update; 1 adds no forgetting.
        bias_ridge: Ridge of the bias. None: 1e-4 (1e-3 in float32) or `ridge`, whichever is smaller; "ridge": `ridge`.
        pos_weight: One positive factor per output on the loss of its positive samples, as in
            `torch.nn.BCEWithLogitsLoss`.
        noise_factor: As for `SoftmaxNewton`.

    Attributes:
        linear: The `nn.Linear` that the solver is bound to, or None.

    See also:
        `SoftmaxNewton` for classes of which exactly one is right; `PerOutput` for numeric targets that are partly
        missing.

    Examples:
        >>> import torch
        >>> from sepsa import LogisticNewton
        >>> _ = torch.manual_seed(0)
        >>> features = torch.randn(200, 4)
        >>> labels = (features[:, :2] > 0).float()
        >>> labels[:50, 1] = torch.nan  # the second output is observed from row 50 on
        >>> head = LogisticNewton().bind(torch.nn.Linear(4, 2))
        >>> for batch in torch.arange(200).split(20):
        ...     head.update(features[batch], labels[batch])
        >>> head.predict_proba(torch.tensor([[3.0, -3.0, 0.0, 0.0]])).round()
        tensor([[1., 0.]])
    """

    settings = (*NewtonHead.settings, "pos_weight")
    learns_partly = True

    def __init__(
        self,
        *,
        ridge: float | Literal["evidence"] = 1.0,
        forgetting: float = 1.0,
        bias_ridge: float | Literal["ridge"] | None = None,
        pos_weight: Sequence[float] | Tensor | None = None,
        noise_factor: float = NOISE_FACTOR,
    ) -> None:
        super().__init__(ridge, forgetting, bias_ridge, noise_factor)
        self.pos_weight = weights_setting("pos_weight", pos_weight, "an output")

    # ------------------------------------------------------------------ state

    def _weights(self, W: Tensor) -> Tensor:
        yes = factors(self, "pos_weight", W, len(W), "an output")
        return torch.stack([torch.ones_like(yes), yes], 1)  # of a negative and a positive sample

    # ------------------------------------------------------------------ learning

    def loss(self, outputs: Tensor, targets: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        """Return the mean binary cross-entropy of the observed targets, for the body to follow.

        Args:
            outputs: Logits (..., out_features).
            targets: As for `update`.
            sample_weight: Factor (...) or (..., out_features) on the losses; the mean is a weighted one.

        Returns:
            A scalar.
        """
        head_of(self)
        targets = as_numbers(targets, outputs.shape[:-1], outputs.dtype)
        check_outputs(outputs, targets)
        missing = targets.isnan()
        weight = None if self.pos_weight is None else self.state.weights[:, 1].to(outputs)
        each = functional.binary_cross_entropy_with_logits(
            outputs, targets.where(~missing, 0), pos_weight=weight, reduction="none"
        )
        return partial_targets.mean_loss(each, ~missing, sample_weight)

    def _rows(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None) -> Rows:
        linear, dtype = head_of(self), self.state.W.dtype
        check_rows(linear, features)
        if is_integer(targets):
            check_labels(linear, features, targets)
            targets = as_numbers(targets, features.shape[:-1], linear.weight.dtype)
        x, y, weight, observed = partial_targets.rows_of(linear, features, targets, sample_weight)
        omega = observed if weight is None else weight
        return x, y.to(dtype), None if omega is None else omega.to(dtype)

    def _probabilities(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()


def as_numbers(targets: Tensor, leading: torch.Size, dtype: torch.dtype) -> Tensor:
    """Targets as numbers, NaN for -100 among integers; integers of the `leading` shape get a last dimension."""
    numbers = targets.to(dtype)
    if targets.is_floating_point():
        return numbers
    numbers = numbers.where(targets != IGNORE_INDEX, math.nan)
    return numbers.unsqueeze(-1) if numbers.shape == leading else numbers
