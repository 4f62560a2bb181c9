"""One table of head solvers, one list of properties: what every solver promises, whatever it computes."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from heads.test_adversarial import BATTERY, STEPS
from heads.test_adversarial import K as BATTERY_WIDTH
from sepsa import RLS, OnlineLBFGS, SepSA
from sepsa.heads.slimtik import SlimTik
from sepsa.heads.softmax import SoftmaxNewton

K, M = 6, 3


@dataclass(frozen=True)
class Row:
    """One solver of the table: how near it comes to the truth, and a block to its samples one by one.

    `block` is None where an update is one step of the method, or one age of its forgetting, whatever samples it has.
    """

    make: Callable[[], Any]
    task: str = "regression"
    recovers: float = 0.01
    block: float | None = None
    too_large: float = 1e300  # for its dtype to square


SOLVERS = {
    "RLS": Row(RLS, block=1e-10),
    "RLS, forgetting 0.9": Row(lambda: RLS(forgetting=0.9)),
    "RLS, float32": Row(lambda: RLS(dtype=torch.float32), block=1e-4, too_large=1e30),
    "RLS, self-tuning": Row(lambda: RLS(forgetting="auto", ridge="auto")),
    "SlimTik": Row(SlimTik),
    "OnlineLBFGS": Row(OnlineLBFGS),
    "OnlineLBFGS, forgetting 0.9": Row(lambda: OnlineLBFGS(forgetting=0.9)),
    "OnlineLBFGS, cross-entropy": Row(lambda: OnlineLBFGS(loss="cross-entropy"), "classification", recovers=0.03),
    "SoftmaxNewton": Row(SoftmaxNewton, "classification", recovers=0.15),
}


@pytest.fixture(params=SOLVERS)
def row(request):
    return SOLVERS[request.param]


def start(row, bias=True, dtype=torch.float64, seed=0, k=K):
    torch.manual_seed(seed)
    linear = nn.Linear(k, M, bias=bias, dtype=dtype)
    return row.make().bind(linear), linear


def stream(row, count, n=16, seed=0):
    """Batches of samples and their targets, noise and all; classes are drawn."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(M, K, generator=generator, dtype=torch.float64)
    for _ in range(count):
        x = torch.randn(n, K, generator=generator, dtype=torch.float64)
        outputs = x @ truth.T + 0.5
        if row.task == "regression":
            yield x, outputs + 0.3 * torch.randn(n, M, generator=generator, dtype=torch.float64)
        else:
            yield x, one_hot(torch.multinomial(outputs.softmax(1), 1, generator=generator)[:, 0], M).double()


def learn(solver, batches):
    for x, y in batches:
        solver.update(x, y)


def numbers(value):
    """Every tensor and number inside a state, with its place."""
    if isinstance(value, dict):
        return [(f"{key}.{place}", leaf) for key in sorted(value) for place, leaf in numbers(value[key])]
    if isinstance(value, (list, tuple)):
        return [(f"{i}.{place}", leaf) for i, item in enumerate(value) for place, leaf in numbers(item)]
    return [("", value.clone() if isinstance(value, Tensor) else value)]


def snapshot(solver):
    return numbers({"head": dict(solver.linear.state_dict()), "solver": solver.state_dict()})


def same(one, other):
    """Bit by bit, NaN included."""
    return len(one) == len(other) and all(
        place == where and (torch.equal(a, b) if isinstance(a, Tensor) else a == b)
        for (place, a), (where, b) in zip(one, other, strict=True)
    )


def all_finite(snap):
    tensors = [leaf for _, leaf in snap if isinstance(leaf, Tensor)]
    floats = [leaf for _, leaf in snap if isinstance(leaf, float)]
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors) and all(map(math.isfinite, floats))


# ---------------------------------------------------------------------- learning


