"""The engine with experts: the compiled network, built-in experts and models of the user, stacked and weighted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np

from sepsa.heads.protocols import NotFinite
from sepsa.jit import announce_compilation
from sepsa.states import schema
from sepsa.stream.engine.compiled import NINE_TENTHS, Engine, RowBuffer
from sepsa.stream.engine.protocol import FitPlan, Floats, StreamEngine
from sepsa.stream.experts import layout, step
from sepsa.stream.experts.layout import ExpertLayout
from sepsa.stream.experts.models import ModelExperts
from sepsa.stream.experts.trees import BINS, DEPTH, G_CURSOR, G_LEVEL, G_RANDOM, LATE, LEAVES, NOWHERE, TREES

RIDGE = 10.0  # of the products
LOGIT_RIDGE = 1.0
BY_ROW = "ROWS", "TARGETS", "SUMS", "WEIGHTS", "LEAF_OF_ROW"  # parts that go with the rows of the window


class ExpertEngine(StreamEngine):
    """A compiled network with experts beside it: neighbours, trees, products, the last target, the mean, your models.

    Choose it for targets that a small smooth network fits badly: thresholds, many clusters, products of inputs, targets
    that persist, also those of a key that indicators among the inputs give, logits that are linear. The network is an
    `Engine` and learns as it does without experts; predictions are a mixture of all, weighted by recent errors, and of
    a least-squares stack of them (`sepsa.stream.experts.stack`).
    """

    def __init__(self, network: Engine, classes: bool, experts: Sequence[Any] = ()) -> None:
        self._network, self._classes = network, classes
        self._models = ModelExperts(experts, classes)
        self._allocate()
        part = self._part
        part("D")[:] = 1 / RIDGE
        part("LOGIT_D")[:] = 1 / LOGIT_RIDGE
        part("BINARY")[:] = 1.0
        part("WEIGHT")[0] = 1.0
        part("SPLIT_THRESHOLDS")[:] = NOWHERE
        part("GROWTH")[[G_LEVEL, G_RANDOM]] = -1.0, 1.0
        part("NODES")[:] = LATE
        part("UNIT")[:] = 1.0 if classes else 0.0

    def _allocate(self) -> None:
        network = self._network
        self._layout = ExpertLayout(network.inputs, network.outputs, len(self._models), network.robust, self._classes)
        schema.check_memory("experts for a network of this size", 8 * self._layout.size)
        self._state = np.zeros(self._layout.size)
        self._work = np.zeros(self._layout.workspace)
        self._buffers: list[tuple[RowBuffer, Floats, Floats]] = []

    def _part(self, name: str) -> Any:
        return self._layout.part(self._state, name)

    @classmethod
    def options(cls, parameters: Mapping[str, Any], for_fit: bool) -> dict[str, Any]:
        return Engine.options(parameters, for_fit) | {"body": "experts", "experts": parameters["experts"]}

    @classmethod
    def fit_plan(cls, parameters: Mapping[str, Any], inputs: int) -> FitPlan:
        return Engine.fit_plan(parameters, inputs)

    @classmethod
    def for_raw_rows(
        cls, inputs: int, outputs: int, *, classes: bool, seed: int, experts: Sequence[Any] = (), **options: Any
    ) -> ExpertEngine:
        return cls(Engine.for_raw_rows(inputs, outputs, classes=classes, seed=seed, **options), classes, experts)

    # ------------------------------------------------------------------ properties

    @property
    def inputs(self) -> int:  # type: ignore[override]
        return self._network.inputs

    @property
    def outputs(self) -> int:  # type: ignore[override]
        return self._network.outputs

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        return self._network.batch_size

    @property
    def robust(self) -> bool:  # type: ignore[override]
        return self._network.robust

    @property
    def samples(self) -> float:
        return self._network.samples

    @property
    def steps(self) -> int:
        return self._network.steps

    @property
    def outliers(self) -> int:
        return self._network.outliers

    @property
    def chosen(self) -> dict[str, Any]:
        """The network's choice, and under `experts` the weight of each expert, of the stack and inside the stack."""
        counts, weights = self._part("COUNTS"), self._part("WEIGHT").tolist()
        names = [*self._layout.built_in, *self._models.names, "stack"]
        return self._network.chosen | {
            "expert": names[int(counts[layout.C_BEST])],
            "expert_since": int(counts[layout.C_SINCE]),
            "experts": dict(zip(names, weights, strict=True)),
            "stack": dict(zip(names[1:-1], self._part("STACK").tolist(), strict=True)),
        }

    def scaling(self) -> tuple[Floats, Floats]:
        """Mean and scale (inputs,) of the network."""
        return self._network.scaling()

    def set_scaling(self, mean: Floats, scale: Floats, first: int = 0) -> None:
        self._network.set_scaling(mean, scale, first)
        self._part("CENTRE")[first:], self._part("SCALE")[first:] = mean, scale

    def set_output_weights(self, weights: Floats | float) -> None:
        self._network.set_output_weights(weights)
        self._part("UNIT")[:] = np.sqrt(weights)

    def set_typical_inputs(self, distances: Floats | float, first: int = 0) -> None:
        self._network.set_typical_inputs(distances, first)

    def set_plausible_targets(self, errors: Floats, low: Floats, high: Floats) -> None:
        self._network.set_plausible_targets(errors, low, high)
        self._set_errors(errors)

    def _set_errors(self, errors: Floats) -> None:
        self._part("ERROR")[:] = errors * self._part("UNIT")[:, None]
        self._part("ERROR_RUN")[:] = 0.0

    def set_typical_weight(self, weight: float) -> None:
        self._network.set_typical_weight(weight)
        self._part("COUNTS")[layout.C_WEIGHT] = weight

    def schedule(self) -> tuple[float, float, int]:
        return self._network.schedule()

    def set_schedule(self, lr: float, forgetting: float, batch: int) -> None:
        self._network.set_schedule(lr, forgetting, batch)

    def noise_variance(self) -> Floats:
        """The variance (outputs,) of a normal law whose nine tenths reach as far as those of the recent errors."""
        if not self.robust:
            return self._network.noise_variance()
        unit, error = self._part("UNIT"), self._part("ERROR")[:, 2]
        sizes = np.divide(error, unit, out=np.zeros_like(error), where=unit > 0)
        variance: Floats = (sizes / NINE_TENTHS) ** 2
        return variance

    def set_effective_samples(self, samples: float, noise: Floats) -> None:
        self._network.set_effective_samples(samples, noise)

    def calibration_losses(self) -> Floats:
        losses: Floats = self._part("CALIBRATION").copy()
        return losses

    def set_calibration_losses(self, losses: Floats) -> None:
        self._part("CALIBRATION")[:] = losses

    # ------------------------------------------------------------------ copies and saved states

    def copy(self) -> ExpertEngine:
        other = object.__new__(ExpertEngine)
        other.__dict__.update(self.__dict__)
        other._network, other._state = self._network.copy(), self._state.copy()
        other._work, other._buffers = np.zeros_like(self._work), []
        return other

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_buffers": []}

    def state_dict(self) -> dict[str, Any]:
        return {
            "inputs": self.inputs,
            "outputs": self.outputs,
            "network": self._network.state_dict(),
            "experts": {name: self._part(name).copy() for name in self._layout.shapes},
            "models": self._models.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any], entry: str = "state_dict") -> None:
        new = schema.read(entry, state_dict, {"inputs", "outputs", "network", "experts", "models"})
        other = self.copy()
        other._network.load_state_dict(new["network"], new.path("network"))
        for name, size in (("inputs", other.inputs), ("outputs", other.outputs)):
            new.equal(name, size)
        other._allocate()
        arrays, numbers = new.entries("experts", set(other._layout.shapes)), other._layout.numbers
        bounds = {  # of parts by which kernels address others
            "SPLIT_INPUTS": (0, other.inputs - 1),
            "CHOSEN": (0, other.inputs - 1),
            "CUTS": (0, BINS * numbers[layout.X_TREE_INPUTS] - 1),
            "LEAF_OF_ROW": (0, LEAVES - 1),
            "BINS": (0, BINS - 1),
        }
        for name in other._layout.shapes:
            part = other._part(name)
            part[...] = arrays.array(name, part.shape, part.dtype)
            if name in bounds:
                low, high = bounds[name]
                if part.min() < low or part.max() > high or (part != np.floor(part)).any():
                    raise arrays.damaged(name, f"integers from {low} to {high}", part)
        counts, growth = other._part("COUNTS"), other._part("GROWTH")
        most = [np.inf, numbers[layout.X_WINDOW], numbers[layout.X_WINDOW] - 1, np.inf, np.inf]
        if (counts < 0).any() or (counts > [*most, numbers[layout.X_EXPERTS], np.inf, np.inf]).any():
            raise arrays.damaged("COUNTS", "numbers within the window and the experts", counts)
        limits, steps = [TREES - 1, DEPTH, counts[layout.C_FILLED], 2**32 - 1], growth[: G_RANDOM + 1]
        if (steps < [0, -1, 0, 0]).any() or (steps > limits).any() or (steps != np.floor(steps)).any():
            raise arrays.damaged("GROWTH", f"integers up to {limits}", growth)
        rows, nodes, level = np.arange(numbers[layout.X_WINDOW]), other._part("NODES"), int(growth[G_LEVEL])
        if (
            level >= 0
            and ((nodes != LATE) & (nodes >> np.where(rows < growth[G_CURSOR], level, max(level - 1, 0)) > 0)).any()
        ):
            raise arrays.damaged("NODES", f"nodes of level {level}", nodes)
        other._models = self._models.loaded(new["models"], new.path("models"))
        self.__dict__.update(other.__dict__)

    # ------------------------------------------------------------------ growth

    def resize(self, inputs: int, outputs: int) -> None:
        """Add inputs or outputs as if they had been there, at zero, from the start.

        The tree in growth is begun anew, and where the window becomes shorter its latest rows are kept.
        """
        grown = self.copy()
        grown._network.resize(inputs, outputs)
        grown._allocate()
        for name in self._layout.shapes:
            old, new = self._part(name), grown._part(name)
            if old.shape == new.shape:
                new[...] = old
            elif name not in (*BY_ROW, "PACKED", "NODES", "BINS", "HISTOGRAMS"):
                new[tuple(slice(0, size) for size in old.shape)] = old
        for name, ridge in (("D", RIDGE), ("LOGIT_D", LOGIT_RIDGE)):
            grown._part(name)[self._part(name).size :] = 1 / ridge
        grown._part("BINARY")[self.inputs :] = 1.0
        grown._part("UNIT")[self.outputs :] = 1.0 if self._classes else 0.0
        counts = grown._part("COUNTS")
        filled, window = int(counts[layout.C_FILLED]), self._part("WEIGHTS").size
        kept = min(filled, grown._part("WEIGHTS").size)
        latest = (int(counts[layout.C_NEXT]) - kept + np.arange(kept)) % window
        grown._part("ROWS")[:] = grown._part("TARGETS")[:] = 0.0
        grown._part("ROWS")[: self.inputs, :kept] = self._part("ROWS")[:, latest]
        for name in ("TARGETS", "SUMS"):
            grown._part(name)[:kept, : self.outputs] = self._part(name)[latest]
        grown._part("WEIGHTS")[:kept] = self._part("WEIGHTS")[latest]
        grown._part("LEAF_OF_ROW")[:, :kept] = self._part("LEAF_OF_ROW")[:, latest]
        counts[[layout.C_FILLED, layout.C_NEXT]] = kept, kept % grown._part("WEIGHTS").size
        grown._part("NODES")[:] = LATE
        grown._part("GROWTH")[[G_LEVEL, G_CURSOR]] = -1.0, 0.0
        grown._models = self._models
        self.__dict__.update(grown.__dict__)

    # ------------------------------------------------------------------ learning and prediction

    def learn(self, X: Floats, Y: Floats, sample_weight: Floats | None = None) -> Floats:
        """Learn the rows of X (n, inputs) and Y (n, outputs) in order; returns the predictions made before.

        Where the network has diverged `NotFinite` is raised and nothing changes.
        """
        announce_compilation(step.learn, "the stream engine with experts")
        weights = np.ones(len(X)) if sample_weight is None else sample_weight
        network, out = self._network, np.empty((len(X), self.outputs))
        several = len(X) > self.batch_size or len(self._models) > 0
        states = [state.copy() if several else state for state in (network._state, self._state)]
        self._work[:] = 0.0  # answers from an interrupted call belong to another state
        models, extra = self._models.learned(X, Y, weights)
        done = step.learn(
            states[0], network._layout.numbers, network._options, network._dtype_of_body, X, Y, weights, out,
            network._workspace, states[1], self._layout.numbers, extra, self._work,
        )  # fmt: skip
        if done < len(X):
            raise NotFinite(
                f"the network's output for sample {done} of this call is not finite: nothing was learned; "
                "lower lr, or rescale the inputs"
            )
        if several:
            network = copy(network)
            network._state = states[0]
            self.__dict__.update(_network=network, _state=states[1], _models=models)
        return out

    def learn_row(self, x: Sequence[float], y: Iterable[float], weight: float) -> None:
        """Learn one row of a positive weight, without allocating arrays."""
        if self._models.models or not step.learn.overloads:
            super().learn_row(x, y, weight)
            return
        network = self._network
        row, work, extra = self._buffers.pop() if self._buffers else self._new_buffer()
        row.write(row.values, 0, *x, *y, weight)
        if not step.learn(
            network._state, network._layout.numbers, network._options, network._dtype_of_body, row.x, row.y, row.weight,
            row.out, network._workspace, self._state, self._layout.numbers, extra, work,
        ):  # fmt: skip
            self.learn(row.x, row.y, row.weight)  # raises NotFinite
        self._buffers.append((row, work, extra))

    def predict(self, X: Floats) -> Floats:
        return self._predict(X, np.empty(0))

    def predict_with_leverage(self, X: Floats) -> tuple[Floats, Floats]:
        leverage = np.empty(len(X))
        return self._predict(X, leverage), leverage

    def predict_row(self, x: Sequence[float]) -> list[float]:
        """The prediction for one row, without allocating arrays; threads may call it at the same time."""
        if self._models.models or not step.predict.overloads:
            return super().predict_row(x)
        network = self._network
        try:
            row, work, extra = self._buffers.pop()
        except IndexError:
            row, work, extra = self._new_buffer()
        row.write_x(row.values, 0, *x)
        step.predict(
            network._state, network._layout.numbers, network._dtype_of_body, row.x, row.out, row.leverage,
            row.workspace, self._state, self._layout.numbers, extra, work,
        )  # fmt: skip
        out: list[list[float]] = row.out.tolist()
        self._buffers.append((row, work, extra))
        return out[0]

    def _new_buffer(self) -> tuple[RowBuffer, Floats, Floats]:
        return RowBuffer(self._network), np.zeros_like(self._work), np.empty((1, 0, self.outputs))

    def _predict(self, X: Floats, leverage: Floats) -> Floats:
        announce_compilation(step.predict, "the stream engine with experts")
        network, out = self._network, np.empty((len(X), self.outputs))
        step.predict(
            network._state, network._layout.numbers, network._dtype_of_body, X, out, leverage,
            np.empty_like(network._workspace), self._state, self._layout.numbers,
            self._models.predictions(X, self.outputs), np.zeros_like(self._work),
        )  # fmt: skip
        return out
