"""Options and fixtures of the suite."""

import os
import sys

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
    parser.addoption("--perturb", action="store_true", help="other last digits of random data: tests/portable.py")
    parser.addoption("--tally", metavar="FILE", default=None, help="add the counts of the breaking tests to FILE")


def pytest_configure(config):
    if config.getoption("--perturb"):
        portable.perturb()


LONGEST = {"test_distributed.py", "test_examples.py", "test_kills.py", "test_runner.py", "test_tutorials.py"}


def pytest_collection_modifyitems(items):
    """Files with the longest tests first, so that no worker begins one of them when the others have nothing left."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
