"""Outputs: no device, FIFO, folder or file of the user is replaced or deleted, and no planted link is followed."""

from __future__ import annotations

import os
import stat

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import sepsa
from sepsa import cli
from sepsa.checkpoint import CheckpointError, inspect
from sepsa.paper import records
from sepsa.states import output
from sepsa.stream.tables.model import TableModel

TABLE = "x,y\n" + "".join(f"{i % 7},{2 * (i % 7)}\n" for i in range(60)) + "1\n"
BEGINS = {
    "--predictions": b"line,prediction\n2,",
    "--quarantine": b"line,reason,text\n62,",
    "--report": b"<!doctype html>",
}


def stream(folder, *arguments, more=""):
    (folder / "t.csv").write_text(TABLE + more)
    defaults = [] if "--predictions" in arguments else ["--predictions", folder / "p.csv"]
    return CliRunner().invoke(
        cli.app, ["stream", str(folder / "t.csv"), "--target", "y", *map(str, defaults), *map(str, arguments)]
    )


def fifo(path):
    """A FIFO, and a descriptor that reads from it."""
    os.mkfifo(path)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK)  # so that no writer waits


def null(path):
    """A device that takes everything, as /dev/null; never that one itself."""
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root may make a device")
    try:
        path.read_bytes()
    except PermissionError:
        pytest.skip("the file system has no devices")


@pytest.mark.parametrize("option", BEGINS)
def test_a_fifo_is_written_to(option, tmp_path):
    path = tmp_path / "fifo"
    reader = fifo(path)
    for _ in range(2):
        result = stream(tmp_path, option, path)
        assert result.exit_code == 0, result.output
        assert os.read(reader, 1 << 16).lower().startswith(BEGINS[option])
        assert stat.S_ISFIFO(path.stat().st_mode)
    os.close(reader)


@pytest.mark.parametrize("option", BEGINS)
def test_a_device_is_written_to(option, tmp_path):
    path = tmp_path / "null"
    null(path)
    result = stream(tmp_path, option, path, "--checkpoint", tmp_path / "m.sepsa")
    assert result.exit_code == 0, result.output
    assert "60 rows" in result.stderr
    assert stat.S_ISCHR(path.stat().st_mode)
    again = stream(tmp_path, option, path, "--checkpoint", tmp_path / "m.sepsa")
    assert "no new rows" in again.stderr


def test_no_checkpoint_goes_to_a_device_or_comes_from_one(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)  # whoever opens it waits for ever
    result = stream(tmp_path, "--checkpoint", path)
    assert result.exit_code == 1
    assert "fifo is a device or a FIFO, from which no checkpoint can be loaded: give a file" in result.stderr
    with pytest.raises(CheckpointError, match="is a device or a FIFO, from which"):
        sepsa.save({"a": 1}, path)
    for read in (sepsa.load, inspect):
        with pytest.raises(CheckpointError, match="is a device or a FIFO, not a checkpoint: give a file"):
            read(path)
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert not (tmp_path / "fifo.lock").exists()


@pytest.mark.parametrize("option", ["--predictions", "--quarantine", "--checkpoint", "--report"])
def test_a_folder_and_a_path_that_cannot_be_written_stop_before_learning(option, tmp_path, monkeypatch):
    monkeypatch.setattr(TableModel, "learn", lambda *_: pytest.fail("it learns"))
    (tmp_path / "folder").mkdir()
    for path, words in (
        (tmp_path / "folder", "is a directory: give a file"),
        (tmp_path / "none" / "x", "no such file or directory: check the path"),
    ):
        result = stream(tmp_path, option, path)
        assert result.exit_code == 1, result.output
        assert words in result.stderr
    assert (tmp_path / "folder").is_dir()


def test_a_disk_and_a_socket_are_refused(tmp_path):
    import socket

    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(tmp_path / "socket"))
    with pytest.raises(OSError, match="is a disk or a socket"):
        output.replace(tmp_path / "socket", [b"x"])
    assert stat.S_ISSOCK((tmp_path / "socket").stat().st_mode)


def test_no_planted_link_is_followed(tmp_path):
    """A file of ours under a name that is known before would write wherever a link of that name points."""
    mine = tmp_path / "mine"
    mine.write_text("precious")
    for name in ("m.sepsa.tmp", "r.html.tmp", "j.json.new", "j.json.tmp"):
        (tmp_path / name).symlink_to(mine)
    assert stream(tmp_path, "--checkpoint", tmp_path / "m.sepsa", "--report", tmp_path / "r.html").exit_code == 0
    records.write(tmp_path / "j.json", "{}")
    assert mine.read_text() == "precious"
    assert (tmp_path / "m.sepsa.tmp").is_symlink()
    (tmp_path / "other.lock").symlink_to(tmp_path / "made")
    with pytest.raises(OSError, match="symbolic links"):
        sepsa.save({"a": 1}, tmp_path / "other")
    assert not (tmp_path / "made").exists()


def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path):
    def write(more=""):
        sepsa.save({"a": np.zeros(3)}, tmp_path / "a.sepsa")
        records.write(tmp_path / "j.json", "{}")
        assert stream(
            tmp_path, "--predictions", tmp_path / "p.csv", "--quarantine", tmp_path / "q.csv",
            "--checkpoint", tmp_path / "m.sepsa", "--every", 1, "--report", tmp_path / "r.html", more=more,
        ).exit_code == 0  # fmt: skip

    write()
    files = [tmp_path / name for name in ("a.sepsa", "j.json", "m.sepsa", "p.csv", "q.csv", "r.html")]
    for path in files:
        path.chmod(0o640)
        if os.geteuid() == 0:
            os.chown(path, 12345, 12345)
    write("1,2\n")
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) == 0o640, path.name
        assert os.geteuid() != 0 or path.stat().st_uid == 12345, path.name


def test_no_file_of_the_user_is_deleted(tmp_path):
    path = tmp_path / "m.sepsa"
    sepsa.save({"a": 1}, path, keep=3)
    sepsa.save({"a": 2}, path, keep=3)
    (tmp_path / "m.sepsa.2").write_text("mine")
    with pytest.raises(
        CheckpointError, match=r"keep=3 needs the name .*m\.sepsa\.2, which is not a checkpoint: move it"
    ):
        sepsa.save({"a": 3}, path, keep=3)
    assert (tmp_path / "m.sepsa.2").read_text() == "mine"
    (tmp_path / "m.sepsa.lock").write_text("mine")
    with pytest.raises(CheckpointError, match=r"m\.sepsa\.lock exists and is not a lock file of sepsa"):
        sepsa.save({"a": 3}, path)
    assert (tmp_path / "m.sepsa.lock").read_text() == "mine"
    assert sepsa.load(path) == {"a": 2}


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
    path = tmp_path / "m.sepsa"
    left, others = "m.sepsa.0123456789abcdef.tmp", ("m.sepsa.tmp", "m.sepsa.xyz.tmp", "n.sepsa.0123456789abcdef.tmp")
    for name in (left, "m.sepsa.lock", *others):
        (tmp_path / name).write_text("" if name.endswith("lock") else "half")
    sepsa.save({"a": 1}, path)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(["m.sepsa", *others])


# ---------------------------------------------------------------------- NaN over a good checkpoint


def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    model.register_buffer("mask", torch.full((2,), -torch.inf))  # as attention has
    optimizer = sepsa.SepSA(model, torch.optim.Adam, lr=1e-3)
    optimizer.learn(torch.randn(8, 3), torch.randn(8, 1))
    return optimizer


@pytest.mark.parametrize("together", [False, True])
def test_a_broken_model_is_not_saved_over_a_good_one(together, tmp_path):
    path, optimizer = tmp_path / "run.sepsa", trained()
    run = {"optimizer": optimizer, "losses": np.zeros(2)} if together else optimizer
    into = {"optimizer": optimizer} if together else optimizer
    for _ in range(2):
        sepsa.save(run, path)
    if together:
        sepsa.save(run | {"losses": np.array([np.nan])}, path)  # a plain value is no model
    good = path.read_bytes()
    optimizer.model[0].weight.data[0, 0] = torch.nan
    with pytest.raises(CheckpointError, match=r"\['model'\]\['0.weight'\] has NaN or Inf where the checkpoint at"):
        sepsa.save(run, path)
    assert path.read_bytes() == good
    sepsa.save(run, tmp_path / "other.sepsa")
    sepsa.save(run, path, force=True)
    sepsa.save(run, path)  # it holds no good one any more
    assert sepsa.load(path, into) is not None
    assert optimizer.model[0].weight[0, 0].isnan()


def test_missing_values_in_the_first_rows_are_no_damage(tmp_path):
    X = np.random.default_rng(0).normal(size=(20, 2))
    model = sepsa.SepSARegressor().partial_fit(X, X[:, 0])
    model.save(tmp_path / "m.sepsa")
    X[3, 1] = np.nan
    model.partial_fit(X, X[:, 0])
    model.save(tmp_path / "m.sepsa")
    told = CliRunner().invoke(cli.app, ["inspect", str(tmp_path / "m.sepsa")]).stdout
    assert "finite         yes" in told


def test_the_command_saves_a_broken_model_only_by_force(tmp_path, monkeypatch):
    model = tmp_path / "m.sepsa"
    assert stream(tmp_path, "--checkpoint", model).exit_code == 0
    good, real = model.read_bytes(), TableModel.state_dict

    def broken(self):
        state = real(self)
        state["learner"]["offset"][0] = np.nan
        return state

    monkeypatch.setattr(TableModel, "state_dict", broken)
    result = stream(tmp_path, "--checkpoint", model, more="3,6\n")
    assert result.exit_code == 1
    assert "state['learner']['offset'] has NaN or Inf" in result.stderr
    assert model.read_bytes() == good
    assert stream(tmp_path, "--checkpoint", model, "--force", more="3,6\n").exit_code == 0
    assert model.read_bytes() != good
