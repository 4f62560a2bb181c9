"""Heads are exact for features of any scale, or say that they are not: a part of benchmarks/heads/exactness.py."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.heads import exactness
from sepsa import RLS
from sepsa.heads import LogisticNewton, PrecisionWarning, SoftmaxNewton

TABLES = (
    "standardized", "all features + 1e+05", "factors 1e-12 to 1e12", "time stamp in milliseconds", "one row x 1e6",
    "ridge 1e-30",
)  # fmt: skip


@pytest.mark.many
@pytest.mark.parametrize(
    "table", [table for table in exactness.scalings(20) if table.name in TABLES], ids=lambda t: t.name
)
@pytest.mark.parametrize("route", exactness.routes(), ids=lambda route: route.name)
def test_predictions_are_exact_or_the_head_says_so(route, table):
    outcomes = {batch: exactness.run(route, table, batch) for batch in (2, 7, 20)}
    assert not any(map(exactness.is_silent, outcomes.values())), outcomes
    if table.name == "standardized":
        assert not any(outcome.told for outcome in outcomes.values()), outcomes


def test_a_ridge_of_next_to_nothing_is_exact_or_warned_of():
    X = torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    true = torch.tensor([[1.0, -2.0, 3.0]], dtype=torch.float64)
    head = RLS(ridge=1e-30).bind(nn.Linear(3, 1, dtype=torch.float64))
    head.update(X, X @ true.T + 7)
    torch.testing.assert_close(head.linear.weight.detach(), true, rtol=1e-12, atol=1e-12)
    for solver in (SoftmaxNewton, LogisticNewton):
        with pytest.warns(PrecisionWarning, match="ridge=1e-30 is below 1e-12"):
            solver(ridge=1e-30)


def test_features_and_targets_of_any_stride_are_learned():
    """A column made by y[:, None] has a stride of 0 in its last dimension."""
    X, Y = torch.randn(8, 3, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    column = torch.from_numpy(np.arange(8.0)[:, None])
    for targets, strided in ((Y, Y.T.contiguous().T), (torch.arange(8.0).double().reshape(8, 1), column)):
        linear = nn.Linear(3, targets.shape[1], dtype=torch.float64)
        heads = [RLS().bind(copy.deepcopy(linear)) for _ in range(2)]
        heads[0].update(X, targets)
        heads[1].update(X.T.contiguous().T, strided)
        assert torch.equal(heads[0].linear.weight, heads[1].linear.weight)
