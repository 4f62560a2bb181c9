"""What the first call costs on a new machine, by interface: processor and wall seconds, and the lines that it prints.

    python benchmarks/cold_start.py [--processes 1 2] [--only SepSARegressor ...]

Writes cold_start-aarch64.json or cold_start-x86_64.json. Each call runs in a fresh interpreter with an empty folder of
compiled code (`SEPSA_CACHE`), which then serves a second, warm call. `--processes` limits the cores of the interpreter,
and so how many processes compile at once. The last rows are in one folder, one interface after the other: what is
compiled for one serves the next. An interface whose package is not installed is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import write

ROWS = "import numpy as np; r = np.random.default_rng(0); X = r.normal(size=(300, 4)); y = X[:, 0] + np.sin(X[:, 1]); "
CALLS = {
    "SepSARegressor": ROWS + "from sepsa import SepSARegressor; SepSARegressor().partial_fit(X, y).predict(X)",
    "SepSARegressor, fit": ROWS + "from sepsa import SepSARegressor; SepSARegressor().fit(X, y).predict(X)",
    "SepSAClassifier": ROWS + "from sepsa import SepSAClassifier; SepSAClassifier().partial_fit(X, y > 0, [0, 1])",
    "SepSAForecaster": ROWS + "from sepsa import SepSAForecaster; SepSAForecaster(2, lags=4).prequential(y)",
    "river": ROWS
    + "from sepsa.river import SepSARegressor; m = SepSARegressor(); [m.learn_one({'a': a}, a) for a in y]",
    "sepsa stream": "import sys; sys.argv[1:] = ['stream', 'table.csv', '--target', 'y', '--predictions', 'out.csv']; "
    "from sepsa.cli import main; main()",
}


def call(code: str, cache: Path, folder: Path, cores: int) -> dict[str, Any]:
    """One call in a new interpreter on so many cores."""
    environment = os.environ | {"SEPSA_CACHE": str(cache), "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    if hasattr(os, "sched_setaffinity"):
        code = f"import os; os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:{cores}]); {code}"
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(done.stderr)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    lines = sum(line.startswith("sepsa: compiling") for line in done.stderr.splitlines())
    return {"processor": round(used, 2), "wall": round(wall, 2), "lines": lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", nargs="+", choices=CALLS, default=list(CALLS))
    options = parser.parse_args()
    names = [name for name in options.only if name != "river" or importlib.util.find_spec("river")]
    found: list[dict[str, Any]] = []

    def measure(name: str, cores: int, cache: Path, folder: Path, empty: bool) -> None:
        first, second = (call(CALLS[name], cache, folder, cores) for _ in range(2))
        found.append({"interface": name, "cores": cores, "empty": empty, "first": first, "second": second})
        print(
            f"{name:20s} {cores:2d} cores, {'an empty cache' if empty else 'after the former'}: {first}, then {second}",
            flush=True,
        )

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rows = "".join(f"{i % 7},{i % 11},{i % 5}\n" for i in range(300))
        (folder / "table.csv").write_text("a,b,y\n" + rows)
        for cores in options.processes:
            for name in names:
                measure(name, cores, folder / f"{cores} {name}", folder, True)
        for name in names:
            measure(name, options.processes[-1], folder / "all", folder, False)
    write(f"cold_start-{platform.machine()}", {"load": os.getloadavg()[0], "found": found})


if __name__ == "__main__":
    main()
