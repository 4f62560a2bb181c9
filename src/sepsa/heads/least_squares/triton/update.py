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
from triton.language import constexpr

from sepsa.heads.least_squares.math import CAPTURED_LIMIT, CAPTURED_ROW_LIMIT
from sepsa.heads.least_squares.triton.finish import buffers, finish
from sepsa.heads.least_squares.triton.linalg import NEAR, readable, solve_by_sweeps, solve_near_identity, tile_of
from sepsa.heads.least_squares.triton.ridge import coordinate, is_restored, lacking, restored
from sepsa.heads.least_squares.triton.tiles import (
    add_product,
    add_to_head,
    judge,
    load,
    load_transposed,
    load_vector,
    positions,
    product,
    store,
    store_head,
    times_features,
)

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
def _restore(left, ridge, tally, cursor, count, p, fading, finite, BLOCK_P: constexpr):
    """All coordinates fade, `count` get their ridge back, and the cursor moves on; nothing where not `finite`."""
    c = tl.arange(0, BLOCK_P)
    old, whole = load_vector(left, c, c < p), load_vector(ridge, c, c < p)
    faded = tl.load(fading).to(old.dtype) * old
    new = tl.where(is_restored(c, cursor, count, p), restored(whole, faded), faded)
    tl.store(left + c, tl.where(finite, new, old), mask=c < p)
    tl.store(tally + 2, tl.load(tally + 2) + tl.where(finite, count, 0).to(tl.float64))


@triton.jit
def _count(tally, finite, fade, n):
    """Count an update of n samples, after which the earlier ones have faded."""
    good = finite.to(tl.float64)
    tl.store(tally, tl.load(tally) + good)
    tl.store(tally + 1, fade * tl.load(tally + 1) + good * n)


@triton.jit
def _project(
    Z, x, z, left, ridge, tally, fading, rows, p, k,
    SAMPLE: constexpr, COUNT: constexpr, BLOCK_T: constexpr, BLOCK_C: constexpr, BLOCK_R: constexpr = _ROWS,
):  # fmt: skip
    """z = Zh with h = [x, 1]: f = Th, then the predictions Wh. Behind it COUNT columns of Z, each √q and the cursor."""
    r = positions(0, BLOCK_R)
    if SAMPLE:
        c = tl.arange(0, BLOCK_C)
        tile = load(Z, p, r, c, r < rows, c < p)
        h = load_vector(x, c, c < k).to(tile.dtype)
        h = tl.where((c >= k) & (c < p), 1.0, h)
        tl.store(z + r, tl.sum(tile * h[None, :], axis=1), mask=r < rows)
    if COUNT:
        t, cursor = tl.arange(0, BLOCK_T), coordinate(tl.load(tally + 2).to(tl.int64), 0, p)
        j, root = _ridge_row(left, ridge, cursor, t, p, fading)
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
    Z, z, y, weight, bias, energy, left, ridge, prior, tally, fading, finite_flag, too_large, p, m, k,
    HAS_BIAS: constexpr, SAMPLE: constexpr, COUNT: constexpr, BLOCK_T: constexpr, BLOCK_R: constexpr,
    BLOCK_C: constexpr = _COLUMNS, LIMIT: constexpr = CAPTURED_ROW_LIMIT,
):  # fmt: skip
    """The sample and COUNT rows √q e_j of the ridge, one after the other, in these columns, and the head takes W.

    With COUNT first T <- T/√λ; the target of a row of the ridge is the prior's, and f = √q T e_j. Every program turns
    the columns j of Z beside its own. Without SAMPLE a block was learned, which has faded T; its flag is read.
    """
    r = tl.arange(0, BLOCK_R)
    c = positions(0, BLOCK_C)
    rows = p + m
    is_f, is_e = r < p, (r >= p) & (r < rows)
    tile = load(Z, p, r, c, r < rows, c < p)
    fall = tl.zeros((BLOCK_R,), dtype=tile.dtype)
    if COUNT:
        t = tl.arange(0, BLOCK_T)
        columns = load_transposed(z, rows, r, 1 + t, r < rows, t < COUNT)
    if SAMPLE:
        value, g, finite, refused = _errors(z, y, fading, r, p, rows, LIMIT, COUNT > 0)
        fall += value * value / g
        if COUNT:
            scale = tl.where(is_f, tl.where(finite, tl.load(fading + 1), 1.0), 1.0).to(value.dtype)
            tile *= scale[:, None]
            columns = _rotate(columns * scale[:, None], value, g, is_f)
        tile = _rotate(tile, value, g, is_f)
    else:
        finite = tl.load(finite_flag)
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
        if SAMPLE:
            fade = tl.where(finite, tl.load(fading), 1.0)
            before *= fade.to(before.dtype)
            _count(tally, finite, fade, 1)
            tl.store(finite_flag, finite)
            tl.store(too_large, tl.load(too_large) + refused.to(tl.int64))
        tl.store(energy + r - p, before + fall, mask=is_e)
        if COUNT:
            _restore(left, ridge, tally, cursor, COUNT, p, fading, finite, BLOCK_R)


