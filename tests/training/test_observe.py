"""What is being observed, however the optimizer is wrapped, and solvers of somebody's own."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import sepsa
from sepsa import RLS, SepSA
from third_party import LMS
from training_loops import batches, in_a_thread


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 2))


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


class CopiesTheDict:
    """A wrapper that copies the optimizer's attributes and class, as Lightning's."""

    def __init__(self, optimizer):
        self.__dict__ = dict(optimizer.__dict__)
        self.__class__ = type("Wrapped", (type(self), type(optimizer)), {})


class Hides(torch.optim.Optimizer):
    """A wrapper that passes on what every optimizer has, and nothing else, as accelerate's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


@pytest.mark.parametrize("way", ["method", "copied", "function", "hidden", "around"])
def test_every_way_to_observe_is_learn(way):
    model, twin = network(), network()
    optimizer, plain = SepSA(model, torch.optim.Adam, lr=1e-2), SepSA(twin, torch.optim.Adam, lr=1e-2)
    outer = nn.ModuleDict({"inner": model}) if way == "around" else model
    loop = CopiesTheDict(optimizer) if way == "copied" else Hides(optimizer) if way == "hidden" else optimizer
    for inputs, targets in batches():
        context = loop.observe(targets) if way in ("method", "copied") else sepsa.observe(outer, targets)
        with context:
            loss = mse_loss(model(inputs), targets)
        loss.backward()
        loop.step()
        loop.zero_grad()
        plain.learn(inputs, targets)
    assert same(model, twin)
    assert optimizer.solver.steps == 12
    with torch.no_grad():
        assert not plain.learn(inputs, targets, loss_fn=nn.functional.smooth_l1_loss).requires_grad


def test_settings_reach_the_head_through_a_copy():
    optimizer = SepSA(network(), torch.optim.SGD, lr=1e-2)
    CopiesTheDict(optimizer).head_fraction = 0.5
    optimizer.learn(*batches()[0])
    assert optimizer.head_fraction == 0.5
    assert optimizer.solver.samples == 4


def test_observe_needs_a_head_that_is_taught():
    inputs, targets = batches()[0]
    model = network()
    optimizer = SepSA(model, torch.optim.SGD, lr=1e-2)
    for free in (network(), copy.deepcopy(model), model[0]):
        with pytest.raises(ValueError, match="no SepSA trains a head of this"):
            sepsa.observe(free, targets)
    other = network()
    another = SepSA(other, torch.optim.SGD, lr=1e-2)
    with pytest.raises(ValueError, match="one tensor for each of several heads"):
        sepsa.observe(nn.ModuleList([model, other]), targets)
    del another
    with sepsa.observe(nn.ModuleList([model, other]), targets, torch.ones(8)):
        model(inputs)
    assert optimizer.solver.steps == 1


def test_a_solver_may_call_its_head():
    model = network()
    twin = copy.deepcopy(model)
    optimizer = SepSA(model, torch.optim.SGD, solver=LMS(), lr=1e-2)
    base, solver = torch.optim.SGD([*twin[:3].parameters()], lr=1e-2), LMS().bind(twin[3])
    for inputs, targets in batches():
        optimizer.learn(inputs, targets)
        features = twin[:3](inputs)
        solver.update(features.detach(), targets)
        mse_loss(twin[3](features), targets).backward()
        base.step()
        twin.zero_grad()
    assert optimizer.solver.steps == 12
    assert same(model, twin)
    with pytest.raises(RuntimeError, match="reached the head '3' twice"), optimizer.observe(targets):
        _ = model(inputs), model(inputs)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own: sparse and nested tensors are in beta
@pytest.mark.parametrize("where", ["features", "targets", "sample_weight"])
def test_tensors_that_are_not_dense_get_our_words(where):
    model = nn.Sequential(nn.Identity(), nn.Linear(6, 2))
    optimizer = SepSA(model, torch.optim.SGD, lr=1e-2)
    before = copy.deepcopy(model)
    good = dict(zip(("features", "targets"), batches()[0], strict=True), sample_weight=torch.ones(8, 1))
    for make, words in (
        (torch.Tensor.to_sparse, r"torch.sparse_coo: call {}.to_dense\(\)"),
        (lambda t: torch.nested.nested_tensor(list(t), layout=torch.jagged), "a nested one"),
        (lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), r"torch.qint8: call {}.dequantize\(\)"),
    ):
        given = good | {where: make(good[where])}
        words = f"{where} must be .*, got .*{words.format(where)}"
        weight = given["sample_weight"] if where == "sample_weight" else None
        with pytest.raises(TypeError, match=words), optimizer.observe(given["targets"], weight):
            model(given["features"])
    assert same(model, before)
    assert optimizer.solver.steps == 0


@pytest.mark.parametrize("solver", [RLS, lambda: RLS(ridge="evidence")])
def test_a_pass_in_another_thread_neither_learns_nor_counts(solver):
    (model, optimizer), (twin, plain) = (
        (m, SepSA(m, torch.optim.SGD, lr=0.1, solver=solver())) for m in (network(), network())
    )
    other = torch.randn(8, 6)
    model.eval(), twin.eval()
    for inputs, targets in batches(3):
        with optimizer.observe(targets):
            in_a_thread(lambda: model(other))
            assert not optimizer.solver.steps - plain.solver.steps
            loss = mse_loss(model(inputs), targets)
            in_a_thread(lambda: model(other))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.learn(inputs, targets)
    assert same(model, twin)
    words = r"never reached the head '3': .*inside the context and in its thread"
    with pytest.raises(RuntimeError, match=words), optimizer.observe(targets):
        in_a_thread(lambda: model(inputs))


def test_a_head_called_by_keyword():
    head = nn.Linear(6, 2)
    optimizer = SepSA(head, torch.optim.SGD)
    inputs, targets = batches()[0]
    with pytest.raises(TypeError, match="must get its features by position"), optimizer.observe(targets):
        head(input=inputs)
    head(input=inputs)
