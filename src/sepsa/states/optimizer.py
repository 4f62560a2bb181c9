"""The saved state of a base optimizer and SepSA's own part of it, checked before anything is changed."""

from __future__ import annotations

import io
import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sepsa.joint import JointOptimizer
from sepsa.states.schema import Entries, brief, check_array, damaged, read, settings
from sepsa.validation import in_range, is_number

# Entries of torch's own optimizers that have the parameter's shape, and those that are squares.
_NOT_NEGATIVE = {"acc_delta", "exp_avg_sq", "exp_inf", "max_exp_avg_sq", "square_avg", "step", "sum"}
_LIKE_PARAMETER = {"ax", "exp_avg", "grad_avg", "momentum_buffer", "prev"} | _NOT_NEGATIVE - {"step"}
# Entries of which a parameter has all or none, besides the step: of Adam, of Adamax, of RMSprop.
_COMPLETE = ({"step", "exp_avg", "exp_avg_sq"}, {"step", "exp_avg", "exp_inf"}, {"step", "square_avg"})


def check_own_state(own: object, body: list[list[list[int]]]) -> None:
    """Check SepSA's own part of a state: fraction, generator, counters, the body's shapes and the heads."""
    needed = {"head_fraction", "generator", "body", "samples", "rates"}
    state = read("state_dict['sepsa']", own, needed, "SepSA", optional={"head", "heads"})
    heads = state.values.get("head", state.values.get("heads"))
    if not isinstance(heads, dict):
        raise state.damaged("head", "the state of the head", brief(heads))
    with settings(state.name):
        in_range("head_fraction", state["head_fraction"], 0.0, 1.0)
    try:
        torch.Generator().set_state(state["generator"].cpu())
    except (AttributeError, RuntimeError, TypeError) as error:
        raise state.damaged("generator", "the state of a generator", error) from None
    state.integer("samples")
    rates = state.items("rates", 3)  # the rate, its peak and whether it ever fell
    rates.number(1, rates.number(0, 0.0))
    if not isinstance(rates[2], bool):
        raise rates.damaged(2, "true or false", brief(rates[2]))
    if not same_shapes(state["body"], body):
        raise ValueError(f"state_dict belongs to a body with parameter shapes {state['body']}, this one has {body}")


def same_shapes(given: Any, body: Any) -> bool:
    """Whether nested lists or tuples hold the same integers."""
    if isinstance(body, int):
        return type(given) is int and given == body
    return (
        isinstance(given, (list, tuple))
        and len(given) == len(body)
        and all(same_shapes(a, b) for a, b in zip(given, body, strict=True))
    )


def check_base_state(state_dict: dict[str, Any], base: Optimizer) -> None:
    """Check the state of this base optimizer: groups, options, moments and counters."""
    live = base.state_dict()
    if set(state_dict) != set(live):
        raise ValueError(f"state_dict must hold {sorted(live)} and 'sepsa', got {sorted(map(str, state_dict))}")
    state = Entries("state_dict", state_dict)
    groups = state.items("param_groups", len(live["param_groups"]))
    parts = base.optimizers if isinstance(base, JointOptimizer) else [base]
    defaults = [part.defaults for part in parts for _ in part.param_groups]
    for i, own in enumerate(live["param_groups"]):
        check_group(groups.path(i), groups[i], own, defaults[i])
    keys = [key for group in live["param_groups"] for key in group["params"]]
    parameters = dict(zip(keys, (p for group in base.param_groups for p in group["params"]), strict=True))
    moments = state.mapping("state")
    for key in moments.values:
        if type(key) is not int or key not in parameters:
            raise ValueError(f"{moments.path(key)} must belong to one of the {len(parameters)} parameters of the body")
        if len(entries := moments.mapping(key)):
            check_moments(entries, parameters[key], live["state"].get(key))


