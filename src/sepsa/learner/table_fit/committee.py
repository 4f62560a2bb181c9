"""Several learners behind the interface of one: the mean of their predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sepsa.learner.engine import Engine
from sepsa.learner.memory.parts import Floats
from sepsa.learner.stream_learner import NewInput, StreamLearner
from sepsa.states import schema


class Committee:
    """The mean of several learners; each learns every row that the committee learns.

    An error in `learn` or `grow` may leave some members with the rows and others without: let a copy learn.
    `inflation` is the factor c in the variance σ² (1 + c φᵀBφ) of a target (`sepsa.learner.table_fit.batch_fit`).
    """

    learns_whole = False

    def __init__(self, members: list[StreamLearner], inflation: int = 1) -> None:
        self.members, self.inflation = members, inflation
        for member in members:
            member.engine.set_inflation(inflation)

    @property
    def engine(self) -> Engine:
        """The first member's."""
        return self.members[0].engine

    def learn(self, X: Floats, Y: Floats, weight: Floats | None = None) -> Floats:
        """Learn rows in order; returns the predictions (n, outputs) made before."""
        return np.mean([member.learn(X, Y, weight) for member in self.members], axis=0)

    def tell(self, rows: int) -> None:
        """Warn once where many rows are bounded."""
        self.members[0].tell(rows)

    def predict(self, X: Any) -> Floats:
        """The predictions (n, outputs)."""
        return np.mean([member.predict(X) for member in self.members], axis=0)

    def predict_with_leverage(self, X: Any) -> tuple[Floats, Floats]:
        """The predictions (n, outputs) and c φᵀBφ (n,)."""
        parts = [member.predict_with_leverage(X) for member in self.members]
        mean, leverage = (np.mean(part, axis=0) for part in zip(*parts, strict=True))
        return mean, self.inflation * leverage

    predict_with_deviation = StreamLearner.predict_with_deviation

    def noise_variance(self) -> Floats:
        """The variance (outputs,) of targets about predictions."""
        return np.mean([member.noise_variance() for member in self.members], axis=0)

    def grow(self, new_inputs: Sequence[NewInput], outputs: int) -> None:
        """Add inputs and outputs as `StreamLearner.grow` does."""
        for member in self.members:
            member.grow(new_inputs, outputs)

    def copy(self) -> Committee:
        """Another committee in the same state."""
        return Committee([member.copy() for member in self.members], self.inflation)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain data; a committee that loads it continues bit for bit."""
        loss = "huber" if self.engine.robust else "squared"
        states = [member.state_dict() for member in self.members]
        return {"inflation": self.inflation, "loss": loss, "members": states}

    def load_state_dict(self, state_dict: dict[str, Any], entry: str = "state_dict") -> None:
        """Continue from the result of `state_dict`, with its number of members, as `StreamLearner` does."""
        new = schema.read(entry, state_dict, {"inflation", "loss", "members"})
        self.inflation, self.members = new["inflation"], [self.members[0].copy() for _ in new["members"]]
        for i, member in enumerate(self.members):
            member.load_state_dict(new["members"][i], f"{new.path('members')}[{i}]")
            member.engine.set_inflation(self.inflation)
