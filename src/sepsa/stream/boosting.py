"""LightGBM as an expert: refitted whenever the rows have grown by a factor, and asked in blocks between two fits."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from sepsa.states import schema
from sepsa.stream.kernels.parts import Floats

FIRST = 50  # rows at which it is fitted first
GROWTH = 1.3  # of the rows between two fits
LATEST = 16_384  # rows on which it is fitted
OPTIONS = {"seed": 0, "num_threads": 1, "deterministic": True, "force_row_wise": True, "verbosity": -1}


@dataclass(eq=False)
class Boosting:
    """Boosted trees with LightGBM's defaults on the latest rows; never changed, `learned` returns a changed copy.

    Regression has a model for each output, classes one for all that it has seen. A model does not know inputs and
    classes that came after its fit.
    """

    name: ClassVar[str] = "lightgbm"
    classes: bool
    rows: int = 0  # learned so far
    due: int = FIRST  # the number of rows at which it is fitted next
    inputs: int = 0  # of the models
    models: tuple[str, ...] = ()
    _table: Floats = field(default_factory=lambda: np.empty((0, 0)))  # inputs, outputs, weight of the latest rows; room
    _filled: list[int] = field(default_factory=lambda: [0])  # rows of the table that some copy has written
    _stop: int = 0  # the end of this one's rows in the table
    _outputs: int = 0
    _boosters: list[Any] | None = None

    def __post_init__(self) -> None:
        try:
            import lightgbm  # noqa: F401
        except ImportError as error:
            raise ImportError("experts=['lightgbm'] needs LightGBM: pip install 'sepsa[boosting]'") from error

    def __deepcopy__(self, memo: Any) -> Boosting:
        return self

    def __getstate__(self) -> dict[str, Any]:
        rows = self._latest().copy()
        return vars(replace(self, _boosters=None, _table=rows, _filled=[len(rows)], _stop=len(rows)))

    def _latest(self) -> Floats:
        return self._table[max(0, self._stop - LATEST) : self._stop]

    # ------------------------------------------------------------------ learning

    def learned(self, X: Floats, Y: Floats, weight: Floats) -> tuple[Boosting, Floats]:
        """One that has learned these rows in order, and the predictions (n, outputs) made before each."""
        other, out, at = replace(self), np.empty(Y.shape), 0
        there = weight > 0
        while at < len(X):
            ahead = np.flatnonzero(there[at:])[other.due - other.rows - 1 :]
            stop = at + int(ahead[0]) + 1 if len(ahead) else len(X)
            out[at:stop] = other.predictions(X[at:stop], Y.shape[1])
            new = np.flatnonzero(there[at:stop]) + at
            other._append(X[new], Y[new], weight[new])
            if other.rows >= other.due:
                other._fit()
            at = stop
        return other, out

    def refitted(self) -> Boosting:
        """One that is fitted on all its rows."""
        other = replace(self)
        if other._stop:
            other._fit()
        return other

    def _append(self, X: Floats, Y: Floats, weight: Floats) -> None:
        """Store rows behind this one's: in place where no copy has written there, else in a table of its own."""
        n, d, m = len(X), X.shape[1], Y.shape[1]
        old = self._inputs_stored
        if self._stop != self._filled[0] or self._stop + n > len(self._table) or (d, m) != (old, self._outputs):
            kept = self._latest()
            self._table = np.full((2 * (len(kept) + n) + FIRST, d + m + 1), math.nan)
            self._table[: len(kept), :old] = kept[:, :old]
            self._table[: len(kept), d:-1] = 0.0
            self._table[: len(kept), d : d + self._outputs] = kept[:, old:-1]
            self._table[: len(kept), -1] = kept[:, -1] if len(kept) else 1.0
            self._stop, self._filled, self._outputs = len(kept), [len(kept)], m
        rows = self._table[self._stop : self._stop + n]
        rows[:, :d], rows[:, d:-1], rows[:, -1] = X, Y, weight
        self._stop += n
        self._filled[0] = self._stop
        self.rows += n

    @property
    def _inputs_stored(self) -> int:
        return max(0, self._table.shape[1] - self._outputs - 1)

    def _fit(self) -> None:
        import lightgbm

        rows, d = self._latest(), self._inputs_stored
        X, Y, weight = rows[:, :d], rows[:, d:-1], rows[:, -1]
        self.due, self.inputs, self._boosters = math.ceil(GROWTH * self.rows), d, None
        kinds: list[tuple[dict[str, Any], Floats]] = [({"objective": "regression"}, y) for y in Y.T]
        if self.classes:
            kinds = [({"objective": "multiclass", "num_class": max(Y.shape[1], 2)}, Y.argmax(1).astype(float))]
        self.models = tuple(
            lightgbm.train(
                OPTIONS | options, lightgbm.Dataset(X, y, weight=weight, free_raw_data=False)
            ).model_to_string()
            for options, y in kinds
        )

    # ------------------------------------------------------------------ prediction

    def predictions(self, X: Floats, outputs: int) -> Floats:
        """The predictions (n, outputs): 0, or equal shares of classes, before the first fit."""
        out = np.full((len(X), outputs), 1 / outputs if self.classes else 0.0)
        if not self.models or not len(X):
            return out
        if self._boosters is None:
            import lightgbm

            self._boosters = [lightgbm.Booster(model_str=model) for model in self.models]  # what is saved, to the bit
        told = np.column_stack([each.predict(X[:, : self.inputs], num_threads=1) for each in self._boosters])
        out[:] = 0.0
        out[:, : told.shape[1]] = told[:, :outputs]
        return out

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """The state as plain data; one that loads it continues bit for bit."""
        return {
            "rows": self.rows,
            "due": self.due,
            "inputs": self.inputs,
            "outputs": self._outputs,
            "table": self._latest().copy(),
            "models": [np.frombuffer(model.encode(), np.uint8).copy() for model in self.models],
            "digest": digest(self.models),
        }

    def load_state_dict(self, state_dict: dict[str, Any], entry: str = "state_dict") -> None:
        """Continue from the result of `state_dict`; a ValueError names the wrong entry."""
        keys = {"rows", "due", "inputs", "outputs", "table", "models"}
        new = schema.read(entry, state_dict, keys, optional={"digest"})
        outputs, table = new.integer("outputs"), new.array("table", (None, None), missing=True)
        rows, models = new.integer("rows", len(table)), new.items("models")
        inputs = new.integer("inputs", 0, max(0, table.shape[1] - outputs - 1))
        due = new.integer("due", rows + 1)
        texts = tuple(models.array(i, (None,), np.uint8).tobytes().decode(errors="replace") for i in range(len(models)))
        if len(texts) not in (0, 1 if self.classes else outputs):
            raise new.damaged("models", f"0 or {1 if self.classes else outputs} models", len(texts))
        if "digest" in state_dict:
            new.equal("digest", digest(texts))  # LightGBM itself may read beyond what a damaged text holds
        if not np.isfinite(table[:, max(0, table.shape[1] - outputs - 1) :]).all() or (table[:, -1:] <= 0).any():
            raise new.damaged("table", "finite targets and positive weights", "others")
        self.rows, self.due, self.inputs, self._outputs, self.models = rows, due, inputs, outputs, texts
        self._table, self._stop, self._filled, self._boosters = table, len(table), [len(table)], None


def digest(models: Sequence[str]) -> str:
    """A hash of the texts of models."""
    return hashlib.sha256("\0".join(models).encode()).hexdigest()
