"""Targets that arrive later, by identifier: the bits of immediate ones, a limit, saved states, wrong identifiers."""

import datetime
import math
import pickle

import pytest

import river_models

if not river_models.THERE:
    pytest.skip(river_models.REASON, allow_module_level=True)

import numpy as np
import pandas as pd
import sklearn
from hypothesis import given, settings
from hypothesis import strategies as st
from river import linear_model, preprocessing

from river_models import MODEL_TYPES, SMALL, inside, stream, trained
from sepsa.checkpoint import CheckpointError
from sepsa.interfaces.keyed import KeyedLearner
from sepsa.learner.stream_learner import WARM_UP
from sepsa.river import Delayed, SepSAClassifier, SepSAMultiTargetRegressor, SepSARegressor
from sepsa.states.sealed import sealed

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
    late, at_once = Delayed(trained(model_type, known)), trained(model_type, known)
    samples = list(mixed(12, model_type, seed))
    order = np.random.default_rng(seed).permutation(len(samples)).tolist()
    for i, (x, _) in enumerate(samples):
        assert late.predict_one(x, id=("order", i)) == at_once.predict_one(x)
    if saved:
        late = Delayed.from_bytes(late.to_bytes()) if saved == "file" else pickle.loads(pickle.dumps(late))
    assert late.open_ids_ == len(samples)
    for i in order:
        x, y = samples[i]
        late.learn_one(y=y, id=("order", i), w=1.0 + i)
        at_once.learn_one(x, y, w=1.0 + i)
        assert late.predict_one(SAMPLE) == at_once.predict_one(SAMPLE)
    assert inside(late.model) == inside(at_once)
    assert (late.open_ids_, late.dropped_ids_) == (0, 0)


def test_probabilities_and_distributions_keep_the_sample_too():
    model = Delayed(trained(SepSAClassifier))
    assert model.predict_proba_one(SAMPLE, id=1) == model.predict_proba_one(SAMPLE)
    assert model.predict_one(SAMPLE, id=1) == model.predict_one(SAMPLE)  # the same sample again
    assert model.open_ids_ == 1
    for kind in (SepSARegressor, SepSAMultiTargetRegressor):
        model = Delayed(trained(kind))
        model.predict_one(SAMPLE, with_dist=True, id=1)
        assert model.open_ids_ == 1


def test_the_oldest_is_dropped_and_counted():
    model = Delayed(SepSARegressor(**SMALL), max_open_ids=3)
    for i in range(5):
        model.predict_one(SAMPLE, id=i)
    assert (model.open_ids_, model.dropped_ids_) == (3, 2)
    with pytest.raises(ValueError, match=r"id 1 is not open: .* among the 2 that were dropped .*\(max_open_ids\)"):
        model.learn_one(y=1.0, id=1)
    loaded = Delayed.from_bytes(model.to_bytes())
    assert loaded.max_open_ids == 3
    for each in (model, loaded):
        for i in (2, 3, 4):
            each.learn_one(y=1.0, id=i)
        assert (each.open_ids_, each.dropped_ids_) == (0, 2)
    assert Delayed.from_bytes(model.to_bytes()).dropped_ids_ == 2  # also where none is open


@pytest.mark.parametrize("n", [0, WARM_UP + 20])
def test_a_wrong_identifier_or_target_changes_nothing(n):
    model = Delayed(trained(SepSARegressor, n))
    model.predict_one(SAMPLE, id="open")
    before = inside(model.model)
    for arguments, message in (
        ({"y": 1.0, "id": "never"}, "id 'never' is not open: no sample was predicted with it"),
        ({"y": None, "id": "open"}, "y must be a finite number, got None"),
        ({"y": 1.0, "w": -1.0, "id": "open"}, "w must not be negative"),
        ({"x": SAMPLE, "y": 1.0, "id": "open"}, "x must be left out where id is given"),
        ({"y": 1.0, "id": object()}, "must be strings, numbers, booleans, None, dates or tuples"),
    ):
        with pytest.raises(ValueError, match=message):
            model.learn_one(**arguments)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'y'"):
        model.learn_one(id="open")
    with pytest.raises(ValueError, match="a key or an id must not be missing, got nan"):
        model.predict_one(SAMPLE, id=float("nan"))
    with pytest.raises(ValueError, match="a key or an id must not be missing, got <NA>"):
        model.predict_one(SAMPLE, id=pd.NA)
    with pytest.raises(TypeError, match=r"x must be a dict of features, given by position, got \(\)"):
        model.predict_one(id="new")
    with pytest.raises(ValueError, match="id 'open' is open for another sample: learn its target first"):
        model.predict_one(OTHER, id="open")
    with pytest.raises(ValueError, match=r"x\['a'\] must be a finite number"):
        model.predict_one({"a": float("inf")}, id="new")
    assert inside(model.model) == before
    assert model.open_ids_ == 1
    model.learn_one(y=1.0, w=0.0, id="open")  # ends the wait
    assert inside(model.model) == before
    with pytest.raises(ValueError, match="id 'open' is not open"):
        model.learn_one(y=1.0, id="open")


def test_a_keyed_learner_of_wrappers(tmp_path):
    start, path = SepSARegressor(**SMALL, body="fourier"), tmp_path / "keys.sqlite"
    alone = start.clone()
    with KeyedLearner(Delayed(start), path, in_memory=1) as keyed:
        for i, (x, _) in enumerate(stream(20)):
            for key in ("u", "v"):
                keyed[key].predict_one(x, id=i)
        keyed.commit()
    with KeyedLearner(Delayed(start), path, in_memory=1) as keyed:
        for i, (x, y) in enumerate(stream(20)):
            keyed["v"].learn_one(y=y, id=i)
            alone.learn_one(x, y)
        assert keyed.get("u").open_ids_ == 20
        assert keyed.get("v").open_ids_ == 0
        assert keyed.get("w") is None
        assert keyed.predict_one("v", SAMPLE) == alone.predict_one(SAMPLE)
    with pytest.raises(CheckpointError, match=r"'max_open_ids': 7.*: give one like it"):
        KeyedLearner(Delayed(start, max_open_ids=7), path)


