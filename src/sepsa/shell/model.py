"""The model of a table: each row is predicted, then learned. `sepsa stream` saves and resumes it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sepsa.learner.calibration import probabilities
from sepsa.learner.columns.inputs import CLASS_MEANS, Inputs, date_names
from sepsa.learner.columns.reader import Column
from sepsa.learner.engine.options import BODIES
from sepsa.learner.growth import class_codes, first_rows, indicators, learn_rows
from sepsa.learner.learner import StreamLearner
from sepsa.learner.memory.parts import Floats
from sepsa.shell.cells import BadRow, RowBlock, UsableRows
from sepsa.shell.options import TableOptions
from sepsa.shell.reading import ABSENT, NOT_FINITE, Reading, cure_of
from sepsa.shell.trace import ErrorTrace
from sepsa.states import schema
from sepsa.states.objects import rebuilt_as
from sepsa.validation import NotFinite, one_of

MOST_CLASSES = 256
LARGEST_ERROR = 1e300  # so that sums of errors stay finite
UNKNOWN = ""  # the prediction before any class is known
LATEST = 500  # rows of which the report shows predicted against actual
MOST_WARNINGS = 50  # that the report shows


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

    def of_rows(self, learner: StreamLearner, X: Floats, classes: list[str]) -> list[Any]:
        """The pair (low, high), NaN while no error is known, or the dict of probabilities, for each row."""
        if self.probabilities:
            scores = learner.predict(X)[:, : len(classes)]
            if not classes:
                return [{} for _ in X]
            shares = probabilities(scores, learner.engine.calibration_losses)
            return [dict(zip(classes, row, strict=True)) for row in shares.tolist()]
        assert self.intervals is not None
        mean, leverage = learner.predict_with_leverage(X)
        noise = learner.noise_variance()[0] or math.nan
        half = NormalDist().inv_cdf((1 + self.intervals) / 2) * np.sqrt(noise * (1 + leverage))
        return list(zip((mean[:, 0] - half).tolist(), (mean[:, 0] + half).tolist(), strict=True))


@rebuilt_as("sepsa stream")
class TableModel(TableOptions):
    """A neural network with a Newton head behind the columns of a table: numbers, dates and texts.

    `learn` and `predict` take the blocks of a `TableReader`. The result does not depend on how rows are divided into
    blocks. `options` are those of `TableOptions`, and the settings of `Reading`, which a later command uses.
    """

    def __init__(self, target: str, **options: Any) -> None:
        self.reading = Reading.take(options)
        super().__init__(target, **options)
        one_of("body", self.body, BODIES)
        self.inputs = Inputs(self.categories, CLASS_MEANS if self.classify else 1)
        self.classes: dict[str, int] = {}
        self.trace = ErrorTrace()
        self.quarantined = 0
        self.latest: deque[tuple[Any, Any]] = deque(maxlen=LATEST)  # actual and predicted
        self.warnings: deque[str] = deque(maxlen=MOST_WARNINGS)
        self.coverage: tuple[float, int, int] | None = None  # share asked for, rows with an interval, targets in it
        self._new_learner(1, 1)  # checks the options
        self.learner: StreamLearner | None = None  # None before the first row

    def get_params(self) -> dict[str, Any]:
        return asdict(self) | asdict(self.reading)

    @property
    def bounded(self) -> float:
        """The share of rows that were bounded as outliers."""
        return 0.0 if self.learner is None else self.learner.engine.bounded

    def _new_learner(self, inputs: int, outputs: int) -> StreamLearner:
        return StreamLearner(
            inputs,
            outputs,
            regression=not self.classify,
            seed=self.seed,
            hidden=(64,),
            activation="fourier",
            lr=3e-3,
            loss=self.loss,
            skip=True,
            ridge=self.ridge,
            forgetting=self.forgetting,
            experts=self.body != "fourier",
            tells=False,  # `_learn` does
        )

    # ------------------------------------------------------------------ learning

    def learn(self, block: RowBlock, asked: Details | None = None) -> BlockResult:
        """Predict each row that can be used, then learn it; with `asked`, row by row, which is slower."""
        usable = UsableRows(block)
        self.refuse_rows(usable)
        result = BlockResult(block.lines[:0], [], [], [])
        if len(rows := usable.rows):
            labels = self._labels(block.columns[self.target].rows(rows))
            reason = f"the target has more than {MOST_CLASSES} classes: is it a number, without --classify?"
            usable.refuse(rows[labels < 0], reason, "")
            rows, labels = usable.rows, labels[labels >= 0]
            kept, result = self._learn(
                self._inputs(block, rows), block.columns[self.target].numbers[rows], labels, asked
            )
            usable.refuse(rows[~kept], "the row cannot be learned: its numbers are too large")
        self.quarantined += len(usable.bad)
        self.warnings.extend(result.warnings)
        return result._replace(lines=block.lines[usable.rows], bad=sorted(usable.bad))

    def _inputs(self, block: RowBlock, rows: NDArray[np.intp]) -> dict[str, Column]:
        """The columns that are inputs, at these rows, in the order of their names."""
        ignored = {*self.drop, self.target}
        columns = {name: column for name, column in sorted(block.columns.items()) if name not in ignored}
        return columns if len(rows) == len(block) else at_rows(columns, rows)

    def _learn(
        self, columns: dict[str, Column], target: Floats, labels: NDArray[np.intp], asked: Details | None
    ) -> tuple[NDArray[np.bool_], BlockResult]:
        """Learn rows in order; returns which of them could be learned, and their predictions, warnings and details."""
        rows = len(labels)
        new_inputs, warnings = self.inputs.add(columns)
        X, names = self.inputs.encode(columns, rows), list(self.classes)
        Y = indicators(labels, len(names)) if self.classify else target[:, None]
        new_inputs = self.inputs.learn_means(X, columns, Y, new_inputs)
        known, first = 0 if self.learner is None else self.learner.engine.outputs, first_rows(labels, Y.shape[1])
        arrivals, first[:known] = first[known:].tolist(), -1
        kept, details = np.ones(rows, bool), dict[int, Any]()

        def learn(learner: StreamLearner, some: slice, X: Floats, Y: Floats, weight: Floats) -> Floats:
            if asked is None:
                with suppress(NotFinite):
                    return learner.learn(X, Y, weight)
            before = np.zeros_like(Y)
            for i, row in enumerate(range(some.start, some.stop)):
                if asked is not None and row not in details:  # a row that brings a class is first seen without it
                    details[row] = asked.of_rows(learner, X[i : i + 1], names[: (first < row).sum()])[0]
                try:
                    before[i] = learner.learn(X[i : i + 1], Y[i : i + 1])[0]
                except NotFinite:
                    kept[row] = False
            return before

        self.learner, before = learn_rows(
            self.learner, self._new_learner, X, Y, np.ones(rows), new_inputs, arrivals, learn=learn
        )
        if said := self.learner.hardly_outliers:
            cure = "if these numbers are right, and --na-values where one such as -9999 means a missing value"
            warnings += self.inputs.said_once("bounded", f"{said}: give --loss squared {cure}")
        looked = [detail for row, detail in details.items() if kept[row]]
        if asked is not None and asked.intervals is not None:
            self._count_covered(asked.intervals, Y[kept, 0], np.array(looked).reshape(-1, 2))
        if self.classify:
            at = np.arange(rows)
            best = np.where(first < at[:, None], before, -np.inf).argmax(1)  # of the classes of earlier rows
            labelled = labels, np.where(at > first.min(initial=rows), best, -1)
            spelled = [*names, UNKNOWN]
            actual, predictions = ([spelled[k] for k in codes[kept].tolist()] for codes in labelled)
            errors = np.not_equal(*labelled).astype(float)
        else:
            actual, predictions = Y[kept, 0].tolist(), before[kept, 0].tolist()
            errors = np.minimum(np.abs(before - Y)[:, 0], LARGEST_ERROR)
        self.trace.add(errors[kept])
        self.latest.extend(zip(actual[-LATEST:], predictions[-LATEST:], strict=True))
        return kept, BlockResult(labels[:0], predictions, [], warnings, looked)

    def _count_covered(self, share: float, targets: Floats, ends: Floats) -> None:
        """Count the targets that lie in their intervals, of those that had one."""
        _, rows, inside = self.coverage if self.coverage and self.coverage[0] == share else (share, 0, 0)
        low, high = ends.T
        within = int(((low <= targets) & (targets <= high)).sum())
        self.coverage = share, rows + int((~np.isnan(low)).sum()), inside + within

    def _labels(self, target: Column) -> NDArray[np.intp]:
        """The class (rows,) of each row, new ones in order of appearance; -1 for one more than `MOST_CLASSES`."""
        if not self.classify:
            return np.zeros(len(target.numbers), np.intp)
        assert target.codes is not None
        present, first = np.unique(target.codes, return_index=True)
        present = present[np.argsort(first)]
        places = np.full(len(target.texts), -1)
        self.classes, places[present] = class_codes(
            self.classes, [target.texts[code] for code in present], MOST_CLASSES
        )
        return places[target.codes]

    def refuse_rows(self, usable: UsableRows, learning: bool = True) -> None:
        """Leave out the rows that cannot be learned, or predicted."""
        block, absent = usable.block, f"there is no {self.target!r}"
        target = block.columns.get(self.target)
        if learning and target is None:
            usable.refuse(..., absent, ABSENT)
        elif learning and target is not None and self.classify:
            usable.refuse(~target.is_text, absent, ABSENT)
        elif learning and target is not None:
            for i in np.flatnonzero(target.is_text | target.is_time).tolist():
                cure = cure_of(target.text(i), self.reading, otherwise="add --classify if it is a class")
                usable.refuse([i], f"{self.target!r} is not a number: {cure}", "")
            usable.refuse(np.isnan(target.numbers), absent, ABSENT)
            usable.refuse(np.isinf(target.numbers), f"{self.target!r} is not finite", NOT_FINITE)
        for name, column in self._inputs(block, np.arange(len(block))).items():
            usable.refuse(np.isinf(column.numbers), f"{name!r} is not finite", NOT_FINITE)
            if not learning:
                usable.refuse(self.other_kind(name, column)[0], partial(self.why_other, name, column), "")

    def learned_kind(self, name: str) -> str:
        """What all cells of a column were so far, "number" or "date"; empty where they were texts, mixed or none."""
        number = name in self.inputs.names and name not in self.inputs.indicators
        dates = date_names(name)[0] in self.inputs.names
        return "" if self.inputs.text_rows.get(name) or number == dates else "number" if number else "date"

    def other_kind(self, name: str, column: Column) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which cells (n,) of a column are of another kind than those learned, and which are present."""
        texts, dates, numbers = column.is_text, column.is_time, ~np.isnan(column.numbers)
        kind = self.learned_kind(name)
        other = texts | (dates if kind == "number" else numbers) if kind else np.zeros(len(texts), bool)
        return other, texts | dates | numbers

    def why_other(self, name: str, column: Column, i: int) -> str:
        """The reason to refuse a cell of another kind than those learned."""
        kind, text = self.learned_kind(name), column.text(i)
        cure = cure_of(text, self.reading, kind)
        return f"{name!r} is {text[:40]!r}, and the model has learned {kind}s there: {cure}"

    # ------------------------------------------------------------------ prediction

    def predict(self, block: RowBlock, asked: Details | None = None) -> BlockResult:
        """Predict the rows that can be used, without learning them."""
        if self.learner is None:
            raise ValueError("the model has not learned any row yet and cannot predict")
        usable = UsableRows(block)
        self.refuse_rows(usable, learning=False)
        rows = usable.rows
        predictions: list[Any] = []
        details: list[Any] = []
        if len(rows):
            X, names = self.inputs.encode(self._inputs(block, rows), len(rows)), list(self.classes)
            scores = self.learner.predict(X)
            details = [] if asked is None else asked.of_rows(self.learner, X, names)
            if self.classify:
                predictions = [names[k] for k in scores.argmax(1).tolist()]
            else:
                predictions = scores[:, 0].tolist()
        return BlockResult(block.lines[rows], predictions, sorted(usable.bad), [], details)

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """The model's state as plain data; a model that loads it continues bit for bit."""
        return {
            "inputs": self.inputs.state_dict(),
            "classes": list(self.classes),
            "trace": self.trace.state_dict(),
            "quarantined": self.quarantined,
            "learner": None if self.learner is None else self.learner.state_dict(),
            "latest": [list(pair) for pair in self.latest],
            "warnings": list(self.warnings),
            "coverage": None if self.coverage is None else list(self.coverage),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the result of `state_dict`; a ValueError changes nothing."""
        new = schema.read("state", state_dict, set(self.state_dict()))
        inputs = Inputs.from_state(self.categories, self.inputs.means, new["inputs"])
        classes = new.texts("classes")
        if classes and not self.classify:
            raise ValueError("state['classes'] must be empty where the target is a number")
        trace = ErrorTrace.from_state(new["trace"])
        quarantined = new.integer("quarantined")
        latest, warnings, coverage = self._read_for_report(new)
        learner = None
        if new["learner"] is not None:
            learner = self._new_learner(1, 1)
            learner.load_state_dict(new["learner"])
            needed = len(inputs.names), len(classes) if self.classify else 1
            sizes = learner.engine.inputs, learner.engine.outputs
            if sizes != needed:
                raise ValueError(
                    f"state['learner'] must have {needed[0]} inputs and {needed[1]} outputs, as the table has, "
                    f"got {sizes[0]} and {sizes[1]}"
                )
        elif inputs.names or classes or trace.rows:
            raise ValueError("state['learner'] must not be None where rows have been learned")
        self.inputs, self.classes = inputs, {label: i for i, label in enumerate(classes)}
        self.trace, self.quarantined, self.learner = trace, quarantined, learner
        self.latest, self.warnings, self.coverage = latest, warnings, coverage

    def _read_for_report(self, new: schema.Entries) -> tuple[deque[Any], deque[str], tuple[float, int, int] | None]:
        """The latest rows, warnings and coverage of a saved state."""
        pairs, texts = new.items("latest"), new.items("warnings").values
        latest = [pairs.items(i, 2) for i in range(len(pairs))]
        if self.classify and not all(type(label) is str for pair in latest for label in pair.values):
            raise new.damaged("latest", "pairs of labels", "others")
        if not all(type(text) is str for text in texts):
            raise new.damaged("warnings", "texts", "others")
        coverage = None
        if new["coverage"] is not None:
            counts = new.items("coverage", 3)
            coverage = counts.number(0, 0.0, 1.0), counts.integer(1), counts.integer(2)
        values = (tuple(pair.values if self.classify else pair.numbers()) for pair in latest)
        return deque(values, maxlen=LATEST), deque(texts, maxlen=MOST_WARNINGS), coverage


def at_rows(columns: dict[str, Column], rows: NDArray[np.intp]) -> dict[str, Column]:
    return {name: column.rows(rows) for name, column in columns.items()}
