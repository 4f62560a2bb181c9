"""Heads with a curvature for each output: equal to heads of one output, each with the samples that have its target."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from reference import weights
from sepsa import RLS, NotFinite, OnlineLBFGS, PerOutput, SepSA, SoftmaxNewton
from sepsa.testing import difference, snapshot

NAN = float("nan")


def make(k=4, m=3, bias=True, seed=0, solver=None, dtype=torch.float64):
    torch.manual_seed(seed)
    linear = nn.Linear(k, m, bias=bias, dtype=dtype)
    return PerOutput(solver or RLS()).bind(linear), linear


def singles(linear, make_one):
    """Heads of one output with the same start."""
    ones = []
    for j in range(linear.out_features):
        one = nn.Linear(linear.in_features, 1, bias=linear.bias is not None, dtype=linear.weight.dtype)
        one.weight.data = linear.weight.detach()[j : j + 1].clone()
        if linear.bias is not None:
            one.bias.data = linear.bias.detach()[j : j + 1].clone()
        ones.append(make_one().bind(one))
    return ones


def with_gaps(y, share, rng):
    """NaN for some outputs, but never for all of a sample."""
    missing = rng.uniform(size=y.shape) < share
    missing[np.arange(len(y)), rng.integers(y.shape[1], size=len(y))] = False
    return np.where(missing, np.nan, y)


MAKERS = {
    "RLS": lambda: RLS(forgetting=0.9),
    "torch": lambda: RLS(dtype=torch.float32, forgetting=0.9),
    "OnlineLBFGS": lambda: OnlineLBFGS(dtype=torch.float64),
    "SoftmaxNewton": SoftmaxNewton,
}


@pytest.mark.parametrize("share", [0.0, 0.4, 0.8])
@pytest.mark.parametrize(("bias", "weighted"), [(True, False), (False, True)])
@pytest.mark.parametrize("name", MAKERS)
def test_it_equals_heads_of_one_output(name, bias, weighted, share):
    solver, linear = make(bias=bias, solver=MAKERS[name]())
    ones = singles(linear, MAKERS[name])
    rng = np.random.default_rng(0)
    for n in (1, 7, 3, 20, 2):
        x = torch.as_tensor(rng.normal(size=(n, 4)))
        y = torch.as_tensor(with_gaps(rng.integers(0, 2, size=(n, 3)).astype(float), share, rng))
        weight = torch.as_tensor(rng.uniform(0.1, 2, size=(n, 3)))
        solver.update(x, y, weight if weighted else None)
        for j, one in enumerate(ones):
            seen = ~y[:, j].isnan()
            if seen.any():
                one.update(x[seen], y[seen, j : j + 1], weight[seen, j] if weighted else None)
    for j, one in enumerate(ones):
        np.testing.assert_array_equal(weights(linear)[j], weights(one.linear)[0])
        assert solver.solvers[j].samples == one.samples
    assert solver.steps == max(one.steps for one in ones)
    assert solver.samples == pytest.approx(sum(one.samples for one in ones) / 3)


def test_a_weight_of_none_is_a_target_that_is_missing():
    """Of the arms of a bandit one is pulled in a round, and the others forget nothing."""
    (by_weight, _), (by_nan, _) = (make(3, 4, solver=RLS(forgetting=0.9)) for _ in range(2))
    for i in range(12):
        context, pulled = torch.randn(1, 3).double(), torch.eye(4).double()[i % 3 : i % 3 + 1]
        by_weight.update(context, torch.ones(1, 4).double(), pulled)
        by_nan.update(context, torch.where(pulled > 0, 1.0, NAN).double())
    assert not difference(snapshot(by_weight), snapshot(by_nan))
    assert [one.steps for one in by_weight.solvers] == [4, 4, 4, 0]
    health, each = by_weight.health(), [one.health() for one in by_weight.solvers]
    assert health["condition"] == max(one["condition"] for one in each)
    assert health["effective_samples"] == 0
    assert health["smallest_eigenvalue"] == min(one["smallest_eigenvalue"] for one in each)


def test_the_loss_is_the_mean_over_what_was_observed():
    solver, linear = make()
    x, y = torch.randn(5, 4).double(), torch.randn(5, 3).double()
    outputs = linear(x)
    torch.testing.assert_close(solver.loss(outputs, y), mse_loss(outputs, y))
    gaps = y.clone()
    gaps[0, 1] = gaps[3, 2] = gaps[4, 0] = NAN
    seen = ~gaps.isnan()
    loss = solver.loss(outputs, gaps)
    torch.testing.assert_close(loss, mse_loss(outputs[seen], y[seen]))
    (gradient,) = torch.autograd.grad(loss, outputs)
    assert (gradient[~seen] == 0).all()
    assert (gradient[seen] != 0).all()
    for weight in (torch.rand(5).double(), torch.rand(5, 3).double()):
        wide = weight.reshape(5, -1).expand(5, 3)[seen]
        truth = (wide * (outputs[seen] - y[seen]) ** 2).sum() / wide.sum()
        torch.testing.assert_close(solver.loss(outputs, gaps, weight), truth)
    deep = solver.loss(outputs.reshape(1, 5, 3), gaps.reshape(1, 5, 3), torch.ones(1, 5))
    torch.testing.assert_close(deep, loss)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_network_learns_from_gaps(weighted, fraction):
    """As outputs with heads of their own on a shared body, whose loss is the mean over what was observed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    optimizer = SepSA(model, torch.optim.SGD, lr=0.05, solver=PerOutput(RLS()))
    optimizer.head_fraction = fraction
    rng = np.random.default_rng(0)
    for k in range(5):
        x = torch.as_tensor(rng.normal(size=(8, 6)))
        y = torch.as_tensor(with_gaps(rng.normal(size=(8, 3)), 0.4, rng))
        y[k] = NAN  # a sample without any target
        weight = torch.as_tensor(rng.uniform(0.1, 1, size=(8, 3))) if weighted else None
        twin = copy.deepcopy(optimizer)
        keep = torch.arange(8) != k
        loss = optimizer.learn(x, y, sample_weight=weight)
        if fraction == 1.0:
            truth = twin.learn(x[keep], y[keep], sample_weight=None if weight is None else weight[keep])
            torch.testing.assert_close(loss, truth)
            for p, q in zip(model.parameters(), twin.model.parameters(), strict=True):
                torch.testing.assert_close(p, q)
    assert loss.isfinite()


