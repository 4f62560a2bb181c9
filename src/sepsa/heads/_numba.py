"""One update of recursive least squares as one compiled call, for heads on a CPU: `_square_root` in loops.

Symbols as there. A call either learns everything or nothing: it works in buffers of its own, looks at the numbers, and
stores last, so no interrupt and no bad number can leave the state between.

Loaded only where numba is installed; the first call in a fresh cache compiles for some seconds.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor, nn

from sepsa.heads._jit import announce_compilation, cached
from sepsa.heads._square_root import (
    CURSOR,
    GROWTH,
    GROWTH_LIMIT,
    PENDING,
    PENDING_LIMIT,
    PRODUCT_LIMIT,
    ROW_LIMIT,
    SAMPLES,
    STEPS,
    Root,
    restored,
)

# Not "nnan" and "ninf": the kernels look for NaN and Inf.
_OPTIONS: Any = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}}
_inner = njit(**_OPTIONS)

# What a call says: learned, not finite, or too large for products, which the QR route takes.
LEARNED, NOT_FINITE, TOO_LARGE = range(3)


@_inner
def cholesky(A):
    """The lower triangle of A becomes its Cholesky factor. False where A is not positive definite."""
    for i in range(A.shape[0]):
        for j in range(i + 1):
            total = A[i, j]
            for q in range(j):
                total -= A[i, q] * A[j, q]
            if i > j:
                A[i, j] = total / A[j, j]
            elif total > 0.0:
                A[i, i] = math.sqrt(total)
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


@_inner
def potter(T, W, f, e, u, energy):
    """`_square_root.potter` in place, u a buffer."""
    p, m = T.shape[0], W.shape[0]
    g = 1.0
    for j in range(p):
        g += f[j] * f[j]
        u[j] = 0.0
    for i in range(p):
        c = f[i]
        for j in range(p):
            u[j] += c * T[i, j]
    beta = -1.0 / (g + math.sqrt(g))
    for i in range(p):
        c = beta * f[i]
        for j in range(p):
            T[i, j] += c * u[j]
    for o in range(m):
        c = e[o] / g
        energy[o] += e[o] * c
        for j in range(p):
            W[o, j] += c * u[j]


@_inner
def whiten(T, W, Phi, Y, F, E):
    """F = TΦᵀ and E = Y - ΦWᵀ; returns the sums of their squares."""
    (n, p), m = Phi.shape, W.shape[0]
    size, error = 0.0, 0.0
    for i in range(p):
        for r in range(n):
            total = 0.0
            for j in range(p):
                total += T[i, j] * Phi[r, j]
            F[i, r] = total
            size += total * total
    for r in range(n):
        for o in range(m):
            total = Y[r, o]
            for j in range(p):
                total -= W[o, j] * Phi[r, j]
            E[r, o] = total
            error += total * total
    return size, error


@_inner
def add_product(A, left, right):
    """The lower triangle of A += left rightᵀ."""
    for i in range(A.shape[0]):
        for j in range(i + 1):
            total = 0.0
            for q in range(left.shape[1]):
                total += left[i, q] * right[j, q]
            A[i, j] += total


@_inner
def gather(T, W, H, energy, left, prior, ridge, gram, F, E, lam, cursor, count, pending, new_H, D, q):
    """`_square_root.gather` but for V and what follows: new_H (its lower triangle) and D; energy and left in place."""
    (n, m), p = E.shape, T.shape[0]
    for i in range(p):
        for j in range(i + 1):
            new_H[i, j] = lam * H[i, j] if pending else 0.0
        if not pending:
            new_H[i, i] = lam
    add_product(new_H, F, F)
    D[:] = 0.0
    for i in range(p):
        for r in range(n):
            for o in range(m):
                D[i, o] += F[i, r] * E[r, o]
    for o in range(m):
        energy[o] *= lam
        for r in range(n):
            energy[o] += E[r, o] * E[r, o]
    if count == 0:
        return
    whole = count == p
    for j in range(p):
        whole &= left[j] == ridge[j]
        left[j] *= lam
        q[j] = 0.0
    for i in range(count):
        j = (cursor + i) % p
        q[j] = max(0.0, ridge[j] - left[j])
        left[j] = ridge[j]
    if whole:
        if math.isnan(gram[0, 0]):
            gram[:] = 0.0
            add_product(gram, T * ridge, T)
        for i in range(p):
            for j in range(i + 1):
                new_H[i, j] += (1.0 - lam) * gram[i, j]
    else:
        add_product(new_H, T * q, T)
    for o in range(m):
        for j in range(p):
            pull = prior[o, j] - W[o, j]
            energy[o] += q[j] * pull * pull
            for i in range(p):
                D[i, o] += T[i, j] * q[j] * pull


@cached(**_OPTIONS)
def update(
    T, W, H, energy, left, counters, prior, ridge, gram, weight, bias, Phi, Y, F, E, lam, samples, count,
    Z, C, D, scratch,
):  # fmt: skip
    """Learn the rows Φ (n, p), Y (n, m), already scaled by the roots of their weights, which sum to `samples`.

    `count` coordinates get their ridge back. `gram` caches T diag(ridge) Tᵀ, stale where its first entry is NaN.
    `weight` and `bias` are the head's own. F (p, n), E (n, m), Z (p + m, p), C (p, p), D (p, m) and scratch
    (5, max(p, m)) are buffers.
    """
    (n, p), m = Phi.shape, W.shape[0]
    k = weight.shape[1]
    to_head = weight.dtype.type
    new_T, new_W = Z[:p], Z[p:]
    f, u, e = scratch[0, :p], scratch[1, :p], scratch[2, :m]
    new_energy, new_left = scratch[3, :m], scratch[4, :p]

    # W as the head has it now, with what rounding to the head's dtype lost
    for o in range(m):
        for j in range(k):
            new_W[o, j] = W[o, j] + (weight[o, j] - to_head(W[o, j]))
        if k < p:
            new_W[o, k] = W[o, k] + (bias[o] - to_head(W[o, k]))
    size, error = whiten(T, new_W, Phi, Y, F, E)
    if not size + error < np.inf:
        return NOT_FINITE
    if size > PRODUCT_LIMIT:
        return TOO_LARGE

    pending, growth, cursor = int(counters[PENDING]), counters[GROWTH], int(counters[CURSOR])
    new_energy[:] = energy
    new_left[:] = left
    gathers = 4 * (n + count) >= p and not (n == 1 and count < ROW_LIMIT)
    absorbed = not gathers
    if gathers:
        gather(
            T, new_W, H, new_energy, new_left, prior, ridge, gram, F, E, lam, cursor, count, pending, new_T, D, u
        )  # fmt: skip
        C[:] = new_T
        if not cholesky(C):
            return NOT_FINITE
        # V = H⁻¹D, and the objective falls by DᵀV = |C⁻¹D|²
        forward(C, D)
        for i in range(p):
            for o in range(m):
                new_energy[o] -= D[i, o] * D[i, o]
        backward(C, D)
        for i in range(p):
            for o in range(m):
                for j in range(p):
                    new_W[o, j] += D[i, o] * T[i, j]
        pending, growth = pending + 1, lam * growth + size
        if lam**pending * GROWTH_LIMIT < 1.0 or growth > GROWTH_LIMIT * p or pending >= PENDING_LIMIT:
            new_T[:] = T
            forward(C, new_T)
            absorbed = True
    else:
        new_T[:] = T
        if pending:
            C[:] = H
            if not cholesky(C):
                return NOT_FINITE
            forward(C, new_T)
        if count:
            new_T *= 1.0 / math.sqrt(lam)
            new_energy *= lam
            new_left *= lam
        for r in range(n):
            for i in range(p):
                f[i] = 0.0
                for j in range(p):
                    f[i] += new_T[i, j] * Phi[r, j]
            for o in range(m):
                e[o] = Y[r, o]
                for j in range(p):
                    e[o] -= new_W[o, j] * Phi[r, j]
            potter(new_T, new_W, f, e, u, new_energy)
        for i in range(count):
            c = (cursor + i) % p
            root = math.sqrt(max(0.0, ridge[c] - new_left[c]))
            for j in range(p):
                f[j] = root * new_T[j, c]
            for o in range(m):
                e[o] = root * (prior[o, c] - new_W[o, c])
            potter(new_T, new_W, f, e, u, new_energy)
            new_left[c] = ridge[c]

    for o in range(m):
        for j in range(p):
            if not abs(to_head(new_W[o, j])) < np.inf:
                return NOT_FINITE

    # From here on nothing can fail, so the state changes.
    if absorbed:
        T[:] = new_T
        gram[0, 0] = np.nan
        pending, growth = 0, 0.0
    else:
        for i in range(p):
            for j in range(i + 1):
                H[i, j] = new_T[i, j]
                H[j, i] = new_T[i, j]
    W[:] = new_W
    for o in range(m):
        for j in range(k):
            weight[o, j] = new_W[o, j]
        if k < p:
            bias[o] = new_W[o, k]
    energy[:] = new_energy
    left[:] = new_left
    counters[STEPS] += 1.0
    counters[SAMPLES] = lam * counters[SAMPLES] + samples
    counters[CURSOR] = (cursor + count) % p
    counters[PENDING] = pending
    counters[GROWTH] = growth
    return LEARNED


class Block(NamedTuple):
    """Φ (n, p), its columns without the ones, Y (n, m), and both as arrays beside buffers for F and E."""

    Phi: Tensor
    features: Tensor
    Y: Tensor
    arrays: tuple[Any, ...]


class Workspace:
    """Buffers for `update`, and the state and the head as arrays over the tensors' own memory."""

    in_place = True  # an update writes into the tensors of the state

    def __init__(self, linear: nn.Linear, root: Root, counters, prior: Tensor, ridge: Tensor) -> None:
        announce_compilation(update, "the update of a head")
        weight, bias = linear.weight.detach(), linear.bias
        (m, p), self.k = root.W.shape, linear.in_features
        H = torch.zeros_like(root.T) if root.H is None else root.H
        self.root = root._replace(H=H, whole=False).map(Tensor.clone)
        self.counters = counters.copy()
        self.gram = np.full((p, p), np.nan)  # T diag(ridge) Tᵀ
        self.arrays = (
            *(part.numpy() for part in self.root[:5] if part is not None),
            self.counters,
            prior.numpy(),
            ridge.numpy(),
            self.gram,
            weight.numpy(),
            np.zeros(0, weight.numpy().dtype) if bias is None else bias.detach().numpy(),
        )
        self.buffers = (np.empty((p + m, p)), np.empty((p, p)), np.empty((p, m)), np.empty((5, max(p, m))))
        self.block: Block | None = None
        # A kernel writes behind autograd's back; a write to no element tells it that the weight changed.
        self.version = weight[:0]

    def learn(
        self, features: Tensor, targets: Tensor, sample_weight: Tensor | None, lam: float
    ) -> tuple[bool | None, Tensor, Tensor, float]:
        """Learn samples. False: they are not finite; None: too large for this form.

        Returns Φ, Y and the sum of the weights as well, as `rows` made them.
        """
        block, samples = self.rows(features, targets, sample_weight)
        self.version.zero_()
        n, p = block.Phi.shape
        count = restored(p, n, lam)
        arguments: tuple[Any, ...] = (*self.arrays, *block.arrays, lam, samples, count, *self.buffers)
        outcome = update(*arguments)
        return None if outcome == TOO_LARGE else outcome == LEARNED, block.Phi, block.Y, samples

    def rows(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None) -> tuple[Block, float]:
        """Φ and Y, each row scaled by the root of its sample's weight, and the weights' sum; until the next call."""
        k, (m, p) = self.k, self.root.W.shape
        x, y = features.detach(), targets.detach()
        if x.ndim != 2:
            x, y = x.reshape(-1, k), y.reshape(-1, m)
        n = len(x)
        block = self.block
        if block is None or len(block.Y) != n:
            Phi, Y = self.root.T.new_ones(n, p), self.root.T.new_empty(n, m)
            block = Block(Phi, Phi[:, :k], Y, (Phi.numpy(), Y.numpy(), np.empty((p, n)), np.empty((n, m))))
        block.features.copy_(x)
        block.Y.copy_(y)
        if sample_weight is None:
            self.block = block
            return block, float(n)
        self.block = None  # the next one wants ones again
        omega = sample_weight.detach().reshape(-1, 1).to(block.Y.dtype)
        block.Phi.mul_(omega.sqrt())
        block.Y.mul_(omega.sqrt())
        return block, float(omega.sum())

    def load(self, root: Root, counters) -> None:
        """Take over a state; its memory stays."""
        for mine, other in zip(self.root[:5], root[:5], strict=True):
            if mine is not None and other is not None:
                mine.copy_(other)
        self.counters[:] = counters
        self.gram[0, 0] = np.nan  # T changed
