"""The ridge does not hold the bias: targets may have any offset."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from reference import curvature, free_bias_regression, ridges, weights, with_ones
from sepsa import RLS


@settings(max_examples=25, deadline=None)
@given(
    k=st.integers(1, 20), sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5), seed=st.integers(0, 10**6),
    ridge=st.sampled_from([1.0, 30.0, 1000.0]), offset=st.sampled_from([0.0, 1e3, -1e6]),
)  # fmt: skip
@example(k=1, sizes=[1], ridge=1.0, offset=0.0, seed=13)
def test_it_is_ridge_regression_with_a_free_intercept(k, sizes, ridge, offset, seed):
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    linear = nn.Linear(k, 2, dtype=torch.float64)
    prior, solver = weights(linear), RLS(ridge=ridge).bind(linear)
    x = rng.normal(size=(sum(sizes), k))
    y = x @ rng.normal(size=(k, 2)) + offset + rng.normal(size=(len(x), 2))
    for rows in np.split(np.arange(len(x)), np.cumsum(sizes)[:-1]):
        solver.update(torch.as_tensor(x[rows]), torch.as_tensor(y[rows]))
    truth = free_bias_regression(x, y, np.ones(len(x)), ridge, prior)
    # The default holds the bias by 1e-4 of a sample, A⁻¹ tells by how much that moves each weight: about 1e-4/n of the
    # way to the prior for the bias.
    A = curvature(with_ones(x, True), np.ones(len(x)), ridges(k + 1, ridge, True))
    held = 1e-4 * np.linalg.inv(A)[-1] * (prior - truth)[:, -1:]
    np.testing.assert_allclose(weights(linear), truth + held, rtol=1e-7, atol=1e-7 * (1 + abs(offset)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("n", [1, 3, 40])
def test_an_offset_is_found_from_the_very_first_update_on(n, dtype):
    torch.manual_seed(n)
    linear, truth = nn.Linear(12, 2, dtype=torch.float64), torch.randn(12, 2, dtype=torch.float64)
    offset = torch.tensor([1000.0, -7.0], dtype=torch.float64)
    solver, captured = (RLS(dtype=dtype).bind(copy.deepcopy(linear)) for _ in range(2))
    for _ in range(120 // n):
        x = torch.randn(n, 12, dtype=torch.float64)
        solver.update(x, x @ truth + offset)
        captured.prepare_capture()
        assert bool(captured.update_captured(x, x @ truth + offset))
        captured.finish_captured()
    for head in (solver, captured):
        assert (head.linear.bias - offset).abs().max() < (0.2 if dtype == torch.float32 else 0.02)


def test_the_setting_is_told():
    solver = RLS(ridge=2.0, bias_ridge=0.25).bind(nn.Linear(3, 1))
    assert repr(solver).startswith("RLS(ridge=2, forgetting=1, bias_ridge=0.25, head=3->1")
    assert solver.ridge_left.tolist() == [2.0, 2.0, 2.0, 0.25]
    assert RLS(ridge=2.0).bind(nn.Linear(3, 1, bias=False)).ridge_left.tolist() == [2.0] * 3
    assert RLS(ridge=1e-9).bind(nn.Linear(3, 1)).ridge_left.tolist() == [1e-9] * 4
    assert "bias_ridge" not in repr(RLS(ridge=1.0).bind(nn.Linear(3, 1, bias=False)))
