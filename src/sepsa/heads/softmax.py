"""The classification head: state and interface of the online Newton method in `math.cross_entropy`."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from sepsa.heads.backends import many_classes
from sepsa.heads.backends.captured_cross_entropy import CapturedSoftmax
from sepsa.heads.backends.choose import UpdateSize, choose
from sepsa.heads.backends.recorded_cross_entropy import Kind, RecordedBlocks, block_rows, product_precision
from sepsa.heads.base import parameters
from sepsa.heads.base.checks import check_labels, check_outputs, check_rows, explain_nonfinite, is_integer
from sepsa.heads.base.newton import NewtonHead, check_count, weights_setting
from sepsa.heads.math.cross_entropy import (
    TOLERANCE,
    CrossEntropyState,
    UpdateSettings,
    both,
    class_factors,
    finish_large,
    is_large,
    learned,
    look_large,
    probabilities_of,
    start,
    with_curvature,
    with_root,
)
from sepsa.validation import is_number

# A state with T, because a block would have lost digits or something has read T, gets A at one update in so many.
TRY_AGAIN = 8


class SoftmaxNewton(NewtonHead):
    """Train a classification head by an online Newton method on the softmax cross-entropy.

    Choose it to train a classifier on its own loss where a p x p matrix fits in memory, p the number of features and
    the bias; further classes add only rows of weights. A head with one output is logistic regression: its output is the
    logit of class 1 of two. On a fixed body the weights approach the minimizer of

        sum_i cross_entropy(W features_i, targets_i) + ridge/2 ||W - prior||^2

    over recent samples, where `prior` is the head's weights at `bind`. The curvature remembers about an eighth of the
    samples seen, fewer with `forgetting` below 1; the ridge is never forgotten.

    Args:
        ridge: Strength of the pull towards the initial weights; 1 has the weight of a few samples of unit features.
        forgetting: Factor in (0, 1] on the curvature of earlier samples, once per update; 1 adds no forgetting.
        bias_ridge: Ridge of the bias. None: 1e-4 (1e-3 in float32) or `ridge`, whichever is smaller; "ridge": `ridge`.
        label_smoothing: Weight in [0, 1) of the uniform distribution in the targets, as in `torch.nn.CrossEntropyLoss`.
        class_weight: One positive factor per class on the loss of its samples; two factors for a head with one output.

    Attributes:
        linear: The `nn.Linear` that the solver is bound to, or None.

    See also:
        `SelfTuning.of(SoftmaxNewton)`, which chooses the ridge; `LogisticNewton` for labels that do not exclude each
        other; `OnlineLBFGS` where p x p is too large.

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

    settings = ("forgetting", "label_smoothing", "class_weight")

    def __init__(
        self,
        *,
        ridge: float = 1.0,
        forgetting: float = 1.0,
        bias_ridge: float | Literal["ridge"] | None = None,
        label_smoothing: float = 0.0,
        class_weight: Sequence[float] | Tensor | None = None,
    ) -> None:
        super().__init__(ridge, forgetting, bias_ridge)
        self.label_smoothing = smoothing(label_smoothing)
        self.class_weight = weights_setting("class_weight", class_weight, "a class")
        self._captured: CapturedSoftmax | None = None  # what recordings of captured steps write to
        self._recorded: RecordedBlocks | None = None  # what recordings of large blocks write to
        self._bounds: many_classes.Bounds | None = None  # of the state, after a block of many classes

    # ------------------------------------------------------------------ state

    def _start(self, linear: nn.Linear) -> None:
        W = parameters.start(linear, None)
        self._state = start(W, **self._derived(linear, W))

    def _derived(self, linear: nn.Linear, W: Tensor) -> dict[str, Tensor]:
        classes = max(len(W), 2)
        check_count("class_weight", self.class_weight, classes, "a class")
        weights = W.new_tensor(self.class_weight or [1.0] * classes)
        return {"weights": weights, "ridge": self._ridges_now(linear, W, self.ridge)}

    def _located(self) -> nn.Linear:
        if self._captured is not None:
            self._captured.finish()
            self._captured.warn_of_refusals()
        return super()._located()

    def checkpoint(self) -> Any:
        """Return what `rollback` restores: a copy of the head's weights and references to the rest of the state."""
        (state, *rest), head = super().checkpoint()
        if any(memory is not None and state.W is memory.now.W for memory in (self._captured, self._recorded)):
            state = state.copy()  # recordings write into these
        return (state, *rest), head

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {
            "_captured": None,
            "_recorded": None,
            "_bounds": None,
        }  # recordings stay with the original

    def class_shares(self) -> Tensor:
        """Return s (out_features,): the curvature of class k is s_k A, and the covariance of its weights B / s_k."""
        self._ready()
        return class_factors(self._state.shares)

    def __repr__(self) -> str:
        more = f", label_smoothing={self.label_smoothing:g}" if self.label_smoothing else ""
        return self._words(more + ("" if self.class_weight is None else f", class_weight={self.class_weight}"))

    # ------------------------------------------------------------------ learning

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, the loss that the head minimizes, for the body to follow.

        Args:
            outputs: Logits (..., out_features).
            targets: Class probabilities (..., out_features) or integer labels (...).

        Returns:
            A scalar, as `torch.nn.functional.cross_entropy` with the solver's `class_weight` and `label_smoothing`.
        """
        self._located()
        check_outputs(outputs, targets, labels=not targets.is_floating_point())
        logits = both(outputs)
        C, smoothing = logits.shape[-1], self.label_smoothing
        weight = None if self.class_weight is None else self._state.weights.to(outputs.dtype)
        logits = logits.reshape(-1, C)
        if targets.is_floating_point():
            probabilities = probabilities_of(targets, self._state.weights).to(outputs.dtype).reshape(-1, C)
            return functional.cross_entropy(logits, probabilities, weight, label_smoothing=smoothing)
        labels = targets.reshape(-1).long()
        total = functional.cross_entropy(logits, labels, weight, reduction="sum", label_smoothing=smoothing)
        return total / len(logits)

    def loss_of_features(self, features: Tensor, targets: Tensor) -> Tensor:
        """Return `loss` of the head's output for these features.

        Choose it with many classes: on a GPU, in half precision and with labels, it is computed in chunks with its
        gradient, and no array of samples and classes is held. The head itself gets no gradient.

        Args:
            features: Inputs of the head (..., in_features).
            targets: As for `loss`.

        Returns:
            A scalar.
        """
        linear = self._head()
        if not many_classes.serves(linear, features, targets, self.label_smoothing):
            return self.loss(functional.linear(features, linear.weight, linear.bias), targets)
        check_labels(linear, features, targets, None)
        labels = targets.reshape(-1).long()
        weight = None if self.class_weight is None else self._state.weights[labels]
        with torch.autocast("cuda", enabled=False):
            total: Tensor = many_classes.ChunkedLoss.apply(features, linear, labels, weight)  # type: ignore[no-untyped-call]
        return total / len(labels)

    def _probabilities(self, outputs: Tensor) -> Tensor:
        return both(outputs).softmax(-1)

    def _deviation(self, Phi: Tensor) -> Tensor:
        spread = (Phi @ self._state.T.T).square().sum(1, keepdim=True) / class_factors(self._state.shares)
        return spread.sqrt()

    @torch.no_grad()
    def update(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None = None) -> None:
        """Learn samples as one block.

        Args:
            features: Inputs of the head (..., in_features).
            targets: Class probabilities (..., out_features) or integer labels (...).
            sample_weight: Factor (...) on each sample's loss. `forgetting` acts once per update, whatever its size.

        Raises:
            ValueError: A shape, label or probability is wrong, or a value is not finite; nothing was learned.
        """
        linear = self._located()
        self._check(linear, features, targets, sample_weight)
        many = many_classes.serves(linear, features, targets, self.label_smoothing)
        if many and self._learn_many(linear, features, targets, sample_weight):
            return
        updates, large = self._updates_now(), is_large(parameters.width(linear), features.shape[:-1].numel())
        if large and sample_weight is None and self._learn_recorded(linear, features, targets, updates):
            return
        with torch.autocast(linear.weight.device.type, enabled=False):
            before = parameters.follow(linear, self._state.W)
            Phi = block_rows(linear, features, before.dtype, large)
            forms = dict.fromkeys((Phi.dtype, before.dtype)) if large else {}
            labels, settings = targets.detach(), self._settings(linear)

            def advance(state: CrossEntropyState, W: Tensor) -> tuple[CrossEntropyState, bool]:
                if state.A is not None or updates % TRY_AGAIN == 0:
                    for dtype in forms:  # with the digits of the features, then with all
                        rows, with_A = Phi.to(dtype), with_curvature(state)
                        with product_precision(rows):
                            block, *flags = look_large(with_A, W, rows, labels, sample_weight, settings)
                        finite, lost = torch.stack(flags).tolist()
                        if not lost:
                            return finish_large(with_A, block), finite
                rows, state = Phi.to(W.dtype), with_root(state)
                new, *flags = learned(state, W, rows, labels, sample_weight, settings)
                finite, too_large = torch.stack(flags).tolist()
                if too_large:
                    new, *flags = learned(state, W, rows, labels, sample_weight, settings, by_qr=True)
                    finite = bool(flags[0])
                return new, finite

            new, finite = advance(self._state, before)
            if not finite:
                raise self._explain(features, targets, new.W)
            head = new.W.to(linear.weight.dtype)
        self._assign(head, _state=new, _previous=before, _updates=updates + 1)

    def _check(self, linear: nn.Linear, features: Tensor, targets: Tensor, sample_weight: Tensor | None) -> None:
        check_rows(linear, features)
        if is_integer(targets) and targets.dtype != torch.bool and targets.shape == features.shape[:-1]:
            check_labels(linear, features, targets, sample_weight)
        else:
            check_rows(linear, features, targets, sample_weight)

    def _loss_at(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None) -> Tensor:
        linear = self._located()
        logits = both(linear(features.detach().to(linear.weight.dtype))).reshape(-1, len(self._state.weights))
        targets = targets.detach().reshape((len(logits), -1) if targets.is_floating_point() else (-1,))
        t, C = probabilities_of(targets, self._state.weights).to(logits.dtype), logits.shape[1]
        t = ((1 - self.label_smoothing) * t + self.label_smoothing / C) * self._state.weights.to(logits.dtype)
        if sample_weight is not None:
            t = t * sample_weight.reshape(-1, 1).to(logits.dtype)
        return -(t * logits.log_softmax(1)).sum() / t.sum()

    def _learn_many(self, linear: nn.Linear, features: Tensor, targets: Tensor, sample_weight: Tensor | None) -> bool:
        """Learn samples of many classes in chunks; False: nothing was learned, another route must."""
        peak, size, low, high, moved = many_classes.seen(linear, self._state.W, features, targets)
        if not math.isfinite(peak + size):
            raise explain_nonfinite(features, targets, linear, linear.weight)
        if low < 0 or high >= linear.out_features:
            raise self._wrong_label(low if low < 0 else high)
        if max(peak, size) > many_classes.MOST:
            return False
        with torch.autocast("cuda", enabled=False):
            state, labels, n = with_curvature(self._state), targets.detach().reshape(-1).long(), targets.numel()
            W = parameters.follow(linear, state.W) if moved else state.W
            weight = None if self.class_weight is None else state.weights[labels]
            if sample_weight is not None:
                each = sample_weight.detach().reshape(-1)
                weight = each if weight is None else each * weight
            known = self._bounds
            if known is None or known.state is not self._state:
                known = many_classes.bounds_of(state)
            mass = float(n) if weight is None else float(weight.sum())
            bounds = many_classes.grown(known, mass, peak, len(W))
            with product_precision(W.new_empty(0, dtype=torch.float32)):
                sums = many_classes.sums_of(linear, W, features, labels, weight)
            new, lost = many_classes.learned(state, W, sums, n, self._settings(linear).forgetting)
            head, sure = new.W.to(linear.weight.dtype), many_classes.certain(bounds, peak, size, W.shape[1])
            if not (sure and linear.weight.dtype != torch.float16):
                if bool(lost):
                    return False
                if not bool(head.isfinite().all()):
                    raise self._explain(features, targets, head)
        bounds = bounds._replace(state=new)
        self._assign(head, _state=new, _previous=W, _updates=self._updates_now() + 1, _bounds=bounds)
        return True

    def _learn_recorded(self, linear: nn.Linear, features: Tensor, targets: Tensor, updates: int) -> bool:
        """Learn a large block by a recorded CUDA graph; False: nothing was learned, another route must."""
        state = self._state
        n, (K, p) = features.shape[:-1].numel(), state.W.shape
        case = UpdateSize(linear.weight.device.type, state.W.dtype, p, K, n, contiguous=linear.weight.is_contiguous())
        if state.A is None or choose("cross-entropy", case).backend != "graph":
            return False
        recorded = self._recorded
        if recorded is None or not recorded.lies_in(linear):
            recorded = self._recorded = RecordedBlocks(linear, state)
        labels = not targets.is_floating_point()
        shape = () if labels else (targets.numel() // n,)
        kind = Kind(n, features.dtype, shape, targets.dtype, self._settings(linear))
        if not recorded.learn(state, features, targets, kind):
            return False
        self._assign(_state=recorded.now, _previous=recorded.previous, _updates=updates + 1)
        return True

    @torch.no_grad()
    def prepare_capture(self) -> Hashable:
        """Move the state to the memory that recorded CUDA graphs use.

        Returns:
            The addresses and the settings, which a recording depends on.
        """
        self.finish_captured()
        linear, state, captured = super()._ready(), self._state, self._captured
        if captured is None or not captured.lies_in(linear):
            captured = CapturedSoftmax(linear, state)
        if state is not captured.now:
            captured.load(state)
            self._assign(_captured=captured, _state=captured.now, _previous=None, _updates=None)
        captured.now.W.copy_(parameters.follow(linear, captured.now.W))
        return self._settings(linear), tuple(self.class_weight or ()), captured.place

    def _settings(self, linear: nn.Linear) -> UpdateSettings:
        return UpdateSettings(self.forgetting if self.forgets else 1.0, self.label_smoothing, linear.weight.dtype)

    @torch.no_grad()
    def update_captured(self, features: Tensor, targets: Tensor) -> Tensor:
        """Learn samples inside a CUDA graph, without synchronizing with the host.

        Args:
            features: Inputs of the head (..., in_features).
            targets: As for `update`.

        Returns:
            A boolean scalar on the device: False where samples were refused, which then changed nothing.
        """
        linear, captured = self._head(), self._captured
        if captured is None or self._state is not captured.now:
            raise RuntimeError("update_captured needs prepare_capture() before it, and after every update without it")
        if not targets.is_floating_point():
            targets = targets.reshape(features.shape[:-1])
        return captured.update(features, targets, self._settings(linear))

    @torch.no_grad()
    def finish_captured(self) -> None:
        """Compute the curvature after the last `update_captured`; no forward or backward pass reads it."""
        if self._captured is not None:
            self._captured.finish()

    def _wrong_label(self, label: float) -> ValueError:
        most = len(self._state.weights) - 1
        return ValueError(f"targets must be class labels in [0, {most}], got {int(label)}: nothing was learned")

    def _explain(self, features: Tensor, targets: Tensor, learned: Tensor) -> ValueError:
        weights = self._state.weights
        rows = probabilities_of(targets, weights).reshape(-1, len(weights))
        bad = ((rows < 0).any(1) | ((rows.sum(1) - 1).abs() > TOLERANCE)) & rows.isfinite().all(1)
        if not targets.is_floating_point():
            wrong = targets.reshape(-1)[rows.isnan().any(1)]
            if len(wrong):
                return self._wrong_label(int(wrong[0]))
        elif bool(bad.any()):
            what = "in [0, 1]" if len(learned) == 1 else "class probabilities, at least 0 and of sum 1"
            return ValueError(
                f"targets must be {what}, got {targets.reshape(len(rows), -1)[bad][0].tolist()}: nothing was learned"
            )
        return explain_nonfinite(features, targets, self._head(), learned)


def smoothing(value: float) -> float:
    """The setting `label_smoothing`."""
    if not is_number(value):
        raise TypeError(f"label_smoothing must be a number in [0, 1), got {value!r}")
    if not 0.0 <= value < 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1), got {value}")
    return float(value)
