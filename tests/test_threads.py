"""A model that learns in one thread answers in others: each answer is of one state, also in a process that forks."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import river_models
from sepsa import SepSAClassifier, SepSAForecaster, SepSARegressor

ROWS = 600
X = np.random.default_rng(0).normal(size=(ROWS, 4)).round(3)
Y = X[:, 0] * X[:, 1] + X[:, 2]
NAMED = [dict(zip("abcd", row, strict=True)) for row in X.tolist()]
ASKED = {"a": 0.3, "b": -0.2, "c": 0.5, "d": 0.1}
ARRAY = np.array([list(ASKED.values())])


def label(i: int) -> str:
    """A class, of which there are more and more."""
    return f"class {i % (1 + i // 100)}"


def river(kind: str, target: Callable[[int], Any], *asks: Callable[[Any], Any]) -> Any:
    make = lambda: getattr(river_models, kind)(seed=0)  # noqa: E731
    return make, lambda model, i: model.learn_one(NAMED[i], target(i)), asks


def estimator(kind: Any, target: Callable[[int], Any], *asks: Callable[[Any], Any]) -> Any:
    make = lambda: kind(random_state=0)  # noqa: E731
    return make, lambda model, i: model.partial_fit(X[i : i + 1], [target(i)]), asks


# A new model, how it learns row i, and what is asked of it.
FACES: dict[str, Any] = {
    "River, a number": river("SepSARegressor", lambda i: Y[i], lambda model: model.predict_one(ASKED)),
    "River, a distribution": river(
        "SepSARegressor", lambda i: Y[i], lambda model: repr(model.predict_one(ASKED, with_dist=True))
    ),
    "River, several numbers": river(
        "SepSAMultiTargetRegressor", lambda i: {"u": Y[i], "v": -Y[i]}, lambda model: repr(model.predict_one(ASKED))
    ),
    "River, new classes": river(
        "SepSAClassifier",
        label,
        lambda model: repr(model.predict_proba_one(ASKED)),
        lambda model: model.predict_one(ASKED),
    ),
    "River, a pickle": river(
        "SepSARegressor", lambda i: Y[i], lambda model: pickle.loads(pickle.dumps(model)).predict_one(ASKED)
    ),
    "scikit-learn, mean and deviation": estimator(
        SepSARegressor, lambda i: Y[i], lambda model: np.array(model.predict(ARRAY, return_std=True)).tobytes()
    ),
    "scikit-learn, a copy": estimator(
        SepSARegressor, lambda i: Y[i], lambda model: copy.deepcopy(model).predict(ARRAY).tobytes()
    ),
    "scikit-learn, new classes": estimator(
        SepSAClassifier,
        label,
        lambda model: model.predict_proba(ARRAY).tobytes(),
        lambda model: model.predict(ARRAY)[0],
    ),
    "forecaster": (
        lambda: SepSAForecaster(3, lags=4, seasons=[6]),
        lambda model, i: model.learn_one(Y[i], time=3600.0 * i),
        [lambda model: model.predict().tobytes(), lambda model: repr(model.intervals(coverage=0.5))],
    ),
}


@pytest.fixture(params=FACES)
def face(request: Any) -> Iterator[Any]:
    """A model that has learned some rows, how it goes on, what is asked, and all answers before and after each row."""
    make, learn, asks = FACES[request.param]
    model = make()
    for i in range(ROWS // 2):
        learn(model, i)
    twin = pickle.loads(pickle.dumps(model))
    answers = [{ask(twin)} for ask in asks]
    for i in range(ROWS // 2, ROWS):
        learn(twin, i)
        for ask, known in zip(asks, answers, strict=True):
            known.add(ask(twin))
    return model, learn, asks, answers


def learner(model: Any, learn: Callable[[Any, int], None]) -> threading.Thread:
    """A thread that learns the other rows."""

    def work() -> None:
        for i in range(ROWS // 2, ROWS):
            learn(model, i)

    return threading.Thread(target=work)


def test_an_answer_is_of_one_state(face):
    model, learn, asks, answers = face
    thread = learner(model, learn)
    given: list[set[Any]] = [set() for _ in asks]
    thread.start()
    while thread.is_alive():
        for ask, known in zip(asks, given, strict=True):
            known.add(ask(model))
    thread.join()
    for known, told in zip(answers, given, strict=True):
        assert told <= known


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_process_that_forks_beside_a_thread_answers_and_learns(face):
    model, learn, asks, answers = face
    thread = learner(model, learn)
    thread.start()
    ends = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: the process has threads
        while thread.is_alive() and len(ends) < 10:
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(20)
                whole = all(ask(model) in known for ask, known in zip(asks, answers, strict=True))
                learn(model, ROWS - 1)
                os._exit(0 if whole else 1)
            ends.append(os.waitpid(child, 0)[1])
            time.sleep(0.001)
    thread.join()
    assert ends
    assert not any(ends)
