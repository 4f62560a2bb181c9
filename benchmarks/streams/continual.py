"""Online class-incremental learning: five tasks of two classes, one pass, no sample kept; accuracy over all classes.

    SEPSA_DATA=... python benchmarks/streams/continual.py [--data mnist cifar10] [--methods ...] [--seeds 10] [--jobs 1]
        [--device cuda]
    SEPSA_DATA=... python benchmarks/streams/continual.py --choose [--data cifar10]
    python benchmarks/streams/continual.py --table | --figure   # from the JSON

Split MNIST and split CIFAR-10 in the order 0-1, 2-3, ..., as continual-learning-baselines has them. The body of the
first rows is random: patches of the first 500 images that come, whitened by the same images, are the filters of one
convolution, whose two-sided rectification is averaged over regions of the image. The head is RLS at forgetting 1, which
in any order and in any blocks is the ridge regression on all images seen; its ridge was chosen on training images held
out, or by itself (`ridge="auto"`). "body moves" learns its convolutions too, and forgets.

Settings were chosen by `--choose`, which learns 10,000 training images and tests on 5,000 others of them, with a seed
that is not reported. A seed is recorded when it ends; what the JSON holds is not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.measure import dispatch, mean_and_spread, write
from reproduction import data, runner
from sepsa import RLS, SepSA

TASKS = ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))
FIRST = 500  # images that the filters are taken from


class Setting(NamedTuple):
    """Of the random body, and the ridge of its head."""

    filters: int
    size: int  # of a patch, in pixels
    stride: int
    regions: int  # of the image, in each direction
    threshold: float  # below which a filter's answer is 0
    ridge: float


SETTINGS = {
    "mnist": Setting(filters=100, size=7, stride=2, regions=3, threshold=0.25, ridge=1.0),
    "cifar10": Setting(filters=200, size=6, stride=2, regions=2, threshold=0.25, ridge=100.0),
}
BLOCK = {"RLS, random body": 500, "RLS, random body, ridge by itself": 1000}


class Split(NamedTuple):
    """Images and labels, on the device."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def load(name: str, device: str, held_out: bool = False) -> Split:
    """The data set; with `held_out` 10,000 of its training images, and 5,000 others to test on."""
    whole = data.load(name)
    x, y = whole.train_inputs.to(device), whole.train_targets.argmax(1).to(device)
    if held_out:
        return Split(x[:10_000], y[:10_000], x[-5_000:], y[-5_000:])
    return Split(x, y, whole.test_inputs.to(device), whole.test_targets.argmax(1).to(device))


