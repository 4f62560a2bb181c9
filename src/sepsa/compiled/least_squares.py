"""One update of recursive least squares as one compiled call: `least_squares` in loops, symbols as there.

A call learns everything or nothing: it computes in buffers, checks the values, and stores last, so that neither an
interrupt nor a bad value can leave a half-updated state.

Inside a training step the caches are cold, and each array that goes in and each call of torch before it costs more than
the arithmetic. So the state lies in one array, and features and targets are read where they are, by their addresses.
"""

from __future__ import annotations

import math
import struct
from collections import namedtuple
from collections.abc import Sequence

import numpy as np

from sepsa import restoration
from sepsa.compiled.kernels import Function, array_at, called, kernel
from sepsa.compiled.linear_algebra import (
    add_product,
    add_solution,
    cholesky,
    copy,
    copy_rows,
    forward,
    multiply,
    potter,
    scale,
    step_head,
    step_root,
    sum_of_squares,
)

# What this form of the update shares with that in torch.
# Above this squared size the product FFᵀ rounds away the identity it is added to; `block_by_qr` squares nothing.
PRODUCT_LIMIT = 1e10
# T absorbs H when H has grown by this factor, or fallen by its inverse, or after PENDING_LIMIT updates.
GROWTH_LIMIT = 1e6
PENDING_LIMIT = 256
# Fewer rows of the ridge than this cost less one after the other than as a block.
ROW_LIMIT = 4
# Positions in a head's counters: updates, effective samples, the next coordinate to get its ridge back, the updates
# gathered in H, and the trace that they added to it.
STEPS, SAMPLES, CURSOR, PENDING, GROWTH = range(5)

# What a call says: learned, not finite, or too large for products, which the QR route takes.
LEARNED, NOT_FINITE, TOO_LARGE = range(3)


@called
def whiten(T, W, Phi, Y, F, E):
    """F = TΦᵀ (p, n) and E = (Y - ΦWᵀ)ᵀ (m, n); returns the sums of their squares."""
    n, m = len(Phi), len(W)
    F[:] = 0.0
    if n > 1:
        add_product(F, T, Phi, False)
        subtract_outputs(W, Phi, Y, E)
    else:
        multiply(T, Phi[0], F[:, 0])
        multiply(W, Phi[0], E[:, 0])
        for o in range(m):
            E[o, 0] = Y[0, o] - E[o, 0]
    return sum_of_squares(F), sum_of_squares(E)


@called
def look(T, W, block):
    """The sums of squares of F and E, and whether F is left out: of many rows ΦᵀΦ needs fewer products, and rounds no
    more than FFᵀ where the bound of |F|² that is returned then is small.
    """
    (Phi, Y, F, E), p = block, len(T)
    if 2 * len(Phi) >= 3 * p and len(Phi) >= p + len(W):
        size = sum_of_squares(T) * sum_of_squares(Phi)
        if size <= PRODUCT_LIMIT:
            subtract_outputs(W, Phi, Y, E)
            return size, sum_of_squares(E), True
    size, error = whiten(T, W, Phi, Y, F, E)
    return size, error, False


@called
def subtract_outputs(W, Phi, Y, E):
    """E = (Y - ΦWᵀ)ᵀ (m, n)."""
    E[:] = 0.0
    add_product(E, W, Phi, False)
    for o in range(E.shape[0]):
        for r in range(E.shape[1]):
            E[o, r] = Y[r, o] - E[o, r]


@called
def add_gram(T, E, Phi, F, C, new_H, D):
    """new_H += TΦᵀΦTᵀ, its lower triangle, and D = EΦTᵀ, for n ≥ p + m rows; Φ, F and C are buffers afterwards."""
    p, m = T.shape[0], E.shape[0]
    for i in range(p):
        for r in range(Phi.shape[0]):
            F[i, r] = Phi[r, i]
    C[:] = 0.0
    Phi[: p + m] = 0.0
    add_product(C, F, F, True)
    store_gathered(C, C)
    add_product(Phi[:p], T, C, False)
    add_product(new_H, Phi[:p], T, True)
    add_product(Phi[p : p + m], E, F, False)
    add_product(D, Phi[p : p + m], T, False)


