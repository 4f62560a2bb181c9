"""Samples that were predicted with an identifier and wait for their targets: a limited number, without the oldest."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sepsa.states import schema
from sepsa.states.plain import packed, unpack_label
from sepsa.stream.kernels.parts import Floats

Row: TypeAlias = tuple[tuple[Hashable, ...], bytes]  # the names of the features that a sample has, and their values

SHARED = 1000  # sets of names that rows have in common, of which more are not looked for


class OpenRows:
    """Samples by identifier, in the order in which they were added."""

    def __init__(self) -> None:
        self.dropped = 0  # samples that were left out for later ones
        self._rows: OrderedDict[str, Row] = OrderedDict()
        self._names: dict[tuple[Hashable, ...], tuple[Hashable, ...]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, id: Hashable, names: Sequence[Hashable], values: Floats, most: int) -> None:
        """Keep a sample; beyond `most` the oldest is dropped. The same sample may come again, and changes nothing."""
        if id != id:
            raise ValueError(f"id must name a sample, got {id!r}: leave it out where there is none")
        there = values == values
        if not there.all():
            names, values = [name for name, known in zip(names, there, strict=True) if known], values[there]
        key, given = packed(id), (tuple(names), values.tobytes())
        known = self._rows.get(key)
        if known is not None and known != given:
            raise ValueError(f"id {id!r} is open for another sample: learn its target first, or give another id")
        if known is None:
            if len(self._names) > SHARED:
                self._names = {}
            self._rows[key] = self._names.setdefault(given[0], given[0]), given[1]
        while len(self._rows) > most:
            self._rows.popitem(last=False)
            self.dropped += 1

    def sample(self, id: Hashable) -> dict[Any, float]:
        """The features of a sample."""
        row = self._rows.get(packed(id))
        if row is None:
            raise ValueError(
                f"id {id!r} is not open: no sample was predicted with it, its target was learned already, or it was "
                f"among the {self.dropped} that were dropped for later ones (max_open_ids); give x"
            )
        return dict(zip(row[0], np.frombuffer(row[1]).tolist(), strict=True))

    def remove(self, id: Hashable) -> None:
        del self._rows[packed(id)]

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """Return the state; texts, of which there may be many, are arrays of bytes."""
        rows = self._rows.values()
        sets = {names: i for i, names in enumerate(dict.fromkeys(names for names, _ in rows))}
        return {
            "ids": as_bytes(self._rows),
            "names": as_bytes(map(packed, sets)),
            "sets": np.array([sets[names] for names, _ in rows], np.int64),
            "values": np.frombuffer(b"".join(values for _, values in rows)).copy(),
            "dropped": self.dropped,
        }

    @classmethod
    def from_state(cls, state_dict: Any, entry: str) -> OpenRows:
        """Continue from the result of `state_dict`."""
        state = schema.read(entry, state_dict, {"ids", "names", "sets", "values", "dropped"})
        ids, sets = list(map(packed, read_labels(state, "ids"))), read_labels(state, "names")
        if len(set(ids)) != len(ids):
            raise state.damaged("ids", "distinct identifiers", len(ids))
        if not all(isinstance(names, tuple) for names in sets):
            raise state.damaged("names", "tuples of names", schema.brief(sets))
        places = state.array("sets", (len(ids),), np.int64, low=0)
        if places.max(initial=-1) >= len(sets):
            raise state.damaged("sets", f"numbers below {len(sets)}", places.max())
        names: list[Any] = [sets[place] for place in places.tolist()]
        ends = np.cumsum([0, *map(len, names)]).tolist()
        values = state.array("values", (ends[-1],))
        new = cls()
        new.dropped = state.integer("dropped", 0)
        for i, (start, stop) in enumerate(pairwise(ends)):
            new._rows[ids[i]] = names[i], values[start:stop].tobytes()
        return new


def as_bytes(labels: Iterable[str]) -> NDArray[np.uint8]:
    """The results of `packed` as lines of text."""
    return np.frombuffer("\n".join(labels).encode(), np.uint8).copy()


def read_labels(state: schema.Entries, key: str) -> list[Hashable]:
    """The labels that `as_bytes` was given."""
    lines = state.array(key, (None,), np.uint8).tobytes().splitlines()
    try:
        return [unpack_label(state.path(key), json.loads(line)) for line in lines]
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise state.damaged(key, "lines of JSON", f"{len(lines)} lines") from None
