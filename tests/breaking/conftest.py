"""The breaking suite: a short version runs always, the long one with `-m long`; `--tally` writes its numbers."""

import json
import os
from pathlib import Path

import pytest


@pytest.fixture
def tally(request):
    """Add to a count of the suite: how many cases there were, and how many of them did harm."""
    out = request.config.getoption("--tally")

    def add(what, cases, harm=0, **more):
        if out is None:
            return
        with Path(out).open("a", encoding="utf-8") as lines:  # one line a test: workers may write beside each other
            lines.write(json.dumps({"what": what, "cases": cases, "harm": harm, **more}) + "\n")
            lines.flush()
            os.fsync(lines.fileno())

    return add
