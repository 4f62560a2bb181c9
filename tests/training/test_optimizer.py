"""SepSA as a torch.optim.Optimizer: the contract, one user habit at a time."""

import copy
import pickle
import shutil
import subprocess

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import sepsa
from sepsa import RLS, OnlineLBFGS, PerOutput, SepSA, SoftmaxNewton
from sepsa.states.tree import leaves
from sepsa.testing.case import difference
from training_loops import Named, batches, by_hand, check_gradient_scaler, network, same, train


# tests/training/test_joint.py has every optimizer of torch.optim.
@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
def test_it_is_the_loop_by_hand(base):
    model, twin = network(), network()
    optimizer = SepSA(model, base, lr=1e-2)
    train(model, optimizer, batches())
    by_hand(twin, [base([*twin[0].parameters()], lr=1e-2)], RLS(ridge="evidence"), batches())
    assert same(model, twin)
    assert not same(model, network())


def test_forward_outside_observe_never_learns():
    model = network()
    optimizer = SepSA(model, torch.optim.Adam, lr=1e-2)
    before = copy.deepcopy(model.state_dict())
    mse_loss(model(batches()[0][0]), batches()[0][1]).backward()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert optimizer.solver.steps == 0
    assert model[-1].weight.grad is not None  # an ordinary model outside observe
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_observe_that_misses_the_head_or_meets_it_twice():
    model = network()
    optimizer = SepSA(model, torch.optim.Adam)
    inputs, targets = batches()[0]
    with pytest.raises(RuntimeError, match="never reached the head '2'"), optimizer.observe(targets):
        model[0](inputs)
    with pytest.raises(RuntimeError, match="reached the head '2' twice"), optimizer.observe(targets):
        _ = model(inputs), model(inputs)
    assert optimizer.solver.steps == 0  # all or nothing
    nested = optimizer.observe(targets), optimizer.observe(targets)
    with pytest.raises(RuntimeError, match="observe is already active"), nested[0], nested[1]:
        pass
    with pytest.raises(ZeroDivisionError), optimizer.observe(targets):  # the user's own error comes through
        raise ZeroDivisionError
    optimizer.learn(inputs, targets)
    assert all(p.requires_grad for p in model.parameters())


# ---------------------------------------------------------------------- heads


def nested():
    return nn.Sequential(nn.Linear(6, 9), nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(9, 2))))


@pytest.mark.parametrize(
    ("model", "head", "name"),
    [(Named(), "readout", "readout"), (nested(), None, "1.1.0"), (nn.Linear(6, 2), None, "")],  # the last has no body
)
def test_the_head_is_named_or_the_last_linear(model, head, name):
    optimizer = SepSA(model, torch.optim.Adam, head=head, lr=1e-2)
    assert optimizer.heads == {name: model.get_submodule(name)}
    train(model, optimizer, batches())
    assert optimizer.solver.steps == 12
    assert list(SepSA(Named(), torch.optim.Adam, head=None).heads) == ["body"]  # the last registered, as documented
    free = nested()
    assert list(SepSA(free, torch.optim.Adam, head=free[0]).heads) == ["0"]


@pytest.mark.parametrize("by", ["requires_grad", "detached"])
def test_frozen_body(by):
    """Pure online linear learning on an extractor: equals RLS on its features."""
    model = network()
    twin = copy.deepcopy(model)
    if by == "requires_grad":
        model[0].requires_grad_(False)
    optimizer = SepSA(model, torch.optim.Adam, lr=1e-2)
    solver = RLS(ridge="evidence").bind(twin[-1])
    for inputs, targets in batches():
        if by == "requires_grad":
            train(model, optimizer, [(inputs, targets)])
        else:
            with torch.no_grad(), optimizer.observe(targets):
                model(inputs)
        solver.update(twin[:-1](inputs).detach(), targets)
    assert same(model, twin)


# ---------------------------------------------------------------------- an optimizer as any other


