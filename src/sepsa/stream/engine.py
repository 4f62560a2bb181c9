"""The one-sample engine: SepSA for multilayer perceptrons in compiled code, without torch in the loop."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sepsa.heads.protocols import NotFinite
from sepsa.jit import announce_compilation
from sepsa.states import schema
from sepsa.states.plain import generator_state, read_generator
from sepsa.stream import kernels
from sepsa.validation import at_least, in_range

Floats = NDArray[np.float64]

NINE_TENTHS = 1.6448536269514722  # of a normal law lie within so many standard deviations
NORMAL_QUANTILES: Floats = np.array([0.6744897501960817, 1.2815515655446004, NINE_TENTHS])

ACTIVATIONS = {
    "identity": kernels.IDENTITY,
    "relu": kernels.RELU,
    "tanh": kernels.TANH,
    "sigmoid": kernels.SIGMOID,
    "gelu": kernels.GELU,
    "fourier": kernels.FOURIER,
}
# The options each optimizer takes beside lr and weight_decay, with torch.optim's defaults; momentum is Adam's β1.
OPTIMIZERS: dict[str, tuple[int, dict[str, float]]] = {
    "sgd": (kernels.SGD, {}),
    "momentum": (kernels.SGD, {"momentum": 0.9}),
    "nag": (kernels.SGD, {"momentum": 0.9, "nesterov": 1.0}),
    "rmsprop": (kernels.RMSPROP, {"momentum": 0.0, "beta2": 0.99, "eps": 1e-8}),
    "adam": (kernels.ADAM, {"momentum": 0.9, "beta2": 0.999, "eps": 1e-8}),
    # Adam without momentum: a gradient is taken at a head that has moved since the last one.
    "auto": (kernels.ADAM, {"momentum": 0.0, "beta2": 0.999, "eps": 1e-8}),
}

_BODY_PARTS = ("THETA", "FIRST", "SECOND")  # in the body's dtype
_POSITIVE = ("D", "RIDGE")
_NOT_NEGATIVE = ("SECOND", "ENERGY", "SCALE", "TYPICAL", "USUAL", "LATE", "GAIN", "ERROR", "NUMBERS", "COUNTS")
DISCOUNT = 0.99  # of the losses by which heads are weighted: about a hundred rows tell
POWER = 0.5  # of the likelihood in a head's weight: below 1 because errors of neighbouring rows are alike
BANDWIDTH = 1.4  # of Fourier features: how fast they turn over standardized inputs
RIDGES = (10.0, 1.0, 100.0)  # to choose from
FORGETTINGS = (1.0, 0.999, 0.99)


def candidate_heads(
    ridge: float | str, forgetting: float | str, hidden: Sequence[int], skip: bool
) -> list[tuple[str, float, float]]:
    """The heads among which a learner chooses by their errors: what each sees, its ridge and its forgetting.

    Where `forgetting` is "auto", a head that forgets is small: it remembers few rows and can learn few weights of them.
    """
    whole = "both" if skip or not hidden else "hidden"
    ridges = RIDGES if ridge == "auto" else (in_range("ridge", ridge, 0.0, math.inf),)  # type: ignore[arg-type]
    if forgetting != "auto":
        keeps = in_range("forgetting", forgetting, 0.0, 1.0)  # type: ignore[arg-type]
        return [(whole, strength, keeps) for strength in ridges]
    heads = [(whole, strength, 1.0) for strength in ridges]
    if hidden and skip:
        return [*heads, ("inputs", ridges[0], 1.0), ("inputs", ridges[0], 0.99)]
    return [*heads, *((whole, ridges[0], keeps) for keeps in FORGETTINGS[1:])]


class Engine:
    """A multilayer perceptron with a recursive-least-squares head, learned sample by sample in compiled code.

    Choose it where samples come one at a time and the network is small; behind it stand `SepSARegressor` and
    `SepSAClassifier`. It equals `SepSA` with `RLS(..., bias_ridge="ridge")` on the same network in float64, step by
    step; `learn` returns the prediction made before each update.

    `loss="huber"` bounds what a row can do, whatever it holds: a target's error counts as if it were no larger than
    4.5 times the median one, and less and less where it is much larger; an input lies at most 16 times as far out as
    it does as a rule, and a row beyond that weighs less; a weight beyond ten usual ones is taken for a usual one;
    predictions go at most half the range of plausible targets beyond it. `outliers` counts the rows of which something
    was beyond that. `ridge="auto"` and `forgetting="auto"` let several heads share the body (`candidate_heads`):
    predictions are their mixture, weighted by their recent errors; `chosen` tells which leads. `classes` says that
    targets are indicators, which are bounded, and keeps the log-losses by which scores become probabilities
    (`sepsa.stream.calibration`).

    `skip` lets the head see the inputs beside the last layer. With `standardize` the network sees (x - mean) · scale
    (`set_scaling`), and each output's squared error counts in the body's loss with its own weight
    (`set_output_weights`); a scale or weight of zero stands for what has been constant so far, and is set by the first
    value that differs.
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
        self._dtype_of_body = np.empty(0, dtype)  # tells the kernels, which read a dtype off an array
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
                options.get("momentum", 0.0),
                options.get("beta2", 0.0),
                options.get("eps", 0.0),
                options.get("nesterov", 0.0),
                DISCOUNT,
                POWER,
                max(keeps for _, _, keeps in self._heads),
            ]
        )
        L = self._layout.numbers
        L[kernels.L_ACTIVATION] = ACTIVATIONS[one_of("activation", activation, ACTIVATIONS)]
        L[kernels.L_OPTIMIZER] = code
        L[kernels.L_STANDARDIZE] = standardize
        L[kernels.L_BATCH] = at_least("batch", batch, 1)
        L[kernels.L_ROBUST] = one_of("loss", loss, {"squared": 0, "huber": 1}) == "huber"
        L[kernels.L_CLASSES] = classes
        self._state = np.zeros(self._layout.size)
        self._workspace = np.zeros(self._layout.workspace(batch))
        for h, (_, strength, keeps) in enumerate(self._heads):
            self._view("D", h)[:] = 1 / strength
            self._view("RIDGE", h)[:] = strength
            numbers = self._view("NUMBERS", h)
            numbers[kernels.H_FORGETTING], numbers[kernels.H_RIDGE] = keeps, strength
            numbers[kernels.H_WEIGHT] = 1 / len(self._heads)
        self._view("RANGE").reshape(-1, 2)[:] = 1.0, 0.0  # low above high: none yet
        self._view("COUNTS")[[kernels.C_BETA1_POWER, kernels.C_BETA2_POWER]] = 1.0
        self._view("GAIN")[:] = 0.0 if standardize else 1.0
        self._view("SCALE")[:] = 0.0 if standardize else 1.0
        for weight, bias in self.layers():
            weight[:] = self._start_weights(weight.shape, weight.shape[1])
            if self._fourier:
                bias[:] = self._rng.uniform(0.0, 2 * math.pi, bias.shape)
            else:
                bias[:] = self._rng.normal(0.0, 0.5, bias.shape)  # so that kinks are spread over the data

    @property
    def _fourier(self) -> bool:
        return bool(self._layout.numbers[kernels.L_ACTIVATION] == kernels.FOURIER)

    def _start_weights(self, shape: int | tuple[int, ...], inputs: int) -> Floats:
        """Random weights of units that see so many inputs: normal for Fourier features, else Kaiming's uniform law."""
        if self._fourier:
            return self._rng.normal(0.0, BANDWIDTH * math.sqrt(1 / inputs), shape)
        bound = math.sqrt(6 / inputs)
        return self._rng.uniform(-bound, bound, shape)

    # ------------------------------------------------------------------ what it is

    @property
    def inputs(self) -> int:
        return self._layout.inputs

    @property
    def outputs(self) -> int:
        return self._layout.outputs

    @property
    def batch_size(self) -> int:
        """How many rows make one step of the body."""
        return int(self._layout.numbers[kernels.L_BATCH])

    @property
    def samples(self) -> float:
        """How many samples the first head remembers, as `RLS.samples`."""
        return float(self._view("NUMBERS", 0)[kernels.H_SAMPLES])

    @property
    def outliers(self) -> int:
        """How many rows had an implausible target, input or weight."""
        return int(self._view("COUNTS")[kernels.C_OUTLIERS])

    @property
    def chosen(self) -> dict[str, Any]:
        """The head that has the largest weight in predictions: what it sees, its ridge and forgetting, and since when.

        `weights` are those of all heads; `since` is the number of steps after which it came first.
        """
        counts = self._view("COUNTS")
        subset, ridge, forgetting = self._heads[int(counts[kernels.C_BEST])]
        weights = [float(self._view("NUMBERS", h)[kernels.H_WEIGHT]) for h in range(len(self._heads))]
        since = int(counts[kernels.C_SINCE])
        return {"features": subset, "ridge": ridge, "forgetting": forgetting, "since": since, "weights": weights}

    def layers(self) -> list[tuple[Floats, Floats]]:
        """Weight (width, inputs) and bias (width,) of each hidden layer, as views shaped like torch's."""
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
        """The least value (outputs,) of Σ ω e² + ridge |W - prior|² over all that the first head remembers."""
        return self._view("ENERGY", 0).copy()

    def scaling(self) -> tuple[Floats, Floats]:
        """Mean and scale (inputs,) by which the network sees (x - mean) · scale, as copies."""
        return self._view("MEAN").copy(), self._view("SCALE").copy()

    def set_scaling(self, mean: Floats, scale: Floats, first: int = 0) -> None:
        """Let the network see (x - mean) · scale, from input `first` on; a scale of zero waits for a value."""
        self._view("MEAN")[first:], self._view("SCALE")[first:] = mean, scale

    def set_typical_inputs(self, distances: Floats | float, first: int = 0) -> None:
        """Let standardized inputs lie so far from zero as a rule; 16 times as far is as far as the network sees."""
        self._view("TYPICAL")[first:] = self._view("USUAL")[first:] = distances

    def output_weights(self) -> Floats:
        """How much each output's squared error counts in the body's loss (outputs,), a copy."""
        return self._view("GAIN").copy()

    def set_output_weights(self, weights: Floats | float) -> None:
        """Let each output's squared error count so much in the body's loss; zero waits for a value."""
        self._view("GAIN")[:] = weights

    def schedule(self) -> tuple[float, float, int]:
        """The body's rate, the first head's forgetting and the rows of a batch."""
        forgetting = float(self._view("NUMBERS", 0)[kernels.H_FORGETTING])
        return float(self._options[kernels.O_LR]), forgetting, self.batch_size

    def set_schedule(self, lr: float, forgetting: float, batch: int) -> None:
        """Learn by these from now on."""
        self._options, numbers = self._options.copy(), self._layout.numbers.copy()  # a copy of the engine shares them
        self._options[kernels.O_LR] = lr
        self._view("NUMBERS", 0)[kernels.H_FORGETTING] = forgetting
        numbers[kernels.L_BATCH] = batch
        self._layout = copy(self._layout)
        self._layout.numbers = numbers
        self._workspace = np.zeros(self._layout.workspace(batch))

    def noise_variance(self) -> Floats:
        """The variance (outputs,) of targets about predictions, where φᵀBφ is small.

        With `loss="huber"` it is that of a normal law whose nine tenths reach as far as those of the recent errors
        e/√(1 + φᵀBφ) made before learning. With `loss="squared"` it is that of ridge regression,

            σ² = (Σ e²/(1 + φᵀBφ) - Σ_j ridge_j |W_j - prior_j|²) / (n - tr BΦᵀΦ),

        since the errors e made before learning sum to the objective at its minimum, and BΦᵀΦ = I - B ridge.
        """
        if self._layout.numbers[kernels.L_ROBUST]:
            return (self._view("ERROR").reshape(-1, 3)[:, 2] / NINE_TENTHS) ** 2
        penalty, left = self._penalty_and_degrees_left()
        return np.maximum(self._view("ENERGY", 0) - penalty, 0.0) / left

    def set_effective_samples(self, samples: float, noise: Floats) -> None:
        """Let what the head knows stand for so many samples, and their errors for this noise variance (outputs,).

        Rows that were learned in N passes count N times: A <- A/N sets that right and leaves the head as it is.
        """
        passes = max(1.0, self.samples / samples)
        for h in range(len(self._heads)):
            self._view("D", h)[:] *= passes
            self._view("RIDGE", h)[:] /= passes
            self._view("NUMBERS", h)[[kernels.H_SAMPLES, kernels.H_RIDGE]] /= passes
        penalty, left = self._penalty_and_degrees_left()
        self._view("ENERGY", 0)[:] = noise * left + penalty
        self.set_error_quantiles(np.sqrt(noise)[:, None] * NORMAL_QUANTILES)

    def set_error_quantiles(self, quantiles: Floats) -> None:
        """Let the errors be taken to have these quantiles (outputs, 3), the 0.5, 0.8 and 0.9 ones of their sizes."""
        self._view("ERROR")[:] = quantiles.ravel()
        self._view("ERROR_RUN")[:] = 0.0

    def set_target_range(self, low: Floats, high: Floats) -> None:
        """Let plausible targets lie between these (outputs,)."""
        self._view("RANGE").reshape(-1, 2)[:] = np.stack([low, high], 1)

    def set_typical_weight(self, weight: float) -> None:
        """Let samples weigh so much as a rule; what weighs more than ten times that is not believed."""
        self._view("COUNTS")[kernels.C_WEIGHT] = weight

    def calibration_losses(self) -> Floats:
        """The log-loss of each inverse temperature on rows not yet learned, a copy."""
        return self._view("CALIBRATION").copy()

    def set_calibration_losses(self, losses: Floats) -> None:
        self._view("CALIBRATION")[:] = losses

    def _penalty_and_degrees_left(self) -> tuple[Floats, float]:
        """What the ridge adds to the objective (outputs,), and the samples less the degrees of freedom."""
        p = self._layout.head_features[0]
        ridge, D = self._view("RIDGE", 0), self._view("D", 0)
        column, row = np.tril_indices(p, -1)  # U's columns lie one after the other
        free = p - float(D @ ridge + (self._view("U", 0) ** 2 * ridge[row]) @ D[column])
        penalty = (self.head - self._view("PRIOR", 0).reshape(self.head.shape)) ** 2 @ ridge
        return residual_degrees(penalty, self.samples, free)

    def _view(self, name: str, head: int | None = None) -> Floats:
        """A part of the state by its name in `Layout`, or such a part of a head."""
        start, length = self._layout.parts[name if head is None else f"{name}{head}"]
        part = self._state[start : start + length]
        return part.view(self._dtype_of_body.dtype)[: self._layout.body] if name in _BODY_PARTS else part

    def copy(self) -> Engine:
        """Another engine in the same state."""
        other = object.__new__(Engine)
        other.__dict__.update(self.__dict__)
        other._state, other._workspace = self._state.copy(), np.zeros_like(self._workspace)
        other._rng = read_generator("generator", generator_state(self._rng))
        return other

    # ------------------------------------------------------------------ saving

    def _settings(self) -> dict[str, Any]:
        """What a state depends on and does not change: the network's form and the options of learning."""
        L = self._layout.numbers
        return {
            "hidden": list(self._layout.hidden),
            "heads": self._heads,
            "loss": "huber" if L[kernels.L_ROBUST] else "squared",
            "classes": bool(L[kernels.L_CLASSES]),
            "dtype": self._dtype_of_body.dtype.name,
            "activation": next(name for name, code in ACTIVATIONS.items() if code == L[kernels.L_ACTIVATION]),
            "optimizer": int(L[kernels.L_OPTIMIZER]),
            "standardize": bool(L[kernels.L_STANDARDIZE]),
            "batch": self.batch_size,
            "options": self._options.tolist(),
        }

    def state_dict(self) -> dict[str, Any]:
        """All that a further step depends on, as plain data; a learner that loads it goes on bit for bit."""
        return {
            "settings": self._settings(),
            "inputs": self.inputs,
            "outputs": self.outputs,
            "arrays": {name: self._view(name).copy() for name in self._layout.parts},
            "generator": generator_state(self._rng),
        }

    def load_state_dict(self, state_dict: dict[str, Any], entry: str = "state_dict") -> None:
        """Continue from such a state. Whole, or ValueError naming the entry and nothing."""
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
            low = 0.0 if part in _NOT_NEGATIVE else np.finfo(float).tiny if part in _POSITIVE else -math.inf
            view[:] = arrays.array(name, view.shape, view.dtype, low=low)
        for h, p in enumerate(other._layout.head_features):
            if other._view("NUMBERS", h)[kernels.H_CURSOR] >= p:
                raise ValueError(f"{arrays.path(f'NUMBERS{h}')} must point at one of {p} features")
        if other._view("COUNTS")[kernels.C_BEST] >= len(self._heads):
            raise ValueError(f"{arrays.path('COUNTS')} must point at one of {len(self._heads)} heads")
        other._rng = read_generator(new.path("generator"), new["generator"])
        self.__dict__.update(other.__dict__)

    def _allocate(self, inputs: int, outputs: int) -> None:
        """A state of zeros for so many inputs and outputs, under the same settings."""
        old = self._layout
        self._layout = Layout(inputs, outputs, old.hidden, old.subsets, old.itemsize)
        self._layout.numbers[kernels.L_SETTINGS] = old.numbers[kernels.L_SETTINGS]
        self._state = np.zeros(self._layout.size)
        self._workspace = np.zeros(self._layout.workspace(self.batch_size))

    # ------------------------------------------------------------------ growth

    def resize(self, inputs: int, outputs: int) -> None:
        """More inputs or outputs, as if they had been there, at zero, from the start.

        That is exact: an input at zero never moved the body or the head, and the head that fits a target of zero
        from a prior of zero is zero.
        """
        old = self._layout
        parts = {name: self._view(name) for name in old.parts}
        grown = self.copy()
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
        for name in _BODY_PARTS:
            view(name)[:cut], view(name)[cut + added :] = parts[name][:cut], parts[name][cut:]
        view("THETA")[cut : cut + added] = grown._start_weights(added, inputs)
        view("RANGE").reshape(-1, 2)[:] = 1.0, 0.0
        for name in (
            "MEAN", "SCALE", "TYPICAL", "TYPICAL_RUN", "USUAL", "LATE", "GAIN", "ERROR", "ERROR_RUN", "RANGE",
            "CALIBRATION", "COUNTS"
        ):  # fmt: skip
            view(name)[: parts[name].size] = parts[name]
        if not new.numbers[kernels.L_STANDARDIZE]:
            view("SCALE")[:] = view("GAIN")[:] = 1.0
        self.__dict__.update(grown.__dict__)

    # ------------------------------------------------------------------ learning

    def learn(self, X: Floats, Y: Floats, sample_weight: Floats | None = None) -> Floats:
        """Learn the rows of X (n, inputs) and Y (n, outputs) in order; returns the predictions made before.

        The arrays are C-contiguous float64 and finite; the faces see to that. Where the body has diverged `NotFinite`
        is raised and nothing changes.
        """
        announce_compilation(kernels.learn, "the stream engine")
        weights = np.ones(len(X)) if sample_weight is None else sample_weight
        out = np.empty((len(X), self.outputs))
        several = len(X) > self.batch_size
        state = self._state.copy() if several else self._state  # a single step is refused before it changes anything
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

    def learn_row(self, row: RowBuffer) -> None:
        """`learn` of the row in the buffer, without the making of any array; the prediction is left in it."""
        if not kernels.learn.overloads:
            announce_compilation(kernels.learn, "the stream engine")
        if not kernels.learn(
            self._state, self._layout.numbers, self._options, self._dtype_of_body,
            row.x, row.y, row.weight, row.out, self._workspace,
        ):  # fmt: skip
            self.learn(row.x, row.y, row.weight)  # refused again, and says why

    def predict(self, X: Floats) -> Floats:
        """The predictions (n, outputs)."""
        return self._predict(X, np.empty(0))

    def predict_with_leverage(self, X: Floats) -> tuple[Floats, Floats]:
        """The predictions (n, outputs) and φᵀBφ (n,), by which the variance of a prediction exceeds the noise's."""
        leverage = np.empty(len(X))
        return self._predict(X, leverage), leverage

    def predict_row(self, row: RowBuffer) -> None:
        """`predict` for the row in the buffer, left in it; many threads may at once, each with its own buffer."""
        if not kernels.predict.overloads:
            announce_compilation(kernels.predict, "the stream engine")
        kernels.predict(
            self._state, self._layout.numbers, self._dtype_of_body, row.x, row.out, row.leverage, row.workspace
        )

    def _predict(self, X: Floats, leverage: Floats) -> Floats:
        announce_compilation(kernels.predict, "the stream engine")
        out = np.empty((len(X), self.outputs))
        workspace = np.empty_like(self._workspace)  # its own: many threads may predict at once
        kernels.predict(self._state, self._layout.numbers, self._dtype_of_body, X, out, leverage, workspace)
        return out


