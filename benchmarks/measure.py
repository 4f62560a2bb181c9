"""What the benchmarks share beside `sepsa.bench`: where the raw numbers go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sepsa.bench import alternate, machine, ratio, spread

__all__ = ["alternate", "machine", "ratio", "spread", "write"]


def write(script: str, result: dict[str, Any]) -> None:
    """The raw numbers, beside the script that made them."""
    path = Path(script).with_suffix(".json")
    path.write_text(json.dumps(machine() | result, indent=1) + "\n")
    print(f"written to {path}")
