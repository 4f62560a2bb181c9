"""Answers on fixed data against a record: losses and predictions after a few updates, to the digits that survive.

`python tests/test_goldens.py` records them anew, where a change of numbers is intended; say so in CHANGELOG.md. Bits
are compared between two trees on one machine, by tests/goldens/compare.py.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from goldens import compare
from sepsa import SepSAClassifier, SepSARegressor

RECORD = Path(__file__).parent / "goldens" / "record.json"
heads = compare.heads()

# Relative to the largest number of an answer. One last bit of every float32 input changes an answer by at most 5e-7
# after 16 updates of a head or 60 rows of a stream, also that of the quasi-Newton head, whose state does not survive
# 500 updates. Twenty times as much is for other libraries, which also sum in another order.
TOLERANCE = 1e-5


FEW = 60  # rows before the answers of streams
BODIES = {
    "linear": {"body": "fourier", "hidden_layer_sizes": (), "forgetting": 1.0},
    "network": {"body": "fourier", "hidden_layer_sizes": (8,), "forgetting": 0.99},
}


def stream_answers():
    """Predictions of a few rows, each made before the row is learned, and the mean loss of the last half of them."""
    rng = np.random.default_rng(8)
    X = rng.normal(size=(FEW, 3))
    y = X @ [1.0, -2.0, 0.5] + np.sin(X[:, 0]) + 0.1 * rng.normal(size=FEW)
    labels = np.where(y > 0, "up", "down")
    result = {}
    for name, options in BODIES.items():
        told = SepSARegressor(random_state=0, **options).prequential(X, y)
        loss = np.mean((told - y)[FEW // 2 :] ** 2)
        result[f"regressor, {name}"] = {"losses": [float(loss)], "predictions": told[-8:].tolist()}
        told = SepSAClassifier(random_state=0, **options).prequential(X, labels, method="predict_proba")
        loss = -np.mean(np.log(np.where(labels == "up", told[:, 1], told[:, 0])[FEW // 2 :]))
        result[f"classifier, {name}"] = {"losses": [float(loss)], "predictions": told[-8:, 0].tolist()}
    return result


def close(found, known, tolerance=TOLERANCE):
    assert found.keys() == known.keys()
    for part, values in known.items():
        np.testing.assert_allclose(found[part], values, rtol=0, atol=tolerance * np.abs(values).max(), err_msg=part)


@pytest.mark.parametrize("name", heads.RECORDED)
def test_every_backend_of_a_head_gives_the_recorded_answers(name):
    known = json.loads(RECORD.read_text())["heads"][name]
    for backend in ("chosen", "torch", *(["captured"] if name in heads.SOLVERS else [])):
        close(heads.answers(name, backend), known)


def test_streams_give_the_recorded_answers():
    known, found = json.loads(RECORD.read_text())["stream"], stream_answers()
    assert found.keys() == known.keys()
    for name, answers in found.items():
        close(answers, known[name])


def test_two_trees_are_compared_by_their_bits():
    one, other = np.array([1.0, 2.0]), np.array([1.0, 2.5])
    assert compare.difference(one, other) == "up to 5.0e-01, of numbers up to 2.0e+00"
    assert compare.difference(one, other[:1]) == "float64 (2,) and float64 (1,)"
    assert compare.difference(np.array("a"), np.array("b")) == "other text"


def rounded(answers):
    """Seven digits, of which the last may be another on another machine."""
    return {part: [float(f"{value:.7g}") for value in values] for part, values in answers.items()}


if __name__ == "__main__":
    record = {
        "heads": {name: rounded(heads.answers(name, "torch")) for name in heads.RECORDED},
        "stream": {name: rounded(answers) for name, answers in stream_answers().items()},
    }
    RECORD.write_text(json.dumps(record).replace("}, ", "},\n ") + "\n")  # a case a line
