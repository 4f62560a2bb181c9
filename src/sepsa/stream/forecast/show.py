"""A forecaster for the eye: the plot of a series, and the table that a notebook shows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from sepsa.stream.kernels.parts import Floats

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


def html(title: str, rows: Sequence[tuple[Any, ...]]) -> str:
    """A title and, if there are rows, a table of step, time, series, forecast and the ends of the 90 % interval."""

    def line(cells: Sequence[Any], tag: str) -> str:
        shown = (f"{cell:.6g}" if isinstance(cell, float) else escape(str(cell)) for cell in cells)
        return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in shown) + "</tr>"

    head = line(("step", "time", "series", "forecast", "5 %", "95 %"), "th")
    table = f"<table>{head}{''.join(line(row, 'td') for row in rows)}</table>" if rows else ""
    return f"<pre>{escape(title)}</pre>{table}"
