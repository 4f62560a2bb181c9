"""Files that are written: whole or not at all, and over nothing of the user.

The old file stays where there is no room, no right or a second writer. No device, FIFO, folder or file of the user is
replaced or deleted, no planted link is followed, and no broken model replaces a good one.
"""

import contextlib
import os
import resource
import signal
import socket
import stat
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import sepsa
from command_line import invoke
from reproduction import records
from sepsa.checkpoint import CheckpointError, inspect
from sepsa.shell.model import TableModel
from sepsa.states import output
from sepsa.states.file import lock

OLD, NEW = {"a": np.zeros(2000)}, {"a": np.ones(200_000)}
TABLE = "x,y\n" + "".join(f"{i % 7},{2 * (i % 7)}\n" for i in range(60)) + "1\n"
BEGINS = {
    "--predictions": b"line,prediction\n2,",
    "--quarantine": b"line,reason,text\n62,",
    "--report": b"<!doctype html>",
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stream(options, more="", code=0):
    """What `sepsa stream` says of the table and these further lines."""
    Path("t.csv").write_text(TABLE + more)
    options = options if "--predictions" in options else f"--predictions p.csv {options}"
    result = invoke(f"stream t.csv --target y {options}".split())
    assert result.exit_code == code, result.output
    return result.stderr


# ---------------------------------------------------------------------- no room, no right, a second writer


@pytest.fixture
def old(folder):
    path = folder / "model.sepsa"
    sepsa.save(OLD, path)
    return path


def check_old(path):
    """The old checkpoint is there, alone, and can be replaced."""
    assert np.array_equal(sepsa.load(path)["a"], OLD["a"])
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    sepsa.save({"a": np.ones(3000)}, path)
    assert sepsa.load(path)["a"].sum() == 3000


@pytest.mark.parametrize("room", [0, 1, 100, 5000, 100_000, 1_500_000])
def test_where_there_is_no_room_the_old_one_stays(old, room):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))  # no file may grow beyond it: what a quota does
    try:
        with pytest.raises(OSError, match=r"File too large"):
            sepsa.save(NEW, old)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    check_old(old)


def test_a_folder_that_cannot_be_written_or_is_not_there(old):
    user = os.geteuid()
    old.parent.chmod(0o555)
    os.seteuid(user or 65534)  # without the rights of root, who may write anywhere
    try:
        with pytest.raises(PermissionError):
            sepsa.save(NEW, old)
    finally:
        os.seteuid(user)
        old.parent.chmod(0o755)
    with pytest.raises(FileNotFoundError):
        sepsa.save(OLD, "none/model.sepsa")
    check_old(old)


HOLDS = """
import os, sys, time
from pathlib import Path
from sepsa.states.file import lock
with lock(Path(sys.argv[1])):
    print(os.getpid(), flush=True)
    time.sleep(60)
"""


