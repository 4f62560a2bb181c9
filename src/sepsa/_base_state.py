"""The border for saved states of a base optimizer and of SepSA: every entry is checked before anything is changed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sepsa.validation import in_range

# Entries of torch's own optimizers and of STORM that have the parameter's shape, and those that are squares.
_LIKE_PARAMETER = {
    "acc_delta", "ax", "estimate", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq", "momentum_buffer",
    "prev", "previous", "square_avg", "sum",
}  # fmt: skip
_NOT_NEGATIVE = {"acc_delta", "exp_avg_sq", "exp_inf", "max_exp_avg_sq", "square_avg", "step", "sum"}
# Where one of these is, the others must be.
_TOGETHER = ({"step", "exp_avg", "exp_avg_sq"}, {"step", "square_avg"}, {"estimate", "previous"})


def check_own_state(own: object, body: list[list[list[int]]]) -> None:
    """Refuse what is not SepSA's own part of a state: fraction, generator, the body's shapes and the heads."""
    if not isinstance(own, dict) or not {"head_fraction", "generator", "body"} <= set(own):
        raise ValueError(
            f"state_dict['sepsa'] must hold head_fraction, generator, body and the head, got {_brief(own)}"
        )
    if not isinstance(own.get("head", own.get("heads")), dict):
        raise ValueError(f"state_dict['sepsa'] must hold the state of the head, got {_brief(own.get('head'))}")
    in_range("state_dict['sepsa']['head_fraction']", own["head_fraction"], 0.0, 1.0)
    generator = own["generator"]
    if not isinstance(generator, Tensor) or generator.dtype != torch.uint8:
        raise ValueError(f"state_dict['sepsa']['generator'] must be a tensor of bytes, got {_brief(generator)}")
    try:
        torch.Generator().set_state(generator.cpu())
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"state_dict['sepsa']['generator'] must be the state of a generator: {error}") from None
    if not _same_shapes(own["body"], body):
        raise ValueError(f"state_dict belongs to a body with parameter shapes {own['body']}, this one has {body}")


def _same_shapes(given: Any, body: Any) -> bool:
    if isinstance(body, int):
        return type(given) is int and given == body
    return (
        isinstance(given, (list, tuple))
        and len(given) == len(body)
        and all(_same_shapes(a, b) for a, b in zip(given, body, strict=True))
    )


def check_base_state(state_dict: dict[str, Any], base: Optimizer) -> None:
    """Refuse what is not a state of this base optimizer: groups, options, moments and counters."""
    live = base.state_dict()
    if set(state_dict) != set(live):
        raise ValueError(f"state_dict must hold {sorted(live)} and 'sepsa', got {sorted(map(str, state_dict))}")
    groups = state_dict["param_groups"]
    if not isinstance(groups, list) or len(groups) != len(live["param_groups"]):
        raise ValueError(f"state_dict['param_groups'] must be {len(live['param_groups'])} groups, got {_brief(groups)}")
    for i, (group, own) in enumerate(zip(groups, live["param_groups"], strict=True)):
        _check_group(f"state_dict['param_groups'][{i}]", group, own, base.defaults)
    if not isinstance(state_dict["state"], dict):
        raise ValueError(f"state_dict['state'] must be a dict, got {_brief(state_dict['state'])}")
    places = [key for group in live["param_groups"] for key in group["params"]]
    parameters = dict(zip(places, (p for group in base.param_groups for p in group["params"]), strict=True))
    for key, entries in state_dict["state"].items():
        entry = f"state_dict['state'][{key!r}]"
        if type(key) is not int or key not in parameters:
            raise ValueError(f"{entry} must belong to one of the {len(parameters)} parameters of the body")
        if not isinstance(entries, dict):
            raise ValueError(f"{entry} must be a dict, got {_brief(entries)}")
        if entries:
            _check_entries(entry, entries, parameters[key], live["state"].get(key))


def _check_group(entry: str, group: object, own: dict[str, Any], defaults: dict[str, Any]) -> None:
    if not isinstance(group, dict) or not {"params", *defaults} <= set(group):
        missing = sorted({"params", *defaults} - set(group)) if isinstance(group, dict) else _brief(group)
        raise ValueError(f"{entry} must be a group of this optimizer, missing {missing}")
    if not isinstance(group["params"], list) or any(
        type(a) is not int or a != b for a, b in zip(group["params"], own["params"], strict=False)
    ) or len(group["params"]) != len(own["params"]):  # fmt: skip
        raise ValueError(f"{entry}['params'] must be {own['params']}, got {_brief(group['params'])}")
    for name, default in defaults.items():
        _check_option(f"{entry}[{name!r}]", group[name], default)


def _check_option(entry: str, value: Any, default: Any) -> None:
    """An option of the kind that its default is."""
    if isinstance(default, bool):
        fits = isinstance(value, bool)
    elif default is None:
        fits = value is None or (isinstance(value, (bool, int, float)) and value == value and not _negative(value))
    elif isinstance(default, (tuple, list)):
        fits = isinstance(value, (tuple, list)) and len(value) == len(default)
        for i, (part, own) in enumerate(zip(value, default, strict=True) if fits else ()):
            _check_option(f"{entry}[{i}]", part, own)
    elif isinstance(default, (int, float)):
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        fits = isinstance(number, (int, float)) and not isinstance(number, bool) and abs(number) < 2**63
        fits = fits and not (_negative(number) and not _negative(default))
    else:
        fits = type(value) is type(default)
    if not fits:
        raise ValueError(
            f"{entry} must be an option such as {default!r}, got {_brief(value)}: the checkpoint is damaged"
        )


def _check_entries(entry: str, entries: dict[Any, Any], parameter: Tensor, live: dict[str, Any] | None) -> None:
    """Moments and counters of one parameter."""
    for names in _TOGETHER:
        if names & set(entries) and not names <= set(entries) and (names & set(entries)) != {"step"}:
            raise ValueError(f"{entry} must hold {sorted(names)} together, got {sorted(map(str, entries))}")
    if live and set(live) != set(entries):
        raise ValueError(f"{entry} must hold {sorted(live)}, got {sorted(map(str, entries))}")
    for name, value in entries.items():
        where = f"{entry}[{name!r}]"
        if isinstance(value, Tensor):
            like = name in _LIKE_PARAMETER
            shape = parameter.shape if like else () if name == "step" else value.shape
            if (
                value.shape != shape
                or (like and value.dtype != parameter.dtype)
                or (name == "step" and not value.is_floating_point())
            ):
                raise ValueError(
                    f"{where} must be {parameter.dtype} {tuple(shape)}, got {value.dtype} {tuple(value.shape)}"
                )
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise ValueError(f"{where} must be finite, got NaN or Inf: the checkpoint is damaged")
            if name in _NOT_NEGATIVE and bool((value < 0).any()):
                raise ValueError(f"{where} must not be negative, got {value.min().item():g}: the checkpoint is damaged")
        elif name in _LIKE_PARAMETER and not (name == "momentum_buffer" and value is None):
            raise ValueError(f"{where} must be a tensor of shape {tuple(parameter.shape)}, got {_brief(value)}")
        elif name == "step":
            fits = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 2**63
            if not fits or value != int(value):
                raise ValueError(f"{where} must be a number of steps, got {_brief(value)}")


def _negative(value: Any) -> bool:
    return isinstance(value, (int, float)) and (value < 0 or math.isinf(value))


def _brief(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} {tuple(value.shape)}"
    if isinstance(value, dict):
        return f"a dict of {sorted(map(str, value))[:8]}"
    return repr(value)[:100]
