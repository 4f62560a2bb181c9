"""Inputs and classes that first appear in mid-stream: the learner grows at the row that needs them.

A block of rows is divided where inputs or classes arrive, and the learner grows before each part, so that a block
gives what its rows would give one by one. `Engine.resize` explains why that is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence, Sized
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from sepsa.learner.learner import StreamLearner
from sepsa.learner.memory.parts import Floats
from sepsa.learner.rows import dense, row_parts
from sepsa.states.schema import Entries

Label = TypeVar("Label", bound=Hashable)
Names = dict[Hashable, int]  # each name of an input or an output, with its column number


class NewInput(NamedTuple):
    """An input that enters at this row, with its mean, its scale and its typical distance from the mean."""

    row: int
    name: Hashable
    mean: float
    scale: float  # 0: the first value that differs from the mean sets it
    typical: float = 0.7


def learn_rows(
    learner: Any,
    new_learner: Callable[[int, int], StreamLearner],
    X: Any,
    Y: Floats,
    weight: Floats,
    new_inputs: Sequence[NewInput] = (),
    told: int = 0,
    batch: int = 1,
    learn: Callable[[Any, slice, Floats, Floats, Floats], Floats] = lambda learner, _, *rows: learner.learn(*rows),
) -> tuple[Any, Floats]:
    """The learner, or committee, after the rows of X, dense or CSR, and Y in order, and the predictions before each.

    It is the one given where nothing arrives and one call learns all rows or none; else a copy, or a new one for None.
    `new_inputs` are in the order of their rows. An output beside the learner's, and those up to the number `told`, is
    needed from the first row on whose target is not 0. What a row needs enters with its batch, the rows of which are
    predicted by a copy without the new output: a prediction is -∞ for an output that was not there yet. `learn` learns
    the rows of a part, in which nothing arrives, and returns the predictions made before.
    """
    if learner is not None:
        arrives = new_inputs or Y.shape[1] > learner.engine.outputs
        if learner.learns_whole and isinstance(X, np.ndarray) and not arrives:
            return learner, learn(learner, slice(0, len(Y)), X, Y, weight)
        learner = learner.copy()
    new_inputs = [new._replace(row=new.row // batch * batch) for new in new_inputs]
    known_inputs, known = (0, 0) if learner is None else (learner.engine.inputs, learner.engine.outputs)
    known, before, ahead = max(known, told), np.full(Y.shape, -np.inf), dict[int, Floats]()
    output_rows = ((Y[:, known:] != 0).argmax(0) // batch * batch).tolist()
    cuts = sorted({0, *(new.row for new in new_inputs), *output_rows})
    for start, stop in pairwise([*cuts, len(Y)]):
        inputs = sum(new.row <= start for new in new_inputs)
        outputs = known + sum(row <= start for row in output_rows)
        if learner is None:
            learner = new_learner(inputs, known or outputs)
        arriving = new_inputs[learner.engine.inputs - known_inputs : inputs]
        learner.grow([(new.mean, new.scale, new.typical) for new in arriving], known)
        if outputs > learner.engine.outputs:
            first = slice(start, min(start + batch, len(Y)))
            ahead[start] = learn(learner.copy(), first, *of_learner(learner, dense(X[first]), Y[first]), weight[first])
            learner.grow((), outputs)
        for some, part in row_parts(X[start:stop], batch):
            rows = slice(start + some.start, min(start + some.stop, stop))
            made = learn(learner, rows, *of_learner(learner, part, Y[rows]), weight[rows])
            before[rows, : learner.engine.outputs] = made
    for start, made in ahead.items():
        before[start : start + batch, made.shape[1] :] = -np.inf
        before[start : start + batch, : made.shape[1]] = made
    return learner, before


def saved_learner(state: Entries, new_learner: Callable[[int, int], StreamLearner], **names: Sized) -> Any:
    """The learner of a state, None before its first row; `names` are the entries that name its inputs and outputs."""
    learner, sizes = None, (0, 0)
    if state["learner"] is not None:
        learner = new_learner(1, 1)
        learner.load_state_dict(state["learner"], state.path("learner"))
        sizes = learner.engine.inputs, learner.engine.outputs
    for (entry, known), count in zip(names.items(), sizes, strict=True):
        if len(known) != count:
            raise state.damaged(entry, f"{count} names, as the learner", len(known))
    return learner


def of_learner(learner: Any, X: Floats, Y: Floats) -> tuple[Floats, Floats]:
    """Rows with the inputs and outputs that a learner has so far."""
    sizes = learner.engine.inputs, learner.engine.outputs
    return np.ascontiguousarray(X[:, : sizes[0]]), np.ascontiguousarray(Y[:, : sizes[1]])


def class_codes(
    known: dict[Label, int], labels: Sequence[Label], most: int | None = None
) -> tuple[dict[Label, int], NDArray[np.intp]]:
    """All classes, new ones last in order of appearance, and the class (n,) of each label; -1 beyond `most` classes."""
    names = dict(known)
    for label in labels:
        if label not in names and (most is None or len(names) < most):
            names[label] = len(names)
    return names, np.array([names.get(label, -1) for label in labels], np.intp)


def indicators(codes: NDArray[np.intp], count: int) -> Floats:
    """Targets (n, count): 1 in the column of each row's class, else 0."""
    Y = np.zeros((len(codes), count))
    Y[np.arange(len(codes)), codes] = 1.0
    return Y
