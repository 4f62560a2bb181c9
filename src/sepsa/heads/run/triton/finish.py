"""T's own update after a block of a captured step, which neither forward nor backward pass reads."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from sepsa.heads.least_squares.math import andrews, root
from sepsa.heads.run.triton.solve import tile_of
from sepsa.heads.run.triton.tiles import load, load_vector, positions, product, store

MOST = 64  # rows of which one program eliminates
_TILE = 16
_COLUMNS = 32
_FEW = 8


@triton.jit
def _gain(M, stride, scale, flag, V, buffer, n, SIZE: constexpr):
    """V = (R + I)⁻¹R⁻ᵀ with RᵀR = I + FᵀF, of n rows, which go on as those of the identity.

    Eliminating in [I + FᵀF | I] row by row leaves [D R̂ | R̂⁻ᵀ], of which √D⁻¹ makes [R | R⁻ᵀ].
    """
    i, j = tl.arange(0, SIZE), tl.arange(0, SIZE)
    square = i[:, None] * SIZE + j[None, :]
    of_R, of_J, of_V = buffer, buffer + SIZE * SIZE, buffer + 2 * SIZE * SIZE
    A = tile_of(M, stride, scale, tl.load(flag), n, 0, 0, SIZE, SIZE)
    B = tl.where(i[:, None] == j[None, :], 1.0, 0.0).to(A.dtype)
    for q in range(n):
        # Rows pass through memory: read back they are rows and, A being symmetric, columns at one latency.
        tl.store(of_R + square, A, mask=(i == q)[:, None])
        tl.store(of_J + square, B, mask=(i == q)[:, None])
        tl.debug_barrier()
        row = of_R + q * SIZE
        share = tl.where(i > q, tl.load(row + i) / tl.load(row + q), 0.0)
        A -= share[:, None] * tl.load(row + j)[None, :]
        B -= share[:, None] * tl.load(of_J + q * SIZE + j)[None, :]
    tl.debug_barrier()
    pivot = tl.load(of_R + i * SIZE + i, mask=i < n, other=1.0)
    root = 1.0 / tl.sqrt(pivot)
    X = tl.load(of_J + square, mask=(i < n)[:, None], other=0.0) * root[:, None]
    for back in range(n):
        q = n - 1 - back
        tl.store(of_V + square, X, mask=(i == q)[:, None])
        tl.debug_barrier()
        d = tl.load(of_R + q * SIZE + q)
        x = tl.load(of_V + q * SIZE + j) / (tl.sqrt(d) + 1.0)
        column = tl.load(of_R + i * SIZE + q, mask=i < q, other=0.0) * root
        X = tl.where((i == q)[:, None], x[None, :], X - column[:, None] * x[None, :])
    tl.store(V + square, X)


@triton.jit
def _learn(
    T, M, U, projected, scale, numbers, flag, V, f, n, r, p, BORDER: constexpr, SIZE: constexpr,
    BLOCK_R: constexpr = _TILE, BLOCK_C: constexpr = _COLUMNS,
):  # fmt: skip
    """T <- S - GU in this tile, G = FV by n rows; f gets the BORDER, the row after them, as these leave it."""
    i, j = tl.arange(0, SIZE), tl.arange(0, SIZE)
    a, c = positions(0, BLOCK_R), positions(1, BLOCK_C)
    finite, root, scales = tl.load(flag), tl.load(numbers), load_vector(scale, i, i < n)
    F = load(projected, r, a, i, a < p, i < n) * scales[None, :]
    rows = load(U, p, i, c, i < n, c < p) * (scales * root)[:, None]
    G = product(tl.where(finite, F, 0.0), tl.load(V + i[:, None] * SIZE + j[None, :]))
    tile = load(T, p, a, c, a < p, c < p) * root
    if BORDER and tl.program_id(1) == 0:
        last = tl.load(scale + n)
        met = tl.where(finite, load_vector(M + n, i * r, i < n) * scales * last, 0.0)
        row = tl.where(finite, load_vector(projected + n, a * r, a < p) * last, 0.0)
        tl.store(f + a, row - tl.sum(G * met[None, :], axis=1), mask=a < p)
    store(T, p, a, c, tile - product(G, tl.where(finite, rows, 0.0)), a < p, c < p)


@triton.jit
def _rotate(T, f, p, BLOCK_R: constexpr, BLOCK_C: constexpr = _FEW):
    """T <- T - f uᵀ/(g + √g) in these columns, u = fᵀT and g = 1 + fᵀf."""
    r = tl.arange(0, BLOCK_R)
    c = positions(0, BLOCK_C)
    row = load_vector(f, r, r < p)
    g = 1.0 + tl.sum(row * row)
    tile = load(T, p, r, c, r < p, c < p)
    u = tl.sum(tile * row[:, None], axis=0)
    store(T, p, r, c, tile - (row / (g + tl.sqrt(g)))[:, None] * u[None, :], r < p, c < p)


def gain_size(r: int) -> int:
    """Of V for a block of r rows, the last of which may be a border; 0 where torch updates T."""
    return 0 if r > MOST + 1 else min(MOST, max(32, triton.next_power_of_2(r)))


def finish(T: Tensor, work: Any) -> None:
    """T after the rows of a block: up to MOST of them, and one more, by kernels, others by torch."""
    r, p = work.U.shape
    size, border = len(work.V), r == MOST + 1
    if not size:
        F = torch.where(work.flag, work.projected[:p] * work.scale, 0.0)
        S = T * work.numbers[0]
        T.copy_(andrews(S, F, F.T @ S, root(F.T @ F)))
        return
    n = r - border
    _gain[(1,)](work.M, r, work.scale, work.flag, work.V, work.passing, n, SIZE=size, num_warps=8)
    rows = work.M, work.U, work.projected, work.scale, work.numbers, work.flag, work.V, work.f
    _learn[(triton.cdiv(p, _TILE), triton.cdiv(p, _COLUMNS))](T, *rows, n, r, p, BORDER=border, SIZE=size)
    if border:
        _rotate[(triton.cdiv(p, _FEW),)](T, work.f, p, BLOCK_R=triton.next_power_of_2(p))
