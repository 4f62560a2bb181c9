"""The captured update of `SoftmaxNewton` as a few Triton kernels; symbols and equations as in `cross_entropy`.

With n samples and c coordinates that get their ridge back, r = n + c rows join A. All of them are columns of one array
projected = Z [Φᵀ, e_at] (p + K, r), Z = [T; W]: the rows times Tᵀ, the logits, and the weights to be pulled to the
prior. What (1) and (2) make of the logits are the residuals E, the roots D of ρ, `inflations`, and a scale of each row,
with which the first p rows of `projected` are F = TΦᵀ for T/√λ. Then

    one sample, c = 1:   W and T in the columns of Z, from the 2 x 2 matrix I + DMD: three kernels in all
    a block:             M = FᵀF and Q = FᵀT/√λ, then W -= (D(I + DMD)⁻¹D⁻¹E)ᵀQ: four kernels

and T's own update by a block, T/√λ - F(C + I)⁻ᵀC⁻¹Q with CCᵀ = I + M, is left to `CapturedSoftmax.finish`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from sepsa.heads.least_squares.math import PRODUCT_LIMIT
from sepsa.heads.least_squares.triton.linalg import NEAR, distance, eliminate, iterate, readable, refine, rows_at
from sepsa.heads.least_squares.triton.ridge import coordinate, is_restored, lacking, next_cursor, restored
from sepsa.heads.least_squares.triton.tiles import (
    add_product,
    add_to_head,
    judge,
    load,
    load_transposed,
    load_vector,
    positions,
    store,
    store_head,
    times_features,
)

_SIZE = 32  # of the blocks that are eliminated
_COLUMNS = 8
_TILE = 16
_DEPTH = 32
_SNAPSHOT = 3  # numbers before the shares in a snapshot


@triton.jit
def _project(
    Z, x, projected, sizes, snapshot, shares, counters, rows, n, r, p, K, k,
    BLOCK_N: constexpr, BLOCK_G: constexpr, BLOCK_M: constexpr, BLOCK_R: constexpr = _TILE, BLOCK_K: constexpr = _DEPTH,
):  # fmt: skip
    """projected = Z [Φᵀ, e_at] in these rows, their squares, and a copy of what the next kernel reads and writes."""
    row = positions(0, BLOCK_R)
    i = tl.arange(0, BLOCK_N)
    cursor = tl.load(counters + 2).to(tl.int64)
    product = times_features(Z, x, row, i, rows, n, p, k, BLOCK_R, BLOCK_N, BLOCK_K)
    store(projected, r, row, i, product, row < rows, i < n)
    t = tl.arange(0, BLOCK_G)
    column = load(Z, p, row, coordinate(cursor, t, p), row < rows, t < r - n)
    store(projected, r, row, n + t, column, row < rows, t < r - n)
    tl.store(sizes + tl.program_id(0), tl.sum(product * product) + tl.sum(column * column))
    of_T = tl.sum(tl.where((row < p)[:, None], product * product, 0.0))
    tl.store(sizes + tl.num_programs(0) + tl.program_id(0), of_T)
    if tl.program_id(0) == 0:
        o = tl.arange(0, BLOCK_M)
        tl.store(snapshot, tl.load(counters))
        tl.store(snapshot + 1, tl.load(counters + 1))
        tl.store(snapshot + 2, tl.load(counters + 2))
        tl.store(snapshot + 3 + o, load_vector(shares, o, o < K), mask=o < K)


@triton.jit
def _class_curvature(
    logits, y, i, c, snapshot, weights, settings, n, p, K, C, LABELS: constexpr, ONE: constexpr
):  # fmt: skip
    """(1) of the rows i and the classes c, whose logits are given: all that depends on what the head says.

    Returns whether the targets are probabilities, R/s (n, classes), ω (n,), the new shares (classes,), λ, ρ and Σ m.
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
    good = tl.where(row, (off <= 1e-3).to(tl.int32), 1)  # not for NaN either
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
    total = tl.load(snapshot + 1) + 8.0 * p
    lam = tl.minimum(total / (total + 7.0 * mass), tl.load(settings).to(dtype))
    mine = known & (c >= C - K)
    shares = load_vector(snapshot + 3, c - (C - K), mine)
    shares = tl.where(mine, lam * shares + (1.0 - lam) + sums, 0.0)
    classes = 1.0 if ONE else 2.0
    s = tl.where(mine, classes * shares / tl.sum(shares), 1.0)
    whole = tl.sum(omega)
    rho = tl.max(tl.where(mine, sums / s, 0.0), axis=0) * classes / tl.where(whole > 0.0, whole, 1.0)
    rho = tl.where(rho > 1.0, rho, 1.0)
    return valid, R / s[None, :], omega, shares, lam, rho, mass


