"""Functions that numba compiles: cached on disk where a folder can be written, announced where it takes seconds."""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock

_warned: list[str] = []
_announced: dict[Any, str] = {}  # kernels, with what they compute while a line about it waits for its end
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
        kernel.compile = partial(compile_alone, kernel, kernel.compile)
        return kernel

    return compiled


def compile_alone(kernel: Any, compile_: Callable[[Any], Any], signature: Any) -> Any:
    """Compile a kernel for a signature while no other process does, unless the cache has code of it."""
    start = time.monotonic()
    within_another = bool(global_compiler_lock.is_locked())  # type: ignore[no-untyped-call]  # which has the lock
    with locked(None if within_another or current_indices(kernel) else Path(kernel.stats.cache_path)):
        entry = compile_(signature)
    if what := _announced.get(kernel):
        _announced[kernel] = ""
        print(f"{compiling(what)} done in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return entry


def compiling(what: str) -> str:
    """The beginning of a line about a compilation."""
    return f"sepsa: compiling {what}, once on this machine:"


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


def announce_compilation(kernel: Any, what: str, seconds: int) -> None:
    """Print that the first call of this kernel compiles it, for about these seconds, unless it is in the cache."""
    if kernel in _announced:
        return
    _announced[kernel] = ""
    if kernel.stats.cache_path is None:
        return  # `warn_without_cache` has said so
    if not current_indices(kernel):
        _announced[kernel] = what
        print(f"{compiling(what)} about {seconds} s", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------- kernels that are called by their address

# By function, and not in its kernel: a program that measures the memory of a model would walk through all of numba.
_compiled: dict[Callable[..., Any], CFunc] = {}
_SLOW = 3.0  # seconds; a compilation that takes longer is announced with its progress


class Kernel:
    """A function that numba compiles when it is first needed, for calls by its address.

    Unlike a function that another one calls by its name, it is no part of the code that calls it: it is optimized once,
    and a change of it compiles nothing else. `cost` is the time that it takes to compile relative to other kernels, and
    `folders` hold the modules of functions that it calls.
    """

    def __init__(
        self, function: Callable[..., Any], signature: Any, cost: float, folders: Sequence[Path], options: Any
    ) -> None:
        self.function, self.signature, self.cost, self.folders = function, signature, cost, folders
        self.options = {"nopython": True} | options

    @property
    def address(self) -> int:
        """Where the code lies; 0 before `compile_kernels`."""
        compiled = _compiled.get(self.function)
        return 0 if compiled is None else int(compiled.address or 0)

    def compile(self) -> None:
        """Load the code from the cache, or compile it and store it there."""
        compiled = self._callback()
        compiled.compile()
        _compiled[self.function] = compiled

    def _callback(self) -> CFunc:
        compiled = CFunc(self.function, (self.signature.args, self.signature.return_type), {}, dict(self.options))
        with contextlib.suppress(RuntimeError):  # no folder can be written
            compiled.enable_caching()
        return compiled

    def folder(self) -> Path | None:
        """The folder of the cache, or None where no folder can be written."""
        path = self._callback()._cache.cache_path  # type: ignore[attr-defined]
        return None if path is None else Path(path)

    def is_cached(self) -> bool:
        """Whether the cache holds code that is newer than every module it was made of; older code is removed."""
        folder = self.folder()
        if folder is None:
            return False
        source = Path(self.function.__code__.co_filename)
        changed = max(path.stat().st_mtime for each in {source.parent, *self.folders} for path in each.glob("*.py"))
        current = False
        for index in folder.glob(f"{source.stem}.{self.function.__name__}-*.nbi"):
            with contextlib.suppress(FileNotFoundError):  # another thread has removed it
                if index.stat().st_mtime >= changed:
                    current = True
                else:
                    index.unlink()
        return current


def compile_kernels(kernels: Sequence[Kernel], what: str) -> None:
    """Make every kernel ready to be called; where that takes seconds a line on standard error says how many remain."""
    missing = [kernel for kernel in kernels if not kernel.address]
    if not missing:
        return
    folder = missing[0].folder()
    absent: list[Kernel] = []
    progress = None
    if folder is None:
        warn_without_cache("")
    else:
        absent = [kernel for kernel in missing if not kernel.is_cached()]  # all are asked, which removes old code
        progress = Progress(what, sum(kernel.cost for kernel in absent)) if absent else None
    with locked(folder) if progress else contextlib.nullcontext():
        for kernel in missing:
            start = time.monotonic()
            kernel.compile()
            if progress and kernel in absent:
                progress.advance(kernel.cost, time.monotonic() - start)
    if progress:
        progress.finish()


class Progress:
    """A line on standard error with the seconds that a compilation still takes, judged by the parts that are done."""

    def __init__(self, what: str, total: float) -> None:
        self.what, self.total = what, total
        self.done = self.seconds = 0.0
        self.start = time.monotonic()
        self.shown = False

    def advance(self, cost: float, seconds: float) -> None:
        """Count a part of this cost, which took these seconds."""
        self.done, self.seconds = self.done + cost, self.seconds + seconds
        left = self.seconds / self.done * (self.total - self.done)
        terminal = sys.stderr.isatty()
        if (self.shown and terminal) or (not self.shown and self.seconds + left > _SLOW):
            self.shown = True
            self._print(f"about {left:.0f} s left", end="" if terminal else "\n")

    def finish(self) -> None:
        if self.shown:
            self._print(f"done in {time.monotonic() - self.start:.0f} s", end="\n")

    def _print(self, state: str, end: str) -> None:
        line = f"{compiling(self.what)} {state}"
        print(f"\r{line:<90}" if sys.stderr.isatty() else line, end=end, file=sys.stderr, flush=True)


@contextlib.contextmanager
def locked(folder: Path | None) -> Iterator[None]:
    """Hold the lock of a cache folder: a second process waits, and then finds the code that the first one compiled."""
    try:
        import fcntl
    except ImportError:  # on Windows two processes may both compile
        yield
        return
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "sepsa.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
