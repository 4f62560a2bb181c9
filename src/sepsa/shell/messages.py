"""How commands end: messages of one line, and exit codes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from sepsa.validation import printable

FINISHED, FAILED, MISUSED, PIPE_CLOSED, INTERRUPTED, TERMINATED = 0, 1, 2, 141, 130, 143
LEFT_OUT, NEWEST_FIRST = 3, 4


class Misuse(ValueError):
    """A command line with options that do not fit together, or do not fit the table; `code` is the exit code."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


def check_stdout(cure: str) -> None:
    """Raise an error if standard output was closed before the command began, as by `>&-`."""
    if sys.__stdout__ is None:
        raise Misuse(f"standard output is closed: {cure}")


def print_text(text: str) -> None:
    """Write to standard output at once; a terminal gets no control characters of names and labels."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def silence(stream: TextIO) -> None:
    """Redirect a standard stream, whose reader has closed the pipe, so that Python reports no error at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say(text: str, begin: str = "", end: str = "\n") -> None:
    """Print a message of one line to standard error; it is lost if that is closed."""
    try:
        print(begin + printable(text).replace("\n", "\\n"), file=sys.stderr, end=end, flush=True)
    except OSError:
        silence(sys.stderr)


def few(names: Sequence[str]) -> str:
    """The first names."""
    return ", ".join(names[:20]) + ", ..." * (len(names) > 20)


def duration(seconds: float) -> str:
    """A duration in its largest unit."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} seconds"


def describe(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, MemoryError):
        return "there is not enough memory: leave out wide text columns by --drop, or lower --categories"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror.lower()}" if error.filename else error.strerror.lower()
    return " ".join(str(error).split()) or type(error).__name__


def exit_code(run: Callable[[], int]) -> int:
    """The exit code of a command; an error becomes a message of one line."""
    try:
        return run()
    except SystemExit as stopped:  # by a signal
        return int(stopped.code or 0)
    except Misuse as error:
        say(str(error))
        return error.code
    except BrokenPipeError:
        silence(sys.stdout)
        say("stopped: the reader of the predictions has closed the pipe")
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except (OSError, ValueError, MemoryError, ModuleNotFoundError) as error:
        say(describe(error))
        return FAILED
