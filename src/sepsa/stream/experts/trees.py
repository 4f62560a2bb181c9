"""An ensemble of trees that grows with the stream: one tree at a time is grown anew, a bounded amount of work per row.

The prediction is the sum of the trees, F(x) = Σ_t f_t(x). Tree t is grown on what the others leave, r = y - F + f_t
(backfitting), over the last rows: all of them until there are `room`, of which each input is kept as a code of one
byte. A code counts the edges below a value; 0 is a missing value. The edges are quantiles of the first rows; where many
of the latest values lie between two of them, they are drawn again, from the former edges and the latest values.

The leaf with the largest gain is split next, until there are `LEAVES`, or no split gains:

    S_l²/(n_l + λ) + S_r²/(n_r + λ) - S²/(n + λ),      S = Σ r·direction over the rows of a leaf, λ = `SHRINK`,

where r has several outputs, along a random direction. Rows of a leaf lie together in `ORDER`. A split moves them to
its two leaves, counts the rows of the smaller one in histograms over the codes, and subtracts these from its parent's.
The value of a leaf is Σr/(n + λ), times a rate. A cell of a histogram is one integer, so that a row is added to it in
one operation: the sum of weights in its upper bits, and that of weighted residuals in the lower ones.
"""

from __future__ import annotations

import numpy as np

from sepsa.stream.experts.expert import Expert
from sepsa.stream.experts.frame import given, row, size
from sepsa.stream.kernels.compilation import called, kernel
from sepsa.stream.kernels.parts import Field, Part, Record, Rule, Sizes, at_the_end, work
from sepsa.stream.kernels.views import Group

TREES = 32
LEAVES = 32
BINS = 64
INPUTS = 32  # at most, of a tree
SAMPLE = 1024  # latest values of each input, from which edges are drawn
CROWD = 16  # if one in so many of them has the same code and they differ, the edges are drawn again
RATE = 300  # in thousandths
TABLE_TREES, TABLE_RATE = 120, 150  # of `fit`, where each tree is grown once on all rows
SHRINK = 2.0
LEAST = 4.0  # rows on either side of a split; and one of `LEAST_SHARE` of all
LEAST_SHARE = 1000.0
ROWS_PER_TREE, ROWS_PER_LEAF = 24, 48  # in the window: more of them, more trees and leaves; for a table all trees
FEWEST_TREES, FEWEST_LEAVES = 16, 8
# The work for each row learned, in cells of histograms to which a row is added: a fixed part, and one for each input
# of a tree. To move a row or see it in another pass counts as `MOVE` cells; to look for a split, `LOOK` for each cell.
EFFORT, EFFORT_OF_INPUT, MOVE, LOOK = 1600, 260, 2, 6
STALE = 0.25  # share of rows by which their number grows before the edges of an input are drawn again
NOWHERE = np.float32(2.0**99)  # an edge above all values, or a missing value
MOST_ROWS = 16384
LEAST_ROOM = 512
MEMORY = 2**25  # bytes of rows at most, at one for each input and `ROW_BYTES`
ROW_BYTES = 48 + TREES

SUM_BITS = 38  # of a cell, for the sum of residuals; the others are for the weights
LARGEST_WEIGHTS, LARGEST_RESIDUALS = 2.0**24, 2.0**36  # of all rows of a tree

# What is done next: begin a tree, draw the edges of an input, take the residuals, count all rows, divide a leaf, count
# one of its parts, collect the value of a leaf, add it to the sums of its rows.
BEGIN, DRAW, RESIDUALS, ROOT, DIVIDE, COUNT, COLLECT, UPDATE = range(8)


