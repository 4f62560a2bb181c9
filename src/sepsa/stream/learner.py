"""An engine for raw data: it finds the scales of inputs and targets itself, and learning stays exact.

The first rows are kept. Whenever their number is a power of two, up to `WARM_UP`, the scales are taken from all of
them, and they are learned again from the start, at less than twice the cost of learning them once. From then on the
scales stand, so the head's curvature is that of the features as they are: a scaler that went on moving would bend the
features under it. What is constant in the first rows gets its scale from the first value that differs
(`kernels.scale_constant_inputs`).

Targets are measured from the first one seen, and the head has no scale: its prior is zero, so that the fit to c·y is c
times the fit to y. Only the body's loss is divided by the targets' variance.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add, sub
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sepsa.states import schema
from sepsa.stream.engine import Engine, Floats, RowBuffer, one_of

WARM_UP = 256
HUGE = 1e100  # so that squares, and their weighted sums, stay finite


class Learner:
    """A stream learner on raw rows of numbers; NaN in an input stands for a value that is missing, and is its mean.

    `regression` measures targets from the first one and scales the body's loss; class indicators need neither.
    Every method that changes it leaves it as it was before or as it is after, whatever interrupts it.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        regression: bool,
        missing: str = "mean",
        seed: int | None = 0,
        **options: Any,
    ) -> None:
        self.regression, self.options = regression, options
        self.missing = one_of("missing", missing, {"auto": None, "zero": None, "mean": None})
        self.robust = options.get("loss") == "huber"
        # Drawn once, because the warm-up starts the same body anew several times.
        self.seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
        self.engine = self._new_engine(inputs, outputs)
        self.offset = np.zeros(outputs)
        self.rows = 0
        self._X: Floats = np.empty((0, inputs))  # the first rows, while the scales are not fixed
        self._Y: Floats = np.empty((0, outputs))
        self._weight: Floats = np.empty(0)
        self._buffers: list[RowBuffer] = []

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_buffers": []}

    def _new_engine(self, inputs: int, outputs: int) -> Engine:
        engine = Engine(inputs, outputs, standardize=True, seed=self.seed, classes=not self.regression, **self.options)
        if not self.regression:
            engine.set_output_weights(1.0)
        return engine

    @property
    def warm(self) -> bool:
        """Whether the scales are fixed."""
        return self.rows >= WARM_UP

    def copy(self) -> Learner:
        """Another learner in the same state."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)  # arrays are replaced, never written to, but for the engine's
        other.engine, other._buffers = self.engine.copy(), []
        return other

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """All that a further row depends on, as plain data; a learner that loads it goes on bit for bit."""
        return {
            "regression": self.regression,
            "seed": self.seed,
            "rows": self.rows,
            "offset": self.offset.copy(),
            "warm_up": {"X": self._X.copy(), "Y": self._Y.copy(), "weight": self._weight.copy()},
            "engine": self.engine.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any], entry: str = "state_dict") -> None:
        """Continue from such a state. Whole, or ValueError naming the entry and nothing."""
        keys = {"regression", "seed", "rows", "offset", "warm_up", "engine"}
        new = schema.read(entry, state_dict, keys)
        new.equal("regression", self.regression)
        other = self.copy()
        other.engine.load_state_dict(new["engine"], new.path("engine"))
        d, m = other.engine.inputs, other.engine.outputs
        other.seed = new.integer("seed")
        other.rows = new.integer("rows")
        other.offset = new.array("offset", (m,))
        first = new.entries("warm_up", {"X", "Y", "weight"})
        n = 0 if other.warm else other.rows
        other._X = first.array("X", (n, d), missing=True)
        other._Y = first.array("Y", (n, m))
        other._weight = first.array("weight", (n,), low=0.0)
        self.__dict__.update(other.__dict__)

    # ------------------------------------------------------------------ learning

    def learn(self, X: Floats, Y: Floats, weight: Floats | None = None) -> Floats:
        """Learn rows in order; returns the predictions (n, outputs) made before each batch was learned."""
        weight = np.ones(len(X)) if weight is None else weight
        if self.warm:
            return self._engine_learn(X, Y, weight)
        other = self.copy()
        out = other._learn_first_rows(X, Y, weight)
        self.__dict__.update(other.__dict__)
        return out

    def _learn_first_rows(self, X: Floats, Y: Floats, weight: Floats) -> Floats:
        out = np.empty_like(Y)
        batch = self.engine.batch_size
        at = 0
        while at < len(X) and not self.warm:
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
                self._relearn()
            at = some.stop
        if self.warm:
            self._X, self._Y, self._weight = self._X[:0], self._Y[:0], self._weight[:0]
            out[at:] = self._engine_learn(X[at:], Y[at:], weight[at:])
        return out

    def _relearn(self) -> None:
        """Learn all first rows from the start, at the scales they have together."""
        losses = self.engine.calibration_losses() if isinstance(self.engine, Engine) else None
        self.engine = self._new_engine(self.engine.inputs, self.engine.outputs)
        self._fit_scales(self._X, self._Y, self._weight)
        self._engine_learn(self._X, self._Y, self._weight)
        if losses is not None:
            self.engine.set_calibration_losses(losses)  # those of what was said, not of the second time

    def _fit_scales(self, X: Floats, Y: Floats, weight: Floats) -> None:
        """Mean and deviation of each input, variance of each target, over these rows; of a robust learner, over what
        is plausible in them, and with the range and quantiles by which it tells what is."""
        if self.robust:
            X, Y = trimmed(X), trimmed(Y) if self.regression else Y
            usual = np.median(np.minimum(weight, HUGE))
            weight = np.where(weight > 10 * usual, usual, np.maximum(weight, 0.1 * usual))
        mean, variance = moments(X, weight)
        sparse = self.zero_if_missing(X)
        mean, variance = np.where(sparse, 0.0, mean), np.where(sparse, mean**2 + variance, variance)
        scale = reciprocal(np.sqrt(variance))
        self.engine.set_scaling(mean, scale)
        if self.regression:
            self.engine.set_output_weights(reciprocal(moments(Y, weight)[1]))
        if self.robust:
            self.offset = moments(Y, weight)[0] if self.regression else self.offset
            self.engine.set_typical_inputs(np.minimum(quantiles_of_sizes((X - mean) * scale, [0.5])[:, 0], 4.0))
            self.engine.set_typical_weight(float(weight.mean()))
            if self.regression:
                off = Y - self.offset
                self.engine.set_error_quantiles(quantiles_of_sizes(off, [0.5, 0.8, 0.9]))
                self.engine.set_target_range(np.nanmin(off, 0), np.nanmax(off, 0))

    def fit_scales(self, X: Floats, Y: Floats, weight: Floats) -> None:
        """Fix the scales by all these rows before any is learned; `learn` then takes them in any order."""
        self.rows = max(WARM_UP, len(X))
        if self.regression and not self.robust:
            self.offset = moments(Y, weight)[0]
        self._fit_scales(X, Y, weight)

    def zero_if_missing(self, X: Floats) -> NDArray[np.bool_]:
        """In which columns a missing value stands for zero, not for the mean.

        What is missing is seen as zero by the network in either case: such a column is measured from zero, in units of
        its root mean square, and others from their mean, in units of their deviation.
        """
        there = ~np.isnan(X)
        if self.missing == "mean" or there.all():
            return np.zeros(X.shape[1], bool)
        some = np.array(~there.all(0) & there.any(0), dtype=bool)
        if self.missing == "zero":
            return some
        share = there.mean(0)
        for j in np.flatnonzero(some):
            some[j] = is_indicator(X[there[:, j], j], share[j])
        return some

    def noise_variance(self) -> Floats:
        """The variance (outputs,) of targets about predictions, from the errors made before learning."""
        return self.engine.noise_variance()

    def set_effective_samples(self, samples: float, noise: Floats) -> None:
        """Let what the head knows stand for so many samples, and their errors for this noise variance (outputs,)."""
        self.engine.set_effective_samples(samples, noise)

    def learn_row(self, x: Sequence[float], y: Sequence[float], weight: float = 1.0) -> None:
        """`learn` for one row of a positive weight, at the price of the kernel."""
        if self.rows < WARM_UP:
            self.learn(np.array([x], np.float64), np.array([y], np.float64), np.array([weight], np.float64))
            return
        buffers = self._buffers
        row = buffers.pop() if buffers else RowBuffer(self.engine)
        row.write(row.values, 0, *x, *map(sub, y, self.offset.tolist()), weight)
        self.engine.learn_row(row)
        buffers.append(row)

    def predict_row(self, x: Sequence[float]) -> list[float]:
        """`predict` for one row, at the price of the kernel; many threads may at once."""
        buffers = self._buffers
        try:
            row = buffers.pop()
        except IndexError:
            row = RowBuffer(self.engine)
        row.write_x(row.values, 0, *x)
        self.engine.predict_row(row)
        out = list(map(add, row.out.ravel().tolist(), self.offset.tolist()))
        buffers.append(row)
        return out

    def _engine_learn(self, X: Floats, Y: Floats, weight: Floats) -> Floats:
        Y = np.clip(Y, -HUGE, HUGE) if self.robust else Y
        return self.engine.learn(X, Y - self.offset, weight) + self.offset

    # ------------------------------------------------------------------ prediction

    def predict(self, X: Floats) -> Floats:
        """The predictions (n, outputs)."""
        return self.engine.predict(X) + self.offset

    def predict_with_leverage(self, X: Floats) -> tuple[Floats, Floats]:
        """The predictions (n, outputs) and φᵀBφ (n,)."""
        mean, leverage = self.engine.predict_with_leverage(X)
        return mean + self.offset, leverage

    # ------------------------------------------------------------------ growth

    def add_inputs(self, mean: Floats, scale: Floats, typical: Floats | float = 0.7) -> None:
        """More inputs, missing in all rows so far, with these means, scales and typical distances in such units."""
        other, old = self.copy(), self.engine.inputs
        other.engine.resize(old + len(mean), self.engine.outputs)
        other.engine.set_scaling(mean, scale, first=old)
        other.engine.set_typical_inputs(typical, first=old)
        other._X = np.concatenate([self._X, np.full((len(self._X), len(mean)), np.nan)], 1)
        self.__dict__.update(other.__dict__)

    def add_outputs(self, count: int) -> None:
        """More outputs, whose targets were zero in all rows so far."""
        other = self.copy()
        other.engine.resize(self.engine.inputs, self.engine.outputs + count)
        if not self.regression:
            other.engine.set_output_weights(1.0)
        other.offset = np.concatenate([self.offset, np.zeros(count)])
        other._Y = np.concatenate([self._Y, np.zeros((len(self._Y), count))], 1)
        self.__dict__.update(other.__dict__)


def moments(X: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """Weighted mean and variance of each column over the values that are not missing; 0 where all are."""
    there = ~np.isnan(X)
    w = weight[:, None] * there
    total = np.maximum(w.sum(0), np.finfo(float).tiny)
    first = np.where(there.any(0), X[there.argmax(0), np.arange(X.shape[1])], 0.0)
    off = np.where(there, X - first, 0.0)  # from the first value, so that a constant has exactly no deviation
    shift = (w * off).sum(0) / total
    return first + shift, (w * np.where(there, off - shift, 0.0) ** 2).sum(0) / total


def is_indicator(values: Floats, share: float) -> bool:
    """Whether values that came in this share of the rows are indicators or counts, which are absent at zero.

    They are integers from 1 on, 1 more than once in a while, and never 0; or any numbers but 0 that come seldom.
    """
    if not values.size or (values == 0).any():
        return False
    counts = (values >= 1).all() and (values == np.floor(values)).all() and (values == 1).mean() >= 0.25
    return bool(counts or share < 0.1)


def trimmed(X: Floats) -> Floats:
    """X with NaN where a value lies more than 30 times as far from its column's median as the others do as a rule.

    As a rule: the median distance of those that differ from the median at all, so that a rare indicator stays.
    """
    X = np.clip(X, -HUGE, HUGE)
    off = np.abs(X - column_quantiles(X, [0.5])[:, 0])
    usual = quantiles_of_sizes(off, [0.5])[:, 0]
    return np.where(off > 30 * usual, np.nan, X)


def quantiles_of_sizes(X: Floats, levels: list[float]) -> Floats:
    """The quantiles (columns, levels) of |x| in each column over what is neither missing nor zero; 0 where all is."""
    sizes = np.abs(X)
    return column_quantiles(np.where(sizes > 0, sizes, np.nan), levels)


def column_quantiles(X: Floats, levels: list[float]) -> Floats:
    """The quantiles (columns, levels) of what is not missing in each column, each a value of it; 0 where all is."""
    ordered = np.sort(X, axis=0)  # NaN comes last
    there = (~np.isnan(X)).sum(0)
    at = np.minimum((np.array(levels) * there[:, None]).astype(int), np.maximum(there - 1, 0)[:, None])
    return np.where(there[:, None] > 0, ordered[at, np.arange(X.shape[1])[:, None]], 0.0)


def reciprocal(x: Floats) -> Floats:
    """1/x, and 0 for 0 and for what has no finite reciprocal worth the name."""
    return np.divide(1.0, x, out=np.zeros_like(x), where=x > 1e-290)
