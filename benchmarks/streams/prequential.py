"""How good predictions made before learning are, with default settings on raw data, beside River's models and others.

    python benchmarks/streams/prequential.py --peers  # River's models, both halves, what is not there yet
    python benchmarks/streams/prequential.py --further  # peers outside River, both halves, likewise
    python benchmarks/streams/prequential.py --further --only-peer CapyMOA --seeds 0
    python benchmarks/streams/prequential.py --ours [--half development]  # sepsa, always again
    python benchmarks/streams/prequential.py --ours --body experts  # with another body, as "sepsa, experts"
    python benchmarks/streams/prequential.py --variants  # other settings of sepsa, development half, one seed
    python benchmarks/streams/prequential.py --time  # the microseconds alone, for a quiet machine
    python benchmarks/streams/prequential.py --merge FILE  # results from elsewhere, put into prequential.json
    python benchmarks/streams/prequential.py --table [--half report] [--ours-name "sepsa, experts"]  # as in docs/
    python benchmarks/streams/prequential.py --figure  # prequential.svg, of the report half

Every stream is read once, in its own order: predict, then learn. Half of the streams ("development") are those on which
defaults are chosen; the other half ("report") is run when the choice is made. The split was written down before any
result was seen. Every model has its default settings, and 3 seeds where it is random; River's StandardScaler stands
before those of River's models that need it. Peers whose package (lightgbm, xgboost, vowpalwabbit, capymoa with
a Java runtime) is not installed are left out. Regressions are judged by the mean absolute error, classifications by the
share of wrong labels, both also over the first 50 and 200 rows; beside them the root mean squared error, the log loss
(a probability below 1e-6 counts as 1e-6), the time to predict and learn a row, and the coverage and width of 90 %
intervals, over all rows; the coverage also over the 200 rows after each jump of the law. The streams from
SEPSA_DATA/uci are left out where that folder is not there.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import inspect
import io
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from river import datasets, forest, linear_model, neighbors, preprocessing, tree
from river import utils as river_utils
from river.datasets import synth
from sklearn import datasets as tables
from sklearn import neural_network
from sklearn import preprocessing as sklearn_preprocessing

from benchmarks.measure import machine
from reproduction import data
from sepsa.river import SepSAClassifier, SepSARegressor

RESULT = Path(__file__).with_suffix(".json")
SEEDS = 3
ROWS = 3000
TIMED = 1000  # rows, where the time alone is measured
UNLIKELY = 1e-6
NINETY = 1.6449  # standard deviations of a normal law to either side
HALVES = ("development", "report")

Row = tuple[dict[Any, float], Any]


class Stream(NamedTuple):
    half: str
    kind: str  # regression or classification
    load: Callable[[], Iterable[Row]]
    jumps: tuple[int, ...] = ()  # rows at which the law of the target changes at once


# ---------------------------------------------------------------------- where streams come from


def table(X: Any, y: Any, order: int | None = None) -> list[Row]:
    """Rows of arrays, shuffled by this seed where one is given."""
    X, y = np.asarray(X, float), np.asarray(y)
    at = np.arange(len(X)) if order is None else np.random.default_rng(order).permutation(len(X))
    return [({f"x{j}": v for j, v in enumerate(X[i].tolist())}, y[i].item()) for i in at[:ROWS]]


def bundled(load: Callable[..., Any], order: int | None = 0) -> Callable[[], list[Row]]:
    return lambda: table(*load(return_X_y=True), order)


def uci(name: str) -> Callable[[], list[Row]]:
    """A regression of SEPSA_DATA/uci, shuffled."""

    def load() -> list[Row]:
        with np.load(Path(os.environ["SEPSA_DATA"]) / "uci" / f"{name}.npz") as given:
            return table(given["X"], given["y"], 0)

    return load


def generated(make: Callable[[], Any]) -> Callable[[], list[Row]]:
    """The first rows of one of River's generators, with an indicator for each value of a feature that is a word."""

    def load() -> list[Row]:
        rows = list(islice(make(), ROWS))
        words = {(name, value) for x, _ in rows for name, value in x.items() if isinstance(value, str)}
        names = sorted({name for name, _ in words}, key=str)
        kinds = sorted(words, key=str)
        return [
            (
                {str(name): float(value) for name, value in x.items() if name not in names}
                | {f"{name}={value}": float(x[name] == value) for name, value in kinds},
                int(y) if isinstance(y, (bool, np.bool_)) else y,
            )
            for x, y in rows
        ]

    return load


def energy() -> list[Row]:
    data.load("energy")  # fetched where it is missing, and checked
    path = data._data_folder(None) / "energy" / "ENB2012_data.csv"
    rows = list(csv.DictReader(io.StringIO(path.read_text("utf-8-sig"))))
    return [({name: float(row[name]) for name in row if name[0] == "X"}, float(row["Y1"])) for row in rows]


