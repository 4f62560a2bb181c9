"""Bytewax: each key learns as a model of its own does, and resumes from the recovery store."""

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


def start():
    return SepSARegressor(hidden=(), seed=0)


def expected():
    """The predictions of a model for each key, and the targets."""
    models, told = {}, []
    for key, (x, y) in ROWS:
        model = models.setdefault(key, start())
        told.append((key, (model.predict_one(x), y)))
        if y is not None:
            model.learn_one(x, y)
    return told


def told_by(source, **options):
    told = []
    flow = Dataflow("test")
    keyed = operators.input("input", flow, source)
    operators.output("output", learn("learn", keyed, start()), TestingSink(told))
    run_main(flow, **options)
    return by_key(told)


def by_key(told):
    """What was told of each key, in order; Bytewax learns the rows of a batch key by key."""
    return {name: [value for key, value in told if key == name] for name in ("key 0", "key 1", "key 2")}


def test_each_key_learns_as_a_model_of_its_own():
    assert told_by(TestingSource(ROWS, batch_size=7)) == by_key(expected())
