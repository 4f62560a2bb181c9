"""How numba compiles the kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit, types

from sepsa import candidates, restoration
from sepsa.jit import Kernel, cached
from sepsa.jit_parts import for_parts

# The order of sums may change; NaN and Inf keep their meaning: a diverged body is recognized by them.
OPTIONS: Any = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}, "error_model": "numpy", "nogil": True}


inlined = njit(forceinline=True, **for_parts(OPTIONS))
called = njit(**for_parts(OPTIONS))
compiled = cached(**OPTIONS)

_KERNELS, _RULES = Path(__file__).parent, (Path(restoration.__file__), Path(candidates.__file__))
_MODULES = (_KERNELS, _KERNELS.parent / "experts", *_RULES)
_SIGNATURE = types.int64(types.CPointer(types.int64), types.int64)  # type: ignore[no-untyped-call]


def kernel(cost: float, after: Kernel | None = None) -> Callable[[Callable[..., Any]], Kernel]:
    """A decorator for a function (model, index) -> integer called by its address; `cost` and `after` as in `Kernel`."""
    return lambda function: Kernel(function, _SIGNATURE, cost, _MODULES, OPTIONS, after)
