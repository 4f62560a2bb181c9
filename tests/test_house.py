"""What holds for the package as a whole."""

from __future__ import annotations

import subprocess
import sys

import pytest

import sepsa

EXTRAS = ("numba", "sklearn")
NEW_PROCESS = f"""
import os, sys
import torch, numpy
with_torch = set(sys.modules)
import sepsa
new = {{name.split('.')[0] for name in set(sys.modules) - with_torch}}
print(sorted(new - set(sys.stdlib_module_names)), flush=True)
for missing in {EXTRAS}:
    if os.fork() == 0:
        sys.modules[missing] = None
        try:
            sepsa.SepSARegressor
        except ModuleNotFoundError as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def said():
    """What one new process prints: the modules that `import sepsa` brings, then an error for each missing extra."""
    done = subprocess.run([sys.executable, "-c", NEW_PROCESS], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_import_needs_torch_and_numpy_alone(said):
    assert said[0] == "['sepsa']"


def test_the_public_names():
    assert set(sepsa.__all__) == {
        *("FourierFeatures", "HeadSolver", "NotFinite", "OnlineLBFGS", "RLS", "SepSA", "SoftmaxNewton"),
        *("LogisticNewton", "PerOutput", "__version__", "muon", "observe"),
    }
    assert all(hasattr(sepsa, name) for name in sepsa.__all__)


def test_what_an_extra_brings_is_imported_when_asked_for(said):
    assert {"SepSAClassifier", "SepSARegressor"} <= set(dir(sepsa))
    assert sepsa.SepSARegressor.__name__ == "SepSARegressor"
    assert said[1:] == [
        f"sepsa.SepSARegressor needs {missing}, which is not installed: pip install 'sepsa[stream]'"
        for missing in EXTRAS
    ]


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="module 'sepsa' has no attribute 'SepSATransformer'"):
        sepsa.SepSATransformer  # noqa: B018
    with pytest.raises(AttributeError, match=r"sepsa\.STORM is gone .* use torch\.optim\.Adam"):
        sepsa.STORM  # noqa: B018
