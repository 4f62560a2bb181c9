"""The ridge of a cross-entropy head by evidence, beside Adam and fixed ridges.

    SEPSA_DATA=... python benchmarks/heads/cross_entropy_ridge.py --jobs 16     # what the JSON does not hold
    python benchmarks/heads/cross_entropy_ridge.py --table

"evidence 3" is `SoftmaxNewton(ridge="evidence", noise_factor=3)`, "ridge 10" is `SoftmaxNewton(ridge=10)`.

Problems: MNIST by a perceptron, pieces of Python's source as counts of trigrams by a perceptron, the next character by
a perceptron of 16. 4,000 samples, 10 epochs of batches of 64 with `samples_per_epoch`, or one pass by batches
of 8; rates of 1e-3 and 3e-3, of which every method has the better one. Each number is the mean cross-entropy of test
samples, for one seed. language.py has the same head below a transformer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.measure import machine, missing_runs
from sepsa import SepSA, SoftmaxNewton

RESULT = Path(__file__).with_suffix(".json")
BATCH, ONE_PASS_BATCH, EPOCHS, SEEDS, MOST = 64, 8, 10, 3, 4_000
RATES = (1e-3, 3e-3)
METHODS = ("Adam", "ridge 1", "ridge 10", "ridge 100", "evidence 3")

Samples = tuple[Tensor, Tensor]


def solver_of(method: str) -> SoftmaxNewton:
    kind, number = method.split()
    if kind == "ridge":
        return SoftmaxNewton(ridge=float(number))
    return SoftmaxNewton(ridge="evidence", noise_factor=float(number))


# ---------------------------------------------------------------------- problems


@cache
def mnist(train: bool) -> Samples:
    from reproduction.data import load

    data = load("mnist")
    X, y = (data.train_inputs, data.train_targets) if train else (data.test_inputs, data.test_targets)
    return X.flatten(1).float(), y.argmax(1)


@cache
def source(train: bool) -> Samples:
    """Pieces of 64 bytes of ten packages of Python, as counts of hashed trigrams; every fifth piece is for testing."""
    from benchmarks.heads.defaults import source_code

    X, y = source_code(
        "json", "email", "asyncio", "logging", "http", "xml/dom", "unittest", "ctypes", "sqlite3", "urllib"
    )
    inputs, labels = torch.as_tensor(X).float(), torch.as_tensor(y).long()
    held = torch.arange(len(inputs)) % 5 == 0
    return inputs[held != train], labels[held != train]


@cache
def characters(train: bool) -> Samples:
    """16 characters, as their classes, and the next one, at random places of Python's library."""
    from benchmarks.loops import language

    codes = language.text("training" if train else "end")
    places = torch.randint(len(codes) - 16, (2 * MOST, 1), generator=torch.Generator().manual_seed(int(train)))
    windows = codes[places + torch.arange(17)]
    return windows[:, :-1], windows[:, -1]


def perceptron(inputs: int, classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, classes))


def reader() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(98, 16), nn.Flatten(), *perceptron(256, 98))


PROBLEMS: dict[str, Any] = {
    "MNIST": (mnist, lambda: perceptron(784, 10)),
    "source": (source, lambda: perceptron(source(True)[0].shape[1], 10)),
    "characters": (characters, reader),
}


def train(item: tuple[str, str, float, int]) -> dict[str, Any]:
    problem, method, lr, seed = item
    torch.set_num_threads(1)
    name, once, _ = problem.partition(", one pass")
    epochs, batch = (1, ONE_PASS_BATCH) if once else (EPOCHS, BATCH)
    data, make = PROBLEMS[name]
    (X, y), (tests, labels) = data(True), data(False)
    chosen = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed))[:MOST]
    X, y = X[chosen], y[chosen]
    torch.manual_seed(seed)
    model, solver = make(), None
    if method == "Adam":
        optimizer: Any = torch.optim.Adam(model.parameters(), lr)
    else:
        solver = solver_of(method)
        told = {} if once else {"samples_per_epoch": len(X)}
        optimizer = SepSA(model, torch.optim.Adam, solver=solver, lr=lr, **told)
    for _ in range(epochs):
        for rows in torch.randperm(len(X)).split(batch):
            if solver is not None:
                optimizer.learn(X[rows], y[rows])
            else:
                optimizer.zero_grad()
                cross_entropy(model(X[rows]), y[rows]).backward()
                optimizer.step()
    model.eval()
    with torch.no_grad():
        outputs = model(tests)
        loss, wrong = float(cross_entropy(outputs, labels)), float((outputs.argmax(1) != labels).float().mean())
    return {"loss": round(loss, 5), "wrong": round(wrong, 5), "ridge": None if solver is None else solver.ridge_now}


# ---------------------------------------------------------------------- results


def means(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The mean loss of each method at its better rate, by problem."""
    problems, methods = (dict.fromkeys(run[key] for run in runs) for key in ("problem", "method"))
    each = {problem: {method: best(runs, problem, method) for method in methods} for problem in problems}
    return {
        problem: {method: round(statistics.fmean(losses), 4) for method, losses in row.items() if losses}
        for problem, row in each.items()
    }


def store(runs: list[dict[str, Any]], out: Path) -> None:
    document = {"machine": machine(), "mean loss at the better rate": means(runs), "runs": runs}
    out.write_text(json.dumps(document) + "\n", encoding="utf-8")


def table(runs: list[dict[str, Any]]) -> None:
    """The mean loss of each method at its better rate, with its standard error."""
    problems = list(dict.fromkeys(run["problem"] for run in runs))
    print("| method |", " | ".join(problems), "|")
    print("|---|" + "--:|" * len(problems))
    for method in dict.fromkeys(run["method"] for run in runs):
        cells = [best(runs, problem, method) for problem in problems]
        print(f"| {method} |", " | ".join(words(cell) for cell in cells), "|")


def words(losses: list[float]) -> str:
    if len(losses) < 2:
        return ""
    return f"{statistics.fmean(losses):.4f} ± {statistics.stdev(losses) / math.sqrt(len(losses)):.4f}"


def best(runs: list[dict[str, Any]], problem: str, method: str) -> list[float]:
    """The losses of all seeds at the better rate."""
    mine = [run for run in runs if (run["problem"], run["method"]) == (problem, method)]
    rates = [[run["loss"] for run in mine if run["lr"] == lr] for lr in {run["lr"] for run in mine}]
    return min(
        rates, key=lambda losses: statistics.fmean(losses) if all(map(math.isfinite, losses)) else math.inf, default=[]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--table", action="store_true")
    parser.add_argument(
        "--problems", nargs="+", default=[f"{name}{way}" for way in ("", ", one pass") for name in PROBLEMS]
    )
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    known = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {"runs": []}
    keys = ("problem", "method", "lr", "seed")
    items = itertools.product(options.problems, options.methods, RATES, range(options.seeds))
    with ProcessPoolExecutor(options.jobs, mp_context=torch.multiprocessing.get_context("spawn")) as pool:
        measured = partial(pool.submit, train)
        for _ in missing_runs(known["runs"], keys, [] if options.table else items, measured):
            store(known["runs"], options.out)
    table(known["runs"])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
