"""LogisticNewton: each output a SoftmaxNewton of one output, on the samples that show it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from reference import weights
from sepsa import LogisticNewton, NotFinite, SoftmaxNewton

NAN = float("nan")


def make(k=4, m=3, bias=True, seed=0, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    linear = nn.Linear(k, m, bias=bias, dtype=dtype)
    return LogisticNewton(**options).bind(linear), linear


def samples(n, k, m, seed=0):
    """Features, and labels drawn from a true head with an offset for each output."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, k, generator=generator, dtype=torch.float64)
    truth = 1.5 * torch.randn(m, k, generator=generator, dtype=torch.float64)
    chance = (x @ truth.T + torch.linspace(-2, 2, m, dtype=torch.float64)).sigmoid()
    return x, (torch.rand(n, m, generator=generator, dtype=torch.float64) < chance).double()


@settings(max_examples=30, deadline=None)
@given(
    k=st.integers(1, 6),
    m=st.integers(1, 4),
    bias=st.booleans(),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    ridge=st.sampled_from([0.1, 1.0, 50.0]),
    forgetting=st.sampled_from([1.0, 0.9]),
    share=st.sampled_from([0.0, 0.5]),
    weighted=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_each_output_is_a_softmax_newton_of_one_output(k, m, bias, sizes, ridge, forgetting, share, weighted, seed):
    rng = np.random.default_rng(seed)
    yes = rng.uniform(0.2, 5, size=m).tolist() if weighted else None
    solver, linear = make(k, m, bias, seed, ridge=ridge, forgetting=forgetting, pos_weight=yes)
    ones = []
    for j in range(m):
        one = nn.Linear(k, 1, bias=bias, dtype=torch.float64)
        one.weight.data = linear.weight.detach()[j : j + 1].clone()
        if bias:
            one.bias.data = linear.bias.detach()[j : j + 1].clone()
        pair = None if yes is None else [1.0, yes[j]]
        ones.append(SoftmaxNewton(ridge=ridge, forgetting=forgetting, class_weight=pair).bind(one))
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
        expected = one.predict(x, return_std=True)
        torch.testing.assert_close(mean[:, j : j + 1], expected.mean)
        torch.testing.assert_close(std[:, j : j + 1], expected.std)


def test_targets_of_any_kind():
    x, y = samples(24, 4, 3)
    gaps = y.clone()
    gaps[3, 1] = gaps[5, 0] = NAN
    whole = torch.where(gaps.isnan(), -100, y).long()
    kinds = [(x, y.bool()), (x, y), (x.reshape(2, 12, 4), y.reshape(2, 12, 3).float()), (x, y.long())]
    for some in (kinds, [(x, gaps), (x, whole), (x.reshape(2, 12, 4), whole.reshape(2, 12, 3).to(torch.int32))]):
        heads, losses = [], []
        for features, targets in some:
            solver, linear = make()
            losses.append(solver.loss(linear(features), targets).item())
            solver.update(features, targets)
            heads.append(weights(linear))
        for head in heads[1:]:
            np.testing.assert_array_equal(head, heads[0])
        assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-12)
    heads = []
    for targets in (y[:, :1], y[:, 0].long(), y[:, 0].bool(), y[:, :1].to(torch.uint8)):
        solver, linear = make(4, 1)
        solver.update(x, targets)
        assert solver.loss(linear(x), targets).ndim == 0
        heads.append(weights(linear))
    for head in heads[1:]:
        np.testing.assert_array_equal(head, heads[0])


def test_the_loss_is_torchs_on_what_was_observed():
    solver, linear = make(pos_weight=[1.0, 2.0, 0.5])
    x, y = samples(6, 4, 3)
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
    x, y = samples(5, 4, 3)
    for bad, words in ((1.5, "got 1.5"), (-0.25, "got -0.25")):
        with pytest.raises(ValueError, match=rf"0 or 1, or probabilities in \[0, 1\], {words}: nothing was learned"):
            solver.update(x, y.index_fill(0, torch.tensor([1]), bad))
    with pytest.raises(ValueError, match="got 2: nothing was learned"):
        solver.update(x, torch.full((5, 3), 2))
    with pytest.raises(NotFinite, match="samples without any"):
        solver.update(x, y.index_fill(0, torch.tensor([1]), NAN))
    with pytest.raises(NotFinite, match="features must be finite"):
        solver.update(x.index_fill(0, torch.tensor([1]), NAN), y)
    with pytest.raises(ValueError, match=r"targets must have shape \(5, 3\)"):
        solver.update(x, torch.ones(5).long())  # labels are for heads of one output
    assert solver.steps == 0
