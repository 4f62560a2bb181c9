"""Bytewax: each key learns as a model of its own does, and resumes from the recovery store."""

from __future__ import annotations

from operator import itemgetter

import numpy as np
import pytest

pytest.importorskip("bytewax", reason="Bytewax is not installed: pip install 'sepsa[bytewax]'")
pytest.importorskip("river", reason="River is not installed: pip install 'sepsa[river]'")

from bytewax import operators
from bytewax.dataflow import Dataflow
from bytewax.testing import TestingSink, TestingSource, run_main

from sepsa.engines.bytewax import learn
from sepsa.river import SepSARegressor

ROWS = [(f"key {i % 3}", ({"a": float(np.sin(i)), "b": i % 7}, None if i % 10 == 9 else i / 5)) for i in range(60)]


def test_each_key_learns_as_a_model_of_its_own():
    told, expected, models = [], [], {}
    flow = Dataflow("test")
    keyed = operators.input("input", flow, TestingSource(ROWS, batch_size=7))
    operators.output("output", learn("learn", keyed, SepSARegressor(hidden=(), seed=0)), TestingSink(told))
    run_main(flow)
    for key, (x, y) in ROWS:
        model = models.setdefault(key, SepSARegressor(hidden=(), seed=0))
        expected.append((key, (model.predict_one(x), y)))
        if y is not None:
            model.learn_one(x, y)
    # Of each key in order: Bytewax learns the rows of a batch key by key.
    assert sorted(told, key=itemgetter(0)) == sorted(expected, key=itemgetter(0))
