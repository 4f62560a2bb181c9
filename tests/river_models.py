"""River's models where River is installed, else classes that skip the test which makes one; samples for them.

River asks for numpy 2.2.5, more than sepsa does; a module has tests that need none of it beside those.
"""

import importlib.util
import math

import numpy as np
import pytest

from sepsa.learner.stream_learner import WARM_UP

THERE = importlib.util.find_spec("river") is not None
REASON = "River is not installed: it asks for numpy 2.2.5"

if THERE:
    from sepsa.river import Delayed as Delayed
    from sepsa.river import SepSAClassifier, SepSAMultiTargetRegressor, SepSARegressor
else:

    class Absent:
        def __new__(cls, *_, **__):
            pytest.skip(REASON)

    class Delayed(Absent): ...

    class SepSAClassifier(Absent): ...

    class SepSAMultiTargetRegressor(Absent): ...

    class SepSARegressor(Absent): ...


MODEL_TYPES = (SepSARegressor, SepSAClassifier, SepSAMultiTargetRegressor)
SMALL = {"hidden": (5,), "seed": 0}


def stream(n, model_type=SepSARegressor, seed=0, names="abc"):
    """n samples whose target is a function of the features."""
    rng = np.random.default_rng(seed)
    for _ in range(n):
        x = {name: float(value) for name, value in zip(names, rng.normal(5, 3, len(names)), strict=True)}
        total = math.sin(x["a"]) + x["b"]
        y = {SepSARegressor: total, SepSAClassifier: "high" if total > 5 else "low"}
        yield x, y.get(model_type, {"sum": total, "a": 2 * x["a"]})


def trained(model_type, n=WARM_UP + 20, **options):
    model = model_type(**SMALL | options)
    for x, y in stream(n, model_type):
        model.learn_one(x, y)
    return model


def inside(model):
    """All that a model knows, bit by bit."""
    inputs, outputs, body, _ = model._learner
    rest = (inputs, outputs, model._target_name)
    if body is None:
        return (*rest, None)
    arrays = (body.engine.memory.vector, body.offset, *body._first)
    return (*rest, body.rows, *(array.tobytes() for array in arrays))
