"""The errors of a stream over time, in constant memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from sepsa.learner.memory.parts import Floats

WINDOW = 256  # rows whose mean error is one value; windows do not depend on the blocks of rows
POINTS = 256  # most points of the curve: two become one when there are more


@dataclass(eq=False)
class ErrorTrace:
    """The error of each row, made before it was learned, as a curve of means."""

    open: Floats = field(default_factory=lambda: np.empty(0))  # the errors of the incomplete window
    points: list[float] = field(default_factory=list)  # mean error of `span` windows each
    span: int = 1
    part: list[float] = field(default_factory=list)  # windows of the incomplete point

    def add(self, errors: Floats) -> None:
        """Add the errors of further rows, -1 for one that is not known."""
        waiting = np.concatenate([self.open, errors])
        complete = len(waiting) // WINDOW * WINDOW
        for window in waiting[:complete].reshape(-1, WINDOW):
            self.part.append(self._mean(window))
            if len(self.part) >= self.span:
                self.points.append(math.fsum(self.part) / self.span)
                self.part = []
            if len(self.points) == POINTS:
                self.points = [(a + b) / 2 for a, b in zip(self.points[::2], self.points[1::2], strict=True)]
                self.span *= 2
        self.open = waiting[complete:].copy()

    def _mean(self, errors: Floats) -> float:
        """The mean of errors that are known; where none is, that of the window before."""
        known = errors[errors >= 0]
        return float(known.mean()) if len(known) else (self.part or self.points or [0.0])[-1]

    @property
    def rows(self) -> int:
        """The number of rows."""
        return WINDOW * (len(self.points) * self.span + len(self.part)) + len(self.open)

    @property
    def mean(self) -> float:
        """The mean error of all rows."""
        windows = WINDOW * (self.span * math.fsum(self.points) + math.fsum(self.part))
        return (windows + len(self.open) * self._mean(self.open)) / self.rows if self.rows else math.nan

    @property
    def recent(self) -> float:
        """The mean error of the last hundreds of rows."""
        return (self.part or self.points or [self.mean])[-1]
