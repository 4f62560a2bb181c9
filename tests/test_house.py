"""What holds for the package as a whole."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sepsa
from private_names import readings

MOST_PRIVATE = 40  # names with an underscore that another file reads, in what trains: let it fall
# What is asked for, the package that is not installed, and the extra that brings it.
EXTRAS = (("sepsa.SepSARegressor", "sklearn", "stream"), ("sepsa.river", "river", "river"))
NEW_PROCESS = f"""
import os, sys
import sepsa
assert 'torch' not in sys.modules
if os.fork() == 0:
    import numpy, pyarrow
    from sepsa.shell import cells
    from sepsa.shell import command
    cells.filled(pyarrow.nulls(2, pyarrow.int8()), numpy.int8(0))
    found = {{'pandas'}} & {{*sys.modules}}
    from sepsa.interfaces import sklearn
    from sepsa import forecast
    sepsa.save, sepsa.load
    print(sorted(found | {{'numba', 'torch'}} & {{*sys.modules}}), flush=True)
    sys.modules['torch'] = None
    try:
        sepsa.SepSA
    except ModuleNotFoundError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
import torch, numpy
with_torch = set(sys.modules)
import sepsa.training.optimizer
sepsa.SepSA
new = {{name.split('.')[0] for name in set(sys.modules) - with_torch}}
print(sorted(new - set(sys.stdlib_module_names)), flush=True)
for name, missing, _ in {EXTRAS}:
    if os.fork() == 0:
        sys.modules[missing] = None
        try:
            __import__(name) if name == 'sepsa.river' else sepsa.SepSARegressor
        except ModuleNotFoundError as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def said():
    """What one new process prints: what streams and `import sepsa` bring, then an error for each missing extra."""
    done = subprocess.run([sys.executable, "-c", NEW_PROCESS], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_what_trains_torch_models_needs_torch_and_numpy_alone(said):
    assert said[1] == "sepsa.SepSA needs torch, which is not installed: pip install 'sepsa[torch]'"
    assert said[2] == "['sepsa']"


def test_streams_tables_and_checkpoints_need_no_numba_torch_or_pandas(said):
    assert said[0] == "[]"


def test_the_public_names():
    assert set(sepsa.__all__) == {
        *("FourierFeatures", "HeadSolver", "NotFinite", "OnlineLBFGS", "RLS", "SepSA"),
        *("LogisticNewton", "PerOutput", "SoftmaxNewton", "__version__", "muon", "observe"),
    }
    assert all(hasattr(sepsa, name) for name in sepsa.__all__)


def test_what_an_extra_brings_is_imported_when_asked_for(said):
    assert {"SepSAClassifier", "SepSARegressor"} <= set(dir(sepsa))
    assert sepsa.SepSARegressor.__name__ == "SepSARegressor"
    assert said[3:] == [
        f"{name} needs {missing}, which is not installed: pip install 'sepsa[{extra}]'"
        for name, missing, extra in EXTRAS
    ]


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="module 'sepsa' has no attribute 'SepSATransformer'"):
        sepsa.SepSATransformer  # noqa: B018


# ---------------------------------------------------------------------- what holds for every file

LONGEST = 60  # lines of a function that still fits on a screen
LONG = {  # functions that are to be divided, and one whose parameters, with their documentation, take 50 lines
    "sepsa.learner.arithmetic.head.rank_one",
    "sepsa.interfaces.river.__init__",
}


@pytest.fixture(scope="module")
def trees():
    """The modules of the package by name, parsed."""
    source, found = Path(sepsa.__file__).parent, {}
    for path in source.rglob("*.py"):
        name = ".".join(("sepsa", *path.relative_to(source).with_suffix("").parts))
        found[name.removesuffix(".__init__")] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def test_a_function_fits_on_a_screen(trees):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = {
        f"{name}.{node.name}"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, kinds) and node.end_lineno - node.lineno >= LONGEST
    }
    assert found <= LONG


def imported(name, trees):
    """The modules of sepsa that a module imports, at any place, also for types alone."""
    found = set()
    for node in ast.walk(trees[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {part if part in trees else node.module for part in parts}
    return found & set(trees)


def test_no_module_imports_itself_through_others(trees):
    left = {name: imported(name, trees) for name in trees}
    while done := {name for name, others in left.items() if not others & set(left)}:
        left = {name: others for name, others in left.items() if name not in done}
    while loose := {name for name in left if not any(name in others for others in left.values())}:
        left = {name: others for name, others in left.items() if name not in loose}
    assert not left


def test_files_read_few_private_names_of_others():
    found = readings()
    assert len(found) <= MOST_PRIVATE, "\n".join(f"{one.path} reads {one.name}" for one in found)
