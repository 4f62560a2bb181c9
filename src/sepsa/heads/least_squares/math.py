"""The mathematics of recursive least squares in square-root form: pure functions that return new tensors.

Symbols: Φ (n, p) features, with a last column of ones where the head has a bias; Y (n, m) targets; W (m, p) the head;
A (p, p) the curvature, B = A⁻¹; λ the forgetting; F = TΦᵀ (p, n), the whitened rows; E = Y - ΦWᵀ. The state is
Z = [T; W] and H with

    B = TᵀH⁻¹T,

where H is the identity, so that T is a square root of B, except between large blocks, which are summed in H while T
stays as it is. All but `learn`, which checks its result on the host, also run inside a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sepsa.compiled.least_squares import CURSOR as CURSOR
from sepsa.compiled.least_squares import GROWTH as GROWTH
from sepsa.compiled.least_squares import GROWTH_LIMIT, PENDING_LIMIT, ROW_LIMIT
from sepsa.compiled.least_squares import PENDING as PENDING
from sepsa.compiled.least_squares import PRODUCT_LIMIT as PRODUCT_LIMIT
from sepsa.compiled.least_squares import SAMPLES as SAMPLES
from sepsa.compiled.least_squares import STEPS as STEPS
from sepsa.heads.base.ridge import Coordinates, coordinates, count_of, due, lacking, next_cursor

if TYPE_CHECKING:
    from numpy.typing import NDArray

Counters: TypeAlias = "NDArray[np.float64]"  # STEPS, SAMPLES, CURSOR, PENDING and GROWTH

# Up to this one a block keeps its digits also in a captured step, which can take no other route; and one row, whose
# update squares nothing, up to the other.
CAPTURED_LIMIT, CAPTURED_ROW_LIMIT = 3e8, 1e20
# Above this one, at forgetting 1, a block keeps its digits by a basis: `andrews` leaves about eps size^1.5 of the
# curvature wrong, and `unlearn` multiplies that where little remains. With more samples the size falls under it.
BASIS_LIMIT = 1e3

# `functional.mse_loss` of tensors of one shape. There an expansion to one shape takes as long as the loss.
mse_loss: Any = torch.ops.aten.mse_loss.default
MEAN = 1  # the number by which it knows this reduction


def copies(parts: Sequence[Any]) -> list[Any]:
    """The parts, of which each tensor is copied; on a GPU one kernel for all of a dtype: a launch takes longer."""
    found, tensors = list(parts), [i for i, part in enumerate(parts) if isinstance(part, Tensor)]
    for dtype in {parts[i].dtype for i in tensors}:
        places = [i for i in tensors if parts[i].dtype == dtype]
        mine = [parts[i] for i in places]
        made = torch._foreach_mul(mine, 1) if mine[0].is_cuda else [part.clone() for part in mine]
        for i, copy in zip(places, made, strict=True):
            found[i] = copy
    return found


def identity(n: int, like: Tensor) -> Tensor:
    """The identity (n, n) in the dtype and on the device of `like`."""
    return torch.eye(n, dtype=like.dtype, device=like.device)


def triangular(C: Tensor, X: Tensor, upper: bool = False) -> Tensor:
    """C⁻¹X of a lower or upper C."""
    solution: Tensor = torch.linalg.solve_triangular(C, X, upper=upper)
    return solution


class LeastSquaresState(NamedTuple):
    """All that a head has learned, and what it is pulled to. H is None where it is the identity."""

    T: Tensor  # (p, p)
    W: Tensor  # (m, p)
    energy: Tensor  # (m,): the objective at its minimum
    ridge_left: Tensor  # (p,): the ridge that each coordinate has at the moment
    prior: Tensor  # (m, p)
    ridge: Tensor  # (p,): all of it
    H: Tensor | None  # (p, p)
    counters: Counters  # on the host

    def map(self, change: Callable[[Tensor], Tensor]) -> LeastSquaresState:
        """The state with `change` applied to every tensor."""
        return LeastSquaresState._make(change(part) if isinstance(part, Tensor) else part for part in self)

    def copy(self) -> LeastSquaresState:
        """The state in memory of its own."""
        return LeastSquaresState._make(copies(self))._replace(counters=self.counters.copy())

    def with_root(self, T: Tensor) -> LeastSquaresState:
        """The state with a square root of B, and nothing gathered in H."""
        return self._replace(T=T, H=None, counters=np.array([*self.counters[:PENDING], 0.0, 0.0]))


def start(prior: Tensor, ridge: Tensor) -> LeastSquaresState:
    """The state before any data: A = diag ridge (p,), and W the prior (m, p)."""
    T, energy = torch.diag(1 / ridge.sqrt()), prior.new_zeros(len(prior))
    return LeastSquaresState(T, prior.clone(), energy, ridge.clone(), prior, ridge, None, np.zeros(5))


def whiten(state: LeastSquaresState, Phi: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
    """F = TΦᵀ (p, n) and the residuals E = Y - ΦWᵀ (n, m)."""
    return state.T @ Phi.T, torch.addmm(Y, Phi, state.W.T, alpha=-1)


def potter(state: LeastSquaresState, f: Tensor, e: Tensor) -> LeastSquaresState:
    """Equations 17 and 18 for one row (Potter): f = Th (p,), e = y - Wh (m,).

    T <- (I - βffᵀ)T gives TᵀT = B - BhhᵀB/(1 + hᵀBh) for β = 1/(g + √g), g = 1 + fᵀf.
    """
    g = 1 + f @ f
    u = f @ state.T  # Bh
    e_over_g = e / g
    T = torch.addr(state.T, f * (-1 / (g + g.sqrt())), u)  # (18)
    W = torch.addr(state.W, e_over_g, u)  # (17): B_k h = Bh/g
    return state._replace(T=T, W=W, energy=state.energy + e * e_over_g)


def factor(F: Tensor) -> Tensor:
    """C with CCᵀ = I + FᵀF."""
    C: Tensor = torch.linalg.cholesky_ex(torch.addmm(identity(F.shape[1], F), F.T, F)).L
    return C


def root(M: Tensor) -> Tensor:
    """The Cholesky factor of I + M, where what rounding takes from a large M is given back."""
    M = M.clone()
    M.diagonal().add_(1 + 4 * torch.finfo(M.dtype).eps * M.diagonal().sum())
    C: Tensor = torch.linalg.cholesky_ex(M).L
    return C


def factor_by_qr(F: Tensor) -> Tensor:
    """C with CCᵀ = I + FᵀF, for rows whose squares would round the identity away."""
    R: Tensor = torch.linalg.qr(torch.cat([identity(F.shape[1], F), F]), mode="r").R
    return (R * R.diagonal().sign()[:, None]).T.contiguous()


def inverses(C: Tensor) -> tuple[Tensor, Tensor]:
    """C⁻¹ and (C + I)⁻ᵀC⁻¹ for a lower C."""
    one = identity(len(C), C)
    inverse = triangular(C, one)
    return inverse, triangular((C + one).T, inverse, upper=True)


def andrews(T: Tensor, F: Tensor, U: Tensor, C: Tensor, scale: float = 1.0) -> Tensor:
    """T <- scale T - F(C + I)⁻ᵀC⁻¹U with U = scale FᵀT and CCᵀ = I + FᵀF (Andrews).

    F is whitened by scale T, and TᵀT is then (A + ΦᵀΦ)⁻¹ for the A of scale T.
    """
    r = len(C)
    if U.shape[1] >= 2 * r:  # products with an inverse cost less than solving for this many columns
        left, right = F @ inverses(C)[1], U
    else:
        left, right = F, triangular((C + identity(r, C)).T, triangular(C, U), upper=True)
    return torch.addmm(T, left, right, beta=scale, alpha=-1)


def block(state: LeastSquaresState, F: Tensor, E: Tensor, scale: float = 1.0) -> LeastSquaresState:
    """Equations 17 and 18 for r rows at once: 6rp² operations in three products. F is whitened by scale T."""
    C = factor(F)
    U = F.T @ state.T
    if scale != 1.0:
        U *= scale
    V = triangular(C, E)
    W = torch.addmm(state.W, triangular(C.T, V, upper=True).T, U)
    energy = state.energy + V.square().sum(0)
    return state._replace(T=andrews(state.T, F, U, C, scale), W=W, energy=energy)


def block_by_basis(state: LeastSquaresState, F: Tensor, E: Tensor) -> LeastSquaresState:
    """Equations 17 and 18 for at most p rows, however large and parallel, in an orthonormal basis of them.

    F = QR and LLᵀ = I + RRᵀ give T <- T + Q(L⁻¹ - I)QᵀT, in which no factor is larger than T.
    """
    Q, R = torch.linalg.qr(F)
    L, U = factor_by_qr(R.T), Q.T @ state.T
    S = triangular(L, U)
    W = torch.addmm(state.W, triangular(L, R @ E).T, S)
    V = triangular(factor_by_qr(R), E)
    energy = state.energy + V.square().sum(0)
    return state._replace(T=torch.addmm(state.T, Q, S - U), W=W, energy=energy)


def gather(state: LeastSquaresState, F: Tensor, E: Tensor, lam: float = 1.0) -> LeastSquaresState:
    """Equations 17 and 18 for about p rows or more: T stays and only H grows, 4rp² + p³/3 operations.

    H <- λH + FFᵀ and W <- W + VᵀT with V = H⁻¹FE, because W was the minimizer before.
    """
    D, rise = F @ E, (E * E).sum(0)
    before = identity(len(F), F) if state.H is None else state.H
    H = torch.addmm(before, F, F.T, beta=lam)
    V = torch.cholesky_solve(D, torch.linalg.cholesky_ex(H).L)
    energy = lam * state.energy + rise - (D * V).sum(0)
    return state._replace(W=torch.addmm(state.W, V.T, state.T), H=H, energy=energy)


def square_root(state: LeastSquaresState) -> Tensor:
    """T with TᵀT = B, whatever is gathered in H."""
    if state.H is None:
        return state.T
    return triangular(torch.linalg.cholesky_ex(state.H).L, state.T).contiguous()  # so that a copy has the same bits


def fade(state: LeastSquaresState, lam: float | Tensor) -> LeastSquaresState:
    """A <- λA, with H = I afterwards."""
    if state.H is None and isinstance(lam, float) and lam == 1.0:
        return state
    faded = state.with_root(square_root(state) / lam**0.5)
    return faded._replace(energy=state.energy * lam, ridge_left=state.ridge_left * lam)


def ridge_rows(
    state: LeastSquaresState, left: Tensor, at: Coordinates, lam: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """F (p, c) and E (c, m) of rows √q e_j with the prior as target, over √λ: q is what coordinates `at` lack with a
    ridge (p,) of `left`; and the ridge of each coordinate after them.
    """
    scale = (lacking(left, state.ridge, at) / lam).sqrt()
    e = ((state.prior[:, at] - state.W[:, at]) * scale).T
    return state.T[:, at] * scale, e, restored(left, state.ridge, at)


def restored(left: Tensor, ridge: Tensor, at: Coordinates) -> Tensor:
    """The ridge (p,) of each coordinate once those `at` have had their turn."""
    left = left.clone()
    left[at] = ridge[at]
    return left


def learn_rows(state: LeastSquaresState, F: Tensor, E: Tensor, at: Coordinates | None) -> LeastSquaresState:
    """Learn rows, whitened by a T that is faded already, and the ridge of `at`: fewer than about p/4 of both."""
    if at is None:
        return potter_or_block(state, F, E)
    if F.shape[1] == 1 and count_of(at) < ROW_LIMIT:
        state = potter(state, F[:, 0], E[0])
        F, E = F[:, :0], E[:0]
    f, e, left = ridge_rows(state, state.ridge_left, at)
    return potter_or_block(state, torch.cat([F, f], 1), torch.cat([E, e]))._replace(ridge_left=left)


def potter_or_block(state: LeastSquaresState, F: Tensor, E: Tensor) -> LeastSquaresState:
    """Equations 17 and 18 for one row or several."""
    return potter(state, F[:, 0], E[0]) if F.shape[1] == 1 else block(state, F, E)


def add_by_qr(R: Tensor, Z: Tensor, Phi: Tensor, Y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """R₁, Z₁ with R₁ᵀR₁ = RᵀR + ΦᵀΦ and R₁ᵀZ₁ = RᵀZ + ΦᵀY, and the squares (m,) that remain of Z and Y beside Z₁.

    An orthogonal factor of the rows [R Z; Φ Y] squares nothing. Its rounding is relative to each column, so features
    may have any units and offsets. W = (R₁⁻¹Z₁)ᵀ minimizes |RWᵀ - Z|² + |ΦWᵀ - Y|².
    """
    p, rest = len(R), Z.new_zeros(Z.shape[1])
    for i in range(0, max(len(Phi), 1), max(p, 1024)):
        rows = slice(i, i + max(p, 1024))
        joined = torch.cat([torch.cat([Phi[rows], Y[rows]], 1), torch.cat([R, Z], 1)])
        factor = torch.linalg.qr(joined, mode="r").R
        R, Z, rest = factor[:p, :p], factor[:p, p:], rest + factor[p:, p:].square().sum(0)
    return R, Z, rest


def root_of(R: Tensor) -> Tensor:
    """T with TᵀT = (RᵀR)⁻¹ for an upper R."""
    return triangular(R.T.contiguous(), identity(len(R), R)).contiguous()


def block_by_qr(state: LeastSquaresState, Phi: Tensor, Y: Tensor, at: Coordinates | None = None) -> LeastSquaresState:
    """Learn any number of rows of any size, and the ridge of `at`: about 4p³ + 2np² operations. T is faded already."""
    left, ridge = state.ridge_left, state.ridge
    if at is not None:
        scale = lacking(left, ridge, at).sqrt()
        rows = scale[:, None] * identity(len(ridge), Phi)[at]
        Phi, Y = torch.cat([Phi, rows]), torch.cat([Y, (scale * state.prior[:, at]).T])
        left = restored(left, ridge, at)
    R = torch.linalg.inv(state.T).T
    R, Z, rise = add_by_qr(R, R @ state.W.T, Phi, Y)
    W = triangular(R, Z, upper=True).T.contiguous()
    return state.with_root(root_of(R))._replace(W=W, energy=state.energy + rise, ridge_left=left)


def gathers(p: int, n: int, lam: float) -> bool:
    """Whether an update of n rows is summed in H and leaves T as it is."""
    count = due(p, lam)
    return 4 * (n + count) >= p and not (n == 1 and count < ROW_LIMIT)


def is_block(state: LeastSquaresState, n: int, lam: float) -> bool:
    """Whether an update of n rows changes a T that has nothing to absorb, several rows at once."""
    p = len(state.T)
    return state.H is None and not gathers(p, n, lam) and (n > 1 or due(p, lam) >= ROW_LIMIT)


def limit_of(p: int, n: int, lam: float, dtype: torch.dtype) -> float:
    """The squared size of F above which `attempt` would lose digits that another route keeps."""
    if dtype != torch.float64:
        return math.sqrt(PRODUCT_LIMIT)  # float32 has half of the digits
    return BASIS_LIMIT if lam == 1.0 and n > 1 and not gathers(p, n, lam) else PRODUCT_LIMIT


def attempt(
    state: LeastSquaresState,
    Phi: Tensor,
    Y: Tensor,
    F: Tensor,
    E: Tensor,
    lam: float,
    cursor: int | Tensor,
) -> LeastSquaresState:
    """Learn Φ, Y by the route that suits their number, for |F|² up to `limit_of`."""
    n, p = Phi.shape
    count, gathered, scale = due(p, lam), gathers(p, n, lam), lam**-0.5
    at = coordinates(p, count, cursor, F.device) if count else None
    if not (gathered or is_block(state, n, lam)):
        faded = fade(state, lam)
        if faded is not state:
            F, E = whiten(faded, Phi, Y)
        return learn_rows(faded, F, E, at)
    left = state.ridge_left
    if at is not None:
        f, e, left = ridge_rows(state, lam * left, at)
        F, E = torch.cat([F, f], 1), torch.cat([E, e])
    if gathered:
        return gather(state, F, E, lam)._replace(ridge_left=left)
    if at is not None:  # rows of zeros beside them, because products of odd sizes are slow on a GPU
        padding = -F.shape[1] % 16 if F.is_cuda and F.shape[1] > 16 else 0
        F, E = functional.pad(F * scale, (0, padding)), functional.pad(E, (0, 0, 0, padding))
    return block(state._replace(energy=lam * state.energy), F, E, scale)._replace(ridge_left=left)


def advance(counters: Counters, p: int, n: int, samples: float, lam: float, size: float) -> Counters:
    """The counters after an update by `attempt` whose |F|² was `size`."""
    steps, seen, cursor, pending, growth = counters.tolist()
    pending, growth = (pending + 1, lam * growth + size) if gathers(p, n, lam) else (0.0, 0.0)
    return np.array([steps + 1, lam * seen + samples, next_cursor(cursor, due(p, lam), p), pending, growth])


def must_absorb(counters: Counters, p: int, lam: float, dtype: torch.dtype) -> bool:
    """Whether H has gathered so much that T must absorb it."""
    pending, growth = counters[PENDING:].tolist()
    limit = GROWTH_LIMIT if dtype == torch.float64 else GROWTH_LIMIT**0.5
    return bool(pending and (lam**pending * limit < 1 or growth > limit * p or pending >= PENDING_LIMIT))


def learn(
    state: LeastSquaresState, Phi: Tensor, Y: Tensor, samples: float, lam: float, head: torch.dtype
) -> LeastSquaresState | None:
    """Learn Φ, Y by the method for their number and size; None if a value is not finite, or W in the dtype of the head.

    The host reads the values once, afterwards.
    """
    n, p = Phi.shape
    cursor, dtype = int(state.counters[CURSOR]), state.T.dtype
    F, E = whiten(state, Phi, Y)
    new = attempt(state, Phi, Y, F, E, lam, cursor)
    norms = [torch.linalg.vector_norm(part) for part in (F, E, new.W.to(head).to(dtype))]
    size, error, weight = torch.stack(norms).tolist()
    size *= size
    counters = advance(state.counters, p, n, samples, lam, size)
    new = new._replace(counters=counters)
    if size > limit_of(p, n, lam, dtype) and math.isfinite(size + error):
        new = fade(state, lam)._replace(counters=counters)  # without the first result: never three T in memory
        if size > PRODUCT_LIMIT or dtype != torch.float64:
            count = due(p, lam)
            new = block_by_qr(new, Phi, Y, coordinates(p, count, cursor, F.device) if count else None)
        else:
            new = block_by_basis(new, *whiten(new, Phi, Y))
        weight = float(torch.linalg.vector_norm(new.W.to(head).to(dtype))) + float(new.T.sum())
    if not math.isfinite(size + error * error + weight):
        return None
    return fade(new, 1.0) if must_absorb(new.counters, p, lam, dtype) else new
