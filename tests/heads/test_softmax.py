"""SoftmaxNewton against its equations spelled out, against the true optimum, and what it promises about its state."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot

from reference import Dense, ridge_left, ridges, weights, with_ones
from sepsa import SoftmaxNewton
from sepsa.heads.cross_entropy import math as cross_entropy_math
from sepsa.heads.run.choose import force
from sepsa.testing import difference, snapshot


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def path(request):
    """Every test here runs on both backends, as in test_rls.py."""
    with force("torch" if request.param == "torch" else None):
        yield request.param


by_torch = pytest.mark.parametrize("path", ["torch"], indirect=True)


def make(k, K, bias=True, dtype=torch.float64, seed=0, **options):
    torch.manual_seed(seed)
    linear = nn.Linear(k, K, bias=bias, dtype=dtype)
    return SoftmaxNewton(**options).bind(linear), linear


def samples(n, k, K, seed=0, sharpness=2.0):
    """Features, and labels drawn from a true head."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, k, generator=generator, dtype=torch.float64)
    truth = sharpness * torch.randn(max(K, 2), k, generator=generator, dtype=torch.float64)
    y = torch.multinomial((x @ truth.T).softmax(1), 1, generator=generator)[:, 0]
    return x, y


# ---------------------------------------------------------------------- the mathematics


@settings(max_examples=100, deadline=None)
@given(
    k=st.integers(1, 6), K=st.integers(1, 5), bias=st.booleans(), weighted=st.booleans(), seed=st.integers(0, 10**6),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8), scale=st.sampled_from([0.1, 1.0, 30.0]),
    options=st.fixed_dictionaries({
        "ridge": st.sampled_from([1e-3, 1.0, 50.0]), "forgetting": st.sampled_from([1.0, 0.99, 0.5]),
        "label_smoothing": st.sampled_from([0.0, 0.2]),
    }),
)  # fmt: skip
def test_updates_equal_the_equations_spelled_out(k, K, bias, weighted, seed, sizes, scale, options):
    rng = np.random.default_rng(seed)
    C = max(K, 2)
    options = options | {"class_weight": rng.uniform(0.1, 3, C).tolist() if weighted else None}
    solver, linear = make(k, K, bias, seed=seed, **options)
    dense = Dense(weights(linear), **options, bias=bias)
    for n in sizes:
        x = scale * rng.normal(size=(n, k))
        t = rng.dirichlet(np.full(C, 0.3), size=n)
        omega = rng.uniform(0, 2, n) if weighted else np.ones(n)
        solver.update(torch.tensor(x), torch.tensor(t[:, C - K :]), torch.tensor(omega) if weighted else None)
        dense.update(with_ones(x, bias), t, omega)
        np.testing.assert_allclose(weights(linear), dense.W, rtol=1e-7, atol=1e-8)
    B = solver.covariance().numpy()
    np.testing.assert_allclose(B @ dense.A, np.eye(len(B)), atol=1e-6)
    assert solver.steps == len(sizes)
    assert solver.samples == pytest.approx(dense.seen)


