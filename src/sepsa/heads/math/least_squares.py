"""The mathematics of recursive least squares in square-root form: pure functions, new arrays out, nothing mutated.

Symbols: Φ (n, p) features, with a last column of ones where the head has a bias; Y (n, m) targets; W (m, p) the head;
A (p, p) the curvature, B = A⁻¹; λ the forgetting; F = TΦᵀ (p, n), the rows as T sees them; E = Y - ΦWᵀ. The state is
Z = [T; W] and H with

    B = TᵀH⁻¹T,

where H is the identity, so that T is a square root of B, except between large blocks, which gather in H while T rests.
All but `learn`, which looks at their results, run on the host and inside a CUDA graph alike: they look at no number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

# Above this squared size the product FFᵀ swallows the identity it is added to; the QR route does not.
PRODUCT_LIMIT = 1e10
# Above this one, at forgetting 1, a block keeps its digits by a basis: `andrews` leaves about eps size^1.5 of the
# curvature wrong, and `unlearn` multiplies that where little remains. With more samples the size falls under it.
BASIS_LIMIT = 1e3
# H is absorbed into T when it has grown by this factor, or fallen by its inverse, or after so many updates.
GROWTH_LIMIT = 1e6
PENDING_LIMIT = 256
# Which coordinates get their ridge back: a slice, wherever they follow each other, is no copy and no launch.
Coordinates: TypeAlias = Tensor | slice
# Below so many rows of the ridge, one after the other costs less than one block.
ROW_LIMIT = 4

# Places in a head's counters: updates, samples less what was forgotten of them, the coordinate whose turn it is to get
# its ridge back, the updates gathered in H, and the trace that they added to it.
STEPS, SAMPLES, CURSOR, PENDING, GROWTH = range(5)


class Root(NamedTuple):
    """What an update changes beside its counters. H is None where it is the identity."""

    T: Tensor  # (p, p)
    W: Tensor  # (m, p)
    H: Tensor | None  # (p, p)
    energy: Tensor  # (m,): the objective at its minimum
    left: Tensor  # (p,): the ridge that each coordinate still has
    whole: bool = False  # whether that is known to be all of it
    gram: Tensor | None = None  # T diag(ridge) Tᵀ, where it is known

    def map(self, change: Callable[[Tensor], Tensor]) -> Root:
        """The same with every tensor changed."""
        T, W, H, energy, left, whole, _ = self
        return Root(change(T), change(W), None if H is None else change(H), change(energy), change(left), whole)


def start(prior: Tensor, ridge: Tensor) -> Root:
    """Before any data: A = diag ridge (p,), and W the prior (m, p)."""
    T, energy = torch.diag(1 / ridge.sqrt()), prior.new_zeros(len(prior))
    return Root(T, prior.clone(), None, energy, ridge.clone(), whole=True)


def rotation(p: int, forgetting: float) -> int:
    """How many of p coordinates get their ridge back in turn, so that none ever falls under half of it."""
    return 0 if forgetting == 1.0 else min(p, math.ceil(-p * math.log2(forgetting)))


def restored(p: int, n: int, forgetting: float) -> int:
    """How many of p coordinates do in an update of n samples: all where H gathers them, at no further cost."""
    return p if forgetting < 1.0 and 4 * n >= p and n > 1 else rotation(p, forgetting)


def whiten(root: Root, Phi: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
    """F = TΦᵀ (p, n) and the residuals E = Y - ΦWᵀ (n, m)."""
    return root.T @ Phi.T, torch.addmm(Y, Phi, root.W.T, alpha=-1)


def potter(root: Root, f: Tensor, e: Tensor) -> Root:
    """Equations 17 and 18 for one row (Potter): f = Th (p,), e = y - Wh (m,).

    T <- (I - βffᵀ)T gives TᵀT = B - BhhᵀB/(1 + hᵀBh) for β = 1/(g + √g), g = 1 + fᵀf.
    """
    g = 1 + f @ f
    u = f @ root.T  # Bh
    e_over_g = e / g
    T = torch.addr(root.T, f * (-1 / (g + g.sqrt())), u)  # (18)
    W = torch.addr(root.W, e_over_g, u)  # (17): B_k h = Bh/g
    return root._replace(T=T, W=W, energy=root.energy + e * e_over_g, gram=None)


def factor(F: Tensor, large: bool = False) -> Tensor:
    """C with CCᵀ = I + FᵀF; `large` rows get it from a QR, which does not square them."""
    one = torch.eye(F.shape[1], dtype=F.dtype, device=F.device)
    if large:
        R: Tensor = torch.linalg.qr(torch.cat([one, F]), mode="r").R
        return (R * R.diagonal().sign()[:, None]).T.contiguous()
    C: Tensor = torch.linalg.cholesky_ex(torch.addmm(one, F.T, F)).L
    return C


def inverses(C: Tensor) -> tuple[Tensor, Tensor]:
    """C⁻¹ and (C + I)⁻ᵀC⁻¹ for a lower C."""
    one = torch.eye(len(C), dtype=C.dtype, device=C.device)
    inverse = torch.linalg.solve_triangular(C, one, upper=False)
    return inverse, torch.linalg.solve_triangular((C + one).T, inverse, upper=True)


def andrews(T: Tensor, F: Tensor, U: Tensor, C: Tensor, scale: float = 1.0) -> Tensor:
    """T <- scale T - F(C + I)⁻ᵀC⁻¹U with U = scale FᵀT and CCᵀ = I + FᵀF (Andrews).

    F is that of scale T, and TᵀT is then (A + ΦᵀΦ)⁻¹ for the A of scale T.
    """
    r = len(C)
    if U.shape[1] >= 2 * r:  # products with an inverse cost less than solving for so many columns
        left, right = F @ inverses(C)[1], U
    else:
        V = torch.linalg.solve_triangular(C, U, upper=False)
        one = torch.eye(r, dtype=C.dtype, device=C.device)
        left, right = F, torch.linalg.solve_triangular((C + one).T, V, upper=True)
    return torch.addmm(T, left, right, beta=scale, alpha=-1)


def block(root: Root, F: Tensor, E: Tensor, scale: float = 1.0, large: bool = False) -> Root:
    """Equations 17 and 18 for r rows at once: 6rp² operations in three products. F is that of scale T."""
    C = factor(F, large)
    U = F.T @ root.T
    if scale != 1.0:
        U *= scale
    V = torch.linalg.solve_triangular(C, E, upper=False)
    W = torch.addmm(root.W, torch.linalg.solve_triangular(C.T, V, upper=True).T, U)
    energy = root.energy + V.square().sum(0)
    return root._replace(T=andrews(root.T, F, U, C, scale), W=W, energy=energy, gram=None)


def block_by_basis(root: Root, F: Tensor, E: Tensor) -> Root:
    """The same for at most p rows, however large and parallel, in an orthonormal basis of them.

    F = QR and LLᵀ = I + RRᵀ give T <- T + Q(L⁻¹ - I)QᵀT, in which no factor is larger than T.
    """
    Q, R = torch.linalg.qr(F)
    L, U = factor(R.T, large=True), Q.T @ root.T
    S = torch.linalg.solve_triangular(L, U, upper=False)
    W = torch.addmm(root.W, torch.linalg.solve_triangular(L, R @ E, upper=False).T, S)
    V = torch.linalg.solve_triangular(factor(R, large=True), E, upper=False)
    energy = root.energy + V.square().sum(0)
    return root._replace(T=torch.addmm(root.T, Q, S - U), W=W, energy=energy, gram=None)


def gather(root: Root, F: Tensor, E: Tensor, lam: float, ridge: Tensor, at: Coordinates | None, prior: Tensor) -> Root:
    """The same for about p rows or more, where T rests and only H grows: 4rp² + p³/3 operations.

    H <- λH + T diag(q) Tᵀ + FFᵀ, with q the ridge that the coordinates `at` are given back, and W <- W + VᵀT with
    V = H⁻¹(FE + T diag(q) (prior - W)ᵀ), because W was the minimizer before.
    """
    T, W, H, energy, left, whole, gram = root
    D, rise = F @ E, (E * E).sum(0)
    rest = torch.eye(len(T), dtype=T.dtype, device=T.device) if H is None else H
    if at is None:
        H = torch.addmm(rest, F, F.T)
    else:
        all_of_them = count_of(at) == len(T)
        if whole and all_of_them:
            q = (1 - lam) * ridge
            gram = (T * ridge) @ T.T if gram is None else gram
            H = torch.addmm(gram, F, F.T, beta=1 - lam)
        else:
            left = lam * left
            q = torch.zeros_like(left)
            q[at] = lacking(left, ridge, at)
            H = ((T * q) @ T.T).addmm_(F, F.T)
            left[at] = ridge[at]
        whole = all_of_them
        H.add_(rest, alpha=lam)
        scale = q.sqrt()
        pull = (prior - W).mul_(scale)
        D = torch.addmm(D, T * scale, pull.T)
        rise = rise + pull.square().sum(1)
        energy = lam * energy
    V = torch.cholesky_solve(D, torch.linalg.cholesky_ex(H).L)
    return Root(T, torch.addmm(W, V.T, T), H, energy + rise - (D * V).sum(0), left, whole, gram)


def square_root(root: Root) -> Tensor:
    """T with TᵀT = B, whatever is gathered in H."""
    if root.H is None:
        return root.T
    T: Tensor = torch.linalg.solve_triangular(torch.linalg.cholesky_ex(root.H).L, root.T, upper=False)
    return T.contiguous()  # so that a copy has the same bits


def fade(root: Root, lam: float | Tensor) -> Root:
    """A <- λA, with H = I afterwards."""
    if root.H is None and isinstance(lam, float) and lam == 1.0:
        return root
    whole = root.whole and isinstance(lam, float) and lam == 1.0
    return Root(square_root(root) / lam**0.5, root.W, None, root.energy * lam, root.left * lam, whole)


def turn(p: int, count: int, cursor: int | Tensor, device: torch.device) -> Tensor:
    """The coordinates whose turn it is to get their ridge back."""
    return (cursor + torch.arange(count, device=device)) % p


def coordinates(p: int, count: int, cursor: int | Tensor, device: torch.device) -> Coordinates:
    """The same without a launch where the host knows that they follow each other."""
    if count == p:
        return slice(0, p)
    if isinstance(cursor, int) and cursor + count <= p:
        return slice(cursor, cursor + count)
    return turn(p, count, cursor, device)


def count_of(at: Coordinates) -> int:
    return at.stop - at.start if isinstance(at, slice) else len(at)


def lacking(left: Tensor, ridge: Tensor, at: Coordinates) -> Tensor:
    """q (c,): the ridge that the coordinates `at` lack."""
    return (ridge[at] - left[at]).clamp(min=0)


def ridge_rows(root: Root, q: Tensor, at: Coordinates, prior: Tensor) -> tuple[Tensor, Tensor]:
    """F (p, c) and E (c, m) of rows √q_j e_j with the prior's targets, which give the coordinates `at` their ridge."""
    scale = q.sqrt()
    return root.T[:, at] * scale, ((prior[:, at] - root.W[:, at]) * scale).T


