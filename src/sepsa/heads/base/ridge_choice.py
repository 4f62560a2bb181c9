"""How a classifying head with `ridge="auto"` chooses its ridge: a few candidates learn beside the active one.

While a comparison runs, every candidate is a complete state with a ridge of its own and learns each batch. Its loss at
a batch is taken before it learns the batch. When the comparison ends, the candidate with the smallest recent loss goes
on alone, so that updates cost as much as with a fixed ridge; later comparisons are short and try its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from sepsa.heads.math.cross_entropy import CrossEntropyState, with_ridge
from sepsa.states.schema import Entries

# Ridges of the first comparison, relative to the squared size of the first features, and the one that is active first.
GRID = (0.01, 0.3, 10.0, 300.0, 1e4)
START = 10.0
NEIGHBOUR = 5.0  # the factor between the candidates of later comparisons
LEAST, MOST = 1e-4, 1e6  # relative ridges beyond which no candidate goes
# The first comparison has this many updates and samples at least, later ones `LATER` updates, at 64, 128, 256, ...
FIRST, FIRST_SAMPLES, LATER, AGAIN = 32, 512, 8, 64
FADING = 0.98  # of the sums of losses, in each update
MARGIN = 1e-3  # the share by which a candidate's loss must be smaller than that of the active one
OUTLIER = 4.0  # a loss counts as at most this multiple of the smallest at the same batch
_HISTORY_LIMIT = 1000
RESTS, SETTLED = -1, -2  # no comparison runs; none will run any more
LARGEST = 1e300  # the loss of a candidate that is not finite
LEAST_SAVED = 1e-100  # a ridge in a saved state


class RidgeChoice(NamedTuple):
    """The candidates and their losses; an update makes a new one. The state of the active candidate is the head's."""

    scale: float = 0.0  # of the ridges; 0 before the first update
    started: int = RESTS  # the update before which the running comparison started, or `RESTS` or `SETTLED`
    ridges: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()  # sums that fade
    others: tuple[CrossEntropyState | None, ...] = ()  # None in the place of the active candidate
    active: int = 0
    history: tuple[tuple[int, float], ...] = ()  # (update, ridge)


Advance = Callable[[CrossEntropyState, Tensor], tuple[CrossEntropyState, bool]]


def learned(
    choice: RidgeChoice,
    state: CrossEntropyState,
    ridge: float,
    updates: int,
    W: Tensor,
    advance: Advance,
    loss: Callable[[Tensor], float],
    ridges_of: Callable[[float], Tensor],
    scale: Callable[[], float],
) -> tuple[CrossEntropyState, float, RidgeChoice, bool]:
    """Let all candidates learn from the head's weights W: the new active state, its ridge, the choice, if finite.

    `updates` is the number of those before, `advance` learns the batch from a state and its weights, `loss` is the loss
    of weights at the batch, `ridges_of` the vector of a ridge, `scale` the squared size of the features.
    """
    if is_due(updates, choice):
        choice, state = started(choice, state, ridge, updates, ridges_of, scale)
    if choice.started < 0:
        new, finite = advance(state, W)
        return new, ridge, choice, finite
    ridge = choice.ridges[choice.active]
    moved = W - state.W
    before = [(state, W) if other is None else (other, other.W + moved) for other in choice.others]
    losses = [loss(weights) for _, weights in before]
    after = [advance(*pair) for pair in before]
    if not after[choice.active][1]:
        return after[choice.active][0], ridge, choice, False
    limit = OUTLIER * min((value for value in losses if value == value), default=math.inf)
    sums = [
        FADING * old + min(value, limit) if finite and value == value else LARGEST
        for old, value, (_, finite) in zip(choice.losses, losses, after, strict=True)
    ]
    best = min(range(len(sums)), key=sums.__getitem__)
    active = best if sums[best] < (1 - MARGIN) * sums[choice.active] else choice.active
    choice = choice._replace(losses=tuple(sums), active=active)
    if choice.ridges[active] != ridge:
        ridge = choice.ridges[active]
        choice = choice._replace(history=(*choice.history, (updates + 1, ridge))[-_HISTORY_LIMIT:])
    learned_state = after[active][0]
    if is_over(updates + 1, float(learned_state.counters.reshape(-1, 3)[:, 1].max()), choice):
        return learned_state, ridge, rested(choice, RESTS), True
    kept = [new if finite else old for (new, finite), (old, _) in zip(after, before, strict=True)]
    others = tuple(None if k == active else other for k, other in enumerate(kept))
    return learned_state, ridge, choice._replace(others=others), True


