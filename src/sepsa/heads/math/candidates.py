"""The mathematics of self-tuning: candidates over (λ, ridge) that share what was seen, and their scores.

Symbols as in `least_squares`. The candidates of one λ share all that was seen, M = Σ λ^age [Φ Y]ᵀ[Φ Y], whose blocks
S = Σ λ^age ΦᵀΦ and C = Σ λ^age YᵀΦ are, and N with the rows D, the part of its ridge that each coordinate has left,
G = D prior, and D prior². The candidate of ridge r is then

    A = S + r D,    W = (C + r G) A⁻¹,    where r is another for the bias,

the very minimizer that RLS(ridge=r, forgetting=λ) keeps, at one Cholesky factor a candidate and update.

A candidate's error at a sample it has not learned is honest and free. From the second epoch on no sample is new, and
what a head has learned, or the body that made the features, flatters those that remember most. So a fixed tenth of all
samples, told apart by a hash of the raw row, is learned the first time it comes and never again, neither by the heads
nor by the body, and only this tenth is scored while samples repeat. What is left of the first time is taken out: a
head that learned (φ, y) with weight w = λ^age and now errs by e would err by e / (1 - w φᵀA⁻¹φ) had it not.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sepsa.heads.base.parameters import BiasRidge, hold_bias
from sepsa.heads.base.repeated_samples import UNREPEATED, Lookup
from sepsa.heads.math.ridge import rotation

# An error weighs this factor less with each sample scored after it.
FADING = 0.98
# Errors that differ by no more than so many standard errors count as equal, and the longer memory wins.
CERTAINTY = 0.5
# No error counts for more than so many times the mean one of the best: how badly a candidate failed while the data
# changed says nothing about it afterwards.
OUTLIER = 4.0
# Below this share of the targets' mean square errors are as good as none.
EXACT = 1e-6
# What is left of 1 - λ^age φᵀA⁻¹φ, where the features have moved since, is at least this.
LEAST = 0.1
# Up to this p, NumPy's Cholesky factors of several matrices cost less than torch's, which starts threads for them.
_NUMPY_LIMIT = 64


class Grid(NamedTuple):
    """The settings of J candidates, each (λ, ridge), and what they share."""

    settings: tuple[tuple[float, float], ...]
    bias_ridge: BiasRidge = "ridge"  # of the last coordinate, in all candidates

    @property
    def lambdas(self) -> list[float]:
        """The L different λ."""
        return list(dict.fromkeys(lam for lam, _ in self.settings))

    @property
    def of(self) -> list[int]:
        """Which of them each candidate has."""
        lambdas = self.lambdas
        return [lambdas.index(lam) for lam, _ in self.settings]


class Candidates(NamedTuple):
    """What an update changes: replaced as a whole."""

    M: Tensor  # (L, p + m, p + m), for each λ
    N: Tensor  # (L, 1 + 2m, p)
    W: Tensor  # (J, m, p), for each candidate
    factor: Tensor  # (J, p, p): the Cholesky factors of their A
    score: Tensor  # (J + 1, J + 1): QQᵀ of the samples scored, faded: Q the errors over a row of ones
    scale: float  # of the ridges; 0 before it is known
    active: int
    steps: int
    samples: tuple[float, ...]  # for each λ, less what was forgotten of them
    cursors: tuple[int, ...]  # for each λ, the coordinate whose turn it is to get its ridge back
    first: int  # the code of the first sample of all
    unrepeated: int
    seen: int  # how many of the hashes in `_seen` count
    history: tuple[tuple[int, int], ...]  # (update, candidate)


class Choice(NamedTuple):
    """From this update on, this candidate sets the head's weights."""

    step: int
    forgetting: float
    ridge: float


def start(grid: Grid, prior: Tensor, scale: float, active: int) -> Candidates:
    """The state before the first update."""
    L, J, (m, p) = len(grid.lambdas), len(grid.settings), prior.shape
    return Candidates(
        prior.new_zeros(L, p + m, p + m),
        basis_of(prior).expand(L, -1, -1).clone(),
        prior.expand(J, m, p).clone(),
        prior.new_zeros(J, p, p),
        prior.new_zeros(J + 1, J + 1),
        scale,
        active,
        0,
        (0.0,) * L,
        (0,) * L,
        -1,
        UNREPEATED,
        0,
        ((0, active),),
    )