def restore(left: Tensor, ridge: Tensor, at: Coordinates) -> Tensor:
    """What is left of the ridge, with all of it at the coordinates `at`."""
    left = left.clone()
    left[at] = ridge[at]
    return left


def learn_rows(root: Root, F: Tensor, E: Tensor, ridge: Tensor, at: Coordinates | None, prior: Tensor) -> Root:
    """Rows that T sees already faded, and the ridge of the coordinates `at`: fewer than about p/4 of both."""
    if at is None:
        return potter(root, F[:, 0], E[0]) if F.shape[1] == 1 else block(root, F, E)
    q, count = lacking(root.left, ridge, at), count_of(at)
    if F.shape[1] == 1 and count < ROW_LIMIT:
        root = potter(root, F[:, 0], E[0])
        for i in range(count):
            one = slice(at.start + i, at.start + i + 1) if isinstance(at, slice) else at[i : i + 1]
            f, e = ridge_rows(root, q[i : i + 1], one, prior)
            root = potter(root, f[:, 0], e[0])
    else:
        f, e = ridge_rows(root, q, at, prior)
        root = block(root, torch.cat([F, f], 1), torch.cat([E, e]))
    return root._replace(left=restore(root.left, ridge, at))


def learn_block(
    root: Root, F: Tensor, E: Tensor, lam: float, ridge: Tensor, at: Coordinates | None, prior: Tensor
) -> Root:
    """The same for several rows of a T that is not yet faded, without a copy of it."""
    if at is None:
        return block(root, F, E)
    scale, faded = lam**-0.5, lam * root.left
    f, e = ridge_rows(root, lacking(faded, ridge, at), at, prior)
    r = F.shape[1] + f.shape[1]
    padding = -r % 16 if F.is_cuda and r > 16 else 0  # rows of zeros, because products of odd sizes are slow there
    F = torch.cat([F, f, F.new_zeros(len(F), padding)], 1).mul_(scale)
    E = torch.cat([E, e, E.new_zeros(padding, E.shape[1])])
    new = block(root._replace(energy=lam * root.energy), F, E, scale)
    faded[at] = ridge[at]
    return new._replace(left=faded, whole=False)


