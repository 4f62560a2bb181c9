"""Equations 17 and 18 as a few Triton kernels, because each further launch takes as long as the update.

One sample: f = Th, then all the rest in the columns of T and W, two kernels.

A block of n samples, in the symbols of `math.least_squares`: C = I + FᵀF, X = C⁻¹E, and the new W = W + XᵀFᵀT is all
that the forward pass waits for: three kernels. Near the identity X is iterated, elsewhere C is inverted by sweeps.
T's own update, which nothing reads before the next block, is left to `finish`, to run beside the backward pass.

Triton comes with torch's CUDA builds; this module is imported only when a head on a GPU learns inside a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sepsa.heads.backends.triton.finish import buffers, finish
from sepsa.heads.backends.triton.linalg import NEAR, readable, solve_by_sweeps, solve_near_identity, tile_of
from sepsa.heads.backends.triton.ridge import coordinate, is_restored, lacking
from sepsa.heads.math.least_squares import CAPTURED_LIMIT, CAPTURED_ROW_LIMIT

# One program holds all rows of a few columns of Z.
_COLUMNS = 8
_ROWS = 16
# A block's C is swept in halves of at most _HALF rows, in the registers of one program, its E beside it.
_HALF = 32
_TILE = 16
_DEPTH = 32
_WARPS = 4


@triton.jit
def _ridge_row(left, ridge, cursor, t, p, fading):
    """The t-th coordinate that gets its ridge back, and √q, q the ridge it lacks once all have faded."""
    j = coordinate(cursor, t, p)
    old = tl.load(left + j)
    return j, tl.sqrt(lacking(tl.load(ridge + j), tl.load(fading).to(old.dtype) * old))


@triton.jit
def _restore(left, ridge, tally, cursor, count, p, fading, finite, BLOCK_P: tl.constexpr):
    """All coordinates fade, `count` get their ridge back, and the cursor moves on; nothing where not `finite`."""
    c = tl.arange(0, BLOCK_P)
    old = tl.load(left + c, mask=c < p, other=0.0)
    whole = tl.load(ridge + c, mask=c < p, other=0.0)
    new = tl.where(is_restored(c, cursor, count, p), whole, tl.load(fading).to(old.dtype) * old)
    tl.store(left + c, tl.where(finite, new, old), mask=c < p)
    tl.store(tally + 2, tl.load(tally + 2) + tl.where(finite, count, 0).to(tl.float64))


@triton.jit
def _project(
    Z, x, z, left, ridge, tally, fading, rows, p, k,
    SAMPLE: tl.constexpr, COUNT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """z = Zh with h = [x, 1]: f = Th, then the predictions Wh. Behind it COUNT columns of Z, each √q and the cursor."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    if SAMPLE:
        c = tl.arange(0, BLOCK_C)
        inside = (r < rows)[:, None] & (c < p)[None, :]
        tile = tl.load(Z + r[:, None] * p + c[None, :], mask=inside, other=0.0)
        h = tl.load(x + c, mask=c < k, other=0.0).to(tile.dtype)
        h = tl.where((c >= k) & (c < p), 1.0, h)
        tl.store(z + r, tl.sum(tile * h[None, :], axis=1), mask=r < rows)
    if COUNT:
        t, cursor = tl.arange(0, BLOCK_T), coordinate(tl.load(tally + 2).to(tl.int64), 0, p)
        j, root = _ridge_row(left, ridge, cursor, t, p, fading)
        inside = (r < rows)[:, None] & (t < COUNT)[None, :]
        columns = tl.load(Z + r[:, None] * p + j[None, :], mask=inside, other=0.0)
        tl.store(z + (1 + t)[None, :] * rows + r[:, None], columns, mask=inside)
        if tl.program_id(0) == 0:
            behind = z + (1 + COUNT) * rows
            tl.store(behind + t, root, mask=t < COUNT)
            tl.store(behind + COUNT, cursor.to(root.dtype))


