"""What a least-squares head that forgets nothing can do exactly: remove samples, and add what another head learned."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sepsa.heads.backends.choose import Counters, Problem
from sepsa.heads.base.checks import check_rows, explain_nonfinite
from sepsa.heads.base.delta import Delta, learn, since
from sepsa.heads.base.parameters import follow, samples
from sepsa.heads.math import evidence, least_squares
from sepsa.heads.math.evidence import Choice
from sepsa.heads.math.least_squares import LeastSquaresState
from sepsa.heads.posterior import NormalPosterior


class ExactArithmetic(NormalPosterior):
    """`unlearn`, `delta_since` and `merge` of `RLS`."""

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
        new = least_squares.unlearn(state, Phi, Y, total, seen, self._problem.prior, self._problem.ridge)
        self._eager()
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
        if self.ridge == "evidence":
            state = evidence.with_ridge(state, self._problem.prior, ridge, prior)
        return since(mark, linear, state, counters, prior, ridge)

    @torch.no_grad()
    def merge(self, other: ExactArithmetic | Delta) -> None:
        """Add what another head has learned, exactly, as if this head had seen its samples. Needs forgetting 1.

        Args:
            other: A `Delta`, or an `RLS` bound to a copy of the same initial head with the same ridge.

        Raises:
            ValueError: The two started from different weights, ridges or dtypes; nothing changed.
        """
        if not isinstance(other, (ExactArithmetic, Delta)):
            raise TypeError(f"other must be an RLS or a Delta, which delta_since returns, got {type(other).__name__}")
        linear, state, counters = self._remembering_all("merge")
        delta = other if isinstance(other, Delta) else other.delta_since()
        _, prior, ridge = self._at_bind()
        new = learn(state, delta, prior, ridge, linear.weight.dtype)
        steps, seen, cursor, _, _ = counters
        self._eager()
        self._take(new, np.array([steps + delta.steps, seen + delta.samples, cursor, 0.0, 0.0]))
        if self.ridge == "evidence":
            self._choose_ridge(seen, int(steps), 1.0)

    def _at_bind(self) -> Problem:
        """The prior and the ridges before any sample, by which two heads may be merged."""
        by_evidence = self.ridge == "evidence"
        return self._problem_for(self._head(), Choice(evidence.START, 1.0)) if by_evidence else self._problem

    def _remembering_all(self, verb: str) -> tuple[nn.Linear, LeastSquaresState, Counters]:
        """The head, its state with changes made from outside, and its counters; an error at forgetting below 1."""
        (state, counters), linear = self._read(), self._head()
        if self.forgetting != 1.0:
            raise ValueError(
                f"{verb} is exact only at forgetting 1, got {self.forgetting:g}: "
                "with forgetting, a head depends on when each sample came"
            )
        return linear, state._replace(W=follow(linear, state.W)), counters
