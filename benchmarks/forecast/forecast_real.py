"""Real series on real clocks: errors beside the best naive forecast, coverage, and a refitted LightGBM.

    pip install statsmodels vega_datasets pmdarima aeon lightgbm
    python benchmarks/forecast/forecast_real.py [--half choose|report] [--only NAME] [--without-peer]

Series of the half `choose` may decide how the forecaster works; those of `report` are only reported. The first half of
the rows of a series is warm-up, forecasts after the others count. The last value, the last day, the last week, and so
on, are the naive forecasts; an error is the mean absolute error of one step ahead over that of the best of them.
Intervals of 90 % are counted on the same rows.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.measure import write
from sepsa import SepSAForecaster


class Real(NamedTuple):
    """A series: its values and times, the rows of its seasons, and the steps ahead that are counted."""

    y: Any
    times: Any
    seasons: tuple[int, ...]
    steps: tuple[int, ...]


def dates(start: str, count: int, frequency: str) -> Any:
    import pandas as pd

    return pd.date_range(start, periods=count, freq=frequency)


def vega(name: str, column: str, seasons: tuple[int, ...], steps: tuple[int, ...]) -> Real:
    import pandas as pd
    from vega_datasets import local_data

    frame = getattr(local_data, name)()
    times = pd.DatetimeIndex(frame["date"])
    order = np.argsort(times, kind="stable")
    keep = order[~times[order].duplicated()]
    return Real(frame[column].to_numpy(float)[keep], times[keep], seasons, steps)


def microsoft(column: str) -> Real:
    import pandas as pd
    from pmdarima.datasets import load_msft

    frame = load_msft().iloc[-3000:]
    values = frame[column].to_numpy(float)
    values = np.log(np.where(values > 0, values, np.nan))  # a day without trade is missing
    return Real(values, pd.DatetimeIndex(pd.to_datetime(frame["Date"])), (5,), (1, 7, 14))


def half_hourly_solar() -> Real:
    import aeon
    import pandas as pd

    frame = pd.read_csv(Path(aeon.__file__).parent / "datasets/data/solar/solar.csv")
    return Real(frame["solar_gen"].to_numpy(float), pd.DatetimeIndex(frame["datetime_gmt"]), (48, 336), (1, 24, 48))


def taylor() -> Real:
    from pmdarima.datasets import load_taylor

    y = load_taylor()
    return Real(y, dates("2000-06-05", len(y), "30min"), (48, 336), (1, 24, 48))


def el_nino() -> Real:
    from statsmodels.datasets import elnino

    y = elnino.load_pandas().data.to_numpy(float)[:, 1:].ravel()
    return Real(y, dates("1950-01-01", len(y), "MS"), (12,), (1, 7, 12))


def beer() -> Real:
    from pmdarima.datasets import load_ausbeer

    y = np.asarray(load_ausbeer(), float)
    y = y[~np.isnan(y)]
    return Real(y, dates("1956-01-01", len(y), "QS"), (4,), (1, 7, 8))


def yearly_sunspots() -> Real:
    from statsmodels.datasets import sunspots

    y = sunspots.load_pandas().data["SUNACTIVITY"].to_numpy(float)
    return Real(y, np.array([f"{year}-01-01" for year in range(1700, 1700 + len(y))], "datetime64[s]"), (), (1, 7, 10))


def monthly_sunspots() -> Real:
    from pmdarima.datasets import load_sunspots

    y = np.asarray(load_sunspots(), float)
    times = np.arange("1749-01", "2200-01", dtype="datetime64[M]")[: len(y)].astype("datetime64[s]")
    return Real(y, times, (12,), (1, 7, 12))


def carbon_dioxide() -> Real:
    from statsmodels.datasets import co2

    frame = co2.load_pandas().data
    return Real(frame["co2"].to_numpy(float), frame.index, (52,), (1, 7, 26))


def water_flow() -> Real:
    """Hours without a value are NaN, so that the naive forecasts know the clock too."""
    import pandas as pd
    from river import datasets

    rows = list(datasets.WaterFlow())
    series = pd.Series([y for _, y in rows], pd.to_datetime([x["Time"] for x, _ in rows], utc=True)).asfreq("h")
    return Real(series.to_numpy(float), series.index, (24, 168), HOURLY)


def approval() -> Real:
    import pandas as pd
    from river import datasets

    rows = list(datasets.TrumpApproval())
    days = pd.to_datetime([date.fromordinal(x["ordinal_date"]) for x, _ in rows])
    return Real(np.array([y for _, y in rows], float), days, (7,), DAILY)


def random_walk(seed: int) -> Real:
    return Real(
        np.random.default_rng(seed).normal(size=3000).cumsum(), dates("2020-01-01", 3000, "h"), (24, 168), (1, 24, 48)
    )


HOURLY, DAILY = (1, 24, 48), (1, 7, 14)
HALVES: dict[str, dict[str, Callable[[], Real]]] = {
    "choose": {
        "Seattle temperature, hourly": lambda: vega("seattle_temps", "temp", (24, 168), HOURLY),
        "British solar power, half-hourly": half_hourly_solar,
        "Seattle highest temperature, daily": lambda: vega("seattle_weather", "temp_max", (7,), DAILY),
        "Seattle lowest temperature, daily": lambda: vega("seattle_weather", "temp_min", (7,), DAILY),
        "Microsoft closing price, business days": lambda: microsoft("Close"),
        "El Niño, monthly": el_nino,
        "Australian beer, quarterly": beer,
        "sunspots, yearly": yearly_sunspots,
    },
    "report": {
        "San Francisco temperature, hourly": lambda: vega("sf_temps", "temp", (24, 168), HOURLY),
        "water flow, hourly": water_flow,
        "English electricity, half-hourly": taylor,
        "Seattle wind, daily": lambda: vega("seattle_weather", "wind", (7,), DAILY),
        "approval of a president, daily": approval,
        "Microsoft volume, business days": lambda: microsoft("Volume"),
        "carbon dioxide, weekly": carbon_dioxide,
        "sunspots, monthly": monthly_sunspots,
        **{f"random walk {seed}": lambda seed=seed: random_walk(seed) for seed in range(5)},
    },
}


def naive(y: Any, period: int, h: int) -> Any:
    """After each row the last known value of a season at the row h ahead; a period of 0 is the last value."""
    lag = period * -(-h // period) - h if period else 0
    filled = y.copy()
    for i in np.flatnonzero(np.isnan(y)):
        filled[i] = filled[i - 1] if i else 0.0
    return np.concatenate([np.full(lag, np.nan), filled[: len(y) - lag]])


def absolute_error(y: Any, made: Any, h: int, first: int) -> float:
    """The mean absolute error of the forecasts h ahead that were made from row `first` on."""
    return float(np.nanmean(np.abs(made[first : len(y) - h] - y[first + h :])))


def boosted(real: Real, h: int, first: int) -> Any:
    """LightGBM for step h on lags, seasons ago and the calendar, refitted six times on all rows known."""
    import pandas as pd
    from lightgbm import LGBMRegressor

    y, when = real.y, pd.DatetimeIndex(real.times)
    target = np.append(y[h:], np.full(h, np.nan)) - y
    lags = [*range(1, 25), *(p - h % p + i for p in real.seasons for i in (0, p))]
    columns = [y, *(y - np.append(np.full(k, np.nan), y[:-k]) for k in lags if 0 < k < len(y) // 3)]
    ahead = when + (when[-1] - when[-2]) * h
    X = np.column_stack([*columns, ahead.hour, ahead.dayofweek, ahead.month, ahead.minute])
    made, every = np.full(len(y), np.nan), max(24, (len(y) - first) // 6)
    for start in range(first, len(y), every):
        rows = np.flatnonzero(~np.isnan(target[: start - h + 1]))
        model = LGBMRegressor(random_state=0, n_jobs=1, verbose=-1, n_estimators=100).fit(X[rows], target[rows])
        made[start : start + every] = y[start : start + every] + model.predict(X[start : start + every])
    return made


def measured(real: Real, peer: bool) -> dict[str, Any]:
    """The errors and coverages of one series at each of its steps."""
    first = len(real.y) // 2
    made, low, high = SepSAForecaster(max(real.steps)).prequential(real.y, times=real.times, coverage=0.9)
    out: dict[str, Any] = {"rows": len(real.y)}
    inside = []
    for h in range(1, max(real.steps) + 1):
        target, rows = real.y[first + h :], slice(first, len(real.y) - h)
        there = ~np.isnan(target)
        inside.append(float(((low[rows, h - 1] <= target) & (target <= high[rows, h - 1]))[there].mean()))
        if h in real.steps:
            ours = absolute_error(real.y, made[:, h - 1], h, first)
            plain = {p: absolute_error(real.y, naive(real.y, p, h), h, first) for p in (0, *real.seasons)}
            out[f"step {h}"] = {"error": ours, "naive": plain, "ratio": ours / min(plain.values())}
    if peer:
        h = max(real.steps)
        last = out[f"step {h}"]
        last["LightGBM"] = absolute_error(real.y, boosted(real, h, first), h, first)
        last["over LightGBM"] = last["error"] / last["LightGBM"]
    return out | {"coverage": inside, "least coverage": min(inside), "largest coverage": max(inside)}


def main() -> None:
    """Measure the series that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--half", choices=list(HALVES), help="one half of the series")
    parser.add_argument("--only", default="", help="series whose names begin with this")
    parser.add_argument("--without-peer", action="store_true", help="leave LightGBM out, and write nothing")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    path = Path(__file__).with_suffix(".json")
    for half, series in HALVES.items():
        for name, make in series.items():
            if given.half not in (None, half) or not name.startswith(given.only):
                continue
            found = measured(make(), half == "report" and "random" not in name and not given.without_peer)
            steps = {key: value for key, value in found.items() if key.startswith("step")}
            told = "  ".join(f"{key} {value['ratio']:.4f}" for key, value in steps.items())
            peer = next((v["over LightGBM"] for v in steps.values() if "LightGBM" in v), float("nan"))
            covered = found["coverage"]
            print(
                f"{name:40} {told}  /LightGBM {peer:.3f}  coverage {min(covered):.3f} to {max(covered):.3f}", flush=True
            )
            if not given.without_peer:
                known = json.loads(path.read_text()) if path.exists() else {}
                write(__file__, known | {half: known.get(half, {}) | {name: found}})


if __name__ == "__main__":
    main()
