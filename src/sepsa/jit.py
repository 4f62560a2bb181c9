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
_folders: dict[Any, tuple[Path, ...]] = {}  # of modules whose functions a kernel calls, beside those of its own folder


def cached(*folders: Path, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator that compiles for calls from Python, cached; without a cache where no folder can be written.

    `folders` hold modules whose functions the kernel calls, other than the folder of its own module.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        _folders[function] = folders
        try:
            kernel = njit(cache=True, **options)(function)
        except RuntimeError as error:
            warn_without_cache(str(error))
            return njit(**options)(function)
        for index in set(cache_indices(kernel)) - set(current_indices(kernel)):
            index.unlink(missing_ok=True)
        return kernel

    return compiled


def cache_indices(kernel: Any) -> list[Path]:
    """The files in which numba lists a kernel's compiled code."""
    source = Path(kernel.py_func.__code__.co_filename)
    return list(Path(kernel.stats.cache_path).glob(f"{source.stem}.{kernel.py_func.__name__}-*.nbi"))


def current_indices(kernel: Any) -> list[Path]:
    """Those newer than every module whose functions the kernel may inline: numba checks only the kernel's own."""
    folders = [Path(kernel.py_func.__code__.co_filename).parent, *_folders.get(kernel.py_func, ())]
    changed = max(path.stat().st_mtime for folder in folders for path in folder.glob("*.py"))
    return [index for index in cache_indices(kernel) if index.stat().st_mtime >= changed]


def warn_without_cache(reason: str) -> None:
    """Print once that every process compiles again, and how to avoid it."""
    if not _warned:
        _warned.append(reason)
        warnings.warn(
            "sepsa: no folder for compiled code is writable, so each process compiles it again, for some seconds: "
            "set NUMBA_CACHE_DIR to a folder that can",
            RuntimeWarning,
            stacklevel=2,
        )


def announce_compilation(kernel: Any, what: str) -> None:
    """Print that the first call of this kernel compiles it, unless it is in the cache."""
    if kernel in _announced:
        return
    _announced.add(kernel)
    if kernel.stats.cache_path is None:
        return  # `warn_without_cache` has said so
    if not current_indices(kernel):
        print(f"sepsa: compiling {what}, once on this machine, some seconds", file=sys.stderr, flush=True)
