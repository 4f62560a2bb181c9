"""Inputs and classes that first appear in mid-stream: the learner grows at the row that needs them.

A block of rows is divided where inputs or classes arrive, and the learner grows before each part, so that a block
gives what its rows would give one by one. `Engine.resize` explains why that is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from sepsa.stream.engine.protocol import Floats
from sepsa.stream.learner import StreamLearner
from sepsa.stream.rows import dense, row_parts

Label = TypeVar("Label", bound=Hashable)
Names = dict[Hashable, int]  # each name of an input or an output, with its column number


class NewInput(NamedTuple):
    """An input that enters at this row, with its mean, its scale and its typical distance from the mean."""

    row: int
    name: Hashable
    mean: float
    scale: float  # 0: the first value that differs from the mean sets it
    typical: float = 0.7


def grow_along(
    learner: StreamLearner | None,
    new_learner: Callable[[int, int], StreamLearner],
    rows: int,
    new_inputs: Sequence[NewInput],
    output_rows: Sequence[int],
    predict: Callable[[StreamLearner, int], None],
    told: int = 0,
) -> Iterator[tuple[int, int, StreamLearner]]:
    """Yield start, stop and the learner, grown in place, for each part of the rows in which nothing arrives.

    `new_inputs` are in the order of their rows; `output_rows` are the rows that need one more output each, beside the
    learner's and those up to the number `told` before the first row. Such a row is predicted without that output:
    `predict` gets the learner before it is added, and the number of the row.
    """
    known_inputs, known_outputs = (0, told) if learner is None else (learner.engine.inputs, learner.engine.outputs)
    known_outputs = max(known_outputs, told)
    cuts = sorted({0, *(new.row for new in new_inputs), *output_rows})
    for start, stop in zip(cuts, [*cuts[1:], rows], strict=True):
        inputs = sum(new.row <= start for new in new_inputs)
        outputs = known_outputs + sum(row <= start for row in output_rows)
        if learner is None:
            learner = new_learner(inputs, known_outputs or outputs)
        arriving = new_inputs[learner.engine.inputs - known_inputs : inputs]
        learner.grow([(new.mean, new.scale, new.typical) for new in arriving], known_outputs)
        if outputs > learner.engine.outputs:
            predict(learner, start)
            learner.grow((), outputs)
        yield start, stop, learner


def learn_rows(
    learner: Any,
    new_learner: Callable[[int, int], StreamLearner],
    X: Any,
    Y: Floats,
    weight: Floats,
    new_inputs: Sequence[NewInput] = (),
    output_rows: Sequence[int] = (),
    told: int = 0,
    batch: int = 1,
) -> tuple[Any, Floats]:
    """A learner that has learned the rows of X, dense or CSR, and Y in order, and the predictions made before each.

    The given learner, or committee, does not change. A prediction is 0 for an output that was not there yet. What a row
    needs enters with its batch, the rows of which are predicted without a new output.
    """
    learner = None if learner is None else learner.copy()
    before, ahead = np.zeros(Y.shape), dict[int, Floats]()

    def predict(known: StreamLearner, start: int) -> None:
        some, outputs = slice(start, start + batch), known.engine.outputs
        rows = np.ascontiguousarray(dense(X[some])[:, : known.engine.inputs])
        ahead[start] = known.copy().learn(rows, np.ascontiguousarray(Y[some, :outputs]), weight[some])

    new_inputs = [new._replace(row=new.row // batch * batch) for new in new_inputs]
    output_rows = [row // batch * batch for row in output_rows]
    for start, stop, grown in grow_along(learner, new_learner, len(Y), new_inputs, output_rows, predict, told):
        learner, inputs, outputs = grown, grown.engine.inputs, grown.engine.outputs
        targets, weights, out = Y[start:stop, :outputs], weight[start:stop], before[start:stop, :outputs]
        for some, part in row_parts(X[start:stop], batch):
            known = np.ascontiguousarray(part[:, :inputs])
            out[some] = grown.learn(known, np.ascontiguousarray(targets[some]), weights[some])
    for start, known in ahead.items():
        before[start : start + batch] = np.pad(known, [(0, 0), (0, Y.shape[1] - known.shape[1])])
    return learner, before


def class_codes(
    known: dict[Label, int], labels: Sequence[Label], most: int | None = None
) -> tuple[dict[Label, int], NDArray[np.intp]]:
    """All classes, new ones last in order of appearance, and the class (n,) of each label; -1 beyond `most` classes."""
    names = dict(known)
    for label in labels:
        if label not in names and (most is None or len(names) < most):
            names[label] = len(names)
    return names, np.array([names.get(label, -1) for label in labels], np.intp)


def first_rows(codes: NDArray[np.intp], count: int) -> NDArray[np.intp]:
    """The first row (count,) of each class in the column numbers (n,); n for a class that has none."""
    first = np.full(count, len(codes))
    np.minimum.at(first, codes, np.arange(len(codes)))
    return first


def indicators(codes: NDArray[np.intp], count: int) -> Floats:
    """Targets (n, count): 1 in the column of each row's class, else 0."""
    Y = np.zeros((len(codes), count))
    Y[np.arange(len(codes)), codes] = 1.0
    return Y
