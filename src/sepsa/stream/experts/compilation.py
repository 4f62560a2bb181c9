"""How numba compiles the experts: functions that kernels call, and kernels that Python calls."""

from __future__ import annotations

from pathlib import Path

from numba import njit

from sepsa.jit import cached
from sepsa.stream.engine import kernels
from sepsa.stream.engine.kernels.compilation import OPTIONS

called = njit(**OPTIONS)
compiled = cached(Path(kernels.__file__).parent, **OPTIONS)
