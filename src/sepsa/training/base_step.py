"""The step of the body's optimizer without torch's wrappers, which cost as much as the step of a small body."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torchs

OWN = ("torch.optim.", "sepsa.training.")  # the modules whose optimizers need none of the wrappers


@functools.cache
def unwrapped(step: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside the wrappers of torch.optim.optimizer alone: others may wrap it too."""
    return inspect.unwrap(step, stop=lambda f: f.__code__.co_filename != torchs.__file__)


def needs_wrapper(optimizer: Optimizer) -> bool:
    """Whether the wrapper of this optimizer's step runs hooks, or is not known."""
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(hooks) or not type(optimizer).__module__.startswith(OWN)


def take_step(optimizer: Optimizer) -> Any:
    """Let the optimizer step, by its own `step` where somebody watches it: hooks, a profiler, a patched method."""
    if (
        needs_wrapper(optimizer)
        or "step" in vars(optimizer)
        or torchs._global_optimizer_pre_hooks
        or torchs._global_optimizer_post_hooks
        or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        or optimizer.defaults.get("differentiable")
    ):
        return optimizer.step()
    with torch.no_grad():
        return unwrapped(type(optimizer).step)(optimizer)
