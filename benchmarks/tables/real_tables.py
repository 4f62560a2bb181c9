"""`fit` on real tables: test errors and the coverage of intervals, beside scikit-learn's models.

    python benchmarks/real_data.py --export FOLDER                                # once, see there
    python benchmarks/tables/real_tables.py --data FOLDER --jobs 16 [--half choice|report|uci]   # what is not there yet
    python benchmarks/tables/real_tables.py --data FOLDER --again --models sepsa         # ours again
    python benchmarks/tables/real_tables.py --table [--half report]

Tables have 5 folds, shuffled by one seed, and the six UCI regressions their 20 published splits. The error is the root
mean square or the share of wrong labels on the test rows; the coverage is the share of test targets inside mean ± 1.645
standard deviations. Everybody has default settings. Texts are categories for HistGradientBoosting and indicators for
the other peers, whose inputs are standardized, and so is the perceptron's target; it may make 500 passes.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("LOKY_MAX_CPU_COUNT", "1")  # processes take the processors: --jobs

import argparse
import math
import multiprocessing
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from sklearn.compose import TransformedTargetRegressor, make_column_selector, make_column_transformer
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from benchmarks.real_data import HALVES, NUMBER, TABLES, UCI, Data, Row, known, load, number, print_table, store

RESULT = Path(__file__).with_suffix(".json")
FOLDS, PUBLISHED = 5, 20
NINETY = 1.6449  # standard deviations of a normal law to either side
UNLIKELY = 1e-6
OURS = "sepsa"
ALL = {f"UCI {name}": Data(NUMBER, "uci") for name in UCI} | TABLES


def prepared(model: Any) -> Any:
    """The model behind indicators of texts and standardized numbers."""
    numbers = make_pipeline(SimpleImputer(), StandardScaler())
    texts = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    columns = make_column_transformer(
        (texts, make_column_selector(dtype_include="category")),
        (numbers, make_column_selector(dtype_exclude="category")),
    )
    return make_pipeline(columns, model)


def ours(kind: str, seed: int) -> Any:
    from sepsa import SepSAClassifier, SepSARegressor

    return (SepSARegressor if kind == NUMBER else SepSAClassifier)(random_state=seed)


def perceptron(kind: str, seed: int) -> Any:
    if kind == NUMBER:
        mlp = prepared(MLPRegressor(max_iter=500, random_state=seed))
        return TransformedTargetRegressor(mlp, transformer=StandardScaler())
    return prepared(MLPClassifier(max_iter=500, random_state=seed))


def boosted(kind: str, seed: int) -> Any:
    return (HistGradientBoostingRegressor if kind == NUMBER else HistGradientBoostingClassifier)(
        categorical_features="from_dtype", random_state=seed
    )


def forest(kind: str, seed: int) -> Any:
    return prepared((RandomForestRegressor if kind == NUMBER else RandomForestClassifier)(random_state=seed))


MODELS: dict[str, Callable[[str, int], Any]] = {
    OURS: ours,
    "HistGradientBoosting": boosted,
    "RandomForest": forest,
    "MLP": perceptron,
    "Ridge or logistic": lambda kind, _: prepared(Ridge() if kind == NUMBER else LogisticRegression(max_iter=1000)),
}


class Cell(NamedTuple):
    table: str
    model: str
    split: int
    data: Path
    result: Path


def parts(cell: Cell) -> tuple[Any, Any, Any, Any]:
    """Training inputs and targets, test inputs and targets of the split."""
    kind, half = ALL[cell.table]
    if half == "uci":
        with np.load(cell.data / "uci" / f"{cell.table.removeprefix('UCI ')}.npz") as given:
            X, y, tests = pd.DataFrame(given["X"].astype(float)), given["y"].astype(float), list(given["test_rows"])
        X.columns = [f"x{j}" for j in range(X.shape[1])]
    else:
        X, y = load(cell.data, "tables", cell.table)
        folds = (KFold if kind == NUMBER else StratifiedKFold)(FOLDS, shuffle=True, random_state=0)
        tests = [test for _, test in folds.split(X, y)]
    if cell.model == OURS:
        X = X.astype(dict.fromkeys(X.select_dtypes("category"), object))
    test = tests[cell.split]
    train = np.setdiff1d(np.arange(len(y)), test)
    return X.iloc[train], y[train], X.iloc[test], y[test]


def measure(cell: Cell, X: Any, y: Any, X_test: Any, y_test: Any) -> Row:
    kind = ALL[cell.table].kind
    start = time.process_time()
    model = MODELS[cell.model](kind, cell.split).fit(X, y)
    result: Row = {"seconds": time.process_time() - start}
    if kind == NUMBER:
        if cell.model == OURS:
            mean, std = model.predict(X_test, return_std=True)
            result["coverage"] = np.mean(np.abs(mean - y_test) <= NINETY * std)
        else:
            mean = model.predict(X_test)
        result |= {"error": math.sqrt(np.mean((mean - y_test) ** 2)), "mae": np.mean(np.abs(mean - y_test))}
    else:
        shares = np.zeros((len(y_test), int(max(y.max(), y_test.max())) + 1))
        shares[:, np.asarray(model.classes_, int)] = model.predict_proba(X_test)
        right = shares[np.arange(len(y_test)), y_test]
        result |= {
            "error": np.mean(shares.argmax(1) != y_test),
            "log loss": -np.mean(np.log(np.maximum(right, UNLIKELY))),
        }
    return {name: float(f"{value:.5g}") for name, value in result.items()}


def run_cell(cell: Cell) -> str:
    """One split of a table and a model, stored; returns what is to be printed."""
    warnings.simplefilter("ignore")
    row: Row = {"table": cell.table, "model": cell.model, "split": cell.split}
    try:
        row |= measure(cell, *parts(cell))
        told = f"{row['error']:.5g} in {row['seconds']:.1f} s"
    except Exception as error:  # an expert that is not there: told, and the rest goes on
        told = row["missing"] = f"{type(error).__name__}: {error}"[:200]
    put(cell.result, [row])
    return f"{cell.table:24s} {cell.model:20s} {cell.split:2d} {told}"


def put(path: Path, new: list[Row]) -> None:
    """Put rows into the file in the place of those that it has of the same splits."""
    cells, names, titles = {place(row) for row in new}, list(ALL), list(MODELS)
    store(
        path,
        new,
        lambda row: place(row) in cells,
        lambda row: (names.index(row["table"]), titles.index(row["model"]), row["split"]),
    )


def place(row: Row) -> tuple[str, str, int]:
    return row["table"], row["model"], row["split"]


def run(options: argparse.Namespace) -> None:
    done = {place(row) for row in known(options.result) if "error" in row and not options.again}
    cells = [
        Cell(name, title, split, options.data, options.result)
        for title in options.models or MODELS
        for name, (_, half) in ALL.items()
        if options.half in (None, half) and (not options.tables or name in options.tables)
        for split in range(min(options.splits, PUBLISHED if half == "uci" else FOLDS))
    ]
    cells = [cell for cell in cells if cell[:3] not in done]
    print(f"{len(cells)} splits", flush=True)
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for line in pool.imap_unordered(run_cell, cells):
            print(line, flush=True)


def print_tables(half: str | None, rows: list[Row]) -> None:
    """Means over splits, the smallest in bold, and how often ours is first or behind."""
    for part in [half] if half else ("uci", *HALVES):
        cells: dict[str, Row] = {}
        ratios: dict[str, float] = {}
        for name in (name for name, data in ALL.items() if data.half == part):
            found = {t: [r for r in rows if (r["table"], r["model"]) == (name, t) and "error" in r] for t in MODELS}
            means = {title: np.mean([row["error"] for row in of]) for title, of in found.items() if of}
            peers = [mean for title, mean in means.items() if title != OURS]
            if not peers:
                continue
            shown = {t: number(v) if v > min(means.values()) else f"**{number(v)}**" for t, v in means.items()}
            held = [row["coverage"] for row in found[OURS] if "coverage" in row]
            cells[name] = {title: shown.get(title, "") for title in MODELS} | {
                "coverage": f"{np.mean(held):.3f}" if held else "",
                "seconds": f"{np.mean([row['seconds'] for row in found[OURS] or [{'seconds': math.nan}]]):.2g}",
            }
            if OURS in means:
                ratios[name] = (means[OURS] + 1e-9) / (min(peers) + 1e-9)
        print_table(f"RMSE or wrong labels, {part}", cells)
        if ratios:
            counted = {
                "tables": len(ratios),
                "first": sum(ratio <= 1 for ratio in ratios.values()),
                "more than 5 % behind": sum(ratio > 1.05 for ratio in ratios.values()),
                "ratio to the best peer": f"{math.exp(np.mean(np.log(list(ratios.values())))):.3f}",
                "worst": f"{max(ratios.values()):.2f} {max(ratios, key=ratios.__getitem__)}",
            }
            print_table(f"{part}", {OURS: counted})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, help="the folder that real_data.py --export has made")
    parser.add_argument("--half", choices=("uci", *HALVES))
    parser.add_argument("--tables", nargs="+", choices=list(ALL), metavar="TABLE")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), metavar="MODEL")
    parser.add_argument("--splits", type=int, default=PUBLISHED, help="at most, of each table")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--again", action="store_true", help="measure what is there already, too")
    parser.add_argument("--merge", nargs="+", type=Path, default=[], help="results from elsewhere, put into ours")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--result", type=Path, default=RESULT, help="the file of results")
    options = parser.parse_args()
    if options.merge:
        put(options.result, [row for path in options.merge for row in known(path)])
    elif options.table:
        print_tables(options.half, known(options.result))
    elif options.data is None:
        parser.error("--data must name the folder that real_data.py --export has made")
    else:
        run(options)


if __name__ == "__main__":
    main()
