"""The choice of the backend that computes an update, from one table; no other file decides.

A head solver asks `choose` with what it knows of the update, an `UpdateSize`, and takes the first row of its table in
which the backend is able to compute the case and is faster than those below; docs/how-it-works/performance.md.

To force a choice, for a test, a bug report or a comparison: `with force("torch"): ...`, or the environment variable
`SEPSA_BACKEND=torch` for a whole process. A forced backend computes every case that it is able to, whatever the speed;
the table decides for the others.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sepsa.compiled import code
from sepsa.heads.least_squares.math import LeastSquaresState, is_block


class UpdateSize(NamedTuple):
    """What the choice of a backend depends on: the kind and the size of an update."""

    device: str
    dtype: torch.dtype  # of the solver's arithmetic
    width: int  # p, the features and the bias
    outputs: int
    rows: int
    restored: int  # coordinates that get their ridge back
    head_dtype: torch.dtype
    contiguous: bool  # the head's weight

    @classmethod
    def of(cls, linear: nn.Linear, W: Tensor, rows: int, restored: int = 0) -> UpdateSize:
        """That of an update of a head whose solver has W (m, p)."""
        (m, p), weight = W.shape, linear.weight
        return cls(weight.device.type, W.dtype, p, m, rows, restored, weight.dtype, weight.is_contiguous())


class BackendRow(NamedTuple):
    """A row of the table: a backend, where it lies, what it is able to compute, and where it is the fastest."""

    backend: str
    place: str  # module:name in `sepsa.heads`; empty: the solver's own code in torch
    able: Callable[[UpdateSize], bool] = lambda case: True
    faster: Callable[[UpdateSize], bool] = lambda case: True

    def load(self) -> Any:
        """The class or module that computes."""
        module, _, name = self.place.partition(":")
        loaded: Any = importlib.import_module(f"sepsa.heads.{module}")
        return getattr(loaded, name) if name else loaded


def _compiles(case: UpdateSize) -> bool:
    fits = case.device == "cpu" and case.dtype == torch.float64 and case.contiguous
    return fits and case.head_dtype in (torch.float32, torch.float64) and code.available()


def _on_cuda(case: UpdateSize) -> bool:
    return case.device == "cuda"


def _has_kernels(case: UpdateSize) -> bool:
    here = case.device == "cuda" and case.contiguous and _installed("triton")
    columns, rows = case.width + case.outputs, case.rows + case.restored
    one = case.rows == 1 and (case.restored <= 1 or case.restored * columns <= 8192)
    return here and columns <= 1024 and (one or (case.rows <= 64 and rows <= 128 and case.outputs <= 64))


TABLE: dict[str, tuple[BackendRow, ...]] = {
    # Up to 256 columns one compiled call costs less than torch's calls for the same arithmetic. Of a wider head than
    # 96, torch's products are faster for 16 rows or more, but for p/4 to p rows of one up to 160.
    "least squares": (
        BackendRow("graph", "least_squares.recorded:GraphBackend", _on_cuda),
        BackendRow(
            "compiled",
            "least_squares.compiled:CompiledBackend",
            _compiles,
            lambda c: (
                c.width <= 256
                and (c.width <= 96 or c.rows < 16 or (c.width <= 160 and c.width / 4 <= c.rows <= c.width))
            ),
        ),
        BackendRow("torch", "least_squares.eager:TorchBackend"),
    ),
    # A graph is for large blocks of samples; the others are torch's, whose backend it extends. Compiled loops take a
    # tenth of the time of torch's calls for a sample, and as much for 64 rows of 200 columns.
    "cross-entropy": (
        BackendRow("graph", "cross_entropy.recorded:GraphBackend", _on_cuda),
        BackendRow(
            "compiled",
            "cross_entropy.compiled:CompiledBackend",
            _compiles,
            lambda c: c.width <= 256 and c.width * c.rows <= 12_000,
        ),
        BackendRow("torch", "cross_entropy.eager:TorchBackend"),
    ),
    # Captured steps: one program holds all rows of a few columns of Z in registers, up to 1,024 of them, and those of
    # the coordinates that get their ridge back; a block of 64 samples is solved in two halves of 32.
    "captured least squares": (
        BackendRow("triton", "least_squares.triton", _has_kernels),
        BackendRow("torch", ""),
    ),
    # From p rows on, the system of the rows is singular but for its identity, and torch solves that of the columns.
    # One row is a block too.
    "captured cross-entropy": (
        BackendRow(
            "triton",
            "cross_entropy.triton",
            lambda c: _has_kernels(c) and c.rows + c.restored < c.width and c.outputs <= 64,
        ),
        BackendRow("torch", ""),
    ),
}
NAMES = ("torch", "compiled", "graph", "triton")
# Up to this width a recorded update may hold a few (p, p) matrices beside the state; above, it changes T in place.
RECORDED_COPIES = 2048


def records(state: LeastSquaresState, rows: int, forgetting: float) -> bool:
    """Whether an update of `rows` rows on a GPU is recorded as a CUDA graph: its extra matrices are small or none."""
    return forced.get() in (None, "graph") and (len(state.T) <= RECORDED_COPIES or is_block(state, rows, forgetting))


def choose(solver: str, case: UpdateSize) -> BackendRow:
    """The row of the table for `solver`, such as "least squares", that computes this case."""
    return _chosen(solver, case, forced.get())


@functools.lru_cache(256)
def _chosen(solver: str, case: UpdateSize, asked: str | None) -> BackendRow:
    able = [row for row in TABLE[solver] if row.able(case)]
    return next((row for row in able if row.backend == asked), None) or next(row for row in able if row.faster(case))


@contextlib.contextmanager
def force(backend: str | None) -> Iterator[None]:
    """In this thread, compute by this backend, one of `NAMES`, wherever it is able to; None: by the table."""
    before = forced.set(_checked(backend))
    try:
        yield
    finally:
        forced.reset(before)


def _checked(backend: str | None) -> str | None:
    if backend is not None and backend not in NAMES:
        raise ValueError(f"backend (or SEPSA_BACKEND) must be one of {', '.join(NAMES)}, got {backend!r}")
    return backend


@functools.cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


_everywhere = _checked(os.environ.get("SEPSA_BACKEND") or None)
forced: ContextVar[str | None] = ContextVar("forced", default=_everywhere)  # what `force` asks for
