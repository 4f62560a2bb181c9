"""The route of `SoftmaxNewton` for many classes, against the equations; tests/test_gpu.py runs it where it serves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sepsa import SoftmaxNewton
from sepsa.heads.backends import many_classes
from sepsa.heads.base import parameters
from sepsa.heads.math.cross_entropy import block_sums, finish_large, look_large, with_curvature

# Of products whose factors are rounded to float16: 2^-12 of each factor, of which sums of many terms have less.
HALF = 1e-3


def samples(classes: int, weighted: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(300, 12, generator=generator).bfloat16()
    y = torch.randint(0, classes, (300,), generator=generator)
    return x, y, torch.rand(300, generator=generator) + 0.1 if weighted else None


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(a.double() - b.double()) / torch.linalg.vector_norm(b.double()))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_in_chunks_are_those_of_the_equations(bias: bool, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_classes, "ROWS", 128 * 70)  # five chunks
    torch.manual_seed(0)
    linear = nn.Linear(12, 70, bias=bias)  # 70 is no multiple of 64
    head = SoftmaxNewton().bind(linear)
    x, y, weight = samples(70, weighted)
    W = head._state.W
    sums = many_classes.sums_of(linear, W, x, y, weight)
    Phi = parameters.rows(linear, x, torch.float64)
    G, M, U, total, invalid = block_sums(W, Phi, y, weight, head._state.weights, 0.0)
    assert not invalid
    for mine, wanted in zip(sums, (G, M, U, total), strict=True):
        assert distance(mine, wanted) < HALF


def test_a_step_by_the_inverse_is_that_of_the_solve_and_the_host_knows_bounds_of_it() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(12, 70)
    head = SoftmaxNewton(ridge=0.1).bind(linear)
    known = many_classes.bounds_of(with_curvature(head._state))
    for _ in range(5):
        x, y, _ = samples(70, weighted=False)
        state, W = with_curvature(head._state), parameters.follow(linear, head._state.W)
        Phi, settings = parameters.rows(linear, x, torch.float64), head._settings(linear)
        G, M, U, total, _ = block_sums(W, Phi, y, None, state.weights, 0.0)
        sums = many_classes.Sums(G.float(), M, U, total)
        new, lost = many_classes.learned(state, W, sums, len(x), settings.forgetting)
        block, *_ = look_large(state, W, Phi, y, None, settings)
        wanted = finish_large(state, block)
        assert not lost
        # The step is computed in float32, whose digits a condition of 1e3 makes 1e-4; the rest is the same arithmetic.
        assert distance(new.W - W, wanted.W - W) < 1e-4
        assert distance(new.A, wanted.A) < 1e-12  # type: ignore[arg-type]
        assert torch.equal(new.counters, wanted.counters)
        peak = float(x.abs().max())
        known = many_classes.grown(known, len(x), peak, 70)
        assert known.diagonal >= float(block.size.max()) ** 2
        head.update(x, y)
        step = float(torch.linalg.vector_norm(head._state.W - W, dim=1).max())
        assert step <= known.shares * 13**0.5 * max(peak, 1.0) / known.ridge


def test_the_loss_in_chunks_is_the_loss_with_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_classes, "ROWS", 128 * 70)
    torch.manual_seed(0)
    linear = nn.Linear(12, 70)
    x, y, weight = samples(70, weighted=True)
    assert weight is not None
    features = x.float().requires_grad_()
    total = many_classes.ChunkedLoss.apply(features, linear, y, weight)  # type: ignore[no-untyped-call]
    (3 * total).backward()
    exact = x.double().requires_grad_()
    each = nn.functional.cross_entropy(linear.double()(exact), y, reduction="none")
    (3 * (weight * each).sum()).backward()  # type: ignore[no-untyped-call]
    assert distance(total.detach(), (weight * each).sum().detach()) < 1e-2  # bfloat16 has 8 digits, as autocast gives
    assert features.grad is not None
    assert exact.grad is not None
    assert distance(features.grad, exact.grad) < 1e-2
