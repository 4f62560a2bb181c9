"""The state of `SelfTuningRLS` inside a CUDA graph: at fixed addresses, without a look from the host.

There a sample is known by its row in a data set on the device. What the host would find by hashing it, its code and
whether an equal row came before it in the data set, is put into a `Table` once; the update that learned it is kept
beside, so the captured run holds out, scores and chooses as the eager one does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sepsa.heads.backends.memory import HeadMemory, fused_kernels
from sepsa.heads.base.parameters import bias_bounds, store
from sepsa.heads.base.parameters import rows as with_ones
from sepsa.heads.base.repeated_samples import HELD_OUT, UNREPEATED, code_of, name_of
from sepsa.heads.math import candidates
from sepsa.heads.math.candidates import CERTAINTY, EXACT, FADING, LEAST, OUTLIER, Candidates, Grid
from sepsa.heads.math.ridge import rotation

# Places in the integers, before the cursors.
ACTIVE, STEPS, FIRST, UNREPEATED_AT, SEEN, CHANGES, CURSORS = range(7)


class Limits(NamedTuple):
    """The constants of self-tuning, for the kernels."""

    held_out: int
    unrepeated: int
    seen: int
    fading: float = FADING
    certainty: float = CERTAINTY
    outlier: float = OUTLIER
    exact: float = EXACT


class Table:
    """What is known of the rows of a data set: codes, the first row equal to each, and the update that learned it."""

    def __init__(self, inputs: Tensor, targets: Tensor, salt: int) -> None:
        device = inputs.device
        self.key = key_of(inputs, targets)
        names, codes = hashes(inputs, targets, salt)
        first: dict[int, int] = {}
        for row, name in enumerate(names):
            first.setdefault(name, row)
        self.hashes = names
        self.rows = first
        self.codes = torch.tensor(codes, dtype=torch.int64).to(device)
        self.names = torch.tensor([first[name] for name in names], dtype=torch.int64).to(device)
        self.learned = torch.zeros(len(names), dtype=torch.int64, device=device)

    def refill(self, inputs: Tensor, targets: Tensor, salt: int) -> None:
        """The same memory for other rows."""
        other = Table(inputs, targets, salt)
        self.key, self.hashes, self.rows = other.key, other.hashes, other.rows
        for name in ("codes", "names", "learned"):
            getattr(self, name).copy_(getattr(other, name))

    def load(self, seen: dict[int, int]) -> None:
        """Take over which samples were learned, and when."""
        values = [seen.get(name, 0) for name in self.hashes]
        self.learned.copy_(torch.tensor(values, dtype=torch.int64))

    def read(self) -> dict[int, int]:
        """Which samples were learned, and when, in that order."""
        learned = self.learned.tolist()
        pairs = [(learned[row], name) for name, row in self.rows.items() if learned[row]]
        return {name: when for when, name in sorted(pairs, key=lambda pair: pair[0])}


def key_of(inputs: Tensor, targets: Tensor) -> tuple[Any, ...]:
    """By which a data set is known again: where it lies, and that nobody wrote to it since."""
    return tuple(
        (x.data_ptr(), tuple(x.shape), x.dtype, 0 if x.is_inference() else x._version) for x in (inputs, targets)
    )


def hashes(inputs: Tensor, targets: Tensor, salt: int) -> tuple[list[int], list[int]]:
    """The name and the code of every row, as `repeated_samples.look_up` gives them."""
    n = len(inputs)
    raw = [x.detach().cpu().contiguous().reshape(n, -1).view(torch.uint8).numpy() for x in (inputs, targets)]
    pairs = list(zip(raw[0], raw[1], strict=True))
    return [name_of(one, other) for one, other in pairs], [code_of(one, other, salt) for one, other in pairs]


class Now(NamedTuple):
    """What an update changes. Integers are named above; numbers are the ridges' scale and the samples of each λ."""

    M: Tensor
    N: Tensor
    W: Tensor
    score: Tensor
    integers: Tensor
    numbers: Tensor
    log: Tensor  # (changes, 2): the update and the candidate, in a ring


