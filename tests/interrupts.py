"""Interrupts at random bytecodes of an update, which must leave the state before it or the one after it."""

from __future__ import annotations

import contextlib
import copy
import random
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from sepsa.testing.case import Case, difference, expect, snapshot


def interrupts_leave_before_or_after(case: Case, count: int = 10) -> None:
    """An exception at any instant of `update` leaves the state before the update or the one after it."""
    generator = random.Random(0)
    for n in (1, 16):
        solver = case.started(n=n)
        x, y = next(case.stream(1, n=n, seed=1))
        torn = interrupt(solver, lambda one: one.update(x, y), count, generator)  # noqa: B023
        expect(
            not torn,
            "an update interrupted at any instant leaves the state of before or of after",
            f"{len(torn)} of {count} interrupts tore it, the first: {torn[:1]}",
        )


def interrupt(
    solver: Any, act: Callable[[Any], object], count: int, generator: random.Random, by_signal: bool = False
) -> list[str]:
    """Interrupt `act` on copies of `solver` at `count` random bytecodes of the solver's package and of sepsa.

    With `by_signal` as Ctrl-C does, which a `DeferredInterrupt` holds back.
    Returns the paths of entries that are neither as before `act` nor as after it, with the place of the interrupt.
    """
    packages = {"sepsa", type(solver).__module__.partition(".")[0]}
    before = snapshot(solver)
    finished = copy.deepcopy(solver)
    total = run_to(lambda: act(finished), packages, None)
    after, torn = snapshot(finished), []
    for _ in range(count):
        one = copy.deepcopy(solver)
        place = "an interrupt that did not come through"
        try:
            run_to(lambda: act(one), packages, generator.randrange(total), by_signal)  # noqa: B023
        except KeyboardInterrupt as error:
            place = str(error)
        now = snapshot(one)
        where = difference(now, before)
        if where and difference(now, after):
            torn.append(f"{where} at {place}")
        elif not where:
            act(one)
            if where := difference(snapshot(one), after):
                torn.append(f"{where} after the same again, once interrupted at {place}")
    return torn


def run_to(call: Callable[[], object], packages: set[str], at: int | None, by_signal: bool = False) -> int:
    """Run `call`, and raise KeyboardInterrupt at bytecode number `at` of `packages`, or call the handler of its signal.

    Returns how many bytecodes there were.
    """
    seen = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal seen
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in packages or frame.f_globals is globals():  # this module is not interrupted
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen += 1
            if at is not None and seen == at + 1:
                if by_signal:
                    handler: Any = signal.getsignal(signal.SIGINT)
                    handler(signal.SIGINT, frame)
                    return trace
                raise KeyboardInterrupt(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        return trace

    previous = sys.gettrace()
    handled = signal.signal(signal.SIGINT, signal.default_int_handler) if by_signal else None  # some runners ignore it
    with modes_restored():
        sys._getframe().f_trace_opcodes = True  # Python 3.12 traces bytecodes only if a frame asked for it before
        sys.settrace(trace)
        try:
            call()
        finally:
            sys.settrace(previous)
            if by_signal:
                signal.signal(signal.SIGINT, handled)
    return seen


@contextlib.contextmanager
def modes_restored() -> Iterator[None]:
    """Restore torch's modes at the end: an interrupt inside no_grad or autocast leaves them set."""
    gradients, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    try:
        yield
    finally:
        torch.set_grad_enabled(gradients)
        torch.set_autocast_enabled("cpu", autocast)
        now = torch.autocast_increment_nesting()
        for _ in range(now - depth + 1):
            torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