restored_count = called(restoration.due)  # how many coordinates an update restores
restored_coordinate = called(restoration.next_cursor)  # the i-th of them


@called
def gather(T, W, H, energy, left, prior, ridge, block, by_gram, C, fading, new_H, D):
    """`gather` of rows and of the ridge, up to V: new_H (its lower triangle) and Dᵀ; energy and left in place."""
    (Phi, _, F, E), (lam, cursor, count, pending) = block, fading
    (m, n), p = E.shape, T.shape[0]
    for i in range(p):
        for j in range(i + 1):
            new_H[i, j] = lam * H[i, j] if pending else 0.0
        if not pending:
            new_H[i, i] = lam
    D[:] = 0.0
    if by_gram:
        add_gram(T, E, Phi, F, C, new_H, D)
    else:
        add_product(new_H, F, F, True)
        add_product(D, E, F, False)
    for o in range(m):
        energy[o] *= lam
        for r in range(n):
            energy[o] += E[o, r] * E[o, r]
    if count == 0:
        return
    for j in range(p):
        left[j] *= lam
    for step in range(count):
        c = restored_coordinate(cursor, step, p)
        q = max(0.0, ridge[c] - left[c])
        left[c] = ridge[c]
        for i in range(p):
            scaled = q * T[i, c]
            for j in range(i + 1):
                new_H[i, j] += scaled * T[j, c]
        for o in range(m):
            pull = prior[o, c] - W[o, c]
            energy[o] += q * pull * pull
            for i in range(p):
                D[o, i] += q * pull * T[i, c]


# The matrices of a head's memory in their order. The first six are the state, of which H is there where something is
# gathered in it; those from Z on are buffers.
Parts = namedtuple("Parts", "T W energy left counters H prior ridge Z C D rows")


@called
def shapes_of(p: int, m: int) -> Parts:
    """The shapes of the matrices of a head's memory."""
    return Parts(
        T=(p, p),
        W=(m, p),
        energy=(1, m),
        left=(1, p),
        counters=(1, 5),
        H=(p, p),
        prior=(m, p),
        ridge=(1, p),
        Z=(p + m, p),
        C=(p, p),
        D=(m, p),
        rows=(6, max(p, m)),
    )


@called
def block_shapes(n: int, p: int, m: int) -> tuple[tuple[int, int], ...]:
    """The shapes of Φ, Y, F and E."""
    return (n, p), (n, m), (p, n), (m, n)


def length_of(shapes: Sequence[tuple[int, int]]) -> int:
    """How many numbers matrices of these shapes have."""
    length = 0
    for rows, columns in shapes:
        length += rows * columns
    return length


@called
def matrix_at(address, shapes, i):
    """Number i of the matrices of these shapes, which follow each other at an address."""
    for before in range(i):
        address += 8 * shapes[before][0] * shapes[before][1]
    return array_at(address, shapes[i], np.float64)


def matrices(count: int) -> Function:
    """A function of an address and shapes: this many matrices, which follow each other there."""
    each = ", ".join(f"matrix_at(address, shapes, {i})" for i in range(count))
    return called(eval(f"lambda address, shapes: ({each})", {"matrix_at": matrix_at}))


parts_at, block_at = matrices(len(Parts._fields)), matrices(4)


@called
def read(address, single, X):
    """X <- the numbers at an address, which are in float32 where `single`, else in float64."""
    if single:
        copy_rows(array_at(address, X.shape, np.float32), X)
    else:
        copy_rows(array_at(address, X.shape, np.float64), X)


