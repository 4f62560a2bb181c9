"""What a network that SepSA trains with a solver goes through: copies, frozen, converted and pruned heads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from interrupts import interrupts_leave_before_or_after
from sepsa import SepSA
from sepsa.states.tree import leaves
from sepsa.testing.case import COPIES, Case, difference, expect, expect_same, refused, snapshot
from sepsa.testing.checks import model_and_data


def started(case: Case) -> tuple[nn.Sequential, SepSA, Tensor, Tensor]:
    """A network and a SepSA that have learned three batches, and the data."""
    with torch.random.fork_rng(devices=[]):
        model, x, y = model_and_data(case)
        optimizer = SepSA(model, torch.optim.Adam, solver=case.make(), lr=0.01)
    for i in range(3):
        optimizer.learn(x[20 * i :][:20], y[20 * i :][:20])
    return model, optimizer, x, y


def copies_with_a_scheduler(case: Case) -> None:
    """Copies and pickles of a SepSA with a learning-rate scheduler train like the original and leave it alone."""

    def train(optimizer: SepSA, scheduler: Any) -> list[tuple[str, Any]]:
        for i in range(3, 7):
            optimizer.learn(x[20 * i :][:20], y[20 * i :][:20])
            scheduler.step()
        return everything(optimizer)

    for way, again in COPIES.items():
        model, optimizer, x, y = started(case)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        optimizer.step()  # of no gradients: torch's schedulers want to follow a step
        scheduler.step()
        before = everything(optimizer)
        twin, other, follower = again((model, optimizer, scheduler))
        expect(other.model is twin, f"a {way} has the copied model", "it has another one")
        learned = train(other, follower)
        kept = f"a {way} with a scheduler"
        expect_same(before, everything(optimizer), f"{kept} leaves the original alone", "its steps changed {} there")
        expect_same(learned, train(optimizer, scheduler), f"{kept} trains like the original", "{} differs")
        again(optimizer).learn(x[:20], y[:20])
        expect_same(learned, everything(optimizer), f"a {way} of the optimizer alone is its own", "its step changed {}")


def everything(optimizer: SepSA) -> list[tuple[str, Any]]:
    """A copy of every number of the model, the solver and the base."""
    moments = [[*state.values()] for state in optimizer.base.state.values()]
    rates = [group["lr"] for group in optimizer.param_groups]
    body = [copy.deepcopy(part) for part in (dict(optimizer.model.state_dict()), moments, rates)]
    return [*snapshot(optimizer.solver), *leaves(body)]


def frozen_heads_stay(case: Case) -> None:
    """A head that is frozen after SepSA was made stays as it is, while the body learns; later it learns on."""
    model, optimizer, x, y = started(case)
    weight, head, solver = next(model.parameters()), optimizer.head, optimizer.solver
    before, body = snapshot(solver), weight.detach().clone()
    head.requires_grad_(False)
    for n in (1, 20):
        optimizer.learn(x[:n], y[:n])
        with optimizer.observe(y[:n]):
            loss = solver.loss(model(x[:n]), y[:n])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    expect_same(before, snapshot(solver), "a frozen head and its solver stay as they are", "{} changed")
    expect(not head.weight.requires_grad, "a frozen head stays frozen", "it requires a gradient")
    expect(not torch.equal(weight, body), "the body learns behind a frozen head", "it did not move")
    if head.bias is not None:
        head.bias.requires_grad_(True)
        refused(lambda: optimizer.learn(x, y), ValueError, "a head with a frozen weight alone raises ValueError")
        expect_same(before, snapshot(solver), "it changes nothing", "{} changed")
    head.requires_grad_(True)
    optimizer.learn(x[:20], y[:20])
    expect(difference(before, snapshot(solver)), "a head learns again once it is not frozen", "nothing changed")


def other_dtypes_are_followed(case: Case) -> None:
    """After `model.to(torch.bfloat16)` and back, a head goes on learning and its states load."""
    model, optimizer, x, y = started(case)
    for group in optimizer.param_groups:
        group["eps"] = 1e-4  # that of Adam is 0 in float16, where a gradient of 0 makes a step of NaN
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float32):
        model.to(dtype)
        optimizer.state.clear()  # torch's optimizers do not follow a dtype
        with torch.random.fork_rng(devices=[]):
            again = model_and_data(case)[0].to(dtype)
            twin = SepSA(again, torch.optim.Adam, solver=case.make(), lr=1.0)
        again.load_state_dict(model.state_dict())
        twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch's own loader shares the moments
        before = snapshot(optimizer.solver)
        for n in (1, 20):
            for one in (optimizer, twin):
                one.learn(x[:n].to(dtype), y[:n].to(dtype))
        expect(difference(before, snapshot(optimizer.solver)), f"the head learns in {dtype}", "nothing changed")
        promised = f"a state saved in {dtype} goes on bit for bit"
        expect_same(everything(optimizer), everything(twin), promised, "{} differs")


def changed_heads_are_named(case: Case) -> None:
    """A head that is pruned later is refused in a sentence; once it is plain again, it learns on."""
    model, optimizer, x, y = started(case)
    features = model[:2](x[:20]).detach()
    for name in ("weight", "bias"):
        parametrize.register_parametrization(optimizer.head, name, nn.Identity())
        before = optimizer.solver.state_dict()
        uses = (lambda: optimizer.learn(x, y), lambda: optimizer.solver.update(features, y[:20]))
        for use in uses:
            refused(use, ValueError, f"a head whose {name} is computed raises ValueError")
        expect_same(leaves(before), leaves(optimizer.solver.state_dict()), "it changes nothing", "{} changed")
        parametrize.remove_parametrizations(optimizer.head, name)
    before = snapshot(optimizer.solver)
    optimizer.learn(x[:20], y[:20])
    expect(difference(before, snapshot(optimizer.solver)), "a plain head learns again", "nothing changed")


# What every solver of this package is checked for, beside `sepsa.testing.CHECKS`.
FURTHER: dict[str, Callable[[Case], None]] = {
    "interrupts": interrupts_leave_before_or_after,
    "schedulers": copies_with_a_scheduler,
    "frozen head": frozen_heads_stay,
    "other dtypes": other_dtypes_are_followed,
    "changed head": changed_heads_are_named,
}
