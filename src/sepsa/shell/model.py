"""The model of a table: each row is predicted, then learned. `sepsa stream` saves and resumes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict
from itertools import islice
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sepsa.learner.calibration import best
from sepsa.learner.columns.inputs import CLASS_MEANS, Inputs
from sepsa.learner.columns.reader import Column
from sepsa.learner.learner import Learner, Names, class_codes, indicators
from sepsa.learner.memory.parts import Floats
from sepsa.learner.options import RiverOptions
from sepsa.learner.stream_learner import StreamLearner
from sepsa.shell.cells import BadRow, RowBlock
from sepsa.shell.messages import Misuse
from sepsa.shell.options import TableOptions
from sepsa.shell.reading import ABSENT, NOT_FINITE, Reading, wrong_cell
from sepsa.shell.trace import ErrorTrace
from sepsa.states.objects import rebuilt_as
from sepsa.states.sealed import sealed, unsealed
from sepsa.validation import NotFinite

MOST_CLASSES = 256
LARGEST_ERROR = 1e300  # so that sums of errors stay finite
UNKNOWN = ""  # the prediction before any class is known


class BlockResult(NamedTuple):
    """The lines of a block that were learned, the predictions made for them before, and the rows that were refused.

    `details` are what was asked for beside each prediction: the ends of an interval, or the probability of each class.
    """

    lines: NDArray[np.int64]
    predictions: list[Any]  # floats or labels
    bad: list[BadRow]
    warnings: list[str]
    details: Sequence[Any] = ()


class Details(NamedTuple):
    """What is computed beside each prediction: an interval that holds this share of targets, or probabilities."""

    intervals: float | None = None
    probabilities: bool = False

    def of_rows(self, learner: Learner, X: Floats) -> list[Any]:
        """The pair (low, high), NaN while no error is known, or the dict of probabilities, for each row."""
        if self.probabilities:
            shares = learner.probabilities(learner.predict(X))
            return [dict(zip(learner.outputs, row, strict=True)) for row in shares.tolist()]
        assert self.intervals is not None
        mean, deviation = learner.body.predict_with_deviation(X)
        half = NormalDist().inv_cdf((1 + self.intervals) / 2) * np.where(deviation > 0, deviation, math.nan)
        return list(zip((mean - half)[:, 0].tolist(), (mean + half)[:, 0].tolist(), strict=True))


@rebuilt_as("sepsa stream")
class TableModel(TableOptions):
    """A neural network with a Newton head behind the columns of a table: numbers, dates and texts.

    `learn` and `predict` take the blocks of a `TableReader`. The result does not depend on how rows are divided into
    blocks. `options` are those of `TableOptions`, and the settings of `Reading`, which a later command uses.
    """

    def __init__(self, target: str, **options: Any) -> None:
        self.reading = Reading.take(options)
        super().__init__(target, **options)
        inputs = Inputs(self.categories, CLASS_MEANS if self.classify else 1)
        self.learner = Learner(inputs, {} if self.classify else {target: 0})
        self.trace = ErrorTrace()
        self.quarantined = 0
        self._new_body(1, 1)  # checks the options

    def get_params(self) -> dict[str, Any]:
        return asdict(self) | asdict(self.reading)

    @property
    def bounded(self) -> float:
        """The share of rows that were bounded as outliers."""
        return 0.0 if self.learner.body is None else float(self.learner.body.engine.bounded)

    @property
    def inputs(self) -> Inputs:
        """The columns that were learned, and the inputs that encode them."""
        inputs: Inputs = self.learner.inputs
        return inputs

    def _new_body(self, inputs: int, outputs: int) -> StreamLearner:
        given: Any = {name: getattr(self, name) for name in ("loss", "ridge", "forgetting", "body", "seed")}
        options = RiverOptions(**given, optimizer="adam", missing="mean").of_learner()
        return StreamLearner(inputs, outputs, regression=not self.classify, tells=False, **options)  # `_learn` tells

    # ------------------------------------------------------------------ learning

    def learn(self, block: RowBlock, asked: Details | None = None) -> BlockResult:
        """Predict each row that can be used, then learn it; with `asked`, row by row, which is slower."""
        self.refuse_rows(block)
        result = BlockResult(block.lines[:0], [], [], [])
        if len(rows := block.rows):
            target, outputs = block.columns[self.target], self.learner.outputs
            Y = target.numbers[rows, None]
            if self.classify:
                assert target.codes is not None
                texts = [target.texts[code] for code in target.codes[rows].tolist()]
                outputs, labels = class_codes(outputs, texts, MOST_CLASSES)
                reason = f"the target has more than {MOST_CLASSES} classes: is it a number, without --classify?"
                block.refuse(rows[labels < 0], reason, "")
                rows, Y = block.rows, indicators(labels[labels >= 0], len(outputs))
            kept, result = self._learn(self._inputs(block, rows), outputs, Y, asked)
            block.refuse(rows[~kept], "the row cannot be learned: its numbers are too large")
        self.quarantined += len(block.bad)
        return result._replace(lines=block.lines[block.rows], bad=sorted(block.bad))

    def _inputs(self, block: RowBlock, rows: Any = slice(None)) -> dict[str, Column]:
        """The columns that are inputs, at these rows, in the order of their names."""
        ignored = {*self.drop, self.target}
        return {name: column.rows(rows) for name, column in sorted(block.columns.items()) if name not in ignored}

    def _learn(
        self, columns: dict[str, Column], outputs: Names, Y: Floats, asked: Details | None
    ) -> tuple[NDArray[np.bool_], BlockResult]:
        """Learn rows in order; returns which of them could be learned, and their predictions, warnings and details."""
        rows, starts = len(Y), self.learner.body is None
        X, new_inputs, warnings = self.inputs.learn(columns, Y)
        kept, details = np.ones(rows, bool), dict[int, Any]()

        def learn(body: StreamLearner, some: slice, X: Floats, Y: Floats, weight: Floats) -> Floats:
            if asked is None:
                with suppress(NotFinite):
                    return body.learn(X, Y, weight)
            before = np.zeros_like(Y)
            for i, row in enumerate(range(some.start, some.stop)):
                if asked is not None and row not in details:  # a row that brings a class is first seen without it
                    known = islice(outputs.items(), 0 if starts and not row else body.engine.outputs)
                    details[row] = asked.of_rows(Learner(None, dict(known), body), X[i : i + 1])[0]
                try:
                    before[i] = body.learn(X[i : i + 1], Y[i : i + 1])[0]
                except NotFinite:
                    kept[row] = False
            return before

        self.learner, before = self.learner.learn(
            self._new_body, X, Y, np.ones(rows), new_inputs, 1, learn, outputs=outputs
        )
        if said := self.learner.body.hardly_outliers:
            cure = "if these numbers are right, and --na-values where one such as -9999 means a missing value"
            warnings += self.inputs.said_once("bounded", f"{said}: give --loss squared {cure}")
        looked = [detail for row, detail in details.items() if kept[row]]
        wrong = best(before) != Y.argmax(1) if self.classify else np.minimum(np.abs(before - Y)[:, 0], LARGEST_ERROR)
        self.trace.add(wrong[kept].astype(float))
        return kept, BlockResult(np.empty(0, np.int64), self._spelled(before[kept]), [], warnings, looked)

    def _spelled(self, scores: Floats) -> list[Any]:
        """The prediction of each row: a number, or the class of the largest score."""
        if not self.classify:
            return scores[:, 0].tolist()
        classes = [*self.learner.outputs, UNKNOWN]
        return [classes[k] for k in best(scores).tolist()]

    def refuse_rows(self, block: RowBlock, learning: bool = True, first: bool = False) -> None:
        """Leave out the rows that cannot be learned, or predicted; `first` in a table."""
        target, absent = block.column(self.target), (f"there is no {self.target!r}", ABSENT)
        if learning and self.classify:
            block.refuse(~target.is_text, *absent)
        elif learning:
            reason = wrong_cell(self.target, target, self.reading, otherwise="add --classify if it is a class")
            block.refuse(target.is_text | target.is_time, reason, "")
            block.refuse(np.isnan(target.numbers), *absent)
            block.refuse(np.isinf(target.numbers), f"{self.target!r} is not finite", NOT_FINITE)
        for name, column in self._inputs(block).items():
            block.refuse(np.isinf(column.numbers), f"{name!r} is not finite", NOT_FINITE)
            kind, *more = self.inputs.cells.get(name, ["text"])
            if more or kind == "text" or (learning and not first):
                continue
            other = column.is_text | (column.is_time if kind == "number" else ~np.isnan(column.numbers))
            reason = wrong_cell(name, column, self.reading, f"and the model has learned {kind}s there", kind=kind)
            if first and other.any() and other[column.present].all():
                raise Misuse(f"line {block.lines[other.argmax()]}: {reason(int(other.argmax()))}")
            if not learning:
                block.refuse(other, reason, "")

    # ------------------------------------------------------------------ prediction

    def predict(self, block: RowBlock, asked: Details | None = None) -> BlockResult:
        """Predict the rows that can be used, without learning them."""
        self.refuse_rows(block, learning=False)
        rows = block.rows
        X = self.inputs.encode(self._inputs(block, rows), len(rows))
        details = [] if asked is None else asked.of_rows(self.learner, X)
        return BlockResult(block.lines[rows], self._spelled(self.learner.predict(X)), sorted(block.bad), [], details)

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """The model's state as plain data; a model that loads it continues bit for bit."""
        state = {"trace": asdict(self.trace), "quarantined": self.quarantined}
        return sealed(state | {"learner": self.learner.state_dict()})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the result of `state_dict`; a ValueError changes nothing."""
        new = unsealed("state", state_dict, {"learner", "trace", "quarantined"})
        learner = Learner.loaded(
            new,
            lambda _: self._new_body(1, 1),
            lambda state: Inputs.from_state(state, self.categories, self.inputs.means),
        )
        self.learner, self.quarantined = learner, new["quarantined"]
        self.trace = ErrorTrace(**deepcopy(new["trace"]))
