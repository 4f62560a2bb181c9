"""The ridge by evidence: the law of `math.evidence`, the exactness of a change, and what bad samples get."""

import copy
import math
from functools import partial

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import reference
from sepsa import RLS, PerOutput
from sepsa.heads import Delta
from sepsa.heads.base.parameters import join
from sepsa.heads.least_squares import evidence
from sepsa.heads.least_squares import math as least_squares
from sepsa.heads.least_squares.evidence import REFUTED, Evidence, best_ridge, evidence_of, with_ridge
from sepsa.heads.run.choose import force
from sepsa.states.tree import leaves
from sepsa.testing.case import difference

K, M = 5, 2


def samples(n=200, noise=0.5, seed=0, offset=0.0, unit=1.0):
    torch.manual_seed(seed)
    x = torch.randn(n, K, dtype=torch.float64)
    truth = torch.randn(M, K, dtype=torch.float64)
    return unit * (x + offset), x @ truth.T + 3 + noise * torch.randn(n, M, dtype=torch.float64), truth / unit


def head(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(K, M).double()


def weights(linear):
    return torch.cat([linear.weight, linear.bias[:, None]], 1).detach()


def ridge_regression(Phi, y, ridge, prior):
    return torch.linalg.solve(Phi.T @ Phi + torch.diag(ridge), Phi.T @ y + (ridge * prior).T).T


def log_evidence(x, y, ridge, prior):
    return float(reference.log_evidence(x.numpy(), y.numpy(), ridge, prior.numpy()))


def joined(x):
    return torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)


def learned(x, y, solver=None, batch=10, linear=None):
    solver = (solver or RLS(ridge="evidence")).bind(linear or head())
    for rows in torch.arange(len(x)).split(batch):
        solver.update(x[rows], y[rows])
    return solver


def solved(x, y, prior, ridge, bias_ridge=1e-9):
    """The state that has learned samples with this ridge about `prior` (m, p)."""
    each = torch.full((K + 1,), ridge, dtype=x.dtype)
    each[-1] = bias_ridge
    state = least_squares.start(prior, each)
    return least_squares.block_by_qr(state, joined(x), y)


def fixed_point(x, y):
    """The ridge that the law would not change, for a prior of 0, by iteration from 1."""
    ridge, initial, none = 1.0, torch.zeros(M, K + 1, dtype=x.dtype), torch.zeros(M, 1, dtype=x.dtype)
    for _ in range(500):
        found = evidence_of(solved(x, y, initial, ridge), initial, none, len(x), 1.0, True)
        best = found.determined * found.residual / (found.freedom * found.weights)
        if not ridge or abs(best / ridge - 1) < 1e-12:
            break
        ridge = best
    return ridge


@given(seed=st.integers(0, 99), noise=st.floats(0.3, 3.0), n=st.integers(12, 60), unit=st.floats(1e-6, 1e6))
def test_the_fixed_point_has_the_largest_likelihood(seed, noise, n, unit):
    """Of targets that are divided by their standard deviations."""
    x, y, _ = samples(n, noise, seed)
    ridge = fixed_point(x, y * torch.tensor([1.0, unit]))
    assume(1e-6 < ridge < 1e6)  # elsewhere the likelihood grows on towards 0 or infinity
    prior, y = torch.zeros(M, K, dtype=x.dtype), (y - y.mean(0)) / y.std(0)
    around = [log_evidence(x, y, ridge * factor, prior) for factor in (0.9, 1.0, 1.1)]
    assert max(around) == around[1]


@given(seed=st.integers(0, 99), n=st.integers(8, 60), ridge=st.floats(0.05, 50.0), present=st.floats(-2.0, 2.0))
def test_the_scale_of_each_prior_has_the_largest_likelihood(seed, n, ridge, present):
    x, y, truth = samples(n, 1.0, seed)
    initial = torch.cat([truth * 0.6 + 0.2, torch.zeros(M, 1, dtype=x.dtype)], 1)
    scale = torch.full((M, 1), present, dtype=x.dtype)
    state = solved(x, y, scale * initial, ridge)
    found = evidence_of(state, initial, scale, len(x), 1.0, True).scale
    for o in range(M):
        s = float(found[o])
        around = (max(s - 0.05, 0.0), s, min(s + 0.05, 1.0))
        near = [log_evidence(x, y[:, o : o + 1], ridge, a * initial[o : o + 1, :K]) for a in around]
        assert max(near) == pytest.approx(near[1], rel=1e-9)