@called
def write(X, address, single):
    """Write X to an address, in float32 where `single`."""
    if single:
        copy_rows(X, array_at(address, X.shape, np.float32))
    else:
        copy_rows(X, array_at(address, X.shape, np.float64))


@called
def write_head(W, head):
    """Make W the weight and the bias of the head."""
    weight, bias, single, k = head
    write(W[:, :k], weight, single)
    write(W[:, k:], bias, single)


@called
def rounded(x, single):
    """x as a head in float32, where `single`, or else float64 has it."""
    return np.float64(np.float32(x)) if single else x


@called
def read_features(address, single, k, Phi):
    """Make Φ of features (n, k), with ones in the columns behind."""
    read(address, single, Phi[:, :k])
    Phi[:, k:] = 1.0


@called
def follow(W, head, new_W):
    """W as the head has it now, with what rounding to the head's dtype lost."""
    weight, bias, single, k = head
    read(weight, single, new_W[:, :k])
    read(bias, single, new_W[:, k:])
    for o in range(W.shape[0]):
        for j in range(W.shape[1]):
            new_W[o, j] = W[o, j] + (new_W[o, j] - rounded(W[o, j], single))


@called
def fits(W, single):
    """Whether W is finite in the head's dtype."""
    for o in range(W.shape[0]):
        for j in range(W.shape[1]):
            if not abs(rounded(W[o, j], single)) < np.inf:
                return False
    return True


@called
def solve_gathered(T, H, C, D, inverse, new_W, new_energy):
    """W += (H⁻¹D)ᵀT by H = CCᵀ, and the objective falls by DᵀH⁻¹D = |C⁻¹D|². False: H is not positive definite."""
    copy_rows(H, C)
    if not cholesky(C, inverse):
        return False
    for o in range(new_W.shape[0]):
        new_energy[o] -= add_solution(C, D[o], T, new_W[o])
    return True


@called
def absorb(T, H, C, inverse, pending, factored, new_T):
    """new_T = C⁻¹T for H = CCᵀ, where something is gathered in H. False: H is not positive definite."""
    if pending and not factored:
        copy_rows(H, C)
        if not cholesky(C, inverse):
            return False
    copy_rows(T, new_T)
    if pending:
        forward(C, new_T)
    return True


@called
def learn_one_by_one(T, W, Phi, Y, prior, ridge, left, energy, scratch, lam, cursor, count):
    """Fade T, then learn row after row, then the ridge of `count` coordinates, all in place."""
    (n, p), m = Phi.shape, W.shape[0]
    f, u, e = scratch[0, :p], scratch[1, :p], scratch[2, :m]
    if count:
        for i in range(p):
            scale(T[i], 1.0 / math.sqrt(lam))
        scale(energy, lam)
        scale(left, lam)
    for r in range(n):
        multiply(T, Phi[r], f)
        multiply(W, Phi[r], e)
        for o in range(m):
            e[o] = Y[r, o] - e[o]
        potter(T, W, f, e, u, energy)
    for i in range(count):
        c = restored_coordinate(cursor, i, p)
        root = math.sqrt(max(0.0, ridge[c] - left[c]))
        for j in range(p):
            f[j] = root * T[j, c]
        for o in range(m):
            e[o] = root * (prior[o, c] - W[o, c])
        potter(T, W, f, e, u, energy)
        left[c] = ridge[c]


@called
def store_gathered(new_H, H):
    """Make the lower triangle new_H the symmetric H."""
    for i in range(H.shape[0]):
        for j in range(i + 1):
            H[i, j] = new_H[i, j]
            H[j, i] = new_H[i, j]


@called
def count_update(counters, lam, samples, cursor, pending, growth):
    """The counters after an update."""
    counters[STEPS] += 1.0
    counters[SAMPLES] = lam * counters[SAMPLES] + samples
    counters[CURSOR] = cursor
    counters[PENDING] = pending
    counters[GROWTH] = growth