@triton.jit
def _advance(snapshot, left, ridge, counters, lam, mass, c, p, finite, BLOCK_P: constexpr):
    """Counters, and the ridge of each coordinate: all fade, then the next c get theirs back."""
    j = tl.arange(0, BLOCK_P)
    cursor = tl.load(snapshot + 2).to(tl.int64)
    old, full = load_vector(left, j, j < p), load_vector(ridge, j, j < p)
    given = restored(full, lam * old)
    new = tl.where(is_restored(j, cursor, c, p) & (given > lam * old), given, lam * old)
    tl.store(left + j, tl.where(finite, new, old), mask=j < p)
    good = finite.to(tl.float64)
    tl.store(counters, (tl.load(snapshot) + good).to(old.dtype))
    tl.store(counters + 1, (tl.load(snapshot + 1) + tl.where(finite, mass, 0.0)).to(old.dtype))
    tl.store(counters + 2, tl.where(finite, next_cursor(cursor, c, p), cursor).to(old.dtype))


@triton.jit
def _scale_rows(
    projected, sizes, y, snapshot, prior, shares, left, ridge, counters, weights, settings, row_scale, inflations, E,
    inverse_root, finite_out, too_large, n, r, p, K, C, parts, LABELS: constexpr, ONE: constexpr, BLOCK_N: constexpr,
    BLOCK_G: constexpr, BLOCK_M: constexpr, BLOCK_P: constexpr, BLOCK_S: constexpr, LIMIT: constexpr = PRODUCT_LIMIT,
):  # fmt: skip
    """Scales and inflations (r,) of the rows, E (r, K) = D⁻¹ times the residuals, and the state but for T and W.

    One program.
    """
    i, c = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    of_class = c - (C - K)
    mine = (of_class >= 0) & (c < C)
    logits = load_transposed(projected, r, i, p + of_class, i < n, mine)
    valid, residuals, omega, new_shares, lam, rho, mass = _class_curvature(
        logits, y, i, c, snapshot, weights, settings, n, p, K, C, LABELS, ONE
    )
    finite, refused = judge(sizes, parts, LIMIT, BLOCK_S)  # ω is at most about 1
    finite, refused = valid & finite, valid & refused
    root = tl.where(finite, 1.0 / tl.sqrt(lam), 1.0)
    scale = tl.sqrt(omega)
    tl.store(row_scale + i, tl.where(finite, scale * root, 0.0), mask=i < n)
    tl.store(inflations + i, tl.where(i < n, tl.where(finite, tl.sqrt(rho), 1.0), 0.0), mask=i < n)
    e = residuals / (tl.where(scale > 0.0, scale, 1.0) * tl.sqrt(rho))[:, None]
    store(E, K, i, of_class, tl.where(finite, e, 0.0), i < n, mine)

    t = tl.arange(0, BLOCK_G)
    given = t < r - n
    at = coordinate(tl.load(snapshot + 2).to(tl.int64), t, p)
    faded = lam * load_vector(left, at, given)
    back = tl.where(finite, tl.sqrt(lacking(load_vector(ridge, at, given), faded)), 0.0)
    tl.store(row_scale + n + t, back * root, mask=given)
    tl.store(inflations + n + t, tl.where(given, 1.0, 0.0).to(lam.dtype), mask=given)
    pull = load_transposed(projected, r, n + t, p + c, given, c < K) - load_transposed(prior, p, at, c, given, c < K)
    store(E, K, n + t, c, tl.where(finite, back[:, None] * pull, 0.0), given, c < K)
    tl.debug_barrier()  # the ridge that is left has been read
    old = load_vector(snapshot + 3, of_class, mine)
    tl.store(shares + of_class, tl.where(finite, new_shares, old), mask=mine)
    tl.store(inverse_root, root)
    tl.store(finite_out, finite)
    tl.store(too_large, tl.load(too_large) + refused.to(tl.int64))
    _advance(snapshot, left, ridge, counters, lam, mass, r - n, p, finite, BLOCK_P)


