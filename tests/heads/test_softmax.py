"""SoftmaxNewton against its equations spelled out, against the true optimum, and what it promises about its state."""

from __future__ import annotations

import copy
import io
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot

from reference import restored_coordinates, ridges, weights
from sepsa import SepSA, SoftmaxNewton
from sepsa.heads.math import cross_entropy as cross_entropy_math

# ---------------------------------------------------------------------- the slow, obvious truth, in float64


class Dense:
    """Equations 1 and 2 with A and the gradients formed, sample by sample and class by class."""

    def __init__(self, W, ridge, forgetting, label_smoothing, class_weight, bias):
        self.W, self.prior = W.copy(), W.copy()
        K, p = W.shape
        self.ridge = ridges(p, ridge, bias) * max(K / 2, 1)
        self.forgetting, self.smoothing = forgetting, label_smoothing
        self.weight = np.ones(max(K, 2)) if class_weight is None else np.array(class_weight)
        self.A, self.left = np.diag(self.ridge), self.ridge.copy()
        self.shares, self.seen, self.cursor = np.ones(K), 0.0, 0

    def update(self, Phi, targets, omega):
        """Phi (n, p) features with their ones, targets (n, classes) probabilities, omega (n,) weights."""
        K, p = self.W.shape
        n, C = targets.shape
        U, R = np.zeros((n, K)), np.zeros((n, K))
        total = 0.0
        for i in range(n):
            tau = omega[i] * self.weight * ((1 - self.smoothing) * targets[i] + self.smoothing / C)
            logits = self.W @ Phi[i]
            logits = np.append(0.0, logits) if K == 1 else logits
            P = np.exp(logits - logits.max())
            P /= P.sum()
            for k in range(K):
                j = k + (K == 1)
                R[i, k] = tau.sum() * P[j] - tau[j]
                sampled = R[i, k] ** 2 / tau.sum() if tau.sum() else 0.0
                U[i, k] = (tau.sum() * P[j] * (1 - P[j]) + sampled) / 2
            total += tau.sum()
        lam = min(self.forgetting, (self.seen + 8 * p) / (self.seen + 8 * p + 7 * total))
        self.seen += total
        self.shares = lam * self.shares + (1 - lam) + U.sum(0)
        s = min(K, 2) * self.shares / self.shares.sum()
        rho = max(min(K, 2) * U[:, k].sum() / U.sum() / s[k] for k in range(K)) if U.sum() else 0.0
        own = sum(U[i].sum() * np.outer(Phi[i], Phi[i]) for i in range(n))
        gradient = R.T @ Phi / s[:, None]
        self.A, self.left = lam * self.A, lam * self.left
        for j in restored_coordinates(p, self.forgetting, self.cursor, at_least=n):
            q = max(0.0, self.ridge[j] - self.left[j])
            self.A[j, j] += q
            gradient[:, j] += q * (self.W - self.prior)[:, j]
            self.left[j], self.cursor = self.ridge[j], self.cursor + 1
        self.W = self.W - np.linalg.solve(self.A + rho * own, gradient.T).T
        self.A = self.A + own


