"""Mistakes that would train silently wrong: each is an error or a warning that says what to write, or is handled."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from sepsa import RLS, SepSA
from third_party import LMS


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
    with pytest.raises(RuntimeError, match="no longer teaches the head '2': a later SepSA took it over"):
        first.learn(*batch())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_base_that_owns_another_sepsas_head():
    inner = network()
    first = SepSA(inner, torch.optim.SGD, lr=1e-2)
    outer = nn.Sequential(inner, nn.Linear(2, 1))
    with pytest.raises(ValueError, match="another SepSA teaches the head '2' of this model, and base would move it"):
        SepSA(outer, torch.optim.SGD)
    with pytest.raises(ValueError, match="another SepSA teaches the head '2' of this model"):
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
    "then", [torch.sigmoid, lambda y: 10 * y, lambda y: y.mean(0), lambda y: {"logits": y + 1, "other": y[:1]}]
)
def test_what_follows_the_head_is_noticed_once(then):
    with pytest.warns(UserWarning, match=r"is not what its head 'head' gives, \(8, 2\): .* head=") as caught:
        observe_twice(After(then))
    assert len(caught) == 1


def test_another_linear_taken_for_the_head_is_noticed():
    class Registered(nn.Module):
        def __init__(self):
            super().__init__()
            self.readout, self.body = nn.Linear(2, 2), nn.Linear(6, 2)

        def forward(self, x):
            return self.readout(torch.relu(self.body(x)))

    with pytest.warns(UserWarning, match="is not what its head 'body' gives"):
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
    with pytest.raises(RuntimeError, match=r"no longer teaches the head '2': .* or detach\(\) was called"):
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


def test_a_detached_model_loads_where_sepsa_is_not_installed(tmp_path):
    model = network()
    optimizer = SepSA(model, torch.optim.SGD, lr=1e-2)
    optimizer.learn(*batch())
    optimizer.detach()
    torch.save(model, tmp_path / "model.pt")
    code = (
        "import sys; sys.modules['sepsa'] = None\nimport torch\n"
        f"print(torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)(torch.ones(1, 6)).tolist())"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert said == str(model(torch.ones(1, 6)).tolist())


def test_buffers_of_files_are_enough():
    model = network()
    optimizer = SepSA(model, torch.optim.SGD, lr=1e-2)
    optimizer.learn(*batch())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert b"sepsa" not in file.getvalue()


# ---------------------------------------------------------------------- the log


def test_health_is_logged_every_so_many_steps():
    model = network()
    optimizer = SepSA(model, torch.optim.SGD, lr=1e-2)
    lines = []
    handle = optimizer.log_health(lambda numbers, step: lines.append((step, numbers)), every=3)
    for k in range(7):
        optimizer.learn(*batch(seed=k))
    assert [step for step, _ in lines] == [3, 6]
    assert lines[-1][1]["2/effective_samples"] == 48
    handle.remove()
    for k in range(3):
        optimizer.learn(*batch(seed=k))
    assert len(lines) == 2
    with pytest.raises(ValueError, match="every must be an integer of at least 1, got 0"):
        optimizer.log_health(print, every=0)
    with pytest.raises(TypeError, match=r"solver LMS of the head '2' has no health\(\) to log"):
        SepSA(network(), torch.optim.SGD, solver=LMS()).log_health(print)
