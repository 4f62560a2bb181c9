"""A character GPT on a text: AdamW, Muon, and SepSA over each.

    python benchmarks/loops/language.py --search            # four rates of each base, 500 steps, by text held out
    python benchmarks/loops/language.py                     # 3 seeds at the rates found, on other text
    python benchmarks/loops/language.py --steps 1000        # a shorter schedule
    python benchmarks/loops/language.py --ridge 300 1000 3000 10000 "3 batches" "10 batches" --only "SepSA over AdamW"
    python benchmarks/loops/language.py --time              # compiled steps of all methods in turns
    python benchmarks/loops/language.py --table
    python benchmarks/loops/language.py --figure            # language.svg

They write language.json after every run, and do not run again what it holds. The text is the source of Python's
standard library, or `--text FILE`, whose rates are those found on it or else those of the library. 6 layers of width
384, 256 characters, batches of 64 sequences, bf16, compiled, 100 steps of warm-up, then a cosine to `--floor` of the
peak, 1,500 steps. SepSA has the rate of its base, and uses `SoftmaxNewton(ridge="evidence")`, or a `SoftmaxNewton` with
a ridge given: a number, or as many batches as it weighs. Every method has the same batches for a seed. `seconds` count
the steps alone, without evaluations; with `--jobs N`, which shares the GPU between N processes, they say nothing.
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
from torch import Tensor, nn
from torch.nn import functional

import sepsa
from benchmarks.measure import alternate_on_gpu, machine, median_and_quartiles, ratio, require_cuda, ridge_of_batches
from reproduction import runner
from sepsa import SepSA, SoftmaxNewton
from sepsa.training.joint import JointOptimizer

RESULT = Path(__file__).with_suffix(".json")
WIDTH, DEPTH, HEADS, CONTEXT, SEQUENCES = 384, 6, 6, 256, 64
STEPS, SEARCH_STEPS, WARM_UP, EVERY, SEEDS, SEARCH_SEED = 1500, 500, 100, 25, range(3), 100
DECAY, FLOOR, BLOCK = 0.1, 0.1, 2**14
ALPHABET = [9, 10, *range(32, 127)]  # every other character is written as the class after these
CLASSES = len(ALPHABET) + 1
RATES = {"AdamW": (1e-3, 2e-3, 4e-3, 8e-3), "Muon": (1e-3, 2e-3, 4e-3, 8e-3)}
FORMS = ("{}", "SepSA over {}")
METHODS = {form.format(base): base for base in RATES for form in FORMS}
LIBRARY = "python"
KEYS = ("method", "lr", "seed", "part", "steps", "text", "floor", "ridge")
EVIDENCE = "evidence"
BEFORE = {"text": LIBRARY, "floor": 0.0, "ridge": EVIDENCE}  # of runs that do not say


# ---------------------------------------------------------------------- text


def text(part: str, source: str = LIBRARY) -> Tensor:
    """The classes of all characters of a part: every 20th file is held out for the choice, another 20th for the end.

    Of a text in one file these are blocks of 16,384 bytes.
    """
    if source == LIBRARY:
        folder = Path(sysconfig.get_path("stdlib"))
        files = sorted(path for path in folder.rglob("*.py") if "site-packages" not in path.parts)
        pieces, between = [path.read_bytes() for path in files], b"\n"
    else:
        whole = Path(source).read_bytes()
        pieces, between = [whole[k : k + BLOCK] for k in range(0, len(whole), BLOCK)], b""
    parts = {"choice": [pieces[10::20]], "end": [pieces[0::20]]}
    chosen = parts.get(part, [pieces[k::20] for k in range(20) if k not in (0, 10)])
    raw = between.join(piece for group in chosen for piece in group)
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


def solver_for(ridge: str, model: GPT, inputs: Tensor) -> SoftmaxNewton:
    """The solver whose ridge is "evidence", a number, or the weight of so many batches like this one."""
    if ridge == "evidence":
        return SoftmaxNewton(ridge="evidence")
    number, _, unit = ridge.partition(" ")
    return SoftmaxNewton(ridge=ridge_of_batches(model, model.head, inputs, float(number)) if unit else float(number))


def learner(method: str, model: GPT, lr: float, solver: Any = None) -> torch.optim.Optimizer:
    options = {"lr": lr, "weight_decay": DECAY}
    adamw = {"betas": (0.9, 0.95), "fused": True}
    head = {"head": "head", "solver": solver or SoftmaxNewton(ridge="evidence")}
    if METHODS[method] == "AdamW":
        if method == "AdamW":
            return torch.optim.AdamW(model.parameters(), **options, **adamw)
        return SepSA(model, torch.optim.AdamW, **head, **options, **adamw)
    base = sepsa.muon(model, lr, weight_decay=DECAY, rest=adamw)
    if method != "Muon":
        return SepSA(model, base, **head)
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


def train(item: tuple[str, float, int, str, int, str, float, str]) -> dict[str, Any]:
    """Train one model: the loss on text held out after every 25 steps, with the seconds until then."""
    method, lr, seed, part, steps, name, floor, ridge = item
    torch.manual_seed(seed)
    model = GPT().cuda()
    source, other = batches(text("training", name).cuda(), seed), batches(text(part, name).cuda(), 0)
    optimizer = learner(method, model, lr, solver_for(ridge, model, next(batches(text(part, name).cuda(), 1))[0]))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda t: (
            min(1.0, (t + 1) / WARM_UP) * (floor + (1 - floor) * (0.5 + 0.5 * math.cos(math.pi * min(1.0, t / steps))))
        ),
    )
    compiled = torch.compile(model)
    checks = [next(other) for _ in range(16)]
    losses, seconds, spent = list[float](), list[float](), 0.0
    for number in range(1, steps + 1):
        if number % EVERY == 1:
            torch.cuda.synchronize()
            start = time.perf_counter()
        step(compiled, optimizer, *next(source))
        schedule.step()
        if number % EVERY == 0:
            torch.cuda.synchronize()
            spent += time.perf_counter() - start
            losses.append(round(held_out_loss(compiled, checks), 5))
            seconds.append(round(spent, 3))
    solver = getattr(optimizer, "solver", None)
    ridges = [[steps, solver.ridge_now]] if isinstance(solver, SoftmaxNewton) else []
    return {"final": losses[-1], "losses": losses, "seconds": seconds, "ridges": ridges}


@torch.no_grad()
def held_out_loss(model: nn.Module, checks: list[tuple[Tensor, Tensor]]) -> float:
    with torch.autocast("cuda", torch.bfloat16):
        losses = [functional.cross_entropy(model(x).float().flatten(0, 1), y.flatten()) for x, y in checks]
    return float(torch.stack(losses).mean())


# ---------------------------------------------------------------------- the time of a step


def time_steps() -> dict[str, Any]:
    """The time of a compiled step over that of the base, in turns, after 160 steps of each."""
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64  # all models are of one class
    source = batches(text("choice").cuda(), 0)
    data = [next(source) for _ in range(64)]
    contestants = {}
    for method in METHODS:
        model = GPT().cuda()
        contestants[method] = stepper(torch.compile(model), learner(method, model, 1e-3), data)
    times = alternate_on_gpu(contestants, rounds=9, calls=20, warm_up=8)
    result: dict[str, Any] = {}
    for method, base in METHODS.items():
        result[method] = {"milliseconds": 1e3 * statistics.median(times[method])}
        if method != base:
            result[method]["of_base"] = ratio(times, method, base)
    return result


def stepper(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]
) -> Callable[[], None]:
    turns = itertools.cycle(data)

    def run() -> None:
        step(model, optimizer, *next(turns))

    return run


# ---------------------------------------------------------------------- results


def known(path: Path = RESULT) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {"runs": []}


def runs_of(**wanted: Any) -> list[dict[str, Any]]:
    return [run for run in known()["runs"] if all((BEFORE | run)[key] == value for key, value in wanted.items())]


def store(result: dict[str, Any], path: Path = RESULT) -> None:
    runs = ",\n".join("  " + json.dumps(run) for run in result["runs"])
    head = json.dumps(machine() | {key: value for key, value in result.items() if key != "runs"}, indent=1)
    path.write_text(f'{head[:-2]},\n "runs": [\n{runs}\n ]\n}}\n')


def best(method: str, name: str) -> float:
    """The rate of the base with the least loss at the end of its search."""
    searched = {"part": "choice", "method": METHODS[method]}
    tried = runs_of(text=name, **searched) or runs_of(text=LIBRARY, **searched)
    if not tried:
        raise SystemExit(f"{method}: no rate was searched for yet: run with --search first")
    rate: float = min(tried, key=lambda run: run["losses"][-1])["lr"]
    return rate


def passes(run: dict[str, Any], loss: float) -> int | None:
    """The evaluation at which a run has reached this loss."""
    return next((i for i, value in enumerate(run["losses"]) if value <= loss), None)


def final(method: str, options: argparse.Namespace, ridge: str, steps: int | None = None) -> list[dict[str, Any]]:
    name, ridge = Path(options.text).name, EVIDENCE if method in RATES else ridge
    return runs_of(part="end", method=method, text=name, floor=options.floor, ridge=ridge, steps=steps or options.steps)


def table(options: argparse.Namespace) -> None:
    """The runs of a text and a schedule; the goal is the base's loss after 1,500 steps."""
    result = known()
    print("| method | rate | loss at the end | steps to the base's loss | share of its steps |")
    print("|---|--:|--:|--:|--:|")
    rows = [
        (method, base, ridge)
        for method, base in METHODS.items()
        for ridge in (options.ridge if method != base else [EVIDENCE])
    ]
    for method, base, ridge in rows:
        runs, others = final(method, options, ridge), final(base, options, ridge, STEPS)
        if not runs or not others:
            continue
        goal = statistics.fmean(run["losses"][-1] for run in others)
        ends = [run["losses"][-1] for run in runs]
        reached = [passes(run, goal) for run in runs]
        steps = [EVERY * (at + 1) for at in reached if at is not None]
        words = (
            f"{statistics.fmean(steps):.0f} | {statistics.fmean(steps) / STEPS:.2f}" if len(steps) == len(runs) else "|"
        )
        title = method + (f", ridge {ridge}" if ridge != EVIDENCE and method != base else "")
        spread = f" ± {statistics.stdev(ends):.4f}" if len(ends) > 1 else ""
        print(
            f"| {title} | {runs[0]['lr']:g} | {statistics.fmean(ends):.4f}{spread} |"
            f" {words if method != base else '|'} |"
        )
    for name, entry in result.get("steps", {}).items():
        print(
            name,
            f"{entry['milliseconds']:.2f} ms",
            median_and_quartiles(entry["of_base"]) if "of_base" in entry else "",
        )


