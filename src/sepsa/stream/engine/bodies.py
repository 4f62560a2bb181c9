"""The table of bodies: which engine serves an estimator's `body` or `module`. A new body is a file and a row here."""

from __future__ import annotations

from collections.abc import Sized
from pkgutil import resolve_name
from typing import Any

from sepsa.stream.engine.protocol import StreamEngine

BODIES: dict[str | None, str] = {
    None: "sepsa.stream.engine.compiled:Engine",
    "fourier": "sepsa.stream.engine.compiled:Engine",
    "experts": "sepsa.stream.engine.compiled:Engine",
}
NAMED = ("auto", "fourier", "experts")  # what an estimator's `body` may be
TORCH = "sepsa.stream.engine.torch_body:TorchEngine"  # for an nn.Module


def engine_type(module: Any) -> type[StreamEngine]:
    """The engine for an estimator's `body`, a key of `BODIES`, or for its `module`, an `nn.Module`."""
    named = module is None or isinstance(module, str)
    engine: type[StreamEngine] = resolve_name(BODIES.get(module, TORCH) if named else TORCH)
    return engine


def body_of(body: str | None, hidden: Any, experts: Sized = ()) -> str | None:
    """The body that the parameter `body` means; "auto" has experts, except for a linear model, which stays exact."""
    if len(experts):
        return "experts"
    linear = isinstance(hidden, Sized) and not isinstance(hidden, str) and not len(hidden)
    return body if body != "auto" else "fourier" if linear else "experts"
