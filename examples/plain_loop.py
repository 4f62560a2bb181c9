"""SepSA in your own loop: gradient accumulation, a gradient scaler, clipping, an average of weights, a log.

    python examples/plain_loop.py

The head learns each micro-batch in its forward pass. With forget_per="step" it forgets only at the first micro-batch of
each step, so that it equals the head that learned the whole batch at once.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import sepsa

MICRO = 4  # micro-batches per step


def main() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(512, 6)
    targets = (inputs[:, :1] * inputs[:, 1:2]).sin()
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = sepsa.SepSA(model, torch.optim.AdamW, lr=1e-2, solver=sepsa.RLS(forgetting=0.99), forget_per="step")
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=80)
    scaler = torch.amp.GradScaler("cpu")
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(80):
        rows = torch.randint(512, (MICRO, 16))
        for micro in rows:
            with torch.autocast("cpu", dtype=torch.bfloat16), optimizer.observe(targets[micro]):
                loss = mse_loss(model(inputs[micro]).float(), targets[micro]) / MICRO
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        if step % 20 == 19:
            samples = optimizer.solver.health()["effective_samples"]
            print(f"step {step + 1}: loss {MICRO * loss.item():.4f}, the head remembers {samples:.0f} samples")
    with torch.no_grad():
        print(f"averaged weights: mean squared error {mse_loss(average(inputs), targets).item():.4f}")


if __name__ == "__main__":
    main()
