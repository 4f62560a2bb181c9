"""LightGBM as an expert: when it is fitted, on which rows, and that it is resumed to the same bits."""

import pickle

import numpy as np
import pytest

from sepsa import SepSAClassifier, SepSARegressor
from sepsa.stream import boosting

pytest.importorskip("lightgbm", reason="LightGBM is not installed: pip install 'sepsa[boosting]'")


@pytest.mark.parametrize("classes", [False, True])
def test_boosting_is_refitted_as_the_rows_grow_and_resumed_to_the_same_bits(classes, monkeypatch):
    fits, fit = [], boosting.Boosting._fit
    monkeypatch.setattr(boosting.Boosting, "_fit", lambda self: (fits.append(self.rows), fit(self)))
    rng = np.random.default_rng(0)
    X = rng.normal(size=(420, 3))
    y = np.sign(X[:, 0]) * 5 + X[:, 1] + 0.1 * rng.normal(size=420)
    y = np.digitize(y, [-3.0, 3.0]) if classes else y
    kind = SepSAClassifier if classes else SepSARegressor
    model = kind(random_state=0, experts=["lightgbm"])
    known = {"classes": [0, 1, 2]} if classes else {}
    told = model.prequential(X[:400], y[:400], **known)
    assert fits[-2:] == [246, 320]  # each 1.3 times the last; the first 256 rows are learned several times
    assert model.chosen_["experts"].keys() > {"network", "trees", "lightgbm"}
    one_by_one = kind(random_state=0, experts=["lightgbm"])
    parts = [one_by_one.prequential(X[at : at + 37], y[at : at + 37], **known) for at in range(0, 400, 37)]
    np.testing.assert_array_equal(np.concatenate(parts)[:400], told)
    others = [pickle.loads(pickle.dumps(model)), kind(random_state=0, experts=["lightgbm"])]
    others[1].load_state_dict(model.state_dict())
    ahead = model.prequential(X[400:], y[400:])
    for other in others:
        np.testing.assert_array_equal(other.prequential(X[400:], y[400:]), ahead)
    for name, place, value in (("due", None, 0), ("models", 0, 7), ("table", -1, np.nan), ("digest", None, "0")):
        state = others[1].state_dict()
        mine = state["learner"]["engine"]["models"][0]["state"]
        if place is None:
            mine[name] = value
        else:
            (mine[name][0] if name == "models" else mine[name]).flat[place] = value
        with pytest.raises(ValueError, match="digest" if name == "models" else name):
            others[1].load_state_dict(state)


def test_boosting_keeps_the_latest_rows_and_copies_do_not_share_what_they_learn(monkeypatch):
    monkeypatch.setattr(boosting, "LATEST", 60)
    rng = np.random.default_rng(0)
    X, Y, weight = rng.normal(size=(200, 2)), rng.normal(size=(200, 1)), rng.integers(0, 2, 200).astype(float)
    start, _ = boosting.Boosting(False).learned(X[:90], Y[:90], weight[:90])
    one, _ = start.learned(X[90:150], Y[90:150], weight[90:150])
    wide = np.hstack([X, X[:, :1]])
    two, _ = start.learned(wide[150:], np.hstack([Y, Y])[150:], weight[150:])  # an input and an output that come late
    expected = np.hstack([X, Y, weight[:, None]])[:150][weight[:150] > 0][-60:]
    np.testing.assert_array_equal(one.state_dict()["table"], expected)
    late = two.state_dict()["table"][-5:]
    np.testing.assert_array_equal(late[:, :3], wide[150:][weight[150:] > 0][-5:])
    before = two.state_dict()["table"][0]
    assert np.isnan(before[2])
    assert before[4] == 0.0
    assert two.predictions(wide, 2).shape == (200, 2)
