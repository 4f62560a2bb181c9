"""Named rows in, predictions out: what every interface has learned.

Inputs and classes may first appear in mid-stream. A block of rows is divided where they arrive, and the body grows
before each part, so that a block gives what its rows would give one by one. `Engine.resize` explains why that is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from sepsa.learner.calibration import label_probabilities, no_losses, probabilities
from sepsa.learner.memory.parts import Floats
from sepsa.learner.rows import dense, row_parts
from sepsa.learner.stream_learner import NewInput, StreamLearner
from sepsa.states.plain import pack_label, unpack_labels
from sepsa.states.schema import Entries

Label = TypeVar("Label", bound=Hashable)
Names = dict[Hashable, int]  # each name of an input or an output, with its column number
NewBody = Callable[[int, int], StreamLearner]  # from the numbers of inputs and outputs
NONE: Names = {}


class Learner(NamedTuple):
    """A body of rows of numbers, with the names of its inputs and outputs and its calibration.

    River's models, scikit-learn's estimators and `sepsa stream` hold one and translate: they read the rows and targets
    of their world into numbers, and word its errors. What they all do alike is here:

    - Before the first row there is no body, and all predictions are 0. It is made for the inputs and outputs of that
      row, and grows at the row that needs another one.
    - An output is a target, or a class in order of appearance. Targets and independent labels are all known before the
      first row; a class is known from its first row on, or once it was told, and before that its score is -∞.
    - The body's kernel sums the losses by which the scores of classes become probabilities. A committee, and
      independent labels, have `losses` of their own.
    - A learner is a value: `learn` returns another one, which shares the body where no copy was needed, so that one
      assignment replaces all parts of it.
    """

    inputs: Any = None  # has `names` and `state_dict`; None: the columns of arrays
    outputs: Names = NONE
    body: Any = None  # a `StreamLearner`, or the `Committee` of a fit
    losses: Floats | None = None

    @property
    def calibration(self) -> Floats:
        """The losses by which scores become probabilities."""
        if self.losses is not None:
            return self.losses
        return no_losses() if self.body is None else self.body.engine.calibration_losses

    @property
    def several(self) -> bool:
        """Whether the outputs are independent labels."""
        return self.losses is not None and self.losses.ndim == 2

    def learn(
        self,
        new_body: NewBody,
        X: Any,
        Y: Floats,
        weight: Floats,
        new_inputs: Sequence[NewInput] = (),
        batch: int = 1,
        learn: Callable[[Any, slice, Floats, Floats, Floats], Floats] = lambda body, _, *rows: body.learn(*rows),
        **known: Any,
    ) -> tuple[Learner, Floats]:
        """The learner after the rows of X, dense or CSR, and Y in order, and the scores (n, outputs) before each.

        Its body is this one's where nothing arrives and one call learns all rows or none; else a copy or a new one.
        `known` are its inputs and outputs, where they differ, and `new_inputs` are in the order of their rows. An
        output that is not among `outputs` is needed from the first row on whose target is not 0. What a row needs
        enters with its batch, the rows of which are predicted by a copy without the new output. `learn` learns the rows
        of a part, in which nothing arrives, and returns the scores before. `batch` is that of a new body.
        """
        body, had = self.body, 0
        if body is not None:
            arrives = new_inputs or Y.shape[1] > body.engine.outputs
            if body.learns_whole and isinstance(X, np.ndarray) and not arrives:
                scores = learn(body, slice(0, len(Y)), X, Y, weight)
                return self._replace(**known) if known else self, scores
            body, had, batch = body.copy(), body.engine.inputs, body.engine.batch_size
        new_inputs = [new._replace(row=new.row // batch * batch) for new in new_inputs]
        told, before = len(self.outputs), np.full(Y.shape, -np.inf)
        output_rows = ((Y[:, told:] != 0).argmax(0) // batch * batch).tolist()
        cuts = sorted({0, *(new.row for new in new_inputs), *output_rows})
        for start, stop in pairwise([*cuts, len(Y)]):
            first, made = slice(start, min(start + batch, len(Y))), None
            inputs = sum(new.row <= start for new in new_inputs)
            outputs = told + sum(row <= start for row in output_rows)
            if body is None:
                body, made = new_body(inputs or X.shape[1], told or outputs), None if told else np.empty((1, 0))
            body.grow(new_inputs[body.engine.inputs - had : inputs], told)
            if outputs > body.engine.outputs:
                made = learn(body.copy(), first, *seen_by(body, dense(X[first]), Y[first]), weight[first])
                body.grow((), outputs)
            for some, part in row_parts(X[start:stop], batch):
                rows = slice(start + some.start, min(start + some.stop, stop))
                scores = learn(body, rows, *seen_by(body, part, Y[rows]), weight[rows])
                before[rows, : body.engine.outputs] = scores
            if made is not None:
                before[first] = -np.inf
                before[first, : made.shape[1]] = made
        return self._replace(body=body, **known), before

    def predict(self, X: Any) -> Floats:
        """The scores (n, outputs)."""
        return np.zeros((len(X), len(self.outputs))) if self.body is None else self.body.predict(X)

    def probabilities(self, scores: Floats) -> Floats:
        """The probabilities (n, classes) by their scores; those (n, labels, 2) of 0 and of 1 of independent labels."""
        if not self.outputs:
            return scores[:, :0]
        return (label_probabilities if self.several else probabilities)(scores, self.calibration)

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """The learner as plain data."""
        return {
            "inputs": None if self.inputs is None else self.inputs.state_dict(),
            "outputs": [pack_label(name) for name in self.outputs],
            "body": None if self.body is None else self.body.state_dict(),
            "losses": self.losses,
        }

    @classmethod
    def loaded(
        cls, state: Entries, new_body: Callable[[Entries], Any], read_inputs: Callable[[Entries], Any]
    ) -> Learner:
        """The learner of which `state_dict` returned the entry "learner"."""
        new = state.entries("learner", set(cls().state_dict()))
        inputs, outputs, body = read_inputs(new), unpack_labels(new, "outputs"), None
        if new["body"] is not None:
            body = new_body(new)
            body.load_state_dict(new["body"], new.path("body"))
            sizes = body.engine.inputs, body.engine.outputs
            if (sizes[0] if inputs is None else len(inputs.names), len(outputs)) != sizes:  # kernels trust it
                raise new.damaged("body", "one of as many inputs and outputs as there are names", sizes)
        return cls(inputs, outputs, body, new["losses"])


def seen_by(body: Any, X: Floats, Y: Floats) -> tuple[Floats, Floats]:
    """Rows with the inputs and outputs that a body has so far."""
    sizes = body.engine.inputs, body.engine.outputs
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
