"""Parts of matrices inside Triton kernels: read, written, multiplied, and what kernels of both losses do with them."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit
def positions(axis: constexpr, SIZE: constexpr):
    """The rows or columns of this program, of SIZE for each along an axis of the grid."""
    return tl.program_id(axis) * SIZE + tl.arange(0, SIZE)


@triton.jit
def load(matrix, stride, i, j, rows, columns):
    """The entries of a matrix at the rows i and columns j, 0 where the masks `rows` or `columns` are false."""
    return tl.load(matrix + i[:, None] * stride + j[None, :], mask=rows[:, None] & columns[None, :], other=0.0)


@triton.jit
def load_transposed(matrix, stride, i, j, rows, columns):
    """The entries of a matrix at the columns i and rows j, transposed; 0 where the masks of i or of j are false."""
    return tl.load(matrix + j[None, :] * stride + i[:, None], mask=rows[:, None] & columns[None, :], other=0.0)


@triton.jit
def load_vector(vector, i, inside):
    """The entries i of a vector, 0 where the mask `inside` is false."""
    return tl.load(vector + i, mask=inside, other=0.0)


@triton.jit
def store(matrix, stride, i, j, values, rows, columns):
    """Write values at the rows i and columns j of a matrix where the masks `rows` and `columns` are true."""
    tl.store(matrix + i[:, None] * stride + j[None, :], values, mask=rows[:, None] & columns[None, :])


@triton.jit
def product(a, b):
    """ab, without a rounding of its factors."""
    return tl.dot(a, b, input_precision="ieee", out_dtype=a.dtype)


@triton.jit
def add_product(a, b, total):
    """ab + total, without a rounding of the factors."""
    return tl.dot(a, b, total, input_precision="ieee", out_dtype=total.dtype)


@triton.jit
def times_features(Z, x, r, i, rows, n, p, k, BLOCK_R: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr):
    """ZΦᵀ at the rows r of Z (rows, p) and the samples i of Φ = [x, 1] (n, p), x (n, k); 0 outside of both."""
    total = tl.zeros((BLOCK_R, BLOCK_N), dtype=Z.dtype.element_ty)
    for start in range(0, p, BLOCK_K):
        c = start + tl.arange(0, BLOCK_K)
        part = load(Z, p, r, c, r < rows, c < p)
        h = load_transposed(x, k, c, i, c < k, i < n)
        h = tl.where(((c >= k) & (c < p))[:, None], 1.0, h.to(part.dtype))
        total = add_product(part, h, total)
    return tl.where((r < rows)[:, None] & (i < n)[None, :], total, 0.0)


@triton.jit
def judge(sizes, parts, LIMIT: constexpr, BLOCK_S: constexpr):
    """Whether rows are finite and at most LIMIT, and whether they are finite and larger.

    `sizes` are the sums of squares that `parts` programs found: of all numbers, then of the whitened rows.
    """
    part = tl.arange(0, BLOCK_S)
    total = tl.sum(load_vector(sizes, part, part < parts))
    finite = total * total < float("inf")  # nor NaN; squared, because the sweeps multiply two entries
    size = tl.sum(load_vector(sizes + parts, part, part < parts))
    return finite & (size <= LIMIT), finite & (size > LIMIT)


@triton.jit
def store_head(weight, bias, k, o, c, values, outputs, HAS_BIAS: constexpr):
    """Make columns c of W the weights of the head for the outputs o, where the mask `outputs` is true."""
    store(weight, k, o, c, values, outputs, c < k)
    if HAS_BIAS:
        store(bias, 1, o, 0 * c, values, outputs, c == k)


@triton.jit
def add_to_head(W, weight, bias, o, c, step, m, p, k, HAS_BIAS: constexpr):
    """Add a step to the columns c of W (m, p), in the state and in the head."""
    new = load(W, p, o, c, o < m, c < p) + step
    store(W, p, o, c, new, o < m, c < p)
    store_head(weight, bias, k, o, c, new, o < m, HAS_BIAS)
