"""The table "What happens on bad input" of docs/reliability.md: each row is a case here, and each case a row.

A case does what its row says and returns what the user sees: the error with its class, the warnings, or the lines and
the exit code of the command. Every part of the row's last cell in `backquotes` must occur in it. To add a row, write it
into the table and a function under the same words here.
"""

from __future__ import annotations

import os
import re
import subprocess
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import sepsa
from sepsa import cli

PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"
CASES = {}


def case(interface, given):
    def register(function):
        assert (interface, given) not in CASES
        CASES[interface, given] = function
        return function

    return register


def rows():
    """Interface, input and result of each row."""
    text = PAGE.read_text(encoding="utf-8").partition("## What happens on bad input\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines]


@pytest.mark.parametrize(("interface", "given", "result"), rows())
def test_what_the_table_says_happens(interface, given, result, tmp_path, monkeypatch, preloaded_bin):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.pathsep.join([str(preloaded_bin), os.environ["PATH"]]))
    if interface == "River":
        pytest.importorskip("river")
    seen = CASES[interface, given](tmp_path)
    told = re.findall(r"`([^`]+)`", result)
    assert told, "a row names what the user sees"
    assert not [part for part in told if part not in seen], seen


def test_every_case_has_its_row():
    assert {(interface, given) for interface, given, _ in rows()} == set(CASES)


def error_of(function, *arguments, unchanged=None, **options):
    """The error and the warnings of a call; what `unchanged` returns must be the same before and after."""
    before = unchanged and unchanged()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = ""
        try:
            function(*arguments, **options)
        except Exception as error:
            seen = f"{type(error).__name__}: {error}"
            assert not unchanged or unchanged() == before, "an error has changed the model"
    return "\n".join([seen, *(f"{warning.category.__name__}: {warning.message}" for warning in caught)])


# ---------------------------------------------------------------------- PyTorch


