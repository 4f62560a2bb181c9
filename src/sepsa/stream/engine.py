"""The one-sample engine: SepSA for multilayer perceptrons in compiled code, without torch in the loop."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sepsa.heads._checks import in_range
from sepsa.stream import kernels

Floats = NDArray[np.float64]

ACTIVATIONS = {
    "identity": kernels.IDENTITY,
    "relu": kernels.RELU,
    "tanh": kernels.TANH,
    "sigmoid": kernels.SIGMOID,
    "gelu": kernels.GELU,
}
# The options each optimizer takes beside lr and weight_decay, with torch.optim's defaults; momentum is Adam's β1.
OPTIMIZERS: dict[str, tuple[int, dict[str, float]]] = {
    "sgd": (kernels.SGD, {}),
    "momentum": (kernels.SGD, {"momentum": 0.9}),
    "nag": (kernels.SGD, {"momentum": 0.9, "nesterov": 1.0}),
    "rmsprop": (kernels.RMSPROP, {"momentum": 0.0, "beta2": 0.99, "eps": 1e-8}),
    "adam": (kernels.ADAM, {"momentum": 0.9, "beta2": 0.999, "eps": 1e-8}),
}


BODY = ("THETA", "FIRST", "SECOND")  # the parts in the body's dtype


class Engine:
    """A multilayer perceptron with a recursive-least-squares head, learned sample by sample in compiled code.

    Choose it where samples come one at a time and the network is small; behind it stand `SepSARegressor` and
    `SepSAClassifier`. It equals `SepSA` with `RLS(ridge=..., forgetting=...)` on the same network in float64, step by
    step; `learn` returns the prediction made before each update.

    `skip` lets the head see the inputs beside the last layer. With `standardize` the parts MEAN and SCALE of the state
    say how the network sees each input, GAIN how much each output counts in the body's loss; a scale or gain of zero
    stands for what has been constant so far, and is set by the first value that differs.
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
        ridge: float = 1.0,
        forgetting: float = 1.0,
        batch: int = 1,
        skip: bool = False,
        standardize: bool = False,
        dtype: type[np.floating[Any]] = np.float32,
        seed: int = 0,
        **optimizer_options: float,
    ) -> None:
        if dtype not in (np.float32, np.float64):
            raise ValueError(f"dtype must be numpy.float32 or numpy.float64, got {dtype!r}")
        self.kind = np.empty(0, dtype)
        self.layout = Layout(inputs, outputs, tuple(hidden), skip, self.kind.itemsize)
        self._chance = np.random.default_rng(seed)
        code, defaults = OPTIMIZERS[one_of("optimizer", optimizer, OPTIMIZERS)]
        unknown = sorted(set(optimizer_options) - set(defaults))
        if unknown:
            raise TypeError(f"optimizer {optimizer!r} takes {sorted(defaults) or 'no options'}, got {unknown}")
        options = defaults | optimizer_options
        self.options: Floats = np.array(
            [
                in_range("lr", lr, 0.0, math.inf),
                not_negative("weight_decay", weight_decay),
                options.get("momentum", 0.0),
                options.get("beta2", 0.0),
                options.get("eps", 0.0),
                options.get("nesterov", 0.0),
                in_range("forgetting", forgetting, 0.0, 1.0),
                in_range("ridge", ridge, 0.0, math.inf),
            ]
        )
        L = self.layout.numbers
        L[kernels.L_ACTIVATION] = ACTIVATIONS[one_of("activation", activation, ACTIVATIONS)]
        L[kernels.L_OPTIMIZER] = code
        L[kernels.L_STANDARDIZE] = standardize
        L[kernels.L_BATCH] = at_least("batch", batch, 1)
        self.state = np.zeros(self.layout.size)
        self.scratch = np.zeros(self.layout.room(batch))
        self.part("D")[:] = 1 / ridge
        self.part("RIDGE")[:] = ridge
        self.part("COUNTS")[[kernels.C_POWER1, kernels.C_POWER2]] = 1.0
        self.part("GAIN")[:] = 0.0 if standardize else 1.0
        self.part("SCALE")[:] = 0.0 if standardize else 1.0
        # Kaiming-uniform weights and biases of 0.01, as the paper's; the head starts at zero.
        for weight, bias in self.layers():
            bound = math.sqrt(6 / weight.shape[1])
            weight[:] = self._chance.uniform(-bound, bound, weight.shape)
            bias[:] = 0.01

    # ------------------------------------------------------------------ state

    def part(self, name: str) -> Floats:
        """A part of the state by its name in `Layout`, as a view."""
        start, length = self.layout.parts[name]
        part = self.state[start : start + length]
        return part.view(self.kind.dtype)[: self.layout.body] if name in BODY else part

    def layers(self) -> list[tuple[Floats, Floats]]:
        """Weight (width, inputs) and bias (width,) of each hidden layer, as views shaped like torch's."""
        views, at, theta = [], 0, self.part("THETA")
        width = self.layout.inputs
        for h in self.layout.hidden:
            weight = theta[at : at + width * h].reshape(width, h).T
            at += width * h
            views.append((weight, theta[at : at + h]))
            at, width = at + h, h
        return views

    @property
    def head(self) -> Floats:
        """W (outputs, features), the bias its last column, as a view."""
        return self.part("W").reshape(self.layout.outputs, -1)

    def start_head(self, weights: Floats) -> None:
        """Set the head and with it the prior that the ridge pulls to."""
        self.head[:] = weights
        self.part("PRIOR")[:] = self.part("W")

    def covariance(self) -> Floats:
        """B (p, p), the inverse of the curvature."""
        p = self.layout.features
        U = np.eye(p)
        for j in range(1, p):
            U[:j, j] = self.part("U")[j * (j - 1) // 2 : j * (j - 1) // 2 + j]
        return (U * self.part("D")) @ U.T

    @property
    def samples(self) -> float:
        """How many samples the head remembers, as `RLS.samples`."""
        return float(self.part("COUNTS")[kernels.C_MASS])

    def grow(self, inputs: int, outputs: int) -> None:
        """Make room for more inputs or outputs, as if they had been there, at zero, from the start.

        That is exact: an input at zero never moved the body or the head, and the head that fits a target of zero
        from a prior of zero is zero.
        """
        old = self.layout
        parts = {name: self.part(name) for name in old.parts}
        new = Layout(inputs, outputs, old.hidden, old.skip, self.kind.itemsize)
        new.numbers[kernels.L_SETTINGS] = old.numbers[kernels.L_SETTINGS]
        self.layout, self.state = new, np.zeros(new.size)
        self.scratch = np.zeros(new.room(int(new.numbers[kernels.L_BATCH])))
        ridge = self.options[kernels.O_RIDGE]
        more = inputs - old.inputs
        place = new.features - 1 - more if old.skip or not old.hidden else new.features - 1  # of new features in φ
        keep = np.r_[0:place, new.features - 1] if new.features > old.features else np.arange(new.features)
        self.part("D")[:] = 1 / ridge
        self.part("RIDGE")[:] = ridge
        for name in ("D", "RIDGE"):
            self.part(name)[keep] = parts[name]
        for name in ("W", "PRIOR"):
            rows = self.part(name).reshape(outputs, -1)
            rows[: old.outputs, keep] = parts[name].reshape(old.outputs, -1)
        U = self.part("U")
        for j, column in enumerate(keep):
            U[column * (column - 1) // 2 + keep[:j]] = parts["U"][j * (j - 1) // 2 : j * (j - 1) // 2 + j]
        cut = old.inputs * old.hidden[0] if old.hidden else 0  # the first layer's weights, input by input
        grown = more * old.hidden[0] if old.hidden else 0
        for name in ("THETA", "FIRST", "SECOND"):
            self.part(name)[:cut], self.part(name)[cut + grown :] = parts[name][:cut], parts[name][cut:]
        bound = math.sqrt(6 / inputs)
        self.part("THETA")[cut : cut + grown] = self._chance.uniform(-bound, bound, grown)
        for name in ("ENERGY", "MEAN", "SCALE", "GAIN", "COUNTS"):
            self.part(name)[: parts[name].size] = parts[name]
        if not new.numbers[kernels.L_STANDARDIZE]:
            self.part("SCALE")[:] = self.part("GAIN")[:] = 1.0

    # ------------------------------------------------------------------ learning

    def learn(self, X: Floats, Y: Floats, sample_weight: Floats | None = None) -> Floats:
        """Learn the rows of X (n, inputs) and Y (n, outputs) in order; returns the predictions made before.

        The arrays are C-contiguous float64 and finite; the faces see to that. Where the body has diverged an error
        is raised and nothing changes.
        """
        announce_compilation(kernels.learn)
        weights = np.ones(len(X)) if sample_weight is None else sample_weight
        out = np.empty((len(X), self.layout.outputs))
        before = self.state.copy() if len(X) > self.layout.numbers[kernels.L_BATCH] else None
        done = kernels.learn(self.state, self.layout.numbers, self.options, self.kind, X, Y, weights, out, self.scratch)
        if done < len(X):
            if before is not None:
                self.state[:] = before
            raise FloatingPointError(
                f"the network's output for sample {done} of this call is not finite: nothing was learned; "
                "lower lr, or rescale the inputs"
            )
        return out

    def predict(self, X: Floats) -> Floats:
        """The predictions (n, outputs)."""
        return self._predict(X, np.empty(0))

    def predict_with_spread(self, X: Floats) -> tuple[Floats, Floats]:
        """The predictions (n, outputs) and φᵀBφ (n,), by which the variance of a prediction exceeds the noise's."""
        spread = np.empty(len(X))
        return self._predict(X, spread), spread

    def _predict(self, X: Floats, spread: Floats) -> Floats:
        announce_compilation(kernels.predict)
        out = np.empty((len(X), self.layout.outputs))
        scratch = np.empty_like(self.scratch)  # its own: many threads may predict at once
        kernels.predict(self.state, self.layout.numbers, self.kind, X, out, spread, scratch)
        return out


class Layout:
    """Where each part of a learner's state lies in its one vector."""

    def __init__(self, inputs: int, outputs: int, hidden: tuple[int, ...], skip: bool, itemsize: int) -> None:
        self.inputs, self.outputs = at_least("inputs", inputs, 1), at_least("outputs", outputs, 1)
        self.skip = bool(skip)
        self.hidden = tuple(at_least("hidden", width, 1) for width in hidden)
        self.features = (hidden[-1] if hidden else inputs) + (inputs if skip and hidden else 0) + 1
        d, m, p = inputs, outputs, self.features
        widths = (inputs, *hidden)
        q = sum((below + 1) * width for below, width in zip(widths, hidden, strict=False))
        slots = (q * itemsize + 7) // 8  # of float64, for what is in the body's dtype
        lengths = {
            "THETA": slots, "FIRST": slots, "SECOND": slots, "U": p * (p - 1) // 2, "D": p, "W": m * p, "PRIOR": m * p,
            "ENERGY": m, "RIDGE": p, "MEAN": d, "SCALE": d, "GAIN": m, "COUNTS": kernels.COUNTS,
        }  # fmt: skip
        self.parts: dict[str, tuple[int, int]] = {}
        self.size = 0
        for name, length in lengths.items():
            self.parts[name] = (self.size, length)
            self.size += length
        self.body, self.itemsize = q, itemsize
        sizes = {
            "DEPTH": len(hidden), "INPUTS": d, "OUTPUTS": m, "FEATURES": p, "BODY": q, "TRACE": d + sum(hidden),
            "WIDEST": max(hidden, default=0), "SKIP": skip,
        }  # fmt: skip
        self.numbers = np.zeros(kernels.L_SIZES + len(hidden), dtype=np.int64)
        for name, value in (sizes | {name: start for name, (start, _) in self.parts.items()}).items():
            self.numbers[getattr(kernels, f"L_{name}")] = value
        self.numbers[kernels.L_SIZES :] = hidden

    def room(self, batch: int) -> int:
        """The scratch a batch needs: unit row, b, residuals and φ; gradient, deltas, traces and slopes of the body."""
        high = 2 * self.features + self.outputs + batch * self.features
        low = self.body + 2 * max(self.hidden, default=0) + 2 * batch * (self.inputs + sum(self.hidden))
        return high + (low * self.itemsize + 7) // 8


def one_of(name: str, value: str, valid: dict[str, Any]) -> str:
    if value not in valid:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, valid))}, got {value!r}")
    return value


def at_least(name: str, value: int, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
    return int(value)


def not_negative(name: str, value: float) -> float:
    return 0.0 if value == 0 else in_range(name, value, 0.0, math.inf)


_announced: set[Any] = set()


def announce_compilation(kernel: Any) -> None:
    """Say that the first call of this kernel compiles it; a warm cache needs no word."""
    if kernel in _announced:
        return
    _announced.add(kernel)
    source = Path(kernels.__file__)
    indices = Path(kernel.stats.cache_path).glob(f"{source.stem}.{kernel.py_func.__name__}-*.nbi")
    if not any(index.stat().st_mtime >= source.stat().st_mtime for index in indices):
        print("sepsa: compiling the stream engine, once on this machine, some seconds", file=sys.stderr, flush=True)
