"""Bytewax: a keyed operator that predicts and learns, whose state in Bytewax's recovery store are our safe bytes."""

from __future__ import annotations

import copy
from typing import Any

from sepsa.states.objects import from_bytes, to_bytes


def learn(step_id: str, up: Any, start: Any) -> Any:
    """A step of a dataflow: pairs (x, y) of each key in, (prediction, y) out, each predicted before it is learned.

    `up` is a keyed stream of samples for `start`, a model of `sepsa.river` of which every key gets a copy; a y of None
    is predicted and not learned. After a crash Bytewax resumes each key from the last epoch in its recovery store.
    """
    from bytewax import operators

    class Learn(operators.StatefulBatchLogic):  # type: ignore[misc]
        def __init__(self, state: bytes | None) -> None:
            self.learner = copy.deepcopy(start) if state is None else from_bytes(state)

        def on_batch(self, values: list[tuple[dict[Any, Any], Any]]) -> tuple[list[tuple[Any, Any]], bool]:
            told = []
            for x, y in values:
                told.append((self.learner.predict_one(x), y))
                if y is not None:
                    self.learner.learn_one(x, y)
            return told, self.RETAIN

        def snapshot(self) -> bytes:
            return to_bytes(self.learner)

    return operators.stateful_batch(step_id, up, Learn)
