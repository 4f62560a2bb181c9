"""scikit-learn's interface: a neural network with a Newton head for tables and for streams of rows.

`partial_fit` learns rows once, in order. `fit` starts from scratch and trains the same mixture of experts on a table:
the network in many shuffled passes, the others in two, by a committee of learners that each leave out a fold of the
rows. The answers to rows left out determine the number of passes and the weights of the experts
(`sepsa.learner.table_fit.batch_fit`). It uses as many threads as `joblib.cpu_count()`, which knows the limits of
containers and the environment variable `LOKY_MAX_CPU_COUNT`. After `fit`, all members learn the rows of `partial_fit`.

**Intervals.** The variance of a target about its prediction is σ² (1 + c φᵀBφ), with φ the features that the head
sees and B its inverse curvature. After `fit`, c makes the errors on rows left out most likely, and σ² is that for which
mean ± 1.645 std holds nine in ten of them; in `partial_fit` c is 1 and σ² comes from the errors made before learning
(`Engine.noise_variance`), after those of `fit` if there was one.

**Probabilities.** The head fits the indicator of each class by least squares; `sepsa.learner.calibration` makes its
scores probabilities, by the losses they would have made on rows not yet learned.
"""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets

from sepsa.interfaces.estimator import FEW, StreamEstimator, check_sizes
from sepsa.interrupt import DeferredInterrupt, lock_of, locked
from sepsa.learner.calibration import follow, label_probabilities, no_losses, probabilities
from sepsa.learner.learner import Names, class_codes, indicators
from sepsa.learner.memory.parts import Floats
from sepsa.learner.options import ClassifierOptions
from sepsa.learner.rows import dense
from sepsa.states.objects import rebuilt_as
from sepsa.validation import not_negative, one_of

Labels = NDArray[Any]


