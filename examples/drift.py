"""Concept drift: how much a learner should forget, compared with River's linear model.

    python examples/drift.py --out drift.png

A nonlinear relationship is stable at first, jumps at sample 4,000, and rotates slowly from sample 8,000 on. With
forgetting 1 the head weights all samples equally, also those from before the jump; with forgetting λ it remembers about
1/(1 - λ) samples, so it tracks the changes, with more noise while the relationship is stable.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from river import linear_model, preprocessing

from sepsa.river import SepSARegressor

SAMPLES, JUMP, TURN, NOISE = 12_000, 4_000, 8_000, 0.1
FORGETTING = (1.0, 0.999, 0.99, 0.95)


def stream() -> Iterator[tuple[dict[str, float], float]]:
    rng = np.random.default_rng(0)
    for t in range(SAMPLES):
        a, b, c = rng.uniform(-2, 2, 3).tolist()
        angle = 0.0 if t < JUMP else math.pi / 2 + max(0, t - TURN) * 2 * math.pi / 4_000
        y = math.cos(angle) * (a * b + a) + math.sin(angle) * (abs(c) - c) + rng.normal(0, NOISE)
        yield {"a": a, "b": b, "c": c}, y


def errors(model: Any) -> np.ndarray:
    """Return the absolute error of each prediction, made before its sample was learned."""
    out = []
    for x, y in stream():
        out.append(abs(y - model.predict_one(x)))
        model.learn_one(x, y)
    return np.array(out)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--out", type=Path, default=Path("drift.png"), help="where the figure goes")
    path = options.parse_args().out
    models: dict[str, Any] = {f"forgetting {f:g}": SepSARegressor(forgetting=f, seed=0) for f in FORGETTING}
    models["River, linear"] = preprocessing.StandardScaler() | linear_model.LinearRegression()

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    parts = {"stands": (1_000, JUMP), "after the jump": (JUMP, JUMP + 1_000), "stands again": (JUMP + 1_000, TURN)}
    parts["turns"] = (TURN, SAMPLES)
    print("| mean absolute error | " + " | ".join(parts) + " |\n" + "|---" * (len(parts) + 1) + "|")
    for name, model in models.items():
        error = errors(model)
        print(f"| {name} | " + " | ".join(f"{error[a:b].mean():.3f}" for a, b in parts.values()) + " |")
        window = 200
        smooth = np.convolve(error, np.ones(window) / window, "valid")
        axes.plot(np.arange(window - 1, SAMPLES), smooth, label=name, lw=1, ls="--" if "River" in name else "-")
    axes.axhline(NOISE * math.sqrt(2 / math.pi), color="grey", lw=0.8, ls=":", label="noise")
    for t, text in ((JUMP, "the law jumps"), (TURN, "and turns from here on")):
        axes.axvline(t, color="grey", lw=0.8)
        axes.annotate(text, (t, 1.6), xytext=(4, 0), textcoords="offset points", fontsize=8)
    axes.set(xlabel="samples seen", ylabel=f"mean absolute error, last {window}", yscale="log", ylim=(0.05, 2))
    axes.legend(fontsize=8, ncols=2, loc="lower left")
    figure.savefig(path, dpi=150)
    print(f"figure written to {path}")


if __name__ == "__main__":
    main()
