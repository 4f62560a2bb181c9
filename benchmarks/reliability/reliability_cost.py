"""What safety costs: `sepsa stream` over a million rows, and a checkpoint beside a plain write of the same bytes.

    python benchmarks/reliability/reliability_cost.py [--rows 1000000] [--rounds 5]

Writes reliability_cost.json; run it on a quiet machine.

`sepsa stream` runs in a process of its own on one core, parsing and predictions included, from a cold start; rows a
second are those of the whole process but for the import of its libraries, which is measured beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch
from torch import nn

import sepsa
from benchmarks.measure import machine

COLUMNS = 20


def write_tables(folder: Path, rows: int) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(rows, COLUMNS - 1)).round(6)
    y = (X @ rng.normal(size=COLUMNS - 1) + np.sin(3 * X[:, 0]) + 0.1 * rng.normal(size=rows)).round(6)
    table = pa.table({**{f"x{i}": X[:, i] for i in range(COLUMNS - 1)}, "y": y})
    pyarrow.csv.write_csv(table, folder / "t.csv")
    pq.write_table(table, folder / "t.parquet")


def timed(arguments: list[str]) -> dict[str, float]:
    """Wall and processor time and peak memory of a process on one core."""
    core = min(os.sched_getaffinity(0))
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1", "LOKY_MAX_CPU_COUNT": "1"},
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )  # fmt: skip
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = status
    assert status == 0, arguments
    return {
        "seconds": time.perf_counter() - start,
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "peak_MB": usage.ru_maxrss / 1000,
    }


def stream(folder: Path, rows: int, rounds: int) -> dict[str, object]:
    base = ["-m", "sepsa", "stream", "--target", "y", "--forgetting", "1", "--predictions", str(folder / "out.csv")]
    saving = ["--checkpoint", str(folder / "m.sepsa")]
    (folder / "few.csv").write_text("".join((folder / "t.csv").open().readlines(40_000)[:300]))
    kinds = {
        "csv": [*base, str(folder / "t.csv")],
        "parquet": [*base, str(folder / "t.parquet")],
        "csv with checkpoints": [*base, *saving, str(folder / "t.csv")],
    }
    start_up = [*base, str(folder / "few.csv")]
    timed(start_up)  # compiles, if nothing has
    out: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    for _ in range(rounds):
        empty = timed(start_up)
        for name, arguments in kinds.items():
            (folder / "m.sepsa").unlink(missing_ok=True)
            took = timed(arguments)
            took["rows_per_second"] = rows / (took["seconds"] - empty["seconds"])
            took["rows_per_processor_second"] = rows / (took["processor_seconds"] - empty["processor_seconds"])
            took["start_up_seconds"] = empty["seconds"]
            out[name].append(took)
    return {name: {key: summary([t[key] for t in took]) for key in took[0]} for name, took in out.items()}


def checkpoint(folder: Path, rounds: int, p: int = 2048) -> dict[str, object]:
    """Save and load of a head with p features beside a write of the same bytes with fsync."""
    torch.manual_seed(0)
    solver = sepsa.RLS().bind(nn.Linear(p - 1, 10))
    for _ in range(3):
        solver.update(torch.randn(64, p - 1), torch.randn(64, 10))
    other = sepsa.RLS().bind(nn.Linear(p - 1, 10))
    path = folder / "head.sepsa"
    sepsa.save(solver, path)
    data = path.read_bytes()
    times: dict[str, list[float]] = {"write": [], "save": [], "load": []}
    for _ in range(rounds + 1):
        start = time.perf_counter()
        with open(folder / "plain", "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        at_write = time.perf_counter()
        sepsa.save(solver, path)
        at_save = time.perf_counter()
        sepsa.load(path, into=other)
        at_load = time.perf_counter()
        for name, took in (("write", at_write - start), ("save", at_save - at_write), ("load", at_load - at_save)):
            times[name].append(took)
    times = {name: values[1:] for name, values in times.items()}
    ratios = {name: [a / b for a, b in zip(times[name], times["write"], strict=True)] for name in ("save", "load")}
    return {
        "p": p,
        "bytes": len(data),
        "seconds": {name: summary(values) for name, values in times.items()},
        "times_the_write": {name: summary(values) for name, values in ratios.items()},
    }


def summary(values: list[float]) -> dict[str, float]:
    q = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {"median": statistics.median(values), "q25": q[0], "q75": q[2]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_tables(folder, options.rows)
        results = {
            "rows": options.rows,
            "columns": COLUMNS,
            "checkpoint": checkpoint(folder, max(10, options.rounds)),
            "stream": stream(folder, options.rows, options.rounds),
        }
    options.out.write_text(json.dumps(machine() | results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