def change(before: Any, after: Any, at: int = ROWS // 2, width: int = 10) -> Any:
    return synth.ConceptDriftStream(before, after, position=at, width=width, seed=1)


# ---------------------------------------------------------------------- streams of our own


def turning_line() -> list[Row]:
    """A linear law in 8 inputs whose weights turn slowly, noise of a fifth of the signal."""
    chance = np.random.default_rng(10)
    X = chance.standard_normal((ROWS, 8)) * [1, 10, 0.1, 1, 5, 1, 100, 1] + 3
    angle = 2 * np.pi * np.arange(ROWS) / 4000
    a, b = chance.standard_normal((2, 8))
    Z = (X - 3) / [1, 10, 0.1, 1, 5, 1, 100, 1]
    signal = (Z * (np.cos(angle)[:, None] * a + np.sin(angle)[:, None] * b)).sum(1)
    return table(X, 50 + 4 * signal + 2 * chance.standard_normal(ROWS))


def jumping_line() -> list[Row]:
    """A linear law in 6 inputs, drawn anew at rows 1000 and 2000."""
    chance = np.random.default_rng(11)
    X = chance.standard_normal((ROWS, 6))
    weights = chance.standard_normal((3, 6))[np.arange(ROWS) // 1000]
    return table(X, 10 + (X * weights).sum(1) + 0.3 * chance.standard_normal(ROWS))


def jumping_curve() -> list[Row]:
    """A curved law in 5 inputs; at rows 1000 and 2000 the inputs change places and the level moves."""
    chance = np.random.default_rng(12)
    X = chance.uniform(-2, 2, (ROWS, 5))
    y = np.empty(ROWS)
    for part in range(3):
        rows = slice(1000 * part, 1000 * (part + 1))
        A = np.roll(X[rows], part, axis=1)
        y[rows] = 3 * np.sin(2 * A[:, 0]) + A[:, 1] * A[:, 2] + np.abs(A[:, 3]) + 5 * part
    return table(X, y + 0.3 * chance.standard_normal(ROWS))


def outliers() -> list[Row]:
    """A curved law in 5 inputs; one target in fifty is thrown off by a hundred times the noise."""
    chance = np.random.default_rng(13)
    X = chance.standard_normal((ROWS, 5))
    y = 2 * X[:, 0] + np.sin(2 * X[:, 1]) + X[:, 2] ** 2 + 0.3 * chance.standard_normal(ROWS)
    y += 30 * chance.standard_normal(ROWS) * (chance.random(ROWS) < 0.02)
    return table(X, y)


def spoiled_inputs() -> list[Row]:
    """A linear law in 6 inputs, one of which reads 999 in one row of a hundred."""
    chance = np.random.default_rng(14)
    X = chance.standard_normal((ROWS, 6)) + 20
    y = X @ chance.standard_normal(6) + 0.5 * chance.standard_normal(ROWS)
    X[chance.random(ROWS) < 0.01, 2] = 999.0
    return table(X, y)


def heavy_tails() -> list[Row]:
    """A curved law in 6 inputs of Student's t with 3 degrees of freedom, noise of t with 1.5."""
    chance = np.random.default_rng(15)
    X = chance.standard_t(3, (ROWS, 6))
    y = np.tanh(X[:, 0] + X[:, 1]) * 3 + X[:, 2] + 0.5 * chance.standard_t(1.5, ROWS)
    return table(X, y)


def lagged(series: Any, lags: int) -> list[Row]:
    windows = np.lib.stride_tricks.sliding_window_view(series[:-1], lags)
    return table(windows, series[lags:])


def seasonal() -> list[Row]:
    """The next value of a trend with two seasons, from the last 12; the amplitude grows."""
    chance = np.random.default_rng(16)
    t = np.arange(ROWS + 12)
    series = 100 + 0.02 * t + (5 + t / 500) * np.sin(2 * np.pi * t / 24) + 3 * np.sin(2 * np.pi * t / 168)
    return lagged(series + chance.standard_normal(t.size), 12)


def switching_oscillator() -> list[Row]:
    """The next value of a noisy oscillator from the last 8; frequency and level change at rows 1000 and 2000."""
    chance = np.random.default_rng(17)
    n = ROWS + 8
    period = np.array([20.0, 11.0, 33.0])[np.minimum(np.maximum(np.arange(n) - 8, 0) // 1000, 2)]
    level = np.array([0.0, 15.0, -10.0])[np.minimum(np.maximum(np.arange(n) - 8, 0) // 1000, 2)]
    series = level + 4 * np.sin(np.cumsum(2 * np.pi / period)) + 0.5 * chance.standard_normal(n)
    return lagged(series, 8)


def chaotic_map() -> list[Row]:
    """The next value of the Hénon map from the last 2, with a little noise on what is read."""
    chance = np.random.default_rng(18)
    a, b = [0.1], 0.1
    for _ in range(ROWS + 2):
        x = a[-1]
        a.append(1 - 1.4 * x * x + b)
        b = 0.3 * x
    return lagged(np.array(a[1:]) + 0.02 * chance.standard_normal(ROWS + 2), 2)


def random_walk_level() -> list[Row]:
    """A curved law in 4 inputs on a level that walks at random."""
    chance = np.random.default_rng(19)
    X = chance.uniform(-1, 1, (ROWS, 4))
    y = np.cumsum(0.1 * chance.standard_normal(ROWS)) + 2 * X[:, 0] * X[:, 1] + np.cos(3 * X[:, 2])
    return table(X, y + 0.2 * chance.standard_normal(ROWS))


def few_of_many() -> list[Row]:
    """A linear law in 4 of 60 inputs, nine tenths of which are zero."""
    chance = np.random.default_rng(20)
    X = chance.standard_normal((ROWS, 60)) * (chance.random((ROWS, 60)) < 0.1)
    return table(X, X[:, :4] @ [3.0, -2.0, 1.5, 4.0] + 0.2 * chance.standard_normal(ROWS))


def wandering_clusters() -> list[Row]:
    """Four classes, two clusters each in 4 inputs, that walk at random."""
    chance = np.random.default_rng(21)
    centres = 2 * chance.standard_normal((8, 4))
    X, y = np.empty((ROWS, 4)), chance.integers(0, 8, ROWS)
    for i, k in enumerate(y):
        centres += 0.01 * chance.standard_normal(centres.shape)
        X[i] = centres[k] + 0.7 * chance.standard_normal(4)
    return table(X, y % 4)


def many_classes() -> list[Row]:
    """Thirty classes, one cluster each in 10 inputs, of which some are much rarer than others."""
    chance = np.random.default_rng(22)
    share = 1 / np.arange(1, 31)
    y = chance.choice(30, ROWS, p=share / share.sum())
    X = 1.3 * chance.standard_normal((30, 10))[y] + chance.standard_normal((ROWS, 10))
    return table(X * 10.0 ** np.arange(-4, 6), y)


def late_classes() -> list[Row]:
    """Ten classes on two circles, of which a new one appears every 250 rows."""
    chance = np.random.default_rng(23)
    y = np.array([chance.integers(0, min(10, 1 + i // 250) + 1) % 10 for i in range(ROWS)])
    angle = 2 * np.pi * (y % 5) / 5 + 0.25 * chance.standard_normal(ROWS)
    radius = 1 + (y >= 5) + 0.15 * chance.standard_normal(ROWS)
    return table(np.stack([radius * np.cos(angle), radius * np.sin(angle), chance.standard_normal(ROWS)], 1), y)


def sparse_words(seed: int, active: int) -> list[Row]:
    """Two classes of documents of a few words out of 80, every word an indicator; some tell of the class."""
    chance = np.random.default_rng(seed)
    y = chance.integers(0, 2, ROWS)
    odds = np.full((2, 80), 0.06)
    odds[0, :active], odds[1, active : 2 * active] = 0.2, 0.2
    return table(chance.random((ROWS, 80)) < odds[y], y)


def checkerboard() -> list[Row]:
    """Two classes on the fields of a board of 4 by 4, with 2 inputs of noise beside; one label in twenty is wrong."""
    chance = np.random.default_rng(24)
    X = chance.uniform(0, 4, (ROWS, 4))
    y = (np.floor(X[:, 0]) + np.floor(X[:, 1])) % 2
    return table(X, (y.astype(int) ^ (chance.random(ROWS) < 0.05)).astype(int))


def rare_alarm() -> list[Row]:
    """Two classes, one in twenty rows the rare one: where two inputs of 8 are large together."""
    chance = np.random.default_rng(25)
    X = chance.lognormal(0, 1, (ROWS, 8))
    score = np.log(X[:, 0]) + np.log(X[:, 1]) + 0.3 * chance.standard_normal(ROWS)
    return table(X, (score > 2.35).astype(int))


# ---------------------------------------------------------------------- laws in both halves, each drawn anew


def steps(seed: int, inputs: int) -> list[Row]:
    """A sum of steps at thresholds of single inputs."""
    chance = np.random.default_rng(seed)
    X = chance.uniform(0, 1, (ROWS, inputs)) * 10.0 ** chance.integers(-2, 3, inputs)
    Z = X / X.max(0)
    y = sum(chance.normal(0, 2) * (Z[:, chance.integers(inputs)] > chance.uniform(0.1, 0.9)) for _ in range(2 * inputs))
    return table(X, y + 0.3 * chance.standard_normal(ROWS))


def products(seed: int, inputs: int) -> list[Row]:
    """Products of pairs of inputs, and a linear part."""
    chance = np.random.default_rng(seed)
    X = chance.normal(0, 1, (ROWS, inputs)) + chance.normal(0, 1, inputs)
    i, j = chance.integers(0, inputs, (2, 4))
    y = (X[:, i] * X[:, j]) @ chance.normal(0, 1, 4) + X @ chance.normal(0, 0.5, inputs)
    return table(X, y + 0.3 * chance.standard_normal(ROWS))


def keyed_levels(seed: int, keys: int, walk: float) -> list[Row]:
    """A level for each key, which walks at random, and a linear part; the key is given by indicators."""
    chance = np.random.default_rng(seed)
    key = chance.integers(0, keys, ROWS)
    X = np.hstack([np.eye(keys)[key], chance.standard_normal((ROWS, 3))])
    levels = 5 * chance.standard_normal(keys) + np.cumsum(walk * chance.standard_normal((ROWS, keys)), 0)
    y = levels[np.arange(ROWS), key] + X[:, keys:] @ [1.0, -0.5, 0.2]
    return table(X, y + 0.3 * chance.standard_normal(ROWS))


def persistent_target(seed: int, stays: float) -> list[Row]:
    """A target that is mostly its own last value, with 5 inputs that tell a little of its change."""
    chance = np.random.default_rng(seed)
    X, y = chance.standard_normal((ROWS, 5)), np.zeros(ROWS)
    for t in range(1, ROWS):
        y[t] = stays * y[t - 1] + 0.3 * X[t, 0] - 0.2 * X[t, 1] + 0.3 * chance.standard_normal()
    return table(X, 20 + y)


def persistent_labels(seed: int, stays: float) -> list[Row]:
    """Labels of 3 classes that stay for some rows, of which 4 inputs tell little."""
    chance = np.random.default_rng(seed)
    y = np.zeros(ROWS, int)
    for t in range(1, ROWS):
        y[t] = y[t - 1] if chance.random() < stays else chance.integers(3)
    return table(0.6 * np.eye(3, 4)[y] + chance.standard_normal((ROWS, 4)), y)


def linear_logits(seed: int, inputs: int) -> list[Row]:
    """Two classes drawn by a logit that is linear in inputs of heavy tails."""
    chance = np.random.default_rng(seed)
    X = chance.standard_t(4, (ROWS, inputs))
    logit = 1.5 * X @ chance.standard_normal(inputs) - 1
    return table(X, (chance.random(ROWS) < 1 / (1 + np.exp(-logit))).astype(int))


def small_clusters(seed: int, clusters: int, classes: int) -> list[Row]:
    """Many small clusters in 5 inputs of different scales, each of one class."""
    chance = np.random.default_rng(seed)
    centres, of = chance.uniform(-3, 3, (clusters, 5)), chance.integers(0, classes, clusters)
    k = chance.integers(0, clusters, ROWS)
    X = (centres[k] + 0.4 * chance.standard_normal((ROWS, 5))) * 10.0 ** np.arange(-2, 3)
    return table(X, of[k])


# ---------------------------------------------------------------------- the split, fixed before any result was seen

D, R = HALVES
NUMBER, LABEL = "regression", "classification"
STREAMS: dict[str, Stream] = {
    # chosen on
    "TrumpApproval": Stream(D, NUMBER, lambda: datasets.TrumpApproval()),
    "Energy": Stream(D, NUMBER, energy),
    "Diabetes": Stream(D, NUMBER, bundled(tables.load_diabetes, None)),
    "Friedman": Stream(D, NUMBER, generated(lambda: synth.Friedman(seed=1))),
    "Mv": Stream(D, NUMBER, generated(lambda: synth.Mv(seed=1))),
    "make_friedman3": Stream(D, NUMBER, lambda: table(*tables.make_friedman3(ROWS, noise=0.1, random_state=1))),
    "UCI concrete": Stream(D, NUMBER, uci("concrete")),
    "UCI kin8nm": Stream(D, NUMBER, uci("kin8nm")),
    "turning line": Stream(D, NUMBER, turning_line),
    "jumping line": Stream(D, NUMBER, jumping_line, (1000, 2000)),
    "outliers": Stream(D, NUMBER, outliers),
    "seasonal": Stream(D, NUMBER, seasonal),
    "Phishing": Stream(D, LABEL, lambda: datasets.Phishing()),
    "ImageSegments": Stream(D, LABEL, lambda: datasets.ImageSegments()),
    "Agrawal": Stream(D, LABEL, generated(lambda: synth.Agrawal(classification_function=2, seed=1))),
    "SEA, changing": Stream(D, LABEL, generated(lambda: change(synth.SEA(0, seed=1), synth.SEA(3, seed=2))), (1500,)),
    "RandomRBF": Stream(
        D, LABEL, generated(lambda: synth.RandomRBF(seed_model=1, seed_sample=1, n_classes=4, n_features=8))
    ),
    "LED": Stream(D, LABEL, generated(lambda: synth.LED(seed=1, noise_percentage=0.1))),
    "STAGGER, changing": Stream(
        D, LABEL, generated(lambda: change(synth.STAGGER(0, seed=1), synth.STAGGER(2, seed=2))), (1500,)
    ),
    "breast cancer": Stream(D, LABEL, bundled(tables.load_breast_cancer)),
    "iris": Stream(D, LABEL, bundled(tables.load_iris)),
    "make_moons": Stream(D, LABEL, lambda: table(*tables.make_moons(ROWS, noise=0.3, random_state=1))),
    "wandering clusters": Stream(D, LABEL, wandering_clusters),
    "sparse words": Stream(D, LABEL, lambda: sparse_words(26, 10)),
    "steps in 6": Stream(D, NUMBER, lambda: steps(30, 6)),
    "products in 5": Stream(D, NUMBER, lambda: products(31, 5)),
    "levels of 12 keys": Stream(D, NUMBER, lambda: keyed_levels(32, 12, 0.05)),
    "persistent target 0.95": Stream(D, NUMBER, lambda: persistent_target(33, 0.95)),
    "FriedmanDrift, global": Stream(
        D, NUMBER, generated(lambda: synth.FriedmanDrift("gsg", position=(1000, 2000), transition_window=50, seed=2))
    ),
    "make_sparse_uncorrelated": Stream(
        D, NUMBER, lambda: table(*tables.make_sparse_uncorrelated(ROWS, 15, random_state=1))
    ),
    "make_friedman1 of 20": Stream(D, NUMBER, lambda: table(*tables.make_friedman1(ROWS, 20, noise=1, random_state=2))),
    "persistent labels 0.9": Stream(D, LABEL, lambda: persistent_labels(34, 0.9)),
    "linear logits in 8": Stream(D, LABEL, lambda: linear_logits(35, 8)),
    "40 small clusters": Stream(D, LABEL, lambda: small_clusters(36, 40, 4)),
    "Sine": Stream(D, LABEL, generated(lambda: synth.Sine(1, seed=3, has_noise=True))),
    "Mixed": Stream(D, LABEL, generated(lambda: synth.Mixed(0, seed=3))),
    "Agrawal 6": Stream(D, LABEL, generated(lambda: synth.Agrawal(6, seed=3, perturbation=0.05))),
    "Hyperplane, still": Stream(
        D, LABEL, generated(lambda: synth.Hyperplane(seed=3, n_features=6, noise_percentage=0.1))
    ),
    "LEDDrift": Stream(D, LABEL, generated(lambda: synth.LEDDrift(seed=3, noise_percentage=0.05, n_drift_features=3))),
    "make_blobs": Stream(
        D, LABEL, lambda: table(*tables.make_blobs(ROWS, 4, centers=12, cluster_std=2.0, random_state=3))
    ),
    # reported
    "FriedmanDrift": Stream(
        R,
        NUMBER,
        generated(lambda: synth.FriedmanDrift("gra", position=(1000, 2000), transition_window=100, seed=1)),
        (1000, 2000),
    ),
    "Planes2D": Stream(R, NUMBER, generated(lambda: synth.Planes2D(seed=1))),
    "make_friedman2": Stream(R, NUMBER, lambda: table(*tables.make_friedman2(ROWS, noise=50.0, random_state=1))),
    "make_regression": Stream(
        R,
        NUMBER,
        lambda: table(*tables.make_regression(ROWS, 30, n_informative=10, effective_rank=8, noise=1, random_state=1)),
    ),
    "UCI power-plant": Stream(R, NUMBER, uci("power-plant")),
    "UCI wine-quality-red": Stream(R, NUMBER, uci("wine-quality-red")),
    "UCI yacht": Stream(R, NUMBER, uci("yacht")),
    "jumping curve": Stream(R, NUMBER, jumping_curve, (1000, 2000)),
    "switching oscillator": Stream(R, NUMBER, switching_oscillator, (1000, 2000)),
    "chaotic map": Stream(R, NUMBER, chaotic_map),
    "heavy tails": Stream(R, NUMBER, heavy_tails),
    "spoiled inputs": Stream(R, NUMBER, spoiled_inputs),
    "random walk level": Stream(R, NUMBER, random_walk_level),
    "few of many": Stream(R, NUMBER, few_of_many),
    "Hyperplane": Stream(
        R, LABEL, generated(lambda: synth.Hyperplane(seed=1, n_features=10, n_drift_features=4, mag_change=0.002))
    ),
    "RandomRBFDrift": Stream(
        R,
        LABEL,
        generated(
            lambda: synth.RandomRBFDrift(
                seed_model=1, seed_sample=1, n_classes=4, n_features=6, change_speed=0.1, n_drift_centroids=10
            )
        ),
    ),
    "RandomTree": Stream(R, LABEL, generated(lambda: synth.RandomTree(seed_tree=1, seed_sample=1, n_classes=3))),
    "Mixed, changing": Stream(
        R, LABEL, generated(lambda: change(synth.Mixed(0, seed=1), synth.Mixed(1, seed=2))), (1500,)
    ),
    "Sine, changing": Stream(
        R, LABEL, generated(lambda: change(synth.Sine(0, seed=1), synth.Sine(2, seed=2), width=300))
    ),
    "Waveform": Stream(R, LABEL, generated(lambda: synth.Waveform(seed=1))),
    "Agrawal, changing": Stream(
        R, LABEL, generated(lambda: change(synth.Agrawal(0, seed=1), synth.Agrawal(4, seed=2))), (1500,)
    ),
    "digits": Stream(R, LABEL, bundled(tables.load_digits)),
    "wine": Stream(R, LABEL, bundled(tables.load_wine)),
    "make_classification": Stream(
        R,
        LABEL,
        lambda: table(
            *tables.make_classification(ROWS, 20, n_informative=8, n_redundant=4, n_classes=6, random_state=1)
        ),
    ),
    "make_gaussian_quantiles": Stream(
        R, LABEL, lambda: table(*tables.make_gaussian_quantiles(n_samples=ROWS, n_features=6, random_state=1))
    ),
    "many classes": Stream(R, LABEL, many_classes),
    "late classes": Stream(R, LABEL, late_classes),
    "checkerboard": Stream(R, LABEL, checkerboard),
    "rare alarm": Stream(R, LABEL, rare_alarm),
    "steps in 12": Stream(R, NUMBER, lambda: steps(40, 12)),
    "products in 8": Stream(R, NUMBER, lambda: products(41, 8)),
    "levels of 30 keys": Stream(R, NUMBER, lambda: keyed_levels(42, 30, 0.02)),
    "persistent target 0.8": Stream(R, NUMBER, lambda: persistent_target(43, 0.8)),
    "make_friedman1": Stream(R, NUMBER, lambda: table(*tables.make_friedman1(ROWS, 10, noise=2, random_state=4))),
    "persistent labels 0.7": Stream(R, LABEL, lambda: persistent_labels(44, 0.7)),
    "linear logits in 15": Stream(R, LABEL, lambda: linear_logits(45, 15)),
    "80 small clusters": Stream(R, LABEL, lambda: small_clusters(46, 80, 2)),
    "make_hastie_10_2": Stream(R, LABEL, lambda: table(*tables.make_hastie_10_2(ROWS, random_state=4))),
    "Agrawal 8": Stream(R, LABEL, generated(lambda: synth.Agrawal(8, seed=4))),
    "SEA, noisy": Stream(R, LABEL, generated(lambda: synth.SEA(1, seed=4, noise=0.1))),
}


# ---------------------------------------------------------------------- models


def nearest(model: type, seed: int) -> Any:
    engine = neighbors.SWINN(dist_func=river_utils.math._euclidean_distance, seed=seed)  # River's default, with a seed
    return model(engine=engine)


def scaled(model: Any) -> Any:
    return preprocessing.StandardScaler() | model


class Model(NamedTuple):
    make: Callable[[int], Any]
    random: bool
    intervals: bool = False


OURS = "sepsa"
VARIANTS: dict[str, dict[str, Any]] = {
    "no body": {"hidden": []},
    "32 units": {"hidden": (32,)},
    "128 units": {"hidden": (128,)},
    "rectifiers": {"activation": "relu"},
    "lr 1e-3": {"lr": 1e-3},
    "lr 1e-2": {"lr": 1e-2},
    "forgetting 1": {"forgetting": 1.0},
    "ridge 1": {"ridge": 1.0},
    "ridge 100": {"ridge": 100.0},
    "squared loss": {"loss": "squared"},
}
ALONE = f"{OURS}, fourier"  # the network without experts, which the variants are variants of


def models(stream: Stream, labels: int, body: str | None = None) -> dict[str, Model]:
    """Ours and the peers by name. A tree's regression leaves are linear models and want scaled inputs."""
    ours, options = (OURS, {}) if body is None else (f"{OURS}, {body}", {"body": body})
    if stream.kind == NUMBER:
        offers = "with_dist" in inspect.signature(SepSARegressor.predict_one).parameters
        return {
            ours: Model(lambda seed: SepSARegressor(seed=seed, **options), True, offers),
            "linear": Model(lambda _: scaled(linear_model.LinearRegression()), False),
            "Bayesian linear": Model(lambda _: scaled(linear_model.BayesianLinearRegression()), False, True),
            "Hoeffding adaptive tree": Model(lambda seed: scaled(tree.HoeffdingAdaptiveTreeRegressor(seed=seed)), True),
            "AMF": Model(lambda seed: scaled(forest.AMFRegressor(seed=seed)), True),
            "KNN": Model(lambda seed: scaled(nearest(neighbors.KNNRegressor, seed)), True),
            "ARF": Model(lambda seed: scaled(forest.ARFRegressor(seed=seed)), True),
        }
    linear = linear_model.LogisticRegression if labels == 2 else linear_model.SoftmaxRegression
    return {
        ours: Model(lambda seed: SepSAClassifier(seed=seed, **options), True),
        "linear": Model(lambda _: scaled(linear()), False),
        "Hoeffding adaptive tree": Model(lambda seed: tree.HoeffdingAdaptiveTreeClassifier(seed=seed), True),
        "AMF": Model(lambda seed: scaled(forest.AMFClassifier(seed=seed)), True),
        "KNN": Model(lambda seed: scaled(nearest(neighbors.KNNClassifier, seed)), True),
        "ARF": Model(lambda seed: forest.ARFClassifier(seed=seed), True),
    }


# ---------------------------------------------------------------------- peers outside River


class Simple:
    """The mean of all targets or the shares of all classes so far; with `last` the last target alone."""

    def __init__(self, last: bool) -> None:
        self.last, self.count, self.total, self.shares = last, 0, 0.0, {}

    def predict_one(self, x: Any) -> float:
        return self.total / max(self.count, 1)

    def predict_proba_one(self, x: Any) -> dict[Any, float]:
        return {label: count / self.count for label, count in self.shares.items()}

    def learn_one(self, x: Any, y: Any) -> None:
        if self.last:
            self.count, self.total, self.shares = 0, 0.0, {}
        self.count += 1
        self.shares[y] = self.shares.get(y, 0) + 1
        if not isinstance(y, str):
            self.total += y


class Refitted:
    """A model of tables that is fitted anew every `EVERY` rows, on all rows so far or on the last `window`."""

    EVERY = 100

    def __init__(self, make: Callable[[], Any], kind: str, window: int | None) -> None:
        self.make, self.kind, self.window = make, kind, window
        self.X: list[list[float]] = []
        self.y: list[Any] = []
        self.first, self.model, self.labels = Simple(False), None, []

    def _row(self, x: Any) -> list[float]:
        return [math.nan if v is None else float(v) for v in x.values()]

    def predict_one(self, x: Any) -> float:
        if self.model is None:
            return self.first.predict_one(x)
        return float(self.model.predict(np.array([self._row(x)]))[0])

    def predict_proba_one(self, x: Any) -> dict[Any, float]:
        if self.model is None:
            return self.first.predict_proba_one(x)
        return dict(zip(self.labels, self.model.predict_proba(np.array([self._row(x)]))[0].tolist(), strict=True))

    def learn_one(self, x: Any, y: Any) -> None:
        self.first.learn_one(x, y)
        self.X.append(self._row(x))
        self.y.append(y)
        if len(self.X) % self.EVERY == 0:
            start = 0 if self.window is None else max(0, len(self.X) - self.window)
            X, y = np.array(self.X[start:]), self.y[start:]
            if self.kind == LABEL:
                self.labels = sorted(set(y), key=str)
                if len(self.labels) < 2:
                    return
                y = [self.labels.index(label) for label in y]
            self.model = self.make().fit(X, np.array(y))


class Wabbit:
    """Vowpal Wabbit with its defaults; one-against-all for classes."""

    def __init__(self, kind: str, labels: list[Any]) -> None:
        import vowpalwabbit

        oaa = f" --oaa {max(len(labels), 2)} --probabilities --loss_function=logistic" if kind == LABEL else ""
        self.labels, self.vw = labels, vowpalwabbit.Workspace("--quiet" + oaa)

    def _line(self, x: Any, label: str = "") -> str:
        return f"{label} | " + " ".join(f"f{j}:{v:.9g}" for j, v in enumerate(x.values()) if v is not None)

    def predict_one(self, x: Any) -> float:
        return float(self.vw.predict(self._line(x)))

    def predict_proba_one(self, x: Any) -> dict[Any, float]:
        return dict(zip(self.labels, self.vw.predict(self._line(x)), strict=False))

    def learn_one(self, x: Any, y: Any) -> None:
        self.vw.learn(self._line(x, str(self.labels.index(y) + 1 if self.labels else y)))


class Perceptron:
    """scikit-learn's multilayer perceptron behind a StandardScaler, both by `partial_fit`, row by row."""

    def __init__(self, kind: str, labels: list[Any], seed: int) -> None:
        self.model = (neural_network.MLPRegressor if kind == NUMBER else neural_network.MLPClassifier)(
            random_state=seed
        )
        self.scaler, self.labels, self.fitted = sklearn_preprocessing.StandardScaler(), labels, False

    def _row(self, x: Any) -> Any:
        return np.array([[0.0 if v is None else float(v) for v in x.values()]])

    def predict_one(self, x: Any) -> float:
        return float(self.model.predict(self.scaler.transform(self._row(x)))[0]) if self.fitted else 0.0

    def predict_proba_one(self, x: Any) -> dict[Any, float]:
        if not self.fitted:
            return {}
        shares = self.model.predict_proba(self.scaler.transform(self._row(x)))[0]
        return dict(zip(self.labels, shares.tolist(), strict=True))

    def learn_one(self, x: Any, y: Any) -> None:
        row = self.scaler.partial_fit(self._row(x)).transform(self._row(x))
        if self.labels:
            self.model.partial_fit(row, [self.labels.index(y)], classes=range(len(self.labels)))
        else:
            self.model.partial_fit(row, [y])
        self.fitted = True


class Law(NamedTuple):
    """A normal law, as River's models tell it."""

    mu: float
    sigma: float


class Capy:
    """A learner of CapyMOA on a schema that knows the inputs and the classes."""

    def __init__(self, learner: type, inputs: int, labels: list[Any], **options: Any) -> None:
        from capymoa import core, stream

        names = [f"x{j}" for j in range(inputs)]
        classes = {"y": [str(label) for label in labels]} if labels else {}
        self.schema = stream.Schema.from_custom([*names, "y"], "y", classes)
        self.labels, self.core, self.model = labels, core, learner(self.schema, **options)

    def _input(self, x: Any) -> Any:
        return self.core.Instance.from_array(self.schema, self._row(x))

    def _row(self, x: Any) -> Any:
        return np.array([math.nan if v is None else float(v) for v in x.values()])

    def predict_one(self, x: Any, with_dist: bool = False) -> Any:
        told = self.model.predict(self._input(x))
        if with_dist:  # from the bounds that a learner of intervals tells
            return Law((told[0] + told[2]) / 2, (told[2] - told[0]) / (2 * NINETY))
        return float(told[1] if np.size(told) == 3 else told)

    def predict_proba_one(self, x: Any) -> dict[Any, float]:
        shares = self.model.predict_proba(self._input(x))
        return {} if shares is None else dict(zip(self.labels, shares.tolist(), strict=True))

    def learn_one(self, x: Any, y: Any) -> None:
        if self.labels:
            row = self.core.LabeledInstance.from_array(self.schema, self._row(x), self.labels.index(y))
        else:
            row = self.core.RegressionInstance.from_array(self.schema, self._row(x), y)
        self.model.train(row)


# CapyMOA's learners and whether a seed changes them.
CAPYMOA: dict[str, dict[str, tuple[str, bool]]] = {
    NUMBER: {
        "CapyMOA ARF": ("AdaptiveRandomForestRegressor", True),
        "CapyMOA SOKNL": ("SOKNL", True),
        "CapyMOA KNN": ("KNNRegressor", False),
        "CapyMOA SGBR": ("StreamingGradientBoostedRegression", True),
        "CapyMOA FIMT-DD": ("FIMTDD", False),
    },
    LABEL: {
        "CapyMOA SRP": ("StreamingRandomPatches", True),
        "CapyMOA ARF": ("AdaptiveRandomForestClassifier", True),
        "CapyMOA KNN": ("KNN", False),
        "CapyMOA SGBT": ("StreamingGradientBoostedTrees", True),
        "CapyMOA Hoeffding tree": ("HoeffdingTree", False),
    },
}
# Its learners of intervals, around the forest of "CapyMOA ARF", so that their errors are no peers of their own.
INTERVALS = {"CapyMOA MVE": "MVE", "CapyMOA AdaPI": "AdaPI"}


def capymoa_peers(kind: str, inputs: int, labels: list[Any]) -> dict[str, Model]:
    """CapyMOA's learners by name, with their defaults; intervals of 90 %."""
    from capymoa import classifier, regressor, uncertainty

    def peer(learner: type, random: bool, **options: Any) -> Model:
        def make(seed: int) -> Capy:
            return Capy(learner, inputs, labels, **options, **({"random_seed": seed + 1} if random else {}))

        return Model(make, random, bool(options))

    package = regressor if kind == NUMBER else classifier
    found = {title: peer(getattr(package, name), random) for title, (name, random) in CAPYMOA[kind].items()}
    if kind == NUMBER:
        found |= {t: peer(getattr(uncertainty, name), False, confidence_level=0.9) for t, name in INTERVALS.items()}
    return found


def further_peers(stream: Stream, rows: list[Row]) -> dict[str, Model]:
    """Peers outside River by name, those whose packages are installed."""
    kind = stream.kind
    labels = sorted({y for _, y in rows}, key=str) if kind == LABEL else []
    found = {
        "no change": Model(lambda _: Simple(True), False),
        "mean": Model(lambda _: Simple(False), False),
        "MLP": Model(lambda seed: Perceptron(kind, labels, seed), True),
    }
    for package, title, options in (
        ("lightgbm", "LightGBM", {"verbose": -1, "n_jobs": 1}),
        ("xgboost", "XGBoost", {"verbosity": 0, "n_jobs": 1}),
    ):
        if importlib.util.find_spec(package):
            module = importlib.import_module(package)
            prefix = "LGBM" if package == "lightgbm" else "XGB"
            model = getattr(module, prefix + ("Regressor" if kind == NUMBER else "Classifier"))
            for words, window in (("all rows", None), ("2000 rows", 2000)):
                found[f"{title}, {words}"] = Model(
                    lambda _, model=model, options=options, window=window: Refitted(
                        lambda: model(**options), kind, window
                    ),
                    False,
                )
    if importlib.util.find_spec("vowpalwabbit"):
        found["VW"] = Model(lambda _: Wabbit(kind, labels), False)
    if importlib.util.find_spec("capymoa"):
        found |= capymoa_peers(kind, len(rows[0][0]), labels)
    return found


FURTHER = (
    "no change", "mean", "MLP", "LightGBM, all rows", "LightGBM, 2000 rows", "XGBoost, all rows", "XGBoost, 2000 rows",
    "VW",
)  # fmt: skip


# ---------------------------------------------------------------------- measuring


def measure(model: Any, intervals: bool, rows: list[Row], stream: Stream) -> dict[str, Any]:
    """Predict, then learn, row by row."""
    clock = time.perf_counter
    seconds, wrong, losses = 0.0, np.empty(len(rows)), np.zeros(len(rows))
    inside, widths = np.full((2, len(rows)), np.nan)
    for i, (x, y) in enumerate(rows):
        start = clock()
        told = model.predict_one(x) if stream.kind == NUMBER else model.predict_proba_one(x)
        seconds += clock() - start
        if stream.kind == LABEL:  # as all these models make a label of their probabilities, at half the price of both
            wrong[i] = not told or max(told, key=told.get) != y
            losses[i] = -math.log(max(told.get(y, 0.0), UNLIKELY))
        else:
            # None: a forest that has learned nothing; NaN: CapyMOA's FIMT-DD on Energy
            wrong[i] = abs(y - (told if told is not None and math.isfinite(told) else 0.0))
            if intervals and i:
                law = model.predict_one(x, with_dist=True)
                inside[i], widths[i] = abs(y - law.mu) <= NINETY * law.sigma, 2 * NINETY * law.sigma
        start = clock()
        model.learn_one(x, y)
        seconds += clock() - start
    result: dict[str, Any] = {"error": wrong.mean(), "error 50": wrong[:50].mean(), "error 200": wrong[:200].mean()}
    if stream.kind == LABEL:
        result |= {"log loss": losses.mean(), "log loss 50": losses[:50].mean(), "log loss 200": losses[:200].mean()}
    else:
        result["rmse"] = np.sqrt(np.mean(wrong**2))
        if intervals:
            result |= {"coverage": np.nanmean(inside), "width": np.nanmean(widths)}
            result["relative width"] = result["width"] / np.std([y for _, y in rows])
            result["coverage after jumps"] = [float(inside[at : at + 200].mean()) for at in stream.jumps]
    result["us"] = 1e6 * seconds / len(rows)
    return {name: float(f"{v:.5g}") if np.isscalar(v) else v for name, v in result.items()}


def known() -> list[dict[str, Any]]:
    return json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []


def store(*new: dict[str, Any]) -> None:
    """Put rows into the file, each over the one of the same stream, model and seed; one line each."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return list(STREAMS).index(row["stream"]), row["model"], row["seed"]

    rows = {key(row): row for row in known()}
    for row in new:
        rows[key(row)] = rows.get(key(row), {}) | row
    head = json.dumps(machine() | {"error": "mean absolute error, or share of wrong labels"}, indent=1)
    lines = ",\n".join("  " + json.dumps(row) for _, row in sorted(rows.items()))
    part = RESULT.with_suffix(".part")
    part.write_text(f'{head[:-2]},\n "rows": [\n{lines}\n ]\n}}\n')
    part.replace(RESULT)


def chosen(half: str | None, only: str) -> list[tuple[str, Stream]]:
    """The streams of a half with these words in their name, but for those whose data are not there."""
    found = [(n, stream) for n, stream in STREAMS.items() if half in (None, stream.half) and only in n]
    if not os.path.isdir(os.path.join(os.environ.get("SEPSA_DATA", ""), "uci")):
        print("there is no folder uci in SEPSA_DATA: streams from it are left out")
        found = [(n, stream) for n, stream in found if not n.startswith("UCI")]
    return found


def run_further(half: str | None, only: str, peer: str, seeds: list[int]) -> None:
    """Measure the peers outside River that are not there yet, seed by seed and stream by stream."""
    warnings.simplefilter("ignore")  # of peers, about names of features and passes
    for seed, (name, stream) in product(seeds, chosen(half, only)):
        rows = list(stream.load())
        done = {(row["model"], row["seed"]) for row in known() if row["stream"] == name}
        for title, model in further_peers(stream, rows).items():
            if peer in title and (model.random or not seed) and (title, seed) not in done:
                result = measure(model.make(seed), model.intervals, rows, stream)
                print(f"{name:24s} {title:24s} {seed} {result}", flush=True)
                store({"stream": name, "model": title, "seed": seed, "rows": len(rows)} | result)


def run(half: str | None, ours: bool, only: str, body: str | None) -> None:
    """Measure what is asked for; a result is stored as soon as it is there."""
    done = {(row["stream"], row["model"], row["seed"]) for row in known()}
    streams = chosen(half, only)
    cache: dict[str, list[Row]] = {}
    if ours:  # compiles, outside the clock
        for name in ("Diabetes", "iris"):
            rows = list(STREAMS[name].load())[:20]
            model = next(iter(models(STREAMS[name], 3, body).values()))
            measure(model.make(0), model.intervals, rows, STREAMS[name])
    # Seed by seed, and the slowest and least random last, so that a first answer for every stream comes early.
    for seed, late in [(0, False), (0, True), *product(range(1, SEEDS), (False,)), *product(range(1, SEEDS), (True,))]:
        for name, stream in streams:
            if name not in cache:
                cache[name] = list(stream.load())
            rows = cache[name]
            labels = len({y for _, y in rows}) if stream.kind == LABEL else 0
            for title, model in models(stream, labels, body).items():
                if title.startswith(OURS) != ours or (title == "KNN") != late or (seed and not model.random):
                    continue
                if not ours and (name, title, seed) in done:
                    continue
                result = measure(model.make(seed), model.intervals, rows, stream)
                print(f"{name:24s} {title:24s} {seed} {result}", flush=True)
                store({"stream": name, "model": title, "seed": seed, "rows": len(rows)} | result)


def run_variants() -> None:
    for title, options in VARIANTS.items():
        for name, stream in STREAMS.items():
            if stream.half == HALVES[0]:
                rows = list(stream.load())
                model = (SepSARegressor if stream.kind == NUMBER else SepSAClassifier)(
                    seed=0, **{"body": "fourier"} | options
                )
                result = measure(model, False, rows, stream)
                print(f"{name:24s} {title:24s} {result}", flush=True)
                store({"stream": name, "model": f"{OURS}, {title}", "seed": 0, "rows": len(rows)} | result)


def print_variants(rows: list[dict[str, Any]]) -> None:
    """The geometric mean of a setting's error over that of the network alone, both of seed 0."""
    error = {(row["model"], row["stream"]): row["error"] + 1e-9 for row in rows if row["seed"] == 0}
    print("\n| setting | regressions | classifications | worst | best |\n|---|---|---|---|---|")
    for words, title in {**{name: f"{OURS}, {name}" for name in VARIANTS}, "with experts, the default": OURS}.items():
        ratios = {
            name: error[title, name] / error[ALONE, name]
            for name in STREAMS
            if STREAMS[name].half == HALVES[0] and (title, name) in error and (ALONE, name) in error
        }
        if not ratios:
            continue
        means = [
            float(np.exp(np.mean([math.log(v) for name, v in ratios.items() if STREAMS[name].kind == kind])))
            for kind in (NUMBER, LABEL)
        ]
        worst, best = max(ratios, key=ratios.__getitem__), min(ratios, key=ratios.__getitem__)
        print(f"| {words} | × {means[0]:.2f} | × {means[1]:.2f} | × {ratios[worst]:.2f} {worst} ", end="")
        print(f"| × {ratios[best]:.2f} {best} |")


def run_times() -> None:
    """Measure the time of a row again, on the first rows of each stream, and leave the errors as they are."""
    for name, stream in STREAMS.items():
        rows = list(stream.load())[:TIMED]
        labels = len({y for _, y in rows}) if stream.kind == LABEL else 0
        for title, model in models(stream, labels).items():
            measure(model.make(0), False, rows[:20], stream)  # compiles ours
            us = measure(model.make(0), False, rows, stream)["us"]
            print(f"{name:24s} {title:24s} {us}", flush=True)
            for row in known():
                if (row["stream"], row["model"], row["seed"]) == (name, title, 0):
                    store(row | {"us": us})


# ---------------------------------------------------------------------- the tables

Averages = dict[tuple[str, str, str], Any]


def averages(rows: list[dict[str, Any]]) -> Averages:
    """The mean over seeds by stream, model and measure; the time is that of the first seed, as `--time` measures it."""
    found: dict[tuple[str, str, str], list[Any]] = {}
    for row in rows:
        for what in row.keys() - {"stream", "model", "seed"}:
            if row["seed"] in ((0,) if what == "us" else range(SEEDS)):
                found.setdefault((row["stream"], row["model"], what), []).append(row[what])
    return {key: np.mean(values, axis=0) for key, values in found.items()}


def number(value: float) -> str:
    return f"{value:.0e}" if value >= 1e5 else f"{value:.{max(0, 2 - math.floor(math.log10(max(value, 1e-3))))}f}"


def peers(kind: str, further: bool) -> list[str]:
    """The names of River's models, and with `further` those of all peers."""
    stream = next(stream for stream in STREAMS.values() if stream.kind == kind)
    return [*list(models(stream, 3))[1:], *((*FURTHER, *CAPYMOA[kind]) if further else ())]


def races(
    told: Averages, half: str, ours: str, what: str, kind: str | None, further: bool
) -> Iterator[tuple[float, dict[str, float], list[str]]]:
    """Our error, those of the peers, and the peers without a result, for every stream that has ours and one of theirs.

    One wrong row is added to every count of wrong labels, so that no ratio is by zero. `what` "loss" is the error of
    regressions and the log loss of classifications.
    """
    for name, stream in STREAMS.items():
        exact = ("log loss" if stream.kind == LABEL else "error") if what == "loss" else what
        found = {m: told.get((name, m, exact)) for m in (ours, *peers(stream.kind, further))}
        there = {m: v for m, v in found.items() if v is not None}
        if stream.half != half or kind not in (None, stream.kind) or ours not in there or len(there) == 1:
            continue
        count = told[name, ours, "rows"]
        least = 1 / min(count, int(what.split()[-1]) if what[-1] == "0" else count)
        least *= stream.kind == LABEL and exact.startswith("error")
        there = {m: v + least for m, v in there.items()}
        yield there.pop(ours), there, [m for m, v in found.items() if v is None]


def summary(
    told: Averages, half: str, ours: str = OURS, what: str = "error", kind: str | None = None, further: bool = False
) -> dict[str, float]:
    """Ours against the best peer of each stream."""
    met = list(races(told, half, ours, what, kind, further))
    if not met:
        return {}
    places = [1 + sum(error < own for error in others.values()) for own, others, _ in met]
    ratios = [own / min(others.values()) for own, others, _ in met]
    return {
        "streams": len(met),
        "first": places.count(1),
        "second": places.count(2),
        "more than 5 % behind": sum(ratio > 1.05 for ratio in ratios),
        "ratio to the best peer": float(np.exp(np.mean(np.log(ratios)))),
        "results missing": sum(len(missing) for *_, missing in met),
    }


def rivals(told: Averages, half: str, ours: str = OURS) -> dict[str, dict[str, float]]:
    """Each peer against ours, those first that are most often ahead."""
    met = list(races(told, half, ours, "error", None, True))
    found = {}
    for peer in dict.fromkeys(m for kind in (NUMBER, LABEL) for m in peers(kind, True)):
        ratios = [own / others[peer] for own, others, _ in met if peer in others]
        if ratios:
            found[peer] = {
                "streams": len(ratios),
                "missing": sum(peer in missing for *_, missing in met),
                "ahead": sum(ratio > 1 for ratio in ratios),
                "by more than 5 %": sum(ratio > 1.05 for ratio in ratios),
                "our error / its": float(np.exp(np.mean(np.log(ratios)))),
            }
    return dict(sorted(found.items(), key=lambda item: -item[1]["ahead"] / item[1]["streams"]))


def print_table(first: str, rows: dict[str, dict[str, Any]]) -> None:
    """Rows by name, with the columns of the first of them."""
    columns = [first, *next(iter(rows.values()))]
    print("\n| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for name, row in rows.items():
        print(f"| {name} | " + " | ".join(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()) + " |")


def print_tables(half: str | None, ours: str) -> None:
    """As docs/benchmarks/streams.md has them."""
    told = averages(known())
    for part in [half] if half else HALVES:
        for kind in (NUMBER, LABEL):
            measured = {name for name, *_ in told}
            names = [n for n, stream in STREAMS.items() if (stream.half, stream.kind) == (part, kind) and n in measured]
            if not names:
                continue
            what = "mean absolute error" if kind == NUMBER else "share of wrong labels"
            print(f"\n**{kind.capitalize()}s, {part}: {what}**")
            print_table("stream", {name: errors(told, name, kind, ours) for name in names})
            print_table(f"{ours} / best of River's", {name: details(told, name, kind, ours) for name in names})
            if kind == NUMBER:
                print(f"\n**Intervals of 90 %, {part}: coverage / width in standard deviations of the target**")
                print_table("stream", {name: intervals(told, name, ours) for name in names})
        print_summary(told, part, ours)


def errors(told: Averages, name: str, kind: str, ours: str) -> dict[str, str]:
    """Our error on a stream, those of River's models and the smallest of the other peers; the smallest in bold."""
    titles = [ours, *peers(kind, False)]
    values = {title: told.get((name, title, "error")) for title in titles}
    others = set(peers(kind, True)) - set(titles)
    best, title = min(((told[name, m, "error"], m) for m in others if (name, m, "error") in told), default=(None, ""))
    values["best of the others"] = best
    least = min((v for v in values.values() if v is not None), default=None)
    cells = {t: "" if v is None else f"**{number(v)}**" if v == least else number(v) for t, v in values.items()}
    cells["best of the others"] += f" {title}" if title else ""
    count = next((f"{v:.0f}" for (stream, _, what), v in told.items() if (stream, what) == (name, "rows")), "")
    return {"rows": count} | cells


def details(told: Averages, name: str, kind: str, ours: str) -> dict[str, str]:
    """Other measures of a stream: ours and the best of River's models, and the time of a row."""
    more = "rmse" if kind == NUMBER else "log loss"
    found = {}
    for title, what in {"first 50 rows": "error 50", "first 200 rows": "error 200", f"{more}, all rows": more}.items():
        own = told.get((name, ours, what))
        others = [(v, m) for m in peers(kind, False) if (v := told.get((name, m, what))) is not None]
        met = own is not None and others
        found[title] = f"{number(own)} / {number(min(others)[0])} {min(others)[1]}" if met else ""
    us = told.get((name, ours, "us"))
    return found | {"µs a row": "" if us is None else f"{us:.0f}"}


def intervals(told: Averages, name: str, ours: str) -> dict[str, str]:
    """Coverage and width of intervals of 90 %."""
    found = {}
    for title in (ours, "Bayesian linear", *INTERVALS):
        held, width = told.get((name, title, "coverage")), told.get((name, title, "relative width"))
        found[title] = "" if held is None else f"{held:.3f} / " + ("?" if width is None else number(width))
    after = told.get((name, ours, "coverage after jumps"), ())
    return found | {f"{ours}, 200 rows after each jump": ", ".join(f"{v:.2f}" for v in after)}


def print_summary(told: Averages, part: str, ours: str) -> None:
    """Ours against River's models, against all peers and against each of them."""
    measures = {
        "loss": "mean absolute error or log loss",
        "error": "mean absolute error or wrong labels",
        "error 50": "the same, first 50 rows",
        "error 200": "the same, first 200 rows",
    }
    for further, whom in ((False, "River's models"), (True, "all peers")):
        found = {
            f"{'log loss' if (what, kind) == ('loss', LABEL) else title}, {kind or 'all'}": row
            for what, title in measures.items()
            for kind in (None, NUMBER, LABEL)
            if (what, kind) != ("loss", NUMBER) and (row := summary(told, part, ours, what, kind, further))
        }
        if found:
            print(f"\n**{ours} against {whom}, {part}**")
            print_table(f"against {whom}", found)
    if found:
        print(f"\n**{ours} against each peer, {part}: mean absolute error or wrong labels**")
        print_table("peer", rivals(told, part, ours))


def figure(ours: str) -> None:
    """Our error over the smallest of the peers, for each stream of the report half."""
    from matplotlib import pyplot as plt

    told = averages(known())
    ratios = {}
    for kind in (NUMBER, LABEL):
        names = [n for n, stream in STREAMS.items() if (stream.half, stream.kind) == (HALVES[1], kind)]
        met = [races(told, HALVES[1], ours, "error", kind, further) for further in (False, True)]
        for name, *both in zip(names, *met, strict=True):
            ratios[name] = (kind, *(own / min(others.values()) for own, others, _ in both))
    names = sorted(ratios, key=lambda name: ratios[name][2], reverse=True)
    fig, ax = plt.subplots(figsize=(6, 7), layout="constrained")
    for kind, colour in ((NUMBER, "C0"), (LABEL, "C1")):
        at = [n for n, name in enumerate(names) if ratios[name][0] == kind]
        river, every = ([ratios[names[n]][which] for n in at] for which in (1, 2))
        ax.hlines(at, river, every, color=colour, alpha=0.4)
        ax.scatter(river, at, s=16, facecolors="white", edgecolors=colour, label=f"{kind}, River's models", zorder=3)
        ax.scatter(every, at, s=16, color=colour, label=f"{kind}, all peers", zorder=3)
    ax.axvline(1, color="0.5", linewidth=1)
    ax.set(xscale="log", xlabel="error of sepsa / smallest error of the peers")
    ax.set_xticks([0.3, 0.5, 0.7, 1, 1.5], ["0.3", "0.5", "0.7", "1", "1.5"])
    ax.xaxis.minorticks_off()
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.margins(y=0.01)
    ax.legend(fontsize=8, loc="lower left")
    fig.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--peers", action="store_true")
    options.add_argument("--ours", action="store_true")
    options.add_argument("--further", action="store_true")
    options.add_argument("--variants", action="store_true")
    options.add_argument("--time", action="store_true")
    options.add_argument("--table", action="store_true")
    options.add_argument("--figure", action="store_true")
    options.add_argument("--merge", nargs="+", type=Path, default=[], help="other files of results to put into ours")
    options.add_argument("--half", choices=HALVES)
    options.add_argument("--body", help="of ours, which are then called after it")
    options.add_argument("--ours-name", default=OURS, help="which of ours the tables show")
    options.add_argument("--only", default="", help="streams with this in their name")
    options.add_argument("--only-peer", default="", help="peers outside River with this in their name")
    options.add_argument("--seeds", type=int, nargs="+", default=range(SEEDS), help="of peers outside River")
    asked = options.parse_args()
    if asked.merge:
        store(*(row for path in asked.merge for row in json.loads(path.read_text())["rows"]))
    if asked.ours:
        run(asked.half, True, asked.only, asked.body)
    if asked.peers:
        run(asked.half, False, asked.only, None)
    if asked.further:
        run_further(asked.half, asked.only, asked.only_peer, asked.seeds)
    if asked.variants:
        run_variants()
    if asked.time:
        run_times()
    if asked.table:
        print_tables(asked.half, asked.ours_name)
        print_variants(known())
    if asked.figure:
        figure(asked.ours_name)


if __name__ == "__main__":
    main()
