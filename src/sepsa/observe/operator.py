"""The head's update as an operator of torch, so that a compiled model is one graph with the update in it.

`torch.compile` records a call of `sepsa::learn_head` where the hook on the head is called, and the call finds the
observation in progress when it runs. Its schema declares that it changes the head's weights in place.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sepsa.observe.observer import Observer

_observers: weakref.WeakValueDictionary[int, Observer] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def register(observer: Observer) -> int:
    """Return a number by which the operators find the observer while it is alive."""
    number = next(_numbers)
    _observers[number] = observer
    return number


def _learn_head(features: Tensor, weight: Tensor, bias: Tensor | None, number: int) -> None:
    """Let the observer `number` update its head from features (..., in_features), and `weight` and `bias` with it."""
    observer = _observers.get(number)
    if observer is not None:
        observer.learn_compiled(features, weight, bias)


def _learn_head_with_mask(features: Tensor, weight: Tensor, bias: Tensor | None, number: int) -> Tensor:
    """Update the head like `_learn_head`. Returns a mask (..., 1) of the rows from which the body must not learn."""
    observer, shape = _observers.get(number), (*features.shape[:-1], 1)
    excluded = None if observer is None else observer.learn_compiled(features, weight, bias)
    if excluded is None:
        return features.new_zeros(shape, dtype=torch.bool)
    return excluded.reshape(shape).clone()  # a graph may overwrite what an operator returned


_library = torch.library.Library("sepsa", "DEF")  # type: ignore[no-untyped-call]
_library.define("learn_head(Tensor features, Tensor(a!) weight, Tensor(b!)? bias, int number) -> ()")  # type: ignore[no-untyped-call]
_library.define("learn_head_with_mask(Tensor features, Tensor(a!) weight, Tensor(b!)? bias, int number) -> Tensor")  # type: ignore[no-untyped-call]
for _device in ("CPU", "CUDA"):
    _library.impl("learn_head", _learn_head, _device)  # type: ignore[no-untyped-call]
    _library.impl("learn_head_with_mask", _learn_head_with_mask, _device)  # type: ignore[no-untyped-call]
_library.impl("learn_head", lambda features, weight, bias, number: None, "Meta")  # type: ignore[no-untyped-call]
_library.impl(  # type: ignore[no-untyped-call]
    "learn_head_with_mask", lambda x, weight, bias, number: x.new_empty((*x.shape[:-1], 1), dtype=torch.bool), "Meta"
)
