"""What an expert is: what it stores, and two kernels. And the row that all experts see."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from sepsa.jit import Kernel
from sepsa.stream.engine.kernels.views import Group, PartsOf, Views

# The row that is asked about or learned, in the workspace: the standardized inputs, rounded to float32 and clipped at
# ±8, and 0 where missing; the targets in units of their deviations; the share of a typical row with which it is
# learned, less where its error is implausible; its class; the answers of all experts and of the stack. WIDE are the
# inputs without the clip, NaN where missing; SEEN the targets before they were bounded by plausible errors; LOG the
# logarithm of a single positive target, and 0 in place of 1 or more where there is none.
ROW = {
    "Z": (float, ("inputs",)),
    "Y": (float, ("outputs",)),
    "SHARE": (float, (1,)),
    "TRUST": (float, (1,)),  # share · the factor for an implausible error
    "LABEL": (float, (1,)),
    "WIDE": (np.float32, ("inputs",)),
    "UNIT": (float, ("outputs",)),
    "SEEN": (float, ("outputs",)),
    "LOG": (float, (2,)),
    "ANSWERS": (float, ("candidates", "outputs")),
}
GROUP = Group("row", {}, ROW, {})
row = Views(GROUP, "workspace", ROW)


class Expert(NamedTuple):
    """A row of the table of experts.

    `answer(model, e)` writes the expert's prediction for the row into place e of its answers; `learn(model, e)` learns
    the row. `start(part, inputs, outputs)` writes what the parts hold before any row, by `part(name)`; after a growth,
    for what came beyond these numbers of inputs and outputs. `wrong(part)` returns the name of a part of a saved state
    that would lead a kernel out of its arrays, with what it should hold.
    """

    group: Group
    answer: Kernel
    learn: Kernel
    start: Callable[[PartsOf, int, int], None] = lambda part, inputs, outputs: None
    wrong: Callable[[PartsOf], tuple[str, str] | None] = lambda part: None
    for_classes: bool = False  # whether it answers for classes alone
    for_numbers: bool = False  # whether it answers for numbers alone

    @property
    def name(self) -> str:
        return self.group.name
