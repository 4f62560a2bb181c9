"""Equations 17 and 18 for one sample as two Triton kernels, where each further launch would cost as much as the update.

Triton comes with torch's CUDA builds; this module is imported only when a head on a GPU learns inside a graph.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

# One program holds all rows of a few columns of Z; beyond this many rows they no longer fit its registers.
MAX_ROWS = 1024
_COLUMNS = 8
_ROWS = 16


@triton.jit
def _project(Z, x, z, rows, p, k, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """z = Zh with h = [x, 1]: f = Th, then the predictions Wh."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.arange(0, BLOCK_C)
    inside = (r < rows)[:, None] & (c < p)[None, :]
    tile = tl.load(Z + r[:, None] * p + c[None, :], mask=inside, other=0.0)
    h = tl.load(x + c, mask=c < k, other=0.0).to(tile.dtype)
    h = tl.where((c >= k) & (c < p), 1.0, h)
    tl.store(z + r, tl.sum(tile * h[None, :], axis=1), mask=r < rows)


@triton.jit
def _learn(
    Z, z, y, weight, bias, energy, tally, fine_out, p, m, k,
    HAS_BIAS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """u = fᵀT, then T -= f uᵀ/(g + √g) and W += e uᵀ/g in these columns, and the head takes W."""
    r = tl.arange(0, BLOCK_R)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_f, is_e = r < p, (r >= p) & (r < p + m)
    value = tl.load(z + r, mask=r < p + m, other=0.0)
    target = tl.load(y + r - p, mask=is_e, other=0.0).to(value.dtype)
    value = tl.where(is_e, target - value, value)  # [f; e]
    size = tl.sum(tl.where(is_f, value * value, 0.0))
    total = size + tl.sum(tl.where(is_e, value * value, 0.0))
    fine = (total - total) == 0.0  # neither NaN nor Inf
    value = tl.where(fine, value, 0.0)  # zeros teach nothing
    g = tl.where(fine, 1.0 + size, 1.0)

    inside = (r < p + m)[:, None] & (c < p)[None, :]
    place = Z + r[:, None] * p + c[None, :]
    tile = tl.load(place, mask=inside, other=0.0)
    u = tl.sum(tl.where(is_f[:, None], tile * value[:, None], 0.0), axis=0)
    coefficient = tl.where(is_f, -value / (g + tl.sqrt(g)), value / g)
    tile += coefficient[:, None] * u[None, :]
    tl.store(place, tile, mask=inside)

    out = is_e[:, None] & (c < k)[None, :]
    tl.store(weight + (r - p)[:, None] * k + c[None, :], tile, mask=out)
    if HAS_BIAS:
        last = is_e[:, None] & (c == k)[None, :]
        tl.store(bias + (r - p)[:, None] + 0 * c[None, :], tile, mask=last)
    if tl.program_id(0) == 0:
        before = tl.load(energy + r - p, mask=is_e, other=0.0)
        tl.store(energy + r - p, before + value * value / g, mask=is_e)
        good = fine.to(tl.float64)
        tl.store(tally, tl.load(tally) + good)
        tl.store(tally + 1, tl.load(tally + 1) + good)
        tl.store(fine_out, fine)


def rank_one(desk: Any, features: Tensor, targets: Tensor) -> Tensor:
    """Learn one sample at forgetting 1. Returns the flag (0-d) that says whether it was finite."""
    Z, p = desk.Z, desk.Z.shape[1]
    rows, m = Z.shape[0], desk.W.shape[0]
    z = Z.new_empty(rows)
    fine: Tensor = Z.new_empty((), dtype=bool)
    block_r, block_c = triton.next_power_of_2(rows), triton.next_power_of_2(p)
    _project[(triton.cdiv(rows, _ROWS),)](Z, features, z, rows, p, desk.k, BLOCK_R=_ROWS, BLOCK_C=block_c)
    bias = desk.weight if desk.bias is None else desk.bias  # a pointer must be given, used or not
    _learn[(triton.cdiv(p, _COLUMNS),)](
        Z, z, targets, desk.weight, bias, desk.energy, desk.tally, fine, p, m, desk.k,
        HAS_BIAS=desk.bias is not None, BLOCK_R=block_r, BLOCK_C=_COLUMNS,
    )  # fmt: skip
    return fine
