"""slimTrain's head as published: its step is the dense solve in float64, and its choice the least of its criterion."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from sepsa.paper.slimtik import PublishedSlimTik


def published_sgcv(Z, M, C, W, lam, tau):
    """The criterion with the trace n - m tr H, H (n, n) formed."""
    (m, n), curvature = C.shape, Z @ Z.T + M @ M.T + tau * np.eye(len(Z))
    moved = W + ((C - W @ Z) @ Z.T - lam * W) @ np.linalg.inv(curvature)
    return np.sum((C - moved @ Z) ** 2) / (n - m * np.trace(Z.T @ np.linalg.solve(curvature, Z))) ** 2, moved


@pytest.mark.parametrize("memory", [0, 2])
@pytest.mark.parametrize("n", [1, 4])
def test_published_step_and_choice(n, memory):
    rng = np.random.default_rng(n)
    torch.manual_seed(n)
    linear = nn.Linear(5, 3, dtype=torch.float64)
    solver = PublishedSlimTik(memory=memory, dtype=torch.float64, bounds=(1e-4, 1e3), candidates=20).bind(linear)
    past: list[np.ndarray] = []
    for _ in range(6):
        x, y = rng.normal(size=(n, 5)), rng.normal(size=(n, 3))
        Z = np.column_stack([x, np.ones(n)]).T / np.sqrt(n)
        C = y.T / np.sqrt(n)
        M = np.hstack([np.zeros((6, 0)), *past[len(past) - min(memory, len(past)) :]])
        W = np.column_stack([linear.weight.detach().numpy(), linear.bias.detach().numpy()])
        total = solver.regularization_sum
        solver.update(torch.tensor(x), torch.tensor(y))
        lam, tau = solver.last_regularization, solver.regularization_sum
        assert tau == pytest.approx(total + lam, rel=1e-12)
        value, moved = published_sgcv(Z, M, C, W, lam, tau)
        learned = np.column_stack([linear.weight.detach().numpy(), linear.bias.detach().numpy()])
        assert np.linalg.norm(learned - moved) <= 1e-7 * np.linalg.norm(moved)
        ends = (math.log10(1e3), math.log10(total / 2 - 1e-4))  # of the points above 0 and below
        above, below = (torch.logspace(math.log10(torch.finfo(torch.float64).eps), end, 20).double() for end in ends)
        tried = torch.cat([above, -below]).tolist()
        assert value <= min(published_sgcv(Z, M, C, W, t, total + t)[0] for t in tried) * (1 + 1e-9)
        past.append(Z)