def test_new_keys_of_a_wrapper_are_the_network_alone():
    with KeyedLearner(Delayed(SepSARegressor(seed=0))) as keyed:
        assert keyed["a"].model.body == "fourier"
        assert keyed.start.model.body == "auto"


def test_a_wrapper_around_a_keyed_learner_is_written_with_its_commit(tmp_path):
    start, path, samples = SepSARegressor(**SMALL, body="fourier"), tmp_path / "keys.sqlite", list(stream(20))
    with KeyedLearner(start, path, in_memory=1) as keyed:
        late = Delayed(keyed)
        for i, (x, _) in enumerate(samples):
            late.predict_one(("shop", i % 2), x, id=i)
        keyed.commit(position=late.state_dict())
        with pytest.raises(TypeError, match=r"got KeyedLearner: commit\(position=delayed.state_dict\(\)\)"):
            late.to_bytes()
    with KeyedLearner(start, path, in_memory=1) as keyed, KeyedLearner(start) as at_once:
        late = Delayed(keyed)
        late.load_state_dict(keyed.position)
        for i in (*range(10, 20), *range(10)):
            late.learn_one(y=samples[i][1], id=i)
            at_once.learn_one(("shop", i % 2), *samples[i])
        for k in range(2):
            assert keyed.predict_one(("shop", k), SAMPLE) == at_once.predict_one(("shop", k), SAMPLE)


def test_pipelines_keep_the_sample_before_their_steps_or_after_them():
    around = Delayed(preprocessing.StandardScaler() | linear_model.LinearRegression())
    behind, plain = preprocessing.StandardScaler() | Delayed(linear_model.LinearRegression()), around.model.clone()
    for i, (x, y) in enumerate(stream(30)):
        told = plain.predict_one(x)
        assert around.predict_one(x, id=i) == told
        around.learn_one(y=y, id=i)
        plain.learn_one(x, y)
        behind.predict_one(x, id=i)
        behind[-1].learn_one(y=y, id=i)
        assert around.predict_one(SAMPLE) == plain.predict_one(SAMPLE)
    assert behind[-1].open_ids_ == 0
    assert around.clone().predict_one(SAMPLE) == 0
    with pytest.raises(TypeError, match="model must be one of sepsa's to be saved, got Pipeline: pickle the whole"):
        around.to_bytes()
    assert pickle.loads(pickle.dumps(around)).predict_one(SAMPLE) == plain.predict_one(SAMPLE)


def test_scikit_learn_sees_the_parameters_and_clones():
    model = Delayed(SepSARegressor(**SMALL), max_open_ids=9)
    model.learn_one(SAMPLE, 1.0)
    model.predict_one(SAMPLE, id=1)
    new = sklearn.clone(model)
    assert (new.max_open_ids, new.open_ids_, new.predict_one(SAMPLE)) == (9, 0, 0)
    assert model.set_params(max_open_ids=3).get_params()["max_open_ids"] == 3


def test_dates_of_every_kind_and_numbers_of_numpy_wait():
    model, at_once = Delayed(SepSARegressor(**SMALL)), SepSARegressor(**SMALL)
    for x in (
        {"t": pd.Timestamp("2026-03-01 10:30", tz="Europe/Oslo"), "n": np.float32(0.1), "b": np.True_},
        {"t": np.datetime64("2026-03-02T11", "ns"), "n": np.int8(3), "b": False, "late": np.str_("text")},
        {"t": np.datetime64("2026-03-03"), "n": math.nan, "b": None},
        {"t": datetime.datetime(2026, 3, 4, 5), "n": pd.NA, "b": pd.NaT},
        {"t": np.datetime64(10**18 + 1, "ns"), "n": 1},
        {np.int64(7): 1.0, np.str_("a name"): 2.0},  # late features are ordered by the repr of their names
    ):
        model.predict_one(x, id=1)
        model = Delayed.from_bytes(model.to_bytes())
        model.learn_one(y=1.0, id=1)
        at_once.learn_one(x, 1.0)
        assert inside(model.model) == inside(at_once)
    for value in ([1.0], np.ones(2), datetime.timedelta(1), pd.Timestamp(1)):
        with pytest.raises(ValueError, match="samples that wait must be strings, numbers, booleans, None, dates"):
            model.predict_one({"a": value}, id=1)
    assert model.open_ids_ == 0


@pytest.mark.parametrize(
    ("entry", "value"),
    [("model", None), ("open", np.ones(5)), ("open", np.frombuffer(b"[]", np.uint8)), ("dropped", -1)],
)
def test_a_damaged_state_is_refused(entry, value):
    model = Delayed(SepSARegressor(**SMALL))
    for i in range(2):
        model.predict_one(SAMPLE, id=i)
    state = model.state_dict() | {entry: value}
    with pytest.raises(ValueError, match=r"state_dict\['checksum'\] must be that of the other entries"):
        model.load_state_dict(state)
    if entry == "model":  # as a wrapper of a model without a state saves it
        with pytest.raises(ValueError, match=r"state_dict\['model'\] must be the state of the model that is wrapped"):
            model.load_state_dict(sealed(state))
    assert model.open_ids_ == 2
    model.learn_one(y=1.0, id=1)
