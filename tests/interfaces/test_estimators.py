"""The estimators for scikit-learn: its own checks, and what we promise beyond them."""

import copy
import datetime
import functools
import inspect
import pickle
import pydoc
import re

import joblib
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.datasets import make_classification
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.metrics import log_loss
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import estimator_checks

import river_models
import sepsa
from breaking.damage import same
from plain_learner import StreamLearner
from reference import covariance_of, nearest_on_simplex
from sepsa import NotFinite, SepSAClassifier, SepSARegressor
from sepsa.learner import calibration

NOT_REPEATED = dict.fromkeys(
    ["check_sample_weight_equivalence_on_dense_data", "check_sample_weight_equivalence_on_sparse_data"],
    "a sample of weight 3 makes one step of the body, with three times the gradient; three copies make three steps. "
    "A weight of 0 is a sample that is not there: see test_weights",
)


def scikit_learn_checks(**options):
    """A decorator by scikit-learn's checks; scikit-learn 1.6 gives a generator, which pytest 9 deprecates."""
    estimators = [SepSARegressor(max_iter=2, **options), SepSAClassifier(max_iter=2, **options)]
    found = estimator_checks.parametrize_with_checks(estimators, expected_failed_checks=lambda _: NOT_REPEATED)
    return pytest.mark.parametrize(found.args[0], list(found.args[1]), **found.kwargs)


@pytest.mark.many
@scikit_learn_checks(body="fourier")
def test_scikit_learn_checks_of_the_network_alone(estimator, check):
    check(estimator)


@pytest.mark.many
@scikit_learn_checks()
def test_scikit_learn_checks(estimator, check):
    check(estimator)


@pytest.mark.parametrize("check", NOT_REPEATED)
def test_without_a_body_a_weight_is_a_number_of_samples(check):
    getattr(estimator_checks, check)("SepSARegressor", SepSARegressor(hidden_layer_sizes=(), max_iter=1))


def regression(n=400, noise=0.5, seed=0, outputs=()):
    """Raw, badly scaled inputs; targets far from zero, with noise of a known size."""
    rng = np.random.default_rng(seed)
    Z = rng.standard_normal((n, 4))
    clean = 3 * np.sin(Z[:, 0]) + Z[:, 1] * Z[:, 2]
    clean = clean if not outputs else np.stack([clean, 10 * Z[:, 3]], 1)
    y = 100 + clean + noise * rng.standard_normal(clean.shape)
    return Z * [1e-3, 1.0, 50.0, 1e4] + [5.0, 0.0, -300.0, 1e5], y


def classification(n=400, classes=3, seed=0):
    X, y = make_classification(n, 6, n_informative=4, n_classes=classes, class_sep=1.5, random_state=seed)
    return X * [1, 10, 100, 1e-3, 1, 1], y


def held(model):
    """All that a model holds, to be compared bit by bit."""
    names = sorted(set(model.__dict__) - {"_learner", "_lock"})
    learner = model._learner.state_dict()
    return copy.deepcopy({"learner": learner} | {name: model.__dict__[name] for name in names})


@pytest.mark.parametrize("passes", [1, 3])
def test_without_hidden_layers_it_is_ridge_regression(passes):
    X, y = regression(outputs=(2,))
    options = {"loss": "squared"} if passes == 1 else {"loss": "squared", "forgetting": 1.0, "early_stopping": False}
    mine = SepSARegressor(hidden_layer_sizes=(), max_iter=passes, **options).fit(X, y)
    true = make_pipeline(StandardScaler(), Ridge(alpha=10.0 / passes)).fit(X, y)
    np.testing.assert_allclose(mine.predict(X), true.predict(X), rtol=1e-6)


def test_fit_learns_what_a_linear_model_cannot_and_follows_its_random_state():
    X, y = regression(600)
    model = SepSARegressor(random_state=0, max_iter=20).fit(X[:400], y[:400])
    assert model.score(X[400:], y[400:]) > LinearRegression().fit(X[:400], y[:400]).score(X[400:], y[400:]) + 0.1
    one, same_seed, other = (SepSARegressor(random_state=seed, max_iter=2).fit(X[:60], y[:60]) for seed in (0, 0, 1))
    assert same(held(one), held(same_seed))
    assert not same(held(one), held(other) | {"random_state": 0})


