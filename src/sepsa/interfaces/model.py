"""What the models of scikit-learn's and River's interfaces share: a lock, pickles, and what is told of the learner."""

from __future__ import annotations

import pickle
from typing import Any

from sepsa.interrupt import locked
from sepsa.learner.learner import Learner
from sepsa.states.objects import Saves, check_stamp, stamp


class Model(Saves):
    """A model of rows: one thread at a time learns, asks or copies it."""

    _learner = Learner()

    @property
    def outliers_(self) -> int:
        """Number of rows whose target, input or weight was implausible and was bounded by `loss="huber"`."""
        return 0 if self._learner.body is None else int(self._learner.body.engine.outliers)

    @property
    @locked
    def chosen_(self) -> dict[str, Any]:
        """The head with the largest weight; empty before the first row.

        A dict of its `features`, `ridge`, `forgetting`, the row `since` which it leads, and the `weights` of all heads.
        """
        return {} if self._learner.body is None else dict(self._learner.body.engine.chosen)

    # The learner is pickled as bytes: it may learn on meanwhile, and joblib may map arrays that it writes to read-only.
    @locked
    def __getstate__(self) -> dict[str, Any]:
        return stamp(vars(self) | {"_learner": pickle.dumps(self._learner)})

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = check_stamp(state)
        vars(self).update(state, _learner=pickle.loads(state["_learner"]))
