"""The head and the optimizer where the model lies on a GPU."""

import copy
import gc
import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from sepsa import RLS, OnlineLBFGS, SepSA, SoftmaxNewton
from sepsa.heads import PrecisionWarning
from sepsa.heads.run.choose import force
from sepsa.heads.run.record import recording
from sepsa.ranks import exchange
from third_party import CapturableLMS

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),  # torch's compiler imports it
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled:UserWarning"),  # a word of torch's compiler
]


LEARNERS = {
    "RLS": RLS,
    "RLS, forgetting 0.9": lambda: RLS(forgetting=0.9),
    "RLS, evidence": lambda: RLS(ridge="evidence"),
    "RLS, evidence, forgetting 0.9": lambda: RLS(ridge="evidence", forgetting=0.9),
}


@pytest.mark.parametrize(("n", "name"), [*((16, name) for name in LEARNERS), (1, "RLS"), (1, "RLS, forgetting 0.9")])
def test_a_gpu_and_a_cpu_learn_the_same(n, name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 2)).double()
    twin = copy.deepcopy(model).cuda()
    one = SepSA(model, torch.optim.Adam, solver=LEARNERS[name](), lr=1e-2)
    two = SepSA(twin, torch.optim.Adam, solver=LEARNERS[name](), lr=1e-2)
    x, y = torch.randn(4 * n, 6).double(), torch.randn(4 * n, 2).double()
    for _ in range(8 if n == 1 else 3):
        for a, b in zip(x.split(n), y.split(n), strict=True):
            torch.testing.assert_close(two.learn(a.cuda(), b.cuda()).cpu(), one.learn(a, b), rtol=1e-7, atol=1e-7)


def test_the_curvature_moves_with_the_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 2)).double()
    optimizer = SepSA(model, torch.optim.SGD, lr=1e-2)
    twin, other = copy.deepcopy((model, optimizer))
    data = [(torch.randn(8, 6).double(), torch.randn(8, 2).double()) for _ in range(10)]
    for x, y in data[:5]:
        optimizer.learn(x, y)
        other.learn(x, y)
    model.cuda()
    for x, y in data[5:]:
        optimizer.learn(x.cuda(), y.cuda())
        other.learn(x, y)
    assert optimizer.solver.covariance().is_cuda
    torch.testing.assert_close(model[2].weight.cpu(), twin[2].weight, rtol=1e-8, atol=1e-8)
    with pytest.raises(ValueError, match="features must be on cuda:0, where the head is, got cpu"):
        optimizer.solver.update(torch.zeros(1, 20), torch.zeros(1, 2))


def test_autocast_and_scaler_in_float16():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 2)).cuda()
    optimizer = SepSA(model, torch.optim.Adam, lr=1e-2)
    scaler = torch.amp.GradScaler("cuda")
    x, y = torch.randn(64, 6, device="cuda"), torch.randn(64, 2, device="cuda")
    losses = []
    for _ in range(20):
        with torch.autocast("cuda", dtype=torch.float16), optimizer.observe(y):
            loss = torch.nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


# ---------------------------------------------------------------------- one CUDA graph

CNN = nn.Sequential(
    nn.Conv2d(1, 4, 3, bias=False),
    nn.BatchNorm2d(4),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(4 * 36, 20),
    nn.ReLU(),
    nn.Linear(20, 3),
)


def images(steps, n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(steps * n, 1, 8, 8, generator=g).cuda(), torch.randn(steps * n, 3, generator=g).cuda()


BASES = {
    "fused Adam": (torch.optim.Adam, {"lr": 1e-3, "fused": True}),
    "Adam": (torch.optim.Adam, {"lr": 1e-3}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.9}),
    "SGD": (torch.optim.SGD, {"lr": 1e-3}),
    "NAG": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, "nesterov": True}),
}


