"""The contest of stream_speed.py with learners of other libraries, and the time that the arithmetic would take.

    SEPSA_DATA=... python benchmarks/streams/stream.py --rounds 15 --out benchmarks/streams/stream.json

Needs the extra `bench`; whoever is not installed is left out. Writes the JSON, and from it a .png beside it.
"""

from __future__ import annotations

import json
import timeit
from argparse import ArgumentParser
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import pyplot as plt
from torch import nn
from torch.nn.functional import mse_loss

from benchmarks.measure import machine
from benchmarks.streams.stream_speed import (
    CONTESTANTS,
    DECAY,
    HIDDEN,
    LR,
    Array,
    Contestant,
    LearnStream,
    compare,
    predict_then_learn,
    river_model,
    stream,
)
from reproduction.runner import one_thread
from sepsa import SepSA
from sepsa.states.output import replace


def network(d: int, m: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(d, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, m))


def torch_stream(X: Array, Y: Array, separable: bool) -> LearnStream:
    """The network in eager PyTorch, by Adam or by SepSA: one pass through the body for prediction and step together.

    Adam's output in training is the prediction. SepSA's head learns before its output in training, so the head alone
    predicts first; `benchmarks/loops/step_cost.py` times the step without a prediction.
    """
    model = network(X.shape[1], Y.shape[1])
    options: dict[str, Any] = {"lr": LR, "weight_decay": DECAY}
    sepsa = SepSA(model, torch.optim.Adam, **options) if separable else None
    optimizer = sepsa or torch.optim.Adam(model.parameters(), **options)
    body, head = model[:-1], model[-1]
    samples = _rows(X, Y)

    def run() -> Array:
        before = []
        for x, y in samples:
            features = body(x)
            if sepsa is None:
                outputs = prediction = head(features)
            else:
                with torch.no_grad():
                    prediction = head(features)
                with sepsa.observe(y):
                    outputs = head(features)
            mse_loss(outputs, y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            before.append(float(prediction[0, 0].detach()))
        return np.array(before)

    return run


def _rows(X: Array, Y: Array) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x, y = torch.tensor(X, dtype=torch.float32), torch.tensor(Y, dtype=torch.float32)
    return list(zip(torch.split(x, 1), torch.split(y, 1), strict=True))


def sklearn_mlp(X: Array, Y: Array) -> LearnStream:
    from sklearn.neural_network import MLPRegressor

    model = MLPRegressor(hidden_layer_sizes=(HIDDEN,), learning_rate_init=LR, alpha=DECAY, random_state=0)
    samples = [(X[i : i + 1], Y[i : i + 1]) for i in range(len(X))]
    return predict_then_learn(
        samples, lambda x: model.predict(x)[0, 0] if hasattr(model, "coefs_") else 0.0, model.partial_fit
    )


def vowpal_wabbit(X: Array, Y: Array) -> LearnStream:
    from vowpalwabbit import Workspace

    workspace = Workspace(f"--nn {HIDDEN} --quiet")
    rows = [" ".join(f"{name}:{value}" for name, value in zip("abcdefgh", row, strict=True)) for row in X.tolist()]
    lines = [f"{y} | {row}" for row, y in zip(rows, Y[:, 0].tolist(), strict=True)]

    def run() -> Array:
        before = []
        for line in lines:
            example = workspace.example(line)
            before.append(workspace.predict(example))
            workspace.learn(example)
            workspace.finish_example(example)
        return np.array(before)

    return run


def padasip_rls(X: Array, Y: Array) -> LearnStream:
    from padasip.filters import FilterRLS

    model = FilterRLS(X.shape[1], mu=1.0, w="zeros")
    samples = list(zip(X, Y[:, 0], strict=True))
    return predict_then_learn(samples, model.predict, lambda x, y: model.adapt(y, x))


def jax_scan(X: Array, Y: Array) -> LearnStream:
    """SepSA's iteration as one jitted scan in float32, with its gradient written out."""
    import jax
    from jax import numpy as jnp

    d, m, p = X.shape[1], Y.shape[1], HIDDEN + 1

    def step(state: Any, sample: Any) -> Any:
        theta, first, second, power1, power2, B, W = state
        x, y = sample
        x = jnp.append(x, 1.0)
        h = jnp.maximum(theta @ x, 0.0)
        phi = jnp.append(h, 1.0)
        before = W @ phi
        u = B @ phi
        g = 1.0 + phi @ u
        B = B - jnp.outer(u, u / g)
        W = W + jnp.outer((y - before) / g, u)
        e = (2.0 / m) * (W @ phi - y)
        gradient = jnp.outer(jnp.where(h > 0, e @ W[:, :-1], 0.0), x) + DECAY * theta
        power1, power2 = 0.9 * power1, 0.999 * power2
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient * gradient
        theta = theta - (LR / (1 - power1)) * first / (jnp.sqrt(second / (1 - power2)) + 1e-8)
        return (theta, first, second, power1, power2, B, W), before[0]

    scan = jax.jit(lambda state, X, Y: jax.lax.scan(step, state, (X, Y)))
    bound = np.sqrt(6 / d)
    theta = jnp.array(np.random.default_rng(0).uniform(-bound, bound, (HIDDEN, d + 1)), dtype=jnp.float32)
    zeros, one = jnp.zeros_like(theta), jnp.float32(1)
    state = (theta, zeros, zeros, one, one, jnp.eye(p, dtype=jnp.float32), jnp.zeros((m, p), dtype=jnp.float32))
    x, y = jnp.array(X, dtype=jnp.float32), jnp.array(Y, dtype=jnp.float32)
    scan(state, x, y)[1].block_until_ready()  # compiles
    return lambda: np.asarray(scan(state, x, y)[1])


PEERS = (
    Contestant("PyTorch SepSA, eager", "torch", partial(torch_stream, separable=True)),
    Contestant("PyTorch Adam, eager", "torch", partial(torch_stream, separable=False)),
    Contestant("JAX scan of the same step", "jax", jax_scan),
    Contestant("River BayesianLinearRegression", "river", partial(river_model, name="BayesianLinearRegression")),
    Contestant("scikit-learn MLPRegressor", "sklearn", sklearn_mlp),
    Contestant("Vowpal Wabbit --nn 50", "vowpalwabbit", vowpal_wabbit),
    Contestant("padasip RLS", "padasip", padasip_rls),
)


def multiply_adds(d: int, h: int, m: int) -> dict[str, int]:
    """The fewest multiply-adds of one sample, for a network d -> h -> m with Adam: a float64 head, a float32 body."""
    p = h + 1
    return {
        "head_float64": 3 * p * p // 2 + 4 * m * p,  # rank one on half a matrix; three responses and W's update
        "body_float32": 2 * d * h + 8 * (d + 1) * h + m * h,  # forward and gradient, Adam, the head's gradient
    }


def attainable(n: int = 512) -> float:
    """Float64 multiply-adds per second of one core, measured with a matrix product."""
    a = torch.ones(n, n, dtype=torch.float64)
    with one_thread():
        return n**3 / min(timeit.repeat(lambda: a @ a, number=1, repeat=10))


def draw(source: Path) -> Path:
    """Draw the microseconds per sample with quartiles into a .png beside it."""
    measured = json.loads(source.read_text(encoding="utf-8"))
    results = measured["contestants"]
    names = sorted(results, key=lambda name: -results[name]["microseconds"]["median"])
    fig, ax = plt.subplots(figsize=(8, 0.42 * len(names) + 1.6), layout="constrained")
    for ours, color, label in ((True, "#D55E00", "sepsa"), (False, "0.7", "others")):
        some = [i for i, name in enumerate(names) if ("sepsa" in name.lower()) == ours]
        ax.barh(some, [results[names[i]]["microseconds"]["median"] for i in some], color=color, label=label)
    for i, name in enumerate(names):
        us, error = results[name]["microseconds"], results[name]["mean_absolute_error"]
        ax.plot([us["q25"], us["q75"]], [i, i], color="k", lw=1)
        ax.text(
            max(us["median"], us["q75"]) * 1.1, i, f"{us['median']:.1f} µs, error {error:.2f}", va="center", fontsize=8
        )
    ax.set_yticks(range(len(names)), names)
    ax.set(xscale="log", xlim=(1, 25 * max(result["microseconds"]["median"] for result in results.values())))
    ax.set_xlabel("µs to predict one row, then learn it; error: mean absolute, of these predictions")
    ax.set_title(f"Energy, row by row, on {measured['threads']} cores: {measured['processor']}", fontsize=10)
    ax.legend(loc="upper right", frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    out = source.with_suffix(".png")
    fig.savefig(out, dpi=150)
    plt.close(fig)
    return out


def write(out: Path, results: dict[str, dict[str, Any]], rate: float) -> None:
    """Write the results, and the time that one sample takes at `rate` float64 multiply-adds per second."""
    needed = multiply_adds(8, HIDDEN, 2)
    head, body = needed["head_float64"] / rate, needed["body_float32"] / (2 * rate)
    limit = {"multiply_adds": needed, "float64_multiply_adds_per_second": rate, "microseconds": 1e6 * (head + body)}
    content = machine() | {"limit": limit, "contestants": results}
    replace(out, [(json.dumps(content, indent=1) + "\n").encode()])


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    rate = attainable()
    comparison = compare(*stream(), arguments.rounds, (*CONTESTANTS, *PEERS))
    write(arguments.out, dict(item for item in comparison if isinstance(item, tuple)), rate)
    draw(arguments.out)


if __name__ == "__main__":
    main()
