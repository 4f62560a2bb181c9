"""A head that anneals with the body's learning rate beside one that does not, on tables and on networks for images.

    SEPSA_DATA=... PYTHONPATH=src:benchmarks python benchmarks/annealing.py --jobs 16        # tables, on CPUs
    SEPSA_DATA=... PYTHONPATH=src:benchmarks python benchmarks/annealing.py --networks       # on a GPU
    python benchmarks/annealing.py --table                                                   # what annealing.json has

They write annealing.json after every run, and do not run again what it holds; `--only` selects cells and methods by
their names. Tables: 500 samples, 40 epochs in batches of 32, a cosine to a fiftieth of the peak, `RLS(ridge=10)` with
the length of an epoch told; Energy and Diabetes are divided and initialized as in the paper. The number is the mean
squared error on test samples over the variance of the targets. On the half "choice" the other exponents of the memory
run too, and other laws for the ridge. Networks: CIFAR-10 as in networks.py and MNIST without augmentation,
5 epochs, a one-cycle rate; the number is the error on the test images in percent.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import networks
import torch
from measure import machine
from torch.nn.functional import mse_loss

from reproduction import networks as of_paper
from reproduction import runner
from sepsa import RLS, SepSA
from sepsa.heads.math import anneal

RESULT = Path(__file__).with_suffix(".json")
SEEDS, EPOCHS, BATCH, SAMPLES, LAST = 8, 40, 32, 500, 0.02
RATES, BODIES = (1e-3, 1e-2), ("ReLU 64-64", "tanh 50")
ON, OFF, BASE = "annealed", "constant", "Adam"
# Exponents of the rate in the memory, and of the times that samples are remembered in the weight of the ridge.
LAWS = {ON: (anneal.MEMORY, anneal.REPEATS)}
LAWS |= {f"memory {a:g}, ridge {b:g}": (a, b) for a, b in ((1.0, 1.0), (3.0, 1.0), (2.0, 0.5), (2.0, 0.0), (1.0, 0.5))}
HALVES = {
    "choice": ("concrete", "kin8nm", "wine-quality-red", "CIFAR-10 CNN", "ResNet-9"),
    "report": ("energy", "power-plant", "yacht", "Energy", "Diabetes", "MNIST CNN", "vision transformer"),
}
NETWORK_SEEDS, NETWORK_EPOCHS = 4, 5
NETWORK_RATES = {"MNIST CNN": 1e-3, "CIFAR-10 CNN": 2e-3, "ResNet-9": 5e-3, "vision transformer": 1e-3}
NETWORK_SOLVERS: dict[str, dict[str, Any]] = {
    "SepSA": {"forgetting": 0.999},
    "SepSA, ridge by evidence": {"ridge": "evidence", "forgetting": 0.999},
    "SepSA, cross-entropy, ridge 100": {"ridge": 100.0},
    "SepSA, cross-entropy, ridge 1000": {"ridge": 1000.0},
    "SepSA, cross-entropy, 3 batches": {"ridge": "3 batches"},
    "SepSA, cross-entropy, ridge auto": {"ridge": "auto"},
}
Item = tuple[str, str, float, str, int, str]  # problem, body or solver, rate, method, seed, device


# ---------------------------------------------------------------------- tables


def problem(name: str, body: str, seed: int) -> tuple[Any, ...]:
    """The network, training inputs and targets, and those of the test."""
    if name in ("Energy", "Diabetes"):
        data = runner.dataset(name.lower())
        y, test_y = ((part - data.train_targets.mean(0)) / data.train_targets.std(0)
                     for part in (data.train_targets, data.test_targets))  # fmt: skip
        torch.manual_seed(seed)
        return of_paper.for_dataset(data), data.train_inputs, y, data.test_inputs, test_y
    from defaults import divided, network, uci

    x, y, test_x, test_y = divided(uci(name), seed)
    torch.manual_seed(seed)
    return network(body, x.shape[1], 1), x[:SAMPLES], y[:SAMPLES], test_x, test_y


def train(item: Item) -> float:
    """The error on the test samples, over the variance of the targets."""
    name, body, rate, method, seed, _ = item
    model, x, y, test_x, test_y = problem(name, body, seed)
    anneal.MEMORY, anneal.REPEATS = LAWS.get(method, LAWS[ON])
    steps = EPOCHS * math.ceil(len(x) / BATCH)
    if method == BASE:
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=rate)
    else:
        told = {"samples_per_epoch": len(x), "anneal": method != OFF}
        optimizer = SepSA(model, torch.optim.Adam, solver=RLS(ridge=10.0), lr=rate, **told)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: LAST + (1 - LAST) * (0.5 + 0.5 * math.cos(math.pi * t / steps))
    )
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(BATCH):
            if method == BASE:
                optimizer.zero_grad()
                mse_loss(model(x[rows]), y[rows]).backward()
                optimizer.step()
            else:
                optimizer.learn(x[rows], y[rows])
            schedule.step()
    with torch.no_grad():
        return round(float(mse_loss(model(test_x), test_y)), 5)


def table_items() -> list[Item]:
    items: list[Item] = []
    for half, names in HALVES.items():
        methods = (BASE, OFF, *(LAWS if half == "choice" else (ON,)))
        for name, rate, method, seed in product(names, RATES, methods, range(SEEDS)):
            if name not in NETWORK_RATES:
                bodies = ("ReLU 50",) if name[0].isupper() else BODIES
                items += [(name, body, rate, method, seed, "cpu") for body in bodies]
    return items


# ---------------------------------------------------------------------- networks


def train_network(item: Item) -> float:
    """The error on the test images in percent."""
    name, solver, rate, method, seed, device = item
    setting = {"lr": rate, "anneal": method == ON} | NETWORK_SOLVERS[solver]
    run = networks.train((name, solver, setting, seed, False, device, NETWORK_EPOCHS))
    return round(100 - float(run["accuracy"][-1]), 2)


def network_items(device: str) -> list[Item]:
    return [
        (name, solver, rate, method, seed, device)
        for seed in range(NETWORK_SEEDS)
        for name, rate in NETWORK_RATES.items()
        for solver in NETWORK_SOLVERS
        for method in (OFF, ON)
    ]


# ---------------------------------------------------------------------- results


def known() -> list[dict[str, Any]]:
    return json.loads(RESULT.read_text())["runs"] if RESULT.exists() else []


def store(runs: list[dict[str, Any]]) -> None:
    head = json.dumps(machine(), indent=1)
    lines = ",\n".join("  " + json.dumps(run) for run in runs)
    part = RESULT.with_suffix(".part")
    part.write_text(f'{head[:-2]},\n "runs": [\n{lines}\n ]\n}}\n')
    part.replace(RESULT)


def errors(name: str, body: str, method: str, rate: float) -> list[float]:
    wanted = {"problem": name, "body": body, "method": method, "lr": rate}
    found = {run["seed"]: run["error"] for run in known() if wanted.items() <= run.items()}
    return [found[seed] for seed in sorted(found)]


def best(name: str, body: str, method: str) -> list[float]:
    """The errors by seed at the better rate."""
    rates = (NETWORK_RATES[name],) if name in NETWORK_RATES else RATES
    tried = [found for rate in rates if (found := errors(name, body, method, rate))]
    return min(tried, key=statistics.fmean, default=[])


def table() -> None:
    print(
        "| half | problem | body or solver | Adam | constant | annealed | difference, with twice its standard error |"
    )
    print("|---|---|---|--:|--:|--:|--:|")
    ratios: dict[tuple[str, str], list[float]] = {}
    for half, names in HALVES.items():
        for name, body in product(names, (*NETWORK_SOLVERS, *BODIES, "ReLU 50")):
            off, on, base = (best(name, body, method) for method in (OFF, ON, BASE))
            if len(off) < 2 or len(off) != len(on):
                continue
            differences = [b - a for a, b in zip(off, on, strict=True)]
            error = 2 * statistics.stdev(differences) / math.sqrt(len(differences))
            told = " | ".join(f"{statistics.fmean(part):.4g}" if part else "" for part in (base, off, on))
            print(f"| {half} | {name} | {body} | {told} | {statistics.fmean(differences):+.4f} ± {error:.4f} |")
            for method in (OFF, *LAWS):
                if base and (found := best(name, body, method)):
                    ratio = math.log(statistics.fmean(found) / statistics.fmean(base))
                    ratios.setdefault((half, method), []).append(ratio)
    print()
    for (half, method), logs in ratios.items():
        print(f"{half}, {method}: {math.exp(statistics.fmean(logs)):.3f} of Adam's error, {len(logs)} cells")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="part of `problem, body or solver, method`")
    options = parser.parse_args()
    if not options.table:
        work = train_network if options.networks else train
        wanted = network_items(options.device) if options.networks else table_items()
        runs = known()
        done = {(r["problem"], r["body"], r["lr"], r["method"], r["seed"]) for r in runs}
        items = [i for i in wanted if i[:5] not in done and options.only in f"{i[0]}, {i[1]}, {i[3]}"]
        for k, error, seconds in runner.each(partial(work), items, options.jobs):
            entry = dict(zip(("problem", "body", "lr", "method", "seed", "device"), items[k], strict=True))
            entry["device"] = runner.device_name(entry["device"])
            runs.append(entry | {"error": error, "seconds": round(seconds, 2)})
            store(runs)
            print(runs[-1], flush=True)
    table()


if __name__ == "__main__":
    main()
