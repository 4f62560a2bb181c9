"""Inputs as they come: DataFrames with texts, categories, dates and booleans, sparse matrices, several labels."""

from __future__ import annotations

import datetime
import functools
import pickle
import zoneinfo

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import scipy.special
import scipy.stats
from sklearn.base import clone
from sklearn.datasets import make_classification
from sklearn.metrics import log_loss

from sepsa import SepSAClassifier, SepSARegressor
from sepsa.learner import rows
from sepsa.learner.columns import frame as frames
from sepsa.learner.columns import inputs
from sepsa.learner.columns.reader import Column, column_of_objects
from sepsa.shell.cells import RowBlock
from sepsa.shell.model import TableModel
from sepsa.states.schema import Entries

EFFECT = {"Oslo": 0.0, "Rome": 5.0, "Lima": -5.0}


def table(n=300, seed=0):
    """A frame with a column of each kind, and a target that needs all but the number of the day."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "size": rng.normal(size=n),
            "city": np.array(list(EFFECT))[rng.integers(0, 3, n)],
            "open": rng.random(n) < 0.5,
            "grade": pd.Categorical(rng.integers(1, 4, n)),
            "time": pd.Timestamp("2026-01-05") + pd.to_timedelta(rng.integers(0, 24 * 7, n), unit="h"),
        }
    )
    hour = frame["time"].dt.hour.to_numpy()
    y = frame["size"] + frame["city"].map(EFFECT) + 3.0 * frame["open"] + frame["grade"].astype(int) * 2.0
    return frame, y.to_numpy() + np.where(hour > 12, 2.0, 0.0)


@pytest.mark.parametrize("how", ["fit", "partial_fit"])
def test_a_frame_with_columns_of_all_kinds(how):
    X, y = table(900)
    model = getattr(SepSARegressor(random_state=0, max_iter=8), how)(X[:600], y[:600])
    assert model.score(X[600:], y[600:]) > 0.9
    assert model.n_features_in_ == 5
    assert model.feature_names_in_.tolist() == list(X)
    labels = np.where(y > y.mean(), "high", "low")
    classes = getattr(SepSAClassifier(random_state=0, max_iter=8), how)(X[:600], labels[:600])
    assert classes.score(X[600:], labels[600:]) > 0.85


def test_columns_are_encoded_as_those_of_a_table():
    X, y = table()
    X.loc[3:5, "city"] = None
    X["amount"] = np.where(np.arange(300) < 50, "n/a", X["size"].astype(str))  # a number that comes late, as text
    model = SepSARegressor(random_state=0, optimizer="adam")
    mine = model.prequential(X, y)
    codes, cities = X["city"].factorize()
    numbers = X["amount"].replace("n/a", "nan").astype(float).to_numpy()
    seconds = (X["time"] - pd.Timestamp(0)).dt.total_seconds().to_numpy()
    missing = np.full(300, np.nan)
    columns = {
        "size": Column(X["size"].to_numpy()),
        "city": Column(missing, codes.astype(np.int32), list(cities)),
        "open": Column(X["open"].to_numpy(float)),
        "grade": Column(missing, X["grade"].cat.codes.to_numpy(np.int32), ["1", "2", "3"]),
        "time": Column(missing, times=seconds),
        "amount": Column(numbers),
        "y": Column(y),
    }
    command = TableModel("y", seed=np.random.RandomState(0).randint(2**31 - 1))
    result = command.learn(RowBlock(columns, np.arange(300), str, [], {}))
    assert list(model._learner.inputs.names) == list(command.inputs.names)
    np.testing.assert_array_equal(mine, result.predictions)


def many_texts(n=120, levels=12, seed=0):
    rng = np.random.default_rng(seed)
    code = rng.integers(0, levels, n)
    frame = pd.DataFrame({"size": rng.normal(size=n), "shop": np.char.add("s", code.astype(str))})
    frame.loc[5, "shop"] = None
    return frame, np.sin(9.0 * code) * 5 + frame["size"].to_numpy() + 20.0


@pytest.fixture
def few_indicators(monkeypatch):
    monkeypatch.setattr(inputs, "AT_ONCE", 2)
    monkeypatch.setattr(frames, "CATEGORIES", 4)


def test_a_column_of_many_texts_gets_the_mean_of_the_targets_before_each_row(few_indicators):
    """Two texts get an indicator with their first row, two with their second; the fifth brings the column's mean."""
    X, y = many_texts()
    encoder = frames.FrameEncoder(list(X), X.shape[1])
    rows, new, said = encoder.learn(encoder.read(X, first=True), y[:, None])
    assert ["'shop' has more than 4 different texts" in text for text in said] == [True]
    shops, seen, named = X["shop"].tolist(), [], []
    sums, counts, targets, start = {}, {}, [], None
    for i, shop in enumerate(shops):
        if pd.isna(shop):
            assert start is None or np.isnan(rows[i, encoder.names["shop:mean"]])
            continue
        if shop not in named and (len(named) < 2 or shop in seen):
            if len(named) < 4:
                named.append(shop)
            elif start is None:
                start = i
                entered = next(each for each in new if each.name == "shop:mean")
                assert entered.row == i
                assert (entered.mean, 1 / entered.scale) == pytest.approx((np.mean(targets), np.std(targets)))
        if shop not in named or targets:  # rows count from the first text without an indicator of its own on
            seen.append(shop)
            if start is not None:
                expected = (sums.get(shop, 0.0) + 10 * np.mean(targets)) / (counts.get(shop, 0) + 10)
                assert rows[i, encoder.names["shop:mean"]] == pytest.approx(expected)
            sums[shop], counts[shop] = sums.get(shop, 0.0) + y[i], counts.get(shop, 0) + 1
            targets.append(y[i])
    assert [name for name in encoder.names if "=" in name] == [f"shop={shop}" for shop in named]
    again = frames.FrameEncoder.from_state(Entries("state", {"inputs": encoder.state_dict()}), X, X.shape[1])
    np.testing.assert_array_equal(again.encode(again.read(X), len(X)), encoder.encode(encoder.read(X), len(X)))
    unknown = encoder.read(X[:1].assign(shop="never seen"))
    assert encoder.encode(unknown, 1)[0, encoder.names["shop:mean"]] == pytest.approx(np.mean(targets))


