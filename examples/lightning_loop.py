"""SepSA in Lightning: automatic and manual optimization, and Fabric for your own loop.

    python examples/lightning_loop.py

Needs `pip install lightning`. The one line that differs from any other optimizer is `with sepsa.observe(...)`.
"""

from __future__ import annotations

import logging
import warnings

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import sepsa

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # warnings of other packages at import
    import lightning

SAMPLES = 256  # in an epoch


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))


def loader(batch: int = 16) -> DataLoader:
    g = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 6, generator=g)
    return DataLoader(TensorDataset(inputs, (inputs[:, :1] * inputs[:, 1:2]).sin()), batch)


class Automatic(lightning.LightningModule):
    """Lightning calls backward, clips, and steps; its schedulers and accumulation work as with Adam."""

    def __init__(self, solver: sepsa.HeadSolver | None = None) -> None:
        super().__init__()
        self.network, self.solver = network(), solver
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor]) -> Tensor | None:
        inputs, targets = batch
        with sepsa.observe(self.network, targets):
            loss = mse_loss(self.network(inputs), targets)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        told = None if self.solver else SAMPLES  # a solver of your own may have a forgetting of its own
        optimizer = sepsa.SepSA(self.network, torch.optim.Adam, lr=1e-2, solver=self.solver, samples_per_epoch=told)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)}


class Manual(Automatic):
    """Manual optimization: `self.optimizers()` is Lightning's wrapper of the SepSA."""

    def __init__(self, solver: sepsa.HeadSolver | None = None) -> None:
        super().__init__(solver)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor]) -> None:
        inputs, targets = batch
        optimizer = self.optimizers()
        with optimizer.observe(targets):
            loss = mse_loss(self.network(inputs), targets)
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        self.losses.append(loss.item())


def fabric_loop(epochs: int = 4) -> list[float]:
    """Train in your own loop: Fabric returns model and optimizer wrapped."""
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    model = network()
    optimizer = sepsa.SepSA(model, torch.optim.Adam, lr=1e-2, samples_per_epoch=SAMPLES)
    model, optimizer = fabric.setup(model, optimizer)
    losses = []
    for _ in range(epochs):
        for inputs, targets in loader():
            with sepsa.observe(model, targets):
                loss = mse_loss(model(inputs), targets)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    torch.manual_seed(0)
    losses = {"Fabric, bf16": fabric_loop()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice about workers and processors
        for kind in (Automatic, Manual):
            torch.manual_seed(0)
            module = kind()
            lightning.Trainer(max_epochs=4, accelerator="cpu", enable_model_summary=False, **quiet).fit(
                module, loader()
            )
            losses[f"Lightning, {kind.__name__.lower()}"] = module.losses
    for name, values in losses.items():
        print(f"{name}: {values[0]:.4f} at the first batch, {values[-1]:.4f} at the last")


if __name__ == "__main__":
    main()
