"""A small ensemble of trees, of which one at a time is grown anew on the window, a bounded number of visits per row.

The prediction is the sum of the trees, F(x) = Σ_t f_t(x). Tree t is grown on what the others leave, r = y - F + f_t
(backfitting), on some inputs, with candidate thresholds drawn from the window. A level of the tree is one pass over the
window that adds each row to the histograms of its node; after it every node takes the split of the largest gain

    S_l²/(n_l + λ) + S_r²/(n_r + λ) - S²/(n + λ),      S = Σ r·direction over the rows of a node, λ = `SHRINK`,

where r has several outputs, along a random direction. A last pass collects the values of the leaves, `RATE` Σr/(n + λ).
A cell of a histogram is one integer, so that a row is added to it in one operation: the sum of weights in its upper
bits, and that of weighted residuals, in units of a fraction of the largest, in the lower ones.
"""

from __future__ import annotations

import numpy as np

from sepsa.stream.engine.kernels.compilation import called, kernel
from sepsa.stream.engine.kernels.views import Group, Views, size
from sepsa.stream.experts.expert import Expert, row
from sepsa.stream.experts.neighbours import window

TREES = 20
DEPTH = 5
SPLITS, LEAVES = 2**DEPTH - 1, 2**DEPTH
BINS = 16
INPUTS = 12  # at most, of a tree
RATE = 0.3
SHRINK = 2.0
LEAST = 4.0  # rows on either side of a split
VISITS = 160  # of window rows, for each row learned
LATE = 255  # in place of a node, for a row of the window that the tree in growth does not see
NOWHERE = 2.0**99  # threshold of a node without a split: all rows go to its left

# Loops over rows count by unsigned integers: numba looks whether a signed index is negative, which would take longer
# than adding a row to a histogram.
UNSIGNED_BINS = np.uint64(BINS)
SUM_BITS = 40  # of a cell, for the sum of residuals; the others are for the weights
LARGEST_WEIGHT, LARGEST_RESIDUAL = 2.0**12, 2.0**28  # of a row; 1024 of them do not overflow

# Positions in the numbers of the growth: the tree, the level (-1: none has begun), the next row of the pass, the state
# of the random generator, and the units of weights and of residuals in the histograms.
G_TREE, G_LEVEL, G_CURSOR, G_RANDOM, G_WEIGHT, G_RESIDUAL = range(6)