@pytest.mark.parametrize("path", ["compiled"], indirect=True)
@settings(max_examples=100, deadline=None)
@given(
    k=st.integers(1, 12), K=st.integers(1, 5), bias=st.booleans(), labels=st.booleans(), seed=st.integers(0, 10**6),
    dtype=st.sampled_from([torch.float32, torch.float64]), wide=st.booleans(), weighted=st.booleans(),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=6), ridge=st.sampled_from([1e-2, 1.0, 30.0]),
    forgetting=st.sampled_from([1.0, 0.95, 0.5]), smoothing=st.sampled_from([0.0, 0.2]),
)  # fmt: skip
def test_compiled_updates_are_those_of_torch(
    k, K, bias, labels, dtype, wide, weighted, sizes, seed, ridge, forgetting, smoothing
):
    rng, C = np.random.default_rng(seed), max(K, 2)
    options = {"ridge": ridge, "forgetting": forgetting, "label_smoothing": smoothing}
    options["class_weight"] = rng.uniform(0.1, 3, C).tolist() if weighted else None
    compiled, linear = make(k, K, bias, dtype, seed, **options)
    by_torch, other = make(k, K, bias, dtype, seed, **options)
    for n in sizes:
        x = torch.tensor(3 * rng.normal(size=(k, n)), dtype=torch.float64 if wide else dtype).T
        y = (
            torch.tensor(rng.integers(0, C, n))
            if labels
            else torch.tensor(rng.dirichlet(np.ones(C), size=n)[:, C - K :])
        )
        omega = torch.tensor(rng.uniform(0, 2, n), dtype=dtype) if weighted else None
        compiled.update(x, y, omega)
        with force("torch"):
            by_torch.update(x, y, omega)
    assert (compiled._backend.name, by_torch._backend.name) == ("compiled", "torch")
    tolerance = 1e-8 if dtype is torch.float64 else 1e-5
    torch.testing.assert_close(linear.weight, other.weight, rtol=tolerance, atol=tolerance)
    one, two = compiled.state_dict(), by_torch.state_dict()
    for name in ("W", "shares", "ridge_left", "counters"):
        torch.testing.assert_close(one[name], two[name], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(compiled.covariance(), by_torch.covariance(), rtol=1e-7, atol=1e-10)


@by_torch
@pytest.mark.parametrize("chunk", [2**25, 100])
@pytest.mark.parametrize("forgetting", [1.0, 0.9])
@pytest.mark.parametrize("labels", [True, False])
def test_large_blocks_equal_the_equations_spelled_out(labels, forgetting, chunk, monkeypatch):
    monkeypatch.setattr(cross_entropy_math, "CHUNK", chunk)  # logits at a time
    k, K, rng = 70, 4, np.random.default_rng(0)
    options = {"ridge": 3.0, "forgetting": forgetting, "label_smoothing": 0.1, "class_weight": [1.0, 2.0, 0.5, 1.5]}
    solver, linear = make(k, K, **options)
    dense = Dense(weights(linear), **options, bias=True)
    for n in (40, 200, 40, 5, 40, 40, 40, 40, 40, 300):  # the block of 5 is learned by T, and those up to the eighth
        x, omega = rng.normal(size=(n, k)), rng.uniform(0, 2, n)
        y = rng.integers(0, K, n)
        t = np.eye(K)[y] if labels else rng.dirichlet(np.full(K, 0.3), size=n)
        targets = torch.tensor(y if labels else t)
        solver.update(torch.tensor(x), targets, torch.tensor(omega))
        dense.update(with_ones(x, True), t, omega)
        np.testing.assert_allclose(weights(linear), dense.W, rtol=1e-7, atol=1e-9)
    assert solver.state.A is not None
    np.testing.assert_allclose(solver.covariance().numpy() @ dense.A, np.eye(k + 1), atol=1e-9)
    assert solver.state.A is None


@by_torch
def test_a_large_block_that_would_lose_digits_is_learned_by_the_root():
    solver, linear = make(70, 3)
    x, y = samples(200, 70, 3)
    dense = Dense(weights(linear), 1.0, 1.0, 0.0, None, bias=True)
    x[:, 1] = x[:, 0] + 1e-7 * x[:, 1]  # nearly the same feature twice, far above the ridge
    x[:, :2] *= 1e6
    solver.update(x, y)
    assert solver.state.A is None
    Phi = with_ones(x.numpy(), True)
    dense.update(Phi, one_hot(y, 3).numpy(), np.ones(200))
    expected = Phi @ dense.W.T
    np.testing.assert_allclose(Phi @ weights(linear).T, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("ridge", [0.1, 30.0])
def test_on_a_full_batch_it_converges_to_the_optimum_of_what_it_remembers(ridge):
    x, y = samples(300, 4, 3)
    solver, linear = make(4, 3, ridge=ridge, forgetting=0.5)
    prior = torch.tensor(weights(linear))
    for _ in range(200):
        solver.update(x, y)
    # At forgetting 1/2 it remembers the batch twice, which is the batch against half of the ridge that it has; each
    # class has its ridge by its share of the curvature.
    has = float(ridge_left(np.ones(5), 0.5, [300] * 200)[0])
    share = 1.5 * has * solver.class_shares()[:, None] * torch.tensor(ridges(5, 1.0, True, 1e-4 / ridge))
    Phi, W = torch.tensor(with_ones(x.numpy(), True)), torch.tensor(weights(linear))

    def loss(V):
        return cross_entropy(Phi @ V.T, y, reduction="sum") + (ridge / 4 * share * (V - prior).square()).sum()

    # What all classes have in common moves no probability, and only the ridge moves it. A step of Newton's method from
    # the optimum leads nowhere.
    gradient, hessian = (getattr(torch.autograd.functional, name)(loss, W) for name in ("jacobian", "hessian"))
    step = torch.linalg.solve(hessian.reshape(15, 15), gradient.reshape(15)).reshape(3, 5)
    torch.testing.assert_close(solver.predict_proba(x), (Phi @ (W - step).T).softmax(1), rtol=1e-3, atol=1e-3)


def test_labels_are_one_hot_probabilities_in_any_leading_shape():
    x, y = samples(24, 3, 4)
    deep, hot, heads = x.reshape(2, 12, 3), one_hot(y, 4), []
    kinds = [(x, y), (x, hot.double()), (deep, y.reshape(2, 12).int()), (deep, hot.float().reshape(2, 12, 4))]
    for features, targets in kinds:
        solver, linear = make(3, 4)
        solver.update(features, targets)
        heads.append(weights(linear))
        loss = cross_entropy(linear(x), y).item()
        assert solver.loss(linear(features), targets).item() == pytest.approx(loss, rel=1e-12)
    np.testing.assert_array_equal(heads, heads[:1] * 4)
    one, _ = make(3, 4)
    one.update(x[0], y[0])
    assert one.steps == 1


def test_the_loss_is_torchs():
    x, y = samples(24, 3, 4)
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
    solver, linear = make(3, 4, label_smoothing=0.1, class_weight=weight)
    t = torch.rand(24, 4, dtype=torch.float64).softmax(1)
    expected = cross_entropy(linear(x), t, weight, label_smoothing=0.1)
    assert solver.loss(linear(x), t).item() == pytest.approx(expected.item(), rel=1e-12)
    solver, linear = make(3, 1)
    expected = binary_cross_entropy_with_logits(linear(x)[:, 0], (y > 1).double())
    for targets in ((y > 1).long(), (y > 1).double()[:, None]):
        assert solver.loss(linear(x), targets).item() == pytest.approx(expected.item(), rel=1e-12)
    assert solver.predict_proba(x).shape == (24, 2)
    torch.testing.assert_close(solver.predict_proba(x)[:, 1], linear(x)[:, 0].sigmoid())


bad_input = {
    "too large": lambda x, y: (1e200 * x, y, "small enough to square"),
    "label 3 of 3": lambda x, y: (x, y + 1, r"class labels in \[0, 2\], got 3"),
    "label -1": lambda x, y: (x, y - 1, r"class labels in \[0, 2\], got -1"),
    "no probabilities": lambda x, y: (x, 2.0 * one_hot(y, 3), "class probabilities, at least 0 and of sum 1, got"),
    "negative": lambda x, y: (x, torch.tensor([[2.0, -1.0, 0.0]]).expand(6, 3), "class probabilities"),
}


@pytest.mark.parametrize("what", bad_input)
def test_bad_input_changes_nothing_and_is_named_or_on_a_device_skipped(what):
    x, y = samples(30, 4, 3)
    (solver, _), (captured, _) = make(4, 3, forgetting=0.97), make(4, 3, forgetting=0.97)
    for rows in torch.arange(30).split(10):
        solver.update(x[rows], y[rows])
        captured.prepare_capture()
        assert bool(captured.update_captured(x[rows], y[rows, None]))
    before = [snapshot(one) for one in (solver, captured)]
    features, targets, message = bad_input[what](x[:6], torch.tensor([0, 1, 2, 0, 1, 2]))
    with pytest.raises((ValueError, TypeError), match=message):
        solver.update(features, targets)
    assert not bool(captured.update_captured(features, targets))
    for was, one in zip(before, (solver, captured), strict=True):
        assert not difference(was, snapshot(one))


def test_health_and_deviations_are_those_of_the_curvature():
    x, y = samples(2000, 5, 3)
    x[:, 2] = 0
    solver, linear = make(5, 3)
    remembered, seen, p = 0.0, 0, 6
    for rows in torch.arange(2000).split(4):
        solver.update(x[rows], y[rows])
        remembered = (seen + 8 * p) / (seen + 8 * p + 7 * 4) * remembered + 4
        seen += 4
    A = torch.linalg.inv(solver.covariance())
    eigenvalues = torch.linalg.eigvalsh((A + A.T) / 2)
    health = solver.health()
    assert health["smallest_eigenvalue"] == pytest.approx(float(eigenvalues[0]), rel=1e-9)
    assert health["condition"] == pytest.approx(float(eigenvalues[-1] / eigenvalues[0]), rel=1e-9)
    assert health["effective_samples"] == pytest.approx(remembered, rel=0.05)
    assert health["dead_features"] == 1
    posterior = solver.predict(x[:7], return_std=True)
    torch.testing.assert_close(posterior.mean, linear(x[:7]).detach())
    Phi = torch.cat([x[:7], torch.ones(7, 1)], 1)
    for k, share in enumerate(solver.class_shares()):
        variance = ((Phi @ solver.covariance()) * Phi).sum(1) / share
        torch.testing.assert_close(posterior.std[:, k], variance.sqrt())
    assert float(solver.class_shares().sum()) == pytest.approx(2)
    with pytest.raises(ValueError, match="features must be finite"):
        solver.predict(x[:7] * math.nan)


def test_a_recording_holds_as_long_as_its_key():
    x, y = samples(60, 4, 3)
    solver, _ = make(4, 3)
    keys = set()
    for rows in torch.arange(60).split(6):
        keys.add(solver.prepare_capture())
        token, before = solver.checkpoint(), snapshot(solver)
        assert bool(solver.update_captured(x[rows], y[rows]))
        solver.rollback(token)
        assert not difference(before, snapshot(solver))
        solver.update(x[rows], y[rows])
    assert len(keys) == 1  # whatever happened between them, recordings read and write the same memory
    solver.forgetting = 0.9
    assert solver.prepare_capture() not in keys
    solver.update(x[:6], y[:6])
    with pytest.raises(RuntimeError, match=r"needs prepare_capture\(\) before it"):
        solver.update_captured(x[:6], y[:6])
