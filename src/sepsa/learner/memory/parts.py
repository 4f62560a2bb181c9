"""The declaration of what a learner stores: a table of parts.

A part is declared once. `views` makes functions of it by which kernels see it; `memory` gives it a place, writes what
it holds before any row, saves it, checks and loads it, and lets it grow.

    group = Group(
        FRAME,
        "example",
        Part("ROWS", np.float32, ("window", "inputs")),
        Part("LEFT", float, ("inputs",), start=RIDGE),
        Part("FILLED", Record(rows=Field(int, bounds=(0, "window")), next=Field(int, bounds=(0, "window - 1")))),
        work("PHI", float, ("inputs",)),
        sizes={"window": lambda sizes: 1024 // sizes["inputs"]},
        rings={"window": "FILLED"},
    )

In a kernel `group.LEFT(model)` is an array and `group.FILLED(model).rows` a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Sizes = Mapping[str, int]
Bounds = tuple[Any, Any]  # the least and the largest integer: a number, None, or a size: "room" or "room - 1"


def at_the_end(old: Any, new: Any, before: Sizes, after: Sizes) -> None:
    """Growth at the end of each axis: what is new keeps its start."""
    new[tuple(slice(0, length) for length in old.shape)] = old


class Field(NamedTuple):
    """A number of a record; `restarts` says that it returns to its start where rows are moved by growth.

    `bounds` are those of an integer, as of a place.
    """

    dtype: type
    start: float = 0
    bounds: Bounds = (0, None)
    restarts: bool = False
    unit: tuple[str, int] = ("", 0)


class Record:
    """Numbers that kernels change together, by names; a file holds them as one vector, of integers if all are."""

    def __init__(self, **fields: type | Field) -> None:
        self.fields = {name: field if isinstance(field, Field) else Field(field) for name, field in fields.items()}
        kinds = {name: np.int64 if field.dtype is int else np.float64 for name, field in self.fields.items()}
        self.dtype = np.dtype([*kinds.items()], align=True)
        self.saved = np.result_type(*kinds.values())


class Part(NamedTuple):
    """An array, or a record, of a learner.

    `shape` is given by names of sizes or numbers; `start` is what it holds before any row, or a function of the sizes
    that returns it; `bounds` of integers are checked when it is loaded. `grows(old, new, sizes, new sizes)` writes it
    into a larger one. `unit` names what it scales with, and the power: `Memory.divide`. A part that is not `kept` is a
    workspace.
    """

    name: str
    dtype: Any
    shape: tuple[str | int, ...] = ()
    start: Any = 0
    bounds: Bounds = (None, None)
    grows: Callable[[Any, Any, Sizes, Sizes], None] = at_the_end
    unit: tuple[str, int] = ("", 0)
    kept: bool = True


def work(name: str, dtype: Any, shape: tuple[str | int, ...] = ()) -> Part:
    """A part that lasts for one call, and begins as zeros."""
    return Part(name, dtype, shape, kept=False)


class Rule(NamedTuple):
    """What parts of a saved state must fulfil together: `holds(part)` says whether, by `part(name)`."""

    part: str  # the one that an error names
    expected: str
    holds: Callable[[Callable[[str], Any]], bool]


def limit(bound: float | str, sizes: Sizes) -> float:
    """A bound as a number."""
    if not isinstance(bound, str):
        return bound
    size, _, less = bound.partition(" - ")
    return sizes[size] - int(less or 0)