def test_passes_end_where_rows_left_out_say_so():
    X, y = regression(200, noise=0.05)
    noise = np.random.default_rng(0).standard_normal(200)
    assert SepSARegressor(random_state=1).fit(X, noise).n_iter_ < SepSARegressor(random_state=1).fit(X, y).n_iter_
    assert SepSARegressor(random_state=0, max_iter=20).fit(X, y).n_iter_ > 2
    assert SepSARegressor(random_state=0, max_iter=7, early_stopping=False).fit(X, noise).n_iter_ == 7


BEFORE = {
    "engine": (SepSARegressor, {}, 300),
    "forgets": (SepSARegressor, {"forgetting": 0.99}, 300),
    "classes": (SepSAClassifier, {"forgetting": 1.0}, 300),
    "classes, forgets": (SepSAClassifier, {"forgetting": 0.99}, 300),
    "several labels": (SepSAClassifier, {}, 80),
}


@pytest.mark.parametrize("name", BEFORE)
def test_prequential_is_predict_then_partial_fit(name):
    kind, options, n = BEFORE[name]
    X, y = regression(n) if kind is SepSARegressor else classification(n)
    y = np.stack([y > 0, X[:, 0] > 0], 1).astype(int) if name == "several labels" else y
    new = functools.partial(kind, random_state=0, batch_size=1, **options)
    methods = {"predict": {}} | ({"predict_proba": {"method": "predict_proba"}} if kind is SepSAClassifier else {})
    known = {"classes": [0, 1, 2]} if "classes" in name else {}
    before = {method: new().prequential(X, y, **known, **given) for method, given in methods.items()}
    assert kind is SepSAClassifier or before["predict"][0] == 0
    single = new().partial_fit(X[:1], y[:1], **known)
    for i in range(1, n):
        for method, told in before.items():
            np.testing.assert_allclose(told[i], getattr(single, method)(X[i : i + 1])[0], rtol=1e-9)
        single.partial_fit(X[i : i + 1], y[i : i + 1])
    chunks = new()
    for some in np.array_split(np.arange(n), 7):
        chunks.partial_fit(X[some], y[some], **known)
    for method in methods:
        np.testing.assert_allclose(getattr(chunks, method)(X), getattr(single, method)(X), rtol=1e-9)


def test_fit_then_partial_fit_goes_on_from_there():
    X, y = regression(600)
    model = SepSARegressor(random_state=0, max_iter=10).fit(X[:300], y[:300])
    known = np.abs(model.predict(X[300:]) - y[300:]).mean()
    cold = np.abs(SepSARegressor(random_state=0).prequential(X[300:], y[300:]) - y[300:]).mean()
    warm = np.abs(model.prequential(X[300:], y[300:]) - y[300:]).mean()
    assert warm < 1.05 * known < cold
    assert model._learner.body.engine.samples == 0.8 * 300 + 300  # of a member that left out a fifth


@pytest.mark.parametrize("how", ["fit", "partial_fit"])
def test_weights(how):
    X, y = regression(300)
    weight = np.random.default_rng(1).integers(0, 2, len(X)).astype(float)
    options = {"random_state": 0, "max_iter": 3}
    weighted = getattr(SepSARegressor(**options), how)(X, y, sample_weight=weight)
    removed = getattr(SepSARegressor(**options), how)(X[weight > 0], y[weight > 0])
    np.testing.assert_allclose(weighted.predict(X), removed.predict(X), rtol=1e-9)
    # Experts that predict from near rows alone are as good where all rows are light.
    heavy = SepSARegressor(**options, body="fourier", loss="squared")  # without bounds on weights
    getattr(heavy, how)(X, y, sample_weight=np.where(X[:, 0] > 5, 100.0, 0.01))
    error = np.abs(heavy.predict(X) - y)
    assert error[X[:, 0] > 5].mean() < error[X[:, 0] <= 5].mean()


