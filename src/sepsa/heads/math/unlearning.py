"""Taking samples back that were learned at forgetting 1, exactly.

Symbols as in `least_squares`. This subtracts from a curvature, so rows that made it many orders larger have left too
few digits of what was there before. The share of them that is lost is known, eps over the smallest eigenvalue that
remains of 1, and where a millionth could be wrong the answer is an error.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sepsa.heads.math.least_squares import Root, square_root

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
