"""What a kernel is: a function (model, index) -> integer that is called by the address of its compiled code.

`model` points to words of memory, whose layout kernels know. The decorators return plain functions, which Python runs
as they stand; `build` compiles them, and nothing else knows how.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

Function = Callable[..., Any]
CALL = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)

KERNELS: dict[Function, str] = {}  # each with its name in the library
PARTS: dict[Function, bool] = {}  # functions that kernels call, and whether they are always inlined
GENERATED: dict[Any, str] = {}  # what kernels call for which the builder writes code, and the kind of that code


def kernel(function: Function) -> Function:
    """A decorator of a kernel."""
    KERNELS[function] = f"{function.__module__}.{function.__qualname__}".replace(".", "_")
    return function


def called(function: Function) -> Function:
    """A decorator of a function that kernels call."""
    PARTS.setdefault(function, False)
    return function


def inlined(function: Function) -> Function:
    """A decorator of a function that becomes a part of each kernel that calls it."""
    PARTS[function] = True
    return function


def generated(kind: str) -> Callable[[Any], Any]:
    """A decorator of a function or another object that is called, for which the builder writes code of this kind."""

    def register(given: Any) -> Any:
        GENERATED[given] = kind
        return given

    return register


@generated("call")
def call(address: Any, model: Any, index: Any) -> int:
    """Call the kernel at this address."""
    return int(CALL(int(address))(ctypes.cast(model, ctypes.c_void_p), int(index)))


@generated("array")
def array_at(address: Any, shape: Any, dtype: Any) -> Any:
    """The array of this shape and dtype at an address."""
    count = int(np.prod(shape))
    memory = (ctypes.c_char * max(8, count * np.dtype(dtype).itemsize)).from_address(int(address))
    array = np.frombuffer(memory, dtype, count).reshape(shape)
    return array.view(np.recarray) if array.dtype.fields else array