def room_for(rows: int, inputs: int, most: int) -> int:
    """The room for a window of so many rows or more, but at most this many.

    A ninth of it is for rows that come while a tree is grown on the others.
    """
    most = min(most, max(MEMORY // (inputs + ROW_BYTES), LEAST_ROOM))
    length = min(max(1 << (rows - 1).bit_length() if rows else 0, LEAST_ROOM), most)
    return length + (length + 7) // 8


def window(room: int) -> int:
    """The rows on which a tree is grown at most."""
    return room * 8 // 9


def targets(sizes: Sizes) -> int:
    """The targets of the trees: the outputs, and of a single one its logarithm."""
    return 2 if sizes["outputs"] == 1 else sizes["outputs"]


def grow_targets(old, new, before, after):
    """Growth of a part whose last axis are the targets: the logarithm of a single output is none of several."""
    single = before["outputs"] == 1 < after["outputs"]
    at_the_end(old[..., :1] if single else old, new, before, after)


def divides(part):
    """Whether the leaf that is divided, if one is, exists, and rows that went left are among its own."""
    growth = part("GROWTH")
    leaf, leaves = int(growth["leaf"]), int(growth["leaves"])
    if growth["phase"] not in (DIVIDE, COUNT):
        return True
    return leaf < leaves < LEAVES and bool(growth["left"] <= part("LEAF_ROWS")[leaf])


def cuts(part):
    """Whether the code at which a leaf is divided leaves rows for both sides, of those seen so far."""
    growth = part("GROWTH")
    if growth["phase"] != DIVIDE:
        return True
    return bool(part("LEAF_CUTS")[growth["leaf"]] % BINS < BINS - 1 and growth["left"] <= growth["cursor"])


def come_later(part):
    """Whether the splits below a split have larger numbers, so that a row reaches a leaf."""
    children = part("CHILDREN")
    return not ((children >= 0) & (children <= np.arange(LEAVES - 1)[:, None])).any()


GROWTH = Record(
    tree=Field(int, bounds=(0, "trees - 1")),  # the one that is grown anew
    trees=Field(int, bounds=(0, "trees")),  # how many there are
    phase=Field(int, start=BEGIN, bounds=(0, UPDATE), restarts=True),  # what is done next
    cursor=Field(int, bounds=(0, "room"), restarts=True),  # the next row of the pass
    random=Field(int, start=1, bounds=(0, 2**32 - 1)),  # the state of the generator
    weight=Field(float, bounds=(None, None)),  # the units of weights and of residuals in the histograms
    residual=Field(float, bounds=(None, None)),
    rows=Field(int, bounds=(0, "room"), restarts=True),  # of the tree in growth, and the place of the first
    first=Field(int, bounds=(0, "room - 1")),
    leaves=Field(int, bounds=(0, LEAVES)),
    leaf=Field(int, bounds=(0, LEAVES)),  # that is divided or gets its value
    left=Field(int, bounds=(0, "room")),  # its rows that went left
    top=Field(float, bounds=(None, None)),  # the gain of the first split
)
STORED = Record(
    rows=Field(int, bounds=(0, "room")),
    next=Field(int, bounds=(0, "room - 1")),  # the place of the next row
    late=Field(int, bounds=(0, "room"), restarts=True),  # rows since the tree in growth began
    ever=int,  # all that ever were
)
parts = Group(
    given,
    "trees",
    Part("GROWTH", GROWTH),
    Part("STORED", STORED),
    Part("CHOSEN", np.int64, ("tree_inputs",), bounds=(0, "inputs - 1")),
    Part("DIRECTION", float, ("targets",)),
    Part("GAINS", float, ("inputs",)),  # recent gains of splits of each input
    Part("EDGES", np.float32, ("inputs", BINS - 2), start=NOWHERE),
    Part("DRAWN", float, ("inputs",)),  # the rows from which the edges were drawn
    Part("LATEST", np.float32, ("inputs", SAMPLE), start=NOWHERE),
    # 1 where an input was ever missing; else one that is missing counts as its mean
    Part("MISSED", np.uint8, ("inputs",), bounds=(0, 1)),
    Part("SPLIT_INPUTS", np.uint32, ("tree_slots", LEAVES - 1), bounds=(0, "inputs - 1")),
    Part("SPLIT_THRESHOLDS", np.float32, ("tree_slots", LEAVES - 1), start=NOWHERE),
    # a split, or -1 - a leaf
    Part("CHILDREN", np.int8, ("tree_slots", LEAVES - 1, 2), start=-1, bounds=(-LEAVES, LEAVES - 2)),
    Part("VALUES", float, ("tree_slots", LEAVES, "targets"), grows=grow_targets),
    Part("CUTS", np.uint8, (LEAVES - 1,), bounds=(0, BINS - 2)),  # the codes at which the tree in growth divides
    Part("LEAF_STARTS", np.int64, (LEAVES,), bounds=(0, "room")),
    Part("LEAF_ROWS", np.int64, (LEAVES,), bounds=(0, "room")),
    Part("LEAF_CUTS", np.int64, (LEAVES,), bounds=(-1, "tree_cells - 1")),
    Part("LEAF_GAINS", float, (LEAVES,)),
    Part("LEAF_COUNTS", float, (LEAVES,)),
    Part("LEAF_ABOVE", np.int64, (LEAVES,), bounds=(-1, 2 * LEAVES - 3)),
    Part("HISTOGRAMS", np.int64, (LEAVES, "tree_inputs", BINS)),
    Part("CODES", np.uint8, ("inputs", "room"), bounds=(0, BINS - 1)),
    Part("TARGETS", np.float32, ("room", "targets"), grows=grow_targets),
    Part("WEIGHTS", np.float32, ("room",)),
    Part("SUMS", np.float32, ("room", "targets"), grows=grow_targets),
    Part("PACKED", np.int64, ("room",)),
    Part("ORDER", np.uint32, ("room",), bounds=(0, "room - 1")),
    Part("OTHERS", np.uint32, ("room",)),
    Part("LEAF_OF_ROW", np.uint8, ("trees", "room"), bounds=(0, LEAVES - 1)),
    work("LEAVES", np.int64, ("trees",)),
    work("TOLD", float, ("targets",)),
    work("MERGED", float, (3, SAMPLE + BINS)),
    work("ASKED", np.float32, ("inputs",)),
    sizes={
        "tree_inputs": lambda sizes: min(sizes["inputs"], INPUTS),
        "tree_cells": lambda sizes: min(sizes["inputs"], INPUTS) * BINS,
        "targets": targets,
    },
    rings={"room": "STORED"},
    rules=(
        Rule("CHILDREN", "splits that come later", come_later),
        Rule(
            "LEAF_ROWS",
            "rows among those stored",
            lambda part: bool((part("LEAF_STARTS") + part("LEAF_ROWS") <= part("WEIGHTS").size).all()),
        ),
        Rule("GROWTH", "a leaf that is divided", divides),
        Rule("LEAF_CUTS", "the code at which a leaf is divided", cuts),
    ),
)


@called
def random(growth):
    """A number from [0, 1), by a linear congruential generator."""
    state = (growth.random * 1664525 + 1013904223) % 4294967296
    growth.random = state
    return state / 4294967296.0


@called
def leaf(inputs, thresholds, children, x):
    """The leaf of a row x (d,) in the tree with these splits; a missing value goes left."""
    node = 0
    while node >= 0:
        node = children[node, 1 if x[inputs[node]] > thresholds[node] else 0]
    return -1 - node


@called
def add_trees(inputs, thresholds, children, values, x, leaves, out):
    """out (targets,) = Σ_t f_t(x), and the leaf (trees,) of x in each tree."""
    for k in range(out.size):
        out[k] = 0.0
    for t in range(leaves.size):
        leaves[t] = leaf(inputs[t], thresholds[t], children[t], x)
        for k in range(out.size):
            out[k] += values[t, leaves[t], k]


@called
def code_of(edges, value):
    """0 for a missing value, NaN or `NOWHERE`, else 1 and the number of edges below it."""
    if not value < NOWHERE:
        return 0
    low, high = 0, edges.size
    while low < high:
        middle = (low + high) // 2
        if edges[middle] < value:
            low = middle + 1
        else:
            high = middle
    return 1 + low


@called
def merge(edges, counts, latest, values, masses):
    """Sort edges, with the rows of their codes, and the latest values into `values`, each once; returns how many.

    Half of the mass is that of the latest values.
    """
    n, total = 0, 1.0
    for b in range(edges.size):
        if edges[b] < NOWHERE:
            values[n], masses[n] = edges[b], counts[b + 1]
            total += counts[b + 1]
            n += 1
    for i in range(latest.size):
        if latest[i] < NOWHERE:
            values[n], masses[n] = latest[i], 0.5 * total / latest.size
            n += 1
    gap = 364
    while gap > 0:  # Shell's method
        for i in range(gap, n):
            value, mass, at = values[i], masses[i], i
            while at >= gap and values[at - gap] > value:
                values[at], masses[at] = values[at - gap], masses[at - gap]
                at -= gap
            values[at], masses[at] = value, mass
        gap //= 3
    last = 0
    for i in range(1, n):
        if values[i] == values[last]:
            masses[last] += masses[i]
        else:
            last += 1
            values[last], masses[last] = values[i], masses[i]
    return last + 1 if n else 0


@called
def crowded(edges, values, masses, n):
    """Whether a large share of n values in ascending order, and not of a single one, has one code."""
    at, distinct, run, most, total = 0, 0, 0.0, 0.0, 0.0
    for i in range(n):
        while at < edges.size and edges[at] < values[i]:
            at, distinct, run = at + 1, 0, 0.0
        distinct, run, total = distinct + 1, run + masses[i], total + masses[i]
        if distinct > 1:
            most = max(most, run)
    return most * CROWD > total


@called
def select(values, masses, n, edges):
    """edges (BINS - 2,): n values in ascending order if they are as few, else quantiles, and those about heavy ones."""
    total, passed, kept = 0.0, 0.0, 0
    for i in range(n):
        total += masses[i]
    for i in range(n):
        heavy = masses[i] * edges.size >= total
        if n > edges.size and heavy and i > 0 and (kept == 0 or edges[kept - 1] < values[i - 1]) and kept < edges.size:
            edges[kept] = values[i - 1]
            kept += 1
        passed += masses[i]
        if (n <= edges.size or heavy or passed * edges.size >= total * (kept + 1)) and kept < edges.size:
            edges[kept] = values[i]
            kept += 1
    for b in range(kept, edges.size):
        edges[b] = NOWHERE


@called
def draw_edges(edges, codes, rows, latest, ever, following, merged):
    """Draw the edges of an input, by quantiles where it has had more values than codes, and its codes by them.

    They are drawn from the first rows, and again where many of the latest values lie together. The latest rows get the
    codes of their values, `ever` - 1 being the number of the last row and `following` - 1 its place; older rows get
    that of the largest value which their former code allows.
    """
    values, masses, counts, filled = merged[0], merged[1], merged[2], min(ever, SAMPLE)
    n = merge(edges[:0], counts, latest[:filled], values, masses)
    if ever > SAMPLE:
        if not crowded(edges, values, masses, n):
            return
        for b in range(BINS):
            counts[b] = 0.0
        for i in range(rows):
            counts[codes[i]] += 1.0
        n = merge(edges, counts, latest[:filled], values, masses)
    for b in range(1, BINS):  # the largest value of each code, then its new code
        counts[b] = min(edges[b - 1] if b < BINS - 1 else NOWHERE, values[n - 1]) if n else 0.0
    select(values, masses, n, edges)
    for b in range(1, BINS):
        counts[b] = code_of(edges, counts[b])
    counts[0] = 0.0
    if ever > SAMPLE:
        for i in range(rows):
            codes[i] = int(counts[codes[i]])
    for j in range(min(filled, rows)):
        codes[(following - 1 - j) % codes.size] = code_of(edges, latest[(ever - 1 - j) % SAMPLE])


@called
def choose(growth, gains, chosen, direction, outputs, logarithm, trees):
    """Choose the inputs of the next tree, half of them by their recent gains, and the direction of its residuals."""
    d, wanted = gains.size, chosen.size
    for f in range(wanted if wanted == d else 0):
        chosen[f] = f
    for f in range(wanted if wanted < d else 0):
        best, rank = -1, 0 if 2 * f < wanted else int(random(growth) * (d - f))
        for j in range(d):
            taken = False
            for g in range(f):
                taken = taken or chosen[g] == j
            if not taken:
                if 2 * f < wanted:
                    best = j if best < 0 or gains[j] > gains[best] else best
                elif rank == 0:
                    best = j
                    break
                else:
                    rank -= 1
        chosen[f] = best
    for j in range(d):
        gains[j] *= 1.0 - 1.0 / trees
    for k in range(direction.size):
        direction[k] = 2.0 * random(growth) - 1.0
    if outputs == 2:
        direction[0], direction[1] = 1.0, -1.0
    if outputs == 1:
        direction[1] = 1.0 if logarithm and growth.tree % 2 == 1 else 0.0
        direction[0] = 1.0 - direction[1]


@called
def residual(Y, F, values, leaves, i, k):
    """What the other trees leave of target k of row i; values (LEAVES, targets) and leaves (room,) are this tree's."""
    return Y[i, k] - F[i, k] + values[leaves[i], k]


@called
def take_residuals(Y, F, weights, order, growth, direction, values, leaves, packed, first, stop):
    """Weighted residuals along the direction, as numbers; the largest and the largest weight go to the units."""
    residuals, largest, heaviest = packed.view(np.float64), growth.residual, growth.weight
    i = (growth.first + first) % packed.size
    for p in range(first, stop):
        order[p] = i
        residuals[i] = 0.0
        i = i + 1 if i + 1 < packed.size else 0
    for k in range(direction.size):
        if direction[k] != 0.0:
            for p in range(np.uint64(first), np.uint64(stop)):
                j = order[p]
                residuals[j] += direction[k] * residual(Y, F, values, leaves, j, np.uint64(k))
    for p in range(np.uint64(first), np.uint64(stop)):
        j = order[p]
        residuals[j] *= weights[j]
        largest, heaviest = max(largest, abs(residuals[j])), max(heaviest, weights[j])
    growth.residual, growth.weight = largest, heaviest


@called
def pack(weights, order, growth, packed, first, stop):
    """The weight of each row and its weighted residual as one integer."""
    residuals, per_weight, per_residual = packed.view(np.float64), 1.0 / growth.weight, 1.0 / growth.residual
    for p in range(first, stop):
        i = order[p]
        packed[i] = (int(weights[i] * per_weight + 0.5) << SUM_BITS) + int(residuals[i] * per_residual)


@called
def count(order, codes, chosen, packed, cells, first, stop):
    """Add rows to the histograms (chosen, BINS) of a leaf, two inputs at a time.

    Loops over rows count by unsigned integers: numba looks whether a signed index is negative.
    """
    for f in range(0, chosen.size, 2):
        one, other = codes[chosen[f]], codes[chosen[min(f + 1, chosen.size - 1)]]
        cells_one, cells_other = cells[f], cells[min(f + 1, chosen.size - 1)]
        if f + 1 < chosen.size:
            for p in range(np.uint64(first), np.uint64(stop)):
                i = order[p]
                value = packed[i]
                cells_one[one[i]] += value
                cells_other[other[i]] += value
        else:
            for p in range(np.uint64(first), np.uint64(stop)):
                i = order[p]
                cells_one[one[i]] += packed[i]


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


# ---------------------------------------------------------------------- growth: each function returns the cells visited


@called
def begin(model):
    """Begin a tree on the last rows."""
    growth, stored, room, trees = parts.GROWTH(model), parts.STORED(model), size.room(model), size.trees(model)
    rows = min(stored.rows, room * 8 // 9)
    if growth.tree == 0:
        fewest = FEWEST_TREES if trees == TREES else trees
        growth.trees = min(max(rows // ROWS_PER_TREE, fewest), trees)
    growth.rows, growth.first, stored.late = rows, (stored.next - rows) % room, 0
    choose(
        growth, parts.GAINS(model), parts.CHOSEN(model), parts.DIRECTION(model), size.outputs(model),
        row.FACTS(model).origin > 0.0, trees,
    )  # fmt: skip
    growth.weight = growth.residual = 1e-300
    growth.leaves, growth.phase, growth.cursor = 1, DRAW, 0
    parts.LEAF_STARTS(model)[0], parts.LEAF_ROWS(model)[0], parts.LEAF_ABOVE(model)[0] = 0, rows, -1
    thresholds, children = parts.SPLIT_THRESHOLDS(model)[trees], parts.CHILDREN(model)[trees]
    for node in range(LEAVES - 1):
        thresholds[node], children[node, 0], children[node, 1] = NOWHERE, -1, -1
    d, width = size.inputs(model), size.tree_inputs(model)
    return 500 + (d * width * width // 2 if width < d else 0) + clear(parts.HISTOGRAMS(model)[0])


@called
def clear(cells):
    for f in range(cells.shape[0]):
        for b in range(BINS):
            cells[f, b] = 0
    return cells.size // 4


@called
def draw(model):
    """Draw the edges of the next input again, where many rows came since the last time."""
    growth, stored, chosen = parts.GROWTH(model), parts.STORED(model), parts.CHOSEN(model)
    f = growth.cursor
    if f >= chosen.size:
        growth.phase, growth.cursor = RESIDUALS, 0
        return 1
    growth.cursor += 1
    j, drawn = chosen[f], parts.DRAWN(model)
    if drawn[j] > 0.0 and stored.ever - drawn[j] < STALE * growth.rows:
        return 1
    drawn[j] = stored.ever
    draw_edges(
        parts.EDGES(model)[j], parts.CODES(model)[j], stored.rows, parts.LATEST(model)[j], stored.ever,
        stored.next, parts.MERGED(model),
    )  # fmt: skip
    return 60 * min(stored.ever, SAMPLE)


@called
def visit_all(model, left):
    """Take the residuals of rows, or count them in the first leaf."""
    growth, packed, chosen = parts.GROWTH(model), parts.PACKED(model), parts.CHOSEN(model)
    rows, first, t = growth.rows, growth.cursor, growth.tree
    taking = growth.phase == RESIDUALS
    cost = 2 * MOVE if taking else 2 * MOVE + chosen.size
    stop = min(rows, first + 1 + left // cost)
    growth.cursor = stop
    if taking:
        take_residuals(
            parts.TARGETS(model), parts.SUMS(model), parts.WEIGHTS(model), parts.ORDER(model), growth,
            parts.DIRECTION(model), parts.VALUES(model)[t], parts.LEAF_OF_ROW(model)[t], packed, first, stop,
        )  # fmt: skip
        if stop == rows:
            growth.weight *= rows / LARGEST_WEIGHTS
            growth.residual *= rows / LARGEST_RESIDUALS
            growth.phase, growth.cursor = ROOT, 0
    else:
        pack(parts.WEIGHTS(model), parts.ORDER(model), growth, packed, first, stop)
        count_leaf(model, 0, first, stop)
        if stop == rows:
            judge(model, 0)
            growth.top = parts.LEAF_GAINS(model)[0]
            find_next(model)
    return (stop - first) * cost


@called
def count_leaf(model, leaf, first, stop):
    cells, start = parts.HISTOGRAMS(model)[leaf], parts.LEAF_STARTS(model)[leaf]
    count(
        parts.ORDER(model), parts.CODES(model), parts.CHOSEN(model), parts.PACKED(model), cells, start + first,
        start + stop,
    )  # fmt: skip


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
    growth, gains = parts.GROWTH(model), parts.LEAF_GAINS(model)
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
    growth, chosen, order, others = parts.GROWTH(model), parts.CHOSEN(model), parts.ORDER(model), parts.OTHERS(model)
    trees = size.trees(model)
    leaf, first, new = growth.leaf, growth.cursor, growth.leaves
    starts, sizes, cut = parts.LEAF_STARTS(model), parts.LEAF_ROWS(model), parts.LEAF_CUTS(model)[leaf]
    start, rows, j, code = starts[leaf], sizes[leaf], chosen[cut // BINS], cut % BINS
    stop = min(rows, first + 1 + left // MOVE)
    lower = divide(order, others, parts.CODES(model)[j], code, start, growth.left, start + first, start + stop)
    growth.cursor, growth.left = stop, lower
    if stop == rows:
        for p in range(rows - lower):
            order[start + lower + p] = others[p]
        node, above = new - 1, parts.LEAF_ABOVE(model)
        inputs, thresholds, children = (
            parts.SPLIT_INPUTS(model)[trees], parts.SPLIT_THRESHOLDS(model)[trees], parts.CHILDREN(model)[trees]
        )  # fmt: skip
        inputs[node], parts.CUTS(model)[node] = j, code
        thresholds[node] = parts.EDGES(model)[j, code - 1] if code > 0 else -NOWHERE
        if above[leaf] >= 0:
            children[above[leaf] // 2, above[leaf] % 2] = node
        small = 0 if 2 * lower < rows else 1  # the side that becomes the new leaf
        children[node, small], children[node, 1 - small] = -1 - new, -1 - leaf
        above[new], above[leaf] = 2 * node + small, 2 * node + 1 - small
        starts[new], sizes[new] = start + small * lower, small * (rows - lower) + (1 - small) * lower
        starts[leaf], sizes[leaf] = start + (1 - small) * lower, rows - sizes[new]
        parts.GAINS(model)[j] += parts.LEAF_GAINS(model)[leaf] / growth.top
        clear(parts.HISTOGRAMS(model)[new])
        growth.phase, growth.cursor = COUNT, 0
    return (stop - first) * MOVE


@called
def count_smaller(model, left):
    """Count rows of the new leaf, and once all are, subtract them from the other one."""
    growth, histograms = parts.GROWTH(model), parts.HISTOGRAMS(model)
    leaf, new, first = growth.leaf, growth.leaves, growth.cursor
    rows, cost = parts.LEAF_ROWS(model)[new], MOVE + histograms.shape[1]
    stop = min(rows, first + 1 + left // cost)
    count_leaf(model, new, first, stop)
    growth.cursor = stop
    if stop < rows:
        return (stop - first) * cost
    for f in range(histograms.shape[1]):
        for b in range(BINS):
            histograms[leaf, f, b] -= histograms[new, f, b]
    judge(model, leaf)
    judge(model, new)
    growth.leaves += 1
    find_next(model)
    return (stop - first) * cost + 2 * LOOK * histograms.shape[1] * BINS


@called
def fill_leaf(model, left):
    """Collect the value of a leaf from its rows, then add it to their sums; after the last leaf, finish the tree."""
    growth, leaf, first = parts.GROWTH(model), parts.GROWTH(model).leaf, parts.GROWTH(model).cursor
    if leaf == growth.leaves:
        return finish(model)
    Y, F, weights, order, t = (
        parts.TARGETS(model), parts.SUMS(model), parts.WEIGHTS(model), parts.ORDER(model), growth.tree
    )  # fmt: skip
    values, leaves, counts = parts.VALUES(model), parts.LEAF_OF_ROW(model)[t], parts.LEAF_COUNTS(model)
    start, rows, old = parts.LEAF_STARTS(model)[leaf], parts.LEAF_ROWS(model)[leaf], values[t]
    new, rate = values[size.trees(model), leaf], size.rate(model) / 1000.0
    stop = min(rows, first + 1 + left // (2 * MOVE))
    growth.cursor = stop
    if growth.phase == COLLECT:
        if first == 0:
            counts[leaf] = SHRINK
            for k in range(new.size):
                new[k] = 0.0
        total = 0.0
        for p in range(np.uint64(start + first), np.uint64(start + stop)):
            total += weights[order[p]]
        counts[leaf] += total
        for k in range(np.uint64(new.size)):
            total = 0.0
            for p in range(np.uint64(start + first), np.uint64(start + stop)):
                i = order[p]
                total += weights[i] * residual(Y, F, old, leaves, i, k)
            new[k] += total
        if stop == rows:
            for k in range(new.size):
                new[k] *= rate / counts[leaf]
            growth.phase, growth.cursor = UPDATE, 0
    else:
        for p in range(np.uint64(start + first), np.uint64(start + stop)):
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
    growth, stored, room, codes = parts.GROWTH(model), parts.STORED(model), size.room(model), parts.CODES(model)
    inputs, thresholds, children, values, cuts, F = (
        parts.SPLIT_INPUTS(model), parts.SPLIT_THRESHOLDS(model), parts.CHILDREN(model), parts.VALUES(model),
        parts.CUTS(model), parts.SUMS(model),
    )  # fmt: skip
    t, m, trees = growth.tree, values.shape[2], size.trees(model)
    leaves = parts.LEAF_OF_ROW(model)[t]
    for late in range(stored.late):
        i, node = (stored.next - 1 - late) % room, 0
        while node >= 0:
            right = thresholds[trees, node] < NOWHERE and codes[inputs[trees, node], i] > cuts[node]
            node = children[trees, node, 1 if right else 0]
        for k in range(m):
            F[i, k] += values[trees, -1 - node, k] - values[t, leaves[i], k]
        leaves[i] = -1 - node
    for node in range(LEAVES - 1):  # loops, because assignments of arrays take long to compile
        inputs[t, node], thresholds[t, node] = inputs[trees, node], thresholds[trees, node]
        children[t, node, 0], children[t, node, 1] = children[trees, node, 0], children[trees, node, 1]
    for v in range(LEAVES):
        for k in range(m):
            values[t, v, k] = values[trees, v, k]
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


@kernel(cost=4.0)
def boost(model, n):
    """Grow each tree once on the stored rows, after all were removed (`clear_trees`): boosting."""
    growth, last, steps = parts.GROWTH(model), 0, 0
    while growth.tree >= last and parts.STORED(model).rows >= 2 * LEAST:
        last = growth.tree
        grow(model)
        steps += 1
    return steps


def clear_trees(part):
    """Remove all trees; the rows stay."""
    for name in ("VALUES", "SUMS", "LEAF_OF_ROW"):
        part(name)[:] = 0
    part("SPLIT_THRESHOLDS")[:], part("CHILDREN")[:] = NOWHERE, -1
    for name in ("tree", "phase", "cursor"):
        part("GROWTH")[name] = 0


@kernel(cost=0.6)
def answer(model, e):
    told, out, missed = parts.TOLD(model), row.ANSWERS(model)[e], parts.MISSED(model)
    x, wide = parts.ASKED(model), row.WIDE(model)
    for j in range(x.size):
        x[j] = wide[j] if wide[j] == wide[j] or missed[j] else 0.0
    add_trees(
        parts.SPLIT_INPUTS(model), parts.SPLIT_THRESHOLDS(model), parts.CHILDREN(model), parts.VALUES(model),
        x, parts.LEAVES(model), told,
    )  # fmt: skip
    for k in range(out.size):
        out[k] = told[k]
    return 0


@kernel(cost=4.0)
def learn(model, e):
    """Store the row with the trees' sums and leaves, and go on with the tree in growth."""
    stored, room, growth = parts.STORED(model), size.room(model), parts.GROWTH(model)
    if stored.late < room - growth.rows:  # else the place is that of a row of the tree in growth
        store(model, stored.next, stored.ever % SAMPLE)
        stored.rows, stored.next = min(stored.rows + 1, room), (stored.next + 1) % room
        stored.late += 1
        stored.ever += 1
    if stored.rows >= 2 * LEAST:
        grow(model)
    return 0


@called
def store(model, at, latest):
    x, y, told, leaves = row.WIDE(model), row.Y(model), parts.TOLD(model), parts.LEAVES(model)
    codes, edges, values, missed = parts.CODES(model), parts.EDGES(model), parts.LATEST(model), parts.MISSED(model)
    targets, sums, leaf_of_row = parts.TARGETS(model), parts.SUMS(model), parts.LEAF_OF_ROW(model)
    for j in range(x.size):
        values[j, latest] = x[j] if x[j] < NOWHERE else NOWHERE
        codes[j, at] = code_of(edges[j], x[j])
        if codes[j, at] == 0:
            missed[j] = 1
    for k in range(told.size):
        targets[at, k] = y[k] if k < y.size else row.FACTS(model).log
        sums[at, k] = told[k]
    for t in range(leaves.size):
        leaf_of_row[t, at] = leaves[t]
    parts.WEIGHTS(model)[at] = row.FACTS(model).share


EXPERT = Expert(parts, answer, learn)
