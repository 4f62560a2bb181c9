"""Options of the suite."""

from __future__ import annotations


def pytest_addoption(parser):
    parser.addoption("--tally", metavar="FILE", default=None, help="add the counts of the breaking tests to FILE")
