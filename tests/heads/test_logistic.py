"""LogisticNewton: each output a SoftmaxNewton of one output, on the samples that show it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from heads.test_per_output import singles
from reference import weights
from sepsa import LogisticNewton, NotFinite, SoftmaxNewton
from sepsa.heads.run.choose import force

NAN = float("nan")


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def path(request):
    """Every test here runs on both backends, as in test_rls.py."""
    with force("torch" if request.param == "torch" else None):
        yield request.param


def make(k=4, m=3, bias=True, seed=0, **options):
    torch.manual_seed(seed)
    linear = nn.Linear(k, m, bias=bias, dtype=torch.float64)
    return LogisticNewton(**options).bind(linear), linear


def samples(n):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(2, (n, 3), generator=generator).double()


@settings(max_examples=30, deadline=None)
@given(
    k=st.integers(1, 6), m=st.integers(1, 4), bias=st.booleans(), weighted=st.booleans(), seed=st.integers(0, 10**6),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), ridge=st.sampled_from([0.1, 1.0, 50.0]),
    forgetting=st.sampled_from([1.0, 0.9]), share=st.sampled_from([0.0, 0.5]),
)  # fmt: skip
def test_each_output_is_a_softmax_newton_of_one_output(k, m, bias, sizes, ridge, forgetting, share, weighted, seed):
    rng = np.random.default_rng(seed)
    yes = rng.uniform(0.2, 5, size=m).tolist() if weighted else None
    solver, linear = make(k, m, bias, seed, ridge=ridge, forgetting=forgetting, pos_weight=yes)
    pairs = iter([None] * m if yes is None else [[1.0, weight] for weight in yes])
    ones = singles(linear, lambda: SoftmaxNewton(ridge=ridge, forgetting=forgetting, class_weight=next(pairs)))
    for n in sizes:
        x, y = torch.as_tensor(rng.normal(size=(n, k))), torch.as_tensor(rng.integers(0, 2, size=(n, m)) * 1.0)
        seen = torch.as_tensor(rng.uniform(size=(n, m)) >= share)
        seen[:, 0] = True
        weight = torch.as_tensor(rng.uniform(0.1, 2, size=(n, m))) if weighted else None
        solver.update(x, y.where(seen, NAN), weight)
        for j, one in enumerate(ones):
            if seen[:, j].any():
                omega = seen[:, j].double() * (1.0 if weight is None else weight[:, j])
                one.update(x, y[:, j : j + 1], omega)
    for j, one in enumerate(ones):
        np.testing.assert_allclose(weights(linear)[j], weights(one.linear)[0], rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(solver.covariance()[j], one.covariance(), rtol=1e-7, atol=1e-12)
        assert solver.state_dict()["counters"][j].tolist() == pytest.approx(one.state_dict()["counters"].tolist())
    mean, std = solver.predict(x, return_std=True)
    for j, one in enumerate(ones):
        torch.testing.assert_close((mean[:, j : j + 1], std[:, j : j + 1]), tuple(one.predict(x, return_std=True)))


def test_targets_of_any_kind():
    x, y = samples(24)
    gaps = y.clone()
    gaps[3, 1] = gaps[5, 0] = NAN
    whole = torch.where(gaps.isnan(), -100, y).long()
    deep = x.reshape(2, 12, 4)
    for m, kinds in (
        (3, [(x, y.bool()), (x, y), (deep, y.reshape(2, 12, 3).float()), (x, y.long())]),
        (3, [(x, gaps), (x, whole), (deep, whole.reshape(2, 12, 3).to(torch.int32))]),
        (1, [(x, y[:, :1]), (x, y[:, 0].long()), (x, y[:, 0].bool()), (x, y[:, :1].to(torch.uint8))]),
    ):
        heads, losses = [], []
        for features, targets in kinds:
            solver, linear = make(4, m)
            losses.append(solver.loss(linear(features), targets).item())
            solver.update(features, targets)
            heads.append(weights(linear))
        np.testing.assert_array_equal(heads, heads[:1] * len(heads))
        assert losses == pytest.approx(losses[:1] * len(losses), rel=1e-12)


def test_the_loss_is_torchs_on_what_was_observed():
    solver, linear = make(pos_weight=[1.0, 2.0, 0.5])
    x, y = samples(6)
    outputs = linear(x)
    weight = torch.tensor([1.0, 2.0, 0.5]).double()
    torch.testing.assert_close(solver.loss(outputs, y), binary_cross_entropy_with_logits(outputs, y, pos_weight=weight))
    gaps = y.clone()
    gaps[0, 1] = gaps[4] = NAN
    seen = ~gaps.isnan()
    each = binary_cross_entropy_with_logits(outputs, y, pos_weight=weight, reduction="none")
    torch.testing.assert_close(solver.loss(outputs, gaps), each[seen].mean())
    loss = solver.loss(outputs, gaps, torch.arange(6).double())
    omega = torch.arange(6).double()[:, None].expand(6, 3)[seen]
    torch.testing.assert_close(loss, (omega * each[seen]).sum() / omega.sum())
    (gradient,) = torch.autograd.grad(loss, outputs)
    assert (gradient[~seen] == 0).all()


def test_what_is_refused():
    solver, _ = make()
    x, y = samples(5)
    for targets, error, words in (
        (
            y.index_fill(0, torch.tensor([1]), 1.5),
            ValueError,
            r"targets must be 0 or 1, or probabilities in \[0, 1\], got \[1.5\]",
        ),
        (y.index_fill(0, torch.tensor([1]), -0.25), ValueError, r"in \[0, 1\], got \[-0.25\]: nothing was"),
        (torch.full((5, 3), 2), ValueError, r"got \[2.0\]: nothing was learned"),
        (y.index_fill(0, torch.tensor([1]), NAN), NotFinite, "samples without any"),
        (torch.ones(5).long(), ValueError, r"targets must have shape \(5, 3\)"),  # labels are for heads of one output
    ):
        with pytest.raises(error, match=words):
            solver.update(x, targets)
    assert solver.steps == 0
