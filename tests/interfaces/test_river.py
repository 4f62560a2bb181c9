"""River's interface: its own checks, frames equal single samples bit by bit, and missing, late or wrong values."""

import collections
import datetime
import math
import random
import warnings

import pytest

import river_models

if not river_models.THERE:
    pytest.skip(river_models.REASON, allow_module_level=True)

import numpy as np
import pandas as pd
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from river import checks, compose, datasets, evaluate, linear_model, metrics, preprocessing

from reference import nearest_on_simplex
from river_models import MODEL_TYPES, SMALL, inside, stream, trained
from sepsa.learner.calibration import INVERSE_TEMPERATURES
from sepsa.learner.features import ROWS_FOR_SCALE
from sepsa.learner.scales import scaled_as_they_came
from sepsa.learner.stream_learner import WARM_UP, StreamLearner
from sepsa.river import SepSAClassifier, SepSAMultiTargetRegressor, SepSARegressor

PLAIN = {"loss": "squared", "forgetting": 1.0}  # one head, and every row at its word


# ---------------------------------------------------------------------- River's battery


@pytest.mark.parametrize(
    ("model_type", "case"),
    [
        (SepSARegressor, 0),
        (SepSAClassifier, 1),
        (SepSAMultiTargetRegressor, 2),
        *(pytest.param(kind, case, marks=pytest.mark.long) for kind in MODEL_TYPES for case in range(3)),
    ],
)
def test_river_accepts_it(model_type, case):
    random.seed(0)  # the checks shuffle features
    model = model_type(**list(model_type._unit_test_params())[case])
    assert model._unit_test_skips() == set()
    checks.check_estimator(model)


def test_evaluation_in_a_pipeline_beats_the_linear_model():
    def error(model):
        return evaluate.progressive_val_score(datasets.TrumpApproval(), model, metrics.MAE()).get()

    select = compose.SelectType(int, float)
    ours = error(select | SepSARegressor(seed=0))
    assert ours < 0.5 * error(preprocessing.StandardScaler() | linear_model.LinearRegression())
    assert ours == error(SepSARegressor(seed=0))


def scaled_one_by_one(scaler, rows):
    out = []
    for row in rows.tolist():
        scaler.learn_one(dict(enumerate(row)))
        out.append(list(scaler.transform_one(dict(enumerate(row))).values()))
    return np.array(out)


@pytest.mark.parametrize("scaler", [preprocessing.StandardScaler, preprocessing.AdaptiveStandardScaler])
def test_a_running_scaler_is_recognized_and_raw_rows_are_not_taken_for_its_output(scaler):
    rng = np.random.default_rng(0)
    raw = np.column_stack([1.7e9 + 60.0 * np.arange(8), rng.normal(size=8), np.repeat([3.0, 5.5], 4), np.ones(8)])
    scaled = scaled_one_by_one(scaler(), raw)
    category = (rng.random((8, 1)) < 0.5).astype(float)
    absent = np.where(np.arange(8)[:, None] % 3, 0.5, np.nan)
    for rows in (scaled, np.hstack([scaled, category, absent])):
        assert scaled_as_they_came(rows)
    for rows in (
        raw,
        raw - raw[0],
        1e-9 * (raw - raw[0])[:, 1:],
        (raw - raw.mean(0)) / np.where(raw.std(0) > 0, raw.std(0), 1.0),  # scaled by all rows
        np.hstack([scaled[:, 1:2], raw]),
        np.arange(8.0)[:, None],
        *(np.array([0.0, 1, low, high, low, 1, 1, 0])[:, None] for low, high in ((0, -1), (0.5, 2))),
        np.array([[0.0, 0.5, 0.7, 0.1], [0.0, 0.5, 0.1, 0.4]]).T,  # the same steps
        np.zeros((8, 2)),
        np.empty((8, 0)),
    ):
        assert not scaled_as_they_came(rows)


# ---------------------------------------------------------------------- one by one, and many


