"""The state of `SelfTuningRLS` inside a CUDA graph: at fixed addresses, without synchronizing with the host.

A captured update identifies a sample by its row in a data set on the device. A `DatasetIndex` holds what the host would
find by hashing: the row's code and the first row equal to it, both computed once, and the update that learned it. So a
captured update holds out, scores and chooses as an eager one does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sepsa.heads.backends.choose import Case, choose
from sepsa.heads.backends.memory import HeadMemory
from sepsa.heads.base.parameters import join, store
from sepsa.heads.base.parameters import rows as with_ones
from sepsa.heads.base.repeated_samples import HELD_OUT, UNREPEATED, code_of, hash_of, row_bytes
from sepsa.heads.math import candidates
from sepsa.heads.math.candidates import Candidates, Grid, RowMasks, Statistics
from sepsa.heads.math.ridge import next_cursor

# Places in the integers, before the cursors.
ACTIVE, STEPS, FIRST, UNREPEATED_AT, SEEN, CHANGES, CURSORS = range(7)


class DatasetIndex:
    """The rows of a data set: their codes, the first row equal to each, and the update that learned it."""

    def __init__(self, inputs: Tensor, targets: Tensor, salt: int) -> None:
        device, samples = inputs.device, row_bytes(inputs, targets)
        self.key = key_of(inputs, targets)
        self.hashes = [hash_of(*sample) for sample in samples]
        self.rows: dict[int, int] = {}  # of each hash, the first
        for row, name in enumerate(self.hashes):
            self.rows.setdefault(name, row)
        self.codes = torch.tensor([code_of(*sample, salt) for sample in samples]).to(device)
        self.first_rows = torch.tensor([self.rows[name] for name in self.hashes]).to(device)
        self.learned = torch.zeros_like(self.codes)

    def refill(self, inputs: Tensor, targets: Tensor, salt: int) -> None:
        """Index other rows in the same memory."""
        other = DatasetIndex(inputs, targets, salt)
        self.key, self.hashes, self.rows = other.key, other.hashes, other.rows
        for name in ("codes", "first_rows", "learned"):
            getattr(self, name).copy_(getattr(other, name))

    def load(self, seen: dict[int, int]) -> None:
        """Copy from the host which samples were learned, and when."""
        self.learned.copy_(torch.tensor([seen.get(name, 0) for name in self.hashes]))

    def read(self) -> dict[int, int]:
        """Which samples were learned, and when, in that order."""
        learned = self.learned.tolist()
        pairs = [(learned[row], name) for name, row in self.rows.items() if learned[row]]
        return {name: when for when, name in sorted(pairs, key=lambda pair: pair[0])}


def key_of(inputs: Tensor, targets: Tensor) -> tuple[Any, ...]:
    """A key that changes when a data set is at another address or was written to."""
    return tuple((*address, 0 if x.is_inference() else x._version) for x, address in _addresses(inputs, targets))


def _addresses(inputs: Tensor, targets: Tensor) -> list[tuple[Tensor, tuple[Any, ...]]]:
    return [(x, (x.data_ptr(), tuple(x.shape), x.dtype)) for x in (inputs, targets)]


class CapturedCandidates(HeadMemory):
    """The memory of a self-tuning head that CUDA graphs write to. Symbols as in `candidates`."""

    def __init__(
        self, linear: nn.Linear, grid: Grid, state: Candidates, basis: Tensor, seen_limit: int, history_limit: int
    ) -> None:
        device, L = state.W.device, len(grid.lambdas)
        self.now = Statistics(*map(torch.zeros_like, state.statistics))
        super().__init__(linear, self.now.M)
        self.integers = torch.zeros(CURSORS + L, dtype=torch.int64, device=device)  # see their places above
        self.numbers = torch.zeros(1 + L, dtype=torch.float64, device=device)  # the scale, the samples of each λ
        self.log = torch.zeros(history_limit, 2, dtype=torch.int64, device=device)  # (update, candidate), a ring
        self.settings, self.grid = grid, candidates.tensors_like(grid, state.N)
        self.lambdas = torch.tensor(grid.lambdas, dtype=torch.float64).to(device)
        self.basis, self.seen_limit = basis.clone(), seen_limit
        self.indices: dict[tuple[Any, ...], DatasetIndex] = {}
        self.index: DatasetIndex | None = None
        # For the kernels alone.
        chosen = choose("captured candidates", self._case(1))
        self.kernels = chosen.load() if chosen.backend == "triton" else None
        self.bias_bounds = torch.tensor(self.grid.bias_bounds, dtype=torch.float64).to(device)
        self.L = self.now.W if self.kernels is None else self.kernels.blocks_of(self.now.W)
        self.work: dict[int, Any] = {}
        self._mixed = False  # whether some batches are too large for the kernels
        self._unfinished: Any = None  # what `finish` has to copy

    def _case(self, rows: int) -> Case:
        J, m, p = self.now.W.shape
        kind = self.now.W.device.type, self.now.W.dtype, p, m, rows
        return Case(*kind, candidates=J, contiguous=self.weight.is_contiguous())

    def load(self, state: Candidates) -> None:
        """Copy a state of the host."""
        self._unfinished = None
        for mine, value in zip(self.now, state.statistics, strict=True):
            mine.copy_(value)
        last = len(state.history) - 1
        integers = [state.active, state.steps, state.first, state.unrepeated, state.seen, last, *state.cursors]
        self.integers.copy_(torch.tensor(integers))
        self.numbers.copy_(torch.tensor([state.scale, *state.samples], dtype=torch.float64))
        self.log[: last + 1].copy_(torch.tensor(state.history))
        self.refresh()

    def read(self, like: Candidates) -> Candidates:
        """The state of the host."""
        self.finish()
        limit = len(self.log)
        active, steps, first, unrepeated, seen, last, *cursors = self.integers.tolist()
        scale, *samples = self.numbers.tolist()
        log = self.log.tolist()
        new = Statistics(*(part.clone() for part in self.now))
        if self.kernels is not None and steps:
            new = new._replace(factor=candidates.factors(self.settings, new.M, new.N, scale)[0])
        return like._replace(
            **new._asdict(),
            scale=scale,
            active=active,
            steps=steps,
            samples=tuple(samples),
            cursors=tuple(cursors),
            first=first,
            unrepeated=unrepeated,
            seen=seen,
            history=tuple(tuple(log[i % limit]) for i in range(max(0, last + 1 - limit), last + 1)),
        )

    def refresh(self) -> None:
        """Compute the L of the kernels from M and N, where torch changed these; outside of a graph."""
        if self.kernels is not None:
            work = self.kernels.Buffers(self, 1)
            self.kernels.solve(self, work, self.now.M, self.now.N, 1, self.k)
            self.L.copy_(work.L)

    def follow(self) -> None:
        """Move every candidate as far as the head was moved from outside; outside of a graph."""
        W = self.now.W.index_select(0, self.integers[:1])[0]
        head = join(self.linear)
        delta = head.to(W.dtype) - W.to(head.dtype).to(W.dtype)
        for mine, value in zip(self.now[:3], candidates.moved(self.now, delta), strict=False):
            mine.copy_(value)
        if self._mixed:
            self.refresh()

    def read_seen(self, before: dict[int, int]) -> dict[int, int]:
        """Which samples were learned, and when, with those of the index in use."""
        return before if self.index is None else before | self.index.read()

    def indexes(self, inputs: Tensor, targets: Tensor) -> bool:
        """Whether the index in use is that of this data set."""
        return self.index is not None and self.index.key == key_of(inputs, targets)

    def use(self, inputs: Tensor, targets: Tensor, salt: int, seen: dict[int, int], keep: bool) -> None:
        """Use the index of a data set; `keep` says that the index in use is up to date with `seen`."""
        place = tuple(address for _, address in _addresses(inputs, targets))
        index = self.indices.get(place)
        if index is None:
            index = self.indices[place] = DatasetIndex(inputs, targets, salt)
        elif index.key != key_of(inputs, targets):
            index.refill(inputs, targets, salt)
        elif index is self.index and keep:
            return
        index.load(seen)
        self.index = index

    def use_batch(self, features: Tensor, targets: Tensor, salt: int, seen: dict[int, int]) -> Tensor:
        """Use an index of these samples alone, by their features; outside of a graph. Returns its rows."""
        self.index = DatasetIndex(features, targets, salt)
        self.index.load(seen)
        return torch.arange(len(features), device=features.device)

    def update(self, features: Tensor, targets: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Score and learn rows of the data set. Returns whether all is finite (0-d), and the rows held out (n,)."""
        self.finish()
        x, y = features.detach().reshape(-1, self.k), targets.detach()
        y = y.reshape(len(x), -1)
        if self.kernels is not None and choose("captured candidates", self._case(len(x))).backend == "triton":
            work = self._unfinished = self.kernels.learn(self, x, y, rows, (self.weight, self.bias))
            return work.valid, work.held_out
        self._mixed = self.kernels is not None
        return self._update_in_torch(x, y, rows)

    def _update_in_torch(self, x: Tensor, y: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        index, old, integers, numbers, n = self.index, self.now, self.integers, self.numbers, len(x)
        assert index is not None
        dtype, p = old.W.dtype, old.W.shape[2]
        order = torch.arange(n, device=x.device)
        code, name = index.codes[rows], index.first_rows[rows]
        first = torch.where(integers[FIRST] < 0, code[0], integers[FIRST])
        fold, when = (code % HELD_OUT == 0) | (code == first), index.learned[name]
        held_out, fresh = fold & (when > 0), fold & (when == 0)
        last = torch.where(held_out, order, -1).max()
        unrepeated = torch.where(last >= 0, 0, integers[UNREPEATED_AT]) + (fresh & (order > last)).sum()
        masks = RowMasks(
            learns=~held_out.all(),
            scored=fold | (unrepeated >= UNREPEATED),
            held_out=held_out,
            ages=(integers[STEPS] - when).clamp(min=0),
        )
        Phi, Y = with_ones(self.linear, x, dtype), y.to(dtype)
        size = Phi[:, : self.k].double().square().sum()
        power = torch.where(size > 0, (size / (n * self.k)).sqrt().log10().round(), 0.0)
        scale = torch.where(numbers[0] > 0, numbers[0], (10.0**power).square())
        if self.kernels is not None:  # they keep no factors
            old = old._replace(factor=candidates.factorize(self.grid, old.M, old.N, scale, wait=False)[0])
        cursors, samples = integers[CURSORS:], numbers[1:]
        state = scale, integers[ACTIVE], cursors
        new = candidates.updated(self.grid, old, self.basis, Phi, Y, *state, masks, self.weight.dtype, wait=False)
        valid = new.valid & (size + Y.double().square().sum()).isfinite()
        active, learned = torch.as_tensor(new.active), valid & masks.learns

        steps = integers[STEPS] + learned
        kept = fresh & learned & (fresh.cumsum(0) - 1 < self.seen_limit - integers[SEEN])
        twin = ((name[:, None] == name) & kept & (order < order[:, None])).any(1)
        index.learned.scatter_reduce_(0, name, torch.where(kept, steps, 0), "amax")
        changed = valid & (active != integers[ACTIVE])
        changes = integers[CHANGES] + changed
        slot = (changes % len(self.log))[None]
        entry = torch.stack([steps, active])[None]
        self.log.index_copy_(0, slot, torch.where(changed, entry, self.log.index_select(0, slot)))
        store(self.linear, torch.where(valid, new.head, join(self.linear)))
        seen = integers[SEEN] + (kept & ~twin).sum()
        counts = torch.stack([active, steps, first, unrepeated, seen, changes])
        cursors = next_cursor(cursors, learned * self.grid.counts, p)
        samples = torch.where(learned, self.lambdas * samples + (n - held_out.sum()), samples)
        for accepted, mine, value in (
            *zip((learned, learned, valid, learned, valid), self.now, new.statistics, strict=True),
            (valid, integers, torch.cat([counts, cursors])),
            (valid, numbers, torch.cat([scale[None], samples])),
        ):
            mine.copy_(torch.where(accepted, value, mine))
        return valid, held_out

    def finish(self) -> None:
        """Copy what the kernels computed in the last update, which neither forward nor backward pass waits for."""
        work, now = self._unfinished, self.now
        if work is not None:
            for mine, value in ((now.M, work.M), (now.N, work.N), (now.W, work.W), (self.L, work.L)):
                mine.copy_(torch.where(work.learned, value, mine))
            self._unfinished = None
