"""T's own update after a block of a captured step, as two Triton kernels, or three below forgetting 1.

Symbols as in `least_squares`. From [C, U, Fᵀ] = [I + FᵀF, FᵀS, Fᵀ] of S = T/√λ, which `least_squares.block` leaves:

    V = (R + I)⁻¹R⁻ᵀ, RᵀR = C    by one program, beside the backward pass, which has the other processors
    T <- S - FVU                 in tiles of T
    T <- T - f uᵀ/(g + √g)       for the row of the ridge, f as the samples left it, g = 1 + fᵀf and u = fᵀT
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from sepsa.heads.least_squares.triton.linalg import square_at, tile_of
from sepsa.heads.least_squares.triton.tiles import load, load_transposed, load_vector, positions, product, store

_TILE = 16
_COLUMNS = 32
_FEW = 8


@triton.jit
def _gain(products, V, buffer, n, wide, SIZE: constexpr):
    """V = (R + I)⁻¹R⁻ᵀ with RᵀR = C, where C goes on as the identity.

    Eliminating in [C | I] row by row leaves [D R̂ | R̂⁻ᵀ], of which √D⁻¹ makes [R | R⁻ᵀ].
    """
    i, j = tl.arange(0, SIZE), tl.arange(0, SIZE)
    square = i[:, None] * SIZE + j[None, :]
    of_R, of_J, of_V = buffer, buffer + SIZE * SIZE, buffer + 2 * SIZE * SIZE
    A = tile_of(products, wide, n, 0, 0, SIZE)
    B = tl.where(i[:, None] == j[None, :], 1.0, 0.0).to(A.dtype)
    for q in range(n):
        # Rows pass through memory: read back they are rows and, C being symmetric, columns at one latency.
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
    T, products, V, f, fading, finite_in, n, all, p,
    FADES: constexpr, SIZE: constexpr, BLOCK_R: constexpr, BLOCK_C: constexpr,
):  # fmt: skip
    """T <- S - GU in this tile, G = FV; with FADES, one row of the ridge, also f - G(Fᵀf), that row seen after it."""
    wide = all + 2 * p
    i = tl.arange(0, SIZE)
    r = positions(0, BLOCK_R)
    c = positions(1, BLOCK_C)
    of_F = products + all + p
    G = product(load_transposed(of_F, wide, r, i, r < p, i < n), tl.load(square_at(V, 0, 0, 1, SIZE)))
    U = load(products + all, wide, i, c, i < n, c < p)
    tile = load(T, p, r, c, r < p, c < p)
    tile *= tl.where(tl.load(finite_in), tl.load(fading + 1), 1.0).to(tile.dtype)
    if FADES:
        met = load_vector(products + n, i * wide, i < n)
        if tl.program_id(1) == 0:
            row = load_vector(of_F + n * wide, r, r < p)
            tl.store(f + r, row - tl.sum(G * met[None, :], axis=1), mask=r < p)
    store(T, p, r, c, tile - product(G, U), r < p, c < p)


@triton.jit
def _rotate(T, f, p, BLOCK_R: constexpr, BLOCK_C: constexpr):
    """T <- T - f uᵀ/(g + √g) in these columns."""
    r = tl.arange(0, BLOCK_R)
    c = positions(0, BLOCK_C)
    row = load_vector(f, r, r < p)
    g = 1.0 + tl.sum(row * row)
    tile = load(T, p, r, c, r < p, c < p)
    u = tl.sum(tile * row[:, None], axis=0)
    store(T, p, r, c, tile - (row / (g + tl.sqrt(g)))[:, None] * u[None, :], r < p, c < p)


def finish(T: Tensor, products: Tensor, fading: Tensor, finite: Tensor, fades: bool, buffers: Any) -> None:
    """T after a block of `least_squares.block`, which returned the products and the flag."""
    V, work, f = buffers
    size, all, p = len(V), len(products), len(T)
    n = all - fades
    _gain[(1,)](products, V, work, n, all + 2 * p, SIZE=size, num_warps=8)
    _learn[(triton.cdiv(p, _TILE), triton.cdiv(p, _COLUMNS))](
        T, products, V, f, fading, finite, n, all, p, FADES=fades, SIZE=size, BLOCK_R=_TILE, BLOCK_C=_COLUMNS
    )
    if fades:
        _rotate[(triton.cdiv(p, _FEW),)](T, f, p, BLOCK_R=triton.next_power_of_2(p), BLOCK_C=_FEW)


def buffers(T: Tensor, n: int, least: int) -> tuple[Tensor, Tensor, Tensor]:
    """What `finish` needs beside T for blocks of n samples: V, what passes through memory, and f."""
    size = max(least, triton.next_power_of_2(n))
    return T.new_empty(size, size), T.new_empty(3, size, size), T.new_empty(len(T))
