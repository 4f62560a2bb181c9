"""The table of bodies: which engine serves an estimator's `module`. A new body is a file and a row here."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

from sepsa.stream.engine.protocol import StreamEngine

BODIES: dict[str | None, str] = {
    None: "sepsa.stream.engine.compiled:Engine",
}
TORCH = "sepsa.stream.engine.torch_body:TorchEngine"  # for an nn.Module


def engine_type(module: Any) -> type[StreamEngine]:
    """The engine for an estimator's `module`: a key of `BODIES`, or else an `nn.Module`."""
    named = module is None or isinstance(module, str)
    engine: type[StreamEngine] = resolve_name(BODIES.get(module, TORCH) if named else TORCH)
    return engine
