"""River's interface: a neural network with a Newton head that learns dicts of features, one at a time.

A sample is x ∈ Rᵈ, one coordinate for each feature seen so far. What x does not hold, or holds as None or NaN, is
missing and seen as zero by the network. For a feature with `missing="mean"` that is its mean; with `missing="zero"` it
is the number zero, as in a bag of words; "auto" takes a feature that only ever comes as an indicator or a count, or
seldom, for the latter. A feature that appears in mid-stream enters as if it had been there, missing, from the start;
that is exact, since an input at zero moves neither body nor head (`Engine.resize`). Once the learner's scales are fixed
it enters with its `ROWS_FOR_SCALE`th value, so that these tell its scale: in a sensor's first two values there is
little of how far it will go; an indicator enters at once. A class first seen late enters at once and exactly, since
its indicator was zero until then.

The state grows with the features as d², with the samples not at all. Features beyond `max_features` share as many
further inputs, to which they are hashed with a sign.

A classifier fits the indicator of each class by least squares; `sepsa.stream.calibration` makes its scores
probabilities.
"""

from __future__ import annotations

import math
import sys
import threading
import warnings
import zlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

try:
    from river import base, proba
    from river.utils import dataframe

    from sepsa.states import schema
    from sepsa.states.objects import Saves, check_stamp, stamp
    from sepsa.states.plain import pack_label, unpack_label, unpack_labels
    from sepsa.stream.calibration import mixture, project_to_simplex
    from sepsa.stream.engine import Floats
    from sepsa.stream.learner import HUGE, WARM_UP, Learner, is_indicator, moments, reciprocal
    from sepsa.validation import at_least
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] == "sepsa":
        raise
    raise ModuleNotFoundError(
        f"sepsa.river needs {error.name}, which is not installed: pip install 'sepsa[river]'", name=error.name
    ) from None

__all__ = ["SepSAClassifier", "SepSAMultiTargetRegressor", "SepSARegressor"]

Frame = Any  # a frame or series of any library that River takes: pandas, polars, ...
Series = Any
Names = dict[Hashable, int]  # each with its place
ROWS_FOR_SCALE = 32
SHARED = "sepsa: hashed "  # how the names of inputs begin that features beyond the limit share
PLACEHOLDER = "sepsa: always missing"  # the one feature of a stream whose first sample has none


class NewFeature(NamedTuple):
    """A feature that enters at this row; its values so far tell its scale."""

    row: int
    name: Hashable
    values: list[float]


