"""SepSA's default solver: chosen on one half of a set of problems and reported on the other.

    SEPSA_DATA=... python benchmarks/heads/defaults.py --jobs 16  # what defaults.json does not hold yet
    python benchmarks/heads/defaults.py --choose                  # the candidates on the half "choice"
    python benchmarks/heads/defaults.py --table                   # the default beside Adam, every cell of both halves

A cell is a problem, a body and a way to train: "pass", one pass with single samples, or "epochs", 20 epochs in batches
of 32 with `samples_per_epoch` given. Both methods train the same network on the squared error, classes as one-hot
targets, at rates of 1e-3 and 1e-2. Candidates are ridges by evidence with several values of `noise_factor`, absolute
ridges, and ridges relative to the mean squared norm of the features in the first batch. Every number is the mean
squared error on test samples, one for each seed, which divides the samples, initializes the network and shuffles. At
most 1,000 samples are for training. UCI's tables are read from SEPSA_DATA/uci (concrete, energy, kin8nm, power-plant,
wine-quality-red and yacht, .npz each); the others come with scikit-learn and with Python. Problems marked * have noisy
targets: the best model known to us leaves a tenth of their variance or more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sysconfig
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn import datasets as tables
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from benchmarks.measure import machine
from sepsa import RLS, SepSA

RESULT = Path(__file__).with_suffix(".json")
SEEDS, MOST, BATCH, EPOCHS = 8, 1000, 32, 20
RATES = (1e-3, 1e-2)
WAYS = ("pass", "epochs")
CANDIDATES = (
    "evidence 5",
    "evidence 8",
    "ridge 1",
    "ridge 3",
    "ridge 10",
    "ridge 30",
    "relative 1",
    "relative 3",
    "relative 10",
)
BASE, DEFAULT = "Adam", "evidence 8"  # the default is the candidate with the smallest mean difference on "choice"

Table = tuple[Any, Any]  # inputs (n, d) and targets: numbers (n,) or classes (n,)
Cell = tuple[str, str, str]  # problem, body, way


# ---------------------------------------------------------------------- problems


def uci(name: str) -> Table:
    with np.load(Path(os.environ["SEPSA_DATA"]) / "uci" / f"{name}.npz") as given:
        return given["X"], given["y"].astype(float)


def digits(classes: range) -> Table:
    X, y = tables.load_digits(return_X_y=True)
    chosen = np.isin(y, list(classes))
    return X[chosen], y[chosen] - classes[0]


def source_code(*packages: str) -> Table:
    """Pieces of 64 bytes of Python's standard library, as counts of hashed trigrams; the class is the package."""
    folder, X, y = Path(sysconfig.get_path("stdlib")), [], []
    for label, package in enumerate(packages):
        raw = b"\n".join(path.read_bytes() for path in sorted((folder / package).glob("*.py")))
        for place in range(0, min(len(raw), 400 * 64) - 64, 64):
            row = np.zeros(128)
            for k in range(place, place + 62):
                row[zlib.crc32(raw[k : k + 3]) % 128] += 1
            X.append(row)
            y.append(label)
    return np.array(X), np.array(y)


def bundled(load: Callable[..., Any]) -> Table:
    X, y = load(return_X_y=True)
    return X, y


HALVES: dict[str, dict[str, Callable[[], Table]]] = {
    "choice": {
        "diabetes *": partial(bundled, tables.load_diabetes),
        "wine quality *": partial(uci, "wine-quality-red"),
        "friedman2, noise 200 *": partial(tables.make_friedman2, 1250, noise=200.0, random_state=0),
        "concrete": partial(uci, "concrete"),
        "yacht": partial(uci, "yacht"),
        "digits 0 to 4": partial(digits, range(5)),
        "text of four packages *": partial(source_code, "asyncio", "email", "json", "unittest"),
    },
    "report": {
        "friedman1, noise 4 *": partial(tables.make_friedman1, 1250, noise=4.0, random_state=0),
        "friedman3, noise 0.3 *": partial(tables.make_friedman3, 1250, noise=0.3, random_state=0),
        "kin8nm": partial(uci, "kin8nm"),
        "power plant": partial(uci, "power-plant"),
        "energy": partial(uci, "energy"),
        "digits 5 to 9": partial(digits, range(5, 10)),
        "text of four other packages *": partial(source_code, "http", "logging", "multiprocessing", "xml/dom"),
    },
}
PROBLEMS = {name: load for half in HALVES.values() for name, load in half.items()}
BODIES: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "ReLU 64": (nn.ReLU, (64,)),
    "ReLU 64-64": (nn.ReLU, (64, 64)),
    "tanh 50": (nn.Tanh, (50,)),
    "tanh 50-50": (nn.Tanh, (50, 50)),
}


