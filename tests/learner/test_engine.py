"""The compiled engine against SepSA in PyTorch, step by step, and what a stream may do to it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from plain_learner import Engine, StreamLearner
from reference import covariance_of
from sepsa import RLS, NotFinite, SepSA
from sepsa.learner.arithmetic import body
from sepsa.learner.engine.core import layers
from sepsa.learner.experts import frame
from sepsa.learner.options import ACTIVATIONS, OPTIMIZERS, EngineOptions
from sepsa.learner.stream_learner import WARM_UP


class Cosine(nn.Module):
    def forward(self, x):
        return 2**0.5 * torch.cos(x)


MODULES = {"fourier": Cosine, "identity": nn.Identity, "relu": nn.ReLU, "gelu": nn.GELU}


def stream(n, d=5, m=2, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, d)).astype(np.float32).astype(float)  # the network sees float32: so no input is rounded
    return X, np.sin(X[:, :m]) + X[:, m : 2 * m] ** 2 + 0.1 * rng.standard_normal((n, m))


class Twin(nn.Module):
    """The engine's network in torch, float64, from the same weights."""

    def __init__(self, engine, activation, skip):
        super().__init__()
        modules = []
        for weight, bias in layers(engine._core):
            modules += [linear(weight, bias), MODULES[activation]()]
        self.body, self.skip = nn.Sequential(*modules), skip and bool(modules)
        self.head = linear(engine.memory("W", "heads")[:, :-1], engine.memory("W", "heads")[:, -1])

    def forward(self, x):
        h = self.body(x)
        return self.head(torch.cat([h, x], -1) if self.skip else h)


def linear(weight, bias):
    layer = nn.Linear(weight.shape[1], weight.shape[0], dtype=torch.float64)
    layer.load_state_dict({"weight": torch.tensor(weight), "bias": torch.tensor(bias)})
    return layer


def twins(hidden=(12,), activation="relu", optimizer="adam", batch=1, skip=False, ridge=1.0, forgetting=1.0):
    options = {"lr": 3e-3, "weight_decay": 1e-3}
    engine = Engine(
        5, 2, hidden, activation=activation, optimizer=optimizer, batch=batch, skip=skip, ridge=ridge,
        forgetting=forgetting, seed=3, **options,
    )  # fmt: skip
    for part in ("W", "PRIOR"):
        engine.memory(part, "heads")[:] = np.random.default_rng(4).standard_normal(engine.memory("W", "heads").shape)
    model = Twin(engine, activation, skip)
    solver = RLS(ridge=ridge, forgetting=forgetting, bias_ridge="ridge")
    if not hidden:
        return engine, model, solver.bind(model.head), None
    betas = (OPTIMIZERS[optimizer], 0.999)
    return engine, model, solver, SepSA(model, torch.optim.Adam, solver=solver, betas=betas, **options)


def torch_learn(model, solver, optimizer, X, Y, batch):
    """What the engine must do, in the library's own words; returns the predictions made before each batch."""
    before = []
    for x, y in zip(torch.tensor(X).split(batch), torch.tensor(Y).split(batch), strict=True):
        before.append(model(x).detach())
        if optimizer is None:
            solver.update(x, y)
        else:
            optimizer.learn(x, y)
    return torch.cat(before).numpy()


def assert_same(engine, model, solver, got, wanted):
    tolerance = 1e-3 if engine.form.hidden else 1e-8  # the body is float32, whose 6e-8 grows in a hundred steps
    np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance)
    theirs = [layer for layer in (*model.body, model.head) if isinstance(layer, nn.Linear)]
    mine = [*layers(engine._core), (engine.memory("W", "heads")[:, :-1], engine.memory("W", "heads")[:, -1])]
    for (weight, bias), layer in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(weight, layer.weight.detach(), rtol=0, atol=tolerance)
        np.testing.assert_allclose(bias, layer.bias.detach(), rtol=0, atol=tolerance)
    np.testing.assert_allclose(covariance_of(engine), solver.covariance(), rtol=0, atol=tolerance)
    np.testing.assert_allclose(engine.memory("ENERGY", "heads", 0), solver.state_dict()["energy"], rtol=tolerance)
    assert engine.samples == pytest.approx(solver.samples)


