"""A block of rows in a captured step as a few Triton kernels, because each further launch takes as long as the update.

The n samples and the c coordinates that get their ridge back are r = n + c columns of one array projected =
Z [Φᵀ, e_at] (p + m, r), Z = [T; W]: the rows times Tᵀ, what the head says, and the weights to be pulled to the prior.
What a loss makes of them, in a kernel of one program of its own, are a scale of each row, with which the first p rows
of `projected` are F = TΦᵀ for T/√λ, the residuals E and the inflations D. Then, in the symbols of `least_squares.math`,

    M = FᵀF,    U = FᵀT/√λ,    X = D(I + DMD)⁻¹E,    W <- W + XᵀU

is all that the forward pass waits for. T's own update is left to `finish`, to run beside the backward pass.

Triton comes with torch's CUDA builds; these modules are imported only where a head on a GPU learns inside a graph.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from sepsa.heads.run.triton.finish import gain_size
from sepsa.heads.run.triton.solve import solve
from sepsa.heads.run.triton.tiles import (
    add_product,
    coordinate,
    lacking,
    load,
    load_transposed,
    load_vector,
    positions,
    product,
    readable,
    restore,
    store,
    store_head,
)

_TILE = 16
_DEPTH = 32
_SIZE = 32


@triton.jit
def _project(
    Z, x, projected, sizes, cursor_in, rows, n, r, p, k,
    BLOCK_N: constexpr, BLOCK_G: constexpr, BLOCK_R: constexpr = _TILE, BLOCK_K: constexpr = _DEPTH,
):  # fmt: skip
    """projected = Z [Φᵀ, e_at] in these rows, Φ = [x, 1]; the sum of their squares, and that of T's times Φᵀ."""
    row = positions(0, BLOCK_R)
    i, t = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_G)
    total = tl.zeros((BLOCK_R, BLOCK_N), dtype=Z.dtype.element_ty)
    for start in range(0, p, BLOCK_K):
        c = start + tl.arange(0, BLOCK_K)
        part = load(Z, p, row, c, row < rows, c < p)
        h = load_transposed(x, k, c, i, c < k, i < n)
        h = tl.where(((c >= k) & (c < p))[:, None], 1.0, h.to(part.dtype))
        total = add_product(part, h, total)
    total = tl.where((row < rows)[:, None] & (i < n)[None, :], total, 0.0)
    store(projected, r, row, i, total, row < rows, i < n)
    cursor = tl.load(cursor_in).to(tl.int64)
    column = load(Z, p, row, coordinate(cursor, t, p), row < rows, t < r - n)
    store(projected, r, row, n + t, column, row < rows, t < r - n)
    tl.store(sizes + tl.program_id(0), tl.sum(total * total) + tl.sum(column * column))
    of_T = tl.sum(tl.where((row < p)[:, None], total * total, 0.0))
    tl.store(sizes + tl.num_programs(0) + tl.program_id(0), of_T)


@triton.jit
def judge(sizes, parts, errors, over, LIMIT: constexpr, BLOCK_S: constexpr):
    """Whether rows are finite and at most LIMIT, and whether they are finite and larger.

    `sizes` are the sums of squares that `parts` programs found: of all numbers, then, without the factor `over`, of the
    whitened rows; `errors` is another sum of squares.
    """
    part = tl.arange(0, BLOCK_S)
    total = tl.sum(load_vector(sizes, part, part < parts)) + errors
    finite = total * total < float("inf")  # nor NaN; squared, because the sweeps multiply two entries
    size = tl.sum(load_vector(sizes + parts, part, part < parts)) * over
    return finite & (size <= LIMIT), finite & (size > LIMIT)


