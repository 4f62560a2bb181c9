"""Write tests/data/saved: a small model of every kind that a user can save, and what it predicts, as an earlier commit
saved them: learners of streams as 0087f8d did, others as d5d5bd7 or the first one that had them.
tests/states/test_saved.py loads each: a file that is there is never written again.

    PYTHONPATH=src:tests python tests/data/make_saved.py NAME ...       for kinds that have been added to learners.py
"""

from __future__ import annotations

import json
import lzma
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from learners import CASES

SAVED = Path(__file__).parent / "saved"
PREDICTIONS = SAVED / "predictions.json"
LEARNED, FURTHER = 270, 290  # rows before the model is saved, and after it is loaded


def rows_of(name: str) -> int:
    """The number of rows that a model has learned when it is saved."""
    return 40 if "fit" in name else LEARNED


def rounded(predictions: Any) -> Any:
    """Nested lists of eight digits: more do not survive another processor."""
    array = np.asarray(predictions)
    return array.tolist() if array.dtype.kind == "U" else np.vectorize(lambda x: float(f"{x:.8g}"))(array).tolist()


def write(name: str) -> None:
    kind, rows = CASES[name], rows_of(name)
    model = kind.make()
    kind.learn(model, 0, rows)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        kind.save(model, path)
        content = path.read_bytes()
        loaded = kind.load(path)
        said = {"before": rounded(kind.predict(loaded))}
        kind.learn(loaded, rows, FURTHER)
        said["after"] = rounded(kind.predict(loaded))
    SAVED.mkdir(exist_ok=True)
    (SAVED / f"{name}.xz").write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
    known = (json.loads(PREDICTIONS.read_text()) if PREDICTIONS.exists() else {}) | {name: said}
    PREDICTIONS.write_text(json.dumps({name: known[name] for name in CASES if name in known}).replace("}, ", "},\n"))
    print(name, len(content), (SAVED / f"{name}.xz").stat().st_size)


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        write(name)
