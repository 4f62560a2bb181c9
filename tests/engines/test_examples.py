"""Every example of an engine runs as a reader would run it; each compares with one process and survives a kill."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "engines"
NEEDED = {  # the packages of each example
    "bytewax_flow": ("bytewax", "river"),
    "flower_clients": ("flwr", "ray"),
    "kafka_topic": ("confluent_kafka", "river"),
    "ray_parts": ("ray",),
    "ray_train": ("ray",),
    "spark_table": ("pyspark",),
}


def test_every_example_is_known():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(NEEDED)


@pytest.mark.parametrize("name", NEEDED)
def test_example(name, tmp_path):
    for package in NEEDED[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: .ci/engines installs it")
    if name.startswith("spark") and shutil.which("java") is None:
        pytest.skip("Spark needs a Java runtime: .ci/engines installs it")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"same bits|\de-1\d from", done.stdout)
