"""An update of T in place by a block of rows, with small factorizations in parallel to the large products.

Symbols as in `least_squares`, S = T/√λ. The rows √q e_j, which give some coordinates their ridge back, come first: as T
sees them they are columns of T, so that they need not wait for the samples.

    f = √q S e_j,  u = fᵀS,  LLᵀ = I + fᵀf,  g = f(L + I)⁻ᵀL⁻¹     S <- S - gu,  W <- W + xᵀu,  x = (LLᵀ)⁻¹e

The samples, seen by that S and W, are F = TΦᵀ/√λ - gAᵀ and E - Ax with A = Φuᵀ, and in the same letters

    U = Fᵀ(S - gu),  CCᵀ = I + FᵀF,  G = F(C + I)⁻ᵀC⁻¹,  X = (CCᵀ)⁻¹E     T <- S - gu - GU,  W <- W + xᵀu + XᵀU.

The product U = FᵀS uses the whole device; C and its inverses use one processor for about as long and run in parallel on
another stream. Without streams all of it runs in sequence, on any device.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
from torch import Tensor

from sepsa.heads.base.ridge import Coordinates
from sepsa.heads.least_squares.math import LeastSquaresState, identity, inverses, ridge_rows

# Products of other numbers of rows are slow on a GPU.
_ROWS = 16


class BlockUpdate(NamedTuple):
    """The update of T and W by whitened rows: T <- S - gu and W <- W + xᵀu."""

    g: Tensor  # (p, r)
    x: Tensor  # (r, m)
    rise: Tensor  # (m,): of the objective at its minimum


class RidgeUpdate(NamedTuple):
    """The update by the rows of the ridge, its u, and the ridge of each coordinate after it."""

    rows: BlockUpdate
    u: Tensor  # (c, p)
    ridge_left: Tensor  # (p,)


def beside(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    """A context in which kernels go to `stream`, after everything launched before."""
    if stream is None:
        return contextlib.nullcontext()
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


def together(stream: torch.cuda.Stream | None) -> None:
    """Make later kernels wait for those on `stream`."""
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)


def gain_and_solution(F: Tensor, E: Tensor, out: Tensor | None = None) -> BlockUpdate:
    """g, in `out` where there is one, and x of rows F (p, r) with the residuals E (r, m)."""
    M = torch.addmm(identity(F.shape[1], F), F.T, F)
    J, V = inverses(torch.linalg.cholesky_ex(M).L)
    whitened = J @ E
    x = J.T @ whitened
    # An inverse leaves an error of eps cond(M) also along the largest eigenvectors of M, where F would multiply it.
    x = torch.addmm(x, J.T, J @ torch.addmm(E, M, x, alpha=-1))
    return BlockUpdate(torch.mm(F, V, out=out), x, whitened.square().sum(0))


def learn_ridge(state: LeastSquaresState, lam: float, at: Coordinates) -> RidgeUpdate:
    """The update by the ridge of the coordinates `at`, for a state that is not faded yet."""
    f, e, left = ridge_rows(state, lam * state.ridge_left, at, lam)  # f by 1/√λ too
    padding = -len(e) % _ROWS
    f = torch.nn.functional.pad(f, (0, padding))
    e = torch.nn.functional.pad(e, (0, 0, 0, padding)) * lam**0.5
    return RidgeUpdate(gain_and_solution(f, e), f.T @ state.T * lam**-0.5, left)


def learn_block(
    state: LeastSquaresState,
    Phi: Tensor,
    F: Tensor,
    E: Tensor,
    lam: float,
    ridge: RidgeUpdate | None,
    aside: torch.cuda.Stream | None,
) -> LeastSquaresState:
    """Learn Φ, of which F = TΦᵀ and E are given, after the ridge. T is changed in place, and F is overwritten."""
    (n, p), T, scale = Phi.shape, state.T, lam**-0.5
    c = 0 if ridge is None else len(ridge.u)
    G, U = T.new_empty(p, c + n), T.new_empty(c + n, p)
    mine = U[c:]
    if ridge is not None:
        A = Phi @ ridge.u.T
        F.addmm_(ridge.rows.g, A.T, beta=scale, alpha=-1)
        E = torch.addmm(E, A, ridge.rows.x, alpha=-1)
        G[:, :c], U[:c] = ridge.rows.g, ridge.u
    with beside(aside):
        if ridge is None:
            torch.mm(F.T, T, out=mine)
        else:
            torch.mm(F.T @ ridge.rows.g, ridge.u, out=mine).addmm_(F.T, T, beta=-1, alpha=scale)
    new = gain_and_solution(F, E, out=G[:, c:])
    together(aside)
    ridge_left, x, energy = state.ridge_left, new.x, lam * state.energy + new.rise
    if ridge is not None:
        ridge_left, x, energy = ridge.ridge_left, torch.cat([ridge.rows.x, x]), energy + ridge.rows.rise
    W = torch.addmm(state.W, x.T, U)
    T.addmm_(G, U, beta=scale, alpha=-1)
    return state._replace(W=W, energy=energy, ridge_left=ridge_left)
