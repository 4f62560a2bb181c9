"""Execution of many runs, in this process or in several, with a record of each when it ends."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from sepsa.paper import records, training
from sepsa.paper.data import REGRESSIONS, Dataset, load
from sepsa.paper.experiments import FIGURES, RunSpec
from sepsa.paper.training import Outcome

Item = TypeVar("Item")
Result = TypeVar("Result")

_TRAIN_SIZE = {"energy": 491, "diabetes": 282, "mnist": 60_000, "cifar10": 50_000}


class Unusable(Exception):
    """A file that the runs need is damaged; the message names it and the remedy."""


def reproduce(
    runs: Sequence[RunSpec], results: Path, device: str = "cpu", jobs: int = 1, console: Console | None = None
) -> int:
    """Do the runs that `results` does not hold yet, record each when it ends, and return how many were done.

    An interrupt or a kill loses the unfinished runs only.
    """
    console = console or Console()
    try:
        missing = records.missing(results, list(runs))
    except ValueError as error:
        raise Unusable(str(error)) from None
    if len(missing) < len(runs):
        console.print(f"{len(runs) - len(missing)} of {len(runs)} runs are in {results} already", highlight=False)
    if not missing:
        return 0
    forecast = Forecast(missing, min(jobs, len(missing)))
    work = each(functools.partial(_train, device=device), missing, jobs, forecast.begin)
    with closing(work), _progress(console, forecast) as update:
        for i, outcome, seconds in work:
            records.add(results, missing[i], records.record(missing[i], outcome, device_name(device)))
            forecast.end(i, seconds)
            update(missing[i])
    return len(missing)


def _train(run: RunSpec, device: str) -> Outcome:
    return training.train(run, dataset(run.dataset), device)


@functools.cache
def dataset(name: str) -> Dataset:
    """The data set, loaded once in each process."""
    try:
        return load(name)
    except ValueError as error:
        raise Unusable(str(error)) from None


def device_name(device: str) -> str:
    """The name of the device in a record: cpu, or the model of the GPU."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def each(
    work: Callable[[Item], Result], items: Sequence[Item], jobs: int, begin: Callable[[int], None] = lambda i: None
) -> Generator[tuple[int, Result, float], None, None]:
    """The index, the result and the seconds of `work(item)` for each item, in the order in which they end.

    One job works in this process, several in as many worker processes; torch uses one thread in each. Workers end when
    this process ends, also when it is killed. `begin(i)` is called when item i starts.
    """
    if jobs == 1 or len(items) < 2:
        with one_thread():
            for i, item in enumerate(items):
                begin(i)
                start = time.perf_counter()
                result = work(item)
                yield i, result, time.perf_counter() - start
        return
    workers = [_start_worker(work) for _ in range(min(jobs, len(items)))]
    try:
        yield from _distribute([connection for _, connection in workers], items, begin)
    finally:
        for worker, connection in workers:
            worker.kill()
            worker.join()
            connection.close()


def _distribute(
    connections: Sequence[Connection], items: Sequence[Any], begin: Callable[[int], None]
) -> Iterator[tuple[int, Any, float]]:
    """Send each item to a worker that is free, and yield results as they come."""
    waiting, busy = iter(enumerate(items)), dict[Connection, int]()

    def send_next(connection: Connection) -> None:
        for i, item in waiting:
            begin(i)
            busy[connection] = i
            connection.send(item)
            return

    for connection in connections:
        send_next(connection)
    while busy:
        for ready in wait(list(busy)):
            assert isinstance(ready, Connection)
            i = busy[ready]
            try:
                result, seconds = ready.recv()
                del busy[ready]
                send_next(ready)
            except (EOFError, ConnectionError):
                raise RuntimeError(
                    f"the process with {items[i]} died without an error, perhaps out of memory: use fewer jobs"
                ) from None
            if isinstance(result, Exception):
                raise result
            yield i, result, seconds


def _start_worker(work: Callable[[Any], Any]) -> tuple[BaseProcess, Connection]:
    # Not forked: a fork of a process with torch's threads, or with a GPU, does not work. A fork of a server that has
    # imported torch and computed nothing does, and takes no time; where there is none, each worker imports torch.
    context: multiprocessing.context.ForkServerContext | multiprocessing.context.SpawnContext
    if "forkserver" in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
    else:
        context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    worker = context.Process(target=_serve, args=(work, theirs), daemon=True)
    worker.start()
    theirs.close()
    return worker, mine


