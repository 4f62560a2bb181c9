"""Disks that are full, folders that cannot be written, and two who write at once: the old checkpoint stays whole."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

import sepsa
from sepsa.checkpoint import CheckpointError
from sepsa.states.file import lock

OLD, NEW = {"a": np.zeros(2000)}, {"a": np.ones(200_000)}


@pytest.fixture
def old(tmp_path):
    path = tmp_path / "model.sepsa"
    sepsa.save(OLD, path)
    return path


def is_old(path):
    return np.array_equal(sepsa.load(path)["a"], OLD["a"]) and [p.name for p in path.parent.iterdir()] == [path.name]


@contextlib.contextmanager
def file_limit(size):
    """No file may grow beyond this: what a quota does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [0, 1, 100, 5000, 100_000, 1_500_000])
def test_where_there_is_no_room_the_old_one_stays(old, room):
    with file_limit(room), pytest.raises(OSError, match=r"File too large"):
        sepsa.save(NEW, old, keep=3)
    assert is_old(old)
    sepsa.save(NEW, old)
    assert np.array_equal(sepsa.load(old)["a"], NEW["a"])


def test_a_full_disk(tmp_path):
    """A file system of a megabyte, where one may be mounted."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    try:
        path = disk / "model.sepsa"
        sepsa.save(OLD, path)
        with pytest.raises(OSError, match="No space left on device"):
            sepsa.save(NEW, path)
        assert is_old(path)
        sepsa.save({"a": np.ones(3000)}, path)
        assert sepsa.load(path)["a"].sum() == 3000
    finally:
        subprocess.run(["umount", disk], check=True)


@contextlib.contextmanager
def nobody():
    """Without the rights of root, who may write anywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_that_cannot_be_written(old):
    old.parent.chmod(0o555)
    try:
        with nobody(), pytest.raises(PermissionError):
            sepsa.save(NEW, old)
    finally:
        old.parent.chmod(0o755)
    assert is_old(old)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        sepsa.save(OLD, tmp_path / "none" / "model.sepsa")


def test_two_writers_in_one_process(old):
    with lock(old), pytest.raises(CheckpointError, match="is being written by another process: wait for it"):
        sepsa.save(NEW, old)
    assert is_old(old)
    sepsa.save(NEW, old)


HOLDS = """
import os, sys, time
from pathlib import Path
from sepsa.states.file import lock
with lock(Path(sys.argv[1])):
    print(os.getpid(), flush=True)
    time.sleep(60)
"""


def test_a_writer_that_dies_gives_the_right_back(old, preloaded_bin):
    holder = subprocess.Popen([preloaded_bin / "python", "-c", HOLDS, str(old)], stdout=subprocess.PIPE, text=True)
    pid = int(holder.stdout.readline())  # it holds the lock
    with pytest.raises(CheckpointError, match="is being written by another process"):
        sepsa.save(NEW, old)
    os.kill(pid, signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    sepsa.save(NEW, old)
    assert np.array_equal(sepsa.load(old)["a"], NEW["a"])
    assert not Path(f"{old}.lock").exists()


def test_many_write_and_many_read_at_once(tmp_path, tally):
    """Each reader sees a whole checkpoint, whoever wrote it; a writer is refused or writes whole."""
    path = tmp_path / "model.sepsa"
    sepsa.save({"a": np.full(5000, -1.0)}, path)
    children = []
    for i in range(3):
        pid = os.fork()
        if pid == 0:
            try:
                end = time.monotonic() + 1.0
                while time.monotonic() < end:
                    with contextlib.suppress(CheckpointError):
                        sepsa.save({"a": np.full(5000, float(i))}, path, keep=2)
            finally:
                os._exit(0)
        children.append(pid)
    reads = 0
    while children:
        for pid in list(children):
            if os.waitpid(pid, os.WNOHANG)[0]:
                children.remove(pid)
        values = sepsa.load(path)["a"]
        assert len(values) == 5000
        assert (values == values[0]).all()
        reads += 1
    tally("reads beside three writers", reads)
    assert reads > 10


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a file that Python closes for us
def test_an_interrupt_while_writing_leaves_the_old_or_the_new(old, tally):
    """Ctrl-C at random instants of a save."""
    rng = np.random.default_rng(0)

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    hit = 0
    try:
        for i in range(100):
            marker = {"a": np.full(20_000, float(i))}
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(1e-5, 2e-3)))
                    sepsa.save(marker, old)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:  # outside the finally, before which the timer may still end
                hit += 1
            values = sepsa.load(old)["a"]
            assert (values == values[0]).all()
    finally:
        signal.signal(signal.SIGALRM, before)
    tally("interrupts of a save", hit)
    assert hit > 5
    sepsa.save(OLD, old)
    assert is_old(old)
