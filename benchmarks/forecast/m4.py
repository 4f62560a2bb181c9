"""Every second hourly and weekly series of the M4 competition, beside printed results.

    python benchmarks/forecast/m4.py --data FOLDER [--only weekly] [--stride 4] [--processes 16]
    python benchmarks/forecast/m4.py --table       # from the JSON

FOLDER has m4-hourly-even.npz and m4-weekly-even.npz, each with the values of the series one after another (`rows`),
their `lengths` and the rows that are forecast (`test`). `SepSAForecaster(horizon)` learns the values of a series
without times, then forecasts 48 hours or 13 weeks with intervals of 95 %. OWA is the mean of sMAPE and MASE over
those of Naive2, MSIS the scaled interval score, all as in the competition. Errors of Naive2 and of others are printed
for the whole sets; ours are those of these halves. What was chosen was chosen on series 1, 5, 9, ... of each half; the
others are also told alone. A stride takes every so many of the series, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.measure import write

COVERAGE = 0.95
CHOICE = slice(1, None, 4)  # series by which something was chosen


class Kind(NamedTuple):
    """Rows of the season of an error's scale, and what was printed: sMAPE and MASE of Naive2, OWA and MSIS."""

    season: int
    naive: tuple[float, float]
    printed: dict[str, dict[str, float]]


KINDS = {
    "hourly": Kind(
        24,
        (18.383, 2.395),
        {
            "OWA": {"Doornik": 0.410, "Smyl": 0.440, "FFORMA": 0.484, "seasonal naive": 0.627},
            "MSIS": {"Doornik": 6.14, "ARIMA": 7.54},
        },
    ),
    "weekly": Kind(1, (9.161, 2.777), {"OWA": {"best": 0.739}, "MSIS": {"best": 16.20}}),
}


def measured(season: int, y: Any, test: Any) -> tuple[list[float], tuple[float, ...]]:
    """The sMAPE, MASE, MSIS and coverage of the forecasts of a series, and the seasons that were found."""
    from sepsa import SepSAForecaster

    warnings.simplefilter("ignore")
    model = SepSAForecaster(len(test)).fit(y)
    made, low, high = model.predict(coverage=COVERAGE)
    scale, off = np.abs(y[season:] - y[:-season]).mean(), np.abs(test - made)
    outside = np.maximum(low - test, 0.0) + np.maximum(test - high, 0.0)
    score = (high - low + 2.0 / (1.0 - COVERAGE) * outside).mean() / scale
    smape, mase = 200.0 * (off / (np.abs(test) + np.abs(made))).mean(), off.mean() / scale
    return [float(v) for v in (smape, mase, score, (outside == 0.0).mean())], model.seasons_


def summary(kind: Kind, errors: Any) -> dict[str, float]:
    """The means of the errors (series, 4) of a set."""
    smape, mase, score, covered = (float(v) for v in errors.mean(0))
    owa = (smape / kind.naive[0] + mase / kind.naive[1]) / 2
    return {"series": len(errors), "sMAPE": smape, "MASE": mase, "OWA": owa, "MSIS": score, "coverage": covered}


def half(path: Path, kind: Kind, stride: slice, processes: int) -> dict[str, Any]:
    """What a set has: all of its series, and those by which nothing was chosen."""
    data = np.load(path)
    series = np.split(data["rows"].astype(float), np.cumsum(data["lengths"])[:-1])
    with ProcessPoolExecutor(processes) as pool:
        found = list(pool.map(partial(measured, kind.season), series[stride], data["test"][stride].astype(float)))
    errors, numbers = np.array([one[0] for one in found]), np.arange(len(series))
    others = ~np.isin(numbers, numbers[CHOICE])[stride]
    seasons = Counter(str(tuple(round(period) for period in one[1])) for one in found)
    apart = summary(kind, errors[others]) if others.any() else {}
    ours = summary(kind, errors) | {"by nothing chosen": apart, "seasons": dict(seasons.most_common(12))}
    return ours | {"printed": kind.printed}


def print_table() -> None:
    """Print what the JSON has beside what others printed."""
    found = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    print("| set | forecast | OWA | MSIS |\n|---|---|---|---|")
    for name, kind in KINDS.items():
        ours = found[name]
        print(f"| {name} | `SepSAForecaster` | {ours['OWA']:.3f} | {ours['MSIS']:.2f} |")
        for other in dict.fromkeys([*kind.printed["OWA"], *kind.printed["MSIS"]]):
            owa, score = kind.printed["OWA"].get(other), kind.printed["MSIS"].get(other)
            print(f"| {name} | {other}, printed | {f'{owa:.3f}' if owa else ''} | {f'{score:.2f}' if score else ''} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--only", nargs="*", default=[*KINDS])
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print_table()
        return
    found = {}
    for name in options.only:
        taken = slice(options.first, None, options.stride)
        found[name] = half(options.data / f"m4-{name}-even.npz", KINDS[name], taken, options.processes)
        print(name, json.dumps(found[name]), flush=True)
    if options.stride == 1 and options.first == 0:
        write(__file__, found)


if __name__ == "__main__":
    main()
