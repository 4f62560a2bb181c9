"""Which engine serves an estimator's `body` or `module`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from sepsa.stream.engine.options import body_of as body_of

if TYPE_CHECKING:
    from sepsa.stream.engine.compiled import Engine
    from sepsa.stream.engine.torch_body import TorchEngine

AnyEngine: TypeAlias = "Engine | TorchEngine"
NAMED = ("auto", "fourier", "experts")  # what an estimator's `body` may be


def engine_type(module: Any) -> type[Engine] | type[TorchEngine]:
    """The engine for an estimator's `body`, or for its `module`, an `nn.Module`; it is imported when it is needed."""
    if module is None or module in NAMED:
        from sepsa.stream.engine.compiled import Engine

        return Engine
    from sepsa.stream.engine.torch_body import TorchEngine

    return TorchEngine
