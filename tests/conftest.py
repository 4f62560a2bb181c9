"""Options of the suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="run the long breaking tests too")
    parser.addoption("--tally", metavar="FILE", default=None, help="add the counts of the breaking tests to FILE")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--long"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="takes minutes: run with --long"))
