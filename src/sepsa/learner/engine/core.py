"""What a compiled engine is at a moment: its form, its memory and its options. An engine replaces it whole.

Here are the weights of its body as well, and its errors: the variance of targets about predictions, and the quantiles
of |error|.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from sepsa.learner.arithmetic.body import FOURIER
from sepsa.learner.engine.calls import Kernels, RowBuffer
from sepsa.learner.experts import network_parts, step
from sepsa.learner.experts.frame import Expert, given, row
from sepsa.learner.memory.memory import Layout, Memory
from sepsa.learner.memory.parts import Floats
from sepsa.learner.scales import quotient
from sepsa.states import schema
from sepsa.validation import at_least

BANDWIDTH = 1.4  # of Fourier features, over standardized inputs
NINE_TENTHS = 1.6448536269514722  # standard deviations within which nine tenths of a normal distribution lie
NORMAL_QUANTILES: Floats = np.array([0.6744897501960817, 1.2815515655446004, NINE_TENTHS])


class Form(NamedTuple):
    """What the sizes of an engine follow from."""

    inputs: int
    outputs: int
    hidden: tuple[int, ...]
    heads: list[list[Any]]  # of each the features it sees, its ridge and its forgetting
    settings: dict[str, int]
    most_rows: int  # that the trees keep
    table: tuple[Expert, ...]  # all experts that there are, the network first
    mixed: bool  # whether there are other experts; else the network is alone

    @property
    def experts(self) -> tuple[Expert, ...]:
        """The experts of this engine: the network alone, or for numbers without those that answer for classes alone."""
        first, *others = self.table
        classes = self.settings["classes"]
        able = (each for each in others if classes or not each.for_classes)
        return (first, *able) if self.mixed else (first,)

    def sizes(self) -> dict[str, int]:
        """The sizes of an engine of this form, without those that experts know."""
        d, hidden, experts = self.inputs, self.hidden, len(self.experts)
        first, last = sum(hidden[:1]), sum(hidden[-1:])
        widths = zip((d, *hidden), hidden, strict=False)
        return {
            "inputs": at_least("inputs", d, 1),
            "outputs": at_least("outputs", self.outputs, 1),
            "depth": len(hidden),
            "width": first,
            "hidden": last,
            "heads": len(self.heads),
            "parameters": sum((below + 1) * at_least("hidden", width, 1) for below, width in widths),
            "units": d + sum(hidden),
            "deltas": 2 * max(hidden, default=0),
            "features": last + d + 1,
            "stride": 2 * last + d + 2,
            "experts": experts,
            "stacked": experts - 1,
            "candidates": experts + 1,
            "tree_slots": self.settings["trees"] + 1,
            **self.settings,
        }

    def head(self, subset: str) -> dict[str, int]:
        """The sizes of a head that sees these features."""
        units = 0 if subset == "inputs" else sum(self.hidden[-1:])
        p = units + 1 + (0 if subset == "hidden" else self.inputs)
        seen = network_parts.HIDDEN if subset == "hidden" else network_parts.END
        return {"subset": seen, "units": units, "p": p, "triangle": p * (p - 1) // 2}

    def layout(self) -> Layout:
        """Where an engine of this form stores its parts."""
        experts = self.experts
        groups = [*(each.group for each in experts), network_parts.heads]
        groups += [step.parts, row] if len(experts) > 1 else []
        heads = [self.head(subset) for subset, _, _ in self.heads]
        made = Layout(given, groups, self.sizes(), {"heads": heads})
        schema.check_memory("a network of this size", 8 * made.size)
        return made

    def with_settings(self, **settings: int) -> Form:
        return self._replace(settings=self.settings | settings)


@dataclass
class EngineState:
    """An engine at a moment. A change that may fail is made to a copy, which then takes the place of the former."""

    form: Form
    memory: Memory
    options: Any  # a record of `OPTIONS`
    rng: np.random.Generator
    spare: int = 0  # rows that can be learned before there must be more room, unless that is looked at again
    buffers: list[RowBuffer] = field(default_factory=list, init=False)  # of calls that have ended
    _kernels: Kernels | None = field(default=None, init=False)

    @property
    def kernels(self) -> Kernels:
        """The kernels, with the addresses of what does not change from call to call."""
        if self._kernels is None:
            self._kernels = Kernels(self.form.experts, self.form.hidden, self.memory, self.options)
        return self._kernels

    def copy(self) -> EngineState:
        """Another one in the same state."""
        return replace(self, memory=Memory(self.memory.layout, self.memory.vector.copy()))

    def of_form(self, form: Form) -> EngineState:
        """Another one of this form, before any row, with a generator of its own."""
        return started(form, self.options, deepcopy(self.rng))  # copies share a generator until it is drawn from

    def with_settings(self, **settings: int) -> EngineState:
        """This one with settings on which the places of its parts do not depend; it shares the memory."""
        if settings.items() <= self.form.settings.items():
            return self
        form = self.form.with_settings(**settings)
        return replace(self, form=form, memory=Memory(form.layout(), self.memory.vector))

    @property
    def names(self) -> list[str]:
        """The names of the experts in the order of their answers, the network's first."""
        return [expert.name for expert in self.form.experts]

    # ------------------------------------------------------------------ errors

    def variance(self) -> Floats:
        """The variance (outputs,) of targets about predictions.

        With `loss="huber"` it is that of a normal distribution with the 90 % quantile of |error| of recent rows, for
        errors e/√(1 + c φᵀBφ) made before learning, those of the mixture where there are experts; c is the setting
        `inflation`. With `loss="squared"` it is that of ridge regression,

            σ² = (Σ e²/(1 + φᵀBφ) - Σ_j ridge_j |W_j - prior_j|²) / (n - tr BΦᵀΦ),

        since the errors e made before learning sum to the objective at its minimum, and BΦᵀΦ = I - B ridge.
        """
        if not self.form.settings["robust"]:
            penalty, degrees = self.penalty_and_residual_degrees()
            return np.maximum(self.memory("ENERGY", "heads", 0) - penalty, 0.0) / degrees
        sizes = self.memory("ERROR", "network")[:, 2]
        if self.form.mixed:
            sizes = quotient(self.memory("ERROR", "mixture")[:, 2], np.sqrt(self.memory("GAIN", "network")))
        return (sizes / NINE_TENTHS) ** 2

    def set_quantiles(self, quantiles: Floats) -> None:
        """Set the quantiles (outputs, 3) of |error|."""
        groups = {"network": quantiles}
        if self.form.mixed:
            groups["mixture"] = quantiles * np.sqrt(self.memory("GAIN", "network"))[:, None]
        for group, values in groups.items():
            self.memory("ERROR", group)[:, :3], self.memory("ERROR_RUN", group)[:] = values, 0.0

    def penalty_and_residual_degrees(self) -> tuple[Floats, float]:
        """Of the first head the ridge's part of the objective (outputs,), and samples less degrees of freedom."""
        part = self.memory.of("heads", 0)
        ridge, D = part("RIDGE"), part("D")
        column, row = np.tril_indices(len(D), -1)  # U's columns lie one after the other
        free = len(D) - float(D @ ridge + (part("U") ** 2 * ridge[row]) @ D[column])
        penalty, samples = (part("W") - part("PRIOR")) ** 2 @ ridge, float(part("NUMBERS")["samples"])
        degrees = samples - free
        if degrees > 0.1 * samples:
            return penalty, degrees
        return 0 * penalty, max(samples, np.finfo(float).tiny)  # nearly no degrees, as with small weights


