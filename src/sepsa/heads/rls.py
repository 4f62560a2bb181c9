"""Recursive least squares: the stochastic Newton method of the paper's equations 12-18.

The mathematics is in `math.least_squares`, whose symbols are used here; `backends.choose` decides what computes it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from sepsa.heads.backends import choose
from sepsa.heads.backends.captured_least_squares import CapturedState
from sepsa.heads.backends.choose import Backend, Counters, Problem, UpdateSize
from sepsa.heads.backends.torch_least_squares import TorchBackend
from sepsa.heads.base import checks, health
from sepsa.heads.base.checks import check_outputs, check_rows, explain_nonfinite
from sepsa.heads.base.delta import Delta
from sepsa.heads.base.delta import learn as learn_delta
from sepsa.heads.base.delta import since as delta_since
from sepsa.heads.base.parameters import bias_words, commit, follow, ridges, samples, start, store
from sepsa.heads.base.posterior import NormalPosterior
from sepsa.heads.base.rls_state import RLSSettings, read_root, write_root
from sepsa.heads.math import least_squares
from sepsa.heads.math.anneal import annealed_forgetting, ridge_weight
from sepsa.heads.math.least_squares import GROWTH, PENDING, SAMPLES, STEPS, LeastSquaresState
from sepsa.heads.math.ridge import due
from sepsa.validation import in_range

_SIZES = 64  # numbers of rows for which the choice of a backend is remembered


class RLS(NormalPosterior):
    """Train a linear head by recursive least squares: an exact Newton step on the squared loss per update.

    Choose it for regression where a p x p matrix fits in memory, p the number of features and the bias. After any
    updates the head's weights are the minimizer of

        sum_i forgetting^age_i ||targets_i - W features_i||^2
            + sum_j ridge_j ||W_j - prior_j||^2

    where `prior` is the head's weights at `bind`, age counts updates, and ridge_j is `ridge`, which forgetting never
    removes (see `restored_per_update`). At forgetting 1 an `RLS` equals ridge regression about the initial weights on
    all data seen, in any order and in any batches. The state is a square root of the inverse curvature, so that the
    curvature stays positive definite.

    Args:
        ridge: Strength of the pull towards the initial weights; 1 has the weight of one sample of unit features.
        forgetting: Factor in (0, 1] on the weight of earlier samples, once per update; below 1 the head follows changes
            of the data and of the body.
        bias_ridge: Ridge of the bias. None: 1e-4 (1e-3 in float32) or `ridge`, whichever is smaller, so that targets
            may have an offset; "ridge": `ridge`.
        dtype: Dtype of the arithmetic. None: float64, or float32 on MPS. Features and targets may have any floating
            dtype.

    Attributes:
        linear: The `nn.Linear` that the solver is bound to, or None.

    See also:
        `SelfTuning`, which chooses ridge and forgetting; `SoftmaxNewton` and `LogisticNewton` for classification;
        `PerOutput` for targets that are partly missing; `OnlineLBFGS` where p x p is too large.

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

    learns_moments = True  # rows with equal second moments are equal to it: see sepsa.distributed
    forgets = True  # in the next update; see `sepsa.heads.Forgets`
    _ratio, _epoch = 1.0, None  # of `anneal`

    def __init__(
        self,
        *,
        ridge: float = 1.0,
        forgetting: float = 1.0,
        bias_ridge: float | Literal["ridge"] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.ridge = checks.ridge_setting(ridge)
        self.forgetting = in_range("forgetting", forgetting, 0.0, 1.0)
        self.bias_ridge, self.dtype = checks.bias_setting(bias_ridge), checks.optional_dtype(dtype)

    # ------------------------------------------------------------------ state

    def _start(self, linear: nn.Linear) -> None:
        prior = start(linear, self.dtype)
        ridge = ridges(linear, self.ridge, self.bias_ridge, prior)
        self._recent = health.Recent(prior)
        self._continue(Problem(linear, prior, ridge), least_squares.start(prior, ridge), np.zeros(5))

    def _ready(self) -> nn.Linear:
        self._read()
        return self._problem.linear

    def _continue(self, problem: Problem, state: LeastSquaresState, counters: Counters) -> None:
        """Make this the state; the next update chooses its backend."""
        self._problem = problem
        self._captured: CapturedState | None = None  # what recordings of captured steps write to
        self._backend: Backend | CapturedState = TorchBackend(problem, state, counters)
        self._place: tuple[Any, ...] = ()  # where the head lay when the backend was chosen
        self._chosen: dict[int, str] = {}  # the backends of updates by their number of rows

    def state_dict(self) -> dict[str, Any]:
        """Return the state and the settings, without the head's weights, which are in the `nn.Linear`."""
        state, counters = self._read()
        return write_root(
            state, counters, RLSSettings(self._problem.prior, self.ridge, self.bias_ridge, self.forgetting)
        )

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state, with its settings.

        Args:
            state_dict: The result of `state_dict` of a solver whose head has the same shape.

        Raises:
            ValueError: An entry is missing or wrong; the message names it and nothing changed.
        """
        self._read()
        linear = self._head()
        state, counters, settings = read_root(state_dict, linear, self._problem.prior)
        prior, ridge, bias_ridge, forgetting = settings
        problem = Problem(linear, prior, ridges(linear, ridge, bias_ridge, prior))

        def write() -> None:
            self.ridge, self.bias_ridge, self.forgetting = ridge, bias_ridge, forgetting
            self._continue(problem, state, counters)
            self._recent = health.Recent(prior)

        commit(write)

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
        """The ridge (p,) of each coordinate at present: half of its setting at least, and all of it at most unless the
        head anneals.
        """
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

    @property
    def backend(self) -> str:
        """The backend that computes an update of one row: "numba" (compiled), "graph" (CUDA graphs) or "torch"."""
        self._read()
        return choose.choose("least squares", self._case(1)).backend

    def __getstate__(self) -> dict[str, Any]:
        if self.linear is None:
            return self.__dict__
        left_out = ("_backend", "_captured", "_place", "_chosen")
        return {name: value for name, value in self.__dict__.items() if name not in left_out} | {"_saved": self._read()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("_saved", None)
        self.__dict__.update(state)
        if saved is not None:
            self._continue(self._problem, *saved)

    def __repr__(self) -> str:
        head = "" if self.linear is None else f"{self._shape_words()}, backend={self.backend}"
        return f"RLS(ridge={self.ridge:g}, forgetting={self.forgetting:g}{bias_words(self.bias_ridge)}{head})"

    def _read(self) -> tuple[LeastSquaresState, Counters]:
        """The state and its counters, on the device of the head."""
        device = self._head().weight.device
        state, counters = self._backend.read()
        if self._problem.prior.device != device:
            state = state.map(lambda part: part.to(device))
            problem = Problem(self._problem.linear, self._problem.prior.to(device), self._problem.ridge.to(device))
            self._continue(problem, state, counters)
        return state, counters

    def _case(self, rows: int) -> UpdateSize:
        weight, prior = self._head().weight, self._problem.prior
        kind = weight.device.type, prior.dtype, prior.shape[1], len(prior), rows
        return UpdateSize(*kind, head_dtype=weight.dtype, contiguous=weight.is_contiguous())

    def _backend_for(self, rows: int) -> Backend:
        """The backend of an update of this many rows, which continues from the state of the one before."""
        linear = self._problem.linear
        weight, bias = linear._parameters["weight"], linear._parameters["bias"]
        assert weight is not None
        place = weight.data_ptr(), None if bias is None else bias.data_ptr(), choose.forced()
        moved = place != self._place  # another device, dtype or memory of the head
        if moved or self._chosen.get(rows) != self._backend.name:
            state, counters = self._read()
            chosen = choose.choose("least squares", self._case(rows))
            if moved or self._backend.name != chosen.backend:
                self._backend = chosen.load()(self._problem, state, counters)
            known = {} if moved or len(self._chosen) >= _SIZES else self._chosen
            self._chosen = known | {rows: self._backend.name}
            self._place = place  # last: an interrupt before lets the next update begin again
        return cast(Backend, self._backend)

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
        check_outputs(outputs, targets)
        return functional.mse_loss(outputs, targets)

    def restored_per_update(self, n: int) -> int:
        """Return how many coordinates get their ridge back in an update: p log2(1/forgetting), rounded up.

        Forgetting reduces the ridge by the factor λ too. Each update restores the ridge of a few coordinates in
        rotation, usually of one, at O(p²), so that no coordinate ever has less than half of its ridge.

        Args:
            n: Number of samples in the update, on which the result does not depend.

        Returns:
            The number of coordinates.
        """
        return due(len(self._problem.ridge), self.forgetting)

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
        linear, backend = self._head(), self._backend
        plain = sample_weight is None and backend.name == "numba" and cast(Any, backend).is_plain(features, targets)
        if not plain:
            check_rows(linear, features, targets, sample_weight)
        if not self._learn(features, targets, sample_weight, backend if plain else None):
            raise explain_nonfinite(features, targets, linear)

    def _learn(
        self,
        features: Tensor,
        targets: Tensor,
        sample_weight: Tensor | None,
        checked_by: Any = None,
        records: bool = True,
    ) -> bool:
        """Learn samples that are checked already; False, and nothing changes, where a value is not finite.

        `checked_by` is the backend that found them plain. `records` for `health`.
        """
        backend: Any = self._backend_for(features.numel() // self._problem.linear.in_features)
        steps = int(backend.counters[STEPS])
        before = backend.state.W.clone() if records and steps % health.EVERY == 0 else None
        lam = self._forgetting(backend)
        if backend is checked_by:
            Phi = backend.learn_plain(features, targets, lam)
        else:
            Phi = backend.learn(features, targets, sample_weight, lam)
        if Phi is not None and before is not None:
            self._recent.note(Phi, before, steps)
        return Phi is not None

    def _forgetting(self, backend: Any) -> float:
        """The forgetting of the next update, for which the ridge gets its weight."""
        if self._epoch is not None:
            self._weigh_ridge(float(backend.counters[SAMPLES]) / self._epoch)
        if not self.forgets:
            return 1.0
        return self.forgetting if self._ratio == 1.0 else annealed_forgetting(self.forgetting, self._ratio)

    @staticmethod
    def _compiled(members: Sequence[RLS], rows: int) -> list[Any] | None:
        """The backends of solvers that can learn the same rows by one compiled call; None where they cannot."""
        backends: list[Any] = [member._backend_for(rows) for member in members]
        return backends if all(backend.name == "numba" for backend in backends) else None

    @staticmethod
    def _learn_together(
        members: Sequence[RLS], backends: list[Any], active: RLS, samples: Sequence[Tensor | None], lam_error: Any
    ) -> list[bool]:
        """Let solvers of copies of one head learn the same samples, checked already, by one compiled call.

        `health` is recorded for the `active` one. `lam_error` (J, 2) gets the forgetting of each, and the sum of its
        squared errors before. Returns which of them have learned.
        """
        backend: Any = active._backend
        steps = int(backend.counters[STEPS])
        before = backend.state.W.clone() if steps % health.EVERY == 0 else None
        lam_error[:, 0] = [member._forgetting(own) for member, own in zip(members, backends, strict=True)]
        learned = backends[0].learn_together(backends, *samples, lam_error)
        if before is not None:
            for member, Phi in zip(members, learned, strict=True):
                if member is active and Phi is not None:
                    member._recent.note(Phi, before, steps)
        return [Phi is not None for Phi in learned]

    def anneal(self, ratio: float, samples_per_epoch: int | None = None) -> None:
        """Remember ratio^-2 times as many updates: the forgetting becomes 1 - (1 - `forgetting`) * ratio^2.

        Where samples repeat, the head then remembers each of them several times. The ridge, as it is restored, becomes
        that many times as large, so that it keeps its weight beside the samples.

        Args:
            ratio: The body's learning rate over its peak, in (0, 1].
            samples_per_epoch: Number of samples after which they come again; None where they do not.
        """
        self._ratio, self._epoch = ratio, samples_per_epoch

    def _weigh_ridge(self, epochs: float) -> None:
        """Multiply the ridges by the number of times that the head remembers each sample, if that is above 1."""
        backend: Any = self._backend
        linear, prior, each = self._problem
        backend.ridge_weight = ridge_weight(epochs)
        each.copy_(ridges(linear, self.ridge, self.bias_ridge, prior) * backend.ridge_weight)  # a recording knows it
        backend.ridge.copy_(each)

    def _leverage(self, Phi: Tensor) -> Tensor:
        """φᵀBφ (n,) of the rows of Φ (n, p); inside a CUDA graph, too."""
        captured = self._captured
        state = captured.state if captured is not None and self._backend is captured else self._backend.read()[0]
        return least_squares.leverage(state, Phi.to(state.T.dtype))

    @staticmethod
    def _leverages(members: Sequence[RLS], Phi: Tensor) -> Tensor:
        """`_leverage` (n, J) of several solvers of copies of one head."""
        backends: list[Any] = [member._backend for member in members]
        if all(backend.name == "numba" for backend in backends):
            found: Tensor = backends[0].leverages(backends, Phi.contiguous())
            return found
        return torch.stack([member._leverage(Phi) for member in members], 1)

    def _start_with(self, ridge: float) -> None:
        """Take another ridge, before the first update."""
        linear, prior, each = self._problem
        each.copy_(ridges(linear, ridge, self.bias_ridge, prior))  # in place: a recording knows it
        self.ridge = ridge
        if self._backend is self._captured:
            self._backend.load(least_squares.start(prior, each), np.zeros(5))
        else:
            self._continue(self._problem, least_squares.start(prior, each), np.zeros(5))

    @torch.no_grad()
    def raise_ridge(self, ridge: float) -> None:
        """Make the ridge larger, exactly: as if each weight had further samples of its prior.

        Args:
            ridge: The new ridge, at least the present one.

        Raises:
            ValueError: It is smaller than the present ridge.
        """
        linear, (state, counters) = self._head(), self._read()
        if not checks.ridge_setting(ridge) >= self.ridge:
            raise ValueError(f"ridge must be at least the present one, {self.ridge:g}, got {ridge:g}")
        prior, steps = self._problem.prior, counters[STEPS]
        larger = ridges(linear, float(ridge), self.bias_ridge, prior)
        problem = self._problem._replace(ridge=larger)
        if steps:
            backend = TorchBackend(problem, state.copy(), counters.copy())
            gain = (larger - state.ridge_left).clamp(min=0).sqrt()
            backend.learn_rows(torch.diag(gain), (prior * gain).T, 0.0, 1.0)
            state, counters = backend.read()
            counters[STEPS], counters[PENDING], counters[GROWTH] = steps, 0.0, 0.0
            state = least_squares.fade(state, 1.0)._replace(ridge_left=torch.maximum(larger, state.ridge_left))
        else:
            state = least_squares.start(prior, larger)
        self.ridge = float(ridge)
        self._continue(problem, state, counters)

    def checkpoint(self) -> Any:
        """Return what `rollback` needs to undo the next update: references and small copies of the state."""
        place, weight = self._place, self._head()._parameters["weight"]
        # This runs at every step, and `_read` costs as much as the copies.
        if not place or weight is None or weight.data_ptr() != place[0]:
            self._read()
        return self._eager().checkpoint()

    def rollback(self, checkpoint: Any) -> None:
        """Restore the state and the head's weights as they were at a checkpoint.

        Args:
            checkpoint: The result of `checkpoint`.
        """
        self._read()
        self._eager().undo(checkpoint)

    def _eager(self) -> Backend:
        """A backend that learns outside of a graph, with the state as it is."""
        if self._backend is self._captured:
            state, counters = self._backend.read()
            self._backend, self._place = TorchBackend(self._problem, state.copy(), counters), ()
        return cast(Backend, self._backend)

    # ------------------------------------------------------------------ learning inside a CUDA graph

    @torch.no_grad()
    def prepare_capture(self) -> Hashable:
        """Copy the state to the memory that captured updates write, if the head was changed elsewhere since.

        Returns:
            The addresses and settings on which a recording depends.
        """
        linear, (state, counters), captured = self._head(), self._read(), self._captured
        if captured is None or not captured.lies_in(linear):
            captured = CapturedState(self._problem, state)
        if self._backend is not captured:
            captured.load(state, counters)
        captured.W.copy_(follow(linear, captured.W))
        self._captured = self._backend = captured
        self._place = ()
        if self._epoch is not None:
            self._weigh_ridge(float(counters[SAMPLES]) / self._epoch)
        lam = annealed_forgetting(self.forgetting, self._ratio)
        return *captured.place, *captured.forget(lam)

    @torch.no_grad()
    def update_captured(self, features: Tensor, targets: Tensor, keep: Tensor | None = None) -> Tensor:
        """Learn samples inside a CUDA graph, without synchronizing with the host.

        Args:
            features: Inputs of the head (..., in_features).
            targets: Targets (..., out_features).
            keep: A mask (n,) of the samples to learn; None: all. Without any of them nothing changes.

        Returns:
            A boolean scalar on the device: False where a value was not finite, so that nothing was learned.
        """
        if self._captured is None or self._backend is not self._captured:
            raise RuntimeError("update_captured needs prepare_capture() first")
        return self._captured.update(features, targets, keep)

    @torch.no_grad()
    def finish_captured(self) -> None:
        """Compute the curvature after the last `update_captured`; no forward or backward pass reads it."""
        if self._captured is not None:
            self._captured.finish()

    # ------------------------------------------------------------------ exact arithmetic

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
        (state, counters), linear = self._read(), self._head()
        self._remembers_all("unlearn")
        check_rows(linear, features, targets, sample_weight)
        Phi, Y, total = samples(linear, features, targets, sample_weight, state.T.dtype)
        if not math.isfinite(float(Phi.square().sum() + Y.square().sum())):
            raise explain_nonfinite(features, targets, linear)
        steps, seen, cursor, _, _ = counters
        state = state._replace(W=follow(linear, state.W))
        new = least_squares.unlearn(state, Phi, Y, total, seen, self._problem.prior, self._problem.ridge)
        self._take(new, np.array([steps, max(0.0, seen - total), cursor, 0.0, 0.0]))

    @torch.no_grad()
    def delta_since(self, mark: dict[str, Any] | None = None) -> Delta:
        """Return what the head has learned since an earlier state, to `merge` into another head. Needs forgetting 1.

        Args:
            mark: An earlier result of `state_dict` of this head; None for everything since `bind`.

        Returns:
            A `Delta`, whose size does not depend on the number of samples.
        """
        (state, counters), (linear, prior, ridge) = self._read(), self._problem
        self._remembers_all("delta_since")
        return delta_since(mark, linear, state._replace(W=follow(linear, state.W)), counters, prior, ridge)

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
        (state, counters), (linear, prior, ridge) = self._read(), self._problem
        self._remembers_all("merge")
        delta = other if isinstance(other, Delta) else other.delta_since()
        state = state._replace(W=follow(linear, state.W))
        new = learn_delta(state, delta, prior, ridge, linear.weight.dtype)
        steps, seen, cursor, _, _ = counters
        self._take(new, np.array([steps + delta.steps, seen + delta.samples, cursor, 0.0, 0.0]))

    def _take(self, state: LeastSquaresState, counters: Counters) -> None:
        """Make this the state, and its W the weights of the head."""
        backend, linear = self._eager(), self._problem.linear
        head = state.W.to(linear.weight.dtype)

        def write() -> None:
            backend.load(state, counters)
            store(linear, head)

        commit(write)

    def _remembers_all(self, verb: str) -> None:
        if self.forgetting != 1.0:
            raise ValueError(
                f"{verb} is exact only at forgetting 1, got {self.forgetting:g}: "
                "with forgetting, a head depends on when each sample came"
            )

    # ------------------------------------------------------------------ prediction

    def _weights(self) -> Tensor:
        return self._read()[0].W

    def _spread(self) -> tuple[Tensor, Tensor, float]:
        state, counters = self._read()
        return least_squares.square_root(state), state.energy, float(counters[SAMPLES])

    @torch.no_grad()
    def health(self) -> dict[str, float]:
        """Return numbers that show why a run goes wrong, to log about every hundred steps.

        They are `condition`, `smallest_eigenvalue`, `effective_samples`, `last_step`, `feature_drift`, `dead_features`
        and `silent_features`; docs/how-to-choose.md explains each and what to do. `condition`, `last_step`,
        `feature_drift` and `silent_features` are computed from one update in eight; they are NaN before the first
        update and in captured steps.
        """
        state, counters = self._read()
        T, steps = least_squares.square_root(state), int(counters[STEPS])
        return health.report(T, state.W, state.ridge_left, float(counters[SAMPLES]), steps, self._recent)
