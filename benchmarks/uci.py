"""`SepSARegressor.fit` on six UCI regressions with their published splits, beside scikit-learn's models.

    SEPSA_DATA=... python benchmarks/uci.py --peers     # scikit-learn's models, what is not there yet
    SEPSA_DATA=... python benchmarks/uci.py --ours      # sepsa, always again
    SEPSA_DATA=... python benchmarks/uci.py --time      # seconds of one fit each, for a quiet machine
    python benchmarks/uci.py --table                    # what uci.json holds

The folder SEPSA_DATA/uci holds X, y and test_rows (20, n_test) of each set; split i trains on the other rows. Everybody
has one setting for all sets. scikit-learn's MLPRegressor has standardized inputs and targets, two layers of 50, batches
of 32 and as many visits of rows as our fit may make in all; once it stops by its training loss, as by default, and once
by a tenth of the rows left out. Their predictive deviation, for the negative log likelihood, is that of the errors on a
tenth of the training rows left out of a first fit. MC dropout is quoted (Gal's repository, its longer runs).
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from measure import machine
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sepsa import SepSARegressor

RESULT = Path(__file__).with_suffix(".json")
SETS = ("concrete", "energy", "kin8nm", "power-plant", "wine-quality-red", "yacht")
SPLITS = 20
VISITS = 1_200_000  # of rows, by all passes of one fit
OURS = "sepsa"
QUOTED = {
    "concrete": (4.82, 2.93),
    "energy": (0.54, 1.21),
    "kin8nm": (0.08, -1.14),
    "power-plant": (4.01, 2.80),
    "wine-quality-red": (0.62, 0.93),
    "yacht": (0.67, 1.25),
}


def split(name: str, i: int) -> tuple[Any, Any, Any, Any]:
    with np.load(Path(os.environ["SEPSA_DATA"]) / "uci" / f"{name}.npz") as given:
        X, y, test = given["X"].astype(float), given["y"].astype(float), given["test_rows"][i]
    train = np.setdiff1d(np.arange(len(y)), test)
    return X[train], y[train], X[test], y[test]


def perceptron(n: int, seed: int, early_stopping: bool) -> Any:
    mlp = MLPRegressor(
        hidden_layer_sizes=(50, 50),
        batch_size=32,
        max_iter=-(-VISITS // n),
        early_stopping=early_stopping,
        random_state=seed,
    )
    return TransformedTargetRegressor(make_pipeline(StandardScaler(), mlp), transformer=StandardScaler())


PEERS: dict[str, Callable[[int, int], Any]] = {
    "MLPRegressor": lambda n, seed: perceptron(n, seed, early_stopping=False),
    "MLPRegressor, early_stopping": lambda n, seed: perceptron(n, seed, early_stopping=True),
    "HistGradientBoosting": lambda n, seed: HistGradientBoostingRegressor(random_state=seed),
}


def likelihood(y: Any, mean: Any, std: Any) -> float:
    """The mean negative log likelihood of y under normal laws."""
    return float(np.mean(0.5 * np.log(2 * np.pi * std**2) + 0.5 * ((y - mean) / std) ** 2))


def measure(title: str, name: str, i: int) -> dict[str, float]:
    X, y, X_test, y_test = split(name, i)
    start = time.perf_counter()
    if title == OURS:
        model = SepSARegressor(random_state=i).fit(X, y)
        seconds = time.perf_counter() - start
        mean, std = model.predict(X_test, return_std=True)
    else:
        model = PEERS[title](len(X), i).fit(X, y)
        seconds = time.perf_counter() - start
        mean = model.predict(X_test)
        out = np.random.default_rng(i).permutation(len(X)) < len(X) // 10
        first = clone(model).fit(X[~out], y[~out])
        std = np.full(len(mean), np.sqrt(np.mean((first.predict(X[out]) - y[out]) ** 2)))
    result = {
        "rmse": np.sqrt(np.mean((mean - y_test) ** 2)),
        "nll": likelihood(y_test, mean, std),
        "coverage": np.mean(np.abs(mean - y_test) <= 1.6449 * std),
        "seconds": seconds,
    }
    if title == OURS:
        result["passes"] = model.n_iter_
    return {what: float(f"{value:.5g}") for what, value in result.items()}


def known() -> dict[str, Any]:
    return json.loads(RESULT.read_text()) if RESULT.exists() else {"rows": [], "seconds": {}}


def store(rows: list[dict[str, Any]], seconds: dict[str, Any] | None = None) -> None:
    """Put rows into the file in the places of the same set, model and split; one line each."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return SETS.index(row["set"]), row["model"], row["split"]

    old, new = known(), {key(row) for row in rows}
    kept = sorted([*(row for row in old["rows"] if key(row) not in new), *rows], key=key)
    head = json.dumps(machine() | {"seconds": old.get("seconds", {}) if seconds is None else seconds}, indent=1)
    lines = ",\n".join("  " + json.dumps(row) for row in kept)
    part = RESULT.with_suffix(".part")
    part.write_text(f'{head[:-2]},\n "rows": [\n{lines}\n ]\n}}\n')
    part.replace(RESULT)


