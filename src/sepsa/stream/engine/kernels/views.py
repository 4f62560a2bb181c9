"""Views of an engine's memory, by names, for kernels.

A kernel gets one pointer, `model`, to the engine's workspace. The first cells of the workspace are addresses (`SLOTS`):
of the workspace, the state, the layout, and the rows of the call. The layout is a vector of integers: sizes, and where
each part of the state and of the workspace starts. Parts are declared as {name: (dtype, shape)}, a shape by names of
sizes; `Views` turns such a table into functions: `parts.MEAN(model)` is an array. Arrays made so count no references,
which would take as long as ten sums each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array
from numba.np.numpy_support import from_dtype

SLOTS = (
    "workspace", "state", "layout", "widths", "options", "calls", "x", "y", "weight", "models", "out", "leverage"
)  # fmt: skip
BODY = "body"  # in place of a dtype: that of the network's body

Parts = Mapping[str, tuple[Any, tuple[Any, ...]]]  # name: dtype, and a shape by names of sizes or numbers

_WORD = ir.IntType(64)


class Group(NamedTuple):
    """What one expert stores: parts of the state and of the workspace, and the sizes that only it knows."""

    name: str
    state: Parts
    work: Parts
    sizes: Mapping[str, Any]  # name: a function of the inputs and the outputs
    repeated: bool = False  # whether each head has these parts


class PartsOf(NamedTuple):
    """The parts of an expert's state by their names, for Python."""

    inputs: int
    outputs: int
    arrays: Mapping[str, Any]

    def __call__(self, name: str) -> Any:
        return self.arrays[name]


size = ModuleType("sizes")  # `size.inputs(model)` is the number of inputs, for each name of a size
# In the layout: of each size, by its name, and of each part's start, by its group and name.
positions: dict[Any, int] = {}


def register(sizes: tuple[str, ...], groups: tuple[Group, ...]) -> None:
    """Give every size and part of all groups its position in the layout, before any kernel is compiled."""
    names: list[Any] = [*sizes, *(name for group in groups for name in group.sizes)]
    for group in groups:
        if not group.repeated:
            names += [(group.name, name) for parts in (group.state, group.work) for name in parts]
    positions.update({name: i for i, name in enumerate(names)})
    positions.update(
        {(group.name, name): i for group in groups if group.repeated for i, name in enumerate(repeated_names(group))}
    )
    positions["end"] = len(names)
    size.__dict__.update({name: _size_named(name) for name in names if isinstance(name, str)})


def repeated_names(group: Group) -> Iterator[str]:
    """What the layout holds for each head: its sizes, then the starts of its parts."""
    yield from group.sizes
    yield from group.state


def _size_named(name: str) -> Any:
    @intrinsic
    def size(_: Any, model: Any) -> Any:
        def code(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            return _cell(builder, _slot(builder, arguments[0], "layout"), positions[name])

        return types.int64(model), code

    return size


class Views(ModuleType):
    """`parts.NAME(model)` is the part of this name as an array, for each part of a table.

    A part in the dtype of the body takes a number of that type as a second argument. Parts and sizes that every head
    has take the number of the head. Without a group the parts begin at the address in their slot.
    """

    def __init__(self, group: Group | None, slot: str, parts: Parts) -> None:
        name = group.name if group else slot
        super().__init__(f"views of {name}")
        repeated = group is not None and group.repeated
        for part, (dtype, shape) in parts.items():
            self.__dict__[part] = _view(group.name if group else "", slot, part, dtype, shape, repeated)
        for own in group.sizes if group and repeated else ():
            self.__dict__[own] = _size_of_head(name, own)


def _size_of_head(group: str, name: str) -> Any:
    @intrinsic
    def size(_: Any, model: Any, head: Any) -> Any:
        def code(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            return _cell(builder, _block(builder, arguments[0], group, arguments[1]), positions[group, name])

        return types.int64(model, types.int64), code

    return size


def _view(group: str, slot: str, name: str, dtype: Any, shape: tuple[str | int, ...], repeated: bool) -> Any:
    def declare(model: Any, more: Any) -> Any:
        scalar = more if dtype == BODY else from_dtype(np.dtype(dtype))
        array = types.Array(scalar, len(shape), "C")

        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            model = arguments[0]
            layout = _slot(builder, model, "layout")
            block = _block(builder, model, group, arguments[1]) if repeated else layout
            address = builder.load(builder.gep(model, [ir.Constant(_WORD, SLOTS.index(slot))]))
            if group:
                start = _cell(builder, block, positions[group, name])
                address = builder.add(address, builder.mul(start, ir.Constant(_WORD, 8)))
            sizes = [_size(builder, layout, block, group, size) for size in shape]
            itemsize = context.get_abi_sizeof(context.get_data_type(scalar))
            strides: list[Any] = []
            step = ir.Constant(_WORD, itemsize)
            for size in reversed(sizes):
                strides.insert(0, step)
                step = builder.mul(step, size)
            made = context.make_array(array)(context, builder)
            data = builder.inttoptr(address, context.get_data_type(scalar).as_pointer())
            populate_array(  # type: ignore[no-untyped-call]
                made, data, cgutils.pack_array(builder, sizes), cgutils.pack_array(builder, strides),  # type: ignore
                ir.Constant(_WORD, itemsize), None,
            )  # fmt: skip
            return made._getvalue()

        return array, code

    if repeated or dtype == BODY:

        @intrinsic
        def view(_: Any, model: Any, more: Any) -> Any:
            array, code = declare(model, more)
            return array(model, types.int64 if repeated else more), code
    else:

        @intrinsic
        def view(_: Any, model: Any) -> Any:
            array, code = declare(model, None)
            return array(model), code

    return view


def _block(builder: Any, model: Any, group: str, head: Any) -> Any:
    """Where the layout describes a head: after all other numbers and the widths of the hidden layers."""
    layout = _slot(builder, model, "layout")
    first = builder.add(ir.Constant(_WORD, positions["end"]), _cell(builder, layout, positions["depth"]))
    length = sum(isinstance(key, tuple) and key[0] == group for key in positions)
    return builder.gep(layout, [builder.add(first, builder.mul(head, ir.Constant(_WORD, length)))])


def _size(builder: Any, layout: Any, block: Any, group: str, size: str | int) -> Any:
    if isinstance(size, int):
        return ir.Constant(_WORD, size)
    own = positions.get((group, size))
    return _cell(builder, layout, positions[size]) if own is None else _cell(builder, block, own)


def _slot(builder: Any, model: Any, name: str) -> Any:
    address = builder.load(builder.gep(model, [ir.Constant(_WORD, SLOTS.index(name))]))
    return builder.inttoptr(address, _WORD.as_pointer())


def _cell(builder: Any, pointer: Any, position: int) -> Any:
    return builder.load(builder.gep(pointer, [ir.Constant(_WORD, position)]))


@intrinsic
def call(_: Any, address: Any, model: Any, index: Any) -> Any:
    """Call the kernel at this address."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = ir.FunctionType(_WORD, [_WORD.as_pointer(), _WORD]).as_pointer()
        return builder.call(builder.inttoptr(arguments[0], function), arguments[1:])

    return types.int64(types.int64, model, types.int64), code
