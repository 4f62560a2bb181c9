"""Parts of matrices inside Triton kernels: read, written, multiplied, and what kernels of both losses do with them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
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
def store_head(weight, bias, k, o, c, values, outputs, HAS_BIAS: constexpr):
    """Make columns c of W the weights of the head for the outputs o, where the mask `outputs` is true."""
    store(weight, k, o, c, values, outputs, c < k)
    if HAS_BIAS:
        store(bias, 1, o, 0 * c, values, outputs, c == k)


# The rule of `sepsa.restoration`: the coordinates that get their ridge back, and how much.


@triton.jit
def coordinate(cursor, t, p):
    """The t-th of the coordinates that an update restores."""
    return (cursor + t) % p


@triton.jit
def lacking(ridge, left):
    """The ridge that a coordinate gets in its turn, before which it had so much left."""
    return tl.where(ridge > left, ridge - left, 0.0)


@triton.jit
def restore(left, ridge, lam, cursor, count, p, finite, BLOCK_P: constexpr):
    """The ridge of all coordinates fades, and the next `count` get theirs back; nothing where not `finite`."""
    j = tl.arange(0, BLOCK_P)
    old = load_vector(left, j, j < p)
    back = lacking(load_vector(ridge, j, j < p), lam * old)
    new = lam * old + tl.where((j - cursor + p) % p < count, back, 0.0)
    tl.store(left + j, tl.where(finite, new, old), mask=j < p)


def readable(rows: Tensor) -> Tensor:
    """Rows that the kernels can read: Triton's float64 products take no operand that comes from 16 bits."""
    return (rows.float() if rows.element_size() < 4 else rows).contiguous()
