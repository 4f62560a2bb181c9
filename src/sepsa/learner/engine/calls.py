"""Calls of an engine's kernels: the addresses that they get, and buffers for single rows."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sepsa.compiled import code
from sepsa.compiled.kernels import CALL
from sepsa.learner.experts import step
from sepsa.learner.experts.frame import Expert, given
from sepsa.learner.memory.memory import Layout, Memory
from sepsa.learner.memory.parts import Floats

Kernel = Callable[[int, int], int]
PACK_FRAME = struct.Struct(f"{len(given.slots)}q").pack_into


class Kernels:
    """The compiled kernels of an engine, and the addresses that they get."""

    def __init__(self, experts: Sequence[Expert], hidden: Sequence[int], memory: Memory, options: Any) -> None:
        calls = np.array([[code.address(each.answer), code.address(each.learn)] for each in experts])
        widths = np.array(hidden, np.int64)
        self.arrays = (memory.vector, memory.layout.numbers, widths, options, calls)
        self.fixed = tuple(array.ctypes.data for array in self.arrays)
        self.learn, self.predict = (CALL(code.address(kernel)) for kernel in (step.learn, step.predict))

    def run(
        self,
        kernel: Kernel,
        workspace: Floats,
        X: Floats,
        Y: Floats | None,
        weight: Floats | None,
        out: Floats,
        leverage: Floats | None = None,
    ) -> int:
        """Call a kernel for the rows of X; returns how many it has finished."""
        rows = [None if array is None else np.ascontiguousarray(array) for array in (X, Y, weight)]
        rows += [out, leverage]
        addresses = (0 if array is None or not array.size else array.ctypes.data for array in rows)
        start = workspace.ctypes.data
        PACK_FRAME(workspace.data, 0, start, *self.fixed, *addresses)
        return kernel(start, len(X))


class RowBuffer:
    """Arrays that pass one row to the kernels and its prediction back, reused for many rows."""

    def __init__(self, layout: Layout) -> None:
        inputs, outputs = layout.sizes["inputs"], layout.sizes["outputs"]
        values = np.zeros(inputs + outputs + 1)
        self.values = values.data  # x, then y, then the weight
        self.x, self.y = values[:inputs].reshape(1, inputs), values[inputs:-1].reshape(1, outputs)
        self.weight, self.out = values[-1:], np.zeros(outputs)
        workspace = np.zeros(layout.workspace)
        self.workspace, self.start = workspace.data, workspace.ctypes.data
        self.addresses = self.x.ctypes.data, self.y.ctypes.data, self.weight.ctypes.data, self.out.ctypes.data, 0
        self.write, self.write_x = struct.Struct(f"{values.size}d").pack_into, struct.Struct(f"{inputs}d").pack_into

    def run(self, kernels: Kernels, kernel: Kernel) -> int:
        """Call one of the kernels for the row; returns 0 where it was refused."""
        PACK_FRAME(self.workspace, 0, self.start, *kernels.fixed, *self.addresses)
        return kernel(self.start, 1)
