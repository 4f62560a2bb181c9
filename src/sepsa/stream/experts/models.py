"""Models of the user as experts, on the learner's rows: River's, scikit-learn's with `partial_fit`, or LightGBM."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy, deepcopy
from typing import Any

import numpy as np

from sepsa.states import schema
from sepsa.stream.boosting import Boosting
from sepsa.stream.kernels.parts import Floats


class ModelExperts:
    """Models that learn each row beside the network; they are never changed, `learned` returns changed copies.

    A River model gets a row as a dict by the numbers of the inputs, without those missing; an estimator of scikit-learn
    gets an array, with zeros for missing values, and begins anew with an input or a class that comes late. Classes are
    numbers in the order of their appearance. "lightgbm" stands for `sepsa.stream.boosting`, which takes rows in blocks.
    """

    def __init__(self, models: Sequence[Any], classes: bool, outputs: int = 0) -> None:
        self.models: list[Any] = [
            Boosting(classes) if isinstance(model, str) and model == "lightgbm" else deepcopy(model) for model in models
        ]
        self.classes = classes
        self.outputs = [outputs] * len(self.models)  # that each model knows; 0: it has learned nothing
        for i, model in enumerate(self.models):
            river = hasattr(model, "learn_one") and hasattr(model, "predict_proba_one" if classes else "predict_one")
            labels = hasattr(model, "predict_proba") or hasattr(model, "decision_function")
            sklearn = hasattr(model, "partial_fit") and hasattr(model, "predict") and classes == labels
            if isinstance(model, type) or not (river or sklearn or isinstance(model, Boosting)):
                kind = "classifier" if classes else "regressor"
                raise ValueError(
                    f"experts[{i}] must be a River {kind}, a scikit-learn {kind} with partial_fit, or 'lightgbm', got "
                    f"{model!r}"
                )
        self._fresh = [deepcopy(model) for model in self.models]

    def __len__(self) -> int:
        return len(self.models)

    @property
    def names(self) -> list[str]:
        """A name for each model: its class, and its number where there are several."""
        return [getattr(model, "name", f"{type(model).__name__} {i}") for i, model in enumerate(self.models)]

    def predictions(self, X: Floats, outputs: int) -> Floats:
        """The models' predictions (n, models, outputs); 0, or equal shares of classes, where a model has none."""
        out = np.zeros((len(X), len(self.models), outputs))
        for e, model in enumerate(self.models):
            if isinstance(model, Boosting):
                out[:, e] = model.predictions(X, outputs)
                continue
            for i, x in enumerate(X):
                out[i, e] = self._predict(model, self.outputs[e], x, outputs)
        return out

    def learned(self, X: Floats, Y: Floats, weight: Floats) -> tuple[ModelExperts, Floats]:
        """Models that have learned these rows in order, and the predictions (n, models, m) made before each."""
        out = np.zeros((len(X), len(self.models), Y.shape[1]))
        if not self.models:
            return self, out
        other = copy(self)
        other.models, other.outputs = deepcopy(self.models), list(self.outputs)
        for e, model in enumerate(self.models):
            if isinstance(model, Boosting):
                other.models[e], out[:, e] = model.learned(X, Y, weight)
                other.outputs[e] = Y.shape[1]
                continue
            for i in range(len(X)):
                out[i, e] = other._predict(other.models[e], other.outputs[e], X[i], Y.shape[1])
                if weight[i] > 0:
                    other._learn(e, X[i], Y[i])
        return other, out

    def refit(self) -> None:
        """Fit on all rows what is fitted from time to time."""
        self.models = [model.refitted() if isinstance(model, Boosting) else model for model in self.models]

    def _predict(self, model: Any, known: int, x: Floats, outputs: int) -> Floats:
        told = np.full(outputs, 1 / outputs) if self.classes else np.zeros(outputs)
        if not known or getattr(model, "n_features_in_", len(x)) != len(x):  # an input has come since it learned
            return told
        if hasattr(model, "learn_one"):
            row = _river_row(x)
            if self.classes:
                shares = model.predict_proba_one(row)
                return np.array([shares.get(k, 0.0) for k in range(outputs)]) if shares else told
            value = model.predict_one(row)
            told[:] = [value.get(k, 0.0) for k in range(outputs)] if isinstance(value, dict) else value or 0.0
        elif self.classes:
            rows = np.nan_to_num(x)[None]
            told[:] = 0.0
            if hasattr(model, "predict_proba"):
                told[:known] = model.predict_proba(rows)[0]
            else:
                told[int(model.predict(rows)[0])] = 1.0
        else:
            told[:] = np.ravel(model.predict(np.nan_to_num(x)[None]))
        return np.where(np.isfinite(told), told, 0.0)

    def _learn(self, e: int, x: Floats, y: Floats) -> None:
        model, m = self.models[e], len(y)
        if hasattr(model, "learn_one"):
            target = int(y.argmax()) if self.classes else float(y[0]) if m == 1 else dict(enumerate(y.tolist()))
            model.learn_one(_river_row(x), target)
        elif self.classes and m < 2:
            return  # many classifiers of scikit-learn refuse a single class
        else:  # an estimator of scikit-learn is told all inputs and classes once, and begins anew when one comes late
            anew = getattr(model, "n_features_in_", len(x)) != len(x) or (self.classes and self.outputs[e] != m)
            if anew:
                self.models[e] = model = deepcopy(self._fresh[e])
            targets = [int(y.argmax())] if self.classes else y[:1] if m == 1 else y[None]
            options = {"classes": np.arange(m)} if anew and self.classes else {}
            model.partial_fit(np.nan_to_num(x)[None], targets, **options)
        self.outputs[e] = m

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> list[Any]:
        """The states of the models; a model without `state_dict` cannot be saved but in a pickle."""
        for i, model in enumerate(self.models):
            if not hasattr(model, "state_dict"):
                raise TypeError(
                    f"experts[{i}], {type(model).__name__}, cannot be saved, since it has no state_dict: pickle the "
                    "estimator instead, or leave this expert out"
                )
        return [
            {"outputs": known, "state": model.state_dict() if known else None}
            for model, known in zip(self.models, self.outputs, strict=True)
        ]

    def loaded(self, states: Any, entry: str) -> ModelExperts:
        """The models in these states; a ValueError names the wrong entry."""
        items = schema.read_items(entry, states, len(self.models))
        other = ModelExperts(self._fresh, self.classes)
        for i, model in enumerate(other.models):
            state = items.entries(i, {"outputs", "state"})
            other.outputs[i] = state.integer("outputs")
            if other.outputs[i]:
                model.load_state_dict(state["state"])
        return other


def _river_row(x: Floats) -> dict[int, float]:
    return {j: value for j, value in enumerate(x.tolist()) if value == value}
