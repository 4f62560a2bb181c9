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

import struct
from collections.abc import Sequence
from operator import add, sub
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
        self._spare: list[Row] = []

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_spare": []}

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
        penalty, left = self._balance()
        self.engine.part("ENERGY")[:] = noise * left + penalty

    def noise(self) -> Floats:
        """The variance (outputs,) of targets about what the head could say at best: that of ridge regression,

            σ² = (Σ e²/(1 + φᵀBφ) - Σ_j ridge_j |W_j - prior_j|²) / (n - tr BΦᵀΦ),

        since the errors e made before learning sum to the objective at its minimum, and BΦᵀΦ = I - B ridge.
        """
        penalty, left = self._balance()
        return np.maximum(self.engine.part("ENERGY") - penalty, 0.0) / left

    def _balance(self) -> tuple[Floats, float]:
        """What the ridge adds to the energy (outputs,), and by how much the samples exceed the degrees of freedom."""
        engine = self.engine
        p = engine.layout.features
        ridge, D = engine.part("RIDGE"), engine.part("D")
        column, row = np.tril_indices(p, -1)  # U's columns lie one after the other
        free = p - float(D @ ridge + (engine.part("U") ** 2 * ridge[row]) @ D[column])
        penalty = (engine.head - engine.part("PRIOR").reshape(engine.head.shape)) ** 2 @ ridge
        return balance(penalty, engine.samples, free)

    def learn_row(self, x: Sequence[float], y: Sequence[float], weight: float = 1.0) -> list[float]:
        """`learn` for one row with nothing missing and a positive weight, at the price of the kernel.

        Returns the prediction made before, measured from `offset`.
        """
        if self.rows < WARM_UP:
            rows = np.array([x], np.float64), np.array([y], np.float64), np.array([weight], np.float64)
            return list((self.learn(*rows) - self.offset)[0].tolist())
        engine, spare = self.engine, self._spare
        row = spare.pop() if spare else Row(engine)
        row.put(row.desk, 0, *x, *map(sub, y, self.offset.tolist()), weight)
        if not kernels.learn.overloads:
            announce_compilation(kernels.learn)
        if not kernels.learn(
            engine.state, engine.layout.numbers, engine.options, engine.kind,
            row.x, row.y, row.weight, row.out, engine.scratch,
        ):  # fmt: skip
            engine.learn(row.x, row.y, row.weight)  # refused again, and says why
        spare.append(row)
        return list(row.out.ravel().tolist())

    def predict_row(self, x: Sequence[float]) -> list[float]:
        """`predict` for one row with nothing missing, at the price of the kernel; many threads may at once."""
        engine, spare = self.engine, self._spare
        try:
            row = spare.pop()
        except IndexError:
            row = Row(engine)
        row.put_x(row.desk, 0, *x)
        if not kernels.predict.overloads:
            announce_compilation(kernels.predict)
        kernels.predict(engine.state, engine.layout.numbers, engine.kind, row.x, row.out, row.spread, row.scratch)
        out = list(map(add, row.out.ravel().tolist(), self.offset.tolist()))
        spare.append(row)
        return out

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
        self._spare = []

    def add_outputs(self, count: int) -> None:
        """Make room for more outputs, whose targets were zero in all rows so far."""
        old = self.engine.layout
        self.engine.grow(old.inputs, old.outputs + count)
        if not self.regression:
            self.engine.part("GAIN")[:] = 1.0
        self.offset = np.concatenate([self.offset, np.zeros(count)])
        self._Y = np.concatenate([self._Y, np.zeros((len(self._Y), count))], 1)
        self._spare = []


class Row:
    """The places through which one row goes into the kernels and out, so that a call makes no arrays."""

    def __init__(self, engine: Engine) -> None:
        inputs, outputs = engine.layout.inputs, engine.layout.outputs
        desk = np.zeros(inputs + outputs + 1)
        self.desk = desk.data
        self.x, self.y = desk[:inputs].reshape(1, inputs), desk[inputs:-1].reshape(1, outputs)
        self.weight, self.out, self.spread = desk[-1:], np.zeros((1, outputs)), np.empty(0)
        self.scratch = np.empty_like(engine.scratch)
        self.put, self.put_x = struct.Struct(f"{desk.size}d").pack_into, struct.Struct(f"{inputs}d").pack_into


def moments(X: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """Weighted mean and variance of each column over the values that are not missing; 0 where all are."""
    there = ~np.isnan(X)
    w = weight[:, None] * there
    total = np.maximum(w.sum(0), np.finfo(float).tiny)
    first = np.where(there.any(0), X[there.argmax(0), np.arange(X.shape[1])], 0.0)
    off = np.where(there, X - first, 0.0)  # from the first value, so that a constant has exactly no deviation
    shift = (w * off).sum(0) / total
    return first + shift, (w * np.where(there, off - shift, 0.0) ** 2).sum(0) / total


def balance(penalty: Floats, samples: float, free: float) -> tuple[Floats, float]:
    """`penalty` and samples - free; where small weights leave next to nothing of that, no penalty and the samples."""
    left = samples - free
    return (penalty, left) if left > 0.1 * samples else (0 * penalty, max(samples, np.finfo(float).tiny))


def reciprocal(x: Floats) -> Floats:
    """1/x, and 0 for 0."""
    return np.divide(1.0, x, out=np.zeros_like(x), where=x > 0)
