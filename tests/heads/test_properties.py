"""One table of head solvers, one list of properties: what every solver promises, whatever it computes."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from heads.test_adversarial import BATTERY, SHORT, battery
from heads.test_adversarial import K as BATTERY_WIDTH
from sepsa import RLS, LogisticNewton, NotFinite, OnlineLBFGS, PerOutput, SelfTuning
from sepsa.heads.softmax import SoftmaxNewton
from sepsa.paper.slimtik import SlimTik
from sepsa.testing import CHECKS, Case, difference, not_finite, snapshot

K, M = 6, 3


SOLVERS = {
    "RLS": Case(RLS, block=1e-10),
    "RLS, forgetting 0.9": Case(lambda: RLS(forgetting=0.9)),
    "RLS, float32": Case(lambda: RLS(dtype=torch.float32), block=1e-4, too_large=1e30),
    "RLS, self-tuning": Case(lambda: SelfTuning()),
    "PerOutput": Case(lambda: PerOutput(RLS()), block=1e-10),
    "SlimTik": Case(SlimTik, weighted=False),
    "OnlineLBFGS": Case(OnlineLBFGS),
    "OnlineLBFGS, forgetting 0.9": Case(lambda: OnlineLBFGS(forgetting=0.9)),
    "OnlineLBFGS, cross-entropy": Case(lambda: OnlineLBFGS(loss="cross-entropy"), "classification", recovers=0.03),
    "SoftmaxNewton": Case(SoftmaxNewton, "classification", recovers=0.15),
    "SoftmaxNewton, auto": Case(lambda: SelfTuning.of(SoftmaxNewton), "classification", recovers=0.15, captured=False),
    "LogisticNewton, auto": Case(
        lambda: SelfTuning.of(LogisticNewton), "labels", recovers=0.15, falls_to=0.75, captured=False
    ),
    "LogisticNewton": Case(LogisticNewton, "labels", recovers=0.15, falls_to=0.75),
}


@pytest.fixture(params=SOLVERS)
def row(request):
    return SOLVERS[request.param]


@pytest.mark.parametrize("check", CHECKS)
def test_it_keeps_what_every_solver_promises(row, check):
    CHECKS[check](row)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", BATTERY)
@pytest.mark.parametrize("rows", [128, pytest.param(320, marks=pytest.mark.long)])
def test_finite_under_the_adversarial_battery(row, name, batch, rows):
    solver, linear = row.start(dtype=torch.float32, k=BATTERY_WIDTH)
    features = rows_of(name, rows)
    generator = torch.Generator().manual_seed(1)
    if row.task == "regression":
        truth = torch.randn(BATTERY_WIDTH, M, generator=generator)
        targets = features @ truth + 5 + torch.randn(len(features), M, generator=generator)
    else:
        targets = one_hot(torch.randint(M, (len(features),), generator=generator), M).float()
    for x, y in zip(features.split(batch), targets.split(batch), strict=True):
        solver.update(x, y)
    assert not not_finite(snapshot(solver))
    if row.task == "regression":
        assert linear(features).abs().max() <= 20 * targets.abs().max()


@functools.cache
def rows_of(name, n):
    """From the beginning of the battery and from its middle, where dead features come alive."""
    rows = torch.as_tensor(battery(name, SHORT))
    return torch.cat([rows[: n // 2], rows[SHORT // 2 - n // 8 : SHORT // 2 + 3 * n // 8]])


def test_without_a_head_it_says_what_to_call(row):
    free, (solver, _) = row.make(), row.start()
    with pytest.raises(RuntimeError, match=r"is not bound to a head: call bind\(linear\) first"):
        free.update(torch.ones(1, K), torch.ones(1, M))
    with pytest.raises(ValueError, match="already bound to another"):
        solver.bind(nn.Linear(K, M))
    with pytest.raises(TypeError, match=r"head must be an nn\.Linear, got Conv1d"):
        row.make().bind(nn.Conv1d(K, M, 1))
    assert type(solver).__name__.endswith(repr(solver).partition("(")[0])
    assert f"head={K}->{M}" in repr(solver)
    assert "head=" not in repr(free)


def odd(kind: str, x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls these layouts prototypes
        if kind == "quantized":
            return torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8)
        if kind == "nested":
            return torch.nested.nested_tensor([x, x[:1]])
        return x.to_sparse_csr() if kind == "sparse" else x.to(torch.complex64)


@pytest.mark.parametrize("kind", ["sparse", "quantized", "nested", "complex"])
def test_odd_tensors_get_our_words(row, kind):
    solver, _ = row.start()
    before = snapshot(solver)
    x, y = next(row.stream(1))
    words = {"sparse": "dense tensor, got layout", "quantized": "got quantized", "nested": "a nested one"}
    for features, targets in ((odd(kind, x), y), (x, odd(kind, y))):
        with pytest.raises(TypeError, match=words.get(kind, "floating point, got torch.complex64")):
            solver.update(features, targets)
    assert not difference(before, snapshot(solver))


def test_a_head_without_numbers_is_told_so(row):
    solver = row.make().bind(nn.Linear(K, M, device="meta"))
    with pytest.raises(ValueError, match="features must hold numbers, got a meta tensor"):
        solver.update(torch.ones(2, K, device="meta"), torch.ones(2, M, device="meta"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_that_a_half_precision_head_cannot_hold_are_refused(row, dtype):
    if row.task != "regression":
        pytest.skip("its targets are probabilities, which ask for no large weights")
    solver, _ = row.start(dtype=dtype)
    before = snapshot(solver)
    x, y = next(row.stream(1))
    scale = 1e6 if dtype == torch.float16 else 1e39
    with pytest.raises(NotFinite, match="nothing was learned"):
        solver.update(x, scale * y)
    assert not difference(before, snapshot(solver))


# ---------------------------------------------------------------------- what several solvers offer, with one meaning


@pytest.mark.parametrize("name", SOLVERS)
def test_health_predict_and_covariance_mean_the_same_everywhere(name):
    solver, linear = SOLVERS[name].start()
    for x, y in SOLVERS[name].stream(40, n=8):
        solver.update(x, y)
    before = snapshot(solver)
    health = solver.health()
    assert {"condition", "smallest_eigenvalue", "effective_samples", "last_step"} <= set(health)
    assert all(isinstance(value, float) for value in health.values())
    assert health["condition"] >= 1
    assert health["smallest_eigenvalue"] > 0
    assert health["effective_samples"] > 0
    assert solver.steps == 40
    assert solver.samples > 0
    torch.testing.assert_close(solver.predict(x), linear(x).detach(), rtol=1e-5, atol=1e-5)
    if hasattr(solver, "covariance"):
        eigenvalues = 1 / torch.linalg.eigvalsh(solver.covariance())
        assert health["smallest_eigenvalue"] == pytest.approx(float(eigenvalues.min()), rel=0.05)
    assert solver.to("cpu") is solver
    assert not difference(before, snapshot(solver))


@pytest.mark.parametrize("make", [SoftmaxNewton, OnlineLBFGS, SlimTik])
def test_the_last_step_is_the_change_of_the_head(make):
    torch.manual_seed(0)
    linear = nn.Linear(4, 3, dtype=torch.float64)
    solver = make().bind(linear)
    assert torch.isnan(torch.tensor(solver.health()["last_step"]))
    for _ in range(3):
        before = torch.cat([linear.weight, linear.bias[:, None]], 1).detach().clone()
        solver.update(torch.randn(8, 4), torch.eye(3)[torch.randint(3, (8,))])
        after = torch.cat([linear.weight, linear.bias[:, None]], 1).detach()
        assert solver.health()["last_step"] == pytest.approx(float((after - before).norm()), rel=1e-4)
