"""OnlineLBFGS beside a twin that takes its gradients from autograd, and what it promises about its state."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import one_hot

from reference import ridge_regression, ridges, weights, with_ones
from sepsa import OnlineLBFGS
from sepsa.testing import difference, snapshot

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


def make(k, m, bias=True, dtype=torch.float64, seed=0, **options):
    torch.manual_seed(seed)
    linear = nn.Linear(k, m, bias=bias, dtype=dtype)
    return OnlineLBFGS(**({"dtype": torch.float64} | options)).bind(linear), linear


def draw(loss, n, k, m, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, k, generator=generator, dtype=torch.float64)
    if loss == "squared":
        return x, torch.randn(n, m, generator=generator, dtype=torch.float64)
    if m == 1:
        return x, torch.rand(n, 1, generator=generator, dtype=torch.float64).round()
    return x, one_hot(torch.randint(m, (n,), generator=generator), m).double()


@settings(max_examples=40, deadline=None)
@given(
    k=st.integers(1, 9), m=st.integers(1, 3), bias=st.booleans(), weighted=st.booleans(), seed=st.integers(0, 10**6),
    sizes=st.lists(st.integers(1, 12), min_size=2, max_size=14),
    options=st.fixed_dictionaries({
        "loss": st.sampled_from(["squared", "cross-entropy"]), "memory": st.integers(1, 4),
        "ridge": st.sampled_from([0.1, 1.0, 10.0]), "forgetting": st.sampled_from([1.0, 0.8]),
    }),
)  # fmt: skip
def test_every_step_equals_the_twins(k, m, bias, weighted, seed, sizes, options):
    solver, linear = make(k, m, bias, seed=seed, **options)
    twin = Twin(torch.as_tensor(weights(linear)), **options, bias=bias)
    for i, n in enumerate(sizes):
        x, y = draw(options["loss"], n, k, m, seed + i)
        omega = torch.rand(n, dtype=torch.float64) + 0.1 if weighted else torch.ones(n, dtype=torch.float64)
        solver.update(x, y, omega if weighted else None)
        twin.update(torch.cat([x, torch.ones(n, 1, dtype=torch.float64)], 1) if bias else x, y, omega)
        np.testing.assert_allclose(weights(linear), twin.W, rtol=1e-6, atol=1e-8)
        assert solver.pairs == len(twin.pairs)
        assert solver.samples == pytest.approx(twin.mass)
    assert solver.steps == len(sizes)


def test_many_passes_approach_ridge_regression():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 20)) @ np.diag(np.geomspace(1, 0.1, 20))
    y = x @ rng.normal(size=(20, 2)) + rng.normal(size=(400, 2))
    solver, linear = make(20, 2, ridge=50.0)
    prior, passes = weights(linear), 60
    for _ in range(passes):
        for i in np.array_split(rng.permutation(400), 20):
            solver.update(torch.as_tensor(x[i]), torch.as_tensor(y[i]))
    Phi = with_ones(x, True)
    truth = ridge_regression(Phi, y, np.full(400, passes), ridges(21, 50.0, True), prior)

    def loss(W):
        return float(((y - Phi @ W.T) ** 2).sum() + (ridges(21, 50.0, True) / passes * (W - prior) ** 2).sum())

    assert loss(weights(linear)) <= 1.002 * loss(truth)


def test_it_keeps_no_matrix_of_p_by_p():
    solver, _ = make(5000, 2, memory=10, dtype=torch.float32)
    solver.update(torch.randn(4, 5000), torch.randn(4, 2))
    numbers = sum(value.numel() for value in solver.state_dict().values() if isinstance(value, torch.Tensor))
    assert numbers <= (2 * 10 + 6) * 2 * 5001
    assert len(pickle.dumps(solver)) <= 8 * (2 * 10 + 9) * 2 * 5001  # nothing beside the state is much larger


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


@pytest.mark.parametrize(("m", "row", "words"), [
    (3, [0.5, 0.75, -0.25], r"targets must be class probabilities, at least 0 and of sum 1, got \[0.5, 0.75, -0.25\]"),
    (3, [0.5, 0.75, 0.25], r"targets must be class probabilities, at least 0 and of sum 1, got \[0.5, 0.75, 0.25\]"),
    (1, [1.5], r"targets must be 0 or 1, or probabilities in \[0, 1\], got \[1.5\]"),
])  # fmt: skip
def test_targets_that_are_no_probabilities(m, row, words):
    solver, _ = make(2, m, loss="cross-entropy")
    before = snapshot(solver)
    with pytest.raises(ValueError, match=words):
        solver.update(torch.ones(1, 2), torch.tensor([row]))
    assert not difference(before, snapshot(solver))
