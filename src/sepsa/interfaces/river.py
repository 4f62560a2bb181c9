"""River's interface: a neural network with a recursive-least-squares head that learns dicts of features, one at a time.

The network has one input for each feature seen so far. A feature that a sample does not have, or has as None or NaN, is
missing, and the network sees it as zero after standardization. A text is a feature of its own, as "city=Oslo", and a
date is four: days, month, weekday and hour. With `missing="mean"` zero stands for the feature's
mean; with `missing="zero"` for the number zero, as in a bag of words; "auto" means the number zero for a feature that
is an indicator, a count or rare. A feature that first appears in mid-stream is added as if it had been missing in all
earlier samples; that is exact, since an input at zero changes neither body nor head (`Engine.resize`);
`sepsa.learner.features` says when. A new class is added at once and exactly, since its indicator was zero until then.

The state grows with the square of the number of features, and not with the number of samples. Once there are
`max_features`, later ones are ignored.

A classifier fits the indicator of each class by least squares; `sepsa.learner.calibration` converts its scores to
probabilities.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from river import base, proba
from river.utils import dataframe

from sepsa.interfaces.model import Model
from sepsa.interfaces.river_input import (
    DataFrame,
    Series,
    frame_of,
    in_order,
    read_frame,
    read_row,
    read_target,
    read_weight,
    read_weights,
    values_in_order,
)
from sepsa.interrupt import DeferredInterrupt, locked, new_lock
from sepsa.learner.calibration import best
from sepsa.learner.features import Features, in_columns
from sepsa.learner.learner import Learner, Names, class_codes, indicators
from sepsa.learner.memory.parts import Floats
from sepsa.learner.options import RiverOptions
from sepsa.learner.stream_learner import WARM_UP, StreamLearner
from sepsa.states.objects import rebuilt_as
from sepsa.states.sealed import sealed, unsealed


class StreamModel(Model, RiverOptions, base.Estimator):
    """The base of River's models: features and outputs by name, and a learner of rows of numbers."""

    _regression = True
    _first_outputs: Names = {}  # noqa: RUF012  that are known before the first row
    _target_name: str | None = None
    _ignores = False  # whether features were ignored, and the user told

    def __post_init__(self) -> None:
        super().__post_init__()
        self._learner = Learner(Features({}, {}), self._first_outputs)
        self._lock = new_lock()
        self._new_body(1, 1)  # checks the options

    @classmethod
    def _unit_test_params(cls) -> Iterator[dict[str, Any]]:
        yield {}
        yield {"hidden": (8, 4), "activation": "gelu", "optimizer": "adam", "forgetting": 0.99, "skip": False}
        yield {"hidden": (), "loss": "squared"}

    clone = locked(base.Estimator.clone)

    def _new_body(self, inputs: int, outputs: int) -> StreamLearner:
        return StreamLearner(inputs, outputs, regression=self._regression, **self.of_learner())

    def _read_targets(self, targets: Sequence[Any]) -> tuple[Names, Floats]:
        """All outputs after these targets, new ones last in order of appearance, and the values (n, outputs)."""
        raise NotImplementedError

    def _known_targets(self, y: Any) -> list[float] | None:
        """The value of each output, where y brings no new one; None where y must be read with care."""
        raise NotImplementedError

    def _answers(self, scores: Floats) -> Any:
        """The prediction of each row, or of each output by name, by scores (n, outputs)."""
        raise NotImplementedError

    # ------------------------------------------------------------------ saving

    @locked
    def state_dict(self) -> dict[str, Any]:
        """Return the state as nested dicts and lists of arrays, numbers and strings.

        A model with the same parameters that loads it continues with the same bits.
        """
        state = {"target_name": self._target_name, "learner": self._learner.state_dict()}
        return sealed({"model": type(self).__name__} | state)

    @locked
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state_dict: The result of `state_dict` of a model with the same parameters.

        Raises:
            ValueError: An entry is missing or wrong; the message names it and nothing changed.
        """
        new = unsealed("state_dict", state_dict, {"model", "target_name", "learner"})
        new.equal("model", type(self).__name__)
        learner = Learner.loaded(new, lambda _: self._new_body(1, 1), Features.from_state)
        self.__dict__.update(_learner=learner, _target_name=new["target_name"])

    # ------------------------------------------------------------------ one sample

    def learn_one(self, x: dict[Any, Any], y: Any, w: float = 1.0) -> None:
        """Learn one sample.

        Args:
            x: Features by name; None, NaN or absence is a missing value.
            y: The target: a number; a label; of several targets a dict of numbers, with the same names in every sample.
            w: The sample's weight; 0 learns nothing.

        Raises:
            ValueError: A value is wrong; nothing changed.
        """
        with self._lock:
            learner, targets = self._learner, self._known_targets(y)
            values = None if targets is None else values_in_order(x, learner.inputs.names, learner.body)
            if values is None or learner.body is None or (w != 1.0 and not read_weight(w)):
                self._learn_row(x, y, w)
            else:
                learner.body.learn_row(values, targets, w)

    def _learn_row(self, x: Any, target: Any, w: float) -> None:
        (names, X), learner = read_row(x), self._learner
        if read_weight(w) > 0:
            outputs, Y = self._read_targets([target])
            known = learner.inputs.names
            if learner.body is None or not known.keys() >= {*names} or len(outputs) > len(learner.outputs):
                self._learn(names, X, outputs, Y, np.array([float(w)]))
            else:
                learner.body.learn_row(in_columns(names, X, known)[0].tolist(), Y[0].tolist(), float(w))

    def _predict_row(self, x: dict[Any, Any]) -> list[float]:
        """The outputs for x."""
        inputs, outputs, body, _ = self._learner
        values = values_in_order(x, inputs.names, body) or in_order(x, inputs.names)
        return [0.0] * len(outputs) if body is None else body.predict_row(values)

    def _distributions(self, x: dict[Any, Any]) -> list[proba.Gaussian]:
        """A normal distribution for each output; mean and deviation are 0 before the first sample."""
        inputs, outputs, body, _ = self._learner
        X = np.array([values_in_order(x, inputs.names, body) or in_order(x, inputs.names)], np.float64)
        found = np.zeros((2, 1, len(outputs))) if body is None else body.predict_with_deviation(X)
        return [
            proba.Gaussian._from_state(n=1, m=float(m), var=float(s) ** 2, ddof=0)  # type: ignore[no-untyped-call]
            for m, s in zip(*(part[0] for part in found), strict=True)
        ]

    # ------------------------------------------------------------------ rows

    def _learn(self, names: Sequence[Hashable], X: Floats, outputs: Names, Y: Floats, w: Floats) -> None:
        """Learn rows in order, as one row after the other would."""
        learner = self._learner
        fixed = max(0, WARM_UP - (0 if learner.body is None else learner.body.rows))
        features, new, left_out = learner.inputs.after(names, X, fixed, self.missing, self.max_features)
        if left_out and not self._ignores:
            self._ignores = True
            warnings.warn(
                f"more than {self.max_features} features: later ones are ignored; set max_features higher, at a price "
                "that grows as its square, or put river.feature_extraction.FeatureHasher before the model",
                UserWarning,
                stacklevel=4,
            )
        table, known = in_columns(names, X, features.names), {"inputs": features, "outputs": outputs}
        learner = learner._replace(outputs=outputs) if self._regression else learner
        with DeferredInterrupt():
            self._learner, _ = learner.learn(self._new_body, table, Y, w, new, **known)
        self._learner.body.tell(len(w))

    @locked
    def learn_many(self, X: DataFrame, y: Series, w: float | Series = 1.0) -> None:
        """Learn the rows of a frame, with the same result as `learn_one` row by row.

        Args:
            X: A frame with a column for each feature, of any library that River takes.
            y: A series of targets, one per row.
            w: One weight for all rows, or a series with one per row.
        """
        targets = dataframe.into_series(y)
        self._learn_table(X, targets.to_list(), w)
        self._target_name = targets.name

    def _learn_table(self, X: DataFrame, targets: Sequence[Any], w: float | Series) -> None:
        names, rows = read_frame(X)
        if not len(rows):
            raise ValueError("X must have at least one row, got an empty frame")
        if len(targets) != len(rows):
            raise ValueError(f"y must have one target for each of the {len(rows)} rows of X, got {len(targets)}")
        weights = read_weights(w, len(rows))
        there = np.flatnonzero(weights > 0)  # a row of weight 0 brings no feature and no class
        if there.size:
            outputs, Y = self._read_targets([targets[i] for i in there.tolist()])
            self._learn(names, rows[there], outputs, Y, weights[there])

    @locked
    def predict_many(self, X: DataFrame) -> Any:
        """Predict the rows of a frame.

        Args:
            X: A frame with a column for each feature.

        Returns:
            A series of predictions, or of labels, of the frame's library; for several targets a frame with a column for
            each.
        """
        return frame_of(self._answers(self._predict(X)), X, self._target_name)

    def _predict(self, X: DataFrame) -> Floats:
        """The scores (n, outputs) of rows."""
        return self._learner.predict(in_columns(*read_frame(X), self._learner.inputs.names))


@rebuilt_as("sepsa.river.SepSARegressor")
class SepSARegressor(StreamModel, base.MiniBatchRegressor):
    """Regress one numeric target by a neural network with a recursive-least-squares head.

    Choose it where a linear model is too simple: it takes raw features of any scale, needs no tuning and costs about as
    much. Do not put a running scaler such as River's `StandardScaler` before it: the scaler's output for the same
    features changes with every row, and the model determines its own scales from the first rows. It predicts 0 before
    the first sample.

    See also:
        `sepsa.SepSARegressor` for arrays; `KeyedLearner` for one model per key.

    Examples:
        >>> from sepsa.river import SepSARegressor
        >>> model = SepSARegressor(seed=0)
        >>> for hour in range(200):
        ...     model.learn_one({"hour": hour % 24}, 5.0 + (hour % 24))
        >>> round(model.predict_one({"hour": 12}))
        17
        >>> model.predict_one({"hour": 12}, with_dist=True).sigma < 1
        True
    """

    _first_outputs: Names = {"y": 0}  # noqa: RUF012

    def _known_targets(self, y: Any) -> list[float] | None:
        try:
            return [float(y)] if math.isfinite(y) else None
        except (TypeError, ValueError, OverflowError):
            return None

    def predict_one(self, x: dict[Any, Any], with_dist: bool = False) -> Any:
        """Predict one sample.

        Args:
            x: Features by name; None, NaN or absence is a missing value.
            with_dist: Whether to return a distribution.

        Returns:
            A number, or a `river.proba.Gaussian` whose variance is σ² (1 + φᵀBφ), with σ from recent errors.
        """
        with self._lock:
            return (self._distributions if with_dist else self._predict_row)(x)[0]

    def _answers(self, scores: Floats) -> Floats:
        return scores[:, 0]

    def _read_targets(self, targets: Sequence[Any]) -> tuple[Names, Floats]:
        return self._learner.outputs, np.array([[read_target("y", y)] for y in targets])


@rebuilt_as("sepsa.river.SepSAMultiTargetRegressor")
class SepSAMultiTargetRegressor(StreamModel, base.MultiTargetRegressor):  # type: ignore[misc]
    """Regress several numeric targets at once by one neural network with a recursive-least-squares head.

    Choose it where the targets depend on the same features: they share the body and the curvature, so that many cost
    little more than one. Targets come as a dict, whose names the first sample determines.

    Examples:
        >>> from sepsa.river import SepSAMultiTargetRegressor
        >>> model = SepSAMultiTargetRegressor(seed=0)
        >>> for hour in range(200):
        ...     targets = {"up": hour % 24, "down": -(hour % 24)}
        ...     model.learn_one({"hour": hour % 24}, targets)
        >>> predictions = model.predict_one({"hour": 12})
        >>> round(predictions["up"]), round(predictions["down"])
        (12, -12)
    """

    def _known_targets(self, y: Any) -> list[float] | None:
        values = values_in_order(y, self._learner.outputs)
        return None if values is None else list(map(float, values))

    def predict_one(self, x: dict[Any, Any], with_dist: bool = False) -> dict[Any, Any]:
        """Predict one sample.

        Args:
            x: Features by name; None, NaN or absence is a missing value.
            with_dist: Whether to return distributions.

        Returns:
            Numbers by target, or `river.proba.Gaussian`s with variances σ² (1 + φᵀBφ), with σ from recent errors.
        """
        with self._lock:
            found = (self._distributions if with_dist else self._predict_row)(x)
            return dict(zip(self._learner.outputs, found, strict=True))

    @locked
    def learn_many(self, X: DataFrame, y: DataFrame, w: float | Series = 1.0) -> None:
        """Learn the rows of a frame, with the same result as `learn_one` row by row.

        Args:
            X: A frame with a column for each feature, of any library that River takes.
            y: A frame with a column for each target.
            w: One weight for all rows, or a series with one per row.
        """
        self._learn_table(X, dataframe.into_frame(y).rows(named=True), w)

    def _answers(self, scores: Floats) -> dict[Any, Any]:
        return dict(zip(self._learner.outputs, scores.T, strict=True))

    def _read_targets(self, targets: Sequence[Any]) -> tuple[Names, Floats]:
        outputs = self._learner.outputs
        for y in targets:
            if not isinstance(y, Mapping) or not y or (outputs and y.keys() != outputs.keys()):
                raise ValueError(f"y must be a dict of the targets{f' {list(outputs)}' if outputs else ''}, got {y!r}")
            outputs = outputs or {name: j for j, name in enumerate(sorted(y, key=repr))}
        return outputs, np.array([[read_target(f"y[{name!r}]", y[name]) for name in outputs] for y in targets])


@rebuilt_as("sepsa.river.SepSAClassifier")
class SepSAClassifier(StreamModel, base.MiniBatchClassifier):
    """Classify into two or more classes by a neural network with a recursive-least-squares head on class indicators.

    Choose it where logistic or softmax regression is too simple. A label may be anything hashable, and a class may
    appear at any time. It predicts None before the first sample.

    See also:
        `sepsa.SepSAClassifier` for arrays; `KeyedLearner` for one model per key.

    Examples:
        >>> from sepsa.river import SepSAClassifier
        >>> model = SepSAClassifier(seed=0)
        >>> for hour in range(200):
        ...     label = "day" if 6 <= hour % 24 < 18 else "night"
        ...     model.learn_one({"hour": hour % 24}, label)
        >>> model.predict_one({"hour": 12})
        'day'
        >>> sorted(model.predict_proba_one({"hour": 12}))
        ['day', 'night']
    """

    _regression = False

    @property
    def _multiclass(self) -> bool:
        return True

    def _known_targets(self, y: Any) -> list[float] | None:
        indicators = [0.0] * len(self._learner.outputs)
        try:
            indicators[self._learner.outputs[y]] = 1.0
        except (KeyError, TypeError):  # new, or not hashable
            return None
        return indicators

    def predict_one(self, x: dict[Any, Any], **kwargs: Any) -> Any:
        """Predict the most probable class of one sample.

        Args:
            x: Features by name; None, NaN or absence is a missing value.
            **kwargs: Ignored; River's interface has them.

        Returns:
            A label, or None before the first sample.
        """
        with self._lock:
            row = self._predict_row(x)
            return list(self._learner.outputs)[row.index(max(row))] if row else None

    def predict_proba_one(self, x: dict[Any, Any], **kwargs: Any) -> dict[Any, float]:
        """Predict the probability of each class for one sample.

        Args:
            x: Features by name; None, NaN or absence is a missing value.
            **kwargs: Ignored; River's interface has them.

        Returns:
            Probabilities by label; empty before the first sample.
        """
        with self._lock:
            learner = self._learner
            shares = learner.probabilities(np.array([self._predict_row(x)]))
            return dict(zip(learner.outputs, shares[0].tolist(), strict=True))

    def _answers(self, scores: Floats) -> list[Any]:
        labels = [*self._learner.outputs, None]
        return [labels[k] for k in best(scores)]

    @locked
    def predict_proba_many(self, X: DataFrame) -> DataFrame:
        """Predict the probability of each class for each row of a frame.

        Args:
            X: A frame with a column for each feature.

        Returns:
            A frame with a column for each class, of the frame's library.
        """
        shares = self._learner.probabilities(self._predict(X))
        return frame_of(dict(zip(self._learner.outputs, shares.T, strict=True)), X)

    def _read_targets(self, targets: Sequence[Any]) -> tuple[Names, Floats]:
        for y in targets:
            if y is None or type(y).__name__ == "NAType" or not isinstance(y, Hashable) or y != y:
                raise ValueError(f"y must be a class label, something hashable, got {y!r}: leave the sample out")
        outputs, codes = class_codes(self._learner.outputs, targets)
        return outputs, indicators(codes, len(outputs))
