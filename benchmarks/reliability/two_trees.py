"""What a change costs: the same work with this tree and with another one, in turn.

    git worktree add ../COMMIT COMMIT
    python benchmarks/reliability/two_trees.py ../COMMIT [NAME ...] [--rounds 9]      # adds to two_trees.json

Each tree has a process of its own, which stays warm; a round does each work once with each tree, and the ratio is taken
round by round. Seconds are those of the processor, on a GPU those of the clock. `same bits`: whether predictions, or
weights, after the first call are equal to the last bit. The JSON names the other tree by its folder. `sepsa stream` is
a new process each time. A captured step is left out where there is no GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

HERE = Path(__file__).resolve()
RESULTS = HERE.with_suffix(".json")
ROWS, INPUTS = 2_000, 10
TABLE_ROWS = 200_000

Work = Callable[[], Any]  # does the work once; returns numbers to compare


def stream(rows: int = ROWS) -> tuple[Any, Any]:
    """Rows with a nonlinear law and noise."""
    draw = np.random.default_rng(0)
    X = draw.normal(size=(rows, INPUTS))
    return X, np.sin(X[:, 0]) + X[:, 1] * X[:, 2] + 0.1 * draw.normal(size=rows)


def training_steps(batch: int, captured: bool = False) -> Work:
    import torch

    from sepsa import RLS, SepSA

    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = "cuda" if captured else "cpu"
    head = torch.nn.Linear(50, 2)
    model = torch.nn.Sequential(torch.nn.Linear(8, 50), torch.nn.Tanh(), head).to(device)
    options = {"fused": True, "capturable": True} if captured else {}
    optimizer = SepSA(model, torch.optim.Adam, solver=RLS(), lr=1e-3, **options)
    batches = [(torch.randn(batch, 8, device=device), torch.randn(batch, 2, device=device)) for _ in range(64)]
    learn: Callable[..., object] = optimizer.capture(*batches[0]) if captured else optimizer.learn

    def work() -> Any:
        for _ in range(32):
            for x, y in batches:
                learn(x, y)
        return head.weight.detach().cpu().numpy()

    return work


def learner(body: Literal["auto", "fourier"]) -> Work:
    from sepsa.interfaces.sklearn import SepSARegressor

    model = SepSARegressor(body=body, random_state=0)
    X, y = stream()
    return lambda: model.prequential(X, y)


def forecaster() -> Work:
    from sepsa.forecast import SepSAForecaster

    hours = np.arange(1_500)
    draw = np.random.default_rng(0)
    series = 10 + np.sin(hours * np.pi / 12) + 0.3 * np.sin(hours * np.pi / 84) + 0.1 * draw.normal(size=len(hours))
    return lambda: SepSAForecaster(24).prequential(series)


def command() -> Work:
    X, y = stream(TABLE_ROWS)
    names = ",".join([*(f"x{i}" for i in range(INPUTS)), "y"])
    folder = tempfile.mkdtemp()
    path = Path(folder) / "rows.csv"
    np.savetxt(path, np.column_stack([X, y]), fmt="%.6g", delimiter=",", header=names, comments="")
    out = Path(folder) / "predictions.csv"

    def work() -> Any:
        arguments = [sys.executable, "-m", "sepsa", "stream", str(path), "--target", "y", "--predictions", str(out)]
        subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return out.read_bytes()

    return work


WORKS: dict[str, Callable[[], Work]] = {
    "training step, batch 1": lambda: training_steps(1),
    "training step, batch 32": lambda: training_steps(32),
    "captured step, batch 64": lambda: training_steps(64, captured=True),
    "rows, default learner": lambda: learner("auto"),
    "rows, network alone": lambda: learner("fourier"),
    "forecaster, prequential": forecaster,
    "sepsa stream, 200,000 rows": command,
}


def processor_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def serve(name: str) -> None:
    """Do the work for each line of the input, and print its seconds and a hash of what it returned."""
    clock = time.perf_counter if "captured" in name else processor_seconds
    work = WORKS[name]()
    for _ in sys.stdin:
        start = clock()
        found = work()
        seconds = clock() - start
        bits = found if isinstance(found, bytes) else np.asarray(found).tobytes()
        print(json.dumps([seconds, hashlib.sha256(bits).hexdigest()]), flush=True)


def compare(name: str, trees: dict[str, Path], rounds: int) -> dict[str, Any]:
    from benchmarks.measure import ratio, spread

    processes = {
        key: subprocess.Popen(
            [sys.executable, str(HERE), "--serve", name],
            env=os.environ | {"PYTHONPATH": str(tree / "src")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for key, tree in trees.items()
    }
    seconds: dict[str, list[float]] = {key: [] for key in trees}
    bits = dict.fromkeys(trees, "")
    for number in range(-1, rounds):  # round -1 compiles and warms up
        for key, process in processes.items():
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            took, found = json.loads(process.stdout.readline())
            if number < 0:
                bits[key] = found
            else:
                seconds[key].append(took)
    for process in processes.values():
        process.communicate()
    return {
        "this / other": ratio(seconds, "this", "other"),
        "seconds": {key: spread(taken) for key, taken in seconds.items()},
        "same bits": bits["this"] == bits["other"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, nargs="?", help="the root of the other tree")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(WORKS)}")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--serve", choices=WORKS, help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    if options.serve:
        serve(options.serve)
        return
    if options.other is None:
        parser.error("name the root of the other tree")
    import torch

    from benchmarks.measure import machine, median_and_quartiles

    trees = {"this": HERE.parents[2], "other": options.other.resolve()}
    results = json.loads(RESULTS.read_text())["works"] if RESULTS.exists() else {}
    able = [name for name in WORKS if "captured" not in name or torch.cuda.is_available()]
    for name in options.names or able:
        results[name] = compare(name, trees, options.rounds) | {"other": trees["other"].name}
        same = "same bits" if results[name]["same bits"] else "other bits"
        print(f"{name}: this / other {median_and_quartiles(results[name]['this / other'])}, {same}", flush=True)
        RESULTS.write_text(json.dumps(machine() | {"works": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
