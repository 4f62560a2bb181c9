"""The growth of a tree, in phases, of which each row does a part; each function returns the cells that it visited."""

from __future__ import annotations

import numpy as np

from sepsa.compiled.kernels import called
from sepsa.compiled.linear_algebra import add_scaled, copy, copy_rows, fill, scale
from sepsa.learner.experts.frame import size
from sepsa.learner.experts.tree_edges import draw_edges
from sepsa.learner.experts.tree_parts import (
    BEGIN,
    BINS,
    COLLECT,
    COUNT,
    DIVIDE,
    DRAW,
    LEAVES,
    NOWHERE,
    RESIDUALS,
    ROOT,
    SAMPLE,
    UPDATE,
    parts,
)

SHRINK = 2.0
LEAST = 4.0  # rows on either side of a split; and one of `LEAST_SHARE` of all
LEAST_SHARE = 1000.0
ROWS_PER_TREE, ROWS_PER_LEAF, FEWEST_LEAVES = 24, 48, 8  # in the window: more of them, more trees and leaves
# The work for each row learned, in cells of histograms to which a row is added: a fixed part, and one for each input
# of a tree. To move a row or see it in another pass counts as `MOVE` cells; to look for a split, `LOOK` for each cell.
EFFORT, EFFORT_OF_INPUT, MOVE, LOOK = 1600, 260, 2, 6
STALE = 0.25  # share of rows by which their number grows before the edges of an input are drawn again
SUM_BITS = 38  # of a cell, for the sum of residuals; the others are for the weights
LARGEST_WEIGHTS, LARGEST_RESIDUALS = 2.0**24, 2.0**36  # of all rows of a tree


@called
def random(growth):
    """A number from [0, 1), by a linear congruential generator."""
    state = (growth.random * 1664525 + 1013904223) % 4294967296
    growth.random = state
    return state / 4294967296.0


@called
def among(chosen, j):
    """Whether an input is one of these."""
    found = False
    for g in range(chosen.size):
        found = found or chosen[g] == j
    return found


@called
def best_besides(gains, chosen):
    """The input of the largest gain beside those chosen; -1 if there is none."""
    best = -1
    for j in range(gains.size):
        if not among(chosen, j) and (best < 0 or gains[j] > gains[best]):
            best = j
    return best


@called
def choose(model):
    """Choose the inputs of the next tree, half of them by their recent gains, and the direction of its residuals."""
    growth, gains, chosen, direction = parts.views("GROWTH GAINS CHOSEN DIRECTION", model)
    d, wanted, outputs = gains.size, chosen.size, size.outputs(model)
    for f in range(wanted):
        if wanted == d:
            chosen[f] = f
        elif 2 * f < wanted:
            chosen[f] = best_besides(gains, chosen[:f])
        else:
            rank, j = int(random(growth) * (d - f)), -1
            while rank >= 0:
                j += 1
                rank -= 0 if among(chosen[:f], j) else 1
            chosen[f] = j
    scale(gains, 1.0 - 1.0 / size.trees(model))
    for k in range(direction.size):
        direction[k] = 2.0 * random(growth) - 1.0
    if outputs == 2:
        direction[0], direction[1] = 1.0, -1.0
    if outputs == 1:
        direction[0] = 1.0


@called
def residual(Y, F, values, leaves, i, k):
    """What the other trees leave of target k of row i; values (LEAVES, targets) and leaves (room,) are this tree's."""
    return Y[i, k] - F[i, k] + values[leaves[i], k]


@called
def take_residuals(model, first, stop):
    """Weighted residuals along the direction, as numbers; the largest and the largest weight go to the units."""
    Y, F, weights, order, packed = parts.views("TARGETS SUMS WEIGHTS ORDER PACKED", model)
    growth, direction = parts.views("GROWTH DIRECTION", model)
    values, leaves = parts.VALUES(model)[growth.tree], parts.LEAF_OF_ROW(model)[growth.tree]
    residuals, largest, heaviest = packed.view(np.float64), growth.residual, growth.weight
    i = (growth.first + first) % packed.size
    begin, end = np.uint64(first), np.uint64(stop)
    for p in range(begin, end):
        order[p] = i
        residuals[i] = 0.0
        i = i + 1 if i + 1 < packed.size else 0
    for k in range(direction.size):
        for p in range(begin, end):
            j = order[p]
            residuals[j] += direction[k] * residual(Y, F, values, leaves, j, np.uint64(k))
    for p in range(begin, end):
        j = order[p]
        residuals[j] *= weights[j]
        largest, heaviest = max(largest, abs(residuals[j])), max(heaviest, weights[j])
    growth.residual, growth.weight = largest, heaviest


