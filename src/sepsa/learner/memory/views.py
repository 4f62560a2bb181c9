"""Views of a learner's memory, by names, for kernels.

A kernel gets one pointer, `model`, to the learner's workspace, whose first cells are addresses: of the workspace, the
state and the layout, and of the arrays of the call. The layout is a vector of integers: sizes, and where each part of
the state and of the workspace starts. `group.MEAN(model)` is an array of it. Arrays made so count no references, which
would take as long as ten sums each; a record is a pointer to its numbers.

What is called here is plain Python; for compiled kernels the builder writes the code of each `generated` object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np

from sepsa.compiled.kernels import array_at, generated, words
from sepsa.learner.memory.parts import Part, Record, Rule, Sizes

EMPTY: Mapping[str, Any] = {}


class Frame(ModuleType):
    """What all groups of a learner share: its sizes, and the arrays that a call gives.

    `frame.X(model)` is the array X of the call, `frame.size.inputs(model)` the size "inputs".
    """

    repeated = False
    laid_out = False  # whether a learner of this frame was made, whose kernels know the places

    def __init__(self, name: str, sizes: tuple[str, ...], *given: Part) -> None:
        super().__init__(name)
        self.sizes, self.given = sizes, given
        self.slots = ("workspace", "state", "layout", *(part.name for part in given))
        self.groups: dict[str, Group] = {}
        self.size = ModuleType("sizes")
        self.add_sizes(sizes)
        for part in given:
            setattr(self, part.name, View(self, self, part))

    def add_sizes(self, names: tuple[str, ...]) -> None:
        """Let kernels see further sizes."""
        for name in names:
            setattr(self.size, name, Number(self, self, name))

    @cached_property
    def positions(self) -> dict[Any, int]:
        """Where the layout has each size, by its name, and each part's start; kernels that are compiled know them."""
        self.laid_out = True
        names: list[Any] = [*self.sizes]
        for name, group in sorted(self.groups.items()):
            names += [(name, "copies")] if group.repeated else [*group.sizes]
            names += [] if group.repeated else [(name, part.name) for part in group.parts]
        return {name: i for i, name in enumerate(names)}


class Group(ModuleType):
    """The parts of one member of a learner, and the sizes that only it knows, as functions of the others.

    `group.NAME(model)` is the part of this name, `group.views("ONE OTHER", model)` is a tuple of several.
    Of a repeated group there are several copies; its parts, and its sizes, which each copy has for itself, take the
    number of the copy. `rings` are the axes along which the last rows are stored, with the record that has
    `rows`, their number, and `next`, the place of the next; `rules` are what a saved state must fulfil beside bounds.
    """

    def __init__(
        self,
        frame: Frame,
        name: str,
        *parts: Part,
        sizes: Mapping[str, Callable[[Sizes], int] | None] = EMPTY,
        repeated: bool = False,
        rings: Mapping[str, str] = EMPTY,
        rules: tuple[Rule, ...] = (),
    ) -> None:
        super().__init__(f"parts of {name}")
        self.name, self.parts, self.sizes = name, parts, sizes
        self.repeated, self.rings, self.rules = repeated, rings, rules
        self.block = [*sizes, *(part.name for part in parts)]  # what the layout holds for each copy
        if frame.laid_out:
            raise RuntimeError(f"the group {name!r} must be declared before the first learner of its frame is made")
        frame.groups[name] = self
        if not repeated:
            frame.add_sizes(tuple(sizes))
        self.views = Views(self)
        for part in parts:
            setattr(self, part.name, View(frame, self, part))
        for own in sizes if repeated else ():
            setattr(self, own, Number(frame, self, own))


# In what follows the frame is the group of its sizes and of the arrays of a call.


def entry(frame: Frame, group: Any, name: str, model: Any, copy: Any = None) -> int:
    """What the layout has under a name, the value of a size or the start of a part; of a repeated group for a copy."""
    layout = words(model[frame.slots.index("layout")])
    if not (group.repeated and name in group.block):
        return int(layout[frame.positions[name]])
    first = layout[frame.positions[group.name, "copies"]]
    return int(layout[first + int(copy) * len(group.block) + group.block.index(name)])


class Number:
    """A size, as a function of the model."""

    def __init__(self, frame: Frame, group: Any, name: str) -> None:
        self.frame, self.group, self.name = frame, group, name
        generated("number")(self)

    def __call__(self, model: Any, copy: Any = None) -> int:
        return entry(self.frame, self.group, self.name, model, copy)


class View:
    """A part, as a function of the model."""

    def __init__(self, frame: Frame, group: Any, part: Part) -> None:
        self.frame, self.group, self.part = frame, group, part
        self.slot = frame.slots.index(part.name if group is frame else "state" if part.kept else "workspace")
        self.key: Any = part.name if group is frame or group.repeated else (group.name, part.name)
        generated("view")(self)

    def __call__(self, model: Any, copy: Any = None) -> Any:
        frame, group, part = self.frame, self.group, self.part
        address = model[self.slot] + (0 if group is frame else 8 * entry(frame, group, self.key, model, copy))
        if isinstance(part.dtype, Record):
            return array_at(address, (1,), part.dtype.dtype).view(np.recarray)[0]
        sizes = [size if isinstance(size, int) else entry(frame, group, size, model, copy) for size in part.shape]
        if part.shape[:1] == ("rows",):  # an array of the call, whose rows no layout counts
            sizes[0] = 1 << 20
        return array_at(address, sizes, part.dtype)


class Views:
    """Several parts of a group, whose names a kernel gives as one text."""

    def __init__(self, group: Group) -> None:
        self.group = group
        generated("views")(self)

    def __call__(self, names: str, model: Any, copy: Any = None) -> tuple[Any, ...]:
        return tuple(getattr(self.group, name)(model, copy) for name in names.split())
