"""A thousand series in one long frame: seconds, memory, and the error beside seasonal naive.

    python benchmarks/forecast/panel.py [--series 1000]

Writes panel.json. The series are made: a level, a week of any shape, a random walk and noise, each of its own size, for
500 days. The first 400 rows are fitted; then five times the next 20 days are forecast, scored and learned by `update`.
Of the forecasters 200 are in memory, and the others in a temporary file. The error of a series is its mean absolute
one divided by that of seasonal naive, the value of a week before.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.measure import write
from sepsa import SepSAForecaster, SepSAPanelForecaster

ROWS, FITTED, AHEAD, WEEK, IN_MEMORY = 500, 400, 20, 7, 200


def made(series: int) -> Any:
    """Values (series, ROWS)."""
    rng = np.random.default_rng(0)
    week = np.tile(rng.normal(size=(series, WEEK)), ROWS // WEEK + 1)[:, :ROWS]
    sizes = 10 ** rng.uniform(-1, 0.5, size=(3, series, 1))
    walk = 0.1 * rng.normal(size=(series, ROWS)).cumsum(1)
    parts = np.stack([week, walk, rng.normal(size=(series, ROWS))])
    return 10 ** rng.uniform(0, 3, size=(series, 1)) * (10 + (sizes * parts).sum(0))


def megabytes() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--series", type=int, default=1000)
    count = parser.parse_args().series
    values, days = made(count), pd.date_range("2025-01-01", periods=ROWS)
    names = np.array([f"series {i:04}" for i in range(count)])

    def rows(start: int, stop: int) -> pd.DataFrame:
        ds = np.tile(days[start:stop], count)
        y = values[:, start:stop].ravel()
        return pd.DataFrame({"unique_id": np.repeat(names, stop - start), "ds": ds, "y": y})

    start = SepSAForecaster(AHEAD, step="day")
    with SepSAPanelForecaster(start) as warm:
        warm.fit(rows(0, 60)[:60])  # compiles
    took: dict[str, list[float]] = {"fit": [], "predict": [], "update": []}
    memory = [megabytes()]

    def timed(name: str, call: Any, *arguments: Any, **options: Any) -> Any:
        begin = time.process_time()
        result = call(*arguments, **options)
        took[name].append(time.process_time() - begin)
        memory.append(megabytes())
        return result

    errors, naive, inside = [], [], []
    with SepSAPanelForecaster(start, in_memory=IN_MEMORY) as panel:
        timed("fit", panel.fit, rows(0, FITTED))
        for at in range(FITTED, ROWS, AHEAD):
            told = timed("predict", panel.predict, level=[90])
            truth = values[:, at : at + AHEAD]
            made_, low, high = (told[name].to_numpy().reshape(truth.shape) for name in told.columns[2:])
            last_week = values[:, at - WEEK : at]
            errors.append(np.abs(made_ - truth).mean(1))
            naive.append(np.abs(np.tile(last_week, 3)[:, :AHEAD] - truth).mean(1))
            inside.append(((low <= truth) & (truth <= high)).mean())
            timed("update", panel.update, rows(at, at + AHEAD))
    ratios = np.mean(errors, 0) / np.mean(naive, 0)
    result = {
        "series": count,
        "rows of each": ROWS,
        "fitted rows": FITTED,
        "processor seconds": {name: float(np.mean(seconds)) for name, seconds in took.items()},
        "memory_MB": {"before": memory[0], "growth": max(memory) - memory[0]},
        "error beside seasonal naive": {
            "mean": float(ratios.mean()),
            "median": float(np.median(ratios)),
            "better share": float((ratios < 1).mean()),
        },
        "coverage of 90": float(np.mean(inside)),
    }
    print(result)
    write(__file__, result)


if __name__ == "__main__":
    main()
