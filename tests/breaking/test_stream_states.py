"""Damaged states of the stream learners: each is refused whole, or changes no later number."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest

import river_models as river
import sepsa
from breaking.damage import damages, same, several
from breaking.test_states import judge, report
from sepsa.stream.columns.cells import Column
from sepsa.stream.tables.cells import RowBlock
from sepsa.stream.tables.model import TableModel


def rows(n, seed):
    X = np.random.default_rng(seed).normal(size=(n, 3))
    return X, X @ np.array([1.0, -2.0, 3.0])


class Estimator:
    """scikit-learn's faces, small ones; `many` brings them past their first rows."""

    def __init__(self, make, many):
        self.model, self.size = make(), 60 if many else 7

    def learn(self, count, first=0):
        for i in range(count):
            X, y = rows(self.size, 10 * first + i)
            self.model.partial_fit(X, np.where(y > 0, "up", "down") if hasattr(self.model, "predict_proba") else y)

    def state(self):
        return copy.deepcopy(self.model.state_dict())

    def load(self, state):
        self.model.load_state_dict(state)

    def weights(self):
        X = rows(5, 99)[0]
        out = {"mean": np.asarray(self.model.predict(X))}
        if hasattr(self.model, "predict_proba"):
            return out | {"proba": self.model.predict_proba(X)}
        return out | {"std": self.model.predict(X, return_std=True)[1]}

    def set_weights(self, weights):
        """Nothing is beside the state."""


class Face(Estimator):
    def learn(self, count, first=0):
        for i in range(count):
            X, y = rows(self.size, 10 * first + i)
            for x, target in zip(X.tolist(), y.tolist(), strict=True):
                label = "up" if target > 0 else "down"
                self.model.learn_one(
                    dict(zip("abc", x, strict=True)), label if isinstance(self.model, river.SepSAClassifier) else target
                )

    def weights(self):
        samples = [dict(zip("abc", x, strict=True)) for x in rows(5, 99)[0].tolist()]
        if isinstance(self.model, river.SepSAClassifier):
            model = copy.deepcopy(self.model)  # asked for probabilities it takes in the rows that wait
            return {"proba": [model.predict_proba_one(x) for x in samples]}
        return {"mean": [self.model.predict_one(x) for x in samples]}


class Table(Estimator):
    def block(self, seed):
        X, y = rows(self.size, seed)
        codes = (X[:, 1] > 0).astype(np.int32)
        columns = {"a": Column(X[:, 0]), "b": Column(X[:, 1] * np.nan, codes, ["no", "yes"]), "y": Column(y)}
        return RowBlock(columns, np.arange(1, self.size + 1), lambda i: "", [], {})

    def learn(self, count, first=0):
        for i in range(count):
            self.model.learn(self.block(10 * first + i))

    def weights(self):
        return {"mean": self.model.predict(self.block(99)).predictions, "error": self.model.trace.mean}


# After these the state is another lawful one: any name may be a feature's or a class's, any number of rows may wait.
LAWFUL = re.compile(
    r".*\['(features|outputs|names|labels|warned|feature_names)'\]\[\d+\]: (a string|no string|None)"
    r"|.*\['uncalibrated'\]: (truncated|empty|an item too many)"
)


def damages_of_a_stream(state):
    return ((what, damaged) for what, damaged in damages(state) if not LAWFUL.fullmatch(what))


def several_of_a_stream(state):
    for what, damaged in several(state, 200, seed=8):
        if not all(LAWFUL.fullmatch(part) for part in what.split(" and ")):
            yield what, damaged


MODELS = {
    "SepSARegressor": lambda many: Estimator(lambda: sepsa.SepSARegressor((3,), random_state=0), many),
    "SepSAClassifier": lambda many: Estimator(
        lambda: sepsa.SepSAClassifier((3,), random_state=0, forgetting=0.99), many
    ),
    "river.SepSARegressor": lambda many: Face(lambda: river.SepSARegressor((3,), seed=0), many),
    "river.SepSAClassifier": lambda many: Face(lambda: river.SepSAClassifier((3,), seed=0), many),
    "experts": lambda many: Estimator(lambda: sepsa.SepSARegressor((3,), random_state=0, body="experts"), many),
    "sepsa stream": lambda many: Table(lambda: TableModel("y"), many),
}


@pytest.mark.parametrize("many", [False, True], ids=["first rows", "later"])
@pytest.mark.parametrize("name", MODELS)
def test_damaged_states_of_a_stream_learner_are_refused_whole(name, many, tally):
    count, harm = judge(lambda: MODELS[name](many), damages_of_a_stream)
    tally("damaged stream states", count, len(harm))
    assert count > 100
    assert not harm, report(harm)


@pytest.mark.parametrize("members", ["the first", pytest.param("all", marks=pytest.mark.long)])
def test_damaged_states_of_a_fitted_estimator_are_refused_whole(members, tally):
    fitted = sepsa.SepSARegressor((3,), max_iter=2, random_state=0).fit(*rows(30, 5))
    wanted = re.compile("" if members == "all" else r"(?!.*\['members'\]\[[12]\])")
    count, harm = judge(
        lambda: Estimator(lambda: copy.deepcopy(fitted), many=False),
        lambda state: ((what, damaged) for what, damaged in damages_of_a_stream(state) if wanted.match(what)),
    )
    tally("damaged stream states", count, len(harm))
    assert count > 100
    assert not harm, report(harm)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_stream_states_damaged_in_several_places_are_refused_whole(name, tally):
    count, harm = judge(lambda: MODELS[name](True), several_of_a_stream)
    tally("stream states damaged in several places", count, len(harm))
    assert not harm, report(harm)


@pytest.mark.parametrize("name", MODELS)
def test_an_undamaged_state_is_taken(name):
    trained, other = MODELS[name](True), MODELS[name](True)
    trained.learn(3)
    other.load(trained.state())
    assert same(other.state(), trained.state())
