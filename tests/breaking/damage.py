"""Damage to saved states, one place at a time, such as a file, a network or an editor may do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Entries that are never negative, whatever the solver: counters, masses, variances, penalties.
NEVER_NEGATIVE = {
    "amsgrad", "bend", "cursor", "cursors", "energy", "eps", "exp_avg_sq", "forgetting", "growth", "label_smoothing",
    "lr", "mass", "masses", "member", "memory", "pair_mass", "pairs", "pending", "ridge", "ridge_left", "samples",
    "scale", "shares", "step", "steps", "tally", "unrepeated", "weight_decay",
}  # fmt: skip

FRACTIONS = {"dampening", "lr", "momentum", "weight_decay"}  # options that may be given as integers

Path = tuple[Any, ...]


def damages(state: Any) -> Iterator[tuple[str, Any]]:
    """Copies of a nested state, each damaged in one place, with a name for what was done."""
    for path, value in list(walk(state)):
        where = "".join(f"[{key!r}]" for key in path) or "the whole"
        for what, damaged in of_value(path, value):
            yield f"{where}: {what}", put(state, path, damaged)


def walk(state: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every node of the state, from the whole to the leaves."""
    yield path, state
    if isinstance(state, dict):
        for key, value in state.items():
            yield from walk(value, (*path, key))
    elif isinstance(state, (list, tuple)):
        some = 1 if state and isinstance(state[0], dict) else 3  # the first ones stand for the others
        for i, value in enumerate(state[:some]):
            yield from walk(value, (*path, i))


def put(state: Any, path: Path, new: Any) -> Any:
    """The state with one node replaced; it shares all others."""
    if not path:
        return new
    key, rest = path[0], path[1:]
    if isinstance(state, dict):
        return {k: put(v, rest, new) if k == key else v for k, v in state.items()}
    items = list(state)
    items[key] = put(items[key], rest, new)
    return type(state)(items) if type(state) in (list, tuple) else items


def of_value(path: Path, value: Any) -> Iterator[tuple[str, Any]]:
    yield "None", None if value is not None else float("nan")
    yield "a string", "3" if not isinstance(value, str) else value + "?"
    yield "an object", object()
    if isinstance(value, dict):
        yield from of_dict(value)
    elif isinstance(value, (list, tuple)):
        yield from of_list(value)
    elif isinstance(value, Tensor):
        yield from of_tensor(path, value)
    elif isinstance(value, np.ndarray):
        for what, damaged in of_tensor(path, torch.from_numpy(value.copy())) if value.dtype.kind in "fiub" else ():
            yield what, damaged.numpy() if isinstance(damaged, Tensor) and not damaged.is_complex() else damaged
    elif isinstance(value, bool):
        yield "a number for a flag", 0.5
    elif isinstance(value, (int, float)):
        yield from of_number(path, value)
    elif isinstance(value, str):
        yield "no string", 3


def of_dict(value: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    yield "empty", {}
    yield "a list for a dict", list(value.values())
    yield "an entry too many", value | {"intruder": 1.0}
    for key in value:
        yield f"without {key!r}", {k: v for k, v in value.items() if k != key}
        yield f"{key!r} under another name", {(f"{k}_" if k == key else k): v for k, v in value.items()}
    keys = list(value)
    for a, b in itertools.pairwise(keys):
        if kind(value[a]) != kind(value[b]):  # of one kind and shape nobody could tell
            yield f"{a!r} and {b!r} swapped", value | {a: value[b], b: value[a]}


def of_list(value: Any) -> Iterator[tuple[str, Any]]:
    make = type(value) if type(value) in (list, tuple) else list
    if len(value):
        yield "empty", make(())
        yield "truncated", make(value[:-1])
    yield "an item too many", make([*value, *(value[-1:] or [1.0])])
    yield "a dict for a list", dict(enumerate(value))


def of_number(path: Path, value: float) -> Iterator[tuple[str, Any]]:
    yield "NaN", math.nan
    yield "Inf", math.inf
    yield "-Inf", -math.inf
    yield "a list", [value]
    yield "a tensor of two", torch.tensor([1.0, 2.0])
    if isinstance(value, int):
        if name_of(path) not in FRACTIONS:
            yield "a fraction", value + 0.5
        yield "a flag", bool(value)
        yield "huge", 10**30
    if name_of(path) in NEVER_NEGATIVE:
        yield "negative", -value - 1


def of_tensor(path: Path, value: Tensor) -> Iterator[tuple[str, Any]]:
    yield "a list for a tensor", value.tolist()
    yield "one more dimension", value.unsqueeze(0)
    yield "complex", value.to(torch.complex64) if value.dtype != torch.bool else value.to(torch.int16)
    if value.is_floating_point():
        yield "halved precision", value.to(torch.float32 if value.dtype == torch.float64 else torch.float16)
        yield "integers", (value * 100).to(torch.int64)
    else:
        yield "floats", value.to(torch.float32)
    if value.ndim:
        yield "a row too many", torch.cat([value, value[-1:]]) if len(value) else value.new_zeros(1, *value.shape[1:])
        yield "no rows", value[:0] if len(value) else value.new_zeros(3, *value.shape[1:])
    if value.ndim == 2 and value.shape[0] != value.shape[1]:
        yield "transposed", value.T.contiguous()
    if not value.numel():
        return
    if value.is_floating_point():
        for what, number in (("NaN", math.nan), ("Inf", math.inf), ("-Inf", -math.inf)):
            for at in {0, value.numel() - 1}:
                yield f"{what} at {at}", changed(value, at, number)
    if name_of(path) in NEVER_NEGATIVE:
        yield "negative", -value.abs() - 1
        yield "negative in one place", changed(value, value.numel() - 1, -1.0)
    if is_curvature(value):
        n = value.shape[-1]
        yield "of the other sign", -value
        yield "a negative diagonal", changed(value, 0, -float(value.flatten()[0].abs()) - 1)
        yield "asymmetric", changed(value, 1, float(value.flatten()[1]) + 0.5 * float(value.abs().max()))
        big = 10 * float(value.abs().max())
        yield "indefinite", changed(changed(value, 1, big), n, big)


def is_curvature(value: Tensor) -> bool:
    """Whether this is a symmetric matrix, or a stack of them, of positive definite kind."""
    if value.ndim < 2 or value.shape[-1] != value.shape[-2] or value.shape[-1] < 2 or not value.is_floating_point():
        return False
    if not torch.equal(value, value.mT) or torch.equal(value.tril(-1), torch.zeros_like(value)):
        return False  # a diagonal one may be a triangular factor
    return bool((torch.linalg.eigvalsh(value.double()) > 0).all())


def changed(value: Tensor, at: int, number: float) -> Tensor:
    copied = value.clone().contiguous()
    copied.view(-1)[at] = number
    return copied


def kind(value: Any) -> Any:
    if isinstance(value, (Tensor, np.ndarray)):
        return "tensor", value.dtype, tuple(value.shape)
    return float if type(value) is int else type(value)


def name_of(path: Path) -> Any:
    """The entry's name: the last key that is a string."""
    return next((key for key in reversed(path) if isinstance(key, str)), None)


def same(a: Any, b: Any) -> bool:
    """Whether two nested states are equal to the bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and (
            a.tolist() == b.tolist() if a.dtype.hasobject else a.tobytes() == b.tobytes()
        )  # fmt: skip
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (a != a and b != b)
    return type(a) is type(b) and bool(a == b)


def raw(value: Tensor) -> bytes:
    return value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
