"""What the saved states of head solvers share: settings, the ridge in use, and matrices that have a factor."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sepsa.states.schema import Entries, read, settings

# Up to this size a matrix is factorized to see whether it is regular; beyond, loading would take too long.
FACTORIZED = 512


def settings_of(solver: Any) -> dict[str, Any]:
    """The settings that a state of this solver holds, as `read_solver` expects them."""
    return {name: copy.copy(getattr(solver, name)) for name in solver.settings}


def read_solver(solver: Any, state_dict: Any, keys: set[str], make: Callable[..., Any]) -> tuple[Entries, Any]:
    """The entries of a state, which are these keys and the settings, and a solver that `make` makes of the settings."""
    saved = read("state_dict", state_dict, {*keys, *solver.settings}, type(solver).__name__)
    with settings("state_dict"):
        return saved, make(**{name: saved[name] for name in solver.settings})


def read_ridge(saved: Entries, solver: Any) -> float:
    """The ridge of the weights that was in use: by evidence, or that of the settings."""
    now = saved.number("ridge_now", sys.float_info.min)
    if solver.ridge not in ("evidence", now):
        raise saved.damaged("ridge_now", f"the ridge {solver.ridge:g}", now)
    return now


def check_positive_definite(state: Entries, key: str, value: Tensor) -> None:
    """Check that a matrix (p, p) is symmetric, up to rounding, and positive definite."""
    scale = value.diagonal().clamp(min=0).sqrt()
    excess = (value - value.T).abs() - math.sqrt(torch.finfo(value.dtype).eps) * scale[:, None] * scale
    if bool((excess > 0).any()):
        raise state.damaged(key, "symmetric", f"an asymmetry of {float((value - value.T).abs().max()):g}")
    if int(torch.linalg.cholesky_ex(value).info):
        raise state.damaged(key, "positive definite", "a matrix without a Cholesky factor")


def check_regular(state: Entries, key: str, value: Tensor) -> None:
    """Check that a matrix, or each of several (..., p, p), has an inverse."""
    if value.shape[-1] <= FACTORIZED and bool(torch.linalg.lu_factor_ex(value).info.any()):
        raise state.damaged(key, "a regular matrix", "a singular one")
