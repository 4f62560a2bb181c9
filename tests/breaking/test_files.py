"""Broken and hostile files: every one is refused in a sentence, and nothing of it runs."""

import hashlib
import json
import pickle
import tracemalloc

import numpy as np
import pytest
import torch

import sepsa
from sepsa.checkpoint import CheckpointError, from_bytes, inspect, to_bytes
from sepsa.states import file
from sepsa.states.file import dumps, with_length
from states.test_checkpoint import Holder


def small():
    return to_bytes(Holder({"a": np.arange(3.0), "b": torch.tensor([True, False]), "name": "x", "n": 5}))


def refused(data):
    """Whether these bytes are refused with our error, and the live object is as it was."""
    live = Holder("as it was")
    try:
        from_bytes(data, into=live)
    except CheckpointError:
        return live.state == "as it was"
    except Exception as error:
        raise AssertionError(f"{type(error).__name__} instead of a refusal: {error}") from error
    return False


def changed(data, values):
    """The data with each byte in turn changed to each of the values of a function of it."""
    return (data[:at] + bytes([new]) + data[at + 1 :] for at in range(len(data)) for new in values(data[at]))


def random_damage(data):
    rng = np.random.default_rng(0)
    for _ in range(500):
        start, length = rng.integers(0, len(data)), int(rng.integers(1, 64))
        yield data[:start] + rng.bytes(length) + data[start + length :]
        yield rng.bytes(int(rng.integers(0, 300)))


DAMAGE = {
    "flipped bytes": lambda data: changed(data, lambda old: [old ^ mask for mask in (0x01, 0x20, 0x80, 0xFF)]),
    "bytes changed to every other value": lambda data: changed(data, lambda old: {*range(256)} - {old}),
    "truncations": lambda data: (data[:size] for size in range(len(data))),
    "bytes too many": lambda data: (data + more for more in (b"\0", b" ", data)),
    "random damage": random_damage,
}
LONG = "bytes changed to every other value"


@pytest.mark.parametrize("what", [pytest.param(name, marks=[pytest.mark.long] * (name == LONG)) for name in DAMAGE])
def test_damaged_bytes_are_refused(what, tally):
    data = small()
    assert from_bytes(data, into=Holder()).state["n"] == 5
    cases = [damaged for damaged in DAMAGE[what](data) if damaged != data]
    accepted = [damaged for damaged in cases if not refused(damaged)]
    tally(what, len(cases), len(accepted))
    assert not accepted