class _Stream(Saves, base.Estimator):
    """What the three faces share: features and outputs by name, over one learner of rows."""

    _regression = True

    def __init__(
        self,
        hidden: Sequence[int] = (64,),
        activation: str = "fourier",
        optimizer: str = "auto",
        lr: float = 3e-3,
        weight_decay: float = 0.0,
        ridge: float | str = 10.0,
        forgetting: float | str = "auto",
        loss: str = "huber",
        missing: str = "auto",
        max_features: int = 256,
        skip: bool = True,
        seed: int | None = None,
        **optimizer_options: float,
    ) -> None:
        if not isinstance(hidden, Sequence):
            raise TypeError(f"hidden must be a sequence of widths such as (50,), got {hidden!r}")
        self.hidden = hidden or []  # River takes a tuple for a class with its parameters, and trips over an empty one
        self.activation = activation
        self.optimizer = optimizer
        self.lr = lr
        self.weight_decay = weight_decay
        self.ridge = ridge
        self.forgetting = forgetting
        self.loss = loss
        self.missing = missing
        self.max_features = at_least("max_features", max_features, 1)
        self.skip = skip
        self.seed = seed
        self.optimizer_options = optimizer_options
        self._learner: Learner | None = None
        self._features: Names = {}
        self._pending_features: dict[Hashable, list[float]] = {}  # features not yet entered, with their values
        self._outputs: Names = {}
        self._target_name: str | None = None
        self._lock = threading.RLock()
        self._new_learner(1, 1)  # refuses what is wrong

    @classmethod
    def _unit_test_params(cls) -> Iterator[dict[str, Any]]:
        yield {}
        yield {"hidden": (8, 4), "activation": "tanh", "optimizer": "momentum", "forgetting": 0.99, "skip": False}
        yield {"hidden": (), "loss": "squared"}

    def _new_learner(self, inputs: int, outputs: int) -> Learner:
        options = {name: value for name, value in self._get_params().items() if name != "max_features"}
        return Learner(inputs, outputs, regression=self._regression, **options)

    @property
    def outliers_(self) -> int:
        """How many rows had a target, a feature or a weight so implausible that it was bounded."""
        return 0 if self._learner is None else self._learner.engine.outliers

    @property
    def chosen_(self) -> dict[str, Any]:
        """The head that leads the mixture: features, ridge, forgetting, since which row, and the weights of all."""
        return {} if self._learner is None else self._learner.engine.chosen

    def _read_targets(self, targets: Sequence[Any]) -> tuple[Names, Floats]:
        """All outputs after these targets, the new ones last in order of appearance, and their values (n, outputs)."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return stamp({name: value for name, value in self.__dict__.items() if name != "_lock"})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(check_stamp(state), _lock=threading.RLock())

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """What has been learned, as nested dicts and lists of arrays, numbers and strings.

        A model of the same parameters that loads it goes on bit for bit.
        """
        with self._lock:
            return {
                "model": type(self).__name__,
                "features": [pack_label(name) for name in self._features],
                "pending_features": [
                    [pack_label(name), list(values)] for name, values in self._pending_features.items()
                ],
                "outputs": [pack_label(name) for name in self._outputs],
                "target_name": self._target_name,
                "learner": None if self._learner is None else self._learner.state_dict(),
            }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from such a state. Whole, or ValueError naming the entry and nothing."""
        keys = {"model", "features", "pending_features", "outputs", "target_name", "learner"}
        new = schema.read("state_dict", state_dict, keys)
        new.equal("model", type(self).__name__)
        features, outputs = unpack_labels(new, "features"), unpack_labels(new, "outputs")
        pending: dict[Hashable, list[float]] = {}
        pairs = new.items("pending_features")
        for i in range(len(pairs)):
            pair = pairs.items(i, 2)
            values = pair.items(1).numbers()
            if not 0 < len(values) < ROWS_FOR_SCALE:
                raise pairs.damaged(i, f"a name and fewer than {ROWS_FOR_SCALE} values", pair.values)
            pending[unpack_label(pair.path(0), pair[0])] = values
        if new["target_name"] is not None and not isinstance(new["target_name"], str):
            raise ValueError(f"state_dict['target_name'] must be a string or None, got {new['target_name']!r}")
        learner = None
        if new["learner"] is not None:
            if not features or not outputs:
                raise ValueError("state_dict['features'] and ['outputs'] must not be empty where there is a learner")
            learner = self._new_learner(len(features), len(outputs))
            learner.load_state_dict(new["learner"], "state_dict['learner']")
            for name, known, count in (
                ("features", features, learner.engine.inputs), ("outputs", outputs, learner.engine.outputs)
            ):  # fmt: skip
                if len(known) != count:
                    raise ValueError(f"state_dict[{name!r}] must hold {count} names, as the learner, got {len(known)}")
        elif features or outputs:
            raise ValueError("state_dict['learner'] must not be None where there are features")
        with self._lock:
            self.__dict__.update(
                _features=features,
                _outputs=outputs,
                _pending_features=pending,
                _target_name=new["target_name"],
                _learner=learner,
            )

    # ------------------------------------------------------------------ one sample

    def _learn_row(self, x: dict[Any, Any], target: Any, w: float) -> None:
        names, X = read_row(x)
        if read_weight(w) > 0:
            with self._lock:
                self._learn(names, X, *self._read_targets([target]), np.array([float(w)]))

    def _predict_row(self, x: dict[Any, Any]) -> list[float] | None:
        """The outputs for x; None where nothing has been learned."""
        values = values_in_order(x, self._features, 0.0, self._learner)
        if values is not None and self._learner is not None:
            return self._learner.predict_row(values)
        rows = self._predict(*read_row(x))
        return None if rows is None else list(rows[0].tolist())

    # ------------------------------------------------------------------ rows

    def _learn(self, names: Sequence[Hashable], X: Floats, outputs: Names, Y: Floats, w: Floats) -> None:
        """Learn rows in order, growing at each row that holds what was never seen, as one row after the other would.

        All is computed on copies and taken over in one assignment.
        """
        names, X = self._hashed(names, X)
        new, pending = self._new_features(names, X)
        d, m = len(self._features), len(self._outputs)
        entry_rows = [feature.row for feature in new]
        output_rows = [0] * (len(outputs) - m) if self._regression else (Y[:, m:] > 0).argmax(0).tolist()
        features = self._features | {feature.name: d + j for j, feature in enumerate(new)}
        table = in_columns(names, X, features)
        cuts = sorted({0, *entry_rows, *output_rows})
        learner = None if self._learner is None else self._learner.copy()
        for start, stop in zip(cuts, [*cuts[1:], len(X)], strict=True):
            inputs = d + sum(row <= start for row in entry_rows)
            seen = m + sum(row <= start for row in output_rows)
            if learner is None:
                learner = self._new_learner(inputs, seen)
            grow(learner, new[: inputs - d], inputs, seen)
            rows = np.ascontiguousarray(table[start:stop, :inputs])
            learner.learn(rows, np.ascontiguousarray(Y[start:stop, :seen]), w[start:stop])
        self.__dict__.update(_learner=learner, _features=features, _outputs=outputs, _pending_features=pending)

    def _new_features(
        self, names: Sequence[Hashable], X: Floats
    ) -> tuple[list[NewFeature], dict[Hashable, list[float]]]:
        """Which features enter with these rows, in order, and which wait from then on."""
        new, pending = [], dict(self._pending_features)
        wait = 1 if self.missing == "zero" else ROWS_FOR_SCALE
        # Scales are fixed from this row on.
        fixed = max(0, WARM_UP - (0 if self._learner is None else self._learner.rows))
        for j, name in enumerate(names):
            rows = np.flatnonzero(~np.isnan(X[:, j]))
            if name in self._features or not len(rows):
                continue
            if rows[0] < fixed:
                new.append(NewFeature(int(rows[0]), name, [float(X[rows[0], j])]))
                continue
            values = pending.pop(name, [])
            indicator = self.missing == "auto" and not values and X[rows[0], j] == 1.0
            needed = 1 if indicator or is_shared(name) else wait
            wanted = needed - len(values)
            values = values + X[rows[:wanted], j].tolist()
            if len(values) == needed:
                new.append(NewFeature(int(rows[wanted - 1]), name, values))
            else:
                pending[name] = values
        if not self._features and not any(feature.row == 0 for feature in new):
            new.append(NewFeature(0, PLACEHOLDER, [0.0]))
        return sorted(new, key=lambda feature: (feature.row, repr(feature.name))), pending

    def _hashed(self, names: Sequence[Hashable], X: Floats) -> tuple[Sequence[Hashable], Floats]:
        """Names and columns, with those features in shared inputs that find none of their own."""
        known = sum(not is_shared(name) for name in self._features)
        new = [
            (int(there.argmax()), repr(name), j)
            for j, name in enumerate(names)
            if name not in self._features and (there := ~np.isnan(X[:, j])).any()
        ]
        over = {j for _, _, j in sorted(new)[max(0, self.max_features - known) :]}
        if not over:
            return names, X
        if not self._shares_inputs:
            warnings.warn(
                f"more than {self.max_features} features: further ones are hashed into {self.max_features} inputs that "
                "they share; set max_features higher for inputs of their own, at a price that grows as its square",
                UserWarning,
                stacklevel=5,
            )
        columns: dict[Hashable, Floats] = {name: X[:, j] for j, name in enumerate(names) if j not in over}
        for j in sorted(over):
            shared, sign = shared_input(names[j], self.max_features)
            both = np.stack([columns.get(shared, np.full(len(X), np.nan)), sign * X[:, j]])
            columns[shared] = np.where(np.isnan(both).all(0), np.nan, np.nansum(both, 0))
        return list(columns), np.stack(list(columns.values()), 1)

    def _learn_table(self, X: Frame, targets: Sequence[Any], w: float | Series) -> None:
        names, rows = read_frame(X)
        if not len(rows):
            raise ValueError("X must have at least one row, got an empty frame")
        if len(targets) != len(rows):
            raise ValueError(f"y must have one target for each of the {len(rows)} rows of X, got {len(targets)}")
        weights = np.full(len(rows), read_weight(w)) if np.isscalar(w) else read_weights(w, len(rows))
        outputs, Y = self._read_targets(targets)
        there = weights > 0
        if not there.all():  # what has no weight was not seen: no feature and no class comes from it
            outputs, Y = self._read_targets([target for target, kept in zip(targets, there, strict=True) if kept])
        if there.any():
            with self._lock:
                self._learn(names, rows[there], outputs, Y, weights[there])

    def _predict(self, names: Sequence[Hashable], X: Floats) -> Floats | None:
        if self._learner is None:
            return None
        if self._shares_inputs:
            names, X = self._hashed(names, X)
        return self._learner.predict(in_columns(names, X, self._features))

    def _distributions(self, x: dict[Any, Any], outputs: int) -> list[proba.Gaussian]:
        """A normal law for each output; of mean 0 and no deviation before anything is learned."""
        mean, std = np.zeros(outputs), np.zeros(outputs)
        if self._learner is not None:
            names, X = self._hashed(*read_row(x)) if self._shares_inputs else read_row(x)
            means, leverage = self._learner.predict_with_leverage(in_columns(names, X, self._features))
            mean, std = means[0], np.sqrt(self._learner.noise_variance() * (1 + leverage[0]))
        return [
            proba.Gaussian._from_state(n=1, m=float(m), var=float(s) ** 2, ddof=0)  # type: ignore[no-untyped-call]
            for m, s in zip(mean, std, strict=True)
        ]

    @property
    def _shares_inputs(self) -> bool:
        return any(map(is_shared, self._features))

    def _output_frame(self, values: Floats | None, X: Frame) -> Frame:
        """values (n, outputs) under the outputs' names, a frame like X; without a column where nothing was learned."""
        columns = {} if values is None else dict(zip(self._outputs, values.T, strict=True))
        return dataframe.to_native_frame(columns, like=dataframe.into_frame(X))


