"""The hooks on a model and its head, which pass features and outputs to an `Observer`.

In a compiled model the hook on the head is an operator, so that the model is one graph: `torch.compile` records a call
of `sepsa::learn_head`, which finds the observation in progress when it runs. Its schema declares that it changes the
head's weights in place.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sepsa.states.tree import tensors_of

# Activations that may follow a head, and the solver that learns logits instead.
ACTIVATIONS = {"sigmoid": "logistic", "softmax": "cross-entropy", "log_softmax": "cross-entropy"}
# The function by which torch.compile sees the calls of this thread, if any; older torch: always asked to leave them.
_compiler_of_frames = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: False)
# By their numbers, with which the operators find them while they are alive.
_observers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def _learn_head(features: Tensor, weight: Tensor, bias: Tensor | None, number: int) -> None:
    """Let the observer `number` update its head from features (..., in_features), and `weight` and `bias` with it."""
    observer = _observers.get(number)
    if observer is not None:
        observer.learn_compiled(features, weight, bias)


_library = torch.library.Library("sepsa", "DEF")  # type: ignore[no-untyped-call]
_library.define("learn_head(Tensor features, Tensor(a!) weight, Tensor(b!)? bias, int number) -> ()")  # type: ignore[no-untyped-call]
for _device in ("CPU", "CUDA"):
    _library.impl("learn_head", _learn_head, _device)  # type: ignore[no-untyped-call]
_library.impl("learn_head", lambda features, weight, bias, number: None, "Meta")  # type: ignore[no-untyped-call]


def _scripted(self, input: tuple[Tensor]) -> None:  # type: ignore[no-untyped-def]
    """The hook of a head that torch.jit.script compiled: there a head does not learn."""
    return


class HeadHook:
    """The forward pre-hook on the head; in a compiled model, an operator of its graph.

    It refers to its `Observer`, whose file imports this one, weakly, and is copied and pickled without it: a copied
    model has a hook that does nothing.
    """

    def __init__(self, observer: Any = None) -> None:
        self.observer = (lambda: None) if observer is None else weakref.ref(observer)
        self.number = 0 if observer is None else next(_numbers)
        if observer is not None:
            _observers[self.number] = observer
        self.observed = False  # in a forward pass for which the head is frozen

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

    # Registered as a method: torch.jit.script asks a hook for its name, and compiles the source of `_scripted`.
    learn_first.__wrapped__ = _scripted  # type: ignore[attr-defined]

    def in_eager(self, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Let the head learn where a compiled model breaks its graph."""
        return self.learn_now(args)

    def learn_now(self, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Let the head learn, if it is observed. Returns what it is called with where that changes."""
        observer = self.observer()
        if observer is None or (observation := observer.observing()) is None:
            return None
        if not args:
            raise TypeError(f"the head {observer.name!r} must get its features by position: call head(features)")
        features = observer.learn(observation, args[0])
        return None if features is args[0] else (features, *args[1:])

    def __reduce__(self) -> tuple[type[HeadHook], tuple[()]]:
        return type(self), ()


class OutputHook(HeadHook):
    """The forward hook on head and model in the first observation, for an `OutputProbe`."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        observer = self.observer()
        if observer is None or (probe := observer.probe) is None or observer.observing() is None:
            return
        if module is observer.head:
            probe.head = output
        if module is observer.model:
            probe.model = [value for value in tensors_of(output) if isinstance(value, Tensor)]


class OutputProbe:
    """Compares the outputs of head and model in the first observation."""

    def __init__(self) -> None:
        self.head: Tensor | None = None
        self.model: list[Tensor] = []

    def judge(self, name: str, observed: Tensor | None) -> None:
        """Warn if the model's output differs from that of its head, of which the rows `observed` have a target."""
        head = self.head
        if head is None or not self.model:
            return
        given = [head.reshape(-1)]
        if observed is not None:  # a model may return the observed rows alone
            given.append(head.reshape(len(observed), -1)[observed].reshape(-1))
        if any(
            output.numel() == rows.numel() and torch.equal(output.reshape(-1), rows.to(output))
            for output in self.model
            for rows in given
        ):
            return
        for follows, solver in ACTIVATIONS.items():
            values = getattr(head.detach(), follows)(*() if follows == "sigmoid" else (-1,)).reshape(-1)
            if any(y.numel() == len(values) and torch.allclose(y.reshape(-1), values.to(y)) for y in self.model):
                warnings.warn(
                    f"the model returns the {follows} of its head {name!r}, but the head learns to output "
                    f"the targets itself: remove the {follows} from the model and use "
                    f"solver={solver!r}, whose loss takes logits",
                    stacklevel=5,
                )
                return
        shapes = ", ".join(str(tuple(output.shape)) for output in self.model)
        warnings.warn(
            f"the model's output {shapes} differs from the output of its head {name!r}, "
            f"{tuple(head.shape)}: a layer follows the head (a sigmoid, a scaling, pooling), or this is not the "
            "head. The head learns to output the targets itself: pass targets for its own output, or choose "
            "another nn.Linear by SepSA(model, base, head=...)",
            stacklevel=5,
        )

    def __reduce__(self) -> tuple[type[OutputProbe], tuple[()]]:
        return OutputProbe, ()


def hook_of(registered: Any) -> HeadHook | None:
    """The hook that was registered as itself or as its bound method; None: a hook of somebody else."""
    hook = getattr(registered, "__self__", registered)
    return hook if isinstance(hook, HeadHook) else None


def hooks_of(module: nn.Module, observer: Any) -> list[HeadHook]:
    """The forward pre-hooks of an observer on `module`."""
    hooks = map(hook_of, module._forward_pre_hooks.values())
    return [hook for hook in hooks if hook is not None and hook.observer() is observer]


def observers_of(model: nn.Module) -> Iterator[Any]:
    """Yield the observers of the heads in `model`."""
    for module in model.modules():
        for registered in module._forward_pre_hooks.values():
            hook = hook_of(registered)
            if type(hook) is HeadHook and (observer := hook.observer()) is not None:
                yield observer


class HeadNotReached(RuntimeError):
    """The forward inside `observe` did not reach the head."""


def not_reached(observer: Any) -> HeadNotReached:
    """The error of a forward pass inside `observe` that did not reach the observer's head."""
    if not hooks_of(observer.head, observer):
        return HeadNotReached(
            f"this SepSA no longer trains the head {observer.name!r}: a later SepSA took it over, or detach() was "
            "called; observe with the later one, or make another"
        )
    if all(module is not observer.head for module in observer.model.modules()):
        return HeadNotReached(
            f"the model no longer has the head {observer.name!r} of this SepSA, which was replaced: nothing was "
            "learned; make a new SepSA after changing the model"
        )
    return HeadNotReached(
        f"the forward inside observe never reached the head {observer.name!r}: nothing was learned; run the model "
        "of this SepSA (optimizer.model, not a later one or a copy) inside the context and in its thread, or name "
        "the right head in SepSA(model, base, head=...)"
    )


def remove_hooks(module: nn.Module, observer: Any, kind: type[HeadHook] = HeadHook) -> None:
    """Remove an observer's hooks of a kind from `module`; with None those whose observer is gone, or of copies."""
    for hooks, others in (
        (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
        (module._forward_hooks, (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)),
    ):
        for key, registered in list(hooks.items()):
            hook = hook_of(registered)
            if isinstance(hook, kind) and hook.observer() is observer:
                del hooks[key]
                for other in others:
                    other.pop(key, None)
