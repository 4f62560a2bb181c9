"""The mathematics of self-tuning: candidates over (λ, ridge) that share their statistics, and their scores.

Symbols as in `least_squares`. The candidates of one λ share the statistics M = Σ λ^age [Φ Y]ᵀ[Φ Y], whose blocks are
S = Σ λ^age ΦᵀΦ and C = Σ λ^age YᵀΦ, and N with the rows D, the share of its ridge that each coordinate still has,
G = D prior, and D prior². The candidate of ridge r is then

    A = S + r D,    W = (C + r G) A⁻¹,    where the bias has an r of its own,

the minimizer that RLS(ridge=r, forgetting=λ) computes, at one Cholesky factor per candidate and update.

A candidate's error at a sample that it has not learned is unbiased. From the second epoch on no sample is new: heads
have learned all of them, and so has the body that made the features, which favours candidates that overfit. So a fixed
tenth of all samples, selected by a hash of the raw row, is learned the first time it comes and never again, neither by
the heads nor by the body, and only this tenth is scored while samples repeat. The score removes what remains of that
first time: a head that learned (φ, y) with weight w = λ^age and has the error e now would have the error
e / (1 - w φᵀA⁻¹φ) without it.

`updated` is one body for eager updates and CUDA graphs: it reads nothing from the device unless `wait` allows that.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from sepsa.heads.math.ridge import BiasRidge, bias_bounds, due, is_restored

# Each scored sample multiplies the weight of all errors before it by this factor.
FADING = 0.98
# Mean errors that differ by at most this number of standard errors count as equal, and the longer memory wins.
CERTAINTY = 0.5
# An error is clipped at this multiple of the smallest mean error: how badly a candidate failed while the data changed
# says nothing about it afterwards.
OUTLIER = 4.0
# Errors below this share of the targets' mean square count as zero.
EXACT = 1e-6
# The lower bound of 1 - λ^age φᵀA⁻¹φ, which may reach zero where the features have moved since.
LEAST = 0.1


class Grid(NamedTuple):
    """The settings of J candidates, each (λ, ridge), and the ridge of the bias."""

    settings: tuple[tuple[float, float], ...]
    bias_ridge: BiasRidge = "ridge"  # of the last coordinate, in all candidates

    @property
    def lambdas(self) -> list[float]:
        """The L different λ."""
        return list(dict.fromkeys(lam for lam, _ in self.settings))

    @property
    def lambda_index(self) -> list[int]:
        """The position of each candidate's λ among `lambdas`."""
        lambdas = self.lambdas
        return [lambdas.index(lam) for lam, _ in self.settings]


class GridTensors(NamedTuple):
    """A grid as tensors, for heads of p coordinates."""

    forgettings: Tensor  # (J,)
    ridges: Tensor  # (J,), relative to the scale
    lambdas: Tensor  # (L,)
    lambda_index: Tensor  # (J,)
    counts: Tensor  # (L,): how many coordinates get their ridge back in an update
    bias_bounds: tuple[float, float]  # the least and the largest ridge of the bias


class Statistics(NamedTuple):
    """The tensors of all candidates."""

    M: Tensor  # (L, p + m, p + m), for each λ
    N: Tensor  # (L, 1 + 2m, p)
    W: Tensor  # (J, m, p), for each candidate
    factor: Tensor  # (J, p, p): the Cholesky factors of their A
    score: Tensor  # (J + 1, J + 1): QQᵀ of the samples scored, faded: Q the errors over a row of ones


class Candidates(NamedTuple):
    """The state that an update replaces: the fields of `Statistics`, and numbers."""

    M: Tensor
    N: Tensor
    W: Tensor
    factor: Tensor
    score: Tensor
    scale: float  # of the ridges; 0 before it is known
    active: int
    steps: int
    samples: tuple[float, ...]  # for each λ, the effective samples
    cursors: tuple[int, ...]  # for each λ, the coordinate that gets its ridge back next
    first: int  # the code of the first sample of all
    unrepeated: int
    seen: int  # how many of the hashes in `_seen` count
    history: tuple[tuple[int, int], ...]  # (update, candidate)

    @property
    def statistics(self) -> Statistics:
        """The tensors alone."""
        return Statistics(*self[:5])