class Net:
    """A model with its SepSA, and batches."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.optimizer = sepsa.SepSA(self.model, torch.optim.Adam, lr=1e-3)
        self.X, self.y = torch.randn(8, 3), torch.randn(8, 1)

    def weights(self):
        return [parameter.tolist() for parameter in self.model.parameters()]

    def learn(self, X, y):
        return error_of(self.optimizer.learn, X, y, unchanged=self.weights)


@case("PyTorch", "NaN or Inf in the inputs of a batch")
def _(folder):
    net = Net()
    net.X[2, 1] = torch.nan
    return net.learn(net.X, net.y)


@case("PyTorch", "Inf in the targets")
def _(folder):
    net = Net()
    net.y[2] = torch.inf
    return net.learn(net.X, net.y)


@case("PyTorch", "targets of another shape than the outputs")
def _(folder):
    net = Net()
    return net.learn(net.X, torch.randn(8, 2))


@case("PyTorch", "a loop without `observe`")
def _(folder):
    net = Net()

    def loop():
        for _ in range(3):
            nn.functional.mse_loss(net.model(net.X), net.y).backward()
            net.optimizer.step()

    return error_of(loop)


@case("PyTorch", "`RLS(forgetting=1.2)`")
def _(folder):
    return error_of(sepsa.RLS, forgetting=1.2)


@case("PyTorch", "`RLS(ridge=1e-320)`")
def _(folder):
    return error_of(sepsa.RLS, ridge=1e-320)


@case("PyTorch", "`SoftmaxNewton(ridge=1e-30)`")
def _(folder):
    return error_of(sepsa.SoftmaxNewton, ridge=1e-30)


def head(solver, outputs=1):
    """A head alone, and rows for it."""
    torch.manual_seed(0)
    linear = nn.Linear(3, outputs, dtype=torch.float64)
    return solver.bind(linear), torch.randn(64, 3, dtype=torch.float64), torch.randn(64, outputs, dtype=torch.float64)


@case("PyTorch", "time stamps in milliseconds as a feature of the head")
def _(folder):
    def prediction(batch):
        solver, X, y = head(sepsa.RLS())
        X[:, 2] = 1.7e12 + 6e4 * torch.arange(64)
        for i in range(0, 64, batch):
            solver.update(X[i : i + batch], y[i : i + batch])
        return solver.predict(X).detach()

    one, many = prediction(1), prediction(64)
    return "exact" if torch.allclose(one, many, rtol=1e-9, atol=1e-9) else f"{(one - many).abs().max()}"


@case("PyTorch", "`unlearn` of a row that dwarfs all others")
def _(folder):
    solver, X, y = head(sepsa.RLS())
    solver.update(X, y)
    solver.update(1e5 * X[:1], y[:1])
    return error_of(solver.unlearn, 1e5 * X[:1], y[:1], unchanged=solver.linear.weight.tolist)


@case("PyTorch", "a captured step with huge rows")
def _(folder):
    solver, X, y = head(sepsa.RLS())
    solver.prepare_capture()
    before = solver.linear.weight.tolist()
    solver.update_captured(1e8 * X, y)
    assert solver.linear.weight.tolist() == before
    return error_of(lambda: solver.steps)


@case("PyTorch", "a model that squeezes its output")
def _(folder):
    net = Net()
    net.model.append(nn.Flatten(0))
    return net.learn(net.X, net.y)


@case("PyTorch", "class indices for `RLS`")
def _(folder):
    net = Net()
    net.model[2] = nn.Linear(4, 5)
    net.optimizer = sepsa.SepSA(net.model, torch.optim.SGD)
    return net.learn(net.X, torch.arange(8) % 5)


@case("PyTorch", "a sigmoid or softmax behind the head")
def _(folder):
    net = Net()
    net.model.append(nn.Sigmoid())
    return error_of(net.optimizer.learn, net.X, net.y)


@case("PyTorch", "a base instance without some parameters of the body")
def _(folder):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    return error_of(sepsa.SepSA, model, torch.optim.SGD(model[0].parameters(), lr=0.1))


def in_another_thread(function, *arguments):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments).result()


@case("PyTorch", "a prediction in another thread during `observe`")
def _(folder):
    net, alone = Net(), Net()
    with net.optimizer.observe(net.y):
        in_another_thread(net.model, net.X + 1)
        net.model(net.X)
    with alone.optimizer.observe(alone.y):
        alone.model(alone.X)
    return "not learned" if net.weights() == alone.weights() else "learned"


@case("PyTorch", "`observe` in two threads at once")
def _(folder):
    net = Net()
    with net.optimizer.observe(net.y):
        told = error_of(in_another_thread, net.optimizer.learn, net.X, net.y, unchanged=net.weights)
        net.model(net.X)
    return told


@case("PyTorch", "ranks with different dtypes")
def _(folder):
    program = """
import os, torch, torch.distributed as dist
from torch import nn
from sepsa import SepSA
rank = int(os.fork() == 0)
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/ranks", rank=rank, world_size=2)
model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).to(torch.float32 if rank else torch.float64)
optimizer = SepSA(model, torch.optim.SGD, process_group=dist.group.WORLD)
x = torch.ones(8, 3, dtype=model[0].weight.dtype)
try:
    optimizer.learn(x, x[:, :1])
except ValueError as error:
    print(f"rank {rank}: ValueError: {error}")
