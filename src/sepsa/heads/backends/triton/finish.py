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

from sepsa.heads.backends.triton.linalg import tile_of

_TILE = 16
_COLUMNS = 32
_FEW = 8


@triton.jit
def _gain(CUF, V, buffer, n, wide, SIZE: tl.constexpr):
    """V = (R + I)⁻¹R⁻ᵀ with RᵀR = C, where C goes on as the identity.

    Eliminating in [C | I] row by row leaves [D R̂ | R̂⁻ᵀ], of which √D⁻¹ makes [R | R⁻ᵀ].
    """
    i, j = tl.arange(0, SIZE), tl.arange(0, SIZE)
    square = i[:, None] * SIZE + j[None, :]
    of_R, of_J, of_V = buffer, buffer + SIZE * SIZE, buffer + 2 * SIZE * SIZE
    A = tile_of(CUF, wide, n, 0, 0, SIZE)
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
    T, CUF, V, f, fading, finite_in, n, all, p,
    FADES: tl.constexpr, SIZE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """T <- S - GU in this tile, G = FV; with FADES, one row of the ridge, also f - G(Fᵀf), that row seen after it."""
    dtype: tl.constexpr = CUF.dtype.element_ty
    wide = all + 2 * p
    i, j = tl.arange(0, SIZE), tl.arange(0, SIZE)
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    of_F = CUF + all + p + r
    F = tl.load(of_F[:, None] + i[None, :] * wide, mask=(r < p)[:, None] & (i < n)[None, :], other=0.0)
    G = tl.dot(F, tl.load(V + i[:, None] * SIZE + j[None, :]), input_precision="ieee", out_dtype=dtype)
    U = tl.load(CUF + i[:, None] * wide + all + c[None, :], mask=(i < n)[:, None] & (c < p)[None, :], other=0.0)
    inside = (r < p)[:, None] & (c < p)[None, :]
    place = T + r[:, None] * p + c[None, :]
    tile = tl.load(place, mask=inside, other=0.0)
    tile *= tl.where(tl.load(finite_in), tl.load(fading + 1), 1.0).to(dtype)
    if FADES:
        met = tl.load(CUF + i * wide + n, mask=i < n, other=0.0)
        if tl.program_id(1) == 0:
            row = tl.load(of_F + n * wide, mask=r < p, other=0.0)
            tl.store(f + r, row - tl.sum(G * met[None, :], axis=1), mask=r < p)
    tl.store(place, tile - tl.dot(G, U, input_precision="ieee", out_dtype=dtype), mask=inside)


@triton.jit
def _rotate(T, f, p, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """T <- T - f uᵀ/(g + √g) in these columns."""
    r = tl.arange(0, BLOCK_R)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    row = tl.load(f + r, mask=r < p, other=0.0)
    g = 1.0 + tl.sum(row * row)
    inside = (r < p)[:, None] & (c < p)[None, :]
    place = T + r[:, None] * p + c[None, :]
    tile = tl.load(place, mask=inside, other=0.0)
    u = tl.sum(tile * row[:, None], axis=0)
    tl.store(place, tile - (row / (g + tl.sqrt(g)))[:, None] * u[None, :], mask=inside)


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
