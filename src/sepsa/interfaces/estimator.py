"""The base of scikit-learn's estimators: fit, learning in order, and saved states."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from joblib import cpu_count
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils import check_array, check_random_state, check_X_y
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from sepsa.interfaces.model import Model
from sepsa.interrupt import lock_of, locked
from sepsa.learner.arithmetic.robust import HUGE
from sepsa.learner.columns.frame import FrameEncoder, all_numbers, as_pandas, check_numbers, in_order, is_frame
from sepsa.learner.columns.inputs import CLASS_MEANS
from sepsa.learner.columns.reader import Column
from sepsa.learner.learner import Learner, Names
from sepsa.learner.memory.parts import Floats
from sepsa.learner.options import Options, body_of, of_estimator
from sepsa.learner.rows import dense
from sepsa.learner.scales import order_of_columns
from sepsa.learner.stream_learner import TELL, WARM_UP, NewInput, StreamLearner
from sepsa.learner.table_fit import batch_fit
from sepsa.learner.table_fit.committee import Committee
from sepsa.states.schema import Entries
from sepsa.states.sealed import sealed, unsealed
from sepsa.validation import at_least, beyond_floats

if TYPE_CHECKING:
    from typing import Self

MOST_INPUTS = 2048  # of a compiled network
FEW = 16  # rows
HEAVIEST = 1e30  # weight of a row in `fit`, so that sums of weighted squares stay finite
NUMBERS = {"dtype": np.float64, "order": "C", "ensure_all_finite": "allow-nan"}  # what scikit-learn checks


class StreamEstimator(Model, Options, BaseEstimator):  # type: ignore[misc]
    """The base of the regressor and the classifier: a learner of rows of numbers, and its state."""

    _OWN = ("_learner", "_columns")  # is learned, as what ends with _
    classes_: NDArray[Any]  # of a classifier, and the output of each
    _columns: NDArray[np.intp]

    def _new_body(self, inputs: int, outputs: int, seed: int, for_fit: bool = False, **more: Any) -> StreamLearner:
        """A learner with this estimator's parameters, which are checked, and more options; `for_fit` trains it."""
        if inputs > MOST_INPUTS:
            raise ValueError(
                f"X must have at most {MOST_INPUTS} columns, got {inputs}: the head's state grows as their square; "
                "reduce them first, for example by sklearn.decomposition.TruncatedSVD"
            )
        options = of_estimator(self.get_params(deep=False), for_fit) | more
        return StreamLearner(inputs, outputs, regression=isinstance(self, RegressorMixin), seed=seed, **options)

    # ------------------------------------------------------------------ learning

    @contextmanager
    def _changed(self, anew: bool = False) -> Iterator[Self]:
        """An estimator to change, `anew` one that has learned nothing; without an error it takes this one's place."""
        with nullcontext() if anew else lock_of(self):
            other, own = object.__new__(type(self)), vars(self)
            other.__dict__ = {
                name: own[name] for name in own if not anew or (name not in self._OWN and name[-1] != "_")
            }
            yield other
            with lock_of(self):
                self.__dict__ = other.__dict__ | {"_lock": lock_of(self)}  # one assignment, which nothing interrupts

    def _fit(self, X: Any, Y: Floats, weight: Floats) -> tuple[Floats, Floats, Floats]:
        """Learn from scratch; returns the predictions of rows that one member left out, their targets and weights."""
        X, _ = self._numbers(X, Y, shuffled=True)
        there = np.flatnonzero(weight > 0)
        if not there.size:
            raise ValueError("sample_weight must be positive for at least one sample, got zeros alone")
        if weight.max() > HEAVIEST:
            raise ValueError(
                f"sample_weight must be at most {HEAVIEST:g} for fit, got {weight.max():g}: divide all weights by "
                "their mean"
            )
        X, Y, weight = X[there], Y[there], weight[there]
        names = self._input_names(X.shape[1])
        order = None if names is None else order_of_columns(dense(X[:WARM_UP]), names)
        X = X if order is None else X[:, order]
        layers = of_estimator(self.get_params(deep=False), for_fit=True)["hidden"]
        speed = min(1.0, (64 / (X.shape[1] + sum(layers[-1:]) + 1)) ** 2)  # the curvature costs p², the rest is little
        forgetting = self.forgetting
        if forgetting == "auto":
            forgetting = batch_fit.FORGETTING if layers else 1.0
        # Weights that differ much are no outliers in a table: they say themselves how much each row counts.
        usual = float(np.median(weight))
        even = 0.1 * usual <= weight.min() and weight.max() <= 10 * usual
        regression = isinstance(self, RegressorMixin)
        robust = even and self.loss == "huber" and regression
        if regression:
            sizes = np.abs(Y)
            check_sizes(float(np.median(sizes) if robust else sizes.max()))
            Y = np.clip(Y, -HUGE, HUGE)
        options: dict[str, Any] = {"tells": False} | ({} if even else {"loss": "squared"})
        new_body = partial(self._new_body, X.shape[1], Y.shape[1], for_fit=True, **options)
        job = batch_fit.Job(
            partial(new_body, body="fourier"),
            new_body if body_of(self.body, layers) == "experts" else None,
            batch_fit.Table(X, Y, weight),
            cpu_count(),
            check_random_state(self.random_state),
            passes=at_least("max_iter", self.max_iter, 1),
            rate=batch_fit.RATE if self.learning_rate == "auto" else self.learning_rate,
            forgetting=forgetting,
            batch=None if self.batch_size == "auto" else self.batch_size,
            visits=int(batch_fit.VISITS * speed),
            verbose=bool(self.verbose),
            robust=robust,
        )
        result = batch_fit.fit(job, self.early_stopping, together=not layers)  # then the body does not learn
        committee = result.committee
        for member in committee.members:
            member.order = order
        committee.members[0].tells = True
        committee.members[0].tell(TELL)
        self._learner, self.n_iter_ = self._learner._replace(body=committee), result.passes
        return result.predictions, Y[result.rows], weight[result.rows]

    def _learn(self, X: Any, Y: Floats, weight: Floats, **known: Any) -> Floats:
        """Learn rows in order, after which these `outputs` are known; returns the predictions made before."""
        rows, new_inputs = self._numbers(X, Y)

        def new_body(inputs: int, outputs: int) -> StreamLearner:
            seed = check_random_state(self.random_state).randint(2**31 - 1)
            return self._new_body(inputs, outputs, seed, names=self._input_names(inputs))

        batch = 1 if self.batch_size == "auto" else at_least("batch_size", self.batch_size, 1)
        self._learner, before = self._learner.learn(new_body, rows, Y, weight, new_inputs, batch, **known)
        return before

    def _numbers(self, X: Any, Y: Floats, shuffled: bool = False) -> tuple[Any, Sequence[NewInput]]:
        """Rows of numbers (n, inputs), dense or CSR, and the inputs that they are the first to need."""
        if self._learner.inputs is None:
            return X, ()
        rows, new_inputs, said = self._learner.inputs.learn(X, Y, shuffled)
        for text in said:
            warnings.warn(text, UserWarning, stacklevel=5)
        return rows, new_inputs

    @property
    def _names(self) -> list[Any] | None:
        """The names of the columns, if they have names."""
        names = getattr(self, "feature_names_in_", None)
        return None if names is None else list(names)

    def _input_names(self, inputs: int) -> Sequence[Any] | None:
        """The names of the inputs, by which equal ones are ordered; None where they stay in the order they have."""
        if self._learner.inputs is not None:
            return None  # in the order of their names already
        return self._names or range(inputs)

    def _means(self, outputs: int) -> int:
        """Of how many targets a column of many texts has means."""
        return max(1, min(outputs, CLASS_MEANS)) if isinstance(self, RegressorMixin) else CLASS_MEANS

    def _know(self, outputs: Names, dtype: Any) -> None:
        """Set the sorted classes of a classifier, and the output of each."""
        self.classes_, self._columns = np.unique(np.array([*outputs], dtype), return_index=True)

    # ------------------------------------------------------------------ rows

    def _read(self, X: Any, learn: bool = True, y: Any = None) -> tuple[Any, dict[str, Column] | None]:
        """X with its columns in the order in which they were learned, and the columns by name of one not of numbers."""
        encoder, first, names = self._learner.inputs, self._learner.body is None, self._names
        if is_frame(X) and not first:
            X = in_order(X, names)
        if encoder is None and not (first and is_frame(X) and not all_numbers(X)):
            if is_frame(X):
                check_numbers(X)
            return X, None
        if not is_frame(X):
            columns = ", ".join(repr(str(name)) for name in [*(names or encoder.kinds)][:10])
            raise ValueError(f"X must be a DataFrame with the columns {columns}, as before, got {type(X).__name__}")
        validate_data(self, X, reset=first, skip_check_array=True)
        if encoder is None:
            outputs = sum(np.asarray(y).shape[1:2]) or 1
            encoder = FrameEncoder(self._names, X.shape[1], self._means(outputs))
        elif learn:
            encoder = deepcopy(encoder)
        if learn:
            self._learner = self._learner._replace(inputs=encoder)
        return X, encoder.read(X, first=learn)

    def _is_plain(self, X: Any, *more: Any) -> bool:
        """Whether a few rows are finite arrays like those learned, for which all checks would take longer than them."""
        return (
            all(type(part) is np.ndarray and part.dtype.kind in "biuf" and 0 < len(part) <= FEW for part in (X, *more))
            and X.dtype == np.float64
            and self._learner.body is not None
            and self._learner.inputs is None
            and X.shape[1:] == (self.n_features_in_,)
            and not hasattr(self, "feature_names_in_")
            and all(part.shape == (len(X),) and np.isfinite(part).all() for part in more)
            and not np.isinf(X).any()
        )

    def _check_rows(self, X: Any) -> Any:
        """Rows (n, inputs), dense or CSR, checked."""
        check_is_fitted(self)
        if self._is_plain(X):
            return X
        X = as_pandas(X)
        with explained(X=X):
            X, columns = self._read(X, learn=False)
            if columns is not None:
                return check_array(self._learner.inputs.encode(columns, len(X)), **NUMBERS)
            return validate_data(self, X, reset=False, accept_sparse="csr", **NUMBERS)

    def _check_data(
        self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None, **checks: bool
    ) -> tuple[Any, NDArray[Any], Floats]:
        """Rows (n, inputs), or the columns of a DataFrame, targets and weights (n,), checked."""
        if sample_weight is None and self._is_plain(X, y):
            return X, np.asarray(y), np.ones(len(X))
        X, first = as_pandas(X), self._learner.body is None
        with explained(X=X, y=y, sample_weight=sample_weight):
            X, columns = self._read(X, y=y)
            if columns is None:
                X, targets = validate_data(self, X, y, reset=first, accept_sparse="csr", **NUMBERS, **checks)
            else:
                _, targets = check_X_y(np.zeros(X.shape), y, estimator=self, **NUMBERS, **checks)
            weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        return X if columns is None else columns, targets, weights

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True  # a missing value is replaced by the mean
        tags.input_tags.sparse = True
        return tags

    def __sklearn_is_fitted__(self) -> bool:
        return self._learner.body is not None

    # ------------------------------------------------------------------ saving

    @locked
    def state_dict(self) -> dict[str, Any]:
        """Return the fitted state as nested dicts and lists of arrays, numbers and strings.

        An estimator with the same parameters that loads it continues with the same bits.
        """
        check_is_fitted(self)
        classes = getattr(self, "classes_", None)
        return sealed(
            {
                "estimator": type(self).__name__,
                "learner": self._learner.state_dict(),
                "feature_names": None if self._names is None else list(map(str, self._names)),
                "n_iter": getattr(self, "n_iter_", None),
                "dtype": None if classes is None else classes.dtype.str,
            }
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state_dict: The result of `state_dict` of an estimator with the same parameters.

        Raises:
            ValueError: An entry is missing or wrong; the message names it and nothing changed.
        """
        with self._changed(anew=True) as other:
            keys = {"estimator", "learner", "feature_names", "n_iter", "dtype"}
            new = unsealed("state_dict", state_dict, keys)
            new.equal("estimator", type(self).__name__)
            names = new["feature_names"]

            def new_body(state: Entries) -> Any:
                if "members" not in (saved := state["body"]):
                    return self._new_body(1, 1, seed=0)
                # The loss that `fit` has used depends on the weights of its rows.
                return Committee([self._new_body(1, 1, seed=0, for_fit=True, loss=saved["loss"])])

            def read_inputs(state: Entries) -> FrameEncoder | None:
                if state["inputs"] is None:
                    return None
                count, outputs = len(state["inputs"]["kinds"]), len(state["outputs"])
                return FrameEncoder.from_state(state, names, count, self._means(outputs))

            other._learner = learner = Learner.loaded(new, new_body, read_inputs)
            columns = learner.body.engine.inputs if learner.inputs is None else len(learner.inputs.kinds)
            other.n_features_in_ = columns
            if names is not None:
                other.feature_names_in_ = np.array(names, dtype=object)
            if not isinstance(learner.body, Committee):
                learner.body.names = other._input_names(columns)
            if new["n_iter"] is not None:
                other.n_iter_ = new["n_iter"]
            if new["dtype"] is not None:
                other._know(learner.outputs, new["dtype"])


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
                    raise beyond_floats(f"{name}[:, {column[0]}]" if column else name, value) from None
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
