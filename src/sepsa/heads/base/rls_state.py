"""The states of `RLS` and `SelfTuningRLS` as dicts: written, and checked entry by entry when they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sepsa.heads.base.parameters import ridges
from sepsa.heads.base.state_checks import check_positive_definite, check_root, read_forgetting, read_ridges, read_solver
from sepsa.heads.math.candidates import Candidates, Grid, factors
from sepsa.heads.math.least_squares import LeastSquaresState
from sepsa.heads.math.ridge import BiasRidge
from sepsa.states.schema import Entries, read

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_STEPS = 2**53  # beyond, a float64 cannot count
_ROOT = ("T", "W", "H", "energy", "left")
_COUNTERS = ("steps", "samples", "cursor", "pending", "growth")  # in the order of their places
_TENSORS = ("M", "N", "W", "score")
_NUMBERS = ("scale", "active", "steps", "samples", "cursors", "first", "unrepeated", "history")
_ROUNDING = 1e-5  # by which a share of the ridge may be outside its bounds


class RLSSettings(NamedTuple):
    """What a state of `RLS` holds beside its Root and counters."""

    prior: Tensor
    ridge: float
    bias_ridge: BiasRidge
    forgetting: float


def write_root(root: LeastSquaresState, counters: NDArray[np.float64], settings: RLSSettings) -> dict[str, Any]:
    """The state of an `RLS`, as copies."""
    state: dict[str, Any] = dict(zip(_ROOT, root.map(Tensor.clone), strict=True))
    steps, samples, cursor, pending, growth = counters.tolist()
    state |= {"steps": int(steps), "samples": samples, "cursor": int(cursor), "pending": int(pending), "growth": growth}
    pair = [settings.ridge, settings.bias_ridge]
    return state | {"prior": settings.prior.clone(), "ridges": pair, "forgetting": settings.forgetting}


def read_root(
    state_dict: Any, linear: nn.Linear, like: Tensor
) -> tuple[LeastSquaresState, NDArray[np.float64], RLSSettings]:
    """The state that `write_root` wrote, for a head whose prior has the shape, dtype and device of `like`."""
    state = read_solver("RLS", state_dict, {*_ROOT, *_COUNTERS, "prior", "forgetting"})
    m, p = like.shape
    shapes = {"T": (p, p), "W": (m, p), "H": (p, p), "energy": (m,), "left": (p,), "prior": (m, p)}
    tensors = {
        name: state.tensor(name, shape, like.dtype, like.device)
        for name, shape in shapes.items()
        if name != "H" or state["H"] is not None
    }
    settings = RLSSettings(
        tensors["prior"], *read_ridges("state_dict['ridges']", state["ridges"]), read_forgetting(state)
    )
    counters = read_counters(state, p)
    H, energy = tensors.get("H"), tensors["energy"]
    if H is not None:
        check_positive_definite(state, "H", H)
    if bool((energy < -1e-6 * (1 + energy.abs().max())).any()):
        raise state.damaged("energy", "at least 0", float(energy.min()))
    left, full = tensors["left"], ridges(linear, settings.ridge, settings.bias_ridge, like)
    low, high = float((left / full).min()), float((left / full).max())
    if not (low >= 0.5 - _ROUNDING and high <= 1 + _ROUNDING):  # forgetting may have been below 1 before
        expected = f"between half of the ridge {settings.ridge:g} and all of it"
        raise state.damaged("left", expected, f"{low:g} to {high:g} of it")
    check_root(state, "T", tensors["T"], left if H is None else torch.zeros_like(left))
    return LeastSquaresState(tensors["T"], tensors["W"], H, energy, left), counters, settings


def read_counters(state: Entries, p: int) -> NDArray[np.float64]:
    """The counters of an `RLS` in the order of their places."""
    steps, pending = state.integer("steps", 0, MOST_STEPS), state.integer("pending", 0, 256)
    samples, growth = state.number("samples", 0.0), state.number("growth", 0.0)
    cursor = state.integer("cursor", 0, p - 1)
    if (pending == 0) != (state["H"] is None):
        raise state.damaged("H", f"{'a tensor' if pending else 'None'} with {pending} pending", "the other")
    if pending > steps or (growth > 0 and not pending):
        raise state.damaged("pending", f"consistent with {steps} steps and growth {growth:g}", pending)
    if steps == 0 and samples > 0:
        raise state.damaged("samples", "0 before the first update", samples)
    return np.array([steps, samples, cursor, pending, growth], np.float64)


class Tuned(NamedTuple):
    """What a state of `SelfTuningRLS` holds beside its candidates."""

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


def read_candidates(state_dict: Any, like: Candidates, settings: Tuned) -> tuple[Candidates, Tuned]:
    """The state that `write_candidates` wrote, for a solver whose own has the shapes of `like`."""
    keys = {*_TENSORS, *_NUMBERS, "prior", "grid", "salt", "seen"}
    state = read("state_dict", state_dict, keys, "RLS with settings to choose")
    prior = settings.prior
    L, J, p = len(settings.grid.lambdas), len(settings.grid.settings), prior.shape[1]
    tensors = {
        name: state.tensor(name, tuple(expected.shape), prior.dtype, prior.device)
        for name, expected in [(name, getattr(like, name)) for name in _TENSORS] + [("prior", prior)]
    }
    grid = read_grid(state, J)
    if len(grid.lambdas) != L:
        raise state.damaged("grid", f"of {L} different values of forgetting", len(grid.lambdas))
    counters, cursors = state.items("samples", L), state.items("cursors", L)
    numbers: dict[str, Any] = {
        "scale": state.number("scale", 0.0),
        "active": state.integer("active", 0, J - 1),
        "steps": state.integer("steps", 0, MOST_STEPS),
        "samples": tuple(counters.number(i, 0.0) for i in range(L)),
        "cursors": tuple(cursors.integer(i, 0, p - 1) for i in range(L)),
        "first": state.integer("first", -1, 2**32 - 1),
        "unrepeated": state.integer("unrepeated", 0, MOST_STEPS),
    }
    salt, steps = state.integer("salt", 0, 2**32 - 1), numbers["steps"]
    history = read_history(state, J, steps, numbers["active"])
    seen = read_seen(state, steps)
    learned = any(numbers["samples"]) or seen or any(numbers["cursors"])
    if (steps > 0 and not numbers["scale"]) or (steps == 0 and learned):
        raise state.damaged("steps", "consistent with scale, samples and cursors", steps)
    check_sums(state, tensors["M"], tensors["score"])
    check_shares(state, tensors["N"], tensors["prior"], steps)
    if steps:
        check_weights(state, grid, tensors, numbers["scale"])
    numbers |= {name: tensors[name] for name in _TENSORS}
    new = like._replace(**numbers, history=history, seen=len(seen))
    return new, Tuned(grid, tensors["prior"], salt, seen)


def read_grid(state: Entries, count: int) -> Grid:
    """Triples (forgetting, ridge, that of the bias); pairs are from before the bias had one of its own."""
    settings, bias_ridges = [], set()
    grid = state.items("grid", count)
    for i in range(count):
        triple = grid.items(i)
        pair = triple.values[1:]
        ridge, bias_ridge = read_ridges(grid.path(i), pair + ["ridge"] * (len(pair) == 1))
        settings.append((read_forgetting(triple, 0), ridge))
        bias_ridges.add(bias_ridge)
    if len(bias_ridges) != 1:
        raise state.damaged("grid", "of one ridge for the bias", sorted(map(str, bias_ridges)))
    return Grid(tuple(settings), bias_ridges.pop())


def read_history(state: Entries, count: int, steps: int, active: int) -> tuple[tuple[int, int], ...]:
    """The changes (update, candidate) of the choice, of which the last made `active` the candidate."""
    history: list[tuple[int, int]] = []
    saved = state.items("history")
    for i in range(len(saved)):
        pair = saved.items(i, 2)
        history.append((pair.integer(0, history[-1][0] if history else 0, steps), pair.integer(1, 0, count - 1)))
    if not history or history[-1][1] != active:
        expected = f"changes of the choice that end with candidate {active}"
        raise state.damaged("history", expected, history[-1] if history else "none")
    return tuple(history)


def read_seen(state: Entries, steps: int) -> dict[int, int]:
    """The hash of each held-out sample with the update that learned it."""
    hashes, updates = state.tensor("seen", (2, None), torch.int64).tolist()
    if len(set(hashes)) != len(hashes) or not all(0 < update <= steps for update in updates):
        raise state.damaged("seen", f"different hashes and updates in [1, {steps}]", "others")
    return dict(zip(hashes, updates, strict=True))


def check_sums(state: Entries, M: Tensor, score: Tensor) -> None:
    """Check that M or a score is a sum of squares: symmetric, and |a_ij|² at most a_ii a_jj."""
    tolerance = 1e-6 if M.dtype == torch.float64 else 1e-3
    for name, matrices in (("M", M), ("score", score[None])):
        root = matrices.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
        bound = (1 + 1e-6) * root[:, :, None] * root[:, None] + 1e-300
        if bool((matrices.abs() > bound).any()) or bool(((matrices - matrices.mT).abs() > tolerance * bound).any()):
            raise state.damaged(name, "a symmetric matrix of sums of squares", "another matrix")


def check_shares(state: Entries, N: Tensor, prior: Tensor, steps: int) -> None:
    """Check that the shares of the ridge in N are in bounds, and before the first update those of the prior."""
    share = N[:, 0]
    low, high = float(share.min()), float(share.max())
    if not (low >= 0.5 - _ROUNDING and high <= 1 + _ROUNDING):
        raise state.damaged("N", "shares of the ridge between a half and 1", f"{low:g} to {high:g}")
    basis = torch.cat([prior, prior.square()])
    tolerance = 1e-9 * float(1 + basis.abs().max())
    if not steps and not torch.allclose(N[:, 1:], share[:, None] * basis, rtol=1e-6, atol=tolerance):
        raise state.damaged("N", "the prior's before the first update", "another")


def check_weights(state: Entries, grid: Grid, tensors: dict[str, Tensor], scale: float) -> None:
    """Check that W solves the normal equations of M and N."""
    W, (factor, aim) = tensors["W"], factors(grid, tensors["M"], tensors["N"], scale)
    WA = W @ factor @ factor.mT
    size = W.abs().amax((1, 2)) * factor.square().sum((1, 2)) + aim.abs().amax((1, 2))
    if not bool(((WA - aim).abs() <= 1e-6 * size[:, None, None]).all()):
        raise state.damaged("W", "the weights that M and N determine", "others")
