"""`sepsa bench`: contestants alternate in one process, and ratios of their times come with quartiles.

The stream is Energy's 491 training rows with 8 inputs, in the paper's first order, with raw targets; inputs are
standardized beforehand, for all contestants. Networks are 8 -> 50 -> 2 and learn both targets; contestants with one
output learn the first, the heating load. The error is the mean absolute error on the heating load of predictions made
before learning.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import platform
import subprocess
import time
import timeit
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import mse_loss

from sepsa.states.output import replace

Array = NDArray[Any]
LearnStream = Callable[[], Array]  # learns the stream once; returns predictions (n,) made before learning each sample


def alternate(contestants: dict[str, Callable[[], object]], rounds: int, seconds: float = 0.05) -> dict[str, Any]:
    """Seconds per call of each contestant in each of `rounds`; a round calls each one for about `seconds`."""
    calls = {}
    for name, run in contestants.items():
        for _ in range(3):
            run()
        start = time.perf_counter()
        run()
        calls[name] = max(1, int(seconds / (time.perf_counter() - start)))
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            start = time.perf_counter()
            for _ in range(calls[name]):
                run()
            times[name].append((time.perf_counter() - start) / calls[name])
    return times


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return {"median": float(middle), "q25": float(low), "q75": float(high)}


def ratio(times: dict[str, list[float]], one: str, other: str) -> dict[str, float]:
    """The spread of one / other, round by round, so that what slows the machine slows both."""
    return spread([a / b for a, b in zip(times[one], times[other], strict=True)])


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


def machine() -> dict[str, Any]:
    """The hardware and the versions that a measurement depends on."""
    return {
        "machine": platform.machine(),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


HIDDEN, LR, DECAY = 50, 1e-3, 1e-5


class Contestant(NamedTuple):
    """A method in the comparison; `fresh(X, Y)` builds an untrained learner, outside the measured time."""

    name: str
    package: str  # that has to be installed
    fresh: Callable[[Array, Array], LearnStream]


def predict_then_learn(
    samples: list[tuple[Any, Any]], predict: Callable[[Any], float], learn: Callable[[Any, Any], object]
) -> LearnStream:
    """Predict each sample (x, y), then learn it."""

    def run() -> Array:
        before = []
        for x, y in samples:
            before.append(predict(x))
            learn(x, y)
        return np.array(before)

    return run


def second_pass(first: LearnStream, again: Callable[[], object]) -> LearnStream:
    """Measure `again`, and return the predictions of the `first` pass, which is not measured.

    The learner fits its scales on the first rows: that is start-up, not the price of a sample.
    """
    before = first()

    def run() -> Array:
        again()
        return before

    return run


def engine(X: Array, Y: Array, dtype: Any) -> LearnStream:
    from sepsa.stream.engine import Engine

    one = Engine(X.shape[1], Y.shape[1], (HIDDEN,), lr=LR, weight_decay=DECAY, dtype=dtype)
    return lambda: one.learn(X, Y)[:, 0]


def default_learner(X: Array, Y: Array, body: Literal["auto", "fourier"] = "auto") -> LearnStream:
    """The default learner of the interfaces, without their checks: a network with several heads, and experts."""
    from sepsa.stream.sklearn import SepSARegressor

    learner = SepSARegressor(body=body)._new_learner(X.shape[1], Y.shape[1], seed=0)
    return second_pass(lambda: learner.learn(X, Y)[:, 0], lambda: learner.learn(X, Y))


def sklearn_interface(X: Array, Y: Array) -> LearnStream:
    """The default learner behind scikit-learn's interface, all rows in one call, with scikit-learn's checks."""
    from sepsa.stream.sklearn import SepSARegressor

    model = SepSARegressor(random_state=0)
    return second_pass(lambda: model.prequential(X, Y)[:, 0], lambda: model.partial_fit(X, Y))


def river_interface(X: Array, Y: Array, body: str = "auto") -> LearnStream:
    from sepsa.river import SepSARegressor

    run = river_stream(SepSARegressor(seed=0, body=body), X, Y)
    return second_pass(run, run)


def river_stream(model: Any, X: Array, Y: Array) -> LearnStream:
    rows = [dict(zip("abcdefgh", row, strict=True)) for row in X.tolist()]
    samples = list(zip(rows, Y[:, 0].tolist(), strict=True))
    return predict_then_learn(samples, model.predict_one, model.learn_one)


def river_model(X: Array, Y: Array, name: str) -> LearnStream:
    from river import linear_model

    return river_stream(getattr(linear_model, name)(), X, Y)


def network(d: int, m: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(d, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, m))


def torch_stream(X: Array, Y: Array, separable: bool) -> LearnStream:
    """The network in eager PyTorch, by Adam or by SepSA: one pass through the body for prediction and step together.

    Adam's output in training is the prediction. SepSA's head learns before its output in training, so the head alone
    predicts first; `benchmarks/step_cost.py` times the step without a prediction.
    """
    from sepsa.optimizer import SepSA

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


CONTESTANTS = (
    Contestant("sepsa engine", "numba", partial(engine, dtype=np.float32)),
    Contestant("sepsa engine, float64", "numba", partial(engine, dtype=np.float64)),
    Contestant("sepsa network alone", "sklearn", partial(default_learner, body="fourier")),
    Contestant("sepsa default learner", "sklearn", default_learner),
    Contestant("sepsa in scikit-learn", "sklearn", sklearn_interface),
    Contestant("sepsa in River", "river", river_interface),
    Contestant("sepsa network alone in River", "river", partial(river_interface, body="fourier")),
    Contestant("PyTorch SepSA, eager", "torch", partial(torch_stream, separable=True)),
    Contestant("PyTorch Adam, eager", "torch", partial(torch_stream, separable=False)),
    Contestant("JAX scan of the same step", "jax", jax_scan),
    Contestant("River LinearRegression", "river", partial(river_model, name="LinearRegression")),
    Contestant("River BayesianLinearRegression", "river", partial(river_model, name="BayesianLinearRegression")),
    Contestant("scikit-learn MLPRegressor", "sklearn", sklearn_mlp),
    Contestant("Vowpal Wabbit --nn 50", "vowpalwabbit", vowpal_wabbit),
    Contestant("padasip RLS", "padasip", padasip_rls),
)
OURS = CONTESTANTS[0].name


def stream() -> tuple[Array, Array]:
    """Energy's training rows with standardized inputs (n, 8), and its targets (n, 2), as float64."""
    from sepsa.paper.data import load

    energy = load("energy")
    return energy.train_inputs.double().numpy(), energy.train_targets.double().numpy()