@pytest.mark.parametrize("bias", [True, False])
def test_recovers_the_truth(row, bias):
    solver, linear = start(row, bias)
    generator = torch.Generator().manual_seed(1)
    truth = torch.randn(M, K, generator=generator, dtype=torch.float64)
    shift = torch.tensor([1.0, -0.5, 0.2], dtype=torch.float64) * bias
    for _ in range(300):
        x = torch.randn(16, K, generator=generator, dtype=torch.float64)
        outputs = x @ truth.T + shift
        solver.update(x, outputs if row.task == "regression" else outputs.softmax(1))
    found = linear.weight.detach()
    if row.task == "classification":  # the same number added to every class changes nothing
        found, truth = found - found.mean(0), truth - truth.mean(0)
    assert torch.linalg.norm(found - truth) <= row.recovers * torch.linalg.norm(truth)
    if bias and row.task == "regression":
        assert torch.linalg.norm(linear.bias.detach() - shift) <= row.recovers * torch.linalg.norm(truth)


@pytest.mark.parametrize("name", [name for name, row in SOLVERS.items() if row.block])
def test_block_equals_loop_where_it_should(name):
    row = SOLVERS[name]
    (block, head), (loop, other) = start(row), start(row)
    for x, y in stream(row, 5):
        block.update(x, y)
        learn(loop, zip(x, y, strict=True))
    torch.testing.assert_close(head.weight, other.weight, rtol=row.block, atol=row.block)


def test_leading_dimensions_and_dtypes_are_the_callers_affair(row):
    (flat, head), (deep, other) = start(row), start(row)
    for x, y in stream(row, 5, n=12):
        x, y = x.float(), y.float()
        flat.update(x, y)
        deep.update(x.reshape(2, 6, K).double(), y.reshape(2, 6, M).requires_grad_())
    assert torch.equal(head.weight, other.weight)
    assert head.weight.requires_grad
    assert head.weight.is_leaf


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", BATTERY)
def test_finite_under_the_adversarial_battery(row, name, batch):
    solver, linear = start(row, dtype=torch.float32, k=BATTERY_WIDTH)
    features = rows_of(name)
    generator = torch.Generator().manual_seed(1)
    if row.task == "regression":
        truth = torch.randn(BATTERY_WIDTH, M, generator=generator)
        targets = features @ truth + 5 + torch.randn(len(features), M, generator=generator)
    else:
        targets = one_hot(torch.randint(M, (len(features),), generator=generator), M).float()
    learn(solver, zip(features.split(batch), targets.split(batch), strict=True))
    assert all_finite(snapshot(solver))
    if row.task == "regression":
        assert linear(features).abs().max() <= 20 * targets.abs().max()


