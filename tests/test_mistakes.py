"""Mistakes that would train silently wrong: each is an error or a warning that says what to write, or is handled."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss, one_hot

import sepsa
from sepsa import RLS, LogisticNewton, OnlineLBFGS, PerOutput, SepSA, SoftmaxNewton
from sepsa.paper.slimtik import SlimTik


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 2))


def batch(n=8, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=g), torch.randn(n, 2, generator=g)


# ---------------------------------------------------------------------- a loop that forgets observe


def forgetful_step(model, optimizer):
    inputs, targets = batch()
    mse_loss(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_step_without_observe_warns_once_and_says_what_to_write():
    model = network()
    optimizer = SepSA(model, torch.optim.SGD, lr=1e-2)
    with pytest.warns(UserWarning, match=r"head '2' has learned nothing since .*`with optimizer.observe\(targets\)"):
        forgetful_step(model, optimizer)
    forgetful_step(model, optimizer)  # and no second time: warnings are errors here


def test_a_step_with_a_closure_without_observe_warns_too():
    model = network()
    optimizer = SepSA(model, torch.optim.SGD, lr=1e-2)

    def closure():
        optimizer.zero_grad()
        loss = mse_loss(model(batch()[0]), batch()[1])
        loss.backward()
        return loss

    with pytest.warns(UserWarning, match="has learned nothing since the last step"):
        optimizer.step(closure)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_loop_that_observes_is_not_warned(frozen):
    model = network()
    model[0].requires_grad_(not frozen)
    optimizer = SepSA(model, torch.optim.SGD, lr=1e-2)
    inputs, targets = batch()
    for _ in range(2):
        for half in (slice(0, 4), slice(4, 8)):  # accumulated
            with optimizer.observe(targets[half]):
                loss = mse_loss(model(inputs[half]), targets[half])
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()  # nothing reached the head


# ---------------------------------------------------------------------- at construction


def test_a_second_sepsa_takes_the_head_over_and_the_first_says_so():
    model = network()
    first = SepSA(model, torch.optim.SGD, lr=1e-2)
    second = SepSA(model, torch.optim.SGD, lr=1e-2)
    second.learn(*batch())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="no longer trains the head '2': a later SepSA took it over"):
        first.learn(*batch())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_base_that_owns_another_sepsas_head():
    inner = network()
    first = SepSA(inner, torch.optim.SGD, lr=1e-2)
    outer = nn.Sequential(inner, nn.Linear(2, 1))
    with pytest.raises(ValueError, match="another SepSA trains the head '2' of this model, and base would train it"):
        SepSA(outer, torch.optim.SGD)
    with pytest.raises(ValueError, match="another SepSA trains the head '2' of this model"):
        SepSA(outer, torch.optim.SGD(inner.parameters(), lr=0.1))
    SepSA(outer, torch.optim.SGD(inner[0].parameters(), lr=0.1))
    first.detach()
    SepSA(outer, torch.optim.SGD)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ridge": 10.0}, r"ridge is a setting of the head solver and not of Adam: .*solver=RLS\(ridge=10.0\)"),
        ({"lr": 0.1, "ridge": 1, "forgetting": 0.9}, r"forgetting is a setting .*RLS\(forgetting=0.9, ridge=1\)"),
    ],
)
def test_settings_of_the_solver_given_to_the_base(options, words):
    with pytest.raises(TypeError, match=words):
        SepSA(network(), torch.optim.Adam, **options)


def test_a_base_may_have_such_a_setting_of_its_own():
    class Ridged(torch.optim.SGD):
        def __init__(self, params, ridge):
            super().__init__(params, lr=0.1, weight_decay=ridge)

    assert SepSA(network(), Ridged, ridge=0.5).param_groups[0]["weight_decay"] == 0.5


def test_a_head_that_is_frozen():
    model = network().requires_grad_(False)
    with pytest.raises(ValueError, match=r"'2.weight' has requires_grad=False.*head.requires_grad_\(True\)"):
        SepSA(model, torch.optim.SGD)
    model = network()
    model[2].bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"'2.bias' has requires_grad=False"):
        SepSA(model, torch.optim.SGD)


def test_a_model_without_memory():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 2))
    with pytest.raises(ValueError, match="head '2' is on the meta device and has no weights: load the model first"):
        SepSA(model, torch.optim.SGD)


@pytest.mark.parametrize("base", [torch.optim.Adam, torch.optim.RMSprop])
def test_another_dtype_in_mid_run_is_followed(base):
    model, twin = network(), network()
    optimizer, other = (SepSA(m, base, lr=1e-2) for m in (model, twin))
    for k in range(3):
        optimizer.learn(*batch(seed=k))
        other.learn(*batch(seed=k))
    model.double()
    for k in range(3, 6):
        inputs, targets = batch(seed=k)
        optimizer.learn(inputs.double(), targets.double())
        other.learn(inputs, targets)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert p.dtype == torch.float64
        torch.testing.assert_close(p.float(), q, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- the wrong head, or something after it


class After(nn.Module):
    """A model whose output is not its head's, or is, in another shape or in company."""

    def __init__(self, then):
        super().__init__()
        self.body, self.head, self.then = nn.Linear(6, 9), nn.Linear(9, 2), then

    def forward(self, x):
        return self.then(self.head(torch.relu(self.body(x))))


