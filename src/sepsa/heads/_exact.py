"""Exact arithmetic on what was learned at forgetting 1: taking samples back, and joining what two heads saw.

Symbols as in `_square_root`. Both subtract from a curvature, so rows that made it many orders larger have left too few
digits of what was there before. The share of them that is lost is known, eps over the smallest eigenvalue that remains
of 1, and where a millionth could be wrong the answer is an error.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sepsa.heads._square_root import Root, square_root

# The largest relative error that counts as exact, a tenth of what is promised.
_EXACT = 1e-7


def unlearn(root: Root, Phi: Tensor, Y: Tensor, samples: float, seen: float, ridge: Tensor) -> Root:
    """The state without rows of weight `samples` in all, of `seen` that were learned; H = I."""
    T, W = square_root(root), root.W
    F, E = Phi @ T.T, Y - Phi @ W.T
    H = torch.eye(len(T), dtype=T.dtype, device=T.device) - F.T @ F
    left = float(torch.linalg.eigvalsh(H - (T * ridge) @ T.T)[0])  # below 0: less than the ridge alone
    C, info = torch.linalg.cholesky_ex(H)
    eps = torch.finfo(T.dtype).eps
    tolerance = math.sqrt(eps)
    if int(info) or not left >= -tolerance or samples > (1 + tolerance) * seen:
        raise ValueError(
            f"features: removing these {len(Phi)} samples would leave less curvature than the prior has "
            f"(smallest relative eigenvalue {left:.3g}; the head remembers {seen:g} samples): "
            "unlearn only what this head learned, with the same features and weights"
        )
    remains = float(torch.linalg.eigvalsh(H)[0])
    if len(T) * eps > _EXACT * remains:
        raise ValueError(
            f"features: these samples make up all but {remains:.3g} of the curvature in some direction, and too few "
            "digits of the rest are left to remove them exactly: rescale the features, or learn the rest anew"
        )
    T = torch.linalg.solve_triangular(C, T, upper=False).contiguous()
    step = (T @ (Phi.T @ E)).T @ T
    energy = (root.energy - (E * (E + Phi @ step.T)).sum(0)).clamp(min=0)
    return Root(T, W - step, None, energy, root.left, root.whole)


def check_one_prior(prior: Tensor, ridge: Tensor, other: Tensor, others_ridge: Tensor) -> None:
    """Refuse to join heads that did not start from one prior (m, p) with one ridge (p,)."""
    if other.shape != prior.shape:
        raise ValueError(f"other must have a head of shape {tuple(prior.shape)}, got {tuple(other.shape)}")
    if not torch.equal(others_ridge.to(ridge), ridge) or not torch.equal(other.to(prior), prior):
        raise ValueError(
            f"other must have started from the same prior, ridge {words(ridge)} and the same initial weights, "
            f"got ridge {words(others_ridge)} and its own: bind both to copies of one head before they learn"
        )


def words(ridge: Tensor) -> str:
    """The ridge of the weights, and that of the bias where it has another."""
    first, last = float(ridge[0]), float(ridge[-1])
    return f"{first:g}" if first == last else f"{first:g} ({last:g} for the bias)"


def merge(root: Root, other: Root, ridge: Tensor, prior: Tensor) -> Root:
    """The state that saw the data of both, which had one prior, H = I."""
    T, W = square_root(root), root.W
    R = torch.linalg.inv(square_root(other)).T  # the other's A = RᵀR
    V = R @ T.T
    eps = torch.finfo(T.dtype).eps
    lost = eps * max(float(torch.linalg.cond(scaled(square))) ** 2 for square in (T, R))
    if not lost <= _EXACT:
        raise ValueError(
            f"other: the curvatures reach over so many orders of magnitude that a share of {lost:.3g} could be lost in "
            "their sum: rescale the features, or let one head learn the samples of both"
        )
    H = V.T @ V - (T * ridge) @ T.T
    H.diagonal().add_(1)  # T(A₁ + A₂ - diag ridge)Tᵀ
    both = torch.linalg.solve_triangular(torch.linalg.cholesky(H), T, upper=False).contiguous()
    pull = (other.W - W) @ R.T @ R + ridge * (W - prior)
    merged = W + pull @ both.T @ both
    # Both objectives at the common minimum, with the prior counted once.
    rise = torch.linalg.solve(T.T, (merged - W).T).square().sum(0) + (R @ (merged - other.W).T).square().sum(0)
    energy = root.energy + other.energy + rise - (ridge * (merged - prior).square()).sum(1)
    return Root(both, merged, None, energy.clamp(min=0), root.left, root.whole)


def scaled(T: Tensor) -> Tensor:
    """T with columns of length 1: what the units of the features contribute to its condition harms no digit."""
    length: Tensor = torch.linalg.vector_norm(T, dim=0)
    return T / length.clamp(min=torch.finfo(T.dtype).tiny)
