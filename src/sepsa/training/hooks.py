"""The hook on a head, by which the head learns in the forward pass before it computes its output.

In a compiled model the hook is an operator, so that the model is one graph: `torch.compile` records a call of
`sepsa::learn_head`, which finds the hook when it runs. Its schema declares that it changes the head's weights in place.
"""

from __future__ import annotations

import itertools
import weakref
from threading import get_ident
from typing import Protocol

import torch
from torch import Tensor, nn

# The function by which torch.compile sees the calls of this thread, if any; older torch: always asked to leave them.
_compiler_of_frames = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: False)


class Pass(Protocol):
    """A forward pass in which a head learns."""

    thread: int  # in which the model runs
    learning: bool  # whether the solver, which may call its head, is learning now

    def learn(self, features: Tensor) -> Tensor:
        """Let the head learn. Returns the features that the head is called with."""
        ...

    def learn_compiled(self, features: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Let the head learn in a compiled graph, which may hold copies of its parameters."""
        ...


class HeadHook:
    """The forward pre-hook on a head, with the pass in progress; in a compiled model, an operator of its graph.

    The pass is kept here and not on the optimizer: wrappers copy an optimizer (Lightning) or hide it (accelerate), and
    the head must learn there too. A copied or pickled hook has no number and does nothing.
    """

    current: Pass | None = None
    observed = False  # in a forward pass for which the head is frozen

    def __init__(self, name: str | None = None) -> None:
        self.name = name  # of the head
        self.number = 0 if name is None else next(_numbers)
        _hooks[self.number] = self

    def learn_first(self, module: nn.Linear, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Let the head learn before it computes its output, if it is observed."""
        if torch.compiler.is_compiling():
            # A graph depends on this attribute. From Python 3.12 on it does not on module.weight.requires_grad: torch
            # compares no tensors of a module whose dictionaries have not changed.
            if self.number and self.observed:
                torch.ops.sepsa.learn_head(args[0], module.weight, module.bias, self.number)
            return None
        # torch.compiler.disable, for calls from a graph that breaks here, costs ten times the rest of this method.
        return self.learn_now(args) if _compiler_of_frames() is None else self.in_eager(args)

    def in_eager(self, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Let the head learn where a compiled model breaks its graph."""
        return self.learn_now(args)

    def learn_now(self, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Let the head learn, if it is observed. Returns what it is called with where that changes."""
        now = self.passing()
        if now is None:
            return None
        if not args:
            raise TypeError(f"the head {self.name!r} must get its features by position: call head(features)")
        features = now.learn(args[0])
        return None if features is args[0] else (features, *args[1:])

    def passing(self) -> Pass | None:
        """The pass to which a call in this thread belongs, if any."""
        now = self.current
        return None if now is None or now.learning or now.thread != get_ident() else now

    def register(self, head: nn.Linear) -> int:
        """Put this hook on the head, in place of all others of its kind. Returns its key among the head's hooks."""
        if not hasattr(HeadHook.in_eager, "_torchdynamo_disable"):
            # Done here because it takes a second, which import would pay.
            HeadHook.in_eager = torch.compiler.disable(HeadHook.in_eager)  # type: ignore[method-assign,no-untyped-call]
        for key, _ in hooks_of(head):
            del head._forward_pre_hooks[key]
        return head.register_forward_pre_hook(self.learn_first).id

    def __reduce__(self) -> tuple[type[HeadHook], tuple[()]]:
        return HeadHook, ()


# By their numbers, with which the operator finds them while they are alive.
_hooks: weakref.WeakValueDictionary[int, HeadHook] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def hooks_of(module: nn.Module) -> list[tuple[int, HeadHook]]:
    """The hooks of heads on a module, and their keys."""
    registered = [(key, getattr(hook, "__self__", None)) for key, hook in module._forward_pre_hooks.items()]
    return [(key, hook) for key, hook in registered if isinstance(hook, HeadHook)]


def _scripted(self, input: tuple[Tensor]) -> None:  # type: ignore[no-untyped-def]
    """The hook of a head that torch.jit.script compiled: there a head does not learn."""
    return


# torch.jit.script asks a hook for its name, and compiles the source of `_scripted`.
HeadHook.learn_first.__wrapped__ = _scripted  # type: ignore[attr-defined]


def _learn_head(features: Tensor, weight: Tensor, bias: Tensor | None, number: int) -> None:
    """Let the head of this hook learn features (..., in_features), and `weight` and `bias` with it."""
    hook = _hooks.get(number)
    if hook is not None and (now := hook.passing()) is not None:
        now.learn_compiled(features, weight, bias)


_library = torch.library.Library("sepsa", "DEF")  # type: ignore[no-untyped-call]
_library.define("learn_head(Tensor features, Tensor(a!) weight, Tensor(b!)? bias, int number) -> ()")  # type: ignore[no-untyped-call]
for _device in ("CPU", "CUDA"):
    _library.impl("learn_head", _learn_head, _device)  # type: ignore[no-untyped-call]
_library.impl("learn_head", lambda features, weight, bias, number: None, "Meta")  # type: ignore[no-untyped-call]
