"""A head that anneals with the body's learning rate: the laws, and that a rate which does not fall changes nothing."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from reference import annealed_ratios, annealed_rls, ridges, weights, with_ones
from sepsa import RLS, LogisticNewton, OnlineLBFGS, PerOutput, SelfTuning, SepSA, SoftmaxNewton
from sepsa.heads.math.anneal import FLOOR
from sepsa.observe.rates import Rates, ratio_of, seen
from test_optimizer import same

N, BATCH, D, WIDTH, STEPS = 60, 12, 4, 7, 30
COSINE = [0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * t / STEPS)) for t in range(STEPS)]
CONSTANT = [1.0] * STEPS
WARM_UP = [min(1.0, (t + 1) / 20) for t in range(STEPS)]
RESTART = COSINE[::2] + CONSTANT[::2]
SOLVERS = {
    "told epochs": (lambda: RLS(ridge=10.0), {"samples_per_epoch": N}),
    "RLS": (lambda: RLS(forgetting=0.9), {}),
    "PerOutput": (lambda: PerOutput(RLS(forgetting=0.9)), {}),
    "SelfTuning": (lambda: SelfTuning([RLS(forgetting=0.9), RLS(forgetting=0.98)]), {}),
    "OnlineLBFGS": (lambda: OnlineLBFGS(memory=3), {}),
    "SoftmaxNewton": (lambda: SoftmaxNewton(), {}),
    "SelfTuning of SoftmaxNewton": (lambda: SelfTuning.of(SoftmaxNewton), {}),
    "LogisticNewton": (lambda: LogisticNewton(), {}),
}


def batches(name, count=STEPS):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator).double()
    y = torch.stack([x[:, 0] * x[:, 1], x.sum(1).sin()], 1) + 0.1 * torch.randn(N, 2, generator=generator).double()
    if "Softmax" in name:
        y = y.argmax(1)
    elif name == "LogisticNewton":
        y = (y > 0).double()
    rows = [torch.arange(BATCH) + BATCH * (k % (N // BATCH)) for k in range(count)]
    return [(x[r], y[r]) for r in rows]


def build(name, anneal=True, frozen=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)).double()
    model[0].requires_grad_(not frozen)
    make, options = SOLVERS[name]
    base = torch.optim.SGD(model[0].parameters(), lr=1.0)
    return SepSA(model, base, solver=make(), anneal=anneal, **options)


def train(optimizer, rates, data, call=None):
    for rate, (x, y) in zip(rates, data, strict=True):
        optimizer.param_groups[0]["lr"] = 0.05 * rate
        if call is None:
            optimizer.learn(x, y)
            continue
        with optimizer.observe(y) as observation:
            observation.loss(call(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize(
    ("rates", "ratio"),
    [
        ([1.0, 1.0], 1.0),
        ([0.0, 0.5, 1.0], 1.0),  # warm-up
        ([0.0, 0.0], 1.0),  # a rate that was never anything else
        ([1.0, 0.0], FLOOR),
        ([1.0, 1e-9], FLOOR),
        ([1.0, 0.5], 10 ** (-5 / 16)),
        ([1.0, 0.98], 1.0),  # nearer to 1 than to the next value
        ([2.0, 0.02, 2.0], 1.0),  # a restart
        ([2.0, 0.02, 1.0], 10 ** (-5 / 16)),
        ([1.0, 0.5, math.nan], 10 ** (-5 / 16)),  # no rate at all: the last one counts
        ([1.0, 0.5, -3.0], 10 ** (-5 / 16)),
        ([1.0, math.inf], 1.0),
        ([1.0, None], 1.0),
        ([torch.tensor(1.0), torch.tensor([0.5])], 10 ** (-5 / 16)),
        ([(1.0, 0.0), (0.5, 0.3)], 10 ** (-5 / 16)),  # several groups: the largest decides
        ([(1.0, 0.0), (math.nan, 0.5)], 10 ** (-5 / 16)),
        ([(1.0, 0.5), (0.0, 0.0)], FLOOR),
    ],
)
def test_the_ratio_of_rates(rates, ratio):
    now = Rates()
    for rate in rates:
        now = seen(now, [{"lr": each} for each in (rate if isinstance(rate, tuple) else (rate,))] + [{}])
    assert ratio_of(now) == pytest.approx(ratio, rel=1e-12)
    assert now.fell or ratio == 1.0


def test_the_ratio_of_a_schedule_is_the_reference():
    now, found = Rates(), []
    for rate in RESTART:
        now = seen(now, [{"lr": rate / 2}, {"lr": rate}])
        found.append(ratio_of(now))
    np.testing.assert_allclose(found, annealed_ratios(RESTART), rtol=1e-12)
    assert len(set(found)) < 20  # few values, each of which may be recorded in a CUDA graph


@pytest.mark.parametrize("rates", [COSINE, RESTART], ids=["cosine", "restart"])
@pytest.mark.parametrize("name", ["RLS", "told epochs"])
def test_least_squares_remember_longer_as_the_reference_does(name, rates):
    optimizer, data = build(name, frozen=True), batches(name)
    prior = weights(optimizer.head)
    train(optimizer, rates, data)
    body, told = optimizer.model[:2], name == "told epochs"
    rows = [(with_ones(body(x).detach().numpy(), True), y.numpy()) for x, y in data]
    memory = 8 * WIDTH if 8 * WIDTH > N else N
    forgetting = [1.0 if told and (k + 1) * BATCH <= N else 1 - BATCH / memory if told else 0.9 for k in range(STEPS)]
    ridge = ridges(WIDTH + 1, 10.0 if told else 1.0, True)
    expected = annealed_rls(prior, ridge, forgetting, annealed_ratios(rates), rows, memory if told else None)
    # Normal equations of condition 1e6 in float64 keep ten digits.
    np.testing.assert_allclose(weights(optimizer.head), expected, rtol=1e-7, atol=1e-9)
    if rates is RESTART:
        assert optimizer.solver.samples < 2.5 * memory  # 15 updates after a memory of ten epochs
    else:
        assert optimizer.solver.samples > 1.8 * train(build(name, anneal=False), COSINE, data).solver.samples


@pytest.mark.parametrize("name", ["SoftmaxNewton", "LogisticNewton"])
def test_newton_heads_get_a_larger_ridge_about_the_weights_that_they_have(name):
    solver = train(build(name), CONSTANT, batches(name)).solver
    before, W = copy.deepcopy(solver), solver.linear.weight.detach().clone()
    solver.anneal(0.5)
    assert torch.equal(solver.linear.weight, W)
    state, old = solver._state, before._state
    A, B = (torch.linalg.inv(head.covariance()) for head in (solver, before))
    added = torch.diag_embed(old.ridge_left * (state.ridge / old.ridge - 1))
    torch.testing.assert_close(A, B + added, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state.ridge[:-1], 8 * old.ridge[:-1])  # that of the bias is at most 1e-4
    # The pull of the ridge is what it was.
    pull, pulled = state.ridge * (state.W - state.prior), old.ridge * (old.W - old.prior)
    torch.testing.assert_close(pull, pulled, rtol=1e-9, atol=1e-12)
    solver.anneal(1.0)
    torch.testing.assert_close(solver.covariance(), before.covariance(), rtol=1e-9, atol=1e-12)


def test_a_ridge_that_is_raised_in_a_large_block_keeps_its_curvature():
    """A state that has A, of a large block, against the same one with T."""
    torch.manual_seed(0)
    linear = nn.Linear(70, 3).double()
    solver = SoftmaxNewton().bind(linear)
    x, y = torch.randn(200, 70).double(), torch.randint(3, (200,))
    for _ in range(9):
        solver.update(x, y)
    assert solver._state.A is not None
    other = copy.deepcopy(solver)
    other.covariance()
    assert other._state.A is None
    for head in (solver, other):
        head.anneal(0.5)
        head.anneal(0.25)
        head.update(x, y)
    torch.testing.assert_close(solver.linear.weight, other.linear.weight, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(solver.covariance(), other.covariance(), rtol=1e-8, atol=1e-12)


def test_a_quasi_newton_head_takes_shorter_steps():
    (x, y), *_ = batches("OnlineLBFGS")
    moves = []
    for ratio in (1.0, 0.5):
        torch.manual_seed(0)
        solver = OnlineLBFGS(dtype=torch.float64).bind(nn.Linear(D, 2).double())
        solver.anneal(ratio)
        solver.update(x, y)
        moves.append(solver._state.Z - solver._state.prior)
    torch.testing.assert_close(moves[1], 0.5 * moves[0], rtol=1e-9, atol=0)


def test_no_comparison_of_ridges_starts_while_the_rate_is_below_its_peak():
    optimizer = build("SelfTuning of SoftmaxNewton")
    train(optimizer, [1.0] * 60, batches("SoftmaxNewton", 60))
    other = copy.deepcopy(optimizer)
    train(optimizer, [1.0] * 4, batches("SoftmaxNewton", 4))
    train(other, [0.5] * 4, batches("SoftmaxNewton", 4))
    assert len(optimizer.solver.members) == 3
    assert len(other.solver.members) == 1
    assert other.solver.ridge == optimizer.solver.chosen[0].ridge or len(other.solver.chosen) > 1


@pytest.mark.parametrize("name", SOLVERS)
def test_a_rate_that_does_not_fall_changes_no_bit(name):
    one, other = (train(build(name, anneal), WARM_UP, batches(name)) for anneal in (True, False))
    assert same(one.model, other.model)


@pytest.mark.parametrize("name", SOLVERS)
def test_a_saved_optimizer_anneals_on_with_the_same_bits(name):
    rates, data = COSINE[:20] + CONSTANT[:10], batches(name)
    optimizer = train(build(name), rates[:16], data[:16])
    again = build(name)
    again.model.load_state_dict(copy.deepcopy(optimizer.model.state_dict()))
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one in (optimizer, again):
        train(one, rates[16:], data[16:])
    assert same(optimizer.model, again.model)
    assert not same(optimizer.model, train(build(name, anneal=False), rates, data).model)


@pytest.mark.parametrize("name", ["told epochs", "SoftmaxNewton"])
def test_a_compiled_model_anneals_as_the_eager_one(name):
    one, two = build(name), build(name)
    train(one, COSINE, batches(name), torch.compile(one.model, backend="eager"))
    train(two, COSINE, batches(name), two.model)
    assert same(one.model, two.model)


@pytest.mark.parametrize("name", ["RLS", "told epochs", "SoftmaxNewton"])
def test_a_captured_head_anneals_as_the_eager_one(name):
    linear = nn.Linear(D, 2).double()
    one, two = (SOLVERS[name][0]().bind(copy.deepcopy(linear)) for _ in range(2))
    for ratio, (x, y) in zip(annealed_ratios(RESTART), batches(name), strict=True):
        for solver in (one, two):
            if name == "told epochs":
                solver.forgetting = 0.8
            solver.anneal(ratio, N if name == "told epochs" else None)
        one.prepare_capture()
        assert one.update_captured(x, y)
        two.update(x, y)
    # The same arithmetic by other routes: float64 keeps these digits over 30 updates.
    torch.testing.assert_close(one.linear.weight, two.linear.weight, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(one.covariance(), two.covariance(), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(
    "rates", [None, [1.0], [2.0, 1.0, False], [math.nan, 1.0, False], [-1.0, 1.0, True], [0, 1, 2]]
)
def test_damaged_rates_are_refused(rates):
    optimizer = build("RLS")
    state = optimizer.state_dict()
    state["sepsa"]["rates"] = rates
    with pytest.raises(ValueError, match="rates"):
        optimizer.load_state_dict(state)
    solver = SoftmaxNewton().bind(nn.Linear(D, 2))
    for annealed in ([0.5], [0.5, 2.0], [math.nan, 1.0], "x"):
        with pytest.raises(ValueError, match="annealed"):
            solver.load_state_dict(solver.state_dict() | {"annealed": annealed})
