"""The classification head: state and interface of the online Newton method in `math.cross_entropy`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from sepsa.heads.base.checks import check_classes, check_outputs
from sepsa.heads.base.head import assign, head_of
from sepsa.heads.cross_entropy.captured import CapturedSoftmax
from sepsa.heads.cross_entropy.eager import Rows
from sepsa.heads.cross_entropy.math import CrossEntropyState, both, class_factors, mean_loss
from sepsa.heads.cross_entropy.newton import (
    NOISE_FACTOR,
    NewtonHead,
    begun,
    chosen,
    factors,
    update_settings,
    weights_setting,
)
from sepsa.heads.least_squares.evidence import due
from sepsa.heads.run.capture import LearnsInGraphs
from sepsa.validation import is_number


class SoftmaxNewton(NewtonHead, LearnsInGraphs):
    """Train a classification head by an online Newton method on the softmax cross-entropy.

    Choose it to train a classifier on its own loss where a p x p matrix fits in memory, p the number of features and
    the bias; further classes add only rows of weights. A head with one output is logistic regression: its output is the
    logit of class 1 of two. On a fixed body the weights approach the minimizer of

        sum_i cross_entropy(W features_i, targets_i) + ridge/2 ||W - prior||^2

    over recent samples, where `prior` is the head's weights at `bind`. The curvature remembers about an eighth of the
    samples seen, fewer with `forgetting` below 1; the ridge is never forgotten. With `ridge="evidence"` the samples
    choose the ridge, by the Laplace approximation of their evidence. `ridge_now` is the present one.

    Args:
        ridge: Strength of the pull towards the initial weights; 1 has the weight of a few samples of unit features.
            "evidence": chosen after 1, 2, 4, 8, ... updates, and four times in the memory of a head that forgets, at
            most once in 32 updates. It weighs at least as much as the samples of one update, and 10, and at most as
            much as those that the curvature remembers.
        forgetting: Factor in (0, 1] on the curvature of earlier samples, once per update; 1 adds no forgetting.
        bias_ridge: Ridge of the bias. None: 1e-4 (1e-3 in float32) or `ridge`, whichever is smaller; "ridge": `ridge`.
        label_smoothing: Weight in [0, 1) of the uniform distribution in the targets, as in `torch.nn.CrossEntropyLoss`.
        class_weight: One positive factor per class on the loss of its samples; two factors for a head with one output.
        noise_factor: With `ridge="evidence"`, a factor on the ridge. A body that learns below the head fits the same
            samples, which the evidence does not know; 3 is by comparison (benchmarks/heads/class_defaults.py).

    Attributes:
        linear: The `nn.Linear` that the solver is bound to, or None.

    See also:
        `LogisticNewton` for labels that do not exclude each other; `OnlineLBFGS` where p x p is too large.

    Examples:
        >>> import torch
        >>> from sepsa import SoftmaxNewton
        >>> _ = torch.manual_seed(0)
        >>> features = torch.randn(200, 4)
        >>> labels = features[:, :3].argmax(1)
        >>> head = SoftmaxNewton().bind(torch.nn.Linear(4, 3))
        >>> for batch in torch.arange(200).split(20):
        ...     head.update(features[batch], labels[batch])
        >>> head.predict_proba(features[:2]).shape
        torch.Size([2, 3])
        >>> bool((head.predict(features).argmax(1) == labels).float().mean() > 0.9)
        True
    """

    captures = CapturedSoftmax
    settings = (*NewtonHead.settings, "label_smoothing", "class_weight")
    _not_copied = (*NewtonHead._not_copied, *LearnsInGraphs._not_copied)

    def __init__(
        self,
        *,
        ridge: float | Literal["evidence"] = 1.0,
        forgetting: float = 1.0,
        bias_ridge: float | Literal["ridge"] | None = None,
        label_smoothing: float = 0.0,
        class_weight: Sequence[float] | Tensor | None = None,
        noise_factor: float = NOISE_FACTOR,
    ) -> None:
        super().__init__(ridge, forgetting, bias_ridge, noise_factor)
        self.label_smoothing = smoothing(label_smoothing)
        self.class_weight = weights_setting("class_weight", class_weight, "a class")

    # ------------------------------------------------------------------ state

    def _weights(self, W: Tensor) -> Tensor:
        return factors(self, "class_weight", W, max(len(W), 2), "a class")

    def _located(self) -> nn.Linear:
        captured = self.captured
        if captured is not None:
            captured.finish()
            captured.warn_of_refusals()
        linear = super()._located()
        if self.ridge == "evidence" and captured is not None and self.state is captured.now:
            updates = int(self.state.counters[0])
            if due(captured.updates, updates, update_settings(self).forgetting):
                state, ridge = chosen(self, self.state, self._ridge)
                if state is not self.state:
                    assign(self, state.W.to(linear.weight.dtype), state=state, _ridge=ridge, _updates=updates)
            captured.updates = updates
        return linear

    def _read(self) -> CrossEntropyState:
        self._located()
        return self.state

    def class_shares(self) -> Tensor:
        """Return s (out_features,): the curvature of class k is s_k A, and the covariance of its weights B / s_k."""
        self._located()
        return class_factors(self.state.shares)

    # ------------------------------------------------------------------ learning

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, the loss that the head minimizes, for the body to follow.

        Args:
            outputs: Logits (..., out_features).
            targets: Class probabilities (..., out_features) or integer labels (...).

        Returns:
            A scalar, as `torch.nn.functional.cross_entropy` with the solver's `class_weight` and `label_smoothing`.
        """
        head_of(self)
        check_outputs(outputs, targets, labels=not targets.is_floating_point())
        weights = None if self.class_weight is None else self.state.weights.to(outputs)
        return mean_loss(outputs, targets, weights, self.label_smoothing)

    def _probabilities(self, outputs: Tensor) -> Tensor:
        return both(outputs).softmax(-1)

    def _rows(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None) -> Rows:
        check_classes(head_of(self), features, targets, sample_weight)
        return features, targets, sample_weight

    def _continue_captured(self) -> Hashable:
        now = self.captured.now
        if self.state is not now:
            assign(self, _backend=self.captured, state=now, _updates=None)
        return update_settings(self), tuple(self.class_weight or ()), self.captured.place

    @torch.no_grad()
    def update_captured(self, features: Tensor, targets: Tensor) -> Tensor:
        """Learn samples inside a CUDA graph, without synchronizing with the host.

        Args:
            features: Inputs of the head (..., in_features).
            targets: As for `update`.

        Returns:
            A boolean scalar on the device: False where samples were refused, which then changed nothing.
        """
        captured = self.captured
        if captured is None or self.state is not captured.now:
            raise RuntimeError("update_captured needs prepare_capture() before it, and after every update without it")
        if not targets.is_floating_point():
            targets = targets.reshape(features.shape[:-1])
        by_evidence = self.ridge == "evidence" and not (features.is_cuda and torch.cuda.is_current_stream_capturing())
        if by_evidence and not self.state.counters[0]:  # steps that warm up
            state, self._ridge = begun(self, features, None)
            captured.load(state)
        return captured.update(features, targets, update_settings(self))


def smoothing(value: float) -> float:
    """The setting `label_smoothing`."""
    if not is_number(value):
        raise TypeError(f"label_smoothing must be a number in [0, 1), got {value!r}")
    if not 0.0 <= value < 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1), got {value}")
    return float(value)
