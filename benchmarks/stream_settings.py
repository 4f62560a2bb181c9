"""What the settings of a stream learner do to its errors on five raw streams, beside River's and scikit-learn's models.

    python benchmarks/stream_settings.py [--quick] [--only sepsa]

`prequential.py` compares defaults on many more streams. This one writes stream_settings.json and prints the table: mean
absolute error of three regressions, accuracy of two classifications, mean and standard deviation over seeds; then the
same for other settings of sepsa. Every stream is read once, in its own order. The others have default settings too;
where one is wanted on standardized inputs, River's or scikit-learn's running StandardScaler stands before it. Energy
(heating load) comes from SEPSA_DATA or is downloaded; the other sets come with River and scikit-learn. `--quick` reads
300 samples and writes nothing; `--only` measures again those with this in their name.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from measure import write
from river import datasets, forest, linear_model, neighbors, preprocessing
from river import utils as river_utils
from sklearn.datasets import load_diabetes
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.preprocessing import StandardScaler

from sepsa.paper import data
from sepsa.river import SepSAClassifier, SepSARegressor

Stream = list[tuple[dict[str, float], Any]]
SEEDS = 20  # of ours; the others have fewer where they are slow
SLOW_SEEDS = 3
VARIANT_SEEDS = 5
VARIANTS: dict[str, dict[str, Any]] = {
    "adam, lr 1e-4": {"lr": 1e-4},
    "adam, lr 1e-2": {"lr": 1e-2},
    "rmsprop, lr 1e-3": {"optimizer": "rmsprop"},
    "sgd, lr 1e-2": {"optimizer": "sgd", "lr": 1e-2},
    "momentum, lr 1e-3": {"optimizer": "momentum"},
    "nag, lr 1e-3": {"optimizer": "nag"},
    "forgetting 0.999": {"forgetting": 0.999},
    "forgetting 0.99": {"forgetting": 0.99},
    "ridge 1": {"ridge": 1.0},
    "ridge 100": {"ridge": 100.0},
    "16 hidden": {"hidden": (16,)},
    "200 hidden": {"hidden": (200,)},
    "50, 50 hidden": {"hidden": (50, 50)},
    "no body": {"hidden": []},
    "head without the inputs": {"skip": False},
    "tanh": {"activation": "tanh"},
}


def energy() -> Stream:
    data.load("energy")  # fetched where it is missing, and checked
    path = data._data_folder(None) / "energy" / "ENB2012_data.csv"
    rows = list(csv.DictReader(io.StringIO(path.read_text("utf-8-sig"))))
    return [({name: float(row[name]) for name in row if name[0] == "X"}, float(row["Y1"])) for row in rows]


def diabetes() -> Stream:
    given = load_diabetes()
    rows = zip(given.data.tolist(), given.target.tolist(), strict=True)
    return [(dict(zip(given.feature_names, x, strict=True)), y) for x, y in rows]


STREAMS: dict[str, Callable[[], Stream]] = {
    "TrumpApproval": lambda: list(datasets.TrumpApproval()),
    "Energy": energy,
    "Diabetes": diabetes,
    "Phishing": lambda: list(datasets.Phishing()),
    "ImageSegments": lambda: list(datasets.ImageSegments()),
}
CLASSIFICATIONS = ("Phishing", "ImageSegments")


class Perceptron:
    """scikit-learn's perceptron with `partial_fit` on one row, behind River's two methods."""

    def __init__(self, classes: list[Any] | None, seed: int, scaled: bool) -> None:
        self.model = MLPClassifier(random_state=seed) if classes else MLPRegressor(random_state=seed)
        self.options = {"classes": classes} if classes else {}
        self.scaler = StandardScaler() if scaled else None
        self.started = False

    def row(self, x: dict[str, float]) -> Any:
        X = np.array([list(x.values())])
        return self.scaler.transform(X) if self.scaler else X

    def predict_one(self, x: dict[str, float]) -> Any:
        return self.model.predict(self.row(x))[0] if self.started else None if self.options else 0.0

    def learn_one(self, x: dict[str, float], y: Any) -> None:
        if self.scaler:
            self.scaler.partial_fit(np.array([list(x.values())]))
        self.model.partial_fit(self.row(x), [y], **self.options)
        self.started = True


def nearest(model: type, seed: int) -> Any:
    engine = neighbors.SWINN(dist_func=river_utils.math._euclidean_distance, seed=seed)  # River's default, with a seed
    return preprocessing.StandardScaler() | model(engine=engine)


def contestants(classes: list[Any] | None) -> dict[str, tuple[Callable[[int], Any], int]]:
    """Each by name: what makes it from a seed, and over how many seeds."""
    linear: Callable[[], Any] = linear_model.LinearRegression
    if classes:
        linear = linear_model.LogisticRegression if len(classes) == 2 else linear_model.SoftmaxRegression
    knn = neighbors.KNNClassifier if classes else neighbors.KNNRegressor
    trees = forest.ARFClassifier if classes else forest.ARFRegressor
    ours = SepSAClassifier if classes else SepSARegressor
    return {
        "sepsa": (lambda seed: ours(seed=seed), SEEDS),
        "River, StandardScaler, linear": (lambda _: preprocessing.StandardScaler() | linear(), 1),
        "scikit-learn MLP": (lambda seed: Perceptron(classes, seed, scaled=False), SLOW_SEEDS),
        "scikit-learn MLP, StandardScaler": (lambda seed: Perceptron(classes, seed, scaled=True), SLOW_SEEDS),
        "River, StandardScaler, KNN": (partial(nearest, knn), SLOW_SEEDS),
        "River, adaptive random forest": (lambda seed: trees(seed=seed), SLOW_SEEDS),
        "River, StandardScaler, adaptive random forest": (
            lambda seed: preprocessing.StandardScaler() | trees(seed=seed),  # a regression's leaves are linear models
            SLOW_SEEDS,
        ),
    } | {
        f"sepsa, {name}": (lambda seed, options=options: ours(seed=seed, **options), VARIANT_SEEDS)
        for name, options in VARIANTS.items()
    }


def score(model: Any, stream: Stream, classification: bool) -> float:
    total = 0.0
    for x, y in stream:
        told = model.predict_one(x)
        total += told == y if classification else abs(y - told)
        model.learn_one(x, y)
    return total / len(stream)


def table(rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    lines = ["| | " + " | ".join(STREAMS) + " |", "|---" * (len(STREAMS) + 1) + "|"]
    for name in names:
        cells = []
        for stream in STREAMS:
            scores = next(row["scores"] for row in rows if (row["contestant"], row["stream"]) == (name, stream))
            if np.mean(scores) > 1e4:
                cells.append(f"{np.mean(scores):.0e}")
                continue
            digits = 4 if stream in CLASSIFICATIONS else 3 if stream == "TrumpApproval" else 2
            spread = f" ± {np.std(scores):.{digits}f}" if len(scores) > 1 else ""
            cells.append(f"{np.mean(scores):.{digits}f}{spread}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--quick", action="store_true")
    options.add_argument("--only", default="")
    asked = options.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)
    known = json.loads(Path(__file__).with_suffix(".json").read_text())["rows"] if asked.only else []
    rows = []
    for name, load in STREAMS.items():
        stream = load()[: 300 if asked.quick else None]
        classes = sorted({y for _, y in stream}) if name in CLASSIFICATIONS else None
        for contestant, (make, seeds) in contestants(classes).items():
            if asked.only not in contestant:
                rows += [row for row in known if (row["stream"], row["contestant"]) == (name, contestant)]
                continue
            start = time.perf_counter()
            seeds = range(1 if asked.quick else seeds)
            scores = [float(score(make(seed), stream, classes is not None)) for seed in seeds]
            rows.append({"stream": name, "contestant": contestant, "samples": len(stream), "scores": scores})
            print(f"{name:14s} {contestant:46s} {np.mean(scores):.4f}  {time.perf_counter() - start:.1f} s", flush=True)
    print(table(rows))
    if not asked.quick:
        write(__file__, {"measure": "MAE; accuracy of Phishing and ImageSegments", "rows": rows})


if __name__ == "__main__":
    main()
