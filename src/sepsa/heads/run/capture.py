"""Learning inside CUDA graphs, without synchronizing with the host: a head's memory, and what its solvers share."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sepsa.heads.base.head import HasRidge, head_of
from sepsa.heads.base.parameters import follow, place_of, store
from sepsa.heads.least_squares.evidence import updates_until
from sepsa.heads.protocols import PrecisionWarning
from sepsa.heads.run.choose import UpdateSize, choose


class CapturedHead:
    """Weight and bias of a head, Z = [T; W] of its state, and an update of T that waits for `finish`."""

    solver: ClassVar[str]  # its name in the table of backends
    updates = 0  # of the state, when the ridge was chosen last, or looked at
    waiting: Any = None  # as a backend of eager updates has

    def __init__(self, linear: nn.Linear, W: Tensor) -> None:
        """`W` (m, p) has the shape, dtype and device of the solver's own."""
        (m, p), self.linear, self.k = W.shape, linear, linear.in_features
        self.weight, self.bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
        self.Z = W.new_zeros(p + m, p)
        self.T, self.W = self.Z[:p], self.Z[p:]
        self.place = self.Z.data_ptr(), *place_of(linear)  # what a recording reads and writes
        self.too_large = torch.zeros((), dtype=torch.int64, device=W.device)  # batches that were refused for that
        self.blocks: dict[tuple[int, int], Any] = {}  # buffers of the Triton kernels, by samples and restored ridges
        self._unfinished: Callable[[], None] | None = None  # updates T by a block of which only W has learned

    def lies_in(self, linear: nn.Linear) -> bool:
        """Whether the head still has the memory that it had."""
        return self.place[1:] == place_of(linear)

    def by_kernels(self, x: Tensor, count: int, *given: Any) -> Tensor | None:
        """Learn rows x (n, k) and the ridge of `count` coordinates by Triton, where that is chosen; whether all was
        finite (0-d). The update of T may be left to `finish`.
        """
        chosen = choose(f"captured {self.solver}", UpdateSize.of(self.linear, self.W, len(x), count))
        if chosen.backend != "triton":
            return None
        finite: Tensor
        finite, self._unfinished = chosen.load().learn(self, x, *given)
        return finite

    def finish(self) -> None:
        """Update T, which neither forward nor backward pass reads."""
        if self._unfinished is not None:
            self._unfinished()
            self._unfinished = None

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

    def keep(self, now: Sequence[Tensor | None], new: Sequence[Tensor | None], finite: Tensor) -> None:
        """Write the tensors `new` to those of `now`, of which W is one, where `finite`; the head takes W."""
        for mine, value in zip(now, new, strict=True):
            if mine is not None and value is not None and value is not mine:
                mine.copy_(value.where(finite, mine))
        store(self.linear, self.W.to(self.weight.dtype))


class LearnsInGraphs(HasRidge):
    """Base of the solvers that offer `sepsa.heads.Capturable`."""

    captures: ClassVar[Any]  # the kind of its `CapturedHead`
    captured: Any = None  # the one that recordings write to, once there is one
    _not_copied: ClassVar[tuple[str, ...]] = ("captured",)  # recordings stay with the original

    @abstractmethod
    def _read(self) -> Any:
        """The state, with the ridge that evidence chooses after captured steps."""

    @abstractmethod
    def _continue_captured(self) -> Hashable:
        """Continue from the state that captured steps write; what a recording of them depends on."""

    @torch.no_grad()
    def prepare_capture(self) -> Hashable:
        """Copy the state to the memory that captured updates write, if the head was changed elsewhere since.

        Returns:
            The addresses and settings on which a recording depends.
        """
        linear, state, captured = head_of(self), self._read(), self.captured
        if captured is None or not captured.lies_in(linear):
            captured = self.captures(linear, state)
        if state.W is not captured.W:
            captured.load(state)
        captured.W.copy_(follow(linear, captured.W))
        if self.ridge == "evidence":
            captured.updates = int(state.counters[0])
        self.captured = captured
        return self._continue_captured()

    def replays(self) -> int | None:
        """Return how many recorded updates may run before `prepare_capture` chooses the ridge again.

        Returns:
            The number of updates; None where a number fixes the ridge.
        """
        if self.ridge != "evidence" or self.captured is None:
            return None
        return updates_until(self.captured.updates, self.forgetting)

    @torch.no_grad()
    def finish_captured(self) -> None:
        """Compute the curvature after the last `update_captured`; no forward or backward pass reads it."""
        if self.captured is not None:
            self.captured.finish()
