"""A character GPT on the source of Python's standard library: AdamW, Muon, and SepSA over each.

    python benchmarks/language.py --search            # four rates of each method, 500 steps, by text held out
    python benchmarks/language.py                     # 3 seeds at the rates found, on other text
    python benchmarks/language.py --time              # steps of all methods in turns, eager and compiled
    python benchmarks/language.py --classes           # time and peak memory of a step with 50,257 classes
    python benchmarks/language.py --table
    python benchmarks/language.py --figure            # language.svg

They write language.json after every run, and do not run again what it holds. 6 layers of width 384, 256 characters,
batches of 64 sequences, bf16, a cosine rate after 100 steps of warm-up, 1,500 steps. Only the rate is set: SepSA uses
`SelfTuning.of(SoftmaxNewton)`. Every method has the same batches for a seed. `seconds` count the steps alone, without
evaluations; with `--jobs N`, which shares the GPU between N processes, they say nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from measure import alternate_on_gpu, machine, median_and_quartiles, ratio, require_cuda
from torch import Tensor, nn
from torch.nn import functional

import sepsa
from sepsa import SelfTuning, SepSA, SoftmaxNewton
from sepsa.joint import JointOptimizer
from sepsa.paper import runner

RESULT = Path(__file__).with_suffix(".json")
WIDTH, DEPTH, HEADS, CONTEXT, SEQUENCES = 384, 6, 6, 256, 64
STEPS, SEARCH_STEPS, WARM_UP, EVERY, SEEDS, SEARCH_SEED = 1500, 500, 100, 25, range(3), 100
DECAY = 0.1
ALPHABET = [9, 10, *range(32, 127)]  # every other character is written as the class after these
CLASSES = len(ALPHABET) + 1
RATES = {"AdamW": (1e-3, 2e-3, 4e-3, 8e-3), "Muon": (1e-3, 2e-3, 4e-3, 8e-3)}
METHODS = {f"{prefix}{base}": base for base in RATES for prefix in ("", "SepSA over ")}


# ---------------------------------------------------------------------- text


def text(part: str) -> Tensor:
    """The classes of all characters of a part: every 20th file is held out for the choice, another 20th for the end."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in folder.rglob("*.py") if "site-packages" not in path.parts)
    parts = {"choice": [files[10::20]], "end": [files[0::20]]}
    chosen = parts.get(part, [files[k::20] for k in range(20) if k not in (0, 10)])
    raw = b"\n".join(path.read_bytes() for group in chosen for path in group)
    table = torch.full((256,), len(ALPHABET))
    table[ALPHABET] = torch.arange(len(ALPHABET))
    return table[torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()]


