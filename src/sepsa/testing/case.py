"""A solver to check, the failure of a check, and snapshots to compare solvers bit by bit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from sepsa.heads.protocols import HeadSolver
from sepsa.states.tree import leaves

K = 6  # in_features of the heads in the checks
COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda parts: pickle.loads(pickle.dumps(parts)),
}


@dataclass(frozen=True)
class Case:
    """A solver to check, and what its author declares about it.

    Args:
        make: A function that returns a new solver, not bound to a head.
        task: "regression"; "classification" for class probabilities; "labels" for independent targets of 0 and 1.
        recovers: Largest distance to the true weights after 300 batches of 16 samples, relative to their norm.
        block: Largest difference between an update of n samples and n updates of one; None to skip the check.
        too_large: A factor at which features cannot be squared in the solver's dtype.
        outputs: The head's out_features.
        weighted: Whether `update` takes `sample_weight`; if not, it must raise an error.
        falls_to: Fraction of the first loss that a small network must reach after 300 steps in SepSA.
    """

    make: Callable[[], Any]
    task: str = "regression"
    recovers: float = 0.01
    block: float | None = None
    too_large: float = 1e300
    outputs: int = 3
    weighted: bool = True
    falls_to: float = 0.7

    def start(
        self, bias: bool = True, dtype: torch.dtype = torch.float64, seed: int = 0, k: int = K
    ) -> tuple[Any, nn.Linear]:
        """A new solver on a new head.

        Args:
            bias: Whether the head has a bias.
            dtype: The dtype of the head.
            seed: By which the head's weights are drawn.
            k: The head's in_features.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            linear = nn.Linear(k, self.outputs, bias=bias, dtype=dtype)
        solver = self.make()
        expect(
            isinstance(solver, HeadSolver),
            "a solver has the methods bind, update, loss, state_dict and load_state_dict",
            f"{type(solver).__name__} lacks some of them",
        )
        bound = solver.bind(linear)
        expect(bound is solver, "bind(linear) returns the solver", f"it returned {bound!r}")
        return solver, linear

    def started(self, count: int = 5, n: int = 16, dtype: torch.dtype = torch.float64) -> Any:
        """A solver that has learned.

        Args:
            count: How many batches it has learned.
            n: Samples in each of them.
            dtype: The dtype of the head.
        """
        solver, _ = self.start(dtype=dtype)
        learn(solver, self.stream(count, n=n))
        return solver

    def stream(self, count: int, n: int = 16, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of samples and noisy targets; for classes, one-hot targets.

        Args:
            count: How many batches.
            n: Samples in each of them.
            seed: By which they are drawn.
        """
        generator = torch.Generator().manual_seed(seed)
        truth = torch.randn(self.outputs, K, generator=generator, dtype=torch.float64)
        for _ in range(count):
            x = torch.randn(n, K, generator=generator, dtype=torch.float64)
            outputs = x @ truth.T + 0.5
            noise = torch.randn(n, self.outputs, generator=generator, dtype=torch.float64)
            yield x, (outputs + 0.3 * noise if self.task == "regression" else self.classes(outputs, noise))

    def classes(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """One-hot targets of the class whose output, with noise, is largest; of labels, which outputs are positive.

        Args:
            outputs: The true outputs (n, outputs).
            noise: What is added to them (n, outputs).
        """
        if self.outputs == 1 or self.task == "labels":
            return (outputs + noise > 0).to(outputs.dtype)
        return one_hot((outputs + noise).argmax(-1), self.outputs).to(outputs.dtype)


def expect(condition: object, promised: str, happened: str) -> None:
    """Raise an AssertionError unless `condition` holds."""
    if not condition:
        raise AssertionError(f"promised: {promised}; but {happened}")


def expect_same(one: list[tuple[str, Any]], other: list[tuple[str, Any]], promised: str, happened: str) -> None:
    """Raise an AssertionError unless two snapshots are equal; `happened` gets the path of a difference."""
    path = difference(one, other)
    expect(not path, promised, happened.format(path))


def refused(use: Callable[[], object], kind: type[Exception] | tuple[type[Exception], ...], promised: str) -> None:
    """Raise an AssertionError unless `use()` raises an exception of this kind."""
    try:
        use()
    except kind:
        return
    except Exception as error:
        raise AssertionError(f"promised: {promised}; but it raised {type(error).__name__}: {error}") from error
    raise AssertionError(f"promised: {promised}; but nothing was raised")


def snapshot(solver: Any) -> list[tuple[str, Any]]:
    """A copy of every tensor and number of a solver and its head, with their paths."""
    found = leaves({"head": dict(solver.linear.state_dict()), "solver": solver.state_dict()})
    return [(path, leaf.detach().clone() if isinstance(leaf, Tensor) else leaf) for path, leaf in found]


def difference(one: Iterable[tuple[str, Any]], other: Iterable[tuple[str, Any]]) -> str:
    """The path of the first bitwise difference of two snapshots, where NaN equals NaN; empty: no difference."""
    mine, others = dict(one), dict(other)
    if mine.keys() != others.keys():
        return "the entries"
    for path, a in mine.items():
        b = others[path]
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            alike = a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, 0.0, 0.0, equal_nan=True)
        else:
            alike = a == b or (a != a and b != b)
        if not alike:
            return path
    return ""


def not_finite(taken: list[tuple[str, Any]]) -> str:
    """The path of the first NaN or Inf in a snapshot; empty: all is finite."""
    for path, leaf in taken:
        if isinstance(leaf, (Tensor, float)) and not bool(torch.isfinite(torch.as_tensor(leaf)).all()):
            return path
    return ""


def learn(solver: Any, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
    for x, y in batches:
        solver.update(x, y)