def divided(table: Table, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test samples, a fifth, standardized by the former; classes become one-hot targets."""
    X, y = torch.as_tensor(np.asarray(table[0]), dtype=torch.float32), torch.as_tensor(np.asarray(table[1]))
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed))
    size = len(X) // 5
    test, train = order[:size][:MOST], order[size:][:MOST]
    X = (X - X[train].mean(0)) / X[train].std(0).clamp(min=1e-2)
    if y.is_floating_point():
        y = y.float().reshape(len(y), 1)
        y = (y - y[train].mean(0)) / y[train].std(0)
    else:
        y = nn.functional.one_hot(y.long()).float()
    return X[train], y[train], X[test], y[test]


def network(body: str, inputs: int, outputs: int) -> nn.Sequential:
    activation, widths = BODIES[body]
    layers: list[nn.Module] = []
    for k, width in enumerate(widths):
        layers += [nn.Linear((inputs, *widths)[k], width), activation()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))


# ---------------------------------------------------------------------- training


def solver_of(method: str, model: nn.Sequential, first: Tensor) -> RLS:
    kind, _, factor = method.partition(" ")
    if kind == "evidence":
        return RLS(ridge="evidence", noise_factor=float(factor))
    ridge = float(factor)
    if kind == "relative":
        with torch.no_grad():
            ridge *= float(model[:-1](first).square().sum(1).mean())
    return RLS(ridge=max(ridge, 1e-3))


def train(cell: Cell, method: str, rate: float, seed: int) -> float:
    """The mean squared error on the test samples."""
    problem, body, way = cell
    x, y, test_x, test_y = divided(PROBLEMS[problem](), seed)
    torch.manual_seed(seed)
    model = network(body, x.shape[1], y.shape[1])
    batch, epochs = (1, 1) if way == "pass" else (BATCH, EPOCHS)
    orders = [torch.randperm(len(x)).split(batch) for _ in range(epochs)]
    if method == BASE:
        base = torch.optim.Adam(model.parameters(), lr=rate)
    else:
        told: Any = {} if way == "pass" else {"samples_per_epoch": len(x)}
        solver = solver_of(method, model, x[orders[0][0]])
        optimizer = SepSA(model, torch.optim.Adam, solver=solver, lr=rate, **told)
    for order in orders:
        for rows in order:
            if method == BASE:
                mse_loss(model(x[rows]), y[rows]).backward()
                base.step()
                base.zero_grad()
            else:
                optimizer.learn(x[rows], y[rows])
    with torch.no_grad():
        return round(float(mse_loss(model(test_x), test_y)), 5)


def train_all(item: tuple[Cell, str, float, Sequence[int]]) -> list[float]:
    torch.set_num_threads(1)
    cell, method, rate, seeds = item
    return [train(cell, method, rate, seed) for seed in seeds]


# ---------------------------------------------------------------------- results


def known() -> dict[str, list[float]]:
    """Errors by seed, under "problem | body | way | method | rate"."""
    return json.loads(RESULT.read_text())["errors"] if RESULT.exists() else {}


def key_of(cell: Cell, method: str, rate: float) -> str:
    return " | ".join((*cell, method, f"{rate:g}"))


def counts(errors: dict[str, list[float]]) -> dict[str, dict[str, int]]:
    """How often the default is ahead of Adam and behind it, beyond the noise, by half and way."""
    found: dict[str, dict[str, int]] = {}
    for half, way in product(HALVES, WAYS):
        row = found[f"{half}, {way}"] = {"cells": 0, "ahead": 0, "behind": 0}
        for cell in cells(half):
            base, ours = at_best_rate(errors, cell, BASE), at_best_rate(errors, cell, DEFAULT)
            if cell[2] == way and base and ours and len(base) > 1:
                mean, noise = difference(ours, base)
                row["cells"] += 1
                row["ahead"] += mean < -noise
                row["behind"] += mean > noise
    return found


def store(errors: dict[str, list[float]]) -> None:
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(errors[key])}" for key in sorted(errors))
    head = json.dumps(
        machine() | {"default": DEFAULT, "epochs": EPOCHS, "batch": BATCH, "counts": counts(errors)}, indent=1
    )
    part = RESULT.with_suffix(".part")
    part.write_text(f'{head[:-2]},\n "errors": {{\n{lines}\n }}\n}}\n')
    part.replace(RESULT)


def cells(half: str) -> list[Cell]:
    return list(product(HALVES[half], BODIES, WAYS))


def at_best_rate(errors: dict[str, list[float]], cell: Cell, method: str) -> list[float] | None:
    """The errors at the rate with the smaller mean; None where a run is missing."""
    found = [errors.get(key_of(cell, method, rate)) for rate in RATES]
    return min((e for e in found if e), key=statistics.fmean) if all(found) else None


def difference(ours: list[float], base: list[float]) -> tuple[float, float]:
    """The mean difference relative to the base's mean error, and twice its standard error, over equal seeds."""
    scale = statistics.fmean(base)
    each = [(a - b) / scale for a, b in zip(ours, base, strict=False)]
    return statistics.fmean(each), 2 * statistics.stdev(each) / len(each) ** 0.5


def print_choice(errors: dict[str, list[float]]) -> None:
    """Means over the cells of the half "choice", of differences at the best rate of each, and cells behind Adam."""
    print("| candidate | way | mean difference | noisy | clean | behind beyond noise | worst | worst at 1e-3 |")
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    for method, way in product(CANDIDATES, WAYS):
        rows = []
        for cell in cells("choice"):
            base, ours = at_best_rate(errors, cell, BASE), at_best_rate(errors, cell, method)
            if cell[2] == way and base and ours:
                plain = [errors[key_of(cell, m, RATES[0])] for m in (method, BASE)]
                rows.append((cell, *difference(ours, base), difference(*plain)[0]))
        if rows:
            noisy = statistics.fmean([d for cell, d, *_ in rows if "*" in cell[0]] or [np.nan])
            clean = statistics.fmean([d for cell, d, *_ in rows if "*" not in cell[0]] or [np.nan])
            behind = sum(d > noise for _, d, noise, _ in rows)
            mean, worst = statistics.fmean(d for _, d, *_ in rows), max(d for _, d, *_ in rows)
            numbers = f"{mean:+.3f} | {noisy:+.3f} | {clean:+.3f} | {behind} of {len(rows)} | {worst:+.3f}"
            print(f"| {method} | {way} | {numbers} | {max(row[-1] for row in rows):+.3f} |")


def print_table(errors: dict[str, list[float]], method: str) -> None:
    """Every cell: the error of both at the best rate of each, and the difference relative to Adam's with its noise."""
    print("| half | problem | body | way | Adam | SepSA | difference | noise | |")
    print("|---|---|---|---|--:|--:|--:|--:|---|")
    for half in HALVES:
        behind = total = 0
        for cell in cells(half):
            base, ours = at_best_rate(errors, cell, BASE), at_best_rate(errors, cell, method)
            if base and ours:
                mean, noise = difference(ours, base)
                verdict = "behind" if mean > noise else "ahead" if mean < -noise else ""
                behind, total = behind + (mean > noise), total + 1
                numbers = f"{statistics.fmean(base):.4f} | {statistics.fmean(ours):.4f} | {mean:+.3f} | {noise:.3f}"
                print(f"| {half} | {' | '.join(cell)} | {numbers} | {verdict} |")
        print(f"\n{half}: behind beyond noise on {behind} of {total} cells\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--method", default=DEFAULT, help="the candidate that --table shows")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--half", choices=tuple(HALVES))
    parser.add_argument("--methods", nargs="+", default=[BASE, *CANDIDATES])
    parser.add_argument("--only", default="", help="cells whose name holds this")
    options = parser.parse_args()
    errors = known()
    if options.choose or options.table:
        if options.choose:
            print_choice(errors)
        else:
            print_table(errors, options.method)
        return
    items = [
        (cell, method, rate, range(len(errors.get(key_of(cell, method, rate), [])), options.seeds))
        for half in ([options.half] if options.half else HALVES)
        for cell in cells(half)
        for method in options.methods
        for rate in RATES
        if options.only in " | ".join(cell)
    ]
    with ProcessPoolExecutor(options.jobs) as pool:
        runs = {pool.submit(train_all, item): item for item in items if len(item[3])}
        for number, run in enumerate(as_completed(runs), 1):
            key = key_of(*runs[run][:3])
            errors[key] = [*errors.get(key, []), *run.result()]
            print(f"{number} of {len(runs)}: {key}: {statistics.fmean(errors[key]):.4f}", flush=True)
            if number % 20 == 0 or number == len(runs):
                store(errors)


if __name__ == "__main__":
    main()