def _serve(work: Callable[[Any], Any], connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent decides
    threading.Thread(target=_die_with_parent, daemon=True).start()
    with one_thread():
        while True:
            try:
                item = connection.recv()
            except EOFError:
                return
            start = time.perf_counter()
            try:
                result = work(item)
            except Exception as error:
                # Missing files and packages need no traceback; others are sent as text, because pickling loses it.
                plain = isinstance(error, (FileNotFoundError, ModuleNotFoundError, Unusable))
                result = error if plain else RuntimeError(traceback.format_exc())
            connection.send((result, time.perf_counter() - start))


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread: sums in one order give the same bits on any number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Forecast:
    """An estimate of the time that the remaining runs take, from the times of finished runs.

    A run takes the mean time of finished runs with its data set, mode and method. Where none is finished it takes a
    guess, scaled by how long the finished runs took compared with their guesses.
    """

    def __init__(self, runs: Sequence[RunSpec], jobs: int = 1, now: Callable[[], float] = time.monotonic) -> None:
        self.runs, self.jobs, self.now = runs, jobs, now
        self.started: dict[int, float] = {}
        self.seconds: dict[int, float] = {}
        # Seconds measured and seconds guessed, for each kind of run and, under (), for all.
        self._sums: dict[tuple[str, ...], tuple[float, float]] = {}

    def begin(self, i: int) -> None:
        self.started[i] = self.now()

    def end(self, i: int, seconds: float) -> None:
        self.seconds[i] = seconds
        for kind in (_kind(self.runs[i]), ()):
            measured, guessed = self._sums.get(kind, (0.0, 0.0))
            self._sums[kind] = measured + seconds, guessed + guess(self.runs[i])

    def cost(self, run: RunSpec) -> float:
        """The estimated seconds of a run."""
        measured, guessed = self._sums.get(_kind(run)) or self._sums.get(()) or (1.0, 1.0)
        return guess(run) * measured / guessed

    def share(self) -> float:
        """The fraction of the work that is done, from 0 to 1."""
        done = sum(self.seconds.values())
        return done / (done + sum(self._remaining_costs()) or 1.0)

    def remaining(self) -> float:
        """Seconds from now to the end: the work divided among the jobs, but at least the longest run."""
        costs = self._remaining_costs()
        return max(sum(costs) / self.jobs, max(costs, default=0.0))

    def _remaining_costs(self) -> list[float]:
        now = self.now()
        return [
            max(0.0, self.cost(run) - (now - self.started.get(i, now)))
            for i, run in enumerate(self.runs)
            if i not in self.seconds
        ]


def _kind(run: RunSpec) -> tuple[str, ...]:
    return run.experiment, run.dataset, run.mode, run.method


def guess(run: RunSpec) -> float:
    """A rough guess of the seconds that a run takes on one CPU core, with its evaluation."""
    n = _TRAIN_SIZE[run.dataset]
    if run.dataset in REGRESSIONS:
        step = 3e-3 if run.method == "slimTrain" else 1e-3
        return step * run.epochs * -(-n // run.batch)
    n = training.QUICK_TRAIN if run.quick else n
    test, points = (500, 5) if run.quick else (10_000, 120)
    images = n + test
    if run.experiment in FIGURES:
        images += points * test if run.mode == "online" else run.epochs * (n + test)
    step = (4e-3 if run.batch == 1 else 6e-2) + (2e-2 if run.method == "slimTrain" else 0.0)
    return step * run.epochs * -(-n // run.batch) + 3e-4 * images


class _RemainingTime(ProgressColumn):
    def __init__(self, forecast: Forecast) -> None:
        super().__init__()
        self.forecast = forecast

    def render(self, task: Task) -> Text:
        return Text(f"about {duration(self.forecast.remaining())} left" if task.completed < 1 else "done")


def duration(seconds: float) -> str:
    """A time in words: 40 s, 7 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def _progress(console: Console, forecast: Forecast) -> Iterator[Callable[[RunSpec], None]]:
    """A progress bar over the estimated work, not over the number of runs; the body calls update(run) after each."""
    total = len(forecast.runs)
    columns = (
        TextColumn("{task.fields[runs]}"),
        BarColumn(bar_width=None),
        _RemainingTime(forecast),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, refresh_per_second=2) as progress:
        task = progress.add_task("", total=1.0, runs=f"0/{total} runs")

        def update(run: RunSpec) -> None:
            done = len(forecast.seconds)
            share = 1.0 if done == total else min(forecast.share(), 0.99)
            what = f"{run.experiment} {run.dataset} {run.mode}, {run.method}"
            progress.update(task, completed=share, runs=f"{done}/{total} runs", description=what)

        yield update
