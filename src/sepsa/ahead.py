"""All kernels, compiled ahead of time in several processes: `sepsa compile`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from sepsa.heads import RLS, SelfTuning
from sepsa.jit import KERNELS, absent, compile_together
from sepsa.stream.forecast import SepSAForecaster


class Call(NamedTuple):
    """A call that compiles what has no signature before it; `cost` as in `Kernel`."""

    compile: Callable[[], object]
    cost: float


def update_heads(dtype: torch.dtype) -> None:
    """Update a plain head and several in one call."""
    features, targets = torch.ones(8, 3, dtype=dtype), torch.ones(8, 2, dtype=dtype)
    for solver in (RLS(), SelfTuning()):
        solver.bind(torch.nn.Linear(3, 2, dtype=dtype))
        for _ in range(5):
            solver.update(features, targets)


def forecast() -> None:
    """Forecast a series with intervals, long enough for its scales to be followed."""
    series = np.random.default_rng(0).standard_normal(300)
    SepSAForecaster(2, lags=4, seasons=()).prequential(series, coverage=0.9)


def compile_all(processes: int | None = None) -> None:
    """Compile everything that is not in the cache; `processes` is by default the number of idle cores."""
    calls = [Call(partial(update_heads, dtype), 15.0) for dtype in (torch.float32, torch.float64)]
    compile_together([*absent(KERNELS), *calls, Call(forecast, 20.0)], "all kernels", processes)
