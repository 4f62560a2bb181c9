"""The update of a self-tuning head as compiled loops, for small heads on a CPU: `candidates.updated`.

Symbols as there. For the few dozen features of a small network calls into torch, NumPy and LAPACK cost several times
as much as the arithmetic. Loaded only where numba is installed; the first call in a fresh cache compiles.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sepsa.heads.backends.numba_least_squares import OPTIONS, backward_row, cholesky, forward_row, restored_coordinate
from sepsa.heads.base.repeated_samples import BatchSplit
from sepsa.heads.math import candidates
from sepsa.heads.math.candidates import CERTAINTY, EXACT, FADING, LEAST, OUTLIER, Candidates, Grid, Statistics, Updated
from sepsa.jit import announce_compilation, cached


@cached(**OPTIONS)
def update(M, N, basis, X, lambdas, cursors, counts, of, r, new_M, new_N, W, factor):
    """Write M and N with X learned, and the W and factors of all candidates, into the last four arrays.

    False: some A is not positive definite.
    """
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
            j = restored_coordinate(cursors[k], i, p)
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
    """`candidates.scored` of these rows; weights (J, rows) are λ^age, 0 where a row is new."""
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


@cached(nogil=True, error_model="numpy")  # no fastmath: candidates with equal errors must compare as equal
def best(score, forgettings, active):
    """`candidates.best`."""
    J, chosen = forgettings.size, -1
    n, smallest = score[J, J], score[:J, J].argmin()
    if n <= 1.0:
        return active
    for j in range(J):
        mean = (score[j, J] - score[smallest, J]) / n
        square = (score[j, j] + score[smallest, smallest] - 2.0 * score[j, smallest]) / n
        if j != smallest and mean > CERTAINTY * math.sqrt(max(0.0, square - mean**2) / (n - 1.0)):
            continue
        rank = forgettings[j], -score[j, J], j == active
        if chosen < 0 or rank > (forgettings[chosen], -score[chosen, J], chosen == active):
            chosen = j
    return chosen


@functools.lru_cache(maxsize=64)
def ridge_array(grid: Grid, scale: float, p: int) -> Any:
    """The ridges (J, p) of this scale, made once for a head."""
    tensors = candidates.grid_tensors(grid, p, torch.float64, torch.device("cpu"))
    return candidates.ridges(tensors, scale, p)[:, 0].numpy()


def updated(
    grid: Grid, state: Candidates, basis: Tensor, Phi: Tensor, Y: Tensor, split: BatchSplit, head_dtype: torch.dtype
) -> Updated | None:
    """`candidates.updated`; None where some A is not positive definite, which the body in torch corrects."""
    tensors = candidates.tensors_like(grid, state.N)
    new, score = state.statistics, _scored(grid, state, Phi, Y, split)
    if len(split.held_out) < len(Phi):
        X = torch.cat([Phi, Y], 1)
        if split.held_out:
            X[split.held_out] = 0
        learned = _learned(grid, state, basis, X, tensors.lambdas.numpy(), tensors.counts.numpy())
        if learned is None:
            return None
        new = learned
    active = int(best(array(score), tensors.forgettings.numpy(), state.active))
    head = new.W[active].to(head_dtype)
    valid = bool(np.isfinite(new.W.numpy()).all()) and math.isfinite(float(head.abs().max()))
    return Updated(new._replace(score=score), active, head, valid)


def factored(grid: Grid, state: Candidates) -> Tensor | None:
    """The factors of a state as the update that made it computed them, to the bit; None as in `updated`."""
    L, size = state.M.shape[:2]
    basis, none = state.N.new_zeros(state.N.shape[1:]), state.M.new_zeros(0, size)
    new = _learned(grid, state, basis, none, np.ones(L), np.zeros(L, dtype=np.int64))
    return None if new is None else new.factor


def _scored(grid: Grid, state: Candidates, Phi: Tensor, Y: Tensor, split: BatchSplit) -> Tensor:
    """The score with the rows that the split names."""
    rows = range(len(Phi)) if split.scored is None else split.scored
    if not rows:
        return state.score
    announce_compilation(score_rows, "the scores of a self-tuning head")
    ages = dict(zip(split.held_out, split.ages, strict=True))
    weights = [[lam ** ages[row] if row in ages else 0.0 for row in rows] for lam, _ in grid.settings]
    new = state.score.new_empty(state.score.shape)
    given = map(array, (state.W, state.factor, Phi, Y))
    score_rows(*given, np.array(rows), np.array(weights), array(state.score), new.numpy())
    return new


def _learned(grid: Grid, state: Candidates, basis: Tensor, X: Tensor, lambdas: Any, counts: Any) -> Statistics | None:
    """The statistics with the rows X learned, the score left empty; None where some A is not positive definite."""
    announce_compilation(update, "the update of a self-tuning head")
    new = Statistics(*(part.new_empty(part.shape) for part in state.statistics))
    given = map(array, (state.M, state.N, basis, X))
    index = candidates.tensors_like(grid, state.N).lambda_index.numpy()
    settings = lambdas, np.array(state.cursors), counts, index, ridge_array(grid, state.scale, state.N.shape[2])
    definite = update(*given, *settings, *(part.numpy() for part in new[:4]))
    return new if definite else None


def array(part: Tensor) -> Any:
    """The tensor as a NumPy array, its rows one after the other."""
    return part.contiguous().numpy()
