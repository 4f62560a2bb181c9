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

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sepsa.compiled.cross_entropy import FADE as FADE
from sepsa.compiled.cross_entropy import TOLERANCE as TOLERANCE
from sepsa.heads.base.ridge import coordinates, due, lacking, next_cursor
from sepsa.heads.least_squares.math import (
    PRODUCT_LIMIT,
    add_by_qr,
    andrews,
    copies,
    identity,
    root,
    root_of,
    triangular,
)

# The least squared pivot of a curvature of unit diagonal that is formed as sums of samples of this dtype.
LOST_DIGITS = {torch.float64: 1e-10, torch.float32: 1e-5}
SMALL, LARGE = 64, 3  # of more than 64 columns, a block of p/3 samples is large; docs/how-it-works/performance.md
CHUNK = 2**25  # numbers that an array of samples and classes has at most


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
    A: Tensor | None = None  # (p, p): after a large block, of which T has not been computed yet; T is then an older one

    def map(self, function: Callable[[Tensor], Tensor]) -> CrossEntropyState:
        """The function of every tensor."""
        return CrossEntropyState._make(None if part is None else function(part) for part in self)

    def copy(self) -> CrossEntropyState:
        """The state in memory of its own."""
        return CrossEntropyState._make(copies(self))


def start(W: Tensor, weights: Tensor, ridge: Tensor, separate: bool) -> CrossEntropyState:
    """Before any data: the head W (K, p), the classes' weights and the ridge (p,) of A, of which each output has one of
    its own where they learn separately.
    """
    several = W.shape[:1] if separate else ()
    left = ridge.expand(*several, -1).clone()
    return CrossEntropyState(
        T=torch.diag_embed(1 / left.sqrt()),
        W=W,
        prior=W.clone(),
        shares=W.new_ones(len(W)),
        ridge_left=left,
        counters=W.new_zeros(*several, 3),
        weights=weights,
        ridge=ridge,
    )


class UpdateSettings(NamedTuple):
    """What an update depends on beside the state and its samples."""

    forgetting: float
    label_smoothing: float
    head_dtype: torch.dtype  # of the head's own weights


def learned(
    state: CrossEntropyState,
    W: Tensor,
    Phi: Tensor,
    targets: Tensor,
    sample_weight: Tensor | None,
    settings: UpdateSettings,
    by_qr: bool = False,
) -> tuple[CrossEntropyState, Tensor, Tensor]:
    """What the state would be after an update from the head W, and two flags. The host reads nothing.

    The first flag is false where targets are no probabilities, or where a number cannot be held, also by the head; the
    second is true where the rows are so large that digits are lost unless `by_qr`.
    """
    p, n = W.shape[1], len(Phi)
    R, U, samples, valid = residuals_of(W, Phi, targets, sample_weight, state.weights, settings.label_smoothing)
    omega = U.sum(1, keepdim=True)
    lam, shares, s, rho = blended(state, U.sum(0), U.sum(), samples, settings.forgetting)
    tiny = torch.finfo(W.dtype).tiny

    # The rows that A gains, scaled to weight one, and the residuals of (2) as they see them
    scale = omega.sqrt()
    at, q, left, counters = restored(state, lam, settings.forgetting, n, samples)
    c, back = len(at), q.sqrt()[:, None]
    rows = torch.cat([Phi * scale, Phi.new_zeros(c, p).scatter(1, at[:, None], back)])
    residuals = torch.cat([R / s / scale.clamp(min=tiny), back * (W - state.prior)[:, at].T])
    inflation = torch.cat([rho.expand(n), rho.new_ones(c)])[:, None]

    T = state.T / lam.sqrt()
    F = T @ rows.T
    too_large = F.square().sum() > PRODUCT_LIMIT
    d = inflation.sqrt()
    T, step = absorb_by_qr(T, rows, residuals, d) if by_qr else absorb(T, F, residuals, d)
    T, W = T.contiguous(), (W - step).contiguous()  # in one layout however made, as BLAS rounds by the layout
    sums = Phi.square().sum() + shares.sum() + counters[1]
    finite = valid & sums.isfinite() & T.isfinite().all() & W.to(settings.head_dtype).isfinite().all()
    ridge_left = left.scatter_add(0, at, q)
    return (
        CrossEntropyState(T, W, state.prior, shares, ridge_left, counters, state.weights, state.ridge),
        finite,
        too_large,
    )