class CapturedCandidates(HeadMemory):
    """Where a recording writes to. Symbols as in `candidates`."""

    def __init__(
        self, linear: nn.Linear, grid: Grid, state: Candidates, basis: Tensor, seen_limit: int, history: int
    ) -> None:
        device, L = state.W.device, len(grid.lambdas)
        self.grid, self.basis = grid, basis.clone()
        self.limits = Limits(HELD_OUT, UNREPEATED, seen_limit)
        self.now = Now(
            *(torch.zeros_like(state.M), torch.zeros_like(state.N)),
            *(torch.zeros_like(state.W), torch.zeros_like(state.score)),
            integers=torch.zeros(CURSORS + L, dtype=torch.int64, device=device),
            numbers=torch.zeros(1 + L, dtype=torch.float64, device=device),
            log=torch.zeros(history, 2, dtype=torch.int64, device=device),
        )
        super().__init__(linear, self.now.M)
        settings = torch.tensor(grid.settings, dtype=torch.float64).to(device)
        self.forgettings, self.ridges = settings.T.contiguous().unbind()
        self.bias_bounds = torch.tensor(bias_bounds(grid.bias_ridge, state.W.dtype), dtype=torch.float64).to(device)
        self.lambdas = torch.tensor(grid.lambdas, dtype=torch.float64).to(device)
        self.of = torch.tensor(grid.of).to(device)
        self.tables: dict[tuple[Any, ...], Table] = {}
        self.table: Table | None = None
        self.kernels = fused_kernels("candidates", state.W, self.weight)
        self.L = self.now.W if self.kernels is None else self.kernels.blocks_of(self.now.W)
        self.work: dict[int, Any] = {}
        self._turns: dict[int, Tensor] = {}
        self._mixed = False  # whether some batches are too large for the kernels
        self._unfinished: Any = None  # what the state has yet to take

    def load(self, state: Candidates) -> None:
        """Take over a state of the host."""
        now, self._unfinished = self.now, None
        for name in ("M", "N", "W", "score"):
            getattr(now, name).copy_(getattr(state, name))
        last = len(state.history) - 1
        integers = [state.active, state.steps, state.first, state.unrepeated, state.seen, last, *state.cursors]
        now.integers.copy_(torch.tensor(integers))
        now.numbers.copy_(torch.tensor([state.scale, *state.samples], dtype=torch.float64))
        now.log[: last + 1].copy_(torch.tensor(state.history))
        self.refresh()

    def read(self, like: Candidates) -> Candidates:
        """The state of the host, with factors, as the device has it."""
        self.finish()
        now, limit = self.now, len(self.now.log)
        active, steps, first, unrepeated, seen, last, *cursors = now.integers.tolist()
        scale, *samples = now.numbers.tolist()
        log = now.log.tolist()
        history = [log[i % limit] for i in range(max(0, last + 1 - limit), last + 1)]
        parts = {name: getattr(now, name).clone() for name in ("M", "N", "W", "score")}
        if steps:
            parts["factor"], _ = candidates.factors(self.grid, now.M, now.N, scale)
        return like._replace(
            **parts,
            scale=scale,
            active=active,
            steps=steps,
            samples=tuple(samples),
            cursors=tuple(cursors),
            first=first,
            unrepeated=unrepeated,
            seen=seen,
            history=tuple((step, member) for step, member in history),
        )

    def refresh(self) -> None:
        """The L of the kernels from M and N, where torch changed these; outside of a graph."""
        if self.kernels is not None:
            work = self.kernels.Buffers(self, 1)
            self.kernels.solve(self, work, self.now.M, self.now.N, 1, self.k)
            self.L.copy_(work.L)

    def follow(self) -> None:
        """Where somebody moved the head, every candidate moves with it; outside of a graph."""
        now = self.now
        W = now.W.index_select(0, now.integers[:1])[0]
        held = torch.cat([self.weight] if self.bias is None else [self.weight, self.bias[:, None]], 1)
        delta = held.to(W.dtype) - W.to(held.dtype).to(W.dtype)
        M, N, moved = candidates.shifted(now.M, now.N, now.W, delta)
        for mine, value in ((now.M, M), (now.N, N), (now.W, moved)):
            mine.copy_(value)
        if self._mixed:
            self.refresh()

    def read_seen(self, before: dict[int, int]) -> dict[int, int]:
        """Which samples were learned, those that the table in use added last."""
        return before if self.table is None else before | self.table.read()

    def holds(self, inputs: Tensor, targets: Tensor) -> bool:
        """Whether the table in use is that of this data set."""
        return self.table is not None and self.table.key == key_of(inputs, targets)

    def open(self, inputs: Tensor, targets: Tensor, salt: int, seen: dict[int, int], keep: bool) -> Table:
        """The table of a data set, now in use; `keep` says that it knows what was learned already."""
        place = tuple((x.data_ptr(), tuple(x.shape), x.dtype) for x in (inputs, targets))
        table = self.tables.get(place)
        if table is None:
            table = self.tables[place] = Table(inputs, targets, salt)
        elif table.key != key_of(inputs, targets):
            table.refill(inputs, targets, salt)
        elif table is self.table and keep:
            return table
        table.load(seen)
        self.table = table
        return table

    def hash(self, features: Tensor, targets: Tensor, salt: int, seen: dict[int, int]) -> Tensor:
        """A table of these samples alone, known by their features; outside of a graph. Returns its rows."""
        self.table = Table(features, targets, salt)
        self.table.load(seen)
        return torch.arange(len(features), device=features.device)

    def update(self, features: Tensor, targets: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Score and learn rows of the table. Returns whether they were finite (0-d), and which were held out (n,)."""
        self.finish()
        x, y = features.detach().reshape(-1, self.k), targets.detach()
        n = len(x)
        y = y.reshape(n, -1)
        if self.kernels is not None and self.kernels.takes(self, n):
            head = self.weight, self.bias
            work = self._unfinished = self.kernels.learn(self, x, y, rows, head, self.turns(n))
            return work.fine, work.held
        self._mixed = self.kernels is not None
        return self._update_in_torch(x, y, rows)

    def turns(self, n: int) -> Tensor:
        """How many coordinates of each λ get their ridge back in an update of n samples."""
        if n not in self._turns:
            counts = [rotation(self.basis.shape[1], lam) for lam in self.grid.lambdas]
            self._turns[n] = torch.tensor(counts).to(self.basis.device)
        return self._turns[n]

    def _update_in_torch(self, x: Tensor, y: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        now, table, n = self.now, self.table, len(x)
        assert table is not None
        p, dtype = now.W.shape[2], now.W.dtype
        integers, numbers = now.integers, now.numbers
        Phi, Y = with_ones(self.linear, x, dtype), y.to(dtype)
        order = torch.arange(n, device=x.device)
        code, name = table.codes[rows], table.names[rows]
        first = torch.where(integers[FIRST] < 0, code[0], integers[FIRST])
        fold, when = (code % HELD_OUT == 0) | (code == first), table.learned[name]
        held, fresh = fold & (when > 0), fold & (when == 0)
        last = torch.where(held, order, -1).max()
        unrepeated = torch.where(last >= 0, 0, integers[UNREPEATED_AT]) + (fresh & (order > last)).sum()
        scored, learns = fold | (unrepeated >= UNREPEATED), ~held.all()

        size = Phi[:, : self.k].double().square().sum()
        fine = (size + Y.double().square().sum()).isfinite()
        power = torch.where(size > 0, (size / (n * self.k)).sqrt().log10().round(), 0.0)
        scale = torch.where(numbers[0] > 0, numbers[0], (10.0**power).square())
        score = self._scored(Phi, Y, held, scored, (integers[STEPS] - when).clamp(min=0), scale)

        lam, turns = self.lambdas.to(dtype)[:, None, None], self.turns(n)
        X = torch.cat([Phi, Y], 1).masked_fill(held[:, None], 0)
        N = lam * now.N
        turn = (torch.arange(p, device=x.device) - integers[CURSORS:, None]) % p < turns[:, None]
        N = N + turn[:, None] * (1 - N[:, :1]) * self.basis
        M = lam * now.M + X.T @ X
        W, _ = self._solve(M, N, scale)
        take = fine & learns & W.isfinite().all()
        fine = fine & (take | ~learns)

        W = W.where(take, now.W)
        score = score.where(fine, now.score)
        active = torch.where(fine, self._best(score), integers[ACTIVE])
        head = W.index_select(0, active[None])[0].to(self.weight.dtype)
        steps = integers[STEPS] + take
        kept = fresh & take & (fresh.cumsum(0) - 1 < self.limits.seen - integers[SEEN])
        twin = ((name[:, None] == name) & kept & (order < order[:, None])).any(1)
        table.learned.scatter_reduce_(0, name, torch.where(kept, steps, 0), "amax")
        changed = active != integers[ACTIVE]
        changes = integers[CHANGES] + changed
        slot = (changes % len(now.log))[None]
        entry = torch.stack([steps, active])[None]
        now.log.index_copy_(0, slot, torch.where(changed, entry, now.log.index_select(0, slot)))
        samples = self.lambdas * numbers[1:] + (n - held.sum())
        cursors = (integers[CURSORS:] + turns) % p
        for mine, value in (
            (now.M, M.where(take, now.M)),
            (now.N, N.where(take, now.N)),
            (now.W, W),
            (now.score, score),
            (numbers, torch.cat([torch.where(fine, scale, numbers[0])[None], samples.where(take, numbers[1:])])),
            (
                integers,
                torch.cat(
                    [
                        torch.stack(
                            [
                                active,
                                steps,
                                torch.where(fine, first, integers[FIRST]),
                                torch.where(fine, unrepeated, integers[UNREPEATED_AT]),
                                integers[SEEN] + (kept & ~twin).sum(),
                                changes,
                            ]
                        ),
                        cursors.where(take, integers[CURSORS:]),
                    ]
                ),
            ),
        ):
            mine.copy_(value)
        store(self.linear, head)
        return fine, held

    def _scored(self, Phi: Tensor, Y: Tensor, held: Tensor, scored: Tensor, ages: Tensor, scale: Tensor) -> Tensor:
        """`candidates.scored` for rows that a mask tells."""
        now, (J, m, p), n = self.now, self.now.W.shape, len(Phi)
        dtype, count = Phi.dtype, scored.sum()
        E = Y.T - (now.W.reshape(-1, p) @ Phi.T).reshape(J, m, n)
        errors = E.square().mean(1)
        _, factor = self._solve(now.M, now.N, scale)
        leverage = torch.linalg.solve_triangular(factor, Phi.T.expand(J, p, n), upper=False).square().sum(1)
        copies = self.forgettings.to(dtype)[:, None] ** ages
        errors = torch.where(held, errors / (1 - copies * leverage).clamp(min=LEAST).square(), errors)
        seen = now.score[-1, -1]
        size = torch.where(scored[:, None], Y, 0).square().sum()
        usual = torch.maximum(now.score[:-1, -1].min() / seen, EXACT * size / (m * count.clamp(min=1)))
        errors = errors.clamp(max=torch.where(seen > 0, OUTLIER * usual, torch.inf))
        Q = torch.cat([errors, errors.new_ones(1, n)]).where(scored, 0)
        return now.score * FADING ** count.to(dtype) + Q @ Q.T

    def _solve(self, M: Tensor, N: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """`candidates.solve` without a look at the factors: where one fails, all get the second try's ridge."""
        p = N.shape[2]
        m = M.shape[1] - p
        r = (scale * self.ridges)[:, None, None].repeat(1, 1, p)
        r[..., -1].clamp_(*self.bias_bounds)
        ridge = N[self.of, : m + 1] * r.to(M.dtype)
        A, aim = M[self.of, :p, :p], M[self.of, p:, :p] + ridge[:, 1:]
        diagonal = A.diagonal(dim1=1, dim2=2)
        diagonal.add_(ridge[:, 0])
        failed = torch.linalg.cholesky_ex(A).info.any()
        more = diagonal.amax(1, keepdim=True) * (p * torch.finfo(A.dtype).eps)
        diagonal.add_(torch.where(failed, more, 0))
        factor, info = torch.linalg.cholesky_ex(A)
        factor = torch.where(info.any(), torch.nan, factor)
        return torch.cholesky_solve(aim.mT, factor).mT, factor

    def _best(self, score: Tensor) -> Tensor:
        """`candidates.best` on the device."""
        losses, n, active = score[:-1, -1], score[-1, -1], self.now.integers[ACTIVE]
        j = torch.arange(len(losses), device=score.device)
        best = losses.argmin()
        mean = (losses - losses[best]) / n
        squares = score.diagonal()[:-1]
        square = (squares + squares[best] - 2 * score[:-1, :-1].index_select(1, best[None])[:, 0]) / n
        chance = CERTAINTY * ((square - mean**2).clamp(min=0) / (n - 1)).sqrt()
        chosen = (j == best) | (mean <= chance)
        longest = self.forgettings.where(chosen, -1.0)
        chosen = chosen & (longest == longest.max())
        loss = losses.where(chosen, torch.inf)
        chosen = chosen & (loss == loss.min())
        found = torch.where(chosen & (j == active), -1, torch.where(chosen, j, len(j))).argmin()
        return torch.where(n > 1, found, active)

    def finish(self) -> None:
        """The state takes what the last update gave, which neither forward nor backward pass waits for."""
        work, now = self._unfinished, self.now
        if work is not None:
            for mine, value in ((now.M, work.M), (now.N, work.N), (now.W, work.W), (self.L, work.L)):
                mine.copy_(torch.where(work.take, value, mine))
            self._unfinished = None
