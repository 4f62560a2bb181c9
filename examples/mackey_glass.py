"""A radial-basis-function network that predicts a chaotic series one step ahead, online (Mackey-Glass, delay 17).

    python examples/mackey_glass.py --figure mackey_glass.png

Centres and widths are the body, the weights of the radial functions the head. Each value is predicted, then learned.
Compared with Adam on all parameters, at ten times the learning rate, which suits Adam better.
"""

from __future__ import annotations

import argparse

import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from sepsa import RLS, SepSA

LAGS = (0, 6, 12, 18)


class RadialBasis(nn.Module):
    def __init__(self, inputs: int, bumps: int) -> None:
        super().__init__()
        self.centres = nn.Parameter(0.4 + 0.9 * torch.rand(bumps, inputs))
        self.log_widths = nn.Parameter(torch.zeros(bumps))
        self.head = nn.Linear(bumps, 1)

    def forward(self, x: Tensor) -> Tensor:
        distances = (x[:, None, :] - self.centres).square().sum(-1)
        return self.head(torch.exp(-distances / (2 * self.log_widths.exp().square())))


def mackey_glass(n: int, delay: int = 17) -> Tensor:
    """Integrate x' = 0.2 x(t - delay)/(1 + x(t - delay)^10) - 0.1 x, by ten Euler steps per unit of time."""
    x = [1.2] * (10 * delay + 1)
    for _ in range(10 * (n + 500)):
        late = x[-10 * delay - 1]
        x.append(x[-1] + 0.1 * (0.2 * late / (1 + late**10) - 0.1 * x[-1]))
    return torch.tensor(x[-10 * n :: 10])


def errors(separable: bool, series: Tensor) -> Tensor:
    """Return the squared error of each prediction, made before its value was learned."""
    torch.manual_seed(0)
    model = RadialBasis(len(LAGS), 30)
    if separable:
        optimizer: torch.optim.Optimizer = SepSA(
            model, torch.optim.Adam, lr=1e-4, solver=RLS(ridge=1e-6, forgetting=0.99)
        )
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    squares = []
    for k in range(max(LAGS), len(series) - 1):
        x, y = series[[k - lag for lag in LAGS]][None], series[k + 1].view(1, 1)
        with torch.no_grad():
            squares.append(mse_loss(model(x), y))
        if isinstance(optimizer, SepSA):
            optimizer.learn(x, y)
        else:
            mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(squares)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--figure", default="mackey_glass.png")
    path = parser.parse_args().figure
    series = mackey_glass(2500)
    fig, (above, below) = plt.subplots(2, figsize=(7, 5), layout="constrained", height_ratios=(1, 2))
    above.plot(series[:600], lw=0.8)
    above.set(ylabel="x(t)", title="Mackey-Glass, the first 600 values")
    for name, separable in (("SepSA", True), ("Adam", False)):
        squares = errors(separable, series)
        print(f"{name}: root mean squared error of the last 1,000 predictions {squares[-1000:].mean().sqrt():.2g}")
        below.plot(squares.unfold(0, 100, 10).mean(1).sqrt(), label=name)
    below.set(xlabel="values seen / 10", ylabel="error one step ahead\n(100 values)", yscale="log")
    below.legend()
    fig.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