def run(titles: list[str], only: str, splits: range) -> None:
    done = {(row["set"], row["model"], row["split"]) for row in known()["rows"]}
    for i in splits:
        for name in SETS:
            for title in titles:
                if only not in name or (title != OURS and (name, title, i) in done):
                    continue
                result = measure(title, name, i)
                print(f"{name:18s} {title:30s} {i:2d} {result}", flush=True)
                store([{"set": name, "model": title, "split": i} | result])


def time_fits() -> None:
    """One fit each, split 0."""
    measure(OURS, "yacht", 0)  # compiles
    seconds = {title: {name: measure(title, name, 0)["seconds"] for name in SETS} for title in [OURS, *PEERS]}
    store([], seconds)
    print(json.dumps(seconds, indent=1))


def print_table() -> None:
    given = known()
    titles = [OURS, *PEERS]
    print("| RMSE / NLL | " + " | ".join(titles) + " | MC dropout, quoted |")
    print("|---" * (len(titles) + 2) + "|")
    for name in SETS:
        cells = []
        for title in titles:
            rows = [row for row in given["rows"] if (row["set"], row["model"]) == (name, title)]
            if not rows:
                cells.append("")
                continue
            rmse, nll = (np.array([row[what] for row in rows]) for what in ("rmse", "nll"))
            error = rmse.std(ddof=1) / np.sqrt(len(rows)) if len(rows) > 1 else 0.0
            digits = 4 if name == "kin8nm" else 3 if name in ("energy", "wine-quality-red", "yacht") else 2
            cells.append(f"{rmse.mean():.{digits}f} ± {error:.{digits}f} / {nll.mean():.2f} ({len(rows)})")
        print(f"| {name} | " + " | ".join(cells) + f" | {QUOTED[name][0]} / {QUOTED[name][1]} |")
    print("\n| seconds of a fit | " + " | ".join(titles) + " |")
    print("|---" * (len(titles) + 1) + "|")
    for name in SETS:
        print(f"| {name} | " + " | ".join(f"{given['seconds'][title][name]:.2g}" for title in titles) + " |")


def main() -> None:
    options = argparse.ArgumentParser()
    for name in ("peers", "ours", "time", "table"):
        options.add_argument(f"--{name}", action="store_true")
    options.add_argument("--only", default="", help="sets with this in their name")
    options.add_argument("--splits", type=int, default=SPLITS)
    options.add_argument("--first", type=int, default=0, help="the first split, to go on where a run was cut off")
    asked = options.parse_args()
    splits = range(asked.first, asked.splits)
    warnings.simplefilter("ignore", ConvergenceWarning)
    if asked.ours:
        run([OURS], asked.only, splits)
    if asked.peers:
        run(list(PEERS), asked.only, splits)
    if asked.time:
        time_fits()
    if asked.table:
        print_table()


if __name__ == "__main__":
    main()
