"""The captured update of `SoftmaxNewton` as a few Triton kernels; symbols and equations as in `cross_entropy.math`.

A block is that of `run.triton.block`, whose rows get ω and ρ of (1) and (2) in a kernel before.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from sepsa.heads.cross_entropy.math import FADE, TOLERANCE
from sepsa.heads.least_squares.math import PRODUCT_LIMIT
from sepsa.heads.run.triton.block import judge, multiply, project, step, write_rows
from sepsa.heads.run.triton.finish import finish
from sepsa.heads.run.triton.tiles import coordinate, load, load_transposed, load_vector, readable


@triton.jit
def _class_curvature(
    logits, y, i, c, counters, old_shares, weights, settings, n, p, K, C, LABELS: constexpr, ONE: constexpr,
    FADE: constexpr = FADE, TOLERANCE: constexpr = TOLERANCE,
):  # fmt: skip
    """(1) of the rows i and the classes c, whose logits are given: all that depends on what the head says.

    Returns whether the targets are probabilities, R/s (n, classes), ω (n,), the old and the new
    shares (classes,), λ, ρ and Σ m.
    """
    dtype: constexpr = logits.dtype
    row, known = i < n, (c >= 0) & (c < C)
    inside = row[:, None] & known[None, :]
    out = inside & (c >= C - K)[None, :]  # one output stands for class 1 of two
    if LABELS:
        label = tl.load(y + i, mask=row, other=0)
        t = tl.where(label[:, None] == c[None, :], 1.0, 0.0).to(dtype)
    elif ONE:
        value = load_vector(y, i, row).to(dtype)
        t = tl.where((c == 1)[None, :], value[:, None], 1.0 - value[:, None])
    else:
        t = load(y, C, i, c, row, known).to(dtype)
    t = tl.where(inside, t, 0.0)
    off = tl.abs(tl.sum(t, axis=1) - 1.0)
    good = tl.where(row, (off <= TOLERANCE).to(tl.int32), 1)  # not for NaN either
    valid = (tl.min(good, axis=0) > 0) & (tl.sum(tl.where(t < 0.0, 1.0, 0.0)) == 0.0)
    smoothing = tl.load(settings + 1).to(dtype)
    t = ((1.0 - smoothing) * t + smoothing / C) * load_vector(weights, c, known)[None, :]
    t = tl.where(inside, t, 0.0)

    m = tl.sum(t, axis=1)[:, None]
    logits = tl.where(row[:, None], logits, 0.0)
    logits = tl.where(known[None, :], logits, -float("inf"))
    power = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    P = power / tl.sum(power, axis=1)[:, None]
    R = tl.where(out, m * P - t, 0.0)
    U = tl.where(out, (m * P * (1.0 - P) + R * R / tl.where(m > 0.0, m, 1.0)) * 0.5, 0.0)
    omega, sums, mass = tl.sum(U, axis=1), tl.sum(U, axis=0), tl.sum(tl.where(row[:, None], m, 0.0))
    total = tl.load(counters + 1) + (FADE + 1) * p
    lam = tl.minimum(total / (total + FADE * mass), tl.load(settings).to(dtype))
    mine = known & (c >= C - K)
    old = load_vector(old_shares, c - (C - K), mine)
    shares = tl.where(mine, lam * old + (1.0 - lam) + sums, 0.0)
    classes = 1.0 if ONE else 2.0
    s = tl.where(mine, classes * shares / tl.sum(shares), 1.0)
    whole = tl.sum(omega)
    rho = tl.max(tl.where(mine, sums / s, 0.0), axis=0) * classes / tl.where(whole > 0.0, whole, 1.0)
    rho = tl.where(rho > 1.0, rho, 1.0)
    return valid, R / s[None, :], omega, old, shares, lam, rho, mass


@triton.jit
def _look(
    projected, Z, M, U, sizes, y, shares, counters, weights, settings, prior, left, ridge, too_large, scale, weight, E,
    numbers, flag, n, r, p, K, C, parts, LABELS: constexpr, ONE: constexpr, BLOCK_N: constexpr, BLOCK_G: constexpr,
    BLOCK_M: constexpr, BLOCK_P: constexpr, BLOCK_S: constexpr, LIMIT: constexpr = PRODUCT_LIMIT,
):  # fmt: skip
    """The products; beside them the scales √ω of the rows, √ρ, -D⁻¹ times the residuals, and all but T and W."""
    if tl.program_id(1) < tl.num_programs(1) - 1:
        multiply(projected, Z, M, U, r, p)
    elif tl.program_id(0) == 0:
        i, c = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
        shift: constexpr = 1 if ONE else 0  # one output stands for class 1 of two
        mine = (c >= shift) & (c < C)
        logits = load_transposed(projected, r, i, p + c - shift, i < n, mine)
        valid, residuals, omega, old, new_shares, lam, rho, mass = _class_curvature(
            logits, y, i, c, counters, shares, weights, settings, n, p, K, C, LABELS, ONE
        )
        finite, refused = judge(sizes, parts, 0.0, 1.0, LIMIT, BLOCK_S)  # ω is at most about 1
        finite, refused = valid & finite, valid & refused
        updates, seen = tl.load(counters), tl.load(counters + 1)
        cursor = tl.load(counters + 2).to(tl.int64)
        tl.debug_barrier()  # shares and counters have been read
        tl.store(shares + c - shift, tl.where(finite, new_shares, old), mask=mine)
        tl.store(counters, updates + finite.to(updates.dtype))
        tl.store(counters + 1, seen + tl.where(finite, mass, 0.0))
        tl.store(counters + 2, tl.where(finite, coordinate(cursor, r - n, p), cursor).to(updates.dtype))
        by, inflation = tl.sqrt(omega), tl.sqrt(rho)
        e = -residuals / (tl.where(by > 0.0, by, 1.0) * inflation)[:, None]
        if ONE:
            e = tl.where((c == 0)[None, :], tl.sum(e, axis=1)[:, None], 0.0)
        write_rows(
            projected, prior, left, ridge, cursor, scale, weight, E, numbers, flag, too_large,
            e, by, inflation, lam, finite, refused, n, r, p, K, BLOCK_N, BLOCK_G, BLOCK_M, BLOCK_P,
        )  # fmt: skip


def learn(memory: Any, features: Tensor, targets: Tensor, settings: Tensor, c: int) -> tuple[Tensor, Any]:
    """Learn rows in a `CapturedSoftmax` and restore the ridge of c coordinates; `settings` are λ and the smoothing.

    Returns a flag (0-d), whether all values were valid, and what is left to `finish`.
    """
    now = memory.now
    (K, p), C = now.W.shape, len(now.weights)
    labels = not targets.is_floating_point()
    y = targets.long().contiguous() if labels else readable(targets)
    work = project(memory, features, c, now.counters[2])
    _look[work.programs](
        *(*work.rows, work.sizes, y, now.shares, now.counters, now.weights, settings, now.prior, now.ridge_left),
        *(now.ridge, memory.too_large, *work.made, work.n, work.r, p, K, C, work.parts, labels, C != K, *work.blocks),
    )
    step(memory, work)
    return work.flag, partial(finish, now.T, work)
