"""Where the code of a kernel lies: in the library, or in memory, where numba compiles it when it is first called.

A process uses the library for all of sepsa's kernels, or numba.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from functools import cache
from typing import Any

from sepsa.compiled import library
from sepsa.compiled.kernels import KERNELS, Function

CURE = "build it: python -m sepsa.compiled.build"
_addresses: dict[Function, int] = {}


@cache
def _loaded() -> Any:
    """The library that this process uses, or None where numba compiles: one source of code in a process."""
    loaded, why = library.load()
    if loaded is None:
        if not importlib.util.find_spec("numba"):
            raise ImportError(f"{why}, nor is there numba, which would compile them: pip install 'sepsa[jit]'")
        line = f"sepsa: {why}: numba compiles each kernel when it is first called, for some seconds; {CURE}"
        print(line, file=sys.stderr, flush=True)
    return loaded


@cache
def available() -> bool:
    """Whether kernels can be called: there is a library that serves this machine, or numba."""
    return library.load()[0] is not None or importlib.util.find_spec("numba") is not None


def address(kernel: Function) -> int:
    """Where the code of a kernel lies."""
    found = _addresses.get(kernel)
    if found is None:
        found = _addresses[kernel] = _find(kernel)
    return found


def _find(kernel: Function) -> int:
    loaded, name = _loaded(), KERNELS[kernel]
    if loaded is not None and hasattr(loaded, name):
        return ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value or 0
    from sepsa.compiled import build  # for a kernel from outside of sepsa too

    return build.compile_in_memory(kernel)


def check(frame: str, names: Any) -> None:
    """Raise an error where the library knows other parts of a frame: a group was declared that it was built without."""
    known = getattr(_loaded(), f"sepsa_frame_{frame}", None)
    if known is not None and known() != library.checksum(names):
        raise RuntimeError(f"the library of compiled kernels was built without a group of the frame {frame!r}: {CURE}")
