"""A learner of tables: rows as they stand in a file, predicted, then learned; what `sepsa stream` saves and resumes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sepsa.heads.protocols import NotFinite
from sepsa.states import schema
from sepsa.stream.columns import Birth, Inputs
from sepsa.stream.learner import Learner
from sepsa.stream.table import Bad, Block, Column, Floats
from sepsa.stream.trace import Trace

MOST_CLASSES = 256
LARGEST_ERROR = 1e300  # so that sums of errors stay finite
UNKNOWN = ""  # what is predicted before any class is known


class Outcome(NamedTuple):
    """What became of a block: the rows that were learned, what was predicted for them before, and the others."""

    lines: NDArray[np.int64]
    predictions: list[Any]  # floats, or the labels as they are written
    bad: list[Bad]
    warnings: list[str]


class TableLearner:
    """A neural network with a Newton head behind the columns of a table: numbers, dates and texts.

    `learn` and `predict` take blocks as `sepsa.stream.table` reads them. The result does not depend on how rows are
    divided into blocks.
    """

    def __init__(
        self,
        target: str,
        *,
        classify: bool = False,
        drop: Sequence[str] = (),
        categorical: Sequence[str] = (),
        categories: int = 32,
        forgetting: float | str = 1.0,
        ridge: float | str = 10.0,
        seed: int = 0,
    ) -> None:
        self.target, self.classify = target, classify
        self.drop, self.categorical = tuple(drop), tuple(categorical)
        self.categories, self.forgetting, self.ridge, self.seed = categories, forgetting, ridge, seed
        self.inputs = Inputs(categories)
        self.classes: dict[str, int] = {}
        self.trace = Trace()
        self.quarantined = 0
        self._new_learner(1, 1)  # refuses what is wrong
        self._learner: Learner | None = None

    def get_params(self) -> dict[str, Any]:
        names = ("target", "classify", "drop", "categorical", "categories", "forgetting", "ridge", "seed")
        return {name: getattr(self, name) for name in names}

    def _new_learner(self, inputs: int, outputs: int) -> Learner:
        return Learner(
            inputs, outputs, regression=not self.classify, seed=self.seed, hidden=(64,), activation="fourier", lr=3e-3,
            loss="huber", skip=True, ridge=self.ridge, forgetting=self.forgetting,
        )  # fmt: skip

    @property
    def learner(self) -> Learner | None:
        """The learner of rows of numbers; None before the first row."""
        return self._learner

    # ------------------------------------------------------------------ learning

    def learn(self, block: Block) -> Outcome:
        """Predict each row that can be used, then learn it."""
        bad = list(block.bad)
        columns, target, kept = self._usable(block, bad, learning=True)
        predictions: list[Any] = []
        warnings: list[str] = []
        lines = block.lines[kept]
        if len(kept):
            assert target is not None
            labels, refused = self._labels(target, len(kept))
            if refused:
                for i in refused:
                    reason = f"the target has more than {MOST_CLASSES} classes: is it a number, without --classify?"
                    bad.append(Bad(int(lines[i]), reason, block.raw(int(kept[i]))))
                good = np.setdiff1d(np.arange(len(kept)), refused)
                columns = {name: column.rows(good) for name, column in columns.items()}
                target, kept, lines = target.rows(good), kept[good], lines[good]
                labels = labels[good]
            done, predictions, warnings, lost = self._learn(columns, target, labels, len(kept))
            bad += [Bad(int(lines[i]), reason, block.raw(int(kept[i]))) for i, reason in lost]
            lines = lines[done]
        self.quarantined += len(bad)
        return Outcome(lines, predictions, sorted(bad), warnings)

    def unusable(self, block: Block) -> list[Bad]:
        """The rows of a block that `learn` would refuse."""
        bad = list(block.bad)
        self._usable(block, bad, learning=True)
        return sorted(bad)

    def _learn(
        self, columns: dict[str, Column], target: Column, labels: NDArray[np.intp], rows: int
    ) -> tuple[NDArray[np.intp], list[Any], list[str], list[tuple[int, str]]]:
        """Learn rows from one arrival of inputs or classes to the next, as one row after the other would."""
        births, warnings = self.inputs.meet(columns)
        X = self.inputs.encode(columns, rows)
        names, known = list(self.classes), self._outputs
        arrivals = [int(np.flatnonzero(labels == k)[0]) for k in range(known, len(names))]  # of classes
        cuts = sorted({0, *(birth.row for birth in births), *arrivals})
        done: list[NDArray[np.intp]] = []
        out: list[Any] = []
        lost: list[tuple[int, str]] = []
        for start, stop in zip(cuts, [*cuts[1:], rows], strict=True):
            before = self._outputs
            outputs = known + sum(row <= start for row in arrivals) if self.classify else 1
            learner = self._grow([birth for birth in births if birth.row == start], outputs)
            some = np.ascontiguousarray(X[start:stop, : learner.engine.inputs])
            if self.classify:
                Y = np.zeros((stop - start, outputs))
                Y[np.arange(stop - start), labels[start:stop]] = 1.0
            else:
                Y = target.numbers[start:stop, None].copy()
            told, refused = learn_rows(learner, some, Y)
            good = np.setdiff1d(np.arange(stop - start), refused)
            lost += [(start + i, "the row cannot be learned: its numbers are too large") for i in refused]
            done.append(start + good)
            if self.classify:
                best = told.argmax(1)
                if start in arrivals:  # a class that the row itself brought was not known before it
                    best[0] = told[0, :before].argmax() if before else -1
                out += [names[k] if k >= 0 else UNKNOWN for k in best[good].tolist()]
                self.trace.add((best != labels[start:stop])[good].astype(float))
            else:
                out += told[good, 0].tolist()
                self.trace.add(np.minimum(np.abs(told[good, 0] - Y[good, 0]), LARGEST_ERROR))
        return np.concatenate(done), out, warnings, lost

    @property
    def _outputs(self) -> int:
        return 0 if self._learner is None else self._learner.engine.outputs

    def _grow(self, births: list[Birth], outputs: int) -> Learner:
        """The learner with these inputs more, and so many outputs."""
        if self._learner is None:
            self._learner = self._new_learner(len(births), outputs)
            return self._learner
        if births:
            self._learner.add_inputs(np.array([b.mean for b in births]), np.array([b.scale for b in births]))
        if outputs > self._outputs:
            self._learner.add_outputs(outputs - self._outputs)
        return self._learner

    def _labels(self, target: Column, rows: int) -> tuple[NDArray[np.intp], list[int]]:
        """The class of each row, new ones in order of appearance, and the rows that have one too many."""
        labels = np.zeros(rows, np.intp)
        if not self.classify:
            return labels, []
        assert target.codes is not None
        present, first = np.unique(target.codes, return_index=True)
        places = np.full(len(target.texts), -1)
        for code in present[np.argsort(first)]:
            label = target.texts[code]
            if label not in self.classes and len(self.classes) < MOST_CLASSES:
                self.classes[label] = len(self.classes)
            places[code] = self.classes.get(label, -1)
        labels = places[target.codes]
        return labels, np.flatnonzero(labels < 0).tolist()

    def _usable(self, block: Block, bad: list[Bad], learning: bool) -> tuple[dict[str, Column], Column | None, Any]:
        """The columns and the target at rows that can be used, and which these are; the others are added to `bad`."""
        ignored = {*self.drop, self.target}
        columns = {name: column for name, column in block.columns.items() if name not in ignored}
        target = block.columns.get(self.target)
        good = np.ones(len(block), bool)

        def refuse(rows: NDArray[np.bool_], reason: str) -> None:
            bad.extend(Bad(int(block.lines[i]), reason, block.raw(int(i))) for i in np.flatnonzero(rows & good))
            good[rows] = False

        if learning and target is None:
            refuse(np.ones(len(block), bool), f"there is no {self.target!r}")
        elif learning and target is not None:
            texts = np.zeros(len(block), bool) if target.codes is None else target.codes >= 0
            if self.classify:
                refuse(~texts, f"there is no {self.target!r}")
            else:
                dates = np.zeros(len(block), bool) if target.times is None else ~np.isnan(target.times)
                refuse(texts | dates, f"{self.target!r} is no number: or is it --classify?")
                refuse(np.isnan(target.numbers), f"there is no {self.target!r}")
                refuse(np.isinf(target.numbers), f"{self.target!r} is not finite")
        for name, column in columns.items():
            infinite = np.isinf(column.numbers)
            if infinite.any():
                refuse(infinite, f"{name!r} is not finite")
        kept = np.flatnonzero(good)
        if len(kept) < len(block):
            columns = {name: column.rows(kept) for name, column in columns.items()}
            target = None if target is None else target.rows(kept)
        return columns, target, kept

    # ------------------------------------------------------------------ prediction

    def predict(self, block: Block) -> Outcome:
        """The predictions for the rows that can be used; nothing is learned."""
        if self._learner is None:
            raise ValueError("the model has learned no row yet, and predicts nothing")
        bad = list(block.bad)
        columns, _, kept = self._usable(block, bad, learning=False)
        predictions: list[Any] = []
        if len(kept):
            scores = self._learner.predict(self.inputs.encode(columns, len(kept)))
            if self.classify:
                names = list(self.classes)
                predictions = [names[k] for k in scores.argmax(1).tolist()]
            else:
                predictions = scores[:, 0].tolist()
        return Outcome(block.lines[kept], predictions, sorted(bad), [])

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """All that a further row depends on."""
        return {
            "inputs": self.inputs.state_dict(),
            "classes": list(self.classes),
            "trace": self.trace.state_dict(),
            "quarantined": self.quarantined,
            "learner": None if self._learner is None else self._learner.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from such a state. Whole, or ValueError and nothing."""
        new = schema.read("state", state_dict, {"inputs", "classes", "trace", "quarantined", "learner"})
        inputs = Inputs.from_state(self.categories, new["inputs"])
        classes = new.items("classes").values
        if not all(type(label) is str for label in classes) or len(set(classes)) != len(classes):
            raise ValueError("state['classes'] must hold distinct labels")
        if classes and not self.classify:
            raise ValueError("state['classes'] must be empty where the target is a number")
        trace = Trace.from_state(new["trace"])
        quarantined = new.integer("quarantined")
        learner = None
        if new["learner"] is not None:
            learner = self._new_learner(1, 1)
            learner.load_state_dict(new["learner"])
            outputs = len(classes) if self.classify else 1
            if learner.engine.inputs != len(inputs.names) or learner.engine.outputs != outputs:
                raise ValueError(
                    f"state['learner'] must have {len(inputs.names)} inputs and {outputs} outputs, as the table has, "
                    f"got {learner.engine.inputs} and {learner.engine.outputs}"
                )
        elif inputs.names or classes or trace.rows:
            raise ValueError("state['learner'] must not be None where rows have been learned")
        self.inputs, self.classes = inputs, {label: i for i, label in enumerate(classes)}
        self.trace, self.quarantined, self._learner = trace, quarantined, learner


def learn_rows(learner: Learner, X: Floats, Y: Floats) -> tuple[Floats, list[int]]:
    """Predictions before learning, and the rows that could not be learned, which are left out."""
    try:
        return learner.learn(X, Y), []
    except NotFinite:
        pass
    told, refused = np.zeros_like(Y), []
    for i in range(len(X)):
        try:
            told[i] = learner.learn(X[i : i + 1], Y[i : i + 1])[0]
        except NotFinite:  # noqa: PERF203  # this is the slow way
            refused.append(i)
    return told, refused
