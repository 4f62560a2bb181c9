"""Chaotic series by a random recurrent body of 100 units and an RLS readout, one step ahead and in a closed loop.

    python benchmarks/forecast/reservoir.py [--peer PYTHON] [--seeds 10]
    python benchmarks/forecast/reservoir.py --choose 60
    python benchmarks/forecast/reservoir.py --table | --figure

The Mackey-Glass task is that of reservoirpy's README: its series of 2,000 values, of which the last 400 are predicted,
100 unlearned values at the start, 100 units, root mean squared error; printed there: 0.0020. The Lorenz task is made in
the same way from 6,000 values at steps of 0.03. The body is random and rests; the readout learns one value at a time.
Then the loop is closed: from the first test value on the network sees its own predictions, which are valid until their
error exceeds 0.4 of the series' deviation.

`--peer` names a Python that has reservoirpy; it runs in turn with ours, seed by seed, with the README's setting and
with ours. Settings were chosen by `--choose` on other histories and other bodies than those reported. A seed is
recorded when it ends; what the JSON holds is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.integrate import solve_ivp
from torch import Tensor, nn

from benchmarks.measure import dispatch, mean_and_spread, write
from sepsa import RLS

Array = NDArray[np.float64]
UNITS, WARMUP = 100, 100


PRINTED = [
    {"method": "reservoirpy's README, printed", "rmse": 0.0020282, "source": "github.com/reservoirpy/reservoirpy"}
]


class Setting(NamedTuple):
    """Of the body, and the readout's ridge."""

    radius: float  # the spectral radius of the recurrent weights
    leak: float
    inputs: float  # the size of the input weights
    bias: float
    ridge: float


class Task(NamedTuple):
    """A series (n, channels), the last `test` of which are predicted."""

    series: Array
    test: int


SETTINGS = {
    "Mackey-Glass": Setting(radius=1.1, leak=0.85, inputs=0.5, bias=0.3, ridge=1e-10),
    "Lorenz": Setting(radius=0.3, leak=1.0, inputs=0.5, bias=1.5, ridge=1e-10),
}


def mackey_glass(n: int, history: int = 5555) -> Array:
    """x' = 0.2 x(t - 17)/(1 + x(t - 17)^10) - 0.1 x, reservoirpy's way: `history` seeds the values before the first.

    Its steps of 1 go by four stages 2 - bk in place of Runge and Kutta's, which make the slope's factor another one.
    """
    a, b, delay = 0.2, 0.1, 17
    stages = [1.0]
    for first in (2.0, 2.0, 1.0):
        stages.append(first - b * stages[-1])
    x = [*(1.2 + 0.2 * (np.random.default_rng(history).random(delay) - 0.5)), 1.2]
    for _ in range(n - 1):
        late = x[-delay - 1]
        x.append(x[-1] + sum(stages) / 6 * (a * late / (1 + late**10) - b * x[-1]))
    return np.array(x[-n:])[:, None]


def lorenz(n: int, history: int = 5555) -> Array:
    """The Lorenz attractor at steps of 0.03, a hundred of them after a random start; divided by 20."""

    def slope(t: float, at: Array) -> list[float]:
        x, y, z = at
        return [10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z]

    start = 1 + np.random.default_rng(history).random(3)
    times = 0.03 * np.arange(n + 100)
    path = solve_ivp(slope, (0, times[-1]), start, t_eval=times, rtol=1e-10, atol=1e-10)
    return np.asarray(path.y.T[100:] / 20)


def tasks(history: int = 5555) -> dict[str, Task]:
    return {"Mackey-Glass": Task(mackey_glass(2000, history), 400), "Lorenz": Task(lorenz(6000, history), 1000)}


