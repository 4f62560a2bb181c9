"""What engines share: a body with a linear head that learns rows of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from sepsa.stream.kernels.parts import Floats as Floats


class FitPlan(NamedTuple):
    """How `fit` trains learners with a body."""

    fixed_features: bool  # whether the body does not learn, so that the head needs no forgetting
    speed: float  # rows learned in the time that a small compiled network takes for one


class StreamEngine:
    """The base of engines, which `StreamLearner` lets learn raw rows in order: a body with a linear head.

    `sepsa.stream.engine.bodies` lists them, and `Engine` documents their methods. Those here are defaults for an
    engine that bounds no outliers and keeps no calibration of its own.
    """

    inputs: int
    outputs: int
    batch_size: int  # rows of one step of the body
    robust: bool = False  # whether the influence of implausible rows is bounded
    steps: int = 0  # batches learned; 0 where the engine does not count them in one with the update
    outliers: int = 0  # rows with an implausible target, input or weight
    # The log-loss of each inverse temperature on rows not yet learned; empty where the engine keeps none.
    calibration_losses: Floats = np.empty(0)

    def learn_pass(self: Any, X: Floats, Y: Floats, sample_weight: Floats, forgetting: float, every: int) -> Floats:
        """Learn rows in batches as `learn` does, where the head forgets by `forgetting` per batch.

        It forgets all of `every` batches at once, before the first of them.
        """
        rate, _, batch = self.schedule()
        out = np.empty_like(Y)
        for some, factor in forgetting_steps(len(X), batch, forgetting, every):
            self.set_schedule(rate, factor, batch)
            out[some] = self.learn(X[some], Y[some], sample_weight[some])
        return out

    def learn_row(self: Any, x: Sequence[float], y: Iterable[float], weight: float) -> None:
        """Learn one row."""
        self.learn(np.array([x], np.float64), np.array([[*y]], np.float64), np.array([weight], np.float64))

    def predict_row(self: Any, x: Sequence[float]) -> list[float]:
        """The prediction for one row."""
        return self.predict(np.array([x], np.float64))[0].tolist()

    def set_target_offset(self, offset: Floats) -> None:
        """Say what was subtracted from the targets (outputs,), by which an engine can see their signs."""

    def set_plausible_targets(self, errors: Floats, low: Floats, high: Floats) -> None:
        """Set the quantiles (outputs, 3) of |error|, at 0.5, 0.8 and 0.9, and the range (outputs,) of targets."""

    def set_typical_weight(self, weight: float) -> None:
        """Set the typical weight of a sample."""

    def set_inflation(self, inflation: int) -> None:
        """Follow the errors e/√(1 + c φᵀBφ) with this c from now on, where the noise is that of recent errors."""


def forgetting_steps(rows: int, batch: int, forgetting: float, every: int) -> Iterator[tuple[slice, float]]:
    """Rows in batches and the factor by which the head forgets in each of these: the first of `every` for all."""
    for start in range(0, rows, batch * every):
        first, stop = min(start + batch, rows), min(start + batch * every, rows)
        yield slice(start, first), forgetting ** -(-(stop - start) // batch)
        if first < stop:
            yield slice(first, stop), 1.0


def residual_degrees(penalty: Floats, samples: float, free: float) -> tuple[Floats, float]:
    """`penalty` and samples - free; no penalty and the samples where that is nearly 0, as with small weights."""
    degrees = samples - free
    return (penalty, degrees) if degrees > 0.1 * samples else (0 * penalty, max(samples, np.finfo(float).tiny))
