"""A frozen body of random features, as in OS-ELM and reservoir computing: SepSA is then plain RLS.

    python examples/random_features.py --figure random_features.png

Nothing in the body learns, so each step is the head's exact least-squares fit to all samples so far.
"""

from __future__ import annotations

import argparse

import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn

from sepsa import RLS, SepSA


def stream(n: int) -> tuple[Tensor, Tensor]:
    x = 2 * torch.rand(n, 2) - 1
    return x, torch.sin(4 * x[:, :1]) * torch.cos(3 * x[:, 1:]) + 0.05 * torch.randn(n, 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--figure", default="random_features.png")
    path = parser.parse_args().figure
    torch.manual_seed(0)
    first, head = nn.Linear(2, 100), nn.Linear(100, 1)
    body = nn.Sequential(first, nn.Tanh()).requires_grad_(False)
    first.weight *= 4
    model = nn.Sequential(body, head)
    optimizer = SepSA(model, torch.optim.Adam, solver=RLS(ridge=1e-2))
    alone = nn.Linear(100, 1)
    alone.load_state_dict(head.state_dict())
    plain = RLS(ridge=1e-2).bind(alone)

    inputs, targets = stream(1500)
    squares = []
    for x, y in zip(inputs.split(1), targets.split(1), strict=True):
        with torch.no_grad():
            squares.append((model(x) - y).square().item())
        optimizer.learn(x, y)
        plain.update(body(x), y)
    difference = (head.weight - alone.weight).abs().max().item()
    print(f"largest difference between SepSA's head and plain RLS: {difference:g}")
    print(f"root mean squared error of the last 500 predictions: {(sum(squares[-500:]) / 500) ** 0.5:.3f}, noise 0.05")

    fig, ax = plt.subplots(figsize=(6, 3.5), layout="constrained")
    ax.plot(torch.tensor(squares).unfold(0, 50, 5).mean(1).sqrt(), label="SepSA, frozen body")
    ax.axhline(0.05, color="k", lw=0.8, ls=":", label="noise")
    ax.set(xlabel="samples seen / 5", ylabel="error before learning (50 samples)", yscale="log")
    ax.legend()
    fig.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
