"""LogisticNewton: each output a SoftmaxNewton of one output, on the samples that show it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import sepsa
from reference import weights, with_ones
from sepsa import LogisticNewton, NotFinite, SepSA, SoftmaxNewton

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


def optimum(x, y, ridge, prior):
    """The least sum of binary cross-entropies + ridge/2 of what is not the bias, by Newton's method in NumPy."""
    Phi, best = with_ones(x, True), []
    R = np.diag(np.append(np.full(x.shape[1], ridge), 1e-4))
    for t, start in zip(y.T, prior, strict=True):
        seen, w = ~np.isnan(t), start.copy()
        for _ in range(50):
            P = 1 / (1 + np.exp(-Phi[seen] @ w))
            gradient = Phi[seen].T @ (P - t[seen]) + R @ (w - start)
            w = w - np.linalg.solve((Phi[seen] * (P * (1 - P))[:, None]).T @ Phi[seen] + R, gradient)
        best.append(w)
    return np.array(best)


def test_a_stream_with_gaps_brings_it_to_the_optimum():
    x, y = samples(3000, 5, 4)
    y[torch.rand(y.shape, generator=torch.Generator().manual_seed(1)) < 0.3] = NAN
    seen = y[~y.isnan().all(1)]
    solver, linear = make(5, 4)
    prior = weights(linear)
    kept = x[~y.isnan().all(1)]
    truth = torch.as_tensor(optimum(kept.numpy(), seen.numpy(), 1.0, prior))
    least = solver.loss(torch.cat([kept, torch.ones(len(kept), 1)], 1) @ truth.T, seen)
    before = solver.loss(linear(kept), seen) - least
    for _ in range(3):
        for rows in torch.arange(len(kept)).split(32):
            solver.update(kept[rows], seen[rows])
    assert solver.loss(linear(kept), seen) - least < 0.01 * before
    expected = (torch.cat([kept, torch.ones(len(kept), 1)], 1) @ truth.T).sigmoid()
    assert (solver.predict_proba(kept) - expected).abs().mean() < 0.02


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


@pytest.mark.parametrize("kind", ["float", "labels"])
def test_a_network_with_gaps_in_sepsa(kind):
    torch.manual_seed(0)
    outputs = 3 if kind == "float" else 1
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, outputs))
    optimizer = SepSA(model, torch.optim.Adam, lr=0.01, solver=LogisticNewton())
    x = torch.randn(400, 6)
    y = (torch.sin(2 * x[:, :outputs]) + x[:, 3 : 3 + outputs] > 0).float()
    y[:100, 0] = NAN
    y[50:60] = NAN  # samples without any label
    targets = y if kind == "float" else torch.where(y.isnan(), -100, y).long()[:, 0]
    for _ in range(10):
        for rows in torch.arange(400).split(40):
            optimizer.learn(x[rows], targets[rows])
    keep = ~y.isnan()
    with torch.no_grad():
        last = binary_cross_entropy_with_logits(model(x)[keep], y[keep])
    assert last < 0.4  # log 2 is that of a coin
    assert optimizer.solver.samples == pytest.approx(10 * float(keep.sum()) / outputs)


def test_checkpoints_and_the_look_of_it(tmp_path):
    solver, linear = make(pos_weight=torch.tensor([1.0, 2.0, 3.0]), ridge=2.0, bias_ridge="ridge")
    assert repr(solver) == (
        "LogisticNewton(ridge=2, forgetting=1, bias_ridge='ridge', pos_weight=[1.0, 2.0, 3.0], head=4->3)"
    )
    x, y = samples(30, 4, 3)
    solver.update(x, y)
    sepsa.save(solver, tmp_path / "head.sepsa")
    other = LogisticNewton().bind(copy.deepcopy(linear))
    sepsa.load(tmp_path / "head.sepsa", into=other)
    assert repr(other) == repr(solver)
    for one in (solver, other):
        one.update(x, y)
    assert torch.equal(linear.weight, other.linear.weight)
    state = solver.state_dict()
    for key, value, words in (
        ("shares", -state["shares"], "must be positive"),
        ("counters", state["counters"] - 5, r"\[updates, samples"),
        ("T", 9 * torch.eye(5).double().repeat(3, 1, 1), "inverse curvature of at least the ridge"),
        ("ridges", [2.0, -1.0], "bias_ridge must be"),
        ("pos_weight", [1.0], "pos_weight must have 3 numbers"),
        ("pos_weight", 1.0, "pos_weight must be numbers"),
        ("forgetting", 2.0, "forgetting must be"),
    ):
        with pytest.raises(ValueError, match=words):
            solver.load_state_dict(state | {key: value})
    with pytest.raises(TypeError, match=r"pos_weight must be numbers, one an output, or None, got 3\.0"):
        LogisticNewton(pos_weight=3.0)
    with pytest.raises(ValueError, match="pos_weight must have 2 numbers, one an output of this head, got 1"):
        LogisticNewton(pos_weight=[1.0]).bind(nn.Linear(3, 2))


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
