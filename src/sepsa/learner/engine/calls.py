"""Calls of an engine's kernels: the addresses that they get, and buffers for single rows."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

import numpy as np

from sepsa.compiled import code
from sepsa.compiled.kernels import CALL
from sepsa.learner.engine.core import EngineState
from sepsa.learner.experts import linear, step, tree_parts, trees
from sepsa.learner.experts.frame import given
from sepsa.learner.memory.memory import view
from sepsa.learner.memory.parts import Floats

Kernel = Callable[[int, int], int]
PACK_FRAME = struct.Struct(f"{len(given.slots)}q").pack_into


class Kernels:
    """The compiled kernels of an engine, and the addresses that they get."""

    def __init__(self, core: EngineState) -> None:
        calls = np.array([[code.address(each.answer), code.address(each.learn)] for each in core.form.experts])
        memory, widths = core.memory, np.array(core.form.hidden, np.int64)
        self.arrays = (memory.vector, memory.layout.numbers, widths, core.options, calls)
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


def kernels_of(core: EngineState) -> Kernels:
    """The kernels of a state, which it keeps, with the addresses of what does not change from call to call."""
    if core.kernels is None:
        core.kernels = Kernels(core)
    kernels: Kernels = core.kernels
    return kernels


class RowBuffer:
    """Arrays that pass one row to the kernels and its prediction back, reused for many rows."""

    def __init__(self, core: EngineState) -> None:
        inputs, outputs = core.form.inputs, core.form.outputs
        values = np.zeros(inputs + outputs + 1)
        self.values = values.data  # x, then y, then the weight
        self.x, self.y = values[:inputs].reshape(1, inputs), values[inputs:-1].reshape(1, outputs)
        self.weight, self.out = values[-1:], np.zeros(outputs)
        workspace = np.zeros(core.memory.layout.workspace)
        self.workspace, self.start = workspace.data, workspace.ctypes.data
        self.addresses = self.x.ctypes.data, self.y.ctypes.data, self.weight.ctypes.data, self.out.ctypes.data, 0
        self.write, self.write_x = struct.Struct(f"{values.size}d").pack_into, struct.Struct(f"{inputs}d").pack_into

    def run(self, kernels: Kernels, kernel: Kernel) -> int:
        """Call one of the kernels for the row; returns 0 where it was refused."""
        PACK_FRAME(self.workspace, 0, self.start, *kernels.fixed, *self.addresses)
        return kernel(self.start, 1)


def answers(core: EngineState, X: Floats) -> Floats:
    """The answers (n, experts, outputs) of all experts to rows (n, inputs), in deviations of the outputs."""
    count, outputs, kernels = len(core.names), core.form.outputs, kernels_of(core)
    workspace = np.zeros(core.memory.layout.workspace)
    own = view(workspace, core.memory.layout.work["row", "ANSWERS"])
    found, out = np.empty((len(X), count, outputs)), np.empty((1, outputs))
    for i in range(len(X)):
        kernels.run(kernels.predict, workspace, X[i : i + 1], None, None, out)
        found[i] = own[:count]
    return found


def boost_trees(core: EngineState) -> None:
    """Grow all trees anew, each once on the rows that are stored, by boosting."""
    core = core.with_settings(rate=tree_parts.TABLE_RATE)
    memory, workspace, form = core.memory, np.zeros(core.memory.layout.workspace), core.form
    if form.outputs == 1 and not form.settings["classes"]:
        view(workspace, memory.layout.work["row", "FACTS"])["origin"] = memory("ORIGIN", "log trees")["value"]
    memory.restart("trees", *tree_parts.GROWN, *tree_parts.GROWING)
    memory("GROWTH", "trees")["tree"] = 0
    boost = CALL(code.address(trees.boost))
    Kernels(core).run(boost, workspace, np.zeros((1, form.inputs)), None, None, np.empty(1))
    memory.restart("trees", *tree_parts.GROWING)  # whose parts at their start take no place in a file


def fit_linear(core: EngineState, parts: Iterable[tuple[Floats, Floats, Floats]]) -> None:
    """Fit the linear head to rows, as the experts see them: parts of inputs, targets and weights."""
    unit, scale = np.sqrt(core.memory("GAIN", "network")), core.memory("SCALE", "mixture")
    mean = core.memory("MEAN", "network")
    seen = ((np.nan_to_num(np.clip((X - mean) * scale, -8.0, 8.0)), Y * unit, weight) for X, Y, weight in parts)
    core.memory("SLOPES", "linear")[:], core.memory("VALUE", "linear")[:] = linear.fitted(seen)
