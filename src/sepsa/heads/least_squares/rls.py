"""Recursive least squares: the stochastic Newton method of the paper's equations 12-18.

The mathematics is in `math.least_squares`, whose symbols are used here; `backends.held_state` holds the state.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor, nn

from sepsa.heads.base import checks, health
from sepsa.heads.base.checks import check_outputs, check_rows, explain_nonfinite
from sepsa.heads.base.head import OwnsHead, head_of, shape_words
from sepsa.heads.base.parameters import (
    as_outputs,
    bias_words,
    commit,
    follow,
    ridges,
    rows_to_predict,
    samples,
    start,
    store,
)
from sepsa.heads.least_squares import delta, evidence
from sepsa.heads.least_squares import math as least_squares
from sepsa.heads.least_squares.delta import Delta
from sepsa.heads.least_squares.eager import TorchBackend
from sepsa.heads.least_squares.evidence import Choice
from sepsa.heads.least_squares.held_state import HeldState, without_pending
from sepsa.heads.least_squares.math import MEAN, SAMPLES, STEPS, LeastSquaresState, mse_loss
from sepsa.heads.least_squares.state import RLSSettings, read_root, write_root
from sepsa.heads.protocols import Posterior
from sepsa.heads.run.choose import Counters, Problem
from sepsa.validation import in_range


class RLS(OwnsHead):
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

    forgets = True  # in the next update; see `sepsa.heads.Forgets`
    _held: HeldState
    _initial: Tensor  # (m, p): the head at `bind`
    _choice: Choice  # the ridge and the prior in use
    _looked = -1  # the number of updates when evidence last looked at the ridge

    def __init__(
        self,
        *,
        ridge: float | Literal["evidence"] = 1.0,
        forgetting: float = 1.0,
        bias_ridge: float | Literal["ridge"] | None = None,
        noise_factor: float = 8.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.ridge = ridge if ridge == "evidence" else checks.ridge_setting(ridge)
        self.noise_factor = in_range("noise_factor", noise_factor, 0.0, math.inf)
        self.forgetting = in_range("forgetting", forgetting, 0.0, 1.0)
        if dtype is not None:
            checks.check_dtype(dtype)
        self.bias_ridge, self.dtype = checks.bias_setting(bias_ridge), dtype

    # ------------------------------------------------------------------ state

    def _start(self, linear: nn.Linear) -> None:
        self._initial = start(linear, self.dtype)
        ones = self._initial.new_ones(linear.out_features, 1)
        self._choice = Choice(evidence.START if self.ridge == "evidence" else self.ridge, ones)
        problem = self._problem_for(linear, self._choice)
        self._held = HeldState(problem, least_squares.start(problem.prior, problem.ridge), np.zeros(5))

    def _problem_for(self, linear: nn.Linear, choice: Choice) -> Problem:
        """The prior and the ridges of a choice, in memory of their own."""
        initial = self._initial = self._initial.to(linear.weight.device)
        return Problem(linear, initial * choice.scale.to(initial.device), self._ridges(linear, choice.ridge))

    def _ridges(self, linear: nn.Linear, ridge: float) -> Tensor:
        """The ridge (p,) of each coordinate, for one of the weights."""
        bias = self.bias_ridge
        if self.ridge == "evidence":
            bias = evidence.ridge_of_bias(bias, ridge, self._initial.dtype)
        return ridges(linear, ridge, bias, self._initial)

    def _ready(self) -> nn.Linear:
        self._read()
        return self._held.problem.linear

    def _read(self) -> tuple[LeastSquaresState, Counters]:
        """The state and its counters, on the device of the head."""
        device, held = head_of(self).weight.device, self._held
        state, counters = held.backend.read()
        captured = held.captured
        if captured is not None and held.backend is captured and self.ridge == "evidence":
            steps, captured.updates = captured.updates, int(counters[STEPS])
            captured.counters = counters
            self._choose_ridge(steps, self.forgetting)
            state, counters = held.backend.read()
        if held.problem.prior.device != device:
            state = state.map(lambda part: part.to(device))
            self._held = HeldState(self._problem_for(held.problem.linear, self._choice), state, counters)
        return state, counters

    def _change_backend(self, rows: int) -> TorchBackend:
        """The backend of an update of this many rows, which continues from the state of the one before."""
        state, counters = self._read()
        return self._held.change_backend(rows, state, counters)

    def _take(self, state: LeastSquaresState, counters: Counters, choice: Choice | None = None) -> None:
        """Make this the state, with a choice of the ridge where one is given, and its W the weights of the head."""
        backend, linear = self._held.backend, self._held.problem.linear
        head = state.W.to(linear.weight.dtype)
        chosen = None if choice is None else self._problem_for(linear, choice)

        def write() -> None:
            if choice is not None and chosen is not None:
                backend.penalize(chosen.prior, chosen.ridge)
                self._choice, self._looked = choice, int(counters[STEPS])
            backend.load(state, counters)
            store(linear, head)

        commit(write)

    def state_dict(self) -> dict[str, Any]:
        """Return the state and the settings, without the head's weights, which are in the `nn.Linear`."""
        state, counters = self._read()
        by_evidence = (self.noise_factor, self._choice.unit) if self.ridge == "evidence" else None
        ridge, scale, _ = self._choice
        settings = RLSSettings(self._initial, ridge, self.bias_ridge, self.forgetting, scale[:, 0], by_evidence)
        return write_root(state, counters, settings)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state, with its settings.

        Args:
            state_dict: The result of `state_dict` of a solver whose head has the same shape.

        Raises:
            ValueError: An entry is missing or wrong; the message names it and nothing changed.
        """
        self._read()
        linear = head_of(self)
        state, counters, settings = read_root(state_dict, linear, self._held.problem.prior)
        factor, unit = settings.by_evidence or (self.noise_factor, 1.0)

        def write() -> None:
            self._initial, self._choice = settings.prior, Choice(settings.ridge, settings.scale[:, None], unit)
            self.ridge = settings.ridge if settings.by_evidence is None else "evidence"
            self.bias_ridge, self.forgetting, self.noise_factor = settings.bias_ridge, settings.forgetting, factor
            self._held = HeldState(self._problem_for(linear, self._choice), state, counters)

        commit(write)

    @property
    def ridge_now(self) -> float:
        """The ridge of the weights: `ridge`, or what evidence has chosen."""
        head_of(self)
        return self._choice.ridge

    def __repr__(self) -> str:
        head = "" if self.linear is None else f"{shape_words(self.linear)}, backend={self.backend}"
        ridge = self.ridge if isinstance(self.ridge, str) else f"{self.ridge:g}"
        if self.ridge == "evidence" and self.linear is not None:
            ridge = f"evidence, now {self._choice.ridge:.3g}"
        return f"RLS(ridge={ridge}, forgetting={self.forgetting:g}{bias_words(self.bias_ridge)}{head})"

    def checkpoint(self) -> Any:
        """Return what `rollback` needs to undo the next update: references and small copies of the state."""
        # This runs at every step, and `_read` costs as much as the copies.
        if self._held.place != self._held.lies():
            self._read()
            if self._held.place:  # in other memory of the same device
                self._change_backend(1)
        return self._held.eager().checkpoint(), self._choice

    def rollback(self, checkpoint: Any) -> None:
        """Restore the state and the head's weights as they were at a checkpoint.

        Args:
            checkpoint: The result of `checkpoint`.
        """
        self._read()
        own, choice = checkpoint
        backend = self._held.eager()
        if choice is not self._choice:
            _, prior, ridge = self._problem_for(head_of(self), choice)
            backend.penalize(prior, ridge)
            self._choice = choice
        self._looked = -1
        backend.undo(own)

    # ------------------------------------------------------------------ what the state tells

    @property
    def backend(self) -> str:
        """The backend that computes an update of one row: "compiled", "graph" (CUDA graphs) or "torch"."""
        self._read()
        return self._held.row(1).backend

    @property
    def steps(self) -> int:
        """The number of updates that the head has learned."""
        return int(self._read()[1][STEPS])

    @property
    def samples(self) -> float:
        """The number of samples that the head remembers: the sum of their weights times forgetting^age."""
        return float(self._read()[1][SAMPLES])

    @property
    def ridge_left(self) -> Tensor:
        """The ridge (p,) of each coordinate at present: between half of its setting and all of it."""
        return self._read()[0].ridge_left.clone()

    def objective(self) -> Tensor:
        """Return the minimum (m,) of the objective, which the head's weights attain, one number per output."""
        return self._read()[0].energy.clone()

    @torch.no_grad()
    def covariance(self) -> Tensor:
        """Return B (p, p), the inverse of the curvature A; a bias is the last coordinate."""
        T = least_squares.square_root(self._read()[0])
        B = T.T @ T
        return (B + B.T) / 2

    @torch.no_grad()
    def health(self) -> dict[str, float]:
        """Return numbers that show why a run goes wrong, to log about every hundred steps.

        They are `condition`, `smallest_eigenvalue`, `effective_samples` and `dead_features`; docs/how-to/choose.md
        explains each and what to do. The cost is a singular value decomposition of a p x p matrix.
        """
        state, counters = self._read()
        return health.report(least_squares.square_root(state), state.ridge_left, float(counters[SAMPLES]))

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
        linear, (state, _) = head_of(self), self._read()
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
        linear, (state, _) = head_of(self), self._read()
        Phi, W = rows_to_predict(linear, features, state.W)
        T, variance = self._posterior("sample", noise)
        normal = torch.randn(W.shape, dtype=W.dtype, device=W.device, generator=generator)
        weights = W + variance.sqrt()[:, None] * (normal @ T)  # rows of normal @ T have the covariance TᵀT
        return as_outputs(linear, features, Phi @ weights.T)

    def _posterior(self, asked: str, noise: float | None) -> tuple[Tensor, Tensor]:
        """T and σ² (m,) of the posterior N(W, σ²TᵀT): `noise` squared, or by the errors made while learning."""
        state, counters = self._read()
        samples, T = float(counters[SAMPLES]), least_squares.square_root(state)
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
        rows = features.numel() // linear.in_features
        backend = self._held.backend_for(rows) or self._change_backend(rows)
        lam = self.forgetting if self.forgets else 1.0
        given = features, targets, sample_weight, lam
        if not (self._learn_and_choose(backend, given) if self.ridge == "evidence" else backend.learn(*given)):
            raise explain_nonfinite(features, targets, linear)

    def _learn_and_choose(self, backend: TorchBackend, given: tuple[Tensor, Tensor, Tensor | None, float]) -> bool:
        """Learn samples, and choose the ridge where that is due, together. False: a value is not finite."""
        features, _, sample_weight, lam = given
        steps, known, unit = int(backend.counters[STEPS]), float(backend.counters[SAMPLES]), self._choice.unit
        starts, weighs = self._may_start(steps), sample_weight is not None or unit != 1.0
        if not (starts or weighs or evidence.due(steps, steps + 1, lam)):
            return backend.learn(*given)
        start, learned = self.checkpoint() if starts else None, False

        def write() -> None:
            nonlocal learned
            if int(backend.counters[STEPS]) == steps:  # else an interrupt came after it
                if start is not None:
                    self._start_ridge(evidence.first_ridge(features, sample_weight, self._initial.dtype))
                learned = backend.learn(*given)
                if not learned and start is not None:
                    self.rollback(start)
            if int(backend.counters[STEPS]) > steps and weighs:
                omega = (torch.ones(features.shape[:-1]) if sample_weight is None else sample_weight.detach()).double()
                self._mix_units(lam * known, unit, float(omega.sum()), float(omega.square().sum()))
            self._choose_ridge(steps, lam)

        commit(write)
        return learned

    def _may_start(self, steps: int) -> bool:
        """Whether the features of these updates may tell with which ridge to start."""
        return steps < evidence.FIRST and self._choice.ridge == evidence.START and self.ridge == "evidence"

    def _start_ridge(self, ridge: float) -> None:
        """Start with this ridge, where the features of all samples before were 0."""
        if ridge == evidence.START:
            return
        linear, prior, _ = self._held.problem
        state, counters = self._held.backend.read()
        choice, each = self._choice._replace(ridge=ridge), self._ridges(linear, ridge)
        state = state._replace(W=follow(linear, state.W))
        if counters[SAMPLES] == 0:
            found: LeastSquaresState | None = least_squares.start(prior, each)._replace(W=state.W)
        else:
            found = evidence.started(state, prior, each, linear.bias is not None)
        if found is not None:
            self._take(found, without_pending(counters), choice)

    def _mix_units(self, known: float, unit: float, more: float, squares: float) -> None:
        """Note the unit of sample weights, which was `unit` for a sum of `known`, after others of sum `more`."""
        if known + more > 0:
            self._choice = self._choice._replace(unit=(known * unit + squares) / (known + more))

    def _choose_ridge(self, earlier: int, lam: float) -> None:
        """Take the ridge and the prior of the largest evidence where that is due, after update number `earlier`."""
        counters = self._held.backend.counters
        # A weight of two is a sample twice; weights below one, as normalized ones, count as many samples as there are.
        samples, steps = float(counters[SAMPLES]) / min(self._choice.unit, 1.0), int(counters[STEPS])
        if steps != self._looked and samples >= evidence.FIRST and evidence.due(earlier, steps, lam):
            self._take_best_ridge(samples)
            self._looked = steps

    @torch.no_grad()
    def _take_best_ridge(self, samples: float) -> None:
        """Take the ridge and the prior of the largest evidence; the head remembers this many samples."""
        (state, counters), (linear, prior, _) = self._held.backend.read(), self._held.problem
        settings = samples, evidence.mean_weight(self.forgetting, int(counters[STEPS])), self.noise_factor
        with torch.autocast(prior.device.type, enabled=False):
            state, choice = evidence.best_state(
                state,
                self._initial,
                self._choice,
                *settings,
                linear.bias is not None,
                lambda ridge: self._ridges(linear, ridge),
            )
        if choice is not self._choice and all(bool(part.isfinite().all()) for part in (state.T, state.W)):
            self._take(state, without_pending(counters), choice)

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
        linear, state, counters = self._remembering_all("unlearn")
        check_rows(linear, features, targets, sample_weight)
        Phi, Y, total = samples(linear, features, targets, sample_weight, state.T.dtype)
        if not math.isfinite(float(Phi.square().sum() + Y.square().sum())):
            raise explain_nonfinite(features, targets, linear)
        steps, seen, cursor, _, _ = counters
        _, prior, ridge = self._held.problem
        new = least_squares.unlearn(state, Phi, Y, total, seen, prior, ridge)
        self._held.eager()
        self._take(new, np.array([steps, max(0.0, seen - total), cursor, 0.0, 0.0]))

    @torch.no_grad()
    def delta_since(self, mark: dict[str, Any] | None = None) -> Delta:
        """Return what the head has learned since an earlier state, to `merge` into another head. Needs forgetting 1.

        Args:
            mark: An earlier result of `state_dict` of this head; None for everything since `bind`.

        Returns:
            A `Delta`, whose size does not depend on the number of samples.
        """
        linear, state, counters = self._remembering_all("delta_since")
        _, prior, ridge = self._at_bind()
        chosen = self._choice if self.ridge == "evidence" else None
        return delta.since(mark, linear, state, counters, prior, ridge, chosen)

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
        linear, state, counters = self._remembering_all("merge")
        learned = other if isinstance(other, Delta) else other.delta_since()
        _, prior, ridge = self._at_bind()
        steps, seen, cursor, _, _ = counters
        self._held.eager()
        starts, before = self._may_start(int(steps)), self.checkpoint()
        try:
            if starts and learned.samples > 0:
                x = (
                    learned.features[:, : linear.in_features]
                    * (learned.unit * len(learned.features) / learned.samples) ** 0.5
                )
                self._start_ridge(evidence.first_ridge(x, None, x.dtype))
                state = self._read()[0]
            new = delta.learn(state, learned, prior, ridge, linear.weight.dtype)
        except BaseException:
            self.rollback(before)
            raise
        self._take(new, np.array([steps + learned.steps, seen + learned.samples, cursor, 0.0, 0.0]))
        if self.ridge == "evidence":
            self._mix_units(seen, self._choice.unit, learned.samples, learned.samples * learned.unit)
            self._choose_ridge(int(steps), 1.0)

    def _at_bind(self) -> Problem:
        """The prior and the ridges before any sample, by which two heads may be merged."""
        if self.ridge != "evidence":
            return self._held.problem
        return self._problem_for(head_of(self), Choice(evidence.START, torch.ones_like(self._choice.scale)))

    def _remembering_all(self, verb: str) -> tuple[nn.Linear, LeastSquaresState, Counters]:
        """The head, its state with changes made from outside, and its counters; an error at forgetting below 1."""
        (state, counters), linear = self._read(), head_of(self)
        if self.forgetting != 1.0:
            raise ValueError(
                f"{verb} is exact only at forgetting 1, got {self.forgetting:g}: "
                "with forgetting, a head depends on when each sample came"
            )
        return linear, state._replace(W=follow(linear, state.W)), counters

    # ------------------------------------------------------------------ learning inside a CUDA graph

    @torch.no_grad()
    def prepare_capture(self) -> Hashable:
        """Copy the state to the memory that captured updates write, if the head was changed elsewhere since.

        Returns:
            The addresses and settings on which a recording depends.
        """
        state, counters = self._read()
        return self._held.prepare_capture(state, counters, self.forgetting)

    @torch.no_grad()
    def update_captured(self, features: Tensor, targets: Tensor) -> Tensor:
        """Learn samples inside a CUDA graph, without synchronizing with the host.

        Args:
            features: Inputs of the head (..., in_features).
            targets: Targets (..., out_features).

        Returns:
            A boolean scalar on the device: False where a value was not finite, so that nothing was learned.
        """
        captured = self._held.captured
        if captured is None or self._held.backend is not captured:
            raise RuntimeError("update_captured needs prepare_capture() first")
        if self._may_start(captured.updates) and not (features.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._start_ridge(evidence.first_ridge(features, None, self._initial.dtype))
        return captured.update(features, targets)

    def replays(self) -> int | None:
        """Return how many recorded updates may run before `prepare_capture` chooses the ridge again.

        Returns:
            The number of updates; None where a number fixes the ridge.
        """
        captured = self._held.captured
        if self.ridge != "evidence" or captured is None:
            return None
        return evidence.updates_until(captured.updates, self.forgetting)

    @torch.no_grad()
    def finish_captured(self) -> None:
        """Compute the curvature after the last `update_captured`; no forward or backward pass reads it."""
        if self._held.captured is not None:
            self._held.captured.finish()
