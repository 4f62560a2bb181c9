"""An interrupted update leaves the state of before or of after, whatever interrupts it, wherever it was."""

from __future__ import annotations

import copy
import random
import signal
import time

import pytest
import torch
from torch import nn

from sepsa import RLS, OnlineLBFGS, SelfTuning, SoftmaxNewton
from sepsa.paper.slimtik import SlimTik
from sepsa.testing import difference, interrupt, modes_restored, snapshot

SHORT, LONG = 40, 200
SOLVERS = {
    "RLS": RLS,
    "RLS, forgetting 0.9": lambda: RLS(forgetting=0.9),
    "RLS, self-tuning": lambda: SelfTuning(),
    "SoftmaxNewton": SoftmaxNewton,
    "OnlineLBFGS": lambda: OnlineLBFGS(memory=3),  # often enough a pair is completed
    "SlimTik": SlimTik,
}
SIZES = (1, 5, 40)
counts = pytest.mark.parametrize("count", [SHORT, pytest.param(LONG, marks=pytest.mark.long)])
names = pytest.mark.parametrize("name", SOLVERS)


def batch(n, generator):
    x = torch.randn(n, 9, generator=generator)
    return x, torch.eye(3)[torch.randint(3, (n,), generator=generator)]  # regression and classes alike


def trained(name):
    torch.manual_seed(0)
    solver = SOLVERS[name]().bind(nn.Linear(9, 3))
    generator = torch.Generator().manual_seed(0)
    for n in (1, 8, 20, 1, 3):
        solver.update(*batch(n, generator))
    return solver, generator


@pytest.fixture(autouse=True)
def modes():
    """Signals may fall into torch's own no_grad and autocast."""
    with modes_restored():
        yield


@names
@counts
def test_an_exception_at_any_bytecode_tears_nothing(name, count):
    solver, generator = trained(name)
    instants = random.Random(1)
    torn = []
    for n in SIZES:
        x, y = batch(n, generator)
        torn += interrupt(solver, lambda one: one.update(x, y), count // len(SIZES) + 1, instants)  # noqa: B023
        solver.update(*batch(n, generator))
    assert not torn, f"{len(torn)} of {count}: {torn[:3]}"


@names
@counts
def test_a_signal_at_any_time_tears_nothing(name, count):
    solver, generator = trained(name)
    instants = random.Random(2)
    torn, interrupted = [], 0
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)  # a timer's Ctrl-C
    try:
        for trial in range(50 * count):
            if interrupted == count:
                break
            x, y = batch(SIZES[trial % len(SIZES)], generator)
            before, twin = snapshot(solver), copy.deepcopy(solver)
            start = time.perf_counter()
            twin.update(x, y)
            took, after = time.perf_counter() - start, snapshot(twin)
            try:
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, instants.uniform(0, took)))
                solver.update(x, y)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            now = snapshot(solver)
            where = difference(now, before)
            if where and difference(now, after):
                torn.append(where)
                solver = twin
            elif not where:
                solver.update(x, y)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert interrupted == count
    assert not torn, f"{len(torn)} of {count}: {torn[:3]}"


@pytest.mark.parametrize("name", ["SoftmaxNewton", "OnlineLBFGS", "SlimTik"])
def test_an_interrupted_load_or_rollback_tears_nothing(name):
    solver, generator = trained(name)
    state, token, start = solver.state_dict(), solver.checkpoint(), snapshot(solver)
    solver.update(*batch(8, generator))
    assert not interrupt(solver, lambda one: one.load_state_dict(state), 20, random.Random(3))
    assert not interrupt(solver, lambda one: one.rollback(token), 20, random.Random(4))
    solver.rollback(token)
    assert not difference(start, snapshot(solver))


def test_lack_of_memory_tears_nothing(monkeypatch):
    """Whichever allocation fails: here each `copy_`, `to` and product in turn."""
    for name in ("SoftmaxNewton", "OnlineLBFGS", "SlimTik"):
        solver, generator = trained(name)
        x, y = batch(8, generator)
        before = snapshot(solver)
        whole = copy.deepcopy(solver)
        whole.update(x, y)
        after = snapshot(whole)
        failed = 0
        for method in ("to", "__matmul__", "copy_", "reshape", "detach", "__sub__"):
            plain = getattr(torch.Tensor, method)
            for nth in range(12):
                one, calls = copy.deepcopy(solver), iter(range(10**6))

                def once(*arguments, _plain=plain, _calls=calls, _nth=nth, **options):
                    if next(_calls) == _nth:
                        raise MemoryError
                    return _plain(*arguments, **options)

                with monkeypatch.context() as patch:
                    patch.setattr(torch.Tensor, method, once)
                    try:
                        one.update(x, y)
                    except MemoryError:
                        failed += 1
                now = snapshot(one)
                assert not difference(now, before) or not difference(now, after), (name, method, nth)
        assert failed > 20
