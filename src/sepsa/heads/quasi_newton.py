"""The mathematics of `OnlineLBFGS`: pure functions of tensors, new state out.

Online L-BFGS: a quasi-Newton head in O(lp) time and memory, for heads too wide for a p x p matrix.

Symbols: Φ (n, p) the features of a batch, with a last column of ones where the head has a bias; T (n, m) its targets;
N the samples seen, less what was forgotten of them; l the memory. The objective of one batch is

    f(V) = mean_i loss(VΦ_i, T_i) + ½ Σ_j (ridge_j/N) ‖V_j - prior_j‖²,   loss = ½‖VΦ_i - T_i‖² or the cross-entropy

With G = ∇f(V) (m, p), read as one long vector g, a step is

    V = (1 - β) Z + β W          where the gradient is taken, between the fast iterate Z and the head W
    d = Hg                       H the inverse curvature that the last l pairs (s, y) describe
    Z <- Z - η d
    W <- W + c (Z - W)           c = 3n/(N + 2n): the mean of all Z, each weighted by the square of its time

n < p samples can be fitted exactly along the way, noise included, so Z jitters however long it runs; the mean W is
what converges. β makes the jitter smaller than averaging alone does (Defazio et al., "The road less scheduled", 2024).

The step η is the smaller of two: what is safe on this batch, and the mean of that since H last changed. Along d the
objective has slope -gᵀd and curvature dᵀ∇²f d, which for the cross-entropy changes by at most the factor exp(Rη), R the
largest range over the classes of a row of Φdᵀ (Bach, "Self-concordant analysis for logistic regression", 2010). So
η = log(1 + R gᵀd / dᵀ∇²f d) / R stops short of the minimum along d; for the squared loss, R = 0, it is the minimum.

A pair is a direction s and y = ∇²f s, the difference of two gradients on the same samples, written out. One batch shows
∇²f s under noise about √(p/n) as large as itself, so s is held and y is the mean over the batches of a share 1/l of the
time so far; then s <- d/‖d‖ begins the next pair. In the end y <- y + δ‖y‖s, so that sᵀy >= δ‖s‖‖y‖ and H is positive
definite by construction. With S, Y (l, mp) the pairs, R the upper triangle of SYᵀ and D its diagonal, H is

    H = γI + [S; Y]ᵀ M [S; Y],   M = [R⁻ᵀ(D + γYYᵀ)R⁻¹, -γR⁻ᵀ; -γR⁻¹, 0],   γ = mean of sᵀy/yᵀy

(Byrd, Nocedal and Schnabel, "Representations of quasi-Newton matrices", 1994): two products of a vector with [S; Y].
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sepsa.heads.least_squares.math import identity, triangular

_DELTA = 0.1  # any value from 1e-4 to 0.3 does as well


class LBFGSState(NamedTuple):
    """All that an update changes. An update makes a new one and writes into none."""

    W: Tensor  # (m, p)
    Z: Tensor  # (m, p)
    prior: Tensor  # (m, p)
    s: Tensor  # (m, p): the pair in the making
    y: Tensor  # (m, p): and the sum for its y
    A: Tensor  # (2, l, mp): [S; Y], the newest pair last
    SY: Tensor  # (l, l), of which the upper triangle counts, float64 on the CPU as YY
    YY: Tensor  # (l, l)
    steps: int = 0
    pairs: int = 0  # those that A holds
    samples: float = 0.0  # N
    pair_samples: float = 0.0  # those that the pair in the making saw
    slope_sum: float = 0.0  # of gᵀd and gᵀd/η since H last changed
    curvature_sum: float = 0.0
    gamma: float = 1.0  # of H, which follows from the pairs
    M: Tensor = torch.empty(0)  # (2l, 2l), with zeros where a young memory has no pairs yet


KEYS = LBFGSState._fields[:-2]  # of a saved state


def direction(state: LBFGSState, G: Tensor) -> tuple[Tensor, float, float]:
    """d/‖d‖ (m, p) for d = Hg, ‖d‖ and gᵀd/‖d‖; where rounding made Hg no descent, the same for d = g."""
    g = G.reshape(-1)
    A = state.A.reshape(-1, len(g))
    d = state.gamma * g + (state.M @ (A @ g)) @ A
    length = float(torch.linalg.vector_norm(d))
    d = d / (length or 1.0)
    slope = float(g @ d)
    if not slope > 0:
        length = slope = float(torch.linalg.vector_norm(g))
        d = g / (length or 1.0)
    return d.reshape(G.shape), length, slope


def remember(state: LBFGSState) -> LBFGSState:
    """The pair in the making becomes the newest of the memory, and H that of the pairs now."""
    s = state.s.reshape(-1)
    y = state.y.reshape(-1) / (state.pair_samples or 1.0)
    y = y + _DELTA * torch.linalg.vector_norm(y) * s
    # s is zero until the first step, and y may have become too large to square.
    if not (float(s @ y) > 0 and math.isfinite(float(y @ y))):
        return state
    A = torch.cat([state.A[:, 1:], torch.stack([s, y])[:, None]], 1)
    SY, YY = state.SY.roll((-1, -1), (0, 1)), state.YY.roll((-1, -1), (0, 1))
    SY[-1] = 0.0
    SY[:, -1], YY[:, -1] = (A @ y).double().cpu().unbind()
    YY[-1] = YY[:, -1]
    pairs = min(state.pairs + 1, len(SY))
    return compact(state._replace(A=A, SY=SY, YY=YY, pairs=pairs, slope_sum=0.0, curvature_sum=0.0))


def compact(state: LBFGSState) -> LBFGSState:
    """The state with γ and M of its pairs."""
    memory, pairs = len(state.SY), state.pairs
    held = slice(memory - pairs, memory)
    M = torch.zeros(2, memory, 2, memory, dtype=torch.float64)
    gamma = 1.0
    if pairs:
        R, YY = state.SY[held, held].triu(), state.YY[held, held]
        D = R.diagonal()
        gamma = float((D / YY.diagonal()).mean())
        inverse = triangular(R, identity(pairs, R), upper=True)
        M[0, held, 0, held] = inverse.T @ (D.diag() + gamma * YY) @ inverse
        M[0, held, 1, held] = -gamma * inverse.T
        M[1, held, 0, held] = -gamma * inverse
    return state._replace(gamma=gamma, M=M.reshape(2 * memory, -1).to(state.A))


def curve(P: Tensor | None, U: Tensor) -> Tensor:
    """The loss's second derivative at the outputs, times U (n, m): I without P, else that of the (one or m) logits."""
    if P is None:
        return U
    if U.shape[1] == 1:
        return P * (1 - P) * U
    return P * (U - (P * U).sum(1, keepdim=True))


def step_size(state: LBFGSState, length: float, slope: float, bend: float, reach: float) -> tuple[float, float, float]:
    """The step η along a direction, and the new sums of slopes and curvatures.

    `slope` and `bend` are the first and second derivative, and `reach` is the largest change of outputs' differences at
    step 1, zero for the squared loss: it bounds how the curvature of the cross-entropy changes. η is at most the mean
    of those since H changed, weighted by their slopes.
    """
    total, bent = state.slope_sum, state.curvature_sum
    if not (slope > 0 and bend > 0):
        return 0.0, total, bent
    eta = slope / bend
    if reach * eta > 1e-6:  # below, the logarithm is its argument
        eta = math.log1p(reach * eta) / reach
    total, bent = total + slope * length, bent + slope * length**2 / eta
    return min(eta, length * total / bent), total, bent
