"""Linear algebra of the compiled update of recursive least squares: factors, products and Potter's update in loops."""

from __future__ import annotations

import math

from sepsa.compiled.kernels import called, inlined


@called
def copy(x, into):
    """into <- x."""
    for i in range(x.size):
        into[i] = x[i]


@called
def copy_rows(X, into):
    """into <- X, row after row."""
    for i in range(X.shape[0]):
        copy(X[i], into[i])


@called
def fill(into, value):
    """into <- value."""
    for i in range(into.size):
        into[i] = value


@called
def scale(x, by):
    """x <- by x."""
    for i in range(x.size):
        x[i] *= by


@called
def add_scaled(x, by, into):
    """into <- into + by x."""
    for i in range(x.size):
        into[i] += by * x[i]


@called
def sum_of_squares(X):
    """|X|²."""
    total = 0.0
    for i in range(X.shape[0]):
        for j in range(X.shape[1]):
            total += X[i, j] ** 2
    return total


@inlined
def multiply(A, x, into):
    """into <- Ax. Rows are slices, which LLVM vectorizes."""
    for i in range(A.shape[0]):
        row, total = A[i], 0.0
        for j in range(x.size):
            total += row[j] * x[j]
        into[i] = total


@called
def cholesky(A, inverse):
    """The lower triangle of A becomes its Cholesky factor, two rows at a time. False: A is not positive definite.

    `inverse` gets the inverse of the diagonal: a product costs less than a quotient.
    """
    p = A.shape[0]
    for i in range(0, p, 2):
        k = min(i + 1, p - 1)
        for j in range(i):
            a, b = 0.0, 0.0
            for q in range(j):
                a += A[i, q] * A[j, q]
                b += A[k, q] * A[j, q]
            A[i, j] = (A[i, j] - a) * inverse[j]
            if k > i:
                A[k, j] = (A[k, j] - b) * inverse[j]
        for r in range(i, k + 1):
            for j in range(i, r + 1):
                total = A[r, j]
                for q in range(j):
                    total -= A[r, q] * A[j, q]
                if j < r:
                    A[r, j] = total * inverse[j]
                elif total > 0.0:
                    A[r, r] = math.sqrt(total)
                    inverse[r] = 1.0 / A[r, r]
                else:
                    return False
    return True


@called
def forward(C, X):
    """X <- C⁻¹X for lower C."""
    for i in range(X.shape[0]):
        for j in range(i):
            c = C[i, j]
            for q in range(X.shape[1]):
                X[i, q] -= c * X[j, q]
        c = 1.0 / C[i, i]
        for q in range(X.shape[1]):
            X[i, q] *= c


@called
def backward(C, X):
    """X <- C⁻ᵀX for lower C."""
    for i in range(X.shape[0] - 1, -1, -1):
        c = 1.0 / C[i, i]
        for q in range(X.shape[1]):
            X[i, q] *= c
        for j in range(i):
            c = C[i, j]
            for q in range(X.shape[1]):
                X[j, q] -= c * X[i, q]


@called
def forward_row(C, x):
    """x <- C⁻¹x for lower C."""
    for i in range(x.size):
        total = x[i]
        for j in range(i):
            total -= C[i, j] * x[j]
        x[i] = total / C[i, i]


@called
def backward_row(C, x):
    """x <- C⁻ᵀx for lower C."""
    for i in range(x.size - 1, -1, -1):
        x[i] /= C[i, i]
        c = x[i]
        for j in range(i):
            x[j] -= C[i, j] * c


@called
def add_solution(C, x, T, w):
    """w <- w + Tᵀz for z = (CCᵀ)⁻¹x, which x becomes; returns xᵀz."""
    forward_row(C, x)
    size = 0.0
    for i in range(x.size):
        size += x[i] * x[i]
    backward_row(C, x)
    for i in range(x.size):
        add_scaled(T[i], x[i], w)
    return size


@called
def step_head(T, W, f, e, u, energy, g):
    """The half of `potter` that leaves T as it is: u = fᵀT, and W and energy in place, for g = 1 + fᵀf."""
    p, m = T.shape[0], W.shape[0]
    u[:] = 0.0
    for i in range(p):
        c = f[i]
        for j in range(p):
            u[j] += c * T[i, j]
    for o in range(m):
        c = e[o] / g
        energy[o] += e[o] * c
        for j in range(p):
            W[o, j] += c * u[j]


@called
def step_root(T, f, u, g):
    """The other half: T in place."""
    beta = -1.0 / (g + math.sqrt(g))
    for i in range(T.shape[0]):
        c = beta * f[i]
        for j in range(T.shape[0]):
            T[i, j] += c * u[j]


@called
def potter(T, W, f, e, u, energy):
    """`least_squares.potter` in place, u a buffer."""
    g = 1.0
    for j in range(T.shape[0]):
        g += f[j] * f[j]
    step_head(T, W, f, e, u, energy, g)
    step_root(T, f, u, g)


@called
def add_entries(row, j, sums):
    """row[j : j + 4] += sums, as far as it goes."""
    row[j] += sums[0]
    if j + 1 < row.size:
        row[j + 1] += sums[1]
    if j + 2 < row.size:
        row[j + 2] += sums[2]
    if j + 3 < row.size:
        row[j + 3] += sums[3]


@inlined
def plus(sums, a, x):
    """sums + a x, of four numbers."""
    return sums[0] + a * x[0], sums[1] + a * x[1], sums[2] + a * x[2], sums[3] + a * x[3]


@called
def filled(A, i, stop):
    """How many columns of rows i to stop - 1 there are up to the last that is not zero: few in a triangle."""
    end = A.shape[1]
    while end > 1:
        for r in range(i, stop):
            if A[r, end - 1] != 0.0:
                return end
        end -= 1
    return end


@called
def add_product(A, left, right, lower):
    """A += left rightᵀ, four by four entries at a time; with `lower` the lower triangle, and some entries beside it."""
    rows, columns = left.shape[0], right.shape[0]
    for i in range(0, rows, 4):
        i1, i2, i3 = min(i + 1, rows - 1), min(i + 2, rows - 1), min(i + 3, rows - 1)
        end = filled(left, i, i3 + 1)
        for j in range(0, min(i + 4, columns) if lower else columns, 4):
            j1, j2, j3 = min(j + 1, columns - 1), min(j + 2, columns - 1), min(j + 3, columns - 1)
            a = b = c = d = (0.0, 0.0, 0.0, 0.0)
            for q in range(end):
                x = right[j, q], right[j1, q], right[j2, q], right[j3, q]
                a, b = plus(a, left[i, q], x), plus(b, left[i1, q], x)
                c, d = plus(c, left[i2, q], x), plus(d, left[i3, q], x)
            add_entries(A[i], j, a)
            if i1 > i:
                add_entries(A[i1], j, b)
            if i2 > i1:
                add_entries(A[i2], j, c)
            if i3 > i2:
                add_entries(A[i3], j, d)
