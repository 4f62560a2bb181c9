"""The head's update as an operator of torch, so that a compiled model is one graph, hook and all.

`torch.compile` records a call of `sepsa::learn_head` where the hook on the head stands, and the call finds what is
being observed when it runs. It changes the head's weights in place, and says so, so the graph around it stays exact.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol

import torch
from torch import Tensor


class Learner(Protocol):
    """What `learn_head` calls: an `Observer`."""

    def learn_compiled(self, features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None: ...


_learners: weakref.WeakValueDictionary[int, Learner] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def register(learner: Learner) -> int:
    """A number by which `learn_head` finds the learner, for as long as it lives."""
    number = next(_numbers)
    _learners[number] = learner
    return number


def _learn_head(features: Tensor, weight: Tensor, bias: Tensor | None, number: int) -> None:
    learner = _learners.get(number)
    if learner is not None:
        learner.learn_compiled(features, weight, bias)


def _learn_and_hide(features: Tensor, weight: Tensor, bias: Tensor | None, number: int) -> Tensor:
    learner, shape = _learners.get(number), (*features.shape[:-1], 1)
    hidden = None if learner is None else learner.learn_compiled(features, weight, bias)
    if hidden is None:
        return features.new_zeros(shape, dtype=torch.bool)
    return hidden.reshape(shape).clone()  # a graph may write over what an operator returned


_library = torch.library.Library("sepsa", "DEF")  # type: ignore[no-untyped-call]
_library.define("learn_head(Tensor features, Tensor(a!) weight, Tensor(b!)? bias, int number) -> ()")  # type: ignore[no-untyped-call]
_library.define("learn_and_hide(Tensor features, Tensor(a!) weight, Tensor(b!)? bias, int number) -> Tensor")  # type: ignore[no-untyped-call]
for _device in ("CPU", "CUDA"):
    _library.impl("learn_head", _learn_head, _device)  # type: ignore[no-untyped-call]
    _library.impl("learn_and_hide", _learn_and_hide, _device)  # type: ignore[no-untyped-call]
_library.impl("learn_head", lambda features, weight, bias, number: None, "Meta")  # type: ignore[no-untyped-call]
_library.impl(  # type: ignore[no-untyped-call]
    "learn_and_hide", lambda x, weight, bias, number: x.new_empty((*x.shape[:-1], 1), dtype=torch.bool), "Meta"
)


def learn_head(features: Tensor, weight: Tensor, bias: Tensor | None, number: int) -> None:
    """Let the learner `number` teach its head `features` (..., in_features); `weight` and `bias` become the head's."""
    torch.ops.sepsa.learn_head(features, weight, bias, number)


def learn_and_hide(features: Tensor, weight: Tensor, bias: Tensor | None, number: int) -> Tensor:
    """The same. Returns which rows (..., 1) were held out, from which the body must not learn."""
    hidden: Tensor = torch.ops.sepsa.learn_and_hide(features, weight, bias, number)
    return hidden
