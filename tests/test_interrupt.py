"""Ctrl-C at any instant of a step."""

from __future__ import annotations

import copy
import os
import random
import signal
import threading
import time

import pytest
import torch
from torch import nn

from sepsa import RLS, SelfTuning, SepSA, SoftmaxNewton
from sepsa.interrupt import DeferredInterrupt
from sepsa.testing import modes_restored
from third_party import RevertibleLMS

INTERRUPTS = int(os.environ.get("SEPSA_INTERRUPTS", "20"))  # the long version: 200


@pytest.fixture(autouse=True)
def heard():
    """Ctrl-C raises, also where this runs in the background of a shell, which lets its children ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press():
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def modes():
    """Signals may fall into torch's own no_grad and autocast."""
    with modes_restored():
        yield


def test_an_interrupt_waits_for_the_end():
    done = []
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt():
        done.append(press())
    assert done == [None]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_goes_through_at_once():
    done = []
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt():
        done += [press(), press()]
    assert done == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_users_own_is_called_once_and_stays():
    seen = []

    def handler(number, frame):
        seen.append(number)

    before = signal.signal(signal.SIGINT, handler)
    try:
        with DeferredInterrupt():
            with DeferredInterrupt():
                press()
            assert seen == []
        assert seen == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_comes_first_and_the_interrupt_with_it():
    with pytest.raises(KeyboardInterrupt) as caught, DeferredInterrupt():
        _ = [press(), 1 / 0]
    assert isinstance(caught.value.__context__, ZeroDivisionError)


def test_it_leaves_other_threads_and_ignored_signals_alone():
    def elsewhere():
        with DeferredInterrupt():
            seen.append(signal.getsignal(signal.SIGINT))

    seen = []
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with DeferredInterrupt():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3))


def everything(model, optimizer):
    """All numbers of model, moments and head, as one list."""

    def flat(value):
        if isinstance(value, torch.Tensor):
            return [value.clone()]
        if isinstance(value, dict):
            return [x for key in sorted(value, key=str) for x in flat(value[key])]
        if isinstance(value, (list, tuple)):
            return [x for item in value for x in flat(item)]
        return [value]

    return flat([model.state_dict(), optimizer.state_dict()])


def equal(a, b):
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True)
    )


SOLVERS = {
    "RLS": RLS,
    "forgetting": lambda: RLS(forgetting=0.9),
    "auto": lambda: SelfTuning.of(RLS, forgetting=1.0),
    "SoftmaxNewton": SoftmaxNewton,
    "LMS": RevertibleLMS,
}


@pytest.mark.parametrize("name", SOLVERS)
def test_interrupts_at_random_instants_tear_nothing(name):
    """An alarm presses Ctrl-C somewhere in `learn`; the state is that of a step not begun or of a step done."""
    model = network()
    optimizer = SepSA(model, torch.optim.Adam, lr=1e-2, solver=SOLVERS[name]())
    g, chance = torch.Generator().manual_seed(1), random.Random(0)

    def batch():
        labels = torch.randint(0, 3, (8,), generator=g)
        targets = labels if name == "SoftmaxNewton" else nn.functional.one_hot(labels, 3).float()
        return torch.randn(8, 6, generator=g), targets

    optimizer.learn(*batch())
    alarm = signal.signal(signal.SIGALRM, lambda *_: press())
    tries = interrupted = torn = 0
    usual = 1e-3
    try:
        while interrupted < INTERRUPTS and tries < 10 * INTERRUPTS:
            tries += 1
            inputs, targets = batch()
            before = everything(model, optimizer)
            twin, other = copy.deepcopy((model, optimizer))
            start = time.perf_counter()
            other.learn(inputs, targets)
            usual += 0.2 * (time.perf_counter() - start - usual)
            after = everything(twin, other)
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, usual))
                optimizer.learn(inputs, targets)
                signal.setitimer(signal.ITIMER_REAL, 0)
                time.sleep(0)  # what came at the last instant is handled here
            except KeyboardInterrupt:
                interrupted += 1
            now = everything(model, optimizer)
            torn += not (equal(now, after) or equal(now, before))
            assert all(p.requires_grad for p in model.parameters())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
    assert interrupted == INTERRUPTS
    assert torn == 0
