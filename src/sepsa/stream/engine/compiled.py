"""The compiled engine: SepSA for multilayer perceptrons, without torch in the loop."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np

from sepsa.heads.protocols import NotFinite
from sepsa.jit import announce_compilation
from sepsa.states import schema
from sepsa.states.plain import generator_state, read_generator
from sepsa.stream.engine import kernels, layout
from sepsa.stream.engine.kernels.body import FOURIER
from sepsa.stream.engine.layout import Layout
from sepsa.stream.engine.options import ACTIVATIONS, LOSSES, OPTIMIZERS, candidate_heads, head_and_optimizer
from sepsa.stream.engine.protocol import FitPlan, Floats, StreamEngine, residual_degrees
from sepsa.validation import at_least, in_range, not_negative, one_of

NINE_TENTHS = 1.6448536269514722  # standard deviations within which nine tenths of a normal distribution lie
NORMAL_QUANTILES: Floats = np.array([0.6744897501960817, 1.2815515655446004, NINE_TENTHS])
BODY_PARTS = ("THETA", "FIRST", "SECOND")  # in the body's dtype
POSITIVE = ("D", "RIDGE")
NOT_NEGATIVE = ("SECOND", "ENERGY", "SCALE", "TYPICAL", "USUAL", "LATE", "GAIN", "ERROR", "NUMBERS", "COUNTS")
DISCOUNT = 0.99  # per row, of the losses by which heads are weighted
POWER = 0.5  # of the likelihood in a head's weight: below 1 because errors of neighbouring rows are alike
BANDWIDTH = 1.4  # of Fourier features, over standardized inputs


class Engine(StreamEngine):
    """A multilayer perceptron with a recursive-least-squares head, learned sample by sample in compiled code.

    Choose it where samples come one at a time and the network is small; `SepSARegressor` and `SepSAClassifier` use it.
    It equals `SepSA` with `RLS(..., bias_ridge="ridge")` on the same network in float64, step by step; `learn` returns
    the prediction made before each update.

    `loss="huber"` bounds the influence of a row: an error counts as if it were at most 4.5 times the median error, and
    less and less where it is much larger; an input is clipped at 16 times its typical distance from the mean, and a row
    beyond that weighs less; a weight above ten typical ones is replaced by a typical one; predictions lie at most half
    the range of plausible targets outside it. `outliers` counts the rows to which one of these applied. `ridge="auto"`
    and `forgetting="auto"` let several heads share the body (`candidate_heads`): predictions are their mixture,
    weighted by their recent errors; `chosen` is the one with the largest weight. `classes` says that targets are
    indicators, which are bounded, and keeps the log-losses by which scores become probabilities
    (`sepsa.stream.calibration`).

    `skip` lets the head see the inputs beside the last layer. With `standardize` the network sees (x - mean) · scale
    (`set_scaling`), and each output's squared error has a weight of its own in the body's loss (`set_output_weights`);
    a scale or weight of zero belongs to an input or target that has been constant so far, and is set by the first value
    that differs.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        hidden: tuple[int, ...] = (50,),
        *,
        activation: str = "relu",
        optimizer: str = "adam",
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        ridge: float | str = 1.0,
        forgetting: float | str = 1.0,
        loss: str = "squared",
        classes: bool = False,
        batch: int = 1,
        skip: bool = False,
        standardize: bool = False,
        dtype: type[np.floating[Any]] = np.float32,
        seed: int | None = 0,
        **optimizer_options: float,
    ) -> None:
        if dtype not in (np.float32, np.float64):
            raise ValueError(f"dtype must be numpy.float32 or numpy.float64, got {dtype!r}")
        self._dtype_of_body = np.empty(0, dtype)  # an empty array, by which the kernels know the dtype
        self._heads: list[list[Any]] = [list(head) for head in candidate_heads(ridge, forgetting, hidden, skip)]
        subsets = tuple(subset for subset, _, _ in self._heads)
        self._layout = Layout(inputs, outputs, tuple(hidden), subsets, self._dtype_of_body.itemsize)
        self._rng = np.random.default_rng(seed)
        code, defaults = OPTIMIZERS[one_of("optimizer", optimizer, OPTIMIZERS)]
        unknown = sorted(set(optimizer_options) - set(defaults))
        if unknown:
            raise TypeError(f"optimizer {optimizer!r} takes {sorted(defaults) or 'no options'}, got {unknown}")
        options = defaults | optimizer_options
        self._options: Floats = np.array(
            [
                in_range("lr", lr, 0.0, math.inf),
                not_negative("weight_decay", weight_decay),
                *(options.get(name, 0.0) for name in ("momentum", "beta2", "eps", "nesterov")),
                DISCOUNT,
                POWER,
                max(keeps for _, _, keeps in self._heads),
            ]
        )
        L = self._layout.numbers
        L[layout.L_ACTIVATION] = ACTIVATIONS[one_of("activation", activation, ACTIVATIONS)]
        L[layout.L_OPTIMIZER] = code
        L[layout.L_STANDARDIZE] = standardize
        L[layout.L_BATCH] = at_least("batch", batch, 1)
        L[layout.L_ROBUST] = LOSSES[one_of("loss", loss, LOSSES)]
        L[layout.L_CLASSES] = classes
        schema.check_memory("a network of this size", 8 * self._layout.size)
        self._state = np.zeros(self._layout.size)
        self._workspace = np.zeros(self._layout.workspace(batch))
        self._buffers: list[RowBuffer] = []
        for h, (_, strength, keeps) in enumerate(self._heads):
            self._view("D", h)[:] = 1 / strength
            self._view("RIDGE", h)[:] = strength
            numbers = self._view("NUMBERS", h)
            numbers[layout.H_FORGETTING], numbers[layout.H_RIDGE] = keeps, strength
            numbers[layout.H_WEIGHT] = 1 / len(self._heads)
        self._view("RANGE").reshape(-1, 2)[:] = 1.0, 0.0  # low above high: no target yet
        self._view("COUNTS")[[layout.C_BETA1_POWER, layout.C_BETA2_POWER]] = 1.0
        self._view("GAIN")[:] = 0.0 if standardize else 1.0
        self._view("SCALE")[:] = 0.0 if standardize else 1.0
        for weight, bias in self.layers():
            weight[:] = self._start_weights(weight.shape, weight.shape[1])
            if self._fourier:
                bias[:] = self._rng.uniform(0.0, 2 * math.pi, bias.shape)
            else:
                bias[:] = self._rng.normal(0.0, 0.5, bias.shape)  # spreads the kinks over the data

    @classmethod
    def options(cls, parameters: Mapping[str, Any], for_fit: bool) -> dict[str, Any]:
        """The options of a new engine from the parameters of a scikit-learn estimator, which are checked.

        With `for_fit`, rate, forgetting and batch are those of `partial_fit` after `fit`: at the rate by which a new
        body learns, single rows would change a fitted one too much.
        """
        sizes, activation, batch = (parameters[n] for n in ("hidden_layer_sizes", "activation", "batch_size"))
        options = head_and_optimizer(parameters, 1e-4 if for_fit else 3e-3, one_head=for_fit)
        default = "gelu" if for_fit else "fourier"
        if isinstance(sizes, str) and sizes == "auto":
            sizes = (50, 50) if for_fit else (64,)
        return options | {
            "batch": 1 if batch == "auto" else at_least("batch_size", batch, 1),
            "loss": "squared" if for_fit else parameters["loss"],
            "activation": default if activation == "auto" else one_of("activation", activation, ACTIVATIONS),
            "hidden": tuple(at_least("hidden_layer_sizes", width, 1) for width in widths(sizes)),
            "skip": True,
        }

    @classmethod
    def fit_plan(cls, parameters: Mapping[str, Any], inputs: int) -> FitPlan:
        sizes = parameters["hidden_layer_sizes"]
        layers = (50,) if isinstance(sizes, str) else widths(sizes)
        features = inputs + sum(layers[-1:]) + 1  # the curvature costs p², and the rest is little beside it
        linear = not len(layers)
        return FitPlan(linear, linear, min(1.0, (64 / features) ** 2), parallel=True)

    @classmethod
    def for_raw_rows(cls, inputs: int, outputs: int, *, classes: bool, seed: int, **options: Any) -> Engine:
        return cls(inputs, outputs, standardize=True, classes=classes, seed=seed, **options)

    @property
    def robust(self) -> bool:  # type: ignore[override]
        """Whether the loss is "huber"."""
        return bool(self._layout.numbers[layout.L_ROBUST])

    @property
    def _fourier(self) -> bool:
        return bool(self._layout.numbers[layout.L_ACTIVATION] == FOURIER)

    def _start_weights(self, shape: int | tuple[int, ...], inputs: int) -> Floats:
        """Random weights for units with these inputs: normal for Fourier features, else Kaiming uniform."""
        if self._fourier:
            return self._rng.normal(0.0, BANDWIDTH * math.sqrt(1 / inputs), shape)
        bound = math.sqrt(6 / inputs)
        return self._rng.uniform(-bound, bound, shape)

    # ------------------------------------------------------------------ properties

    @property
    def inputs(self) -> int:  # type: ignore[override]
        return self._layout.inputs

    @property
    def outputs(self) -> int:  # type: ignore[override]
        return self._layout.outputs

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        return int(self._layout.numbers[layout.L_BATCH])

    @property
    def samples(self) -> float:
        return float(self._view("NUMBERS", 0)[layout.H_SAMPLES])

    @property
    def steps(self) -> int:
        return int(self._state[self._layout.parts["COUNTS"][0] + layout.C_STEPS])

    @property
    def outliers(self) -> int:
        return int(self._view("COUNTS")[layout.C_OUTLIERS])

    @property
    def chosen(self) -> dict[str, Any]:
        """The head with the largest weight in predictions: its features, ridge and forgetting.

        `weights` are those of all heads; `since` is the step at which this one became the first.
        """
        counts = self._view("COUNTS")
        subset, ridge, forgetting = self._heads[int(counts[layout.C_BEST])]
        weights = [float(self._view("NUMBERS", h)[layout.H_WEIGHT]) for h in range(len(self._heads))]
        since = int(counts[layout.C_SINCE])
        return {"features": subset, "ridge": ridge, "forgetting": forgetting, "since": since, "weights": weights}

    def layers(self) -> list[tuple[Floats, Floats]]:
        """Weight (width, inputs) and bias (width,) of each hidden layer, as views in torch's shapes."""
        views, at, theta = [], 0, self._view("THETA")
        width = self.inputs
        for h in self._layout.hidden:
            weight = theta[at : at + width * h].reshape(width, h).T
            at += width * h
            views.append((weight, theta[at : at + h]))
            at, width = at + h, h
        return views

    @property
    def head(self) -> Floats:
        """W (outputs, features) of the first head, the bias its last column, as a view."""
        return self._view("W", 0).reshape(self.outputs, -1)

    def set_head(self, weights: Floats) -> None:
        """Set the head and with it the prior that the ridge pulls to."""
        self.head[:] = weights
        self._view("PRIOR", 0)[:] = self._view("W", 0)

    def covariance(self) -> Floats:
        """B (p, p), the inverse of the first head's curvature."""
        p = self._layout.head_features[0]
        U = np.eye(p)
        for j in range(1, p):
            U[:j, j] = self._view("U", 0)[j * (j - 1) // 2 : j * (j - 1) // 2 + j]
        return (U * self._view("D", 0)) @ U.T

    def objective(self) -> Floats:
        """The minimum (outputs,) of Σ ω e² + ridge |W - prior|² over the samples that the first head remembers."""
        return self._view("ENERGY", 0).copy()

    def scaling(self) -> tuple[Floats, Floats]:
        """Mean and scale (inputs,) by which the network sees (x - mean) · scale, as copies."""
        return self._view("MEAN").copy(), self._view("SCALE").copy()

    def set_scaling(self, mean: Floats, scale: Floats, first: int = 0) -> None:
        self._view("MEAN")[first:], self._view("SCALE")[first:] = mean, scale

    def set_typical_inputs(self, distances: Floats | float, first: int = 0) -> None:
        self._view("TYPICAL")[first:] = self._view("USUAL")[first:] = distances

    def output_weights(self) -> Floats:
        """The weight (outputs,) of each output's squared error in the body's loss, a copy."""
        return self._view("GAIN").copy()

    def set_output_weights(self, weights: Floats | float) -> None:
        self._view("GAIN")[:] = weights

    def schedule(self) -> tuple[float, float, int]:
        forgetting = float(self._view("NUMBERS", 0)[layout.H_FORGETTING])
        return float(self._options[layout.O_LR]), forgetting, self.batch_size

    def set_schedule(self, lr: float, forgetting: float, batch: int) -> None:
        self._options, numbers = self._options.copy(), self._layout.numbers.copy()  # a copy of the engine shares them
        self._options[layout.O_LR] = lr
        self._view("NUMBERS", 0)[layout.H_FORGETTING] = forgetting
        numbers[layout.L_BATCH] = batch
        self._layout = copy(self._layout)
        self._layout.numbers = numbers
        self._workspace = np.zeros(self._layout.workspace(batch))

    def noise_variance(self) -> Floats:
        """The variance (outputs,) of targets about predictions.

        With `loss="huber"` it is that of a normal distribution with the 90 % quantile of |error| of recent rows, for
        errors e/√(1 + φᵀBφ) made before learning. With `loss="squared"` it is that of ridge regression,

            σ² = (Σ e²/(1 + φᵀBφ) - Σ_j ridge_j |W_j - prior_j|²) / (n - tr BΦᵀΦ),

        since the errors e made before learning sum to the objective at its minimum, and BΦᵀΦ = I - B ridge.
        """
        if self.robust:
            return (self._view("ERROR").reshape(-1, 3)[:, 2] / NINE_TENTHS) ** 2
        penalty, degrees = self._penalty_and_residual_degrees()
        return np.maximum(self._view("ENERGY", 0) - penalty, 0.0) / degrees

    def set_effective_samples(self, samples: float, noise: Floats) -> None:
        passes = max(1.0, self.samples / samples)
        for h in range(len(self._heads)):
            self._view("D", h)[:] *= passes
            self._view("RIDGE", h)[:] /= passes
            self._view("NUMBERS", h)[[layout.H_SAMPLES, layout.H_RIDGE]] /= passes
        penalty, degrees = self._penalty_and_residual_degrees()
        self._view("ENERGY", 0)[:] = noise * degrees + penalty
        self._set_error_quantiles(np.sqrt(noise)[:, None] * NORMAL_QUANTILES)

    def _set_error_quantiles(self, quantiles: Floats) -> None:
        self._view("ERROR")[:] = quantiles.ravel()
        self._view("ERROR_RUN")[:] = 0.0

    def set_plausible_targets(self, errors: Floats, low: Floats, high: Floats) -> None:
        self._set_error_quantiles(errors)
        self._view("RANGE").reshape(-1, 2)[:] = np.stack([low, high], 1)

    def set_typical_weight(self, weight: float) -> None:
        self._view("COUNTS")[layout.C_WEIGHT] = weight

    def calibration_losses(self) -> Floats:
        return self._view("CALIBRATION").copy()

    def set_calibration_losses(self, losses: Floats) -> None:
        self._view("CALIBRATION")[:] = losses

    def _penalty_and_residual_degrees(self) -> tuple[Floats, float]:
        """The ridge's part of the objective (outputs,), and the samples less the degrees of freedom."""
        p = self._layout.head_features[0]
        ridge, D = self._view("RIDGE", 0), self._view("D", 0)
        column, row = np.tril_indices(p, -1)  # U's columns lie one after the other
        free = p - float(D @ ridge + (self._view("U", 0) ** 2 * ridge[row]) @ D[column])
        penalty = (self.head - self._view("PRIOR", 0).reshape(self.head.shape)) ** 2 @ ridge
        return residual_degrees(penalty, self.samples, free)

    def _view(self, name: str, head: int | None = None) -> Floats:
        """A part of the state by its name in `Layout`; with `head` a part of that head."""
        start, length = self._layout.parts[name if head is None else f"{name}{head}"]
        part = self._state[start : start + length]
        return part.view(self._dtype_of_body.dtype)[: self._layout.body] if name in BODY_PARTS else part

    def copy(self) -> Engine:
        other = object.__new__(Engine)
        other.__dict__.update(self.__dict__)
        other._state, other._workspace, other._buffers = self._state.copy(), np.zeros_like(self._workspace), []
        return other

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_buffers": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _buffers=[])  # engines of version 0.1 had none

    # ------------------------------------------------------------------ saving

    def _settings(self) -> dict[str, Any]:
        """The network's form and the options of learning, which a state that is loaded must share."""
        L = self._layout.numbers
        return {
            "hidden": list(self._layout.hidden),
            "heads": self._heads,
            "loss": "huber" if self.robust else "squared",
            "classes": bool(L[layout.L_CLASSES]),
            "dtype": self._dtype_of_body.dtype.name,
            "activation": next(name for name, code in ACTIVATIONS.items() if code == L[layout.L_ACTIVATION]),
            "optimizer": int(L[layout.L_OPTIMIZER]),
            "standardize": bool(L[layout.L_STANDARDIZE]),
            "batch": self.batch_size,
            "options": self._options.tolist(),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "settings": self._settings(),
            "inputs": self.inputs,
            "outputs": self.outputs,
            "arrays": {name: self._view(name).copy() for name in self._layout.parts},
            "generator": generator_state(self._rng),
        }

    def load_state_dict(self, state_dict: dict[str, Any], entry: str = "state_dict") -> None:
        new = schema.read(entry, state_dict, {"settings", "inputs", "outputs", "arrays", "generator"})
        settings = self._settings()
        saved = new.entries("settings", set(settings))
        for name, wanted in settings.items():
            saved.equal(name, wanted)
        other = self.copy()
        other._allocate(new.integer("inputs", 1), new.integer("outputs", 1))
        arrays = new.entries("arrays", set(other._layout.parts))
        for name in other._layout.parts:
            view = other._view(name)
            part = name.rstrip("0123456789")
            low = 0.0 if part in NOT_NEGATIVE else np.finfo(float).tiny if part in POSITIVE else -math.inf
            view[:] = arrays.array(name, view.shape, view.dtype, low=low)
        for h, p in enumerate(other._layout.head_features):
            if other._view("NUMBERS", h)[layout.H_CURSOR] >= p:
                raise ValueError(f"{arrays.path(f'NUMBERS{h}')} must point at one of {p} features")
        if other._view("COUNTS")[layout.C_BEST] >= len(self._heads):
            raise ValueError(f"{arrays.path('COUNTS')} must point at one of {len(self._heads)} heads")
        other._rng = read_generator(new.path("generator"), new["generator"])
        self.__dict__.update(other.__dict__)

    def _allocate(self, inputs: int, outputs: int) -> None:
        """Replace the state by zeros for these numbers of inputs and outputs."""
        old = self._layout
        self._layout = Layout(inputs, outputs, old.hidden, old.subsets, old.itemsize)
        self._layout.numbers[layout.L_SETTINGS] = old.numbers[layout.L_SETTINGS]
        schema.check_memory("a network of this size", 8 * self._layout.size)
        self._state = np.zeros(self._layout.size)
        self._workspace = np.zeros(self._layout.workspace(self.batch_size))

    # ------------------------------------------------------------------ growth

    def resize(self, inputs: int, outputs: int) -> None:
        """Add inputs or outputs as if they had been there, at zero, from the start.

        That is exact: an input at zero never moved the body or the head, and the head that fits a target of zero
        from a prior of zero is zero.
        """
        old = self._layout
        parts = {name: self._view(name) for name in old.parts}
        grown = self.copy()
        grown._rng = read_generator("generator", generator_state(self._rng))  # copies share one until it is drawn from
        grown._allocate(inputs, outputs)
        new, view = grown._layout, grown._view
        more = inputs - old.inputs
        for h, (before, p) in enumerate(zip(old.head_features, new.head_features, strict=True)):
            keep = np.r_[0 : before - 1, p - 1]  # new inputs come last but one, before the bias
            ridge = self._heads[h][1]
            for name, start in (("D", 1 / ridge), ("RIDGE", ridge)):
                view(name, h)[:] = start
                view(name, h)[keep] = parts[f"{name}{h}"]
            for name in ("W", "PRIOR"):
                rows = view(name, h).reshape(outputs, -1)
                rows[: old.outputs, keep] = parts[f"{name}{h}"].reshape(old.outputs, -1)
            U, old_U = view("U", h), parts[f"U{h}"]
            for j, column in enumerate(keep):
                U[column * (column - 1) // 2 + keep[:j]] = old_U[j * (j - 1) // 2 : j * (j - 1) // 2 + j]
            view("ENERGY", h)[: old.outputs] = parts[f"ENERGY{h}"]
            view("NUMBERS", h)[:] = parts[f"NUMBERS{h}"]
        cut = old.inputs * old.hidden[0] if old.hidden else 0  # the first layer's weights, input by input
        added = more * old.hidden[0] if old.hidden else 0
        for name in BODY_PARTS:
            view(name)[:cut], view(name)[cut + added :] = parts[name][:cut], parts[name][cut:]
        view("THETA")[cut : cut + added] = grown._start_weights(added, inputs)
        view("RANGE").reshape(-1, 2)[:] = 1.0, 0.0
        for name in (
            "MEAN", "SCALE", "TYPICAL", "TYPICAL_RUN", "USUAL", "LATE", "GAIN", "ERROR", "ERROR_RUN", "RANGE",
            "CALIBRATION", "COUNTS"
        ):  # fmt: skip
            view(name)[: parts[name].size] = parts[name]
        if not new.numbers[layout.L_STANDARDIZE]:
            view("SCALE")[:] = view("GAIN")[:] = 1.0
        self.__dict__.update(grown.__dict__)

    # ------------------------------------------------------------------ learning

    def learn(self, X: Floats, Y: Floats, sample_weight: Floats | None = None) -> Floats:
        """Learn the rows of X (n, inputs) and Y (n, outputs) in order; returns the predictions made before.

        The arrays are C-contiguous float64 and finite, which the interfaces check. Where the body has diverged
        `NotFinite` is raised and nothing changes.
        """
        announce_compilation(kernels.learn, "the stream engine")
        weights = np.ones(len(X)) if sample_weight is None else sample_weight
        out = np.empty((len(X), self.outputs))
        several = len(X) > self.batch_size
        state = self._state.copy() if several else self._state  # a single step is refused before any change
        done = kernels.learn(
            state, self._layout.numbers, self._options, self._dtype_of_body, X, Y, weights, out, self._workspace
        )
        if done < len(X):
            raise NotFinite(
                f"the network's output for sample {done} of this call is not finite: nothing was learned; "
                "lower lr, or rescale the inputs"
            )
        self._state = state
        return out

    def learn_row(self, x: Sequence[float], y: Iterable[float], weight: float) -> None:
        """Learn one row of a positive weight, without allocating arrays."""
        buffers = self._buffers
        row = buffers.pop() if buffers else RowBuffer(self)
        row.write(row.values, 0, *x, *y, weight)
        if not kernels.learn.overloads:
            announce_compilation(kernels.learn, "the stream engine")
        if not kernels.learn(
            self._state, self._layout.numbers, self._options, self._dtype_of_body,
            row.x, row.y, row.weight, row.out, self._workspace,
        ):  # fmt: skip
            self.learn(row.x, row.y, row.weight)  # raises NotFinite
        buffers.append(row)

    def predict(self, X: Floats) -> Floats:
        return self._predict(X, np.empty(0))

    def predict_with_leverage(self, X: Floats) -> tuple[Floats, Floats]:
        leverage = np.empty(len(X))
        return self._predict(X, leverage), leverage

    def predict_row(self, x: Sequence[float]) -> list[float]:
        """The prediction for one row, without allocating arrays; threads may call it at the same time."""
        buffers = self._buffers
        try:
            row = buffers.pop()
        except IndexError:
            row = RowBuffer(self)
        row.write_x(row.values, 0, *x)
        if not kernels.predict.overloads:
            announce_compilation(kernels.predict, "the stream engine")
        kernels.predict(
            self._state, self._layout.numbers, self._dtype_of_body, row.x, row.out, row.leverage, row.workspace
        )
        out: list[float] = row.out.ravel().tolist()
        buffers.append(row)
        return out

    def _predict(self, X: Floats, leverage: Floats) -> Floats:
        announce_compilation(kernels.predict, "the stream engine")
        out = np.empty((len(X), self.outputs))
        workspace = np.empty_like(self._workspace)  # its own: threads may predict at the same time
        kernels.predict(self._state, self._layout.numbers, self._dtype_of_body, X, out, leverage, workspace)
        return out


class RowBuffer:
    """Arrays that pass one row to the kernels and its prediction back, reused for many rows."""

    def __init__(self, engine: Engine) -> None:
        inputs, outputs = engine.inputs, engine.outputs
        values = np.zeros(inputs + outputs + 1)
        self.values = values.data  # x, then y, then the weight
        self.x, self.y = values[:inputs].reshape(1, inputs), values[inputs:-1].reshape(1, outputs)
        self.weight, self.out, self.leverage = values[-1:], np.zeros((1, outputs)), np.empty(0)
        self.workspace = np.empty_like(engine._workspace)
        self.write, self.write_x = struct.Struct(f"{values.size}d").pack_into, struct.Struct(f"{inputs}d").pack_into


def widths(sizes: int | Sequence[int]) -> Sequence[int]:
    """The widths of hidden layers from `hidden_layer_sizes`."""
    return sizes if isinstance(sizes, Iterable) else (sizes,)
