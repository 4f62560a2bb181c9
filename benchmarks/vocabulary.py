"""A head for a real vocabulary: the price of a step, its agreement with the equations, and a GPT of 12 layers.

    python benchmarks/vocabulary.py --steps                     # 50,304 and 50,257 classes, in turns with AdamW
    python benchmarks/vocabulary.py --agreement                 # with the equations in float64
    python benchmarks/vocabulary.py --tokens FILE FOLDER ...    # byte pairs of the documents below the folders
    python benchmarks/vocabulary.py --train FILE                # 12 layers of width 768 on these tokens
    python benchmarks/vocabulary.py --table
    python benchmarks/vocabulary.py --figure                    # vocabulary.svg

They write vocabulary.json after every run, and do not run again what it holds. Models and batches are those of
language.py: 64 sequences of 256, bf16. "SepSA, in chunks" is `learn(..., body=model.features)`, which computes the loss
without an array of samples and classes. Steps are eager; training is compiled, each rate was chosen for the base alone.
"""

from __future__ import annotations

import argparse
import html
import math
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from language import CONTEXT, EVERY, FORMS, GPT, SEQUENCES, batches, draw, known, learner, stepper, store
from measure import alternate_on_gpu, median_and_quartiles, ratio, require_cuda
from torch import Tensor, nn
from torch.nn import functional

from sepsa import SepSA, SoftmaxNewton
from sepsa.heads.base import parameters
from sepsa.heads.math.cross_entropy import finish_large, look_large, with_curvature

RESULT = Path(__file__).with_suffix(".json")
WIDTH, LAYERS, VOCABULARY = 768, 12, 32_768
STEPS, SEARCH_STEPS, WARM_UP, SEEDS = 500, 150, 50, range(2)
RATES = {"AdamW": (1e-3, 2e-3), "Muon": (4e-3, 8e-3)}
METHODS = {form.format(base): base for base in RATES for form in FORMS}
RIDGES = (3.0, 30.0, 300.0, 3000.0)


# ---------------------------------------------------------------------- price and agreement


def price(classes: int) -> dict[str, Any]:
    """Milliseconds of a step of 16,384 samples, of the base's, and the peak of the memory allocated, in GiB."""
    torch.manual_seed(0)
    windows = torch.randint(classes, (SEQUENCES, CONTEXT + 1), device="cuda")
    data = [(windows[:, :-1], windows[:, 1:])]
    runs: dict[str, Callable[[], object]] = {}
    peaks = {}
    for method in ("AdamW", "SepSA", "SepSA, in chunks"):
        model = GPT(classes=classes, width=WIDTH, heads=12).cuda()
        solver = SoftmaxNewton(ridge=1000.0)
        base = "AdamW" if method == "AdamW" else "SepSA over AdamW"
        optimizer = learner(base, model, 1e-3, solver)
        runs[method] = chunked(model, optimizer, *data[0]) if "chunks" in method else stepper(model, optimizer, data)
        held = torch.cuda.memory_allocated()
        for _ in range(4):
            runs[method]()
        torch.cuda.reset_peak_memory_stats()
        runs[method]()
        peaks[method] = (torch.cuda.max_memory_allocated() - held + memory_of(model)) / 2**30
    times = alternate_on_gpu(runs, rounds=9, calls=5)
    result: dict[str, Any] = {
        name: {"milliseconds": 1e3 * statistics.median(each), "peak_gib": peaks[name]} for name, each in times.items()
    }
    for name in [name for name in runs if name != "AdamW"]:
        result[name] |= {"of_adamw": ratio(times, name, "AdamW"), "peak_of_adamw": peaks[name] / peaks["AdamW"]}
    head = SoftmaxNewton(ridge=1000.0).bind(nn.Linear(WIDTH, classes, bias=False).cuda())
    x, y = torch.randn(16_384, WIDTH, device="cuda").bfloat16(), data[0][1].flatten()
    alone = alternate_on_gpu({"update": lambda: head.update(x, y)}, rounds=9, calls=5)["update"]
    return result | {
        "update": {"milliseconds": 1e3 * statistics.median(alone)},
        "kernels": kernels(lambda: head.update(x, y)),
    }


def chunked(model: GPT, optimizer: SepSA[Any], x: Tensor, y: Tensor) -> Callable[[], object]:
    def run() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            optimizer.learn(x, y, body=model.features)

    return run


