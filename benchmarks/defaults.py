"""SepSA with nothing set but the rate, beside its base alone: ten problems, most of them with many epochs.

    python benchmarks/defaults.py --search --jobs 2   # four rates of each method, by a fifth of the training samples
    python benchmarks/defaults.py --jobs 2            # 5 seeds at the rates found, on the test samples
    python benchmarks/defaults.py --table

They write defaults.json after every run, and do not run again what it holds. Five problems ("choice") are those on
which the defaults of SepSA were chosen, the other five are reported. Both methods have the same network, batches of
32 (64 for images and text) and AdamW; SepSA has `solver="cross-entropy"` for classes and the default solver for
numbers. UCI's tables are read from SEPSA_DATA/uci, images from SEPSA_DATA or downloaded; inputs and targets are
standardized by the training samples. Frozen digits have 256 random rectified features that do not learn.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import statistics
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from measure import machine
from sklearn import datasets as tables
from torch import Tensor, nn
from torch.nn import functional

from sepsa import SepSA
from sepsa.paper import runner

RESULT = Path(__file__).with_suffix(".json")
SEEDS, SEARCH_SEED, TEST, CHUNK = range(5), 100, 0.2, 64
BASE, OURS = "AdamW", "SepSA over AdamW"
PACKAGES = ("asyncio", "email", "encodings", "idlelib", "json", "multiprocessing", "test", "tkinter", "unittest", "xml")

Data = tuple[Tensor, Tensor, Tensor, Tensor]  # training inputs and targets, test inputs and targets


class Problem(NamedTuple):
    half: str
    load: Callable[[int], Data]  # of a seed, which divides the samples where no division is given
    network: Callable[[int, int], nn.Module]  # of the numbers of inputs and outputs
    epochs: int
    batch: int = 32
    rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3, 1e-2)


# ---------------------------------------------------------------------- data


def divided(X: Any, y: Any, seed: int, share: float = TEST) -> Data:
    """Training and test samples, standardized by the former; integers are class labels."""
    X, y = torch.as_tensor(np.asarray(X), dtype=torch.float32), torch.as_tensor(np.asarray(y))
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed))
    test, train = order[: int(share * len(X))], order[int(share * len(X)) :]
    X = (X - X[train].mean(0)) / X[train].std(0).clamp(min=1e-2)
    if y.is_floating_point():
        y = y.float().reshape(len(y), -1)[:, :1]
        y = (y - y[train].mean(0)) / y[train].std(0)
    return X[train], y[train], X[test], y[test]


def uci(name: str) -> Callable[[int], Data]:
    def load(seed: int) -> Data:
        with np.load(Path(os.environ["SEPSA_DATA"]) / "uci" / f"{name}.npz") as given:
            return divided(given["X"], given["y"], seed)

    return load


def bundled(load: Callable[..., Any]) -> Callable[[int], Data]:
    return lambda seed: divided(*load(return_X_y=True), seed)


def images(name: str) -> Callable[[int], Data]:
    def load(seed: int) -> Data:
        data = runner.dataset(name)
        return data.train_inputs, data.train_targets.argmax(1), data.test_inputs, data.test_targets.argmax(1)

    return load


def source(seed: int) -> Data:
    """Pieces of Python's standard library as bytes, to be told apart by their packages, 600 of each."""
    folder, chance = Path(sysconfig.get_path("stdlib")), np.random.default_rng(seed)
    X, y = [], []
    for label, package in enumerate(PACKAGES):
        raw = b"\n".join(path.read_bytes() for path in sorted((folder / package).rglob("*.py")))
        places = chance.choice(len(raw) // CHUNK, min(600, len(raw) // CHUNK), replace=False)
        X += [np.frombuffer(raw, np.uint8, CHUNK, place * CHUNK) % 128 for place in places]
        y += [label] * len(places)
    order = chance.permutation(len(X))
    inputs, labels = torch.tensor(np.array(X)[order]).long(), torch.tensor(np.array(y)[order])
    test = int(TEST * len(inputs))
    return inputs[test:], labels[test:], inputs[:test], labels[:test]


# ---------------------------------------------------------------------- networks


def dense(inputs: int, outputs: int, width: int = 50) -> nn.Module:
    layers = nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    return nn.Sequential(*layers)


def frozen(inputs: int, outputs: int) -> nn.Module:
    features = nn.Sequential(nn.Linear(inputs, 256), nn.ReLU()).requires_grad_(False)
    return nn.Sequential(features, nn.Linear(256, outputs))


def convolutions(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32 * 64, 128), nn.ReLU(), nn.Linear(128, outputs)),
    )


