"""What a captured step saves on a GPU: the paper's CNN on MNIST-sized images, eager and as one CUDA graph.

    python benchmarks/loops/captured_step.py ["batch 1"] ["batch 64"] [pass] [model] [--rounds 15] [--table]

Without names all four: a step at each batch size (for those "channels last" the model and the images lie so, and cuDNN
tries its algorithms), one pass over 60,000 single images (MNIST's where SEPSA_DATA has them, with the accuracy; noise
otherwise), and the model compiled by torch.compile(fullgraph=True) against eager, on the CPU and on the GPU. Each adds
to captured_step.json, which is written after every round and row, so a run that is cut off loses nothing. All but the
model on the CPU need a CUDA device. `--table` prints docs/how-it-works/performance.md's rows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from benchmarks.measure import alternate, machine, ratio, spread, training_step
from reproduction.data import load
from reproduction.networks import cnn, initialize
from sepsa import RLS, SepSA, SoftmaxNewton
from sepsa.training.capture import PlainStep, Step, capture, first_order_step

RESULTS = Path(__file__).with_suffix(".json")
STEPS = {"eager": 100, "captured": 1000, "compiled": 1000}
SOLVERS = {
    "SepSA": lambda: RLS(ridge="evidence"),  # SepSA's default
    "SepSA, fixed ridge": RLS,
    "SepSA, forgetting 0.999": lambda: RLS(forgetting=0.999),
    "SepSA, SoftmaxNewton": SoftmaxNewton,
    "SepSA, SoftmaxNewton, forgetting 0.999": lambda: SoftmaxNewton(forgetting=0.999),
}
CHANNELS_LAST = ", channels last"
CONTESTANTS = [
    "compiled Adam",
    *(f"compiled {name}" for name in SOLVERS),
    *(f"compiled {name}{CHANNELS_LAST}" for name in ("Adam", "SepSA", "SepSA, forgetting 0.999")),
    *(f"{way} {kind}" for way in ("captured", "eager") for kind in ("Adam", "SepSA")),
]
RATIOS = [
    ("eager Adam", "captured SepSA"),
    ("captured SepSA", "captured Adam"),
    ("compiled SepSA", "compiled Adam"),
    ("compiled SepSA, forgetting 0.999", "compiled Adam"),
    ("compiled SepSA, SoftmaxNewton", "compiled SepSA"),
    ("compiled SepSA, SoftmaxNewton, forgetting 0.999", "compiled SepSA"),
    ("compiled SepSA", "compiled SepSA, fixed ridge"),
    (f"compiled SepSA{CHANNELS_LAST}", f"compiled Adam{CHANNELS_LAST}"),
    (f"compiled SepSA, forgetting 0.999{CHANNELS_LAST}", f"compiled Adam{CHANNELS_LAST}"),
]
PASSES = ("captured SepSA", "compiled SepSA", "compiled SepSA, SoftmaxNewton", "compiled Adam")
IMAGES, ORDERS = 60_000, 3


def build(name: str, x: Tensor, y: Tensor) -> tuple[torch.nn.Module, Step]:
    way, kind = name.removesuffix(CHANNELS_LAST).split(" ", 1)
    torch.manual_seed(0)
    model = cnn(1, 28, 10)
    initialize(model)
    model.to("cuda", memory_format=torch.channels_last if CHANNELS_LAST in name else torch.contiguous_format)
    options = {"lr": 1e-3, "weight_decay": 1e-5} | ({} if way == "eager" else {"fused": True, "capturable": True})
    if kind == "Adam":
        adam = torch.optim.Adam(model.parameters(), **options)
        if way == "eager":
            return model, PlainStep(lambda a, b: first_order_step(model, adam, mse_loss, a, b))
        return model, capture(model, adam, x, y, mse_loss, compile=way == "compiled")
    optimizer = SepSA(model, torch.optim.Adam, solver=SOLVERS[kind](), **options)
    if way == "eager":
        return model, PlainStep(lambda a, b: optimizer.learn(a, b, mse_loss))
    return model, optimizer.capture(x, y, compile=way == "compiled")


def images() -> tuple[Tensor, Tensor]:
    """Random noise in the shape of MNIST's training set."""
    g = torch.Generator(device="cuda").manual_seed(0)
    X = torch.randn(IMAGES, 1, 28, 28, device="cuda", generator=g)
    return X, torch.eye(10, device="cuda")[torch.randint(10, (IMAGES,), device="cuda", generator=g)]