def started(form: Form, options: Any, rng: np.random.Generator) -> EngineState:
    """An engine of this form before any row; the weights of its body are zero."""
    memory = Memory(form.layout())
    memory.start()
    for h, (_, strength, keeps) in enumerate(form.heads):
        memory("D", "heads", h)[:], memory("RIDGE", "heads", h)[:] = 1 / strength, strength
        numbers = memory("NUMBERS", "heads", h)
        numbers["forgetting"], numbers["ridge"] = keeps, strength
    return EngineState(form, memory, options, rng)


# ---------------------------------------------------------------------- the weights of the body


def layers(core: EngineState) -> list[tuple[Floats, Floats]]:
    """Weight (width, inputs) and bias (width,) of each hidden layer, as views in torch's shapes."""
    views, at, theta = [], 0, core.memory("THETA", "network")
    width = core.form.inputs
    for h in core.form.hidden:
        weight = theta[at : at + width * h].reshape(width, h).T
        at += width * h
        views.append((weight, theta[at : at + h]))
        at, width = at + h, h
    return views


def draw(core: EngineState) -> None:
    """Draw the weights and biases of all layers."""
    rng, settings = core.rng, core.form.settings
    for weight, bias in layers(core):
        weight[:] = body_weights(rng, settings, weight.shape, weight.shape[1])
        if settings["activation"] == FOURIER:
            bias[:] = rng.uniform(0.0, 2 * math.pi, bias.shape)
        else:
            bias[:] = rng.normal(0.0, 0.5, bias.shape)  # spreads the kinks over the data


def body_weights(rng: np.random.Generator, settings: Mapping[str, int], shape: Any, inputs: int) -> Any:
    """Random weights for units with these inputs: normal for Fourier features, else Kaiming uniform."""
    if settings["activation"] == FOURIER:
        return rng.normal(0.0, BANDWIDTH * math.sqrt(1 / inputs), shape)
    bound = math.sqrt(6 / inputs)
    return rng.uniform(-bound, bound, shape)