def test_add_param_group():
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 2))
    model[2].requires_grad_(False)
    optimizer = SepSA(model, torch.optim.Adam([*model[0].parameters()], lr=1e-3))
    model[2].requires_grad_(True)
    optimizer.add_param_group({"params": [*model[2].parameters()], "lr": 0.5})
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.5]
    assert optimizer.param_groups is optimizer.base.param_groups
    train(model, optimizer, batches())
    with pytest.raises(ValueError, match=r"base owns the head's parameter '4.weight'"):
        optimizer.add_param_group({"params": model[4].weight})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    ],
)
def test_learning_rate_schedulers(make):
    model, twin = network(), network()
    optimizer = SepSA(model, torch.optim.Adam, lr=1e-2)
    base = torch.optim.Adam(twin[0].parameters(), lr=1e-2)
    solver = RLS(ridge="evidence")
    ours, theirs = make(optimizer), make(base)
    for k, batch in enumerate(batches()):
        train(model, optimizer, [batch])
        by_hand(twin, [base], solver, [batch])
        for scheduler in (ours, theirs):
            scheduler.step(float(k)) if "Plateau" in type(scheduler).__name__ else scheduler.step()
        assert optimizer.param_groups[0]["lr"] == base.param_groups[0]["lr"]
    assert same(model, twin)


def test_autocast_in_bfloat16():
    model = network()
    optimizer = SepSA(model, torch.optim.Adam, lr=1e-2, solver=RLS(dtype=torch.float32))
    plain = RLS(dtype=torch.float32).bind(copy.deepcopy(model[-1]))
    for inputs, targets in batches():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            features = model[:-1](inputs)
            with optimizer.observe(targets):
                loss = mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert features.dtype == torch.bfloat16
        plain.update(features.detach(), targets)  # outside of autocast: the head's own arithmetic is not in bfloat16
    assert torch.equal(model[-1].weight, plain.linear.weight)


def test_gradient_scaler():
    model, twin = network(), network()
    optimizer, plain = (SepSA(m, torch.optim.SGD, lr=1e-2) for m in (model, twin))
    check_gradient_scaler(model, optimizer, twin, plain)


def test_backward_through_a_head_that_has_learned_since_is_noticed():
    model = network()
    optimizer = SepSA(model, torch.optim.SGD, lr=1e-2)
    losses = []
    for inputs, targets in batches(2):
        with optimizer.observe(targets):
            losses.append(mse_loss(model(inputs), targets))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sum(losses).backward()


COMPILER = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="torch.compile's default backend writes C++ and this machine has no C++ compiler",
)


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11), reason="tried with torch 2.11 and later; 2.6 cannot"
)
@pytest.mark.parametrize(
    ("backend", "first"), [("eager", "compile"), pytest.param("inductor", "optimizer", marks=COMPILER)]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torch_compile(backend, first):
    torch._dynamo.reset()
    model, twin = network(), network()
    if first == "optimizer":
        optimizer = SepSA(model, torch.optim.SGD, lr=1e-2)
    compiled = torch.compile(model, backend=backend)
    if first == "compile":
        optimizer = SepSA(compiled, torch.optim.SGD, lr=1e-2)
    plain = SepSA(twin, torch.optim.SGD, lr=1e-2)
    for inputs, targets in batches():
        if backend == "eager":
            compiled(inputs)  # a look without learning in between
        train(compiled, optimizer, [(inputs, targets)])
        plain.learn(inputs, targets)
    assert optimizer.solver.steps == 12
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_hooks_run_on_it_as_on_any_optimizer():
    model = network()
    optimizer = SepSA(model, torch.optim.Adam, lr=1e-2)
    seen = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(("before", o is optimizer)))
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(("after", o is optimizer)))
    optimizer.register_state_dict_pre_hook(lambda o: seen.append(("saving", o is optimizer)))
    optimizer.register_state_dict_post_hook(lambda o, s: {**s, "mine": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, s: {k: v for k, v in s.items() if k != "mine"})
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(("loaded", o is optimizer)))
    train(model, optimizer, batches(1))
    state = optimizer.state_dict()
    assert state["mine"] == 1
    optimizer.load_state_dict(state)
    assert seen == [("before", True), ("after", True), ("saving", True), ("loaded", True)]
    for way in (copy.deepcopy, copy.copy, lambda o: pickle.loads(pickle.dumps(o))):  # as of Adam
        twin = way(optimizer)
        train(twin.model, twin, batches(1))
        assert "mine" not in twin.state_dict()
    assert len(seen) == 4


def test_closures():
    model = network()
    optimizer = SepSA(model, torch.optim.SGD, lr=1e-2)
    inputs, targets = batches()[0]

    def closure():
        optimizer.zero_grad()
        with optimizer.observe(targets):
            loss = mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    assert optimizer.solver.steps == 1


