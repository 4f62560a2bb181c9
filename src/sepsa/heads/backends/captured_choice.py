"""The choice among the members of a self-tuning head inside a CUDA graph, without synchronizing with the host.

The members learn as captured heads do, each on a stream of its own, so that they run beside each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sepsa.heads.backends.memory import HeadMemory
from sepsa.heads.base.parameters import heads_of
from sepsa.heads.base.parameters import rows as joined
from sepsa.heads.base.repeated_samples import DatasetIndex, SeenSamples, key_of, place_of
from sepsa.heads.math import score as scores
from sepsa.heads.math.score import Score, squared_errors


class CapturedChoice(HeadMemory):
    """The score, the active member and the samples seen, at fixed addresses."""

    def __init__(self, linear: nn.Linear, members: Sequence[Any]) -> None:
        device, J = linear.weight.device, len(members)
        self.members = members
        self.score = Score(*(torch.zeros((J,) * k, dtype=torch.float64, device=device) for k in range(3)))
        super().__init__(linear, self.score.products)
        self.numbers = torch.zeros(2, dtype=torch.int64, device=device)  # the active member, the updates
        self.memory = torch.tensor([member.forgetting for member in members], dtype=torch.float64).to(device)
        self.ahead = False  # whether this is newer than what the host has
        self.indices: dict[tuple[Any, ...], DatasetIndex] = {}
        self.index: DatasetIndex | None = None
        streams = members if device.type == "cuda" else ()
        self.streams: list[Any] = [torch.cuda.Stream(device) for _ in streams]  # type: ignore[no-untyped-call]

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
        return Score(*(part.tolist() for part in self.score)), active, steps

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
        scored, held_out, learned = self.index.split(rows)
        keep, count, step = ~held_out, scored.sum().clamp(min=1), self.numbers[1]
        Phi = joined(self.linear, x, self.score.sums.dtype)
        leverages = self._on_streams(lambda member: member._leverage(Phi))
        weights, biases = heads_of(self.members)
        each = squared_errors(weights, biases, x.to(self.weight.dtype), y.to(self.weight.dtype))
        self._join()
        share = scores.share_left(torch.stack(leverages, 1), self.memory, (step - learned)[:, None])
        each = torch.where(held_out[:, None], each / share.square(), each)
        errors = torch.where(scored[:, None], each, 0).sum(0) / count
        flags = self._on_streams(lambda member: member.update_captured(x, y, keep))
        # Beside the members, which are on streams of their own until `_join`.
        size = torch.where(scored[:, None], y, 0).square().sum() / (count * y.shape[1])
        new = scores.add_captured(self.score, errors.double(), size.double())
        active = scores.best_captured(new, self.memory, self.numbers[0])
        any_scored, learns = scored.any(), keep.any()
        self._join()
        valid = torch.stack(flags).any()
        self.index.accept(valid, step + 1)
        counts = valid & any_scored
        for mine, value in zip(self.score, new, strict=True):
            mine.copy_(torch.where(counts, value, mine))
        active = torch.where(counts, active, self.numbers[0])
        self.numbers.copy_(torch.stack([active, self.numbers[1] + (valid & learns)]))
        for own, each in ((self.weight, weights), (self.bias, biases)):
            if own is not None:
                own.copy_(torch.where(valid, torch.stack(each).index_select(0, active[None])[0], own))
        return valid, held_out

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