@functools.cache
def rows_of(name):
    """From the beginning of the battery and from its middle, where dead features come alive."""
    rows = torch.as_tensor(BATTERY[name]())
    return torch.cat([rows[:160], rows[STEPS // 2 - 40 : STEPS // 2 + 120]])


# ---------------------------------------------------------------------- bad input


BAD: dict[str, Callable[[Tensor, Tensor], tuple[Any, ...]]] = {
    "NaN in the features": lambda x, y: (x.index_fill(0, torch.tensor([2]), math.nan), y),
    "Inf in the features": lambda x, y: (x.index_fill(0, torch.tensor([2]), math.inf), y),
    "NaN in the targets": lambda x, y: (x, y.index_fill(0, torch.tensor([2]), math.nan)),
    "Inf in the targets": lambda x, y: (x, y.index_fill(0, torch.tensor([2]), -math.inf)),
    "features too narrow": lambda x, y: (x[:, 1:], y),
    "targets too wide": lambda x, y: (x, torch.cat([y, y], 1)),
    "one target too few": lambda x, y: (x, y[1:]),
    "no samples": lambda x, y: (x[:0], y[:0]),
    "integer features": lambda x, y: (x.long(), y),
    "an array": lambda x, y: (x.numpy(), y),
    "a negative weight": lambda x, y: (x, y, -torch.ones(len(x)).double()),
    "too few weights": lambda x, y: (x, y, torch.ones(len(x) - 1).double()),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("batch", [3, 40])
def test_bad_input_changes_nothing(row, bad, batch):
    solver, _ = start(row)
    learn(solver, stream(row, 5))
    before = snapshot(solver)
    x, y = next(stream(row, 1, n=batch, seed=1))
    with pytest.raises((TypeError, ValueError)):
        solver.update(*BAD[bad](x, y))
    assert same(snapshot(solver), before)
    solver.update(x, y)
    assert not same(snapshot(solver), before)


def test_features_too_large_to_square_are_refused_or_survived(row):
    solver, _ = start(row)
    learn(solver, stream(row, 5))
    before = snapshot(solver)
    x, y = next(stream(row, 1, seed=1))
    with contextlib.suppress(ValueError):
        solver.update(row.too_large * x, y)
        before = snapshot(solver)
    assert all_finite(before)
    assert same(snapshot(solver), before)


def test_it_owns_one_head_and_says_so(row):
    free, (solver, linear) = row.make(), start(row)
    x, y = next(stream(row, 1))
    for use in (lambda: free.update(x, y), free.state_dict, lambda: free.load_state_dict(solver.state_dict())):
        with pytest.raises(RuntimeError, match=r"owns no head yet: call bind\(linear\) first"):
            use()
    assert solver.bind(linear) is solver
    with pytest.raises(ValueError, match="already bound to another"):
        solver.bind(nn.Linear(K, M))
    with pytest.raises(TypeError, match=r"head must be an nn\.Linear, got Conv1d"):
        row.make().bind(nn.Conv1d(K, M, 1))
    assert type(solver).__name__.endswith(repr(solver).partition("(")[0])
    assert f"head={K}->{M}" in repr(solver)
    assert "head=" not in repr(free)


# ---------------------------------------------------------------------- state


def by_checkpoint(solver, row):
    file = io.BytesIO()
    torch.save({"head": solver.linear.state_dict(), "solver": solver.state_dict()}, file)
    saved = torch.load(io.BytesIO(file.getvalue()))
    other, linear = start(row, seed=7)
    linear.load_state_dict(saved["head"])
    other.load_state_dict(saved["solver"])
    return other


WAYS = {
    "checkpoint": by_checkpoint,
    "pickle": lambda solver, row: pickle.loads(pickle.dumps(solver)),
    "deepcopy": lambda solver, row: copy.deepcopy(solver),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch", [1, 16])
def test_it_goes_on_bit_by_bit_after(row, way, batch):
    solver, _ = start(row)
    learn(solver, stream(row, 13, n=batch))
    other = WAYS[way](solver, row)
    left = snapshot(solver)
    assert same(snapshot(other), left)
    learn(other, stream(row, 13, n=batch, seed=1))
    assert same(snapshot(solver), left)  # nothing is shared
    learn(solver, stream(row, 13, n=batch, seed=1))
    assert same(snapshot(solver), snapshot(other))


def test_a_state_of_another_size_is_refused_whole(row):
    solver, _ = start(row)
    learn(solver, stream(row, 3))
    other = row.make().bind(nn.Linear(K + 2, M))
    before = snapshot(other)
    for wrong in (solver.state_dict(), {}, solver.state_dict() | {"more": 1}):
        with pytest.raises(ValueError, match="state_dict"):
            other.load_state_dict(wrong)
    assert same(snapshot(other), before)


# ---------------------------------------------------------------------- in SepSA


def model_and_data(row):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, M))
    x = torch.randn(400, 4)
    bends = torch.sin(2 * x[:, :M]) + x[:, 1:] * x[:, :-1]
    return model, x, bends if row.task == "regression" else one_hot(bends.argmax(1), M).float()


@pytest.mark.parametrize(("base", "lr"), [(torch.optim.Adam, 0.01), (torch.optim.SGD, 0.1)])
def test_drops_into_sepsa_and_the_loss_falls(row, base, lr):
    model, x, y = model_and_data(row)
    optimizer = SepSA(model, base, solver=row.make(), lr=lr)
    body = model[0].weight.detach().clone()

    def loss():
        with torch.no_grad():
            return optimizer.solver.loss(model(x), y).item()

    first = loss()
    for _ in range(15):
        for i in torch.randperm(400).split(20):
            optimizer.learn(x[i], y[i])
    assert loss() <= 0.7 * first
    assert not torch.equal(model[0].weight, body)
    other = copy.deepcopy(optimizer)
    resumed = model_and_data(row)[0]
    resumed.load_state_dict(model.state_dict())
    third = SepSA(resumed, base, solver=row.make(), lr=1.0)
    third.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch's own loader shares the moments
    for one in (optimizer, other, third):
        one.learn(x[:20], y[:20])
    assert all(map(torch.equal, model.parameters(), other.model.parameters()))
    assert all(map(torch.equal, model.parameters(), resumed.parameters()))
