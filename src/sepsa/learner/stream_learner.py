"""The learner of raw rows: an engine, and the scales of inputs and targets, which the first rows determine.

The first rows are kept. Whenever their number is a power of two, up to `WARM_UP`, the scales are computed from all of
them, and they are learned again from the start, at less than twice the cost of learning them once. Then the scales are
fixed: a scaler that changed later would change the features under the head's curvature. An input that is constant in
the first rows gets its scale from the first value that differs (`kernels.robust.scale_constant_inputs`). The same rows
determine the order in which the engine sees the inputs, because its random weights go by position: the order in which
the inputs come has no influence.

Targets are measured from the first one seen, and the head has no scale: its prior is zero, so that the fit to c·y is c
times the fit to y. Only the body's loss is divided by the targets' variance.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Hashable, Sequence
from operator import add, sub
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sepsa.interrupt import DeferredInterrupt, whole_change
from sepsa.learner.arithmetic.robust import HUGE
from sepsa.learner.engine import Engine
from sepsa.learner.memory.parts import Floats
from sepsa.learner.rows import column_parts, row_parts
from sepsa.learner.scales import (
    column_quantiles,
    first_excess,
    is_indicator,
    moments,
    order_of_columns,
    quantiles_of_sizes,
    reciprocal,
    scaled_as_they_came,
    trimmed,
)
from sepsa.states import schema
from sepsa.validation import one_of

WARM_UP = 256  # rows that determine the scales
TELL = 256  # rows
SETTLED = 1000  # rows, of all passes, after which the typical sizes of errors are known
MANY = 1 / 20  # share of the rows, bounded, from which on they are hardly outliers
ROWS_TO_RECOGNIZE = 8  # rows by which a running scaler before the learner is recognized


class NewInput(NamedTuple):
    """An input that enters at this row, with its mean, its scale and its typical distance from the mean."""

    row: int
    name: Hashable
    mean: float
    scale: float  # 0: the first value that differs from the mean sets it
    typical: float = 0.7


class FirstRows(NamedTuple):
    """The rows learned while the scales are not fixed, without those of weight zero."""

    X: Floats
    Y: Floats
    weight: Floats


class StreamLearner:
    """A learner of raw rows of numbers, one after another; NaN in an input is a missing value.

    `regression` measures targets from the first one and scales the body's loss; class indicators need neither. With
    `names` of the inputs, the engine sees them in the order of their values in the first rows, and those that are equal
    there in the order of their names; without, as they come.
    `options` are the engine's. With `tells` it warns, once, where many rows are bounded. A method that fails or is
    interrupted leaves the learner in the state before or after it.
    """

    order: NDArray[np.intp] | None = None  # the input in each place of the engine; None: as they come
    names: Sequence[Any] | None = None
    learns_whole = True  # a call of `learn` that fails has learned nothing
    fixed = 0  # the number of rows by which the scales are fixed
    _untold = 0  # rows since it was looked whether many are bounded

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        regression: bool,
        missing: str = "mean",
        seed: int | None = 0,
        names: Sequence[Any] | None = None,
        tells: bool = True,
        **options: Any,
    ) -> None:
        self.names, self.tells = names, tells
        self.regression, self.options = regression, options
        self.missing = one_of("missing", missing, ("auto", "zero", "mean"))
        # Drawn once, because the warm-up starts from the same body several times.
        self.seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
        self.engine = self._new_engine(inputs, outputs)
        self.offset = np.zeros(outputs)
        self._first = FirstRows(np.empty((0, inputs)), np.empty((0, outputs)), np.empty(0))

    def _new_engine(self, inputs: int, outputs: int) -> Engine:
        options = {"standardize": True, "classes": not self.regression, "seed": self.seed} | self.options
        engine = Engine(inputs, outputs, **options)
        if not self.regression:
            engine.set_output_weights(1.0)
        return engine

    @property
    def rows(self) -> int:
        """The number of rows learned, as far as they determine scales."""
        return self.fixed or len(self._first.X)

    def copy(self) -> StreamLearner:
        """Another learner in the same state."""
        other = copy.copy(self)  # which shares arrays that are replaced, never written to
        other.engine = self.engine.copy()
        return other

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """The state as plain data; a learner that loads it continues bit for bit."""
        return {
            "regression": self.regression,
            "seed": self.seed,
            "rows": self.rows,
            "offset": self.offset,
            "warm_up": self._first._asdict(),
            "engine": self.engine.state_dict(),
            "order": self.order,
        }

    def load_state_dict(self, state_dict: dict[str, Any], entry: str = "state_dict") -> None:
        """Continue from the result of `state_dict`; a ValueError names the wrong entry.

        Only a new learner loads, which is dropped after an error.
        """
        new = schema.read(entry, state_dict, set(self.state_dict()))
        new.equal("regression", self.regression)
        self.engine.load_state_dict(new["engine"], new.path("engine"))
        d, m, rows, first = self.engine.inputs, self.engine.outputs, new["rows"], new.mapping("warm_up")
        self.seed, self.order, self.offset = new["seed"], new["order"], new.array("offset", (m,))
        self.fixed, n = (rows, 0) if rows >= WARM_UP else (0, rows)
        shapes = {"X": (n, d), "Y": (n, m), "weight": (n,)}
        self._first = FirstRows(*(first.array(name, shape) for name, shape in shapes.items()))

    # ------------------------------------------------------------------ learning

    def learn(self, X: Floats, Y: Floats, weight: Floats | None = None) -> Floats:
        """Learn rows in order; returns the predictions (n, outputs) made before each batch was learned."""
        weight = np.ones(len(X)) if weight is None else weight
        if self.fixed:
            return self._engine_learn(X, Y, weight)
        if 0 < self.rows < self._due - len(X) and len(X) <= self.engine.batch_size:
            with DeferredInterrupt():  # one step, which is refused before any change
                return self._learn_first_rows(X, Y, weight)
        with whole_change(self) as other:
            return other._learn_first_rows(X, Y, weight)

    @property
    def _due(self) -> int:
        """The number of rows at which the scales are computed again, the next power of two."""
        return 1 << self.rows.bit_length()

    @property
    def hardly_outliers(self) -> str:
        """What to say where so many rows are bounded that they are hardly outliers; empty elsewhere."""
        share = self.engine.bounded if self.engine.memory("COUNTS", "network")["rows"] >= SETTLED else 0.0
        return f"{share:.1%} of the rows lie beyond the bounds against outliers and count less" if share > MANY else ""

    def tell(self, rows: int) -> None:
        """Warn once where many rows are bounded, after so many further rows; it is looked at after `TELL` of them."""
        self._untold += rows
        if self.tells and self._untold >= TELL:
            self._untold = 0
            if said := self.hardly_outliers:
                self.tells = False
                cure = "if these numbers are right, and NaN where one such as -9999 means a missing value"
                warnings.warn(f"{said}: give loss='squared' {cure}", UserWarning, stacklevel=6)

    def _learn_first_rows(self, X: Floats, Y: Floats, weight: Floats) -> Floats:
        out, batch, at = np.empty_like(Y), self.engine.batch_size, 0
        while at < len(X) and not self.fixed:
            before, due = self.rows, self._due
            some = slice(at, at + max(batch, -(-(due - before) // batch) * batch))
            rows = X[some], Y[some], weight[some]
            seen = rows[2] > 0
            pairs = zip(self._first, rows, strict=True)
            first = FirstRows(*(np.concatenate([old, new[seen]]) for old, new in pairs))
            begins = before == 0 and self.regression and seen.any()
            if begins:
                self.offset = first.Y[0].copy()
            made = self._engine_learn(*rows)
            self._first, out[some], at = first, 0.0 if begins else made, some.stop
            if before < ROWS_TO_RECOGNIZE <= self.rows and scaled_as_they_came(first.X[:ROWS_TO_RECOGNIZE]):
                warnings.warn(
                    "the first rows look like the output of a running scaler, such as River's StandardScaler; its "
                    "scales change with every row, so that what was learned does not hold for later rows: remove it, "
                    "since the model scales raw features itself",
                    UserWarning,
                    stacklevel=5,
                )
            if self.rows >= due:
                self._relearn(first)
            if self.rows >= WARM_UP:
                self.fixed, self._first = self.rows, FirstRows(*(rows[:0] for rows in first))
        if self.fixed:
            out[at:] = self._engine_learn(X[at:], Y[at:], weight[at:])
        return out

    def _relearn(self, first: FirstRows) -> None:
        """Learn all first rows from the start, at their common scales."""
        losses = self.engine.calibration_losses
        self.engine = self._new_engine(self.engine.inputs, self.engine.outputs)
        if self.names is not None:
            self.order = order_of_columns(first.X, self.names)
        self._fit_scales(self._in_order(first.X), first.Y, first.weight)
        self._engine_learn(*first)
        self.engine.calibration_losses[:] = losses  # of predictions made before the rows were learned at all

    def _fit_scales(self, X: Any, Y: Floats, weight: Floats) -> None:
        """Set the mean and deviation of each input and the variance of each target over these rows.

        A robust engine leaves out outliers, and gets the range and the quantiles by which it recognizes them.
        """
        robust = self.engine.robust
        if robust:
            usual = np.median(np.minimum(weight, HUGE))
            weight = np.where(weight > 10 * usual, usual, np.maximum(weight, 0.1 * usual))
            self.engine.memory("COUNTS", "network")["weight"] = weight.mean()
        parts = [self._input_scales(part, weight) for part in column_parts(X)]
        self.engine.set_scaling(*(np.concatenate(part) for part in zip(*parts, strict=True)))
        if self.regression:
            Y = trimmed(Y) if robust else Y
            mean, variance = moments(Y, weight)
            self.engine.set_output_weights(reciprocal(variance))
            if robust:
                self.offset, off = mean, Y - mean
                quantiles = quantiles_of_sizes(off, [0.5, 0.8, 0.9])
                self.engine.set_plausible_targets(quantiles, np.nanmin(off, 0), np.nanmax(off, 0))

    def _input_scales(self, X: Floats, weight: Floats) -> tuple[Floats, ...]:
        """The mean and scale of each column, its typical standardized distance from the mean, and its median.

        The typical distance, which a robust engine needs, is the median over values that differ from the column's
        median: a value that most rows have says nothing of how far the others lie.
        """
        raw, X = np.clip(X, -HUGE, HUGE), trimmed(X) if self.engine.robust else X
        mean, variance = moments(X, weight)
        sparse = self.zero_if_missing(X)
        mean, variance = np.where(sparse, 0.0, mean), np.where(sparse, mean**2 + variance, variance)
        scale = reciprocal(np.sqrt(variance))
        if not self.engine.robust:
            return mean, scale, np.zeros_like(mean), mean, np.zeros_like(mean)
        centre = column_quantiles(X, [0.5])[:, 0]
        off = np.where(centre == X, 0.0, (X - mean) * scale)
        typical = quantiles_of_sizes(off, [0.5])[:, 0]
        return mean, scale, typical, centre, first_excess((raw - mean) * scale, typical)

    def fit_scales(self, X: Any, Y: Floats, weight: Floats) -> None:
        """Fix the scales by all these rows, dense or sparse, before any is learned; `learn` takes them in any order."""
        self.fixed = max(WARM_UP, len(Y))
        if self.regression and not self.engine.robust:
            self.offset = moments(Y, weight)[0]
        self._fit_scales(X, Y, weight)

    def fit_experts(self, X: Any, Y: Floats, weight: Floats) -> None:
        """Fit the experts that learn a table at once to rows, dense or sparse, after `learn`."""
        Y = self._from_offset(Y)
        self.engine.fit_experts((part, Y[some], weight[some]) for some, part in row_parts(X))

    def take_network(self, other: StreamLearner) -> None:
        """Continue with the scales and the network of a learner that differs by its experts alone."""
        self.offset = other.offset
        self.engine.take_network(other.engine)

    def zero_if_missing(self, X: Floats) -> Any:
        """In which columns a missing value means zero, not the mean.

        The network sees a missing value as zero in either case: such a column is measured from zero, in units of its
        root mean square, and others from their mean, in units of their deviation.
        """
        there = ~np.isnan(X)
        some: Any = ~there.all(0) & there.any(0) & (self.missing != "mean")
        if self.missing == "auto":
            for j in np.flatnonzero(some):
                some[j] = is_indicator(X[there[:, j], j], there[:, j].mean())
        return some

    def noise_variance(self) -> Floats:
        """The variance (outputs,) of targets about predictions, from the errors made before learning."""
        return self.engine.noise_variance()

    def learn_row(self, x: Sequence[float], y: Sequence[float], weight: float = 1.0) -> None:
        """Learn one row of a positive weight, once the scales are fixed at little more than the cost of the kernel.

        Of a learner without `names`, which sees the inputs as they come.
        """
        if self.fixed:
            self.engine.learn_row(x, map(sub, y, self.offset.tolist()), weight)
        else:
            self.learn(np.array([x], np.float64), np.array([y], np.float64), np.array([weight], np.float64))
        self.tell(1)

    def predict_row(self, x: Sequence[float]) -> list[float]:
        """The prediction for one row, as for `learn_row`; threads may call it at once."""
        return list(map(add, self.engine.predict_row(x), self.offset.tolist()))

    def _in_order(self, X: Floats) -> Floats:
        """The rows as the engine sees them."""
        return X if self.order is None else X[:, self.order]

    def _engine_learn(self, X: Floats, Y: Floats, weight: Floats) -> Floats:
        return self.engine.learn(self._in_order(X), self._from_offset(Y), weight) + self.offset

    def _from_offset(self, Y: Floats) -> Floats:
        """Targets as the engine sees them."""
        return (np.clip(Y, -HUGE, HUGE) if self.engine.robust else Y) - self.offset

    def learn_pass(self, X: Floats, Y: Floats, weight: Floats, forgetting: float, every: int) -> Floats:
        """Learn rows after `fit_scales`, where the head forgets at once by as much as `every` batches should."""
        return self.engine.learn_pass(self._in_order(X), self._from_offset(Y), weight, forgetting, every) + self.offset

    # ------------------------------------------------------------------ prediction

    def predict(self, X: Any, leverage: Floats | None = None) -> Floats:
        """The predictions (n, outputs) for rows, dense or sparse; fills `leverage` (n,) with φᵀBφ."""
        parts = [
            self.engine.predict(self._in_order(part), None if leverage is None else leverage[some])
            for some, part in row_parts(X)
        ]
        return np.concatenate(parts) + self.offset

    def predict_with_leverage(self, X: Any) -> tuple[Floats, Floats]:
        """The predictions (n, outputs) and φᵀBφ (n,), by which the variance of a prediction exceeds the noise's."""
        leverage = np.empty(X.shape[0])
        return self.predict(X, leverage), leverage

    def answers(self, X: Any) -> Floats:
        """The answers (n, experts, outputs) of all experts to rows, dense or sparse, in deviations of the outputs."""
        return np.concatenate([self.engine.answers(part) for _, part in row_parts(X)])

    def predict_with_deviation(self, X: Any) -> tuple[Floats, Floats]:
        """The predictions (n, outputs), and the deviations √(σ² (1 + φᵀBφ)) of targets about them."""
        mean, leverage = self.predict_with_leverage(X)
        return mean, np.sqrt(self.noise_variance() * (1 + leverage)[:, None])

    # ------------------------------------------------------------------ growth

    def grow(self, new_inputs: Sequence[NewInput], outputs: int) -> None:
        """Add inputs, missing in all rows so far, and outputs up to this number, whose targets were zero.

        An error on the way leaves a learner that is to be dropped: let a copy grow.
        """
        old, added, more = self.engine.inputs, len(new_inputs), max(0, outputs - self.engine.outputs)
        if not added + more:
            return
        self.engine.resize(old + added, self.engine.outputs + more)
        mean, scale, typical = np.array([new[2:] for new in new_inputs], np.float64).reshape(-1, 3).T
        self.engine.set_scaling(mean, scale, typical, first=old)
        if not self.regression:
            self.engine.set_output_weights(1.0)
        self.offset = np.pad(self.offset, (0, more))
        X, Y, weight = self._first
        X = np.pad(X, [(0, 0), (0, added)], constant_values=np.nan)
        self._first = FirstRows(X, np.pad(Y, [(0, 0), (0, more)]), weight)
