"""One table of head solvers, one list of properties: what every solver promises, whatever it computes."""

from __future__ import annotations

import copy
import functools
import math
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from heads.test_adversarial import BATTERY, SHORT
from heads.test_adversarial import K as BATTERY_WIDTH
from in_sepsa import FURTHER
from reproduction.slimtik import SlimTik
from sepsa import RLS, LogisticNewton, NotFinite, OnlineLBFGS, PerOutput, SoftmaxNewton
from sepsa.heads.run.choose import force
from sepsa.testing import CHECKS, Case, difference, not_finite, snapshot

pytestmark = pytest.mark.many
K, M = 6, 3
PROMISES = CHECKS | FURTHER
NAN, INF = math.nan, math.inf


SOLVERS = {
    "RLS": Case(RLS, block=1e-10),
    "RLS, forgetting 0.9": Case(lambda: RLS(forgetting=0.9)),
    "RLS, float32": Case(lambda: RLS(dtype=torch.float32), block=1e-4, too_large=1e30),
    "RLS, evidence": Case(lambda: RLS(ridge="evidence")),
    "RLS, evidence, forgetting 0.9": Case(lambda: RLS(ridge="evidence", forgetting=0.9)),
    "RLS, evidence, float32": Case(lambda: RLS(ridge="evidence", dtype=torch.float32), too_large=1e30),
    "PerOutput": Case(lambda: PerOutput(RLS()), block=1e-10),
    "PerOutput, evidence": Case(lambda: PerOutput(RLS(ridge="evidence"))),
    "SlimTik": Case(SlimTik, weighted=False),
    "OnlineLBFGS": Case(OnlineLBFGS),
    "OnlineLBFGS, forgetting 0.9": Case(lambda: OnlineLBFGS(forgetting=0.9)),
    "OnlineLBFGS, cross-entropy": Case(lambda: OnlineLBFGS(loss="cross-entropy"), "classification", recovers=0.03),
    "SoftmaxNewton": Case(SoftmaxNewton, "classification", recovers=0.15),
    # A ridge by evidence draws to the initial weights by more than a small one.
    "SoftmaxNewton, evidence": Case(lambda: SoftmaxNewton(ridge="evidence"), "classification", recovers=0.4),
    "LogisticNewton": Case(LogisticNewton, "labels", recovers=0.15, falls_to=0.75),
    "LogisticNewton, evidence": Case(lambda: LogisticNewton(ridge="evidence"), "labels", recovers=0.4, falls_to=0.9),
}


# With settings that a state carries, and by torch's operators where a small head would run compiled.
VARIANTS = {
    "RLS by torch": Case(lambda: RLS(forgetting=0.9, ridge=2.0, bias_ridge=0.25)),
    "RLS by torch, forgetting 1": Case(RLS, block=1e-10),
    "RLS by evidence": Case(lambda: RLS(ridge="evidence", forgetting=0.9, noise_factor=2.0)),
    "OnlineLBFGS": Case(lambda: OnlineLBFGS(memory=3, forgetting=0.9, bias_ridge=0.5)),
    "SoftmaxNewton": Case(
        lambda: SoftmaxNewton(forgetting=0.9, label_smoothing=0.1, class_weight=[1.0, 2.0, 3.0]), "classification"
    ),
    "SoftmaxNewton by evidence": Case(
        lambda: SoftmaxNewton(ridge="evidence", forgetting=0.9, noise_factor=2.0), "classification"
    ),
    "LogisticNewton by evidence": Case(lambda: LogisticNewton(ridge="evidence", noise_factor=2.0), "labels"),
    "LogisticNewton": Case(lambda: LogisticNewton(ridge=2.0, bias_ridge="ridge", pos_weight=[1.0, 2.0, 3.0]), "labels"),
}


@pytest.fixture(params=SOLVERS)
def row(request):
    return SOLVERS[request.param]


@pytest.fixture(params=VARIANTS)
def variant(request):
    with force("torch" if "torch" in request.param else None):
        yield VARIANTS[request.param]


# What takes long is not checked of solvers with these in their names, whose classes have other rows.
ONCE = {"SepSA": ("forgetting 0.9", "float32", "PerOutput, evidence")}


@pytest.mark.parametrize(
    ("name", "check"),
    [(name, check) for name in SOLVERS for check in PROMISES if not any(part in name for part in ONCE.get(check, ()))],
)
def test_it_keeps_what_every_solver_promises(name, check):
    PROMISES[check](SOLVERS[name])


