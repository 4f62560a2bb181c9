"""`health()` against what the whole curvature says."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from reference import weights
from sepsa import RLS, SelfTuning
from sepsa.heads.backends.choose import force

AUTO = {"tunes": True}  # both settings by itself


def trained(k=6, n=500, dead=(), batch=1, tunes=False, **options):
    torch.manual_seed(0)
    linear = nn.Linear(k, 2, dtype=torch.float64)
    solver = (SelfTuning() if tunes else RLS(**options)).bind(linear)
    x = torch.randn(n, k, dtype=torch.float64).relu()
    x[:, list(dead)] = 0
    for rows in x.split(batch):
        solver.update(rows, torch.randn(len(rows), 2, dtype=torch.float64))
    return solver, linear, x


@pytest.mark.parametrize("batch", [1, 50])
@pytest.mark.parametrize("backend", [None, "torch"])
@pytest.mark.parametrize("options", [{"ridge": 2.0}, {"ridge": 2.0, "forgetting": 0.97}, AUTO])
def test_the_numbers_are_those_of_the_curvature(options, backend, batch):
    with force(backend):
        solver, _, _ = trained(n=250, batch=batch, **options)
        health = solver.health()
    eigenvalues = 1 / torch.linalg.eigvalsh(solver.covariance())
    assert health["smallest_eigenvalue"] == pytest.approx(float(eigenvalues.min()), rel=0.05)
    assert health["condition"] == pytest.approx(float(eigenvalues.max() / eigenvalues.min()), rel=0.5)
    assert health["effective_samples"] == solver.samples
    assert health["dead_features"] == health["silent_features"] == 0
    assert all(isinstance(value, float) and math.isfinite(value) for value in health.values())


@pytest.mark.parametrize("options", [{}, AUTO])
def test_the_last_step_is_the_change_of_the_head(options):
    solver, linear, x = trained(n=496, **options)  # a number of updates after which one is noted
    before = weights(linear)
    solver.update(torch.randn_like(x[:3]), torch.randn(3, 2, dtype=torch.float64))
    assert solver.health()["last_step"] == pytest.approx(np.linalg.norm(weights(linear) - before), rel=1e-9)


@pytest.mark.parametrize("options", [{}, {"forgetting": 0.98}, AUTO])
def test_dead_and_silent_features_are_counted(options):
    solver, _, x = trained(dead=(1, 4), **options)
    assert solver.health()["dead_features"] == solver.health()["silent_features"] == 2
    later = x.clone()
    later[:, 0] = 0
    for rows in later.repeat(6, 1).split(10):
        solver.update(rows, torch.randn(len(rows), 2, dtype=torch.float64))
    assert solver.health()["dead_features"] == 2
    assert solver.health()["silent_features"] == 3


def test_drift_tells_new_features_from_those_the_curvature_knows():
    solver, _, x = trained(k=20, n=2000)
    assert solver.health()["feature_drift"] == pytest.approx(1, abs=0.4)
    for rows in (5 * x.flip(1)).split(1)[:64]:
        solver.update(rows, torch.randn(len(rows), 2, dtype=torch.float64))
    assert solver.health()["feature_drift"] > 3


def test_before_the_first_update_there_is_nothing_to_say():
    solver = RLS(ridge=3.0).bind(nn.Linear(4, 1))
    health = solver.health()
    assert health["smallest_eigenvalue"] == pytest.approx(1e-4)  # of the bias
    assert health["effective_samples"] == 0
    assert health["dead_features"] == 5
    assert math.isnan(health["feature_drift"])
    assert math.isnan(health["last_step"])
