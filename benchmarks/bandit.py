"""MNIST as a contextual bandit: ten arms, reward 1 for the right class, 4,096 rounds; accumulated regret.

    SEPSA_DATA=... python benchmarks/bandit.py [--methods ...] [--seeds 10] [--device cuda]
    SEPSA_DATA=... python benchmarks/bandit.py --choose
    python benchmarks/bandit.py --table

A round shows an image, an arm is pulled, and the reward of that arm alone is seen. A convolutional body has ten heads,
one for each arm, and `SepSA` replays the rounds so far, in which each sample teaches the head of the arm it pulled.
Exploration is by heads of its own on the same features, RLS that has learned each round once, because a replayed sample
is no further observation; they are made anew when the body has moved. Thompson sampling draws a head for each arm from
its posterior, UCB adds deviations to the mean.

Settings were chosen by `--choose` on rounds from the first 20,000 training images, with seeds that are not reported; the
reported seeds draw theirs from the other 50,000 images, training and test. A seed is recorded when it ends; what the JSON
holds is not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measure import write
from torch import Tensor, nn

from sepsa import RLS, SepSA
from sepsa.paper import data

ARMS, ROUNDS, APART = 10, 4096, 20_000


class Setting(NamedTuple):
    """One for all seeds."""

    explore: str = "thompson"  # or "ucb" or "greedy"
    noise: float = 0.1  # the deviation of a reward about its head, which scales exploration
    ridge: float = 1.0  # of the heads that explore
    every: int = 32  # rounds between replays
    steps: int = 32
    batch: int = 64
    lr: float = 1e-3
    forgetting: float = 0.99  # of the heads that train the body
    width: int = 128


class Network(nn.Module):
    """A convolutional body, and a linear head for each arm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 7 * 7, width), nn.ReLU(),
        )  # fmt: skip
        self.arms = nn.ModuleList(nn.Linear(width, 1) for _ in range(ARMS))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.body(x)
        return tuple(arm(h) for arm in self.arms)


def fresh_heads(width: int, ridge: float, device: str) -> list[RLS]:
    """A head for each arm, at zero."""
    heads = [nn.Linear(width, 1, device=device) for _ in range(ARMS)]
    for head in heads:
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
    return [RLS(ridge=ridge).bind(head) for head in heads]


def pull(heads: list[RLS], h: Tensor, setting: Setting) -> int:
    """The arm that the features (1, width) of a round call for."""
    if setting.explore == "greedy":
        scores = [head.predict(h) for head in heads]
    elif setting.explore == "ucb":
        told = [head.predict(h, return_std=True, noise=setting.noise) for head in heads]
        scores = [mean + std for mean, std in told]
    else:
        scores = [head.sample(h, noise=setting.noise) for head in heads]
    return int(torch.cat(scores, 1).argmax())


def play(images: Tensor, labels: Tensor, setting: Setting, seed: int, device: str) -> dict[str, Any]:
    """The regret of all rounds, and of each eighth of them."""
    torch.manual_seed(seed)
    model = Network(setting.width).to(device)
    solvers = [RLS(forgetting=setting.forgetting) for _ in range(ARMS)]
    optimizer = SepSA(model, torch.optim.Adam, head=[f"arms.{j}" for j in range(ARMS)], solver=solvers, lr=setting.lr)
    explorers = fresh_heads(setting.width, setting.ridge, device)
    images, labels = images.to(device), labels.tolist()
    pulled = torch.zeros(len(images), dtype=torch.long, device=device)
    rewards = torch.zeros(len(images), device=device)
    losses = []
    for k in range(len(images)):
        with torch.no_grad():
            h = model.body(images[k : k + 1])
        arm = pull(explorers, h, setting)
        reward = float(labels[k] == arm)
        pulled[k], rewards[k] = arm, reward
        losses.append(1 - reward)
        explorers[arm].update(h, rewards[k : k + 1, None])
        if (k + 1) % setting.every == 0:
            for _ in range(setting.steps):
                rows = torch.randint(0, k + 1, (setting.batch,), device=device)
                targets = torch.full((setting.batch, ARMS), torch.nan, device=device)
                targets[torch.arange(setting.batch, device=device), pulled[rows]] = rewards[rows]
                optimizer.learn(images[rows], tuple(targets.split(1, dim=1)))
            explorers = fresh_heads(setting.width, setting.ridge, device)
            with torch.no_grad():
                h = model.body(images[: k + 1])
            for j in range(ARMS):
                own = pulled[: k + 1] == j
                if own.any():
                    explorers[j].update(h[own], rewards[: k + 1][own, None])
    part = len(losses) // 8
    return {"regret": sum(losses), "eighths": [sum(losses[i * part : (i + 1) * part]) for i in range(8)]}


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
    "neural-linear, UCB": Setting(explore="ucb"),
    "neural-linear, greedy": Setting(explore="greedy"),
}


def rows_known() -> list[dict[str, Any]]:
    path = Path(__file__).with_suffix(".json")
    return json.loads(path.read_text())["rows"] if path.exists() else []


def measure(methods: list[str], seeds: int, device: str) -> None:
    rows = rows_known()
    done = {(row["method"], row["seed"]) for row in rows}
    for seed in range(seeds):
        for method in methods:
            if (method, seed) not in done:
                start = time.perf_counter()
                told = play(*rounds(seed, False), METHODS[method], seed, device)
                row = {"method": method, "seed": seed, **told, "seconds": time.perf_counter() - start}
                row["device"] = torch.cuda.get_device_name() if device == "cuda" else "cpu"
                rows.append(row)
                print(row, flush=True)
                write(__file__, {"settings": {name: s._asdict() for name, s in METHODS.items()}, "rows": rows})


def table() -> None:
    rows = rows_known()
    print("| method | regret | seconds |\n|---|---|---|")
    for method in METHODS:
        own = [row for row in rows if row["method"] == method]
        if own:
            cells = [method]
            for key in ("regret", "seconds"):
                values = [row[key] for row in own]
                cells.append(
                    f"{statistics.fmean(values):.0f} ± {statistics.stdev(values) if len(own) > 1 else 0.0:.0f}"
                )
            print(f"| {' | '.join(cells)} |")


def choose(device: str, changes: list[dict[str, Any]]) -> None:
    for change in changes:
        start = time.perf_counter()
        told = [play(*rounds(seed, True), Setting(**change), seed, device) for seed in (100, 101)]
        print(
            change,
            [(row["regret"], row["eighths"]) for row in told],
            f"{time.perf_counter() - start:.0f} s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.table:
        table()
    elif options.choose:
        choose(options.device, [{}])
    else:
        measure(options.methods, options.seeds, options.device)
        table()


if __name__ == "__main__":
    main()
