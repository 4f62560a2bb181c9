"""A sum of decaying exponentials, the classical problem of variable projection, fitted online.

    python examples/exponentials.py --figure exponentials.png

The rates are the body, the amplitudes the head: y = Σ a_i exp(-r_i t). Compared with Adam on all four parameters.
"""

from __future__ import annotations

import argparse

import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from sepsa import RLS, SepSA

RATES, AMPLITUDES = torch.tensor([0.3, 2.0]), torch.tensor([1.0, 2.0])


class Exponentials(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log_rates = nn.Parameter(torch.tensor([1.0, 5.0]).log())
        self.amplitudes = nn.Linear(2, 1, bias=False)

    def forward(self, t: Tensor) -> Tensor:
        return self.amplitudes(torch.exp(-self.log_rates.exp() * t))


def fit(separable: bool, steps: int = 1000, batch: int = 8) -> Tensor:
    """Return the two rates after each step (steps, 2), fitted to noisy samples that are seen once."""
    torch.manual_seed(0)
    model = Exponentials()
    if separable:
        optimizer: torch.optim.Optimizer = SepSA(
            model, torch.optim.Adam, lr=1e-2, solver=RLS(ridge=1e-3, forgetting=0.9)
        )
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    rates = torch.empty(steps, 2)
    for step in range(steps):
        t = 6 * torch.rand(batch, 1)
        y = torch.exp(-RATES * t) @ AMPLITUDES[:, None] + 0.01 * torch.randn(batch, 1)
        if isinstance(optimizer, SepSA):
            optimizer.learn(t, y)
        else:
            mse_loss(model(t), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        rates[step] = model.log_rates.detach().exp()
    return rates


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--figure", default="exponentials.png")
    path = parser.parse_args().figure
    fig, ax = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, separable, style in (("SepSA", True, "-"), ("Adam", False, "--")):
        rates = fit(separable)
        print(
            f"{name}: rates {rates[-1, 0]:.3f} and {rates[-1, 1]:.3f}, the truth is {RATES[0]:.3f} and {RATES[1]:.3f}"
        )
        for i in range(2):
            ax.plot(rates[:, i], style, color=f"C{i}", label=f"{name}, rate {i + 1}")
    for rate in RATES:
        ax.axhline(float(rate), color="k", lw=0.8, ls=":")
    ax.set(xlabel="steps of 8 samples", ylabel="rate (dotted: the truth)", yscale="log")
    ax.legend()
    fig.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
