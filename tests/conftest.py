"""Options of the suite, and one thread for each worker."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from preloaded import preloaded

WORKER = "PYTEST_XDIST_WORKER" in os.environ
if WORKER:
    # Before torch is imported: there is a worker for each core, and threads of several workers wait for each other.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")


@pytest.fixture(autouse=True)
def one_thread():
    """One thread for each test of a worker, whatever a package that an earlier test imported has set."""
    torch = sys.modules.get("torch")
    if WORKER and torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def preloaded_bin():
    """The folder of `python` and `sepsa` that start without an import of torch: see preloaded.py."""
    with preloaded() as folder:
        yield folder


@pytest.fixture(scope="session")
def notebooks():
    """docs/notebooks.py"""
    path = Path(__file__).parents[1] / "docs" / "notebooks.py"
    spec = importlib.util.spec_from_file_location("notebooks", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pytest_addoption(parser):
    parser.addoption("--tally", metavar="FILE", default=None, help="add the counts of the breaking tests to FILE")


LONGEST = {
    "test_distributed.py",
    "test_examples.py",
    "test_kills.py",
    "test_runner.py",
    "test_tutorials.py",
}


def pytest_collection_modifyitems(items):
    """Files with the longest tests first, so that no worker begins one of them when the others have nothing left."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