@pytest.mark.filterwarnings("ignore:column 'shop' has more than")
@pytest.mark.parametrize("rows", [table, many_texts])
@pytest.mark.parametrize("kind", [SepSARegressor, SepSAClassifier])
def test_the_division_into_frames_does_not_matter(kind, rows, few_indicators):
    X, y = rows(120)
    y, told = (y, "predict") if kind is SepSARegressor else (np.where(y > np.median(y), "high", "low"), "predict_proba")
    whole, parts = kind(random_state=0).partial_fit(X, y), kind(random_state=0)
    for at in range(0, 120, 7):
        parts.partial_fit(X[at : at + 7], y[at : at + 7])
    one, two = (each._learner.inputs for each in (whole, parts))
    assert list(one.names) == list(two.names)
    assert list(one.levels) == list(two.levels)
    assert all(np.array_equal(levels.sums, two.levels[name].sums) for name, levels in one.levels.items())
    np.testing.assert_allclose(getattr(parts, told)(X), getattr(whole, told)(X), rtol=1e-9)
    assert kind(random_state=0, max_iter=3).fit(X, y).score(X, y) > 0.5


@pytest.mark.parametrize(
    ("texts", "hinted"),
    [
        ([f"id{i}" for i in range(80)], True),
        ([f"id{i}" for i in range(40)] + ["id3"] * 40, False),
        ([f"airport{i * i % 59 % 33}" for i in range(59)], False),
        ([f"zip{i * 7919 % 300}" for i in range(2000)], False),
    ],
)
def test_identifiers_are_hinted_in_the_same_words(texts, hinted):
    parts = [pd.DataFrame({"id": texts[k:]}) for k in range(2)]
    encoders = [frames.FrameEncoder(["id"], 1) for _ in parts]
    pairs = zip(encoders, parts, strict=True)
    said = [each.learn(each.read(part, first=True), np.zeros((len(part), 1)))[2] for each, part in pairs]
    assert said[0] == said[1]  # Python shows a warning once where its words are the same, as in the folds of a search
    assert any("looks like an identifier" in text for text in said[0]) == hinted