def rank_one(state: Any, features: Tensor | None, targets: Tensor | None, finite: Tensor | None = None) -> Tensor:
    """Learn one sample in a `CapturedState`, and give as many coordinates as it forgets their ridge back.

    Without a sample the latter alone, after a block whose flag is `finite`. Returns the flag (0-d) that says whether
    all was finite.
    """
    Z, count, penalty = state.Z, state.count, (state.ridge_left, state.ridge)
    (rows, p), sample = Z.shape, features is not None
    z = Z.new_empty(rows * (1 + count) + count + 1)
    flag: Tensor = Z.new_empty((), dtype=torch.bool) if finite is None else finite
    block_r, block_c, block_t = (triton.next_power_of_2(size) for size in (rows, p, max(count, 1)))
    x, y = (features, targets) if sample else (Z, Z)  # a pointer must be given, used or not
    counted, kind = (state.tally, state.fading), (sample, count, block_t)
    _project[(triton.cdiv(rows, _ROWS),)](Z, x, z, *penalty, *counted, rows, p, state.k, *kind, block_c)
    head = state.weight, state.weight if state.bias is None else state.bias, state.energy
    sizes = p, rows - p, state.k, state.bias is not None, *kind, block_r
    warps = 4 if count <= 1 else 8
    _learn[(triton.cdiv(p, _COLUMNS),)](
        *(Z, z, y, *head, *penalty, state.prior, *counted, flag, state.too_large, *sizes), num_warps=warps
    )
    return flag


@triton.jit
def _whiten(
    Z, x, y, projected, sizes, left, ridge, prior, tally, fading, rows, n, all, p, m, k,
    FADES: constexpr, BLOCK_N: constexpr, BLOCK_R: constexpr = _TILE, BLOCK_K: constexpr = _DEPTH,
):  # fmt: skip
    """projected = [F; Eᵀ] (p + m, all): rows of TΦᵀ, and by how much targets exceed those of WΦᵀ; and their squares.

    With FADES there is one row more than the n of Φ, √q e_j, which is a column of Z, and F is that of T/√λ.
    """
    r = positions(0, BLOCK_R)
    i = tl.arange(0, BLOCK_N)
    whitened = times_features(Z, x, r, i, rows, n, p, k, BLOCK_R, BLOCK_N, BLOCK_K)
    of_W = (r >= p) & (r < rows)
    target = load_transposed(y, m, r - p, i, of_W, i < n).to(whitened.dtype)
    inverse_root = tl.load(fading + 1).to(whitened.dtype)
    whitened = tl.where(of_W[:, None], target - whitened, whitened * inverse_root)
    store(projected, all, r, i, whitened, r < rows, i < n)
    size = tl.sum(whitened * whitened)
    size_of_F = tl.sum(tl.where((r < p)[:, None], whitened * whitened, 0.0))
    if FADES:
        j, root = _ridge_row(left, ridge, tl.load(tally + 2).to(tl.int64), 0, p, fading)
        column = load_vector(Z + j, r * p, r < rows)
        aim = load_vector(prior + j, (r - p) * p, of_W)
        column = root * tl.where(of_W, aim - column, column * inverse_root)
        tl.store(projected + r * all + n, column, mask=r < rows)
        size += tl.sum(column * column)
    tl.store(sizes + tl.program_id(0), size)
    tl.store(sizes + tl.num_programs(0) + tl.program_id(0), size_of_F)


