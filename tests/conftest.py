"""Options of the suite, and one thread for each worker."""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before torch is imported: there is a worker for each core, and threads of several workers wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser):
    parser.addoption("--tally", metavar="FILE", default=None, help="add the counts of the breaking tests to FILE")