@pytest.mark.parametrize("how", ["fit", "partial_fit"])
def test_intervals_tell_the_noise(how):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((1500, 3))
    Y = X @ [[1.0, 2.0], [0.5, -1.0], [3.0, 0.0]] + rng.standard_normal((1500, 2)) * [0.5, 20.0]
    model = getattr(SepSARegressor(random_state=0), how)(X[:500], Y[:500])
    mean, std = model.predict(X[500:], return_std=True)
    assert mean.shape == std.shape == (1000, 2)
    # `partial_fit` follows the last hundred errors.
    np.testing.assert_allclose(np.median(std, 0), [0.5, 20.0], rtol=0.1 if how == "fit" else 0.35)
    np.testing.assert_allclose((np.abs(Y[500:] - mean) < 1.645 * std).mean(0), 0.9, atol=0.07)
    _, far = model.predict(100 * X[500:510], return_std=True)
    assert (far > std[:10]).all()  # inputs are seen no farther out than is plausible


def test_noise_is_the_unbiased_one_of_ridge_regression():
    X, Y = regression(80, outputs=(2,))
    weight = np.random.default_rng(0).integers(1, 4, 80).astype(float)
    learner = StreamLearner(4, 2, regression=True, hidden=(), ridge=2.0)
    learner.fit_scales(X, Y, weight)
    learner.learn(X, Y, weight)
    mean = np.average(X, axis=0, weights=weight)
    std = np.sqrt(np.average((X - mean) ** 2, axis=0, weights=weight))
    Phi = np.column_stack([(X - mean) / std, np.ones(80)])
    gram = Phi.T @ (Phi * weight[:, None])
    inverse = np.linalg.inv(gram + 2.0 * np.eye(5))
    target = Y - np.average(Y, axis=0, weights=weight)
    W = inverse @ Phi.T @ (target * weight[:, None])
    expected = weight @ (target - Phi @ W) ** 2 / (weight.sum() - np.trace(inverse @ gram))
    np.testing.assert_allclose(learner.noise_variance(), expected, rtol=1e-6)
    before = learner.predict(X)
    learner.engine.set_effective_samples(weight.sum() / 3, expected)  # as after three passes
    np.testing.assert_array_equal(learner.predict(X), before)
    np.testing.assert_allclose(learner.noise_variance(), expected, rtol=1e-6)
    np.testing.assert_allclose(covariance_of(learner.engine), 3 * inverse, rtol=1e-5, atol=1e-9)
    assert learner.engine.samples == pytest.approx(weight.sum() / 3)


@pytest.mark.parametrize("shape", [(), (1,), (2,)])
def test_predictions_have_the_shape_of_targets(shape):
    X, y = regression(60)
    Y = np.broadcast_to(y.reshape(-1, *(1 for _ in shape)), (60, *shape))
    model = SepSARegressor(random_state=0, max_iter=2).fit(X, Y)
    assert model.predict(X).shape == model.predict(X, return_std=True)[1].shape == Y.shape
    assert model.prequential(X, Y).shape == Y.shape
    with pytest.raises(ValueError, match="y must have shape"):
        model.partial_fit(X, np.zeros((60, 3)))
    assert model.fit(X[:1], Y[:1]).predict(X[:1], return_std=True)[0] == pytest.approx(Y[:1])  # no interval to tell


LABELS = [[-7, 0, 300], [0.0, 1.0, 2.0], ["red", "green", "a long name"], np.array(list("xyz"), object), [False, True]]


@pytest.mark.parametrize("names", [np.asarray(names) for names in LABELS], ids=lambda names: str(names.dtype))
def test_classes_in_any_dtype(names):
    X, y = classification(200, len(names))
    y = names[y]
    for how in ("fit", "partial_fit"):
        model = getattr(SepSAClassifier(random_state=0, max_iter=20), how)(X, y)
        assert model.classes_.tolist() == sorted(names.tolist())
        assert model.predict(X).dtype == model.classes_.dtype
        assert model.score(X, y) > 0.7
        proba = model.predict_proba(X)
        np.testing.assert_allclose(proba.sum(1), 1.0)
        assert (proba > 0).all()
        np.testing.assert_array_equal(model.classes_[proba.argmax(1)], model.predict(X))
        np.testing.assert_allclose(np.exp(model.predict_log_proba(X)), proba)


