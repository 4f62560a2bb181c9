"""Online forecasts without a leak: ETTh1 and ETTh2 beside printed tables, and seven sets beside other forecasters.

    python benchmarks/forecast/forecast.py --data ../shared/data/ett [--only cells|times|coverage|parts|peers]
    python benchmarks/forecast/forecast.py --data ../shared/data/ett --choose   # settings, on the first 0.7 N alone

Protocol of the cells (ADAPT-Z, ICLR 2026): rows to 0.6 N train, to 0.7 N validation, the rest test; series are
standardized by the training rows; a window starts at every row t >= 0.7 N + 96 of the test part; the error is the mean
square over windows, steps and series. A forecast made after row t - 1 uses rows before t alone, and a step is learned
when its value comes. One setting for both sets, chosen by `--choose`, which sees the first 0.7 N rows and no others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import machine, spread, write
from sepsa import SepSAForecaster, SepSARegressor

PRINTED = {  # the better of TimeFilter and TimeKAN with ADAPT-Z; at 96 and 192 iTransformer with ADAPT-Z
    "ETTh1": {1: 0.1107, 24: 0.2942, 48: 0.3431, 96: 0.3930, 192: 0.4702},
    "ETTh2": {1: 0.0628, 24: 0.1607, 48: 0.2103, 96: 0.2741, 192: 0.3751},
}
LAGS, SEASONS = 96, (24.0,)


def read(folder: Path, name: str) -> Any:
    """The seven series (17420, 7), standardized by the training rows."""
    Z = np.genfromtxt(folder / f"{name}.csv", delimiter=",", skip_header=1, usecols=range(1, 8))
    train = Z[: int(0.6 * len(Z))]
    return (Z - train.mean(0)) / train.std(0)


def squared_errors(Z: Any, made: Any) -> Any:
    """(n, H, m): row s has the errors of the forecasts made after row s; NaN where there is no value."""
    out = np.full(made.shape, np.nan)
    for h in range(made.shape[1]):
        out[: len(Z) - h - 1, h] = (Z[h + 1 :] - made[: len(Z) - h - 1, h]) ** 2
    return out


def mean_error(errors: Any, horizon: int, first: int, end: int) -> float:
    """The mean over windows that start at rows `first` to `end` - horizon."""
    return float(errors[first - 1 : end - horizon, :horizon].mean())


def run(Z: Any, horizon: int, **options: Any) -> tuple[Any, float]:
    """Forecasts (n, H, m) and microseconds a row."""
    model = SepSAForecaster(horizon, **({"lags": LAGS, "seasons": SEASONS} | options))
    model.prequential(Z[:300])
    start = time.perf_counter()
    rest = model.prequential(Z[300:])
    seconds = time.perf_counter() - start
    first = SepSAForecaster(horizon, **({"lags": LAGS, "seasons": SEASONS} | options)).prequential(Z[:300])
    return np.concatenate([first, rest]), 1e6 * seconds / (len(Z) - 300)


def cells(folder: Path) -> dict[str, Any]:
    """The error of each cell beside the printed one."""
    out: dict[str, Any] = {}
    for name, printed in PRINTED.items():
        Z = read(folder, name)
        N = len(Z)
        made, _ = run(Z, max(printed))
        errors = squared_errors(Z, made)
        ours = {H: mean_error(errors, H, int(0.7 * N) + 96, N) for H in printed}
        out[name] = {"error": ours, "printed": printed}
        for H, error in ours.items():
            print(f"{name} H {H:3}  {error:.4f}  printed {printed[H]:.4f}", flush=True)
    return out


def times(folder: Path) -> dict[str, Any]:
    """Microseconds to forecast and learn a row of seven series, or of one, over rows 300 to 2,000: three rounds."""
    Z = read(folder, "ETTh1")[:2000]
    out: dict[str, Any] = {"processor": machine()["processor"]}  # the other parts may be from another machine
    for series, horizon in ((1, 1), (1, 24), (7, 1), (7, 24), (7, 192)):
        rounds = [run(Z[:, -series:], horizon)[1] for _ in range(3)]
        out[f"{series} series, H {horizon}"] = spread(rounds)
        print(f"{series} series, H {horizon:3}  {np.median(rounds):.0f} microseconds a row", flush=True)
    return out


def coverage(folder: Path) -> dict[str, Any]:
    """The share of test values inside the 90 % intervals, at each step of 24, over all series."""
    out = {}
    for name in PRINTED:
        Z = read(folder, name)
        _, low, high = SepSAForecaster(24, lags=LAGS, seasons=SEASONS).prequential(Z, coverage=0.9)
        first = int(0.7 * len(Z)) + 95
        shares = []
        for h in range(24):
            target, rows = Z[first + h + 1 :], slice(first, len(Z) - h - 1)
            shares.append(float(((low[rows, h] <= target) & (target <= high[rows, h])).mean()))
        out[name] = shares
        print(f"{name} coverage of 90 % intervals over 24 steps: {min(shares):.3f} to {max(shares):.3f}", flush=True)
    return out


def with_network(Z: Any) -> Any:
    """Forecasts plus what a network predicts of their errors: one `SepSARegressor` for each series and step.

    The inputs are the last day, relative to the last value, the forecast and the time of the day. An error is learned
    after it is known, in blocks as long as the step.
    """
    made = run(Z, 24)[0]
    out, hour = made.copy(), 2 * np.pi * np.arange(len(Z)) / 24
    for j, h in itertools.product(range(Z.shape[1]), range(1, 25)):
        day = np.lib.stride_tricks.sliding_window_view(Z[:, j], 24)  # day[i] ends with row i + 23
        last = day[:, -1]
        step = made[23:, h - 1, j] - last
        X = np.column_stack([day - last[:, None], step, last, np.sin(hour[23:]), np.cos(hour[23:])])
        known = Z[23 + h :, j] - made[23 : len(Z) - h, h - 1, j]
        model = SepSARegressor(random_state=0)
        for start in range(2 * h, len(X), h):  # the errors of rows up to start - h are known at start
            rows, at = slice(start - 2 * h + 1, start - h + 1), slice(start, min(start + h, len(X)))
            model.partial_fit(X[rows], known[rows])
            out[23 + at.start : 23 + at.stop, h - 1, j] += model.predict(X[at])
    return out


def parts(folder: Path) -> dict[str, Any]:
    """What each part brings: the errors at H 1 and 24 without it, on the test rows."""
    variants: dict[str, Callable[[Any], Any]] = {
        "all parts": lambda Z: run(Z, 24)[0],
        "one forgetting, 0.9995": lambda Z: run(Z, 24, forgetting=(0.9995,))[0],
        "no forgetting": lambda Z: run(Z, 24, forgetting=(1.0,))[0],
        "no seasons": lambda Z: run(Z, 24, seasons=())[0],
        "no other series": lambda Z: np.concatenate([run(Z[:, j : j + 1], 24)[0] for j in range(Z.shape[1])], 2),
        "and a network on the errors": with_network,
    }
    out: dict[str, Any] = {}
    for name in PRINTED:
        Z = read(folder, name)
        N = len(Z)
        out[name] = {}
        for variant, forecasts in variants.items():
            errors = squared_errors(Z, forecasts(Z))
            out[name][variant] = {H: mean_error(errors, H, int(0.7 * N) + 96, N) for H in (1, 24)}
            print(
                f"{name} {variant:38} " + "  ".join(f"H {H} {e:.4f}" for H, e in out[name][variant].items()), flush=True
            )
    return out


def sets(folder: Path) -> dict[str, tuple[Any, int, int]]:
    """Seven series, each with its season and horizon: the oil temperatures, two of River's, and three generated."""
    from river import datasets

    rng = np.random.default_rng(0)
    t = np.arange(6000)
    day = 2 * np.pi * t / 24
    noise = np.zeros(len(t))
    for i in range(1, len(t)):
        noise[i] = 0.7 * noise[i - 1] + rng.normal()
    shape = np.sin(day) + 0.5 * np.sin(2 * day)
    phase = 0.0004 * 2 * np.pi * t
    drifting = np.zeros(len(t))
    for i in range(2, len(t)):
        a = 1.6 * np.cos(2 * np.pi * (0.05 + 0.03 * i / len(t)))
        drifting[i] = a * drifting[i - 1] - 0.64 * drifting[i - 2] + rng.normal()
    return {
        "ETTh1, oil": (read(folder, "ETTh1")[:, 6], 24, 24),
        "ETTh2, oil": (read(folder, "ETTh2")[:, 6], 24, 24),
        "water flow": (np.array([y for _, y in datasets.WaterFlow()]), 24, 24),
        "airline passengers": (np.array([y for _, y in datasets.AirlinePassengers()]), 12, 12),
        "season and levels that jump": (5 * shape + 4 * np.cumsum(rng.random(len(t)) < 0.002) + noise, 24, 24),
        "season whose phase moves": (5 * np.sin(day + phase) * (1 + 0.3 * np.sin(day / 7)) + noise, 24, 24),
        "autoregression that drifts": (drifting, 24, 24),
    }


