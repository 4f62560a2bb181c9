"""Whether 90 % intervals hold 90 % of unseen targets, with default settings.

    SEPSA_DATA=... python benchmarks/intervals.py

Writes intervals.json: over 20 random splits of Energy and Diabetes, three quarters to learn and one to test, the share
of test targets within mean ± 1.645 std after `fit` and after one `partial_fit`, how wide the intervals are, and the
error of the predictions beside scikit-learn's Ridge and MLPRegressor on standardized data.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np
from measure import write
from sklearn.compose import TransformedTargetRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from reproduction.data import load
from sepsa import SepSARegressor

SPLITS = 20
WANTED = (0.87, 0.93)


def table(name: str) -> tuple[Any, Any]:
    """All rows of a data set."""
    data = load(name)
    inputs = (data.train_inputs, data.validation_inputs, data.test_inputs)
    targets = (data.train_targets, data.validation_targets, data.test_targets)
    return np.concatenate(inputs).astype(float), np.concatenate(targets).astype(float)


def peers(seed: int) -> dict[str, Any]:
    """What others would use on standardized inputs; the MLP also where it does best, given time and raw targets."""
    mlp = make_pipeline(StandardScaler(), MLPRegressor(random_state=seed))
    return {
        "RidgeCV": make_pipeline(StandardScaler(), RidgeCV(np.logspace(-3, 3, 13))),
        "MLPRegressor, standardized targets": TransformedTargetRegressor(mlp, transformer=StandardScaler()),
        "MLPRegressor, 2000 iterations": make_pipeline(
            StandardScaler(), MLPRegressor(random_state=seed, max_iter=2000)
        ),
    }


def error(predictions: Any, Y: Any) -> list[float]:
    return [float(e) for e in np.sqrt(np.mean((predictions.reshape(Y.shape) - Y) ** 2, axis=0))]


def intervals(model: SepSARegressor, X: Any, Y: Any) -> dict[str, list[float]]:
    mean, std = model.predict(X, return_std=True)
    return {
        "coverage": [float(c) for c in np.mean(np.abs(mean - Y) <= 1.645 * std, axis=0)],
        "half_width": [float(w) for w in 1.645 * std.mean(0)],
        "rmse": error(mean, Y),
    }


def split(X: Any, Y: Any, seed: int) -> dict[str, Any]:
    """One split: ours after `fit` and after `partial_fit`, then the peers."""
    X, X_test, Y, Y_test = train_test_split(X, Y, random_state=seed)
    y = Y.squeeze()  # one target alone is no column to the peers
    start = time.perf_counter()
    fitted = SepSARegressor(random_state=seed).fit(X, Y)
    found: dict[str, Any] = {"seconds": time.perf_counter() - start, "passes": fitted.n_iter_}
    found["fit"] = intervals(fitted, X_test, Y_test)
    found["partial_fit"] = intervals(SepSARegressor(random_state=seed).partial_fit(X, Y), X_test, Y_test)
    for name, peer in peers(seed).items():
        found[name] = {"rmse": error(peer.fit(X, y).predict(X_test), Y_test)}
    return found


def main() -> None:
    warnings.simplefilter("ignore", ConvergenceWarning)  # 200 iterations are the MLP's default
    result: dict[str, Any] = {"splits": SPLITS, "wanted": WANTED}
    for name in ("energy", "diabetes"):
        X, Y = table(name)
        runs = [split(X, Y, seed) for seed in range(SPLITS)]
        result[name] = {"runs": runs}
        for way in ("fit", "partial_fit"):
            cover = np.mean([run[way]["coverage"] for run in runs], axis=0)
            result[name][f"coverage after {way}"] = {"mean": float(cover.mean()), "each target": cover.tolist()}
            print(f"{name}: coverage after {way} {cover.mean():.3f}, each target {cover.round(3)}, wanted {WANTED}")
        result[name]["rmse"] = {
            way: np.mean([run[way]["rmse"] for run in runs], axis=0).tolist()
            for way in ("fit", "partial_fit", *peers(0))
        }
        for way, errors in result[name]["rmse"].items():
            print(f"{name}: rmse {', '.join(f'{e:.3f}' for e in errors)} {way}")
        passes, seconds = (np.median([run[key] for run in runs]) for key in ("passes", "seconds"))
        print(f"{name}: fit took {passes:.0f} passes, {seconds:.2f} s")
    write(__file__, result)


if __name__ == "__main__":
    main()