@rebuilt_as("sepsa.SepSARegressor")
class SepSARegressor(RegressorMixin, StreamEstimator):  # type: ignore[misc]
    """Regress tables and streams by a neural network with a recursive-least-squares head, with prediction intervals.

    Choose it where rows come one after another, where there are too few rows to train a network by gradients alone, or
    where you need intervals. Inputs and targets need no scaling: `fit` standardizes by all its rows, `partial_fit` by
    the first 256. NaN in an input is a missing value. The variance of a target about its prediction is σ² (1 + c φᵀBφ),
    with φ the features that the head sees and B its inverse curvature.

    A DataFrame of pandas, Polars or Arrow may have columns of numbers, booleans, text, categories and dates; later ones
    have the same columns, in any order. Up to 256 texts or categories of a column get an input each, which is 1 in the
    rows that have the text: the first 32 at their first row, later ones at their second. All further texts share one
    input, the mean of the targets that a text had before, with a prior of ten rows. A text that `predict` has not seen
    is a missing value. Dates become days, month, weekday and hour. Texts that spell numbers, dates or missing values
    ("", "NA", "NaN", "null", "None", "?" and the like) are read as such, except in a column of dtype category. A sparse
    matrix of SciPy becomes dense a part at a time; the head's state grows as the square of the number of columns, of
    which there may be 2,048: reduce a wider matrix by `TruncatedSVD`.

    The network is one of several experts: neighbours, trees, products of inputs, a linear head, the last target and
    others, stacked and weighted by their errors on rows not yet learned; `chosen_` holds the weight of each.
    `body="fourier"` is the network alone.

    `fit` trains a network of two layers of 50 GELU units by mini-batches, with a learning rate that falls from 1e-2
    to 0 and a forgetting of 0.98 per mini-batch; the other experts learn each row, fewer than 3,000 twice, 120
    trees are boosted on all of them, and the linear head has the ridge of largest evidence. `partial_fit` trains 64
    random Fourier features by single rows, and mixes several heads, with and without forgetting and hidden units, by
    their recent errors. These are the meanings of "auto".
    `fit`, then `partial_fit` goes on: what `fit` has trained learns the further rows once, in order, its network with
    one head at a learning rate of 1e-4. `fit` again starts anew.

    Attributes:
        n_features_in_: Number of input columns.
        feature_names_in_: Their names (n_features_in_,), where X had names.
        n_iter_: Number of passes that `fit` made.

    See also:
        `sepsa.river.SepSARegressor` for dicts of features that come and go; `SepSAForecaster` for time series.

    Examples:
        >>> import numpy as np
        >>> from sepsa import SepSARegressor
        >>> X = np.random.default_rng(0).normal(size=(500, 3))
        >>> y = np.sin(2 * X[:, 0]) + X[:, 1]
        >>> model = SepSARegressor(random_state=0).partial_fit(X[:400], y[:400])
        >>> mean, std = model.predict(X[400:], return_std=True)
        >>> mean.shape, std.shape
        ((100,), (100,))
        >>> bool(model.score(X[400:], y[400:]) > 0.9)
        True
    """

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> SepSARegressor:
        """Forget everything and learn the rows in shuffled passes.

        Args:
            X: Inputs (n, features); NaN is a missing value.
            y: Targets (n,) or (n, outputs).
            sample_weight: Factor (n,) on each row's squared error; rows of weight 0 are left out.

        Returns:
            This estimator.
        """
        with self._changed(anew=True) as other:
            other._fit(*other._check(X, y, sample_weight))
        return self

    def partial_fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> SepSARegressor:
        """Learn rows once, in the order given.

        Args:
            X: Inputs (n, features); NaN is a missing value.
            y: Targets (n,) or (n, outputs), as in earlier calls.
            sample_weight: Factor (n,) on each row's loss.

        Returns:
            This estimator.
        """
        self.prequential(X, y, sample_weight)
        return self

    def prequential(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Floats:
        """Predict each row, then learn it: `partial_fit` that returns the predictions made before learning.

        Args:
            X: Inputs (n, features); NaN is a missing value.
            y: Targets (n,) or (n, outputs), as in earlier calls.
            sample_weight: Factor (n,) on each row's loss.

        Returns:
            Predictions of the shape of `y`.
        """
        with self._changed() as other:
            rows, Y, weight = other._check(X, y, sample_weight)
            if self.loss != "huber":
                check_sizes(float(np.abs(Y).max()))
            before = other._shaped(other._learn(rows, Y, weight))
        self._learner.body.tell(len(before))
        return before

    @overload
    def predict(self, X: ArrayLike, return_std: Literal[False] = False) -> Floats: ...

    @overload
    def predict(self, X: ArrayLike, return_std: Literal[True]) -> tuple[Floats, Floats]: ...

    @overload
    def predict(self, X: ArrayLike, return_std: bool) -> Floats | tuple[Floats, Floats]: ...

    @locked
    def predict(self, X: ArrayLike, return_std: bool = False) -> Floats | tuple[Floats, Floats]:
        """Predict targets, on request with their standard deviation.

        Args:
            X: Inputs (n, features); NaN is a missing value.
            return_std: Whether to return the standard deviation of targets about the predictions too. The interval mean
                ± 1.645 std contains about nine in ten new targets, on average over inputs, not for each input.

        Returns:
            Predictions of the shape of `y` in `fit`, or a pair of such arrays: mean and standard deviation.
        """
        if not return_std:
            return self._shaped(self._learner.predict(self._check_rows(X)))
        mean, std = self._learner.body.predict_with_deviation(self._check_rows(X))
        return self._shaped(mean), self._shaped(std)

    def _check(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None) -> tuple[Any, Floats, Floats]:
        given = np.asarray(y)
        for value in given.ravel().tolist() if y is not None and given.dtype.kind in "OU" else ():
            if not is_target(value):
                raise ValueError(
                    f"y must hold numbers, got {value!r}: leave rows without a target out, and use SepSAClassifier for "
                    "classes"
                )
        if given.dtype.kind in "mM":
            raise ValueError(f"y must hold numbers, got {given.dtype}: convert it, as by y.astype(float)")
        rows, targets, weights = self._check_data(X, y, sample_weight, multi_output=True, y_numeric=True)
        shape = targets.shape[1:]
        if self._learner.body is None:
            names = range(*shape) if shape else ("y",)
            self._learner = self._learner._replace(outputs={name: i for i, name in enumerate(names)})
        elif shape != self._target_shape:
            raise ValueError(
                f"y must have shape (n, {', '.join(map(str, self._target_shape))}) as before, got {targets.shape}"
            )
        return rows, np.ascontiguousarray(targets.reshape(len(targets), -1), dtype=np.float64), weights

    @property
    def _target_shape(self) -> tuple[int, ...]:
        """The shape of the targets of one row."""
        outputs = self._learner.outputs
        return () if len(outputs) == 1 and "y" in outputs else (len(outputs),)

    def _shaped(self, outputs: Floats) -> Floats:
        return outputs.reshape(len(outputs), *self._target_shape)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def kind_of_labels(labels: Labels) -> str:
    """The letter of a dtype, one for all numbers and one for all texts; with the unit of dates."""
    kind = labels.dtype.kind
    return "f" if kind in "biu" else "U" if kind in "OT" else labels.dtype.str if kind in "mM" else kind


def is_target(value: Any) -> bool:
    """Whether an object is, or spells, a number; one that is too large is told elsewhere."""
    try:
        return not math.isnan(float(value))
    except OverflowError:
        return True
    except (TypeError, ValueError):
        return False


@rebuilt_as("sepsa.SepSAClassifier")
class SepSAClassifier(ClassifierMixin, StreamEstimator, ClassifierOptions):  # type: ignore[misc]
    """Classify tables and streams by a neural network with a recursive-least-squares head on class indicators.

    Choose it where rows come one after another, or where classes may appear late: the head then gets an output more and
    keeps its state. Probabilities are the head's scores, calibrated on rows before they are learned. "auto" has the
    meanings that `SepSARegressor` describes.

    Targets (n, labels) of 0 and 1, with at least two columns, are multilabel: an output for each label, calibrated by
    itself. `predict` and `predict_proba` then return (n, labels), the latter the probability that a label is 1.

    Attributes:
        classes_: The classes (classes,), sorted, in the dtype of the labels; 0 to labels - 1 for multilabel targets.
        n_features_in_: Number of input columns.
        feature_names_in_: Their names (n_features_in_,), where X had names.
        n_iter_: Number of passes that `fit` made.

    See also:
        `sepsa.river.SepSAClassifier` for dicts of features that come and go.

    Examples:
        >>> import numpy as np
        >>> from sepsa import SepSAClassifier
        >>> X = np.random.default_rng(0).normal(size=(500, 3))
        >>> y = np.where(X[:, 0] * X[:, 1] > 0, "same sign", "other sign")
        >>> model = SepSAClassifier(random_state=0).partial_fit(X[:400], y[:400])
        >>> model.classes_.tolist(), model.predict_proba(X[400:]).shape
        (['other sign', 'same sign'], (100, 2))
        >>> bool(model.score(X[400:], y[400:]) > 0.8)
        True
    """

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> SepSAClassifier:
        """Forget everything and learn the rows in shuffled passes.

        Args:
            X: Inputs (n, features); NaN is a missing value.
            y: Labels (n,), or 0 and 1 (n, labels).
            sample_weight: Factor (n,) on each row's squared error; rows of weight 0 are left out.

        Returns:
            This estimator.
        """
        with self._changed(anew=True) as other:
            rows, labels, weight = other._check(X, y, sample_weight)
            weight = weight * self._class_weights(labels)
            if labels.ndim == 1:
                other._tell(np.unique(labels[weight > 0]))
                labels = (labels[:, None] == other.classes_).astype(np.float64)  # of no class: (n, 0)
            before = other._learner.calibration
            losses = follow(before, *other._fit(rows, labels, weight), forgetting=1.0)[-1]
            other._learner = other._learner._replace(losses=losses)
        return self

    def partial_fit(
        self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None = None, sample_weight: ArrayLike | None = None
    ) -> SepSAClassifier:
        """Learn rows once, in the order given.

        Args:
            X: Inputs (n, features); NaN is a missing value.
            y: Labels (n,), or 0 and 1 (n, labels). New classes are added when they first appear.
            classes: Classes that will come, to be known before their first row.
            sample_weight: Factor (n,) on each row's loss.

        Returns:
            This estimator.
        """
        self._learn_labels(X, y, classes, sample_weight, asked=False)
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
        """Predict each row, then learn it: `partial_fit` that returns the predictions made before learning.

        Args:
            X: Inputs (n, features); NaN is a missing value.
            y: Labels (n,), or 0 and 1 (n, labels).
            classes: Classes that will come, to be known before their first row.
            sample_weight: Factor (n,) on each row's loss.
            method: "predict" for labels, "predict_proba" for probabilities.

        Returns:
            Labels of the shape of `y`, or probabilities (n, classes) in the order of `classes_` after the call. A row
            is predicted with the classes that were told or seen before it, or before its batch: others have the
            probability 0. Where there are none, as for the first row of all, the label is empty, "" or 0, and all
            probabilities are 0.
        """
        one_of("method", method, ("predict", "predict_proba"))
        with lock_of(self):
            scores, losses = self._learn_labels(X, y, classes, sample_weight, method == "predict_proba")
            names, outputs = self.classes_, self._columns
        if self._learner.several:
            return (scores > 0.5).astype(np.int64) if losses is None else label_probabilities(scores, losses)[..., 1]
        scores = scores[:, outputs]
        there = scores.max(1) > -np.inf
        if losses is None:
            best: Labels = names[scores.argmax(1)]
            best[~there] = {"O": "", "M": "NaT", "m": "NaT"}.get(best.dtype.kind, np.zeros((), best.dtype))
            return best
        proba = np.zeros(scores.shape)
        proba[there] = probabilities(scores[there], losses[there])
        return proba

    @locked
    def predict(self, X: ArrayLike) -> Labels:
        """Predict the most probable class of each row.

        Args:
            X: Inputs (n, features); NaN is a missing value.

        Returns:
            Labels (n,), or 0 and 1 (n, labels).
        """
        scores = self._scores(X)
        if self._learner.several:
            return (scores > 0.5).astype(np.int64)
        return self.classes_[scores.argmax(1)]

    @locked
    def predict_proba(self, X: ArrayLike) -> Floats:
        """Predict the probability of each class.

        Args:
            X: Inputs (n, features); NaN is a missing value.

        Returns:
            Probabilities (n, classes), in the order of `classes_`; for multilabel targets (n, labels) that each is 1.
        """
        proba = self._probabilities(X)
        return proba[..., 1] if self._learner.several else proba

    def predict_log_proba(self, X: ArrayLike) -> Floats:
        """Predict the logarithm of the probability of each class.

        Args:
            X: Inputs (n, features); NaN is a missing value.

        Returns:
            Log-probabilities (n, classes), in the order of `classes_`.
        """
        return np.log(self.predict_proba(X))

    @locked
    def decision_function(self, X: ArrayLike) -> Floats:
        """Predict scores whose logistic function or softmax is `predict_proba`.

        Args:
            X: Inputs (n, features); NaN is a missing value.

        Returns:
            For two classes the log-odds (n,) of `classes_[1]`; for more the log-probabilities (n, classes); for
            multilabel targets the log-odds (n, labels) of 1.
        """
        log_proba = np.log(self._probabilities(X))
        return log_proba[..., 1] - log_proba[..., 0] if log_proba.shape[-1] == 2 else log_proba

    def _scores(self, X: ArrayLike) -> Floats:
        return self._learner.predict(self._check_rows(X))[:, self._columns]

    def _probabilities(self, X: ArrayLike) -> Floats:
        """The probabilities (n, classes); those (n, labels, 2) of 0 and of 1 for multilabel targets."""
        return self._learner.probabilities(self._scores(X))

    def _learn_labels(
        self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None, sample_weight: ArrayLike | None, asked: bool
    ) -> tuple[Floats, Floats | None]:
        """Learn rows; returns for each the scores (n, outputs), and the losses if `asked`."""
        with DeferredInterrupt(), self._changed() as other:
            rows, Y, weight = other._check(X, y, sample_weight)
            if self.class_weight == "balanced":
                raise ValueError(
                    "class_weight must be a dict of weights for partial_fit, got 'balanced': a stream does not tell "
                    "how often each class will come"
                )
            weight = weight * self._class_weights(Y)
            if Y.ndim == 2:
                outputs = other._learner.outputs
                if classes is not None and not np.array_equal(classes, other.classes_):
                    raise ValueError(f"classes must be None or 0 to {len(outputs) - 1} for this y, got {classes!r}")
            else:
                if classes is not None:
                    other._tell(np.unique(classes))
                outputs, codes = other._codes(Y)
                Y = indicators(codes, len(outputs))
            told, losses = len(other._learner.outputs), other._learner.calibration.copy()
            scores = other._learn(rows, Y, weight, outputs=outputs)
            own = other._learner.losses is not None
            if asked or own:
                forgetting = 1.0 if self.forgetting == "auto" else self.forgetting
                seen = np.maximum(np.maximum.accumulate(Y.argmax(1)) + 1, told)  # outputs, the row's own among them
                there = np.arange(len(outputs)) < seen[:, None]
                known = np.where(there, np.where(scores > -np.inf, scores, 0.0), -np.inf)
                losses = follow(losses, known, Y, weight, forgetting)
                if own:
                    other._learner = other._learner._replace(losses=losses[-1])
                else:  # so that a call that asks goes on where another one ended, bit for bit
                    other._learner.body.engine.calibration_losses[:] = losses[-1]
        self._learner.body.tell(len(Y))
        return scores, losses[:-1] if asked else None

    def _class_weights(self, labels: Labels) -> Floats:
        """The weight (n,) of each row by its class."""
        weights = self.class_weight
        if weights is None:
            return np.ones(len(labels))
        if labels.ndim == 2:
            raise ValueError(f"class_weight must be None for multilabel targets, got {weights!r}: use sample_weight")
        if weights == "balanced":
            return np.asarray(compute_sample_weight("balanced", labels), np.float64)
        if not isinstance(weights, dict):
            raise ValueError(f"class_weight must be a dict, 'balanced' or None, got {weights!r}")
        for label, weight in weights.items():
            not_negative(f"class_weight[{label!r}]", weight)
        return np.array([float(weights.get(label, 1.0)) for label in labels.tolist()])

    def _codes(self, labels: Labels) -> tuple[Names, NDArray[np.intp]]:
        """All classes after these labels, which `classes_` are then, and the output (n,) of each."""
        known = self._learner.outputs
        if known and kind_of_labels(self.classes_) != kind_of_labels(labels):
            raise ValueError(
                f"y has labels of dtype {labels.dtype} where classes_ has {self.classes_.dtype}: "
                "numbers, strings and dates are not mixed, nor dates in different units"
            )
        outputs, codes = class_codes(known, (labels.astype(np.int64) if labels.dtype.kind in "mM" else labels).tolist())
        if len(outputs) > len(self.classes_) or labels.dtype != self.classes_.dtype:
            self._know(outputs, np.result_type(labels, self.classes_))
        return outputs, codes

    def _tell(self, labels: Labels) -> None:
        """Let these classes be known before their first row."""
        self._learner = self._learner._replace(outputs=self._codes(labels)[0])

    def _check(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None) -> tuple[Any, Labels, Floats]:
        shape = np.shape(y)
        several = len(shape) == 2 and shape[1] > 1
        rows, labels, weights = self._check_data(X, y, sample_weight, multi_output=several)
        if self._learner.body is None:
            outputs: Names = {k: k for k in range(shape[1] if several else 0)}
            losses = no_losses(len(outputs)) if several else None
            self._learner = self._learner._replace(outputs=outputs, losses=losses)
            self._know(outputs, np.int64 if several else labels.dtype)
        elif shape[1:] != self.classes_.shape if self._learner.several else several:
            before = f"(n, {len(self.classes_)})" if self._learner.several else "(n,)"
            raise ValueError(f"y must have shape {before} as before, got {shape}")
        if not several:
            for label in labels.tolist() if labels.dtype.kind == "O" else ():
                if not isinstance(label, (str, bool, int, float)):
                    raise ValueError(
                        f"y must hold labels that are texts or numbers, got {label!r}: leave rows without a label "
                        "out, and write others as texts, y.astype(str)"
                    )
            if labels.dtype.kind in "mM" and np.isnat(labels).any():
                raise ValueError("y must hold labels, got NaT: leave rows without a label out")
            if labels.dtype.kind not in "biu" or len(labels) > FEW:
                check_classification_targets(labels)
            return rows, labels, weights
        labels = dense(labels)
        if not np.isin(labels, (0, 1)).all():
            raise ValueError(
                "y must hold labels (n,), or 0 and 1 for each of several labels (n, labels), got other values in shape "
                f"{shape}: sklearn.multioutput.MultiOutputClassifier fits a classifier for each of several targets"
            )
        return rows, np.ascontiguousarray(labels, np.float64), weights

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags
