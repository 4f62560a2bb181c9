"""A learner's memory: the place of each part, and all that Python does with a table of parts.

What a learner stores is one vector, of which every part is a view: to copy it copies the learner.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sepsa.compiled import code
from sepsa.learner.memory.parts import Field, Part, Record, Sizes, limit
from sepsa.learner.memory.views import EMPTY, Frame, Group
from sepsa.states import schema

SHAPES = "SHAPES"  # the entry of a saved group with the shapes of its parts, and of what was saved of each


class Place(NamedTuple):
    """Where a part of a state lies, and the sizes by which its shape is given."""

    group: Group
    part: Part
    start: int
    shape: tuple[int, ...]
    dtype: Any
    sizes: Sizes

    @property
    def cells(self) -> int:
        return (math.prod(self.shape) * int(self.dtype.itemsize) + 7) // 8


class Layout:
    """The places of all parts of these groups, and the numbers by which kernels find them.

    `copies` has the sizes of each copy of a repeated group.
    """

    def __init__(
        self,
        frame: Frame,
        groups: Sequence[Group],
        sizes: Sizes,
        copies: Mapping[str, Sequence[Sizes]] = EMPTY,
    ) -> None:
        self.frame, self.groups = frame, {group.name: group for group in groups}
        self.sizes = dict(sizes)
        for group in groups:
            self.sizes |= {} if group.repeated else {name: size(sizes) for name, size in group.sizes.items() if size}
        self.copies = copies
        self.places: dict[tuple[str, int, str], Place] = {}
        self.work: dict[tuple[str, str], Place] = {}  # of the parts that last for one call
        self.size, self.workspace = 0, len(frame.slots)
        positions = frame.positions
        code.check(frame.__name__, positions)
        numbers = [self.sizes.get(name, 0) for name in positions]
        for group in groups:
            if group.repeated:
                numbers[positions[group.name, "copies"]] = len(numbers)
            for copy, own in enumerate(copies[group.name] if group.repeated else [EMPTY]):
                starts = self._place(group, copy, {**self.sizes, **own})
                if group.repeated:
                    numbers += [*(own[name] for name in group.sizes), *starts.values()]
                else:
                    for name, start in starts.items():
                        numbers[positions[group.name, name]] = start
        self.numbers = np.array(numbers, dtype=np.int64)

    def _place(self, group: Group, copy: int, sizes: Sizes) -> dict[str, int]:
        """Give each part of a group a place; returns where they start."""
        starts = {}
        for part in group.parts:
            kind = part.dtype.dtype if isinstance(part.dtype, Record) else part.dtype
            shape = tuple(size if isinstance(size, int) else sizes[size] for size in part.shape)
            starts[part.name] = self.size if part.kept else self.workspace
            place = Place(group, part, starts[part.name], shape, np.dtype(kind), sizes)
            if part.kept:
                self.places[group.name, copy, part.name] = place
                self.size += place.cells
            else:
                self.work[group.name, part.name] = place
                self.workspace += place.cells
        return starts


class Memory:
    """The state of a learner: `memory("D", "heads", 1)` is a part as a view, here of the second copy of the heads.

    A record is a structured array without axes: `memory("COUNTS", "network")["steps"]`.
    """

    def __init__(self, layout: Layout, vector: Any = None) -> None:
        self.layout, self.vector = layout, np.zeros(layout.size) if vector is None else vector

    def __call__(self, name: str, group: str, copy: int = 0) -> NDArray[Any]:
        return view(self.vector, self.layout.places[group, copy, name])

    def of(self, group: str, copy: int = 0) -> Callable[[str], Any]:
        """The parts of a group as a function of their names."""
        return lambda name: self(name, group, copy)

    def names(self, group: str) -> list[str]:
        """The names of the kept parts of a group."""
        return [part.name for part in self.layout.groups[group].parts if part.kept]

    def start(self) -> None:
        """Write what the parts of a new memory, which is zero, hold before any row."""
        for place in self.layout.places.values():
            begin(self.vector, place)

    def restart(self, group: str, *names: str) -> None:
        """Write what these parts held before any row; of a record only the fields that restart."""
        for name in names:
            begin(self.vector, self.layout.places[group, 0, name], again=True)

    # ------------------------------------------------------------------ saving and loading

    @property
    def saved_groups(self) -> dict[str, tuple[str, int]]:
        """The groups with kept parts, and each copy of a repeated one, by their names in a saved state."""
        pairs = dict.fromkeys((group, copy) for group, copy, _ in self.layout.places)
        return {f"{pair[0]} {pair[1]}" if self.layout.groups[pair[0]].repeated else pair[0]: pair for pair in pairs}

    def state_dict(self) -> dict[str, Any]:
        """Copies of all parts, for a file."""
        return {name: self.save(*pair) for name, pair in self.saved_groups.items()}

    def load_state_dict(self, state: Any, entry: str) -> None:
        """Read all parts from what `state_dict` returned; a ValueError names the entry that is wrong."""
        new = schema.read(entry, state, set(self.saved_groups))
        for name, pair in self.saved_groups.items():
            self.load(new[name], new.path(name), *pair)

    def save(self, group: str, copy: int = 0) -> dict[str, Any]:
        """Copies of the parts of a group, without the ends of axes that hold what they held before any row.

        So room for rows that have not come, and trees that have not grown, take no place in a file.
        """
        places = {name: self.layout.places[group, copy, name] for name in self.names(group)}
        parts = {name: begun(self.vector, place) for name, place in places.items()}
        pairs = [(*places[name].shape, *part.shape) for name, part in parts.items()]
        return {name: saved(part) for name, part in parts.items()} | {SHAPES: np.concatenate(pairs).astype(np.int64)}

    def load(self, state: Any, entry: str, group: str, copy: int = 0) -> None:
        """Read the parts of a group from what `save` returned; ends of axes that it has left out stay at their start.

        A ValueError names the entry that is wrong.
        """
        entries = schema.read(entry, state, {SHAPES, *self.names(group)})
        shapes = shapes_of(self.layout.groups[group], entries)
        for name in self.names(group):
            place, (whole, there) = self.layout.places[group, copy, name], shapes[name]
            if whole != place.shape or any(map(operator.gt, there, whole)):
                raise entries.damaged(SHAPES, f"{place.shape} or less for {name}", (whole, there))
            read(entries, name, self.vector, place, there)
        for rule in self.layout.groups[group].rules:
            if not rule.holds(self.of(group, copy)):
                raise entries.damaged(rule.part, rule.expected, schema.brief(saved(self(rule.part, group, copy))))

    # ------------------------------------------------------------------ growth and units

    def grow(self, old: Memory, in_order: bool = True) -> None:
        """Take the parts of a smaller memory, after `start`; of a shorter ring the latest rows are kept.

        With `in_order` rings begin at their oldest row, and fields that restart are at their start.
        """
        for (group, copy, name), place in self.layout.places.items():
            former, own = old.layout.places[group, copy, name], view(self.vector, place)
            before = view(old.vector, former)
            if isinstance(place.part.dtype, Record):
                for field, form in place.part.dtype.fields.items():
                    if not (in_order and form.restarts):
                        own[field] = before[field]
                continue
            for ring in place.group.rings.keys() & place.part.shape if in_order else ():
                before = np.take(before, self.latest(old, group, ring), axis=place.part.shape.index(ring))
            place.part.grows(before, own, former.sizes, place.sizes)
        for group, each in self.layout.groups.items() if in_order else ():
            for ring, name in each.rings.items():
                kept = len(self.latest(old, group, ring))
                self(name, group)["rows"], self(name, group)["next"] = kept, kept % self.layout.sizes[ring]

    def latest(self, old: Memory, group: str, ring: str) -> Any:
        """The places of the rows of another memory's ring for which there is room here, from the oldest on."""
        numbers = old(self.layout.groups[group].rings[ring], group)
        kept = min(int(numbers["rows"]), self.layout.sizes[ring])
        return (int(numbers["next"]) - kept + np.arange(kept)) % old.layout.sizes[ring]

    def divide(self, unit: str, by: float) -> None:
        """Divide all that is in this unit, or in a power of it."""
        for place in self.layout.places.values():
            for declared, own in members(self.vector, place):
                if declared.unit[0] == unit:
                    own[...] = divided(own, by, declared.unit[1])


