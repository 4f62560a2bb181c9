"""A head in the kernels: Bierman's update of UDUᵀ.

Symbols are those of `sepsa.heads.least_squares`: φ (p,) the features the head sees, W (m, p) the head, B = A⁻¹ the
inverse curvature, λ the forgetting. B is stored as UDUᵀ, U unit upper triangular with its columns one after the other,
D diagonal. A row that stands for ω samples costs one pass over U (Bierman), 3p²/2 multiply-adds, and leaves D positive:

    f = Uᵀφ,  v = Df,  α_j = α_{j-1} + ω v_j f_j,  α_{-1} = 1
    D_j <- D_j α_{j-1}/α_j,   U_ij <- U_ij - ω (f_j/α_{j-1}) b_i,   b_i <- b_i + U_ij v_j  for i < j,   b_j = v_j
    W <- W + ω (y - Wφ) bᵀ/α_{p-1},   since b ends as Bφ and α as 1 + ωφᵀBφ                               (17), (18)
"""

from __future__ import annotations

from sepsa.compiled.kernels import inlined


@inlined
def pivot(D, j, f, omega, alpha, inverse):
    """D_j of the update, v_j, the factor of b in column j, and α_j with its inverse; `inverse` is that of α."""
    v, s, before = D[j] * f, -omega * f * inverse, alpha
    alpha += omega * v * f
    inverse = 1.0 / alpha
    D[j] *= before * inverse
    return v, s, alpha, inverse


@inlined
def rank_one(U, D, phi, start, omega, b):
    """B <- B - ωBφφᵀB/(1 + ωφᵀBφ) for a φ that is zero before `start`. Leaves b = Bφ; returns 1 + ωφᵀBφ.

    Four columns at a time after the first few: b passes through the registers once for all four.
    """
    p = phi.size
    alpha, inverse = 1.0, 1.0
    for j in range(start):
        b[j] = 0.0
    j = start
    while j < p and (p - j) % 4:
        column = U[j * (j - 1) // 2 : j * (j - 1) // 2 + j]
        f = phi[j]
        for i in range(start, j):
            f += column[i] * phi[i]
        v, s, alpha, inverse = pivot(D, j, f, omega, alpha, inverse)
        b[j] = v
        for i in range(j):
            u = column[i]
            column[i] = u + s * b[i]
            b[i] += u * v
        j += 1
    while j < p:
        at0 = j * (j - 1) // 2
        at1, at2, at3 = at0 + j, at0 + 2 * j + 1, at0 + 3 * j + 3
        column0, column1, column2, column3 = U[at0 : at0 + j], U[at1 : at1 + j], U[at2 : at2 + j], U[at3 : at3 + j]
        f0, f1, f2, f3 = 0.0, 0.0, 0.0, 0.0
        for i in range(start, j):
            f0 += column0[i] * phi[i]
            f1 += column1[i] * phi[i]
            f2 += column2[i] * phi[i]
            f3 += column3[i] * phi[i]
        # The corner where the four columns meet the diagonal.
        u10, u20, u21 = U[at1 + j], U[at2 + j], U[at2 + j + 1]
        u30, u31, u32 = U[at3 + j], U[at3 + j + 1], U[at3 + j + 2]
        f0 += phi[j]
        f1 += phi[j + 1] + u10 * phi[j]
        f2 += phi[j + 2] + u20 * phi[j] + u21 * phi[j + 1]
        f3 += phi[j + 3] + u30 * phi[j] + u31 * phi[j + 1] + u32 * phi[j + 2]
        v0, s0, alpha, inverse = pivot(D, j, f0, omega, alpha, inverse)
        v1, s1, alpha, inverse = pivot(D, j + 1, f1, omega, alpha, inverse)
        v2, s2, alpha, inverse = pivot(D, j + 2, f2, omega, alpha, inverse)
        v3, s3, alpha, inverse = pivot(D, j + 3, f3, omega, alpha, inverse)
        for i in range(j):
            u0, u1, u2, u3, c = column0[i], column1[i], column2[i], column3[i], b[i]
            column0[i] = u0 + s0 * c
            c += u0 * v0
            column1[i] = u1 + s1 * c
            c += u1 * v1
            column2[i] = u2 + s2 * c
            c += u2 * v2
            column3[i] = u3 + s3 * c
            b[i] = c + u3 * v3
        U[at1 + j] = u10 + s1 * v0
        c = v0 + u10 * v1
        U[at2 + j] = u20 + s2 * c
        c += u20 * v2
        U[at3 + j] = u30 + s3 * c
        b[j] = c + u30 * v3
        U[at2 + j + 1] = u21 + s2 * v1
        c = v1 + u21 * v2
        U[at3 + j + 1] = u31 + s3 * c
        b[j + 1] = c + u31 * v3
        U[at3 + j + 2] = u32 + s3 * v2
        b[j + 2] = v2 + u32 * v3
        b[j + 3] = v3
        j += 4
    return alpha


@inlined
def learn_row(U, D, W, energy, phi, start, e, omega, b):
    """Equations 17 and 18 on a row that stands for ω samples, with residuals e (m,). Returns 1 + ωφᵀBφ."""
    g = rank_one(U, D, phi, start, omega, b)
    for k in range(e.size):
        row, step = W[k], omega * e[k] / g
        for j in range(phi.size):
            row[j] += step * b[j]
        energy[k] += e[k] * step
    return g


@inlined
def leverage(U, D, seen):
    """φᵀBφ for the part of φ that a head sees."""
    total = 0.0
    for j in range(D.size):
        column = U[j * (j - 1) // 2 : j * (j - 1) // 2 + j]
        f = seen[j]
        for k in range(j):
            f += column[k] * seen[k]
        total += D[j] * f * f
    return total