@called
def pack(model, first, stop):
    """The weight of each row and its weighted residual as one integer."""
    weights, order, packed, growth = parts.views("WEIGHTS ORDER PACKED GROWTH", model)
    residuals, per_weight, per_residual = packed.view(np.float64), 1.0 / growth.weight, 1.0 / growth.residual
    for p in range(first, stop):
        i = order[p]
        packed[i] = (int(weights[i] * per_weight + 0.5) << SUM_BITS) + int(residuals[i] * per_residual)


@called
def count(model, leaf, first, stop):
    """Add rows of a leaf to its histograms (chosen, BINS), two inputs at a time.

    Loops over rows count by unsigned integers: numba looks whether a signed index is negative.
    """
    order, codes, chosen, packed, histograms, starts = parts.views(
        "ORDER CODES CHOSEN PACKED HISTOGRAMS LEAF_STARTS", model
    )
    cells, start = histograms[leaf], starts[leaf]
    first, stop = np.uint64(start + first), np.uint64(start + stop)
    for f in range(0, chosen.size, 2):
        one, other = codes[chosen[f]], codes[chosen[min(f + 1, chosen.size - 1)]]
        cells_one, cells_other = cells[f], cells[min(f + 1, chosen.size - 1)]
        for p in range(first, stop):
            i = order[p]
            value = packed[i]
            cells_one[one[i]] += value
            if f + 1 < chosen.size:
                cells_other[other[i]] += value


@called
def divide(order, others, codes, cut, start, left, first, stop):
    """Move rows of a leaf to its left side in `order`, or to `others`; returns how many went left."""
    lower, upper, one = np.uint64(start + left), np.uint64(first - start - left), np.uint64(1)
    for p in range(np.uint64(first), np.uint64(stop)):
        i = order[p]
        right = np.uint64(codes[i] > cut)
        order[lower], others[upper] = i, i
        upper += right
        lower += one - right
    return np.int64(lower) - start


@called
def unpack(packed, growth):
    """The sums of weights and of weighted residuals in a cell."""
    lower = packed << (64 - SUM_BITS) >> (64 - SUM_BITS)
    return growth.weight * ((packed - lower) >> SUM_BITS), growth.residual * lower


@called
def best_split(cells, growth, least):
    """The largest gain by the histograms (chosen, BINS) of a leaf, and input · BINS + code; 0 and -1 if none."""
    packed, best_cut = np.int64(0), -1
    for b in range(BINS):
        packed += cells[0, b]
    n, total = unpack(packed, growth)
    none = total * total / (n + SHRINK)
    best = none * (1.0 + 1e-9) + 1e-12
    if n < 2.0 * least:
        return 0.0, best_cut
    for f in range(cells.shape[0]):
        packed, histogram = np.int64(0), cells[f]
        for b in range(BINS - 1):
            if histogram[b] != 0:  # else the split is the one before
                packed += histogram[b]
                n_left, left = unpack(packed, growth)
                right, a, c = total - left, n_left + SHRINK, n - n_left + SHRINK
                gain = left * left * c + right * right * a
                if gain > best * a * c and n_left >= least and n - n_left >= least:
                    best, best_cut = gain / (a * c), BINS * f + b
    return (best - none if best_cut >= 0 else 0.0), best_cut


# ---------------------------------------------------------------------- phases


