"""River's models where River is installed; else classes that skip the test which makes one.

River asks for numpy 2.2.5, more than sepsa does; a module has tests that need none of it beside those.
"""

import importlib.util

import pytest

THERE = importlib.util.find_spec("river") is not None
REASON = "River is not installed: it asks for numpy 2.2.5"

if THERE:
    from sepsa.river import Delayed, SepSAClassifier, SepSAMultiTargetRegressor, SepSARegressor
else:

    class Absent:
        def __new__(cls, *_, **__):
            pytest.skip(REASON)

    class Delayed(Absent): ...

    class SepSAClassifier(Absent): ...

    class SepSAMultiTargetRegressor(Absent): ...

    class SepSARegressor(Absent): ...


__all__ = ["REASON", "THERE", "Delayed", "SepSAClassifier", "SepSAMultiTargetRegressor", "SepSARegressor"]
