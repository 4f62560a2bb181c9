"""Spark: tables with several targets, empty partitions and nulls; streams with keys that are numbers, and gaps."""

import os
import shutil
import sys

import numpy as np
import pytest
import torch

from sepsa import SepSARegressor
from sepsa.engines.shards import as_rows, zero_head
from sepsa.engines.spark import fit_head, learn_by_key

pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'sepsa[spark]'")
pandas = pytest.importorskip("pandas", reason="pandas is not installed: pip install 'sepsa[spark]'")
if shutil.which("java") is None:
    pytest.skip("Spark needs a Java runtime: .ci/engines installs it", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")  # of Spark, about pandas and about its own sockets


@pytest.fixture(scope="module")
def spark():
    from pyspark.sql import SparkSession

    os.environ |= {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(sys.path)}
    settings = {"spark.ui.enabled": False, "spark.sql.shuffle.partitions": 2, "spark.log.level": "OFF"}
    settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    session = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
    yield session
    session.stop()


def frame(rows):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 2))
    return pandas.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": x.sum(1), "z": x[:, 0] - 3 + rng.normal(size=rows)})


def test_a_table_with_several_targets_and_empty_partitions(spark):
    data = frame(30)
    table = spark.createDataFrame(data.assign(part=0)).repartition(4, "part")  # all rows in one of four partitions
    head = fit_head(table, ["a", "b"], ["y", "z"], ridge=0.1)
    alone = zero_head(2, 2, ridge=0.1)
    alone.update(as_rows(data[["a", "b"]]), as_rows(data[["y", "z"]]))
    assert head.samples == 30
    for own, other in zip(head.linear.parameters(), alone.linear.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-12)


def test_a_null_in_a_table_is_an_error(spark):
    table = spark.createDataFrame(frame(5).assign(b=[1.0, None, 3.0, 4.0, 5.0]))
    with pytest.raises(Exception, match="features must be finite"):
        fit_head(table, ["a", "b"], ["y"])


def test_a_stream_with_missing_values_and_keys_that_are_numbers(spark, tmp_path):
    data = frame(40).assign(key=np.arange(40) % 3, number=np.arange(40))
    data.loc[::7, "b"] = np.nan
    (tmp_path / "input").mkdir()
    data.sample(frac=1, random_state=0).to_parquet(tmp_path / "input" / "0.parquet", index=False)  # in no order
    schema = spark.read.parquet(str(tmp_path / "input")).schema
    stream = spark.readStream.schema(schema).parquet(str(tmp_path / "input"))
    start = SepSARegressor(hidden_layer_sizes=(), random_state=0)
    told = learn_by_key(stream, "key", ["a", "b"], "y", "number", start)
    query = told.writeStream.format("memory").queryName("told").option("checkpointLocation", str(tmp_path / "saved"))
    query.trigger(availableNow=True).start().awaitTermination()
    found = spark.table("told").toPandas().sort_values("number")
    assert list(found) == ["key", "number", "prediction", "y"]
    for key, own in data.groupby("key"):
        expected = SepSARegressor(hidden_layer_sizes=(), random_state=0).prequential(own[["a", "b"]], own["y"])
        np.testing.assert_array_equal(found.loc[found["key"] == key, "prediction"], expected)
