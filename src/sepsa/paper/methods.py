"""The paper's methods behind one verb: `learn(inputs, targets)` does one iteration on one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from sepsa.heads import RLS
from sepsa.optimizer import SepSA

Loss = Callable[[Tensor, Tensor], Tensor]
WEIGHT_DECAY = 1e-5

# The paper's first-order methods: the optimizer and its options beside lr and weight decay.
FIRST_ORDER: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9}),
    "NAG": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "SGD": (torch.optim.SGD, {}),
}


class Method(Protocol):
    """Anything that trains its model batch by batch."""

    def learn(self, inputs: Tensor, targets: Tensor) -> Tensor: ...


class FirstOrder:
    """An optimizer of torch on the whole model."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Loss = mse_loss) -> None:
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn

    def learn(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = self.loss_fn(self.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def build(name: str, model: nn.Module, lr: float, body: str = "Adam") -> Method:
    """The method `name` on `model` with the paper's options; `body` is the optimizer of SepSA's body."""
    if name == "SepSA":
        base, options = FIRST_ORDER[body]
        return SepSA(model, base, solver=RLS(), lr=lr, weight_decay=WEIGHT_DECAY, **options)
    if name not in FIRST_ORDER:
        raise ValueError(f"method must be one of {['SepSA', *FIRST_ORDER]}, got {name!r}")
    base, options = FIRST_ORDER[name]
    return FirstOrder(model, base(model.parameters(), lr=lr, weight_decay=WEIGHT_DECAY, **options))
