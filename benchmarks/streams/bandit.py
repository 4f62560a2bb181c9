"""MNIST as a contextual bandit: ten arms, reward 1 for the right class, 4,096 rounds; accumulated regret.

    SEPSA_DATA=... python benchmarks/streams/bandit.py [--methods ...] [--seeds 10] [--jobs 1] [--device cuda]
        [--peer PYTHON]
    SEPSA_DATA=... python benchmarks/streams/bandit.py --choose
    python benchmarks/streams/bandit.py --table | --figure   # from the JSON

A round shows an image, an arm is pulled, and the reward of that arm alone is seen. A convolutional body has a head with
an output for each arm, `PerOutput(RLS())`, and `SepSA` replays the rounds so far, in which each sample teaches the
output of the arm it pulled. Exploration is by a head of its own on the same features, which learns each round once,
because a replayed sample is no further observation; it is made anew when the body has moved. Thompson sampling draws
weights from its posterior, UCB adds deviations to the mean.

Settings were chosen by `--choose` on rounds from the first 20,000 training images, with seeds that are not reported;
the reported seeds draw theirs from the other 50,000 images, training and test. A seed is recorded when it ends; what
the JSON holds is not run again. `--jobs` runs several seeds beside each other; `--peer` names a Python that has
bayesianbandits, for a linear bandit beside ours on the same features.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.measure import dispatch, mean_and_spread, write
from reproduction import data, runner
from sepsa import RLS, PerOutput, SepSA

ARMS, ROUNDS, APART = 10, 4096, 20_000


class Setting(NamedTuple):
    """One for all seeds."""

    explore: str = "thompson"  # or "ucb" or "greedy"
    noise: float = 0.1  # the deviation of a reward about its head: how much is explored
    ridge: float = 1.0  # of the heads that explore
    every: int = 32  # rounds between replays
    steps: int = 16
    batch: int = 64
    lr: float = 1e-3
    forgetting: float = 0.99  # of the heads that train the body
    width: int = 128
    body: str = "convolutions"  # or "pixels": none


def network(setting: Setting) -> nn.Sequential:
    """A body, and a head with an output for each arm."""
    if setting.body == "pixels":
        body = nn.Sequential(nn.AvgPool2d(2), nn.Flatten())
    else:
        body = nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 7 * 7, setting.width), nn.ReLU(),
        )  # fmt: skip
    return nn.Sequential(body, zero_head(setting.width))


def zero_head(width: int) -> nn.Linear:
    head = nn.Linear(width, ARMS)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def explorer(setting: Setting, device: str) -> PerOutput[RLS]:
    """A head that knows nothing yet."""
    # The bias has the ridge too: without it an arm that was never pulled would have no prior to explore by.
    return PerOutput(RLS(ridge=setting.ridge, bias_ridge="ridge")).bind(zero_head(setting.width).to(device))


def pull(head: PerOutput[RLS], h: Tensor, setting: Setting, generator: torch.Generator) -> int:
    """The arm that the features (1, width) of a round call for."""
    if setting.explore == "greedy":
        scores = head.predict(h)
    elif setting.explore == "ucb":
        mean, std = head.predict(h, return_std=True, noise=setting.noise)
        scores = mean + (std.square() - setting.noise**2).clamp(min=0).sqrt()  # without the noise itself
    else:
        scores = head.sample(h, noise=setting.noise, generator=generator)
    return int(scores.argmax())


def play(images: Tensor, labels: Tensor, setting: Setting, seed: int, device: str) -> dict[str, Any]:
    """The regret of all rounds, and of each eighth of them."""
    torch.manual_seed(seed)
    model = network(setting).to(device)
    body = model[0]
    if setting.steps:
        solver = PerOutput(RLS(forgetting=setting.forgetting))
        optimizer = SepSA(model, torch.optim.Adam, solver=solver, lr=setting.lr)
    head, generator = explorer(setting, device), torch.Generator(device).manual_seed(seed)
    images = images.to(device)
    rewards = torch.full((len(images), ARMS), torch.nan, device=device)  # NaN: that arm was not pulled
    losses = []
    for k, label in enumerate(labels.tolist()):
        with torch.no_grad():
            h = body(images[k : k + 1])
        arm = pull(head, h, setting, generator)
        rewards[k, arm] = float(label == arm)
        losses.append(int(label != arm))
        head.update(h, rewards[k : k + 1])
        if setting.steps and (k + 1) % setting.every == 0:
            for _ in range(setting.steps):
                rows = torch.randint(0, k + 1, (setting.batch,), device=device, generator=generator)
                optimizer.learn(images[rows], rewards[rows])
            head = explorer(setting, device)
            with torch.no_grad():
                head.update(body(images[: k + 1]), rewards[: k + 1])
    return summed(losses)


def rounds(seed: int, chosen_on: bool) -> tuple[Tensor, Tensor]:
    """Images and labels of one game."""
    whole = data.load("mnist")
    if chosen_on:
        x, y = whole.train_inputs[:APART], whole.train_targets[:APART]
    else:
        x = torch.cat([whole.train_inputs[APART:], whole.test_inputs])
        y = torch.cat([whole.train_targets[APART:], whole.test_targets])
    rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:ROUNDS]
    return x[rows], y[rows].argmax(1)


METHODS = {
    "neural-linear, Thompson": Setting(),
    "neural-linear, UCB": Setting(explore="ucb", noise=0.5),
    "neural-linear, greedy": Setting(explore="greedy"),
    "linear on pixels, UCB": Setting(explore="ucb", noise=0.1, steps=0, width=14 * 14, body="pixels"),
    "linear on pixels, Thompson": Setting(noise=0.03, steps=0, width=14 * 14, body="pixels"),
}
PEER_METHOD = "bayesianbandits, linear on pixels, Thompson"
SOURCE = "github.com/neural-bandits/calvera, experiments/datasets/mnist, one seed"
PRINTED = {"NeuralTS": 888, "NeuralUCB": 898, "NeuralLinear": 1948, "LinTS": 3585, "random": 3715}


def rows_known() -> list[dict[str, Any]]:
    path = Path(__file__).with_suffix(".json")
    return json.loads(path.read_text())["rows"] if path.exists() else []


# What runs in the peer's environment: the same features, prior and noise as "linear on pixels, Thompson".
PEER = """
import json, sys, time
from importlib.metadata import version
import numpy as np
import bayesianbandits as bb

