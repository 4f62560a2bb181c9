"""Real streams of up to 100,000 rows: errors of predictions made before learning, beside refitted boosted trees.

    python benchmarks/real_data.py --export FOLDER                                  # once, see there
    pip install lightgbm xgboost-cpu river
    python benchmarks/streams/real_streams.py --data FOLDER [--half choice|report]  # every cell that is not there yet
    python benchmarks/streams/real_streams.py --data FOLDER --again --models sepsa  # ours again
    python benchmarks/streams/real_streams.py --cost [--models sepsa]               # 10 and 100 inputs: time and memory
    python benchmarks/streams/real_streams.py --merge FILE                          # results from elsewhere into ours
    python benchmarks/streams/real_streams.py --table [--half report]

Every stream is read once, and every row is predicted before it is learned. The error over all rows up to 1,000, 3,000,
10,000, 30,000 and 100,000 is the mean absolute error or the share of wrong labels; beside it stand the root mean square
or the log loss (a probability below 1e-6 counts as 1e-6), the microseconds of processor time of a row since the size
before, and the megabytes of the pickled model. A cell is a stream and a model; its results are stored at each size,
`--limit` seconds end it after the block in which they run out, and `--budget` is the number of rows after which River's
models end. All cells take about 3 hours of one core, of which River's models and the perceptron take two thirds.

Everybody has default settings and one seed. LightGBM and XGBoost are fitted anew at 100, 200, 400 and 800 rows, then
every 1,000 rows, on the last 50,000 (with many classes fewer: 100,000 by the number of classes, at least 10,000), and
read texts as categories; "LightGBM, last" has the last target as one more input. Neighbours, forests and the perceptron
get an indicator for each of the first 64 texts of a column, and the mean so far for a missing value; inputs are
standardized by the rows so far, and so is the perceptron's target.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import math
import multiprocessing
import pickle
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from benchmarks.real_data import HALVES, LABEL, NUMBER, STREAMS, Data, Row, known, load, number, print_table, store

RESULT = Path(__file__).with_suffix(".json")
SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)
WINDOW, WINDOW_OF_MANY_CLASSES = 50_000, 10_000
LEVELS = 64  # texts of a column that have an indicator, for peers that read numbers alone
UNLIKELY = 1e-6
OURS = "sepsa"
COST = {"10 inputs": 10, "100 inputs": 100}


def edges(rows: int) -> list[int]:
    """Where blocks begin and end: predictions of a block are made by what was fitted before it."""
    return [0, *(at for at in (100, 200, 400, 800, *range(1_000, rows + 1, 1_000)) if at <= rows)]


class Stream:
    """The rows of a stream as each model reads them."""

    def __init__(self, name: str, folder: Path | None, rows: int) -> None:
        if name in COST:
            from sklearn.datasets import make_friedman1

            X, self.y = make_friedman1(rows, COST[name], noise=1.0, random_state=0)
            self.frame, self.kind = pd.DataFrame(X, columns=[f"x{j}" for j in range(X.shape[1])]), NUMBER
        else:
            assert folder is not None
            self.frame, self.y = load(folder, "streams", name)
            self.kind = STREAMS[name].kind
        self.rows = min(len(self.y), rows)
        self.frame, self.y = self.frame.iloc[: self.rows], self.y[: self.rows]
        self.classes = int(self.y.max()) + 1 if self.kind == LABEL else 0
        self.texts = [j for j, name in enumerate(self.frame) if isinstance(self.frame[name].dtype, pd.CategoricalDtype)]

    @cached_property
    def named(self) -> Any:
        """A frame with its texts, or an array where there are none."""
        if not self.texts:
            return self.frame.to_numpy(float)
        return self.frame.astype({self.frame.columns[j]: object for j in self.texts})

    @cached_property
    def coded(self) -> Any:
        """Numbers, of texts those of their categories, of which a later row can have a later one."""
        columns = []
        for name in self.frame:
            column = self.frame[name]
            if isinstance(column.dtype, pd.CategoricalDtype):
                codes = column.cat.codes.to_numpy(float)
                columns.append(np.where(codes < 0, np.nan, codes))
            else:
                columns.append(column.to_numpy(float))
        return np.stack(columns, 1)

    @cached_property
    def filled(self) -> Any:
        """Numbers and indicators of texts, the mean so far where one is missing."""
        columns = []
        for j in range(self.coded.shape[1]):
            x = self.coded[:, j]
            if j in self.texts:
                levels = range(min(LEVELS, self.frame.iloc[:, j].cat.categories.size))
                columns += [(x == level).astype(float) for level in levels]
            else:
                seen = np.maximum(np.cumsum(~np.isnan(x)), 1)
                columns.append(np.where(np.isnan(x), np.cumsum(np.nan_to_num(x)) / seen, x))
        return np.stack(columns, 1)

    @cached_property
    def scaled(self) -> Any:
        """`filled`, standardized by the mean and deviation of the rows so far, the row itself among them."""
        return standardized(self.filled)[0]


def standardized(X: Any) -> tuple[Any, Any, Any]:
    """Rows by the mean and deviation of those up to each of them, with both."""
    count = np.arange(1, len(X) + 1).reshape(-1, *[1] * (X.ndim - 1))
    Z = X - X[:1]  # so that squares keep their digits
    mean = np.cumsum(Z, 0) / count
    std = np.sqrt(np.maximum(np.cumsum(Z * Z, 0) / count - mean**2, 0))
    std = np.where(std > 1e-12 * (1 + np.abs(X[:1])), std, 1.0)
    return (Z - mean) / std, mean + X[:1], std


# ---------------------------------------------------------------------- models: answer rows, then learn them


class Ours:
    """`prequential` of a block; a frame where the stream has texts."""

    def __init__(self, stream: Stream) -> None:
        from sepsa import SepSAClassifier, SepSARegressor

        self.stream = stream
        self.model = (SepSARegressor if stream.kind == NUMBER else SepSAClassifier)(random_state=0)

    def answer(self, start: int, stop: int) -> Any:
        X, y = self.stream.named[start:stop], self.stream.y[start:stop]
        if self.stream.kind == NUMBER:
            return self.model.prequential(X, y)
        found = np.zeros((stop - start, self.stream.classes))
        proba = self.model.prequential(X, y, method="predict_proba")
        found[:, np.asarray(self.model.classes_, int)] = proba
        return found

    def size(self) -> int:
        return len(pickle.dumps(self.model))


class Last:
    """The last target or class."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def answer(self, start: int, stop: int) -> Any:
        before = np.r_[0 * self.stream.y[:1], self.stream.y][start:stop]
        return before if self.stream.kind == NUMBER else np.eye(self.stream.classes)[before.astype(int)]

    def size(self) -> int:
        return 8


