"""A chaotic series by a random recurrent body and an RLS readout (echo state network, FORCE), learned online.

    python examples/reservoir.py --figure reservoir.png

The body's weights rest. The readout learns each value once, as it comes; then the loop is closed, and the network goes
on from its own predictions.
"""

import argparse

import torch
from matplotlib import pyplot as plt
from torch import nn

from sepsa import RLS

parser = argparse.ArgumentParser()
parser.add_argument("--figure", default="reservoir.png")
path = parser.parse_args().figure
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

series = [1.2] * 18  # Mackey-Glass: x(t + 1) - x(t) = 0.2 x(t - 17)/(1 + x(t - 17)^10) - 0.1 x(t)
while len(series) < 2600:
    series.append(0.9 * series[-1] + 0.2 * series[-18] / (1 + series[-18] ** 10))
x = torch.tensor(series[200:]).unsqueeze(1)

W, V, b = torch.randn(100, 100), torch.rand(100, 1) - 0.5, 0.6 * torch.rand(100) - 0.3
W *= 1.1 / torch.linalg.eigvals(W).abs().max()
solver = RLS(ridge=1e-8).bind(head := nn.Linear(100, 1))
h, squares, alone = torch.zeros(100), [], [x[2000]]
with torch.no_grad():
    for k in range(2000):
        h = 0.15 * h + 0.85 * torch.tanh(W @ h + V @ x[k] + b)
        squares.append((head(h) - x[k + 1]).square())  # predicted before it is learned
        if k >= 100:  # the start from zero has faded
            solver.update(h, x[k + 1])
    for _ in range(300):
        h = 0.15 * h + 0.85 * torch.tanh(W @ h + V @ alone[-1] + b)
        alone.append(head(h))
print(f"one step ahead, root mean squared error of the last 500 values: {torch.cat(squares[-500:]).mean().sqrt():.2g}")
print(f"in a closed loop, of the first 50: {(torch.cat(alone)[:50] - x[2000:2050, 0]).square().mean().sqrt():.2g}")
fig, ax = plt.subplots(figsize=(7, 3), layout="constrained")
ax.plot(x[2000:2300], label="Mackey-Glass")
ax.plot(torch.cat(alone)[:300], "--", label="the network alone")
ax.legend()
fig.savefig(path, dpi=120)