# ---------------------------------------------------------------------- the paper's mini-batch rule


def test_head_fraction_feeds_a_random_share_rounded_up_of_features_targets_and_weights():
    model = nn.Sequential(nn.Identity(), nn.Linear(1, 1))
    optimizer = SepSA(model, torch.optim.SGD, lr=0.0)
    inputs, state, seen = torch.arange(8.0).unsqueeze(1), torch.get_rng_state(), []
    optimizer.solver.update = lambda f, t, w=None: seen.append((f, t, w))
    for fraction in (1.0, 0.5, 0.3, 0.125, 0.01, *[0.3] * 20):
        optimizer.head_fraction = fraction
        with optimizer.observe(2 * inputs, sample_weight=3 * inputs[:, 0]):
            model(inputs)
    for f, t, w in seen:
        assert torch.equal(t, 2 * f)
        assert torch.equal(w, 3 * f[:, 0])
    assert [len(set(f[:, 0].tolist())) for f, _, _ in seen] == [8, 4, 3, 1, 1] + [3] * 20
    assert len({tuple(f[:, 0].tolist()) for f, _, _ in seen}) > 6
    assert torch.equal(state, torch.get_rng_state())  # the global random numbers are left alone


def test_head_fraction_takes_class_labels_where_the_solver_does():
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4))
    optimizer = SepSA(model, torch.optim.SGD, lr=0.01, solver=SoftmaxNewton())
    optimizer.head_fraction = 0.5
    optimizer.learn(torch.randn(8, 3), torch.randint(0, 4, (8,)))
    assert optimizer.solver.steps == 1
    with pytest.raises(ValueError, match="sample_weight"), optimizer.observe(torch.randint(0, 4, (8,)), torch.ones(7)):
        model(torch.randn(8, 3))


def test_head_fraction_out_of_range():
    optimizer = SepSA(network(), torch.optim.SGD)
    for value in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"head_fraction must be in \(0, 1\]"):
            optimizer.head_fraction = value
    assert optimizer.head_fraction == 1.0


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("base", [torch.optim.Adam, torch.optim.Adafactor])
def test_copies_of_model_and_optimizer_go_their_own_way(how, base):
    model = network()
    optimizer = SepSA(model, base, lr=1e-2)
    optimizer.head_fraction = 0.5
    train(model, optimizer, batches(6))
    twin, other = how((model, optimizer))
    assert other.head is twin[-1]
    assert other.param_groups[0]["params"][0] is twin[0].weight
    train(model, optimizer, batches(6, seed=3))
    assert not same(model, twin)
    other.load_state_dict(copy.deepcopy(other.state_dict()))
    train(twin, other, batches(6, seed=3))
    assert same(model, twin)


def test_a_copied_or_saved_model_is_free_of_the_optimizer():
    model = network()
    optimizer = SepSA(model, torch.optim.Adam, lr=1e-2)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(RuntimeError, match="never reached"), optimizer.observe(batches()[0][1]):
            twin(batches()[0][0])
    assert optimizer.solver.steps == 0
    del optimizer
    model(batches()[0][0])


def test_a_model_exports_as_if_we_were_not_there():
    model = network()
    optimizer = SepSA(model, torch.optim.Adam, lr=1e-2)
    train(model, optimizer, batches())
    inputs = batches()[0][0]
    exported = torch.export.export(model, (inputs,)).module()
    torch.testing.assert_close(exported(inputs), model(inputs))


def test_a_checkpoint_of_another_shape_is_refused_whole():
    model = network()
    optimizer = SepSA(model, torch.optim.Adam, lr=1e-2)
    train(model, optimizer, batches())
    before = copy.deepcopy(optimizer.state_dict())
    for bad, words in [
        (SepSA(nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 3)), torch.optim.Adam).state_dict(), "another size"),
        (SepSA(nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 2)), torch.optim.Adam).state_dict(), "a body with param"),
        (torch.optim.Adam(model.parameters()).state_dict(), r"must come from SepSA.state_dict\(\)"),
    ]:
        with pytest.raises(ValueError, match=words):
            optimizer.load_state_dict(bad)
    assert not difference(leaves(optimizer.state_dict()), leaves(before))


# ---------------------------------------------------------------------- bad input


def tied():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    return model


