"""An interface of your own: lines of JSON through the learner that all interfaces share, in forty lines.

python examples/new_interface.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from sepsa.learner.columns.inputs import Inputs
from sepsa.learner.columns.reader import Column, column_of_objects
from sepsa.learner.learner import Learner
from sepsa.learner.options import RiverOptions
from sepsa.learner.stream_learner import StreamLearner


class JsonLines:
    """Objects of JSON with numbers, dates and texts by name, of which one is the number to predict."""

    def __init__(self, target: str, **options: Any) -> None:
        self.target, self.options = target, RiverOptions(**options, missing="mean").of_learner()
        self.learner = Learner(Inputs(categories=256), {target: 0})

    def new_body(self, inputs: int, outputs: int) -> StreamLearner:
        return StreamLearner(inputs, outputs, regression=True, **self.options)

    def columns(self, rows: list[dict[str, Any]]) -> dict[str, Column]:
        names = sorted({name for row in rows for name in row} - {self.target})
        return {name: column_of_objects([row.get(name) for row in rows]) for name in names}

    def learn(self, lines: Iterable[str]) -> list[float]:
        """Predict the target of each line, then learn it; fields may come and go."""
        rows = [json.loads(line) for line in lines]
        columns, Y = self.columns(rows), np.array([[float(row[self.target])] for row in rows])
        X, new_inputs, _ = self.learner.inputs.learn(columns, Y)
        self.learner, before = self.learner.learn(self.new_body, X, Y, np.ones(len(Y)), new_inputs)
        return before[:, 0].tolist()

    def predict(self, lines: Iterable[str]) -> list[tuple[float, float]]:
        """The target of each line and its standard deviation."""
        rows = [json.loads(line) for line in lines]
        assert self.learner.body is not None, "learn some lines first"
        X = self.learner.inputs.encode(self.columns(rows), len(rows))
        mean, deviation = self.learner.body.predict_with_deviation(X)
        return list(zip(mean[:, 0].tolist(), deviation[:, 0].tolist(), strict=True))


def main() -> None:
    model, lines = JsonLines("sales", seed=0), []
    for hour in range(1000):
        row: dict[str, Any] = {"time": f"2024-01-{1 + hour // 24 % 28:02d} {hour % 24:02d}:00", "shop": "AB"[hour % 2]}
        row |= {"rain": float(hour % 7 == 0)} if hour > 300 else {}  # a field that comes late
        sales = 10 + 5 * math.sin(hour % 24 / 24 * 2 * math.pi) + 3 * (hour % 2) - 2 * row.get("rain", 0.0)
        lines.append(json.dumps(row | {"sales": sales}))
    told = model.learn(lines)
    errors = [abs(one - json.loads(line)["sales"]) for one, line in zip(told, lines, strict=True)]
    print(f"mean error of the first 200 lines {np.mean(errors[:200]):.2f}, of the last {np.mean(errors[-200:]):.2f}")
    mean, deviation = model.predict([lines[-1]])[0]
    print(f"the last line again: {mean:.1f} ± {deviation:.1f}, and it was {json.loads(lines[-1])['sales']:.1f}")


if __name__ == "__main__":
    main()
