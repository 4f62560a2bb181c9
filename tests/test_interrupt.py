"""Ctrl-C, a signal or a lack of memory at any instant: the state of before or of after, never between."""

import copy
import random
import signal
import threading
import time

import pytest
import torch
from torch import nn

from breaking.damage import same
from heads.test_properties import SOLVERS as CASES
from interrupts import interrupt, modes_restored
from sepsa import OnlineLBFGS, SepSA
from sepsa.interrupt import DeferredInterrupt
from sepsa.testing import difference, snapshot
from third_party import RevertibleLMS


@pytest.fixture(autouse=True)
def heard():
    """Ctrl-C raises, also where this runs in the background of a shell, which lets its children ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with modes_restored():  # signals may fall into torch's own no_grad and autocast
        yield
    signal.signal(signal.SIGINT, before)


def press():
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_waits_for_the_end_and_a_second_one_does_not(times):
    done = []
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt():
        done += [press() for _ in range(times)]
    assert done == ([None] if times == 1 else [])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_users_own_is_called_once_and_stays():
    seen = []

    def handler(number, frame):
        seen.append(number)

    signal.signal(signal.SIGINT, handler)
    with DeferredInterrupt():
        with DeferredInterrupt():
            press()
        assert seen == []
    assert seen == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is handler


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
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with DeferredInterrupt():
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def batch(n, generator):
    x = torch.randn(n, 9, generator=generator)
    return x, torch.eye(3)[torch.randint(3, (n,), generator=generator)]  # regression and classes alike


class Alone:
    """A solver with its head."""

    def __init__(self, make):
        torch.manual_seed(0)
        self.solver = make().bind(nn.Linear(9, 3))

    def learn(self, x, y):
        self.solver.update(x, y)

    def numbers(self):
        return snapshot(self.solver)


class Trained(Alone):
    """A network under SepSA."""

    def __init__(self, make):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(9, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3))
        self.solver = SepSA(self.model, torch.optim.Adam, lr=1e-2, solver=make())

    def learn(self, x, y):
        self.solver.learn(x, y)

    def numbers(self):
        assert all(parameter.requires_grad for parameter in self.model.parameters())
        return copy.deepcopy((dict(self.model.state_dict()), self.solver.state_dict()))


NAMES = ("RLS", "RLS, forgetting 0.9", "RLS, evidence", "SoftmaxNewton", "SoftmaxNewton, evidence", "SlimTik")
SOLVERS = {name: CASES[name].make for name in NAMES}
SOLVERS["OnlineLBFGS"] = lambda: OnlineLBFGS(memory=3)  # often enough a pair is completed
# A solver alone is interrupted at its bytecodes, and by signals in the long version.
ALONE = {name: lambda make=make: Alone(make) for name, make in SOLVERS.items()}
TRAINED = {
    f"SepSA, {name}": lambda make=make: Trained(make)
    for name, make in (SOLVERS | {"another's solver": RevertibleLMS}).items()
    if name not in ("OnlineLBFGS", "SlimTik")
}


def trained(name):
    subject, generator = (ALONE | TRAINED)[name](), torch.Generator().manual_seed(0)
    for n in (2, 8, 20, 2, 3):
        subject.learn(*batch(n, generator))
    return subject, generator


@pytest.mark.parametrize(
    ("name", "count"),
    [*((name, 15) for name in TRAINED), *(pytest.param(n, 200, marks=pytest.mark.long) for n in ALONE | TRAINED)],
)
def test_a_signal_at_any_time_tears_nothing(name, count):
    subject, generator = trained(name)
    instants, sizes = random.Random(2), (2, 40) if "SepSA" in name else (1, 5, 40)
    interrupted, usual = 0, 1e-3
    handler = signal.signal(signal.SIGALRM, lambda *_: press())  # a timer's Ctrl-C
    try:
        for trial in range(50 * count):
            if interrupted == count:
                break
            x, y = batch(sizes[trial % len(sizes)], generator)
            before, twin = subject.numbers(), copy.deepcopy(subject)
            start = time.perf_counter()
            twin.learn(x, y)
            usual += 0.5 * (time.perf_counter() - start - usual)
            try:
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, instants.uniform(0, usual)))
                subject.learn(x, y)
                signal.setitimer(signal.ITIMER_REAL, 0)
                time.sleep(0)  # what came at the last instant is handled here
            except KeyboardInterrupt:
                interrupted += 1
            now = subject.numbers()
            assert same(now, before) or same(now, twin.numbers())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert interrupted == count


@pytest.mark.parametrize("name", SOLVERS)
def test_an_exception_at_any_bytecode_tears_nothing(name):
    """Of the update of a large block, of a load and of a rollback; tests/heads/test_properties.py has smaller ones."""
    subject, generator = trained(name)
    solver, (x, y) = subject.solver, batch(40, generator)
    assert not interrupt(solver, lambda one: one.update(x, y), 15, random.Random(1))
    if "RLS" in name:  # whose load and rollback are tested by Ctrl-C alone
        return
    state, token, start = solver.state_dict(), solver.checkpoint(), snapshot(solver)
    solver.update(*batch(8, generator))
    assert not interrupt(solver, lambda one: one.load_state_dict(state), 20, random.Random(3))
    assert not interrupt(solver, lambda one: one.rollback(token), 20, random.Random(4))
    solver.rollback(token)
    assert not difference(start, snapshot(solver))


@pytest.mark.parametrize("name", ["SoftmaxNewton", "OnlineLBFGS", "SlimTik"])
def test_lack_of_memory_tears_nothing(name, monkeypatch):
    """Whichever allocation fails: here each `copy_`, `to` and product in turn."""
    subject, generator = trained(name)
    x, y = batch(8, generator)
    before, whole, failed = subject.numbers(), copy.deepcopy(subject), 0
    whole.learn(x, y)
    for method in ("to", "__matmul__", "copy_", "reshape", "detach", "__sub__"):
        plain = getattr(torch.Tensor, method)
        for nth in range(12):
            one, calls = copy.deepcopy(subject), iter(range(10**6))

            def once(*arguments, _plain=plain, _calls=calls, _nth=nth, **options):
                if next(_calls) == _nth:
                    raise MemoryError
                return _plain(*arguments, **options)

            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, method, once)
                try:
                    one.learn(x, y)
                except MemoryError:
                    failed += 1
            assert same(one.numbers(), before) or same(one.numbers(), whole.numbers()), (method, nth)
    assert failed > 5