@pytest.mark.parametrize("start", [100, 300])
def test_a_class_seen_late_takes_nothing_away(start):
    X, y = classification(600)
    y = np.array(["m", "z", "a"])[y]  # the new one, "a", comes first in order
    late = np.flatnonzero(y[:start] != "a")
    model = SepSAClassifier(random_state=0, body="fourier")  # experts give a new class a share
    model.partial_fit(X[late], y[late])
    assert model.classes_.tolist() == ["m", "z"]
    before, grown = model._learner.body.predict(X), model._learner.body.copy()
    grown.grow((), 3)
    np.testing.assert_allclose(grown.predict(X), np.pad(before, [(0, 0), (0, 1)]), atol=1e-6)
    labels = model.prequential(X[start:], y[start:])
    assert model.classes_.tolist() == ["a", "m", "z"]
    assert model.score(X, y) > 0.8
    first = np.flatnonzero(y[start:] == "a")[0]
    assert "a" not in labels[: first + 1]
    assert "a" in labels[first + 1 :]


def test_classes_told_are_known_from_the_start_and_one_with_no_weight_is_not_there():
    X, y = classification(100)
    model = SepSAClassifier(random_state=0).partial_fit(X[:5], np.zeros(5, int), classes=[2, 0, 1])
    assert model.predict_proba(X).shape == (100, 3)
    model.partial_fit(X, y, classes=[0, 9])  # and further ones may be told later
    assert model.classes_.tolist() == [0, 1, 2, 9]
    assert model.prequential(X, y, method="predict_proba").shape == (100, 4)
    assert model.fit(X, y, sample_weight=(y != 1).astype(float)).classes_.tolist() == [0, 2]
    with pytest.raises(ValueError, match="zero"):
        model.fit(X, y, sample_weight=np.zeros(100))


def test_probabilities_are_calibrated_without_tuning():
    X, y = classification(3000)
    y = np.where(np.random.default_rng(0).random(3000) < 0.2, (y + 1) % 3, y)  # a fifth of the labels is wrong
    for how in ("fit", "partial_fit"):
        model = getattr(SepSAClassifier(random_state=0, max_iter=10), how)(X[:1000], y[:1000])
        proba = model.predict_proba(X[1000:])
        assert log_loss(y[1000:], proba) < 0.9 * np.log(3)
        sure = proba.max(1)
        assert sure.mean() == pytest.approx((model.predict(X[1000:]) == y[1000:]).mean(), abs=0.05)


@given(hnp.arrays(float, st.tuples(st.integers(1, 5), st.integers(1, 6)), elements=st.floats(-100, 100)))
def test_nearest_point_of_the_simplex(scores):
    expected = np.array([nearest_on_simplex(row) for row in scores])
    np.testing.assert_allclose(calibration.project_to_simplex(scores), expected, atol=1e-10)


@pytest.mark.parametrize("forgetting", ["auto", 0.99])
def test_sums_of_losses_in_the_kernel_are_those_of_a_call_that_asks_for_probabilities(forgetting):
    X, y = classification(320)
    weight = np.random.default_rng(0).uniform(0.1, 2, len(y))
    y[y == 2] = np.where(np.flatnonzero(y == 2) > 280, 2, 0)  # a late class
    options = {"body": "fourier", "loss": "squared", "forgetting": forgetting}  # "huber" bounds the weights of rows
    one, many = (SepSAClassifier(random_state=0, **options) for _ in range(2))
    told = many.prequential(X, y, sample_weight=weight, method="predict_proba")
    for i in range(len(y)):
        if i:
            here = one.predict_proba(X[i : i + 1])[0]
            np.testing.assert_allclose(told[i, : len(here)], here, rtol=1e-6, atol=1e-9)
        one.partial_fit(X[i : i + 1], y[i : i + 1], sample_weight=weight[i : i + 1])
    assert many.classes_.tolist() == [0, 1, 2]
    np.testing.assert_allclose(many.predict_proba(X), one.predict_proba(X), rtol=1e-9)


def test_accumulated_losses_fade_by_the_forgetting():
    rng = np.random.default_rng(0)
    scores, labels, weight = rng.standard_normal((6, 3)), rng.integers(0, 3, 6), rng.uniform(0, 2, 6)
    sums = calibration.accumulate(np.ones(calibration.INVERSE_TEMPERATURES.size), scores, labels, weight, 0.9)
    losses = weight[:, None] * calibration.log_losses(calibration.project_to_simplex(scores), labels)
    np.testing.assert_allclose(sums[0], 1.0)
    np.testing.assert_allclose(sums[1:], 0.9 * sums[:-1] + losses, rtol=1e-12)


