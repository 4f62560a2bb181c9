"""The state of `RLS` as a dict: written, and checked entry by entry when it is read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from sepsa.heads.base.ridge import BiasRidge
from sepsa.heads.base.state_checks import check_positive_definite, check_regular, read_ridges, read_solver
from sepsa.heads.least_squares.evidence import ridges_of
from sepsa.heads.least_squares.math import LeastSquaresState
from sepsa.states.schema import settings as named
from sepsa.validation import in_range

MOST_STEPS = 2**53  # beyond, a float64 cannot count
_COUNTERS = ("steps", "samples", "cursor", "pending", "growth")  # in the order of their places


class RLSSettings(NamedTuple):
    """What a state of `RLS` holds beside what it has learned."""

    initial: Tensor  # (m, p)
    ridge: float
    bias_ridge: BiasRidge
    forgetting: float
    scale: Tensor  # (m, 1): of the initial weights in the prior
    by_evidence: tuple[float, float] | None = None  # where evidence chooses the ridge: `noise_factor`, unit of weights


def write(state: LeastSquaresState, settings: RLSSettings) -> dict[str, Any]:
    """The state of an `RLS`, as copies."""
    own, (steps, samples, cursor, pending, growth) = state.copy(), state.counters.tolist()
    learned = {"T": own.T, "W": own.W, "H": own.H, "energy": own.energy, "left": own.ridge_left}
    counted = {"steps": int(steps), "samples": samples, "cursor": int(cursor), "pending": int(pending)}
    given = {"prior": settings.initial.clone(), "scale": settings.scale[:, 0].clone()}
    ridges = [settings.ridge, settings.bias_ridge, *(settings.by_evidence or ())]
    return learned | counted | {"growth": growth} | given | {"ridges": ridges, "forgetting": settings.forgetting}


def read(state_dict: Any, linear: nn.Linear, like: Tensor) -> tuple[LeastSquaresState, RLSSettings]:
    """What `write` wrote, for a head whose prior has the shape, dtype and device of `like`."""
    m, p = like.shape
    shapes = {"T": (p, p), "W": (m, p), "H": (p, p), "energy": (m,), "left": (p,), "prior": (m, p), "scale": (m,)}
    state = read_solver("RLS", state_dict, {*shapes, *_COUNTERS, "forgetting"})
    tensors: Iterator[Any] = (
        None if name == "H" and state[name] is None else state.tensor(name, shape, like.dtype, like.device)
        for name, shape in shapes.items()
    )
    T, W, H, energy, left, initial, scale = tensors
    each, by_evidence = state["ridges"], None
    if isinstance(each, (list, tuple)) and len(each) == 4:
        with named(state.path("ridges")):
            by_evidence = in_range("noise_factor", each[2], 0.0, math.inf), in_range("unit", each[3], 0.0, math.inf)
        each = each[:2]
    ridge, bias_ridge = read_ridges("state_dict['ridges']", each)
    with named(state.path("forgetting")):
        forgetting = in_range("forgetting", state["forgetting"], 0.0, 1.0)
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
    settings = RLSSettings(initial, ridge, bias_ridge, forgetting, scale[:, None], by_evidence)
    full = ridges_of(linear, ridge, bias_ridge, by_evidence is not None, initial)
    counters = np.array([steps, samples, cursor, pending, growth], np.float64)
    return LeastSquaresState(T, W, energy, left, initial * settings.scale, full, H, counters), settings
