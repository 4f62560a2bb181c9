"""Names of features and classes, and keys, as plain data that any format can hold."""

from __future__ import annotations

import json
from collections.abc import Hashable
from datetime import date
from typing import Any

import numpy as np

from sepsa.states.schema import Entries
from sepsa.states.tree import PLAIN, Decoder, Tree


def is_label(value: Any) -> bool:
    """Whether this is a string, number, boolean, None, date, or a tuple of these."""
    if type(value) is tuple:
        return all(map(is_label, value))
    return type(value) in PLAIN or isinstance(value, (date, np.generic))


def pack_label(label: Hashable) -> Any:
    """A name, a label or a key as plain data."""
    if is_label(label):
        try:
            return Tree().encode(label, "a label")
        except TypeError:  # nanoseconds of pandas, complex numbers
            pass
    raise ValueError(
        "names of features, classes, keys and samples that wait must be strings, numbers, booleans, None, dates or "
        f"tuples of these, got {label!r} of type {type(label).__name__}"
    )


def unpack_label(value: Any) -> Any:
    """The label that `pack_label` was given."""
    return Decoder({})(value)


def unpack_labels(state: Entries, key: str) -> dict[Hashable, int]:
    """Labels with their positions."""
    return {unpack_label(label): i for i, label in enumerate(state[key])}


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