def stream(split: Split, seed: int, block: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of images, task after task, each task in random order."""
    g = torch.Generator().manual_seed(seed)
    for task in TASKS:
        rows = torch.isin(split.y.cpu(), torch.tensor(task)).nonzero()[:, 0]
        for some in rows[torch.randperm(len(rows), generator=g)].split(block):
            yield split.x[some], split.y[some]


class RandomPatches(nn.Module):
    """Whitened patches of some images as filters, rectified on both sides above a threshold, averaged over regions."""

    def __init__(self, images: Tensor, setting: Setting, seed: int) -> None:
        super().__init__()
        self.setting = setting
        g = torch.Generator().manual_seed(seed)
        patches = functional.unfold(images, setting.size).transpose(1, 2).reshape(-1, self._width(images))
        patches = self._normal(patches[torch.randperm(len(patches), generator=g)[:50_000].to(images.device)])
        self.mean = patches.mean(0)
        values, vectors = torch.linalg.eigh(torch.cov(patches.T).double())
        # Small eigenvalues are noise of the images' encoding, which whitening would make loud.
        whiten = ((vectors / (values + 0.1 * values.mean()).sqrt()) @ vectors.T).float()
        chosen = (patches[: setting.filters] - self.mean) @ whiten
        self.filters = whiten @ functional.normalize(chosen, dim=1).T  # (patch, filters)
        self.out_features = 2 * setting.filters * setting.regions**2

    def _width(self, images: Tensor) -> int:
        return images.shape[1] * self.setting.size**2

    @staticmethod
    def _normal(patches: Tensor) -> Tensor:
        """Patches without their brightness, and of like contrast."""
        centred = patches - patches.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 0.01).sqrt()

    def forward(self, images: Tensor) -> Tensor:
        s = self.setting
        patches = functional.unfold(images, s.size, stride=s.stride).transpose(1, 2)
        answers = (self._normal(patches) - self.mean) @ self.filters  # (n, places, filters)
        side = round(answers.shape[1] ** 0.5)
        answers = answers.transpose(1, 2).reshape(len(images), s.filters, side, side)
        both = torch.cat([(answers - s.threshold).relu_(), (-s.threshold - answers).relu_()], 1)
        return functional.adaptive_avg_pool2d(both, s.regions).flatten(1)


def on_random_body(split: Split, setting: Setting, seed: int, ridge: Any, block: int) -> dict[str, Any]:
    """Filters from the first images, then RLS in one pass."""
    device = split.x.device
    body: RandomPatches | None = None
    head, solver = None, None
    for x, y in stream(split, seed, block):
        if body is None:
            body = RandomPatches(x[:FIRST], setting, seed)
            head = nn.Linear(body.out_features, 10, device=device)
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)
            solver = RLS(ridge=ridge, bias_ridge="ridge").bind(head)
            first = body(x)
            scale = first.square().mean().sqrt()  # so that a ridge means the same for all bodies
        with torch.no_grad():
            solver.update(body(x) / scale, functional.one_hot(y, 10).double())
    with torch.no_grad():
        right = [
            (head(body(x) / scale).argmax(1) == y)
            for x, y in zip(split.test_x.split(500), split.test_y.split(500), strict=True)
        ]
    told = {"accuracy": torch.cat(right).double().mean().item(), "features": body.out_features}
    if ridge == "auto":
        told["ridge"] = solver.ridge
    return told


def network(name: str, device: str) -> nn.Sequential:
    """A small convolutional network that ends in a linear head."""
    channels, side = (1, 7) if name == "mnist" else (3, 8)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * side * side, 128), nn.ReLU(), nn.Linear(128, 10),
    ).to(device)  # fmt: skip


def on_moving_body(name: str, split: Split, seed: int, separable: bool) -> dict[str, Any]:
    """The whole network in one pass in batches of 10: SepSA with the squared loss, or Adam with cross-entropy."""
    torch.manual_seed(seed)
    model = network(name, str(split.x.device))
    if separable:
        optimizer: torch.optim.Optimizer = SepSA(model, torch.optim.Adam, lr=1e-4)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for x, y in stream(split, seed, 10):
        if isinstance(optimizer, SepSA):
            optimizer.learn(x, functional.one_hot(y, 10).float())
        else:
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        right = [model(x).argmax(1) == y for x, y in zip(split.test_x.split(500), split.test_y.split(500), strict=True)]
    return {"accuracy": torch.cat(right).double().mean().item()}


METHODS = (
    "RLS, random body",
    "RLS, random body, ridge by itself",
    "SepSA, body moves",
    "Adam, body moves",
)


SOURCE = "github.com/ContinualAI/continual-learning-baselines, README"
PRINTED = {
    "mnist": {"CoPE, 2,000 samples kept": 0.93, "online replay, 1,000 samples kept": 0.92},
    "cifar10": {"online replay, 1,000 samples kept": 0.50, "ER-AML": 0.47, "ER-ACE": 0.45},
}


def run(item: tuple[str, str, int, str]) -> dict[str, Any]:
    name, method, seed, device = item
    split = load(name, device)
    start = time.perf_counter()
    if method in BLOCK:
        ridge = "auto" if method.endswith("by itself") else SETTINGS[name].ridge
        told = on_random_body(split, SETTINGS[name], seed, ridge, BLOCK[method])
    else:
        told = on_moving_body(name, split, seed, method.startswith("SepSA"))
    where = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    seconds = time.perf_counter() - start
    return {"data": name, "method": method, "seed": seed, **told, "seconds": seconds, "device": where}


def rows_known() -> list[dict[str, Any]]:
    path = Path(__file__).with_suffix(".json")
    return json.loads(path.read_text())["rows"] if path.exists() else []


def measure(names: list[str], methods: list[str], seeds: int, device: str, jobs: int) -> None:
    rows = rows_known()
    done = {(row["data"], row["method"], row["seed"]) for row in rows}
    every = [(name, method, seed) for seed in range(seeds) for name in names for method in methods]
    todo = [(*one, device) for one in every if one not in done]
    printed = [
        {"data": name, "method": f"{method}, printed", "accuracy": accuracy, "source": SOURCE}
        for name, told in PRINTED.items()
        for method, accuracy in told.items()
    ]
    settings = {name: setting._asdict() for name, setting in SETTINGS.items()}
    for _, row, _ in runner.each(run, todo, jobs):
        rows.append(row)
        print(row, flush=True)
        write(__file__, {"settings": settings, "printed": printed, "rows": rows})


def choose(names: list[str], device: str) -> None:
    """Ridges, and one change of the body at a time, on training images held out."""
    for name in names:
        split, base = load(name, device, held_out=True), SETTINGS[name]
        changes: list[dict[str, Any]] = [{"ridge": ridge} for ridge in (0.1, 1.0, 10.0, 100.0)]
        changes += [{"threshold": t} for t in (0.0, 0.5, 1.0)] + [{"size": base.size + d} for d in (-1, 1)]
        changes += [{"regions": base.regions + 1, "filters": base.filters // 2}, {"stride": 1}]
        for change in changes:
            setting = base._replace(**change)
            start = time.perf_counter()
            told = on_random_body(split, setting, 100, setting.ridge, 500)
            print(name, change, told, f"{time.perf_counter() - start:.0f} s", flush=True)


def table() -> None:
    rows = rows_known()
    for name, title in (("mnist", "Split MNIST"), ("cifar10", "Split CIFAR-10")):
        print(f"\n### {title}\n\n| method | seeds | accuracy over all classes | seconds |\n|---|---|---|---|")
        for method in METHODS:
            own = [row for row in rows if (row["data"], row["method"]) == (name, method)]
            if own:
                columns = (("accuracy", ".4f"), ("seconds", ".0f"))
                cells = [mean_and_spread([row[key] for row in own], form) for key, form in columns]
                print(f"| {method} | {len(own)} | {' | '.join(cells)} |")
        for method, accuracy in PRINTED[name].items():
            print(f"| {method}, printed | | {accuracy:.2f} | |")


def figure() -> None:
    """Final accuracy over all classes, the mean over seeds."""
    from matplotlib import pyplot as plt

    rows = rows_known()
    fig, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained", sharex=True)
    for ax, name in zip(axes, SETTINGS, strict=True):
        own = {m: [r["accuracy"] for r in rows if (r["data"], r["method"]) == (name, m)] for m in METHODS}
        bars = {m: statistics.fmean(values) for m, values in own.items() if values}
        bars |= {f"{method}, printed": accuracy for method, accuracy in PRINTED[name].items()}
        colours = ["C0" if m.startswith("RLS") else "C1" if m in METHODS else "0.7" for m in bars]
        ax.barh(list(bars), list(bars.values()), color=colours)
        for at, value in enumerate(bars.values()):
            ax.text(value, at, f" {value:.2f}", va="center", fontsize=7)
        ax.invert_yaxis()
        ax.tick_params(axis="y", labelsize=7)
        ax.set(title=f"split {name}", xlabel="accuracy over all classes", xlim=(0, 1.2))
    fig.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", nargs="+", default=["mnist", "cifar10"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--choose", action="store_true")
    dispatch(
        parser,
        {"table": lambda _: table(), "figure": lambda _: figure(), "choose": lambda o: choose(o.data, o.device)},
        lambda o: measure(o.data, o.methods, o.seeds, o.device, o.jobs),
    )


if __name__ == "__main__":
    main()