PARTS = {
    "GROWTH": (float, (6,)),
    "CHOSEN": (np.int64, ("tree_inputs",)),
    "EDGES": (np.float32, ("tree_inputs", BINS - 1)),
    "DIRECTION": (float, ("outputs",)),
    "SPLIT_INPUTS": (np.uint32, (TREES + 1, SPLITS)),
    "SPLIT_THRESHOLDS": (np.float32, (TREES + 1, SPLITS)),
    "VALUES": (float, (TREES + 1, LEAVES, "outputs")),
    "CUTS": (np.uint8, (SPLITS,)),
    "LEAF_COUNTS": (float, (LEAVES,)),
    "HISTOGRAMS": (np.int64, (LEAVES // 2, "tree_inputs", BINS)),
    "SUMS": (np.float32, ("window", "outputs")),
    "PACKED": (np.int64, ("window",)),
    "NODES": (np.uint8, ("window",)),
    "LEAF_OF_ROW": (np.uint8, (TREES, "window")),
    "BINS": (np.uint8, ("tree_inputs", "window")),
}
WORK = {"LEAVES": (np.int64, (TREES,))}
GROUP = Group("trees", PARTS, WORK, {"tree_inputs": lambda d, m: min(d, INPUTS)})
parts, work = Views(GROUP, "state", PARTS), Views(GROUP, "workspace", WORK)


@called
def random(growth):
    """A number from [0, 1), by a linear congruential generator."""
    state = (int(growth[G_RANDOM]) * 1664525 + 1013904223) % 4294967296
    growth[G_RANDOM] = state
    return state / 4294967296.0


@called
def leaf(inputs, thresholds, t, X, i):
    """The leaf of row i of X (d, window) in tree t of those with splits (trees, SPLITS)."""
    node = 0
    for _ in range(DEPTH):
        node = 2 * node + (2 if X[inputs[t, node], i] > thresholds[t, node] else 1)
    return node - SPLITS


@called
def add_trees(inputs, thresholds, values, z, leaves, out):
    """out (m,) = Σ_t f_t(z), and the leaf (trees,) of z in each tree."""
    for k in range(out.size):
        out[k] = 0.0
    for t in range(leaves.size):
        node = 0
        for _ in range(DEPTH):
            node = 2 * node + (2 if z[inputs[t, node]] > thresholds[t, node] else 1)
        leaves[t] = node - SPLITS
        for k in range(out.size):
            out[k] += values[t, node - SPLITS, k]


@called
def draw(X, rows, growth, chosen, edges, direction):
    """Draw the inputs of the next tree, its candidate thresholds and the direction of its residuals."""
    d, m = X.shape[0], direction.size
    for f in range(chosen.size):  # of the inputs not drawn yet, the one at a random rank
        rank = int(random(growth) * (d - f))
        j = 0
        while True:
            drawn = False
            for g in range(f):
                drawn = drawn or chosen[g] == j
            if not drawn:
                if rank == 0:
                    break
                rank -= 1
            j += 1
        chosen[f] = j
    for f in range(chosen.size):
        row, column = edges[f], X[chosen[f]]
        for b in range(row.size):
            value, at = column[int(random(growth) * rows)], b
            while at > 0 and row[at - 1] > value:
                row[at] = row[at - 1]
                at -= 1
            row[at] = value
    for k in range(m):
        direction[k] = 1.0 if m == 1 else 2.0 * random(growth) - 1.0
    if m == 2:
        direction[0], direction[1] = 1.0, -1.0


@called
def pack(Y, F, weights, rows, growth, direction, values, leaves, packed):
    """packed (window,): the weight of each row and its weighted residual without tree t as one integer.

    values (LEAVES, m) and leaves (window,) are those of tree t.
    """
    residuals, largest, heaviest = packed.view(np.float64), 1e-300, 1e-300
    for i in range(rows):
        r = 0.0
        for k in range(direction.size):
            r += direction[k] * (Y[i, k] - F[i, k] + values[leaves[i], k])
        r *= weights[i]
        residuals[i] = r
        largest, heaviest = max(largest, abs(r)), max(heaviest, weights[i])
    growth[G_WEIGHT], growth[G_RESIDUAL] = heaviest / LARGEST_WEIGHT, largest / LARGEST_RESIDUAL
    per_weight, per_residual = LARGEST_WEIGHT / heaviest, LARGEST_RESIDUAL / largest
    for i in range(rows):
        packed[i] = (int(weights[i] * per_weight + 0.5) << SUM_BITS) + int(residuals[i] * per_residual)


@called
def sort_into_bins(X, rows, chosen, edges, bins):
    """bins (chosen, window): how many candidate thresholds of an input each row exceeds."""
    for f in range(chosen.size):
        column, row, limits = X[chosen[f]], bins[f], edges[f]
        for i in range(rows):
            value, place = column[i], 0
            for b in range(BINS - 1):
                place += value > limits[b]
            row[i] = place


@called
def descend(nodes, bins, cuts, first, stop):
    """Send rows on to the nodes of the next level; `cuts` (nodes,) are those of their level."""
    for i in range(first, stop):
        node = nodes[i]
        if node != LATE:
            cut = cuts[node]
            nodes[i] = 2 * node + (bins[cut // UNSIGNED_BINS, i] > cut % UNSIGNED_BINS)


@called
def count(nodes, bins, packed, cells, first, stop):
    """Add rows to the histograms of their nodes: cells (nodes · chosen · BINS,)."""
    width, step, flat = np.uint64(bins.shape[0]), np.uint64(bins.shape[1]), bins.reshape(bins.size)
    for i in range(first, stop):
        if nodes[i] != LATE:
            cell, at, value = nodes[i] * width * UNSIGNED_BINS, i, packed[i]
            for _ in range(width):
                cells[cell + flat[at]] += value
                cell += UNSIGNED_BINS
                at += step


@called
def collect(Y, F, weights, nodes, values, leaves, sums, counts, first, stop):
    """Add rows to the sums (LEAVES, m) and counts (LEAVES,) of the leaves of the tree in growth."""
    for i in range(first, stop):
        node = nodes[i]
        if node != LATE:
            counts[node] += weights[i]
            for k in range(Y.shape[1]):
                sums[node, k] += weights[i] * (Y[i, k] - F[i, k] + values[leaves[i], k])


@called
def best_splits(cells, level, growth, chosen, edges, inputs, thresholds, cuts):
    """Give every node of a level its best split, from histograms (nodes, chosen, BINS)."""
    unit, unit_sum = growth[G_WEIGHT], growth[G_RESIDUAL]
    for node in range(1 << level):
        at, n, total = (1 << level) - 1 + node, 0.0, 0.0
        inputs[at], thresholds[at], cuts[at] = 0, NOWHERE, BINS - 1
        packed = np.int64(0)
        for b in range(BINS):
            packed += cells[node, 0, b]
        lower = packed << (64 - SUM_BITS) >> (64 - SUM_BITS)
        n, total = unit * ((packed - lower) >> SUM_BITS), unit_sum * lower
        if n < 2.0 * LEAST:
            continue
        best = total * total / (n + SHRINK) + 1e-12
        for f in range(chosen.size):
            packed, row = np.int64(0), cells[node, f]
            for b in range(BINS - 1):
                packed += row[b]
                lower = packed << (64 - SUM_BITS) >> (64 - SUM_BITS)
                n_left, left = unit * ((packed - lower) >> SUM_BITS), unit_sum * lower
                right, a, c = total - left, n_left + SHRINK, n - n_left + SHRINK
                gain = left * left * c + right * right * a
                if gain > best * a * c and n_left >= LEAST and n - n_left >= LEAST:
                    best = gain / (a * c)
                    inputs[at], thresholds[at], cuts[at] = chosen[f], edges[f, b], BINS * f + b


@called
def finish(X, F, rows, t, inputs, thresholds, values, leaf_counts, nodes, leaves):
    """Replace tree t by the tree in growth, and F (window, m) by the sums of the new ensemble."""
    trees = values.shape[0] - 1
    for v in range(LEAVES):
        for k in range(F.shape[1]):
            values[trees, v, k] *= RATE / (leaf_counts[v] + SHRINK)
    for i in range(rows):
        after = int(nodes[i]) if nodes[i] != LATE else leaf(inputs, thresholds, trees, X, i)
        for k in range(F.shape[1]):
            F[i, k] += values[trees, after, k] - values[t, leaves[i], k]
        leaves[i] = after
    for node in range(SPLITS):  # loops, because assignments of arrays take long to compile
        inputs[t, node], thresholds[t, node] = inputs[trees, node], thresholds[trees, node]
    for v in range(LEAVES):
        for k in range(F.shape[1]):
            values[t, v, k] = values[trees, v, k]


@called
def grow(
    X, Y, F, weights, rows, growth, chosen, edges, direction, inputs, thresholds, values, cuts, leaf_counts, histograms,
    nodes, leaves, packed, bins,
):  # fmt: skip
    """Visit about `VISITS` rows of the window for the tree in growth, and put it in its place once it is complete.

    The last of `inputs`, `thresholds` and `values` is the tree in growth, `leaves` (trees, window) are those of rows in
    the other trees. `nodes` (window,) is `LATE` for a row that entered after the tree was begun.
    """
    trees, m, width = values.shape[0] - 1, direction.size, chosen.size
    left, cells = VISITS, histograms.reshape(histograms.size)
    while left > 0:
        level, cursor, t = int(growth[G_LEVEL]), int(growth[G_CURSOR]), int(growth[G_TREE])
        if level < 0:
            draw(X, rows, growth, chosen, edges, direction)
            pack(Y, F, weights, rows, growth, direction, values[t], leaves[t], packed)
            sort_into_bins(X, rows, chosen, edges, bins)
            for i in range(rows):
                nodes[i] = 0
            level = 0
        if cursor == 0:
            if level < DEPTH:
                for c in range((BINS * width) << level):
                    cells[c] = 0
            else:
                for v in range(LEAVES):
                    leaf_counts[v] = 0.0
                    for k in range(m):
                        values[trees, v, k] = 0.0
        stop = min(rows, cursor + left)
        left -= stop - cursor
        first, last = np.uint64(cursor), np.uint64(stop)
        if level > 0:
            descend(nodes, bins, cuts[(1 << (level - 1)) - 1 :], first, last)
        if level < DEPTH:
            count(nodes, bins, packed, cells, first, last)
        else:
            collect(Y, F, weights, nodes, values[t], leaves[t], values[trees], leaf_counts, first, last)
        growth[G_LEVEL], growth[G_CURSOR] = level, stop
        if stop == rows:
            growth[G_CURSOR] = 0.0
            growth[G_LEVEL] = level + 1.0
            if level < DEPTH:
                best_splits(histograms, level, growth, chosen, edges, inputs[trees], thresholds[trees], cuts)
            else:
                finish(X, F, rows, t, inputs, thresholds, values, leaf_counts, nodes, leaves[t])
                growth[G_LEVEL] = -1.0
                growth[G_TREE] = (t + 1) % trees


@kernel(cost=0.6)
def answer(model, e):
    add_trees(
        parts.SPLIT_INPUTS(model), parts.SPLIT_THRESHOLDS(model), parts.VALUES(model), row.Z(model),
        work.LEAVES(model), row.ANSWERS(model)[e],
    )  # fmt: skip
    return 0


@kernel(cost=4.0)
def learn(model, e):
    """Store the trees' sum and leaves for the row that came into the window, and go on with the tree in growth."""
    filled, n, told = window.FILLED(model), size.window(model), row.ANSWERS(model)[e]
    at, sums, leaf_of_row, leaves = (
        (filled[1] + n - 1) % n, parts.SUMS(model), parts.LEAF_OF_ROW(model), work.LEAVES(model)
    )  # fmt: skip
    for k in range(told.size):
        sums[at, k] = told[k]
    for t in range(TREES):
        leaf_of_row[t, at] = leaves[t]
    parts.NODES(model)[at] = LATE
    if filled[0] >= 2 * LEAST:
        grow(
            window.ROWS(model), window.TARGETS(model), sums, window.WEIGHTS(model), filled[0], parts.GROWTH(model),
            parts.CHOSEN(model), parts.EDGES(model), parts.DIRECTION(model), parts.SPLIT_INPUTS(model),
            parts.SPLIT_THRESHOLDS(model), parts.VALUES(model), parts.CUTS(model), parts.LEAF_COUNTS(model),
            parts.HISTOGRAMS(model), parts.NODES(model), leaf_of_row, parts.PACKED(model), parts.BINS(model),
        )  # fmt: skip
    return 0


def start(part, inputs, outputs):
    if not inputs:
        part("SPLIT_THRESHOLDS")[:] = NOWHERE
        part("GROWTH")[G_RANDOM] = 1.0
    part("NODES")[:] = LATE  # a tree in growth begins anew
    part("GROWTH")[[G_LEVEL, G_CURSOR]] = -1.0, 0.0


def wrong(part):
    chosen, window = part("BINS").shape
    limits = {
        "SPLIT_INPUTS": part.inputs - 1,
        "CHOSEN": part.inputs - 1,
        "CUTS": BINS * chosen - 1,
        "LEAF_OF_ROW": LEAVES - 1,
        "BINS": BINS - 1,
    }
    for name, most in limits.items():
        if part(name).min() < 0 or part(name).max() > most:
            return name, f"integers from 0 to {most}"
    growth, nodes = part("GROWTH"), part("NODES")
    steps, most = growth[: G_RANDOM + 1], [TREES - 1, DEPTH, window, 2**32 - 1]
    if (steps < [0, -1, 0, 0]).any() or (steps > most).any() or (steps != np.floor(steps)).any():
        return "GROWTH", f"integers up to {most}"
    level, cursor = int(growth[G_LEVEL]), growth[G_CURSOR]
    bits = np.where(np.arange(window) < cursor, level, max(level - 1, 0))
    if level >= 0 and ((nodes != LATE) & (nodes >> bits > 0)).any():
        return "NODES", f"nodes of level {level}"
    return None


EXPERT = Expert(GROUP, answer, learn, start, wrong)
