"""Models that an earlier state of the code saved: each loads, predicts what it predicted then, and goes on."""

import json
import lzma

import numpy as np
import pytest

from data.make_saved import FURTHER, PREDICTIONS, SAVED, rows_of
from learners import CASES
from river_models import REASON

SAID = json.loads(PREDICTIONS.read_text())

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


@pytest.mark.filterwarnings("ignore:this pickle was written by sepsa")
@pytest.mark.parametrize("name", CASES)
def test_a_saved_model_predicts_what_it_did_and_goes_on(name, tmp_path):
    if name.startswith(("river", "keyed")):
        pytest.importorskip("river", reason=REASON)
    if "lightgbm" in name:
        pytest.importorskip("lightgbm", reason="LightGBM is not installed: pip install 'sepsa[boosting]'")
    case = CASES[name]
    path = tmp_path / name
    path.write_bytes(lzma.decompress((SAVED / f"{name}.xz").read_bytes()))
    model = case.load(path)
    assert close(case.predict(model), SAID[name]["before"], SAME)
    case.learn(model, rows_of(name), FURTHER)
    assert close(case.predict(model), SAID[name]["after"], SIMILAR)


def test_every_file_has_a_case_and_its_predictions():
    files = sorted(path.name.removesuffix(".xz") for path in SAVED.glob("*.xz"))
    assert files == sorted(SAID) == sorted(CASES)
