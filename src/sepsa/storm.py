"""STORM: variance reduction for the body by one more gradient a step, with no large batches and no full passes.

After Cutkosky and Orabona, "Momentum-based variance reduction in non-convex SGD", 2019. With g(w; ξ) the gradient of
the samples ξ at the parameters w, a the mixing and η the learning rate:

    d_t = g(w_t; ξ_t) + (1 - a)(d_{t-1} - g(w_{t-1}; ξ_t)),      w_{t+1} = w_t - η d_t

d_{t-1} is carried from w_{t-1} to w_t by a difference of gradients on the same samples, whose noise vanishes with the
step, so the noise of d is averaged over about 1/a batches without the lag of momentum.

Beside a head solver both gradients are taken at one head, the one that has just learned ξ_t. To put the head of the
step before back with w_{t-1} would be wrong: the new head has seen the noise of ξ_t and the old one has not, so that
their difference has a mean of the order of the noise's variance over t, which d then sums up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class STORM(Optimizer):
    """Stochastic gradient descent with the variance-reduced gradient of STORM; the model is evaluated twice per step.

    Choose it where the noise of the gradient, not the curvature, limits the body, and where the model gives the same
    output for the same samples twice (no dropout, no batch normalization). Measure first: in
    benchmarks/variance_reduction.py it was not worth its second evaluation beside an `RLS` head, and Adam helped the
    body more. The update is

        d_t = g(w_t) + (1 - mixing)(d_{t-1} - g(w_{t-1})),    w_{t+1} = w_t - lr d_t

    with both gradients g taken on the same samples. With mixing 1 it equals `torch.optim.SGD`.

    Args:
        params: Parameters or parameter groups; `SepSA(model, STORM, ...)` passes them.
        lr: The learning rate.
        mixing: Weight in (0, 1] of the new gradient; the noise is averaged over about 1/mixing batches.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from sepsa import STORM, SepSA
        >>> model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        >>> optimizer = SepSA(model, STORM, lr=1e-2, mixing=0.1)
        >>> loss = optimizer.learn(torch.randn(8, 2), torch.randn(8, 1))
    """

    evaluates_again = True  # what `SepSA.learn` asks

    def __init__(
        self, params: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float = 1e-2, mixing: float = 0.1
    ) -> None:
        if not lr >= 0:
            raise ValueError(f"lr must be at least 0, got {lr}")
        if not 0 < mixing <= 1:
            raise ValueError(f"mixing must be in (0, 1], got {mixing}")
        super().__init__(params, {"lr": lr, "mixing": mixing})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor:  # type: ignore[override]
        """Move the parameters.

        Args:
            closure: A function that returns the loss of the same samples again, without `backward` and outside
                `observe`. It is called with the parameters of the step before.

        Returns:
            The loss at the parameters of the step before.
        """
        if closure is None:
            raise TypeError(
                "STORM.step needs a closure that computes the loss of the same samples again, "
                "optimizer.step(lambda: loss_fn(model(inputs), targets)), got None"
            )
        moving = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        loss, gradients = self._evaluate_before(closure, [p for _, p in moving if p in self.state])
        for group, p in moving:
            d = p.grad.clone()
            if p in self.state:
                d.add_(self.state[p]["estimate"] - gradients[p], alpha=1 - group["mixing"])
            self.state[p] = {"estimate": d, "previous": p.detach().clone()}
            p.add_(d, alpha=-float(group["lr"]))
        return loss

    def _evaluate_before(
        self, closure: Callable[[], Tensor], known: list[Tensor]
    ) -> tuple[Tensor, dict[Tensor, Tensor]]:
        """The loss and its gradients at the parameters of the step before; the present ones are back afterwards."""
        now = [p.detach().clone() for p in known]
        for p in known:
            p.copy_(self.state[p]["previous"])
        try:
            with torch.enable_grad():
                loss = closure()
            if not isinstance(loss, Tensor) or not loss.requires_grad:
                raise TypeError(f"closure must return the loss as a tensor to differentiate, got {loss!r}")
            found = torch.autograd.grad(loss, known, allow_unused=True) if known else ()
        finally:
            for p, value in zip(known, now, strict=True):
                p.copy_(value)
        return loss.detach(), {p: torch.zeros_like(p) if g is None else g for p, g in zip(known, found, strict=True)}