def ours(y: Any, season: int, horizon: int) -> Any:
    model = SepSAForecaster(horizon, seasons=(season,))
    return lambda i: model.forecast(), lambda i: model.learn_one(y[i])


def river_model(make: Callable[[int], Any]) -> Callable[[Any, int, int], Any]:
    def contestant(y: Any, season: int, horizon: int) -> Any:
        model = make(season)
        return lambda i: model.forecast(horizon), lambda i: model.learn_one(float(y[i]))

    return contestant


def seasonal_naive(y: Any, season: int, horizon: int) -> Any:
    return lambda i: [y[i - season + 1 + h % season] for h in range(horizon)], lambda i: None


def boosted(y: Any, season: int, horizon: int) -> Any:
    """LightGBM on 2 seasons of lags, refitted on all rows a dozen times, and applied recursively."""
    from lightgbm import LGBMRegressor

    lags, refit, model = 2 * season, max(24, len(y) // 12), LGBMRegressor(random_state=0, n_jobs=1, verbose=-1)

    def learn(i: int) -> None:
        if i >= 2 * lags and i % refit == 0:
            rows = np.lib.stride_tricks.sliding_window_view(y[: i + 1], lags + 1)
            model.fit(rows[:, :-1], rows[:, -1])

    def forecast(i: int) -> list[float]:
        known = list(y[i - lags + 1 : i + 1])
        for _ in range(horizon):
            known.append(float(model.predict(np.array([known[-lags:]]))[0]))
        return known[-horizon:]

    return forecast, learn


def peers(folder: Path) -> dict[str, Any]:
    """The mean absolute error over all steps, of forecasts made every few rows in the last 0.4 of each series."""
    from river import time_series as ts

    contestants: dict[str, Callable[[Any, int, int], Any]] = {
        "SepSAForecaster": ours,
        "River SNARIMAX(season, 0, 0)": river_model(lambda season: ts.SNARIMAX(season, 0, 0)),
        "River SNARIMAX(season, 1, season), seasonal": river_model(
            lambda season: ts.SNARIMAX(season, 1, season, m=season, sp=3, sq=6)
        ),
        "River HoltWinters": river_model(lambda season: ts.HoltWinters(0.3, 0.1, 0.6, seasonality=season)),
        "seasonal naive": seasonal_naive,
        "LightGBM, refitted": boosted,
    }
    out: dict[str, Any] = {}
    for name, (y, season, horizon) in sets(folder).items():
        first, every = int(0.6 * len(y)), max(1, len(y) // 400)
        out[name] = {}
        for contestant, make in contestants.items():
            forecast, learn = make(y, season, horizon)
            errors = []
            for i in range(len(y) - horizon):
                learn(i)
                if i >= first and i % every == 0:
                    errors.append(np.abs(np.array(forecast(i)) - y[i + 1 : i + 1 + horizon]).mean())
            out[name][contestant] = float(min(np.mean(errors), 1e6))
            print(f"{name:28} {contestant:44} {out[name][contestant]:.4f}", flush=True)
    return out


def choose(folder: Path) -> None:
    """Errors on rows 0.6 N to 0.7 N of settings that see no later row."""
    for forgetting in ((0.9995, 1.0), (0.9995, 0.9998, 1.0), (0.999, 0.9998, 1.0), (0.999, 0.9997)):
        for ridge in (10.0, 30.0, 100.0):
            told = []
            for name in PRINTED:
                Z = read(folder, name)
                N = int(0.7 * len(Z))
                errors = squared_errors(Z[:N], run(Z[:N], 48, forgetting=forgetting, ridge=ridge)[0])
                told += [f"{mean_error(errors, H, int(0.6 * len(Z)), N):.4f}" for H in (1, 24, 48)]
            print(forgetting, ridge, *told, flush=True)


PARTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "cells": cells,
    "times": times,
    "coverage": coverage,
    "parts": parts,
    "peers": peers,
}


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder of ETTh1.csv and ETTh2.csv")
    parser.add_argument("--choose", action="store_true", help="settings, on the first 0.7 N rows")
    parser.add_argument("--only", choices=list(PARTS), help="one part of the measurements")
    given = parser.parse_args()
    if given.choose:
        choose(given.data)
        return
    path = Path(__file__).with_suffix(".json")
    for name, measure in PARTS.items():
        if given.only in (None, name):
            measured = measure(given.data)
            write(__file__, (json.loads(path.read_text()) if path.exists() else {}) | {name: measured})


if __name__ == "__main__":
    main()