class Choice(NamedTuple):
    """From this update on, this candidate sets the head's weights."""

    step: int
    forgetting: float
    ridge: float


class RowMasks(NamedTuple):
    """Which of the n rows of an update are scored, and which are held out because they were learned before."""

    learns: bool | Tensor  # whether some row is not held out
    scored: Tensor | None = None  # (n,) booleans; None: no row
    held_out: Tensor | None = None  # (n,) booleans; None: no row
    positions: Tensor | slice = slice(None)  # the rows that may be held out
    ages: Tensor | int = 0  # of these rows: the updates since they were learned


class Updated(NamedTuple):
    """What an update computes. Where `valid` is false, a number is not finite and nothing may be kept.

    Where every row is held out, only the score and the active candidate are new.
    """

    statistics: Statistics
    active: int | Tensor
    head: Tensor  # (m, p): the W of the active candidate, in the head's dtype
    valid: bool | Tensor


def start(grid: Grid, prior: Tensor, scale: float, active: int, unrepeated: int) -> Candidates:
    """The state before the first update."""
    L, J, (m, p) = len(grid.lambdas), len(grid.settings), prior.shape
    return Candidates(
        M=prior.new_zeros(L, p + m, p + m),
        N=basis_of(prior).expand(L, -1, -1).clone(),
        W=prior.expand(J, m, p).clone(),
        factor=prior.new_zeros(J, p, p),
        score=prior.new_zeros(J + 1, J + 1),
        scale=scale,
        active=active,
        steps=0,
        samples=(0.0,) * L,
        cursors=(0,) * L,
        first=-1,
        unrepeated=unrepeated,
        seen=0,
        history=((0, active),),
    )


def basis_of(prior: Tensor) -> Tensor:
    """The columns (1 + 2m, p) of N for coordinates with their full ridge: 1, the prior and its square."""
    return torch.cat([torch.ones_like(prior[:1]), prior, prior.square()])


@functools.lru_cache(maxsize=64)
def grid_tensors(grid: Grid, p: int, dtype: torch.dtype, device: torch.device) -> GridTensors:
    """The grid for heads of p coordinates, made once."""
    forgettings, ridges = torch.tensor(grid.settings, dtype=dtype).T.contiguous().to(device).unbind()
    return GridTensors(
        forgettings,
        ridges,
        lambdas=torch.tensor(grid.lambdas, dtype=dtype).to(device),
        lambda_index=torch.tensor(grid.lambda_index).to(device),
        counts=torch.tensor([due(p, lam) for lam in grid.lambdas]).to(device),
        bias_bounds=bias_bounds(grid.bias_ridge, dtype),
    )


def tensors_like(grid: Grid, N: Tensor) -> GridTensors:
    """The grid in the dtype and on the device of N."""
    return grid_tensors(grid, N.shape[2], N.dtype, N.device)


def placed(state: Candidates, device: torch.device) -> Candidates:
    """The state on another device."""
    return state._replace(**{name: part.to(device) for name, part in state.statistics._asdict().items()})


def minimum(grid: Grid, state: Candidates) -> Tensor:
    """The objective (m,) of the active candidate at its W."""
    m, p = state.W.shape[1:]
    index = grid.lambda_index[state.active]
    M, N = state.M[index], state.N[index]
    r = active_ridge(grid, state)
    fit = (state.W[state.active] * (M[p:, :p] + r * N[1 : m + 1])).sum(1)
    return (M.diagonal()[p:] + (r * N[m + 1 :]).sum(1) - fit).clamp(min=0)


def active_ridge(grid: Grid, state: Candidates) -> Tensor:
    """The full ridge (p,) of the active candidate."""
    return ridges(tensors_like(grid, state.N), state.scale or 1.0, state.N.shape[2])[state.active, 0]


def square_root(grid: Grid, state: Candidates) -> Tensor:
    """T with TᵀT = B of the active candidate."""
    eye = torch.eye(state.W.shape[2], dtype=state.W.dtype, device=state.W.device)
    if not state.steps:
        return eye / active_ridge(grid, state).sqrt()
    T: Tensor = torch.linalg.solve_triangular(state.factor[state.active], eye, upper=False)
    return T


