"""A head's weight and bias as one matrix W (m, p), where p counts the bias as a last feature that is always 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Posterior(NamedTuple):
    """A prediction and its standard deviation, both (..., out_features)."""

    mean: Tensor
    std: Tensor


def width(linear: nn.Linear) -> int:
    """p, the columns of W."""
    return linear.in_features + (linear.bias is not None)


def join(linear: nn.Linear) -> Tensor:
    """The head's weight, with its bias as a last column if it has one: (m, p), a copy in its dtype."""
    weight = linear.weight.detach()
    return weight.clone() if linear.bias is None else torch.cat([weight, linear.bias.detach()[:, None]], 1)


def follow(linear: nn.Linear, W: Tensor) -> Tensor:
    """W as the head has it now. Where the head holds W rounded to its own dtype, W keeps what the rounding lost."""
    held = join(linear)
    return W + (held.to(W.dtype) - W.to(held.dtype).to(W.dtype))


def rows(linear: nn.Linear, features: Tensor, dtype: torch.dtype) -> Tensor:
    """Φ (n, p) of features (..., in_features)."""
    x = features.detach().reshape(-1, linear.in_features).to(dtype)
    return x if linear.bias is None else torch.cat([x, x.new_ones(len(x), 1)], 1)


def store(linear: nn.Linear, head: Tensor) -> None:
    """The head takes W (m, p), which has its dtype already: nothing is allocated, so nothing can fail."""
    linear.weight.detach().copy_(head[:, : linear.in_features])
    if linear.bias is not None:
        linear.bias.detach().copy_(head[:, -1])


def commit(write: Callable[[], object]) -> None:
    """Run `write`, which stores what was computed before and may run twice; an interrupt in it is raised after it."""
    try:
        write()
    except BaseException:
        write()
        raise
