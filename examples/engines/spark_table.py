"""Spark learns a table in its partitions, and a stream with one learner for each key that survives a kill.

python examples/engines/spark_table.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas
import torch
from pyspark.sql import DataFrame, SparkSession

from sepsa import SepSARegressor
from sepsa.engines.shards import as_rows, zero_head
from sepsa.engines.spark import fit_head, learn_by_key

COLUMNS = ["a", "b", "c"]
SCHEMA = "sensor string, number long, a double, b double, c double, y double"


def session() -> SparkSession:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the workers' Python
    built = SparkSession.builder.master("local[2]").appName("sepsa").config("spark.ui.enabled", False)
    settings = {"spark.sql.shuffle.partitions": 2, "spark.driver.bindAddress": "127.0.0.1"}
    for name, value in (settings | {"spark.driver.host": "127.0.0.1", "spark.log.level": "ERROR"}).items():
        built = built.config(name, value)
    return built.getOrCreate()


def rows(part: int) -> pandas.DataFrame:
    """Return 60 rows, whose relationship differs between two sensors."""
    rng = np.random.default_rng(part)
    x = rng.normal(size=(60, 3))
    sensor = rng.integers(2, size=60)
    y = x @ [1.0, 2.0, 3.0] + 10 * sensor * x[:, 0] + 5
    number = np.arange(60 * part, 60 * part + 60)
    return pandas.DataFrame(
        {"sensor": [f"s{s}" for s in sensor], "number": number, **dict(zip("abc", x.T, strict=True)), "y": y}
    )


def table(spark: SparkSession) -> None:
    """Compare the merged head with that of one process."""
    frames = [rows(part) for part in range(4)]
    head = fit_head(spark.createDataFrame(pandas.concat(frames)).repartition(3), COLUMNS, ["y"], ridge=1e-3)
    alone = zero_head(3, ridge=1e-3)
    for frame in frames:
        alone.update(as_rows(frame[COLUMNS]), as_rows(frame[["y"]]))
    own, other = (torch.cat([h.linear.weight[0], h.linear.bias]).detach() for h in (head, alone))  # type: ignore[union-attr]
    difference = torch.linalg.vector_norm(own - other) / torch.linalg.vector_norm(other)
    print(f"table: {head.samples:g} rows, {difference:.1e} from the head of one process")
    assert head.samples == 240
    assert difference <= 1e-9


def stream(folder: Path, killed_at: int | None) -> None:
    """Learn the files of folder/input, one in each micro-batch, the process killed inside micro-batch `killed_at`."""
    spark = session()
    source = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(folder / "input"))
    start = SepSARegressor(hidden_layer_sizes=(), random_state=0)
    told = learn_by_key(source, "sensor", COLUMNS, "y", "number", start)

    def write(batch: DataFrame, number: int) -> None:
        batch.toPandas().to_parquet(folder / f"told-{number}.parquet")
        if number == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    query = told.writeStream.foreachBatch(write).option("checkpointLocation", str(folder / "checkpoint"))
    query.trigger(availableNow=True).start().awaitTermination()
    spark.stop()


def predictions(folder: Path) -> pandas.DataFrame:
    told = pandas.concat([pandas.read_parquet(path) for path in folder.glob("told-*.parquet")])
    return told.sort_values("number").reset_index(drop=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folders = killed, _ = Path(name, "killed"), Path(name, "whole")
        for folder in folders:
            (folder / "input").mkdir(parents=True)
            for part in range(4):
                rows(part).to_parquet(folder / "input" / f"part-{part}.parquet", index=False)
                os.utime(folder / "input" / f"part-{part}.parquet", (time.time() + part, time.time() + part))
        done = subprocess.run([sys.executable, __file__, killed, "2"])
        assert done.returncode == -signal.SIGKILL
        print(f"stream: killed in micro-batch 2 of {len(list((killed / 'input').iterdir()))}")
        for folder in folders:
            stream(folder, None)
        told = [predictions(folder) for folder in folders]
        pandas.testing.assert_frame_equal(*told, check_exact=True)
    for sensor, own in (
        told[0].merge(pandas.concat(map(rows, range(4)))[["number", *COLUMNS]], on="number").groupby("sensor")
    ):
        alone = SepSARegressor(hidden_layer_sizes=(), random_state=0)
        parts = [frame for _, frame in own.groupby(own["number"] // 60)]
        expected = np.concatenate([alone.prequential(part[COLUMNS].to_numpy(), part["y"].to_numpy()) for part in parts])
        assert (expected == own["prediction"]).all(), sensor
    table(session())
    print("stream: the same bits as without the kill, and as one process with a learner for each key")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        stream(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        main()
