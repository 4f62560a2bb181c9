"""Interrupted and resumed equals uninterrupted, to the bit, wherever it was cut."""

from __future__ import annotations

import pickle
import random
import re

import numpy as np
import pytest
import torch
from torch import nn

import river_models as river
import sepsa
from breaking.damage import same
from breaking.victim import write_table
from sepsa import checkpoint
from sepsa.stream.tables import command, formats, inspection, source

CUTS = 20
ROWS = 700


def data():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(ROWS, 4))
    return X, X @ np.arange(1.0, 5.0) + 0.1 * rng.normal(size=ROWS)


X, Y = data()
SOLVERS = {
    "RLS": sepsa.RLS,
    "RLS, forgetting": lambda: sepsa.RLS(forgetting=0.99),
    "self-tuning": lambda: sepsa.SelfTuning(),
    "OnlineLBFGS": sepsa.OnlineLBFGS,
}


def cut_points(seed, of):
    return sorted(random.Random(seed).sample(range(1, of), CUTS))


class Training:
    """SepSA in PyTorch, with dropout and half of each batch for the head."""

    def __init__(self, solver):
        self.solver = solver
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
        self.optimizer = sepsa.SepSA(self.model, torch.optim.Adam, lr=1e-3, solver=SOLVERS[solver]())
        self.optimizer.head_fraction = 0.5
        self.rng = torch.get_rng_state()
        self.said = []

    def learn(self, start, stop):
        torch.set_rng_state(self.rng)
        for at in range(start, stop):
            x = torch.from_numpy(X[4 * at : 4 * at + 4]).float()
            self.said.append(self.optimizer.learn(x, torch.from_numpy(Y[4 * at : 4 * at + 4, None]).float()).item())
        self.rng = torch.get_rng_state()

    def again(self):
        saved = checkpoint.to_bytes({"optimizer": self.optimizer, "rng": self.rng})
        new = Training(self.solver)
        run = checkpoint.from_bytes(saved, into={"optimizer": new.optimizer})
        new.rng, new.said = run["rng"], self.said
        return new

    def end(self):
        return dict(self.model.state_dict()), self.optimizer.state_dict(), self.said


class Estimator:
    """scikit-learn's faces."""

    def __init__(self, make):
        self.make, self.model, self.said = make, make(), []

    def learn(self, start, stop):
        y = Y[start:stop]
        if isinstance(self.model, sepsa.SepSAClassifier):
            y = np.where(y > 4, "high", np.where(y > 0, "up", "down"))
        self.said += self.model.prequential(X[start:stop], y).tolist()

    def again(self):
        new = Estimator(self.make)
        new.model, new.said = type(self.model).from_bytes(self.model.to_bytes()), self.said
        return new

    def end(self):
        return self.model.state_dict(), self.said


class Face(Estimator):
    """River's faces."""

    def learn(self, start, stop):
        for at in range(start, stop):
            x = dict(zip("abcd", X[at].tolist(), strict=True))
            if at > 400:
                x["late"] = float(at % 7)
            if isinstance(self.model, river.SepSAClassifier):
                y = "high" if Y[at] > 4 else "up" if Y[at] > 0 else "down"
            else:
                y = float(Y[at])
                y = {"u": y, "v": -y} if isinstance(self.model, river.SepSAMultiTargetRegressor) else y
            self.said.append(self.model.predict_one(x))
            self.model.learn_one(x, y)

    def again(self):
        new = Face(self.make)
        new.model, new.said = type(self.model).from_bytes(self.model.to_bytes()), self.said
        return new


class Pickled(Face):
    """River's faces with a model of the user, which a file of ours does not hold."""

    def again(self):
        new = Pickled(self.make)
        new.model, new.said = pickle.loads(pickle.dumps(self.model)), self.said
        return new