"""
    done = subprocess.run(["python", "-c", program], capture_output=True, text=True, timeout=120)
    assert "rank 0: ValueError" in done.stdout, done
    assert "rank 1: ValueError" in done.stdout, done
    return done.stdout


# ---------------------------------------------------------------------- scikit-learn and River

ROWS = np.random.default_rng(0).normal(size=(60, 3))


def fitted(cls=None):
    return (cls or sepsa.SepSARegressor)(random_state=0).partial_fit(ROWS, ROWS[:, 0])


def partial_fit(X, y):
    model = fitted()
    return error_of(model.partial_fit, X, y, unchanged=lambda: model.predict(ROWS).tolist())


@case("scikit-learn", "Inf in `X`")
def _(folder):
    return partial_fit(np.array([[1.0, np.inf, 0.0]]), [1.0])


@case("scikit-learn", "NaN in `y`")
def _(folder):
    return partial_fit(ROWS[:1], [np.nan])


@case("scikit-learn", "`X` with another number of columns")
def _(folder):
    return partial_fit(ROWS[:1, :2], [1.0])


@case("scikit-learn", "`predict` before `fit`")
def _(folder):
    return error_of(sepsa.SepSARegressor().predict, ROWS)


def frame_model():
    import pandas as pd

    frame = pd.DataFrame({"city": ["Oslo", "Rome"] * 30, "size": ROWS[:, 0]})
    return sepsa.SepSARegressor(random_state=0).partial_fit(frame, ROWS[:, 0]), frame


@case("scikit-learn", "an array after a DataFrame with text")
def _(folder):
    model, _ = frame_model()
    return error_of(model.predict, ROWS[:, :2])


@case("scikit-learn", "a DataFrame without a column that was learned")
def _(folder):
    model, frame = frame_model()
    return error_of(model.predict, frame[["size"]])


@case("scikit-learn", "a column that changes its type")
def _(folder):
    model, frame = frame_model()
    changed, before = frame.assign(size="large"), lambda: model.predict(frame).tolist()
    return error_of(model.partial_fit, changed, ROWS[:, 0], unchanged=before)


@case("scikit-learn", "a column of lists")
def _(folder):
    model, frame = frame_model()
    lists = frame.assign(city=[["a"]] * 60)
    return error_of(model.partial_fit, lists, ROWS[:, 0], unchanged=lambda: model.predict(frame).tolist())


@case("scikit-learn", "a text that `fit` has not seen")
def _(folder):
    model, frame = frame_model()
    new = frame.assign(city="Lima")
    assert model.predict(new).tolist() == model.predict(frame.assign(city=None)).tolist()
    model.partial_fit(frame.assign(city=["Lima", "Rome"] * 30), ROWS[:, 0] + np.array([9, 0] * 30))
    assert model.predict(new).tolist() != model.predict(frame.assign(city=None)).tolist()
    return "`fit`, `partial_fit`: as a missing value"


@case("scikit-learn", "`y` with several columns of classes")
def _(folder):
    return error_of(sepsa.SepSAClassifier().fit, ROWS, np.arange(120).reshape(60, 2) % 3)


def river_model():
    from sepsa.river import SepSARegressor

    model = SepSARegressor(seed=0)
    for x in ROWS:
        model.learn_one(dict(zip("abc", x.tolist(), strict=True)), float(x[0]))
    return model


def learn_one(x, y):
    model = river_model()
    return error_of(model.learn_one, x, y, unchanged=lambda: model.predict_one({"a": 1.0}))


@case("River", "a text or Inf as a feature")
def _(folder):
    return learn_one({"a": "red"}, 1.0)


@case("River", "a target that is None or NaN")
def _(folder):
    return learn_one({"a": 1.0}, None)


@case("River", "a sample that is no dict")
def _(folder):
    return learn_one([1.0], 1.0)


@case("River", "a running `StandardScaler` before the model")
def _(folder):
    from river import preprocessing

    from sepsa.river import SepSARegressor

    pipeline = preprocessing.StandardScaler() | SepSARegressor(seed=0)

    def learn():
        for x in ROWS:
            pipeline.learn_one(dict(zip("abc", x.tolist(), strict=True)), float(x[0]))

    return error_of(learn)


@case("River", "a dict of 20,000 features")
def _(folder):
    from sepsa.river import SepSARegressor

    model = SepSARegressor(seed=0)
    told = error_of(model.learn_one, dict.fromkeys(range(20_000), 1.0), 1.0)
    assert model._learner.engine.inputs == 512
    return told


# ---------------------------------------------------------------------- shell


def sepsa_command(*arguments):
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert isinstance(result.exception, SystemExit | None), result.exception
    return f"{result.stderr}exit code {result.exit_code}"


def stream(table, *arguments):
    Path("t.csv").write_text(table)
    return sepsa_command("stream", "t.csv", "--target", "y", "--predictions", "p.csv", *arguments)


GOOD = "x,y\n" + "".join(f"{i % 5},{i % 5}\n" for i in range(40))


def model_file():
    stream(GOOD, "--checkpoint", "m.sepsa")


@case("shell", "a row that cannot be used")
def _(folder):
    told = stream(GOOD + "1\n2,abc\n")
    return told + Path("p.quarantine.csv").read_text()


@case("shell", "a text as the first target")
def _(folder):
    return stream("x,y\n1,up\n")


@case("shell", "a target with a decimal comma")
def _(folder):
    return stream("x;y\n1;2,5\n")


@case("shell", "a column that the table does not have")
def _(folder):
    return stream(GOOD, "--drop", "z")


@case("shell", "a target that is dropped")
def _(folder):
    return stream(GOOD, "--drop", "y")


@case("shell", "an output in a folder that does not exist")
def _(folder):
    return stream(GOOD, "--report", "none/r.html")


@case("shell", "an output over the table")
def _(folder):
    return stream(GOOD, "--report", "t.csv")


@case("shell", "another table than the checkpoint's, by its first 4 KB")
def _(folder):
    model_file()
    return stream(GOOD[:-4] + "9,9\n", "--checkpoint", "m.sepsa")


@case("shell", "a table that was changed later, before the position of the checkpoint")
def _(folder):
    long = GOOD + GOOD.partition("\n")[2] * 49
    stream(long, "--checkpoint", "m.sepsa")
    return stream(long[:-4] + "9,9\n", "--checkpoint", "m.sepsa")


@case("shell", "`sepsa predict` with a misspelled column")
def _(folder):
    Path("t.csv").write_text("speed,height,y\n" + "".join(f"{i % 5},1,{i % 5}\n" for i in range(40)))
    sepsa_command("stream", "t.csv", "--target", "y", "--checkpoint", "m.sepsa")
    Path("new.csv").write_text("sped,height\n1,2\n")
    return sepsa_command("predict", "m.sepsa", "new.csv")


@case("shell", "a closed standard output")
def _(folder):
    Path("t.csv").write_text(GOOD)
    done = subprocess.run(
        ["bash", "-c", "sepsa stream t.csv --target y >&-"],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return f"{done.stderr}exit code {done.returncode}"


# ---------------------------------------------------------------------- files


@case("files", "a damaged checkpoint")
def _(folder):
    fitted().save("m.sepsa")
    data = bytearray(Path("m.sepsa").read_bytes())
    data[-5] ^= 1
    Path("m.sepsa").write_bytes(data)
    return error_of(sepsa.load, "m.sepsa") + sepsa_command("inspect", "m.sepsa")


@case("files", "a checkpoint of another class than `into`")
def _(folder):
    sepsa.save(sepsa.RLS().bind(nn.Linear(3, 1)), "m.sepsa")
    return error_of(sepsa.load, "m.sepsa", into=Net().optimizer)


@case("files", "a small file that claims a large model")
def _(folder):
    from breaking.test_files import forged, set_entry

    wide = set_entry("configuration", "hidden_layer_sizes", value=["tuple", [20_000, 20_000]])
    Path("m.sepsa").write_bytes(forged(wide, fitted().to_bytes()))
    return error_of(sepsa.load, "m.sepsa")


@case("files", "a table given to `sepsa inspect`")
def _(folder):
    Path("t.csv").write_text(GOOD)
    return sepsa_command("inspect", "t.csv")


@case("files", "a pickle given to `sepsa.load`")
def _(folder):
    torch.save({"a": 1}, "m.pt")
    return error_of(sepsa.load, "m.pt")


@case("files", "a FIFO or a device given to `sepsa.load` or `sepsa.save`")
def _(folder):
    os.mkfifo("fifo")
    return error_of(sepsa.load, "fifo") + error_of(sepsa.save, {"a": 1}, "fifo")


@case("files", "a model with NaN, saved over a good one")
def _(folder):
    net = Net()
    sepsa.save(net.optimizer, "m.sepsa")
    net.model[0].weight.data[0, 0] = torch.nan
    return error_of(sepsa.save, net.optimizer, "m.sepsa", unchanged=Path("m.sepsa").read_bytes)


@case("files", "a checkpoint that another process writes")
def _(folder):
    from sepsa.states.file import lock

    with lock(folder / "m.sepsa"):
        return error_of(sepsa.save, {"a": 1}, folder / "m.sepsa")


@case("files", "a pipeline given to `sepsa.save`")
def _(folder):
    from sklearn.pipeline import make_pipeline

    return error_of(sepsa.save, make_pipeline(fitted()), "m.sepsa")
