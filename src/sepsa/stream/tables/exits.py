"""How the table commands end: exit codes, signals, and errors as messages of one line."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from sepsa.stream.tables.lost import LeftOut
from sepsa.stream.tables.output import Misuse, describe, say, silence

FINISHED, FAILED, MISUSED, PIPE_CLOSED, INTERRUPTED, TERMINATED = 0, 1, 2, 141, 130, 143
LEFT_OUT, NEWEST_FIRST = 3, 4


class Stopped(BaseException):
    """A signal that stops the command at once, with its exit code."""

    def __init__(self, code: int) -> None:
        self.code = code


def exit_code(run: Callable[[], int]) -> int:
    """The exit code of a command; an error becomes a message of one line."""
    try:
        return run()
    except Stopped as stopped:
        return stopped.code
    except Misuse as error:
        say(str(error))
        return error.code
    except BrokenPipeError:
        silence(sys.stdout)
        say("stopped: the reader of the predictions has closed the pipe")
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except (OSError, ValueError, MemoryError) as error:
        say(describe(error))
        return FAILED


def many_lost(left_out: LeftOut, code: int) -> int:
    """The exit code of a command at its end, after its last line where it has left many rows out."""
    if said := left_out.last_line():
        say(said)
        return code or LEFT_OUT
    return code


class Signals:
    """A handler of SIGINT and SIGTERM that stops at once before the first block, and later between two blocks."""

    def __init__(self) -> None:
        self.code = 0
        self.at_work = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):  # only the main thread may
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        again = self.code
        self.code = INTERRUPTED if number == signal.SIGINT else TERMINATED
        if again or not self.at_work:  # a second signal stops at once
            raise Stopped(self.code)

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
