"""The states of `RLS` and `SelfTuningRLS` as dicts: written whole, and verified entry by entry before they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sepsa.heads.base.checks import (
    check_keys,
    check_positive_definite,
    check_ridges,
    check_root,
    check_state_number,
    check_state_tensor,
    damaged,
    with_ridges,
)
from sepsa.heads.base.parameters import BiasRidge, ridges
from sepsa.heads.math.candidates import Candidates, Grid, factors
from sepsa.heads.math.least_squares import LeastSquaresState

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROOT = ("T", "W", "H", "energy", "left")
_COUNTERS = ("steps", "samples", "cursor", "pending", "growth")  # in the order of their places
_TENSORS = ("M", "N", "W", "score")
_NUMBERS = ("scale", "active", "steps", "samples", "cursors", "first", "unrepeated", "history")


class Settings(NamedTuple):
    """What a state of `RLS` brings beside its Root and counters."""

    prior: Tensor
    ridge: float
    bias_ridge: BiasRidge
    forgetting: float


def write_root(root: LeastSquaresState, counters: NDArray[np.float64], settings: Settings) -> dict[str, Any]:
    """The state of an `RLS`, as copies."""
    state: dict[str, Any] = dict(zip(_ROOT, root.map(Tensor.clone), strict=True))
    steps, samples, cursor, pending, growth = counters.tolist()
    state |= {"steps": int(steps), "samples": samples, "cursor": int(cursor), "pending": int(pending), "growth": growth}
    pair = [settings.ridge, settings.bias_ridge]
    return state | {"prior": settings.prior.clone(), "ridges": pair, "forgetting": settings.forgetting}


def read_root(state: Any, linear: nn.Linear, like: Tensor) -> tuple[LeastSquaresState, NDArray[np.float64], Settings]:
    """The state that `write_root` wrote, for a head whose prior is shaped and placed `like` this one."""
    state = with_ridges(state)
    check_keys("RLS", state, {*_ROOT, *_COUNTERS, "prior", "ridges", "forgetting"})
    m, p = like.shape
    shapes = {"T": (p, p), "W": (m, p), "H": (p, p), "energy": (m,), "left": (p,), "prior": (m, p)}
    tensors = {
        name: check_state_tensor(name, state[name], shape, dtype=like.dtype, device=like.device)
        for name, shape in shapes.items()
        if name != "H" or state["H"] is not None
    }
    ridge, bias_ridge = check_ridges(state["ridges"])
    check_setting("forgetting", state["forgetting"], 0.0, 1.0)
    forgetting = float(state["forgetting"])
    check_state_number("steps", state["steps"], 0, 2**53, integer=True)
    check_state_number("cursor", state["cursor"], 0, p - 1, integer=True)
    check_state_number("pending", state["pending"], 0, 256, integer=True)
    for name in ("samples", "growth"):
        check_state_number(name, state[name], 0.0)
    if (state["pending"] == 0) != (state["H"] is None):
        raise damaged(
            "H", f"{'None' if not state['pending'] else 'a tensor'} with {state['pending']} pending", "the other"
        )
    if state["pending"] > state["steps"] or (state["growth"] > 0 and not state["pending"]):
        raise damaged(
            "pending", f"consistent with {state['steps']} steps and growth {state['growth']:g}", state["pending"]
        )
    if state["steps"] == 0 and state["samples"] > 0:
        raise damaged("samples", "0 before the first update", state["samples"])
    if "H" in tensors:
        check_positive_definite("H", tensors["H"])
    if bool((tensors["energy"] < -1e-6 * (1 + tensors["energy"].abs().max())).any()):
        raise damaged("energy", "at least 0", float(tensors["energy"].min()))
    left, full = tensors["left"], ridges(linear, ridge, bias_ridge, like)
    low, high = float((left / full).min()), float((left / full).max())
    slack = 1e-5
    if not 0.5 - slack <= low or not high <= 1 + slack or (forgetting == 1.0 and low < 1 - slack):
        raise damaged("left", f"between half of the ridge {ridge:g} and all of it", f"{low:g} to {high:g} of it")
    check_root("T", tensors["T"], torch.zeros_like(left) if "H" in tensors else left)
    root = LeastSquaresState(tensors["T"], tensors["W"], tensors.get("H"), tensors["energy"], left)
    counters = np.array([float(state[name]) for name in _COUNTERS])
    return root, counters, Settings(tensors["prior"], ridge, bias_ridge, forgetting)


def check_setting(name: str, value: object, low: float, high: float) -> None:
    """A hyperparameter in (low, high]."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not low < value <= high
        or value == float("inf")
    ):
        words = f"({low:g}, inf)" if high == float("inf") else f"({low:g}, {high:g}]"
        raise ValueError(f"state_dict[{name!r}]: {name} must be in {words}, got {value!r}")