@pytest.mark.parametrize("model_type", [SepSARegressor, SepSAMultiTargetRegressor])
def test_single_samples_equal_the_learner_on_the_rows(model_type):
    data = list(stream(WARM_UP + 50, model_type))
    model = model_type(**SMALL)
    told = []
    for x, y in data:
        told.append(model.predict_one(x))
        model.learn_one(x, y)
    X = np.array([list(x.values()) for x, _ in data])
    Y = np.array([[y[name] for name in sorted(y)] if isinstance(y, dict) else [y] for _, y in data])
    expected = StreamLearner(3, Y.shape[1], regression=True, **model.of_learner() | {"seed": 0}).learn(X, Y)
    told = [[y[name] for name in sorted(y)] if isinstance(y, dict) else [y] for y in told[1:]]
    np.testing.assert_array_equal(told, expected[1:])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_frame_equals_its_rows_bit_by_bit(data):
    """Whatever is missing, whenever features and classes appear, whichever way the rows are cut into frames."""
    model_type = data.draw(st.sampled_from(MODEL_TYPES))
    warm = data.draw(st.sampled_from([0, 3, WARM_UP - 2, WARM_UP]))
    n = data.draw(st.integers(1, 12) | st.just(3 * ROWS_FOR_SCALE))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    names = [*"abcd", 5]
    X = rng.normal(3, 2, (n, len(names)))
    X[rng.random(X.shape) < data.draw(st.sampled_from([0.0, 0.3, 0.8]))] = np.nan
    weights = rng.choice([0.0, 1.0, 2.5], n, p=[0.2, 0.6, 0.2])
    targets = {
        SepSARegressor: pd.Series(rng.normal(size=n), name="load"),
        SepSAClassifier: pd.Series(rng.choice(["high", "low", "new", "newer"], n), name="level"),
        SepSAMultiTargetRegressor: pd.DataFrame(rng.normal(size=(n, 2)), columns=["sum", "a"]),
    }[model_type]
    one, many = trained(model_type, warm), trained(model_type, warm)
    rows = [dict(zip(names, x, strict=True)) for x in X.tolist()]
    records = targets.to_dict("records") if model_type is MODEL_TYPES[2] else targets
    for x, y, w in zip(rows, records, weights.tolist(), strict=True):
        one.learn_one(x, y, w=w)
    cut = data.draw(st.integers(0, n))
    for part in (slice(0, cut), slice(cut, n)):
        if len(X[part]):
            many.learn_many(pd.DataFrame(X[part], columns=names), targets[part], w=pd.Series(weights[part]))
    one._target_name = many._target_name
    assert inside(one) == inside(many)
    frame = pd.DataFrame(X, columns=names, index=range(100, 100 + n))
    told = many.predict_many(frame)
    assert list(told.index) == list(frame.index)
    singles = [one.predict_one(x) for x in rows]
    assert (told.to_dict("records") if model_type is MODEL_TYPES[2] else told.tolist()) == singles
    if model_type is SepSAClassifier:
        probabilities = many.predict_proba_many(frame)
        singles = [list(one.predict_proba_one(x).values()) for x in rows]
        np.testing.assert_allclose(probabilities, singles, rtol=1e-12)


def test_texts_booleans_and_dates_are_features():
    rng = np.random.default_rng(0)
    start = datetime.datetime(2026, 1, 5)
    frame = pd.DataFrame(
        {
            "city": np.array(["Oslo", "Rome", None], dtype=object)[rng.integers(0, 3, 150)],
            "open": rng.random(150) < 0.5,
            "time": [start + datetime.timedelta(hours=int(h)) for h in rng.integers(0, 168, 150)],
            "size": [f"{value:.3f}" if value > -1 else "n/a" for value in rng.normal(size=150)],
        }
    )
    y = (frame["city"] == "Rome") * 5.0 + frame["open"] * 3.0
    one, many = (SepSARegressor(seed=0) for _ in range(2))
    errors = []
    for x, target in zip(frame.to_dict("records"), y, strict=True):
        errors.append(abs(one.predict_one(x) - target))
        one.learn_one(x, target)
    many.learn_many(frame, y)
    named = {"city=Oslo", "city=Rome", "open", "size", "time:days", "time:month", "time:weekday", "time:hour"}
    assert set(one._learner.inputs.names) == set(many._learner.inputs.names) == named
    np.testing.assert_allclose(many.predict_many(frame), [one.predict_one(x) for x in frame.to_dict("records")])
    assert np.mean(errors[100:]) < 0.2 * np.mean(errors[:10])
    assert np.isfinite(one.predict_one({"city": "Lima", "time": pd.NaT, "open": np.bool_(True)}))
    days = np.datetime64("2026-01-05"), datetime.date(2026, 1, 5)
    assert len({one.predict_one({"time": day}) for day in days}) == 1


