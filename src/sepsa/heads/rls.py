"""Recursive least squares: the stochastic Newton method of the paper's equations 12-18.

The mathematics is in `math.least_squares`, whose symbols are used here; `backends.held_state` holds the state.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from sepsa.heads.base import checks
from sepsa.heads.base.checks import check_outputs, check_rows, explain_nonfinite
from sepsa.heads.base.parameters import bias_words, commit, start
from sepsa.heads.base.rls_state import RLSSettings, read_root, write_root
from sepsa.heads.exact import ExactArithmetic
from sepsa.heads.math import evidence, least_squares
from sepsa.heads.math.evidence import Choice
from sepsa.heads.math.least_squares import SAMPLES, STEPS
from sepsa.validation import in_range


class RLS(ExactArithmetic):
    """Train a linear head by recursive least squares: an exact Newton step on the squared loss per update.

    Choose it for regression where a p x p matrix fits in memory, p the number of features and the bias. After any
    updates the head's weights are the minimizer of

        sum_i forgetting^age_i ||targets_i - W features_i||^2
            + sum_j ridge_j ||W_j - prior_j||^2

    where `prior` is the head's weights at `bind`, age counts updates, and ridge_j is `ridge`, which forgetting never
    removes. At forgetting 1 an `RLS` equals ridge regression about the initial weights on
    all data seen, in any order and in any batches. The state is a square root of the inverse curvature, so that the
    curvature stays positive definite.

    With `ridge="evidence"` the samples choose the ridge: it is the variance of the noise over that of the weights, both
    of which the state determines, and `prior` is the initial weights times a factor in [0, 1], chosen likewise. Every
    change is exact, as if the head had had that ridge from the first sample on. `ridge_now` is the present one.

    Args:
        ridge: Strength of the pull towards the initial weights; 1 has the weight of one sample of unit features.
            "evidence": chosen after 8, 16, 32, ... samples, and four times in the memory of a head that forgets. It
            starts at 10 and stays between 1e-4 times the smallest and 1e6 times the largest variance of a feature.
        forgetting: Factor in (0, 1] on the weight of earlier samples, once per update; below 1 the head follows changes
            of the data and of the body.
        bias_ridge: Ridge of the bias. None: 1e-4 (1e-3 in float32) or `ridge`, whichever is smaller, so that targets
            may have an offset; "ridge": `ridge`.
        noise_factor: With `ridge="evidence"`, a factor on the variance of the noise that the residuals show. A body
            that learns below the head fits the same samples, which they do not show; 8 is by comparison
            (benchmarks/defaults.py). Choose 1 for features that nothing changes.
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
        self._choice = Choice(evidence.START if self.ridge == "evidence" else self.ridge, 1.0)
        problem = self._problem_for(linear, self._choice)
        self._continue(problem, least_squares.start(problem.prior, problem.ridge), np.zeros(5))

    def state_dict(self) -> dict[str, Any]:
        """Return the state and the settings, without the head's weights, which are in the `nn.Linear`."""
        state, counters = self._read()
        by_evidence = (self.noise_factor, self._choice.scale) if self.ridge == "evidence" else None
        settings = self._initial, self._choice.ridge, self.bias_ridge, self.forgetting, by_evidence
        return write_root(state, counters, RLSSettings(*settings))

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
        factor, scale = settings.by_evidence or (self.noise_factor, 1.0)

        def write() -> None:
            self._initial, self._choice = settings.prior, Choice(settings.ridge, scale)
            self.ridge = settings.ridge if settings.by_evidence is None else "evidence"
            self.bias_ridge, self.forgetting, self.noise_factor = settings.bias_ridge, settings.forgetting, factor
            self._continue(self._problem_for(linear, self._choice), state, counters)

        commit(write)

    @property
    def ridge_now(self) -> float:
        """The ridge of the weights: `ridge`, or what evidence has chosen."""
        self._head()
        return self._choice.ridge

    def __repr__(self) -> str:
        head = "" if self.linear is None else f"{self._shape_words()}, backend={self.backend}"
        ridge = self.ridge if isinstance(self.ridge, str) else f"{self.ridge:g}"
        if self.ridge == "evidence" and self.linear is not None:
            ridge = f"evidence, now {self._choice.ridge:.3g}"
        return f"RLS(ridge={ridge}, forgetting={self.forgetting:g}{bias_words(self.bias_ridge)}{head})"

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
        return least_squares.mean_squared_error(outputs, targets)

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
        plain = sample_weight is None and backend.is_plain(features, targets)
        if not plain:
            check_rows(linear, features, targets, sample_weight)
        if not self._learn(features, targets, sample_weight, backend if plain else None):
            raise explain_nonfinite(features, targets, linear)

    @property
    def _forgetting_now(self) -> float:
        """The forgetting of the next update."""
        return self.forgetting if self.forgets else 1.0

    def _learn(
        self,
        features: Tensor,
        targets: Tensor,
        sample_weight: Tensor | None,
        checked_by: Any = None,
        schedule: float = 0.0,
    ) -> bool:
        """Learn samples that are checked already; False, and nothing changes, where a value is not finite.

        `checked_by` is the backend that found them plain. The ridge is looked at as often as by a head with the
        forgetting `schedule`, if that is larger.
        """
        rows = features.numel() // self._problem.linear.in_features
        backend: Any = self._backend_for(rows)
        counters = backend.counters.tolist()
        steps, known = int(counters[STEPS]), counters[SAMPLES]
        lam = self._forgetting_now
        given = features, targets, sample_weight, lam, backend is checked_by
        schedule = max(lam, schedule)
        learned = False
        if self.ridge == "evidence" and (
            sample_weight is not None or evidence.due(known, lam * known + rows, steps + 1, steps, schedule)
        ):

            def learn_and_choose() -> None:
                nonlocal learned
                if int(backend.counters[STEPS]) == steps:  # else an interrupt came after it
                    learned = backend.learn(*given)
                self._choose_ridge(known, steps, schedule)

            commit(learn_and_choose)
        else:
            learned = backend.learn(*given)
        return learned
