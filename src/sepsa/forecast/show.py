"""The plot of a series and its forecasts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import TYPE_CHECKING, Any

import numpy as np

from sepsa.learner.memory.parts import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOUR = "#1f5fbf"


def draw(
    ax: Axes | None, name: str, when: list[Any], past: Floats, made: Floats, bands: Sequence[Sequence[Floats]]
) -> Axes:
    """Draw the last values of a series and, from the last of them on, its forecasts and bands; returns the axes."""
    import matplotlib.pyplot as plt
    from matplotlib import dates

    ax = ax or plt.subplots(figsize=(8, 3), layout="constrained")[1]
    now = len(past) - 1
    ax.plot(when[: now + 1], past, color="black", lw=1)
    for low, high in bands:
        low, high = np.concatenate([past[-1:], low]), np.concatenate([past[-1:], high])
        ax.fill_between(when[now:], low, high, color=COLOUR, alpha=0.2, lw=0)
    ax.plot(when[now:], np.concatenate([past[-1:], made]), color=COLOUR)
    if isinstance(when[0], (date, np.datetime64)):
        locator = dates.AutoDateLocator(maxticks=8)  # type: ignore[no-untyped-call]
        ax.xaxis.set_major_locator(locator)
        ax.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]
    ax.set(title=name)
    return ax
