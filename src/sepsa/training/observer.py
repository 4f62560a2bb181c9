"""One head with its solver and its hook, and what both have done since the body's last step."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from sepsa.heads import RLS, HeadSolver, LearnsPartly, Revertible
from sepsa.heads.base.checks import own_parameters
from sepsa.heads.least_squares.math import copies
from sepsa.training.epochs import Epochs
from sepsa.training.hooks import HeadHook, hooks_of
from sepsa.training.output_check import OutputCheck
from sepsa.training.ranks import Ranks

# Attributes of an observer that a step changes.
_COUNTERS = ("body_steps", "learned", "expects_missing")
_counters_of = attrgetter(*_COUNTERS)
# By the numbers of their hooks.
_observers: weakref.WeakValueDictionary[int, Observer] = weakref.WeakValueDictionary()


class Checkpoint(NamedTuple):
    """What `Observer.rollback` restores."""

    state: Any  # the solver's checkpoint; of one that is not `Revertible`, its state and the head's parameters
    counters: tuple[Any, ...]
    epochs: tuple[Any, ...]
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
        self.ranks = Ranks(model, name, head, solver, process_group)
        self.attach()
        self.check = None if model is head else OutputCheck(self.hook)

    # ------------------------------------------------------------------ the model

    def attach(self) -> None:
        """Put a hook on the head, in place of that of an earlier observer; look up what solver and model have."""
        self.refuses_missing = type(self.solver) is RLS
        self.revertible = isinstance(self.solver, Revertible)
        self.partial_targets = isinstance(self.solver, LearnsPartly) and self.solver.learns_partly
        self.normalizations = [module for module in self.model.modules() if hasattr(module, "track_running_stats")]
        head = {id(parameter) for parameter in self.head.parameters()}
        self.body = [parameter for parameter in self.model.parameters() if id(parameter) not in head]
        for module in self.model.modules():
            for key, hook in hooks_of(module):
                if hook.number not in _observers:  # that are gone, or copied with the model
                    del module._forward_pre_hooks[key]
        self.hook = HeadHook(self.name)
        _observers[self.hook.number] = self
        self.hook_key = self.hook.register(self.head)

    def detach(self) -> None:
        """Remove the hook."""
        self.head._forward_pre_hooks.pop(self.hook_key, None)

    def is_frozen(self) -> bool:
        """Whether the user froze the head, which then does not learn; an error for a head that was changed."""
        weight, bias = own_parameters(self.head)
        shapes = [weight.shape, None if bias is None else bias.shape]
        if shapes != self.shapes:
            k = int(shapes[0] == self.shapes[0])
            has, had = (shape and tuple(shape) for shape in (shapes[k], self.shapes[k]))
            raise ValueError(
                f"head {self.name!r} has a {('weight', 'bias')[k]} of shape {has} and had {had} when this SepSA was "
                "made: make a new SepSA, with a new solver, after changing a head"
            )
        if bias is not None and bias.requires_grad is not weight.requires_grad:
            raise ValueError(
                f"head {self.name!r} has a frozen {'bias' if weight.requires_grad else 'weight'} alone, and its solver "
                "trains weight and bias together: call requires_grad_(False) on the whole head, or requires_grad_(True)"
            )
        return not weight.requires_grad

    def not_reached(self) -> HeadNotReached:
        """The error of a forward pass inside `observe` that did not reach the head."""
        if self.hook_key not in self.head._forward_pre_hooks:
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
            weight = self.head._parameters.get("weight")
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
        if self.revertible:
            state = cast(Revertible, self.solver).checkpoint()
        else:
            state = self.solver.state_dict(), [parameter.detach().clone() for parameter in self.head.parameters()]
        return Checkpoint(
            state,
            _counters_of(self),
            () if self.epochs is None else self.epochs.checkpoint(),
            None if self.head_fraction == 1.0 else self.generator.get_state(),
            self._statistics() if statistics and self.normalizations else [],
        )

    def _statistics(self) -> list[tuple[Tensor, Tensor]]:
        training = [module for module in self.normalizations if module.training]
        buffers = [buffer for module in training for buffer in module._buffers.values() if buffer is not None]
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
        for name, value in zip(_COUNTERS, checkpoint.counters, strict=True):
            setattr(self, name, value)
        if self.epochs is not None:
            self.epochs.rollback(checkpoint.epochs)
        if checkpoint.generator is not None:
            self.generator.set_state(checkpoint.generator)
        for buffer, before in checkpoint.statistics:
            buffer.copy_(before)

    # ------------------------------------------------------------------ copies

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"generator": self.generator.get_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.generator = torch.Generator()
        self.generator.set_state(state["generator"])
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
