"""Targets that arrive later, by identifier: the bits of immediate ones, a limit, saved states, wrong identifiers."""

import datetime
import pickle

import pytest

import river_models

if not river_models.THERE:
    pytest.skip(river_models.REASON, allow_module_level=True)

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sepsa.river import SepSAClassifier, SepSAMultiTargetRegressor, SepSARegressor
from sepsa.stream.keyed import KeyedLearner
from sepsa.stream.learner import WARM_UP
from test_river import MODEL_TYPES, SMALL, inside, stream, trained

SAMPLE, OTHER = {"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 1.0, "b": 2.0, "c": 4.0}


def mixed(n, model_type, seed):
    """Samples with texts, dates, missing values and features that appear late."""
    rng = np.random.default_rng(seed)
    for i, (x, y) in enumerate(stream(n, model_type, seed)):
        x["city"] = ("Oslo", "Rome", "", None)[rng.integers(4)]
        x["day"] = datetime.date(2026, 1, 1 + i % 28)
        if i % 3 == 0:
            x["b"] = (None, float("nan"))[i % 2]
        if i > n // 2:
            x["late"] = int(rng.integers(9))
        yield x, y


@settings(max_examples=10, deadline=None)
@given(
    model_type=st.sampled_from(MODEL_TYPES),
    known=st.sampled_from([0, WARM_UP - 5, WARM_UP + 5]),
    seed=st.integers(0, 99),
    saved=st.sampled_from([None, "file", "pickle"]),
)
def test_late_targets_give_the_bits_of_immediate_ones(model_type, known, seed, saved):
    late, at_once = trained(model_type, known), trained(model_type, known)
    samples = list(mixed(12, model_type, seed))
    order = np.random.default_rng(seed).permutation(len(samples)).tolist()
    for i, (x, _) in enumerate(samples):
        assert late.predict_one(x, id=("order", i)) == at_once.predict_one(x)
    if saved:
        late = type(late).from_bytes(late.to_bytes()) if saved == "file" else pickle.loads(pickle.dumps(late))
    assert late.open_ids_ == len(samples)
    for i in order:
        x, y = samples[i]
        late.learn_one(y=y, id=("order", i), w=1.0 + i)
        at_once.learn_one(x, y, w=1.0 + i)
        assert late.predict_one(SAMPLE) == at_once.predict_one(SAMPLE)
    assert inside(late) == inside(at_once)
    assert (late.open_ids_, late.dropped_ids_) == (0, 0)


def test_probabilities_and_distributions_keep_the_sample_too():
    model = trained(SepSAClassifier)
    assert model.predict_proba_one(SAMPLE, id=1) == model.predict_proba_one(SAMPLE)
    assert model.predict_one(SAMPLE, id=1) == model.predict_one(SAMPLE)  # the same sample again
    assert model.open_ids_ == 1
    for kind in (SepSARegressor, SepSAMultiTargetRegressor):
        model = trained(kind)
        model.predict_one(SAMPLE, with_dist=True, id=1)
        assert model.open_ids_ == 1


def test_the_oldest_is_dropped_and_counted():
    model = SepSARegressor(**SMALL, max_open_ids=3)
    for i in range(5):
        model.predict_one(SAMPLE, id=i)
    assert (model.open_ids_, model.dropped_ids_) == (3, 2)
    with pytest.raises(ValueError, match=r"id 1 is not open: .* among the 2 that were dropped .*\(max_open_ids\)"):
        model.learn_one(y=1.0, id=1)
    loaded = SepSARegressor.from_bytes(model.to_bytes())
    for each in (model, loaded):
        for i in (2, 3, 4):
            each.learn_one(y=1.0, id=i)
        assert (each.open_ids_, each.dropped_ids_) == (0, 2)
    assert SepSARegressor.from_bytes(model.to_bytes()).dropped_ids_ == 2  # also where none is open


@pytest.mark.parametrize("n", [0, WARM_UP + 20])
def test_a_wrong_identifier_or_target_changes_nothing(n):
    model = trained(SepSARegressor, n)
    model.predict_one(SAMPLE, id="open")
    before = inside(model)
    for arguments, message in (
        ({"y": 1.0, "id": "never"}, "id 'never' is not open: no sample was predicted with it"),
        ({"y": None, "id": "open"}, "y must be a finite number, got None"),
        ({"id": "open"}, "y must be a finite number, got None: leave the sample out"),
        ({"y": 1.0, "w": -1.0, "id": "open"}, "w must not be negative"),
        ({"x": SAMPLE, "y": 1.0, "id": "open"}, "x must be left out where id is given"),
        ({"y": 1.0, "id": object()}, "must be strings, numbers, booleans, None or tuples"),
    ):
        with pytest.raises(ValueError, match=message):
            model.learn_one(**arguments)
    with pytest.raises(ValueError, match="id must name a sample, got nan"):
        model.predict_one(SAMPLE, id=float("nan"))
    with pytest.raises(ValueError, match="id 'open' is open for another sample: learn its target first"):
        model.predict_one(OTHER, id="open")
    with pytest.raises(ValueError, match=r"x\['a'\] must be a finite number"):
        model.predict_one({"a": float("inf")}, id="new")
    assert inside(model) == before
    assert model.open_ids_ == 1
    model.learn_one(y=1.0, w=0.0, id="open")  # ends the wait
    assert inside(model) == before
    with pytest.raises(ValueError, match="id 'open' is not open"):
        model.learn_one(y=1.0, id="open")


def test_identifiers_of_keys(tmp_path):
    start, path = SepSARegressor(**SMALL, body="fourier"), tmp_path / "keys.sqlite"
    alone = start.clone()
    with KeyedLearner(start, path, in_memory=1) as keyed:
        for i, (x, _) in enumerate(stream(20)):
            for key in ("u", "v"):
                keyed.predict_one(key, x, id=i)
        with pytest.raises(ValueError, match="no sample was predicted with an id for the key 'w'"):
            keyed.learn_one("w", y=1.0, id=0)
        assert "w" not in keyed
        keyed.commit()
    with KeyedLearner(start, path, in_memory=1) as keyed:
        for i, (x, y) in enumerate(stream(20)):
            keyed.learn_one("v", y=y, id=i)
            alone.learn_one(x, y)
        assert keyed["u"].open_ids_ == 20
        assert keyed["v"].open_ids_ == 0
        assert keyed.predict_one("v", SAMPLE) == alone.predict_one(SAMPLE)


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("ids", np.frombuffer(b'"a"\n"a"', np.uint8)),
        ("ids", np.frombuffer(b'"a"\n"', np.uint8)),
        ("ids", np.frombuffer(b'"a"\n{"of": 1}', np.uint8)),
        ("names", np.frombuffer(b'"a"', np.uint8)),
        ("names", np.frombuffer(b"\xff", np.uint8)),
        ("sets", np.array([0, 1])),
        ("sets", np.array([0])),
        ("values", np.ones(5)),
        ("values", np.full(6, np.nan)),
        ("dropped", -1),
    ],
)
def test_a_damaged_state_is_refused(entry, value):
    model = SepSARegressor(**SMALL)
    for i in range(2):
        model.predict_one(SAMPLE, id=i)
    state = model.state_dict()
    state["open_rows"][entry] = value
    with pytest.raises(ValueError, match=rf"state_dict\['open_rows'\]\['{entry}'\]"):
        model.load_state_dict(state)
    assert model.open_ids_ == 2
    model.learn_one(y=1.0, id=1)