BAD = {
    "Inf": lambda X, y: (np.where(np.arange(len(X))[:, None] == 7, np.inf, X), y),
    "strings": lambda X, y: (np.full(X.shape, "word", dtype=object), y),
    "width": lambda X, y: (X[:, 1:], y),
    "one dimension": lambda X, y: (X[:, 0], y),
    "empty": lambda X, y: (X[:0], y[:0]),
    "lengths": lambda X, y: (X, y[1:]),
    "target NaN": lambda X, y: (X, np.where(np.arange(len(y)) == 7, np.nan, y)),
    "target None": lambda X, y: (X, None),
    "negative weight": lambda X, y: (X, y, -np.ones(len(X))),
    "weights of another length": lambda X, y: (X, y, np.ones(3)),
    "text for a number": lambda X, y: (X, np.array([f"label {v:.0f}" for v in y])),
}


TRAINED = {  # a model, and the number of rows that it has learned
    "new": (SepSARegressor(random_state=0), 0),
    "regressor": (SepSARegressor(random_state=0), 300),
    "classifier": (SepSAClassifier(random_state=0), 20),
}
ANEW = ("width", "text for a number")  # a new start may take these


@functools.cache
def trained(name):
    """Good rows, and the pickle of the model that has learned some of them."""
    model, rows = TRAINED[name]
    X, y = classification(300) if name == "classifier" else regression(300)
    return X, y, pickle.dumps(model.partial_fit(X[:rows], y[:rows]) if rows else model)


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("name", TRAINED)
def test_bad_input_changes_nothing(name, what):
    if name == "new" and what in ANEW:
        return  # nothing is known yet that they could contradict
    X, y, saved = trained(name)
    model = pickle.loads(saved)
    before = held(model)
    bad_X, bad_y, *weight = BAD[what](X, y)
    more = {"sample_weight": weight[0]} if weight else {}
    calls = [functools.partial(learn, bad_X, bad_y, **more) for learn in (model.partial_fit, model.fit)]
    calls = calls[:1] if what in ANEW else calls
    if name != "new" and what in ("Inf", "strings", "width", "one dimension", "empty"):
        calls.append(functools.partial(model.predict, bad_X))
    for call in calls:
        with pytest.raises(ValueError, match=r".+"):
            call()
        assert same(held(model), before)


def test_a_failed_growth_leaves_the_classes_as_they_were():
    X, y = classification(300)
    model = SepSAClassifier(random_state=0, loss="squared", activation="relu").partial_fit(X, y)
    before = held(model)
    with pytest.raises(NotFinite, match="not finite"):
        model.partial_fit(np.full((2, 6), 1e300), [7, 8])
    assert same(held(model), before)
    assert model.classes_.tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", [SepSARegressor, SepSAClassifier])
@pytest.mark.parametrize("rows", [100, 300], ids=["first rows", "scales fixed"])
def test_a_row_that_cannot_be_learned_changes_nothing_though_nothing_is_copied(kind, rows):
    X, y = regression(rows) if kind is SepSARegressor else classification(rows)
    model = kind(random_state=0, loss="squared", activation="relu").partial_fit(X, y)
    body, before = model._learner.body, held(model)
    with pytest.raises(NotFinite, match="not finite"):
        model.partial_fit(np.full((1, X.shape[1]), 1e300), y[:1])
    assert same(held(model), before)
    model.partial_fit(X[:1], y[:1])
    assert model._learner.body is body
    assert not same(held(model), before)


WRONG = [
    ({"learning_rate": -1.0}, "learning_rate must be in"),
    ({"hidden_layer_sizes": (5, 0)}, "hidden_layer_sizes must be an integer of at least 1"),
    ({"batch_size": 0}, "batch_size must be an integer of at least 1"),
    ({"max_iter": 0}, "max_iter must be an integer of at least 1"),
]


@pytest.mark.parametrize(("options", "words"), WRONG)
def test_a_wrong_argument_is_named(options, words):
    X, y = regression(20)
    model = SepSARegressor(**options)
    for learn in (model.fit, *([] if "max_iter" in options else [model.partial_fit])):
        with pytest.raises((ValueError, RuntimeError, TypeError), match=words):
            learn(X, y)
        assert not hasattr(model, "n_features_in_")
    with pytest.raises(ValueError, match="method must be"):
        SepSAClassifier().prequential(X, y > 100, method="decision_function")


