"""Self-tuning heads: each member is a head of its settings, and the score that chooses is honest."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss

from reference import best_head, error_without
from reference import weights as head_weights
from sepsa import RLS, LogisticNewton, SelfTuning, SepSA, SoftmaxNewton
from sepsa.heads.base import repeated_samples
from sepsa.heads.math import score as scores
from sepsa.heads.math.cross_entropy import with_ridge
from sepsa.heads.self_tuning import RIDGES
from sepsa.testing.case import difference, learn, snapshot


def make(k, m=1, bias=True, seed=0, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    linear = nn.Linear(k, m, bias=bias, dtype=dtype)
    return SelfTuning.of(RLS, **options).bind(linear), linear


def weights(solver):
    return head_weights(solver.linear)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6), heads=st.integers(1, 6), updates=st.integers(1, 60), scale=st.sampled_from([1e-9, 1.0])
)
def test_the_score_is_that_of_the_reference_on_the_host_and_on_a_device(seed, heads, updates, scale):
    rng = np.random.default_rng(seed)
    errors = scale * rng.exponential(size=(updates, heads)) ** 3
    memory = rng.choice([1.0, 0.98, 0.9], size=heads).tolist()
    sizes = rng.exponential(size=updates).tolist()
    host, active = scores.start(heads), 0
    tensor = functools.partial(torch.tensor, dtype=torch.float64)
    device = scores.Score(*map(tensor, host))
    for row, size in zip(errors.tolist(), sizes, strict=True):
        host = scores.add(host, row, size)
        device = scores.add_captured(device, tensor(row), tensor(size))
        found = scores.best_captured(device, tensor(memory), torch.tensor(active))
        active = scores.best(host, memory, active)
        assert int(found) == active
    for mine, theirs in zip(host, device, strict=True):
        torch.testing.assert_close(tensor(mine), theirs, rtol=1e-12, atol=1e-300)
    wanted = best_head(errors.tolist(), memory, sizes)
    assert active == (0 if wanted is None else wanted)


def test_an_error_that_is_not_finite_is_the_largest():
    score = scores.add(scores.add(scores.start(2), [1.0, 2.0]), [float("nan"), 2.0])
    assert score.sums == [0.98 + 4.0, 1.96 + 2.0]


# ---------------------------------------------------------------------- each member is a head


@settings(max_examples=15, deadline=None)
@given(
    k=st.integers(1, 9), m=st.integers(1, 3), bias=st.booleans(), weighted=st.booleans(), seed=st.integers(0, 10**6),
    sizes=st.lists(st.sampled_from([1, 1, 2, 7, 30]), min_size=1, max_size=15), scale=st.sampled_from([1e-3, 1.0, 1e3]),
)  # fmt: skip
def test_every_member_is_the_rls_of_its_settings(k, m, bias, sizes, weighted, scale, seed):
    """Bit by bit: a member learns as an RLS on a copy of the head does, and the active one gives the head its bits."""
    solver, linear = make(k, m, bias, seed)
    start, plain = copy.deepcopy(linear), []
    rng = np.random.default_rng(seed)
    for n in sizes:
        x, y = torch.as_tensor(scale * rng.normal(size=(n, k))), torch.as_tensor(rng.normal(size=(n, m)))
        omega = torch.as_tensor(rng.uniform(0, 2, size=n)) if weighted else None
        solver.update(x, y, omega)
        plain = plain or [
            RLS(ridge=a.ridge, forgetting=a.forgetting).bind(copy.deepcopy(start)) for a in solver.members
        ]
        for one in plain:
            one.update(x, y, omega)
    best = plain[solver._now.active]
    for member, one in zip([*solver.members, solver], [*plain, best], strict=True):
        np.testing.assert_array_equal(weights(member), weights(one))
    assert torch.equal(solver.covariance(), best.covariance())
    assert (solver.ridge, solver.forgetting) == (best.ridge, best.forgetting)
    assert (solver.steps, solver.samples) == (best.steps, best.samples)
    x = torch.as_tensor(scale * rng.normal(size=(4, k)))
    assert torch.equal(solver.predict(x), best.predict(x))


def test_settings_that_are_given_are_not_chosen():
    solver, _ = make(3, ridge=2.0)
    assert {member.ridge for member in solver.members} == {2.0}
    assert len(solver.members) == 3
    assert len(make(3)[0].members) == 6
    assert repr(solver) == "SelfTuning(3 of RLS, head=3->1)"
    assert {member.forgetting for member in make(3, forgetting=0.95)[0].members} == {0.95}
    own = SelfTuning([RLS(ridge=5.0), RLS(forgetting=0.5)]).bind(nn.Linear(3, 1))
    own.update(100 * torch.randn(4, 3), torch.randn(4, 1))
    assert [member.ridge for member in own.members] == [5.0, 1.0]  # not relative to the features


@pytest.mark.parametrize(("act", "error", "words"), [
    (lambda: RLS(ridge="auto"), TypeError, "ridge must be a number"),
    (lambda: SelfTuning.of(RLS, forgetting=1.2), ValueError, r"forgetting must be in \(0, 1\], got 1.2"),
    (lambda: SelfTuning.of(SepSA), TypeError, "kind must be RLS, SoftmaxNewton or LogisticNewton"),
    (lambda: SelfTuning([]), ValueError, "members must be one head solver or more, got none"),
    (lambda: SelfTuning([nn.Linear(2, 1)]), TypeError, "members must be plain head solvers"),
    (lambda: SelfTuning([SelfTuning()]), TypeError, "members must be plain head solvers"),
    (lambda: SelfTuning([RLS().bind(nn.Linear(2, 1))]), ValueError, "must be new solvers that own no head"),
    (lambda: RLS().bind(nn.Linear(3, 1)).merge(make(3)[0]), TypeError, r"an RLS or a Delta, .* got SelfTuning"),
    (
        lambda: make(3)[0].update(torch.ones(4, 3), torch.ones(4, 1), identity=torch.ones(3, 1)),
        ValueError, "identity must have one row a sample",
    ),
    (
        lambda: SelfTuning.of(SoftmaxNewton).bind(nn.Linear(3, 2)).prepare_capture(),
        ValueError, r"take SoftmaxNewton\(ridge=10\)",
    ),
])  # fmt: skip
def test_what_it_refuses(act, error, words):
    with pytest.raises(error, match=words):
        act()
    assert not [name for name in ("unlearn", "merge", "delta_since", "predict_proba") if hasattr(make(3)[0], name)]


def test_a_moved_head_moves_every_member():
    solver, linear = make(4, 2)
    x, y = torch.randn(2, 30, 4, dtype=torch.float64), torch.randn(2, 30, 2, dtype=torch.float64)
    solver.update(x[0], y[0])
    before = [weights(member) for member in solver.members]
    with torch.no_grad():
        linear.weight += y[1, :2, :1]
    assert torch.allclose(solver.predict(x[1]), linear(x[1]))
    for member, old in zip(solver.members, before, strict=True):
        np.testing.assert_allclose(member.linear.weight.detach(), old[:, :4] + y[1, :2, :1].numpy(), rtol=1e-7)


def test_the_ridge_follows_the_size_of_the_features():
    """Features in other units, with a prior in those units: the same predictions and the same choices."""
    torch.manual_seed(0)
    x, y = torch.randn(200, 5, dtype=torch.float64), torch.randn(200, 1, dtype=torch.float64)
    one, head = make(5, bias=False)
    scaled = copy.deepcopy(head)
    with torch.no_grad():
        scaled.weight /= 1000
    other = SelfTuning().bind(scaled)
    other._seen.salt = one._seen.salt  # the same samples held out
    for i in range(0, 200, 4):
        one.update(x[i : i + 4], y[i : i + 4], identity=x[i : i + 4])
        other.update(1000 * x[i : i + 4], y[i : i + 4], identity=x[i : i + 4])
    torch.testing.assert_close(scaled.weight * 1000, head.weight, rtol=1e-9, atol=1e-9)
    assert [c.step for c in one.chosen] == [c.step for c in other.chosen]


# ---------------------------------------------------------------------- it chooses well, and honestly


def errors_before_learning(solver, x, y):
    errors = []
    for i in range(len(x)):
        errors.append(float((solver.predict(x[i]) - y[i]).square()))
        solver.update(x[i], y[i])
    return np.array(errors)


@pytest.mark.parametrize("seeds", [1, pytest.param(3, marks=pytest.mark.long)])
def test_it_follows_a_jump_and_remembers_all_in_between(seeds):
    """Beside forgetting 1 at rest, and back to the error before the jump within 300 samples of it."""
    rest, back = [], []
    for seed in range(seeds):
        torch.manual_seed(seed)
        x, truth = torch.randn(1400, 6), torch.randn(2, 6, 1)
        y = torch.cat([x[:1000] @ truth[0], x[1000:] @ truth[1]]) + 0.5 * torch.randn(1400, 1)
        auto, one = (errors_before_learning(head.bind(nn.Linear(6, 1)), x, y) for head in (SelfTuning(), RLS()))
        rest.append(auto[300:1000].mean() / one[300:1000].mean())
        back.append(auto[1300:].mean() / auto[300:1000].mean())
        assert one[1300:].mean() > 3 * one[300:1000].mean()
    assert np.mean(rest) <= 1.05
    assert np.mean(back) <= 1.3  # a mean of 100 squared errors per seed has a standard error of 0.14


def test_it_follows_a_jump_without_any_noise():
    torch.manual_seed(0)
    x, truth = torch.randn(900, 4, dtype=torch.float64), torch.randn(2, 4, 1, dtype=torch.float64)
    y = torch.cat([x[:600] @ truth[0], x[600:] @ truth[1]])
    solver, head = make(4)
    learn(solver, zip(x, y, strict=True))
    assert solver.forgetting < 1
    assert (head(x[600:]) - y[600:]).square().mean().item() < 0.01  # what the ridge leaves


def test_epochs_over_noise_do_not_flatter_the_members_that_remember_it():
    """Targets are all noise, so the largest ridge is right; by errors before learning alone a smaller one would win."""
    rng = np.random.default_rng(0)
    x, y = torch.as_tensor(rng.normal(size=(60, 30))), torch.as_tensor(rng.normal(size=(60, 1)))
    head = nn.Linear(30, 1, dtype=torch.float64)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    solver = SelfTuning().bind(head)
    for _ in range(40):
        for rows in torch.as_tensor(rng.permutation(60)).split(10):
            solver.update(x[rows], y[rows])
    assert solver.ridge == 1000.0
    # The noise has variance 1, so W errs by 1 + ||W||² at a new sample.
    truth = [1 + np.square(weights(member)).sum() for member in solver.members]
    assert truth[solver._now.active] <= 1.1 * min(truth)


def test_a_held_out_sample_is_scored_as_if_it_had_never_been_learned():
    """e / (1 - λ^age φᵀBφ) against the normal equations of the other samples."""
    rng = np.random.default_rng(3)
    x, y = torch.as_tensor(rng.normal(size=(20, 4))), torch.as_tensor(rng.normal(size=(20, 1)))
    solver, _ = make(4)
    prior = weights(solver)
    blocks = [slice(0, 1), slice(1, 9), slice(9, 20)]  # the first sample of all is one of those that are held out
    for rows in blocks:
        solver.update(x[rows], y[rows])
    before = solver._now.score
    solver.update(x[:1], y[:1])
    assert solver.held_out.all()
    cap = 4 * min(before.sums) / before.count
    batches = [(np.c_[x[rows], np.ones(len(x[rows]))], y[rows].numpy()) for rows in blocks]
    for j, member in enumerate(solver.members):
        ridge = np.array([member.ridge] * 4 + [1e-4])
        error = error_without(batches, member.forgetting, ridge, prior)
        found = solver._now.score.sums[j] - 0.98 * before.sums[j]
        assert found == pytest.approx(min(error, cap), rel=1e-8)  # rounding, of matrices with condition up to 1e7


@pytest.mark.parametrize("n", [1, 30])
def test_leverages_of_all_members_by_one_call_are_those_of_each(n):
    solver, _ = make(9, 2)
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        solver.update(torch.randn(n, 9, generator=g).double(), torch.randn(n, 2, generator=g).double())
    Phi = torch.randn(5, 10, generator=g).double()
    each = torch.stack([((Phi @ member.covariance()) * Phi).sum(1) for member in solver.members], 1)
    torch.testing.assert_close(RLS._leverages(solver.members, Phi), each, rtol=1e-9, atol=0)


def test_what_is_held_out_and_what_is_remembered(monkeypatch):
    solver, head = make(3)
    x, y = torch.randn(300, 3, dtype=torch.float64), torch.randn(300, 1, dtype=torch.float64)
    solver.update(x, y)
    assert solver.held_out is None
    assert solver.samples == 300
    known = len(solver._seen.hashes)
    assert 10 < known < 60
    before = head.weight.clone()
    solver.update(x, y)
    assert int(solver.held_out.sum()) == known
    assert [member.samples for member in solver.members[:3]] == [600 - known] * 3
    assert not torch.equal(before, head.weight)
    held = solver.held_out.clone()
    states = [member.state_dict() for member in solver.members]
    solver.update(x[held], y[held])  # nothing but held-out samples: nothing is learned
    for state, member in zip(states, solver.members, strict=True):
        assert all(torch.equal(state[key], member.state_dict()[key]) for key in ("T", "W", "energy"))
    monkeypatch.setattr(repeated_samples, "LIMIT", known)
    solver.update(torch.randn(300, 3, dtype=torch.float64), y)
    assert len(solver._seen.hashes) == known


def test_a_member_that_cannot_learn_loses_and_the_others_go_on():
    """In float16 a head with next to no ridge gets weights that do not fit; the one with a ridge learns."""
    linear = nn.Linear(2, 1, bias=False, dtype=torch.float16)
    nn.init.zeros_(linear.weight)
    solver = SelfTuning([RLS(ridge=1e-8), RLS(ridge=100.0)]).bind(linear)
    solver.update(torch.tensor([[1e-4, 0.0]]), torch.tensor([[100.0]]))
    solver.update(torch.tensor([[0.0, 1e-4]]), torch.tensor([[100.0]]))
    assert [member.steps for member in solver.members] == [0, 2]
    assert solver.ridge == 100.0
    assert solver.steps == 2


# ---------------------------------------------------------------------- members for cross-entropy

P, K = 12, 4


def linear():
    torch.manual_seed(0)
    return nn.Linear(P, K, dtype=torch.float64)


def batches(count, n=32, signal=1.0, kind=SoftmaxNewton):
    """Features of size 1, and labels of a linear law whose logits have the size of `signal`."""
    generator = torch.Generator().manual_seed(0)
    truth = signal * torch.randn(K, P, generator=generator, dtype=torch.float64)
    for _ in range(count):
        x = torch.randn(n, P, generator=generator, dtype=torch.float64)
        gumbel = -torch.log(-torch.log(torch.rand(n, K, generator=generator, dtype=torch.float64)))
        y = (x @ truth.T + gumbel).argmax(1)
        yield x, y if kind is SoftmaxNewton else nn.functional.one_hot(y, K).double()


@pytest.mark.parametrize(("signal", "low", "high"), [(0.0, 100.0, 1e6), (6.0, 1e-4, 1.0)])
def test_noise_wants_a_large_ridge_and_a_clear_signal_a_small_one(signal, low, high):
    head = linear()
    nn.init.zeros_(head.weight)
    solver = SelfTuning.of(SoftmaxNewton).bind(head)
    learn(solver, batches(40, signal=signal))
    assert low <= solver.ridge <= high
    assert solver.chosen[-1].ridge == solver.ridge
    assert solver.chosen[0] == (0, 1.0, 10.0)


@pytest.mark.parametrize(("kind", "save"), [(SoftmaxNewton, 66), (LogisticNewton, 40)])
def test_comparisons_end_and_later_ones_try_neighbours_and_go_on_from_a_state(kind, save):
    """In the first one, members are heads of their ridge; between comparisons an update is that of the chosen ridge."""
    solver, count = SelfTuning.of(kind).bind(linear()), []
    fixed = [kind(ridge=ridge).bind(linear()) for ridge in RIDGES]
    for i, (x, y) in enumerate(batches(140, kind=kind)):
        if i == 10:
            for member, one in zip(solver.members, fixed, strict=True):
                np.testing.assert_array_equal(weights(member), weights(one))
            assert torch.equal(solver.predict_proba(x), solver.best.predict_proba(x))
        if i == 32:
            fixed = [kind(ridge=solver.ridge).bind(copy.deepcopy(solver.linear))]
            fixed[0].load_state_dict(solver.best.state_dict())
        if i == save:
            other = SelfTuning.of(kind).bind(copy.deepcopy(solver.linear))
            other.load_state_dict(copy.deepcopy(solver.state_dict()))
        for one in (solver, *(fixed if i < 63 else []), *([other] if i >= save else [])):
            one.update(x, y, torch.ones(32).double() if i % 2 else None)
        if 32 <= i < 63:
            assert torch.equal(solver.linear.weight, fixed[0].linear.weight)
        count.append(len(solver.members))
    assert count == [5] * 31 + [1] * 32 + [3] * 8 + [1] * 56 + [3] * 8 + [1] * 5
    assert max(change.ridge for change in solver.chosen) <= 1e6 * min(change.ridge for change in solver.chosen)
    assert not difference(snapshot(solver), snapshot(other))
    assert solver.chosen == other.chosen


@pytest.mark.parametrize("kind", [SoftmaxNewton, LogisticNewton])
def test_a_raised_ridge_stays(kind):
    """Curvature and ridge add up, so that A gains the difference; no later comparison changes the ridge."""
    auto = SelfTuning.of(kind).bind(linear())
    stream = list(batches(80, signal=6.0, kind=kind))
    learn(auto, stream[:50])
    auto.raise_ridge(100.0)
    again = SelfTuning.of(kind).bind(copy.deepcopy(auto.linear))
    again.load_state_dict(auto.state_dict())
    for head in (auto, again):
        learn(head, stream[50:])
    assert auto.ridge == again.ridge == auto.chosen[-1].ridge == 100.0
    assert torch.equal(again.linear.weight, auto.linear.weight)
    with pytest.raises(ValueError, match="at least the present one, 100, got 50"):
        auto.raise_ridge(50.0)


def test_another_ridge_changes_the_curvature_by_the_difference_alone():
    solver = SoftmaxNewton(ridge=2.0, bias_ridge="ridge").bind(linear())
    learn(solver, batches(5))
    state = solver._state
    A = torch.linalg.inv(state.T.T @ state.T)
    for factor in (0.2, 5.0):
        other = with_ridge(state, factor * state.ridge)
        expected = A + torch.diag((factor - 1) * state.ridge_left)
        torch.testing.assert_close(torch.linalg.inv(other.T.T @ other.T), expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(other.ridge_left, factor * state.ridge_left)
    learn(solver, ((x + 1e9, y) for x, y in batches(3)))
    assert with_ridge(solver._state, solver._state.ridge / 5) is None  # which cannot be taken away exactly


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_sepsa_tells_samples_apart_by_the_models_inputs(fraction):
    """The body moves and its features with it, yet the second pass finds the samples again and keeps some from it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = SepSA(model, torch.optim.SGD, lr=1e-2, solver=SelfTuning())
    optimizer.head_fraction = fraction
    torch.manual_seed(1)
    x, y = torch.randn(1000, 4), torch.randn(1000, 2)
    optimizer.learn(x, y)
    assert optimizer.solver.held_out is None
    features = []
    model[1].register_forward_hook(lambda module, args, out: features.append(out))
    with optimizer.observe(y):
        loss = mse_loss(model(x), y)
    features[0].retain_grad()
    loss.backward()
    held = optimizer.solver.held_out
    assert held is not None
    silent = (features[0].grad == 0).all(1)
    assert int(silent.sum()) == int(held.sum()) > 3
    if fraction == 1.0:
        assert torch.equal(silent, held)
