"""Functions that the benchmarks share: timing, training steps, JSON files and commands."""

from __future__ import annotations

import contextlib
import copy
import json
import platform
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from benchmarks.check_numbers import ROOT, source_hash
from sepsa import SepSA

__all__ = [
    "alternate",
    "alternate_on_gpu",
    "dispatch",
    "machine",
    "mean_and_spread",
    "median_and_quartiles",
    "missing_runs",
    "ratio",
    "require_cuda",
    "ridge_of_batches",
    "spread",
    "training_step",
    "write",
]


def require_cuda() -> None:
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")


def missing_runs(
    runs: list[dict[str, Any]],
    keys: Sequence[str],
    items: Iterable[tuple[Any, ...]],
    submit: Callable[[tuple[Any, ...]], Future[dict[str, Any]]],
) -> Iterator[dict[str, Any]]:
    """Submit the items without a run, and add, print and yield each run as it ends: its item by `keys`, its results."""
    done = {tuple(run[key] for key in keys) for run in runs}
    waiting = {submit(item): item for item in items if item not in done}
    for future in as_completed(waiting):
        run = dict(zip(keys, waiting[future], strict=True)) | future.result()
        runs.append(run)
        print(run, flush=True)
        yield run


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return {"median": float(middle), "q25": float(low), "q75": float(high)}


def ratio(times: dict[str, list[float]], one: str, other: str) -> dict[str, float]:
    """The spread of one / other, round by round, so that what slows the machine slows both."""
    return spread([a / b for a, b in zip(times[one], times[other], strict=True)])


def alternate(
    contestants: dict[str, Callable[[], object]],
    rounds: int,
    seconds: float = 0.05,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Seconds per call of each contestant in each of `rounds`; a round calls each one for about `seconds`.

    `clock`: `time.process_time` where other programs share the processor.
    """
    calls = {}
    for name, run in contestants.items():
        for _ in range(3):
            run()
        start = clock()
        run()
        calls[name] = max(1, int(seconds / (clock() - start)))
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            start = clock()
            for _ in range(calls[name]):
                run()
            times[name].append((clock() - start) / calls[name])
    return times


def alternate_on_gpu(
    contestants: Mapping[str, Callable[[], object]], rounds: int, calls: int = 1, warm_up: int = 1
) -> dict[str, list[float]]:
    """Seconds per call of each contestant in each round of `calls`, after `warm_up` rounds that are not measured."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(warm_up + rounds):
        for name, call in contestants.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            torch.cuda.synchronize()
            if number >= warm_up:
                times[name].append((time.perf_counter() - start) / calls)
    return times


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """One step on the mean squared error, of SepSA, whose head learns from `y`, or of any other optimizer."""
    if isinstance(optimizer, SepSA):
        with optimizer.observe(y):
            loss = mse_loss(model(x), y)
    else:
        loss = mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def median_and_quartiles(values: Mapping[str, float], form: str = ".3f") -> str:
    """A spread in words: 1.02 [0.99, 1.07]."""
    return f"{values['median']:{form}} [{values['q25']:{form}}, {values['q75']:{form}}]"


def write(script: str | Path, result: dict[str, Any]) -> None:
    """Write the raw numbers to the JSON of this name, beside its script.

    Where `result` continues an older JSON it has the sources of that one, so that its oldest part tells its age.
    """
    path = Path(script).resolve().with_suffix(".json")
    path.write_text(json.dumps(machine() | result, indent=1) + "\n")
    print(f"written to {path}")


def processor() -> str:
    """The processor's name, as far as the system knows it: on ARM lscpu has it, not the kernel."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines += Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    if not any(line.startswith("model name") for line in lines):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            lines += subprocess.run(["lscpu"], capture_output=True, text=True, timeout=10).stdout.splitlines()
    for key in ("model name", "model\t"):  # the latter names a board; on x86 it is a number
        for line in lines:
            if line.lower().startswith(key):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def hardware() -> dict[str, Any]:
    """The machine and the versions that a measurement depends on."""
    return {
        "machine": platform.machine(),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def machine() -> dict[str, Any]:
    """The hardware, the versions, and hashes of the sources that a measurement depends on.

    They are hashes of the script, and of each folder of src/, and of reproduction/, from which the process has imported
    a module until now.
    """
    found = (getattr(module, "__file__", None) for module in [*sys.modules.values()])
    folders = {Path(file).resolve().parent for file in found if isinstance(file, str)}
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "").resolve()  # an interactive one has none
    used = sorted(folder for folder in folders if ROOT / "src" in folder.parents or folder == ROOT / "reproduction")
    used = [script, *used] if ROOT in script.parents else used
    return hardware() | {"sources": {path.relative_to(ROOT).as_posix(): source_hash(path) for path in used}}


def mean_and_spread(values: Sequence[float], form: str) -> str:
    """The mean of several seeds with their standard deviation; of one, its number alone."""
    told = f"{statistics.fmean(values):{form}}"
    return f"{told} ± {statistics.stdev(values):{form}}" if len(values) > 1 else told


def dispatch(
    parser: ArgumentParser, verbs: Mapping[str, Callable[[Namespace], object]], otherwise: Callable[[Namespace], object]
) -> None:
    """Do the first of `verbs` that the command line asks for by an option of its name, else `otherwise` and the table.

    On one thread. `--table` and `--figure`, without a value, need not be known to the parser.
    """
    for name in ("table", "figure"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, verb in verbs.items():
        if getattr(options, name):
            verb(options)
            return
    otherwise(options)
    verbs["table"](options)


@torch.no_grad()
def ridge_of_batches(model: nn.Module, head: nn.Linear, inputs: Tensor, count: float) -> float:
    """The ridge of a `SoftmaxNewton` that weighs as much in its curvature as `count` batches like this one.

    Before it has learned, n samples add about n times the mean square of a feature to a coordinate of the curvature,
    and a ridge adds classes/2 times itself.
    """
    found: list[Tensor] = []
    name = next(name for name, module in model.named_modules() if module is head)
    twin = copy.deepcopy(model)  # statistics of normalization layers would change
    twin.get_submodule(name).register_forward_pre_hook(lambda module, args: found.append(args[0].double()))
    twin(inputs)
    rows = found[0].numel() // head.in_features
    return count * rows * float(found[0].square().mean()) / max(head.out_features / 2, 1)