@pytest.mark.parametrize("numeric", [False, True])
@pytest.mark.parametrize("how", ["fit", "partial_fit"])
def test_columns_are_found_by_name(how, numeric):
    X, y = table()
    X = X[["open", "size"]] if numeric else X
    model = getattr(SepSARegressor(random_state=0, max_iter=2), how)(X, y)
    turned = X[list(X)[::-1]]
    np.testing.assert_array_equal(model.predict(turned), model.predict(X))
    with pytest.raises(ValueError, match="Feature names seen at fit time, yet now missing:\n- size"):
        model.predict(X.drop(columns="size"))
    with pytest.raises(ValueError, match="Feature names unseen at fit time:\n- colour"):
        model.predict(X.assign(colour=1.0))
    other = pickle.loads(pickle.dumps(model))
    model.partial_fit(X, y)
    other.partial_fit(turned, y)
    np.testing.assert_array_equal(model.predict(X), other.predict(X))


@pytest.mark.parametrize("library", ["pyarrow", "polars"])
def test_frames_of_other_libraries_are_those_of_pandas(library):
    package = pytest.importorskip(library, reason=f"{library} is not installed: frames of Arrow take the same way")
    X, y = table(80)
    X = X.assign(grade=X["grade"].astype(str))  # Polars has no categories of numbers
    X.loc[3, "city"] = None
    turn = package.from_pandas if library == "polars" else package.Table.from_pandas
    plain, other = (SepSARegressor(random_state=0).partial_fit(frame, y) for frame in (X, turn(X)))
    np.testing.assert_array_equal(other.predict(turn(X[list(X)[::-1]])), plain.predict(X))
    numbers = SepSARegressor(random_state=0).partial_fit(turn(X[["size", "open"]]), y)
    np.testing.assert_array_equal(numbers.predict(X[["open", "size"]]), numbers.predict(turn(X[["open", "size"]])))
    if library == "polars":
        with pytest.raises(TypeError, match="collect"):
            plain.predict(turn(X).lazy())


def test_pandas_dtypes_with_missing_values():
    X, y = table(100)
    plain = X.assign(size=X["size"].where(X["size"] < 1), open=X["open"].astype(float).where(X["size"] > -1))
    nullable = plain.astype({"size": "Float64", "open": "boolean", "city": "string"})
    objects = plain.astype({"size": object, "open": object, "time": object})
    zoned = plain.assign(time=plain["time"].dt.tz_localize("UTC").dt.tz_convert("Asia/Tokyo"))
    days = plain.assign(time=plain["time"].dt.date)
    model = SepSARegressor(random_state=0).partial_fit(plain, y)
    expected = model.predict(plain)
    for frame in (nullable, objects, zoned):
        np.testing.assert_array_equal(SepSARegressor(random_state=0).partial_fit(frame, y).predict(frame), expected)
    for kinds in ({"city": "category", "grade": str}, {"grade": object}):  # texts, and numbers among objects
        np.testing.assert_array_equal(model.predict(plain.astype(kinds)), expected)
    assert isinstance(days["time"].iloc[0], datetime.date)
    assert SepSARegressor(random_state=0).partial_fit(days, y)._learner.inputs.kinds["time"] == "dates"
    lengths = plain.assign(time=plain["time"] - plain["time"].min())
    model = SepSARegressor(random_state=0).partial_fit(lengths, y)
    assert list(model._learner.inputs.names).count("time") == 1  # a duration is a number, of seconds


def test_columns_without_names_are_found_by_position():
    X, y = table(100)
    X.columns = range(5)
    model = SepSARegressor(random_state=0).partial_fit(X, y)
    assert not hasattr(model, "feature_names_in_")
    assert list(model._learner.inputs.kinds) == ["x0", "x1", "x2", "x3", "x4"]
    copy = SepSARegressor.from_bytes(model.to_bytes())
    np.testing.assert_array_equal(copy.predict(X), model.predict(X))
    with pytest.raises(ValueError, match="X has 4 features, but SepSARegressor is expecting 5"):
        model.predict(X[[0, 1, 2, 3]])


def sparse_table(n=200, d=12, seed=0):
    X = scipy.sparse.random(n, d, density=0.2, random_state=seed, format="csr")
    return X, 10 * X.toarray()[:, 0] - 5 * (X.toarray()[:, 1] > 0) + 3


