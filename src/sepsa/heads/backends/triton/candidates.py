"""The captured update of `SelfTuningRLS` as five Triton kernels; symbols as in `candidates`, and `eliminate`'s L.

The state's integers are the active candidate, updates, first code, unrepeated, seen, the place of the last entry in the
log of choices, and a cursor for each λ; its numbers the scale of the ridges and the samples of each λ.

`judge` says which samples are known, held out and scored; `errors` what each candidate makes of them before it learns;
`grow` adds them to M and N; `solve` gives every candidate its W, one program each, and `choose` scores, takes the best,
and writes the head. M, N, W and L are written beside the state, which takes them when all was well.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sepsa.heads.backends.triton.linalg import eliminate, readable
from sepsa.heads.backends.triton.ridge import is_restored, next_cursor
from sepsa.heads.base.repeated_samples import HELD_OUT, UNREPEATED
from sepsa.heads.math.candidates import CERTAINTY, EXACT, FADING, OUTLIER

_SIZE, _TILE = 32, 16

_FOUND = 5  # what `judge` finds: finite, whether anything is learned, first, unrepeated, how many are held out


@triton.jit
def _judge(
    x, y, rows, codes, names, learned, integers, numbers, found, facts, held_out, scored_out, fresh_out, used, ages,
    n, p, m, k, HELD_OUT: tl.constexpr, UNREPEATED_LIMIT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Which samples are in the fold, known, held out and scored, whether all is finite, and the ridges' scale."""
    i, c, o = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_M)
    real = i < n
    at = tl.load(rows + i, mask=real, other=0)
    code = tl.load(codes + at, mask=real, other=1)
    steps, first, unrepeated = tl.load(integers + 1), tl.load(integers + 2), tl.load(integers + 3)
    first = tl.where(first < 0, tl.sum(tl.where(i == 0, code, 0)), first)
    fold = real & ((code % HELD_OUT == 0) | (code == first))
    when = tl.load(learned + tl.load(names + at, mask=real, other=0), mask=real, other=0)
    held, new = fold & (when > 0), fold & (when == 0)
    last = tl.max(tl.where(held, i, -1), axis=0)
    unrepeated = tl.where(last >= 0, 0, unrepeated) + tl.sum(tl.where(new & (i > last), 1, 0))
    everything = tl.where(i >= 0, unrepeated, 0) >= UNREPEATED_LIMIT
    scored = real & (fold | everything)

    features = tl.load(x + i[:, None] * k + c[None, :], mask=real[:, None] & (c < k)[None, :], other=0.0)
    features = features.to(numbers.dtype.element_ty)
    targets = tl.load(y + i[:, None] * m + o[None, :], mask=real[:, None] & (o < m)[None, :], other=0.0)
    targets = targets.to(numbers.dtype.element_ty)
    size, squares = tl.sum(features * features), tl.sum(targets * targets, axis=1)
    total = size + tl.sum(squares)
    count = tl.sum(tl.where(held, 1, 0))
    tl.store(found, tl.where((total - total) == 0.0, 1, 0))  # neither NaN nor Inf
    tl.store(found + 1, tl.where(count < n, 1, 0))
    tl.store(found + 2, first)
    tl.store(found + 3, unrepeated)
    tl.store(found + 4, count)
    tl.store(facts, size)
    tl.store(facts + 1, tl.sum(tl.where(scored, squares, 0.0)))
    tl.store(held_out + i, held, mask=real)
    tl.store(scored_out + i, tl.where(scored, 1.0, 0.0).to(tl.float64), mask=real)
    tl.store(fresh_out + i, new, mask=real)
    tl.store(used + i, tl.where(held, 0.0, 1.0).to(tl.float64), mask=real)
    tl.store(ages + i, steps - when, mask=real)