class SepSARegressor(_Stream, base.MiniBatchRegressor):
    """A neural network with a Newton head, for one numeric target.

    Choose it where a linear model is too stiff: raw features of any scale, no tuning, about the price of a linear
    model. `forgetting` below 1 follows a target that drifts. Before anything is learned it predicts 0.
    """

    def learn_one(self, x: dict[Any, Any], y: float, w: float = 1.0) -> None:
        learner = self._learner
        values = values_in_order(x, self._features, y, learner)
        if values is None or learner is None or (w != 1.0 and not read_weight(w)):
            self._learn_row(x, y, w)
        else:
            with self._lock:
                learner.learn_row(values, (float(y),), w)

    def predict_one(self, x: dict[Any, Any], with_dist: bool = False) -> Any:
        """The prediction; `with_dist` as a normal law, whose deviation is that of recent errors."""
        if with_dist:
            return self._distributions(x, 1)[0]
        row = self._predict_row(x)
        return 0.0 if row is None else row[0]

    def learn_many(self, X: Frame, y: Series, w: float | Series = 1.0) -> None:
        """As `learn_one` row by row."""
        targets = dataframe.into_series(y)
        self._learn_table(X, targets.to_list(), w)
        self._target_name = targets.name

    def predict_many(self, X: Frame) -> Series:
        frame = dataframe.into_frame(X)
        out = self._predict(*read_frame(X))
        values = np.zeros(len(frame)) if out is None else out[:, 0]
        return dataframe.to_native_series(values, name=self._target_name, like=frame)

    def _read_targets(self, targets: Sequence[Any]) -> tuple[Names, Floats]:
        return {"y": 0}, np.array([[read_target("y", y)] for y in targets])


