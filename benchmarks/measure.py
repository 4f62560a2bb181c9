"""What the benchmarks share: contestants take turns in one process, and ratios carry their spread."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch


def alternate(contestants: dict[str, Callable[[], object]], rounds: int, seconds: float = 0.05) -> dict[str, Any]:
    """Seconds per call of each, `rounds` times in turn; each turn runs about `seconds`."""
    calls = {}
    for name, run in contestants.items():
        for _ in range(3):
            run()
        start = time.perf_counter()
        run()
        calls[name] = max(1, int(seconds / (time.perf_counter() - start)))
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            start = time.perf_counter()
            for _ in range(calls[name]):
                run()
            times[name].append((time.perf_counter() - start) / calls[name])
    return times


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return {"median": float(middle), "q25": float(low), "q75": float(high)}


def ratio(times: dict[str, list[float]], one: str, other: str) -> dict[str, float]:
    """one / other, turn by turn, so that what slows the machine slows both."""
    return spread([a / b for a, b in zip(times[one], times[other], strict=True)])


def machine() -> dict[str, Any]:
    return {
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def write(script: str, result: dict[str, Any]) -> None:
    """The raw numbers, beside the script that made them."""
    path = Path(script).with_suffix(".json")
    path.write_text(json.dumps(machine() | result, indent=1) + "\n")
    print(f"written to {path}")