@given(
    seed=st.integers(0, 10**6), n=st.integers(3, 60), k=st.integers(2, 8), m=st.integers(1, 4), bias=st.booleans(),
    exponent=st.floats(-2, 2), r=st.floats(0.5, 1.0), trained=st.booleans(),
)  # fmt: skip
def test_a_state_says_what_its_samples_say(seed, n, k, m, bias, exponent, r, trained):
    g = torch.Generator().manual_seed(seed)
    truth, initial = (torch.randn(m, k + bias, generator=g, dtype=torch.float64) for _ in range(2))
    Phi = torch.randn(n, k + bias, generator=g, dtype=torch.float64)
    Phi[:, k:] = 1.0
    unit = 10.0 ** torch.randint(-3, 4, (m,), generator=g)
    y = (Phi @ truth.T + 0.5 * torch.randn(n, m, generator=g, dtype=torch.float64)) * unit
    if trained:
        initial = truth * unit[:, None]
    omega = torch.rand(n, 1, generator=g, dtype=torch.float64).sqrt()
    Phi, y, ridge = Phi * omega, y * omega, 10.0**exponent
    each = torch.full((k + bias,), ridge, dtype=y.dtype)
    each[k:] = 1e-4
    scale = torch.randn(m, 1, generator=g, dtype=torch.float64)
    prior = scale * initial
    state = least_squares.block_by_qr(least_squares.start(prior, each), Phi, y)
    found = evidence_of(state, initial, scale, n, r, bias)
    given = Phi.numpy(), y.numpy(), initial.numpy(), ridge, 1e-4 if bias else None, n, r, REFUTED
    numbers, best = reference.evidence_of(*given)
    assert found[:4] == pytest.approx(numbers, rel=1e-6)
    assert found.scale[:, 0].tolist() == pytest.approx(best.clip(0, 1).tolist(), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("backend", ["compiled", "torch"])
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_the_head_is_ridge_regression_with_the_ridge_that_it_chose(backend, batch):
    x, y, _ = samples(130)
    with force(backend):
        solver = learned(x, y, RLS(ridge="evidence", noise_factor=1.0), batch)
    start = weights(head())
    each = torch.full((K + 1,), solver.ridge_now, dtype=x.dtype)
    each[-1] = min(1e-4, 1e-5 * solver.ridge_now)
    prior = solver._choice.scale * start
    torch.testing.assert_close(
        weights(solver.linear), ridge_regression(joined(x), y, each, prior), rtol=1e-9, atol=1e-9
    )
    assert 0.25 / 4 < solver.ridge_now < 0.25 * 4  # the noise of variance 0.25, weights of variance 1
    residuals = y - joined(x) @ weights(solver.linear).T
    objective = residuals.square().sum(0) + (each * (weights(solver.linear) - prior).square()).sum(1)
    torch.testing.assert_close(solver.objective(), objective, rtol=1e-9, atol=0)


@given(seed=st.integers(0, 99), new=st.floats(1e-3, 1e3), scale=st.floats(0, 1))
def test_another_ridge_and_prior_need_no_sample_again(seed, new, scale):
    x, y, _ = samples(30, 1.0, seed)
    prior = weights(head(seed))
    one, other = (torch.full((K + 1,), value, dtype=x.dtype) for value in (1.0, new))
    state = least_squares.block(
        least_squares.start(prior, one), *least_squares.whiten(least_squares.start(prior, one), joined(x), y)
    )
    changed = with_ridge(state, other, scale * prior)
    direct = least_squares.start(scale * prior, other)
    direct = least_squares.block(direct, *least_squares.whiten(direct, joined(x), y))
    for name in ("W", "energy", "ridge_left"):
        torch.testing.assert_close(getattr(changed, name), getattr(direct, name), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(changed.T.T @ changed.T, direct.T.T @ direct.T, rtol=1e-8, atol=1e-10)


def test_an_initial_head_that_was_trained_stays_and_one_drawn_at_random_is_left():
    x, y, truth = samples(64, noise=3.0)
    trained = head()
    with torch.no_grad():
        trained.weight.copy_(truth)
        trained.bias.fill_(3.0)
    assert bool((learned(x, y, linear=trained)._choice.scale > 0.5).all())
    random = head()
    with torch.no_grad():
        random.weight.copy_(-truth)
    assert bool((learned(x, y, linear=random)._choice.scale == 0.0).all())


def test_offsets_and_units_of_the_features_hardly_matter():
    x, y, _ = samples(256)
    plain = learned(x, y)
    for offset, unit in ((1000.0, 1.0), (0.0, 100.0), (0.0, 0.01)):
        moved, _, _ = samples(256, offset=offset, unit=unit)
        other, fixed = learned(moved, y), learned(moved, y, RLS(ridge=plain.ridge_now * unit**2))
        assert 0.2 < other.ridge_now / unit**2 / plain.ridge_now < 5
        error, usual = (float(nn.functional.mse_loss(one.linear(moved), y).detach()) for one in (other, fixed))
        assert error < 1.05 * usual  # with an offset both pay for the ridge of the bias


BAD = {
    "one sample": lambda: (torch.randn(1, K), torch.randn(1, M)),
    "fewer samples than weights": lambda: (torch.randn(4, K), torch.randn(4, M)),
    "constant features": lambda: (torch.ones(64, K), torch.randn(64, M)),
    "features of zeros": lambda: (torch.zeros(64, K), torch.randn(64, M)),
    "constant targets": lambda: (torch.randn(64, K), torch.full((64, M), 7.0)),
    "targets of zeros": lambda: (torch.randn(64, K), torch.zeros(64, M)),
    "targets without noise": lambda: (x := torch.randn(64, K), x[:, :M] * 2),
    "targets of noise": lambda: (torch.randn(64, K), torch.randn(64, M)),
    "huge features": lambda: (1e12 * torch.randn(64, K), torch.randn(64, M)),
    "tiny features": lambda: (1e-12 * torch.randn(64, K), torch.randn(64, M)),
    "huge targets": lambda: (torch.randn(64, K), 1e30 * torch.randn(64, M)),
    "offset of ten thousand": lambda: (1e4 + torch.randn(64, K), torch.randn(64, M)),
    "one outlier": lambda: (torch.randn(64, K), torch.randn(64, M).index_fill(0, torch.tensor([5]), 1e6)),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("forgetting", [1.0, 0.9])
def test_every_choice_is_finite_and_within_its_bounds(kind, forgetting):
    torch.manual_seed(0)
    x, y = (part.double() for part in BAD[kind]())
    for batch in (1, 8):
        solver = learned(x, y, RLS(ridge="evidence", forgetting=forgetting), batch)
        assert 0 < solver.ridge_now < math.inf
        # The variance is that of the samples remembered when it was chosen, some of all.
        most = max(float((x - x.mean(0)).square().max()), evidence.START / evidence.MOST)
        assert solver.ridge_now <= solver.noise_factor * evidence.MOST * most
        assert torch.isfinite(weights(solver.linear)).all()
        assert torch.isfinite(solver.covariance()).all()


@given(lam=st.floats(0.5, 1.0), steps=st.integers(1, 200))
def test_the_mean_weight_is_that_of_the_samples_that_fade(lam, steps):
    weights = lam ** torch.arange(steps, dtype=torch.float64)
    assert evidence.mean_weight(lam, steps) == pytest.approx(float(weights.square().sum() / weights.sum()))


def test_a_short_memory_keeps_the_ridge_that_its_noise_asks_for():
    """Ten samples remembered for five weights: n - γ alone would take most of the residuals for noise."""
    torch.manual_seed(0)
    true, x = torch.randn(1, K), torch.randn(2000, K)
    y = x @ true.T + 0.5 * torch.randn(2000, 1)
    errors = {}
    for ridge in (1.0, "evidence"):
        linear = nn.Linear(K, 1)
        solver = RLS(ridge=ridge, noise_factor=1.0, forgetting=0.9).bind(linear)
        each = []
        for one, target in zip(x.split(1), y.split(1), strict=True):
            each.append(float((linear(one).detach() - target).square()))
            solver.update(one, target)
        errors[ridge] = sum(each[100:])
    assert errors["evidence"] < errors[1.0]


def test_without_evidence_the_ridge_stays():
    def chosen(determined, residual, weights, ridge, most=1.0):
        return best_ridge(Evidence(determined, residual, weights, 100.0, torch.ones(1, 1)), ridge, lambda: (1.0, most))

    assert chosen(0.0, 0.0, 0.0, 3.0) == 3.0
    assert chosen(5.0, math.nan, 1.0, 3.0) == 3.0
    assert chosen(5.0, 100.0, 1.0, 300.0, most=0.0) == 300.0
    assert chosen(5.0, 100.0, 1e-300, 3.0) == 3.0 * evidence.MOST_CHANGE


@pytest.mark.parametrize("name", ["noise_factor", "ridge_now", "unit"])
@pytest.mark.parametrize("value", [0.0, math.inf, "5", math.nan, None, [1.0]])
def test_a_damaged_choice_is_refused(name, value):
    solver = learned(*samples(20)[:2])
    before = copy.deepcopy(solver.state_dict())
    with pytest.raises(ValueError, match=name):
        solver.load_state_dict(before | {name: value})
    with pytest.raises(ValueError, match="scale"):
        solver.load_state_dict(before | {"scale": before["scale"] * math.nan})
    assert not difference(leaves(solver.state_dict()), leaves(before))


def test_heads_that_chose_different_ridges_merge_as_if_one_had_learned_all():
    x, y, _ = samples(300)
    parts = [learned(x[:40], y[:40]), learned(x[40:], 5 * y[40:])]
    assert parts[0].ridge_now != parts[1].ridge_now
    delta = Delta.from_bytes(parts[1].delta_since().to_bytes())
    parts[0].merge(delta)
    one = RLS(ridge=1.0).bind(head())
    one.update(x[:40], y[:40])
    one.update(x[40:], 5 * y[40:])
    joint = with_ridge(one._read(), parts[0]._read().ridge, parts[0]._read().prior)
    torch.testing.assert_close(weights(parts[0].linear), joint.W, rtol=1e-8, atol=1e-8)
    assert parts[0].samples == 300


def test_what_is_unlearned_was_never_learned():
    x, y, _ = samples(120)
    solver = learned(x, y)
    solver.unlearn(x[100:], y[100:])
    other = RLS(ridge="evidence").bind(head())
    other.update(x[:100], y[:100])
    state = with_ridge(other._read(), solver._read().ridge, solver._read().prior)
    torch.testing.assert_close(weights(solver.linear), state.W, rtol=1e-7, atol=1e-7)


def test_outputs_of_their_own_choose_ridges_of_their_own():
    x, y, _ = samples(200)
    y = torch.stack([y[:, 0], torch.randn(200, dtype=torch.float64)], 1)
    y[::3, 1] = math.nan
    solver = learned(x, y, PerOutput(RLS(ridge="evidence")))
    ridges = [one.ridge_now for one in solver.solvers]
    assert ridges[1] > 10 * ridges[0]  # noise alone


# ---------------------------------------------------------------------- units


def batched(solver, x, y, weight=None, batch=10):
    for rows in torch.arange(len(x)).split(batch):
        solver.update(x[rows], y[rows], None if weight is None else weight[rows])
    return solver


@pytest.mark.parametrize("forgetting", [1.0, 0.95])
@pytest.mark.parametrize("batch", [1, 10])
@pytest.mark.parametrize("unit", [1e-6, 1e-3, 1e3, 1e6])
def test_the_unit_of_a_target_changes_no_prediction_of_another(unit, batch, forgetting):
    x, y, _ = samples(150)
    y[:, 1] = torch.randn(150, dtype=torch.float64)  # which nothing predicts
    make = partial(RLS, ridge="evidence", forgetting=forgetting)
    one, other = (batched(make().bind(head()), x, y * torch.tensor([1.0, u]), batch=batch) for u in (1.0, unit))
    (mean, std), (again, spread) = (solver.predict(x, return_std=True) for solver in (one, other))
    # Of the squares of a target of 1e-6, four digits are left beside those of the initial weights.
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-3 if unit < 1e-3 else 1e-9)
    close(again[:, 0], mean[:, 0])
    close(spread[:, 0], std[:, 0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("unit", [1e-12, 1e-9, 1e-6, 1e-3])
def test_small_features_lose_no_digits(unit, bias, dtype):
    """Against ridge regression with the ridge that was chosen."""
    unit = unit if dtype == torch.float64 else max(unit, 1e-9)
    x, y, _ = samples(200)
    linear = nn.Linear(K, M, bias=bias).double()
    start = join(linear)
    solver = batched(RLS(ridge="evidence", dtype=dtype).bind(linear), unit * x, y, batch=1)
    Phi = joined(unit * x) if bias else unit * x
    each = solver._read().ridge.double()
    truth = ridge_regression(Phi, y, each, solver._choice.scale.double() * start)
    with torch.no_grad():
        error = float((linear(unit * x) - Phi @ truth.T).abs().max() / y.abs().max())
    assert error < (1e-9 if dtype == torch.float64 else 1e-3)
    assert 0.01 < solver.ridge_now / unit**2 / learned(x, y).ridge_now < 100


def test_features_that_are_zero_at_first_start_when_they_come():
    x, y, _ = samples(100)
    x[:3] = 0
    linear = head()
    batched(RLS(ridge="evidence").bind(linear), 1e-10 * x, y, batch=1)
    other = head()
    batched(RLS(ridge="evidence").bind(other), x, y, batch=1)
    with torch.no_grad():
        assert float((linear(1e-10 * x) - other(x)).abs().max()) < 0.1


def test_a_head_that_starts_after_zeros_is_ridge_regression():
    """Also in its bias, which has learned before."""
    x, y, _ = samples(6)
    x[:3] = 0
    linear = head()
    start = weights(linear)
    solver = batched(RLS(ridge="evidence").bind(linear), 1e-3 * x, y, batch=1)
    assert solver.ridge_now < evidence.START
    truth = ridge_regression(joined(1e-3 * x), y, solver._read().ridge, start)
    torch.testing.assert_close(weights(linear), truth, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("bias", [True, False])
def test_a_head_starts_once(bias):
    """Not again where features that came one at a time left the curvature diagonal."""
    x = torch.tensor([1.0, 1.0, 0.01, 1.0], dtype=torch.float64).diag()
    y = torch.arange(4.0).double()[:, None]
    linear = nn.Linear(4, 1, bias=bias).double()
    start = join(linear)
    solver = batched(RLS(ridge="evidence").bind(linear), x, y, batch=1)
    Phi = joined(x) if bias else x
    truth = ridge_regression(Phi, y, solver._read().ridge, start)
    torch.testing.assert_close(join(linear), truth, rtol=1e-9, atol=1e-9)


def test_a_head_starts_with_the_first_row_that_counts():
    x, y, _ = samples(20)
    solver, other = (RLS(ridge="evidence").bind(head()) for _ in range(2))
    solver.update(x[:1], y[:1], torch.zeros(1))
    for one in (solver, other):
        one.update(1e-10 * x[1:], y[1:])
    torch.testing.assert_close(weights(solver.linear), weights(other.linear), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("batch", [1, 10])
def test_small_features_with_an_offset_keep_their_digits(batch):
    x, y, _ = samples(100, offset=1e4, unit=1e-7)
    linear = head()
    start = weights(linear)
    solver = batched(RLS(ridge="evidence").bind(linear), x, y, batch=batch)
    scale = solver._choice.scale
    truth = ridge_regression(joined(x - x.mean(0)), y, solver._read().ridge, scale * start)  # but for the bias
    with torch.no_grad():
        found = linear(x) - linear(x).mean(0)
    truth = (x - x.mean(0)) @ truth[:, :K].T
    assert float((found - truth).abs().max() / y.abs().max()) < 1e-3  # of the ridge of the bias


def test_a_refused_first_update_leaves_the_ridge_of_before():
    solver = RLS(ridge="evidence").bind(head())
    before = copy.deepcopy(solver.state_dict())
    with pytest.raises(ValueError, match="targets must be finite"):
        solver.update(torch.full((1, K), 1e-9), torch.full((1, M), math.nan))
    assert not difference(leaves(solver.state_dict()), leaves(before))


@pytest.mark.parametrize("unit", [1e-9, 1e-3, 1.0 / 200])
def test_weights_below_one_count_as_rows(unit):
    """Normalized sample weights, as of a table of 200 rows, change neither when the ridge is chosen nor the head."""
    x, y, _ = samples(200)
    weight = torch.rand(200, dtype=torch.float64)
    one, other = (batched(RLS(ridge="evidence").bind(head()), x, y, w) for w in (weight, unit * weight))
    assert one.ridge_now != evidence.START
    assert 0.5 < other.ridge_now / unit / one.ridge_now < 2  # both change by a factor of two, from another start
    with torch.no_grad():
        error = float((one.linear(x) - other.linear(x)).abs().max() / y.abs().max())
    assert error < 0.02


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e6])
@pytest.mark.parametrize("first", [0, 3, 30])
def test_a_delta_since_a_mark_survives_another_ridge_and_scale(first, unit):
    x, y, truth = samples(300, unit=unit)
    linear = head()
    with torch.no_grad():
        linear.weight.copy_(0.5 * truth)  # another scale of the prior is chosen later
    solver = RLS(ridge="evidence").bind(linear)
    if first:
        batched(solver, x[:first], y[:first], batch=3)
    mark, twin, then = solver.state_dict(), copy.deepcopy(solver), solver.ridge_now
    batched(solver, x[first:], y[first:])
    assert first or solver.ridge_now != then
    twin.merge(Delta.from_bytes(solver.delta_since(mark).to_bytes()))
    assert twin.samples == 300
    state, known = with_ridge(twin._read(), solver._read().ridge, solver._read().prior), solver._read().W
    torch.testing.assert_close(state.W / known, torch.ones_like(known), rtol=1e-6, atol=0)
    torch.testing.assert_close(state.energy, solver.objective(), rtol=1e-6, atol=0)