def basis_of(prior: Tensor) -> Tensor:
    """Of this (1 + 2m, p) a coordinate with all of its ridge has one in N: 1, the prior and its square."""
    return torch.cat([torch.ones_like(prior[:1]), prior, prior.square()])


def placed(state: Candidates, device: torch.device) -> Candidates:
    """The state on another device."""
    return state._replace(**{name: getattr(state, name).to(device) for name in ("M", "N", "W", "factor", "score")})


def minimum(grid: Grid, state: Candidates) -> Tensor:
    """The objective (m,) of the active candidate at its W."""
    m, p = state.W.shape[1:]
    M, N = state.M[grid.of[state.active]], state.N[grid.of[state.active]]
    r = active_ridge(grid, state)
    fit = (state.W[state.active] * (M[p:, :p] + r * N[1 : m + 1])).sum(1)
    return (M.diagonal()[p:] + (r * N[m + 1 :]).sum(1) - fit).clamp(min=0)


def active_ridge(grid: Grid, state: Candidates) -> Tensor:
    """The whole ridge (p,) of the active candidate."""
    return ridges(grid, state.scale or 1.0, state.N)[state.active, 0]


def square_root(grid: Grid, state: Candidates) -> Tensor:
    """T with TᵀT = B of the active candidate."""
    eye = torch.eye(state.W.shape[2], dtype=state.W.dtype, device=state.W.device)
    if not state.steps:
        return eye / active_ridge(grid, state).sqrt()
    T: Tensor = torch.linalg.solve_triangular(state.factor[state.active], eye, upper=False)
    return T


def best(grid: Grid, state: Candidates) -> int:
    """Of the candidates whose errors exceed the smallest by no more than chance, the best that remembers most."""
    *products, (*losses, n) = state.score.tolist()
    if n <= 1:
        return state.active
    best = losses.index(min(losses))

    def by_chance(j: int) -> bool:
        # The mean of the differences against its standard error, of n samples in pairs.
        mean = (losses[j] - losses[best]) / n
        square = (products[j][j] + products[best][best] - 2 * products[j][best]) / n
        return bool(mean <= CERTAINTY * math.sqrt(max(0.0, square - mean**2) / (n - 1)))

    chosen = [j for j in range(len(losses)) if j == best or by_chance(j)]
    return min(chosen, key=lambda j: (-grid.settings[j][0], losses[j], j != state.active))


def scored(grid: Grid, state: Candidates, Phi: Tensor, Y: Tensor, size: float, found: Lookup) -> Tensor:
    """The score with these samples, of every candidate before it learns them."""
    held, score = found.held, state.score
    if found.scored is not None:
        if not found.scored:
            return score
        Phi, Y = Phi[found.scored], Y[found.scored]
        size = float(Y.square().sum())
        held = [found.scored.index(row) for row in held]
    n, (J, m, p) = len(Phi), state.W.shape
    E = Y.T - (state.W.reshape(-1, p) @ Phi.T).reshape(J, m, n)
    errors = E.square().mean(1)
    if held:
        known = Phi[held].T.expand(J, p, -1)
        leverage = torch.linalg.solve_triangular(state.factor, known, upper=False).square().sum(1)
        copies = Phi.new_tensor([[lam**age for age in found.ages] for lam, _ in grid.settings])
        # The features have moved since, so the difference may come out at zero or below.
        errors[:, held] /= (1 - copies * leverage).clamp(min=LEAST) ** 2
    if seen := float(score[-1, -1]):
        usual = max(float(score[:-1, -1].min()) / seen, EXACT * size / (m * n))
        errors = errors.clamp(0, OUTLIER * usual)
    Q = torch.cat([errors, errors.new_ones(1, n)])
    return torch.addmm(score, Q, Q.T, beta=FADING**n)


