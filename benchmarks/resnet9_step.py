"""What SepSA costs in a network that people train: a ResNet-9 on CIFAR-10's shapes, batch 256, bf16, eager, on a GPU.

    python benchmarks/resnet9_step.py

Writes resnet9_step.json. Needs a CUDA device. Steps of AdamW with cross-entropy and of SepSA with an AdamW body and
one-hot targets, at forgetting 1 and 0.999, in turns on random images.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from measure import ratio, spread, write
from networks import resnet9
from torch import Tensor
from torch.nn import functional

from sepsa import RLS, SepSA

BATCH, STEPS, ROUNDS = 256, 50, 15


def step_of(kind: str, x: Tensor, y: Tensor) -> Callable[[], None]:
    torch.manual_seed(0)
    model = resnet9().to("cuda", memory_format=torch.channels_last)
    hot = functional.one_hot(y, 10).float()
    if kind == "AdamW":
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

        def step() -> None:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = functional.cross_entropy(model(x), y)
            loss.backward()
            adam.step()
            adam.zero_grad()

        return step
    solver = RLS(forgetting=float(kind.split()[-1]))
    optimizer = SepSA(model, torch.optim.AdamW, lr=1e-3, solver=solver, fused=True)

    def step_sepsa() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16), optimizer.observe(hot):
            loss = functional.mse_loss(model(x), hot)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step_sepsa


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    x = torch.randn(BATCH, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    y = torch.randint(10, (BATCH,), device="cuda")
    steps = {name: step_of(name, x, y) for name in ("AdamW", "SepSA at forgetting 1.0", "SepSA at forgetting 0.999")}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(ROUNDS + 1):
        for name, step in steps.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(STEPS):
                step()
            torch.cuda.synchronize()
            if turn:
                times[name].append((time.perf_counter() - start) / STEPS)
    ratios = {f"{name} / AdamW": ratio(times, name, "AdamW") for name in steps if name != "AdamW"}
    for name, values in times.items():
        print(f"{name}: {spread(values)['median'] * 1e3:.2f} ms")
    for name, r in ratios.items():
        print(f"{name} {r['median']:.3f} [{r['q25']:.3f}, {r['q75']:.3f}]")
    seconds = {name: spread(values) for name, values in times.items()}
    write(__file__, {"device": torch.cuda.get_device_name(), "seconds": seconds, "ratios": ratios})


if __name__ == "__main__":
    main()
