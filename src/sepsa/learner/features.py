"""Features by name as inputs of a learner, which come and go.

A feature gets its input in the first rows at once. Once the learner's scales are fixed it waits for `ROWS_FOR_SCALE`
values, because a few do not determine its scale; an indicator does not wait.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sepsa.learner.arithmetic.robust import HUGE
from sepsa.learner.learner import Names
from sepsa.learner.memory.parts import Floats
from sepsa.learner.scales import is_indicator, moments, reciprocal
from sepsa.learner.stream_learner import NewInput
from sepsa.states.plain import pack_label, unpack_label, unpack_labels
from sepsa.states.schema import Entries

ROWS_FOR_SCALE = 32
PLACEHOLDER = "sepsa: always missing"  # the only feature of a stream whose first sample has none


class Features(NamedTuple):
    """The inputs by name, and the values of features that wait for more of them."""

    names: Names
    pending: dict[Hashable, list[float]]

    def after(
        self, names: Sequence[Hashable], X: Floats, fixed: int, missing: str, most: int
    ) -> tuple[Features, list[NewInput], bool]:
        """The features after rows X (n, len(names)), the inputs that enter with them, and whether some are left out.

        Scales are fixed from row `fixed` on. `missing` says what a missing value stands for; there are `most` inputs.
        """
        new, pending = list[NewInput](), dict(self.pending)
        for j, name in enumerate(names):
            rows = np.flatnonzero(~np.isnan(X[:, j]))
            if name in self.names or not len(rows):
                continue
            values = pending.pop(name, [])
            once = rows[0] < fixed or missing == "zero" or (missing == "auto" and not values and X[rows[0], j] == 1.0)
            wanted = 1 if once else ROWS_FOR_SCALE - len(values)
            values = values + X[rows[:wanted], j].tolist()
            if len(rows) >= wanted:
                row = int(rows[wanted - 1])
                zero = missing == "zero" or (row >= fixed and missing == "auto" and is_indicator(np.array(values), 1.0))
                new.append(new_input(row, name, values, zero))
            else:
                pending[name] = values
        if not self.names and not any(each.row == 0 for each in new):
            new.append(new_input(0, PLACEHOLDER, [0.0], missing == "zero"))
        new.sort(key=lambda each: (each.row, repr(each.name)))
        free = max(0, most - len(self.names))
        left_out = len(new) > free or (len(new) == free and bool(pending))
        new, pending = new[:free], pending if len(new) < free else {}
        places = enumerate((each.name for each in new), len(self.names))
        return Features(self.names | {name: place for place, name in places}, pending), new, left_out

    def state_dict(self) -> dict[str, Any]:
        return {
            "names": [pack_label(name) for name in self.names],
            "pending": [[pack_label(name), values] for name, values in self.pending.items()],
        }

    @classmethod
    def from_state(cls, state: Entries) -> Features:
        """The features of which `state_dict` returned the entry "inputs"."""
        new = state.entries("inputs", {"names", "pending"})
        pending = {unpack_label(name): list(values) for name, values in new["pending"]}
        return cls(unpack_labels(new, "names"), pending)


def new_input(row: int, name: Hashable, values: list[float], zero: bool) -> NewInput:
    """A feature that enters at this row with these values; with `zero` a missing value stands for the number zero."""
    clipped = np.clip(np.array(values), -HUGE, HUGE)
    if zero:
        return NewInput(row, name, 0.0, float(reciprocal(np.sqrt(np.mean(clipped**2, keepdims=True)))[0]), 1.0)
    mean, variance = moments(clipped[:, None], np.ones(len(values)))
    return NewInput(row, name, float(mean[0]), float(reciprocal(np.sqrt(variance))[0]))


def in_columns(names: Sequence[Hashable], X: Floats, features: Names) -> Floats:
    """The columns of X (n, len(names)) in the order of `features`, NaN where X has none."""
    table = np.full((len(X), len(features)), np.nan)
    places = np.array([features.get(name, -1) for name in names], np.intp)
    known = np.flatnonzero(places >= 0)
    table[:, places[known]] = X[:, known]
    return table
