"""Forgetting of a head where the relationship drifts: each fixed factor beside 1 and beside the best of a stream.

    python benchmarks/heads/drift.py --jobs 2   # what drift.json does not hold yet; needs river
    python benchmarks/heads/drift.py --table    # every stream and factor, beside the best

A network with one hidden layer of 64 rectified units is trained by SepSA with Adam at 1e-3 on batches of 8, each batch
predicted before it is learned: the mean squared error in variances of the target for `RLS(ridge="evidence")`, the mean
log loss for `SoftmaxNewton(ridge="evidence")`. Streams have 10,000 rows. The names of each kind, in alphabetical order,
go to the halves "choice" and "report" in turn; one number for each seed, which makes the stream and the network.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from benchmarks.measure import machine, missing_runs, write
from sepsa import RLS, SepSA, SoftmaxNewton

RESULT = Path(__file__).with_suffix(".json")
ROWS, BATCH, SEEDS = 10_000, 8, 2
FACTORS = (1.0, 0.9998, 0.999, 0.995, 0.99, 0.98, 0.95)  # of an update
Stream = tuple[np.ndarray, np.ndarray]


def inputs(random: np.random.Generator, columns: int = 10) -> np.ndarray:
    return random.standard_normal((ROWS, columns))


def jumps(random: np.random.Generator, every: int) -> Stream:
    """A linear relationship that is another one after so many rows."""
    X = inputs(random)
    weights = random.standard_normal((-(-ROWS // every), 10)).repeat(every, axis=0)[:ROWS]
    return X, (X * weights).sum(1) + random.standard_normal(ROWS)


def walk(random: np.random.Generator, rate: float) -> Stream:
    """A linear relationship whose weights walk at random."""
    X = inputs(random)
    weights = random.standard_normal(10) + rate * random.standard_normal((ROWS, 10)).cumsum(axis=0)
    return X, (X * weights).sum(1) + random.standard_normal(ROWS)


def turning(random: np.random.Generator, rows: float, classes: bool) -> Stream:
    """A relationship that turns once in so many rows: targets, or classes on two sides of a plane."""
    X, angle = inputs(random), 2 * np.pi * np.arange(ROWS) / rows
    value = X[:, 0] * np.cos(angle) + X[:, 1] * np.sin(angle) + 0.3 * X[:, 2] * X[:, 3]
    noise = 0.3 * random.standard_normal(ROWS)
    return (X, (value + noise > 0).astype(np.int64)) if classes else (X, value + noise)


def of_river(rows: Iterable[tuple[dict[Any, float], Any]]) -> Stream:
    pairs = list(itertools.islice(rows, ROWS))
    X = np.array([[float(value) for value in row.values()] for row, _ in pairs])
    y = np.array([target for _, target in pairs])
    return (X - X.mean(0)) / X.std(0).clip(1e-12), y if y.dtype.kind == "f" else np.unique(y, return_inverse=True)[1]


def friedman(kind: str, positions: tuple[int, ...], seed: int) -> Stream:
    from river.datasets import synth

    return of_river(synth.FriedmanDrift(drift_type=kind, position=positions, transition_window=1000, seed=seed))


def hyperplane(change: float, seed: int) -> Stream:
    from river.datasets import synth

    return of_river(synth.Hyperplane(seed=seed, n_features=10, n_drift_features=5, mag_change=change))


def concepts(name: str, seed: int) -> Stream:
    """A stream of River's whose concept is another one after each quarter."""
    from river.datasets import synth

    make: Callable[[int], Any] = {
        "SEA": lambda k: synth.SEA(variant=k, noise=0.1, seed=seed),
        "Sine": lambda k: synth.Sine(classification_function=k, seed=seed, has_noise=True),
    }[name]
    quarter = ROWS // 4
    parts = [of_river(itertools.islice(make(k), quarter)) for k in range(4)]
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


