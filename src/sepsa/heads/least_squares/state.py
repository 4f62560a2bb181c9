"""The state of `RLS` as a dict: written, and checked entry by entry when it is read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from sepsa.heads.base.ridge import BiasRidge
from sepsa.heads.base.state_checks import check_positive_definite, check_regular, read_ridges, read_solver
from sepsa.heads.least_squares.math import LeastSquaresState
from sepsa.states.schema import Entries
from sepsa.states.schema import settings as named
from sepsa.validation import in_range

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_STEPS = 2**53  # beyond, a float64 cannot count
_ROOT = ("T", "W", "H", "energy", "left")
_COUNTERS = ("steps", "samples", "cursor", "pending", "growth")  # in the order of their places


class RLSSettings(NamedTuple):
    """What a state of `RLS` holds beside its Root and counters."""

    prior: Tensor
    ridge: float
    bias_ridge: BiasRidge
    forgetting: float
    scale: Tensor  # (m,): of the prior, by output
    by_evidence: tuple[float, float] | None = None  # where evidence chooses the ridge: `noise_factor`, unit of weights


def write_root(root: LeastSquaresState, counters: NDArray[np.float64], settings: RLSSettings) -> dict[str, Any]:
    """The state of an `RLS`, as copies."""
    state: dict[str, Any] = dict(zip(_ROOT, root.copy(), strict=True))
    steps, samples, cursor, pending, growth = counters.tolist()
    state |= {"steps": int(steps), "samples": samples, "cursor": int(cursor), "pending": int(pending), "growth": growth}
    each = [settings.ridge, settings.bias_ridge, *(settings.by_evidence or ())]
    state |= {"prior": settings.prior.clone(), "scale": settings.scale.clone()}
    return state | {"ridges": each, "forgetting": settings.forgetting}


def read_root(
    state_dict: Any, linear: nn.Linear, like: Tensor
) -> tuple[LeastSquaresState, NDArray[np.float64], RLSSettings]:
    """The state that `write_root` wrote, for a head whose prior has the shape, dtype and device of `like`."""
    state = read_solver("RLS", state_dict, {*_ROOT, *_COUNTERS, "prior", "scale", "forgetting"})
    m, p = like.shape
    shapes = {"T": (p, p), "W": (m, p), "H": (p, p), "energy": (m,), "left": (p,), "prior": (m, p), "scale": (m,)}
    tensors = {
        name: state.tensor(name, shape, like.dtype, like.device)
        for name, shape in shapes.items()
        if name != "H" or state["H"] is not None
    }
    each, by_evidence = state["ridges"], None
    if isinstance(each, (list, tuple)) and len(each) == 4:
        with named(state.path("ridges")):
            by_evidence = in_range("noise_factor", each[2], 0.0, math.inf), in_range("unit", each[3], 0.0, math.inf)
        each = each[:2]
    both = read_ridges("state_dict['ridges']", each)
    with named(state.path("forgetting")):
        forgetting = in_range("forgetting", state["forgetting"], 0.0, 1.0)
    settings = RLSSettings(tensors["prior"], *both, forgetting, tensors["scale"], by_evidence)
    counters = read_counters(state, p)
    H, energy = tensors.get("H"), tensors["energy"]
    if H is not None:
        check_positive_definite(state, "H", H)
    if bool((energy < -1e-6 * (1 + energy.abs().max())).any()):
        raise state.damaged("energy", "at least 0", float(energy.min()))
    left = tensors["left"]
    if not bool((left > 0).all()):
        raise state.damaged("left", "positive", float(left.min()))
    if not bool((tensors["scale"] >= 0).all()):
        raise state.damaged("scale", "at least 0", float(tensors["scale"].min()))
    check_regular(state, "T", tensors["T"])
    return LeastSquaresState(tensors["T"], tensors["W"], H, energy, left), counters, settings


def read_counters(state: Entries, p: int) -> NDArray[np.float64]:
    """The counters of an `RLS` in the order of their places."""
    steps, pending = state.integer("steps", 0, MOST_STEPS), state.integer("pending", 0, 256)
    samples, growth = state.number("samples", 0.0), state.number("growth", 0.0)
    cursor = state.integer("cursor", 0, p - 1)
    if (pending == 0) != (state["H"] is None):
        raise state.damaged("H", f"{'a tensor' if pending else 'None'} with {pending} pending", "the other")
    return np.array([steps, samples, cursor, pending, growth], np.float64)
