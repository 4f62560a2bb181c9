"""Forecasts with inputs that are known ahead, beside those without: series of installed packages.

    pip install statsmodels vega_datasets pmdarima
    python benchmarks/forecast/forecast_inputs.py --data FOLDER

FOLDER has DE.npz, victoria.npz (as `dayahead.py` says), ETTh1.csv and ETTh2.csv. The half `choose` decided how inputs
are used; `report` is only reported. An error is the mean over the first, the middle and the last step of the mean
absolute error in the second half of the rows, over that of the forecasts without inputs. Inputs called noise explain
nothing.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.measure import write
from sepsa import SepSAForecaster


class Series(NamedTuple):
    """A series, its inputs (n, q), its times, and the rows that are forecast."""

    y: Any
    X: Any
    times: Any
    horizon: int


def hours(start: str, count: int) -> Any:
    return np.datetime64(start) + np.arange(count) * np.timedelta64(1, "h")


def series(data: Path) -> dict[str, dict[str, Series]]:
    """The series of both halves."""
    import pandas as pd
    from statsmodels.datasets import macrodata
    from vega_datasets import local_data

    from benchmarks.forecast import forecast_real

    german, victoria = np.load(data / "DE.npz"), np.load(data / "victoria.npz")

    def days(values: Any) -> Any:
        return values[: len(values) // 24 * 24].reshape(-1, 24, *values.shape[1:])

    def part(of: Any, first: int) -> Series:
        rows = slice(first, first + 7000)
        return Series(of["y"][rows], of["X"][rows], hours(str(of["start"]), len(of["y"]))[rows], 24)

    def oil(name: str) -> Series:
        Z = np.genfromtxt(data / f"{name}.csv", delimiter=",", skip_header=1, usecols=range(1, 8))[3000:9000]
        return Series(Z[:, 6], Z[:, :6], hours("2016-11-03", len(Z)), 24)

    def noisy(real: Any, horizon: int) -> Series:
        return Series(real.y, np.random.default_rng(0).normal(size=(len(real.y), 2)), real.times, horizon)

    weather = local_data.seattle_weather()
    macro, quarters = macrodata.load_pandas().data, pd.date_range("1959-01-01", periods=203, freq="QS")
    cities = (local_data.seattle_temps(), local_data.sf_temps())
    seattle, francisco = (city.drop_duplicates("date").set_index("date")["temp"] for city in cities)
    both = seattle.index.intersection(francisco.index)
    morning = hours(str(victoria["start"]), len(victoria["y"]))[: len(days(victoria["y"])) * 24 : 24]
    weekday = (morning.astype("datetime64[D]").astype(int) + 3) % 7 < 5
    workday = weekday & (days(victoria["X"])[:, :, 1].mean(1) < 0.5)
    hottest = np.column_stack([workday, days(victoria["X"])[:, :, 0].max(1)])
    real = forecast_real.HALVES
    return {
        "choose": {
            "German prices, hourly": part(german, 20000),
            "Victoria's demand, daily": Series(days(victoria["y"]).mean(1), hottest, morning, 7),
            "ETTh1, oil by loads": oil("ETTh1"),
            "Seattle highest temperature, daily": Series(
                weather["temp_max"], weather[["precipitation", "wind"]], weather["date"], 7
            ),
            "unemployment, quarterly": Series(macro["unemp"], macro[["realgdp", "tbilrate"]], quarters, 4),
            "Seattle by San Francisco, hourly": Series(seattle[both], francisco[both], both, 24),
            "Seattle lowest temperature by noise": noisy(real["choose"]["Seattle lowest temperature, daily"](), 24),
            "El Niño by noise": noisy(real["choose"]["El Niño, monthly"](), 12),
        },
        "report": {
            "German prices, daily": Series(
                days(german["y"]).mean(1),
                days(german["X"]).mean(1),
                hours(str(german["start"]), len(german["y"]))[: len(days(german["y"])) * 24 : 24],
                7,
            ),
            "Victoria's demand, hourly": part(victoria, 10000),
            "ETTh2, oil by loads": oil("ETTh2"),
            "Seattle wind, daily": Series(
                weather["wind"], weather[["precipitation", "temp_max", "temp_min"]], weather["date"], 7
            ),
            "investment, quarterly": Series(macro["realinv"], macro[["realgdp", "tbilrate"]], quarters, 4),
            "San Francisco by Seattle, hourly": Series(francisco[both], seattle[both], both, 24),
            "English electricity by noise": noisy(real["report"]["English electricity, half-hourly"](), 24),
            "water flow by noise": noisy(real["report"]["water flow, hourly"](), 24),
        },
    }


def error(one: Series, inputs: bool) -> float:
    """The mean over three steps of the logarithm of the mean absolute error."""
    y, X = np.asarray(one.y, float), np.asarray(one.X, float) if inputs else None
    model = SepSAForecaster(one.horizon, known_ahead=inputs)
    made, first = model.prequential(y, X, times=one.times), len(y) // 2
    steps = sorted({1, (one.horizon + 1) // 2, one.horizon})
    errors = [np.nanmean(np.abs(y[first + h :] - made[first : len(y) - h, h - 1])) for h in steps]
    return float(np.log(errors).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for half, known in series(given.data).items():
        found[half] = {name: float(np.exp(error(one, True) - error(one, False))) for name, one in known.items()}
        for name, ratio in found[half].items():
            print(f"{half:7} {name:40} {ratio:.3f}", flush=True)
    ratios = [ratio for half in found.values() for ratio in half.values()]
    write(__file__, found | {"least": min(ratios), "largest": max(ratios), "series": len(ratios)})


if __name__ == "__main__":
    main()
