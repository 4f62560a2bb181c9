"""The slowly changing regression of "Loss of plasticity in deep continual learning" (Nature 2024), over 3 million rows.

    python benchmarks/streams/plasticity.py [--rows 3000000] [--seeds 5]
    python benchmarks/streams/plasticity.py --figure   # from the JSON

20 bits and a constant; one of the first 15 bits, drawn at random, flips every 10,000 rows, the other five are drawn
anew in every row. The target is a fixed network of 100 threshold units, weights -1 or 1, thresholds (m + 1) 0.7 less
the number of weights -1. Every learner has five ReLU units, sees each row once and is judged before it learns it.
"SepSA" is `StreamLearner`, the learner behind `SepSARegressor`, with `skip=False`: its head sees the five units and a
constant, no raw bit, which the script checks. It standardizes its inputs; backpropagation is shown with bits 0 and 1,
as in the paper, and with -1 and 1. Step sizes of backpropagation: 0.01, 0.003, 0.001 for SGD and Adam; 0.003 also with
the weight decay that SepSA's body has. The settings of SepSA were chosen on a million rows of two seeds that are not
reported: without weight decay its error rises too.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from benchmarks.measure import write
from sepsa.learner.stream_learner import StreamLearner

BITS, SLOW, HIDDEN, TARGET, PERIOD = 20, 15, 5, 100, 10_000
STEPS = (0.01, 0.003, 0.001)
SEPSA: dict[str, Any] = {"optimizer": "adam", "lr": 3e-3, "forgetting": 0.997, "ridge": 1.0, "weight_decay": 1e-3}
CURVE = 100  # points


def stream(rows: int, seed: int) -> tuple[Any, Any]:
    """Bits (rows, 21), the last one 1, and targets (rows,)."""
    rng = np.random.default_rng(seed)
    X = np.ones((rows, BITS + 1))
    X[:, SLOW:BITS] = rng.integers(0, 2, (rows, BITS - SLOW))
    slow = rng.integers(0, 2, SLOW)
    for start in range(0, rows, PERIOD):
        if start:
            flipped = rng.integers(SLOW)
            slow[flipped] = 1 - slow[flipped]
        X[start : start + PERIOD, :SLOW] = slow
    weights = rng.choice([-1.0, 1.0], (TARGET, BITS + 1))
    threshold = 0.7 * (BITS + 1) - (weights < 0).sum(1)
    out = rng.choice([-1.0, 1.0], TARGET)
    y = np.concatenate([(X[i : i + 100_000] @ weights.T > threshold) @ out for i in range(0, rows, 100_000)])
    return X, y


@njit(cache=True, fastmath=True, error_model="numpy")
def backpropagation(X: Any, y: Any, W: Any, v: Any, step: float, adam: bool, decay: float) -> Any:
    """Squared errors (n,) of one hidden layer of ReLU units, each made before the row is learned."""
    n, d = X.shape
    k = W.shape[0]
    m1, m2, n1, n2 = np.zeros((k, d)), np.zeros((k, d)), np.zeros(k + 1), np.zeros(k + 1)
    a, out = np.ones(k + 1), np.empty(n)
    b1, b2 = 1.0, 1.0
    for i in range(n):
        f = v[k]
        for u in range(k):
            z = 0.0
            for j in range(d):
                z += W[u, j] * X[i, j]
            a[u] = max(z, 0.0)
            f += v[u] * a[u]
        e = f - y[i]
        out[i] = e * e
        b1, b2 = b1 * 0.9, b2 * 0.999
        rate, scale = step / (1 - b1), 1 / (1 - b2)
        for u in range(k):
            delta = e * v[u] if a[u] > 0.0 else 0.0
            if adam:
                for j in range(d):
                    g = delta * X[i, j] + decay * W[u, j]
                    m1[u, j] += 0.1 * (g - m1[u, j])
                    m2[u, j] += 0.001 * (g * g - m2[u, j])
                    W[u, j] -= rate * m1[u, j] / (math.sqrt(m2[u, j] * scale) + 1e-8)
            else:
                for j in range(d):
                    W[u, j] -= step * (delta * X[i, j] + decay * W[u, j])
        for u in range(k + 1):
            g = e * a[u] + decay * v[u]
            if adam:
                n1[u] += 0.1 * (g - n1[u])
                n2[u] += 0.001 * (g * g - n2[u])
                v[u] -= rate * n1[u] / (math.sqrt(n2[u] * scale) + 1e-8)
            else:
                v[u] -= step * g
    return out


def backprop(X: Any, y: Any, seed: int, step: float, adam: bool, decay: float = 0.0) -> Any:
    """Errors of backpropagation from Kaiming's uniform weights, as those of SepSA's body."""
    rng = np.random.default_rng(seed)
    bound = math.sqrt(6 / X.shape[1])
    W = rng.uniform(-bound, bound, (HIDDEN, X.shape[1]))
    v = np.append(rng.uniform(-1, 1, HIDDEN) * math.sqrt(6 / HIDDEN), 0.0)
    return backpropagation(X, y, W, v, step, adam, decay)


def learner(X: Any, y: Any, seed: int, hidden: tuple[int, ...], **options: Any) -> Any:
    """Errors of a body with a head of recursive least squares."""
    options = {"ridge": 1.0, "loss": "squared", "body": "fourier", "activation": "relu"} | options
    model = StreamLearner(BITS, 1, regression=True, seed=seed, hidden=hidden, skip=False, **options)
    assert model.engine.memory("W", "heads").shape[1] == (hidden[-1] + 1 if hidden else BITS + 1)  # no raw bit
    return (model.learn(np.ascontiguousarray(X[:, :BITS]), y[:, None])[:, 0] - y) ** 2


METHODS: dict[str, Any] = {
    "SepSA, five ReLU units": lambda X, y, seed: learner(X, y, seed, (HIDDEN,), **SEPSA),
    "linear, recursive least squares": lambda X, y, seed: learner(X, y, seed, (), forgetting=SEPSA["forgetting"]),
    **{
        f"{name} {step:g}{bits}": lambda X, y, seed, step=step, adam=name == "Adam", signed=bool(bits): backprop(
            2 * X - 1 if signed else X, y, seed, step, adam
        )
        for bits in ("", ", bits -1 and 1")
        for name in ("SGD", "Adam")
        for step in STEPS
    },
    **{
        f"{name} 0.003, bits -1 and 1, weight decay": lambda X, y, seed, adam=name == "Adam": backprop(
            2 * X - 1, y, seed, 0.003, adam, SEPSA["weight_decay"]
        )
        for name in ("SGD", "Adam")
    },
}


def measure(rows: int, seeds: int) -> None:
    """Write the error in the first and last tenth of the rows, and a curve, for each method and seed."""
    result: dict[str, Any] = {name: [] for name in METHODS}
    for seed in range(seeds):
        X, y = stream(rows, seed)
        for name, method in METHODS.items():
            errors = method(X, y, seed)
            tenth = rows // 10
            curve = errors[: rows // CURVE * CURVE].reshape(CURVE, -1).mean(1)
            first, last = float(errors[:tenth].mean()), float(errors[-tenth:].mean())
            result[name].append({"first": first, "last": last, "curve": curve.tolist()})
            print(f"seed {seed}  {name:34} first tenth {first:.4f}  last tenth {last:.4f}", flush=True)
        write(__file__, {"rows": rows, "sepsa": SEPSA, "methods": result})


def draw(result: dict[str, Any], path: Path) -> None:
    """The mean curves over the seeds."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6))
    rows = result["rows"]
    for name, runs in result["methods"].items():
        curve = np.mean([run["curve"] for run in runs], 0)
        ours = name.startswith("SepSA")
        at = (np.arange(len(curve)) + 0.5) * rows / len(curve) / 1e6
        axes.plot(at, curve, label=name, lw=2.2 if ours else 1.1, color="#1f5fbf" if ours else None)
    axes.set(xlabel="million rows", ylabel="squared error", ylim=(0, None))
    axes.legend(fontsize=7, ncol=2)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Measure, or draw the figure from the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=3_000_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--figure", action="store_true", help="draw from the JSON")
    given = parser.parse_args()
    path = Path(__file__).with_suffix(".json")
    if not given.figure:
        measure(given.rows, given.seeds)
    draw(json.loads(path.read_text()), path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
