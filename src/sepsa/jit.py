"""Functions that numba compiles: cached on disk where a folder can be written, announced where it takes seconds.

Kernels that are called by their addresses are compiled in several processes at once.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock

from sepsa.jit_cache import CodeCache, travels, warn_without_cache
from sepsa.processes import share
from sepsa.progress import Progress

AHEAD = " (`sepsa compile` does it ahead of time)"
_together: list[str] = []  # what is compiled with a line of its own
_announced: dict[Any, str] = {}  # kernels, with what they compute while a line about it waits for its end
_modules: dict[Any, tuple[Path, ...]] = {}  # whose functions a kernel calls, beside those of its own folder


def cached(*modules: Path, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator that compiles for calls from Python, cached; without a cache where no folder can be written.

    `modules` are files and folders of modules whose functions the kernel calls, beside the folder of its own one.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        _modules[function] = modules
        kernel = njit(**options)(function)
        try:
            kernel._cache = CodeCache(function)
        except RuntimeError:
            warn_without_cache()
            return kernel
        current_indices(kernel)
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
    return f"sepsa: compiling {what}:"


def current_indices(kernel: Any) -> list[Path]:
    """The files in which numba lists a kernel's compiled code, without those older than a module it was made of."""
    return indices(kernel.py_func, Path(kernel.stats.cache_path), _modules.get(kernel.py_func, ()))


def indices(function: Callable[..., Any], cache: Path, modules: Sequence[Path]) -> list[Path]:
    """The files in this folder that list a function's code; what is older than its modules is removed.

    Numba looks at the function's own module alone, and code has those of other modules inlined.
    """
    source = Path(function.__code__.co_filename)
    found = list(cache.glob(f"{source.stem}.{function.__name__}-*.nbi"))
    if travels(source):
        return found
    paths = [path for each in {source.parent, *modules} for path in (each.glob("*.py") if each.is_dir() else [each])]
    changed = max(path.stat().st_mtime for path in paths)
    current = []
    for index in found:
        with contextlib.suppress(FileNotFoundError):  # another thread has removed it
            if index.stat().st_mtime >= changed:
                current.append(index)
            else:
                for code in (*cache.glob(f"{index.stem}.*.nbc"), index):
                    code.unlink(missing_ok=True)
    return current


def announce_compilation(kernel: Any, what: str, seconds: int) -> None:
    """Print that the first call of this kernel compiles it, for about these seconds, unless it is in the cache."""
    if kernel in _announced or _together:
        return
    _announced[kernel] = ""
    if kernel.stats.cache_path is None:
        return  # `warn_without_cache` has said so
    if not current_indices(kernel):
        _announced[kernel] = what
        print(f"{compiling(what + AHEAD)} about {seconds} s", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------- kernels that are called by their address

# By function, and not in its kernel: a program that measures the memory of a model would walk through all of numba.
_compiled: dict[Callable[..., Any], CFunc] = {}
_SLOW = 3.0  # cost, about that many seconds; a compilation that takes longer is announced with its progress
KERNELS: list[Kernel] = []  # all that the imported modules define


class Kernel:
    """A function that numba compiles when it is first needed, for calls by its address.

    Unlike a function that another one calls by its name, it is no part of the code that calls it: it is optimized once,
    and a change of it compiles nothing else. `cost` is the time that it takes to compile relative to other kernels, and
    `modules` are files and folders of modules whose functions it calls. A kernel that calls much of what another one
    calls takes less time `after` that one, in the same process.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        signature: Any,
        cost: float,
        modules: Sequence[Path],
        options: Any,
        after: Kernel | None = None,
    ) -> None:
        self.function, self.signature, self.cost, self.modules = function, signature, cost, modules
        self.after = after
        self.options = {"nopython": True} | options
        KERNELS.append(self)

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

    def _callback(self) -> Any:
        types = self.signature.args, self.signature.return_type
        compiled: Any = CFunc(self.function, types, {}, dict(self.options))
        with contextlib.suppress(RuntimeError):  # no folder can be written
            compiled._cache = CodeCache(self.function)
        return compiled

    def folder(self) -> Path | None:
        """The folder of the cache, or None where no folder can be written."""
        path = self._callback()._cache.cache_path
        return None if path is None else Path(path)

    def is_cached(self) -> bool:
        """Whether the cache holds code that is newer than every module it was made of; older code is removed."""
        folder = self.folder()
        if folder is None or not indices(self.function, folder, self.modules):
            return False
        compiled = self._callback()
        return bool(compiled._cache.holds(compiled._sig, compiled._targetdescr.target_context))


def compile_kernels(kernels: Sequence[Kernel], what: str) -> None:
    """Make every kernel ready to be called, in several processes where many are not in the cache."""
    missing = [kernel for kernel in kernels if not kernel.address]
    if not missing:
        return
    folder = missing[0].folder()
    if folder is None:
        warn_without_cache()
    elif absent(missing):
        with locked(folder):
            if rest := absent(missing):  # else another process has compiled them
                compile_together(rest, what + AHEAD)
    for kernel in missing:
        kernel.compile()


def absent(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Those that are not in the cache."""
    return [kernel for kernel in kernels if not kernel.is_cached()]


def compile_together(jobs: Sequence[Any], what: str, processes: int | None = None) -> None:
    """Compile what has a `cost` and a method `compile`, in this process and others, with a line on standard error."""
    groups: dict[int, list[Any]] = {}
    for job in jobs:
        groups.setdefault(id(getattr(job, "after", None) or job), []).append(job)
    costs = [sum(job.cost for job in group) for group in groups.values()]
    progress = Progress(compiling(what), sum(costs), after=0.0 if sum(costs) > _SLOW else math.inf)
    if sum(costs) > _SLOW and not sys.stderr.isatty():
        print(f"{compiling(what)} about {sum(costs):.0f} s on one idle core", file=sys.stderr, flush=True)
    _together.append(what)
    try:
        compiles = [partial(compile_each, group) for group in groups.values()]
        share(compiles, costs, progress.advance, global_compiler_lock, processes)
    finally:
        _together.remove(what)
    progress.finish()


def compile_each(jobs: Sequence[Any]) -> None:
    """Compile one after the other."""
    for job in jobs:
        job.compile()


@contextlib.contextmanager
def locked(folder: Path | None) -> Iterator[None]:
    """Hold the lock of a cache folder: a second process waits, and then finds the code that the first one compiled."""
    try:
        import fcntl
    except ImportError:  # on Windows two processes may both compile
        yield
        return
    with contextlib.ExitStack() as held:
        if folder is not None:
            with contextlib.suppress(OSError):  # a folder that cannot be written: both compile
                folder.mkdir(parents=True, exist_ok=True)
                lock = held.enter_context(open(folder / "sepsa.lock", "w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield
