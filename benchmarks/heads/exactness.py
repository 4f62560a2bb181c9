"""How exact heads are for features of any scale and in batches of any size, against 60 digits.

    python benchmarks/heads/exactness.py [--rows 1000] [--only ROUTE ...] [--jobs 16]

Writes exactness.json, or with a GPU exactness-gpu.json, 100 cells for each route. A head learns rows of 11 features in
batches of 1, 2, 7, 64 and 1,000; its predictions at these rows are compared with those of the same method in 60 digits
(mpmath), relative to the largest prediction. An error above 1e-6 is silent unless the head refused the rows or warned.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from mpmath import mp, mpf
from torch import Tensor, nn

from benchmarks.measure import machine
from sepsa import RLS
from sepsa.heads import LogisticNewton, PerOutput, SoftmaxNewton
from sepsa.heads.cross_entropy.math import FADE
from sepsa.heads.run import choose
from sepsa.heads.run.choose import force
from sepsa.restoration import due

mp.dps = 60
BATCHES, FEATURES, LIMIT = (1, 2, 7, 64, 1000), 11, 1e-6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Scaling(NamedTuple):
    """A table X (n, k), y (n,) whose features are hard to compute with, and the ridge."""

    name: str
    X: np.ndarray[Any, Any]
    y: np.ndarray[Any, Any]
    ridge: float = 1.0


def scalings(rows: int) -> Iterator[Scaling]:
    """Twenty tables: offsets, factors, time stamps, columns that nearly agree, large rows, and ridges."""
    rng = np.random.default_rng(0)
    Z = rng.normal(size=(rows, FEATURES))
    y = 2 * np.tanh(Z[:, 0]) + Z[:, 1] + 0.3 * rng.normal(size=rows)
    time = np.arange(rows)

    def last(column: Any) -> Any:
        return np.column_stack([Z[:, :-1], column])

    yield Scaling("standardized", Z, y)
    for offset in (1e2, 1e4, 1e5, 1e6, 1e8):
        yield Scaling(f"all features + {offset:.0e}", Z + offset, y)
    for factor in (1e-12, 1e-6, 1e6, 1e12):
        yield Scaling(f"one feature x {factor:.0e}", last(factor * Z[:, -1]), y)
    yield Scaling("factors 1e-12 to 1e12", Z * np.logspace(-12, 12, FEATURES), y)
    for unit, first, step in (("seconds", 1.7e9, 60.0), ("milliseconds", 1.7e12, 6e4), ("nanoseconds", 1.7e18, 6e10)):
        yield Scaling(f"time stamp in {unit}", last(first + step * time), y)
    for gap in (1e-6, 1e-9):
        yield Scaling(f"two columns that differ by {gap:.0e}", last(Z[:, 0] + gap * Z[:, -1]), y)
    large = Z.copy()
    large[rows // 2] *= 1e6
    yield Scaling("one row x 1e6", large, y)
    yield Scaling("targets + 1e6", Z, y + 1e6)
    yield Scaling("ridge 1e-12", Z, y, 1e-12)
    yield Scaling("ridge 1e-30", Z, y, 1e-30)


# ---------------------------------------------------------------------- 60 digits


def extended(array: Any) -> Any:
    """A NumPy array of mpmath's numbers."""
    return np.vectorize(mpf, otypes=[object])(np.asarray(array, dtype=float))


def solve(A: Any, b: Any) -> Any:
    """A⁻¹b for a positive definite A, by its Cholesky factor."""
    p, L, x = len(A), np.zeros(A.shape, dtype=object), b.copy()
    for i in range(p):
        for j in range(i + 1):
            value = A[i, j] - L[i, :j].dot(L[j, :j]) if j else A[i, j]
            L[i, j] = mp.sqrt(value) if i == j else value / L[j, j]
        x[i] = (x[i] - L[i, :i].dot(x[:i]) if i else x[i]) / L[i, i]
    for i in reversed(range(p)):
        x[i] = (x[i] - L[i + 1 :, i].dot(x[i + 1 :]) if i + 1 < p else x[i]) / L[i, i]
    return x


def ridge_regression(Phi: Any, Y: Any, batch: int, forgetting: float, ridge: Any, prior: Any) -> Any:
    """W (p, m) after updates of `batch` rows: sums fade, and the next coordinates get their ridge back in rotation."""
    p = Phi.shape[1]
    A, b, left, cursor = np.diag(ridge).copy(), ridge[:, None] * prior, ridge.copy(), 0
    count = due(p, forgetting)
    for i in range(0, len(Phi), len(Phi) if forgetting == 1.0 else batch):
        rows = slice(i, i + (len(Phi) if forgetting == 1.0 else batch))
        A, b, left = (
            forgetting * A + Phi[rows].T.dot(Phi[rows]),
            forgetting * b + Phi[rows].T.dot(Y[rows]),
            forgetting * left,
        )
        for j in range(cursor, cursor + count):
            lacking = ridge[j % p] - left[j % p]
            A[j % p, j % p] += lacking
            b[j % p] += lacking * prior[j % p]
            left[j % p] += lacking
        cursor += count
    return solve(A, b)


def cross_entropy(Phi: Any, t: Any, batch: int, ridge: Any, prior: Any) -> Any:
    """W (p, K) of the online Newton method that `sepsa.heads.cross_entropy.math` writes out, for forgetting 1."""
    p, K = prior.shape
    W, A, left = prior.copy(), np.diag(ridge).copy(), ridge.copy()
    shares, seen, cursor, one = extended(np.ones(K)), mpf(0), 0, mpf(1)
    for i in range(0, len(Phi), batch):
        rows, targets = Phi[i : i + batch], t[i : i + batch]
        logits = rows.dot(W)
        if K == 1:
            P = 1 / (1 + np.vectorize(mp.exp, otypes=[object])(-logits))
        else:
            power = np.vectorize(mp.exp, otypes=[object])(logits - logits.max(1, keepdims=True))
            P = power / power.sum(1, keepdims=True)
        R, n = P - targets, len(rows)
        U = (P * (1 - P) + R * R) / 2
        omega = U.sum(1)
        total = seen + (FADE + 1) * p
        lam = total / (total + FADE * n)
        shares = lam * shares + (1 - lam) + U.sum(0)
        s = min(K, 2) * shares / shares.sum()
        rho = max(one, (U.sum(0) / s).max() * min(K, 2) / max(U.sum(), mpf(10) ** -300))
        G = (rows * omega[:, None]).T.dot(rows)
        A, left = lam * A, lam * left
        at = [(cursor + j) % p for j in range(due(p, 1.0, at_least=n))]
        pull = rows.T.dot(R / s)
        for j in at:
            lacking = ridge[j] - left[j]
            A[j, j] += lacking
            pull[j] += lacking * (W - prior)[j]
            left[j] += lacking
        W = W - solve(A + rho * G, pull)
        A, seen, cursor = A + G, seen + n, cursor + len(at)
    return W


# ---------------------------------------------------------------------- routes


class Head(NamedTuple):
    """A head with its solver, and what it is compared with."""

    linear: nn.Linear
    solver: Any
    targets: Any  # y -> (n, m) array
    truth: Callable[[Any, Any, int, Any, Any], Any]  # Φ, Y, batch, ridge (p,), prior (p, m) -> W (p, m)
    scale: Callable[[float], float] = lambda ridge: ridge  # the ridge as the curvature has it


def regression(y: Any) -> Any:
    return y[:, None]


def classes(y: Any) -> Any:
    return np.eye(3)[np.digitize(y - y.mean(), [-1, 1])]


def sides(y: Any) -> Any:
    return (y > y.mean()).astype(float)[:, None]


def rls(ridge: float, forgetting: float = 1.0) -> Head:
    linear = nn.Linear(FEATURES, 1, dtype=torch.float64, device=DEVICE)
    truth = partial(_truth, forgetting=forgetting)
    return Head(linear, RLS(ridge=ridge, forgetting=forgetting).bind(linear), regression, truth)


def _truth(Phi: Any, Y: Any, batch: int, ridge: Any, prior: Any, forgetting: float = 1.0) -> Any:
    return ridge_regression(Phi, Y, batch, forgetting, ridge, prior)


def per_output(ridge: float) -> Head:
    linear = nn.Linear(FEATURES, 1, dtype=torch.float64, device=DEVICE)
    return Head(linear, PerOutput(RLS(ridge=ridge)).bind(linear), regression, _truth)


def by_evidence(ridge: float) -> Head:
    linear = nn.Linear(FEATURES, 1, dtype=torch.float64, device=DEVICE)
    return Head(linear, RLS(ridge="evidence").bind(linear), regression, _truth)


def softmax(ridge: float) -> Head:
    linear = nn.Linear(FEATURES, 3, dtype=torch.float64, device=DEVICE)
    return Head(linear, SoftmaxNewton(ridge=ridge).bind(linear), classes, cross_entropy, lambda r: 1.5 * r)


def logistic(ridge: float) -> Head:
    linear = nn.Linear(FEATURES, 1, dtype=torch.float64, device=DEVICE)
    return Head(linear, LogisticNewton(ridge=ridge).bind(linear), sides, cross_entropy)


Learn = Callable[[Head, list[tuple[Tensor, Tensor]]], None]


def updates(head: Head, batches: list[tuple[Tensor, Tensor]]) -> None:
    for batch in batches:
        head.solver.update(*batch)


def captured(head: Head, batches: list[tuple[Tensor, Tensor]]) -> None:
    """Updates as a captured step makes them; with a GPU by the kernels for it."""
    for x, y in batches:
        head.solver.prepare_capture()
        head.solver.update_captured(x, y)
        head.solver.finish_captured()
    head.solver.state_dict()  # where the host looks at what was refused


def merged(head: Head, batches: list[tuple[Tensor, Tensor]]) -> None:
    """Each batch is learned by a head of its own and merged."""
    start = [part.detach().clone() for part in head.linear.parameters()]
    for batch in batches:
        linear = nn.Linear(FEATURES, 1, dtype=torch.float64, device=DEVICE)
        with torch.no_grad():
            for mine, part in zip(linear.parameters(), start, strict=True):
                mine.copy_(part)
        other = RLS(ridge=head.solver.ridge).bind(linear)
        other.update(*batch)
        head.solver.merge(other.delta_since())


class Route(NamedTuple):
    """A way to learn."""

    name: str
    make: Callable[[float], Head]
    learn: Learn = updates
    within: Callable[[], AbstractContextManager[Any]] = nullcontext


def routes() -> list[Route]:
    """What runs on this machine."""
    if DEVICE == "cuda":
        return [
            Route("RLS, recorded", rls),
            Route("RLS, recorded, forgetting 0.99", partial(rls, forgetting=0.99)),
            Route("RLS, in place", rls, within=in_place),
            Route("RLS, captured", rls, captured),
            Route("RLS, captured, forgetting 0.99", partial(rls, forgetting=0.99), captured),
            Route("RLS, evidence, captured", by_evidence, captured),
            Route("RLS, evidence", by_evidence),
            Route("SoftmaxNewton", softmax),
            Route("SoftmaxNewton, captured", softmax, captured),
            Route("LogisticNewton", logistic),
        ]
    return [
        Route("RLS, torch", rls, within=partial(force, "torch")),
        Route("RLS, torch, forgetting 0.99", partial(rls, forgetting=0.99), within=partial(force, "torch")),
        Route("RLS, compiled", rls, within=partial(force, "compiled")),
        Route("RLS, compiled, forgetting 0.99", partial(rls, forgetting=0.99), within=partial(force, "compiled")),
        Route("RLS, captured", rls, captured),
        Route("RLS, merged deltas", rls, merged),
        Route("PerOutput(RLS)", per_output),
        Route("RLS, evidence", by_evidence),
        Route("RLS, evidence, captured", by_evidence, captured),
        Route("SoftmaxNewton", softmax),
        Route("SoftmaxNewton, torch", softmax, within=partial(force, "torch")),
        Route("SoftmaxNewton, captured", softmax, captured),
        Route("LogisticNewton", logistic),
        Route("LogisticNewton, torch", logistic, within=partial(force, "torch")),
    ]


class in_place(AbstractContextManager[None]):
    """Within it recorded updates change T in place, as those of very wide heads do."""

    def __enter__(self) -> None:
        self.before, choose.RECORDED_COPIES = choose.RECORDED_COPIES, 0

    def __exit__(self, *_: object) -> None:
        choose.RECORDED_COPIES = self.before


class Outcome(NamedTuple):
    """What one head did: the relative error of its predictions, or how it refused; and whether it warned."""

    error: float | None
    told: str