def memory_of(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def kernels(run: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of the kernels of an update, by what they do."""
    kinds = {
        "products of samples and classes": ("hss_", "s16816gemm"),
        "softmax less labels": ("_residuals",),
        "curvature and step in float32": ("f32f32",),
        "factor and inverse": ("trsm", "getrf", "potr", "f64"),
        "sums": ("reduce_kernel",),
    }
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    spent: dict[str, float] = {}
    for event in profile.key_averages():
        kind = next((kind for kind, names in kinds.items() if any(n in event.key for n in names)), "elementwise")
        spent[kind] = spent.get(kind, 0.0) + event.self_device_time_total / 1e3
    return spent


def agreement(classes: int, dtype: torch.dtype, rows: int, updates: int = 3) -> list[float]:
    """The relative error of each step, of the equations in float64 from the same state."""
    torch.manual_seed(0)
    linear = nn.Linear(WIDTH, classes, bias=False).cuda()
    nn.init.normal_(linear.weight, std=3 / math.sqrt(WIDTH))
    head, errors = SoftmaxNewton(ridge=10.0).bind(linear), []
    sizes = torch.linspace(0.3, 2.0, WIDTH, device="cuda")
    for _ in range(updates):
        x = (torch.randn(rows, WIDTH, device="cuda") * sizes).to(dtype)
        y = torch.randint(0, classes, (rows,), device="cuda")
        with torch.no_grad():
            state, W = with_curvature(head._state), parameters.follow(linear, head._state.W)
            Phi = parameters.rows(linear, x, torch.float64)
            wanted = finish_large(state, look_large(state, W, Phi, y, None, head._settings(linear))[0]).W - W
            head.update(x, y)
            errors.append(float(torch.linalg.norm(head._state.W - W - wanted) / torch.linalg.norm(wanted)))
    return errors


# ---------------------------------------------------------------------- a GPT of 12 layers


def make_tokens(file: Path, folders: list[Path]) -> None:
    """Byte pairs of all documents below the folders: 32,768 pieces, found in every fourth of them.

    Tried with Debian's linux-doc-6.1, postgresql-doc-15, git-doc, sqlite3-doc, perl-doc, debian-reference-en,
    r-doc-html, cmake-doc and python3.11-doc.
    """
    from tokenizers import ByteLevelBPETokenizer

    paths = sorted(p for folder in folders for p in folder.rglob("*") if p.suffix in (".html", ".rst", ".txt", ".pod"))
    seen: set[int] = set()
    texts = [text for path in paths if path.is_file() and len(text := plain(path, seen)) > 500]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts[::4], vocab_size=VOCABULARY)
    codes = [np.array(each.ids, np.uint16) for each in tokenizer.encode_batch(texts)]
    held = [codes[i] for i in range(0, len(codes), 20)]
    rest = [codes[i] for i in range(len(codes)) if i % 20]
    np.savez_compressed(file, held_out=np.concatenate(held), training=np.concatenate(rest))
    print(f"{sum(map(len, texts)):,} characters, {sum(map(len, codes)):,} tokens of {tokenizer.get_vocab_size():,}")


def plain(path: Path, seen: set[int]) -> str:
    """The text of a document without tags, and without paragraphs that were seen before."""
    text = path.read_text("utf-8", "ignore")
    if path.suffix == ".html":
        text = re.sub(r"<(script|style|nav|head)\b.*?</\1>", "", text, flags=re.DOTALL | re.IGNORECASE)
        text = html.unescape(re.sub(r"<[^>]+>", "", text))
    paragraphs = re.split(r"\n\s*\n", text)
    new = [part for part in paragraphs if len(part) < 80 or hash(part) not in seen]
    seen.update(map(hash, paragraphs))
    return "\n\n".join(new)


def train(tokens: dict[str, Tensor], method: str, lr: float, seed: int, steps: int, ridge: float) -> dict[str, Any]:
    """Train one model: the loss on text held out after every 25 steps, with the seconds until then."""
    torch.manual_seed(seed)
    model = GPT(classes=VOCABULARY, width=WIDTH, depth=LAYERS, heads=12).cuda()
    optimizer = learner(method, model, lr, SoftmaxNewton(ridge=ridge))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min(1.0, (t + 1) / WARM_UP) * (0.55 + 0.45 * math.cos(math.pi * min(1.0, t / steps)))
    )
    source, other = batches(tokens["training"], seed), batches(tokens["held_out"], 0)
    checks = [next(other) for _ in range(16)]
    features, whole = torch.compile(model.features), torch.compile(model)

    def step(x: Tensor, y: Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            if isinstance(optimizer, SepSA):
                optimizer.learn(x, y, body=features)
                return
            loss = functional.cross_entropy(whole(x).flatten(0, 1).float(), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    losses, seconds, spent = list[float](), list[float](), 0.0
    for number in range(1, steps + 1):
        if number % EVERY == 1:
            torch.cuda.synchronize()
            start = time.perf_counter()
        step(*next(source))
        schedule.step()
        if number % EVERY == 0:
            torch.cuda.synchronize()
            spent += time.perf_counter() - start
            losses.append(round(held_out_loss(features, model.head, checks), 5))
            seconds.append(round(spent, 3))
            if not math.isfinite(losses[-1]):
                break
    return {"final": losses[-1], "losses": losses, "seconds": seconds}


@torch.no_grad()
def held_out_loss(features: Any, head: nn.Linear, checks: list[tuple[Tensor, Tensor]]) -> float:
    with torch.autocast("cuda", torch.bfloat16):
        losses = [functional.cross_entropy(head(features(x)).float().flatten(0, 1), y.flatten()) for x, y in checks]
    return float(torch.stack(losses).mean())


def train_all(file: Path) -> None:
    arrays = np.load(file)
    tokens = {name: torch.from_numpy(arrays[name].astype(np.int64)).cuda() for name in ("training", "held_out")}
    search = [(base, lr, 100, SEARCH_STEPS, 0.0) for base, rates in RATES.items() for lr in rates]
    run_missing(tokens, search)
    rates = {base: min(found(base, SEARCH_STEPS), key=last)["lr"] for base in RATES}
    ours = {method: base for method, base in METHODS.items() if method != base}
    for method, base in ours.items():
        run_missing(tokens, [(method, rates[base], 100, SEARCH_STEPS, ridge) for ridge in RIDGES])
    best = {method: min(found(method, SEARCH_STEPS), key=last)["ridge"] for method in ours}
    each = [(method, rates[base], best.get(method, 0.0)) for method, base in METHODS.items()]
    run_missing(tokens, [(method, lr, seed, STEPS, ridge) for seed in SEEDS for method, lr, ridge in each])


def run_missing(tokens: dict[str, Tensor], items: list[tuple[str, float, int, int, float]]) -> None:
    keys = ("method", "lr", "seed", "steps", "ridge")
    for item in items:
        entry = dict(zip(keys, item, strict=True)) | {"schedule": f"{item[3]} steps"}
        if any(all(run[key] == entry[key] for key in keys) for run in known(RESULT)["runs"]):
            continue
        method, lr, seed, steps, ridge = item
        result = train(tokens, method, lr, seed, steps, ridge or 1.0)
        store(known(RESULT) | {"runs": [*known(RESULT)["runs"], entry | result]}, RESULT)
        print(entry, result["losses"][-1], f"{result['seconds'][-1]:.1f} s", flush=True)


def found(method: str, steps: int) -> list[dict[str, Any]]:
    return [run for run in known(RESULT)["runs"] if run["method"] == method and run["steps"] == steps]


def last(run: dict[str, Any]) -> float:
    loss: float = run["losses"][-1]
    return loss if math.isfinite(loss) else math.inf


# ---------------------------------------------------------------------- results


def table() -> None:
    result = known(RESULT)
    for classes, entries in result.get("steps", {}).items():
        for name, entry in entries.items():
            if name == "kernels":
                print(f"  {classes} classes, an update:", ", ".join(f"{k} {v:.2f} ms" for k, v in entry.items()))
                continue
            told = f", {median_and_quartiles(entry['of_adamw'])} of AdamW's" if "of_adamw" in entry else ""
            peak = f", peak {entry['peak_gib']:.2f} GiB" if "peak_gib" in entry else ""
            print(f"{classes} classes, {name}: {entry['milliseconds']:.1f} ms{told}{peak}")
    for name, errors in result.get("agreement", {}).items():
        print(f"{name}: relative error of the step {max(errors):.1e}")
    print("| method | rate | loss at the end | steps to the base's loss | seconds to it | seconds of all steps |")
    print("|---|--:|--:|--:|--:|--:|")
    for method, base in METHODS.items():
        runs, others = found(method, STEPS), found(base, STEPS)
        if not runs or not others:
            continue
        ends = ", ".join(f"{last(run):.4f}" for run in runs)
        goal = statistics.fmean(last(run) for run in others)
        reached = [next((i for i, loss in enumerate(run["losses"]) if loss <= goal), None) for run in runs]
        steps = ", ".join("-" if i is None else str(EVERY * (i + 1)) for i in reached)
        seconds = ", ".join(
            "-" if i is None else f"{run['seconds'][i]:.1f}" for i, run in zip(reached, runs, strict=True)
        )
        spent = ", ".join(f"{run['seconds'][-1]:.1f}" for run in runs)
        print(f"| {method} | {runs[0]['lr']:g} | {ends} | {steps} | {seconds} | {spent} |")


def figure() -> None:
    runs = {method: found(method, STEPS) for method in METHODS if found(method, STEPS)}
    draw(RESULT.with_suffix(".svg"), runs, "nats a token", (2.5, 6.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("steps", "agreement", "table", "figure"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--tokens", nargs="+", type=Path)
    parser.add_argument("--train", type=Path)
    options = parser.parse_args()
    if options.tokens:
        make_tokens(options.tokens[0], options.tokens[1:])
        return
    if options.steps or options.agreement or options.train:
        require_cuda()
    if options.steps:
        store(known(RESULT) | {"steps": {f"{classes:,}": price(classes) for classes in (50_304, 50_257)}}, RESULT)
    if options.agreement:
        cases = {
            "bfloat16": (torch.bfloat16, 16_384),
            "float16": (torch.float16, 16_384),
            "float32": (torch.float32, 4096),
        }
        store(
            known(RESULT)
            | {"agreement": {f"50,304 classes, {n}": agreement(50_304, *case) for n, case in cases.items()}},
            RESULT,
        )
    if options.train:
        train_all(options.train)
    figure() if options.figure else table()


if __name__ == "__main__":
    main()
