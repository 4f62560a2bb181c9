"""The check, in the first observation, that the model returns what its head computes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sepsa.states.tree import tensors_of


class OutputCheck:
    """Notes the outputs of head and model in one pass, and compares them. A copy notes nothing."""

    is_asked: Callable[[], object] = staticmethod(lambda: None)  # whether a pass is one to check

    def __init__(self) -> None:
        self.outputs: dict[nn.Module, list[Tensor]] = {}  # of head and model
        self.handles: list[RemovableHandle] = []

    def watch(self, model: nn.Module, head: nn.Linear, is_asked: Callable[[], object]) -> None:
        """Note what both return from now on, in passes that are asked for."""
        self.is_asked = is_asked
        self.handles = [module.register_forward_hook(self.note) for module in (head, model)]

    def note(self, module: nn.Module, args: Any, output: Any) -> None:
        """The hook on both."""
        if not torch.compiler.is_compiling() and self.is_asked():
            self.outputs[module] = [value for value in tensors_of(output) if isinstance(value, Tensor)]

    def end(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()

    def judge(self, name: str, model: nn.Module, head: nn.Linear, observed: Tensor | None) -> None:
        """Warn if the model's output differs from that of its head, of which the rows `observed` have a target."""
        outputs = self.outputs.get(model)
        if not outputs or head not in self.outputs:
            return
        (of_head,) = self.outputs[head]
        given = [of_head.reshape(-1)]
        if observed is not None:  # a model may return the observed rows alone
            given.append(of_head.reshape(len(observed), -1)[observed].reshape(-1))
        if any(
            output.numel() == rows.numel() and torch.equal(output.reshape(-1), rows.to(output))
            for output in outputs
            for rows in given
        ):
            return
        shapes = ", ".join(str(tuple(output.shape)) for output in outputs)
        warnings.warn(
            f"the model's output {shapes} differs from the output of its head {name!r}, "
            f"{tuple(of_head.shape)}: a layer follows the head (a sigmoid, a scaling, pooling), or this is not the "
            "head. The head learns to output the targets itself: remove a sigmoid or softmax and use "
            "solver='logistic' or 'cross-entropy', whose losses take logits; else pass targets for the head's own "
            "output, or choose another nn.Linear by SepSA(model, base, head=...)",
            stacklevel=5,
        )

    def __reduce__(self) -> tuple[type[OutputCheck], tuple[()]]:
        return OutputCheck, ()
