"""Day-ahead forecasts of prices and demand by blocks of 24 hours, beside printed results.

    python benchmarks/forecast/dayahead.py --data FOLDER [--work FOLDER] [--only DE] [--processes 16] [--seeds 3]
        [--models fit]
    python benchmarks/forecast/dayahead.py --table  # from the JSON

On a machine of 16 cores, `--processes 16` takes some minutes.

FOLDER has DE.npz (epftoolbox's German prices with forecasts of load and of solar and wind power), victoria.npz (demand
with temperature and holidays) and, if it is there, NP.npz (Nordic prices), each with `start`, `y`, `X` and `test`, the
first row of the days that are forecast. At midnight the 24 hours of a day are forecast at once, with the inputs of that
day known; then the day is learned. All rows before `test` are learned first.

`fit` is `SepSAForecaster(24, every=24, known_ahead=True, seed=s)` that fits the first rows and then learns a day at a
time, for each seed; `last day alone` has `lags=24`, and `in order` learns the first rows once, by `update`. The mean is
that of the forecasts of all of these. `each hour` is `SepSAForecaster(24)`, which could forecast at every hour. Which
rows a block has, and how `each hour` uses inputs, was chosen on the Nordic prices; which models the mean has was chosen
on no series. Errors are mean absolute errors, with the standard error of the days' means. Each run goes to
the folder `--work`, so that a run that was stopped goes on with those that are missing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import mean_and_spread, write

DAY = 24
PRINTED = {
    "DE": {"DNN ensemble": 3.413, "LEAR ensemble": 3.609, "best single model": 3.592, "the day before": 8.188},
    "victoria": {"T0-alpha, zero-shot": 127.1, "TabPFN-TS, zero-shot": 159.3, "the day before": 308.4},
    "NP": {"DNN ensemble": 1.683, "LEAR ensemble": 1.738, "best single model": 1.712, "the day before": 2.886},
}
TITLES = {"DE": "German prices", "victoria": "Victoria's demand", "NP": "Nordic prices"}
WORDS = {"fit": "`fit`, then `update`", "last day alone": "the same, `lags=24`", "in order": "`update` alone"}
WORDS |= {"each hour": "`SepSAForecaster(24)`, `update` alone"}
BLOCKS = {"every": DAY, "known_ahead": True}
MODELS: dict[str, dict[str, Any]] = {"fit": BLOCKS, "last day alone": BLOCKS | {"lags": 24}, "in order": BLOCKS}
MODELS |= {"each hour": {"known_ahead": True}}


def forecasts(path: Path, kind: str, seed: int) -> dict[str, Any]:
    """The forecasts (days, hours) of one model, its intervals of 90 %, and its processor seconds."""
    from sepsa import SepSAForecaster

    data = np.load(path)
    y, X, test = data["y"].astype(float), data["X"].astype(float), int(data["test"])
    times = np.datetime64(str(data["start"])) + np.arange(len(y)) * np.timedelta64(1, "h")
    model = SepSAForecaster(DAY, seed=seed, **MODELS[kind])
    warm = slice(test - 40 * DAY, test)
    SepSAForecaster(DAY, **MODELS[kind]).fit(y[warm], X[warm], times=times[warm])  # compiles
    begun = time.process_time()
    learn = model.fit if kind in ("fit", "last day alone") else model.update
    learn(y[:test], X[:test], times=times[:test])
    fitted = time.process_time()
    made = []
    for at in range(test, len(y) - DAY + 1, DAY):
        day = slice(at, at + DAY)
        made.append(model.predict(X=X[day], coverage=0.9))
        model.update(y[day], X[day], times=times[day])
    spent = time.process_time() - fitted
    out, low, high = np.array(made).swapaxes(0, 1)
    return {"made": out, "low": low, "high": high, "fit": fitted - begun, "day": spent / len(made)}


def job(path: Path, work: Path, kind: str, seed: int) -> Path:
    """Run one model, unless its forecasts are there already; returns their file."""
    out = work / f"{path.stem}-{kind.replace(' ', '_')}-{seed}.npz"
    if not out.exists():
        part = out.with_suffix(".part.npz")
        np.savez(part, **forecasts(path, kind, seed))
        part.rename(out)
    return out


def error(made: Any, y: Any) -> dict[str, float]:
    """The mean absolute error, and the standard error of the days' means."""
    days = np.abs(made - y).mean(1)
    return {"mae": float(days.mean()), "standard_error": float(days.std(ddof=1) / len(days) ** 0.5)}


