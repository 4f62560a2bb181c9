"""A block that changes T in place: what `least_squares` makes of the same rows, which test_rls.py compares."""

import pytest
import torch

from sepsa.heads.base.ridge import coordinates, due
from sepsa.heads.least_squares import math as least_squares
from sepsa.heads.least_squares.large_block import learn_block, learn_ridge


def a_state(p, m, size, seed=0):
    """A state that some rows have taught, part of its ridge faded, and what is needed to teach it more."""
    g = torch.Generator().manual_seed(seed)
    ridge = 0.1 + torch.rand(p, generator=g, dtype=torch.float64)
    prior = torch.randn(m, p, generator=g, dtype=torch.float64)
    state = least_squares.start(prior, ridge)
    Phi, Y = (torch.randn(5, k, generator=g, dtype=torch.float64) for k in (p, m))
    state = least_squares.block(state, *least_squares.whiten(state, Phi, Y))
    state = state._replace(ridge_left=state.ridge_left * torch.rand(p, generator=g, dtype=torch.float64))
    return state, size * torch.randn(7, p, generator=g, dtype=torch.float64)


@pytest.mark.parametrize(("size", "close"), [(0.1, 1e-10), (1.0, 1e-10), (1e3, 1e-7)])
@pytest.mark.parametrize("lam", [1.0, 0.99, 0.93])
def test_a_block_in_place_is_the_block_of_torch(lam, size, close):
    p, m = 60, 2
    state, Phi = a_state(p, m, size)
    Y = Phi @ torch.randn(p, m, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    assert least_squares.is_block(state, len(Phi), lam)
    F, E = least_squares.whiten(state, Phi, Y)
    theirs = least_squares.attempt(state.map(torch.clone), Phi, Y, F, E, lam, cursor=3)
    count = due(p, lam)
    at = coordinates(p, count, torch.tensor(3), Phi.device) if count else None
    mine = learn_block(state, Phi, F, E, lam, learn_ridge(state, lam, at) if count else None, None)
    assert mine.T is state.T
    torch.testing.assert_close(mine.T.T @ mine.T, theirs.T.T @ theirs.T, rtol=close, atol=close / 100)
    for name in ("W", "energy", "ridge_left"):
        torch.testing.assert_close(getattr(mine, name), getattr(theirs, name), rtol=close, atol=close / 100)
