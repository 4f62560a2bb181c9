"""What an installation takes, and the first prediction in a new process: megabytes and seconds, by extra.

    make dist && python benchmarks/reliability/cold_start.py FOLDER [--rounds 15]

Writes cold_start.json. Each extra has an environment of its own in FOLDER, with the wheel in dist/, neither torch nor
numba. A new interpreter makes its first prediction, in turns with one that only imports the package beside which it
works: scikit-learn, River, or NumPy where there is none.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

from benchmarks.measure import write

ROOT = Path(__file__).resolve().parents[2]
ROWS = "import numpy as np; r = np.random.default_rng(0); X = r.normal(size=(300, 4)); y = X[:, 0] + np.sin(X[:, 1]); "
REGRESSOR = "from sepsa import SepSARegressor; SepSARegressor().partial_fit(X, y).predict(X)"
CLASSIFIER = "from sepsa import SepSAClassifier; SepSAClassifier().partial_fit(X, y > 0, [0, 1]).predict(X)"
FORECASTER = "from sepsa import SepSAForecaster; SepSAForecaster(2, lags=4).fit(y).predict()"
RIVER = "from sepsa.river import SepSARegressor; m = SepSARegressor(); "
RIVER += "m.learn_one({'a': 1.0}, 1.0); m.predict_one({'a': 2.0})"
STREAM = "import sys; sys.argv[1:] = ['stream', 'table.csv', '--target', 'y', '--predictions', 'out.csv']; "
STREAM += "from sepsa.shell.cli import main; main()"
# The interface, its extra, its program, and what it is compared with.
CALLS = (
    ("regressor", "stream", ROWS + REGRESSOR, "import sklearn.linear_model"),
    ("classifier", "stream", ROWS + CLASSIFIER, "import sklearn.linear_model"),
    ("River", "river", RIVER, "import river.linear_model"),
    ("forecaster", "core", ROWS + FORECASTER, "import numpy"),
    ("sepsa stream", "shell", STREAM, "import pyarrow.csv"),
)


def environment(folder: Path, extra: str, wheel: Path) -> Path:
    """The interpreter of an environment with the wheel and an extra."""
    home = folder / extra
    if not home.is_dir():
        venv.create(home, with_pip=True)
        wanted = str(wheel) if extra == "core" else f"sepsa[{extra}] @ {wheel.as_uri()}"
        command = [home / "bin/pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wanted]
        subprocess.run(command, check=True)
    return home / "bin/python"


def installed(python: Path) -> dict[str, Any]:
    """The megabytes of what was installed but pip, and that neither torch nor numba is there."""
    packages = next((python.parents[1] / "lib").glob("python*/site-packages"))
    size = sum(
        file.stat().st_size
        for entry in packages.iterdir()
        if not entry.name.startswith(("pip", "setuptools", "_distutils"))
        for file in (entry.rglob("*") if entry.is_dir() else [entry])
        if file.is_file() and "__pycache__" not in file.parts
    )
    assert not any((packages / name).exists() for name in ("torch", "numba", "llvmlite"))
    return {"megabytes": round(size / 1e6)}


def seconds(python: Path, program: str, folder: Path) -> float:
    """How long a new interpreter takes for a program."""
    start = time.perf_counter()
    done = subprocess.run([python, "-c", program], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rows = "".join(f"{i % 7},{i % 11},{i % 5}\n" for i in range(300))
    (folder / "table.csv").write_text("a,b,y\n" + rows)
    wheel = next((ROOT / "dist").glob("*.whl"))
    found = []
    for name, extra, program, bare in CALLS:
        python = environment(folder, extra, wheel)
        seconds(python, program, folder), seconds(python, bare, folder)  # which compile modules
        pairs = [(seconds(python, program, folder), seconds(python, bare, folder)) for _ in range(options.rounds)]
        ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
        more = sorted(one - other for one, other in pairs)
        spread = [round(more[len(more) // 4], 3), round(more[3 * len(more) // 4], 3)]
        row = {"interface": name, "extra": extra, **installed(python), "seconds": round(ours, 3), "bare": bare}
        row |= {"bare seconds": round(theirs, 3), "more": round(statistics.median(more), 3), "quartiles": spread}
        found.append(row)
        print(row, flush=True)
    write(Path(__file__).with_name("cold_start"), {"wheel": wheel.name, "rounds": options.rounds, "found": found})


if __name__ == "__main__":
    main()
