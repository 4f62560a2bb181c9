"""`SoftmaxNewton` for so many classes and samples that the array of both must not be held: a vocabulary, on a GPU.

With labels y, of weights m, equation (1) of `cross_entropy` needs the residuals R = m(P - y) alone:

    ω_i = Σ_k U_ik = m_i (1 - P_iy),    Σ_i U_ik = Σ_i R_ik / 2 + Σ_{y_i = k} ω_i                                    (3)

So a chunk of samples is two products at the precision of the features and one pass over its logits. Features come in
half precision; products have float16 factors, which hold bfloat16 features of ordinary size exactly and W with eight
times its digits, and sums in float32. R is stored as 2¹⁴ R / max m: residuals of 1e-9 keep their digits. The curvature,
its factor and W are in float64, as ever, and the step is one product with the inverse: with a diagonal of one, what
that loses is the digits of float32 times the condition, as for a solve.

The host waits once, before the first product, for the largest feature and the range of the labels. From these, the
ridge and the sums so far it knows that all that follows is finite and loses no digits:

    A + ρM <= diagonal + Σ shares max φ²,    |step| <= Σ shares √p max |φ| / ridge,    because Σ_i |R_ik| <= 2 shares_k

The loss of the body is summed up in the same chunks, with its gradient, so that no pass holds the array.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sepsa.heads.backends.choose import UpdateSize, choose
from sepsa.heads.base import parameters
from sepsa.heads.math.cross_entropy import CHUNK, LOST_DIGITS, CrossEntropyState, joined

ALIGNED = 64  # products of other numbers of classes take twice as long
ROWS = 4 * CHUNK  # numbers that an array of samples and classes has at most, in float32 and in half precision
SCALE = 2.0**14  # of the residuals, so that small ones are normal numbers in float16
MOST = 6e4  # that a float16 holds
HALF = (torch.float16, torch.bfloat16)


class Bounds(NamedTuple):
    """What the host knows of a state without waiting for the device."""

    state: CrossEntropyState
    diagonal: float  # at least each diagonal number of A
    shares: float  # at least their sum
    ridge: float  # at most each number of `ridge_left`


def serves(linear: nn.Linear, features: Tensor, targets: Tensor, smoothing: float) -> bool:
    """Whether samples are learned here: labels on a GPU, more logits than a graph records, and a head that computes in
    half precision, as it does of float32 features where autocast is on.
    """
    if not features.is_cuda:
        return False
    n, K = features.shape[:-1].numel(), linear.out_features
    cast = features.dtype == torch.float32 and torch.is_autocast_enabled("cuda")
    half = torch.get_autocast_dtype("cuda") if cast else features.dtype
    return (
        half in HALF
        and not targets.is_floating_point()
        and not smoothing
        and K > 1
        and n * K > CHUNK // 2
        and hasattr(torch.ops.aten.addmm, "dtype")  # products with sums in another dtype
    )


def seen(linear: nn.Linear, W: Tensor, features: Tensor, labels: Tensor) -> list[float]:
    """The largest |feature| and |weight|, the least and the largest label, and whether the head is not W any more.

    The host waits for them.
    """
    head = parameters.join(linear)
    sizes = [torch.linalg.vector_norm(x.detach(), math.inf) for x in (features, head)]
    moved = (W.to(head.dtype) != head).any()
    return torch.stack([x.double() for x in (*sizes, *labels.aminmax(), moved)]).tolist()


def bounds_of(state: CrossEntropyState) -> Bounds:
    """The bounds of a state, read from the device."""
    assert state.A is not None
    numbers = torch.stack([state.A.diagonal().max(), state.shares.sum(), state.ridge_left.min()]).tolist()
    return Bounds(state, *numbers)


def grown(bounds: Bounds, rows: float, peak: float, K: int) -> Bounds:
    """The bounds in an update of samples of so much weight and such features, with those of λA + ρM for A's."""
    shares = bounds.shares + rows + K
    return bounds._replace(diagonal=bounds.diagonal + shares * max(peak, 1.0) ** 2, shares=shares)