class RowBuffer:
    """The arrays through which one row goes into the kernels and out, made once for many rows."""

    def __init__(self, engine: Engine) -> None:
        inputs, outputs = engine.inputs, engine.outputs
        values = np.zeros(inputs + outputs + 1)
        self.values = values.data  # x, then y, then the weight
        self.x, self.y = values[:inputs].reshape(1, inputs), values[inputs:-1].reshape(1, outputs)
        self.weight, self.out, self.leverage = values[-1:], np.zeros((1, outputs)), np.empty(0)
        self.workspace = np.empty_like(engine._workspace)
        self.write, self.write_x = struct.Struct(f"{values.size}d").pack_into, struct.Struct(f"{inputs}d").pack_into


class Layout:
    """Where each part of an engine's state lies in its one vector."""

    def __init__(
        self, inputs: int, outputs: int, hidden: tuple[int, ...], subsets: tuple[str, ...], itemsize: int
    ) -> None:
        self.inputs, self.outputs = at_least("inputs", inputs, 1), at_least("outputs", outputs, 1)
        self.subsets = subsets
        self.hidden = tuple(at_least("hidden", width, 1) for width in hidden)
        d, m, last = inputs, outputs, hidden[-1] if hidden else 0
        self.features = last + d + 1
        units = [0 if subset == "inputs" else last for subset in subsets]
        self.head_features = [
            n + 1 + (0 if subset == "hidden" else d) for n, subset in zip(units, subsets, strict=True)
        ]
        widths = (inputs, *hidden)
        q = sum((below + 1) * width for below, width in zip(widths, hidden, strict=False))
        slots = (q * itemsize + 7) // 8  # of float64, for what is in the body's dtype
        lengths = {
            "THETA": slots, "FIRST": slots, "SECOND": slots, "MEAN": d, "SCALE": d, "TYPICAL": d, "TYPICAL_RUN": d,
            "USUAL": d, "LATE": d,
            "GAIN": m, "ERROR": 3 * m, "ERROR_RUN": 3 * m, "RANGE": 2 * m, "CALIBRATION": kernels.TEMPERATURES,
            "COUNTS": kernels.COUNTS,
        }  # fmt: skip
        shared = list(lengths)
        for h, p in enumerate(self.head_features):
            own = {
                "NUMBERS": kernels.NUMBERS, "W": m * p, "U": p * (p - 1) // 2, "D": p, "RIDGE": p, "PRIOR": m * p,
                "ENERGY": m,
            }  # fmt: skip
            lengths |= {f"{name}{h}": length for name, length in own.items()}
        self.parts: dict[str, tuple[int, int]] = {}
        self.size = 0
        for name, length in lengths.items():
            self.parts[name] = (self.size, length)
            self.size += length
        self.body, self.itemsize = q, itemsize
        sizes = {
            "DEPTH": len(hidden), "INPUTS": d, "OUTPUTS": m, "HEADS": len(subsets), "BODY": q,
            "ACTIVATIONS": d + sum(hidden), "WIDEST": max(hidden, default=0), "FEATURES": self.features,
        }  # fmt: skip
        heads = [
            (kernels.HIDDEN if subset == "hidden" else kernels.END, units[h], p, self.parts[f"NUMBERS{h}"][0])
            for h, (subset, p) in enumerate(zip(subsets, self.head_features, strict=True))
        ]
        self.numbers = np.zeros(kernels.L_SIZES + len(hidden) + 4 * len(heads), dtype=np.int64)
        for name, value in (sizes | {name: self.parts[name][0] for name in shared}).items():
            self.numbers[getattr(kernels, f"L_{name}")] = value
        self.numbers[kernels.L_SIZES :] = [*hidden, *(number for head in heads for number in head)]

    def workspace(self, batch: int) -> int:
        """Its size: unit row, b, residuals, φ and answers; gradient, deltas, activations and slopes of the body."""
        last = self.hidden[-1] if self.hidden else 0
        row = self.features + last + 1 + len(self.subsets) * self.outputs + 1
        high = 2 * self.features + 3 * self.outputs + batch * row
        low = self.body + 2 * max(self.hidden, default=0) + 2 * batch * (self.inputs + sum(self.hidden))
        return high + (low * self.itemsize + 7) // 8


def residual_degrees(penalty: Floats, samples: float, free: float) -> tuple[Floats, float]:
    """`penalty` and samples - free; where small weights leave next to nothing of that, no penalty and the samples."""
    left = samples - free
    return (penalty, left) if left > 0.1 * samples else (0 * penalty, max(samples, np.finfo(float).tiny))


def one_of(name: str, value: str, valid: dict[str, Any]) -> str:
    if value not in valid:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, valid))}, got {value!r}")
    return value


def not_negative(name: str, value: float) -> float:
    return 0.0 if value == 0 else in_range(name, value, 0.0, math.inf)
