"""Saved states of the experts of earlier versions in the form of today."""

from __future__ import annotations

from typing import Any

import numpy as np

from sepsa.stream.engine.kernels.views import Parts, PartsOf
from sepsa.stream.experts import neighbours, products, trees

DEPTH = 5  # of the complete trees that were grown on the window of the neighbours


def upgraded(states: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """States in which the trees are those of today, and the window has today's number of rows."""
    if "NODES" in states.get("trees", {}):
        states = states | {"trees": of_complete_trees(states["trees"], states["neighbours"])}
    if "W" in states.get("products", {}) and "PAIRS" not in states["products"]:
        features = states["products"]["W"].shape[1]
        paired = np.arange(min(len(states["neighbours"]["ROWS"]), products.PAIRED))
        states = states | {"products": states["products"] | {"PAIRS": paired, "LOG_W": np.zeros(features)}}
    old = states.get("neighbours", {})
    if "ROWS" in old and old["ROWS"].shape[1] < neighbours.window_rows(len(old["ROWS"]), 1):
        states = states | {"neighbours": in_longer_window(old)}
    return states


def in_order(window: dict[str, Any]) -> Any:
    """The places of the rows of a window, from the oldest on."""
    rows, following = window["FILLED"].tolist()
    return (following - rows + np.arange(rows)) % len(window["WEIGHTS"])


def in_longer_window(old: dict[str, Any]) -> dict[str, Any]:
    """The rows of a window in one of today's length; it was shorter where there were more than 16 inputs."""
    order, length = in_order(old), neighbours.window_rows(len(old["ROWS"]), 1)
    new = dict(old, FILLED=np.array([len(order), len(order) % length]))
    for name, axis in (("ROWS", 1), ("TARGETS", 0), ("WEIGHTS", 0)):
        kept = np.take(old[name], order, axis)
        lengths = [(0, length - len(order) if a == axis else 0) for a in range(kept.ndim)]
        new[name] = np.pad(kept, lengths)
    return new


def of_complete_trees(old: dict[str, Any], window: dict[str, Any]) -> dict[str, Any]:
    """The trees, with the rows of the window as those on which the next trees grow."""
    order, (count, leaves, m) = in_order(window), old["VALUES"].shape
    count, rows, d = count - 1, len(order), len(window["ROWS"])
    room = trees.room_for(rows, d, trees.MOST_ROWS)
    parts: Parts = trees.PARTS
    sizes: dict[Any, Any] = {"inputs": d, "room": room, "trees": trees.TREES, "tree_slots": trees.TREES + 1}
    sizes |= {name: size(d, m) for name, size in trees.GROUP.sizes.items()}
    new = {
        name: np.zeros([n if isinstance(n, int) else sizes[n] for n in shape], dtype)
        for name, (dtype, shape) in parts.items()
    }
    trees.EXPERT.start(PartsOf(d, m, new), 0, 0)
    below = 2 * np.arange(leaves - 1)[:, None] + [1, 2]
    new["CHILDREN"][:count] = np.where(below < leaves - 1, below, leaves - 2 - below)
    for name in ("SPLIT_INPUTS", "SPLIT_THRESHOLDS"):
        new[name][:count] = old[name][:count]
    new["VALUES"][:count, :, :m] = old["VALUES"][:count]
    new["TARGETS"][:rows, :m], new["SUMS"][:rows, :m] = window["TARGETS"][order], old["SUMS"][order]
    new["WEIGHTS"][:rows], new["LEAF_OF_ROW"][:count, :rows] = window["WEIGHTS"][order], old["LEAF_OF_ROW"][:, order]
    X = window["ROWS"][:, order]
    new["LATEST"][:, np.arange(rows) % trees.SAMPLE] = X
    for edges, codes, column in zip(new["EDGES"], new["CODES"], X, strict=True):
        values = np.unique(column)
        if len(values) > len(edges):
            values = np.unique(np.quantile(column, np.arange(1, 1 + len(edges)) / len(edges), method="nearest"))
        edges[: len(values)] = values
        codes[:rows] = 1 + np.searchsorted(edges, column)
    new["STORED"][:], new["DRAWN"][:] = (rows, rows, 0, rows), rows
    new["GROWTH"][trees.G_TREES], new["GROWTH"][trees.G_RANDOM] = count, old["GROWTH"][3]
    return new
