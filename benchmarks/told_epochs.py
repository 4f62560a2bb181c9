"""How many samples a head remembers where an epoch is told: on a CPU, and on a GPU eager, compiled and captured.

    python benchmarks/told_epochs.py      # needs a CUDA device for all but the first two lines

Six epochs of 1,280 samples in batches of 32, with `samples_per_epoch=1280`; every line must show the same number.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import mse_loss

from sepsa import SepSA

SAMPLES, BATCH, EPOCHS = 1280, 32, 6


def remembered(device: str, way: str) -> tuple[float, float]:
    """The samples that the head remembers at the end, and its forgetting."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 8, generator=generator)
    y = (x[:, :1] * x[:, 1:2] + 0.1 * torch.randn(SAMPLES, 1, generator=generator)).to(device)
    x = x.to(device)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 50), nn.Tanh(), nn.Linear(50, 1)).to(device)
    optimizer = SepSA(model, torch.optim.Adam, lr=1e-3, samples_per_epoch=SAMPLES)
    order = torch.cat([torch.randperm(SAMPLES, generator=generator).view(-1, BATCH) for _ in range(EPOCHS)]).to(device)
    if way == "captured":
        optimizer.capture(x[:BATCH], y[:BATCH]).run(x, y, order)
    else:
        call = torch.compile(model) if way == "compiled" else model
        for rows in order:
            with optimizer.observe(y[rows]):
                loss = mse_loss(call(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return optimizer.solver.samples, optimizer.solver.forgetting


def main() -> None:
    cases = [("cpu", "eager"), ("cpu", "captured")]
    if torch.cuda.is_available():
        cases += [("cuda", way) for way in ("eager", "compiled", "captured")]
    for device, way in cases:
        samples, forgetting = remembered(device, way)
        print(f"{device}, {way}: {samples:.6f} samples, forgetting {forgetting:.6f}")


if __name__ == "__main__":
    main()
