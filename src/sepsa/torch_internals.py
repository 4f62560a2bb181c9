"""What is read of torch's private attributes, all of it here: each with the reason why nothing public serves.

A getter that is an `attrgetter` costs no call of Python, and most of these are read in every step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as torchs

# ---------------------------------------------------------------------- modules

# `module.weight` takes five times as long, and also finds a weight that is computed from others.
parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
# `module.buffers()` takes those of all modules below, too.
buffers_of: Callable[[nn.Module], dict[str, torch.Tensor | None]] = attrgetter("_buffers")
# The hook on a head must be the last, and one whose SepSA is gone must go: torch offers no list of hooks.
pre_hooks_of: Callable[[nn.Module], dict[int, Callable[..., Any]]] = attrgetter("_forward_pre_hooks")

# ---------------------------------------------------------------------- optimizers

# An optimizer around another one runs its own hooks itself, before and after.
step_hooks: Callable[[Any], tuple[dict[int, Any], dict[int, Any]]] = attrgetter(
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
)
save_hooks: Callable[[Any], tuple[dict[int, Any], dict[int, Any]]] = attrgetter(
    "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"
)
load_hooks: Callable[[Any], tuple[dict[int, Any], dict[int, Any]]] = attrgetter(
    "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"
)
global_step_hooks = torchs._global_optimizer_pre_hooks, torchs._global_optimizer_post_hooks
profiler_enabled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


@cache
def unwrapped(step: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside torch's own wrappers of an optimizer's step, which no attribute names; others may wrap it."""
    return inspect.unwrap(step, stop=lambda f: f.__code__.co_filename != torchs.__file__)


# Many small tensors are copied by one call; the optimizers of torch use both.
foreach_copy: Callable[..., None] = torch._foreach_copy_

# ---------------------------------------------------------------------- autograd and the compiler

# The hooks on tensors that autograd saves, by which torch.utils.checkpoint computes a head again, or None.
saved_tensors_hooks: Callable[[bool], Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda tracing: None
)
# By which torch.compile sees the calls of this thread, if it does; older torch: as if it always did.
compiler_of_frames: Callable[[], Any] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: False)


def is_compile_error(error: BaseException) -> bool:
    """Whether torch.compile has raised this: the class has no public name, and its module takes a second to import."""
    return isinstance(error, torch._dynamo.exc.TorchDynamoException)


# ---------------------------------------------------------------------- DistributedDataParallel


def active_ddp() -> DistributedDataParallel | None:
    """The one whose forward pass this is, if any: a head does not see what has called it."""
    return DistributedDataParallel._active_ddp_module


is_joined: Callable[[DistributedDataParallel], bool] = attrgetter("_join_config.enable")  # whether inside ddp.join()
