"""A dataflow of Bytewax with a learner for each key: killed, it resumes from its recovery store with the same bits.

    python examples/engines/bytewax_flow.py

With `python -m bytewax.run examples/engines/bytewax_flow:flow -r STORE -s 10 -b 0` Bytewax runs it in its own way.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import bytewax.operators as op
import numpy as np
from bytewax.connectors.files import FileSink
from bytewax.dataflow import Dataflow
from bytewax.recovery import RecoveryConfig, init_db_dir
from bytewax.testing import TestingSource, cluster_main

from sepsa.engines.bytewax import learn
from sepsa.river import SepSARegressor

SHOPS = ("north", "south", "west")


def samples(count: int) -> list[tuple[str, tuple[dict[str, float], float]]]:
    rng = np.random.default_rng(0)
    rows = ((i, rng.normal(size=2).tolist()) for i in range(count))
    return [(SHOPS[i % 3], ({"a": a, "b": b}, a * (i % 3) + b + 20)) for i, (a, b) in rows]


def flow(output: Path, killed_at: int | None = None) -> Dataflow:
    """Return a dataflow that writes predictions to a file; the process is killed at this sample."""

    def kill(item: Any) -> Any:
        nonlocal killed_at
        killed_at = None if killed_at is None else killed_at - 1
        if killed_at == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    dataflow = Dataflow("shops")
    keyed = op.input("input", dataflow, TestingSource(samples(300), batch_size=10))
    told = learn("learn", keyed, SepSARegressor(hidden=(), seed=0))
    lines = op.map(
        "lines", op.map("kill", told, kill), lambda item: (item[0], f"{item[0]} {item[1][0]!r} {item[1][1]!r}")
    )
    op.output("output", lines, FileSink(output))
    return dataflow


def run(store: Path, output: Path, killed_at: int | None) -> None:
    if not store.exists():
        store.mkdir()
        init_db_dir(store, 1)
    config = RecoveryConfig(store, backup_interval=timedelta(0))
    cluster_main(flow(output, killed_at), [], 0, epoch_interval=timedelta(0), recovery_config=config)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        killed, whole = Path(folder, "killed"), Path(folder, "whole")
        done = subprocess.run([sys.executable, __file__, killed, killed.with_suffix(".txt"), "170"])
        assert done.returncode == -signal.SIGKILL
        print(f"killed after {len(killed.with_suffix('.txt').read_text().splitlines())} predictions")
        for store in (killed, whole):
            run(store, store.with_suffix(".txt"), None)
        told = [store.with_suffix(".txt").read_text().splitlines() for store in (killed, whole)]
    assert len(told[1]) == 300
    for shop in SHOPS:
        assert [line for line in told[0] if line.startswith(shop)] == [
            line for line in told[1] if line.startswith(shop)
        ]
    print("the predictions of the killed process and of one that was not killed have the same bits")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
