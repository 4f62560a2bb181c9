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
from sepsa.states.schema import brief, check_array, damaged, read, settings
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
    own, moments = state_dict.pop("sepsa", None), state_dict.get("state")
    under = [k for k, v in moments.items() if isinstance(v, dict) and "sepsa" in v] if isinstance(moments, dict) else []
    for key in under:  # written for torch.distributed.checkpoint
        entry = dict(state_dict["state"][key])
        with settings(f"state_dict['state'][{key!r}]['sepsa']"):
            carried = torch.load(io.BytesIO(entry.pop("sepsa")), weights_only=True)
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


def numbered(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state that torch.distributed.checkpoint read, with parameters by number instead of by name."""
    with settings("state_dict['param_groups']"):
        groups = state_dict["param_groups"]
        place = {name: k for k, name in enumerate(name for group in groups for name in group["params"])}
        groups = [group | {"params": [place[name] for name in group["params"]]} for group in groups]
    state = {place.get(name, name): entry for name, entry in state_dict["state"].items()}
    return state_dict | {"param_groups": groups, "state": state}


def shapes_of(base: Optimizer) -> list[list[list[int]]]:
    """The shapes of the body's parameters, by groups."""
    return [[list(p.shape) for p in group["params"]] for group in base.param_groups]


# ---------------------------------------------------------------------- checks


def check_own(own: object, body: list[list[list[int]]]) -> dict[str, Any]:
    """Check SepSA's own part of a state. Returns the states of the heads, which their solvers check."""
    state = read("state_dict['sepsa']", own, {"heads", "head_fraction", "generator", "body", "samples"}, "SepSA")
    heads: dict[str, Any] = dict(state.mapping("heads").values)
    with settings(state.name):
        in_range("head_fraction", state["head_fraction"], 0.0, 1.0)
    with settings(state.path("generator")):
        torch.Generator().set_state(state["generator"].cpu())
    state.integer("samples")
    if repr(state["body"]) != repr(body):
        raise ValueError(f"state_dict belongs to a body with parameter shapes {state['body']}, this one has {body}")
    return heads


def check_base(state_dict: dict[str, Any], base: Optimizer) -> None:
    """Check the state of this base optimizer: groups, options, moments and counters."""
    live = base.state_dict()
    state = read("state_dict", state_dict, set(live), "SepSA")
    groups, moments = state.items("param_groups", len(live["param_groups"])), state.mapping("state")
    defaults = [part.defaults for part in parts_of(base) for _ in part.param_groups]
    unknown = set(moments.values)
    for i, own in enumerate(live["param_groups"]):
        group = groups.mapping(i)
        # torch gives the defaults of a copied optimizer an option "differentiable", which groups may lack.
        options = [name for name in defaults[i] if name in own]
        if missing := sorted({"params", *options} - set(group.values)):
            raise ValueError(f"{group.name} must be a group of this optimizer, missing {missing}")
        group.equal("params", own["params"])
        for name in options:
            check_like(group.path(name), group[name], own[name], 0.0)
        for key in unknown.intersection(own["params"]):
            # Before its first step a parameter has no moments of its own to compare with.
            if len(entry := moments.mapping(key)):
                like = live["state"].get(key) or entry.values
                read(entry.name, entry.values, set(like), "this optimizer")
                for name, value in entry.values.items():
                    low = 0.0 if name in _NOT_NEGATIVE else -math.inf
                    check_like(entry.path(name), value, like[name], low)
        unknown -= set(own["params"])
    if unknown:
        raise ValueError(f"{moments.path(min(unknown, key=repr))} must belong to one of the parameters of the body")


def check_like(name: str, value: Any, own: Any, low: float) -> None:
    """Check that an option, moment or counter has type and shape of this optimizer's own, and is at least `low`."""
    if isinstance(value, Tensor) and (own is None or isinstance(own, Tensor)):
        like = value if own is None else own
        check_array(name, value, tuple(like.shape), like.dtype, low=low)
        return
    value, own = (one.item() if isinstance(one, Tensor) and one.numel() == 1 else one for one in (value, own))
    if isinstance(own, (tuple, list)):
        fits = isinstance(value, (tuple, list)) and len(value) == len(own)
        for i, (part, mine) in enumerate(zip(value, own, strict=True) if fits else ()):
            check_like(f"{name}[{i}]", part, mine, low)
    elif is_number(value) and (own is None or is_number(own)):
        fits = abs(value) < 2**63 and (value >= low or (own or 0) < 0)
    else:
        unset = own is None and isinstance(value, bool)  # torch chooses where such an option is None
        fits = unset or type(value) is type(own) or (value is None and name.endswith("['momentum_buffer']"))
    if not fits:
        raise damaged(name, f"one such as {brief(own)}", brief(value))
