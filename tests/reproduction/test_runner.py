"""Many runs: in one process or several, killed and interrupted."""

import contextlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from reproduction import records, runner
from reproduction.experiments import plan

QUIET = Console(quiet=True)
linux = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are found under /proc")


def contents(results):
    return {file.name: records.read(file)["runs"] for file in records.files(results)}


def assert_same(one, other):
    one, other = contents(one), contents(other)
    assert list(one) == list(other)
    for name in one:
        assert len(one[name]) == len(other[name])
        for a, b in zip(one[name], other[name], strict=True):
            differs = {key: (value, b.get(key)) for key, value in a.items() if value != b.get(key)}
            assert set(differs) <= {"seconds", "versions"}, (name, a["seed"], differs)


def recorded(results):
    return sum(len(runs) for runs in contents(results).values())


def children(pid):
    """The processes that a process has started, and theirs."""
    try:
        own = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return own + [each for child in own for each in children(child)]


def wait_until(condition, seconds=300.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


# The work is `eval`, because other processes cannot import this file.


@pytest.mark.parametrize("jobs", [1, 2])
def test_each_item_is_done_once_on_one_thread(jobs):
    before = torch.get_num_threads()
    items = [f"({i}, __import__('torch').get_num_threads())" for i in range(7)]
    results = list(runner.each(eval, items, jobs))
    assert sorted((i, result) for i, result, _ in results) == [(i, (i, 1)) for i in range(7)]
    assert all(seconds >= 0 for _, _, seconds in results)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("item", "error", "words"), [
    ("{}['key']", KeyError, "key"),
    ("open('absent.csv')", FileNotFoundError, "absent.csv"),
    ("__import__('os')._exit(3)", RuntimeError, "a worker process died"),
])  # fmt: skip
def test_an_error_in_another_process_is_an_error_here(item, error, words):
    with pytest.raises(error, match=words):
        list(runner.each(eval, ["1", item], 2))


@linux
def test_whoever_stops_listening_leaves_no_process():
    before = set(children(os.getpid()))
    work = runner.each(time.sleep, [0.0, 600.0, 600.0], 2)
    next(work)
    started = set(children(os.getpid())) - before
    work.close()
    assert len([pid for pid in started if gone(pid)]) == 2  # the third, if there is one, serves multiprocessing itself


def test_an_interrupt_ends_all(tmp_path, monkeypatch):
    add, count = records.add, []

    def interrupted(*arguments):
        add(*arguments)
        count.append(1)
        if len(count) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(records, "add", interrupted)
    runs = plan("table3", ["diabetes"], ["Adam"], 2, quick=True)
    with pytest.raises(KeyboardInterrupt):
        runner.reproduce(runs, tmp_path, console=QUIET)
    assert recorded(tmp_path) == 3
    monkeypatch.undo()
    assert runner.reproduce(runs, tmp_path, console=QUIET) == len(runs) - 3
    assert runner.reproduce(runs, tmp_path, console=QUIET) == 0
    assert recorded(tmp_path) == len(runs)


@pytest.mark.long
@linux
def test_killed_and_interrupted_it_ends_where_it_would_have_ended(tmp_path, preloaded_bin):
    runs = plan("table3", ["diabetes"], ["SepSA", "Adam"], 3, quick=True)
    whole, killed, program = (tmp_path / name for name in ("whole", "killed", "program.py"))
    what = f"table3 --datasets diabetes --methods sepsa,adam --seeds 3 --quick --out {killed} --jobs 2"
    program.write_text(
        f"import os, sys\nfrom reproduction.__main__ import app\nsys.argv = 'reproduction run {what}'.split()\n"
        "if __name__ == '__main__':  # and not in the processes that it starts\n"
        "    print(os.getpid(), flush=True)\n    app()\n"
    )
    chance = random.Random()  # other moments every time
    at = [0]
    for number in (signal.SIGINT, signal.SIGKILL):
        command = [preloaded_bin / "python", program]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, cwd=tmp_path, text=True, **streams) as client:
            process = int(client.stdout.readline())
            wait_until(lambda process=process: recorded(killed) > at[-1] or gone(process))
            time.sleep(chance.uniform(0, 0.1))
            processes = [process, *children(process)]
            for pid in processes if number == signal.SIGINT else processes[:1]:  # a terminal tells all of a group
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            said, _ = client.communicate(timeout=600)
        if number == signal.SIGINT:
            assert client.returncode == 130
            assert "the same command goes on from there" in " ".join(said.split())
        wait_until(lambda processes=processes: all(gone(pid) for pid in processes))
        at.append(recorded(killed))
    assert at == sorted(set(at)), at  # each time some runs stayed
    assert runner.reproduce(runs, killed, console=QUIET) == len(runs) - at[-1] > 0
    runner.reproduce(runs, whole, console=QUIET)
    assert recorded(whole) == len(runs)
    assert_same(whole, killed)
    assert not [file for file in killed.rglob("*") if file.suffix == ".new"]
