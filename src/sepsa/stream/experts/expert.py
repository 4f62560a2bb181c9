"""What an expert is: a group of parts, and two kernels."""

from __future__ import annotations

from typing import NamedTuple

from sepsa.jit import Kernel
from sepsa.stream.kernels.views import Group


class Expert(NamedTuple):
    """A row of the table of experts.

    `answer(model, e)` writes the expert's prediction for the row into place e of its answers; `learn(model, e)` learns
    the row.
    """

    group: Group
    answer: Kernel
    learn: Kernel
    for_classes: bool = False  # whether it answers for classes alone
    for_numbers: bool = False  # whether it answers for numbers alone

    @property
    def name(self) -> str:
        return self.group.name