OPTIONS = [
    *({"activation": name} for name in ACTIVATIONS),
    *({"optimizer": name} for name in OPTIMIZERS),
    *({"optimizer": name, "activation": "gelu", "batch": 8} for name in OPTIMIZERS),
    *({"forgetting": lam, "batch": batch} for lam in (0.999, 0.9, 0.5) for batch in (1, 3, 32)),
    *({"hidden": hidden, "activation": "gelu"} for hidden in ((), (1,), (7, 6), (5, 4, 9, 3))),
    *({"hidden": hidden, "skip": True} for hidden in ((), (6,), (4, 8))),
    {"ridge": 1e-3},
    {"ridge": 1e3, "forgetting": 0.95},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()))
def test_equals_sepsa_in_torch(options):
    X, Y = stream(100)
    engine, model, solver, optimizer = twins(**options)
    wanted = torch_learn(model, solver, optimizer, X, Y, options.get("batch", 1))
    assert_same(engine, model, solver, engine.learn(X, Y), wanted)


# GELU and the cosine are series, exact to float32's rounding.
@pytest.mark.parametrize(
    ("activation", "tolerance"), [("relu", 1e-12), ("identity", 1e-12), ("gelu", 1e-5), ("fourier", 1e-5)]
)
@pytest.mark.parametrize(("optimizer", "hidden", "batch"), [("auto", (6,), 1), ("adam", (4, 3, 5), 4)])
def test_the_body_as_plain_python_in_float64_equals_torch(activation, tolerance, optimizer, hidden, batch):
    rng = np.random.default_rng(0)
    X, Y = rng.standard_normal((20 * batch, 5)), rng.standard_normal((20 * batch, hidden[-1]))
    pairs = [
        (nn.Linear(a, b, dtype=torch.float64), MODULES[activation]())
        for a, b in zip((5, *hidden), hidden, strict=False)
    ]
    model = nn.Sequential(*(layer for pair in pairs for layer in pair))
    adam = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(OPTIMIZERS[optimizer], 0.999), weight_decay=1e-3)

    def parameters():
        """As the kernels have them: of each layer the weights of each input, then the biases."""
        return np.concatenate([part.detach().numpy().T.ravel() for part in model.parameters()])

    theta, widths = parameters(), np.array(hidden)
    first, second, gradient = (np.zeros(theta.size) for _ in range(3))
    values = EngineOptions(optimizer=optimizer, lr=3e-3, weight_decay=1e-3).of_kernels()
    options = SimpleNamespace(**dict(zip(frame.OPTIONS.fields, values, strict=True)))
    counts = SimpleNamespace(beta1_power=1.0, beta2_power=1.0)
    mean, scale, top = np.zeros(5), np.ones(5), hidden[-1]
    for start in range(0, len(X), batch):
        for i in range(batch):
            units, slopes = np.zeros((2, 5 + sum(hidden)))
            phi, delta = np.zeros(2 * top + 7), np.zeros(2 * max(hidden))
            x, y = X[start + i], Y[start + i]
            body.forward(theta, widths, ACTIVATIONS[activation], mean, scale, mean, mean, False, x, units, slopes, phi)
            delta[:top] = phi[:top] - y
            body.backward(theta, widths, units, slopes, delta, gradient, i == 0)
        body.adam_step(theta, first, second, gradient, options, counts)
        adam.zero_grad()
        rows = slice(start, start + batch)
        (0.5 * (model(torch.tensor(X[rows])) - torch.tensor(Y[rows])) ** 2).sum().backward()
        adam.step()
    np.testing.assert_allclose(theta, parameters(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("batch", [1, 4])
def test_weights_and_leverages_are_those_of_rls_and_a_weight_of_zero_is_no_sample(batch):
    X, Y = stream(40)
    weight = np.random.default_rng(1).uniform(0, 2, 40)
    engine, model, solver, _ = twins(hidden=(), batch=batch, forgetting=0.9)
    engine.learn(X, Y, weight)
    for rows in torch.arange(40).split(batch):
        solver.update(torch.tensor(X)[rows], torch.tensor(Y)[rows], torch.tensor(weight)[rows])
    np.testing.assert_allclose(engine.memory("W", "heads")[:, :-1], model.head.weight.detach(), atol=1e-8)
    assert engine.samples == pytest.approx(solver.samples)
    leverage = np.empty(40)
    mean = engine.predict(X, leverage)
    Phi = np.c_[X, np.ones(40)]
    np.testing.assert_allclose(leverage, ((Phi @ solver.covariance().numpy()) * Phi).sum(1), rtol=1e-8)
    np.testing.assert_allclose(mean, Phi @ engine.memory("W", "heads").T, rtol=1e-10)
    one, other = (Engine(5, 2, (6,), forgetting=0.99, seed=2) for _ in range(2))
    one.learn(X, Y, np.where(weight < 0.5, 0.0, 1.0))
    other.learn(X[weight >= 0.5].copy(), Y[weight >= 0.5].copy())
    assert np.array_equal(one.memory.vector, other.memory.vector)


@pytest.mark.parametrize("n", [1, 7])
def test_a_body_that_diverged_is_refused_and_nothing_changes(n):
    X, Y = stream(n)
    engine, settling = Engine(5, 2, (6,), seed=2), StreamLearner(5, 2, regression=True, hidden=(8,), skip=True)
    engine.learn(*stream(20))
    layers(engine._core)[0][0][:] = 1e38
    settling.learn(*stream(20))
    before, first = engine.memory.vector.copy(), settling.engine.memory.vector.copy()
    with pytest.raises(NotFinite, match="nothing was learned; lower the learning rate"):
        engine.learn(X * 1e3, Y)
    with pytest.raises(NotFinite):
        settling.learn(np.full((n, 5), 1e300), Y)
    assert np.array_equal(engine.memory.vector, before)
    assert np.array_equal(settling.engine.memory.vector, first)
    assert settling.rows == 20


def test_the_curvature_stays_positive_where_features_are_huge_and_nearly_dependent():
    rng = np.random.default_rng(0)
    line = rng.standard_normal((3000, 1)) * 1e6
    X = np.c_[line, line + 1e-3 * rng.standard_normal((3000, 1)), line * 1e3, rng.standard_normal((3000, 2))]
    engine = Engine(5, 1, (), ridge=1e-6)
    engine.learn(X, X[:, :1] - X[:, 3:4])
    assert (engine.memory("D", "heads") > 0).all()
    assert np.isfinite(engine.memory.vector).all()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"inputs": 0}, ValueError, "inputs must be an integer of at least 1, got 0"),
        ({"hidden": (4.5,)}, TypeError, "hidden must be an integer of at least 1, got 4.5"),
        ({"activation": "swish"}, ValueError, "activation must be one of 'identity', .*, got 'swish'"),
        ({"lr": 0}, ValueError, r"lr must be in \(0, inf\), got 0"),
        ({"weight_decay": -1.0}, ValueError, "weight_decay must be"),
        ({"optimizer": "sgd"}, ValueError, "optimizer must be one of 'adam', 'auto', got 'sgd'"),
    ],
)
def test_says_what_is_wrong_with_its_settings(options, error, words):
    with pytest.raises(error, match=words):
        Engine(**{"inputs": 5, "outputs": 2} | options)


