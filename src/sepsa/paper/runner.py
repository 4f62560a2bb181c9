"""Runs many runs, in this process or in several, and records each as it ends."""

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

from sepsa.paper import experiments, records
from sepsa.paper.data import Dataset, load
from sepsa.paper.experiments import Outcome, Run

Item = TypeVar("Item")
Result = TypeVar("Result")

_TRAIN_SIZE = {"energy": 491, "diabetes": 282, "mnist": 60_000, "cifar10": 50_000}


class Unusable(Exception):
    """A file that the runs need is not what it should be; the message says which, and what to do."""


# ---------------------------------------------------------------------- recorded runs


def reproduce(
    runs: Sequence[Run],
    results: Path,
    device: str = "cpu",
    jobs: int = 1,
    console: Console | None = None,
) -> int:
    """Do the runs that `results` does not hold yet, record each as it ends, and return how many were done.

    Whatever stops it, by Ctrl-C or by force, loses the runs in hand and no other.
    """
    console = console or Console()
    try:
        left = records.missing(results, list(runs))
    except ValueError as error:
        raise Unusable(str(error)) from None
    if len(left) < len(runs):
        console.print(f"{len(runs) - len(left)} of {len(runs)} runs are in {results} already", highlight=False)
    if not left:
        return 0
    forecast = Forecast(left, min(jobs, len(left)))
    work = each(functools.partial(_train, device=device), left, jobs, forecast.begin)
    with closing(work), _progress(console, forecast) as update:
        for i, outcome, seconds in work:
            records.add(results, left[i], records.record(left[i], outcome, device_name(device)))
            forecast.end(i, seconds)
            update(left[i])
    return len(left)


def _train(run: Run, device: str) -> Outcome:
    return experiments.train(run, dataset(run.dataset), device)


@functools.cache
def dataset(name: str) -> Dataset:
    """The data set, loaded once in each process."""
    try:
        return load(name)
    except ValueError as error:
        raise Unusable(str(error)) from None