def learned_separately(
    state: CrossEntropyState,
    W: Tensor,
    Phi: Tensor,
    targets: Tensor,
    sample_weight: Tensor | None,
    settings: UpdateSettings,
    by_qr: bool = False,
) -> tuple[CrossEntropyState, Tensor, Tensor]:
    """`learned` for outputs that have a curvature each; targets and weights are (n, K). Without samples, one stays."""

    def one(alone: CrossEntropyState, t: Tensor, w: Tensor) -> tuple[tuple[Any, ...], Tensor, Tensor]:
        new, finite, too_large = learned(alone, alone.W, Phi, t[:, None], w, settings, by_qr)
        return new[:6], finite, too_large

    omega = torch.ones_like(targets) if sample_weight is None else sample_weight.to(targets)
    old, several = state._replace(W=W), CrossEntropyState._make([0] * 7 + [None] * 2)
    each = old._replace(W=W[:, None], prior=old.prior[:, None], shares=old.shares[:, None])
    tensors, finite, too_large = torch.func.vmap(one, in_dims=(several, 1, 1))(each, targets, omega)
    seen, changed = (omega > 0).any(0), {}
    for name, new, was in zip(state._fields, tensors, old[:6], strict=False):
        kept = seen.reshape(-1, *[1] * (was.ndim - 1))
        changed[name] = new.reshape(was.shape).where(kept, was).contiguous()
    return old._replace(**changed), finite.all(), too_large.any()


