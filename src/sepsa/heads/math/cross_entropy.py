"""The mathematics of `SoftmaxNewton`: pure functions of tensors, new state out, one body for host and CUDA graph.

Softmax cross-entropy by an online Newton method with one p x p curvature for all classes.

Symbols: Φ (n, p) features, with a last column of ones where the head has a bias; τ (n, K) targets, probabilities times
the weights of sample and class, m = Σ_k τ_k; W (K, p) the head; P (n, K) its probabilities; R = mP - τ. The Hessian of
the summed cross-entropy is Σ_i m_i (diag P_i - P_i P_iᵀ) ⊗ φ_i φ_iᵀ. With V = P(1 - P), Gershgorin bounds each class
factor by 2 diag V_i, and the sum of Kronecker products is taken for one product of sums, as K-FAC does:

    diag s ⊗ A,    A = Σ_i ω_i φ_i φ_iᵀ + diag ridge/s̄,    ω_i = Σ_k U_ik,    s = 2 Σ_i U_i / Σ_i ω_i,    s̄ = 2/K    (1)

U = (mV + R²/m)/2 is the mean of the Fisher information and its sample: R² expects mV. V alone forgets where it matters:
a head that overshoots is sure of what is wrong, finds no curvature there, and overshoots again.

Both sums fade, because the V of old samples is that of an old head: A and Σ U keep λ = M/(M + 7n) of themselves in an
update of n samples, M = 8p + the samples seen, so they remember the last eighth; `forgetting` may lower λ. The classes
of one batch are not those of all, so its own part of (1) is inflated to cover each, by ρ = max_k s_k(batch)/s_k:

    W <- W - diag(1/s) Rᵀ Φ (λA + ρ Φᵀ diag(ω) Φ)⁻¹,    A <- λA + Φᵀ diag(ω) Φ                                    (2)

A single sample thus moves its logits by about R/ω and never by R/(ω s). Forgotten ridge comes back as rows √q e_j with
the residual √q (W - prior)_j, in rotation. CrossEntropyState: T (p, p) with TᵀT = A⁻¹, and what (1) and (2) sum over.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sepsa.heads.math.least_squares import PRODUCT_LIMIT, add_by_qr, andrews, root_of
from sepsa.heads.math.ridge import coordinates, lacking, next_cursor, rotation

FADE = 7.0  # how many old samples a new one replaces in the curvature; benchmarks/softmax_newton.py compares
LOST_DIGITS = 1e-10  # the least squared pivot of a curvature of unit diagonal whose ridge is changed
TOLERANCE = 1e-3  # of the sum of a sample's class probabilities: float16 and bfloat16 round them


class CrossEntropyState(NamedTuple):
    """All tensors of a SoftmaxNewton. An update makes a new one; only captured updates write into the tensors."""

    T: Tensor  # (p, p)
    W: Tensor  # (K, p)
    prior: Tensor  # (K, p)
    shares: Tensor  # (K,): Σ U of each class
    ridge_left: Tensor  # (p,)
    counters: Tensor  # (3,): updates, samples, the coordinate next to get its ridge back
    weights: Tensor  # (classes,)
    ridge: Tensor  # (p,): as A has it, ridge/s̄

    def to(self, device: torch.device) -> CrossEntropyState:
        """The state on this device."""
        return CrossEntropyState(*(tensor.to(device) for tensor in self))


def start(W: Tensor, weights: Tensor, ridge: Tensor) -> CrossEntropyState:
    """Before any data: the head W (K, p), the classes' weights and the ridge (p,) of A."""
    return CrossEntropyState(
        T=torch.diag(1 / ridge.sqrt()),
        W=W,
        prior=W.clone(),
        shares=W.new_ones(len(W)),
        ridge_left=ridge.clone(),
        counters=W.new_zeros(3),
        weights=weights,
        ridge=ridge,
    )


