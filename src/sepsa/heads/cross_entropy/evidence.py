"""The ridge of a cross-entropy head by evidence, in Laplace's form.

Suppose that the weights of class k scatter about the initial ones W₀ with a variance of 1 / (ridge s_k/s̄), and take the
loss for a parabola of the curvature s_k A that (1) of `cross_entropy` has. The evidence of the samples is then
stationary where

    γ = Σ_j (1 - ridge_j B_jj)                         the weights of a class that the samples determine, B = A⁻¹
    ridge* = (K - 1) γ / Σ_k (s_k/s̄) |W_k - W₀_k|²     K - 1 at least 1; the bias counts in neither γ nor W

Outputs that learn separately have one ridge: Σ γ over Σ |W - W₀|², K - 1 = 1. The head takes κ ridge*: a body that
learns below it fits the same samples. The ridge weighs at least as much as the samples of one update, and 10, because a
Newton step must not follow one batch alone, and at most twice as much as the samples that A remembers: a sample weighs

    mean_j (A_jj - ridge_j) / samples

in A. A head starts at the least, of samples at even probabilities, so that it depends on no unit.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sepsa.heads.cross_entropy.math import CrossEntropyState, effective_samples, inverse_root, over_mean_share
from sepsa.heads.least_squares.evidence import FIRST, MOST_CHANGE, is_near

LEAST_SAMPLES, LEAST_UPDATES = 10.0, 1.0  # whose weight is the least ridge, the larger of the two
MOST_REMEMBERED = 2.0  # times the weight of the samples that A remembers: the largest ridge
SMALLEST, LARGEST = 1e-100, 1e100  # of what a head starts with


class Evidence(NamedTuple):
    """What a state says about its ridge."""

    determined: float  # (K - 1) γ, or Σ γ over outputs that learn separately
    weights: float  # Σ_k (s_k/s̄) |W_k - W₀_k|²
    sample: float  # the ridge that weighs as much as one sample
    remembered: float  # samples
    seen: float  # samples
    rows: float  # samples of an update in the mean


def evidence_of(state: CrossEntropyState, forgetting: float, bias: bool) -> Evidence:
    """What the state says about its ridge; `bias`: whether the last coordinate is one."""
    (K, p), left = state.W.shape, state.ridge_left
    K, k = 1 if left.ndim == 2 else K, p - bias
    if state.A is None:
        T, diagonal = state.T, torch.linalg.inv_ex(state.T).inverse.square().sum(-1)
    else:
        T, diagonal = inverse_root(state.A)[0], state.A.diagonal()
    gamma = (1 - left * T.square().sum(-2))[..., :k].sum()
    gained = (diagonal - left)[..., :k].clamp(min=0).mean(-1).sum()
    each = (state.W - state.prior)[:, :k].square().sum(1)
    distance = ((state.shares / state.shares.mean() if K > 1 else 1.0) * each).sum()
    determined, weights, gained = torch.stack([gamma, distance, gained]).tolist()
    counts = [(updates, seen) for updates, seen, _ in state.counters.reshape(-1, 3).tolist() if updates and seen]
    counts = counts or [(1.0, 0.0)]
    updates, seen = (sum(each) for each in zip(*counts, strict=True))
    total = sum(effective_samples(*count, p, forgetting) for count in counts)
    sample = gained / total / over_mean_share(K) if total > 0 else 0.0
    several = len(counts)
    return Evidence(max(K - 1, 1) * determined, weights, sample, total / several, seen / several, seen / updates)


def best_ridge(found: Evidence, ridge: float, kappa: float) -> float:
    """κ ridge* within its bounds, or the present one where that is near or the samples do not tell."""
    if not (found.seen >= FIRST and found.weights > 0 and found.sample > 0 and math.isfinite(sum(found))):
        return ridge
    least = found.sample * max(LEAST_SAMPLES, LEAST_UPDATES * found.rows)
    most = max(MOST_REMEMBERED * found.sample * found.remembered, least)
    best = min(max(kappa * found.determined / found.weights, least), most)
    if least <= ridge <= most and is_near(best, ridge):
        return ridge
    return max(best, ridge / MOST_CHANGE)


def first_ridge(features: Tensor, weight: Tensor | None, outputs: int) -> float | None:
    """The ridge before the first samples, features (n, k) of this weight (n,): the least, at even probabilities.

    None for features of zeros, or that are not finite.
    """
    square = features.square().mean(1)
    if weight is not None:
        square = square * weight
    total, n = torch.stack([square.sum(), square.new_tensor(len(square)) if weight is None else weight.sum()]).tolist()
    if not n > 0:
        return None
    curvature = 0.25 if outputs == 1 else 1 - 1 / outputs  # ω of (1)
    sample = total / n * curvature / over_mean_share(outputs)
    ridge = sample * max(LEAST_SAMPLES, LEAST_UPDATES * n)
    return ridge if SMALLEST < ridge < LARGEST else None
