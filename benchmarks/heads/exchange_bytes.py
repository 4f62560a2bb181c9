"""How many megabytes a rank moves each step for one head on all ranks: arithmetic, nothing is measured.

    python benchmarks/heads/exchange_bytes.py

Writes exchange_bytes.json, for docs/how-to/scale.md: float32, 64 rows a rank, 10 outputs; beside it the all-reduce of
a body of 25 million parameters.
"""

from __future__ import annotations

import json
from pathlib import Path

ROWS, OUTPUTS, BODY = 64, 10, 25_000_000
RATE = 25_000  # megabytes a second: 200 Gbit/s a rank


def megabytes(p: int) -> dict[str, float]:
    row = 4 * (p - 1 + OUTPUTS)
    return {
        "8 ranks, rows received": 7 * ROWS * row / 1e6,
        "1,024 ranks, rows received": 1023 * ROWS * row / 1e6,
        "the body's all-reduce": 2 * 4 * BODY / 1e6,
    }


def main() -> None:
    sizes = {p: megabytes(p) for p in (129, 1025, 4097)}
    table = {name: {f"p = {p:,}": sizes[p][name] for p in sizes} for name in sizes[129]}
    milliseconds = {name: {p: 1e3 * size / RATE for p, size in row.items()} for name, row in table.items()}
    for name, row in table.items():
        print(name + ": " + ", ".join(f"{p} {size:.3g} MB, {milliseconds[name][p]:.2g} ms" for p, size in row.items()))
    path = Path(__file__).with_suffix(".json")
    path.write_text(json.dumps({"MB": table, "ms at 25 GB/s": milliseconds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
