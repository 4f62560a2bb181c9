"""The rule of `sepsa.restoration` for Triton kernels: the coordinates that get their ridge back, and how much."""

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
def restored(ridge, left):
    """The ridge that a coordinate has after its turn, before which it had so much left."""
    return ridge


@triton.jit
def lacking(ridge, left):
    """The ridge that a coordinate gets in its turn."""
    full = restored(ridge, left)
    return tl.where(full > left, full - left, 0.0)
