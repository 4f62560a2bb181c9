"""How numba compiles the kernels."""

from __future__ import annotations

from typing import Any

from numba import njit

from sepsa.jit import cached

# The order of sums may change; NaN and Inf keep their meaning: a diverged body is recognized by them.
OPTIONS: Any = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}, "error_model": "numpy", "nogil": True}
inlined = njit(forceinline=True, **OPTIONS)  # a call would pass seven numbers for each array
compiled = cached(**OPTIONS)
