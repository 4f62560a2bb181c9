"""A SepSA step beside an Adam step over a grid of networks: inputs, hidden layers, outputs and rows in a batch.

    python benchmarks/loops/step_grid.py [--rounds 15]     # writes step_grid-aarch64.json or step_grid-x86_64.json
    python benchmarks/loops/step_grid.py --figure          # draws step_grid.svg from both

Hidden layers have 64 units with ReLU. Both steps alternate on the same batches in one thread; a ratio is one of
processor time, the median over rounds with quartiles. SepSA has its defaults, with Adam for the body.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.measure import alternate, median_and_quartiles, ratio, spread, training_step, write
from sepsa import SepSA

INPUTS, LAYERS, OUTPUTS, BATCHES = (8, 64, 256), (1, 2, 3), (1, 10), (1, 8, 32, 128, 512)
WIDTH = 64
MACHINES = {"aarch64": "Neoverse N1", "x86_64": "Intel Xeon"}


def network(inputs: int, layers: int, outputs: int) -> nn.Module:
    torch.manual_seed(0)
    widths = [inputs, *[WIDTH] * layers]
    hidden = [part for pair in itertools.pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, outputs))


def step(optimizer: Callable[..., Any], shape: tuple[int, int, int], batches: Any) -> Callable[[], None]:
    """A training step on the next of these batches: one that is fitted exactly has gradients that slow a processor."""
    model = network(*shape)
    learn = partial(training_step, model, optimizer(model))
    rotation = itertools.cycle(batches)
    return lambda: learn(*next(rotation))


def cell(inputs: int, layers: int, outputs: int, batch: int, rounds: int) -> dict[str, Any]:
    batches = [(torch.randn(batch, inputs), torch.randn(batch, outputs)) for _ in range(64)]
    shape = inputs, layers, outputs
    makers = {
        "SepSA": lambda model: SepSA(model, torch.optim.Adam, lr=1e-3),
        "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
    }
    steps = {name: step(make, shape, batches) for name, make in makers.items()}
    times = alternate(steps, rounds, 0.03, clock=time.process_time)
    seconds = {name: spread(values) for name, values in times.items()}
    size = dict(zip(("inputs", "layers", "outputs"), shape, strict=True))
    return size | {"batch": batch, "seconds": seconds, "ratio": ratio(times, "SepSA", "Adam")}


def measure(rounds: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cells = []
    for inputs, layers, outputs, batch in itertools.product(INPUTS, LAYERS, OUTPUTS, BATCHES):
        cells.append(cell(inputs, layers, outputs, batch, rounds))
        words = median_and_quartiles(cells[-1]["ratio"])
        print(f"{inputs:3d} inputs, {layers} x {WIDTH}, {outputs:2d} outputs, batch {batch:3d}: {words}", flush=True)
    ratios = [each["ratio"]["median"] for each in cells]
    worst = max(cells, key=lambda each: each["ratio"]["median"])
    print("largest:", worst)
    write(
        Path(__file__).with_name(f"step_grid-{platform.machine()}"),
        {"cells": cells, "ratios": spread(ratios), "largest": worst},
    )


def draw() -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot
    from matplotlib.colors import LogNorm

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    rows, columns = list(itertools.product(INPUTS, LAYERS)), list(itertools.product(OUTPUTS, BATCHES))
    for ax, (machine, name) in zip(axes, MACHINES.items(), strict=True):
        path = Path(__file__).with_name(f"step_grid-{machine}.json")
        cells = {(c["inputs"], c["layers"], c["outputs"], c["batch"]): c for c in json.loads(path.read_text())["cells"]}
        values = [[cells[row + column]["ratio"]["median"] for column in columns] for row in rows]
        ax.imshow(values, cmap="RdBu_r", norm=LogNorm(1 / 2.5, 2.5), aspect="auto")
        for (i, line), j in itertools.product(enumerate(values), range(len(columns))):
            ax.text(j, i, f"{line[j]:.2f}", ha="center", va="center", fontsize=8, color="w" if line[j] > 1.8 else "k")
        ax.set_xticks(range(len(columns)), [str(batch) for _, batch in columns])
        ax.set_yticks(range(len(rows)), [f"{inputs} inputs, {layers} x {WIDTH}" for inputs, layers in rows])
        ax.axvline(len(BATCHES) - 0.5, color="black", lw=1)
        ax.set(title=f"SepSA / Adam, {name}", xlabel="rows in a batch: left 1 output, right 10 outputs")
    figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--figure", action="store_true")
    options = parser.parse_args()
    if options.figure:
        draw()
    else:
        measure(options.rounds)


if __name__ == "__main__":
    main()
