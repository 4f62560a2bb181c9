"""What `SoftmaxNewton` and `LogisticNewton` share: settings, saved states and logits of a `CrossEntropyState`."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, overload

import torch
from torch import Tensor, nn

from sepsa.heads.base import health, parameters
from sepsa.heads.base.checks import check_rows, explain_nonfinite
from sepsa.heads.base.head import HasRidge, assign, head_of
from sepsa.heads.base.state_checks import check_regular, read_ridge, read_solver, settings_of
from sepsa.heads.cross_entropy import evidence as class_evidence
from sepsa.heads.cross_entropy.eager import Rows, Samples, TorchBackend
from sepsa.heads.cross_entropy.math import (
    CrossEntropyState,
    UpdateSettings,
    class_factors,
    effective_samples,
    over_mean_share,
    start,
    with_ridge,
    with_root,
    wrong_targets,
)
from sepsa.heads.least_squares.evidence import START, due
from sepsa.heads.protocols import Posterior, PrecisionWarning
from sepsa.heads.run.choose import UpdateSize, choose
from sepsa.states import schema
from sepsa.states.schema import Entries
from sepsa.validation import in_range

_SMALL_RIDGE = 1e-12
NOISE_FACTOR = 3.0  # by comparison: benchmarks/heads/class_defaults.py
KEYS = CrossEntropyState._fields[:-3]  # weights and ridge follow from the settings, T from A


class NewtonHead(HasRidge):
    """Base of `SoftmaxNewton` and `LogisticNewton`; not a head by itself."""

    later = False  # whether `settle` may tell of the next update that it failed; see `sepsa.heads.Settles`
    learns_partly = False  # whether each output has a curvature of its own; see `sepsa.heads.LearnsPartly`
    state: CrossEntropyState
    _replaced = ("state", "_updates", "_ridge")
    label_smoothing = 0.0
    _not_copied: ClassVar[tuple[str, ...]] = ("_backend",)
    _backend: Any = None  # that made the present state
    _updates: int | None = None  # `steps`, where the host knows them without waiting for the device

    def __init__(
        self,
        ridge: float | Literal["evidence"],
        forgetting: float,
        bias_ridge: float | Literal["ridge"] | None,
        noise_factor: float,
    ) -> None:
        super().__init__(ridge, forgetting, bias_ridge, noise_factor)
        ridge = self._ridge = START if isinstance(self.ridge, str) else self.ridge  # the present one
        if ridge < _SMALL_RIDGE:
            warnings.warn(
                f"ridge={ridge:g} is below {_SMALL_RIDGE:g}, where rounding errors decide how a {type(self).__name__} "
                f"moves in directions that it has no data for: use ridge={_SMALL_RIDGE:g}",
                PrecisionWarning,
                stacklevel=3,
            )

    @abstractmethod
    def _weights(self, W: Tensor) -> Tensor:
        """The `weights` of a state, which follow from the settings; those must fit the head, W (m, p)."""

    def _derived(self, linear: nn.Linear, W: Tensor) -> dict[str, Tensor]:
        """What a state has from the settings."""
        return {"weights": self._weights(W), "ridge": self._ridges(linear, W, self._ridge)}

    def _ridges(self, linear: nn.Linear, W: Tensor, ridge: float) -> Tensor:
        """The `ridge` (p,) of a state for this setting."""
        each = parameters.ridges(linear, ridge, self.bias_ridge, W)
        return each * over_mean_share(1 if self.learns_partly else len(W))

    def _start(self, linear: nn.Linear) -> None:
        W = parameters.start(linear, None)
        self.state = start(W, **self._derived(linear, W), separate=self.learns_partly)

    @abstractmethod
    def _rows(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None) -> Rows:
        """Samples as a backend learns them; an error where their shape, dtype, device or weights are wrong."""

    def _explain(self, features: Tensor, targets: Tensor, learned: Tensor) -> ValueError:
        """The error for rows that were not learned, whose W is `learned` (m, p)."""
        given, like = (
            (targets[..., None], learned.new_empty(2)) if self.learns_partly else (targets, self.state.weights)
        )
        return wrong_targets(given, like) or explain_nonfinite(features, targets, head_of(self), learned)

    @abstractmethod
    def _probabilities(self, outputs: Tensor) -> Tensor:
        """The probabilities of logits (..., out_features)."""

    def _located(self) -> nn.Linear:
        """The head, with the state where it is."""
        self.settle()
        linear = head_of(self)
        device = linear.weight.device
        if self.state.T.device != device:
            assign(self, state=self.state.map(lambda part: part.to(device)))
        return linear

    def _ready(self) -> nn.Linear:
        """The head, with the state where it is and T computed."""
        linear = self._located()
        if self.state.A is not None:
            assign(self, state=with_root(self.state))
        return linear

    def _backend_for(self, linear: nn.Linear, rows: int) -> TorchBackend:
        """The backend of updates of this many rows outside of a captured step."""
        last, row = self._backend, choose("cross-entropy", UpdateSize.of(linear, self.state.W, rows))
        fits = last is not None and last.name == row.backend and last.dtype == linear.weight.dtype
        backend: TorchBackend = last if fits else row.load()(linear)
        return backend

    def checkpoint(self) -> Any:
        """Return what `rollback` restores: a copy of the head's weights and references to the rest of the state."""
        (state, *rest), head = super().checkpoint()
        if self._backend is not None and self._backend.owns(state):
            state = state.copy()  # later updates write into these tensors
        return (state, *rest), head

    def rollback(self, checkpoint: Any) -> None:
        """Restore the state and the head's weights as they were at a checkpoint.

        Args:
            checkpoint: The result of `checkpoint`.
        """
        if self._backend is not None:
            self._backend.waiting = None
        super().rollback(checkpoint)

    @torch.no_grad()
    def update(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None = None) -> None:
        """Learn samples, and choose the ridge where that is due; or raise an error, and nothing changes.

        Args:
            features: Inputs of the head (..., in_features).
            targets: Targets as `loss` takes them.
            sample_weight: Factors on the samples' losses. `forgetting` acts once per update, whatever its size.

        Raises:
            ValueError: A shape or target is wrong, or a value is not finite; nothing was learned.
        """
        linear = self._located()
        rows, settings = self._rows(features, targets, sample_weight), update_settings(self)
        by_evidence = self.ridge == "evidence"
        updates, state, ridge = self._updates, self.state, self._ridge
        if updates is None:
            updates = self.steps
        if by_evidence and not updates:
            state, ridge = begun(self, rows[0], rows[2])
        samples = Samples(*rows, settings, updates)
        backend: Any = self._backend_for(linear, samples.rows)
        chooses = by_evidence and due(updates, updates + 1, settings.forgetting)
        new, finite = backend.learn(state, samples)
        if backend.waiting is not None and (chooses or not self.later):
            new, finite = backend.settle(state, *backend.waiting)
        if not finite:
            raise self._explain(*rows[:2], new.W)
        state = new
        if chooses:
            state, ridge = chosen(self, new, ridge)
        head = None if state is new and backend.owns(new) else state.W.to(linear.weight.dtype)  # else the head has them
        assign(self, head, state=state, _ridge=ridge, _updates=updates + 1, _backend=backend)

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for an update with `later`, and learn it by a slower route if its own could not.

        Raises:
            ValueError: A target of it is wrong, or a value is not finite; nothing was learned.
        """
        backend = self._backend
        if backend is None or backend.waiting is None:
            return
        recorder, samples = backend.waiting
        new, finite = backend.settle(self.state, recorder, samples)
        if not finite:
            self._updates = samples.updates
            raise self._explain(samples.features, samples.targets, new.W)
        if new is not self.state:
            assign(self, new.W.to(head_of(self).weight.dtype), state=new)

    def state_dict(self) -> dict[str, Any]:
        """Return the state and the settings, without the head's weights, which are in the `nn.Linear`."""
        self._ready()
        state = {key: getattr(self.state, key).clone() for key in KEYS}
        return state | settings_of(self) | {"ridge_now": self._ridge}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state, with its settings.

        Args:
            state_dict: The result of `state_dict` of a solver whose head has the same shape.

        Raises:
            ValueError: An entry is missing or wrong; the message names it and nothing changed.
        """
        linear, old = self._ready(), self.state
        saved, fresh = read_solver(self, state_dict, {*KEYS, "ridge_now"}, type(self))
        fresh._ridge = read_ridge(saved, fresh)
        with schema.settings("state_dict"):
            derived = fresh._derived(linear, old.W)
        tensors = {
            key: saved.tensor(key, tuple(was.shape), was.dtype, linear.weight.device)
            for key, was in ((key, getattr(old, key)) for key in KEYS)
        }
        state = CrossEntropyState(**tensors, **derived)
        check_values(saved, state)
        assign(self, **vars(fresh), state=state, _updates=None)

    @property
    def steps(self) -> int:
        """The number of updates that the head, or its output with most updates, has learned."""
        self._located()
        return int(self.state.counters.reshape(-1, 3)[:, 0].max())

    @property
    def samples(self) -> float:
        """The number of samples learned, each counted by its weight; a mean over outputs that learn separately."""
        self._located()
        return float(self.state.counters.reshape(-1, 3)[:, 1].mean())

    def _root(self) -> Tensor:
        self._ready()
        return self.state.T

    @torch.no_grad()
    def health(self) -> dict[str, float]:
        """Return numbers that show why a run goes wrong, to log about every hundred steps.

        The cost is a singular value decomposition of a p x p matrix.

        - `condition`: largest over smallest eigenvalue of the curvature. Above 1e10 digits are lost: raise `ridge`, or
          normalize the features.
        - `smallest_eigenvalue` of the curvature A. A value near `ridge` times half the number of classes means that no
          sample had a component in some direction; there only the ridge determines the weights.
        - `effective_samples`: about how many samples the curvature remembers, an eighth of those seen or fewer by
          `forgetting`.
        - `dead_features`: number of features that were zero in all samples remembered: make the body narrower.

        With a curvature for each output, each number is that of the output where it is worst.
        """
        self._ready()
        state = self.state
        counts, p = state.counters.reshape(-1, 3).tolist(), state.W.shape[1]
        samples = min(effective_samples(updates, seen, p, self.forgetting) for updates, seen, _ in counts)
        return health.report(state.T, state.ridge_left, samples)

    @torch.no_grad()
    def predict_proba(self, features: Tensor) -> Tensor:
        """Return class probabilities.

        Args:
            features: Inputs of the head (..., in_features).

        Returns:
            Probabilities (..., out_features): of the classes, (..., 2) for one output, or of a `LogisticNewton` that
            each output is 1.
        """
        linear = self._ready()
        check_rows(linear, features)
        return self._probabilities(linear(features))

    @overload
    def predict(self, features: Tensor, return_std: Literal[False] = False) -> Tensor: ...
    @overload
    def predict(self, features: Tensor, return_std: Literal[True]) -> Posterior: ...
    @torch.no_grad()
    def predict(self, features: Tensor, return_std: bool = False) -> Tensor | Posterior:
        """Return the logits, on request with their standard deviation.

        Args:
            features: Inputs of the head (..., in_features).
            return_std: Whether to return the standard deviation too, from a Laplace approximation with the curvature of
                `covariance`. The variance of class k of a `SoftmaxNewton` is φᵀBφ / s_k, s the `class_shares`.

        Returns:
            Logits (..., out_features), or a `Posterior(mean, std)` of two such tensors.
        """
        linear, state = self._ready(), self.state
        Phi, W = parameters.rows_to_predict(linear, features, state.W)
        mean = parameters.as_outputs(linear, features, Phi @ W.T)
        if not return_std:
            return mean
        spread = (Phi @ state.T.mT).square().sum(-1)  # (n,), or with a curvature for each output (m, n)
        if not self.learns_partly:
            spread = spread / class_factors(state.shares)[:, None]
        return Posterior(mean, parameters.as_outputs(linear, features, spread.sqrt().T))


def update_settings(solver: NewtonHead) -> UpdateSettings:
    """What the next update depends on."""
    lam = solver.forgetting if solver.forgets else 1.0
    return UpdateSettings(lam, solver.label_smoothing, head_of(solver).weight.dtype)


def begun(solver: NewtonHead, features: Tensor, weight: Tensor | None) -> tuple[CrossEntropyState, float]:
    """The state before the first update, with a ridge by evidence for these features, and that ridge."""
    linear, (_, W, *_) = head_of(solver), solver.state
    rows = features.detach().reshape(-1, linear.in_features).to(W.dtype)
    if weight is not None:
        weight = weight.detach().reshape(len(rows), -1).to(W.dtype).mean(1)
    ridge = class_evidence.first_ridge(rows, weight, 1 if solver.learns_partly else len(W))
    if ridge is None:
        return solver.state, solver._ridge
    return start(W, solver.state.weights, solver._ridges(linear, W, ridge), solver.learns_partly), ridge


def chosen(solver: NewtonHead, state: CrossEntropyState, ridge: float) -> tuple[CrossEntropyState, float]:
    """The state, which has this ridge, or a copy with the ridge of the largest evidence; and that ridge."""
    linear = head_of(solver)
    with torch.autocast(linear.weight.device.type, enabled=False):
        found = class_evidence.evidence_of(state, update_settings(solver).forgetting, linear.bias is not None)
        best = class_evidence.best_ridge(found, ridge, solver.noise_factor)
        new = None if best == ridge else with_ridge(state, solver._ridges(linear, state.W, best))
        if new is None or not bool(new.W.to(linear.weight.dtype).isfinite().all()):
            return state, ridge
    return new.copy(), best


def factors(solver: NewtonHead, name: str, W: Tensor, count: int, of: str) -> Tensor:
    """The factors (count,) of the setting `name`, one `of` this head, or ones."""
    values = getattr(solver, name)
    if values is not None and len(values) != count:
        raise ValueError(f"{name} must have {count} numbers, one {of} of this head, got {len(values)}")
    return W.new_tensor(values or [1.0] * count)


def check_values(saved: Entries, state: CrossEntropyState) -> None:
    """Raise an error for values of a saved state with which no update computes."""
    counters = state.counters
    if bool((counters < 0).any()) or bool((counters[..., 2] >= state.T.shape[-1]).any()):
        raise saved.damaged("counters", "at least 0, the third below the number of features", counters.tolist())
    for key in ("shares", "ridge_left"):
        if not bool((saved[key] > 0).all()):
            raise saved.damaged(key, "positive", float(saved[key].min()))
    check_regular(saved, "T", state.T)


def weights_setting(name: str, values: Sequence[float] | Tensor | None, of: str) -> list[float] | None:
    """The setting `name`: positive numbers, one for each class or output, or None."""
    if values is None:
        return None
    if isinstance(values, (str, dict)) or not hasattr(values, "__iter__"):
        raise TypeError(f"{name} must be numbers, one {of}, or None, got {values!r}")
    return [in_range(name, c, 0.0, math.inf) for c in getattr(values, "tolist", lambda: values)()]
