"""Ridges of the network's heads in the stream learners by evidence, beside the ridge 10 that they have.

    python benchmarks/real_data.py --export FOLDER                           # once, see there
    python benchmarks/network_ridge.py --data FOLDER --jobs 16               # what the JSON does not hold yet
    python benchmarks/network_ridge.py --table

Every row of a real stream is predicted before it is learned, up to 10,000 rows; the error is the mean absolute error or
the share of wrong labels, by the default learner ("experts") and by its network alone. "ridge 10" is the default.
"evidence κ" changes the ridge of each head exactly after 32, 64, 128, ... rows, within the bounds of
`sepsa.heads.math.evidence`: to κ γ RSS / ((n - γ - 1) |W - prior|²).
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
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
from measure import machine
from real_data import HALVES, NUMBER, STREAMS
from real_streams import Stream
from scipy.linalg import cholesky

from sepsa import SepSAClassifier, SepSARegressor
from sepsa.heads.math import evidence

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
    found = evidence.Evidence(determined, residual, float((off**2).sum()))
    A = np.linalg.inv(B)

    def features() -> evidence.Features:
        variance = np.maximum(A.diagonal() - left, 0.0)[:-1] / n
        size = float(n * ((off**2).sum(0)[:-1] @ variance))
        return evidence.Features(size, float(variance[variance > 0].min(initial=math.inf)), float(variance.max()))

    ridge = float(numbers["ridge"])
    lam = float(numbers["forgetting"])
    best = kappa * evidence.best_ridge(found, ridge / kappa, n, 1 / (1 + lam) if lam < 1 else 1.0, features)
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
            engine = model._learner.engine
            for h in range(len(engine.form.heads)):
                look(engine.memory.of("heads", h), float(value))
    ridges = [float(model._learner.engine.memory("NUMBERS", "heads", h)["ridge"]) for h in range(1)]
    return {"error": float(f"{loss.mean():.5g}"), "rows": stream.rows, "ridge": float(f"{ridges[0]:.3g}")}


def table(runs: list[dict[str, Any]]) -> None:
    """The mean of log(error / that of ridge 10) over the streams of a half, and how many are 1 % ahead and behind."""
    errors = {(run["stream"], run["form"], run["method"]): run["error"] for run in runs}
    print("| learner | ridges |", " | ".join(f"{half}: mean; ahead, behind" for half in HALVES), "|")
    print("|---|---|" + "--:|" * len(HALVES))
    for form, method in itertools.product(FORMS, METHODS[1:]):
        cells = []
        for half in HALVES:
            names = [name for name, data in STREAMS.items() if data.half == half and (name, form, method) in errors]
            gains = [
                math.log(max(errors[name, form, method], 1e-9) / max(errors[name, form, BASE], 1e-9))
                for name in names
                if (name, form, BASE) in errors
            ]
            ahead, behind = sum(gain < -0.01 for gain in gains), sum(gain > 0.01 for gain in gains)
            cells.append(f"{statistics.fmean(gains):+.4f}; {ahead}, {behind} of {len(gains)}" if gains else "")
        print(f"| {form} | {method} |", " | ".join(cells), "|")


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
    done = {tuple(one[key] for key in keys) for one in known["runs"]}
    items = [] if options.table else list(itertools.product(options.streams, FORMS, METHODS))
    with ProcessPoolExecutor(options.jobs) as pool:
        waiting = {pool.submit(measure, item, options.data): item for item in items if item not in done}
        for future in as_completed(waiting):
            result = dict(zip(keys, waiting[future], strict=True)) | future.result()
            known["runs"].append(result)
            print(result, flush=True)
            options.out.write_text(json.dumps({"machine": machine(), "runs": known["runs"]}) + "\n", encoding="utf-8")
    table(known["runs"])


if __name__ == "__main__":
    main()
