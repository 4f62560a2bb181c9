"""Ridges of the network's heads in the stream learners by evidence, beside the ridge 10 that they have.

    python benchmarks/real_data.py --export FOLDER                           # once, see there
    python benchmarks/streams/network_ridge.py --data FOLDER --jobs 16               # what the JSON does not hold yet
    python benchmarks/streams/network_ridge.py --table

Every row of a real stream is predicted before it is learned, up to 10,000 rows; the error is the mean absolute error or
the share of wrong labels, by the default learner ("experts") and by its network alone. "ridge 10" is the default.
"evidence κ" changes the ridge of each head exactly after 32, 64, 128, ... rows, within the bounds of
`sepsa.heads.least_squares.evidence`: to κ γ RSS / ((n - γ - 1) |W - prior|²).
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import itertools
import json
import math
import statistics
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.linalg import cholesky

from benchmarks.measure import machine, missing_runs
from benchmarks.real_data import HALVES, NUMBER, STREAMS
from benchmarks.streams.real_streams import Stream
from sepsa import SepSAClassifier, SepSARegressor
from sepsa.heads.least_squares import evidence

RESULT = Path(__file__).with_suffix(".json")
ROWS, FIRST = 10_000, 32
BASE = "ridge 10"
METHODS = (BASE, "evidence 1", "evidence 8")
FORMS = {"experts": "auto", "alone": "fourier"}


def look(part: Any, kappa: float) -> None:
    """Give a head κ times the ridge of the largest evidence, as if it had had that from its first row on."""
    numbers, W, packed, D, left, prior, energy = (
        part(name) for name in ("NUMBERS", "W", "U", "D", "RIDGE", "PRIOR", "ENERGY")
    )
    p, n = len(D), float(numbers["samples"])
    column, row = np.tril_indices(p, -1)
    U = np.eye(p)
    U[row, column] = packed
    B = (U * D) @ U.T
    off = W - prior
    residual = max(float((energy - off**2 @ left).sum()), 0.0)
    determined = p - float(left @ B.diagonal())
    A = np.linalg.inv(B)
    variance = np.maximum(A.diagonal() - left, 0.0)[:-1] / n
    size = float(n * ((off**2).sum(0)[:-1] @ variance)) or 1.0
    ridge, lam = float(numbers["ridge"]), float(numbers["forgetting"])
    freedom = max(n - (determined + 1) / (1 + lam if lam < 1 else 1.0), evidence.LEAST_FREEDOM * n)
    found = evidence.Evidence(determined, residual / size, float((off**2).sum()) / size, freedom, torch.ones(1, 1))
    least, most = float(variance[variance > 0].min(initial=math.inf)), float(variance.max())
    best = kappa * evidence.best_ridge(found, ridge / kappa, lambda: (least, most))
    if best == ridge:
        return
    change = best - left
    A[np.diag_indices(p)] += change
    after = np.linalg.inv(A)
    step = -(change * off) @ after  # A'W' = AW + change prior
    energy += (change * off**2).sum(1) - ((step @ A) * step).sum(1)
    W += step
    R = cholesky(after[::-1, ::-1], lower=True)[::-1, ::-1]  # upper: RR' is the new B
    D[:] = R.diagonal() ** 2
    packed[:] = (R / R.diagonal())[row, column]
    left[:] = numbers["ridge"] = best


def measure(item: tuple[str, str, str], folder: Path) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    name, form, method = item
    stream = Stream(name, folder, ROWS)
    number = stream.kind == NUMBER
    kind, _, value = method.partition(" ")
    model = (SepSARegressor if number else SepSAClassifier)(random_state=0, body=FORMS[form], ridge=10.0)
    edges = sorted({0, stream.rows, *(FIRST * 2**k for k in range(20) if FIRST * 2**k < stream.rows)})
    loss = np.zeros(stream.rows)
    for start, stop in itertools.pairwise(edges):
        X, y = stream.named[start:stop], stream.y[start:stop]
        told = model.prequential(X, y)
        loss[start:stop] = np.abs(y - told) if number else told != y
        if kind == "evidence":
            engine = model._learner.body.engine
            for h in range(len(engine.form.heads)):
                look(engine.memory.of("heads", h), float(value))
    ridges = [float(model._learner.body.engine.memory("NUMBERS", "heads", h)["ridge"]) for h in range(1)]
    return {"error": float(f"{loss.mean():.5g}"), "rows": stream.rows, "ridge": float(f"{ridges[0]:.3g}")}


def gains(runs: list[dict[str, Any]], form: str, method: str, half: str) -> dict[str, float]:
    """Of each stream of a half, log(error with ridge 10 / error)."""
    errors = {(run["stream"], run["form"], run["method"]): run["error"] for run in runs}
    names = [name for name, data in STREAMS.items() if data.half == half and (name, form, method) in errors]
    return {name: math.log(errors[name, form, BASE] / errors[name, form, method]) for name in names}


def summary(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The mean gain of each half, the largest, and how many streams are 1 % ahead and behind."""
    result: dict[str, dict[str, Any]] = {}
    for form, method, half in itertools.product(FORMS, METHODS[1:], HALVES):
        found = gains(runs, form, method, half)
        if found:
            first = max(found, key=found.__getitem__)
            result[f"{form}, {method}, {half}"] = {
                "mean": round(statistics.fmean(found.values()), 4),
                "largest": [first, round(found[first], 3)],
                "ahead": sum(gain > 0.01 for gain in found.values()),
                "behind": sum(gain < -0.01 for gain in found.values()),
                "of": len(found),
            }
    return result


def store(runs: list[dict[str, Any]], out: Path) -> None:
    document = {"machine": machine(), "gain over ridge 10": summary(runs), "runs": runs}
    out.write_text(json.dumps(document) + "\n", encoding="utf-8")


def table(runs: list[dict[str, Any]]) -> None:
    print("| learner, ridge, half | mean gain | largest | 1 % ahead | behind | streams |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, row in summary(runs).items():
        stream, gain = row["largest"]
        print(f"| {name} | {row['mean']} | {stream}: {gain} | {row['ahead']} | {row['behind']} | {row['of']} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--streams", nargs="+", default=list(STREAMS))
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    known = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {"runs": []}
    keys = ("stream", "form", "method")
    items = [] if options.table else itertools.product(options.streams, FORMS, METHODS)
    with ProcessPoolExecutor(options.jobs) as pool:
        measured = partial(pool.submit, partial(measure, folder=options.data))
        for _ in missing_runs(known["runs"], keys, items, measured):
            store(known["runs"], options.out)
    table(known["runs"])


if __name__ == "__main__":
    main()
