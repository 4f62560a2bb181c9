"""Hundreds of damaged states: each is refused with nothing changed, or changes no later number."""

from __future__ import annotations

import contextlib
import copy
import importlib
import re
import sys
import warnings

import numpy as np
import pytest
import torch

import river_models
import sepsa
from breaking.damage import damages, same
from heads.test_properties import SOLVERS
from learners import FOURIER, Estimator, Forecaster, Head, Kind, River, Training, frame, texts
from sepsa import RLS, SoftmaxNewton
from sepsa.learner.columns.reader import Column
from sepsa.shell.cells import RowBlock
from sepsa.shell.model import TableModel
from sepsa.states.sealed import sealed
from sepsa.testing import Case

NAMED = re.compile(r"state_dict(\[| must be a dict| has other entries)")
CHECKPOINT = "torch.distributed.checkpoint.state_dict"


class Table(Kind):
    """The model of `sepsa stream`, without its command."""

    def make(self):
        return TableModel("y", body="fourier")

    def block(self, start, stop):
        a, b, y = np.random.default_rng(start).normal(size=(3, stop - start))
        texts = Column(b * np.nan, (b > 0).astype(np.int32), ["no", "yes"])
        columns = {"a": Column(a), "b": texts, "y": Column(y + a)}
        return RowBlock(columns, np.arange(1, len(a) + 1), lambda i: "", [], {})

    def learn(self, model, start, stop):
        model.learn(self.block(start, stop))

    def predict(self, model):
        return model.predict(self.block(1990, 1995)).predictions, model.trace.mean


class Waiting(River):
    """A model whose targets come three rows later, by their identifiers."""

    def learn(self, model, start, stop):
        targets = []
        for i, (x, y) in enumerate(self.samples(start, stop), start):
            targets.append(y)
            model.predict_one(x, id=i)
            if len(targets) > 3:
                model.learn_one(y=targets[-4], id=i - 3)


TARGETS = {"regression": "numbers", "classification": "labels", "labels": "yes or no"}
FURTHER = {
    "RLS, bias_ridge": Case(lambda: RLS(bias_ridge=0.5)),
    "SoftmaxNewton, forgetting 0.9": Case(lambda: SoftmaxNewton(forgetting=0.9), "classification"),
}
HEADS = {name: Head(case.make, TARGETS[case.task], torch.float64) for name, case in (SOLVERS | FURTHER).items()}
TRAININGS = {
    "Adam": Training(solver=RLS),
    "SGD": Training({"momentum": 0.9}, RLS, base=torch.optim.SGD),
}
STREAMS = {
    "SepSARegressor": Estimator(sepsa.SepSARegressor, FOURIER),
    "SepSAClassifier": Estimator(sepsa.SepSAClassifier, FOURIER | {"forgetting": 0.99}),
    "river.SepSARegressor": River("SepSARegressor", {"hidden": (3,), "body": "fourier"}),
    "river.SepSAClassifier": River("SepSAClassifier", {"hidden": (3,), "body": "fourier"}),
    "river.Delayed": Waiting("SepSARegressor", {"hidden": (3,), "body": "fourier"}, open_ids=3),
    "experts": Estimator(sepsa.SepSARegressor, {"hidden_layer_sizes": (3,)}),
    "a frame": Estimator(sepsa.SepSARegressor, {"hidden_layer_sizes": (), "body": "fourier"}, table=frame),
    "many texts": Estimator(sepsa.SepSARegressor, {"hidden_layer_sizes": (), "body": "fourier"}, table=texts),
    "sepsa stream": Table(),
}
# After these a state is another valid one: a parameter without a gradient has no moments yet, any plain value may be
# the name of a feature or class, and a value of the first rows may be missing.
NAME = r"(a string|no string|None|NaN|-?Inf|a fraction|a flag|huge|empty|truncated|an item too many)"
LAWFUL = re.compile(
    r"\['state'\](\[\d\])?: empty|\['state'\]: without \d"
    r"|\['state'\]\[\d\](\['momentum_buffer'\]: None|: without 'momentum_buffer')"
    rf"|.*\['(features|outputs|names|labels|warned|feature_names)'\]\[\d+\](\[1\](\[\d\])?)?: {NAME}"
    r"|.*\['generator'\]\['state'\]\['(state|inc)'\]: huge"
    r"|.*\['uncalibrated'\]: (truncated|empty|an item too many)|.*\['warm_up'\]\['X'\]: NaN at \d+"
)