class Reservoir:
    """h <- (1 - leak) h + leak tanh(W h + V x + b), with W, V, b random and at rest."""

    def __init__(self, channels: int, setting: Setting, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        W = torch.randn(UNITS, UNITS, dtype=torch.float64, generator=g)
        self.W = W * (setting.radius / torch.linalg.eigvals(W).abs().max())
        self.V = setting.inputs * (2 * torch.rand(UNITS, channels, dtype=torch.float64, generator=g) - 1)
        self.b = setting.bias * (2 * torch.rand(UNITS, dtype=torch.float64, generator=g) - 1)
        self.leak = setting.leak
        self.h = torch.zeros(UNITS, dtype=torch.float64)

    def __call__(self, x: Tensor) -> Tensor:
        new = torch.tanh(torch.addmv(torch.addmv(self.b, self.V, x), self.W, self.h))
        self.h = torch.lerp(self.h, new, self.leak)
        return self.h


def predictions(task: Task, setting: Setting, seed: int, force: bool = False) -> tuple[Array, Array]:
    """Of the test values, one step ahead and in a closed loop, by one reservoir.

    With `force` it learns in the loop: while the readout learns, the body sees what the readout says, not the series.
    """
    series, n = torch.from_numpy(task.series), len(task.series) - 1 - task.test
    body = Reservoir(series.shape[1], setting, seed)
    head = nn.Linear(UNITS, series.shape[1], dtype=torch.float64)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    solver = RLS(ridge=setting.ridge, bias_ridge="ridge").bind(head)
    with torch.no_grad():
        for k in range(n):
            h = body(head(body.h) if force and k > 2 * WARMUP else series[k])
            if k >= WARMUP:
                solver.update(h[None], series[k + 1 : k + 2])
        learned = body.h
        ahead = torch.stack([head(body(x)) for x in series[n:-1]])
        body.h, x, alone = learned, series[n], []
        for _ in range(task.test):
            x = head(body(x))
            alone.append(x)
    return ahead.numpy(), torch.stack(alone).numpy()


def ours(task: Task, setting: Setting, seed: int, force: bool = False) -> dict[str, Any]:
    start = time.perf_counter()
    ahead, alone = predictions(task, setting, seed, force)
    return {"seconds": time.perf_counter() - start, **judged(task, ahead, alone)}


def judged(task: Task, ahead: Array, alone: Array) -> dict[str, Any]:
    """Errors of predictions one step ahead (test, channels), and of those of the closed loop."""
    truth = task.series[-task.test :]
    scale = math.sqrt(task.series.var(0).mean())
    apart = np.sqrt(((alone - truth) ** 2).mean(1)) / scale
    over = np.flatnonzero(~(apart < 0.4))
    rmse = math.sqrt(((ahead - truth) ** 2).mean())
    return {"rmse": rmse, "relative": rmse / scale, "valid": int(over[0]) if len(over) else task.test}


# What runs in the peer's environment; the series comes by standard input, the answer goes by standard output.
PEER = """
import json, sys, time
import numpy as np
import reservoirpy
from reservoirpy import ESN
from reservoirpy.nodes import RLS, Reservoir
from reservoirpy.mat_gen import uniform

job = json.load(sys.stdin)
series, test, seed = np.array(job["series"]), job["test"], job["seed"]
x, y = series[:-1], series[1:]
x_train, x_test, y_train = x[:-test], x[-test:], y[:-test]
if job["setting"] is None:
    body = dict(units=100, sr=1.25, lr=0.3, seed=seed)
    ridge = 1e-5
else:
    radius, leak, inputs, bias, ridge = job["setting"]
    body = dict(units=100, sr=radius, lr=leak, input_scaling=inputs, input_connectivity=1.0, rc_connectivity=1.0,
                Win=uniform, bias=uniform(100, low=-bias, high=bias, seed=seed), seed=seed)
start = time.perf_counter()
if job["readout"] != "ridge":
    model = Reservoir(**body) >> RLS(alpha=ridge, fit_bias=job["readout"] == "RLS")
    model.initialize(x_train, y_train)
    model.nodes[0].run(x_train[:100])
    model.partial_fit(x_train[100:], y_train[100:])
else:
    model = ESN(**body, ridge=ridge)
    model.fit(x_train, y_train, warmup=100)
ahead = model.run(x_test)
body, readout = model.nodes
body.reset()
body.run(x_train)
now, alone = x_test[0], []
for _ in range(test):
    now = readout(body(now))
    alone.append(np.asarray(now).tolist())
seconds = time.perf_counter() - start
print(json.dumps({"ahead": ahead.tolist(), "alone": alone, "seconds": seconds, "version": reservoirpy.__version__}))
"""


def theirs(python: str, task: Task, setting: Setting | None, seed: int, readout: str) -> dict[str, Any]:
    """The same of reservoirpy, in its own process; importing it is not in the seconds."""
    job = {"series": task.series.tolist(), "test": task.test, "seed": seed, "setting": setting, "readout": readout}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, "-c", PEER], input=json.dumps(job), capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        sys.exit(f"{python} failed: {done.stderr[-2000:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    errors = judged(task, np.array(told["ahead"]), np.array(told["alone"]))
    return {"seconds": told["seconds"], **errors, "version": f"reservoirpy {told['version']}"}


def rows_known() -> list[dict[str, Any]]:
    path = Path(__file__).with_suffix(".json")
    return json.loads(path.read_text())["rows"] if path.exists() else []


def measure(peer: str | None, seeds: int) -> None:
    rows = rows_known()
    done = {(row["series"], row["method"], row["seed"]) for row in rows}
    ours(Task(mackey_glass(300), 20), SETTINGS["Mackey-Glass"], 0)  # compiles the update, which is in no time told
    for seed in range(seeds):
        for name, task in tasks().items():
            setting = SETTINGS[name]
            turns: dict[str, Any] = {
                "sepsa RLS": lambda t=task, s=setting, k=seed: ours(t, s, k),
                "sepsa RLS, in the loop (FORCE)": lambda t=task, s=setting, k=seed: ours(t, s, k, force=True),
            }
            if peer:
                for label, theirs_setting, readout in (
                    ("reservoirpy ridge, README's setting", None, "ridge"),
                    ("reservoirpy RLS, README's setting", None, "RLS"),
                    ("reservoirpy ridge, our setting", setting, "ridge"),
                    ("reservoirpy RLS, our setting", setting, "RLS"),
                    ("reservoirpy RLS without its bias, our setting", setting, "RLS without bias"),
                ):
                    turns[label] = lambda t=task, s=theirs_setting, o=readout, k=seed: theirs(peer, t, s, k, o)
            for method, run in turns.items():
                if (name, method, seed) not in done:
                    rows.append({"series": name, "method": method, "seed": seed, **run()})
                    print(rows[-1], flush=True)
                    settings = {name: setting._asdict() for name, setting in SETTINGS.items()}
                    write(__file__, {"settings": settings, "printed": PRINTED, "rows": rows})


def choose(trials: int) -> None:
    """Random settings on other histories and bodies: the best mean logarithm of the error one step ahead."""
    rng = np.random.default_rng(0)
    pool = [(history, tasks(history)) for history in (1, 2)]
    for name in SETTINGS:
        found = []
        for _ in range(trials):
            setting = Setting(
                radius=float(rng.choice([0.3, 0.6, 0.8, 0.9, 1.0, 1.1, 1.25])),
                leak=float(rng.choice([0.3, 0.5, 0.7, 0.85, 1.0])),
                inputs=float(rng.choice([0.1, 0.2, 0.5, 1.0, 2.0])),
                bias=float(rng.choice([0.1, 0.3, 0.6, 1.0, 1.5])),
                ridge=float(rng.choice([1e-12, 1e-10, 1e-8, 1e-6])),
            )
            told = [ours(own[name], setting, 100 + history) for history, own in pool]
            score = statistics.fmean(math.log10(row["rmse"]) for row in told)
            found.append((score, setting, [row["valid"] for row in told]))
        for score, setting, valid in sorted(found)[:8]:
            print(name, f"{10**score:.3g}", setting, valid, flush=True)


def table() -> None:
    rows = rows_known()
    for name in SETTINGS:
        print(f"\n### {name}\n")
        print("| readout | seeds | RMSE one step ahead | steps alone until wrong | seconds |\n|---|---|---|---|---|")
        for method in dict.fromkeys(row["method"] for row in rows if row["series"] == name):
            own = [row for row in rows if (row["series"], row["method"]) == (name, method)]
            columns = (("rmse", ".2g"), ("valid", ".0f"), ("seconds", ".2f"))
            cells = [mean_and_spread([row[key] for row in own], form) for key, form in columns]
            print(f"| {method} | {len(own)} | {' | '.join(cells)} |")
    print(f"\n{PRINTED[0]['method']}: {PRINTED[0]['rmse']:.4f}")


def figure() -> None:
    """The closed loop of the first body on the test values, without and with learning in the loop."""
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(2, 1, figsize=(7, 4.5), layout="constrained")
    for ax, (name, task) in zip(axes, tasks().items(), strict=True):
        ax.plot(task.series[-task.test :][:400, 0], "k", lw=1, label=name)
        for label, force in (("RLS", False), ("RLS, in the loop", True)):
            _, alone = predictions(task, SETTINGS[name], 0, force)
            steps = judged(task, alone, alone)["valid"]
            ax.plot(alone[: steps + 15, 0], "--", lw=0.9, label=f"{label}, until it is wrong")
        low, high = task.series[:, 0].min(), task.series[:, 0].max()
        ax.set(xlabel="steps alone", ylim=(low - 0.4 * (high - low), high + 0.3 * (high - low)))
        ax.legend(fontsize=7, loc="lower left", ncols=3)
    fig.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--choose", type=int, default=0)
    dispatch(
        parser,
        {"table": lambda _: table(), "figure": lambda _: figure(), "choose": lambda o: choose(o.choose)},
        lambda o: measure(o.peer, o.seeds),
    )


if __name__ == "__main__":
    main()
