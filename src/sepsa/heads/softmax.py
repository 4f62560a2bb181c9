"""The classifying head: state and interface of the online Newton method that `_softmax_newton` writes out."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.nn import functional

from sepsa.heads import _affine
from sepsa.heads._captured_softmax import CapturedSoftmax, Settings
from sepsa.heads._checks import (
    bias_setting,
    check_keys,
    check_labels,
    check_ridges,
    check_rows,
    check_state_tensor,
    explain_nonfinite,
    in_range,
    is_integer,
    is_new_head,
    owned_head,
    with_ridges,
)
from sepsa.heads._softmax_newton import (
    TOLERANCE,
    State,
    both,
    check_class_count,
    check_consistent,
    class_factors,
    class_weights,
    effective_samples,
    floor,
    learned,
    probabilities_of,
    smoothing,
    start,
)
from sepsa.heads.solver import Posterior

_SETTINGS = ("forgetting", "label_smoothing", "class_weight")
_KEYS = State._fields[:-2]  # weights follow from class_weight, ridge from ridge and bias_ridge


class SoftmaxNewton:
    """Classifying head by an online Newton method on its cross-entropy; with one output, logistic regression.

    Choose it to train a classifier with its real loss, whenever a p x p matrix is affordable: the number of classes
    adds only the head itself. On a fixed body it approaches the minimizer of

        sum_i cross_entropy(W features_i, targets_i) + ridge/2 ||W - prior||^2

    where `prior` is what the head held when it was bound, over the last samples, a number that grows with all seen
    unless `forgetting` below 1 holds it down, by this factor in each update; the ridge is never forgotten. The bias has
    the ridge `bias_ridge`, that of `RLS`, next to none.

    Targets are class probabilities (..., out_features) or integer labels (...). `label_smoothing` mixes them with the
    uniform distribution, `class_weight` multiplies each class's term, as in `torch.nn.functional.cross_entropy`, whose
    mean over samples `loss` is. One output stands for class 1 of two, so there are two class weights.
    """

    forgets = True  # in the next update; see `sepsa.heads.Forgets`

    def __init__(
        self,
        *,
        ridge: float = 1.0,
        forgetting: float = 1.0,
        bias_ridge: float | Literal["ridge"] | None = None,
        label_smoothing: float = 0.0,
        class_weight: Sequence[float] | Tensor | None = None,
    ) -> None:
        self.ridge = in_range("ridge", ridge, 0.0, math.inf)
        self.forgetting = in_range("forgetting", forgetting, 0.0, 1.0)
        self.bias_ridge = bias_setting(bias_ridge)
        self.label_smoothing = smoothing(label_smoothing)
        self.class_weight = class_weights(class_weight)
        self.linear: nn.Linear | None = None
        self._previous: Tensor | None = None  # where the last update started, for health alone
        self._captured: CapturedSoftmax | None = None  # what recordings write to

    # ------------------------------------------------------------------ state

    @torch.no_grad()
    def bind(self, linear: nn.Linear) -> SoftmaxNewton:
        """Own the curvature of `linear`; its present weights become the prior mean."""
        if not is_new_head("SoftmaxNewton", self.linear, linear):
            return self
        K = linear.out_features
        check_class_count(self.class_weight, K)
        device = linear.weight.device
        options: dict[str, Any] = {"dtype": torch.float32 if device.type == "mps" else torch.float64, "device": device}
        W = _affine.join(linear).to(**options)
        ridge = floor(_affine.ridges(linear, self.ridge, self.bias_ridge, W), K)
        weights = torch.tensor(self.class_weight or [1.0] * max(K, 2), **options)
        self._state = start(W, weights, ridge)
        self.linear = linear
        return self

    def state_dict(self) -> dict[str, Any]:
        """Everything beside the head itself, whose weights live in the `nn.Linear`."""
        self._ready()
        state: dict[str, Any] = {key: getattr(self._state, key).clone() for key in _KEYS}
        settings = {name: getattr(self, name) for name in _SETTINGS} | {"ridges": [self.ridge, self.bias_ridge]}
        return state | settings | {"class_weight": self.class_weight and list(self.class_weight)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of the same shape, hyperparameters included; anything else is refused whole."""
        linear, old = self._ready(), self._state
        state_dict = with_ridges(state_dict)
        check_keys("SoftmaxNewton", state_dict, {*_KEYS, *_SETTINGS, "ridges"})
        ridge, bias_ridge = check_ridges(state_dict["ridges"])
        try:
            fresh = SoftmaxNewton(ridge=ridge, bias_ridge=bias_ridge, **{name: state_dict[name] for name in _SETTINGS})
        except TypeError as error:
            raise ValueError(f"state_dict: {error}: the checkpoint is damaged") from None
        K = len(old.W)
        check_class_count(fresh.class_weight, K)
        tensors = {
            key: check_state_tensor(
                key, state_dict[key], tuple(was.shape), dtype=was.dtype, device=linear.weight.device
            )
            for key, was in zip(_KEYS, old, strict=False)
        }
        weights = old.weights.new_tensor(fresh.class_weight or [1.0] * max(K, 2))
        full = floor(_affine.ridges(linear, ridge, bias_ridge, old.W), K)
        state = State(**tensors, weights=weights, ridge=full)
        check_consistent(state)
        settings = {name: getattr(fresh, name) for name in (*_SETTINGS, "ridge", "bias_ridge")}

        def write() -> None:
            self.__dict__.update(settings)
            self._state, self._previous = state, None

        _affine.commit(write)

    def to(self, device: torch.device | str | int) -> SoftmaxNewton:
        """Move the head and its curvature together."""
        self._bound().to(device)
        self._ready()
        return self

    def checkpoint(self) -> Hashable:
        """What `rollback` returns to: cheap, a copy of the head's weights and a reference to the rest."""
        linear, state = self._ready(), self._state
        if self._captured is not None and state is self._captured.now:  # captured updates write into these
            state = State(*(tensor.clone() for tensor in state))
        return state, self._previous, _affine.join(linear)

    def rollback(self, token: Any) -> None:
        """Undo every update since `checkpoint()` gave this token."""
        state, previous, head = token
        linear = self._bound()

        def write() -> None:
            self._state, self._previous = state, previous
            _affine.store(linear, head)

        _affine.commit(write)

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
        step = math.nan if self._previous is None else float(torch.linalg.vector_norm(state.W - self._previous))
        return {
            "condition": float(roots[0] / roots[-1]) ** 2,
            "smallest_eigenvalue": 1 / float(roots[0]) ** 2,
            "effective_samples": effective_samples(state, self.forgetting),
            "last_step": step,
            "dead_features": float((state.T.square().sum(0) * state.ridge_left > 1 - 1e-9).sum()),
        }

    def __repr__(self) -> str:
        head = "" if self.linear is None else f", head={self.linear.in_features}->{self.linear.out_features}"
        more = _affine.bias_words(self.bias_ridge)
        more += f", label_smoothing={self.label_smoothing:g}" if self.label_smoothing else ""
        more += "" if self.class_weight is None else f", class_weight={self.class_weight}"
        return f"SoftmaxNewton(ridge={self.ridge:g}, forgetting={self.forgetting:g}{more}{head})"

    def _bound(self) -> nn.Linear:
        return owned_head("SoftmaxNewton", self.linear)

    def _ready(self) -> nn.Linear:
        """The head, with the state where it is."""
        linear = self._bound()
        if self._captured is not None:
            self._captured.finish()
        device = linear.weight.device
        if self._state.T.device != device:
            state = State(*(tensor.to(device) for tensor in self._state))

            def write() -> None:
                self._state, self._previous = state, None

            _affine.commit(write)
        return linear

    # ------------------------------------------------------------------ learning

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss this head minimizes, for the body to follow: the mean cross-entropy."""
        self._ready()
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
        linear = self._ready()
        check_rows(linear, features)
        state, dtype = self._state, linear.weight.dtype
        Phi = _affine.rows(linear, features, state.T.dtype)
        if not bool(Phi.square().sum().isfinite()):
            raise explain_nonfinite(features, None, linear)
        shape = (*features.shape[:-1], linear.out_features)
        mean = (Phi @ _affine.follow(linear, state.W).T).reshape(shape).to(dtype)
        if not return_std:
            return mean
        spread = (Phi @ state.T.T).square().sum(1, keepdim=True) / class_factors(state.shares)
        return Posterior(mean, spread.sqrt().reshape(shape).to(dtype))

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
            before = _affine.follow(linear, self._state.W)
            new, fine = self._learned(linear, before, features, targets, sample_weight)
            if not bool(fine):
                raise self._explain(features, targets, new.W)
            head = new.W.to(linear.weight.dtype)

        def write() -> None:
            self._state, self._previous = new, before
            _affine.store(linear, head)

        _affine.commit(write)

    @torch.no_grad()
    def prepare_capture(self) -> Hashable:
        """Bring the state to where recordings read and write it. Returns where that is, and the settings."""
        linear, state, captured = self._ready(), self._state, self._captured
        if captured is None or not captured.lies_in(linear):
            captured = CapturedSoftmax(linear, state)
        if state is not captured.now:
            captured.load(state)

            def write() -> None:
                self._captured, self._state, self._previous = captured, captured.now, None

            _affine.commit(write)
        captured.now.W.copy_(_affine.follow(linear, captured.now.W))
        return self._fixed(), tuple(self.class_weight or ()), captured.place

    def _fixed(self) -> Settings:
        return Settings(self.forgetting, self.label_smoothing)

    @torch.no_grad()
    def update_captured(self, features: Tensor, targets: Tensor) -> Tensor:
        """`update` of rows without a look from the host: bad samples change nothing, and the flag says so."""
        self._bound()
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
        self, linear: nn.Linear, W: Tensor, features: Tensor, targets: Tensor, sample_weight: Tensor | None
    ) -> tuple[State, Tensor]:
        return learned(
            self._state,
            W,
            _affine.rows(linear, features, W.dtype),
            targets.detach(),
            sample_weight,
            forgetting=self.forgetting if self.forgets else 1.0,
            label_smoothing=self.label_smoothing,
            head_dtype=linear.weight.dtype,
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
        return explain_nonfinite(features, targets, self._bound(), learned)