def certain(bounds: Bounds, peak: float, weight: float, p: int) -> bool:
    """Whether an update within these bounds loses no digits and leaves weights below 1e30."""
    step = bounds.shares * math.sqrt(p) * max(peak, 1.0) / bounds.ridge
    return bounds.ridge > 1e2 * LOST_DIGITS[torch.float64] * bounds.diagonal and 2 * weight + step < 1e30


def padded(W: Tensor, dtype: torch.dtype) -> Tensor:
    """W in this dtype with rows of zeros, so that their number is a multiple of `ALIGNED`, and columns of 8."""
    K, p = W.shape
    rows, columns = -(-K // ALIGNED) * ALIGNED, -(-p // 8) * 8
    if (rows, columns) == (K, p):
        return W.to(dtype)
    wide = torch.zeros(rows, columns, dtype=dtype, device=W.device)
    wide[:K, :p] = W
    return wide


def add_product(total: Tensor, a: Tensor, b: Tensor, beta: int) -> Tensor:
    """Make `total`, in float32, beta times itself and the product of two matrices in half precision."""
    if not a.is_cuda:  # other devices have no product of this kind; here for the tests
        return total.mul_(beta).add_(a.float() @ b.float()) if beta else total.copy_(a.float() @ b.float())
    return torch.addmm(total, a, b, out_dtype=torch.float32, beta=beta, out=total)


class Chunk(NamedTuple):
    """What `chunks` has computed of some samples. R is overwritten by the next chunk."""

    rows: slice
    R: Tensor  # (n, padded classes): factor (P - y)
    logs: Tensor  # (n,): log P_y


def chunks(W: Tensor, Phi: Tensor, labels: Tensor, factors: Tensor, K: int) -> Iterator[Chunk]:
    """The residuals of chunks of samples at the padded head W (>= K, p), both in half precision."""
    n, C = len(Phi), len(W)
    size = min(-(-n // (-(-n * C // ROWS) * ALIGNED)) * ALIGNED, n)  # in equal chunks
    row = choose("many classes", UpdateSize(Phi.device.type, torch.float32, Phi.shape[1], K, n))
    compute: Any = row.load().residuals if row.place else residuals
    logits = torch.empty(size, C, device=Phi.device)
    R = torch.empty_like(logits, dtype=Phi.dtype)
    for first in range(0, n, size):
        rows = slice(first, min(first + size, n))
        count = rows.stop - first
        z = add_product(logits[:count], Phi[rows], W.T, 0)
        logs = compute(z, labels[rows], factors[rows] if factors.ndim else factors, R[:count], K)
        yield Chunk(rows, R[:count], logs)


def residuals(logits: Tensor, labels: Tensor, factors: Tensor, R: Tensor, K: int) -> Tensor:
    """What `triton.residuals` computes, in torch."""
    y = labels[:, None]
    logs = logits[:, :K].log_softmax(1)
    own = logs.gather(1, y)[:, 0]
    P = logs.exp_().scatter_add_(1, y, logs.new_full((), -1.0).expand(len(logs), 1))
    R[:, :K] = P.mul_(factors[:, None] if factors.ndim else factors)
    R[:, K:] = 0
    return own


def rows_of(linear: nn.Linear, features: Tensor, like: Tensor) -> Tensor:
    """Φ (n, columns of `like`) in its dtype, with a column of ones for a bias, and zeros."""
    x = features.detach().reshape(-1, linear.in_features)
    if x.shape[1] == like.shape[1]:
        return x.to(like.dtype)
    Phi = torch.zeros(len(x), like.shape[1], dtype=like.dtype, device=like.device)
    Phi[:, : x.shape[1]] = x
    if linear.bias is not None:
        Phi[:, x.shape[1]] = 1
    return Phi


class Sums(NamedTuple):
    """What an update needs of its samples."""

    G: Tensor  # (K, p): RᵀΦ, in float32
    M: Tensor  # (p, p): Φᵀ diag(ω) Φ
    U: Tensor  # (K,)
    samples: Tensor  # Σ m


def sums_of(linear: nn.Linear, W: Tensor, features: Tensor, labels: Tensor, weight: Tensor | None) -> Sums:
    """(3) of samples at the head W; `weight` (n,) is that of each sample, its class's included, None: 1."""
    (K, p), V = W.shape, padded(W, torch.float16)
    Phi, n = rows_of(linear, features, V), len(labels)
    most = torch.ones((), device=V.device) if weight is None else weight.max().float().clamp(min=1e-30)
    factors = SCALE / most if weight is None else weight.float() * (SCALE / most)
    G, column = torch.zeros(V.shape, device=V.device), torch.zeros(len(V), device=V.device)
    logs = torch.empty(n, device=V.device)
    for chunk in chunks(V, Phi, labels, factors, K):
        add_product(G, chunk.R.T, Phi[chunk.rows], 1)
        column += chunk.R.sum(0, dtype=torch.float32)
        logs[chunk.rows] = chunk.logs
    unit = most / SCALE
    omega = -logs.expm1() if weight is None else -logs.expm1() * weight.float()
    scaled = Phi[:, :p].float() * omega.sqrt()[:, None]
    U = (column[:K] * (unit / 2)).to(W.dtype).index_add(0, labels, omega.to(W.dtype)).clamp(min=0)
    samples = W.new_tensor(float(n)) if weight is None else weight.sum().to(W.dtype)
    return Sums(G[:K, :p].mul_(unit), (scaled.T @ scaled).to(W.dtype), U, samples)


def learned(
    state: CrossEntropyState, W: Tensor, sums: Sums, n: int, forgetting: float
) -> tuple[CrossEntropyState, Tensor]:
    """The state, which must have A, after n samples with these sums, and whether digits were lost (0-d)."""
    G, M, U, samples = sums
    old, H, s, back, shares, ridge_left, counters = joined(state, M, U, samples, n, forgetting)
    size = H.diagonal().sqrt()
    unit = size[:, None] * size
    root = torch.linalg.cholesky_ex(H / unit).L
    inverse = (torch.cholesky_inverse(root) / unit).float()
    G.div_(s.float()[:, None]).addcmul_((W - state.prior).float(), back.float())
    lost = ~(root.diagonal().min().square() > LOST_DIGITS[torch.float64])
    return state._replace(W=W - G @ inverse, shares=shares, ridge_left=ridge_left, counters=counters, A=old + M), lost


class ChunkedLoss(torch.autograd.Function):
    """-Σ m log P_y of features at a head that gets no gradient, with the gradient of the features."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, linear: nn.Linear, labels: Tensor, weight: Tensor | None) -> Tensor:
        """The sum over all samples; it is differentiated here, in the same chunks."""
        V = padded(parameters.join(linear), features.dtype if features.dtype in HALF else torch.bfloat16)
        Phi = rows_of(linear, features, V)
        factors = torch.ones((), device=V.device) if weight is None else weight.float()
        gradient, total = torch.empty_like(Phi), torch.zeros((), device=V.device)
        for chunk in chunks(V, Phi, labels, factors, linear.out_features):
            torch.mm(chunk.R, V, out=gradient[chunk.rows])
            total -= (chunk.logs * (factors[chunk.rows] if factors.ndim else factors)).sum()
        ctx.save_for_backward(gradient[:, : linear.in_features])
        ctx.shape, ctx.dtype = features.shape, features.dtype
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient of the features, times that of the sum."""
        (gradient,) = ctx.saved_tensors
        return (gradient * upstream).to(ctx.dtype).reshape(ctx.shape), None, None, None
