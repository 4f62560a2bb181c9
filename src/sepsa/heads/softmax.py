"""The classifying head: state and interface of the online Newton method that `cross_entropy` writes out."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.nn import functional

from sepsa.heads.backends.captured_cross_entropy import CapturedSoftmax, UpdateSettings
from sepsa.heads.base import parameters
from sepsa.heads.base.checks import check_labels, check_outputs, check_rows, explain_nonfinite, is_integer
from sepsa.heads.base.newton import NewtonHead
from sepsa.heads.math.cross_entropy import (
    TOLERANCE,
    CrossEntropyState,
    both,
    class_factors,
    effective_samples,
    floor,
    learned,
    mean_loss,
    probabilities_of,
    start,
)
from sepsa.heads.protocols import Posterior
from sepsa.validation import in_range, is_number


class SoftmaxNewton(NewtonHead):
    """Classifying head by an online Newton method on its cross-entropy; with one output, logistic regression.

    Choose it to train a classifier with its real loss, whenever a p x p matrix is affordable: the number of classes
    adds only the head itself. On a fixed body it approaches the minimizer of

        sum_i cross_entropy(W features_i, targets_i) + ridge/2 ||W - prior||^2

    where `prior` is what the head held when it was bound, over the last samples, a number that grows with all seen
    unless `forgetting` below 1 holds it down, by this factor in each update; the ridge is never forgotten. The bias has
    the ridge `bias_ridge`, that of `RLS`, next to none.

    With `ridge="auto"` the head compares ridges by their losses at samples that they have not learned yet: five in the
    first 32 updates, at five times the price, later its own and two neighbours now and then; `chosen` tells which,
    `ridge` is the present one. Choose it where nobody knows the ridge and samples do not repeat: a stream, one pass, a
    text. Over many epochs of a small data set no sample is new, and it chooses too small a ridge.

    Targets are class probabilities (..., out_features) or integer labels (...). `label_smoothing` mixes them with the
    uniform distribution, `class_weight` multiplies each class's term, as in `torch.nn.functional.cross_entropy`, whose
    mean over samples `loss` is. One output stands for class 1 of two, so there are two class weights.
    """

    settings = ("forgetting", "label_smoothing", "class_weight")

    def __init__(
        self,
        *,
        ridge: float | Literal["auto"] = 1.0,
        forgetting: float = 1.0,
        bias_ridge: float | Literal["ridge"] | None = None,
        label_smoothing: float = 0.0,
        class_weight: Sequence[float] | Tensor | None = None,
    ) -> None:
        super().__init__(ridge, forgetting, bias_ridge)
        self.label_smoothing = smoothing(label_smoothing)
        self.class_weight = class_weights(class_weight)
        self._captured: CapturedSoftmax | None = None  # what recordings write to

    # ------------------------------------------------------------------ state

    def _start(self, linear: nn.Linear) -> None:
        device = linear.weight.device
        W = parameters.join(linear).to(torch.float32 if device.type == "mps" else torch.float64)
        self._state = start(W, **self._derived(linear, W))

    def _derived(self, linear: nn.Linear, W: Tensor) -> dict[str, Tensor]:
        K = len(W)
        check_class_count(self.class_weight, K)
        weights = W.new_tensor(self.class_weight or [1.0] * max(K, 2))
        return {"weights": weights, "ridge": self._ridges(linear, W, self.ridge)}

    def _ridges(self, linear: nn.Linear, W: Tensor, ridge: float) -> Tensor:
        return floor(parameters.ridges(linear, ridge, self.bias_ridge, W), len(W))

    def _parts(self, state: CrossEntropyState) -> Sequence[CrossEntropyState]:
        return [state]

    def _ready(self) -> nn.Linear:
        if self._captured is not None:
            self._captured.finish()
            self._captured.warn_of_refusals()
        return super()._ready()

    def checkpoint(self) -> Any:
        """What `rollback` returns to: cheap, a copy of the head's weights and references to the rest."""
        (state, *rest), head = super().checkpoint()
        if self._captured is not None and state is self._captured.now:  # captured updates write into these
            state = CrossEntropyState(*(tensor.clone() for tensor in state))
        return (state, *rest), head

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_captured": None}  # recordings stay with the original

    @property
    def steps(self) -> int:
        """How many updates the head has learned from."""
        self._ready()
        return int(self._state.counters[0])

    @property
    def samples(self) -> float:
        """How many samples the head has seen, each by its weight."""
        self._ready()
        return float(self._state.counters[1])

    @torch.no_grad()
    def covariance(self) -> Tensor:
        """B = A⁻¹ (p, p), the inverse of the curvature that all classes share; a bias is the last coordinate."""
        self._ready()
        T = self._state.T
        B = T.T @ T
        return (B + B.T) / 2

    def class_shares(self) -> Tensor:
        """s (out_features,): the curvature of class k is s_k A, so that of its weights' covariance B / s_k."""
        self._ready()
        return class_factors(self._state.shares)

    @torch.no_grad()
    def health(self) -> dict[str, float]:
        """What to look at when a run goes wrong, as numbers to log every hundred steps or so: an SVD of p x p.

        - `condition`, the curvature's largest over its smallest eigenvalue. Above 1e10 digits are lost: raise `ridge`,
          or normalize the features.
        - `smallest_eigenvalue` of the curvature A. Near `ridge` times half the number of classes: some direction was
          never seen, and there the ridge alone decides.
        - `effective_samples`, about how many the curvature remembers: an eighth of those seen once they are many, or
          as few as `forgetting` leaves of batches of the mean size.
        - `last_step`, the norm of the weights' change in the last update. It should fall as the run goes on; if it
          does not, the body moves too fast: lower its learning rate. NaN before an update, and after a captured one.
        - `dead_features`, those that never fired as far as the curvature remembers: make the body narrower.
        """
        self._ready()
        state = self._state
        roots = torch.linalg.svdvals(state.T)  # of B's eigenvalues, the largest first
        return {
            "condition": float(roots[0] / roots[-1]) ** 2,
            "smallest_eigenvalue": 1 / float(roots[0]) ** 2,
            "effective_samples": effective_samples(state, self.forgetting),
            "last_step": self._last_step(),
            "dead_features": float((state.T.square().sum(0) * state.ridge_left > 1 - 1e-9).sum()),
        }

    def __repr__(self) -> str:
        more = f", label_smoothing={self.label_smoothing:g}" if self.label_smoothing else ""
        return self._words(more + ("" if self.class_weight is None else f", class_weight={self.class_weight}"))

    # ------------------------------------------------------------------ learning

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss this head minimizes, for the body to follow: the mean cross-entropy."""
        self._ready()
        check_outputs(outputs, targets, labels=not targets.is_floating_point())
        logits, probabilities = both(outputs), probabilities_of(targets, self._state.weights).to(outputs.dtype)
        C = logits.shape[-1]
        weight = None if self.class_weight is None else self._state.weights.to(outputs.dtype)
        return functional.cross_entropy(
            logits.reshape(-1, C), probabilities.reshape(-1, C), weight, label_smoothing=self.label_smoothing
        )

    @torch.no_grad()
    def predict_proba(self, features: Tensor) -> Tensor:
        """Class probabilities (..., classes), of two classes where the head has one output."""
        linear = self._ready()
        check_rows(linear, features)
        return both(linear(features)).softmax(-1)

    @overload
    def predict(self, features: Tensor, return_std: Literal[False] = False) -> Tensor: ...
    @overload
    def predict(self, features: Tensor, return_std: Literal[True]) -> Posterior: ...
    @torch.no_grad()
    def predict(self, features: Tensor, return_std: bool = False) -> Tensor | Posterior:
        """The logits (..., out_features); with `return_std` also their standard deviation.

        The variance of class k is φᵀBφ / s_k, that of the Laplace approximation with the curvature (1).
        """
        Phi, mean = self._logits(features)
        if not return_std:
            return mean
        spread = (Phi @ self._state.T.T).square().sum(1, keepdim=True) / class_factors(self._state.shares)
        return Posterior(mean, spread.sqrt().reshape(mean.shape).to(mean.dtype))

    @torch.no_grad()
    def update(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None = None) -> None:
        """Learn samples as one block: features (..., in_features), targets (..., out_features) or labels (...).

        `sample_weight` (...) multiplies each sample's loss. `forgetting` acts once per update, however many samples
        it has. On bad input an error is raised and nothing changes.
        """
        linear = self._ready()
        check_rows(linear, features)
        if is_integer(targets) and targets.dtype != torch.bool and targets.shape == features.shape[:-1]:
            check_labels(linear, features, targets, sample_weight)
        else:
            check_rows(linear, features, targets, sample_weight)
        with torch.autocast(linear.weight.device.type, enabled=False):
            before = parameters.follow(linear, self._state.W)
            Phi = parameters.rows(linear, features, before.dtype)

            def advance(state: CrossEntropyState, W: Tensor) -> tuple[CrossEntropyState, bool]:
                new, *flags = self._learned(linear, state, W, Phi, targets, sample_weight)
                finite, too_large = torch.stack(flags).tolist()
                if too_large:
                    new, *flags = self._learned(linear, state, W, Phi, targets, sample_weight, by_qr=True)
                    finite = bool(flags[0])
                return new, finite

            def loss(W: Tensor) -> float:
                return float(mean_loss(self._state, W, Phi, targets, sample_weight, self.label_smoothing))

            new, ridge, choice, finite = self._advanced(linear, before, advance, loss, features)
            if not finite:
                raise self._explain(features, targets, new.W)
            head = new.W.to(linear.weight.dtype)
        self._assign(head, _state=new, _previous=before, _choice=choice, ridge=ridge)

    @torch.no_grad()
    def prepare_capture(self) -> Hashable:
        """Bring the state to where recordings read and write it. Returns where that is, and the settings."""
        if self._choice is not None:
            raise ValueError(
                'ridge="auto" compares ridges on the host, which a captured step cannot: learn some batches without a '
                f"graph first, then take SoftmaxNewton(ridge={self.ridge:g}), the ridge that this head has chosen"
            )
        self.finish_captured()
        linear, state, captured = super()._ready(), self._state, self._captured
        if captured is None or not captured.lies_in(linear):
            captured = CapturedSoftmax(linear, state)
        if state is not captured.now:
            captured.load(state)
            self._assign(_captured=captured, _state=captured.now, _previous=None)
        captured.now.W.copy_(parameters.follow(linear, captured.now.W))
        return self._fixed(), tuple(self.class_weight or ()), captured.place

    def _fixed(self) -> UpdateSettings:
        return UpdateSettings(self.forgetting, self.label_smoothing)

    @torch.no_grad()
    def update_captured(self, features: Tensor, targets: Tensor) -> Tensor:
        """`update` of rows without a look from the host: bad samples change nothing, and the flag says so."""
        self._head()
        captured = self._captured
        if captured is None or self._state is not captured.now:
            raise RuntimeError("update_captured needs prepare_capture() before it, and after every update without it")
        if not targets.is_floating_point():
            targets = targets.reshape(features.shape[:-1])
        return captured.update(features, targets, self._fixed())

    @torch.no_grad()
    def finish_captured(self) -> None:
        """What the last `update_captured` left, if anything: the curvature, which no forward or backward reads."""
        if self._captured is not None:
            self._captured.finish()

    def _learned(
        self,
        linear: nn.Linear,
        state: CrossEntropyState,
        W: Tensor,
        Phi: Tensor,
        targets: Tensor,
        sample_weight: Tensor | None,
        by_qr: bool = False,
    ) -> tuple[CrossEntropyState, Tensor, Tensor]:
        return learned(
            state,
            W,
            Phi,
            targets.detach(),
            sample_weight,
            forgetting=self.forgetting if self.forgets else 1.0,
            label_smoothing=self.label_smoothing,
            head_dtype=linear.weight.dtype,
            by_qr=by_qr,
        )

    def _explain(self, features: Tensor, targets: Tensor, learned: Tensor) -> ValueError:
        weights = self._state.weights
        rows = probabilities_of(targets, weights).reshape(-1, len(weights))
        bad = ((rows < 0).any(1) | ((rows.sum(1) - 1).abs() > TOLERANCE)) & rows.isfinite().all(1)
        if not targets.is_floating_point():
            wrong = targets.reshape(-1)[rows.isnan().any(1)]
            if len(wrong):
                most = rows.shape[1] - 1
                return ValueError(
                    f"targets must be class labels in [0, {most}], got {int(wrong[0])}: nothing was learned"
                )
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


def class_weights(values: Sequence[float] | Tensor | None) -> list[float] | None:
    """The setting `class_weight`."""
    if values is None:
        return None
    if isinstance(values, (str, dict)) or not hasattr(values, "__iter__"):
        raise TypeError(f"class_weight must be numbers, one a class, or None, got {values!r}")
    return [in_range("class_weight", c, 0.0, math.inf) for c in getattr(values, "tolist", lambda: values)()]


def check_class_count(class_weight: list[float] | None, K: int) -> None:
    """Refuse weights unless there is one for each class of a head with K outputs."""
    classes = max(K, 2)
    if class_weight is not None and len(class_weight) != classes:
        raise ValueError(f"class_weight must have {classes} numbers, one a class of this head, got {len(class_weight)}")
