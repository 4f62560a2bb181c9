"""Break everything, and count: the whole of tests/breaking, short and long, its counts in one JSON file.

    python benchmarks/reliability/reliability.py                 # half an hour on two cores
    python benchmarks/reliability/reliability.py --from A B      # sums files that `pytest --tally` wrote

Writes reliability.json, from which docs/how-to/reliability.md quotes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import write

ROOT = Path(__file__).parents[2]


def run(tally: Path) -> None:
    suite = [
        sys.executable,
        "-m",
        "pytest",
        "tests/breaking",
        "-m",
        "long or not long",
        "--one-in",
        "1",
        "-q",
        "--tally",
        str(tally),
    ]
    subprocess.run(suite, cwd=ROOT, check=True)


def total(files: list[Path]) -> dict[str, dict[str, Any]]:
    """Cases, and how many of them did harm, of each kind; the largest of what is no count."""
    out: dict[str, dict[str, Any]] = {}
    for line in (line for file in files for line in file.read_text().splitlines()):
        entry = json.loads(line)
        kind = out.setdefault(entry.pop("what"), {"cases": 0, "harm": 0})
        for name, value in entry.items():
            kind[name] = max(kind.get(name, 0), value) if name == "grown_MiB" else kind.get(name, 0) + value
    return dict(sorted(out.items()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--from", nargs="+", type=Path, dest="files")
    files = parser.parse_args().files
    with tempfile.TemporaryDirectory() as folder:
        if files is None:
            files = [Path(folder) / "tally.jsonl"]
            run(files[0])
        counts = total(files)
    for name, count in counts.items():
        print(f"{name}: {count}")
    write(__file__, {"counts": counts})


if __name__ == "__main__":
    main()