def solved_by(solver):
    return SepSA(network(), torch.optim.Adam, solver=solver)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda m: SepSA(m.parameters(), torch.optim.Adam), TypeError, "model must be an nn.Module, got generator"),
        (lambda m: SepSA(m, torch.optim.Adam(m.parameters())), ValueError, "base owns the head's parameter '2.weight'"),
        (lambda m: SepSA(m, torch.optim.Adam(m[0].parameters()), lr=1.0), ValueError, r"got also \['lr'\]"),
        (lambda m: SepSA(m, "adam"), TypeError, "base must be a torch.optim.Optimizer class or instance, got 'adam'"),
        (lambda m: SepSA(m, nn.Linear), TypeError, "base must be a torch.optim.Optimizer"),
        (lambda m: SepSA(m, SepSA), ValueError, "got a SepSA"),
        (lambda m: SepSA(m, torch.optim.Adam, lr=-1.0), ValueError, "Invalid learning rate: -1.0"),
        (lambda m: SepSA(m, torch.optim.Adam, head="7"), ValueError, r"'7' is not a module .* are \['0', '2'\]"),
        (lambda m: SepSA(m, torch.optim.Adam, head="1"), TypeError, "got '1', a ReLU"),
        (lambda m: SepSA(m, torch.optim.Adam, head=m[1]), TypeError, "head must be an nn.Linear, its name, or None"),
        (lambda m: SepSA(m, torch.optim.Adam, head=nn.Linear(9, 2)), ValueError, "head is not a module of the model"),
        (lambda m: SepSA(m[1], torch.optim.Adam), ValueError, "model has no nn.Linear"),
        (lambda m: SepSA(tied(), torch.optim.Adam), ValueError, "shares a parameter with '0.weight'"),
        (lambda m: solved_by(5), TypeError, r"such as RLS\(\), None or one of .*, got 5: a solver of your own needs"),
        (lambda m: solved_by(RLS), TypeError, r"must be an instance, got the class RLS: write solver=RLS\(\)"),
        (lambda m: solved_by(nn.Linear(2, 2)), TypeError, "solver must be a head solver"),
        (lambda m: solved_by("hinge"), ValueError, "None or one of .*'cross-entropy'.*, got 'hinge'"),
    ],
)
def test_bad_construction(make, error, words):
    with pytest.raises(error, match=words):
        make(network())


def test_targets_are_checked_where_they_enter():
    optimizer = SepSA(network(), torch.optim.Adam)
    with pytest.raises(TypeError, match=r"targets must be a torch.Tensor, got list"):
        optimizer.observe([1.0])
    for optimizer.head_fraction, shape in ((1.0, (8, 3)), (0.5, (8, 3)), (0.5, (7, 2))):
        with pytest.raises(ValueError, match=r"targets must have (shape \(8, 2\)|8 rows)"):
            optimizer.learn(batches()[0][0], torch.zeros(shape))


def test_it_says_what_it_is():
    text = repr(SepSA(network(), torch.optim.Adam, lr=1e-2))
    assert text.startswith("SepSA(head='2', solver=RLS(ridge=evidence, now 10, forgetting=1, head=9->2, backend=")
    assert "base=Adam (" in text


# ---------------------------------------------------------------------- mistakes that get a cure


def test_a_head_that_was_changed_or_replaced_is_named():
    inputs, targets = batches()[0]
    model = network()
    optimizer = SepSA(model, torch.optim.Adam)
    before = model[2].weight
    model[2].weight = nn.Parameter(torch.zeros(3, 9, dtype=before.dtype))
    with pytest.raises(ValueError, match=r"head '2' has a weight .*\[3, 9\].* and had .*\[2, 9\].*make a new SepSA"):
        optimizer.learn(inputs, targets)
    model[2].weight = before
    optimizer.learn(inputs, targets)
    model[2] = copy.deepcopy(model[2])
    with pytest.raises(RuntimeError, match="the model no longer has the head '2' of this SepSA, which was replaced"):
        optimizer.learn(inputs, targets)
    model = network()
    optimizer = SepSA(model, torch.optim.Adam)
    model[2].bias = None
    with pytest.raises(ValueError, match=r"a bias of shapes \[.*, None\] and had \[.*, torch.Size\(\[2\]\)\]"):
        optimizer.learn(inputs, targets)
    later = network()
    still = SepSA(network(), torch.optim.Adam)
    with pytest.raises(RuntimeError, match=r"optimizer\.model, not a later one or a copy"), still.observe(targets):
        later(inputs)