def figure(options: argparse.Namespace) -> None:
    found = {method: runs for method in METHODS if (runs := final(method, options, EVIDENCE))}
    least = min(min(run["losses"]) for runs in found.values() for run in runs)
    draw(RESULT.with_suffix(".svg"), found, "nats a character", (0.98 * least, 1.6))


def draw(path: Path, found: dict[str, list[dict[str, Any]]], unit: str, limits: tuple[float, float]) -> None:
    """The mean losses of each method's runs, evaluated every 25 steps, against steps and seconds."""
    import matplotlib.pyplot as plt

    chart, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    colors = {"AdamW": "#0072B2", "Muon": "#009E73"}
    for method, runs in found.items():
        losses = [statistics.fmean(values) for values in zip(*(run["losses"] for run in runs), strict=True)]
        seconds = [statistics.fmean(values) for values in zip(*(run["seconds"] for run in runs), strict=True)]
        style: dict[str, Any] = {
            "color": colors[METHODS[method]],
            "linestyle": "--" if method == METHODS[method] else "-",
            "label": method,
        }
        axes[0].plot([EVERY * (i + 1) for i in range(len(losses))], losses, **style)
        if all(run.get("jobs", 1) == 1 for run in runs):  # else seconds say nothing
            axes[1].plot(seconds, losses, **style)
    axes[0].set(xlabel="steps", ylabel=f"loss on text held out, {unit}", ylim=limits)
    axes[1].set(xlabel="seconds of the steps")
    axes[0].legend(frameon=False)
    for axis in axes:
        axis.grid(alpha=0.3)
    chart.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("search", "time", "table", "figure"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="methods whose name has this")
    parser.add_argument("--text", default=LIBRARY, help="a file")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--floor", type=float, default=FLOOR, help="the last rate over the peak")
    parser.add_argument("--ridge", nargs="+", default=[EVIDENCE], help='numbers, "3 batches" or evidence')
    parser.add_argument("--lr", type=float, help="instead of the rate found")
    options = parser.parse_args()
    if options.table or options.figure:
        if options.figure:
            figure(options)
            return
        for options.text, options.floor in sorted(
            {((BEFORE | run)["text"], (BEFORE | run)["floor"]) for run in known()["runs"]}
        ):
            options.ridge = list(
                dict.fromkeys((BEFORE | run)["ridge"] for run in runs_of(text=options.text, part="end"))
            )
            print(f"\n{options.text}, a cosine to {options.floor:g} of the peak")
            table(options)
        return
    require_cuda()
    if options.time:
        store(known() | {"steps": time_steps()})
        table(options)
        return
    part, steps = ("choice", SEARCH_STEPS) if options.search else ("end", options.steps)
    name = Path(options.text).name
    done = {tuple((BEFORE | run)[key] for key in KEYS) for run in known()["runs"]}
    wanted = [
        (method, lr, seed, part, steps, options.text, options.floor, EVIDENCE if method == base else ridge)
        for seed in ((SEARCH_SEED,) if options.search else SEEDS)
        for method, base in METHODS.items()
        if options.only in method and not (options.search and method != base)
        for lr in (RATES[base] if options.search else (options.lr or best(method, name),))
        for ridge in options.ridge
    ]
    items = [item for item in dict.fromkeys(wanted) if (*item[:5], name, *item[6:]) not in done]
    for i, result, _ in runner.each(train, items, options.jobs):
        entry = dict(zip(KEYS, items[i], strict=True)) | {
            "text": name,
            "schedule": f"{steps} steps",
            "jobs": options.jobs,
        }
        entry["device"] = runner.device_name("cuda")
        now = known()
        store(now | {"runs": [*now["runs"], entry | result]})
        print(entry, result["losses"][-1], f"{result['seconds'][-1]:.1f} s", result["ridges"], flush=True)


if __name__ == "__main__":
    main()
