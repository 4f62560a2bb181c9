"""The algorithm in pictures: what head and body do in one step, and over a stream of single samples.

    python examples/pictures.py --out docs

Writes step.png (one step in three panels), learning.png (small multiples: SepSA, Adam, and SepSA's features) and
first.png (the errors of SepSA and Adam on Diabetes).
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from sepsa import SepSA
from sepsa.shell.demo import FIRST_SEED, diabetes, online

SEEN = (0, 5, 20, 80, 320)
GRID = torch.linspace(-3, 3, 200)[:, None]
ORANGE, BLUE, GREY = "#d95f02", "#1f78b4", "#888888"


def law(x: Tensor) -> Tensor:
    return torch.sin(2 * x) + 0.3 * x**2


def samples(count: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    x = 6 * torch.rand(count, 1, generator=g) - 3
    return x, law(x) + 0.1 * torch.randn(count, 1, generator=g)


def network() -> nn.Sequential:
    torch.manual_seed(1)
    first = nn.Linear(1, 24)
    with torch.no_grad():
        first.weight.mul_(2)  # so that the features differ over the plotted range
    return nn.Sequential(first, nn.Tanh(), nn.Linear(24, 1))


@torch.no_grad()
def curves(model: nn.Sequential) -> tuple[Tensor, Tensor]:
    """Return the network's outputs and features over the grid."""
    return model(GRID)[:, 0], nn.Sequential(model[0], model[1])(GRID)


def one_step(path: Path) -> list[float]:
    """Draw the second step, on ten samples: before, with the head updated, and with the body updated too."""
    import matplotlib.pyplot as plt

    x, y = samples(16)
    model = network()
    optimizer = SepSA(model, torch.optim.Adam, lr=1e-1)
    optimizer.learn(x[:6], y[:6])
    x, y = x[6:], y[6:]
    shown = [curves(model)]
    with optimizer.observe(y):  # the head learns here, in the middle of the forward pass
        loss = mse_loss(model(x), y)
    shown.append(curves(model))
    loss.backward()
    optimizer.step()
    shown.append(curves(model))
    titles = ("1  before the step", "2  the head has learned the batch", "3  the body follows, at the new head")
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.8), sharey=True, layout="constrained")
    for k, (axis, title) in enumerate(zip(axes, titles, strict=True)):
        axis.plot(GRID, law(GRID), color=GREY, lw=1, ls=":", label="truth")
        if k:
            axis.plot(GRID, shown[k - 1][0], color=ORANGE, lw=1, alpha=0.35, label="a panel earlier")
        axis.plot(GRID, shown[k][0], color=ORANGE, lw=1.8, label="model")
        axis.plot(x, y, "o", color="black", ms=4, label="this batch")
        axis.set_title(title, fontsize=10, loc="left")
        axis.set(ylim=(-2.2, 4.2), xticks=[], yticks=[])
    axes[1].legend(fontsize=8, frameon=False, loc="upper center", ncols=2)
    figure.savefig(path, dpi=150)
    truth = law(GRID)[:, 0]
    return [float(mse_loss(fit, truth)) for fit, _ in shown]


def over_time(path: Path) -> dict[str, list[float]]:
    """Draw how SepSA, and Adam on all parameters, learn the same samples one by one."""
    import matplotlib.pyplot as plt

    x, y = samples(max(SEEN))
    ours, theirs = network(), network()
    optimizer = SepSA(ours, torch.optim.Adam, lr=1e-2)
    adam = torch.optim.Adam(theirs.parameters(), lr=1e-2)
    shown: dict[str, list[tuple[Tensor, Tensor]]] = {"SepSA": [], "Adam": []}
    for k in range(max(SEEN) + 1):
        if k in SEEN:
            shown["SepSA"].append(copy.deepcopy(curves(ours)))
            shown["Adam"].append(copy.deepcopy(curves(theirs)))
        if k == max(SEEN):
            break
        optimizer.learn(x[k : k + 1], y[k : k + 1])
        adam.zero_grad()
        mse_loss(theirs(x[k : k + 1]), y[k : k + 1]).backward()
        adam.step()
    figure, axes = plt.subplots(3, len(SEEN), figsize=(9, 5), sharex=True, sharey="row", layout="constrained")
    for j, count in enumerate(SEEN):
        for i, (name, color) in enumerate((("SepSA", ORANGE), ("Adam", BLUE))):
            axes[i, j].plot(x[:count], y[:count], ".", color="black", ms=3, alpha=0.4)
            axes[i, j].plot(GRID, law(GRID), color=GREY, lw=1, ls=":")
            axes[i, j].plot(GRID, shown[name][j][0], color=color, lw=1.8)
            axes[i, j].set(ylim=(-2.2, 4.2), xticks=[], yticks=[])
        axes[2, j].plot(GRID, shown["SepSA"][j][1][:, ::2], color=ORANGE, lw=0.8, alpha=0.7)
        axes[2, j].set(xticks=[], yticks=[])
        axes[0, j].set_title(f"{count} samples" if count else "before the first", fontsize=10)
    for axis, name in zip(axes[:, 0], ("SepSA", "Adam, head and body", "SepSA's features"), strict=True):
        axis.set_ylabel(name)
    figure.savefig(path, dpi=150)
    truth = law(GRID)[:, 0]
    return {name: [float(mse_loss(fit, truth)) for fit, _ in fits] for name, fits in shown.items()}


def errors_of_diabetes(path: Path, seeds: int = 3) -> dict[str, list[float]]:
    """Draw the test error of SepSA and Adam at three learning rates, in one panel that fits a phone."""
    import matplotlib.pyplot as plt

    rows = diabetes()
    figure, axis = plt.subplots(figsize=(4, 3.4), layout="constrained")
    final: dict[str, list[float]] = {"SepSA": [], "Adam": []}
    for method, color in (("SepSA", ORANGE), ("Adam", BLUE)):
        for lr, style in ((1e-2, "-"), (1e-3, "--"), (1e-4, ":")):
            runs = [online(rows, method, lr, FIRST_SEED + k, "standardized targets") for k in range(seeds)]
            middle = np.median(runs, 0)
            axis.plot(middle, color=color, ls=style, label=f"{method}, rate {lr:g}")
            final[method].append(float(middle[-1]))
    axis.set(xlabel="samples seen", ylabel="test error", yscale="log", ylim=(2500, 22_000), xlim=(0, len(middle) - 1))
    axis.set_yticks((3000, 5000, 10_000, 20_000), ("3,000", "5,000", "10,000", "20,000"))
    axis.minorticks_off()
    figure.legend(fontsize=9, ncols=2, loc="outside lower center", frameon=False)
    figure.savefig(path, dpi=150)
    return final


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--out", type=Path, default=Path("."), help="the folder for the figures")
    folder = options.parse_args().out
    mpl.use("agg")
    print("one step, error to the law:", *(f"{error:.3f}" for error in one_step(folder / "step.png")))
    for name, errors in over_time(folder / "learning.png").items():
        print(f"{name}, after {', '.join(map(str, SEEN))} samples:", *(f"{error:.3f}" for error in errors))
    for name, errors in errors_of_diabetes(folder / "first.png").items():
        print(f"{name} on Diabetes, after one pass:", *(f"{error:.0f}" for error in errors))


if __name__ == "__main__":
    main()