def device_name(device: str) -> str:
    """The device in the words of a record: cpu, or the make of the GPU."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


# ---------------------------------------------------------------------- processes


def each(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    jobs: int,
    begin: Callable[[int], None] = lambda i: None,
) -> Generator[tuple[int, Result, float], None, None]:
    """The index, the result and the seconds of `work(item)` for each item, in the order in which they end.

    With one job the work is done here, with more in so many processes, with torch on one thread wherever it is. They
    end with this one, however it ends. `begin(i)` is called when item i is taken up.
    """
    if jobs == 1 or len(items) < 2:
        with one_thread():
            for i, item in enumerate(items):
                begin(i)
                start = time.perf_counter()
                result = work(item)
                yield i, result, time.perf_counter() - start
        return
    crew = [_hire(work) for _ in range(min(jobs, len(items)))]
    try:
        yield from _delegate(crew, items, begin)
    finally:
        for worker, connection in crew:
            worker.kill()
            worker.join()
            connection.close()


def _delegate(
    crew: list[tuple[BaseProcess, Connection]], items: Sequence[Any], begin: Callable[[int], None]
) -> Iterator[tuple[int, Any, float]]:
    waiting, at = iter(enumerate(items)), dict[Connection, int]()

    def hand_out(connection: Connection) -> None:
        for i, item in waiting:
            begin(i)
            at[connection] = i
            connection.send(item)
            return

    for _, connection in crew:
        hand_out(connection)
    while at:
        for ready in wait(list(at)):
            assert isinstance(ready, Connection)
            i = at[ready]
            try:
                result, seconds = ready.recv()
                del at[ready]
                hand_out(ready)
            except (EOFError, ConnectionError):
                raise RuntimeError(
                    f"the process with {items[i]} died without a word, of want of memory perhaps: try fewer jobs"
                ) from None
            if isinstance(result, Exception):
                raise result
            yield i, result, seconds


def _hire(work: Callable[[Any], Any]) -> tuple[BaseProcess, Connection]:
    # Spawned, not forked: a fork of a process with torch's threads, or with a GPU, does not work.
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
                result = error if _speaks_for_itself(error) else RuntimeError(traceback.format_exc())
            connection.send((result, time.perf_counter() - start))


def _speaks_for_itself(error: Exception) -> bool:
    # Errors for the user, of missing files and packages; of all others the place matters, which is lost on the way.
    return isinstance(error, (FileNotFoundError, ModuleNotFoundError, Unusable))


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch: sums in one order, so the same bits however many cores there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------------- the time that is left


class Forecast:
    """How long the runs not yet done will take, from those that are done.

    Runs of one data set, mode and method cost what those done of them cost in the mean. Where none is done yet they
    cost a guess, corrected by what the others cost beside theirs.
    """

    def __init__(self, runs: Sequence[Run], jobs: int = 1, now: Callable[[], float] = time.monotonic) -> None:
        self.runs, self.jobs, self.now = runs, jobs, now
        self.begun: dict[int, float] = {}
        self.seconds: dict[int, float] = {}
        # For each kind of run, and for all under (): seconds measured and seconds guessed.
        self._sums: dict[tuple[str, ...], tuple[float, float]] = {}

    def begin(self, i: int) -> None:
        self.begun[i] = self.now()

    def end(self, i: int, seconds: float) -> None:
        self.seconds[i] = seconds
        for kind in (_kind(self.runs[i]), ()):
            measured, guessed = self._sums.get(kind, (0.0, 0.0))
            self._sums[kind] = measured + seconds, guessed + guess(self.runs[i])

    def cost(self, run: Run) -> float:
        """Seconds that this run will take."""
        measured, guessed = self._sums.get(_kind(run)) or self._sums.get(()) or (1.0, 1.0)
        return guess(run) * measured / guessed

    def share(self) -> float:
        """How much of the work is done, from 0 to 1."""
        done = sum(self.seconds.values())
        return done / (done + sum(self._costs_left()) or 1.0)

    def left(self) -> float:
        """Seconds from now to the end: the work divided, but no less than the longest run."""
        costs = self._costs_left()
        return max(sum(costs) / self.jobs, max(costs, default=0.0))

    def _costs_left(self) -> list[float]:
        now = self.now()
        return [
            max(0.0, self.cost(run) - (now - self.begun.get(i, now)))
            for i, run in enumerate(self.runs)
            if i not in self.seconds
        ]


def _kind(run: Run) -> tuple[str, ...]:
    return run.experiment, run.dataset, run.mode, run.method


def guess(run: Run) -> float:
    """Seconds that a run takes on one core of a CPU, evaluation included, roughly."""
    n = _TRAIN_SIZE[run.dataset]
    if run.dataset in experiments.REGRESSIONS:
        step = 3e-3 if run.method == "slimTrain" else 1e-3
        return step * run.epochs * -(-n // run.batch)
    n = experiments.QUICK_TRAIN if run.quick else n
    test, points = (500, 5) if run.quick else (10_000, 120)
    images = {"fig1": points * test, "fig3": run.epochs * (n + test)}.get(run.experiment, 0) + n + test
    step = (4e-3 if run.batch == 1 else 6e-2) + (2e-2 if run.method == "slimTrain" else 0.0)
    return step * run.epochs * -(-n // run.batch) + 3e-4 * images


class _Left(ProgressColumn):
    def __init__(self, forecast: Forecast) -> None:
        super().__init__()
        self.forecast = forecast

    def render(self, task: Task) -> Text:
        return Text(f"about {words(self.forecast.left())} left" if task.completed < 1 else "done")


def words(seconds: float) -> str:
    """A time as one says it: 40 s, 7 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def _progress(console: Console, forecast: Forecast) -> Iterator[Callable[[Run], None]]:
    """A bar that moves with the work done, not with the number of runs; the body calls update(run) after each."""
    total = len(forecast.runs)
    columns = (
        TextColumn("{task.fields[runs]}"),
        BarColumn(bar_width=None),
        _Left(forecast),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, refresh_per_second=2) as progress:
        task = progress.add_task("", total=1.0, runs=f"0/{total} runs")

        def update(run: Run) -> None:
            done = len(forecast.seconds)
            share = 1.0 if done == total else min(forecast.share(), 0.99)
            what = f"{run.experiment} {run.dataset} {run.mode}, {run.method}"
            progress.update(task, completed=share, runs=f"{done}/{total} runs", description=what)

        yield update
