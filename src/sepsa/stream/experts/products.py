"""Squares and products of two inputs as features of a recursive-least-squares head."""

from __future__ import annotations

from sepsa.stream.experts.compilation import called


@called
def expand(z, phi):
    """φ = [1, z_0, z_0², z_1, z_1 z_0, z_1², …] of the first inputs; a further input adds features at the end."""
    phi[0] = 1.0
    at, j = 1, 0
    while at < phi.size:
        phi[at] = z[j]
        for i in range(j + 1):
            phi[at + 1 + i] = z[j] * z[i]
        at += j + 2
        j += 1
