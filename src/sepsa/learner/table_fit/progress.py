"""A bar of what is done, on a terminal."""

from __future__ import annotations

import sys
import threading
import time

LONG = 5.0  # seconds after which a terminal has a bar: of the most passes, of which trials may save some


class Progress:
    """A line on standard error with a bar of the cost that is done, if that is a terminal and takes long."""

    def __init__(self, total: float) -> None:
        self.total, self.done = total, 0.0
        self.start, self._lock = time.monotonic(), threading.Lock()
        self.advance(0.0)

    def advance(self, cost: float) -> None:
        """Count a part of this cost; threads may call it at once."""
        with self._lock:
            self.done += cost
            tenths = min(round(10 * self.done / self.total), 10)
            self._print(f"[{'#' * tenths}{'.' * (10 - tenths)}] {time.monotonic() - self.start:.0f} s")

    def finish(self) -> None:
        """End the line."""
        self._print(f"done in {time.monotonic() - self.start:.0f} s\n")

    def _print(self, end: str) -> None:
        if sys.stderr.isatty() and time.monotonic() - self.start >= LONG:
            print(f"\rsepsa: fit: {end:<20}", end="", file=sys.stderr, flush=True)