def test_a_second_writer_is_refused_and_one_that_dies_gives_the_right_back(old, preloaded_bin):
    words = "is being written by another process: wait for it"
    with lock(old), pytest.raises(CheckpointError, match=words):
        sepsa.save(NEW, old)
    holder = subprocess.Popen([preloaded_bin / "python", "-c", HOLDS, str(old)], stdout=subprocess.PIPE, text=True)
    pid = int(holder.stdout.readline())  # it holds the lock
    with pytest.raises(CheckpointError, match=words):
        sepsa.save(NEW, old)
    os.kill(pid, signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    sepsa.save(OLD, old)
    check_old(old)


def test_many_write_and_many_read_at_once(old, tally):
    """Each reader sees a whole checkpoint, whoever wrote it; a writer is refused or writes whole."""
    children = []
    for i in range(3):
        pid = os.fork()
        if pid == 0:
            try:
                end = time.monotonic() + 1.0
                while time.monotonic() < end:
                    with contextlib.suppress(CheckpointError):
                        sepsa.save({"a": np.full(2000, float(i))}, old)
            finally:
                os._exit(0)
        children.append(pid)
    reads = 0
    while children:
        for pid in list(children):
            if os.waitpid(pid, os.WNOHANG)[0]:
                children.remove(pid)
        values = sepsa.load(old)["a"]
        assert len(values) == 2000
        assert (values == values[0]).all()
        reads += 1
    tally("reads beside three writers", reads)
    assert reads > 10


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a file that Python closes for us
def test_an_interrupt_while_writing_leaves_the_old_or_the_new(old, tally):
    """Ctrl-C at random instants of a save."""
    rng, hit = np.random.default_rng(0), 0
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
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
    check_old(old)


# ---------------------------------------------------------------------- devices, folders, links and files of the user


@pytest.mark.parametrize("option", BEGINS)
def test_a_fifo_is_written_to(option):
    """And a device, which is anything that is no file and no folder."""
    os.mkfifo("fifo")
    reader = os.open("fifo", os.O_RDWR | os.O_NONBLOCK)  # so that no writer waits
    for checkpoint in ("", "", "--checkpoint m.sepsa"):
        assert "60 rows" in stream(f"{option} fifo {checkpoint}")
        assert os.read(reader, 1 << 16).lower().startswith(BEGINS[option])
        assert stat.S_ISFIFO(os.stat("fifo").st_mode)
    assert "no new rows" in stream(f"{option} fifo --checkpoint m.sepsa")
    os.close(reader)


def test_no_checkpoint_goes_to_a_device_or_comes_from_one():
    os.mkfifo("fifo")  # whoever opens it waits for ever
    words = "fifo is a device or a FIFO, from which no checkpoint can be loaded: give a file"
    assert words in stream("--checkpoint fifo", code=1)
    with pytest.raises(CheckpointError, match="is a device or a FIFO, from which no checkpoint"):
        inspect("fifo")
    for ask in (sepsa.load, lambda path: sepsa.save({"a": 1}, path)):
        with pytest.raises(CheckpointError, match="is a device or a FIFO"):
            ask("fifo")
    assert stat.S_ISFIFO(os.stat("fifo").st_mode)
    assert not Path("fifo.lock").exists()
    with socket.socket(socket.AF_UNIX) as s:
        s.bind("socket")
    with pytest.raises(OSError, match="is a disk or a socket"):
        output.replace(Path("socket"), [b"x"])
    assert stat.S_ISSOCK(os.stat("socket").st_mode)


@pytest.mark.parametrize("option", [*BEGINS, "--checkpoint"])
def test_a_folder_and_a_path_that_cannot_be_written_stop_before_learning(option, monkeypatch):
    monkeypatch.setattr(TableModel, "learn", lambda *_: pytest.fail("it learns"))
    Path("folder").mkdir()
    assert "is a directory" in stream(f"{option} folder", code=1)
    assert "no such file or directory" in stream(f"{option} none/x", code=1)
    assert Path("folder").is_dir()


def test_no_planted_link_is_followed():
    """A file of ours under a name that is known before would write wherever a link of that name points."""
    Path("mine").write_text("precious")
    for name in ("m.sepsa.tmp", "r.html.tmp", "j.json.new", "j.json.tmp"):
        Path(name).symlink_to("mine")
    stream("--checkpoint m.sepsa --report r.html")
    records.write(Path("j.json"), "{}")
    assert Path("mine").read_text() == "precious"
    assert Path("m.sepsa.tmp").is_symlink()
    Path("other.lock").symlink_to("made")
    with pytest.raises(OSError, match="symbolic links"):
        sepsa.save({"a": 1}, "other")
    assert not Path("made").exists()


def test_a_file_that_is_replaced_keeps_its_permissions():
    def write(more=""):
        sepsa.save({"a": np.zeros(3)}, "a.sepsa")
        records.write(Path("j.json"), "{}")
        stream("--predictions p.csv --quarantine q.csv --checkpoint m.sepsa --save-every 1 --report r.html", more)

    write()
    files = [Path(name) for name in ("a.sepsa", "j.json", "m.sepsa", "p.csv", "q.csv", "r.html")]
    for path in files:
        path.chmod(0o640)
        if os.geteuid() == 0:
            os.chown(path, 12345, 12345)
    write("1,2\n")
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) == 0o640, path.name
        assert os.geteuid() != 0 or path.stat().st_uid == 12345, path.name