def pair(base="fused Adam", forgetting=1.0):
    torch.manual_seed(0)
    kind, options = BASES[base]
    models = [copy.deepcopy(CNN).cuda() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    return [(m, SepSA(m, kind, solver=RLS(forgetting=forgetting), **options)) for m in models]


def assert_alike(one, two, tolerance=2e-4):
    for (name, a), b in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(("base", "compile"), [*((base, False) for base in BASES), ("fused Adam", True), ("NAG", True)])
@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize("forgetting", [1.0, 0.95])
def test_a_captured_step_is_the_eager_step(base, n, forgetting, compile):
    (model, optimizer), (twin, plain) = pair(base, forgetting)
    if n == 1:
        model.eval(), twin.eval()
    x, y = images(20, n)
    step = optimizer.capture(x[:n], y[:n], compile=compile)
    for i in range(10):
        loss = step(x[i * n : (i + 1) * n], y[i * n : (i + 1) * n])
        torch.testing.assert_close(
            loss, plain.learn(x[i * n : (i + 1) * n], y[i * n : (i + 1) * n]), rtol=1e-3, atol=1e-4
        )
    order = torch.arange(10 * n, 20 * n, device="cuda").reshape(10, n)
    step.run(x, y, order)
    for rows in order:
        plain.learn(x[rows], y[rows])
    assert_alike(model, twin)
    assert optimizer.solver.steps == plain.solver.steps == 20
    assert optimizer.solver.samples == pytest.approx(plain.solver.samples)
    torch.testing.assert_close(optimizer.solver.covariance(), plain.solver.covariance(), rtol=1e-2, atol=1e-3)


def test_a_captured_step_follows_scheduler_and_head_fraction():
    (model, optimizer), _ = pair()
    x, y = images(1, 8)
    step = optimizer.capture(x, y, compile=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.0)
    for _ in range(6):
        step(x, y)
    moving = model[0].weight.detach().clone()
    step(x, y)
    assert not torch.equal(moving, model[0].weight)
    optimizer.step()
    scheduler.step()  # the rate is 0 now
    still = model[0].weight.detach().clone()
    samples = optimizer.solver.samples
    optimizer.head_fraction = 0.25
    for _ in range(6):
        step(x, y)
    assert torch.equal(still, model[0].weight)
    assert optimizer.solver.samples == samples + 6 * 2


@pytest.mark.parametrize(("base", "compile"), [*((base, False) for base in BASES), ("fused Adam", True)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["inputs", "targets"])
def test_a_bad_batch_in_a_graph_changes_nothing_and_is_counted(base, compile, bad, where):
    (model, optimizer), _ = pair(base, forgetting=0.9)
    x, y = images(8, 8)
    step = optimizer.capture(x[:8], y[:8], compile=compile)
    for _ in range(5):
        step(x[:8], y[:8])
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    worse = (x if where == "inputs" else y)[8:16].clone()
    worse.reshape(-1)[5] = bad
    for _ in range(2):
        step(worse if where == "inputs" else x[8:16], worse if where == "targets" else y[8:16])
    assert step.skipped == 2
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[0][key]), key
    state, now = before[1], optimizer.state_dict()
    (head,), (later,) = (one["sepsa"]["heads"].values() for one in (state, now))
    for key, value in head.items():
        assert torch.equal(later[key], value) if isinstance(value, torch.Tensor) else True, key
    for index, tensors in state["state"].items():
        for key, value in tensors.items():
            assert torch.equal(now["state"][index][key], value) if isinstance(value, torch.Tensor) else True, key
    assert later["steps"] == 5
    step(x[16:24], y[16:24])
    assert step.skipped == 2
    assert optimizer.solver.steps == 6


@pytest.mark.parametrize(
    ("k", "m", "bias", "n", "features"),
    [
        (1, 1, True, 1, torch.float32),  # one sample
        (8, 2, False, 1, torch.float16),
        (50, 1, True, 1, torch.float32),
        (128, 10, True, 1, torch.float64),
        (300, 3, True, 1, torch.float32),
        (1, 1, False, 2, torch.float32),
        (8, 2, False, 5, torch.float16),
        (50, 1, True, 16, torch.bfloat16),
        (128, 10, True, 31, torch.float64),
        (128, 10, True, 33, torch.float32),
        (128, 10, True, 64, torch.float32),
        (128, 10, True, 65, torch.float32),  # beyond the kernels
        (300, 3, True, 32, torch.float32),
        (700, 64, True, 50, torch.float32),
        (40, 65, True, 8, torch.float32),  # beyond the kernels
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("finish", [True, False])
@pytest.mark.parametrize("forgetting", [1.0, 0.999])
def test_an_update_on_the_device_equals_update(k, m, bias, n, features, dtype, finish, forgetting):
    torch.manual_seed(0)
    linear = nn.Linear(k, m, bias=bias, device="cuda").to(torch.float64 if dtype == torch.float64 else torch.float32)
    settings = {"dtype": dtype, "forgetting": forgetting}
    one, two = RLS(**settings).bind(linear), RLS(**settings).bind(copy.deepcopy(linear))
    for i in range(6):
        x, y = torch.randn(n, k, device="cuda").to(features), torch.randn(n, m, device="cuda")
        one.prepare_capture()
        if i == 3:
            worse, wrong = x.clone(), y.clone()
            worse[n // 2, 0], wrong[-1, -1] = float("nan"), float("inf")
            assert not one.update_captured(worse, y)
            assert not one.update_captured(x, wrong)
        assert one.update_captured(x, y)
        if finish:
            one.finish_captured()
        two.update(x, y)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-3
    torch.testing.assert_close(one.covariance(), two.covariance(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(one.state_dict()["W"], two.state_dict()["W"], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        one.objective(), two.objective(), rtol=1e-9 if dtype == torch.float64 else 1e-2, atol=1e-6
    )
    torch.testing.assert_close(one.linear.weight, two.linear.weight, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(one.ridge_left, two.ridge_left, rtol=1e-6, atol=1e-6)
    assert one.steps == two.steps == 6
    assert one.samples == pytest.approx(two.samples)


@pytest.mark.parametrize("scale", [1e-3, 0.01, 0.03, 0.1, 0.3])
@pytest.mark.parametrize(("n", "k", "m"), [(8, 20, 2), (33, 128, 10), (64, 128, 10), (64, 300, 40)])
@pytest.mark.parametrize("solver", [RLS, SoftmaxNewton])
@pytest.mark.parametrize("forgetting", [1.0, 0.999])
def test_a_block_near_the_identity_on_the_device_equals_update(scale, n, k, m, solver, forgetting):
    """The smaller the features, and the later the block, the nearer is its system to the identity."""
    torch.manual_seed(0)
    linear = nn.Linear(k, m, device="cuda")
    one, two = solver(forgetting=forgetting).bind(linear), solver(forgetting=forgetting).bind(copy.deepcopy(linear))
    one.prepare_capture()
    for _ in range(12):
        x = scale * torch.randn(n, k, device="cuda").relu()
        y = torch.randn(n, m, device="cuda") if solver is RLS else torch.randint(m, (n,), device="cuda")
        assert one.update_captured(x, y)
        two.update(x, y)
    mine, theirs = one.state_dict(), two.state_dict()
    torch.testing.assert_close(mine["W"], theirs["W"], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(one.covariance(), two.covariance(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("ridge", [0.1, 1e-6])
def test_a_large_block_on_the_device_keeps_its_digits_or_is_refused(ridge):
    torch.manual_seed(0)
    linear = nn.Linear(30, 2, device="cuda", dtype=torch.float64)
    one, two = RLS(ridge=ridge).bind(linear), RLS(ridge=ridge).bind(copy.deepcopy(linear))
    x, y = 100 * torch.randn(16, 30, device="cuda").double(), torch.randn(16, 2, device="cuda").double()
    one.prepare_capture()
    if ridge < 0.1:
        assert not one.update_captured(x, y)
        torch.testing.assert_close(one.linear.weight, two.linear.weight, rtol=0, atol=0)
        with pytest.warns(PrecisionWarning, match="1 batches of captured steps changed nothing"):
            assert one.steps == 0
        return
    assert one.update_captured(x, y)
    two.update(x, y)
    torch.testing.assert_close(one.linear.weight, two.linear.weight, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(one.covariance(), two.covariance(), rtol=1e-6, atol=1e-7)


def test_eager_and_captured_steps_mix():
    (model, optimizer), (twin, plain) = pair()
    x, y = images(12, 8)
    step = optimizer.capture(x[:8], y[:8], compile=False)
    for i in range(12):
        rows = slice(8 * i, 8 * i + 8)
        (optimizer.learn if i % 3 == 2 else step)(x[rows], y[rows])
        plain.learn(x[rows], y[rows])
    assert_alike(model, twin)


def test_any_optimizer_can_be_captured():
    from sepsa.training.capture import capture

    torch.manual_seed(0)
    model = copy.deepcopy(CNN).cuda()
    twin = copy.deepcopy(model)
    x, y = images(10, 8)
    one = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True, capturable=True)
    two = torch.optim.Adam(twin.parameters(), lr=1e-3)
    step = capture(model, one, x[:8], y[:8], nn.functional.mse_loss, compile=False)
    step.run(x, y, torch.arange(80, device="cuda").reshape(10, 8))
    for i in range(0, 80, 8):
        nn.functional.mse_loss(twin(x[i : i + 8]), y[i : i + 8]).backward()
        two.step()
        two.zero_grad()
    assert_alike(model, twin)


SOLVERS = {
    "forgetting": lambda: RLS(forgetting=0.9),
    "SoftmaxNewton": SoftmaxNewton,
    "SoftmaxNewton, forgetting": lambda: SoftmaxNewton(forgetting=0.95),
    "somebody's own": CapturableLMS,
}


@pytest.mark.parametrize(
    ("name", "n", "compile"),
    [*((name, 8, False) for name in SOLVERS), *((name, n, True) for name in list(SOLVERS)[1:3] for n in (1, 64))],
)
def test_every_capturable_solver_is_captured(name, n, compile):
    torch.manual_seed(0)
    model = copy.deepcopy(CNN).cuda()
    twin = copy.deepcopy(model)
    optimizer = SepSA(model, torch.optim.Adam, solver=SOLVERS[name](), lr=1e-3, fused=True)
    plain = SepSA(twin, torch.optim.Adam, solver=SOLVERS[name](), lr=1e-3, fused=True)
    if n == 1:
        model.eval(), twin.eval()
    x, y = images(12, n)
    if "Softmax" in name:
        y = y.argmax(1)
    step = optimizer.capture(x[:n], y[:n], compile=compile)
    for i in range(12):
        rows = slice(n * i, n * i + n)
        torch.testing.assert_close(step(x[rows], y[rows]), plain.learn(x[rows], y[rows]), rtol=1e-3, atol=1e-4)
    assert_alike(model, twin, tolerance=1e-3)
    before = copy.deepcopy(model.state_dict())
    step(x[:n] * float("nan"), y[:n])
    assert step.skipped == 1
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(("name", "compile"), [*((name, False) for name in SOLVERS), ("forgetting", True)])
def test_a_captured_step_leaves_a_frozen_head_as_it_is(name, compile):
    torch.manual_seed(0)
    model = copy.deepcopy(CNN).cuda()
    twin = copy.deepcopy(model)
    optimizer, plain = (SepSA(m, torch.optim.Adam, solver=SOLVERS[name](), lr=1e-3, fused=True) for m in (model, twin))
    x, y = images(32, 8)
    if "Softmax" in name:
        y = y.argmax(1)
    step = optimizer.capture(x[:8], y[:8], compile=compile)
    for i in range(32):
        frozen = i // 8 % 2 == 1
        for one in (optimizer, plain):
            one.head.requires_grad_(not frozen)
        rows, before = slice(8 * i, 8 * i + 8), optimizer.head.weight.clone()
        torch.testing.assert_close(step(x[rows], y[rows]), plain.learn(x[rows], y[rows]), rtol=1e-3, atol=1e-4)
        assert torch.equal(optimizer.head.weight, before) is frozen
    assert_alike(model, twin, tolerance=1e-3)
    assert plain.solver.steps == 16
    assert optimizer.solver.steps == (0 if name == "somebody's own" else 16)  # that one does not count replays
    optimizer.head.bias.requires_grad_(True)
    with pytest.raises(ValueError, match="has a frozen weight alone"):
        step(x[:8], y[:8])
    parametrize.register_parametrization(optimizer.head, "weight", nn.Identity())
    with pytest.raises(ValueError, match="head computes its weight from other parameters"):
        step(x[:8], y[:8])


def test_a_solver_that_decides_on_the_host_is_not_captured():
    x, y = torch.randn(16, 6, device="cuda"), torch.randn(16, 2, device="cuda")
    optimizer = SepSA(nn.Linear(6, 2, device="cuda"), torch.optim.SGD, solver=OnlineLBFGS(), lr=1e-2)
    with pytest.raises(ValueError, match="needs values on the host and cannot be captured"):
        optimizer.capture(x, y)


def test_a_compiled_model_is_one_graph_and_learns_as_in_eager():
    (model, optimizer), (twin, plain) = pair()
    compiled = torch.compile(model, fullgraph=True)
    x, y = images(10, 8)
    for i in range(10):
        rows = slice(8 * i, 8 * i + 8)
        for net, one in ((compiled, optimizer), (twin, plain)):
            with one.observe(y[rows]):
                loss = nn.functional.mse_loss(net(x[rows]), y[rows])
            loss.backward()
            one.step()
            one.zero_grad()
    assert_alike(model, twin)
    assert optimizer.solver.steps == 10


# ---------------------------------------------------------------------- ranks


@pytest.fixture
def nccl(tmp_path):
    """A group of one rank, whose collectives run and are recorded as those of many."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("compile", [False, None])
@pytest.mark.parametrize("n", [1, 16])
def test_a_graph_holds_the_exchange_between_ranks(nccl, n, compile, monkeypatch):
    gathered = []
    gather = exchange.gather_equal
    monkeypatch.setattr(exchange, "gather_equal", lambda *given: gathered.append(given) or gather(*given))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 2)).cuda()
    twin = copy.deepcopy(model)
    x, y = torch.randn(12 * n, 6, device="cuda"), torch.randn(12 * n, 2, device="cuda")
    order = torch.arange(12 * n, device="cuda").reshape(12, n)
    one = SepSA(model, torch.optim.SGD, lr=1e-2, process_group=nccl)
    two = SepSA(twin, torch.optim.SGD, lr=1e-2, process_group=None)
    step, alone = (optimizer.capture(x[:n], y[:n], compile=compile) for optimizer in (one, two))
    for part in (order[:6], order[6:]):
        step.run(x, y, part)
        alone.run(x, y, part)
    assert len(gathered) < 2 * 12  # features and targets: the rest was replayed
    assert one.solver.steps == two.solver.steps == 12
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    bad = y.clone()
    bad[0] = torch.nan
    before = [p.detach().clone() for p in model.parameters()]
    step.run(x, bad, order[:1])
    assert step.skipped == 1
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_a_wrapped_model_is_not_captured(nccl, monkeypatch):
    monkeypatch.setattr(exchange, "size_of", lambda group=None: 2)  # as if there were more
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 2)).cuda()
    optimizer = SepSA(DistributedDataParallel(model), torch.optim.Adam, lr=1e-2)
    with pytest.raises(ValueError, match="make the SepSA on the model itself, with process_group="):
        optimizer.capture(torch.randn(8, 6, device="cuda"), torch.randn(8, 2, device="cuda"))


# ---------------------------------------------------------------------- the fused kernels of SoftmaxNewton


@pytest.mark.parametrize(
    ("k", "m", "bias", "n", "features"),
    [
        (9, 3, True, 1, torch.float32),
        (9, 1, False, 1, torch.float64),
        (128, 10, True, 1, torch.float32),
        (300, 3, True, 1, torch.float16),
        (9, 1, True, 8, torch.bfloat16),
        (40, 5, True, 16, torch.float32),
        (128, 10, True, 8, torch.float32),
        (128, 10, True, 33, torch.float64),
        (128, 10, True, 64, torch.float32),
        (140, 64, True, 64, torch.float32),
        (20, 64, True, 64, torch.float32),  # beyond the kernels: as many rows as features
        (128, 10, True, 65, torch.float32),  # beyond the kernels: more samples
    ],
)
@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("forgetting", [1.0, 0.999, 0.9])
def test_softmax_newton_on_the_device_equals_update(k, m, bias, n, features, labels, forgetting):
    torch.manual_seed(0)
    linear = nn.Linear(k, m, bias=bias, device="cuda")
    classes = max(m, 2)
    settings = {"forgetting": forgetting, "label_smoothing": 0.1, "class_weight": [1.0 + i for i in range(classes)]}
    one, two = SoftmaxNewton(**settings).bind(linear), SoftmaxNewton(**settings).bind(copy.deepcopy(linear))
    for i in range(6):
        x, y = torch.randn(n, k, device="cuda").to(features), torch.randint(classes, (n,), device="cuda")
        if not labels:
            y = torch.rand(n, 1, device="cuda") if m == 1 else torch.randn(n, m, device="cuda").softmax(1)
        one.prepare_capture()
        if i == 3:
            before = one.state_dict()
            one.prepare_capture()
            worse, wrong = x.clone(), y.clone()
            worse[n // 2, 0], wrong[-1] = float("nan"), classes + 1
            assert not one.update_captured(worse, y)
            assert not one.update_captured(x, wrong)
            after = one.state_dict()
            for key in ("T", "W", "shares", "ridge_left", "counters"):
                assert torch.equal(before[key], after[key]), key
            one.prepare_capture()
        assert one.update_captured(x, y)
        if i % 2:
            one.finish_captured()
        two.update(x, y)
    mine, theirs = one.state_dict(), two.state_dict()
    # `update` gives a large curvature 4 eps of its trace, which the kernels, exact to 1e-11 in these cases, need not.
    off = 1e-6 if m == 64 else 1e-8
    for key in ("W", "shares", "ridge_left", "counters"):
        torch.testing.assert_close(mine[key], theirs[key], rtol=off, atol=off, msg=lambda m, key=key: f"{key}: {m}")
    torch.testing.assert_close(one.covariance(), two.covariance(), rtol=off, atol=off / 100)
    torch.testing.assert_close(one.linear.weight, two.linear.weight, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------- the ridge by evidence in a graph


@pytest.mark.parametrize("n", [1, 8, 64])
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("told", [False, True])
def test_a_captured_step_chooses_the_ridge_that_the_eager_step_chooses(n, compile, told):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 2)).double().cuda()
    twin = copy.deepcopy(model)
    epoch = {"samples_per_epoch": 20 * n} if told else {}
    optimizer, plain = (SepSA(net, torch.optim.Adam, lr=1e-3, fused=True, **epoch) for net in (model, twin))
    x = torch.randn(4 * n + 40, 6).double().cuda()
    y = x[:, :2] + 0.1 * torch.randn(4 * n + 40, 2).double().cuda()
    order = torch.stack([torch.randperm(len(x))[:n] for _ in range(60)]).cuda()
    step = optimizer.capture(x[:n], y[:n], compile=compile)
    step.run(x, y, order[:40])
    step.run(x, y, order[40:])
    for rows in order:
        plain.learn(x[rows], y[rows])
    assert plain.solver.ridge_now != 10.0
    # A recorded step sees a new ridge one step later: between two replays.
    assert optimizer.solver.ridge_now == pytest.approx(plain.solver.ridge_now, rel=0.5)
    assert optimizer.solver.samples == pytest.approx(plain.solver.samples)
    assert_alike(model, twin, tolerance=0.1)
    assert step.skipped == 0


# ---------------------------------------------------------------------- an update outside of a captured step


@pytest.mark.parametrize(
    ("n", "k", "m", "lam", "small"),
    [
        (256, 512, 10, 0.999, 2048),
        (256, 512, 10, 1.0, 2048),
        (64, 300, 3, 0.9, 2048),
        (16, 300, 3, 0.99, 2048),
        (16, 300, 3, 1.0, 2048),
        (1, 40, 1, 0.98, 2048),
        (1, 40, 2, 1.0, 2048),
        (8, 9, 2, 0.5, 2048),
        (700, 64, 4, 0.999, 2048),
        (16, 300, 3, 0.99, 8),  # in place
        (16, 300, 3, 1.0, 8),
        (40, 300, 3, 0.97, 8),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
def test_recorded_updates_are_those_of_torch(n, k, m, lam, small, dtype, bias, monkeypatch):
    monkeypatch.setattr("sepsa.heads.run.choose.RECORDED_COPIES", small)
    torch.manual_seed(0)
    heads = [nn.Linear(k, m, bias=bias, device="cuda", dtype=dtype) for _ in range(2)]
    heads[1].load_state_dict(heads[0].state_dict())
    one, two = (RLS(forgetting=lam, ridge=0.5).bind(head) for head in heads)
    answer = torch.randn(k, m, device="cuda")
    for step in range(30):
        x = torch.randn(n if step != 7 else n + 1, k, device="cuda").relu().to(torch.bfloat16)
        if step == 11:
            x[0] *= 3e4  # by another route
        y = x.float() @ answer + torch.randn(len(x), m, device="cuda")
        weight = torch.rand(len(x), device="cuda") if step == 13 else None
        if step == 17:
            for head in heads:
                nn.init.ones_(head.weight)
        if step == 19:
            two.load_state_dict(two.state_dict())
        if step == 23:
            kept = two.checkpoint()
            two.update(x, y)
            two.rollback(kept)
        two.update(x, y, weight)
        with force("torch"):  # never recorded
            one.update(x, y, weight)
    assert not one._backend.in_place
    assert two._backend.in_place
    assert one.steps == two.steps == 30
    torch.testing.assert_close(two.samples, one.samples)
    tolerance = {"rtol": 1e-6, "atol": 1e-7} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(heads[1].weight, heads[0].weight, **tolerance)
    torch.testing.assert_close(two.covariance(), one.covariance(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(two.objective(), one.objective(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(two.ridge_left, one.ridge_left)


@pytest.mark.parametrize("lam", [1.0, 0.99])
@pytest.mark.parametrize(("n", "k", "small"), [(1, 20, 2048), (8, 20, 2048), (64, 20, 2048), (8, 100, 8)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["features", "targets"])
def test_a_recorded_update_refuses_a_bad_batch_and_changes_nothing(lam, n, k, small, bad, where, monkeypatch):
    monkeypatch.setattr("sepsa.heads.run.choose.RECORDED_COPIES", small)
    torch.manual_seed(0)
    linear = nn.Linear(k, 2, device="cuda")
    solver = RLS(forgetting=lam).bind(linear)
    x, y = torch.randn(n, k, device="cuda"), torch.randn(n, 2, device="cuda")
    for _ in range(12):
        solver.update(x, y)
    assert solver._backend.in_place
    before, weight, version = solver.state_dict(), linear.weight.clone(), linear.weight._version
    (x if where == "features" else y)[-1, 0] = bad
    with pytest.raises(ValueError, match=f"{where} must be finite"):
        solver.update(x, y)
    after = solver.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items() if isinstance(value, torch.Tensor))
    assert after["steps"] == before["steps"]
    assert torch.equal(linear.weight, weight)
    solver.update(x.nan_to_num(0, 0, 0), y.nan_to_num(0, 0, 0))
    assert solver.steps == 13
    assert linear.weight._version > version  # autograd knows that it changed


def test_a_recorded_update_refuses_weights_that_do_not_fit_into_the_head():
    linear = nn.Linear(20, 2, device="cuda", dtype=torch.float16)
    solver = RLS().bind(linear)
    x, y = torch.randn(64, 20, device="cuda"), torch.randn(64, 2, device="cuda")
    for _ in range(6):
        solver.update(x, y)
    before = linear.weight.clone()
    with pytest.raises(ValueError, match="nothing was learned"):
        solver.update(x, 1e7 * x @ torch.randn(20, 2, device="cuda"))
    assert torch.equal(linear.weight, before)
    assert solver.steps == 6


def test_recordings_are_few_and_one_not_used_for_long_makes_room():
    linear = nn.Linear(20, 2, device="cuda")
    solver = RLS(forgetting=0.99).bind(linear)
    for n in (5, 6, 7, 8, 9):
        for _ in range(4):
            solver.update(torch.randn(n, 20, device="cuda"), torch.randn(n, 2, device="cuda"))
    recorded = solver._backend.recorder.recordings
    assert sorted(n for n, *_ in recorded) == [5, 6, 7, 8]
    for _ in range(260):
        solver.update(torch.randn(9, 20, device="cuda"), torch.randn(9, 2, device="cuda"))
    assert sorted(n for n, *_ in recorded) == [6, 7, 8, 9]
    assert solver.backend == "graph"


def test_garbage_does_not_end_a_recording():
    def recorded():
        x = torch.zeros(4, device="cuda")
        with recording(torch.cuda.Stream()) as graph:
            x += 1
        return graph, x

    garbage = [recorded()]
    garbage.append(garbage)
    x = torch.zeros(4, device="cuda")
    with recording(torch.cuda.Stream()) as graph:
        del garbage
        assert [[] for _ in range(10_000)]  # many new objects start a collection
        x += 1
    assert gc.isenabled()
    graph.replay()
    torch.testing.assert_close(x, torch.ones_like(x))


def test_heads_give_the_recorded_answers():
    """Within ten times the tolerance of tests/test_goldens.py: a GPU adds features in blocks, in another order."""
    spec = importlib.util.spec_from_file_location("test_goldens", Path(__file__).parents[1] / "test_goldens.py")
    goldens = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(goldens)
    known = json.loads(goldens.RECORD.read_text())["heads"]
    for name in goldens.heads.RECORDED:
        for backend in ("chosen", "torch", *(["captured"] if name in goldens.heads.SOLVERS else [])):
            found = goldens.heads.answers(name, backend, "cuda")
            goldens.close(found, known[name], 10 * goldens.TOLERANCE)


# ---------------------------------------------------------------------- recorded large blocks of SoftmaxNewton


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize(("n", "k", "K", "lam"), [(256, 192, 10, 1.0), (256, 512, 10, 0.999), (2000, 100, 37, 1.0)])
def test_recorded_large_blocks_are_those_of_torch(n, k, K, lam, labels, dtype):
    torch.manual_seed(0)
    heads = [nn.Linear(k, K, device="cuda") for _ in range(2)]
    heads[1].load_state_dict(heads[0].state_dict())
    one, two = (SoftmaxNewton(forgetting=lam, ridge=100.0).bind(head) for head in heads)
    answer = torch.randn(k, K, device="cuda")
    for step in range(30):
        x = torch.randn(n if step != 7 else n + 1, k, device="cuda").relu().to(dtype)
        y = (x.float() @ answer).argmax(1)
        targets = y if labels else nn.functional.one_hot(y, K).float()
        if step == 17:
            for head in heads:
                nn.init.ones_(head.weight)
        if step == 19:
            two.load_state_dict(two.state_dict())
            one.load_state_dict(one.state_dict())
        if step == 27:
            kept = two.checkpoint()
            two.update(x, targets)
            two.rollback(kept)
            one.checkpoint()
        two.update(x, targets)
        with force("torch"):  # never recorded
            one.update(x, targets)
    assert two._backend.recorder.recordings
    assert one._backend.name == "torch"
    assert one.steps == two.steps == 30
    tolerance = {"rtol": 1e-6, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(heads[1].weight, heads[0].weight, **tolerance)
    torch.testing.assert_close(two.covariance(), one.covariance(), rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize("what", ["feature", "label", "probability"])
def test_a_recorded_large_block_refuses_bad_samples_and_changes_nothing(what):
    torch.manual_seed(0)
    linear = nn.Linear(100, 5, device="cuda")
    solver = SoftmaxNewton().bind(linear)
    x, y = torch.randn(400, 100, device="cuda"), torch.randint(5, (400,), device="cuda")
    y = nn.functional.one_hot(y, 5).float() if what == "probability" else y
    for _ in range(12):
        solver.update(x, y)
    assert solver._backend.recorder.recordings
    before, weight = copy.deepcopy(solver.state), linear.weight.clone()
    if what == "feature":
        x[3, 2] = math.nan
    elif what == "label":
        y[3] = 5
    else:
        y[3, 0] = 7.0
    with pytest.raises(ValueError, match="must be"):
        solver.update(x, y)
    assert torch.equal(linear.weight, weight)
    for mine, was in zip(solver.state, before, strict=True):
        assert torch.equal(mine, was)


def test_a_ridge_is_chosen_between_recorded_blocks():
    torch.manual_seed(0)
    heads = [nn.Linear(100, 5, device="cuda") for _ in range(2)]
    heads[1].load_state_dict(heads[0].state_dict())
    one, two = (SoftmaxNewton(ridge="evidence").bind(head) for head in heads)
    answer = torch.randn(100, 5, device="cuda")
    for _ in range(150):
        x = torch.randn(300, 100, device="cuda")
        y = (x @ answer + torch.randn(300, 5, device="cuda")).argmax(1)
        two.update(x, y)
        with force("torch"):
            one.update(x, y)
    assert two._backend.recorder.recordings
    assert two._backend.owns(two.state)
    assert two.ridge_now == pytest.approx(one.ridge_now)
    torch.testing.assert_close(heads[1].weight, heads[0].weight, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------- updates that tell when the body steps


def normalized(outputs):
    """A network with statistics that a failed step must not change, and its twin on the CPU."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 80), nn.BatchNorm1d(80), nn.Tanh(), nn.Linear(80, outputs)).cuda()
    return model, copy.deepcopy(model).cpu()


def squared_where_given(outputs, targets):
    given = targets.isfinite()
    return (outputs - targets.nan_to_num())[given].square().mean()


def train(model, optimizer, x, y, loss_fn):
    with optimizer.observe(y):
        loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


HEADS = {
    "RLS": (lambda: RLS(forgetting=0.99), squared_where_given),
    "RLS, evidence": (lambda: RLS(ridge="evidence"), squared_where_given),
    "SoftmaxNewton": (SoftmaxNewton, nn.functional.cross_entropy),
    "SoftmaxNewton, evidence": (lambda: SoftmaxNewton(ridge="evidence"), nn.functional.cross_entropy),
}


def data_for(name, batches, n):
    x = torch.randn(batches * n, 6)
    y = torch.randint(3, (batches * n,)) if "Softmax" in name else torch.randn(batches * n, 3)
    return x.cuda().split(n), y.cuda().split(n)


@pytest.mark.parametrize("n", [4, 256])
@pytest.mark.parametrize("name", HEADS)
def test_steps_that_wait_until_the_body_moves_are_those_of_a_cpu(name, n):
    model, twin = normalized(3)
    solver, loss_fn = HEADS[name]
    one, two = (SepSA(m, torch.optim.SGD, solver=solver(), lr=1e-2) for m in (model, twin))
    for x, y in zip(*data_for(name, 12, n), strict=True):
        train(model, one, x, y, loss_fn)
        train(twin, two, x.cpu(), y.cpu(), loss_fn)
    assert_alike(model.cpu(), twin, tolerance=1e-3)
    assert one.solver.steps == two.solver.steps == 12


TOLD = {
    "step": lambda optimizer, y: optimizer.step(),
    "reading": lambda optimizer, y: optimizer.solver.covariance(),
    "the next pass": lambda optimizer, y: optimizer.observe(y).__enter__(),  # a gradient scaler left out the step
}


@pytest.mark.parametrize("told", TOLD)
@pytest.mark.parametrize("name", list(HEADS)[2:])
def test_a_bad_batch_is_refused_before_the_body_moves_and_changes_nothing(name, told):
    model = normalized(3)[0]
    twin, (solver, loss_fn) = copy.deepcopy(model), HEADS[name]
    optimizer, other = (SepSA(m, torch.optim.SGD, solver=solver(), lr=1e-2) for m in (model, twin))
    for i, (x, y) in enumerate(zip(*data_for(name, 13, 256), strict=True)):
        if i == 12:
            bad, before = x.clone(), copy.deepcopy(model.state_dict())
            bad[3, 2] = math.nan
            with optimizer.observe(y):
                loss = loss_fn(model(bad), y)
            loss.backward()
            with pytest.raises(ValueError, match="NaN"):
                TOLD[told](optimizer, y)
            optimizer.zero_grad()
            if told == "reading":  # who reads first is told first, and the statistics are the step's to restore
                model.load_state_dict(before)
        train(model, optimizer, x, y, loss_fn)
        train(twin, other, x, y, loss_fn)
    assert_alike(model, twin, tolerance=1e-5)
    assert optimizer.solver.steps == other.solver.steps == 13


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("name", ["RLS", "SoftmaxNewton"])
def test_the_first_samples_without_a_target_are_left_out_on_a_gpu(name, learns):
    model, twin = normalized(3)
    solver, loss_fn = HEADS[name]
    one, two = (SepSA(m, torch.optim.SGD, solver=solver(), lr=1e-2) for m in (model, twin))
    for i, (features, targets) in enumerate(zip(*data_for(name, 8, 64), strict=True)):
        if i in (5, 7):
            targets[::3] = math.nan if targets.is_floating_point() else -100
        for net, optimizer, device in ((model, one, "cuda"), (twin, two, "cpu")):
            if learns:
                optimizer.learn(features.to(device), targets.to(device))
            else:
                train(net, optimizer, features.to(device), targets.to(device), loss_fn)
    # The body's first gradient with such labels is that at the head of before.
    assert_alike(model.cpu(), twin, tolerance=1e-3 if name == "RLS" else 5e-2)
    assert one.solver.samples == pytest.approx(two.solver.samples)