def test_before_anything_is_learned():
    X = pd.DataFrame({"a": [1.0, 2.0]}, index=[7, 8])
    assert SepSARegressor().predict_one({"a": 1.0}) == 0.0
    assert SepSARegressor().predict_many(X).to_dict() == {7: 0.0, 8: 0.0}
    assert SepSAClassifier().predict_one({"a": 1.0}) is None
    assert SepSAClassifier().predict_proba_one({"a": 1.0}) == {}
    assert SepSAClassifier().predict_many(X).to_dict() == {7: None, 8: None}
    assert SepSAClassifier().predict_proba_many(X).empty
    assert SepSAMultiTargetRegressor().predict_one({"a": 1.0}) == {}


# ---------------------------------------------------------------------- what is missing, or comes late


@pytest.mark.parametrize("n", [40, WARM_UP + 20])
def test_what_is_missing_stands_at_its_mean(n):
    data = list(stream(n))
    model = trained(SepSARegressor, n)
    settled = 1 << n.bit_length() - 1  # the scales were last taken from so many rows
    mean = np.mean([x["b"] for x, _ in data[: min(settled, WARM_UP)]])
    x = data[0][0]
    told = [model.predict_one(x | {"b": value}) for value in (None, math.nan, pd.NA, float(mean))]
    told.append(model.predict_one({name: x[name] for name in "ac"}))
    assert told == pytest.approx([told[-1]] * 5, rel=1e-12)
    assert told[0] != model.predict_one(x)
    lent = collections.defaultdict(float, a=1.0, b=2.0, other=3.0)
    model.predict_one(lent)
    model.learn_one(lent, 1.0)
    assert set(lent) == {"a", "b", "other"}  # it is not written to


def test_a_feature_that_appears_enters_exactly():
    """With a head alone: ridge regression on rows that have a zero where the feature was not there or not known."""
    model, data = SepSARegressor(hidden=[], seed=0, **PLAIN), list(stream(WARM_UP + 200, names="abz"))
    late = WARM_UP + 20
    rows = np.array([[x[name] for name in "abz"] for x, _ in data])
    mean, std = rows[:WARM_UP].mean(0), rows[:WARM_UP].std(0)
    watched = rows[late : late + ROWS_FOR_SCALE, 2]
    mean[2], std[2] = watched.mean(), watched.std()
    Phi = np.column_stack([(rows - mean) / std, np.ones(len(rows))])
    Phi[: late + ROWS_FOR_SCALE - 1, 2] = 0.0
    y = np.array([target + x["z"] for x, target in data])
    for t, (x, _) in enumerate(data):
        if t >= WARM_UP:
            A = Phi[:t].T @ Phi[:t] + 10.0 * np.eye(4)
            expected = y[0] + Phi[t] @ np.linalg.solve(A, Phi[:t].T @ (y[:t] - y[0]))
            if t != late + ROWS_FOR_SCALE - 1:  # then the feature is known only after the prediction
                assert model.predict_one(x) == pytest.approx(expected, rel=1e-5)  # inputs are float32
        model.learn_one(x if t >= late else {name: x[name] for name in "ab"}, float(y[t]))


def test_a_late_feature_that_starts_slowly_does_no_harm():
    """A sensor's first values lie close together; their difference is not its scale."""
    rng, error = np.random.default_rng(0), []
    model, sensor = SepSARegressor(seed=0), 0.0
    for t in range(4000):
        sensor = 0.99 * sensor + 0.14 * rng.normal()
        x = {"a": rng.normal()} | ({"sensor": sensor} if t >= 300 else {})
        y = x["a"] + sensor * abs(sensor)
        error.append(abs(y - model.predict_one(x)))
        model.learn_one(x, y)
    assert np.mean(error[2000:]) < 0.5 * np.mean(error[100:300])


@pytest.mark.parametrize("settled", [0, WARM_UP])
def test_features_beyond_the_limit_are_ignored_with_one_warning(settled):
    rng = np.random.default_rng(0)
    rows = [{"a": v, "b": 1 - v} for v in rng.normal(size=settled).tolist()]
    rows += [{"a": 0.1 * i, "c": 2.5 + i} for i in range(40)]  # a late number enters at its 32nd value
    rows += [{"a": 0.1 * i, "c": 2.5 + i, "d": 1.0, "e": 1.0, "f": 7.0} for i in range(40)]  # an indicator at once
    y = [x["a"] for x in rows]
    one, many, few = (SepSARegressor(**SMALL, max_features=limit) for limit in (4, 4, 256))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for x, target in zip(rows, y, strict=True):
            one.learn_one(x, target)
    assert [str(each.message)[:44] for each in told] == ["more than 4 features: later ones are ignored"]
    assert "FeatureHasher" in str(told[0].message)
    assert told[0].filename == __file__
    assert len(one._learner.inputs.names) == 4
    assert not one._learner.inputs.pending
    with pytest.warns(UserWarning, match="more than 4 features"):
        many.learn_many(pd.DataFrame(rows), pd.Series(y))
    assert inside(one) == inside(many)
    for x, target in zip(rows, y, strict=True):
        few.learn_one({name: value for name, value in x.items() if name in one._learner.inputs.names}, target)
    for x in rows[-5:]:
        assert one.predict_one(x) == few.predict_one({name: x[name] for name in x if name in few._learner.inputs.names})