def updated(
    grid: GridTensors, old: Statistics, basis: Tensor, Phi: Tensor, Y: Tensor, scale: float | Tensor,
    active: int | Tensor, cursors: Tensor, masks: RowMasks, head_dtype: torch.dtype, *, wait: bool,
) -> Updated:  # fmt: skip
    """Score the rows Φ (n, p), Y (n, m) with every candidate, then let all of them learn and choose the best.

    `wait` lets the host wait for whether a Cholesky factor failed, instead of computing it twice.
    """
    score = scored(grid, old, Phi, Y, masks)
    new = old._replace(score=score)
    if masks.learns is not False:
        X = torch.cat([Phi, Y], 1)
        if masks.held_out is not None:
            X = X.masked_fill(masks.held_out[:, None], 0)
        M, N = grown(grid, old, basis, X, cursors)
        factor, aim = factorize(grid, M, N, scale, wait=wait)
        W = torch.cholesky_solve(aim.mT, factor).mT
        if isinstance(masks.learns, Tensor):
            W = torch.where(masks.learns, W, old.W)
        new = Statistics(M, N, W, factor, score)
    if masks.scored is not None:
        active = best(grid, score, active)
    head = (new.W[active] if isinstance(active, int) else new.W.index_select(0, active[None])[0]).to(head_dtype)
    largest = torch.linalg.vector_norm(new.W, torch.inf) + torch.linalg.vector_norm(head, torch.inf)
    return Updated(new, active, head, largest < torch.inf)  # false for NaN, too


def scored(grid: GridTensors, old: Statistics, Phi: Tensor, Y: Tensor, masks: RowMasks) -> Tensor:
    """The score with the errors of every candidate at the rows to score, before it learns them."""
    (J, m, p), n, rows = old.W.shape, len(Phi), masks.scored
    if rows is None:
        return old.score
    errors = (Y.T - (old.W.reshape(-1, p) @ Phi.T).reshape(J, m, n)).square().mean(1)
    if masks.held_out is not None:
        at = masks.positions
        leverage = torch.linalg.solve_triangular(old.factor, Phi[at].T.expand(J, p, -1), upper=False).square().sum(1)
        share = (1 - grid.forgettings[:, None] ** masks.ages * leverage).clamp(min=LEAST)
        errors[:, at] = torch.where(masks.held_out[at], errors[:, at] / share.square(), errors[:, at])
    count, seen = rows.sum(), old.score[-1, -1]
    size = torch.where(rows[:, None], Y, 0).square().sum()
    usual = torch.maximum(old.score[:-1, -1].min() / seen, EXACT * size / (m * count.clamp(min=1)))
    errors = errors.clamp(max=torch.where(seen > 0, OUTLIER * usual, torch.inf))
    Q = torch.cat([errors, errors.new_ones(1, n)]).where(rows, 0)
    return torch.addmm(old.score * FADING ** count.to(Phi.dtype), Q, Q.T)


def grown(grid: GridTensors, old: Statistics, basis: Tensor, X: Tensor, cursors: Tensor) -> tuple[Tensor, Tensor]:
    """M and N with the rows X = [Φ Y] learned, and the ridge given back from the `cursors` (L,) on."""
    p = basis.shape[1]
    lam = grid.lambdas[:, None, None]
    N = lam * old.N
    missing = torch.where(is_restored(p, cursors, grid.counts), 1 - N[:, 0], 0.0)
    return lam * old.M + X.T @ X, torch.addcmul(N, missing[:, None], basis)