@triton.jit
def _products(
    projected, Z, products, sizes, fading, finite_out, too_large, n, all, p, parts,
    FADES: constexpr, BLOCK_N: constexpr, BLOCK_S: constexpr, LIMIT: constexpr = CAPTURED_LIMIT,
    BLOCK_C: constexpr = _TILE, BLOCK_K: constexpr = _DEPTH,
):  # fmt: skip
    """products = [I + FᵀF, FᵀT/√λ, Fᵀ] (all, all + 2p) in these columns, with F = 0 where anything is not finite,
    or where F is larger than LIMIT.

    With FADES the last of all rows, which would double the product's size, is made by sums.
    """
    tiles = tl.cdiv(all, BLOCK_C)
    of_F = tl.program_id(0) < tiles
    c = tl.where(of_F, tl.program_id(0), tl.program_id(0) - tiles) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_F, in_T = of_F & (c < all), (of_F == 0) & (c < p)
    i = tl.arange(0, BLOCK_N)
    finite, refused = judge(sizes, parts, LIMIT, BLOCK_S)
    f = load_transposed(projected, all, i, c, i < n, in_T)
    total = tl.zeros((BLOCK_N, BLOCK_C), dtype=Z.dtype.element_ty)
    last = tl.zeros((BLOCK_C,), dtype=Z.dtype.element_ty)
    for start in range(0, p, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        right = load(projected, all, j, c, j < p, in_F) + load(Z, p, j, c, j < p, in_T)
        total = add_product(load_transposed(projected, all, i, j, i < n, j < p), right, total)
        if FADES:
            last += tl.sum(load_vector(projected + n, j * all, j < p)[:, None] * right, axis=0)
    scale = tl.where(of_F, 1.0, tl.load(fading + 1).to(total.dtype))
    total = tl.where(finite, total * scale, 0.0)
    total = tl.where((i[:, None] == c[None, :]) & in_F[None, :], total + 1.0, total)
    column, wide = tl.where(in_F, c, all + c), all + 2 * p
    store(products, wide, i, column, total, i < n, in_F | in_T)
    store(products + p, wide, i, column, tl.where(finite, f, 0.0), i < n, in_T)
    if FADES:
        last = tl.where(finite, last * scale, 0.0)
        last = tl.where((c == n) & in_F, last + 1.0, last)
        place = products + n * wide + column
        tl.store(place, last, mask=in_F | in_T)
        f_last = load_vector(projected + n, c * all, in_T)
        tl.store(place + p, tl.where(finite, f_last, 0.0), mask=in_T)
    if tl.program_id(0) == 0:
        tl.store(finite_out, finite)
        tl.store(too_large, tl.load(too_large) + refused.to(tl.int64))


@triton.jit
def _solve(
    projected, products, W, weight, bias, energy, left, ridge, tally, fading, finite_in, buffer, n, all, p, m, k,
    HAS_BIAS: constexpr, FADES: constexpr, TWO: constexpr, BLOCK_M: constexpr, BLOCK_P: constexpr,
    HALF: constexpr = _HALF, BLOCK_C: constexpr = _TILE,
):  # fmt: skip
    """X = C⁻¹E in every program alike, then W += XᵀU in these columns, and the head takes W.

    With FADES C has a border more, the row (bᵀ, d) of the ridge: X₀ = C⁻¹[E, b] without it, then
    x = (e - bᵀX₀)/(d - bᵀC⁻¹b) and X = X₀ - C⁻¹b x.
    """
    SIZE: constexpr = 2 * HALF if TWO else HALF
    i, o = tl.arange(0, SIZE), tl.arange(0, BLOCK_M)
    c = positions(0, BLOCK_C)
    wide = all + 2 * p
    buffer += tl.program_id(0) * (2 * HALF * HALF + SIZE * BLOCK_M)
    finite = tl.load(finite_in)
    E = load_transposed(projected, all, i, p + o, i < n, o < m)
    E = tl.where(finite, E, 0.0)  # rows of zeros change nothing
    border = load_vector(products + n, i * wide, (i < n) & FADES)
    E = tl.where((o == m)[None, :], border[:, None], E)
    U = load(products + all, wide, i, c, i < n, c < p)
    C = tile_of(products, wide, n, 0, 0, SIZE)
    off = tl.where(i[:, None] == i[None, :], C - 1.0, C)
    size = tl.sqrt(tl.sum(off * off))
    if size < NEAR:
        X = solve_near_identity(C, E, size, SIZE)
    else:
        X = solve_by_sweeps(products, E, buffer, n, wide, TWO, HALF, BLOCK_M)
    if FADES:
        last = tl.where(finite, load_vector(projected + n, (p + o) * all, o < m), 0.0)
        d = tl.load(products + n * wide + n)
        met = tl.sum(border[:, None] * X, axis=0)  # bᵀX₀
        d -= tl.sum(tl.where(o == m, met, 0.0))
        pull = tl.where(o < m, (last - met) / d, 0.0)
        X -= tl.sum(tl.where((o == m)[None, :], X, 0.0), axis=1)[:, None] * pull[None, :]
    step = product(tl.trans(X), U)
    fall = tl.sum(E * X, axis=0)
    if FADES:
        row = load_vector(products + n * wide + all, c, c < p)
        step += pull[:, None] * row[None, :]
        fall += last * pull
    add_to_head(W, weight, bias, o, c, step, m, p, k, HAS_BIAS)
    if tl.program_id(0) == 0:
        fade = tl.where(finite, tl.load(fading), 1.0)
        before = load_vector(energy, o, o < m)
        tl.store(energy + o, fade.to(before.dtype) * before + fall, mask=o < m)
        _count(tally, finite, fade, n)
        if FADES:
            j = coordinate(tl.load(tally + 2).to(tl.int64), 0, p)
            _restore(left, ridge, tally, j, 1, p, fading, finite, BLOCK_P)


def block(state: Any, features: Tensor, targets: Tensor) -> tuple[Callable[[], None] | None, Tensor]:
    """Update W and the head of a `CapturedState` by a block and, where it forgets, by rows of the ridge.

    Returns a function that updates T, to be called before the next block, and a flag (0-d): whether all was finite.
    Several rows of the ridge need the T that the samples leave: no function.
    """
    if state.count <= 1:
        return _block(state, features, targets, fades=state.count == 1)
    finish_now, finite = _block(state, features, targets, fades=False)
    finish_now()
    return None, rank_one(state, None, None, finite)


def _block(state: Any, features: Tensor, targets: Tensor, fades: bool) -> tuple[Callable[[], None], Tensor]:
    Z, k, fading = state.Z, state.k, state.fading
    (rows, p), m, n = Z.shape, len(state.W), len(features)
    all = n + fades
    parts, programs = triton.cdiv(rows, _TILE), triton.cdiv(p, _TILE)
    two, width = n > _HALF, max(_TILE, triton.next_power_of_2(m + fades))
    if (n, fades) not in state.blocks:  # kept: a graph's other streams still read them when their names are gone
        buffer = Z.new_empty(programs, 2 * _HALF * _HALF + (1 + two) * _HALF * width)
        projected, products, sizes = Z.new_empty(rows, all), Z.new_empty(all, all + 2 * p), Z.new_empty(2 * parts)
        finite = Z.new_empty((), dtype=torch.bool)
        state.blocks[n, fades] = projected, products, sizes, finite, buffer, *buffers(state.T, n, _HALF)
    projected, products, sizes, finite, buffer, *work = state.blocks[n, fades]
    penalty, counted = (state.ridge_left, state.ridge), (state.tally, fading)
    samples = max(_HALF, triton.next_power_of_2(n))
    stages = 1 if fades else 3  # sums beside a product are slower in a pipeline
    given = readable(features), readable(targets), projected, sizes
    shape = rows, n, all, p, m, k
    _whiten[(parts,)](Z, *given, *penalty, state.prior, *counted, *shape, fades, samples, num_stages=stages)
    flags, most = (finite, state.too_large), max(_TILE, triton.next_power_of_2(parts))
    _products[(triton.cdiv(all, _TILE) + programs,)](
        *(projected, Z, products, sizes, fading, *flags, n, all, p, parts, fades, samples, most), num_stages=stages
    )
    head = state.weight, state.weight if state.bias is None else state.bias, state.energy
    kind = state.bias is not None, fades, two, width, triton.next_power_of_2(p)
    _solve[(programs,)](
        *(projected, products, state.W, *head, *penalty, *counted, finite, buffer, *shape[1:], *kind), num_warps=_WARPS
    )
    return partial(finish, state.T, products, fading, finite, fades, work), finite
