"""SlimTik against dense solves of the problem it states; tests/heads/test_properties.py has what all solvers share."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from heads.test_rls import relative
from reference import weights
from reproduction import slimtik
from reproduction.slimtik import PublishedSlimTik, SlimTik
from sepsa.testing import difference, snapshot

# ---------------------------------------------------------------------- the slow, obvious truth, in float64


def block(x, y, bias):
    """Z (p, n) and C (m, n): samples in columns, over the root of their number."""
    Z = np.column_stack([x, np.ones(len(x))]) if bias else np.asarray(x)
    return Z.T / np.sqrt(len(x)), np.asarray(y).T / np.sqrt(len(x))


def dense_increment(Z, M, E, W, lam, tau):
    """The step as one stacked least-squares problem in vec(s), Kronecker products spelled out."""
    (m, p), N = W.shape, Z.shape[1] + M.shape[1]
    A = np.vstack([np.kron(np.hstack([Z, M]).T, np.eye(m)), np.sqrt(tau) * np.eye(m * p)])
    residual = np.hstack([E, np.zeros((m, M.shape[1]))])
    b = np.concatenate([residual.ravel(order="F"), -lam / np.sqrt(tau) * W.ravel(order="F")])
    assert A.shape == (m * (N + p), m * p)
    return np.linalg.lstsq(A, b, rcond=None)[0].reshape((m, p), order="F")


def dense_sgcv(Z, M, C, W, lam, tau):
    """The criterion by its definition, with the influence matrix (nm, nm) formed."""
    m, n = C.shape
    A = np.kron(Z.T, np.eye(m))
    curvature = np.kron(Z @ Z.T + M @ M.T, np.eye(m)) + tau * np.eye(W.size)
    influence = A @ np.linalg.solve(curvature, A.T)
    moved = W + dense_increment(Z, M, C - W @ Z, W, lam, tau)
    return np.sum((C - moved @ Z) ** 2) / np.trace(np.eye(n * m) - influence) ** 2


def published_sgcv(Z, M, C, W, lam, tau):
    """The criterion as published, whose trace is n - m tr H, H (n, n) formed."""
    (m, n), curvature = C.shape, Z @ Z.T + M @ M.T + tau * np.eye(len(Z))
    moved = W + dense_increment(Z, M, C - W @ Z, W, lam, tau)
    return np.sum((C - moved @ Z) ** 2) / (n - m * np.trace(Z.T @ np.linalg.solve(curvature, Z))) ** 2


def make(k, m, bias=True, dtype=torch.float64, seed=0, head_dtype=torch.float64, kind=SlimTik, **options):
    torch.manual_seed(seed)
    linear = nn.Linear(k, m, bias=bias, dtype=head_dtype)
    return kind(dtype=dtype, **options).bind(linear), linear


def data(n, k, m, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, size, generator=generator, dtype=torch.float64) for size in (k, m))


problems = st.fixed_dictionaries({
    "k": st.integers(1, 9), "m": st.integers(1, 3), "bias": st.booleans(), "seed": st.integers(0, 10**6),
    "sizes": st.lists(st.integers(1, 12), min_size=1, max_size=7), "memory": st.integers(0, 4),
    "low": st.sampled_from([1e-7, 1e-4, 1e-2]), "noise": st.sampled_from([0.0, 0.3, 3.0]),
})  # fmt: skip


def stream(k, m, bias, sizes, memory, low, noise, seed, **options):
    """A solver, its head, and before every update what it is about to see: Z, M, C, W and the sum of Λ."""
    rng = np.random.default_rng(seed)
    solver, linear = make(k, m, bias, seed=seed, memory=memory, bounds=(low, 1e3), **options)
    truth, past = rng.normal(size=(k, m)), []
    p = k + bias
    for n in sizes:
        x = rng.normal(size=(n, k))
        y = x @ truth + noise * rng.normal(size=(n, m))
        Z, C = block(x, y, bias)
        M = np.hstack([np.zeros((p, 0)), *past[max(0, len(past) - memory) :]])
        yield solver, linear, Z, M, C, weights(linear), solver.regularization_sum, (torch.tensor(x), torch.tensor(y))
        past.append(Z)


# ---------------------------------------------------------------------- the mathematics


@settings(max_examples=80, deadline=None)
@given(problem=problems)
def test_a_step_equals_the_dense_solve(problem):
    for solver, linear, Z, M, C, W, total, samples in stream(**problem):
        solver.update(*samples)
        tau = solver.regularization_sum
        assert tau == pytest.approx(total + solver.last_regularization, rel=1e-12)
        expected = W + dense_increment(Z, M, C - W @ Z, W, solver.last_regularization, tau)
        assert relative(weights(linear), expected) <= 1e-9


@settings(max_examples=60, deadline=None)
@given(problem=problems)
def test_the_chosen_parameter_minimizes_the_sampled_gcv_function(problem):
    problem["low"] = max(problem["low"], 1e-4)  # below, the trace of the dense definition is all rounding
    for solver, _, Z, M, C, W, total, samples in stream(**problem):
        solver.candidates = 12
        trials, sums = slimtik.trial_points(total, solver.bounds, solver.candidates, torch.finfo(torch.float64).eps)
        slow = [dense_sgcv(Z, M, C, W, lam, tau) for lam, tau in zip(trials.tolist(), sums.tolist(), strict=True)]
        tensors = [torch.tensor(a) for a in (Z, M, C - W @ Z, W)]
        fast = slimtik.sgcv(slimtik.factorize(tensors[0], [tensors[1]], *tensors[2:]), trials, sums)
        scale = np.sum((C - W @ Z) ** 2) + np.sum(W**2)  # an exact fit leaves rounding only
        np.testing.assert_allclose(fast.numpy(), slow, rtol=1e-6, atol=1e-20 * scale)
        solver.update(*samples)
        assert solver.last_regularization in trials.tolist()
        assert slow[trials.tolist().index(solver.last_regularization)] <= min(slow) * (1 + 1e-6) + 1e-20 * scale


@pytest.mark.parametrize("memory", [0, 2])
@pytest.mark.parametrize("n", [1, 4])
def test_published_step_and_choice(n, memory):
    given = stream(5, 3, True, [n] * 6, memory, 1e-4, 1.0, n, kind=PublishedSlimTik, candidates=20)
    for solver, linear, Z, M, C, W, total, samples in given:
        solver.update(*samples)
        lam, tau = solver.last_regularization, solver.regularization_sum
        assert tau == pytest.approx(total + lam, rel=1e-12)
        assert relative(weights(linear), W + dense_increment(Z, M, C - W @ Z, W, lam, tau)) <= 1e-7
        ends = (math.log10(1e3), math.log10(total / 2 - 1e-4))  # of the points above 0 and below
        above, below = (torch.logspace(math.log10(torch.finfo(torch.float64).eps), end, 20).double() for end in ends)
        least = min(published_sgcv(Z, M, C, W, t, total + t) for t in torch.cat([above, -below]).tolist())
        assert published_sgcv(Z, M, C, W, lam, tau) <= least * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(
    total=st.floats(1e-7, 1e3),
    low=st.sampled_from([1e-7, 1e-3]),
    count=st.integers(2, 100),
    eps=st.sampled_from([1.2e-7, 2.3e-16]),
)
def test_trial_points_keep_the_sum_in_bounds(total, low, count, eps):
    total = max(total, low)
    trials, sums = slimtik.trial_points(total, (low, 1e3), count, eps)
    assert trials[0] == 0
    assert 1 <= len(trials) <= 2 * count + 1
    assert float(sums.min()) >= max(low, total / 2)
    assert float(sums.max()) <= 1e3
    torch.testing.assert_close(sums, total + trials, rtol=1e-12, atol=0)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize(("n", "old"), [(1, 0), (1, 5), (3, 12), (40, 0), (30, 90)])
def test_float32_keeps_its_digits_when_the_sum_is_tiny(n, old, scale):
    """Where I/τ - U(...)Uᵀ/τ² and n - tr(ZᵀU(...)UᵀZ) would have none left."""
    rng = np.random.default_rng(n)
    Z, M, E, W = (rng.normal(size=size) for size in ((20, n), (20, old), (2, n), (2, 20)))
    double = [torch.tensor(a) for a in (scale * Z, scale * M, E, W)]
    single = [a.float() for a in double]
    tau = torch.tensor([1e-7, 1e-5, 1e-3, 1e-1], dtype=torch.float64) * scale**2
    problems = [slimtik.factorize(Z, [M], E, W) for Z, M, E, W in (double, single)]
    for lam in (-tau / 2, tau / 2, 0 * tau):
        exact, rounded = (slimtik.sgcv(p, lam.to(p.W), tau.to(p.W)).double() for p in problems)
        torch.testing.assert_close(rounded, exact, rtol=1e-2, atol=0)
        for one, sum_ in zip(lam.tolist(), tau.tolist(), strict=True):
            exact, rounded = (slimtik.increment(p, one, sum_).double().numpy() for p in problems)
            assert relative(rounded, exact) < 1e-3


def test_zero_features_and_a_perfect_fit_leave_the_head_finite():
    solver, linear = make(3, 2, bias=False, dtype=torch.float32)
    before = weights(linear)
    for _ in range(5):
        solver.update(torch.zeros(4, 3), torch.ones(4, 2))
        assert np.isfinite(weights(linear)).all()
    assert relative(weights(linear), before * 0.05 / solver.regularization_sum) < 1e-5  # shrunk, never fitted
    x, _ = data(8, 3, 2)
    fitted, head = make(3, 2)
    targets = head(x).detach()
    before = weights(head)
    fitted.update(x, targets)
    assert fitted.last_regularization == 0.0
    assert relative(weights(head), before) < 1e-12


def test_a_failed_svd_and_weights_change_nothing(monkeypatch):
    solver, _ = make(3, 2, dtype=torch.float32, head_dtype=torch.float32)
    x, y = data(6, 3, 2)
    solver.update(x, y)
    before = snapshot(solver)
    with pytest.raises(ValueError, match=r"sample_weight must be None.*RLS"):
        solver.update(x, y, torch.ones(6))

    def fail(*args, **options):
        raise torch.linalg.LinAlgError("linalg.svd: The algorithm failed to converge")

    monkeypatch.setattr(torch.linalg, "svd", fail)
    with pytest.raises(RuntimeError, match=r"SVD of features and memory, \(4, 12\).*nothing was learned"):
        solver.update(x, y)
    assert not difference(before, snapshot(solver))


@pytest.mark.parametrize(("options", "error", "match"), [
    ({"memory": -1}, ValueError, "memory must be an integer of at least 0, got -1"),
    ({"memory": 2.0}, TypeError, "memory must be an integer"),
    ({"candidates": 1}, ValueError, "candidates must be an integer of at least 2, got 1"),
    ({"regularization": 0.0}, ValueError, "regularization must be in"),
    ({"regularization": 1e4}, ValueError, "regularization must be within bounds"),
    ({"regularization": "auto"}, TypeError, "regularization must be a number"),
    ({"bounds": (1.0, 0.1)}, ValueError, "low < high"),
    ({"bounds": (0.0, 0.1)}, ValueError, r"bounds\[0\] must be in"),
    ({"bounds": 0.1}, TypeError, "bounds must be a pair"),
    ({"dtype": torch.float16}, ValueError, "dtype must be torch.float32 or torch.float64"),
])  # fmt: skip
def test_bad_settings_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        SlimTik(**options)


def test_health_and_covariance_are_those_of_the_memory():
    solver, linear = make(3, 2, memory=2)
    assert solver.health()["condition"] == 1
    blocks = [block(*data(4, 3, 2, seed=i), bias=True)[0] for i in range(3)]
    for i in range(3):
        solver.update(*data(4, 3, 2, seed=i))
    A = sum(Z @ Z.T for Z in blocks[1:]) + solver.regularization_sum * np.eye(4)
    assert relative(solver.covariance().numpy(), np.linalg.inv(A)) < 1e-9
    values, health = np.linalg.eigvalsh(A), solver.health()
    assert health["condition"] == pytest.approx(values[-1] / values[0], rel=1e-9)
    assert health["smallest_eigenvalue"] == pytest.approx(values[0], rel=1e-9)
    assert health["effective_samples"] == solver.samples == 8
    assert health["regularization_sum"] == solver.regularization_sum
    x, _ = data(6, 3, 2)
    torch.testing.assert_close(solver.predict(x.reshape(2, 3, 3)), linear(x).detach().reshape(2, 3, 2))
