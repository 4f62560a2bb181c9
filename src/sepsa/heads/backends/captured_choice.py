"""The choice among the members of a self-tuning head inside a CUDA graph, without synchronizing with the host.

The members learn as captured heads do, each on a stream of its own, so that they run beside each other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sepsa.heads.backends.memory import HeadMemory
from sepsa.heads.base.parameters import heads_of
from sepsa.heads.base.parameters import rows as joined
from sepsa.heads.base.repeated_samples import (
    DatasetIndex,
    RowSplit,
    SeenSamples,
    accept_rows,
    key_of,
    place_of,
    split_rows,
)
from sepsa.heads.math import score as scores
from sepsa.heads.math.score import Score, squared_errors


class CapturedChoice(HeadMemory):
    """The score, the active member and the samples seen, at fixed addresses."""

    def __init__(self, linear: nn.Linear, members: Sequence[Any]) -> None:
        device, J = linear.weight.device, len(members)
        self.members = members
        # One number has a dimension as well: torch compiles writes into a 0-d float64 on a CPU away.
        self.score = Score(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in (1, J, (J, J))))
        super().__init__(linear, self.score.products)
        self.numbers = torch.zeros(2, dtype=torch.int64, device=device)  # the active member, the updates
        self.memory = torch.tensor([member.forgetting for member in members], dtype=torch.float64).to(device)
        self.ahead = False  # whether this is newer than what the host has
        self.indices: dict[tuple[Any, ...], DatasetIndex] = {}
        self.index: DatasetIndex | None = None
        streams = members if device.type == "cuda" else ()
        self.streams: list[Any] = [torch.cuda.Stream(device) for _ in streams]  # type: ignore[no-untyped-call]

    @staticmethod
    def fused(function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as it is: a kernel for each operation."""
        return function

    def load(self, score: Score, active: int, steps: int, seen: SeenSamples) -> None:
        """Take over what the host has."""
        for mine, value in zip(self.score, score, strict=True):
            mine.copy_(torch.tensor(value, dtype=torch.float64))
        self.numbers.copy_(torch.tensor([active, steps]))
        if self.index is not None:
            self.index.load(seen)
        self.ahead = True

    def read(self, seen: SeenSamples) -> tuple[Score, int, int]:
        """The score, the active member and the updates for the host, which from now on is up to date."""
        self.finish()
        if self.index is not None:
            self.index.read(seen)
        active, steps = self.numbers.tolist()
        self.ahead = False
        (count,), sums, products = (part.tolist() for part in self.score)
        return Score(count, sums, products), active, steps

    def move(self) -> None:
        """Move every member as far as the head was moved from outside; outside of a graph."""
        for own, each in zip((self.weight, self.bias), heads_of(self.members), strict=True):
            if own is not None:
                delta = own - torch.stack(each).index_select(0, self.numbers[:1])[0]
                for part in each:
                    part.add_(delta)

    def indexes(self, inputs: Tensor, targets: Tensor) -> bool:
        """Whether the index in use is that of this data set."""
        return self.index is not None and self.index.key == key_of(inputs, targets)

    def use(self, inputs: Tensor, targets: Tensor, seen: SeenSamples) -> None:
        """Use the index of a data set, which is up to date where the device is ahead."""
        place = place_of(inputs, targets)
        index = self.indices.get(place)
        if index is None:
            index = self.indices[place] = DatasetIndex(inputs, targets, seen)
        elif index.key != key_of(inputs, targets):
            index.refill(inputs, targets, seen)
        self.index = index

    def index_batch(self, features: Tensor, targets: Tensor, seen: SeenSamples) -> None:
        """Use an index of these samples alone, by their features; outside of a graph."""
        if self.index is not None:
            self.index.read(seen)
        x = features.detach().reshape(-1, self.k)
        self.index = DatasetIndex(x, targets.reshape(len(x), -1), seen)
        self.index.load(seen)

    def update(self, features: Tensor, targets: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Score and learn rows of the data set. Returns whether all is finite (0-d), and the rows held out (n,)."""
        self.finish()
        assert self.index is not None
        x = features.detach().reshape(-1, self.k)
        y = targets.detach().reshape(len(x), -1)
        split = self.fused(split_rows)(rows, *self.index.tensors)
        Phi, keep = joined(self.linear, x, self.score.sums.dtype), ~split.held_out
        leverages = self._on_streams(lambda member: member._leverage(Phi))
        self._join()
        weights, biases = heads_of(self.members)
        errors, size = self.fused(errors_of)(weights, biases, x, y, split, leverages, self.memory, self.numbers)
        flags = self._on_streams(lambda member: member.update_captured(x, y, keep))
        # Beside the members, which are on streams of their own until `_join`.
        new, active = self.fused(judged)(self.score, errors, size, self.memory, self.numbers)
        self._join()
        head = [own for own in (self.weight, self.bias) if own is not None]
        of_members = [weights, biases][: len(head)]
        settled = self.fused(settle)
        valid: Tensor = settled(
            self.score, new, self.numbers, active, flags, split, self.index.tensors, head, of_members
        )
        return valid, split.held_out

    def finish(self) -> None:
        """Compute the curvatures, which neither forward nor backward pass reads."""
        self._on_streams(lambda member: member.finish_captured())
        self._join()

    def _on_streams(self, work: Callable[[Any], Any]) -> list[Any]:
        """Start this work of every member, each on its stream."""
        if not self.streams:
            return [work(member) for member in self.members]
        main, results = torch.cuda.current_stream(self.weight.device), []
        for stream, member in zip(self.streams, self.members, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                results.append(work(member))
        return results

    def _join(self) -> None:
        """Wait for the work of all members."""
        for stream in self.streams:
            torch.cuda.current_stream(self.weight.device).wait_stream(stream)


# ---------------------------------------------------------------------- the steps of an update


def errors_of(
    weights: list[Tensor], biases: list[Tensor], x: Tensor, y: Tensor, split: RowSplit, leverages: list[Tensor],
    memory: Tensor, numbers: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The error (J,) of each member at the rows that are scored, and the mean square of their targets."""
    scored, held_out, count = split.scored[:, None], split.held_out[:, None], split.scored.sum().clamp(min=1)
    each = squared_errors(weights, biases, x.to(weights[0].dtype), y.to(weights[0].dtype))
    share = scores.share_left(torch.stack(leverages, 1), memory, (numbers[1] - split.learned)[:, None])
    each = torch.where(held_out, each / share.square(), each)
    size = torch.where(scored, y, 0).square().sum() / (count * y.shape[1])
    return (torch.where(scored, each, 0).sum(0) / count).double(), size.double()


def judged(score: Score, errors: Tensor, size: Tensor, memory: Tensor, numbers: Tensor) -> tuple[Score, Tensor]:
    """The score with these errors, and the best member by it."""
    new = scores.add_captured(score, errors, size)
    return new, scores.best_captured(new, memory, numbers[0])


def settle(
    score: Score, new: Score, numbers: Tensor, best: Tensor, flags: list[Tensor], split: RowSplit,
    index: tuple[Tensor, ...], head: list[Tensor], of_members: list[list[Tensor]],
) -> Tensor:  # fmt: skip
    """Take over what an update has found, where a member has learned it; the best member sets the head's weights."""
    valid = torch.stack(flags).any()
    accept_rows(index[2], index[3], split, valid, numbers[1] + 1)
    counts = valid & split.scored.any()
    for mine, value in zip(score, new, strict=True):
        mine.copy_(torch.where(counts, value, mine))
    active = torch.where(counts, best, numbers[0])
    numbers.copy_(torch.stack([active, numbers[1] + (valid & ~split.held_out.all())]))
    for own, each in zip(head, of_members, strict=True):
        own.copy_(torch.where(valid, torch.stack(each).index_select(0, active[None])[0], own))
    return valid


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled by torch into a few kernels; what it cannot compile runs as it is."""
    made: Callable[..., Any] = torch.compile(function)
    return made


class CompiledChoice(CapturedChoice):
    """The same in a sixth of the kernels."""

    @staticmethod
    def fused(function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as a few kernels."""
        return compiled(function)