class Tuned(NamedTuple):
    """What a state of `SelfTuningRLS` brings beside its candidates."""

    grid: Grid
    prior: Tensor
    salt: int
    seen: dict[int, int]


def write_candidates(state: Candidates, tuned: Tuned) -> dict[str, Any]:
    """The state of a `SelfTuningRLS`, as copies."""
    seen = torch.tensor([*tuned.seen.keys(), *tuned.seen.values()], dtype=torch.int64).reshape(2, -1)
    tensors = {name: getattr(state, name).clone() for name in _TENSORS}
    numbers = {name: getattr(state, name) for name in _NUMBERS}
    grid = [(*pair, tuned.grid.bias_ridge) for pair in tuned.grid.settings]
    more = {"prior": tuned.prior.clone(), "grid": grid, "salt": tuned.salt, "seen": seen}
    return tensors | numbers | more


def read_candidates(state: Any, like: Candidates, settings: Tuned) -> tuple[Candidates, Tuned]:
    """The state that `write_candidates` wrote, for a solver whose own is shaped `like` this one."""
    check_keys("RLS with settings to choose", state, {*_TENSORS, *_NUMBERS, "prior", "grid", "salt", "seen"})
    prior = settings.prior
    L, J, p = len(settings.grid.lambdas), len(settings.grid.settings), prior.shape[1]
    tensors = {
        name: check_state_tensor(
            name,
            state[name],
            tuple(prior.shape if name == "prior" else getattr(like, name).shape),
            dtype=prior.dtype,
            device=prior.device,
        )
        for name in (*_TENSORS, "prior")
    }
    grid = read_grid(state["grid"], J)
    if len(grid.lambdas) != L:
        raise damaged("grid", f"of {L} different values of forgetting", len(grid.lambdas))
    check_state_number("scale", state["scale"], 0.0)
    check_state_number("active", state["active"], 0, J - 1, integer=True)
    check_state_number("steps", state["steps"], 0, 2**53, integer=True)
    check_state_number("salt", state["salt"], 0, 2**32 - 1, integer=True)
    check_state_number("first", state["first"], -1, 2**32 - 1, integer=True)
    check_state_number("unrepeated", state["unrepeated"], 0, 2**53, integer=True)
    samples = check_list("samples", state["samples"], L)
    for i, value in enumerate(samples):
        check_state_number(f"samples[{i}]", value, 0.0)
    cursors = check_list("cursors", state["cursors"], L)
    for i, value in enumerate(cursors):
        check_state_number(f"cursors[{i}]", value, 0, p - 1, integer=True)
    steps, scale, active = state["steps"], float(state["scale"]), state["active"]
    history = read_history(state["history"], J, steps, active)
    seen = read_seen(state["seen"], steps)
    if (steps > 0 and not scale) or (steps == 0 and (any(samples) or seen or any(cursors))):
        raise damaged("steps", "consistent with scale, samples and cursors", steps)
    M, N, score = tensors["M"], tensors["N"], tensors["score"]
    for name, matrices in (("M", M), ("score", score[None])):
        root = matrices.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
        bound = (1 + 1e-6) * root[:, :, None] * root[:, None] + 1e-300
        tolerance = 1e-6 if prior.dtype == torch.float64 else 1e-3
        if bool((matrices.abs() > bound).any()) or bool(((matrices - matrices.mT).abs() > tolerance * bound).any()):
            raise damaged(name, "a symmetric matrix of sums of squares", "one that cannot be")
    share = N[:, 0]
    if bool((share < 0.5 - 1e-5).any()) or bool((share > 1 + 1e-5).any()):
        raise damaged(
            "N", "shares of the ridge between a half and 1", f"{float(share.min()):g} to {float(share.max()):g}"
        )
    basis = torch.cat([tensors["prior"], tensors["prior"].square()])
    if (
        not torch.allclose(N[:, 1:], share[:, None] * basis, rtol=1e-6, atol=1e-9 * float(1 + basis.abs().max()))
        and not steps
    ):
        raise damaged("N", "the prior's before the first update", "another")
    changes: dict[str, Any] = {name: tensors[name] for name in _TENSORS}
    changes |= {name: state[name] for name in ("active", "steps", "first", "unrepeated")}
    changes |= {"scale": scale, "samples": tuple(map(float, samples)), "cursors": tuple(cursors)}
    new = like._replace(**changes, history=history, seen=len(seen))
    if steps:
        W, (factor, aim) = tensors["W"], factors(grid, M, N, scale)
        WA = W @ factor @ factor.mT
        size = W.abs().amax((1, 2)) * factor.square().sum((1, 2)) + aim.abs().amax((1, 2))
        if not bool(((WA - aim).abs() <= 1e-6 * size[:, None, None]).all()):
            raise damaged("W", "the weights that M and N determine", "others")
    return new, Tuned(grid, tensors["prior"], state["salt"], seen)