def batches(codes: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    places = torch.arange(CONTEXT + 1, device=codes.device)
    while True:
        starts = torch.randint(len(codes) - CONTEXT, (SEQUENCES, 1), generator=generator).to(codes.device)
        windows = codes[starts + places]
        yield windows[:, :-1], windows[:, 1:]


# ---------------------------------------------------------------------- model


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).reshape(b, t, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, classes: int = CLASSES, width: int = WIDTH, depth: int = DEPTH, heads: int = HEADS) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(classes, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                last = name.endswith(("mix.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth) if last else 0.02)

    def features(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], device=x.device)
        return self.norm(self.blocks(self.tokens(x) + self.places(place)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


# ---------------------------------------------------------------------- training


def automatic() -> SoftmaxNewton:
    return SelfTuning.of(SoftmaxNewton)


def learner(method: str, model: GPT, lr: float, solver: SoftmaxNewton | None = None) -> torch.optim.Optimizer:
    options = {"lr": lr, "weight_decay": DECAY}
    adamw = {"betas": (0.9, 0.95), "fused": True}
    if METHODS[method] == "AdamW":
        if method == "AdamW":
            return torch.optim.AdamW(model.parameters(), **options, **adamw)
        return SepSA(model, torch.optim.AdamW, head="head", solver=solver or automatic(), **options, **adamw)
    base = sepsa.muon(model, lr, weight_decay=DECAY, rest=adamw)
    if method != "Muon":
        return SepSA(model, base, head="head", solver=solver or automatic())
    (kind, settings, _), (rest, others, _) = base
    matrices = [p for name, p in model.blocks.named_parameters() if p.ndim == 2]
    mine = {id(p) for p in matrices}
    remaining = [p for p in model.parameters() if id(p) not in mine]  # with the head, as Muon's authors advise
    return JointOptimizer([kind(matrices, **settings), rest(remaining, **others)])


def loss_of(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    with (
        torch.autocast(x.device.type, torch.bfloat16),
        optimizer.observe(y) if isinstance(optimizer, SepSA) else nullcontext(),
    ):
        outputs = model(x)
    return functional.cross_entropy(outputs.float().flatten(0, 1), y.flatten())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    loss_of(model, optimizer, x, y).backward()
    optimizer.step()
    optimizer.zero_grad()


def train(item: tuple[str, float, int, str, int]) -> dict[str, Any]:
    """Train one model: the loss on text held out after every 25 steps, with the seconds until then."""
    method, lr, seed, part, steps = item
    torch.manual_seed(seed)
    model = GPT().cuda()
    optimizer = learner(method, model, lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min(1.0, (t + 1) / WARM_UP) * (0.5 + 0.5 * math.cos(math.pi * min(1.0, t / steps)))
    )
    source, other = batches(text("training").cuda(), seed), batches(text(part).cuda(), 0)
    checks = [next(other) for _ in range(16)]
    losses, seconds, spent = list[float](), list[float](), 0.0
    for number in range(1, steps + 1):
        if number % EVERY == 1:
            torch.cuda.synchronize()
            start = time.perf_counter()
        step(model, optimizer, *next(source))
        schedule.step()
        if number % EVERY == 0:
            torch.cuda.synchronize()
            spent += time.perf_counter() - start
            losses.append(round(held_out_loss(model, checks), 5))
            seconds.append(round(spent, 3))
    ridges = [[c.step, c.ridge] for c in optimizer.solver.chosen] if isinstance(optimizer, SepSA) else []
    return {"losses": losses, "seconds": seconds, "ridges": ridges}


@torch.no_grad()
def held_out_loss(model: nn.Module, checks: list[tuple[Tensor, Tensor]]) -> float:
    with torch.autocast("cuda", torch.bfloat16):
        losses = [functional.cross_entropy(model(x).float().flatten(0, 1), y.flatten()) for x, y in checks]
    return float(torch.stack(losses).mean())


# ---------------------------------------------------------------------- steps and memory


def time_steps() -> dict[str, Any]:
    """The time of a step over that of the base, in turns, after 100 steps of each."""
    torch.manual_seed(0)
    source = batches(text("choice").cuda(), 0)
    data = [next(source) for _ in range(64)]
    result: dict[str, Any] = {}
    for form in ("eager", "compiled"):
        contestants = {}
        for method in METHODS:
            model = GPT().cuda()
            optimizer = learner(method, model, 1e-3)
            run = torch.compile(model) if form == "compiled" else model
            contestants[method] = stepper(run, optimizer, data)
        times = alternate_on_gpu(contestants, rounds=9, calls=20, warm_up=8)
        for method, base in METHODS.items():
            result[f"{method}, {form}"] = {"milliseconds": 1e3 * statistics.median(times[method])}
            if method != base:
                result[f"{method}, {form}"]["of_base"] = ratio(times, method, base)
        torch.cuda.empty_cache()
    return result


def stepper(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]
) -> Callable[[], None]:
    turns = itertools.cycle(data)
    return lambda: step(model, optimizer, *next(turns))


def many_classes() -> dict[str, Any]:
    """A step with 50,257 classes and 768 features: milliseconds and the peak of the memory allocated, in GiB."""
    result: dict[str, Any] = {}
    torch.manual_seed(0)
    windows = torch.randint(50_257, (SEQUENCES, CONTEXT + 1), device="cuda")
    data = [(windows[:, :-1], windows[:, 1:])]
    for method in ("AdamW", "SepSA over AdamW"):
        torch.cuda.empty_cache()
        model = GPT(classes=50_257, width=768, heads=12).cuda()
        solver = SoftmaxNewton(ridge=1000.0) if method != "AdamW" else None
        run = stepper(model, learner(method, model, 1e-3, solver), data)
        for _ in range(4):
            run()
        torch.cuda.reset_peak_memory_stats()
        times = alternate_on_gpu({method: run}, rounds=7, calls=3)[method]
        peak = torch.cuda.max_memory_allocated() / 2**30
        result[method] = {"milliseconds": 1e3 * statistics.median(times), "peak_gib": peak}
        del model, solver, run
    return result


# ---------------------------------------------------------------------- results


def known() -> dict[str, Any]:
    return json.loads(RESULT.read_text()) if RESULT.exists() else {"runs": []}


def store(result: dict[str, Any]) -> None:
    runs = ",\n".join("  " + json.dumps(run) for run in result["runs"])
    head = json.dumps(machine() | {key: value for key, value in result.items() if key != "runs"}, indent=1)
    RESULT.write_text(f'{head[:-2]},\n "runs": [\n{runs}\n ]\n}}\n')


def best(method: str) -> float:
    """The rate of the search with the least loss at its end."""
    tried = [run for run in known()["runs"] if run["part"] == "choice" and run["method"] == method]
    if not tried:
        raise SystemExit(f"{method}: no rate was searched for yet: run with --search first")
    rate: float = min(tried, key=lambda run: run["losses"][-1])["lr"]
    return rate


def final(method: str) -> list[dict[str, Any]]:
    return [run for run in known()["runs"] if run["part"] == "end" and run["method"] == method]


def passes(run: dict[str, Any], loss: float) -> int | None:
    """The evaluation at which a run has reached this loss."""
    return next((i for i, value in enumerate(run["losses"]) if value <= loss), None)


def table() -> None:
    result = known()
    print("| method | rate | loss at the end | steps to the base's loss | share of its steps | a step, of the base's |")
    print("|---|--:|--:|--:|--:|--:|")
    for method, base in METHODS.items():
        runs, others = final(method), final(base)
        if not runs or not others:
            continue
        goal = statistics.fmean(run["losses"][-1] for run in others)
        ends = [run["losses"][-1] for run in runs]
        reached = [passes(run, goal) for run in runs]
        steps = [EVERY * (at + 1) for at in reached if at is not None]
        words = (
            f"{statistics.fmean(steps):.0f} | {statistics.fmean(steps) / STEPS:.2f}" if len(steps) == len(runs) else "|"
        )
        price = result.get("steps", {}).get(f"{method}, eager", {}).get("of_base")
        told = median_and_quartiles(price) if price and method != base else ""
        print(
            f"| {method} | {runs[0]['lr']:g} | {statistics.fmean(ends):.4f} ± {statistics.stdev(ends):.4f} |"
            f" {words if method != base else '|'} | {told} |"
        )
    for name, entry in result.get("steps", {}).items():
        print(
            name,
            f"{entry['milliseconds']:.2f} ms",
            median_and_quartiles(entry["of_base"]) if "of_base" in entry else "",
        )
    for name, entry in result.get("classes", {}).items():
        print(f"50,257 classes, {name}: {entry['milliseconds']:.1f} ms, peak {entry['peak_gib']:.2f} GiB")


def figure() -> None:
    import matplotlib.pyplot as plt

    chart, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    colors = {"AdamW": "#0072B2", "Muon": "#009E73"}
    for method, base in METHODS.items():
        runs = final(method)
        if not runs:
            continue
        losses = [statistics.fmean(values) for values in zip(*(run["losses"] for run in runs), strict=True)]
        seconds = [statistics.fmean(values) for values in zip(*(run["seconds"] for run in runs), strict=True)]
        style = {"color": colors[base], "linestyle": "-" if method != base else "--", "label": method}
        axes[0].plot(range(EVERY, STEPS + 1, EVERY), losses, **style)
        if all(run["jobs"] == 1 for run in runs):
            axes[1].plot(seconds, losses, **style)
    axes[0].set(xlabel="steps", ylabel="loss on text held out, nats a character", ylim=(0.7, 1.6))
    axes[1].set(xlabel="seconds of the steps")
    axes[0].legend(frameon=False)
    for axis in axes:
        axis.grid(alpha=0.3)
    chart.savefig(RESULT.with_suffix(".svg"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("search", "time", "classes", "table", "figure"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="methods whose name has this")
    options = parser.parse_args()
    if options.table or options.figure:
        table() if options.table else figure()
        return
    require_cuda()
    if options.time or options.classes:
        store(known() | ({"steps": time_steps()} if options.time else {"classes": many_classes()}))
        table()
        return
    part, steps = ("choice", SEARCH_STEPS) if options.search else ("end", STEPS)
    done = {(run["method"], run["lr"], run["seed"], run["part"]) for run in known()["runs"]}
    items = [
        (method, lr, seed, part, steps)
        for seed in ((SEARCH_SEED,) if options.search else SEEDS)
        for method, base in METHODS.items()
        if options.only in method
        for lr in (RATES[base] if options.search else (best(method),))
        if (method, lr, seed, part) not in done
    ]
    keys = ("method", "lr", "seed", "part", "steps")
    for i, result, _ in runner.each(train, items, options.jobs):
        entry = dict(zip(keys, items[i], strict=True)) | {"jobs": options.jobs, "device": runner.device_name("cuda")}
        now = known()
        store(now | {"runs": [*now["runs"], entry | result]})
        print(entry, result["losses"][-1], f"{result['seconds'][-1]:.1f} s", result["ridges"], flush=True)


if __name__ == "__main__":
    main()
