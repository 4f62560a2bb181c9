"""The price of one sample: learners of sepsa and a linear model of River on the same stream, alternating.

    SEPSA_DATA=... python benchmarks/streams/stream_speed.py [--rounds 15] [--out FILE.json]

Ratios of the times come with quartiles. `stream.py` adds the learners of other libraries. The stream is
Energy's 491 training rows with 8 inputs, in the paper's first order, with raw targets; inputs are standardized
beforehand, for all contestants. Networks are 8 -> 50 -> 2 and learn both targets; contestants with one output learn the
first, the heating load. The error is the mean absolute error on the heating load of predictions made before learning.
"""

from __future__ import annotations

import importlib.util
import json
import time
import warnings
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.measure import machine, ratio, spread
from reproduction.data import load

Array = NDArray[Any]
LearnStream = Callable[[], Array]  # learns the stream once; returns predictions (n,) made before learning each sample


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


def engine(X: Array, Y: Array) -> LearnStream:
    from sepsa.learner.engine import Engine

    options = {"optimizer": "adam", "ridge": 1.0, "forgetting": 1.0, "loss": "squared", "body": "fourier"}
    one = Engine(X.shape[1], Y.shape[1], (HIDDEN,), lr=LR, weight_decay=DECAY, **options)
    return lambda: one.learn(X, Y)[:, 0]


def default_learner(X: Array, Y: Array, body: Literal["auto", "fourier"] = "auto") -> LearnStream:
    """The default learner of the interfaces, without their checks: a network with several heads, and experts."""
    from sepsa.interfaces.sklearn import SepSARegressor

    learner = SepSARegressor(body=body)._new_body(X.shape[1], Y.shape[1], seed=0)
    return second_pass(lambda: learner.learn(X, Y)[:, 0], lambda: learner.learn(X, Y))


def sklearn_interface(X: Array, Y: Array) -> LearnStream:
    """The default learner behind scikit-learn's interface, all rows in one call, with scikit-learn's checks."""
    from sepsa.interfaces.sklearn import SepSARegressor

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


CONTESTANTS = (
    Contestant("sepsa engine", "numpy", engine),
    Contestant("sepsa network alone", "sklearn", partial(default_learner, body="fourier")),
    Contestant("sepsa default learner", "sklearn", default_learner),
    Contestant("sepsa in scikit-learn", "sklearn", sklearn_interface),
    Contestant("sepsa in River", "river", river_interface),
    Contestant("sepsa network alone in River", "river", partial(river_interface, body="fourier")),
    Contestant("River LinearRegression", "river", partial(river_model, name="LinearRegression")),
)
OURS = CONTESTANTS[0].name


def stream() -> tuple[Array, Array]:
    """Energy's training rows with standardized inputs (n, 8), and its targets (n, 2), as float64."""
    energy = load("energy")
    return energy.train_inputs.double().numpy(), energy.train_targets.double().numpy()


def compare(
    X: Array, Y: Array, rounds: int, contestants: Sequence[Contestant] = CONTESTANTS
) -> Iterator[tuple[str, dict[str, Any]] | int]:
    """Yield the number of each round when it is done, then each installed contestant with its times and error."""
    installed = [c for c in contestants if importlib.util.find_spec(c.package)]
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


def table(results: dict[str, dict[str, Any]]) -> Table:
    """The contestants in a table, the fastest first."""
    told = Table("", "µs a sample", "samples a second", "mean absolute error", f"time / {OURS}")
    for name, result in sorted(results.items(), key=lambda item: item[1]["microseconds"]["median"]):
        us, times = result["microseconds"], result["times_ours"]
        told.add_row(
            name,
            f"{us['median']:.2f} [{us['q25']:.2f}, {us['q75']:.2f}]",
            f"{result['samples_per_second']:,.0f}",
            f"{result['mean_absolute_error']:.3g}",
            f"{times['median']:.2f} [{times['q25']:.2f}, {times['q75']:.2f}]",
        )
    return told


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="rounds, in each of which every contestant runs once")
    parser.add_argument("--out", type=Path, help="a .json for the raw numbers")
    arguments = parser.parse_args()
    console = Console()
    comparison = compare(*stream(), arguments.rounds)
    for _ in track(range(arguments.rounds + 1), "rounds", console=console, transient=True):
        next(comparison)
    results = dict(item for item in comparison if isinstance(item, tuple))
    console.print(table(results))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(machine() | {"contestants": results}, indent=1) + "\n")
        console.print(f"written to {arguments.out}", highlight=False)


if __name__ == "__main__":
    main()