def learn_large(root: Root, Phi: Tensor, Y: Tensor, ridge: Tensor, at: Coordinates | None, prior: Tensor) -> Root:
    """Rows of any number, faded already, whose squares would swallow the identity; then the ridge."""
    p = len(root.T)
    for i in range(0, len(Phi), p):
        root = block(root, *whiten(root, Phi[i : i + p], Y[i : i + p]), large=True)
    if at is None:
        return root
    q = lacking(root.left, ridge, at)
    return block(root, *ridge_rows(root, q, at, prior))._replace(left=restore(root.left, ridge, at))


def gathers(p: int, n: int, lam: float) -> bool:
    """Whether an update of n rows leaves T at rest, and how far H grows is to be counted."""
    count = restored(p, n, lam)
    return 4 * (n + count) >= p and not (n == 1 and count < ROW_LIMIT)


def is_block(root: Root, n: int, lam: float) -> bool:
    """Whether an update of n rows changes a T that has nothing to absorb, several rows at once."""
    p = len(root.T)
    return root.H is None and not gathers(p, n, lam) and (n > 1 or restored(p, n, lam) >= ROW_LIMIT)


def limit_of(p: int, n: int, lam: float, dtype: torch.dtype) -> float:
    """Above which squared size of F `attempt` would lose digits that another route keeps."""
    if dtype != torch.float64:
        return math.sqrt(PRODUCT_LIMIT)  # float32 has half of the digits
    return BASIS_LIMIT if lam == 1.0 and n > 1 and not gathers(p, n, lam) else PRODUCT_LIMIT