def observe_twice(model, **options):
    optimizer = SepSA(model, torch.optim.SGD, lr=1e-2, **options)
    for _ in range(2):
        with optimizer.observe(torch.randn(8, 2)):
            model(batch()[0])


@pytest.mark.parametrize(
    "then", [torch.relu, lambda y: 10 * y, lambda y: y.mean(0), lambda y: {"logits": y + 1, "other": y[:1]}]
)
def test_what_follows_the_head_is_noticed_once(then):
    with pytest.warns(UserWarning, match=r"differs from the output of its head 'head', \(8, 2\): .* head=") as caught:
        observe_twice(After(then))
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("then", "words"),
    [
        (nn.Sigmoid(), r"remove the sigmoid from the model and use solver=LogisticNewton\(\)"),
        (lambda y: y.softmax(1), r"remove the softmax from the model and use solver=SoftmaxNewton\(\)"),
        (nn.LogSoftmax(-1), r"remove the log_softmax from the model and use solver=SoftmaxNewton\(\)"),
    ],
)
def test_an_activation_after_the_head_names_the_solver_of_its_logits(then, words):
    with pytest.warns(UserWarning, match=words) as caught:
        observe_twice(After(then))
    assert len(caught) == 1


def test_another_linear_taken_for_the_head_is_noticed():
    class Registered(nn.Module):
        def __init__(self):
            super().__init__()
            self.readout, self.body = nn.Linear(2, 2), nn.Linear(6, 2)

        def forward(self, x):
            return self.readout(torch.relu(self.body(x)))

    with pytest.warns(UserWarning, match="differs from the output of its head 'body'"):
        observe_twice(Registered())
    observe_twice(Registered(), head="readout")


@pytest.mark.parametrize(
    "then",
    [
        lambda y: y,
        lambda y: y.flatten(),
        lambda y: y.unsqueeze(1).double(),
        lambda y: (y.sum(), {"logits": y}),
        lambda y: "no tensor",
    ],
)
def test_a_head_that_gives_the_output_is_not_warned_of(then):
    observe_twice(After(then))


# ---------------------------------------------------------------------- losses on the wrong numbers


SOLVERS = {
    "RLS": RLS,
    "auto": lambda: RLS(ridge="auto"),
    "PerOutput": lambda: PerOutput(RLS()),
    "LogisticNewton": LogisticNewton,
    "SoftmaxNewton": SoftmaxNewton,
    "OnlineLBFGS": OnlineLBFGS,
    "OnlineLBFGS of classes": lambda: OnlineLBFGS(loss="cross-entropy"),
    "SlimTik": SlimTik,
}


class Squeezed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 9), nn.Linear(9, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x))).squeeze(-1)


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_the_losses_of_solvers_do_not_broadcast(solver):
    model = Squeezed()
    optimizer = SepSA(model, torch.optim.SGD, lr=1e-2, solver=solver())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"\(8, 1\), got outputs \(8,\) .*the model squeezed its output; .*unsqueeze"):
        optimizer.learn(batch()[0], torch.rand(8, 1))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with pytest.raises(ValueError, match=r"outputs \(8, 1\) and targets \(8,\): .* targets.unsqueeze\(-1\)"):
        optimizer.solver.loss(torch.zeros(8, 1), torch.zeros(8))
    with pytest.raises(ValueError, match=r"got outputs \(8, 1\) and targets \(4, 1\)$"):
        optimizer.solver.loss(torch.zeros(8, 1), torch.zeros(4, 1))


LOSSES = {
    "mse_loss": mse_loss,
    "L1Loss": nn.L1Loss(),
    "written": lambda outputs, targets: (targets - outputs).square().mean(),
}


