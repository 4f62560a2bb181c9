"""Where each part of an engine's memory lies in its state and in its workspace, for Python and for the kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sepsa.stream.engine.kernels.views import BODY, SLOTS, Group, Parts, positions, repeated_names
from sepsa.validation import at_least

# The part of φ = [hidden units, inputs, 1] that a head sees: its end, from some hidden unit on, or hidden units and 1.
END, HIDDEN = range(2)

# Sizes that follow from the network's form, then settings of the engine.
SIZES = (
    "inputs", "outputs", "depth", "hidden", "heads", "parameters", "units", "deltas", "features", "stride", "experts",
    "stacked", "candidates", "built_in", "models", "calls", "batch", "activation", "optimizer",
    "standardize", "robust", "classes", "room", "trees", "rate", "tree_slots",
)  # fmt: skip

O_LR, O_DECAY, O_MOMENTUM, O_BETA2, O_EPS, O_NESTEROV, O_DISCOUNT, O_POWER, O_CALIBRATION = range(9)

# Counts of the network; the powers are β1^steps and β2^steps.
C_STEPS, C_BETA1_POWER, C_BETA2_POWER, C_OUTLIERS, C_WEIGHT, C_EVIDENCE, C_BEST, C_SINCE = range(8)
COUNTS = 8

# Forgetting and ridge of a head, the coordinate whose ridge is restored next, effective samples, discounted loss and
# weight in the mixture.
H_FORGETTING, H_RIDGE, H_CURSOR, H_SAMPLES, H_LOSS, H_WEIGHT = range(6)
NUMBERS = 6

TEMPERATURES = 17  # inverse ones, from 1/2 in steps of √2, those of `calibration.INVERSE_TEMPERATURES`


def part_name(group: str, name: str) -> str:
    """The name of a part among all parts; those of the network have no prefix."""
    return name if group == "network" else f"{group}/{name}"


class Layout:
    """Where each part of an engine's memory lies. `groups` says what its experts store, the heads first among them."""

    def __init__(
        self, groups: tuple[Group, ...], inputs: int, outputs: int, hidden: tuple[int, ...], subsets: tuple[str, ...],
        itemsize: int, built_in: int, models: int, settings: Mapping[str, int],
    ) -> None:  # fmt: skip
        self.groups, self.settings, self.built_in, self.models = groups, dict(settings), built_in, models
        experts = built_in + models
        self.inputs, self.outputs = at_least("inputs", inputs, 1), at_least("outputs", outputs, 1)
        self.subsets, self.itemsize = subsets, itemsize
        self.hidden = tuple(at_least("hidden", width, 1) for width in hidden)
        d, last = inputs, hidden[-1] if hidden else 0
        units = [0 if subset == "inputs" else last for subset in subsets]
        self.head_features = [
            n + 1 + (0 if subset == "hidden" else d) for n, subset in zip(units, subsets, strict=True)
        ]
        widths = (inputs, *hidden)
        self.body = sum((below + 1) * width for below, width in zip(widths, hidden, strict=False))
        self.sizes: dict[str, int] = {
            "inputs": d, "outputs": outputs, "depth": len(hidden), "hidden": last, "heads": len(subsets),
            "parameters": self.body, "units": d + sum(hidden), "deltas": 2 * max(hidden, default=0),
            "features": last + d + 1, "stride": 2 * last + d + 2, "experts": experts, "stacked": experts - 1,
            "candidates": experts + 1, "built_in": built_in, "models": models, "calls": experts + 2,
            "tree_slots": settings["trees"] + 1, **settings,
        }  # fmt: skip
        for group in groups:
            if not group.repeated:
                self.sizes |= {name: size(d, outputs) for name, size in group.sizes.items()}
        self.parts: dict[str, tuple[int, Any, tuple[int, ...]]] = {}  # of the state: start, dtype and shape
        self._place(units)

    def _place(self, units: list[int]) -> None:
        """Choose where the parts start, and write the layout for the kernels."""
        starts: dict[Any, int] = {}
        self.size, self.workspace = 0, len(SLOTS)
        blocks: list[int] = []
        for group in self.groups:
            if group.repeated:
                continue
            for name in group.state:
                starts[group.name, name] = self.size
                self.size = self._add(group, name, self.sizes, part_name(group.name, name))
            for name in group.work:
                starts[group.name, name] = self.workspace
                self.workspace += self._cells(*self._form(name, group.work, self.sizes))
        (heads,) = (group for group in self.groups if group.repeated)
        for h, (subset, p) in enumerate(zip(self.subsets, self.head_features, strict=True)):
            own = {"subset": HIDDEN if subset == "hidden" else END, "units": units[h], "p": p}
            own["triangle"] = p * (p - 1) // 2
            for name in heads.state:
                own[name] = self.size
                self.size = self._add(heads, name, self.sizes | own, f"{name}{h}")
            blocks += [own[name] for name in repeated_names(heads)]
        end = positions["end"]
        self.numbers = np.zeros(end + len(self.hidden) + len(blocks), dtype=np.int64)
        for key, position in positions.items():
            if key in starts or key in self.sizes:
                self.numbers[position] = starts[key] if key in starts else self.sizes[key]
        self.numbers[end:] = [*self.hidden, *blocks]
        self.after_widths = len(self.hidden) + len(blocks)

    def _form(self, name: str, parts: Parts, sizes: Mapping[str, int]) -> tuple[Any, tuple[int, ...]]:
        dtype, shape = parts[name]
        real = np.float32 if self.itemsize == 4 else np.float64
        form = tuple(size if isinstance(size, int) else sizes[size] for size in shape)
        return np.dtype(real if dtype == BODY else dtype), form

    def _cells(self, dtype: Any, shape: tuple[int, ...]) -> int:
        return (math.prod(shape) * int(dtype.itemsize) + 7) // 8

    def _add(self, group: Group, name: str, sizes: Mapping[str, int], key: str) -> int:
        dtype, shape = self._form(name, group.state, sizes)
        self.parts[key] = (self.size, dtype, shape)
        return self.size + self._cells(dtype, shape)

    def names_of(self, group: str) -> list[str]:
        """The names of the parts of a group in the state."""
        return [name for each in self.groups if each.name == group for name in each.state]

    def part(self, state: NDArray[np.float64], name: str) -> NDArray[Any]:
        """A part of a state as a view of its dtype and shape."""
        start, dtype, shape = self.parts[name]
        part: NDArray[Any] = (
            state[start : start + self._cells(dtype, shape)].view(dtype)[: math.prod(shape)].reshape(shape)
        )
        return part
