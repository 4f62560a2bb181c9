"""Targets that arrive later: a wrapper that keeps predicted samples by identifier until their targets are learned.

A sample is kept as a line of JSON: the keys before it, the names of its values, the values, and of a frame's row the
dtypes of its columns.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from datetime import date, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.base import clone as new_estimator

from sepsa.interrupt import DeferredInterrupt
from sepsa.states import schema
from sepsa.states.objects import Saves, check_stamp, fitted, has_state, rebuilt_as, stamp
from sepsa.states.plain import pack_label, packed, plain, unpack_label
from sepsa.stream.columns.frame import as_pandas, is_frame
from sepsa.stream.columns.reader import read_value
from sepsa.stream.rows import dense
from sepsa.validation import at_least

if TYPE_CHECKING:
    from typing import Self

READERS: dict[str, Any] = {
    "date": date.fromisoformat,
    "datetime": datetime.fromisoformat,
    "timedelta": lambda seconds: timedelta(seconds=seconds),
}
WRONG = (ValueError, TypeError, LookupError, AttributeError, RecursionError)  # what a damaged line raises


@rebuilt_as("sepsa.Delayed")
class Delayed(Saves, BaseEstimator):  # type: ignore[misc]
    """A model whose targets arrive later: what is predicted with an identifier waits until its target is learned.

    Choose it where the answer to a prediction comes after other predictions, perhaps after a restart. Learned in the
    same order, late targets give the same bits as immediate ones. Without identifiers, and in all methods that are not
    described here, it is the model itself. It wraps a model of River or a pipeline that ends with one, an estimator
    with `partial_fit`, and a `KeyedLearner`, whose keys come before the sample: `predict_one(key, x, id=...)`. As the
    `start` of a `KeyedLearner` it keeps the samples of each key: `learners[key].learn_one(y=..., id=...)`.

    `save` and `state_dict` hold the model and its open samples; around a `KeyedLearner`, whose learners are in its
    file, `state_dict` holds the open samples alone: write them by `learners.commit(position=delayed.state_dict())`.

    Args:
        model: The model.
        max_open_ids: The number of samples that wait for their targets; beyond it the oldest is dropped.

    Examples:
        >>> from sepsa.river import Delayed, SepSARegressor
        >>> model = Delayed(SepSARegressor(seed=0))
        >>> for order in range(100):
        ...     _ = model.predict_one({"weight": order % 5}, id=f"order {order}")
        ...     model.learn_one(y=2.0 * (order % 5), id=f"order {order}")
        >>> round(model.predict_one({"weight": 3}, id="order 100"))
        6
        >>> model.open_ids_
        1
    """

    def __init__(self, model: Any, max_open_ids: int = 100_000) -> None:
        at_least("max_open_ids", max_open_ids, 1)
        self.model, self.max_open_ids = model, max_open_ids
        self._open: dict[str, str] = {}  # samples by identifier, in the order in which they were added
        self._dropped = 0
        self._lock = threading.RLock()

    @property
    def open_ids_(self) -> int:
        """Number of samples that were predicted with an identifier and wait for their targets."""
        return len(self._open)

    @property
    def dropped_ids_(self) -> int:
        """Number of samples that were dropped before their targets, since `max_open_ids` later ones came."""
        return self._dropped

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "model" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.model, name)

    # ------------------------------------------------------------------ one sample, as River

    def predict_one(self, *sample: Any, id: Hashable = None, **options: Any) -> Any:
        """Predict one sample.

        Args:
            *sample: Features by name; for a `KeyedLearner` the key before them.
            id: A label, to learn the target later by `learn_one(y=..., id=...)`; the sample is kept until then.
            **options: What else the model's `predict_one` takes.

        Returns:
            What the model predicts.
        """
        return self._predict_one("predict_one", sample, id, options)

    def predict_proba_one(self, *sample: Any, id: Hashable = None, **options: Any) -> Any:
        """Predict the probability of each class for one sample.

        Args:
            *sample: As for `predict_one`.
            id: As for `predict_one`.
            **options: What else the model's `predict_proba_one` takes.

        Returns:
            What the model predicts.
        """
        return self._predict_one("predict_proba_one", sample, id, options)

    def _predict_one(self, method: str, sample: tuple[Any, ...], id: Hashable, options: dict[str, Any]) -> Any:
        if id is None:
            return getattr(self.model, method)(*sample, **options)
        *keys, x = sample or (None,)
        if not isinstance(x, Mapping):
            raise TypeError(f"x must be a dict of features, given by position, got {type(x).__name__}")
        with self._lock, DeferredInterrupt():
            new = self._checked([id], [line_of(keys, list(x), list(x.values()))])
            answer = getattr(self.model, method)(*sample, **options)
            self._add(new)
        return answer

    def learn_one(self, *sample: Any, id: Hashable = None, **options: Any) -> None:
        """Learn one sample, or the target of a sample that was predicted before with an `id`.

        Args:
            *sample: What the model's `learn_one` takes, without an `id`.
            id: Instead of the sample, the `id` with which it was predicted.
            **options: What else the model's `learn_one` takes: `y`, and the weight `w`; 0 learns nothing, and ends
                the wait.

        Raises:
            ValueError: A value is wrong, or `id` is not open; nothing changed.
        """
        if id is None:
            self.model.learn_one(*sample, **options)
            return
        if sample or "x" in options:
            raise ValueError(
                f"x must be left out where id is given, since the sample predicted as {id!r} is learned: give y by name"
            )
        with self._lock, DeferredInterrupt():
            keys, names, values, _ = self._sample(id)
            self.model.learn_one(*keys, dict(zip(names, values, strict=True)), **options)
            del self._open[packed(id)]

    # ------------------------------------------------------------------ rows, as scikit-learn

    def fit(self, X: Any, y: Any, **options: Any) -> Self:
        """Let the estimator forget everything and learn the rows; what waits for its target goes on waiting.

        Args:
            X: Inputs (n, features).
            y: Targets.
            **options: What else the estimator's `fit` takes.

        Returns:
            This wrapper.
        """
        self.model.fit(X, y, **options)
        return self

    def predict(self, X: Any, *, ids: Iterable[Hashable] | None = None, **options: Any) -> Any:
        """Predict rows.

        Args:
            X: Inputs (n, features).
            ids: A label for each row, to learn its target later by `partial_fit(y=..., ids=...)`.
            **options: What else the estimator's `predict` takes.

        Returns:
            What the estimator predicts.
        """
        return self._predict("predict", X, ids, options)

    def predict_proba(self, X: Any, *, ids: Iterable[Hashable] | None = None, **options: Any) -> Any:
        """Predict the probability of each class for rows.

        Args:
            X: As for `predict`.
            ids: As for `predict`.
            **options: What else the estimator's `predict_proba` takes.

        Returns:
            What the estimator predicts.
        """
        return self._predict("predict_proba", X, ids, options)

    def _predict(self, method: str, X: Any, ids: Iterable[Hashable] | None, options: dict[str, Any]) -> Any:
        if ids is None:
            return getattr(self.model, method)(X, **options)
        ids, lines = list(ids), lines_of(X)
        if len(ids) != len(lines):
            raise ValueError(f"ids must have one label for each of the {len(lines)} rows of X, got {len(ids)}")
        with self._lock, DeferredInterrupt():
            new = self._checked(ids, lines)
            answer = getattr(self.model, method)(X, **options)
            self._add(new)
        return answer

    def partial_fit(
        self, X: Any = None, y: Any = None, *, ids: Iterable[Hashable] | None = None, **options: Any
    ) -> Self:
        """Learn rows, or the targets of rows that were predicted before with `ids`.

        Args:
            X: Inputs (n, features), without `ids`.
            y: Targets, in the order of the rows or of `ids`.
            ids: Instead of `X`, the labels with which the rows were predicted.
            **options: What else the estimator's `partial_fit` takes.

        Returns:
            This wrapper.

        Raises:
            ValueError: A value is wrong, or a label is not open; nothing changed.
        """
        if ids is None:
            self.model.partial_fit(X, y, **options)
            return self
        if X is not None:
            raise ValueError("X must be left out where ids are given, since the rows predicted with them are learned")
        ids = list(ids)
        keys = {packed(id): id for id in ids}
        if len(keys) < len(ids):
            raise ValueError("ids must be distinct, got one of them twice")
        with self._lock, DeferredInterrupt():
            self.model.partial_fit(rows_of([self._sample(id) for id in ids]), y, **options)
            for key in keys:
                del self._open[key]
        return self

    # ------------------------------------------------------------------ what waits

    def _checked(self, ids: Sequence[Hashable], lines: Sequence[str]) -> dict[str, str]:
        """Samples by identifier that may be added: those that are open already are the same."""
        new: dict[str, str] = {}
        for id, line in zip(ids, lines, strict=True):
            key = packed(id)
            if id is None or id != id:
                raise ValueError(f"id must name a sample, got {id!r}: leave it out where there is none")
            if self._open.get(key, new.setdefault(key, line)) != line or new[key] != line:
                raise ValueError(f"id {id!r} is open for another sample: learn its target first, or give another id")
        return new

    def _add(self, new: dict[str, str]) -> None:
        """Keep samples; beyond `max_open_ids` the oldest are dropped."""
        self._open |= new
        oldest = list(islice(self._open, max(0, len(self._open) - self.max_open_ids)))
        for key in oldest:
            del self._open[key]
        self._dropped += len(oldest)

    def _sample(self, id: Hashable) -> tuple[list[Any], Any, list[Any], Any]:
        """Keys, names, values and dtypes of an open sample."""
        line = self._open.get(packed(id))
        if line is None:
            raise ValueError(
                f"id {id!r} is not open: no sample was predicted with it, its target was learned already, or it was "
                f"among the {self._dropped} that were dropped for later ones (max_open_ids); give the sample itself"
            )
        return read_line(line)

    # ------------------------------------------------------------------ copies and states

    def clone(self, new_params: dict[str, Any] | None = None, include_attributes: bool = False) -> Self:
        """Return a wrapper with the same parameters that has learned nothing, as River's models do.

        Args:
            new_params: Parameters that differ, those of the model under "model".
            include_attributes: Whether to copy what was learned too.
        """
        if include_attributes:
            return copy.deepcopy(self)
        new = new_params or {}
        model = self.model.clone(new.get("model")) if hasattr(self.model, "clone") else new_estimator(self.model)
        return type(self)(model, new.get("max_open_ids", self.max_open_ids))

    def __sklearn_clone__(self) -> Self:
        return self.clone()

    def __sklearn_tags__(self) -> Any:
        return (self.model if isinstance(self.model, BaseEstimator) else BaseEstimator()).__sklearn_tags__()

    def _get_params(self) -> dict[str, Any]:
        return {"model": self.model, "max_open_ids": self.max_open_ids}

    _supervised = True  # a pipeline of River asks its last step

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            own = {name: value for name, value in vars(self).items() if name != "_lock"}
            return stamp(own | {"_open": dict(self._open)})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = check_stamp(state) | {"_lock": threading.RLock()}

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state and the open samples as nested dicts and lists of arrays, numbers and strings."""
        with self._lock:
            return {
                "model": self.model.state_dict() if has_state(self.model) and fitted(self.model) else None,
                "ids": as_bytes(self._open),
                "samples": as_bytes(self._open.values()),
                "dropped": self._dropped,
            }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state_dict: The result of `state_dict` of a wrapper of a model with the same parameters.

        Raises:
            ValueError: An entry is missing or wrong; the message names it and nothing changed.
        """
        new = schema.read("state_dict", state_dict, {"model", "ids", "samples", "dropped"})
        ids = read_lines(new, "ids", lambda line: packed(unpack_label("id", json.loads(line))))
        samples = read_lines(new, "samples", lambda line: line_of(*read_line(line)))
        dropped = new.integer("dropped")
        if len(ids) != len(samples) or len({*ids}) < len(ids):
            raise new.damaged("ids", f"{len(samples)} distinct identifiers", f"{len({*ids})} of {len(ids)}")
        saved, stateful = new["model"] is not None, has_state(self.model)
        if saved != stateful and (saved or not hasattr(self.model, "__sklearn_is_fitted__")):
            raise new.damaged("model", "a state" if stateful else "None here", schema.kind_of(new["model"]))
        with self._lock:
            if saved:
                self.model.load_state_dict(new["model"])
            elif stateful:  # an estimator that had learned nothing
                self.model = new_estimator(self.model)
            self._open, self._dropped = dict(zip(ids, samples, strict=True)), dropped


def line_of(keys: Sequence[Any], names: Sequence[Any] | None, values: Sequence[Any], dtypes: Any = None) -> str:
    """A sample as a line of JSON, whose values have names unless they are a row of an array."""
    packed_names = None if names is None else [pack_label(name) for name in names]
    found = range(len(values)) if names is None else names
    packed_values = [pack_value(name, value) for name, value in zip(found, values, strict=True)]
    return json.dumps([[pack_label(plain(key)) for key in keys], packed_names, packed_values, dtypes])


def read_line(line: str) -> tuple[list[Any], Any, list[Any], Any]:
    """The arguments of `line_of`."""
    keys, names, values, dtypes = json.loads(line)
    names = None if names is None else [unpack_label("a name", name) for name in names]
    return [unpack_label("a key", key) for key in keys], names, [*map(unpack_value, values)], dtypes


def pack_value(name: Hashable, value: Any) -> Any:
    """A number, text, date, duration or missing value for JSON; other numbers become floats."""
    if isinstance(value, np.datetime64):
        value = value.astype("datetime64[us]")
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, timedelta):
        return {"timedelta": value.total_seconds()} if value == value else None
    if isinstance(value, date):
        kind = "datetime" if isinstance(value, datetime) else "date"
        return {kind: value.isoformat()} if value == value else None  # else not a time
    try:
        kind, number = read_value(value)
    except TypeError:
        raise ValueError(
            f"x[{name!r}] must be a number, a text or a date to wait for its target, got {type(value).__name__}"
        ) from None
    return None if kind == "missing" else number


def unpack_value(value: Any) -> Any:
    """The value that `pack_value` was given."""
    if not isinstance(value, dict):
        return value
    ((kind, text),) = value.items()
    return READERS[kind](text)


def lines_of(X: Any) -> list[str]:
    """The rows of an array, a sparse matrix or a frame as lines of JSON."""
    X = as_pandas(X)
    if is_frame(X):
        dtypes = [str(dtype) for dtype in X.dtypes]
        return [line_of((), list(X.columns), row, dtypes) for row in X.itertuples(index=False, name=None)]
    X = dense(X) if hasattr(X, "toarray") else np.asarray(X)
    if X.ndim != 2:
        raise ValueError(f"X must have rows of inputs, (n, features), got shape {X.shape}")
    return [line_of((), None, row) for row in X.tolist()]


def rows_of(samples: Sequence[tuple[Any, Any, list[Any], Any]]) -> Any:
    """The rows of which `lines_of` made samples, as one array or frame."""
    forms = {json.dumps([names, dtypes], default=repr): (names, dtypes) for _, names, _, dtypes in samples}
    if len(forms) != 1:
        raise ValueError(
            f"ids must name rows of one kind of table, got {len(forms)}: learn those of different columns or dtypes in "
            "calls of their own"
        )
    (names, dtypes), rows = forms.popitem()[1], [values for _, _, values, _ in samples]
    if names is None:
        return np.array(rows)
    import pandas as pd

    return pd.DataFrame(rows, columns=names, dtype=object).astype(dict(zip(names, dtypes, strict=True)))


def as_bytes(lines: Iterable[str]) -> NDArray[np.uint8]:
    """Lines of text as an array; there may be too many of them for the header of a file."""
    return np.frombuffer("\n".join(lines).encode(), np.uint8).copy()


def read_lines(state: schema.Entries, key: str, again: Any) -> list[str]:
    """The lines that `as_bytes` was given, each of which `again` reads and writes as it was."""
    try:
        lines = state.array(key, (None,), np.uint8).tobytes().decode().split("\n")
        lines = [] if lines == [""] else lines
        if all(again(line) == line for line in lines):
            return lines
    except WRONG:
        pass
    raise state.damaged(key, "lines as `state_dict` writes them", schema.brief(state[key]))
