"""RLS against the closed form, and what it promises about its state."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from reference import curvature, objective, ridge_left, ridge_regression, ridges, weights, with_ones
from sepsa import RLS
from sepsa.heads.run.choose import force
from sepsa.testing import difference, snapshot


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def path(request):
    """Every test here runs on both backends: a CPU with small p would only ever see the compiled one."""
    with force("torch" if request.param == "torch" else None):
        yield request.param


def make(k, m, bias=True, dtype=torch.float64, seed=0, **options):
    torch.manual_seed(seed)
    linear = nn.Linear(k, m, bias=bias, dtype=dtype)
    return RLS(**options).bind(linear), linear


def relative(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-300))


problems = st.fixed_dictionaries({
    "k": st.integers(1, 12), "m": st.integers(1, 4), "bias": st.booleans(), "seed": st.integers(0, 10**6),
    "sizes": st.lists(st.integers(1, 20), min_size=1, max_size=6), "ridge": st.sampled_from([1e-2, 1.0, 30.0]),
    "weighted": st.booleans(),
})  # fmt: skip


def draw(k, m, bias, sizes, seed, ridge, weighted, forgetting=1.0):
    rng = np.random.default_rng(seed)
    solver, linear = make(k, m, bias, seed=seed, ridge=ridge, forgetting=forgetting)
    X = [rng.normal(size=(n, k)) for n in sizes]
    Y = [rng.normal(size=(n, m)) for n in sizes]
    omega = [rng.uniform(0, 2, size=n) if weighted else np.ones(n) for n in sizes]
    return solver, linear, weights(linear), X, Y, omega


def learn(solver, x, y, w, weighted=True):
    solver.update(torch.as_tensor(x), torch.as_tensor(y), torch.as_tensor(w) if weighted else None)


def assert_ridge_regression(solver, X, Y, weight, ridge, prior, close):
    Phi, Y = with_ones(np.vstack(X), solver.linear.bias is not None), np.vstack(Y)
    truth = ridge_regression(Phi, Y, weight, ridge, prior)
    assert relative(weights(solver.linear), truth) <= close
    assert relative(solver.covariance(), np.linalg.inv(curvature(Phi, weight, ridge))) <= close
    least = objective(truth, Phi, Y, weight, ridge, prior)
    np.testing.assert_allclose(solver.objective(), least, rtol=100 * close, atol=close)
    assert solver.samples == pytest.approx(weight.sum())


@settings(max_examples=30, deadline=None)
@given(problem=problems)
def test_block_equals_loop_equals_ridge_regression(problem):
    solver, _, prior, X, Y, omega = draw(**problem)
    loop, *_ = draw(**problem)
    for x, y, w in zip(X, Y, omega, strict=True):
        learn(solver, x, y, w, problem["weighted"])
        for i in range(len(x)):
            learn(loop, x[i : i + 1], y[i : i + 1], w[i : i + 1])
    ridge = ridges(prior.shape[1], problem["ridge"], problem["bias"])
    for one in (solver, loop):
        assert_ridge_regression(one, X, Y, np.concatenate(omega), ridge, prior, close=1e-9)


@settings(max_examples=30, deadline=None)
@given(problem=problems, forgetting=st.sampled_from([0.5, 0.9, 0.99]))
def test_forgetting_keeps_the_ridge(problem, forgetting):
    problem["sizes"] = problem["sizes"] * 3
    solver, _, prior, X, Y, omega = draw(**problem, forgetting=forgetting)
    for x, y, w in zip(X, Y, omega, strict=True):
        learn(solver, x, y, w, problem["weighted"])
    sizes = problem["sizes"]
    age = np.concatenate([np.full(n, len(sizes) - 1 - i) for i, n in enumerate(sizes)])
    ridge = ridges(prior.shape[1], problem["ridge"], problem["bias"])
    left = ridge_left(ridge, forgetting, sizes)
    assert (left >= ridge / 2 * (1 - 1e-12)).all()
    np.testing.assert_allclose(solver.ridge_left, left, rtol=1e-12)
    assert_ridge_regression(solver, X, Y, np.concatenate(omega) * forgetting**age, left, prior, close=1e-8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("head", [torch.bfloat16, torch.float32, torch.float64])
def test_features_and_heads_of_any_floating_dtype(dtype, head):
    """A head in low precision learns as if it were exact: what its rounding loses is carried on."""
    solver, linear = make(5, 2, dtype=head)
    prior = weights(linear)
    X, Y = torch.randn(120, 5).to(dtype), torch.randn(120, 2).to(dtype)
    for x, y in zip(X, Y, strict=True):
        solver.update(x, y)
    Phi = with_ones(X.double().numpy(), True)
    truth = ridge_regression(Phi, Y.double().numpy(), np.ones(120), ridges(6, 1.0, True), prior)
    assert linear.weight.dtype == head
    eps = max(torch.finfo(head).eps, 1e-12)
    np.testing.assert_allclose(weights(linear), truth, rtol=eps, atol=eps)


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e4])
def test_float32_arithmetic_stands_large_features(scale):
    """Relative to a head in float64; a route that squares such rows loses all digits, so the bounds are wide."""
    torch.manual_seed(0)
    linear = nn.Linear(50, 2)
    narrow, wide = RLS(dtype=torch.float32).bind(linear), RLS().bind(copy.deepcopy(linear))
    for _ in range(30):
        features, targets = scale * torch.relu(torch.randn(32, 8) @ torch.randn(8, 50)), torch.randn(32, 2)
        narrow.update(features, targets)
        wide.update(features, targets)
    assert relative(narrow.covariance(), wide.covariance()) <= 1e-3
    assert relative(narrow.predict(features), wide.predict(features)) <= 0.05


def test_weights_that_somebody_else_set_are_respected():
    solver, linear = make(4, 1, dtype=torch.float32)
    solver.update(torch.randn(9, 4), torch.randn(9, 1))
    linear.weight.data.zero_()
    linear.bias.data.fill_(2.0)
    solver.update(torch.zeros(1, 4), torch.full((1, 1), 2.0))  # agrees with the bias, so nothing moves
    torch.testing.assert_close(linear.weight, torch.zeros(1, 4), atol=1e-6, rtol=0)
    torch.testing.assert_close(linear.bias, torch.full((1,), 2.0), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 2), (7, 3), (2, 5, 1)])
def test_loss_and_gradient_are_those_of_torch(shape, dtype):
    outputs, targets = torch.randn(shape, dtype=dtype, requires_grad=True), torch.randn(shape, dtype=dtype)
    found, expected = (
        (loss, *torch.autograd.grad(loss, outputs))
        for loss in (RLS.loss(outputs, targets), nn.functional.mse_loss(outputs, targets))
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("options", [{}, {"forgetting": 0.9}, {"ridge": "evidence"}])
def test_updates_and_captured_updates_follow_each_other_at_once(options):
    """Neither asks for the state, a checkpoint or a copy between them."""
    (one, linear), (two, other) = make(4, 2, **options), make(4, 2, **options)
    for step in range(12):
        x, y = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
        if step % 3:
            one.prepare_capture()
            assert one.update_captured(x, y)
        else:
            one.update(x, y)
        two.update(x, y)
    torch.testing.assert_close(linear.weight, other.weight, rtol=1e-7, atol=1e-9)
    assert one.steps == two.steps == 12


# ---------------------------------------------------------------------- merge, unlearn, predict


@settings(max_examples=30, deadline=None)
@given(problem=problems, which=st.integers(0, 5))
@example(  # few rows, which the ridge of the bias makes large and nearly parallel, and nothing else
    problem={"k": 8, "m": 1, "bias": True, "sizes": [2], "seed": 0, "ridge": 30.0, "weighted": False}, which=0
)
def test_unlearn_is_never_having_learned(problem, which):
    all_, linear, _, X, Y, omega = draw(**problem)
    rest, rest_linear, *_ = draw(**problem)
    which %= len(X)
    for i, (x, y, w) in enumerate(zip(X, Y, omega, strict=True)):
        learn(all_, x, y, w)
        if i != which:
            learn(rest, x, y, w)
    all_.unlearn(torch.as_tensor(X[which]), torch.as_tensor(Y[which]), torch.as_tensor(omega[which]))
    np.testing.assert_allclose(weights(linear), weights(rest_linear), rtol=1e-6, atol=1e-8)
    assert relative(all_.covariance(), rest.covariance()) <= 1e-8
    np.testing.assert_allclose(all_.objective(), rest.objective(), rtol=1e-5, atol=1e-6)


@pytest.mark.many
@pytest.mark.parametrize("verb", ["unlearn", "merge"])
@pytest.mark.parametrize("scale", [10.0**k for k in range(-3, 10)])
def test_unlearn_and_merge_are_exact_or_refused_at_any_scale(verb, scale):
    """Against the head that learned the right samples and nothing else; at moderate scales nothing is refused."""
    rng = np.random.default_rng(0)
    small, large = rng.normal(size=(20, 5)), scale * rng.normal(size=(3, 5))
    y, z = rng.normal(size=(20, 2)), rng.normal(size=(3, 2))
    one, other, truth = (make(5, 2)[0] for _ in range(3))
    learn(one, small, y, np.ones(20))
    if verb == "unlearn":
        learn(one, large, z, np.ones(3))
        learn(truth, small, y, np.ones(20))
    else:
        learn(other, large, z, np.ones(3))
        learn(truth, np.vstack([small, large]), np.vstack([y, z]), np.ones(23))
    before = snapshot(one)
    try:
        one.unlearn(torch.as_tensor(large), torch.as_tensor(z)) if verb == "unlearn" else one.merge(other)
    except ValueError:
        assert scale > 1e3
        assert not difference(before, snapshot(one))
        return
    assert relative(weights(one.linear), weights(truth.linear)) <= 1e-6
    assert relative(one.covariance(), truth.covariance()) <= 1e-6


def test_unlearn_refuses_what_was_never_learned():
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(10, k, dtype=torch.float64, generator=g) for k in (4, 1))
    zeros = torch.zeros(11, 4, dtype=torch.float64)  # which leave the curvature of a head without bias as it is
    for bias, features, targets, words in (
        (True, 3 * x, y, "less curvature than the prior"),
        (True, x[:4].flip(1), y[:4], "less curvature than the prior"),
        (False, zeros, zeros[:, :1], "remembers 10 samples"),
        (True, x[:3], 9 - y[:3], "targets: removing these 3 samples would leave a sum of squared errors below"),
        # A sum of squared errors near 0, which is less than the ridge of the weights that remain.
        (True, x, -y, "learned with these targets: unlearn samples with the targets"),
    ):
        solver, linear = make(4, 1, bias=bias)
        prior = weights(linear)
        solver.update(x, y)
        before = snapshot(solver)
        with pytest.raises(ValueError, match=words):
            solver.unlearn(features, targets)
        assert not difference(before, snapshot(solver))
        solver.unlearn(x, y)  # everything: the prior remains
        np.testing.assert_allclose(weights(linear), prior, atol=1e-10)
    with pytest.raises(ValueError, match="exact only at forgetting 1"):
        make(3, 1, forgetting=0.9)[0].unlearn(torch.zeros(1, 3), torch.zeros(1, 1))


@pytest.mark.parametrize("options", [{}, {"ridge": 1e-9}, {"ridge": "evidence"}, {"dtype": torch.float32}])
def test_unlearning_everything_leaves_the_prior(options):
    """However many samples there were, beside which the ridge is rounding."""
    solver, linear = make(4, 2, **options)
    prior = weights(linear)
    x, y = torch.randn(100_000, 4, dtype=torch.float64), torch.randn(100_000, 2, dtype=torch.float64)
    solver.update(x, y + 3)
    solver.unlearn(x, y + 3)
    np.testing.assert_array_equal(weights(linear) - prior * np.float64(solver._choice.scale), 0)
    assert solver.samples == 0
    assert float(solver.objective().abs().max()) == 0


def test_predictive_deviation_is_calibrated():
    torch.manual_seed(3)
    true = torch.randn(2, 8, dtype=torch.float64)
    noise = torch.tensor([0.1, 2.0], dtype=torch.float64)
    solver, _ = make(8, 2, bias=False, ridge=1e-3)
    x = torch.randn(40, 8, dtype=torch.float64)
    solver.update(x, x @ true.T + noise * torch.randn(40, 2, dtype=torch.float64))
    x = torch.randn(20000, 8, dtype=torch.float64)
    mean, std = solver.predict(x, return_std=True)
    z = (x @ true.T + noise * torch.randn(20000, 2, dtype=torch.float64) - mean) / std
    assert ((z.std(0) > 0.8) & (z.std(0) < 1.25)).all()  # 40 samples tell the noise to about 11 %
    near, far = solver.predict(torch.stack([torch.zeros(8), torch.full((8,), 10.0)]).double(), return_std=True).std
    assert (far > near).all()


def test_with_the_noise_given_the_prior_predicts():
    solver, linear = make(3, 2, ridge=4.0, bias_ridge="ridge")
    x = torch.randn(5, 3, dtype=torch.float64)
    mean, std = solver.predict(x, return_std=True, noise=0.5)
    torch.testing.assert_close(mean, linear(x).detach())
    torch.testing.assert_close(std, (0.25 * (1 + (x.square().sum(1) + 1) / 4.0)).sqrt()[:, None].expand(-1, 2))
    for noise, words in ((None, "needs at least one update"), (0.0, "noise must be in"), (-1.0, "noise must be in")):
        with pytest.raises(ValueError, match=words):
            solver.predict(x, return_std=True, noise=noise)
        with pytest.raises(ValueError, match=words):
            solver.sample(x, noise=noise)
    solver.update(x, x[:, :2])
    one, two = (solver.sample(x.reshape(5, 1, 3), generator=torch.Generator().manual_seed(7)) for _ in range(2))
    assert one.shape == (5, 1, 2)
    assert torch.equal(one, two)
    assert not torch.equal(one, solver.sample(x.reshape(5, 1, 3)))


@pytest.mark.parametrize(
    ("path", "options", "noise"),
    [  # every pair of two of them
        ("compiled", {}, None),
        ("torch", {}, 0.5),
        ("torch", {"forgetting": 0.95}, None),
        ("compiled", {"forgetting": 0.95}, 0.5),
        ("compiled", {"ridge": "evidence"}, None),
        ("torch", {"ridge": "evidence"}, 0.5),
    ],
    indirect=["path"],
)
def test_samples_have_the_mean_and_covariance_of_the_weights(path, options, noise):
    solver, linear = make(4, 2, **options)
    g = torch.Generator().manual_seed(9)
    for n in (1, 7, 3) * 7:
        x = torch.randn(n, 4, generator=g).cumsum(1) * 3  # correlated, so that TᵀT and TTᵀ are far apart
        solver.update(x, torch.randn(n, 2, generator=g) * torch.tensor([1.0, 5.0]))
    at = torch.randn(3, 4, dtype=torch.float64)
    drawn = torch.stack([solver.sample(at, noise=noise, generator=g) for _ in range(1000)])  # (draws, rows, outputs)
    Phi = torch.tensor(with_ones(at.numpy(), bias=True))
    variance = solver.objective() / solver.samples if noise is None else torch.full((2,), noise**2)
    for j in range(2):
        covariance = variance[j] * Phi @ solver.covariance() @ Phi.T  # one draw of weights serves all rows of a call
        unit = torch.linalg.cholesky(covariance.double())
        z = torch.linalg.solve_triangular(unit, (drawn[..., j] - linear(at)[:, j]).detach().T, upper=False)
        assert z.mean(1).abs().max() < 4.5 / 1000**0.5
        torch.testing.assert_close(z @ z.T / 1000, torch.eye(3).double(), atol=0.2, rtol=0)
    apart = torch.corrcoef(drawn[:, 0].T)[0, 1]
    assert abs(apart) < 4.5 / 1000**0.5  # outputs are drawn independently


def test_a_state_loads_after_forgetting_was_set_to_one():
    solver, linear = make(6, 2, forgetting=0.8)
    solver.update(torch.randn(4, 6), torch.randn(4, 2))
    solver.forgetting = 1.0
    again = RLS().bind(copy.deepcopy(linear))
    again.load_state_dict(solver.state_dict())
    assert torch.equal(again.ridge_left, solver.ridge_left)
    assert again.ridge_left.min() < 1.0