def check_list(key: str, value: object, count: int | None = None) -> list[Any]:
    """A list or tuple of so many entries."""
    if not isinstance(value, (list, tuple)) or (count is not None and len(value) != count):
        came = f"{len(value)} entries" if isinstance(value, (list, tuple)) else type(value).__name__
        raise damaged(key, "a list" if count is None else f"a list of {count} entries", came)
    return list(value)


def read_grid(value: object, count: int) -> Grid:
    """Triples (forgetting, ridge, that of the bias); pairs are from before the bias had one of its own."""
    settings, of_bias = [], set()
    for i, triple in enumerate(check_list("grid", value, count)):
        entries = check_list(f"grid[{i}]", triple)
        lam, ridge, bias_ridge = check_list(f"grid[{i}]", entries + ["ridge"] * (len(entries) == 2), 3)
        check_setting("forgetting", lam, 0.0, 1.0)
        ridge, bias_ridge = check_ridges([ridge, bias_ridge])
        settings.append((float(lam), ridge))
        of_bias.add(bias_ridge)
    if len(of_bias) != 1:
        raise damaged("grid", "of one ridge for the bias", sorted(map(str, of_bias)))
    return Grid(tuple(settings), of_bias.pop())


def read_history(value: object, count: int, steps: int, active: int) -> tuple[tuple[int, int], ...]:
    history: list[tuple[int, int]] = []
    for i, pair in enumerate(check_list("history", value)):
        step, member = check_list(f"history[{i}]", pair, 2)
        check_state_number(f"history[{i}][0]", step, history[-1][0] if history else 0, steps, integer=True)
        check_state_number(f"history[{i}][1]", member, 0, count - 1, integer=True)
        history.append((step, member))
    if not history or history[-1][1] != active:
        raise damaged(
            "history", f"changes of the choice that end with candidate {active}", value if not history else history[-1]
        )
    return tuple(history)


def read_seen(value: object, steps: int) -> dict[int, int]:
    if not isinstance(value, Tensor) or value.dtype != torch.int64 or value.ndim != 2 or len(value) != 2:
        raise damaged(
            "seen", "an int64 tensor of shape (2, n)", value if not isinstance(value, Tensor) else value.dtype
        )
    names, updates = value.tolist()
    if len(set(names)) != len(names) or not all(0 < update <= steps for update in updates):
        raise damaged("seen", f"different hashes and updates in [1, {steps}]", "others")
    return dict(zip(names, updates, strict=True))
