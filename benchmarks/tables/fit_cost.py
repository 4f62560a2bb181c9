"""Processor seconds and size of `SepSARegressor.fit`, beside HistGradientBoosting's, on tables of 300 to 50,000 rows.

    python benchmarks/tables/fit_cost.py [--rounds 3] [--rows 300 1000 6000 50000]

Writes fit_cost.json. Contestants take turns on the same rows, in one thread each. There are eight inputs and two kinds
of targets: "noisy", where more passes gain nothing and few are made, and "smooth", a sum of sines almost without noise,
where the network is far better than trees and makes as many passes as a fit allows. The error is the root mean square
on 2,000 other rows, over the standard deviation of the targets.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("LOKY_MAX_CPU_COUNT", "1")

import argparse
import pickle
import time
from typing import Any

import numpy as np
from sklearn.ensemble import HistGradientBoostingRegressor

from benchmarks.measure import ratio, spread, write
from sepsa import SepSARegressor

MODELS = {"sepsa": SepSARegressor, "HistGradientBoosting": HistGradientBoostingRegressor}
NOISE = {"noisy": 1.0, "smooth": 0.01}
TESTS = 2000


def table(kind: str, rows: int, seed: int) -> tuple[Any, Any]:
    """Inputs (rows + TESTS, 8) and their targets."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((rows + TESTS, 8))
    y = X[:, 0] + np.sin(2 * X[:, 1]) + np.sin(X[:, 2] * X[:, 3]) + 0.5 * X[:, 4] ** 2
    return X, y + NOISE[kind] * rng.standard_normal(len(y))


def measure(kind: str, rows: int, rounds: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in MODELS}
    errors: dict[str, list[float]] = {name: [] for name in MODELS}
    size = 0
    for seed in range(rounds):
        X, y = table(kind, rows, seed)
        for name, model in MODELS.items():
            start = time.process_time()
            fitted = model(random_state=seed).fit(X[:rows], y[:rows])
            seconds[name].append(time.process_time() - start)
            errors[name].append(float(np.sqrt(np.mean((fitted.predict(X[rows:]) - y[rows:]) ** 2)) / y.std()))
            if name == "sepsa":
                size = len(pickle.dumps(fitted))
    return {
        "target": kind,
        "rows": rows,
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "ratio": ratio(seconds, *MODELS),
        "error": {name: float(np.mean(values)) for name, values in errors.items()},
        "megabytes": size / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", default=[300, 1000, 6000, 50_000])
    options = parser.parse_args()
    for model in MODELS.values():  # compiled and imported before the first measurement
        model().fit(*(part[:60] for part in table("noisy", 60, 0)))
    found = []
    for kind in NOISE:
        for rows in options.rows:
            found.append(measure(kind, rows, options.rounds))
            last = found[-1]
            print(
                f"{kind:8s} {rows:6d} rows: {last['seconds']['sepsa']['median']:6.2f} s, "
                f"{last['ratio']['median']:5.1f} times HistGradientBoosting's, error {last['error']['sepsa']:.3f} "
                f"against {last['error']['HistGradientBoosting']:.3f}, {last['megabytes']:.1f} MB",
                flush=True,
            )
    write(__file__, {"rounds": options.rounds, "found": found})


if __name__ == "__main__":
    main()
