"""What an eager step of SepSA costs beside one of AdamW on a GPU, over six networks and heads.

    python benchmarks/loops/eager_steps.py [--rounds 15]      # writes eager_steps.json

Two perceptrons in float32, a ResNet-9 with batches of 256 images and a GPT with 64 sequences of 256 characters, both by
autocast to bfloat16. AdamW is fused, alone and as the base. The contestants of a network alternate, with 20 steps a
round; an update of the head is two CUDA graphs from its third on.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.loops.language import CLASSES as CHARACTERS
from benchmarks.loops.language import CONTEXT, GPT, SEQUENCES
from benchmarks.loops.networks import resnet9
from benchmarks.measure import alternate_on_gpu, median_and_quartiles, ratio, require_cuda, spread, write
from sepsa import RLS, SepSA, SoftmaxNewton


def perceptron(*widths: int) -> nn.Module:
    k, hidden, outputs = widths
    return nn.Sequential(nn.Linear(k, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def numbers(rows: int, k: int, outputs: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, k, device="cuda"), torch.randn(rows, outputs, device="cuda")


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(256, 3, 32, 32, device="cuda"), torch.randint(10, (256,), device="cuda")


def one_hot_images() -> tuple[Tensor, Tensor]:
    x, labels = images()
    return x, functional.one_hot(labels, 10).float()


def characters() -> tuple[Tensor, Tensor]:
    codes = torch.randint(CHARACTERS, (SEQUENCES, CONTEXT + 1), device="cuda")
    return codes[:, :-1], codes[:, 1:]


def squared(outputs: Tensor, y: Tensor) -> Tensor:
    return functional.mse_loss(outputs.float(), y)


def entropy(outputs: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.float().flatten(0, -2), y.flatten())


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]], Any, Any, bool]] = {
    "8-50-2, batch 1, RLS": (partial(perceptron, 8, 50, 2), partial(numbers, 1, 8, 2), squared, RLS, False),
    "256-512-10, batch 256, RLS": (
        partial(perceptron, 256, 512, 10),
        partial(numbers, 256, 256, 10),
        squared,
        RLS,
        False,
    ),
    "ResNet-9, RLS": (resnet9, one_hot_images, squared, RLS, True),
    "ResNet-9, SoftmaxNewton": (resnet9, images, entropy, partial(SoftmaxNewton, ridge=10.0), True),
    "GPT, SoftmaxNewton": (GPT, characters, entropy, partial(SoftmaxNewton, ridge=1000.0), True),
    "GPT, SoftmaxNewton, forgetting 0.999": (
        GPT,
        characters,
        entropy,
        partial(SoftmaxNewton, ridge=1000.0, forgetting=0.999),
        True,
    ),
}


def stepper(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: tuple[Tensor, Tensor], loss_of: Any, half: bool
) -> Callable[[], None]:
    x, y = data

    def run() -> None:
        observed = optimizer.observe(y) if isinstance(optimizer, SepSA) else nullcontext()
        with torch.autocast("cuda", torch.bfloat16, enabled=half), observed:
            outputs = model(x)
        loss_of(outputs, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def measure(name: str, rounds: int) -> dict[str, Any]:
    build, batch, loss_of, solver, half = CASES[name]
    torch.manual_seed(0)
    data, options = batch(), dict[str, Any](lr=1e-4, fused=True)
    plain, model = build().cuda(), build().cuda()
    base = torch.optim.AdamW(plain.parameters(), **options)
    head: Any = {"head": "head"} if isinstance(model, GPT) else {}
    joined = SepSA(model, torch.optim.AdamW, solver=solver(), **head, **options)
    contestants = {
        "AdamW": stepper(plain, base, data, loss_of, half),
        "SepSA": stepper(model, joined, data, loss_of, half),
    }
    times = alternate_on_gpu(contestants, rounds, calls=20, warm_up=3)
    found = ratio(times, "SepSA", "AdamW")
    print(f"{name}: {median_and_quartiles(found)}", flush=True)
    return {"seconds": {key: spread(values) for key, values in times.items()}, "ratio": found}


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    require_cuda()
    found = {name: measure(name, options.rounds) for name in CASES}
    write(__file__, {"device": torch.cuda.get_device_name(), "steps": found})


if __name__ == "__main__":
    main()
