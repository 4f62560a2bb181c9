"""Bytewax: a keyed operator that predicts and learns, and stores checkpoints in Bytewax's recovery store."""

from __future__ import annotations

import copy
from typing import Any

from sepsa.states.objects import from_bytes, to_bytes


def learn(step_id: str, up: Any, start: Any) -> Any:
    """Add a step to a dataflow that predicts each sample by the learner of its key, then learns it.

    Choose it for a Bytewax dataflow with a key. After a crash Bytewax resumes each key from the last epoch in its
    recovery store.

    Args:
        step_id: Name of the step.
        up: A keyed stream of pairs (x, y); a y of None is predicted and not learned.
        start: A model of `sepsa.river`, of which every key gets a copy.

    Returns:
        A keyed stream of pairs (prediction, y).
    """
    from bytewax import operators

    class Learn(operators.StatefulBatchLogic):  # type: ignore[misc]
        def __init__(self, state: bytes | None) -> None:
            self.learner = copy.deepcopy(start) if state is None else from_bytes(state)

        def on_batch(self, values: list[tuple[dict[Any, Any], Any]]) -> tuple[list[tuple[Any, Any]], bool]:
            pairs = []
            for x, y in values:
                pairs.append((self.learner.predict_one(x), y))
                if y is not None:
                    self.learner.learn_one(x, y)
            return pairs, self.RETAIN

        def snapshot(self) -> bytes:
            return to_bytes(self.learner)

    return operators.stateful_batch(step_id, up, Learn)
