"""Hundreds of damaged states: each is refused with nothing changed, or changes no later number."""

from __future__ import annotations

import copy
import functools
import importlib
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from breaking.damage import damages, same, several
from sepsa import RLS, STORM, LogisticNewton, OnlineLBFGS, PerOutput, SelfTuning, SepSA, SoftmaxNewton
from sepsa.paper.slimtik import SlimTik

K, M, N = 4, 3, 8
CHECKPOINT = "torch.distributed.checkpoint.state_dict"

SOLVERS = {
    "RLS": RLS,
    "RLS, forgetting 0.9": lambda: RLS(forgetting=0.9),
    "RLS, float32": lambda: RLS(dtype=torch.float32),
    "RLS, self-tuning": lambda: SelfTuning(),
    "RLS, self-tuning ridge": lambda: SelfTuning.of(RLS, forgetting=1.0),
    "RLS, bias_ridge": lambda: RLS(bias_ridge=0.5),
    "PerOutput": lambda: PerOutput(RLS()),
    "SlimTik": SlimTik,
    "OnlineLBFGS": OnlineLBFGS,
    "OnlineLBFGS, forgetting 0.9": lambda: OnlineLBFGS(forgetting=0.9),
    "OnlineLBFGS, cross-entropy": lambda: OnlineLBFGS(loss="cross-entropy"),
    "SoftmaxNewton": SoftmaxNewton,
    "SoftmaxNewton, forgetting 0.9": lambda: SoftmaxNewton(forgetting=0.9),
    "LogisticNewton": LogisticNewton,
}
CLASSES = {"OnlineLBFGS, cross-entropy", "SoftmaxNewton", "SoftmaxNewton, forgetting 0.9", "LogisticNewton"}
BASES = {"Adam": torch.optim.Adam, "SGD": functools.partial(torch.optim.SGD, momentum=0.9), "STORM": STORM}


def batches(classes, count, first=0):
    generator = torch.Generator().manual_seed(first)
    truth = torch.randn(M, K, generator=generator, dtype=torch.float64)
    for _ in range(count):
        x = torch.randn(N, K, generator=generator, dtype=torch.float64)
        y = x @ truth.T + 0.1 * torch.randn(N, M, generator=generator, dtype=torch.float64)
        yield x, nn.functional.one_hot(y.argmax(1), M).double() if classes else y


class Head:
    """A solver with its head."""

    def __init__(self, name):
        torch.manual_seed(0)
        self.linear = nn.Linear(K, M, dtype=torch.float64)
        self.solver = SOLVERS[name]().bind(self.linear)
        self.classes = name in CLASSES

    def learn(self, count, first=0):
        for x, y in batches(self.classes, count, first):
            self.solver.update(x, y)

    def state(self) -> Any:
        return copy.deepcopy(self.solver.state_dict())

    def load(self, state):
        self.solver.load_state_dict(state)

    def weights(self):
        return {name: p.detach().clone() for name, p in self.linear.named_parameters()}

    def set_weights(self, weights):
        self.linear.load_state_dict(weights)


class Training(Head):
    """A whole model under SepSA."""

    def __init__(self, name):
        base, self.solver_name = name
        torch.manual_seed(0)
        self.linear = nn.Sequential(nn.Linear(K, 5), nn.Tanh(), nn.Linear(5, M)).double()
        kind = BASES[base]
        options = {} if base == "STORM" else {"lr": 1e-2}
        if isinstance(kind, functools.partial):
            kind, options = kind.func, options | kind.keywords
        self.solver = SepSA(self.linear, kind, solver=SOLVERS[self.solver_name](), **options)
        self.solver.head_fraction = 0.5
        self.classes = self.solver_name in CLASSES

    def learn(self, count, first=0):
        for x, y in batches(self.classes, count, first):
            self.solver.learn(x, y)


def damages_of_training(state):
    """All damages but those that give another valid state: a parameter without a gradient has no moments yet."""
    valid = ["['state']: empty", *(f"['state'][{i}]: empty" for i in range(2))]
    valid += [f"['state']: without {i}" for i in range(2)]
    valid += [
        f"['state'][{i}]{what}"
        for i in range(2)
        for what in ("['momentum_buffer']: None", ": without 'momentum_buffer'")
    ]
    return ((what, damaged) for what, damaged in damages(state) if what not in valid)


def judge(make, cases):
    """The number of damaged states, and those that were accepted and changed a number, or loaded in part."""
    trained = make()
    trained.learn(5)
    whole, weights = trained.state(), trained.weights()
    further = make()
    further.set_weights(weights)
    further.load(copy.deepcopy(whole))
    further.learn(3, first=1)
    truth = further.weights()
    count, harm = 0, []
    live = make()
    live.learn(2, first=2)
    before, at = live.state(), live.weights()
    for what, damaged in cases(whole):
        count += 1
        try:
            live.load(damaged)
        except (ValueError, TypeError):
            if not (same(live.state(), before) and same(live.weights(), at)):
                harm.append(f"half loaded: {what}")
                live = make()
                live.learn(2, first=2)
            continue
        except Exception as error:
            harm.append(f"{type(error).__name__} instead of a refusal: {what}")
        else:
            live.set_weights(weights)
            try:
                live.learn(3, first=1)
            except Exception as error:
                harm.append(f"accepted, then {type(error).__name__}: {what}")
            else:
                if not same(live.weights(), truth):
                    harm.append(f"accepted, and changes later numbers: {what}")
        live = make()
        live.learn(2, first=2)
    return count, harm


def report(harm):
    return f"{len(harm)} states did harm:\n" + "\n".join(harm)


@pytest.mark.parametrize("name", SOLVERS)
def test_damaged_states_of_a_solver_are_refused_whole(name, tally):
    count, harm = judge(lambda: Head(name), damages)
    tally("damaged solver states", count, len(harm))
    assert count > 100
    assert not harm, report(harm)


@pytest.mark.parametrize("name", [(base, "RLS") for base in BASES] + [("Adam", "RLS, self-tuning")], ids="-".join)
@pytest.mark.parametrize("packed", [False, True])
def test_damaged_states_of_sepsa_are_refused_whole(name, packed, tally, monkeypatch):
    if packed:  # the form for torch.distributed.checkpoint, which state_dict has once that is imported
        importlib.import_module(CHECKPOINT)
    else:
        monkeypatch.delitem(sys.modules, CHECKPOINT, raising=False)
    count, harm = judge(lambda: Training(name), damages_of_training)
    tally("damaged SepSA states", count, len(harm))
    assert count > 100
    assert not harm, report(harm)


@pytest.mark.long
@pytest.mark.parametrize("name", SOLVERS)
def test_states_damaged_in_several_places_are_refused_whole(name, tally):
    count, harm = judge(lambda: Head(name), lambda state: several(state, 300, seed=7))
    tally("solver states damaged in several places", count, len(harm))
    assert not harm, report(harm)


def test_an_undamaged_state_is_taken():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in SOLVERS:
            trained, other = Head(name), Head(name)
            trained.learn(4)
            other.load(trained.state())
            assert same(other.state(), trained.state()), name
