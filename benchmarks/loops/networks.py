"""Networks that people train, on CIFAR-10: a ResNet-9 and a small vision transformer, SepSA beside AdamW.

    python benchmarks/loops/networks.py --search            # settings of each method, by 5,000 training images held out
    python benchmarks/loops/networks.py --jobs 12           # 5 seeds of the settings found, on the test images
    python benchmarks/loops/networks.py --time              # 3 epochs of each alone, for the seconds of one
    python benchmarks/loops/networks.py --table             # what networks.json holds

They write networks.json after every run, and do not run again what it holds; `--jobs N` shares a GPU between N
processes, whose seconds then say nothing. Crops and flips, batches of 256, bf16, a one-cycle rate, 10 epochs. Four
methods, four settings each (six for the last): AdamW with cross-entropy, AdamW with the squared loss of one-hot
targets, SepSA with RLS and one-hot targets, SepSA with SoftmaxNewton.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.measure import machine, ridge_of_batches
from reproduction import runner
from reproduction.augmentation import Augmentation
from reproduction.networks import cnn
from reproduction.tuning import held_out
from sepsa import RLS, SepSA, SoftmaxNewton

RESULT = Path(__file__).with_suffix(".json")
EPOCHS, TIMED_EPOCHS, BATCH, DECAY, SEEDS, SEARCH_SEED = 10, 3, 256, 0.01, range(5), 100
CLASSES = 10


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(channels, channels), conv(channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def conv(inputs: int, outputs: int, pool: bool = False) -> nn.Sequential:
    layers = [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))


def resnet9() -> nn.Module:
    return nn.Sequential(
        *(conv(3, 64), conv(64, 128, pool=True), Residual(128), conv(128, 256, pool=True), conv(256, 512, pool=True)),
        *(Residual(512), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES)),
    )


class VisionTransformer(nn.Module):
    """Patches of 4 x 4 pixels, 6 layers of width 192 with 6 heads of attention, the mean of the tokens to the head."""

    def __init__(self, width: int = 192, depth: int = 6, heads: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.places = nn.Parameter(0.02 * torch.randn(1, 64, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.layers(tokens).mean(1))


NETWORKS: dict[str, Callable[[], nn.Module]] = {"ResNet-9": resnet9, "vision transformer": VisionTransformer}
CNNS: dict[str, Callable[[], nn.Module]] = {
    "CIFAR-10 CNN": partial(cnn, 3, 32, CLASSES),
    "MNIST CNN": partial(cnn, 1, 28, CLASSES),
}
# Four settings for each method: the largest learning rate, and what else the method has.
RATES = {"ResNet-9": (2e-3, 5e-3, 1e-2, 2e-2), "vision transformer": (5e-4, 1e-3, 2e-3, 4e-3)}
METHODS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "AdamW, cross-entropy": ("label_smoothing", (0.0, 0.1)),
    "AdamW, squared loss": ("label_smoothing", (0.0,)),
    "SepSA": ("forgetting", (1.0, 0.999)),
    "SepSA, cross-entropy": ("ridge", (1.0, 100.0, 1000.0)),  # two settings more: at the default ridge it trails
    "SepSA, cross-entropy, ridge by evidence": ("ridge", ("evidence",)),
}


def settings(network: str, method: str) -> list[dict[str, Any]]:
    name, values = METHODS[method]
    rates = RATES[network][: 4 if len(values) == 1 else 2]
    return [{"lr": lr, name: value} for lr in rates for value in values]


Loss = Callable[[Tensor, Tensor], Tensor]


def learner(
    method: str, model: nn.Module, setting: dict[str, Any], fused: bool, images: Tensor | None = None
) -> tuple[Any, Loss]:
    """The optimizer, and the loss of outputs and one-hot targets; `images` are a batch."""
    options = {"lr": setting["lr"], "weight_decay": DECAY, "fused": fused}
    if method.startswith("AdamW"):
        loss: Loss = functional.mse_loss
        if "cross" in method:
            loss = partial(functional.cross_entropy, label_smoothing=setting["label_smoothing"])
        return torch.optim.AdamW(model.parameters(), **options), loss
    rest = {name: value for name, value in setting.items() if name != "lr"}
    count, _, unit = str(rest.get("ridge", "")).partition(" ")
    if unit and images is not None:
        head = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
        rest["ridge"] = ridge_of_batches(model, head, images, float(count))
    solver: Any = (SoftmaxNewton if "cross" in method else RLS)(**rest)
    optimizer = SepSA(model, torch.optim.AdamW, solver=solver, **options)
    return optimizer, solver.loss


def train(item: tuple[str, str, dict[str, Any], int, bool, str, int]) -> dict[str, Any]:
    """Train one network; accuracy (percent) after every epoch on the images held out or the test images."""
    network, method, setting, seed, search, device, epochs = item
    data = runner.dataset("mnist" if network == "MNIST CNN" else "cifar10")
    data = held_out(data) if search else data
    torch.manual_seed(seed)
    model = (NETWORKS | CNNS)[network]().to(device, memory_format=torch.channels_last)
    data = replace(data, train_inputs=data.train_inputs.to(device), train_targets=data.train_targets.to(device))
    optimizer, loss_fn = learner(method, model, setting, device.startswith("cuda"), data.train_inputs[:BATCH])
    test, labels = data.test_inputs.to(device), data.test_targets.argmax(1).to(device)
    augmentation = None if network == "MNIST CNN" else Augmentation(data, seed)
    targets = data.train_targets
    steps = len(targets) // BATCH
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, setting["lr"], total_steps=epochs * steps, pct_start=0.25)
    generator, accuracy, seconds = torch.Generator().manual_seed(seed), list[float](), list[float]()
    for _ in range(epochs):
        images = data.train_inputs if augmentation is None else augmentation.draw()
        order = torch.randperm(len(targets), generator=generator)[: steps * BATCH].view(steps, BATCH).to(device)
        start = time.perf_counter()
        model.train()
        for rows in order:
            x, y = images[rows].contiguous(memory_format=torch.channels_last), targets[rows]
            with torch.autocast(device.partition(":")[0], dtype=torch.bfloat16):
                if isinstance(optimizer, SepSA):
                    with optimizer.observe(y):
                        loss = loss_fn(model(x).float(), y)
                else:
                    loss = loss_fn(model(x).float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        accuracy.append(score(model, test, labels, device))
    # The fastest epoch: the first one warms up.
    return {"accuracy": [round(value, 2) for value in accuracy], "epoch_seconds": round(min(seconds), 3)}


@torch.no_grad()
def score(model: nn.Module, inputs: Tensor, labels: Tensor, device: str) -> float:
    model.eval()
    with torch.autocast(device.partition(":")[0], dtype=torch.bfloat16):
        guesses = torch.cat(
            [model(x.contiguous(memory_format=torch.channels_last)).argmax(1) for x in inputs.split(500)]
        )
    return 100 * (guesses == labels).double().mean().item()


def known() -> list[dict[str, Any]]:
    return json.loads(RESULT.read_text())["runs"] if RESULT.exists() else []


def store(entry: dict[str, Any]) -> None:
    with RESULT.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lines = ",\n".join("  " + json.dumps(run) for run in [*known(), entry])
        head = json.dumps(machine(), indent=1)
        part = RESULT.with_suffix(".part")
        part.write_text(f'{head[:-2]},\n "runs": [\n{lines}\n ]\n}}\n')
        part.replace(RESULT)
    RESULT.with_suffix(".lock").unlink(missing_ok=True)


def best(network: str, method: str) -> dict[str, Any]:
    """The setting of the search with the best accuracy at its end; a ridge by evidence has the rate of a fixed one."""
    if method.endswith("evidence"):
        return {"lr": best(network, method.removesuffix(", ridge by evidence"))["lr"], "ridge": "evidence"}
    tried = [run for run in known() if run["search"] and (run["network"], run["method"]) == (network, method)]
    if not tried:
        raise SystemExit(f"{network}, {method}: no setting was searched for yet: run with --search first")
    setting: dict[str, Any] = max(tried, key=lambda run: run["accuracy"][-1])["setting"]
    return setting


def table() -> None:
    for network in NETWORKS:
        print(f"### {network}\n")
        print("| method | setting | after 1 epoch | after 3 | after 10 | seconds an epoch |")
        print("|---|---|--:|--:|--:|--:|")
        for method in METHODS:
            runs = [r for r in known() if not r["search"] and (r["network"], r["method"]) == (network, method)]
            whole = [r for r in runs if r["epochs"] == EPOCHS]
            if len(whole) > 1:
                told = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in whole[0]["setting"].items())
                columns = [[run["accuracy"][epoch] for run in whole] for epoch in (0, 2, -1)]
                means = " | ".join(f"{statistics.fmean(c):.2f} ± {statistics.stdev(c):.2f}" for c in columns)
                alone = [f"{r['epoch_seconds']:.2f}" for r in runs if r["epochs"] == TIMED_EPOCHS]
                print(f"| {method.removesuffix(', ridge by evidence')} | {told} | {means} | {', '.join(alone)} |")
        print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="networks and methods whose name holds this")
    options = parser.parse_args()
    if options.table:
        table()
        return
    epochs = TIMED_EPOCHS if options.time else EPOCHS
    done = {(r["network"], r["method"], json.dumps(r["setting"]), r["seed"], r["search"], r["epochs"]) for r in known()}
    wanted = [
        (network, method, setting, seed, options.search, options.device, epochs)
        for seed in ((SEARCH_SEED,) if options.search else SEEDS[: 1 if options.time else None])
        for network in NETWORKS
        for method in METHODS
        if options.only in f"{network}, {method}"
        for setting in (settings(network, method) if options.search else [best(network, method)])
    ]
    items = [item for item in wanted if (*item[:2], json.dumps(item[2]), *item[3:5], item[6]) not in done]
    keys = ("network", "method", "setting", "seed", "search", "device", "epochs")
    for i, result, _ in runner.each(train, items, options.jobs):
        entry = dict(zip(keys, items[i], strict=True)) | {"jobs": options.jobs} | result
        entry["device"] = runner.device_name(options.device)
        print(entry, flush=True)
        store(entry)


if __name__ == "__main__":
    main()
