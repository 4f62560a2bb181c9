"""One update of recursive least squares as one compiled call, for heads on a CPU: `least_squares` in loops.

Symbols as there. A call learns everything or nothing: it computes in buffers, checks the values, and stores last, so
that neither an interrupt nor a bad value can leave a half-updated state.

Inside a training step the caches are cold, and each array that goes in and each call of torch before it costs more than
the arithmetic. So the state lies in one array, and features and targets are read where they are, by their addresses.

Loaded only where numba is installed; the first call in a fresh cache compiles for some seconds.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from weakref import ref

import numpy as np
import torch
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor
from torch.autograd.graph import increment_version

from sepsa import restoration
from sepsa.heads.backends.choose import Counters, Problem
from sepsa.heads.backends.torch_least_squares import TorchBackend
from sepsa.heads.base.parameters import join
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
    LeastSquaresState,
)
from sepsa.jit import announce_compilation, cached

# Not "nnan" and "ninf": the kernels look for NaN and Inf.
OPTIONS: Any = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}}
_inner = njit(**OPTIONS)

# What a call says: learned, not finite, or too large for products, which the QR route takes.
LEARNED, NOT_FINITE, TOO_LARGE = range(3)
# How many sizes of blocks have memory of their own.
BLOCKS = 16


@_inner
def cholesky(A):
    """The lower triangle of A becomes its Cholesky factor, two rows at a time. False: A is not positive definite."""
    p = A.shape[0]
    inverse = np.empty(p)  # of the diagonal: a product costs less than a quotient
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


@_inner
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


@_inner
def forward_row(C, x):
    """x <- C⁻¹x for lower C."""
    for i in range(x.size):
        total = x[i]
        for j in range(i):
            total -= C[i, j] * x[j]
        x[i] = total / C[i, i]


@_inner
def backward_row(C, x):
    """x <- C⁻ᵀx for lower C."""
    for i in range(x.size - 1, -1, -1):
        x[i] /= C[i, i]
        c = x[i]
        for j in range(i):
            x[j] -= C[i, j] * c


@_inner
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


@_inner
def step_root(T, f, u, g):
    """The other half: T in place."""
    beta = -1.0 / (g + math.sqrt(g))
    for i in range(T.shape[0]):
        c = beta * f[i]
        for j in range(T.shape[0]):
            T[i, j] += c * u[j]


@_inner
def potter(T, W, f, e, u, energy):
    """`least_squares.potter` in place, u a buffer."""
    g = 1.0
    for j in range(T.shape[0]):
        g += f[j] * f[j]
    step_head(T, W, f, e, u, energy, g)
    step_root(T, f, u, g)


@_inner
def add_entries(row, j, a, b, c, d):
    """row[j : j + 4] += [a, b, c, d], as far as it goes."""
    row[j] += a
    if j + 1 < row.size:
        row[j + 1] += b
    if j + 2 < row.size:
        row[j + 2] += c
    if j + 3 < row.size:
        row[j + 3] += d


@_inner
def add_product(A, left, right, lower):
    """A += left rightᵀ, two by four entries at a time; with `lower` the lower triangle, and some entries beside it."""
    rows, columns = left.shape[0], right.shape[0]
    for i in range(0, rows, 2):
        k = min(i + 1, rows - 1)
        for j in range(0, min(i + 2, columns) if lower else columns, 4):
            u, v, w = min(j + 1, columns - 1), min(j + 2, columns - 1), min(j + 3, columns - 1)
            a, b, c, d, e, f, g, h = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
            for q in range(left.shape[1]):
                x, y = left[i, q], left[k, q]
                a += x * right[j, q]
                b += x * right[u, q]
                c += x * right[v, q]
                d += x * right[w, q]
                e += y * right[j, q]
                f += y * right[u, q]
                g += y * right[v, q]
                h += y * right[w, q]
            add_entries(A[i], j, a, b, c, d)
            if k > i:
                add_entries(A[k], j, e, f, g, h)


@_inner
def whiten(T, W, Phi, Y, F, E):
    """F = TΦᵀ (p, n) and E = (Y - ΦWᵀ)ᵀ (m, n); returns the sums of their squares."""
    (n, p), m = Phi.shape, W.shape[0]
    size, error = 0.0, 0.0
    F[:] = 0.0
    if n > 1:
        add_product(F, T, Phi, False)
    else:
        for i in range(p):
            for j in range(p):
                F[i, 0] += T[i, j] * Phi[0, j]
    for i in range(p):
        for r in range(n):
            size += F[i, r] * F[i, r]
    for r in range(n):
        for o in range(m):
            total = Y[r, o]
            for j in range(p):
                total -= W[o, j] * Phi[r, j]
            E[o, r] = total
            error += total * total
    return size, error


restored_count = _inner(restoration.due)  # how many coordinates an update restores
restored_coordinate = _inner(restoration.next_cursor)  # the i-th of them
ridge_lack = _inner(restoration.lack)


@_inner
def gather(T, W, H, energy, left, prior, ridge, F, E, lam, cursor, count, pending, new_H, D):
    """`least_squares.gather_with_ridge` up to V: new_H (its lower triangle) and Dᵀ; energy and left in place."""
    (m, n), p = E.shape, T.shape[0]
    for i in range(p):
        for j in range(i + 1):
            new_H[i, j] = lam * H[i, j] if pending else 0.0
        if not pending:
            new_H[i, i] = lam
    add_product(new_H, F, F, True)
    for o in range(m):
        energy[o] *= lam
        for r in range(n):
            energy[o] += E[o, r] * E[o, r]
        for i in range(p):
            total = 0.0
            for r in range(n):
                total += F[i, r] * E[o, r]
            D[o, i] = total
    if count == 0:
        return
    for j in range(p):
        left[j] *= lam
    for step in range(count):
        c = restored_coordinate(cursor, step, p)
        q = ridge_lack(ridge[c], left[c])
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


@intrinsic
def _pointer(context, address):
    """The memory at an address."""

    def generate(_, builder, __, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.intp), generate


# The matrices of a head's memory in their order. Those up to `copied` are the memory of a `Snapshot`: the state, the
# head of that time, and as its last number whether it is a copy yet. Those from Z on are buffers.
Parts = namedtuple("Parts", "T W energy left counters head H copied prior ridge Z C D rows")
SNAPSHOT = 8  # matrices


def shapes_of(p: int, m: int) -> Parts:
    """The shapes of the matrices of a head's memory."""
    return Parts(
        T=(p, p),
        W=(m, p),
        energy=(1, m),
        left=(1, p),
        counters=(1, 5),
        head=(m, p),
        H=(p, p),
        copied=(1, 1),
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


def length_of(shapes: Sequence[tuple[int, int]], count: int) -> int:
    """How many numbers the first `count` matrices of these shapes have."""
    total = 0
    for i in range(count):
        total += shapes[i][0] * shapes[i][1]
    return total


def split(memory: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """The matrices of these shapes, which follow each other in `memory`."""
    pieces = torch.split(memory, [a * b for a, b in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


shapes, block_shapes, length = _inner(shapes_of), _inner(block_shapes_of), _inner(length_of)


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


@_inner
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


@_inner
def follow(W, weight, bias, new_W):
    """W as the head has it now, with what rounding to the head's dtype lost."""
    (m, k), p = weight.shape, W.shape[1]
    to_head = weight.dtype.type
    for o in range(m):
        for j in range(k):
            new_W[o, j] = W[o, j] + (weight[o, j] - to_head(W[o, j]))
        if k < p:
            new_W[o, k] = W[o, k] + (bias[o] - to_head(W[o, k]))


@_inner
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


@_inner
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


@_inner
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
        root = math.sqrt(ridge_lack(ridge[c], left[c]))
        for j in range(p):
            f[j] = root * T[j, c]
        for o in range(m):
            e[o] = root * (prior[o, c] - W[o, c])
        potter(T, W, f, e, u, energy)
        left[c] = ridge[c]


@_inner
def fits(W, weight):
    """Whether W is finite in the head's dtype."""
    to_head = weight.dtype.type
    for o in range(W.shape[0]):
        for j in range(W.shape[1]):
            if not abs(to_head(W[o, j])) < np.inf:
                return False
    return True


@_inner
def store_head(new_W, W, weight, bias):
    """Make new_W the state's W and the head's weights."""
    W[:] = new_W
    (m, k), p = weight.shape, W.shape[1]
    for o in range(m):
        for j in range(k):
            weight[o, j] = new_W[o, j]
        if k < p:
            bias[o] = new_W[o, k]


@_inner
def store_gathered(new_H, H):
    """Make the lower triangle new_H the symmetric H."""
    for i in range(H.shape[0]):
        for j in range(i + 1):
            H[i, j] = new_H[i, j]
            H[j, i] = new_H[i, j]


@_inner
def count_update(counters, lam, samples, cursor, pending, growth):
    """The counters after an update."""
    counters[STEPS] += 1.0
    counters[SAMPLES] = lam * counters[SAMPLES] + samples
    counters[CURSOR] = cursor
    counters[PENDING] = pending
    counters[GROWTH] = growth


@_inner
def save(memory, shapes, weight, bias, pending, saved):
    """Copy the state, with H where something is gathered in it, and the head to the memory of a snapshot."""
    (m, k), head = weight.shape, views(memory, shapes).head
    for o in range(m):
        for j in range(k):
            head[o, j] = weight[o, j]
        if k < head.shape[1]:
            head[o, k] = bias[o]
    end = length(shapes, SNAPSHOT - 1 if pending else SNAPSHOT - 2)
    saved[:end] = memory[:end]
    saved[-1] = 1.0


@_inner
def learn(memory, shapes, block, weight, bias, samples, lam_error, saved):
    """Learn the rows Φ (n, p), Y (n, m), already scaled by the roots of their weights, which sum to `samples`.

    `block` is Φ, Y and buffers for F and E; `weight` and `bias` are the head's own. `lam_error` has the forgetting, and
    gets the sum of the squared errors before. `saved`, a `Snapshot`, gets the state before, if it lacks it.
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
    if saved.size and saved[-1] == 0.0:
        save(memory, shapes, weight, bias, counters[PENDING] != 0.0, saved)
    if in_place:
        step_root(T, f, u, 1.0 + size)
    elif absorbed:
        T[:] = new_T
    else:
        store_gathered(new_T, H)
    store_head(new_W, W, weight, bias)
    energy[:] = new_energy
    left[:] = new_left
    count_update(counters, lam, samples, (cursor + count) % p, 0 if absorbed else pending, 0.0 if absorbed else growth)
    return LEARNED


@cached(Path(restoration.__file__), **OPTIONS)
def update(heads, rows, weight, x, y, samples, lam_error):
    """Let one head after the other learn the same rows. Returns the worst outcome; the last column of `heads` has each.

    `heads` (J, 5) are the addresses of each head's memory, weight, bias, and of memory for what is there before, the
    latter two or 0; all have the dtype and the shape of `weight`. x and y are the addresses of features and targets in
    this dtype, of which the rows are made, or 0. `samples` is the sum of the rows' weights. `lam_error` (J, 2) has
    the forgetting of each head, and gets the sum of its squared errors before it learns the rows.
    """
    m, k = weight.shape
    p = k + (1 if heads[0, 2] else 0)
    own_shapes, worst = shapes(p, m), LEARNED
    size, kept = length(own_shapes, len(own_shapes)), length(own_shapes, SNAPSHOT)
    block = views(rows, block_shapes(rows.size // (2 * (p + m)), p, m))
    if x:
        read_rows(x, y, weight, block[0], block[1])
    for j in range(heads.shape[0]):
        memory = carray(_pointer(heads[j, 0]), size, np.float64)
        own = carray(_pointer(heads[j, 1]), (m, k), weight.dtype)
        bias = carray(_pointer(heads[j, 2]), m if p > k else 0, weight.dtype)
        saved = carray(_pointer(heads[j, 3]), kept if heads[j, 3] else 0, np.float64)
        heads[j, 4] = learn(memory, own_shapes, block, own, bias, samples, lam_error[j], saved)
        worst = max(worst, heads[j, 4])
    return worst


class Block(NamedTuple):
    """Φ (n, p) and Y (n, m) of a batch, and the array that holds them, with buffers behind them."""

    Phi: Tensor
    Y: Tensor
    memory: Any


Rows: TypeAlias = tuple[Block, int, int, float]  # a block, the addresses of features and targets or 0, the weights' sum


class Snapshot:
    """A state and its head at some time; as a tuple it is the state, its counters and the head (m, p).

    What a step keeps in case it fails. It becomes a copy when the state changes: the kernel makes it, or `fill`. The
    last number of its memory tells whether it is one.
    """

    __slots__ = ("__weakref__", "backend", "memory")

    def __init__(self, backend: NumbaBackend, memory: Any) -> None:
        self.backend, self.memory = backend, memory

    def fill(self) -> None:
        """Copy the state as it is, unless the kernel has copied that of before."""
        if not self.memory[-1]:
            backend = self.backend
            backend.parts.head.copy_(join(backend.linear))  # it may have another dtype since
            self.memory[:-1] = backend.memory[: self.memory.size - 1]
            self.memory[-1] = 1.0

    def __iter__(self) -> Iterator[Any]:
        self.fill()
        m, p = self.backend.state.W.shape
        T, W, energy, left, counters, head, H, _ = split(torch.from_numpy(self.memory), shapes_of(p, m)[:SNAPSHOT])
        own = counters[0].numpy()
        yield LeastSquaresState(T, W, H if own[PENDING] else None, energy[0], left[0])
        yield own.copy()
        yield head


class NumbaBackend(TorchBackend):
    """The state of a head in one array, of which its tensors are views, and memory for the rows of an update."""

    name = "numba"
    learns_together = True

    def __init__(self, problem: Problem, state: LeastSquaresState, counters: Counters) -> None:
        announce_compilation(update, "the update of a head", 20)
        weight, bias = problem.linear.weight.detach(), problem.linear.bias
        (m, p), self.k = state.W.shape, problem.linear.in_features
        self.outputs = m
        shapes = shapes_of(p, m)
        self.end = length_of(shapes, SNAPSHOT)
        memory = state.T.new_zeros(length_of(shapes, len(shapes)))
        part = self.parts = Parts._make(split(memory, shapes))
        own = LeastSquaresState(part.T, part.W, part.H, part.energy[0], part.left[0])
        super().__init__(problem, own, part.counters[0].numpy())
        self._note_penalty()
        self.memory = memory.numpy()
        self.weight = weight.numpy()
        self.bias = np.zeros(0, self.weight.dtype) if bias is None else bias.detach().numpy()
        self.dtype = weight.dtype
        addresses = memory.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), 0, LEARNED
        self.heads, self.lam_error = np.array([addresses], np.intp), np.ones((1, 2))  # as `update` takes them
        self.snapshot: Callable[[], Snapshot | None] = lambda: None  # the last one, while somebody has it
        self._blocks: dict[int, Block] = {}  # by their rows
        self.load(state, counters)
        self.version = weight[:0]  # which shares the counter by which autograd notices changes

    def penalize(self, prior: Tensor, ridge: Tensor) -> None:
        """Restore these ridges (p,) about this prior (m, p) from now on."""
        super().penalize(prior, ridge)
        self._note_penalty()

    def _note_penalty(self) -> None:
        self.parts.prior.copy_(self.prior)
        self.parts.ridge.copy_(self.ridge)

    def learn(
        self, features: Tensor, targets: Tensor, sample_weight: Tensor | None, forgetting: float, plain: bool = False
    ) -> Tensor | None:
        """Learn samples in one compiled call; those too large for its products by torch."""
        block, x, y, total = self.given(features, targets, sample_weight, plain)
        self.lam_error[0, 0] = forgetting
        increment_version(self.version)  # the kernel writes where autograd does not see it
        outcome = update(self.heads, block.memory, self.weight, x, y, total, self.lam_error)
        return self._after(outcome, block, total, forgetting)

    def given(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None, plain: bool = False) -> Rows:
        """The rows of samples, which the kernel reads where they are if they are plain."""
        n = features.numel() // self.k
        block = self._blocks.get(n) or self._block(n)
        if plain or (sample_weight is None and self.is_plain(features, targets)):
            return block, features.data_ptr(), targets.data_ptr(), float(n)
        return block, 0, 0, self._fill(block, features, targets, sample_weight)

    def is_plain(self, features: Tensor, targets: Tensor) -> bool:
        """Whether samples are as `check_rows` wants them, and their numbers follow each other in the head's dtype."""
        return (
            type(features) is type(targets) is Tensor
            and features.dtype is targets.dtype is self.dtype
            and features.is_cpu
            and targets.is_cpu
            and features.layout is targets.layout is torch.strided
            and not (features.is_nested or targets.is_nested)
            and (shape := features.shape)[-1:] == (self.k,)
            and 0 not in shape
            and targets.shape == (*shape[:-1], self.outputs)
            and features.is_contiguous()
            and targets.is_contiguous()
            and not (features.is_neg() or targets.is_neg() or torch.is_inference_mode_enabled())
        )

    def _after(self, outcome: int, block: Block, total: float, forgetting: float) -> Tensor | None:
        """Φ as learned; what was too large for the kernel is learned now."""
        if outcome == TOO_LARGE:
            return self.learn_rows(block.Phi, block.Y, total, forgetting)
        return block.Phi if outcome == LEARNED else None

    @staticmethod
    def learn_together(
        backends: Sequence[NumbaBackend],
        features: Tensor,
        targets: Tensor,
        sample_weight: Tensor | None,
        lam_error: Any,
    ) -> list[Tensor | None]:
        """Let heads of one shape learn the same samples in one compiled call, `lam_error` as in `update`.

        Returns Φ for each, or None where it is not finite. Autograd is not told.
        """
        first = backends[0]
        block, x, y, total = first.given(features, targets, sample_weight)
        heads = np.concatenate([backend.heads for backend in backends])
        update(heads, block.memory, first.weight, x, y, total, lam_error)
        outcomes = zip(backends, heads[:, -1].tolist(), lam_error[:, 0].tolist(), strict=True)
        return [backend._after(outcome, block, total, lam) for backend, outcome, lam in outcomes]

    def _block(self, n: int) -> Block:
        m, p = self.state.W.shape
        shapes = block_shapes_of(n, p, m)
        memory = self.state.T.new_empty(length_of(shapes, len(shapes)))
        Phi, Y, _, _ = split(memory, shapes)
        block = Block(Phi, Y, memory.numpy())
        if len(self._blocks) == BLOCKS:
            self._blocks.clear()
        self._blocks[n] = block
        return block

    def _fill(self, block: Block, features: Tensor, targets: Tensor, sample_weight: Tensor | None) -> float:
        """Make Φ and Y of samples in any dtype, anywhere in memory, with weights or without; returns their sum."""
        Phi, Y = block.Phi, block.Y
        Phi[:, : self.k].copy_(features.detach().reshape(-1, self.k))
        Phi[:, self.k :].fill_(1.0)
        Y.copy_(targets.detach().reshape(Y.shape))
        if sample_weight is None:
            return float(len(Y))
        omega = sample_weight.detach().reshape(-1, 1).to(Y.dtype)
        Phi.mul_(omega.sqrt())
        Y.mul_(omega.sqrt())
        return float(omega.sum())

    def checkpoint(self) -> Snapshot:
        """The state and the head as they are now."""
        snapshot = self.snapshot()
        if snapshot is not None and not snapshot.memory[-1]:
            return snapshot
        if snapshot is not None or not self.heads[0, 3]:  # else its memory is free
            self.heads[0, 3] = 0
            memory = self.state.T.new_empty(self.end)
            self.saved = memory.numpy()
            self.heads[0, 3] = memory.data_ptr()
        self.saved[-1] = 0.0
        snapshot = Snapshot(self, self.saved)
        self.snapshot = ref(snapshot)
        return snapshot

    def read(self) -> tuple[LeastSquaresState, Counters]:
        """The state and its counters, which other code may change."""
        if (snapshot := self.snapshot()) is not None:
            snapshot.fill()
        return super().read()

    def load(self, state: LeastSquaresState, counters: Counters) -> None:
        """Continue from this state, copied into the array."""
        if (snapshot := self.snapshot()) is not None:
            snapshot.fill()
        for mine, other in zip(self.state, state, strict=True):
            if mine is not None and other is not None:
                mine.copy_(other)
        self.counters[:] = counters
