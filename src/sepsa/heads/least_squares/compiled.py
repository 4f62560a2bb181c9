"""The backend of heads on a CPU: each update of recursive least squares is one call of a compiled kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from sepsa.compiled import code, least_squares
from sepsa.compiled.kernels import CALL as KERNEL
from sepsa.compiled.least_squares import LEARNED, TOO_LARGE, Parts, length_of, shapes_of
from sepsa.heads.base.parameters import samples
from sepsa.heads.least_squares.eager import TorchBackend
from sepsa.heads.least_squares.math import PENDING, LeastSquaresState
from sepsa.heads.run.choose import Counters, Problem

PACK = least_squares.CALL.pack_into


def split(memory: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """The matrices of these shapes, which follow each other in `memory`."""
    pieces = torch.split(memory, [a * b for a, b in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def as_plain(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of a tensor in this dtype, as they follow each other in memory."""
    if tensor.dtype is dtype and tensor.is_contiguous() and not tensor.is_neg():
        return tensor
    return tensor.detach().to(dtype).contiguous().resolve_neg()


class Snapshot:
    """A copy of a state and its head; as a tuple it is the state, its counters and the head (m, p).

    What a step keeps in case it fails; views are made only then.
    """

    def __init__(self, memory: Any, weight: Any, bias: Any) -> None:
        self.memory, self.weight, self.bias = memory, weight, bias

    def __iter__(self) -> Iterator[Any]:
        m, p = len(self.weight), self.weight.shape[1] + bool(self.bias.size)
        memory, shapes = torch.from_numpy(self.memory), shapes_of(p, m)[:6]
        T, W, energy, left, counters, *H = split(memory, shapes if len(memory) == length_of(shapes) else shapes[:5])
        yield LeastSquaresState(T, W, H[0] if H else None, energy[0], left[0])
        yield counters[0].numpy().copy()
        yield torch.from_numpy(np.column_stack([self.weight, self.bias.reshape(m, -1)]))


class CompiledBackend(TorchBackend):
    """The state of a head in one array, of which its tensors are views, and memory for the rows of an update."""

    name = "compiled"

    def __init__(self, problem: Problem, state: LeastSquaresState, counters: Counters) -> None:
        weight, bias = problem.linear.weight.detach(), problem.linear.bias
        (m, p), self.k = state.W.shape, problem.linear.in_features
        self.outputs = m
        shapes = shapes_of(p, m)
        memory = state.T.new_zeros(length_of(shapes))
        part = self.parts = Parts._make(split(memory, shapes))
        own = LeastSquaresState(part.T, part.W, part.H, part.energy[0], part.left[0])
        super().__init__(problem, own, part.counters[0].numpy())
        self.penalize(problem.prior, problem.ridge)
        self.states = [memory.numpy()[: length_of(shapes[:end])] for end in (5, 6)]  # without and with H
        self.weight = weight.numpy()
        self.bias = np.zeros(0, self.weight.dtype) if bias is None else bias.detach().numpy()
        self.dtype, self.single = weight.dtype, weight.dtype is torch.float32
        self._call: Any = np.zeros(least_squares.CALL.size // 8, np.int64)
        self._kernel = KERNEL(code.address(least_squares.update))
        of_head = memory.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr()
        self._addresses, self._sizes = (self._call.ctypes.data, *of_head), (m, self.k, self.single)
        self._room = 0, memory[:0], 0  # for so many rows a buffer, and its address: an interrupt parts none of them
        self.load(state, counters)
        self.version = weight[:0]  # which shares the counter by which autograd notices changes

    def penalize(self, prior: Tensor, ridge: Tensor) -> None:
        """Restore these ridges (p,) about this prior (m, p) from now on."""
        super().penalize(prior, ridge)
        self.parts.prior.copy_(prior)
        self.parts.ridge.copy_(ridge)

    def learn(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None, forgetting: float) -> bool:
        """Learn samples in one compiled call; those too large for its products by torch."""
        n = features.numel() // self.k
        if n > self._room[0]:
            buffer = self.state.T.new_empty(2 * n * (self.outputs + len(self.state.T)))  # for Φ and Y, F and E
            self._room = n, buffer, buffer.data_ptr()
        if sample_weight is None and features.dtype is targets.dtype is self.dtype:
            x, y, columns, single, total = features, targets, self.k, self.single, float(n)
        else:
            x, y, total = samples(self.linear, features, targets, sample_weight, torch.float64)
            columns, single = x.shape[1], False
        x, y = as_plain(x, x.dtype), as_plain(y, x.dtype)
        rows = self._room[2], x.data_ptr(), y.data_ptr()
        PACK(self._call, 0, *self._addresses, *rows, *self._sizes, columns, single, total, forgetting)
        increment_version(self.version)  # the kernel writes where autograd does not see it
        outcome = self._kernel(self._addresses[0], n)
        if outcome == TOO_LARGE:
            return super().learn(features, targets, sample_weight, forgetting)
        return bool(outcome == LEARNED)

    def checkpoint(self) -> Snapshot:
        """The state, its counters and the head as they are now."""
        return Snapshot(self.states[bool(self.counters[PENDING])].copy(), self.weight.copy(), self.bias.copy())

    def load(self, state: LeastSquaresState, counters: Counters) -> None:
        """Continue from this state, copied into the array."""
        for mine, other in zip(self.state, state, strict=True):
            if mine is not None and other is not None:
                mine.copy_(other)
        self.counters[:] = counters