def learned(
    state: CrossEntropyState,
    W: Tensor,
    Phi: Tensor,
    targets: Tensor,
    sample_weight: Tensor | None,
    *,
    forgetting: float,
    label_smoothing: float,
    head_dtype: torch.dtype,
    by_qr: bool = False,
) -> tuple[CrossEntropyState, Tensor, Tensor]:
    """What the state would be after an update from the head W, and two flags. The host reads nothing.

    The first flag is false where targets are no probabilities, or where a number cannot be held, also by a head of
    `head_dtype`; the second is true where the rows are so large that digits are lost unless `by_qr`.
    """
    dtype = W.dtype
    (K, p), n, C = W.shape, len(Phi), len(state.weights)
    t = probabilities_of(targets.detach(), state.weights).reshape(n, C).to(dtype)
    valid = (t >= 0).all() & ((t.sum(1) - 1).abs() <= TOLERANCE).all()
    t = ((1 - label_smoothing) * t + label_smoothing / C) * state.weights
    if sample_weight is not None:
        t = t * sample_weight.reshape(-1, 1).to(dtype)

    # (1), at the head as it is
    m = t.sum(1, keepdim=True)
    P = both(Phi @ W.T).softmax(1)
    R = (m * P - t)[:, C - K :]
    P = P[:, C - K :]
    tiny = torch.finfo(dtype).tiny
    U = (m * P * (1 - P) + R.square() / m.clamp(min=tiny)) / 2
    omega = U.sum(1, keepdim=True)
    updates, seen, cursor = state.counters
    total = seen + (FADE + 1) * p
    lam = (total / (total + FADE * m.sum())).clamp(max=forgetting)
    shares = lam * state.shares + (1 - lam) + U.sum(0)
    s = class_factors(shares)
    rho = ((U.sum(0) / s).max() * min(K, 2) / U.sum().clamp(min=tiny)).clamp(min=1)

    # The rows that A gains, scaled to weight one, and the residuals of (2) as they see them
    scale = omega.sqrt()
    c = rotation(p, forgetting, at_least=n)
    at, left = coordinates(p, c, cursor.long(), W.device), lam * state.ridge_left
    assert isinstance(at, Tensor)  # because the cursor is one
    q = lacking(left, state.ridge, at)
    back = q.sqrt()[:, None]
    rows = torch.cat([Phi * scale, Phi.new_zeros(c, p).scatter(1, at[:, None], back)])
    residuals = torch.cat([R / s / scale.clamp(min=tiny), back * (W - state.prior)[:, at].T])
    inflation = torch.cat([rho.expand(n), rho.new_ones(c)])[:, None]

    T = state.T / lam.sqrt()
    F = T @ rows.T
    too_large = F.square().sum() > PRODUCT_LIMIT
    d = inflation.sqrt()
    T, step = absorb_by_qr(T, rows, residuals, d) if by_qr else absorb(T, F, residuals, d)
    T, W = T.contiguous(), (W - step).contiguous()  # in one layout however made, as BLAS rounds by the layout
    counters = torch.stack([updates + 1, seen + m.sum(), next_cursor(cursor, c, p)])
    sums = Phi.square().sum() + shares.sum() + counters[1]
    finite = valid & sums.isfinite() & T.isfinite().all() & W.to(head_dtype).isfinite().all()
    return (
        CrossEntropyState(T, W, state.prior, shares, left.scatter_add(0, at, q), counters, state.weights, state.ridge),
        finite,
        too_large,
    )


def mean_loss(
    state: CrossEntropyState, W: Tensor, Phi: Tensor, targets: Tensor, sample_weight: Tensor | None, smoothing: float
) -> Tensor:
    """The mean cross-entropy (0-d) of the head W at samples, each by its weight."""
    C = len(state.weights)
    t = probabilities_of(targets.detach(), state.weights).reshape(len(Phi), C).to(W.dtype)
    t = ((1 - smoothing) * t + smoothing / C) * state.weights
    if sample_weight is not None:
        t = t * sample_weight.reshape(-1, 1).to(W.dtype)
    return -(t * both(Phi @ W.T).log_softmax(1)).sum() / t.sum()


