"""Views of a learner's memory, by names, for kernels.

A kernel gets one pointer, `model`, to the learner's workspace, whose first cells are addresses: of the workspace, the
state and the layout, and of the arrays of the call. The layout is a vector of integers: sizes, and where each part of
the state and of the workspace starts. `group.MEAN(model)` is an array of it. Arrays made so count no references, which
would take as long as ten sums each; a record is a pointer to its numbers.

A view is a function of one expression, which Python runs and the builder compiles. Where the layout has a size or the
start of a part is a global of it, which is known when all groups of the frame are declared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np

from sepsa.compiled.kernels import Function, array_at, generated, inlined
from sepsa.learner.memory.parts import Part, Record, Rule, Sizes

EMPTY: Mapping[str, Any] = {}
ADDRESSES = ("workspace", "state", "layout")
LAYOUT = f"array_at(model[{ADDRESSES.index('layout')}], (1048576,), integers)"  # whatever its length is


class Frame(ModuleType):
    """What all groups of a learner share: its sizes, and the arrays that a call gives.

    `frame.X(model)` is the array X of the call, `frame.size.inputs(model)` the size "inputs".
    """

    def __init__(self, name: str, sizes: tuple[str, ...], *given: Part) -> None:
        super().__init__(name)
        self.sizes, self.given = sizes, given
        self.slots = (*ADDRESSES, *(part.name for part in given))
        self.groups: dict[str, Group] = {}
        self.globals: dict[str, Any] = {"array_at": array_at, "integers": np.dtype(np.int64)}
        self.size = ModuleType("sizes")
        self.add_sizes(sizes)
        for part in given:
            setattr(self, part.name, self.view("model", part, f"model[{self.slots.index(part.name)}]", self.entry))

    @cached_property
    def positions(self) -> dict[Any, int]:
        """Where the layout has each size, by its name, and each part's start; kernels that are compiled know them."""
        names: list[Any] = [*self.sizes]
        for name, group in sorted(self.groups.items()):
            names += [(name, "copies")] if group.repeated else [*group.sizes]
            names += [] if group.repeated else [(name, part.name) for part in group.parts]
        self.globals.update((place(name), i) for i, name in enumerate(names))
        return {name: i for i, name in enumerate(names)}

    def add_sizes(self, names: tuple[str, ...]) -> None:
        """Let kernels see further sizes."""
        for name in names:
            setattr(self.size, name, self.function("model", self.entry(name)))

    def entry(self, name: Any) -> str:
        """What the layout has under a name, the value of a size or the start of a part, as an expression."""
        return f"{LAYOUT}[{place(name)}]"

    def view(self, arguments: str, part: Part, address: str, entry: Callable[[Any], str]) -> Function:
        """A part at an address as a function; `entry` is the expression of a size."""
        if isinstance(part.dtype, Record):
            return RecordView(self.function(arguments, address), part.dtype.dtype, "copy" in arguments)
        self.globals[dtype := f"DTYPE_{len(self.globals)}"] = np.dtype(part.dtype)
        known = {"rows": str(1 << 20)}  # of a call's array, whose rows no layout counts
        sizes = [known.get(each) or entry(each) if isinstance(each, str) else str(each) for each in part.shape]
        return self.function(arguments, f"array_at({address}, ({', '.join(sizes)},), {dtype})")

    def function(self, arguments: str, expression: str) -> Function:
        """A function of one expression that kernels call."""
        return inlined(eval(f"lambda {arguments}: {expression}", self.globals))


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
        if "positions" in vars(frame):
            raise RuntimeError(f"the group {name!r} must be declared before the first learner of its frame is made")
        frame.groups[name] = self
        if not repeated:
            frame.add_sizes(tuple(sizes))
        self.frame, self.arguments = frame, "model, copy" if repeated else "model"
        self.views = Views(self)
        for part in parts:
            start = self.entry(part.name if repeated else (name, part.name))
            address = f"model[{ADDRESSES.index('state' if part.kept else 'workspace')}] + 8 * {start}"
            setattr(self, part.name, frame.view(self.arguments, part, address, self.entry))
        for own in sizes if repeated else ():
            setattr(self, own, frame.function(self.arguments, self.entry(own)))

    def entry(self, name: Any) -> str:
        """What the layout has under a name, as an expression; of a repeated group for a copy."""
        if not (self.repeated and name in self.block):
            return self.frame.entry(name)
        first = self.frame.entry((self.name, "copies"))
        return f"{LAYOUT}[{first} + {len(self.block)} * copy + {self.block.index(name)}]"


def place(name: Any) -> str:
    """The global that has the position of a name in the layout."""
    return "AT_" + (name if isinstance(name, str) else "_".join(name)).replace(" ", "_")


@dataclass(frozen=True)
class RecordView:
    """A record at an address, as a function."""

    address: Function
    dtype: Any
    repeated: bool

    def __post_init__(self) -> None:
        generated("record")(self)

    def __call__(self, *arguments: Any) -> Any:
        return array_at(self.address(*arguments), (1,), self.dtype)[0]


class Views:
    """Several parts of a group, whose names a kernel gives as one text."""

    def __init__(self, group: Group) -> None:
        self.group = group
        generated("views")(self)

    def __call__(self, names: str, *arguments: Any) -> tuple[Any, ...]:
        return tuple(getattr(self.group, name)(*arguments) for name in names.split())
