"""A pytest plugin that runs numba's kernels as plain Python: a changed kernel is tested without compiling it.

Python and NumPy alone do the arithmetic, so that only small tests are quick enough. `mutants.py` loads it.
"""

from __future__ import annotations

import ctypes
import tempfile
from pathlib import Path
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
    count = int(np.prod(shape))
    memory = (ctypes.c_char * max(8, count * np.dtype(dtype).itemsize)).from_address(int(address))
    return np.frombuffer(memory, dtype, count).reshape(shape)


def intrinsic(_):
    """Intrinsics of the heads return their argument in another form, which Python does not need."""
    return lambda value: value


numba.njit, numba.carray, numba.extending.intrinsic = njit, carray, intrinsic

# ---------------------------------------------------------------------- kernels that are called by their address

from sepsa import jit  # noqa: E402
from sepsa.heads.math import ridge  # noqa: E402
from sepsa.stream.engine.kernels import views  # noqa: E402

WORDS = ctypes.POINTER(ctypes.c_int64)
CALL = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
_callbacks = {}


def words(address):
    return ctypes.cast(ctypes.c_void_p(int(address)), WORDS)


def slot(model, name):
    return model[views.SLOTS.index(name)]


def described(model, group, head):
    """Where the layout describes a head, as `views._block` has it."""
    layout = slot(model, "layout")
    first = views.positions["end"] + words(layout)[views.positions["depth"]]
    length = sum(isinstance(key, tuple) and key[0] == group for key in views.positions)
    return words(layout + 8 * (first + int(head) * length))


def size_named(name):
    return lambda model: words(slot(model, "layout"))[views.positions[name]]


def size_of_head(group, name):
    return lambda model, head: described(model, group, head)[views.positions[group, name]]


def view(group, of, name, dtype, shape, repeated):
    def made(model, more=None):
        layout = words(slot(model, "layout"))
        block = described(model, group, more) if repeated else layout
        address = slot(model, of) + (8 * block[views.positions[group, name]] if group else 0)
        sizes = []
        for size in shape:
            own = views.positions.get((group, size))
            known = block[own] if own is not None else None if isinstance(size, int) else layout[views.positions[size]]
            sizes.append(size if known is None else known)
        return carray(address, sizes, np.asarray(more).dtype if dtype == views.BODY else dtype)

    return made


def compile_kernel(kernel):
    def called(model, index):
        with np.errstate(all="ignore"):
            return int(kernel.function(words(model), index))

    _callbacks[kernel.function] = CALL(called)


def address_of(kernel):
    found = _callbacks.get(kernel.function)
    return 0 if found is None else ctypes.cast(found, ctypes.c_void_p).value


views._size_named, views._size_of_head, views._view = size_named, size_of_head, view
views.call = lambda address, model, index: CALL(int(address))(ctypes.cast(model, ctypes.c_void_p), int(index))
jit.Kernel.compile, jit.Kernel.address = compile_kernel, property(address_of)
jit.Kernel.is_cached, jit.Kernel.folder = lambda _: True, lambda _: Path(_EMPTY)

_due = ridge.due
ridge.due = lambda p, *rest: _due(p, *rest) if p else 0  # compiled code divides by a need of 0, Python does not
