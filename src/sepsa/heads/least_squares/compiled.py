"""The backend of heads on a CPU: each update of recursive least squares is one call of a compiled kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from sepsa.compiled import code, least_squares
from sepsa.compiled.kernels import CALL as KERNEL
from sepsa.compiled.least_squares import LEARNED, TOO_LARGE, Parts, length_of, shapes_of
from sepsa.heads.base.parameters import commit, samples, store
from sepsa.heads.least_squares.eager import TorchBackend
from sepsa.heads.least_squares.math import PENDING, LeastSquaresState

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


class CompiledBackend(TorchBackend):
    """The state of a head in one array, of which its tensors are views, and memory for the rows of an update."""

    name = "compiled"

    def __init__(self, linear: nn.Linear, state: LeastSquaresState) -> None:
        weight, bias = linear.weight.detach(), linear.bias
        (m, p), self.k = state.W.shape, linear.in_features
        shapes = shapes_of(p, m)
        memory = state.T.new_zeros(length_of(shapes))
        part = Parts._make(split(memory, shapes))
        vectors = part.energy[0], part.left[0], part.prior, part.ridge[0]
        super().__init__(linear, LeastSquaresState(part.T, part.W, *vectors, part.H, part.counters[0].numpy()))
        self.states = [memory.numpy()[: length_of(shapes[:end])] for end in (5, 6)]  # without and with H
        self.pull = memory.numpy()[len(self.states[1]) : length_of(shapes[:8])]  # prior and ridge
        self.weight = weight.numpy()
        self.bias = np.zeros(0, self.weight.dtype) if bias is None else bias.detach().numpy()
        self.dtype, self.single = weight.dtype, weight.dtype is torch.float32
        self._call: Any = np.zeros(least_squares.CALL.size // 8, np.int64)
        self._kernel = KERNEL(code.address(least_squares.update))
        of_head = memory.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr()
        self._addresses, self._sizes = (self._call.ctypes.data, *of_head), (m, self.k, self.single)
        self._room = 0, memory[:0], 0  # for so many rows a buffer, and its address: an interrupt parts none of them
        self.load(state)
        self.version = weight[:0]  # which shares the counter by which autograd notices changes

    def read(self) -> LeastSquaresState:
        """The state, in views of the array."""
        return self.state if self.state.counters[PENDING] else self.state._replace(H=None)

    def load(self, state: LeastSquaresState) -> None:
        """Continue from this state, copied into the array."""
        for mine, other in zip(self.state[:-1], state[:-1], strict=True):
            if mine is not None and other is not None:
                mine.copy_(other)
        self.state.counters[:] = state.counters

    def learn(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None, forgetting: float) -> bool:
        """Learn samples in one compiled call; those too large for its products by torch."""
        n = features.numel() // self.k
        if n > self._room[0]:
            buffer = self.state.T.new_empty(2 * n * sum(self.state.W.shape))  # for Φ and Y, F and E
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

    def checkpoint(self) -> Any:
        """Copies of the array's parts that are the state, and of the head."""
        state = self.states[bool(self.state.counters[PENDING])]
        return state.copy(), self.pull.copy(), self.weight.copy(), self.bias.copy()

    def undo(self, checkpoint: Any) -> None:
        """Restore the state and the head's weights as they were at `checkpoint`."""
        state, pull, weight, bias = checkpoint

        def write() -> None:
            self.states[1][: len(state)] = state
            self.pull[:] = pull
            store(self.linear, torch.from_numpy(np.column_stack([weight, bias.reshape(len(weight), -1)])))

        commit(write)
