"""`capture` where there is no GPU: the same call gives the plain step. What a graph does is tested in test_gpu.py."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss, smooth_l1_loss

from sepsa import SepSA
from sepsa.states.tree import leaves
from sepsa.testing.case import difference
from sepsa.training.body_step import BodyStep
from sepsa.training.capture import PROPORTIONAL, capture, check_optimizer
from training_loops import network, same


def data(n=40):
    g = torch.Generator().manual_seed(1)
    return torch.randn(n, 6, generator=g), torch.randn(n, 2, generator=g)


@pytest.mark.parametrize("loss_fn", [None, smooth_l1_loss])
def test_a_captured_sepsa_is_learn(loss_fn):
    model, twin = network(), network()
    optimizer, other = (SepSA(m, torch.optim.Adam, lr=1e-2) for m in (model, twin))
    x, y = data()
    step = optimizer.capture(x[:8], y[:8], loss_fn)
    order = torch.arange(40).reshape(5, 8)
    assert torch.equal(step(x[order[0]], y[order[0]]), other.learn(x[order[0]], y[order[0]], loss_fn))
    step.run(x, y, order[1:])
    for rows in order[1:]:
        other.learn(x[rows], y[rows], loss_fn)
    assert same(model, twin)
    assert step.skipped == 0


def test_any_optimizer_can_be_captured():
    model, twin = network(), network()
    one, two = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(twin.parameters(), lr=0.1)
    x, y = data()
    capture(model, one, x[:8], y[:8], mse_loss).run(x, y, torch.arange(40).reshape(5, 8))
    for i in range(0, 40, 8):
        mse_loss(twin(x[i : i + 8]), y[i : i + 8]).backward()
        two.step()
        two.zero_grad()
    assert same(model, twin)


def test_scheduler_and_head_fraction_are_followed():
    model = network()
    optimizer = SepSA(model, torch.optim.SGD, lr=1e-2)
    x, y = data()
    step = optimizer.capture(x[:8], y[:8])
    step(x[:8], y[:8])
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.head_fraction = 0.25
    still = copy.deepcopy(model[0].weight)
    step(x[:8], y[:8])
    assert torch.equal(model[0].weight, still)
    assert optimizer.solver.samples == 8 + 2


def test_a_bad_batch_raises_where_the_host_can_see_it():
    optimizer = SepSA(network(), torch.optim.SGD, lr=1e-2)
    x, y = data()
    step = optimizer.capture(x[:8], y[:8])
    with pytest.raises(ValueError, match="features must be finite"):
        step(x[:8] * float("nan"), y[:8])
    assert optimizer.solver.steps == 0


def test_inputs_and_targets_must_lie_together():
    optimizer = SepSA(network(), torch.optim.SGD, lr=1e-2)
    with pytest.raises(ValueError, match="targets must be on cpu, where the inputs are, got meta"):
        optimizer.capture(torch.zeros(8, 6), torch.zeros(8, 2, device="meta"))


@pytest.mark.parametrize("base", [torch.optim.SGD, partial(torch.optim.SGD, momentum=0.9), torch.optim.Adam])
def test_a_bad_batch_leaves_body_buffers_and_moments_as_they_were(base):
    """What a graph records, run on a CPU; the first batch too, before which the optimizer has no state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 2))
    optimizer = base(model.parameters(), lr=1e-2)
    loss, skipped = torch.zeros(()), torch.zeros((), dtype=torch.long)
    body = BodyStep(model, optimizer, mse_loss, loss, skipped, [None], compiled=False)
    x, y = torch.randn(8, 6), torch.randn(8, 2)

    def step(inputs):
        optimizer.zero_grad()
        value, finite, buffers = body.forward(inputs, y)
        value.backward()
        with torch.no_grad():
            body.step(value.detach(), [finite], buffers)

    for count in (1, 2):
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        step(x * torch.nan)
        assert not difference(leaves((model.state_dict(), optimizer.state_dict())), leaves(before))
        assert int(skipped) == count
        weight = model[0].weight.detach().clone()
        step(x)
        assert not torch.equal(model[0].weight, weight)


OPTIMIZERS = [
    *((torch.optim.SGD, options) for options in ({}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1})),
    *((torch.optim.RMSprop, options) for options in ({}, {"momentum": 0.9, "centered": True})),
    (torch.optim.Adadelta, {}),
]


@pytest.mark.parametrize(("base", "options"), OPTIMIZERS)
def test_one_recording_serves_every_rate_of_an_optimizer_whose_steps_are_proportional_to_it(base, options):
    """The body's step as a graph runs it, at rate 1 and multiplied by a tensor, beside the optimizer with its rate."""
    model, twin = network(), network()
    one, two = (base(m.parameters(), lr=1.0, **options) for m in (model, twin))
    assert isinstance(one, PROPORTIONAL)
    rate, finite = torch.zeros(()), torch.ones((), dtype=torch.bool)
    body = BodyStep(model, one, mse_loss, torch.zeros(()), torch.zeros((), dtype=torch.long), [rate], compiled=False)
    x, y = data()
    for i in range(12):
        two.param_groups[0]["lr"] = 0.1 / (1 + i)
        rate.fill_(0.1 / (1 + i))
        for m, optimizer in ((model, one), (twin, two)):
            optimizer.zero_grad()
            mse_loss(m(x), y).backward()
        with torch.no_grad():
            body.step(torch.zeros(()), [finite], [])
        two.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


HOST = {"Adafactor", "Adagrad", "LBFGS", "SparseAdam"}  # whose steps need values on the host


@pytest.mark.parametrize(
    "name", sorted({name for name, kind in vars(torch.optim).items() if isinstance(kind, type)} - {"Optimizer"})
)
def test_every_optimizer_of_torch_is_captured_or_refused_before_anything_is_recorded(name):
    kind = getattr(torch.optim, name)
    optimizer = kind([nn.Parameter(torch.zeros(2, 2))])
    if name in HOST:
        with pytest.raises(
            ValueError, match=f"{name} needs values on the host in its step and cannot be captured: use"
        ):
            check_optimizer(optimizer)
    else:
        check_optimizer(optimizer)
