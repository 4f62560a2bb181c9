"""`health()` against what the whole curvature says."""

import pytest
import torch
from torch import nn

from sepsa import RLS
from sepsa.heads.run.choose import force


def trained(k=6, n=500, dead=(), batch=1, **options):
    torch.manual_seed(0)
    linear = nn.Linear(k, 2, dtype=torch.float64)
    solver = RLS(**options).bind(linear)
    x = torch.randn(n, k, dtype=torch.float64).relu()
    x[:, list(dead)] = 0
    for rows in x.split(batch):
        solver.update(rows, torch.randn(len(rows), 2, dtype=torch.float64))
    return solver


@pytest.mark.parametrize("batch", [1, 50])
@pytest.mark.parametrize("backend", [None, "torch"])
@pytest.mark.parametrize("options", [{"ridge": 2.0}, {"ridge": 2.0, "forgetting": 0.97}, {"ridge": "evidence"}])
def test_the_numbers_are_those_of_the_curvature(options, backend, batch):
    with force(backend):
        solver = trained(n=250, batch=batch, **options)
        health = solver.health()
    eigenvalues = 1 / torch.linalg.eigvalsh(solver.covariance())
    assert health["smallest_eigenvalue"] == pytest.approx(float(eigenvalues.min()), rel=1e-9)
    assert health["condition"] == pytest.approx(float(eigenvalues.max() / eigenvalues.min()), rel=1e-6)
    assert health["effective_samples"] == solver.samples
    assert health["dead_features"] == 0
    assert all(isinstance(value, float) for value in health.values())


@pytest.mark.parametrize("options", [{}, {"forgetting": 0.98}, {"ridge": "evidence"}])
def test_dead_features_are_counted(options):
    assert trained(dead=(1, 4), **options).health()["dead_features"] == 2


def test_before_the_first_update_the_ridge_is_all():
    health = RLS(ridge=3.0).bind(nn.Linear(4, 1)).health()
    assert health["smallest_eigenvalue"] == pytest.approx(1e-4)  # of the bias
    assert health["effective_samples"] == 0
    assert health["dead_features"] == 5