class SepSAMultiTargetRegressor(_Stream, base.MultiTargetRegressor):
    """A neural network with a Newton head, for several numeric targets at once, given as a dict.

    Choose it where targets depend on the same features: they share the body and the curvature, so that many cost
    little more than one. The first sample says which targets there are.
    """

    def learn_one(self, x: dict[Any, Any], y: dict[Any, float], w: float = 1.0) -> None:  # type: ignore[override]
        learner = self._learner
        values, targets = values_in_order(x, self._features, 0.0, learner), values_in_order(y, self._outputs)
        if values is None or targets is None or learner is None or (w != 1.0 and not read_weight(w)):
            self._learn_row(x, y, w)
        else:
            with self._lock:
                learner.learn_row(values, list(map(float, targets)), w)

    def predict_one(self, x: dict[Any, Any], with_dist: bool = False) -> dict[Any, Any]:
        """The predictions; `with_dist` as normal laws, whose deviations are those of recent errors."""
        if with_dist:
            laws = self._distributions(x, len(self._outputs))
            return dict(zip(self._outputs, laws, strict=True))
        row = self._predict_row(x)
        return {} if row is None else dict(zip(self._outputs, row, strict=True))

    def learn_many(self, X: Frame, y: Frame, w: float | Series = 1.0) -> None:
        """As `learn_one` row by row; y is a frame with a column for each target."""
        self._learn_table(X, dataframe.into_frame(y).rows(named=True), w)

    def predict_many(self, X: Frame) -> Frame:
        return self._output_frame(self._predict(*read_frame(X)), X)

    def _read_targets(self, targets: Sequence[Any]) -> tuple[Names, Floats]:
        outputs = self._outputs
        for y in targets:
            if not isinstance(y, Mapping) or not y or (outputs and y.keys() != outputs.keys()):
                raise ValueError(f"y must be a dict of the targets{f' {list(outputs)}' if outputs else ''}, got {y!r}")
            outputs = outputs or {name: j for j, name in enumerate(sorted(y, key=repr))}
        return outputs, np.array([[read_target(f"y[{name!r}]", y[name]) for name in outputs] for y in targets])


