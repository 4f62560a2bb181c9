"""One head with its solver, what both have done since the body's last step, and the hook by which the head learns.

The hook lets the head learn in the forward pass before it computes its output. In a compiled model it is an operator,
so that the model is one graph: `torch.compile` records a call of `sepsa::learn_head`, which finds the observer when it
runs. Its schema declares that it changes the head's weights in place.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Iterator
from threading import get_ident
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from sepsa.heads import RLS, HeadSolver, Revertible, Settles
from sepsa.heads.base.checks import own_parameters
from sepsa.heads.least_squares.math import copies
from sepsa.ranks.exchange import sharded_group
from sepsa.torch_internals import buffers_of, compiler_of_frames, parameters_of, pre_hooks_of
from sepsa.training.epochs import Epochs
from sepsa.training.output_check import OutputCheck
from sepsa.training.ranks import Ranks

# By the numbers of their hooks.
_observers: weakref.WeakValueDictionary[int, Observer] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


class Checkpoint(NamedTuple):
    """What `Observer.rollback` restores."""

    state: Any  # the solver's checkpoint; of one that is not `Revertible`, its state and the head's parameters
    counters: tuple[int, bool, bool]
    epochs: Any  # that of `Epochs`, if there are any
    generator: Tensor | None  # where rows are drawn
    statistics: list[tuple[Tensor, Tensor]]  # buffers of normalization layers, and copies of them


class Observer:
    """One head of a model, its solver and its hook, and how both are used."""

    body_steps = 0
    learned = False  # since the body's last step
    expects_missing = False  # whether the last batch had samples without a target
    rows_per_sample = 1  # of the last captured step
    warned = False
    head_fraction = 1.0
    waiting: Any = None  # the `Observation` whose update has left its result on the GPU

    def __init__(
        self,
        model: nn.Module,
        name: str,
        solver: HeadSolver,
        head: nn.Linear,
        epochs: Epochs | None,
        process_group: Any,
        by_default: bool,
    ) -> None:
        self.model, self.name, self.head, self.solver, self.epochs = model, name, head, solver, epochs
        self.by_default = by_default  # whether the user named no solver, and no targets have come yet
        self.shapes = [None if p is None else p.shape for p in own_parameters(head)]
        self.generator = torch.Generator().manual_seed(torch.initial_seed())
        self.ranks = Ranks(name, head, solver, process_group)
        self.attach()
        self.check = None if model is head else OutputCheck()

    # ------------------------------------------------------------------ the model

    def attach(self) -> None:
        """Put a hook on the head, in place of that of an earlier observer; look up what solver and model have."""
        self.refuses_missing = type(self.solver) is RLS
        self.revertible, self.settles = isinstance(self.solver, Revertible), isinstance(self.solver, Settles)
        self.partial_targets = getattr(self.solver, "learns_partly", False)
        self.normalizations = [module for module in self.model.modules() if hasattr(module, "track_running_stats")]
        self.ranks.sharded = sharded_group(self.model)
        head = {id(parameter) for parameter in self.head.parameters()}
        self.body = [parameter for parameter in self.model.parameters() if id(parameter) not in head]
        for module in (self.head, *self.model.modules()):
            for key, hook in hooks_of(module):
                if module is self.head or hook.number not in _observers:  # that are gone, or copied with the model
                    del pre_hooks_of(module)[key]
        if HeadHook.in_eager is HeadHook.learn_now:  # here because it takes a second, which import would pay
            HeadHook.in_eager = torch.compiler.disable(HeadHook.learn_now)  # type: ignore[no-untyped-call]
        self.hook = HeadHook(self.name, next(_numbers))
        _observers[self.hook.number] = self
        self.hook_key = self.head.register_forward_pre_hook(self.hook.learn_first).id

    def detach(self) -> None:
        """Remove the hook."""
        pre_hooks_of(self.head).pop(self.hook_key, None)

    def is_frozen(self) -> bool:
        """Whether the user froze the head, which then does not learn; an error for a head that was changed."""
        weight, bias = own_parameters(self.head)
        shapes = [weight.shape, None if bias is None else bias.shape]
        if shapes != self.shapes:
            raise ValueError(
                f"head {self.name!r} has a weight and a bias of shapes {shapes} and had {self.shapes} when this SepSA "
                "was made: make a new SepSA, with a new solver, after changing a head"
            )
        if bias is not None and bias.requires_grad is not weight.requires_grad:
            raise ValueError(
                f"head {self.name!r} has a frozen {'bias' if weight.requires_grad else 'weight'} alone, and its solver "
                "trains weight and bias together: call requires_grad_(False) on the whole head, or requires_grad_(True)"
            )
        return not weight.requires_grad

    def not_reached(self) -> HeadNotReached:
        """The error of a forward pass inside `observe` that did not reach the head."""
        if self.hook_key not in pre_hooks_of(self.head):
            return HeadNotReached(
                f"this SepSA no longer trains the head {self.name!r}: a later SepSA took it over, or detach() was "
                "called; observe with the later one, or make another"
            )
        if all(module is not self.head for module in self.model.modules()):
            return HeadNotReached(
                f"the model no longer has the head {self.name!r} of this SepSA, which was replaced: nothing was "
                "learned; make a new SepSA after changing the model"
            )
        return HeadNotReached(
            f"the forward inside observe never reached the head {self.name!r}: nothing was learned; run the model "
            "of this SepSA (optimizer.model, not a later one or a copy) inside the context and in its thread, or name "
            "the right head in SepSA(model, base, head=...)"
        )

    # ------------------------------------------------------------------ steps

    def body_moved(self) -> None:
        """Count a step of the body; warn once if the head has a gradient but has not learned since the last step."""
        self.body_steps += 1
        if not self.learned and not self.warned:
            weight = parameters_of(self.head).get("weight")
            if weight is not None and weight.grad is not None:
                self.warned = True
                warnings.warn(
                    f"the head {self.name!r} has learned nothing since the last step, so it did not change: run the "
                    "model inside `with optimizer.observe(targets):`, or inside `with sepsa.observe(model, targets):` "
                    "where the optimizer is wrapped",
                    stacklevel=3,
                )
        self.learned = False
        if self.epochs is not None:
            self.epochs.forgot = False

    def checkpoint(self, statistics: bool = True) -> Checkpoint:
        """What a step may change before the body moves, for `rollback`; `statistics`: with those of normalizations."""
        if self.waiting is not None:  # a step that was left out, as a gradient scaler does
            self.waiting.settle()
        if self.revertible:
            state = cast(Revertible, self.solver).checkpoint()
        else:
            state = self.solver.state_dict(), [parameter.detach().clone() for parameter in self.head.parameters()]
        return Checkpoint(
            state,
            (self.body_steps, self.learned, self.expects_missing),
            self.epochs and self.epochs.checkpoint(),
            None if self.head_fraction == 1.0 else self.generator.get_state(),
            self._statistics() if statistics and self.normalizations else [],
        )

    def _statistics(self) -> list[tuple[Tensor, Tensor]]:
        training = [module for module in self.normalizations if module.training]
        buffers = [buffer for module in training for buffer in buffers_of(module).values() if buffer is not None]
        return list(zip(buffers, copies(buffers), strict=True))

    def rollback(self, checkpoint: Checkpoint, reached: bool) -> None:
        """Restore `checkpoint` after a step that failed, unless the body has moved; `reached`: with solver and head."""
        if self.body_steps != checkpoint.counters[0]:
            return
        if reached and self.revertible:
            cast(Revertible, self.solver).rollback(checkpoint.state)
        elif reached:
            state, parameters = checkpoint.state
            self.solver.load_state_dict(state)
            for parameter, before in zip(self.head.parameters(), parameters, strict=True):
                parameter.detach().copy_(before)
        self.body_steps, self.learned, self.expects_missing = checkpoint.counters
        if self.epochs is not None:
            self.epochs.rollback(checkpoint.epochs)
        if checkpoint.generator is not None:
            self.generator.set_state(checkpoint.generator)
        for buffer, before in checkpoint.statistics:
            buffer.copy_(before)

    # ------------------------------------------------------------------ copies

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.attach()


class HeadNotReached(RuntimeError):
    """The forward inside `observe` did not reach the head."""


def observers_of(model: nn.Module) -> Iterator[Observer]:
    """Yield the observers of the heads in `model`."""
    for module in model.modules():
        for _, hook in hooks_of(module):
            observer = _observers.get(hook.number)
            if observer is not None:
                yield observer


# ---------------------------------------------------------------------- the hook on a head


class HeadHook:
    """The forward pre-hook on a head, with the pass in progress; in a compiled model, an operator of its graph.

    The pass is kept here and not on the optimizer: wrappers copy an optimizer (Lightning) or hide it (accelerate), and
    the head must learn there too. A copied or pickled hook has no number and does nothing.
    """

    current: Any = None  # an `Observation`
    observed = False  # in a forward pass for which the head is frozen

    def __init__(self, name: str = "", number: int = 0) -> None:
        self.name, self.number = name, number  # of the head, and by which a compiled model finds its observer

    def learn_first(self, module: nn.Linear, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Let the head learn before it computes its output, if it is observed."""
        if torch.compiler.is_compiling():
            # A graph depends on this attribute. From Python 3.12 on it does not on module.weight.requires_grad: torch
            # compares no tensors of a module whose dictionaries have not changed.
            if self.number and self.observed:
                torch.ops.sepsa.learn_head(args[0], module.weight, module.bias, self.number)
            return None
        # torch.compiler.disable, for calls from a graph that breaks here, costs ten times the rest of this method.
        return self.learn_now(args) if compiler_of_frames() is None else self.in_eager(args)

    def learn_now(self, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Let the head learn, if it is observed. Returns what it is called with where that changes."""
        now = self.passing()
        if now is None:
            return None
        if not args:
            raise TypeError(f"the head {self.name!r} must get its features by position: call head(features)")
        features = now.learn(args[0])
        return None if features is args[0] else (features, *args[1:])

    in_eager = learn_now  # where a compiled model breaks its graph

    def passing(self) -> Any:
        """The pass to which a call in this thread belongs, if any."""
        now = self.current
        return None if now is None or now.learning or now.thread != get_ident() else now

    def __reduce__(self) -> tuple[type[HeadHook], tuple[()]]:
        return HeadHook, ()


def hooks_of(module: nn.Module) -> list[tuple[int, HeadHook]]:
    """The hooks of heads on a module, and their keys."""
    registered = [(key, getattr(hook, "__self__", None)) for key, hook in pre_hooks_of(module).items()]
    return [(key, hook) for key, hook in registered if isinstance(hook, HeadHook)]


def _scripted(self, input: tuple[Tensor]) -> None:  # type: ignore[no-untyped-def]
    """The hook of a head that torch.jit.script compiled: there a head does not learn."""
    return


# torch.jit.script asks a hook for its name, and compiles the source of `_scripted`.
HeadHook.learn_first.__wrapped__ = _scripted  # type: ignore[attr-defined]


def _learn_head(features: Tensor, weight: Tensor, bias: Tensor | None, number: int) -> None:
    """Let the head of this hook learn features (..., in_features), and `weight` and `bias` with it."""
    observer = _observers.get(number)
    if observer is not None and (now := observer.hook.passing()) is not None:
        now.learn_compiled(features, weight, bias)


_library = torch.library.Library("sepsa", "DEF")  # type: ignore[no-untyped-call]
_library.define("learn_head(Tensor features, Tensor(a!) weight, Tensor(b!)? bias, int number) -> ()")  # type: ignore[no-untyped-call]
for _device in ("CPU", "CUDA"):
    _library.impl("learn_head", _learn_head, _device)  # type: ignore[no-untyped-call]
_library.impl("learn_head", lambda features, weight, bias, number: None, "Meta")  # type: ignore[no-untyped-call]
