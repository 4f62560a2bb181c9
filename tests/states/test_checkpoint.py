"""Checkpoints: what goes in comes out, bit for bit, and what does not belong is refused whole."""

from __future__ import annotations

import copy
import json
import math
import pickle
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from torch import nn

import river_models as river
import sepsa
from breaking.damage import same
from sepsa.checkpoint import CheckpointError, from_bytes, inspect, to_bytes
from sepsa.states import file, objects
from sepsa.states.tree import Decoder, Tree


class Holder:
    """Anything with a state."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def through(value):
    """A value as it comes out of a checkpoint."""
    return from_bytes(to_bytes(Holder(value)), into=Holder()).state


LEAVES = [
    None, True, 0, -7, 2**100, 0.1, -0.0, math.inf, "", "ä\0b", b"\x00\xff", np.float32(0.1), np.int8(-3),
    np.bool_(True), np.str_("x"), torch.float64, np.float32, float,
    np.arange(6.0).reshape(2, 3), np.array(3.5), np.empty((0, 3), np.float32), np.array([True, False]),
    np.arange(6).reshape(2, 3).T, np.array(["a", "bcd"]), np.array([["", "é"]]), np.array(["a", None, 3], object),
    np.array([1, 2], ">i4"), torch.arange(4, dtype=torch.int16), torch.randn(2, 2, dtype=torch.bfloat16),
    torch.tensor(1.5), torch.empty(0, 2), torch.randn(3, 2).T, torch.tensor([True]),
]  # fmt: skip


@pytest.mark.parametrize("value", LEAVES, ids=range(len(LEAVES)))
def test_every_kind_of_value_comes_back_the_same(value):
    back = through(value)
    if isinstance(value, np.ndarray) and value.dtype.byteorder == ">":
        value = value.astype(value.dtype.newbyteorder("="))
    assert type(back) is type(value)
    assert same(back, value) or (math.isnan(value) and math.isnan(back))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
        lambda inner: (
            st.lists(inner, max_size=3) | st.tuples(inner, inner)
            | st.dictionaries(st.text(max_size=3) | st.integers() | st.tuples(st.integers()), inner, max_size=3)
        ),
        max_leaves=12,
    )
)  # fmt: skip
def test_any_nesting_comes_back_the_same(value):
    assert same(through(value), value)


def test_nan_keeps_its_bits_in_arrays():
    odd = np.array([0x7FF8000000000123, 0xFFF0000000000001], np.uint64).view(np.float64)
    assert through(odd).tobytes() == odd.tobytes()


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, 1j, np.array([1j]), torch.tensor([1j]), lambda: 0, np.array(["2020"], "M8[D]")],
    ids=["object", "set", "complex", "complex array", "complex tensor", "function", "dates"],
)
def test_what_cannot_be_saved_is_named(value):
    with pytest.raises(TypeError, match=r"state\['a'\]\[1\]"):
        to_bytes(Holder({"a": [0, value]}))


def test_the_tensors_are_readable_by_safetensors(tmp_path):
    state = {"a": np.arange(5.0), "b": [torch.eye(3)]}
    sepsa.save(Holder(state), tmp_path / "x.sepsa")
    read = load_file(tmp_path / "x.sepsa")
    assert np.array_equal(read["0"], state["a"])
    assert np.array_equal(read["1"], state["b"][0].numpy())


# ---------------------------------------------------------------------- models


def data(n=60, d=4, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d))
    return X, X @ np.arange(1.0, d + 1) + 0.1 * rng.normal(size=n)


X, Y = data(300)
ESTIMATORS = {
    "regressor": lambda: sepsa.SepSARegressor(random_state=0).partial_fit(X, Y),
    "in its first rows": lambda: sepsa.SepSARegressor((8, 4), forgetting=0.99, random_state=1).partial_fit(
        X[:10], Y[:10]
    ),
    "fitted, two targets": lambda: sepsa.SepSARegressor(random_state=0, max_iter=3).fit(X, np.stack([Y, -Y], 1)),
    "classes of text": lambda: sepsa.SepSAClassifier(random_state=0).partial_fit(X, np.where(Y > 0, "up", "down")),
    "classes of numbers": lambda: sepsa.SepSAClassifier(random_state=0).partial_fit(X, (Y > 0).astype(int)),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_continues_bit_for_bit(name, tmp_path):
    model = ESTIMATORS[name]()
    X, y = data(50, seed=1)
    model.save(tmp_path / "m.sepsa")
    for again in (
        type(model).load(tmp_path / "m.sepsa"),
        sepsa.load(tmp_path / "m.sepsa"),
        type(model).from_bytes(model.to_bytes()),
    ):
        assert again.get_params() == model.get_params()
        assert np.array_equal(again.predict(X), model.predict(X))
    labels = (
        model.predict(X) if hasattr(model, "classes_") else np.stack([y, y], 1) if model.predict(X).ndim == 2 else y
    )
    model.partial_fit(X, labels)
    again.partial_fit(X, labels)
    assert same(again.state_dict(), model.state_dict())


def river_rows(make, n, seed=0):
    rng = random.Random(seed)
    for i in range(n):
        x = {"a": rng.gauss(0, 1), ("b", 1): rng.gauss(5, 2), 3: rng.random()}
        if i > 300:
            x["late"] = rng.random()
        y = x["a"] + 2 * x[3]
        yield (
            x,
            {"u": y, "v": -y}
            if make is river.SepSAMultiTargetRegressor
            else y
            if make is river.SepSARegressor
            else y > 1,
        )


@pytest.mark.parametrize("rows", [0, 5, 400])
@pytest.mark.parametrize("make", [river.SepSARegressor, river.SepSAClassifier, river.SepSAMultiTargetRegressor])
def test_a_river_model_continues_bit_for_bit(make, rows, tmp_path):
    model = make(seed=3)
    for x, y in river_rows(make, rows):
        model.learn_one(x, y)
    model.save(tmp_path / "m.sepsa")
    again = make.load(tmp_path / "m.sepsa")
    for x, y in river_rows(make, 40, seed=1):
        assert again.predict_one(x) == model.predict_one(x)
        again.learn_one(x, y)
        model.learn_one(x, y)
    assert same(again.state_dict(), model.state_dict())


def test_the_wrong_class_is_refused(tmp_path):
    river.SepSARegressor().save(tmp_path / "m.sepsa")
    with pytest.raises(CheckpointError, match="holds a SepSARegressor, not a SepSAClassifier"):
        river.SepSAClassifier.load(tmp_path / "m.sepsa")


# ---------------------------------------------------------------------- PyTorch


def training(seed=0, width=8):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 2))
    optimizer = sepsa.SepSA(model, torch.optim.Adam, lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer.base, 0.99)


def steps(optimizer, scheduler, count, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(8, 4, generator=generator)
        optimizer.learn(x, torch.stack([x.sum(1), x[:, 0]], 1))
        scheduler.step()


def test_a_training_run_continues_bit_for_bit(tmp_path):
    model, optimizer, scheduler = training()
    steps(optimizer, scheduler, 5, seed=1)
    run = {"optimizer": optimizer, "scheduler": scheduler, "rng": torch.get_rng_state(), "epoch": 3}
    sepsa.save(run, tmp_path / "run.sepsa", position={"batch": 5})
    steps(optimizer, scheduler, 5, seed=2)

    other, its_optimizer, its_scheduler = training(seed=9)
    run = sepsa.load(tmp_path / "run.sepsa", into={"optimizer": its_optimizer, "scheduler": its_scheduler})
    assert run["epoch"] == 3
    assert run["optimizer"] is its_optimizer
    torch.set_rng_state(run["rng"])
    steps(its_optimizer, its_scheduler, 5, seed=2)
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert same(its_optimizer.state_dict(), optimizer.state_dict())
    assert inspect(tmp_path / "run.sepsa").position == {"batch": 5}


def test_one_optimizer_goes_without_a_dict(tmp_path):
    model, optimizer, scheduler = training()
    steps(optimizer, scheduler, 3, seed=1)
    sepsa.save(optimizer, tmp_path / "o.sepsa")
    other, its_optimizer, _ = training(seed=9)
    assert sepsa.load(tmp_path / "o.sepsa", into=its_optimizer) is its_optimizer
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert same(its_optimizer.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize(
    ("into", "words"),
    [
        (lambda: None, "holds the states of .'optimizer', 'scheduler'.: into must be a dict with these"),
        (lambda: training()[1], "into must be a dict of objects under such keys"),
        (lambda: {"optimizer": training()[1]}, "into must be a dict with these"),
        (lambda: {"optimizer": training()[1], "scheduler": torch.optim.SGD([torch.ones(1)])}, "into is a SGD"),
        (lambda: {"optimizer": training(width=9)[1], "scheduler": training()[2]}, "this model as torch.float32"),
    ],
)  # fmt: skip
def test_what_does_not_belong_together_is_refused_whole(into, words, tmp_path):
    _, optimizer, scheduler = training()
    sepsa.save({"optimizer": optimizer, "scheduler": scheduler}, tmp_path / "run.sepsa")
    live = into()
    before = copy.deepcopy({k: v.state_dict() for k, v in live.items()}) if isinstance(live, dict) else None
    with pytest.raises(CheckpointError, match=words):
        sepsa.load(tmp_path / "run.sepsa", into=live)
    if before is not None:
        assert same({k: v.state_dict() for k, v in live.items()}, before)


def test_if_the_second_object_refuses_the_first_is_put_back(tmp_path):
    class Refuses(Holder):
        def load_state_dict(self, state):
            if state == "new":
                raise ValueError("not this")
            self.state = state

    sepsa.save({"a": Holder("new"), "b": Refuses("new")}, tmp_path / "x.sepsa")
    live = {"a": Holder("old"), "b": Refuses("old")}
    with pytest.raises(ValueError, match="not this"):
        sepsa.load(tmp_path / "x.sepsa", into=live)
    assert live["a"].state == live["b"].state == "old"


def test_a_head_solver_needs_into(tmp_path):
    solver = sepsa.RLS().bind(nn.Linear(3, 2))
    solver.update(torch.randn(5, 3), torch.randn(5, 2))
    sepsa.save(solver, tmp_path / "s.sepsa")
    with pytest.raises(
        CheckpointError, match=r"holds a sepsa.RLS: build one as it was built then, and give it as into="
    ):
        sepsa.load(tmp_path / "s.sepsa")
    again = sepsa.load(tmp_path / "s.sepsa", into=sepsa.RLS().bind(nn.Linear(3, 2)))
    assert same(again.state_dict(), solver.state_dict())


# ---------------------------------------------------------------------- files


def test_the_last_ones_are_kept(tmp_path):
    path = tmp_path / "x.sepsa"
    for i in range(5):
        sepsa.save(Holder(i), path, keep=3)
    assert [sepsa.load(p, into=Holder()).state for p in (path, tmp_path / "x.sepsa.1", tmp_path / "x.sepsa.2")] == [
        4,
        3,
        2,
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.sepsa", "x.sepsa.1", "x.sepsa.2"]


def test_a_link_is_written_through(tmp_path):
    sepsa.save(Holder(1), tmp_path / "real.sepsa")
    (tmp_path / "link.sepsa").symlink_to(tmp_path / "real.sepsa")
    sepsa.save(Holder(2), tmp_path / "link.sepsa")
    assert (tmp_path / "link.sepsa").is_symlink()
    assert sepsa.load(tmp_path / "real.sepsa", into=Holder()).state == 2


@pytest.mark.parametrize(("keep", "error"), [(0, ValueError), (-1, ValueError), (True, ValueError), (1.5, TypeError)])
def test_keep_is_checked(keep, error, tmp_path):
    with pytest.raises(error, match="keep must be an integer of at least 1"):
        sepsa.save(Holder(1), tmp_path / "x", keep=keep)


def test_a_plain_value_alone_is_refused(tmp_path):
    with pytest.raises(TypeError, match="put plain values into a dict"):
        sepsa.save(3, tmp_path / "x")
    sepsa.save({"n": 3}, tmp_path / "x")
    assert sepsa.load(tmp_path / "x") == {"n": 3}


def test_a_newer_format_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setattr(file, "FORMAT", 2)
    made = to_bytes(Holder(1))
    monkeypatch.undo()
    with pytest.raises(
        CheckpointError, match=r"has format 2, written by sepsa .*, and this sepsa reads up to 1: upgrade"
    ):
        from_bytes(made, into=Holder())


def test_a_pickle_of_another_version_warns(monkeypatch):
    X, y = data()
    for model in (sepsa.SepSARegressor().partial_fit(X, y), river.SepSARegressor()):
        monkeypatch.setattr(objects, "__version__", "0.0.7")
        old = pickle.dumps(model)
        monkeypatch.undo()
        with pytest.warns(UserWarning, match=r"written by sepsa 0.0.7 .* use sepsa.save"):
            pickle.loads(old)
        pickle.loads(pickle.dumps(model))


def test_the_tree_and_its_tensors_are_apart():
    tree = Tree()
    coded = tree.encode({"a": np.arange(3), 1: (None, [0.5])}, "state")
    assert json.loads(json.dumps(coded)) == coded
    assert len(tree.tensors) == 1
    entries = {"0": {"dtype": "I64", "shape": [3]}}
    assert same(Decoder([np.arange(3).view(np.uint8)], entries)(coded), {"a": np.arange(3), 1: (None, [0.5])})
