"""A pytest plugin that runs numba's kernels as plain Python: a changed kernel is tested without compiling it.

Python and NumPy alone do the arithmetic, so that only small tests are quick enough. `mutants.py` loads it.
"""

from __future__ import annotations

import ctypes
import tempfile
from types import SimpleNamespace

import numba
import numpy as np

_EMPTY = tempfile.mkdtemp(prefix="kernels-")


class Plain:
    """A function with the attributes of a compiled one that sepsa uses."""

    stats = SimpleNamespace(cache_path=_EMPTY)

    def __init__(self, function):
        self.py_func = self.compile = function

    def __call__(self, *args):
        with np.errstate(all="ignore"):  # kernels are compiled with NumPy's rules for errors
            return self.py_func(*args)


def njit(*functions, **_):
    return Plain(functions[0]) if functions else Plain


def carray(address, shape, dtype):
    """The numbers at an address."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * count).from_address(int(address)), dtype).reshape(shape)


def intrinsic(_):
    """Both intrinsics of sepsa return their argument in another form, which Python does not need."""
    return lambda value: value


numba.njit, numba.carray, numba.extending.intrinsic = njit, carray, intrinsic
