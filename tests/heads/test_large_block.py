"""A block that changes T in place: what `least_squares` makes of the same rows, and the normal equations."""

from __future__ import annotations

import pytest
import torch

from sepsa.heads.backends.large_block import learn_block, learn_ridge
from sepsa.heads.math import least_squares
from sepsa.heads.math.ridge import coordinates, due


def a_state(p, m, size, seed=0):
    """A state that some rows have taught, part of its ridge faded, and what is needed to teach it more."""
    g = torch.Generator().manual_seed(seed)
    ridge = 0.1 + torch.rand(p, generator=g, dtype=torch.float64)
    prior = torch.randn(m, p, generator=g, dtype=torch.float64)
    state = least_squares.start(prior, ridge)
    Phi, Y = (torch.randn(5, k, generator=g, dtype=torch.float64) for k in (p, m))
    state = least_squares.block(state, *least_squares.whiten(state, Phi, Y))
    state = state._replace(ridge_left=state.ridge_left * torch.rand(p, generator=g, dtype=torch.float64))
    return state, size * torch.randn(7, p, generator=g, dtype=torch.float64), prior, ridge


@pytest.mark.parametrize("size", [0.1, 1.0, 1e3])
@pytest.mark.parametrize(("lam", "count"), [(1.0, 0), (0.99, 1), (0.9, 6), (0.5, 20)])
def test_a_block_in_place_satisfies_the_normal_equations(lam, count, size):
    p, m = 40, 3
    state, Phi, prior, ridge = a_state(p, m, size)
    Y = Phi @ torch.randn(p, m, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    at = coordinates(p, count, 37, Phi.device) if count else None
    given = torch.zeros(p, dtype=torch.float64)
    if count:
        given[at] = (ridge - lam * state.ridge_left)[at]
    before = state.map(torch.clone)
    restored = learn_ridge(state, lam, ridge, prior, at) if count else None
    new = learn_block(state, Phi, *least_squares.whiten(state, Phi, Y), lam, restored, None)
    A = lam * torch.linalg.inv(before.T.T @ before.T)
    curvature = A + Phi.T @ Phi + torch.diag(given)
    W = torch.linalg.solve(curvature, A @ before.W.T + Phi.T @ Y + given[:, None] * prior.T).T
    change, miss, pull = W - before.W, Y - Phi @ W.T, W - prior
    energy = lam * before.energy + (change @ A * change).sum(1) + miss.square().sum(0) + (given * pull**2).sum(1)
    assert new.T is state.T
    torch.testing.assert_close(new.T.T @ new.T @ curvature, torch.eye(p, dtype=torch.float64), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(new.W, W, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(new.energy, energy, rtol=1e-6, atol=1e-6)
    left = lam * before.ridge_left
    if count:
        left[at] = ridge[at]
    torch.testing.assert_close(new.ridge_left, left)


@pytest.mark.parametrize("lam", [1.0, 0.99, 0.95])
def test_a_block_in_place_is_the_block_of_torch(lam):
    p, m = 60, 2
    state, Phi, prior, ridge = a_state(p, m, 1.0)
    Y = torch.randn(len(Phi), m, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    assert least_squares.is_block(state, len(Phi), lam)
    F, E = least_squares.whiten(state, Phi, Y)
    theirs = least_squares.attempt(state, Phi, Y, F, E, lam, ridge, prior, cursor=3)
    count = due(p, lam)
    at = coordinates(p, count, torch.tensor(3), Phi.device) if count else None
    mine = learn_block(state, Phi, F, E, lam, learn_ridge(state, lam, ridge, prior, at) if count else None, None)
    torch.testing.assert_close(mine.T.T @ mine.T, theirs.T.T @ theirs.T, rtol=1e-10, atol=1e-12)
    for name in ("W", "energy", "ridge_left"):
        torch.testing.assert_close(getattr(mine, name), getattr(theirs, name), rtol=1e-10, atol=1e-12)
