"""The parts that a SepSA joins: the heads of a model, their solvers, and the optimizer of the body."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sepsa.heads import RLS, HeadSolver, LogisticNewton, SoftmaxNewton
from sepsa.ranks.exchange import is_sharded
from sepsa.torch_internals import parameters_of
from sepsa.training.joint import Base, JointOptimizer, parts_of
from sepsa.training.observe import by_name, is_collection
from sepsa.training.observer import observers_of
from sepsa.validation import one_of


def find_heads(model: nn.Module, head: Any) -> dict[str, nn.Linear]:
    """The heads that `head` names, by their names in the model, each checked."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}: SepSA finds the head in it")
    several = is_collection(head)
    heads = dict(find_head(model, one) for one in (head if several else [head]))
    if several and len(heads) < max(1, len(head)):
        raise ValueError(f"head must name one nn.Linear or more, each once, got {head!r}")
    for name, linear in heads.items():
        check_head(name, linear)
    return heads


def find_head(model: nn.Module, head: Any) -> tuple[str, nn.Linear]:
    """The head and its name in the model: the last nn.Linear, or the one that is given by itself or by its name."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if head is None:
        if not linears:
            raise ValueError("model has no nn.Linear, so there is no head: add one as the last layer")
        return linears.popitem()
    name = head if isinstance(head, str) else next((name for name, one in linears.items() if one is head), None)
    try:
        module = head if name is None else model.get_submodule(name)
    except AttributeError:
        raise ValueError(
            f"head {head!r} is not a module of the model; its nn.Linear modules are {list(linears)}"
        ) from None
    if not isinstance(module, nn.Linear):
        raise TypeError(f"head must be an nn.Linear, its name, or None, got {head!r}, a {type(module).__name__}")
    if name is None:
        raise ValueError("head is not a module of the model: pass model's own nn.Linear or its name")
    return name, module


def check_head(name: str, head: nn.Linear) -> None:
    """Raise an error for a head that is sharded, frozen, or without weights."""
    weight = parameters_of(head).get("weight")
    if weight is None or isinstance(weight, nn.parameter.UninitializedParameter):
        return  # the solver's bind raises an error
    if is_sharded(weight):
        raise ValueError(
            f"head {name!r} is sharded over ranks, and its solver needs it whole: leave it out, as by "
            "fully_shard(model, ignored_params=set(head.parameters())), or name another head"
        )
    if weight.is_meta:
        raise ValueError(
            f"head {name!r} is on the meta device and has no weights: load the model first, "
            "as by model.to_empty(device=...) and load_state_dict, then make the SepSA"
        )
    for key, parameter in parameters_of(head).items():
        if parameter is not None and not parameter.requires_grad:
            raise ValueError(
                f"head parameter {name + '.' + key!r} has requires_grad=False, but the head solver would change it: "
                "call head.requires_grad_(True), or name another head by SepSA(model, base, head=...)"
            )


# Solvers by the loss that a user names. Their ridge by evidence fits most networks: benchmarks/heads/defaults.py and
# class_defaults.py.
DEFAULTS: dict[str, Any] = {"squared": RLS, "cross-entropy": SoftmaxNewton, "logistic": LogisticNewton}


def solvers_for(names: list[str], given: Any, several: bool) -> dict[str, HeadSolver]:
    """The solvers by the heads' names: a default one for each head without one."""
    loss = "squared" if given is None else given
    if isinstance(loss, str):
        if loss not in DEFAULTS:
            raise ValueError(f"solver must be a solver, None or one of {sorted(DEFAULTS)}, got {loss!r}")
        return {name: DEFAULTS[loss](ridge="evidence") for name in names}
    if not several:
        return {names[0]: checked_solver(given)}
    if is_collection(given):
        found = by_name("solver", given, names)
        return {name: checked_solver(found.get(name) or RLS(ridge="evidence")) for name in names}
    raise TypeError(
        f"solver must be a dict or a sequence with one solver for each of the heads {names}, "
        f"got one {type(given).__name__}: a solver owns one head"
    )


def checked_solver(given: Any) -> HeadSolver:
    """The solver, or an error for what is none."""
    if isinstance(given, type):
        raise TypeError(f"solver must be an instance, got the class {given.__name__}: write solver={given.__name__}()")
    if not isinstance(given, HeadSolver):
        raise TypeError(
            f"solver must be a head solver such as RLS(), None or one of {sorted(DEFAULTS)}, got {given!r}: a solver "
            "of your own needs the methods of sepsa.heads.HeadSolver"
        )
    return given


def check_forgetting(forget_per: str, samples_per_epoch: int | None, solvers: dict[str, Any], is_default: bool) -> None:
    """Raise an error for an unknown `forget_per`, and for solvers whose forgetting cannot be set so."""
    one_of("forget_per", forget_per, ("update", "step"))
    for solver in solvers.values():
        if forget_per == "step" and not hasattr(solver, "forgets"):  # isinstance asks no property from Python 3.12 on
            raise TypeError(
                f"forget_per='step' needs a solver that can learn without forgetting, got {solver!r}: "
                "choose its forgetting, as RLS(forgetting=0.99), or leave forget_per at 'update'"
            )
        fixed = not hasattr(solver, "forgets") or getattr(solver, "forgetting", None) != 1.0
        if samples_per_epoch is not None and not is_default and fixed:
            raise ValueError(
                f"samples_per_epoch sets the forgetting of a solver that has forgetting 1, got {solver!r}: "
                "leave one out"
            )


