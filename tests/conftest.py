"""Options and fixtures of the suite, and which of many cases of one property run."""

import json
import os
import sys
import zlib
from functools import cache
from pathlib import Path

import hypothesis
import pytest

import portable
from preloaded import preloaded

# Before torch is imported: there is a worker for each core, and threads of several workers wait for each other.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")


# The same examples in every run, however slow the machine is; `pytest --hypothesis-profile=default` looks for others.
hypothesis.settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("suite")


@pytest.fixture(autouse=True)
def as_many_threads():
    """The threads of the environment for each test, whatever a package that an earlier test imported has set."""
    torch, threads = sys.modules.get("torch"), int(os.environ["OMP_NUM_THREADS"])
    if torch is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def preloaded_bin():
    """The folder of `python` and `sepsa` that start without an import of torch: see preloaded.py."""
    with preloaded() as folder:
        yield folder


def pytest_addoption(parser):
    parser.addoption("--one-in", type=int, default=4, help="of tests marked `many` run one in so many; 1: all of them")
    parser.addoption("--perturb", action="store_true", help="other last digits of random data: tests/portable.py")
    parser.addoption("--tally", metavar="FILE", default=None, help="add the counts of the breaking tests to FILE")


def pytest_configure(config):
    if config.getoption("--perturb"):
        portable.perturb()


LONGEST = {"test_distributed.py", "test_examples.py", "test_kills.py", "test_runner.py", "test_tutorials.py"}


def pytest_collection_modifyitems(config, items):
    """Draw among tests marked `many`, unless a test is named; files with the longest tests come first.

    So no worker begins one of the long tests when the others have nothing left.
    """
    one_in = config.getoption("--one-in")
    if not any("::" in argument for argument in config.args):
        left_out = [item for item in items if item.get_closest_marker("many") and not drawn(item.nodeid, one_in)]
        config.hook.pytest_deselected(items=left_out)
        kept = {*items} - {*left_out}
        items[:] = [item for item in items if item in kept]
    items.sort(key=lambda item: item.path.name not in LONGEST)


def drawn(nodeid, one_in):
    """Whether a test runs: by a hash of its name, or because it alone is known to notice a mutant."""
    return zlib.crc32(nodeid.encode()) % one_in == 0 or nodeid in killers()


@cache
def killers():
    """The tests that benchmarks/reliability/mutants.json names."""
    path = Path(__file__).parents[1] / "benchmarks" / "reliability" / "mutants.json"
    results = json.loads(path.read_text(encoding="utf-8"))["mutants"] if path.exists() else {}
    return {result["killed by"] for found in results.values() for result in found.values()}
