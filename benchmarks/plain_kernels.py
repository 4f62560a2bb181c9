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

from sepsa import jit, restoration  # noqa: E402

_due = restoration.due
restoration.due = lambda p, *rest, **named: _due(p, *rest, **named) if p else 0  # compiled code may divide by 0

from sepsa.heads.backends import numba_kernels  # noqa: E402
from sepsa.stream.kernels import views  # noqa: E402
from sepsa.stream.kernels.parts import Record  # noqa: E402

WORDS = ctypes.POINTER(ctypes.c_int64)
CALL = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
_callbacks = {}


def words(address):
    return ctypes.cast(ctypes.c_void_p(int(address)), WORDS)


def entry(frame, group, name, model, copy=None):
    """What the layout has under a name, as `views._entry`."""
    numbers = words(model[frame.slots.index("layout")])
    if not (group.repeated and name in group.block):
        return numbers[frame.positions[name]]
    block = numbers[frame.positions[group.name, "copies"]] + int(copy) * len(group.block)
    return numbers[block + group.block.index(name)]


def number(frame, group, size):
    return lambda model, copy=None: entry(frame, group, size, model, copy)


def view(frame, group, part):
    record = isinstance(part.dtype, Record)

    def made(model, copy=None):
        address = model[frame.slots.index(part.name if group is frame else "state" if part.kept else "workspace")]
        if group is not frame:
            name = part.name if group.repeated else (group.name, part.name)
            address += 8 * entry(frame, group, name, model, copy)
        if record:
            return carray(address, (1,), part.dtype.dtype).view(np.recarray)[0]
        sizes = [size if isinstance(size, int) else entry(frame, group, size, model, copy) for size in part.shape]
        if part.shape[:1] == ("rows",):  # an array of the call, whose rows no layout counts
            sizes[0] = 1 << 20
        return carray(address, sizes, part.dtype)

    return made


def matrices(memory, shapes):
    """The matrices of these shapes, which follow each other in the memory, under the names of the shapes."""
    starts = np.cumsum([0, *(rows * columns for rows, columns in shapes)])
    made = [memory[start : start + a * b].reshape(a, b) for start, (a, b) in zip(starts, shapes, strict=False)]
    return shapes._make(made) if hasattr(shapes, "_make") else tuple(made)


def several(frame, group):
    def made(names, model, *copy):
        return tuple(getattr(group, name)(model, *copy) for name in names.split())

    return made


def compile_kernel(kernel):
    def called(model, index):
        with np.errstate(all="ignore"):
            return int(kernel.function(words(model), index))

    _callbacks[kernel.function] = CALL(called)


def address_of(kernel):
    found = _callbacks.get(kernel.function)
    return 0 if found is None else ctypes.cast(found, ctypes.c_void_p).value


views._number, views._view, views._views = number, view, several
views.call = lambda address, model, index: CALL(int(address))(ctypes.cast(model, ctypes.c_void_p), int(index))
jit.Kernel.compile, jit.Kernel.address = compile_kernel, property(address_of)
jit.Kernel.is_cached, jit.Kernel.folder = lambda _: True, lambda _: Path(_EMPTY)
numba_kernels.views = matrices
