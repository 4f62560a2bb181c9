"""The paper's Table III beside ours: the numbers that the paper prints, and the means over the records of our runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reproduction.data import NAMES, Metric
from reproduction.experiments import EXPERIMENTS, MODES, TABLES
from reproduction.methods import CROSS_ENTROPY, EVIDENCE, NEWTON, STANDARDIZED, TUNED, VARIANTS, slug
from reproduction.records import read as read_file
from reproduction.records import significant

# The paper's rows first, in its order; then its other methods; then those it lacks.
METHODS = (
    *("SepSA", "slimTrain", "Adam", "RMSprop", "NAG", "SGD"),
    *(STANDARDIZED, CROSS_ENTROPY, NEWTON, TUNED, EVIDENCE, *VARIANTS),
)


class Printed(NamedTuple):
    """One row of the paper's Table III."""

    train_mean: float
    train_std: float
    test_mean: float
    test_std: float
    seconds: float


PAPER: dict[tuple[str, str, str], Printed] = {
    ("online", "energy", "SepSA"): Printed(7.7356, 0.3546, 8.3049, 0.5443, 0.3987),
    ("online", "energy", "slimTrain"): Printed(1659.8, 3093.7, 1847.5, 3494.1, 0.8427),
    ("online", "energy", "Adam"): Printed(165.11, 21.64, 122.69, 16.79, 0.3395),
    ("online", "diabetes", "SepSA"): Printed(2481.3, 65.1, 2940.2, 129.6, 0.2420),
    ("online", "diabetes", "slimTrain"): Printed(6943.6, 3215.9, 6729.5, 2950.3, 0.5026),
    ("online", "diabetes", "Adam"): Printed(26413.9, 262.1, 27033.6, 254.8, 0.2362),
    ("online", "mnist", "SepSA"): Printed(98.40, 0.14, 98.39, 0.15, 519),
    ("online", "mnist", "slimTrain"): Printed(14.77, 2.95, 14.74, 3.08, 534),
    ("online", "mnist", "Adam"): Printed(98.01, 0.24, 97.97, 0.29, 536),
    ("online", "cifar10", "SepSA"): Printed(35.64, 1.96, 38.14, 2.54, 413),
    ("online", "cifar10", "slimTrain"): Printed(10.17, 0.68, 9.90, 0.83, 442),
    ("online", "cifar10", "Adam"): Printed(22.61, 1.54, 24.61, 1.48, 420),
    ("mini-batch", "energy", "SepSA"): Printed(2.3869, 0.3448, 3.2776, 0.5590, 0.8041),
    ("mini-batch", "energy", "slimTrain"): Printed(5.4708, 1.3586, 7.2606, 1.7903, 2.9818),
    ("mini-batch", "energy", "Adam"): Printed(29.926, 1.620, 18.370, 1.034, 0.6878),
    ("mini-batch", "diabetes", "SepSA"): Printed(1291.8, 83.5, 3076.0, 171.3, 0.4845),
    ("mini-batch", "diabetes", "slimTrain"): Printed(1643.4, 153.9, 3733.7, 510.7, 1.7124),
    ("mini-batch", "diabetes", "Adam"): Printed(16805.8, 720.3, 17581.1, 726.8, 0.4044),
    ("mini-batch", "mnist", "SepSA"): Printed(99.78, 0.02, 99.23, 0.03, 185),
    ("mini-batch", "mnist", "slimTrain"): Printed(99.48, 0.15, 99.09, 0.12, 197),
    ("mini-batch", "mnist", "Adam"): Printed(99.69, 0.04, 99.15, 0.04, 148),
    ("mini-batch", "cifar10", "SepSA"): Printed(72.77, 0.75, 74.95, 0.59, 449),
    ("mini-batch", "cifar10", "slimTrain"): Printed(66.79, 1.35, 69.86, 0.87, 459),
    ("mini-batch", "cifar10", "Adam"): Printed(43.30, 5.60, 44.79, 5.82, 384),
}


def base_method(name: str) -> str:
    """The paper's method that a method is a variant of: "Adam" for "Adam, no weight decay"."""
    return name.partition(",")[0]


@dataclass(frozen=True)
class RecordedRun:
    """One training run; numbers that are not finite are None."""

    lr: float
    spec: Mapping[str, Any]
    seconds: float
    train: float | None
    test: float | None
    diverged: bool
    curve: Mapping[str, Sequence[float | None]]
    note: str | None


@dataclass(frozen=True)
class Record:
    """The runs of one method on one data set in one experiment."""

    experiment: str
    dataset: str
    mode: str
    method: str
    metric: Metric
    runs: tuple[RecordedRun, ...]


def read(results: Path) -> list[Record]:
    """Every record under `results`, in the order in which the paper would print them."""
    paths = [path for name in EXPERIMENTS for path in sorted((results / name).glob("*.json"))]
    places = {name: i for i, name in enumerate((*MODES, *NAMES, *METHODS))}
    records = [record for record in map(_record, paths) if record.runs]
    return sorted(records, key=lambda r: (r.experiment, places[r.mode], places[r.dataset], places[r.method]))


