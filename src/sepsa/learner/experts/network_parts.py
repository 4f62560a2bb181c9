"""What the network and its heads store, and how that grows by an input."""

from __future__ import annotations

import numpy as np

from sepsa.learner.experts.frame import alike, given
from sepsa.learner.memory.parts import Field, Part, Record, work
from sepsa.learner.memory.views import Group

# The part of φ = [hidden units, inputs, 1] that a head sees: its end, from some hidden unit on, or hidden units and 1.
END, HIDDEN = range(2)
TEMPERATURES = 17  # inverse ones, from 1/2 in steps of √2, those of `calibration.INVERSE_TEMPERATURES`


def grow_first_layer(old, new, before, after):
    """Growth of the body's weights: those of new inputs come after those of the others, in the first layer."""
    cut, end = (sizes["inputs"] * sizes["width"] for sizes in (before, after))
    new[:cut], new[end:] = old[:cut], old[cut:]


def before_bias(before, after):
    """The places of a head's features after new inputs, which come before the bias, the last."""
    return np.r_[0 : before["p"] - 1, after["p"] - 1]


def grow_before_bias(old, new, before, after):
    """Growth of a part whose last axis are a head's features."""
    new[tuple(slice(0, length) for length in old.shape[:-1])][..., before_bias(before, after)] = old


def grow_triangle(old, new, before, after):
    """Growth of U, whose columns lie one after the other."""
    keep = before_bias(before, after)
    for j, column in enumerate(keep):
        new[column * (column - 1) // 2 + keep[:j]] = old[j * (j - 1) // 2 : j * (j - 1) // 2 + j]


def unscaled(sizes):
    """The scale of an input or output: 0 before the first value that differs, 1 where nothing is standardized."""
    return 0.0 if sizes["standardize"] else 1.0


COUNTS = Record(
    steps=int,
    beta1_power=Field(float, start=1),  # β1^steps and β2^steps
    beta2_power=Field(float, start=1),
    rows=int,
    outliers=int,  # rows with an implausible target, input or weight
    weight=float,  # the typical one of a row
    evidence=float,  # the discounted number of rows
    best=Field(int, bounds=(0, "heads - 1")),  # the head with the largest weight, and the step since which it is
    since=int,
)
parts = Group(
    given,
    "network",
    *alike("THETA FIRST SECOND", np.float32, ("parameters",), grows=grow_first_layer),
    Part("MEAN", float, ("inputs",)),
    Part("SCALE", float, ("inputs",), start=unscaled),
    # The centre is the commonest value, the median of the first rows.
    *alike("CENTRE TYPICAL EXCESS TYPICAL_RUN USUAL LATE", float, ("inputs",)),
    Part("GAIN", float, ("outputs",), start=unscaled),
    Part("ERROR", float, ("outputs", 4)),
    Part("ERROR_RUN", float, ("outputs", 3)),
    Part("RANGE", float, ("outputs", 2), start=lambda sizes: (1.0, 0.0)),  # low above high: no target yet
    Part("CALIBRATION", float, (TEMPERATURES,)),
    Part("COUNTS", COUNTS),
    Part("LOSSES", float, ("heads",)),  # the discounted ones of the heads,
    Part("WEIGHTS", float, ("heads",), start=lambda sizes: 1 / sizes["heads"]),  # and their weights in the mixture
    work("UNIT", float, ("features",)),  # zero before and after a call
    work("B", float, ("features",)),
    *alike("E P", float, ("outputs",), kept=False),
    work("PHI", float, ("batch", "stride")),
    work("HEADS", float, ("batch", "heads", "outputs")),  # the outputs of each head
    work("OMEGA", float, ("batch",)),
    work("SHARE", float, ("batch",)),  # of a typical row in what the experts learn
    work("WIDEN", float, ("batch",)),  # √(1 + c φᵀBφ), by which an error is divided for intervals
    work("GRADIENT", np.float32, ("parameters",)),
    work("DELTA", np.float32, ("deltas",)),
    *alike("UNITS SLOPES", np.float32, ("batch", "units"), kept=False),
)
NUMBERS = Record(
    forgetting=float,
    ridge=Field(float, unit=("rows", 1)),
    cursor=Field(int, bounds=(0, "p - 1")),  # the coordinate whose ridge is restored next
    samples=Field(float, unit=("rows", 1)),  # effective ones
)
heads = Group(
    given,
    "heads",
    Part("NUMBERS", NUMBERS),
    Part("W", float, ("outputs", "p"), grows=grow_before_bias),
    Part("U", float, ("triangle",), grows=grow_triangle),
    Part("D", float, ("p",), grows=grow_before_bias, unit=("rows", -1)),
    Part("RIDGE", float, ("p",), grows=grow_before_bias, unit=("rows", 1)),
    Part("PRIOR", float, ("outputs", "p"), grows=grow_before_bias),
    Part("ENERGY", float, ("outputs",)),
    sizes=dict.fromkeys(("subset", "units", "p", "triangle")),
    repeated=True,
)
