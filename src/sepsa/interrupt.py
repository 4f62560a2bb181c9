"""Steps that happen whole or not at all: Ctrl-C waits for their end, and an error leaves what was before."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

try:  # Python's own signal module turns numbers into enums and back, which takes ten times as long.
    from _signal import getsignal as _getsignal  # type: ignore[import-not-found]
    from _signal import signal as _signal
except ImportError:  # another Python than CPython
    from signal import getsignal as _getsignal
    from signal import signal as _signal

_SIGINT = int(signal.SIGINT)


class DeferredInterrupt:
    """A context that handles SIGINT when it ends; a second SIGINT is handled at once.

    Choose it around a step that must not be interrupted halfway. It does nothing outside the main thread, where Python
    handles no signals, and where SIGINT has no Python handler.
    """

    __slots__ = ("frame", "handler", "pending")

    def __enter__(self) -> None:
        self.handler: Any = None
        if threading.current_thread() is threading.main_thread():
            handler = _getsignal(_SIGINT)
            if callable(handler):
                self.pending = False
                self.frame: FrameType | None = None
                self.handler = handler  # first, because our handler calls it and may run at once
                _signal(_SIGINT, self.note)

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler inside the context."""
        if self.pending:
            self.pending = False
            self.handler(number, frame)
        else:
            self.pending, self.frame = True, frame

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.handler is None:
            return
        _signal(_SIGINT, self.handler)
        if self.pending:
            frame, self.frame = self.frame, None
            self.handler(_SIGINT, frame)


@contextmanager
def whole_change(owner: Any) -> Iterator[Any]:
    """A copy of the owner to change, whose attributes become the owner's at once if there is no error."""
    other = owner.copy()
    yield other
    owner.__dict__.update(other.__dict__)