def learned(
    grid: Grid, state: Candidates, basis: Tensor, X: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """M, N, W and the factors with the samples X learned."""
    M, N = grown(grid, state, basis, X)
    return M, N, *solve(grid, M, N, scale)


def grown(grid: Grid, state: Candidates, basis: Tensor, X: Tensor) -> tuple[Tensor, Tensor]:
    """M and N with these samples learned."""
    p = basis.shape[1]
    lambdas = grid.lambdas
    lam = X.new_tensor(lambdas)[:, None, None]
    start, count = torch.tensor([state.cursors, [rotation(p, value) for value in lambdas]], device=X.device)
    ahead = (torch.arange(p, device=X.device) - start[:, None]) % p
    N = lam * state.N
    lacks = torch.where(ahead < count[:, None], 1 - N[:, 0], 0.0)  # of the coordinates whose turn it is
    return lam * state.M + X.T @ X, torch.addcmul(N, lacks[:, None], basis)


def solve(grid: Grid, M: Tensor, N: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """W (J, m, p) of all candidates, and the Cholesky factors of their A."""
    factor, aim = factors(grid, M, N, scale)
    return torch.cholesky_solve(aim.mT, factor).mT, factor


def factored(grid: Grid, state: Candidates) -> Tensor:
    """The factors of a state as the update that made it left them, to the bit."""
    return factors(grid, state.M, state.N, state.scale)[0]


def factors(grid: Grid, M: Tensor, N: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The Cholesky factors (J, p, p) of every A, and C + r G (J, m, p), which is WA."""
    p = N.shape[2]
    m = M.shape[1] - p
    of = torch.tensor(grid.of, device=M.device)
    each = M.index_select(0, of)
    ridge = N[:, : m + 1].index_select(0, of) * ridges(grid, scale, N)
    A, aim = each[:, :p, :p], each[:, p:, :p] + ridge[:, 1:]
    diagonal = A.diagonal(dim1=1, dim2=2)
    diagonal.add_(ridge[:, 0])
    factor = cholesky(A)
    if factor is None:  # a ridge too small to be seen beside S
        diagonal.add_(diagonal.amax(1, keepdim=True) * (p * torch.finfo(A.dtype).eps))
        factor = cholesky(A)
    if factor is None:
        factor = torch.full_like(A, math.nan)  # too large to square
    return factor, aim


def ridges(grid: Grid, scale: float, N: Tensor) -> Tensor:
    """The r (J, 1, p) of each candidate and coordinate."""
    r = (scale * N.new_tensor([r for _, r in grid.settings])[:, None, None]).repeat(1, 1, N.shape[2])
    hold_bias(r, grid.bias_ridge)
    return r


def moved(state: Candidates, delta: Tensor) -> Candidates:
    """Where somebody moved the head by δ, every candidate moves by δ, its curvature as it is."""
    M, N, W = shifted(state.M, state.N, state.W, delta)
    return state._replace(M=M, N=N, W=W)


def shifted(M: Tensor, N: Tensor, W: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same of M, N and W."""
    m, p = delta.shape
    shift = torch.eye(p + m, dtype=delta.dtype, device=delta.device)
    shift[p:, :p] = delta  # y becomes y + δφ
    D, G, squares = torch.split_with_sizes(N, [1, m, m], 1)
    N = torch.cat([D, G + D * delta, squares + (2 * G + D * delta) * delta], 1)
    return shift @ M @ shift.T, N, W + delta


def power_of_ten(x: float) -> float:
    """The nearest power of ten, 1 for zero."""
    return 10.0 ** round(math.log10(x)) if x > 0 else 1.0


def cholesky(A: Tensor) -> Tensor | None:
    """The lower factors of A (J, p, p); None where one is not positive definite."""
    if A.device.type != "cpu" or A.shape[1] > _NUMPY_LIMIT:
        factor, info = torch.linalg.cholesky_ex(A)
        return None if bool(info.any()) else factor
    try:
        return torch.from_numpy(np.linalg.cholesky(A.numpy(), upper=True)).mT
    except np.linalg.LinAlgError:
        return None
