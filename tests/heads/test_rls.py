"""RLS against the closed form, and what it promises about its state."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from reference import (
    continued,
    curvature,
    objective,
    ridge_left,
    ridge_regression,
    ridges,
    rls_step,
    weights,
    with_ones,
)
from sepsa import RLS
from sepsa.heads.backends.choose import force


@pytest.fixture(params=["numba", "torch"], autouse=True)
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


problems = st.fixed_dictionaries(
    {
        "k": st.integers(1, 12),
        "m": st.integers(1, 4),
        "bias": st.booleans(),
        "sizes": st.lists(st.integers(1, 20), min_size=1, max_size=6),
        "seed": st.integers(0, 10**6),
        "ridge": st.sampled_from([1e-2, 1.0, 30.0]),
        "weighted": st.booleans(),
    }
)


def draw(k, m, bias, sizes, seed, ridge, weighted, forgetting=1.0):
    rng = np.random.default_rng(seed)
    solver, linear = make(k, m, bias, seed=seed, ridge=ridge, forgetting=forgetting)
    X = [rng.normal(size=(n, k)) for n in sizes]
    Y = [rng.normal(size=(n, m)) for n in sizes]
    omega = [rng.uniform(0, 2, size=n) if weighted else np.ones(n) for n in sizes]
    return solver, linear, weights(linear), X, Y, omega


def learn(solver, x, y, w, weighted=True):
    solver.update(torch.as_tensor(x), torch.as_tensor(y), torch.as_tensor(w) if weighted else None)


@settings(max_examples=60, deadline=None)
@given(problem=problems)
def test_block_equals_loop_equals_ridge_regression(problem):
    solver, linear, prior, X, Y, omega = draw(**problem)
    loop, loop_linear, *_ = draw(**problem)
    for x, y, w in zip(X, Y, omega, strict=True):
        learn(solver, x, y, w, problem["weighted"])
        for i in range(len(x)):
            learn(loop, x[i : i + 1], y[i : i + 1], w[i : i + 1])
    Phi, Yall, weight = with_ones(np.vstack(X), problem["bias"]), np.vstack(Y), np.concatenate(omega)
    ridge = ridges(Phi.shape[1], problem["ridge"], problem["bias"])
    truth = ridge_regression(Phi, Yall, weight, ridge, prior)
    assert relative(weights(linear), truth) <= 1e-9
    assert relative(weights(loop_linear), truth) <= 1e-9
    for one in (solver, loop):
        assert relative(one.covariance(), np.linalg.inv(curvature(Phi, weight, ridge))) <= 1e-9
        np.testing.assert_allclose(
            one.objective(), objective(truth, Phi, Yall, weight, ridge, prior), rtol=1e-7, atol=1e-9
        )
        assert one.samples == pytest.approx(weight.sum())


@settings(max_examples=60, deadline=None)
@given(problem=problems, forgetting=st.sampled_from([0.5, 0.9, 0.99]))
def test_forgetting_keeps_the_ridge(problem, forgetting):
    problem["sizes"] = problem["sizes"] * 3
    solver, linear, prior, X, Y, omega = draw(**problem, forgetting=forgetting)
    for x, y, w in zip(X, Y, omega, strict=True):
        learn(solver, x, y, w, problem["weighted"])
    sizes = problem["sizes"]
    age = np.concatenate([np.full(n, len(sizes) - 1 - i) for i, n in enumerate(sizes)])
    Phi, Yall = with_ones(np.vstack(X), problem["bias"]), np.vstack(Y)
    weight = np.concatenate(omega) * forgetting**age
    ridge = ridges(Phi.shape[1], problem["ridge"], problem["bias"])
    left = ridge_left(ridge, forgetting, sizes)
    truth = ridge_regression(Phi, Yall, weight, left, prior)
    assert (left >= ridge / 2 * (1 - 1e-12)).all()
    np.testing.assert_allclose(solver.ridge_left, left, rtol=1e-12)
    assert relative(weights(linear), truth) <= 1e-8
    assert relative(solver.covariance(), np.linalg.inv(curvature(Phi, weight, left))) <= 1e-8
    np.testing.assert_allclose(
        solver.objective(), objective(truth, Phi, Yall, weight, left, prior), rtol=1e-6, atol=1e-8
    )


def test_one_sample_is_equations_17_and_18():
    solver, linear = make(5, 3, bias_ridge="ridge")
    rng = np.random.default_rng(0)
    B, alpha = np.eye(6), weights(linear).T
    for _ in range(20):
        x, y = rng.normal(size=(1, 5)), rng.normal(size=(1, 3))
        solver.update(torch.as_tensor(x), torch.as_tensor(y))
        B, alpha = rls_step(B, alpha, np.append(x, 1.0), y[0])
        assert relative(weights(linear).T, alpha) <= 1e-12
        assert relative(solver.covariance(), B) <= 1e-12


@pytest.mark.parametrize("n", [1, 2, 5, 30])
def test_an_update_of_any_size_gives_the_ridge_back_in_rotation(n):
    """A <- λA + diag q + ΦᵀΦ, where q is what the next three of seven coordinates lack of their ridge."""
    solver, linear = make(6, 2, ridge=3.0, forgetting=0.8, bias_ridge=0.5)
    assert solver.restored_per_update(n) == 3
    prior, ridge = weights(linear), ridges(7, 3.0, True, 0.5)
    rng = np.random.default_rng(1)
    batches = [(rng.normal(size=(n, 6)), rng.normal(size=(n, 2))) for _ in range(50)]
    for x, y in batches:
        solver.update(torch.as_tensor(x), torch.as_tensor(y))
    rows = [(with_ones(x, True), y) for x, y in batches]
    A, W = continued(np.diag(ridge), prior, ridge, ridge, prior, 0, 0.8, rows)
    assert relative(torch.linalg.inv(solver.covariance()), A) <= 1e-10
    assert relative(weights(linear), W) <= 1e-8


def test_recovers_the_truth():
    true = torch.randn(3, 7, dtype=torch.float64)
    solver, linear = make(6, 3, ridge=1e-8)
    features = torch.randn(200, 6, dtype=torch.float64)
    solver.update(features, features @ true[:, :6].T + true[:, 6])
    torch.testing.assert_close(torch.as_tensor(weights(linear)), true, rtol=1e-7, atol=1e-7)


def test_sequences_and_single_vectors_are_rows():
    a, la = make(4, 2)
    b, lb = make(4, 2)
    x, y = torch.randn(3, 5, 4), torch.randn(3, 5, 2)
    a.update(x, y)
    b.update(x.reshape(15, 4), y.reshape(15, 2))
    assert torch.equal(la.weight, lb.weight)
    a.update(x[0, 0], y[0, 0])
    b.update(x[0, :1], y[0, :1])
    assert torch.equal(la.weight, lb.weight)
    assert a.predict(x).shape == (3, 5, 2)
    assert a.predict(x[0, 0]).shape == (2,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("head", [torch.bfloat16, torch.float32, torch.float64])
def test_features_and_heads_of_any_floating_dtype(dtype, head):
    """A head in low precision learns as if it were exact: what its rounding loses is carried on."""
    solver, linear = make(5, 2, dtype=head)
    prior = weights(linear)
    X, Y = torch.randn(400, 5).to(dtype), torch.randn(400, 2).to(dtype)
    for x, y in zip(X, Y, strict=True):
        solver.update(x, y)
    Phi = with_ones(X.double().numpy(), True)
    truth = ridge_regression(Phi, Y.double().numpy(), np.ones(400), ridges(6, 1.0, True), prior)
    assert linear.weight.dtype == head
    eps = max(torch.finfo(head).eps, 1e-12)
    np.testing.assert_allclose(weights(linear), truth, rtol=eps, atol=eps)


def test_float32_arithmetic_is_an_option():
    solver, linear = make(8, 2, dtype=torch.float32)
    quick = RLS(dtype=torch.float32).bind(copy.deepcopy(linear))
    x, y = torch.randn(300, 8), torch.randn(300, 2)
    for i in range(0, 300, 3):
        solver.update(x[i : i + 3], y[i : i + 3])
        quick.update(x[i : i + 3], y[i : i + 3])
    assert quick.covariance().dtype == torch.float32
    torch.testing.assert_close(quick.linear.weight, linear.weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e4])
def test_float32_arithmetic_stands_large_features(scale):
    torch.manual_seed(0)
    solver = RLS(dtype=torch.float32).bind(nn.Linear(50, 2))
    for _ in range(100):
        features = scale * torch.relu(torch.randn(32, 8) @ torch.randn(8, 50))
        solver.update(features, torch.randn(32, 2))
    assert torch.isfinite(solver.covariance()).all()
    assert torch.isfinite(solver.linear.weight).all()


def test_weights_that_somebody_else_set_are_respected():
    solver, linear = make(4, 1, dtype=torch.float32)
    solver.update(torch.randn(9, 4), torch.randn(9, 1))
    linear.weight.data.zero_()
    linear.bias.data.fill_(2.0)
    solver.update(torch.zeros(1, 4), torch.full((1, 1), 2.0))  # agrees with the bias, so nothing moves
    torch.testing.assert_close(linear.weight, torch.zeros(1, 4), atol=1e-6, rtol=0)
    torch.testing.assert_close(linear.bias, torch.full((1,), 2.0), atol=1e-6, rtol=0)


# ---------------------------------------------------------------------- merge, unlearn, predict


@settings(max_examples=30, deadline=None)
@given(problem=problems, cut=st.integers(0, 6))
def test_merge_is_the_head_that_saw_both(problem, cut):
    both, linear, _, X, Y, omega = draw(**problem)
    left, left_linear, *_ = draw(**problem)
    right, *_ = draw(**problem)
    for i, (x, y, w) in enumerate(zip(X, Y, omega, strict=True)):
        learn(both, x, y, w)
        learn(left if i < cut else right, x, y, w)
    left.merge(right)
    assert relative(weights(left_linear), weights(linear)) <= 1e-8
    assert relative(left.covariance(), both.covariance()) <= 1e-8
    np.testing.assert_allclose(left.objective(), both.objective(), rtol=1e-6, atol=1e-7)
    assert left.samples == pytest.approx(both.samples)


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


@pytest.mark.parametrize("verb", ["unlearn", "merge"])
@pytest.mark.parametrize("scale", [10.0**k for k in range(-3, 10)])
def test_unlearn_and_merge_are_exact_or_refused_at_any_scale(verb, scale):
    """Against the head that learned the right samples and nothing else; at moderate scales nothing is refused."""
    rng = np.random.default_rng(0)
    small, large = rng.normal(size=(20, 5)), scale * rng.normal(size=(3, 5))
    y, z = rng.normal(size=(20, 2)), rng.normal(size=(3, 2))
    heads = [make(5, 2)[0] for _ in range(3)]
    one, other, truth = heads
    learn(one, small, y, np.ones(20))
    if verb == "unlearn":
        learn(one, large, z, np.ones(3))
        learn(truth, small, y, np.ones(20))
    else:
        learn(other, large, z, np.ones(3))
        learn(truth, np.vstack([small, large]), np.vstack([y, z]), np.ones(23))
    before = snapshot(one, one.linear)
    try:
        one.unlearn(torch.as_tensor(large), torch.as_tensor(z)) if verb == "unlearn" else one.merge(other)
    except ValueError:
        assert scale > 1e3
        assert_unchanged(one, one.linear, before)
        return
    assert relative(weights(one.linear), weights(truth.linear)) <= 1e-6
    assert relative(one.covariance(), truth.covariance()) <= 1e-6


def test_unlearn_refuses_what_was_never_learned():
    solver, linear = make(4, 1)
    x, y = torch.randn(10, 4, dtype=torch.float64), torch.randn(10, 1, dtype=torch.float64)
    solver.update(x, y)
    before = snapshot(solver, linear)
    with pytest.raises(ValueError, match="less curvature than the prior"):
        solver.unlearn(3 * x, y)
    with pytest.raises(ValueError, match="less curvature than the prior"):
        solver.unlearn(torch.randn(4, 4, dtype=torch.float64), y[:4])
    with pytest.raises(ValueError, match="remembers 10 samples"):
        solver.unlearn(torch.zeros(11, 4, dtype=torch.float64) + 0.0, torch.zeros(11, 1, dtype=torch.float64))
    with pytest.raises(ValueError, match="targets: removing these 3 samples would leave a sum of squared errors below"):
        solver.unlearn(x[:3], 9 - y[:3])
    with pytest.raises(ValueError, match="learned with these targets: unlearn samples with the targets"):
        solver.unlearn(x, -y)  # a sum of squared errors near 0, which is less than the ridge of the weights that remain
    assert_unchanged(solver, linear, before)
    solver.unlearn(x, y)  # everything: the prior remains
    np.testing.assert_allclose(weights(linear), weights(make(4, 1)[1]), atol=1e-10)


def test_merge_and_unlearn_need_a_whole_memory_and_one_prior():
    a, _ = make(3, 1, forgetting=0.9)
    b, _ = make(3, 1)
    with pytest.raises(ValueError, match=r"exact only at forgetting 1, got 0\.9"):
        a.merge(b)
    with pytest.raises(ValueError, match=r"exact only at forgetting 1, got 0\.9"):
        b.merge(a)
    with pytest.raises(ValueError, match="exact only at forgetting 1"):
        a.unlearn(torch.zeros(1, 3), torch.zeros(1, 1))
    with pytest.raises(ValueError, match="same prior"):
        b.merge(make(3, 1, seed=5)[0])
    with pytest.raises(ValueError, match=r"same prior, ridge 1 \(0\.0001 for the bias\)"):
        b.merge(make(3, 1, ridge=2.0)[0])
    with pytest.raises(ValueError, match="got ridge 1 and its own"):
        b.merge(make(3, 1, bias_ridge="ridge")[0])
    with pytest.raises(ValueError, match=r"shape \(1, 4\), got \(1, 5\)"):
        b.merge(make(4, 1)[0])


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


def test_deviation_before_learning_is_an_error():
    solver, _ = make(3, 1)
    with pytest.raises(ValueError, match="at least one update"):
        solver.predict(torch.zeros(1, 3), return_std=True)
    with pytest.raises(ValueError, match="sample needs at least one update"):
        solver.sample(torch.zeros(1, 3))


def test_with_the_noise_given_the_prior_predicts():
    solver, linear = make(3, 2, ridge=4.0, bias_ridge="ridge")
    x = torch.randn(5, 3, dtype=torch.float64)
    mean, std = solver.predict(x, return_std=True, noise=0.5)
    torch.testing.assert_close(mean, linear(x).detach())
    torch.testing.assert_close(std, (0.25 * (1 + (x.square().sum(1) + 1) / 4.0)).sqrt()[:, None].expand(-1, 2))
    with pytest.raises(ValueError, match="noise must be in"):
        solver.predict(x, return_std=True, noise=0.0)
    with pytest.raises(ValueError, match="noise must be in"):
        solver.sample(x, noise=-1.0)


@pytest.mark.parametrize(
    ("path", "options", "noise"),
    [  # every pair of two of them
        ("numba", {}, None),
        ("torch", {}, 0.5),
        ("torch", {"forgetting": 0.95}, None),
        ("numba", {"forgetting": 0.95}, 0.5),
        ("numba", {"ridge": "auto", "forgetting": "auto"}, None),
        ("torch", {"ridge": "auto", "forgetting": "auto"}, 0.5),
    ],
    indirect=["path"],
)
def test_samples_have_the_mean_and_covariance_of_the_weights(path, options, noise):
    solver, linear = make(4, 2, **options)
    for x, y in stream(k=4, m=2):
        solver.update(x, y * torch.tensor([1.0, 5.0]))
    at = torch.randn(3, 4, dtype=torch.float64)
    g = torch.Generator().manual_seed(0)
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


def test_a_sample_is_as_random_as_its_generator():
    solver, _ = make(3, 1)
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    solver.update(x, x[..., :1])
    one, two = (solver.sample(x, generator=torch.Generator().manual_seed(7)) for _ in range(2))
    assert one.shape == (2, 5, 1)
    assert torch.equal(one, two)
    assert not torch.equal(one, solver.sample(x))


# ---------------------------------------------------------------------- state


def snapshot(solver, linear):
    return copy.deepcopy(solver.state_dict()), weights(linear)


def assert_unchanged(solver, linear, before):
    state, W = before
    now = solver.state_dict()
    assert now.keys() == state.keys()
    for key, value in state.items():
        assert torch.equal(now[key], value) if isinstance(value, torch.Tensor) else now[key] == value, key
    assert np.array_equal(weights(linear), W)


def stream(n_batches=20, k=4, m=2, seed=9):
    g = torch.Generator().manual_seed(seed)
    for i in range(n_batches):
        n = (1, 7, 3)[i % 3]
        yield torch.randn(n, k, generator=g), torch.randn(n, m, generator=g)


@pytest.mark.parametrize("forgetting", [1.0, 0.9])
@pytest.mark.parametrize("how", ["state_dict", "torch.save", "deepcopy", "pickle"])
def test_a_copied_state_continues_bit_for_bit(how, forgetting):
    solver, linear = make(4, 2, dtype=torch.float32, forgetting=forgetting)
    batches = list(stream())
    for x, y in batches[:10]:
        solver.update(x, y)
    if how == "deepcopy":
        twin = copy.deepcopy(solver)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(solver))
    else:
        state = solver.state_dict()
        if how == "torch.save":
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
        twin = RLS().bind(copy.deepcopy(linear))
        twin.load_state_dict(state)
    for x, y in batches[10:]:
        solver.update(x, y)
        twin.update(x, y)
    assert twin.linear is not linear
    assert_unchanged(twin, twin.linear, snapshot(solver, linear))


def test_looking_changes_nothing():
    solver, linear = make(4, 2, dtype=torch.float32)
    for x, y in stream():
        solver.update(x, y)
        before = snapshot(solver, linear)
        solver.predict(x, return_std=True)
        solver.sample(x)
        solver.covariance()
        repr(solver)
        assert_unchanged(solver, linear, before)


def test_the_curvature_follows_the_head():
    solver, linear = make(4, 2, dtype=torch.float32)
    batches = list(stream())
    for x, y in batches[:5]:
        solver.update(x, y)
    twin, twin_linear = copy.deepcopy((solver, linear))
    assert twin.linear is twin_linear
    twin_linear.double()
    twin_linear.float()  # another memory, the same numbers
    assert twin.to("cpu") is twin
    for x, y in batches[5:]:
        solver.update(x, y)
        twin.update(x, y)
    assert_unchanged(twin, twin_linear, snapshot(solver, linear))


# ---------------------------------------------------------------------- bad input

x, y = torch.zeros(3, 4), torch.zeros(3, 2)
nan, inf = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("features", "targets", "weight", "error", "words"),
    [
        (x.index_fill(0, torch.tensor([1]), nan), y, None, ValueError, "features must be finite, got nan"),
        (x.index_fill(0, torch.tensor([1]), inf), y, None, ValueError, "features must be finite, got inf"),
        (x, y.index_fill(1, torch.tensor([0]), nan), None, ValueError, r"targets must be finite, got nan \(3 of 6"),
        (x, y.index_fill(1, torch.tensor([0]), -inf), None, ValueError, "targets must be finite, got -inf"),
        (x[0] * nan, y[0], None, ValueError, "features must be finite"),
        (x.double() + 1e200, y, None, ValueError, r"small enough to square, got 1e\+200"),
        (torch.zeros(3, 5), y, None, ValueError, r"shape \(..., 4\), the head's in_features, got \(3, 5\)"),
        (torch.zeros(()), y, None, ValueError, r"shape \(..., 4\)"),
        (torch.zeros(0, 4), torch.zeros(0, 2), None, ValueError, "at least one sample"),
        (x, torch.zeros(3, 3), None, ValueError, r"targets must have shape \(3, 2\) .* got \(3, 3\)"),
        (x, torch.zeros(2, 2), None, ValueError, r"targets must have shape \(3, 2\)"),
        (x, torch.zeros(3), None, ValueError, r"unsqueeze\(-1\)"),
        (x, torch.zeros(3, dtype=torch.long), None, TypeError, r"one_hot\(targets, 2\).float\(\)"),
        (x, y.long(), None, TypeError, r"targets must be floating point, got torch.int64: call targets.float\(\)"),
        (x.long(), y, None, TypeError, "features must be floating point, got torch.int64"),
        (x + 0j, y, None, TypeError, "features must be floating point, got torch.complex64"),
        (x.numpy(), y, None, TypeError, r"features must be a torch.Tensor, got ndarray"),
        (x, y.tolist(), None, TypeError, "targets must be a torch.Tensor, got list"),
        (x, y, torch.ones(2), ValueError, r"sample_weight must have shape \(3,\)"),
        (x, y, torch.tensor([1.0, -1, 1]), ValueError, "sample_weight must be finite and at least 0, got -1"),
        (x, y, torch.tensor([1.0, nan, 1]), ValueError, "sample_weight must be finite and at least 0, got nan"),
        (x.to("meta"), y, None, ValueError, "features must be on cpu, where the head is, got meta"),
    ],
)
@pytest.mark.parametrize("forgetting", [1.0, 0.9])
def test_bad_samples_change_nothing(features, targets, weight, error, words, forgetting):
    solver, linear = make(4, 2, dtype=torch.float32, forgetting=forgetting)
    for a, b in stream():
        solver.update(a, b)
    before = snapshot(solver, linear)
    with pytest.raises(error, match=words):
        solver.update(features, targets, weight)
    if forgetting == 1.0:
        with pytest.raises(error, match=words):
            solver.unlearn(features, targets, weight)
    assert_unchanged(solver, linear, before)


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_a_head_that_somebody_broke_is_named(part):
    solver, linear = make(4, 2)
    getattr(linear, part).data.fill_(nan)
    with pytest.raises(ValueError, match=f"the head's {part} must be finite, got nan"):
        solver.update(x, y)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"ridge": 0.0}, ValueError, r"ridge must be in \(0, inf\), got 0"),
        ({"ridge": nan}, ValueError, "ridge must be in"),
        ({"ridge": inf}, ValueError, "ridge must be in"),
        ({"ridge": "1"}, TypeError, "ridge must be a number"),
        ({"bias_ridge": 0.0}, ValueError, r"bias_ridge must be in \(0, inf\), got 0"),
        ({"bias_ridge": "auto"}, ValueError, r"bias_ridge must be a number in \(0, inf\) or 'ridge', got 'auto'"),
        ({"bias_ridge": True}, TypeError, "bias_ridge must be a number"),
        ({"forgetting": 1.2}, ValueError, r"forgetting must be in \(0, 1\], got 1.2"),
        ({"forgetting": 0.0}, ValueError, "forgetting must be in"),
        ({"forgetting": True}, TypeError, "forgetting must be a number"),
        ({"dtype": torch.float16}, ValueError, "dtype must be torch.float64 or torch.float32, got torch.float16"),
    ],
)
def test_bad_hyperparameters(options, error, words):
    with pytest.raises(error, match=words):
        RLS(**options)


def test_bad_heads():
    with pytest.raises(TypeError, match=r"head must be an nn\.Linear, got Conv2d"):
        RLS().bind(nn.Conv2d(1, 1, 1))
    with pytest.raises(ValueError, match="LazyLinear"):
        RLS().bind(nn.LazyLinear(2))
    with pytest.raises(ValueError, match="parametrization"):
        RLS().bind(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    with pytest.raises(RuntimeError, match="is not bound to a head"):
        RLS().update(x, y)
    solver, linear = make(4, 2)
    assert solver.bind(linear) is solver
    with pytest.raises(ValueError, match="already bound to another"):
        solver.bind(nn.Linear(4, 2))


def test_a_checkpoint_of_another_shape_is_refused_whole():
    solver, linear = make(4, 2, dtype=torch.float32)
    for a, b in stream():
        solver.update(a, b)
    before = snapshot(solver, linear)
    state = solver.state_dict()
    for bad, words in [
        (make(5, 2)[0].state_dict(), "another size"),
        (make(4, 3)[0].state_dict(), "another size"),
        (make(4, 2, bias=False)[0].state_dict(), "another size"),
        ({k: v for k, v in state.items() if k != "prior"}, r"missing \['prior'\]"),
        (state | {"surprise": 1}, r"unexpected \['surprise'\]"),
        (state | {"prior": state["prior"] * nan}, "the checkpoint is damaged"),
        (state | {"prior": 1.0}, "got float"),
        (state | {"forgetting": 2.0}, r"forgetting must be in \(0, 1\]"),
    ]:
        with pytest.raises(ValueError, match=words):
            solver.load_state_dict(bad)
    assert_unchanged(solver, linear, before)


def test_a_state_loads_after_forgetting_was_set_to_one():
    solver, linear = make(6, 2, forgetting=0.8)
    solver.update(torch.randn(4, 6), torch.randn(4, 2))
    solver.forgetting = 1.0
    again = RLS().bind(copy.deepcopy(linear))
    again.load_state_dict(solver.state_dict())
    assert torch.equal(again.ridge_left, solver.ridge_left)
    assert again.ridge_left.min() < 1.0


@pytest.mark.parametrize("bias", [True, False])
def test_a_raised_ridge_is_that_of_a_head_that_had_it_from_the_start(bias):
    """At forgetting 1 an RLS is ridge regression about the prior, whenever the ridge came."""
    torch.manual_seed(0)
    start = nn.Linear(5, 2, bias=bias, dtype=torch.float64)
    x, y = torch.randn(40, 5, dtype=torch.float64), torch.randn(40, 2, dtype=torch.float64)
    raised, known = (RLS(ridge=r).bind(copy.deepcopy(start)) for r in (1.0, 7.0))
    early = RLS(ridge=1.0).bind(copy.deepcopy(start))
    early.raise_ridge(7.0)
    for head in (raised, known, early):
        head.update(x[:25], y[:25])
    raised.raise_ridge(7.0)
    again = RLS().bind(copy.deepcopy(raised.linear))
    again.load_state_dict(raised.state_dict())
    heads = raised, known, early, again
    for head in heads:
        head.update(x[25:], y[25:])
    for head in heads:
        torch.testing.assert_close(head.linear.weight, known.linear.weight, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(head.objective(), known.objective(), rtol=1e-9, atol=1e-12)
        assert (head.steps, head.samples, head.ridge) == (2, 40.0, 7.0)
    with pytest.raises(ValueError, match="at least the present one, 7, got 3"):
        raised.raise_ridge(3.0)
