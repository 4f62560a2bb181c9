"""What all candidates of a self-tuning head learn in one compiled call, for heads on a CPU: `candidates` in loops.

Symbols as there. For the few dozen features of a small network calls into torch, NumPy and LAPACK cost several times
as much as the arithmetic. Loaded only where numba is installed; the first call in a fresh cache compiles.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sepsa.heads.backends.numba_least_squares import OPTIONS, backward_row, cholesky, forward_row
from sepsa.heads.base.repeated_samples import Lookup
from sepsa.heads.math import candidates
from sepsa.heads.math.candidates import EXACT, FADING, LEAST, OUTLIER, Candidates, Grid, ridges
from sepsa.heads.math.ridge import rotation
from sepsa.jit import announce_compilation, cached


@cached(**OPTIONS)
def update(M, N, basis, X, lambdas, cursors, counts, of, r, new_M, new_N, W, factor):
    """`grown` and `solve` into the last four arrays. False: some A is not positive definite."""
    (L, rows, p), (J, m), n = N.shape, W.shape[:2], X.shape[0]
    size = p + m
    gram = np.zeros((size, size))  # XᵀX, its lower triangle
    for t in range(n):
        x = X[t]
        for i in range(size):
            row, c = gram[i], x[i]
            for j in range(i + 1):
                row[j] += c * x[j]
    for k in range(L):
        lam = lambdas[k]
        for a in range(rows):
            for j in range(p):
                new_N[k, a, j] = lam * N[k, a, j]
        for i in range(counts[k]):
            j = (cursors[k] + i) % p
            lack = 1.0 - new_N[k, 0, j]
            for a in range(rows):
                new_N[k, a, j] += lack * basis[a, j]
        for i in range(size):
            row, old, more = new_M[k, i], M[k, i], gram[i]
            for j in range(i + 1):
                row[j] = lam * old[j] + more[j]
            for j in range(i):
                new_M[k, j, i] = row[j]
    for c in range(J):
        k, A = of[c], factor[c]
        for i in range(p):
            row, seen = A[i], new_M[k, i]
            for j in range(i + 1):
                row[j] = seen[j]
            row[i + 1 :] = 0.0
            row[i] += r[c, i] * new_N[k, 0, i]
        if not cholesky(A):
            return False
        for o in range(m):
            aim, seen = W[c, o], new_M[k, p + o]
            for j in range(p):
                aim[j] = seen[j] + r[c, j] * new_N[k, 1 + o, j]
            forward_row(A, aim)
            backward_row(A, aim)
    return True


@cached(**OPTIONS)
def score_rows(W, factor, Phi, Y, rows, weights, score, new):
    """`candidates.scored` of these rows; weights (J, rows): what is left of the first time, 0 where a row is new."""
    (J, m, p), n = W.shape, rows.size
    errors, whitened, size = np.ones((J + 1, n)), np.empty(p), 0.0
    for t in range(n):
        phi, y = Phi[rows[t]], Y[rows[t]]
        for o in range(m):
            size += y[o] * y[o]
        for c in range(J):
            total = 0.0
            for o in range(m):
                e, w = y[o], W[c, o]
                for j in range(p):
                    e -= w[j] * phi[j]
                total += e * e
            total /= m
            if weights[c, t] > 0.0:
                for j in range(p):
                    whitened[j] = phi[j]
                forward_row(factor[c], whitened)
                leverage = 0.0
                for j in range(p):
                    leverage += whitened[j] * whitened[j]
                total /= max(1.0 - weights[c, t] * leverage, LEAST) ** 2
            errors[c, t] = total
    seen = score[J, J]
    if seen:
        usual = max(score[:J, J].min() / seen, EXACT * size / (m * n))
        for c in range(J):
            for t in range(n):
                errors[c, t] = min(errors[c, t], OUTLIER * usual)
    fade = FADING**n
    for c in range(J + 1):
        for d in range(J + 1):
            total = fade * score[c, d]
            for t in range(n):
                total += errors[c, t] * errors[d, t]
            new[c, d] = total


class Numbers(NamedTuple):
    """What the kernels read of a grid."""

    lambdas: Any  # (L,)
    of: Any  # (J,)
    ridge: Any  # (J, p)


@functools.lru_cache(maxsize=64)
def numbers(grid: Grid, scale: float, p: int) -> Numbers:
    """Made once for a head, whose scale stays."""
    ridge = ridges(grid, scale, torch.empty(1, 1, p, dtype=torch.float64))
    return Numbers(np.array(grid.lambdas), np.array(grid.of), ridge[:, 0].numpy())


def scored(grid: Grid, state: Candidates, Phi: Tensor, Y: Tensor, size: float, found: Lookup) -> Tensor:
    """The same as `candidates.scored`."""
    announce_compilation(score_rows, "the scores of a self-tuning head")
    rows = range(len(Phi)) if found.scored is None else found.scored
    if not rows:
        return state.score
    ages = dict(zip(found.held, found.ages, strict=True))
    left = [[lam ** ages[row] if row in ages else 0.0 for row in rows] for lam, _ in grid.settings]
    new = state.score.new_empty(state.score.shape)
    given = state.W, state.factor, Phi, Y
    score_rows(*map(array, given), np.array(rows), np.array(left), array(state.score), new.numpy())
    return new


def learned(
    grid: Grid, state: Candidates, basis: Tensor, X: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same as `candidates.learned`, which makes up for rounding where some A is not positive definite."""
    announce_compilation(update, "the update of a self-tuning head")
    p, lambdas = state.N.shape[2], numbers(grid, scale, state.N.shape[2]).lambdas
    counts = np.array([rotation(p, lam) for lam in grid.lambdas])
    new = _updated(grid, state, basis, X, scale, lambdas, counts)
    return candidates.learned(grid, state, basis, X, scale) if new is None else new


def factored(grid: Grid, state: Candidates) -> Tensor:
    """The same as `candidates.factored`."""
    L, size = state.M.shape[:2]
    basis, none = state.N.new_zeros(state.N.shape[1:]), state.M.new_zeros(0, size)
    new = _updated(grid, state, basis, none, state.scale, np.ones(L), np.zeros(L, dtype=np.int64))
    return candidates.factored(grid, state) if new is None else new[3]


def _updated(
    grid: Grid, state: Candidates, basis: Tensor, X: Tensor, scale: float, lambdas: Any, counts: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """M, N, W and the factors after `update`; None where some A is not positive definite."""
    fixed = numbers(grid, scale, state.N.shape[2])
    new = tuple(part.new_empty(part.shape) for part in (state.M, state.N, state.W, state.factor))
    given = map(array, (state.M, state.N, basis, X))
    turns = lambdas, np.array(state.cursors), counts, fixed.of, fixed.ridge
    fine = update(*given, *turns, *(part.numpy() for part in new))
    return new if fine else None  # type: ignore[return-value]


def array(part: Tensor) -> Any:
    """The tensor as NumPy's, its rows one after the other."""
    return part.contiguous().numpy()