def test_no_file_of_the_user_is_deleted():
    for value in (1, 2):
        sepsa.save({"a": value}, "m.sepsa")
    Path("m.sepsa.lock").write_text("mine")
    with pytest.raises(CheckpointError, match=r"m\.sepsa\.lock exists and is not a lock file of sepsa"):
        sepsa.save({"a": 3}, "m.sepsa")
    assert Path("m.sepsa.lock").read_text() == "mine"
    assert sepsa.load("m.sepsa") == {"a": 2}


def test_what_a_killed_process_left_is_removed_and_nothing_else(folder):
    left, others = "m.sepsa.0123456789abcdef.tmp", ("m.sepsa.tmp", "m.sepsa.xyz.tmp", "n.sepsa.0123456789abcdef.tmp")
    for name in (left, "m.sepsa.lock", *others):
        Path(name).write_text("" if name.endswith("lock") else "half")
    sepsa.save({"a": 1}, "m.sepsa")
    assert sorted(file.name for file in folder.iterdir()) == sorted(["m.sepsa", *others])


# ---------------------------------------------------------------------- NaN over a good checkpoint


@pytest.mark.parametrize("together", [False, True])
def test_a_broken_model_is_not_saved_over_a_good_one(together):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    model.register_buffer("mask", torch.full((2,), -torch.inf))  # as attention has
    optimizer = sepsa.SepSA(model, torch.optim.Adam, lr=1e-3)
    run = {"optimizer": optimizer, "losses": np.zeros(2)} if together else optimizer
    for _ in range(2):
        sepsa.save(run, "run.sepsa")
    if together:
        sepsa.save(run | {"losses": np.array([np.nan])}, "run.sepsa")  # a plain value is no model
    good = Path("run.sepsa").read_bytes()
    model[0].weight.data[0, 0] = torch.nan
    with pytest.raises(CheckpointError, match=r"\['model'\]\['0.weight'\] has NaN or Inf where the checkpoint at"):
        sepsa.save(run, "run.sepsa")
    assert Path("run.sepsa").read_bytes() == good
    sepsa.save(run, "other.sepsa")
    sepsa.save(run, "run.sepsa", force=True)
    sepsa.save(run, "run.sepsa")  # it holds no good one any more
    model[0].weight.data.zero_()
    sepsa.load("run.sepsa", {"optimizer": optimizer} if together else optimizer)
    assert model[0].weight[0, 0].isnan()


def test_missing_values_in_the_first_rows_are_no_damage():
    X = np.random.default_rng(0).normal(size=(20, 2))
    model = sepsa.SepSARegressor().partial_fit(X, X[:, 0])
    model.save("m.sepsa")
    X[3, 1] = np.nan
    model.partial_fit(X, X[:, 0]).save("m.sepsa")
    assert "finite         yes" in invoke(["inspect", "m.sepsa"]).stdout


def test_the_command_saves_a_broken_model_only_by_force(monkeypatch):
    stream("--checkpoint m.sepsa")
    good, real = Path("m.sepsa").read_bytes(), TableModel.state_dict

    def broken(self):
        state = real(self)
        if state["learner"]["body"] is not None:
            state["learner"]["body"]["offset"][0] = np.nan
        return state

    monkeypatch.setattr(TableModel, "state_dict", broken)
    told = stream("--checkpoint m.sepsa", more="3,6\n", code=1)
    assert "state['learner']['body']['offset'] has NaN or Inf" in told
    assert Path("m.sepsa").read_bytes() == good
    stream("--checkpoint m.sepsa --force", more="3,6\n")
    assert Path("m.sepsa").read_bytes() != good
