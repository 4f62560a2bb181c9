"""The table of bodies: which engine serves an estimator's `body` or `module`. A new body is a file and a row here."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

from sepsa.stream.engine.protocol import StreamEngine

BODIES: dict[str | None, str] = {
    None: "sepsa.stream.engine.compiled:Engine",
    "fourier": "sepsa.stream.engine.compiled:Engine",
    "experts": "sepsa.stream.experts.engine:ExpertEngine",
}
NAMED = ("fourier", "experts")  # those that an estimator's `body` may name
TORCH = "sepsa.stream.engine.torch_body:TorchEngine"  # for an nn.Module


def engine_type(module: Any) -> type[StreamEngine]:
    """The engine for an estimator's `body`, a key of `BODIES`, or for its `module`, an `nn.Module`."""
    named = module is None or isinstance(module, str)
    engine: type[StreamEngine] = resolve_name(BODIES.get(module, TORCH) if named else TORCH)
    return engine
