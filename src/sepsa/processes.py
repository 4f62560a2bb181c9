"""Jobs whose results are files, shared among forked processes, as many as there are idle cores."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

PATIENCE = 300  # seconds without a job done, after which other processes are given up
LOOKS = 5  # at what runs now, where the load of the last minute may be over
WORTH = 4.0  # cost that a process needs to pay for itself
_forked: list[int] = []  # in a process that has jobs of another one: its parent


def idle_cores() -> int:
    """The number of cores that nothing uses now, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores - used_cores())


def used_cores() -> int:
    """How many cores other processes use now: by the load of the last minute, or the most that run in some looks."""
    load = int(os.getloadavg()[0]) if hasattr(os, "getloadavg") else 0
    running = []
    with contextlib.suppress(OSError, ValueError, IndexError):  # another system
        for _ in range(LOOKS if load else 0):
            running.append(int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]) - 1)  # less this one
            time.sleep(0.005)
    return min(load, max(running, default=load))


def share(
    jobs: Sequence[Callable[[], None]],
    costs: Sequence[float],
    advance: Callable[[float], None],
    lock: Any,
    processes: int | None = None,
) -> None:
    """Do jobs, the longest first, here and in other processes; `advance` gets the cost of each that is done.

    A process that is free takes the next one, so that costs need not be exact.
    Jobs use the `lock`, so it is held while processes are forked. A job of a process that ends or stops before it is
    done here. `processes` is by default the number of idle cores, but no more than the costs need; where a process
    cannot be forked all is done here.
    """
    count = min(processes or idle_cores(), len(jobs)) if hasattr(os, "fork") and not _forked else 1
    if processes is None:
        count = max(1, min(count, int(sum(costs) / WORTH)))
    left = set(range(len(jobs)))
    queue, filling = os.pipe()
    longest_first = sorted(left, key=lambda number: -costs[number])
    os.write(filling, bytes(longest_first))
    os.close(filling)
    reading, writing = os.pipe()
    children: list[int] = []

    def collect(seconds: float) -> bool:
        """Count a job that another process has done within these seconds; False: there is none."""
        told = os.read(reading, 1) if select.select([reading], [], [], seconds)[0] else b""
        for number in told:
            left.discard(number)
            advance(costs[number])
        return bool(told)

    try:
        with lock, contextlib.suppress(OSError):  # no memory or number for a process
            for _ in range(count - 1):
                children.append(forked(jobs, queue, writing))  # noqa: PERF401  # those before an error are kept
        os.close(writing)
        for number in taken(queue):
            jobs[number]()
            left.discard(number)
            advance(costs[number])
            while children and collect(0.0):
                pass
        while children and collect(PATIENCE):
            pass
    finally:
        os.close(queue)
        os.close(reading)
        for child in children:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    for number in sorted(left):
        jobs[number]()
        advance(costs[number])


def taken(queue: int) -> Iterator[int]:
    """Numbers from a pipe that several processes read, until it is empty: each number goes to one of them."""
    while number := os.read(queue, 1):
        yield number[0]


def forked(jobs: Sequence[Callable[[], None]], queue: int, writing: int) -> int:
    """Start a process that does jobs from the queue, and writes the number of each into a pipe; returns its id."""
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads: none of their locks is used
        child = os.fork()
    if child:
        return child
    try:
        _forked.append(parent)
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (1, 2):
            os.dup2(null, stream)
        for number in taken(queue):
            jobs[number]()
            os.write(writing, bytes([number]))
    finally:
        os._exit(0)
