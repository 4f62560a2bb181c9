"""Checkpoints: what goes in comes out, bit for bit, and what does not belong is refused whole."""

import copy
import math
import pickle
from datetime import UTC, date, datetime

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
from sepsa.checkpoint import CheckpointError, from_bytes, to_bytes
from sepsa.states import file, objects


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
    np.bool_(True), np.str_("x"), date(2020, 2, 29), datetime(2020, 1, 2, 3, 4, 5, 6, UTC),
    np.datetime64("2020-01-01T00:00:00.000000001"), np.timedelta64(3, "D"),
    np.arange(6.0).reshape(2, 3), np.array(3.5), np.empty((0, 3), np.float32), np.array([True, False]),
    np.arange(6).reshape(2, 3).T, np.array([1, 2], ">i4"),
    torch.arange(4, dtype=torch.int16), torch.randn(2, 2, dtype=torch.bfloat16),
    torch.tensor(1.5), torch.empty(0, 2), torch.randn(3, 2).T, torch.tensor([True]),
    np.array([0x7FF8000000000123, 0xFFF0000000000001], np.uint64).view(np.float64),  # NaN of other bits
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


@pytest.mark.parametrize(
    "value",
    [
        *(object(), {1, 2}, 1j, lambda: 0, np.float32, torch.float64, torch.tensor([1j]), torch.eye(2).to_sparse()),
        *(np.array([1j]), np.array(["2020"], "M8[D]"), np.array(["a"]), np.array([1], object)),
    ],
    ids=range(12),
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


def test_a_class_builds_itself_from_a_file_and_from_bytes(tmp_path):
    X = np.random.default_rng(0).normal(size=(10, 4))
    model = sepsa.SepSARegressor((8, 4), forgetting=0.99, random_state=1).partial_fit(X, X[:, 0])
    model.save(tmp_path / "m.sepsa")
    for again in (
        sepsa.SepSARegressor.load(tmp_path / "m.sepsa"),
        sepsa.load(tmp_path / "m.sepsa"),
        sepsa.SepSARegressor.from_bytes(model.to_bytes()),
    ):
        assert again.get_params() == model.get_params()
        assert same(again.state_dict(), model.state_dict())


def test_the_wrong_class_is_refused(tmp_path):
    river.SepSARegressor().save(tmp_path / "m.sepsa")
    assert river.SepSARegressor.load(tmp_path / "m.sepsa")._learner.body is None  # it has learned nothing
    with pytest.raises(CheckpointError, match="holds a SepSARegressor, not a SepSAClassifier"):
        river.SepSAClassifier.load(tmp_path / "m.sepsa")


def training(seed=0, width=8):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 2))
    optimizer = sepsa.SepSA(model, torch.optim.Adam, lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer.base, 0.99)


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


def test_a_link_is_written_through(tmp_path):
    sepsa.save(Holder(1), tmp_path / "real.sepsa")
    (tmp_path / "link.sepsa").symlink_to(tmp_path / "real.sepsa")
    sepsa.save(Holder(2), tmp_path / "link.sepsa")
    assert (tmp_path / "link.sepsa").is_symlink()
    assert sepsa.load(tmp_path / "real.sepsa", into=Holder()).state == 2


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
    for model in (sepsa.SepSARegressor().partial_fit(np.ones((3, 2)), np.ones(3)), river.SepSARegressor()):
        monkeypatch.setattr(objects, "__version__", "0.0.7")
        old = pickle.dumps(model)
        monkeypatch.undo()
        with pytest.warns(UserWarning, match=r"written by sepsa 0.0.7 .* use sepsa.save"):
            pickle.loads(old)
        pickle.loads(pickle.dumps(model))
