"""The checks of `check_solver`, one function each."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from sepsa.heads.protocols import Capturable, NotFinite, Revertible
from sepsa.states.tree import tensors_of
from sepsa.testing.case import (
    COPIES,
    Case,
    K,
    difference,
    expect,
    expect_same,
    learn,
    not_finite,
    refused,
    snapshot,
)
from sepsa.training.optimizer import SepSA

# ---------------------------------------------------------------------- learning


def learns(case: Case) -> None:
    """The solver recovers the weights that made the targets."""
    several_classes = case.task == "classification" and case.outputs > 1
    for bias in (True, False):
        solver, linear = case.start(bias)
        generator = torch.Generator().manual_seed(1)
        truth = torch.randn(case.outputs, K, generator=generator, dtype=torch.float64)
        shift = torch.linspace(1.0, -0.5, case.outputs, dtype=torch.float64) * bias
        for _ in range(300):
            x = torch.randn(16, K, generator=generator, dtype=torch.float64)
            outputs = x @ truth.T + shift
            if case.task != "regression":
                outputs = outputs.softmax(1) if several_classes else outputs.sigmoid()
            solver.update(x, outputs)
        found, aim = linear.weight.detach(), truth
        if several_classes:  # a number added to every class changes nothing
            found, aim = found - found.mean(0), truth - truth.mean(0)
        error = float(torch.linalg.norm(found - aim) / torch.linalg.norm(aim))
        expect(
            error <= case.recovers,
            f"after 300 batches of 16 samples the weights are within {case.recovers:g} of the truth (bias={bias})",
            f"they are {error:.3g} off",
        )
        if bias and case.task == "regression":
            error = float(torch.linalg.norm(linear.bias.detach() - shift) / torch.linalg.norm(truth))
            expect(error <= case.recovers, f"the bias is learned to {case.recovers:g}", f"it is {error:.3g} off")


def block_equals_loop(case: Case) -> None:
    """Where declared, one update of n samples is n updates of one."""
    if case.block is None:
        return
    (block, head), (loop, other) = case.start(), case.start()
    for x, y in case.stream(5):
        block.update(x, y)
        learn(loop, zip(x, y, strict=True))
    off = (head.weight - other.weight).detach().abs().max()
    scale = 1 + float(other.weight.detach().abs().max())
    expect(
        off <= case.block * scale,
        f"an update of 16 samples is 16 updates of one, to {case.block:g}",
        f"the weights are {float(off):.3g} apart",
    )


def shapes_and_dtypes(case: Case) -> None:
    """Leading dimensions, dtypes and gradients of features and targets make no difference."""
    (flat, head), (deep, other) = case.start(), case.start()
    for x, y in case.stream(5, n=12):
        x, y = x.float(), y.float()
        kept = x.clone(), y.clone()
        flat.update(x, y)
        expect(
            torch.equal(x, kept[0]) and torch.equal(y, kept[1]),
            "update leaves features and targets as they are",
            "it wrote into them",
        )
        deep.update(x.reshape(2, 6, K).double(), y.reshape(2, 6, case.outputs).requires_grad_())
    expect(
        torch.equal(head.weight, other.weight),
        "an update gives the same result for any leading dimensions and in float32 as in float64",
        "features (12, k) and (2, 6, k) of the same numbers gave different weights",
    )
    expect(
        head.weight.requires_grad and head.weight.is_leaf and head.weight.dtype == torch.float64,
        "the head's weight stays the parameter it was, a leaf that requires a gradient, in its dtype",
        f"it has requires_grad={head.weight.requires_grad}, is_leaf={head.weight.is_leaf}, {head.weight.dtype}",
    )


def loss_is_a_loss(case: Case) -> None:
    """`loss` is a mean over samples that a body can follow."""
    solver, linear = case.start()
    x, y = next(case.stream(1, n=12))
    outputs = linear(x).detach().requires_grad_()
    loss = solver.loss(outputs, y)
    expect(
        isinstance(loss, Tensor) and loss.ndim == 0 and bool(torch.isfinite(loss)),
        "loss(outputs, targets) is one finite number, a 0-d tensor",
        f"it returned {loss!r}",
    )
    expect(loss.requires_grad, "the loss has a gradient for the body to follow", "it requires no gradient")
    twice = solver.loss(torch.cat([outputs, outputs]), torch.cat([y, y]))
    expect(
        torch.allclose(loss, twice),
        "loss is a mean over samples",
        f"it is {float(loss.detach()):.6g} for 12 samples and {float(twice.detach()):.6g} for the same twice",
    )


# ---------------------------------------------------------------------- bad input


def with_bad_row(x: Tensor, value: float = math.nan) -> Tensor:
    return x.index_fill(0, torch.tensor([2]), value)


Spoil: TypeAlias = Callable[[Tensor, Tensor], tuple[Any, ...]]
NOT_FINITE: dict[str, Spoil] = {
    "NaN in the features": lambda x, y: (with_bad_row(x), y),
    "Inf in the features": lambda x, y: (with_bad_row(x, math.inf), y),
    "NaN in the targets": lambda x, y: (x, with_bad_row(y)),
    "Inf in the targets": lambda x, y: (x, with_bad_row(y, -math.inf)),
}
REFUSED: dict[str, Spoil] = {
    "features too narrow": lambda x, y: (x[:, 1:], y),
    "targets too wide": lambda x, y: (x, torch.cat([y, y], 1)),
    "one target too few": lambda x, y: (x, y[1:]),
    "no samples": lambda x, y: (x[:0], y[:0]),
    "integer features": lambda x, y: (x.long(), y),
    "an array": lambda x, y: (x.numpy(), y),
    "sparse features": lambda x, y: (x.to_sparse(), y),
    "sparse targets": lambda x, y: (x, y.to_sparse()),
    "features on another device": lambda x, y: (x.to("meta"), y),
    "a negative weight": lambda x, y: (x, y, -torch.ones(len(x)).double()),
    "too few weights": lambda x, y: (x, y, torch.ones(len(x) - 1).double()),
}


def bad_input_changes_nothing(case: Case) -> None:
    """Bad input is refused by a TypeError or ValueError, and changes nothing."""
    for n in (3, 40):
        solver = case.started()
        before = snapshot(solver)
        x, y = next(case.stream(1, n=n, seed=1))
        for what, spoil in (NOT_FINITE | REFUSED).items():
            kinds = (NotFinite,) if what in NOT_FINITE else (TypeError, ValueError)
            words = " or ".join(kind.__name__ for kind in kinds)
            refused(partial(solver.update, *spoil(x, y)), kinds, f"{what} raises {words}")
            expect_same(before, snapshot(solver), f"{what} changes nothing", "it changed {}")
        weight = torch.rand(n, generator=torch.Generator().manual_seed(0)).double()
        solver.update(x, y, *([weight] if case.weighted else []))
        expect(difference(before, snapshot(solver)), "it learns on after bad input", "nothing changed")


def too_large_is_refused_or_survived(case: Case) -> None:
    """Numbers beyond a dtype, the solver's or the head's, leave everything finite."""
    x, y = next(case.stream(1, seed=1))
    large = {
        "features that its dtype cannot square": (torch.float64, case.too_large * x, y),
        "features of 6e4 on a float16 head": (torch.float16, 6e4 * x.clamp(-1, 1), y),
    }
    if case.task == "regression":
        large["targets of 1e5 on a float16 head"] = (torch.float16, x, 1e5 * y)
        large["targets of 1e30 on a bfloat16 head"] = (torch.bfloat16, x, 1e30 * y)
    for what, (dtype, features, targets) in large.items():
        solver = case.started(dtype=dtype)
        before = snapshot(solver)
        try:
            solver.update(features, targets)
        except NotFinite:
            expect_same(before, snapshot(solver), f"{what}, once refused, change nothing", "they changed {}")
        except ValueError as error:
            raise AssertionError(f"promised: {what} are learned or raise NotFinite; but it raised {error!r}") from error
        where = not_finite(snapshot(solver))
        expect(not where, f"{what} are refused as NotFinite, or everything stays finite", f"{where} is NaN or Inf")


def owns_one_head(case: Case) -> None:
    """A solver without a head raises RuntimeError, and one with a head refuses a second."""
    free, (solver, linear) = case.make(), case.start()
    x, y = next(case.stream(1))
    state = solver.state_dict()
    uses: dict[str, Callable[[], object]] = {
        "update": lambda: free.update(x, y),
        "state_dict": free.state_dict,
        "load_state_dict": lambda: free.load_state_dict(state),
    }
    for name, use in uses.items():
        refused(use, RuntimeError, f"{name} before bind raises RuntimeError")
    expect(solver.bind(linear) is solver, "bind to the head it has changes nothing", "it returned something else")
    refused(lambda: solver.bind(nn.Linear(K, case.outputs)), ValueError, "bind to a second head raises ValueError")
    refused(
        lambda: case.make().bind(nn.Conv1d(K, 3, 1)), TypeError, "bind to anything but an nn.Linear raises TypeError"
    )


# ---------------------------------------------------------------------- state


def resumed(case: Case, solver: Any) -> Any:
    """A new solver with the states of head and solver from a file."""
    file = io.BytesIO()
    torch.save({"head": solver.linear.state_dict(), "solver": solver.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)  # weights_only: tensors, numbers, strings, lists and dicts
    other, linear = case.start(seed=7)
    linear.load_state_dict(saved["head"])
    other.load_state_dict(saved["solver"])
    return other


def copies_go_on_alike(case: Case) -> None:
    """A checkpoint, a pickle and a deepcopy go on bit for bit, and share nothing with the original."""
    ways: dict[str, Callable[[Any], Any]] = {"checkpoint": partial(resumed, case), **COPIES}
    for n in (1, 16):
        for way, again in ways.items():
            solver = case.started(13, n)
            other = again(solver)
            before = snapshot(solver)
            expect_same(before, snapshot(other), f"a {way} is the same bit for bit", "{} differs")
            learn(other, case.stream(13, n=n, seed=1))
            expect_same(
                before, snapshot(solver), f"a {way} shares nothing with the original", "its updates changed {} there"
            )
            learn(solver, case.stream(13, n=n, seed=1))
            expect_same(
                snapshot(solver), snapshot(other), f"a {way} goes on bit for bit", "{} differs after 13 updates"
            )
            state = other.state_dict()
            other.load_state_dict(state)
            for tensor in tensors_of([solver.state_dict(), state]):
                tensor.fill_(1)
            expect_same(snapshot(solver), snapshot(other), "states are copies both ways", "writing into one changed {}")


def wrong_states_change_nothing(case: Case) -> None:
    """States of another size, or with an entry missing, extra or damaged, are refused and change nothing."""
    solver = case.started(3)
    state = solver.state_dict()
    larger, _ = case.start(k=K + 2)
    wrong: list[tuple[str, Any, dict[str, Any]]] = [
        ("of a head of another size", larger, state),
        ("that is empty", solver, {}),
        ("with an entry too many", solver, state | {"more": 1}),
    ]
    wrong += [(f"without {key!r}", solver, {k: v for k, v in state.items() if k != key}) for key in state]
    for key, value in state.items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            spoiled = {"NaN": value * math.nan, "another shape": value.new_zeros(*value.shape, 2), "a string": "no"}
            wrong += [(f"with {what} for {key!r}", solver, state | {key: bad}) for what, bad in spoiled.items()]
    for what, one, wrong_state in wrong:
        before = snapshot(one)
        refused(lambda: one.load_state_dict(wrong_state), ValueError, f"a state {what} raises ValueError")  # noqa: B023
        expect_same(before, snapshot(one), f"a state {what} is refused whole", "it changed {}")


def rolls_back(case: Case) -> None:
    """With `checkpoint` and `rollback`: updates are undone bit for bit."""
    solver = case.started()
    if not isinstance(solver, Revertible):
        return
    before, token = snapshot(solver), solver.checkpoint()
    for n in (1, 16):
        learn(solver, case.stream(3, n=n, seed=1))
        expect(difference(before, snapshot(solver)), "updates change something", "nothing changed")
        solver.rollback(token)
        expect_same(before, snapshot(solver), "rollback(checkpoint()) undoes updates bit for bit", "{} differs")


# ---------------------------------------------------------------------- in a network


def drops_into_sepsa(case: Case) -> None:
    """A network learns with the solver in SepSA."""
    with torch.random.fork_rng(devices=[]):
        model, x, y = model_and_data(case)
        solver = case.make()
        optimizer = SepSA(model, torch.optim.Adam, solver=solver, lr=0.01)
        weight = next(model.parameters())
        body = weight.detach().clone()
        with torch.no_grad():
            first = float(solver.loss(model(x), y))
        for _ in range(15):
            for i in torch.randperm(400).reshape(20, 20):
                optimizer.learn(x[i], y[i])
        with torch.no_grad():
            last = float(solver.loss(model(x), y))
    expect(
        last <= case.falls_to * first,
        f"in SepSA with Adam the loss falls to {case.falls_to:g} of the first in 300 steps",
        f"it went from {first:.4g} to {last:.4g}",
    )
    expect(not torch.equal(weight, body), "the body learns too", "it did not move")


def model_and_data(case: Case) -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, case.outputs))
    x = torch.randn(400, 4)
    columns = torch.arange(case.outputs) % 3
    bends = (torch.sin(2 * x[:, :3]) + x[:, 1:] * x[:, :-1])[:, columns]
    return model, x, bends if case.task == "regression" else case.classes(bends, torch.zeros_like(bends))


# ---------------------------------------------------------------------- in a CUDA graph


def captured_updates_equal_update(case: Case) -> None:
    """With the methods of `Capturable`: outside of a graph they do what `update` does."""
    solver, linear = case.start()
    if not isinstance(solver, Capturable):
        return
    plain, other = case.start()
    for i, (x, y) in enumerate(case.stream(6, n=8)):
        key, again = solver.prepare_capture(), solver.prepare_capture()
        expect(
            hash(key) == hash(again) and key == again,
            "prepare_capture returns an equal key while nothing changed that a recording depends on",
            "two calls in a row gave different keys",
        )
        if i == 3:
            solver.finish_captured()
            before = snapshot(solver)
            solver.prepare_capture()
            for what, bad in (("features", (with_bad_row(x), y)), ("targets", (x, with_bad_row(y)))):
                flag = solver.update_captured(*bad)
                solver.finish_captured()
                is_flag = isinstance(flag, Tensor) and flag.dtype == torch.bool and flag.ndim == 0
                expect(is_flag and not bool(flag), f"NaN in {what} gives the flag False, 0-d and bool", f"got {flag!r}")
                expect_same(
                    before, snapshot(solver), f"NaN in {what} changes nothing in update_captured", "it changed {}"
                )
                solver.prepare_capture()
        flag = solver.update_captured(x, y)
        expect(bool(flag), "update_captured of good rows gives the flag True", f"it gave {flag!r}")
        if i % 2:
            solver.finish_captured()
        plain.update(x, y)
    solver.finish_captured()
    for promised in ("update_captured learns what update does", "update goes on after update_captured"):
        for name, parameter in linear.named_parameters():
            off = float((parameter - other.get_parameter(name)).detach().abs().max())
            expect(off <= 1e-4, promised, f"the head's {name} is {off:.3g} off")
        both: list[Any] = [solver, plain]  # a plain update may follow captured ones
        for one in both:
            learn(one, case.stream(1, seed=2))
