"""Whether samples come again, for a warning, looked for where that is nearly free. Nothing else follows from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

WATCHED = 16  # of the first samples
FOUND = 4  # of them have come again
EVERY = 8  # calls, of which one is compared
MOST = 64  # samples of a batch that are compared


class Repeats:
    """Remembers the first samples on a CPU and compares one call in eight with them."""

    def __init__(self) -> None:
        self.calls, self.first, self.again = -1, set[int](), set[int]()
        self.found = False  # whether enough of the first samples have come again
        self.targets: Any = None  # of the forward pass to come
        self.hook: RemovableHandle | None = None
        self.unseen = 0  # passes in a row that did not call the hook

    def compares_next(self) -> bool:
        """Whether this call is compared; counts the call."""
        self.calls += 1
        return not self.calls % EVERY or len(self.first) < WATCHED

    def watch(self, model: nn.Module, targets: Any) -> None:
        """Compare the first argument of the model's next forward pass, where that is due, by a hook for this pass."""
        if not self.compares_next():
            return
        if self.hook is not None:  # a compiled model, or a pass through a part of it
            self.hook.remove()
            self.hook, self.unseen = None, self.unseen + 1
        if isinstance(targets, Tensor) and targets.is_cpu and self.unseen < FOUND:
            self.targets, self.hook = targets, model.register_forward_pre_hook(self.see)

    def see(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """The hook: compare the samples of a forward pass."""
        if torch.compiler.is_compiling() or self.hook is None:
            return
        self.hook.remove()
        self.hook, self.unseen = None, 0
        self.compare(args[0] if args else None, self.targets)
        self.targets = None

    def compare(self, inputs: Any, targets: Any) -> None:
        """Note which of these samples have come before."""
        if not (isinstance(inputs, Tensor) and isinstance(targets, Tensor)):
            return
        try:
            x, y = inputs.detach().numpy()[:MOST], targets.detach().numpy()[:MOST]
        except (TypeError, RuntimeError, IndexError):  # on a GPU, sparse, bfloat16, a scalar
            return
        rows = [hash((a.tobytes(), b.tobytes())) for a, b in zip(x, y, strict=False)]
        self.again |= self.first.intersection(rows)
        self.first.update(rows[: WATCHED - len(self.first)])
        self.found = len(self.again) >= FOUND

    def __reduce__(self) -> tuple[type[Repeats], tuple[()]]:
        return type(self), ()