STREAMS: dict[str, dict[str, Callable[[int], Stream]]] = {
    "regression": {
        "no drift": lambda seed: walk(np.random.default_rng(seed), 0.0),
        "jumps every 2,500": lambda seed: jumps(np.random.default_rng(seed), 2500),
        "jumps every 500": lambda seed: jumps(np.random.default_rng(seed), 500),
        "slow walk": lambda seed: walk(np.random.default_rng(seed), 0.003),
        "fast walk": lambda seed: walk(np.random.default_rng(seed), 0.03),
        "turns in 10,000": lambda seed: turning(np.random.default_rng(seed), 10_000, False),
        "turns in 4,000": lambda seed: turning(np.random.default_rng(seed), 4000, False),
        "Friedman, abrupt": lambda seed: friedman("gra", (3000, 7000), seed),
        "Friedman, local": lambda seed: friedman("lea", (2500, 5000, 7500), seed),
        "Friedman, global": lambda seed: friedman("gsg", (3000, 7000), seed),
    },
    "classification": {
        "hyperplane .001": lambda seed: hyperplane(0.001, seed),
        "hyperplane .01": lambda seed: hyperplane(0.01, seed),
        "hyperplane, still": lambda seed: hyperplane(0.0, seed),
        "SEA": lambda seed: concepts("SEA", seed),
        "Sine": lambda seed: concepts("Sine", seed),
        "classes turn in 10,000": lambda seed: turning(np.random.default_rng(seed), 10_000, True),
        "classes turn in 4,000": lambda seed: turning(np.random.default_rng(seed), 4000, True),
    },
}


def error(kind: str, name: str, factor: float, seed: int) -> dict[str, float]:
    torch.set_num_threads(1)
    X, y = STREAMS[kind][name](seed)
    torch.manual_seed(seed)
    inputs = torch.as_tensor(X, dtype=torch.float32)
    if kind == "regression":
        targets = torch.as_tensor((y - y.mean()) / y.std(), dtype=torch.float32)[:, None]
        outputs, solver, loss = 1, RLS(ridge="evidence", forgetting=factor), mse_loss
    else:
        targets = torch.as_tensor(y)
        outputs, solver, loss = int(y.max()) + 1, SoftmaxNewton(ridge="evidence", forgetting=factor), cross_entropy
    model = nn.Sequential(nn.Linear(inputs.shape[1], 64), nn.ReLU(), nn.Linear(64, outputs))
    optimizer = SepSA(model, torch.optim.Adam, solver=solver, lr=1e-3)
    total = 0.0
    for rows, known in zip(inputs.split(BATCH), targets.split(BATCH), strict=True):
        with torch.no_grad():
            total += float(loss(model(rows), known)) * len(rows)
        optimizer.learn(rows, known)
    return {"error": total / ROWS}


def half(kind: str, name: str) -> str:
    return ("choice", "report")[sorted(STREAMS[kind], key=str.lower).index(name) % 2]


def table(runs: list[dict[str, Any]]) -> None:
    means: dict[tuple[str, str, float], list[float]] = {}
    for run in runs:
        means.setdefault((run["kind"], run["stream"], run["factor"]), []).append(run["error"])
    print(f"{'':28}{'half':8}" + "".join(f"{factor:>9}" for factor in FACTORS))
    for kind, streams in STREAMS.items():
        for name in streams:
            row = [statistics.mean(means[kind, name, factor]) for factor in FACTORS]
            cells = "".join(f"{value / min(row):>9.3f}" for value in row)
            print(f"{name:28}{half(kind, name):8}{cells}   of {min(row):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="print what drift.json holds")
    arguments = parser.parse_args()
    report = json.loads(RESULT.read_text()) if RESULT.exists() else {"runs": []} | machine()
    if arguments.table:
        table(report["runs"])
        return
    pairs = [(kind, name) for kind, streams in STREAMS.items() for name in streams]
    items = [(*pair, factor, seed) for seed in range(SEEDS) for pair in pairs for factor in FACTORS]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for _ in missing_runs(
            report["runs"], ("kind", "stream", "factor", "seed"), items, lambda item: pool.submit(error, *item)
        ):
            write(RESULT, report)
    table(report["runs"])


if __name__ == "__main__":
    main()
