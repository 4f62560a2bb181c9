"""The memory of a head that a recorded CUDA graph writes to."""

from __future__ import annotations

import importlib
from types import ModuleType

from torch import Tensor, nn


class HeadMemory:
    """Weight and bias of a head as a recording knows them, beside a solver's own tensors at fixed addresses."""

    def __init__(self, linear: nn.Linear, state: Tensor) -> None:
        """`state` is the first of the solver's tensors, which stands for all."""
        self.linear, self.k, self._own = linear, linear.in_features, state
        self.weight, self.bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()

    @property
    def place(self) -> tuple[int | None, ...]:
        """The memory that a recording reads and writes."""
        return self._own.data_ptr(), self.weight.data_ptr(), None if self.bias is None else self.bias.data_ptr()

    def lies_in(self, linear: nn.Linear) -> bool:
        """Whether the head still has the memory that it had."""
        bias = None if linear.bias is None else linear.bias.data_ptr()
        return self.place[1:] == (linear.weight.data_ptr(), bias)


def fused_kernels(name: str, state: Tensor, weight: Tensor) -> ModuleType | None:
    """The Triton kernels of the module `name` beside this file, where a GPU, the head's layout and torch allow them."""
    if not state.is_cuda or not weight.is_contiguous():
        return None
    try:
        return importlib.import_module(f"sepsa.heads.backends.triton.{name}")
    except ModuleNotFoundError:  # a torch without Triton
        return None