def test_joblib_saves_a_model_and_maps_its_arrays(tmp_path):
    X, y = regression(150)
    model = SepSARegressor(5, random_state=0).partial_fit(X[:100], y[:100])
    joblib.dump(model, tmp_path / "model")
    loaded = joblib.load(tmp_path / "model", mmap_mode="r")
    assert same(held(loaded.partial_fit(X[100:], y[100:])), held(model.partial_fit(X[100:], y[100:])))


@pytest.mark.parametrize("model", [SepSARegressor, SepSAClassifier])
@pytest.mark.parametrize("kind", ["array", "frame", "texts"])
def test_the_order_of_columns_changes_no_bit_of_a_prediction(model, kind):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(150, 5)) * [1.0, 1e3, 1.0, 1.0, 1e-3]
    y = X[:, 0] + np.sin(X[:, 2])
    X[rng.random(X.shape) < 0.1] = np.nan
    if kind != "array":  # names tell apart what is equal in the first rows
        X[:, 3:] = rng.random((150, 2)) < 0.05
    frame = pd.DataFrame(X, columns=list("abcde"))
    if kind == "texts":
        frame["city"], frame["day"] = rng.choice(["Oslo", "Rome", "Lima"], 150), pd.Timestamp(2026, 1, 1)
    turned = frame[rng.permutation(frame.columns)]
    targets = y if model is SepSARegressor else np.where(y > 0, "high", "low")
    results = []
    for rows in (frame, turned):
        rows = rows.to_numpy() if kind == "array" else rows
        some, fitted = (model(random_state=0, hidden_layer_sizes=(8,), max_iter=2) for _ in range(2))
        told = some.partial_fit(rows[:60], targets[:60]).prequential(rows[60:], targets[60:])
        fitted.fit(rows[:100], targets[:100]).partial_fit(rows[100:120], targets[100:120])
        results.append((told, fitted.predict(rows), pickle.loads(pickle.dumps(fitted)).predict(rows)))
    for one, other in zip(*results, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("name", ["SepSARegressor", "SepSAClassifier"])
@pytest.mark.parametrize("module", [sepsa, river_models], ids=["scikit-learn", "River"])
def test_help_describes_every_parameter(module, name):
    kind = getattr(module, name)
    kind()  # skips the test where River is not installed
    shown = pydoc.render_doc(kind, renderer=pydoc.plaintext)
    described = shown[shown.index("Args:") : shown.index("See also:")]
    names = list(inspect.signature(kind).parameters)
    assert len(names) > 10
    for parameter in names:
        assert re.search(rf"^ \|      {parameter}: \S.{{15}}", described, re.MULTILINE), parameter
    assert described.count("huber") == 1


@pytest.mark.parametrize("kind", [SepSARegressor, river_models.SepSARegressor])
def test_the_squared_error_has_two_names(kind):
    X = np.random.default_rng(0).normal(size=(40, 3))
    y = np.where(np.arange(40) == 30, 1e3, X[:, 0])
    told = []
    for loss in ("squared", "squared_error"):
        if kind is SepSARegressor:
            model = kind((4,), loss=loss, body="fourier", max_iter=2, random_state=0)
            told.append([*model.prequential(X, y), *model.fit(X, y).predict(X)])
        else:
            model = kind((4,), loss=loss, body="fourier", seed=0)
            for x, target in zip(X.tolist(), y.tolist(), strict=True):
                model.learn_one(dict(enumerate(x)), target)
            told.append([model.predict_one(dict(enumerate(X[0].tolist())))])
        assert type(model).from_bytes(model.to_bytes()).loss == loss
    assert told[0] == told[1]


def test_missing_targets_and_labels_are_errors_that_name_what_to_do():
    X, y = np.ones((4, 2)), [1.0, np.nan, 2.0, 3.0]
    for call, said in (
        (
            lambda: SepSARegressor().fit(X, y),
            r"Input y contains NaN: .* keep = pandas.notna\(y\), X\[keep\] and y\[keep\]",
        ),
        (lambda: SepSARegressor().partial_fit(X, pd.Series([1, None, 2, 3], dtype="Int64")), r"NaN: .*notna\(y\)"),
        (lambda: SepSARegressor().partial_fit(X, [1, np.inf, 2, 3]), r"infinity .* keep = numpy.isfinite\(y\)"),
        (lambda: SepSAClassifier().fit(X, y), r"Input y contains NaN: .*pandas.notna\(y\)"),
        (lambda: SepSAClassifier().partial_fit(X, np.array(["a", np.nan, "b", "b"], object)), r"NaN: .*notna\(y\)"),
        (lambda: SepSAClassifier().partial_fit(X, ["a", None, "b", "b"]), "got None: leave rows without a label out"),
        (
            lambda: SepSAClassifier().partial_fit(X, [datetime.date(2026, 1, 1)] * 4),
            r"labels that are texts or numbers, got datetime.date\(2026, 1, 1\): .*y.astype\(str\)",
        ),
        (
            lambda: SepSAClassifier().fit(X, pd.array(["a", None, "b", "b"], "string")),
            r"contains NaN, <NA>: leave such",
        ),
        (
            lambda: SepSAClassifier().fit(X, np.array(["NaT", 1, 2, 2], "M8[D]")),
            "got NaT: leave rows without a label out",
        ),
        (
            lambda: SepSARegressor().fit(X, np.array(["NaT", 1, 2, 2], "M8[D]")),
            r"numbers, got datetime64\[D\]: convert it",
        ),
        (
            lambda: SepSARegressor().partial_fit(X, np.arange(4).astype("m8[s]")),
            r"numbers, got timedelta64\[s\]: convert",
        ),
        (lambda: SepSARegressor(loss=["huber"]).partial_fit(X, y[2:] * 2), "loss must be one of 'huber'"),
    ):
        with pytest.raises(ValueError, match=said):
            call()


def test_help_of_a_class_below_describes_the_parameters_once():
    for doc in ("A regressor of mine.", SepSARegressor.__doc__):
        assert type("Mine", (SepSARegressor,), {"__doc__": doc}).__doc__.count("Args:") == 1


@pytest.mark.parametrize("dtype", ["M8[D]", "M8[s]", "M8[ns]", "m8[s]"])
def test_dates_are_labels_that_are_saved(dtype):
    X, y = np.arange(8.0)[:, None], np.array(["2026-01-01", "2026-03-01"] * 4, "M8[D]")
    y = y.astype(dtype) if "M" in dtype else (y - y[0]).astype(dtype)
    with pytest.raises(ValueError, match="numbers, strings and dates are not mixed"):
        SepSAClassifier((), random_state=0).partial_fit(X, y).partial_fit(X, ["a", "b"] * 4)
    with pytest.raises(ValueError, match="nor dates in different units"):
        SepSAClassifier((), random_state=0).partial_fit(X, y).partial_fit(X, y.astype(f"{dtype[0]}8[m]"))
    told = SepSAClassifier((), random_state=0).prequential(X, y)
    assert np.isnat(told[0])  # before the first class
    for labels in (y, pd.Series(y)):
        model = SepSAClassifier((), random_state=0).partial_fit(X, labels)
        loaded = SepSAClassifier.from_bytes(model.to_bytes())
        assert loaded.classes_.dtype == model.classes_.dtype
        assert loaded.predict(X).tolist() == model.predict(X).tolist()


def test_sparse_columns_may_hold_nan_or_another_number_where_nothing_is_stored():
    X = np.random.default_rng(0).normal(size=(60, 3))
    X[::2, 0], X[1::3, 1], X[::5, 2] = np.nan, 7.0, 0.0
    y, dense = X[:, 2] + (X[:, 1] == 7.0), pd.DataFrame(X, columns=list("abc"))
    fills = {"a": np.nan, "b": 7.0, "c": 0.0}
    for names in ("abc", "ab"):
        sparse = dense.astype({name: pd.SparseDtype(float, fills[name]) for name in names})
        told = [SepSARegressor(body="fourier", random_state=0).prequential(part, y) for part in (dense, sparse)]
        np.testing.assert_array_equal(*told)
    flags = pd.DataFrame(X > 0).add_prefix("x")
    told = [
        SepSARegressor(body="fourier", random_state=0).prequential(X, y) for X in (flags, flags.astype("Sparse[bool]"))
    ]
    np.testing.assert_array_equal(*told)
