"""Linear algebra of small symmetric matrices inside Triton kernels: what one program can do with a few blocks."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# Up to this distance from the identity, where most systems of a block are after some batches, `iterate` takes less time
# than what waits for one pair of pivots after the other.
NEAR: tl.constexpr = tl.constexpr(0.75)


@triton.jit
def product(a, b):
    """ab, without a rounding of its factors."""
    return tl.dot(a, b, input_precision="ieee", out_dtype=a.dtype)


@triton.jit
def tile_of(C, stride, n, row, column, SIZE: tl.constexpr):
    """A square of C, which goes on as the identity."""
    i, j = row + tl.arange(0, SIZE), column + tl.arange(0, SIZE)
    part = tl.load(C + i[:, None] * stride + j[None, :], mask=(i < n)[:, None] & (j < n)[None, :], other=0.0)
    return tl.where((i[:, None] == j[None, :]) & (i >= n)[:, None], 1.0, part)


@triton.jit
def sweep(A, buffer, count, SIZE: tl.constexpr):
    """-A⁻¹ of a symmetric A whose rows from `count` on are the identity's, or the same with those of them unswept.

    With Q two pivots, D = A_QQ and V = A_Q., after which V_Q is replaced by -I, a sweep is

        A <- A with the rows and columns Q set to zero, minus VᵀD⁻¹V

    No entry is a difference that should have been a product, and nothing is left to substitute back. Also returns the
    smallest pivot: above 0 where A is positive definite.
    """
    i, j = tl.arange(0, SIZE), tl.arange(0, SIZE)
    least = tl.full((), float("inf"), A.dtype)
    for q in range(0, count, 2):
        swept = (i == q) | (i == q + 1)
        # The pivots' rows pass through memory: read back they are rows, columns and numbers at one latency.
        tl.store(buffer + i[:, None] * SIZE + j[None, :], A, mask=swept[:, None])
        tl.debug_barrier()
        u, v = buffer + q * SIZE, buffer + (q + 1) * SIZE
        a = tl.load(u + q)
        b = tl.load(u + q + 1)
        d = tl.load(v + q + 1)
        over = 1.0 / (a * d - b * b)  # D = [a b; b d]
        least = tl.minimum(least, tl.minimum(a, a * d - b * b))
        u_i, v_i = tl.load(u + i), tl.load(v + i)
        u_j, v_j = tl.load(u + j), tl.load(v + j)
        u_i = tl.where(i == q, -1.0, tl.where(i == q + 1, 0.0, u_i))
        v_i = tl.where(i == q + 1, -1.0, tl.where(i == q, 0.0, v_i))
        u_j = tl.where(j == q, -1.0, tl.where(j == q + 1, 0.0, u_j))
        v_j = tl.where(j == q + 1, -1.0, tl.where(j == q, 0.0, v_j))
        A = tl.where(swept[:, None] | ((j == q) | (j == q + 1))[None, :], 0.0, A)
        A -= u_i[:, None] * ((d * u_j - b * v_j) * over)[None, :] + v_i[:, None] * ((a * v_j - b * u_j) * over)[None, :]
    return A, least


@triton.jit
def back_substitute(L, Y, X, blocks, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """X_b = S_bb⁻¹Y_b + Σ_j>b L_bj X_j from the last block to the first, with the L of `eliminate`."""
    dtype: tl.constexpr = L.dtype.element_ty
    i, o = tl.arange(0, SIZE), tl.arange(0, WIDTH)
    square, wide = i[:, None] * SIZE + i[None, :], i[:, None] * WIDTH + o[None, :]
    for back in range(blocks):
        tl.debug_barrier()
        b = blocks - 1 - back
        D = tl.load(L + (b * blocks + b) * SIZE * SIZE + square)
        x = tl.dot(D, -tl.load(Y + b * SIZE * WIDTH + wide), input_precision="ieee", out_dtype=dtype)
        for j in range(b + 1, blocks):
            left = tl.load(L + (b * blocks + j) * SIZE * SIZE + square)
            x = tl.dot(left, tl.load(X + j * SIZE * WIDTH + wide), x, input_precision="ieee", out_dtype=dtype)
        tl.store(X + b * SIZE * WIDTH + wide, x)
    tl.debug_barrier()


@triton.jit
def eliminate(
    G, stride, diagonal, factor, S, L, right, buffer, count, SIZE: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """X = A⁻¹R of a symmetric A = G + factor diag(diagonal) of `count` rows, in blocks, by one program.

    With S_bj what is left of block A_bj, b <= j, when the blocks before b are eliminated, and L_bj = -S_bb⁻¹S_bj:

        S_bj = A_bj + Σ_a<b S_abᵀL_aj,    Y_b = R_b + Σ_a<b L_abᵀY_a,    X_b = S_bb⁻¹Y_b + Σ_j>b L_bj X_j

    S and L lie block by block, and -S_bb⁻¹ where L_bb would; `right` holds R, and gets Y and X behind it, all of them
    padded with zeros to whole blocks. Returns the smallest pivot. The caller forbids pipelining (num_stages=1), which
    would read blocks before they are written.
    """
    dtype: tl.constexpr = G.dtype.element_ty
    i, o = tl.arange(0, SIZE), tl.arange(0, WIDTH)
    square, wide = i[:, None] * SIZE + i[None, :], i[:, None] * WIDTH + o[None, :]
    blocks = tl.cdiv(count, SIZE)
    Y = right + blocks * SIZE * WIDTH
    X = Y + blocks * SIZE * WIDTH
    least = tl.full((), float("inf"), dtype)
    for b in range(blocks):
        tl.debug_barrier()  # what is read below was written before
        row = (b * SIZE + i) < count
        more = tl.load(diagonal + b * SIZE + i, mask=row, other=0.0) * factor
        D = tile_of(G, stride, count, b * SIZE, b * SIZE, SIZE)
        D += tl.where(i[:, None] == i[None, :], more[:, None], 0.0)
        y = tl.load(right + b * SIZE * WIDTH + wide)
        for a in range(b):
            left = tl.trans(tl.load(L + (a * blocks + b) * SIZE * SIZE + square))
            s = tl.load(S + (a * blocks + b) * SIZE * SIZE + square)
            D = tl.dot(left, s, D, input_precision="ieee", out_dtype=dtype)
            y = tl.dot(left, tl.load(Y + a * SIZE * WIDTH + wide), y, input_precision="ieee", out_dtype=dtype)
        tl.store(Y + b * SIZE * WIDTH + wide, y)
        D, low = sweep(D, buffer, tl.minimum(count - b * SIZE, SIZE), SIZE)
        least = tl.minimum(least, low)
        tl.store(L + (b * blocks + b) * SIZE * SIZE + square, D)
        for j in range(b + 1, blocks):
            B = tile_of(G, stride, count, b * SIZE, j * SIZE, SIZE)
            for a in range(b):
                s = tl.trans(tl.load(S + (a * blocks + b) * SIZE * SIZE + square))
                left = tl.load(L + (a * blocks + j) * SIZE * SIZE + square)
                B = tl.dot(s, left, B, input_precision="ieee", out_dtype=dtype)
            tl.store(S + (b * blocks + j) * SIZE * SIZE + square, B)
            left = tl.dot(D, B, input_precision="ieee", out_dtype=dtype)
            tl.store(L + (b * blocks + j) * SIZE * SIZE + square, left)
    back_substitute(L, Y, X, blocks, SIZE, WIDTH)
    return least


@triton.jit
def refine(G, stride, diagonal, factor, L, right, count, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """X += A⁻¹(R - AX), after `eliminate` with the same arguments; R and Y are lost.

    The inverses of blocks in L leave an error of eps cond(A) in X, also along the largest eigenvectors of A, where a
    factor would leave eps: what multiplies X by as much again would see it. G has both its triangles.
    """
    dtype: tl.constexpr = G.dtype.element_ty
    i, o = tl.arange(0, SIZE), tl.arange(0, WIDTH)
    square, wide = i[:, None] * SIZE + i[None, :], i[:, None] * WIDTH + o[None, :]
    blocks = tl.cdiv(count, SIZE)
    Y = right + blocks * SIZE * WIDTH
    X = Y + blocks * SIZE * WIDTH
    for b in range(blocks):
        tl.debug_barrier()
        more = tl.load(diagonal + b * SIZE + i, mask=(b * SIZE + i) < count, other=0.0) * factor
        y = tl.load(right + b * SIZE * WIDTH + wide) - more[:, None] * tl.load(X + b * SIZE * WIDTH + wide)
        for j in range(blocks):
            part = -tile_of(G, stride, count, b * SIZE, j * SIZE, SIZE)
            y = tl.dot(part, tl.load(X + j * SIZE * WIDTH + wide), y, input_precision="ieee", out_dtype=dtype)
        for a in range(b):
            left = tl.trans(tl.load(L + (a * blocks + b) * SIZE * SIZE + square))
            y = tl.dot(left, tl.load(Y + a * SIZE * WIDTH + wide), y, input_precision="ieee", out_dtype=dtype)
        tl.store(Y + b * SIZE * WIDTH + wide, y)
    back_substitute(L, Y, right, blocks, SIZE, WIDTH)
    for b in range(blocks):
        at = b * SIZE * WIDTH + wide
        tl.store(X + at, tl.load(X + at) + tl.load(right + at))
    tl.debug_barrier()


@triton.jit
def contraction(size):
    """c, and the rate, by which the error of X <- (R - (A - cI)X)/c falls, where |A - I| is at most `size`."""
    c = 1.0 + size / 2
    return c, size / 2 / c


@triton.jit
def iterate(G, stride, right, count, size, ROWS: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr):
    """X = (I + G)⁻¹R where |G| is at most `size` < NEAR, in the memory and with the arguments of `eliminate`.

    Each step reads G once, where `eliminate` waits for one pair of pivots after the other.
    """
    dtype: tl.constexpr = G.dtype.element_ty
    i, t, o = tl.arange(0, ROWS), tl.arange(0, DEPTH), tl.arange(0, WIDTH)
    blocks = tl.cdiv(count, DEPTH)
    wide = i[:, None] * WIDTH + o[None, :]
    inside = (i < blocks * DEPTH)[:, None] & (o >= 0)[None, :]
    X = right + 2 * blocks * DEPTH * WIDTH
    tl.debug_barrier()  # what is read below was written before
    R = tl.load(right + wide, mask=inside, other=0.0)
    c, rate = contraction(size)
    over = 1.0 / c
    x, error = R * over, rate
    while error > (1e-17 if dtype == tl.float64 else 1e-8):
        tl.store(X + wide, x, mask=inside)
        tl.debug_barrier()
        x = R + (c - 1.0) * x
        for b in range(blocks):
            j = b * DEPTH + t
            part = tl.load(
                G + i[:, None] * stride + j[None, :], mask=(i < count)[:, None] & (j < count)[None, :], other=0.0
            )
            some = tl.load(X + j[:, None] * WIDTH + o[None, :])
            x = tl.dot(-part, some, x, input_precision="ieee", out_dtype=dtype)
        tl.debug_barrier()  # what the next step writes was read
        x *= over
        error *= rate
    tl.store(X + wide, x, mask=inside)
    tl.debug_barrier()


@triton.jit
def distance(G, stride, count, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """|G|, the root of the sum of its squares."""
    i, t = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, DEPTH), dtype=G.dtype.element_ty)
    for start in range(0, count, DEPTH):
        j = start + t
        part = tl.load(
            G + i[:, None] * stride + j[None, :], mask=(i < count)[:, None] & (j < count)[None, :], other=0.0
        )
        total += part * part
    return tl.sqrt(tl.sum(total))


@triton.jit
def solve_near_identity(C, E, size, SIZE: tl.constexpr):
    """C⁻¹E where |C - I| is at most `size`, as `iterate`, all of it in registers."""
    i = tl.arange(0, SIZE)
    c, rate = contraction(size)
    over = 1.0 / c
    R = tl.where(i[:, None] == i[None, :], 1.0 - C * over, -C * over)
    E *= over
    X = E
    error = rate
    while error > (1e-17 if C.dtype == tl.float64 else 1e-8):
        X = tl.dot(R, X, E, input_precision="ieee", out_dtype=C.dtype)
        error *= rate
    return X


@triton.jit
def solve_by_sweeps(C, E, buffer, n, stride, TWO: tl.constexpr, SIZE: tl.constexpr, BLOCK_M: tl.constexpr):
    """C⁻¹E for any C, through memory.

    Where C has two halves, C = [A B; Bᵀ D], the second to be swept is S = D - BᵀA⁻¹B. An inverse leaves an error of
    eps cond(C) in X also along the largest eigenvectors of C, where U would multiply it: once more with what is left.
    """
    i, o = tl.arange(0, SIZE), tl.arange(0, BLOCK_M)
    first = i[:, None] * BLOCK_M + o[None, :]
    second = first + SIZE * BLOCK_M
    whole = tl.arange(0, 2 * SIZE if TWO else SIZE)[:, None] * BLOCK_M + o[None, :]
    of_X = buffer + 2 * SIZE * SIZE
    tl.store(of_X + whole, E)
    tl.debug_barrier()
    E1 = tl.load(of_X + first)
    A = tile_of(C, stride, n, 0, 0, SIZE)
    minus_A, _ = sweep(A, buffer, tl.minimum(n, SIZE), SIZE)
    X = product(minus_A, -E1)
    if TWO:
        E2 = tl.load(of_X + second)
        B = tile_of(C, stride, n, 0, SIZE, SIZE)
        D = tile_of(C, stride, n, SIZE, SIZE, SIZE)
        AB = product(minus_A, B)  # -A⁻¹B
        S = D + product(tl.trans(B), AB)
        minus_S, _ = sweep(S, buffer + SIZE * SIZE, n - SIZE, SIZE)
        rest = E2 + product(tl.trans(AB), E1)
        x = product(minus_S, -rest)
        X += product(AB, x)
        E1 -= product(A, X) + product(B, x)
        E2 -= product(tl.trans(B), X) + product(D, x)
        rest = E2 + product(tl.trans(AB), E1)
        more = product(minus_S, -rest)
        X += product(AB, more)
        tl.store(of_X + second, x + more)
    else:
        E1 -= product(A, X)
    X += product(minus_A, -E1)
    tl.store(of_X + first, X)
    tl.debug_barrier()
    return tl.load(of_X + whole)


def readable(rows: Tensor) -> Tensor:
    """Rows that the kernels can read: Triton's float64 products take no operand that comes from 16 bits."""
    return (rows.float() if rows.element_size() < 4 else rows).contiguous()
