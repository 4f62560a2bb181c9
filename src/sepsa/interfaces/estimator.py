"""The base of scikit-learn's estimators: fit, learning in order, and saved states."""

from __future__ import annotations

import math
import pickle
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from joblib import cpu_count
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils import check_array, check_random_state, check_X_y
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from sepsa.interrupt import lock_of, locked
from sepsa.learner.arithmetic.robust import HUGE
from sepsa.learner.columns.frame import FrameEncoder, all_numbers, as_pandas, check_numbers, in_order, is_frame
from sepsa.learner.columns.inputs import CLASS_MEANS
from sepsa.learner.engine.options import BODIES, body_of, of_estimator, widths
from sepsa.learner.growth import NewInput, learn_rows
from sepsa.learner.learner import TELL, WARM_UP, StreamLearner
from sepsa.learner.memory.parts import Floats
from sepsa.learner.options import Options
from sepsa.learner.rows import dense, row_parts
from sepsa.learner.scales import order_of_columns
from sepsa.learner.table_fit import batch_fit
from sepsa.learner.table_fit.committee import Committee
from sepsa.states import schema
from sepsa.states.objects import Saves, check_stamp, stamp
from sepsa.states.schema import Entries
from sepsa.validation import at_least, one_of

MOST_INPUTS = 2048  # of a compiled network
HEAVIEST = 1e30  # weight of a row in `fit`, so that sums of weighted squares stay finite
NUMBERS = {"dtype": np.float64, "order": "C", "ensure_all_finite": "allow-nan"}  # what scikit-learn checks


class Rows(NamedTuple):
    """Rows of numbers (n, inputs), dense or CSR, and the inputs that they are the first to need."""

    X: Any
    new_inputs: Sequence[NewInput] = ()