def test_many_threads_may_predict_at_once():
    engine = Engine(5, 2, (40,), seed=2)
    engine.learn(*stream(50))
    X, _ = stream(4000, seed=1)
    wanted = engine.predict(X)
    with ThreadPoolExecutor(4) as pool:
        for said in pool.map(engine.predict, [X] * 16):
            assert np.array_equal(said, wanted)


@pytest.mark.parametrize("batch", [1, 4])
def test_an_input_that_moves_is_seen_by_all_rows_of_its_batch(batch):
    X, Y = stream(16)
    late, awake = (Engine(5, 2, (6,), batch=batch, standardize=True, seed=2) for _ in range(2))
    for engine in (late, awake):
        engine.set_scaling(np.zeros(5), np.ones(5))
        engine.set_output_weights(1.0)
    late.set_scaling(np.zeros(1), np.zeros(1), first=4)
    X[0, 4] = 2.0
    awake.set_scaling(np.zeros(1), np.full(1, 0.5), first=4)
    late.learn(X, Y)
    awake.learn(X, Y)
    assert np.array_equal(late.memory.vector, awake.memory.vector)


@pytest.mark.parametrize(("hidden", "skip"), [((), False), ((6,), False), ((6, 4), True)])
def test_a_new_output_or_input_is_as_if_it_had_been_zero(hidden, skip):
    X, Y = stream(50)
    Y[:, 1] = 0
    grown, whole = Engine(5, 1, hidden, skip=skip, seed=2), Engine(5, 2, hidden, skip=skip, seed=2)
    # The body's loss is a mean over outputs, so its gradient halves; without a body the two are the same.
    grown.set_output_weights(0.5)
    grown.learn(X, Y[:, :1].copy())
    whole.learn(X, Y)
    grown.resize(5, 2)
    np.testing.assert_allclose(grown.predict(X), whole.predict(X), rtol=0, atol=1e-6)
    np.testing.assert_allclose(covariance_of(grown), covariance_of(whole), rtol=0, atol=1e-6)
    X, Y = stream(50)
    X[:, 4] = 0
    grown, whole = (Engine(d, 2, hidden, skip=skip, seed=2) for d in (4, 5))
    if hidden:
        layers(whole._core)[0][0][:, :4] = layers(grown._core)[0][0]
        for (weight, bias), (other, shift) in zip(layers(whole._core), layers(grown._core), strict=True):
            bias[:] = shift
            if weight.shape == other.shape:
                weight[:] = other
    grown.learn(X[:, :4].copy(), Y)
    whole.learn(X, Y)
    grown.resize(5, 2)
    np.testing.assert_allclose(grown.predict(X), whole.predict(X), rtol=0, atol=1e-5)
    np.testing.assert_allclose(covariance_of(grown), covariance_of(whole), rtol=0, atol=1e-5)
    assert grown.learn(X, Y).shape == (50, 2)


