"""Saved states: a learner that loads one goes on bit for bit, and a damaged one is refused by the name of its entry."""

from __future__ import annotations

import copy
import json
import sys

import numpy as np
import pytest
import torch
from torch import nn

import river_models
from sepsa import SepSAClassifier, SepSARegressor
from sepsa.stream.engine import Engine
from sepsa.stream.learner import WARM_UP, StreamLearner


def plain(value):
    """Only what any format can hold."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(map(plain, value))
    return value is None or type(value) in (bool, int, float, str) or isinstance(value, np.ndarray)


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return type(one) is type(other) and one == other


def rows(n, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(3, 2, (n, 4))
    X[rng.random(X.shape) < 0.05] = np.nan
    return X, np.nan_to_num(X[:, :1]) * 2 + rng.normal(size=(n, 1))


def through_a_file(state):
    """As a format would: arrays apart, the rest as JSON."""
    arrays = []

    def apart(value):
        if isinstance(value, dict):
            return {key: apart(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [apart(inner) for inner in value]
        if isinstance(value, np.ndarray):
            arrays.append(value.copy())
            return {"array": len(arrays) - 1}
        return value

    def joined(value):
        if isinstance(value, dict):
            return arrays[value["array"]] if set(value) == {"array"} else {k: joined(v) for k, v in value.items()}
        return [joined(inner) for inner in value] if isinstance(value, list) else value

    return joined(json.loads(json.dumps(apart(state))))


def test_an_engine_goes_on_from_its_state():
    X, Y = np.random.default_rng(0).normal(size=(2, 60, 3))
    one, other = (Engine(3, 3, (6,), forgetting=0.99, seed=seed) for seed in (0, 1))
    one.learn(X[:30], Y[:30])
    state = one.state_dict()
    assert plain(state)
    other.load_state_dict(through_a_file(state))
    assert np.array_equal(one.learn(X[30:], Y[30:]), other.learn(X[30:], Y[30:]))
    one.resize(4, 3)
    other.resize(4, 3)
    assert same(one.state_dict(), other.state_dict())  # the random numbers for new weights included


@pytest.mark.parametrize("n", [0, 3, 100, WARM_UP - 1, WARM_UP, WARM_UP + 50])
def test_a_learner_goes_on_from_its_state(n):
    X, Y = rows(n + 200)
    one = StreamLearner(4, 1, regression=True, hidden=(5,), skip=True, seed=None)
    other = StreamLearner(4, 1, regression=True, hidden=(5,), skip=True, seed=None)
    if n:
        one.learn(X[:n], Y[:n])
    other.load_state_dict(through_a_file(one.state_dict()))
    assert np.array_equal(one.learn(X[n:], Y[n:]), other.learn(X[n:], Y[n:]))
    assert same(one.state_dict(), other.state_dict())


def table(kind, n=400):
    rng = np.random.default_rng(0)
    X = rng.normal(3, 2, (n, 4))
    y = X[:, 0] + rng.normal(size=n)
    return X, (np.array(["low", "middle", "high"])[np.digitize(y, [2, 4])] if kind is SepSAClassifier else y)


def body():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.1))


@pytest.mark.parametrize("kind", [SepSARegressor, SepSAClassifier])
@pytest.mark.parametrize("how", ["fit", "partial_fit"])
@pytest.mark.parametrize("module", [False, True])
def test_an_estimator_goes_on_from_its_state(kind, how, module, monkeypatch):
    # Where a test before has imported it, SepSA writes its head's state as the bytes that it takes.
    monkeypatch.delitem(sys.modules, "torch.distributed.checkpoint.state_dict", raising=False)
    X, y = table(kind)
    options = {"random_state": 0, "max_iter": 2} | ({"module": body()} if module else {})
    one, other = kind(**options), kind(**options)
    getattr(one, how)(X[:100], y[:100])
    state = one.state_dict()
    assert plain(state)
    other.load_state_dict(through_a_file(state))
    for model in (one, other):
        model.partial_fit(X[100:], y[100:])
    assert same(one.state_dict(), other.state_dict())
    np.testing.assert_array_equal(one.predict(X), other.predict(X))


@pytest.mark.parametrize(
    "model_type", [river_models.SepSARegressor, river_models.SepSAClassifier, river_models.SepSAMultiTargetRegressor]
)
@pytest.mark.parametrize("n", [0, 1, 50, WARM_UP + 20])
def test_a_river_model_goes_on_from_its_state(model_type, n):
    rng = np.random.default_rng(0)

    def samples(count, names):
        for _ in range(count):
            x = {name: float(rng.normal()) for name in names}
            total = x["a"] - x["b"]
            yield (
                x,
                {"y": total, "z": 1.0}
                if "Multi" in model_type.__name__
                else (("up" if total > 0 else "down") if "Class" in model_type.__name__ else total),
            )

    one, other = model_type(hidden=(4,)), model_type(hidden=(4,))
    for x, y in samples(n, ["a", "b", 3, ("c", 1)]):
        one.learn_one(x, y)
    for x, y in samples(10 if n else 0, ["a", "b", "late"]):
        one.learn_one(x, y)
    state = one.state_dict()
    assert plain(state)
    other.load_state_dict(through_a_file(state))
    if not n:
        assert other._learner is None
        return
    for x, y in samples(60, ["a", "b", "late", "later"]):
        assert one.predict_one(x) == other.predict_one(x)
        one.learn_one(x, y)
        other.learn_one(x, y)
    assert same(one.state_dict(), other.state_dict())


def entries(value, path=()):
    """The path of each entry that is no container."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from entries(inner, (*path, key))
    elif isinstance(value, list) and value:
        for i, inner in enumerate(value):
            yield from entries(inner, (*path, i))
    else:
        yield path