def factors(grid: Grid, M: Tensor, N: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The Cholesky factors (J, p, p) of every A, and C + r G (J, m, p), which is WA."""
    return factorize(tensors_like(grid, N), M, N, scale, wait=True)


def factorize(grid: GridTensors, M: Tensor, N: Tensor, scale: float | Tensor, *, wait: bool) -> tuple[Tensor, Tensor]:
    """The Cholesky factors (J, p, p) of every A, and C + r G (J, m, p), which is WA.

    Where rounding makes some A indefinite, because its ridge is too small beside S, all get a larger diagonal; where
    that does not help, because numbers are too large, all factors are NaN.
    """
    p = N.shape[2]
    m = M.shape[1] - p
    each = M.index_select(0, grid.lambda_index)
    ridge = N[:, : m + 1].index_select(0, grid.lambda_index) * ridges(grid, scale, p)
    A, aim = each[:, :p, :p], each[:, p:, :p] + ridge[:, 1:]
    diagonal = A.diagonal(dim1=1, dim2=2)
    diagonal.add_(ridge[:, 0])
    factor, info = torch.linalg.cholesky_ex(A)
    failed = info.any()
    if not wait or bool(failed):
        more = diagonal.amax(1, keepdim=True) * (p * torch.finfo(A.dtype).eps)
        diagonal.add_(torch.where(failed, more, 0))
        factor, info = torch.linalg.cholesky_ex(A)
        factor = torch.where(info.any(), torch.nan, factor)
    return factor, aim


def ridges(grid: GridTensors, scale: float | Tensor, p: int) -> Tensor:
    """The r (J, 1, p) of each candidate and coordinate."""
    r = (scale * grid.ridges)[:, None, None].repeat(1, 1, p)
    r[..., -1].clamp_(*grid.bias_bounds)
    return r


def rounding(grid: Grid, state: Candidates) -> Tensor:
    """About how large the rounding errors of the active candidate's predictions are beside the targets (0-d).

    A further Newton step from W would move it by δ = (WA - C - rG)A⁻¹, by as much as rounding A or W does. Over all
    rows learned this changes predictions by (δSδᵀ)^½ in root sum of squares.
    """
    m, index, j = state.W.shape[1], grid.lambda_index[state.active], state.active
    M, N, W = state.M[index], state.N[index, : m + 1] * active_ridge(grid, state), state.W[j]
    S, aim = M[:-m, :-m], M[-m:, :-m] + N[1:]
    residual = W @ (S + torch.diag(N[0])) - aim
    delta = torch.cholesky_solve(residual.T, state.factor[j]).T
    change, targets = ((delta @ S) * delta).sum().clamp(min=0), M.diagonal()[-m:].sum()
    return (change / targets.clamp(min=1e-30)).sqrt()


def best(grid: GridTensors, score: Tensor, active: int | Tensor) -> Tensor:
    """Of the candidates whose errors exceed the smallest by no more than chance, the best that remembers most.

    The mean of the differences from the candidate with the smallest error is compared with its standard error.
    """
    losses, n, squares = score[:-1, -1], score[-1, -1], score.diagonal()[:-1]
    smallest = losses.argmin()[None]
    row = score.index_select(0, smallest)[0]
    mean = (losses - row[-1]) / n
    square = (squares + squares.index_select(0, smallest) - 2 * row[:-1]) / n
    equal = mean <= CERTAINTY * ((square - mean.square()).clamp(min=0) / (n - 1)).sqrt()
    longest = grid.forgettings.where(equal, -1.0)
    equal = equal & (longest == longest.max())
    loss = losses.where(equal, torch.inf)
    j = torch.arange(len(losses), device=score.device)
    order = torch.where(loss == loss.min(), j.where(j != active, -1), len(j))  # the active one first
    return torch.where(n > 1, order.argmin(), active)


def moved(old: Statistics, delta: Tensor) -> Statistics:
    """The statistics of a head that was moved by δ from outside: every W moves by δ and keeps its curvature."""
    m, p = delta.shape
    shift = torch.eye(p + m, dtype=delta.dtype, device=delta.device)
    shift[p:, :p] = delta  # y becomes y + δφ
    D, G, squares = torch.split_with_sizes(old.N, [1, m, m], 1)
    N = torch.cat([D, G + D * delta, squares + (2 * G + D * delta) * delta], 1)
    return old._replace(M=shift @ old.M @ shift.T, N=N, W=old.W + delta)


def power_of_ten(x: float) -> float:
    """The nearest power of ten, 1 for zero."""
    return 10.0 ** round(math.log10(x)) if x > 0 else 1.0
