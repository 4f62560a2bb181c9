"""The compiled engine: a network that learns by SepSA, alone or as one of several experts, without torch."""

from __future__ import annotations

import ctypes
import math
import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sepsa.heads.protocols import NotFinite
from sepsa.jit import compile_kernels
from sepsa.states import schema
from sepsa.states.plain import generator_state, read_generator
from sepsa.stream.engine import layout, saved
from sepsa.stream.engine.bodies import body_of
from sepsa.stream.engine.kernels.body import FOURIER
from sepsa.stream.engine.kernels.views import SLOTS, PartsOf, positions
from sepsa.stream.engine.layout import Layout
from sepsa.stream.engine.options import ACTIVATIONS, LOSSES, OPTIMIZERS, candidate_heads, head_and_optimizer
from sepsa.stream.engine.protocol import FitPlan, Floats, StreamEngine, residual_degrees
from sepsa.validation import at_least, in_range, not_negative, one_of

NINE_TENTHS = 1.6448536269514722  # standard deviations within which nine tenths of a normal distribution lie
NORMAL_QUANTILES: Floats = np.array([0.6744897501960817, 1.2815515655446004, NINE_TENTHS])
DISCOUNT = 0.99  # per row, of the losses by which heads are weighted
POWER = 0.5  # of the likelihood in a head's weight: below 1 because errors of neighbouring rows are alike
BANDWIDTH = 1.4  # of Fourier features, over standardized inputs
PACK_FRAME = struct.Struct(f"{len(SLOTS)}q").pack_into


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

    With `experts`, a sequence of models that may be empty, the network is one expert of several: neighbours, trees,
    products, the last target, the mean, these models (`sepsa.stream.experts`). Choose them for targets that a small
    smooth network fits badly: thresholds, many clusters, products of inputs, targets that persist, also those of a key
    that indicators among the inputs give, logits that are linear. The network learns as it does alone; predictions are
    a mixture of all, weighted by recent errors, and of a least-squares stack of them. The trees keep the last
    `max_rows` rows, one byte for each input and about 120 more, and fewer rows where that would exceed 32 MiB; memory
    grows with the rows that came.
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
        experts: Sequence[Any] | None = None,
        max_rows: int = 16384,
        trees: int = 32,
        **optimizer_options: float,
    ) -> None:
        if dtype not in (np.float32, np.float64):
            raise ValueError(f"dtype must be numpy.float32 or numpy.float64, got {dtype!r}")
        self._dtype = np.dtype(dtype)
        self._heads: list[list[Any]] = [list(head) for head in candidate_heads(ridge, forgetting, hidden, skip)]
        self._models = None if experts is None else _experts("models").ModelExperts(experts, classes)
        self._rng, self._most = np.random.default_rng(seed), at_least("max_rows", max_rows, 64)
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
        settings = {
            "activation": ACTIVATIONS[one_of("activation", activation, ACTIVATIONS)],
            "optimizer": code,
            "standardize": int(standardize),
            "batch": at_least("batch", batch, 1),
            "robust": LOSSES[one_of("loss", loss, LOSSES)],
            "classes": int(classes),
            "room": _experts("trees").room_for(0, inputs, self._most) if experts is not None else 0,
            "trees": at_least("trees", trees, 16),
            "rate": _experts("trees").RATE,
        }
        self._allocate(inputs, outputs, tuple(hidden), settings)
        self._start()
        self._draw_body()

    def _draw_body(self) -> None:
        """Draw the weights and biases of the body."""
        for weight, bias in self.layers():
            weight[:] = self._start_weights(weight.shape, weight.shape[1])
            if self._fourier:
                bias[:] = self._rng.uniform(0.0, 2 * math.pi, bias.shape)
            else:
                bias[:] = self._rng.normal(0.0, 0.5, bias.shape)  # spreads the kinks over the data

    def _allocate(self, inputs: int, outputs: int, hidden: tuple[int, ...], settings: dict[str, int]) -> None:
        """Make a state of zeros for a network of this form, and for its experts."""
        self._table = _experts().table(self._models is not None, bool(settings["classes"]), self._dtype.itemsize == 8)
        subsets = tuple(subset for subset, _, _ in self._heads)
        models = 0 if self._models is None else len(self._models)
        self._layout = Layout(
            _experts().groups(self._table), inputs, outputs, hidden, subsets, self._dtype.itemsize, len(self._table),
            models, settings,
        )  # fmt: skip
        schema.check_memory("a network of this size", 8 * self._layout.size)
        self._state = np.zeros(self._layout.size)
        self._buffers: list[RowBuffer] = []
        self._kernels: Kernels | None = None
        self._spare = 0  # rows that can be learned before there must be more room, unless that is looked at again

    def _make_room(self, rows: int) -> None:
        """Make room for so many further rows, unless there is as much as there may be; nothing else changes."""
        self._spare = sys.maxsize
        if self._models is not None:
            stored, trees = int(self._view("STORED", "trees")[0]), _experts("trees")
            room = trees.room_for(stored + rows, self.inputs, self._most)
            if room > self._layout.settings["room"]:
                self.__dict__.update(saved.with_room(self, room).__dict__)
            if room < trees.room_for(sys.maxsize, self.inputs, self._most):
                self._spare = trees.window(room) - stored - rows

    def _start(self) -> None:
        """Write what the parts hold before any row."""
        for h, (_, strength, keeps) in enumerate(self._heads):
            self._view("D", h)[:] = 1 / strength
            self._view("RIDGE", h)[:] = strength
            numbers = self._view("NUMBERS", h)
            numbers[layout.H_FORGETTING], numbers[layout.H_RIDGE] = keeps, strength
            numbers[layout.H_WEIGHT] = 1 / len(self._heads)
        self._view("RANGE")[:] = 1.0, 0.0  # low above high: no target yet
        self._view("COUNTS")[[layout.C_BETA1_POWER, layout.C_BETA2_POWER]] = 1.0
        standardize = self._layout.settings["standardize"]
        self._view("GAIN")[:] = self._view("SCALE")[:] = 0.0 if standardize else 1.0
        for expert in self._table:
            expert.start(self.parts_of(expert.name), 0, 0)
        if len(self._table) > 1:
            self._view("WEIGHT", "mixture")[0] = 1.0

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
        if body_of(parameters["body"], sizes, parameters["experts"]) == "experts":
            options |= {"body": "experts", "experts": parameters["experts"], "max_rows": parameters["max_rows"]}
            options |= {"trees": _experts("trees").TABLE_TREES} if for_fit else {}
        return options | {
            "batch": 1 if batch == "auto" else at_least("batch_size", batch, 1),
            "loss": parameters["loss"],
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
        return bool(self._layout.settings["robust"])

    @property
    def _fourier(self) -> bool:
        return self._layout.settings["activation"] == FOURIER

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
        return self._layout.settings["batch"]

    @property
    def samples(self) -> float:
        return float(self._view("NUMBERS", 0)[layout.H_SAMPLES])

    @property
    def steps(self) -> int:
        return int(self._view("COUNTS")[layout.C_STEPS])

    @property
    def outliers(self) -> int:
        return int(self._view("COUNTS")[layout.C_OUTLIERS])

    @property
    def chosen(self) -> dict[str, Any]:
        """The head with the largest weight in predictions: its features, ridge and forgetting.

        `weights` are those of all heads; `since` is the step at which this one became the first. Where there are
        experts, `experts` has the weight of each and of the stack, and `stack` those inside the stack.
        """
        counts = self._view("COUNTS")
        subset, ridge, forgetting = self._heads[int(counts[layout.C_BEST])]
        weights = [float(self._view("NUMBERS", h)[layout.H_WEIGHT]) for h in range(len(self._heads))]
        since = int(counts[layout.C_SINCE])
        chosen = {"features": subset, "ridge": ridge, "forgetting": forgetting, "since": since, "weights": weights}
        if self._models is None:
            return chosen
        counts, names, step = self._view("COUNTS", "mixture"), [*self.expert_names, "stack"], _experts("step")
        return chosen | {
            "expert": names[int(counts[step.C_BEST])],
            "expert_since": int(counts[step.C_SINCE]),
            "experts": dict(zip(names, self._view("WEIGHT", "mixture").tolist(), strict=True)),
            "stack": dict(zip(names[1:-1], self._view("STACK", "mixture").tolist(), strict=True)),
        }

    @property
    def expert_names(self) -> list[str]:
        """The names of the experts in the order of their answers, the network's first."""
        models = [] if self._models is None else self._models.names
        return [*(expert.name for expert in self._table), *models]

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
        return self._view("W", 0)

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
        result: Floats = (U * self._view("D", 0)) @ U.T
        return result

    def objective(self) -> Floats:
        """The minimum (outputs,) of Σ ω e² + ridge |W - prior|² over the samples that the first head remembers."""
        return self._view("ENERGY", 0).copy()

    def scaling(self) -> tuple[Floats, Floats]:
        """Mean and scale (inputs,) by which the network sees (x - mean) · scale, as copies."""
        return self._view("MEAN").copy(), self._view("SCALE").copy()

    def set_scaling(self, mean: Floats, scale: Floats, first: int = 0) -> None:
        self._view("MEAN")[first:], self._view("SCALE")[first:] = mean, scale
        if self._models is not None:
            self._view("SCALE", "mixture")[first:] = scale

    def set_target_offset(self, offset: Floats) -> None:
        if self._models is not None and self.outputs == 1 and not self._layout.settings["classes"]:
            origin = (1 + _experts("logarithm").SHIFT) * float(offset[0])
            self._view("ORIGIN", "log products")[:] = origin if 0 < origin < math.inf else 0.0

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
        self._options = self._options.copy()  # a copy of the engine shares them
        self._options[layout.O_LR] = lr
        self._view("NUMBERS", 0)[layout.H_FORGETTING] = forgetting
        if batch != self.batch_size:
            self._set(batch=batch)

    def _set(self, **settings: int) -> None:
        """Change settings that the layout of the state does not depend on."""
        state = self._state
        self._allocate(self.inputs, self.outputs, self._layout.hidden, self._layout.settings | settings)
        self._state = state

    def noise_variance(self) -> Floats:
        """The variance (outputs,) of targets about predictions.

        With `loss="huber"` it is that of a normal distribution with the 90 % quantile of |error| of recent rows, for
        errors e/√(1 + φᵀBφ) made before learning; for errors e where there are experts. With `loss="squared"` it is
        that of ridge regression,

            σ² = (Σ e²/(1 + φᵀBφ) - Σ_j ridge_j |W_j - prior_j|²) / (n - tr BΦᵀΦ),

        since the errors e made before learning sum to the objective at its minimum, and BΦᵀΦ = I - B ridge.
        """
        if self.robust:
            if self._models is None:
                return (self._view("ERROR")[:, 2] / NINE_TENTHS) ** 2
            unit, error = np.sqrt(self._view("GAIN")), self._view("ERROR", "mixture")[:, 2]
            sizes = np.divide(error, unit, out=np.zeros_like(error), where=unit > 0)
            result: Floats = (sizes / NINE_TENTHS) ** 2
            return result
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
        self._view("ERROR")[:] = quantiles
        self._view("ERROR_RUN")[:] = 0.0
        if self._models is not None:
            self._view("ERROR", "mixture")[:] = quantiles * np.sqrt(self._view("GAIN"))[:, None]
            self._view("ERROR_RUN", "mixture")[:] = 0.0

    def set_plausible_targets(self, errors: Floats, low: Floats, high: Floats) -> None:
        self._set_error_quantiles(errors)
        self._view("RANGE")[:] = np.stack([low, high], 1)

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
        penalty = (self.head - self._view("PRIOR", 0)) ** 2 @ ridge
        return residual_degrees(penalty, self.samples, free)

    def _view(self, name: str, of: int | str = "network") -> NDArray[Any]:
        """A part of the state: of an expert or of the mixture by their names, or of a head by its number."""
        key = f"{name}{of}" if isinstance(of, int) else layout.part_name(of, name)
        return self._layout.part(self._state, key)

    def parts_of(self, expert: str) -> PartsOf:
        """The parts of an expert, as its own functions see them."""
        return PartsOf(
            self.inputs, self.outputs, {name: self._view(name, expert) for name in self._layout.names_of(expert)}
        )

    def copy(self) -> Engine:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._state, other._buffers, other._kernels = self._state.copy(), [], None
        return other

    # ------------------------------------------------------------------ the mixture after several passes

    def answers(self, X: Floats) -> Floats:
        """The answers (n, experts, outputs) of all experts to rows (n, inputs), in deviations of the outputs."""
        told = self._models.predictions(X, self.outputs) if self._models else None
        count, workspace = len(self.expert_names), np.zeros(self._layout.workspace)
        start = int(self._layout.numbers[positions["row", "ANSWERS"]])
        answers, out, kernels = np.empty((len(X), count, self.outputs)), np.empty((1, self.outputs)), self._ready()
        for i in range(len(X)):
            mine = None if told is None else told[i : i + 1]
            kernels.run("predict", workspace, X[i : i + 1], None, None, mine, out)
            answers[i].flat = workspace[start : start + answers[i].size]
        return answers

    def boost_trees(self) -> None:
        """Grow all trees anew, each once on the rows that are stored, by boosting."""
        trees, log = _experts("trees"), int(self._layout.numbers[positions["row", "LOG"]]) + 1
        workspace, regression = np.zeros(self._layout.workspace), not self._layout.settings["classes"]
        workspace[log] = regression and self.outputs == 1 and self._view("ORIGIN", "log products")[0] > 0
        trees.clear_trees(self.parts_of("trees"))
        self._set(rate=trees.TABLE_RATE)
        self._ready().run("boost", workspace, np.zeros((1, self.inputs)), None, None, None, np.empty(1))
        self._set(rate=trees.RATE)

    def take_network(self, other: Engine) -> None:
        """Continue with the network and the heads of another engine of the same form, and models fitted on all rows."""
        if self._models:
            self._models.refit()
        for name in saved.network_parts(other):
            saved.part(self, name)[...] = saved.part(other, name)

    def set_mixture(self, evidence: float, parts: Mapping[str, Floats]) -> None:
        """Set parts of the mixture by their names, and the number of rows that its losses sum."""
        for name, values in parts.items():
            self._view(name, "mixture")[...] = values
        self._view("COUNTS", "mixture")[_experts("step").C_EVIDENCE] = evidence

    # ------------------------------------------------------------------ saving and growth

    def __getstate__(self) -> dict[str, Any]:
        return saved.pickled(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved.unpickle(self, state)

    def state_dict(self) -> dict[str, Any]:
        return saved.state_dict(self)

    def load_state_dict(self, state_dict: dict[str, Any], entry: str = "state_dict") -> None:
        self.__dict__.update(saved.loaded(self, state_dict, entry).__dict__)

    def resize(self, inputs: int, outputs: int) -> None:
        """Add inputs or outputs as if they had been there, at zero, from the start.

        That is exact for the network: an input at zero never moved the body or the head, and the head that fits a
        target of zero from a prior of zero is zero. Of the experts, the tree in growth is begun anew, and where the
        window becomes shorter its latest rows are kept.
        """
        self.__dict__.update(saved.grown(self, inputs, outputs).__dict__)

    def resized(self, inputs: int, outputs: int, **settings: int) -> Engine:
        """A copy with a state of zeros for these numbers of inputs and outputs, and other settings."""
        other = self.copy()
        # Copies share one generator until it is drawn from.
        other._rng = read_generator("generator", generator_state(self._rng))
        other._allocate(inputs, outputs, self._layout.hidden, self._layout.settings | settings)
        return other

    # ------------------------------------------------------------------ learning

    def _ready(self) -> Kernels:
        """The kernels, compiled, with the addresses of what does not change from call to call."""
        kernels = self._kernels
        if kernels is None or kernels.state is not self._state or kernels.options is not self._options:
            kernels = self._kernels = Kernels(self)
        return kernels

    def learn(self, X: Floats, Y: Floats, sample_weight: Floats | None = None) -> Floats:
        """Learn the rows of X (n, inputs) and Y (n, outputs) in order; returns the predictions made before.

        The arrays are float64 and finite, which the interfaces check. Where the network has diverged `NotFinite` is
        raised and nothing changes.
        """
        weights = np.ones(len(X)) if sample_weight is None else sample_weight
        self._spare -= len(X)
        if self._spare < 0:
            self._make_room(len(X))
        several = len(X) > self.batch_size or bool(self._models)
        other = self.copy() if several else self  # a single step is refused before any change
        out, kernels = np.empty((len(X), self.outputs)), other._ready()
        answers = None
        if other._models:
            other._models, answers = other._models.learned(X, Y, weights)
        done = kernels.run("learn", np.zeros(self._layout.workspace), X, Y, weights, answers, out)
        if done < len(X):
            raise NotFinite(
                f"the network's output for sample {done} of this call is not finite: nothing was learned; "
                "lower the learning rate, or rescale inputs, targets and weights"
            )
        if several:
            self.__dict__.update(_state=other._state, _models=other._models, _kernels=kernels)
        return out

    def learn_row(self, x: Sequence[float], y: Iterable[float], weight: float) -> None:
        """Learn one row of a positive weight, without allocating arrays."""
        if self._models:
            super().learn_row(x, y, weight)
            return
        self._spare -= 1
        if self._spare < 0:
            self._make_room(1)
        row = self._buffers.pop() if self._buffers else RowBuffer(self)
        row.write(row.values, 0, *x, *y, weight)
        if not row.run(self._ready(), "learn"):
            self.learn(row.x, row.y, row.weight)  # raises NotFinite
        self._buffers.append(row)

    def predict(self, X: Floats) -> Floats:
        return self._predict(X, None)

    def predict_with_leverage(self, X: Floats) -> tuple[Floats, Floats]:
        leverage = np.empty(len(X))
        return self._predict(X, leverage), leverage

    def predict_row(self, x: Sequence[float]) -> list[float]:
        """The prediction for one row, without allocating arrays; threads may call it at the same time."""
        if self._models:
            return super().predict_row(x)
        try:
            row = self._buffers.pop()
        except IndexError:
            row = RowBuffer(self)
        row.write_x(row.values, 0, *x)
        row.run(self._ready(), "predict")
        out: list[float] = row.out.ravel().tolist()
        self._buffers.append(row)
        return out

    def _predict(self, X: Floats, leverage: Floats | None) -> Floats:
        out, kernels = np.empty((len(X), self.outputs)), self._ready()
        answers = self._models.predictions(X, self.outputs) if self._models else None
        workspace = np.zeros(self._layout.workspace)  # its own: threads may predict at the same time
        kernels.run("predict" if leverage is None else "leverage", workspace, X, None, None, answers, out, leverage)
        return out


class Kernels:
    """The compiled kernels of an engine, and the addresses that they get."""

    def __init__(self, engine: Engine) -> None:
        self.table, self.classes = engine._table, bool(engine._layout.settings["classes"])
        self.state, self.options = engine._state, engine._options
        self.numbers, self.models = engine._layout.numbers, engine._layout.models
        self.calls = np.zeros((engine._layout.sizes["calls"], 2), dtype=np.int64)
        widths = self.numbers[self.numbers.size - engine._layout.after_widths :]
        self.fixed = tuple(array.ctypes.data for array in (self.state, self.numbers, widths, self.options, self.calls))
        self._compiled: dict[str, Callable[[int, int], int]] = {}

    def __getitem__(self, name: str) -> Callable[[int, int], int]:
        """The function to learn, to predict, or to predict with leverages, compiled when it is first needed."""
        found = self._compiled.get(name)
        if found is None:
            step = _experts("step")
            top = {"learn": step.learn, "boost": _experts("trees").boost}.get(name, step.predict)
            rows = step.kernels(self.table, name == "learn", self.classes, name == "leverage")
            what = "the stream engine with experts" if len(self.table) > 1 else "the stream engine"
            compile_kernels([top, *(kernel for row in rows for kernel in row if kernel)], what)
            rows[len(self.table) : len(self.table)] = [[None, None]] * self.models
            for own, row in zip(self.calls, rows, strict=True):
                own[:] = [kernel.address if kernel else known for kernel, known in zip(row, own, strict=True)]
            found = self._compiled[name] = _CALL(top.address)
        return found

    def run(
        self, name: str, workspace: Floats, X: Floats, Y: Floats | None,
        weight: Floats | None, answers: Floats | None, out: Floats, leverage: Floats | None = None,
    ) -> int:  # fmt: skip
        """Call a kernel for the rows of X; returns how many it has finished."""
        given = [None if array is None else np.ascontiguousarray(array) for array in (X, Y, weight, answers)]
        given += [out, leverage]
        addresses = (0 if array is None or not array.size else array.ctypes.data for array in given)
        start = workspace.ctypes.data
        PACK_FRAME(workspace.data, 0, start, *self.fixed, *addresses)
        return self[name](start, len(X))


class RowBuffer:
    """Arrays that pass one row to the kernels and its prediction back, reused for many rows."""

    def __init__(self, engine: Engine) -> None:
        inputs, outputs = engine.inputs, engine.outputs
        values = np.zeros(inputs + outputs + 1)
        self.values = values.data  # x, then y, then the weight
        self.x, self.y = values[:inputs].reshape(1, inputs), values[inputs:-1].reshape(1, outputs)
        self.weight, self.out = values[-1:], np.zeros((1, outputs))
        workspace = np.zeros(engine._layout.workspace)
        self.workspace, self.start = workspace.data, workspace.ctypes.data
        self.addresses = self.x.ctypes.data, self.y.ctypes.data, self.weight.ctypes.data, 0, self.out.ctypes.data, 0
        self.write, self.write_x = struct.Struct(f"{values.size}d").pack_into, struct.Struct(f"{inputs}d").pack_into

    def run(self, kernels: Kernels, name: str) -> int:
        """Call a kernel for the row; returns 0 where it was refused."""
        PACK_FRAME(self.workspace, 0, self.start, *kernels.fixed, *self.addresses)
        return kernels[name](self.start, 1)


def compile_for_learners() -> None:
    """Compile what the learners of numbers and of classes call by default, unless it is in the cache."""
    for classes in (False, True):
        kernels = Engine.for_raw_rows(1, 2, classes=classes, seed=0, experts=())._ready()
        for name in ("learn", "leverage", "boost"):
            kernels[name]


_CALL = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)


def _experts(module: str = "") -> Any:
    """The package of experts or one of its modules, which stand on this one and are imported when they are needed."""
    return resolve_name("sepsa.stream.experts" + (f".{module}" if module else ""))


def widths(sizes: int | Sequence[int]) -> Sequence[int]:
    """The widths of hidden layers from `hidden_layer_sizes`."""
    return sizes if isinstance(sizes, Iterable) else (sizes,)
