"""A body of several optimizers: as each of them alone on its own parameters, and to the rest of torch one optimizer."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss, one_hot

import sepsa
from sepsa import RLS, SepSA
from sepsa.training.body_step import unwrapped_step
from sepsa.training.joint import JointOptimizer
from training_loops import batches, by_hand, check_gradient_scaler, same


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 2))


def is_matrix(name, parameter):
    return parameter.ndim == 2


SEVERAL = [
    (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}, is_matrix),
    (torch.optim.Adam, {"lr": 1e-3}, lambda name, parameter: name.startswith("1.")),
    (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}, None),
]


def build(base=None, **options):
    model = network()
    return model, SepSA(model, SEVERAL if base is None else base, **options)


def train(optimizer, data):
    for inputs, targets in data:
        optimizer.learn(inputs, targets)


def test_each_optimizer_moves_its_parameters_as_it_does_alone():
    model, optimizer = build()
    train(optimizer, batches())
    twin = network()
    alone = [
        torch.optim.SGD([twin[0].weight, twin[3].weight], lr=1e-2, momentum=0.9),
        torch.optim.Adam(twin[1].parameters(), lr=1e-3),
        torch.optim.AdamW([twin[0].bias, twin[3].bias], lr=1e-3, weight_decay=0.1),
    ]
    by_hand(twin, alone, RLS(ridge="evidence"), batches())
    assert same(model, twin)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2, 2]


@pytest.mark.parametrize("way", ["file", "sepsa.save", "deepcopy", "pickle"])
def test_it_resumes_bit_for_bit(way, tmp_path):
    model, optimizer = build()
    train(optimizer, batches(6))
    twin, resumed = build()
    if way == "sepsa.save":
        sepsa.save(optimizer, tmp_path / "checkpoint")
        sepsa.load(tmp_path / "checkpoint", into=resumed)
    elif way in ("deepcopy", "pickle"):
        copied = copy.deepcopy if way == "deepcopy" else lambda pair: pickle.loads(pickle.dumps(pair))
        twin, resumed = copied((model, optimizer))
    else:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "file")
        saved = torch.load(tmp_path / "file", weights_only=True)
        twin.load_state_dict(saved["model"])
        resumed.load_state_dict(saved["optimizer"])
    assert resumed.param_groups is resumed.base.param_groups
    assert all(part.state is resumed.state for part in resumed.base.optimizers)
    assert all(
        any(group is own for own in resumed.param_groups) for p in resumed.base.optimizers for group in p.param_groups
    )
    for one in (optimizer, resumed):
        train(one, batches(6, seed=2))
    assert same(model, twin)
    assert not same(model, network())


def test_schedulers_hooks_closures_and_groups():
    model, optimizer = build()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    stepped = []
    optimizer.register_step_post_hook(lambda *_: stepped.append("all"))
    optimizer.base.optimizers[0].register_step_post_hook(lambda *_: stepped.append("first"))
    train(optimizer, batches(1))
    scheduler.step()
    assert stepped == ["first", "all"]
    assert [part.param_groups[0]["lr"] for part in optimizer.base.optimizers] == [5e-3, 5e-4, 5e-4]
    (inputs, targets), before = batches(1)[0], copy.deepcopy(model.state_dict())
    with optimizer.observe(targets):
        loss = mse_loss(model(inputs), targets)
    loss.backward()
    assert optimizer.step(lambda: 7.0) == 7.0
    assert all(not torch.equal(v, before[name]) for name, v in model.state_dict().items())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())

    more = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [more], "lr": 0.5})
    assert optimizer.param_groups[-1] is optimizer.base.optimizers[-1].param_groups[-1]
    assert optimizer.param_groups[-1]["weight_decay"] == 0.1
    more.grad = torch.ones(3)
    optimizer.step()
    assert bool((more < 1).all())
    for own, words in ((model[0], "more than one parameter group"), (model[5], "owns the head's parameter '5.weight'")):
        with pytest.raises(ValueError, match=words):
            optimizer.add_param_group({"params": [own.weight]})
    assert len(optimizer.param_groups) == 4
    assert len(optimizer.base.optimizers[-1].param_groups) == 2


def test_the_step_that_a_graph_records_is_the_step():
    (model, optimizer), (twin, plain) = build(), build()
    for (inputs, targets), one in ((batch, one) for batch in batches(3) for one in (optimizer, plain)):
        with one.observe(targets):
            loss = mse_loss(one.model(inputs), targets)
        loss.backward()
        with torch.no_grad():
            unwrapped_step(one.base)() if one is optimizer else one.step()
        one.zero_grad()
    assert same(model, twin)
    assert not same(model, network())
    calls = []
    optimizer.base.register_step_post_hook(lambda *_: calls.append(1))
    unwrapped_step(optimizer.base)()
    assert calls  # hooks on it run


def test_a_function_builds_the_base():
    def adam(named):
        assert [name for name, _ in named][:2] == ["0.weight", "0.bias"]
        return torch.optim.Adam([p for _, p in named], lr=1e-2)

    (model, optimizer), (twin, plain) = build(adam), build(torch.optim.Adam, lr=1e-2)
    for one in (optimizer, plain):
        train(one, batches())
    assert same(model, twin)
    with pytest.warns(UserWarning, match="base does not train 1.weight, 1.bias, 3.weight and 1 more"):
        build(lambda named: torch.optim.Adam([p for _, p in named[:2]]))
    with pytest.raises(TypeError, match=r"base must be a torch.optim.Optimizer class or instance, got 3; or a list"):
        build(lambda named: 3)


@pytest.mark.parametrize(
    ("base", "options", "error", "words"),
    [
        (SEVERAL, {"lr": 1e-3}, ValueError, r"is a function or a list, which already has .* got also \['lr'\]"),
        (SEVERAL[:2], {}, ValueError, "base has no optimizer for 0.bias, 3.bias: end it with one for the rest"),
        ([], {}, ValueError, "base has no optimizer for 0.weight, 0.bias, 1.weight and 3 more"),
        ([SEVERAL[2], SEVERAL[0]], {}, ValueError, r"base\[1\] selects no parameter that is left of"),
        ([torch.optim.Adam], {}, TypeError, r"base\[0\] must be \(optimizer class, dict of .*, which parameters\)"),
        ([(nn.Linear, {}, None)], {}, TypeError, "base must be a torch.optim.Optimizer class"),
        ([(torch.optim.LBFGS, {}, None)], {}, ValueError, "LBFGS evaluates the model several times"),
        ([(torch.optim.Adam, {"ridge": 1.0}, None)], {}, TypeError, "ridge is a setting of the head solver"),
    ],
)
def test_bases_that_are_refused(base, options, error, words):
    with pytest.raises(error, match=words):
        build(base, **options)


REFUSED = {
    "LBFGS": "evaluates the model several times a step",
    "Muon": "Muon only supports 2D parameters",
    "SparseAdam": "does not support dense gradients",
}
EVERY = [
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
]


@pytest.mark.parametrize("name", EVERY)
def test_every_optimizer_of_torch_moves_the_body_or_is_refused_with_the_reason(name):
    kind = getattr(torch.optim, name)
    if name in REFUSED:
        model = network()
        before = copy.deepcopy(model)
        with pytest.raises((ValueError, RuntimeError), match=REFUSED[name]):
            SepSA(model, kind).learn(*batches(1)[0])
        assert same(model, before)
        return
    for base in (kind, [(kind, {}, is_matrix), (torch.optim.SGD, {"lr": 1e-2}, None)]):
        model, optimizer = build(base)
        before = copy.deepcopy(model)
        optimizer.learn(*batches(1)[0])
        assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))
        _, resumed = build(base)
        resumed.load_state_dict(optimizer.state_dict())


def test_sparse_embeddings_beside_dense_layers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 5, sparse=True), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1))
    parts = [(torch.optim.SparseAdam, {}, lambda name, p: p is model[0].weight), (torch.optim.Adam, {}, None)]
    optimizer = SepSA(model, parts)
    before = copy.deepcopy(model)
    optimizer.learn(torch.arange(4), torch.randn(4, 1))
    assert torch.equal(model[0].weight[4:], before[0].weight[4:])
    assert not torch.equal(model[0].weight[:4], before[0].weight[:4])
    assert not torch.equal(model[1].weight, before[1].weight)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.mix, self.norm = nn.Embedding(7, 6), nn.Linear(6, 9), nn.LayerNorm(9)
        self.head = nn.Linear(9, 2)

    def forward(self, tokens):
        return self.head(self.norm(torch.tanh(self.mix(self.table(tokens)))))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no torch.optim.Muon")
def test_muon_takes_the_matrices_and_adamw_the_rest():
    torch.manual_seed(0)
    model = Tokens()
    base = sepsa.muon(model, lr=1e-2, rest={"betas": (0.8, 0.99)}, momentum=0.5)
    optimizer = SepSA(model, base, solver="squared")
    assert isinstance(optimizer.base, JointOptimizer)
    matrices, rest = optimizer.param_groups
    assert [id(p) for p in matrices["params"]] == [id(model.mix.weight)]
    others = (model.table.weight, model.mix.bias, *model.norm.parameters())
    assert {id(p) for p in rest["params"]} == set(map(id, others))
    assert (matrices["lr"], matrices["momentum"], rest["lr"], rest["betas"]) == (1e-2, 0.5, 1e-2, (0.8, 0.99))
    tokens = torch.randint(7, (64,))
    losses = [float(optimizer.learn(tokens, one_hot(tokens % 2, 2).float())) for _ in range(50)]
    assert losses[-1] < 1e-2  # of targets with a variance of 1/4


def test_muon_needs_a_torch_that_has_it(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(RuntimeError, match=r"needs torch.optim.Muon, of torch 2.9 or later, got torch"):
        sepsa.muon(network())


def test_a_gradient_scaler_steps_all_of_them():
    check_gradient_scaler(*build(), *build())