class StreamEstimator(Saves, Options, BaseEstimator):  # type: ignore[misc]
    """The base of the regressor and the classifier: a learner of rows of numbers, and its state."""

    _learner: Any  # a StreamLearner or a Committee
    _encoder: FrameEncoder | None = None  # of DataFrames that do not hold numbers alone
    _EXTRA: tuple[str, ...]  # the entries of a state that only one of the two estimators has

    def _extra_state(self) -> dict[str, Any]:
        raise NotImplementedError

    def _load_extra_state(self, state: Entries, outputs: int) -> dict[str, Any]:
        """The attributes that these entries hold."""
        raise NotImplementedError

    def _new_learner(
        self, inputs: int, outputs: int, seed: int, for_fit: bool = False, alone: bool = False, **more: Any
    ) -> StreamLearner:
        """A learner with this estimator's parameters, which are checked; `for_fit` for one that `fit` trains.

        With `alone` it has no experts beside the network. Options of the engine may be given as well.
        """
        one_of("body", self.body, BODIES)
        if inputs > MOST_INPUTS:
            raise ValueError(
                f"X must have at most {MOST_INPUTS} columns, got {inputs}: the head's state grows as their square; "
                "reduce them first, for example by sklearn.decomposition.TruncatedSVD"
            )
        options = of_estimator(self.get_params(deep=False), for_fit)
        if alone:
            options["experts"] = False
        regression = isinstance(self, RegressorMixin)
        return StreamLearner(inputs, outputs, regression=regression, seed=seed, **(options | more))

    # ------------------------------------------------------------------ learning

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One thread at a time; an error or an interrupt leaves the estimator as it was."""
        with lock_of(self):
            before = dict(self.__dict__)
            try:
                yield
            except BaseException:
                self.__dict__ = before  # one assignment, which nothing can interrupt
                raise

    def _fit(self, X: Any, Y: Floats, weight: Floats) -> tuple[NDArray[np.intp], Floats]:
        """Learn from scratch; returns the rows that one member left out, and its predictions of them."""
        if self._encoder is not None:
            X, _ = self._encoder.learn_means(X, Y, (), shuffled=True)
        there = np.flatnonzero(weight > 0)
        if not there.size:
            raise ValueError("sample_weight must be positive for at least one sample, got zeros alone")
        names = self._input_names(X.shape[1])
        order = None if names is None else order_of_columns(dense(X[there[:WARM_UP]]), names)
        X = X[there] if order is None else X[there][:, order]
        table = batch_fit.Table(X, Y[there], weight[there])
        hidden = self.hidden_layer_sizes
        layers = (50,) if isinstance(hidden, str) else widths(hidden)
        features = X.shape[1] + sum(layers[-1:]) + 1
        speed = min(1.0, (64 / features) ** 2)  # the curvature costs p², and the rest is little beside it
        rate, forgetting = self.learning_rate, self.forgetting
        if forgetting == "auto":
            forgetting = batch_fit.FORGETTING if layers else 1.0
        mixed = body_of(self.body, hidden) == "experts"
        if table.weight.max() > HEAVIEST:
            raise ValueError(
                f"sample_weight must be at most {HEAVIEST:g} for fit, got {table.weight.max():g}: divide all "
                "weights by their mean"
            )
        # Weights that differ much are no outliers in a table: they say themselves how much each row counts.
        usual = float(np.median(table.weight))
        even = 0.1 * usual <= table.weight.min() and table.weight.max() <= 10 * usual
        options: dict[str, Any] = {} if even else {"loss": "squared"}
        robust = even and self.loss == "huber" and isinstance(self, RegressorMixin)
        if isinstance(self, RegressorMixin):
            sizes = np.abs(table.Y)
            check_sizes(float(np.median(sizes) if robust else sizes.max()))
            table = table._replace(Y=np.clip(table.Y, -HUGE, HUGE))
        new_learner = partial(self._new_learner, X.shape[1], Y.shape[1], for_fit=True, tells=False, **options)
        result = batch_fit.fit(
            partial(new_learner, alone=True),
            table,
            batch_fit.Schedule(
                passes=at_least("max_iter", self.max_iter, 1),
                rate=batch_fit.RATE if rate == "auto" else rate,
                forgetting=forgetting,
                batch=None if self.batch_size == "auto" else at_least("batch_size", self.batch_size, 1),
                visits=int(batch_fit.VISITS * speed),
                verbose=bool(self.verbose),
            ),
            early_stopping=self.early_stopping,
            together=not layers,  # then the body does not learn
            threads=cpu_count(),
            rng=check_random_state(self.random_state),
            new_mixture=new_learner if mixed else None,
            robust=robust,
        )
        for member in result.committee.members:
            member.order = order
        first = result.committee.members[0]
        first.tells = True
        first.tell(TELL)
        self._learner, self.n_iter_ = result.committee, result.passes
        return there[result.rows], result.predictions

    def _learn(self, rows: Rows, Y: Floats, weight: Floats, told: int, output_rows: Sequence[int] = ()) -> Floats:
        """Learn rows in order; returns the predictions made before.

        So many outputs are known, or told, before the first row; `output_rows` need one more each.
        """

        def new_learner(inputs: int, outputs: int) -> StreamLearner:
            inputs = inputs if rows.new_inputs else rows.X.shape[1]
            seed = check_random_state(self.random_state).randint(2**31 - 1)
            return self._new_learner(inputs, outputs, seed, names=self._input_names(inputs))

        if self._encoder is not None:
            rows = Rows(*self._encoder.learn_means(rows.X, Y, rows.new_inputs, shuffled=False))
        self._learner, before = learn_rows(
            self._learner.copy() if hasattr(self, "_learner") else None,
            new_learner,
            rows.X,
            Y,
            weight,
            rows.new_inputs,
            output_rows,
            told,
            self._batch,
        )
        return before

    @property
    def _batch(self) -> int:
        """The rows that `partial_fit` learns at once."""
        if hasattr(self, "_learner"):
            return int(self._learner.engine.batch_size)
        return int(of_estimator(self.get_params(deep=False), False)["batch"])

    def _input_names(self, inputs: int) -> Sequence[Any] | None:
        """The names of the inputs, by which equal ones are ordered; None where they stay in the order they have."""
        if self._encoder is not None:
            return None  # in the order of their names already
        names = getattr(self, "feature_names_in_", None)
        return range(inputs) if names is None else list(names)

    def _means(self, outputs: int) -> int:
        """Of how many targets a column of many texts has means."""
        return max(1, min(outputs, CLASS_MEANS)) if isinstance(self, RegressorMixin) else CLASS_MEANS

    def _encode(self, X: Any, reset: bool, learn: bool = True, y: Any = None) -> Rows | None:
        """The rows of a DataFrame that does not hold numbers alone, found by the names of its columns; else None."""
        encoder = None if reset else self._encoder
        if reset and is_frame(X) and not all_numbers(X):
            validate_data(self, X, reset=True, skip_check_array=True)
            names = getattr(self, "feature_names_in_", None)
            means = self._means(sum(np.asarray(y).shape[1:2]) or 1)
            encoder = FrameEncoder([f"x{i}" for i in range(X.shape[1])] if names is None else sorted(names), means)
        if reset:
            self._encoder = encoder
        if encoder is None:
            return None
        if not is_frame(X):
            columns = ", ".join(repr(str(name)) for name in [*getattr(self, "feature_names_in_", encoder.kinds)][:10])
            raise ValueError(f"X must be a DataFrame with the columns {columns}, as before, got {type(X).__name__}")
        validate_data(self, X, reset=False, skip_check_array=True)
        if not learn:
            return Rows(encoder.encode(X))
        encoder = deepcopy(encoder)
        rows, new_inputs, said = encoder.learn(X)
        for text in said:
            warnings.warn(text, UserWarning, stacklevel=6)
        self._encoder = encoder
        return Rows(rows, new_inputs)

    def _in_order(self, X: Any) -> Any:
        """X with its columns in the order in which they were learned, where it is a DataFrame with their names."""
        if not is_frame(X):
            return X
        X = in_order(X, getattr(self, "feature_names_in_", None))
        if self._encoder is None:
            check_numbers(X)
        return X

    def _check_rows(self, X: ArrayLike) -> Any:
        """Rows (n, inputs), dense or CSR, checked."""
        check_is_fitted(self)
        X = as_pandas(X)
        with explained(X=X):
            X = self._in_order(X)
            encoded = self._encode(X, reset=False, learn=False)
            if encoded is not None:
                return check_array(encoded.X, **NUMBERS)
            return validate_data(self, X, reset=False, accept_sparse="csr", **NUMBERS)

    def _predict(self, X: ArrayLike) -> Floats:
        return np.concatenate([self._learner.predict(part) for _, part in row_parts(self._check_rows(X))])

    def _check_data(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None, reset: bool, **checks: bool
    ) -> tuple[Rows, NDArray[Any], Floats]:
        """Rows (n, inputs), targets and weights (n,), checked."""
        X = as_pandas(X)
        with explained(X=X, y=y, sample_weight=sample_weight):
            X = X if reset else self._in_order(X)
            rows = self._encode(X, reset, y=y)
            if rows is None:
                numbers, targets = validate_data(self, X, y, reset=reset, accept_sparse="csr", **NUMBERS, **checks)
                rows = Rows(numbers)
            else:
                _, targets = check_X_y(rows.X, y, estimator=self, **NUMBERS, **checks)
            weights = _check_sample_weight(sample_weight, rows.X, dtype=np.float64, ensure_non_negative=True)
        return rows, targets, weights

    @property
    def outliers_(self) -> int:
        """Number of rows whose target, input or weight was implausible and was bounded by `loss="huber"`."""
        check_is_fitted(self)
        return int(self._learner.engine.outliers)

    @property
    @locked
    def chosen_(self) -> dict[str, Any]:
        """The head with the largest weight.

        A dict of its `features`, `ridge`, `forgetting`, the step `since` which it leads, and the `weights` of all
        heads.
        """
        check_is_fitted(self)
        return self._learner.engine.chosen

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True  # a missing value is replaced by the mean
        tags.input_tags.sparse = True
        return tags

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_learner")

    # ------------------------------------------------------------------ saving

    @locked
    def state_dict(self) -> dict[str, Any]:
        """Return the fitted state as nested dicts and lists of arrays, numbers and strings.

        An estimator with the same parameters that loads it continues with the same bits.
        """
        check_is_fitted(self)
        names = getattr(self, "feature_names_in_", None)
        return {
            "estimator": type(self).__name__,
            "learner": self._learner.state_dict(),
            "feature_names": None if names is None else [str(name) for name in names],
            "n_iter": getattr(self, "n_iter_", None),
            **({} if self._encoder is None else {"encoder": self._encoder.state_dict()}),
            **self._extra_state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state_dict: The result of `state_dict` of an estimator with the same parameters.

        Raises:
            ValueError: An entry is missing or wrong; the message names it and nothing changed.
        """
        with self._exclusive():
            keys = {"estimator", "learner", "feature_names", "n_iter", *self._EXTRA}
            new = schema.read("state_dict", state_dict, keys, optional={"encoder"})
            with_encoder = "encoder" in state_dict
            new.equal("estimator", type(self).__name__)
            saved = new.mapping("learner")
            fitted = "members" in saved.values  # by `fit`, a committee
            members = saved.items("members").values if fitted else [saved.values]
            engine = within(members[0] if members else None, "engine")
            found = {name: within(engine, name) for name in ("inputs", "outputs")}
            sizes = [Entries("state_dict['learner']['engine']", found).integer(name, 1) for name in found]
            options: dict[str, Any] = {}
            if fitted:  # the loss that `fit` has used depends on the weights of its rows
                loss = within(engine, "network", "settings", "loss") or within(engine, "settings", "loss")
                options["loss"] = loss if loss in ("huber", "squared") else "huber"
            if not with_encoder:
                options["names"] = new["feature_names"] or range(sizes[0])
            learner: Any = self._new_learner(sizes[0], sizes[1], seed=0, for_fit=fitted, **options)
            if fitted:
                learner = Committee([learner])
            learner.load_state_dict(new["learner"], "state_dict['learner']")
            encoder = None
            if with_encoder:
                encoder = FrameEncoder.from_state(new["encoder"], self._means(sizes[1]), new.path("encoder"))
            if encoder is not None and len(encoder.inputs.names) != sizes[0]:
                raise new.damaged("encoder", f"one of {sizes[0]} inputs", len(encoder.inputs.names))
            columns = sizes[0] if encoder is None else len(encoder.kinds)
            loaded: dict[str, Any] = {"_learner": learner, "_encoder": encoder, "n_features_in_": columns}
            if new["feature_names"] is not None:
                names = new.items("feature_names", columns).values
                if not all(isinstance(name, str) for name in names) or (encoder and {*names} != {*encoder.kinds}):
                    raise new.damaged("feature_names", f"the names of {columns} columns", names)
                loaded["feature_names_in_"] = np.array(names, dtype=object)
            elif encoder is not None and list(encoder.kinds) != [f"x{i}" for i in range(columns)]:
                raise new.damaged("feature_names", f"the names of {columns} columns", None)
            if new["n_iter"] is not None:
                loaded["n_iter_"] = new.integer("n_iter", 1)
            loaded |= self._load_extra_state(new, sizes[1])
            self.__dict__ = {name: value for name, value in self.__dict__.items() if not name.endswith("_")} | loaded

    # The learner is pickled as bytes: joblib may map arrays read-only, and a learner writes to its own.
    @locked
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


