"""Recursive least squares: the stochastic Newton method of the paper's equations 12-18.

The mathematics is in `least_squares.math`, whose symbols are used here; a backend holds the state.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from sepsa.heads.base import health
from sepsa.heads.base.checks import check_dtype, check_outputs, check_rows, explain_nonfinite
from sepsa.heads.base.head import assign, head_of
from sepsa.heads.base.parameters import as_outputs, commit, follow, rows_to_predict, samples, start, store
from sepsa.heads.least_squares import delta, evidence
from sepsa.heads.least_squares import math as least_squares
from sepsa.heads.least_squares import state as saved
from sepsa.heads.least_squares.captured import CapturedState
from sepsa.heads.least_squares.delta import Delta
from sepsa.heads.least_squares.eager import TorchBackend, location
from sepsa.heads.least_squares.evidence import Choice
from sepsa.heads.least_squares.math import MEAN, SAMPLES, STEPS, LeastSquaresState, mse_loss
from sepsa.heads.protocols import Posterior
from sepsa.heads.run.capture import LearnsInGraphs
from sepsa.heads.run.choose import BackendRow, UpdateSize, choose
from sepsa.interrupt import DeferredInterrupt
from sepsa.validation import in_range


class RLS(LearnsInGraphs):
    """Train a linear head by recursive least squares: an exact Newton step on the squared loss per update.

    Choose it for regression where a p x p matrix fits in memory, p the number of features and the bias. After any
    updates the head's weights are the minimizer of

        sum_i forgetting^age_i ||targets_i - W features_i||^2
            + sum_j ridge_j ||W_j - prior_j||^2

    where `prior` is the head's weights at `bind`, age counts updates, and ridge_j is `ridge`, which forgetting never
    removes. At forgetting 1 an `RLS` equals ridge regression about the initial weights on all data seen, in any order
    and in any batches. The state is a square root of the inverse curvature, so that the curvature stays positive
    definite.

    With `ridge="evidence"` the samples choose the ridge: it is the variance of the noise over that of the weights, both
    of which the state determines, and the `prior` of an output is its initial weights times a factor in [0, 1], chosen
    likewise. Every change is exact, as if the head had had that ridge from the first sample on. The unit of a target
    changes no other output. `ridge_now` is the present ridge.

    Args:
        ridge: Strength of the pull towards the initial weights; 1 has the weight of one sample of unit features.
            "evidence": chosen after 1, 2, 4, 8, ... updates, from 8 samples on, and four times in the memory of a head
            that forgets, at most once in 32 updates. It starts at 10, or at 1,000 times the variance of the first
            features where that is less, and stays between 1e-4 times the smallest and 1e6 times the largest variance
            of a feature.
        forgetting: Factor in (0, 1] on the weight of earlier samples, once per update; below 1 the head follows changes
            of the data and of the body.
        bias_ridge: Ridge of the bias. None: 1e-4 (1e-3 in float32) or `ridge`, whichever is smaller, so that targets
            may have an offset, and by evidence in proportion to a ridge below 10; "ridge": `ridge`.
        noise_factor: With `ridge="evidence"`, a factor on the variance of the noise that the residuals show. A body
            that learns below the head fits the same samples, which they do not show; 8 is by comparison
            (benchmarks/heads/defaults.py). Choose 1 for features that nothing changes.
        dtype: Dtype of the arithmetic. None: float64, or float32 on MPS. Features and targets may have any floating
            dtype.

    Attributes:
        linear: The `nn.Linear` that the solver is bound to, or None.

    See also:
        `SoftmaxNewton` and `LogisticNewton` for classification; `PerOutput` for targets that are partly missing;
        `OnlineLBFGS` where p x p is too large.

    Examples:
        >>> import torch
        >>> from sepsa import RLS
        >>> _ = torch.manual_seed(0)
        >>> features = torch.randn(100, 2)
        >>> targets = features @ torch.tensor([[2.0], [-1.0]]) + 5
        >>> head = RLS(ridge=1e-6).bind(torch.nn.Linear(2, 1))
        >>> head.update(features, targets)
        >>> [p.detach().round(decimals=3) for p in head.linear.parameters()]
        [tensor([[ 2., -1.]]), tensor([5.])]
        >>> mean, std = head.predict(features[:3], return_std=True)
        >>> mean.shape, std.shape
        (torch.Size([3, 1]), torch.Size([3, 1]))
    """

    captures = CapturedState
    _backend: Any  # holds the state: a `TorchBackend`, or that of captured steps
    _initial: Tensor  # (m, p): the head at `bind`
    _choice: Choice  # the ridge and the prior in use

    def __init__(
        self,
        *,
        ridge: float | Literal["evidence"] = 1.0,
        forgetting: float = 1.0,
        bias_ridge: float | Literal["ridge"] | None = None,
        noise_factor: float = 8.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(ridge, forgetting, bias_ridge, noise_factor)
        if dtype is not None:
            check_dtype(dtype)
        self.dtype = dtype

    # ------------------------------------------------------------------ state

    def _start(self, linear: nn.Linear) -> None:
        self._initial = start(linear, self.dtype)
        ones = self._initial.new_ones(linear.out_features, 1)
        self._choice = Choice(evidence.START if self.ridge == "evidence" else self.ridge, ones)
        each = self._ridges(linear, self._choice.ridge)
        self._backend = TorchBackend(linear, least_squares.start(self._initial.clone(), each))

    def _ridges(self, linear: nn.Linear, ridge: float) -> Tensor:
        """The ridge (p,) of each coordinate, for one of the weights."""
        return evidence.ridges_of(linear, ridge, self.bias_ridge, self.ridge == "evidence", self._initial)

    def _ready(self) -> nn.Linear:
        self._read()
        return head_of(self)

    def _located(self) -> nn.Linear:
        self._eager()  # copies have no memory of captured steps
        return head_of(self)

    def _read(self) -> LeastSquaresState:
        """The state, on the device of the head, with the ridge that evidence chooses after captured steps."""
        linear, captured = head_of(self), self.captured
        device, state = linear.weight.device, self._backend.read()
        if captured is not None and self._backend is captured and self.ridge == "evidence":
            earlier, captured.updates = captured.updates, int(state.counters[STEPS])
            self._choose_ridge(state, earlier, self.forgetting)
            state = captured.read()
        if state.T.device != device:
            state, scale = state.map(lambda part: part.to(device)), self._choice.scale.to(device)
            self._initial, self._choice = self._initial.to(device), self._choice._replace(scale=scale)
            self._backend = TorchBackend(linear, state)
        return state

    def _row(self, rows: int) -> BackendRow:
        """The backend of an update of this many rows, in the table."""
        return choose("least squares", UpdateSize.of(head_of(self), self._initial, rows))

    def _change_backend(self, rows: int) -> TorchBackend:
        """The backend of an update of this many rows, which continues from the state of the one before."""
        backend, row, linear = self._eager(), self._row(rows), head_of(self)
        here = location(linear)
        if here != backend.location or backend.name != row.backend:  # in other memory, or of another size
            backend = row.load()(linear, backend.read())
        backend.rows, backend.location = rows, here
        self._backend = backend
        return backend

    def _eager(self) -> TorchBackend:
        """A backend that learns outside of a graph, with the state as it is."""
        state = self._read()
        if self._backend is self.captured:
            self._backend = TorchBackend(head_of(self), state.copy())
        backend: TorchBackend = self._backend
        return backend

    def _take(self, state: LeastSquaresState, choice: Choice | None = None) -> None:
        """Make this the state, with the choice that it has where that changed, and its W the weights of the head."""
        backend, linear = self._backend, head_of(self)
        head = state.W.to(linear.weight.dtype)

        def write() -> None:
            self._choice = choice or self._choice
            backend.load(state)
            store(linear, head)

        commit(write)

    def state_dict(self) -> dict[str, Any]:
        """Return the state and the settings, without the head's weights, which are in the `nn.Linear`."""
        state = self._read()
        return saved.write(self, state, self._initial, self._choice)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state, with its settings.

        Args:
            state_dict: The result of `state_dict` of a solver whose head has the same shape.

        Raises:
            ValueError: An entry is missing or wrong; the message names it and nothing changed.
        """
        linear = self._ready()
        state, initial, choice, fresh = saved.read(state_dict, self, linear, self._initial)
        assign(self, **vars(fresh), _initial=initial, _choice=choice, _backend=TorchBackend(linear, state))

    @property
    def _ridge(self) -> float:  # type: ignore[override]
        return self._choice.ridge

    def __repr__(self) -> str:
        words = super().__repr__()
        return words if self.linear is None else f"{words[:-1]}, backend={self.backend})"

    def checkpoint(self) -> Any:
        """Return what `rollback` needs to undo the next update: references and small copies of the state."""
        backend, linear = self._backend, self.linear
        if backend is self.captured:
            backend = self._eager()
        elif linear is not None and backend.location and backend.location != location(linear):  # in other memory
            backend = self._change_backend(backend.rows)
        return backend, backend.checkpoint(), self._choice

    def rollback(self, checkpoint: Any) -> None:
        """Restore the state and the head's weights as they were at a checkpoint.

        Args:
            checkpoint: The result of `checkpoint`.
        """
        self._read()
        backend, own, choice = checkpoint

        def write() -> None:
            self._backend, self._choice = backend, choice
            backend.undo(own)

        commit(write)

    # ------------------------------------------------------------------ what the state tells

    @property
    def backend(self) -> str:
        """The backend that computes an update of one row: "compiled", "graph" (CUDA graphs) or "torch"."""
        self._read()
        return self._row(1).backend

    @property
    def steps(self) -> int:
        """The number of updates that the head has learned."""
        return int(self._read().counters[STEPS])

    @property
    def samples(self) -> float:
        """The number of samples that the head remembers: the sum of their weights times forgetting^age."""
        return float(self._read().counters[SAMPLES])

    @property
    def ridge_left(self) -> Tensor:
        """The ridge (p,) of each coordinate at present: between half of its setting and all of it."""
        return self._read().ridge_left.clone()

    def objective(self) -> Tensor:
        """Return the minimum (m,) of the objective, which the head's weights attain, one number per output."""
        return self._read().energy.clone()

    def _root(self) -> Tensor:
        return least_squares.square_root(self._read())

    @torch.no_grad()
    def health(self) -> dict[str, float]:
        """Return numbers that show why a run goes wrong, to log about every hundred steps.

        They are `condition`, `smallest_eigenvalue`, `effective_samples` and `dead_features`; docs/how-to/choose.md
        explains each and what to do. The cost is a singular value decomposition of a p x p matrix.
        """
        state = self._read()
        return health.report(least_squares.square_root(state), state.ridge_left, float(state.counters[SAMPLES]))

    @overload
    def predict(
        self, features: Tensor, return_std: Literal[False] = False, *, noise: float | None = None
    ) -> Tensor: ...
    @overload
    def predict(self, features: Tensor, return_std: Literal[True], *, noise: float | None = None) -> Posterior: ...
    @torch.no_grad()
    def predict(self, features: Tensor, return_std: bool = False, *, noise: float | None = None) -> Tensor | Posterior:
        """Predict targets, on request with their standard deviation.

        Args:
            features: Inputs of the head (..., in_features).
            return_std: Whether to return the predictive standard deviation too; its square is σ²(1 + hᵀBh), with h the
                features and B the `covariance`.
            noise: σ, the standard deviation of the targets' noise. None: estimated from the errors made while learning,
                which needs at least one update.

        Returns:
            Predictions (..., out_features), or a `Posterior(mean, std)` of two such tensors.
        """
        linear, state = head_of(self), self._read()
        Phi, W = rows_to_predict(linear, features, state.W)
        mean = as_outputs(linear, features, Phi @ W.T)
        if not return_std:
            return mean
        T, variance = self._posterior("return_std", noise)
        spread = 1 + (Phi @ T.T).square().sum(1, keepdim=True)
        return Posterior(mean, as_outputs(linear, features, (spread * variance).sqrt()))

    @torch.no_grad()
    def sample(
        self, features: Tensor, *, noise: float | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Predict with weights drawn from their posterior N(W, σ²B), for Thompson sampling.

        Args:
            features: Inputs of the head (..., in_features). All of them see the same weights.
            noise: σ as for `predict`. It scales the posterior and is not added to the result.
            generator: Source of randomness; None for torch's default.

        Returns:
            Predictions (..., out_features).
        """
        linear, state = head_of(self), self._read()
        Phi, W = rows_to_predict(linear, features, state.W)
        T, variance = self._posterior("sample", noise)
        normal = torch.randn(W.shape, dtype=W.dtype, device=W.device, generator=generator)
        weights = W + variance.sqrt()[:, None] * (normal @ T)  # rows of normal @ T have the covariance TᵀT
        return as_outputs(linear, features, Phi @ weights.T)

    def _posterior(self, asked: str, noise: float | None) -> tuple[Tensor, Tensor]:
        """T and σ² (m,) of the posterior N(W, σ²TᵀT): `noise` squared, or by the errors made while learning."""
        state = self._read()
        samples, T = float(state.counters[SAMPLES]), least_squares.square_root(state)
        if noise is not None:
            return T, torch.full_like(state.energy, in_range("noise", noise, 0.0, math.inf) ** 2)
        if not samples:
            raise ValueError(f"{asked} needs at least one update, or noise=: before it the noise is unknown")
        return T, state.energy.clamp(min=0) / samples  # rounding can leave a perfect fit below zero

    # ------------------------------------------------------------------ learning

    @staticmethod
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error, the loss that the head minimizes, for the body to follow.

        Args:
            outputs: Outputs (..., out_features).
            targets: Targets of the same shape.

        Returns:
            A scalar.
        """
        if outputs.shape != targets.shape:
            check_outputs(outputs, targets)
        loss: Tensor = mse_loss(outputs, targets, MEAN)
        return loss

    def update(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None = None) -> None:
        """Learn samples as one block.

        Args:
            features: Inputs of the head (..., in_features).
            targets: Targets (..., out_features).
            sample_weight: Factor (...) on each sample's squared error. `forgetting` acts once per update, whatever its
                size.

        Raises:
            NotFinite: A value is NaN, infinite or too large; nothing was learned.
            ValueError: A shape is wrong; nothing was learned.
        """
        linear = self.linear or head_of(self)  # an error
        check_rows(linear, features, targets, sample_weight)
        backend, rows = self._backend, features.numel() // linear.in_features
        if backend.rows != rows or backend.location != location(linear):
            backend = self._change_backend(rows)
        given = features, targets, sample_weight, self.forgetting if self.forgets else 1.0
        if not (self._learn_and_choose(backend, given) if self.ridge == "evidence" else backend.learn(*given)):
            raise explain_nonfinite(features, targets, linear)

    def _learn_and_choose(self, backend: TorchBackend, given: tuple[Tensor, Tensor, Tensor | None, float]) -> bool:
        """Learn samples, and choose the ridge where that is due, together. False: a value is not finite."""
        (features, _, weight, lam), counters, unit = given, backend.state.counters, self._choice.unit
        steps = int(counters[STEPS])
        if weight is not None or unit != 1.0:
            omega = (torch.ones(features.shape[:-1]) if weight is None else weight.detach()).double()
            unit = self._mixed_unit(lam * float(counters[SAMPLES]), float(omega.sum()), float(omega.square().sum()))
        starts = self._may_start(steps)
        if not (starts or evidence.due(steps, steps + 1, lam)):
            if unit == self._choice.unit:
                return backend.learn(*given)
            with DeferredInterrupt():
                learned = backend.learn(*given)
                if learned:
                    self._choice = self._choice._replace(unit=unit)
            return learned
        before, learned = self.checkpoint(), False
        try:
            if starts:
                self._start_ridge(features, weight)
            learned = backend.learn(*given)
            if learned:
                self._choice = self._choice._replace(unit=unit)
                self._choose_ridge(backend.read(), steps, lam)
        except BaseException:
            self.rollback(before)
            raise
        if not learned:
            self.rollback(before)
        return learned

    def _may_start(self, steps: int) -> bool:
        """Whether the features of these updates may tell with which ridge to start."""
        return steps < evidence.FIRST and self._choice.ridge == evidence.START and self.ridge == "evidence"

    def _start_ridge(self, features: Tensor, weight: Tensor | None) -> None:
        """Start with a ridge for these features, where those of all samples before were 0."""
        ridge = evidence.first_ridge(features, weight, self._initial.dtype)
        if ridge != evidence.START:
            linear, state = head_of(self), self._backend.read()
            state = state._replace(W=follow(linear, state.W))
            new = evidence.started(state, self._ridges(linear, ridge), linear.bias is not None)
            if new is not None:
                self._take(new, self._choice._replace(ridge=ridge))

    def _mixed_unit(self, known: float, more: float, squares: float) -> float:
        """The unit of sample weights after others of sum `more`, where those of a sum of `known` had one."""
        unit = self._choice.unit
        return (known * unit + squares) / (known + more) if known + more > 0 else unit

    def _choose_ridge(self, state: LeastSquaresState, earlier: int, lam: float) -> None:
        """Take the ridge and the prior of the largest evidence where that is due, after update number `earlier`."""
        # A weight of two is a sample twice; weights below one, as normalized ones, count as many samples as there are.
        samples, steps = float(state.counters[SAMPLES]) / min(self._choice.unit, 1.0), int(state.counters[STEPS])
        if samples < evidence.FIRST or not evidence.due(earlier, steps, lam):
            return
        linear, r = head_of(self), evidence.mean_weight(self.forgetting, steps)
        settings = samples, r, self.noise_factor, linear.bias is not None, lambda ridge: self._ridges(linear, ridge)
        with torch.no_grad(), torch.autocast(linear.weight.device.type, enabled=False):
            state, choice = evidence.best_state(state, self._initial, self._choice, *settings)
        if choice is not self._choice:
            self._take(state, choice)

    # ------------------------------------------------------------------ exact at forgetting 1

    @torch.no_grad()
    def unlearn(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None = None) -> None:
        """Remove samples learned before, as if the head had never seen them. Needs forgetting 1.

        Args:
            features: Inputs of the head (..., in_features), as they were learned.
            targets: Targets (..., out_features), as they were learned.
            sample_weight: Weights (...), as they were learned.

        Raises:
            ValueError: The head's curvature or its objective shows that it never learned these samples, or they are so
                large that the result would be wrong by more than a millionth; nothing changed.
        """
        linear, state = self._remembering_all("unlearn")
        check_rows(linear, features, targets, sample_weight)
        Phi, Y, total = samples(linear, features, targets, sample_weight, state.T.dtype)
        if not math.isfinite(float(Phi.square().sum() + Y.square().sum())):
            raise explain_nonfinite(features, targets, linear)
        new = delta.unlearn(state, Phi, Y, total)
        self._eager()
        self._take(new)

    @torch.no_grad()
    def delta_since(self, mark: dict[str, Any] | None = None) -> Delta:
        """Return what the head has learned since an earlier state, to `merge` into another head. Needs forgetting 1.

        Args:
            mark: An earlier result of `state_dict` of this head; None for everything since `bind`.

        Returns:
            A `Delta`, whose size does not depend on the number of samples.
        """
        linear, state = self._remembering_all("delta_since")
        then = None if mark is None else saved.read(mark, self, linear, self._initial)
        return delta.since(then, state, *self._at_bind(), self._choice if self.ridge == "evidence" else None)

    @torch.no_grad()
    def merge(self, other: RLS | Delta) -> None:
        """Add what another head has learned, exactly, as if this head had seen its samples. Needs forgetting 1.

        Args:
            other: A `Delta`, or an `RLS` bound to a copy of the same initial head with the same ridge.

        Raises:
            ValueError: The two started from different weights, ridges or dtypes; nothing changed.
        """
        if not isinstance(other, (RLS, Delta)):
            raise TypeError(f"other must be an RLS or a Delta, which delta_since returns, got {type(other).__name__}")
        linear, state = self._remembering_all("merge")
        learned = other if isinstance(other, Delta) else other.delta_since()
        self._eager()
        (steps, seen), before = state.counters[:2].tolist(), self.checkpoint()
        try:
            if self._may_start(int(steps)) and learned.samples > 0:
                scale = (learned.unit * len(learned.features) / learned.samples) ** 0.5
                x = learned.features[:, : linear.in_features] * scale
                self._start_ridge(x, None)
                state = self._read()
            self._take(delta.learn(state, learned, *self._at_bind(), linear.weight.dtype))
            if self.ridge == "evidence":
                unit = self._mixed_unit(seen, learned.samples, learned.samples * learned.unit)
                self._choice = self._choice._replace(unit=unit)
                self._choose_ridge(self._read(), int(steps), 1.0)
        except BaseException:
            self.rollback(before)
            raise

    def _at_bind(self) -> tuple[Tensor, Tensor]:
        """The prior and the ridge of each coordinate before any sample, by which two heads may be merged."""
        return self._initial, self._ridges(head_of(self), evidence.START if self.ridge == "evidence" else self.ridge)

    def _remembering_all(self, verb: str) -> tuple[nn.Linear, LeastSquaresState]:
        """The head, and its state with changes made from outside; an error at forgetting below 1."""
        state, linear = self._read(), head_of(self)
        if self.forgetting != 1.0:
            raise ValueError(
                f"{verb} is exact only at forgetting 1, got {self.forgetting:g}: "
                "with forgetting, a head depends on when each sample came"
            )
        return linear, state._replace(W=follow(linear, state.W))

    # ------------------------------------------------------------------ learning inside a CUDA graph

    def _continue_captured(self) -> Hashable:
        self._backend = self.captured
        return self.captured.forget(self.forgetting)

    @torch.no_grad()
    def update_captured(self, features: Tensor, targets: Tensor) -> Tensor:
        """Learn samples inside a CUDA graph, without synchronizing with the host.

        Args:
            features: Inputs of the head (..., in_features).
            targets: Targets (..., out_features).

        Returns:
            A boolean scalar on the device: False where a value was not finite, so that nothing was learned.
        """
        captured = self.captured
        if captured is None or self._backend is not captured:
            raise RuntimeError("update_captured needs prepare_capture() first")
        if self._may_start(captured.updates) and not (features.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._start_ridge(features, None)
        return captured.update(features, targets)
