"""Compare the bits of this tree with those of another on this machine, before and after a change of structure.

    python tests/goldens/compare.py OTHER_TREE [heads|models ...] [--device cuda]

runs the cases of heads.py, and every kind of model of tests/learners.py, with the package of each tree, in processes of
their own with one thread, and lists the results whose bits differ, with the largest difference of their numbers. The
exit code is 1 if one does.
Bits belong to a processor and its libraries, so none are committed: tests/goldens/record.json holds rounded answers.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

HERE = Path(__file__).parent


def heads() -> ModuleType:
    """The module heads.py beside this file."""
    return importlib.import_module("goldens.heads")  # tests/ is on the path


def models() -> dict[str, Any]:
    """State and predictions of every kind of model that a user can save, after it has learned some rows."""
    from learners import CASES

    found: dict[str, Any] = {}

    def note(path: str, value: Any) -> None:
        if isinstance(value, (dict, list, tuple)):
            for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
                note(f"{path}; {key}", inner)
        elif isinstance(value, bytes):
            found[path] = np.frombuffer(value, np.uint8)
        else:
            is_number = hasattr(value, "dtype") or isinstance(value, (bool, int, float))
            array = np.asarray(value if is_number else str(value))
            found[path] = np.asarray(str(value)) if array.dtype == object else array  # an integer beyond 64 bits

    for name, kind in CASES.items():
        model = kind.make()
        kind.learn(model, 0, 300)
        note(name, [kind.state(model), kind.predict(model)])
    return found


def write_states(kind: str, device: str, file: str) -> None:
    """Compute the states of one kind with the package that this process imports."""
    import torch

    torch.set_num_threads(1)
    np.savez(file, **(heads().states(device) if kind == "heads" else models()))


def states(tree: Path, kind: str, device: str, folder: Path) -> dict[str, Any]:
    """The states of one kind by a tree, computed in a process: other work in a process may change bits."""
    file = folder / "states.npz"
    path = os.pathsep.join([str(tree / "src"), str(tree), str(HERE.parent)])
    environment = os.environ | {"PYTHONPATH": path, "SEPSA_BACKEND": ""}
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    subprocess.run([sys.executable, __file__, "--into", file, kind, "--device", device], env=environment, check=True)
    with np.load(file) as found:
        return dict(found)


def difference(one: Any, other: Any) -> str:
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{one.dtype} {one.shape} and {other.dtype} {other.shape}"
    if one.dtype.kind != "f":
        return "other text" if one.dtype.kind == "U" else "other numbers"
    return f"up to {np.nanmax(np.abs(one - other), initial=0.0):.1e}, of numbers up to {np.nanmax(np.abs(one)):.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path, nargs="?")
    parser.add_argument("kinds", nargs="*", default=["heads", "models"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--into", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.into:
        write_states(str(options.tree), options.device, options.into)
        return
    changed = total = 0
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as folder:
            here, there = (
                states(tree, kind, options.device, Path(folder)) for tree in (HERE.parents[1], options.tree.resolve())
            )
        for name in sorted({*here, *there}):
            total += 1
            one, other = here.get(name), there.get(name)
            if one is None or other is None:
                print(f"{kind}: {name}: only in {options.tree if one is None else 'this tree'}")
            elif one.tobytes() == other.tobytes() and one.dtype == other.dtype:
                continue
            else:
                print(f"{kind}: {name}: {difference(one, other)}")
            changed += 1
    print(f"{changed} of {total} results differ")
    sys.exit(changed > 0)


if __name__ == "__main__":
    main()
