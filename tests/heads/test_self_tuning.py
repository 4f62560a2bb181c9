"""The self-tuning bank: each member is the RLS of its settings, and the score that chooses is honest."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss

from sepsa import RLS, SepSA
from sepsa.heads import self_tuning
from sepsa.heads.backends.choose import force
from sepsa.heads.base.repeated_samples import BatchSplit, split_batch
from sepsa.heads.math import candidates
from sepsa.heads.self_tuning import SelfTuningRLS

AUTO = {"ridge": "auto", "forgetting": "auto"}


@pytest.fixture(params=["numba", "torch"], autouse=True)
def backend(request):
    """Both backends: small heads on a CPU would only ever use the compiled one."""
    with force(request.param):
        yield


def make(k, m=1, bias=True, seed=0, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    linear = nn.Linear(k, m, bias=bias, dtype=dtype)
    return RLS(**(options or AUTO)).bind(linear), linear


def weights(solver):
    linear = solver.linear
    return torch.cat([linear.weight, linear.bias[:, None]], 1) if linear.bias is not None else linear.weight


def bits(solver, linear):
    state = solver.state_dict() | {f"head.{k}": v.clone() for k, v in linear.state_dict().items()}
    return pickle.dumps({k: v.numpy().tobytes() if isinstance(v, torch.Tensor) else v for k, v in state.items()})


# ---------------------------------------------------------------------- each member is an RLS


@settings(max_examples=25, deadline=None)
@given(
    k=st.integers(1, 9),
    m=st.integers(1, 3),
    bias=st.booleans(),
    sizes=st.lists(st.sampled_from([1, 1, 2, 7, 30]), min_size=1, max_size=25),
    weighted=st.booleans(),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    seed=st.integers(0, 10**6),
)
def test_every_member_is_the_rls_of_its_settings(k, m, bias, sizes, weighted, scale, seed):
    solver, linear = make(k, m, bias, seed)
    start, plain = copy.deepcopy(linear), []
    rng = np.random.default_rng(seed)
    for n in sizes:
        x, y = torch.as_tensor(scale * rng.normal(size=(n, k))), torch.as_tensor(rng.normal(size=(n, m)))
        omega = torch.as_tensor(rng.uniform(0, 2, size=n)) if weighted else None
        solver.update(x, y, omega)
        plain = plain or [RLS(ridge=r, forgetting=lam).bind(copy.deepcopy(start)) for lam, r in solver.members]
        for one in plain:
            one.update(x, y, omega)
    for j, one in enumerate(plain):
        torch.testing.assert_close(solver.weights()[j], weights(one), rtol=1e-8, atol=1e-8)
    driving = plain[solver._state.active]
    torch.testing.assert_close(weights(solver), weights(driving), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(solver.covariance(), driving.covariance(), rtol=1e-7, atol=1e-12)
    assert (solver.ridge, solver.forgetting) == (driving.ridge, driving.forgetting)
    assert (solver.steps, solver.samples) == (driving.steps, pytest.approx(driving.samples))
    x = torch.as_tensor(scale * rng.normal(size=(4, k)))
    if driving.samples > 0.1:
        got, want = solver.predict(x, return_std=True), driving.predict(x, return_std=True)
        torch.testing.assert_close(got.mean, want.mean, rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(got.std, want.std, rtol=1e-3, atol=1e-6)


def test_one_setting_alone_may_be_auto():
    solver, _ = make(3, ridge=2.0, forgetting="auto")
    assert {r for _, r in solver.members} == {2.0}
    assert len(solver.members) == 3
    assert len(make(3)[0].members) == 6
    assert repr(solver) == 'RLS(ridge=2, forgetting="auto", head=3->1)'
    solver, _ = make(3, ridge="auto", forgetting=0.95)
    assert {lam for lam, _ in solver.members} == {0.95}
    assert isinstance(solver, SelfTuningRLS)
    assert not isinstance(RLS(), SelfTuningRLS)
    with pytest.raises(ValueError, match=r"forgetting must be in \(0, 1\], got 1.2"):
        RLS(ridge="auto", forgetting=1.2)
    with pytest.raises(TypeError, match="ridge must be a number"):
        RLS(ridge="automatic")


def test_a_moved_head_moves_every_member():
    solver, linear = make(4, 2)
    x, y = torch.randn(30, 4, dtype=torch.float64), torch.randn(30, 2, dtype=torch.float64)
    start = copy.deepcopy(linear)
    solver.update(x, y)
    plain = [RLS(ridge=r, forgetting=lam).bind(copy.deepcopy(start)) for lam, r in solver.members]
    for one in plain:
        one.update(x, y)
    delta = torch.randn(2, 4, dtype=torch.float64)
    with torch.no_grad():
        for head in (linear, *(one.linear for one in plain)):
            head.weight += delta
    x, y = torch.randn(30, 4, dtype=torch.float64), torch.randn(30, 2, dtype=torch.float64)
    solver.update(x, y)
    for j, one in enumerate(plain):
        one.update(x, y)
        torch.testing.assert_close(solver.weights()[j], weights(one), rtol=1e-8, atol=1e-8)


def test_the_ridge_follows_the_size_of_the_features():
    """Features in other units, with a prior in those units: the same predictions and the same choices."""
    torch.manual_seed(0)
    x, y = torch.randn(200, 5, dtype=torch.float64), torch.randn(200, 1, dtype=torch.float64)
    one, head = make(5, bias=False)
    scaled = copy.deepcopy(head)
    with torch.no_grad():
        scaled.weight /= 1000
    other = RLS(**AUTO).bind(scaled)
    other._salt = one._salt  # the same samples held out
    for i in range(0, 200, 4):
        one.update(x[i : i + 4], y[i : i + 4], identity=x[i : i + 4])
        other.update(1000 * x[i : i + 4], y[i : i + 4], identity=x[i : i + 4])
    torch.testing.assert_close(scaled.weight * 1000, head.weight, rtol=1e-9, atol=1e-9)
    assert [c.step for c in one.chosen] == [c.step for c in other.chosen]


# ---------------------------------------------------------------------- it chooses well, and honestly


@pytest.mark.parametrize("backend", ["numba"], indirect=True)
@pytest.mark.parametrize("seeds", [1, pytest.param(3, marks=pytest.mark.long)])
def test_it_follows_a_jump_and_remembers_all_in_between(seeds):
    """Beside forgetting 1 at rest, and back to the error before the jump within 300 samples of it."""
    rest, back = [], []
    for seed in range(seeds):
        torch.manual_seed(seed)
        x, truth = torch.randn(2400, 6), torch.randn(2, 6, 1)
        y = torch.cat([x[:2000] @ truth[0], x[2000:] @ truth[1]]) + 0.5 * torch.randn(2400, 1)
        errors = []
        for options in (AUTO, {"ridge": 1.0}):
            solver, head = make(6, seed=seed, dtype=torch.float32, **options)
            error = []
            with torch.no_grad():
                for i in range(len(x)):
                    error.append(float((head(x[i]) - y[i]).square()))
                    solver.update(x[i : i + 1], y[i : i + 1])
            errors.append(error)
        auto, one = np.array(errors)
        rest.append(auto[500:2000].mean() / one[500:2000].mean())
        back.append(auto[2300:].mean() / auto[500:2000].mean())
        assert one[2300:].mean() > 3 * one[500:2000].mean()
    assert np.mean(rest) <= 1.05
    assert np.mean(back) <= 1.2


def test_it_follows_a_jump_without_any_noise():
    torch.manual_seed(0)
    x, truth = torch.randn(900, 4, dtype=torch.float64), torch.randn(2, 4, 1, dtype=torch.float64)
    y = torch.cat([x[:600] @ truth[0], x[600:] @ truth[1]])
    solver, head = make(4)
    for i in range(900):
        solver.update(x[i : i + 1], y[i : i + 1])
    assert solver.forgetting < 1
    assert (head(x[600:]) - y[600:]).square().mean().item() < 0.01  # what the ridge leaves


def rank_correlation(one, other):
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return np.corrcoef(*ranks)[0, 1]


def noise_passes(honest, monkeypatch, seed=0, n=60, k=30, epochs=40):
    """Epochs over targets that are all noise, where the largest ridge is right; and the true errors at new samples."""
    if not honest:
        monkeypatch.setattr(self_tuning, "split_batch", lambda *_: BatchSplit(None, [], [], [], 0, 50))
    rng = np.random.default_rng(seed)
    x, y = torch.as_tensor(rng.normal(size=(n, k))), torch.as_tensor(rng.normal(size=(n, 1)))
    head = nn.Linear(k, 1, dtype=torch.float64)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    solver = RLS(**AUTO).bind(head)
    for _ in range(epochs):
        order = torch.as_tensor(rng.permutation(n))
        for rows in order.split(10):
            solver.update(x[rows], y[rows])
    # The noise has variance 1, so W errs by 1 + ||W||² at a new sample.
    return solver, 1 + solver.weights().square().sum((1, 2))


def test_epochs_over_noise_do_not_flatter_the_members_that_remember_it(monkeypatch):
    solver, truth = noise_passes(True, monkeypatch)
    scores = list(solver.scores.values())
    assert solver.ridge == 1000.0
    assert float(truth[solver._state.active]) <= 1.1 * float(truth.min())
    assert rank_correlation(scores, truth.tolist()) > 0.5


def test_the_error_before_learning_alone_would_flatter_them(monkeypatch):
    """What the test above forbids happens without the held-out samples."""
    solver, truth = noise_passes(False, monkeypatch)
    scores = list(solver.scores.values())
    assert solver.ridge < 1000.0
    assert float(truth[solver._state.active]) > 1.5 * float(truth.min())
    assert rank_correlation(scores, truth.tolist()) < 0


def test_a_held_out_sample_is_scored_as_if_it_had_never_been_learned():
    """e / (1 - w φᵀA⁻¹φ) against a head that in fact never learned the sample."""
    torch.manual_seed(3)
    x, y = torch.randn(20, 4, dtype=torch.float64), torch.randn(20, 1, dtype=torch.float64)
    for lam in (1.0, 0.9):
        solver, head = make(4, ridge="auto", forgetting=lam)
        start = copy.deepcopy(head)
        solver.update(x[:1], y[:1])  # the first sample of all is in the fold
        solver.update(x[1:], y[1:])
        state = solver._state
        split = split_batch(solver._seen, state.steps, state.first, state.unrepeated, solver._salt, x[:1], y[:1], 1)
        assert split.held_out == [0]
        assert split.ages == [1]
        before = state.score * candidates.FADING
        Phi = torch.cat([x[:1], torch.ones_like(x[:1, :1])], 1)
        after = solver._updated(state, Phi, y[:1], split, Phi.dtype).statistics.score
        for j, (_, r) in enumerate(solver.members):
            without = RLS(ridge=r, forgetting=lam).bind(copy.deepcopy(start))
            without.update(x[:1], y[:1], torch.zeros(1, dtype=torch.float64))
            without.update(x[1:], y[1:])
            error = (without.predict(x[:1]) - y[:1]).square()
            cap = candidates.OUTLIER * min(solver.scores.values())
            assert float((after - before)[j, -1]) == pytest.approx(min(float(error), cap), rel=1e-8)


def test_what_is_held_out_and_what_is_remembered(monkeypatch):
    solver, head = make(3)
    x, y = torch.randn(300, 3, dtype=torch.float64), torch.randn(300, 1, dtype=torch.float64)
    solver.update(x, y)
    assert solver.held_out is None
    assert solver.samples == 300
    known = len(solver._seen)
    assert 10 < known < 60
    before = head.weight.clone()
    solver.update(x, y)
    assert int(solver.held_out.sum()) == known
    assert solver.samples == pytest.approx(600 - known if solver.forgetting == 1 else solver.samples)
    assert not torch.equal(before, head.weight)
    held = solver.held_out.clone()
    state = {k: v.clone() for k, v in solver.state_dict().items() if k == "M"}
    solver.update(x[held], y[held])  # nothing but held-out samples: nothing is learned
    assert all(torch.equal(state[k], solver.state_dict()[k]) for k in state)
    monkeypatch.setattr(self_tuning, "_SEEN_LIMIT", known)
    solver.update(torch.randn(300, 3, dtype=torch.float64), y)
    assert len(solver._seen) == known
    with pytest.raises(ValueError, match="identity must have one row a sample"):
        solver.update(x, y, identity=x[:7])


# ---------------------------------------------------------------------- state


def lessons(k=5, m=2, n=60, passes=3):
    torch.manual_seed(5)
    x, y = torch.randn(n, k), torch.randn(n, m)
    return [(x[i : i + 6], y[i : i + 6]) for _ in range(passes) for i in range(0, n, 6)]


def test_a_checkpoint_continues_bit_by_bit():
    data = lessons()
    one, head = make(5, 2, dtype=torch.float32)
    for x, y in data[:17]:
        one.update(x, y)
    file = io.BytesIO()
    torch.save({"solver": one.state_dict(), "head": head.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, copied = make(5, 2, seed=9, dtype=torch.float32)
    copied.load_state_dict(saved["head"])
    other.load_state_dict(saved["solver"])
    pickled = pickle.loads(pickle.dumps(one))
    for x, y in data[17:]:
        for solver in (one, other, pickled):
            solver.update(x, y)
    assert bits(one, head) == bits(other, copied) == bits(pickled, pickled.linear)
    assert one.chosen == other.chosen
    assert one.chosen[-1][1:] == (one.forgetting, one.ridge)


def test_a_state_of_another_kind_is_refused_whole():
    solver, head = make(5, 2)
    for x, y in lessons()[:4]:
        solver.update(x.double(), y.double())
    before = bits(solver, head)
    good = solver.state_dict()
    plain = RLS().bind(nn.Linear(5, 2))
    bad = [
        plain.state_dict(),
        good | {"M": good["M"][:1]},
        good | {"W": good["W"] * torch.nan},
        good | {"seen": torch.zeros(3)},
        good | {"history": None},
    ]
    for state in bad:
        with pytest.raises(ValueError, match="state_dict"):
            solver.load_state_dict(state)
        assert bits(solver, head) == before


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e200])
@pytest.mark.parametrize("where", ["features", "targets", "head"])
def test_bad_input_changes_nothing(where, value):
    solver, head = make(5, 2)
    for x, y in lessons()[:4]:
        solver.update(x.double(), y.double())
    before = bits(solver, head)
    x, y = torch.randn(6, 5, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    if where == "head":
        if value == 1e200:
            return
        saved = copy.deepcopy(head.state_dict())
        with torch.no_grad():
            head.weight[0, 0] = value
    else:
        (x if where == "features" else y)[2, 0] = value
    with pytest.raises(ValueError, match="nothing was learned"):
        solver.update(x, y)
    if where == "head":
        head.load_state_dict(saved)
    assert bits(solver, head) == before


def test_what_it_refuses():
    solver, _ = make(3)
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 1, dtype=torch.float64)
    solver.update(x, y)
    for beyond in ("unlearn", "merge", "delta_since"):
        assert not hasattr(solver, beyond)
    with pytest.raises(TypeError, match=r"other must be an RLS or a Delta, .* got SelfTuningRLS"):
        make(3, ridge=1.0)[0].merge(solver)


# ---------------------------------------------------------------------- inside SepSA


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_sepsa_tells_samples_apart_by_the_models_inputs(fraction):
    """The body moves and its features with it, yet the second pass finds the samples again and keeps some from it."""
    model = network()
    optimizer = SepSA(model, torch.optim.SGD, lr=1e-2, solver=RLS(**AUTO))
    optimizer.head_fraction = fraction
    torch.manual_seed(1)
    x, y = torch.randn(200, 4), torch.randn(200, 2)
    optimizer.learn(x, y)
    assert optimizer.solver.held_out is None
    features = []
    keep = model[1].register_forward_hook(lambda module, args, out: features.append(out))
    with optimizer.observe(y):
        loss = mse_loss(model(x), y)
    features[0].retain_grad()
    loss.backward()
    keep.remove()
    held = optimizer.solver.held_out
    assert held is not None
    silent = (features[0].grad == 0).all(1)
    assert int(silent.sum()) == int(held.sum()) > 3
    if fraction == 1.0:
        assert torch.equal(silent, held)


@pytest.mark.parametrize("base", [torch.optim.Adam, torch.optim.SGD])
def test_it_drops_into_sepsa(base):
    model = network()
    optimizer = SepSA(model, base, lr=1e-3, solver=RLS(**AUTO))
    torch.manual_seed(1)
    x = torch.randn(128, 4)
    y = torch.stack([x.sum(1), x[:, 0] * x[:, 1]], 1)
    for _ in range(30):
        for i in range(0, 128, 16):
            optimizer.learn(x[i : i + 16], y[i : i + 16])
    assert mse_loss(model(x), y).item() < 0.3
    other_model = network(1)
    other = SepSA(other_model, base, lr=1e-3, solver=RLS(**AUTO))
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one in (optimizer, other):
        one.learn(x[:16], y[:16])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other_model.parameters(), strict=True))
    copied = pickle.loads(pickle.dumps(optimizer))
    copied.learn(x[16:32], y[16:32])
    optimizer.learn(x[16:32], y[16:32])
    pairs = zip(model.parameters(), copied.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("backend", ["numba"], indirect=True)  # the test itself uses both
@pytest.mark.parametrize("settings", [{}, {"ridge": 0.5}, {"forgetting": 0.9}], ids=["both", "forgetting", "ridge"])
@pytest.mark.parametrize(
    ("k", "m", "bias", "n"), [(1, 1, False, 1), (9, 2, True, 1), (30, 3, True, 12), (95, 1, True, 8)]
)
def test_the_compiled_update_is_that_of_torch(settings, k, m, bias, n, monkeypatch):
    pytest.importorskip("numba")
    torch.manual_seed(0)
    linear = nn.Linear(k, m, bias=bias)
    one, two = SelfTuningRLS(**settings).bind(linear), SelfTuningRLS(**settings).bind(copy.deepcopy(linear))
    X, Y = torch.randn(8, k), torch.randn(8, m)
    held = 0
    for i in range(40):
        rows = torch.randint(8, (n,))
        features = X[rows] + 0.01 * i  # they move, and the samples come again
        for solver, backend in ((one, "numba"), (two, "torch")):
            with force(backend):
                assert solver.backend == backend
                solver.update(features, Y[rows], identity=X[rows])
        held += 0 if one.held_out is None else int(one.held_out.sum())
    assert held  # some were scored as if they had never been learned
    for name in ("M", "N", "W", "factor", "score"):
        mine, theirs = getattr(one._state, name), getattr(two._state, name)
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")
    assert one._state[5:] == two._state[5:]
    torch.testing.assert_close(linear.weight, two.linear.weight)


def test_what_rounding_makes_indefinite_is_learned_all_the_same():
    linear = nn.Linear(3, 1, bias=False)
    solver = SelfTuningRLS(ridge=1e-30, forgetting="auto").bind(linear)
    x = 1e8 * torch.ones(4, 3)
    for _ in range(3):
        solver.update(x, torch.ones(4, 1))
    torch.testing.assert_close(linear(x), torch.ones(4, 1), rtol=1e-3, atol=1e-3)