@triton.jit
def write_rows(
    projected, prior, left, ridge, cursor, scale, weight, E, numbers, flag, too_large,
    e, by, inflation, lam, finite, refused, n, r, p, m,
    BLOCK_N: constexpr, BLOCK_G: constexpr, BLOCK_M: constexpr, BLOCK_P: constexpr,
):  # fmt: skip
    """What `_step` reads of samples with the residuals e (n, m), the scales `by` and one inflation, and of the ridge.

    Where not `finite`, all rows are zero, which changes nothing. The ridge that is left is updated.
    """
    i, o, t = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_G)
    root = tl.where(finite, 1.0 / tl.sqrt(lam), 1.0)
    inflation = tl.where(finite, inflation, 1.0)
    by = tl.where(finite, by * root, 0.0)
    tl.store(scale + i, by, mask=i < n)
    tl.store(weight + i, by * inflation, mask=i < n)
    store(E, m, i, o, tl.where(finite, e, 0.0), i < n, o < m)
    tl.store(numbers, root)
    tl.store(numbers + 1, inflation)
    tl.store(flag, finite)
    tl.store(too_large, tl.load(too_large) + refused.to(tl.int64))
    if r > n:
        given = t < r - n
        at = coordinate(cursor, t, p)
        q = lacking(load_vector(ridge, at, given), lam * load_vector(left, at, given))
        back = tl.where(finite, tl.sqrt(q), 0.0)
        tl.store(scale + n + t, back * root, mask=given)
        tl.store(weight + n + t, back * root, mask=given)
        pull = load_transposed(prior, p, at, o, given, o < m) - load_transposed(
            projected, r, n + t, p + o, given, o < m
        )
        store(E, m, n + t, o, tl.where(finite, back[:, None] * pull, 0.0), given, o < m)
        tl.debug_barrier()  # the ridge that is left has been read
        restore(left, ridge, lam, cursor, r - n, p, finite, BLOCK_P)