@pytest.mark.parametrize(
    ("how", "kind", "options"),
    [
        ("fit", "csr_matrix", {}),
        ("partial_fit", "coo_array", {}),
        ("partial_fit", "csr_matrix", {"batch_size": 3}),
    ],
    ids=["fit", "partial_fit", "batches"],
)
def test_sparse_rows_are_learned_as_dense_ones(how, kind, options, monkeypatch):
    monkeypatch.setattr(rows, "NUMBERS", 96)  # of 12 columns 8 rows at a time; parts end where batches do
    X, y = sparse_table(200)
    X.data[::9] = np.nan
    given, options = getattr(scipy.sparse, kind)(X), {"random_state": 0, "max_iter": 3} | options
    mine, dense = (getattr(SepSARegressor(**options), how)(table, y) for table in (given, X.toarray()))
    np.testing.assert_allclose(mine.predict(given, True), dense.predict(X.toarray(), True), rtol=1e-9)
    np.testing.assert_allclose(mine.prequential(given, y), dense.prequential(X.toarray(), y), rtol=1e-9)
    np.testing.assert_allclose(mine.predict(X.toarray()), dense.predict(given), rtol=1e-9)
    labels = np.where(y > 3, "high", "low")
    classes = getattr(SepSAClassifier(random_state=0, max_iter=3), how)(given, labels)
    assert classes.predict_proba(given).shape == (len(y), 2)
    assert classes.score(given, labels) > 0.8
    X.data[3] = np.inf
    with pytest.raises(ValueError, match="infinity"):
        mine.predict(X)


@pytest.mark.parametrize("how", ["fit", "partial_fit"])
def test_a_sparse_matrix_is_never_dense_as_a_whole(how, monkeypatch):
    X, y = sparse_table(400)
    largest, dense = [], scipy.sparse.csr_matrix.toarray
    monkeypatch.setattr(rows, "NUMBERS", 600)

    def toarray(self, *args, **kwargs):
        largest.append(self.shape[0] * self.shape[1])
        return dense(self, *args, **kwargs)

    for kind in (scipy.sparse.csr_matrix, scipy.sparse.csc_matrix):
        monkeypatch.setattr(kind, "toarray", toarray, raising=False)
    getattr(SepSARegressor(random_state=0, max_iter=1), how)(X, y).predict(X)
    assert 0 < max(largest) <= 600 + 12 * 32 * 8 < X.shape[0] * X.shape[1]  # a part, or the rows of a few mini-batches


def labelled(n=600, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 3))
    Y = np.stack([X[:, 0] > 0, X[:, 0] * X[:, 1] > 0, X[:, 2] + rng.normal(size=n) > 1.5], 1)
    return X, Y.astype(int)


@pytest.mark.parametrize("how", ["fit", "partial_fit"])
def test_several_labels_are_learned_each_by_itself(how):
    X, Y = labelled(900)
    model = getattr(SepSAClassifier(random_state=0, max_iter=10), how)(X[:600], Y[:600])
    predicted, proba = model.predict(X[600:]), model.predict_proba(X[600:])
    assert predicted.shape == proba.shape == Y[600:].shape
    assert predicted.dtype == Y.dtype
    np.testing.assert_array_equal(predicted, proba > 0.5)
    np.testing.assert_allclose(scipy.special.expit(model.decision_function(X[600:])), proba)
    assert ((predicted == Y[600:]).mean(0) > [0.9, 0.8, 0.75]).all()
    np.testing.assert_allclose(proba.mean(0), Y[600:].mean(0), atol=0.1)
    losses = [log_loss(Y[600:, k], proba[:, k]) for k in range(3)]
    assert (losses < 0.95 * scipy.stats.entropy(np.stack([1 - Y.mean(0), Y.mean(0)]))).all()  # of a constant
    assert model.classes_.tolist() == [0, 1, 2]
    assert 0 <= model.score(X[600:], Y[600:]) <= 1


