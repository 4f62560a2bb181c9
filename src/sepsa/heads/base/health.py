"""`health()` of heads with a curvature: numbers that show why a run goes wrong."""

from __future__ import annotations

import torch
from torch import Tensor


def report(T: Tensor, ridge_left: Tensor, samples: float) -> dict[str, float]:
    """The numbers of `health` for TᵀT = A⁻¹, the ridge (p,) that coordinates have left and the samples remembered.

    Of several curvatures (m, p, p) each number is that of the worst.
    """
    roots = torch.linalg.svdvals(T)  # of the eigenvalues of A⁻¹, the largest first
    return {
        "condition": float((roots[..., 0] / roots[..., -1]).max()) ** 2,
        "smallest_eigenvalue": 1 / float(roots[..., 0].max()) ** 2,
        "effective_samples": samples,
        # The diagonal of A⁻¹ is 1/ridge where no data came, and less elsewhere.
        "dead_features": float((T.square().sum(-2) * ridge_left > 1 - 1e-9).sum(-1).max()),
    }
