"""Intervals of 90 % around twelve published base forecasts: `OnlineIntervals` beside integral control.

    git clone https://github.com/aangelopoulos/conformal-time-series
    python benchmarks/streams/online_intervals.py --data conformal-time-series/tests/datasets

The forecasts are those of the comparison in "Conformal PID control for time series prediction" (Angelopoulos, Candès,
Tibshirani 2023): half-hourly demand of electricity and daily temperature by an autoregression, theta, Prophet and a
transformer, refitted at every row or, where it says intermittent, now and then. Integral control is theirs: quantile
tracking by each of four rates with an integrator (C 5, K 10), for either end. The first 300 and 500 rows do not count,
as there. The score is Winkler's, the width plus 20 times the distance of a value outside; smaller is better. No option
of `OnlineIntervals` was chosen on these series.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import write
from sepsa import OnlineIntervals

SERIES = {
    "elec2": ("nswdemand", 2000, 300),
    "daily-climate": ("meantemp", None, 500),
}  # column, rows, first that counts
BASES = {"": ("ar", "theta", "prophet", "transformer"), "-intermittent": ("ar", "transformer")}
RATES = (1.0, 0.5, 0.1, 0.05)


def read(data: Path, name: str) -> Any:
    """The values of a series."""
    column, rows, _ = SERIES[name]
    with (data / f"{name}.csv").open() as file:
        return np.array([float(row[column]) for row in csv.DictReader(file)])[:rows]


def controlled(scores: Any, alpha: float, rate: float, window: int) -> Any:
    """The upper end of scores before each of them, by quantile tracking and an integrator that saturates."""
    ends, tracked, missed = np.zeros(len(scores)), 0.0, 0.0
    for t in range(len(scores) - 1):
        recent = scores[max(t - window, 0) : t]
        width = np.ptp(recent) if t else 1.0
        outside = float(scores[t] > ends[t])
        angle = (missed - t * alpha) * np.log(t + 1) / (5 * (t + 1))
        tracked -= rate * width * (alpha - outside)
        ends[t + 1] = tracked + 10 * np.tan(np.clip(angle, -1.57, 1.57))
        missed += outside
    return ends


def judged(y: Any, low: Any, high: Any, first: int) -> dict[str, float]:
    y, low, high = y[first:], low[first:], high[first:]
    outside = np.maximum(low - y, 0) + np.maximum(y - high, 0)
    return {"coverage": float((outside == 0).mean()), "Winkler": float((high - low + 20 * outside).mean())}


def measured(y: Any, forecast: Any, first: int) -> dict[str, dict[str, float]]:
    """Coverage and score of both methods on one base forecast."""
    intervals, ends = OnlineIntervals(0.9), []
    for value, made in zip(y, forecast, strict=True):
        ends.append(intervals.interval(made))
        intervals.update(value, made)
    found = {"OnlineIntervals": judged(y, *np.array(ends).T, first)}
    for rate in RATES:
        low, high = (controlled(side * (y - forecast), 0.05, rate, first) for side in (-1, 1))
        found[f"integral control {rate}"] = judged(y, forecast - low, forecast + high, first)
    return found


def main() -> None:
    """Measure all base forecasts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="tests/datasets of the repository")
    given = parser.parse_args()
    results = {}
    for name, (_, _, first) in SERIES.items():
        y = read(given.data, name)
        for kind, bases in BASES.items():
            for base in bases:
                forecast = np.load(given.data / "proc" / (name + kind) / f"{base}.npz")["forecasts"]
                found = results[f"{name}{kind}, {base}"] = measured(y, forecast, first)
                told = "  ".join(f"{key} {v['coverage']:.3f} {v['Winkler']:.4g}" for key, v in found.items())
                print(f"{name + kind + ', ' + base:40} {told}", flush=True)
    write(__file__, {"bases": results})


if __name__ == "__main__":
    main()
