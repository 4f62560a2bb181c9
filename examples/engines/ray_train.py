"""Ray Train runs SepSA under DistributedDataParallel on two workers; one is killed, and the end has the same bits.

python examples/engines/ray_train.py
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from sepsa import SepSA

STEPS, EVERY, KILLED_AT = 20, 5, 13


def train(config: dict[str, Any]) -> None:
    """Train on this worker's share of every batch, from the last checkpoint on."""
    rank, world = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = SepSA(model, torch.optim.Adam, lr=1e-2)
    ddp, first = DistributedDataParallel(model), 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "state.pt"), weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["done"]
    killed = Path(config["killed"])
    for step in range(first, STEPS):
        if config["kill"] and step == KILLED_AT and rank == 1 and not killed.exists():
            killed.write_text(str(first))
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(32, 6, generator=generator)[rank::world]
        targets = torch.stack([inputs.square().sum(1), inputs[:, 0] * inputs[:, 1]], 1)
        with optimizer.observe(targets):
            loss = mse_loss(ddp(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % EVERY == 0:
            with tempfile.TemporaryDirectory() as folder:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": step + 1}
                torch.save(state, Path(folder, "state.pt"))
                saved = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
                ray.train.report({"loss": float(loss), "first": first}, checkpoint=saved)


def weights(folder: Path, kill: bool) -> dict[str, torch.Tensor]:
    """Train, and return the model's parameters of the last checkpoint."""
    trainer = TorchTrainer(
        train,
        train_loop_config={"kill": kill, "killed": str(folder / "killed")},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            storage_path=str(folder), name=f"kill-{kill}", failure_config=ray.train.FailureConfig(max_failures=1)
        ),
    )
    result = trainer.fit()
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as saved:
        state: dict[str, torch.Tensor] = torch.load(Path(saved, "state.pt"), weights_only=True)["model"]
    if kill:
        print(f"a worker was killed at step {KILLED_AT}; training resumed at step {result.metrics['first']}")  # type: ignore[index]
        assert (folder / "killed").exists()
    return state


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        killed, whole = (weights(Path(folder), kill) for kill in (True, False))
    ray.shutdown()
    assert all(torch.equal(killed[name], whole[name]) for name in whole)
    print("the model of the killed run and of one that was not killed have the same bits")


if __name__ == "__main__":
    main()
