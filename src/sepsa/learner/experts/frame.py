"""What an expert is, and what all share: sizes of the engine, the arrays of a call, the row they answer and learn."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sepsa.compiled.kernels import Function, inlined
from sepsa.learner.memory.parts import Part, Record, work
from sepsa.learner.memory.views import Frame, Group

# Of Adam; the discount and the power by which heads are weighted; the discount of the calibration.
OPTIONS = Record(**dict.fromkeys(("lr", "decay", "beta1", "discount", "power", "calibration"), float))
# Sizes that follow from the network's form, of the experts, then settings of the engine.
SIZES = """
inputs outputs depth width hidden heads parameters units deltas features stride
experts stacked candidates
batch activation standardize robust classes inflation room trees rate tree_slots
"""

given = Frame(
    "engine",
    tuple(SIZES.split()),
    Part("WIDTHS", np.int64, ("depth",)),
    Part("OPTIONS", OPTIONS),
    Part("CALLS", np.int64, ("experts", 2)),  # addresses of `answer` and `learn` of each expert
    Part("X", float, ("batch", "inputs")),
    Part("Y", float, ("batch", "outputs")),
    Part("WEIGHT", float, ("batch",)),
    Part("OUT", float, ("batch", "outputs")),
    Part("LEVERAGE", float, ("batch",)),
)
size = given.size


def alike(names: str, *how: Any, **more: Any) -> list[Part]:
    """Parts that differ in their names alone."""
    return [Part(name, *how, **more) for name in names.split()]


row = Group(
    given,
    "row",
    work("Z", float, ("inputs",)),  # standardized inputs, rounded to float32 and clipped at ±8, and 0 where missing
    work("WIDE", np.float32, ("inputs",)),  # the same without the clip, NaN where missing
    work("UNIT", float, ("outputs",)),  # the inverse deviation of each target
    work("Y", float, ("outputs",)),  # the targets in units of their deviations, within plausible errors
    work("SEEN", float, ("outputs",)),  # the same before they were bounded
    work("ANSWERS", float, ("candidates", "outputs")),  # of all experts and of the stack
    # The share of a typical row with which this one is learned; that share, less where its error is implausible; its
    # class.
    work("FACTS", Record(share=float, trust=float, label=int)),
)


@inlined
def clipped(x, most):
    """x within ±most."""
    return min(max(x, -most), most)


class Expert(NamedTuple):
    """A row of the table of experts.

    `answer(model, e)` writes the expert's prediction for the row into place e of its answers; `learn(model, e)` learns
    the row.
    """

    group: Group
    answer: Function
    learn: Function
    for_classes: bool = False  # whether it answers for classes alone

    @property
    def name(self) -> str:
        return self.group.name
