"""The backend of small cross-entropy heads on a CPU: each update is one call of a compiled kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sepsa.compiled import code
from sepsa.compiled import cross_entropy as kernels
from sepsa.compiled.kernels import CALL as KERNEL
from sepsa.compiled.least_squares import length_of
from sepsa.heads.base.checks import own_parameters
from sepsa.heads.cross_entropy.eager import Samples, TorchBackend
from sepsa.heads.cross_entropy.math import CrossEntropyState, with_root
from sepsa.heads.least_squares.compiled import as_plain
from sepsa.restoration import due

PACK = kernels.CALL.pack_into


class CompiledBackend(TorchBackend):
    """Updates that write a new state in one call; what it refuses is learned, or explained, by torch."""

    name = "compiled"

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self._kernel = KERNEL(code.address(kernels.update))
        self._call: Any = np.zeros(kernels.CALL.size // 8, np.int64)
        self._address = self._call.ctypes.data
        self._work: Any = np.empty(0)
        self._made: CrossEntropyState | None = None  # by the last update, whose tensors are contiguous

    def learn(self, state: CrossEntropyState, samples: Samples) -> tuple[CrossEntropyState, bool]:
        """The state after an update, in memory of its own."""
        features, targets, sample_weight, settings, _ = samples
        (weight, bias), n = own_parameters(self.linear), samples.rows
        old = state if state is self._made else with_root(state).map(Tensor.contiguous)
        (m, p), separate = old.W.shape, old.T.ndim == 3
        heads, labels = m if separate else 1, not targets.is_floating_point()
        of_work = kernels.shapes_of_work(n, n + due(p, settings.forgetting, at_least=n), p, m // heads)
        if self._work.size < (length := length_of(of_work)):
            self._work = np.empty(length)
        x = as_plain(features, self.dtype if features.dtype is self.dtype else torch.float64)
        y = as_plain(targets, torch.int64 if labels else torch.float64)
        omega = None if sample_weight is None else as_plain(sample_weight, torch.float64)
        read = old.T, old.shares, old.ridge_left, old.counters, old.W, old.prior, old.weights, old.ridge
        T, shares, left, counters, W = made = [torch.empty_like(part) for part in read[:5]]
        sizes = heads, m // heads, weight.shape[1], weight.dtype is torch.float32, separate
        PACK(
            *(self._call, 0, self._address, *(part.data_ptr() for part in (*made, *read, weight))),
            *(0 if bias is None else bias.data_ptr(), x.data_ptr(), x.dtype is torch.float32),
            *(y.data_ptr(), 0 if labels else m, 0 if omega is None else omega.data_ptr(), self._work.ctypes.data),
            *(*sizes, *settings[:2]),
        )
        if not self._kernel(self._address, n):
            return super().learn(state, samples)
        self._made = old._replace(T=T, W=W, shares=shares, ridge_left=left, counters=counters)
        return self._made, True