class Transformer(nn.Module):
    """Two layers of width 64 over tokens, the mean of which goes to the head."""

    def __init__(self, embedding: nn.Module, length: int, outputs: int) -> None:
        super().__init__()
        self.embedding, self.places = embedding, nn.Parameter(0.02 * torch.randn(1, length, 64))
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(64), enable_nested_tensor=False)
        self.head = nn.Linear(64, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(x) + self.places).mean(1))


class Patches(nn.Module):
    """The sixteen 2 x 2 patches of an 8 x 8 image."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 64)

    def forward(self, x: Tensor) -> Tensor:
        patches = x.reshape(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, 16, 4)
        return self.embedding(patches)


def of_bytes(_: int, outputs: int) -> nn.Module:
    return Transformer(nn.Embedding(128, 64), CHUNK, outputs)


def of_patches(_: int, outputs: int) -> nn.Module:
    return Transformer(Patches(), 16, outputs)


def of_pixels(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *dense(784, outputs, 128))


PROBLEMS = {
    "Diabetes": Problem("choice", bundled(tables.load_diabetes), dense, 20),
    "UCI concrete": Problem("choice", uci("concrete"), dense, 20),
    "breast cancer": Problem("choice", bundled(tables.load_breast_cancer), dense, 20),
    "frozen digits": Problem("choice", bundled(tables.load_digits), frozen, 5, rates=(3e-3, 1e-2, 3e-2, 1e-1)),
    "packages by a transformer": Problem("choice", source, of_bytes, 10, 64),
    "UCI kin8nm": Problem("report", uci("kin8nm"), dense, 20),
    "UCI energy": Problem("report", uci("energy"), dense, 20),
    "digits by a transformer": Problem("report", bundled(tables.load_digits), of_patches, 20, 64),
    "MNIST": Problem("report", images("mnist"), of_pixels, 3, 64),
    "CIFAR-10": Problem("report", images("cifar10"), convolutions, 3, 64),
}


# ---------------------------------------------------------------------- training


def train(item: tuple[str, str, float, int, bool]) -> dict[str, float]:
    """Train one network: loss and error on the test samples, in a search on a fifth of the training samples."""
    name, method, rate, seed, search = item
    torch.set_num_threads(1)
    problem = PROBLEMS[name]
    x, y, test_x, test_y = problem.load(seed)
    if search:
        size = len(x) // 5
        x, y, test_x, test_y = x[size:], y[size:], x[:size], y[:size]
    numbers = y.is_floating_point()
    loss_fn = functional.mse_loss if numbers else functional.cross_entropy
    torch.manual_seed(seed)
    model = problem.network(x[0].numel(), 1 if numbers else int(y.max()) + 1)
    if method == BASE:
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=rate)
    else:
        solver = None if numbers else "cross-entropy"
        optimizer = SepSA(model, torch.optim.AdamW, solver=solver, lr=rate)
    for _ in range(problem.epochs):
        for rows in torch.randperm(len(x)).split(problem.batch):
            if isinstance(optimizer, SepSA):
                optimizer.learn(x[rows], y[rows])
            else:
                loss_fn(model(x[rows]), y[rows]).backward()
                optimizer.step()
                optimizer.zero_grad()
    with torch.no_grad():
        model.eval()
        outputs = torch.cat([model(part) for part in test_x.split(1000)])
    result = {"loss": round(float(loss_fn(outputs, test_y)), 5)}
    if not numbers:
        result["error"] = round(float((outputs.argmax(1) != test_y).float().mean()), 5)
    return result


def known() -> list[dict[str, Any]]:
    return json.loads(RESULT.read_text())["runs"] if RESULT.exists() else []


def store(*entries: dict[str, Any]) -> None:
    """Put runs into the file, with the means of those that are complete."""
    with RESULT.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        runs = [*known(), *entries]
        lines = ",\n".join("  " + json.dumps(run) for run in runs)
        head = json.dumps(machine() | {"means": means(runs)}, indent=1)
        part = RESULT.with_suffix(".part")
        part.write_text(f'{head[:-2]},\n "runs": [\n{lines}\n ]\n}}\n')
        part.replace(RESULT)
    RESULT.with_suffix(".lock").unlink(missing_ok=True)


def means(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Means over seeds by problem; the noise is twice the standard error of the differences of equal seeds."""
    found: dict[str, dict[str, float]] = {}
    for name in PROBLEMS:
        each = {
            method: sorted(
                (r for r in runs if not r["search"] and (r["problem"], r["method"]) == (name, method)),
                key=lambda run: run["seed"],
            )
            for method in (BASE, OURS)
        }
        if any(len(of_method) != len(SEEDS) for of_method in each.values()):
            continue
        differences = [ours["loss"] - base["loss"] for base, ours in zip(each[BASE], each[OURS], strict=True)]
        row: dict[str, float] = {"epochs": PROBLEMS[name].epochs}
        row |= {f"{method}, loss": statistics.fmean(r["loss"] for r in each[method]) for method in each}
        row["difference"] = statistics.fmean(differences)
        row["noise"] = 2 * statistics.stdev(differences) / len(SEEDS) ** 0.5
        if "error" in each[BASE][0]:
            row |= {f"{m}, error, %": 100 * statistics.fmean(r["error"] for r in each[m]) for m in each}
        found[name] = row
    return found