WORK = {
    **{f"SepSA, {name}": (lambda name=name: Training(name), ROWS // 4) for name in SOLVERS},
    "SepSARegressor": (lambda: Estimator(lambda: sepsa.SepSARegressor(random_state=0)), ROWS),
    "SepSAClassifier": (lambda: Estimator(lambda: sepsa.SepSAClassifier(random_state=0, forgetting=0.99)), ROWS),
    "SepSAClassifier, experts": (
        lambda: Estimator(lambda: sepsa.SepSAClassifier(random_state=0, body="experts")),
        ROWS,
    ),
    "river.SepSARegressor": (lambda: Face(lambda: river.SepSARegressor(seed=0)), ROWS),
    "river.SepSARegressor, experts": (lambda: Face(lambda: river.SepSARegressor(seed=0, body="experts")), ROWS),
    "river.SepSARegressor, an expert of the user": (
        lambda: Pickled(lambda: river.SepSARegressor(seed=0, experts=[sepsa.SepSARegressor(random_state=1)])),
        ROWS,
    ),
    "river.SepSAClassifier": (lambda: Face(lambda: river.SepSAClassifier(seed=0)), ROWS),
    "river.SepSAMultiTargetRegressor": (lambda: Face(lambda: river.SepSAMultiTargetRegressor(seed=0)), ROWS),
}


@pytest.mark.parametrize("name", WORK)
def test_cut_and_resumed_at_twenty_points(name, tally):
    make, length = WORK[name]
    whole = make()
    whole.learn(0, length)
    work, at = make(), 0
    for cut in cut_points(1, length):
        work.learn(at, cut)
        work, at = work.again(), cut
    work.learn(at, length)
    tally(f"cut points, {name}", CUTS)
    assert same(work.end(), whole.end())


def test_the_command_cut_and_resumed_at_twenty_points(tmp_path, capsys, monkeypatch, tally):
    """The table grows, and each time the command is run again."""
    write_table(tmp_path / "full.csv")
    full = (tmp_path / "full.csv").read_bytes()
    ends = [m.end() for m in re.finditer(rb"\n", full)][1:-1]
    ended = []
    for label, sizes in (("whole", []), ("parts", sorted(random.Random(2).sample(ends, CUTS)))):
        place = tmp_path / label
        place.mkdir()
        for size in [*sizes, len(full)]:
            (place / "t.csv").write_bytes(full[:size])
            monkeypatch.setattr(source, "CHUNK", 300 + size % 1000)
            settings = command.StreamOptions(
                place / "t.csv", target="y", predictions=place / "out.csv", quarantine=place / "q.csv",
                checkpoint=place / "m.sepsa",
            )  # fmt: skip
            assert command.stream(settings) in (0, 1), capsys.readouterr().err
        model, header = inspection.load_model(place / "m.sepsa")
        files = [(place / name).read_bytes() for name in ("out.csv", "q.csv")]
        ended.append((model.state_dict(), header.position["table"], files))
    tally("cut points, sepsa stream", CUTS)
    assert same(*ended)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".csv.gz"])
def test_other_formats_are_resumed_too(suffix, tmp_path, capsys, monkeypatch):
    """SIGTERM between two blocks, as often as there are blocks."""
    import gzip
    import json

    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"a": float(x[0]), "b": "red" if x[1] > 0 else None, "y": float(y)} for x, y in zip(X, Y, strict=True)]
    path = tmp_path / f"t{suffix}"
    if suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=150)
    else:
        path.write_bytes(
            gzip.compress(("a,b,y\n" + "".join(f"{r['a']},{r['b'] or ''},{r['y']}\n" for r in rows)).encode())
        )
    monkeypatch.setattr(formats, "ROWS", 64)
    monkeypatch.setattr(source, "CHUNK", 4000)
    ended = []
    for label in ("whole", "parts"):
        place = tmp_path / label
        place.mkdir()
        settings = command.StreamOptions(
            path, target="y", predictions=place / "out.csv", checkpoint=place / "m.sepsa", quarantine=place / "q.csv"
        )
        real = command.StreamRun._learn_block

        def take(self, block, real=real):
            stop = real(self, block)
            self.signals.code = command.TERMINATED
            return stop

        if label == "parts":
            monkeypatch.setattr(command.StreamRun, "_learn_block", take)
        code, runs = None, 0
        while code != 0:
            code = command.stream(settings)
            runs += 1
            assert code in (0, command.TERMINATED)
        model, header = inspection.load_model(place / "m.sepsa")
        ended.append((model.state_dict(), header.position["table"], (place / "out.csv").read_bytes()))
    assert runs > 5
    assert same(*ended)
