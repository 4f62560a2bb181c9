"""The state of `SoftmaxNewton` inside a CUDA graph: at fixed addresses, without a look from the host."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sepsa.heads import _affine
from sepsa.heads._softmax_newton import State, learned, restored, root
from sepsa.heads._square_root import andrews


class Settings(NamedTuple):
    """What the host decides of an update."""

    forgetting: float
    label_smoothing: float


class CapturedSoftmax:
    """Where a recording writes to. Symbols as in `_softmax_newton`; Z = [T; W]."""

    def __init__(self, linear: nn.Linear, state: State) -> None:
        K, p = state.W.shape
        self.linear, self.k = linear, linear.in_features
        self.weight, self.bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
        self.Z = state.W.new_zeros(p + K, p)
        rest = {name: torch.zeros_like(getattr(state, name)) for name in State._fields[2:]}
        self.now = State(T=self.Z[:p], W=self.Z[p:], **rest)
        self.kernels = fused_kernels(self.Z, self.weight)
        self.blocks: dict[int, Any] = {}  # buffers of the fused kernels, by the rows of a block
        self._settings: dict[Settings, Tensor] = {}
        self._unfinished: Any = None  # a block of which W has learned, but not yet T

    @property
    def place(self) -> tuple[int | None, ...]:
        """The memory that a recording reads and writes."""
        return self.Z.data_ptr(), self.weight.data_ptr(), None if self.bias is None else self.bias.data_ptr()

    def lies_in(self, linear: nn.Linear) -> bool:
        """Whether the head still has the memory that it had."""
        bias = None if linear.bias is None else linear.bias.data_ptr()
        return self.place[1:] == (linear.weight.data_ptr(), bias)

    def load(self, state: State) -> None:
        """Take over a state of the same shapes."""
        for mine, other in zip(self.now, state, strict=True):
            mine.copy_(other)

    def update(self, features: Tensor, targets: Tensor, settings: Settings) -> Tensor:
        """Learn rows; returns whether all was well (0-d). T's own update may be left to `finish`."""
        self.finish()
        x, now = features.detach().reshape(-1, self.k), self.now
        (K, p), n = now.W.shape, len(x)
        c = restored(p, n, settings.forgetting)
        if self.kernels is not None and self.kernels.takes(p, K, n, c):
            numbers, head = self._on_device(settings), (self.weight, self.bias)
            fine: Tensor
            fine, self._unfinished = self.kernels.learn(self, x, targets.detach(), numbers, c, head)
            return fine
        W = _affine.follow(self.linear, now.W)
        Phi, dtype = _affine.rows(self.linear, x, W.dtype), self.weight.dtype
        new, fine = learned(now, W, Phi, targets, None, **settings._asdict(), head_dtype=dtype)
        for mine, value in zip(now, new, strict=True):
            if value is not mine:
                mine.copy_(value.where(fine, mine))
        _affine.store(self.linear, now.W.to(dtype))
        return fine

    def finish(self) -> None:
        """T's own update, which neither forward nor backward pass waits for."""
        work, T = self._unfinished, self.now.T
        if work is not None:
            T.copy_(andrews(T * work.inverse_root, work.Ft.T, work.Q, root(work.M)))
            self._unfinished = None

    def _on_device(self, settings: Settings) -> Tensor:
        """λ and the smoothing where the kernels read them, which would take numbers for float32."""
        if settings not in self._settings:
            self._settings[settings] = torch.tensor(settings, dtype=torch.float64).to(self.Z.device)
        return self._settings[settings]


def fused_kernels(Z: Tensor, weight: Tensor) -> ModuleType | None:
    """The kernels for a few samples on a GPU, where there are any for this head."""
    if not Z.is_cuda or not weight.is_contiguous():
        return None
    try:
        from sepsa.heads import _triton_softmax
    except ModuleNotFoundError:  # a torch without Triton
        return None
    return _triton_softmax