@called
def learn(part, block, head, samples, lam):
    """Learn the rows Φ (n, p), Y (n, m), already scaled by the roots of their weights, which sum to `samples`.

    `block` is Φ, Y and buffers for F and E; `head` the addresses of weight and bias, if they are float32, and k.
    """
    Phi, Y, F, E = block
    (n, p), m = Phi.shape, Y.shape[1]
    count = restored_count(p, lam)
    T, W, H, C, D, scratch, prior = part.T, part.W, part.H, part.C, part.D, part.rows, part.prior
    energy, left, counters, ridge = part.energy[0], part.left[0], part.counters[0], part.ridge[0]
    new_T, new_W, new_energy, new_left = part.Z[:p], part.Z[p:], scratch[3, :m], scratch[4, :p]
    follow(W, head, new_W)
    size, error, by_gram = look(T, new_W, block)
    if not size + error < np.inf:
        return NOT_FINITE
    if size > PRODUCT_LIMIT:
        return TOO_LARGE

    pending, growth, cursor = int(counters[PENDING]), counters[GROWTH], int(counters[CURSOR])
    copy(energy, new_energy)
    copy(left, new_left)
    one_row = n == 1 and count < ROW_LIMIT
    gathers = 6 * (n + count) >= p and not one_row
    absorbed = not gathers
    in_place = one_row and count == 0 and pending == 0
    f, u, e = scratch[0, :p], scratch[1, :p], scratch[2, :m]
    if in_place:
        copy(F[:, 0], f)
        copy(E[:, 0], e)
        step_head(T, new_W, f, e, u, new_energy, 1.0 + size)
    elif gathers:
        fading = lam, cursor, count, pending
        gather(T, new_W, H, new_energy, new_left, prior, ridge, block, by_gram, C, fading, new_T, D)
        if not solve_gathered(T, new_T, C, D, scratch[5], new_W, new_energy):
            return NOT_FINITE
        pending, growth = pending + 1, lam * growth + size
        absorbed = lam**pending * GROWTH_LIMIT < 1.0 or growth > GROWTH_LIMIT * p or pending >= PENDING_LIMIT
    if not in_place and absorbed:
        if not absorb(T, H, C, scratch[5], pending, gathers, new_T):
            return NOT_FINITE
        if not gathers:
            learn_one_by_one(new_T, new_W, Phi, Y, prior, ridge, new_left, new_energy, scratch, lam, cursor, count)
    if not fits(new_W, head[2]):
        return NOT_FINITE

    # From here on nothing can fail, so the state changes.
    if in_place:
        step_root(T, f, u, 1.0 + size)
    elif absorbed:
        copy_rows(new_T, T)
    else:
        store_gathered(new_T, H)
    copy_rows(new_W, W)
    write_head(new_W, head)
    copy(new_energy, energy)
    copy(new_left, left)
    cursor = restored_coordinate(cursor, count, p)
    count_update(counters, lam, samples, cursor, 0 if absorbed else pending, 0.0 if absorbed else growth)
    return LEARNED


# What a call gets: the addresses of its own numbers, of the head's memory, weight, and bias or 0, of a buffer for the
# rows, and of features and targets; the outputs and inputs of the head, whether its weights are in float32, the columns
# of the features, of which one may be that of the bias, and whether features and targets are in float32; the sum of the
# rows' weights, and λ.
CALL = struct.Struct("12q2d")


@kernel
def update(model, n):
    """Let a head learn n rows; returns the outcome."""
    m, k = model[7], model[8]
    numbers = array_at(model[0] + 96, (2,), np.float64)
    p, rows = k + (1 if model[3] else 0), model[4]
    block = block_at(rows, block_shapes(n, p, m))
    read_features(model[5], model[11], model[10], block[0])
    read(model[6], model[11], block[1])
    part = Parts(*parts_at(model[1], shapes_of(p, m)))
    return learn(part, block, (model[2], model[3], model[9], k), numbers[0], numbers[1])