COMPUTED = {
    "prune": (lambda head: prune.l1_unstructured(head, "weight", 0.5), lambda head: prune.remove(head, "weight")),
    "prune the bias": (
        lambda head: prune.random_unstructured(head, "bias", 1),
        lambda head: prune.remove(head, "bias"),
    ),
    "weight_norm": (parametrizations.weight_norm, lambda head: parametrize.remove_parametrizations(head, "weight")),
    "spectral_norm": (nn.utils.spectral_norm, nn.utils.remove_spectral_norm),
}


@pytest.mark.parametrize("name", COMPUTED)
@pytest.mark.parametrize("solver", [RLS, OnlineLBFGS, lambda: PerOutput(RLS())])
def test_a_head_that_is_pruned_or_parametrized_later_is_named(name, solver):
    model, (inputs, targets) = network(), batches()[0]
    optimizer = SepSA(model, torch.optim.Adam, solver=solver())
    optimizer.learn(inputs, targets)
    twin, other = copy.deepcopy((model, optimizer))
    spoil, mend = COMPUTED[name]
    spoil(model[2])
    before = copy.deepcopy(model.state_dict())
    which = "bias" if "bias" in name else "weight"
    for use in (lambda: optimizer.learn(inputs, targets), lambda: optimizer.solver.update(model[:2](inputs), targets)):
        with pytest.raises(ValueError, match=f"head computes its {which} from other parameters.*remove"):
            use()
    optimizer.step()
    optimizer.zero_grad()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    mend(model[2])  # weight and bias are registered in another order now
    twin.load_state_dict(model.state_dict())
    for one in (optimizer, other):
        one.learn(inputs, targets)
    assert all(torch.equal(value, twin.state_dict()[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("with_kwargs", [False, True])
def test_the_head_learns_what_it_is_applied_to(with_kwargs):
    """A forward pre-hook that is added to the head later changes its features before it learns."""
    model, twin = network(), network()
    optimizer = SepSA(model, torch.optim.SGD, lr=1e-2)
    other = SepSA(twin, torch.optim.SGD, lr=1e-2)
    twin[1].register_forward_hook(lambda module, args, output: 3 * output + 1)
    if with_kwargs:
        model[2].register_forward_pre_hook(lambda module, args, kwargs: ((3 * args[0] + 1,), kwargs), with_kwargs=True)
    else:
        model[2].register_forward_pre_hook(lambda module, args: (3 * args[0] + 1,))
    for inputs, targets in batches(3):
        optimizer.learn(inputs, targets)
        other.learn(inputs, targets)
    assert same(model, twin)


def test_a_frozen_head_stays_and_its_batches_train_the_body():
    """As a frozen parameter of Adam: what is missing or shaped wrongly is treated as of a head that learns."""
    model, twin, (inputs, targets) = network(), network(), batches()[0]
    optimizer = SepSA(model, torch.optim.Adam, lr=1e-2)
    model[2].requires_grad_(False)
    base = torch.optim.Adam(twin[0].parameters(), lr=1e-2)
    targets[2] = float("nan")
    for _ in range(3):
        optimizer.learn(inputs, targets)
        rows = torch.arange(8) != 2
        mse_loss(twin(inputs[rows]), targets[rows]).backward()
        base.step()
        base.zero_grad()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert torch.equal(model[2].weight, network()[2].weight)
    assert optimizer.solver.steps == 0
    with pytest.raises(ValueError, match=r"targets must have shape \(8, 2\)"):
        optimizer.learn(inputs, targets[:, :1])
    model[2].bias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"head '2' has a frozen weight alone.*requires_grad_"):
        optimizer.learn(inputs, targets)
    step = optimizer.capture(inputs, targets.nan_to_num())
    model[2].requires_grad_(False)
    step(inputs, targets.nan_to_num())
    assert optimizer.solver.steps == 0
    model[2].requires_grad_(True)
    step(inputs, targets.nan_to_num())
    assert optimizer.solver.steps == 1


def hooks(model):
    return [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]


@pytest.mark.parametrize("solver", [RLS, lambda: RLS(ridge="evidence")])
def test_hooks_of_an_older_sepsa_are_gone(solver):
    model = network()
    older = SepSA(model, torch.optim.Adam, solver=solver())
    assert sum(hooks(model)) == 1
    newer = SepSA(model, torch.optim.Adam, solver=solver())
    newer.learn(*batches()[0])
    assert sum(hooks(model)) == 1
    with pytest.raises(RuntimeError, match="this SepSA no longer trains the head '2': a later SepSA took it over"):
        older.learn(*batches()[0])
    del older, newer
    SepSA(model, torch.optim.Adam, head="0")  # the hook of an optimizer that no longer exists goes too
    assert hooks(model) == [0, 1, 0, 0]


@pytest.mark.filterwarnings("ignore:`torch.jit")  # deprecated, and still used
def test_a_model_with_hooks_can_be_scripted():
    model = network()
    optimizer = SepSA(model, torch.optim.Adam, solver=RLS(ridge="evidence"))
    optimizer.learn(*batches()[0])
    scripted = torch.jit.script(model)
    x = batches()[1][0]
    torch.testing.assert_close(scripted(x), model(x), rtol=0, atol=0)
    optimizer.learn(*batches()[1])
    assert optimizer.solver.steps == 2


# ---------------------------------------------------------------------- what looks like a mistake and is none


def test_numpy_numbers_are_numbers(tmp_path):
    def build():
        base = {"lr": np.float32(0.125), "momentum": np.float64(0.5), "nesterov": np.True_}
        return SepSA(network(), torch.optim.SGD, solver=RLS(ridge=np.float32(2), forgetting=np.float16(0.5)), **base)

    optimizer = build()
    optimizer.head_fraction = np.float32(0.5)
    optimizer.param_groups[0]["lr"] = np.float32(0.25)  # as a scheduler may set it
    optimizer.learn(*batches()[0])
    path = tmp_path / "checkpoint.sepsa"
    sepsa.save(optimizer, path)
    loaded = sepsa.load(path, into=build())
    assert loaded.solver.ridge == 2
    assert loaded.solver.forgetting == 0.5
    assert loaded.head_fraction == 0.5
    assert loaded.param_groups[0]["lr"] == 0.25
    assert OnlineLBFGS(memory=np.int32(3)).memory == 3
    assert SoftmaxNewton(label_smoothing=np.float32(0.5)).label_smoothing == 0.5


@pytest.mark.parametrize("solver", [RLS, lambda: RLS(ridge="evidence")])
def test_a_detached_model_is_free_of_us(solver, tmp_path):
    model = network()
    optimizer = SepSA(model, torch.optim.SGD, lr=1e-2, solver=solver())
    optimizer.learn(*batches()[0])
    free = optimizer.detach()
    assert b"sepsa" not in pickle.dumps(model)
    with pytest.raises(RuntimeError, match=r"no longer trains the head '2': .* or detach\(\) was called"):
        optimizer.learn(*batches()[0])
    with free:  # and back again
        pass
    optimizer.learn(*batches()[0])
    with optimizer.detach():
        saved = pickle.dumps(model)
    assert b"sepsa" not in saved
    optimizer.learn(*batches()[0])
    assert optimizer.solver.steps == 3
    assert b"sepsa" in pickle.dumps(model)


def test_a_detached_model_loads_where_sepsa_is_not_installed(tmp_path, preloaded_bin):
    model = network()
    SepSA(model, torch.optim.SGD).detach()
    torch.save(model, tmp_path / "model.pt")
    code = (
        "import sys; sys.modules['sepsa'] = None\nimport torch\n"
        f"print(torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)(torch.ones(1, 6)).tolist())"
    )
    done = subprocess.run([preloaded_bin / "python", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(model(torch.ones(1, 6)).tolist())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("part", ["head", "all"])
def test_activation_checkpointing_around_the_head_changes_nothing(part, reentrant):
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            if part == "all":
                return checkpoint(super().forward, x.requires_grad_(), use_reentrant=reentrant)
            return checkpoint(self[2], self[1](self[0](x)), use_reentrant=reentrant)

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    one, other = (SepSA(copy.deepcopy(m), torch.optim.Adam, lr=1e-2) for m in (plain, Checkpointed(*plain)))
    for _ in range(5):
        x = torch.randn(5, 3)
        for optimizer in (one, other):
            optimizer.learn(x.clone(), x.sum(1, keepdim=True))
    for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
