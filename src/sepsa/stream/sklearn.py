"""scikit-learn's interface: a neural network with a Newton head for tables and for streams of rows.

`partial_fit` learns rows once, in order. `fit` starts from scratch and learns them in shuffled passes: a committee of
networks, each of which leaves out a fold of the rows. The predictions of rows left out determine the number of passes
(`sepsa.stream.batch_fit`). It uses as many threads as numba may (`numba.set_num_threads`). After `fit`, all members
learn the rows of `partial_fit`.

**Intervals.** The variance of a target about its prediction is σ² (1 + c φᵀBφ), with φ the features that the head
sees and B its inverse curvature. After `fit`, σ² and c are those that make the errors on rows left out most likely; in
`partial_fit` c is 1 and σ² comes from the errors made before learning (`Engine.noise_variance`), after those of `fit`
if there was one. So mean ± 1.645 std holds nine in ten targets of the same source, on average over inputs, where errors
are about normal.

**Probabilities.** The head fits the indicator of each class by least squares; `sepsa.stream.calibration` makes its
scores probabilities, by the losses they would have made on rows not yet learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets

from sepsa.states.schema import Entries, check_memory
from sepsa.stream.calibration import INVERSE_TEMPERATURES, accumulate, probabilities
from sepsa.stream.engine.protocol import Floats
from sepsa.stream.estimator import StreamEstimator
from sepsa.stream.growth import first_rows, indicators
from sepsa.validation import not_negative

if TYPE_CHECKING:
    from torch import nn

Labels = NDArray[Any]


class SepSARegressor(RegressorMixin, StreamEstimator):  # type: ignore[misc]
    """A neural network with a recursive-least-squares head, for tables and streams, with intervals.

    Choose it where rows come one after another, where data are too few for plain training of a network, or where an
    interval is wanted; targets may have several columns. Inputs and targets need no scaling, and NaN in an input is a
    missing value: `fit` standardizes by all its rows, `partial_fit` by the first 256.

    `optimizer` ("adam", "sgd", "momentum", "nag", "rmsprop"), `learning_rate` and `weight_decay` are the body's;
    `ridge` and `forgetting` the head's, as in `sepsa.RLS`: a forgetting below 1 follows drift. `batch_size` rows make
    one step. "auto" differs between the two methods. `partial_fit` has one layer of 64 trainable random Fourier
    features, Adam without momentum at a rate of 3e-3, single rows, and several heads, with and without forgetting and
    with and without the hidden units, that are weighted by their recent errors (`chosen_`); `ridge="auto"` adds heads
    of other ridges. `fit` has two layers of 50 GELUs, a rate that falls from 1e-2 to 0, mini-batches and a forgetting
    of 0.98 for each. It makes at most `max_iter` passes, with `early_stopping` as many as are best for rows left out,
    and fewer where the rows are many; `n_iter_` says how many.

    `loss="huber"` bounds the influence of a row of `partial_fit`, whatever finite numbers it holds, and `outliers_`
    counts such rows (`sepsa.stream.engine.Engine` says how); `fit`, and `loss="squared"`, use rows without bounds.

    `module` takes any torch body, an `nn.Module` from (n, features) to (n, k), instead of the hidden layers. A copy of
    it is trained, from the weights it has, by `sepsa.SepSA` in PyTorch, with one head and squared loss; "auto" is then
    Adam and a batch of 32.

    `body="experts"` puts experts beside the network in `partial_fit`: neighbours, trees, products of inputs, the last
    target and the mean, stacked and weighted by recent errors, at two to three times the price. `experts` are models of
    yours beside them: River's, or scikit-learn's with `partial_fit`. `chosen_` then holds the weight of each.
    """

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> SepSARegressor:
        """Learn from scratch, in shuffled passes. A sample's weight multiplies its squared error."""
        with self._exclusive():
            rows, Y, weight = self._check(X, y, sample_weight, reset=True)
            self._fit(rows, Y, weight)
        return self

    def partial_fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> SepSARegressor:
        """Learn rows once, in the order given."""
        self.prequential(X, y, sample_weight)
        return self

    def prequential(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Floats:
        """Learn as `partial_fit` does; returns the prediction made for each row before it was learned."""
        with self._exclusive():
            rows, Y, weight = self._check(X, y, sample_weight, reset=not hasattr(self, "_learner"))
            return self._shaped(self._learn(rows, Y, weight))

    def predict(self, X: ArrayLike, return_std: bool = False) -> Floats | tuple[Floats, Floats]:
        """The predictions; with `return_std` also the standard deviation of targets about them.

        Mean ± 1.645 std holds about nine in ten targets not yet seen, over all inputs together, not for each alone.
        """
        rows = self._check_rows(X)
        if not return_std:
            return self._shaped(self._learner.predict(rows))
        mean, leverage = self._learner.predict_with_leverage(rows)
        std = np.sqrt(self._learner.noise_variance() * (1 + leverage)[:, None])
        return self._shaped(mean), self._shaped(std)

    def _check(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None, reset: bool
    ) -> tuple[Floats, Floats, Floats]:
        rows, targets, weights = self._check_data(X, y, sample_weight, reset, multi_output=True, y_numeric=True)
        shape = targets.shape[1:]
        if reset:
            self._target_shape = shape
        elif shape != self._target_shape:
            raise ValueError(
                f"y must have shape (n, {', '.join(map(str, self._target_shape))}) as before, got {targets.shape}"
            )
        return rows, np.ascontiguousarray(targets.reshape(len(rows), -1), dtype=np.float64), weights

    _EXTRA = ("target_shape",)

    def _extra_state(self) -> dict[str, Any]:
        return {"target_shape": list(self._target_shape)}

    def _load_extra_state(self, state: Entries, outputs: int) -> dict[str, Any]:
        sizes = state.items("target_shape")
        shape = [sizes.integer(i, 1) for i in range(len(sizes))]
        if shape not in ([], [outputs]) or (not shape and outputs != 1):
            raise state.damaged("target_shape", f"[{outputs}]", shape)
        return {"_target_shape": tuple(shape)}

    def _shaped(self, outputs: Floats) -> Floats:
        return outputs.reshape(len(outputs), *self._target_shape)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class SepSAClassifier(ClassifierMixin, StreamEstimator):  # type: ignore[misc]
    """A neural network with a recursive-least-squares head on class indicators, for tables and streams.

    Choose it where rows come one after another, or where classes may appear late: the head then grows and keeps its
    state. The arguments are those of `SepSARegressor`, and `class_weight`, a dict of the weight of each class, 1 where
    it has none, or for `fit` "balanced". `classes_` are sorted, in the dtype of the labels.
    """

    def __init__(
        self,
        hidden_layer_sizes: int | Sequence[int] | Literal["auto"] = "auto",
        activation: str = "auto",
        *,
        optimizer: str = "auto",
        learning_rate: float | Literal["auto"] = "auto",
        weight_decay: float = 0.0,
        ridge: float | Literal["auto"] = 10.0,
        forgetting: float | Literal["auto"] = "auto",
        loss: Literal["huber", "squared"] = "huber",
        class_weight: dict[Any, float] | Literal["balanced"] | None = None,
        batch_size: int | Literal["auto"] = "auto",
        max_iter: int = 400,
        early_stopping: bool = True,
        random_state: int | np.random.RandomState | None = None,
        module: nn.Module | None = None,
        body: Literal["fourier", "experts"] = "fourier",
        experts: Sequence[Any] = (),
    ) -> None:
        super().__init__(
            hidden_layer_sizes,
            activation,
            optimizer=optimizer,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            ridge=ridge,
            forgetting=forgetting,
            loss=loss,
            batch_size=batch_size,
            max_iter=max_iter,
            early_stopping=early_stopping,
            random_state=random_state,
            module=module,
            body=body,
            experts=experts,
        )
        self.class_weight = class_weight

    _loss: Floats  # of each inverse temperature, on rows not yet learned
    _columns: NDArray[np.intp]  # the learner's output for each of classes_

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> SepSAClassifier:
        """Learn from scratch, in shuffled passes. A sample's weight multiplies its squared error."""
        with self._exclusive():
            rows, labels, weight = self._check(X, y, sample_weight, reset=True)
            weight = weight * self._class_weights(labels)
            self.classes_, codes = np.unique(labels[weight > 0], return_inverse=True)
            self._columns = np.arange(len(self.classes_))
            codes_of_rows = np.zeros(len(labels), np.intp)
            codes_of_rows[weight > 0] = codes
            targets = (codes_of_rows[:, None] == self._columns).astype(np.float64)  # of no class: (n, 0)
            out, scores = self._fit(rows, targets, weight)
            none = np.zeros(INVERSE_TEMPERATURES.size)
            self._loss = accumulate(none, scores, codes_of_rows[out], weight[out], forgetting=1.0)[-1]
        return self

    def partial_fit(
        self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None = None, sample_weight: ArrayLike | None = None
    ) -> SepSAClassifier:
        """Learn rows once, in the order given. `classes` announces classes; others are added when they come."""
        self._learn_labels(X, y, classes, sample_weight)
        return self

    def prequential(
        self,
        X: ArrayLike,
        y: ArrayLike,
        classes: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
        *,
        method: Literal["predict", "predict_proba"] = "predict",
    ) -> Labels:
        """Learn as `partial_fit` does; returns the prediction made for each row before it was learned.

        With `method="predict_proba"` the columns are `classes_` as they are afterwards. A class that was not known
        before a row is never predicted for it, except for the first row of all, for which there is no other.
        """
        if method not in ("predict", "predict_proba"):
            raise ValueError(f"method must be 'predict' or 'predict_proba', got {method!r}")
        scores, loss, known = self._learn_labels(X, y, classes, sample_weight)
        if method == "predict":
            best: Labels = self.classes_[np.where(known, scores, -np.inf).argmax(1)]
            return best
        proba: Floats = np.where(known, probabilities(scores, loss), 0.0)
        proba /= proba.sum(1, keepdims=True)
        return proba

    def predict(self, X: ArrayLike) -> Labels:
        """The likeliest class of each row."""
        scores = self._scores(X)  # raises NotFittedError before `classes_` is missed
        best: Labels = self.classes_[scores.argmax(1)]
        return best

    def predict_proba(self, X: ArrayLike) -> Floats:
        """The probability (n, classes) of each class."""
        return probabilities(self._scores(X), self._loss)

    def predict_log_proba(self, X: ArrayLike) -> Floats:
        """The logarithm of `predict_proba`."""
        return np.log(self.predict_proba(X))

    _EXTRA = ("classes", "columns", "calibration_loss")

    def _extra_state(self) -> dict[str, Any]:
        return {
            "classes": {"dtype": self.classes_.dtype.str, "labels": self.classes_.tolist()},
            "columns": self._columns.astype(np.int64),
            "calibration_loss": self._loss.copy(),
        }

    def _load_extra_state(self, state: Entries, outputs: int) -> dict[str, Any]:
        classes = state.entries("classes", {"dtype", "labels"})
        labels = classes.items("labels").values
        if not all(type(label) in (str, bool, int, float) for label in labels):
            raise classes.damaged("labels", "strings or numbers", labels)
        try:
            dtype = np.dtype(classes["dtype"])
            check_memory(classes.path("labels"), dtype.itemsize * len(labels))
            sorted_labels = np.array(labels, dtype=dtype)
        except (TypeError, ValueError, OverflowError) as error:
            raise state.damaged("classes", "labels of one dtype", error) from None
        distinct = len(np.unique(sorted_labels)) == len(labels) == outputs
        if not distinct or not np.array_equal(np.sort(sorted_labels), sorted_labels):
            raise classes.damaged("labels", f"{outputs} sorted labels", labels)
        columns = state.array("columns", (outputs,), np.int64).astype(np.intp)
        if not np.array_equal(np.sort(columns), np.arange(outputs)):
            raise state.damaged("columns", f"each of 0 to {outputs - 1} once", columns.tolist())
        loss = state.array("calibration_loss", INVERSE_TEMPERATURES.shape, low=0.0)
        return {"classes_": sorted_labels, "_columns": columns, "_loss": loss}

    def _scores(self, X: ArrayLike) -> Floats:
        rows = self._check_rows(X)
        scores: Floats = self._learner.predict(rows)[:, self._columns]
        return scores

    def _learn_labels(
        self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None, sample_weight: ArrayLike | None
    ) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        """Learn; returns for each row the scores and losses before it, and which classes were known before it."""
        with self._exclusive():
            first = not hasattr(self, "_learner")
            rows, labels, weight = self._check(X, y, sample_weight, reset=first)
            if self.class_weight == "balanced":
                raise ValueError(
                    "class_weight must be a dict of weights for partial_fit, got 'balanced': a stream does not tell "
                    "how often each class will come"
                )
            weight = weight * self._class_weights(labels)
            if first:
                self.classes_, self._columns = labels[:0], np.empty(0, np.intp)
                self._loss = np.zeros(INVERSE_TEMPERATURES.size)
            if classes is not None:
                self._add_classes(np.asarray(classes))
            announced = self.classes_
            self._add_classes(labels)
            codes = np.searchsorted(self.classes_, labels)
            scores = self._learn(rows, indicators(self._columns[codes], len(self.classes_)), weight)[:, self._columns]
            forgetting = 1.0 if self.forgetting == "auto" else self.forgetting
            losses = accumulate(self._loss, scores, codes, weight, forgetting)
            self._loss = losses[-1]
            first_row = first_rows(codes, len(self.classes_))
            first_row[np.isin(self.classes_, announced)] = -1
            known = first_row < np.arange(len(rows))[:, None]
            known[~known.any(1)] = True
            return scores, losses[:-1], known

    def _class_weights(self, labels: Labels) -> Floats:
        """The weight (n,) of each row by its class."""
        weights = self.class_weight
        if weights is None:
            return np.ones(len(labels))
        if weights == "balanced":
            _, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
            balanced: Floats = len(labels) / (len(counts) * counts[codes])
            return balanced
        if not isinstance(weights, dict):
            raise ValueError(f"class_weight must be a dict, 'balanced' or None, got {weights!r}")
        for label, weight in weights.items():
            not_negative(f"class_weight[{label!r}]", weight)
        return np.array([float(weights.get(label, 1.0)) for label in labels.tolist()])

    def _add_classes(self, labels: Labels) -> None:
        """Widen `classes_` by these; the learner's outputs stay where they are and new ones come last."""
        if len(self.classes_) and (self.classes_.dtype.kind in "biuf") != (labels.dtype.kind in "biuf"):
            raise ValueError(
                f"y has labels of dtype {labels.dtype} where classes_ has {self.classes_.dtype}: "
                "numbers and strings are not mixed"
            )
        wider = np.union1d(self.classes_, labels)
        columns = np.empty(len(wider), np.intp)
        old = np.isin(wider, self.classes_)
        columns[old] = self._columns
        columns[~old] = np.arange(len(self._columns), len(wider))
        self.classes_, self._columns = wider, columns

    def _check(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None, reset: bool
    ) -> tuple[Floats, Labels, Floats]:
        rows, labels, weights = self._check_data(X, y, sample_weight, reset)
        check_classification_targets(labels)
        return rows, labels, weights
