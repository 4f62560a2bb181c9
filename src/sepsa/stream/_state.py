"""The border for saved states: every entry is checked, by its name, before anything is changed.

A state is nested dicts and lists of NumPy arrays, numbers, strings, booleans and None, so that any format can hold it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def mapping(entry: str, value: object, keys: set[str]) -> dict[str, Any]:
    """A dict with exactly these keys."""
    if not isinstance(value, dict):
        raise ValueError(f"{entry} must be a dict, got {type(value).__name__}")
    if set(value) != keys:
        missing, extra = sorted(keys - set(value)), sorted(map(str, set(value) - keys))
        raise ValueError(f"{entry} has other entries than this version's: missing {missing}, unexpected {extra}")
    return value


def sequence(entry: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{entry} must be a list, got {type(value).__name__}")
    return value


def array(
    entry: str,
    value: object,
    shape: tuple[int | None, ...],
    *,
    dtype: Any = np.float64,
    low: float = -math.inf,
    missing: bool = False,
) -> NDArray[Any]:
    """A copy of an array of this dtype and shape (None: any length), finite and at least `low`; NaN where `missing`."""
    if not isinstance(value, np.ndarray) or value.dtype != np.dtype(dtype):
        came = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
        raise ValueError(f"{entry} must be an array of {np.dtype(dtype)}, got {came}")
    fits = len(shape) == value.ndim and all(want in (None, n) for want, n in zip(shape, value.shape, strict=True))
    if not fits:
        words = "(" + ", ".join("n" if n is None else str(n) for n in shape) + ("," if len(shape) == 1 else "") + ")"
        raise ValueError(f"{entry} must have shape {words}, got {value.shape}")
    good = np.isfinite(value) | (np.isnan(value) if missing else False)
    if not good.all() or (value[np.isfinite(value)] < low).any():
        bad = value[~good] if not good.all() else value[value < low]
        bound = "" if low == -math.inf else f" and at least {low:g}"
        raise ValueError(f"{entry} must be finite{bound}, got {bad[0]}: the state is damaged")
    return value.copy()


def integer(entry: str, value: object, low: int, high: int = 2**63 - 1) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
        bound = f"at least {low}" if high == 2**63 - 1 else f"{low} to {high}"
        raise ValueError(f"{entry} must be an integer of {bound}, got {value!r}")
    return int(value)


def number(entry: str, value: object, low: float = -math.inf) -> float:
    fits = isinstance(value, (int, float, np.floating)) and not isinstance(value, bool)
    if not fits or not math.isfinite(value) or value < low:  # type: ignore[arg-type, operator]
        raise ValueError(f"{entry} must be a finite number of at least {low:g}, got {value!r}")
    return float(value)  # type: ignore[arg-type]


def equal(entry: str, value: object, wanted: object) -> None:
    """Refuse what was saved under another setting than the one in force."""
    try:
        same = type(value) is type(wanted) and bool(value == wanted)
    except (ValueError, TypeError, RuntimeError):  # an array or a tensor where there was a number
        same = False
    if not same:
        raise ValueError(f"{entry} must be {wanted!r}, as this learner was made, got {value!r}")


def generator_state(generator: np.random.Generator) -> dict[str, Any]:
    """The state of NumPy's default generator; its 128-bit integers as strings."""
    state = generator.bit_generator.state
    inner = state["state"]
    return {
        "name": state["bit_generator"],
        "state": str(inner["state"]),
        "increment": str(inner["inc"]),
        "has_uint32": int(state["has_uint32"]),
        "uinteger": int(state["uinteger"]),
    }


def generator(entry: str, value: object) -> np.random.Generator:
    """A generator that continues from `generator_state`."""
    state = mapping(entry, value, {"name", "state", "increment", "has_uint32", "uinteger"})
    equal(f"{entry}['name']", state["name"], "PCG64")
    for key in ("state", "increment"):
        if not isinstance(state[key], str) or not state[key].isdecimal() or int(state[key]) >= 1 << 128:
            raise ValueError(f"{entry}[{key!r}] must be a 128-bit integer in decimal, got {state[key]!r}")
    made = np.random.default_rng(0)
    made.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": int(state["state"]), "inc": int(state["increment"])},
        "has_uint32": integer(f"{entry}['has_uint32']", state["has_uint32"], 0, 1),
        "uinteger": integer(f"{entry}['uinteger']", state["uinteger"], 0, 2**32 - 1),
    }
    return made


def pack_label(label: Hashable) -> Any:
    """A feature's name or a class's label as plain data: strings, numbers, booleans and None, and tuples of them."""
    if label is None or type(label) in (str, bool, int, float):
        return label
    if isinstance(label, np.generic) and type(label.item()) in (str, bool, int, float):
        return {"numpy": label.dtype.str, "value": label.item()}
    if type(label) is tuple:
        return {"tuple": [pack_label(part) for part in label]}
    raise ValueError(
        f"names of features and classes must be strings, numbers, booleans, None or tuples of these to be saved, "
        f"got {label!r} of type {type(label).__name__}"
    )


def unpack_label(entry: str, value: Any) -> Hashable:
    """The label that `pack_label` was given."""
    if value is None or type(value) in (str, bool, int, float):
        return value  # type: ignore[no-any-return]
    if isinstance(value, dict) and set(value) == {"tuple"}:
        return tuple(unpack_label(entry, part) for part in sequence(entry, value["tuple"]))
    if isinstance(value, dict) and set(value) == {"numpy", "value"}:
        try:
            return np.dtype(value["numpy"]).type(value["value"])
        except (TypeError, ValueError):
            pass
    raise ValueError(f"{entry} must be a label as saved, got {value!r}")


def unpack_labels(entry: str, value: object) -> dict[Hashable, int]:
    """Distinct labels with their positions."""
    labels = [unpack_label(f"{entry}[{i}]", label) for i, label in enumerate(sequence(entry, value))]
    positions = {label: i for i, label in enumerate(labels)}
    if len(positions) != len(labels):
        raise ValueError(f"{entry} must hold distinct labels, got {labels}")
    return positions
