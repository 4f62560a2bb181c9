"""Random generators, and names of features and classes, as plain data that any format can hold."""

from __future__ import annotations

import json
from collections.abc import Hashable
from datetime import date, datetime
from typing import Any

import numpy as np

from sepsa.states.schema import Entries, brief, damaged, read


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


def read_generator(name: str, value: object) -> np.random.Generator:
    """A generator that continues from `generator_state`."""
    state = read(name, value, {"name", "state", "increment", "has_uint32", "uinteger"})
    state.equal("name", "PCG64")
    for key in ("state", "increment"):
        if not isinstance(state[key], str) or not state[key].isdecimal() or int(state[key]) >= 1 << 128:
            raise state.damaged(key, "a 128-bit integer in decimal", brief(state[key]))
    generator = np.random.default_rng(0)
    generator.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": int(state["state"]), "inc": int(state["increment"])},
        "has_uint32": state.integer("has_uint32", 0, 1),
        "uinteger": state.integer("uinteger", 0, 2**32 - 1),
    }
    return generator


def pack_label(label: Hashable) -> Any:
    """A name, a label or a key as plain data: strings, numbers, booleans, None and dates, and tuples of them."""
    if label is None or type(label) in (str, bool, int, float):
        return label
    if isinstance(label, np.generic) and label.dtype.kind not in "mM" and type(label.item()) in (str, bool, int, float):
        return {"numpy": label.dtype.str, "value": label.item()}
    if type(label) is tuple:
        return {"tuple": [pack_label(part) for part in label]}
    if isinstance(label, (np.datetime64, np.timedelta64)):
        return {"numpy": label.dtype.str, "value": label.astype(np.int64).item()}
    if isinstance(label, date) and label == label:
        kind = datetime if isinstance(label, datetime) else date
        if kind.fromisoformat(label.isoformat()) == label:  # not the nanoseconds of pandas
            return {kind.__name__: label.isoformat()}
    raise ValueError(
        "names of features, classes, keys and samples that wait must be strings, numbers, booleans, None, dates or "
        f"tuples of these, got {label!r} of type {type(label).__name__}"
    )


def unpack_label(name: str, value: Any) -> Hashable:
    """The label that `pack_label` was given, from the entry `name`."""
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, dict) and set(value) == {"tuple"} and isinstance(value["tuple"], (list, tuple)):
        return tuple(unpack_label(name, part) for part in value["tuple"])
    if isinstance(value, dict):
        try:
            if len(value) == 1:
                ((kind, text),) = value.items()
                return {"date": date, "datetime": datetime}[kind].fromisoformat(text)
            dtype = np.dtype(value["numpy"])
            if dtype.kind in "mM":
                return np.int64(value["value"]).astype(dtype)
            if dtype.kind != "V":  # numpy.void(n) takes n bytes
                return dtype.type(value["value"])
        except (KeyError, TypeError, ValueError):
            pass
    raise damaged(name, "a label as `pack_label` writes it", brief(value))


def unpack_labels(state: Entries, key: str) -> dict[Hashable, int]:
    """Distinct labels with their positions."""
    items = state.items(key)
    labels = [unpack_label(items.path(i), label) for i, label in enumerate(items.values)]
    positions = {label: i for i, label in enumerate(labels)}
    if len(positions) != len(labels):
        raise state.damaged(key, "distinct labels", labels)
    return positions


def packed(key: Hashable) -> str:
    """A key or an identifier as a line of text; 1, True and 1.0 are three keys, NumPy's 1 is the first.

    A missing one is an error: all of them would be the same.
    """
    if type(key).__name__ == "NAType" or (isinstance(key, (float, date, np.generic)) and key != key):
        raise ValueError(f"a key or an id must not be missing, got {key!r}: leave such rows out")
    return json.dumps(pack_label(plain(key)))


def plain(key: Hashable) -> Any:
    """The key with Python values for NumPy's scalars."""
    if isinstance(key, (np.datetime64, np.timedelta64)):  # of nanoseconds `item` makes an integer
        exact = key.astype(f"{key.dtype.kind}8[us]")
        return exact.item() if exact == key and key.dtype.kind == "M" else key
    if isinstance(key, tuple):
        return tuple(plain(part) for part in key)
    return key.item() if isinstance(key, np.generic) else key