@triton.jit
def _learn_one(
    Z, projected, row_scale, inflations, E, inverse_root, finite_in, weight, bias, p, K, k,
    HAS_BIAS: constexpr, BLOCK_R: constexpr, BLOCK_C: constexpr = _COLUMNS,
):  # fmt: skip
    """One sample and one coordinate, f and g as T/√λ sees them: W and T in these columns, and the head takes W."""
    r = tl.arange(0, BLOCK_R)
    rows = p + K
    is_T, is_W = r < p, (r >= p) & (r < rows)
    finite, root, inflation = tl.load(finite_in), tl.load(inverse_root), tl.load(inflations)
    f = load_vector(projected, 2 * r, is_T) * tl.load(row_scale)
    g = load_vector(projected + 1, 2 * r, is_T) * tl.load(row_scale + 1)
    f, g = tl.where(finite, f, 0.0), tl.where(finite, g, 0.0)
    ff, fg, gg = tl.sum(f * f), inflation * tl.sum(f * g), tl.sum(g * g)

    # (2): X = D(I + DMD)⁻¹E, where D inflates the sample and not the coordinate
    e, pull = load_vector(E, r - p, is_W), load_vector(E + K, r - p, is_W)
    inflated = 1.0 + inflation * inflation * ff
    over = 1.0 / (inflated * (1.0 + gg) - fg * fg)
    of_f = ((1.0 + gg) * e - fg * pull) * (inflation * over)
    of_g = (inflated * pull - fg * e) * over

    # T: Potter's update twice, h what the first makes of g
    size = 1.0 + ff
    beta = 1.0 / (size + tl.sqrt(size))
    h = g - f * (fg / inflation * beta)
    size = 1.0 + tl.sum(h * h)
    gamma = 1.0 / (size + tl.sqrt(size))

    c = positions(0, BLOCK_C)
    tile = load(Z, p, r, c, r < rows, c < p)
    tile *= tl.where(is_T, root, 1.0)[:, None]
    u = tl.sum(f[:, None] * tile, axis=0)
    v = tl.sum(g[:, None] * tile, axis=0)
    w = tl.sum(h[:, None] * tile, axis=0) - tl.sum(f * h) * beta * u  # hᵀ of what the first makes of T
    tile -= (f * beta + of_f)[:, None] * u[None, :] + of_g[:, None] * v[None, :] + (h * gamma)[:, None] * w[None, :]
    store(Z, p, r, c, tile, r < rows, c < p)
    store_head(weight, bias, k, r - p, c, tile, is_W, HAS_BIAS)


