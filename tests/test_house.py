"""What holds for the package as a whole."""

from __future__ import annotations

import subprocess
import sys

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
    assert set(sepsa.__all__) == {"RLS", "SepSA", "__version__"}
    assert all(hasattr(sepsa, name) for name in sepsa.__all__)