# ---------------------------------------------------------------------- probabilities


@pytest.mark.parametrize("forgetting", [1.0, 0.99])
def test_probabilities_are_a_mixture_weighted_by_the_losses_made(forgetting):
    model = SepSAClassifier(**SMALL, body="fourier", loss="squared", forgetting=forgetting)
    loss = [0.0] * len(INVERSE_TEMPERATURES)
    for t, (x, y) in enumerate(stream(WARM_UP + 300, SepSAClassifier)):
        scores = model._predict_row(x) or []
        p = nearest_on_simplex(np.array(scores if y in model._learner.outputs else [*scores, 0.0]))
        parts = []
        for beta in INVERSE_TEMPERATURES:
            shares = [math.exp(beta * value) for value in p]
            parts.append([share / sum(shares) for share in shares])
        if t % 100 == 50:  # rows wait for each other between two such questions
            weights = [math.exp(min(loss) - value) for value in loss]
            mixed = [sum(w * part[k] for w, part in zip(weights, parts, strict=True)) for k in range(len(p))]
            expected = [value / sum(weights) for value in mixed]
            assert list(model.predict_proba_one(x).values()) == pytest.approx(expected, abs=1e-9)
        place = model._learner.outputs.get(y, len(model._learner.outputs))
        loss = [forgetting * old - math.log(part[place]) for old, part in zip(loss, parts, strict=True)]
        model.learn_one(x, y)


# ---------------------------------------------------------------------- bad input

GOOD = {"a": 1.0, "b": 1.0, "c": 1.0}
A, B, NEW = (rf"x\['{name}'\] must be a finite number, got " for name in ("a", "b", "new"))
BAD = [  # the sample, arguments of learn_one beside it, and the words
    *(({"x": GOOD | x}, words) for x, words in (
        ({"a": "inf"}, A + "inf"), ({"a": math.inf}, A + "inf"), ({"a": -math.inf, "b": math.inf}, A + "-inf"),
        ({"b": 10**400}, B), ({"b": [2.0]}, B + r"\[2.0\]"), ({"b": np.ones(2)}, B + "array"),
        ({"new": b"red"}, NEW + "b'red'"),
    )),
    ({"x": [1.0, 2.0, 3.0]}, "x must be a dict of features, got list"),
    *(({"w": w}, "^w must ") for w in (-1.0, math.nan, math.inf, "2", None)),
]  # fmt: skip
OTHERS = r"y must be a dict of the targets \['a', 'sum'\]"
BAD_TARGETS = [
    *((SepSARegressor, y, r"^y must be ") for y in (None, math.nan, math.inf, "1", [1.0])),
    *((SepSAClassifier, y, r"^y must be ") for y in (None, math.nan, ["high"])),
    *((SepSAMultiTargetRegressor, y, r"^y(\['\w+'\])? must be ") for y in (
        None, 1.0, {}, {"sum": 1.0, "a": None}, {"sum": math.nan, "a": 1.0}, {"sum": 1.0, "a": "2"},
    )),
    *((SepSAMultiTargetRegressor, y, OTHERS) for y in (
        {"sum": 1.0}, {"sum": 1.0, "b": 1.0}, {"sum": 1.0, "a": 1.0, "b": 1.0},
    )),
]  # fmt: skip


@pytest.mark.parametrize("n", [0, 20, WARM_UP + 20])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_bad_samples_change_nothing(model_type, n):
    model = trained(model_type, n)
    before, y = inside(model), next(stream(1, model_type))[1]
    cases = [({"y": y} | bad, words) for bad, words in BAD]
    cases += [({"y": bad}, words) for kind, bad, words in BAD_TARGETS if kind is model_type and (n or words != OTHERS)]
    for arguments, words in cases:
        for x in [arguments["x"]] if "x" in arguments else [GOOD, GOOD | {"new": 1.0}]:
            with pytest.raises((ValueError, TypeError), match=words):
                model.learn_one(**arguments | {"x": x})
        if "x" in arguments:
            with pytest.raises((ValueError, TypeError), match=words):
                model.predict_one(arguments["x"])
        assert inside(model) == before