@triton.jit
def _errors(
    x, y, W, L, lambdas, held, ages, errors, scratch, n, p, m, k,
    SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The mean squared error of one candidate at these samples; of those held out, what it would be unlearned."""
    dtype: tl.constexpr = W.dtype.element_ty
    j, tiles = tl.program_id(0), tl.num_programs(1)
    blocks = tl.cdiv(p, SIZE)
    q, o = tl.arange(0, SIZE), tl.arange(0, BLOCK_M)
    i, own = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_N)
    W += j * m * p
    L += j * blocks * blocks * SIZE * SIZE
    Y = scratch + (j * tiles + tl.program_id(1)) * blocks * SIZE * BLOCK_N
    square, wide = q[:, None] * SIZE + q[None, :], q[:, None] * BLOCK_N + own[None, :]
    guess = tl.zeros((BLOCK_M, BLOCK_N), dtype=dtype)
    leverage = tl.zeros((BLOCK_N,), dtype=dtype)
    for b in range(blocks):
        tl.debug_barrier()  # what is read below was written before
        c = b * SIZE + q
        h = tl.load(x + i[None, :] * k + c[:, None], mask=(c < k)[:, None] & (i < n)[None, :], other=0.0).to(dtype)
        h = tl.where(((c >= k) & (c < p))[:, None] & (i < n)[None, :], 1.0, h)
        w = tl.load(W + o[:, None] * p + c[None, :], mask=(o < m)[:, None] & (c < p)[None, :], other=0.0)
        guess = tl.dot(w, h, guess, input_precision="ieee", out_dtype=dtype)
        for a in range(b):
            left = tl.trans(tl.load(L + (a * blocks + b) * SIZE * SIZE + square))
            h = tl.dot(left, tl.load(Y + a * SIZE * BLOCK_N + wide), h, input_precision="ieee", out_dtype=dtype)
        tl.store(Y + b * SIZE * BLOCK_N + wide, h)
        D = tl.load(L + (b * blocks + b) * SIZE * SIZE + square)
        leverage -= tl.sum(h * tl.dot(D, h, input_precision="ieee", out_dtype=dtype), axis=0)
    target = tl.load(y + i[None, :] * m + o[:, None], mask=(o < m)[:, None] & (i < n)[None, :], other=0.0)
    error = tl.where((o < m)[:, None], target.to(dtype) - guess, 0.0)
    error = tl.sum(error * error, axis=0) / m
    age = tl.load(ages + i, mask=i < n, other=0).to(dtype)
    share = 1.0 - tl.exp(age * tl.log(tl.load(lambdas + j))) * leverage
    share = tl.where(share > 0.1, share, 0.1)  # the features have moved since
    known = tl.load(held + i, mask=i < n, other=0) != 0
    tl.store(errors + j * n + i, tl.where(known, error / (share * share), error), mask=i < n)


@triton.jit
def _sample_columns(x, y, used, i, c, n, p, m, k, dtype: tl.constexpr):
    """[Φ Y] at rows i and columns c, zero in rows that are held out."""
    used = (i < n) & (tl.load(used + i, mask=i < n, other=0.0) > 0.0)  # no flag: products take none from 8 bits
    here = used[:, None] & (c < k)[None, :]
    value = tl.load(x + i[:, None] * k + c[None, :], mask=here, other=0.0).to(dtype)
    value = tl.where(used[:, None] & ((c >= k) & (c < p))[None, :], 1.0, value)
    here = used[:, None] & ((c >= p) & (c < p + m))[None, :]
    return value + tl.load(y + i[:, None] * m + (c - p)[None, :], mask=here, other=0.0).to(dtype)


@triton.jit
def _grow(
    x, y, used, M, N, new_M, new_N, basis, fading, integers, counts, n, p, m, k,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """λM + [Φ Y]ᵀ[Φ Y] in this tile, and the ridge of these coordinates: all fade, some get theirs back."""
    dtype: tl.constexpr = M.dtype.element_ty
    level, i, q = tl.program_id(0), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_Q)
    one = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    other = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    size = p + m
    lam = tl.load(fading + level)
    A = _sample_columns(x, y, used, i, one, n, p, m, k, dtype)
    B = _sample_columns(x, y, used, i, other, n, p, m, k, dtype)
    inside = (one < size)[:, None] & (other < size)[None, :]
    place = level * size * size + one[:, None] * size + other[None, :]
    old = tl.load(M + place, mask=inside, other=0.0)
    tl.store(new_M + place, tl.dot(tl.trans(A), B, lam * old, input_precision="ieee", out_dtype=dtype), mask=inside)
    if tl.program_id(2) == 0:
        there = (q < 1 + 2 * m)[:, None] & (one < p)[None, :]
        where = level * (1 + 2 * m) * p + q[:, None] * p + one[None, :]
        left = lam * tl.load(N + level * (1 + 2 * m) * p + one, mask=one < p, other=0.0)
        restored = is_restored(one, tl.load(integers + 6 + level), tl.load(counts + level), p)
        back = tl.where(restored, 1.0 - left, 0.0)
        full = tl.load(basis + q[:, None] * p + one[None, :], mask=there, other=0.0)
        value = lam * tl.load(N + where, mask=there, other=0.0) + back[None, :] * full
        tl.store(new_N + where, value, mask=there)


@triton.jit
def _solve(
    M, N, of, ridges, bounds, facts, numbers, W, L, sums, scratch, buffer, p, m, k, n,
    EPS: tl.constexpr, SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """W = (C + rG)(S + rD)⁻¹ of one candidate, and the L of its A; a ridge too small to be seen is helped once."""
    dtype: tl.constexpr = M.dtype.element_ty
    j = tl.program_id(0)
    level, size, blocks = tl.load(of + j), p + m, tl.cdiv(p, SIZE)
    q, o, c = tl.arange(0, SIZE), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_C)
    M += level * size * size
    N += level * (1 + 2 * m) * p
    L += j * blocks * blocks * SIZE * SIZE
    scratch += j * blocks * SIZE * (blocks * SIZE + 3 * BLOCK_M + 1)
    S, right = scratch, scratch + blocks * blocks * SIZE * SIZE
    X = right + 2 * blocks * SIZE * BLOCK_M
    diagonal = X + blocks * SIZE * BLOCK_M
    scale = _scale(facts, numbers, n, k)
    ridge = tl.load(ridges + j) * scale
    of_bias = tl.minimum(tl.maximum(ridge, tl.load(bounds)), tl.load(bounds + 1))
    for b in range(blocks):
        at = b * SIZE + q
        inside = (at < p)[:, None] & (o < m)[None, :]
        aim = tl.load(N + (1 + o)[None, :] * p + at[:, None], mask=inside, other=0.0)
        aim = aim * tl.where(at == p - 1, of_bias, ridge)[:, None]
        aim += tl.load(M + (p + o)[None, :] * size + at[:, None], mask=inside, other=0.0)
        tl.store(right + at[:, None] * BLOCK_M + o[None, :], aim)
    more = tl.where(c == p - 1, of_bias, ridge) * tl.load(N + c, mask=c < p, other=0.0)
    most = tl.max(tl.where(c < p, more + tl.load(M + c * size + c, mask=c < p, other=0.0), 0.0), axis=0)
    tries = 0
    while tries < 2:
        tl.store(diagonal + c, more, mask=c < p)
        least = eliminate(M, size, diagonal, 1.0, S, L, right, buffer + j * SIZE * SIZE, p, SIZE, BLOCK_M)
        more += most * (p * EPS)
        tries = tl.where(least > 0.0, 2, tries + 1)
    total = tl.zeros((), dtype=dtype)
    for b in range(blocks):
        at = b * SIZE + q
        x = tl.load(X + at[:, None] * BLOCK_M + o[None, :])
        inside = (at < p)[:, None] & (o < m)[None, :]
        tl.store(W + j * m * p + o[None, :] * p + at[:, None], x, mask=inside)
        total += tl.sum(tl.where(inside, tl.abs(x), 0.0))
    tl.store(sums + j, total)


@triton.jit
def _scale(facts, numbers, n, k):
    """That of the ridges: what it was, or the squared size of the first features, a power of ten."""
    size = tl.sqrt(tl.load(facts) / (n * k))
    exponent = tl.floor(tl.log(tl.where(size > 0.0, size, 1.0)) / 2.302585092994046 + 0.5).to(tl.int32)
    power = tl.full((), 1.0, size.dtype)
    for _ in range(tl.abs(exponent)):
        power *= 10.0
    root = tl.where(exponent < 0, 1.0 / power, power)
    old = tl.load(numbers)
    return tl.where(old > 0.0, old, root * root)


@triton.jit
def _choose(
    W, new_W, sums, errors, scored_in, score, forgettings, fading, counts, rows, names, learned, fresh_in, found, facts,
    integers, numbers, log, weight, bias, finite_out, take_out, n, p, m, k, J, L,
    FADING: tl.constexpr, CERTAINTY: tl.constexpr, OUTLIER: tl.constexpr, EXACT: tl.constexpr,
    SEEN_LIMIT: tl.constexpr, HISTORY_LIMIT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The score with these samples, the best candidate by it, the counters, and the head. One program."""
    dtype: tl.constexpr = score.dtype.element_ty
    i, j, c, o = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_M)
    real, mine = i < n, j < J
    learns = tl.load(found + 1) > 0
    total = tl.sum(tl.load(sums + j, mask=mine, other=0.0))
    finite = (tl.load(found) > 0) & (((total - total) == 0.0) | (tl.load(found + 1) == 0))
    take = finite & learns

    scored = tl.load(scored_in + i, mask=real, other=0.0) > 0.0
    count = tl.sum(tl.where(scored, 1, 0))
    place = score + j[:, None] * (J + 1) + j[None, :]
    inside = (j <= J)[:, None] & (j <= J)[None, :]
    old = tl.load(place, mask=inside, other=0.0)
    seen = tl.sum(tl.where((j == J)[:, None] & (j == J)[None, :], old, 0.0))
    losses = tl.sum(tl.where((j == J)[None, :], old, 0.0), axis=1)
    usual = tl.min(tl.where(mine, losses, float("inf")), axis=0) / tl.where(seen > 0.0, seen, 1.0)
    floor = EXACT * tl.load(facts + 1) / (m * tl.where(count > 0, count, 1))
    usual = OUTLIER * tl.where(usual > floor, usual, floor)
    error = tl.load(errors + j[:, None] * n + i[None, :], mask=mine[:, None] & real[None, :], other=0.0)
    error = tl.where(error > tl.where(seen > 0.0, usual, float("inf")), usual, error)
    Q = tl.where((j == J)[:, None], 1.0, error)
    Q = tl.where((j <= J)[:, None] & scored[None, :], Q, 0.0)
    faded = old * tl.exp(count.to(dtype) * tl.log(tl.full((), FADING, dtype)))
    now = tl.dot(Q, tl.trans(Q), faded, input_precision="ieee", out_dtype=dtype)
    now = tl.where(finite, now, old)

    losses = tl.sum(tl.where((j == J)[None, :], now, 0.0), axis=1)
    N = tl.sum(tl.where((j == J)[:, None] & (j == J)[None, :], now, 0.0))
    squares = tl.sum(tl.where(j[:, None] == j[None, :], now, 0.0), axis=1)
    losses = tl.where(mine, losses, float("inf"))
    low = tl.min(losses, axis=0)
    best = tl.min(tl.where(losses == low, j, BLOCK_J), axis=0)
    with_best = tl.sum(tl.where((j == best)[None, :], now, 0.0), axis=1)
    square_of_best = tl.sum(tl.where(j == best, squares, 0.0))
    mean = tl.where(mine, losses - low, 0.0) / N
    square = (squares + square_of_best - 2.0 * with_best) / N - mean * mean
    chance = CERTAINTY * tl.sqrt(tl.where(square > 0.0, square, 0.0) / tl.where(N > 1.0, N - 1.0, 1.0))
    chosen = mine & ((j == best) | (mean <= chance))
    lam = tl.load(forgettings + j, mask=mine, other=0.0)
    longest = tl.max(tl.where(chosen, lam, -1.0), axis=0)
    chosen = chosen & (lam == longest)
    chosen = chosen & (losses == tl.min(tl.where(chosen, losses, float("inf")), axis=0))
    before = tl.load(integers).to(tl.int32)
    ours = tl.max(tl.where(chosen & (j == before), 1, 0), axis=0)
    active = tl.where(ours > 0, before, tl.min(tl.where(chosen, j, BLOCK_J), axis=0))
    active = tl.where((N > 1.0) & finite, active, before)

    w_place = active * m * p + o[:, None] * p + c[None, :]
    w_inside = (o < m)[:, None] & (c < p)[None, :]
    head = tl.load(new_W + w_place, mask=w_inside, other=0.0)
    was = tl.load(W + w_place, mask=w_inside, other=0.0)
    head = tl.where(take, head, was)

    steps, known, changes = tl.load(integers + 1), tl.load(integers + 4), tl.load(integers + 5)
    name = tl.load(names + tl.load(rows + i, mask=real, other=0), mask=real, other=-1)
    first = tl.load(found + 2)
    new_steps = steps + tl.where(take, 1, 0)
    fresh = tl.load(fresh_in + i, mask=real, other=0) != 0
    rank = tl.cumsum(tl.where(fresh, 1, 0), axis=0) - 1
    kept = fresh & (rank < SEEN_LIMIT - tl.where(i >= 0, known, 0))
    twin = (name[:, None] == name[None, :]) & kept[None, :] & (i[None, :] < i[:, None])
    repeated = tl.max(tl.where(twin, 1, 0), axis=1)
    more = tl.sum(tl.where(kept & (repeated == 0), 1, 0))
    lambdas = tl.load(fading + j, mask=j < L, other=0.0)
    remembered = tl.load(numbers + 1 + j, mask=j < L, other=0.0)
    cursor = tl.load(integers + 6 + j, mask=j < L, other=0)
    count_of = tl.load(counts + j, mask=j < L, other=0)
    samples = lambdas * remembered + (n - tl.load(found + 4))
    scale_now, scale_before = _scale(facts, numbers, n, k), tl.load(numbers)
    unrepeated, unrepeated_before = tl.load(found + 3), tl.load(integers + 3)
    first_before = tl.load(integers + 2)
    tl.debug_barrier()  # all that is written below has been read

    tl.store(place, now, mask=inside)
    tl.store(weight + o[:, None] * k + c[None, :], head, mask=w_inside & (c < k)[None, :])
    if HAS_BIAS:
        tl.store(bias + o[:, None] + 0 * c[None, :], head, mask=w_inside & (c == k)[None, :])
    stored = tl.where(take, new_steps, 0)
    tl.store(learned + name, tl.where(kept, stored, 0), mask=kept)
    tl.store(numbers, tl.where(finite, scale_now, scale_before))
    tl.store(numbers + 1 + j, tl.where(take, samples, remembered), mask=j < L)
    tl.store(integers + 6 + j, tl.where(take, next_cursor(cursor, count_of, p), cursor), mask=j < L)
    changed = active != before
    slot = log + 2 * ((changes + tl.where(changed, 1, 0)) % HISTORY_LIMIT)
    tl.store(slot, tl.where(changed, new_steps, tl.load(slot)))
    tl.store(slot + 1, tl.where(changed, active.to(tl.int64), tl.load(slot + 1)))
    tl.store(integers, active.to(tl.int64))
    tl.store(integers + 1, new_steps)
    tl.store(integers + 2, tl.where(finite, first, first_before))
    tl.store(integers + 3, tl.where(finite, unrepeated, unrepeated_before))
    tl.store(integers + 4, known + tl.where(take, more, 0))
    tl.store(integers + 5, changes + tl.where(changed, 1, 0))
    tl.store(finite_out, finite)
    tl.store(take_out, take)


