"""Checks of saved states that several head solvers share: ridges, and matrices that have a factor."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sepsa.heads.base.checks import bias_setting
from sepsa.heads.base.ridge import BiasRidge
from sepsa.states.schema import Entries, brief, damaged, read, settings
from sepsa.validation import in_range

# Up to this size a matrix is factorized to see whether it is regular; beyond, loading would take too long.
FACTORIZED = 512


def read_solver(name: str, state_dict: Any, keys: set[str]) -> Entries:
    """The entries of a state of the solver `name`, which has the entry `ridges` and these keys."""
    return read("state_dict", state_dict, keys | {"ridges"}, name)


def read_ridges(name: str, pair: object) -> tuple[float, BiasRidge]:
    """The ridge of the weights and that of the bias, saved as a pair in the entry `name`."""
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        raise damaged(name, "a pair: the ridge, and that of the bias", brief(pair))
    with settings(name):
        return in_range("ridge", pair[0], 0.0, math.inf), bias_setting(pair[1])


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
