"""The state of `RLS` as a dict: written, and checked entry by entry when it is read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from sepsa.heads.base.state_checks import (
    check_positive_definite,
    check_regular,
    read_ridge,
    read_solver,
    settings_of,
)
from sepsa.heads.least_squares.evidence import Choice, ridges_of
from sepsa.heads.least_squares.math import LeastSquaresState

MOST_STEPS = 2**53  # beyond, a float64 cannot count
_COUNTERS = ("steps", "samples", "cursor", "pending", "growth")  # in the order of their places


class SavedRLS(NamedTuple):
    """What a state of an `RLS` holds."""

    state: LeastSquaresState
    initial: Tensor  # (m, p)
    choice: Choice
    settings: Any  # a solver that has them and no head


def write(solver: Any, state: LeastSquaresState, initial: Tensor, choice: Choice) -> dict[str, Any]:
    """The state of an `RLS`, as copies."""
    own, (steps, samples, cursor, pending, growth) = state.copy(), state.counters.tolist()
    learned = {"T": own.T, "W": own.W, "H": own.H, "energy": own.energy, "left": own.ridge_left}
    counted = {"steps": int(steps), "samples": samples, "cursor": int(cursor), "pending": int(pending)}
    given = {"prior": initial.clone(), "scale": choice.scale[:, 0].clone()}
    chosen = {"growth": growth, "ridge_now": choice.ridge, "unit": choice.unit}
    return learned | counted | given | chosen | settings_of(solver)


def read(state_dict: Any, solver: Any, linear: nn.Linear, like: Tensor) -> SavedRLS:
    """What `write` wrote, for a head whose prior has the shape, dtype and device of `like`."""
    m, p = like.shape
    shapes = {"T": (p, p), "W": (m, p), "H": (p, p), "energy": (m,), "left": (p,), "prior": (m, p), "scale": (m,)}
    keys = {*shapes, *_COUNTERS, "ridge_now", "unit"}
    make: Any = type(solver)
    state, settings = read_solver(solver, state_dict, keys, partial(make, dtype=solver.dtype))
    tensors: Iterator[Any] = (
        None if name == "H" and state[name] is None else state.tensor(name, shape, like.dtype, like.device)
        for name, shape in shapes.items()
    )
    T, W, H, energy, left, initial, scale = tensors
    choice = Choice(read_ridge(state, settings), scale[:, None], state.number("unit", sys.float_info.min))
    steps, pending = state.integer("steps", 0, MOST_STEPS), state.integer("pending", 0, 256)
    samples, growth = state.number("samples", 0.0), state.number("growth", 0.0)
    cursor = state.integer("cursor", 0, p - 1)
    if (pending == 0) != (H is None):
        raise state.damaged("H", f"{'a tensor' if pending else 'None'} with {pending} pending", "the other")
    if H is not None:
        check_positive_definite(state, "H", H)
    if bool((energy < -1e-6 * (1 + energy.abs().max())).any()):
        raise state.damaged("energy", "at least 0", float(energy.min()))
    if not bool((left > 0).all()):
        raise state.damaged("left", "positive", float(left.min()))
    if not bool((scale >= 0).all()):
        raise state.damaged("scale", "at least 0", float(scale.min()))
    check_regular(state, "T", T)
    full = ridges_of(linear, choice.ridge, settings.bias_ridge, settings.ridge == "evidence", initial)
    counters = np.array([steps, samples, cursor, pending, growth], np.float64)
    learned = LeastSquaresState(T, W, energy, left, initial * choice.scale, full, H, counters)
    return SavedRLS(learned, initial, choice, settings)
