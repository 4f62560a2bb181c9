"""How the engine's price grows: with the width and depth of the network, and not with the samples seen.

    python benchmarks/stream_growth.py

Writes stream_growth.json. Inputs 8, outputs 2, Adam, float32 body. `start`: the first call in a fresh cache, which
compiles, and in a warm one, each in a process of its own.
"""

from __future__ import annotations

import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time

import numpy as np
from measure import alternate, spread, write

from sepsa.stream.engine import Engine

WIDTHS = (16, 32, 64, 128, 256, 512, 1024)
DEPTHS = (1, 2, 3, 4, 6, 8)
FIRST_CALL = """
import time, numpy as np, sepsa
start = time.perf_counter()
from sepsa.stream.engine import Engine
X, Y = np.ones((1, 8)), np.ones((1, 2))
Engine(8, 2).learn(X, Y)
print(time.perf_counter() - start)
"""


def samples(n: int) -> tuple[np.ndarray, np.ndarray]:
    chance = np.random.default_rng(0)
    X = chance.standard_normal((n, 8))
    return X, np.stack([np.sin(X[:, 0]) + X[:, 1] * X[:, 2], X[:, 3] ** 2], 1)


def growth(networks: dict[int, tuple[int, ...]]) -> dict[int, dict[str, float]]:
    """Microseconds a sample for each network, in turns."""
    contestants, counts = {}, {}
    for size, hidden in networks.items():
        n = max(20, int(2e6 / max(hidden) ** 2 / len(hidden)))
        X, Y = samples(n)
        engine = Engine(8, 2, hidden, weight_decay=1e-5)
        contestants[size], counts[size] = (lambda e=engine, X=X, Y=Y: e.learn(X, Y)), n
    times = alternate(contestants, rounds=7)
    return {size: spread([1e6 * t / counts[size] for t in taken]) for size, taken in times.items()}


def slope(sizes: dict[int, dict[str, float]], above: int = 0) -> float:
    points = [(np.log(size), np.log(us["median"])) for size, us in sizes.items() if size >= above]
    return float(np.polyfit(*zip(*points, strict=True), 1)[0])


def long_stream(total: int = 1_000_000, piece: int = 50_000) -> dict[str, object]:
    """A million samples: the time of each piece, and the memory before and after."""
    engine = Engine(8, 2, (50,), weight_decay=1e-5)
    X, Y = samples(piece)
    for _ in range(2):
        engine.learn(X, Y)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    state = len(pickle.dumps(engine))
    took = []
    for _ in range(total // piece):
        start = time.perf_counter()
        engine.learn(X, Y)
        took.append(1e6 * (time.perf_counter() - start) / piece)
    return {
        "samples": total,
        "microseconds_by_piece": took,
        "last_over_first_quarter": float(np.median(took[-len(took) // 4 :]) / np.median(took[: len(took) // 4])),
        "state_bytes_before": state,
        "state_bytes_after": len(pickle.dumps(engine)),
        "peak_memory_grew_by_kilobytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory,
        "finite": bool(np.isfinite(engine.memory.vector).all()),
    }


def first_calls() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "NUMBA_CACHE_DIR": cache}
        seconds = [
            float(subprocess.run([sys.executable, "-c", FIRST_CALL], env=environment, capture_output=True).stdout)
            for _ in range(4)
        ]
    return {"fresh_cache_seconds": seconds[0], "warm_cache_seconds": float(np.median(seconds[1:]))}


if __name__ == "__main__":
    start = first_calls()
    widths = growth({h: (h,) for h in WIDTHS})
    depths = growth({depth: (50,) * depth for depth in DEPTHS})
    result = {
        "start": start,
        "width": widths,
        "width_slope": slope(widths),
        "width_slope_from_128": slope(widths, 128),
        "depth": depths,
        "microseconds_per_layer": (depths[8]["median"] - depths[1]["median"]) / 7,
        "long_stream": long_stream(),
    }
    print(start, {h: round(us["median"], 2) for h, us in widths.items()}, result["width_slope"])
    write(__file__, result)
