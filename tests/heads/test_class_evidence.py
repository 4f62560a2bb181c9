"""The ridge by evidence of heads for classes: the law, the exactness of a change, and what bad samples get."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import reference
from sepsa import LogisticNewton, SepSA, SoftmaxNewton
from sepsa.heads.cross_entropy import evidence as class_evidence
from sepsa.heads.cross_entropy.math import with_curvature, with_ridge
from sepsa.heads.least_squares.evidence import due, updates_until
from sepsa.heads.run.choose import force
from sepsa.testing import difference, snapshot


def head(k, K, bias=True, seed=0, **options):
    torch.manual_seed(seed)
    linear = nn.Linear(k, K, bias=bias, dtype=torch.float64)
    return SoftmaxNewton(ridge="evidence", **options).bind(linear), linear


def stream(count, n, k=4, K=3, seed=0, scale=1.0, offset=0.0):
    g = torch.Generator().manual_seed(seed)
    truth = torch.randn(max(K, 2), k, generator=g)
    for _ in range(count):
        x = torch.randn(n, k, generator=g)
        yield scale * (x + offset), (x @ truth.T + torch.randn(n, max(K, 2), generator=g)).argmax(1)


# ---------------------------------------------------------------------- the mathematics


@pytest.mark.parametrize("K", [1, 4])
def test_the_law_is_where_the_evidence_of_a_parabola_is_stationary(K):
    rng, p = np.random.default_rng(0), 5
    A = np.cov(rng.normal(size=(p, 40))) * 40
    s, prior = rng.uniform(0.2, 2, K), rng.normal(size=(K, p))
    s = s / s.sum() * min(K, 2)
    minimum = prior + 0.5 * rng.normal(size=(K, p))
    ridge = 1.0
    for _ in range(200):  # of W at this ridge, as `with_ridge` gives it
        D = A + ridge / s.mean() * np.eye(p)
        W = prior + np.linalg.solve(D, A @ (minimum - prior).T).T
        left = np.full(p, ridge / s.mean())
        state = class_evidence.CrossEntropyState(
            *map(torch.tensor, (np.linalg.inv(np.linalg.cholesky(D)), W, prior, s, left, [1.0, 100.0, 0.0])),
            torch.ones(max(K, 2)),
            torch.tensor(left),
        )
        found = class_evidence.evidence_of(state, 1.0, bias=False)
        classes = K / max(K - 1, 1)  # the evidence counts all classes, and the law one less: their sum is free
        ridge = classes * found.determined / found.weights
    h = 1e-4
    values = [reference.log_class_evidence(A, s, minimum, prior, ridge * math.exp(t)) for t in (-h, 0.0, h)]
    slope, bend = (values[2] - values[0]) / (2 * h), (values[2] - 2 * values[1] + values[0]) / h**2
    assert abs(slope / bend) < 1e-6  # Newton's step in log ridge, beside the rounding of values of order 10
    assert bend < 0


@settings(max_examples=40, deadline=None)
@given(
    k=st.integers(1, 6), K=st.integers(1, 5), bias=st.booleans(), weighted=st.booleans(), seed=st.integers(0, 10**6),
    sizes=st.lists(st.integers(1, 12), min_size=4, max_size=40), scale=st.sampled_from([1e-3, 1.0, 30.0]),
    forgetting=st.sampled_from([1.0, 0.99, 0.8]), kappa=st.sampled_from([0.2, 3.0]),
)  # fmt: skip
def test_a_head_is_the_law_spelled_out(k, K, bias, weighted, seed, sizes, scale, forgetting, kappa):
    rng = np.random.default_rng(seed)
    solver, linear = head(k, K, bias, seed, forgetting=forgetting, noise_factor=kappa)
    dense = reference.Dense(reference.weights(linear), 10.0, forgetting, 0.0, None, bias)
    truth = rng.normal(size=(k, max(K, 2)))
    for number, n in enumerate(sizes, 1):
        x = rng.normal(size=(n, k))
        y = (x @ truth + rng.normal(size=(n, max(K, 2)))).argmax(1)
        x = scale * x
        omega = rng.uniform(0, 2, n) if weighted else np.ones(n)
        if number == 1:
            ridge = reference.first_class_ridge(x, omega, K)
            dense.set_ridge(ridge, bias)
        solver.update(torch.tensor(x), torch.tensor(y), torch.tensor(omega) if weighted else None)
        dense.update(reference.with_ones(x, bias), np.eye(max(K, 2))[y], omega)
        if number in (1, 2, 4, 8, 16, 32) or (forgetting < 1 and number % 32 == 0):
            counts = number, dense.seen, bias, forgetting
            old = ridge
            ridge = reference.class_ridge(
                dense.A, dense.left, dense.shares, dense.W, dense.prior, *counts, ridge, kappa
            )
            if ridge != old:
                dense.set_ridge(ridge, bias)
        assert solver.ridge_now == pytest.approx(ridge, rel=1e-6)
        np.testing.assert_allclose(reference.weights(linear), dense.W, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(solver.covariance().numpy() @ dense.A, np.eye(k + bias), atol=1e-6)


@pytest.mark.parametrize("kind", ["T", "A", "several"])
@pytest.mark.parametrize("factor", [1e-4, 0.1, 10.0, 1e6])
def test_another_ridge_gives_the_weights_of_the_parabola_that_has_it(kind, factor):
    torch.manual_seed(0)
    x, y = torch.randn(200, 6).double(), torch.randint(3, (200,))
    if kind == "several":
        solver = LogisticNewton(ridge=2.0).bind(nn.Linear(6, 3).double())
        solver.update(x, nn.functional.one_hot(y).double())
    else:
        solver = SoftmaxNewton(ridge=2.0).bind(nn.Linear(6, 3).double())
        solver.update(x, y)
    state = solver.state if kind != "A" else with_curvature(solver.state)
    new = with_ridge(state, state.ridge * factor)
    assert (new.A is not None) == (kind == "A")
    torch.testing.assert_close(new.ridge_left / state.ridge_left, torch.full_like(state.ridge_left, factor))
    before, after = (with_curvature(each).A for each in (state, new))
    torch.testing.assert_close(
        after, before + torch.diag_embed(new.ridge_left - state.ridge_left), rtol=1e-8, atol=1e-8
    )
    apart = [(each.W - each.prior)[:, None] if kind == "several" else each.W - each.prior for each in (state, new)]
    torch.testing.assert_close(apart[1] @ after, apart[0] @ before, rtol=1e-8, atol=1e-8)
    back = with_ridge(new, state.ridge)
    torch.testing.assert_close(back.W, state.W, rtol=1e-7, atol=1e-7)


def test_outputs_that_learn_separately_share_the_ridge_of_all_of_them():
    torch.manual_seed(0)
    solver = LogisticNewton(ridge="evidence", noise_factor=2.0).bind(nn.Linear(4, 2).double())
    x = torch.randn(512, 4).double()
    y = (x[:, :2] + torch.randn(512, 2) > 0).double()
    y[:128, 1] = math.nan
    for rows in torch.arange(512).split(16):
        solver.update(x[rows], y[rows])
    state = solver.state
    gammas = [4 - float((state.ridge_left[o] * state.T[o].square().sum(0))[:4].sum()) for o in range(2)]
    found = class_evidence.evidence_of(state, 1.0, bias=True)
    assert found.determined == pytest.approx(sum(gammas))
    assert found.weights == pytest.approx(float((state.W - state.prior)[:, :4].square().sum()))
    assert (found.seen, found.rows) == (448, 16)
    best = 2 * found.determined / found.weights
    assert solver.ridge_now / 2 < best < solver.ridge_now * 2


@pytest.mark.parametrize("lam", [1.0, 0.999, 0.97, 0.5])
def test_looks_are_seldom(lam):
    looks = [step for step in range(1, 5000) if due(step - 1, step, lam)]
    assert all(2**e in looks for e in range(12))
    interval = max(32, round(1 / (4 * (1 - lam)))) if lam < 1 else math.inf
    later = [step for step in looks if math.frexp(step)[0] != 0.5]
    assert later == [step for step in range(1, 5000) if lam < 1 and step % interval == 0 and math.frexp(step)[0] != 0.5]
    step = 0
    while step < 3000:  # as captured steps look
        step += updates_until(step, lam)
        assert step in looks


def test_no_unit_matters():
    ridges = []
    for unit in (1e-6, 1.0, 1e6):
        solver, _ = head(4, 3)
        with torch.no_grad():
            solver.linear.weight.div_(unit)
        fresh = SoftmaxNewton(ridge="evidence", bias_ridge=1e-4).bind(solver.linear)
        for x, y in stream(40, 16, scale=unit):
            fresh.update(x, y)
        ridges.append(fresh.ridge_now / unit**2)
    assert ridges[0] == pytest.approx(ridges[1], rel=1e-3)
    assert ridges[2] == pytest.approx(ridges[1], rel=1e-3)


# ---------------------------------------------------------------------- state and use


@pytest.mark.parametrize("make", [SoftmaxNewton, LogisticNewton])
def test_a_state_continues_and_tells_its_ridge(make):
    def new():
        torch.manual_seed(0)
        return make(ridge="evidence", noise_factor=1.5).bind(nn.Linear(4, 3).double())

    batches = [(x.double(), y if make is SoftmaxNewton else nn.functional.one_hot(y, 3)) for x, y in stream(60, 8)]
    solver = new()
    assert repr(solver).startswith(f"{make.__name__}(ridge=evidence, now 10, forgetting=1")
    for x, y in batches[:21]:
        solver.update(x, y)
    other = make().bind(copy.deepcopy(solver.linear))
    other.load_state_dict(solver.state_dict())
    assert (other.ridge, other.noise_factor, other.ridge_now) == ("evidence", 1.5, solver.ridge_now)
    undone = new()
    for number, (x, y) in enumerate(batches):
        if number in (0, 7, 31):  # updates after which the ridge is looked at
            mark = undone.checkpoint()
            undone.update(10 * x, y)
            undone.rollback(mark)
        undone.update(x, y)
        if number >= 21:
            solver.update(x, y)
            other.update(x, y)
    assert not difference(snapshot(solver), snapshot(other))
    assert not difference(snapshot(solver), snapshot(undone))
    assert solver.ridge_now != 10.0
    assert f"evidence, now {solver.ridge_now:.3g}" in repr(solver)
    fixed = make(ridge=2.0).bind(nn.Linear(4, 3).double())
    other.load_state_dict(fixed.state_dict())
    assert other.ridge == other.ridge_now == 2.0


def test_a_look_between_large_blocks_keeps_their_curvature():
    solver, _ = head(70, 4)
    chosen = set()
    for x, y in stream(17, 60, k=70, K=4):
        with force("torch"):
            solver.update(x.double(), y)
        chosen.add(solver.ridge_now)
    assert solver.state.A is not None
    assert len(chosen) > 1


def test_captured_updates_choose_the_ridge_between_replays():
    plain, _ = head(4, 3)
    captured, _ = head(4, 3)
    left = 0
    for x, y in stream(64, 8):
        plain.update(x.double(), y)
        if not left:
            captured.prepare_capture()
            left = captured.replays()
        assert bool(captured.update_captured(x.double(), y))
        captured.finish_captured()
        left -= 1
    captured.state_dict()
    assert captured.ridge_now == pytest.approx(plain.ridge_now, rel=1e-9)
    torch.testing.assert_close(captured.linear.weight, plain.linear.weight, rtol=1e-9, atol=1e-9)
    assert SoftmaxNewton().bind(nn.Linear(2, 2)).replays() is None


@pytest.mark.parametrize(("name", "kind"), [("cross-entropy", SoftmaxNewton), ("logistic", LogisticNewton)])
def test_it_is_the_default(name, kind):
    optimizer = SepSA(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.optim.Adam, solver=name)
    assert type(optimizer.solver) is kind
    assert optimizer.solver.ridge == "evidence"


# ---------------------------------------------------------------------- bad samples


BAD = {
    "one class first": lambda x, y, i: (x, y.clamp(max=0) if i < 6 else y),
    "a class that comes late": lambda x, y, i: (x, y.clamp(max=1) if i < 20 else y),
    "features of zeros first": lambda x, y, i: (x * (i > 8), y),
    "features of zeros": lambda x, y, i: (0 * x, y),
    "offsets": lambda x, y, i: (x + 1e6, y),
    "features that grow": lambda x, y, i: (x * 10.0 ** (i / 5), y),
    "features that shrink": lambda x, y, i: (x * 10.0 ** (-i / 5), y),
    "tiny features": lambda x, y, i: (1e-20 * x, y),
    "huge features": lambda x, y, i: (1e15 * x, y),
    "one class": lambda x, y, i: (x, 0 * y),
}


@pytest.mark.parametrize("n", [1, 8, 300])
@pytest.mark.parametrize("kind", BAD)
def test_every_ridge_is_finite_and_within_its_bounds(kind, n):
    solver, linear = head(4, 3, label_smoothing=0.1 if kind == "one class" else 0.0)
    for i, (x, y) in enumerate(stream(40, n)):
        x, y = BAD[kind](x.double(), y, i)
        weight = torch.full((n,), float(i % 3 > 0), dtype=torch.float64)  # every third update weighs nothing
        solver.update(x, y, weight)
        assert 0 < solver.ridge_now < math.inf
        assert linear.weight.isfinite().all()
        if due(i, i + 1, 1.0) and i:
            found = class_evidence.evidence_of(solver.state, 1.0, bias=True)
            if found.seen >= 8 and found.weights > 0 and found.sample > 0:
                least = found.sample * max(class_evidence.LEAST_SAMPLES, found.rows)
                # A ridge falls by 1e4 at once, and stays where another one would lose digits.
                if kind not in ("features that grow", "features that shrink", "offsets", "features of zeros first"):
                    assert 0.999 * least <= solver.ridge_now
                    assert solver.ridge_now <= 1.001 * max(least, 2 * found.sample * found.remembered)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_coarse_heads_choose_too(dtype):
    linear = nn.Linear(4, 3, dtype=dtype)
    solver = SoftmaxNewton(ridge="evidence").bind(linear)
    for x, y in stream(40, 64):
        solver.update(x.to(dtype), y)
    assert 0 < solver.ridge_now < math.inf
    assert linear.weight.isfinite().all()


def test_a_first_batch_that_is_refused_leaves_nothing():
    solver, _ = head(4, 3)
    before = snapshot(solver)
    x, y = next(stream(1, 8))
    for bad in (x.clone().index_fill_(0, torch.tensor(2), math.nan), x):
        with pytest.raises(ValueError, match="nothing was learned"):
            solver.update(bad.double(), y if bad is not x else y + 9)
    assert solver.ridge_now == 10.0
    assert not difference(before, snapshot(solver))