@pytest.mark.parametrize("loss_fn", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("way", ["learn", "observe"])
def test_a_loss_of_the_user_that_broadcasts_is_refused(loss_fn, way):
    model, (inputs, targets) = Squeezed(), (batch()[0], torch.randn(8, 1))
    optimizer = SepSA(model, torch.optim.SGD, lr=1e-2)
    words = r"output has shape \(8,\) and the targets \(8, 1\), and \w+ broadcasts them to \(8, 8\).*view_as"
    if way == "learn":
        with pytest.raises(ValueError, match=words):
            optimizer.learn(inputs, targets, loss_fn)
    else:
        with pytest.raises(ValueError, match=words), optimizer.observe(targets):
            loss_fn(model(inputs), targets)
    loss = optimizer.learn(inputs, targets, lambda outputs, targets: loss_fn(outputs, targets.view_as(outputs)))
    torch.testing.assert_close(loss, loss_fn(model(inputs), targets[:, 0]), rtol=0.1, atol=0.1)  # the body has moved
    assert torch.overrides._len_torch_function_stack() == 0


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (nn.CrossEntropyLoss(), r"calls cross_entropy on .*solver=SoftmaxNewton\(\)"),
        (lambda outputs, y: -(y * outputs.log_softmax(-1)).mean(), r"calls log_softmax on .*solver=SoftmaxNewton\(\)"),
        (nn.BCEWithLogitsLoss(), r"calls binary_cross_entropy_with_logits on .*solver=LogisticNewton\(\)"),
    ],
)
@pytest.mark.parametrize("solver", [RLS, lambda: PerOutput(RLS()), lambda: RLS(ridge="auto")])
def test_a_loss_of_classes_beside_a_head_of_least_squares_is_warned_of_once(loss_fn, words, solver):
    model = network()
    optimizer = SepSA(model, torch.optim.SGD, lr=1e-2, solver=solver())
    hot = one_hot(torch.arange(8) % 2, 2).float()
    with pytest.warns(UserWarning, match=words):
        optimizer.learn(batch()[0], hot, loss_fn)
    optimizer.learn(batch()[0], hot, loss_fn)  # and no second time: warnings are errors here


def test_losses_that_fit_their_head_are_not_warned_of():
    hot = one_hot(torch.arange(8) % 2, 2).float()
    SepSA(network(), torch.optim.SGD, lr=1e-2).learn(batch()[0], hot, mse_loss)
    SepSA(network(), torch.optim.SGD, lr=1e-2, solver=SoftmaxNewton()).learn(batch()[0], hot, nn.CrossEntropyLoss())


@pytest.mark.parametrize(
    ("solver", "outputs", "shape", "words"),
    [
        (RLS, 2, (8,), r"use solver=SoftmaxNewton\(\), or for least squares use .*one_hot\(targets, 2\)"),
        (RLS, 2, (8, 1), r"use solver=SoftmaxNewton\(\) and targets.squeeze\(1\)"),
        (RLS, 1, (8,), r"targets.unsqueeze\(-1\).float\(\); for labels 0 and 1 use solver=LogisticNewton\(\)"),
        (SoftmaxNewton, 2, (8, 1), r"targets.squeeze\(1\)"),
    ],
)
def test_class_labels_of_the_wrong_shape_or_for_the_wrong_head(solver, outputs, shape, words):
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, outputs))
    optimizer = SepSA(model, torch.optim.SGD, lr=1e-2, solver=solver())
    with pytest.raises(TypeError, match=words):
        optimizer.learn(batch()[0], torch.zeros(shape, dtype=torch.long))


def test_labels_in_a_column_for_a_loss_of_classes():
    with pytest.raises(ValueError, match=r"give class labels as targets.squeeze\(1\)"):
        SoftmaxNewton().bind(nn.Linear(9, 3)).loss(torch.zeros(8, 3), torch.zeros(8, 1, dtype=torch.long))


# ---------------------------------------------------------------------- heads and bases that cannot learn


def test_a_given_base_that_leaves_out_parameters():
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 2))
    with pytest.warns(UserWarning, match=r"base does not train 1.weight, 1.bias, 2.weight and 1 more: build it on"):
        SepSA(model, torch.optim.SGD(model[0].parameters(), lr=1e-2))
    model[1:3].requires_grad_(False)
    SepSA(model, torch.optim.SGD(model[0].parameters(), lr=1e-2))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_head_whose_entries_share_memory(name):
    model = network()
    shared = getattr(model[2], name).detach()[:1].expand_as(getattr(model[2], name))
    setattr(model[2], name, nn.Parameter(shared))
    with pytest.raises(ValueError, match=rf"expanded {name} \(strides .*nn.Parameter\(head.{name}.detach\(\).clone"):
        RLS().bind(model[2])
    setattr(model[2], name, nn.Parameter(getattr(model[2], name).detach().clone()))
    SepSA(model, torch.optim.SGD, lr=1e-2).learn(*batch())