def attempt(
    root: Root, Phi: Tensor, Y: Tensor, F: Tensor, E: Tensor, lam: float, ridge: Tensor, prior: Tensor,
    cursor: int | Tensor,
) -> Root:  # fmt: skip
    """Learn Φ, Y by the route that suits their number, wherever |F|² is below the `limit_of` it."""
    n, p = Phi.shape
    count = restored(p, n, lam)
    at = coordinates(p, count, cursor, F.device) if count else None
    if gathers(p, n, lam):
        return gather(root, F, E, lam, ridge, at, prior)
    if is_block(root, n, lam):
        return learn_block(root, F, E, lam, ridge, at, prior)
    faded = fade(root, lam)
    if faded is not root:
        F, E = whiten(faded, Phi, Y)
    return learn_rows(faded, F, E, ridge, at, prior)


def advance_counters(counters: list[float], p: int, n: int, samples: float, lam: float, size: float) -> list[float]:
    """The counters after an update by `attempt` whose |F|² was `size`."""
    steps, seen, cursor, pending, growth = counters
    pending, growth = (pending + 1, lam * growth + size) if gathers(p, n, lam) else (0.0, 0.0)
    return [steps + 1, lam * seen + samples, (cursor + restored(p, n, lam)) % p, pending, growth]


def must_absorb(counters: list[float], p: int, lam: float, dtype: torch.dtype) -> bool:
    """Whether H has gathered so much that T must absorb it."""
    pending, growth = counters[PENDING], counters[GROWTH]
    limit = GROWTH_LIMIT if dtype == torch.float64 else GROWTH_LIMIT**0.5
    return lam**pending * limit < 1 or growth > limit * p or pending >= PENDING_LIMIT


def learn(
    root: Root,
    counters: list[float],
    Phi: Tensor,
    Y: Tensor,
    samples: float,
    lam: float,
    ridge: Tensor,
    prior: Tensor,
    head: torch.dtype,
) -> tuple[Root, list[float], Tensor] | None:
    """Learn Φ, Y by the route that suits their number and size; None where something is not finite.

    Returns the state, its counters, and W in the dtype of the head. The host looks at the numbers once, afterwards.
    """
    n, p = Phi.shape
    cursor = int(counters[CURSOR])
    F, E = whiten(root, Phi, Y)
    new = attempt(root, Phi, Y, F, E, lam, ridge, prior, cursor)
    W = new.W.to(head)
    norms = [torch.linalg.vector_norm(part) for part in (F, E, W.to(F.dtype))]
    size, error, weight = torch.stack(norms).tolist()
    size *= size
    by_attempt = True
    if size > limit_of(p, n, lam, F.dtype) and math.isfinite(size + error):
        by_attempt = False
        new = fade(root, lam)  # what the first route made goes, so that no third T is there at once
        if size > PRODUCT_LIMIT or F.dtype != torch.float64:
            count = restored(p, n, lam)
            at = coordinates(p, count, cursor, F.device) if count else None
            new = learn_large(new, Phi, Y, ridge, at, prior)
        else:
            new = block_by_basis(new, *whiten(new, Phi, Y))
        W = new.W.to(head)
        weight = float(torch.linalg.vector_norm(W.to(F.dtype))) + float(new.T.sum())
    if not math.isfinite(size + error * error + weight):
        return None
    counters = advance_counters(counters, p, n, samples, lam, size)
    if not by_attempt:
        counters[PENDING] = counters[GROWTH] = 0.0
    elif counters[PENDING] and must_absorb(counters, p, lam, F.dtype):
        new, counters[PENDING], counters[GROWTH] = fade(new, 1.0), 0.0, 0.0
    return new, counters, W
