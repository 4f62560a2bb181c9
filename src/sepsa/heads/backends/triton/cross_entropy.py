"""The captured update of `SoftmaxNewton` as a few Triton kernels; symbols and equations as in `cross_entropy`.

With n samples and c coordinates that get their ridge back, r = n + c rows join A. All of them are columns of one array
P = Z [Φᵀ, e_at] (p + K, r), Z = [T; W]: the rows times Tᵀ, the logits, and the weights to be pulled to the prior.
What (1) and (2) make of the logits is a number a row, a, with F = P_T diag a for T/√λ, and the residuals. Then

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

from sepsa.heads.backends.triton.linalg import NEAR, distance, eliminate, iterate, readable, refine
from sepsa.heads.backends.triton.ridge import coordinate, is_restored, lacking, next_cursor
from sepsa.heads.math.least_squares import PRODUCT_LIMIT

_SIZE = 32  # of the blocks that are eliminated
_COLUMNS = 8
_TILE = 16
_DEPTH = 32
_SNAPSHOT = 3  # numbers before the shares in a snapshot


@triton.jit
def _look(
    Z, x, P, sizes, snapshot, shares, counters, rows, n, r, p, K, k,
    BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """P = Z [Φᵀ, e_at] in these rows, their squares, and a snapshot of what the next kernel both reads and writes."""
    rr = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    i = tl.arange(0, BLOCK_N)
    cursor = tl.load(counters + 2).to(tl.int64)
    product = tl.zeros((BLOCK_R, BLOCK_N), dtype=Z.dtype.element_ty)
    for start in range(0, p, BLOCK_K):
        c = start + tl.arange(0, BLOCK_K)
        tile = tl.load(Z + rr[:, None] * p + c[None, :], mask=(rr < rows)[:, None] & (c < p)[None, :], other=0.0)
        h = tl.load(x + i[None, :] * k + c[:, None], mask=(c < k)[:, None] & (i < n)[None, :], other=0.0)
        h = tl.where(((c >= k) & (c < p))[:, None] & (i < n)[None, :], 1.0, h.to(tile.dtype))
        product = tl.dot(tile, h, product, input_precision="ieee", out_dtype=Z.dtype.element_ty)
    inside = (rr < rows)[:, None] & (i < n)[None, :]
    product = tl.where(inside, product, 0.0)
    tl.store(P + rr[:, None] * r + i[None, :], product, mask=inside)
    t = tl.arange(0, BLOCK_G)
    inside = (rr < rows)[:, None] & (t < r - n)[None, :]
    column = tl.load(Z + rr[:, None] * p + coordinate(cursor, t, p)[None, :], mask=inside, other=0.0)
    tl.store(P + rr[:, None] * r + (n + t)[None, :], column, mask=inside)
    tl.store(sizes + tl.program_id(0), tl.sum(product * product) + tl.sum(column * column))
    of_T = tl.sum(tl.where((rr < p)[:, None], product * product, 0.0))
    tl.store(sizes + tl.num_programs(0) + tl.program_id(0), of_T)
    if tl.program_id(0) == 0:
        o = tl.arange(0, BLOCK_M)
        tl.store(snapshot, tl.load(counters))
        tl.store(snapshot + 1, tl.load(counters + 1))
        tl.store(snapshot + 2, tl.load(counters + 2))
        tl.store(snapshot + 3 + o, tl.load(shares + o, mask=o < K, other=0.0), mask=o < K)


@triton.jit
def _curvature(
    logits, y, i, c, snapshot, weights, settings, n, p, K, C, LABELS: tl.constexpr, ONE: tl.constexpr
):  # fmt: skip
    """(1) of the rows i and the classes c, whose logits are given: all that depends on what the head says.

    Returns whether the targets are probabilities, R/s (n, classes), ω (n,), the new shares (classes,), λ, ρ and Σ m.
    """
    dtype: tl.constexpr = logits.dtype
    row, known = i < n, (c >= 0) & (c < C)
    inside = row[:, None] & known[None, :]
    out = inside & (c >= C - K)[None, :]  # one output stands for class 1 of two
    if LABELS:
        label = tl.load(y + i, mask=row, other=0)
        t = tl.where(label[:, None] == c[None, :], 1.0, 0.0).to(dtype)
    elif ONE:
        value = tl.load(y + i, mask=row, other=0.0).to(dtype)
        t = tl.where((c == 1)[None, :], value[:, None], 1.0 - value[:, None])
    else:
        t = tl.load(y + i[:, None] * C + c[None, :], mask=inside, other=0.0).to(dtype)
    t = tl.where(inside, t, 0.0)
    off = tl.abs(tl.sum(t, axis=1) - 1.0)
    good = tl.where(row, (off <= 1e-3).to(tl.int32), 1)  # not for NaN either
    valid = (tl.min(good, axis=0) > 0) & (tl.sum(tl.where(t < 0.0, 1.0, 0.0)) == 0.0)
    smoothing = tl.load(settings + 1).to(dtype)
    t = ((1.0 - smoothing) * t + smoothing / C) * tl.load(weights + c, mask=known, other=0.0)[None, :]
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
    shares = tl.load(snapshot + 3 + c - (C - K), mask=mine, other=0.0)
    shares = tl.where(mine, lam * shares + (1.0 - lam) + sums, 0.0)
    classes = 1.0 if ONE else 2.0
    s = tl.where(mine, classes * shares / tl.sum(shares), 1.0)
    whole = tl.sum(omega)
    rho = tl.max(tl.where(mine, sums / s, 0.0), axis=0) * classes / tl.where(whole > 0.0, whole, 1.0)
    rho = tl.where(rho > 1.0, rho, 1.0)
    return valid, R / s[None, :], omega, shares, lam, rho, mass


@triton.jit
def _count(snapshot, left, ridge, counters, lam, mass, c, p, finite, BLOCK_P: tl.constexpr):
    """Counters, and the ridge of each coordinate: all fade, then the next c get theirs back."""
    j = tl.arange(0, BLOCK_P)
    cursor = tl.load(snapshot + 2).to(tl.int64)
    old = tl.load(left + j, mask=j < p, other=0.0)
    full = tl.load(ridge + j, mask=j < p, other=0.0)
    new = tl.where(is_restored(j, cursor, c, p) & (full > lam * old), full, lam * old)
    tl.store(left + j, tl.where(finite, new, old), mask=j < p)
    good = finite.to(tl.float64)
    tl.store(counters, (tl.load(snapshot) + good).to(old.dtype))
    tl.store(counters + 1, (tl.load(snapshot + 1) + tl.where(finite, mass, 0.0)).to(old.dtype))
    tl.store(counters + 2, tl.where(finite, next_cursor(cursor, c, p), cursor).to(old.dtype))


@triton.jit
def _weigh(
    P, sizes, y, snapshot, prior, shares, left, ridge, counters, weights, settings, a, d, E, inverse_root, finite_out,
    too_large, n, r, p, K, C, parts, LIMIT: tl.constexpr, LABELS: tl.constexpr, ONE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """a (r,), d (r,), E (r, K) = D⁻¹ times the residuals, and the state but for T and W. One program."""
    i, c = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    of_class = c - (C - K)
    mine = (of_class >= 0) & (c < C)
    logits = tl.load(
        P + (p + of_class)[None, :] * r + i[:, None], mask=(i < n)[:, None] & mine[None, :], other=0.0
    )  # fmt: skip
    valid, residuals, omega, new_shares, lam, rho, mass = _curvature(
        logits, y, i, c, snapshot, weights, settings, n, p, K, C, LABELS, ONE
    )
    part = tl.arange(0, BLOCK_S)
    total = tl.sum(tl.load(sizes + part, mask=part < parts, other=0.0))
    finite = valid & (total * total < float("inf"))  # nor NaN; squared, because the sweeps multiply two entries
    size = tl.sum(tl.load(sizes + parts + part, mask=part < parts, other=0.0))  # ω is at most about 1
    refused = finite & (size > LIMIT)
    finite = finite & (size <= LIMIT)
    root = tl.where(finite, 1.0 / tl.sqrt(lam), 1.0)
    scale = tl.sqrt(omega)
    tl.store(a + i, tl.where(finite, scale * root, 0.0), mask=i < n)
    tl.store(d + i, tl.where(i < n, tl.where(finite, tl.sqrt(rho), 1.0), 0.0), mask=i < n)
    e = residuals / (tl.where(scale > 0.0, scale, 1.0) * tl.sqrt(rho))[:, None]
    tl.store(E + i[:, None] * K + of_class[None, :], tl.where(finite, e, 0.0), mask=(i < n)[:, None] & mine[None, :])

    t = tl.arange(0, BLOCK_G)
    given = t < r - n
    at = coordinate(tl.load(snapshot + 2).to(tl.int64), t, p)
    faded = lam * tl.load(left + at, mask=given, other=0.0)
    back = tl.where(finite, tl.sqrt(lacking(tl.load(ridge + at, mask=given, other=0.0), faded)), 0.0)
    tl.store(a + n + t, back * root, mask=given)
    tl.store(d + n + t, tl.where(given, 1.0, 0.0).to(lam.dtype), mask=given)
    both = given[:, None] & (c < K)[None, :]
    pull = tl.load(P + (p + c)[None, :] * r + (n + t)[:, None], mask=both, other=0.0)
    pull -= tl.load(prior + c[None, :] * p + at[:, None], mask=both, other=0.0)
    pull = tl.where(finite, back[:, None] * pull, 0.0)
    tl.store(E + (n + t)[:, None] * K + c[None, :], pull, mask=both)
    tl.debug_barrier()  # the ridge that is left has been read
    old = tl.load(snapshot + 3 + of_class, mask=mine, other=0.0)
    tl.store(shares + of_class, tl.where(finite, new_shares, old), mask=mine)
    tl.store(inverse_root, root)
    tl.store(finite_out, finite)
    tl.store(too_large, tl.load(too_large) + refused.to(tl.int64))
    _count(snapshot, left, ridge, counters, lam, mass, r - n, p, finite, BLOCK_P)


@triton.jit
def _learn_one(
    Z, P, a, d, E, inverse_root, finite_in, weight, bias, p, K, k,
    HAS_BIAS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One sample and one coordinate, f and g as T/√λ sees them: W and T in these columns, and the head takes W."""
    r = tl.arange(0, BLOCK_R)
    rows = p + K
    is_T, is_W = r < p, (r >= p) & (r < rows)
    finite, root, inflation = tl.load(finite_in), tl.load(inverse_root), tl.load(d)
    f = tl.load(P + 2 * r, mask=is_T, other=0.0) * tl.load(a)
    g = tl.load(P + 2 * r + 1, mask=is_T, other=0.0) * tl.load(a + 1)
    f, g = tl.where(finite, f, 0.0), tl.where(finite, g, 0.0)
    ff, fg, gg = tl.sum(f * f), inflation * tl.sum(f * g), tl.sum(g * g)

    # (2): X = D(I + DMD)⁻¹E, where D inflates the sample and not the coordinate
    e = tl.load(E + r - p, mask=is_W, other=0.0)
    pull = tl.load(E + K + r - p, mask=is_W, other=0.0)
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

    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (r < rows)[:, None] & (c < p)[None, :]
    place = Z + r[:, None] * p + c[None, :]
    tile = tl.load(place, mask=inside, other=0.0)
    tile *= tl.where(is_T, root, 1.0)[:, None]
    u = tl.sum(f[:, None] * tile, axis=0)
    v = tl.sum(g[:, None] * tile, axis=0)
    w = tl.sum(h[:, None] * tile, axis=0) - tl.sum(f * h) * beta * u  # hᵀ of what the first makes of T
    tile -= (f * beta + of_f)[:, None] * u[None, :] + of_g[:, None] * v[None, :] + (h * gamma)[:, None] * w[None, :]
    tl.store(place, tile, mask=inside)
    tl.store(weight + (r - p)[:, None] * k + c[None, :], tile, mask=is_W[:, None] & (c < k)[None, :])
    if HAS_BIAS:
        tl.store(bias + (r - p)[:, None] + 0 * c[None, :], tile, mask=is_W[:, None] & (c == k)[None, :])