@pytest.mark.parametrize("solver", [RLS, SoftmaxNewton, LogisticNewton])
def test_inference_mode(solver):
    head, (x, y) = nn.Linear(6, 2), (batch()[0], one_hot(torch.arange(8) % 2, 2).float())
    with torch.inference_mode():
        with pytest.raises(RuntimeError, match=r"cannot bind its head inside torch.inference_mode\(\).*torch.no_grad"):
            solver().bind(head)
        made = nn.Linear(6, 2)
    with pytest.raises(ValueError, match=r"a weight that was made in torch.inference_mode\(\).*head.weight = nn.Para"):
        solver().bind(made)
    bound = solver().bind(head)
    with torch.inference_mode():
        with pytest.raises(RuntimeError, match=r"cannot learn inside torch.inference_mode\(\)"):
            bound.update(x, y)
        bound.predict(x)
    bound.update(x, y)


def test_numpy_numbers_are_numbers(tmp_path):
    def build():
        base = {"lr": np.float32(0.125), "momentum": np.float64(0.5), "nesterov": np.True_}
        return SepSA(network(), torch.optim.SGD, solver=RLS(ridge=np.float32(2), forgetting=np.float16(0.5)), **base)

    optimizer = build()
    optimizer.head_fraction = np.float32(0.5)
    optimizer.param_groups[0]["lr"] = np.float32(0.25)  # as a scheduler may set it
    optimizer.learn(*batch())
    path = tmp_path / "checkpoint.sepsa"
    sepsa.save(optimizer, path, keep=np.int64(2))
    loaded = sepsa.load(path, into=build())
    assert loaded.solver.ridge == 2
    assert loaded.solver.forgetting == 0.5
    assert loaded.head_fraction == 0.5
    assert loaded.param_groups[0]["lr"] == 0.25
    assert OnlineLBFGS(memory=np.int32(3)).memory == 3
    assert SoftmaxNewton(label_smoothing=np.float32(0.5)).label_smoothing == 0.5
    for wrong in (np.bool_(True), True, "1", None):
        with pytest.raises(TypeError, match=r"ridge must be a number in \(0, inf\), got"):
            RLS(ridge=wrong)


# ---------------------------------------------------------------------- detach


@pytest.mark.parametrize("solver", [RLS, lambda: RLS(ridge="auto")])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of its TorchScript and its compiler
def test_a_detached_model_is_free_of_us(solver, tmp_path):
    model = network()
    optimizer = SepSA(model, torch.optim.SGD, lr=1e-2, solver=solver())
    optimizer.learn(*batch())
    free = optimizer.detach()
    assert b"sepsa" not in pickle.dumps(model)
    inputs = batch()[0]
    torch.testing.assert_close(torch.jit.script(model)(inputs), model(inputs))
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(inputs), model(inputs))
    with pytest.raises(RuntimeError, match=r"no longer trains the head '2': .* or detach\(\) was called"):
        optimizer.learn(*batch())
    with free:  # and back again
        pass
    optimizer.learn(*batch())
    with optimizer.detach():
        saved = pickle.dumps(model)
    assert b"sepsa" not in saved
    optimizer.learn(*batch())
    assert optimizer.solver.steps == 3
    assert b"sepsa" in pickle.dumps(model)


def test_a_detached_model_loads_where_sepsa_is_not_installed(tmp_path, preloaded_bin):
    model = network()
    optimizer = SepSA(model, torch.optim.SGD, lr=1e-2)
    optimizer.learn(*batch())
    optimizer.detach()
    torch.save(model, tmp_path / "model.pt")
    code = (
        "import sys; sys.modules['sepsa'] = None\nimport torch\n"
        f"print(torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)(torch.ones(1, 6)).tolist())"
    )
    done = subprocess.run([preloaded_bin / "python", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(model(torch.ones(1, 6)).tolist())


def test_buffers_of_files_are_enough():
    model = network()
    optimizer = SepSA(model, torch.optim.SGD, lr=1e-2)
    optimizer.learn(*batch())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert b"sepsa" not in file.getvalue()
