"""`SoftmaxNewton` by torch's operators: a backend for every head, and the base class of that with CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from sepsa.heads.base import parameters
from sepsa.heads.cross_entropy.math import (
    CrossEntropyState,
    UpdateSettings,
    finish_large,
    is_large,
    learned,
    learned_separately,
    look_large,
    with_curvature,
    with_root,
)

# A state with T, because a block would have lost digits or something has read T, gets A at one update in so many.
TRY_AGAIN = 8


Rows: TypeAlias = tuple[Tensor, Tensor, Tensor | None]  # features, targets and weights of samples


class Samples(NamedTuple):
    """Samples of which shapes, dtypes and devices are checked, and what an update of them depends on."""

    features: Tensor  # (..., in_features)
    targets: Tensor  # labels (...) or probabilities (..., classes)
    sample_weight: Tensor | None  # (...); of outputs that learn separately (..., classes)
    settings: UpdateSettings
    updates: int  # before this one

    @property
    def rows(self) -> int:
        """Their number."""
        return self.features.shape[:-1].numel()


class TorchBackend:
    """Updates as pure functions of the state, which the solver holds."""

    name = "torch"
    waiting: Any = None  # samples of which the host does not know yet whether they were learned

    def __init__(self, linear: nn.Linear) -> None:
        self.linear, self.dtype = linear, linear.weight.dtype

    def owns(self, state: CrossEntropyState) -> bool:
        """Whether later updates write into the tensors of this state, whose W the head has."""
        return False

    def learn(self, state: CrossEntropyState, samples: Samples) -> tuple[CrossEntropyState, bool]:
        """The state after an update, and whether it is finite. A backend with recordings may store a finite one."""
        features, targets, sample_weight, settings, updates = samples
        linear = self.linear
        with torch.autocast(linear.weight.device.type, enabled=False):
            before = parameters.follow(linear, state.W)
            separate = state.T.ndim == 3
            large = not separate and is_large(before.shape[1], samples.rows)
            Phi, labels = block_rows(linear, features, before.dtype, large), targets.detach()
            if large and (state.A is not None or updates % TRY_AGAIN == 0):
                for dtype in dict.fromkeys((Phi.dtype, before.dtype)):  # with the digits of the features, then with all
                    rows = Phi.to(dtype)
                    with product_precision(rows):
                        block, *flags = look_large(with_curvature(state), before, rows, labels, sample_weight, settings)
                    finite, lost = torch.stack(flags).tolist()
                    if not lost:
                        return finish_large(block), finite
            rows, state = Phi.to(before.dtype), with_root(state)
            learn = learned_separately if separate else learned
            new, *flags = learn(state, before, rows, labels, sample_weight, settings)
            finite, too_large = torch.stack(flags).tolist()
            if too_large:
                new, *flags = learn(state, before, rows, labels, sample_weight, settings, by_qr=True)
                finite = bool(flags[0])
            return new, finite


def block_rows(linear: nn.Linear, features: Tensor, dtype: torch.dtype, large: bool) -> Tensor:
    """Φ (n, p) for an update: a large block of features in half precision on a GPU in float32, else in `dtype`."""
    half = features.dtype in (torch.float16, torch.bfloat16) and features.is_cuda
    return parameters.rows(linear, features, torch.float32 if large and half else dtype)


@contextmanager
def product_precision(Phi: Tensor) -> Iterator[None]:
    """Let products of float32 rows, which came in half precision, run in TF32, which has more digits than they."""
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    try:
        if Phi.is_cuda and Phi.dtype == torch.float32:
            matmul.allow_tf32 = True
        yield
    finally:
        matmul.allow_tf32 = before
