"""Several heads on one body."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import sepsa
from sepsa import RLS, SepSA, SoftmaxNewton

NAN = float("nan")


class ActorCritic(nn.Module):
    def __init__(self, as_dict=False):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.as_dict = nn.Sequential(nn.Linear(6, 9), nn.Tanh()), as_dict
        self.value, self.policy = nn.Linear(9, 1), nn.Linear(9, 4)
        self.double()

    def forward(self, x):
        h = self.body(x)
        if self.as_dict:
            return {"policy": self.policy(h), "value": self.value(h), "features": h}
        return self.value(h), self.policy(h)


def batch(n=16, seed=1):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g).double()
    return x, x[:, :1] * x[:, 1:2], x[:, :4].argmax(1)


def both(model, **options):
    solvers = {"value": RLS(), "policy": SoftmaxNewton()}
    return SepSA(model, torch.optim.Adam, head=["value", "policy"], solver=solvers, lr=1e-2, **options)


@pytest.mark.parametrize("as_dict", [True, False])
def test_several_heads_equal_the_loop_by_hand(as_dict):
    model, twin = ActorCritic(as_dict), ActorCritic()
    optimizer = both(model)
    base = torch.optim.Adam(twin.body.parameters(), lr=1e-2)
    value, policy = RLS().bind(twin.value), SoftmaxNewton().bind(twin.policy)
    for k in range(10):
        x, y, labels = batch(seed=k)
        loss = optimizer.learn(x, {"policy": labels, "value": y} if as_dict else (y, labels))
        h = twin.body(x)
        value.update(h.detach(), y)
        policy.update(h.detach(), labels)
        truth = mse_loss(twin.value(h), y) + cross_entropy(twin.policy(h), labels)
        twin.zero_grad()
        truth.backward()
        base.step()
        torch.testing.assert_close(loss, truth.detach())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert [solver.steps for solver in optimizer.solvers.values()] == [10, 10]
    assert optimizer.heads == {"value": model.value, "policy": model.policy}


def test_a_pass_may_teach_some_of_the_heads():
    model = ActorCritic(as_dict=True)
    optimizer = both(model)
    x, y, labels = batch()
    still = copy.deepcopy(model.policy)
    with sepsa.observe(model, {"value": y}):
        loss = mse_loss(model(x)["value"], y)
    loss.backward()
    assert torch.equal(model.policy.weight, still.weight)
    assert optimizer.solvers["policy"].steps == 0
    optimizer.learn(x, {"policy": labels}, lambda outputs, t: cross_entropy(outputs["policy"], t["policy"]))
    assert [solver.steps for solver in optimizer.solvers.values()] == [1, 1]


def test_one_weight_for_all_heads_or_one_each():
    x, y, labels = batch()
    weight = torch.rand(16).double()
    models = [ActorCritic() for _ in range(3)]
    for model, given in zip(models, [weight, (weight, weight), {"value": weight, "policy": weight}], strict=True):
        both(model).learn(x, (y, labels), sample_weight=given)
    for model in models[1:]:
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), models[0].parameters(), strict=True))


def test_a_state_of_other_heads_is_refused_whole():
    optimizer = both(ActorCritic())
    x, y, labels = batch()
    optimizer.learn(x, (y, labels))
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.learn(x, (y, labels))
    before = optimizer.solvers["value"].state_dict()
    state["sepsa"]["heads"]["policy"].popitem()
    with pytest.raises(ValueError, match="state_dict"):
        optimizer.load_state_dict(state)
    now = optimizer.solvers["value"].state_dict()
    assert all(torch.equal(v, now[k]) if isinstance(v, torch.Tensor) else v == now[k] for k, v in before.items())
    one = copy.deepcopy(optimizer.state_dict())
    del one["sepsa"]["heads"]["policy"]
    with pytest.raises(ValueError, match=r"belongs to the heads \['value'\], this SepSA has \['policy', 'value'\]"):
        optimizer.load_state_dict(one)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda parts: pickle.loads(pickle.dumps(parts))])
def test_copies_with_a_scheduler_go_their_own_way(way):
    model, (x, y, labels) = ActorCritic(), batch()
    optimizer = both(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def train(optimizer, scheduler):
        for _ in range(3):
            optimizer.learn(x, (y, labels))
            scheduler.step()

    def numbers(model):
        return [value.clone() for value in model.state_dict().values()]

    train(optimizer, scheduler)
    twin, other, follower = way((model, optimizer, scheduler))
    before = numbers(model)
    train(other, follower)
    assert all(map(torch.equal, before, numbers(model)))
    train(optimizer, scheduler)
    assert all(map(torch.equal, numbers(twin), numbers(model)))
    assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"] == follower.get_last_lr()[0]


def test_one_of_several_heads_may_be_frozen():
    model, (x, y, labels) = ActorCritic(), batch()
    optimizer = both(model)
    model.policy.requires_grad_(False)
    policy, value = model.policy.weight.clone(), model.value.weight.clone()
    optimizer.learn(x, (y, labels))
    assert torch.equal(model.policy.weight, policy)
    assert not torch.equal(model.value.weight, value)
    assert [solver.steps for solver in optimizer.solvers.values()] == [1, 0]


def make(head, **options):
    return SepSA(ActorCritic(), torch.optim.SGD, head=head, **options)


@pytest.mark.parametrize(
    ("use", "error", "words"),
    [
        (lambda o: o.solver, AttributeError, "this SepSA has several heads: use optimizer.heads and optimizer.solvers"),
        (lambda o: o.observe(torch.zeros(3)), ValueError, r"one tensor for each of several .*\['value', 'policy'\]"),
        (lambda o: o.observe((torch.zeros(3),)), ValueError, "got 1 of them"),
        (lambda o: o.observe({"actor": torch.zeros(3)}), ValueError, r"names of heads, .* got \['actor'\]"),
        (lambda o: make(["value", "value"]), ValueError, "each once"),
        (lambda o: make([]), ValueError, "one nn.Linear or more"),
        (lambda o: make(["value"], solver=RLS()), TypeError, "a dict or a sequence"),
        (lambda o: o.add_param_group({"params": o.model.policy.weight}), ValueError, "head's parameter 'policy.weight"),
    ],
)
def test_bad_use(use, error, words):
    optimizer = both(ActorCritic())
    with pytest.raises(error, match=words):
        use(optimizer)


def test_the_optimizer_says_what_it_is_and_lets_go():
    model = ActorCritic()
    optimizer = both(model)
    assert "solvers={'value': RLS(" in repr(optimizer)
    optimizer.detach()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