def test_a_saved_model_of_several_labels_goes_on():
    X, Y = labelled(200)
    model = SepSAClassifier(random_state=0, max_iter=2).fit(X[:100], Y[:100])
    copy = SepSAClassifier.from_bytes(model.to_bytes()).partial_fit(X[100:], Y[100:])
    np.testing.assert_array_equal(copy.predict_proba(X), model.partial_fit(X[100:], Y[100:]).predict_proba(X))
    sparse = SepSAClassifier(random_state=0, max_iter=2).fit(X, scipy.sparse.csr_array(Y))
    np.testing.assert_array_equal(sparse.predict(X), clone(model).fit(X, Y).predict(X))


def test_targets_that_are_no_labels_are_refused():
    X, Y = labelled(50)
    model, one_label = (SepSAClassifier(random_state=0).partial_fit(X, y) for y in (Y, Y[:, 0]))
    before = model.state_dict()["learner"]["losses"]
    three, labels = r"y must have shape \(n, 3\) as before", r"y must hold labels .*sklearn\.multioutput"
    for learn, y, words in (
        *((SepSAClassifier().fit, y, labels) for y in (Y + 1, np.where(Y, "yes", "no"), Y * 0.5)),
        *((model.partial_fit, y, three) for y in (Y[:, :2], Y[:, 0])),
        (one_label.partial_fit, Y, r"y must have shape \(n,\) as before, got \(50, 3\)"),
        (functools.partial(model.partial_fit, classes=[0, 1]), Y, "classes must be None or 0 to 2"),
        (SepSAClassifier(class_weight={0: 2.0}).fit, Y, "class_weight must be None for multilabel targets"),
    ):
        with pytest.raises(ValueError, match=words):
            learn(X, y)
    np.testing.assert_array_equal(model.state_dict()["learner"]["losses"], before)
    assert model.partial_fit(X, Y, classes=[0, 1, 2]).predict(X).shape == (50, 3)


@pytest.mark.parametrize("how", ["fit", "partial_fit"])
@pytest.mark.parametrize("classes", [2, 3])
def test_decision_function_is_the_logarithm_of_the_probabilities(classes, how):
    X, y = make_classification(300, 6, n_informative=4, n_classes=classes, random_state=0)
    model = getattr(SepSAClassifier(random_state=0, max_iter=5), how)(X, np.array(list("abc"))[y])
    scores, proba = model.decision_function(X), model.predict_proba(X)
    assert scores.shape == ((300,) if classes == 2 else (300, 3))
    scores = np.stack([0 * scores, scores], 1) if classes == 2 else scores  # of two classes the second's alone
    np.testing.assert_allclose(scipy.special.softmax(scores, 1), proba)
    np.testing.assert_array_equal(model.classes_[scores.argmax(1)], model.predict(X))


def test_verbose_prints_passes_and_changes_nothing(capsys):
    X = np.random.default_rng(0).normal(size=(100, 2))
    y, quiet = 1000 * X[:, 0], SepSARegressor(random_state=0, max_iter=4)
    loud = clone(quiet).set_params(verbose=1).fit(X, y)
    lines = capsys.readouterr().out.splitlines()
    np.testing.assert_array_equal(loud.predict(X), quiet.fit(X, y).predict(X))
    (trial,) = [line for line in lines if line.startswith(f"{loud.n_iter_} passes: squared error ")]
    last = [line for line in lines if line.startswith("-- Pass ")][-1]
    assert last.startswith("-- Pass 4 of 4: squared error ")
    assert max(float(last.split()[7]), float(trial.split()[4])) < 0.5  # in units of the targets' variance
    assert capsys.readouterr().out == ""
    SepSAClassifier(random_state=0, max_iter=1, verbose=1).fit(X, y > 0)
    assert capsys.readouterr().out.startswith("-- Pass 1 of 1: ")


def learned(columns=None):
    X, y = table(60)
    X = X if columns is None else X[columns]
    return SepSARegressor(random_state=0).partial_fit(X, y), X, y


def test_an_array_after_a_frame_and_a_frame_after_an_array():
    model, X, y = learned()
    for method in (model.predict, lambda rows: model.partial_fit(rows, y)):
        with pytest.raises(ValueError, match=r"X must be a DataFrame with the columns 'size', 'city', .* got ndarray"):
            method(X.to_numpy())
    model, X, y = learned(["size", "open"])  # numbers alone: as scikit-learn's own estimators
    with pytest.warns(UserWarning, match="X does not have valid feature names"):
        model.predict(X.to_numpy(float))
    model = SepSARegressor(random_state=0).partial_fit(X.to_numpy(float), y)
    with pytest.warns(UserWarning, match="X has feature names, but SepSARegressor was fitted without feature names"):
        model.predict(X)
    with pytest.raises(ValueError, match=r"X\['open'\] must hold numbers, .* got texts of dtype"):
        model.predict(X.assign(open="yes"))


