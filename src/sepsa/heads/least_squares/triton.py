"""Equations 17 and 18 in a captured step as a few Triton kernels.

One sample: f = Th, then all the rest in the columns of T and W, two kernels. A block is that of `run.triton.block`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from sepsa.heads.least_squares.math import CAPTURED_LIMIT, CAPTURED_ROW_LIMIT
from sepsa.heads.run.triton.block import judge, multiply, project, step, write_rows
from sepsa.heads.run.triton.finish import finish
from sepsa.heads.run.triton.tiles import (
    coordinate,
    lacking,
    load,
    load_transposed,
    load_vector,
    positions,
    readable,
    restore,
    store,
    store_head,
)

# One program holds all rows of a few columns of Z.
_COLUMNS = 8
_ROWS = 16


@triton.jit
def _count(tally, finite, lam, n, count):
    """Count an update of n samples, after which the earlier ones have faded, and move the cursor on."""
    fade = tl.where(finite, tl.load(lam), 1.0)
    good = finite.to(tl.float64)
    tl.store(tally, tl.load(tally) + good)
    tl.store(tally + 1, fade * tl.load(tally + 1) + good * n)
    tl.store(tally + 2, tl.load(tally + 2) + good * count)
    return fade


@triton.jit
def _project(
    Z, x, z, left, ridge, tally, fading, rows, p, k,
    COUNT: constexpr, BLOCK_T: constexpr, BLOCK_C: constexpr, BLOCK_R: constexpr = _ROWS,
):  # fmt: skip
    """z = Zh with h = [x, 1]: f = Th, then the predictions Wh. Behind it COUNT columns of Z, each √q and the cursor."""
    r = positions(0, BLOCK_R)
    c = tl.arange(0, BLOCK_C)
    tile = load(Z, p, r, c, r < rows, c < p)
    h = load_vector(x, c, c < k).to(tile.dtype)
    h = tl.where((c >= k) & (c < p), 1.0, h)
    tl.store(z + r, tl.sum(tile * h[None, :], axis=1), mask=r < rows)
    if COUNT:
        t, cursor = tl.arange(0, BLOCK_T), coordinate(tl.load(tally + 2).to(tl.int64), 0, p)
        j = coordinate(cursor, t, p)
        old = tl.load(left + j)
        root = tl.sqrt(lacking(tl.load(ridge + j), tl.load(fading).to(old.dtype) * old))
        columns = load(Z, p, r, j, r < rows, t < COUNT)
        inside = (r < rows)[:, None] & (t < COUNT)[None, :]
        tl.store(z + (1 + t)[None, :] * rows + r[:, None], columns, mask=inside)
        if tl.program_id(0) == 0:
            behind = z + (1 + COUNT) * rows
            tl.store(behind + t, root, mask=t < COUNT)
            tl.store(behind + COUNT, cursor.to(root.dtype))


@triton.jit
def _rotate(tile, value, g, is_f):
    """T -= f uᵀ/(g + √g) and W += e uᵀ/g in these columns of [T; W], u = fᵀT, `value` = [f; e] and g = 1 + fᵀf."""
    u = tl.sum(tl.where(is_f[:, None], tile * value[:, None], 0.0), axis=0)
    return tile + tl.where(is_f, -value / (g + tl.sqrt(g)), value / g)[:, None] * u[None, :]


@triton.jit
def _errors(z, y, fading, r, p, rows, LIMIT: constexpr, FADES: constexpr):
    """[f; e] of the sample, zeros where it is refused; g; whether it is learned, and whether it is finite but large."""
    is_f, is_e = r < p, (r >= p) & (r < rows)
    value = load_vector(z, r, r < rows)
    value = tl.where(is_e, load_vector(y, r - p, is_e).to(value.dtype) - value, value)
    if FADES:
        value = tl.where(is_f, value * tl.load(fading + 1).to(value.dtype), value)
    size = tl.sum(tl.where(is_f, value * value, 0.0))
    total = size + tl.sum(tl.where(is_e, value * value, 0.0))
    finite = (total - total) == 0.0  # neither NaN nor Inf
    learned = finite & (size <= LIMIT)
    value = tl.where(learned, value, 0.0)  # zeros change nothing
    return value, tl.where(learned, 1.0 + size, 1.0), learned, finite & (size > LIMIT)


@triton.jit
def _learn(
    Z, z, y, weight, bias, energy, left, ridge, prior, tally, fading, flag, too_large, p, m, k,
    HAS_BIAS: constexpr, COUNT: constexpr, BLOCK_T: constexpr, BLOCK_R: constexpr,
    BLOCK_C: constexpr = _COLUMNS, LIMIT: constexpr = CAPTURED_ROW_LIMIT,
):  # fmt: skip
    """The sample and COUNT rows √q e_j of the ridge, one after the other, in these columns, and the head takes W.

    With COUNT first T <- T/√λ; the target of a row of the ridge is the prior's, and f = √q T e_j. Every program turns
    the columns j of Z beside its own.
    """
    r = tl.arange(0, BLOCK_R)
    c = positions(0, BLOCK_C)
    rows = p + m
    is_f, is_e = r < p, (r >= p) & (r < rows)
    tile = load(Z, p, r, c, r < rows, c < p)
    value, g, finite, refused = _errors(z, y, fading, r, p, rows, LIMIT, COUNT > 0)
    fall = value * value / g
    if COUNT:
        t = tl.arange(0, BLOCK_T)
        scale = tl.where(is_f, tl.where(finite, tl.load(fading + 1), 1.0), 1.0).to(value.dtype)[:, None]
        tile *= scale
        columns = load_transposed(z, rows, r, 1 + t, r < rows, t < COUNT)
        columns = _rotate(columns * scale, value, g, is_f)
    tile = _rotate(tile, value, g, is_f)
    cursor = 0
    if COUNT:
        behind = z + (1 + COUNT) * rows
        cursor = tl.load(behind + COUNT).to(tl.int64)
        for number in range(COUNT):
            column = tl.sum(tl.where((t == number)[None, :], columns, 0.0), axis=1)
            root = tl.where(finite, tl.load(behind + number), 0.0)
            aim = load_vector(prior + coordinate(cursor, number, p), (r - p) * p, is_e)
            value = root * tl.where(is_e, aim - column, column)
            g = 1.0 + tl.sum(tl.where(is_f, value * value, 0.0))
            fall += value * value / g
            tile, columns = _rotate(tile, value, g, is_f), _rotate(columns, value, g, is_f)
    store(Z, p, r, c, tile, r < rows, c < p)
    store_head(weight, bias, k, r - p, c, tile, is_e, HAS_BIAS)
    if tl.program_id(0) == 0:
        before = load_vector(energy, r - p, is_e)
        fade = _count(tally, finite, fading, 1, COUNT).to(before.dtype)
        tl.store(energy + r - p, fade * before + fall, mask=is_e)
        tl.store(flag, finite)
        tl.store(too_large, tl.load(too_large) + refused.to(tl.int64))
        if COUNT:
            restore(left, ridge, tl.load(fading).to(before.dtype), cursor, COUNT, p, finite, BLOCK_R)


def _rank_one(memory: Any, features: Tensor, targets: Tensor) -> Tensor:
    """Learn one sample, and give as many coordinates as it forgets their ridge back; whether all was finite (0-d)."""
    Z, count, now = memory.Z, memory.count, memory.now
    penalty = now.ridge_left, now.ridge
    rows, p = Z.shape
    z, flag = Z.new_empty(rows * (1 + count) + count + 1), Z.new_empty((), dtype=torch.bool)
    block_r, block_c, block_t = (triton.next_power_of_2(size) for size in (rows, p, max(count, 1)))
    counted, kind = (memory.tally, memory.fading), (count, block_t)
    _project[(triton.cdiv(rows, _ROWS),)](Z, features, z, *penalty, *counted, rows, p, memory.k, *kind, block_c)
    head = memory.weight, memory.weight if memory.bias is None else memory.bias, now.energy
    sizes = p, rows - p, memory.k, memory.bias is not None, *kind, block_r
    _learn[(triton.cdiv(p, _COLUMNS),)](
        *(Z, z, targets, *head, *penalty, now.prior, *counted, flag, memory.too_large, *sizes),
        num_warps=4 if count <= 1 else 8,
    )
    return flag


@triton.jit
def _look(
    projected, Z, M, U, sizes, y, energy, tally, fading, prior, left, ridge, too_large, scale, weight, E, numbers,
    flag, n, r, p, m, parts, BLOCK_N: constexpr, BLOCK_G: constexpr, BLOCK_M: constexpr, BLOCK_P: constexpr,
    BLOCK_S: constexpr, LIMIT: constexpr = CAPTURED_LIMIT,
):  # fmt: skip
    """The products; beside them the rows as they are, their residuals, and the state but for T, W and the energy."""
    if tl.program_id(1) < tl.num_programs(1) - 1:
        multiply(projected, Z, M, U, r, p)
    elif tl.program_id(0) == 0:
        i, o = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
        said = load_transposed(projected, r, i, p + o, i < n, o < m)
        e = load(y, m, i, o, i < n, o < m).to(said.dtype) - said
        lam, one = tl.load(fading).to(e.dtype), tl.full((BLOCK_N,), 1.0, e.dtype)
        finite, refused = judge(sizes, parts, tl.sum(e * e), 1.0 / lam, LIMIT, BLOCK_S)
        cursor = coordinate(tl.load(tally + 2).to(tl.int64), 0, p)
        before = load_vector(energy, o, o < m)
        tl.debug_barrier()  # the tally has been read
        fade = _count(tally, finite, fading, n, r - n).to(e.dtype)
        tl.store(energy + o, fade * before, mask=o < m)
        write_rows(
            projected, prior, left, ridge, cursor, scale, weight, E, numbers, flag, too_large,
            e, one, 1.0, lam, finite, refused, n, r, p, m, BLOCK_N, BLOCK_G, BLOCK_M, BLOCK_P,
        )  # fmt: skip


def learn(memory: Any, features: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
    """Learn rows in a `CapturedState`. Returns a flag (0-d), whether all was finite, and what is left to `finish`."""
    if len(features) == 1:
        return _rank_one(memory, features, targets), None
    work, now = project(memory, features, memory.count, memory.tally[2]), memory.now
    _look[work.programs](
        *(*work.rows, work.sizes, readable(targets), now.energy, memory.tally, memory.fading, now.prior),
        *(now.ridge_left, now.ridge, memory.too_large, *work.made, work.n, work.r, len(now.T), len(now.W)),
        *(work.parts, *work.blocks),
    )
    step(memory, work, now.energy)
    return work.flag, partial(finish, memory.T, work)
