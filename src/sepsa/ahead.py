"""All kernels, compiled ahead of time in several processes: `sepsa compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from sepsa.heads import RLS, SelfTuning
from sepsa.jit import KERNELS, absent, compile_together
from sepsa.stream.forecast.kernels.rescale import restore


class Call(NamedTuple):
    """A call that compiles what has no signature before it; `cost` as in `Kernel`."""

    compile: Callable[[], object]
    cost: float


def update_heads() -> None:
    """Update a plain head and several in one call, of either dtype: they share functions."""
    for dtype in (torch.float32, torch.float64):
        features, targets = torch.ones(8, 3, dtype=dtype), torch.ones(8, 2, dtype=dtype)
        for solver in (RLS(), SelfTuning()):
            solver.bind(torch.nn.Linear(3, 2, dtype=dtype))
            for _ in range(5):
                solver.update(features, targets)


def restore_ridge() -> None:
    """Restore the ridge of a forecaster's head, as a change of scales does."""
    restore(np.zeros(1), np.ones(2), np.zeros(2), np.ones(2), np.zeros((1, 1, 2)))


def compile_all(processes: int | None = None) -> None:
    """Compile everything that is not in the cache; `processes` is by default the number of idle cores."""
    calls = [Call(update_heads, 20.0), Call(restore_ridge, 2.0)]
    compile_together([*absent(KERNELS), *calls], "all kernels", processes)