CHANGES = {
    "number to text": (lambda X: X.assign(size="large"), "size", "numbers", "texts"),
    "number to category": (lambda X: X.astype({"size": "category"}), "size", "numbers", "categories"),
    "category to number": (lambda X: X.assign(grade=2), "grade", "categories", "numbers"),
    "date to text": (lambda X: X.assign(time="noon"), "time", "dates", "texts"),
    "text to date": (lambda X: X.assign(city=X["time"]), "city", "texts", "dates"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_column_that_changes_its_type_is_named(change):
    model, X, y = learned()
    make, column, before, now = CHANGES[change]
    state = model.state_dict()["learner"]["inputs"]
    for method in (model.predict, lambda rows: model.partial_fit(rows, y)):
        with pytest.raises(ValueError, match=rf"X\['{column}'\] must hold {before}, .* got {now} of dtype"):
            method(make(X))
    assert model.state_dict()["learner"]["inputs"] == state


def test_missing_texts_and_categories_have_no_indicator():
    X, y = table(60)
    X.loc[::3, "city"] = None
    X.loc[1::3, "grade"] = np.nan
    X.loc[::4, "time"] = pd.NaT
    model = SepSARegressor(random_state=0).partial_fit(X, y)
    names = list(model._learner.inputs.names)
    seen = model._check_rows(X)
    cities = [i for i, name in enumerate(names) if name.startswith("city=")]
    assert len(cities) == 3
    assert (seen[::3, cities] == 0).all()
    assert (seen[1::3, cities].sum(1) == 1).all()
    assert np.isnan(seen[::4, names.index("time:days")]).all()
    np.testing.assert_array_equal(seen[:, names.index("size")], X["size"])
    for grade in (1, 2, 3):
        np.testing.assert_array_equal(seen[:, names.index(f"grade={grade}")], X["grade"] == grade)
    weekdays = X["time"].dt.day_of_week.to_numpy()[1::4]
    np.testing.assert_array_equal(seen[1::4, names.index("time:weekday")], weekdays)
    for missing in (None, np.nan, pd.NA, "", "NA", "?"):
        np.testing.assert_array_equal(model.predict(X.assign(city=missing)), model.predict(X.assign(city=None)))
    empty = SepSARegressor(random_state=0).partial_fit(X.assign(city=None), y)  # a column that comes to life later
    assert empty._learner.inputs.kinds["city"] is None
    assert empty.partial_fit(X, y)._learner.inputs.kinds["city"] == "texts"


UNUSABLE = {
    r"X\['city'\] must hold numbers, dates or texts, got bytes: convert": lambda X: X.assign(city=[b"x"] * 20),
    r"X\['city'\] must hold .*got dates and numbers": lambda X: X.assign(city=[1, datetime.date(2026, 1, 1)] * 10),
    r"X\['size'\] must be a finite number, got -inf": lambda X: X.assign(size=-np.inf),
    r"two columns 'city'|'city' 2 times": lambda X: pd.concat([X, X[["city"]]], axis=1),
    "minimum of 1 is required": lambda X: X[:0],
    "inconsistent numbers of samples": lambda X: X[1:],
}


@pytest.mark.parametrize("words", UNUSABLE)
def test_cells_that_cannot_be_encoded_are_named(words):
    X, y = table(20)
    model, bad = SepSARegressor(), UNUSABLE[words](X)
    for learn in (model.fit, model.partial_fit):
        with pytest.raises(ValueError, match=words):
            learn(bad, y if len(bad) else y[:0])
    assert not hasattr(model, "n_features_in_")


def test_the_second_hour_of_a_night_when_clocks_go_back_is_another_time():
    zone = zoneinfo.ZoneInfo("Europe/Berlin")
    times = [datetime.datetime(2026, 10, 25, 2, 30, fold=fold, tzinfo=zone) for fold in (0, 1)]
    assert np.diff(column_of_objects(times).times).tolist() == [3600.0]
