"""Targets that arrive later: a wrapper that keeps predicted samples by identifier until their targets are learned."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from river import base
from sklearn.base import BaseEstimator

from sepsa.interrupt import DeferredInterrupt, locked, new_lock
from sepsa.states import schema
from sepsa.states.objects import Saves, has_state, rebuilt_as
from sepsa.states.plain import pack_label, packed, unpack_label
from sepsa.states.sealed import sealed, unsealed
from sepsa.validation import at_least


@rebuilt_as("sepsa.river.Delayed")
class Delayed(Saves, base.Wrapper, base.Estimator, BaseEstimator):  # type: ignore[misc, type-arg]
    """A model whose targets arrive later: what is predicted with an `id` waits until its target is learned.

    Choose it where the answer to a prediction comes after other predictions, perhaps after a restart. Learned in the
    same order, late targets give the same bits as immediate ones. It wraps a model of River, a pipeline, or a
    `KeyedLearner`, whose key comes before the sample: `predict_one(key, x, id=...)`. As the `start` of a `KeyedLearner`
    it keeps the samples of each key: `learners[key].learn_one(y=..., id=...)`. What else a model has, such as
    `learn_many`, is called on `model`.

    `save` and `state_dict` hold the model and its open samples; around a `KeyedLearner`, whose learners are in a file,
    `state_dict` holds the samples alone: write both by `learners.commit(position=delayed.state_dict())`.

    Args:
        model: The model.
        max_open_ids: The number of samples that wait for their targets; beyond it the oldest is dropped.

    Attributes:
        dropped_ids_: Number of samples that were dropped before their targets came.

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
        self.model, self.max_open_ids, self.dropped_ids_ = model, at_least("max_open_ids", max_open_ids, 1), 0
        self._open: dict[str, str] = {}  # keys, names and values of samples by identifier, as `packed` writes them
        self._lock = new_lock()

    @property
    def open_ids_(self) -> int:
        """Number of samples that were predicted with an `id` and wait for their targets."""
        return len(self._open)

    def predict_one(self, *sample: Any, id: Hashable = None, **options: Any) -> Any:
        """Predict one sample.

        Args:
            *sample: Features by name; for a `KeyedLearner` the key before them.
            id: A label, to learn the target later by `learn_one(y=..., id=...)`; the sample is kept until then.
            **options: What else the model's `predict_one` takes.

        Returns:
            What the model predicts.
        """
        return self._predict("predict_one", sample, id, options)

    def predict_proba_one(self, *sample: Any, id: Hashable = None, **options: Any) -> Any:
        """Predict the probability of each class for one sample.

        Args:
            *sample: As for `predict_one`.
            id: As for `predict_one`.
            **options: What else the model's `predict_proba_one` takes.

        Returns:
            What the model predicts.
        """
        return self._predict("predict_proba_one", sample, id, options)

    def _predict(self, method: str, sample: tuple[Any, ...], id: Hashable, options: dict[str, Any]) -> Any:
        predict = getattr(self.model, method)
        if id is None:
            return predict(*sample, **options)
        if not sample or not isinstance(sample[-1], Mapping):
            raise TypeError(f"x must be a dict of features, given by position, got {sample}")
        name, line = packed(id), line_of(sample)
        with self._lock, DeferredInterrupt():
            if self._open.get(name, line) != line:
                raise ValueError(f"id {id!r} is open for another sample: learn its target first, or give another id")
            answer = predict(*sample, **options)
            self._open[name] = line
            while len(self._open) > self.max_open_ids:
                del self._open[next(iter(self._open))]
                self.dropped_ids_ += 1
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
        name = packed(id)
        with self._lock, DeferredInterrupt():
            if name not in self._open:
                raise ValueError(
                    f"id {id!r} is not open: no sample was predicted with it, its target was learned already, or it "
                    f"was among the {self.dropped_ids_} that were dropped for later ones (max_open_ids); give x"
                )
            self.model.learn_one(*read_sample(self._open[name]), **options)
            del self._open[name]

    # ------------------------------------------------------------------ copies and states

    @property
    def _wrapped_model(self) -> Any:
        return self.model

    def __sklearn_clone__(self) -> Delayed:
        return self.clone()

    @locked
    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_open": dict(self._open)}

    clone = locked(base.Estimator.clone)

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state and the open samples as nested dicts and lists of arrays, numbers and strings."""
        with self._lock:
            model = self.model.state_dict() if has_state(self.model) else None
            waiting = np.frombuffer(json.dumps(self._open).encode(), np.uint8)
            return sealed({"model": model, "open": waiting, "dropped": self.dropped_ids_})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state_dict: The result of `state_dict` of a wrapper of a model with the same parameters.

        Raises:
            ValueError: An entry is missing or wrong; the message names it and nothing changed.
        """
        new = unsealed("state_dict", state_dict, {"model", "open", "dropped"})
        if (new["model"] is None) == has_state(self.model):
            raise new.damaged("model", "the state of the model that is wrapped", schema.kind_of(new["model"]))
        with self._lock:
            if new["model"] is not None:
                self.model.load_state_dict(new["model"])
            self._open, self.dropped_ids_ = json.loads(new["open"].tobytes()), new["dropped"]


def line_of(sample: Sequence[Any]) -> str:
    """The keys of a sample, and its features by name, as a line of text."""
    *keys, x = sample
    values = (None if type(value).__name__ in ("NAType", "NaTType") else value for value in x.values())  # of pandas
    return json.dumps(pack_label((*keys, tuple(x), tuple(values))))


def read_sample(line: str) -> list[Any]:
    """The sample of which `line_of` made this."""
    *keys, names, values = unpack_label(json.loads(line))
    return [*keys, dict(zip(names, values, strict=True))]