def build_base(model: nn.Module, heads: dict[str, nn.Linear], base: Base, options: dict[str, Any]) -> Optimizer:
    """The body's optimizer: built on every parameter that is not a head's, or the given one, checked."""
    of_head = {id(p): name for name, head in heads.items() for p in head.parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        head_name = of_head.get(id(parameter))
        if head_name is not None and name.rpartition(".")[0] != head_name:
            raise ValueError(
                f"head {head_name!r} shares a parameter with {name!r}: a Newton step for the head would change both; "
                "untie them or choose another head"
            )
    body = [(name, p) for name, p in model.named_parameters() if id(p) not in of_head]
    built: Any
    if isinstance(base, type):
        built = build_one(base, options, body)
    elif options:
        what = "is an instance, so it" if isinstance(base, Optimizer) else "is a function or a list, which"
        raise ValueError(f"base {what} already has its options, got also {sorted(options)}")
    elif isinstance(base, (list, tuple)):
        built = build_several(base, body)
    else:
        built = base if isinstance(base, Optimizer) or not callable(base) else base(body)
    if not isinstance(built, Optimizer):
        raise TypeError(
            f"base must be a torch.optim.Optimizer class or instance, got {built!r}; or a list of (class, options, "
            "which parameters), or a function of the body's named parameters that returns an optimizer"
        )
    if any(isinstance(part, torch.optim.LBFGS) for part in parts_of(built)):
        raise ValueError(
            "base LBFGS evaluates the model several times a step, and the head would learn the same samples each time: "
            "use Adam, SGD or another optimizer that evaluates it once"
        )
    given = [p for group in built.param_groups for p in group["params"]]
    refuse_heads(model, heads, given)
    warn_left_out(model, heads, given)
    return built


def build_one(kind: Any, options: dict[str, Any], body: list[tuple[str, nn.Parameter]]) -> Optimizer:
    """An optimizer of the class `kind` on these parameters of the body."""
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise TypeError(f"base must be a torch.optim.Optimizer class or instance, got {kind!r}")
    options = {name: value.item() if isinstance(value, np.generic) else value for name, value in options.items()}
    misplaced = sorted({"ridge", "forgetting", "bias_ridge"} & set(options) - set(inspect.signature(kind).parameters))
    if misplaced:
        settings = ", ".join(f"{name}={options[name]!r}" for name in misplaced)
        raise TypeError(
            f"{misplaced[0]} is a setting of the head solver and not of {kind.__name__}: "
            f"write SepSA(model, {kind.__name__}, solver=RLS({settings}))"
        )
    return kind([{"params": [parameter for _, parameter in body]}], **options)


def build_several(parts: Sequence[Any], body: list[tuple[str, nn.Parameter]]) -> Optimizer:
    """One optimizer for each part, on the parameters that it selects from those not selected before."""
    optimizers = []
    for i, part in enumerate(parts):
        if not (isinstance(part, tuple) and len(part) == 3 and isinstance(part[1], dict)):
            raise TypeError(f"base[{i}] must be (optimizer class, dict of options, which parameters), got {part!r}")
        kind, options, selects = part
        chosen = [(name, p) for name, p in body if selects is None or selects(name, p)]
        if not chosen and selects is not None:
            raise ValueError(
                f"base[{i}] selects no parameter that is left of {few([n for n, _ in body])}: its third item is called "
                "with name and parameter, and is None for all that are left"
            )
        if chosen:
            taken = {id(p) for _, p in chosen}
            body = [(name, p) for name, p in body if id(p) not in taken]
            optimizers.append(build_one(kind, options, chosen))
    if body or not optimizers:
        raise ValueError(
            f"base has no optimizer for {few([name for name, _ in body])}: end it with one for the rest, as "
            "(torch.optim.AdamW, {'lr': 1e-3}, None)"
        )
    return JointOptimizer(optimizers)


def few(names: list[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def warn_left_out(model: nn.Module, heads: dict[str, nn.Linear], given: Iterable[Tensor]) -> None:
    """Warn of body parameters that require a gradient but are not in the given base."""
    learns = [*heads.values(), *(observer.head for observer in observers_of(model))]
    moved = {id(p) for p in (*given, *(p for head in learns for p in head.parameters()))}
    names = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in moved]
    if names:
        warnings.warn(
            f"base does not train {few(names)}: build it on these parameters too, or call "
            "requires_grad_(False) on them",
            stacklevel=4,
        )


def refuse_heads(model: nn.Module, heads: dict[str, nn.Linear], parameters: Iterable[Tensor]) -> None:
    """Raise an error for body parameters that belong to one of these heads, or to that of another SepSA."""
    found = {
        id(parameter): f"another SepSA trains the head {observer.name!r} of this model, and base would train it too: "
        "pass base an optimizer without its parameters, or call detach() on the other SepSA"
        for observer in observers_of(model)
        for parameter in observer.head.parameters()
    } | {
        id(parameter): f"base owns the head's parameter {f'{head_name}.{name}'!r}, which the head solver trains: "
        "build it on the other parameters, or pass its class and let SepSA build it"
        for head_name, head in heads.items()
        for name, parameter in head.named_parameters()
    }
    for parameter in parameters:
        if id(parameter) in found:
            raise ValueError(found[id(parameter)])
