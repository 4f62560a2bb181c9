"""Thousands of single-sample steps of what breaks recursive least squares, at forgetting 1, 0.99 and 0.9.

The short runs are part of every test run; `pytest -m long tests/heads/test_adversarial.py` makes 100,000 steps of each.
"""

import numpy as np
import pytest
import torch
from torch import nn

from reference import ridge_left, ridge_regression, ridges, weights, with_ones
from sepsa import RLS

SHORT, LONG, K, M = 2_000, 100_000, 6, 2


def random_rows(scale, steps):
    return (scale * np.random.default_rng(0).normal(size=(steps, K))).astype(np.float32)


def collinear(steps):
    v = np.random.default_rng(0).normal(size=K)
    return np.where(np.arange(steps)[:, None] % 2 == 0, v, -3 * v).astype(np.float32)


def half_dead(steps):
    rows = random_rows(1.0, steps)
    rows[: steps // 2, K // 2 :] = 0
    return rows


# Features (steps, K) of each kind.
BATTERY = {
    "all zeros": lambda steps: np.zeros((steps, K), np.float32),
    "one constant vector": lambda steps: np.tile(random_rows(1.0, 1), (steps, 1)),
    "two alternating collinear vectors": collinear,
    "features x 1e6": lambda steps: random_rows(1e6, steps),
    "features x 1e-6": lambda steps: random_rows(1e-6, steps),
    "half dead, then alive": half_dead,
}


@pytest.mark.parametrize("steps", [SHORT, pytest.param(LONG, marks=pytest.mark.long)])
@pytest.mark.parametrize("forgetting", [1.0, 0.99, 0.9])
@pytest.mark.parametrize("name", BATTERY)
def test_battery(name, forgetting, steps):
    torch.manual_seed(0)
    linear = nn.Linear(K, M)
    solver = RLS(forgetting=forgetting).bind(linear)
    prior = weights(linear)
    features = BATTERY[name](steps)
    rng = np.random.default_rng(1)
    targets = (features @ rng.normal(size=(K, M)) + 5 + rng.normal(size=(steps, M))).astype(np.float32)
    scale = np.abs(features).max() or 1.0
    probe = (scale * rng.normal(size=(20, K))).astype(np.float32)
    x, y = torch.as_tensor(features), torch.as_tensor(targets)
    checks = (10, 1_000, steps // 2, steps // 2 + 3, steps // 2 + 100, steps)
    for k in range(steps):
        solver.update(x[k], y[k])
        if k + 1 in checks:
            B = solver.covariance()
            assert torch.isfinite(B).all()
            assert torch.equal(B, B.T)
            assert torch.linalg.cholesky_ex(B / B.diagonal().max()).info == 0
            first = max(0, k + 1 - 4000) if forgetting < 1 else 0  # 0.99^4000 is 1e-18
            Phi = with_ones(features[first : k + 1].astype(np.float64), True)
            age = np.arange(len(Phi))[::-1]
            left = ridge_left(ridges(K + 1, 1.0, True), forgetting, [1] * (k + 1))
            truth = ridge_regression(Phi, targets[first : k + 1].astype(np.float64), forgetting**age, left, prior)
            for rows in (features[k - 5 : k + 1], probe):
                expected = with_ones(rows.astype(np.float64), True) @ truth.T
                got = solver.predict(torch.as_tensor(rows)).double().numpy()
                assert np.isfinite(got).all()
                assert np.linalg.norm(got - expected) <= 1e-3 * np.linalg.norm(expected)
