"""What a SepSA saves: the base optimizer's state and, under "sepsa", its own and the solvers', and their checks."""

from __future__ import annotations

import io
import math
import sys
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sepsa.states.objects import load_all
from sepsa.states.schema import Entries, brief, check_array, damaged, read, settings
from sepsa.training.joint import parts_of
from sepsa.training.observer import Observer
from sepsa.validation import in_range, is_number

# Entries of torch's own optimizers that are counters or squares.
_NOT_NEGATIVE = {"acc_delta", "exp_avg_sq", "exp_inf", "max_exp_avg_sq", "square_avg", "step", "sum"}


def written(base: Optimizer, observers: list[Observer]) -> dict[str, Any]:
    """The state of a SepSA of these parts."""
    state, first = base.state_dict(), observers[0]
    own = state["sepsa"] = {
        "heads": {observer.name: observer.solver.state_dict() for observer in observers},
        "head_fraction": first.head_fraction,
        "generator": first.generator.get_state(),
        "body": shapes_of(base),
        "samples": 0 if first.epochs is None else first.epochs.samples,
    }
    if "torch.distributed.checkpoint.state_dict" in sys.modules:
        # Its get_optimizer_state_dict refuses what belongs to no parameter of the groups, as the head's do not, and
        # its set_optimizer_state_dict drops what belongs to a frozen one.
        parameters = [parameter for group in base.param_groups for parameter in group["params"]]
        keys = [key for group in state["param_groups"] for key in group["params"]]
        for key in [k for k, p in zip(keys, parameters, strict=True) if p.requires_grad][:1] or keys[:1]:
            # As bytes, which torch.distributed.checkpoint neither splits nor casts.
            torch.save(own, file := io.BytesIO())
            state["state"] = state["state"] | {key: state["state"].get(key, {}) | {"sepsa": file.getvalue()}}
    return state


def load(state_dict: dict[str, Any], base: Optimizer, observers: list[Observer]) -> None:
    """Continue from a state that `written` returned, or raise an error and change nothing.

    A single head may have another name than the one that was saved.
    """
    own = state_dict.pop("sepsa", None)
    entries = state_dict.get("state")
    entries = entries if isinstance(entries, dict) else {}
    under = [key for key, value in entries.items() if isinstance(value, dict) and "sepsa" in value]
    for key in under:
        entry = dict(entries[key])
        carried = unpacked(f"state_dict['state'][{key!r}]['sepsa']", entry.pop("sepsa"))
        own = carried if own is None else own
        state_dict["state"] = state_dict["state"] | {key: entry}
    if own is None:
        raise ValueError(
            f"state_dict must come from SepSA.state_dict(), got the keys {sorted(state_dict)}: "
            "a plain base optimizer's state goes to optimizer.base.load_state_dict"
        )
    heads = check_own(own, shapes_of(base))
    known = [observer.name for observer in observers]
    if len(known) == len(heads) == 1:
        heads = dict(zip(known, heads.values(), strict=True))
    if set(heads) != set(known):
        raise ValueError(f"state_dict belongs to the heads {sorted(heads)}, this SepSA has {sorted(known)}")
    if under:
        state_dict = numbered(state_dict)
    check_base(state_dict, base)
    load_all({observer.name: observer.solver for observer in observers}, heads)
    for observer in observers:
        observer.head_fraction = own["head_fraction"]
        observer.generator.set_state(own["generator"].cpu())
        observer.ranks.started = False
        if observer.epochs is not None:
            observer.epochs.samples = own["samples"]
    base.load_state_dict(state_dict)


def shapes_of(base: Optimizer) -> list[list[list[int]]]:
    """The shapes of the body's parameters, by groups."""
    return [[list(p.shape) for p in group["params"]] for group in base.param_groups]


# ---------------------------------------------------------------------- checks


def check_own(own: object, body: list[list[list[int]]]) -> dict[str, Any]:
    """Check SepSA's own part of a state. Returns the states of the heads, which their solvers check."""
    state = read("state_dict['sepsa']", own, {"heads", "head_fraction", "generator", "body", "samples"}, "SepSA")
    heads = state.mapping("heads").values
    with settings(state.name):
        in_range("head_fraction", state["head_fraction"], 0.0, 1.0)
    try:
        torch.Generator().set_state(state["generator"].cpu())
    except (AttributeError, RuntimeError, TypeError) as error:
        raise state.damaged("generator", "the state of a generator", error) from None
    state.integer("samples")
    if not same_integers(state["body"], body):
        raise ValueError(f"state_dict belongs to a body with parameter shapes {state['body']}, this one has {body}")
    return dict(heads)


def same_integers(given: Any, own: Any) -> bool:
    """Whether nested lists or tuples hold the same integers."""
    if isinstance(own, int):
        return type(given) is int and given == own
    return isinstance(given, (list, tuple)) and len(given) == len(own) and all(map(same_integers, given, own))


def check_base(state_dict: dict[str, Any], base: Optimizer) -> None:
    """Check the state of this base optimizer: groups, options, moments and counters."""
    live = base.state_dict()
    state = read("state_dict", state_dict, set(live), "SepSA")
    groups = state.items("param_groups", len(live["param_groups"]))
    defaults = [part.defaults for part in parts_of(base) for _ in part.param_groups]
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
    if not same_integers(group["params"], own["params"]):
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
    read(entries.name, entries.values, set(like), "this optimizer")
    for name, value in entries.values.items():
        low, own = 0.0 if name in _NOT_NEGATIVE else -math.inf, like[name]
        if isinstance(value, Tensor) and (isinstance(own, Tensor) or own is None):
            of = value if own is None or not live else own
            check_array(entries.path(name), value, tuple(of.shape), of.dtype, low=low)
        elif is_number(own):
            entries.number(name, low, 2**63 - 1)
        elif type(value) is not type(own) and not (name == "momentum_buffer" and value is None):
            raise entries.damaged(name, f"{type(own).__name__}", brief(value))


# ---------------------------------------------------------------------- states that torch.distributed.checkpoint wrote


def unpacked(name: str, own: object) -> Any:
    """SepSA's own state from the bytes in the entry of this name."""
    try:
        return torch.load(io.BytesIO(own), weights_only=True)  # type: ignore[arg-type]
    except Exception as error:
        raise damaged(name, "the bytes that state_dict() wrote", f"{brief(own)} ({type(error).__name__})") from None


def numbered(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state with parameters by number instead of by name."""
    groups: Any = state_dict.get("param_groups")
    own = isinstance(groups, list) and all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups)
    if not own:
        raise damaged("state_dict['param_groups']", "a list of groups with their params", brief(groups))
    place = {name: k for k, name in enumerate(name for group in groups for name in group["params"])}
    groups = [group | {"params": [place[name] for name in group["params"]]} for group in groups]
    state = {place.get(name, name): entry for name, entry in state_dict["state"].items()}
    return state_dict | {"param_groups": groups, "state": state}