class Refitted:
    """A model of tables, fitted anew before every block on the last rows; before, the mean or the shares of classes."""

    def __init__(self, stream: Stream, fit: Callable[[Any, Any, int], Callable[[Any], Any]], last: bool) -> None:
        self.stream, self.fit, self.model, self.X = stream, fit, None, stream.coded
        if last:
            self.X = np.column_stack([self.X, np.r_[np.nan, stream.y[:-1]]])
        self.window = min(WINDOW, max(WINDOW_OF_MANY_CLASSES, 2 * WINDOW // max(stream.classes, 1)))

    def answer(self, start: int, stop: int) -> Any:
        self.known = stop
        if not start:
            targets = self.stream.y if self.stream.kind == NUMBER else np.eye(self.stream.classes)[self.stream.y[:stop]]
            return np.r_[0 * targets[:1], standardized(targets)[1]][:stop]
        rows = slice(max(0, start - self.window), start)
        X, y = self.X[rows], self.stream.y[rows]
        new = self.X[start:stop]
        if self.stream.kind == NUMBER:
            self.model = self.fit(X, y, 0)
            return self.model(new)
        found, labels = np.zeros((stop - start, self.stream.classes)), np.unique(y)
        if len(labels) < 2:
            found[:, labels.astype(int)] = 1.0
            return found
        self.model = self.fit(X, np.searchsorted(labels, y), len(labels))
        found[:, labels.astype(int)] = self.model(new)
        return found

    def size(self) -> int:
        held = min(self.window, self.known) * self.X.shape[1] * 4
        return held + (len(pickle.dumps(self.model.__self__)) if self.model else 0)  # type: ignore[attr-defined]


def lightgbm(stream: Stream, last: bool = False) -> Refitted:
    from lightgbm import LGBMClassifier, LGBMRegressor

    texts = [*stream.texts, *([stream.coded.shape[1]] if last and stream.kind == LABEL else [])]

    def fit(X: Any, y: Any, classes: int) -> Any:
        model = (LGBMClassifier if classes else LGBMRegressor)(verbose=-1, n_jobs=1)
        model.fit(X, y, categorical_feature=texts)
        return model.predict_proba if classes else model.predict

    return Refitted(stream, fit, last)


def xgboost(stream: Stream) -> Refitted:
    from xgboost import XGBClassifier, XGBRegressor

    kinds = ["c" if j in stream.texts else "q" for j in range(stream.coded.shape[1])]

    def fit(X: Any, y: Any, classes: int) -> Any:
        model = (XGBClassifier if classes else XGBRegressor)(
            verbosity=0, n_jobs=1, enable_categorical=True, feature_types=kinds
        )
        model.fit(X, y)
        return model.predict_proba if classes else model.predict

    return Refitted(stream, fit, False)


class ByRow:
    """One of River's models, row by row."""

    def __init__(self, stream: Stream, model: Any, scaled: bool) -> None:
        self.stream, self.model = stream, model
        self.X = stream.scaled if scaled else stream.filled
        self.names = [f"x{j}" for j in range(self.X.shape[1])]

    def answer(self, start: int, stop: int) -> Any:
        number = self.stream.kind == NUMBER
        found = np.zeros(stop - start if number else (stop - start, self.stream.classes))
        for i, (row, y) in enumerate(zip(self.X[start:stop].tolist(), self.stream.y[start:stop].tolist(), strict=True)):
            x = dict(zip(self.names, row, strict=True))
            if number:
                told = self.model.predict_one(x)
                found[i] = told if told is not None and math.isfinite(told) else 0.0
            else:
                for label, share in (self.model.predict_proba_one(x) or {}).items():
                    found[i, int(label)] = share
            self.model.learn_one(x, y)
        return found

    def size(self) -> int:
        return len(pickle.dumps(self.model))


def arf(stream: Stream) -> ByRow:
    """A regression tree has linear models in its leaves, which want scaled inputs."""
    from river import forest

    if stream.kind == NUMBER:
        return ByRow(stream, forest.ARFRegressor(seed=0), True)
    return ByRow(stream, forest.ARFClassifier(seed=0), False)


def knn(stream: Stream) -> ByRow:
    from river import neighbors, utils

    model = neighbors.KNNRegressor if stream.kind == NUMBER else neighbors.KNNClassifier
    return ByRow(stream, model(engine=neighbors.SWINN(dist_func=utils.math._euclidean_distance, seed=0)), True)


class Perceptron:
    """scikit-learn's multilayer perceptron by `partial_fit`, row by row."""

    def __init__(self, stream: Stream) -> None:
        from sklearn.neural_network import MLPClassifier, MLPRegressor

        self.stream = stream
        self.model = (MLPRegressor if stream.kind == NUMBER else MLPClassifier)(random_state=0)
        if stream.kind == NUMBER:
            self.targets, self.mean, self.std = standardized(stream.y)

    def answer(self, start: int, stop: int) -> Any:
        number = self.stream.kind == NUMBER
        found = np.zeros(stop - start if number else (stop - start, self.stream.classes))
        for i in range(start, stop):
            x = self.stream.scaled[i : i + 1]
            if number:
                found[i - start] = self.model.predict(x)[0] * self.std[i - 1] + self.mean[i - 1] if i else 0.0
                self.model.partial_fit(x, self.targets[i : i + 1])
            else:
                found[i - start] = self.model.predict_proba(x)[0] if i else 0.0
                self.model.partial_fit(x, self.stream.y[i : i + 1], classes=range(self.stream.classes))
        return found

    def size(self) -> int:
        return len(pickle.dumps(self.model))


MODELS: dict[str, Callable[[Stream], Any]] = {
    OURS: Ours,
    "LightGBM": lightgbm,
    "LightGBM, last": lambda stream: lightgbm(stream, True),
    "XGBoost": xgboost,
    "ARF": arf,
    "KNN": knn,
    "MLP": Perceptron,
    "last": Last,
}
SLOW = ("ARF", "KNN")
SECONDS = {"ARF": 4e-3, "KNN": 1e-2, "MLP": 3e-3, "last": 0.0}  # of a row, roughly


# ---------------------------------------------------------------------- measuring


def measure(stream: Stream, model: Any, limit: float) -> Iterator[Row]:
    """The results at each size, until the seconds of `limit` are used up."""
    bounds = edges(stream.rows)
    seconds = before = 0.0
    loss, square = np.zeros(stream.rows), np.zeros(stream.rows)
    last = 0
    for start, stop in zip(bounds, [*bounds[1:], stream.rows], strict=True):
        if start == stop:
            continue
        began = time.process_time()
        told = np.asarray(model.answer(start, stop), float)
        seconds += time.process_time() - began
        y = stream.y[start:stop]
        if stream.kind == NUMBER:
            loss[start:stop] = np.abs(y - told)
            square[start:stop] = loss[start:stop] ** 2
        else:
            loss[start:stop] = (told.argmax(1) != y) | (told.max(1) == 0)
            square[start:stop] = -np.log(np.maximum(told[np.arange(len(y)), y], UNLIKELY))
        out = seconds > limit
        if stop in SIZES or stop == stream.rows or out:
            more = square[:stop].mean()
            result = {
                "error": loss[:stop].mean(),
                **({"rmse": math.sqrt(more)} if stream.kind == NUMBER else {"log loss": more}),
                "us": 1e6 * (seconds - before) / (stop - last),
                "mb": model.size() / 1e6,
            }
            before, last = seconds, stop
            yield {"rows": stop} | {k: float(f"{v:.5g}") for k, v in result.items()} | ({"limit": limit} if out else {})
        if out:
            return


class Cell(NamedTuple):
    stream: str
    model: str
    data: Path | None
    rows: int
    limit: float
    result: Path
    until: float  # of the clock: later it does not begin


def run_cell(cell: Cell) -> str:
    """One stream and model, stored at each size; returns what is to be printed."""
    warnings.simplefilter("ignore")
    told = f"{cell.stream:24s} {cell.model:16s}"
    if time.time() > cell.until:
        return f"{told} not begun"
    try:
        stream = Stream(cell.stream, cell.data, size(cell))
        if cell.model == OURS:  # load or compile the kernels
            first = MODELS[cell.model](stream)
            for start in (0, 100):
                first.answer(start, start + 100)
        rows: list[Row] = []
        for result in measure(stream, MODELS[cell.model](stream), cell.limit):
            rows.append({"stream": cell.stream, "model": cell.model} | result)
            put(cell.result, rows)
    except Exception as error:  # a peer that is not installed, an expert that is not there: told, and the rest goes on
        why = f"{type(error).__name__}: {error}"[:200]
        put(cell.result, [{"stream": cell.stream, "model": cell.model, "rows": 0, "missing": why}])
        return f"{told} {why}"
    return f"{told} {result}"


def put(path: Path, new: list[Row]) -> None:
    """Put rows into the file in the place of all that it has of their cells."""
    cells = {(row["stream"], row["model"]) for row in new}
    names, titles = [*STREAMS, *COST], list(MODELS)
    store(
        path,
        new,
        lambda row: (row["stream"], row["model"]) in cells,
        lambda row: (names.index(row["stream"]), titles.index(row["model"]), row["rows"]),
    )


@cache
def length(folder: Path, name: str) -> int:
    return len(load(folder, "streams", name)[1])


def size(cell: Cell) -> int:
    """The rows at which a cell ends: the largest of SIZES that the stream and the command line allow."""
    most = min(cell.rows, length(cell.data, cell.stream)) if cell.data and cell.stream in STREAMS else cell.rows
    return max((size for size in SIZES if size <= most), default=most)


def is_done(rows: list[Row], cell: Cell) -> bool:
    """Whether the cell has reached its size, or had at least as many seconds and has not."""
    found = [row for row in rows if (row["stream"], row["model"]) == (cell.stream, cell.model)]
    reached = max((row["rows"] for row in found), default=0)
    return reached >= size(cell) or any(row.get("limit", 0) >= cell.limit for row in found)


def run(options: argparse.Namespace) -> None:
    names = list(COST) if options.cost else [n for n, data in STREAMS.items() if options.half in (None, data.half)]
    names = [name for name in names if not options.streams or name in options.streams]
    cells = [
        Cell(name, title, options.data, options.rows, options.limit, options.result, time.time() + 60 * options.minutes)
        for name in names
        for title in options.models or ([OURS] if options.cost else MODELS)
    ]
    cells = [c._replace(rows=min(c.rows, options.budget)) if c.model in SLOW else c for c in cells]
    rows = known(options.result)
    cells = [cell for cell in cells if options.again or not is_done(rows, cell)]
    # The longest first, so that no process is left with one at the end.
    cells.sort(key=lambda cell: -size(cell) * SECONDS.get(cell.model, 1e-3))
    print(f"{len(cells)} cells", flush=True)
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for line in pool.imap_unordered(run_cell, cells):
            print(line, flush=True)


# ---------------------------------------------------------------------- the tables


def races(rows: list[Row], half: str, size: int, what: str, kind: str | None) -> list[Any]:
    """Our error and those of the peers by stream; one wrong row is added to every share of wrong labels."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        data = STREAMS.get(row["stream"], Data("", ""))
        exact = {"loss": "rmse" if data.kind == NUMBER else "log loss"}.get(what, what)
        if row["rows"] == size and data.half == half and kind in (None, data.kind):
            least = 1 / size if data.kind == LABEL and exact == "error" else 0.0
            found.setdefault(row["stream"], {})[row["model"]] = row[exact] + least
    return [
        (name, errors[OURS], peers)
        for name, errors in found.items()
        if OURS in errors and (peers := {m: v for m, v in errors.items() if m != OURS})
    ]


def summary(met: list[Any]) -> dict[str, Any]:
    ratios = {name: own / min(peers.values()) for name, own, peers in met}
    worst = max(ratios, key=ratios.__getitem__)
    return {
        "streams": len(met),
        "first": sum(ratio <= 1 for ratio in ratios.values()),
        "more than 5 % behind": sum(ratio > 1.05 for ratio in ratios.values()),
        "ratio to the best peer": f"{math.exp(np.mean(np.log(list(ratios.values())))):.3f}",
        "worst": f"{ratios[worst]:.2f} {worst}",
        "results missing": sum(len(MODELS) - 1 - len(peers) for *_, peers in met),
    }


def print_tables(half: str | None, rows: list[Row]) -> None:
    for part in [half] if half else HALVES:
        names = ("streams", "first", "more than 5 % behind", "ratio to the best peer")
        counted = {
            f"{size:,} rows, {words}{kind or 'all'}": summary(met)
            for what, words in (("error", ""), ("loss", "RMSE or log loss, "))
            for size in SIZES
            for kind in ((None, NUMBER, LABEL) if what == "error" else (None,))
            if (met := races(rows, part, size, what, kind))
        }
        short = {f"{size:,}": counted[row] for size in SIZES if (row := f"{size:,} rows, all") in counted}
        short = {size: {name: row[name] for name in names} for size, row in short.items()}
        print_table(f"{OURS}, {part}: rows", short)
        print_table(f"{OURS}, {part}", counted)
        cells: dict[str, dict[str, Any]] = {}
        times: dict[str, dict[str, Any]] = {}
        for row in rows:
            if row["rows"] in SIZES and STREAMS.get(row["stream"], Data("", "")).half == part:
                at = f"{row['stream']}, {row['rows']:,}"
                cells.setdefault(at, dict.fromkeys(MODELS, ""))[row["model"]] = number(row["error"])
                times.setdefault(at, dict.fromkeys(MODELS, ""))[row["model"]] = f"{row['us']:.0f} / {row['mb']:.1f}"
        print_table(f"mean absolute error or wrong labels, {part}", cells)
        print_table(f"µs a row / MB, {part}", times)
    cost = {
        f"{row['stream']}, {row['model']}, {row['rows']:,} rows": {"µs a row": round(row["us"]), "MB": row["mb"]}
        for row in rows
        if row["stream"] in COST and row["rows"]
    }
    print_table("cost", cost)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, help="the folder that real_data.py --export has made")
    parser.add_argument("--half", choices=HALVES)
    parser.add_argument("--streams", nargs="+", choices=[*STREAMS, *COST], metavar="STREAM")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), metavar="MODEL")
    parser.add_argument("--rows", type=int, default=SIZES[-1], help="at most, of each stream")
    parser.add_argument("--budget", type=int, default=10_000, help="rows of River's models, at most")
    parser.add_argument("--limit", type=float, default=500, help="seconds of one cell, at most")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no further cell begins")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--again", action="store_true", help="measure what is there already, too")
    parser.add_argument("--cost", action="store_true", help="10 and 100 inputs instead of the real streams")
    parser.add_argument("--merge", nargs="+", type=Path, default=[])
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--result", type=Path, default=RESULT, help="the file of results")
    options = parser.parse_args()
    if options.merge:
        rows = [row for path in options.merge for row in known(path)]
        put(options.result, rows)
    elif options.table:
        print_tables(options.half, known(options.result))
    elif options.data is None and not options.cost:
        parser.error("--data must name the folder that real_data.py --export has made")
    else:
        run(options)


if __name__ == "__main__":
    main()
