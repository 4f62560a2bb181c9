"""A stream without end: its memory does not grow, and its state stays finite."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from sepsa.learner.columns.reader import Column
from sepsa.shell.cells import RowBlock
from sepsa.shell.model import TableModel
from sepsa.states.tree import tensors_of

ROWS = 10_000  # a block


def resident():
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def block(rng, first):
    """Numbers, one of which walks away, texts that never repeat, gaps and outliers."""
    X = rng.standard_t(3, size=(ROWS, 3))
    X[:, 2] += first / 1e6
    X[rng.random(ROWS) < 0.01, 1] = np.nan
    texts = [f"id-{first + i}" for i in range(100)]
    y = X[:, 0] * np.sin(first / 2e6) + np.nan_to_num(X[:, 1]) + rng.normal(size=ROWS)
    columns = {
        "a": Column(X[:, 0]), "b": Column(X[:, 1]), "walk": Column(X[:, 2]), "y": Column(y),
        "id": Column(np.full(ROWS, np.nan), rng.integers(0, 100, ROWS).astype(np.int32), texts),
    }  # fmt: skip
    return RowBlock(columns, np.arange(first + 1, first + ROWS + 1), lambda i: "", [], {"row": first + ROWS})


def learn(rows, categories):
    rng = np.random.default_rng(0)
    model = TableModel("y", forgetting=0.9999, categories=categories)
    sizes = []
    for first in range(0, rows, ROWS):
        model.learn(block(rng, first))
        if first >= rows // 10:
            sizes.append(resident())
    assert model.trace.rows + model.quarantined == rows
    assert all(np.isfinite(array).all() for array in tensors_of(model.state_dict()) if array.dtype.kind == "f")
    return model, (sizes[-1] - sizes[0]) / 2**20


@pytest.mark.parametrize(("rows", "categories"), [(60_000, 4), pytest.param(10_000_000, 2, marks=pytest.mark.long)])
def test_memory_and_state_of_a_stream(rows, categories, tally):
    model, grown = learn(rows, categories)
    tally("samples of one stream", rows, grown_MiB=round(grown, 1))
    assert grown < 30
    assert model.quarantined == 0
    assert model.trace.mean < 2.5