def restored(
    state: CrossEntropyState, lam: Tensor, forgetting: float, n: int, samples: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The coordinates (c,) that get their ridge back in an update of n samples, how much each, what λ has left, and the
    counters after the update.
    """
    p, (updates, seen, cursor) = state.W.shape[1], state.counters
    at = coordinates(p, due(p, forgetting, at_least=n), cursor.long(), state.W.device)
    assert isinstance(at, Tensor)  # because the cursor is one
    left = lam * state.ridge_left
    counters = torch.stack([updates + 1, seen + samples, next_cursor(cursor, len(at), p)])
    return at, lacking(left, state.ridge, at), left, counters


def residuals_of(
    W: Tensor, Phi: Tensor, targets: Tensor, sample_weight: Tensor | None, weights: Tensor, smoothing: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """R and U (n, K) of (1) at the head W, in the dtype of Φ; Σ m; and whether the targets are valid (0-d)."""
    dtype, K, C, n = Phi.dtype, len(W), len(weights), len(Phi)
    weights = weights.to(dtype)
    P = both(Phi @ W.to(dtype).T).softmax(1)
    if targets.is_floating_point():
        t = probabilities_of(targets.detach(), weights).reshape(n, C)
        valid = (t >= 0).all() & ((t.sum(1) - 1).abs() <= TOLERANCE).all()
        t = ((1 - smoothing) * t + smoothing / C) * weights
        if sample_weight is not None:
            t = t * sample_weight.reshape(-1, 1).to(dtype)
        m = t.sum(1, keepdim=True)
        R = m * P - t
    else:
        y = targets.detach().reshape(n, 1).long()
        valid = ((y >= 0) & (y < C)).all()
        y = y.clamp(0, C - 1)
        hit, even = (1 - smoothing) * weights[y], smoothing / C * weights
        if sample_weight is not None:
            factor = sample_weight.reshape(-1, 1).to(dtype)
            hit, even = hit * factor, even * factor
        m = hit + even.sum(-1, keepdim=True) if smoothing else hit
        R = (m * P - even if smoothing else m * P).scatter_add_(1, y, -hit)
    R, P = R[:, C - K :], P[:, C - K :]
    if dtype == torch.float32 and not (targets.is_floating_point() or smoothing):
        return R, R.abs() / 2, m.sum(), valid  # the same in fewer kernels: mP(1 - P) + m(P - y)² = m|P - y|, y 0 or 1
    U = (m * P * (1 - P) + R.square() / m.clamp(min=torch.finfo(dtype).tiny)) / 2
    return R, U, m.sum(), valid


def blended(
    state: CrossEntropyState, U: Tensor, total_U: Tensor, samples: Tensor, forgetting: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """λ, Σ U with the block's U (K,) and their sum, s and ρ of (2), for a block of so many samples."""
    K, p = state.W.shape
    total = state.counters[1] + (FADE + 1) * p
    lam = (total / (total + FADE * samples)).clamp(max=forgetting)
    shares = lam * state.shares + (1 - lam) + U
    s = class_factors(shares)
    rho = ((U / s).max() * min(K, 2) / total_U.clamp(min=torch.finfo(U.dtype).tiny)).clamp(min=1)
    return lam, shares, s, rho


def is_large(p: int, n: int) -> bool:
    """Whether n samples are so many that the sums over them are formed first, and A is kept instead of T."""
    return SMALL < p <= LARGE * n


class LargeBlock(NamedTuple):
    """What `look_large` hands over to `finish_large`."""

    new: CrossEntropyState  # the state after the block, but for A, and W, which is that of the head before
    old: Tensor  # λA with the ridge that comes back
    M: Tensor  # Φᵀ diag(ω) Φ
    G: Tensor  # the gradient, scaled by 1/s and by `size`
    root: Tensor  # the Cholesky factor of λA + ρM of unit diagonal
    size: Tensor  # the roots of its diagonal


def look_large(
    state: CrossEntropyState,
    W: Tensor,
    Phi: Tensor,
    targets: Tensor,
    sample_weight: Tensor | None,
    settings: UpdateSettings,
) -> tuple[LargeBlock, Tensor, Tensor]:
    """The first half of `learned` by A, which the state must have, instead of T: RᵀΦ, ΦᵀωΦ and one factor of order p.

    Φ may have fewer digits than the state: the sums over samples and the step are then as exact as Φ. The second flag
    is true where A with a unit diagonal has so small a pivot that rounding could decide it, or where the new weights
    could be very large; then another route learns. Where the flags allow it, all that follows is finite.
    """
    assert state.A is not None
    G, M, U, samples, invalid = block_sums(W, Phi, targets, sample_weight, state.weights, settings.label_smoothing)
    lam, shares, s, rho = blended(state, U, U.sum(), samples, settings.forgetting)
    at, q, left, counters = restored(state, lam, settings.forgetting, len(Phi), samples)
    back = torch.zeros_like(left).scatter(0, at, q)
    old = lam * state.A + torch.diag(back)
    H = old + rho * M
    size = H.diagonal().sqrt()
    G = G / s[:, None] + back * (W - state.prior)
    root = torch.linalg.cholesky_ex((H / (size[:, None] * size)).to(Phi.dtype)).L
    new = state._replace(W=W, shares=shares, ridge_left=left + back, counters=counters)
    block = LargeBlock(new, old, M, (G / size).to(Phi.dtype), root, size)
    lost = ~(root.diagonal().min().square() > LOST_DIGITS[Phi.dtype])
    finite = ~invalid & (H.sum() + shares.sum() + counters[1]).isfinite()
    if torch.finfo(settings.head_dtype).max > 1e30:
        # A is at least its ridge, so that |step| <= |G| / ridge.
        most = torch.linalg.vector_norm(W) + torch.linalg.vector_norm(G) / new.ridge_left.min()
        return block, finite & most.isfinite(), lost | ~(most < 1e30)
    return block, finite & finish_large(block).W.to(settings.head_dtype).isfinite().all(), lost


def finish_large(block: LargeBlock) -> CrossEntropyState:
    """The state after a block that `look_large` has found good."""
    step = torch.cholesky_solve(block.G.T, block.root).T / block.size
    return block.new._replace(W=block.new.W - step, A=block.old + block.M)


def block_sums(
    W: Tensor, Phi: Tensor, targets: Tensor, sample_weight: Tensor | None, weights: Tensor, smoothing: float
) -> list[Tensor]:
    """RᵀΦ, Φᵀ diag(ω) Φ, Σ U and Σ m in W's dtype, and whether a target is invalid, from `CHUNK` logits at a time."""
    n, size, V = len(Phi), max(CHUNK // len(weights), 1), W.to(Phi.dtype)
    omega = [None] * n if sample_weight is None else torch.split(sample_weight.reshape(n), size)
    sums: list[Tensor] = []
    for x, y, each in zip(torch.split(Phi, size), torch.split(targets.reshape(n, -1), size), omega, strict=False):
        R, U, samples, valid = residuals_of(V, x, y, each, weights, smoothing)
        scaled = x * U.sum(1, keepdim=True).sqrt()
        part = [*(t.to(W.dtype) for t in (R.T @ x, scaled.T @ scaled, U.sum(0), samples)), ~valid]
        sums = [a + b for a, b in zip(sums, part, strict=True)] if sums else part
    return sums


def with_root(state: CrossEntropyState) -> CrossEntropyState:
    """The state with T, which is computed from A where A is newer."""
    return state if state.A is None else state._replace(T=inverse_root(state.A)[0], A=None)


def with_curvature(state: CrossEntropyState) -> CrossEntropyState:
    """The state with A, which is computed from T where there is none."""
    if state.A is not None:
        return state
    R = torch.linalg.inv(state.T).mT
    return state._replace(A=R.mT @ R)


def with_ridge(state: CrossEntropyState, ridge: Tensor) -> CrossEntropyState | None:
    """The state of a head that has learned the same with another ridge (p,) of A, or None where that loses digits.

    Each coordinate keeps the share of its ridge that it has. For A' = A + D with D = (ridge' - ridge) share, the
    weights W' = W - ((W - prior) D) A'⁻¹ are those of that ridge if the loss is a parabola, which cross-entropy is
    nearly about its minimum. The state may be of several outputs, each with its own T. A state that has A keeps it.
    """
    share = state.ridge_left / state.ridge
    D = (ridge - state.ridge) * share
    new = state._replace(ridge_left=ridge * share, ridge=ridge)
    if state.A is None:  # TᵀT = A⁻¹: (A + D)⁻¹ = Tᵀ(I + TDTᵀ)⁻¹T
        T = state.T
        H = identity(T.shape[-1], T) + (T * D[..., None, :]) @ T.mT
        C, least = unit_root(H)
        T = triangular(C, T / H.diagonal(dim1=-2, dim2=-1).sqrt()[..., None]).contiguous()
        new = new._replace(T=T)
    else:
        A = state.A + torch.diag(D)
        T, least = inverse_root(A)
        new = new._replace(A=A)
    if not bool(least > LOST_DIGITS[torch.float64]):
        return None
    step = ((state.W - state.prior) * D).reshape(*T.shape[:-2], -1, T.shape[-1]) @ T.mT @ T
    return new._replace(W=(state.W - step.reshape(state.W.shape)).contiguous())


def unit_root(A: Tensor) -> tuple[Tensor, Tensor]:
    """The Cholesky factor of A (..., p, p) with a unit diagonal, and its least squared pivot (0-d)."""
    size = A.diagonal(dim1=-2, dim2=-1).sqrt()
    C = torch.linalg.cholesky_ex(A / (size[..., :, None] * size[..., None, :])).L
    return C, C.diagonal(dim1=-2, dim2=-1).min().square()


def inverse_root(A: Tensor) -> tuple[Tensor, Tensor]:
    """A T (..., p, p) with TᵀT = A⁻¹, and the least squared pivot (0-d) of A with a unit diagonal."""
    C, least = unit_root(A)
    one = identity(A.shape[-1], A).expand(A.shape)
    return (triangular(C, one) / A.diagonal(dim1=-2, dim2=-1).sqrt()[..., None, :]).contiguous(), least


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
    new, _, _ = add_by_qr(R, none, rows, residuals)
    inflated, Z, _ = add_by_qr(R, none, d * rows, residuals / d)
    return root_of(new), triangular(inflated, Z, upper=True).T


def solve(C: Tensor, X: Tensor) -> Tensor:
    """(CCᵀ)⁻¹X."""
    return triangular(C.T, triangular(C, X), upper=True)


def both(logits: Tensor) -> Tensor:
    """Logits of all classes: one output is the logit of class 1 against a 0 for class 0."""
    return torch.cat([torch.zeros_like(logits), logits], -1) if logits.shape[-1] == 1 else logits


def probabilities_of(targets: Tensor, like: Tensor) -> Tensor:
    """Targets (..., K) as probabilities of all classes, in the dtype of `like`."""
    targets = targets.to(like.dtype)  # before 1 - targets, which has more digits
    return torch.cat([1 - targets, targets], -1) if targets.shape[-1] == 1 else targets


def mean_loss(outputs: Tensor, targets: Tensor, weights: Tensor | None = None, smoothing: float = 0.0) -> Tensor:
    """The mean cross-entropy of logits (..., K) for labels (...) or probabilities (..., K), with weights of classes."""
    logits = both(outputs).reshape(-1, max(outputs.shape[-1], 2))
    if targets.is_floating_point():
        targets = probabilities_of(targets, logits).reshape(logits.shape)
    else:
        targets = targets.reshape(-1).long()
    total = functional.cross_entropy(logits, targets, weights, reduction="sum", label_smoothing=smoothing)
    return total / len(logits)


def wrong_targets(targets: Tensor, like: Tensor, tolerance: float = TOLERANCE) -> ValueError | None:
    """The error for labels (...) that are no classes, or probabilities (..., K) that are none.

    `like` (C,) has the number of classes; rows that are not finite are left to others.
    """
    C = len(like)
    if not targets.is_floating_point():
        wrong = targets[(targets < 0) | (targets >= C)]
        if len(wrong):
            return ValueError(f"targets must be class labels in [0, {C - 1}], got {int(wrong[0])}: nothing was learned")
        return None
    rows = probabilities_of(targets, like).reshape(-1, C)
    bad = ((rows < 0).any(1) | ((rows.sum(1) - 1).abs() > tolerance)) & rows.isfinite().all(1)
    if not bool(bad.any()):
        return None
    what = (
        "0 or 1, or probabilities in [0, 1]"
        if targets.shape[-1] == 1
        else "class probabilities, at least 0 and of sum 1"
    )
    first = targets.reshape(len(rows), -1)[bad][0].tolist()
    return ValueError(f"targets must be {what}, got {first}: nothing was learned")


def class_factors(shares: Tensor) -> Tensor:
    """The s (K,) of (1)."""
    return min(len(shares), 2) * shares / shares.sum()


def over_mean_share(K: int) -> float:
    """1/s̄ for K outputs that share a curvature, by which A has a ridge."""
    return max(K / 2, 1.0)


def effective_samples(updates: float, seen: float, p: int, forgetting: float) -> float:
    """About how many of the samples seen A (p, p) remembers: the λ of (2) summed up, for updates of the mean size."""
    start = (FADE + 1) * p
    total = seen + start
    remembered: float = total / (FADE + 1) * (1 - (start / total) ** (FADE + 1))
    return min(remembered, seen / updates / (1 - forgetting)) if forgetting < 1.0 and updates else remembered