given, seed = np.load(sys.argv[1]), int(sys.argv[2])
X, y, precision = given["X"], given["y"], float(given["precision"])
start = time.perf_counter()
prior = precision * float(given["ridge"])
arms = [bb.Arm(j, learner=bb.NormalRegressor(alpha=prior, beta=precision)) for j in range(10)]
agent = bb.ContextualAgent(arms, bb.ThompsonSampling(), random_seed=seed)
losses = []
for k in range(len(X)):
    (arm,) = agent.pull(X[k : k + 1])
    losses.append(int(y[k] != arm))
    agent.select_for_update(arm).update(X[k : k + 1], np.array([float(y[k] == arm)]))
told = {"seconds": time.perf_counter() - start, "version": "bayesianbandits " + version("bayesianbandits")}
print(json.dumps(told | {"losses": losses}))
"""


def summed(losses: list[int]) -> dict[str, Any]:
    part = len(losses) // 8
    return {"regret": sum(losses), "eighths": [sum(losses[i * part : (i + 1) * part]) for i in range(8)]}


def theirs(python: str, seed: int) -> dict[str, Any]:
    """bayesianbandits in its own process; importing it is not in the seconds."""
    setting, (images, labels) = METHODS["linear on pixels, Thompson"], rounds(seed, False)
    X = network(setting)[0](images).double()
    given = {"X": torch.cat([X, X.new_ones(len(X), 1)], 1).numpy(), "y": labels.numpy()}
    with tempfile.NamedTemporaryFile(suffix=".npz") as file:
        np.savez(file, **given, precision=setting.noise**-2, ridge=setting.ridge)
        file.flush()
        command = [python, "-c", PEER, file.name, str(seed)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{python} failed: {done.stderr[-2000:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    return {**summed(told["losses"]), "seconds": told["seconds"], "version": told["version"]}


def run(item: tuple[str, int, str, str | None]) -> dict[str, Any]:
    method, seed, device, peer = item
    if method == PEER_METHOD:
        assert peer is not None
        return {"method": method, "seed": seed, **theirs(peer, seed), "device": "cpu"}
    game = rounds(seed, False)
    start = time.perf_counter()
    told = play(*game, METHODS[method], seed, device)
    where = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {"method": method, "seed": seed, **told, "seconds": time.perf_counter() - start, "device": where}


def measure(methods: list[str], seeds: int, device: str, jobs: int, peer: str | None) -> None:
    methods = [*methods, PEER_METHOD] if peer else methods
    rows = rows_known()
    done = {(row["method"], row["seed"]) for row in rows}
    every = [(method, seed) for seed in range(seeds) for method in methods]
    todo = [(*one, device, peer) for one in every if one not in done]
    printed = [{"method": f"calvera {k}, printed", "regret": v, "source": SOURCE} for k, v in PRINTED.items()]
    settings = {name: setting._asdict() for name, setting in METHODS.items()}
    for _, row, _ in runner.each(run, todo, jobs):
        rows.append(row)
        print(row, flush=True)
        write(__file__, {"settings": settings, "printed": printed, "rows": rows})


def table() -> None:
    rows = rows_known()
    print("## MNIST as a contextual bandit\n")
    print("| method | seeds | accumulated regret | of it in the last 512 rounds | seconds |\n|---|---|---|---|---|")
    for method in (*METHODS, PEER_METHOD):
        own = [row for row in rows if row["method"] == method]
        if own:
            columns = (
                [row["regret"] for row in own],
                [row["eighths"][-1] for row in own],
                [row["seconds"] for row in own],
            )
            cells = [mean_and_spread(values, ".0f") for values in columns]
            print(f"| {method} | {len(own)} | {' | '.join(cells)} |")
    for name, regret in PRINTED.items():
        print(f"| calvera {name}, printed | 1 | {regret} | | |")


def figure() -> None:
    """Accumulated regret against rounds, the mean over seeds."""
    from matplotlib import pyplot as plt

    rows = rows_known()
    fig, ax = plt.subplots(figsize=(6, 3.8), layout="constrained")
    for method in METHODS:
        games = torch.tensor([row["eighths"] for row in rows if row["method"] == method])
        if len(games):
            total = torch.cat([torch.zeros(len(games), 1), games.cumsum(1)], 1)
            at = torch.arange(9) * (ROUNDS // 8)
            (line,) = ax.plot(at, total.mean(0), label=f"{method}, {len(games)} seeds")
            ax.fill_between(at, total.min(0).values, total.max(0).values, alpha=0.2, color=line.get_color())
    for name in ("NeuralTS", "NeuralLinear"):
        ax.axhline(PRINTED[name], color="k", lw=0.8, ls=":")
        ax.text(0, PRINTED[name] + 20, f"calvera's {name} after all rounds, printed", fontsize=8)
    ax.set(xlabel="rounds", ylabel="accumulated regret", ylim=(0, 2100), title="MNIST as a contextual bandit")
    ax.legend(fontsize=8, loc=(0.02, 0.57))
    fig.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


def choose(device: str) -> None:
    """Two ways to explore, and how much, with each body."""
    noises = {"convolutions": (0.03, 0.1, 0.3, 0.5), "pixels": (0.03, 0.1, 0.3)}
    bodies = {"convolutions": Setting(), "pixels": METHODS["linear on pixels, Thompson"]}
    for body, base in bodies.items():
        for explore in ("thompson", "ucb"):
            for noise in noises[body]:
                setting = base._replace(explore=explore, noise=noise)
                told = [play(*rounds(seed, True), setting, seed, device)["regret"] for seed in (100, 101)]
                print(body, explore, noise, told, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--peer")
    parser.add_argument("--choose", action="store_true")
    dispatch(
        parser,
        {"table": lambda _: table(), "figure": lambda _: figure(), "choose": lambda o: choose(o.device)},
        lambda o: measure(o.methods, o.seeds, o.device, o.jobs, o.peer),
    )


if __name__ == "__main__":
    main()
