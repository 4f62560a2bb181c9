"""Linear algebra of small symmetric matrices inside Triton kernels: what one program can do with a few blocks."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from sepsa.heads.least_squares.triton.tiles import add_product, load, product, store

# Up to this distance from the identity, where most systems of a block are after some batches, `iterate` takes less time
# than what waits for one pair of pivots after the other.
NEAR: constexpr = constexpr(0.75)


@triton.jit
def tile_of(C, stride, n, row, column, SIZE: constexpr):
    """A square of C, which goes on as the identity."""
    i, j = row + tl.arange(0, SIZE), column + tl.arange(0, SIZE)
    part = load(C, stride, i, j, i < n, j < n)
    return tl.where((i[:, None] == j[None, :]) & (i >= n)[:, None], 1.0, part)


@triton.jit
def sweep(A, buffer, count, SIZE: constexpr):
    """-A⁻¹ of a symmetric A whose rows from `count` on are the identity's, or the same with those of them unswept.

    With Q two pivots, D = A_QQ and V = A_Q., after which V_Q is replaced by -I, a sweep is

        A <- A with the rows and columns Q set to zero, minus VᵀD⁻¹V

    No entry is a difference that should have been a product, and nothing is left to substitute back.
    """
    i, j = tl.arange(0, SIZE), tl.arange(0, SIZE)
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
        u_i, v_i = tl.load(u + i), tl.load(v + i)
        u_j, v_j = tl.load(u + j), tl.load(v + j)
        u_i = tl.where(i == q, -1.0, tl.where(i == q + 1, 0.0, u_i))
        v_i = tl.where(i == q + 1, -1.0, tl.where(i == q, 0.0, v_i))
        u_j = tl.where(j == q, -1.0, tl.where(j == q + 1, 0.0, u_j))
        v_j = tl.where(j == q + 1, -1.0, tl.where(j == q, 0.0, v_j))
        A = tl.where(swept[:, None] | ((j == q) | (j == q + 1))[None, :], 0.0, A)
        A -= u_i[:, None] * ((d * u_j - b * v_j) * over)[None, :] + v_i[:, None] * ((a * v_j - b * u_j) * over)[None, :]
    return A


@triton.jit
def square_at(blocks, row, column, count, SIZE: constexpr):
    """Where the square block at this row and column lies, of `count` a row that follow each other in memory."""
    i = tl.arange(0, SIZE)
    return blocks + (row * count + column) * SIZE * SIZE + i[:, None] * SIZE + i[None, :]


@triton.jit
def rows_at(matrix, block, SIZE: constexpr, WIDTH: constexpr):
    """Where a block of SIZE rows of a matrix with WIDTH columns lies."""
    return matrix + block * SIZE * WIDTH + tl.arange(0, SIZE)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def back_substitute(L, Y, X, blocks, SIZE: constexpr, WIDTH: constexpr):
    """X_b = S_bb⁻¹Y_b + Σ_j>b L_bj X_j from the last block to the first, with the L of `eliminate`."""
    for back in range(blocks):
        tl.debug_barrier()
        b = blocks - 1 - back
        x = product(tl.load(square_at(L, b, b, blocks, SIZE)), -tl.load(rows_at(Y, b, SIZE, WIDTH)))
        for j in range(b + 1, blocks):
            x = add_product(tl.load(square_at(L, b, j, blocks, SIZE)), tl.load(rows_at(X, j, SIZE, WIDTH)), x)
        tl.store(rows_at(X, b, SIZE, WIDTH), x)
    tl.debug_barrier()


@triton.jit
def eliminate(G, stride, S, L, right, buffer, count, SIZE: constexpr, WIDTH: constexpr):
    """X = (I + G)⁻¹R of a symmetric G of `count` rows, in blocks, by one program.

    With S_bj what is left of block (I + G)_bj, b <= j, when the blocks before b are eliminated, and L_bj = -S_bb⁻¹S_bj:

        S_bj = (I + G)_bj + Σ_a<b S_abᵀL_aj,    Y_b = R_b + Σ_a<b L_abᵀY_a,    X_b = S_bb⁻¹Y_b + Σ_j>b L_bj X_j

    S and L lie block by block, and -S_bb⁻¹ where L_bb would; `right` holds R, and gets Y and X behind it, all of them
    padded with zeros to whole blocks. The caller forbids pipelining (num_stages=1), which would read blocks before they
    are written.
    """
    i = tl.arange(0, SIZE)
    blocks = tl.cdiv(count, SIZE)
    Y = right + blocks * SIZE * WIDTH
    X = Y + blocks * SIZE * WIDTH
    for b in range(blocks):
        tl.debug_barrier()  # what is read below was written before
        D = tile_of(G, stride, count, b * SIZE, b * SIZE, SIZE)
        D += tl.where((i[:, None] == i[None, :]) & (b * SIZE + i < count)[:, None], 1.0, 0.0)
        y = tl.load(rows_at(right, b, SIZE, WIDTH))
        for a in range(b):
            left = tl.trans(tl.load(square_at(L, a, b, blocks, SIZE)))
            D = add_product(left, tl.load(square_at(S, a, b, blocks, SIZE)), D)
            y = add_product(left, tl.load(rows_at(Y, a, SIZE, WIDTH)), y)
        tl.store(rows_at(Y, b, SIZE, WIDTH), y)
        D = sweep(D, buffer, tl.minimum(count - b * SIZE, SIZE), SIZE)
        tl.store(square_at(L, b, b, blocks, SIZE), D)
        for j in range(b + 1, blocks):
            B = tile_of(G, stride, count, b * SIZE, j * SIZE, SIZE)
            for a in range(b):
                s = tl.trans(tl.load(square_at(S, a, b, blocks, SIZE)))
                B = add_product(s, tl.load(square_at(L, a, j, blocks, SIZE)), B)
            tl.store(square_at(S, b, j, blocks, SIZE), B)
            tl.store(square_at(L, b, j, blocks, SIZE), product(D, B))
    back_substitute(L, Y, X, blocks, SIZE, WIDTH)


@triton.jit
def refine(G, stride, L, right, count, SIZE: constexpr, WIDTH: constexpr):
    """X += (I + G)⁻¹(R - (I + G)X), after `eliminate` with the same arguments; R and Y are lost.

    The inverses of blocks in L leave an error of eps cond(I + G) in X, also along the largest eigenvectors of G, where
    a factor would leave eps: what multiplies X by as much again would see it. G has both its triangles.
    """
    blocks = tl.cdiv(count, SIZE)
    Y = right + blocks * SIZE * WIDTH
    X = Y + blocks * SIZE * WIDTH
    for b in range(blocks):
        tl.debug_barrier()
        y = tl.load(rows_at(right, b, SIZE, WIDTH)) - tl.load(rows_at(X, b, SIZE, WIDTH))
        for j in range(blocks):
            part = -tile_of(G, stride, count, b * SIZE, j * SIZE, SIZE)
            y = add_product(part, tl.load(rows_at(X, j, SIZE, WIDTH)), y)
        for a in range(b):
            left = tl.trans(tl.load(square_at(L, a, b, blocks, SIZE)))
            y = add_product(left, tl.load(rows_at(Y, a, SIZE, WIDTH)), y)
        tl.store(rows_at(Y, b, SIZE, WIDTH), y)
    back_substitute(L, Y, right, blocks, SIZE, WIDTH)
    for b in range(blocks):
        at = rows_at(X, b, SIZE, WIDTH)
        tl.store(at, tl.load(at) + tl.load(rows_at(right, b, SIZE, WIDTH)))
    tl.debug_barrier()


@triton.jit
def contraction(size):
    """c, and the rate, by which the error of X <- (R - (A - cI)X)/c falls, where |A - I| is at most `size`."""
    c = 1.0 + size / 2
    return c, size / 2 / c


@triton.jit
def iterate(G, stride, right, count, size, ROWS: constexpr, DEPTH: constexpr, WIDTH: constexpr):
    """X = (I + G)⁻¹R where |G| is at most `size` < NEAR, in the memory and with the arguments of `eliminate`.

    Each step reads G once, where `eliminate` waits for one pair of pivots after the other.
    """
    i, o = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    blocks = tl.cdiv(count, DEPTH)
    inside, every = i < blocks * DEPTH, o >= 0
    X = right + 2 * blocks * DEPTH * WIDTH
    tl.debug_barrier()  # what is read below was written before
    R = load(right, WIDTH, i, o, inside, every)
    c, rate = contraction(size)
    over = 1.0 / c
    x, error = R * over, rate
    while error > (1e-17 if R.dtype == tl.float64 else 1e-8):
        store(X, WIDTH, i, o, x, inside, every)
        tl.debug_barrier()
        x = R + (c - 1.0) * x
        for b in range(blocks):
            j = b * DEPTH + tl.arange(0, DEPTH)
            part = load(G, stride, i, j, i < count, j < count)
            x = add_product(-part, tl.load(rows_at(X, b, DEPTH, WIDTH)), x)
        tl.debug_barrier()  # what the next step writes was read
        x *= over
        error *= rate
    store(X, WIDTH, i, o, x, inside, every)
    tl.debug_barrier()


@triton.jit
def distance(G, stride, count, ROWS: constexpr, DEPTH: constexpr):
    """|G|, the root of the sum of its squares."""
    i = tl.arange(0, ROWS)
    total = tl.zeros((ROWS, DEPTH), dtype=G.dtype.element_ty)
    for start in range(0, count, DEPTH):
        j = start + tl.arange(0, DEPTH)
        part = load(G, stride, i, j, i < count, j < count)
        total += part * part
    return tl.sqrt(tl.sum(total))


@triton.jit
def solve_near_identity(C, E, size, SIZE: constexpr):
    """C⁻¹E where |C - I| is at most `size`, as `iterate`, all of it in registers."""
    i = tl.arange(0, SIZE)
    c, rate = contraction(size)
    over = 1.0 / c
    R = tl.where(i[:, None] == i[None, :], 1.0 - C * over, -C * over)
    E *= over
    X = E
    error = rate
    while error > (1e-17 if C.dtype == tl.float64 else 1e-8):
        X = add_product(R, X, E)
        error *= rate
    return X


@triton.jit
def solve_by_sweeps(C, E, buffer, n, stride, TWO: constexpr, SIZE: constexpr, BLOCK_M: constexpr):
    """C⁻¹E for any C, through memory.

    Where C has two halves, C = [A B; Bᵀ D], the second to be swept is S = D - BᵀA⁻¹B. An inverse leaves an error of
    eps cond(C) in X also along the largest eigenvectors of C, where U would multiply it: once more with what is left.
    """
    of_X = buffer + 2 * SIZE * SIZE
    whole = rows_at(of_X, 0, 2 * SIZE if TWO else SIZE, BLOCK_M)
    first, second = rows_at(of_X, 0, SIZE, BLOCK_M), rows_at(of_X, 1, SIZE, BLOCK_M)
    tl.store(whole, E)
    tl.debug_barrier()
    E1 = tl.load(first)
    A = tile_of(C, stride, n, 0, 0, SIZE)
    minus_A = sweep(A, buffer, tl.minimum(n, SIZE), SIZE)
    X = product(minus_A, -E1)
    if TWO:
        E2 = tl.load(second)
        B = tile_of(C, stride, n, 0, SIZE, SIZE)
        D = tile_of(C, stride, n, SIZE, SIZE, SIZE)
        AB = product(minus_A, B)  # -A⁻¹B
        S = D + product(tl.trans(B), AB)
        minus_S = sweep(S, buffer + SIZE * SIZE, n - SIZE, SIZE)
        rest = E2 + product(tl.trans(AB), E1)
        x = product(minus_S, -rest)
        X += product(AB, x)
        E1 -= product(A, X) + product(B, x)
        E2 -= product(tl.trans(B), X) + product(D, x)
        rest = E2 + product(tl.trans(AB), E1)
        more = product(minus_S, -rest)
        X += product(AB, more)
        tl.store(second, x + more)
    else:
        E1 -= product(A, X)
    X += product(minus_A, -E1)
    tl.store(first, X)
    tl.debug_barrier()
    return tl.load(whole)


def readable(rows: Tensor) -> Tensor:
    """Rows that the kernels can read: Triton's float64 products take no operand that comes from 16 bits."""
    return (rows.float() if rows.element_size() < 4 else rows).contiguous()
