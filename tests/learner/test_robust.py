"""What no row may do to a learner, and how it tunes itself: against slow references, and on hostile streams."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from random import Random

import numpy as np
import pytest
import torch

import river_models
from interrupts import interrupt
from plain_learner import Engine, StreamLearner
from reference import RobustHeads, excess_step, quantile_step, tail
from sepsa import FourierFeatures, SepSAClassifier, SepSARegressor
from sepsa.compiled import code
from sepsa.compiled.kernels import CALL, kernel
from sepsa.learner.arithmetic import bounds
from sepsa.learner.arithmetic.body import GELU, activate, cosines
from sepsa.learner.arithmetic.robust import follow_quantile
from sepsa.learner.engine.core import layers
from sepsa.learner.experts import network
from sepsa.learner.stream_learner import WARM_UP
from sepsa.states.tree import leaves

DEFAULT = {"hidden": (64,), "activation": "fourier", "optimizer": "auto", "lr": 3e-3, "ridge": 10.0, "skip": True}
DEFAULT |= {"forgetting": "auto", "loss": "huber"}


def curve(n, seed=0, inputs=5):
    rng = np.random.default_rng(seed)
    X = rng.normal(5, 3, (n, inputs))
    return X, 20 + 3 * X[:, 0] + 5 * np.sin(X[:, 1]) + rng.normal(size=n)


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("inputs", [1, 4])
def test_robust_heads_equal_the_slow_reference(inputs, outputs):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((400, inputs))
    Y = X[:, :1] * [1.0, -2.0][:outputs] + rng.standard_normal((400, outputs))
    Y[200:] += 5.0
    Y[rng.random(400) < 0.05] *= 100
    X[rng.random(400) < 0.03] *= 1e3
    X[:, -1] = np.where(rng.random(400) < 0.5, 0.25, X[:, -1])
    X[250:300] *= 8  # more than one row in fifty, and so are these targets
    Y[300:330] += rng.choice([-40, 40], (30, outputs))
    weight = rng.choice([0.5, 1.0, 1e6], 400, p=[0.3, 0.6, 0.1])
    engine = Engine(inputs, outputs, (), loss="huber", forgetting="auto", ridge=2.0, standardize=True)
    centre = np.arange(inputs) // (inputs - 1 or 1) / 4
    engine.set_scaling(np.zeros(inputs), np.ones(inputs), 0.7, centre)
    engine.set_output_weights(1.0)
    slow = RobustHeads(inputs, outputs, [(ridge, lam) for _, ridge, lam in engine.form.heads])
    slow.centre = centre
    # The reference does not rescale an input, and none of these asks for it.
    expected = np.array([slow.learn(x, y, w) for x, y, w in zip(X, Y, weight, strict=True)])
    # The network sees inputs as float32: 6e-8 of an input of 6, where it is clipped, in a prediction of a few such.
    np.testing.assert_allclose(engine.learn(X, Y, weight), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(engine.chosen["weights"], [head["weight"] for head in slow.heads], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(engine.memory("EXCESS", "network"), slow.excess, rtol=1e-9)
    np.testing.assert_allclose(engine.memory("ERROR", "network")[:, 3], slow.error_excess, rtol=1e-9)
    assert engine.outliers == slow.cut
    assert min(slow.most.max(), slow.error_most.max()) > 4  # so that bounds were raised
    np.testing.assert_allclose(engine.noise_variance(), (slow.error[:, 2] / 1.6448536) ** 2, rtol=1e-5)


@pytest.mark.parametrize("tau", [0.5, 0.9])
def test_a_followed_quantile_has_its_share_above(tau):
    rng = np.random.default_rng(0)
    quantile, run, above = 1e-9, 0.0, []
    for value in np.abs(rng.standard_normal(20000)) * np.where(np.arange(20000) < 10000, 1.0, 1e6):
        above.append(value > quantile)
        expected = quantile_step(value, quantile, run, tau, 0.05)
        quantile, run = follow_quantile(value, quantile, run, tau, 0.05)
        assert (quantile, run) == pytest.approx(expected)
    for half in (above[500:10000], above[10500:]):
        assert np.mean(half) == pytest.approx(1 - tau, abs=0.01)


@kernel
def up(model, row):
    network.rescale_input(model, 1, 4.0)
    return 0


@kernel
def down(model, row):
    network.rescale_input(model, 1, 0.25)
    return 0


@pytest.mark.parametrize("g", [4.0, 0.25])
def test_an_input_rescaled_changes_no_prediction_of_a_linear_head(g):
    X, y = np.random.default_rng(0).standard_normal((2, 200, 3))
    engine = Engine(3, 3, (), loss="huber", forgetting="auto")
    engine.learn(X, y)
    before, now = np.empty((2, len(X)))
    predictions = engine.predict(X, before)
    own = up if g > 1 else down
    workspace = np.zeros(engine.memory.layout.workspace)
    engine._core.kernels.run(CALL(code.address(own)), workspace, X[:1], None, None, y[:1])
    assert engine.memory("SCALE", "network").tolist() == [1.0, 1 / g, 1.0]
    np.testing.assert_allclose(engine.predict(X, now), predictions, rtol=1e-9)
    np.testing.assert_allclose(now, before, rtol=1e-9)


def test_cosines_and_gelu_are_exact_to_float32():
    a = np.linspace(-200, 200, 20001).astype(np.float32)
    value, slope = a.copy(), np.empty_like(a)
    cosines(value, slope)
    np.testing.assert_allclose(value, math.sqrt(2) * np.cos(a.astype(float)), atol=3e-5)
    np.testing.assert_allclose(slope, -math.sqrt(2) * np.sin(a.astype(float)), atol=3e-5)
    wide = torch.linspace(-12, 12, 4001, dtype=torch.float64, requires_grad=True)
    exact = torch.nn.functional.gelu(wide)
    exact.sum().backward()
    narrow = wide.detach().float().numpy()
    slope = np.empty_like(narrow)
    activate(GELU, narrow, slope)
    np.testing.assert_allclose(narrow, exact.detach(), rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(slope, wide.grad, atol=1e-6)


def test_the_module_is_the_engines_body():
    engine = Engine(3, 1, (8,), activation="fourier", skip=True, seed=1)
    ((weight, bias),) = layers(engine._core)
    wide = layers(Engine(3, 1, (2000,), activation="fourier")._core)[0][0]
    assert FourierFeatures(3, 2000).weight.std().item() == pytest.approx(float(wide.std()), rel=0.05)
    module = FourierFeatures(3, 8).double()
    module.load_state_dict({"weight": torch.tensor(weight), "bias": torch.tensor(bias)})
    for part in ("W", "PRIOR"):
        engine.memory(part, "heads")[:] = np.random.default_rng(0).standard_normal((1, 12))
    X = np.random.default_rng(1).standard_normal((5, 3))
    features = module(torch.tensor(X)).detach().numpy()
    assert features.shape == (5, module.out_features)
    W = engine.memory("W", "heads")
    np.testing.assert_allclose(engine.predict(X), features @ W[:, :-1].T + W[:, -1], rtol=1e-5)
    assert FourierFeatures(3, 8, skip=False)(torch.zeros(2, 3)).shape == (2, 8)
    with pytest.raises(ValueError, match="units must be an integer of at least 1, got 0"):
        FourierFeatures(3, 0)


FILL = [9.97e36, -9.99e33, 1e20, -9999.0, 1e300, -1.7e308, 1e-300, 5e-324]


def mixed(X, y, n, seed=1):
    """Rows, targets and weights, and which of them are good, with n beside them that no sensor measured.

    These have fill values, 1e±300, denormals, weights of 0 and 1e150, flipped signs and jumps.
    """
    rng = np.random.default_rng(seed)
    some = rng.integers(0, len(X), n)
    bad_X, bad_y, weight = X[some], y[some], np.ones(n)
    for i, case in enumerate(rng.integers(0, 7, n)):
        value, j = FILL[rng.integers(len(FILL))], rng.integers(X.shape[1])
        if case == 0:
            bad_y[i] = value
        elif case <= 2:
            bad_X[i, j if case == 1 else slice(None)] = value
        elif case <= 4:
            bad_y[i], weight[i] = (1e300, 0.0) if case == 3 else (-bad_y[i], 1e150)
        else:
            bad_X[i, j] *= -1 if case == 5 else 1e6
    at = np.sort(np.random.default_rng(seed).integers(20, len(X) + 1, n))
    good = np.insert(np.ones(len(X), bool), at, False)
    return np.insert(X, at, bad_X, 0), np.insert(y, at, bad_y), np.insert(np.ones(len(X)), at, weight), good


def errors(X, y, weight=None):
    learner = StreamLearner(X.shape[1], 1, regression=True, **DEFAULT)
    before = learner.learn(X, y[:, None].copy(), weight)[:, 0]
    assert np.isfinite(before).all()
    assert np.isfinite(learner.engine.memory.vector).all()
    with np.errstate(over="ignore"):
        return np.abs(before - y), learner


@pytest.mark.parametrize(
    ("n", "seed"), [(4000, 0), *(pytest.param(200_000, seed, marks=pytest.mark.long) for seed in (1, 2))]
)
def test_hostile_rows_leave_the_good_ones_as_they_are(n, seed):
    X, y = curve(n, seed)
    clean, _ = errors(X, y)
    bad = min(10_000, n // 40)
    X, y, weight, good = mixed(X, y, bad, max(seed, 1))
    spoiled, learner = errors(X, y, weight)
    assert spoiled[good].mean() < 1.05 * clean.mean()
    assert bad / 2 < learner.engine.outliers < 2 * bad


SENTINELS = [1e2, 1e4, 1e300]  # deviations; the last one as it is


def spoiled(what, size, bad, seed=0):
    """The errors on the other rows of a curve whose rows `bad` have a sentinel, over those of the curve, the model."""
    X, y = curve(len(bad), seed)
    clean = np.abs(SepSARegressor(random_state=0).prequential(X, y) - y)[~bad].mean()
    if what == "x":
        X[bad, 0] = size if size > 1e200 else 5 + 3 * size
    else:
        y[bad] = size if size > 1e200 else 30 + 10 * size
    model = SepSARegressor(random_state=0)
    with np.errstate(over="ignore"):
        return np.abs(model.prequential(X, y) - y)[~bad].mean() / clean, model


@pytest.mark.parametrize("size", SENTINELS)
@pytest.mark.parametrize("what", ["x", "y"])
def test_a_burst_of_four_sentinels_or_one_in_a_thousand_rows_costs_little(what, size):
    burst, single = np.zeros(2000, bool), np.zeros(2000, bool)
    burst[1000:1004], single[[300, 1100]] = True, True
    assert spoiled(what, size, burst)[0] < 1.01
    assert spoiled(what, size, single)[0] < 1.02


def heavy(n, seed=0):
    """Inputs of a long tail, their errors of one, and 30 categories of which each is in one row of a hundred."""
    rng = np.random.default_rng(seed)
    kind = rng.integers(0, 100, n)
    X = np.hstack([np.exp(1.6 * rng.standard_normal((n, 4))), kind[:, None] == np.arange(30)])
    return X, X[:, 0] - 2 * X[:, 1] + 3 * (kind % 7) * (kind < 30) + rng.standard_t(2, n)


def test_what_more_than_one_row_in_fifty_has_is_no_outlier():
    X, y = heavy(6000)
    robust, squared = (SepSARegressor(random_state=0, loss=loss) for loss in ("huber", "squared"))
    errors = [np.abs(model.prequential(X, y) - y)[1000:].mean() for model in (robust, squared)]
    assert robust.outliers_ < 0.03 * len(y)
    assert errors[0] < 1.05 * errors[1]
    noise = np.random.default_rng(1).standard_normal(len(y))
    indicators = SepSARegressor(random_state=0).partial_fit(X[:, 4:], 3 * X[:, 4] + noise)
    assert indicators.outliers_ < 5
    fitted = SepSARegressor(random_state=0, max_iter=10).fit(X[:2000], y[:2000])
    assert fitted._learner.body.engine.bounded < 0.04


@pytest.mark.parametrize("growth", [bounds.GROWTH_X, bounds.GROWTH_E])
def test_the_count_of_far_values_is_that_of_the_slow_reference(growth):
    rng = np.random.default_rng(0)
    excess, slow = 0.0, np.zeros(1)
    for share in (0.01, 0.3, 0.0):
        for far in rng.random(1500) < share:
            excess = bounds.follow_excess(excess, far, growth)
            slow = excess_step(slow, far, growth)
            assert excess == pytest.approx(slow[0])
            assert bounds.stretch(excess, growth) == pytest.approx(tail(slow, growth)[0])
        assert tail(slow, growth)[0] == pytest.approx(8.0 if share == 0.3 else 1.0, rel=0.1)


@pytest.mark.parametrize("what", ["x", "y"])
def test_many_sentinels_are_told_and_stay_bounded(what):
    bad = np.random.default_rng(1).random(2000) < 0.08
    with pytest.warns(UserWarning, match=r"% of the rows lie beyond .*: give loss='squared' .*, and NaN") as told:
        ratio, model = spoiled(what, 1e4, bad)
    assert len(told) == 1
    assert ratio < 1.3
    assert 0.05 < model.outliers_ / 2000 < 0.1
    x, rows = dict.fromkeys("ab", 1.0), np.random.default_rng(0).standard_normal((5 * WARM_UP, 2))
    rows[bad[: len(rows)], 0] = 1e6
    one_by_one = river_models.SepSARegressor(seed=0)

    def learn_all():
        for row in rows.tolist():
            one_by_one.learn_one(dict(zip(x, row, strict=True)), row[1])

    with pytest.warns(UserWarning, match="beyond the bounds") as told:
        learn_all()
    assert len(told) == 1


def named(rows):
    return [dict(zip("abcde", row, strict=True)) for row in rows.tolist()]


@pytest.mark.parametrize("value", [*FILL, 1.7976931348623157e308])
@pytest.mark.parametrize("rows", [5, WARM_UP, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 100, 306))])
def test_one_row_of_any_number_is_forgotten(value, rows):
    X, y = curve(WARM_UP + 400)
    for spoil in ("x", "y", "w"):
        model = river_models.SepSARegressor(seed=0)
        for i, (x, target) in enumerate(zip(named(X), y.tolist(), strict=True)):
            if i == rows:
                bad = dict.fromkeys("abcde", value) if spoil == "x" else x
                model.learn_one(bad, value if spoil == "y" else target, w=abs(value) if spoil == "w" else 1.0)
            model.learn_one(x, target)
        told = np.array([model.predict_one(x) for x in named(X[-200:])])
        assert np.abs(told - y[-200:]).mean() < 3.0


def test_an_input_that_was_tiny_and_then_moves_is_learned():
    X, y = curve(3000)
    X[:, 2] = np.where(np.arange(3000) < 500, 1e-6, 1.0) * (X[:, 2] - 5)
    error, _ = errors(X, y + 5 * np.abs(X[:, 2]))
    assert error[-1000:].mean() < 2.5  # the mean distance of 5|x| from its mean is 7


def test_the_choice_follows_the_law():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((3000, 4))
    noise = SepSARegressor(random_state=0).partial_fit(X, 0.3 * X[:, 0] + 3 * rng.standard_normal(3000))
    assert noise.chosen_["features"] == "inputs"
    curved = SepSARegressor(random_state=0).partial_fit(X, np.sin(3 * X[:, 0]) * X[:, 1])
    assert curved.chosen_["features"] == "both"
    assert sum(curved.chosen_["weights"]) == pytest.approx(1.0)
    drift = (X * np.cumsum(0.05 * rng.standard_normal((3000, 4)), 0)).sum(1)
    assert SepSARegressor(hidden_layer_sizes=()).partial_fit(X, drift).chosen_["forgetting"] < 1
    for options in ({"ridge": "auto"}, {"forgetting": "auto"}, {"ridge": "auto", "forgetting": "auto", "skip": False}):
        engine = Engine(4, 1, (5,), **{"skip": True} | options)
        assert np.isfinite(engine.learn(X[:60], drift[:60, None])).all()
        assert len(engine.chosen["weights"]) > 1


def test_intervals_hold_nine_in_ten_and_recover_from_a_jump():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((2500, 3))
    y = X @ [1.0, 2.0, 0.0] + np.where(np.arange(2500) < 1200, 0.2, 2.0) * rng.standard_normal(2500)
    y[1800:] += 20 * X[1800:, 2]
    model, held = river_models.SepSARegressor(seed=0), []
    for row, target in zip(X.tolist(), y.tolist(), strict=True):
        x = dict(zip("abc", row, strict=True))
        law = model.predict_one(x, with_dist=True)
        assert law.mode == model.predict_one(x)
        held.append(abs(target - law.mode) <= 1.645 * law.sigma)
        model.learn_one(x, target)
    assert 0.86 < np.mean(held[1:]) < 0.94
    assert np.mean(held[1200:1400]) > 0.8
    assert np.mean(held[1800:2000]) > 0.8


def test_absence_means_zero_for_indicators_and_the_mean_for_sensors():
    rng = np.random.default_rng(0)
    model = river_models.SepSARegressor(hidden=[], seed=0)
    for _ in range(600):
        x = {"sensor": 20 + rng.normal()} | ({"word": 1} if rng.random() < 0.3 else {})
        if rng.random() < 0.2:
            del x["sensor"]
        y = 5 * x.get("word", 0) + x.get("sensor", 20)
        model.learn_one(x, y)
    assert model.predict_one({"word": 1}) == pytest.approx(25, abs=0.3)
    assert model.predict_one({"sensor": 22.0}) == pytest.approx(22, abs=0.3)
    assert model.predict_one({}) == pytest.approx(20, abs=0.3)


@pytest.mark.parametrize(("missing", "expected"), [("zero", 0.0), ("mean", 10.0)])
def test_missing_can_be_told(missing, expected):
    rng = np.random.default_rng(0)
    model = river_models.SepSARegressor(hidden=[], missing=missing, seed=0)
    for _ in range(500):
        value = 10 + rng.normal()
        there = rng.random() < 0.5
        model.learn_one({"a": value} if there else {}, value if there else expected)
    assert model.predict_one({}) == pytest.approx(expected, abs=0.6)
    with pytest.raises(ValueError, match="missing must be one of 'auto', 'zero', 'mean', got 'none'"):
        river_models.SepSARegressor(missing="none")


def test_class_weights_move_the_border():
    rng = np.random.default_rng(0)
    y = (rng.random(1500) < 0.1).astype(int)
    X = rng.normal(y[:, None], 1.0, (1500, 2))
    plain = SepSAClassifier(random_state=0).partial_fit(X, y)
    weighted = SepSAClassifier(random_state=0, class_weight={1: 9.0}).partial_fit(X, y)
    found = [(model.predict(X)[y == 1] == 1).mean() for model in (plain, weighted)]
    assert found[1] > found[0] + 0.2
    with pytest.raises(ValueError, match="class_weight must be a dict of weights for partial_fit, got 'balanced'"):
        SepSAClassifier(class_weight="balanced").partial_fit(X, y)


class Interruptible:
    """A learner as `interrupts.interrupt` takes it."""

    linear = torch.nn.Identity()

    def __init__(self, model):
        self.model = model

    def state_dict(self):
        state = self.model.state_dict()
        return {
            "arrays": [torch.from_numpy(each.copy()) for _, each in leaves(state) if isinstance(each, np.ndarray)],
            "others": repr(state),
        }


ROW, LATE = {"a": 1.0, "b": 2.0}, WARM_UP + 5
CASES = {  # River's model, the rows before, the sample and its target
    "a settled row": ("SepSARegressor", LATE, ROW, 3.0),
    "the second row": ("SepSARegressor", 1, ROW, 3.0),
    "a row between two scales": ("SepSARegressor", 40, ROW, 3.0),
    "a first row": ("SepSARegressor", 31, ROW, 3.0),
    "a row with something missing": ("SepSARegressor", LATE, {"a": 1.0}, 3.0),
    "a new feature": ("SepSARegressor", LATE, ROW | {"word": 1.0}, 3.0),
    "a new class": ("SepSAClassifier", LATE, ROW, 7),
}


@pytest.mark.parametrize("case", CASES)
def test_an_interrupted_row_is_learned_or_not(case):
    name, rows, x, y = CASES[case]
    model = getattr(river_models, name)(hidden=(3,), seed=0)
    for v in np.random.default_rng(0).normal(size=rows).tolist():
        model.learn_one({"a": v, "b": 1.0 - v}, int(v > 0))
    assert not interrupt(Interruptible(model), lambda one: one.model.learn_one(x, y), 10, Random(0), True)


@pytest.mark.parametrize("kind", [SepSARegressor, SepSAClassifier])
def test_an_interrupted_partial_fit_is_learned_or_not(kind):
    X, y = curve(WARM_UP + 60)
    y = (y > 35).astype(int) if kind is SepSAClassifier else y
    model = kind(hidden_layer_sizes=(3,), random_state=0).partial_fit(X[:-9], y[:-9])
    assert not interrupt(Interruptible(model), lambda one: one.model.partial_fit(X[-9:], y[-9:]), 20, Random(0), True)


def test_threads_that_learn_wait_for_each_other():
    X, y = curve(1900)
    model, river = SepSARegressor(random_state=0), river_models.SepSARegressor(seed=0)

    def learn(part):
        model.partial_fit(X[part], y[part])
        for x, target in zip(named(X[part]), y[part].tolist(), strict=True):
            river.learn_one(x, target)

    learn(slice(0, 300))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(learn, [slice(300 + 400 * i, 700 + 400 * i) for i in range(4)]))
    assert model._learner.body.engine.samples == pytest.approx(1900, rel=0.05)
    assert river._learner.body.engine.samples == pytest.approx(1900, rel=0.05)
    assert np.abs(model.predict(X) - y).mean() < 2.0