def best(problem: str, method: str) -> float:
    """The rate of the search with the smallest loss."""
    tried = [run for run in known() if run["search"] and (run["problem"], run["method"]) == (problem, method)]
    if not tried:
        raise SystemExit(f"{problem}, {method}: no rate was searched for yet: run with --search first")
    rate: float = min(tried, key=lambda run: run["loss"])["lr"]
    return rate


def print_table() -> None:
    print("| | problem | epochs | AdamW, loss | SepSA, loss | difference | noise | AdamW, error | SepSA, error |")
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|")
    for name, row in means(known()).items():
        cells = [f"{row[key]:.4f}" for key in (f"{BASE}, loss", f"{OURS}, loss", "difference", "noise")]
        errors = [row.get(f"{method}, error, %") for method in (BASE, OURS)]
        cells += ["" if error is None else f"{error:.2f} %" for error in errors]
        print(f"| {PROBLEMS[name].half} | {name} | {PROBLEMS[name].epochs} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--half", choices=("choice", "report"))
    parser.add_argument("--only", default="", help="problems whose name holds this")
    options = parser.parse_args()
    if options.table:
        print_table()
        return
    done = {(r["problem"], r["method"], r["lr"], r["seed"], r["search"]) for r in known()}
    wanted = [
        (name, method, rate, seed, options.search)
        for name, problem in PROBLEMS.items()
        if options.only in name and options.half in (None, problem.half)
        for method in (BASE, OURS)
        for rate in (problem.rates if options.search else (best(name, method),))
        for seed in ((SEARCH_SEED,) if options.search else SEEDS)
    ]
    items = [item for item in wanted if item not in done]
    keys = ("problem", "method", "lr", "seed", "search")
    for i, result, _ in runner.each(train, items, options.jobs):
        entry = dict(zip(keys, items[i], strict=True)) | result
        print(entry, flush=True)
        store(entry)


if __name__ == "__main__":
    main()
