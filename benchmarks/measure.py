"""What the benchmarks share beside `sepsa.bench`: where the raw numbers go, and what their commands do."""

from __future__ import annotations

import json
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sepsa.bench import alternate, machine, ratio, spread

__all__ = ["alternate", "dispatch", "machine", "mean_and_spread", "ratio", "spread", "write"]


def write(script: str, result: dict[str, Any]) -> None:
    """The raw numbers, beside the script that made them."""
    path = Path(script).with_suffix(".json")
    path.write_text(json.dumps(machine() | result, indent=1) + "\n")
    print(f"written to {path}")


def mean_and_spread(values: Sequence[float], form: str) -> str:
    """The mean of several seeds with their standard deviation; of one, its number alone."""
    told = f"{statistics.fmean(values):{form}}"
    return f"{told} ± {statistics.stdev(values):{form}}" if len(values) > 1 else told


def dispatch(
    parser: ArgumentParser, verbs: Mapping[str, Callable[[Namespace], object]], otherwise: Callable[[Namespace], object]
) -> None:
    """Do the first of `verbs` that the command line asks for by an option of its name, else `otherwise` and the table.

    On one thread. `--table` and `--figure`, without a value, need not be known to the parser.
    """
    for name in ("table", "figure"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, verb in verbs.items():
        if getattr(options, name):
            verb(options)
            return
    otherwise(options)
    verbs["table"](options)