def _record(path: Path) -> Record:
    raw = read_file(path)
    try:
        runs = tuple(_run(run) for run in raw["runs"])
    except (KeyError, TypeError, AttributeError) as error:
        cure = "remove it and run `python -m reproduction run`"
        raise ValueError(f"{path} holds an invalid run ({error!r}): {cure}") from None
    for key, known in (("dataset", NAMES), ("mode", MODES), ("method", METHODS), ("metric", ("mse", "accuracy"))):
        if raw[key] not in known:
            raise ValueError(
                f"{key} must be one of {', '.join(map(repr, known))}, got {raw[key]!r} in {path}: remove it"
            )
    return Record(raw["experiment"], raw["dataset"], raw["mode"], raw["method"], raw["metric"], runs)


def _run(raw: Mapping[str, Any]) -> RecordedRun:
    final: dict[str, Any] = {key: _finite(raw["final"][key]) for key in ("train", "test")}
    common = {key: raw[key] for key in ("lr", "spec", "seconds", "diverged", "curve")}
    return RecordedRun(**common, **final, note=raw.get("note") or raw["spec"].get("note"))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class TableRow:
    """One row of table3.json or images.json: ours beside the paper's, None where there is no number.

    Means and standard deviations (of the sample: n − 1) exclude diverged runs, which `diverged` counts. The differences
    are (ours − paper's) / the paper's standard deviation.
    """

    experiment: str
    mode: str
    dataset: str
    method: str
    metric: Metric
    train_mean: float | None
    train_std: float | None
    test_mean: float | None
    test_std: float | None
    seconds_mean: float | None
    seeds: int
    diverged: int
    paper_train_mean: float | None
    paper_train_std: float | None
    paper_test_mean: float | None
    paper_test_std: float | None
    paper_seconds_mean: float | None
    train_difference: float | None
    test_difference: float | None


def name(row: Record | TableRow) -> str:
    """The file with the runs behind a row, relative to the folder of results, without its suffix."""
    return f"{row.experiment}/{row.dataset}-{row.mode}-{slug(row.method)}"


def compared_row(row: Record | TableRow) -> Printed | None:
    """The row of the paper's table that the experiment compares this one with."""
    compared = EXPERIMENTS[row.experiment].compared
    method = base_method(row.method) if compared == "variant" else row.method
    return PAPER.get((row.mode, row.dataset, method)) if compared else None


def table3(records: Iterable[Record], experiments: Sequence[str] = ("table3",)) -> list[TableRow]:
    """One row per record of the experiments, in the paper's order."""
    return [_row(record) for name in experiments for record in records if record.experiment == name]


def _row(record: Record) -> TableRow:
    stable = [run for run in record.runs if not run.diverged]
    train_mean, train_std = _mean_and_std([run.train for run in stable if run.train is not None])
    test_mean, test_std = _mean_and_std([run.test for run in stable if run.test is not None])
    paper = compared_row(record)
    # A diverged run stopped early, and would make the method look fast.
    seconds = significant(float(np.mean([run.seconds for run in stable or record.runs])))
    return TableRow(
        *(record.experiment, record.mode, record.dataset, record.method, record.metric),
        *(train_mean, train_std, test_mean, test_std, seconds),
        *(len(record.runs), len(record.runs) - len(stable)),
        paper_train_mean=paper and paper.train_mean,
        paper_train_std=paper and paper.train_std,
        paper_test_mean=paper and paper.test_mean,
        paper_test_std=paper and paper.test_std,
        paper_seconds_mean=paper and paper.seconds,
        train_difference=paper and _difference(train_mean, paper.train_mean, paper.train_std),
        test_difference=paper and _difference(test_mean, paper.test_mean, paper.test_std),
    )


def _mean_and_std(values: Sequence[float]) -> tuple[float | None, float | None]:
    mean = float(np.mean(values)) if values else None
    return significant(mean), significant(float(np.std(values, ddof=1)) if len(values) > 1 else None)


def _difference(ours: float | None, mean: float, std: float) -> float | None:
    return None if ours is None else significant((ours - mean) / std)


def unexplained(rows: Iterable[TableRow]) -> list[tuple[TableRow, str]]:
    """The means, "train" or "test", of the paper's rows that no experiment reproduces.

    An experiment reproduces a row if both of its means lie within two of the paper's standard deviations. Of a row that
    none reproduces, the means beyond two are counted in the last experiment with the paper's own method.
    """
    found: dict[tuple[str, str, str], dict[str, TableRow]] = {}
    reproduced = set()
    for row in rows:
        if row.paper_test_mean is not None:
            key = row.mode, row.dataset, base_method(row.method)
            found.setdefault(key, {})[row.experiment] = row
            if not _beyond_two(row):
                reproduced.add(key)
    same = [name for name in TABLES if EXPERIMENTS[name].compared == "same method"]
    counted = [[by[name] for name in same if name in by][-1:] for key, by in found.items() if key not in reproduced]
    return [(row, split) for last in counted for row in last for split in _beyond_two(row)]


def _beyond_two(row: TableRow) -> list[str]:
    pairs = (("train", row.train_difference), ("test", row.test_difference))
    return [split for split, difference in pairs if difference is None or abs(difference) > 2]


def best_methods(rows: Iterable[TableRow]) -> set[tuple[str, str, str]]:
    """The method with the best test mean in each mode and data set, of those that never diverged."""
    found: dict[tuple[str, str], list[tuple[float, TableRow]]] = {}
    for row in rows:
        if row.test_mean is not None and not row.diverged:
            error = row.test_mean if row.metric == "mse" else -row.test_mean
            found.setdefault((row.mode, row.dataset), []).append((error, row))
    best = [min(candidates, key=lambda candidate: candidate[0])[1] for candidates in found.values()]
    return {(row.mode, row.dataset, row.method) for row in best}