@pytest.mark.parametrize("check", ["block", "bad input", "too large", "copies", "wrong states", "rollback", "captured"])
def test_it_does_so_with_other_settings(variant, check):
    CHECKS[check](variant)


def test_a_state_brings_its_settings(variant):
    solver, linear = variant.start()
    for x, y in variant.stream(5):
        solver.update(x, y)
    other = type(solver)().bind(copy.deepcopy(linear))
    other.load_state_dict(solver.state_dict())
    assert repr(other) == repr(solver)
    assert not difference(snapshot(solver), snapshot(other))


@pytest.mark.parametrize("name", BATTERY)
@pytest.mark.parametrize(
    ("batch", "rows"), [(1, 32), (8, 128), *(pytest.param(n, 320, marks=pytest.mark.long) for n in (1, 8))]
)
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
    rows = torch.as_tensor(BATTERY[name](SHORT))
    return torch.cat([rows[: n // 2], rows[SHORT // 2 - n // 8 : SHORT // 2 + 3 * n // 8]])


def test_without_a_head_it_says_what_to_call(row):
    free, (solver, _) = row.make(), row.start()
    with pytest.raises(RuntimeError, match=r"is not bound to a head: call bind\(linear\) first"):
        free.update(torch.ones(1, K), torch.ones(1, M))
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


ODD = {
    "sparse": "dense tensor, got layout", "quantized": "got quantized", "nested": "a nested one",
    "complex": "floating point, got torch.complex64",
}  # fmt: skip


def test_odd_tensors_get_our_words(row):
    solver, _ = row.start()
    before = snapshot(solver)
    x, y = next(row.stream(1))
    for kind, words in ODD.items():
        for features, targets in ((odd(kind, x), y), (x, odd(kind, y))):
            with pytest.raises(TypeError, match=words):
                solver.update(features, targets)
    assert not difference(before, snapshot(solver))
    solver = row.make().bind(nn.Linear(K, M, device="meta"))
    with pytest.raises(ValueError, match="features must hold numbers, got a meta tensor"):
        solver.update(torch.ones(2, K, device="meta"), torch.ones(2, M, device="meta"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("row", [name for name, row in SOLVERS.items() if row.task == "regression"], indirect=True)
def test_weights_that_a_head_cannot_hold_are_refused(row, dtype):
    solver, _ = row.start(dtype=dtype)
    before = snapshot(solver)
    x, y = next(row.stream(1))
    scale = 1e6 if dtype == torch.float16 else 1e39
    with pytest.raises(NotFinite, match="nothing was learned"):
        solver.update(x, scale * y)
    assert not difference(before, snapshot(solver))


# ---------------------------------------------------------------------- samples, and the head's memory


def test_weights_count_samples_and_a_vector_is_a_sample(row):
    """A weight of two is the sample twice, a weight of none is no sample, in one update."""
    (one, head), (other, twin), (third, _) = (row.start() for _ in range(3))
    # Every row bounds the step of a quasi-Newton classifier.
    counts = row.weighted and not (isinstance(one, OnlineLBFGS) and row.task == "classification")
    times = torch.tensor([2, 1, 0, 1, 2, 0])
    for x, y in row.stream(5, n=6):
        if counts:
            one.update(x, y, times.double())
            other.update(x.repeat_interleave(times, 0), y.repeat_interleave(times, 0))
        third.update(x[0], y[0])
    torch.testing.assert_close(head.weight, twin.weight, rtol=1e-5, atol=1e-6)  # some compute in float32
    assert third.steps == 5
    assert third.predict(x[0]).shape == (M,)


@pytest.mark.parametrize("name", ["RLS", "OnlineLBFGS", "SoftmaxNewton", "LogisticNewton", "PerOutput"])
def test_a_coarse_head_keeps_what_rounding_loses_and_what_somebody_sets(name):
    row = SOLVERS[name]
    (coarse, head), (fine, exact) = row.start(dtype=torch.bfloat16), row.start()
    exact.load_state_dict(head.state_dict())
    fine = row.make().bind(exact)
    for x, y in row.stream(200, n=4):
        coarse.update(x, y)
        fine.update(x, y)
    # A bfloat16 number has a relative error of 2^-9; without what it loses, 200 updates would be off by ten times that.
    torch.testing.assert_close(head.weight.double(), exact.weight, rtol=0.01, atol=0.01)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.zero_()
    fine.update(1e-6 * x[:1], y[:1])
    assert exact.weight.abs().max() < 0.1 < head.weight.abs().max()


def test_the_state_follows_the_head(row):
    (solver, linear), (other, _) = row.start(dtype=torch.float32), row.start(dtype=torch.float32)
    batches = list(row.stream(6))
    for i, (x, y) in enumerate(batches):
        if i == 3:
            linear.double()
            linear.float()  # another memory, the same numbers
        version = linear.weight._version
        solver.update(x, y)
        other.update(x, y)
        assert linear.weight._version > version  # autograd refuses a backward through the weights of before
    assert not difference(snapshot(solver), snapshot(other))
    if not isinstance(solver, (PerOutput, SlimTik)):  # views of the head, and a state that stays on the CPU
        tensors = [value for value in solver.to("meta").state_dict().values() if isinstance(value, Tensor)]
        large = {tensor.device.type for tensor in tensors if tensor.is_floating_point() and tensor.numel() > 100}
        assert large <= {"meta"}


SETTINGS = [
    *((make, {"ridge": 0.0}, r"ridge must be in \(0, inf\), got 0") for make in (RLS, SoftmaxNewton, OnlineLBFGS)),
    *((make, {"forgetting": 1.2}, r"forgetting must be in \(0, 1\], got 1.2") for make in (SoftmaxNewton, OnlineLBFGS)),
    *((RLS, {"ridge": ridge}, "ridge must be in") for ridge in (NAN, INF)),
    *((RLS, {"ridge": ridge}, r"ridge must be a number in \(0, inf") for ridge in (np.bool_(True), True, "1", None)),
    *((make, {"ridge": word}, "evidence") for make, word in ((RLS, "proof"), (SoftmaxNewton, "proof"))),
    (RLS, {"bias_ridge": 0.0}, r"bias_ridge must be in \(0, inf\), got 0"),
    (RLS, {"bias_ridge": "auto"}, r"bias_ridge must be a number in \(0, inf\) or 'ridge', got 'auto'"),
    (RLS, {"bias_ridge": True}, "bias_ridge must be a number"),
    (RLS, {"forgetting": 0.0}, "forgetting must be in"),
    (RLS, {"forgetting": True}, "forgetting must be a number"),
    (RLS, {"dtype": torch.float16}, "dtype must be torch.float32 or torch.float64, got torch.float16"),
    (OnlineLBFGS, {"dtype": torch.float16}, "dtype must be torch.float32 or torch.float64"),
    (OnlineLBFGS, {"loss": "hinge"}, "loss must be one of 'squared', 'cross-entropy', got 'hinge'"),
    (OnlineLBFGS, {"memory": 0}, "memory must be an integer of at least 1, got 0"),
    (OnlineLBFGS, {"memory": 2.5}, "memory must be an integer"),
    (SoftmaxNewton, {"label_smoothing": 1.0}, r"label_smoothing must be in \[0, 1\), got 1"),
    (SoftmaxNewton, {"label_smoothing": "much"}, "label_smoothing must be a number"),
    (SoftmaxNewton, {"class_weight": [1.0, 0.0, 1.0]}, r"class_weight must be in \(0, inf\), got 0"),
    (SoftmaxNewton, {"class_weight": [1.0, 2.0]}, "class_weight must have 3 numbers, one a class of this head, got 2"),
    (LogisticNewton, {"pos_weight": 3.0}, r"pos_weight must be numbers, one an output, or None, got 3\.0"),
    (LogisticNewton, {"pos_weight": [1.0]}, "pos_weight must have 3 numbers, one an output of this head, got 1"),
]


@pytest.mark.parametrize(("make", "options", "words"), SETTINGS, ids=lambda value: getattr(value, "__name__", ""))
def test_wrong_settings_are_named(make, options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        make(**options).bind(nn.Linear(K, M))


def test_health_predict_and_covariance_mean_the_same_everywhere(row):
    solver, linear = row.start()
    for x, y in row.stream(40, n=8):
        solver.update(x, y)
    if isinstance(solver, OnlineLBFGS):  # its pairs describe too little of the curvature
        return
    before = snapshot(solver)
    health = solver.health()
    assert {"condition", "smallest_eigenvalue", "effective_samples"} <= set(health)
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