def check_group(name: str, group: object, own: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Check that a parameter group has the parameters and the options of this optimizer."""
    # torch gives the defaults of a copied optimizer an option "differentiable", which groups may lack.
    defaults = {option: default for option, default in defaults.items() if option in own}
    if not isinstance(group, dict) or not {"params", *defaults} <= set(group):
        missing = sorted({"params", *defaults} - set(group)) if isinstance(group, dict) else brief(group)
        raise ValueError(f"{name} must be a group of this optimizer, missing {missing}")
    params = group["params"]
    if not isinstance(params, list) or not same_shapes(params, own["params"]):
        raise damaged(f"{name}['params']", f"{own['params']}", brief(params))
    for option, default in defaults.items():
        check_option(f"{name}[{option!r}]", group[option], default)


def check_option(name: str, value: Any, default: Any) -> None:
    """Check that an option has the type and sign of its default."""
    if isinstance(default, bool):
        fits = isinstance(value, bool)
    elif default is None:
        fits = value is None or (isinstance(value, (bool, int, float)) and value == value and not negative(value))
    elif isinstance(default, (tuple, list)):
        fits = isinstance(value, (tuple, list)) and len(value) == len(default)
        for i, (part, own) in enumerate(zip(value, default, strict=True) if fits else ()):
            check_option(f"{name}[{i}]", part, own)
    elif isinstance(default, (int, float)):
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        fits = is_number(number) and abs(number) < 2**63
        fits = fits and not (negative(number) and not negative(default))
    else:
        fits = type(value) is type(default)
    if not fits:
        raise damaged(name, f"an option such as {default!r}", brief(value))


def check_moments(entries: Entries, parameter: Tensor, live: dict[str, Any] | None) -> None:
    """Check that moments and counters belong to this parameter."""
    names = set(entries.values)
    begun = [needed for needed in _COMPLETE if names & needed - {"step"}]
    if begun and not any(needed <= names for needed in begun):
        raise ValueError(f"{entries.name} must hold {sorted(begun[0])}, got {sorted(map(str, names))}")
    if live and set(live) != names:
        raise ValueError(f"{entries.name} must hold {sorted(live)}, got {sorted(map(str, names))}")
    for name, value in entries.values.items():
        low = 0.0 if name in _NOT_NEGATIVE else -math.inf
        if name in _LIKE_PARAMETER and not (name == "momentum_buffer" and value is None):
            check_array(entries.path(name), value, tuple(parameter.shape), parameter.dtype, low=low)
        elif isinstance(value, Tensor):
            if name == "step" and not value.is_floating_point():
                raise entries.damaged(name, "a number of steps", brief(value))
            check_array(entries.path(name), value, () if name == "step" else tuple(value.shape), value.dtype, low=low)
        elif name == "step" and entries.number(name, 0, 2**63 - 1) != int(value):
            raise entries.damaged(name, "a number of steps", brief(value))


def negative(value: Any) -> bool:
    """Whether this is a number below 0 or an infinite one."""
    return is_number(value) and (value < 0 or math.isinf(value))


def packed(own: dict[str, Any]) -> bytes:
    """SepSA's own state as bytes, which torch.distributed.checkpoint neither splits nor casts."""
    file = io.BytesIO()
    torch.save(own, file)
    return file.getvalue()


def unpacked(name: str, own: object) -> Any:
    """SepSA's own state from the entry of this name; an error where it is not what `packed` returned."""
    try:
        return torch.load(io.BytesIO(own), weights_only=True)  # type: ignore[arg-type]
    except Exception as error:
        raise damaged(name, "the bytes that state_dict() wrote", f"{brief(own)} ({type(error).__name__})") from None


def numbered(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state with parameters by number, where torch.distributed.checkpoint wrote their names."""
    groups: Any = state_dict.get("param_groups")
    own = isinstance(groups, list) and all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups)
    if not own:
        raise damaged("state_dict['param_groups']", "a list of groups with their params", brief(groups))
    place = {name: k for k, name in enumerate(name for group in groups for name in group["params"])}
    groups = [group | {"params": [place[name] for name in group["params"]]} for group in groups]
    state = {place.get(name, name): entry for name, entry in state_dict["state"].items()}
    return state_dict | {"param_groups": groups, "state": state}
