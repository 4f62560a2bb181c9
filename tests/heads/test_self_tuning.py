"""Self-tuning heads: each member is a head of its settings, and the score that chooses is honest."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from reference import best_head
from reference import weights as head_weights
from sepsa import RLS, LogisticNewton, SelfTuning, SepSA, SoftmaxNewton
from sepsa.heads.math import score as scores
from sepsa.heads.math.cross_entropy import with_ridge
from sepsa.heads.tuning import RIDGES
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
def test_the_score_is_that_of_the_reference(seed, heads, updates, scale):
    rng = np.random.default_rng(seed)
    errors = scale * rng.exponential(size=(updates, heads)) ** 3
    memory = rng.choice([1.0, 0.98, 0.9], size=heads).tolist()
    sizes = rng.exponential(size=updates).tolist()
    host, active = scores.start(heads), 0
    for row, size in zip(errors.tolist(), sizes, strict=True):
        host = scores.add(host, row, size)
        active = scores.best(host, memory, active)
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
    solver, linear = make(k, m, bias, seed, ridge=3.0)
    start, plain = copy.deepcopy(linear), []
    rng = np.random.default_rng(seed)
    for n in sizes:
        x, y = torch.as_tensor(scale * rng.normal(size=(n, k))), torch.as_tensor(rng.normal(size=(n, m)))
        omega = torch.as_tensor(rng.uniform(0, 2, size=n)) if weighted else None
        plain = plain or [RLS(ridge=3.0, forgetting=a.forgetting).bind(copy.deepcopy(start)) for a in solver.members]
        for one in (solver, *plain):
            one.update(x, y, omega)
    best = plain[solver._now.active]
    for member, one in zip([*solver.members, solver], [*plain, best], strict=True):
        np.testing.assert_array_equal(weights(member), weights(one))
    assert torch.equal(solver.covariance(), best.covariance())
    assert (solver.ridge, solver.forgetting) == (best.ridge_now, best.forgetting)
    assert (solver.steps, solver.samples) == (best.steps, best.samples)
    x = torch.as_tensor(scale * rng.normal(size=(4, k)))
    assert torch.equal(solver.predict(x), best.predict(x))


def test_settings_that_are_given_are_not_chosen():
    solver, _ = make(3, ridge=2.0)
    assert {member.ridge for member in solver.members} == {2.0}
    assert len(solver.members) == 3
    assert [member.ridge for member in make(3)[0].members] == ["evidence"] * 3
    assert repr(solver) == "SelfTuning(3 of RLS, head=3->1)"
    assert {member.forgetting for member in make(3, forgetting=0.95)[0].members} == {0.95}
    own = SelfTuning([RLS(ridge=5.0), RLS(forgetting=0.5)]).bind(nn.Linear(3, 1))
    own.update(100 * torch.randn(4, 3), torch.randn(4, 1))
    assert [member.ridge for member in own.members] == [5.0, 1.0]


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
        lambda: SepSA(nn.Sequential(nn.Linear(2, 1)), torch.optim.Adam, solver=SelfTuning(), samples_per_epoch=9),
        ValueError, "samples_per_epoch sets the forgetting of a solver that has forgetting 1",
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


def test_epochs_over_noise_get_a_ridge_that_leaves_no_weights():
    """Targets are all noise: evidence finds no weight that they determine, however often they come."""
    rng = np.random.default_rng(0)
    x, y = torch.as_tensor(rng.normal(size=(60, 30))), torch.as_tensor(rng.normal(size=(60, 1)))
    head = nn.Linear(30, 1, dtype=torch.float64)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    solver = SelfTuning().bind(head)
    for _ in range(10):
        for rows in torch.as_tensor(rng.permutation(60)).split(10):
            solver.update(x[rows], y[rows])
    assert np.square(weights(solver)).sum() < 0.5  # least squares without a ridge: about 1


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


def test_a_state_with_other_members_brings_them():
    """A head of three members goes on with the four fixed ridges of a saved one."""
    members = [RLS(ridge=ridge, forgetting=lam) for lam, ridge in ((1.0, 0.1), (1.0, 3.0), (0.98, 0.1), (0.9, 0.1))]
    old, head = SelfTuning(members).bind(linear()), linear()
    stream = [(torch.randn(8, P).double(), torch.randn(8, K).double()) for _ in range(6)]
    learn(old, stream[:3])
    new = SelfTuning().bind(head)
    new.linear.load_state_dict(old.linear.state_dict())
    new.load_state_dict(old.state_dict())
    for one in (old, new):
        learn(one, stream[3:])
    assert [member.ridge for member in new.members] == [0.1, 3.0, 0.1, 0.1]
    assert not difference(snapshot(old), snapshot(new))
