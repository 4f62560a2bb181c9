"""Every example of an engine runs as a reader would run it; each compares with one process and survives a kill."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "engines"
BEHIND = {"sepsa.river": "river", "flwr.simulation": "ray"}  # what these modules import when they are used


def needed(path):
    """Yield the packages that an example imports."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for name in [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]:
                yield name.partition(".")[0]
                yield BEHIND.get(name, "sepsa")


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_example(name, tmp_path):
    for package in needed(FOLDER / f"{name}.py"):
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
