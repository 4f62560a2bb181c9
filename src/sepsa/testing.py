"""The battery of checks that every head solver passes, ours and anybody's.

Run `check_solver(make)` in the tests of a solver of your own: it raises an AssertionError that says what
`sepsa.HeadSolver` promises and what happened instead. `CHECKS` has the checks one by one, for a parametrized test.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from sepsa.heads.protocols import Capturable, HeadSolver, NotFinite
from sepsa.optimizer import SepSA

_K = 6  # features of the heads that are tried


@dataclass(frozen=True)
class Case:
    """A solver to be checked, and what it declares about itself; see `check_solver`."""

    make: Callable[[], Any]
    task: str = "regression"
    recovers: float = 0.01
    block: float | None = None
    too_large: float = 1e300
    outputs: int = 3
    weighted: bool = True
    falls_to: float = 0.7
    interrupts: int = 20

    def start(
        self, bias: bool = True, dtype: torch.dtype = torch.float64, seed: int = 0, k: int = _K
    ) -> tuple[Any, nn.Linear]:
        """A new solver on a new head, always the same."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            linear = nn.Linear(k, self.outputs, bias=bias, dtype=dtype)
        solver = self.make()
        expect(
            isinstance(solver, HeadSolver),
            "a solver has the methods bind, update, loss, state_dict and load_state_dict",
            f"{type(solver).__name__} lacks some of them",
        )
        bound = solver.bind(linear)
        expect(bound is solver, "bind(linear) returns the solver", f"it returned {bound!r}")
        return solver, linear

    def stream(self, count: int, n: int = 16, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of samples and their targets, noise and all; classes are drawn and one-hot."""
        generator = torch.Generator().manual_seed(seed)
        truth = torch.randn(self.outputs, _K, generator=generator, dtype=torch.float64)
        for _ in range(count):
            x = torch.randn(n, _K, generator=generator, dtype=torch.float64)
            outputs = x @ truth.T + 0.5
            noise = torch.randn(n, self.outputs, generator=generator, dtype=torch.float64)
            yield x, (outputs + 0.3 * noise if self.task == "regression" else self.classes(outputs, noise))

    def classes(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """One-hot targets of the class whose output, with noise, is largest; of labels, which outputs are positive."""
        if self.outputs == 1 or self.task == "labels":
            return (outputs + noise > 0).to(outputs.dtype)
        return one_hot((outputs + noise).argmax(-1), self.outputs).to(outputs.dtype)


def check_solver(
    make: Callable[[], Any],
    *,
    task: str = "regression",
    recovers: float = 0.01,
    block: float | None = None,
    too_large: float = 1e300,
    outputs: int = 3,
    weighted: bool = True,
    falls_to: float = 0.7,
    interrupts: int = 20,
    only: Iterable[str] | None = None,
) -> None:
    """Hold the solvers that `make()` returns, each new and unbound, to all that `HeadSolver` promises.

    - `task`: "regression", or "classification" for targets that are class probabilities, or "labels" for targets of
      0 and 1 that do not exclude each other.
    - `recovers`: how near it comes to the true weights in 300 batches of 16 samples, relative to their norm.
    - `block`: how near an update of n samples is to n updates of one, or None where they are not alike.
    - `too_large`: a factor at which features cannot be squared in the solver's dtype.
    - `outputs`: the head's out_features. `weighted`: whether it takes sample_weight, or refuses any.
    - `falls_to`: what is left of the loss of a small network after 300 steps in SepSA.
    - `interrupts`: at how many random instants of `update` it is interrupted.
    - `only`: names of `CHECKS`, for some of them.

    A solver with the methods of `Capturable`, or with `checkpoint` and `rollback`, is held to these too.
    """
    if task not in ("regression", "classification", "labels"):
        raise ValueError(f"task must be 'regression', 'classification' or 'labels', got {task!r}")
    case = Case(make, task, recovers, block, too_large, outputs, weighted, falls_to, interrupts)
    names = list(CHECKS) if only is None else list(only)
    for name in names:
        if name not in CHECKS:
            raise ValueError(f"only must name checks, {', '.join(map(repr, CHECKS))}, got {name!r}")
        CHECKS[name](case)


def expect(condition: object, promised: str, happened: str) -> None:
    """The one kind of failure."""
    if not condition:
        raise AssertionError(f"promised: {promised}; but {happened}")


# ---------------------------------------------------------------------- what a solver is, bit by bit


def leaves(value: Any) -> list[tuple[str, Any]]:
    """Every tensor and number inside a state, with its place."""
    if isinstance(value, dict):
        return [(f"{key}.{place}", leaf) for key in sorted(value) for place, leaf in leaves(value[key])]
    if isinstance(value, (list, tuple)):
        return [(f"{i}.{place}", leaf) for i, item in enumerate(value) for place, leaf in leaves(item)]
    return [("", value.detach().clone() if isinstance(value, Tensor) else value)]


def snapshot(solver: Any) -> list[tuple[str, Any]]:
    """All of a solver and its head."""
    return leaves({"head": dict(solver.linear.state_dict()), "solver": solver.state_dict()})


def difference(one: list[tuple[str, Any]], other: list[tuple[str, Any]]) -> str:
    """Where two snapshots differ by a bit, NaN being equal to NaN; empty where nowhere."""
    if [place for place, _ in one] != [place for place, _ in other]:
        return "the entries"
    for (place, a), (_, b) in zip(one, other, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            alike = a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
        else:
            alike = a == b or (a != a and b != b)
        if not alike:
            return place.strip(".")
    return ""


def not_finite(taken: list[tuple[str, Any]]) -> str:
    """Where a snapshot is NaN or Inf; empty where nowhere."""
    for place, leaf in taken:
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
            return place.strip(".")
        if isinstance(leaf, float) and not math.isfinite(leaf):
            return place.strip(".")
    return ""


def learn(solver: Any, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
    for x, y in batches:
        solver.update(x, y)


# ---------------------------------------------------------------------- learning


def learns(case: Case) -> None:
    """It recovers the truth that made the targets."""
    for bias in (True, False):
        solver, linear = case.start(bias)
        generator = torch.Generator().manual_seed(1)
        truth = torch.randn(case.outputs, _K, generator=generator, dtype=torch.float64)
        shift = torch.linspace(1.0, -0.5, case.outputs, dtype=torch.float64) * bias
        for _ in range(300):
            x = torch.randn(16, _K, generator=generator, dtype=torch.float64)
            outputs = x @ truth.T + shift
            if case.task != "regression":
                outputs = (
                    outputs.softmax(1) if case.task == "classification" and case.outputs > 1 else outputs.sigmoid()
                )
            solver.update(x, outputs)
        found = linear.weight.detach()
        aim = truth
        if case.task == "classification" and case.outputs > 1:  # a number added to every class changes nothing
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
    """Leading dimensions, dtypes and gradients of what comes in are the caller's affair."""
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
        deep.update(x.reshape(2, 6, _K).double(), y.reshape(2, 6, case.outputs).requires_grad_())
    expect(
        torch.equal(head.weight, other.weight),
        "samples teach the same in any leading dimensions and in float32 as in float64",
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


def with_bad_row(value: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x.index_fill(0, torch.tensor([2]), value)


BAD: dict[str, tuple[Callable[[Tensor, Tensor], tuple[Any, ...]], type[Exception]]] = {
    "NaN in the features": (lambda x, y: (with_bad_row(math.nan)(x), y), NotFinite),
    "Inf in the features": (lambda x, y: (with_bad_row(math.inf)(x), y), NotFinite),
    "NaN in the targets": (lambda x, y: (x, with_bad_row(math.nan)(y)), NotFinite),
    "Inf in the targets": (lambda x, y: (x, with_bad_row(-math.inf)(y)), NotFinite),
    "features too narrow": (lambda x, y: (x[:, 1:], y), ValueError),
    "targets too wide": (lambda x, y: (x, torch.cat([y, y], 1)), ValueError),
    "one target too few": (lambda x, y: (x, y[1:]), ValueError),
    "no samples": (lambda x, y: (x[:0], y[:0]), ValueError),
    "integer features": (lambda x, y: (x.long(), y), TypeError),
    "an array": (lambda x, y: (x.numpy(), y), TypeError),
    "sparse features": (lambda x, y: (x.to_sparse(), y), TypeError),
    "sparse targets": (lambda x, y: (x, y.to_sparse()), TypeError),
    "features on another device": (lambda x, y: (x.to("meta"), y), ValueError),
    "a negative weight": (lambda x, y: (x, y, -torch.ones(len(x)).double()), ValueError),
    "too few weights": (lambda x, y: (x, y, torch.ones(len(x) - 1).double()), ValueError),
}


def bad_input_changes_nothing(case: Case) -> None:
    """What cannot be learned is refused by a TypeError or ValueError, and nothing has changed."""
    for n in (3, 40):
        solver, _ = case.start()
        learn(solver, case.stream(5))
        before = snapshot(solver)
        x, y = next(case.stream(1, n=n, seed=1))
        for what, (spoil, kind) in BAD.items():
            arguments = spoil(x, y)
            try:
                solver.update(*arguments)
            except (TypeError, ValueError) as error:
                came: Exception | None = error
            except Exception as error:
                raise AssertionError(
                    f"promised: {what} raises {kind.__name__}; but it raised {type(error).__name__}: {error}"
                ) from error
            else:
                came = None
            fits = isinstance(came, kind) or (kind is not NotFinite and isinstance(came, (TypeError, ValueError)))
            happened = "nothing was raised" if came is None else f"it raised {type(came).__name__}: {came}"
            expect(fits, f"{what} raises {kind.__name__}", happened)
            where = difference(before, snapshot(solver))
            expect(not where, f"{what} changes nothing", f"it changed {where}")
        if case.weighted:
            solver.update(x, y, torch.rand(n, generator=torch.Generator().manual_seed(0)).double())
        else:
            solver.update(x, y)
        expect(difference(before, snapshot(solver)), "it learns on after bad input", "a good batch changed nothing")


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
        solver, _ = case.start(dtype=dtype)
        learn(solver, case.stream(5))
        before = snapshot(solver)
        try:
            solver.update(features, targets)
        except NotFinite:
            where = difference(before, snapshot(solver))
            expect(not where, f"{what}, once refused, change nothing", f"they changed {where}")
        except ValueError as error:
            raise AssertionError(f"promised: {what} are learned or raise NotFinite; but it raised {error!r}") from error
        where = not_finite(snapshot(solver))
        expect(not where, f"{what} are refused as NotFinite, or everything stays finite", f"{where} is NaN or Inf")


def owns_one_head(case: Case) -> None:
    """It says so where it has no head, and takes no second one."""
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
    refused(lambda: solver.bind(nn.Linear(_K, case.outputs)), ValueError, "bind to a second head raises ValueError")
    refused(lambda: case.make().bind(nn.Conv1d(_K, 3, 1)), TypeError, "bind to what is no nn.Linear raises TypeError")


def refused(use: Callable[[], object], kind: type[Exception], promised: str) -> None:
    try:
        use()
    except kind:
        return
    except Exception as error:
        raise AssertionError(f"promised: {promised}; but it raised {type(error).__name__}: {error}") from error
    raise AssertionError(f"promised: {promised}; but nothing was raised")


# ---------------------------------------------------------------------- state


def resumed(case: Case, solver: Any) -> Any:
    """A solver made anew from a file of the head's and the solver's states."""
    file = io.BytesIO()
    torch.save({"head": solver.linear.state_dict(), "solver": solver.state_dict()}, file)
    saved = torch.load(io.BytesIO(file.getvalue()))  # weights_only: tensors, numbers, strings, lists and dicts
    other, linear = case.start(seed=7)
    linear.load_state_dict(saved["head"])
    other.load_state_dict(saved["solver"])
    return other


def copies_go_on_alike(case: Case) -> None:
    """A checkpoint, a pickle and a deepcopy go on bit for bit, and share nothing with the original."""
    ways: dict[str, Callable[[Any], Any]] = {
        "checkpoint": lambda solver: resumed(case, solver),
        "pickle": lambda solver: pickle.loads(pickle.dumps(solver)),
        "deepcopy": copy.deepcopy,
    }
    for n in (1, 16):
        for way, again in ways.items():
            solver, _ = case.start()
            learn(solver, case.stream(13, n=n))
            other = again(solver)
            left = snapshot(solver)
            where = difference(snapshot(other), left)
            expect(not where, f"a {way} is the same bit for bit", f"{where} differs")
            learn(other, case.stream(13, n=n, seed=1))
            where = difference(snapshot(solver), left)
            expect(not where, f"a {way} shares nothing with the original", f"its updates changed {where} there")
            learn(solver, case.stream(13, n=n, seed=1))
            where = difference(snapshot(solver), snapshot(other))
            expect(not where, f"a {way} goes on bit for bit", f"{where} differs after 13 further updates")
            state = other.state_dict()
            other.load_state_dict(state)
            for leaf in tensors_of([solver.state_dict(), state]):
                leaf.fill_(1)
            where = difference(snapshot(solver), snapshot(other))
            expect(not where, "states are copies both ways", f"writing into one changed {where}")


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in tensors_of(item)]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in tensors_of(item)]
    return [value] if isinstance(value, Tensor) else []


def wrong_states_are_refused_whole(case: Case) -> None:
    """States of another size, with an entry missing, extra or damaged."""
    solver, _ = case.start()
    learn(solver, case.stream(3))
    state = solver.state_dict()
    larger, _ = case.start(k=_K + 2)
    wrong: list[tuple[str, Any, dict[str, Any]]] = [
        ("of a head of another size", larger, state),
        ("that is empty", solver, {}),
        ("with an entry too many", solver, state | {"more": 1}),
    ]
    wrong += [(f"without {key!r}", solver, {k: v for k, v in state.items() if k != key}) for key in state]
    for key, value in state.items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            wrong.append((f"with NaN in {key!r}", solver, state | {key: torch.full_like(value, math.nan)}))
            wrong.append((f"with another shape of {key!r}", solver, state | {key: value.new_zeros(*value.shape, 2)}))
            wrong.append((f"with a string for {key!r}", solver, state | {key: "no"}))
    for what, one, wrong_state in wrong:
        before = snapshot(one)
        refused(lambda: one.load_state_dict(wrong_state), ValueError, f"a state {what} raises ValueError")  # noqa: B023
        where = difference(before, snapshot(one))
        expect(not where, f"a state {what} is refused whole", f"it changed {where}")


def rolls_back(case: Case) -> None:
    """With `checkpoint` and `rollback`: updates are undone bit for bit."""
    solver, _ = case.start()
    if not (hasattr(solver, "checkpoint") and hasattr(solver, "rollback")):
        return
    learn(solver, case.stream(5))
    before, token = snapshot(solver), solver.checkpoint()
    for n in (1, 16):
        learn(solver, case.stream(3, n=n, seed=1))
        expect(difference(before, snapshot(solver)), "updates change something", "they did not")
        solver.rollback(token)
        where = difference(before, snapshot(solver))
        expect(not where, "rollback(checkpoint()) undoes updates bit for bit", f"{where} differs")


def interrupts_leave_before_or_after(case: Case) -> None:
    """An exception at any instant of `update` leaves the state of before or of after."""
    generator = random.Random(0)
    for n in (1, 16):
        solver, _ = case.start()
        learn(solver, case.stream(5, n=n))
        x, y = next(case.stream(1, n=n, seed=1))
        torn = interrupt(solver, lambda one: one.update(x, y), (case.interrupts + 1) // 2, generator)  # noqa: B023
        expect(
            not torn,
            "an update interrupted at any instant leaves the state of before or of after",
            f"{len(torn)} of {(case.interrupts + 1) // 2} interrupts tore it, the first: {torn[:1]}",
        )


def interrupt(solver: Any, act: Callable[[Any], object], count: int, generator: random.Random) -> list[str]:
    """Interrupt `act` on copies of `solver` at `count` random bytecodes of the solver's package and of sepsa.

    Returns what was torn, with the places: neither as before `act` nor as after it.
    """
    packages = {"sepsa", type(solver).__module__.partition(".")[0]}
    before = snapshot(solver)
    whole = copy.deepcopy(solver)
    total = run_to(lambda: act(whole), packages, None)
    after, torn = snapshot(whole), []
    for _ in range(count):
        one = copy.deepcopy(solver)
        place = "an interrupt that did not come through"
        try:
            run_to(lambda: act(one), packages, generator.randrange(total))  # noqa: B023
        except KeyboardInterrupt as error:
            place = str(error)
        now = snapshot(one)
        where = difference(now, before)
        if where and difference(now, after):
            torn.append(f"{where} at {place}")
        elif not where:
            act(one)  # it goes on from there
            if where := difference(snapshot(one), after):
                torn.append(f"{where} after the same again, once interrupted at {place}")
    return torn


def run_to(call: Callable[[], object], packages: set[str], at: int | None) -> int:
    """Run `call` up to bytecode number `at` of `packages`, where KeyboardInterrupt is raised. Returns their number."""
    seen = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal seen
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in packages:
            return None
        if frame.f_globals is globals():
            return None  # the harness itself
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen += 1
            if at is not None and seen == at + 1:
                raise KeyboardInterrupt(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        return trace

    previous = sys.gettrace()
    with modes_restored():
        sys.settrace(trace)
        try:
            call()
        finally:
            sys.settrace(previous)
    return seen


@contextlib.contextmanager
def modes_restored() -> Iterator[None]:
    """Put torch's modes back: an interrupt inside its no_grad or autocast leaves them as they are at that instant."""
    gradients, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    try:
        yield
    finally:
        torch.set_grad_enabled(gradients)
        torch.set_autocast_enabled("cpu", autocast)
        now = torch.autocast_increment_nesting()
        for _ in range(now - depth + 1):
            torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()


# ---------------------------------------------------------------------- in SepSA, and in a CUDA graph


def drops_into_sepsa(case: Case) -> None:
    """A network learns with it, and resumes from a state bit for bit."""
    bases: list[tuple[type[torch.optim.Optimizer], float]] = [(torch.optim.Adam, 0.01), (torch.optim.SGD, 0.1)]
    for base, lr in bases:
        with torch.random.fork_rng(devices=[]):
            model, x, y = model_and_data(case)
            solver = case.make()
            optimizer = SepSA(model, base, solver=solver, lr=lr)
            layer = model[0]
            assert isinstance(layer, nn.Linear)
            body = layer.weight.detach().clone()
            with torch.no_grad():
                first = float(solver.loss(model(x), y))
            for _ in range(15):
                for i in torch.randperm(400).reshape(20, 20):
                    optimizer.learn(x[i], y[i])
            with torch.no_grad():
                last = float(solver.loss(model(x), y))
            expect(
                last <= case.falls_to * first,
                f"in SepSA with {base.__name__} the loss falls to {case.falls_to:g} of the first in 300 steps",
                f"it went from {first:.4g} to {last:.4g}",
            )
            expect(not torch.equal(layer.weight, body), "the body learns too", "it did not move")
            twin = copy.deepcopy(optimizer)
            again = model_and_data(case)[0]
            again.load_state_dict(model.state_dict())
            third = SepSA(again, base, solver=case.make(), lr=1.0)
            third.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch's own loader shares the moments
            for one in (optimizer, twin, third):
                one.learn(x[:20], y[:20])
        for name, other in (("deepcopy", twin.model), ("state_dict", again)):
            alike = all(map(torch.equal, model.parameters(), other.parameters()))
            expect(alike, f"SepSA resumes from a {name} bit for bit", "the next step gave other weights")


def model_and_data(case: Case) -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, case.outputs))
    x = torch.randn(400, 4)
    columns = torch.arange(case.outputs) % 3
    bends = (torch.sin(2 * x[:, :3]) + x[:, 1:] * x[:, :-1])[:, columns]
    return model, x, bends if case.task == "regression" else case.classes(bends, torch.zeros_like(bends))


def captured_updates_equal_update(case: Case) -> None:
    """With the methods of `Capturable`: outside of a graph they do what `update` does."""
    solver, linear = case.start()
    if not isinstance(solver, Capturable):
        return
    plain, other = case.start()
    for i, (x, y) in enumerate(case.stream(6, n=8)):
        key = solver.prepare_capture()
        expect(
            hash(key) == hash(solver.prepare_capture()) and key == solver.prepare_capture(),
            "prepare_capture returns an equal key while nothing changed that a recording depends on",
            "two calls in a row gave different keys",
        )
        if i == 3:
            solver.finish_captured()
            before = snapshot(solver)
            solver.prepare_capture()
            for what, bad in (
                ("features", (with_bad_row(math.nan)(x), y)),
                ("targets", (x, with_bad_row(math.nan)(y))),
            ):
                flag = solver.update_captured(*bad)
                solver.finish_captured()
                is_flag = isinstance(flag, Tensor) and flag.dtype == torch.bool and flag.ndim == 0
                expect(is_flag and not bool(flag), f"NaN in {what} gives the flag False, 0-d and bool", f"got {flag!r}")
                where = difference(before, snapshot(solver))
                expect(not where, f"NaN in {what} changes nothing in update_captured", f"it changed {where}")
                solver.prepare_capture()
        flag = solver.update_captured(x, y)
        expect(bool(flag), "update_captured of good rows gives the flag True", f"it gave {flag!r}")
        if i % 2:
            solver.finish_captured()
        plain.update(x, y)
    solver.finish_captured()
    for name, parameter in linear.named_parameters():
        off = float((parameter - other.get_parameter(name)).detach().abs().max())
        expect(off <= 1e-4, "update_captured learns what update does", f"the head's {name} is {off:.3g} off")
    x, y = next(case.stream(1, seed=2))
    both: list[Any] = [solver, plain]  # a plain update may follow captured ones
    for one in both:
        one.update(x, y)
    off = float((linear.weight - other.weight).detach().abs().max())
    expect(off <= 1e-4, "update goes on after update_captured", f"the head's weight is {off:.3g} off")


CHECKS: dict[str, Callable[[Case], None]] = {
    "learns": learns,
    "block": block_equals_loop,
    "shapes and dtypes": shapes_and_dtypes,
    "loss": loss_is_a_loss,
    "bad input": bad_input_changes_nothing,
    "too large": too_large_is_refused_or_survived,
    "one head": owns_one_head,
    "copies": copies_go_on_alike,
    "wrong states": wrong_states_are_refused_whole,
    "rollback": rolls_back,
    "interrupts": interrupts_leave_before_or_after,
    "SepSA": drops_into_sepsa,
    "captured": captured_updates_equal_update,
}