@triton.jit
def _products(
    projected, Z, row_scale, inflations, inverse_root, M, inflated, Q, Ft, finite_in, r, p,
    BLOCK_R: constexpr = _SIZE, BLOCK_C: constexpr = _TILE, BLOCK_K: constexpr = _DEPTH,
):  # fmt: skip
    """M = FᵀF and DMD, or Q = FᵀT/√λ and Fᵀ, in these rows and columns; all zero where something is not finite."""
    edge = tl.cdiv(r, BLOCK_C) * BLOCK_C  # the columns of M, then those of Q
    c = positions(1, BLOCK_C)
    in_M, in_Q = c < r, (c >= edge) & (c < edge + p)
    c = tl.where(c < edge, c, c - edge)
    i = positions(0, BLOCK_R)
    finite = tl.load(finite_in)
    product = tl.zeros((BLOCK_R, BLOCK_C), dtype=Z.dtype.element_ty)
    for start in range(0, p, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        other = load(projected, r, j, c, j < p, in_M) + load(Z, p, j, c, j < p, in_Q)
        product = add_product(load_transposed(projected, r, i, j, i < r, j < p), other, product)
    scale_i, inflation_i = load_vector(row_scale, i, i < r), load_vector(inflations, i, i < r)
    scale_c, inflation_c = load_vector(row_scale, c, in_M), load_vector(inflations, c, in_M)
    root = tl.load(inverse_root)
    product = tl.where(finite, product * scale_i[:, None] * tl.where(in_Q, root, scale_c)[None, :], 0.0)
    store(M, r, i, c, product, i < r, in_M)
    store(inflated, r, i, c, product * inflation_i[:, None] * inflation_c[None, :], i < r, in_M)
    store(Q, p, i, c, product, i < r, in_Q)
    f = load_transposed(projected, r, i, c, i < r, in_Q) * scale_i[:, None]
    store(Ft, p, i, c, tl.where(finite, f, 0.0), i < r, in_Q)


@triton.jit
def _step_weights(
    inflated, inflations, E, Q, W, weight, bias, scratch, buffer, r, p, K, k,
    HAS_BIAS: constexpr, ROWS: constexpr, BLOCK_M: constexpr, SIZE: constexpr = _SIZE, BLOCK_C: constexpr = _TILE,
):  # fmt: skip
    """X = (I + DMD)⁻¹E in every program alike, then W -= (DX)ᵀQ in these columns, and the head takes W."""
    blocks = tl.cdiv(r, SIZE)
    i, o = tl.arange(0, SIZE), tl.arange(0, BLOCK_M)
    scratch += tl.program_id(0) * blocks * SIZE * (2 * blocks * SIZE + 3 * BLOCK_M)
    S, L = scratch, scratch + blocks * blocks * SIZE * SIZE
    right = L + blocks * blocks * SIZE * SIZE
    X = right + 2 * blocks * SIZE * BLOCK_M
    for b in range(blocks):
        at = b * SIZE + i
        tl.store(rows_at(right, b, SIZE, BLOCK_M), load(E, K, at, o, at < r, o < K))
    size = distance(inflated, r, r, ROWS, SIZE)
    if size < NEAR:
        iterate(inflated, r, right, r, size, ROWS, SIZE, BLOCK_M)
    else:
        eliminate(inflated, r, S, L, right, buffer + tl.program_id(0) * SIZE * SIZE, r, SIZE, BLOCK_M)
        refine(inflated, r, L, right, r, SIZE, BLOCK_M)
    c = positions(0, BLOCK_C)
    step = tl.zeros((BLOCK_M, BLOCK_C), dtype=Q.dtype.element_ty)
    for b in range(blocks):
        at = b * SIZE + i
        x = tl.load(rows_at(X, b, SIZE, BLOCK_M)) * load_vector(inflations, at, at < r)[:, None]
        step = add_product(tl.trans(x), load(Q, p, at, c, at < r, c < p), step)
    add_to_head(W, weight, bias, o, c, -step, K, p, k, HAS_BIAS)


class Buffers:
    """What the kernels write for blocks of n samples and c coordinates, kept: a graph's other streams read it later."""

    def __init__(self, Z: Tensor, K: int, r: int) -> None:
        rows, p = Z.shape
        programs, blocks = triton.cdiv(p, _TILE), triton.cdiv(r, _SIZE)
        self.width = max(_TILE, triton.next_power_of_2(max(K, 2)))
        self.parts = triton.cdiv(rows, _TILE)
        self.projected, self.sizes = Z.new_zeros(rows, r), Z.new_zeros(2 * self.parts)
        self.snapshot = Z.new_zeros(_SNAPSHOT + K)
        self.row_scale, self.inflations, self.inverse_root = Z.new_zeros(r), Z.new_zeros(r), Z.new_zeros(())
        self.E = Z.new_zeros(r, K)
        self.M, self.inflated = Z.new_zeros(r, r), Z.new_zeros(r, r)
        self.Q, self.Ft = Z.new_zeros(r, p), Z.new_zeros(r, p)
        self.finite = torch.zeros((), dtype=torch.bool, device=Z.device)
        edge = blocks * _SIZE
        self.scratch = Z.new_zeros(programs, edge * (2 * edge + 3 * self.width))
        self.buffer = Z.new_zeros(programs, _SIZE, _SIZE)


def learn(
    state: Any, features: Tensor, targets: Tensor, settings: Tensor, c: int, head: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Buffers | None]:
    """Update a `CapturedSoftmax` by n samples and restore the ridge of c coordinates; `settings` are λ and smoothing.

    Returns a flag (0-d), whether all values were valid, and for a block what the update of T needs.
    """
    Z, now = state.Z, state.now
    (rows, p), K, C, (n, k) = Z.shape, len(now.W), len(now.weights), features.shape
    r = n + c
    if r not in state.blocks:
        state.blocks[r] = Buffers(Z, K, r)
    work = state.blocks[r]
    labels = not targets.is_floating_point()
    y = targets.to(torch.int64).contiguous() if labels else readable(targets)
    weight, bias = head
    has_bias, row_blocks = bias is not None, triton.next_power_of_2(max(n, 2))
    bias = weight if bias is None else bias  # a pointer must be given, used or not
    given, found = triton.next_power_of_2(max(c, 2)), (work.projected, work.sizes)
    scaling = work.row_scale, work.inflations, work.E, work.inverse_root
    seen = now.shares, now.counters, rows, n, r, p, K, k
    blocks = max(_TILE, row_blocks), given, work.width
    _project[(work.parts,)](Z, readable(features), *found, work.snapshot, *seen, *blocks)
    old = work.snapshot, now.prior, now.shares, now.ridge_left, now.ridge, now.counters, now.weights, settings
    widths = row_blocks, given, work.width, triton.next_power_of_2(p), max(_TILE, triton.next_power_of_2(work.parts))
    flags = work.finite, state.too_large
    _scale_rows[(1,)](*found, y, *old, *scaling, *flags, n, r, p, K, C, work.parts, labels, C != K, *widths)
    if n == c == 1:
        one = weight, bias, p, K, k, has_bias, triton.next_power_of_2(rows)
        _learn_one[(triton.cdiv(p, _COLUMNS),)](Z, work.projected, *scaling, work.finite, *one)
        return work.finite, None
    rows_now = work.row_scale, work.inflations, work.inverse_root
    made = work.M, work.inflated, work.Q, work.Ft
    tiles = triton.cdiv(r, _TILE) + triton.cdiv(p, _TILE)
    _products[(triton.cdiv(r, _SIZE), tiles)](work.projected, Z, *rows_now, *made, work.finite, r, p)
    head_now = now.W, weight, bias, work.scratch, work.buffer, r, p, K, k, has_bias
    system = work.inflated, work.inflations, work.E, work.Q
    most = max(_SIZE, triton.next_power_of_2(r))
    _step_weights[(triton.cdiv(p, _TILE),)](*system, *head_now, most, work.width, num_stages=1)
    return work.finite, work