def view(vector: NDArray[Any], place: Place) -> NDArray[Any]:
    """A part of a state as a view of its dtype and shape."""
    cells = vector[place.start : place.start + place.cells]
    return cells.view(place.dtype)[: math.prod(place.shape)].reshape(place.shape)


def members(vector: NDArray[Any], place: Place) -> list[tuple[Part | Field, NDArray[Any]]]:
    """A part as it was declared, and as a view; of a record, each of its fields."""
    own, record = view(vector, place), place.part.dtype
    if isinstance(record, Record):
        return [(field, own[name]) for name, field in record.fields.items()]
    return [(place.part, own)]


def begin(vector: NDArray[Any], place: Place, again: bool = False) -> None:
    """Write what a part holds before any row: into zeros, or `again`."""
    for declared, own in members(vector, place):
        if isinstance(declared, Field):
            if declared.restarts or not again:
                own[...] = declared.start
        elif again or declared.start:  # zeros that are not written take no memory until they are needed
            own[...] = declared.start(place.sizes) if callable(declared.start) else declared.start


def shapes_of(group: Group, entries: schema.Entries) -> dict[str, list[tuple[int, ...]]]:
    """The shape of each part of a group, and of what was saved of it."""
    parts = [part for part in group.parts if part.kept]
    numbers = iter(entries.array(SHAPES, (2 * sum(len(part.shape) for part in parts),), np.int64).tolist())
    return {part.name: [tuple(islice(numbers, len(part.shape))) for _ in range(2)] for part in parts}


