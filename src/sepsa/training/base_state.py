"""The saved state of a base optimizer and SepSA's own part of it, checked before anything is changed."""

from __future__ import annotations

import io
import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sepsa.states.schema import Entries, brief, check_array, damaged, read, settings
from sepsa.training.joint import JointOptimizer
from sepsa.validation import in_range, is_number

# Entries of torch's own optimizers that are counters or squares.
_NOT_NEGATIVE = {"acc_delta", "exp_avg_sq", "exp_inf", "max_exp_avg_sq", "square_avg", "step", "sum"}


def check_own_state(own: object, body: list[list[list[int]]]) -> None:
    """Check SepSA's own part of a state: fraction, generator, counters, the body's shapes and the heads."""
    needed = {"head_fraction", "generator", "body", "samples"}
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
    moments = state.mapping("state")
    unknown = set(moments.values)
    for i, own in enumerate(live["param_groups"]):
        check_group(groups.path(i), groups[i], own, defaults[i])
        entries = {key: moments.mapping(key) for key in own["params"] if key in moments.values}
        kinds: dict[int, dict[str, Any]] = {}  # some optimizers keep other moments of a matrix than of a vector
        for key, parameter in zip(own["params"], base.param_groups[i]["params"], strict=True):
            if (one := entries.get(key)) is not None and len(one):
                check_moments(one, live["state"].get(key), kinds.setdefault(parameter.ndim, one.values))
        unknown -= set(entries)
    if unknown:
        raise ValueError(f"{moments.path(min(unknown, key=repr))} must belong to one of the parameters of the body")


def check_group(name: str, group: object, own: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Check that a parameter group has the parameters and the options of this optimizer."""
    # torch gives the defaults of a copied optimizer an option "differentiable", which groups may lack.
    needed = {"params", *defaults} & set(own)
    if not isinstance(group, dict) or not needed <= set(group):
        missing = sorted(needed - set(group)) if isinstance(group, dict) else brief(group)
        raise ValueError(f"{name} must be a group of this optimizer, missing {missing}")
    if not same_shapes(group["params"], own["params"]):
        raise damaged(f"{name}['params']", f"{own['params']}", brief(group["params"]))
    for option in needed - {"params"}:
        check_option(f"{name}[{option!r}]", group[option], own[option])


def check_option(name: str, value: Any, own: Any) -> None:
    """Check that an option has the type and sign of this optimizer's own."""
    value, own = (one.item() if isinstance(one, Tensor) and one.numel() == 1 else one for one in (value, own))
    if isinstance(own, (tuple, list)):
        fits = isinstance(value, (tuple, list)) and len(value) == len(own)
        for i, (part, mine) in enumerate(zip(value, own, strict=True) if fits else ()):
            check_option(f"{name}[{i}]", part, mine)
    elif is_number(own) or (own is None and not isinstance(value, bool)):
        fits = value is own or (is_number(value) and abs(value) < 2**63 and (value >= 0 or (own or 0) < 0))
    else:
        fits = type(value) is type(own) or (own is None and isinstance(value, bool))
    if not fits:
        raise damaged(name, f"an option such as {own!r}", brief(value))


def check_moments(entries: Entries, live: dict[str, Any] | None, other: dict[str, Any]) -> None:
    """Check that moments and counters are such as this parameter's are, or those of another one, and finite."""
    like = live or other
    if set(entries.values) != set(like):
        raise ValueError(f"{entries.name} must hold {sorted(like)}, got {sorted(map(str, entries.values))}")
    for name, value in entries.values.items():
        low, own = 0.0 if name in _NOT_NEGATIVE else -math.inf, like[name]
        if isinstance(value, Tensor) and (isinstance(own, Tensor) or own is None):
            of = value if own is None or not live else own
            check_array(entries.path(name), value, tuple(of.shape), of.dtype, low=low)
        elif is_number(own):
            entries.number(name, low, 2**63 - 1)
        elif type(value) is not type(own) and not (name == "momentum_buffer" and value is None):
            raise entries.damaged(name, f"{type(own).__name__}", brief(value))


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
