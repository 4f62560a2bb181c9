"""`SepSA.predict`: the model's outputs without learning, and the deviations that the head's posterior gives them."""

import copy
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch
from torch import nn

from sepsa import RLS, LogisticNewton, OnlineLBFGS, PerOutput, SepSA, SoftmaxNewton
from sepsa.states.tree import leaves
from sepsa.testing.case import difference
from training_loops import in_a_thread


def network(outputs=2, after=()):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.5), nn.Tanh(), nn.Linear(9, outputs), *after)


def learned(model, solver=None, head=None, targets=None):
    """A SepSA that has learned three batches, and inputs that it has not seen."""
    optimizer = SepSA(model, torch.optim.Adam, lr=1e-2, solver=solver, head=head)
    g = torch.Generator().manual_seed(1)
    for _ in range(3):
        y = torch.randn(16, 2, generator=g) if targets is None else targets
        optimizer.learn(torch.randn(16, 6, generator=g), y)
    return optimizer, torch.randn(5, 6, generator=g)


def snapshot(optimizer):
    return copy.deepcopy([optimizer.model.state_dict(), optimizer.solver.state_dict()])


def same(a, b):
    assert not difference(leaves(a), leaves(b))


@pytest.mark.parametrize("solver", [RLS, lambda: RLS(ridge="evidence"), lambda: PerOutput(RLS())])
def test_deviations_are_those_of_the_solver_on_the_features(solver):
    optimizer, inputs = learned(network(), solver())
    model = optimizer.model.train()
    mean, std = optimizer.predict(inputs, return_std=True)
    model.eval()
    with torch.no_grad():
        expected = optimizer.solver.predict(model[:-1](inputs), return_std=True)
        same(mean, model(inputs))
    same(std, expected.std)
    torch.testing.assert_close(mean, expected.mean)
    same(optimizer.predict(inputs), mean)


def test_it_learns_nothing_and_restores_the_mode_of_each_module():
    optimizer, inputs = learned(network())
    model = optimizer.model.train()
    model[1].eval()  # a frozen normalization
    modes = [module.training for module in model.modules()]
    before = snapshot(optimizer)
    outputs = optimizer.predict(inputs)
    assert not outputs.requires_grad
    optimizer.predict(inputs, return_std=True)
    same(snapshot(optimizer), before)
    with pytest.raises(RuntimeError):
        optimizer.predict(inputs[:, :2])
    assert [module.training for module in model.modules()] == modes
    assert not model[-1]._forward_hooks
    optimizer.learn(inputs, torch.zeros(5, 2))  # the head learns again afterwards
    assert optimizer.solver.steps == 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
def test_a_compiled_model():
    plain, inputs = learned(network())
    compiled = torch.compile(network(), backend="aot_eager")
    optimizer = SepSA(compiled, torch.optim.Adam, lr=1e-2)
    optimizer.load_state_dict(plain.state_dict())
    compiled._orig_mod.load_state_dict(plain.model.state_dict())
    same(optimizer.predict(inputs), plain.predict(inputs))  # compiles the model before there is a hook for deviations
    same(optimizer.predict(inputs, return_std=True), plain.predict(inputs, return_std=True))
    assert compiled.training


def test_the_shape_of_deviations_is_that_of_the_outputs():
    class Squeezed(nn.Sequential):
        def forward(self, x):
            return super().forward(x).squeeze(-1)

    optimizer, inputs = SepSA(Squeezed(nn.Linear(6, 1)), torch.optim.SGD), torch.randn(5, 6)
    with optimizer.observe(torch.randn(5, 1)):
        optimizer.model(inputs)
    mean, std = optimizer.predict(inputs, return_std=True)
    assert mean.shape == std.shape == (5,)
    same(std, optimizer.solver.predict(inputs, return_std=True).std.squeeze(-1))


class TwoHeads(nn.Module):
    def __init__(self, form):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.a, self.b, self.form = nn.Linear(6, 4), nn.Linear(4, 2), nn.Linear(4, 1), form

    def forward(self, x):
        h = self.body(x).tanh()
        return self.form(self.a(h), self.b(h))


