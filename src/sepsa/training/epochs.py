"""When a head forgets, where SepSA decides it: once for each step of the body, or so that it remembers one epoch.

Where samples come again in every epoch, a head at forgetting 1 counts a sample of k epochs as k samples, and the ridge
loses its weight. With `samples_per_epoch` N, an update of n rows forgets with λ = 1 - n/N from the second epoch on: the
head remembers about the N rows of one epoch, each of them once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

ROWS_PER_FEATURE = 8  # that a head remembers at least, where an epoch has fewer
LEAST_FORGETTING = 0.5  # for batches that are half of an epoch or more


class Epochs:
    """The forgetting of one head, set before each of its updates."""

    samples = 0  # rows that were offered to the head, on all ranks
    since_forgetting = 0  # of these, since the solver forgot
    forgot = False  # whether the solver has forgotten since the body's last step

    def __init__(self, solver: Any, in_features: int, length: int | None, per_step: bool) -> None:
        self.solver, self.per_step = solver, per_step
        self.length = length  # None: the solver's own setting decides what it remembers
        self.memory = max(length or 0, ROWS_PER_FEATURE * in_features)

    def update(self, samples: Sequence[Any], offered: int) -> None:
        """Let the solver learn these samples, drawn from as many `offered` rows of all ranks."""
        self.prepare(offered)
        try:
            if self.per_step:
                self.solver.forgets = not self.forgot
            self.solver.update(*samples)
        finally:
            if self.per_step:
                self.solver.forgets = True
        self.count(offered)
        self.forgot = self.per_step

    def prepare(self, n: int) -> None:
        """From the second epoch on, set the forgetting of an update of n rows."""
        if self.length is None or self.samples + n <= self.length or self.forgot:
            return
        if self.per_step:
            n = max(n, self.since_forgetting)  # of the micro-batches of the last step
        self.solver.forgetting = max(1 - n / self.memory, LEAST_FORGETTING)

    def count(self, n: int) -> None:
        """Count n rows that were offered to the head."""
        self.samples += n
        self.since_forgetting = n + self.since_forgetting * self.forgot

    def checkpoint(self) -> tuple[Any, ...]:
        """What an update changes."""
        return self.samples, self.since_forgetting, self.forgot, self.length and self.solver.forgetting

    def rollback(self, checkpoint: tuple[Any, ...]) -> None:
        """Restore what was there at a checkpoint."""
        self.samples, self.since_forgetting, self.forgot, forgetting = checkpoint
        if self.length is not None:
            self.solver.forgetting = forgetting
