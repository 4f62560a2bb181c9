"""What a forecaster stores: the table of its parts, and what a call of its kernels gets.

A series has a head for each forgetting factor. Rings have the last `horizon` rows: row t is at t modulo the horizon.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np

from sepsa.learner.memory.parts import Bounds, Part, Record, Sizes, work
from sepsa.learner.memory.views import Frame, Group
from sepsa.restoration import due

LEVELS = (0.005, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.975, 0.995)  # of the quantiles of errors
SCORES = tuple(NormalDist().inv_cdf(level) for level in LEVELS)  # of normal errors
# An error moves a quantile as far as a rate of 0.02 moves its level, where errors are normal with mean size 1; those of
# the outermost levels, which few errors exceed, no farther than that of 0.05.
MOVES = tuple(0.02 * (math.pi / 2) ** 0.5 / NormalDist().pdf(min(abs(score), SCORES[-3])) for score in SCORES)
NEXT, UPDATES = range(2)  # in TURN: the coordinate that is restored next, and the number of updates
LEAD, LEAD_SQUARE, GAIN, GAIN_SQUARE, PRODUCT, CHANGE_SQUARE, ERROR_SQUARE = range(7)  # in KNOWN

SHARPNESS = 20.0  # the power of recent losses by which heads, and these and stacks, are weighed
CHOICE = 0.999  # discount of the errors of candidates
STACK_FORGETTING, INPUTS_FORGETTING = 0.9995, 0.9998  # of the stacks, and of the head on exogenous inputs
STACK_RIDGE = 30.0
TREND_ROWS = 12  # whose mean change is the drift of a series without seasons
TOLD = 2 + len(LEVELS)  # numbers of a forecast: itself, the quantiles of what comes, and how many errors these are from
# How many of these are wanted after each row: none, the forecast alone, or all. And how many rows of exogenous inputs
# are known, 0 where forecasts use no later ones; the errors are those of such forecasts.
CALL = Record(tell=int, ahead=int)
SIZES = "rows series exogenous horizon lags spans forgettings seasons longest recent angles features above gains"


def axes(shape: str) -> tuple[str | int, ...]:
    """A shape from the names of its sizes, or numbers, in one text."""
    return tuple(int(axis) if axis.isdigit() else axis for axis in shape.split())


def number(name: str, shape: str, start: Any = 0.0) -> Part:
    """A part of finite numbers."""
    return Part(name, float, axes(shape), start)


def whole(name: str, shape: str, bounds: Bounds = (None, None), start: int = 0) -> Part:
    """A part of integers, with the bounds of those that kernels use as indices."""
    return Part(name, np.int64, axes(shape), start, bounds)


def scratch(name: str, shape: str, dtype: Any = float) -> Part:
    """A part that lasts for one row."""
    return work(name, dtype, axes(shape))


given = Frame(
    "forecaster",
    tuple(SIZES.split()),
    Part("CALL", CALL),
    number("Y", "rows series"),
    number("E", "rows exogenous"),
    number("OUT", "rows series horizon"),  # forecasts made after each row, one below the other where more is told
)
size = given.size


def triangle(features: int) -> int:
    """The numbers above the diagonal."""
    return features * max(features - 1, 0) // 2


def most_gains(features: int, forgetting: float) -> int:
    """The gains of a row, at most: its own, and those of the coordinates whose ridge is restored after it."""
    return 1 + max(1, due(max(features, 1), forgetting))


def stacked(sizes: Sizes) -> int:
    """The inputs of a stack: a bias, the mean of the heads and four of each season; none without seasons."""
    return 2 + 4 * sizes["seasons"] if sizes["seasons"] else 0


def changed(sizes: Sizes) -> int:
    """The inputs that explain: changes of exogenous inputs over each season; without seasons these themselves."""
    return sizes["exogenous"] * max(sizes["seasons"], 1)


def head(features: str, above: str, shape: str = "") -> tuple[Part, ...]:
    """The covariance UDUᵀ of heads: what forgetting has left of their ridge, the turn of its restoration, U and D."""
    return (
        number("LEFT", f"{shape} {features}"),
        whole("TURN", f"{shape} 2"),
        number("U", f"{shape} {above}"),
        number("D", f"{shape} {features}"),
    )


# ---------------------------------------------------------------------- what follows from the options, and is not saved

fixed = Group(
    given,
    "fixed",
    whole("SPANS", "spans"),  # rows over which changes are inputs
    number("RIDGE", "features"),
    number("FORGETTING", "forgettings"),
    number("LIMITS", "2"),  # bounds of all series
    number("ANGLES", "angles"),  # of the seasons, in radians a row
    number("PERIODS", "seasons"),  # in rows
    number("STACK_RIDGE", "stacked", start=STACK_RIDGE),
    number("CHANGES_RIDGE", "changes"),
)
row = Group(
    given,
    "row",
    scratch("Z", "series"),  # the standardized values
    scratch("THERE", "series", np.bool_),  # whether they were observed
    scratch("INPUTS", "exogenous"),  # standardized
)

# ---------------------------------------------------------------------- the state

heads = Group(
    given,
    "heads",
    *head("features", "above", "forgettings series"),
    number("W", "forgettings series horizon features"),
    number("LOSS", "forgettings series horizon"),  # recent squared errors
    number("X", "horizon series features"),  # rings of inputs, and of the gains of a row
    number("GAINS", "horizon forgettings series gains features"),
    # The first of the coordinates restored after each row, or -1.
    whole("FIRST", "horizon forgettings series", start=-1),
    scratch("UNIT", "features"),
    scratch("WEIGHTS", "forgettings"),
)
# For each series and step a head on the mean of the heads and on seasons, and how the candidates have fared.
stack = Group(
    given,
    "stack",
    number("PROFILE", "series seasons season_rows"),  # recent means of the rows of a season
    number("OFF", "horizon series seasons"),  # how far values were from it
    *head("stacked", "above_stacked", "series horizon"),
    number("W", "series horizon stacked"),
    number("HEADS", "horizon series horizon"),  # rings of forecasts: the mean of the heads, the stack,
    number("STACKED", "horizon series horizon"),  # the mean of both
    number("MIXED", "horizon series horizon"),
    number("TYPICAL", "series horizon"),  # squared errors of the naive forecast in use
    # Recent absolute errors in units of the root of that: of the last value and the last of each season, of the heads,
    # of the stack and of the forecast.
    number("MISSED", "candidates series horizon"),
    whole("LEADER", "series horizon", (0, "naive - 1")),  # the naive forecast in use
    # Recent means for each naive forecast, which are the last value and the last of each season, the same with a drift,
    # and exponential smoothing: how much smaller its errors are than the leader's, and its square; how much
    # smaller those of MIXED are, and its square; the product of its error and its distance from MIXED; both squares.
    number("KNOWN", "series horizon naive 7"),
    number("TREND", "series 2"),  # level and slope of exponential smoothing, and a ring of its forecasts
    number("SMOOTHED", "horizon series horizon"),
    scratch("X", "stacked"),
    scratch("GAINS", "stacked_gains stacked"),
    scratch("UNIT", "stacked"),
    scratch("NAIVE", "naive"),
    scratch("WEIGHTS", "2"),
    sizes={
        "stacked": stacked,
        "above_stacked": lambda sizes: triangle(stacked(sizes)),
        "stacked_gains": lambda sizes: most_gains(stacked(sizes), STACK_FORGETTING),
        "season_rows": lambda sizes: sizes["longest"] + 1,
        "naive": lambda sizes: 2 * (sizes["seasons"] + 1) + 1,
        "candidates": lambda sizes: sizes["seasons"] + 4,
    },
)
# What exogenous inputs explain: the moments of these, and heads on their changes over each season.
exogenous = Group(
    given,
    "exogenous",
    number("MEAN", "exogenous"),
    number("VARIANCE", "exogenous"),
    number("RING", "kept_inputs exogenous"),  # the last inputs, row t at t modulo their number
    number("SQUARES", "changes"),  # means of those of the changes
    *head("changes", "above_changes"),
    number("W", "series changing_steps changes"),  # of each step, and of the change over the first season
    number("LOSS", "series horizon ways"),  # recent absolute errors of each way
    scratch("CHANGES", "changes"),
    scratch("WAYS", "ways"),
    scratch("WEIGHTS", "ways"),
    scratch("GAINS", "changes_gains changes"),
    scratch("UNIT", "changes"),
    sizes={
        "changes": changed,
        "above_changes": lambda sizes: triangle(changed(sizes)),
        "changes_gains": lambda sizes: most_gains(changed(sizes), INPUTS_FORGETTING),
        "kept_inputs": lambda sizes: sizes["longest"] + 2,
        "changing_steps": lambda sizes: sizes["horizon"] + 1,
        "ways": lambda sizes: 2 + (sizes["seasons"] > 0) if sizes["exogenous"] else 0,
    },
)
COUNTS = Record(
    rows=int,
    outliers=int,  # values that were implausible
    phase=int,  # the place in the seasons: rows, and those that were skipped
)


shared = Group(
    given,
    "shared",
    number("MEAN", "series"),
    number("SCALE", "series", start=1.0),
    number("REACH", "series"),  # the size of errors of step 1
    Part("COUNTS", COUNTS),
    number("LAGS", "series twice"),  # values twice, so that the last ones are contiguous
    number("MADE", "horizon series horizon"),  # rings of forecasts, and of the quantiles of their errors
    number("ENDS", f"horizon kinds {len(LEVELS)} series horizon"),
    whole("BEGAN", "series", start=-1),  # the row of the first value, or -1
    whole("JUDGED", "series horizon"),  # numbers of errors
    # Of errors without and, where there are exogenous inputs, with what they explain: recent absolute errors, and
    # quantiles in units of these.
    number("SIZE", "kinds series horizon"),
    number("QUANTILES", f"kinds {len(LEVELS)} series horizon"),
    number("BY_PHASE", "series phases", start=1.0),  # these sizes at each place of the first season over all
    number("EXTENT", "2 series"),  # the least and the largest value observed
    # How many values in a row were implausible, and how much oftener the next value confirmed such a one than not.
    whole("ODD", "2 series"),
    number("STRANGE", "series"),  # the last implausible value
    number("EVENT", "series phases"),  # how far it was off, at each place of the first season
    sizes={
        "twice": lambda sizes: 2 * sizes["recent"],
        "kinds": lambda sizes: 1 + (sizes["exogenous"] > 0),
        "phases": lambda sizes: sizes["longest"] + 1,
    },
)
GROUPS = (fixed, row, heads, stack, exogenous, shared)