class Buffers:
    """What the kernels write for batches of n samples, kept: a graph's other streams read it later."""

    def __init__(self, state: Any, n: int) -> None:
        now = state.now
        (J, m, p), device = now.W.shape, now.W.device
        blocks, tiles = triton.cdiv(p, _SIZE), triton.cdiv(n, _TILE)
        self.width = max(_TILE, triton.next_power_of_2(m))
        self.M, self.N, self.W = (torch.zeros_like(part) for part in (now.M, now.N, now.W))
        self.L, self.sums = torch.zeros_like(state.L), now.W.new_zeros(J)
        self.found = torch.zeros(_FOUND, dtype=torch.int64, device=device)
        self.facts = torch.zeros(2, dtype=torch.float64, device=device)
        self.held_out, self.fresh = torch.zeros(2, n, dtype=torch.bool, device=device).unbind()
        self.ages = torch.zeros(n, dtype=torch.int64, device=device)
        # As numbers: Triton's float64 products take no operand that comes from 8 bits.
        self.scored, self.used = now.W.new_zeros(2, n).unbind()
        self.errors = now.W.new_zeros(J, n)
        self.substituted = now.W.new_zeros(J * tiles * blocks * _SIZE * _TILE)
        self.scratch = now.W.new_zeros(J * blocks * _SIZE * (blocks * _SIZE + 3 * self.width + 1))
        self.buffer = now.W.new_zeros(J, _SIZE, _SIZE)
        self.valid, self.learned = torch.zeros(2, dtype=torch.bool, device=device).unbind()