class SepSAClassifier(_Stream, base.MiniBatchClassifier):
    """A neural network with a Newton head on the indicators of the classes, two or more.

    Choose it where logistic or softmax regression is too stiff. Labels may be anything hashable, and a class may appear
    at any time. Before anything is learned it predicts None.
    """

    _regression = False

    @property
    def _multiclass(self) -> bool:
        return True

    def learn_one(self, x: dict[Any, Any], y: Hashable, w: float = 1.0) -> None:
        learner = self._learner
        values = values_in_order(x, self._features, 0.0, learner)
        place = position(y, self._outputs)
        if values is None or place is None or learner is None or (w != 1.0 and not read_weight(w)):
            self._learn_row(x, y, w)
        else:
            indicators = [0.0] * len(self._outputs)
            indicators[place] = 1.0
            with self._lock:
                learner.learn_row(values, indicators, w)

    def predict_one(self, x: dict[Any, Any], **kwargs: Any) -> Any:
        row = self._predict_row(x)
        return None if row is None else list(self._outputs)[row.index(max(row))]

    def predict_proba_one(self, x: dict[Any, Any], **kwargs: Any) -> dict[Any, float]:
        row = self._predict_row(x)
        if row is None:
            return {}
        return dict(zip(self._outputs, self._probabilities(np.array([row]))[0].tolist(), strict=True))

    def learn_many(self, X: Frame, y: Series, w: float | Series = 1.0) -> None:
        """As `learn_one` row by row."""
        targets = dataframe.into_series(y)
        self._learn_table(X, targets.to_list(), w)
        self._target_name = targets.name

    def predict_many(self, X: Frame) -> Series:
        frame = dataframe.into_frame(X)
        out, labels = self._predict(*read_frame(X)), list(self._outputs)
        values = [None] * len(frame) if out is None else [labels[k] for k in out.argmax(1)]
        return dataframe.to_native_series(values, name=self._target_name, like=frame)

    def predict_proba_many(self, X: Frame) -> Frame:
        out = self._predict(*read_frame(X))
        return self._output_frame(None if out is None else self._probabilities(out), X)

    def _probabilities(self, scores: Floats) -> Floats:
        assert self._learner is not None
        return mixture(project_to_simplex(scores), self._learner.engine.calibration_losses())

    def _read_targets(self, targets: Sequence[Any]) -> tuple[Names, Floats]:
        outputs = dict(self._outputs)
        for y in targets:
            if y is None or not isinstance(y, Hashable) or y != y:
                raise ValueError(f"y must be a class label, something hashable, got {y!r}: leave the sample out")
            outputs.setdefault(y, len(outputs))
        Y = np.zeros((len(targets), len(outputs)))
        Y[np.arange(len(targets)), [outputs[y] for y in targets]] = 1.0
        return outputs, Y


def grow(learner: Learner, new: list[NewFeature], inputs: int, outputs: int) -> None:
    """Let the learner have so many inputs, the last of which are new, and so many outputs."""
    more, added = inputs - learner.engine.inputs, outputs - learner.engine.outputs
    if more:
        scales = np.array([scale_of(feature, learner) for feature in new[-more:]])
        learner.add_inputs(*scales.T)
    if added:
        learner.add_outputs(added)