class Live:
    """A model, and its module where its weights are beside its state."""

    def __init__(self, kind, model=None):
        self.kind, self.model = kind, kind.make() if model is None else model
        self.module = kind.module(self.model)

    def learn(self, start, stop):
        self.kind.learn(self.model, start, stop)
        return self

    def weights(self):
        return None if self.module is None else copy.deepcopy(dict(self.module.state_dict()))

    def load(self, state):
        self.kind.restore(self.model, state)
        return self

    def set_weights(self, weights):
        if weights is not None:
            self.module.load_state_dict(weights)
        return self

    def held(self):
        return self.kind.state(self.model), self.weights()

    def answers(self):
        return self.weights(), self.kind.predict(self.model)


def judge(kind, rows, cases, start=None):
    """The number of damaged states, and those that were accepted and changed a number, or loaded in part."""

    def live():
        model = None if start is None else copy.deepcopy(start)
        return Live(kind, model).learn(1500, 1500 + rows)

    trained = Live(kind, copy.deepcopy(start)).learn(5, 5 + 2 * rows)
    whole, weights = kind.state(trained.model), trained.weights()
    further, kept = (1000, 1000 + rows), copy.deepcopy(whole)
    truth = live().load(copy.deepcopy(whole)).set_weights(weights).learn(*further).answers()
    one, count, harm, refused = live(), 0, [], []
    before = one.held()

    def load(damaged):  # torch's optimizers take the tensors of a state as their own
        one.load(copy.deepcopy(damaged) if isinstance(kind, Training) else damaged)

    def look(least=1):
        """After some refusals, whether all of them have left the model as it was."""
        if len(refused) >= least:
            if not same(one.held(), before):
                harm.append(f"half loaded: one of {[what for what, _ in refused]}")
            refused.clear()

    for what, damaged in cases(whole):
        if LAWFUL.fullmatch(what):
            continue
        count += 1
        try:
            load(damaged)
        except (ValueError, TypeError) as error:
            if isinstance(kind, (Estimator, River)) and not NAMED.search(str(error)):
                harm.append(f"refused without the name of its entry, {error}: {what}")
            refused.append((what, damaged))
            look(least=20)
            continue
        except Exception as error:
            harm.append(f"{type(error).__name__} instead of a refusal: {what}")
        else:
            try:
                one.set_weights(weights).learn(*further)
            except Exception as error:
                harm.append(f"accepted, then {type(error).__name__}: {what}")
            else:
                if not same(one.answers(), truth):
                    harm.append(f"accepted, and changes later numbers: {what}")
        one = live()
        for _, again in refused:  # what they left is gone with the model that has taken another state
            with contextlib.suppress(ValueError, TypeError):
                load(again)
        look()
    look()
    assert same(whole, kept)
    return count, harm


def check(what, tally, *arguments, least=100, **options):
    count, harm = judge(*arguments, **options)
    tally(what, count, len(harm))
    assert count >= least
    assert not harm, f"{len(harm)} of {count} states did harm:\n" + "\n".join(harm)


@pytest.mark.many
@pytest.mark.parametrize("name", HEADS)
def test_damaged_states_of_a_solver_are_refused_whole(name, tally):
    check("damaged solver states", tally, HEADS[name], 20, damages)


@pytest.mark.many
@pytest.mark.parametrize(("name", "packed"), [*((name, False) for name in TRAININGS), ("Adam", True)])
def test_damaged_states_of_sepsa_are_refused_whole(name, packed, tally, monkeypatch):
    if packed:  # the form for torch.distributed.checkpoint, which state_dict has once that is imported
        importlib.import_module(CHECKPOINT)
    else:
        monkeypatch.delitem(sys.modules, CHECKPOINT, raising=False)
    check("damaged SepSA states", tally, TRAININGS[name], 20, damages)


