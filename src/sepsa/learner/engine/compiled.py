"""The compiled engine: a network that learns by SepSA, alone or as one of several experts, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sepsa.compiled import code
from sepsa.compiled.kernels import CALL
from sepsa.learner.engine import saved
from sepsa.learner.engine.calls import RowBuffer
from sepsa.learner.engine.core import NORMAL_QUANTILES, Form, draw, started
from sepsa.learner.experts import EXPERTS, linear, tree_parts, trees
from sepsa.learner.experts.frame import OPTIONS, Expert
from sepsa.learner.memory.memory import Memory, view
from sepsa.learner.memory.parts import Floats
from sepsa.learner.options import EngineOptions
from sepsa.validation import NotFinite


class Engine:
    """A multilayer perceptron with a recursive-least-squares head, learned sample by sample in compiled code.

    Choose it where samples come one at a time and the network is small; `SepSARegressor` and `SepSAClassifier` use it.
    It equals `SepSA` with `RLS(..., bias_ridge="ridge")` on the same network, step by step; the head is in float64 and
    the rest in float32. `learn` returns the prediction made before each update.

    `loss="huber"` bounds the influence of a row: an error counts as if it were at most 4.5 times the median error, and
    less and less where it is much larger; an input is clipped at 16 times its typical distance from the mean, and a row
    beyond that weighs less; both bounds move out where a tail is longer than a normal one, so that hardly more than one
    row in fifty is bounded (`arithmetic.bounds`); a weight above ten typical ones is replaced by a typical
    one; predictions lie at most half the range of plausible targets outside it. `outliers` counts the rows to which one
    of these applied. `ridge="auto"` and `forgetting="auto"` let several heads share the body (`candidate_heads`):
    predictions are their mixture, weighted by their recent errors; `chosen` is the one with the largest weight.
    `classes` says that targets are indicators, which are bounded, and keeps the log-losses by which scores become
    probabilities (`sepsa.learner.calibration`).

    `skip` lets the head see the inputs beside the last layer. With `standardize` the network sees (x - mean) · scale
    (`set_scaling`), and each output's squared error has a weight of its own in the body's loss (`set_output_weights`);
    a scale or weight of zero belongs to an input or target that has been constant so far, and is set by the first value
    that differs.

    With `body="experts"` the network is one expert of several: neighbours, trees, products, the last target, a linear
    head and others (`sepsa.learner.experts`). Choose them for targets that a small smooth network fits badly:
    thresholds, many clusters, products of inputs, targets that persist, also those of a key that indicators among the
    inputs give, logits that are linear. The network learns as it does alone; predictions are
    a mixture of all, weighted by recent errors, and of a least-squares stack of them. The trees keep the last
    `max_rows` rows, one byte for each input and about 120 more, and fewer rows where that would exceed 32 MiB; memory
    grows with the rows that came. `table` has the experts that there are, the network first.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        hidden: Sequence[int] = (50,),
        *,
        seed: int | None = 0,
        table: tuple[Expert, ...] = EXPERTS,
        **options: Any,
    ) -> None:
        own = EngineOptions(hidden=hidden, **options)
        heads, settings = [list(head) for head in own.heads], own.settings(inputs)
        form = Form(inputs, outputs, tuple(hidden), heads, settings, own.max_rows, table, own.experts)
        self._core = started(form, np.array(own.of_kernels(), OPTIONS.dtype), np.random.default_rng(seed))
        draw(self._core)

    # ------------------------------------------------------------------ properties

    @property
    def form(self) -> Form:
        """The engine's sizes and settings."""
        return self._core.form

    @property
    def memory(self) -> Memory:
        """What the engine has learned: `engine.memory("D", "heads", 0)` is a view of a part of its first head."""
        return self._core.memory

    @property
    def robust(self) -> bool:
        """Whether the loss is "huber"."""
        return bool(self.form.settings["robust"])

    @property
    def inputs(self) -> int:
        return self.form.inputs

    @property
    def outputs(self) -> int:
        return self.form.outputs

    @property
    def batch_size(self) -> int:
        return self.form.settings["batch"]

    @property
    def samples(self) -> float:
        """How many samples the head remembers, as `RLS.samples`."""
        return float(self.memory("NUMBERS", "heads")["samples"])

    @property
    def outliers(self) -> int:
        return int(self.memory("COUNTS", "network")["outliers"])

    @property
    def bounded(self) -> float:
        """The share of `outliers` in all rows, each counted in every pass."""
        counts = self.memory("COUNTS", "network")
        return float(counts["outliers"] / max(1, counts["rows"]))

    @property
    def chosen(self) -> dict[str, Any]:
        """The head with the largest weight in predictions: its features, ridge and forgetting.

        `weights` are those of all heads; `since` is the step at which this one became the first. Where there are
        experts, `experts` has the weight of each and of the stack, and `stack` those inside the stack.
        """
        memory, counts = self.memory, self.memory("COUNTS", "network")
        subset, ridge, forgetting = self.form.heads[counts["best"]]
        weights = memory("WEIGHTS", "network").tolist()
        since = int(counts["since"])
        chosen = {"features": subset, "ridge": ridge, "forgetting": forgetting, "since": since, "weights": weights}
        if not self.form.mixed:
            return chosen
        counts, names = memory("COUNTS", "mixture"), [*self._core.names, "stack"]
        return chosen | {
            "expert": names[counts["best"]],
            "expert_since": int(counts["since"]),
            "experts": dict(zip(names, memory("WEIGHT", "mixture").tolist(), strict=True)),
            "stack": dict(zip(names[1:-1], memory("STACK", "mixture").tolist(), strict=True)),
        }

    def set_scaling(
        self,
        mean: Floats,
        scale: Floats,
        typical: Floats | float = 0.0,
        centre: Floats | None = None,
        excess: Floats | float = 0.0,
        *,
        first: int = 0,
    ) -> None:
        """Standardize inputs as (x - mean) · scale, from input `first` on; the first value sets a scale of zero.

        `typical` is the typical distance of a standardized input from zero, 0 where no value has shown it; values that
        equal the `centre`, the mean where it is None, do not change it. `excess` is how many values were far away.
        """
        parts = {"MEAN": mean, "SCALE": scale, "TYPICAL": typical, "USUAL": typical}
        parts |= {"CENTRE": mean if centre is None else centre, "EXCESS": excess}
        for name, values in parts.items():
            self.memory(name, "network")[first:] = values
        if self.form.mixed:
            self.memory("SCALE", "mixture")[first:] = scale

    def set_output_weights(self, weights: Floats | float) -> None:
        """Weight each output's squared error in the body's loss; the first value sets a weight of zero."""
        self.memory("GAIN", "network")[:] = weights

    def schedule(self) -> tuple[float, float, int]:
        """The body's learning rate, the head's forgetting and the rows of a batch."""
        return float(self._core.options["lr"]), float(self.memory("NUMBERS", "heads")["forgetting"]), self.batch_size

    def set_schedule(self, lr: float, forgetting: float, batch: int) -> None:
        """Set the learning rate, the forgetting and the rows of a batch for the next rows."""
        options = self._core.options.copy()  # a copy of the engine shares them
        options["lr"] = lr
        self.memory("NUMBERS", "heads")["forgetting"] = forgetting
        self._core = replace(self._core.with_settings(batch=batch), options=options)

    def noise_variance(self) -> Floats:
        """The variance (outputs,) of targets about predictions, where φᵀBφ is small."""
        return self._core.variance()

    def set_effective_samples(self, samples: float, noise: Floats) -> None:
        """Scale the head's curvature to this number of samples, and set their noise variance (outputs,).

        Rows that were learned in N passes count N times: A <- A/N corrects that and leaves the head as it is.
        """
        self.memory.divide("rows", max(1.0, self.samples / samples))
        penalty, degrees = self._core.penalty_and_residual_degrees()
        self.memory("ENERGY", "heads", 0)[:] = noise * degrees + penalty
        self._core.set_quantiles(np.sqrt(noise)[:, None] * NORMAL_QUANTILES)

    def set_inflation(self, inflation: int) -> None:
        """Follow the errors e/√(1 + c φᵀBφ) with this c from now on, where the noise is that of recent errors."""
        self._core = self._core.with_settings(inflation=inflation)

    def set_plausible_targets(self, errors: Floats, low: Floats, high: Floats) -> None:
        """Set the quantiles (outputs, 3) of |error|, at 0.5, 0.8 and 0.9, and the range (outputs,) of targets."""
        self._core.set_quantiles(errors)
        self.memory("RANGE", "network")[:] = np.stack([low, high], 1)

    @property
    def calibration_losses(self) -> Floats:
        return self.memory("CALIBRATION", "network")

    def copy(self) -> Engine:
        """Another engine in the same state."""
        other = object.__new__(type(self))
        other._core = self._core.copy()
        return other

    # ------------------------------------------------------------------ the mixture after several passes

    def answers(self, X: Floats) -> Floats:
        """The answers (n, experts, outputs) of all experts to rows (n, inputs), in deviations of the outputs."""
        kernels, layout = self._core.kernels, self.memory.layout
        workspace = np.zeros(layout.workspace)
        own = view(workspace, layout.work["row", "ANSWERS"])
        count = len(self.form.experts)
        found, out = np.empty((len(X), count, self.outputs)), np.empty((1, self.outputs))
        for i in range(len(X)):
            kernels.run(kernels.predict, workspace, X[i : i + 1], None, None, out)
            found[i] = own[:count]
        return found

    def fit_experts(self, parts: Iterable[tuple[Floats, Floats, Floats]]) -> None:
        """Grow all trees anew, each once on the rows that are stored; for numbers fit a linear head to these rows.

        They come in parts of inputs, targets and weights.
        """
        self._boost_trees()
        if not self.form.settings["classes"]:
            memory = self.memory
            unit, mean = np.sqrt(memory("GAIN", "network")), memory("MEAN", "network")
            scale = memory("SCALE", "mixture")
            seen = ((np.nan_to_num(np.clip((X - mean) * scale, -8.0, 8.0)), Y * unit, weight) for X, Y, weight in parts)
            memory("SLOPES", "linear")[:], memory("VALUE", "linear")[:] = linear.fitted(seen)

    def _boost_trees(self) -> None:
        """Grow all trees anew, each once on the rows that are stored, by boosting."""
        core, memory = self._core.with_settings(rate=tree_parts.TABLE_RATE), self.memory
        workspace = np.zeros(memory.layout.workspace)
        memory.restart("trees", *tree_parts.GROWN, *tree_parts.GROWING)
        memory("GROWTH", "trees")["tree"] = 0
        boost = CALL(code.address(trees.boost))
        core.kernels.run(boost, workspace, np.zeros((1, self.inputs)), None, None, np.empty(1))
        memory.restart("trees", *tree_parts.GROWING)  # whose parts at their start take no place in a file

    def take_network(self, other: Engine) -> None:
        """Continue with the network and the heads of another engine of the same form."""
        for group, copy, name in other.memory.layout.places:
            if group in ("network", "heads"):
                self.memory(name, group, copy)[...] = other.memory(name, group, copy)

    def set_mixture(self, evidence: float, parts: Mapping[str, Floats]) -> None:
        """Set parts of the mixture by their names, and the number of rows that its losses sum."""
        for name, values in parts.items():
            self.memory(name, "mixture")[...] = values
        self.memory("COUNTS", "mixture")["evidence"] = evidence

    # ------------------------------------------------------------------ saving and growth

    def __getstate__(self) -> dict[str, Any]:
        return saved.pickled(self._core)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._core = saved.unpickled(state)

    def state_dict(self) -> dict[str, Any]:
        """The engine's state as plain data; an engine that loads it continues bit for bit."""
        return saved.state_dict(self._core)

    def load_state_dict(self, state_dict: dict[str, Any], entry: str = "state_dict") -> None:
        """Continue from the result of `state_dict`; a ValueError names the wrong entry and changes nothing."""
        self._core = saved.loaded(self._core, state_dict, entry)

    def resize(self, inputs: int, outputs: int) -> None:
        """Add inputs or outputs as if they had been there, at zero, from the start.

        That is exact for the network: an input at zero never moved the body or the head, and the head that fits a
        target of zero from a prior of zero is zero. Of the experts, the tree in growth is begun anew, and where the
        window becomes shorter its latest rows are kept.
        """
        self._core = saved.grown(self._core, inputs, outputs)

    # ------------------------------------------------------------------ learning

    def learn(self, X: Floats, Y: Floats, sample_weight: Floats | None = None) -> Floats:
        """Learn the rows of X (n, inputs) and Y (n, outputs) in order; returns the predictions made before.

        The arrays are float64 and finite, which the interfaces check. Where the network has diverged `NotFinite` is
        raised and nothing changes.
        """
        weights = np.ones(len(X)) if sample_weight is None else sample_weight
        core = self._core
        core.spare -= len(X)
        if core.spare < 0:
            core = self._core = saved.roomier(core, len(X))
        if len(X) > self.batch_size:  # a single step is refused before any change
            core = core.copy()
        out, workspace, kernels = np.empty(Y.shape), np.zeros(core.memory.layout.workspace), core.kernels
        done = kernels.run(kernels.learn, workspace, X, Y, weights, out)
        if done < len(X):
            raise diverged(done)
        self._core = core
        return out

    def learn_pass(self, X: Floats, Y: Floats, sample_weight: Floats, forgetting: float, every: int) -> Floats:
        """Learn rows in batches as `learn` does, where the head of a network alone forgets by `forgetting` per batch.

        It forgets all of `every` batches at once, before the first of them.
        """
        core = self._core.copy()
        out, workspace, kernels = np.empty(Y.shape), np.zeros(core.memory.layout.workspace), core.kernels
        numbers = core.memory("NUMBERS", "heads")
        for some, factor in forgetting_steps(len(X), self.batch_size, forgetting, every):
            numbers["forgetting"] = factor
            done = kernels.run(kernels.learn, workspace, X[some], Y[some], sample_weight[some], out[some])
            if done < some.stop - some.start:
                raise diverged(some.start + done)
        self._core = core
        return out

    def learn_row(self, x: Sequence[float], y: Iterable[float], weight: float) -> None:
        """Learn one row of a positive weight, without allocating arrays."""
        core = self._core
        core.spare -= 1
        if core.spare < 0:
            core = self._core = saved.roomier(core, 1)
        row = core.buffers.pop() if core.buffers else RowBuffer(core.memory.layout)
        row.write(row.values, 0, *x, *y, weight)
        kernels = core.kernels
        if not row.run(kernels, kernels.learn):
            self.learn(row.x, row.y, row.weight)  # raises NotFinite
        core.buffers.append(row)

    def predict_row(self, x: Sequence[float]) -> list[float]:
        """The prediction for one row, without allocating arrays; threads may call it at the same time."""
        core = self._core
        try:
            row = core.buffers.pop()
        except IndexError:
            row = RowBuffer(core.memory.layout)
        row.write_x(row.values, 0, *x)
        kernels = core.kernels
        row.run(kernels, kernels.predict)
        out: list[float] = row.out.tolist()
        core.buffers.append(row)
        return out

    def predict(self, X: Floats, leverage: Floats | None = None) -> Floats:
        """The predictions (n, outputs); fills `leverage` (n,) with φᵀBφ."""
        core, out = self._core, np.empty((len(X), self.outputs))
        kernels = core.kernels
        workspace = np.zeros(core.memory.layout.workspace)  # its own: threads may predict at the same time
        kernels.run(kernels.predict, workspace, X, None, None, out, leverage)
        return out


def forgetting_steps(rows: int, batch: int, forgetting: float, every: int) -> Iterator[tuple[slice, float]]:
    """Rows in batches and the factor by which the head forgets in each of these: the first of `every` for all."""
    for start in range(0, rows, batch * every):
        first, stop = min(start + batch, rows), min(start + batch * every, rows)
        yield slice(start, first), forgetting ** -(-(stop - start) // batch)
        if first < stop:
            yield slice(first, stop), 1.0


def diverged(sample: int) -> NotFinite:
    """The error of a network whose output for a sample is not finite."""
    return NotFinite(
        f"the network's output for sample {sample} of this call is not finite: nothing was learned; "
        "lower the learning rate, or rescale inputs, targets and weights"
    )