def forged(change, data=None):
    """A file whose header says something else, with checksums that fit: by hand, not by accident."""
    data = data or small()
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    own = json.loads(table["__metadata__"]["sepsa"])
    change(own, table)
    text = dumps(own)
    table["__metadata__"] = {"sepsa": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    return with_length(table) + data[8 + length :]


def lie(field, value):
    def change(own, table):
        own["tensors"]["0"][field] = value
        table["0"][field] = value

    return change


def say(**entries):
    return lambda own, table: own.update(entries)


def offsets(name, start, end):
    return lambda own, table: table[name].update(data_offsets=[start, end])


LIES = [
    *(lie("shape", value) for value in ([10**15], [-1], [1.5], "3", None)),
    *(lie("shape", value) for value in ([10**3999] * 1000, [0] + [10**3999] * 1000, [2**62] * 100_000)),
    *(lie("dtype", value) for value in ("F32", "C64", "I64x")),
    *(offsets(*lying) for lying in (("0", 0, 10**15), ("0", 8, 0), ("1", 0, 2))),
    *(say(format=value) for value in ("1", 0, True)),
    *(say(state=[kind, value]) for kind, value in (("tensor", 7), ("array", -1), ("call", "os.system"))),
    say(state=["dict", [[["list", []], 1]]]),
    say(tensors=[]),
    *(say(state=["numpy", ["M8[D]", value]]) for value in (10**400, [1], "x")),
    say(state=["date", 3]),
    say(state=["numpy", 3]),
    *(say(saved=value) for value in ("yesterday", 1e300, 10**400)),
    lambda own, table: own.pop("state"),
    lambda own, table: own["state"][1].pop(0),  # a tensor that nothing names
    lambda own, table: own["state"][1].append(["again", ["array", 0]]),
]


@pytest.mark.parametrize("change", LIES)
def test_a_header_that_lies_is_refused(change):
    assert refused(forged(change))


def entry(tree, *keys):
    """The list [key, value] of an encoded dict, behind these keys."""
    for key in keys:
        (pair,) = [pair for pair in tree[1] if pair[0] == key]
        tree = pair[1]
    return pair


def set_entry(part, *keys, value):
    def change(own, table):
        entry(own[part], *keys)[1] = value

    return change


def regressor():
    X = np.random.default_rng(0).normal(size=(40, 2))
    return sepsa.SepSARegressor(random_state=0).partial_fit(X, X[:, 0])


def classifier():
    X = np.random.default_rng(0).normal(size=(40, 2))
    return sepsa.SepSAClassifier(random_state=0).partial_fit(X, np.where(X[:, 0] > 0, "up", "down"))


def river_model():
    from sepsa.river import SepSARegressor

    model = SepSARegressor(seed=0, body="fourier")
    model.learn_one({"a": 1.0}, 1.0)
    return model


WIDE, VOID = ["tuple", [20_000, 20_000]], ["list", ["numpy", ["list", ["V4000000000", 1]]]]
HUGE = {  # what the header claims, and of which model
    "a scalar of great width": (say(state=["numpy", ["V4000000000", 1]]), None),
    "wide layers": (set_entry("configuration", "hidden_layer_sizes", value=WIDE), regressor),
    "many inputs": (set_entry("state", "learner", "body", "engine", "inputs", value=10**6), regressor),
    "more inputs than bytes": (set_entry("state", "learner", "body", "engine", "inputs", value=2**60), regressor),
    "a batch without end": (set_entry("configuration", "batch_size", value=2**60), regressor),
    "wide labels": (set_entry("state", "dtype", value="<U1000000000"), classifier),
    "an unknown parameter": (set_entry("configuration", "ridge", value=["dict", [["a", 1]]]), regressor),
    "wide layers of River's": (set_entry("configuration", "hidden", value=WIDE), river_model),
    "a void label": (set_entry("state", "learner", "inputs", "names", value=["list", [VOID]]), river_model),
}


@pytest.mark.parametrize("name", HUGE)
def test_a_file_takes_no_more_memory_than_its_size_allows(name):
    change, make = HUGE[name]
    if make is river_model:
        pytest.importorskip("river")
    data = forged(change, to_bytes(make()) if make else None)
    assert len(data) < 500_000
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            from_bytes(data, into=None if make else Holder())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20_000_000


def test_a_header_that_is_too_long_is_neither_read_nor_written(tmp_path, monkeypatch):
    path = tmp_path / "m.sepsa"
    with path.open("wb") as out:
        out.write((90_000_000).to_bytes(8, "little"))
        out.truncate(90_000_008)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="its header cannot have 90000000 bytes"):
        sepsa.load(path)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    monkeypatch.setattr(file, "LONGEST_HEADER", 10_000)
    sepsa.save({"a": np.zeros(10_000)}, path)
    with pytest.raises(CheckpointError, match=r"a checkpoint holds 10,000: put long lists into NumPy arrays"):
        sepsa.save({"a": [0.0] * 10_000}, path)
    assert len(sepsa.load(path)["a"]) == 10_000


def test_a_class_that_is_not_ours_is_not_built_and_nested_too_deep_is_refused():
    with pytest.raises(CheckpointError, match=r"holds a os\.system"):
        from_bytes(forged(say(kind="os.system")))
    deep = "[" * 100_000 + "]" * 100_000
    text = json.dumps({"__metadata__": {"sepsa": deep, "sha256": ""}}).encode()
    assert refused(len(text).to_bytes(8, "little") + text)
    assert refused(len(deep).to_bytes(8, "little") + deep.encode())


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_pickle_under_our_name_never_runs(tmp_path):
    marker, path = tmp_path / "it ran", tmp_path / "model.sepsa"
    bomb = Bomb(str(marker))
    for write in (pickle.dump, torch.save, lambda bomb, out: np.save(out, np.array([bomb], object), allow_pickle=True)):
        with path.open("wb") as out:
            write(bomb, out)
        for read in (sepsa.load, inspect, sepsa.SepSARegressor.load):
            with pytest.raises(CheckpointError, match="is damaged or not a checkpoint of sepsa"):
                read(path)
    assert not marker.exists()
