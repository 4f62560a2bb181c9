"""Monthly and quarterly series with trends, beside SARIMA and exponential smoothing that are refitted.

    pip install statsmodels vega_datasets pmdarima
    python benchmarks/forecast/trends.py [--half choose|report] [--only NAME] [--without-peers]

Series of the half `choose` may decide how the forecaster works; those of `report` are only reported. Forecasts of a
year of months, or two years of quarters, are made at every half year, or year, of the last 40 % of the rows; an error
is the mean absolute error over these origins and all steps. SARIMA is (1, 1, 1)(0, 1, 1), exponential smoothing has an
additive damped trend and additive seasons; both are refitted at every origin by the packages' own defaults.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.measure import write
from sepsa import SepSAForecaster


class Trend(NamedTuple):
    """A series, its first time, and the rows of a year."""

    y: Any
    start: str
    year: int


def airline() -> Trend:
    from pmdarima.datasets import load_airpassengers

    return Trend(load_airpassengers(), "1949-01-01", 12)


def jobs(column: str) -> Trend:
    from vega_datasets import local_data

    return Trend(local_data.us_employment()[column].to_numpy(float), "2006-01-01", 12)


def economy(column: str) -> Trend:
    from statsmodels.datasets import macrodata

    return Trend(macrodata.load_pandas().data[column].to_numpy(float), "1959-01-01", 4)


def wool() -> Trend:
    from pmdarima.datasets import load_woolyrnq

    return Trend(load_woolyrnq(), "1965-01-01", 4)


def wine() -> Trend:
    from pmdarima.datasets import load_wineind

    return Trend(load_wineind(), "1980-01-01", 12)


def carbon_dioxide() -> Trend:
    from statsmodels.datasets import co2

    monthly = co2.load_pandas().data["co2"].resample("MS").mean().interpolate()
    return Trend(monthly.to_numpy(float), "1958-03-01", 12)


def equipment() -> Trend:
    from statsmodels.datasets import elec_equip

    return Trend(elec_equip.load_pandas().data.to_numpy(float).ravel(), "1995-01-01", 12)


def residents() -> Trend:
    from pmdarima.datasets import load_austres

    return Trend(load_austres(), "1971-03-01", 4)


HALVES: dict[str, dict[str, Callable[[], Trend]]] = {
    "choose": {
        "airline passengers, monthly": airline,
        "jobs, monthly": lambda: jobs("nonfarm"),
        "jobs in manufacturing, monthly": lambda: jobs("manufacturing"),
        "domestic product, quarterly": lambda: economy("realgdp"),
        "consumer prices, quarterly": lambda: economy("cpi"),
        "disposable income, quarterly": lambda: economy("realdpi"),
        "woollen yarn, quarterly": wool,
    },
    "report": {
        "Australian wine, monthly": wine,
        "carbon dioxide, monthly": carbon_dioxide,
        "electrical equipment, monthly": equipment,
        "jobs in education and health, monthly": lambda: jobs("education_and_health_services"),
        "consumption, quarterly": lambda: economy("realcons"),
        "population, quarterly": lambda: economy("pop"),
        "Australian residents, quarterly": residents,
        "money, quarterly": lambda: economy("m1"),
    },
}


def origins(trend: Trend) -> tuple[int, range]:
    """The steps ahead, and the numbers of rows that are known when forecasts are made."""
    n, steps = len(trend.y), max(trend.year, 8)
    return steps, range(int(0.6 * n), n - steps + 1, steps // 2)


def error(trend: Trend, made: Callable[[int], Any]) -> float:
    """The mean absolute error of forecasts of the rows after each origin."""
    steps, starts = origins(trend)
    return float(np.mean([np.abs(trend.y[n : n + steps] - made(n)[:steps]).mean() for n in starts]))


def ours(trend: Trend) -> float:
    import pandas as pd

    times = pd.date_range(trend.start, periods=len(trend.y), freq="MS" if trend.year == 12 else "QS")
    made = SepSAForecaster(origins(trend)[0]).prequential(trend.y, times=times)
    return error(trend, lambda n: made[n - 1])


def peers(trend: Trend) -> dict[str, float]:
    from statsmodels.tsa.api import ExponentialSmoothing
    from statsmodels.tsa.statespace.sarimax import SARIMAX

    def sarima(n: int) -> Any:
        fitted = SARIMAX(trend.y[:n], order=(1, 1, 1), seasonal_order=(0, 1, 1, trend.year)).fit(disp=False)
        return fitted.forecast(2 * trend.year)

    def smoothing(n: int) -> Any:
        model = ExponentialSmoothing(
            trend.y[:n], trend="add", damped_trend=True, seasonal="add", seasonal_periods=trend.year
        )
        return model.fit().forecast(2 * trend.year)

    return {"SARIMA": error(trend, sarima), "smoothing": error(trend, smoothing)}


def last_value(trend: Trend) -> float:
    return error(trend, lambda n: np.full(2 * trend.year, trend.y[n - 1]))


def main() -> None:
    """Measure the series that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--half", choices=list(HALVES), help="one half of the series")
    parser.add_argument("--only", default="", help="series whose names begin with this")
    parser.add_argument("--without-peers", action="store_true", help="take the peers of the last run")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    path = Path(__file__).with_suffix(".json")
    known = json.loads(path.read_text()) if path.exists() else {}
    for half, series in HALVES.items():
        ratios = []
        for name, make in series.items():
            if given.half not in (None, half) or not name.startswith(given.only):
                continue
            trend = make()
            found: dict[str, Any] = {"rows": len(trend.y), "SepSAForecaster": ours(trend)}
            if given.without_peers:
                found = known[half][name] | found
            else:
                found |= {"last value": last_value(trend)} | peers(trend)
            found["over the better"] = found["SepSAForecaster"] / min(found["SARIMA"], found["smoothing"])
            ratios.append(found["over the better"])
            told = "  ".join(f"{key} {value:.5g}" for key, value in found.items())
            print(f"{half:7} {name:40} {told}", flush=True)
            known = known | {half: known.get(half, {}) | {name: found}}
            write(__file__, known)
        if ratios:
            print(f"{half:7} median over the better one: {np.median(ratios):.3f}")
        if len(ratios) == len(series):
            known = known | {"median": known.get("median", {}) | {half: float(np.median(ratios))}}
            write(__file__, known)


if __name__ == "__main__":
    main()
