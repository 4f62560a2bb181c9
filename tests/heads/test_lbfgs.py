"""OnlineLBFGS beside a twin that takes its gradients from autograd, and what it promises about its state."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import one_hot

from reference import ridge_regression, ridges, with_ones
from sepsa.heads.lbfgs import OnlineLBFGS

LOSSES = ("squared", "cross-entropy")

# ---------------------------------------------------------------------- the slow, obvious truth, in float64


class Twin:
    """The same method with every gradient from autograd and H by the two-loop recursion; W (m, p) with the bias."""

    def __init__(self, W, loss, memory, ridge, forgetting, bias):
        self.loss, self.memory, self.forgetting = loss, memory, forgetting
        self.ridge = torch.as_tensor(ridges(W.shape[1], ridge, bias))
        self.W, self.Z, self.prior = W.clone(), W.clone(), W.clone()
        self.mass, self.pairs, self.steps = 0.0, [], []
        self.s, self.gathered = None, []

    def objective(self, V, Phi, T, omega):
        outputs = Phi @ V.T
        if self.loss == "squared":
            each = (outputs - T).square().sum(1) / 2
        elif T.shape[1] == 1:
            each = nn.functional.binary_cross_entropy_with_logits(outputs, T, reduction="none")[:, 0]
        else:
            each = -(T * outputs.log_softmax(1)).sum(1)
        return (omega * each).sum() / omega.sum() + (self.ridge / self.mass / 2 * (V - self.prior).square()).sum()

    def direction(self, g):
        q, alphas = g.clone(), []
        for s, y in reversed(self.pairs):
            alphas.append((s * q).sum() / (s * y).sum())
            q -= alphas[-1] * y
        if self.pairs:
            q *= torch.stack([(s * y).sum() / (y * y).sum() for s, y in self.pairs]).mean()
        for (s, y), alpha in zip(self.pairs, reversed(alphas), strict=True):
            q += s * (alpha - (y * q).sum() / (s * y).sum())
        return q

    def update(self, Phi, T, omega):
        n = float(omega.sum())
        self.mass = self.forgetting * self.mass + n
        V = (0.2 * self.Z + 0.8 * self.W).requires_grad_()

        def f(U):
            return self.objective(U, Phi, T, omega)

        (g,) = torch.autograd.grad(f(V), V)
        d = self.direction(g)
        slope, curvature = (g * d).sum(), (torch.autograd.functional.hvp(f, V.detach(), d)[1] * d).sum()
        spread = Phi @ d.T
        R = spread.abs().max() if len(d) == 1 else (spread.amax(1) - spread.amin(1)).max()
        eta = slope / curvature
        if self.loss == "cross-entropy":
            eta = (R * eta).log1p() / R
        self.steps.append((slope, slope / eta))
        eta = torch.minimum(eta, sum(a for a, _ in self.steps) / sum(b for _, b in self.steps))
        assert f(V - eta * d) <= f(V)
        self.Z = self.Z - eta * d
        self.W = self.W + 3 * n / (self.mass + 2 * n) * (self.Z - self.W)
        if self.s is None:
            self.s, self.gathered = d / d.norm(), []
            return
        self.gathered.append((n, torch.autograd.functional.hvp(f, V.detach(), self.s)[1]))
        total = sum(n for n, _ in self.gathered)
        if total * self.memory >= self.mass:
            y = sum(n * y for n, y in self.gathered) / total
            self.pairs = [*self.pairs, (self.s, y + 0.1 * y.norm() * self.s)][-self.memory :]
            self.s, self.gathered, self.steps = d / d.norm(), [], []


# ---------------------------------------------------------------------- tools


def make(k, m, bias=True, dtype=torch.float64, seed=0, **options):
    torch.manual_seed(seed)
    linear = nn.Linear(k, m, bias=bias, dtype=dtype)
    return OnlineLBFGS(**({"dtype": torch.float64} | options)).bind(linear), linear


def weights(linear):
    W = linear.weight.detach().double()
    return W.clone() if linear.bias is None else torch.cat([W, linear.bias.detach().double()[:, None]], 1)


def draw(loss, n, k, m, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, k, generator=generator, dtype=torch.float64)
    if loss == "squared":
        return x, torch.randn(n, m, generator=generator, dtype=torch.float64)
    if m == 1:
        return x, torch.rand(n, 1, generator=generator, dtype=torch.float64).round()
    return x, one_hot(torch.randint(m, (n,), generator=generator), m).double()


# ---------------------------------------------------------------------- the mathematics


@settings(max_examples=40, deadline=None)
@given(
    loss=st.sampled_from(LOSSES),
    k=st.integers(1, 9),
    m=st.integers(1, 3),
    bias=st.booleans(),
    sizes=st.lists(st.integers(1, 12), min_size=2, max_size=14),
    memory=st.integers(1, 4),
    ridge=st.sampled_from([0.1, 1.0, 10.0]),
    forgetting=st.sampled_from([1.0, 0.8]),
    weighted=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_every_step_equals_the_twins(loss, k, m, bias, sizes, memory, ridge, forgetting, weighted, seed):
    options = {"loss": loss, "memory": memory, "ridge": ridge, "forgetting": forgetting}
    solver, linear = make(k, m, bias, seed=seed, **options)
    twin = Twin(weights(linear), **options, bias=bias)
    for i, n in enumerate(sizes):
        x, y = draw(loss, n, k, m, seed + i)
        omega = torch.rand(n, dtype=torch.float64) + 0.1 if weighted else torch.ones(n, dtype=torch.float64)
        solver.update(x, y, omega if weighted else None)
        twin.update(torch.cat([x, torch.ones(n, 1, dtype=torch.float64)], 1) if bias else x, y, omega)
        torch.testing.assert_close(weights(linear), twin.W, rtol=1e-6, atol=1e-8)
        assert solver.pairs == len(twin.pairs)
        assert solver.samples == pytest.approx(twin.mass)
    assert solver.steps == len(sizes)


@settings(max_examples=40, deadline=None)
@given(memory=st.integers(1, 6), steps=st.integers(2, 40), loss=st.sampled_from(LOSSES), seed=st.integers(0, 10**6))
def test_the_inverse_curvature_is_positive_definite(memory, steps, loss, seed):
    solver, _ = make(3, 2, loss=loss, memory=memory)
    for i in range(steps):
        solver.update(*draw(loss, 2, 3, 2, seed + i))
    H = torch.stack([solver.inverse_curvature(e.reshape(2, 4)).reshape(-1) for e in torch.eye(8)])
    assert torch.linalg.eigvalsh((H + H.T) / 2)[0] > 0


@pytest.mark.parametrize("memory", [1, 3, 9])
def test_health_is_that_of_the_inverse_curvature(memory):
    solver, linear = make(3, 2, memory=memory)
    assert solver.health()["condition"] == 1
    for i in range(30):
        solver.update(*draw("squared", 5, 3, 2, i))
    H = torch.stack([solver.inverse_curvature(e.reshape(2, 4)).reshape(-1) for e in torch.eye(8).double()])
    eigenvalues = torch.linalg.eigvalsh((H + H.T) / 2)
    health = solver.health()
    assert health["condition"] == pytest.approx(float(eigenvalues[-1] / eigenvalues[0]), rel=1e-6)
    assert health["smallest_eigenvalue"] == pytest.approx(150 / float(eigenvalues[-1]), rel=1e-6)
    assert health["effective_samples"] == solver.samples == 150
    assert health["pairs"] == solver.pairs <= memory
    x, _ = draw("squared", 4, 3, 2)
    torch.testing.assert_close(solver.predict(x.reshape(2, 2, 3)), linear(x).detach().reshape(2, 2, 2))
    with pytest.raises(ValueError, match=r"vector must have shape \(2, 4\), got \(8,\)"):
        solver.inverse_curvature(torch.ones(8))


def test_many_passes_approach_ridge_regression():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 20)) @ np.diag(np.geomspace(1, 0.1, 20))
    y = x @ rng.normal(size=(20, 2)) + rng.normal(size=(400, 2))
    solver, linear = make(20, 2, ridge=50.0)
    prior, passes = weights(linear).numpy(), 60
    for _ in range(passes):
        for i in np.array_split(rng.permutation(400), 20):
            solver.update(torch.as_tensor(x[i]), torch.as_tensor(y[i]))
    Phi = with_ones(x, True)
    truth = ridge_regression(Phi, y, np.full(400, passes), ridges(21, 50.0, True), prior)

    def loss(W):
        return float(((y - Phi @ W.T) ** 2).sum() + (ridges(21, 50.0, True) / passes * (W - prior) ** 2).sum())

    assert loss(weights(linear).numpy()) <= 1.002 * loss(truth)


# scikit-learn 1.6 hands SciPy options that later SciPy deprecates.
@pytest.mark.filterwarnings("ignore:scipy.optimize:DeprecationWarning")
def test_many_passes_approach_logistic_regression():
    from sklearn.linear_model import LogisticRegression

    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 6))
    labels = (x @ rng.normal(size=(6, 3)) + rng.gumbel(size=(300, 3))).argmax(1)
    best = LogisticRegression(C=1 / 2.0, fit_intercept=False, tol=1e-9, max_iter=500).fit(x, labels)
    solver, linear = make(6, 3, bias=False, loss="cross-entropy", ridge=2.0 * 60)
    with torch.no_grad():
        linear.weight.zero_()
    solver = OnlineLBFGS(loss="cross-entropy", ridge=2.0 * 60, dtype=torch.float64).bind(linear)
    X, Y = torch.as_tensor(x), one_hot(torch.as_tensor(labels), 3).double()
    for _ in range(60):
        for i in torch.randperm(300).split(20):
            solver.update(X[i], Y[i])

    def loss(W):
        return float(nn.functional.cross_entropy(X @ W.T, Y) + W.square().sum() / 300)

    optimal = loss(torch.as_tensor(best.coef_))
    assert optimal - 1e-9 <= loss(linear.weight.detach()) <= optimal + 0.002


def test_forgetting_follows_a_truth_that_moves():
    truth, error = torch.ones(1, 4, dtype=torch.float64), {}
    for forgetting in (1.0, 0.9):
        solver, linear = make(4, 1, bias=False, forgetting=forgetting)
        for i in range(330):
            x, _ = draw("squared", 8, 4, 1, i)
            solver.update(x, x @ (truth if i < 300 else -truth).T)
        error[forgetting] = float((linear.weight.detach() + truth).abs().max())
    assert error[0.9] < 0.05 < 0.5 < error[1.0]


def test_a_weight_of_two_is_the_sample_twice_and_of_none_is_no_sample():
    twice, once = make(5, 2), make(5, 2)
    x, y = draw("squared", 6, 5, 2)
    for _ in range(10):
        twice[0].update(x, y, torch.tensor([2.0, 1, 0, 1, 2, 1]).double())
        once[0].update(x[[0, 0, 1, 3, 4, 4, 5]], y[[0, 0, 1, 3, 4, 4, 5]])
    torch.testing.assert_close(weights(twice[1]), weights(once[1]))
    before = weights(twice[1])
    twice[0].update(100 * x, y, torch.zeros(6).double())
    torch.testing.assert_close(weights(twice[1]), before)


def test_it_keeps_no_matrix_of_p_by_p():
    solver, _ = make(5000, 2, memory=10, dtype=torch.float32)
    solver.update(torch.randn(4, 5000), torch.randn(4, 2))
    numbers = sum(value.numel() for value in solver.state_dict().values() if isinstance(value, torch.Tensor))
    assert numbers <= (2 * 10 + 6) * 2 * 5001
    assert len(pickle.dumps(solver)) <= 8 * (2 * 10 + 9) * 2 * 5001  # nothing beside the state is much larger


# ---------------------------------------------------------------------- the head and its dtype


def test_a_head_set_by_hand_takes_the_fast_iterate_along():
    solver, linear = make(3, 1, bias=False)
    solver.update(*draw("squared", 8, 3, 1))
    expected = copy.deepcopy(solver)
    with torch.no_grad():
        linear.weight.add_(1.0)
        expected.linear.weight.add_(1.0)
        state = expected.state_dict()
        expected.load_state_dict(state | {name: state[name] + 1.0 for name in ("W", "Z")})
    for one in (solver, expected):
        one.update(*draw("squared", 8, 3, 1, 1))
    torch.testing.assert_close(linear.weight, expected.linear.weight, rtol=1e-12, atol=1e-12)


def test_a_head_in_half_precision_loses_nothing():
    half, half_head = make(4, 1, dtype=torch.bfloat16, seed=1)
    full, full_head = make(4, 1, seed=1)
    with torch.no_grad():
        full_head.weight.copy_(half_head.weight)
        full_head.bias.copy_(half_head.bias)
    full = OnlineLBFGS(dtype=torch.float64).bind(full_head)
    for i in range(200):
        x, y = draw("squared", 4, 4, 1, i)
        half.update(x, y)
        full.update(x, y)
    torch.testing.assert_close(half.state_dict()["W"], full.state_dict()["W"])
    torch.testing.assert_close(half_head.weight.double(), full_head.weight, rtol=1e-2, atol=1e-2)


# ---------------------------------------------------------------------- the border


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"loss": "hinge"}, ValueError, "loss must be one of 'squared', 'cross-entropy', got 'hinge'"),
        ({"memory": 0}, ValueError, "memory must be an integer of at least 1, got 0"),
        ({"memory": 2.5}, TypeError, "memory must be an integer"),
        ({"ridge": 0.0}, ValueError, r"ridge must be in \(0, inf\), got 0"),
        ({"forgetting": 1.2}, ValueError, r"forgetting must be in \(0, 1\], got 1.2"),
        ({"dtype": torch.float16}, ValueError, "dtype must be torch.float32 or torch.float64"),
    ],
)
def test_wrong_settings(options, error, words):
    with pytest.raises(error, match=words):
        OnlineLBFGS(**options)


@pytest.mark.parametrize(
    ("m", "row", "words"),
    [
        (3, [0.5, 0.7, -0.2], "targets must be probabilities for loss 'cross-entropy', got -0.2"),
        (3, [0.5, 0.7, 0.2], "targets must sum to 1 in each row"),
        (1, [1.5], "targets must be probabilities for loss 'cross-entropy', got 1.5"),
        (3, [math.nan, 0.5, 0.5], "targets must be finite, got nan"),
    ],
)
def test_targets_that_are_no_probabilities(m, row, words):
    solver, linear = make(2, m, loss="cross-entropy")
    before = weights(linear)
    with pytest.raises(ValueError, match=words):
        solver.update(torch.ones(1, 2), torch.tensor([row]))
    assert torch.equal(weights(linear), before)
    assert solver.steps == 0


def test_it_owns_one_head():
    solver, linear = make(2, 1)
    assert solver.bind(linear) is solver
    with pytest.raises(ValueError, match="already bound to another"):
        solver.bind(nn.Linear(2, 1))
    with pytest.raises(RuntimeError, match="is not bound to a head"):
        OnlineLBFGS().update(torch.ones(1, 2), torch.ones(1, 1))
    assert repr(solver) == "OnlineLBFGS(loss='squared', memory=10, ridge=1, forgetting=1, head=2->1)"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("W", torch.zeros(2, 9), r"state_dict\['W'\] must be a tensor of shape \(2, 4\), got \(2, 9\)"),
        ("Z", None, r"state_dict\['Z'\] must be a tensor of shape \(2, 4\), got NoneType"),
        ("y", torch.full((2, 4), math.nan), r"state_dict\['y'\] must be finite"),
        ("A", torch.zeros(2, 3, 8), r"state_dict\['A'\] must be a tensor of shape \(2, 10, 8\)"),
        ("loss_name", "hinge", "loss must be one of"),
        ("memory", 0, "memory must be an integer of at least 1"),
        ("ridges", [-1.0, 1e-4], "ridge must be in"),
        ("steps", -1, r"state_dict\['steps'\] must be an integer of at least 0"),
        ("pairs", 11, r"state_dict\['pairs'\] must be at most the memory, 10, got 11"),
        ("samples", True, r"state_dict\['samples'\] must be a number of at least 0"),
        ("steps", True, r"state_dict\['steps'\] must be an integer of at least 0"),
        ("steps", 1, r"state_dict\['pairs'\] must be an integer in \[0, 1\]"),
        ("pair_samples", 1e9, r"state_dict\['pair_samples'\] must be a number in \[0, 20\]"),
        ("memory", 2.5, "memory must be an integer of at least 1"),
        ("SY", torch.eye(10), r"state_dict\['SY'\] must be the inner products of the pairs in A"),
        ("YY", torch.eye(10), r"state_dict\['YY'\] must be the inner products of the pairs in A"),
        ("A", torch.ones(2, 10, 8), r"state_dict\['A'\] must be zero where none of its \d+ pairs is"),
        ("W", torch.full((2, 4), 1e300, dtype=torch.float64), None),
        ("samples", math.inf, r"state_dict\['samples'\] must be a number of at least 0"),
    ],
)
def test_a_damaged_checkpoint_is_refused_whole(key, value, words):
    solver, _ = make(3, 2)
    other, _ = make(3, 2)
    for i in range(5):
        other.update(*draw("squared", 4, 3, 2, i))
    before = solver.state_dict()
    if words is None:  # what float64 holds and float32 does not
        solver, _ = make(3, 2, dtype=torch.float32)
        solver = OnlineLBFGS(dtype=torch.float32).bind(solver.linear)
        before, words = solver.state_dict(), "must be a tensor of torch.float32 in dense layout"
    elif isinstance(value, torch.Tensor):
        value = value.to(other.state_dict()[key].dtype)
    with pytest.raises(ValueError, match=words):
        solver.load_state_dict(other.state_dict() | {key: value})
    with pytest.raises(ValueError, match=r"other entries than OnlineLBFGS saves: missing \['A'\], unexpected \['B'\]"):
        solver.load_state_dict({"B" if k == "A" else k: v for k, v in other.state_dict().items()})
    for name, kept in solver.state_dict().items():
        assert torch.equal(kept, before[name]) if isinstance(kept, torch.Tensor) else kept == before[name]


def test_a_checkpoint_brings_its_settings():
    solver, _ = make(3, 2, memory=4, loss="cross-entropy")
    other, _ = make(3, 2, memory=7)
    for i in range(20):
        other.update(*draw("squared", 4, 3, 2, i))
    solver.load_state_dict(other.state_dict())
    solver.linear.load_state_dict(other.linear.state_dict())
    assert (solver.loss_name, solver.memory) == ("squared", 7)
    for i in range(20):
        x, y = draw("squared", 4, 3, 2, i)
        solver.update(x, y)
        other.update(x, y)
        assert torch.equal(solver.state_dict()["Z"], other.state_dict()["Z"])
