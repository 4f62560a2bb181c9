"""Checks of saved states that several head solvers share: ridges, and matrices that updates can produce."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sepsa.heads.base.checks import bias_setting
from sepsa.heads.math.ridge import BiasRidge
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


def check_root(state: Entries, key: str, value: Tensor, ridge_left: Tensor) -> None:
    """Check that T (p, p) is a root of an inverse curvature: TᵀT is regular and at most 1/ridge_left (p,)."""
    squares = value.square()
    if not bool((squares.sum(0) > 0).all() & (squares.sum(1) > 0).all()):
        raise state.damaged(key, "a regular matrix", "a row or column of zeros")
    if len(value) <= FACTORIZED:
        pivots = torch.linalg.lu_factor_ex(value).LU.diagonal().abs()
        low, high = float(pivots.min()), float(pivots.max())
        if not low > torch.finfo(value.dtype).eps * high:
            raise state.damaged(key, "a regular matrix", f"pivots from {low:g} to {high:g}")
    if bool((squares.sum(0) * ridge_left > 1.01).any()):
        raise state.damaged(key, "the root of an inverse curvature of at least the ridge", "a larger matrix")
