"""The rule of `math.ridge` for Triton kernels: the coordinates that get their ridge back, and what they lack."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def coordinate(cursor, t, p):
    """The t-th of the coordinates that an update restores."""
    return (cursor + t) % p


@triton.jit
def is_restored(j, cursor, count, p):
    """Whether coordinate j is among the `count` that an update restores."""
    return (j - cursor + p) % p < count


@triton.jit
def next_cursor(cursor, count, p):
    """The cursor after an update that restored `count` coordinates."""
    return (cursor + count) % p


@triton.jit
def lacking(ridge, ridge_left):
    """The ridge that a coordinate lacks."""
    return tl.where(ridge > ridge_left, ridge - ridge_left, 0.0)
