"""What each expert of the stream learners gains: errors of predictions made before learning, leaving out one at a time.

    SEPSA_DATA=... python benchmarks/streams/experts.py --pack FILE.npz                 # once: streams as arrays
    python benchmarks/streams/experts.py --data FILE.npz --processes 16 [--rows 10000]  # cells that are not there yet
    python benchmarks/streams/experts.py --table

`--pack` takes the streams of `real_data.py` and of `prequential.py` (made ones, and small tables in random order), with
their packages; a run needs NumPy and the package alone. A stream that cannot be loaded is named and left out. A text is
an indicator for each of the first 16 texts of its column. The halves are those of the two scripts: experts are dropped
by the half "choice", and both are reported.

An expert that is left out answers as the network does, which the stack and the weights then count once more; it learns
on, because others read what it stores. A stream's error is the mean absolute error or the share of wrong labels of all
rows, and of the first 1,000. The gain of an expert is the mean over streams of log(error without it/error of all).
One seed, default settings. All cells take about ten minutes of one core.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import math
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.measure import machine
from sepsa.compiled.kernels import kernel
from sepsa.learner.experts import EXPERTS
from sepsa.learner.experts.frame import Expert, given, row
from sepsa.learner.memory.views import Group
from sepsa.learner.options import RiverOptions
from sepsa.learner.stream_learner import StreamLearner

RESULT = Path(__file__).with_suffix(".json")
HALVES = ("choice", "report")
EARLY = 1_000
LEVELS = 16  # texts of a column that have an indicator


class Stream(NamedTuple):
    """A stream as `--pack` names it."""

    half: str
    kind: str  # regression or classification
    origin: str  # real or made
    name: str


# ---------------------------------------------------------------------- leaving out


silent = Group(given, "left out")


@kernel
def learn_nothing(model, e):
    return 0


@cache
def leaving_out(place: int) -> Expert:
    """An expert, the last of all, that lets the one in this place answer as the network does."""

    @kernel
    def answer(model, e):
        answers = row.ANSWERS(model)
        for k in range(answers.shape[1]):
            answers[e, k] = answers[place, k] = answers[0, k]
        return 0

    return Expert(silent, answer, learn_nothing)


def able(kind: str) -> list[Expert]:
    """The experts that answer for targets of a kind, in the order of their answers."""
    return [each for each in EXPERTS if kind == "classification" or not each.for_classes]


def variants(kind: str) -> list[str]:
    """What is left out in turn: nothing, and each expert."""
    return ["", *(each.name for each in able(kind)[1:])]


def errors(stream: Stream, file: str, rows: int, without: str) -> list[float]:
    """The mean error of the first rows, and that of all."""
    with np.load(file) as data:
        X, y = (np.asarray(data[f"{'|'.join(stream)}|{part}"][:rows], float) for part in "Xy")
    regression, names = stream.kind == "regression", [each.name for each in able(stream.kind)]
    table = *EXPERTS, leaving_out(names.index(without) if without else 0)
    Y = y[:, None] if regression else np.eye(int(y.max()) + 1)[y.astype(int)]
    options = RiverOptions(seed=0).of_learner()
    learner = StreamLearner(X.shape[1], Y.shape[1], regression=regression, table=table, **options)
    blocks = [
        learner.learn(X[i : i + 250], Y[i : i + 250], np.ones(len(X[i : i + 250]))) for i in range(0, len(X), 250)
    ]
    told = np.concatenate(blocks)
    missed = np.abs(told[:, 0] - y) if regression else (told.argmax(1) != y).astype(float)
    least = 1e-12 if regression else 1 / len(y)  # so that a logarithm exists
    return [max(float(missed[:EARLY].mean()), least), max(float(missed.mean()), least)]


# ---------------------------------------------------------------------- streams


def packed(file: str) -> list[Stream]:
    """The streams of a file."""
    with np.load(file) as data:
        return [Stream(*name.split("|")[:4]) for name in data.files if name.endswith("|X")]


def real(rows: int) -> Iterator[tuple[Stream, Any, Any]]:
    """The streams of `real_data.py`."""
    import pandas as pd

    from benchmarks import real_data

    for kind, loaders in real_data.STREAM_LOADERS.items():
        for name, load in loaders.items():
            try:
                X, y = load()
            except (ImportError, OSError) as error:
                print(f"without {name!r}: {error}")
                continue
            frame, y = real_data.tidy(X.iloc[:rows]), np.asarray(y)[:rows]
            columns = []
            for column in frame:
                values = frame[column]
                if isinstance(values.dtype, pd.CategoricalDtype):
                    codes = values.cat.codes.to_numpy()
                    columns += [codes == k for k in range(min(LEVELS, values.cat.categories.size))]
                else:
                    columns.append(values.to_numpy(float))
            targets = y.astype(float) if kind == "regression" else pd.factorize(y)[0]
            yield Stream(real_data.STREAMS[name].half, kind, "real", name), np.stack(columns, 1), targets


def made(rows: int) -> Iterator[tuple[Stream, Any, Any]]:
    """The streams of `prequential.py`; a feature that a row lacks is missing."""
    from benchmarks.streams import prequential

    for name, stream in prequential.STREAMS.items():
        try:
            samples = [*stream.load()][:rows]
        except (ImportError, KeyError, OSError) as error:
            print(f"without {name!r}: {error!r}")
            continue
        names = [*dict.fromkeys(key for x, _ in samples for key, value in x.items() if not isinstance(value, str))]
        X = np.array([[x.get(key, math.nan) for key in names] for x, _ in samples], float)
        y: Any = [target for _, target in samples]
        if stream.kind == "classification":
            numbers = {label: i for i, label in enumerate(dict.fromkeys(y))}
            y = [numbers[label] for label in y]
        yield Stream("choice" if stream.half == "development" else "report", stream.kind, "made", name), X, np.array(y)


def pack(file: Path, rows: int) -> None:
    """Write all streams to a file."""
    arrays = {}
    for stream, X, y in (*real(rows), *made(rows)):
        print(*stream, *X.shape, flush=True)
        arrays[f"{'|'.join(stream)}|X"], arrays[f"{'|'.join(stream)}|y"] = X.astype(np.float32), y
    np.savez_compressed(file, **arrays)


# ---------------------------------------------------------------------- results


def known() -> dict[Stream, dict[str, list[float]]]:
    """The errors so far, by what is left out, of each stream."""
    lines = json.loads(RESULT.read_text())["streams"] if RESULT.exists() else []
    return {Stream(*(line[field] for field in Stream._fields)): line["errors"] for line in lines}


def store(found: dict[Stream, dict[str, list[float]]]) -> None:
    head = json.dumps(machine(), indent=1)
    lines = ",\n".join("  " + json.dumps(stream._asdict() | {"errors": found[stream]}) for stream in sorted(found))
    part = RESULT.with_suffix(".part")
    part.write_text(f'{head[:-2]},\n "streams": [\n{lines}\n ]\n}}\n')
    part.replace(RESULT)


def run(file: str, rows: int, processes: int) -> None:
    """Every cell that is not there yet; the results are written after each stream."""
    found, streams = known(), packed(file)
    context = multiprocessing.get_context("fork")
    for kind in ("regression", "classification"):  # compiled once, before there are several processes
        first = next(stream for stream in streams if stream.kind == kind)
        for without in variants(kind):
            errors(first, file, 2, without)
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        cells = {
            pool.submit(errors, stream, file, rows, without): (stream, without)
            for stream in streams
            for without in variants(stream.kind)
            if without not in found.get(stream, {})
        }
        for done, cell in enumerate(as_completed(cells), 1):
            stream, without = cells[cell]
            found.setdefault(stream, {})[without] = cell.result()
            if done % 50 == 0 or done == len(cells):
                store(found)
                print(f"{done} of {len(cells)} cells", flush=True)


def table() -> None:
    found = known()
    names = dict.fromkeys(each for kind in ("regression", "classification") for each in variants(kind))
    print("| left out | choice, all rows | report, all rows | choice, first 1,000 | report, first 1,000 |")
    print("|---|---|---|---|---|")
    for name in [*names][1:]:
        print(f"| {name} | " + " | ".join(gain(found, name, half, at) for at in (1, 0) for half in HALVES) + " |")


def gain(found: dict[Stream, dict[str, list[float]]], without: str, half: str, at: int) -> str:
    """The mean over the streams of a half of log(error without an expert/error of all) in percent, and its error."""
    errors_of = [each for stream, each in found.items() if stream.half == half and without in each]
    logs = [100 * math.log(each[without][at] / each[""][at]) for each in errors_of]
    return f"{np.mean(logs):+.2f} ± {np.std(logs, ddof=1) / math.sqrt(len(logs)):.2f} %" if len(logs) > 1 else "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, help="write all streams to this file")
    parser.add_argument("--data", help="the file that --pack has written")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.pack:
        pack(options.pack, options.rows)
    elif options.data:
        run(options.data, options.rows, options.processes)
    else:
        table()


if __name__ == "__main__":
    main()
