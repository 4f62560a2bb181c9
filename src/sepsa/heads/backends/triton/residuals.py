"""Softmax less labels of a chunk of logits, in one reading of each row from memory and one writing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

_BLOCK, _WARPS = 4096, 16


@triton.jit
def _residuals(logits, labels, factors, R, logs, K, stride, EACH: constexpr, BLOCK: constexpr):
    """One row: log P_y, and factor (P - y) in the dtype of R, 0 in the columns from K on."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    R += row * stride
    c = tl.arange(0, BLOCK)
    peak = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, K, BLOCK):
        z = tl.load(logits + start + c, mask=start + c < K, other=-float("inf"))
        higher = tl.maximum(peak, tl.max(z, axis=0))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(z - higher), axis=0)
        peak = higher
    size = peak + tl.log(total)
    y = tl.load(labels + row)
    factor = tl.load(factors + row) if EACH else tl.load(factors)
    tl.store(logs + row, tl.load(logits + y) - size)
    for start in range(0, stride, BLOCK):
        z = tl.load(logits + start + c, mask=start + c < K, other=-float("inf"))
        r = factor * (tl.exp(z - size) - tl.where(start + c == y, 1.0, 0.0))
        tl.store(R + start + c, r.to(R.dtype.element_ty), mask=start + c < stride)


def residuals(logits: Tensor, labels: Tensor, factors: Tensor, R: Tensor, K: int) -> Tensor:
    """Store factors (P - y) of logits (n, >= K) in R of the same shape. Returns log P_y (n,).

    `factors` is a number for each row, or one for all.
    """
    logs = torch.empty(len(logits), device=logits.device)
    each, stride = factors.ndim > 0, logits.stride(0)
    _residuals[(len(logits),)](logits, labels, factors, R, logs, K, stride, each, _BLOCK, num_warps=_WARPS)
    return logs
