"""Deltas: what a head learned since a mark, merged elsewhere, is what one head would have learned."""

import copy
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from heads.test_rls import relative
from reference import weights
from sepsa import RLS, NotFinite
from sepsa.heads import Delta
from sepsa.testing import difference, snapshot

HUGE = torch.full((5, 2), 1.7e308, dtype=torch.float64)


def make(k=4, m=2, seed=0, bias=True, **options):
    torch.manual_seed(seed)
    return RLS(**options).bind(nn.Linear(k, m, bias=bias, dtype=torch.float64))


def data(n, k=4, m=2, seed=1, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(n, k, generator=g, dtype=torch.float64)
    return x, torch.randn(n, m, generator=g, dtype=torch.float64) + x[:, :1] / scale


def condition(B):
    size = B.diagonal().sqrt()
    return float(torch.linalg.cond(B / size / size[:, None]))


def assert_same_head(found, truth, *passed):
    """To 1e-9, or to what rounding leaves of the digits where the curvature spans more than six orders of magnitude.

    `passed` are inverse curvatures on the way, which may span more than the last one.
    """
    B = truth.covariance()
    tolerance = max(1e-9, 10 * torch.finfo(B.dtype).eps * max(map(condition, (B, *passed))))
    assert relative(weights(found.linear), weights(truth.linear)) <= tolerance
    assert relative(found.covariance(), B) <= tolerance
    torch.testing.assert_close(found.objective(), truth.objective(), rtol=100 * tolerance, atol=100 * tolerance)
    assert found.samples == pytest.approx(truth.samples, rel=1e-12)
    assert found.steps == truth.steps


@settings(max_examples=60, deadline=None)
@given(
    k=st.integers(1, 9), m=st.integers(1, 3), bias=st.booleans(), seed=st.integers(0, 10**6),
    sizes=st.lists(st.integers(0, 30), min_size=2, max_size=5), first=st.integers(0, 40),
    ridge=st.sampled_from([1e-2, 1.0, 30.0]), scale=st.sampled_from([1e-2, 1.0, 1e2]), weighted=st.booleans(),
)  # fmt: skip
def test_workers_that_start_from_one_head_make_the_head_of_one_process(
    k, m, bias, seed, sizes, first, ridge, scale, weighted
):
    truth = make(k, m, bias=bias, seed=seed, ridge=ridge)
    if first:
        truth.update(*data(first, k, m, seed, scale))
    central, blobs, passed = copy.deepcopy(truth), [], [truth.covariance()]
    for i, n in enumerate(sizes):
        worker = copy.deepcopy(central)
        mark = worker.state_dict()
        if n:
            x, y = data(n, k, m, seed + i + 1, scale)
            weight = torch.rand(n, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
            for solver in (truth, worker):
                solver.update(x, y, weight if weighted else None)
        passed.append(worker.covariance())
        blobs.append(worker.delta_since(mark).to_bytes())
    for blob in blobs:
        delta = Delta.from_bytes(blob)
        assert len(delta.features) <= k + bias
        central.merge(delta)
    assert_same_head(central, truth, *passed)


@pytest.mark.parametrize("k", [4, 300])  # one compiled call, and torch's
def test_a_delta_holds_what_came_after_the_mark_and_nothing_else(k):
    worker, truth = make(k), make(k)
    worker.update(*data(20, k))
    mark = worker.state_dict()
    assert worker.delta_since(mark).samples == 0
    assert len(worker.delta_since(mark).features) == 0
    worker.update(*data(7, k, seed=2))
    worker.update(*data(2, k, seed=3))
    delta = worker.delta_since(mark)
    assert (delta.samples, delta.steps, len(delta.features)) == (9, 2, min(9, k + 1))
    central = make(k)
    central.merge(delta)
    for solver in (truth, central):
        for n, seed in ((7, 2), (2, 3), (5, 4))[2 * (solver is central) :]:
            solver.update(*data(n, k, seed=seed))
    assert_same_head(central, truth)
    assert repr(delta) == f"Delta(samples=9, rows={len(delta.features)}, head={k + 1}->2, dtype=torch.float64)"


@pytest.mark.parametrize(("other", "words"), [
    (lambda: make(5), r"other must have a head of shape \(2, 5\), got \(2, 6\)"),
    (lambda: make(m=1), r"other must have a head of shape \(2, 5\), got \(1, 5\)"),
    (lambda: make(ridge=3.0), "same prior, ridge 1 .* and the same initial weights, got ridge 3"),
    (lambda: make(seed=3), "same prior, ridge 1 .* and the same initial weights"),
    (lambda: make(bias_ridge="ridge"), r"ridge 1 \(0\.0001 for the bias\) and the same .* got ridge 1 and its own"),
    (lambda: make(dtype=torch.float32), "must compute in torch.float64, as this head does, got torch.float32"),
])  # fmt: skip
def test_a_delta_of_another_head_is_refused(other, words):
    worker, central = other(), make()
    worker.update(*data(9, worker.linear.in_features, worker.linear.out_features))
    central.update(*data(9))
    before = snapshot(central)
    with pytest.raises(ValueError, match=words):
        central.merge(worker.delta_since())
    assert not difference(before, snapshot(central))
    large = dataclasses.replace(make().delta_since(), features=torch.ones(5, 5).double(), targets=HUGE)
    with pytest.raises(NotFinite, match="too large to be added"):
        central.merge(large)
    assert not difference(before, snapshot(central))


def test_forgetting_is_refused_with_the_reason():
    forgetful = make(forgetting=0.9)
    words = r"exact only at forgetting 1, got 0\.9: with forgetting, a head depends on when each sample came"
    for verb, arguments in (("delta_since", ()), ("merge", (make().delta_since(),))):
        with pytest.raises(ValueError, match=f"{verb} is {words}"):
            getattr(forgetful, verb)(*arguments)
    with pytest.raises(ValueError, match="mark must be a state_dict"):
        make().delta_since(forgetful.state_dict())


def test_a_mark_that_is_none_of_this_head_is_refused():
    solver = make()
    solver.update(*data(20))
    later, fewer = copy.deepcopy(solver), copy.deepcopy(solver)
    later.update(*data(2, seed=2))  # fewer than the head has inputs
    fewer.unlearn(*(part[:3] for part in data(20)))
    changed = copy.deepcopy(later)
    with torch.no_grad():
        changed.linear.weight.add_(1)
    for one, mark, words in (
        *((solver, other, "mark must be a state_dict") for other in (make(seed=4), make(ridge=2.0))),
        (solver, make(5), "another size"),
        (solver, later, "mark: the head has less curvature than it had then"),
        (fewer, solver, "samples were unlearned since"),
        (changed, solver, "set by something other than this solver"),  # and not learned
    ):
        with pytest.raises(ValueError, match=words):
            one.delta_since(mark.state_dict())


def test_a_curvature_that_has_lost_digits_is_refused():
    worker = make()
    x, y = data(20, scale=1e6)
    x[:, 1] = x[:, 0] + 1e-7 * x[:, 1]  # nearly the same feature twice
    worker.update(x, y)
    with pytest.raises(ValueError, match="the curvature has so large a condition number"):
        worker.delta_since()


@pytest.mark.parametrize(("change", "words"), [
    ({"features": torch.zeros(9, 4)}, r"state_dict\['features'\] must be a tensor of shape \(9, 5\)"),
    ({"features": torch.zeros(5, 5)}, "a tensor of torch.float64"),
    ({"targets": torch.full((5, 2), torch.nan, dtype=torch.float64)}, "must be finite"),
    ({"energy": torch.tensor([-1.0, 0.0], dtype=torch.float64)}, "must be at least 0"),
    ({"ridge": torch.zeros(5, dtype=torch.float64)}, "must be at least 0"),
    ({"prior": None}, r"state_dict\['prior'\] must be a tensor \(m, p\)"),
    ({"samples": float("inf")}, r"state_dict\['samples'\] must be a number of at least 0"),
    ({"steps": 1.5}, r"state_dict\['steps'\] must be an integer"),
])  # fmt: skip
def test_what_no_head_can_have_learned_is_refused(change, words):
    """Such as bytes that somebody made, whose checksums fit."""
    worker = make()
    worker.update(*data(9))
    delta = worker.delta_since()
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(delta, **change)