def check_sizes(target: float) -> None:
    """Raise an error where a target of this size would overflow sums of squares."""
    if target > HUGE:
        raise ValueError(
            f"y must lie within ±{HUGE:g}, got a target of size {target:g}: rescale y, or leave the row out"
        )


@contextmanager
def explained(**given: Any) -> Iterator[None]:
    """Say what to do about missing targets, texts in an array, and integers beyond the largest float, and where."""
    try:
        yield
    except OverflowError:
        for name, values in given.items():
            for place, value in np.ndenumerate(np.asarray(values, object)):
                if isinstance(value, int) and abs(value) > sys.float_info.max:
                    column: Any = place[1:]  # none where the argument has one column
                    where = f"{name}[:, {column[0]}]" if column else name
                    where = f"{name}[{list(values.columns)[column[0]]!r}]" if is_frame(values) else where
                    digits = int(math.log10(abs(value))) + 1
                    raise ValueError(
                        f"{where} must hold numbers up to {sys.float_info.max:.2g}, got an integer of {digits} digits: "
                        "rescale it, or convert an identifier to text"
                    ) from None
        raise
    except (TypeError, ValueError) as error:
        text = str(error).replace("boolean value of NA is ambiguous", "Input y contains NaN, <NA>")
        if text.startswith(("Input y contains", "Input contains NaN")):  # X and sample_weight are named otherwise
            keep = "pandas.notna(y)" if "NaN" in text else "numpy.isfinite(y)"
            raise ValueError(
                f"{text.rstrip('.')}: leave such rows out, as keep = {keep}, X[keep] and y[keep]"
            ) from None
        if text.startswith("could not convert string to float: "):
            value = text.partition(": ")[2].removeprefix("np.str_(").removesuffix(")")
            raise ValueError(
                f"X must hold numbers where it is no DataFrame, got the text {value}: put texts into a DataFrame"
            ) from None
        raise


def within(state: Any, *names: str) -> Any:
    """The entry of nested dicts under these names; None where there is none."""
    for name in names:
        state = state.get(name) if isinstance(state, dict) else None
    return state
