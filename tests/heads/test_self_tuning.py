"""Self-tuning heads: each member is a head of its settings, and the score that chooses is honest."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss

from reference import best_head, error_without
from sepsa import RLS, LogisticNewton, SelfTuning, SepSA, SoftmaxNewton
from sepsa.heads.base import repeated_samples
from sepsa.heads.math import score as scores
from sepsa.heads.math.cross_entropy import with_ridge
from sepsa.heads.self_tuning import RIDGES
from sepsa.testing.case import difference, snapshot

OLD = torch.load(Path(__file__).parent.parent / "data" / "self-tuning-0.1.pt")


def make(k, m=1, bias=True, seed=0, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    linear = nn.Linear(k, m, bias=bias, dtype=dtype)
    return SelfTuning.of(RLS, **options).bind(linear), linear


def weights(solver):
    linear = solver.linear
    return torch.cat([linear.weight, linear.bias[:, None]], 1) if linear.bias is not None else linear.weight


def same(one, other):
    return not difference(snapshot(one), snapshot(other))


# ---------------------------------------------------------------------- the score


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
    device = scores.Score(*(torch.tensor(part, dtype=torch.float64) for part in host))
    for row, size in zip(errors.tolist(), sizes, strict=True):
        host = scores.add(host, row, size)
        device = scores.add_captured(
            device, torch.tensor(row, dtype=torch.float64), torch.tensor(size, dtype=torch.float64)
        )
        found = scores.best_captured(device, torch.tensor(memory, dtype=torch.float64), torch.tensor(active))
        active = scores.best(host, memory, active)
        assert int(found) == active
    for mine, theirs in zip(host, device, strict=True):
        torch.testing.assert_close(torch.tensor(mine, dtype=torch.float64), theirs, rtol=1e-12, atol=1e-300)
    wanted = best_head(errors.tolist(), memory, sizes)
    assert active == (0 if wanted is None else wanted)


def test_an_error_that_is_not_finite_is_the_largest():
    score = scores.add(scores.add(scores.start(2), [1.0, 2.0]), [float("nan"), 2.0])
    assert score.sums == [0.98 + 4.0, 1.96 + 2.0]


# ---------------------------------------------------------------------- each member is a head


@settings(max_examples=15, deadline=None)
@given(
    k=st.integers(1, 9),
    m=st.integers(1, 3),
    bias=st.booleans(),
    sizes=st.lists(st.sampled_from([1, 1, 2, 7, 30]), min_size=1, max_size=15),
    weighted=st.booleans(),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    seed=st.integers(0, 10**6),
)
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
    for member, one in zip(solver.members, plain, strict=True):
        assert torch.equal(weights(member), weights(one))
    best = plain[solver._now.active]
    assert torch.equal(weights(solver), weights(best))
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


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: RLS(ridge="auto", bias_ridge=1.0), r"SelfTuning.of\(RLS, forgetting=1.0, bias_ridge=1.0\)"),
        (lambda: RLS(forgetting="auto"), r"SelfTuning.of\(RLS, ridge=1.0\)"),
        (lambda: RLS(forgetting="auto", ridge="auto"), r"SelfTuning.of\(RLS\)"),
        (lambda: SoftmaxNewton(ridge="auto"), r"SelfTuning.of\(SoftmaxNewton\)"),
        (lambda: LogisticNewton(ridge="auto", forgetting=0.9), r"SelfTuning.of\(LogisticNewton, forgetting=0.9\)"),
    ],
)
def test_the_old_spelling_makes_one_and_names_the_new_one(act, words):
    with pytest.warns(DeprecationWarning, match=words):
        assert isinstance(act(), SelfTuning)


def test_what_it_refuses():
    with pytest.raises(ValueError, match=r"forgetting must be in \(0, 1\], got 1.2"):
        SelfTuning.of(RLS, forgetting=1.2)
    with pytest.raises(TypeError, match="kind must be RLS, SoftmaxNewton or LogisticNewton"):
        SelfTuning.of(SepSA)
    with pytest.raises(ValueError, match="members must be one head solver or more, got none"):
        SelfTuning([])
    for bad in (nn.Linear(2, 1), SelfTuning()):
        with pytest.raises(TypeError, match="members must be plain head solvers"):
            SelfTuning([bad])
    with pytest.raises(ValueError, match="members must be new solvers that own no head"):
        SelfTuning([RLS().bind(nn.Linear(2, 1))])
    solver, _ = make(3)
    solver.update(torch.randn(4, 3).double(), torch.randn(4, 1).double())
    for beyond in ("unlearn", "merge", "delta_since", "predict_proba"):
        assert not hasattr(solver, beyond)
    with pytest.raises(TypeError, match=r"other must be an RLS or a Delta, .* got SelfTuning"):
        RLS().bind(nn.Linear(3, 1)).merge(solver)
    with pytest.raises(ValueError, match="identity must have one row a sample"):
        solver.update(torch.randn(4, 3).double(), torch.randn(4, 1).double(), identity=torch.ones(3, 1))


def test_a_moved_head_moves_every_member():
    solver, linear = make(4, 2)
    x, y = torch.randn(2, 30, 4, dtype=torch.float64), torch.randn(2, 30, 2, dtype=torch.float64)
    solver.update(x[0], y[0])
    before = [weights(member).clone() for member in solver.members]
    delta = torch.randn(2, 4, dtype=torch.float64)
    with torch.no_grad():
        linear.weight += delta
    assert torch.allclose(solver.predict(x[1]), linear(x[1]))
    for member, old in zip(solver.members, before, strict=True):
        torch.testing.assert_close(member.linear.weight, old[:, :4] + delta)


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


@pytest.mark.parametrize("seeds", [1, pytest.param(3, marks=pytest.mark.long)])
def test_it_follows_a_jump_and_remembers_all_in_between(seeds):
    """Beside forgetting 1 at rest, and back to the error before the jump within 300 samples of it."""
    rest, back = [], []
    for seed in range(seeds):
        torch.manual_seed(seed)
        x, truth = torch.randn(1400, 6), torch.randn(2, 6, 1)
        y = torch.cat([x[:1000] @ truth[0], x[1000:] @ truth[1]]) + 0.5 * torch.randn(1400, 1)
        errors = []
        for solver in (SelfTuning(), RLS()):
            head = nn.Linear(6, 1)
            solver.bind(head)
            error = []
            with torch.no_grad():
                for i in range(len(x)):
                    error.append(float((head(x[i]) - y[i]).square()))
                    solver.update(x[i : i + 1], y[i : i + 1])
            errors.append(error)
        auto, one = np.array(errors)
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
    for i in range(900):
        solver.update(x[i : i + 1], y[i : i + 1])
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
    truth = [1 + float(weights(member).detach().square().sum()) for member in solver.members]
    assert truth[solver._now.active] <= 1.1 * min(truth)


def test_a_held_out_sample_is_scored_as_if_it_had_never_been_learned():
    """e / (1 - λ^age φᵀBφ) against the normal equations of the other samples."""
    rng = np.random.default_rng(3)
    x, y = torch.as_tensor(rng.normal(size=(20, 4))), torch.as_tensor(rng.normal(size=(20, 1)))
    solver, _ = make(4)
    prior = weights(solver).detach().numpy().copy()
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


def test_a_head_with_more_coordinates_than_samples_does_not_choose_by_what_it_remembers():
    """Targets are noise, so a large ridge is right: it wins mostly, as two held-out samples or so can tell by chance.

    A held-out sample was learned once. Without the correction the smallest ridge, which remembers it, always wins.
    """
    ridges = []
    for seed in range(10):
        torch.manual_seed(seed)
        x, y = torch.randn(20, 50), torch.randn(20, 1)
        model = nn.Sequential(nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1))
        nn.init.zeros_(model[2].weight)
        optimizer = SepSA(model, torch.optim.SGD, lr=1e-3, solver=SelfTuning())
        for _ in range(8):
            for rows in torch.randperm(20).split(5):
                optimizer.learn(x[rows], y[rows])
        ridges.append(optimizer.solver.ridge)
    assert sum(ridge >= 100.0 for ridge in ridges) > 5


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


# ---------------------------------------------------------------------- state


def test_states_of_version_01_load_or_name_the_cure():
    head = nn.Linear(4, 3)
    with pytest.raises(ValueError, match=r"load the model's weights alone and start a new SelfTuning\(\) on them"):
        SelfTuning().bind(head).load_state_dict(OLD["RLS"]["state"])
    for kind in (SoftmaxNewton, LogisticNewton):
        old = OLD[kind.__name__]
        linear = nn.Linear(4, 3)
        linear.load_state_dict(old["head"])
        solver = SelfTuning.of(kind).bind(linear)
        solver.load_state_dict(old["state"])
        assert solver.ridge == old["ridge"]
        assert solver.steps == 40
        for x, y in zip(old["x"], old["y"], strict=True):
            solver.update(x, y)
        torch.testing.assert_close(linear.weight, old["after"], rtol=1e-4, atol=1e-5)  # float32


# ---------------------------------------------------------------------- members for cross-entropy

P, K = 12, 4


def linear(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(P, K, dtype=torch.float64)


def batches(count, n=32, signal=1.0, seed=0):
    """Features of size 1, and labels of a linear law whose logits have the size of `signal`."""
    generator = torch.Generator().manual_seed(seed)
    truth = signal * torch.randn(K, P, generator=generator, dtype=torch.float64)
    for _ in range(count):
        x = torch.randn(n, P, generator=generator, dtype=torch.float64)
        gumbel = -torch.log(-torch.log(torch.rand(n, K, generator=generator, dtype=torch.float64)))
        yield x, (x @ truth.T + gumbel).argmax(1)


def targets_for(kind, y):
    return y if kind is SoftmaxNewton else nn.functional.one_hot(y, K).double()


@pytest.mark.parametrize("kind", [SoftmaxNewton, LogisticNewton])
def test_members_of_the_first_comparison_are_heads_of_their_ridge(kind):
    auto = SelfTuning.of(kind).bind(linear())
    fixed = [kind(ridge=ridge).bind(linear()) for ridge in RIDGES]
    for x, y in batches(10):
        for head in (auto, *fixed):
            head.update(x, targets_for(kind, y))
    for member, one in zip(auto.members, fixed, strict=True):
        assert torch.equal(weights(member), weights(one))
    assert torch.equal(auto.predict_proba(x), auto.best.predict_proba(x))


@pytest.mark.parametrize(("signal", "low", "high"), [(0.0, 100.0, 1e6), (6.0, 1e-4, 1.0)])
def test_noise_wants_a_large_ridge_and_a_clear_signal_a_small_one(signal, low, high):
    head = linear()
    nn.init.zeros_(head.weight)
    solver = SelfTuning.of(SoftmaxNewton).bind(head)
    for x, y in batches(40, signal=signal):
        solver.update(x, y)
    assert low <= solver.ridge <= high
    assert solver.chosen[-1].ridge == solver.ridge
    assert solver.chosen[0] == (0, 1.0, 10.0)


def test_comparisons_end_and_later_ones_try_neighbours():
    solver = SelfTuning.of(SoftmaxNewton).bind(linear())
    count = []
    for x, y in batches(140):
        solver.update(x, y)
        count.append(len(solver.members))
    assert count == [5] * 31 + [1] * 32 + [3] * 8 + [1] * 56 + [3] * 8 + [1] * 5
    ratio = max(change.ridge for change in solver.chosen) / min(change.ridge for change in solver.chosen)
    assert ratio <= 1e6


def test_between_comparisons_an_update_is_that_of_the_chosen_ridge():
    solver = SelfTuning.of(SoftmaxNewton).bind(linear())
    stream = list(batches(60))
    for x, y in stream[:40]:
        solver.update(x, y, torch.ones(32).double())
    plain = SoftmaxNewton(ridge=solver.ridge).bind(copy.deepcopy(solver.linear))
    plain.load_state_dict(solver.best.state_dict())
    for x, y in stream[40:]:
        solver.update(x, y)
        plain.update(x, y)
    assert torch.equal(solver.linear.weight, plain.linear.weight)


@pytest.mark.parametrize("kind", [SoftmaxNewton, LogisticNewton])
def test_a_raised_ridge_stays(kind):
    """Curvature and ridge add up, so that A gains the difference; no later comparison changes the ridge."""
    auto = SelfTuning.of(kind).bind(linear())
    stream = [(x, targets_for(kind, y)) for x, y in batches(80, signal=6.0)]
    for x, y in stream[:50]:
        auto.update(x, y)
    auto.raise_ridge(100.0)
    again = SelfTuning.of(kind).bind(copy.deepcopy(auto.linear))
    again.load_state_dict(auto.state_dict())
    for x, y in stream[50:]:
        auto.update(x, y)
        again.update(x, y)
    assert auto.ridge == again.ridge == auto.chosen[-1].ridge == 100.0
    assert torch.equal(again.linear.weight, auto.linear.weight)
    with pytest.raises(ValueError, match="at least the present one, 100, got 50"):
        auto.raise_ridge(50.0)


@pytest.mark.parametrize(("kind", "updates"), [(SoftmaxNewton, 3), (SoftmaxNewton, 66), (LogisticNewton, 40)])
def test_a_saved_comparison_goes_on_in_the_same_bits(kind, updates):
    head = SelfTuning.of(kind).bind(linear())
    stream = [(x, targets_for(kind, y)) for x, y in batches(80)]
    for x, y in stream[:updates]:
        head.update(x, y)
    other = SelfTuning.of(kind).bind(copy.deepcopy(head.linear))
    other.load_state_dict(copy.deepcopy(head.state_dict()))
    for x, y in stream[updates:]:
        head.update(x, y)
        other.update(x, y)
    assert same(head, other)
    assert head.chosen == other.chosen


def test_another_ridge_changes_the_curvature_by_the_difference_alone():
    solver = SoftmaxNewton(ridge=2.0, bias_ridge="ridge").bind(linear())
    for x, y in batches(5):
        solver.update(x, y)
    state = solver._state
    A = torch.linalg.inv(state.T.T @ state.T)
    for factor in (0.2, 5.0):
        other = with_ridge(state, factor * state.ridge)
        expected = A + torch.diag((factor - 1) * state.ridge_left)
        torch.testing.assert_close(torch.linalg.inv(other.T.T @ other.T), expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(other.ridge_left, factor * state.ridge_left)
    for x, y in batches(3):
        solver.update(x + 1e9, y)
    assert with_ridge(solver._state, solver._state.ridge / 5) is None  # which cannot be taken away exactly


def test_a_captured_step_says_to_fix_the_ridge():
    solver = SelfTuning.of(SoftmaxNewton).bind(linear())
    with pytest.raises(ValueError, match=r"take SoftmaxNewton\(ridge=10\)"):
        solver.prepare_capture()


# ---------------------------------------------------------------------- inside SepSA


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_sepsa_tells_samples_apart_by_the_models_inputs(fraction):
    """The body moves and its features with it, yet the second pass finds the samples again and keeps some from it."""
    model = network()
    optimizer = SepSA(model, torch.optim.SGD, lr=1e-2, solver=SelfTuning())
    optimizer.head_fraction = fraction
    torch.manual_seed(1)
    x, y = torch.randn(1000, 4), torch.randn(1000, 2)
    optimizer.learn(x, y)
    assert optimizer.solver.held_out is None
    features = []
    keep = model[1].register_forward_hook(lambda module, args, out: features.append(out))
    with optimizer.observe(y):
        loss = mse_loss(model(x), y)
    features[0].retain_grad()
    loss.backward()
    keep.remove()
    held = optimizer.solver.held_out
    assert held is not None
    silent = (features[0].grad == 0).all(1)
    assert int(silent.sum()) == int(held.sum()) > 3
    if fraction == 1.0:
        assert torch.equal(silent, held)