def is_due(updates: int, choice: RidgeChoice) -> bool:
    """Whether a comparison starts before this update: the first of all, then at 64, 128, 256, ... updates."""
    return choice.started == RESTS and (not choice.scale or (updates >= AGAIN and updates & (updates - 1) == 0))


def is_over(updates: int, samples: float, choice: RidgeChoice) -> bool:
    """Whether the comparison ends after this update."""
    if choice.started:
        return updates - choice.started >= LATER
    return updates >= FIRST and samples >= FIRST_SAMPLES


def started(
    choice: RidgeChoice,
    state: CrossEntropyState,
    ridge: float,
    updates: int,
    ridges_of: Callable[[float], Tensor],
    scale: Callable[[], float],
) -> tuple[RidgeChoice, CrossEntropyState]:
    """A comparison of the grid where there was none, else of the ridge and its neighbours; and the active state."""
    if not choice.scale:
        size = scale()
        if not 0 < size < math.inf:
            return choice, state  # the update refuses this batch, or it is all zeros
        first = with_ridge(state, ridges_of(START * size))
        assert first is not None  # a diagonal curvature
        choice, state, ridge = choice._replace(scale=size, history=((0, START * size),)), first, START * size
        wanted = [relative * size for relative in GRID if relative != START]
    else:
        wanted = [r for r in (ridge / NEIGHBOUR, ridge * NEIGHBOUR) if LEAST <= r / choice.scale <= MOST]
    found = [(ridge, None), *((r, with_ridge(state, ridges_of(r))) for r in wanted)]
    ridges, others = zip(*(pair for k, pair in enumerate(found) if k == 0 or pair[1] is not None), strict=True)
    return choice._replace(started=updates, ridges=ridges, losses=(0.0,) * len(ridges), others=others, active=0), state


def rested(choice: RidgeChoice, started: int) -> RidgeChoice:
    """The choice without candidates: `RESTS` until the next comparison, or `SETTLED`."""
    return choice._replace(started=started, ridges=(), losses=(), others=(), active=0)


def settled(choice: RidgeChoice, ridge: float, updates: int) -> RidgeChoice:
    """The choice after this ridge was given, with which the head goes on."""
    return rested(choice, SETTLED)._replace(history=(*choice.history, (updates, ridge))[-_HISTORY_LIMIT:])


def mapped(choice: RidgeChoice, function: Callable[[CrossEntropyState], CrossEntropyState]) -> RidgeChoice:
    """The choice with the function of every candidate's state."""
    return choice._replace(others=tuple(other and function(other) for other in choice.others))


def written(choice: RidgeChoice, tensors_of: Callable[[CrossEntropyState], dict[str, Tensor]]) -> dict[str, Any]:
    """The choice as a saved state has it."""
    return {
        "scale": choice.scale,
        "started": choice.started,
        "active": choice.active,
        "ridges": list(choice.ridges),
        "losses": list(choice.losses),
        "others": [None if other is None else tensors_of(other) for other in choice.others],
        "history": [list(entry) for entry in choice.history],
    }


def read(
    saved: Entries, keys: Sequence[str], ridge: float, state_of: Callable[[Entries, float], CrossEntropyState]
) -> RidgeChoice:
    """The entry "choice" of a saved state whose active candidate has this ridge; a damaged one is refused."""
    entry = saved.entries("choice", set(RidgeChoice._fields))
    scale = entry.number("scale", low=0.0)
    ridges = tuple(entry.items("ridges").numbers(low=LEAST_SAVED))
    count = len(ridges)
    losses = tuple(entry.items("losses", count).numbers(low=0.0))
    started = entry.integer("started", low=SETTLED)
    if (started < 0) != (not ridges):
        raise entry.damaged("started", "negative while no candidates are compared, else an update", started)
    active = entry.integer("active", high=max(count - 1, 0))
    items = entry.items("others", count)
    others: list[CrossEntropyState | None] = []
    for k, value in enumerate(ridges):
        if k == active and (items[k] is not None or value != ridge):
            raise items.damaged(k, f"None, in the place of the candidate with the ridge {ridge:g}", "another")
        others.append(None if k == active else state_of(items.entries(k, set(keys)), value))
    history = entry.items("history")
    pairs = [history.items(k, 2) for k in range(len(history))]
    changes = tuple((pair.integer(0), pair.number(1, low=LEAST_SAVED)) for pair in pairs)
    return RidgeChoice(scale, started, ridges, losses, tuple(others), active, changes)
