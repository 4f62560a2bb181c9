"""Functions that numba compiles: cached on disk where a folder can be written, announced where it takes seconds."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

_warned: list[str] = []
_announced: set[Any] = set()


def cached(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator that compiles for calls from Python, cached; without a cache where no folder can be written."""

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError as error:
            warn_without_cache(str(error))
            return njit(**options)(function)

    return compiled


def warn_without_cache(reason: str) -> None:
    """Say once that every process compiles anew, and the cure."""
    if not _warned:
        _warned.append(reason)
        warnings.warn(
            "sepsa: no folder for compiled code can be written, so each process compiles it anew, some seconds: "
            "set NUMBA_CACHE_DIR to a folder that can",
            RuntimeWarning,
            stacklevel=2,
        )


def announce_compilation(kernel: Any, what: str) -> None:
    """Say that the first call of this kernel compiles it; a warm cache needs no word."""
    if kernel in _announced:
        return
    _announced.add(kernel)
    folder = kernel.stats.cache_path
    if folder is None:
        return  # the import has said so
    source = Path(kernel.py_func.__code__.co_filename)
    indices = Path(folder).glob(f"{source.stem}.{kernel.py_func.__name__}-*.nbi")
    if not any(index.stat().st_mtime >= source.stat().st_mtime for index in indices):
        print(f"sepsa: compiling {what}, once on this machine, some seconds", file=sys.stderr, flush=True)
