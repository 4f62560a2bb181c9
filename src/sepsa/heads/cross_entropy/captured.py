"""The state of `SoftmaxNewton` inside a CUDA graph."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sepsa.heads.base import parameters
from sepsa.heads.base.ridge import due
from sepsa.heads.cross_entropy.math import CrossEntropyState, UpdateSettings, learned, with_root
from sepsa.heads.run.capture import CapturedHead


class CapturedSoftmax(CapturedHead):
    """Where a recording writes to. Symbols as in `cross_entropy`."""

    name, solver = "captured", "cross-entropy"

    def __init__(self, linear: nn.Linear, state: CrossEntropyState) -> None:
        super().__init__(linear, state.W)
        self.now = state.map(torch.zeros_like)._replace(T=self.T, W=self.W, A=None)
        self._settings: dict[UpdateSettings, Tensor] = {}

    def owns(self, state: CrossEntropyState) -> bool:
        """Whether later updates write into the tensors of this state."""
        return state.W is self.W

    def load(self, state: CrossEntropyState) -> None:
        """Take over a state of the same shapes."""
        for mine, other in zip(self.now[:-1], with_root(state)[:-1], strict=True):
            mine.copy_(other)

    def update(self, features: Tensor, targets: Tensor, settings: UpdateSettings) -> Tensor:
        """Learn rows; returns whether all values were valid (0-d). The update of T may be left to `finish`."""
        self.finish()
        x, now = features.detach().reshape(-1, self.k), self.now
        c = due(now.W.shape[1], settings.forgetting, at_least=len(x))
        finite = self.by_kernels(x, c, targets.detach(), self._on_device(settings), c)
        if finite is None:
            Phi = parameters.rows(self.linear, x, now.W.dtype)
            new, finite, too_large = learned(now, now.W, Phi, targets, None, settings)
            self.too_large.add_(too_large & Phi.square().sum().isfinite())
            finite = finite & ~too_large
            self.keep(now, new, finite)
        return finite

    def _on_device(self, settings: UpdateSettings) -> Tensor:
        """λ and the smoothing as tensors: kernels would read Python numbers as float32."""
        if settings not in self._settings:
            self._settings[settings] = torch.tensor(settings[:2], dtype=torch.float64).to(self.Z.device)
        return self._settings[settings]