def test_one_output_that_refuses_takes_all_back():
    solver, _ = make(dtype=torch.float16)
    solver.update(torch.randn(5, 4), torch.randn(5, 3))
    before = snapshot(solver)
    y = torch.tensor([0.0, 0.0, 1e9]).expand(5, 3)  # more than a float16 head can hold
    with pytest.raises(NotFinite, match="nothing was learned"):
        solver.update(torch.randn(5, 4), y)
    assert not difference(before, snapshot(solver))


def test_what_is_refused():
    solver, _ = make()
    x, y, weight = torch.randn(5, 4).double(), torch.randn(5, 3).double(), torch.ones(5, 3).double()
    without, second = y.index_fill(0, torch.tensor(2), NAN), torch.tensor(1)
    for act, error, words in (
        (lambda: solver.update(x, without), NotFinite, "got 1 of 5 samples without any"),
        (lambda: solver.update(x, y, weight[:, :2]), ValueError, r"sample_weight must have shape \(5,\)"),
        (lambda: solver.update(x, y, weight.index_fill(1, second, -1.0)), ValueError, "weight must be finite and"),
        (lambda: solver.update(x, y, weight.index_fill(1, second, NAN)), ValueError, "weight must be finite and"),
        (lambda: PerOutput(nn.Linear(2, 1)), TypeError, r"solver with checkpoint\(\) and rollback\(\), got Linear"),
        (lambda: PerOutput(RLS().bind(nn.Linear(2, 1))), ValueError, "owns no head"),
        (
            lambda: solver.load_state_dict({"outputs": solver.state_dict()["outputs"][:2]}),
            ValueError, "must be a list of 3 items, got 2 items",
        ),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            act()


def test_samples_and_known_noise_are_those_of_heads_of_one_output():
    solver, linear = make()
    ones = singles(linear, RLS)
    x = torch.randn(5, 4, dtype=torch.float64)
    std = solver.predict(x, return_std=True, noise=0.5).std  # of the prior
    torch.testing.assert_close(std, torch.cat([one.predict(x, return_std=True, noise=0.5).std for one in ones], 1))
    with pytest.raises(ValueError, match="at least one update"):
        solver.sample(x)
    y = torch.full((3, 3), NAN, dtype=torch.float64)
    y[0, 0] = y[1, 1] = y[2, 2] = 1.0
    solver.update(x[:3], y)
    for j, one in enumerate(ones):
        one.update(x[j : j + 1], y[j : j + 1, j : j + 1])
    g, twin = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    got = solver.sample(x, noise=0.3, generator=g)
    torch.testing.assert_close(got, torch.cat([one.sample(x, noise=0.3, generator=twin) for one in ones], 1))
    mean, std = solver.predict(x, return_std=True)
    for j, one in enumerate(ones):
        torch.testing.assert_close((mean[:, j : j + 1], std[:, j : j + 1]), tuple(one.predict(x, return_std=True)))
    with pytest.raises(AttributeError, match="'OnlineLBFGS' object has no attribute 'sample'"):
        PerOutput(OnlineLBFGS()).bind(nn.Linear(4, 3)).sample(x.float())