def with_ridge(state: CrossEntropyState, ridge: Tensor) -> CrossEntropyState | None:
    """The state with another ridge (p,) of A, of which each coordinate has the share that it had of the old one.

    None where that would lose digits. State may be of several outputs, each with its own T.
    """
    share = state.ridge_left / state.ridge
    R = torch.linalg.inv(state.T).mT
    A = R.mT @ R + torch.diag_embed((ridge - state.ridge) * share)
    size = A.diagonal(dim1=-2, dim2=-1).sqrt()
    C = torch.linalg.cholesky_ex(A / (size[..., :, None] * size[..., None, :])).L
    least = C.diagonal(dim1=-2, dim2=-1).min()
    if not bool(least.square() > LOST_DIGITS):
        return None
    one = torch.eye(len(ridge), dtype=ridge.dtype, device=ridge.device).expand(A.shape)
    T = (torch.linalg.solve_triangular(C, one, upper=False) / size[..., None, :]).contiguous()
    return state._replace(T=T, ridge_left=ridge * share, ridge=ridge)


def absorb(T: Tensor, F: Tensor, residuals: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Q (r, p) joins the A of TᵀT = A⁻¹: the new T, and the step ((A + QᵀD²Q)⁻¹QᵀE)ᵀ with D = diag d, d (r, 1).

    With F = TQᵀ: (I + FFᵀ)^(-1/2) T is such a root, and the step is Tᵀ(I + FD²Fᵀ)⁻¹FE = TᵀFD(I + DFᵀFD)⁻¹D⁻¹E.
    """
    p, r = F.shape
    if r >= p:
        G = F * d.T
        return triangular(root(F @ F.T), T), solve(root(G @ G.T), F @ residuals).T @ T
    M, Q = F.T @ F, F.T @ T
    return andrews(T, F, Q, root(M)), (d * solve(root(d * M * d.T), residuals / d)).T @ Q


def absorb_by_qr(T: Tensor, rows: Tensor, residuals: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """`absorb` for rows (r, p) of any size, which squares none of them."""
    R = torch.linalg.inv(T).T
    none = R.new_zeros(len(R), residuals.shape[1])
    new, _, _ = add_by_qr(R, none[:, :0], rows, residuals[:, :0])
    inflated, Z, _ = add_by_qr(R, none, d * rows, residuals / d)
    return root_of(new), triangular(inflated, Z, upper=True).T


def root(M: Tensor) -> Tensor:
    """The Cholesky factor of I + M, where what rounding takes from a large M is given back."""
    M = M.clone()
    M.diagonal().add_(1 + 4 * torch.finfo(M.dtype).eps * M.diagonal().sum())
    C: Tensor = torch.linalg.cholesky_ex(M).L
    return C


def solve(C: Tensor, X: Tensor) -> Tensor:
    """(CCᵀ)⁻¹X."""
    return triangular(C.T, triangular(C, X), upper=True)


def triangular(C: Tensor, X: Tensor, upper: bool = False) -> Tensor:
    solution: Tensor = torch.linalg.solve_triangular(C, X, upper=upper)
    return solution


def both(logits: Tensor) -> Tensor:
    """Logits of all classes: one output is the logit of class 1 against a 0 for class 0."""
    return torch.cat([torch.zeros_like(logits), logits], -1) if logits.shape[-1] == 1 else logits


def probabilities_of(targets: Tensor, weights: Tensor) -> Tensor:
    """Targets of any kind as probabilities (..., classes); a label that is none becomes NaN."""
    C = len(weights)
    if targets.is_floating_point():
        targets = targets.to(weights.dtype)  # before 1 - targets, which has more digits
        return torch.cat([1 - targets, targets], -1) if targets.shape[-1] == 1 else targets
    one = torch.arange(C, device=targets.device)
    hot = (targets.unsqueeze(-1) == one).to(weights.dtype)
    return hot / hot.sum(-1, keepdim=True)


def class_factors(shares: Tensor) -> Tensor:
    """The s (K,) of (1)."""
    return min(len(shares), 2) * shares / shares.sum()


def floor(ridge: Tensor, K: int) -> Tensor:
    """The ridge (p,) as A has it: ridge/s̄."""
    return ridge * max(K / 2, 1)


def effective_samples(state: CrossEntropyState, forgetting: float) -> float:
    """About how many samples A remembers: the λ of (2) summed up, for updates of the mean size."""
    updates, seen = map(float, state.counters[:2])
    start = (FADE + 1) * len(state.T)
    total = seen + start
    remembered: float = total / (FADE + 1) * (1 - (start / total) ** (FADE + 1))
    return min(remembered, seen / updates / (1 - forgetting)) if forgetting < 1.0 and updates else remembered
