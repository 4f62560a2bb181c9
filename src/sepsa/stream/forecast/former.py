"""Saved states of a forecaster's model by earlier versions, in the form of this one."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import numpy as np

from sepsa.stream.forecast.kernels.parts import FIRST_VARIANCE, LEAD_SQUARE, first_odds
from sepsa.stream.kernels.parts import Sizes


def in_form(state: Any, groups: Set[str], sizes: Sizes) -> Any:
    """A saved state with the parts of a model of these sizes; a damaged one stays as it is, and is refused by name."""
    try:
        if set(state) == groups - {"exogenous"}:
            state = with_group(state)
        if state["shared"]["QUANTILES"].ndim == 3:
            state = with_kinds(state, sizes["kinds"])
        if "SMOOTH" in state["stack"]:
            state = with_rates(state, sizes)
        elif "TREND" not in state["stack"]:
            state = with_smoothing(state, sizes)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        pass
    return state


def with_group(state: Any) -> Any:
    """A state from before the head on exogenous inputs was a group, with today's names of parts."""
    names = {"K": "GAIN", "R": "RESTORED", "C": "FIRST"}
    moved = {"drift": "MEAN", "spread2": "VARIANCE", "XU": "U", "XD": "D", "XW": "W", "XT": "TURN", "XK": "LEFT"}
    new = {
        group: {names.get(name, name.upper()): value for name, value in own.items() if name not in moved}
        for group, own in state.items()
    }
    new["exogenous"] = {name: state["shared"][old] for old, name in moved.items() if old in state["shared"]}
    gain_left_ridge = new["exogenous"].get("LEFT")
    if isinstance(gain_left_ridge, np.ndarray) and gain_left_ridge.ndim == 2 and len(gain_left_ridge) == 3:
        new["exogenous"]["LEFT"] = gain_left_ridge[1]
    return new


def with_kinds(state: Any, kinds: int) -> Any:
    """A state from before errors without and with exogenous inputs were apart: both have those that it has."""
    axes = {"QUANTILES": 0, "SIZE": 0, "TOLD_ENDS": 0, "ENDS": 1}
    own = state["shared"]
    return {**state, "shared": {**own, **{name: np.stack([own[name]] * kinds, axis) for name, axis in axes.items()}}}


def with_smoothing(state: Any, sizes: Sizes) -> Any:
    """A state from before exponential smoothing, perhaps with other naive forecasts: none leads that in use."""
    own, shared, bases = state["stack"], state["shared"], sizes["seasons"] + 1
    known, missed, base = own["KNOWN"], own["MISSED"], shared["BASE"]
    new = np.zeros((sizes["naive"] - bases, *known.shape[1:]))
    new[..., LEAD_SQUARE] = 4.0
    lags, last = ring(shared, sizes["recent"]), base[(int(shared["COUNTS"][0]) - 1) % len(base)]
    trend = np.stack([last, np.zeros(len(last))], 1)
    stack = {
        "KNOWN": np.moveaxis(np.concatenate([known[:bases], new]), 0, 2),
        "MISSED": np.concatenate([missed[:bases], missed[-3:]]),
        "LEADER": own["LEADER"] % bases,
        **smoothing(trend, trend, np.zeros((len(last), 0)), sizes),
        "SMOOTHED": np.tile(base[:, :, None, None], (1, 1, len(base), sizes["smoothers"])),
    }
    return {**state, "stack": {**own, **stack}, "shared": {**shared, "LAGS": lags}}


def with_rates(state: Any, sizes: Sizes) -> Any:
    """A state whose smoothing with a season had fixed rates: these are the first ones."""
    own = dict(state["stack"])
    levels, index = own.pop("SMOOTH"), own.pop("INDEX")
    return {**state, "stack": own | smoothing(levels[:, 0], levels[:, -1], index, sizes)}


def smoothing(trend: Any, season: Any, index: Any, sizes: Sizes) -> dict[str, Any]:
    """The parts of exponential smoothing by levels and slopes (series, 2) without and with a season, and its index."""
    series, rates = len(trend), sizes["rates"]
    state = np.zeros((series, sizes["smoothed_season"], 4))
    state[:, :2, 0] = season[:, : 2 * (rates > 0)]
    state[:, 2 : 2 + index.shape[1], 0] = index[:, : max(state.shape[1] - 2, 0)]
    return {
        "TREND": trend,
        "SEASON": state,
        "ODDS": np.tile(first_odds(sizes), (series, 1)),
        "ODDS_U": np.zeros((series, rates)),
        "ODDS_D": np.full((series, rates), FIRST_VARIANCE),
        "VARIANCE": np.zeros(series),
    }


def ring(shared: Mapping[str, Any], n: int) -> Any:
    """The last values in a ring of n rows; before those of a shorter ring there is its oldest value."""
    lags, rows = shared["LAGS"], int(shared["COUNTS"][0])
    before = lags.shape[1] // 2
    kept = np.arange(max(rows - before, 0), rows)
    values = np.repeat(lags[:, kept[:1] % before], n, axis=1)
    values[:, kept[-n:] % n] = lags[:, kept[-n:] % before]
    return np.tile(values, 2)
