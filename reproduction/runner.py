"""Execution of many runs, in this process or in several, with a record of each when it ends."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from reproduction import records, training
from reproduction.data import Dataset, load
from reproduction.experiments import RunSpec
from reproduction.training import Outcome

Item = TypeVar("Item")
Result = TypeVar("Result")


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
        there = f"{len(runs) - len(missing)} of {len(runs)} runs are in {results} already"
        console.print(f"{there}: --out FOLDER repeats them in another folder", highlight=False)
    if not missing:
        return 0
    columns = MofNCompleteColumn(), BarColumn(bar_width=None), TimeRemainingColumn(), TextColumn("{task.description}")
    work = each(functools.partial(_train, device=device), missing, jobs)
    with closing(work), Progress(*columns, console=console, refresh_per_second=2) as progress:
        task = progress.add_task("", total=len(missing))
        for i, outcome, _ in work:
            run = missing[i]
            records.add(results, run, records.record(run, outcome, device_name(device)))
            what = f"{run.experiment} {run.dataset} {run.mode}, {run.method}"
            progress.update(task, advance=1, description=what)
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
    work: Callable[[Item], Result], items: Sequence[Item], jobs: int
) -> Generator[tuple[int, Result, float], None, None]:
    """The index, the result and the seconds of `work(item)` for each item, in the order in which they end.

    One job works in this process, several in as many worker processes; torch uses one thread in each. Workers end when
    the generator is closed and when this process ends, also when it is killed.
    """
    if jobs == 1 or len(items) < 2:
        with one_thread():
            for i, item in enumerate(items):
                yield i, *_timed(work, item)
        return
    # Not forked: a fork of a process with torch's threads, or with a GPU, does not work. A fork of a server that has
    # imported torch and computed nothing does, and takes no time; where there is none, each worker imports torch.
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload([__name__])
    theirs, mine = context.Pipe(duplex=False)
    with ProcessPoolExecutor(min(jobs, len(items)), context, _start_worker, (theirs,)) as pool:
        futures = {pool.submit(_timed, work, item): i for i, item in enumerate(items)}
        try:
            for future in as_completed(futures):
                yield futures[future], *future.result()
        except BrokenProcessPool:
            raise RuntimeError("a worker process died, perhaps out of memory: use fewer jobs") from None
        finally:
            for future in futures:
                future.cancel()
            mine.close()  # which ends the workers


def _timed(work: Callable[[Item], Result], item: Item) -> tuple[Result, float]:
    start = time.perf_counter()
    result = work(item)
    return result, time.perf_counter() - start


def _start_worker(parent: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent decides
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Connection) -> None:
    """End this process when the other end of the pipe is closed."""
    parent.poll(None)
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