@triton.jit
def multiply(
    projected, Z, M, U, r, p,
    BLOCK_R: constexpr = _SIZE, BLOCK_C: constexpr = _TILE, BLOCK_K: constexpr = _DEPTH,
):  # fmt: skip
    """FᵀF or FᵀT, in these rows and columns, of rows without their scale, beside the program that computes it."""
    edge = tl.cdiv(r, BLOCK_C) * BLOCK_C  # the columns of M, then those of U
    c = positions(1, BLOCK_C)
    in_M, in_U = c < r, (c >= edge) & (c < edge + p)
    c = tl.where(c < edge, c, c - edge)
    i = positions(0, BLOCK_R)
    total = tl.zeros((BLOCK_R, BLOCK_C), dtype=Z.dtype.element_ty)
    for start in range(0, p, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        other = load(projected, r, j, c, j < p, in_M) + load(Z, p, j, c, j < p, in_U)
        total = add_product(load_transposed(projected, r, i, j, i < r, j < p), other, total)
    store(M, r, i, c, total, i < r, in_M)
    store(U, p, i, c, total, i < r, in_U)


@triton.jit
def _rows(E, U, weight, root, finite, first, r, p, m, c, SIZE: constexpr, BLOCK_M: constexpr):
    """E and U, in these columns, from this row on."""
    i, o = first + tl.arange(0, SIZE), tl.arange(0, BLOCK_M)
    rows = load(U, p, i, c, i < r, c < p) * (load_vector(weight, i, i < r) * root)[:, None]
    return load(E, m, i, o, i < r, o < m), tl.where(finite, rows, 0.0)


@triton.jit
def _step(
    M, U, weights, E, numbers, flag, W, weight, bias, energy, buffer, r, p, m, k,
    HAS_BIAS: constexpr, ENERGY: constexpr, FIRST: constexpr, SECOND: constexpr, BLOCK_M: constexpr,
    BLOCK_C: constexpr = _TILE,
):  # fmt: skip
    """X in every program alike, then W += XᵀU in these columns, and the head takes W; with ENERGY that grows too."""
    o, c = tl.arange(0, BLOCK_M), positions(0, BLOCK_C)
    buffer += tl.program_id(0) * (FIRST * FIRST + SECOND * SECOND)
    root, finite = tl.load(numbers), tl.load(flag)
    E1, U1 = _rows(E, U, weights, root, finite, 0, r, p, m, c, FIRST, BLOCK_M)
    E2, U2 = E1, U1
    if SECOND:
        E2, U2 = _rows(E, U, weights, root, finite, FIRST, r, p, m, c, SECOND, BLOCK_M)
    X1, X2 = solve(M, r, weights, finite, E1, E2, buffer, r, FIRST, SECOND)
    step, fall = product(tl.trans(X1), U1), tl.sum(E1 * X1, axis=0)
    if SECOND:
        step, fall = add_product(tl.trans(X2), U2, step), fall + tl.sum(E2 * X2, axis=0)
    new = load(W, p, o, c, o < m, c < p) + step
    store(W, p, o, c, new, o < m, c < p)
    store_head(weight, bias, k, o, c, new, o < m, HAS_BIAS)
    if ENERGY and tl.program_id(0) == 0:
        tl.store(energy + o, load_vector(energy, o, o < m) + fall, mask=o < m)


def parts_of(r: int) -> tuple[int, int]:
    """The sizes of the two parts in which a system of r rows is solved."""
    if r <= 64:
        return 32, 32 if r > 32 else 0
    return 64, max(_TILE, triton.next_power_of_2(r - 64))


class Work:
    """What the kernels write for n samples and c coordinates, kept: other streams of a graph read it later."""

    def __init__(self, Z: Tensor, m: int, n: int, c: int) -> None:
        (rows, p), r, new = Z.shape, n + c, Z.new_zeros
        self.n, self.r = n, r
        self.first, self.second = parts_of(r)
        self.parts = triton.cdiv(rows, _TILE)
        self.projected, self.sizes = new(rows, r), new(2 * self.parts)
        self.scale, self.weight, self.numbers = new(r), new(r), new(2)
        self.E, self.M, self.U = new(r, m), new(r, r), new(r, p)
        self.flag = torch.zeros((), dtype=torch.bool, device=Z.device)
        self.buffer = new(triton.cdiv(p, _TILE), self.first**2 + self.second**2)
        size = gain_size(r)
        self.V, self.passing, self.f = new(size, size), new(3, size, size), new(p)
        # The sizes of blocks: samples, coordinates, outputs, columns, and the programs of `_project`.
        sizes = max(n, _TILE), max(c, 2), max(m, _TILE), p, max(self.parts, _TILE)
        self.blocks = tuple(triton.next_power_of_2(size) for size in sizes)
        self.rows = self.projected, Z, self.M, self.U
        self.made = self.scale, self.weight, self.E, self.numbers, self.flag
        # One program for each part of the products, and a last one for what the rows are scaled by.
        self.programs = triton.cdiv(r, _SIZE), triton.cdiv(r, _TILE) + triton.cdiv(p, _TILE) + 1


def project(memory: Any, features: Tensor, c: int, cursor: Tensor) -> Work:
    """The work of a block of these samples and c coordinates, with `projected` and `sizes`."""
    Z, n = memory.Z, len(features)
    if (n, c) not in memory.blocks:
        memory.blocks[n, c] = Work(Z, len(memory.W), n, c)
    work: Work = memory.blocks[n, c]
    rows, p = Z.shape
    _project[(work.parts,)](
        Z, readable(features), work.projected, work.sizes, cursor, rows, n, work.r, p, memory.k, *work.blocks[:2]
    )
    return work


def step(memory: Any, work: Work, energy: Tensor | None = None) -> None:
    """Update W and the head by the rows of `work`, and the energy where there is one."""
    (m, p), r = memory.W.shape, work.r
    bias = memory.weight if memory.bias is None else memory.bias  # a pointer must be given, used or not
    head = memory.W, memory.weight, bias, memory.W if energy is None else energy
    kind = memory.bias is not None, energy is not None, work.first, work.second, work.blocks[2]
    system = work.M, work.U, work.weight, work.E, work.numbers, work.flag
    _step[(triton.cdiv(p, _TILE),)](*system, *head, work.buffer, r, p, m, memory.k, *kind)