def summary(path: Path, files: dict[tuple[str, int], Path]) -> dict[str, Any]:
    """Errors of each model and of their mean, coverage and seconds."""
    data = np.load(path)
    y = data["y"][int(data["test"]) :].astype(float)
    y = y[: len(y) // DAY * DAY].reshape(-1, DAY)
    runs = {name: np.load(file) for name, file in files.items()}
    rows = [
        {"model": kind, "seed": seed}
        | error(run["made"], y)
        | {"coverage": float(((run["low"] <= y) & (y <= run["high"])).mean())}
        | {"fit_seconds": float(run["fit"]), "milliseconds_a_day": 1e3 * float(run["day"])}
        for (kind, seed), run in runs.items()
    ]
    mean = error(np.mean([run["made"] for (kind, _), run in runs.items() if "every" in MODELS[kind]], 0), y)
    return {"days": len(y), "models": rows, "mean": mean, "printed": PRINTED.get(path.stem, {})}


def print_table() -> None:
    """Print the errors of the JSON beside the printed ones, as docs/tutorials/day-ahead.md shows them."""
    found = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    print("## Beside printed results\n\n| series | forecast | mean absolute error |\n|---|---|---|")
    for name, title in TITLES.items():
        part = found.get(name, {"models": [], "printed": {}})
        for kind in dict.fromkeys(row["model"] for row in part["models"]):
            errors = [row["mae"] for row in part["models"] if row["model"] == kind]
            seeds = f", {len(errors)} seeds" if len(errors) > 1 else ""
            print(f"| {title} | {WORDS[kind]}{seeds} | {mean_and_spread(errors, '.3f')} |")
        blocks = sum("every" in MODELS[row["model"]] for row in part["models"])
        if blocks > 1:
            print(f"| {title} | mean of the {blocks} models in blocks | {part['mean']['mae']:.3f} |")
        for other, error in part["printed"].items():
            print(f"| {title} | {other} | {error:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--work", type=Path, default=Path("dayahead"))
    parser.add_argument("--only", nargs="*", default=["DE", "victoria", "NP"])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--models", nargs="*", default=[*MODELS])
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print_table()
        return
    options.work.mkdir(exist_ok=True)
    os.environ.setdefault("LOKY_MAX_CPU_COUNT", "1")  # processor seconds of one core
    paths = [path for name in options.only if (path := options.data / f"{name}.npz").exists()]
    jobs = [
        (path, kind, seed)
        for path in paths
        for kind in options.models
        for seed in range(options.seeds if "every" in MODELS[kind] else 1)
    ]
    with ProcessPoolExecutor(options.processes) as pool:
        started = {one: pool.submit(job, one[0], options.work, *one[1:]) for one in jobs}
        done = {one: future.result() for one, future in started.items()}
    found = {path.stem: summary(path, {one[1:]: done[one] for one in jobs if one[0] == path}) for path in paths}
    for name, part in found.items():
        for row in part["models"]:
            print(f"{name:9} {row['model']:15} seed {row['seed']}: {row['mae']:.3f} ± {row['standard_error']:.3f}")
        print(f"{name:9} mean of blocks: {part['mean']['mae']:.3f} ± {part['mean']['standard_error']:.3f}")
    importlib.import_module("sepsa.forecast.blocks")  # so that the JSON records its sources
    write(__file__, found)


if __name__ == "__main__":
    main()
