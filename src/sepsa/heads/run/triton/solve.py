"""Systems of at most 128 rows inside Triton kernels, solved in the registers of one program."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

from sepsa.heads.run.triton.tiles import add_product, load, load_vector, product

# Up to this distance from the identity, where most systems of a block are after some batches, an iteration takes less
# time than what waits for one pair of pivots after the other.
NEAR: constexpr = constexpr(0.75)


@triton.jit
def tile_of(M, stride, scale, flag, n, row, column, ROWS: constexpr, COLUMNS: constexpr):
    """A part of I + G, G = diag(scale) M diag(scale) of n rows, which go on as those of the identity; G = 0 without the
    flag.
    """
    i, j = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    part = load(M, stride, i, j, i < n, j < n)
    part *= load_vector(scale, i, i < n)[:, None] * load_vector(scale, j, j < n)[None, :]
    part = tl.where(flag, part, 0.0)
    return tl.where(i[:, None] == j[None, :], part + 1.0, part)


@triton.jit
def squares(A, SIZE: constexpr):
    """The sum of squares of A - I."""
    i = tl.arange(0, SIZE)
    off = tl.where(i[:, None] == i[None, :], A - 1.0, A)
    return tl.sum(off * off)


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
def solve(M, stride, scale, flag, E1, E2, buffer, count, FIRST: constexpr, SECOND: constexpr):
    """(I + G)⁻¹[E1; E2], G of `tile_of`, whose `count` rows are in FIRST and, where there are more, SECOND rows.

    With [A B; Bᵀ D] = I + G: where |G| < NEAR, X <- X + (E - (I + G)X)/c. Else by A⁻¹ and S⁻¹, S = D - BᵀA⁻¹B, and once
    more with what is left, because an inverse leaves an error of eps cond(I + G) also along the largest eigenvectors of
    G, where what multiplies X would see it.
    """
    A = tile_of(M, stride, scale, flag, count, 0, 0, FIRST, FIRST)
    total = squares(A, FIRST)
    if SECOND:
        B = tile_of(M, stride, scale, flag, count, 0, FIRST, FIRST, SECOND)
        D = tile_of(M, stride, scale, flag, count, FIRST, FIRST, SECOND, SECOND)
        total += 2 * tl.sum(B * B) + squares(D, SECOND)
    size = tl.sqrt(total)
    if size < NEAR:
        c = 1.0 + size / 2
        rate, over = size / 2 / c, 1.0 / c
        X1, X2 = E1 * over, E2 * over
        error = rate
        while error > (1e-17 if E1.dtype == tl.float64 else 1e-8):
            rest = E1 - product(A, X1)
            if SECOND:
                rest -= product(B, X2)
                X2 += (E2 - product(tl.trans(B), X1) - product(D, X2)) * over
            X1 += rest * over
            error *= rate
    else:
        minus_A = sweep(A, buffer, tl.minimum(count, FIRST), FIRST)
        X1, X2 = product(minus_A, -E1), E2
        rest = product(A, X1) - E1
        if SECOND:
            AB = product(minus_A, B)  # -A⁻¹B
            S = D + product(tl.trans(B), AB)
            minus_S = sweep(S, buffer + FIRST * FIRST, count - FIRST, SECOND)
            X2 = product(minus_S, -(E2 + product(tl.trans(AB), E1)))
            X1 += product(AB, X2)
            rest = product(A, X1) + product(B, X2) - E1
            more = product(tl.trans(B), X1) + product(D, X2) - E2
            more = product(minus_S, add_product(tl.trans(AB), rest, more))
            X2 += more
            X1 += product(AB, more)
        X1 += product(minus_A, rest)
    return X1, X2