@triton.jit
def _rotate(tile, value, coefficient, is_f):
    """T -= f uᵀ/(g + √g) and W += e uᵀ/g in these columns of [T; W], u = fᵀT and `value` = [f; e]."""
    u = tl.sum(tl.where(is_f[:, None], tile * value[:, None], 0.0), axis=0)
    return tile + coefficient[:, None] * u[None, :]


@triton.jit
def _learn(
    Z, z, y, weight, bias, energy, left, ridge, prior, tally, fading, finite_flag, too_large, p, m, k,
    LIMIT: tl.constexpr, HAS_BIAS: tl.constexpr, SAMPLE: tl.constexpr, COUNT: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The sample and COUNT rows √q e_j of the ridge, one after the other, in these columns, and the head takes W.

    With COUNT first T <- T/√λ; the target of a row of the ridge is the prior's, and f = √q T e_j. Every program turns
    the columns j of Z beside its own. Without SAMPLE a block was learned, which has faded T; its flag is read.
    """
    r = tl.arange(0, BLOCK_R)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    rows = p + m
    is_f, is_e = r < p, (r >= p) & (r < rows)
    inside = (r < rows)[:, None] & (c < p)[None, :]
    place = Z + r[:, None] * p + c[None, :]
    tile = tl.load(place, mask=inside, other=0.0)
    fall = tl.zeros((BLOCK_R,), dtype=tile.dtype)
    if COUNT:
        t = tl.arange(0, BLOCK_T)
        columns = tl.load(
            z + (1 + t)[None, :] * rows + r[:, None], mask=(r < rows)[:, None] & (t < COUNT)[None, :], other=0.0
        )
    if SAMPLE:
        value = tl.load(z + r, mask=r < rows, other=0.0)
        target = tl.load(y + r - p, mask=is_e, other=0.0).to(value.dtype)
        value = tl.where(is_e, target - value, value)  # [f; e]
        if COUNT:
            inverse_root = tl.load(fading + 1).to(value.dtype)
            value = tl.where(is_f, value * inverse_root, value)
        size = tl.sum(tl.where(is_f, value * value, 0.0))
        total = size + tl.sum(tl.where(is_e, value * value, 0.0))
        finite = (total - total) == 0.0  # neither NaN nor Inf
        refused = finite & (size > LIMIT)
        finite = finite & (size <= LIMIT)
        value = tl.where(finite, value, 0.0)  # zeros change nothing
        g = tl.where(finite, 1.0 + size, 1.0)
        fall += value * value / g
        coefficient = tl.where(is_f, -value / (g + tl.sqrt(g)), value / g)
        if COUNT:
            scale = tl.where(is_f, tl.where(finite, inverse_root, 1.0), 1.0).to(value.dtype)
            tile *= scale[:, None]
            columns = _rotate(columns * scale[:, None], value, coefficient, is_f)
        tile = _rotate(tile, value, coefficient, is_f)
    else:
        finite = tl.load(finite_flag)
    if COUNT:
        behind = z + (1 + COUNT) * rows
        cursor = tl.load(behind + COUNT).to(tl.int64)
        for number in range(COUNT):
            column = tl.sum(tl.where((t == number)[None, :], columns, 0.0), axis=1)
            root = tl.where(finite, tl.load(behind + number), 0.0)
            aim = tl.load(prior + (r - p) * p + coordinate(cursor, number, p), mask=is_e, other=0.0)
            value = root * tl.where(is_e, aim - column, column)
            g = 1.0 + tl.sum(tl.where(is_f, value * value, 0.0))
            fall += value * value / g
            coefficient = tl.where(is_f, -value / (g + tl.sqrt(g)), value / g)
            tile = _rotate(tile, value, coefficient, is_f)
            columns = _rotate(columns, value, coefficient, is_f)
    tl.store(place, tile, mask=inside)

    out = is_e[:, None] & (c < k)[None, :]
    tl.store(weight + (r - p)[:, None] * k + c[None, :], tile, mask=out)
    if HAS_BIAS:
        last = is_e[:, None] & (c == k)[None, :]
        tl.store(bias + (r - p)[:, None] + 0 * c[None, :], tile, mask=last)
    if tl.program_id(0) == 0:
        before = tl.load(energy + r - p, mask=is_e, other=0.0)
        if SAMPLE:
            fade = tl.where(finite, tl.load(fading), 1.0)
            before *= fade.to(before.dtype)
            good = finite.to(tl.float64)
            tl.store(tally, tl.load(tally) + good)
            tl.store(tally + 1, fade * tl.load(tally + 1) + good)
            tl.store(finite_flag, finite)
            tl.store(too_large, tl.load(too_large) + refused.to(tl.int64))
        tl.store(energy + r - p, before + fall, mask=is_e)
        if COUNT:
            _restore(left, ridge, tally, cursor, COUNT, p, fading, finite, BLOCK_R)


def rank_one(
    state: Any, features: Tensor | None, targets: Tensor | None, ridge: Tensor, prior: Tensor,
    finite: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Learn one sample in a `CapturedState`, and give as many coordinates as it forgets their ridge back.

    Without a sample the latter alone, after a block whose flag is `finite`. Returns the flag (0-d) that says whether
    all was finite.
    """
    Z, p, count = state.Z, state.Z.shape[1], state.count
    rows, m = Z.shape[0], state.W.shape[0]
    z = Z.new_empty(rows * (1 + count) + count + 1)
    sample = features is not None
    flag: Tensor = Z.new_empty((), dtype=torch.bool) if finite is None else finite
    block_r, block_c, block_t = (triton.next_power_of_2(size) for size in (rows, p, max(count, 1)))
    _project[(triton.cdiv(rows, _ROWS),)](
        Z, features if sample else Z, z, state.ridge_left, ridge, state.tally, state.fading, rows, p, state.k,
        SAMPLE=sample, COUNT=count, BLOCK_T=block_t, BLOCK_R=_ROWS, BLOCK_C=block_c,
    )  # fmt: skip
    bias = state.weight if state.bias is None else state.bias  # a pointer must be given, used or not
    _learn[(triton.cdiv(p, _COLUMNS),)](
        Z, z, targets if sample else Z, state.weight, bias, state.energy, state.ridge_left, ridge, prior, state.tally,
        state.fading, flag, state.too_large, p, m, state.k,
        LIMIT=CAPTURED_ROW_LIMIT, HAS_BIAS=state.bias is not None, SAMPLE=sample, COUNT=count, BLOCK_T=block_t,
        BLOCK_R=block_r, BLOCK_C=_COLUMNS, num_warps=4 if count <= 1 else 8,
    )  # fmt: skip
    return flag


@triton.jit
def _whiten(
    Z, x, y, P, sizes, left, ridge, prior, tally, fading, rows, n, all, p, m, k,
    FADES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """P = [F; Eᵀ] (p + m, all): the rows of TΦᵀ, and by how much the targets exceed those of WΦᵀ; and their squares.

    With FADES there is one row more than the n of Φ, √q e_j, which is a column of Z, and F is that of T/√λ.
    """
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    i = tl.arange(0, BLOCK_N)
    product = tl.zeros((BLOCK_R, BLOCK_N), dtype=Z.dtype.element_ty)
    for start in range(0, p, BLOCK_K):
        c = start + tl.arange(0, BLOCK_K)
        tile = tl.load(Z + r[:, None] * p + c[None, :], mask=(r < rows)[:, None] & (c < p)[None, :], other=0.0)
        h = tl.load(x + i[None, :] * k + c[:, None], mask=(c < k)[:, None] & (i < n)[None, :], other=0.0)
        h = tl.where(((c >= k) & (c < p))[:, None], 1.0, h.to(tile.dtype))
        product = tl.dot(tile, h, product, input_precision="ieee", out_dtype=Z.dtype.element_ty)
    of_W = (r >= p) & (r < rows)
    inside = (r < rows)[:, None] & (i < n)[None, :]
    target = tl.load(y + i[None, :] * m + (r - p)[:, None], mask=of_W[:, None] & (i < n)[None, :], other=0.0)
    inverse_root = tl.load(fading + 1).to(product.dtype)
    product = tl.where(of_W[:, None], target.to(product.dtype) - product, product * inverse_root)
    product = tl.where(inside, product, 0.0)
    tl.store(P + r[:, None] * all + i[None, :], product, mask=inside)
    size = tl.sum(product * product)
    size_of_F = tl.sum(tl.where((r < p)[:, None], product * product, 0.0))
    if FADES:
        j, root = _ridge_row(left, ridge, tl.load(tally + 2).to(tl.int64), 0, p, fading)
        column = tl.load(Z + r * p + j, mask=r < rows, other=0.0)
        aim = tl.load(prior + (r - p) * p + j, mask=of_W, other=0.0)
        column = root * tl.where(of_W, aim - column, column * inverse_root)
        tl.store(P + r * all + n, column, mask=r < rows)
        size += tl.sum(column * column)
    tl.store(sizes + tl.program_id(0), size)
    tl.store(sizes + tl.num_programs(0) + tl.program_id(0), size_of_F)


@triton.jit
def _products(
    P, Z, CUF, sizes, fading, finite_out, too_large, n, all, p, parts,
    LIMIT: tl.constexpr, FADES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """CUF = [I + FᵀF, FᵀT/√λ, Fᵀ] (all, all + 2p) in these columns, with F = 0 where anything is not finite,
    or where F is larger than LIMIT.

    With FADES the last of all rows, which would double the product's size, is made by sums.
    """
    tiles = tl.cdiv(all, BLOCK_C)
    of_F = tl.program_id(0) < tiles
    c = tl.where(of_F, tl.program_id(0), tl.program_id(0) - tiles) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_F, in_T = of_F & (c < all), (of_F == 0) & (c < p)
    i, part = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_S)
    total = tl.sum(tl.load(sizes + part, mask=part < parts, other=0.0))
    finite = total * total < float("inf")  # nor NaN; squared, because the sweeps multiply two entries of C
    size = tl.sum(tl.load(sizes + parts + part, mask=part < parts, other=0.0))
    refused = finite & (size > LIMIT)
    finite = finite & (size <= LIMIT)
    inside = (i < n)[:, None] & in_T[None, :]
    f = tl.load(P + c[None, :] * all + i[:, None], mask=inside, other=0.0)
    product = tl.zeros((BLOCK_N, BLOCK_C), dtype=Z.dtype.element_ty)
    last = tl.zeros((BLOCK_C,), dtype=Z.dtype.element_ty)
    for start in range(0, p, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        left = tl.load(P + j[None, :] * all + i[:, None], mask=(j < p)[None, :] & (i < n)[:, None], other=0.0)
        right = tl.load(P + j[:, None] * all + c[None, :], mask=(j < p)[:, None] & in_F[None, :], other=0.0)
        right += tl.load(Z + j[:, None] * p + c[None, :], mask=(j < p)[:, None] & in_T[None, :], other=0.0)
        product = tl.dot(left, right, product, input_precision="ieee", out_dtype=Z.dtype.element_ty)
        if FADES:
            last += tl.sum(tl.load(P + j * all + n, mask=j < p, other=0.0)[:, None] * right, axis=0)
    scale = tl.where(of_F, 1.0, tl.load(fading + 1).to(product.dtype))
    product = tl.where(finite, product * scale, 0.0)
    product = tl.where((i[:, None] == c[None, :]) & in_F[None, :], product + 1.0, product)
    place = CUF + tl.where(in_F, c, all + c)
    rows = place[None, :] + i[:, None] * (all + 2 * p)
    tl.store(rows, product, mask=(i < n)[:, None] & (in_F | in_T)[None, :])
    tl.store(rows + p, tl.where(finite, f, 0.0), mask=inside)
    if FADES:
        last = tl.where(finite, last * scale, 0.0)
        last = tl.where((c == n) & in_F, last + 1.0, last)
        place += n * (all + 2 * p)
        tl.store(place, last, mask=in_F | in_T)
        f_last = tl.load(P + c * all + n, mask=in_T, other=0.0)
        tl.store(place + p, tl.where(finite, f_last, 0.0), mask=in_T)
    if tl.program_id(0) == 0:
        tl.store(finite_out, finite)
        tl.store(too_large, tl.load(too_large) + refused.to(tl.int64))


@triton.jit
def _solve(
    P, CUF, W, weight, bias, energy, left, ridge, tally, fading, finite_in, buffer, n, all, p, m, k,
    HAS_BIAS: tl.constexpr, FADES: tl.constexpr, TWO: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """X = C⁻¹E in every program alike, then W += XᵀU in these columns, and the head takes W.

    With FADES C has a border more, the row (bᵀ, d) of the ridge: X₀ = C⁻¹[E, b] without it, then
    x = (e - bᵀX₀)/(d - bᵀC⁻¹b) and X = X₀ - C⁻¹b x.
    """
    dtype: tl.constexpr = CUF.dtype.element_ty
    SIZE: tl.constexpr = 2 * HALF if TWO else HALF
    i, o = tl.arange(0, SIZE), tl.arange(0, BLOCK_M)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    wide = all + 2 * p
    buffer += tl.program_id(0) * (2 * HALF * HALF + SIZE * BLOCK_M)
    finite = tl.load(finite_in)
    E = tl.load(P + (p + o)[None, :] * all + i[:, None], mask=(i < n)[:, None] & (o < m)[None, :], other=0.0)
    E = tl.where(finite, E, 0.0)  # rows of zeros change nothing
    border = tl.load(CUF + i * wide + n, mask=(i < n) & FADES, other=0.0)
    E = tl.where((o == m)[None, :], border[:, None], E)
    U = tl.load(CUF + all + c[None, :] + i[:, None] * wide, mask=(i < n)[:, None] & (c < p)[None, :], other=0.0)
    C = tile_of(CUF, wide, n, 0, 0, SIZE)
    off = tl.where(i[:, None] == i[None, :], C - 1.0, C)
    size = tl.sqrt(tl.sum(off * off))
    if size < NEAR:
        X = solve_near_identity(C, E, size, SIZE)
    else:
        X = solve_by_sweeps(CUF, E, buffer, n, wide, TWO, HALF, BLOCK_M)
    if FADES:
        last = tl.load(P + (p + o) * all + n, mask=o < m, other=0.0)
        last = tl.where(finite, last, 0.0)
        d = tl.load(CUF + n * wide + n)
        met = tl.sum(border[:, None] * X, axis=0)  # bᵀX₀
        d -= tl.sum(tl.where(o == m, met, 0.0))
        pull = tl.where(o < m, (last - met) / d, 0.0)
        X -= tl.sum(tl.where((o == m)[None, :], X, 0.0), axis=1)[:, None] * pull[None, :]
    step = tl.dot(tl.trans(X), U, input_precision="ieee", out_dtype=dtype)
    fall = tl.sum(E * X, axis=0)
    if FADES:
        row = tl.load(CUF + n * wide + all + c, mask=c < p, other=0.0)
        step += pull[:, None] * row[None, :]
        fall += last * pull

    inside = (o < m)[:, None] & (c < p)[None, :]
    place = W + o[:, None] * p + c[None, :]
    new = tl.load(place, mask=inside, other=0.0) + step
    tl.store(place, new, mask=inside)
    tl.store(weight + o[:, None] * k + c[None, :], new, mask=inside & (c < k)[None, :])
    if HAS_BIAS:
        tl.store(bias + o[:, None] + 0 * c[None, :], new, mask=inside & (c == k)[None, :])
    if tl.program_id(0) == 0:
        fade = tl.where(finite, tl.load(fading), 1.0)
        before = tl.load(energy + o, mask=o < m, other=0.0)
        tl.store(energy + o, fade.to(before.dtype) * before + fall, mask=o < m)
        good = finite.to(tl.float64)
        tl.store(tally, tl.load(tally) + good)
        tl.store(tally + 1, fade * tl.load(tally + 1) + good * n)
        if FADES:
            j = coordinate(tl.load(tally + 2).to(tl.int64), 0, p)
            _restore(left, ridge, tally, j, 1, p, fading, finite, BLOCK_P)


def block(
    state: Any, features: Tensor, targets: Tensor, ridge: Tensor, prior: Tensor
) -> tuple[Callable[[], None] | None, Tensor]:
    """Update W and the head of a `CapturedState` by a block and, where it forgets, by rows of the ridge.

    Returns a function that updates T, to be called before the next block, and a flag (0-d): whether all was finite.
    Several rows of the ridge need the T that the samples leave: no function.
    """
    if state.count <= 1:
        return _block(state, features, targets, ridge, prior, fades=state.count == 1)
    finish_now, finite = _block(state, features, targets, ridge, prior, fades=False)
    finish_now()
    return None, rank_one(state, None, None, ridge, prior, finite)


def _block(
    state: Any, features: Tensor, targets: Tensor, ridge: Tensor, prior: Tensor, fades: bool
) -> tuple[Callable[[], None], Tensor]:
    Z, W, k = state.Z, state.W, state.k
    (rows, p), m, n = Z.shape, W.shape[0], features.shape[0]
    all, fading = n + fades, state.fading
    parts, programs = triton.cdiv(rows, _TILE), triton.cdiv(p, _TILE)
    two, width = n > _HALF, max(_TILE, triton.next_power_of_2(m + fades))
    if (n, fades) not in state.blocks:  # kept: a graph's other streams still read them when their names are gone
        buffer = Z.new_empty(programs, 2 * _HALF * _HALF + (1 + two) * _HALF * width)
        P, CUF, sizes = Z.new_empty(rows, all), Z.new_empty(all, all + 2 * p), Z.new_empty(2 * parts)
        state.blocks[n, fades] = P, CUF, sizes, Z.new_empty((), dtype=torch.bool), buffer, *buffers(state.T, n, _HALF)
    P, CUF, sizes, finite, buffer, *work = state.blocks[n, fades]
    tiles = {"BLOCK_N": max(_HALF, triton.next_power_of_2(n)), "BLOCK_K": _DEPTH, "FADES": fades}
    stages = 1 if fades else 3  # sums beside a product are slower in a pipeline
    _whiten[(parts,)](
        Z, readable(features), readable(targets), P, sizes, state.ridge_left, ridge, prior,
        state.tally, fading, rows, n, all, p, m, k, BLOCK_R=_TILE, num_stages=stages, **tiles,
    )  # fmt: skip
    _products[(triton.cdiv(all, _TILE) + programs,)](
        P, Z, CUF, sizes, fading, finite, state.too_large, n, all, p, parts,
        LIMIT=CAPTURED_LIMIT, BLOCK_S=max(_TILE, triton.next_power_of_2(parts)), BLOCK_C=_TILE, num_stages=stages,
        **tiles,
    )  # fmt: skip
    bias = state.weight if state.bias is None else state.bias  # a pointer must be given, used or not
    _solve[(programs,)](
        P, CUF, W, state.weight, bias, state.energy, state.ridge_left, ridge, state.tally, fading, finite, buffer,
        n, all, p, m, k,
        HAS_BIAS=state.bias is not None, FADES=fades, TWO=two, HALF=_HALF, BLOCK_M=width, BLOCK_C=_TILE,
        BLOCK_P=triton.next_power_of_2(p), num_warps=_WARPS,
    )  # fmt: skip
    return partial(finish, state.T, CUF, fading, finite, fades, work), finite