def minimum(Phi, targets, ridge, prior):
    """The least sum of cross-entropies + ridge/2 ||W - prior||^2, and where it is."""
    Phi, targets, prior = (torch.as_tensor(a, dtype=torch.float64) for a in (Phi, targets, prior))
    W = prior.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([W], max_iter=500, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        value = objective(W, Phi, targets, ridge, prior)
        value.backward()
        return value

    optimizer.step(closure)
    return closure().item(), W.detach().numpy()


def objective(W, Phi, targets, ridge, prior):
    logits = Phi @ W.T
    if len(W) == 1:
        logits = torch.cat([torch.zeros_like(logits), logits], 1)
    return cross_entropy(logits, targets, reduction="sum") + (ridge / 2 * (W - prior).square()).sum()


# ---------------------------------------------------------------------- tools


def make(k, K, bias=True, dtype=torch.float64, seed=0, **options):
    torch.manual_seed(seed)
    linear = nn.Linear(k, K, bias=bias, dtype=dtype)
    return SoftmaxNewton(**options).bind(linear), linear


def samples(n, k, K, seed=0, sharpness=2.0):
    """Features, labels drawn from a true head, and that head."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, k, generator=generator, dtype=torch.float64)
    truth = sharpness * torch.randn(max(K, 2), k, generator=generator, dtype=torch.float64)
    y = torch.multinomial((x @ truth.T).softmax(1), 1, generator=generator)[:, 0]
    return x, y


def all_of(solver, linear):
    return {**solver.state_dict(), **{name: p.detach().clone() for name, p in linear.named_parameters()}}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for key, value in a.items():
        assert torch.equal(value, b[key]) if isinstance(value, torch.Tensor) else value == b[key], key


problems = st.fixed_dictionaries(
    {
        "k": st.integers(1, 6),
        "K": st.integers(1, 5),
        "bias": st.booleans(),
        "sizes": st.lists(st.integers(1, 9), min_size=1, max_size=8),
        "ridge": st.sampled_from([1e-3, 1.0, 50.0]),
        "forgetting": st.sampled_from([1.0, 0.99, 0.5]),
        "label_smoothing": st.sampled_from([0.0, 0.2]),
        "weighted": st.booleans(),
        "scale": st.sampled_from([0.1, 1.0, 30.0]),
        "seed": st.integers(0, 10**6),
    }
)


# ---------------------------------------------------------------------- the mathematics


@settings(max_examples=100, deadline=None)
@given(problem=problems)
def test_updates_equal_the_equations_spelled_out(problem):
    k, K, bias, sizes, weighted, scale, seed = (
        problem.pop(name) for name in ("k", "K", "bias", "sizes", "weighted", "scale", "seed")
    )
    rng = np.random.default_rng(seed)
    C = max(K, 2)
    options = problem | {"class_weight": rng.uniform(0.1, 3, C).tolist() if weighted else None}
    solver, linear = make(k, K, bias, seed=seed, **options)
    dense = Dense(weights(linear), **options, bias=bias)
    for n in sizes:
        x = scale * rng.normal(size=(n, k))
        t = rng.dirichlet(np.full(C, 0.3), size=n)
        omega = rng.uniform(0, 2, n) if weighted else np.ones(n)
        solver.update(torch.tensor(x), torch.tensor(t[:, C - K :]), torch.tensor(omega) if weighted else None)
        dense.update(np.column_stack([x, np.ones(n)]) if bias else x, t, omega)
        np.testing.assert_allclose(weights(linear), dense.W, rtol=1e-7, atol=1e-8)
    B = solver.covariance().numpy()
    np.testing.assert_allclose(B @ dense.A, np.eye(len(B)), atol=1e-6)
    assert solver.steps == len(sizes)
    assert solver.samples == pytest.approx(dense.seen)


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
        dense.update(np.column_stack([x, np.ones(n)]), t, omega)
        np.testing.assert_allclose(weights(linear), dense.W, rtol=1e-7, atol=1e-9)
    assert solver._state.A is not None
    np.testing.assert_allclose(solver.covariance().numpy() @ dense.A, np.eye(k + 1), atol=1e-9)
    assert solver._state.A is None


def test_a_large_block_that_would_lose_digits_is_learned_by_the_root():
    solver, linear = make(70, 3)
    x, y = samples(200, 70, 3)[:2]
    dense = Dense(weights(linear), 1.0, 1.0, 0.0, None, bias=True)
    x[:, 1] = x[:, 0] + 1e-7 * x[:, 1]  # nearly the same feature twice, far above the ridge
    x[:, :2] *= 1e6
    solver.update(x, y)
    assert solver._state.A is None
    dense.update(np.column_stack([x, np.ones(200)]), one_hot(y, 3).numpy() if y.ndim == 1 else y.numpy(), np.ones(200))
    scores = np.column_stack([x, np.ones(200)])
    expected = scores @ dense.W.T
    np.testing.assert_allclose(scores @ weights(linear).T, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("K", [1, 2, 5])
@pytest.mark.parametrize("batch", [1, 32])
def test_a_stream_brings_it_to_the_optimum(K, batch):
    x, y = samples(500 if batch == 1 and K < 5 else 1500, 6, K)
    solver, linear = make(6, K)
    prior = weights(linear)
    Phi = torch.cat([x, torch.ones(len(x), 1)], 1)
    hot = one_hot(y, max(K, 2)).double()
    ridge = torch.tensor(ridges(7, 1.0, True))
    least, _ = minimum(Phi, hot, ridge, prior)

    def excess():
        W = torch.tensor(weights(linear))
        return (objective(W, Phi, hot, ridge, torch.tensor(prior)).item() - least) / len(x)

    before = excess()
    for i in range(0, len(x), batch):
        solver.update(x[i : i + batch], y[i : i + batch])
    assert excess() < 0.08 * before
    if batch > 1:
        for _ in range(4):
            for i in range(0, len(x), batch):
                solver.update(x[i : i + batch], y[i : i + batch])
        assert excess() < 0.01 * before


@pytest.mark.parametrize("ridge", [0.1, 30.0])
def test_on_a_full_batch_it_converges_to_the_optimum_of_what_it_remembers(ridge):
    x, y = samples(300, 4, 3)
    solver, linear = make(4, 3, ridge=ridge, forgetting=0.5)
    prior = weights(linear)
    for _ in range(200):
        solver.update(x, y)
    # At forgetting 1/2 it remembers the batch twice, which is the batch against half of the ridge; each class has its
    # ridge by its share of the curvature.
    share = 1.5 * solver.class_shares()[:, None] * torch.tensor(ridges(5, 1.0, True, 1e-4 / ridge))
    Phi, hot = torch.cat([x, torch.ones(300, 1)], 1), one_hot(y, 3).double()
    _, W = minimum(Phi, hot, ridge / 2 * share, prior)
    # What all classes have in common moves no probability, and only the ridge moves it.
    expected = (Phi @ torch.tensor(W).T).softmax(1)
    torch.testing.assert_close(solver.predict_proba(x), expected, rtol=1e-3, atol=1e-3)


def test_weights_of_samples_count_them():
    x, y = samples(40, 3, 4)
    once, head_once = make(3, 4)
    twice, head_twice = make(3, 4)
    for i in (0, 20):
        a, b = x[i : i + 20], y[i : i + 20]
        once.update(a, b, torch.cat([torch.full((10,), 2.0), torch.zeros(10)]).double())
        twice.update(a[:10].repeat(2, 1), b[:10].repeat(2))
    np.testing.assert_allclose(weights(head_once), weights(head_twice), rtol=1e-9)
    assert once.samples == twice.samples == 40


def test_labels_are_one_hot_probabilities_in_any_leading_shape():
    x, y = samples(24, 3, 4)
    heads = []
    for features, targets in (
        (x, y),
        (x, one_hot(y, 4).double()),
        (x.reshape(2, 12, 3), y.reshape(2, 12).to(torch.int32)),
        (x.reshape(2, 12, 3), one_hot(y, 4).float().reshape(2, 12, 4)),
    ):
        solver, linear = make(3, 4)
        solver.update(features, targets)
        heads.append(weights(linear))
        outputs = linear(features)
        assert solver.loss(outputs, targets).item() == pytest.approx(cross_entropy(linear(x), y).item(), rel=1e-12)
    for head in heads[1:]:
        np.testing.assert_array_equal(head, heads[0])
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


def test_a_class_of_more_weight_is_chosen_more_often():
    x, y = samples(2000, 3, 3, sharpness=0.5)
    chosen = []
    for weight in (None, [1.0, 1.0, 5.0]):
        solver, linear = make(3, 3, class_weight=weight)
        for i in range(0, 2000, 20):
            solver.update(x[i : i + 20], y[i : i + 20])
        chosen.append((linear(x).argmax(1) == 2).double().mean().item())
    assert chosen[1] > chosen[0] + 0.2


def test_smoothed_labels_keep_the_head_modest():
    x, y = samples(2000, 3, 3, sharpness=9.0)
    sizes = []
    for label_smoothing in (0.0, 0.2):
        solver, linear = make(3, 3, label_smoothing=label_smoothing)
        for i in range(0, 2000, 20):
            solver.update(x[i : i + 20], y[i : i + 20])
        sizes.append(linear.weight.norm().item())
    assert sizes[1] < 0.7 * sizes[0]


def test_a_thousand_classes_share_one_curvature():
    x, y = samples(3000, 20, 1000)
    solver, linear = make(20, 1000)
    before = cross_entropy(linear(x), y).item()
    for i in range(0, 3000, 50):
        solver.update(x[i : i + 50], y[i : i + 50])
    assert cross_entropy(linear(x), y).item() < before - 2
    numbers = sum(v.numel() for v in solver.state_dict().values() if isinstance(v, torch.Tensor))
    assert numbers <= 21 * 21 + 2 * 21 * 1000 + 1000 + 21 + 3
    single, linear = make(20, 1000)
    for i in range(300):
        single.update(x[i], y[i])
    assert cross_entropy(linear(x), y).item() < before


def test_labels_that_change_are_followed_the_sooner_the_more_is_forgotten():
    x, y = samples(3000, 4, 3)
    lag = []
    for forgetting in (1.0, 0.98):
        solver, linear = make(4, 3, forgetting=forgetting)
        for i in range(800):
            solver.update(x[i], y[i])
        for i in range(800, 900):
            solver.update(x[i], (y[i] + 1) % 3)
        lag.append(cross_entropy(linear(x[900:]), (y[900:] + 1) % 3).item())
    assert lag[1] < 0.7 * lag[0]


# ---------------------------------------------------------------------- what comes in


@pytest.mark.parametrize("forgetting", [1.0, 0.9])
@pytest.mark.parametrize("kind", ["zeros", "constant", "collinear", "x 1e6", "x 1e-6", "half dead, then alive"])
@pytest.mark.parametrize("batch", [1, 40])
def test_finite_under_what_breaks_a_curvature(kind, forgetting, batch):
    n = 160 if batch == 1 else 600
    x, y = samples(n, 6, 3)
    if kind == "zeros":
        x = torch.zeros_like(x)
    elif kind == "constant":
        x = x[:1].expand_as(x)
    elif kind == "collinear":
        x = x[:1] * torch.tensor([1.0, -3.0]).repeat(n // 2)[:, None]
    elif kind.startswith("x"):
        x = float(kind[2:]) * x
    else:
        x[: n // 2, 3:] = 0
    solver, linear = make(6, 3, forgetting=forgetting, dtype=torch.float32)
    for i in range(0, n, batch):
        solver.update(x[i : i + batch], y[i : i + batch])
    assert np.isfinite(weights(linear)).all()
    assert bool(solver.covariance().isfinite().all())
    assert solver.loss(linear(x.float()), y).isfinite()
    if kind == "half dead, then alive":
        assert (linear(x.float()).argmax(1) == y).double().mean() > 0.5  # by the last ten


bad_input = {
    "a NaN": lambda x, y: (x.index_fill(0, torch.tensor([2]), math.nan), y, "features must be finite"),
    "an Inf": lambda x, y: (x.index_fill(0, torch.tensor([2]), math.inf), y, "features must be finite"),
    "too large": lambda x, y: (1e200 * x, y, "small enough to square"),
    "label 3 of 3": lambda x, y: (x, y + 1, r"class labels in \[0, 2\], got 3"),
    "label -1": lambda x, y: (x, y - 1, r"class labels in \[0, 2\], got -1"),
    "no probabilities": lambda x, y: (x, 2.0 * one_hot(y, 3), "class probabilities, at least 0 and of sum 1, got"),
    "negative": lambda x, y: (x, torch.tensor([[2.0, -1.0, 0.0]]).expand(6, 3), "class probabilities"),
    "NaN targets": lambda x, y: (x, torch.full((6, 3), math.nan), "targets must be finite"),
    "wrong width": lambda x, y: (x, torch.zeros(6, 2), "targets must have shape"),
    "too few labels": lambda x, y: (x, y[:5], "targets"),
}


@pytest.mark.parametrize("what", bad_input)
def test_bad_input_is_named_and_changes_nothing(what):
    x, y = samples(30, 4, 3)
    solver, linear = make(4, 3)
    solver.update(x, y)
    before = all_of(solver, linear)
    features, targets, message = bad_input[what](x[:6], torch.tensor([0, 1, 2, 0, 1, 2]))
    with pytest.raises((ValueError, TypeError), match=message):
        solver.update(features, targets)
    assert_same(all_of(solver, linear), before)


@pytest.mark.parametrize("what", list(bad_input)[:8])
def test_on_a_device_bad_input_is_skipped_and_good_input_is_learned_as_ever(what):
    x, y = samples(30, 4, 3)
    solver, linear = make(4, 3, forgetting=0.97)
    other, other_linear = make(4, 3, forgetting=0.97)
    for i in (0, 10, 20):
        solver.prepare_capture()
        assert bool(solver.update_captured(x[i : i + 10], y[i : i + 10, None]))
        other.update(x[i : i + 10], y[i : i + 10])
    assert_same(all_of(solver, linear), all_of(other, other_linear))
    features, targets, _ = bad_input[what](x[:6], torch.tensor([0, 1, 2, 0, 1, 2]))
    assert not bool(solver.update_captured(features, targets))
    assert_same(all_of(solver, linear), all_of(other, other_linear))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ridge": 0.0}, r"ridge must be in \(0, inf\), got 0"),
        ({"forgetting": 1.2}, r"forgetting must be in \(0, 1\], got 1.2"),
        ({"label_smoothing": 1.0}, r"label_smoothing must be in \[0, 1\), got 1"),
        ({"label_smoothing": "much"}, "label_smoothing must be a number"),
        ({"class_weight": [1.0, 0.0, 1.0]}, r"class_weight must be in \(0, inf\), got 0"),
        ({"class_weight": [1.0, 2.0]}, "class_weight must have 3 numbers, one a class of this head, got 2"),
    ],
)
def test_wrong_settings_are_named(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make(4, 3, **options)


def test_a_solver_owns_one_head():
    with pytest.raises(RuntimeError, match="is not bound to a head"):
        SoftmaxNewton().update(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long))
    solver, linear = make(4, 3)
    assert solver.bind(linear) is solver
    with pytest.raises(ValueError, match="already bound"):
        solver.bind(nn.Linear(4, 3))
    assert repr(solver) == "SoftmaxNewton(ridge=1, forgetting=1, head=4->3)"
    assert repr(SoftmaxNewton(label_smoothing=0.1, class_weight=[1, 2])) == (
        "SoftmaxNewton(ridge=1, forgetting=1, label_smoothing=0.1, class_weight=[1.0, 2.0])"
    )


def test_a_coarse_head_keeps_what_rounding_loses_and_what_the_user_sets():
    x, y = samples(600, 4, 3)
    coarse, head = make(4, 3, dtype=torch.bfloat16)
    reference = nn.Linear(4, 3, dtype=torch.float64)
    reference.load_state_dict({key: value.double() for key, value in head.state_dict().items()})
    fine = SoftmaxNewton().bind(reference)
    for i in range(600):
        coarse.update(x[i], y[i])
        fine.update(x[i], y[i])
    np.testing.assert_allclose(weights(head), weights(reference), rtol=0.02, atol=0.02)
    np.testing.assert_allclose(coarse.state_dict()["W"].numpy(), weights(reference), rtol=0.01, atol=0.01)
    with torch.no_grad():
        reference.weight.zero_()
    fine.update(x[:1], y[:1])
    assert reference.weight.abs().max() < 0.2


# ---------------------------------------------------------------------- state


def test_a_checkpoint_continues_bit_by_bit():
    x, y = samples(80, 4, 3)
    solver, linear = make(4, 3, forgetting=0.9, label_smoothing=0.1, class_weight=[1.0, 2.0, 3.0])
    solver.update(x[:40], y[:40])
    file = io.BytesIO()
    torch.save({"head": linear.state_dict(), "solver": solver.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    other, other_linear = make(4, 3, seed=9)
    other_linear.load_state_dict(saved["head"])
    other.load_state_dict(saved["solver"])
    copies = [(other, other_linear), (copy.deepcopy(solver), None), (pickle.loads(pickle.dumps(solver)), None)]
    solver.update(x[40:], y[40:])
    for twin, head in copies:
        twin.update(x[40:], y[40:])
        assert_same(all_of(twin, head or twin.linear), all_of(solver, linear))
        assert repr(twin) == repr(solver)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("T", torch.zeros(2, 2), "another size"),
        ("W", torch.full((3, 5), math.nan), "damaged"),
        ("prior", "none", "another size"),
        ("ridges", [-1.0, 1e-4], "ridge must be"),
        ("ridges", [1.0, "no"], "bias_ridge must be"),
        ("ridges", 1.0, "must be a pair"),
        ("forgetting", 2.0, "forgetting must be"),
        ("label_smoothing", 1.5, "label_smoothing must be"),
        ("class_weight", [1.0], "class_weight must have 3"),
        ("colour", 1, r"unexpected \['colour'\]"),
        ("T", torch.zeros(5, 5), r"state_dict\['T'\] must be a regular matrix"),
        ("T", torch.ones(5, 5, dtype=torch.float64), "must be a regular matrix"),
        ("T", 9 * torch.eye(5), "inverse curvature of at least the ridge, got a larger matrix"),
        ("T", torch.eye(5, dtype=torch.long), "tensor of torch.float64 in dense layout, got a tensor of torch.int64"),
        ("W", torch.zeros(3, 5, dtype=torch.float16), "tensor of torch.float64 in dense layout"),
        ("W", torch.zeros(3, 5).to_sparse(), "tensor of torch.float64 in dense layout"),
        ("W", torch.zeros(3, 5, device="meta"), "got a meta tensor"),
        ("shares", torch.tensor([1.0, -1.0, 1.0]), r"state_dict\['shares'\] must be positive"),
        ("ridge_left", torch.zeros(5), r"state_dict\['ridge_left'\] must be in"),
        ("ridge_left", torch.full((5,), 99.0), r"state_dict\['ridge_left'\] must be in \(0, 10.5\]"),
        ("counters", torch.tensor([1.5, 30.0, 0.0]), r"state_dict\['counters'\] must be"),
        ("counters", torch.tensor([1.0, -3.0, 0.0]), r"state_dict\['counters'\] must be"),
        ("counters", torch.tensor([1.0, 30.0, 5.0]), r"state_dict\['counters'\] must be"),
        ("counters", torch.tensor([0.0, 30.0, 0.0]), r"state_dict\['counters'\] must be"),
        ("ridges", [True, 1e-4], "ridge must be a number"),
        ("forgetting", "1", "forgetting must be a number"),
        ("class_weight", "abc", "class_weight must be numbers"),
        ("class_weight", [1.0, 2.0, None], "class_weight must be a number"),
    ],
)
def test_a_wrong_checkpoint_is_refused_whole(key, value, message):
    x, y = samples(30, 4, 3)
    donor, _ = make(4, 3, ridge=7.0)
    donor.update(x, y)
    solver, linear = make(4, 3)
    before = all_of(solver, linear)
    if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
        value = value.double()
    with pytest.raises(ValueError, match=message):
        solver.load_state_dict(donor.state_dict() | {key: value})
    assert_same(all_of(solver, linear), before)


def test_health_and_deviations_are_those_of_the_curvature():
    x, y = samples(2000, 5, 3)
    x[:, 2] = 0
    solver, linear = make(5, 3)
    remembered, seen, p = 0.0, 0, 6
    for i in range(0, 2000, 4):
        solver.update(x[i : i + 4], y[i : i + 4])
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


def test_forgetting_holds_the_effective_samples_down():
    x, y = samples(3000, 4, 3)
    solver, _ = make(4, 3, forgetting=0.9)
    for i in range(0, 3000, 5):
        solver.update(x[i : i + 5], y[i : i + 5])
    assert solver.health()["effective_samples"] == pytest.approx(50)


def test_plain_and_captured_updates_mix_and_a_recording_holds_as_long_as_its_key():
    x, y = samples(60, 4, 3)
    solver, linear = make(4, 3)
    other, other_linear = make(4, 3)
    keys = set()
    for i in range(0, 60, 6):
        rows = slice(i, i + 6)
        if i % 18:
            solver.update(x[rows], y[rows])
        else:
            keys.add(solver.prepare_capture())
            token, before = solver.checkpoint(), all_of(solver, linear)
            assert bool(solver.update_captured(x[rows], y[rows]))
            solver.rollback(token)
            assert_same(all_of(solver, linear), before)
            keys.add(solver.prepare_capture())
            assert bool(solver.update_captured(x[rows], y[rows]))
            solver.finish_captured()
        other.update(x[rows], y[rows])
    assert_same(all_of(solver, linear), all_of(other, other_linear))
    assert len(keys) == 1  # whatever happened between them, recordings read and write the same memory
    solver.forgetting = 0.9
    assert solver.prepare_capture() not in keys
    solver.update(x[:6], y[:6])
    with pytest.raises(RuntimeError, match=r"needs prepare_capture\(\) before it"):
        solver.update_captured(x[:6], y[:6])


def test_the_state_follows_the_head():
    x, y = samples(30, 4, 3)
    solver, _ = make(4, 3)
    solver.update(x, y)
    solver.to("meta")
    tensors = [value for value in solver.state_dict().values() if isinstance(value, torch.Tensor)]
    assert {tensor.device.type for tensor in (*tensors, solver.covariance())} == {"meta"}


# ---------------------------------------------------------------------- in SepSA


def spirals(n=900):
    generator = torch.Generator().manual_seed(3)
    y = torch.randint(3, (n,), generator=generator)
    r = torch.rand(n, generator=generator)
    angle = 4 * r + 2 * math.pi / 3 * y
    return torch.stack([r * angle.cos(), r * angle.sin()], 1), y


@pytest.mark.parametrize(("base", "lr"), [(torch.optim.Adam, 1e-2), (torch.optim.SGD, 0.3)])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_it_drops_into_sepsa(base, lr, fraction):
    x, y = spirals()
    t = one_hot(y, 3).float()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3))
    optimizer = SepSA(model, base, solver=SoftmaxNewton(), lr=lr)
    optimizer.head_fraction = fraction
    step = optimizer.capture(x[:50], t[:50])
    for _ in range(20):
        for i in range(0, 900, 50):
            step(x[i : i + 50], t[i : i + 50])
    assert cross_entropy(model(x), y) < 0.25  # chance is 1.1
    if fraction == 1.0:
        before = optimizer.solver.steps
        with optimizer.observe(y):
            loss = cross_entropy(model(x), y)
        assert loss.item() == pytest.approx(optimizer.solver.loss(model(x), y).item())
        assert optimizer.solver.steps == before + 1