def steps(batch: int, rounds: int, note: Any) -> None:
    """Measure all contestants alternately."""
    X, Y = images()
    last = X.contiguous(memory_format=torch.channels_last)
    made = {name: build(name, X[:batch], Y[:batch])[1] for name in CONTESTANTS}
    orders = {way: torch.randint(IMAGES, (count, batch), device="cuda") for way, count in STEPS.items()}
    times: dict[str, list[float]] = {name: [] for name in made}
    for number in range(rounds + 1):
        for name, step in made.items():
            order = orders[name.split()[0]]
            torch.backends.cudnn.benchmark = CHANNELS_LAST in name
            torch.cuda.synchronize()
            start = time.perf_counter()
            step.run(last if CHANNELS_LAST in name else X, Y, order)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            if number:  # the first compiles and records
                times[name].append(seconds / len(order))
            else:
                print(f"batch {batch}: {name}: the first {len(order)} steps took {seconds:.1f} s", flush=True)
        if number:
            rows = {name: spread(values) for name, values in times.items()}
            gains = {f"{one} / {other}": ratio(times, one, other) for one, other in RATIOS}
            note(f"batch {batch}", {"rounds": number, "seconds": rows, "ratios": gains})
    for name, row in rows.items():
        print(f"batch {batch}: {name}: {row['median'] * 1e6:.0f} us")
    for name, row in gains.items():
        print(f"batch {batch}: {name} {row['median']:.3f} [{row['q25']:.3f}, {row['q75']:.3f}]", flush=True)


def one_pass(note: Any) -> None:
    """Single images, one after the other, once, in three orders; what compiles is warmed up by ten of them."""
    data = load("mnist") if os.environ.get("SEPSA_DATA") else None
    X, Y = images() if data is None else (data.train_inputs.cuda(), data.train_targets.float().cuda())
    for name in PASSES:
        seconds, accuracies = [], []
        for seed in range(ORDERS):
            model, step = build(name, X[:1], Y[:1])
            order = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed)).unsqueeze(1).cuda()
            step.run(X, Y, order[:10])
            torch.cuda.synchronize()
            start = time.perf_counter()
            step.run(X, Y, order)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            if data is not None:
                model.eval()
                with torch.no_grad():
                    guesses = torch.cat([model(part).argmax(1) for part in data.test_inputs.cuda().split(1000)])
                accuracies.append(float((guesses == data.test_targets.cuda().argmax(1)).double().mean()))
        row: dict[str, Any] = {"seconds": statistics.median(seconds), "each": seconds}
        if accuracies:
            row |= {"accuracy": statistics.fmean(accuracies), "accuracies": accuracies}
        note(f"one pass of 60,000 single samples, {name}", row | {"data": "noise" if data is None else data.name})
        print(f"one pass of 60,000 single samples, {name}: {row}", flush=True)


def whole_model(device: str, rounds: int, note: Any, batch: int = 64) -> None:
    """An eager step with the model as it is, and compiled as one graph: of SepSA, and of Adam for what torch does."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(batch, 1, 28, 28, generator=g).to(device), torch.randn(batch, 10, generator=g).to(device)
    contestants = {}
    for kind in ("SepSA", "Adam"):
        for way in ("eager", "compiled"):
            torch.manual_seed(0)
            model = cnn(1, 28, 10)
            initialize(model)
            model.to(device)
            adam: Any = torch.optim.Adam
            optimizer = SepSA(model, adam, lr=1e-3) if kind == "SepSA" else adam(model.parameters(), lr=1e-3)
            net = torch.compile(model, fullgraph=True) if way == "compiled" else model

            def step(net: Any = net, optimizer: Any = optimizer) -> None:
                training_step(net, optimizer, x, y)
                if device == "cuda":
                    torch.cuda.synchronize()

            contestants[f"{way} {kind}"] = step
    times = alternate(contestants, rounds)
    row: dict[str, Any] = {"seconds": {name: spread(values) for name, values in times.items()}}
    for kind in ("SepSA", "Adam"):
        words = f"compiled {kind} / eager {kind}"
        gain = row[words] = ratio(times, f"compiled {kind}", f"eager {kind}")
        middle = f"{gain['median']:.3f} [{gain['q25']:.3f}, {gain['q75']:.3f}]"
        print(f"one graph, batch {batch}, {device}: {words} {middle}", flush=True)
    note(f"one graph, batch {batch}, {device}", row)


def table(result: dict[str, Any]) -> None:
    """The rows of docs/how-it-works/performance.md that the JSON has."""
    one, many = (result.get(f"batch {batch}", {}).get("seconds", {}) for batch in (1, 64))
    for name in [*(f"{way} {kind}" for way in ("eager", "captured") for kind in ("Adam", "SepSA")), *CONTESTANTS[:6]]:
        if name in one and name in many:
            words = name.replace("compiled", "captured and compiled")
            print(f"| {words} | {one[name]['median'] * 1e6:.0f} | {many[name]['median'] * 1e6:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="batch 1, batch 64, pass, model; all unless given")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    result: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    if given.table:
        table(result)
        return

    def note(key: str, row: Any) -> None:
        result.update(machine() | {key: row})
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")

    wanted, cuda = set(given.what or ("batch 1", "batch 64", "pass", "model")), torch.cuda.is_available()
    if not cuda and wanted - {"model"}:
        parser.error("all but `model` need a CUDA device")
    if cuda:
        result["device"] = torch.cuda.get_device_name()
    for batch in (1, 64):
        if f"batch {batch}" in wanted:
            steps(batch, given.rounds, note)
    if "pass" in wanted:
        one_pass(note)
    if "model" in wanted:
        for device in ("cpu", "cuda") if cuda else ("cpu",):
            whole_model(device, given.rounds, note)
    print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