def scale_of(feature: NewFeature, learner: Learner) -> tuple[float, float, float]:
    """Mean, scale and typical distance of a feature that enters with these values."""
    values = np.array(feature.values)
    sparse = is_shared(feature.name) or learner.missing == "zero"
    if sparse or (learner.warm and learner.missing == "auto" and is_indicator(values, 1.0)):
        size = float(np.sqrt(np.mean(np.clip(values, -HUGE, HUGE) ** 2)))
        return 0.0, 1 / size if size > 0 else 0.0, 1.0
    mean, variance = moments(np.clip(values, -HUGE, HUGE)[:, None], np.ones(len(values)))
    return float(mean[0]), float(reciprocal(np.sqrt(variance))[0]), 0.7


def shared_input(name: Hashable, count: int) -> tuple[str, float]:
    """The input that a feature shares, and the sign with which it does; the same in every process."""
    number = zlib.crc32(repr(name).encode())
    return f"{SHARED}{number // 2 % count}", 1.0 if number % 2 else -1.0


def is_shared(name: Hashable) -> bool:
    return isinstance(name, str) and name.startswith(SHARED)


def in_columns(names: Sequence[Hashable], X: Floats, features: Names) -> Floats:
    """The columns of X (n, len(names)) in the learner's order, NaN where there is none."""
    table = np.full((len(X), len(features)), np.nan)
    for j, name in enumerate(names):
        if name in features:
            table[:, features[name]] = X[:, j]
    return table


# ---------------------------------------------------------------------- the border


def values_in_order(x: Any, names: Names, plus: Any = 0.0, learner: Learner | None = None) -> list[Any] | None:
    """The values of x in order, where x holds just these names, and finite numbers, as `plus` must be; else None.

    With a learner whose scales are fixed some may be missing: they are NaN.
    """
    if type(x) is not dict:  # another mapping may make up what it is asked for
        return None
    try:
        if len(x) == len(names) and x:
            values = list(map(x.__getitem__, names))
            if math.isfinite(sum(values, plus)):
                return values
    except (KeyError, TypeError, OverflowError):
        pass
    try:
        if learner is not None and learner.warm and x.keys() <= names.keys():
            values = list(map(x.get, names))
            if math.isfinite(sum((value for value in values if value is not None and value == value), plus)):
                return [math.nan if value is None else value for value in values]
    except (TypeError, ValueError, OverflowError):
        pass
    return None


def position(name: Any, names: Names) -> int | None:
    try:
        return names.get(name)
    except TypeError:  # a list, say, which no name is
        return None


def read_number(what: str, value: Any) -> float:
    """A number, NaN for a missing value; ±Inf and what is no number are refused."""
    if value is None or value is getattr(sys.modules.get("pandas"), "NA", None):
        return math.nan
    try:
        number = math.inf if isinstance(value, (str, bytes, bytearray)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.inf
    if math.isinf(number):
        raise ValueError(f"{what} must be a finite number, got {value!r}: encode it, or leave it out")
    return number


def read_target(what: str, value: Any) -> float:
    number = read_number(what, value)
    if math.isnan(number):
        raise ValueError(f"{what} must be a finite number, got {value!r}: leave the sample out")
    return number


def read_weight(w: Any) -> float:
    weight = read_target("w", w)
    if weight < 0:
        raise ValueError(f"w must not be negative, got {w!r}")
    return weight


def read_weights(w: Series, n: int) -> Floats:
    weights = np.array([read_weight(value) for value in dataframe.into_series(w).to_list()])
    if len(weights) != n:
        raise ValueError(f"w must have one weight for each of the {n} rows of X, got {len(weights)}")
    return weights


def read_row(x: Any) -> tuple[list[Hashable], Floats]:
    """Names and values (1, len(names)) of a sample."""
    if not isinstance(x, Mapping):
        raise TypeError(f"x must be a dict of features, got {type(x).__name__}")
    return list(x), np.array([[read_number(f"x[{name!r}]", value) for name, value in x.items()]])


def read_frame(X: Frame) -> tuple[list[Hashable], Floats]:
    """Names and values (n, len(names)) of a frame."""
    frame = dataframe.into_frame(X)
    columns = []
    for name, series in zip(frame.columns, frame.iter_columns(), strict=True):
        if series.dtype.is_float() or series.dtype.is_integer():
            column = np.asarray(series.to_numpy(), dtype=np.float64)
            if np.isinf(column).any():
                read_number(f"X[{name!r}]", column[np.isinf(column)][0])
        else:
            column = np.array([read_number(f"X[{name!r}]", value) for value in series.to_list()])
        columns.append(column)
    return list(frame.columns), np.stack(columns, 1) if columns else np.empty((len(frame), 0))