@pytest.mark.parametrize("form", [lambda a, b: {"a": a, "b": b}, lambda a, b: (a, b)], ids=["dict", "tuple"])
def test_several_heads(form):
    targets = {"a": torch.randn(16, 2), "b": torch.randn(16, 1)}
    optimizer, inputs = learned(TwoHeads(form), head=["a", "b"], targets=targets)
    mean, std = optimizer.predict(inputs, return_std=True)
    features = optimizer.model.body(inputs).tanh()
    expected = form(*(optimizer.solvers[name].predict(features, return_std=True).std for name in "ab"))
    same(std, expected)
    same(mean, optimizer.predict(inputs))


@pytest.mark.parametrize(
    ("solver", "words"),
    [
        (SoftmaxNewton(), "trained by SoftmaxNewton, whose outputs are logits: make them probabilities"),
        (PerOutput(LogisticNewton()), "trained by LogisticNewton, whose outputs are logits"),
        (OnlineLBFGS(), r"trained by OnlineLBFGS, which has none: make SepSA\(model, base, solver=RLS\(\)\)"),
    ],
)
def test_a_solver_without_a_posterior_of_its_targets(solver, words):
    optimizer, inputs = learned(network(), solver, targets=torch.eye(2)[torch.arange(16) % 2])
    assert optimizer.predict(inputs).shape == (5, 2)
    with pytest.raises(TypeError, match=words):
        optimizer.predict(inputs, return_std=True)


@pytest.mark.filterwarnings("ignore:the model")  # SepSA warns of these models when they learn, too
@pytest.mark.parametrize("after", [nn.Softmax(-1), nn.Softplus(), nn.Linear(2, 2)])
def test_a_model_in_which_something_follows_the_head(after):
    optimizer = SepSA(network(after=[after]), torch.optim.SGD, lr=1e-2, head="4")
    inputs = torch.randn(8, 6)
    with optimizer.observe(torch.randn(8, 2)):
        optimizer.model(inputs)
    assert optimizer.predict(inputs).shape == (8, 2)
    with pytest.raises(ValueError, match=r"differs from that of the head '4', \(8, 2\): something follows the head"):
        optimizer.predict(inputs, return_std=True)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(x) if self.training else self.head(x) + self.head(x)


def test_a_head_that_is_called_twice():
    optimizer, inputs = learned(Twice())
    with pytest.raises(ValueError, match="calls its head 'head' once in a forward pass, got 2 calls"):
        optimizer.predict(inputs, return_std=True)


@pytest.mark.parametrize("training", [False, True])
def test_it_is_refused_inside_observe(training):
    optimizer, inputs = learned(network())
    model, targets = optimizer.model.train(training), torch.zeros(5, 2)
    with optimizer.observe(targets):
        with pytest.raises(RuntimeError, match="predict must be called outside observe"):
            optimizer.predict(inputs)
        model(inputs)
    assert optimizer.solver.steps == 4


def test_a_thread_predicts_while_another_one_observes():
    optimizer, inputs = learned(network())
    model, targets = optimizer.model.eval(), torch.zeros(5, 2)
    expected = optimizer.predict(inputs)
    with optimizer.observe(targets):
        same(in_a_thread(lambda: optimizer.predict(inputs)), expected)
        assert optimizer.solver.steps == 3
        model.train()
        with pytest.raises(RuntimeError, match="eval mode while another thread is inside observe: hold a lock"):
            in_a_thread(lambda: optimizer.predict(inputs))
        assert all(module.training for module in model.modules())
        model(inputs)
    assert optimizer.solver.steps == 4


class Waits(nn.Module):
    """Says that a forward pass has come here, and holds it."""

    def __init__(self):
        super().__init__()
        self.here, self.go = Event(), Event()

    def forward(self, x):
        self.here.set()
        assert self.go.wait(600)
        return x


def test_no_thread_observes_while_another_one_has_switched_the_mode():
    model = network()
    optimizer, inputs = learned(model)
    waits = Waits()
    model[3] = waits
    with ThreadPoolExecutor(2) as pool:
        predictions = [pool.submit(optimizer.predict, inputs) for _ in range(2)]
        assert waits.here.wait(600)
        with pytest.raises(RuntimeError, match="observe or predict is active in another thread"):
            optimizer.learn(inputs, torch.zeros(5, 2))
        waits.go.set()
        same(predictions[0].result(), predictions[1].result())
    assert all(module.training for module in model.modules())
    optimizer.learn(inputs, torch.zeros(5, 2))
    assert optimizer.solver.steps == 4
