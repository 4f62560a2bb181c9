"""Dask's workers learn a table in Parquet shards in parallel; the merged head equals that of one process.

    python examples/dask_shards.py

Each worker learns its shards, row group by row group, and returns what it learned as a few kilobytes, for any number
of rows. Merging is exact, so the order in which workers finish does not matter.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from dask.distributed import Client, LocalCluster, as_completed
from torch import nn

from sepsa import RLS
from sepsa.heads import Delta

COLUMNS = [f"x{i}" for i in range(12)]
# Constants that every worker knows: scaling by a worker's own rows would give each worker another regression.
SCALES = np.array([10.0**power for power in (-2, 0, 3)] * 4)


def write_shards(folder: Path, shards: int, rows: int) -> list[Path]:
    paths = [folder / f"part-{shard:03}.parquet" for shard in range(shards)]
    truth = np.random.default_rng(0).normal(size=len(COLUMNS))
    for shard, path in enumerate(paths):
        rng = np.random.default_rng([1, shard])
        x = rng.normal(size=(rows - 100 * shard, len(COLUMNS)))  # shards may differ in size
        y = x @ truth + 5 + 0.1 * rng.normal(size=len(x))
        table = pyarrow.table(dict(zip(COLUMNS, (x * SCALES).T, strict=True)) | {"y": y})
        pyarrow.parquet.write_table(table, path, row_group_size=1000)
    return paths


def new_head() -> RLS:
    """Return the initial head, which must be the same on every worker."""
    linear = nn.Linear(len(COLUMNS), 1, dtype=torch.float64)
    for parameter in linear.parameters():
        nn.init.zeros_(parameter)
    return RLS(ridge=1e-3).bind(linear)


def learn_shard(solver: RLS, path: Path) -> None:
    for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1000):
        table = torch.from_numpy(np.stack([column.to_numpy() for column in batch.columns], 1))
        solver.update(table[:, :-1] / torch.from_numpy(SCALES), table[:, -1:])


def learned_from(paths: list[Path]) -> bytes:
    """Learn these files and return the head's changes as bytes."""
    solver = new_head()
    for path in paths:
        learn_shard(solver, path)
    return solver.delta_since().to_bytes()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = write_shards(Path(folder), shards=8, rows=4000)
        together, alone = new_head(), new_head()
        with (
            LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None, local_directory=folder) as cluster,
            Client(cluster) as client,
        ):
            tasks = client.map(learned_from, [paths[i : i + 2] for i in range(0, len(paths), 2)])
            for _, blob in as_completed(tasks, with_results=True):
                together.merge(Delta.from_bytes(blob))
                print(f"merged {len(blob)} bytes: {together.samples:g} rows in all")
        for path in paths:
            learn_shard(alone, path)

    def weights(solver: RLS) -> torch.Tensor:
        assert solver.linear is not None
        return torch.cat([solver.linear.weight.detach()[0], solver.linear.bias.detach()])

    difference = torch.linalg.vector_norm(weights(together) - weights(alone)) / torch.linalg.vector_norm(weights(alone))
    print(f"relative difference from the head of one process: {difference:.1e}")
    assert together.samples == alone.samples
    assert difference <= 1e-9


if __name__ == "__main__":
    main()
