"""Broken and hostile files: every one is refused in a sentence, and nothing of it runs."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import zipfile

import numpy as np
import pytest
import torch

import sepsa
from sepsa.checkpoint import CheckpointError, from_bytes, inspect, to_bytes
from sepsa.states.file import dumps, with_length


class Holder:
    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


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


def test_the_file_itself_is_taken():
    assert from_bytes(small(), into=Holder()).state["n"] == 5


def test_every_flipped_byte_is_refused(tally):
    data, accepted = small(), []
    for mask in (0x01, 0x20, 0x80, 0xFF):
        for at in range(len(data)):
            damaged = data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]
            if not refused(damaged):
                accepted.append((at, mask))
    tally("flipped bytes", 4 * len(data), len(accepted))
    assert not accepted


@pytest.mark.long
def test_every_byte_as_every_other_is_refused(tally):
    data, accepted = small(), []
    for at in range(len(data)):
        others = (value for value in range(256) if value != data[at])
        accepted += [v for v in others if not refused(data[:at] + bytes([v]) + data[at + 1 :])]
    tally("bytes changed to every other value", 255 * len(data), len(accepted))
    assert not accepted


def test_every_truncation_is_refused(tally):
    data = small()
    accepted = [size for size in range(len(data)) if not refused(data[:size])]
    tally("truncations", len(data), len(accepted))
    assert not accepted


def test_bytes_too_many_are_refused():
    assert all(refused(small() + more) for more in (b"\0", b" ", small()))


def test_random_bytes_are_refused(tally):
    rng = np.random.default_rng(0)
    data = small()
    for _ in range(500):
        start, length = rng.integers(0, len(data)), int(rng.integers(1, 64))
        damaged = data[:start] + rng.bytes(length) + data[start + length :]
        assert damaged == data or refused(damaged)
        assert refused(rng.bytes(int(rng.integers(0, 300))))
    tally("random damage", 1000)


def forged(change):
    """A file whose header says something else, with checksums that fit: by hand, not by accident."""
    data = small()
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


@pytest.mark.parametrize(
    "change",
    [
        lie("shape", [10**15]),
        lie("shape", [-1]),
        lie("shape", [1.5]),
        lie("shape", "3"),
        lie("shape", None),
        lie("dtype", "F32"),
        lie("dtype", "C64"),
        lie("dtype", "I64x"),
        lambda own, table: table["0"].update(data_offsets=[0, 10**15]),
        lambda own, table: table["0"].update(data_offsets=[8, 0]),
        lambda own, table: table["1"].update(data_offsets=[0, 2]),
        lambda own, table: own.update(format="1"),
        lambda own, table: own.update(format=0),
        lambda own, table: own.update(format=True),
        lambda own, table: own.pop("state"),
        lambda own, table: own.update(state=["tensor", 7]),
        lambda own, table: own.update(state=["array", -1]),
        lambda own, table: own.update(state=["call", "os.system"]),
        lambda own, table: own.update(state=["dict", [[["list", []], 1]]]),
        lambda own, table: own.update(tensors=[]),
        lambda own, table: own.update(saved="yesterday"),
    ],
)
def test_a_header_that_lies_is_refused(change):
    assert refused(forged(change))


def test_a_class_that_is_not_ours_is_not_built():
    def change(own, table):
        own["kind"] = "os.system"

    with pytest.raises(CheckpointError, match=r"holds a os\.system"):
        from_bytes(forged(change))


def test_nested_too_deep_is_refused():
    deep = "[" * 100_000 + "]" * 100_000
    text = json.dumps({"__metadata__": {"sepsa": deep, "sha256": ""}}).encode()
    assert refused(len(text).to_bytes(8, "little") + text)
    assert refused(len(deep).to_bytes(8, "little") + deep.encode())


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def bombs(marker):
    yield pickle.dumps(Bomb(marker))
    out = io.BytesIO()
    torch.save({"a": Bomb(marker)}, out)
    yield out.getvalue()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(Bomb(marker)))
    yield out.getvalue()
    out = io.BytesIO()
    np.save(out, np.array([Bomb(marker)], object), allow_pickle=True)
    yield out.getvalue()


def test_a_pickle_under_our_name_never_runs(tmp_path):
    marker = tmp_path / "it ran"
    path = tmp_path / "model.sepsa"
    for bomb in bombs(str(marker)):
        path.write_bytes(bomb)
        for read in (sepsa.load, inspect, sepsa.SepSARegressor.load):
            with pytest.raises(CheckpointError, match="is damaged or no checkpoint of sepsa"):
                read(path)
    assert not marker.exists()


def test_a_missing_file_and_a_folder_say_so(tmp_path):
    with pytest.raises(FileNotFoundError):
        sepsa.load(tmp_path / "none.sepsa")
    with pytest.raises(IsADirectoryError):
        sepsa.load(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(CheckpointError, match="cannot have 0 bytes where the file has 0"):
        sepsa.load(tmp_path / "empty")