@triton.jit
def _products(
    P, Z, a, d, inverse_root, M, inflated, Q, Ft, finite_in, r, p,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """M = FᵀF and DMD, or Q = FᵀT/√λ and Fᵀ, in these rows and columns; all zero where something is not finite."""
    edge = tl.cdiv(r, BLOCK_C) * BLOCK_C  # the columns of M, then those of Q
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_M, in_Q = c < r, (c >= edge) & (c < edge + p)
    c = tl.where(c < edge, c, c - edge)
    i = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    finite = tl.load(finite_in)
    product = tl.zeros((BLOCK_R, BLOCK_C), dtype=Z.dtype.element_ty)
    for start in range(0, p, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        one = tl.load(P + j[None, :] * r + i[:, None], mask=(j < p)[None, :] & (i < r)[:, None], other=0.0)
        other = tl.load(P + j[:, None] * r + c[None, :], mask=(j < p)[:, None] & in_M[None, :], other=0.0)
        other += tl.load(Z + j[:, None] * p + c[None, :], mask=(j < p)[:, None] & in_Q[None, :], other=0.0)
        product = tl.dot(one, other, product, input_precision="ieee", out_dtype=Z.dtype.element_ty)
    a_i, d_i = tl.load(a + i, mask=i < r, other=0.0), tl.load(d + i, mask=i < r, other=0.0)
    a_c, d_c = tl.load(a + c, mask=in_M, other=0.0), tl.load(d + c, mask=in_M, other=0.0)
    root = tl.load(inverse_root)
    product = tl.where(finite, product * a_i[:, None] * tl.where(in_Q, root, a_c)[None, :], 0.0)
    tl.store(M + i[:, None] * r + c[None, :], product, mask=(i < r)[:, None] & in_M[None, :])
    tl.store(
        inflated + i[:, None] * r + c[None, :],
        product * d_i[:, None] * d_c[None, :],
        mask=(i < r)[:, None] & in_M[None, :],
    )
    inside = (i < r)[:, None] & in_Q[None, :]
    tl.store(Q + i[:, None] * p + c[None, :], product, mask=inside)
    f = tl.load(P + c[None, :] * r + i[:, None], mask=inside, other=0.0) * a_i[:, None]
    tl.store(Ft + i[:, None] * p + c[None, :], tl.where(finite, f, 0.0), mask=inside)


@triton.jit
def _step(
    inflated, ones, d, E, Q, W, weight, bias, scratch, buffer, r, p, K, k,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
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
        e = tl.load(E + at[:, None] * K + o[None, :], mask=(at < r)[:, None] & (o < K)[None, :], other=0.0)
        tl.store(right + at[:, None] * BLOCK_M + o[None, :], e)
    size = distance(inflated, r, r, ROWS, SIZE)
    if size < NEAR:
        iterate(inflated, r, right, r, size, ROWS, SIZE, BLOCK_M)
    else:
        eliminate(inflated, r, ones, 1.0, S, L, right, buffer + tl.program_id(0) * SIZE * SIZE, r, SIZE, BLOCK_M)
        refine(inflated, r, ones, 1.0, L, right, r, SIZE, BLOCK_M)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    step = tl.zeros((BLOCK_M, BLOCK_C), dtype=Q.dtype.element_ty)
    for b in range(blocks):
        at = b * SIZE + i
        x = tl.load(X + at[:, None] * BLOCK_M + o[None, :]) * tl.load(d + at, mask=at < r, other=0.0)[:, None]
        q = tl.load(Q + at[:, None] * p + c[None, :], mask=(at < r)[:, None] & (c < p)[None, :], other=0.0)
        step = tl.dot(tl.trans(x), q, step, input_precision="ieee", out_dtype=Q.dtype.element_ty)
    inside = (o < K)[:, None] & (c < p)[None, :]
    place = W + o[:, None] * p + c[None, :]
    new = tl.load(place, mask=inside, other=0.0) - step
    tl.store(place, new, mask=inside)
    tl.store(weight + o[:, None] * k + c[None, :], new, mask=inside & (c < k)[None, :])
    if HAS_BIAS:
        tl.store(bias + o[:, None] + 0 * c[None, :], new, mask=inside & (c == k)[None, :])


class Buffers:
    """What the kernels write for blocks of n samples and c coordinates, kept: a graph's other streams read it later."""

    def __init__(self, Z: Tensor, K: int, r: int) -> None:
        rows, p = Z.shape
        programs, blocks = triton.cdiv(p, _TILE), triton.cdiv(r, _SIZE)
        self.width = max(_TILE, triton.next_power_of_2(max(K, 2)))
        self.parts = triton.cdiv(rows, _TILE)
        self.P, self.sizes = Z.new_zeros(rows, r), Z.new_zeros(2 * self.parts)
        self.snapshot = Z.new_zeros(_SNAPSHOT + K)
        self.a, self.d, self.E, self.inverse_root = Z.new_zeros(r), Z.new_zeros(r), Z.new_zeros(r, K), Z.new_zeros(())
        self.M, self.inflated, self.ones = Z.new_zeros(r, r), Z.new_zeros(r, r), Z.new_ones(r)
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
    kind = {"LABELS": labels, "ONE": C != K}
    has_bias = {"HAS_BIAS": bias is not None}
    bias = weight if bias is None else bias  # a pointer must be given, used or not
    parts = {"BLOCK_S": max(_TILE, triton.next_power_of_2(work.parts))}
    samples, given = max(_TILE, triton.next_power_of_2(n)), triton.next_power_of_2(max(c, 2))
    _look[(work.parts,)](
        Z, readable(features), work.P, work.sizes, work.snapshot, now.shares, now.counters, rows, n, r, p, K, k,
        BLOCK_N=samples, BLOCK_G=given, BLOCK_R=_TILE, BLOCK_K=_DEPTH, BLOCK_M=work.width,
    )  # fmt: skip
    _weigh[(1,)](
        work.P, work.sizes, y, work.snapshot, now.prior, now.shares, now.ridge_left, now.ridge, now.counters,
        now.weights, settings, work.a, work.d, work.E, work.inverse_root, work.finite, state.too_large, n, r, p, K, C,
        work.parts, LIMIT=PRODUCT_LIMIT,
        BLOCK_N=triton.next_power_of_2(max(n, 2)), BLOCK_G=given, BLOCK_M=work.width,
        BLOCK_P=triton.next_power_of_2(p), **parts, **kind,
    )  # fmt: skip
    if n == c == 1:
        _learn_one[(triton.cdiv(p, _COLUMNS),)](
            Z, work.P, work.a, work.d, work.E, work.inverse_root, work.finite, weight, bias, p, K, k,
            BLOCK_R=triton.next_power_of_2(rows), BLOCK_C=_COLUMNS, **has_bias,
        )  # fmt: skip
        return work.finite, None
    _products[(triton.cdiv(r, _SIZE), triton.cdiv(r, _TILE) + triton.cdiv(p, _TILE))](
        work.P, Z, work.a, work.d, work.inverse_root, work.M, work.inflated, work.Q, work.Ft, work.finite, r, p,
        BLOCK_R=_SIZE, BLOCK_C=_TILE, BLOCK_K=_DEPTH,
    )  # fmt: skip
    _step[(triton.cdiv(p, _TILE),)](
        work.inflated, work.ones, work.d, work.E, work.Q, now.W, weight, bias, work.scratch, work.buffer, r, p, K, k,
        ROWS=max(_SIZE, triton.next_power_of_2(r)), SIZE=_SIZE, BLOCK_M=work.width, BLOCK_C=_TILE, num_stages=1,
        **has_bias,
    )  # fmt: skip
    return work.finite, work
