"""States with a checksum: a number that was changed after it was saved is refused, so that none needs its own check.

It does not tell the shapes and dtypes of arrays, which are checked where they are loaded.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Set
from typing import Any

from sepsa.states import schema
from sepsa.states.file import dumps, view
from sepsa.states.tree import Tree

CHECKSUM = "checksum"


def sealed(state: dict[str, Any]) -> dict[str, Any]:
    """The state with the checksum of its entries."""
    return state | {CHECKSUM: checksum("the state", state)}


def unsealed(name: str, state: Any, keys: Set[str]) -> schema.Entries:
    """The entries of a state, of these keys, that `sealed` returned; ValueError where one was changed."""
    new = schema.read(name, state, keys | {CHECKSUM})
    with schema.settings(name):
        told = checksum(name, new.values)
    if new.integer(CHECKSUM) != told:
        raise new.damaged(CHECKSUM, "that of the other entries", schema.brief(new[CHECKSUM]))
    return new


def checksum(name: str, state: Mapping[str, Any]) -> int:
    """The CRC-32 of all entries but itself."""
    tree = Tree()
    text = dumps(tree.encode({key: value for key, value in state.items() if key != CHECKSUM}, name))
    crc = zlib.crc32(text.encode())
    for array in tree.tensors:
        crc = zlib.crc32(view(array), crc)
    return crc
