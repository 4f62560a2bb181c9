"""The ridge of a least-squares head by evidence: the variance of the noise over that of the weights (MacKay).

Suppose that targets are Y = ΦWᵀ + noise and that the weights scatter about a prior s W₀, where W₀ is the initial head.
The marginal likelihood of the samples is largest where the ridge is the ratio of the two variances, and where s is the
regression of W on W₀: about 1 for a head that was trained before, about 0 for one that was drawn at random. The state
of a head determines both: with A = ΦᵀΦ + diag ridge, B = A⁻¹, n samples and the residual sum of squares RSS,

    γ = Σ_j (1 - ridge_j B_jj)                       the number of weights that the samples determine
    ridge* = γ RSS / ((n - r (γ + 1)) |W - s W₀|²)   summed over the outputs; the bias counts in neither γ nor W
    s* = <W₀, W(0)> / <W₀, (I - B ridge) W₀>         W(0): the weights of a head whose prior is 0

at the ridge that ridge* is; another ridge or prior needs no sample again. Of samples that fade by w = λ^age, n = Σ w,
and r = Σ w² / Σ w: their residuals hold n - r (γ + 1) times the variance of the noise. The head takes κ ridge*: a body
that learns below it fits the same samples, which their residuals do not show. Symbols are those of `least_squares`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sepsa.heads.math.least_squares import LeastSquaresState, identity, square_root, triangular

START = 10.0  # the ridge before the first choice
FIRST = 8  # samples before which nothing is chosen; then after 16, 32, 64, ...
CHECKS = 4  # in the time that a head remembers, once it forgets
FACTOR = 2.0  # by which the best ridge must differ, so that the head changes its own
MOVED = 0.1  # by which the best scale of the prior must differ
ROUNDS = 8  # of choosing and changing, until neither changes
MOST_CHANGE = 1e4  # at once, so that a smaller ridge keeps half of the digits
LEAST, MOST = 1e-4, 1e6  # times the smallest and the largest variance of a feature: the bounds of every choice
ROUNDING = 1e-12  # a variance below this share of the mean square is rounding
EXACT = 1e-12  # residuals below this share of what the weights explain are rounding
LEAST_KNOWN = 1e-6  # share of the initial weights in directions that the samples determine, to choose their scale
LEAST_FREEDOM = 0.01  # of the samples, where the weights interpolate them


class Choice(NamedTuple):
    """The ridge of the weights, and the scale of the initial weights that it pulls to."""

    ridge: float
    scale: float


class Evidence(NamedTuple):
    """What a state says about its ridge."""

    determined: float  # γ
    residual: float  # RSS
    weights: float  # |W - prior|²


class Features(NamedTuple):
    """What a state says about the features, which bounds the ridge."""

    explained: float  # |Φ(W - prior)|², without correlations
    least: float  # the smallest variance of a feature that varies
    most: float  # and the largest


def updates_until(samples: float, rows: float, lam: float) -> int:
    """After how many updates of this many rows the ridge is looked at again, by a head that remembers `samples`."""
    if lam < 1.0:
        return max(1, round(1.0 / (CHECKS * (1.0 - lam))))
    following = float(FIRST) if samples < FIRST else 2.0 ** math.frexp(samples)[1]
    return max(1, math.ceil((following - samples) / max(rows, 1e-9)))


def due(before: float, after: float, steps: int, earlier: int, lam: float) -> bool:
    """Whether the ridge is looked at after the updates `earlier` to `steps`, over which the effective samples went
    from `before` to `after`.
    """
    if after < FIRST:
        return False
    interval = updates_until(after, 1.0, lam) if lam < 1.0 else 0
    if interval and steps // interval > earlier // interval:
        return True
    return before < FIRST or math.frexp(after)[1] > math.frexp(before)[1]


def about(initial: Tensor, scale: float, bias: bool) -> Tensor:
    """The prior (m, p): the initial weights times `scale`, and the initial bias as it is."""
    prior = initial * scale
    if bias:
        prior[:, -1] = initial[:, -1]
    return prior


def best_scale(state: LeastSquaresState, initial: Tensor, scale: float, bias: bool) -> float:
    """s* in [0, 1], or the present `scale` where the samples do not tell."""
    weights = about(initial, 1.0, bias)
    if bias:
        weights[:, -1] = 0.0
    T = square_root(state)
    pulled = (weights * state.ridge_left) @ T.T @ T  # B ridge W₀
    each = weights * (state.W - scale * pulled), weights * (weights - pulled), weights.square()
    along, known, size = torch.stack([part.sum() for part in each]).tolist()
    return min(max(along / known, 0.0), 1.0) if known > LEAST_KNOWN * size else scale


def evidence_of(state: LeastSquaresState, prior: Tensor, bias: bool) -> Evidence:
    """What the state says about its ridge; `bias`: whether the last coordinate is one."""
    k = state.W.shape[1] - bias
    T, left = square_root(state), state.ridge_left
    distance = (state.W - prior).square()
    residual = (state.energy - (left * distance).sum(1)).clamp(min=0).sum()
    determined = k - (left * T.square().sum(0))[:k].sum()
    return Evidence(*torch.stack((determined, residual, distance[:, :k].sum())).tolist())


def features_of(state: LeastSquaresState, prior: Tensor, samples: float, bias: bool) -> Features:
    """What the state says about the features, which costs more than `evidence_of`."""
    k = state.W.shape[1] - bias
    left = state.ridge_left
    R = torch.linalg.inv(square_root(state))  # A = RRᵀ
    squares = (R.square().sum(1) - left)[:k].clamp(min=0) / samples
    variance = squares - ((R[:k] @ R[-1]) / samples).square() if bias else squares
    variance = torch.where(variance > ROUNDING * squares, variance, 0)
    each = (state.W - prior).square()[:, :k].sum(0)
    least, most = torch.where(variance > 0, variance, math.inf).min(), variance.max()
    return Features(*torch.stack((samples * (each * variance).sum(), least, most)).tolist())


def mean_weight(lam: float, steps: int) -> float:
    """r = Σ w² / Σ w after `steps` updates of equally many samples, where w = λ^age."""
    return (1.0 + lam**steps) / (1.0 + lam)


def best_ridge(found: Evidence, ridge: float, samples: float, r: float, features: Callable[[], Features]) -> float:
    """ridge* within its bounds, or the present one where that is within a factor of two or the samples do not tell."""
    determined, residual, weights = found
    if not weights > 0:
        return ridge
    freedom = max(samples - r * (determined + 1.0), LEAST_FREEDOM * samples)
    best = max(determined, 0.0) * residual / (freedom * weights)
    if is_near(best, ridge):
        return ridge
    explained, least, most = features()
    if not (most > 0 and residual > EXACT * explained):
        return ridge
    best = min(max(best, LEAST * least), MOST * most)
    return ridge if is_near(best, ridge) else min(max(best, ridge / MOST_CHANGE), ridge * MOST_CHANGE)


def is_near(best: float, ridge: float) -> bool:
    """Whether a head with this ridge stays with it, also where the best one is not finite."""
    return not math.isfinite(best) or 1 / FACTOR < best / ridge < FACTOR


def best_choice(
    state: LeastSquaresState, initial: Tensor, choice: Choice, samples: float, r: float, kappa: float, bias: bool
) -> Choice:
    """The choice that follows from a state with the present one: another scale, or another ridge, or the present."""
    scale = best_scale(state, initial, choice.scale, bias)
    if abs(scale - choice.scale) > MOVED:
        return choice._replace(scale=scale)
    prior, ridge = about(initial, choice.scale, bias), choice.ridge / kappa
    each = torch.full_like(state.ridge_left, ridge)
    if bias:
        each[-1] = state.ridge_left[-1]
    state = with_ridge(state, prior, each, prior)
    found = evidence_of(state, prior, bias)
    best = best_ridge(found, ridge, samples, r, lambda: features_of(state, prior, samples, bias))
    return choice if best == ridge else choice._replace(ridge=kappa * best)


def best_state(
    state: LeastSquaresState,
    initial: Tensor,
    choice: Choice,
    samples: float,
    r: float,
    kappa: float,
    bias: bool,
    ridge_of: Callable[[float], Tensor],
) -> tuple[LeastSquaresState, Choice]:
    """The state with the choice that follows from it, over and over until that is the present one.

    `ridge_of` gives the ridges (p,) of the ridge of the weights.
    """
    for _ in range(ROUNDS):
        found = best_choice(state, initial, choice, samples, r, kappa, bias)
        if found == choice:
            break
        old, new = about(initial, choice.scale, bias), about(initial, found.scale, bias)
        state, choice = with_ridge(state, old, ridge_of(found.ridge), new), found
    return state, choice


def with_ridge(state: LeastSquaresState, prior: Tensor, ridge: Tensor, new_prior: Tensor) -> LeastSquaresState:
    """The state of a head that has learned the same samples with the ridge (p,) about `new_prior`; H = I.

    A' = A + D for D = ridge - ridge_left, and A'W' = AW - ridge_left prior + ridge new_prior.
    """
    T, W, left = square_root(state), state.W, state.ridge_left
    H = identity(len(T), T) + (T * (ridge - left)) @ T.T
    T = triangular(torch.linalg.cholesky_ex(H).L, T).contiguous()
    before, after = W - prior, new_prior - W
    step = (left * before + ridge * after) @ T.T
    energy = state.energy - (left * before.square()).sum(1) + (ridge * after.square()).sum(1) - step.square().sum(1)
    return LeastSquaresState(T, W + step @ T, None, energy.clamp(min=0), ridge.clone())
