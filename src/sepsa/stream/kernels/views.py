"""Views of a learner's memory, by names, for kernels.

A kernel gets one pointer, `model`, to the learner's workspace, whose first cells are addresses: of the workspace, the
state and the layout, and of the arrays of the call. The layout is a vector of integers: sizes, and where each part of
the state and of the workspace starts. `group.MEAN(model)` is an array of it. Arrays made so count no references, which
would take as long as ten sums each; a record is a pointer to its numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array
from numba.np.numpy_support import from_dtype

from sepsa.stream.kernels.parts import Part, Record, Rule, Sizes

_WORD = ir.IntType(64)
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
            setattr(self, part.name, _view(self, self, part))

    def add_sizes(self, names: tuple[str, ...]) -> None:
        """Let kernels see further sizes."""
        for name in names:
            setattr(self.size, name, _number(self, self, name))

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
        self.views = _views(frame, self)
        for part in parts:
            setattr(self, part.name, _view(frame, self, part))
        for own in sizes if repeated else ():
            setattr(self, own, _number(frame, self, own))


# In what follows the frame is the group of its sizes and of the arrays of a call.


def _kind(group: Any) -> Any:
    """The type of what is given beside the model: the number of a copy, or nothing."""
    return types.int64 if group.repeated else types.Omitted(None)  # type: ignore[no-untyped-call]


def _number(frame: Frame, group: Any, size: str) -> Any:
    """The function of a size."""

    @intrinsic
    def number(_: Any, model: Any, copy: Any = None) -> Any:
        def code(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            return _entry(frame, group, builder, size, *arguments)

        return types.int64(model, _kind(group)), code

    return number


def _declare(frame: Frame, group: Any, part: Part) -> Any:
    """The type of a part and the code that finds it."""
    record = isinstance(part.dtype, Record)
    kind: Any = part.dtype.dtype if record else part.dtype
    scalar = from_dtype(np.dtype(kind))
    result = scalar if record else types.Array(scalar, len(part.shape), "C")
    slot = part.name if group is frame else "state" if part.kept else "workspace"

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = _cell(builder, arguments[0], frame.slots.index(slot))
        if group is not frame:
            name = part.name if group.repeated else (group.name, part.name)
            start = _entry(frame, group, builder, name, *arguments)
            address = builder.add(address, builder.mul(start, ir.Constant(_WORD, 8)))
        if record:
            return builder.inttoptr(address, context.get_value_type(scalar))
        sizes = [
            ir.Constant(_WORD, size) if isinstance(size, int) else _entry(frame, group, builder, size, *arguments)
            for size in part.shape
        ]
        return _array(context, builder, result, address, sizes)

    return result, code


def _view(frame: Frame, group: Any, part: Part) -> Any:
    """The function of a part."""

    @intrinsic
    def view(_: Any, model: Any, copy: Any = None) -> Any:
        array, code = _declare(frame, group, part)
        return array(model, _kind(group)), code

    return view


def _views(frame: Frame, group: Group) -> Any:
    """The function of several parts, whose names a kernel gives as one text."""
    named = {part.name: part for part in group.parts}

    @intrinsic(prefer_literal=True)
    def views(_: Any, names: Any, model: Any, copy: Any = None) -> Any:
        declared = [_declare(frame, group, named[name]) for name in names.literal_value.split()]
        arrays = types.Tuple([array for array, _ in declared])  # type: ignore[no-untyped-call]

        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            found = [one(context, builder, None, arguments[1 : 2 + group.repeated]) for _, one in declared]
            return context.make_tuple(builder, arrays, found)

        return arrays(names, model, _kind(group)), code

    return views


def _array(context: Any, builder: Any, array: Any, address: Any, sizes: list[Any]) -> Any:
    """The array at this address."""
    itemsize = context.get_abi_sizeof(context.get_data_type(array.dtype))
    strides: list[Any] = []
    step = ir.Constant(_WORD, itemsize)
    for size in reversed(sizes):
        strides.insert(0, step)
        step = builder.mul(step, size)
    made = context.make_array(array)(context, builder)
    data = builder.inttoptr(address, context.get_data_type(array.dtype).as_pointer())
    shape, steps = cgutils.pack_array(builder, sizes), cgutils.pack_array(builder, strides)  # type: ignore[no-untyped-call]
    populate_array(made, data, shape, steps, ir.Constant(_WORD, itemsize), None)  # type: ignore[no-untyped-call]
    return made._getvalue()


def _entry(frame: Frame, group: Any, builder: Any, name: Any, model: Any, copy: Any = None) -> Any:
    """What the layout has under a name, the value of a size or the start of a part; of a repeated group for a copy."""
    layout = builder.inttoptr(_cell(builder, model, frame.slots.index("layout")), _WORD.as_pointer())
    if not (group.repeated and name in group.block):
        return _cell(builder, layout, frame.positions[name])
    first = _cell(builder, layout, frame.positions[group.name, "copies"])
    block = builder.add(first, builder.mul(copy, ir.Constant(_WORD, len(group.block))))
    return _cell(builder, builder.gep(layout, [block]), group.block.index(name))


def _cell(builder: Any, pointer: Any, position: int) -> Any:
    return builder.load(builder.gep(pointer, [ir.Constant(_WORD, position)]))


@intrinsic
def call(_: Any, address: Any, model: Any, index: Any) -> Any:
    """Call the kernel at this address."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = ir.FunctionType(_WORD, [_WORD.as_pointer(), _WORD]).as_pointer()
        return builder.call(builder.inttoptr(arguments[0], function), arguments[1:])

    return types.int64(types.int64, model, types.int64), code
