"""A chaotic series by a random recurrent body and an RLS readout (an echo state network), learned online.

    python examples/reservoir.py

The body's weights are fixed. The readout learns each value once; then the network runs on its own predictions, which
the figure reservoir.png shows.
"""

import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn

from sepsa import RLS

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
values = [1.2] * 18  # Mackey-Glass: x(t + 1) = 0.9 x(t) + 0.2 x(t - 17)/(1 + x(t - 17)^10)
while len(values) < 2600:
    values.append(0.9 * values[-1] + 0.2 * values[-18] / (1 + values[-18] ** 10))
series = torch.tensor(values[200:]).unsqueeze(1)

W, V, b = torch.randn(100, 100), torch.rand(100, 1) - 0.5, 0.6 * torch.rand(100) - 0.3
W *= 1.1 / torch.linalg.eigvals(W).abs().max()
head = nn.Linear(100, 1).requires_grad_(False)
solver = RLS(ridge=1e-8).bind(head)


def body(h: Tensor, x: Tensor) -> Tensor:
    return 0.15 * h + 0.85 * torch.tanh(W @ h + V @ x + b)


h, errors, alone = torch.zeros(100), [], [series[2000]]
for k in range(2000):
    h = body(h, series[k])
    errors.append(head(h) - series[k + 1])  # predicted before the value is learned
    if k >= 100:  # the effect of the zero initial state has decayed
        solver.update(h, series[k + 1])
for _ in range(149):
    h = body(h, alone[-1])
    alone.append(head(h))
late = torch.cat(errors[-500:])
print(f"one step ahead, root mean squared error of the last 500 values: {late.square().mean() ** 0.5:.2g}")
apart = torch.cat(alone) - series[2000:2150, 0]
print(f"in a closed loop, of the first 50 values: {apart[:50].square().mean() ** 0.5:.2g}")
fig, ax = plt.subplots(figsize=(7, 3), layout="constrained")
ax.plot(series[2000:2150], label="Mackey-Glass")
ax.plot(torch.cat(alone), "--", label="the network alone")
ax.set(xlabel="values since the last one learned", ylim=(0.2, 1.6))
ax.legend()
fig.savefig("reservoir.png", dpi=120)