def compare(X: Array, Y: Array, rounds: int) -> Iterator[tuple[str, dict[str, Any]] | int]:
    """Yield the number of each round when it is done, then each installed contestant with its times and error."""
    installed = [c for c in CONTESTANTS if importlib.util.find_spec(c.package)]
    times: dict[str, list[float]] = {c.name: [] for c in installed}
    errors: dict[str, float] = {}
    for number in range(-1, rounds):  # round -1 warms up
        for c in installed:
            run = c.fresh(X, Y)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # padasip and the MLP overflow on raw targets
                start = time.perf_counter()
                before = run()
                took = (time.perf_counter() - start) / len(X)
            errors[c.name] = float(np.abs(before - Y[:, 0]).mean())
            if number >= 0:
                times[c.name].append(took)
        yield number
    for name, taken in times.items():
        result = {
            "microseconds": spread([1e6 * t for t in taken]),
            "samples_per_second": 1 / float(np.median(taken)),
            "mean_absolute_error": errors[name],
            "times_ours": ratio(times, name, OURS),
            "rounds": [round(1e6 * t, 3) for t in taken],
        }
        yield name, result


def multiply_adds(d: int, h: int, m: int) -> dict[str, int]:
    """The fewest multiply-adds of one sample, for a network d -> h -> m with Adam: a float64 head, a float32 body."""
    p = h + 1
    return {
        "head_float64": 3 * p * p // 2 + 4 * m * p,  # rank one on half a matrix; three responses and W's update
        "body_float32": 2 * d * h + 8 * (d + 1) * h + m * h,  # forward and gradient, Adam, the head's gradient
    }


def attainable(n: int = 512) -> float:
    """Float64 multiply-adds per second of one core, measured with a matrix product."""
    from sepsa.paper.runner import one_thread

    a = torch.ones(n, n, dtype=torch.float64)
    with one_thread():
        return n**3 / min(timeit.repeat(lambda: a @ a, number=1, repeat=10))


def draw(source: Path) -> Path:
    """Draw the microseconds per sample with quartiles from what `write` wrote, into a .png beside it."""
    from matplotlib import pyplot as plt

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
