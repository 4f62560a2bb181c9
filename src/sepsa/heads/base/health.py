"""`health()` of heads with a curvature: what is recorded during updates, and the numbers computed from it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# One update in EVERY is recorded, up to EVERY rows of it; the last KEPT rows are kept.
EVERY, KEPT = 8, 32


class Recent:
    """Rows of the last updates, and the weights that one of them started from."""

    def __init__(self, W: Tensor) -> None:
        self.rows = W.new_zeros(KEPT, W.shape[1])
        self.before = torch.zeros_like(W)
        self.next, self.count, self.since = 0, 0, 0

    def note(self, Phi: Tensor, W: Tensor, steps: int) -> None:
        """Record an update of the rows Φ (n, p) from W (m, p), after `steps` others."""
        end = min(self.next + min(len(Phi), EVERY), KEPT)
        self.rows[self.next : end] = Phi[: end - self.next]
        self.before.copy_(W)
        self.since = steps
        self.count = max(self.count, end)
        self.next = end % KEPT


def report(T: Tensor, W: Tensor, ridge_left: Tensor, samples: float, steps: int, recent: Recent) -> dict[str, float]:
    """The numbers of `RLS.health`, for TᵀT = A⁻¹ and the ridge (p,) that each coordinate has left."""
    p = T.shape[1]
    v = T.new_ones(p)
    for _ in range(16):  # the power method for the largest eigenvalue of A⁻¹
        v = T.T @ (T @ (v / torch.linalg.vector_norm(v)))
    smallest = 1 / float(torch.linalg.vector_norm(v))
    variance = T.square().sum(0)  # the diagonal of A⁻¹: 1/ridge where no data came, and less elsewhere
    largest = drift = step = silent = math.nan
    if recent.count:
        rows = recent.rows[: recent.count].to(T.device)
        mean_square = float(torch.linalg.matrix_norm(rows, 2)) ** 2 / recent.count
        largest = smallest + samples * mean_square
        known = samples / p if samples > p else 1.0
        drift = float((rows @ T.T).square().sum(1).mean()) * known
        step = float(torch.linalg.vector_norm(W - recent.before.to(W.device))) / (steps - recent.since)
        silent = float((rows == 0).all(0).sum())
    return {
        "condition": largest / smallest,
        "smallest_eigenvalue": smallest,
        "effective_samples": samples,
        "last_step": step,
        "feature_drift": drift,
        "dead_features": float((variance * ridge_left > 1 - 1e-9).sum()),
        "silent_features": silent,
    }
