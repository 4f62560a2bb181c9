"""The step of a body inside a CUDA graph, undone after a batch that is not finite: compiled by torch, or as it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sepsa.torch_internals import unwrapped
from sepsa.training.joint import needs_wrapper, parts_of

Loss = Callable[[Tensor, Tensor], Tensor]


class BodyStep:
    """Forward and backward pass, and the body's step, as they are or compiled by torch when they are first called.

    `forward(inputs, targets)` returns the loss, whether it is finite, and copies of the buffers. After the backward
    pass `step(loss, flags, copies)`, under no_grad, records the loss and moves the body; where a flag is false, it
    restores the buffers, and the body with its optimizer's state. `scales` are the rates of the optimizer's groups by
    which the changes of their parameters are multiplied; None: by nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Loss,
        last_loss: Tensor,
        skipped: Tensor,
        scales: Sequence[Tensor | None],
        compiled: bool,
    ) -> None:
        buffers = [buffer for buffer in model.buffers() if buffer.device == last_loss.device]
        take_step = unwrapped_step(optimizer)
        # Here, because torch.compile takes a group of several optimizers for one of its first list of them.
        groups = zip(optimizer.param_groups, scales, strict=True)
        moved = [(p, rate) for group, rate in groups for p in group["params"] if p.device == last_loss.device]

        def forward(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
            before = [buffer.clone() for buffer in buffers]
            loss = loss_fn(model(inputs), targets)
            return loss, loss.detach().abs() < math.inf, before  # isfinite takes more kernels

        def fetch(inputs: Tensor, targets: Tensor, order: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
            rows = order[place][0]
            place.add_(1)
            return inputs[rows], targets[rows]

        def step(loss: Tensor, flags: list[Tensor], before: list[Tensor]) -> None:
            finite = reduce(torch.logical_and, flags)
            last_loss.copy_(loss)
            skipped.add_(~finite)
            kept = [p for p, _ in moved]
            state = [v for p in kept for v in optimizer.state.get(p, {}).values()]
            kept += [v for v in state if isinstance(v, Tensor) and v.device == loss.device]
            old = [tensor.clone() for tensor in kept]
            # The first step makes the state, which then has nothing to be undone to; it is never recorded.
            if compiled or optimizer.state or is_recorded(loss) or bool(finite):
                take_step()
            for (p, rate), value in zip(moved, old, strict=False):
                if rate is not None:
                    p.copy_(value + rate * (p - value))
            for tensor, value in zip(kept + buffers, old + before, strict=True):
                tensor.copy_(torch.where(finite, tensor, value))

        # One kernel for several tensors: a launch costs more than the work on a small one.
        one: Any = {"dynamic": False, "options": {"combo_kernels": True}}
        self.fetch: Any = fetch
        self.forward: Any = forward
        self.step: Any = step
        if compiled:
            self.fetch = torch.compile(with_own_code(fetch), **one)
            self.forward = torch.compile(with_own_code(forward), fullgraph=True, dynamic=False)
            self.step = torch.compile(with_own_code(step), **one)


def is_recorded(tensor: Tensor) -> bool:
    """Whether what is computed of this tensor now is recorded in a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def unwrapped_step(optimizer: Optimizer) -> Callable[[], object]:
    """The optimizer's step, to call under no_grad, without the wrappers, which break a compiled graph."""
    if needs_wrapper(optimizer):
        return optimizer.step
    steps = [
        part.step if needs_wrapper(part) else partial(unwrapped(type(part).step), part) for part in parts_of(optimizer)
    ]
    return lambda: [step() for step in steps]


def with_own_code(f: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of the function with its own code object, by which torch counts recompilations."""
    return FunctionType(f.__code__.replace(), f.__globals__, f.__name__, f.__defaults__, f.__closure__)
