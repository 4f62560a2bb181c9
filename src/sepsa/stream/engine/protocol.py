"""The interface of an engine: a body with a linear head that learns rows of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from sepsa.stream.kernels.parts import Floats as Floats

if TYPE_CHECKING:
    from typing import Self


class FitPlan(NamedTuple):
    """How `fit` trains learners with a body."""

    fixed_features: bool  # whether the body does not learn, so that the head needs no forgetting
    one_member: bool  # whether one learner is trained on all rows at the end, instead of a committee
    speed: float  # rows learned in the time that a small compiled network takes for one
    parallel: bool  # whether learners can be trained in several threads


class StreamEngine(Protocol):
    """A body and a head that learn raw rows in order: what `StreamLearner` asks of them.

    `sepsa.stream.engine.options` lists the implementations. A new one inherits from this class, whose methods with a
    body are defaults for an engine that bounds no outliers and keeps no calibration of its own.
    """

    inputs: int
    outputs: int
    batch_size: int  # rows of one step of the body
    robust: bool = False  # whether the influence of implausible rows is bounded

    @classmethod
    def options(cls, parameters: Mapping[str, Any], for_fit: bool) -> dict[str, Any]:
        """The options of a new engine from the parameters of a scikit-learn estimator, which are checked."""

    @classmethod
    def fit_plan(cls, parameters: Mapping[str, Any], inputs: int) -> FitPlan:
        """How `fit` trains learners with this body."""

    @classmethod
    def for_raw_rows(cls, inputs: int, outputs: int, *, classes: bool, seed: int, **options: Any) -> Self:
        """A new engine that standardizes its inputs; `classes` says that targets are indicators of classes."""

    @property
    def samples(self) -> float:
        """How many samples the head remembers, as `RLS.samples`."""

    @property
    def steps(self) -> int:
        """How many batches were learned; 0 where the engine does not count them in one with the update."""
        return 0

    @property
    def outliers(self) -> int:
        """How many rows had an implausible target, input or weight."""
        return 0

    @property
    def chosen(self) -> dict[str, Any]:
        """The head with the largest weight in predictions: `features`, `ridge`, `forgetting`, `since` and `weights`."""

    def learn(self, X: Floats, Y: Floats, sample_weight: Floats) -> Floats:
        """Learn the rows of X (n, inputs) and Y (n, outputs) in order; returns the predictions made before.

        Where a prediction is not finite `NotFinite` is raised and nothing changes.
        """

    def learn_pass(self, X: Floats, Y: Floats, sample_weight: Floats, forgetting: float, every: int) -> Floats:
        """Learn rows in batches as `learn` does, where the head forgets by `forgetting` per batch.

        It forgets all of `every` batches at once, before the first of them.
        """
        rate, _, batch = self.schedule()
        out = np.empty_like(Y)
        for some, factor in forgetting_steps(len(X), batch, forgetting, every):
            self.set_schedule(rate, factor, batch)
            out[some] = self.learn(X[some], Y[some], sample_weight[some])
        return out

    def predict(self, X: Floats) -> Floats:
        """The predictions (n, outputs)."""

    def predict_with_leverage(self, X: Floats) -> tuple[Floats, Floats]:
        """The predictions (n, outputs) and φᵀBφ (n,), by which the variance of a prediction exceeds the noise's."""

    def learn_row(self, x: Sequence[float], y: Iterable[float], weight: float) -> None:
        """Learn one row."""
        self.learn(np.array([x], np.float64), np.array([[*y]], np.float64), np.array([weight], np.float64))

    def predict_row(self, x: Sequence[float]) -> list[float]:
        """The prediction for one row."""
        return self.predict(np.array([x], np.float64))[0].tolist()

    def resize(self, inputs: int, outputs: int) -> None:
        """Add inputs or outputs as if they had been there, at zero, from the start."""

    def set_scaling(self, mean: Floats, scale: Floats, first: int = 0) -> None:
        """Standardize inputs as (x - mean) · scale, from input `first` on; the first value sets a scale of zero."""

    def set_output_weights(self, weights: Floats | float) -> None:
        """Weight each output's squared error in the body's loss; the first value sets a weight of zero."""

    def set_target_offset(self, offset: Floats) -> None:
        """Say what was subtracted from the targets (outputs,), by which an engine can see their signs."""

    def set_typical_inputs(self, distances: Floats | float, first: int = 0) -> None:
        """Set the typical distance of each standardized input from zero, from input `first` on."""

    def set_plausible_targets(self, errors: Floats, low: Floats, high: Floats) -> None:
        """Set the quantiles (outputs, 3) of |error|, at 0.5, 0.8 and 0.9, and the range (outputs,) of targets."""

    def set_typical_weight(self, weight: float) -> None:
        """Set the typical weight of a sample."""

    def schedule(self) -> tuple[float, float, int]:
        """The body's learning rate, the head's forgetting and the rows of a batch."""

    def set_schedule(self, lr: float, forgetting: float, batch: int) -> None:
        """Set the learning rate, the forgetting and the rows of a batch for the next rows."""

    def noise_variance(self) -> Floats:
        """The variance (outputs,) of targets about predictions, where φᵀBφ is small."""

    def set_effective_samples(self, samples: float, noise: Floats) -> None:
        """Scale the head's curvature to this number of samples, and set their noise variance (outputs,).

        Rows that were learned in N passes count N times: A <- A/N corrects that and leaves the head as it is.
        """

    def set_inflation(self, inflation: int) -> None:
        """Follow the errors e/√(1 + c φᵀBφ) with this c from now on, where the noise is that of recent errors."""

    def calibration_losses(self) -> Floats:
        """The log-loss of each inverse temperature on rows not yet learned; empty where the engine keeps none."""
        return np.empty(0)

    def set_calibration_losses(self, losses: Floats) -> None:
        """Continue from these losses."""

    def copy(self) -> Self:
        """Another engine in the same state."""

    def state_dict(self) -> dict[str, Any]:
        """The engine's state as plain data; an engine that loads it continues bit for bit."""

    def load_state_dict(self, state_dict: dict[str, Any], entry: str = "state_dict") -> None:
        """Continue from the result of `state_dict`; a ValueError names the wrong entry and changes nothing."""


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
