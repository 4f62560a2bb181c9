"""The ridge of a least-squares head by evidence: the variance of the noise over that of the weights (MacKay).

Suppose that targets are Y = ΦWᵀ + noise and that the weights scatter about a prior s W₀, where W₀ is the initial head.
The marginal likelihood of the samples is largest where the ridge is the ratio of the two variances, and where s, one
number for each output, is the regression of W on W₀: about 1 for a head that was trained before, about 0 for one that
was drawn at random. The state of a head determines both: with A = ΦᵀΦ + diag ridge, B = A⁻¹, n samples and, of each
output, the residual sum of squares RSS and the sum of squares V of the target about its mean,

    γ = Σ_j (1 - ridge_j B_jj)                                  the number of weights that the samples determine
    ridge* = γ Σ RSS/V / ((n - r (γ + 1)) Σ |W - t W₀|²/V)      summed over the outputs; no bias in γ and W
    s* = <W₀, W(0)> / <W₀, (I - B ridge) W₀>                    W(0): the weights of a head whose prior is 0

at the ridge that ridge* is; another ridge or prior needs no sample again. Each output is divided by its own V, and t is
1 for a head that was trained before, where the samples refute 0 and not 1 as its s, and 0 for others: so the unit of
one target changes neither the ridge nor the prior of other outputs. Of samples that fade by w = λ^age, n = Σ w, and
r = Σ w² / Σ w: their residuals hold n - r (γ + 1) times the variance of the noise. The head takes κ ridge*: a body that
learns below it fits the same samples, which their residuals do not show. Symbols are those of `least_squares`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sepsa.heads.base.parameters import ridges
from sepsa.heads.base.ridge import BiasRidge, bias_bounds
from sepsa.heads.least_squares.math import SAMPLES, LeastSquaresState, identity, square_root, start, triangular

START = 10.0  # the ridge before the first choice,
START_SQUARES = 1000.0  # or this many times the variance of the first features, or the square of one row, if less
FIRST = 8  # samples before which nothing is chosen
CHECKS, LEAST_INTERVAL = 4, 32  # looks in the time that a head remembers, once it forgets; updates between them
FACTOR = 2.0  # by which the best ridge must differ, so that the head changes its own
MOVED = 0.1  # by which the best scale of a prior must differ
REFUTED = 4.0  # variances of the noise by which the objective is higher at a scale that the samples refute
ROUNDS = 8  # of choosing and changing, until neither changes
MOST_CHANGE = 1e4  # at once, so that a smaller ridge keeps half of the digits
LEAST, MOST = 1e-4, 1e6  # times the smallest and the largest variance of a feature: the bounds of every choice
ROUNDING = 1e-12  # a variance below this share of the mean square is rounding
EXACT = 1e-12  # residuals below this share of the variance of their targets are rounding
LEAST_KNOWN = 1e-6  # share of the initial weights in directions that the samples determine, to choose their scale
LEAST_FREEDOM = 0.01  # of the samples, where the weights interpolate them


class Choice(NamedTuple):
    """The ridge of the weights, and what evidence knows beside it."""

    ridge: float
    scale: Tensor  # (m, 1): s, by which the prior of an output is its initial weights
    unit: float = 1.0  # Σ w² / Σ w of sample weights, so that weights below one count as many samples as there are


class Evidence(NamedTuple):
    """What a state says about its ridge, with each output in units of the variance of its target."""

    determined: float  # γ
    residual: float  # RSS/V, a mean over the outputs; 0 where it is rounding
    weights: float  # |W - t W₀|²/V without the bias, likewise
    freedom: float  # n - r (γ + 1)
    scale: Tensor  # (m, 1): s* in [0, 1], or the present one where the samples do not tell


def updates_until(steps: int, lam: float) -> int:
    """After how many updates the ridge is looked at again, by a head that has learned so many and forgets with λ."""
    following = 2 ** steps.bit_length()
    if lam < 1.0:
        interval = max(LEAST_INTERVAL, round(1.0 / (CHECKS * (1.0 - lam))))
        following = min(following, (steps // interval + 1) * interval)
    return following - steps


def due(earlier: int, steps: int, lam: float) -> bool:
    """Whether the ridge is looked at after the updates `earlier` to `steps`: after 1, 2, 4, ..., and in intervals."""
    return steps >= earlier + updates_until(earlier, lam)


def evidence_of(
    state: LeastSquaresState, initial: Tensor, scale: Tensor, samples: float, r: float, bias: bool
) -> Evidence:
    """What the state of a head with the prior `scale` W₀ says about its ridge; `bias`: whether the last coordinate is
    one. No number but a scale that the samples do not tell depends on `scale`.
    """
    T, W, left = square_root(state), state.W, state.ridge_left
    k = W.shape[1] - bias
    determined = k - (left * T.square().sum(0))[:k].sum()
    freedom = (samples - r * (determined + 1.0)).clamp(min=LEAST_FREEDOM * samples)
    pulled = (initial * left) @ T.T @ T  # B ridge W₀: W(s) = W(0) + s B ridge W₀
    known = (initial * left * (initial - pulled)).sum(
        1, keepdim=True
    )  # the objective is known (s - s*)² above its least
    told = known > LEAST_KNOWN * (left * initial.square()).sum(1, keepdim=True)
    along = (initial * left * (W - scale * pulled)).sum(1, keepdim=True)
    best = torch.where(told, along / torch.where(told, known, 1), scale)

    def at(s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """W(s), the squares of its distance from the prior, and the objective."""
        new = W + (s - scale) * pulled
        energy = state.energy[:, None] + known * ((s - best).square() - (scale - best).square())
        return new, (new - s * initial).square(), energy.clamp(min=0)

    _, distance, energy = at(best)
    noise = (energy - (left * distance).sum(1, keepdim=True)).clamp(min=0) / freedom
    was_trained = (known * best.square() > REFUTED * noise) & (known * (best - 1).square() <= REFUTED * noise)
    t = (told & was_trained).to(W)
    new, distance, energy = at(t)
    residual = (energy - (left * distance).sum(1, keepdim=True)).clamp(min=0)
    V, whole = sums_of_squares(T, new, t * initial, energy, left, bias)
    whole = whole + state.energy[:, None] + (left * (scale * initial).square()).sum(1, keepdim=True)
    varies = max(ROUNDING, 8 * torch.finfo(V.dtype).eps) * whole < V
    share = varies / torch.where(varies, V, 1) / varies.sum().clamp(min=1)
    sums = determined, (share * residual).sum(), (share * distance[:, :k]).sum(), freedom
    gamma, unexplained, weights, left_over = torch.stack(sums).tolist()
    exact = unexplained < max(EXACT, 8 * torch.finfo(V.dtype).eps)
    scale = torch.where(told, best.clamp(0, 1), scale)
    return Evidence(gamma, 0.0 if exact else unexplained, weights, left_over, scale)


def sums_of_squares(
    T: Tensor, W: Tensor, prior: Tensor, energy: Tensor, left: Tensor, bias: bool
) -> tuple[Tensor, Tensor]:
    """V (m, 1), the squares of each target about its mean, and W A Wᵀ, beside which a small V is rounding.

    With T = QR, R upper, A = (RᵀR)⁻¹: the weights without the bias explain the squares of R⁻ᵀW without the last one.
    """
    R = torch.linalg.qr(T, mode="r").R
    Z = triangular(R.T, W.T)
    k = len(T) - bias
    V = energy[:, 0] + Z[:k].square().sum(0) - (left * prior.square())[:, :k].sum(1)
    if bias:  # what the ridge of the bias adds to the objective of a head without weights
        all_, ridge = R[-1, -1] ** -2, left[-1]
        samples = (all_ - ridge).clamp(min=torch.finfo(T.dtype).tiny)
        mean = (Z[-1] / R[-1, -1] - ridge * prior[:, -1]) / samples
        V = V - samples * ridge / all_ * (mean - prior[:, -1]).square()
    return V[:, None], Z.square().sum(0)[:, None]


def variances_of(state: LeastSquaresState, samples: float, bias: bool) -> tuple[float, float]:
    """The smallest variance of a feature that varies, and the largest, which bound the ridge."""
    k = state.W.shape[1] - bias
    left = state.ridge_left
    R = torch.linalg.inv(square_root(state))  # A = RRᵀ
    squares = (R.square().sum(1) - left)[:k].clamp(min=0) / samples
    variance = squares - ((R[:k] @ R[-1]) / samples).square() if bias else squares
    variance = torch.where(variance > ROUNDING * squares, variance, 0)
    least, most = torch.stack((torch.where(variance > 0, variance, math.inf).min(), variance.max())).tolist()
    return least, most


def mean_weight(lam: float, steps: int) -> float:
    """r = Σ w² / Σ w after `steps` updates of equally many samples, where w = λ^age."""
    return (1.0 + lam**steps) / (1.0 + lam)


def best_ridge(found: Evidence, ridge: float, variances: Callable[[], tuple[float, float]]) -> float:
    """ridge* within its bounds, or the present one where that is within a factor of two or the samples do not tell."""
    if not (found.weights > 0 and found.residual > 0):
        return ridge
    best = max(found.determined, 0.0) * found.residual / (found.freedom * found.weights)
    if is_near(best, ridge):
        return ridge
    least, most = variances()
    if not most > 0:
        return ridge
    best = min(max(best, LEAST * least), MOST * most)
    return ridge if is_near(best, ridge) else min(max(best, ridge / MOST_CHANGE), ridge * MOST_CHANGE)


def is_near(best: float, ridge: float) -> bool:
    """Whether a head with this ridge stays with it, also where the best one is not finite."""
    return not math.isfinite(best) or 1 / FACTOR < best / ridge < FACTOR


def first_ridge(features: Tensor, weight: Tensor | None, dtype: torch.dtype) -> float:
    """The ridge with which a head in this dtype starts that learns these features (..., k) first."""
    x = features.detach().reshape(-1, features.shape[-1])
    x = x if x.device.type == "mps" else x.double()
    square = float(x.square().mean())
    variance = float(x.var(0).mean()) if len(x) > 1 else 0.0
    # Beside a large offset, in whose square a variance loses its digits, the variance counts.
    mean = (variance if variance > ROUNDING * square else square) * (1.0 if weight is None else float(weight.mean()))
    return min(START, max(START_SQUARES * mean, torch.finfo(dtype).tiny ** 0.5)) if mean > 0 else START


def ridges_of(linear: nn.Linear, ridge: float, bias_ridge: BiasRidge, by_evidence: bool, like: Tensor) -> Tensor:
    """The ridge (p,) of each coordinate; by evidence that of the bias is by default as small beside it as at START."""
    if by_evidence and bias_ridge is None:
        bias_ridge = bias_bounds(None, like.dtype)[1] * min(1.0, ridge / START)
    return ridges(linear, ridge, bias_ridge, like)


def started(state: LeastSquaresState, ridge: Tensor, bias: bool) -> LeastSquaresState | None:
    """The state with another ridge (p,), however much smaller; None: a feature was other than 0 before."""
    if state.counters[SAMPLES] == 0:
        new = start(state.prior, ridge)._replace(W=state.W)
    else:
        T, left = square_root(state).clone(), state.ridge_left.clone()
        k = len(T) - bias
        known = 1 - left * T.square().sum(0)  # of each coordinate
        if bool((known[:k] > torch.finfo(T.dtype).eps ** 0.5).any()):
            return None
        T[:, :k] *= (left[:k] / ridge[:k]).sqrt()
        left[:k] = ridge[:k]
        new = with_ridge(state._replace(T=T, H=None, ridge_left=left), ridge, state.prior)
    return new._replace(ridge=ridge, counters=state.with_root(new.T).counters)


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
    """The state with the choice that follows from it, over and over until that is the present one; both are returned
    themselves where nothing changes or a number would not be finite.

    `ridge_of` gives the ridges (p,) of the ridge of the weights.
    """
    given = state, choice
    for _ in range(ROUNDS):
        held, ridge = choice.scale, choice.ridge / kappa
        each = torch.full_like(state.ridge_left, ridge)
        if bias:
            each[-1] = state.ridge_left[-1]
        plain = with_ridge(state, each, state.prior)  # with the noise that the residuals show
        found = evidence_of(plain, initial, held, samples, r, bias)
        best = best_ridge(found, ridge, partial(variances_of, plain, samples, bias))
        scale = torch.where((found.scale - held).abs() > MOVED, found.scale, held)
        if best == ridge and torch.equal(scale, held):
            break
        # Another prior of one output changes no other output: forgetting may have left less than the whole ridge.
        each = state.ridge_left
        if best != ridge:
            choice = choice._replace(ridge=kappa * best)
            each = ridge_of(choice.ridge)
        state, choice = with_ridge(state, each, initial * scale), choice._replace(scale=scale)
    finite = bool(state.T.isfinite().all() & state.W.isfinite().all())
    return (state._replace(ridge=ridge_of(choice.ridge)), choice) if finite else given


def with_ridge(state: LeastSquaresState, ridge: Tensor, prior: Tensor) -> LeastSquaresState:
    """The state of a head that has learned the same samples with the ridge (p,) about another prior (m, p); H = I.

    A' = A + D for D = ridge - ridge_left, and A'W' = AW - ridge_left prior + ridge prior'.
    """
    T, W, left = square_root(state), state.W, state.ridge_left
    H = identity(len(T), T) + (T * (ridge - left)) @ T.T
    T = triangular(torch.linalg.cholesky_ex(H).L, T).contiguous()
    before, after = W - state.prior, prior - W
    step = (left * before + ridge * after) @ T.T
    energy = state.energy - (left * before.square()).sum(1) + (ridge * after.square()).sum(1) - step.square().sum(1)
    new = state.with_root(T)._replace(W=W + step @ T, energy=energy.clamp(min=0))
    return new._replace(ridge_left=ridge.clone(), prior=prior)