def run(route: Route, table: Scaling, batch: int) -> Outcome:
    """Learn a table in batches, and compare."""
    torch.manual_seed(0)
    told = ""
    with warnings.catch_warnings(record=True) as caught, route.within():
        warnings.simplefilter("always")
        head = route.make(table.ridge)
        prior = np.concatenate(
            [head.linear.weight.detach().cpu().numpy().T, head.linear.bias.detach().cpu().numpy()[None]]
        )
        Y = head.targets(table.y)
        X, targets = (torch.tensor(part, device=DEVICE) for part in (table.X, Y))
        batches = [(X[i : i + batch], targets[i : i + batch]) for i in range(0, len(X), batch)]
        try:
            route.learn(head, batches)
            predicted = head.solver.predict(X).detach().cpu().numpy()
        except (ValueError, RuntimeError) as error:
            return Outcome(None, f"{type(error).__name__}: {error}")
    told = "; ".join(sorted({str(one.message) for one in caught}))
    given = table.ridge
    of_bias = min(given, 1e-4)
    if getattr(head.solver, "ridge", None) == "evidence":
        given = head.solver.ridge_now
        of_bias = min(1e-5 * given, 1e-4)
        prior *= float(head.solver._choice.scale)
    ridge = np.append(np.full(FEATURES, head.scale(given)), head.scale(of_bias))
    Phi = extended(np.column_stack([table.X, np.ones(len(table.X))]))
    exact = Phi.dot(head.truth(Phi, extended(Y), batch, extended(ridge), extended(prior)))
    error = float(abs(extended(predicted) - exact).max() / abs(exact).max())
    return Outcome(error, told)


def is_silent(outcome: Outcome) -> bool:
    """Whether a wrong number came without a word."""
    return outcome.error is not None and not outcome.error <= LIMIT and not outcome.told


def mark(outcome: Outcome) -> str:
    """An outcome in a table: its error, with a star where the head warned and "!" where it did not."""
    if outcome.error is None:
        return "refused"
    return f"{'!' if is_silent(outcome) else ''}{outcome.error:.0e}{'*' if outcome.told else ''}"


def summary(cells: dict[str, dict[str, dict[str, Any]]]) -> dict[str, float]:
    """Of one route: the largest error of heads that said nothing, how many said something, and how many should have."""
    outcomes = [Outcome(**outcome) for row in cells.values() for outcome in row.values()]
    quiet = [outcome.error for outcome in outcomes if not outcome.told and outcome.error is not None]
    told = sum(bool(outcome.told) for outcome in outcomes)
    return {
        "worst": max(quiet, default=0.0),
        "told": told,
        "silent": sum(map(is_silent, outcomes)),
        "of": len(outcomes),
    }


def row_of(route: str, table: str, rows: int) -> dict[str, dict[str, Any]]:
    """The outcomes of a route and a table by the size of batches."""
    torch.set_num_threads(1)
    ways, tables = {way.name: way for way in routes()}, {one.name: one for one in scalings(rows)}
    return {str(batch): run(ways[route], tables[table], batch)._asdict() for batch in BATCHES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--only", nargs="*", default=[], help="names of routes; all of them without")
    parser.add_argument("--jobs", type=int, default=1, help="processes; without effect on what is written")
    out = Path(__file__).with_name("exactness-gpu.json" if DEVICE == "cuda" else "exactness.json")
    parser.add_argument("--out", type=Path, default=out, help="a JSON, of which other routes stay")
    arguments = parser.parse_args()
    before = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {}
    names, tables = [route.name for route in routes()], [table.name for table in scalings(arguments.rows)]
    wanted = [name for name in names if not arguments.only or name in arguments.only]
    found: dict[tuple[str, str], Any] = {}
    with ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("spawn")) as pool:
        pairs = itertools.product(wanted, tables)
        waiting = {pool.submit(row_of, *pair, arguments.rows): pair for pair in pairs}
        for future in as_completed(waiting):
            (name, table), row = waiting[future], future.result()
            found[name, table] = row
            marks = [f"{mark(Outcome(**outcome)):>9}" for outcome in row.values()]
            print(f"{name:32} {table:34}", *marks, flush=True)
    known: dict[str, Any] = before["routes"] if before.get("rows") == arguments.rows else {}
    result = {
        name: {table: found[name, table] for table in tables} if name in wanted else known[name]
        for name in names
        if name in wanted or name in known
    }
    routes_of = {name: summary(cells) for name, cells in result.items()}
    silent = int(sum(one["silent"] for one in routes_of.values()))
    for name, one in routes_of.items():
        print(f"{name:32} worst {one['worst']:.1e}, told {one['told']} of {one['of']}, silent {one['silent']}")
    document = {"machine": machine(), "rows": arguments.rows, "silent": silent, "summary": routes_of, "routes": result}
    arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.exit(silent > 0)


if __name__ == "__main__":
    main()
