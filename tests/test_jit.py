"""Compiled code: its cache under all that may happen to a folder, and jobs in several processes."""

import errno
import importlib
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sepsa import SepSAForecaster, ahead, cli, jit, jit_cache, processes
from sepsa.jit_cache import CodeCache, TravellingLocator
from sepsa.stream.experts import step
from sepsa.stream.forecast.kernels import rescale

KERNEL = "from sepsa.jit import cached\n\n@cached()\ndef call(x):\n    return x + 1\n"
PROGRAM = """
import sepsa.jit
from sepsa.stream.kernels.compilation import compiled, kernel

sepsa.jit._SLOW = 0.0

@kernel(cost=1.0)
def by_address(model, row):
    return row

@compiled
def by_name(x):
    return x + 1

sepsa.jit.compile_kernels([by_address], "a test")
print(bool(by_address.address), by_name(1))
"""


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """A function that returns a new kernel of the same file, as a new process would have it."""
    (tmp_path / "small_kernel.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(jit_cache, "_warned", [])

    def start():
        monkeypatch.delitem(sys.modules, "small_kernel", raising=False)
        return importlib.import_module("small_kernel").call

    return start


def test_damaged_code_is_compiled_again(kernel):
    first = kernel()
    assert first(1) == 2
    folder = Path(first.stats.cache_path)
    for damage in (b"", b"no pickle"):
        for pattern in ("small_kernel*.nbi", "small_kernel*.nbc"):
            for path in folder.glob(pattern):
                path.write_bytes(damage)
            again = kernel()
            assert again(1) == 2
            assert not again.stats.cache_hits
            loaded = kernel()
            assert loaded(1) == 2
            assert loaded.stats.cache_hits


def test_a_new_process_says_that_it_compiles_where_the_cache_is_cold_or_nothing_is_writable(tmp_path, preloaded_bin):
    (tmp_path / "program.py").write_text(PROGRAM)
    nothing_writable = "from numba.core import caching; caching.CacheImpl._locator_classes = []; import program"
    told = []
    for code in ("import program", "import program", nothing_writable):
        program, cold = [preloaded_bin / "python", "-c", code], os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
        done = subprocess.run(program, cwd=tmp_path, env=cold, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "True 2\n"), done.stderr
        told.append(done.stderr)
    assert "compiling a test" in told[0]
    assert told[1] == ""
    assert told[2].count("no folder for compiled code is writable") == 1


def test_a_full_disk_is_a_warning_and_the_call_works(kernel, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(jit_cache.FunctionCache, "save_overload", full)
    with pytest.warns(RuntimeWarning, match=r"writable \(.*: No space left on device\).*sepsa compile --to FOLDER"):
        assert kernel()(1) == 2


def test_a_cache_that_travels_is_known_by_the_content_of_the_package(tmp_path, monkeypatch):
    function = step.learn.function
    file = function.__code__.co_filename
    assert TravellingLocator.from_function(function, file) is None
    monkeypatch.setenv("SEPSA_CACHE", str(tmp_path))
    places = []
    for version in ("1.0", "1.1"):
        monkeypatch.setattr(jit_cache, "__version__", version)
        jit_cache.content.cache_clear()
        places.append(CodeCache(function).cache_path)
    jit_cache.content.cache_clear()
    assert [Path(place).relative_to(tmp_path).parts[0][:4] for place in places] == ["1.0-", "1.1-"]
    assert not list(tmp_path.iterdir())  # nothing is written before there is code
    assert TravellingLocator.from_function(function, str(tmp_path / "another.py")) is None


def test_jobs_are_shared_and_those_of_a_killed_process_are_done_here(tmp_path):
    here, told = os.getpid(), []

    def job(number):
        if number == 1 and os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        while os.getpid() == here and not (tmp_path / "elsewhere").exists():
            time.sleep(0.01)
        (tmp_path / str(number)).write_text(str(os.getpid()))
        if os.getpid() != here:
            (tmp_path / "elsewhere").touch()

    jobs = [lambda number=number: job(number) for number in range(6)]
    processes.share(jobs, [6.0, 5.0, 4.0, 3.0, 2.0, 1.0], told.append, nullcontext(), 3)
    by = [int((tmp_path / str(number)).read_text()) for number in range(6)]
    assert sorted(told) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert by[1] == here
    assert {here} < set(by)


def test_an_error_in_a_job_is_raised_here(tmp_path):
    def wrong():
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        processes.share([lambda: None, wrong], [2.0, 1.0], lambda cost: None, nullcontext(), 2)


def test_processes_are_as_many_as_idle_cores_and_no_more_than_work(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16), raising=False)
    running = iter([9] * processes.LOOKS + [31] * processes.LOOKS + [1] * processes.LOOKS)
    monkeypatch.setattr(Path, "read_text", lambda _: f"0 0 0 {next(running)}/400 1")
    monkeypatch.setattr(os, "getloadavg", lambda: (3.2, 0, 0), raising=False)
    assert processes.idle_cores() == 13
    monkeypatch.setattr(os, "getloadavg", lambda: (30.0, 0, 0), raising=False)
    assert processes.idle_cores() == 1
    assert processes.idle_cores() == 16  # what the last minute had to do is done
    monkeypatch.setattr(Path, "read_text", lambda _: "another system")
    assert processes.idle_cores() == 1


def test_the_longest_job_comes_first_and_a_kernel_after_the_one_that_it_shares_functions_with(monkeypatch):
    done = []

    class Job:
        def __init__(self, name, cost, after=None):
            self.name, self.cost, self.after = name, cost, after

        def compile(self):
            done.append(self.name)

    first = Job("first", 1.0)
    jobs = [Job("short", 0.5), first, Job("long", 2.0), Job("after the first", 1.5, first)]
    monkeypatch.setattr(processes, "idle_cores", lambda: 1)
    jit.compile_together(jobs, "all")
    assert done == ["first", "after the first", "long", "short"]


def test_what_is_compiled_ahead_is_what_a_forecaster_calls(monkeypatch):
    ahead.restore_ridge()
    restore, calls = rescale.restore, []
    compiled = list(restore.signatures)
    monkeypatch.setattr(rescale, "restore", lambda *arrays: calls.append(restore(*arrays)))
    series = np.sin(np.arange(200.0)) * np.where(np.arange(200) < 100, 1.0, 1000.0)
    SepSAForecaster(2, lags=4, seasons=()).prequential(series)
    assert calls
    assert restore.signatures == compiled


def test_the_command_compiles_into_a_folder(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setenv("SEPSA_CACHE", "")
    monkeypatch.setattr(ahead, "compile_all", lambda processes: seen.append((os.environ["SEPSA_CACHE"], processes)))
    folder = tmp_path / "a" / "cache"
    done = CliRunner().invoke(cli.app, ["compile", "--to", str(folder), "--processes", "2"])
    assert (done.exit_code, done.output, seen) == (0, f"export SEPSA_CACHE={folder}\n", [(str(folder), 2)])
    (tmp_path / "file").touch()
    wrong = CliRunner().invoke(cli.app, ["compile", "--to", str(tmp_path / "file")])
    assert wrong.exit_code == 1
    assert "file exists" in wrong.stderr
