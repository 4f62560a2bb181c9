"""The memory of a head that a recorded CUDA graph writes to."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sepsa.heads.base.parameters import place_of, store
from sepsa.heads.protocols import PrecisionWarning


class HeadMemory:
    """Weight and bias of a head as a recording knows them, beside a solver's own tensors at fixed addresses."""

    def __init__(self, linear: nn.Linear, state: Tensor) -> None:
        """`state` is the first of the solver's tensors; its address represents all of them."""
        self.linear, self.k, self._own, self._head = linear, linear.in_features, state, place_of(linear)
        self.weight, self.bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
        self.too_large = torch.zeros((), dtype=torch.int64, device=state.device)  # batches that were refused for that

    def warn_of_refusals(self) -> None:
        """Warn of batches since the last call that changed nothing because digits would have been lost.

        Inside a graph, CUDA's or the compiler's, the host cannot read values, and this does nothing.
        """
        if torch.compiler.is_compiling() or (self.too_large.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        count = int(self.too_large)
        if count:
            self.too_large.zero_()
            warnings.warn(
                f"{count} batches of captured steps changed nothing: their features are so large beside the ridge that "
                "the head would have lost digits; standardize the features, raise `ridge`, or learn without capture",
                PrecisionWarning,
                stacklevel=3,
            )

    def keep(self, now: Sequence[Tensor | None], new: Sequence[Tensor | None], W: Tensor, finite: Tensor) -> None:
        """Write the tensors `new` to those of `now`, of which W (m, p) is one, where `finite`; the head takes W."""
        for mine, value in zip(now, new, strict=True):
            if mine is not None and value is not None and value is not mine:
                mine.copy_(value.where(finite, mine))
        store(self.linear, W.to(self.weight.dtype))

    @property
    def place(self) -> tuple[int | None, ...]:
        """The memory that a recording reads and writes."""
        return self._own.data_ptr(), *self._head

    def lies_in(self, linear: nn.Linear) -> bool:
        """Whether the head still has the memory that it had."""
        return self._head == place_of(linear)