@called
def begin(model):
    """Begin a tree on the last rows."""
    (growth, stored), room, trees = parts.views("GROWTH STORED", model), size.room(model), size.trees(model)
    rows = min(stored.rows, room * 8 // 9)
    if growth.tree == 0:
        growth.trees = min(max(rows // ROWS_PER_TREE, size.fewest_trees(model)), trees)
    growth.rows, growth.first, stored.late = rows, (stored.next - rows) % room, 0
    choose(model)
    growth.weight = growth.residual = 1e-300
    growth.leaves, growth.phase, growth.cursor = 1, DRAW, 0
    starts, sizes, above, histograms = parts.views("LEAF_STARTS LEAF_ROWS LEAF_ABOVE HISTOGRAMS", model)
    starts[0], sizes[0], above[0] = 0, rows, -1
    thresholds, children = parts.views("SPLIT_THRESHOLDS CHILDREN", model)
    thresholds[trees], children[trees], histograms[0] = NOWHERE, -1, 0
    d, width = size.inputs(model), size.tree_inputs(model)
    return 500 + (d * width * width // 2 if width < d else 0) + histograms[0].size // 4


@called
def draw(model):
    """Draw the edges of the next input again, where many rows came since the last time."""
    growth, stored, chosen, drawn = parts.views("GROWTH STORED CHOSEN DRAWN", model)
    f = growth.cursor
    if f >= chosen.size:
        growth.phase, growth.cursor = RESIDUALS, 0
        return 1
    growth.cursor += 1
    j = chosen[f]
    if drawn[j] > 0.0 and stored.ever - drawn[j] < STALE * growth.rows:
        return 1
    drawn[j] = stored.ever
    edges, codes, latest, merged = parts.views("EDGES CODES LATEST MERGED", model)
    draw_edges(edges[j], codes[j], stored.rows, latest[j], stored.ever, stored.next, merged)
    return 60 * min(stored.ever, SAMPLE)


@called
def visit_all(model, left):
    """Take the residuals of rows, or count them in the first leaf."""
    growth, taking = parts.GROWTH(model), parts.GROWTH(model).phase == RESIDUALS
    rows, first = growth.rows, growth.cursor
    cost = 2 * MOVE if taking else 2 * MOVE + size.tree_inputs(model)
    stop = min(rows, first + 1 + left // cost)
    growth.cursor = stop
    if taking:
        take_residuals(model, first, stop)
        if stop == rows:
            growth.weight *= rows / LARGEST_WEIGHTS
            growth.residual *= rows / LARGEST_RESIDUALS
            growth.phase, growth.cursor = ROOT, 0
    else:
        pack(model, first, stop)
        count(model, 0, first, stop)
        if stop == rows:
            judge(model, 0)
            growth.top = parts.LEAF_GAINS(model)[0]
            find_next(model)
    return (stop - first) * cost


@called
def judge(model, leaf):
    """Find the best split of a leaf."""
    growth = parts.GROWTH(model)
    least = max(LEAST, growth.rows / LEAST_SHARE)
    gain, cut = best_split(parts.HISTOGRAMS(model)[leaf], growth, least)
    parts.LEAF_GAINS(model)[leaf], parts.LEAF_CUTS(model)[leaf] = gain, cut


@called
def find_next(model):
    """Go on with the leaf of the largest gain, or with the values of the leaves where the tree is complete."""
    growth, gains = parts.views("GROWTH LEAF_GAINS", model)
    leaves, best = growth.leaves, 0
    for v in range(leaves):
        if gains[v] > gains[best]:
            best = v
    most = min(max(growth.rows // ROWS_PER_LEAF, FEWEST_LEAVES), LEAVES)
    divisible = gains[best] > 0.0 and leaves < most
    growth.phase, growth.leaf = DIVIDE if divisible else COLLECT, best if divisible else 0
    growth.cursor = growth.left = 0


@called
def divide_leaf(model, left):
    """Divide rows of the leaf that is split, and make the split once all are."""
    growth, chosen, order, others, codes = parts.views("GROWTH CHOSEN ORDER OTHERS CODES", model)
    leaf, first, new, trees = growth.leaf, growth.cursor, growth.leaves, size.trees(model)
    starts, sizes, above, cuts, gains = parts.views("LEAF_STARTS LEAF_ROWS LEAF_ABOVE LEAF_CUTS LEAF_GAINS", model)
    start, rows, j, code = starts[leaf], sizes[leaf], chosen[cuts[leaf] // BINS], cuts[leaf] % BINS
    stop = min(rows, first + 1 + left // MOVE)
    lower = divide(order, others, codes[j], code, start, growth.left, start + first, start + stop)
    growth.cursor, growth.left = stop, lower
    if stop == rows:
        copy(others[: rows - lower], order[start + lower :])
        node = new - 1
        inputs, thresholds, children = parts.views("SPLIT_INPUTS SPLIT_THRESHOLDS CHILDREN", model)
        inputs[trees, node], parts.CUTS(model)[node] = j, code
        thresholds[trees, node] = parts.EDGES(model)[j, code - 1] if code > 0 else -NOWHERE
        if above[leaf] >= 0:
            children[trees, above[leaf] // 2, above[leaf] % 2] = node
        # The smaller side becomes the new leaf; the left one holds the first rows.
        left_leaf, right_leaf = (new, leaf) if 2 * lower < rows else (leaf, new)
        children[trees, node, 0], children[trees, node, 1] = -1 - left_leaf, -1 - right_leaf
        above[left_leaf], above[right_leaf] = 2 * node, 2 * node + 1
        starts[left_leaf], sizes[left_leaf] = start, lower
        starts[right_leaf], sizes[right_leaf] = start + lower, rows - lower
        parts.GAINS(model)[j] += gains[leaf] / growth.top
        parts.HISTOGRAMS(model)[new] = 0
        growth.phase, growth.cursor = COUNT, 0
    return (stop - first) * MOVE


@called
def count_smaller(model, left):
    """Count rows of the new leaf, and once all are, subtract them from the other one."""
    growth, histograms = parts.views("GROWTH HISTOGRAMS", model)
    leaf, new, first = growth.leaf, growth.leaves, growth.cursor
    rows, cost = parts.LEAF_ROWS(model)[new], MOVE + histograms.shape[1]
    stop = min(rows, first + 1 + left // cost)
    count(model, new, first, stop)
    growth.cursor = stop
    if stop < rows:
        return (stop - first) * cost
    for f in range(histograms.shape[1]):
        add_scaled(histograms[new, f], -1, histograms[leaf, f])
    judge(model, leaf)
    judge(model, new)
    growth.leaves += 1
    find_next(model)
    return (stop - first) * cost + 2 * LOOK * histograms.shape[1] * BINS


@called
def fill_leaf(model, left):
    """Collect the value of a leaf from its rows, then add it to their sums; after the last leaf, finish the tree."""
    growth, starts, sizes, counts = parts.views("GROWTH LEAF_STARTS LEAF_ROWS LEAF_COUNTS", model)
    leaf, first = growth.leaf, growth.cursor
    if leaf == growth.leaves:
        return finish(model)
    Y, F, weights, order, values = parts.views("TARGETS SUMS WEIGHTS ORDER VALUES", model)
    start, rows, old, leaves = starts[leaf], sizes[leaf], values[growth.tree], parts.LEAF_OF_ROW(model)[growth.tree]
    new, rate = values[size.trees(model), leaf], size.rate(model) / 1000.0
    stop = min(rows, first + 1 + left // (2 * MOVE))
    begin, end = np.uint64(start + first), np.uint64(start + stop)
    growth.cursor = stop
    if growth.phase == COLLECT:
        if first == 0:
            counts[leaf] = SHRINK
            fill(new, 0.0)
        total = 0.0
        for p in range(begin, end):
            total += weights[order[p]]
        counts[leaf] += total
        for k in range(np.uint64(new.size)):
            total = 0.0
            for p in range(begin, end):
                i = order[p]
                total += weights[i] * residual(Y, F, old, leaves, i, k)
            new[k] += total
        if stop == rows:
            for k in range(new.size):
                new[k] *= rate / counts[leaf]
            growth.phase, growth.cursor = UPDATE, 0
    else:
        for p in range(begin, end):
            i = order[p]
            for k in range(np.uint64(new.size)):
                F[i, k] += new[k] - old[leaves[i], k]
            leaves[i] = leaf
        if stop == rows:
            growth.phase, growth.cursor, growth.leaf = COLLECT, 0, leaf + 1
    return (stop - first) * 2 * MOVE


@called
def finish(model):
    """Find the leaves of rows that came since the tree was begun, and put it into its place."""
    growth, stored, codes, values, cuts, F = parts.views("GROWTH STORED CODES VALUES CUTS SUMS", model)
    inputs, thresholds, children = parts.views("SPLIT_INPUTS SPLIT_THRESHOLDS CHILDREN", model)
    room, t, m, trees = size.room(model), growth.tree, values.shape[2], size.trees(model)
    leaves = parts.LEAF_OF_ROW(model)[t]
    for late in range(stored.late):
        i, node = (stored.next - 1 - late) % room, 0
        while node >= 0:
            right = thresholds[trees, node] < NOWHERE and codes[inputs[trees, node], i] > cuts[node]
            node = children[trees, node, 1 if right else 0]
        for k in range(m):
            F[i, k] += values[trees, -1 - node, k] - values[t, leaves[i], k]
        leaves[i] = -1 - node
    copy(inputs[trees], inputs[t])
    copy(thresholds[trees], thresholds[t])
    copy_rows(children[trees], children[t])
    copy_rows(values[trees], values[t])
    growth.tree, growth.phase = (t + 1) % growth.trees, BEGIN
    return 20 * stored.late


@called
def grow(model):
    """Go on with the tree in growth, by the work for one row."""
    growth = parts.GROWTH(model)
    left = EFFORT + EFFORT_OF_INPUT * size.tree_inputs(model)
    while left > 0:
        phase = growth.phase
        if phase == BEGIN:
            left -= begin(model)
        elif phase == DRAW:
            left -= draw(model)
        elif phase <= ROOT:
            left -= visit_all(model, left)
        elif phase == DIVIDE:
            left -= divide_leaf(model, left)
        elif phase == COUNT:
            left -= count_smaller(model, left)
        else:
            left -= fill_leaf(model, left)
