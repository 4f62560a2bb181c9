"""The errors of a stream over time, in constant memory, with alarms where they rise."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from sepsa.learner.memory.parts import Floats
from sepsa.states import schema

WINDOW = 256  # rows whose mean error is one value; windows do not depend on the blocks of rows
POINTS = 256  # most points of the curve: two become one when there are more
ENOUGH = 8  # windows before an alarm is possible
FAR = 5.0  # standard deviations of the window means above the level that raise an alarm
SLOW = 0.05  # weight of a new window in the level, a running mean
KEPT = 100  # alarms, the latest ones


@dataclass(eq=False)
class ErrorTrace:
    """The error of each row, made before it was learned: a curve of means, and alarms where the mean rises."""

    rows: int = 0
    total: float = 0.0  # of complete windows
    open: Floats = field(default_factory=lambda: np.empty(0))  # the errors of the incomplete window
    points: list[float] = field(default_factory=list)  # mean error of `span` windows each
    span: int = 1
    part: list[float] = field(default_factory=list)  # windows of the incomplete point
    level: float = 0.0
    spread: float = 0.0
    windows: int = 0
    alarms: list[list[float]] = field(default_factory=list)  # row, mean error before and at the alarm
    alarm_count: int = 0

    def add(self, errors: Floats) -> None:
        """Add the errors of further rows, -1 for one that is not known."""
        self.rows += len(errors)
        waiting = np.concatenate([self.open, errors])
        complete = len(waiting) // WINDOW
        for window in waiting[: complete * WINDOW].reshape(complete, WINDOW):
            self._close(self._sum(window))
        self.open = waiting[complete * WINDOW :].copy()

    def _sum(self, errors: Floats) -> float:
        """The sum of errors; those that are not known count as the mean of the others."""
        known = errors[errors >= 0]
        if len(known) == len(errors):
            return float(errors.sum())
        return len(errors) * (float(known.mean()) if len(known) else self.level)

    def _close(self, total: float) -> None:
        self.total += total
        mean = total / WINDOW
        self.part.append(mean)
        if len(self.part) == self.span:
            self.points.append(math.fsum(self.part) / self.span)
            self.part = []
        if len(self.points) == POINTS:
            self.points = [(a + b) / 2 for a, b in zip(self.points[::2], self.points[1::2], strict=True)]
            self.span *= 2
        if self.windows >= ENOUGH and mean > self.level + FAR * math.sqrt(self.spread) + 1e-9 * abs(self.level):
            self.alarms = [*self.alarms, [float(self._closed_rows()), self.level, mean]][-KEPT:]
            self.alarm_count += 1
            self.windows = 0
        self.windows += 1
        rate = max(SLOW, 1 / self.windows)
        off = mean - self.level
        self.level += rate * off
        self.spread = 0.0 if self.windows == 1 else (1 - rate) * (self.spread + rate * off * off)

    def _closed_rows(self) -> int:
        return WINDOW * (len(self.points) * self.span + len(self.part))

    @property
    def mean(self) -> float:
        """The mean error of all rows."""
        return (self.total + self._sum(self.open)) / self.rows if self.rows else math.nan

    @property
    def recent(self) -> float:
        """The mean error of the last hundreds of rows."""
        if self.part:
            return self.part[-1]
        if self.points and self.span == 1:
            return self.points[-1]
        return self.level if self.windows else self.mean

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state(cls, state: Any) -> ErrorTrace:
        """A trace that continues from the result of `state_dict`; ValueError where that is damaged."""
        out = cls()
        new = schema.read("state['trace']", state, set(out.state_dict()))
        for name in ("rows", "windows", "alarm_count", "span"):
            setattr(out, name, new.integer(name, 1 if name == "span" else 0))
        for name in ("total", "level", "spread"):
            setattr(out, name, new.number(name, 0.0))
        out.open = new.array("open", (None,), low=-1.0)
        for name in ("points", "part"):
            setattr(out, name, new.items(name).numbers(0.0))
        alarms = new.items("alarms")
        out.alarms = [alarms.items(i, 3).numbers(0.0) for i in range(len(alarms))]
        closed = out._closed_rows() + len(out.open)
        if closed != out.rows or len(out.open) >= WINDOW:
            raise ValueError(f"state['trace'] must account for {out.rows} rows, got {closed}")
        return out