def outside_engines(state):
    """The damages but for those inside an engine, which each learner loads as the estimators do, and of one member."""
    inside = re.compile(r".*(\['engine'\]\[|\['members'\]\[[12]\])")
    return ((what, damaged) for what, damaged in damages(state) if not inside.match(what))


def of_experts(state):
    """The damages inside experts and their mixture."""
    return ((what, damaged) for what, damaged in damages(state) if re.match(r".*\['(experts|mixture)'\]", what))


# Experts are the same parts from the first row on, and the most of all.
OF_STREAMS = [(name, rows) for name in STREAMS for rows in ("first rows", "later")[name == "experts" :]]
CASES = {"SepSARegressor": damages, "SepSAClassifier": damages, "experts": of_experts}


@pytest.mark.many
@pytest.mark.parametrize(
    ("name", "rows", "cases"),
    [
        *((*each, CASES.get(each[0], outside_engines)) for each in OF_STREAMS),
        *(pytest.param(*each, damages, marks=pytest.mark.long) for each in OF_STREAMS if CASES.get(each[0]) != damages),
    ],
)
def test_damaged_states_of_a_stream_learner_are_refused_whole(name, rows, cases, tally):
    check("damaged stream states", tally, STREAMS[name], 7 if rows == "first rows" else 130, cases)


@pytest.mark.parametrize("cases", [outside_engines, pytest.param(damages, marks=pytest.mark.long)])
def test_damaged_states_of_a_fitted_estimator_are_refused_whole(cases, tally):
    kind = Estimator(sepsa.SepSARegressor, {"hidden_layer_sizes": (3,), "max_iter": 2}, "fit")
    start = kind.make()
    kind.learn(start, 0, 30)
    check("damaged stream states", tally, kind, 7, cases, start=start)


@pytest.mark.parametrize("name", HEADS | STREAMS | {"SepSAForecaster": Forecaster()})
def test_an_undamaged_state_is_taken_and_a_foreign_one_is_named(name):
    kind = (HEADS | STREAMS).get(name, Forecaster())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained = Live(kind).learn(0, 150)
        other = Live(kind).load(kind.state(trained.model)).set_weights(trained.weights())
        assert same((other.held(), other.answers()), (trained.held(), trained.answers()))
    for state, words in (
        (kind.state(trained.model) | {"more": 1}, r"state(_dict)? has other entries .* unexpected \['more'\]"),
        ([], r"state(_dict)? must be a dict, got list"),
    ):
        with pytest.raises(ValueError, match=words):
            other.load(state)
    assert same((other.held(), other.answers()), (trained.held(), trained.answers()))


def test_what_another_development_version_saved_is_refused_in_one_sentence():
    X, y = np.random.default_rng(0).normal(size=(2, 40, 3))
    model = sepsa.SepSARegressor((3,), body="fourier", random_state=0).partial_fit(X, y[:, 0])
    before, state = model.predict(X), model.state_dict()
    del state["learner"]["body"]["order"]
    said = r"missing \['order'\], unexpected \[\]: it was saved by another development version, or is damaged$"
    with pytest.raises(ValueError, match=said):
        model.load_state_dict(sealed(state))
    assert np.array_equal(model.predict(X), before)
    engine = model._learner.body.engine
    pickled = engine.__getstate__()
    del pickled["form"]
    with pytest.raises(ValueError, match=r"missing \['form'\], .* saved by another development version"):
        engine.__setstate__(pickled)


def test_a_label_that_cannot_be_saved_is_named():
    model = river_models.SepSAClassifier(hidden=())
    model.learn_one({"a": 1.0}, frozenset({1}))
    with pytest.raises(ValueError, match=r"got frozenset\(\{1\}\) of type frozenset"):
        model.state_dict()
