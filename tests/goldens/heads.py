"""Head solvers on fixed data: their answers after a few updates, and their states after many, for each backend.

`answers` are compared with the record (tests/test_goldens.py), `states` between two trees on one machine (compare.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from reproduction.slimtik import SlimTik
from sepsa import RLS, LogisticNewton, OnlineLBFGS, PerOutput, SoftmaxNewton
from sepsa.heads.run.choose import force

FEW, MANY = 16, 500  # updates before the answers, and before the states
PROBES = 5  # rows whose predictions are recorded
INPUTS, OUTPUTS = 11, 3  # p = 12 with the bias
# Rows of an update: one row, a block, and enough of both for the routes that gather updates and absorb them.
SIZES = (1, 1, 1, 2, 3, 7, 40, 1)


def batches(kind: str, device: str, inputs: int = INPUTS, updates: int = MANY) -> Iterator[tuple[Tensor, Tensor]]:
    """Features in float32 that drift slowly, and targets of this kind."""
    rng = np.random.default_rng(7)
    truth = rng.normal(size=(inputs, OUTPUTS))
    for step in range(updates):
        n = SIZES[step % len(SIZES)]
        features = np.tanh(rng.normal(size=(n, inputs)) + 0.001 * step)
        outputs = features @ truth + 0.3 * rng.normal(size=(n, OUTPUTS))
        if kind == "labels":
            targets: Any = torch.from_numpy(outputs.argmax(1))
        elif kind == "yes or no":
            targets = torch.from_numpy((outputs > 0).astype(np.float32))
        else:
            targets = torch.from_numpy(outputs.astype(np.float32))
        yield torch.from_numpy(features.astype(np.float32)).to(device), targets.to(device)


def head(device: str, bias: bool = True, inputs: int = INPUTS) -> nn.Linear:
    rng = np.random.default_rng(3)
    linear = nn.Linear(inputs, OUTPUTS, bias=bias)
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(0.3 * rng.normal(size=(OUTPUTS, inputs))))
        if bias:
            linear.bias.fill_(0.01)
    return linear.to(device)


def tensors(solver: Any) -> dict[str, Tensor]:
    """The head's weights and every number of the solver's state, as flat float64 tensors on the CPU."""
    parts = {"weight": solver.linear.weight, "state": _numbers(solver.state_dict())}
    if solver.linear.bias is not None:
        parts["bias"] = solver.linear.bias
    return {name: part.detach().double().cpu().reshape(-1) for name, part in parts.items()}


def _numbers(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().double().cpu().reshape(-1)
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value, key=str)]
    if isinstance(value, (list, tuple)):
        return torch.cat([torch.zeros(0, dtype=torch.float64), *map(_numbers, value)])
    return torch.tensor([] if value is None or isinstance(value, str) else [float(value)], dtype=torch.float64)


def _eager(solver: Any, kind: str, device: str, *, bias: bool = True, weighted: bool = False) -> dict[str, Tensor]:
    solver.bind(head(device, bias))
    for features, targets in batches(kind, device):
        weight = 0.5 + features[:, 0].abs() if weighted else None
        solver.update(features, targets, weight)
    return tensors(solver)


def _wide(solver: Any, device: str) -> dict[str, Tensor]:
    """A head for which the backend changes with the number of rows: its weights alone."""
    solver.bind(head(device, inputs=119))
    for features, targets in batches("numbers", device, 119, 80):
        solver.update(features, targets)
    return {name: part for name, part in tensors(solver).items() if name != "state"}


def _captured(solver: Any, kind: str, device: str) -> dict[str, Tensor]:
    solver.bind(head(device))
    for features, targets in batches(kind, device):
        solver.prepare_capture()
        assert bool(solver.update_captured(features, targets))
        solver.finish_captured()
    return tensors(solver)


SOLVERS: dict[str, tuple[Callable[[], Any], str]] = {
    "RLS": (lambda: RLS(), "numbers"),
    "RLS, forgetting": (lambda: RLS(ridge=0.5, forgetting=0.98), "numbers"),
    "RLS, float32": (lambda: RLS(dtype=torch.float32, forgetting=0.99), "numbers"),
    "SoftmaxNewton": (lambda: SoftmaxNewton(), "labels"),
    "SoftmaxNewton, forgetting": (lambda: SoftmaxNewton(forgetting=0.98, label_smoothing=0.1), "labels"),
}
OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "LogisticNewton": (lambda: LogisticNewton(forgetting=0.99), "yes or no"),
    "OnlineLBFGS": (lambda: OnlineLBFGS(memory=5), "numbers"),
    "OnlineLBFGS, cross-entropy": (lambda: OnlineLBFGS(loss="cross-entropy", forgetting=0.99), "labels"),
    "PerOutput": (lambda: PerOutput(RLS(forgetting=0.99)), "numbers"),
    "SlimTik": (lambda: SlimTik(memory=3), "numbers"),
}


def states(device: str = "cpu") -> dict[str, Tensor]:
    """Weights and states of every case by name: the solver, the backend, and what is particular."""
    result: dict[str, dict[str, Tensor]] = {}
    for backend in (None, "torch"):
        with contextlib.nullcontext() if backend is None else force(backend):
            for name, (make, kind) in (SOLVERS | OTHERS).items():
                result[f"{name}; {backend or 'chosen'}"] = _eager(make(), kind, device)
            result[f"RLS, no bias; {backend or 'chosen'}"] = _eager(RLS(forgetting=0.99), "numbers", device, bias=False)
            result[f"RLS, wide; {backend or 'chosen'}"] = _wide(RLS(forgetting=0.99), device)
            result[f"RLS, weights; {backend or 'chosen'}"] = _eager(RLS(), "numbers", device, weighted=True)
    for name, (make, kind) in SOLVERS.items():
        result[f"{name}; captured"] = _captured(make(), kind, device)
    return {f"{name}; {part}": value for name, parts in result.items() for part, value in parts.items()}


RECORDED = SOLVERS | OTHERS


def answers(name: str, backend: str, device: str = "cpu") -> dict[str, list[float]]:
    """The loss of each of a few batches before it is learned, and predictions after them: all backends have one."""
    make, kind = RECORDED[name]
    solver = make().bind(head(device))
    losses = []
    with force(backend) if backend == "torch" else contextlib.nullcontext(), torch.no_grad():
        for features, targets in batches(kind, device, updates=FEW):
            losses.append(float(solver.loss(solver.linear(features), targets)))
            if backend == "captured":
                solver.prepare_capture()
                assert bool(solver.update_captured(features, targets))
                solver.finish_captured()
            else:
                solver.update(features, targets)
        probes = torch.cat([features for features, _ in batches(kind, device, updates=FEW + 8)])[-PROBES:]
        return {"losses": losses, "predictions": solver.linear(probes).reshape(-1).tolist()}