def begun(vector: NDArray[Any], place: Place) -> NDArray[Any]:
    """A part without the ends of its axes that hold what they held before any row, bit for bit."""
    own = view(vector, place)
    if own.dtype.names is not None or callable(place.part.start) or not own.size:
        return own
    bits = f"u{own.dtype.itemsize}"
    changed = np.nonzero(own.view(bits) != np.array(place.part.start, own.dtype).view(bits))
    return own[tuple(slice(0, int(places.max()) + 1 if places.size else 0) for places in changed)]


def saved(part: Any) -> Any:
    """A copy of a part for a file: a record is a vector."""
    if part.dtype.names is None:
        return part.copy()
    return np.array(part.item(), np.result_type(*(kind for kind, _ in part.dtype.fields.values())))


def divided(values: Any, by: float, power: int) -> Any:
    """values / by^power, in so many operations that a unit and its inverse round alike."""
    for _ in range(abs(power)):
        values = values / by if power > 0 else values * by
    return values


def read(entries: schema.Entries, key: str, vector: NDArray[Any], place: Place, there: tuple[int, ...]) -> None:
    """Read a part, of which `there` is the shape that was saved, from a saved entry, with its bounds."""
    own, record = view(vector, place), place.part.dtype
    if isinstance(record, Record):
        own[...] = tuple(entries.array(key, (len(record.fields),), record.saved).tolist())
    else:
        own[tuple(map(slice, there))] = entries.array(key, there, own.dtype)
    for declared, values in members(vector, place):
        # Kernels find places by integers without a look at their limits.
        if values.dtype.kind in "iu" and any(
            bound is not None and beyond(values, limit(bound, place.sizes)).any()
            for bound, beyond in zip(declared.bounds, (operator.lt, operator.gt), strict=True)
        ):
            raise entries.damaged(key, f"within {declared.bounds}", schema.brief(values))