@pytest.mark.parametrize("n", [0, 20, WARM_UP + 20])
def test_a_bad_row_refuses_the_frame(n):
    model = trained(SepSARegressor, n)
    before = inside(model)
    X, y = pd.DataFrame([GOOD, GOOD | {"new": 2.0}]), pd.Series([1.0, 2.0])
    for frame, targets, w, message in (
        (X.assign(a=[1.0, math.inf]), y, 1.0, r"X\['a'\] must be a finite number, got .*inf"),
        (X.assign(a=["1", "-inf"]), y, 1.0, r"X\['a'\] must be a finite number, got -inf"),
        (X, pd.Series([1.0, math.nan]), 1.0, "y must be a finite number, got nan"),
        (X, pd.Series(["1", "2"]), 1.0, "y must be a finite number, got '1'"),
        (X, y[:1], 1.0, "y must have one target for each of the 2 rows of X, got 1"),
        (X, y, pd.Series([1.0]), "w must have one weight for each of the 2 rows of X, got 1"),
        (X, y, pd.Series([1.0, -1.0]), "w must not be negative, got -1.0"),
        (X[:0], y[:0], 1.0, "X must have at least one row"),
    ):
        with pytest.raises(ValueError, match=message):
            model.learn_many(frame, targets, w=w)
        assert inside(model) == before


def test_options_are_checked_at_once_and_survive_a_clone():
    for options, message in (
        ({"forgetting": 1.2}, r"forgetting must be in \(0, 1\], got 1.2"),
        ({"optimizer": "lbfgs"}, "optimizer must be one of .* got 'lbfgs'"),
        ({"hidden": 50}, r"hidden must be a sequence of widths such as \(50,\), got 50"),
        ({"optimiser": "adam"}, "SepSARegressor has no option 'optimiser': did you mean 'optimizer'"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            SepSARegressor(**options)
    copy = SepSARegressor(optimizer="adam", lr=0.5, hidden=()).clone()
    assert copy.optimizer == "adam"
    assert copy.lr == 0.5
    assert list(copy.hidden) == []


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_clone_with_attributes_learns_on_by_itself(model_type):
    model = model_type(**SMALL)
    rows = list(stream(40, model_type))
    for x, y in rows[:30]:
        model.learn_one(x, y)
    copy, before = model.clone(include_attributes=True), inside(model)
    assert inside(copy) == before
    for x, y in rows[30:]:
        copy.learn_one(x, y)
    assert inside(model) == before
    for x, y in rows[30:]:
        model.learn_one(x, y)
    assert inside(model) == inside(copy)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_order_of_features_changes_no_bit_of_a_prediction(model_type):
    models = model_type(**SMALL), model_type(**SMALL)
    for i, (x, y) in enumerate(stream(80, model_type)):
        x = x | {"city": ("Oslo", "Rome")[i % 2], "late": i} if i > 20 else x
        turned = dict(random.Random(i).sample(sorted(x.items()), len(x)))
        assert models[0].predict_one(x) == models[1].predict_one(turned)
        models[0].learn_one(x, y)
        models[1].learn_one(turned, y)


DAY = datetime.date(2026, 3, 1)


@pytest.mark.parametrize("label", [DAY, pd.Timestamp(DAY), np.datetime64(1, "ns"), np.timedelta64(1, "s"), (DAY, 1)])
def test_dates_are_labels_that_are_saved(label):
    model = SepSAClassifier(**SMALL)
    for x, y in (({"a": 1.0}, label), ({"a": -1.0}, "other")) * 5:
        model.learn_one(x, y)
    loaded = SepSAClassifier.from_bytes(model.to_bytes())
    assert loaded.predict_one({"a": 1.0}) == label
    loaded.learn_one({"a": 1.0}, label)
    assert loaded.predict_proba_one({"a": 0.0}).keys() == {label, "other"}
    for missing in (pd.NA, pd.NaT, np.datetime64("NaT")):
        with pytest.raises(ValueError, match="y must be a class label"):
            model.learn_one({"a": 1.0}, missing)
