"""Steps that happen whole or not at all: Ctrl-C and forks wait for their end, and an error leaves what was before."""

from __future__ import annotations

import os
import threading
import time

# Python's own signal module, which is made of this one, turns numbers into enums and back: ten times as long.
from _signal import SIGINT, getsignal, signal  # type: ignore[import-not-found]
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType, TracebackType
from typing import Any, TypeVar
from weakref import WeakValueDictionary


class DeferredInterrupt:
    """A context that handles SIGINT when it ends; a second SIGINT is handled at once.

    Choose it around a step that must not be interrupted halfway. It does nothing outside the main thread, where Python
    handles no signals, and where SIGINT has no Python handler.
    """

    __slots__ = ("frame", "handler", "pending")

    def __enter__(self) -> None:
        self.handler: Any = None
        if threading.current_thread() is threading.main_thread():
            handler = getsignal(SIGINT)
            if callable(handler):
                self.pending = False
                self.handler = handler  # first, because our handler calls it and may run at once
                signal(SIGINT, self.note)

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
        signal(SIGINT, self.handler)
        if self.pending:
            frame, self.frame = self.frame, None
            self.handler(SIGINT, frame)


@contextmanager
def whole_change(owner: Any) -> Iterator[Any]:
    """A copy of the owner to change, whose attributes become the owner's at once if there is no error."""
    other = owner.copy()
    yield other
    owner.__dict__.update(other.__dict__)


# ---------------------------------------------------------------------- threads and forks

PATIENCE = 0.5  # seconds that a fork waits for the calls of other threads: a longer one changes a copy until its end
_locks: WeakValueDictionary[int, Any] = WeakValueDictionary()
_held = threading.local()
Method = TypeVar("Method", bound=Callable[..., Any])


class _Lock(type(threading.RLock())):  # type: ignore[misc]
    """A re-entrant lock of which a copy, as of a pickle, is a lock of its own."""

    def __reduce__(self) -> Any:
        return new_lock, ()


def new_lock() -> Any:
    """A re-entrant lock for an object that threads share.

    A process that forks waits until no other thread holds it, so that its child has the object whole, and the lock
    free: the thread that would release it does not exist there.
    """
    lock = _Lock()
    _locks[id(lock)] = lock
    return lock


def lock_of(owner: Any) -> Any:
    """The lock of an object whose constructor may set nothing but its parameters."""
    return vars(owner).get("_lock") or vars(owner).setdefault("_lock", new_lock())


def locked(method: Method) -> Method:
    """A method that one thread at a time calls of an object."""

    @wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        with lock_of(self):
            return method(self, *args, **options)

    return call  # type: ignore[return-value]


def _all_locks() -> list[Any]:
    return [lock for reference in _locks.valuerefs() if (lock := reference()) is not None]


def _before_fork() -> None:
    end = time.monotonic() + PATIENCE
    taken = (lock for lock in _all_locks() if lock.acquire(timeout=max(0.0, end - time.monotonic())))
    _held.locks = {id(lock): lock for lock in taken}


def _after_fork_in_parent() -> None:
    for lock in _held.locks.values():
        lock.release()


def _after_fork_in_child() -> None:
    for lock in _all_locks():
        if id(lock) in _held.locks:
            lock.release()
        else:
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
