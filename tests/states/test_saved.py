"""Models that earlier versions saved: each loads, predicts what it predicted then, and goes on; or says what to do."""

from __future__ import annotations

import json
import lzma

import numpy as np
import pytest

import sepsa
from data.make_saved import FURTHER, PREDICTIONS, SAVED, rows_of
from learners import CASES
from river_models import REASON

DATA = SAVED.parent
SAID = json.loads(PREDICTIONS.read_text())

# What becomes of each file: "loads", or "refused: " and a pattern of the words that say what to do instead, as in
# `FATE = dict.fromkeys(CASES, "loads") | {"regressor.pickle": "refused: use sepsa.save"}`.
OLD_SELF_TUNING = ("rls-auto.sepsa", "rls-auto-ridge.sepsa", "sepsa-auto.sepsa")
FATE = (
    dict.fromkeys(CASES, "loads")
    | dict.fromkeys(OLD_SELF_TUNING, "refused: .*start a new SelfTuning")
    | dict.fromkeys(("forecaster.sepsa", "forecast.sepsa"), "refused: .*make a new one with the same parameters")
)

# A loaded model has the saved numbers, and a prediction is one forward pass of them, in float32: another processor
# rounds it in the sixth digit, and a softmax or a mixture of experts multiplies that by ten or so.
SAME = 1e-4
# It then learns 20 rows by today's rules, which may be better ones. A model that has lost what it had learned is off
# by the size of the targets themselves.
SIMILAR = 0.05


def close(found, expected, tolerance):
    """Within `tolerance` of the largest of the predictions; labels are equal."""
    found, expected = np.asarray(found), np.asarray(expected)
    if expected.dtype.kind == "U":
        return found.tolist() == expected.tolist()
    return found.shape == expected.shape and bool((abs(found - expected) <= tolerance * abs(expected).max()).all())


@pytest.mark.filterwarnings(
    "ignore:this pickle was written by sepsa",
    "ignore:the saved optimizer had noticed epochs",
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
)
@pytest.mark.parametrize("name", FATE)
def test_a_saved_model_predicts_what_it_did_and_goes_on(name, tmp_path):
    if name.startswith(("river", "keyed")):
        pytest.importorskip("river", reason=REASON)
    if "lightgbm" in name:
        pytest.importorskip("lightgbm", reason="LightGBM is not installed: pip install 'sepsa[boosting]'")
    case, fate = CASES[name], FATE[name]
    path = tmp_path / name
    path.write_bytes(lzma.decompress((SAVED / f"{name}.xz").read_bytes()))
    if fate != "loads":
        with pytest.raises((ValueError, ImportError), match=fate.removeprefix("refused: ")):
            case.predict(case.load(path))  # a command loads when it is called
        return
    model = case.load(path)
    assert close(case.predict(model), SAID[name]["before"], SAME)
    case.learn(model, rows_of(name), FURTHER)
    assert close(case.predict(model), SAID[name]["after"], SIMILAR)


@pytest.mark.parametrize("path", sorted(DATA.glob("format-*.sepsa")), ids=lambda path: path.stem)
def test_a_file_of_each_format_loads_and_goes_on(path):
    """A regressor that has learned X @ [1, 2, 3, 4]; a file of a released format is never written again."""
    expected = json.loads(path.with_suffix(".json").read_text())
    model = sepsa.load(path)
    rng = np.random.default_rng(7)
    X = rng.normal(size=(5, 4))
    assert close(model.predict(X), expected["before"], SAME)
    model.partial_fit(X, X @ np.arange(1.0, 5.0) + 0.1 * rng.normal(size=5))
    assert close(model.predict(X), expected["after"], SIMILAR)


def test_every_file_has_a_case_and_its_predictions():
    files = sorted(path.name.removesuffix(".xz") for path in SAVED.glob("*.xz"))
    assert files == sorted(SAID) == sorted(FATE)