def raw(n=WARM_UP + 150, seed=0):
    X, Y = stream(n, seed=seed)
    return 50 + X * np.array([1e-3, 1.0, 1e3, 10.0, 1.0]), 1e4 + 200 * Y


def learner(**options):
    return StreamLearner(5, 2, **{"regression": True, "hidden": (8,), "skip": True, "ridge": 10.0} | options)


def test_the_scale_of_the_data_changes_nothing():
    X, Y = raw()
    plain, scaled = learner(), learner()
    a, b = plain.learn(X, Y), scaled.learn(X * 1024 + 3, Y * 2048)
    np.testing.assert_allclose(b / 2048, a, rtol=1e-6)


def test_a_missing_value_is_the_mean_and_a_constant_input_counts_for_nothing_until_it_moves():
    X, Y = raw()
    X[:, 1] = 0.1 + 0.2  # no binary fraction
    one = learner()
    one.learn(X, Y)
    hole, filled = X[:1].copy(), X[:1].copy()
    hole[0, 2], filled[0, 2] = np.nan, one.engine.memory("MEAN", "network")[2]
    assert np.array_equal(one.predict(hole), one.predict(filled))
    assert one.engine.memory("SCALE", "network")[1] == 0
    X[:, 1] = 7.3
    assert np.isfinite(one.predict(X[:1])).all()
    assert np.isfinite(one.learn(X[:3], Y[:3])).all()
    assert one.engine.memory("SCALE", "network")[1] == pytest.approx(1 / 7.0)