def damaged(state, path):
    """The state with one entry spoilt, in each of several ways."""
    for spoil in (lambda _: object(), lambda v: v[:-1] if isinstance(v, np.ndarray) and v.size else object()):
        copied = copy.deepcopy(state)
        at = copied
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = spoil(at[path[-1]])
        yield copied
        if isinstance(at[path[-1]], np.ndarray) and at[path[-1]].dtype.kind == "f":
            copied = copy.deepcopy(state)
            at = copied
            for key in path[:-1]:
                at = at[key]
            at[path[-1]].flat[:1] = np.inf
            yield copied


@pytest.mark.parametrize("kind", [SepSARegressor, SepSAClassifier, river_models.SepSAClassifier])
def test_a_damaged_state_is_refused_and_nothing_changes(kind):
    X, y = table(SepSAClassifier if "Class" in kind.__name__ else kind, 60)
    model = kind()
    if kind is river_models.SepSAClassifier:
        for row, label in zip(X.tolist(), y.tolist(), strict=True):
            model.learn_one(dict(zip("abcd", row, strict=True)), label)
    else:
        model.partial_fit(X, y)
    state = model.state_dict()
    for path in entries(state):
        for bad in damaged(state, path):
            with pytest.raises(ValueError, match=r"state_dict\["):
                model.load_state_dict(bad)
            assert same(model.state_dict(), state)
    with pytest.raises(ValueError, match=r"state_dict has other entries .* unexpected \['more'\]"):
        model.load_state_dict(state | {"more": 1})
    with pytest.raises(ValueError, match="state_dict must be a dict, got list"):
        model.load_state_dict([])


def test_other_settings_are_refused():
    one = Engine(3, 1, (6,), forgetting=0.99)
    for options in ({"hidden": (7,)}, {"activation": "tanh"}, {"forgetting": 0.9}, {"dtype": np.float64}):
        with pytest.raises(ValueError, match=r"state_dict\['settings'\]\['(hidden|activation|heads|dtype)'\] must be"):
            Engine(3, 1, **{"hidden": (6,), "forgetting": 0.99} | options).load_state_dict(one.state_dict())


def test_a_label_that_cannot_be_saved_is_named():
    model = river_models.SepSAClassifier(hidden=())
    model.learn_one({"a": 1.0}, frozenset({1}))
    with pytest.raises(ValueError, match=r"got frozenset\(\{1\}\) of type frozenset"):
        model.state_dict()