def blocks_of(W: Tensor) -> Tensor:
    """Where the L of every candidate's A lies."""
    J, _, p = W.shape
    blocks = triton.cdiv(p, _SIZE)
    return W.new_zeros(J, blocks * blocks, _SIZE, _SIZE)


def solve(state: Any, work: Buffers, M: Tensor, N: Tensor, n: int, k: int) -> None:
    """W and L of every candidate from M and N."""
    J, m, p = state.now.W.shape
    _solve[(J,)](
        M, N, state.grid.lambda_index, state.grid.ridges, state.bias_bounds, work.facts, state.numbers, work.W, work.L,
        work.sums, work.scratch, work.buffer, p, m, k, n,
        EPS=torch.finfo(M.dtype).eps, SIZE=_SIZE, BLOCK_M=work.width, BLOCK_C=triton.next_power_of_2(p), num_stages=1,
    )  # fmt: skip


def learn(state: Any, features: Tensor, targets: Tensor, rows: Tensor, head: tuple[Tensor, Tensor | None]) -> Buffers:
    """Score and learn these rows of the data set that `CapturedCandidates` indexes, with their features and targets."""
    now, index, grid = state.now, state.index, state.grid
    (J, m, p), (n, k), L = now.W.shape, features.shape, len(now.M)
    if n not in state.work:
        state.work[n] = Buffers(state, n)
    work: Buffers = state.work[n]
    x, y = readable(features), readable(targets)
    weight, bias = head
    has_bias = bias is not None
    bias = weight if bias is None else bias  # a pointer must be given, used or not
    samples = max(_TILE, triton.next_power_of_2(n))
    columns = triton.next_power_of_2(p)
    _judge[(1,)](
        x, y, rows, index.codes, index.first_rows, index.learned, state.integers, state.numbers, work.found, work.facts,
        work.held_out, work.scored, work.fresh, work.used, work.ages, n, p, m, k,
        HELD_OUT=HELD_OUT, UNREPEATED_LIMIT=UNREPEATED, BLOCK_N=samples, BLOCK_C=columns,
        BLOCK_M=work.width,
    )  # fmt: skip
    _errors[(J, triton.cdiv(n, _TILE))](
        x, y, now.W, state.L, grid.forgettings, work.held_out, work.ages, work.errors, work.substituted, n, p, m, k,
        SIZE=_SIZE, BLOCK_N=_TILE, BLOCK_M=work.width, num_stages=1,
    )  # fmt: skip
    tiles = triton.cdiv(p + m, _SIZE)
    _grow[(L, tiles, tiles)](
        x, y, work.used, now.M, now.N, work.M, work.N, state.basis, grid.lambdas, state.integers, grid.counts,
        n, p, m, k, BLOCK_N=samples, BLOCK_C=_SIZE, BLOCK_Q=triton.next_power_of_2(1 + 2 * m),
    )  # fmt: skip
    solve(state, work, work.M, work.N, n, k)
    _choose[(1,)](
        now.W, work.W, work.sums, work.errors, work.scored, now.score, grid.forgettings, grid.lambdas, grid.counts,
        rows, index.first_rows, index.learned, work.fresh, work.found, work.facts, state.integers, state.numbers,
        state.log, weight, bias, work.valid, work.learned, n, p, m, k, J, L,
        FADING=FADING, CERTAINTY=CERTAINTY, OUTLIER=OUTLIER, EXACT=EXACT,
        SEEN_LIMIT=state.seen_limit, HISTORY_LIMIT=len(state.log), HAS_BIAS=has_bias,
        BLOCK_N=samples, BLOCK_J=_TILE, BLOCK_M=work.width, BLOCK_C=columns,
    )  # fmt: skip
    return work
