"""The state of `SoftmaxNewton` inside a CUDA graph: at fixed addresses, without synchronizing with the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sepsa.heads.base import parameters
from sepsa.heads.base.ridge import due
from sepsa.heads.cross_entropy.math import CrossEntropyState, UpdateSettings, learned, with_root
from sepsa.heads.run.choose import UpdateSize, choose
from sepsa.heads.run.memory import HeadMemory


class CapturedSoftmax(HeadMemory):
    """Where a recording writes to. Symbols as in `cross_entropy`; Z = [T; W]."""

    def __init__(self, linear: nn.Linear, state: CrossEntropyState) -> None:
        K, p = state.W.shape
        self.Z = state.W.new_zeros(p + K, p)
        super().__init__(linear, self.Z)
        rest = {name: torch.zeros_like(getattr(state, name)) for name in CrossEntropyState._fields[2:-1]}
        self.W = self.Z[p:]
        self.now = CrossEntropyState(T=self.Z[:p], W=self.W, **rest)
        self.blocks: dict[int, Any] = {}  # buffers of the fused kernels, by the rows of a block
        self._settings: dict[UpdateSettings, Tensor] = {}
        self.updates = 0  # of the state, when the ridge was last chosen or looked at
        self._unfinished: Any = None  # a block of which W has learned, but not yet T

    def load(self, state: CrossEntropyState) -> None:
        """Take over a state of the same shapes."""
        for mine, other in zip(self.now[:-1], with_root(state)[:-1], strict=True):
            mine.copy_(other)

    def update(self, features: Tensor, targets: Tensor, settings: UpdateSettings) -> Tensor:
        """Learn rows; returns whether all values were valid (0-d). The update of T may be left to `finish`."""
        self.finish()
        x, now = features.detach().reshape(-1, self.k), self.now
        (K, p), n = now.W.shape, len(x)
        c = due(p, settings.forgetting, at_least=n)
        case = UpdateSize(x.device.type, now.W.dtype, p, K, n, c, contiguous=self.weight.is_contiguous())
        chosen = choose("captured cross-entropy", case)
        finite: Tensor
        if chosen.backend == "triton":
            finite, self._unfinished = chosen.load().learn(self, x, targets.detach(), self._on_device(settings), c)
            return finite
        W = parameters.follow(self.linear, now.W)
        Phi = parameters.rows(self.linear, x, W.dtype)
        new, finite, too_large = learned(now, W, Phi, targets, None, settings)
        self.too_large.add_(too_large & Phi.square().sum().isfinite())
        finite = finite & ~too_large
        self.keep(now, new, now.W, finite)
        return finite

    def finish(self) -> None:
        """Update T, which neither forward nor backward pass reads."""
        if self._unfinished is not None:
            self._unfinished()
            self._unfinished = None

    def _on_device(self, settings: UpdateSettings) -> Tensor:
        """λ and the smoothing as tensors: kernels would read Python numbers as float32."""
        if settings not in self._settings:
            self._settings[settings] = torch.tensor(settings[:2], dtype=torch.float64).to(self.Z.device)
        return self._settings[settings]
