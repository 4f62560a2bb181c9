"""An engine for raw data: it finds the scales of inputs and targets itself, and learning stays exact.

The first rows are kept. Whenever their number is a power of two, up to `WARM_UP`, the scales are taken from all of
them, and they are learned again from the start, at less than twice the cost of learning them once. From then on the
scales stand, so the head's curvature is that of the features as they are: a scaler that went on moving would bend the
features under it. What is constant in the first rows gets its scale from the first value that differs
(`kernels.wake`).

Targets are measured from the first one seen, and the head has no scale: its prior is zero, so that the fit to c·y is c
times the fit to y. Only the body's loss is divided by the targets' variance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sepsa.stream import kernels
from sepsa.stream.engine import Engine, Floats, announce_compilation

WARM_UP = 256


class Learner:
    """A stream learner on raw rows of numbers; NaN in an input stands for a value that is missing, and is its mean.

    `regression` measures targets from the first one and scales the body's loss; class indicators need neither.
    """

    def __init__(self, inputs: int, outputs: int, *, regression: bool, **options: Any) -> None:
        self.regression, self.options = regression, options
        self.engine = self._new_engine(inputs, outputs)
        self.offset = np.zeros(outputs)
        self.rows = 0
        self._X: Floats = np.empty((0, inputs))  # the first rows, while the scales are not settled
        self._Y: Floats = np.empty((0, outputs))
        self._weight: Floats = np.empty(0)
        self._seat_row()

    def _seat_row(self) -> None:
        """The places through which one row goes into the kernels and out, so that a call makes no arrays."""
        layout = self.engine.layout
        self._x, self._y, self._w = np.zeros((1, layout.inputs)), np.zeros((1, layout.outputs)), np.ones(1)
        self._out, self._no_spread = np.zeros((1, layout.outputs)), np.empty(0)

    def _new_engine(self, inputs: int, outputs: int) -> Engine:
        engine = Engine(inputs, outputs, standardize=True, **self.options)
        if not self.regression:
            engine.part("GAIN")[:] = 1.0
        return engine

    @property
    def settled(self) -> bool:
        """Whether the scales stand."""
        return self.rows >= WARM_UP

    # ------------------------------------------------------------------ learning

    def learn(self, X: Floats, Y: Floats, weight: Floats | None = None) -> Floats:
        """Learn rows in order; returns the predictions (n, outputs) made before each batch was learned."""
        weight = np.ones(len(X)) if weight is None else weight
        if self.settled:
            return self._engine_learn(X, Y, weight)
        before = (self.engine, self.engine.state.copy(), self.offset, self.rows, self._X, self._Y, self._weight)
        try:
            return self._settle(X, Y, weight)
        except FloatingPointError:
            self.engine, state, self.offset, self.rows, self._X, self._Y, self._weight = before
            self.engine.state[:] = state
            raise

    def _settle(self, X: Floats, Y: Floats, weight: Floats) -> Floats:
        out = np.empty_like(Y)
        batch = int(self.engine.layout.numbers[kernels.L_BATCH])
        at = 0
        while at < len(X) and not self.settled:
            due = 1 << self.rows.bit_length()  # the next power of two
            some = slice(at, min(len(X), at + max(batch, -(-(due - self.rows) // batch) * batch)))
            seen = weight[some] > 0
            if self.rows == 0 and self.regression and seen.any():
                self.offset = Y[some][seen][0].copy()
                out[some] = 0.0
                self._engine_learn(X[some], Y[some], weight[some])
            else:
                out[some] = self._engine_learn(X[some], Y[some], weight[some])
            self._X, self._Y = np.concatenate([self._X, X[some][seen]]), np.concatenate([self._Y, Y[some][seen]])
            self._weight = np.concatenate([self._weight, weight[some][seen]])
            self.rows = len(self._X)
            if self.rows >= due:
                self._learn_again()
            at = some.stop
        if self.settled:
            self._X, self._Y, self._weight = self._X[:0], self._Y[:0], self._weight[:0]
            out[at:] = self._engine_learn(X[at:], Y[at:], weight[at:])
        return out

    def _learn_again(self) -> None:
        layout = self.engine.layout
        self.engine = self._new_engine(layout.inputs, layout.outputs)
        self.take_scales(self._X, self._Y, self._weight)
        self._engine_learn(self._X, self._Y, self._weight)

    def take_scales(self, X: Floats, Y: Floats, weight: Floats) -> None:
        """Mean and deviation of each input, variance of each target, over these rows."""
        mean, variance = moments(X, weight)
        self.engine.part("MEAN")[:] = mean
        self.engine.part("SCALE")[:] = reciprocal(np.sqrt(variance))
        if self.regression:
            self.engine.part("GAIN")[:] = reciprocal(moments(Y, weight)[1])

    def start(self, X: Floats, Y: Floats, weight: Floats) -> None:
        """Settle on the scales of all these rows before any is learned; `learn` then takes them in any order."""
        self.rows = max(WARM_UP, len(X))
        if self.regression:
            self.offset = moments(Y, weight)[0]
        self.take_scales(X, Y, weight)

    def recount(self, samples: float, noise: Floats) -> None:
        """Let what the head knows stand for so many samples, and their errors for this noise (outputs,).

        Rows that were learned in N passes count N times: A <- A/N sets that right and leaves the head as it is.
        """
        passes = max(1.0, self.engine.samples / samples)
        self.engine.part("D")[:] *= passes
        self.engine.part("RIDGE")[:] /= passes
        self.engine.part("COUNTS")[kernels.C_MASS] /= passes
        self.engine.part("ENERGY")[:] = noise * self.engine.samples

    def noise(self) -> Floats:
        """The variance (outputs,) of a target about its prediction, beside what the prediction itself does not know.

        It is the mean of e²/(1 + φᵀBφ) over the errors e made before learning, so that it is honest.
        """
        return self.engine.part("ENERGY") / max(self.engine.samples, np.finfo(float).tiny)

    def learn_row(self, x: Sequence[float], y: Sequence[float], weight: float = 1.0) -> None:
        """`learn` for one row with nothing missing and a positive weight, at the price of the kernel."""
        if not self.settled:
            self.learn(np.array([x], dtype=np.float64), np.array([y], dtype=np.float64), np.array([weight]))
            return
        engine = self.engine
        self._x[0] = x
        self._y[0] = [target - zero for target, zero in zip(y, self.offset.tolist(), strict=True)]
        self._w[0] = weight
        announce_compilation(kernels.learn)
        places = (engine.kind, self._x, self._y, self._w, self._out, engine.scratch)
        if not kernels.learn(engine.state, engine.layout.numbers, engine.options, *places):
            engine.learn(self._x, self._y, self._w)  # refused again, and says why

    def predict_row(self, x: Sequence[float]) -> list[float]:
        """`predict` for one row with nothing missing, at the price of the kernel."""
        engine = self.engine
        self._x[0] = x
        announce_compilation(kernels.predict)
        places = (engine.kind, self._x, self._out, self._no_spread, engine.scratch)
        kernels.predict(engine.state, engine.layout.numbers, *places)
        return [value + zero for value, zero in zip(self._out[0].tolist(), self.offset.tolist(), strict=True)]

    def _engine_learn(self, X: Floats, Y: Floats, weight: Floats) -> Floats:
        return self.engine.learn(self._complete(X), Y - self.offset, weight) + self.offset

    def _complete(self, X: Floats) -> Floats:
        """X with the mean where a value is missing."""
        missing = np.isnan(X)
        return np.where(missing, self.engine.part("MEAN"), X) if missing.any() else X

    # ------------------------------------------------------------------ prediction

    def predict(self, X: Floats) -> Floats:
        """The predictions (n, outputs)."""
        return self.engine.predict(self._complete(X)) + self.offset

    def predict_with_spread(self, X: Floats) -> tuple[Floats, Floats]:
        """The predictions (n, outputs) and φᵀBφ (n,)."""
        mean, spread = self.engine.predict_with_spread(self._complete(X))
        return mean + self.offset, spread

    # ------------------------------------------------------------------ growth

    def add_inputs(self, values: Floats) -> None:
        """Make room for more inputs, missing in all rows so far; these first values stand for their means."""
        old = self.engine.layout
        self.engine.grow(old.inputs + len(values), old.outputs)
        self.engine.part("MEAN")[old.inputs :] = values
        self._X = np.concatenate([self._X, np.full((len(self._X), len(values)), np.nan)], 1)
        self._seat_row()

    def add_outputs(self, count: int) -> None:
        """Make room for more outputs, whose targets were zero in all rows so far."""
        old = self.engine.layout
        self.engine.grow(old.inputs, old.outputs + count)
        if not self.regression:
            self.engine.part("GAIN")[:] = 1.0
        self.offset = np.concatenate([self.offset, np.zeros(count)])
        self._Y = np.concatenate([self._Y, np.zeros((len(self._Y), count))], 1)
        self._seat_row()


def moments(X: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """Weighted mean and variance of each column over the values that are not missing; 0 where all are."""
    there = ~np.isnan(X)
    w = weight[:, None] * there
    total = np.maximum(w.sum(0), np.finfo(float).tiny)
    first = np.where(there.any(0), X[there.argmax(0), np.arange(X.shape[1])], 0.0)
    off = np.where(there, X - first, 0.0)  # from the first value, so that a constant has exactly no deviation
    shift = (w * off).sum(0) / total
    return first + shift, (w * np.where(there, off - shift, 0.0) ** 2).sum(0) / total


def reciprocal(x: Floats) -> Floats:
    """1/x, and 0 for 0."""
    return np.divide(1.0, x, out=np.zeros_like(x), where=x > 0)
