"""No prediction knows a later row or class, in any face of the learner; one call gives what many give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import learners
from learners import CASES, CLASSIFIER, FOURIER, REGRESSOR, SMALL, Estimator
from sepsa.interfaces.keyed import KeyedLearner
from sepsa.learner import options
from sepsa.river import SepSARegressor as RIVER

N, LATE = 160, 120
NAMES = """
    regressor regressor-fourier regressor-gaps regressor-frame regressor-texts
    classifier classifier-fourier classifier-fit-frame river-regressor river-classifier
    river-multi-target forecaster stream stream-classify-fourier
"""
FACES: dict[str, Any] = {name: CASES[f"{name}.sepsa"] for name in NAMES.split()}
FACES |= {
    "keyed": CASES["keyed.sqlite"],
    "regressor, batches": Estimator(REGRESSOR, SMALL | {"batch_size": 16}),
    "classifier, batches": Estimator(CLASSIFIER, SMALL | {"batch_size": 16}),
    "classifier, batches, network": Estimator(CLASSIFIER, FOURIER | {"batch_size": 16}),
    "classifier, texts": Estimator(CLASSIFIER, SMALL, table=learners.texts),
}


def rows(name: str) -> tuple[Any, Any]:
    """Inputs and targets; of three classes one comes at row 70, first in the order of names."""
    X, y = (part[:N].copy() for part in learners.stream())
    if "class" not in name:
        return X, y
    return X, np.where((np.arange(N) >= 70) & (X[:, 0] > 1), "a", np.where(y > 0, "m", "z"))


@pytest.mark.parametrize("name", FACES)
def test_one_call_is_many_and_later_rows_and_classes_change_no_earlier_bit(name):
    face, (X, y) = FACES[name], rows(name)
    whole, model, parts = face.prequential(face.make(), X, y), face.make(), []
    for some in np.split(np.arange(N), [32, 64, 128]):
        parts += face.prequential(model, X[some], y[some], some[0])
    assert parts == whole
    other = y.copy()
    other[LATE:] = np.where(np.arange(N - LATE) % 3, "b", "y") if "class" in name else 1e6
    X[LATE + 1 :] *= -3
    told = LATE + (name != "forecaster")  # a forecaster tells what it forecasts after the row
    assert face.prequential(face.make(), X, other)[:told] == whole[:told]


@pytest.mark.parametrize("name", [name for name, face in FACES.items() if not isinstance(face, learners.River)])
def test_no_rows_are_an_error_of_one_line_that_changes_nothing(name):
    face, (X, y) = FACES[name], rows(name)
    model = face.make()
    if isinstance(face, learners.Command):  # a table without new rows is none
        face.prequential(model, X, y)
        assert face.prequential(model, X[:0], y[:0]) == []
        return
    with pytest.raises(ValueError, match=r"\A.*(0 sample|shape \(0)[^\n]*\Z"):
        face.prequential(model, X[:0], y[:0])
    assert face.prequential(model, X, y) == face.prequential(face.make(), X, y)


@pytest.mark.parametrize("labels", [["u", "v"], [3, 4], [1.0, 2.0], [True, False], np.array(["u", "v"], object)])
def test_before_the_first_class_labels_are_empty(labels):
    X, y = np.arange(8.0)[:, None], np.asarray(labels)[[0, 1] * 4]
    told = CLASSIFIER(random_state=0).prequential(X, y)
    assert told.dtype == y.dtype
    assert told[0] == ("" if y.dtype.kind in "OU" else 0)
    assert set(told[1:].tolist()) <= set(y.tolist())
    proba = CLASSIFIER(random_state=0).prequential(X, y, method="predict_proba")
    assert not proba[0].any()
    assert proba[1, y[0] == np.unique(y)] == 1
    np.testing.assert_allclose(proba[1:].sum(1), 1)
    assert CLASSIFIER(random_state=0).prequential(X, y, np.unique(y), method="predict_proba")[0].all()


def test_keys_tell_each_their_own_classes():
    X, y = rows("classes")
    keys, last = np.arange(N) % 2, np.append(y[:-1], "0")
    with KeyedLearner(CLASSIFIER(random_state=0)) as one, KeyedLearner(CLASSIFIER(random_state=0)) as two:
        told = one.prequential(keys, X, y)
        assert told[:2].tolist() == ["", ""]
        np.testing.assert_array_equal(two.prequential(keys, X, last), told)


@pytest.mark.parametrize("how", ["fit", "partial_fit"])
@pytest.mark.parametrize("sentinel", [-1e5, 1e20, 1e200, -1e300])
def test_a_sentinel_among_the_targets_is_bounded(how, sentinel):
    X, y = (part[:200] for part in learners.stream())
    bad = np.where(np.arange(200) == 7, sentinel, y)
    clean, model = (getattr(REGRESSOR(random_state=0, max_iter=4), how)(X, of) for of in (y, bad))
    off, (mean, std) = np.delete(np.abs(clean.predict(X) - y), 7), model.predict(X, return_std=True)
    assert np.delete(np.abs(mean - y), 7).mean() < 2 * off.mean()
    assert np.median(std) < 3 * np.median(clean.predict(X, return_std=True)[1])


def test_targets_and_weights_that_overflow_or_are_no_numbers_are_named():
    X, y = (part[:40] for part in learners.stream())
    small = {"random_state": 0, "max_iter": 2}
    with pytest.raises(ValueError, match=r"y must lie within ±1e\+100, got a target of size .*e\+200: rescale y"):
        REGRESSOR(**small).fit(X, y * 1e200)
    for how in ("fit", "partial_fit"):
        with pytest.raises(ValueError, match=r"y must lie within ±1e\+100, got a target of size 1e\+200"):
            getattr(REGRESSOR(**small, loss="squared"), how)(X, np.r_[1e200, y[1:]])
    for value in ("low", None):
        with pytest.raises(ValueError, match=f"y must hold numbers, got {value!r}: .* use SepSAClassifier for classes"):
            REGRESSOR().fit(X, [*y[1:], value])
    for kind, targets in ((REGRESSOR, y), (CLASSIFIER, y > 0)):
        with pytest.raises(ValueError, match=r"sample_weight must be at most 1e\+30 for fit, got 1e\+300: divide all"):
            kind(**small).fit(X, targets, sample_weight=np.where(np.arange(40) % 2, 1e300, 1e-300))


@pytest.mark.parametrize("how", ["fit", "partial_fit", "prequential"])
def test_an_integer_beyond_all_floats_names_its_column(how):
    X, y = (part[:20] for part in learners.stream())
    given, frame = X.tolist(), learners.frame(X).astype({"b": object})
    given[3][1] = frame.loc[3, "b"] = huge = -(10**400)
    said = r"{} must hold numbers up to 1.8e\+308, got an integer of 401 digits: rescale it"
    for inputs, targets, weight, where in (
        (given, y, None, r"X\[:, 1\]"),
        (frame, y, None, r"X\['b'\]"),
        (X, [huge, *y[1:]], None, "y"),
        (X, [[1.0, huge]] * 20, None, r"y\[:, 1\]"),
        (X, y, [-huge] * 20, "sample_weight"),
    ):
        with pytest.raises(ValueError, match=said.format(where)):
            getattr(REGRESSOR(max_iter=2), how)(inputs, targets, sample_weight=weight)
    with pytest.raises(ValueError, match=said.format(r"X\[:, 1\]")):
        REGRESSOR().partial_fit(X, y).predict(given)


@pytest.mark.parametrize("pair", options.PAIRS)
def test_an_option_by_its_name_in_the_other_interface_is_named_and_documented(pair):
    for model, own, other in ((RIVER, *pair), (REGRESSOR, *reversed(pair))):
        with pytest.raises(TypeError, match=f"SepSARegressor has no option {other!r}: did you mean {own!r}"):
            model(**{other: 1})
    page = (Path(__file__).parents[2] / "docs/api/stream.md").read_text()
    assert f"| `{pair[1]}` | `{pair[0]}` |" in page


def test_an_unknown_option_names_the_class_and_the_closest_one():
    for kind, option, words in (
        (CLASSIFIER, "clas_weights", "SepSAClassifier has no option 'clas_weights': did you mean 'class_weight'"),
        (REGRESSOR, "xyz", "SepSARegressor has no option 'xyz': its options are hidden_layer_sizes, "),
    ):
        with pytest.raises(TypeError, match=words):
            kind(**{option: 1})
    with pytest.raises(TypeError, match="takes from 1 to 3 positional arguments but 4 were given"):
        REGRESSOR((4,), "relu", "adam")
