"""`SoftmaxNewton` by torch's operators: a backend for every head, and the base class of that with CUDA graphs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sepsa.heads.backends import many_classes
from sepsa.heads.base import parameters
from sepsa.heads.math.cross_entropy import (
    CrossEntropyState,
    UpdateSettings,
    finish_large,
    is_large,
    learned,
    look_large,
    with_curvature,
    with_root,
)

# A state with T, because a block would have lost digits or something has read T, gets A at one update in so many.
TRY_AGAIN = 8


class Samples(NamedTuple):
    """Samples of which shapes, dtypes and devices are checked, and what an update of them depends on."""

    features: Tensor  # (..., in_features)
    targets: Tensor  # labels (...) or probabilities (..., classes)
    sample_weight: Tensor | None
    settings: UpdateSettings
    updates: int  # before this one

    @property
    def rows(self) -> int:
        """Their number."""
        return self.features.shape[:-1].numel()


class Learned(NamedTuple):
    """What an update has computed. Where it is not finite, nothing may be kept."""

    state: CrossEntropyState
    before: Tensor  # W (K, p) before the update
    head: Tensor | None = None  # the weights that the head gets; None: it has them already
    finite: bool = True


class TorchBackend:
    """Updates as pure functions of the state, which the solver holds."""

    name = "torch"

    def __init__(self, linear: nn.Linear) -> None:
        self.linear = linear
        self.bounds: many_classes.Bounds | None = None  # of the state after a block of many classes

    def owns(self, state: CrossEntropyState) -> bool:
        """Whether later updates write into the tensors of this state."""
        return False

    def learn(self, state: CrossEntropyState, samples: Samples) -> Learned:
        """The state after an update, of which nothing is stored; a backend with recordings may store it."""
        features, targets, sample_weight, settings, updates = samples
        linear = self.linear
        if many_classes.serves(linear, features, targets, settings.label_smoothing):
            in_chunks = self._learn_chunks(state, samples)
            if in_chunks is not None:
                return in_chunks
        with torch.autocast(linear.weight.device.type, enabled=False):
            before = parameters.follow(linear, state.W)
            large = is_large(before.shape[1], samples.rows)
            Phi, labels = block_rows(linear, features, before.dtype, large), targets.detach()
            if large and (state.A is not None or updates % TRY_AGAIN == 0):
                for dtype in dict.fromkeys((Phi.dtype, before.dtype)):  # with the digits of the features, then with all
                    rows, with_A = Phi.to(dtype), with_curvature(state)
                    with product_precision(rows):
                        block, *flags = look_large(with_A, before, rows, labels, sample_weight, settings)
                    finite, lost = torch.stack(flags).tolist()
                    if not lost:
                        return self._learned(finish_large(with_A, block), before, finite)
            rows, state = Phi.to(before.dtype), with_root(state)
            new, *flags = learned(state, before, rows, labels, sample_weight, settings)
            finite, too_large = torch.stack(flags).tolist()
            if too_large:
                new, *flags = learned(state, before, rows, labels, sample_weight, settings, by_qr=True)
                finite = bool(flags[0])
            return self._learned(new, before, finite)

    def _learned(self, new: CrossEntropyState, before: Tensor, finite: bool) -> Learned:
        return Learned(new, before, new.W.to(self.linear.weight.dtype), finite)

    def _learn_chunks(self, state: CrossEntropyState, samples: Samples) -> Learned | None:
        """`learn` for samples that `many_classes` serves; None where digits would be lost."""
        features, targets, sample_weight, settings, _ = samples
        linear, old = self.linear, state
        peak, size, low, high, moved = many_classes.seen(linear, state.W, features, targets)
        if not math.isfinite(peak + size) or low < 0 or high >= linear.out_features:
            return Learned(state, state.W, state.W, finite=False)
        if max(peak, size) > many_classes.MOST:
            return None
        with torch.autocast("cuda", enabled=False):
            state, labels, n = with_curvature(state), targets.detach().reshape(-1).long(), targets.numel()
            W = parameters.follow(linear, state.W) if moved else state.W
            weight = state.weights[labels] if settings.weighted else None
            if sample_weight is not None:
                each = sample_weight.detach().reshape(-1)
                weight = each if weight is None else each * weight
            known = self.bounds
            if known is None or known.state is not old:
                known = many_classes.bounds_of(state)
            bounds = many_classes.grown(known, float(n) if weight is None else float(weight.sum()), peak, len(W))
            with product_precision(W.new_empty(0, dtype=torch.float32)):
                sums = many_classes.sums_of(linear, W, features, labels, weight)
            new, lost = many_classes.learned(state, W, sums, n, settings.forgetting)
            result = self._learned(new, W, finite=True)
            sure = many_classes.certain(bounds, peak, size, W.shape[1]) and linear.weight.dtype != torch.float16
            if not sure:
                if bool(lost):
                    return None
                assert result.head is not None
                result = result._replace(finite=bool(result.head.isfinite().all()))
        self.bounds = bounds._replace(state=new)
        return result


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
