"""Streams on made-up data: answers after a few rows, and bits after many, of every public interface.

`answers` are compared with the record (tests/test_goldens.py), `states` between two trees on one machine (compare.py).
"""

from __future__ import annotations

import io
import json
import pickle
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from sepsa import SepSAClassifier, SepSAForecaster, SepSARegressor, cli

Results = dict[str, NDArray[Any]]
FEW = 60  # rows before the answers
BODIES: dict[str, dict[str, Any]] = {
    "linear": {"body": "fourier", "hidden_layer_sizes": (), "forgetting": 1.0},
    "network": {"body": "fourier", "hidden_layer_sizes": (8,), "forgetting": 0.99},
}


def states() -> Results:
    """All results after many rows, by name."""
    results: Results = {}
    for part in (sklearn_regressor, sklearn_classifier, sklearn_batch, torch_body, forecaster, river, tables):
        for name, value in part():
            assert name not in results, name
            results[name] = np.asarray(value)
    return results


def answers() -> dict[str, dict[str, list[float]]]:
    """Predictions of a few rows, each made before the row is learned, and the mean loss of the last half of them."""
    rng = np.random.default_rng(8)
    X = rng.normal(size=(FEW, 3))
    y = X @ [1.0, -2.0, 0.5] + np.sin(X[:, 0]) + 0.1 * rng.normal(size=FEW)
    labels = np.where(y > 0, "up", "down")
    result = {}
    for name, options in BODIES.items():
        told = SepSARegressor(random_state=0, **options).prequential(X, y)
        loss = np.mean((told - y)[FEW // 2 :] ** 2)
        result[f"regressor, {name}"] = {"losses": [float(loss)], "predictions": told[-8:].tolist()}
        told = SepSAClassifier(random_state=0, **options).prequential(X, labels, method="predict_proba")
        loss = -np.mean(np.log(np.where(labels == "up", told[:, 1], told[:, 0])[FEW // 2 :]))
        result[f"classifier, {name}"] = {"losses": [float(loss)], "predictions": told[-8:, 0].tolist()}
    return result


def numeric_rows(n: int, inputs: int = 4, outputs: int = 1, seed: int = 0) -> tuple[Any, Any]:
    """Inputs of several scales, with outliers and missing values, and targets that drift."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, inputs)) * 10.0 ** np.arange(-1, inputs - 1) + np.arange(inputs)
    law = rng.normal(size=(inputs, outputs)) / 10.0 ** np.arange(-1, inputs - 1)[:, None]
    Y = np.sin(X[:, :1]) + X @ law + 0.1 * rng.normal(size=(n, outputs)) + (np.arange(n)[:, None] > n // 2)
    X[rng.random(X.shape) < 0.03] = np.nan
    Y[rng.random(n) < 0.01] *= 1e4
    return X, Y


def sklearn_regressor() -> Iterator[tuple[str, Any]]:
    X, Y = numeric_rows(700, outputs=2, seed=2)
    cases: dict[str, dict[str, Any]] = {
        "default": {},
        "squared": {"loss": "squared", "batch_size": 8, "hidden_layer_sizes": (12, 6), "activation": "tanh"},
        "ridges": {"ridge": "auto", "optimizer": "adam", "hidden_layer_sizes": 16},
        "linear": {"hidden_layer_sizes": (), "forgetting": 0.999},
        "deep": {"hidden_layer_sizes": (9, 5), "activation": "sigmoid", "optimizer": "rmsprop", "weight_decay": 0.01},
        "gelu": {"activation": "gelu", "optimizer": "sgd", "batch_size": 3},
        "experts": {"body": "experts"},
    }
    for name, options in cases.items():
        options = {"body": "fourier", "random_state": 0} | options
        model = SepSARegressor(**options)
        targets = Y if name == "default" else Y[:, 0]
        yield f"regressor, {name}: prequential", model.prequential(X[:500], targets[:500])
        model.partial_fit(X[500:600], targets[500:600], np.linspace(0.0, 2.0, 100))
        mean, std = model.predict(X[600:], return_std=True)
        yield f"regressor, {name}: mean", mean
        yield f"regressor, {name}: std", std
        yield f"regressor, {name}: outliers", model.outliers_
        other = SepSARegressor(**options)
        other.load_state_dict(model.state_dict())
        again = pickle.loads(pickle.dumps(model))
        yield f"regressor, {name}: loaded", other.partial_fit(X[600:], targets[600:]).predict(X[:50])
        yield f"regressor, {name}: pickled", again.partial_fit(X[600:], targets[600:]).predict(X[:50])


def labels_of(X: Any, late: int) -> NDArray[np.str_]:
    """Three classes, of which the third is first seen at row `late`."""
    first = np.nan_to_num(X[:, 0])
    labels = np.where(first > 0.5, "up", "down").astype("<U6")
    labels[late:][np.abs(np.nan_to_num(X[late:, 1])) > 1.5] = "across"
    return labels


def sklearn_classifier() -> Iterator[tuple[str, Any]]:
    X, _ = numeric_rows(600, seed=3)
    labels = labels_of(X, 350)
    for name, options in {
        "default": {},
        "forgetting": {"forgetting": 0.99, "class_weight": {"up": 2.0}, "hidden_layer_sizes": (9,)},
    }.items():
        model = SepSAClassifier(random_state=0, body="fourier", **options)  # type: ignore[arg-type]
        yield f"classifier, {name}: first", model.prequential(X[:300], labels[:300], method="predict_proba")
        yield f"classifier, {name}: new class", model.prequential(X[300:450], labels[300:450])
        yield f"classifier, {name}: later", model.prequential(X[450:], labels[450:], method="predict_proba")
        yield f"classifier, {name}: probabilities", model.predict_proba(X[:80])
        other = SepSAClassifier(random_state=0, body="fourier", **options)  # type: ignore[arg-type]
        other.load_state_dict(model.state_dict())
        yield f"classifier, {name}: loaded", other.partial_fit(X, labels, ["never"]).predict_proba(X[:80])


def sklearn_batch() -> Iterator[tuple[str, Any]]:
    X, Y = numeric_rows(120, seed=4)
    small: dict[str, Any] = {"max_iter": 8, "hidden_layer_sizes": (6,), "random_state": 0}
    model = SepSARegressor(**small).fit(X, Y[:, 0], np.linspace(0.0, 2.0, 120))
    yield "fit: intervals", np.stack(model.predict(X, return_std=True))
    yield "fit: passes", model.n_iter_
    yield "fit: then a stream", model.prequential(X[:40], Y[:40, 0])
    linear = SepSARegressor(hidden_layer_sizes=(), max_iter=4, early_stopping=False, random_state=0).fit(X, Y)
    yield "fit: linear", np.stack(linear.predict(X, return_std=True))
    labels = labels_of(X, 0)
    classifier = SepSAClassifier(class_weight="balanced", **small).fit(X, labels)
    yield "fit: probabilities", classifier.predict_proba(X)
    labels[:30], classifier.class_weight = "new", None
    yield "fit: a new class", classifier.partial_fit(X[:30], labels[:30]).predict_proba(X)
    other = SepSAClassifier(**small)
    other.load_state_dict(classifier.state_dict())
    yield "fit: loaded", other.partial_fit(X[:30], labels[:30]).predict_proba(X)


def torch_body() -> Iterator[tuple[str, Any]]:
    X, Y = numeric_rows(330, seed=5)
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1))
    options: dict[str, Any] = {"module": body, "batch_size": 16, "random_state": 0, "max_iter": 2}
    model = SepSARegressor(forgetting=0.99, **options)
    yield "torch body: prequential", model.prequential(X, Y[:, 0])
    yield "torch body: intervals", np.stack(model.predict(X, return_std=True))
    other = SepSARegressor(forgetting=0.99, **options)
    other.load_state_dict(model.state_dict())
    yield "torch body: loaded", other.prequential(X[:50], Y[:50, 0])
    yield "torch body: fit", np.stack(SepSARegressor(**options).fit(X, Y[:, 0]).predict(X, return_std=True))
    classifier, labels = SepSAClassifier(**options), labels_of(X, 200)
    yield "torch body: classes", classifier.prequential(X[:150], labels[:150], method="predict_proba")
    yield "torch body: a new class", classifier.prequential(X[150:], labels[150:], method="predict_proba")


def forecaster() -> Iterator[tuple[str, Any]]:
    rng = np.random.default_rng(9)
    rows = np.sin(np.arange(400) / 4)[:, None] + 0.1 * rng.normal(size=(400, 2))
    rows[rng.random(rows.shape) < 0.02] = np.nan
    model = SepSAForecaster(horizon=4)
    yield "forecaster: prequential", np.stack(model.prequential(rows, coverage=0.9))
    yield "forecaster: next", json.dumps(model.forecast())


def dicts(X: Any) -> Iterator[dict[str, float]]:
    """Samples with features that appear late, that are rare, and that are sometimes missing."""
    for i, row in enumerate(X.tolist()):
        x = {name: value for name, value in zip("abcd", row, strict=True) if value == value}
        if i >= 200:
            x["late"] = float(np.sin(row[0])) if row[0] == row[0] else 0.0
        if i >= 280 and i % 3 == 0:
            x[f"word {i % 5}"] = 1.0
        yield x


def river() -> Iterator[tuple[str, Any]]:
    try:
        from sepsa import river as interface
    except ModuleNotFoundError:
        return
    import pandas as pd

    X, Y = numeric_rows(420, outputs=2, seed=6)
    samples, labels = list(dicts(X)), labels_of(X, 300).tolist()
    for missing in ("auto", "zero", "mean"):
        model = interface.SepSARegressor(missing=missing, max_features=7, seed=0, body="fourier")
        yield f"river, {missing}: one by one", list(prequential(model, samples, Y[:, 0].tolist()))
        law = model.predict_one(samples[-1], with_dist=True)
        yield f"river, {missing}: distribution", [law.mu, law.sigma]
    model = interface.SepSARegressor((6,), "tanh", "momentum", forgetting=0.99, skip=False, seed=0, body="fourier")
    frame = pd.DataFrame(samples)
    for start in range(0, 420, 70):
        model.learn_many(frame[start : start + 70], pd.Series(Y[start : start + 70, 0], name="y"))
        yield f"river, frames: {start}", model.predict_many(frame[:50]).to_numpy()
    several = interface.SepSAMultiTargetRegressor(hidden=(), loss="squared", seed=0)
    pairs = [{"u": u, "v": v} for u, v in Y.tolist()]
    told = [list(row.values()) for row in prequential(several, samples, pairs)]
    yield "river, several targets", told[1:]
    classifier = interface.SepSAClassifier(seed=0, body="fourier")
    told = []
    for x, label in zip(samples, labels, strict=True):
        told.append(sorted(classifier.predict_proba_one(x).items()))
        classifier.learn_one(x, label)
    yield "river, classes", json.dumps(told)
    classifier.learn_many(frame[:60], pd.Series(["new", *labels[1:60]]))
    yield "river, classes: frame", classifier.predict_proba_many(frame).to_numpy()
    other = interface.SepSAClassifier(seed=0, body="fourier")
    other.load_state_dict(classifier.state_dict())
    other.learn_one(samples[0], "newer")
    yield "river, classes: loaded", other.predict_proba_many(frame).to_numpy()


def prequential(model: Any, samples: list[Any], targets: list[Any]) -> Iterator[Any]:
    for x, y in zip(samples, targets, strict=True):
        yield model.predict_one(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # more features than inputs
            model.learn_one(x, y)


def table(folder: Path, n: int, seed: int) -> Path:
    """A CSV file with numbers, dates, categories, identifiers, missing cells, a late column and broken rows."""
    rng = np.random.default_rng(seed)
    lines = ["x,colour,when,key,late,y,label"]
    for i in range(n):
        x = rng.normal()
        colour = ["red", "green", "blue", "NA", "7"][rng.integers(5)]
        when = f"2026-{1 + i % 12:02d}-{1 + i % 28:02d}T{i % 24:02d}:30"
        late = f"{rng.normal():.4f}" if i > n // 2 else ""
        y = 3 * x + 5 * (colour == "red") + rng.normal() / 10
        label = "across" if i > n // 3 and abs(x) > 1 else "up" if x > 0 else "down"
        cells = [f"{x:.4f}", colour, when, f"id-{rng.integers(90)}", late, f"{y:.4f}", label]
        if i % 97 == 50:
            cells[5] = "broken"
        if i % 89 == 51:
            cells = cells[:3]
        if i % 83 == 52:
            cells[6] = ""
        lines.append(",".join(cells))
    path = folder / "table.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def command(*arguments: Any) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `sepsa`."""
    from typer.testing import CliRunner

    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def tables() -> Iterator[tuple[str, Any]]:
    import pyarrow.csv
    import pyarrow.parquet

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = table(folder, 900, seed=7)
        read = pyarrow.csv.read_csv(io.BytesIO(b"\n".join(path.read_bytes().splitlines()[:50])))
        pyarrow.parquet.write_table(read, folder / "table.parquet")
        rows = [dict(zip(read.column_names, row, strict=True)) for row in zip(*read.to_pydict().values(), strict=True)]
        (folder / "table.jsonl").write_text("".join(json.dumps(row, default=str) + "\n" for row in rows))
        network = ["--body", "fourier"]
        plain = ["--forgetting", "1", *network]
        cases = {
            "regression": [path, "--target", "y", "--drop", "label", *plain],
            "classes": [path, "--target", "label", "--classify", "--drop", "y", "--categories", "3", *plain],
            "drift": [path, "--target", "y", "--forgetting", "auto", "--ridge", "auto", "--categorical", "x", *network],
            "Parquet": [folder / "table.parquet", "--target", "y", *plain],
            "JSON lines": [folder / "table.jsonl", "--target", "y", "--seed", "3", *plain],
            "strict": [path, "--target", "y", "--strict", *plain],
        }
        for case, arguments in cases.items():
            out, aside, saved = (folder / f"{case}.{kind}" for kind in ("csv", "quarantine.csv", "sepsa"))
            code, _, said = command(
                "stream", *arguments, "--predictions", out, "--quarantine", aside, "--checkpoint", saved, "--every", 300
            )
            yield f"sepsa stream, {case}: exit code", code
            yield f"sepsa stream, {case}: messages", said.partition(";")[0].replace(str(folder), "")
            yield f"sepsa stream, {case}: predictions", out.read_text()
            yield f"sepsa stream, {case}: quarantine", aside.read_text() if aside.exists() else ""
            if saved.exists():
                code, told, _ = command("predict", saved, path)
                yield f"sepsa stream, {case}: predicted by the model", told
                code, told, _ = command("inspect", saved, "--json")
                known = json.loads(told)
                for entry in ("rows", "quarantined", "error", "columns", "inputs", "classes", "noise"):
                    yield f"sepsa stream, {case}: {entry}", json.dumps(known.get(entry))
        code, told, _ = command("stream", path, "--target", "y", *plain, "--quarantine", folder / "quarantine.csv")
        yield "sepsa stream: printed", told
