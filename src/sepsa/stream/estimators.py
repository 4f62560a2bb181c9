"""scikit-learn's interface: a neural network with a Newton head for tables and for streams of rows.

`partial_fit` learns rows once, in order. `fit` starts anew and learns them in shuffled passes: a committee of networks,
each of which leaves out a fold of the rows; what they predict for rows left out says how many passes are made
(`sepsa.stream.batch_fit`), in as many threads as numba may use (`numba.set_num_threads`). After `fit`, `partial_fit`
teaches them all.

**Intervals.** A target is taken to lie about its prediction with variance σ² (1 + c φᵀBφ), φ the features that the head
sees and B its inverse curvature. After `fit`, σ² and c are those that make the errors on rows left out most likely; in
`partial_fit` c is 1 and σ² comes from the errors made one step ahead (`Learner.noise_variance`), after those of `fit`
if there was one. So mean ± 1.645 std holds nine in ten targets of the same source, on average over inputs, where errors
are about normal.

**Probabilities.** The head fits the indicator of each class by least squares; `sepsa.stream.calibration` makes its
scores probabilities, by the losses they would have made on rows not yet learned.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numba import get_num_threads
from numpy.typing import ArrayLike, NDArray
from scipy.signal import lfilter  # type: ignore[import-untyped]
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from sepsa.states import schema
from sepsa.states.objects import Saves, check_stamp, stamp
from sepsa.states.schema import Entries
from sepsa.stream import batch_fit
from sepsa.stream.calibration import INVERSE_TEMPERATURES, log_losses, mixture, project_to_simplex
from sepsa.stream.engine import ACTIVATIONS, OPTIMIZERS, Floats, not_negative, one_of
from sepsa.stream.learner import Learner
from sepsa.validation import at_least, in_range

if TYPE_CHECKING:
    from torch import nn

Labels = NDArray[Any]


class _SepSA(Saves, BaseEstimator):  # type: ignore[misc]
    """What the regressor and the classifier share: rows of numbers, and a learner of them."""

    _learner: Any  # a Learner
    _EXTRA: tuple[str, ...]  # the entries of a state beside those that both estimators have

    def _extra_state(self) -> dict[str, Any]:
        raise NotImplementedError

    def _load_extra_state(self, state: Entries, outputs: int) -> dict[str, Any]:
        """The attributes that these entries stand for."""
        raise NotImplementedError

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
        batch_size: int | Literal["auto"] = "auto",
        max_iter: int = 400,
        early_stopping: bool = True,
        random_state: int | np.random.RandomState | None = None,
        module: nn.Module | None = None,
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.ridge = ridge
        self.forgetting = forgetting
        self.loss = loss
        self.batch_size = batch_size
        self.max_iter = max_iter
        self.early_stopping = early_stopping
        self.random_state = random_state
        self.module = module

    def _new_learner(self, inputs: int, outputs: int, seed: int, table: bool = False) -> Learner:
        """A learner of these options, which are checked here under their own names; `table` for one that `fit` trains.

        Rate, forgetting and batch are those by which it goes on after that: single rows would shake a fitted body at
        the rate by which a new one learns.
        """
        sizes, rate, forgetting, ridge = self.hidden_layer_sizes, self.learning_rate, self.forgetting, self.ridge
        one_of("loss", self.loss, {"huber": None, "squared": None})
        if ridge != "auto":
            in_range("ridge", ridge, 0.0, np.inf)
        if forgetting != "auto":
            in_range("forgetting", forgetting, 0.0, 1.0)
        fixed = table or self.module is not None  # one head, plain least squares
        options: dict[str, Any] = {
            "optimizer": one_of("optimizer", self.optimizer, OPTIMIZERS),
            "lr": (1e-4 if table else 1e-3 if fixed else 3e-3)
            if rate == "auto"
            else in_range("learning_rate", rate, 0.0, np.inf),
            "weight_decay": not_negative("weight_decay", self.weight_decay),
            "ridge": 10.0 if fixed and ridge == "auto" else ridge,
            "forgetting": 1.0 if fixed and forgetting == "auto" else forgetting,
            "seed": seed,
        }
        if fixed and self.optimizer == "auto":
            options["optimizer"] = "adam"
        regression = isinstance(self, RegressorMixin)
        if self.module is not None:
            from sepsa.stream.torch_body import TorchLearner

            options["batch"] = 32 if self.batch_size == "auto" else at_least("batch_size", self.batch_size, 1)
            return TorchLearner(inputs, outputs, regression=regression, module=self.module, **options)
        options["batch"] = 1 if self.batch_size == "auto" else at_least("batch_size", self.batch_size, 1)
        options["loss"] = "squared" if table else self.loss
        plain = "gelu" if table else "fourier"
        options["activation"] = (
            plain if self.activation == "auto" else one_of("activation", self.activation, ACTIVATIONS)
        )
        if isinstance(sizes, str) and sizes == "auto":
            sizes = (50, 50) if table else (64,)
        options["hidden"] = tuple(
            at_least("hidden_layer_sizes", width, 1) for width in (sizes if np.iterable(sizes) else [sizes])
        )
        return Learner(inputs, outputs, regression=regression, skip=True, **options)

    # ------------------------------------------------------------------ learning

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One thread at a time; what is interrupted or refused leaves the estimator as it was."""
        with self.__dict__.setdefault("_lock", threading.RLock()):
            before = dict(self.__dict__)
            try:
                yield
            except BaseException:
                self.__dict__ = before  # one assignment, which nothing can interrupt
                raise

    def _fit(self, X: Floats, Y: Floats, weight: Floats) -> tuple[NDArray[np.intp], Floats]:
        """Learn from scratch; returns the rows that were left out once, and the predictions of them then."""
        there = np.flatnonzero(weight > 0)
        if not there.size:
            raise ValueError("sample_weight must be positive for at least one sample, got zeros alone")
        X, Y, weight = X[there], Y[there], weight[there]
        rate, forgetting = self.learning_rate, self.forgetting
        sizes, module = self.hidden_layer_sizes, self.module is not None
        linear = not module and np.iterable(sizes) and not len(sizes)
        widths = (50,) if isinstance(sizes, str) else sizes if np.iterable(sizes) else (sizes,)
        if forgetting == "auto":
            forgetting = 1.0 if linear else batch_fit.FORGETTING  # features that do not move need none
        done = batch_fit.fit(
            lambda seed: self._new_learner(X.shape[1], Y.shape[1], seed, table=True),
            X,
            Y,
            weight,
            batch_fit.Schedule(
                passes=at_least("max_iter", self.max_iter, 1),
                rate=batch_fit.RATE if rate == "auto" else rate,
                forgetting=forgetting,
                batch=None if self.batch_size == "auto" else at_least("batch_size", self.batch_size, 1),
                visits=batch_fit.affordable_visits(None if module else X.shape[1] + sum(widths[-1:]) + 1),
            ),
            early_stopping=self.early_stopping,
            together=linear or module,
            threads=1 if module else get_num_threads(),
            rng=check_random_state(self.random_state),
        )
        self._learner, self.n_iter_ = done.learner, done.passes
        return there[done.rows], done.left_out

    def _learn(self, X: Floats, Y: Floats, weight: Floats) -> Floats:
        """Learn rows in order, as the first ones where none were before; returns the predictions made before."""
        learner = self.__dict__.get("_learner")
        if learner is None:
            seed = check_random_state(self.random_state).randint(2**31 - 1)
            learner = self._new_learner(X.shape[1], Y.shape[1], seed)
        learner = learner.copy()  # the old one stays as it is until all is done
        before: Floats = learner.learn(X, Y, weight)
        self._learner = learner
        return before

    def _check_rows(self, X: ArrayLike) -> Floats:
        check_is_fitted(self)
        rows: Floats = validate_data(self, X, reset=False, dtype=np.float64, order="C", ensure_all_finite="allow-nan")
        return rows

    def _weights(self, sample_weight: ArrayLike | None, X: Floats) -> Floats:
        weights: Floats = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        return weights

    @property
    def outliers_(self) -> int:
        """How many rows had a target, an input or a weight so implausible that it was bounded."""
        check_is_fitted(self)
        return int(self._learner.engine.outliers)

    @property
    def chosen_(self) -> dict[str, Any]:
        """The head that leads the mixture: features, ridge, forgetting, since which step, and the weights of all."""
        check_is_fitted(self)
        chosen: dict[str, Any] = self._learner.engine.chosen
        return chosen

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True  # a missing value stands at the mean
        return tags

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_learner")

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """What has been learned, as nested dicts and lists of arrays, numbers and strings.

        An estimator of the same parameters that loads it goes on bit for bit.
        """
        check_is_fitted(self)
        names = getattr(self, "feature_names_in_", None)
        return {
            "estimator": type(self).__name__,
            "learner": self._learner.state_dict(),
            "feature_names": None if names is None else [str(name) for name in names],
            "n_iter": getattr(self, "n_iter_", None),
            **self._extra_state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from such a state. Whole, or ValueError naming the entry and nothing."""
        with self._exclusive():
            keys = {"estimator", "learner", "feature_names", "n_iter", *self._EXTRA}
            new = schema.read("state_dict", state_dict, keys)
            new.equal("estimator", type(self).__name__)
            table = isinstance(new["learner"], dict) and "members" in new["learner"]
            members = Entries(new.path("learner"), new["learner"]).items("members").values if table else []
            first = members[0] if members else new["learner"]
            engine = first.get("engine") if isinstance(first, dict) else None
            found = {name: engine.get(name) if isinstance(engine, dict) else None for name in ("inputs", "outputs")}
            sizes = [Entries("state_dict['learner']['engine']", found).integer(name, 1) for name in found]
            learner: Any = self._new_learner(sizes[0], sizes[1], seed=0, table=table)
            if table:
                learner = batch_fit.Committee([learner])
            learner.load_state_dict(new["learner"], "state_dict['learner']")
            fitted: dict[str, Any] = {"_learner": learner, "n_features_in_": sizes[0]}
            if new["feature_names"] is not None:
                names = new.items("feature_names", sizes[0]).values
                if not all(isinstance(name, str) for name in names):
                    raise new.damaged("feature_names", f"{sizes[0]} strings", names)
                fitted["feature_names_in_"] = np.array(names, dtype=object)
            if new["n_iter"] is not None:
                fitted["n_iter_"] = new.integer("n_iter", 1)
            fitted |= self._load_extra_state(new, sizes[1])
            kept = {name: value for name, value in self.__dict__.items() if not name.endswith("_")}
            self.__dict__ = kept | fitted

    # As bytes, because joblib may map plain arrays read-only, and a learner writes to its own even to predict.
    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = dict(super().__getstate__())
        state.pop("_lock", None)
        if "_learner" in state:
            state["_learner"] = pickle.dumps(state["_learner"])
        return stamp(state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = check_stamp(state)
        if "_learner" in state:
            state = state | {"_learner": pickle.loads(state["_learner"])}
        super().__setstate__(state)


class SepSARegressor(RegressorMixin, _SepSA):  # type: ignore[misc]
    """A neural network with a recursive-least-squares head, for tables and streams, with intervals.

    Choose it where rows come one after another, where data are too few for plain training of a network, or where an
    interval is wanted; targets may have several columns. Inputs and targets are taken raw, NaN in an input is a missing
    value: `fit` standardizes by all its rows, `partial_fit` by the first 256 it is given.

    `optimizer` ("adam", "sgd", "momentum", "nag", "rmsprop"), `learning_rate` and `weight_decay` are the body's;
    `ridge` and `forgetting` the head's, as in `sepsa.RLS`: below 1 it follows what drifts. `batch_size` rows make one
    step. What is "auto" differs. `partial_fit` has one layer of 64 trainable random Fourier features, Adam without
    momentum at a rate of 3e-3, single rows, and several heads, with and without forgetting and with and without the
    hidden units, that are weighted by their recent errors (`chosen_`); `ridge="auto"` adds heads of other ridges. `fit`
    has two layers of 50 GELUs, a rate that falls from 1e-2 to 0, mini-batches and a forgetting of 0.98 for each. `fit`
    makes at most `max_iter` passes, with `early_stopping` as many as are best for rows left out, and fewer where the
    rows are many; `n_iter_` says how many.

    `loss="huber"` bounds what a row of `partial_fit` can do, whatever finite numbers it holds, and `outliers_` counts
    such rows (`sepsa.stream.engine.Engine` says how); `fit`, and `loss="squared"`, take every row at its word.

    `module` takes any torch body, an `nn.Module` from (n, features) to (n, k), instead of the hidden layers. A copy of
    it is trained, from the weights it has, by `sepsa.SepSA` in PyTorch, with one head and squared loss; "auto" is then
    Adam and a batch of 32.
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
        rows, targets = validate_data(
            self,
            X,
            y,
            reset=reset,
            dtype=np.float64,
            order="C",
            multi_output=True,
            y_numeric=True,
            ensure_all_finite="allow-nan",
        )
        weights = self._weights(sample_weight, rows)
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


class SepSAClassifier(ClassifierMixin, _SepSA):  # type: ignore[misc]
    """A neural network with a recursive-least-squares head on class indicators, for tables and streams.

    Choose it where rows come one after another, or where classes may appear late: the head then grows and keeps what it
    knows. The arguments are those of `SepSARegressor`, and `class_weight`, a dict of the weight of each class, 1 where
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
            indicators = (codes_of_rows[:, None] == self._columns).astype(np.float64)  # of no class: (n, 0)
            out, scores = self._fit(rows, indicators, weight)
            self._loss = (weight[out, None] * log_losses(project_to_simplex(scores), codes_of_rows[out])).sum(0)
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
        probabilities = np.where(known, mixture(project_to_simplex(scores), loss), 0.0)
        proba: Floats = probabilities / probabilities.sum(1, keepdims=True)
        return proba

    def predict(self, X: ArrayLike) -> Labels:
        """The likeliest class of each row."""
        scores = self._scores(X)
        best: Labels = self.classes_[scores.argmax(1)]
        return best

    def predict_proba(self, X: ArrayLike) -> Floats:
        """The probability (n, classes) of each class."""
        scores = self._scores(X)
        return mixture(project_to_simplex(scores), self._loss)

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
            sorted_labels = np.array(labels, dtype=np.dtype(classes["dtype"]))
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
        """Learn; returns for each row the scores before it, the losses before it, and which classes it could know."""
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
                self.classes_, self._columns, self._loss = (
                    labels[:0],
                    np.empty(0, np.intp),
                    np.zeros(INVERSE_TEMPERATURES.size),
                )
            if classes is not None:
                self._add_classes(np.asarray(classes))
            announced = self.classes_
            self._add_classes(labels)
            if not first and len(self._columns) > self._learner.engine.outputs:
                self._learner = self._learner.copy()
                self._learner.add_outputs(len(self._columns) - self._learner.engine.outputs)
            codes_of_rows = np.searchsorted(self.classes_, labels)
            Y = np.eye(len(self.classes_))[:, np.argsort(self._columns)][codes_of_rows]
            scores = self._learn(rows, Y, weight)[:, self._columns]
            steps = weight[:, None] * log_losses(project_to_simplex(scores), codes_of_rows)
            forgetting = 1.0 if self.forgetting == "auto" else self.forgetting
            sums = lfilter([1.0], [1.0, -forgetting], np.vstack([self._loss, steps]), axis=0)
            self._loss = sums[-1]
            first_row = np.full(len(self.classes_), len(rows))
            np.minimum.at(first_row, codes_of_rows, np.arange(len(rows)))
            first_row[np.isin(self.classes_, announced)] = -1
            known = first_row < np.arange(len(rows))[:, None]
            known[~known.any(1)] = True
            return scores, sums[:-1], known

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
        rows, labels = validate_data(
            self, X, y, reset=reset, dtype=np.float64, order="C", ensure_all_finite="allow-nan"
        )
        check_classification_targets(labels)
        return rows, labels, self._weights(sample_weight, rows)
