"""One update of recursive least squares as one compiled call: `least_squares` in loops, symbols as there.

A call learns everything or nothing: it computes in buffers, checks the values, and stores last, so that neither an
interrupt nor a bad value can leave a half-updated state.

Inside a training step the caches are cold, and each array that goes in and each call of torch before it costs more than
the arithmetic. So the state lies in one array, and features and targets are read where they are, by their addresses.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numba import carray, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from sepsa import restoration
from sepsa.heads.backends.numba_linalg import (
    OPTIONS,
    add_product,
    backward_row,
    cholesky,
    compiled,
    forward,
    forward_row,
    potter,
    step_head,
    step_root,
)
from sepsa.heads.math import least_squares
from sepsa.heads.math.least_squares import (
    CURSOR,
    GROWTH,
    GROWTH_LIMIT,
    PENDING,
    PENDING_LIMIT,
    PRODUCT_LIMIT,
    ROW_LIMIT,
    SAMPLES,
    STEPS,
)
from sepsa.jit import cached

# What a call says: learned, not finite, or too large for products, which the QR route takes.
LEARNED, NOT_FINITE, TOO_LARGE = range(3)


@compiled
def whiten(T, W, Phi, Y, F, E):
    """F = TΦᵀ (p, n) and E = (Y - ΦWᵀ)ᵀ (m, n); returns the sums of their squares."""
    (n, p), m = Phi.shape, W.shape[0]
    size, error = 0.0, 0.0
    F[:] = 0.0
    E[:] = 0.0
    if n > 1:
        add_product(F, T, Phi, False)
        add_product(E, W, Phi, False)
    else:
        for i in range(p):
            for j in range(p):
                F[i, 0] += T[i, j] * Phi[0, j]
        for o in range(m):
            for j in range(p):
                E[o, 0] += W[o, j] * Phi[0, j]
    for i in range(p):
        for r in range(n):
            size += F[i, r] * F[i, r]
    for o in range(m):
        for r in range(n):
            E[o, r] = Y[r, o] - E[o, r]
            error += E[o, r] * E[o, r]
    return size, error


restored_count = compiled(restoration.due)  # how many coordinates an update restores
restored_coordinate = compiled(restoration.next_cursor)  # the i-th of them
restored_ridge = compiled(restoration.restored)


@compiled
def gather(T, W, H, energy, left, prior, ridge, F, E, lam, cursor, count, pending, new_H, D):
    """`least_squares.gather_with_ridge` up to V: new_H (its lower triangle) and Dᵀ; energy and left in place."""
    (m, n), p = E.shape, T.shape[0]
    for i in range(p):
        for j in range(i + 1):
            new_H[i, j] = lam * H[i, j] if pending else 0.0
        if not pending:
            new_H[i, i] = lam
    add_product(new_H, F, F, True)
    D[:] = 0.0
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
        full = restored_ridge(ridge[c], left[c])
        q = max(0.0, full - left[c])
        left[c] = full
        for i in range(p):
            scaled = q * T[i, c]
            for j in range(i + 1):
                new_H[i, j] += scaled * T[j, c]
        for o in range(m):
            pull = prior[o, c] - W[o, c]
            energy[o] += q * pull * pull
            for i in range(p):
                D[o, i] += q * pull * T[i, c]


@intrinsic
def _pointer(context, address):
    """The memory at an address."""

    def generate(_, builder, __, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.intp), generate


# The matrices of a head's memory in their order. The first six are the state, of which H is there where something is
# gathered in it; those from Z on are buffers.
Parts = namedtuple("Parts", "T W energy left counters H prior ridge Z C D rows")


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
        rows=(5, max(p, m)),
    )


def block_shapes_of(n: int, p: int, m: int) -> tuple[tuple[int, int], ...]:
    """The shapes of Φ, Y, F and E."""
    return (n, p), (n, m), (p, n), (m, n)


def length_of(shapes: Sequence[tuple[int, int]]) -> int:
    """How many numbers matrices of these shapes have."""
    total = 0
    for shape in shapes:
        total += shape[0] * shape[1]
    return total


def split(memory: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """The matrices of these shapes, which follow each other in `memory`."""
    pieces = torch.split(memory, [a * b for a, b in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


shapes, block_shapes, length = compiled(shapes_of), compiled(block_shapes_of), compiled(length_of)


def _matrix(memory, start, shape):
    return memory[start : start + shape[0] * shape[1]].reshape(shape)


@intrinsic
def views(_, memory, shapes):
    """`split` in kernels."""
    matrix = types.Array(memory.dtype, 2, "C")
    result = types.BaseTuple.from_types([matrix] * len(shapes), getattr(shapes, "instance_class", None))

    def generate(context, builder, _, arguments):
        start, made = context.get_constant(types.intp, 0), []
        for i, kind in enumerate(shapes):
            shape = builder.extract_value(arguments[1], i)
            signature = matrix(memory, types.intp, kind)
            made.append(context.compile_internal(builder, _matrix, signature, (arguments[0], start, shape)))
            rows, columns = builder.extract_value(shape, 0), builder.extract_value(shape, 1)
            start = builder.add(start, builder.mul(rows, columns))
        return context.make_tuple(builder, result, made)

    return result(memory, shapes), generate


@compiled
def read_rows(x, y, weight, Phi, Y):
    """Make Φ and Y of the features and targets at these addresses."""
    (n, p), (m, k) = Phi.shape, weight.shape
    given, aims = carray(_pointer(x), (n, k), weight.dtype), carray(_pointer(y), (n, m), weight.dtype)
    for r in range(n):
        for j in range(k):
            Phi[r, j] = given[r, j]
        if k < p:
            Phi[r, k] = 1.0
        for o in range(m):
            Y[r, o] = aims[r, o]


@compiled
def follow(W, weight, bias, new_W):
    """W as the head has it now, with what rounding to the head's dtype lost."""
    (m, k), p = weight.shape, W.shape[1]
    to_head = weight.dtype.type
    for o in range(m):
        for j in range(k):
            new_W[o, j] = W[o, j] + (weight[o, j] - to_head(W[o, j]))
        if k < p:
            new_W[o, k] = W[o, k] + (bias[o] - to_head(W[o, k]))


@compiled
def solve_gathered(T, H, C, D, new_W, new_energy):
    """W += (H⁻¹D)ᵀT by H = CCᵀ, and the objective falls by DᵀH⁻¹D = |C⁻¹D|². False: H is not positive definite."""
    p = T.shape[0]
    C[:] = H
    if not cholesky(C):
        return False
    for o in range(new_W.shape[0]):
        forward_row(C, D[o])
        for i in range(p):
            new_energy[o] -= D[o, i] * D[o, i]
        backward_row(C, D[o])
        for i in range(p):
            c = D[o, i]
            for j in range(p):
                new_W[o, j] += c * T[i, j]
    return True


@compiled
def absorb(T, H, C, pending, factored, new_T):
    """new_T = C⁻¹T for H = CCᵀ, where something is gathered in H. False: H is not positive definite."""
    if pending and not factored:
        C[:] = H
        if not cholesky(C):
            return False
    new_T[:] = T
    if pending:
        forward(C, new_T)
    return True


@compiled
def learn_one_by_one(T, W, Phi, Y, prior, ridge, left, energy, scratch, lam, cursor, count):
    """Fade T, then learn row after row, then the ridge of `count` coordinates, all in place."""
    (n, p), m = Phi.shape, W.shape[0]
    f, u, e = scratch[0, :p], scratch[1, :p], scratch[2, :m]
    if count:
        T *= 1.0 / math.sqrt(lam)
        energy *= lam
        left *= lam
    for r in range(n):
        for i in range(p):
            f[i] = 0.0
            for j in range(p):
                f[i] += T[i, j] * Phi[r, j]
        for o in range(m):
            e[o] = Y[r, o]
            for j in range(p):
                e[o] -= W[o, j] * Phi[r, j]
        potter(T, W, f, e, u, energy)
    for i in range(count):
        c = restored_coordinate(cursor, i, p)
        full = restored_ridge(ridge[c], left[c])
        root = math.sqrt(max(0.0, full - left[c]))
        for j in range(p):
            f[j] = root * T[j, c]
        for o in range(m):
            e[o] = root * (prior[o, c] - W[o, c])
        potter(T, W, f, e, u, energy)
        left[c] = full


@compiled
def fits(W, weight):
    """Whether W is finite in the head's dtype."""
    to_head = weight.dtype.type
    for o in range(W.shape[0]):
        for j in range(W.shape[1]):
            if not abs(to_head(W[o, j])) < np.inf:
                return False
    return True


@compiled
def store_head(new_W, W, weight, bias):
    """Make new_W the state's W and the head's weights."""
    W[:] = new_W
    (m, k), p = weight.shape, W.shape[1]
    for o in range(m):
        for j in range(k):
            weight[o, j] = new_W[o, j]
        if k < p:
            bias[o] = new_W[o, k]


@compiled
def store_gathered(new_H, H):
    """Make the lower triangle new_H the symmetric H."""
    for i in range(H.shape[0]):
        for j in range(i + 1):
            H[i, j] = new_H[i, j]
            H[j, i] = new_H[i, j]


@compiled
def count_update(counters, lam, samples, cursor, pending, growth):
    """The counters after an update."""
    counters[STEPS] += 1.0
    counters[SAMPLES] = lam * counters[SAMPLES] + samples
    counters[CURSOR] = cursor
    counters[PENDING] = pending
    counters[GROWTH] = growth


@compiled
def learn(memory, shapes, block, weight, bias, samples, lam_error):
    """Learn the rows Φ (n, p), Y (n, m), already scaled by the roots of their weights, which sum to `samples`.

    `block` is Φ, Y and buffers for F and E; `weight` and `bias` are the head's own. `lam_error` has the forgetting, and
    gets the sum of the squared errors before.
    """
    (Phi, Y, F, E), part = block, views(memory, shapes)
    (n, p), m, lam = Phi.shape, Y.shape[1], lam_error[0]
    count = restored_count(p, lam)
    T, W, H, C, D, scratch, prior = part.T, part.W, part.H, part.C, part.D, part.rows, part.prior
    energy, left, counters, ridge = part.energy[0], part.left[0], part.counters[0], part.ridge[0]
    new_T, new_W, new_energy, new_left = part.Z[:p], part.Z[p:], scratch[3, :m], scratch[4, :p]
    follow(W, weight, bias, new_W)
    size, error = whiten(T, new_W, Phi, Y, F, E)
    lam_error[1] = error
    if not size + error < np.inf:
        return NOT_FINITE
    if size > PRODUCT_LIMIT:
        return TOO_LARGE

    pending, growth, cursor = int(counters[PENDING]), counters[GROWTH], int(counters[CURSOR])
    new_energy[:] = energy
    new_left[:] = left
    one_row = n == 1 and count < ROW_LIMIT
    gathers = 4 * (n + count) >= p and not one_row
    absorbed = not gathers
    in_place = one_row and count == 0 and pending == 0
    f, u, e = scratch[0, :p], scratch[1, :p], scratch[2, :m]
    if in_place:
        f[:] = F[:, 0]
        e[:] = E[:, 0]
        step_head(T, new_W, f, e, u, new_energy, 1.0 + size)
    elif gathers:
        gather(T, new_W, H, new_energy, new_left, prior, ridge, F, E, lam, cursor, count, pending, new_T, D)
        if not solve_gathered(T, new_T, C, D, new_W, new_energy):
            return NOT_FINITE
        pending, growth = pending + 1, lam * growth + size
        absorbed = lam**pending * GROWTH_LIMIT < 1.0 or growth > GROWTH_LIMIT * p or pending >= PENDING_LIMIT
    if not in_place and absorbed:
        if not absorb(T, H, C, pending, gathers, new_T):
            return NOT_FINITE
        if not gathers:
            learn_one_by_one(new_T, new_W, Phi, Y, prior, ridge, new_left, new_energy, scratch, lam, cursor, count)
    if not fits(new_W, weight):
        return NOT_FINITE

    # From here on nothing can fail, so the state changes.
    if in_place:
        step_root(T, f, u, 1.0 + size)
    elif absorbed:
        T[:] = new_T
    else:
        store_gathered(new_T, H)
    store_head(new_W, W, weight, bias)
    energy[:] = new_energy
    left[:] = new_left
    cursor = restored_coordinate(cursor, count, p)
    count_update(counters, lam, samples, cursor, 0 if absorbed else pending, 0.0 if absorbed else growth)
    return LEARNED


@cached(Path(restoration.__file__), Path(least_squares.__file__), **OPTIONS)
def update(heads, rows, weight, x, y, samples, lam_error):
    """Let one head after the other learn the same rows. Returns the worst outcome; the last column of `heads` has each.

    `heads` (J, 4) are the addresses of each head's memory, weight, and bias or 0; all have the dtype and the shape of
    `weight`. x and y are the addresses of features and targets in this dtype, of which the rows are made, or 0.
    `samples` is the sum of the rows' weights. `lam_error` (J, 2) has the forgetting of each head, and gets the sum of
    its squared errors before it learns the rows.
    """
    m, k = weight.shape
    p = k + (1 if heads[0, 2] else 0)
    own_shapes, worst = shapes(p, m), LEARNED
    size = length(own_shapes)
    block = views(rows, block_shapes(rows.size // (2 * (p + m)), p, m))
    if x:
        read_rows(x, y, weight, block[0], block[1])
    for j in range(heads.shape[0]):
        memory = carray(_pointer(heads[j, 0]), size, np.float64)
        own = carray(_pointer(heads[j, 1]), (m, k), weight.dtype)
        bias = carray(_pointer(heads[j, 2]), m if p > k else 0, weight.dtype)
        heads[j, 3] = learn(memory, own_shapes, block, own, bias, samples, lam_error[j])
        worst = max(worst, heads[j, 3])
    return worst
