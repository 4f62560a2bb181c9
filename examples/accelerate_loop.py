"""SepSA in accelerate: bf16, gradient accumulation, clipping, a scheduler, a saved and loaded state.

    python examples/accelerate_loop.py

Needs `pip install accelerate`. `accelerator.prepare` wraps the optimizer and does not forward `observe`, so find the
head by the model: `with sepsa.observe(model, targets)`.
"""

from __future__ import annotations

import tempfile

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import sepsa

SAMPLES = 256  # in an epoch


def loader(batch: int = 16) -> DataLoader:
    g = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 6, generator=g)
    return DataLoader(TensorDataset(inputs, (inputs[:, :1] * inputs[:, 1:2]).sin()), batch)


class Run:
    """Train a small model, with everything that accelerate saves."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
        model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
        optimizer = sepsa.SepSA(model, torch.optim.Adam, lr=1e-2, samples_per_epoch=SAMPLES)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 8, 0.9)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader(), scheduler
        )

    def epoch(self) -> list[float]:
        losses = []
        for inputs, targets in self.loader:
            with self.accelerator.accumulate(self.model):
                with sepsa.observe(self.model, targets):
                    loss = mse_loss(self.model(inputs), targets)
                self.accelerator.backward(loss)
                self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def main() -> None:
    run = Run()
    first = run.epoch()
    with tempfile.TemporaryDirectory() as folder:
        run.accelerator.save_state(folder)
        second = run.epoch()
        resumed = Run()
        resumed.accelerator.load_state(folder)
        again = resumed.epoch()
    print(f"loss {first[0]:.4f} at the first batch, {second[-1]:.4f} at the last; resumed {again[-1]:.4f}")


if __name__ == "__main__":
    main()
