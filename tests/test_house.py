"""What holds for the package as a whole."""

from __future__ import annotations

import subprocess
import sys

import pytest

import sepsa

OUTSIDE = """
import sys
before = set(sys.modules)
import torch, numpy
with_torch = set(sys.modules)
import sepsa
new = {name.split('.')[0] for name in set(sys.modules) - with_torch}
print(sorted(new - set(sys.stdlib_module_names)))
"""


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_import_needs_torch_and_numpy_alone():
    assert python(OUTSIDE) == "['sepsa']"


def test_the_public_names():
    assert set(sepsa.__all__) == {
        *("FourierFeatures", "HeadSolver", "NotFinite", "OnlineLBFGS", "RLS", "STORM", "SepSA", "SoftmaxNewton"),
        *("LogisticNewton", "PerOutput", "__version__", "observe"),
    }
    assert all(hasattr(sepsa, name) for name in sepsa.__all__)


WITHOUT = """
import sys
sys.modules[{missing!r}] = None
import sepsa
try:
    sepsa.SepSARegressor
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.mark.parametrize("missing", ["numba", "sklearn"])
def test_what_an_extra_brings_is_imported_when_asked_for(missing):
    assert {"SepSAClassifier", "SepSARegressor"} <= set(dir(sepsa))
    assert sepsa.SepSARegressor.__name__ == "SepSARegressor"
    said = python(WITHOUT.format(missing=missing))
    assert said == f"sepsa.SepSARegressor needs {missing}, which is not installed: pip install 'sepsa[stream]'"


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="module 'sepsa' has no attribute 'SepSATransformer'"):
        sepsa.SepSATransformer  # noqa: B018
