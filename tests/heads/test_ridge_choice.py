"""Classifying heads that choose their ridge by losses at samples before they learn them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sepsa import LogisticNewton, SoftmaxNewton
from sepsa.heads.base import ridge_choice
from sepsa.heads.math.cross_entropy import with_ridge

P, K = 12, 4


def linear(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(P, K, dtype=torch.float64)


def batches(count, n=32, signal=1.0, seed=0):
    """Features of size 1, and labels of a linear law whose logits have the size of `signal`."""
    generator = torch.Generator().manual_seed(seed)
    truth = signal * torch.randn(K, P, generator=generator, dtype=torch.float64)
    for _ in range(count):
        x = torch.randn(n, P, generator=generator, dtype=torch.float64)
        gumbel = -torch.log(-torch.log(torch.rand(n, K, generator=generator, dtype=torch.float64)))
        yield x, (x @ truth.T + gumbel).argmax(1)


def yes(y):
    return nn.functional.one_hot(y, K).double()


@pytest.mark.parametrize("kind", [SoftmaxNewton, LogisticNewton])
def test_candidates_of_the_first_comparison_equal_heads_of_their_ridge(kind):
    auto = kind(ridge="auto").bind(linear())
    fixed = {r: kind(ridge=r).bind(linear()) for r in ridge_choice.GRID}
    for x, y in batches(10):
        y = y if kind is SoftmaxNewton else yes(y)
        auto.update(x, y)
        for head in fixed.values():
            head.update(x, y)
    choice = auto._choice
    assert sorted(choice.ridges) == sorted(ridge_choice.GRID)
    for ridge, other in zip(choice.ridges, choice.others, strict=True):
        state = auto._state if other is None else other
        torch.testing.assert_close(state.W, fixed[ridge]._state.W, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(state.T.mT @ state.T, fixed[ridge].covariance(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("signal", "low", "high"), [(0.0, 100.0, 1e6), (6.0, 1e-4, 1.0)])
def test_noise_wants_a_large_ridge_and_a_clear_signal_a_small_one(signal, low, high):
    head = linear()
    nn.init.zeros_(head.weight)
    solver = SoftmaxNewton(ridge="auto").bind(head)
    for x, y in batches(40, signal=signal):
        solver.update(x, y)
    assert low <= solver.ridge <= high
    assert solver.chosen[-1].ridge == solver.ridge
    assert solver.chosen[0] == (0, 1.0, ridge_choice.START)


@pytest.mark.parametrize("kind", [SoftmaxNewton, LogisticNewton])
def test_a_raised_ridge_is_that_of_a_head_that_had_it_from_the_start_and_stays(kind):
    """Curvature and ridge add up, so that A gains the difference; no later comparison changes the ridge."""
    auto = kind(ridge="auto").bind(linear())
    stream = [(x, y if kind is SoftmaxNewton else yes(y)) for x, y in batches(80, signal=6.0)]
    for x, y in stream[:50]:
        auto.update(x, y)
    before, old = auto.covariance(), auto.ridge
    auto.raise_ridge(100.0)
    bias = auto._state.ridge.shape[-1] - 1
    factor = max(K / 2, 1) if kind is SoftmaxNewton else 1
    gain = (torch.linalg.inv(auto.covariance()) - torch.linalg.inv(before)).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(
        gain[..., :bias], torch.full_like(gain[..., :bias], (100.0 - old) * factor), rtol=0.5, atol=0
    )
    again = kind(ridge="auto").bind(copy.deepcopy(auto.linear))
    again.load_state_dict(auto.state_dict())
    for x, y in stream[50:]:
        auto.update(x, y)
        again.update(x, y)
    assert auto.ridge == again.ridge == auto.chosen[-1].ridge == 100.0
    torch.testing.assert_close(again.linear.weight, auto.linear.weight, rtol=0, atol=0)
    with pytest.raises(ValueError, match="at least the present one, 100, got 50"):
        auto.raise_ridge(50.0)


def test_ridges_follow_the_units_of_the_features():
    small, large = (SoftmaxNewton(ridge="auto", bias_ridge="ridge").bind(linear()) for _ in range(2))
    with torch.no_grad():
        large.linear.weight.mul_(1e-3)
    for x, y in batches(40):
        small.update(x, y)
        large.update(1e3 * x, y)
    assert large.ridge == pytest.approx(1e6 * small.ridge)


def test_between_comparisons_an_update_is_that_of_the_chosen_ridge():
    solver = SoftmaxNewton(ridge="auto").bind(linear())
    stream = list(batches(80))
    for x, y in stream[:40]:
        solver.update(x, y)
    assert solver._choice.ridges == ()
    plain = SoftmaxNewton(ridge=solver.ridge).bind(linear())
    plain.load_state_dict({key: value for key, value in solver.state_dict().items() if key != "choice"})
    with torch.no_grad():
        plain.linear.weight.copy_(solver.linear.weight)
        plain.linear.bias.copy_(solver.linear.bias)
    for x, y in stream[40:60]:
        solver.update(x, y)
        plain.update(x, y)
    assert torch.equal(solver.linear.weight, plain.linear.weight)
    for x, y in stream[60:66]:
        solver.update(x, y)
    assert solver._choice.started == 64
    assert len(solver._choice.ridges) == 3


@pytest.mark.parametrize("updates", [0, 3, 40, 66])
@pytest.mark.parametrize("kind", [SoftmaxNewton, LogisticNewton])
def test_a_saved_choice_goes_on_in_the_same_bits(kind, updates):
    head = kind(ridge="auto").bind(linear())
    stream = [(x, y if kind is SoftmaxNewton else yes(y)) for x, y in batches(80)]
    for x, y in stream[:updates]:
        head.update(x, y)
    other = kind(ridge="auto").bind(copy.deepcopy(head.linear))
    other.load_state_dict(copy.deepcopy(head.state_dict()))
    for x, y in stream[updates:]:
        head.update(x, y)
        other.update(x, y)
    assert torch.equal(head.linear.weight, other.linear.weight)
    assert head.chosen == other.chosen
    assert head._choice.losses == other._choice.losses


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("scale", -1.0),
        ("started", -1),
        ("active", 9),
        ("ridges", [1.0]),
        ("losses", [float("nan")] * 5),
        ("others", [None] * 5),
        ("history", [[0]]),
    ],
)
def test_a_damaged_choice_is_refused_whole(entry, value):
    solver = SoftmaxNewton(ridge="auto").bind(linear())
    for x, y in batches(3):
        solver.update(x, y)
    state, before = copy.deepcopy(solver.state_dict()), solver._choice
    state["choice"][entry] = value
    with pytest.raises(ValueError, match="choice"):
        solver.load_state_dict(state)
    assert solver._choice is before


def test_another_ridge_changes_the_curvature_by_the_difference_alone():
    solver = SoftmaxNewton(ridge=2.0, bias_ridge="ridge").bind(linear())
    for x, y in batches(5):
        solver.update(x, y)
    state = solver._state
    A = torch.linalg.inv(state.T.T @ state.T)
    for factor in (0.2, 5.0):
        other = with_ridge(state, factor * state.ridge)
        expected = A + torch.diag((factor - 1) * state.ridge_left)
        torch.testing.assert_close(torch.linalg.inv(other.T.T @ other.T), expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(other.ridge_left, factor * state.ridge_left)


def test_a_ridge_that_cannot_be_taken_away_exactly_is_no_candidate():
    solver = SoftmaxNewton(ridge=1e-3).bind(linear())
    for x, y in batches(3):
        solver.update(x + 1e7, y)
    assert with_ridge(solver._state, solver._state.ridge / 5) is None


def test_a_captured_step_says_to_fix_the_ridge():
    solver = SoftmaxNewton(ridge="auto").bind(linear())
    with pytest.raises(ValueError, match=r"take SoftmaxNewton\(ridge=10\)"):
        solver.prepare_capture()
    assert repr(solver).startswith('SoftmaxNewton(ridge="auto"')
