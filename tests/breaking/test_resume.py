"""Interrupted and resumed equals uninterrupted, to the bit, wherever it was cut."""

from __future__ import annotations

import gzip
import json
import random
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from breaking.damage import same
from learners import CASES, Command, Estimator, Forecaster, Head, River, Training, stream
from sepsa.learner.stream_learner import WARM_UP
from sepsa.shell import command, formats, inspection, messages, source
from sepsa.shell.options import StreamOptions

CUTS = 8
ALWAYS = (1, 3, WARM_UP - 1, WARM_UP, WARM_UP + 20)  # within the first rows, at their end, and later


def plain(value):
    """Whether any format can hold this."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(map(plain, value))
    return value is None or type(value) in (bool, int, float, str) or isinstance(value, np.ndarray)


@pytest.mark.many
@pytest.mark.parametrize("name", CASES)
def test_cut_and_resumed_anywhere(name, tmp_path, monkeypatch, tally):
    # Where a test before has imported it, SepSA writes its head's state as the bytes that it takes.
    monkeypatch.delitem(sys.modules, "torch.distributed.checkpoint.state_dict", raising=False)
    kind = CASES[name]
    if isinstance(kind, (Head, Training)):
        end, cuts = 60, [5, 10, 15, 25, 40, 55]  # after batches of 5 rows, of which 20 come again
    else:
        first = 40 if "fit" in name else 0  # fit is called once
        end = 100 if getattr(kind, "keys", 0) else 300  # of keys every row moves one from memory to the file
        drawn = random.Random(1).sample(range(1, end), CUTS - len(ALWAYS))
        cuts = sorted({first, *(cut for cut in (*ALWAYS, *drawn) if first < cut < end)} - {0})

    def learn(again):
        model, at = kind.make(), 0
        for cut in [*cuts, end]:
            kind.learn(model, at, cut)
            model, at = again(model), cut
        return kind.state(model), kind.predict(model)

    if isinstance(kind, Command):
        whole = kind.make()
        kind.learn(whole, 0, end)
        expected = kind.state(whole), kind.predict(whole)
        monkeypatch.setattr(source, "CHUNK", 700)
    else:
        expected = learn(lambda model: model)
    resumed = learn(lambda model: kind.again(model, tmp_path))
    tally(f"cut points, {name}", len(cuts))
    assert same(resumed, expected)
    if isinstance(kind, (Estimator, River, Forecaster)):
        assert plain(resumed[0])


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".csv.gz"])
def test_other_formats_are_resumed_too(suffix, tmp_path, monkeypatch):
    """SIGTERM between two blocks, as often as there are blocks."""
    X, Y = (part[:700] for part in stream())
    rows = [{"a": float(x[0]), "b": "red" if x[1] > 0 else None, "y": float(y)} for x, y in zip(X, Y, strict=True)]
    path = tmp_path / f"t{suffix}"
    if suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=150)
    else:
        lines = (f"{row['a']},{row['b'] or ''},{row['y']}\n" for row in rows)
        path.write_bytes(gzip.compress(("a,b,y\n" + "".join(lines)).encode()))
    monkeypatch.setattr(formats, "ROWS", 64)
    monkeypatch.setattr(source, "CHUNK", 4000)
    real = command.StreamRun._learn_block

    def learn_block(self, block):
        stop = real(self, block)
        self.signals.code = messages.TERMINATED
        return stop

    ended = []
    for label in ("whole", "parts"):
        place = tmp_path / label
        place.mkdir()
        settings = StreamOptions(
            path, target="y", predictions=place / "out.csv", checkpoint=place / "m.sepsa", quarantine=place / "q.csv"
        )
        if label == "parts":
            monkeypatch.setattr(command.StreamRun, "_learn_block", learn_block)
        runs = 1
        while code := command.stream(settings):
            assert code == messages.TERMINATED
            runs += 1
        model, position = inspection.load_model(place / "m.sepsa", "sepsa stream")
        ended.append((model.state_dict(), position["table"], (place / "out.csv").read_bytes()))
    assert runs > 5
    assert same(*ended)
