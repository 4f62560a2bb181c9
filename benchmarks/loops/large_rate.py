"""Fig. 4 at learning rate 100: how often SepSA's training error leaves the ground, by the arithmetic of its head.

    python benchmarks/loops/large_rate.py

Writes large_rate.json. Energy in mini-batches as in the paper's Fig. 4: RMSprop on the body, 50 epochs, each of which
shows the head half of what the last one did; 10 seeds, at rates 0.001, 10 and 100. Three heads: `RLS`, in square-root
form and float64; the paper's covariance form, row by row in float32, P <- P - k(hᵀP); and P <- P - k(Ph)ᵀ, which is the
same in exact arithmetic and keeps P symmetric.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.measure import write
from reproduction import networks, runner
from reproduction.experiments import FIGURE_SEEDS
from reproduction.methods import Trainer, separable
from reproduction.training import evaluate
from sepsa import RLS

EPOCHS, BATCH, RATES, SEEDS = 50, 32, (1e-3, 10.0, 100.0), FIGURE_SEEDS[:10]
HIGH = 30.0  # of a training error: targets have a variance of about 100


class Covariance:
    """Equations 17 and 18 row by row on P (p, p) in float32, as the paper's own code has them."""

    forgets = True
    loss = staticmethod(functional.mse_loss)

    def __init__(self, symmetric: bool) -> None:
        self.symmetric, self.steps = symmetric, 0

    def bind(self, linear: nn.Linear) -> Covariance:
        self.linear, self.P = linear, torch.eye(linear.in_features + 1)
        return self

    @torch.no_grad()
    def update(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None = None) -> None:
        linear, P = self.linear, self.P
        W = torch.cat([linear.weight, linear.bias[:, None]], 1)
        for x, y in zip(features, targets, strict=True):
            h = torch.cat([x, x.new_ones(1)])
            Ph = P @ h
            k = Ph / (1 + h @ Ph)
            P = P - torch.outer(k, Ph if self.symmetric else h @ P)
            W = W + torch.outer(y - W @ h, k)
        linear.weight.copy_(W[:, :-1])
        linear.bias.copy_(W[:, -1])
        self.P, self.steps = P, self.steps + 1

    def state_dict(self) -> dict[str, Any]:
        return {"P": self.P}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.P = state_dict["P"]

    def checkpoint(self) -> Any:
        return self.P, self.linear.weight.detach().clone(), self.linear.bias.detach().clone()

    @torch.no_grad()
    def rollback(self, token: Any) -> None:
        self.P = token[0]
        self.linear.weight.copy_(token[1])
        self.linear.bias.copy_(token[2])


HEADS = {
    "RLS, float64": lambda: RLS(bias_ridge="ridge"),
    "covariance, float32": lambda: Covariance(symmetric=False),
    "covariance, float32, symmetric": lambda: Covariance(symmetric=True),
}


def curve(head: str, lr: float, seed: int) -> list[float]:
    """The training error after every epoch."""
    data = runner.dataset("energy")
    torch.manual_seed(seed)
    model = networks.for_dataset(data)
    trainer = Trainer(model, separable(model, HEADS[head](), "RMSprop", lr), halving=True)
    generator, errors = torch.Generator().manual_seed(seed), []
    for epoch in range(1, EPOCHS + 1):
        trainer.begin_epoch(epoch)
        model.train()
        for rows in torch.randperm(len(data.train_inputs), generator=generator).split(BATCH):
            trainer.learn(data.train_inputs[rows], data.train_targets[rows])
        errors.append(evaluate(trainer, data.train_inputs, data.train_targets, "regression"))
    return errors


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for lr in RATES:
        for head in HEADS:
            curves = [curve(head, lr, seed) for seed in SEEDS]
            row = {
                "epochs above 30": statistics.fmean(sum(not e < HIGH for e in c) for c in curves),
                "median error at the end": statistics.median(c[-1] for c in curves),
                "highest error": max(e if math.isfinite(e) else math.inf for c in curves for e in c),
            }
            found[f"{head}, learning rate {lr:g}"] = {key: float(f"{value:.4g}") for key, value in row.items()}
            print(f"{head}, learning rate {lr:g}: {row}", flush=True)
    write(__file__, {"seeds": len(SEEDS), "epochs": EPOCHS, **found})


if __name__ == "__main__":
    main()
