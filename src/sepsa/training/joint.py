"""Several optimizers of one body, each for its own parameters, as one `torch.optim.Optimizer`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sepsa.torch_internals import global_step_hooks, profiler_enabled, step_hooks, unwrapped

# Class and options of an optimizer, and which parameters are its: a function of name and parameter; None: the rest.
Part: TypeAlias = tuple[type[Optimizer], dict[str, Any], Callable[[str, nn.Parameter], bool] | None]
# What SepSA takes as `base`: a class, an instance, several classes, or a function of the body's named parameters.
Base: TypeAlias = type[Optimizer] | Optimizer | Sequence[Part] | Callable[[list[tuple[str, nn.Parameter]]], Optimizer]


class JointOptimizer(Optimizer):
    """Several optimizers as one: their groups in one list, their states in one dict, and a step of each in a step.

    `SepSA(model, base=[...])` makes it. To schedulers, gradient scalers and saved states it is one optimizer; a group
    that is added goes to the last of them.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        shared = set.intersection(*(set(optimizer.defaults) for optimizer in optimizers))
        defaults = {name: value for name, value in optimizers[-1].defaults.items() if name in shared}
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], defaults)
        self.optimizers = list(optimizers)
        self._join()

    def _join(self) -> None:
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        self.state = defaultdict(dict)
        for optimizer in self.optimizers:
            self.state.update(optimizer.state)
            optimizer.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let each optimizer move its parameters, after one call of `closure`, if given. Returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            take_step(optimizer)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Hand more parameters to the last optimizer."""
        super().add_param_group(param_group)  # which refuses those that an optimizer has
        if hasattr(self, "optimizers"):
            try:
                self.optimizers[-1].add_param_group(param_group)
            except BaseException:
                self.param_groups.pop()
                raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let each optimizer load its groups and the state of their parameters."""
        groups = iter(state_dict["param_groups"])
        for optimizer in self.optimizers:
            own = [next(groups) for _ in optimizer.param_groups]
            keys = {key for group in own for key in group["params"]}
            state = {key: entry for key, entry in state_dict["state"].items() if key in keys}
            optimizer.load_state_dict({"state": state, "param_groups": own})
        self._join()

    def __reduce__(self) -> Any:
        return JointOptimizer, (self.optimizers,)


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that this one joins, or itself."""
    return optimizer.optimizers if isinstance(optimizer, JointOptimizer) else [optimizer]


def muon(
    model: nn.Module, lr: float = 1e-3, *, weight_decay: float = 0.1, rest: dict[str, Any] | None = None, **options: Any
) -> list[Part]:
    """Return a `base` that trains a body's matrices by Muon, and its embeddings, biases, norms and filters by AdamW.

    Choose it for transformers and other bodies whose parameters are mostly matrices. Muon's updates are scaled to the
    size of AdamW's, so that one learning rate serves both.

    Args:
        model: The model, to recognize its embeddings.
        lr: Learning rate of both.
        weight_decay: Weight decay of both.
        rest: Further arguments of `torch.optim.AdamW`.
        **options: Further arguments of `torch.optim.Muon`.

    Returns:
        A list of (class, options, which parameters) for `SepSA(model, base=sepsa.muon(model, lr=1e-3))`.
    """
    if not hasattr(torch.optim, "Muon"):
        raise RuntimeError(f"sepsa.muon needs torch.optim.Muon, of torch 2.9 or later, got torch {torch.__version__}")
    tables = [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    embeddings = {id(parameter) for table in tables for parameter in table.parameters()}

    def is_matrix(name: str, parameter: Tensor) -> bool:
        return parameter.ndim == 2 and id(parameter) not in embeddings

    both = {"lr": lr, "weight_decay": weight_decay}
    return [
        (torch.optim.Muon, both | {"adjust_lr_fn": "match_rms_adamw"} | options, is_matrix),
        (torch.optim.AdamW, both | (rest or {}), None),
    ]


# ---------------------------------------------------------------------- steps

KNOWN = ("torch.optim.", "sepsa.training.")  # the modules whose optimizers need no wrapper of torch


def needs_wrapper(optimizer: Optimizer) -> bool:
    """Whether the wrapper of this optimizer's step runs hooks, or is not known."""
    return any(step_hooks(optimizer)) or not type(optimizer).__module__.startswith(KNOWN)


def take_step(optimizer: Optimizer) -> Any:
    """Let the optimizer step, by its own `step` where somebody watches it: hooks, a profiler, a patched method.

    Else without torch's wrappers, which cost as much as the step of a small body.
    """
    if (
        needs_wrapper(optimizer)
        or "step" in vars(optimizer)
        or any(global_step_hooks)
        or profiler_enabled()
        or optimizer.defaults.get("differentiable")
    ):
        return optimizer.step()
    with torch.no_grad():
        return unwrapped(type(optimizer).step)(optimizer)
